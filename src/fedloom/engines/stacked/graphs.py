"""Graph stacks: the graphs of several clients as one block-diagonal graph.

A model runs on a `GraphStack` and stacked parameters as it runs on a `Graph` and its own. `project`,
`propagate`, `matmul`, `add_bias` and `expand` are the only places where the two meet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate

import torch
from torch import Generator, Tensor

from fedloom.data.graph import Graph
from fedloom.data.matmul import matmul
from fedloom.data.sparse import Sparse, below_each_other, block_diagonal
from fedloom.engines.stacked.lockstep import Group
from fedloom.engines.stacked.matmul import all_equal, blockwise, in_blocks, split
from fedloom.nn.augment import View

# ---- graphs ----


class GraphStack(Graph):
    """Graphs side by side. Of their fields only what models look at is there: features, edges, and which graph a node is in."""

    def __init__(self, parts: Sequence[Graph]):
        for name, value in {
            "parts": tuple(parts),
            "_cache": {},
            "num_classes": parts[0].num_classes,
            "name": parts[0].name,
        }.items():
            object.__setattr__(self, name, value)

    parts: tuple[Graph, ...]

    @property
    def transient(self) -> bool:  # type: ignore[override]
        """Whether its graphs are."""
        return self.parts[0].transient

    @cached_property
    def sizes(self) -> list[int]:
        """Nodes of each graph."""
        return [part.num_nodes for part in self.parts]

    @cached_property
    def item_sizes(self) -> list[int]:
        """Items of each graph."""
        return [part.num_items for part in self.parts]

    @cached_property
    def num_nodes(self) -> int:
        """Nodes in all."""
        return sum(self.sizes)

    @cached_property
    def num_items(self) -> int:
        """Items in all."""
        return sum(self.item_sizes)

    @property
    def num_features(self) -> int:
        """Width of the features, of which every graph has its own copy."""
        return self.parts[0].num_features

    @cached_property
    def x(self) -> Tensor:
        """All features, one graph's below the other's."""
        return torch.cat([part.x for part in self.parts])

    @cached_property
    def batch(self) -> Tensor | None:
        """Which item a node belongs to."""
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
        """Block-diagonal, a block a graph."""
        return self.cached(
            ("adjacency", kind),
            lambda: block_diagonal([part.adjacency(kind) for part in self.parts]),
        )

    @property
    def sparse_x(self) -> Sparse | None:
        """All features below each other as a sparse matrix. Graphs with dense and with sparse ones are never in one stack."""
        return self._features(below_each_other)

    def _features(self, put: Callable[[Sequence[Sparse]], Sparse]) -> Sparse | None:
        def make() -> Sparse | None:
            parts = [x for part in self.parts if (x := part.sparse_x) is not None]
            return put(parts) if parts else None

        return self.cached(put, make)

    def _sizes_of(self, h: Tensor) -> list[int]:
        """How many of h's rows, nodes or items, are each graph's."""
        return self.sizes if h.shape[0] == self.num_nodes else self.item_sizes

    # ---- where parameters come in: [in, out] for all graphs, or [graphs, in, out] ----
    def project(self, weight: Tensor) -> Tensor:
        """x @ weight, each graph's with its own."""
        sparse = self._features(below_each_other if weight.dim() == 2 else block_diagonal)
        return (
            self.matmul(self.x)(weight)
            if sparse is None
            else sparse @ weight.reshape(-1, weight.shape[-1])
        )

    def matmul(self, h: Tensor) -> Callable[[Tensor], Tensor]:
        """W ↦ h W, each graph's rows with its own W."""
        sizes = self._sizes_of(h)
        return lambda weight: (
            matmul(h, weight) if weight.dim() == 2 else blockwise(h, weight, sizes)
        )

    def add_bias(self, h: Tensor, vector: Tensor) -> Tensor:
        """h itself, with every graph's own vector, or one for all, added to its rows."""
        if vector.dim() == 1:
            return h.add_(vector)
        return _AddBias.apply(h, vector, self._membership(len(h)), self._sizes_of(h))  # type: ignore[no-untyped-call]

    def expand(self, parameter: Tensor, h: Tensor) -> Tensor:
        """A vector for all graphs as it is; [graphs, width] as rows to multiply h's with."""
        return parameter if parameter.dim() == 1 else self._membership(len(h)).transpose @ parameter

    def _membership(self, rows: int) -> Sparse:
        """Which rows are a graph's: [graphs, rows]."""
        sizes = self.sizes if rows == self.num_nodes else self.item_sizes

        def make() -> Sparse:
            owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
            return Sparse.from_edges(
                owner, torch.arange(rows), torch.ones(rows), (len(sizes), rows)
            )

        return self.cached(("membership", rows), make)


