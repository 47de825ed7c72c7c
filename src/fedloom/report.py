"""The report: one page for people who would rather look than read, made of run folders only, that needs no network to open."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedloom.comparison import Comparison
from fedloom.errors import unknown
from fedloom.figures import Figure, figures
from fedloom.report_page import write_page

FORMATS = ("png", "svg", "pdf")


def make_page(c: Comparison, pictures: Sequence[Figure] = (), command: str = "") -> dict[str, Any]:
    """What the page shows, as plain data. pictures: further figures. command: what makes the page again."""
    runs = [run for e in c.entries.values() for run in e.runs]
    versions = sorted({f"{name} {number}" for run in runs for name, number in run.summary.get("versions", {}).items()})
    facts = [["tasks", str(len(c.tasks))], ["methods", str(len(c.rows))], ["runs", str(len(runs))], ["made with", ", ".join(versions)]]
    title = c.tasks[0] if len(c.tasks) == 1 else f"{len(c.rows)} methods on {len(c.tasks)} tasks"
    return {
        "title": title, "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "version": version("fedloom"),
        "command": command, "figures": [*figures(c), *pictures], "left_out": [each._asdict() for each in c.left_out], "facts": facts,
    }  # fmt: skip


def write_report(c: Comparison, path: Path, pictures: Sequence[Figure] = (), command: str = "") -> Path:
    """Writes the page; gives its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_page(make_page(c, pictures, command), path)
    return path


def write_figures(c: Comparison, folder: Path, formats: Sequence[str], pictures: Sequence[Figure] = ()) -> list[Path]:
    """Draws every figure in each of the formats; gives the files' paths. Needs the extra `plot`."""
    from fedloom.draw import draw  # matplotlib takes a while

    for suffix in formats:
        if suffix not in FORMATS:
            raise unknown("format of figures:", suffix, FORMATS)
    folder.mkdir(parents=True, exist_ok=True)
    drawn = [figure for figure in (*figures(c), *pictures) if figure["kind"] != "table"]
    return [draw(figure, folder / f"{figure['id']}.{suffix}") for figure in drawn for suffix in formats]
