"""Trust: which files of others may name Python code that fedloom executes.

A recipe, an agreement, a run folder and a model's file can name a method or a model by a Python
file. Importing that file executes it with all rights of the user. Code that the user names, on the
command line or as an argument, is the user's choice. Code that such a file names is executed only
if the user trusts the file: `--trust`, or `trust=True` in Python.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from fedloom._system import plain_text
from fedloom.errors import ConfigError

_TABLES = ("method", "model", "compare")  # the tables in which a name may be that of a file
_CODE = re.compile(r"\.py(?![\w.])")


def code_in(tables: Mapping[str, Any]) -> list[str]:
    """Returns the texts that name Python files in the tables of a recipe, agreement or config."""
    found = (text for name in _TABLES for text in _texts(tables.get(name)))
    return list(dict.fromkeys(text for text in found if _CODE.search(text)))


def require_trust(
    tables: Mapping[str, Any], where: str, trust: bool, own: Mapping[str, Any] | None = None
) -> None:
    """Raises a ConfigError if a file names Python code and the user does not trust it.

    Call it before the tables are checked, because checking a method imports its file.

    Args:
        tables: The tables of the file.
        where: The file, for the error message.
        trust: Whether the user trusts the file.
        own: The tables that the user has given. What they name needs no trust.
    """
    given = code_in(own or {})
    if not trust and (code := [text for text in code_in(tables) if text not in given]):
        raise ConfigError(
            f"{where} names Python code, which would be executed with your rights: "
            f"{plain_text(', '.join(code))}. Read that code; then allow it with --trust "
            "(in Python: trust=True)"
        )


def _texts(content: Any) -> Iterator[str]:
    """Yields all texts in nested tables, keys included."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, Mapping):
        for key, value in content.items():
            yield from (*_texts(key), *_texts(value))
    elif isinstance(content, list | tuple):
        for value in content:
            yield from _texts(value)
