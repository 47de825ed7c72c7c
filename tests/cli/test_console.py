"""What the commands print: tables of 80 columns, JSON, help, completion; baselines; locks."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.metadata import version

import pytest
import typer
from rich.cells import cell_len
from rich.console import Console

from fedloom import cli, commands
from fedloom._system import LOCK, locked
from fedloom.core.registry import method_names
from fedloom.data.datasets import catalogue
from fedloom.data.partition import partitions
from fedloom.data.synthetic import GENERATORS
from fedloom.engines import engine_choices
from fedloom.errors import ConfigError, hint
from fedloom.experiments import completion
from fedloom.experiments.recipe_files import entries, papers
from fedloom.experiments.report import console
from fedloom.experiments.run_folder import find, gather
from fedloom.nn.build import architectures

SMALL = [
    *("--dataset", "synthetic:nodes=150,classes=3,features=8"),
    *("--clients", "3", "--partition", "random", "--model", "gcn-2x8"),
]


@pytest.fixture
def here(monkeypatch, capsys):
    """Returns a function that runs a command in this process, on a terminal of 80 columns.

    It returns exit code, stdout and stderr.
    """

    def call(*arguments, cwd):
        monkeypatch.chdir(cwd)
        monkeypatch.setenv("COLUMNS", "80")
        narrow = Console(markup=False, highlight=False)
        monkeypatch.setattr(console, "out", narrow)
        monkeypatch.setattr(commands, "out", narrow)
        monkeypatch.setattr(sys, "argv", ["fedloom", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code or 0, *capsys.readouterr()

    return call


# ---- tables ----
@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A run with baselines in `run`, a comparison of four tasks in `grid`, a study in `study`."""
    place = tmp_path_factory.mktemp("folders")
    small = ["--rounds", "2", "--model", "gcn-2x8"]
    clients = "bank-of-the-north,bank-of-the-south-islands,c"
    grid = [
        "--methods",
        "fedavg,fedgh",
        "--seeds",
        "1",
        "--jobs",
        "1",
        "--set",
        "fedgh.base=fedtad",
    ]
    grid += ["--dataset", "synthetic:nodes=150,synthetic:nodes=160", "--clients", "2,3"]
    study = ["--method", "fedprox", *SMALL, "--rounds", "2", "--trials", "2", "--out", "study"]
    for command in (
        ["run", *SMALL, "--rounds", "2", "--baselines", "local,central,fedprox", "--out", "run"],
        ["compare", *grid, "--partition", "louvain-cyclic", *small, "--out", "grid", "--no-report"],
        ["tune", *study],
    ):
        done = subprocess.run(
            [sys.executable, "-c", "from fedloom.cli import main; main()", *command],
            cwd=place,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "COLUMNS": "80"},
        )
        assert done.returncode == 0, done.stderr
        (place / f"{command[0]}.txt").write_text(done.stdout)
    summary = json.loads((place / "run" / "summary.json").read_text())
    for row, name in zip(summary["per_client"], clients.split(","), strict=True):
        row["id"] = name
    (place / "run" / "summary.json").write_text(json.dumps(summary))
    return place


def require_80_columns(text):
    assert text.strip()
    for line in text.splitlines():
        assert cell_len(line) <= 80, line
        assert "…" not in line, line


@pytest.mark.slow
@pytest.mark.parametrize("command", ["run", "compare", "tune"])
def test_tables_of_results_have_80_columns(folders, command):
    text = (folders / f"{command}.txt").read_text()
    require_80_columns(text)
    words = {
        "run": ["fedavg", "local", "central", "fedprox", "engine: stacked (auto)", "best round"],
        "compare": ["fedgh + fedtad", "over local", "below best", "louvain-cyclic", "mean"],
        "tune": ["validation", "method.lr=", "as given"],
    }
    assert all(word in text for word in words[command]), text


@pytest.mark.slow
def test_a_shown_run_has_80_columns_long_names_and_its_baselines(folders, here):
    code, text, _ = here("show", "run", cwd=folders)
    assert code == 0
    require_80_columns(text)
    assert "bank-of-the-south-islands" in text
    for method in ("local", "central", "fedprox"):
        assert re.search(rf"^{method} ", text, re.M), method
    _, wide, _ = here("show", "run", "--wide", cwd=folders)
    assert all(word in wide for word in ("mean over clients", "weighted F1", "scalars up", "final"))
    assert max(map(len, wide.splitlines())) > 80
    _, content, _ = here("show", "run", "--json", cwd=folders)
    assert set(json.loads(content)["baselines"]) == {"local", "central", "fedprox"}