class _AddBias(torch.autograd.Function):
    """A vector added, in place, to all rows of a block: takes [rows, ..., width], [blocks, width], which rows are a block's, and how many.

    Blocks of one size are the slices of one tensor; small ones go through a product with what says whose a row is, large ones one by one.
    """

    SMALL = (
        64  # rows of a block, on average, below which a call for each takes longer than the product
    )

    @staticmethod
    def forward(ctx, h, vectors, membership, sizes):  # type: ignore[no-untyped-def]
        ctx.membership, ctx.sizes = membership, sizes
        if all_equal(sizes):
            in_blocks(h, sizes).add_(vectors.unsqueeze(1))
        elif len(h) < _AddBias.SMALL * len(sizes):
            h.add_(
                (membership.transpose @ vectors.detach()).view(len(h), *(1,) * (h.dim() - 2), -1)
            )
        else:
            for block, vector in zip(split(h, sizes), vectors.unbind(), strict=True):
                block.add_(vector)
        ctx.mark_dirty(h)
        return h

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        membership, sizes, axes = ctx.membership, ctx.sizes, tuple(range(gradient.dim() - 1))
        # `sum` is more exact than a product with ones, and a bias's gradient may be what is left of large terms.
        if all_equal(sizes):
            added = in_blocks(gradient.contiguous(), sizes).sum(1)
        elif gradient.dim() == 2 and len(gradient) < _AddBias.SMALL * len(sizes):
            added = membership @ gradient
        else:
            added = torch.stack([block.sum(axes) for block in split(gradient, sizes)])
        return gradient, added, None, None


class ViewStack(GraphStack):
    """Views of many graphs as one: the graphs' own stack, which is kept, with each view's columns masked and its edges left out."""

    def __init__(self, parts: Sequence[View], whole: GraphStack):
        super().__init__(parts)
        object.__setattr__(self, "whole", whole)
        object.__setattr__(
            self, "columns", torch.stack([part.columns for part in parts]).unsqueeze(-1)
        )

    whole: GraphStack
    columns: Tensor  # [views, features, 1]

    def project(self, weight: Tensor) -> Tensor:
        """x @ weight, each view's with its own."""
        return self.whole.project(weight * self.columns)


def stack_of(graphs: Sequence[Graph], group: Group) -> GraphStack:
    """Returns graphs as one graph, or views as one view; made once for the same graphs."""

    def make() -> GraphStack:
        views = [graph for graph in graphs if isinstance(graph, View)]
        if views:
            return ViewStack(views, stack_of([view.whole for view in views], group))
        return GraphStack(graphs)

    return group.cached("stack", [graph._cache for graph in graphs], make)


# ---- noise ----


class StackedNoise:
    """The random streams of a stack's clients: everybody's rows get noise from its own, the same as if it were alone."""

    def __init__(self, streams: Sequence[Generator], stack: GraphStack):
        self.streams, self.stack = streams, stack

    def bytes_like(self, h: Tensor) -> Tensor:
        """Random bytes in h's shape; see `fedloom.nn.layers.random_bytes`."""
        sizes = self.stack._sizes_of(h)
        width = h.shape[1:].numel()
        counts = [(size * width + 7) // 8 for size in sizes]
        draws = torch.empty(sum(counts), dtype=torch.int64)
        for part, stream in zip(split(draws, counts), self.streams, strict=True):
            part.random_(-(2**63), None, generator=stream)
        drawn = draws.view(torch.uint8)
        if len(drawn) != h.numel():
            pieces = zip(split(drawn, [8 * count for count in counts]), sizes, strict=True)
            drawn = torch.cat([piece[: size * width] for piece, size in pieces])
        return drawn.view(h.shape)
