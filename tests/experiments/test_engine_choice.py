"""The engine of a run whose engine is "auto"."""

import json
import multiprocessing
import os
from itertools import pairwise

import pytest

import fedloom
from fedloom import _system
from fedloom._system import free_cores
from fedloom.core.registry import make_method
from fedloom.engines.stacked import engine as stacked_engine
from fedloom.experiments import checkpoint, engine_choice, grid, memory_estimate
from fedloom.experiments.engine_choice import choose_engine
from fedloom.experiments.recipe import make_recipe
from fedloom.experiments.run import agree_on_facts
from fedloom.experiments.settings import RunSettings
from fedloom.experiments.source_digest import imported_files

MODEL = "gcn-2x8"


def choice(federation, model=MODEL, method="fedavg", **settings):
    chosen = RunSettings(**settings)
    facts = agree_on_facts(make_method(method, {}), method, federation.roster, model, 0.5, chosen)
    return choose_engine(chosen, federation, facts)


def test_the_default_is_auto_and_it_chooses_stacked(node_federation, graph_federation):
    assert RunSettings().engine == "auto"
    for federation in (node_federation, graph_federation):
        assert choice(federation)[:2] == ("stacked", "the fastest in one process")


@pytest.mark.parametrize("engine", ["loop", "wire", "stacked", "processes", "stacked_processes"])
def test_an_engine_that_is_named_is_taken(node_federation, engine):
    assert choice(node_federation, engine=engine)[:2] == (engine, "")


@pytest.mark.parametrize("name", ["workers", "deadline", "grace"])
def test_workers_and_deadlines_are_those_of_processes(node_federation, name):
    for more in ({}, {"quorum": 0.5}):
        found = choice(node_federation, **{name: 2}, **more)
        stacked = name == "workers" and not more  # nobody may be absent
        engine = "stacked_processes" if stacked else "processes"
        assert found[:2] == (engine, f"run.{name} is set")
        assert found.workers == (2 if name == "workers" else 0)


# ---- free cores ----
@pytest.fixture
def cores(monkeypatch):
    """Sets the number of free cores, and how much work a federation must have to use two."""

    def say(count, hidden_values=100):
        monkeypatch.setattr(engine_choice, "free_cores", lambda: count)
        monkeypatch.setattr(engine_choice, "HIDDEN_VALUES", hidden_values)

    return say


