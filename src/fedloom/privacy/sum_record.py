"""Sum record: what a client remembers of the secure sums that it took part in.

A sum hides a client among the others, but two sums of the same numbers do not: if they are over
cohorts that differ in one client, their difference is that client's vector. A server that returns
to a checkpoint repeats sums, so the record is not part of what a checkpoint takes back. In a
deployment it is a file to which the party only appends. A row is on the disk before anything that
depends on it leaves the party.

A sum is identified by its round, its phase, and how many sums of that phase came before it in the
round. The client refuses

- a number that a sum of that session had before;
- to repeat a sum over another cohort;
- a sum of a round and phase over a cohort that differs from an earlier one in fewer than `apart`
  clients (the same cohort is allowed);
- a sum over a group of clients (`run.bucketing`) if another group was summed in that round and
  phase;
- after its state was taken back to the end of a round: later rounds, before the sums that came
  after the saved state are repeated. Otherwise a server could call the repeated round another one.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from fedloom._system import make_private, open_private
from fedloom.errors import DataError, Refusal

MOST_DRAWS = 32  # of the graph for one sum: a server that lets sums fail can choose among so many


class SumId(NamedTuple):
    """Which sum it is.

    Attributes:
        run: The id of the server's session, 16 bytes.
        number: The number of the sum in the session.
        round: The round of the sum.
        phase: The phase whose replies are added.
    """

    run: bytes
    number: int
    round: int = 0
    phase: str = ""

    def text(self) -> bytes:
        """Returns it as bytes, for hashes and signatures."""
        numbers = (self.number.to_bytes(8, "big"), self.round.to_bytes(8, "big"))
        return b"".join((self.run, *numbers, self.phase.encode()))


Key = tuple[int, str]  # round and phase
Cohort = frozenset[str]  # the names of clients


class SumRecord:
    """The sums of one client.

    Args:
        path: The file; None keeps the record in memory.
        apart: The least difference between two cohorts of a round and phase.
    """

    def __init__(self, path: Path | None = None, apart: int = 2):
        self.path, self.apart = path, apart
        self._numbers: dict[str, int] = {}  # the last number of each session
        self._cohorts: dict[Key, list[Cohort]] = {}
        self._repeated: Counter[Key] = Counter()  # how many of them the current state has
        self._draws: Counter[Key] = Counter()  # sums begun and not finished
        if path is not None and path.exists():
            self._read(path)

    def begin(self, about: SumId, drawn: bool = False) -> None:
        """Records that a sum begins. Raises Refusal if the client must not take part.

        Args:
            about: The sum.
            drawn: Whether a graph is drawn for it.
        """
        key = (about.round, about.phase)
        last = self._numbers.get(about.run.hex(), 0)
        if about.number <= last:
            raise Refusal(f"sum {about.number} was asked for before, the last was {last}")
        for (number, phase), cohorts in sorted(self._cohorts.items()):
            if number < about.round and self._repeated[number, phase] < len(cohorts):
                raise Refusal(
                    f"its state is older than its sum of {phase!r} in round {number}; a sum of "
                    f"round {about.round} could contain the same numbers again. Repeat round "
                    f"{number} first, or restart this party if it was away"
                )
        if drawn and self._draws[key] >= MOST_DRAWS:
            raise Refusal(
                f"{MOST_DRAWS} sums of {about.phase!r} in round {about.round} have failed, "
                "and a server could choose among their graphs"
            )
        self._add({**_row(about), "drawn": drawn})

    def release(self, about: SumId, cohort: Iterable[str], one_cohort: bool = False) -> None:
        """Records the cohort of a sum, before the client helps to open it.

        Raises Refusal if the sum would expose a client.

        Args:
            about: The sum.
            cohort: The clients whose vectors are in it.
            one_cohort: Whether all sums of a round and phase must have the same cohort. It holds
                for sums over groups of clients, which are small: from sums over many different
                groups a server could solve for single vectors.
        """
        key, chosen = (about.round, about.phase), frozenset(cohort)
        known, place = self._cohorts.get(key, []), self._repeated[key]
        where = f"{about.phase!r} in round {about.round}"
        if place < len(known) and known[place] != chosen:
            raise Refusal(
                f"{where} was summed over {_listed(known[place])} before, and now over "
                f"{_listed(chosen)}: the difference of the two sums would expose "
                f"{_listed(known[place] ^ chosen)}. Wait for all of them, or agree on a new run "
                "(another run.seed)"
            )
        if one_cohort and any(earlier != chosen for earlier in known):
            raise Refusal(
                f"{where} was summed over {_listed(known[0])} before, and now over "
                f"{_listed(chosen)}: a client is in one group of a round only (run.bucketing)"
            )
        for earlier in known:
            if 0 < len(earlier ^ chosen) < self.apart:
                raise Refusal(
                    f"{where} was summed over {_listed(earlier)} before, and now over "
                    f"{_listed(chosen)}: they differ in fewer than {self.apart} clients "
                    "(run.secure_apart)"
                )
        self._add({**_row(about), "place": place, "cohort": sorted(chosen)})

    def rewind(self, round: float) -> None:
        """Notes that the client's state is that of the end of this round.

        round: -1 is the start of the run. Infinity means that no sum must be repeated.
        """
        for key, cohorts in self._cohorts.items():
            self._repeated[key] = len(cohorts) if key[0] <= round else 0

    def _add(self, row: dict[str, Any]) -> None:
        if self.path is not None:
            _append(self.path, row)
        self._take(row)

    def _take(self, row: dict[str, Any]) -> None:
        """Takes a row of the file, or one that is new."""
        key = (int(row["round"]), str(row["phase"]))
        if "cohort" not in row:
            run, number = str(row["run"]), int(row["number"])
            self._numbers[run] = max(number, self._numbers.get(run, 0))
            self._draws[key] += bool(row["drawn"])
            return
        known, place = self._cohorts.setdefault(key, []), int(row["place"])
        if place == len(known):  # a repeated sum is there already
            known.append(frozenset(row["cohort"]))
        self._draws[key] = 0
        self._repeated[key] = place + 1

    def _read(self, path: Path) -> None:
        # A row without its end was not written completely, so nothing that depends on it has left.
        complete, _, cut = path.read_bytes().rpartition(b"\n")
        for number, line in enumerate(complete.splitlines(), 1):
            try:
                self._take(json.loads(line))
            except (ValueError, LookupError, TypeError) as error:
                raise DataError(
                    f"{path}: line {number} is damaged ({error}). This file protects the party "
                    "against sums that expose it: restore it, or agree on a new run"
                ) from error
        if cut:
            os.truncate(path, len(complete) + bool(complete))


def _row(about: SumId) -> dict[str, Any]:
    return {
        "run": about.run.hex(),
        "number": about.number,
        "round": about.round,
        "phase": about.phase,
    }


def _append(path: Path, row: dict[str, Any]) -> None:
    """Appends a row and waits until it is on the disk."""
    new = not path.exists()
    make_private(path.parent)
    with open(path, "a", encoding="utf-8", opener=open_private) as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())
    if new:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _listed(clients: Cohort) -> str:
    """Returns the names of a few clients, or the number of many."""
    return ", ".join(sorted(clients)) if len(clients) <= 12 else f"{len(clients)} clients"
