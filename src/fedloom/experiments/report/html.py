"""The report's page: one HTML file that carries its data, its style and its scripts, and needs nothing else to be opened."""

from __future__ import annotations

import html
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from fedloom._system import write_atomic

SHARED_SCRIPTS = ("base.js", "table.js", "charts.js")


def write_page(page: dict[str, Any], path: Path) -> None:
    """Writes a page (title, made, version, command, figures, left_out, facts: see `fedloom.figures`) to one HTML file."""
    # A page can hold any text: inside a script element nothing but "<" could end it.
    data = json.dumps(page, separators=(",", ":"), ensure_ascii=False, allow_nan=False).replace(
        "<", "\\u003c"
    )
    parts = {
        "title": html.escape(str(page["title"])), "style": read_parts("base.css", "report.css"),
        "script": read_parts(*SHARED_SCRIPTS, "report.js"), "data": data,
    }  # fmt: skip
    # Names of folders can hold bytes that are no text: they are shown as escapes.
    write_atomic(
        path, fill_template("report.html", parts).encode(errors="backslashreplace"), "page"
    )


def read_parts(*names: str) -> str:
    """The files of the package's folder `page`, one after the other."""
    folder = files("fedloom.experiments.report") / "page"
    return "\n".join((folder / name).read_text("utf-8") for name in names)


def fill_template(name: str, parts: dict[str, str]) -> str:
    """A template with each {{name}} replaced. What is put in is not looked at again: it may hold braces of its own."""
    pieces = read_parts(name).split("{{")
    filled = [pieces[0]]
    for piece in pieces[1:]:
        key, _, rest = piece.partition("}}")
        filled += (parts[key], rest)
    return "".join(filled)
