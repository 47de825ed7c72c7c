"""Controls: without a protection, the fault that it is for does harm; see docs/faults.md."""

import json
import os
import random
import re
import resource
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from tests.core.test_unsafe_input import blob, tensor
from tests.faults import test_signals
from tests.faults.forked import ending, fork
from tests.faults.schedule import Schedule
from tests.faults.test_absent import BAD, BOOM, absences, go, only, same_bits
from tests.faults.test_checkpoint import made, number_of
from tests.faults.test_signals import ended, start

from fedloom import _system
from fedloom.core import message, replies, server, waist
from fedloom.core.absence import AbsenceTracker
from fedloom.core.message import DEFAULT_LIMIT, FORMAT, Limit, decode, encode
from fedloom.core.phase import Range
from fedloom.errors import DataError, FedloomError, MessageError
from fedloom.experiments import checkpoint

pytestmark = pytest.mark.usefixtures("reference_engine")

__all__ = ["start"]  # a fixture


# ---- F6: a checkpoint is put in place in one step ----
@pytest.mark.slow
def test_written_in_place_checkpoints_are_lost_to_kills(tmp_path, monkeypatch):
    def plainly(path, content, kind="", keep=None):
        with open(path, "wb", buffering=0) as file:
            _system._write(file, content, "checkpoint")

    monkeypatch.setattr(checkpoint, "write_atomic", plainly)
    chance, lost = random.Random(0), 0
    for _ in range(60):
        child = fork(lambda: [checkpoint.write(tmp_path, made(number)) for number in range(10_000)])
        while not (tmp_path / checkpoint.LATEST).exists():
            time.sleep(1e-4)
        time.sleep(chance.uniform(0, 8e-3))
        os.kill(child, signal.SIGKILL)
        assert ending(child) == -signal.SIGKILL
        try:
            number_of(checkpoint.read(tmp_path))
        except DataError:
            lost += 1
    assert lost > 3


# ---- F10, F11: an answer is held against what is expected of it ----
@pytest.mark.parametrize("kind", [kind for kind in BAD if kind != "lost"])
def test_without_the_check_a_bad_answer_gets_in_or_ends_the_run(kind, node_federation, monkeypatch):
    with monkeypatch.context() as patch:
        Schedule(patch, {(2, "train", "1"): BOOM})
        reference = go(node_federation, rounds=2)
    monkeypatch.setattr(waist, "check", lambda *_: None)
    Schedule(monkeypatch, {(2, "train", "1"): BAD[kind][0]})
    result = None
    with suppress(Exception):  # it may end the run
        result = go(node_federation, rounds=2)
    assert result is None or (
        absences(result) == [] and not same_bits(reference, result, ("server",))
    )


# ---- F12: weights ----
def test_without_the_check_one_client_outweighs_all(node_federation, monkeypatch):
    reference = go(only(node_federation, ("0", "2", "3")), rounds=1)
    for module in (server, replies):
        monkeypatch.setattr(module, "require_weight", lambda *_: None)
    monkeypatch.setattr(Range, "check", lambda *_: None)
    Schedule(monkeypatch, {(None, "size", "1"): lambda reply: {"size": torch.tensor(2**62)}})
    result = go(node_federation, rounds=1, cap_weights=0.0)
    assert absences(result) == []
    assert not same_bits(reference, result, ("server",))
    alone = go(only(node_federation, ("1",)), rounds=1, quorum=1.0)
    for name, weight in message.flatten(result.final_models["server"]).items():
        assert torch.allclose(
            weight, message.flatten(alone.final_models["server"])[name], atol=1e-6
        )


