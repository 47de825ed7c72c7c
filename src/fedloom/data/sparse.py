"""Sparse matrices that multiply dense ones, quickly: with constant entries, or (`weighted`) with entries that are variables.

`F.embedding_bag` in sum mode *is* a CSR product, and on CPU the fastest one PyTorch ships; its backward here is the same call with
the transpose, so no edge-sized buffer of rows is ever made. int32 indices halve the memory traffic.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate, repeat

import numpy as np
import torch
import torch.nn.functional as F
from scipy.sparse import csc_matrix, csr_matrix
from torch import Tensor

# PyTorch says so of the first such tensor; `_Entries` hands one to a single, tested function.
warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta", UserWarning)


class Sparse:
    """A sparse matrix in CSR form. Built once, multiplied often; entries are constants (no gradient reaches them)."""

    def __init__(self, offsets: Tensor, indices: Tensor, values: Tensor, shape: tuple[int, int]):
        self.offsets, self.indices, self.values, self.shape = offsets, indices, values, shape
        self._stacks: dict[int, tuple[Tensor, Tensor]] = {1: (offsets, indices)}

    @classmethod
    def from_edges(cls, row: Tensor, col: Tensor, values: Tensor, shape: tuple[int, int]) -> Sparse:
        """Takes coordinate triplets in any order (repeated coordinates add up in products) and gives the matrix."""
        order = torch.argsort(
            row * shape[1] + col, stable=True
        )  # repeated ones add up in the order given
        offsets = torch.zeros(shape[0] + 1, dtype=torch.int64)
        torch.cumsum(torch.bincount(row, minlength=shape[0]), 0, out=offsets[1:])
        index_type = _index_type(shape[1], len(values))
        return cls(offsets.to(index_type), col[order].to(index_type), values[order].float(), shape)

    @classmethod
    def from_dense(cls, matrix: Tensor) -> Sparse:
        """The non-zero entries of a dense matrix."""
        row, col = matrix.nonzero(as_tuple=True)
        return cls.from_edges(row, col, matrix[row, col], (matrix.shape[0], matrix.shape[1]))

    @property
    def nnz(self) -> int:
        """Number of stored entries."""
        return len(self.values)

    @cached_property
    def rows(self) -> Tensor:
        """Row index of every stored entry (int64), in storage order."""
        counts = self.offsets[1:] - self.offsets[:-1]
        return torch.repeat_interleave(torch.arange(self.shape[0]), counts.long())

    @cached_property
    def _by_column(self) -> csc_matrix:
        """The entries' positions, put in order of columns: by counting, a quarter of a sort's time."""
        return csr_matrix(
            (np.arange(self.nnz), self.indices.numpy(), self.offsets.numpy()), self.shape
        ).tocsc()

    @cached_property
    def order(self) -> Tensor:
        """Where the transpose's entries are stored here (int64): `transpose.values` is `values[order]`."""
        return torch.from_numpy(self._by_column.data)

    @cached_property
    def transpose(self) -> Sparse:
        """The transposed matrix."""
        offsets, indices = (
            torch.from_numpy(t).to(self.indices.dtype)
            for t in (self._by_column.indptr, self._by_column.indices)
        )
        return Sparse(offsets, indices, self.values[self.order], (self.shape[1], self.shape[0]))

    def stacked(self, copies: int) -> tuple[Tensor, Tensor]:
        """Offsets and indices of the block-diagonal matrix that holds this one's places `copies` times."""
        if copies not in self._stacks:
            index_type = _index_type(copies * self.shape[1], copies * self.nnz)
            block = torch.arange(copies, dtype=index_type).unsqueeze(1)
            starts, end = (
                self.offsets[:-1] + block * self.nnz,
                torch.tensor([copies * self.nnz], dtype=index_type),
            )
            self._stacks[copies] = (
                torch.cat([starts.flatten(), end]),
                (self.indices + block * self.shape[1]).flatten(),
            )
        return self._stacks[copies]

    def dense(self) -> Tensor:
        """The same matrix as a dense tensor."""
        full = torch.zeros(self.shape)
        return full.index_put((self.rows, self.indices.long()), self.values, accumulate=True)

    def __matmul__(self, dense: Tensor) -> Tensor:
        """`self @ dense` for a dense [columns, width] tensor; differentiable in `dense`."""
        _check(self, dense)
        return _Product.apply(dense, self)  # type: ignore[no-untyped-call]


class _Blocks(Sparse):
    """A block-diagonal matrix; its transpose is made of the blocks', which may be known."""

    blocks: Sequence[Sparse]

    @cached_property
    def transpose(self) -> Sparse:
        """The transposed matrix."""
        return block_diagonal([block.transpose for block in self.blocks])


def block_diagonal(blocks: Sequence[Sparse]) -> Sparse:
    """One matrix with the given ones along its diagonal."""
    shape = (sum(b.shape[0] for b in blocks), sum(b.shape[1] for b in blocks))
    made = _Blocks(*_put_below(blocks, accumulate((b.shape[1] for b in blocks), initial=0)), shape)
    made.blocks = blocks
    return made


def below_each_other(blocks: Sequence[Sparse]) -> Sparse:
    """One matrix with the rows of all the given ones, which are equally wide."""
    return Sparse(
        *_put_below(blocks, repeat(0)), (sum(b.shape[0] for b in blocks), blocks[0].shape[1])
    )


