"""Powers of an adjacency matrix that no party holds whole: what each party does with its own rows of it.

Nodes are numbered 0 to n - 1 over all parties: those of the first party by name, in its own order, then those of the second, and so on. A
party knows its own nodes and edges, and of the edges between parties those with an end at one of its nodes. Matrices are SciPy's (CSR,
float32): products of two sparse matrices are what it is good at.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_matrix, hstack, vstack
from torch import Tensor

from fedloom.data.sparse import Sparse
from fedloom.errors import MessageError

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Numbering:
    """Who holds which numbers: the parties' names, sorted, and how many nodes each has."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> Numbering:
        """Takes how many nodes each party has."""
        names = tuple(sorted(sizes))
        return cls(names, tuple(sizes[name] for name in names))

    @cached_property
    def starts(self) -> Numbers:
        """The first number of each party, and n."""
        return np.concatenate([[0], np.cumsum(self.sizes)])

    @cached_property
    def owners(self) -> NDArray[np.uint16]:
        """The place in `names` of every number's holder, [n]."""
        return np.repeat(np.arange(len(self.sizes), dtype=np.uint16), self.sizes)

    @property
    def total(self) -> int:
        """n, the number of nodes over all parties."""
        return int(self.starts[-1])

    def size(self, name: str) -> int:
        """How many nodes a party has."""
        return self.sizes[self.names.index(name)]

    def span(self, name: str) -> slice:
        """The numbers of a party's nodes."""
        at = self.names.index(name)
        return slice(int(self.starts[at]), int(self.starts[at + 1]))


@dataclass(frozen=True)
class Part:
    """One party's part of the adjacency A: A[v, u] = 1 where node v gathers from node u.

    inner: [own nodes, own nodes], no self-loops. gathered: {peer: [own nodes, the peer's nodes]}, what own nodes gather from the peer's.
    spread: {peer: [the peer's nodes, own nodes]}, what the peer's nodes gather from own ones.
    """

    name: str
    numbering: Numbering
    inner: csr_matrix
    gathered: Mapping[str, csr_matrix]
    spread: Mapping[str, csr_matrix]

    def degrees(self) -> NDArray[np.float32]:
        """Row sums of A: from how many nodes, anywhere, each own node gathers."""
        return _row_sums([self.inner, *self.gathered.values()])

    def mean_degrees(self) -> NDArray[np.float32]:
        """(in + out) / 2 of each own node, self-loops not counted."""
        outgoing = _row_sums([self.inner.T, *(block.T for block in self.spread.values())])
        return (self.degrees() + outgoing) * np.float32(0.5)

    def inverse_degrees(self, loops: bool) -> NDArray[np.float32]:
        """1 / row sums of A, or of A + I; 0 for a node that gathers from nobody."""
        degrees = self.degrees() + np.float32(loops)
        return np.divide(1, degrees, out=np.zeros_like(degrees), where=degrees > 0)

    def own(self, loops: bool) -> csr_matrix:
        """`inner`, plus I with loops."""
        if not loops:
            return self.inner
        return csr_matrix(self.inner + _identity(self.inner.shape[0]))

    def first_power(self, loops: bool) -> csr_matrix:
        """Own rows of D^-1 A, or of D̃^-1 (A + I): [own nodes, n]."""
        own = self.own(loops)
        blocks = [
            own
            if peer == self.name
            else self.gathered.get(peer, csr_matrix((own.shape[0], size), dtype=np.float32))
            for peer, size in zip(self.numbering.names, self.numbering.sizes, strict=True)
        ]
        return scaled_rows(
            csr_matrix(hstack(blocks, format="csr", dtype=np.float32)), self.inverse_degrees(loops)
        )

    def block_for(self, peer: str, power: csr_matrix) -> csr_matrix:
        """B: what a peer's nodes gather in the next hop through own nodes, [those of its nodes that gather from here, n]."""
        return csr_matrix(self.spread[peer][self.rows_of(peer)] @ power)

    def own_block(self, power: csr_matrix, loops: bool) -> csr_matrix:
        """What own nodes gather in the next hop through own nodes, [own nodes, n]."""
        return csr_matrix(self.own(loops) @ power)

    def rows_of(self, peer: str) -> Numbers:
        """Which of a peer's nodes gather from own ones, ascending: the rows of a block that goes there."""
        return np.flatnonzero(np.diff(self.spread[peer].indptr))

    def rows_from(self, peer: str) -> Numbers:
        """Which own nodes gather from a peer's, ascending: the rows of a block that comes from there."""
        return np.flatnonzero(np.diff(self.gathered[peer].indptr))

    def next_power(self, blocks: Iterable[csr_matrix], loops: bool) -> csr_matrix:
        """Own rows of the next power from all blocks [own nodes, n], the own one included: D^-1 Σ B."""
        return scaled_rows(_added(list(blocks)), self.inverse_degrees(loops))


