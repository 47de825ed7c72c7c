"""Matrices of FedStruct: powers of an adjacency of which each party holds only its own rows.

Nodes are numbered 0 to n - 1 over all parties. The first party by name comes first, with its nodes
in its own order, then the second party, and so on. A party knows its own nodes and edges, and the
edges between parties that have an end at one of its nodes. Matrices are SciPy's (CSR, float32),
because SciPy multiplies two sparse matrices fast.
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
    """Which party holds which node numbers.

    Attributes:
        names: The parties, sorted by name.
        sizes: The number of nodes of each party.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> Numbering:
        """Takes the number of nodes of each party."""
        names = tuple(sorted(sizes))
        return cls(names, tuple(sizes[name] for name in names))

    @cached_property
    def starts(self) -> Numbers:
        """The first number of each party, and n."""
        return np.concatenate([[0], np.cumsum(self.sizes)])

    @cached_property
    def owners(self) -> NDArray[np.uint16]:
        """The index in `names` of the party that holds each number, [n]."""
        return np.repeat(np.arange(len(self.sizes), dtype=np.uint16), self.sizes)

    @property
    def total(self) -> int:
        """n, the number of nodes over all parties."""
        return int(self.starts[-1])

    def size(self, name: str) -> int:
        """Returns the number of nodes of a party."""
        return self.sizes[self.names.index(name)]

    def span(self, name: str) -> slice:
        """Returns the numbers of a party's nodes."""
        at = self.names.index(name)
        return slice(int(self.starts[at]), int(self.starts[at + 1]))


