"""Escaping: texts that others chose, as cells of CSV, LaTeX and Markdown tables.

The names of datasets, methods, clients and classes come from files that another person may have
written. A spreadsheet executes a cell that begins like a formula, LaTeX executes commands, and
Markdown is rendered as HTML.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

from fedloom._system import plain_text

_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")
_LENGTH = 10_000  # characters of a cell
_LATEX = {char: f"\\{char}" for char in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
}
_MARKDOWN = {char: f"\\{char}" for char in "\\|`*[]"} | {"<": "&lt;", ">": "&gt;", "&": "&amp;"}


def csv_text(rows: Iterable[Sequence[Any]], end: str = "\r\n") -> str:
    """Returns rows as CSV that a spreadsheet does not execute.

    Args:
        rows: Rows of texts and numbers.
        end: What ends a row.
    """
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator=end).writerows([csv_cell(cell) for cell in row] for row in rows)
    return text.getvalue()


def csv_cell(cell: Any) -> Any:
    """Returns a cell of a CSV table: a text that begins like a formula gets a "'" in front.

    Numbers stay as they are, also as texts: "-0.5".
    """
    if not isinstance(cell, str) or not cell.lstrip(" ").startswith(_FORMULA):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell


def latex_text(text: str) -> str:
    """Returns a text as LaTeX that prints it, in one line."""
    return "".join(_LATEX.get(char, char) for char in plain_text(text, _LENGTH))


def markdown_text(text: str) -> str:
    """Returns a text as Markdown that prints it in a cell of a table."""
    return "".join(_MARKDOWN.get(char, char) for char in plain_text(text, _LENGTH))
