"""A party that sends nonsense over Flower: each kind is refused by name, and the others' result is the loop's without it, to the bit.

Below: the same deployment with one protection of the coordinator's switched off, and what becomes of it.
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
from tests.faults.schedule import LOST, Schedule

from fedloom.core import party as waist
from fedloom.core.message import encode, unflatten
from fedloom.deploy import coordinator, serve
from fedloom.deploy.envelope import Gate, parse, sign
from fedloom.deploy.keys import PartyKey
from fedloom.deploy.party import Party
from fedloom.engines import flower

LIAR = "bank-c"


# ---- what it does with the content of its answer ----
def retold(change):
    """The same message with one tensor changed."""

    def lie(body):
        flat = load(body)
        name = next(name for name, tensor in sorted(flat.items()) if tensor.dim() == 2)
        change(flat, name)
        return encode(unflatten(flat), "train")

    return lie


def put(value):
    return lambda body: body[:-4] + struct.pack("<f", value)


CONTENT = {
    "noise": (lambda body: os.urandom(len(body)), "refused: "),
    "cut off": (lambda body: body[:-10], "damaged"),
    "longer": (lambda body: body + bytes(10), "damaged"),
    "nan": (put(float("nan")), "holds nan"),
    "inf": (put(float("-inf")), "holds -inf"),
    "1e38": (put(1e38), "only finite numbers travel, up to 2^100 in size"),
    "shape": (retold(lambda flat, name: flat.update({name: flat[name].t().contiguous()})), "has shape"),
    "broadcastable": (retold(lambda flat, name: flat.update({name: torch.ones(1)})), "has shape [1], expected"),
    "ten times as large": (retold(lambda flat, name: flat.update({name: flat[name].repeat(10, 1)})), "has shape"),
    "dtype": (retold(lambda flat, name: flat.update({name: flat[name].double()})), "has dtype"),
    "missing": (retold(lambda flat, name: flat.pop(name)), "is missing"),
    "extra": (retold(lambda flat, name: flat.update(more=torch.ones(1))), "'more' is not expected here"),
}  # fmt: skip


# ---- what it does with the envelope; `sent` are the ones of before ----
def resigned(envelope, key, **changed):
    header, _, _, body = parse(envelope)
    return sign(bytes(body), replace(header, **changed), key)


def another_key():
    return PartyKey(ec.generate_private_key(ec.SECP384R1()), Ed25519PrivateKey.generate())


ENVELOPE = {
    "garbage": (lambda party, envelope, sent: b"garbage", "too short to be one"),
    "a bit": (lambda party, envelope, sent: envelope[:-1] + bytes([envelope[-1] ^ 1]), "did not sign it"),
    "another key": (lambda party, envelope, sent: resigned(envelope, another_key()), "did not sign it"),
    "another party": (lambda party, envelope, sent: resigned(envelope, party.key, party="bank-a"), "but says it is of 'bank-a'"),
    "another run": (lambda party, envelope, sent: resigned(envelope, party.key, run="ab" * 16), "belongs to run abab"),
    "replay": (lambda party, envelope, sent: sent[0], "again, now is"),
    "another version": (lambda party, envelope, sent: envelope[:9] + b"\2" + envelope[10:], "version 2, this side speaks 1"),
}  # fmt: skip


def lying(monkeypatch, lies):
    """Has the liar lie in training, {round: kind}; whoever is started after this does. In round 1 it says a weight that nobody has."""
    perform, answer, sent = Party._perform, Party.answer, []

    def performed(self, header, body):
        told = perform(self, header, body)
        if (
            self.name == LIAR
            and header.phase == "size"
            and header.round == 1
            and lies.get(1) == "weight"
        ):
            return encode({"size": torch.tensor(2**62)}, "size")
        kind = lies.get(header.round)
        return (
            CONTENT[kind][0](told)
            if self.name == LIAR and header.phase == "train" and kind in CONTENT
            else told
        )

    def answered(self, data):
        envelope, header = answer(self, data), parse(data)[0]
        if self.name != LIAR or header.phase != "train":
            return envelope
        sent.append(envelope)
        kind = lies.get(header.round)
        return ENVELOPE[kind][0](self, envelope, sent) if kind in ENVELOPE else envelope

    monkeypatch.setattr(Party, "_perform", performed)
    monkeypatch.setattr(Party, "answer", answered)


def run_in_the_loop(d, lost):
    with pytest.MonkeyPatch.context() as patch:
        Schedule(patch, dict.fromkeys(lost, LOST))
        return d.reference(quorum=0.5)


def test_nonsense_of_every_kind_is_refused_by_name_and_the_others_are_averaged_to_the_bit(
    deploy, monkeypatch
):
    lies = {
        1: "weight",
        **dict(enumerate([None, *CONTENT, *ENVELOPE], 2)),
    }  # an honest round, to have something to replay
    lying(monkeypatch, lies)
    d = deploy(rounds=max(lies), run={"quorum": 0.5})
    d.serve()
    d.join_all()
    summary = d.completed(180)
    causes = {
        entry["round"]: absence["cause"]
        for entry in d.history()
        for absence in entry.get("absent", ())
    }
    words = {kind: told for kind, (_, told) in {**CONTENT, **ENVELOPE}.items()} | {
        "weight": "at most 2^53"
    }
    for number, kind in lies.items():
        assert (kind is None and number not in causes) or words[kind] in causes[number], (
            kind,
            causes.get(number),
        )
    lost = {
        (1, "size", LIAR),
        *((number, "train", LIAR) for number, kind in lies.items() if kind not in (None, "weight")),
    }
    reference = run_in_the_loop(d, lost)
    assert summary["history_hash"] == reference.summary["history_hash"]
    assert summary["absences"] == reference.summary["absences"] == {LIAR: len(lies) - 1}
    assert summary["engine_details"]["refused"] == {
        "format": 1,
        "forged": 2,
        "foreign": 1,
        "run": 1,
        "replay": 1,
        "version": 1,
    }


# ---- controls ----
def lenient(data, phase):
    return unflatten(load(data))


OFF = {
    "the decoder and the check": (
        lambda patch: (patch.setattr(flower, "decode", lenient), patch.setattr(waist, "check", lambda *_: None)), {2: "broadcastable"},
    ),
    "the signature": (lambda patch: patch.setattr(Gate, "_require_signed", lambda *_: None), {2: "another key", 3: "a bit"}),
    "the sequence": (lambda patch: patch.setattr(Gate, "_require_current", lambda *_: None), {3: "replay"}),
    "the weight": (lambda patch: patch.setattr(waist, "_require_weight", lambda *_: None), {1: "weight"}),
}  # fmt: skip


@pytest.mark.parametrize("off", OFF)
def test_without_one_of_the_checks_it_gets_in(off, deploy, monkeypatch):
    switch, lies = OFF[off]
    switch(monkeypatch)
    lying(monkeypatch, lies)
    d = deploy(rounds=3, run={"quorum": 0.5})
    d.serve()
    d.join_all()
    summary = d.completed()
    assert summary["absences"] == {}
    assert summary["engine_details"]["refused"] == {}
    lost = {(1, "size", LIAR)} if 1 in lies else {(number, "train", LIAR) for number in lies}
    assert summary["history_hash"] != run_in_the_loop(d, lost).summary["history_hash"]


def test_without_signs_of_life_and_deadline_a_stopped_and_a_killed_party_are_waited_for(
    deploy, monkeypatch
):
    monkeypatch.setattr(coordinator, "DEAD_AFTER", 1e9)
    d = deploy(rounds=100, method="slow.py", settings={"seconds": 0.2}, run={"quorum": 0.5})
    d.serve()
    d.join_all()
    d.until(lambda: d.rounds_done() >= 1)
    process = d.processes["bank-a"]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        os.kill(process.pid, number)
        time.sleep(2)  # what was under way may come to its end
        before = d.rounds_done()
        time.sleep(9)
        assert d.rounds_done() == before
        if number == signal.SIGSTOP:
            os.kill(process.pid, signal.SIGCONT)
            d.until(lambda before=before: d.rounds_done() > before + 1)
    assert not any("absent" in entry for entry in d.history())


def test_if_parties_do_not_go_back_to_the_states_that_they_kept_the_end_is_another(
    deploy, monkeypatch
):
    monkeypatch.setattr(Party, "_restore", lambda self, order: {})
    d = deploy(rounds=4, method="slow.py")
    d.serve()
    d.join_all()
    d.until(lambda: d.rounds_done() >= 2)
    os.kill(d.processes["coordinator"].pid, signal.SIGKILL)
    d.processes["coordinator"].wait()
    d.resume()
    assert d.completed()["history_hash"] != d.reference().summary["history_hash"]


def test_if_the_link_is_not_started_again_its_death_ends_the_run(deploy, monkeypatch):
    monkeypatch.setattr(serve, "LINKS", 1)
    d = deploy(rounds=5, method="slow.py")
    d.serve()
    d.join_all()
    d.until(lambda: d.rounds_done() >= 2)
    os.kill(d.link(), signal.SIGKILL)
    assert d.processes["coordinator"].wait(30) == 2
    assert re.search(
        "fedloom: the link (has ended|does not|gives no messages)", d.said("coordinator")
    )
    assert d.summary()["status"] == "failed"


def test_with_everybody_needed_a_party_that_raises_ends_the_run(deploy):
    d = deploy(rounds=2, method="slow.py", settings={"seconds": 0.0, "fails": LIAR})
    d.serve()
    d.join_all()
    assert d.processes["coordinator"].wait(60) == 1
    assert d.summary()["status"] == "failed"
    assert LIAR in d.summary()["cause"]
