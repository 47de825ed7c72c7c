"""Settings: dataclass fields with a help text and valid values, checked when they are read."""

from __future__ import annotations

import math
import operator
from dataclasses import MISSING, Field, field
from typing import Any

from fedloom.errors import ConfigError

_COMPARE = {
    "at least": operator.ge,
    "above": operator.gt,
    "at most": operator.le,
    "below": operator.lt,
}
# Fewer items than this behind a number that is sent: a plain run says so.
FEWEST = 5
_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text"}


def setting(
    default: Any,
    help: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    choices: tuple[str, ...] | None = None,
    task: str | None = None,
    tune: str | None = None,
    advised: float | None = None,
) -> Any:
    """Declares a setting: a dataclass field with its default, its meaning and its valid values.

    Args:
        default: The default value.
        help: What the setting means, with the paper's symbol.
        at_least, above, at_most, below: Bounds of a number.
        choices: All valid values of a text.
        task: The only task ("node" or "graph") that the setting has an effect in.
        tune: What `fedloom tune` searches: "low..high" (on a logarithmic scale if it spans two
            decades or more) or "a,b,c".
        advised: The least value that a plain run accepts without a warning.
    """
    bounds = {"at least": at_least, "above": above, "at most": at_most, "below": below}
    metadata = {"help": help, "bounds": bounds, "choices": choices, "task": task, "tune": tune}
    return field(default=default, metadata={**metadata, "advised": advised})


def fewest_items(help: str, at_least: int = 1) -> Any:
    """Declares a setting: the fewest items that something is computed from if it is sent.

    The default is `FEWEST`. What is computed from a single item is that item's own.

    Args:
        help: What is not sent if it is computed from fewer.
        at_least: The least valid value.
    """
    return setting(FEWEST, help, at_least=at_least, advised=FEWEST)


def _type_of(f: Field[Any]) -> str:
    return f.type if isinstance(f.type, str) else str(getattr(f.type, "__name__", f.type))


def valid_values(f: Field[Any]) -> str:
    """Describes the valid values of a setting, for help texts and errors."""
    if f.metadata.get("choices"):
        return " or ".join(f.metadata["choices"])
    limits = f.metadata.get("bounds", {}).items()
    bounds = " and ".join(f"{word} {bound:g}" for word, bound in limits if bound is not None)
    return f"{_KINDS.get(_type_of(f), _type_of(f))} {bounds}".strip()


def check_setting(f: Field[Any], value: Any, table: str) -> Any:
    """Returns `value` as the setting's type, or raises a ConfigError that names `table` and field.

    A whole number is accepted where a float is expected, and a number where a text without fixed
    choices is: `method.hops=2` is as valid as `method.hops=2,4`.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if _type_of(f) == "str" and number and not f.metadata.get("choices"):
        return str(value)
    ok: bool = {
        "int": isinstance(value, int) and number,
        "float": number and math.isfinite(value),
        "bool": isinstance(value, bool),
        "str": isinstance(value, str),
    }.get(_type_of(f), True)
    choices = f.metadata.get("choices")
    if ok and choices:
        ok = value in choices
    if ok:
        bounds = {w: b for w, b in f.metadata.get("bounds", {}).items() if b is not None}
        ok = all(_COMPARE[word](value, bound) for word, bound in bounds.items())
    if not ok:
        raise ConfigError(f"{table}.{f.name} is {value!r}, must be {valid_values(f)}")
    return float(value) if _type_of(f) == "float" else value


def default_of(f: Field[Any]) -> Any:
    """Returns the default of a dataclass field."""
    if f.default_factory is not MISSING:
        return f.default_factory()
    return f.default
