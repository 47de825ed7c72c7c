"""Peer channel: only the receiver can read a message, unchanged and once."""

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedloom.core.message import flatten
from fedloom.data.partition import divide
from fedloom.data.synthetic import synthetic
from fedloom.engines.loop import Engine as Loop
from fedloom.errors import Refusal
from fedloom.experiments.run import run
from fedloom.privacy.identity import simulated_identity
from fedloom.privacy.peer_channel import PeerChannel

pytestmark = pytest.mark.usefixtures("reference_engine")


def met(*names):
    channels = {name: PeerChannel(simulated_identity(name, names, 0)) for name in names}
    for channel in channels.values():
        channel.meet({name: other.announced for name, other in channels.items()})
    return channels


def test_only_the_receiver_can_read_a_message():
    channels = met("a", "b", "c")
    blob = channels["a"].seal("b", b"for b")
    assert b"for b" not in blob
    with pytest.raises(
        Refusal, match="client 'c' refuses the message of 'a': it was changed on the way"
    ):
        channels["c"].open("a", blob)
    with pytest.raises(Refusal, match="changed on the way"):
        channels["b"].open("c", blob)  # under another sender's name
    with pytest.raises(Refusal, match="changed on the way"):
        channels["a"].open("b", blob)  # sent back to its writer
    assert channels["b"].open("a", blob) == b"for b"


def test_a_message_that_was_changed_repeated_or_reordered_is_refused():
    channels = met("a", "b")
    first, second = channels["a"].seal("b", b"1"), channels["a"].seal("b", b"2")
    for place in range(len(first)):
        spoilt = bytearray(first)
        spoilt[place] ^= 1
        with pytest.raises(Refusal):
            channels["b"].open("a", bytes(spoilt))
    for short in (b"", first[:5], first[:20]):
        with pytest.raises(Refusal):
            channels["b"].open("a", short)
    assert channels["b"].open("a", first) == b"1"
    with pytest.raises(Refusal, match="number 1 came before"):
        channels["b"].open("a", first)
    assert channels["b"].open("a", second) == b"2"


def test_equal_plaintexts_have_different_ciphertexts():
    channels = met("a", "b", "c")
    blobs = [
        channels["a"].seal("b", b"same"),
        channels["a"].seal("b", b"same"),
        channels["a"].seal("c", b"same"),
        channels["b"].seal("a", b"same"),
    ]
    assert len({blob[8:] for blob in blobs}) == 4


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda keys: {**keys, "a": keys["b"]}, "the key under its own name is not its own"),
        (lambda keys: {name: key for name, key in keys.items() if name != "a"}, "not its own"),
        (lambda keys: {**keys, "c": keys["b"]}, "one key is there twice"),
        (lambda keys: {**keys, "b": signed_by_b(bytes(32))}, "the key of 'b' is not valid"),
        (lambda keys: {**keys, "b": b"short"}, "'b' has not signed the key under its name"),
        (lambda keys: {**keys, "b": forged(keys)}, "'b' has not signed the key under its name"),
        (lambda keys: {**keys, "d": keys["b"][:32] + bytes(64)}, "one key is there twice"),
        (lambda keys: {**keys, "d": forged(keys)}, "'d' has not signed the key under its name"),
    ],
)
def test_invalid_sets_of_keys_are_refused(spoil, words):
    channels = {name: PeerChannel(simulated_identity(name, tuple("abc"), 0)) for name in "abc"}
    with pytest.raises(Refusal, match=words):
        channels["a"].meet(spoil({name: channel.announced for name, channel in channels.items()}))


def signed_by_b(key):
    return key + simulated_identity("b", tuple("abc"), 0).sign("peer key", key)


def forged(keys):
    """A key of the server's own, with the signature of another key."""
    return X25519PrivateKey.generate().public_key().public_bytes_raw() + keys["b"][32:]


def test_keys_are_accepted_only_once():
    channels = met("a", "b")
    with pytest.raises(Refusal, match="refuses to meet its peers again"):
        channels["a"].meet({name: channel.announced for name, channel in channels.items()})


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


def test_a_secure_run_relays_only_encrypted_messages(federation, monkeypatch):
    calls = recorded(monkeypatch)
    plain = run("fedstruct", federation, **SETTINGS)
    readable = [
        flatten(r) for phase, _, replies in calls if phase == "offer" for r in replies.values()
    ]
    assert any(
        t.is_floating_point() for message in readable for t in message.values()
    )  # the control: a plain run sends them unencrypted
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
            lambda inbox: {s: torch.cat([b[:-1], b[-1:] ^ 1]) for s, b in inbox.items()},
            "was changed on the way",
        ),
        (
            lambda inbox: dict(zip(inbox, reversed(inbox.values()), strict=True)),
            "was changed on the way",
        ),
    ],
)
def test_a_relay_that_changes_messages_is_detected(federation, monkeypatch, tamper, words):
    original = Loop.call

    def call(self, phase, sent):
        if phase == "absorb":
            sent = {c: {"inbox": tamper(m["inbox"])} for c, m in sent.items()}
        return original(self, phase, sent)

    monkeypatch.setattr(Loop, "call", call)
    with pytest.raises(Refusal, match=words):
        run("fedstruct", federation, **SETTINGS, secure=True)


def test_a_relay_that_repeats_a_message_is_detected(federation, monkeypatch):
    original, kept = Loop.call, {}

    def call(self, phase, sent):
        if phase == "absorb":
            sent = kept.setdefault("first", sent)
        return original(self, phase, sent)

    monkeypatch.setattr(Loop, "call", call)
    with pytest.raises(Refusal, match="came before"):
        run("fedstruct", federation, **SETTINGS, secure=True)


def test_a_client_refuses_a_second_key_exchange(federation, monkeypatch):
    original = Loop.call

    def call(self, phase, sent):
        if phase == "offer":
            original(self, "greet_peers", {c: {} for c in sent})
        return original(self, phase, sent)

    monkeypatch.setattr(Loop, "call", call)
    with pytest.raises(Refusal, match="refuses to greet its peers again"):
        run("fedstruct", federation, **SETTINGS, secure=True)