# ---- F13: what a message claims is not allocated ----
def grown(work):
    """Returns by how many bytes the peak memory of a process grows."""
    here, there = os.pipe()

    def measured():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        work()
        os.write(
            there,
            ((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024).to_bytes(
                8, "little"
            ),
        )

    assert ending(fork(measured)) == 0
    os.close(there)
    with os.fdopen(here, "rb") as told:
        return int.from_bytes(told.read(8), "little")


@pytest.mark.parametrize("entries", [2**28, 2**38, 2**61])
def test_a_message_that_claims_a_gigabyte_takes_no_memory(entries):
    def claimed():
        claim = blob(
            {
                "__metadata__": {"format": FORMAT, "phase": "train"},
                "a": tensor(shape=(entries,), place=(0, 4 * entries)),
            },
            bytes(64),
        )
        with pytest.raises(MessageError):
            decode(claim, "train")

    assert grown(claimed) < 16 * 2**20
    assert grown(lambda: torch.zeros(2**25).add_(1)) > 100 * 2**20  # the measure sees 128 MB


def test_ten_times_what_is_expected_is_refused_within_twice_the_limit():
    large = encode({"w": torch.ones(2**22)}, "train")  # 16 MB

    def refused():
        with pytest.raises(MessageError, match="more than the limit"):
            decode(large, "train", Limit(len(large) // 10, 2**20))

    assert grown(refused) < 2 * len(large) // 10


def test_a_header_of_many_objects_takes_no_memory_unless_its_length_is_allowed():
    start = '{"__metadata__":{"format":"fedloom/1","phase":"train"},"a":['
    text = (start + "{}," * 2**20 + "{}]}").encode()  # 3 MB
    data = len(text).to_bytes(8, "little") + text

    def refused(limit):
        with pytest.raises(MessageError):
            decode(data, "train", limit)

    assert grown(lambda: refused(DEFAULT_LIMIT)) < 2**20
    assert grown(lambda: refused(Limit(len(data), len(data)))) > 60 * 2**20


# ---- F16: bits that flip on the disk ----
def test_without_the_sum_a_damaged_checkpoint_is_resumed_from(
    node_federation, monkeypatch, tmp_path
):
    settings = {"checkpoint_every": 1, "quorum": 1.0}
    unbroken = go(node_federation, rounds=4, **settings)
    monkeypatch.setattr(checkpoint, "remove", lambda folder: None)  # as if it was killed
    go(node_federation, rounds=2, out=tmp_path / "x", **settings)
    (tmp_path / "x" / "summary.json").unlink()
    path = tmp_path / "x" / checkpoint.LATEST
    content = bytearray(path.read_bytes())
    begin = 8 + int.from_bytes(content[:8], "little")
    places = json.loads(content[8:begin])
    of_model = next(
        entry["data_offsets"][0]
        for name, entry in places.items()
        if name.startswith("server/state/model/")
    )
    content[begin + of_model + 3] ^= 0x01  # of a number's exponent
    path.write_bytes(content)
    with pytest.raises(DataError, match="SHA-256"):
        checkpoint.decode(bytes(content))

    class Blind:
        """A hash that agrees with any file."""

        def __init__(self, _):
            pass

        def hexdigest(self):
            return re.search(rb'"sha256":"([0-9a-f]{64})"', bytes(content))[1].decode()

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.hashlib, "sha256", Blind)
        damaged = checkpoint.read(tmp_path / "x")
    monkeypatch.setattr(checkpoint, "read", lambda folder: damaged)
    resumed = go(node_federation, rounds=4, out=tmp_path / "x", resume=True, **settings)
    assert resumed.summary["history_hash"] != unbroken.summary["history_hash"]


# ---- F17: signals ----
@pytest.mark.slow
def test_without_our_handling_a_signal_leaves_no_summary(start, tmp_path, monkeypatch):
    unhandled = test_signals.PROGRAM.replace(
        "main()",
        "import fedloom.cli as c; from contextlib import nullcontext; "
        "c.graceful_signals = nullcontext; main()",
    )
    monkeypatch.setattr(test_signals, "PROGRAM", unhandled)
    process = start("--set", "run.checkpoint_every=1", until="x/history.jsonl", lines=3)
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == -signal.SIGTERM
    assert not (tmp_path / "x" / "summary.json").exists()


# ---- F20: dropouts ----
def test_with_a_quorum_of_1_the_first_dropout_ends_the_run(node_federation, monkeypatch):
    Schedule(monkeypatch, {(2, "train", "1"): BOOM})
    with pytest.raises(ValueError, match="boom"):
        go(node_federation, rounds=6, quorum=1.0)


# ---- F21: who joins late ----
def test_if_nothing_is_made_up_for_who_joins_late_never_takes_part(node_federation, monkeypatch):
    monkeypatch.setattr(AbsenceTracker, "has_missed", lambda *_: False)
    Schedule(monkeypatch, {(0, "setup", "1"): BOOM})
    result = go(node_federation, rounds=3)
    assert {
        (number, cause) for number, phase, client, cause in absences(result) if phase == "train"
    } == {(number, "KeyError: 'model'") for number in (1, 2, 3)}


# ---- F22: versions ----
def test_a_message_of_another_version_is_refused_by_that_alone(monkeypatch):
    other = json.dumps("fedloom/2").encode()
    newer = encode({"w": torch.ones(2)}, "train").replace(json.dumps(FORMAT).encode(), other)
    with pytest.raises(FedloomError, match=f"format is 'fedloom/2', this side speaks '{FORMAT}'"):
        decode(newer, "train")
    monkeypatch.setattr(message, "FORMAT", "fedloom/2")
    assert decode(newer, "train")["w"].tolist() == [1, 1]


def test_the_page_names_tests_that_are_there():
    tests = Path(__file__).parents[1]
    named = set(
        re.findall(r"`([\w/]+\.py)::(\w+)`", (tests.parent / "docs" / "faults.md").read_text())
    )
    assert len(named) > 40
    assert [
        f"{file}::{name}"
        for file, name in sorted(named)
        if f"def {name}(" not in (tests / file).read_text()
    ] == []
