"""Faults in workers: clients of dead workers are absent, and late answers are discarded."""

import os
import re
import signal
import threading
import time
from dataclasses import dataclass, replace

import pytest
import torch
from tests.engines.test_processes import NAMES, clients, is_running
from tests.faults.schedule import LOST, Schedule
from tests.faults.test_absent import BOOM, absences, only, same_bits

from fedloom.core.absence import FaultPolicy
from fedloom.core.client import Client
from fedloom.core.message import Absent
from fedloom.core.phase import averaged, phase
from fedloom.engines.processes import Engine
from fedloom.errors import RoundFailed
from fedloom.experiments.result import load_run
from fedloom.experiments.run import run
from fedloom.methods.fedavg import FedAvg

pytestmark = pytest.mark.usefixtures("reference_engine")

DEADLINE = 5.0  # seconds; the other workers must not be late on a busy machine


@dataclass(frozen=True)
class Unsure(FedAvg):
    """FedAvg with a client that fails in a given round, in a given way."""

    who: str = "1"
    when: int = 2
    how: str = "raise"

    @averaged(by="size")
    @phase(model="=model")
    def train(self, client: Client, model):
        """As in FedAvg, unless the client fails now."""
        client.memory["round"] = number = client.memory.get("round", 0) + 1
        if client.name == self.who and number == self.when:
            match self.how:
                case "raise":
                    raise KeyError("not there")
                case "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                    time.sleep(0.1)  # other threads may be stopped first
                case "exit":
                    os._exit(3)
                case "sleep":
                    time.sleep(12)
        return super().train(client, model)

    @phase(pid="int64[]")
    def where(self, client: Client):
        """In which process."""
        return {"pid": torch.tensor(os.getpid())}

    @phase(x="=x")
    def mirror(self, client: Client, x):
        """Returns the message. For a number x above 100, b sleeps x ms first."""
        if client.name == "b" and float(x.flatten()[0]) > 100:
            time.sleep(float(x.flatten()[0]) / 1000)
        client.memory["seen"] = x.clone()
        return {"x": x}

    @phase(x="float32[n]")
    def seen(self, client: Client):
        """Returns the last message."""
        return {"x": client.memory["seen"]}


def go(method, federation, **settings):
    settings = {"model": "gcn-2x8", "engine": "processes", "workers": 4, "quorum": 0.5, **settings}
    return run(method, federation, **settings)


def by_number(*numbers):
    return {
        name: {"x": torch.full((2000,), float(x))} for name, x in zip(NAMES, numbers, strict=True)
    }


@pytest.fixture
def engine(request):
    policy = {"quorum": 0.5, "deadline": DEADLINE, **getattr(request, "param", {})}
    made = Engine(Unsure(), clients(), FaultPolicy(**policy), workers=3)
    yield made
    made.close()


def pid_of(engine, name):
    return int(engine.call("where", {name: {}})[name]["pid"])


def causes(given):
    return {name: answer.cause for name, answer in given.items() if isinstance(answer, Absent)}


# ---- clients that fail ----
def test_a_client_that_raises_is_absent_in_every_engine_alike(node_federation):
    loop, processes = (
        run(Unsure(rounds=3), node_federation, model="gcn-2x8", quorum=0.5, **more)
        for more in ({"engine": "loop"}, {"engine": "processes", "workers": 2})
    )
    assert absences(loop) == absences(processes) == [(2, "train", "1", "KeyError: 'not there'")]
    assert loop.summary["history_hash"] == processes.summary["history_hash"]
    assert same_bits(loop, processes)


# ---- workers that die ----
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("die", "worker [0-9] was killed by SIGKILL"),
        ("exit", "worker [0-9] ended with exit code 3"),
    ],
)
def test_a_worker_that_dies_makes_its_clients_absent_for_good(
    how, words, node_federation, tmp_path
):
    reference = run("fedavg", only(node_federation, ("0", "2", "3")), model="gcn-2x8", rounds=4)
    result = go(
        Unsure(rounds=4, when=1, how=how), node_federation, out=tmp_path / "x", checkpoint_every=1
    )
    assert result.summary["status"] == "completed"
    gone = absences(result)
    assert {client for _, _, client, _ in gone} == {"1"}
    assert all(re.match(words, cause) for *_, cause in gone)
    assert {(number, phase_name) for number, phase_name, *_ in gone} >= {
        (1, "train"),
        (2, "train"),
        (3, "train"),
        (4, "train"),
    }
    assert same_bits(reference, result, ("server", "0", "2", "3"))
    assert "1" not in result.final_models
    resumed = go(Unsure(rounds=4, when=99), node_federation, out=tmp_path / "x", resume=True)
    assert resumed.summary["rounds"] == 4


