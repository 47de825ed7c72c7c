"""A run that is killed at any point resumes, bit-identical to one that was not killed."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.faults.forked import content, crash_at, ending, fork

from fedloom._system import CRASH_POINTS, crash_point
from fedloom.core.ledger import Ledger
from fedloom.errors import ConfigError, DataError
from fedloom.experiments.recorder import Recorder
from fedloom.experiments.result import load_run
from fedloom.experiments.run import run
from fedloom.methods.fedavg import FedAvg

ROUNDS = 4
SETTINGS = {"model": "gcn-2x8", "rounds": ROUNDS, "participation": 0.7, "checkpoint_every": 1}
UNBEGUN = ("config-half", "config-written", "config-synced")  # config.json is not there yet
EVERY_ROUND = [
    p
    for p in CRASH_POINTS
    if p.partition("-")[0] in ("exchange", "round", "history", "ledger", "checkpoint", "models")
]
KILLS = [
    *(p for p in CRASH_POINTS if p != "history-cut"),
    *(f"{p}:3" for p in EVERY_ROUND if p != "history-cut"),
]
# One point of each kind. The others are slow tests.
QUICK = (
    "nothing-asked", "exchange-answered:3", "round-unclosed:3", "config-half", "config-renamed",
    "history-half:3", "ledger-written:3", "checkpoint-half:3", "checkpoint-between-renames:3",
    "models-written", "summary-half",
)  # fmt: skip


def places(*names, quick=QUICK):
    """Parameters of a test: places at which a run is killed. Those not in `quick` are slow."""
    return [pytest.param(n, marks=() if n in quick else pytest.mark.slow) for n in names]


@pytest.fixture(scope="module")
def unbroken(node_federation, tmp_path_factory):
    """Returns the folder of a run that was not killed."""
    done = {}

    def of(**settings):
        key = json.dumps(settings)
        if key not in done:
            done[key] = tmp_path_factory.mktemp("unbroken") / "x"
            go(node_federation, done[key], **settings)
        return done[key]

    return of


def go(federation, folder, **settings):
    return run("scaffold", federation, out=folder, **{**SETTINGS, **settings})


def differences(folder, other):
    """Returns what differs between the folders of two runs that should be equal.

    Time, memory and the engine's details are not compared.
    """
    here, there = load_run(folder), load_run(other)
    varying = ("seconds", "peak_rss_mb", "memory_predicted_mb", "engine_details")
    said = [
        {k: v for k, v in result.summary.items() if k not in varying} for result in (here, there)
    ]
    entries = [
        [{k: v for k, v in entry.items() if k != "seconds"} for entry in result.history]
        for result in (here, there)
    ]
    files = [
        {str(path): data for path, data in content(where).items()} for where in (folder, other)
    ]
    same = [
        path
        for path in files[1]
        if path.endswith(("ledger.csv", "schemas.json", "config.json"))
        or path.startswith("models/")
    ]
    return {
        *(key for key in said[1] if said[0].get(key) != said[1][key]),
        *({"history"} if entries[0] != entries[1] else ()),
        *(path for path in same if files[0].get(path) != files[1][path]),
        *(files[0].keys() ^ files[1].keys()),
    }


def rounds_done(folder):
    history = folder / "history.jsonl"
    return history.read_text().count("\n") if history.exists() else 0


@pytest.mark.parametrize("place", places(*KILLS))
def test_killed_anywhere_and_resumed_equals_unbroken(place, node_federation, unbroken, tmp_path):
    folder, redone = tmp_path / "x", []
    assert crash_at(place, lambda: go(node_federation, folder))
    if place in UNBEGUN:
        with pytest.raises(DataError, match=r"config\.json: No such file"):
            go(node_federation, folder, resume=True)
        return
    before = rounds_done(folder)
    go(
        node_federation,
        folder,
        resume=True,
        callbacks=lambda entry: redone.append(entry["round"]),
    )
    assert differences(folder, unbroken()) == set()
    assert len(redone) <= ROUNDS - before + 1  # at most one round is repeated


@pytest.mark.parametrize(
    "place",
    places(
        "history-cut",
        "ledger-half",
        "nothing-asked",
        "exchange-answered:2",
        "checkpoint-between-renames",
        "summary-half",
        quick=("history-cut",),
    ),
)
def test_a_resume_may_be_killed_too(place, node_federation, unbroken, tmp_path):
    assert crash_at("history-half:3", lambda: go(node_federation, tmp_path / "x"))
    assert crash_at(place, lambda: go(node_federation, tmp_path / "x", resume=True))
    go(node_federation, tmp_path / "x", resume=True)
    assert differences(tmp_path / "x", unbroken()) == set()


@pytest.mark.parametrize("engine", ["wire", "stacked", "processes", "stacked_processes"])
@pytest.mark.parametrize(
    "place",
    places(
        "nothing-asked",
        "exchange-answered:6",
        "checkpoint-between-renames:2",
        "models-half",
        quick=("exchange-answered:6",),
    ),
)
def test_every_engine_goes_on(engine, place, node_federation, unbroken, tmp_path):
    assert crash_at(place, lambda: go(node_federation, tmp_path / "x", engine=engine))
    go(node_federation, tmp_path / "x", engine=engine, resume=True)
    assert differences(tmp_path / "x", unbroken(engine=engine)) == set()


@pytest.mark.parametrize("every", [0, 3])
def test_with_fewer_checkpoints_more_is_done_again(every, node_federation, unbroken, tmp_path):
    assert crash_at(
        "round-closed:3", lambda: go(node_federation, tmp_path / "x", checkpoint_every=every)
    )
    seen = []
    go(
        node_federation,
        tmp_path / "x",
        checkpoint_every=every,
        resume=True,
        callbacks=lambda entry: seen.append(entry["round"]),
    )
    assert seen == ([1, 2, 3, 4] if every == 0 else [4])
    assert differences(tmp_path / "x", unbroken(checkpoint_every=every)) == set()


class Around(FedAvg):
    """Evaluates before, in and after its rounds, and adds a note."""

    def run(self, server):
        """Setup, rounds, fine-tuning."""
        server.ask(self.setup)
        server.evaluate(stage="before")
        server.state["model"] = server.model()
        for number in server.rounds(self.rounds):
            server.state["model"] = server.mean(self.train, model=server.state["model"])["model"]
            server.notes["rounds"] = number
            server.evaluate()
        self.finish(server)


@pytest.mark.parametrize(
    "place",
    places(
        "history-half",
        "history-written",
        "history-half:2",
        "history-half:4",
        "exchange-unsent:7",
        "models-half",
        quick=("history-half", "history-half:4"),
    ),
)
def test_what_comes_before_and_after_the_rounds_is_there_once(place, node_federation, tmp_path):
    method, settings = Around(rounds=2, finetune=2), {"model": "gcn-2x8", "checkpoint_every": 1}
    run(method, node_federation, out=tmp_path / "unbroken", **settings)
    assert crash_at(place, lambda: run(method, node_federation, out=tmp_path / "x", **settings))
    result = run(method, node_federation, out=tmp_path / "x", resume=True, **settings)
    assert [entry["stage"] for entry in result.history] == [
        "before",
        "train",
        "train",
        "finetune",
        "finetune",
    ]
    assert differences(tmp_path / "x", tmp_path / "unbroken") == set()


# ---- controls: the comparison notices what a resume does not restore ----
def forget_hash(self, server, original=Recorder._put_back_records):
    before = server.history_hash
    found = original(self, server)
    server.history_hash = before
    return found


def forget_ledger(self, server, original=Recorder._put_back_records):
    found = original(self, server)
    server.ledger = Ledger()
    return found


def forget_state(self, server, original=Recorder._put_back_records):
    return original(self, server)._replace(state={})


@pytest.mark.parametrize(
    ("spoilt", "seen"),
    [
        (forget_hash, "history_hash"),
        (forget_ledger, "ledger.csv"),
        (forget_ledger, "traffic"),
        (forget_state, "models/final/0.safetensors"),
        (forget_state, "models/best/0.safetensors"),
    ],
)
def test_a_resume_that_forgets_something_is_noticed(
    spoilt, seen, node_federation, unbroken, tmp_path, monkeypatch
):
    assert crash_at("round-closed:2", lambda: go(node_federation, tmp_path / "x"))
    monkeypatch.setattr(Recorder, "_put_back_records", spoilt)
    go(node_federation, tmp_path / "x", resume=True)
    assert seen in differences(tmp_path / "x", unbroken())


def test_a_misspelt_crash_point_is_refused(monkeypatch):
    monkeypatch.setenv("FEDLOOM_CRASH_AT", "histroy-half")
    with pytest.raises(ConfigError, match="'history-half'"):
        crash_point("history-half")


def test_without_the_variable_nobody_dies():
    assert ending(fork(lambda: [crash_point(name) for name in CRASH_POINTS])) == 0


# ---- the command line ----
SMALL = [
    "--dataset",
    "synthetic:nodes=150,classes=3,features=8",
    "--clients",
    "3",
    "--partition",
    "random",
    "--model",
    "gcn-2x8",
]


def command(*arguments, cwd, **environment):
    program = [sys.executable, "-c", "from fedloom.cli import main; main()", *map(str, arguments)]
    return subprocess.run(
        program,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, **environment},
    )


@pytest.mark.slow
def test_the_command_line_resumes_what_was_killed_and_leaves_what_is_completed(tmp_path):
    recipe = ("run", *SMALL, "--rounds", 3, "--set", "run.checkpoint_every=1")
    killed = command(*recipe, "--out", "x", cwd=tmp_path, FEDLOOM_CRASH_AT="ledger-half:4")
    assert killed.returncode == -signal.SIGKILL
    checkpoint = tmp_path / "x" / "checkpoint.safetensors"
    checkpoint.write_bytes(checkpoint.read_bytes()[:-1])
    resumed = command("resume", "x", "--json", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    (line,) = [line for line in resumed.stderr.splitlines() if "damaged" in line]
    assert line.startswith("resume: checkpoint.safetensors in 'x' is damaged")
    assert line.endswith("going on from checkpoint.previous.safetensors")
    unbroken = command(*recipe, "--out", "y", cwd=tmp_path)
    assert unbroken.returncode == 0
    assert differences(tmp_path / "x", tmp_path / "y") == set()
    before = content(tmp_path / "x")
    again = command("resume", "x", "--json", cwd=tmp_path)
    assert (again.returncode, json.loads(again.stdout)) == (0, json.loads(resumed.stdout))
    assert "this run is completed" in again.stderr
    assert content(tmp_path / "x") == before


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="the extra 'ray' is not installed")
def test_on_ray_it_goes_on_too_and_nothing_of_the_killed_cluster_is_left(tmp_path):
    recipe = ("run", *SMALL, "--rounds", 3, "--set", "run.checkpoint_every=1")
    on_ray = ("--set", "run.engine=ray", "--set", "run.workers=2")
    killed = command(
        *recipe,
        *on_ray,
        "--out",
        "x",
        cwd=tmp_path,
        FEDLOOM_CRASH_AT="exchange-answered:6",
        FEDLOOM_TEST=str(tmp_path),
    )
    assert killed.returncode == -signal.SIGKILL
    while born_with(f"FEDLOOM_TEST={tmp_path}"):  # Ray's processes notice it after about 40 s
        time.sleep(0.1)  # the suite's timeout is the limit
    resumed = command("resume", "x", "--json", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert command(*recipe, *on_ray, "--out", "y", cwd=tmp_path).returncode == 0
    assert differences(tmp_path / "x", tmp_path / "y") == set()
    in_the_loop = json.loads(command(*recipe, "--json", "--out", "z", cwd=tmp_path).stdout)
    assert json.loads(resumed.stdout)["history_hash"] == in_the_loop["history_hash"]


def born_with(variable):
    """Returns the processes with an environment variable, of any parent."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or belongs to another user
            if variable.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(folder.name)
    return found
