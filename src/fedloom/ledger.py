"""The ledger: every message that crosses the waist, booked once, with the bytes it has on the wire."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedloom.message import Message, Schema, encoded_size, schema_of

Direction = Literal["up", "down"]
# Phases that only measure. They are booked like all others but kept out of the totals: a federation need not run them.
MEASURING = ("evaluate",)


@dataclass(frozen=True)
class Booking:
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

    def book(self, round: int, phase: str, direction: Direction, client: str, message: Message) -> None:
        """Enters one message. An empty one (a bare request or acknowledgement) carries nothing and is not booked."""
        schema = schema_of(message)
        if not schema:
            return
        number = self._numbers.setdefault(schema, len(self.schemas))
        if number == len(self.schemas):
            self.schemas.append(schema)
        scalars = sum(_count(shape) for _, _, shape in schema)
        self.rows.append(Booking(round, phase, direction, client, encoded_size(schema, phase), scalars, number))

    def traffic(self) -> dict[str, Any]:
        """Totals over clients and rounds: bytes and scalars up and down, again per phase, and what evaluation cost apart."""
        phases: dict[str, Counter[str]] = {}
        for row in self.rows:
            counter = phases.setdefault(row.phase, Counter({key: 0 for key in _KEYS}))
            counter[f"bytes_{row.direction}"] += row.bytes
            counter[f"scalars_{row.direction}"] += row.scalars
            counter["messages"] += 1
        return {
            **_total(counter for name, counter in phases.items() if name not in MEASURING),
            "phases": {name: dict(counter) for name, counter in phases.items()},
            "measuring": _total(counter for name, counter in phases.items() if name in MEASURING),
        }

    def write(self, folder: Path) -> None:
        """Writes ledger.csv (a line per message) and schemas.json (what was in them) into a run folder."""
        with open(folder / "ledger.csv", "w", newline="") as file:
            table = csv.writer(file)
            table.writerow(Booking.__dataclass_fields__)
            table.writerows((r.round, r.phase, r.direction, r.client, r.bytes, r.scalars, r.schema) for r in self.rows)
        listing = [[{"name": name, "dtype": dtype, "shape": shape} for name, dtype, shape in schema] for schema in self.schemas]
        (folder / "schemas.json").write_text(json.dumps(listing, indent=1) + "\n")


_KEYS = ("bytes_up", "bytes_down", "scalars_up", "scalars_down", "messages")


def _total(counters: Iterable[Counter[str]]) -> dict[str, int]:
    total = Counter({key: 0 for key in _KEYS})
    for counter in counters:
        total.update(counter)
    return dict(total)


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count
