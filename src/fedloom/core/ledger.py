"""The ledger: books every message that passes the waist, with its size on the wire."""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fedloom._system import AppendLog, write_atomic
from fedloom.core.message import Batch, Message, Schema, encoded_size, schema_of

Direction = Literal["up", "down"]
# Phases that only measure. They are not part of the totals: a federation need not run them.
MEASURING = ("evaluate", "evaluate_sum")


class Booking(NamedTuple):
    """One message.

    Round 0 is before the first round. `schema` is the number of an entry of `Ledger.schemas`.
    """

    round: int
    phase: str
    direction: Direction
    client: str
    bytes: int
    scalars: int
    schema: int


class Ledger:
    """Books messages and keeps totals.

    Attributes:
        rows: The messages that are not written to a file yet. Written rows leave memory.
        schemas: The schemas of all messages.
    """

    def __init__(self) -> None:
        self.rows: list[Booking] = []
        self.schemas: list[Schema] = []
        self._numbers: dict[Schema, int] = {}
        self._phases: dict[str, Counter[str]] = {}  # totals by phase
        self._log: AppendLog | None = None  # None before the first `write`
        self._written = 0  # schemas in schemas.json

    def book(
        self,
        round: int,
        phase: str,
        direction: Direction,
        messages: Mapping[str, Message],
        book_as: str | None = None,
    ) -> None:
        """Books {client: message}. Empty messages, such as bare requests, are not booked.

        Args:
            round: The round.
            phase: The phase.
            direction: "up" or "down".
            messages: The message of each client.
            book_as: The phase that the messages serve, if it is another one. An example is the key
                exchange of an evaluation.
        """
        if isinstance(messages, Batch):
            entries = dict.fromkeys(messages, self._entry(messages.schema, phase))
        else:
            known = {id(message): message for message in messages.values()}  # many may be the same
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
        """Returns the bytes, the scalars and the number of a schema; None if it is empty."""
        if not schema:
            return None
        number = self._numbers.setdefault(schema, len(self.schemas))
        if number == len(self.schemas):
            self.schemas.append(schema)
        return encoded_size(schema, phase), sum(math.prod(shape) for _, _, shape in schema), number

    def _add(self, phase: str, direction: str, size: int, scalars: int, count: int = 1) -> None:
        counter = self._phases.setdefault(phase, Counter(dict.fromkeys(_KEYS, 0)))
        counter[f"bytes_{direction}"] += count * size
        counter[f"scalars_{direction}"] += count * scalars
        counter["messages"] += count

    def traffic(self) -> dict[str, Any]:
        """Returns totals over clients and rounds: in all, per phase, and of measuring phases."""
        return {
            **_total(counter for name, counter in self._phases.items() if name not in MEASURING),
            "phases": {name: dict(counter) for name, counter in self._phases.items()},
            "measuring": _total(
                counter for name, counter in self._phases.items() if name in MEASURING
            ),
        }

    def sent(self) -> dict[str, int]:
        """Returns the bytes up and down so far, without measuring phases. It is cheap."""
        known = [counter for name, counter in self._phases.items() if name not in MEASURING]
        return {way: sum(counter[f"bytes_{way}"] for counter in known) for way in ("up", "down")}

    def write(self, folder: Path) -> None:
        """Appends the new rows to ledger.csv, and writes the schemas to schemas.json.

        The first call starts both files, or, for a ledger that was read, truncates ledger.csv to
        what was read.
        """
        if (
            self._log is None or len(self.schemas) > self._written
        ):  # before the rows that refer to them
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
        """Flushes ledger.csv to the disk. Returns its size in bytes."""
        assert self._log is not None
        return self._log.sync()

    @classmethod
    def read(cls, folder: Path, size: int) -> Ledger:
        """Returns the ledger of a run folder as it was when ledger.csv had `size` bytes.

        Raises ValueError if the files have lost some of that.
        """
        ledger = cls()
        ledger._log = AppendLog(folder / "ledger.csv", size)
        used = 0
        for row in csv.DictReader(io.StringIO(ledger._log.read(), newline="")):
            ledger._add(row["phase"], row["direction"], int(row["bytes"]), int(row["scalars"]))
            used = max(used, int(row["schema"]) + 1)
        listing = json.loads((folder / "schemas.json").read_text())[
            :used
        ]  # later ones are not in use
        ledger.schemas = [
            tuple((tensor["name"], tensor["dtype"], tuple(tensor["shape"])) for tensor in schema)
            for schema in listing
        ]
        if len(ledger.schemas) < used:
            raise ValueError(f"schemas.json has lost schemas: {len(ledger.schemas)} of {used}")
        ledger._numbers = {schema: k for k, schema in enumerate(ledger.schemas)}
        ledger._written = used
        return ledger


_KEYS = ("bytes_up", "bytes_down", "scalars_up", "scalars_down", "messages")


def _total(counters: Iterable[Counter[str]]) -> dict[str, int]:
    total = Counter(dict.fromkeys(_KEYS, 0))
    for counter in counters:
        total.update(counter)
    return dict(total)
