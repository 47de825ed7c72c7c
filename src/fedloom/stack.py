"""Stacks: many clients' graphs as one block-diagonal graph, their models' parameters as one tensor with a row a client.

What a model does with a `Graph` and its parameters it does with a `Stack` and stacked parameters in the same words: `project`, `propagate`,
`product`, `shift` and `spread` are all that ever brings the two together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate

import torch
from torch import Generator, Tensor

from fedloom.graph import Graph
from fedloom.products import blockwise, equal, in_blocks, product, split
from fedloom.sparse import Sparse, below_each_other, block_diagonal

# ---- graphs ----


class Stack(Graph):
    """Graphs side by side. Of their fields only what models look at is there: features, edges, and which graph a node is in."""

    def __init__(self, parts: Sequence[Graph]):
        for name, value in {"parts": tuple(parts), "_known": {}, "num_classes": parts[0].num_classes, "name": parts[0].name}.items():
            object.__setattr__(self, name, value)

    parts: tuple[Graph, ...]

    @property
    def fleeting(self) -> bool:  # type: ignore[override]
        """Whether its graphs are."""
        return self.parts[0].fleeting

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
        return torch.cat([part.batch + start for part, start in zip(self.parts, starts, strict=False) if part.batch is not None])

    def adjacency(self, kind: str = "sym") -> Sparse:
        """Block-diagonal, a block a graph."""
        return self.once(("adjacency", kind), lambda: block_diagonal([part.adjacency(kind) for part in self.parts]))

    @property
    def sparse_x(self) -> Sparse | None:
        """All features below each other as a sparse matrix. Graphs with dense and with sparse ones are never in one stack."""
        return self._features(below_each_other)

    def _features(self, put: Callable[[Sequence[Sparse]], Sparse]) -> Sparse | None:
        def make() -> Sparse | None:
            parts = [x for part in self.parts if (x := part.sparse_x) is not None]
            return put(parts) if parts else None

        return self.once(put, make)

    def _sizes_of(self, h: Tensor) -> list[int]:
        """How many of h's rows, nodes or items, are each graph's."""
        return self.sizes if h.shape[0] == self.num_nodes else self.item_sizes

    # ---- where parameters come in: [in, out] for all graphs, or [graphs, in, out] ----
    def project(self, weight: Tensor) -> Tensor:
        """x @ weight, each graph's with its own."""
        sparse = self._features(below_each_other if weight.dim() == 2 else block_diagonal)
        return self.product(self.x)(weight) if sparse is None else sparse @ weight.reshape(-1, weight.shape[-1])

    def product(self, h: Tensor) -> Callable[[Tensor], Tensor]:
        """W ↦ h W, each graph's rows with its own W."""
        sizes = self._sizes_of(h)
        return lambda weight: product(h, weight) if weight.dim() == 2 else blockwise(h, weight, sizes)

    def shift(self, h: Tensor, vector: Tensor) -> Tensor:
        """h itself, with every graph's own vector, or one for all, added to its rows."""
        if vector.dim() == 1:
            return h.add_(vector)
        return _Shifted.apply(h, vector, self._membership(len(h)), self._sizes_of(h))  # type: ignore[no-untyped-call]

    def spread(self, parameter: Tensor, h: Tensor) -> Tensor:
        """A vector for all graphs as it is; [graphs, width] as rows to multiply h's with."""
        return parameter if parameter.dim() == 1 else self._membership(len(h)).transpose @ parameter

    def _membership(self, rows: int) -> Sparse:
        """Which rows are a graph's: [graphs, rows]."""
        sizes = self.sizes if rows == self.num_nodes else self.item_sizes

        def make() -> Sparse:
            owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
            return Sparse.from_edges(owner, torch.arange(rows), torch.ones(rows), (len(sizes), rows))

        return self.once(("membership", rows), make)