def _identity(size: int) -> csr_matrix:
    every = np.arange(size, dtype=np.int32)
    return csr_matrix(
        (np.ones(size, np.float32), every, np.arange(size + 1, dtype=np.int32)), shape=(size, size)
    )


def _added(blocks: list[csr_matrix]) -> csr_matrix:
    """Σ of blocks of one shape as one product: (I I ... I) times the blocks on top of each other; one addition after another is slower."""
    every = csr_matrix(
        hstack([_identity(blocks[0].shape[0])] * len(blocks), format="csr", dtype=np.float32)
    )
    return csr_matrix(every @ vstack(blocks, format="csr"))


def _row_sums(blocks: Iterable[csr_matrix]) -> NDArray[np.float32]:
    total = sum(np.asarray(block.sum(1)).ravel() for block in blocks)
    return np.asarray(total, dtype=np.float32)


def scaled_rows(matrix: csr_matrix, scale: NDArray[np.float32]) -> csr_matrix:
    """diag(scale) @ matrix."""
    matrix.data *= np.repeat(scale, np.diff(matrix.indptr))
    return matrix


def placed(block: csr_matrix, rows: Numbers, size: int) -> csr_matrix:
    """A matrix of so many rows that has the block's in the given places, and nothing elsewhere."""
    counts = np.zeros(size, np.int64)
    counts[rows] = np.diff(block.indptr)
    indptr = np.concatenate([[0], np.cumsum(counts)])
    return csr_matrix((block.data, block.indices, indptr), shape=(size, block.shape[1]))


# ---- pruning ----
def strongest_by_owner(matrix: csr_matrix, most: int, numbering: Numbering) -> csr_matrix:
    """The matrix with the `most` largest entries of each party's columns; of equal ones it depends on their places which stay."""
    owner = numbering.owners[matrix.indices]
    held = np.bincount(owner, minlength=len(numbering.sizes))
    if held.max(initial=0) <= most:
        return matrix
    entries = np.argsort(owner, kind="stable")  # by counting, since there are few owners
    ends = np.cumsum(held)
    keep = np.ones(matrix.nnz, bool)
    for party in np.flatnonzero(held > most):
        own = entries[ends[party] - held[party] : ends[party]]
        weakest = np.argpartition(-matrix.data[own], most - 1)[most:]
        keep[own[weakest]] = False
    return chosen(matrix, keep)


def chosen(matrix: csr_matrix, keep: NDArray[np.bool_]) -> csr_matrix:
    """The matrix with those of its stored entries that are to be kept."""
    before = np.concatenate([[0], np.cumsum(keep)])
    return csr_matrix(
        (matrix.data[keep], matrix.indices[keep], before[matrix.indptr]), shape=matrix.shape
    )


def ranks(matrix: csr_matrix) -> NDArray[np.int32]:
    """The entries' bits as whole numbers: of positive floats they are in the same order as the floats."""
    return matrix.data.view(np.int32)


