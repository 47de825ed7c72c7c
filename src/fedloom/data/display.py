"""Display: how objects show themselves in a terminal and in a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def counted(count: int, word: str) -> str:
    """Returns a number with its word: (2708, "node") gives "2,708 nodes"."""
    plural = f"{word}es" if word.endswith("s") else f"{word}s"
    return f"{count:,} {word if count == 1 else plural}"


def html_table(
    caption: str, headings: Sequence[str], rows: Iterable[Sequence[object]], note: str = ""
) -> str:
    """Returns a small HTML table. All texts are escaped, and nothing outside is loaded.

    Args:
        caption: The line above the table.
        headings: The names of the columns.
        rows: The cells of each row. Numbers are aligned to the right.
        note: The line below the table.
    """
    head = "".join(f"<th>{escape(text)}</th>" for text in headings)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    below = f"<div>{escape(note)}</div>" if note else ""
    return (
        f"<div><b>{escape(caption)}</b></div>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{below}"
    )


def _cell(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        value = f"{value:,}"
    text = "" if value is None else str(value)
    aligned = "right" if text[:1] in "+-0123456789" and text else "left"
    return f'<td style="text-align:{aligned}">{escape(text)}</td>'


# ---- objects of a wrong kind, in errors ----
def shown(value: object) -> str:
    """Returns a value as an error names it: its kind, and its text if that is short."""
    kind = type(value)
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, (str, int, float, bool)) or value is None:
        return repr(value) if len(repr(value)) <= 60 else f"a long {kind.__name__}"
    package = kind.__module__.partition(".")[0]
    known = {"torch_geometric": "PyG", "networkx": "networkx", "pandas": "pandas", "torch": "torch"}
    of = f"{known[package]} " if package in known else ""
    return f"a {of}{kind.__name__}"


def how_to_convert(value: object) -> str:
    """Returns what to do with a graph of another library, as the end of an error; "" if unknown."""
    package = type(value).__module__.partition(".")[0]
    if package == "networkx":
        return ": fedloom.from_networkx(graph)"
    if package == "torch_geometric" and hasattr(value, "edge_index"):
        return ": fedloom.from_pyg(data)"
    if isinstance(value, str):
        return f": fedloom.load({value!r}), or fedloom.from_folder(path)"
    return ""
