"""Worker processes: shares of clients, shared memory, errors, and clean-up."""

import gc
import multiprocessing
import os
import re
import signal
import time
from dataclasses import dataclass, replace

import pytest
import torch

import fedloom
from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.core.message import DTYPES, flatten
from fedloom.core.method import Method
from fedloom.core.phase import phase
from fedloom.data.datasets import find
from fedloom.data.federation import Federation
from fedloom.data.graph import Graph
from fedloom.engines._workers import WorkerError, contents_of, partition
from fedloom.engines.processes import Block, Engine
from fedloom.engines.stacked_processes import Engine as StackedEngine
from fedloom.errors import ConfigError, MessageError, Refusal
from fedloom.experiments.callbacks import Callback
from fedloom.experiments.report.tables import workers
from fedloom.experiments.result import load_run
from fedloom.experiments.run import run
from fedloom.experiments.settings import RunSettings

NAMES = ("a", "b", "c")
TO_ALL = {name: {} for name in NAMES}


@dataclass(frozen=True)
class Odd(Method):
    """Does what tests need, and asks for `crash` if it is run."""

    @phase(pid="int64[]", threads="int64[]")
    def where(self, client: Client):
        """In which process, with how many threads, after using them."""
        torch.randn(600, 600) @ torch.randn(600, 600)
        return {"pid": torch.tensor(os.getpid()), "threads": torch.tensor(torch.get_num_threads())}

    @phase(x="=x")
    def mirror(self, client: Client, x):
        """What came."""
        return {"x": x}

    @phase()
    def refuse(self, client: Client):
        """An error of fedloom's, at client b alone."""
        client.state["asked"] = torch.ones(())
        if client.name == "b":
            raise Refusal(f"client {client.name!r} refuses")
        return {}

    @phase()
    def fail(self, client: Client):
        """An error of the program."""
        return {"x": {}["not there"]}

    @phase()
    def crash(self, client: Client):
        """Kills the process, as the system does when memory runs out."""
        os.kill(os.getpid(), signal.SIGKILL)
        return {}

    @phase()
    def crash_one(self, client: Client):
        """Kills b's process while the others are busy."""
        if client.name == "b":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(10_000)
        return {}

    @phase()
    def interrupt(self, client: Client):
        """Ctrl-C, which reaches all processes of a terminal, while this one is busy."""
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(10_000)
        return {}

    def run(self, server):
        """Not for long."""
        server.ask(self.crash)


def graph(nodes=8):
    return Graph(
        torch.ones(nodes, 4), torch.zeros(2, 0, dtype=torch.int64), torch.arange(nodes) % 2, 2
    )


def clients(sizes=(8, 8, 8)):
    names = tuple("abcdefghijklmnopqrstuvwxyz"[: len(sizes)])
    facts = Facts(4, 2, "node", names, ("gcn-2x4",) * len(sizes))
    return [Client(name, graph(nodes), facts) for name, nodes in zip(names, sizes, strict=True)]


@pytest.fixture(params=[Engine, StackedEngine], ids=["loop inside", "stacked inside"])
def engine(request):
    made = request.param(Odd(), clients(), workers=2)
    yield made
    made.close()


def blocks_held():
    """Shared memory that this process holds open."""
    links = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
    return [
        link for link in links if os.path.lexists(link) and "memfd:fedloom" in os.readlink(link)
    ]


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def pids(engine):
    return {int(reply["pid"]) for reply in engine.call("where", TO_ALL).values()}


# ---- shares of clients ----
def test_groups_have_about_equal_work_and_keep_the_order():
    sizes = (5, 100, 7, 60, 50, 3, 40, 8)
    groups = partition(clients(sizes), 3)
    load = [sum(c.full_graph.num_nodes for c in group) for group in groups]
    assert max(load) == 100  # the largest client alone
    assert min(load) >= 80
    assert sorted(c.name for group in groups for c in group) == list("abcdefgh")
    assert all([c.name for c in group] == sorted(c.name for c in group) for group in groups)
    assert [len(group) for group in partition(clients((1,) * 7), 3)] == [3, 2, 2]


def test_edges_and_features_count_as_work():
    light, heavy = graph(), replace(graph(), edge_index=torch.zeros(2, 64, dtype=torch.int64))
    facts = Facts(4, 2, "node", NAMES, ("gcn-2x4",) * 3)
    parties = [Client(name, g, facts) for name, g in zip(NAMES, (light, heavy, light), strict=True)]
    assert [[c.name for c in group] for group in partition(parties, 2)] == [["b"], ["a", "c"]]


@pytest.mark.parametrize(
    ("asked", "expected"), [(1, [3]), (2, [2, 1]), (3, [1, 1, 1]), (9, [1, 1, 1])]
)
def test_the_number_of_workers_is_as_asked_but_at_most_one_per_client(asked, expected):
    engine = Engine(Odd(), clients(), workers=asked)
    assert engine.details() == {"workers": len(expected), "clients_per_worker": expected}
    assert len(pids(engine)) == len(expected)
    assert os.getpid() not in pids(engine)
    engine.close()


