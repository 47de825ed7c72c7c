"""Listing: prints names with their descriptions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from fedloom.experiments.report import tables
from fedloom.experiments.report.console import out


def print_listing(
    rows: Mapping[str, str], as_json: bool, more: Callable[[str], dict[str, Any]] | None = None
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
    else:
        out.print(tables.listing(rows))
