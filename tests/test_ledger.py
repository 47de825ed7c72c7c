"""The ledger: what it books is what travels, what it writes it reads again."""

import csv
import json

import pytest
import torch

from fedloom.ledger import Booking, Ledger
from fedloom.message import encode, flatten

MODEL = {"model": {"w": torch.ones(3, 4), "b": torch.ones(4)}}
SIZE = {"size": torch.tensor(7)}


def filled():
    """Two clients, two rounds, an evaluation."""
    ledger = Ledger()
    for client in ("0", "one, two"):
        ledger.book(0, "setup", "up", {client: SIZE})
    for number in (1, 2):
        for client in ("0", "one, two"):
            ledger.book(number, "train", "down", {client: MODEL})
            ledger.book(number, "train", "up", {client: {**MODEL, **SIZE}})
            ledger.book(number, "evaluate", "down", {client: MODEL})
            ledger.book(number, "evaluate", "up", {client: {"test": torch.zeros(2, 2, dtype=torch.int64)}})
    return ledger


@pytest.mark.parametrize("phase", ["train", "a_longer_name"])
@pytest.mark.parametrize(
    "message",
    [MODEL, SIZE, {**MODEL, **SIZE}, {"x": torch.zeros(0, 5)}, {"h": torch.ones(3, dtype=torch.float16), "flag": torch.tensor(True)},
     {"model": {"inner": {"deep": torch.ones(2, 3, 4).double()}}}],
)  # fmt: skip
def test_a_booking_is_the_length_of_the_bytes_that_travel(message, phase):
    ledger = Ledger()
    ledger.book(4, phase, "up", {"a": message})
    (row,) = ledger.rows
    scalars = sum(t.numel() for t in flatten(message).values())
    assert row == Booking(4, phase, "up", "a", len(encode(message, phase)), scalars, 0)


def test_an_empty_message_is_not_booked():
    ledger = Ledger()
    ledger.book(1, "train", "down", {"a": {}})
    assert ledger.rows == []
    assert ledger.traffic()["messages"] == 0


def test_messages_of_one_form_share_a_schema():
    ledger = filled()
    assert len(ledger.schemas) == 4
    assert [row.schema for row in ledger.rows[:6]] == [0, 0, 1, 2, 1, 3]
    assert ledger.schemas[2] == (("model/b", "float32", (4,)), ("model/w", "float32", (3, 4)), ("size", "int64", ()))


def test_totals_are_sums_and_measuring_is_apart():
    traffic = filled().traffic()
    up, down = len(encode({**MODEL, **SIZE}, "train")), len(encode(MODEL, "train"))
    assert traffic["phases"]["train"] == {
        "bytes_up": 4 * up, "bytes_down": 4 * down, "scalars_up": 4 * 17, "scalars_down": 4 * 16, "messages": 8,
    }  # fmt: skip
    setup = len(encode(SIZE, "setup"))
    assert traffic["phases"]["setup"] == {"bytes_up": 2 * setup, "bytes_down": 0, "scalars_up": 2, "scalars_down": 0, "messages": 2}
    assert {key: traffic[key] for key in ("bytes_up", "bytes_down", "scalars_up", "scalars_down", "messages")} == {
        "bytes_up": 4 * up + 2 * setup, "bytes_down": 4 * down, "scalars_up": 70, "scalars_down": 64, "messages": 10,
    }  # fmt: skip
    assert traffic["measuring"] == traffic["phases"]["evaluate"]
    assert traffic["measuring"]["scalars_up"] == 16
    json.dumps(traffic)


def test_totals_of_nothing_are_zero():
    traffic = Ledger().traffic()
    assert traffic["phases"] == {}
    assert set(traffic["measuring"].values()) == {0}
    assert traffic["bytes_up"] == traffic["bytes_down"] == 0


def test_what_is_written_is_read_again(tmp_path):
    ledger, other = filled(), Ledger()
    ledger.write(tmp_path)
    other.book(9, "left", "up", {"over": SIZE})
    other.read(tmp_path, len(ledger.rows))
    assert other.rows == ledger.rows
    assert other.schemas == ledger.schemas
    assert other.traffic() == ledger.traffic()
    other.book(3, "train", "down", {"0": MODEL})
    assert other.rows[-1].schema == 1  # known from the file
    other.read(tmp_path, 3)
    assert other.rows == ledger.rows[:3]


def test_writing_bit_by_bit_is_writing_at_once(tmp_path):
    ledger = filled()
    for folder in ("once", "steps"):
        (tmp_path / folder).mkdir()
    ledger.write(tmp_path / "once")
    growing, written = Ledger(), 0
    growing.write(tmp_path / "steps", since=0)  # nothing yet
    for row, message in zip(ledger.rows, replay(ledger), strict=True):
        growing.book(row.round, row.phase, row.direction, {row.client: message})
        if len(growing.rows) in (3, 4, 11):
            growing.write(tmp_path / "steps", since=written)
            written = len(growing.rows)
    growing.write(tmp_path / "steps", since=written)
    for file in ("ledger.csv", "schemas.json"):
        assert (tmp_path / "once" / file).read_text() == (tmp_path / "steps" / file).read_text(), file


def replay(ledger):
    forms = [SIZE, MODEL, {**MODEL, **SIZE}, {"test": torch.zeros(2, 2, dtype=torch.int64)}]
    return [forms[row.schema] for row in ledger.rows]


def test_a_resumed_ledger_is_cut_back_and_goes_on(tmp_path):
    ledger = filled()
    ledger.write(tmp_path)
    other = Ledger()
    other.read(tmp_path, 10)
    other.write(tmp_path, since=0)
    for row, message in list(zip(ledger.rows, replay(ledger), strict=True))[10:]:
        other.book(row.round, row.phase, row.direction, {row.client: message})
    other.write(tmp_path, since=10)
    with open(tmp_path / "ledger.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(ledger.rows)
    assert [int(row["bytes"]) for row in rows] == [row.bytes for row in ledger.rows]
    assert {row["client"] for row in rows} == {"0", "one, two"}
    schemas = json.loads((tmp_path / "schemas.json").read_text())
    assert schemas[1] == [{"name": "model/b", "dtype": "float32", "shape": [4]}, {"name": "model/w", "dtype": "float32", "shape": [3, 4]}]


def test_an_empty_ledger_is_read_again(tmp_path):
    Ledger().write(tmp_path)
    other = Ledger()
    other.read(tmp_path, 0)
    assert other.rows == []


def test_a_ledger_that_lost_lines_is_refused(tmp_path):
    ledger = filled()
    ledger.write(tmp_path)
    text = (tmp_path / "ledger.csv").read_text().splitlines(keepends=True)
    (tmp_path / "ledger.csv").write_text("".join(text[:5]))
    with pytest.raises(ValueError, match="ledger"):
        Ledger().read(tmp_path, len(ledger.rows))