LISTS = {
    "methods": ["fedsage+", "fed-pub"],
    "methods fedstruct": ["ICLR", "settings", "phases", "secure sums"],
    "datasets": ["amazon-ratings", "ogbn-products", "2,449,029 nodes", "188 graphs", "local"],
    "partitions": ["louvain-cyclic", "dirichlet"],
    "models": ["gcnii", "appnp"],
    "recipes": ["fedstruct/chameleon-louvain-cyclic-10-unpruned", "expected", "minutes"],
    "partition --dataset synthetic:nodes=900,classes=40 --partition random": ["homophily", "cut"],
    "keys localhost --party bank-of-the-north --party b": ["ca.crt", "bank-of-the-north"],
    "--help": ["compare", "--version", "--install-completion"],
}


@pytest.mark.parametrize("command", LISTS)
def test_lists_have_80_columns(command, tmp_path, here):
    code, text, err = here(*command.split(), cwd=tmp_path)
    assert code == 0, err
    require_80_columns(text)
    assert all(word in text for word in LISTS[command]), text


@pytest.mark.parametrize("command", ["datasets", "recipes examples"])
def test_wide_lists_have_more_columns(command, tmp_path, here):
    _, narrow, _ = here(*command.split(), cwd=tmp_path)
    _, wide, _ = here(*command.split(), "--wide", cwd=tmp_path)
    for word in {"datasets": ["description", "split"]}.get(command, ["dataset", "method"]):
        assert word in wide
        assert word not in narrow


def test_lists_as_json(tmp_path, here):
    def listed(*command):
        code, text, _ = here(*command, "--json", cwd=tmp_path)
        assert code == 0
        return json.loads(text)

    assert [each["name"] for each in listed("methods")] == list(method_names())
    assert [each["name"] for each in listed("models")] == list(architectures())
    names = {each["name"]: each for each in listed("partitions")}
    assert list(names) == list(partitions())
    assert names["dirichlet"]["divides_sets_of_graphs"]
    assert names["louvain"]["settings"] == {"delta": 20, "resolution": 1.0}
    known = {each["name"]: each for each in listed("datasets")}
    assert list(known) == list(catalogue())
    assert (known["mutag"]["graphs"], known["cora"]["nodes"]) == (188, 2708)
    recipes = listed("recipes")
    assert len(recipes) == sum(len(entries(paper)) for paper in papers())
    assert recipes[0].keys() >= {"recipe", "dataset", "partition", "clients", "method", "expect"}
    one = listed("methods", "fedprox")
    assert one["settings"]["mu"]["default"] == 0.001
    assert one["phases"]["train"]["answers"] == {"model": "~model"}


# ---- options ----
def test_the_version_is_printed(tmp_path, here):
    assert here("--version", cwd=tmp_path)[:2] == (0, f"fedloom {version('fedloom')}\n")


def test_shortcuts_are_settings(tmp_path, here):
    options = ("--epochs", 2, "--lr", 0.05, "--rounds", 1, "--device", "cpu", "--json")
    code, text, err = here("run", *SMALL, *options, cwd=tmp_path)
    assert code == 0, err
    config = json.loads(text)["config"]
    assert (config["method"]["epochs"], config["method"]["lr"]) == (2, 0.05)
    assert config["run"]["device"] == "cpu"
    assert json.loads(text)["seconds"]["load"] > 0


def test_a_run_and_its_baselines_say_how_long_loading_took(tmp_path, here):
    options = ("--rounds", 1, "--baselines", "local", "--json")
    code, text, err = here("run", *SMALL, *options, cwd=tmp_path)
    assert code == 0, err
    summary = json.loads(text)
    assert summary["baselines"]["local"]["seconds"]["load"] == summary["seconds"]["load"] > 0


def test_every_argument_is_explained_in_the_help(tmp_path, here):
    group = typer.main.get_command(cli.app)
    for name, command in group.commands.items():
        _, text, _ = here(name, "--help", cwd=tmp_path)
        prose = text.partition("Arguments")[0].partition("Usage:")[2].partition("\n")[2]
        for parameter in command.params:
            if parameter.param_type_name == "argument":
                shown = parameter.metavar or parameter.name.upper()
                assert shown in prose, (name, shown)


