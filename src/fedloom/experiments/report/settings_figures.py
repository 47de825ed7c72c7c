"""The settings of every method, and what differs between the runs of a report."""

from __future__ import annotations

import json
from typing import Any

from fedloom.experiments.report.comparison import Comparison
from fedloom.experiments.report.spec import Figure, columns, make_figure
from fedloom.experiments.run_folder import Run

_ABSENT = "–"  # the method does not have the setting
_MOST = 4  # different values of a setting that one cell shows
_TABLES = ("method", "model", "run", "partition", "data")
# Settings whose differences are no news: the table has a column for each method, over its seeds.
_EXPECTED = {"method.name", "run.seed", "partition.seed", "data.seed", "data.split_seed"}


def settings_figures(c: Comparison) -> list[Figure]:
    """Returns a table of the settings that differ between methods, and one of all settings."""
    known = {row: _values(c, row) for row in c.rows}
    keys = list(dict.fromkeys(key for values in known.values() for key in values))
    keys.sort(key=lambda key: _TABLES.index(key.split(".")[0]))
    shown = {key: [_joined(values.get(key)) for values in known.values()] for key in keys}
    differing = {
        key: cells
        for key, cells in shown.items()
        if key not in _EXPECTED
        and (len(set(cells)) > 1 or any(len(values.get(key, ())) > 1 for values in known.values()))
    }
    head = columns(["setting", *c.rows], ["setting", *c.rows])
    if differing:
        caption = (
            f"{_ABSENT}: the method does not have the setting. Commas separate values that differ "
            "between the runs of a method."
        )
        first = make_figure(
            c,
            "settings",
            "table",
            "differences",
            "",
            "What differs between the methods",
            caption,
            columns=head,
            rows=[[key, *cells] for key, cells in differing.items()],
        )
    else:
        reason = "All methods have the same settings; only the method differs."
        first = make_figure(
            c, "settings", "note", "differences", "", "What differs between the methods", reason
        )
    every = make_figure(
        c,
        "settings",
        "table",
        "settings",
        "",
        "All settings",
        "Every setting, defaults included, as config.json of the run folders has it.",
        columns=head,
        rows=[[key, *cells] for key, cells in shown.items()],
        closed=True,
    )
    return [first, every]


def _values(c: Comparison, row: str) -> dict[str, list[str]]:
    """Returns {setting: the values that the runs of a row have, each once}."""
    found: dict[str, dict[str, None]] = {}
    for task in c.tasks:
        if (task, row) not in c.entries:
            continue
        for run in c.entries[task, row].runs:
            for key, value in _flat(run).items():
                found.setdefault(key, {})[value] = None
    return {key: list(values) for key, values in found.items()}


def _joined(values: list[str] | None) -> str:
    if values is None:
        return _ABSENT
    more = f", and {len(values) - _MOST} more" if len(values) > _MOST else ""
    return ", ".join(values[:_MOST]) + more


def _flat(run: Run) -> dict[str, str]:
    """Returns the settings of a run's config as {"table.key": text}."""
    return {
        f"{table}.{key}": _text(value)
        for table in _TABLES
        if isinstance(content := run.config.get(table), dict)
        for key, value in content.items()
    }


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "none"
    if isinstance(value, str):
        return value or "none"
    return json.dumps(value)
