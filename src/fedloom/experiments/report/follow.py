"""Follows run folders while another process writes them. It reads their files only.

It works for all engines and for deployments.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from fedloom._system import plain_text, without_control
from fedloom.experiments.report.comparison import MINIMISED
from fedloom.experiments.report.labels import label
from fedloom.experiments.report.outliers import standing_out
from fedloom.experiments.run_folder import CAUSE_LENGTH

PIECE = 1 << 20  # bytes per read
TAIL = 4096  # last bytes read; if they changed (times differ), the history was cut and continued
QUIET = 60.0  # seconds without a new line after which a run is silent, unless its rounds take long
FIELDS = (
    "round",
    "stage",
    "seconds",
    "accuracy",
    "val_accuracy",
    "bytes_up",
    "bytes_down",
    "participants",
    "absent",
    "loss",
    "score",  # the test value of the metric that selects the best round
    "val_score",  # its validation value
)


class _Best(NamedTuple):
    """The best evaluation of a stage so far: how it ranks, its values and the clients' scores."""

    rank: float
    values: dict[str, Any]
    clients: dict[str, dict[str, Any]]


class Follower:
    """The known state of one run folder. `look` reads new lines; no line is read twice.

    Attributes:
        folder: The run folder.
        entries: The values of FIELDS of each history entry.
        version: Changes if the history was restarted and the entries are different ones.
        clients: Each client's scores at the best round so far, and how often, when and why it was
            absent.
        outliers: The clients whose updates stand out in the latest round that compares updates, as
            `outliers.standing_out` returns them; None if no round does.
        behind: Whether there are lines that `look` had no time to read.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time):
        self.folder, self._clock = folder, clock
        self.version = 0
        self._config, self._summary = _File(folder / "config.json"), _File(folder / "summary.json")
        self._begin()

    def _begin(self) -> None:
        self.entries: list[list[Any]] = []
        self.clients: dict[str, dict[str, Any]] = {}
        self.outliers: dict[str, Any] | None = None
        self.behind = False
        self._epsilon: float | None = None  # of differential privacy, spent so far
        self._best: dict[str, _Best] = {}  # by stage
        self._stage = ""  # of the last evaluation
        self._read, self._tail, self._rest, self._damaged = 0, b"", b"", 0

    def look(self, seconds: float = 0.5) -> None:
        """Reads new lines for at most this many seconds. Sets `behind` if there are more."""
        until, self.behind = time.monotonic() + seconds, False
        try:
            with open(self.folder / "history.jsonl", "rb") as file:
                if not self._continues(file):
                    self.version += 1
                    self._begin()
                file.seek(self._read)
                while piece := file.read(PIECE):
                    self._take(piece)
                    if time.monotonic() > until:
                        self.behind = True
                        return
        except FileNotFoundError:
            if self._read:
                self.version += 1
                self._begin()

    def _continues(self, file: BinaryIO) -> bool:
        """Returns whether the file still starts with the bytes that were read.

        A resumed run cuts the file, a restarted one empties it.
        """
        file.seek(self._read - len(self._tail))
        return file.read(len(self._tail)) == self._tail

    def _take(self, piece: bytes) -> None:
        self._read += len(piece)
        self._tail = (self._tail + piece)[-TAIL:]
        *lines, self._rest = (self._rest + piece).split(b"\n")  # the last one may be half-written
        for line in lines:
            try:
                entry = without_control(json.loads(line))
                self._note(entry)
            except (ValueError, TypeError, AttributeError, KeyError):
                self._damaged += 1

    def _note(self, entry: dict[str, Any]) -> None:
        absent = entry.get("absent", [])
        number, selection = int(entry["round"]), self._selection()
        values: dict[str, Any] = {name: _number(entry.get(name)) for name in FIELDS}
        values |= {"round": number, "stage": str(entry.get("stage", ""))}
        values |= {"participants": len(entry.get("participants", [])), "absent": len(absent)}
        values |= {"score": _number(entry.get(selection))}
        values |= {"val_score": _number(entry.get(f"val_{selection}"))}
        scores = {
            str(row["id"]): {
                "accuracy": _number(row.get("accuracy")),
                "score": _number(row.get(selection)),
                "loss": _number(row.get("loss")),
            }
            for row in entry.get("clients", [])
        }
        outliers, spent = standing_out(entry), entry.get("epsilon")
        self.outliers = outliers or self.outliers
        self._epsilon = self._epsilon if spent is None else float(spent)
        for one in absent:
            about = self._client(one["client"])
            about |= {
                "absences": about["absences"] + 1,
                "cause": plain_text(one.get("cause", "")),
                "last_absent": number,
            }
        self.entries.append(list(values.values()))
        if "accuracy" in entry:
            self._rank(values, scores, selection)

    def _rank(self, values: dict[str, Any], scores: dict[str, Any], selection: str) -> None:
        """Keeps the evaluation if it is the best of its stage, as the run does.

        The best is the first one with the best validation value. Without one, it is the last.
        """
        self._stage = stage = values["stage"]
        chosen = values["val_score"]
        sign = -1.0 if selection in MINIMISED else 1.0
        rank = -math.inf if chosen is None else sign * chosen
        best = self._best.get(stage)
        if best is None or rank > best.rank or rank == best.rank == -math.inf:
            self._best[stage] = _Best(rank, values, scores)
        for name, row in self._best[stage].clients.items():
            self._client(name).update(row)

    def _client(self, name: Any) -> dict[str, Any]:
        fresh = {
            "accuracy": None,
            "score": None,
            "loss": None,
            "absences": 0,
            "cause": "",
            "last_absent": None,
        }
        return self.clients.setdefault(str(name), fresh)

    def _selection(self) -> str:
        """Returns the metric whose validation value chooses the best round."""
        return str(_table(self._config.read() or {}, "run").get("selection") or "accuracy")

    # ---- data for the page ----
    def about(self) -> dict[str, Any]:
        """Returns the run's state, progress, scores, traffic, settings and warnings.

        The state is waiting, running, silent, completed, failed, stopped or damaged. The scores are
        those of the best round so far, as in reports and on the console.
        """
        config = self._config.read() or {}
        last = dict(zip(FIELDS, self.entries[-1], strict=True)) if self.entries else {}
        planned = _number(_table(config, "method").get("rounds"))
        since = self._since_last_change()
        pace = self._pace()
        state, cause = self._state(config, since, pace)
        done = last.get("round", 0)
        left = None
        if state == "running" and planned and pace is not None:
            left = max(0.0, (planned - done) * pace - since)
        elapsed = last.get("seconds") or 0.0
        best = self._best[self._stage].values if self._stage in self._best else {}
        selection, summary = self._selection(), self._summary.read() or {}
        losses = [e[FIELDS.index("loss")] for e in self.entries]
        return {
            "state": state,
            "cause": cause,
            "round": done,
            "planned": planned,
            "left": left,
            "silent_for": since,
            "elapsed": elapsed + since if state in ("running", "silent") else elapsed,
            "best_round": best.get("round"),
            "accuracy": best.get("accuracy"),
            "val_accuracy": best.get("val_accuracy"),
            "score": best.get("score"),
            "val_score": best.get("val_score"),
            "selection": selection,
            "metric": label(selection),
            "loss": next((loss for loss in reversed(losses) if loss is not None), None),
            "bytes_up": last.get("bytes_up"),
            "bytes_down": last.get("bytes_down"),
            "absences": sum(e[FIELDS.index("absent")] for e in self.entries),
            "warnings": [str(line) for line in summary.get("warnings") or ()],
            "facts": self._facts(config),
            "damaged_lines": self._damaged,
        }

    def _state(self, config: dict[str, Any], since: float, pace: float | None) -> tuple[str, str]:
        if not config:
            exists = self.folder.is_dir()
            return "waiting", "the run has not started" if exists else "the folder does not exist"
        if (summary := self._summary.read()) is not None:
            unknown = "" if summary else "summary.json cannot be read"
            cause = plain_text(summary.get("cause", unknown), CAUSE_LENGTH)
            return str(summary.get("status", "damaged")), cause
        if since > max(QUIET, 10 * (pace or 0.0)):
            return "silent", "the run computes for long, waits for parties, or was killed"
        return "running", ""

    def _since_last_change(self) -> float:
        times = []
        for name in ("history.jsonl", "config.json"):
            try:
                times.append((self.folder / name).stat().st_mtime)
            except OSError:  # the file does not exist yet
                continue
        return max(0.0, self._clock() - max(times)) if times else 0.0

    def _pace(self) -> float | None:
        """Returns the seconds per round over the last 20 rounds of the process that writes now."""
        ends: list[tuple[int, float]] = []
        for entry in reversed(self.entries):
            number, seconds = entry[0], entry[2]
            if seconds is None or (ends and (seconds > ends[-1][1] or ends[0][0] - number > 20)):
                break  # earlier entries come from another process, with another clock
            ends.append((number, seconds))
        if ends and ends[0][0] > ends[-1][0]:
            return (ends[0][1] - ends[-1][1]) / (ends[0][0] - ends[-1][0])
        return None

    def _facts(self, config: dict[str, Any]) -> list[list[str]]:
        partition, run = _table(config, "partition"), _table(config, "run")
        parties = len(config.get("parties") or [])
        found = {
            "method": _table(config, "method").get("name"),
            "dataset": _table(config, "data").get("dataset"),
            "partition": partition.get("name"),
            "model": _table(config, "model").get("name"),
            "clients": partition.get("clients") or parties or len(self.clients) or None,
            "engine": "deployment" if "deployment" in config else run.get("engine"),
            "seed": run.get("seed"),
            "best round by": f"validation {label(self._selection())}",
            "ε spent": self._spent(run),
        }
        return [[name, str(value)] for name, value in found.items() if value is not None]

    def _spent(self, run: dict[str, Any]) -> str | None:
        """Returns the privacy budget that was spent so far; None if the run is not private."""
        if self._epsilon is None:
            return None
        limit = _number(run.get("dp_epsilon"))
        seeded = " (seeded noise: not private)" if run.get("dp_seeded") else ""
        return f"{self._epsilon:.3f}{f' of {limit:g}' if limit else ''}{seeded}"


class _File:
    """A JSON file that another process writes. It is read again only after it has changed."""

    def __init__(self, path: Path):
        self._path = path
        self._key: tuple[int, int, int] | None = None
        self._content: dict[str, Any] = {}

    def read(self) -> dict[str, Any] | None:
        """Returns the content; {} if it is not a JSON object; None if there is no file."""
        try:
            found = self._path.stat()
            key = (found.st_ino, found.st_mtime_ns, found.st_size)
            if key != self._key:
                self._content, self._key = _object(self._path.read_bytes()), key
        except OSError:  # the file does not exist, or was just removed
            return None
        return self._content


def run_folders(folder: Path) -> dict[str, Path] | None:
    """Returns the runs in a folder, by name; None if it is itself a run or contains none yet."""
    if (folder / "config.json").exists():
        return None
    places = (folder, folder / "runs")
    found = {
        path.parent.name: path.parent
        for place in places
        for path in sorted(place.glob("*/config.json"))
    }
    return found or None


def baselines_of(folder: Path) -> dict[str, Path]:
    """Returns the run folders of a run's baselines, by name."""
    found = sorted((folder / "baselines").glob("*/config.json"))
    return {path.parent.name: path.parent for path in found}


def _object(text: bytes) -> dict[str, Any]:
    try:
        content = without_control(json.loads(text))
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _table(config: dict[str, Any], name: str) -> dict[str, Any]:
    table = config.get(name)
    return table if isinstance(table, dict) else {}


def _number(value: Any) -> float | int | None:
    """Returns the value if it is a finite number, else None: JSON has no other numbers."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and math.isfinite(value) else None