@dataclass(frozen=True)
class PartyAdjacency:
    """One party's part of the adjacency A. A[v, u] = 1 if there is an edge u -> v.

    Attributes:
        name: The party.
        numbering: The numbers of all parties' nodes.
        inner: [own nodes, own nodes], without self-loops.
        incoming: {peer: [own nodes, the peer's nodes]}, edges from the peer's nodes to own ones.
        outgoing: {peer: [the peer's nodes, own nodes]}, edges from own nodes to the peer's.
    """

    name: str
    numbering: Numbering
    inner: csr_matrix
    incoming: Mapping[str, csr_matrix]
    outgoing: Mapping[str, csr_matrix]

    def degrees(self) -> NDArray[np.float32]:
        """Returns the row sums of A: the in-degree of each own node over the whole graph."""
        return _row_sums([self.inner, *self.incoming.values()])

    def mean_degrees(self) -> NDArray[np.float32]:
        """Returns (in-degree + out-degree) / 2 of each own node, without self-loops."""
        out_degrees = _row_sums([self.inner.T, *(block.T for block in self.outgoing.values())])
        return (self.degrees() + out_degrees) * np.float32(0.5)

    def inverse_degrees(self, loops: bool) -> NDArray[np.float32]:
        """Returns 1 / row sums of A, or of A + I with loops; 0 where the sum is 0."""
        degrees = self.degrees() + np.float32(loops)
        return np.divide(1, degrees, out=np.zeros_like(degrees), where=degrees > 0)

    def within(self, loops: bool) -> csr_matrix:
        """Returns `inner`, or `inner` + I with loops."""
        if not loops:
            return self.inner
        return csr_matrix(self.inner + _identity(self.inner.shape[0]))

    def first_power(self, loops: bool) -> csr_matrix:
        """Returns the own rows of D^-1 A, or of D̃^-1 (A + I) with loops: [own nodes, n]."""
        own = self.within(loops)
        blocks = [
            own
            if peer == self.name
            else self.incoming.get(peer, csr_matrix((own.shape[0], size), dtype=np.float32))
            for peer, size in zip(self.numbering.names, self.numbering.sizes, strict=True)
        ]
        return scale_rows(
            csr_matrix(hstack(blocks, format="csr", dtype=np.float32)), self.inverse_degrees(loops)
        )

    def links_to(self, peer: str) -> csr_matrix:
        """Returns the edges to a peer: [its nodes with an edge from here (`rows_to`), own nodes].

        A block B to the peer is what sums over these edges bring: links @ power, [rows, n].
        """
        return csr_matrix(self.outgoing[peer][self.rows_to(peer)])

    def links_from(self, peer: str) -> csr_matrix:
        """Returns the edges from a peer: [own nodes with an edge from it (`rows_from`), its nodes].

        The peer's `links_to` this party is the same matrix.
        """
        return csr_matrix(self.incoming[peer][self.rows_from(peer)])

    def own_block(self, power: csr_matrix, loops: bool) -> csr_matrix:
        """Returns what the next hop brings to own nodes through own nodes, [own nodes, n]."""
        return csr_matrix(self.within(loops) @ power)

    def rows_to(self, peer: str) -> Numbers:
        """Returns the peer's nodes with an edge from here, ascending: the rows of a block to it."""
        return np.flatnonzero(np.diff(self.outgoing[peer].indptr))

    def rows_from(self, peer: str) -> Numbers:
        """Returns own nodes with an edge from a peer, ascending: the rows of a block from it."""
        return np.flatnonzero(np.diff(self.incoming[peer].indptr))

    def known_start(self, peer: str) -> csr_matrix:
        """Returns rows of the identity for the peer's nodes with an edge to own nodes."""
        size = self.numbering.size(peer)
        linked = np.unique(self.incoming[peer].indices)
        start = self.numbering.span(peer).start
        return matrix_of(linked, linked + start, (size, self.numbering.total))

    def next_known(
        self, peer: str, known: csr_matrix, power: csr_matrix, loops: bool
    ) -> csr_matrix:
        """Returns what this party knows of the peer's rows of the next power.

        It knows the edges between these nodes and its own, and takes them for all their edges.

        Args:
            peer: The peer.
            known: What it knows of the peer's rows of the last power, [the peer's nodes, n].
            power: Its own rows of the last power, [own nodes, n].
            loops: Whether A has self-loops.
        """
        links = self.outgoing[peer]
        degrees = _row_sums([links]) + np.float32(loops)
        inverse = np.divide(1, degrees, out=np.zeros_like(degrees), where=degrees > 0)
        total = csr_matrix(links @ power)
        return scale_rows(csr_matrix(total + known) if loops else total, inverse)

    def own_start(self) -> csr_matrix:
        """Returns the own rows of the identity, [own nodes, n]."""
        every = np.arange(self.inner.shape[0])
        start = self.numbering.span(self.name).start
        return matrix_of(every, every + start, (len(every), self.numbering.total))

    def next_power(self, blocks: Iterable[csr_matrix], loops: bool) -> csr_matrix:
        """Returns the own rows of the next power, D^-1 Σ B.

        blocks: all blocks [own nodes, n], the own one included.
        """
        return scale_rows(_sum_of(list(blocks)), self.inverse_degrees(loops))


@dataclass
class Rows:
    """Some of a party's rows of the powers Â^l that have a part in Ā.

    Attributes:
        nodes: The rows, as positions in the party's own list of nodes, [rows].
        reach: The numbers of the nodes u whose s_u these rows need, [columns].
        powers: One matrix [rows, columns] for each hop that is used. One matrix, Ā itself, if β is
            not trained.
    """

    nodes: Tensor
    reach: Tensor
    powers: list[Sparse]

    @classmethod
    def of(cls, nodes: Tensor, powers: list[csr_matrix]) -> Rows:
        """Selects rows.

        Args:
            nodes: The rows to take.
            powers: All own rows of each power, [own nodes, n].
        """
        own, total = powers[0].shape
        everything = len(nodes) == own  # then large matrices are not copied
        taken = powers if everything else [csr_matrix(power[nodes.numpy()]) for power in powers]
        reached = np.zeros(total, bool)
        for power in taken:
            reached[power.indices] = True
        reach = np.flatnonzero(reached)
        narrow = taken if len(reach) == total else [csr_matrix(power[:, reach]) for power in taken]
        return cls(nodes, torch.from_numpy(reach), [as_sparse(power) for power in narrow])

    def propagate(self, q: Tensor, beta: Tensor | None) -> Tensor:
        """Returns z = Σ_l β_l Â^l q, [rows, classes].

        Args:
            q: g(s_u) of the nodes in `reach`, [columns, classes].
            beta: β. None: the one matrix is Ā itself.
        """
        if beta is None:
            return self.powers[0] @ q
        terms = [b * (power @ q) for b, power in zip(beta, self.powers, strict=True)]
        return torch.stack(terms).sum(0)