def test_by_default_workers_and_their_threads_fill_the_cores(monkeypatch):
    monkeypatch.setattr(Engine, "cores", lambda self: 4)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.randn(600, 600) @ torch.randn(
            600, 600
        )  # opens a pool of threads, which a fork does not have
        engine = Engine(Odd(), clients())
        replies = engine.call("where", TO_ALL)
    finally:
        torch.set_num_threads(before)
    assert engine.details()["workers"] == 2
    assert [int(reply["threads"]) for reply in replies.values()] == [2, 2, 2]
    engine.close()


def test_workers_is_a_setting_of_engines_with_workers():
    assert RunSettings(engine="processes", workers=3).workers == 3
    with pytest.raises(
        ConfigError,
        match=r"run\.workers is 2, engine 'loop' has none; "
        r"valid: 0, or run\.engine auto, processes, stacked_processes or ray",
    ):
        RunSettings(engine="loop", workers=2)
    with pytest.raises(ConfigError, match=r"run\.workers is -1, must be a whole number at least 0"):
        RunSettings(engine="processes", workers=-1)


# ---- shared memory ----
def test_equal_tensors_are_written_once():
    model, own = (
        torch.ones(1000),
        {name: torch.full((3,), float(k)) for k, name in enumerate(NAMES)},
    )
    block = Block()
    layout = block.write(contents_of({name: {"model": {"w": model}} for name in NAMES}))
    assert [clients for clients, _, _ in layout] == [list(NAMES)]
    layout = block.write(
        contents_of({name: {"model": {"w": model}, "own": own[name]} for name in NAMES})
    )
    assert (
        len({place for _, _, rows in layout for name, _, _, place in rows if name == "model/w"})
        == 1
    )
    assert all(torch.equal(block.read(layout)[name]["own"], own[name]) for name in NAMES)
    block.close()


def test_shared_memory_grows_and_holds_all_dtypes():
    block = Block()
    assert block.read(block.write([])) == {}
    for length in (1, 0, 5000, 3):
        tensors = {name: torch.arange(length).to(dtype) for name, dtype in DTYPES.items()}
        tensors |= {
            "scalar": torch.tensor(2.5),
            "turned": torch.arange(6.0).view(2, 3).t(),
            "none": torch.zeros(0, 4),
        }
        read = block.read(block.write(contents_of({"a": {"nested": tensors}, "b": {}})))
        assert read["b"] == {}
        assert read["a"]["nested"].keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert read["a"]["nested"][name].dtype == tensor.dtype
            assert read["a"]["nested"][name].tolist() == tensor.tolist()
    block.close()


def test_both_sides_see_grown_memory(engine):
    for length in (1, 100_000, 10):
        sent = {name: {"x": torch.full((length,), float(k))} for k, name in enumerate(NAMES)}
        replies = engine.call("mirror", sent)
        assert list(replies) == list(NAMES)
        assert all(torch.equal(replies[name]["x"], sent[name]["x"]) for name in NAMES)


# ---- errors ----
def test_a_fedloom_error_keeps_its_type_and_text(engine):
    with pytest.raises(Refusal) as refusal:
        engine.call("refuse", TO_ALL)
    assert str(refusal.value) == "client 'b' refuses"
    assert any("in refuse" in note for note in refusal.value.__notes__)  # where in the worker
    assert engine.snapshot().keys() == set(NAMES)  # and the engine goes on
    with pytest.raises(MessageError, match="'x' is a list"):
        engine.call("mirror", {"a": {"x": [1.0]}})
    assert len(pids(engine)) == 2


def test_any_other_error_names_its_worker_and_traceback(engine):
    with pytest.raises(WorkerError, match=r"worker 0: KeyError: 'not there'") as failure:
        engine.call("fail", TO_ALL)
    assert any("in fail" in note for note in failure.value.__notes__)
    assert len(pids(engine)) == 2


@pytest.mark.parametrize("phase", ["where", "crash", "crash_one"])
def test_a_killed_worker_is_an_error(engine, phase):
    at_work = pids(engine)
    if phase == "where":
        os.kill(engine.call("where", {"b": {}})["b"]["pid"].item(), signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"worker 1 was killed by SIGKILL .*; it had clients b$"):
        engine.call(phase, {"b": {}} if phase == "crash" else TO_ALL)
    assert not any(map(is_running, at_work))
    assert engine.models() == {}
    with pytest.raises(WorkerError, match="closed"):
        engine.call("where", TO_ALL)


def test_a_run_with_a_killed_worker_records_the_cause(tmp_path):
    federation = Federation((graph(), graph()))
    with pytest.raises(WorkerError, match="SIGKILL"):
        run(Odd(), federation, model="gcn-2x4", engine="processes", out=tmp_path / "x")
    assert load_run(tmp_path / "x").summary["status"] == "failed"
    assert re.match(
        r"WorkerError: worker [01] was killed by SIGKILL", load_run(tmp_path / "x").summary["cause"]
    )


