"""Neighbours of all nodes as a sparse matrix, for graphs with a hundred million edges.

Fresh memory takes longer here than arithmetic. So passes over edges work in blocks that stay in the
processor's cache, and numbers of nodes have 32 bits where these suffice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fedloom.data.graph import Graph

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

BLOCK = 2**18  # edges per block: its arrays of 2 MB stay in the cache


def index_type(*sizes: int) -> type[np.int32] | type[np.int64]:
    """Returns the integer type with 32 bits, or with 64 if a size needs them."""
    return np.int32 if max(sizes) < 2**31 else np.int64


def sorted_edges(graph: Graph) -> csr_matrix:
    """Returns the edges as a matrix [nodes, nodes] of ones.

    Row i contains the targets of node i, ascending. A repeated edge has several entries.
    """
    from scipy.sparse import csr_matrix  # takes a tenth of a second to import

    source, target = graph.edge_index.numpy()
    nodes, edges = graph.num_nodes, graph.num_edges
    kind = index_type(nodes, edges)
    starts = np.zeros(nodes + 1, dtype=kind)
    np.cumsum(np.bincount(source, minlength=nodes), out=starts[1:])
    if _is_sorted(source, target):
        targets = target.astype(kind)
    else:
        keys = source * nodes
        keys += target
        keys.sort()
        targets = np.empty(edges, dtype=kind)
        for begin in range(0, edges, BLOCK):
            targets[begin : begin + BLOCK] = keys[begin : begin + BLOCK] % nodes
    return csr_matrix((np.ones(edges, dtype=np.int8), targets, starts), shape=(nodes, nodes))


def is_undirected(graph: Graph) -> bool:
    """Returns whether every edge is stored in both directions."""

    def check() -> bool:
        edges = sorted_edges(graph)
        return same_pattern(edges, edges.T.tocsr())

    return graph.cached("undirected", check)


def adjacency(graph: Graph) -> csr_matrix:
    """Returns the symmetric 0/1 adjacency without self-loops. The columns of a row ascend."""
    edges = sorted_edges(graph)
    turned = edges.T.tocsr()
    undirected = same_pattern(edges, turned)
    graph.cached("undirected", lambda: undirected)  # `is_undirected` need not sort again
    if not undirected:
        edges = _once(edges) + _once(turned)
    del turned
    return _without_loops(_once(edges))


def same_pattern(one: csr_matrix, other: csr_matrix) -> bool:
    """Returns whether two matrices with sorted rows have their entries at the same places."""
    return np.array_equal(one.indptr, other.indptr) and all(
        np.array_equal(one.indices[k : k + BLOCK], other.indices[k : k + BLOCK])
        for k in range(0, one.nnz, BLOCK)
    )


def row_blocks(starts: npt.NDArray[np.integer]) -> Iterator[tuple[int, int]]:
    """Yields the first row and the row after the last of blocks with about BLOCK entries.

    starts: the first entry of each row, and the number of entries.
    """
    rows = len(starts) - 1
    first = 0
    while first < rows:
        end = int(np.searchsorted(starts, starts[first] + BLOCK, side="right")) - 1
        end = min(max(end, first + 1), rows)
        yield first, end
        first = end


def _is_sorted(source: npt.NDArray[np.int64], target: npt.NDArray[np.int64]) -> bool:
    """Returns whether edges are sorted by source, then target. They may be repeated."""
    for begin in range(0, len(source), BLOCK):
        here, there = source[begin : begin + BLOCK + 1], target[begin : begin + BLOCK + 1]
        step = np.diff(here)
        if not ((step > 0) | ((step == 0) & (there[1:] >= there[:-1]))).all():
            return False
    return True


def _once(edges: csr_matrix) -> csr_matrix:
    """Merges the entries of repeated edges, in place. Returns the matrix of ones."""
    edges.sum_duplicates()
    edges.data[:] = 1
    return edges


def _without_loops(edges: csr_matrix) -> csr_matrix:
    """Returns the matrix without its diagonal."""
    if not edges.diagonal().any():
        return edges
    rows = np.repeat(np.arange(edges.shape[0], dtype=edges.indices.dtype), np.diff(edges.indptr))
    proper = rows != edges.indices
    starts = np.zeros_like(edges.indptr)
    np.cumsum(np.bincount(rows[proper], minlength=edges.shape[0]), out=starts[1:])
    kept = (edges.data[proper], edges.indices[proper], starts)
    return type(edges)(kept, shape=edges.shape)
