"""RawGraph: a graph whose features are still a table of raw columns."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedloom.data.columns import Table
from fedloom.data.encoding import Encoding
from fedloom.data.graph import Graph
from fedloom.errors import DataError


@dataclass(frozen=True, eq=False)
class RawGraph(Graph):
    """A graph that has a table of raw columns, and no features yet: `x` is [nodes, 0].

    Attributes:
        table: The raw columns, one row per node.
        declared: The rules of the columns, as the folder declares them.
        declares: Whether the folder declares anything about columns.
    """

    table: Table = None  # type: ignore[assignment]
    declared: Encoding = field(default_factory=lambda: Encoding(()))
    declares: bool = False

    def subgraph(self, keep: Tensor) -> RawGraph:
        """Returns the induced subgraph of some nodes, with their rows of the table."""
        index = keep.nonzero().flatten() if keep.dtype == torch.bool else keep
        part = super().subgraph(index)
        assert isinstance(part, RawGraph)
        return replace(part, table=self.table.take(index.numpy()))

    def rows_to_fit(self, inductive: bool) -> npt.NDArray[Any] | None:
        """Returns the rows of the table that an encoding may be fitted on; None for all.

        inductive: whether these are the rows of training items only.
        """
        if not inductive:
            return None
        rows: npt.NDArray[np.bool_] = self.train.numpy()
        return rows if self.batch is None else rows[self.batch.numpy()]

    def encoded(self, encoding: Encoding) -> Graph:
        """Returns the graph with features. It keeps the encoding for later tables.

        encoding: a fitted encoding.
        """
        x, names = encoding.apply(self.table)
        if not len(names):
            raise DataError(f"{self.table.source}: all columns are ignored, no feature is left")
        return replace(self.with_features(torch.from_numpy(x), names), encoding=encoding)

    def with_features(self, x: Tensor, names: tuple[str, ...]) -> Graph:
        """Returns the graph with features [nodes, features] of these names."""
        own = {f.name: getattr(self, f.name) for f in fields(Graph) if f.init}
        return Graph(**own | {"x": x, "feature_names": names}).check()