def _put_below(
    blocks: Sequence[Sparse], first_columns: Iterable[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Offsets, indices and values of matrices put below each other, each with its columns moved to where they begin."""
    starts = list(accumulate((b.nnz for b in blocks), initial=0))
    index_type = _index_type(sum(b.shape[1] for b in blocks), starts[-1])
    offsets = [
        b.offsets[:-1].to(index_type) + start for b, start in zip(blocks, starts, strict=False)
    ]
    indices = [
        b.indices.to(index_type) + first for b, first in zip(blocks, first_columns, strict=False)
    ]
    end = torch.tensor(starts[-1:], dtype=index_type)
    return torch.cat([*offsets, end]), torch.cat(indices), torch.cat([b.values for b in blocks])


def weighted(matrix: Sparse, values: Tensor, dense: Tensor) -> Tensor:
    """`matrix @ dense` with `values` for the matrix's own entries; differentiable in both.

    Takes [..., nnz] in storage order and [..., columns, width], gives [..., rows, width]: a product for each of the leading indices.
    """
    _check(matrix, dense)
    if values.shape != (*dense.shape[:-2], matrix.nnz):
        raise ValueError(
            f"values of shape {list(values.shape)} for {matrix.nnz} entries and a {list(dense.shape)} tensor"
        )
    return _Weighted.apply(values, dense, matrix)  # type: ignore[no-untyped-call]


def _entries(matrix: Sparse, left: Tensor, right: Tensor) -> Tensor:
    """The entries of left @ rightᵀ at the matrix's places: takes [..., rows, width] and [..., columns, width], gives [..., nnz]."""
    return _Entries.apply(left, right, matrix)  # type: ignore[no-untyped-call]


def _check(matrix: Sparse, dense: Tensor) -> None:
    if dense.dim() < 2 or dense.shape[-2] != matrix.shape[1]:
        raise ValueError(
            f"a {list(matrix.shape)} matrix does not multiply a {list(dense.shape)} tensor"
        )


def _index_type(*sizes: int) -> torch.dtype:
    return torch.int32 if max(sizes) < 2**31 else torch.int64


def _multiply(places: tuple[Tensor, Tensor], values: Tensor, dense: Tensor) -> Tensor:
    offsets, indices = places
    if len(indices) == 0:
        return dense.new_zeros(len(offsets) - 1, dense.shape[1])
    # As `F.embedding_bag` calls it: sums (mode 0), gradients that are not sparse, the last offset given.
    return torch.embedding_bag(
        dense.contiguous(), indices, offsets, False, 0, False, values.to(dense.dtype), True
    )[0]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, dense, matrix):  # type: ignore[no-untyped-def]
        ctx.matrix = matrix
        # Detached, or embedding_bag would note every entry's row for a backward of its own.
        return _multiply(matrix.stacked(1), matrix.values, dense.detach())

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        transpose = ctx.matrix.transpose
        return _multiply(transpose.stacked(1), transpose.values, gradient), None


# The next two are each other's derivative.


class _Weighted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, dense, matrix):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(values, dense)
        ctx.matrix = matrix
        lead, width = dense.shape[:-2], dense.shape[-1]
        product = _multiply(
            matrix.stacked(lead.numel()), values.detach().flatten(), dense.detach().flatten(0, -2)
        )
        return (
            product.view(*lead, matrix.shape[0], width) if lead else product
        )  # nobody may write to a view

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        (values, dense), matrix = ctx.saved_tensors, ctx.matrix
        to_values, to_dense, _ = ctx.needs_input_grad
        return (
            _entries(matrix, gradient, dense) if to_values else None,
            weighted(matrix.transpose, values.index_select(-1, matrix.order), gradient)
            if to_dense
            else None,
            None,
        )


class _Entries(torch.autograd.Function):
    @staticmethod
    def forward(ctx, left, right, matrix):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(left, right)
        ctx.matrix = matrix
        lead, (rows, columns) = left.shape[:-2], matrix.shape
        if (
            matrix.nnz > rows * columns
        ):  # entries repeated so often that PyTorch's own matrix would not hold them
            return (
                left.index_select(-2, matrix.rows) * right.index_select(-2, matrix.indices)
            ).sum(-1)
        copies = lead.numel()
        zeros, (offsets, indices) = left.new_zeros(copies * matrix.nnz), matrix.stacked(copies)
        places = torch.sparse_csr_tensor(
            offsets, indices, zeros, (copies * rows, copies * columns), check_invariants=False
        )
        if (
            short := -left.shape[-1] % 8
        ):  # rows that end inside a vector register take six times as long
            left, right = F.pad(left, (0, short)), F.pad(right, (0, short))
        left, right = left.contiguous().flatten(0, -2), right.contiguous().flatten(0, -2)
        torch.sparse.sampled_addmm(
            places, left, right.t(), out=places
        )  # onto itself, or it would first copy places and values
        return places.values().view(*lead, matrix.nnz)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        (left, right), matrix = ctx.saved_tensors, ctx.matrix
        to_left, to_right, _ = ctx.needs_input_grad
        return (
            weighted(matrix, gradient, right) if to_left else None,
            weighted(matrix.transpose, gradient.index_select(-1, matrix.order), left)
            if to_right
            else None,
            None,
        )
