"""Graph stacks: the graphs of several clients as one block-diagonal graph.

A model runs on a `GraphStack` with stacked parameters as it runs on a `Graph` with its own. Only
`project`, `propagate`, `matmul`, `add_bias` and `expand` differ between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Generator, Tensor

from fedloom.data.graph import Graph
from fedloom.data.matmul import matmul
from fedloom.data.sparse import Sparse, block_diagonal, vertical_stack, weighted
from fedloom.engines.stacked.group import Group
from fedloom.engines.stacked.matmul import (
    add_to_blocks,
    blockwise,
    membership,
    split,
    sum_of_blocks,
)
from fedloom.engines.stacked.tensors import join_rows
from fedloom.nn.augment import Masked, View, entries, selected_adjacency
from fedloom.nn.edge_weights import EdgeWeighted, weighted_entries
from fedloom.nn.mended import Mended

T = TypeVar("T")

# ---- graphs ----


class GraphStack(Graph):
    """Several graphs as one. It has the fields that models read: features, edges and `batch`."""

    def __init__(self, parts: Sequence[Graph], group: Group | None = None):
        first = parts[0]
        vars(self).update(parts=tuple(parts), group=group, _cache={})
        vars(self).update(num_classes=first.num_classes, name=first.name)

    parts: tuple[Graph, ...]
    group: Group | None  # whose cache has the features of graphs that differ only in their edges

    @property
    def transient(self) -> bool:  # type: ignore[override]
        """Whether its graphs are transient."""
        return self.parts[0].transient

    @cached_property
    def sizes(self) -> list[int]:
        """The number of nodes of each graph."""
        return [part.num_nodes for part in self.parts]

    @cached_property
    def item_sizes(self) -> list[int]:
        """The number of items of each graph."""
        return [part.num_items for part in self.parts]

    @cached_property
    def num_nodes(self) -> int:
        """The number of nodes of all graphs."""
        return sum(self.sizes)

    @cached_property
    def num_items(self) -> int:
        """The number of items of all graphs."""
        return sum(self.item_sizes)

    @property
    def num_features(self) -> int:
        """Width of the features, the same for all graphs."""
        return self.parts[0].num_features

    @cached_property
    def x(self) -> Tensor:
        """The features of all graphs, concatenated."""
        return _joined([part.x for part in self.parts], torch.cat)

    @cached_property
    def batch(self) -> Tensor | None:
        """The item that each node belongs to."""
        if self.parts[0].batch is None:
            return None
        starts = accumulate(self.item_sizes, initial=0)
        return torch.cat(
            [
                part.batch + start
                for part, start in zip(self.parts, starts, strict=False)
                if part.batch is not None
            ]
        )

    def adjacency(self, kind: str = "sym") -> Sparse:
        """Returns the block-diagonal adjacency, one block per graph."""
        return self.cached(
            ("adjacency", kind),
            lambda: _joined([part.adjacency(kind) for part in self.parts], block_diagonal),
        )

    @property
    def sparse_x(self) -> Sparse | None:
        """All features, concatenated, as a sparse matrix, if those of all graphs are sparse."""
        return self._features(vertical_stack)

    def _features(self, put: Callable[[Sequence[Sparse]], Sparse]) -> Sparse | None:
        def make() -> Sparse | None:
            parts = [x for part in self.parts if (x := part.sparse_x) is not None]
            if len(parts) < len(self.parts):
                return None
            if self.group is None:
                return _joined(parts, put)
            name = f"features, {put.__name__}"
            return self.group.cached(name, parts, lambda: _joined(parts, put))

        return self.cached(put, make)

    def _sizes_of(self, h: Tensor) -> list[int]:
        """Returns how many rows of h, which are nodes or items, each graph has."""
        return self.sizes if h.shape[0] == self.num_nodes else self.item_sizes

    # ---- parameters: [in, out] for all graphs, or [graphs, in, out] ----
    def project(self, weight: Tensor) -> Tensor:
        """Returns x @ weight; each graph may have its own weight."""
        sparse = self._features(vertical_stack if weight.dim() == 2 else block_diagonal)
        return (
            self.matmul(self.x)(weight)
            if sparse is None
            else sparse @ weight.reshape(-1, weight.shape[-1])
        )

    def matmul(self, h: Tensor) -> Callable[[Tensor], Tensor]:
        """Returns the function W ↦ h W; each graph may have its own W."""
        sizes = self._sizes_of(h)
        return lambda weight: (
            matmul(h, weight) if weight.dim() == 2 else blockwise(h, weight, sizes)
        )

    def add_bias(self, h: Tensor, vector: Tensor) -> Tensor:
        """Adds a vector to the rows of h, in place; each graph may have its own vector."""
        if vector.dim() == 1:
            return h.add_(vector)
        return _AddBias.apply(h, vector, self._membership(len(h)), self._sizes_of(h))  # type: ignore[no-untyped-call]

    def expand(self, parameter: Tensor, h: Tensor) -> Tensor:
        """Returns a parameter that can be multiplied with h; [graphs, width] becomes rows."""
        return parameter if parameter.dim() == 1 else self._membership(len(h)).transpose @ parameter

    def _membership(self, rows: int) -> Sparse:
        """Returns the matrix [graphs, rows] that says which rows belong to a graph."""
        sizes = self.sizes if rows == self.num_nodes else self.item_sizes
        return self.cached(("membership", rows), lambda: membership(sizes))


def _joined(parts: list[T], put: Callable[[list[T]], T]) -> T:
    """Returns several things put together. A single one is returned as it is, not copied."""
    return parts[0] if len(parts) == 1 else put(parts)


class _AddBias(torch.autograd.Function):
    """`add_to_blocks`, differentiable."""

    @staticmethod
    def forward(ctx, h, vectors, membership, sizes):  # type: ignore[no-untyped-def]
        ctx.membership, ctx.sizes = membership, sizes
        ctx.mark_dirty(h)
        return add_to_blocks(h, vectors.detach(), membership, sizes)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return gradient, sum_of_blocks(gradient, ctx.membership, ctx.sizes), None, None


class ViewStack(GraphStack):
    """Views of several graphs as one.

    It keeps the stack of the whole graphs, masks the columns of each view and leaves out its edges.
    """

    def __init__(self, parts: Sequence[View], whole: GraphStack):
        super().__init__(parts)
        edges = entries(whole)
        for name, value in {
            "whole": whole,
            "kept": torch.cat([part.pairs for part in parts])[edges.pair] | edges.loop,
            "columns": torch.stack([part.columns for part in parts]),
        }.items():
            object.__setattr__(self, name, value)

    whole: GraphStack
    kept: Tensor  # whether an entry of the whole stack's adjacency is left
    columns: Tensor  # [views, features]

    def adjacency(self, kind: str = "sym") -> Sparse:
        """Returns the block-diagonal adjacency, one block per view."""
        return self.cached(
            ("adjacency", kind), lambda: selected_adjacency(self.whole, self.kept, kind)
        )

    def project(self, weight: Tensor) -> Tensor:
        """Returns x @ weight; each view may have its own weight."""
        whole = self.whole._features(block_diagonal)
        if whole is None or weight.dim() == 2:
            return self.whole.project(weight * self.columns.unsqueeze(-1))
        sparse = self.cached("masked features", lambda: Masked(whole, self.columns.flatten()))
        return sparse @ weight.reshape(-1, weight.shape[-1])


class WeightedStack(GraphStack):
    """Graphs with learnt edge weights as one. It keeps the stack of the graphs without them."""

    def __init__(self, parts: Sequence[EdgeWeighted], whole: GraphStack):
        super().__init__(parts)
        weight = parts[0].of_edges(whole, join_rows([part.weight for part in parts]))
        for name, value in {"whole": whole, "weight": weight, "_values": {}}.items():
            object.__setattr__(self, name, value)

    whole: GraphStack
    weight: Tensor  # [edges]
    _values: dict[str, Tensor]

    @property
    def x(self) -> Tensor:
        """The features of all graphs, concatenated."""
        return self.whole.x

    def propagate(self, h: Tensor, kind: str = "sym") -> Tensor:
        """Returns the weighted adjacency times h, differentiable in both."""
        if kind not in self._values:
            self._values[kind] = weighted_entries(self.whole, self.weight, kind)
        return weighted(self.whole.adjacency(kind), self._values[kind], h)

    def adjacency(self, kind: str = "sym") -> Sparse:
        """Returns the adjacency without the learnt weights."""
        return self.whole.adjacency(kind)

    def _features(self, put: Callable[[Sequence[Sparse]], Sparse]) -> Sparse | None:
        return self.whole._features(put)

    def _membership(self, rows: int) -> Sparse:
        return self.whole._membership(rows)


class MendedStack(GraphStack):
    """Mended graphs as one.

    It multiplies by the factors of the generated nodes' features. That takes k × features × width
    products instead of nodes × features × width.
    """

    # A cached product of adjacency and features would not have the factors.
    transient = True

    def __init__(self, parts: Sequence[Mended], whole: GraphStack):
        super().__init__(parts)
        factors = [part.factors for part in parts if part.factors is not None]
        object.__setattr__(self, "whole", whole)
        object.__setattr__(self, "left", torch.cat([left for left, _ in factors]))
        object.__setattr__(self, "right", torch.stack([right for _, right in factors]))
        object.__setattr__(self, "generated", [len(left) for left, _ in factors])

    whole: GraphStack  # the real nodes
    left: Tensor  # [generated nodes, k]
    right: Tensor  # [graphs, k, features]
    generated: list[int]  # the number of generated nodes of each graph

    def project(self, weight: Tensor) -> Tensor:
        """Returns x @ weight; each graph may have its own weight."""
        real = split(self.whole.project(weight), self.whole.sizes)
        made = blockwise(self.left, self.right @ weight, self.generated)
        pairs = zip(real, split(made, self.generated), strict=True)
        return torch.cat([rows for pair in pairs for rows in pair])


def stack_of(graphs: Sequence[Graph], group: Group) -> GraphStack:
    """Returns graphs as one graph, or views as one view. The group caches it."""
    if learnt := [graph for graph in graphs if isinstance(graph, EdgeWeighted)]:
        return WeightedStack(learnt, stack_of([graph.whole for graph in learnt], group))

    def make() -> GraphStack:
        mended = [graph for graph in graphs if isinstance(graph, Mended)]
        if mended:
            return MendedStack(mended, stack_of([graph.real for graph in mended], group))
        views = [graph for graph in graphs if isinstance(graph, View)]
        if views:
            return ViewStack(views, stack_of([view.whole for view in views], group))
        return GraphStack(graphs, group)

    return group.cached("stack", [graph._cache for graph in graphs], make)


# ---- noise ----


class StackedNoise:
    """The random streams of a stack's clients. Each client's rows get noise from its own stream."""

    def __init__(self, streams: Sequence[Generator], stack: GraphStack):
        self.streams, self.stack = streams, stack

    def bytes_like(self, h: Tensor) -> Tensor:
        """Returns random bytes in the shape of h; see `fedloom.nn.layers.random_bytes`."""
        sizes = self.stack._sizes_of(h)
        return random_rows(self.streams, sizes, h.shape[1:].numel()).view(h.shape)


def random_rows(streams: Sequence[Generator], sizes: Sequence[int], width: int) -> Tensor:
    """Returns random bytes [rows, width]. Each client's rows are what its own stream draws.

    Args:
        streams: The random stream of each client.
        sizes: The number of rows of each client.
        width: The bytes of a row.
    """
    counts = [(size * width + 7) // 8 for size in sizes]
    draws = torch.empty(sum(counts), dtype=torch.int64)
    for part, stream in zip(split(draws, counts), streams, strict=True):
        part.random_(-(2**63), None, generator=stream)
    drawn = draws.view(torch.uint8)
    if width % 8:
        pieces = zip(split(drawn, [8 * count for count in counts]), sizes, strict=True)
        drawn = torch.cat([piece[: size * width] for piece, size in pieces])
    return drawn.view(-1, width)
