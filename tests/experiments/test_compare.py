"""`fedloom compare` and `fedloom report`, also in real processes that are killed."""

import json
import signal
import subprocess
import sys
import time

import pytest
from tests.cli.test_cli import SMALL, command, here  # noqa: F401  (a fixture)

from fedloom.experiments.report.spec import flat

GRID = [
    "compare",
    "--methods",
    "fedavg,fedprox",
    *SMALL,
    "--seeds",
    "2",
    "--rounds",
    "2",
    "--out",
    "x",
]


def summaries(folder):
    return {
        path.parent.name: json.loads(path.read_text())
        for path in folder.glob("runs/*/summary.json")
    }


def written(folder):
    return {
        path.parent.name: path.stat().st_mtime_ns for path in folder.glob("runs/*/summary.json")
    }


def page_data(path):
    text = path.read_text()
    return json.loads(text.partition('id="data">')[2].partition("</script>")[0])


@pytest.mark.slow
def test_compare_writes_a_report_and_caches_its_runs(tmp_path):
    first = command(*GRID, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert "6 of 6: " in first.stderr
    for row in ("local", "fedavg", "fedprox"):
        assert row in first.stdout
    assert {path.name for path in (tmp_path / "x").glob("*.*")} == {
        "table.csv",
        "table.md",
        "table.tex",
        "report.html",
    }
    before = written(tmp_path / "x")
    again = command(*GRID, "--json", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "6 of 6 runs are cached" in again.stderr
    assert written(tmp_path / "x") == before
    rows = {row["method"]: row for row in json.loads(again.stdout)["rows"]}
    for method, row in rows.items():
        scores = [
            s["accuracy"] for s in summaries(tmp_path / "x").values() if s["method"] == method
        ]
        assert row["mean"] == pytest.approx(sum(scores) / 2)
        assert row["seeds"] == 2


@pytest.mark.slow
def test_after_a_kill_only_unfinished_cells_run_again(tmp_path):
    grid = [*GRID, "--jobs", "1", "--set", "method.rounds=150"]
    started = subprocess.Popen(
        [sys.executable, "-c", "from fedloom.cli import main; main()", *grid],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    folder = tmp_path / "x"
    while len(written(folder)) < 2 or len(list(folder.glob("runs/*/history.jsonl"))) < 3:
        assert started.poll() is None
        time.sleep(0.02)
    started.send_signal(signal.SIGKILL)
    started.communicate()
    while len(written(folder)) < len(list(folder.glob("runs/*/history.jsonl"))):
        time.sleep(0.05)  # the running cell notices that its parent is gone, and ends
    done = {
        name: when
        for name, when in written(folder).items()
        if summaries(folder)[name]["status"] == "completed"
    }
    assert 2 <= len(done) < 6
    again = command(*grid, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert f"{len(done)} of 6 runs are cached" in again.stderr
    assert {name: when for name, when in written(folder).items() if name in done} == done
    assert {s["status"] for s in summaries(folder).values()} == {"completed"}


def test_a_failed_cell_is_named_and_the_exit_code_is_1(tmp_path, here):  # noqa: F811
    done = here(
        "compare",
        "--methods",
        "fedavg,gcfl+",
        *SMALL,
        "--seeds",
        1,
        "--rounds",
        1,
        "--out",
        "x",
        cwd=tmp_path,
    )
    assert done.returncode == 1
    assert "1 of 3 cells did not complete" in done.stderr
    assert "gcfl+" in done.stdout
    assert "does graph tasks" in done.stdout
    (left_out,) = page_data(tmp_path / "x" / "report.html")["left_out"]
    assert "gcfl+" in left_out["folder"]
    assert "fedavg" in done.stdout


def test_a_grid_from_a_file_with_settings_of_one_method(tmp_path, here):  # noqa: F811
    (tmp_path / "grid.toml").write_text(
        '[compare]\nmethods = ["fedprox"]\ndatasets = "synthetic:nodes=80,classes=2"\n'
        'partitions = ["random", "uniform"]\nclients = 2\nmodels = ["gcn-2x4"]\nseeds = 1\n'
        '[method]\nrounds = 2\n[method.fedprox]\nmu = 0.5\n[run]\nengine = "stacked"\n'
    )
    done = here(
        "compare",
        "grid.toml",
        "--set",
        "fedprox.mu=0.25",
        "--out",
        "x",
        "--no-report",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    found = summaries(tmp_path / "x").values()
    assert {(s["method"], s["partition"], s["engine"]) for s in found} == {
        (method, partition, "stacked")
        for method in ("local", "fedprox")
        for partition in ("random", "uniform")
    }
    assert {s["config"]["method"]["mu"] for s in found if s["method"] == "fedprox"} == {0.25}
    assert not (tmp_path / "x" / "report.html").exists()


MISTAKES = {
    "method": (["--methods", "fedavgg"], "unknown method 'fedavgg'. Did you mean 'fedavg'?"),
    "dataset": (["--dataset", "cora,sora"], "unknown dataset 'sora'. Did you mean 'cora'?"),
    "metric": (["--metric", "f1"], "unknown metric 'f1'."),
    "executor": (["--on", "slurm"], "unknown on 'slurm'. Valid: processes, ray"),
    "jobs": (["--jobs", "-1"], "jobs is -1, must be a whole number at least 0"),
    "setting of all": (["--set", "method.mu=1"], "method.mu is set for all methods"),
    "no file": (["nothing.toml"], "cannot read 'nothing.toml'"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_line_and_nothing_runs(case, tmp_path, here):  # noqa: F811
    arguments, words = MISTAKES[case]
    done = here("compare", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_report_of_folders_names_what_it_leaves_out(tmp_path, here):  # noqa: F811
    for method in ("local", "fedavg"):
        here(
            "run",
            "--method",
            method,
            *SMALL,
            "--rounds",
            2,
            "--out",
            f"runs/{method}",
            cwd=tmp_path,
        )
    here("run", "--method", "fedprox", *SMALL, "--rounds", 2, "--out", "runs/killed", cwd=tmp_path)
    (tmp_path / "runs" / "killed" / "summary.json").unlink()
    done = here(
        "report",
        "runs",
        "--out",
        "page.html",
        "--figures",
        "figures",
        "--formats",
        "svg,png",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "left out: runs/killed: unfinished: under way or killed, last round 2" in done.stderr
    data = page_data(tmp_path / "page.html")
    assert [(each["folder"], each["reason"].partition(":")[0]) for each in data["left_out"]] == [
        ("runs/killed", "unfinished")
    ]
    drawn = {path.name for path in (tmp_path / "figures").iterdir()}
    wanted = {
        f"{figure['id']}.{suffix}"
        for figure in flat(data["figures"])
        if figure["kind"] not in ("table", "note")
        for suffix in ("svg", "png")
    }
    assert drawn == wanted
    assert len(drawn) == 28


def test_a_report_without_runs_is_refused(tmp_path, here):  # noqa: F811
    done = here("report", "runs", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (
        2,
        "fedloom: there is no completed run to compare; runs: there is no run folder\n",
    )
    here("run", *SMALL, "--rounds", 1, "--out", "a", cwd=tmp_path)
    unknown = here("report", "a", "--figures", "f", "--formats", "gif", cwd=tmp_path)
    assert unknown.returncode == 2
    assert "unknown format of figures: 'gif'. Valid: pdf, png, svg" in unknown.stderr
