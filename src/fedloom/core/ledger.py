"""The ledger: every message that crosses the waist, booked once, with the bytes it has on the wire."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fedloom._system import AppendLog, write_atomic
from fedloom.core.message import Batch, Message, Schema, encoded_size, schema_of

Direction = Literal["up", "down"]
# Phases that only measure. They are booked like all others but kept out of the totals: a federation need not run them.
MEASURING = ("evaluate", "evaluate_sum")


class Booking(NamedTuple):
    """One message. `round` 0 is before the first round; `schema` numbers an entry of `Ledger.schemas`."""

    round: int
    phase: str
    direction: Direction
    client: str
    bytes: int
    scalars: int
    schema: int


class Ledger:
    """Books messages and adds them up. `rows` are those that are in no file yet: what is written down, memory lets go of."""

    def __init__(self) -> None:
        self.rows: list[Booking] = []
        self.schemas: list[Schema] = []
        self._numbers: dict[Schema, int] = {}
        self._phases: dict[str, Counter[str]] = {}  # totals
        self._log: AppendLog | None = None  # since the first writing
        self._written = 0  # schemas that are on disk already

    def book(
        self, round: int, phase: str, direction: Direction, messages: Mapping[str, Message], book_as: str | None = None
    ) -> None:  # fmt: skip
        """Enters a message per client. An empty one (a bare request or acknowledgement) carries nothing and is not booked.

        book_as: the phase for whose sake it travels, if that is another (a key exchange for the sake of an evaluation).
        """
        if isinstance(messages, Batch):
            entries = dict.fromkeys(messages, self._entry(messages.schema, phase))
        else:
            known = {
                id(message): message for message in messages.values()
            }  # many may be sent the same one
            made = {key: self._entry(schema_of(message), phase) for key, message in known.items()}
            entries = {client: made[id(message)] for client, message in messages.items()}
        booked = book_as or phase
        self.rows += [
            Booking(round, booked, direction, client, *entry)
            for client, entry in entries.items()
            if entry
        ]
        for entry, count in Counter(entries.values()).items():
            if entry:
                size, scalars, _ = entry
                self._add(booked, direction, size, scalars, count)

    def _entry(self, schema: Schema, phase: str) -> tuple[int, int, int] | None:
        """Bytes, scalars and number of a schema; None for nothing."""
        if not schema:
            return None
        number = self._numbers.setdefault(schema, len(self.schemas))
        if number == len(self.schemas):
            self.schemas.append(schema)
        return encoded_size(schema, phase), sum(_count(shape) for _, _, shape in schema), number

    def _add(self, phase: str, direction: str, size: int, scalars: int, count: int = 1) -> None:
        counter = self._phases.setdefault(phase, Counter(dict.fromkeys(_KEYS, 0)))
        counter[f"bytes_{direction}"] += count * size
        counter[f"scalars_{direction}"] += count * scalars
        counter["messages"] += count

    def traffic(self) -> dict[str, Any]:
        """Totals over clients and rounds: bytes and scalars up and down, again per phase, and what evaluation cost apart."""
        return {
            **_total(counter for name, counter in self._phases.items() if name not in MEASURING),
            "phases": {name: dict(counter) for name, counter in self._phases.items()},
            "measuring": _total(
                counter for name, counter in self._phases.items() if name in MEASURING
            ),
        }

    def sent(self) -> dict[str, int]:
        """Bytes so far, up and down, without what only measures: cheap enough for every round."""
        known = [counter for name, counter in self._phases.items() if name not in MEASURING]
        return {way: sum(counter[f"bytes_{way}"] for counter in known) for way in ("up", "down")}

    def write(self, folder: Path) -> None:
        """Writes what was booked since the last time to ledger.csv, a line per message; what messages hold is in schemas.json.

        The first time begins both anew, or, if the ledger was read from them, cuts back what was written since.
        """
        if self._log is None or len(self.schemas) > self._written:  # before the rows that name them
            listing = [
                [{"name": name, "dtype": dtype, "shape": shape} for name, dtype, shape in schema]
                for schema in self.schemas
            ]
            write_atomic(folder / "schemas.json", (json.dumps(listing, indent=1) + "\n").encode())
            self._written = len(self.schemas)
        if self._log is None:
            self._log = AppendLog(folder / "ledger.csv")
        heading = [] if self._log.size else [Booking._fields]
        text = io.StringIO(newline="")
        csv.writer(text).writerows([*heading, *self.rows])
        self._log.append(text.getvalue().encode())
        self.rows = []

    def sync(self) -> int:
        """Waits until ledger.csv is on the disk; gives how many bytes it has."""
        assert self._log is not None
        return self._log.sync()

    @classmethod
    def read(cls, folder: Path, size: int) -> Ledger:
        """The ledger of a run folder as it was when ledger.csv had `size` bytes. ValueError if the files do not have it any more."""
        ledger = cls()
        ledger._log = AppendLog(folder / "ledger.csv", size)
        used = 0
        for row in csv.DictReader(io.StringIO(ledger._log.read(), newline="")):
            ledger._add(row["phase"], row["direction"], int(row["bytes"]), int(row["scalars"]))
            used = max(used, int(row["schema"]) + 1)
        listing = json.loads((folder / "schemas.json").read_text())[:used]  # the others came later
        ledger.schemas = [
            tuple((tensor["name"], tensor["dtype"], tuple(tensor["shape"])) for tensor in schema)
            for schema in listing
        ]
        if len(ledger.schemas) < used:
            raise ValueError(f"schemas.json has lost schemas: {len(ledger.schemas)} of {used}")
        ledger._numbers, ledger._written = (
            {schema: k for k, schema in enumerate(ledger.schemas)},
            used,
        )
        return ledger


_KEYS = ("bytes_up", "bytes_down", "scalars_up", "scalars_down", "messages")


def _total(counters: Iterable[Counter[str]]) -> dict[str, int]:
    total = Counter(dict.fromkeys(_KEYS, 0))
    for counter in counters:
        total.update(counter)
    return dict(total)


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count
