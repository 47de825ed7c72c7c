"""Views: a graph with some of its edges and feature columns left out, drawn anew at every step, cheaply.

A view is a graph like any other to a model. Its adjacency is cut out of the whole graph's, which is sorted already. Its features are not
copied unless somebody looks at them (models with +norm do): X with masked columns times W is X times W with masked rows. A view is there to
be looked at; what makes graphs of graphs (`replace`, `subgraph`) takes the whole one.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Generator, Tensor

from fedloom.data.graph import WITH_LOOPS, Graph, scaled
from fedloom.data.sparse import Sparse


class View(Graph):
    """A graph of which only some edges and feature columns are seen; made by `thinned`."""

    def __init__(self, whole: Graph, kept: Tensor, columns: Tensor):
        # What a view does not change is the whole graph's; features and edges are worked out if anybody looks at them.
        unchanged: dict[str, Any] = {
            name: getattr(whole, name)
            for name in ("y", "num_classes", "train", "val", "test", "node_id", "batch")
        }
        unchanged |= {"cross_edges": whole.cross_edges[:, :0], "name": whole.name, "_cache": {}}
        for name, value in (unchanged | {"whole": whole, "kept": kept, "columns": columns}).items():
            object.__setattr__(self, name, value)

    transient = True
    whole: Graph
    kept: Tensor  # [entries of the whole graph's adjacency] bool
    columns: Tensor  # [features] 0 or 1

    @property
    def num_nodes(self) -> int:
        """As many as the whole graph has."""
        return self.whole.num_nodes

    @property
    def num_features(self) -> int:
        """As many as the whole graph has; masked ones are zero."""
        return self.whole.num_features

    @cached_property
    def x(self) -> Tensor:
        """The features, masked columns zero."""
        return self.whole.x * self.columns

    @cached_property
    def edge_index(self) -> Tensor:
        """The edges that are left."""
        edges = entries(self.whole)
        left = self.kept & ~edges.loop
        return torch.stack([edges.source[left], edges.target[left]])

    @cached_property
    def edge_weight(self) -> Tensor | None:
        """Their weights, None if the whole graph's have none."""
        edges = entries(self.whole)
        return None if self.whole.edge_weight is None else edges.weight[self.kept & ~edges.loop]

    @property
    def sparse_x(self) -> Sparse | None:
        """The masked features as a sparse matrix, if the whole graph's are."""
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
        """x @ weight."""
        return self.whole.project(weight * self.columns.unsqueeze(1))

    def adjacency(self, kind: str = "sym") -> Sparse:
        """As `Graph.adjacency`, of the edges that are left; degrees are counted anew."""
        return self.cached(("adjacency", kind), lambda: self._cut_out(kind))

    def _cut_out(self, kind: str) -> Sparse:
        edges, n = entries(self.whole), self.num_nodes
        kept = self.kept if kind in WITH_LOOPS else self.kept & ~edges.loop
        source, target, weight = edges.source[kept], edges.target[kept], edges.weight[kept]
        degree = torch.zeros(n).index_add_(0, target, weight)
        offsets = torch.zeros(n + 1, dtype=edges.offsets.dtype)
        torch.cumsum(torch.bincount(target, minlength=n), 0, out=offsets[1:])
        indices = edges.indices[kept]
        matrix = Sparse(offsets, indices, scaled(kind, source, target, weight, degree), (n, n))
        matrix.__dict__["rows"] = target
        if edges.symmetric:  # then the transpose has its entries in the same places
            turned = Sparse(offsets, indices, scaled(kind, target, source, weight, degree), (n, n))
            turned.__dict__["rows"] = target
            matrix.__dict__["transpose"] = turned
        return matrix


class Entries:
    """A graph's edges and self-loops, ordered by target, and which of them are the same undirected edge."""

    def __init__(self, graph: Graph):
        n, everything = graph.num_nodes, graph.adjacency("sym")
        self.offsets, self.indices = everything.offsets, everything.indices
        self.target, self.source = everything.rows, everything.indices.long()
        self.loop = self.source == self.target
        self.weight = torch.ones(everything.nnz)
        bare = graph.adjacency("sum")
        self.weight[~self.loop] = bare.values  # the same order, without the loops
        low, high = torch.minimum(self.source, self.target), torch.maximum(self.source, self.target)
        pairs, self.pair = torch.unique(low * n + high, return_inverse=True)
        self.num_pairs = len(pairs)
        self.symmetric = torch.equal(bare.transpose.indices, bare.indices) and torch.equal(
            bare.transpose.values, bare.values
        )


def entries(graph: Graph) -> Entries:
    """`Entries` of a graph, made once."""
    made: Entries = graph.cached("entries", lambda: Entries(graph))
    return made


def thinned(graph: Graph, edges: float, columns: float, rng: Generator) -> Graph:
    """A view in which every undirected edge is missing with probability `edges` and every feature column is zero with `columns`.

    Both directions of an edge go together. The graph itself is left as it is.
    """
    whole = entries(graph)
    kept = (torch.rand(whole.num_pairs, generator=rng) >= edges)[whole.pair] | whole.loop
    return View(graph, kept, (torch.rand(graph.num_features, generator=rng) >= columns).float())
