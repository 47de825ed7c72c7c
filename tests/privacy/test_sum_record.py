"""Sum record: a client refuses sums whose difference would expose somebody."""

import json
import math
import os
import stat

import pytest

from fedloom.errors import DataError, Refusal
from fedloom.privacy.sum_record import SumId, SumRecord

ALL, FEWER, OTHER = "abcde", "abcd", "abc"


def sum_of(record, cohort, number, round=1, phase="train", session=1):
    """A whole sum, as a client records it."""
    about = SumId(bytes([session] * 16), number, round, phase)
    record.begin(about)
    record.release(about, cohort)


@pytest.fixture(params=["memory", "file"])
def record(request, tmp_path):
    return SumRecord(tmp_path / "sums.jsonl" if request.param == "file" else None)


def test_a_number_is_used_once_in_a_session(record):
    sum_of(record, ALL, 5)
    for number in (5, 4, 0):
        with pytest.raises(Refusal, match=f"sum {number} was asked for before, the last was 5"):
            sum_of(record, ALL, number, round=2)
    sum_of(record, ALL, 6, round=2)
    sum_of(record, ALL, 1, round=3, session=2)


def test_the_same_sum_again_is_over_the_same_cohort(record):
    """The server keeps a state, asks for a sum, restores the state and asks for the sum again."""
    sum_of(record, ALL, 1, round=1)
    record.rewind(0)
    with pytest.raises(
        Refusal,
        match="'train' in round 1 was summed over a, b, c, d, e before, and now over a, b, c, d: "
        r"the difference of the two sums would expose e\. Wait for all of them",
    ):
        sum_of(record, FEWER, 2, round=1)
    with pytest.raises(Refusal, match="would expose d, e"):  # however many are missing
        sum_of(record, OTHER, 3, round=1)
    sum_of(record, ALL, 4, round=1)
    sum_of(record, FEWER, 5, round=2)


def test_a_second_sum_of_a_round_and_phase_differs_in_none_or_in_two(record):
    sum_of(record, ALL, 1)
    with pytest.raises(Refusal, match=r"differ in fewer than 2 clients \(run\.secure_apart\)"):
        sum_of(record, FEWER, 2)
    sum_of(record, ALL, 3)
    sum_of(record, OTHER, 4)
    with pytest.raises(Refusal, match="fewer than 2"):
        sum_of(record, FEWER, 5)
    sum_of(record, FEWER, 6, phase="evaluate")  # other numbers: nothing to subtract
    sum_of(record, FEWER, 7, round=2)


def test_a_restored_state_repeats_its_sums_before_others(record):
    """A server that calls the repeated round another one would get the same numbers again."""
    for number in (1, 2, 3):
        sum_of(record, ALL, number, round=number)
    record.rewind(1)
    with pytest.raises(
        Refusal, match=r"its state is older than its sum of 'train' in round 2; .* Repeat round 2"
    ):
        sum_of(record, FEWER, 4, round=4)
    sum_of(record, ALL, 5, round=2)
    with pytest.raises(Refusal, match="Repeat round 3 first"):
        sum_of(record, FEWER, 6, round=4)
    sum_of(record, ALL, 7, round=3)
    sum_of(record, FEWER, 8, round=4)


def test_a_state_of_the_start_repeats_everything(record):
    sum_of(record, ALL, 1, round=0, phase="setup")
    sum_of(record, ALL, 2, round=1)
    record.rewind(-1)
    with pytest.raises(Refusal, match="'setup' in round 0"):
        sum_of(record, ALL, 3, round=1)
    sum_of(record, ALL, 4, round=0, phase="setup")
    sum_of(record, ALL, 5, round=1)


def test_a_client_that_was_away_need_not_repeat_its_sums(tmp_path):
    path = tmp_path / "sums.jsonl"
    first = SumRecord(path)
    for number in (1, 2):
        sum_of(first, ALL, number)
    first.rewind(0)
    sum_of(first, ALL, 3)  # one of the two is repeated, then the process dies
    again = SumRecord(path)
    again.rewind(0)
    with pytest.raises(Refusal, match="Repeat round 1 first"):
        sum_of(again, ALL, 4, round=2)
    again.rewind(math.inf)
    sum_of(again, ALL, 5, round=2)


def test_a_refused_sum_is_not_recorded(record):
    sum_of(record, ALL, 1)
    record.rewind(0)
    with pytest.raises(Refusal):
        sum_of(record, FEWER, 2)
    sum_of(record, ALL, 3)
    sum_of(record, ALL, 4)  # the second one of the round, as if the refused one had not been


def test_a_file_remembers_what_a_checkpoint_takes_back(tmp_path):
    path = tmp_path / "party" / "sums.jsonl"
    sum_of(SumRecord(path), ALL, 1)
    again = SumRecord(path)
    with pytest.raises(Refusal, match="sum 1 was asked for before"):
        sum_of(again, ALL, 1, round=2)
    again.rewind(0)
    with pytest.raises(Refusal, match="would expose e"):
        sum_of(again, FEWER, 2)
    sum_of(again, ALL, 3)
    third = SumRecord(path)  # the repeated sum counts once
    third.rewind(0)
    sum_of(third, ALL, 4)
    sum_of(third, ALL, 5, round=2)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_row_is_on_the_disk_before_the_sum_goes_on(tmp_path, monkeypatch):
    path, written = tmp_path / "sums.jsonl", []
    sync = os.fsync

    def watched(file):
        sync(file)
        written.append(len(path.read_text().splitlines()))

    monkeypatch.setattr(os, "fsync", watched)
    record, about = SumRecord(path), SumId(bytes(16), 1, 1, "train")
    record.begin(about)
    assert written[0] == 1
    record.release(about, ALL)
    assert written[-1] == 2


def test_a_row_that_was_cut_off_is_ignored_and_removed(tmp_path):
    path = tmp_path / "sums.jsonl"
    sum_of(SumRecord(path), ALL, 1)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"run": "0101')
    sum_of(SumRecord(path), ALL, 2, round=2)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["number"] for row in rows] == [1, 1, 2, 2]


@pytest.mark.parametrize("damage", [b"nonsense\n", b'{"round": 1}\n', b"[]\n"])
def test_a_damaged_file_is_an_error_that_says_what_to_do(tmp_path, damage):
    path = tmp_path / "sums.jsonl"
    path.write_bytes(damage)
    with pytest.raises(DataError, match=r"line 1 is damaged .* restore it, or agree on a new run"):
        SumRecord(path)


def test_many_clients_are_counted_not_listed(record):
    many = [f"c{k}" for k in range(100)]
    sum_of(record, many, 1)
    record.rewind(0)
    with pytest.raises(Refusal, match="over 100 clients before, and now over 99 clients"):
        sum_of(record, many[:-1], 2)
