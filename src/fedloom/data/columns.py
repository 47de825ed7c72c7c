"""Table: named columns of raw values, and what their cells mean.

A column is an array of numbers (float64, NaN = missing) or of texts ("" = missing). `Table` reads
either as numbers, booleans, dates or categories. Errors name the file, the line and the column.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt

from fedloom.errors import DataError

Floats = npt.NDArray[np.float64]

# What an undeclared column may be, in the order in which the kinds are tried.
KINDS = ("boolean", "number", "date", "category")
# A column of texts with more different values than this is an identifier, not a category.
MOST_CATEGORIES = 100
# Cells that stand for a missing number, boolean or date. "NA" may be a category (Namibia).
MISSING = frozenset(("", "na", "n/a", "nan", "null", "none", "-"))
TRUE = frozenset(("true", "yes", "t", "y", "1", "1.0"))
FALSE = frozenset(("false", "no", "f", "n", "0", "0.0"))
FLOAT32 = float(np.finfo(np.float32).max)
DATES_BEGIN = datetime(2000, 1, 1, tzinfo=UTC)
SECONDS_PER_DAY = 86400.0


@dataclass(frozen=True, eq=False)
class Table:
    """Columns of raw values, one row per node.

    Attributes:
        columns: The columns by name, [rows] float64 or object (texts).
        rows: Number of rows.
        source: The file, for error messages.
        lines: The line of each row in the file, [rows].
    """

    columns: Mapping[str, npt.NDArray[Any]]
    rows: int
    source: str = "table"
    lines: npt.NDArray[np.int64] | None = None
    _parsed: dict[tuple[str, str], Floats] = field(default_factory=dict, repr=False)

    def at(self, row: int, column: str) -> str:
        """Returns the place of a cell, with which an error message begins."""
        line = row + 1 if self.lines is None else int(self.lines[row])
        return f"{self.source}, line {line}, column {column!r}"

    def column(self, name: str) -> npt.NDArray[Any]:
        """Returns a column; raises a DataError that lists the columns if there is none."""
        if name not in self.columns:
            raise DataError(
                f"{self.source}: no column {name!r}. Columns there: {', '.join(self.columns)}"
            )
        return self.columns[name]

    def take(self, index: npt.NDArray[Any]) -> Table:
        """Returns the table with some of its rows, in the order of `index`."""
        lines = np.arange(1, self.rows + 1) if self.lines is None else self.lines
        taken = {name: column[index] for name, column in self.columns.items()}
        return Table(taken, len(lines[index]), self.source, lines[index])

    # ---- cells as values ----
    def values(self, name: str, kind: str, date_format: str = "") -> Floats:
        """Returns a column of numbers, booleans (0 or 1) or dates (days) as float64.

        A missing value is NaN. Raises a DataError that names the first cell of another kind.

        Args:
            name: The column.
            kind: "number", "boolean" or "date". Dates are counted in days from 2000-01-01, UTC.
            date_format: How dates are written, as in `datetime.strptime`. "": ISO 8601.
        """
        key = (name, kind + date_format)
        if key not in self._parsed:
            column = self.column(name)
            parse = {"number": _numbers, "boolean": _booleans}.get(kind)
            values = parse(column) if parse else _dates(column, date_format)
            bad = np.isinf(values)
            if bad.any():
                row = int(bad.argmax())
                wanted = {
                    "number": "is not a finite number",
                    "boolean": "is none of true, false, yes, no, 1, 0",
                    "date": f"is not a date ({date_format or 'ISO 8601, such as 2024-05-31'})",
                }[kind]
                raise DataError(f"{self.at(row, name)}: {_shown(column[row])} {wanted}")
            self._parsed[key] = values
        return self._parsed[key]

    def texts(self, name: str) -> npt.NDArray[Any]:
        """Returns a column as texts, "" where a value is missing."""
        column = self.column(name)
        if column.dtype.kind != "f":
            return column
        return np.array([_shown(value) if value == value else "" for value in column], object)

    def is_complete(self, name: str) -> bool:
        """Returns whether a column holds numbers only, without a missing value."""
        column = self.column(name)
        return column.dtype.kind == "f" and not np.isnan(column).any()

    def possible_kinds(self, name: str) -> dict[str, bool]:
        """Returns for each kind whether all values of a column can be of that kind.

        "empty" says whether the column has no values at all, "identifier" whether it has too many
        different texts for a category. Raises a DataError if most values are numbers and some are
        not: that is a mistake more often than a category.
        """
        column = self.column(name)
        if column.dtype.kind == "f":
            known = column[~np.isnan(column)]
            binary = bool(np.isin(known, (0, 1)).all())
            found = {"boolean": binary, "number": True, "date": False, "category": False}
            empty = not len(known)
            if empty:
                found = dict.fromkeys(found, True)
            return found | {"empty": empty, "identifier": False}
        different = set(column.tolist())
        known_texts = {text for text in different if text.lower() not in MISSING}
        if not known_texts:
            category = bool(different - {""})
            return dict.fromkeys(KINDS, True) | {"empty": not category, "identifier": False}
        boolean = all(text.lower() in TRUE | FALSE for text in known_texts)
        date = np.isfinite(_dates(np.array(list(known_texts), object))).all()
        numbers = _numbers(column)
        other = np.isinf(numbers)
        present = ~np.isnan(numbers)
        if not boolean and not date and 0 < other.sum() * 2 < present.sum():
            row = int(other.argmax())
            raise DataError(
                f"{self.at(row, name)}: {_shown(column[row])} is not a finite number, but most "
                f"values of this column are; correct it, or declare the kind of {name!r} in "
                "[columns]: category or ignore"
            )
        few = len(different) <= MOST_CATEGORIES
        return {
            "boolean": boolean,
            "number": not other.any(),
            "date": bool(date),
            "category": few,
            "empty": False,
            "identifier": not few,
        }


def _shown(value: object) -> str:
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
    return repr(value)


def to_floats(cells: list[str]) -> Floats | None:
    """Returns cells as numbers, NaN for a missing one; None if one is neither."""
    try:
        return np.array(cells, dtype=object).astype(np.float64)
    except (ValueError, TypeError):
        pass
    if not any(cell.lower() in MISSING for cell in cells):
        return None
    try:
        kept = ["nan" if cell.lower() in MISSING else cell for cell in cells]
        return np.array(kept, dtype=object).astype(np.float64)
    except (ValueError, TypeError):
        return None


def _numbers(column: npt.NDArray[Any]) -> Floats:
    """Returns numbers; NaN where a value is missing, infinity where it is not a finite number."""
    if column.dtype.kind == "f":
        values = column
    else:
        different = {text: _number(text) for text in set(column.tolist())}
        values = np.array([different[text] for text in column.tolist()], dtype=np.float64)
    return np.where(np.abs(values) > FLOAT32, np.inf, values)


def _number(text: str) -> float:
    if text.lower() in MISSING:
        return float("nan")
    try:
        return float(text)
    except ValueError:
        return float("inf")


def _booleans(column: npt.NDArray[Any]) -> Floats:
    if column.dtype.kind == "f":
        return np.where(np.isnan(column) | np.isin(column, (0, 1)), column, np.inf)
    code = {text: _boolean(text.lower()) for text in set(column.tolist())}
    return np.array([code[text] for text in column.tolist()], dtype=np.float64)


def _boolean(text: str) -> float:
    if text in MISSING:
        return float("nan")
    return 1.0 if text in TRUE else 0.0 if text in FALSE else float("inf")


def _dates(column: npt.NDArray[Any], date_format: str = "") -> Floats:
    if column.dtype.kind == "f":
        return np.where(np.isnan(column), np.nan, np.inf)
    code = {text: _days(text, date_format) for text in set(column.tolist())}
    return np.array([code[text] for text in column.tolist()], dtype=np.float64)


def _days(text: str, date_format: str) -> float:
    if text.lower() in MISSING:
        return float("nan")
    try:
        iso = not date_format
        date = datetime.fromisoformat(text) if iso else datetime.strptime(text, date_format)
    except ValueError:
        return float("inf")
    if date.tzinfo is None:
        date = date.replace(tzinfo=UTC)
    return (date - DATES_BEGIN).total_seconds() / SECONDS_PER_DAY
