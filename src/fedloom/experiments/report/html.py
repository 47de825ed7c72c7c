"""Fills the templates of HTML pages. A page contains its data, its style and its scripts."""

from __future__ import annotations

import html
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from fedloom._system import write_atomic

SHARED_SCRIPTS = ("base.js", "table.js", "charts.js")


def write_page(page: dict[str, Any], path: Path) -> None:
    """Writes a report to one HTML file.

    Args:
        page: Its title, headline, figures, facts, warnings, versions and the like.
            `write.make_page` makes it; `figures` describes the figures.
        path: The file.
    """
    # The data may contain any text. Only "<" could end the script element around it.
    data = json.dumps(page, separators=(",", ":"), ensure_ascii=False, allow_nan=False).replace(
        "<", "\\u003c"
    )
    parts = {
        "title": html.escape(str(page["title"])),
        "style": read_parts("base.css", "report.css"),
        "script": read_parts(*SHARED_SCRIPTS, "report.js"),
        "data": data,
    }
    # Names of folders may contain bytes that are not valid text. The page shows them escaped.
    content = fill_template("report.html", parts).encode(errors="backslashreplace")
    write_atomic(path, content, "page", shared=True)


def read_parts(*names: str) -> str:
    """Returns files of this package's folder `page`, concatenated."""
    folder = files("fedloom.experiments.report") / "page"
    return "\n".join((folder / name).read_text("utf-8") for name in names)


def fill_template(name: str, parts: dict[str, str]) -> str:
    """Returns a template with each {{name}} replaced. Parts may contain braces themselves."""
    pieces = read_parts(name).split("{{")
    filled = [pieces[0]]
    for piece in pieces[1:]:
        key, _, rest = piece.partition("}}")
        filled += (parts[key], rest)
    return "".join(filled)
