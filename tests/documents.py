"""Reads the README and docs/: their pages, code blocks and commands."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    "README.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
]
# Pages that record past runs, with the commands and versions of their time.
RECORDS = [
    page
    for page in PAGES
    if page in ("docs/results.md", "docs/benchmarks.md") or page.startswith("docs/decisions/")
]
EXAMPLES = [page for page in PAGES if page not in RECORDS]


class Block(NamedTuple):
    """A code block: the text after the opening fence (empty for indented blocks), and its lines."""

    info: str
    text: str


def blocks(text: str) -> Iterator[Block]:
    """Yields all code blocks of a page, fenced and indented, in order."""
    info, lines, before = None, [], ""
    indented: list[str] = []
    for line in [*text.splitlines(), ""]:
        if info is not None:
            if line.strip() == "```":
                yield Block(info, "".join(f"{each}\n" for each in lines))
                info = None
            else:
                lines.append(line)
            continue
        if line.startswith("    ") and (indented or not before.strip()):
            indented.append(line[4:])
        elif indented and line.strip():
            yield Block("", "".join(f"{each}\n" for each in indented))
            indented = []
        if line.startswith("```"):
            info, lines = line[3:].strip(), []
        before = line
    assert info is None, "a block is not closed"
    if indented:
        yield Block("", "".join(f"{each}\n" for each in indented))


def prose(text: str) -> str:
    """Returns a page without its code blocks."""
    without = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    return re.sub(r"(?<=\n\n)( {4}.*\n)+", "", without)


def typed(block: Block) -> list[str]:
    """Returns the commands of a block, without prompts and comments."""
    if block.info not in ("", "bash", "console"):
        return []
    lines = [line.removeprefix("$ ") for line in block.text.splitlines()]
    return [
        re.sub(r"\s+# .*", "", line).strip()
        for line in lines
        if re.match(r"(fedloom|make|pip) ", line)
    ]
