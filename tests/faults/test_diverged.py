"""If most clients answer with NaN, what they were sent is the cause: the run fails and says why."""

import re

import pytest
import torch
from tests.faults.schedule import Schedule

from fedloom.core.message import flatten, tree_map
from fedloom.core.waist import Waist
from fedloom.errors import MessageError, RoundFailed
from fedloom.experiments.result import load_run
from fedloom.experiments.run import run

# No update is shortened: by default such a client does no harm.
SETTINGS = {"model": "gcn-2x8", "rounds": 4, "engine": "loop", "clip_norms": 0.0}
QUORUM = {"quorum": 0.2}  # one client of four is enough


def huge(reply):
    """A reply of numbers that may travel, but whose mean no client can compute with."""
    return tree_map(lambda t: torch.full_like(t, 2.0**99), reply)


def of_nan(reply):
    return tree_map(lambda t: torch.full_like(t, torch.nan), reply)


def absences(result):
    return [
        (entry["round"], absence["client"])
        for entry in result.history
        for absence in entry.get("absent", ())
    ]


@pytest.mark.parametrize("settings", [QUORUM, {}])
def test_a_client_that_makes_the_others_overflow_is_named_and_they_stay(
    settings, node_federation, monkeypatch, tmp_path
):
    Schedule(monkeypatch, {(2, "train", "1"): huge})
    with pytest.raises(RoundFailed) as failed:
        run("fedavg", node_federation, out=tmp_path / "run", **SETTINGS, **settings)
    text = str(failed.value)
    assert text.startswith("round 3, 'train': 4 of 4 clients answered with numbers that are not")
    assert "so they are not the cause. In round 2, what client '1' sent in 'train' was" in text
    assert re.search(r"was [1-9]\.\d?e\+\d\d times as large as the median client's", text)
    kept = load_run(tmp_path / "run")
    assert kept.summary["status"] == "failed"
    assert absences(kept) == []  # nobody is left out
    # The model is that of before the aggregation.
    monkeypatch.undo()
    before = run("fedavg", node_federation, **{**SETTINGS, "rounds": 1})
    for name, tensor in flatten(before.final_models["server"]).items():
        assert torch.equal(tensor, kept.final_models["server"][name])


def test_without_the_check_the_others_are_left_out_and_the_run_is_completed(
    node_federation, monkeypatch
):
    honest = ("0", "2", "3")
    # The attacker computes nothing, so it never overflows.
    lies = {(number, "train", "1"): huge for number in (2, 3, 4)}
    Schedule(monkeypatch, lies)
    monkeypatch.setattr(Waist, "_require_few", lambda *_: None)
    result = run("fedavg", node_federation, **SETTINGS, **QUORUM)
    assert result.summary["status"] == "completed"
    assert {client for _, client in absences(result)} == set(honest)


def test_a_minority_that_answers_with_nan_is_left_out_as_before(node_federation, monkeypatch):
    Schedule(monkeypatch, {(2, "train", c): of_nan for c in "13"})
    result = run("fedavg", node_federation, **SETTINGS, **QUORUM)
    assert absences(result) == [(2, "1"), (2, "3")]
    assert result.summary["status"] == "completed"
    with pytest.raises(MessageError, match=r"client '1' in 'train': tensor .* holds nan"):
        run("fedavg", node_federation, **SETTINGS)


@pytest.mark.parametrize("settings", [QUORUM, {}, {"engine": "stacked"}])
def test_a_training_that_diverges_fails_and_blames_the_learning_rate(settings, node_federation):
    with pytest.raises(RoundFailed) as failed:
        run("scaffold", node_federation, **{**SETTINGS, **settings}, lr=1e12)
    text = str(failed.value)
    assert "clients answered with numbers that are not finite or too large" in text
    assert "No client stood out before" in text
    assert "use a smaller learning rate" in text


def test_a_sum_that_cannot_be_sent_fails_at_once(node_federation, monkeypatch):
    def lie(reply):
        return {**reply, "gradient": huge(reply["gradient"])}

    Schedule(monkeypatch, {(3, "gradient", client): lie for client in "123"})
    with pytest.raises(RoundFailed, match="round 3, 'gradient': the sum of the clients' answers"):
        run("fedsgd", node_federation, **SETTINGS)


def test_what_the_server_itself_computes_is_checked_before_it_is_sent(node_federation, monkeypatch):
    """SCAFFOLD adds up the replies by itself, so its control is checked when it is sent."""
    Schedule(monkeypatch, {(2, "train", c): huge for c in "012"})
    with pytest.raises(RoundFailed) as failed:
        run("scaffold", node_federation, **SETTINGS, **QUORUM)
    assert "round 3, 'train'" in str(failed.value)