def test_a_set_of_graphs_gets_a_partition_that_fits_and_says_so(tmp_path, here):
    small = ("--clients", 3, "--rounds", 1, "--model", "gcn-2x8", "--json")
    dataset = "synthetic-graphs:graphs=40"
    code, text, err = here("run", "--dataset", dataset, *small, cwd=tmp_path)
    assert code == 0, err
    assert json.loads(text)["partition"] == "dirichlet"
    assert "3 clients by dirichlet (a set of graphs; --partition chooses another" in err
    blocks = ("--dataset", "synthetic:nodes=200,blocks=2", "--rounds", 1, "--json")
    code, text, err = here("run", *blocks, cwd=tmp_path)
    assert (json.loads(text)["partition"], json.loads(text)["clients"]) == ("blocks", 2)
    assert "blocks of their own" in err


# ---- completion ----
def test_completed_names_are_those_of_the_lists():
    assert completion.methods() == sorted(method_names())
    assert completion.datasets() == [*catalogue(), *GENERATORS]
    assert completion.partitions() == list(partitions())
    assert sorted(completion.models()) == sorted(architectures())
    assert completion.engines() == engine_choices()
    assert completion.papers() == papers()
    assert completion.recipes() == [f"{p}/{e}" for p in papers() for e in entries(p)]
    assert cli.METHODS("fedavg,fedprox") == ["fedavg,fedprox"]


def test_a_shell_completes_names_without_torch(tmp_path):
    program = (
        "import sys; from fedloom.cli import main\n"
        "try: main()\n"
        "finally: assert 'torch' not in sys.modules, 'torch was imported'"
    )
    environment = {
        **os.environ,
        "_FEDLOOM_COMPLETE": "complete_bash",
        "COMP_WORDS": "fedloom run --dataset cit",
        "COMP_CWORD": "3",
        "_TYPER_COMPLETE_ARGS": "fedloom run --dataset cit",
    }
    (tmp_path / "fedloom").write_text(program)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "fedloom")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["citeseer"], done.stderr
    assert "torch was imported" not in done.stderr


# ---- hints ----
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("coraa", "cora"),
        ("Cora", "cora"),
        ("croa", "cora"),
        ("citseer", "citeseer"),
        ("reddit3", "reddit"),
        ("facebook", ""),
        ("x", ""),
        ("", ""),
        ("ccc", ""),
        ("photos-of-cats", ""),
    ],
)
def test_hints_are_near_names_only(given, expected):
    assert hint(given, ["cora", "citeseer", "reddit", "photo", "cs"]) == (
        f" Did you mean {expected!r}?" if expected else ""
    )


# ---- baselines ----
def test_baselines_are_kept_shown_and_found(tmp_path, here):
    code, text, err = here(
        *("run", *SMALL, "--rounds", 2, "--baselines", "local, central", "--out", "x", "--json"),
        cwd=tmp_path,
    )
    assert code == 0, err
    for name in ("local", "central"):
        place = tmp_path / "x" / "baselines" / name
        assert {p.name for p in place.iterdir()} >= {"config.json", "summary.json", "history.jsonl"}
        assert not (place / "models").exists()
    _, again, _ = here("show", "x", "--json", cwd=tmp_path)
    assert json.loads(again) == json.loads(text)
    assert [p.name for p in find(tmp_path / "x")] == ["x", "central", "local"]
    runs, left_out = gather([tmp_path / "x"])
    assert ({run.summary["method"] for run in runs}, left_out) == (
        {"fedavg", "central", "local"},
        [],
    )
    # A second run keeps the same baseline. The report takes the first and says nothing about it.
    here(*("run", *SMALL, "--rounds", 2, "--method", "fedprox"), *("--out", "y"), cwd=tmp_path)
    done = here(*("run", *SMALL, "--rounds", 2, "--out", "z"), "--baselines", "local", cwd=tmp_path)
    assert done[0] == 0, done[2]
    code, _, err = here("report", "x", "y", "z/baselines/local", cwd=tmp_path)
    assert (code, "left out" in err) == (0, False), err


