"""Pages of the docs site that are made, not written: the README as its first page, and the public names from their docstrings."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

import fedloom

ROOT = Path(__file__).resolve().parents[1]
TITLES = {
    "data": "Graphs and federations",
    "graph": "Graphs and federations",
    "errors": "Errors",
    "method": "Methods",
    "runs": "Runs",
}


def on_files(files: Files, config: Any) -> Files:
    """Adds both pages to those that MkDocs has found."""
    for name, text in {
        "index.md": first_page((ROOT / "README.md").read_text()),
        "api.md": names(),
    }.items():
        files.append(File.generated(config, name, content=text))
    return files


def first_page(readme: str) -> str:
    """The README, with links as they are from within docs/."""
    return re.sub(r"\]\(docs/", "](", readme)


def names() -> str:
    """All of `fedloom.__all__`, sorted by what it is about."""
    parts: dict[str, list[str]] = {}
    for home, found in fedloom._HOMES.items():
        parts.setdefault(TITLES[home.split(".")[0]], []).extend(
            f"fedloom.{home}.{name}" for name in found
        )
    lines = [
        "# Public names",
        "",
        "What `import fedloom` gives. Everything else may change without notice.",
    ]
    for title, found in parts.items():
        lines += ["", f"## {title}", ""]
        for name in found:
            lines += [f"::: {name}", ""]
    return "\n".join(lines)
