"""Augmentation: random views of a graph, without some of its edges and feature columns.

Training draws new views at every step, so they must be cheap. Models treat a view as an ordinary
graph. Its adjacency is selected from the adjacency of the original graph, which is already sorted.
Its dense features are computed only on access, which models with +norm need. Other models do not
need them, because X with masked columns times W is X times W with masked rows. Views are for models
only. Functions that derive graphs (`replace`, `subgraph`) need the original graph.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Generator, Tensor

from fedloom.data.graph import WITH_LOOPS, Graph, scaled
from fedloom.data.sparse import Sparse


class View(Graph):
    """A graph without some edges and feature columns; see `random_view`.

    Attributes:
        whole: The original graph.
        pairs: Whether an undirected edge of the original graph is left, [pairs] bool.
        columns: 1 for the feature columns that are left, 0 for the others, [features].
    """

    def __init__(self, whole: Graph, pairs: Tensor, columns: Tensor):
        # Features and edges are computed on access. All other fields are those of the original.
        unchanged: dict[str, Any] = {
            name: getattr(whole, name)
            for name in ("y", "num_classes", "train", "val", "test", "node_id", "batch")
        }
        unchanged |= {"cross_edges": whole.cross_edges[:, :0], "name": whole.name, "_cache": {}}
        own = {"whole": whole, "pairs": pairs, "columns": columns}
        for name, value in (unchanged | own).items():
            object.__setattr__(self, name, value)

    transient = True
    whole: Graph
    pairs: Tensor
    columns: Tensor

    @property
    def num_nodes(self) -> int:
        """Number of nodes of the original graph."""
        return self.whole.num_nodes

    @property
    def num_features(self) -> int:
        """Number of features of the original graph. Masked ones are zero."""
        return self.whole.num_features

    @cached_property
    def x(self) -> Tensor:
        """The features. Masked columns are zero."""
        return self.whole.x * self.columns

    @cached_property
    def kept(self) -> Tensor:
        """Whether an entry of the original graph's adjacency is left, [entries] bool."""
        edges = entries(self.whole)
        return self.pairs[edges.pair] | edges.loop

    @cached_property
    def edge_index(self) -> Tensor:
        """The edges that are left."""
        edges = entries(self.whole)
        left = self.kept & ~edges.loop
        return torch.stack([edges.source[left], edges.target[left]])

    @cached_property
    def edge_weight(self) -> Tensor | None:
        """The weights of these edges, or None if the original graph has no weights."""
        edges = entries(self.whole)
        return None if self.whole.edge_weight is None else edges.weight[self.kept & ~edges.loop]

    @property
    def sparse_x(self) -> Sparse | None:
        """The masked features as a sparse matrix, if the original graph has sparse features."""
        whole = self.whole.sparse_x
        if whole is None:
            return None
        return self.cached("features", lambda: Masked(whole, self.columns))

    def project(self, weight: Tensor) -> Tensor:
        """Returns x @ weight."""
        return self.whole.project(weight * self.columns.unsqueeze(1))

    def adjacency(self, kind: str = "sym") -> Sparse:
        """Returns the adjacency of the edges that are left, with their own degrees."""
        return self.cached(
            ("adjacency", kind), lambda: selected_adjacency(self.whole, self.kept, kind)
        )


class Masked(Sparse):
    """A sparse matrix without some of its columns. It has the same coordinates, and zeros there.

    columns: 1 for the columns that are left, 0 for the others, [columns].
    """

    def __init__(self, whole: Sparse, columns: Tensor):
        values = whole.values * columns.index_select(0, whole.indices)
        super().__init__(whole.offsets, whole.indices, values, whole.shape)
        self.whole, self.columns = whole, columns

    @cached_property
    def transpose(self) -> Sparse:
        """The transposed matrix."""
        whole = self.whole.transpose
        values = whole.values * self.columns.index_select(0, whole.rows)
        return Sparse(whole.offsets, whole.indices, values, whole.shape)


