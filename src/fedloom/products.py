"""Dense products, h W, in the order that BLAS is quick at: one matrix for all rows, or one for each block of rows.

Few columns are what BLAS is slow at: for 2,708 rows, 64 columns and 7 classes it takes Wᵀ hᵀ in a quarter of h W's time, and (gᵀ h)ᵀ in a
fifth of hᵀ g's.
"""

from __future__ import annotations

import torch
from torch import Tensor

NARROW = 16  # columns below which the other order is quicker
FEW = 128  # rows below which nothing is gained
split = torch.split_with_sizes  # what `Tensor.split` comes to, without its checks


def product(h: Tensor, weight: Tensor) -> Tensor:
    """h @ weight: takes [rows, ..., in] and [in, out], gives [rows, ..., out]."""
    if weight.shape[1] < NARROW and h.dim() == 2 and len(h) >= FEW:
        return _Narrow.apply(h, weight)  # type: ignore[no-untyped-call]
    return h @ weight


def blockwise(h: Tensor, weights: Tensor, sizes: list[int]) -> Tensor:
    """Every block of rows times its own matrix: takes [rows, ..., in], [blocks, in, out] and the blocks' sizes; gives [rows, ..., out]."""
    return _Blockwise.apply(h, weights, sizes)  # type: ignore[no-untyped-call]


class _Narrow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, weight):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(h, weight)
        out = _columns_first(len(h), weight.shape[1], h)
        torch.mm(weight.t(), h.t(), out=out.t())
        return out

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        h, weight = ctx.saved_tensors
        to_h, to_weight = ctx.needs_input_grad
        return gradient @ weight.t() if to_h else None, (gradient.t() @ h).t() if to_weight else None


class _Blockwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, weights, sizes):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(h, weights)
        ctx.sizes = sizes
        return _by_block(h.detach(), weights.detach(), sizes)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        (h, weights), sizes = ctx.saved_tensors, ctx.sizes
        to_h, to_weights, _ = ctx.needs_input_grad
        return (
            _by_block(gradient, weights.transpose(1, 2), sizes) if to_h else None,
            _outer_by_block(h, gradient, sizes) if to_weights else None,
            None,
        )


def _by_block(h: Tensor, weights: Tensor, sizes: list[int]) -> Tensor:
    width = weights.shape[2]
    flat, inner = h.reshape(-1, h.shape[-1]), h.shape[1:-1].numel()
    narrow = width < NARROW <= h.shape[-1]
    if narrow and h.dim() == 2 and not equal(sizes):
        out = _columns_first(len(h), width, h)
        for block, own, into in zip(split(flat, sizes), weights.unbind(), split(out.t(), sizes, 1), strict=True):
            torch.mm(own.t(), block.t(), out=into)
        return out
    out = h.new_empty(*h.shape[:-1], width)
    if equal(sizes):
        rows, into = in_blocks(flat, sizes), in_blocks(out, sizes)
        if narrow:
            into.copy_(torch.bmm(weights.transpose(1, 2), rows.transpose(1, 2)).transpose(1, 2))
        else:
            torch.bmm(rows, weights, out=into)
        return out
    spans = [size * inner for size in sizes]
    for block, own, into in zip(split(flat, spans), weights.unbind(), split(out.view(-1, width), spans), strict=True):
        torch.mm(block, own, out=into)
    return out


def _columns_first(rows: int, columns: int, like: Tensor) -> Tensor:
    """A matrix without values whose transpose is contiguous. No view of another, which nobody could then write to."""
    return torch.empty_strided((rows, columns), (1, rows), dtype=like.dtype)


def _outer_by_block(h: Tensor, gradient: Tensor, sizes: list[int]) -> Tensor:
    """hᵀ g of each block: takes [rows, ..., in] and [rows, ..., out], gives [blocks, in, out]."""
    left, right = (t.reshape(-1, t.shape[-1]) for t in (h, gradient))
    narrow = right.shape[1] < NARROW <= left.shape[1]
    if narrow:
        left, right = right, left
    blocks, inner = len(sizes), h.shape[1:-1].numel()
    if equal(sizes):
        out = torch.bmm(in_blocks(left, sizes).transpose(1, 2), in_blocks(right, sizes))
    else:
        out = h.new_empty(blocks, left.shape[1], right.shape[1])
        spans = [size * inner for size in sizes]
        for a, b, into in zip(split(left, spans), split(right, spans), out.unbind(), strict=True):
            torch.mm(a.t(), b, out=into)
    return out.transpose(1, 2).contiguous() if narrow else out


def equal(sizes: list[int]) -> bool:
    """Whether all blocks have the same number of rows."""
    return sizes.count(sizes[0]) == len(sizes)


def in_blocks(h: Tensor, sizes: list[int]) -> Tensor:
    """Rows of a contiguous tensor in blocks of one size: takes [rows, ..., width], gives a view [blocks, rows of a block, width]."""
    return h.view(len(sizes), h.shape[:-1].numel() // len(sizes), h.shape[-1])
