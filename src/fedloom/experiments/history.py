"""A run's history: an entry for each round, and for each evaluation outside of the rounds."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any, TypeAlias

from fedloom._system import AppendLog
from fedloom.core.absence import AbsenceCounts
from fedloom.experiments.run_folder import HISTORY

Entry: TypeAlias = dict[str, Any]


class History:
    """Adds entries to a folder's history.jsonl; in memory is what patience and the summary need, however many rounds there are.

    Without a folder all entries are kept, in `entries`. patience: see RunSettings.
    """

    def __init__(self, folder: Path | None, patience: int):
        self._log = AppendLog(folder / HISTORY) if folder else None
        self.entries: list[Entry] = []
        self.round = 0  # of the last entry
        self.absences = AbsenceCounts()
        self._stage = ""  # of the last evaluation
        self._best: dict[str, Entry] = {}  # by stage
        self._last: dict[str, Entry] = {}
        self._recent: deque[float] = deque(
            maxlen=patience
        )  # validation accuracies: as many as patience allows,
        self._before = float("-inf")  # and the best of all that came earlier

    def add(self, entry: Entry) -> None:
        """Writes an entry down."""
        if self._log:
            self._log.append((json.dumps(entry) + "\n").encode())
        else:
            self.entries.append(entry)
        self._note(entry)

    def go_on_from(self, size: int) -> None:
        """Takes the first `size` bytes of the file for its own. ValueError if they are not there, or are no entries."""
        assert self._log is not None
        self._log.size = size
        for line in self._log.read().splitlines():
            self._note(json.loads(line))

    def cut(self) -> None:
        """Takes whatever else is in the file away."""
        assert self._log is not None
        self._log.truncate()

    def sync(self) -> int:
        """Waits until the file is on the disk; gives how many bytes it has."""
        assert self._log is not None
        return self._log.sync()

    def scored(self) -> tuple[Entry, Entry]:
        """The entry that counts and the last one, of the stage that was evaluated last: after fine-tuning, what counts is fine-tuned.

        What counts is the first of those with the best validation accuracy; the last if there is nothing to choose by. Empty ones if
        nothing was evaluated.
        """
        best, last = self._best.get(self._stage, {}), self._last.get(self._stage, {})
        return (best if best.get("val_accuracy") is not None else last), last

    def out_of_patience(self) -> bool:
        """Whether the last evaluations, as many as patience allows, were no better than one before them."""
        return bool(self._recent) and max(self._recent) <= self._before

    def _note(self, entry: Entry) -> None:
        self.round = entry["round"]
        self.absences.add(entry)
        mark = entry.get("val_accuracy")
        if mark is not None and self._recent.maxlen:
            if len(self._recent) == self._recent.maxlen:
                self._before = max(self._before, self._recent[0])
            self._recent.append(mark)
        if "accuracy" in entry:
            self._stage = entry["stage"]
            self._last[self._stage] = entry
            if self._stage not in self._best or _mark(entry) > _mark(self._best[self._stage]):
                self._best[self._stage] = entry


def _mark(entry: Entry) -> float:
    """What rounds are compared by; any validation is better than none."""
    return -1.0 if entry["val_accuracy"] is None else entry["val_accuracy"]