class _Selected(Sparse):
    """The adjacency of some symmetric edges. Its transpose has the same coordinates."""

    transposed_values: Callable[[], Tensor]

    @cached_property
    def transpose(self) -> Sparse:
        """The transposed matrix."""
        made = Sparse(self.offsets, self.indices, self.transposed_values(), self.shape)
        made.__dict__["rows"] = self.rows
        return made


def selected_adjacency(whole: Graph, kept: Tensor, kind: str) -> Sparse:
    """Returns the adjacency of some edges of a graph, with their own degrees.

    Args:
        whole: The graph.
        kept: Which of its `Entries` are left, [entries] bool. Self-loops are.
        kind: The kind of adjacency.
    """
    edges, n = entries(whole), whole.num_nodes
    kept = kept if kind in WITH_LOOPS else kept & ~edges.loop
    left = kept.nonzero().flatten()
    source, target, weight = edges.source[left], edges.target[left], edges.weight[left]
    degree = torch.zeros(n).index_add_(0, target, weight)
    offsets = torch.zeros(n + 1, dtype=edges.offsets.dtype)
    torch.cumsum(torch.bincount(target, minlength=n), 0, out=offsets[1:])
    values = scaled(kind, source, target, weight, degree)
    form = _Selected if edges.symmetric else Sparse
    matrix = form(offsets, edges.indices[left], values, (n, n))
    matrix.__dict__["rows"] = target
    if isinstance(matrix, _Selected):
        matrix.transposed_values = lambda: scaled(kind, target, source, weight, degree)
    return matrix


class Entries:
    """The edges and self-loops of a graph, sorted by target.

    Attributes:
        offsets: The first entry of each target, as in `Sparse`.
        indices: The sources, as in `Sparse`.
        target: The target of each entry.
        source: The source of each entry.
        loop: Whether an entry is a self-loop.
        weight: The weight of each entry.
        bare: adjacency("sum").
        num_nodes: Number of nodes.
    """

    def __init__(self, graph: Graph):
        self.num_nodes, adjacency = graph.num_nodes, graph.adjacency("sym")
        self.offsets, self.indices = adjacency.offsets, adjacency.indices
        self.target, self.source = adjacency.rows, adjacency.indices.long()
        self.loop = self.source == self.target
        self.bare = graph.adjacency("sum")  # the same order, without the loops
        self.weight = torch.ones(adjacency.nnz)
        self.weight[~self.loop] = self.bare.values

    @cached_property
    def _pairs(self) -> tuple[Tensor, Tensor]:
        low, high = torch.minimum(self.source, self.target), torch.maximum(self.source, self.target)
        pairs, pair = torch.unique(low * self.num_nodes + high, return_inverse=True)
        return pairs, pair

    @property
    def pair(self) -> Tensor:
        """The undirected edge of each entry. Both directions have the same number."""
        return self._pairs[1]

    @property
    def num_pairs(self) -> int:
        """Number of undirected edges."""
        return len(self._pairs[0])

    @cached_property
    def symmetric(self) -> bool:
        """Whether every edge has a reversed edge with the same weight."""
        transpose = self.bare.transpose
        return torch.equal(transpose.indices, self.bare.indices) and torch.equal(
            transpose.values, self.bare.values
        )


def entries(graph: Graph) -> Entries:
    """Returns the `Entries` of a graph, which the graph caches."""
    return graph.cached("entries", lambda: Entries(graph))


def random_view(graph: Graph, edges: float, columns: float, rng: Generator) -> Graph:
    """Returns a random view of a graph. The graph itself is not changed.

    Args:
        graph: The graph.
        edges: The probability that an undirected edge is dropped. Both directions are dropped.
        columns: The probability that a feature column is set to zero.
        rng: The source of randomness.
    """
    whole = entries(graph)
    pairs = torch.rand(whole.num_pairs, generator=rng) >= edges
    return View(graph, pairs, (torch.rand(graph.num_features, generator=rng) >= columns).float())
