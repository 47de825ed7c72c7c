"""Grids: their cells, their executors, and cached runs."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fedloom.errors import ConfigError
from fedloom.experiments import executor
from fedloom.experiments.executor import End, Processes, State, Step, execute
from fedloom.experiments.grid import assigned, cell, cells, is_done, read_axes, run_cell
from fedloom.experiments.run_folder import is_completed, read_history

TOY = {
    "data": {"split": "50/20/30"},
    "model": {"dropout": 0.0},
    "compare": {
        "datasets": ["synthetic:nodes=60,classes=3,features=8"],
        "partitions": "random",
        "clients": 3,
        "models": "gcn-2x4",
        "seeds": 2,
    },
}


def toy(methods, **tables):
    return {**TOY, **tables, "compare": {**TOY["compare"], "methods": methods}}


def nothing(*_):
    """Ignores the progress."""


def methods_of(found):
    return [(c.method, c.seed) for c in found]


# ---- cells ----
def test_local_is_always_included_and_seeds_are_outermost(tmp_path):
    assert methods_of(cells(toy("fedavg"), tmp_path)) == [
        ("local", 0),
        ("fedavg", 0),
        ("local", 1),
        ("fedavg", 1),
    ]
    assert methods_of(cells(toy(["fedavg", "local"]), tmp_path))[:2] == [
        ("fedavg", 0),
        ("local", 0),
    ]


def test_the_grid_has_every_combination(tmp_path):
    axes = {
        "methods": "local,fedavg",
        "datasets": "cora,citeseer",
        "partitions": ["louvain", "metis"],
        "clients": "5,10",
        "seeds": 3,
    }
    found = cells({"compare": axes}, tmp_path)
    assert len(found) == len({c.name for c in found}) == 2 * 2 * 2 * 2 * 3
    mixed = cells({"compare": {"models": "gcn-2x64+norm/gat,sage", "seeds": 1}}, tmp_path)
    assert {c.tables["model"]["name"] for c in mixed} == {"gcn-2x64+norm,gat", "sage"}
    made = cells(
        {"compare": {"datasets": "synthetic:nodes=50,classes=2,cora", "seeds": 1}}, tmp_path
    )
    assert {c.tables["data"]["dataset"] for c in made} == {"synthetic:nodes=50,classes=2", "cora"}


def test_common_settings_reach_the_methods_that_have_them(tmp_path):
    found = {
        c.method: c.tables["method"]
        for c in cells(toy("fedavg,opfgl", method={"rounds": 7, "lr": 0.5}), tmp_path)
    }
    assert (found["fedavg"]["rounds"], found["local"]["rounds"], found["opfgl"]["rounds"]) == (
        7,
        7,
        1,
    )
    assert found["fedavg"]["lr"] == found["local"]["lr"] == 0.5


def test_settings_of_one_method_reach_no_other(tmp_path):
    tables = assigned(
        toy("fedprox,moon,fed-pub"),
        ["fedprox.mu=0.25", "method.rounds=4", "fed-pub.scale=3"],
        ("fedprox", "moon", "fed-pub"),
    )
    found = {c.method: c.tables["method"] for c in cells(tables, tmp_path)}
    assert (
        found["fedprox"]["mu"],
        found["moon"]["mu"],
        found["fed-pub"]["scale"],
        found["moon"]["rounds"],
    ) == (0.25, 1.0, 3.0, 4)


BAD = {
    "unknown axis": (
        {"compare": {"method": "fedavg"}},
        r"setting in \[compare\]: 'method'. Did you mean 'methods'",
    ),
    "no names": ({"compare": {"methods": ""}}, "compare.methods is '', must be names"),
    "clients in words": (
        {"compare": {"clients": "ten"}},
        "compare.clients is 'ten', must be whole numbers",
    ),
    "seeds": ({"compare": {"seeds": 0}}, "compare.seeds is 0, must be a whole number at least 1"),
    "unknown dataset": ({"compare": {"datasets": "corra"}}, "dataset 'corra'. Did you mean 'cora'"),
    "unknown method": (
        {"compare": {"methods": "fedavgg"}},
        "method 'fedavgg'. Did you mean 'fedavg'",
    ),
    "method of another grid": (
        {"method": {"moon": {"mu": 1}}, "compare": {"methods": "fedavg"}},
        r"method in a table \[method.NAME\]: 'moon'",
    ),
    "own setting for all": ({"method": {"mu": 1}}, "method.mu is set for all methods.*METHOD.mu"),
    "axis elsewhere": (
        {"data": {"dataset": "cora"}},
        r"data.dataset is an axis of the grid: give it in \[compare\]",
    ),
    "setting": ({"method": {"fedavg": {"mu": 1}}}, "setting of method 'fedavg': 'mu'"),
    "value": ({"method": {"rounds": 0}}, "method.rounds is 0"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_mistake_is_named_before_anything_runs(case, tmp_path):
    tables, words = BAD[case]
    with pytest.raises(ConfigError, match=words):
        cells(tables, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_cells_name_depends_on_all_settings(tmp_path):
    one = cell({"method": {"name": "fedavg"}}, tmp_path)
    assert one == cell(
        {"method": {"name": "fedavg", "rounds": 100}, "data": {"dataset": "cora"}}, tmp_path
    )  # defaults count as settings
    others = [
        {"method": {"rounds": 99}},
        {"model": {"dropout": 0.1}},
        {"partition": {"delta": 5}},
        {"run": {"evaluate_every": 2}},
    ]
    assert (
        len(
            {
                one.name,
                *(
                    cell({"method": {"name": "fedavg"}, **tables}, tmp_path).name
                    for tables in others
                ),
            }
        )
        == 5
    )


def test_a_cells_name_depends_on_the_method_file(tmp_path):
    own = tmp_path / "mine.py"
    text = "from fedloom.methods.fedavg import FedAvg\nclass Mine(FedAvg):\n    '''Mine.'''\n"
    own.write_text(text)
    tables = {"method": {"name": str(own)}}
    before = cell(tables, tmp_path).name
    assert before == cell(tables, tmp_path).name
    own.write_text(text + "    epochs: int = 3\n")
    assert cell(tables, tmp_path).name != before


def test_the_axes_have_defaults():
    assert read_axes({}).methods == ("local", "fedavg")
    assert read_axes({}).seeds == 3


# ---- running ----
def test_finished_cells_are_cached(tmp_path):
    wanted = cells(toy("fedavg", method={"rounds": 2}), tmp_path)
    heard = []
    state = execute(wanted, Processes(2), lambda s, event: heard.append(event))
    assert not state.failed
    assert all(is_completed(c.folder) for c in wanted)
    assert {e.cell.name for e in heard if isinstance(e, End)} == {c.name for c in wanted}
    before = {c.name: (c.folder / "summary.json").stat().st_mtime_ns for c in wanted}
    again = execute(wanted, Processes(2), nothing)
    assert again.kept == wanted
    assert not again.ended
    assert before == {c.name: (c.folder / "summary.json").stat().st_mtime_ns for c in wanted}


def test_a_cell_is_bit_identical_to_a_run(tmp_path):
    (one, *_) = cells(toy("local", method={"rounds": 3}), tmp_path)
    execute([one], Processes(1), nothing)
    from fedloom.experiments.recipe import make_recipe

    alone = make_recipe(one.tables).execute()
    assert (
        json.loads((one.folder / "summary.json").read_text())["history_hash"]
        == alone.summary["history_hash"]
    )


def test_a_failed_cell_is_named_and_the_others_go_on(tmp_path):
    graphs_only = cells(toy("gcfl+,fedavg", method={"rounds": 1}), tmp_path)
    state = execute(graphs_only, Processes(2), nothing)
    assert {end.cell.method for end in state.failed} == {"gcfl+"}
    assert all(end.status == "failed" and "does graph tasks" in end.cause for end in state.failed)
    assert state.done == len(graphs_only) == 6


@pytest.mark.slow
def test_a_cell_whose_process_is_killed_is_named_and_the_others_go_on(tmp_path, monkeypatch):
    wanted = cells(toy("fedavg", method={"rounds": 1}), tmp_path)

    def dies(each, report):
        if each.method == "fedavg":
            os.kill(os.getpid(), signal.SIGKILL)
        run_cell(each, report)

    monkeypatch.setattr(executor, "run_cell", dies)
    state = execute(wanted, Processes(2), nothing)
    assert [(end.cell.method, end.cause) for end in state.failed] == [
        ("fedavg", "its process was ended by SIGKILL (out of memory?)")
    ] * 2
    assert is_done(wanted[0])


def test_an_unfinished_cell_resumes_from_its_checkpoint(tmp_path):
    (one, *_) = cells(toy("local", method={"rounds": 6}, run={"checkpoint_every": 2}), tmp_path)
    (other, *_) = cells(
        toy("local", method={"rounds": 6}, run={"checkpoint_every": 2}), tmp_path / "unbroken"
    )
    run_cell(other)

    class Enough(Exception):  # noqa: N818
        """Stops a run."""

    def stop(entry):
        if entry["round"] == 5:
            raise Enough

    with pytest.raises(Enough):
        run_cell(one, stop)
    assert not is_done(one)
    seen = []
    run_cell(one, lambda entry: seen.append(entry["round"]))
    assert seen == [5, 6]
    hashes = [
        json.loads((c.folder / "summary.json").read_text())["history_hash"] for c in (one, other)
    ]
    assert hashes[0] == hashes[1]
    assert [e["round"] for e in read_history(one.folder)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("damage", ["summary.json", "config.json", "partition alone"])
def test_a_damaged_folder_is_renamed_and_the_cell_runs_again(damage, tmp_path):
    (one, *_) = cells(toy("local", method={"rounds": 1}), tmp_path)
    if damage == "partition alone":
        one.folder.mkdir()
        (one.folder / "partition.json").write_text("{}")
    else:
        run_cell(one)
        (one.folder / "summary.json").write_text('{"status": ')
        (one.folder / damage).write_text('{"status": ')
    assert not is_done(one)
    run_cell(one)
    assert is_done(one)
    assert one.folder.with_name(one.name + ".damaged1").is_dir()


def test_two_processes_do_not_run_the_same_cell(tmp_path, monkeypatch):
    wanted = cells(toy("local", method={"rounds": 2}), tmp_path)[:1]
    copies = [replace(wanted[0]), replace(wanted[0])]
    executors = [Processes(1), Processes(1)]
    for each, copy in zip(executors, copies, strict=True):
        each.start(copy)
    ends = [event for each in executors for event in _until_end(each)]
    assert [end.status for end in ends] == ["completed", "completed"]
    assert len(read_history(wanted[0].folder)) == 2


def _until_end(each):
    while True:
        for event in each.events(60):
            if isinstance(event, End):
                return [event]


SCRIPT = """
from pathlib import Path
from tests.experiments.test_grid import toy, nothing
from fedloom.experiments.executor import Processes, execute
from fedloom.experiments.grid import cells
from fedloom._system import graceful_signals
with graceful_signals():
    execute(cells(toy("fedavg", method={"rounds": 100000}), Path(%r)), Processes(2), nothing)
