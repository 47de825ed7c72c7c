"""The `report` command. It only reads run folders and does not import torch."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fedloom._system import plain_text
from fedloom.errors import FedloomError
from fedloom.experiments.embedding_time import estimated_seconds
from fedloom.experiments.report.artifacts import EMBEDDINGS
from fedloom.experiments.report.comparison import Comparison, compare
from fedloom.experiments.report.console import err
from fedloom.experiments.report.write import write_figures, write_report
from fedloom.experiments.run_folder import CAUSE_LENGTH, gather


def report(
    folders: Sequence[Path],
    page: Path,
    metric: str,
    figures: Path | None,
    formats: str,
    embeddings: bool,
    trust: bool = False,
) -> None:
    """Writes the report of all runs in or below the folders.

    Args:
        folders: Run folders, or folders that contain some.
        page: The HTML file to write.
        metric: The score to compare; see `comparison.METRICS`. "" takes the one that chose the best
            rounds.
        figures: A folder to which each figure is also written as a file. None writes none.
        formats: The formats of these files, separated by commas: png, svg, pdf.
        embeddings: Whether to compute embeddings of each method's first seed. Folders that already
            have embeddings keep theirs. The expected time is printed first.
        trust: Execute the Python files that the folders name, which embeddings may need.
    """
    command = shlex.join(["fedloom", *sys.argv[1:]])
    found = make_report(folders, page, metric, embeddings, command, trust)
    for each in found.left_out:
        line = plain_text(f"left out: {each.folder}: {each.reason}", CAUSE_LENGTH)
        err.print(line, style="yellow", highlight=False)
    err.print(f"wrote {page}", style="dim", highlight=False)
    if figures:
        drawn = write_figures(found, figures, formats.replace(" ", "").split(","))
        err.print(f"wrote {len(drawn)} figures to {figures}", style="dim", highlight=False)


def make_report(
    folders: Sequence[Path],
    page: Path,
    metric: str = "accuracy",
    embeddings: bool = False,
    command: str = "",
    trust: bool = False,
) -> Comparison:
    """Writes the page of all runs in or below folders. Returns what it compares.

    Args:
        folders, page, metric, embeddings, trust: As in `report`.
        command: The command that makes the page. The page prints it.
    """
    runs, left_out = gather(folders)
    found = compare(runs, left_out, metric)
    if embeddings:
        _embed(found, trust)
    write_report(found, page, command)
    return found


def _embed(found: Comparison, trust: bool) -> None:
    """Writes embeddings to the folder of each row's first run. Prints why a run has none.

    It prints an estimate of the time first, and after each run what is left of it.
    """
    from fedloom.experiments.embeddings import embed, reduced  # imports torch

    runs = [entry.runs[0] for entry in found.entries.values()]
    runs = [run for run in runs if not (run.folder / EMBEDDINGS).exists()]
    if not runs:
        return
    expected = [estimated_seconds(run.summary, reduced) for run in runs]
    count = f"{len(runs)} run{'s' * (len(runs) > 1)}"
    _say(f"embeddings of {count}: about {_duration(sum(expected))}")
    begin = time.monotonic()
    for done, run in enumerate(runs, start=1):
        try:
            embed(run.folder, trust=trust)
        except FedloomError as error:
            err.print(f"no embeddings: {error}", style="yellow", highlight=False)
        passed = time.monotonic() - begin
        # The pace so far corrects the estimate.
        left = sum(expected[done:]) * passed / max(sum(expected[:done]), 1e-9)
        _say(f"{done} of {len(runs)}: {run.folder}; about {_duration(left)} left")


def _say(line: str) -> None:
    err.print(line, style="dim", highlight=False)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
