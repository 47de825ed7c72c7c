"""`--engine flower`: each client in its own process, over a real SuperLink.

bench/flower.py runs further methods.
"""

import pytest
import torch
from deployment import absent_in, port_is_free, running

import fedloom
from fedloom.core.message import flatten
from fedloom.deploy.engine import Engine, _toml
from fedloom.errors import RoundFailed
from fedloom.experiments.report.watch import Watch
from fedloom.experiments.run import run
from fedloom.experiments.run_folder import read_history

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
        pytest.param(
            "fedavg",
            {"rounds": 2, "secure": True, "finetune": 1, "class_weight": "balanced"},
            marks=slow,
        ),
        # Parties choose the noise from the same terms, and add their shares of it.
        pytest.param(
            "fedavg",
            {"rounds": 2, "secure": True, "dp_epsilon": 50.0, "dp_seeded": True},
            marks=slow,
        ),
        pytest.param(
            "fedavg",
            {
                "rounds": 2,
                "aggregation": "median",
                "adversary": {"clients": 1, "attack": "label-flip"},
            },
            marks=slow,
        ),
    ],
)
def test_a_run_is_bit_identical_to_the_loop(method, settings, federation, tmp_path):
    chosen = {"model": "gcn-2x8", "seed": 3, **settings}
    loop = run(method, federation, engine="loop", **chosen)
    flower = run(method, federation, engine="flower", out=tmp_path / "run", **chosen)
    assert flower.summary["history_hash"] == loop.summary["history_hash"]
    assert flower.accuracy == loop.accuracy
    assert flower.traffic == loop.traffic
    for one, other in (
        (loop.models, flower.models),
        (loop.final_models, flower.final_models),
    ):
        one, other = flatten(one), flatten(other)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@patient
def test_a_stopped_run_is_resumed_bit_identically(federation, tmp_path):
    class StoppedError(Exception):
        """Ends a run."""

    def stop(entry):
        if entry["round"] == 2:
            raise StoppedError

    chosen = {"model": "gcn-2x8", "rounds": 3, "seed": 3, "checkpoint_every": 1}
    chosen["download"] = "int8"  # parties agree on filters too
    flower = {"engine": "flower", "out": tmp_path / "run", **chosen}
    with pytest.raises(StoppedError):
        run("fedavg", federation, callbacks=stop, **flower)
    resumed = run("fedavg", federation, resume=True, **flower)
    reference = run("fedavg", federation, engine="loop", **chosen)
    assert resumed.summary["history_hash"] == reference.summary["history_hash"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_parties_are_left_out_until_too_few_remain_and_nothing_is_left_behind(
    federation, tmp_path, monkeypatch
):
    engines, processes, seen = [], [], []
    watch = Watch(tmp_path / "run")
    original = Engine.__init__

    def recording(self, *args, **settings):
        original(self, *args, **settings)
        engines.append(self)
        processes.extend(party.process.pid for party in self.parties)

    def kill_some(entry):
        data = watch.data("", 0, 0)
        absent = [c["id"] for c in data["clients"] if c["absences"]]
        seen.append((data["state"], data["round"], data["bytes_up"], absent))
        victims = {1: engines[0].parties[1:2], 3: engines[0].parties}
        for party in victims.get(entry["round"], []):
            party.process.kill()

    monkeypatch.setattr(Engine, "__init__", recording)
    chosen = {"model": "gcn-2x8", "rounds": 5, "engine": "flower", "quorum": 0.6, "retries": 5}
    with pytest.raises(RoundFailed, match=r"round 4.* absent: .*no sign of life"):
        run("fedavg", federation, callbacks=kill_some, out=tmp_path / "run", **chosen)
    watch.server_close()
    history = read_history(tmp_path / "run")[:3]
    assert [each[:2] for each in seen] == [("running", 1), ("running", 2), ("running", 3)]
    assert [each[2] for each in seen] == [entry["bytes_up"] for entry in history]
    assert "1" in absent_in(history[1]) & absent_in(history[2])
    assert "1" in seen[-1][3]
    (engine,) = engines
    assert not engine.folder.exists()
    assert port_is_free(engine.coordinator.transport.address.port)
    assert not running("fedloom.deploy.local_party").keys() & set(processes)


def test_values_are_written_as_toml():
    values = (True, 3, 0.5, 1e-05, 'a "b"')
    assert [_toml(value) for value in values] == ["true", "3", "0.5", "1e-05", '"a \\"b\\""']
