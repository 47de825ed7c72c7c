"""Fast products of sparse and dense matrices.

The entries of a `Sparse` matrix are constants. `weighted` multiplies with entries that are
variables.

`F.embedding_bag` in sum mode is a CSR product, and it is the fastest one that PyTorch has on CPUs.
The backward pass here is the same call with the transpose, so no buffer has one row per edge. int32
indices halve the memory traffic.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate, repeat
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from scipy.sparse import csc_matrix

# PyTorch warns about the first CSR tensor. `_Entries` passes one to a single function, which the
# tests cover.
warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta", UserWarning)


class Sparse:
    """A sparse matrix in CSR form with constant entries, which receive no gradient.

    Attributes:
        offsets: The first entry of each row, and the number of entries, [rows + 1].
        indices: Each entry's column, [nnz].
        values: The entries, [nnz].
        shape: Rows and columns.
    """

    def __init__(self, offsets: Tensor, indices: Tensor, values: Tensor, shape: tuple[int, int]):
        self.offsets, self.indices, self.values, self.shape = offsets, indices, values, shape
        self._stacks: dict[int, tuple[Tensor, Tensor]] = {1: (offsets, indices)}

    @classmethod
    def from_edges(cls, row: Tensor, col: Tensor, values: Tensor, shape: tuple[int, int]) -> Sparse:
        """Returns the matrix with the given coordinates, which may be in any order.

        Products add up the values of repeated coordinates, in the order given.
        """
        order = torch.argsort(row * shape[1] + col, stable=True)
        offsets = torch.zeros(shape[0] + 1, dtype=torch.int64)
        torch.cumsum(torch.bincount(row, minlength=shape[0]), 0, out=offsets[1:])
        index_type = _index_type(shape[1], len(values))
        return cls(offsets.to(index_type), col[order].to(index_type), values[order].float(), shape)

    @classmethod
    def from_dense(cls, matrix: Tensor) -> Sparse:
        """Returns the non-zero entries of a dense matrix."""
        row, col = matrix.nonzero(as_tuple=True)
        return cls.from_edges(row, col, matrix[row, col], (matrix.shape[0], matrix.shape[1]))

    @property
    def nnz(self) -> int:
        """Number of stored entries."""
        return len(self.values)

    @cached_property
    def rows(self) -> Tensor:
        """The row of every stored entry (int64), in storage order."""
        counts = self.offsets[1:] - self.offsets[:-1]
        return torch.repeat_interleave(torch.arange(self.shape[0]), counts.long())

    @cached_property
    def _by_column(self) -> csc_matrix:
        """The positions of the entries, sorted by column.

        SciPy sorts by counting, which takes a quarter of the time of a comparison sort.
        """
        from scipy.sparse import csr_matrix  # a tenth of a second, which not every command needs

        return csr_matrix(
            (np.arange(self.nnz), self.indices.numpy(), self.offsets.numpy()), self.shape
        ).tocsc()

    @cached_property
    def order(self) -> Tensor:
        """The positions of the transpose's entries (int64): `transpose.values == values[order]`."""
        return torch.from_numpy(self._by_column.data)

    @cached_property
    def transpose(self) -> Sparse:
        """The transposed matrix."""
        offsets, indices = (
            torch.from_numpy(t).to(self.indices.dtype)
            for t in (self._by_column.indptr, self._by_column.indices)
        )
        return Sparse(offsets, indices, self.values[self.order], (self.shape[1], self.shape[0]))

    def declare_symmetric(self) -> None:
        """Declares that the matrix equals its transpose, entry by entry."""
        self.__dict__["transpose"] = self  # in place of the cached property

    def stacked(self, copies: int) -> tuple[Tensor, Tensor]:
        """Returns offsets and indices of a block-diagonal matrix of `copies` copies of this one."""
        if copies not in self._stacks:
            index_type = _index_type(copies * self.shape[1], copies * self.nnz)
            block = torch.arange(copies, dtype=index_type).unsqueeze(1)
            starts = self.offsets[:-1] + block * self.nnz
            end = torch.tensor([copies * self.nnz], dtype=index_type)
            self._stacks[copies] = (
                torch.cat([starts.flatten(), end]),
                (self.indices + block * self.shape[1]).flatten(),
            )
        return self._stacks[copies]

    def dense(self) -> Tensor:
        """Returns the matrix as a dense tensor."""
        full = torch.zeros(self.shape)
        return full.index_put((self.rows, self.indices.long()), self.values, accumulate=True)

    def __matmul__(self, dense: Tensor) -> Tensor:
        """Returns `self @ dense` for a [columns, width] tensor, differentiable in `dense`."""
        _check(self, dense)
        return _Product.apply(dense, self)  # type: ignore[no-untyped-call]


class _Blocks(Sparse):
    """A block-diagonal matrix. Its transpose uses the transposes that the blocks have cached."""

    blocks: Sequence[Sparse]

    @cached_property
    def transpose(self) -> Sparse:
        """The transposed matrix."""
        return block_diagonal([block.transpose for block in self.blocks])


