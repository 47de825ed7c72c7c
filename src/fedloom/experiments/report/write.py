"""Writes the report: one HTML page, made from run folders, that opens without a network."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedloom._system import installed_version
from fedloom.errors import DataError, unknown
from fedloom.experiments.report.artifacts import pictures
from fedloom.experiments.report.audit_figures import audit_figures
from fedloom.experiments.report.comparison import Comparison, selection_of
from fedloom.experiments.report.figures import figures
from fedloom.experiments.report.headline import headline
from fedloom.experiments.report.html import write_page
from fedloom.experiments.report.labels import label
from fedloom.experiments.report.spec import Figure, flat, slug
from fedloom.experiments.run_folder import LeftOut, Run

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
    shown = [*figures(c), *audit_figures(c), *pictures_of(c)]
    runs = [run for e in c.entries.values() for run in e.runs]
    title = c.tasks[0] if len(c.tasks) == 1 else f"{len(c.rows)} methods on {len(c.tasks)} tasks"
    return {
        "title": title,
        "headline": headline(c)._asdict(),
        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "version": installed_version(),
        **_versions(runs),
        "command": command,
        "figures": shown,
        "left_out": [each._asdict() for each in c.left_out],
        "warnings": _warnings(c),
        "facts": _facts(c, runs),
    }


def _facts(c: Comparison, runs: Sequence[Run]) -> list[list[str]]:
    """Returns what all methods have in common: models, rounds, seeds, and how rounds are chosen."""
    models = dict.fromkeys(str(run.summary["model"]) for run in runs if run.summary.get("model"))
    rounds = sorted({run.summary["rounds"] for run in runs})
    chosen = dict.fromkeys(selection_of(run.summary) for run in runs)
    facts = {
        "tasks": str(len(c.tasks)) if len(c.tasks) > 1 else "",
        "methods": str(len(c.rows)),
        "models": ", ".join(models),
        "rounds": f"{rounds[0]} to {rounds[-1]}" if len(rounds) > 1 else str(rounds[0]),
        "seeds": str(max(len(e.runs) for e in c.entries.values())),
        "runs": str(len(runs)),
        "best round by": f"validation {', '.join(map(label, chosen))}",
    }
    return [[name, value] for name, value in facts.items() if value]


def _versions(runs: Sequence[Run]) -> dict[str, Any]:
    """Returns the packages that made the runs, with their versions, and whether runs differ.

    A package with several versions says how many runs each of them made.
    """
    found: dict[str, Counter[str]] = {}
    for run in runs:
        for name, number in run.summary.get("versions", {}).items():
            found.setdefault(name, Counter())[str(number)] += 1

    def text(numbers: Counter[str]) -> str:
        if len(numbers) == 1:
            return next(iter(numbers))
        return ", ".join(f"{number} ({n} run{'s' * (n > 1)})" for number, n in numbers.items())

    first = ("fedloom", "python", "torch")
    names = sorted(found, key=lambda name: (name not in first, name))
    return {
        "versions": [[name, text(found[name])] for name in names],
        "versions_differ": any(len(numbers) > 1 for numbers in found.values()),
    }


def _warnings(c: Comparison) -> list[str]:
    """Returns the warnings of the runs. One of several seeds is listed once."""
    found: Counter[str] = Counter()
    for (task, row), e in c.entries.items():
        source = row if len(c.tasks) == 1 else f"{row} on {task}"
        for run in e.runs:
            found.update(f"{source}: {line}" for line in run.summary.get("warnings") or ())
    return [line if count == 1 else f"{line} ({count} seeds)" for line, count in found.items()]


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
    shown = flat([*figures(c), *pictures_of(c)])
    drawn = [figure for figure in shown if figure["kind"] not in ("table", "note")]
    return [
        draw(figure, folder / f"{figure['id']}.{suffix}") for figure in drawn for suffix in formats
    ]
