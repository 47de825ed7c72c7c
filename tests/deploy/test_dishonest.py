"""A dishonest party: each kind of nonsense is refused by name, and the others are averaged.

The result is then bit-identical to the loop engine's without that party. The controls below switch
off one protection at a time and show what happens without it.
"""

import os
import re
import signal
import struct
import time
from dataclasses import replace

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors.torch import load
from test_coordinator import InProcess

from fedloom.core import replies, server, waist
from fedloom.core.message import encode, unflatten
from fedloom.core.phase import Range
from fedloom.deploy import coordinator, engine, serve
from fedloom.deploy.envelope import Gate, parse, sign
from fedloom.deploy.keys import PartyKey
from fedloom.deploy.party import Party
from fedloom.engines.loop import Engine as Loop
from fedloom.errors import RoundFailed
from fedloom.experiments.run_folder import read_config

LIAR = "bank-c"
slow = pytest.mark.slow


# ---- what it does with the content of its answer ----
def changed(change):
    """Returns a lie: the same message with one tensor changed."""

    def lie(body):
        flat = load(body)
        name = next(name for name, tensor in sorted(flat.items()) if tensor.dim() == 2)
        change(flat, name)
        return encode(unflatten(flat), "train")

    return lie


def entry(value):
    """Returns a lie: the same message with another last number."""
    return lambda body: body[:-4] + struct.pack("<f", value)


def transposed(flat, name):
    flat[name] = flat[name].t().contiguous()


def broadcastable(flat, name):
    flat[name] = torch.ones(1)


def repeated(flat, name):
    flat[name] = flat[name].repeat(10, 1)


def doubled(flat, name):
    flat[name] = flat[name].double()


def extended(flat, name):
    flat["more"] = torch.ones(1)


CONTENT = {
    "noise": (lambda body: os.urandom(len(body)), "refused: "),
    "cut off": (lambda body: body[:-10], "damaged"),
    "longer": (lambda body: body + bytes(10), "damaged"),
    "nan": (entry(float("nan")), "holds nan"),
    "inf": (entry(float("-inf")), "holds -inf"),
    "1e38": (entry(1e38), "2^100"),
    "shape": (changed(transposed), "has shape"),
    "broadcastable": (changed(broadcastable), "has shape [1], expected"),
    "ten times as large": (changed(repeated), "has shape"),
    "dtype": (changed(doubled), "has dtype"),
    "missing": (changed(lambda flat, name: flat.pop(name)), "is missing"),
    "extra": (changed(extended), "'more'"),
}


# ---- what it does with the envelope; `sent` are its earlier envelopes ----
def resigned(envelope, key, **other):
    header, _, _, body = parse(envelope)
    return sign(bytes(body), replace(header, **other), key)


def another_key():
    return PartyKey(ec.generate_private_key(ec.SECP384R1()), Ed25519PrivateKey.generate())


def flipped(party, envelope, sent):
    return envelope[:-1] + bytes([envelope[-1] ^ 1])


def signed_by_another(party, envelope, sent):
    return resigned(envelope, another_key())


def of_another_party(party, envelope, sent):
    return resigned(envelope, party.key, party="bank-a")


def of_another_run(party, envelope, sent):
    return resigned(envelope, party.key, run="ab" * 16)


def of_another_version(party, envelope, sent):
    return envelope[:9] + b"\2" + envelope[10:]


ENVELOPE = {
    "garbage": (lambda party, envelope, sent: b"garbage", "too short to be an envelope"),
    "a bit": (flipped, "did not sign it"),
    "another key": (signed_by_another, "did not sign it"),
    "another party": (of_another_party, "but its header names 'bank-a'"),
    "another run": (of_another_run, "belongs to run abab"),
    "replay": (lambda party, envelope, sent: sent[0], "again, the current one is"),
    "another version": (of_another_version, "version 2, this side uses 1"),
}


def lying(monkeypatch, lies):
    """Makes the liar lie in training, {round: kind}, in processes that are started after this.

    "weight" in round 1 means that it claims an impossible weight.
    """
    perform, answer, sent = Party._perform, Party.answer, []

    def performed(self, header, body):
        honest, kind = perform(self, header, body), lies.get(header.round)
        if self.name != LIAR:
            return honest
        if header.phase == "size" and header.round == 1 and kind == "weight":
            return encode({"size": torch.tensor(2**62)}, "size")
        return CONTENT[kind][0](honest) if header.phase == "train" and kind in CONTENT else honest

    def answered(self, data):
        envelope, header = answer(self, data), parse(data)[0]
        if self.name != LIAR or header.phase != "train":
            return envelope
        sent.append(envelope)
        kind = lies.get(header.round)
        return ENVELOPE[kind][0](self, envelope, sent) if kind in ENVELOPE else envelope

    monkeypatch.setattr(Party, "_perform", performed)
    monkeypatch.setattr(Party, "answer", answered)


def reference(deployment, lost):
    """Returns the loop engine's result if these answers, {(round, phase, client)}, are lost."""
    call = Loop.call

    def losing(self, phase, messages):
        replies = call(self, phase, messages)
        return {n: reply for n, reply in replies.items() if (self.round, phase, n) not in lost}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "call", losing)
        return deployment.reference(quorum=0.5)


def lost_answers(lies):
    weight = {(1, "size", LIAR)} if lies.get(1) == "weight" else set()
    kinds = {number: kind for number, kind in lies.items() if kind not in (None, "weight")}
    return weight | {(number, "train", LIAR) for number in kinds}


@slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("patient")
def test_nonsense_is_refused_by_name_and_the_others_are_averaged_bit_identically(
    deploy, monkeypatch
):
    # Round 2 is honest, so that there is an envelope to replay.
    lies = {1: "weight", **dict(enumerate([None, *CONTENT, *ENVELOPE], 2))}
    lying(monkeypatch, lies)
    d = deploy(rounds=max(lies), run={"quorum": 0.5})
    d.serve()
    d.join_all()
    summary = d.completed()
    causes = {e["round"]: a["cause"] for e in d.history() for a in e.get("absent", ())}
    words = {kind: text for kind, (_, text) in {**CONTENT, **ENVELOPE}.items()}
    words["weight"] = "2^53"
    for number, kind in lies.items():
        if kind is None:
            assert number not in causes
        else:
            assert words[kind] in causes[number], kind
    expected = reference(d, lost_answers(lies))
    assert summary["history_hash"] == expected.summary["history_hash"]
    assert summary["absences"] == expected.summary["absences"] == {LIAR: len(lies) - 1}
    assert summary["engine_details"]["refused"] == {
        "format": 1,
        "forged": 2,
        "foreign": 1,
        "run": 1,
        "replay": 1,
        "version": 1,
    }


# ---- controls ----
def without_decoder_and_check(patch):
    patch.setattr(engine, "decode", lambda data, *_: unflatten(load(data)))
    patch.setattr(waist, "check", lambda *_: None)


def without_signature(patch):
    patch.setattr(Gate, "_require_signed", lambda *_: None)


def without_sequence(patch):
    patch.setattr(Gate, "_require_current", lambda *_: None)


def without_weight_check(patch):
    patch.setattr(Range, "check", lambda *_: None)
    for module in (replies, server):
        patch.setattr(module, "require_weight", lambda *_: None)


@pytest.mark.parametrize(
    ("switch_off", "lies"),
    [
        (without_decoder_and_check, {2: "broadcastable"}),
        (without_signature, {2: "another key", 3: "a bit"}),
        (without_sequence, {3: "replay"}),
        (without_weight_check, {1: "weight"}),
    ],
)
def test_without_one_of_the_checks_a_lie_is_accepted(switch_off, lies, tmp_path, monkeypatch):
    switch_off(monkeypatch)
    lying(monkeypatch, lies)
    deployed = InProcess(tmp_path, rounds=3, run={"quorum": 0.5})
    summary = deployed.serve().summary
    assert summary["absences"] == {}
    assert summary["engine_details"]["refused"] == {}
    expected = reference(deployed.deployment, lost_answers(lies))
    assert summary["history_hash"] != expected.summary["history_hash"]


@slow
@pytest.mark.timeout(900)
def test_without_signs_of_life_and_deadline_dead_parties_are_waited_for(deploy, monkeypatch):
    limit = coordinator.DEAD_AFTER
    monkeypatch.setattr(coordinator, "DEAD_AFTER", 1e9)
    d = deploy(rounds=1000, method="slow.py", settings={"seconds": 0.1}, run={"quorum": 0.5})
    d.serve()
    d.join_all()
    d.until(lambda: d.rounds_done() >= 1)
    for number in (signal.SIGSTOP, signal.SIGKILL):
        os.kill(d.processes["bank-a"].pid, number)
        stopped = d.rounds_done()
        time.sleep(limit + 2)
        assert d.rounds_done() <= stopped + 1  # an exchange that was under way may complete
        if number == signal.SIGSTOP:
            os.kill(d.processes["bank-a"].pid, signal.SIGCONT)
            d.until(lambda stopped=stopped: d.rounds_done() > stopped + 1)
    assert not any("absent" in entry for entry in d.history())


def test_if_parties_do_not_restore_their_states_the_result_differs(tmp_path, monkeypatch):
    class StoppedError(Exception):
        """Ends a run."""

    def stop(entry):
        if entry["round"] == 2:
            raise StoppedError

    monkeypatch.setattr(Party, "_restore", lambda self, order: {})
    deployed = InProcess(tmp_path)
    with pytest.raises(StoppedError):
        deployed.serve(callbacks=stop)
    resumed = deployed.serve(resumed=read_config(tmp_path / "run"))
    expected = deployed.deployment.reference()
    assert resumed.summary["history_hash"] != expected.summary["history_hash"]


@slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("patient")
def test_if_the_superlink_is_not_started_again_its_death_ends_the_run(deploy, monkeypatch):
    monkeypatch.setattr(serve, "MAX_SUPERLINKS", 1)
    d = deploy(rounds=1000, method="slow.py")
    d.serve()
    d.join_all()
    d.until(lambda: d.rounds_done() >= 1)
    os.kill(d.superlink(), signal.SIGKILL)
    assert d.processes["coordinator"].wait() == 2
    assert re.search(
        "fedloom: the SuperLink (has ended|does not|delivers no)", d.output("coordinator")
    )
    assert d.summary()["status"] == "failed"


def test_with_a_quorum_of_1_a_party_that_raises_ends_the_run(tmp_path):
    settings = {"seconds": 0.0, "fails": LIAR}
    deployed = InProcess(tmp_path, rounds=2, method="slow.py", settings=settings)
    with pytest.raises(RoundFailed, match=LIAR):
        deployed.serve()