def block_diagonal(blocks: Sequence[Sparse]) -> Sparse:
    """Returns one matrix with the given matrices along its diagonal."""
    shape = (sum(b.shape[0] for b in blocks), sum(b.shape[1] for b in blocks))
    made = _Blocks(
        *_concatenated(blocks, accumulate((b.shape[1] for b in blocks), initial=0)), shape
    )
    made.blocks = blocks
    return made


def vertical_stack(blocks: Sequence[Sparse]) -> Sparse:
    """Returns the vertical concatenation of matrices that have the same number of columns."""
    return Sparse(
        *_concatenated(blocks, repeat(0)), (sum(b.shape[0] for b in blocks), blocks[0].shape[1])
    )


def _concatenated(
    blocks: Sequence[Sparse], first_columns: Iterable[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns offsets, indices and values of the vertical concatenation of matrices.

    first_columns: for each matrix, the number that is added to its columns.
    """
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
    """Returns `matrix @ dense` with `values` as the entries of the matrix, differentiable in both.

    There is one product for each leading index: [..., nnz] in storage order and
    [..., columns, width] give [..., rows, width].
    """
    _check(matrix, dense)
    if values.shape != (*dense.shape[:-2], matrix.nnz):
        raise ValueError(
            f"values have the shape {list(values.shape)}, which does not fit a matrix with "
            f"{matrix.nnz} entries and a {list(dense.shape)} tensor"
        )
    return _Weighted.apply(values, dense, matrix)  # type: ignore[no-untyped-call]


def products_at(matrix: Sparse, left: Tensor, right: Tensor) -> Tensor:
    """Returns the entries of left @ rightᵀ at the coordinates of a matrix, differentiable in both.

    [..., rows, width] and [..., columns, width] give [..., nnz].
    """
    return _Entries.apply(left, right, matrix)  # type: ignore[no-untyped-call]


def _check(matrix: Sparse, dense: Tensor) -> None:
    if dense.dim() < 2 or dense.shape[-2] != matrix.shape[1]:
        raise ValueError(
            f"a {list(matrix.shape)} matrix does not multiply a {list(dense.shape)} tensor"
        )


def _index_type(*sizes: int) -> torch.dtype:
    return torch.int32 if max(sizes) < 2**31 else torch.int64


def multiply(matrix: Sparse, dense: Tensor) -> Tensor:
    """Returns `matrix @ dense`, not differentiable: [columns, width] gives [rows, width]."""
    return _multiply((matrix.offsets, matrix.indices), matrix.values, dense)


def _multiply(coordinates: tuple[Tensor, Tensor], values: Tensor, dense: Tensor) -> Tensor:
    offsets, indices = coordinates
    if len(indices) == 0:
        return dense.new_zeros(len(offsets) - 1, dense.shape[1])
    # The arguments that `F.embedding_bag` passes: sums (mode 0), dense gradients, and offsets that
    # include the last one.
    return torch.embedding_bag(
        dense.contiguous(), indices, offsets, False, 0, False, values.to(dense.dtype), True
    )[0]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, dense, matrix):  # type: ignore[no-untyped-def]
        ctx.matrix = matrix
        # Detached, because embedding_bag would otherwise store every entry's row for its backward.
        return _multiply(matrix.stacked(1), matrix.values, dense.detach())

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        transpose = ctx.matrix.transpose
        return _multiply(transpose.stacked(1), transpose.values, gradient), None


# Each of the next two functions is the derivative of the other one.


class _Weighted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, dense, matrix):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(values, dense)
        ctx.matrix = matrix
        lead, width = dense.shape[:-2], dense.shape[-1]
        product = _multiply(
            matrix.stacked(lead.numel()), values.detach().flatten(), dense.detach().flatten(0, -2)
        )
        # Without leading indices the result is not a view, so callers may write to it.
        return product.view(*lead, matrix.shape[0], width) if lead else product

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        (values, dense), matrix = ctx.saved_tensors, ctx.matrix
        to_values, to_dense, _ = ctx.needs_input_grad
        return (
            products_at(matrix, gradient, dense) if to_values else None,
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
        if matrix.nnz > rows * columns:  # PyTorch's CSR tensor cannot have so many repeated entries
            return (
                left.index_select(-2, matrix.rows) * right.index_select(-2, matrix.indices)
            ).sum(-1)
        copies = lead.numel()
        zeros, (offsets, indices) = left.new_zeros(copies * matrix.nnz), matrix.stacked(copies)
        sampled = torch.sparse_csr_tensor(
            offsets, indices, zeros, (copies * rows, copies * columns), check_invariants=False
        )
        # Rows that do not fill the vector registers take six times as long.
        if missing := -left.shape[-1] % 8:
            left, right = F.pad(left, (0, missing)), F.pad(right, (0, missing))
        left, right = left.contiguous().flatten(0, -2), right.contiguous().flatten(0, -2)
        # The output is the input: otherwise PyTorch first copies coordinates and values.
        torch.sparse.sampled_addmm(sampled, left, right.t(), out=sampled)
        return sampled.values().view(*lead, matrix.nnz)

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
