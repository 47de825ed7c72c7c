"""Absence in secure sums: the threshold of the sum counts, and no stage is answered twice."""

import pytest
import torch
from tests.faults.schedule import LOST, Schedule
from tests.faults.test_absent import BOOM, absences, go

from fedloom.core.message import flatten
from fedloom.errors import RoundFailed
from fedloom.privacy.secure_aggregation import SecureResponder
from fedloom.privacy.secure_sum import TooFew

pytestmark = pytest.mark.usefixtures("reference_engine")

STAGES = ("advertise_keys", "share_keys", "train", "confirm", "unmask")


def close(one, other):
    one, other = flatten(one.final_models["server"]), flatten(other.final_models["server"])
    return all(torch.allclose(one[key], other[key], atol=2e-5) for key in one)


def asked_for(schedule, number, client):
    return [p for r, p, c in schedule.asked if (r, c) == (number, client)]


@pytest.fixture
def sums(monkeypatch):
    """Lists (client, number of the sum) for every reply to `advertise_keys`."""
    seen, original = [], SecureResponder._advertise

    def advertise(self, method, client, **message):
        seen.append((client.name, int(message["number"])))
        return original(self, method, client, **message)

    monkeypatch.setattr(SecureResponder, "_advertise", advertise)
    return seen


@pytest.mark.parametrize("fault", [BOOM, LOST], ids=["raises", "lost"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_client_lost_at_any_stage_is_survived(stage, fault, node_federation, monkeypatch, sums):
    # A client that is lost after it sent its vector is in the sum.
    with monkeypatch.context() as patch:
        Schedule(patch, {} if stage in STAGES[3:] else {(2, "train", "1"): fault})
        plain = go(node_federation, rounds=2)
    with monkeypatch.context() as patch:
        schedule = Schedule(patch, {(2, stage, "1"): [fault]})
        result = go(node_federation, rounds=2, secure=True)
    assert result.summary["status"] == "completed"
    assert close(plain, result)
    assert absences(result) == [
        (2, stage, "1", "did not answer" if fault is LOST else "ValueError: boom")
    ]
    assert len(set(sums)) == len(sums)
    # Each stage once, up to the fault; then the stages of the evaluation, with the client.
    of_sum = STAGES[: STAGES.index(stage) + 1]
    assert asked_for(schedule, 2, "1") == [
        *of_sum,
        "advertise_keys",
        "share_keys",
        "evaluate_sum",
        "confirm",
        "unmask",
    ]


def test_with_a_quorum_of_1_its_error_ends_the_run(node_federation, monkeypatch):
    Schedule(monkeypatch, {(2, "share_keys", "1"): BOOM})
    with pytest.raises(ValueError, match="boom") as raised:
        go(node_federation, secure=True, quorum=1.0)
    assert raised.value is BOOM


@pytest.mark.parametrize("stage", STAGES[:2])
def test_too_few_before_the_phase_begin_a_new_sum(stage, node_federation, monkeypatch, sums):
    with monkeypatch.context() as patch:
        schedule = Schedule(patch, {(2, stage, c): [BOOM] for c in "12"})
        result = go(node_federation, secure=True)
        assert result.summary["status"] == "completed"
        assert asked_for(schedule, 2, "0").count("train") == 1
        assert len(set(sums)) == len(sums)  # each sum has its own number
        assert result.summary["retried"] == 4
    unharmed = go(node_federation, secure=True)
    assert close(unharmed, result)
    assert result.summary["secure"] == unharmed.summary["secure"]


@pytest.mark.parametrize("stage", STAGES[2:])
def test_too_few_from_the_phase_on_fail_the_round(stage, node_federation, monkeypatch, sums):
    schedule = Schedule(monkeypatch, {(2, stage, c): BOOM for c in "12"})
    with pytest.raises(
        RoundFailed,
        match=r"round 2, 'train': secure sum: .*nothing was released; "
        "absent: 1, 2: ValueError: boom",
    ):
        go(node_federation, secure=True)
    assert all(
        asked_for(schedule, 2, c).count("train") == 1 for c in "0123"
    )  # no client trained twice
    assert len(set(sums)) == len(sums)


def test_too_few_all_the_time_fail_the_round_after_so_many_sums(node_federation, monkeypatch, sums):
    schedule = Schedule(monkeypatch, {(2, "share_keys", c): BOOM for c in "12"})
    with pytest.raises(
        RoundFailed, match=r"round 2, 'train': secure sum: 2 .*; absent: 1, 2: ValueError: boom"
    ):
        go(node_federation, secure=True, retries=3)
    assert asked_for(schedule, 2, "0") == ["advertise_keys", "share_keys"] * 4
    assert len(set(sums)) == len(sums)


def test_silence_with_a_quorum_of_1_is_borne_as_far_as_the_cohort(node_federation, monkeypatch):
    for cohort, lost in ((0.0, "1"), (0.5, "12")):
        with monkeypatch.context() as patch:
            Schedule(patch, {(2, "train", c): LOST for c in lost})
            with pytest.raises(TooFew):
                go(node_federation, secure=True, quorum=1.0, secure_cohort=cohort)
    Schedule(monkeypatch, {(2, "train", "1"): LOST})
    result = go(node_federation, secure=True, quorum=1.0, secure_cohort=0.5)
    assert result.summary["status"] == "completed"


def test_who_is_lost_in_one_sum_of_a_round_is_in_no_other(node_federation, monkeypatch):
    schedule = Schedule(monkeypatch, {(2, "train", "1"): BOOM})
    result = go(node_federation, "fedgkc", copilot="gcn-2x8", secure=True)
    assert "contribute" not in asked_for(schedule, 2, "1")
    assert "contribute" in asked_for(schedule, 3, "1")
    assert result.summary["status"] == "completed"


def test_a_sum_before_the_rounds_is_not_handed_in_again(cross_federation, monkeypatch):
    schedule = Schedule(monkeypatch, {(0, "setup", "1"): [BOOM]})
    result = go(cross_federation, "fedstruct", secure=True)
    assert result.summary["status"] == "completed"
    assert [p for r, p, c in schedule.asked if c == "1"].count("setup") == 1
    causes = {cause for *_, cause in absences(result)[1:]}
    assert causes == {"missed 'setup' before the rounds, which a secure run does not repeat"}
