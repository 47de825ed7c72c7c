"""The `report` command. It only reads run folders and does not import torch."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from fedloom.errors import FedloomError
from fedloom.experiments.report.artifacts import EMBEDDINGS
from fedloom.experiments.report.comparison import Comparison, compare
from fedloom.experiments.report.console import err
from fedloom.experiments.report.write import write_figures, write_report
from fedloom.experiments.run_folder import gather


def report(
    folders: Sequence[Path],
    page: Path,
    metric: str,
    figures: Path | None,
    formats: str,
    embeddings: bool,
) -> None:
    """Writes the report of all runs in or below the folders.

    Args:
        folders: Run folders, or folders that contain some.
        page: The HTML file to write.
        metric: The score to compare; see `comparison.METRICS`.
        figures: A folder to which each figure is also written as a file. None writes none.
        formats: The formats of these files, separated by commas: png, svg, pdf.
        embeddings: Whether to compute embeddings of each method's first seed. Folders that already
            have embeddings keep theirs.
    """
    command = shlex.join(["fedloom", *sys.argv[1:]])
    found = make_report(folders, page, metric, embeddings, command)
    for each in found.left_out:
        err.print(f"left out: {each.folder}: {each.reason}", style="yellow", highlight=False)
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
) -> Comparison:
    """Writes the page of all runs in or below folders. Returns what it compares.

    Args:
        folders, page, metric, embeddings: As in `report`.
        command: The command that makes the page. The page prints it.
    """
    runs, left_out = gather(folders)
    found = compare(runs, left_out, metric)
    if embeddings:
        _embed(found)
    write_report(found, page, command)
    return found


def _embed(found: Comparison) -> None:
    """Writes embeddings to the folder of each row's first run. Prints why a run has none."""
    from fedloom.experiments.embeddings import embed  # imports torch

    for entry in found.entries.values():
        folder = entry.runs[0].folder
        if (folder / EMBEDDINGS).exists():
            continue
        err.print(f"embeddings of {folder}", style="dim", highlight=False)
        try:
            embed(folder)
        except FedloomError as error:
            err.print(f"no embeddings: {error}", style="yellow", highlight=False)
