"""An answer that is longer than it can be is refused by its length, and nothing of it is parsed."""

import json
import resource

import pytest
from in_process import InProcess, absences

from fedloom.core.message import DEFAULT_LIMIT, Limit, encode
from fedloom.deploy import party_transport
from fedloom.deploy.coordinator import CONTROL_LIMIT
from fedloom.deploy.engine import RemoteEngine
from fedloom.deploy.envelope import parse
from fedloom.deploy.party import Party
from fedloom.deploy.party_transport import PartyTransport

LIAR = "bank-c"


def bomb(size, phase="train"):
    """A message whose header is a JSON text that takes about 25 times its length in memory."""
    start = json.dumps({"__metadata__": {"format": "fedloom/1", "phase": phase}})[:-1] + ',"a":['
    text = start + "{}," * (size // 3) + "{}]}"
    return len(text).to_bytes(8, "little") + text.encode()


def lying(monkeypatch, body, phase="train", number=2):
    """Makes the liar answer with other bytes in one round, also in processes started later."""
    perform = Party._perform

    def performed(self, header, order):
        honest = perform(self, header, order)
        lies = (self.name, header.phase, header.round) == (LIAR, phase, number)
        return body if lies else honest

    monkeypatch.setattr(Party, "_perform", performed)


def causes(history):
    return [(e["round"], a["client"], a["cause"]) for e in history for a in e.get("absent", ())]


@pytest.mark.parametrize(
    ("size", "says", "refused"),
    [
        (2 * CONTROL_LIMIT, "bytes, more than the limit of", {"size": 1}),  # not even opened
        (CONTROL_LIMIT // 2, "bytes, more than the limit of", {}),
        (5000, "the header claims 50", {}),
    ],
)
def test_a_long_answer_is_refused_unread(size, says, refused, tmp_path, monkeypatch):
    lying(monkeypatch, bomb(size))
    result = InProcess(tmp_path, rounds=3, run={"quorum": 0.5}).serve()
    (absence,) = causes(result.history)
    assert absence[:2] == (2, LIAR)
    assert says in absence[2]
    assert result.summary["engine_details"]["refused"] == refused
    assert result.summary["status"] == "completed"


def test_without_the_limits_it_is_parsed(tmp_path, monkeypatch):
    lying(monkeypatch, bomb(2 * CONTROL_LIMIT))
    monkeypatch.setattr(RemoteEngine, "_limit", lambda *_: Limit(2**30, 2**30))
    result = InProcess(tmp_path, rounds=3, run={"quorum": 0.5}).serve()
    ((*_, cause),) = causes(result.history)
    assert "damaged" in cause  # as safetensors found out, after all of it had been parsed


def test_the_limit_is_that_of_the_phase(tmp_path, monkeypatch):
    limits, limit = {}, RemoteEngine._limit

    def noted(self, name, phase):
        limits[phase] = limit(self, name, phase)
        return limits[phase]

    monkeypatch.setattr(RemoteEngine, "_limit", noted)
    InProcess(tmp_path, rounds=1).serve()
    assert limits["size"].total < 5000
    assert limits["evaluate"].total < 6000
    assert max(limit.total for limit in limits.values()) < 10_000 < DEFAULT_LIMIT.header


def test_answers_to_control_orders_are_short(tmp_path, monkeypatch):
    deployed, hello = InProcess(tmp_path), Party._hello

    def long_hello(self, order, session):
        answer = hello(self, order, session)
        return {**answer, "more": [{}] * 100_000} if self.name == LIAR else answer

    monkeypatch.setattr(Party, "_hello", long_hello)
    made = deployed.coordinator()
    _, absent = made._hello(sorted(deployed.agreement.parties))
    assert list(absent) == [LIAR]
    assert "more than the limit" in absent[LIAR].cause


def test_the_text_of_an_error_is_short(tmp_path, monkeypatch):
    deployed = InProcess(tmp_path)
    made = deployed.begun()
    monkeypatch.setattr(
        Party, "_failure", lambda *_: ("error", b'{"cause":"' + b"x" * 100_000 + b'"}')
    )
    monkeypatch.setattr(Party, "_perform", lambda *_: 1 / 0)
    answers = made.ask("train", {LIAR: b""}, 1, {LIAR: 10}, lambda name, body: body)
    assert "more than the limit" in absences(answers)[LIAR]


def test_an_answer_is_read_in_the_exchange_and_counts_only_if_it_can_be_read(tmp_path):
    deployed = InProcess(tmp_path)
    made = deployed.begun(quorum=0.3, grace=0.05)
    deployed.transport.held.add("bank-a")  # its answer never comes

    def read(name, body):
        if name == LIAR:
            raise ValueError("it cannot be read")
        return len(body)

    bodies = dict.fromkeys(deployed.agreement.parties, encode({}, "setup"))
    answers = made.ask("setup", bodies, 0, dict.fromkeys(bodies, 1000), read)
    assert answers["bank-b"] > 0
    assert absences(answers)[LIAR] == "refused: it cannot be read"
    assert absences(answers)["bank-a"].startswith("late")  # the grace began with bank-b's answer


# ---- orders ----
def test_a_party_refuses_an_order_that_is_longer_than_its_phase_can_need(tmp_path):
    deployed = InProcess(tmp_path)
    made = deployed.begun()
    answers = made.ask("train", {LIAR: bomb(400_000)}, 1)
    assert "the header claims 400" in absences(answers)[LIAR]
    answers = made.control("fedloom_best", {LIAR: {"stage": "x" * 1_000_000}})
    assert "the order has 1000013 bytes, more than the limit of" in answers[LIAR].cause


# ---- real processes ----
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("patient")
def test_a_header_of_48_mb_takes_no_memory_and_no_round(deploy, monkeypatch):
    lying(monkeypatch, bomb(48_000_000))
    call = RemoteEngine.call

    def measured(self, phase, messages):
        """Runs in the coordinator's process, which says how much memory an exchange took."""
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        replies = call(self, phase, messages)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        print(f"exchange {phase} {self.round} took {grown} kB", flush=True)
        return replies

    monkeypatch.setattr(RemoteEngine, "call", measured)
    d = deploy(rounds=3, run={"quorum": 0.5, "deadline": 20.0})
    d.serve()
    d.join_all()
    summary = d.completed()
    assert summary["status"] == "completed"
    assert {(number, name) for number, name, _ in causes(d.history())} >= {(2, LIAR)}
    assert summary["absences"].keys() == {LIAR}
    words = d.output("coordinator").partition("exchange train 2 took ")[2].split()
    # The door refuses the answer before it is read. Parsed, it would take 1.2 GB.
    assert int(words[0]) < 100_000
    assert "at most" in d.output(LIAR)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("patient")
def test_an_answer_whose_parts_never_arrive_ends_at_the_deadline(deploy, monkeypatch):
    """Flower would wait for the parts. Meanwhile nobody else's answer would be read."""
    answer = PartyTransport.answer

    def announcing(self, order, envelope):
        if parse(envelope)[0].phase == "train":  # from now on it only announces its answers
            party_transport.push_objects = lambda *given, **more: None
        answer(self, order, envelope)

    d = deploy(rounds=2, run={"quorum": 0.5, "deadline": 10.0})
    d.serve()
    for name in d.parties:
        if name == LIAR:
            monkeypatch.setattr(PartyTransport, "answer", announcing)
        d.join(name)
    summary = d.completed()
    assert summary["absences"].keys() == {LIAR}
    assert all("late" in cause or "busy" in cause for *_, cause in causes(d.history()))
