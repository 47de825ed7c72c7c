"""`--engine flower`: every client in a process of its own, over a real link. The rest of the methods: bench/flower.py."""

import os
import signal

import pytest
from deployment import port_is_free, running

import fedloom
from fedloom.core.registry import make_method
from fedloom.deploy.engine import Engine
from fedloom.errors import RoundFailed
from fedloom.experiments.report.watch import Watch
from fedloom.experiments.run import run


@pytest.fixture(scope="module")
def federation():
    return fedloom.divide(fedloom.load("synthetic:nodes=120,features=8"), 3, "random", 0)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (
            "fedproto",
            {"rounds": 2, "model": "gcn-2x8,gat-2x8,sage-2x8"},
        ),  # messages for each, of any number of prototypes
        ("fedavg", {"rounds": 2, "secure": True, "participation": 1.0, "finetune": 1}),
    ],
)
def test_it_gives_the_loops_hash(method, settings, federation, tmp_path):
    chosen = {"model": "gcn-2x8", "seed": 3, **settings}
    loop = run(method, federation, **chosen)
    flower = run(method, federation, engine="flower", out=tmp_path / "run", **chosen)
    assert flower.summary["history_hash"] == loop.summary["history_hash"]
    assert flower.accuracy == loop.accuracy
    assert flower.traffic == loop.traffic
    assert set(flower.models) <= {"server"}


def test_a_run_that_was_stopped_is_resumed_to_the_bit(federation, tmp_path):
    class StoppedError(Exception):
        """Stands for whatever ends a run."""

    def stop(entry, planned):
        if entry["round"] == 2:
            raise StoppedError

    chosen = {"model": "gcn-2x8", "rounds": 3, "seed": 3, "checkpoint_every": 1}
    with pytest.raises(StoppedError):
        run("fedavg", federation, engine="flower", out=tmp_path / "run", on_round=stop, **chosen)
    resumed = run(
        "fedavg", federation, engine="flower", out=tmp_path / "run", resume=True, **chosen
    )
    assert (
        resumed.summary["history_hash"]
        == run("fedavg", federation, **chosen).summary["history_hash"]
    )


def test_killed_parties_are_left_out_and_nothing_is_left_behind(federation, tmp_path):
    engines, begun, followed = [], [], []
    watching = Watch(tmp_path / "run")

    def kill_one(entry, planned):
        told = watching.data("", 0, 0)
        followed.append(
            (
                told["state"],
                told["round"],
                told["bytes_up"],
                [c["id"] for c in told["clients"] if c["absences"]],
            )
        )
        if entry["round"] == 1:
            (engine,) = engines
            os.kill(engine.parties[1].process.pid, signal.SIGKILL)

    made = Engine.__init__

    def noted(self, *args, **settings):
        made(self, *args, **settings)
        engines.append(self)
        begun.extend(party.process.pid for party in self.parties)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "__init__", noted)
        result = run(
            "fedavg",
            federation,
            model="gcn-2x8",
            rounds=3,
            engine="flower",
            quorum=0.6,
            on_round=kill_one,
            out=tmp_path / "run",
        )
    watching.server_close()
    assert [each[:2] for each in followed] == [("running", 1), ("running", 2), ("running", 3)]
    assert [each[2] for each in followed] == [entry["bytes_up"] for entry in result.history]
    assert (followed[0][3], followed[-1][3]) == ([], ["1"])
    assert result.summary["status"] == "completed"
    assert result.summary["absences"].keys() == {"1"}
    (engine,) = engines
    assert not engine.folder.exists()
    assert port_is_free(engine.coordinator.transport.address.port)
    assert not running("fedloom.deploy.local_party").keys() & set(begun)


def test_too_few_parties_end_the_run_with_who_and_why(federation):
    def kill_all(entry, planned):
        for pid, parent in running("fedloom.deploy.local_party").items():
            if parent == os.getpid():
                os.kill(pid, signal.SIGKILL)

    with pytest.raises(RoundFailed, match="no sign of life"):
        run(
            "fedavg",
            federation,
            model="gcn-2x8",
            rounds=3,
            engine="flower",
            quorum=0.6,
            retries=0,
            on_round=kill_all,
        )


def test_a_method_that_comes_composed_another_is_found_by_its_name(federation):
    from fedloom.deploy.engine import _name_of, _toml

    assert _name_of(make_method("fedgh", {"base": "fedprox"})) == "fedgh"
    assert _name_of(make_method("fedsage+", {})) == "fedsage+"
    assert [_toml(value) for value in (True, 3, 0.5, 1e-05, 'a "b"')] == [
        "true",
        "3",
        "0.5",
        "1e-05",
        '"a \\"b\\""',
    ]