def _identity(size: int) -> csr_matrix:
    every = np.arange(size, dtype=np.int32)
    return csr_matrix(
        (np.ones(size, np.float32), every, np.arange(size + 1, dtype=np.int32)), shape=(size, size)
    )


def _sum_of(blocks: list[csr_matrix]) -> csr_matrix:
    """Returns the sum of blocks of one shape.

    It is one product: (I I ... I) times the stacked blocks. Repeated addition is slower.
    """
    every = csr_matrix(
        hstack([_identity(blocks[0].shape[0])] * len(blocks), format="csr", dtype=np.float32)
    )
    return csr_matrix(every @ vstack(blocks, format="csr"))


def _row_sums(blocks: Iterable[csr_matrix]) -> NDArray[np.float32]:
    total = sum(np.asarray(block.sum(1)).ravel() for block in blocks)
    return np.asarray(total, dtype=np.float32)


def scale_rows(matrix: csr_matrix, scale: NDArray[np.float32]) -> csr_matrix:
    """Returns diag(scale) @ matrix. It changes the matrix in place."""
    matrix.data *= np.repeat(scale, np.diff(matrix.indptr))
    return matrix


def scatter_rows(block: csr_matrix, rows: Numbers, size: int) -> csr_matrix:
    """Returns a matrix of `size` rows with the block's rows at positions `rows`, else empty."""
    counts = np.zeros(size, np.int64)
    counts[rows] = np.diff(block.indptr)
    indptr = np.concatenate([[0], np.cumsum(counts)])
    return csr_matrix((block.data, block.indices, indptr), shape=(size, block.shape[1]))


def matrix_of(
    rows: NDArray[np.integer],
    columns: NDArray[np.integer],
    shape: tuple[int, int],
    weight: NDArray[np.float32] | None = None,
) -> csr_matrix:
    """Returns a matrix with entries at the given places. weight: their values; None: all are 1."""
    values = np.ones(len(rows), np.float32) if weight is None else weight
    return csr_matrix((values, (rows, columns)), shape=shape)


# ---- pruning ----
def strongest_by_owner(matrix: csr_matrix, most: int, numbering: Numbering) -> csr_matrix:
    """Returns the matrix with only the `most` largest entries in the columns of each party.

    Among equal entries, their positions decide.
    """
    owner = numbering.owners[matrix.indices]
    held = np.bincount(owner, minlength=len(numbering.sizes))
    if held.max(initial=0) <= most:
        return matrix
    entries = np.argsort(owner, kind="stable")  # a counting sort: there are few owners
    ends = np.cumsum(held)
    keep = np.ones(matrix.nnz, bool)
    for party in np.flatnonzero(held > most):
        own = entries[ends[party] - held[party] : ends[party]]
        weakest = np.argpartition(-matrix.data[own], most - 1)[most:]
        keep[own[weakest]] = False
    return select_entries(matrix, keep)


def select_entries(matrix: csr_matrix, keep: NDArray[np.bool_]) -> csr_matrix:
    """Returns the matrix with only the stored entries for which `keep` is true."""
    before = np.concatenate([[0], np.cumsum(keep)])
    return csr_matrix(
        (matrix.data[keep], matrix.indices[keep], before[matrix.indptr]), shape=matrix.shape
    )