def test_a_stopped_baseline_is_continued(tmp_path, here, monkeypatch):
    real = commands._with_progress

    def stop_in_the_baseline(method, execute, *more):
        if method == "local":
            raise KeyboardInterrupt
        return real(method, execute, *more)

    with monkeypatch.context() as patched:
        patched.setattr(commands, "_with_progress", stop_in_the_baseline)
        code, text, err = here(
            "run", *SMALL, "--rounds", 2, "--baselines", "local", "--out", "x", cwd=tmp_path
        )
    assert (code, text) == (130, "")
    assert "the run in x is complete, its baselines are not" in err
    assert "to continue them: fedloom resume x" in err
    code, text, err = here("resume", "x", "--json", cwd=tmp_path)
    assert code == 0, err
    assert json.loads(text)["baselines"]["local"]["status"] == "completed"
    code, text, err = here("resume", "x", cwd=tmp_path)
    assert "this run is completed" in err


# ---- Ctrl-C ----
def test_a_stopped_run_says_what_is_kept_and_how_to_resume(tmp_path, here, monkeypatch):
    def stopped(number):
        def execute(method, execute, *more):
            def stop(entry):
                if entry["round"] == number:
                    raise KeyboardInterrupt

            return execute([stop, *more])

        return execute

    options = ("run", *SMALL, "--rounds", 5, "--set", "run.checkpoint_every=2", "--out", "my run")
    with monkeypatch.context() as patched:
        patched.setattr(commands, "_with_progress", stopped(4))
        code, text, err = here(*options, cwd=tmp_path)
    assert (code, text) == (130, "")
    assert "stopped after round 4 of 5; my run keeps history, scores and models so far" in err
    assert "to continue after round 2, from the checkpoint: fedloom resume 'my run'" in err
    _, shown, err = here("show", "my run", cwd=tmp_path)
    assert "stopped (interrupted)" in shown
    code, text, _ = here("resume", "my run", "--json", cwd=tmp_path)
    assert (code, json.loads(text)["rounds"]) == (0, 5)
    with monkeypatch.context() as patched:
        patched.setattr(commands, "_with_progress", stopped(1))
        code, _, err = here("run", *SMALL, "--rounds", 3, "--out", "y", cwd=tmp_path)
    assert "to continue with round 1: no checkpoint: fedloom resume y" in err


def started(tmp_path, *arguments):
    """Starts a command in a process of its own, in which Ctrl-C has its usual effect."""
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from fedloom.cli import main; main()"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(condition, process):
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["compare", "tune"])
def test_a_stopped_grid_or_study_says_how_to_continue(command, tmp_path):
    if command == "tune":
        pytest.importorskip("optuna")
        arguments = ["tune", *SMALL, "--trials", "10000", "--rounds", "2", "--out", "place"]
        marks = tmp_path / "place" / "trials"
    else:
        arguments = ["compare", *SMALL, "--seeds", "500", "--rounds", "2", "--out", "place"]
        marks = tmp_path / "place" / "runs"
    process = started(tmp_path, *arguments)
    try:
        wait_for(lambda: len(list(marks.glob("*/summary.json"))) > 2, process)
        second = started(tmp_path, *arguments)
        _, refused = second.communicate(timeout=200)
        assert second.returncode == 2, refused
        assert f"(pid {process.pid} on " in refused
        assert " ".join(arguments) in refused
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 130, err
    lines = err.strip().splitlines()[-2:]
    assert re.match(r"stopped: \d+ (trials are over|of 1000 runs are complete), place", lines[0])
    assert lines[1] == f"to continue: fedloom {' '.join(arguments)}"


# ---- locks ----
def test_a_folder_has_one_process_at_a_time(tmp_path):
    with locked(tmp_path, "run"):
        host = re.escape(os.uname().nodename)
        described = rf"pid {os.getpid()} on {host}, since \d{{4}}-\d\d-\d\d [\d:]+ UTC: .+"
        assert re.match(described, (tmp_path / LOCK).read_text())
        words = rf"another process works on the run in .* \({described}"
        with pytest.raises(ConfigError, match=words), locked(tmp_path, "run"):
            pass
    assert list(tmp_path.iterdir()) == []
    with locked(tmp_path, "run"):
        pass