def test_free_cores_are_used_if_there_is_work_for_them(node_federation, cores):
    hidden = 8 * sum(graph.num_nodes for graph in node_federation.graphs)
    clients = node_federation.num_clients
    for count, values, expected in (
        (2, hidden, 2),
        (2, hidden + 1, 1),
        (1, 1, 1),
        (3, 1, 3),
        (99, 1, clients),  # at most one worker per client
        (99, 2 * hidden // 3, 3),  # three times half of what two workers need
    ):
        cores(count, values)
        found = choice(node_federation)
        assert found.engine == ("stacked_processes" if expected > 1 else "stacked")
        assert found.workers == (expected if expected > 1 else 0)
    cores(4)
    assert choice(node_federation, threads=2).workers == 2
    assert choice(node_federation, threads=3).engine == "stacked"
    assert choice(node_federation, engine="stacked").engine == "stacked"
    assert choice(node_federation, quorum=0.5).engine == "loop"


def test_clients_that_fill_a_group_by_themselves_use_free_cores(
    node_federation, cores, monkeypatch
):
    monkeypatch.setattr("fedloom.engines.stacked.engine.GROUP_BYTES", 1.0)
    cores(2)
    assert choice(node_federation)[:2] == ("stacked_processes", "the fastest on 2 cores")
    assert choice(node_federation.merged()).engine == "stacked"


def test_workers_that_do_not_fit_into_the_memory_are_not_used(node_federation, cores, monkeypatch):
    monkeypatch.setattr(stacked_engine, "GROUP_BYTES", 4e4)  # two groups, which step at once
    engines = ("loop", "stacked", "stacked_processes")
    loop, stacked, workers = (choice(node_federation, engine=e).need.total for e in engines)
    assert loop < stacked < workers
    cores(2)
    for free, expected in zip((loop, stacked, workers), engines, strict=True):
        monkeypatch.setattr(memory_estimate, "available", lambda free=free: free)
        assert choice(node_federation).engine == expected


def test_auto_does_not_fork_where_a_fork_cannot_train(node_federation, cores, monkeypatch):
    here, attempt = os.getpid(), memory_estimate._try

    def only_here(*arguments):
        if os.getpid() != here:
            raise RuntimeError("no gradients")
        return attempt(*arguments)

    monkeypatch.setattr(memory_estimate, "_try", only_here)
    cores(2)
    assert choice(node_federation)[:2] == ("stacked", "the fastest in one process")
    for engine in ("processes", "stacked_processes"):
        text = (
            rf"run\.engine '{engine}': a forked process cannot train here \(RuntimeError: no grad"
        )
        with pytest.raises(fedloom.ConfigError, match=text):
            choice(node_federation, engine=engine)

    def killed(*arguments):
        return attempt(*arguments) if os.getpid() == here else os._exit(3)

    monkeypatch.setattr(memory_estimate, "_try", killed)
    with pytest.raises(fedloom.ConfigError, match=r"cannot train here \(it ended with exit code 3"):
        choice(node_federation, engine="processes")

    def nowhere(*arguments):
        raise ValueError("a wrong model")

    monkeypatch.setattr(memory_estimate, "_try", nowhere)
    for engine in ("auto", "processes"):  # it has nothing to do with forks
        with pytest.raises(ValueError, match="a wrong model"):
            choice(node_federation, engine=engine)


def _send_free_cores(pipe):
    pipe.send(free_cores())


def test_a_process_of_a_pool_leaves_the_cores_to_its_siblings(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    monkeypatch.setattr(_system, "_quota", lambda limit: 99)
    assert free_cores() == 3
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe()
    process = fork.Process(target=_send_free_cores, args=(there,))
    process.start()
    assert here.recv() == 1
    process.join()
    monkeypatch.setattr(_system, "_cores_are_shared", False)  # and undoes what follows
    _system.share_cores()
    assert free_cores() == 1


def test_a_container_limits_the_cores(tmp_path):
    limit = tmp_path / "cpu.max"
    assert _system._quota(limit) > 10**6
    for text, expected in (("200000 100000", 2), ("50000 100000", 1), ("350000 100000", 3)):
        limit.write_text(f"{text}\n")
        assert _system._quota(limit) == expected
    limit.write_text("max 100000\n")
    assert _system._quota(limit) > 10**6


def test_a_run_uses_free_cores_by_itself(node_federation, cores):
    cores(2)
    result = fedloom.run("fedavg", node_federation, model=MODEL, rounds=2)
    details = result.summary["engine_details"]
    assert result.summary["engine"] == "stacked_processes"
    assert (details["chosen_by"], details["workers"]) == ("auto", 2)


def test_a_quorum_below_1_is_for_the_loop(node_federation):
    assert choice(node_federation, quorum=0.5)[:2] == ("loop", "run.quorum is below 1")


def test_one_client_and_clients_that_fill_a_group_run_stacked(node_federation, monkeypatch):
    assert choice(node_federation.merged()).engine == "stacked"
    monkeypatch.setattr("fedloom.engines.stacked.engine.GROUP_BYTES", 1.0)
    assert choice(node_federation).engine == "stacked"


def test_what_does_not_fit_into_the_memory_in_lockstep_runs_in_the_loop(
    node_federation, monkeypatch
):
    need = {e: choice(node_federation, engine=e).need.total for e in ("loop", "stacked")}
    assert need["loop"] < need["stacked"]
    monkeypatch.setattr(memory_estimate, "available", lambda: need["stacked"] - 1)
    found = choice(node_federation)
    assert (found.engine, found.need.total) == ("loop", need["loop"])
    assert "memory" in found.reason
    monkeypatch.setattr(memory_estimate, "available", lambda: need["stacked"])
    assert choice(node_federation).engine == "stacked"


def test_the_summary_and_the_config_say_what_was_asked_for_and_what_ran(node_federation, tmp_path):
    result = fedloom.run("fedavg", node_federation, model=MODEL, rounds=1, out=tmp_path / "x")
    summary = result.summary
    assert summary["engine"] == "stacked"
    assert summary["engine_details"]["chosen_by"] == "auto"
    assert summary["config"]["run"]["engine"] == "auto"
    named = fedloom.run("fedavg", node_federation, model=MODEL, rounds=1, engine="loop").summary
    assert (named["engine"], "chosen_by" in named["engine_details"]) == ("loop", False)
    central = fedloom.run("central", node_federation, model=MODEL, rounds=1).summary
    assert central["engine"] == "stacked"


class StoppedError(Exception):
    """Ends a run."""


def stop_after(number):
    def stop(entry):
        if entry["round"] == number:
            raise StoppedError

    return stop


def test_a_resumed_run_goes_on_in_the_engine_of_its_checkpoint(
    node_federation, tmp_path, monkeypatch
):
    settings = {"model": MODEL, "rounds": 4, "checkpoint_every": 1}
    unbroken = fedloom.run("fedavg", node_federation, engine="loop", **settings)
    first = {"out": tmp_path / "x", "callbacks": stop_after(3), **settings}
    with monkeypatch.context() as patched:
        need = choice(node_federation, engine="loop").need.total
        patched.setattr(memory_estimate, "available", lambda: need)  # so it takes the loop
        with pytest.raises(StoppedError):
            fedloom.run("fedavg", node_federation, **first)
    resumed = fedloom.run("fedavg", node_federation, out=tmp_path / "x", resume=True, **settings)
    assert (resumed.summary["engine"], resumed.summary["engine_details"]["reason"]) == (
        "loop",
        "the run began in it",
    )
    assert resumed.summary["history_hash"] == unbroken.summary["history_hash"]


def test_a_cell_of_a_grid_is_found_again_and_depends_on_both_engines(tmp_path):
    tables = {
        "compare": {"methods": "fedavg", "datasets": "synthetic:nodes=60", "seeds": 1},
        "partition": {},
    }
    cells = grid.cells(tables, tmp_path)
    assert [cell.folder for cell in cells] == [cell.folder for cell in grid.cells(tables, tmp_path)]
    assert {cell.tables["run"]["engine"] for cell in cells} == {"auto"}
    named = grid.cells({**tables, "run": {"engine": "loop"}}, tmp_path)
    assert {cell.folder for cell in named}.isdisjoint(cell.folder for cell in cells)
    stacked = {path.name for path in imported_files("fedavg", engine="stacked")}
    assert {"lockstep.py", "loop.py"} <= stacked


def test_only_the_cpu_is_a_device():
    assert RunSettings(device="cpu").device == "cpu"
    with pytest.raises(fedloom.ConfigError, match=r"run\.device is 'cuda'; valid: cpu"):
        RunSettings(device="cuda")


# ---- when checkpoints are written ----
class Clock:
    """A clock that a test sets."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_automatic_checkpoints_take_a_small_share_of_the_time():
    clock = Clock()
    schedule = checkpoint.Schedule(checkpoint.AUTOMATIC, clock)
    clock.now = 100.0  # loading the data
    schedule.start()
    times = []
    for number in range(1, 1001):
        clock.now += 1.0  # a round
        if schedule.is_due(number):
            times.append(number)
            began = schedule.now()
            clock.now += 0.125 if len(times) == 1 else 3.0  # writing
            schedule.written(began)
    assert times[:2] == [10, 20]
    assert {after - before for before, after in pairwise(times[1:])} == {150}


def test_checkpoints_every_few_rounds_or_none():
    clock = Clock()
    for every, expected in ((3, [3, 6, 9]), (0, [])):
        schedule = checkpoint.Schedule(every, clock)
        clock.now += 1000.0
        assert [n for n in range(1, 11) if schedule.is_due(n)] == expected


def test_a_long_run_has_a_checkpoint_and_a_completed_run_has_none(
    node_federation, tmp_path, monkeypatch
):
    monkeypatch.setattr(checkpoint, "SECONDS", 0.0)
    settings = {"model": MODEL, "rounds": 4, "out": tmp_path / "x"}
    plain = fedloom.run("fedavg", node_federation, model=MODEL, rounds=4)
    with pytest.raises(StoppedError):
        fedloom.run("fedavg", node_federation, callbacks=stop_after(3), **settings)
    assert checkpoint.saved_round(tmp_path / "x") in (1, 2)
    resumed = fedloom.run("fedavg", node_federation, resume=True, **settings)
    assert resumed.summary["history_hash"] == plain.summary["history_hash"]
    assert checkpoint.saved_round(tmp_path / "x") is None
    assert not list((tmp_path / "x").glob("checkpoint*"))


# ---- a partition that fits ----
@pytest.mark.parametrize(
    ("tables", "name", "clients"),
    [
        ({}, "louvain", 10),
        ({"data": {"dataset": "mutag"}}, "dirichlet", 10),
        ({"data": {"dataset": "mutag"}, "partition": {"name": "uniform"}}, "uniform", 10),
        ({"data": {"dataset": "synthetic-graphs:graphs=40"}}, "dirichlet", 10),
        ({"data": {"dataset": "synthetic:nodes=100,blocks=4"}}, "blocks", 4),
        (
            {"data": {"dataset": "synthetic:nodes=100,blocks=4"}, "partition": {"clients": 2}},
            "blocks",
            2,
        ),
    ],
)
def test_a_partition_that_fits_is_chosen_if_none_is_given(tables, name, clients):
    recipe = make_recipe(tables)
    assert (recipe.partition.name, recipe.partition.clients) == (name, clients)
    again = make_recipe(json.loads(json.dumps(recipe.config()))).partition
    assert (again.name, again.clients) == (name, clients)


def test_a_file_with_a_set_of_graphs_is_recognised(tmp_path):
    files = {
        "graphs": fedloom.synthetic_graphs(graphs=12, seed=0),
        "nodes": fedloom.synthetic(nodes=100),
    }
    for name, graph in files.items():
        fedloom.to_file(graph, tmp_path / f"{name}.safetensors")
    (tmp_path / "damaged.safetensors").write_bytes(b"nothing")
    tables = tmp_path / "tables"
    tables.mkdir()
    for name in ("graphs", "nodes", "edges"):
        (tables / f"{name}.csv").write_text("")
    assert make_recipe({"data": {"dataset": str(tables)}}).partition.name == "dirichlet"
    expected = {"graphs": "dirichlet", "nodes": "louvain", "damaged": "louvain"}
    for name, partition in expected.items():
        path = str(tmp_path / f"{name}.safetensors")
        assert make_recipe({"data": {"dataset": path}}).partition.name == partition


def test_a_grid_takes_the_partition_that_fits_each_dataset(tmp_path):
    axes = {"methods": "fedavg", "datasets": "mutag,cora", "seeds": 1}
    cells = grid.cells({"compare": axes}, tmp_path)
    chosen = {(c.tables["data"]["dataset"], c.tables["partition"]["name"]) for c in cells}
    assert chosen == {("mutag", "dirichlet"), ("cora", "louvain")}