def test_ctrl_c_ends_the_workers(engine):
    at_work = pids(engine)
    with pytest.raises(KeyboardInterrupt):
        engine.call("interrupt", {"a": {}})
    assert not any(map(is_running, at_work))
    assert engine.models() == {}


# ---- clean-up ----
def test_a_closed_engine_releases_everything():
    assert not blocks_held()
    engine = Engine(Odd(), clients(), workers=2)
    at_work = pids(engine)
    assert all(map(is_running, at_work))
    assert blocks_held()
    engine.close()
    engine.close()  # once more does no harm
    assert not any(map(is_running, at_work))
    assert not blocks_held()


def test_a_deleted_engine_releases_everything():
    engine = Engine(Odd(), clients(), workers=2)
    at_work = pids(engine)
    del engine
    gc.collect()
    assert not any(map(is_running, at_work))
    assert not blocks_held()


def die_with_an_engine(pipe):
    pipe.send(pids(Engine(Odd(), clients(), workers=2)))
    os.kill(os.getpid(), signal.SIGKILL)


def test_workers_end_when_their_parent_is_killed():
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe()
    parent = fork.Process(target=die_with_an_engine, args=(there,))
    parent.start()
    there.close()  # `recv` fails at once if the process dies before it sends
    orphans = here.recv()
    parent.join()
    assert len(orphans) == 2
    while any(map(is_running, orphans)):  # the suite's timeout is the limit
        time.sleep(0.01)


# ---- whole runs ----
def same_bits(one, other):
    one, other = (
        {owner: flatten(model) for owner, model in result.final_models.items()}
        for result in (one, other)
    )
    return one.keys() == other.keys() and all(
        torch.equal(t, other[owner][k]) for owner, model in one.items() for k, t in model.items()
    )


@pytest.mark.parametrize("method", ["fedavg", "fedstruct", "fedproto"])
def test_secure_runs_agree_with_the_loop(method, cross_federation):
    one, other = (
        run(method, cross_federation, model="gcn-2x8", rounds=2, secure=True, engine=engine)
        for engine in ("loop", "processes")
    )
    assert one.summary["history_hash"] == other.summary["history_hash"]
    assert same_bits(one, other)


class Killed(BaseException):
    """Stands for whatever ends a process between two rounds."""


@pytest.mark.parametrize(
    ("first", "then"), [("loop", "processes"), ("processes", "loop"), ("processes", "processes")]
)
def test_a_run_resumes_in_another_engine(first, then, node_federation, tmp_path):
    settings = {"model": "gcn-2x8", "rounds": 4, "participation": 0.7, "checkpoint_every": 1}
    unbroken = run("scaffold", node_federation, engine="loop", **settings)

    def die(entry):
        if entry["round"] == 3:
            raise Killed

    with pytest.raises(Killed):
        run(
            "scaffold", node_federation, out=tmp_path / "x", engine=first, callbacks=die, **settings
        )
    resumed = run(
        "scaffold", node_federation, out=tmp_path / "x", engine=then, resume=True, **settings
    )
    assert resumed.summary["history_hash"] == unbroken.summary["history_hash"]
    assert same_bits(resumed, unbroken)


def test_a_run_reports_its_workers(node_federation):
    said = []

    class Started(Callback):
        def on_start(self, run):
            said.append(run)

    result = run(
        "fedavg",
        node_federation,
        model="gcn-2x8",
        rounds=1,
        engine="processes",
        workers=3,
        callbacks=Started(),
    )
    expected = {
        "engine": "processes",
        "engine_details": {"threads": 1, "workers": 3, "clients_per_worker": [1, 1, 2]},
    }
    assert [{key: run[key] for key in expected} for run in said] == [expected]
    assert {key: result.summary[key] for key in expected} == expected
    assert workers(expected) == "engine processes: 3 workers with 1 to 2 clients and 1 thread each"
    assert workers({"engine": "loop", "engine_details": {"threads": 1}}) == ""


@pytest.mark.skipif(find("cora").kind == "download", reason="no Cora on this machine")
def test_cora_is_bit_identical_to_the_loop():
    federation = fedloom.divide(fedloom.load("cora"), 10, "louvain", 0)
    one, other = (
        run("fedavg", federation, rounds=3, engine=engine) for engine in ("loop", "processes")
    )
    assert one.summary["history_hash"] == other.summary["history_hash"]
    assert one.traffic == other.traffic
    assert same_bits(one, other)


def test_peak_memory_includes_the_workers(node_federation):
    alone, shared = (
        fedloom.run("fedavg", node_federation, rounds=1, **engine).summary
        for engine in ({}, {"engine": "processes", "workers": 2})
    )
    assert shared["peak_rss_mb"] > 1.5 * alone["peak_rss_mb"]
