"""Writes the report: one HTML page, made from run folders, that opens without a network."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedloom._system import installed_version
from fedloom.errors import DataError, unknown
from fedloom.experiments.report.artifacts import pictures
from fedloom.experiments.report.comparison import Comparison
from fedloom.experiments.report.figures import Figure, figures, slug
from fedloom.experiments.report.html import write_page
from fedloom.experiments.run_folder import LeftOut

FORMATS = ("png", "svg", "pdf")


def pictures_of(c: Comparison) -> list[Figure]:
    """Returns the pictures that methods wrote to their folders, for each row's first seed.

    Adds folders with damaged pictures to `c.left_out`.
    """
    found: list[Figure] = []
    for (task, row), entry in c.entries.items():
        folder = entry.runs[0].folder
        try:
            made = pictures(folder, f"{slug(row, task)}-")
        except DataError as error:
            c.left_out.append(LeftOut(str(folder), str(error)))
            continue
        source = row if len(c.tasks) == 1 else f"{row} on {task}"
        found += [
            {**figure, "title": f"{source}: {figure['title'][0].lower()}{figure['title'][1:]}"}
            for figure in made
        ]
    return found


def make_page(c: Comparison, command: str = "") -> dict[str, Any]:
    """Returns the content of the page as plain data.

    Args:
        c: The comparison to show.
        command: The command that makes the page. The page prints it.
    """
    shown = [*figures(c), *pictures_of(c)]
    runs = [run for e in c.entries.values() for run in e.runs]
    versions = sorted(
        {
            f"{name} {number}"
            for run in runs
            for name, number in run.summary.get("versions", {}).items()
        }
    )
    facts = [
        ["tasks", str(len(c.tasks))],
        ["methods", str(len(c.rows))],
        ["runs", str(len(runs))],
        ["made with", ", ".join(versions)],
    ]
    title = c.tasks[0] if len(c.tasks) == 1 else f"{len(c.rows)} methods on {len(c.tasks)} tasks"
    return {
        "title": title,
        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "version": installed_version(),
        "command": command,
        "figures": shown,
        "left_out": [each._asdict() for each in c.left_out],
        "facts": facts,
    }


def write_report(c: Comparison, path: Path, command: str = "") -> Path:
    """Writes the page to a file. Returns the file's path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_page(make_page(c, command), path)
    return path


def write_figures(c: Comparison, folder: Path, formats: Sequence[str]) -> list[Path]:
    """Draws every figure in each of the formats. Needs the extra `plot`. Returns the files."""
    from fedloom.experiments.report.draw import draw  # imports matplotlib, which is slow

    for suffix in formats:
        if suffix not in FORMATS:
            raise unknown("format of figures:", suffix, FORMATS)
    folder.mkdir(parents=True, exist_ok=True)
    drawn = [figure for figure in (*figures(c), *pictures_of(c)) if figure["kind"] != "table"]
    return [
        draw(figure, folder / f"{figure['id']}.{suffix}") for figure in drawn for suffix in formats
    ]
