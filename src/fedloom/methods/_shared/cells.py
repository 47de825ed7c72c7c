"""Node-by-node matrices as small pictures of at most 256 x 256 cells.

A cell holds the sum of its entries, or their number. Node v of n is in cell v · cells / n, rounded
down. So all cells have about the same size. The nodes of a party follow each other, and so do its
cells.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

MOST_CELLS = 256
COLUMNS = 32  # columns of cells for which powers are computed at once
REACHED_BYTES = 2**21  # bytes of reachability that are held at once; more would leave the cache
WORK = 3e9  # the most multiplications that powers may take: some seconds
REACH_WORK = 1e9  # the same for reachability, where one operation handles 64 columns

Sums = NDArray[np.float64]
Counts = NDArray[np.int64]


def count(n: int) -> int:
    """Returns the number of cells along a side."""
    return min(MOST_CELLS, n)


def begins(n: int) -> Counts:
    """Returns the first node of every cell, and n."""
    return -(-np.arange(count(n) + 1, dtype=np.int64) * n // count(n))


def cell(node: int, n: int) -> int:
    """Returns the cell of a node."""
    return node * count(n) // n


def of_rows(matrix: csr_matrix, columns: Counts, first: int, n: int) -> tuple[Sums, Counts]:
    """Returns the sums and the number of entries of some rows of a matrix, in cells.

    The rows of cells go from that of the first row to that of the last.

    Args:
        matrix: Some rows and columns of a matrix [n, n].
        columns: The positions of its columns among the n.
        first: The position of its first row among the n.
        n: The number of nodes.
    """
    top, bottom = cell(first, n), cell(first + matrix.shape[0] - 1, n)
    across = np.asarray(columns) * count(n) // n
    edges = np.clip(begins(n)[top : bottom + 2] - first, 0, matrix.shape[0])
    shape = (bottom - top + 1, count(n))
    sums, counts = np.zeros(shape), np.zeros(shape, np.int64)
    bounds = matrix.indptr[edges]
    for k, (low, high) in enumerate(pairwise(bounds)):
        where, values = across[matrix.indices[low:high]], matrix.data[low:high]
        sums[k] = np.bincount(where, values, count(n))
        counts[k] = np.bincount(where[values != 0], minlength=count(n))
    return sums, counts


def is_affordable(matrix: csr_matrix, hops: int) -> bool:
    """Returns whether `of_powers` takes at most seconds."""
    return hops * matrix.nnz * count(matrix.shape[0]) <= WORK


def of_powers(matrix: csr_matrix, hops: int) -> Sums:
    """Returns exact sums over cells of the powers 0 to `hops` of a matrix [n, n].

    The result is [hops + 1, cells, cells]. No power is computed. Instead, the columns of cells are
    multiplied: Σ over a cell's columns of M^l = M (M^(l-1) 1_cell).
    """
    n = matrix.shape[0]
    edges, side = begins(n), count(n)
    sums = np.zeros((hops + 1, side, side))
    for low in range(0, side, COLUMNS):
        high = min(low + COLUMNS, side)
        columns = np.zeros((n, high - low))
        inside = np.arange(edges[low], edges[high])
        columns[inside, inside * side // n - low] = 1
        for hop in range(hops + 1):
            columns = matrix @ columns if hop else columns
            sums[hop, :, low:high] = np.add.reduceat(columns, edges[:-1])
    return sums


def reach_is_affordable(matrix: csr_matrix, hops: int) -> bool:
    """Returns whether `of_reach` takes at most seconds."""
    return hops * matrix.nnz * (matrix.shape[0] / 64) <= REACH_WORK


def of_reach(matrix: csr_matrix, hops: int) -> Counts:
    """Counts the entries other than 0 of the power `hops` of a matrix, in cells [cells, cells].

    Whether a node reaches another is one bit; a number holds 64 columns.

    matrix: [n, n], without negative entries and without zeros on the diagonal.
    """
    n = matrix.shape[0]
    edges, side = begins(n), count(n)
    found = np.zeros((side, side), np.int64)
    starts_of_rows = matrix.indptr[:-1].astype(np.int64)
    for first, columns in _column_chunks(n, matrix.nnz):
        here = np.arange(columns)
        reach = np.zeros((n, -(-columns // 64) * 8), np.uint8)
        reach[first + here, here // 8] = 128 >> (here % 8)
        words = reach.view(np.uint64)
        for _ in range(hops):
            before = words
            words = np.bitwise_or.reduceat(words[matrix.indices], starts_of_rows, axis=0)
            if np.array_equal(before, words):
                break  # more hops reach no further node
        reached = np.unpackbits(words.view(np.uint8), axis=1)[:, :columns]
        by_row = np.add.reduceat(reached, edges[:-1], axis=0, dtype=np.int64)
        across = (first + here) * side // n
        starts = np.flatnonzero(np.diff(across, prepend=-1))
        found[:, across[starts]] += np.add.reduceat(by_row, starts, axis=1)
    return found


def _column_chunks(n: int, entries: int) -> Iterator[tuple[int, int]]:
    """Yields the first column and the number of columns of each chunk."""
    width = 64 * max(1, min(REACHED_BYTES // (8 * max(entries, n)), REACHED_BYTES // (64 * n)))
    for first in range(0, n, width):
        yield first, min(width, n - first)
