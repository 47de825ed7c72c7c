"""Matrices of nodes by nodes as small pictures: sums of their entries, and how many there are, over at most 256 x 256 cells.

Node v of n is in cell v · cells / n, rounded down. So cells are about equal, and those of a party, whose nodes follow each other, too.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

MOST_CELLS = 256
COLUMNS = 32  # of cells that powers are made of at once
REACHED_BYTES = (
    2**21
)  # of who reaches whom that are held at once: more is slower, it leaves the cache
WORK = 3e9  # products of two numbers that powers may take: some seconds
REACH_WORK = 1e9  # the same for who reaches whom, 64 columns in one

Sums = NDArray[np.float64]
Counts = NDArray[np.int64]


def count(n: int) -> int:
    """How many cells there are along a side."""
    return min(MOST_CELLS, n)


def begins(n: int) -> Counts:
    """The first node of every cell, and n."""
    return -(-np.arange(count(n) + 1, dtype=np.int64) * n // count(n))


def cell(node: int, n: int) -> int:
    """The cell that a node is in."""
    return node * count(n) // n


def of_rows(matrix: csr_matrix, columns: Counts, first: int, n: int) -> tuple[Sums, Counts]:
    """Some rows of a matrix in cells: sums of entries and their number, from the cell of the first row to that of the last.

    columns: which of n columns each one of the matrix is. first: which of n rows its first one is.
    """
    top, bottom = cell(first, n), cell(first + matrix.shape[0] - 1, n)
    across = np.asarray(columns) * count(n) // n
    edges = np.clip(begins(n)[top : bottom + 2] - first, 0, matrix.shape[0])
    sums, counts = (
        np.zeros((bottom - top + 1, count(n))),
        np.zeros((bottom - top + 1, count(n)), np.int64),
    )
    for k, (low, high) in enumerate(
        zip(matrix.indptr[edges[:-1]], matrix.indptr[edges[1:]], strict=True)
    ):
        where, values = across[matrix.indices[low:high]], matrix.data[low:high]
        sums[k] = np.bincount(where, values, count(n))
        counts[k] = np.bincount(where[values != 0], minlength=count(n))
    return sums, counts


def is_affordable(matrix: csr_matrix, hops: int) -> bool:
    """Whether `of_powers` takes seconds at most."""
    return hops * matrix.nnz * count(matrix.shape[0]) <= WORK


def of_powers(matrix: csr_matrix, hops: int) -> Sums:
    """Sums over cells of the powers 0 to `hops` of a matrix [n, n], exactly: [hops + 1, cells, cells]. No power is ever made.

    What is multiplied are the cells' columns: Σ over a cell's columns of M^l = M (M^(l-1) 1_cell).
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
    """Whether `of_reach` takes seconds at most."""
    return hops * matrix.nnz * (matrix.shape[0] / 64) <= REACH_WORK


def of_reach(matrix: csr_matrix, hops: int) -> Counts:
    """How many entries of the power `hops` of a matrix [n, n] are not 0, over cells: [cells, cells].

    The matrix has no negative entries and none on its diagonal that is 0. Who reaches whom is a bit, 64 columns to a number.
    """
    n = matrix.shape[0]
    edges, side = begins(n), count(n)
    found = np.zeros((side, side), np.int64)
    for first, columns in _columns_at_once(n, matrix.nnz):
        here = np.arange(columns)
        reach = np.zeros((n, -(-columns // 64) * 8), np.uint8)
        reach[first + here, here // 8] = 128 >> (here % 8)
        words = reach.view(np.uint64)
        for _ in range(hops):
            before, words = (
                words,
                np.bitwise_or.reduceat(
                    words[matrix.indices], matrix.indptr[:-1].astype(np.int64), axis=0
                ),
            )
            if np.array_equal(before, words):
                break  # everybody reaches all that can be
        reached = np.unpackbits(words.view(np.uint8), axis=1)[:, :columns]
        by_row = np.add.reduceat(reached, edges[:-1], axis=0, dtype=np.int64)
        across = (first + here) * side // n
        starts = np.flatnonzero(np.diff(across, prepend=-1))
        found[:, across[starts]] += np.add.reduceat(by_row, starts, axis=1)
    return found


def _columns_at_once(n: int, entries: int) -> Iterator[tuple[int, int]]:
    width = 64 * max(1, min(REACHED_BYTES // (8 * max(entries, n)), REACHED_BYTES // (64 * n)))
    for first in range(0, n, width):
        yield first, min(width, n - first)
