"""Products and sums in which each block of rows has its own matrix or vector."""

from __future__ import annotations

import torch
from torch import Tensor

from fedloom.data.matmul import NARROW, columns_first
from fedloom.data.sparse import Sparse, multiply

split = torch.split_with_sizes  # what `Tensor.split` calls, without its checks


def blockwise(h: Tensor, weights: Tensor, sizes: list[int]) -> Tensor:
    """Multiplies each block of rows by its own matrix.

    Takes [rows, ..., in], [blocks, in, out] and the number of rows of each block. Returns
    [rows, ..., out].
    """
    return _Blockwise.apply(h, weights, sizes)  # type: ignore[no-untyped-call]


class _Blockwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, weights, sizes):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(h, weights)
        ctx.sizes = sizes
        return blocks_times(h.detach(), weights.detach(), sizes)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        (h, weights), sizes = ctx.saved_tensors, ctx.sizes
        to_h, to_weights, _ = ctx.needs_input_grad
        return (
            blocks_times(gradient, weights.transpose(1, 2), sizes) if to_h else None,
            outer_by_block(h, gradient, sizes) if to_weights else None,
            None,
        )


def outer_product(h: Tensor, g: Tensor, sizes: list[int]) -> Tensor:
    """Multiplies the transpose of each block of rows of h by the same block of g.

    Takes [rows, in], [rows, out] and the number of rows of each block. Returns [blocks, in, out].
    """
    return _Outer.apply(h, g, sizes)  # type: ignore[no-untyped-call]


class _Outer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, g, sizes):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(h, g)
        ctx.sizes = sizes
        return outer_by_block(h.detach(), g.detach(), sizes)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        (h, g), sizes = ctx.saved_tensors, ctx.sizes
        to_h, to_g, _ = ctx.needs_input_grad
        return (
            blocks_times(g, gradient.transpose(1, 2), sizes) if to_h else None,
            blocks_times(h, gradient, sizes) if to_g else None,
            None,
        )


def blocks_times(h: Tensor, weights: Tensor, sizes: list[int]) -> Tensor:
    """`blockwise`, not differentiable."""
    width = weights.shape[2]
    flat, inner = h.reshape(-1, h.shape[-1]), h.shape[1:-1].numel()
    narrow = width < NARROW <= h.shape[-1]
    if narrow and h.dim() == 2 and not all_equal(sizes):
        out = columns_first(len(h), width, h)
        for block, own, into in zip(
            split(flat, sizes), weights.unbind(), split(out.t(), sizes, 1), strict=True
        ):
            torch.mm(own.t(), block.t(), out=into)
        return out
    out = h.new_empty(*h.shape[:-1], width)
    if all_equal(sizes):
        rows, into = in_blocks(flat, sizes), in_blocks(out, sizes)
        if narrow:
            into.copy_(torch.bmm(weights.transpose(1, 2), rows.transpose(1, 2)).transpose(1, 2))
        else:
            torch.bmm(rows, weights, out=into)
        return out
    spans = [size * inner for size in sizes]
    for block, own, into in zip(
        split(flat, spans), weights.unbind(), split(out.view(-1, width), spans), strict=True
    ):
        torch.mm(block, own, out=into)
    return out


def outer_by_block(h: Tensor, gradient: Tensor, sizes: list[int]) -> Tensor:
    """Returns hᵀ g of each block.

    Takes [rows, ..., in] and [rows, ..., out]. Returns [blocks, in, out].
    """
    left, right = (t.reshape(-1, t.shape[-1]) for t in (h, gradient))
    narrow = right.shape[1] < NARROW <= left.shape[1]
    if narrow:
        left, right = right, left
    blocks, inner = len(sizes), h.shape[1:-1].numel()
    if all_equal(sizes):
        out = torch.bmm(in_blocks(left, sizes).transpose(1, 2), in_blocks(right, sizes))
    else:
        out = h.new_empty(blocks, left.shape[1], right.shape[1])
        spans = [size * inner for size in sizes]
        for a, b, into in zip(split(left, spans), split(right, spans), out.unbind(), strict=True):
            torch.mm(a.t(), b, out=into)
    return out.transpose(1, 2).contiguous() if narrow else out


def all_equal(sizes: list[int]) -> bool:
    """Returns whether all blocks have the same number of rows."""
    return sizes.count(sizes[0]) == len(sizes)


def in_blocks(h: Tensor, sizes: list[int]) -> Tensor:
    """Divides the rows of a contiguous tensor into blocks of one size.

    Takes [rows, ..., width]. Returns a view [blocks, rows of a block, width].
    """
    return h.view(len(sizes), h.shape[:-1].numel() // len(sizes), h.shape[-1])


# ---- vectors ----

SMALL = 64  # mean rows of a block, below which a sparse product is faster than a call per block


def membership(sizes: list[int]) -> Sparse:
    """Returns the matrix [blocks, rows] that says which rows belong to a block."""
    rows = sum(sizes)
    owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return Sparse.from_edges(owner, torch.arange(rows), torch.ones(rows), (len(sizes), rows))


def add_to_blocks(h: Tensor, vectors: Tensor, members: Sparse, sizes: list[int]) -> Tensor:
    """Adds a vector to all rows of a block, in place. It is not differentiable.

    Blocks of one size are slices of one tensor. Small blocks use a product with the membership
    matrix. Large blocks are processed one by one.

    Args:
        h: [rows, ..., width].
        vectors: [blocks, width].
        members: The membership matrix.
        sizes: The rows of each block.
    """
    if all_equal(sizes):
        in_blocks(h, sizes).add_(vectors.unsqueeze(1))
    elif len(h) < SMALL * len(sizes):
        added = multiply(members.transpose, vectors)
        h.add_(added.view(len(h), *(1,) * (h.dim() - 2), -1))
    else:
        for block, vector in zip(split(h, sizes), vectors.unbind(), strict=True):
            block.add_(vector)
    return h


def sum_of_blocks(h: Tensor, members: Sparse, sizes: list[int]) -> Tensor:
    """Returns the sum of the rows of each block; see `add_to_blocks`. It is not differentiable."""
    # `sum` is more exact than a product with ones. The gradient of a bias may be a small
    # difference of large terms.
    if all_equal(sizes):
        return in_blocks(h.contiguous(), sizes).sum(1)
    if h.dim() == 2 and len(h) < SMALL * len(sizes):
        return multiply(members, h)
    return torch.stack([block.sum(tuple(range(h.dim() - 1))) for block in split(h, sizes)])
