"""What the commands do that only read run folders. They do not wait for torch."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from fedloom.comparison import compare
from fedloom.folder import gather
from fedloom.report import write_figures, write_report
from fedloom.terminal import err


def report(folders: Sequence[Path], page: Path, metric: str, figures: Path | None, formats: str) -> None:
    """Writes the page of all runs in or below the folders, and each figure as a file if a folder for them is given."""
    runs, left_out = gather(folders)
    found = compare(runs, left_out, metric)
    for each in found.left_out:
        err.print(f"left out: {each.folder}: {each.reason}", style="yellow", highlight=False)
    written = write_report(found, page, command=shlex.join(["fedloom", *sys.argv[1:]]))
    err.print(f"wrote {written}", style="dim", highlight=False)
    if figures:
        drawn = write_figures(found, figures, formats.replace(" ", "").split(","))
        err.print(f"wrote {len(drawn)} figures to {figures}", style="dim", highlight=False)
