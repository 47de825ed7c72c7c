"""Sealed letters: only the receiver reads them, and only as they were written, once."""

import pytest
import torch

from fedloom.core.message import flatten
from fedloom.data.partition import divide
from fedloom.data.synthetic import synthetic
from fedloom.engines.loop import Engine as Loop
from fedloom.errors import Refusal
from fedloom.experiments.run import run
from fedloom.privacy.peer_channel import PeerChannel


def met(*names):
    boxes = {name: PeerChannel(name) for name in names}
    for box in boxes.values():
        box.meet({name: other.public for name, other in boxes.items()})
    return boxes


def test_the_receiver_reads_what_was_written_and_nobody_else_can():
    boxes = met("a", "b", "c")
    blob = boxes["a"].seal("b", b"for b")
    assert b"for b" not in blob
    with pytest.raises(
        Refusal, match="client 'c' refuses the letter of 'a': it was changed on the way"
    ):
        boxes["c"].open("a", blob)
    with pytest.raises(Refusal, match="changed on the way"):
        boxes["b"].open("c", blob)  # under another sender's name
    with pytest.raises(Refusal, match="changed on the way"):
        boxes["a"].open("b", blob)  # sent back to its writer
    assert boxes["b"].open("a", blob) == b"for b"


def test_a_letter_cannot_be_changed_repeated_or_put_in_another_order():
    boxes = met("a", "b")
    first, second = boxes["a"].seal("b", b"1"), boxes["a"].seal("b", b"2")
    for place in range(len(first)):
        spoilt = bytearray(first)
        spoilt[place] ^= 1
        with pytest.raises(Refusal):
            boxes["b"].open("a", bytes(spoilt))
    for short in (b"", first[:5], first[:20]):
        with pytest.raises(Refusal):
            boxes["b"].open("a", short)
    assert boxes["b"].open("a", first) == b"1"
    with pytest.raises(Refusal, match="number 1 came before"):
        boxes["b"].open("a", first)
    assert boxes["b"].open("a", second) == b"2"


def test_no_two_letters_share_a_nonce_and_the_same_text_looks_different():
    boxes = met("a", "b", "c")
    blobs = [
        boxes["a"].seal("b", b"same"),
        boxes["a"].seal("b", b"same"),
        boxes["a"].seal("c", b"same"),
        boxes["b"].seal("a", b"same"),
    ]
    assert len({blob[8:] for blob in blobs}) == 4


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda keys: {**keys, "a": keys["b"]}, "the key under its own name is not its own"),
        (lambda keys: {name: key for name, key in keys.items() if name != "a"}, "not its own"),
        (lambda keys: {**keys, "c": keys["b"]}, "one key is there twice"),
        (lambda keys: {**keys, "b": bytes(32)}, "the key of 'b' is not valid"),
        (lambda keys: {**keys, "b": b"short"}, "the key of 'b' is not valid"),
    ],
)
def test_keys_that_could_let_somebody_read_are_refused(spoil, words):
    boxes = {name: PeerChannel(name) for name in "abc"}
    with pytest.raises(Refusal, match=words):
        boxes["a"].meet(spoil({name: box.public for name, box in boxes.items()}))


def test_keys_are_taken_once():
    boxes = met("a", "b")
    with pytest.raises(Refusal, match="refuses to meet its peers again"):
        boxes["a"].meet({name: box.public for name, box in boxes.items()})


# ---- in a run ----
SETTINGS = {"model": "dgcn-2x8", "rounds": 2, "hops": 3, "d_s": 8, "hidden": "6"}


@pytest.fixture
def federation():
    return divide(
        synthetic(nodes=60, classes=3, features=7, seed=0),
        3,
        "random",
        0,
        cross_edges="known",
        split="40/30/30",
    )


def recorded(monkeypatch):
    calls, original = [], Loop.call

    def call(self, phase, sent):
        replies = original(self, phase, sent)
        calls.append((phase, sent, replies))
        return replies

    monkeypatch.setattr(Loop, "call", call)
    return calls


def test_in_a_secure_run_the_server_carries_bytes_it_cannot_read(federation, monkeypatch):
    calls = recorded(monkeypatch)
    plain = run("fedstruct", federation, **SETTINGS)
    open_letters = [
        flatten(r) for phase, _, replies in calls if phase == "offer" for r in replies.values()
    ]
    assert any(
        t.is_floating_point() for letter in open_letters for t in letter.values()
    )  # the control: without sealing all is there
    calls.clear()
    secure = run("fedstruct", federation, **SETTINGS, secure=True)
    assert secure.accuracy == pytest.approx(plain.accuracy, abs=1e-6)
    assert {"greet_peers", "meet_peers"} <= {phase for phase, _, _ in calls}
    for phase, _, replies in calls:
        if phase in ("greet", "offer"):
            assert all(
                t.dtype == torch.uint8 and t.dim() == 1
                for r in replies.values()
                for t in flatten(r).values()
            )
    assert (
        secure.traffic["phases"]["offer"]["bytes_up"] > plain.traffic["phases"]["offer"]["bytes_up"]
    )


@pytest.mark.parametrize(
    ("tamper", "words"),
    [
        (
            lambda letters: {s: torch.cat([b[:-1], b[-1:] ^ 1]) for s, b in letters.items()},
            "was changed on the way",
        ),
        (
            lambda letters: dict(zip(letters, reversed(letters.values()), strict=True)),
            "was changed on the way",
        ),
    ],
)
def test_a_relay_that_tampers_is_caught(federation, monkeypatch, tamper, words):
    original = Loop.call

    def call(self, phase, sent):
        if phase == "absorb":
            sent = {c: {"letters": tamper(m["letters"])} for c, m in sent.items()}
        return original(self, phase, sent)

    monkeypatch.setattr(Loop, "call", call)
    with pytest.raises(Refusal, match=words):
        run("fedstruct", federation, **SETTINGS, secure=True)


def test_a_relay_that_repeats_a_letter_is_caught(federation, monkeypatch):
    original, kept = Loop.call, {}

    def call(self, phase, sent):
        if phase == "absorb":
            sent = kept.setdefault("first", sent)
        return original(self, phase, sent)

    monkeypatch.setattr(Loop, "call", call)
    with pytest.raises(Refusal, match="came before"):
        run("fedstruct", federation, **SETTINGS, secure=True)


def test_a_client_greets_once(federation, monkeypatch):
    original = Loop.call

    def call(self, phase, sent):
        if phase == "offer":
            original(self, "greet_peers", {c: {} for c in sent})
        return original(self, phase, sent)

    monkeypatch.setattr(Loop, "call", call)
    with pytest.raises(Refusal, match="refuses to greet its peers again"):
        run("fedstruct", federation, **SETTINGS, secure=True)