class _Shifted(torch.autograd.Function):
    """A vector added, in place, to all rows of a block: takes [rows, ..., width], [blocks, width], which rows are a block's, and how many.

    Blocks of one size are the slices of one tensor; small ones go through a product with what says whose a row is, large ones one by one.
    """

    SMALL = 64  # rows of a block, on average, below which a call for each takes longer than the product

    @staticmethod
    def forward(ctx, h, vectors, membership, sizes):  # type: ignore[no-untyped-def]
        ctx.membership, ctx.sizes = membership, sizes
        if equal(sizes):
            in_blocks(h, sizes).add_(vectors.unsqueeze(1))
        elif len(h) < _Shifted.SMALL * len(sizes):
            h.add_((membership.transpose @ vectors.detach()).view(len(h), *(1,) * (h.dim() - 2), -1))
        else:
            for block, vector in zip(split(h, sizes), vectors.unbind(), strict=True):
                block.add_(vector)
        ctx.mark_dirty(h)
        return h

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        membership, sizes, axes = ctx.membership, ctx.sizes, tuple(range(gradient.dim() - 1))
        # `sum` is more exact than a product with ones, and a bias's gradient may be what is left of large terms.
        if equal(sizes):
            added = in_blocks(gradient.contiguous(), sizes).sum(1)
        elif gradient.dim() == 2 and len(gradient) < _Shifted.SMALL * len(sizes):
            added = membership @ gradient
        else:
            added = torch.stack([block.sum(axes) for block in split(gradient, sizes)])
        return gradient, added, None, None


# ---- noise ----


class Streams:
    """The random streams of a stack's clients: everybody's rows get noise from its own, the same as if it were alone."""

    def __init__(self, streams: Sequence[Generator], stack: Stack):
        self.streams, self.stack = streams, stack

    def bytes_like(self, h: Tensor) -> Tensor:
        """Random bytes in h's shape; see `models.random_bytes`."""
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


# ---- what many clients have, in one tensor ----


class _Whole:
    """A tensor of which clients have consecutive parts."""

    __slots__ = ("count", "tensor")

    def __init__(self, tensor: Tensor, count: int):
        self.tensor, self.count = tensor, count


def parted(whole: Tensor, sizes: list[int] | None = None) -> list[Tensor]:
    """Takes one tensor of all clients, gives each one's rows (`sizes` of them, or one each, without its axis)."""
    parts = list(whole.unbind() if sizes is None else split(whole, sizes))
    if whole.requires_grad:
        whole.register_hook(_only_together)
    origin = _Whole(whole, len(parts))
    for k, part in enumerate(parts):
        part._part = (origin, k)  # type: ignore[attr-defined]
    return parts


def whole_of(parts: Sequence[Tensor]) -> Tensor | None:
    """The tensor of which these are all the parts, in order, if there is one."""
    origin, _ = getattr(parts[0], "_part", (None, 0))
    if origin is None or origin.count != len(parts):
        return None
    complete = all(getattr(part, "_part", None) == (origin, k) for k, part in enumerate(parts))
    return origin.tensor if complete else None


def joined(parts: Sequence[Tensor]) -> Tensor:
    """All rows in one tensor, without a copy if they are in one already."""
    whole = whole_of(parts)
    return torch.cat(list(parts)) if whole is None else whole


def copies(tensor: Tensor, count: int) -> list[Tensor]:
    """Copies for so many receivers, of which nobody sees what another writes; one that is only read costs nothing."""
    made = [tensor._lazy_clone() for _ in range(count)]
    for copy in made:
        copy._copy_of = tensor  # type: ignore[attr-defined]
    return made


def common(tensors: Sequence[Tensor]) -> Tensor | None:
    """The tensor of which all these are copies that nobody has written to, if there is one."""
    source = getattr(tensors[0], "_copy_of", None)
    if source is None or any(getattr(t, "_copy_of", None) is not source or t._version for t in tensors):
        return None
    return source


# ---- gradients of what many computed at once ----


class _Pass(threading.local):
    """Whether the backward pass under way is one of all clients."""

    together = False


_pass = _Pass()


def _only_together(gradient: Tensor) -> None:
    if not _pass.together:
        raise RuntimeError(
            "a phase differentiates by itself what was computed for several clients at once: use fedloom.learn.step or "
            "fedloom.learn.backward, or run.engine = 'loop'"
        )


def backward(roots: Sequence[Tensor], gradients: Sequence[Tensor | None], keep: bool) -> None:
    """A backward pass from many clients' tensors. keep: somebody who is not among them may still need what it went through."""
    whole = whole_of(roots)
    # Unless all begin from one tensor, one may begin elsewhere, and come back to what it shares with the others.
    keep = keep or (whole is None and len(roots) > 1)
    _pass.together = True
    try:
        if whole is not None and all(g is None for g in gradients):
            whole.backward(torch.ones_like(whole), retain_graph=keep)
        else:
            torch.autograd.backward(list(roots), list(gradients), retain_graph=keep)
    finally:
        _pass.together = False
