"""Constant sparse matrices that multiply dense ones, quickly, with a gradient to the dense side only.

`F.embedding_bag` in sum mode *is* a CSR product, and on CPU the fastest one PyTorch ships; its backward here is the same call with
the transpose, so no edge-sized buffer is ever made. int32 indices halve the memory traffic.
"""

from __future__ import annotations

from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor


class Sparse:
    """A sparse matrix in CSR form. Built once, multiplied often; entries are constants (no gradient reaches them)."""

    def __init__(self, offsets: Tensor, indices: Tensor, values: Tensor, shape: tuple[int, int]):
        self.offsets, self.indices, self.values, self.shape = offsets, indices, values, shape

    @classmethod
    def from_edges(cls, row: Tensor, col: Tensor, values: Tensor, shape: tuple[int, int]) -> Sparse:
        """Takes coordinate triplets in any order (repeated coordinates add up in products) and gives the matrix."""
        order = torch.argsort(row * shape[1] + col, stable=True)  # repeated ones add up in the order given
        offsets = torch.zeros(shape[0] + 1, dtype=torch.int64)
        torch.cumsum(torch.bincount(row, minlength=shape[0]), 0, out=offsets[1:])
        small = max(shape[1], len(values)) < 2**31
        index_type = torch.int32 if small else torch.int64
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
    def transpose(self) -> Sparse:
        """The transposed matrix."""
        return Sparse.from_edges(self.indices.long(), self.rows, self.values, (self.shape[1], self.shape[0]))

    def dense(self) -> Tensor:
        """The same matrix as a dense tensor."""
        full = torch.zeros(self.shape)
        return full.index_put((self.rows, self.indices.long()), self.values, accumulate=True)

    def __matmul__(self, dense: Tensor) -> Tensor:
        """`self @ dense` for a dense [columns, width] tensor; differentiable in `dense`."""
        if dense.shape[0] != self.shape[1]:
            raise ValueError(f"a {list(self.shape)} matrix does not multiply a {list(dense.shape)} tensor")
        return _Product.apply(dense, self)  # type: ignore[no-untyped-call]


def _multiply(matrix: Sparse, dense: Tensor) -> Tensor:
    if matrix.nnz == 0:
        return dense.new_zeros(matrix.shape[0], dense.shape[1])
    return F.embedding_bag(
        matrix.indices,
        dense.contiguous(),
        matrix.offsets,
        mode="sum",
        per_sample_weights=matrix.values.to(dense.dtype),
        include_last_offset=True,
    )


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, dense, matrix):  # type: ignore[no-untyped-def]
        ctx.matrix = matrix
        return _multiply(matrix, dense)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return _multiply(ctx.matrix.transpose, gradient), None
