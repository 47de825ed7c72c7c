"""`--engine flower`: each client in its own process, over a real SuperLink.

bench/flower.py runs further methods.
"""

import os
import signal

import pytest
from deployment import port_is_free, running

import fedloom
from fedloom.deploy.engine import Engine, _toml
from fedloom.errors import RoundFailed
from fedloom.experiments.report.watch import Watch
from fedloom.experiments.run import run

slow = [pytest.mark.slow, pytest.mark.timeout(1200)]
patient = pytest.mark.usefixtures("patient")


@pytest.fixture(scope="module")
def federation():
    return fedloom.divide(fedloom.load("synthetic:nodes=120,features=8"), 3, "random", 0)


@patient
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        # A message for each client, with any number of prototypes.
        pytest.param("fedproto", {"rounds": 2, "model": "gcn-2x8,gat-2x8,sage-2x8"}, marks=slow),
        pytest.param("fedavg", {"rounds": 2, "secure": True, "finetune": 1}, marks=slow),
        pytest.param("fedavg", {"rounds": 2, "upload": "int8", "download": "int8"}, marks=slow),
    ],
)
def test_a_run_is_bit_identical_to_the_loop(method, settings, federation, tmp_path):
    chosen = {"model": "gcn-2x8", "seed": 3, **settings}
    loop = run(method, federation, **chosen)
    flower = run(method, federation, engine="flower", out=tmp_path / "run", **chosen)
    assert flower.summary["history_hash"] == loop.summary["history_hash"]
    assert flower.accuracy == loop.accuracy
    assert flower.traffic == loop.traffic
    assert set(flower.models) <= {"server"}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@patient
def test_a_stopped_run_is_resumed_bit_identically(federation, tmp_path):
    class StoppedError(Exception):
        """Ends a run."""

    def stop(entry, planned):
        if entry["round"] == 2:
            raise StoppedError

    chosen = {"model": "gcn-2x8", "rounds": 3, "seed": 3, "checkpoint_every": 1}
    flower = {"engine": "flower", "out": tmp_path / "run", **chosen}
    with pytest.raises(StoppedError):
        run("fedavg", federation, on_round=stop, **flower)
    resumed = run("fedavg", federation, resume=True, **flower)
    reference = run("fedavg", federation, **chosen)
    assert resumed.summary["history_hash"] == reference.summary["history_hash"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_parties_are_left_out_and_nothing_is_left_behind(federation, tmp_path, monkeypatch):
    engines, processes, seen = [], [], []
    watch = Watch(tmp_path / "run")

    def kill_one(entry, planned):
        data = watch.data("", 0, 0)
        absent = [c["id"] for c in data["clients"] if c["absences"]]
        seen.append((data["state"], data["round"], data["bytes_up"], absent))
        if entry["round"] == 1:
            (engine,) = engines
            os.kill(engine.parties[1].process.pid, signal.SIGKILL)

    made = Engine.__init__

    def recorded(self, *args, **settings):
        made(self, *args, **settings)
        engines.append(self)
        processes.extend(party.process.pid for party in self.parties)

    monkeypatch.setattr(Engine, "__init__", recorded)
    result = run(
        "fedavg",
        federation,
        model="gcn-2x8",
        rounds=3,
        engine="flower",
        quorum=0.3,
        on_round=kill_one,
        out=tmp_path / "run",
    )
    watch.server_close()
    assert [each[:2] for each in seen] == [("running", 1), ("running", 2), ("running", 3)]
    assert [each[2] for each in seen] == [entry["bytes_up"] for entry in result.history]
    assert "1" in seen[-1][3]
    assert result.summary["status"] == "completed"
    assert "1" in result.summary["absences"]
    (engine,) = engines
    assert not engine.folder.exists()
    assert port_is_free(engine.coordinator.transport.address.port)
    assert not running("fedloom.deploy.local_party").keys() & set(processes)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_too_few_parties_end_the_run_with_names_and_causes(federation):
    def kill_all(entry, planned):
        for pid, parent in running("fedloom.deploy.local_party").items():
            if parent == os.getpid():
                os.kill(pid, signal.SIGKILL)

    chosen = {"model": "gcn-2x8", "rounds": 3, "engine": "flower", "quorum": 0.6, "retries": 0}
    with pytest.raises(RoundFailed, match="no sign of life"):
        run("fedavg", federation, on_round=kill_all, **chosen)


def test_values_are_written_as_toml():
    values = (True, 3, 0.5, 1e-05, 'a "b"')
    assert [_toml(value) for value in values] == ["true", "3", "0.5", "1e-05", '"a \\"b\\""']
