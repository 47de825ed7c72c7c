"""Augmentation: random views of a graph, without some of its edges and feature columns.

Training draws new views at every step, so they must be cheap. Models treat a view as an ordinary
graph. Its adjacency is selected from the adjacency of the original graph, which is already sorted.
Its features are computed only on access, which models with +norm need. Other models do not need
them, because X with masked columns times W is X times W with masked rows. Views are for models
only. Functions that derive graphs (`replace`, `subgraph`) need the original graph.
"""

from __future__ import annotations

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
        kept: Whether an entry of the original graph's adjacency is left, [entries] bool.
        columns: 1 for the feature columns that are left, 0 for the others, [features].
    """

    def __init__(self, whole: Graph, kept: Tensor, columns: Tensor):
        # Features and edges are computed on access. All other fields are those of the original.
        unchanged: dict[str, Any] = {
            name: getattr(whole, name)
            for name in ("y", "num_classes", "train", "val", "test", "node_id", "batch")
        }
        unchanged |= {"cross_edges": whole.cross_edges[:, :0], "name": whole.name, "_cache": {}}
        for name, value in (unchanged | {"whole": whole, "kept": kept, "columns": columns}).items():
            object.__setattr__(self, name, value)

    transient = True
    whole: Graph
    kept: Tensor
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
        return self.cached(
            "features",
            lambda: Sparse(
                whole.offsets,
                whole.indices,
                whole.values * self.columns[whole.indices.long()],
                whole.shape,
            ),
        )

    def project(self, weight: Tensor) -> Tensor:
        """Returns x @ weight."""
        return self.whole.project(weight * self.columns.unsqueeze(1))

    def adjacency(self, kind: str = "sym") -> Sparse:
        """Returns the adjacency of the edges that are left, with their own degrees."""
        return self.cached(("adjacency", kind), lambda: self._select(kind))

    def _select(self, kind: str) -> Sparse:
        edges, n = entries(self.whole), self.num_nodes
        kept = self.kept if kind in WITH_LOOPS else self.kept & ~edges.loop
        source, target, weight = edges.source[kept], edges.target[kept], edges.weight[kept]
        degree = torch.zeros(n).index_add_(0, target, weight)
        offsets = torch.zeros(n + 1, dtype=edges.offsets.dtype)
        torch.cumsum(torch.bincount(target, minlength=n), 0, out=offsets[1:])
        indices = edges.indices[kept]
        matrix = Sparse(offsets, indices, scaled(kind, source, target, weight, degree), (n, n))
        matrix.__dict__["rows"] = target
        if edges.symmetric:  # then the transpose has entries at the same coordinates
            transpose = Sparse(
                offsets, indices, scaled(kind, target, source, weight, degree), (n, n)
            )
            transpose.__dict__["rows"] = target
            matrix.__dict__["transpose"] = transpose
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
        pair: The undirected edge of each entry. Both directions of an edge have the same number.
        num_pairs: Number of undirected edges.
        symmetric: Whether every edge has a reversed edge with the same weight.
    """

    def __init__(self, graph: Graph):
        n, adjacency = graph.num_nodes, graph.adjacency("sym")
        self.offsets, self.indices = adjacency.offsets, adjacency.indices
        self.target, self.source = adjacency.rows, adjacency.indices.long()
        self.loop = self.source == self.target
        self.weight = torch.ones(adjacency.nnz)
        bare = graph.adjacency("sum")
        self.weight[~self.loop] = bare.values  # the same order, without the loops
        low, high = torch.minimum(self.source, self.target), torch.maximum(self.source, self.target)
        pairs, self.pair = torch.unique(low * n + high, return_inverse=True)
        self.num_pairs = len(pairs)
        self.symmetric = torch.equal(bare.transpose.indices, bare.indices) and torch.equal(
            bare.transpose.values, bare.values
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
    kept = (torch.rand(whole.num_pairs, generator=rng) >= edges)[whole.pair] | whole.loop
    return View(graph, kept, (torch.rand(graph.num_features, generator=rng) >= columns).float())
