"""Run folders as whoever reads them later finds them: plain files. No torch, no live objects: reports and comparisons begin here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from fedloom.errors import DataError

FORMAT = "fedloom-run/2"  # what a run folder's files hold, for who reads it later
CONFIG, SUMMARY, HISTORY, PARTITION = (
    "config.json",
    "summary.json",
    "history.jsonl",
    "partition.json",
)


class LeftOut(NamedTuple):
    """A folder that cannot be used, and why."""

    folder: str
    reason: str


@dataclass(frozen=True)
class Run:
    """A completed run in a folder. The larger files are read when first asked for."""

    folder: Path
    summary: dict[str, Any]

    @cached_property
    def curve(self) -> list[dict[str, Any]]:
        """The history without its clients: an entry for each round, and for each evaluation outside of the rounds."""
        return [
            {key: value for key, value in entry.items() if key not in ("clients", "participants")}
            for entry in entries(self.folder)
        ]

    @cached_property
    def partition(self) -> dict[str, Any] | None:
        """Who holds what; None if nobody was to know."""
        path = self.folder / PARTITION
        return _read_object(path) if path.exists() else None

    @property
    def config(self) -> dict[str, Any]:
        """What the run was begun with, a recipe with every default filled in."""
        return self.summary["config"]

    @property
    def knows_cross_edges(self) -> bool:
        """Whether clients knew the edges to others that the division has cut: some methods work on them, others never see them."""
        return any(
            self.config.get(table, {}).get("cross_edges") == "known"
            for table in ("partition", "data")
        )


def gather(paths: Iterable[Path]) -> tuple[list[Run], list[LeftOut]]:
    """The completed runs in these folders or below them, and what else is there with the reason why it is left out."""
    runs, left_out = [], []
    for path in paths:
        found = find(path)
        if not found:
            left_out.append(LeftOut(str(path), "there is no run folder"))
        for folder in found:
            try:
                runs.append(open_run(folder))
            except DataError as error:
                left_out.append(LeftOut(str(folder), str(error)))
    return runs, left_out


def find(path: Path) -> list[Path]:
    """Run folders at or below a path, by name."""
    if is_run(path):
        return [path]
    inner = sorted(child for child in path.iterdir() if child.is_dir()) if path.is_dir() else []
    return [folder for child in inner for folder in find(child)]


def is_run(path: Path) -> bool:
    """Whether a run was begun in a folder."""
    return (path / CONFIG).exists() or (path / SUMMARY).exists()


def open_run(folder: Path) -> Run:
    """The run in a folder, checked. DataError, with the reason alone, if it is not completed, damaged, or of another version."""
    try:
        summary = read_summary(folder)
        if summary is None:
            done = max((entry["round"] for entry in entries(folder)), default=0)
            raise DataError(f"unfinished: under way or killed, last round {done}")
        if summary["status"] != "completed":
            raise DataError(
                f"unfinished: {summary['status']}"
                + (f" ({summary['cause']})" if summary.get("cause") else "")
            )
        if summary.get("format") != FORMAT:
            said = summary.get("format", "no format, so from before there were any")
            raise DataError(
                f"from another version: its summary says {said}, this one reads {FORMAT}"
            )
        run = Run(folder, summary)
        missing = {
            "method",
            "dataset",
            "clients",
            "seed",
            "per_client",
            "traffic",
            "seconds",
            "rounds",
            "accuracy",
        } - summary.keys()
        if missing:
            raise DataError(f"damaged: summary.json has no {', '.join(sorted(missing))}")
        last = max((entry["round"] for entry in run.curve), default=0)
        if last != summary["rounds"]:
            raise DataError(
                f"damaged: history.jsonl ends with round {last}, summary.json with {summary['rounds']}"
            )
        _ = run.partition
    except DataError as error:
        raise DataError(str(error).removeprefix(f"run: {str(folder)!r} is ")) from error
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(f"damaged: {type(error).__name__}: {error}") from error
    return run


def read_config(folder: Path) -> dict[str, Any]:
    """What the run in a folder was begun with. DataError if none was, or the file is damaged."""
    try:
        return _read_object(folder / CONFIG)
    except OSError as error:
        raise DataError(
            f"run: {str(folder)!r} is not a run folder ({CONFIG}: {error.strerror})"
        ) from error
    except ValueError as error:
        raise DataError(f"run: {str(folder)!r} is damaged ({CONFIG}: {error})") from error


def read_summary(folder: Path) -> dict[str, Any] | None:
    """What a folder's summary.json says; None if there is none, because the run was killed or is still under way."""
    try:
        summary = _read_object(folder / SUMMARY)
        if not {"status", "config"} <= summary.keys():
            raise ValueError("it is not a run's")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"run: {str(folder)!r} is damaged ({SUMMARY}: {error})") from error
    return summary


def is_completed(folder: Path) -> bool:
    """Whether the run in a folder went to its end. DataError if its summary is damaged."""
    return (read_summary(folder) or {}).get("status") == "completed"


def read_history(folder: Path) -> list[dict[str, Any]]:
    """The entries in a run folder."""
    return list(entries(folder))


def entries(folder: Path) -> Iterator[dict[str, Any]]:
    """The entries one by one: those of a thousand clients take memory. A line without an end was being written when the run was killed."""
    if not (folder / HISTORY).exists():
        return
    with open(folder / HISTORY) as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


def _read_object(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text())
    if not isinstance(content, dict):
        raise ValueError("it is not a run's")
    return content
