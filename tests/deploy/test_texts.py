"""Texts that the other side sends: cut, in one line, without hidden characters."""

import json

import pytest
from in_process import InProcess

from fedloom.core.absence import listed
from fedloom.core.message import Absent
from fedloom.deploy.party import Party
from fedloom.errors import ConfigError, RoundFailed

PARTY = "bank-a"
# A terminal would clear its screen, set its title and print backwards.
HOSTILE = "\x1b[2J\x1b]0;owned\x07 first line\r\nsecond line \u202egnp.exe\u2066 \x9b31m \u200b\x00"
LONG = HOSTILE + 50_000 * "A"  # a longer one is refused unread (test_long_answers.py)
HIDDEN = ("\x1b", "\x07", "\x00", "\x9b", "\r", "\u202e", "\u2066", "\u200b", "\u2028")


def is_plain(text, length=600):
    return len(text) < length and "\n" not in text and not any(c in text for c in HIDDEN)


class Loud(Party):
    """A party that answers every phase with a long and hostile error."""

    def _perform(self, header, body):
        raise RuntimeError

    def _failure(self, error):
        return "error", json.dumps({"cause": LONG, "lost_state": False}).encode()


def loud(tmp_path, **run):
    deployed = InProcess(tmp_path, rounds=4, run=run)
    deployed.transport.parties[PARTY].__class__ = Loud
    return deployed


def test_long_errors_leave_a_small_history_without_hidden_characters(tmp_path):
    lines = []
    result = loud(tmp_path, quorum=0.5).serve(log=lines.append)
    history = (tmp_path / "run" / "history.jsonl").read_text()
    causes = [a["cause"] for entry in result.history for a in entry["absent"]]
    assert len(causes) >= 4
    assert len(history) < 20_000
    assert "first line second line" in causes[0]
    assert all(is_plain(text) for text in (*causes, *lines))
    assert all(path.stat().st_size < 200_000 for path in (tmp_path / "run").iterdir())


def test_without_the_cleaning_the_history_has_all_of_it_and_escape_sequences(tmp_path, monkeypatch):
    for module in ("core.message", "deploy.coordinator"):
        monkeypatch.setattr(f"fedloom.{module}.plain_text", lambda text, length=0: str(text))
    loud(tmp_path, quorum=0.5).serve()
    path = tmp_path / "run" / "history.jsonl"
    assert path.stat().st_size > 200_000
    with open(path) as history:
        assert "\x1b[2J" in json.loads(history.readline())["absent"][0]["cause"]


def test_the_error_that_ends_a_run_is_plain_too(tmp_path):
    with pytest.raises(RoundFailed) as ended:
        loud(tmp_path).serve()
    assert is_plain(str(ended.value), 2000)
    assert is_plain(json.loads((tmp_path / "run" / "summary.json").read_text())["cause"], 2100)


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
def test_the_terminal_of_a_coordinator_gets_no_escape_sequence_of_a_party(deploy, monkeypatch):
    d = deploy(rounds=4)
    for name in ("_perform", "_failure"):  # its processes are forked from this one
        monkeypatch.setattr(Party, name, vars(Loud)[name])
    d.serve()
    d.join_all()
    assert d.processes["coordinator"].wait() == 1
    printed = (d.folder / "coordinator.log").read_bytes()
    assert b"first line second line" in printed
    assert len(printed) < 20_000
    assert not any(character.encode() in printed for character in HIDDEN if character != "\r")


def test_a_long_agreement_is_refused_in_a_short_line(tmp_path):
    deployed = InProcess(tmp_path)
    deployed.transport.parties[PARTY].agreed["model"]["name"] = LONG
    with pytest.raises(ConfigError, match=r"model\.name is") as refused:
        deployed.serve()
    assert is_plain(str(refused.value))


def test_the_reason_of_a_returned_order_is_plain(tmp_path, monkeypatch):
    monkeypatch.setattr("fedloom.deploy.coordinator.MAX_RETURNS", 0)
    monkeypatch.setattr("fedloom.deploy.coordinator.POLL_SECONDS", 0.01)
    deployed = InProcess(tmp_path)
    coordinator = deployed.begun()
    send = deployed.transport.send

    def returned(envelopes, limit):
        pending = send(envelopes, limit)
        answers = deployed.transport._answers
        for number, name in pending.items():
            answers[number] = (name, LONG) if name == PARTY else answers[number]
        return pending

    deployed.transport.send = returned
    absent = deployed.train(coordinator)[PARTY]
    assert isinstance(absent, Absent)
    assert is_plain(absent.cause)


def test_a_thousand_causes_make_a_short_list():
    text = listed({f"bank-{k}": Absent(f"cause {k}") for k in range(1000)})
    assert len(text) < 2000
    assert text.endswith("and 980 more causes")


def test_a_party_cleans_the_texts_of_the_coordinator(tmp_path):
    deployed = InProcess(tmp_path)
    party, coordinator = deployed.transport.parties[PARTY], deployed.coordinator()
    coordinator.wait_for_parties(0.0, 1, lambda line: None)
    coordinator.control("fedloom_refuse", {PARTY: {"cause": LONG}})
    assert is_plain(party.refusal, 1001)
    wrong = {"nonce": "", "agreed": {"data": LONG}}
    coordinator.control("fedloom_begin", {PARTY: wrong})
    assert all(is_plain(line, 1100) for line in party.complaints)
    deployed.begun().control("fedloom_finish", {PARTY: {"status": HOSTILE, "stage": "train"}})
    assert is_plain(party.status)
