"""The ledger: every message that crosses the waist, booked once, with the bytes it has on the wire."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fedloom.message import Batch, Message, Schema, encoded_size, schema_of

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
    """Books messages and adds them up."""

    def __init__(self) -> None:
        self.rows: list[Booking] = []
        self.schemas: list[Schema] = []
        self._numbers: dict[Schema, int] = {}
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
            known = {id(message): message for message in messages.values()}  # many may be sent the same one
            made = {key: self._entry(schema_of(message), phase) for key, message in known.items()}
            entries = {client: made[id(message)] for client, message in messages.items()}
        self.rows += [Booking(round, book_as or phase, direction, client, *entry) for client, entry in entries.items() if entry]

    def _entry(self, schema: Schema, phase: str) -> tuple[int, int, int] | None:
        """Bytes, scalars and number of a schema; None for nothing."""
        if not schema:
            return None
        number = self._numbers.setdefault(schema, len(self.schemas))
        if number == len(self.schemas):
            self.schemas.append(schema)
        return encoded_size(schema, phase), sum(_count(shape) for _, _, shape in schema), number

    def traffic(self) -> dict[str, Any]:
        """Totals over clients and rounds: bytes and scalars up and down, again per phase, and what evaluation cost apart."""
        phases: dict[str, Counter[str]] = {}
        for row in self.rows:
            counter = phases.setdefault(row.phase, Counter(dict.fromkeys(_KEYS, 0)))
            counter[f"bytes_{row.direction}"] += row.bytes
            counter[f"scalars_{row.direction}"] += row.scalars
            counter["messages"] += 1
        return {
            **_total(counter for name, counter in phases.items() if name not in MEASURING),
            "phases": {name: dict(counter) for name, counter in phases.items()},
            "measuring": _total(counter for name, counter in phases.items() if name in MEASURING),
        }

    def write(self, folder: Path, since: int = 0) -> None:
        """Writes rows from number `since` on to ledger.csv (a line per message; 0 starts it anew) and schemas.json (what was in them)."""
        with open(folder / "ledger.csv", "a" if since else "w", newline="") as file:
            table = csv.writer(file)
            if not since:
                table.writerow(Booking._fields)
            table.writerows(self.rows[since:])
        if not since or any(row.schema >= self._written for row in self.rows[since:]):
            listing = [[{"name": name, "dtype": dtype, "shape": shape} for name, dtype, shape in schema] for schema in self.schemas]
            (folder / "schemas.json").write_text(json.dumps(listing, indent=1) + "\n")
            self._written = len(self.schemas)

    def read(self, folder: Path, count: int) -> None:
        """Takes the first `count` rows of a run folder's ledger for its own, in place of what it has."""
        listing = json.loads((folder / "schemas.json").read_text())
        self.schemas = [tuple((row["name"], row["dtype"], tuple(row["shape"])) for row in schema) for schema in listing]
        self._numbers, self._written = {schema: k for k, schema in enumerate(self.schemas)}, len(self.schemas)
        with open(folder / "ledger.csv", newline="") as file:
            rows = list(islice(csv.DictReader(file), count))
        if len(rows) < count:
            raise ValueError(f"ledger.csv has lost lines: {len(rows)} of {count}")
        numbers = ("round", "bytes", "scalars", "schema")
        self.rows = [Booking(**{key: int(value) if key in numbers else value for key, value in row.items()}) for row in rows]  # type: ignore[arg-type]


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