def test_a_forked_process_does_not_hold_the_lock(tmp_path):
    here, there = os.pipe()
    with locked(tmp_path, "run"):
        child = os.fork()
        if child == 0:
            os.write(there, b"started")
            time.sleep(60)
            os._exit(0)
        assert os.read(here, 7) == b"started"
        handle = os.open(tmp_path / LOCK, os.O_RDWR)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # free, though the child lives
    finally:
        os.close(handle)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize("arguments", [("resume", "x"), ("run", *SMALL, "--out", "x")])
def test_the_second_process_on_a_run_folder_is_refused(arguments, tmp_path, here):
    here("run", *SMALL, "--rounds", 2, "--out", "x", cwd=tmp_path)
    (tmp_path / "x" / "summary.json").unlink()
    before = sorted(path.name for path in (tmp_path / "x").iterdir())
    with locked(tmp_path / "x", "run"):
        code, text, err = here(*arguments, cwd=tmp_path)
    assert (code, text) == (2, "")
    last = err.strip().splitlines()[-1]
    assert f"another process works on the run in 'x' (pid {os.getpid()} on " in last
    assert sorted(path.name for path in (tmp_path / "x").iterdir()) == before


@pytest.mark.slow
def test_the_lock_of_a_killed_process_is_free(tmp_path):
    options = ("run", *SMALL, "--rounds", 100000, "--out", "x", "--engine", "processes")
    process = started(tmp_path, *options, "--set", "run.workers=2")
    history = tmp_path / "x" / "history.jsonl"
    wait_for(lambda: history.exists() and history.read_text().count("\n") > 2, process)
    refused = started(tmp_path, "resume", "x")
    _, err = refused.communicate(timeout=200)
    assert (refused.returncode, f"(pid {process.pid} on " in err) == (2, True), err
    process.kill()
    process.communicate()
    with locked(tmp_path / "x", "run"):
        pass


# ---- bad input ----
BAD = {
    "a device that is not there": (["run", "--device", "cuda"], ["run.device", "'cuda'", "cpu"]),
    "epochs of a method without": (
        ["run", "--method", "fedsgd", "--epochs", "3"],
        ["fedsgd", "epochs"],
    ),
    "a learning rate of 0": (["run", "--lr", "0"], ["method.lr", "above 0"]),
    "a method as recipe": (["run", "fedavg"], ["'fedavg'", "--method fedavg"]),
    "a dataset as recipe": (["run", "cora"], ["'cora'", "--dataset cora"]),
    "workers of the loop": (
        ["run", "--engine", "loop", "--set", "run.workers=2"],
        ["run.workers", "auto, processes, stacked_processes or ray"],
    ),
    "checkpoints": (["run", "--set", "run.checkpoint_every=-2"], ["checkpoint_every", "-1"]),
    "unknown baseline": (["run", *SMALL, "--baselines", "locl"], ["'locl'", "'local'"]),
    "unknown method to show": (["methods", "fedavgg"], ["'fedavgg'", "'fedavg'"]),
    "unknown metric": (["compare", *SMALL, "--metric", "acuracy"], ["'acuracy'", "'accuracy'"]),
    "unknown axis": (["compare", "--dataset", "coraa"], ["'coraa'", "'cora'"]),
    "nothing to resume": (["resume", "nowhere"], ["nowhere", "not a run folder"]),
    "nothing to report": (["report", "nowhere"], ["nowhere"]),
    "an option of another command": (["show", "x", "--rounds", "3"], ["--rounds"]),
    "a missing argument": (["show"], ["FOLDER"]),
    "a file that is no run": (["show", "file"], ["file", "not a run folder"]),
    "a number of trials": (["tune", *SMALL, "--trials", "0"], ["trials", "0"]),
    "a folder that is no graph": (["run", "--dataset", "./empty"], ["empty"]),
    "a set that is not TOML": (["run", "--set", "method.lr"], ["--set"]),
    "a setting of two methods": (["compare", "--set", "fedprox.mu=1"], ["fedprox"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_code_2(case, tmp_path, here):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    arguments, words = BAD[case]
    code, text, err = here(*arguments, cwd=tmp_path)
    assert (code, text) == (2, ""), err
    lines = [line for line in err.strip().splitlines() if not line.startswith("loading")]
    assert len(lines) == 1, err
    assert all(word in lines[0] for word in words), lines[0]
    assert "Traceback" not in err