@pytest.mark.slow
def test_with_a_quorum_of_1_a_worker_that_dies_ends_the_run(node_federation):
    with pytest.raises(RuntimeError, match="was killed by SIGKILL"):
        go(Unsure(rounds=3, how="die"), node_federation, quorum=1.0)


@pytest.mark.parametrize("engine", [{"deadline": 0.0}], indirect=True)
def test_an_exchange_ends_when_a_worker_dies(engine):
    victim = pid_of(engine, "b")
    timer = threading.Timer(0.2, os.kill, (victim, signal.SIGKILL))
    timer.start()
    given = engine.call("mirror", by_number(1, 60_000, 1))  # b would answer after a minute
    timer.join()
    assert list(causes(given)) == ["b"]
    assert causes(given)["b"].startswith("worker 1 was killed by SIGKILL")
    assert list(causes(engine.call("mirror", by_number(1, 1, 1)))) == ["b"]  # it is not asked
    assert engine.snapshot().keys() <= {"a", "c"}
    assert engine.peak_mb() > 0


def test_a_worker_that_dies_between_two_exchanges_is_noticed(engine):
    victim = pid_of(engine, "b")
    os.kill(victim, signal.SIGKILL)
    while is_running(victim):
        time.sleep(0.01)
    assert list(causes(engine.call("mirror", by_number(1, 1, 1)))) == ["b"]


def test_all_workers_may_die(engine):
    for pid in {pid_of(engine, name) for name in NAMES}:
        os.kill(pid, signal.SIGKILL)
    assert list(causes(engine.call("mirror", by_number(1, 1, 1)))) == list(NAMES)
    assert engine.models() == {}


# ---- workers that are late ----
def test_who_is_late_is_left_behind_and_its_answer_thrown_away(engine):
    stopped = pid_of(engine, "b")
    os.kill(stopped, signal.SIGSTOP)
    begun = time.monotonic()
    given = engine.call("mirror", by_number(1, 2, 3))
    assert time.monotonic() - begun >= DEADLINE
    assert causes(given) == {"b": "late: no answer within 5 s"}
    assert float(given["c"]["x"][0]) == 3
    given = engine.call("mirror", by_number(4, 5, 6))
    assert causes(given) == {"b": "still busy with 'mirror'"}  # the exchange did not wait for it
    os.kill(stopped, signal.SIGCONT)
    # Without b there is no quorum, so the exchange waits for it.
    given = engine.call("mirror", {"b": {"x": torch.full((2000,), 8.0)}})
    assert (given["b"]["x"] == 8).all()  # neither 2 nor 5
    given = engine.call("mirror", by_number(9, 10, 11))
    assert [float(given[name]["x"][0]) for name in NAMES] == [9, 10, 11]


@pytest.mark.slow
def test_what_a_late_worker_has_yet_to_read_is_not_written_over(engine):
    stopped = pid_of(engine, "b")
    os.kill(stopped, signal.SIGSTOP)
    engine.call("mirror", by_number(1, 2, 3))
    for number in range(4, 10):
        engine.call(
            "mirror", {name: {"x": torch.full((4000,), float(number))} for name in ("a", "c")}
        )
    size = os.fstat(engine._sent._file).st_size
    os.kill(stopped, signal.SIGCONT)
    assert (engine.call("seen", {"b": {}})["b"]["x"] == 2).all()
    engine.call("mirror", {name: {"x": torch.ones(4000)} for name in ("a", "c")})
    assert os.fstat(engine._sent._file).st_size == size  # memory does not grow further


@pytest.mark.slow
def test_a_stopped_worker_cannot_keep_anybody_from_sending_to_it(engine):
    os.kill(pid_of(engine, "b"), signal.SIGSTOP)
    many = {str(k): torch.ones(1) for k in range(20_000)}  # their list does not fit into a pipe
    messages = {name: {"x": torch.ones(1), **many} for name in NAMES}
    assert "b" in causes(engine.call("mirror", messages))