"""


def begun(tmp_path, count=2):
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT % str(tmp_path)],
        cwd=Path(__file__).parents[2],
        stderr=subprocess.DEVNULL,
    )
    while len(list(tmp_path.glob("*/history.jsonl"))) < count:
        assert process.poll() is None
        time.sleep(0.05)
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.slow
def test_a_stopped_grid_leaves_readable_folders(number, tmp_path):
    process = begun(tmp_path)
    process.send_signal(number)
    assert process.wait(200) != 0
    summaries = [json.loads(path.read_text()) for path in tmp_path.glob("*/summary.json")]
    assert [s["status"] for s in summaries] == ["stopped", "stopped"]


@pytest.mark.slow
def test_the_runs_of_a_killed_grid_end_too(tmp_path):
    process = begun(tmp_path)
    process.kill()
    process.wait()
    until = time.monotonic() + 200
    while len(list(tmp_path.glob("*/summary.json"))) < 2 and time.monotonic() < until:
        time.sleep(0.1)
    assert {json.loads(path.read_text())["status"] for path in tmp_path.glob("*/summary.json")} == {
        "stopped"
    }


def test_the_remaining_time_is_estimated(tmp_path, monkeypatch):
    wanted = cells(toy("fedavg"), tmp_path)
    local, fedavg, *_ = wanted
    state = State(wanted, [], size=2)
    assert state.seconds_left() is None
    monkeypatch.setattr(executor.time, "monotonic", lambda: 100.0)
    state.ended[local.name], state.seconds[local.name] = End(local, "completed"), 4.0
    state.running[fedavg.name], state.started[fedavg.name] = Step(fedavg, 25, 100, None), 90.0
    # fedavg needs 40 s, 10 of which are over; the other local 4 s, the other fedavg 40 s. Two run
    # at a time.
    assert state.seconds_left() == pytest.approx((30 + 4 + 40) / 2)


# ---- on Ray ----
@pytest.mark.slow
def test_cells_run_on_ray(local_ray, tmp_path):
    wanted = cells(toy("fedavg,gcfl+", method={"rounds": 2}), tmp_path / "ray")
    state = execute(wanted, executor.Cluster(), nothing)
    assert {end.cell.method for end in state.failed} == {"gcfl+"}
    here = cells(toy("fedavg", method={"rounds": 2}), tmp_path / "here")
    execute(here, Processes(2), nothing)
    for one in here:
        there = tmp_path / "ray" / one.name
        assert sorted(p.name for p in there.rglob("*")) == sorted(
            p.name for p in one.folder.rglob("*")
        )
        hashes = [
            json.loads((folder / "summary.json").read_text())["history_hash"]
            for folder in (there, one.folder)
        ]
        assert hashes[0] == hashes[1]
    assert [c.name for c in execute(wanted, executor.Cluster(), nothing).kept] == [
        c.name for c in wanted if c.method != "gcfl+"
    ]