def ranks(matrix: csr_matrix) -> NDArray[np.int32]:
    """Returns the bits of the entries as whole numbers. Positive floats keep their order."""
    return matrix.data.view(np.int32)


def tally(matrix: csr_matrix, prefix: int, depth: int) -> Numbers:
    """Counts entries with the `depth` leading bytes `prefix` by their next byte: int64[256]."""
    bits = ranks(matrix)
    fitting = bits[bits >> (32 - 8 * depth) == prefix] if depth else bits
    return np.bincount((fitting >> (24 - 8 * depth)) & 255, minlength=256)


def cut_below(matrix: csr_matrix, bits: int, ties: int) -> csr_matrix:
    """Returns the matrix with only the entries above a threshold, and some that are equal to it.

    Args:
        matrix: The matrix.
        bits: The rank (`ranks`) of the threshold.
        ties: How many entries that are equal to the threshold stay: the first ones.
    """
    rank = ranks(matrix)
    keep = rank > bits
    keep[np.flatnonzero(rank == bits)[:ties]] = True
    return select_entries(matrix, keep)


# ---- what sums reveal ----
def determined(matrix: csr_matrix) -> Numbers:
    """Returns the columns u for which `matrix @ x` reveals x_u, whatever x is.

    These are the columns whose unit vectors are in the span of the rows. It takes as long as a
    singular value decomposition of the rows and columns that are not empty: some seconds for 2,000
    of each.
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


# ---- conversion: SciPy, messages, products with a gradient ----
def packed(block: csr_matrix) -> dict[str, Tensor]:
    """Returns a block as a message: the number of entries in each row, their columns and values."""
    return {
        "count": torch.from_numpy(np.diff(block.indptr).astype(np.int32)),
        "column": torch.from_numpy(block.indices.astype(np.int32)),
        "value": torch.from_numpy(block.data.astype(np.float32)),
    }


def unpacked(message: Mapping[str, Tensor], rows: int, columns: int, who: str) -> csr_matrix:
    """Returns the block in a message. Raises a MessageError that names the tensor if it is wrong.

    Args:
        message: What `packed` makes.
        rows: The number of rows that the block must have.
        columns: The number of columns. A column must be one of 0 to columns - 1.
        who: The start of the error message: the receiver and the sender.
    """
    count, column, value = (message[name].numpy() for name in ("count", "column", "value"))
    if len(count) != rows:
        raise MessageError(
            f"{who}: tensor 'count' has shape {[len(count)]}, expected {[rows]}, "
            "one number for each row of the block"
        )
    if len(count) and count.min() < 0:
        raise MessageError(f"{who}: tensor 'count' holds {count.min()}, must not be negative")
    entries = int(count.sum(dtype=np.int64))
    for name, tensor in (("column", column), ("value", value)):
        if len(tensor) != entries:
            raise MessageError(
                f"{who}: tensor {name!r} has shape {[len(tensor)]}, expected {[entries]}, "
                "the sum of 'count'"
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
    """Returns the matrix in a form that multiplies tensors and passes gradients to them."""
    matrix.sum_duplicates()
    index_type = np.int32 if max(matrix.shape[1], matrix.nnz) < 2**31 else np.int64
    return Sparse(
        torch.from_numpy(matrix.indptr.astype(index_type, copy=False)),
        torch.from_numpy(matrix.indices.astype(index_type, copy=False)),
        torch.from_numpy(matrix.data.astype(np.float32, copy=False)),
        (matrix.shape[0], matrix.shape[1]),
    )


def as_scipy(matrix: Sparse) -> csr_matrix:
    """The inverse of `as_sparse`."""
    return csr_matrix(
        (matrix.values.numpy(), matrix.indices.numpy(), matrix.offsets.numpy()), shape=matrix.shape
    )