@pytest.mark.slow
@pytest.mark.parametrize("engine", [{"grace": 5.0, "deadline": 250.0}], indirect=True)
def test_the_others_have_some_grace_once_a_quorum_has_answered(engine):
    assert causes(engine.call("mirror", by_number(1, 150, 1))) == {}
    begun = time.monotonic()
    given = engine.call("mirror", by_number(1, 250_000, 1))
    assert time.monotonic() - begun >= 5
    assert causes(given) == {"b": "late: no answer within 5 s after a quorum"}


@pytest.mark.parametrize("engine", [{"deadline": 0.0}], indirect=True)
def test_without_a_limit_an_exchange_waits_for_all_clients(engine):
    assert causes(engine.call("mirror", by_number(1, 700, 1))) == {}


@pytest.mark.slow
def test_a_stopped_worker_comes_back_and_its_late_answer_is_not_averaged(node_federation):
    engines, noted = [], []
    original = Engine.start

    def started(self, method, groups):
        original(self, method, groups)
        engines.append(self)

    def on_round(entry):
        noted.append(entry)
        if entry["round"] == 3:
            (engine,) = engines
            worker = engine.home["1"]
            os.kill(engine._workers[worker].pid, signal.SIGCONT)
            engine.ready([worker], None)  # waits for the late answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "start", started)
        result = go(
            Unsure(rounds=5, how="stop"),
            node_federation,
            deadline=10.0,
            evaluate_every=1,
            callbacks=on_round,
        )
    of_train = [
        (number, cause)
        for number, phase_name, _, cause in absences(result)
        if phase_name == "train"
    ]
    assert of_train == [(2, "late: no answer within 10 s"), (3, "still busy with 'train'")]
    # A busy client is not scored.
    assert [len(entry["clients"]) for entry in noted] == [4, 3, 3, 4, 4]

    # The same happens if its reply of round 2 is lost and it is absent until round 4.
    with pytest.MonkeyPatch.context() as patch:
        Schedule(patch, {(2, "train", "1"): LOST, (2, None, "1"): BOOM, (3, None, "1"): BOOM})
        reference = run(Unsure(rounds=5, when=99), node_federation, model="gcn-2x8", quorum=0.5)
    assert same_bits(reference, result)


@pytest.mark.slow
def test_with_a_quorum_of_1_a_late_worker_is_a_failed_round(node_federation, tmp_path):
    needed = r"round 2, 'train': all clients are needed \(run.quorum is 1\)"
    with pytest.raises(RoundFailed, match=needed + "; absent: 1: late: no answer within 10 s"):
        go(
            Unsure(rounds=3, how="stop"),
            node_federation,
            quorum=1.0,
            deadline=10.0,
            out=tmp_path / "x",
        )
    assert load_run(tmp_path / "x").summary["status"] == "failed"


def test_a_checkpoint_without_somebody_leaves_it_as_it_was_set_up(engine):
    fresh = Engine(replace(Unsure(), when=99), clients(), FaultPolicy(0.5), workers=2)
    for made in (engine, fresh):
        made.call("setup", {name: {} for name in NAMES})
    os.kill(pid_of(engine, "b"), signal.SIGKILL)
    saved = engine.snapshot()
    assert saved.keys() == {"a", "c"}
    before = fresh.models()
    fresh.restore(saved)
    assert all(torch.equal(t, before["b"][k]) for k, t in fresh.models()["b"].items())
    fresh.close()


# ---- the same on Ray ----
@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise", "KeyError: 'not there'"),
        ("exit", "worker [01] was lost"),
        ("sleep", "late: .* 4 s"),
    ],
)
def test_a_run_on_ray_survives_too(how, words, node_federation, local_ray):
    deadline = 4.0 if how == "sleep" else 0.0  # Ray may take longer to notice that an actor is lost
    result = go(
        Unsure(rounds=4, when=2, how=how),
        node_federation,
        engine="ray",
        workers=2,
        deadline=deadline,
    )
    assert result.summary["status"] == "completed"
    gone = {
        (number, client): cause
        for number, phase_name, client, cause in absences(result)
        if phase_name == "train"
    }
    assert re.fullmatch(words, gone[2, "1"]), gone
    assert (1, "1") not in gone
    assert ((4, "1") in gone) == (how != "raise")  # the rounds end before the client wakes
