"""Run folders: reads and checks their files.

Reports and comparisons start here. This module does not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from fedloom._system import without_control
from fedloom.errors import DataError

FORMAT = "fedloom-run/2"  # of the files in a run folder
CONFIG, SUMMARY = "config.json", "summary.json"
HISTORY, PARTITION = "history.jsonl", "partition.json"
BASELINES = "baselines"  # the folder, in a run folder, of the run folders of its baselines
CAUSE_LENGTH = 2000  # characters of the error that ended a run
_OF_CLIENTS = ("clients", "participants", "updates")  # parts of an entry that grow with clients
_REQUIRED = {
    "method",
    "dataset",
    "clients",
    "seed",
    "per_client",
    "traffic",
    "seconds",
    "rounds",
    "accuracy",
}


class LeftOut(NamedTuple):
    """A folder that cannot be used, and why."""

    folder: str
    reason: str


@dataclass(frozen=True)
class Run:
    """A completed run in a folder. The larger files are read when first used."""

    folder: Path
    summary: dict[str, Any]

    @cached_property
    def curve(self) -> list[dict[str, Any]]:
        """The history without the clients' scores and updates.

        It has an entry for each round, and for each evaluation outside of rounds.
        """
        return [
            {key: value for key, value in entry.items() if key not in _OF_CLIENTS}
            for entry in entries(self.folder)
        ]

    @cached_property
    def partition(self) -> dict[str, Any] | None:
        """Label counts of each client; None for a run of a deployment, which does not know them."""
        return read_partition(self.folder)

    @property
    def config(self) -> dict[str, Any]:
        """The run's origin: a recipe with every default."""
        return self.summary["config"]

    @property
    def is_baseline(self) -> bool:
        """Whether the folder is inside the folder of another run, which has it as a baseline."""
        return self.folder.parent.name == BASELINES and is_run(self.folder.parent.parent)

    @property
    def knows_cross_edges(self) -> bool:
        """Whether clients knew the edges between them. Some methods use them, others do not."""
        return any(
            self.config.get(table, {}).get("cross_edges") == "known"
            for table in ("partition", "data")
        )


def gather(paths: Iterable[Path]) -> tuple[list[Run], list[LeftOut]]:
    """Returns the completed runs in or below folders, and the other run folders with a reason."""
    runs, left_out = [], []
    for path in paths:
        folders = find(path)
        if not folders:
            left_out.append(LeftOut(str(path), "there is no run folder"))
        for folder in folders:
            try:
                runs.append(open_run(folder))
            except DataError as error:
                left_out.append(LeftOut(str(folder), str(error)))
    return runs, left_out


def find(path: Path) -> list[Path]:
    """Returns the run folders at or below a path, sorted by name.

    A run is followed by its baselines.
    """
    if is_run(path):
        return [path, *(find(path / BASELINES) if (path / BASELINES).is_dir() else [])]
    inner = sorted(child for child in path.iterdir() if child.is_dir()) if path.is_dir() else []
    return [folder for child in inner for folder in find(child)]


def is_run(path: Path) -> bool:
    """Returns whether a folder holds a run, finished or not."""
    return (path / CONFIG).exists() or (path / SUMMARY).exists()


def open_run(folder: Path) -> Run:
    """Checks the run in a folder and returns it.

    Raises a DataError, whose text is only the reason, if the run is not completed, damaged, or of
    another version.
    """
    try:
        summary = read_summary(folder)
        if summary is None:
            done = max((entry["round"] for entry in entries(folder)), default=0)
            raise DataError(f"unfinished: under way or killed, last round {done}")
        if summary["status"] != "completed":
            cause = f" ({summary['cause']})" if summary.get("cause") else ""
            raise DataError(f"unfinished: {summary['status']}{cause}")
        if summary.get("format") != FORMAT:
            found = summary.get("format", "no format, so from before there were any")
            raise DataError(
                f"from another version: its summary says {found}, this one reads {FORMAT}"
            )
        run = Run(folder, summary)
        missing = _REQUIRED - summary.keys()
        if missing:
            raise DataError(f"damaged: summary.json has no {', '.join(sorted(missing))}")
        last = max((entry["round"] for entry in run.curve), default=0)
        if last != summary["rounds"]:
            raise DataError(
                f"damaged: history.jsonl ends with round {last}, "
                f"summary.json with {summary['rounds']}"
            )
        _ = run.partition  # raises if it is damaged
    except DataError as error:
        raise DataError(str(error).removeprefix(f"run: {str(folder)!r} is ")) from error
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(f"damaged: {type(error).__name__}: {error}") from error
    return run


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the origin of the run in a folder.

    Raises a DataError if the folder holds no run, or if the file is damaged.
    """
    try:
        return _read_object(folder / CONFIG)
    except OSError as error:
        raise DataError(
            f"run: {str(folder)!r} is not a run folder ({CONFIG}: {error.strerror})"
        ) from error
    except ValueError as error:
        raise DataError(f"run: {str(folder)!r} is damaged ({CONFIG}: {error})") from error


def read_partition(folder: Path) -> dict[str, Any] | None:
    """Returns the label counts of each client; None if the folder does not have them."""
    path = folder / PARTITION
    return _read_object(path) if path.exists() else None


def read_summary(folder: Path) -> dict[str, Any] | None:
    """Returns the content of summary.json; None if the run was killed or is still under way."""
    try:
        summary = _read_object(folder / SUMMARY)
        if not {"status", "config"} <= summary.keys():
            raise ValueError("it is not a run's")
    except (FileNotFoundError, NotADirectoryError):  # `read_config` says what is missing
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"run: {str(folder)!r} is damaged ({SUMMARY}: {error})") from error
    return summary


def is_completed(folder: Path) -> bool:
    """Returns whether the run in a folder completed. Raises a DataError if it is damaged."""
    return (read_summary(folder) or {}).get("status") == "completed"


def read_history(folder: Path) -> list[dict[str, Any]]:
    """Returns the entries of the history in a run folder."""
    return list(entries(folder))


def entries(folder: Path) -> Iterator[dict[str, Any]]:
    """Yields the entries of the history one by one: those of a thousand clients take memory.

    Skips a last line without an end, which was being written when the run was killed.
    """
    if not (folder / HISTORY).exists():
        return
    with open(folder / HISTORY) as file:
        for line in file:
            if line.endswith("\n"):
                yield without_control(json.loads(line))


def _read_object(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text())
    if not isinstance(content, dict):
        raise ValueError("it is not a run's")
    return without_control(content)
