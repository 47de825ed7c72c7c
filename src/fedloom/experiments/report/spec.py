"""Makes the descriptions of figures: plain dicts that `draw` and `page/charts.js` draw."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fedloom.experiments.report.comparison import Comparison

Figure = dict[str, Any]


def make_figure(
    c: Comparison,
    section: str,
    kind: str,
    name: str,
    task: str,
    title: str,
    caption: str,
    **content: Any,
) -> Figure:
    """Returns a figure.

    Args:
        c: The comparison. If it has several tasks, the title names the task.
        section: The tab of the report: results, classes, clients, cost, privacy, settings, data or
            runs.
        kind: lines, points, bars, heat, table, note or group. A note is only text. A group has
            `figures` below one title and one caption.
        name: The first part of the figure's id.
        task: The task that it shows; "" for all.
        title: Its title.
        caption: What it shows.
        content: The fields of its kind.
    """
    several = task and len(c.tasks) > 1
    return {
        "id": slug(name, task),
        "title": f"{title}: {task}" if several else title,
        "short_title": title,  # inside of a group, whose title names the task
        "caption": caption,
        "section": section,
        "kind": kind,
        **content,
    }


def flat(figures: Iterable[Figure]) -> Iterator[Figure]:
    """Yields figures, and those inside of groups instead of the groups."""
    for figure in figures:
        if figure["kind"] == "group":
            yield from flat(figure["figures"])
        else:
            yield figure


def slug(*words: str) -> str:
    """Returns words as the id of a figure. It is also the name of the figure's file."""
    return re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")


def axis(label: str, unit: str = "", log: bool = False) -> dict[str, Any]:
    """Returns an axis with its label, the unit of its values, and whether it is logarithmic."""
    return {"label": label, "unit": unit, "log": log}


def series(c: Comparison, row: str, **content: Any) -> dict[str, Any]:
    """Returns the values of a row. A row has the same colour in all figures."""
    return {"name": row, "color": c.rows.index(row), **content}


def short(value: float | None) -> float | None:
    """Rounds a value to 5 digits: more cannot be seen, and a page of 1,000 clients stays small."""
    return None if value is None else float(f"{value:.5g}")


def columns(
    names: Sequence[str], left: Iterable[str], help_: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """Returns the columns of a table.

    Args:
        names: Their names.
        left: The names of those with text. The others have numbers and are aligned to the right.
        help_: Explanations of some columns, by name.
    """
    known, help_ = set(left), help_ or {}
    return [
        {
            "name": name,
            "align": "left" if name in known else "right",
            **({"help": help_[name]} if name in help_ else {}),
        }
        for name in names
    ]


def number(value: float | None, text: str) -> dict[str, Any]:
    """Returns a cell of a table that is sorted by its value. An unknown value is a dash."""
    return {"text": text if value is not None else "-", "sort": value, "mark": ""}


def percent(value: float | None) -> dict[str, Any]:
    """Returns a cell with a share in percent: 0.8123 is shown as 81.2."""
    return number(short(value), f"{100 * (value or 0):.1f}")