def tally(matrix: csr_matrix, prefix: int, depth: int) -> Numbers:
    """Of the entries whose `depth` leading bytes are `prefix`, how many have which next byte: int64[256]."""
    bits = ranks(matrix)
    fitting = bits[bits >> (32 - 8 * depth) == prefix] if depth else bits
    return np.bincount((fitting >> (24 - 8 * depth)) & 255, minlength=256)


def cut_below(matrix: csr_matrix, bits: int, ties: int) -> csr_matrix:
    """The matrix with the entries whose rank is above `bits`, and the first `ties` of those that are equal to it."""
    rank = ranks(matrix)
    keep = rank > bits
    keep[np.flatnonzero(rank == bits)[:ties]] = True
    return chosen(matrix, keep)


# ---- what sums give away ----
def determined(matrix: csr_matrix) -> Numbers:
    """The columns u for which `matrix @ x` gives x_u away, whatever x is: those whose unit vectors are in the span of the rows.

    Takes time like a singular value decomposition of the rows and columns that are not empty: 2,000 of each take some seconds.
    """
    columns = np.unique(matrix.indices)
    rows = matrix[np.flatnonzero(np.diff(matrix.indptr))][:, columns].toarray().astype(np.float64)
    if not rows.size:
        return np.zeros(0, np.int64)
    _, strength, basis = np.linalg.svd(
        rows / np.linalg.norm(rows, axis=1, keepdims=True), full_matrices=False
    )
    within = np.square(basis[strength > 1e-9 * strength[0]]).sum(0)
    return columns[within > 1 - 1e-9].astype(np.int64)


# ---- between SciPy, messages and products with a gradient ----
def packed(block: csr_matrix) -> dict[str, Tensor]:
    """A block as it travels: entries a row, then their columns and values."""
    return {
        "count": torch.from_numpy(np.diff(block.indptr).astype(np.int32)),
        "column": torch.from_numpy(block.indices.astype(np.int32)),
        "value": torch.from_numpy(block.data.astype(np.float32)),
    }


def unpacked(letter: Mapping[str, Tensor], rows: int, columns: int, who: str) -> csr_matrix:
    """The block in a letter; MessageError, naming the tensor, unless it has so many rows and its columns are 0 to columns - 1."""
    count, column, value = (letter[name].numpy() for name in ("count", "column", "value"))
    if len(count) != rows:
        raise MessageError(
            f"{who}: tensor 'count' has shape {[len(count)]}, expected {[rows]}, a number for each node at the border"
        )
    if len(count) and count.min() < 0:
        raise MessageError(f"{who}: tensor 'count' holds {count.min()}, must not be negative")
    entries = int(count.sum(dtype=np.int64))
    for name, tensor in (("column", column), ("value", value)):
        if len(tensor) != entries:
            raise MessageError(
                f"{who}: tensor {name!r} has shape {[len(tensor)]}, expected {[entries]}, the sum of 'count'"
            )
    if entries and (column.min() < 0 or column.max() >= columns):
        raise MessageError(f"{who}: tensor 'column' holds a number outside 0 to {columns - 1}")
    if entries and value.min() < 0:
        raise MessageError(f"{who}: tensor 'value' holds a negative number")
    return csr_matrix(
        (value, column, np.concatenate([[0], np.cumsum(count, dtype=np.int64)])),
        shape=(rows, columns),
    )


def as_sparse(matrix: csr_matrix) -> Sparse:
    """The matrix as one that multiplies tensors, with a gradient to them."""
    matrix.sum_duplicates()
    index_type = np.int32 if max(matrix.shape[1], matrix.nnz) < 2**31 else np.int64
    return Sparse(
        torch.from_numpy(matrix.indptr.astype(index_type, copy=False)),
        torch.from_numpy(matrix.indices.astype(index_type, copy=False)),
        torch.from_numpy(matrix.data.astype(np.float32, copy=False)),
        (matrix.shape[0], matrix.shape[1]),
    )
