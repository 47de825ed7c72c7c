"""The ledger: what it books is what travels, what it writes it reads again."""

import csv
import json

import pytest
import torch

from fedloom.core.ledger import Booking, Ledger
from fedloom.core.message import encode, flatten

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
            ledger.book(
                number, "evaluate", "up", {client: {"test": torch.zeros(2, 2, dtype=torch.int64)}}
            )
    return ledger


@pytest.mark.parametrize("phase", ["train", "a_longer_name"])
@pytest.mark.parametrize(
    "message",
    [
        MODEL,
        SIZE,
        {**MODEL, **SIZE},
        {"x": torch.zeros(0, 5)},
        {"h": torch.ones(3, dtype=torch.float16), "flag": torch.tensor(True)},
        {"model": {"inner": {"deep": torch.ones(2, 3, 4).double()}}},
    ],
)
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
    assert ledger.schemas[2] == (
        ("model/b", "float32", (4,)),
        ("model/w", "float32", (3, 4)),
        ("size", "int64", ()),
    )


def test_totals_are_sums_and_measuring_is_apart():
    traffic = filled().traffic()
    up, down = len(encode({**MODEL, **SIZE}, "train")), len(encode(MODEL, "train"))
    assert traffic["phases"]["train"] == {
        "bytes_up": 4 * up,
        "bytes_down": 4 * down,
        "scalars_up": 4 * 17,
        "scalars_down": 4 * 16,
        "messages": 8,
    }
    setup = len(encode(SIZE, "setup"))
    assert traffic["phases"]["setup"] == {
        "bytes_up": 2 * setup,
        "bytes_down": 0,
        "scalars_up": 2,
        "scalars_down": 0,
        "messages": 2,
    }
    assert {
        key: traffic[key]
        for key in ("bytes_up", "bytes_down", "scalars_up", "scalars_down", "messages")
    } == {
        "bytes_up": 4 * up + 2 * setup,
        "bytes_down": 4 * down,
        "scalars_up": 70,
        "scalars_down": 64,
        "messages": 10,
    }
    assert traffic["measuring"] == traffic["phases"]["evaluate"]
    assert traffic["measuring"]["scalars_up"] == 16
    json.dumps(traffic)


def test_totals_of_nothing_are_zero():
    traffic = Ledger().traffic()
    assert traffic["phases"] == {}
    assert set(traffic["measuring"].values()) == {0}
    assert traffic["bytes_up"] == traffic["bytes_down"] == 0


FORMS = [SIZE, MODEL, {**MODEL, **SIZE}, {"test": torch.zeros(2, 2, dtype=torch.int64)}]


def rows_of(folder):
    with open(folder / "ledger.csv", newline="") as file:
        return list(csv.DictReader(file))


def size_of(folder, rows):
    """Bytes of ledger.csv up to and with so many rows."""
    lines = (folder / "ledger.csv").read_bytes().splitlines(keepends=True)
    return sum(len(line) for line in lines[: 1 + rows])


def replay(ledger, rows):
    for row in rows:
        ledger.book(row.round, row.phase, row.direction, {row.client: FORMS[row.schema]})


def test_what_is_written_is_read_again(tmp_path):
    ledger = filled()
    booked = list(ledger.rows)
    ledger.write(tmp_path)
    assert [tuple(row.values()) for row in rows_of(tmp_path)] == [
        tuple(map(str, row)) for row in booked
    ]
    other = Ledger.read(tmp_path, ledger.sync())
    assert other.schemas == ledger.schemas
    assert other.traffic() == ledger.traffic()
    other.book(3, "train", "down", {"0": MODEL})
    assert other.rows[-1].schema == 1  # known from the file


def test_what_is_written_is_not_kept_in_memory(tmp_path):
    ledger = filled()
    before = ledger.traffic()
    ledger.write(tmp_path)
    assert ledger.rows == []
    assert ledger.traffic() == before


def test_writing_bit_by_bit_is_writing_at_once(tmp_path):
    rows = filled().rows
    for folder in ("once", "steps"):
        (tmp_path / folder).mkdir()
    filled().write(tmp_path / "once")
    growing = Ledger()
    growing.write(tmp_path / "steps")  # nothing yet
    for start, end in ((0, 3), (3, 4), (4, 11), (11, len(rows))):
        replay(growing, rows[start:end])
        growing.write(tmp_path / "steps")
    for file in ("ledger.csv", "schemas.json"):
        assert (tmp_path / "once" / file).read_bytes() == (
            tmp_path / "steps" / file
        ).read_bytes(), file


@pytest.mark.parametrize("kept", [0, 1, 2, 10, 18])
def test_a_resumed_ledger_is_cut_back_and_goes_on(tmp_path, kept):
    ledger = filled()
    rows = ledger.rows
    ledger.write(tmp_path)
    whole = {file: (tmp_path / file).read_bytes() for file in ("ledger.csv", "schemas.json")}
    other, expected = Ledger.read(tmp_path, size_of(tmp_path, kept)), Ledger()
    replay(expected, rows[:kept])
    assert (other.schemas, other.traffic()) == (expected.schemas, expected.traffic())
    other.write(tmp_path)
    assert len(rows_of(tmp_path)) == kept
    replay(other, rows[kept:])
    other.write(tmp_path)
    assert {file: (tmp_path / file).read_bytes() for file in whole} == whole
    assert other.traffic() == ledger.traffic()


def test_what_was_half_written_is_written_over(tmp_path):
    ledger = filled()
    ledger.write(tmp_path)
    whole = (tmp_path / "ledger.csv").read_bytes()
    with open(tmp_path / "ledger.csv", "ab") as file:
        file.write(b"3,train,up,0,1")
    Ledger.read(tmp_path, len(whole)).write(tmp_path)
    assert (tmp_path / "ledger.csv").read_bytes() == whole


def test_an_empty_ledger_is_read_again(tmp_path):
    empty = Ledger()
    empty.write(tmp_path)
    assert Ledger.read(tmp_path, empty.sync()).traffic() == empty.traffic()


def test_a_ledger_that_lost_lines_is_refused(tmp_path):
    ledger = filled()
    ledger.write(tmp_path)
    size = ledger.sync()
    schemas = (tmp_path / "schemas.json").read_text()
    (tmp_path / "schemas.json").write_text(json.dumps(json.loads(schemas)[:2]))
    with pytest.raises(ValueError, match=r"schemas\.json has lost schemas: 2 of 4"):
        Ledger.read(tmp_path, size)
    (tmp_path / "schemas.json").write_text(schemas)
    (tmp_path / "ledger.csv").write_bytes((tmp_path / "ledger.csv").read_bytes()[:100])
    with pytest.raises(ValueError, match=f"ledger.csv has lost lines: 100 of {size} bytes"):
        Ledger.read(tmp_path, size)
