"""Predictions: the classes of items, with their own ids and names, and tables of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.errors import ConfigError
from fedloom.experiments.escaping import csv_text

ENDINGS = (".csv", ".parquet")


@dataclass(frozen=True, eq=False, repr=False)
class Predictions:
    """What a model says about items: nodes, or graphs in a graph-level task.

    Attributes:
        ids: The items' own ids, [items]; without them, their numbers.
        numbers: The number of the predicted class of each item, [items].
        probabilities: The probability of every class, [items, classes].
        class_names: The classes' names, in the order of their numbers.
        clients: The client of each item, [items], if several clients predict. None: one does.
    """

    ids: NDArray[Any]
    numbers: NDArray[np.int64]
    probabilities: NDArray[np.float32]
    class_names: tuple[str, ...]
    clients: NDArray[np.str_] | None = None

    @property
    def classes(self) -> NDArray[np.str_]:
        """The name of the predicted class of each item, [items]."""
        return np.array(self.class_names, dtype=np.str_)[self.numbers]

    def __len__(self) -> int:
        return len(self.numbers)

    def __repr__(self) -> str:
        counts = np.bincount(self.numbers, minlength=len(self.class_names))
        largest = np.argsort(-counts, kind="stable")[:5]
        shown = ", ".join(f"{self.class_names[c]} {counts[c]:,}" for c in largest if counts[c])
        return f"Predictions({len(self):,} items: {shown})"

    def columns(self) -> dict[str, NDArray[Any]]:
        """Returns the table by column: id, class, its probability, that of every class."""
        table: dict[str, NDArray[Any]] = {} if self.clients is None else {"client": self.clients}
        table |= {"id": self.ids, "class": self.classes}
        if len(self.class_names):
            table["probability"] = self.probabilities.max(1)
        for c, name in enumerate(self.class_names):
            table[f"probability_{name}"] = self.probabilities[:, c]
        return table

    def write(self, path: str | Path) -> Path:
        """Writes a table, CSV or Parquet by the ending of its name. Returns the path."""
        if Path(path).suffix == ".csv":
            return self.to_csv(path)
        if Path(path).suffix == ".parquet":
            return self.to_parquet(path)
        raise ConfigError(f"out: {str(path)!r} has no known ending; valid: {', '.join(ENDINGS)}")

    def to_csv(self, path: str | Path) -> Path:
        """Writes the table as CSV, with a header. Returns the path."""
        try:
            with open(path, "w", newline="", encoding="utf-8") as file:
                file.writelines(self.csv_lines())
        except OSError as error:
            raise ConfigError(f"out: cannot write {str(path)!r} ({error.strerror})") from error
        return Path(path)

    def csv_lines(self) -> list[str]:
        """Returns the lines of the CSV table, with their ends."""
        table = self.columns()
        texts = [_texts(column) for column in table.values()]
        rows = [list(table), *zip(*texts, strict=True)]
        return csv_text(rows, "\n").splitlines(keepends=True)

    def to_parquet(self, path: str | Path) -> Path:
        """Writes the table as Parquet. Returns the path. It needs the extra `tables`."""
        try:
            import pyarrow as pa
            from pyarrow import parquet
        except ImportError as error:
            raise ConfigError(
                "out: Parquet needs pyarrow: pip install 'fedloom[tables]'"
            ) from error
        table = pa.table({name: pa.array(column) for name, column in self.columns().items()})
        try:
            parquet.write_table(table, str(path))
        except OSError as error:
            raise ConfigError(f"out: cannot write {str(path)!r} ({error})") from error
        return Path(path)

    def pandas(self) -> Any:
        """Returns the table as a pandas DataFrame. It needs the extra `tables`."""
        try:
            import pandas as pd
        except ImportError as error:
            raise ConfigError("pandas is missing: pip install 'fedloom[tables]'") from error
        return pd.DataFrame(self.columns())


def _texts(column: NDArray[Any]) -> Sequence[str]:
    if np.issubdtype(column.dtype, np.floating):
        return [f"{value:.6g}" for value in column.tolist()]
    return [str(value) for value in column.tolist()]


def predictions_of(
    logits: NDArray[np.float32], ids: NDArray[Any], class_names: tuple[str, ...]
) -> Predictions:
    """Returns the predictions of logits [items, classes]."""
    shifted = np.exp(logits - logits.max(1, keepdims=True))
    probabilities = (shifted / shifted.sum(1, keepdims=True)).astype(np.float32)
    return Predictions(ids, logits.argmax(1), probabilities, class_names)


def joined(parts: dict[str, Predictions]) -> Predictions:
    """Returns the predictions of several clients as one."""
    found = list(parts.values())
    return Predictions(
        np.concatenate([p.ids for p in found]),
        np.concatenate([p.numbers for p in found]),
        np.concatenate([p.probabilities for p in found]),
        found[0].class_names,
        np.repeat(np.array(list(parts), dtype=np.str_), [len(p) for p in found]),
    )
