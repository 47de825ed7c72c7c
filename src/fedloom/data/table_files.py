"""TableFile: a table in a file, CSV, TSV or Parquet, plain or with gzip.

The content decides between Parquet and text. Of a text file the delimiter is found: the one of
`, ; tab |` that gives all first rows the same number of columns and the header the names that are
looked for. Files are read in chunks, column by column, so that a million rows take seconds.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from fedloom.data.columns import FLOAT32, Table, to_floats
from fedloom.errors import DataError

DELIMITERS = (",", ";", "\t", "|")
# The default delimiter by ending.
TEXT_ENDINGS = {".csv": ",", ".tsv": "\t", ".tab": "\t", ".txt": ","}
PARQUET_ENDINGS = (".parquet", ".pq")
ENDINGS = (*(e + gz for gz in ("", ".gz") for e in TEXT_ENDINGS), *PARQUET_ENDINGS)
SAMPLE_ROWS = 100  # that the delimiter is found in
# Larger chunks are slower: the garbage collector goes through all rows of a chunk.
CHUNK_ROWS, CHUNK_CELLS, PARQUET_ROWS = 2**12, 2**22, 2**16


def candidates(folder: Path, name: str) -> list[Path]:
    """Returns the files of a folder that may be the table of that name, first choice first."""
    return [path for ending in ENDINGS if (path := folder / f"{name}{ending}").is_file()]


@dataclass(frozen=True)
class TableFile:
    """A table that is not read yet.

    Attributes:
        path: The file.
        columns: The names of the columns.
        delimiter: What separates the cells; "" for Parquet.
    """

    path: Path
    columns: tuple[str, ...]
    delimiter: str

    @classmethod
    def open(cls, path: Path, expected: Collection[str] = (), delimiter: str = "") -> TableFile:
        """Finds out the format and the columns of a file.

        Args:
            path: The file.
            expected: Columns that the table should have. They help to find the delimiter.
            delimiter: The delimiter. "": it is found.
        """
        if not path.is_file():
            raise DataError(f"{path}: no such file")
        if _starts_with(path, b"PAR1"):
            header: Sequence[Any] = _parquet_header(path)
        else:
            ending = path.with_suffix("") if path.suffix.lower() == ".gz" else path
            default = TEXT_ENDINGS.get(ending.suffix.lower())
            if ending.suffix.lower() in PARQUET_ENDINGS:
                raise DataError(f"{path}: cannot be read: it is not a Parquet file")
            if default is None:
                raise DataError(
                    f"{path}: tables ending in {path.suffix!r} are not known. "
                    f"Valid: {', '.join(ENDINGS)}"
                )
            delimiter = delimiter or _found_delimiter(path, default, expected)
            header = next(_csv_rows(path, delimiter), (0, ()))[1]
            if not header:
                raise DataError(f"{path}: empty file, not even a header")
        columns = tuple(str(name).strip() for name in header)
        twice = {name for name in columns if name and columns.count(name) > 1}
        if twice:
            raise DataError(f"{path}: column {min(twice)!r} is there more than once")
        return cls(path, columns, delimiter)

    def require(self, name: str) -> str:
        """Returns the name of a column; raises a DataError that lists the columns if it is none."""
        if name not in self.columns:
            raise DataError(
                f"{self.path}: no column {name!r}. Columns there: {', '.join(self.columns)}"
            )
        return name

    def read(self, wanted: Sequence[str], as_text: Collection[str] = ()) -> Table:
        """Reads some columns. A column of numbers is read as such, any other one as texts.

        Args:
            wanted: The columns to read.
            as_text: The columns to read as texts even if they hold numbers, such as ids.
        """
        texts = set(as_text)
        while True:
            try:
                return self._read(list(dict.fromkeys(wanted)), texts)
            except _TurnedText as turned:  # a late row of a long file is not a number
                texts.add(turned.args[0])

    def _read(self, wanted: list[str], texts: set[str]) -> Table:
        parts: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in wanted}
        all_lines = [np.zeros(0, np.int64)]
        kept = set(texts)
        text = bool(self.delimiter)
        chunks = self._text_chunks(wanted) if text else self._parquet_chunks(wanted, texts)
        for lines, columns in chunks:
            all_lines.append(lines)
            for name, cells in zip(wanted, columns, strict=True):
                part = None if name in kept else self._numbers(name, cells, lines)
                if part is None:
                    if name not in kept and parts[name]:
                        raise _TurnedText(name)
                    kept.add(name)
                    part = _texts(cells)
                parts[name].append(part)
        lines = np.concatenate(all_lines)
        empty = {name: np.zeros(0, object if name in kept else np.float64) for name in wanted}
        joined = {n: np.concatenate(found) if found else empty[n] for n, found in parts.items()}
        return Table(joined, len(lines), str(self.path), lines)

    def _numbers(self, name: str, cells: Any, lines: npt.NDArray[np.int64]) -> Any:
        """Returns cells as numbers, NaN where missing; None if they are texts."""
        values = cells if isinstance(cells, np.ndarray) else to_floats(cells)
        if values is None:
            return None
        bad = np.abs(values) > FLOAT32
        if bad.any():
            row = int(bad.argmax())
            shown = cells[row] if isinstance(cells[row], str) else float(cells[row])
            raise DataError(
                f"{self.path}, line {lines[row]}, column {name!r}: {shown!r} is not a finite number"
            )
        return values

    def _text_chunks(
        self, wanted: Sequence[str]
    ) -> Iterator[tuple[npt.NDArray[np.int64], list[Any]]]:
        places = [self.columns.index(name) for name in wanted]
        size = max(1, min(CHUNK_ROWS, CHUNK_CELLS // len(self.columns)))
        for lines, rows in _csv_chunks(self.path, self.delimiter, len(self.columns), size):
            columns = list(zip(*rows, strict=True))
            yield lines, [columns[place] for place in places]

    def _parquet_chunks(
        self, wanted: Sequence[str], texts: Collection[str]
    ) -> Iterator[tuple[npt.NDArray[np.int64], list[Any]]]:
        parquet, errors = _pyarrow(self.path)
        stored = _parquet_header(self.path)  # not stripped
        names = [stored[self.columns.index(name)] for name in wanted]
        line = 1
        try:
            with parquet.ParquetFile(self.path) as file:
                for batch in file.iter_batches(batch_size=PARQUET_ROWS, columns=names):
                    columns = [
                        self._cells(batch.column(stored_name), name in texts, name)
                        for name, stored_name in zip(wanted, names, strict=True)
                    ]
                    yield np.arange(line, line + batch.num_rows), columns
                    line += batch.num_rows
        except errors as error:
            raise DataError(f"{self.path}: cannot be read: {error}") from error

    def _cells(self, column: Any, as_text: bool, name: str) -> Any:
        """Returns a Parquet column as an array of numbers, or as a list of texts."""
        from pyarrow import float64, types

        kind = column.type
        if types.is_dictionary(kind):
            return self._cells(column.dictionary_decode(), as_text, name)
        if types.is_nested(kind) or types.is_binary(kind):
            raise DataError(f"{self.path}: column {name!r} holds {kind}, must be numbers or texts")
        number = types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
        if number and not as_text:
            return column.cast(float64(), safe=False).to_numpy(zero_copy_only=False)
        values = column.to_pylist()
        if types.is_boolean(kind):
            values = [None if value is None else str(value).lower() for value in values]
        if types.is_date(kind) or types.is_timestamp(kind):
            values = [None if value is None else value.isoformat() for value in values]
        return ["" if value is None else str(value) for value in values]


class _TurnedText(Exception):  # noqa: N818  # a signal, not an error
    """Raised with the name of a column whose first chunks were numbers and whose next is not."""


def _texts(cells: Any) -> npt.NDArray[Any]:
    texts = np.empty(len(cells), object)
    texts[:] = [cell.strip() for cell in cells]
    return texts


def _starts_with(path: Path, magic: bytes) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(len(magic)) == magic
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


# ---- text ----
def _open_text(path: Path) -> IO[str]:
    if _starts_with(path, b"\x1f\x8b"):
        return gzip.open(path, "rt", newline="", encoding="utf-8-sig")
    return open(path, newline="", encoding="utf-8-sig")


def _csv_chunks(
    path: Path, delimiter: str, width: int, size: int
) -> Iterator[tuple[npt.NDArray[np.int64], list[list[str]]]]:
    """Yields the rows after the header in chunks, with the line on which each row ends."""
    before, header = 0, True
    try:
        with _open_text(path) as file:
            reader = csv.reader(file, delimiter=delimiter, strict=True)
            while rows := list(islice(reader, size)):
                lines = np.arange(before + 1, before + 1 + len(rows))
                if reader.line_num != before + len(rows):  # cells with line breaks
                    breaks = [sum(cell.count("\n") for cell in row) for row in rows]
                    lines += np.cumsum(breaks)
                before = reader.line_num
                filled = np.array([bool(row) for row in rows])
                if not filled.all():  # empty lines
                    lines, rows = lines[filled], [row for row in rows if row]
                if set(map(len, rows)) - {width}:
                    raise csv.Error("rows of different width")
                if header and rows:
                    lines, rows, header = lines[1:], rows[1:], False
                if rows:
                    yield lines, rows
    except (csv.Error, UnicodeDecodeError, EOFError, OSError) as error:
        for _ in _csv_rows(path, delimiter):  # raises an error that names the line
            pass
        raise DataError(f"{path}: cannot be read: {error}") from error


def _csv_rows(path: Path, delimiter: str) -> Iterator[tuple[int, Sequence[str]]]:
    """Yields the header, then the rows, each with the line on which it ends."""
    line, width = 0, 0
    try:
        with _open_text(path) as file:
            reader = csv.reader(file, delimiter=delimiter, strict=True)
            for row in reader:
                line = reader.line_num
                if not row:  # an empty line
                    continue
                width = width or len(row)
                if len(row) != width:
                    raise DataError(
                        f"{path}, line {line}: {len(row)} values under a header of {width} columns"
                    )
                yield line, row
    except (csv.Error, UnicodeDecodeError, EOFError, OSError) as error:
        raise DataError(f"{path}, line {line + 1}: cannot be read: {error}") from error


def _found_delimiter(path: Path, default: str, expected: Collection[str]) -> str:
    """Returns the delimiter of a text file; the default if no other one fits better."""

    def fit(delimiter: str) -> tuple[int, bool, int]:
        """How many expected columns there are, whether all rows have one width, and which."""
        try:
            with _open_text(path) as file:
                reader = csv.reader(file, delimiter=delimiter, strict=True)
                rows = [row for row in islice(reader, SAMPLE_ROWS) if row]
        except (csv.Error, UnicodeDecodeError, EOFError, OSError):
            return 0, False, 0
        header = [name.strip() for name in rows[0]] if rows else []
        even = len({len(row) for row in rows}) == 1
        return sum(name in header for name in expected), even, len(header) if even else 0

    others = [delimiter for delimiter in DELIMITERS if delimiter != default]
    return max((default, *others), key=fit)  # the first one of equals


# ---- Parquet ----
def _pyarrow(path: Path) -> tuple[Any, tuple[type[Exception], ...]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise DataError(
            f"{path}: reading Parquet needs pyarrow: pip install 'fedloom[tables]'"
        ) from error
    return parquet, (ArrowException, OSError)


def _parquet_header(path: Path) -> Sequence[str]:
    parquet, errors = _pyarrow(path)
    try:
        names: Sequence[str] = parquet.read_schema(path).names
    except errors as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    return names
