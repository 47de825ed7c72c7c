"""History: an entry for each round, and for each evaluation outside of rounds."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from fedloom._system import AppendLog
from fedloom.core.absence import AbsenceCounts
from fedloom.experiments.run_folder import HISTORY
from fedloom.nn.metric_names import MINIMISED

Entry: TypeAlias = dict[str, Any]
Matrix: TypeAlias = list[list[int]]  # [true class][predicted class]


class History:
    """Appends entries to a folder's history.jsonl.

    Its memory does not grow with the rounds: it holds what early stopping and the summary need.
    Without a folder, `entries` holds all entries.

    Attributes:
        round: The round of the last entry.
        absences: The counts of absences so far.
        clipped: {client: in how many rounds its update was shortened}.
        left_out: {client: in how many rounds its update was not used}.
        confusions: {stage: {"best": ..., "last": ...}}, the test confusion matrices of all clients.
    """

    def __init__(
        self,
        folder: Path | None,
        patience: int,
        selection: str = "accuracy",
        last: bool = False,
    ):
        self._takes_last = last  # the last entry is reported, whatever its validation score
        self._log = AppendLog(folder / HISTORY) if folder else None
        self.entries: list[Entry] = []
        self.round = 0
        self.absences = AbsenceCounts()
        self.clipped: Counter[str] = Counter()
        self.left_out: Counter[str] = Counter()
        self.confusions: dict[str, dict[str, Matrix | None]] = {}
        self._stage = ""  # of the last evaluation
        self._best: dict[str, Entry] = {}  # by stage
        self._last: dict[str, Entry] = {}
        self._selected = f"val_{selection}"
        self._sign = -1.0 if selection in MINIMISED else 1.0
        # The last `patience` validation scores, and the best of all earlier ones.
        self._recent: deque[float] = deque(maxlen=patience)
        self._before = float("-inf")

    def add(self, entry: Entry, confusion: Matrix | None = None) -> None:
        """Appends an entry.

        confusion: the test confusion matrix of all clients. It is kept for the best and the last
        entry, and not written.
        """
        if self._log:
            self._log.append((json.dumps(entry) + "\n").encode())
        else:
            self.entries.append(entry)
        self._note(entry)
        if "accuracy" in entry:
            stage = entry["stage"]
            kept = self.confusions.setdefault(stage, {})
            kept["last"] = confusion
            if self._best[stage] is entry:
                kept["best"] = confusion

    def resume(self, size: int, confusions: Mapping[str, dict[str, Matrix | None]]) -> None:
        """Reads the first `size` bytes of the file.

        Raises a ValueError if the file is shorter or holds no entries.

        confusions: what `confusions` was then.
        """
        assert self._log is not None
        self._log.size = size
        for line in self._log.read().splitlines():
            self._note(json.loads(line))
        self.confusions = {stage: dict(kept) for stage, kept in confusions.items()}

    def truncate(self) -> None:
        """Removes the rest of the file."""
        assert self._log is not None
        self._log.truncate()

    def sync(self) -> int:
        """Flushes the file to the disk. Returns its number of bytes."""
        assert self._log is not None
        return self._log.sync()

    def scored(self) -> tuple[Entry, Entry]:
        """Returns the best entry and the last entry of the stage that was evaluated last.

        After fine-tuning, these are entries of fine-tuning. The best entry is the first one with
        the best validation score, or the last one if there is no such score. Both are empty if
        nothing was evaluated.
        """
        return self._best.get(self._stage, {}), self._last.get(self._stage, {})

    def confusion(self) -> Matrix | None:
        """Returns the confusion matrix of the best entry; None if it is not known."""
        return self.confusions.get(self._stage, {}).get("best")

    def leads(self, evaluation: Entry) -> bool:
        """Returns whether an evaluation would become the one that `scored` returns as the best.

        evaluation: an entry that is not added yet.
        """
        best = self._best.get(evaluation["stage"])
        if self._takes_last or best is None or best.get(self._selected) is None:
            return True
        return self._rank(evaluation) > self._rank(best)

    def out_of_patience(self) -> bool:
        """Returns whether the last `patience` evaluations were no better than an earlier one."""
        return bool(self._recent) and max(self._recent) <= self._before

    def _note(self, entry: Entry) -> None:
        self.round = entry["round"]
        self.absences.add(entry)
        phases = entry.get("updates", ())
        self.clipped.update({client for row in phases for client in row["clipped"]})
        self.left_out.update({client for row in phases for client in row["left_out"]})
        if entry.get(self._selected) is not None and self._recent.maxlen:
            if len(self._recent) == self._recent.maxlen:
                self._before = max(self._before, self._recent[0])
            self._recent.append(self._rank(entry))
        if "accuracy" in entry:
            self._stage = entry["stage"]
            self._last[self._stage] = entry
            if self.leads(entry):
                self._best[self._stage] = entry

    def _rank(self, entry: Entry) -> float:
        """Returns what rounds are compared by. Any validation score is better than none."""
        value = entry.get(self._selected)
        return float("-inf") if value is None else self._sign * value
