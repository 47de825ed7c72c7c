"""What the commands do that only read run folders. They do not wait for torch."""

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
    """Writes the page of all runs in or below the folders, and each figure as a file if a folder for them is given.

    embeddings: computes those of each method's first seed, unless a folder has them already.
    """
    runs, left_out = gather(folders)
    found = compare(runs, left_out, metric)
    if embeddings:
        _embed(found)
    written = write_report(found, page, command=shlex.join(["fedloom", *sys.argv[1:]]))
    for each in found.left_out:
        err.print(f"left out: {each.folder}: {each.reason}", style="yellow", highlight=False)
    err.print(f"wrote {written}", style="dim", highlight=False)
    if figures:
        drawn = write_figures(found, figures, formats.replace(" ", "").split(","))
        err.print(f"wrote {len(drawn)} figures to {figures}", style="dim", highlight=False)


def _embed(found: Comparison) -> None:
    """Leaves embeddings in the folder of each row's first run that can have them; says which cannot."""
    from fedloom.experiments.embeddings import embed  # this does wait for torch

    for entry in found.entries.values():
        folder = entry.runs[0].folder
        if (folder / EMBEDDINGS).exists():
            continue
        err.print(f"embeddings of {folder}", style="dim", highlight=False)
        try:
            embed(folder)
        except FedloomError as error:
            err.print(f"no embeddings: {error}", style="yellow", highlight=False)
