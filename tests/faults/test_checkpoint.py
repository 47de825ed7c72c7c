"""Checkpoints: writes are atomic, damage is detected, and the previous one is used then."""

import os
import random
import signal
import time
from contextlib import suppress

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from tests.faults.forked import crash_at, ending, fork

from fedloom.errors import DataError
from fedloom.experiments.checkpoint import (
    LATEST,
    PREVIOUS,
    Checkpoint,
    DamagedCheckpointWarning,
    decode,
    encode,
    read,
    write,
)
from fedloom.experiments.run import run

NAMES = ("weights", "moments", "stream")


def made(number, size=40_000):
    """A checkpoint of which every part says its number."""
    server, client = (
        {name: torch.full((size,), number, dtype=torch.int32) for name in NAMES} for _ in range(2)
    )
    return Checkpoint(
        {"number": number, "notes": {"a": 0.1}},
        {"server": {"state": server}, "clients": {"0": {"state": client}}},
    )


def number_of(found):
    """The number of a checkpoint, if all its parts agree on it."""
    tensors = [
        *found.state["server"]["state"].values(),
        *found.state["clients"]["0"]["state"].values(),
    ]
    assert all((tensor == found.about["number"]).all() for tensor in tensors)
    return found.about["number"]


def test_what_is_written_is_read_again(tmp_path):
    assert read(tmp_path) is None
    for number in (1, 2, 3):
        write(tmp_path, made(number))
        assert number_of(read(tmp_path)) == number
    assert {path.name for path in tmp_path.iterdir()} == {LATEST, PREVIOUS}
    assert number_of(decode((tmp_path / PREVIOUS).read_bytes())) == 2
    assert read(tmp_path).about == made(3).about


@pytest.mark.parametrize("kills", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_200_kills_while_writing_leave_the_old_one_or_the_new_one(kills, tmp_path):
    chance, last, ways = random.Random(0), 0, set()
    for _ in range(kills):
        here, there = os.pipe()

        def keep_writing(first=last + 1, there=there):
            for number in range(first, first + 10_000):
                write(tmp_path, made(number))
                os.write(there, number.to_bytes(4, "little"))

        child = fork(keep_writing)
        os.close(there)
        told = [os.read(here, 4)]  # the first is there: from now on something is being written
        time.sleep(chance.uniform(0, 8e-3))
        os.kill(child, signal.SIGKILL)
        assert ending(child) == -signal.SIGKILL
        while content := os.read(here, 4):
            told.append(content)
        os.close(here)
        done, ways = (
            int.from_bytes(told[-1], "little"),
            ways | {frozenset(path.name for path in tmp_path.iterdir())},
        )
        last = number_of(read(tmp_path))
        assert last in (
            done,
            done + 1,
        )  # what was said to be written is, and nothing older comes back
    if kills > 100:
        assert any(LATEST + ".new" in names for names in ways)  # some kills hit a write


def flipped(content, place):
    """The same with one bit changed."""
    changed = bytearray(content)
    changed[place // 8] ^= 1 << place % 8
    return bytes(changed)


def test_a_thousand_flipped_bits_are_a_thousand_errors():
    content = encode(made(7, size=40))
    for place in random.Random(1).sample(range(8 * len(content)), 1000):
        with pytest.raises(DataError):
            decode(flipped(content, place))
    assert number_of(decode(content)) == 7


def test_every_bit_of_the_header_counts():
    content = encode(made(7, size=1))
    for place in range(8 * (8 + int.from_bytes(content[:8], "little"))):
        with pytest.raises(DataError):
            decode(flipped(content, place))


def test_without_the_sum_most_flipped_bits_would_pass():
    """The control: what safetensors notices by itself."""
    content, unnoticed = encode(made(7, size=400)), 0
    for place in random.Random(1).sample(range(8 * len(content)), 100):
        with suppress(SafetensorError):
            load(flipped(content, place))
            unnoticed += 1
    assert unnoticed > 50


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 100, 300, -100, -1])
def test_what_is_cut_off_is_known_for_it(length):
    with pytest.raises(DataError, match="damaged"):
        decode(encode(made(7))[:length])


def test_of_another_format_both_are_named():
    with pytest.raises(
        DataError,
        match="has format 'fedloom-checkpoint/9', this fedloom reads 'fedloom-checkpoint/2'",
    ):
        decode(encode(made(7)).replace(b"fedloom-checkpoint/2", b"fedloom-checkpoint/9"))
    with pytest.raises(
        DataError,
        match="has format 'fedloom-checkpoint/1', this fedloom reads 'fedloom-checkpoint/2'",
    ):
        decode(save({"server/state/w": torch.ones(3)}, {"fedloom": "{}"}))


DAMAGE = {
    "a bit": lambda content: flipped(content, 8 * len(content) - 1),
    "cut off": lambda content: content[:1000],
    "empty": lambda content: b"",
    "another format": lambda content: content.replace(
        b"fedloom-checkpoint/2", b"fedloom-checkpoint/3"
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_of_a_damaged_one_the_previous_is_used_with_a_warning(tmp_path, damage):
    for number in (1, 2):
        write(tmp_path, made(number))
    (tmp_path / LATEST).write_bytes(DAMAGE[damage]((tmp_path / LATEST).read_bytes()))
    with pytest.warns(DamagedCheckpointWarning, match=rf"{LATEST} in .*; going on from {PREVIOUS}"):
        assert number_of(read(tmp_path)) == 1


def test_if_both_are_damaged_both_are_named(tmp_path):
    for number in (1, 2):
        write(tmp_path, made(number))
    (tmp_path / LATEST).write_bytes(b"")
    (tmp_path / PREVIOUS).write_bytes((tmp_path / PREVIOUS).read_bytes()[:-1])
    with pytest.raises(
        DataError, match=rf"{LATEST} in .* is damaged .*; {PREVIOUS} in .* is damaged"
    ):
        read(tmp_path)


def test_a_damaged_one_without_a_previous_is_no_beginning(tmp_path):
    write(tmp_path, made(1))
    (tmp_path / LATEST).write_bytes(b"")
    with pytest.raises(DataError, match=rf"{LATEST} in .* is damaged"):
        read(tmp_path)


def test_a_run_goes_on_from_the_previous_one_to_the_same_end(node_federation, tmp_path):
    settings = {"model": "gcn-2x8", "rounds": 4, "checkpoint_every": 1}
    unbroken = run("fedavg", node_federation, **settings)
    assert crash_at(
        "round-closed:3", lambda: run("fedavg", node_federation, out=tmp_path, **settings)
    )
    (tmp_path / LATEST).write_bytes(flipped((tmp_path / LATEST).read_bytes(), 12345))
    seen = []
    with pytest.warns(DamagedCheckpointWarning):
        resumed = run(
            "fedavg",
            node_federation,
            out=tmp_path,
            resume=True,
            callbacks=lambda entry: seen.append(entry["round"]),
            **settings,
        )
    assert seen == [3, 4]
    assert resumed.summary["history_hash"] == unbroken.summary["history_hash"]
    assert resumed.traffic == unbroken.traffic
