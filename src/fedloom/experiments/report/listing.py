"""Listing: names with their descriptions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from rich.table import Table

from fedloom.experiments.report.console import out


def print_listing(
    rows: Mapping[str, str],
    as_json: bool = False,
    more: Callable[[str], dict[str, Any]] | None = None,
) -> None:
    """Prints a list.

    Args:
        rows: {name: description}.
        as_json: Print JSON.
        more: Returns further values of a name, for JSON.
    """
    if as_json:
        listed = [
            {"name": name, "description": text, **(more(name) if more else {})}
            for name, text in rows.items()
        ]
        print(json.dumps(listed))
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", overflow="fold", min_width=min(max(map(len, rows)), 40))
    table.add_column()
    for name, text in rows.items():
        table.add_row(name, text)
    out.print(table)
