"""A killed run with absent clients resumes, bit-identical to one that was not killed."""

from functools import partial

import pytest
from tests.faults.forked import crash_at
from tests.faults.schedule import LOST, Schedule
from tests.faults.test_absent import BOOM, absences
from tests.faults.test_kill import differences, places

from fedloom.core.absence import AbsenceTracker
from fedloom.core.message import Absent
from fedloom.experiments.result import load_run
from fedloom.experiments.run import run
from fedloom.methods.fedavg import FedAvg

ROUNDS = 6
FORGOT = Absent("started anew", lost_state=True)
FAULTS = {
    "raises in rounds": {
        (2, "train", "1"): BOOM,
        (3, "train", "3"): LOST,
        (4, "evaluate", "0"): BOOM,
    },
    "misses set-up, is handed it later": {
        (0, "setup", "1"): BOOM,
        (1, None, "1"): BOOM,
        (2, None, "1"): BOOM,
    },
    "does set-up, its answer is lost": {
        (0, "setup", "1"): LOST,
        (1, "setup", "1"): LOST,
        (2, "setup", "1"): LOST,
    },
    "never comes": {(None, None, "1"): BOOM},
    "forgets in training": {(2, "train", "2"): FORGOT, (3, "setup", "2"): BOOM},
    "forgets in evaluation, sits out a round": {
        (2, "evaluate", "2"): FORGOT,
        (4, "evaluate", "1"): FORGOT,
    },
}


def go(federation, folder, method="scaffold", **settings):
    given = {
        "model": "gcn-2x8",
        "rounds": ROUNDS,
        "checkpoint_every": 1,
        "quorum": 0.5,
        "out": folder,
        **settings,
    }
    return run(method, federation, **given)


@pytest.mark.parametrize(
    "place",
    places(
        "round-closed:2",
        "round-unclosed:3",
        "exchange-answered:9",
        "checkpoint-between-renames:4",
        quick=("round-closed:2",),
    ),
)
@pytest.mark.parametrize("kind", FAULTS)
def test_killed_in_the_middle_and_resumed_equals_unbroken(
    kind, place, node_federation, monkeypatch, tmp_path
):
    Schedule(monkeypatch, FAULTS[kind])
    unbroken = go(node_federation, tmp_path / "unbroken")
    assert crash_at(place, lambda: go(node_federation, tmp_path / "x"))
    go(node_federation, tmp_path / "x", resume=True)
    assert differences(tmp_path / "x", tmp_path / "unbroken") == set()
    assert absences(load_run(tmp_path / "x")) == absences(unbroken) != []


class Counted(FedAvg):
    """FedAvg with the clients that answered `size` in the set-up; no state holds the list."""

    def run(self, server):
        """Counts, then rounds."""
        server.ask(self.setup)
        there = list(server.ask(self.size))
        server.state["model"] = server.model()
        for _ in server.rounds(self.rounds):
            server.state["model"] = server.mean(
                self.train, clients=there, model=server.state["model"]
            )["model"]
            server.evaluate(model=server.state["model"])


def killed_with_a_fault_in_set_up_and_resumed_without(
    federation, monkeypatch, folder, method, fault, **settings
):
    for name in ("unbroken", "x"):
        with monkeypatch.context() as patch:
            Schedule(patch, {fault: BOOM})
            work = partial(
                run,
                method,
                federation,
                model="gcn-2x8",
                checkpoint_every=1,
                quorum=0.5,
                out=folder / name,
                **settings,
            )
            assert crash_at("round-closed:2", work) if name == "x" else work()
    run(
        method,
        federation,
        model="gcn-2x8",
        checkpoint_every=1,
        quorum=0.5,
        out=folder / "x",
        resume=True,
        **settings,
    )


def test_who_missed_set_up_and_is_there_when_it_is_done_again_changes_nothing(
    node_federation, monkeypatch, tmp_path
):
    """The server used the set-up without that client."""
    killed_with_a_fault_in_set_up_and_resumed_without(
        node_federation, monkeypatch, tmp_path, Counted(rounds=4), (0, "size", "1")
    )
    assert differences(tmp_path / "x", tmp_path / "unbroken") == set()


def test_in_a_secure_run_who_missed_a_sum_before_the_rounds_stays_out(
    cross_federation, monkeypatch, tmp_path
):
    killed_with_a_fault_in_set_up_and_resumed_without(
        cross_federation,
        monkeypatch,
        tmp_path,
        "fedstruct",
        (0, "setup", "1"),
        secure=True,
        rounds=4,
    )
    resumed, unbroken = (load_run(tmp_path / name) for name in ("x", "unbroken"))
    assert absences(resumed) == absences(unbroken) != []
    assert resumed.summary["accuracy"] == pytest.approx(unbroken.summary["accuracy"])


@pytest.mark.parametrize(
    ("kind", "forgotten"),
    [("forgets in evaluation, sits out a round", "sits_out"), ("never comes", "missed")],
)
def test_without_it_in_the_checkpoint_the_end_is_another(
    kind, forgotten, node_federation, monkeypatch, tmp_path
):
    """The control: each part of the checkpoint matters."""
    with monkeypatch.context() as patch:
        Schedule(patch, FAULTS[kind])
        go(node_federation, tmp_path / "unbroken")
        assert crash_at("round-closed:2", lambda: go(node_federation, tmp_path / "x"))
    without(monkeypatch, forgotten)
    Schedule(
        monkeypatch, {when: fault for when, fault in FAULTS[kind].items() if when[0]}
    )  # set-up goes well this time
    go(node_federation, tmp_path / "x", resume=True)
    assert differences(tmp_path / "x", tmp_path / "unbroken") != set()


def test_without_who_missed_set_up_the_end_is_another(node_federation, monkeypatch, tmp_path):
    without(monkeypatch, "absent")
    killed_with_a_fault_in_set_up_and_resumed_without(
        node_federation, monkeypatch, tmp_path, Counted(rounds=4), (0, "size", "1")
    )
    assert "history_hash" in differences(tmp_path / "x", tmp_path / "unbroken")


def without(monkeypatch, forgotten):
    """Removes a part of the checkpoints."""
    original = AbsenceTracker.resume
    monkeypatch.setattr(
        AbsenceTracker,
        "resume",
        lambda self, saved: original(self, {k: v for k, v in saved.items() if k != forgotten}),
    )
