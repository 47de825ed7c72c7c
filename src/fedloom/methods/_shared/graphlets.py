"""Graphlet degree vectors: how often a node takes each position in small induced subgraphs.

Graphs are SciPy CSR matrices [n, n]. Any stored entry other than 0 is an edge. They are treated as
undirected and simple: both directions, no self-loops.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from torch import Tensor

from fedloom.methods._shared.structure import simple_graph

Ints = NDArray[np.int64]

ORBITS = 15  # positions in the graphlets with 2 to 4 nodes

_BATCH = 2**20  # the most subgraphs that are enumerated at once
_CELLS = 8  # cells in a table of counts, for each of these subgraphs

# How often a graphlet on 4 nodes, as a subgraph that may lack edges, lies in an induced one on the
# same nodes. Entry (i, j) is how often a node in orbit 4 + j of the induced graphlet is in orbit
# 4 + i of the contained one. Rows and columns: path (end, inner), claw (leaf, centre), cycle,
# paw (leaf, base, centre), diamond (2 edges, 3 edges), clique.
_WITHIN = np.array(
    [
        [1, 0, 0, 0, 2, 2, 1, 0, 4, 2, 6],
        [0, 1, 0, 0, 2, 0, 1, 2, 2, 4, 6],
        [0, 0, 1, 0, 0, 1, 1, 0, 2, 1, 3],
        [0, 0, 0, 1, 0, 0, 0, 1, 0, 1, 1],
        [0, 0, 0, 0, 1, 0, 0, 0, 1, 1, 3],
        [0, 0, 0, 0, 0, 1, 0, 0, 2, 0, 3],
        [0, 0, 0, 0, 0, 0, 1, 0, 2, 2, 6],
        [0, 0, 0, 0, 0, 0, 0, 1, 0, 2, 3],
        [0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 3],
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 3],
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1],
    ]
)


def graphlet_features(adjacency: csr_matrix, *, log: bool = True) -> Tensor:
    """Returns graphlet degree vectors (Przulj, 2007) of the nodes of a graph [n, n], [n, 15].

    Column i counts the induced graphlets of up to 4 nodes in which a node takes position (orbit)
    i. Column 0 is its degree. Counts are exact until they become float32. The time grows with the
    edges times the smaller degree of their ends, and with the triangles: Cora takes 0.1 seconds,
    Photo 2, and 100,000 nodes with 400 linked hubs 25.

    log: whether to return log(1 + count), because counts span many powers of ten.
    """
    counts = torch.from_numpy(_orbits(simple_graph(adjacency))).double()
    return (counts.log1p() if log else counts).float()


def _orbits(simple: csr_matrix) -> Ints:
    """Returns the orbit counts [n, 15] of a simple undirected graph.

    It first counts subgraphs that may lack edges. Most counts follow from degrees and triangles;
    cycles and cliques are enumerated. Then it subtracts those that lie within larger graphlets.
    """
    # Enumeration goes from low to high degree, because few nodes have a higher degree than a hub.
    order = np.argsort(np.diff(simple.indptr), kind="stable")
    ranked = _Ranked(simple[order][:, order])
    A, d, low, high = ranked.matrix, ranked.degree, ranked.low, ranked.high
    edges = np.stack((low, high))
    shared = np.zeros(len(low), np.int64)  # triangles at each edge
    for a, b, c in ranked.larger(edges):
        for edge in (ranked.edge(a, b), ranked.edge(b, c), ranked.edge(a, c)):
            np.add.at(shared, edge, 1)
    diamond, clique = np.zeros((2, len(d)), np.int64)
    for triangles in ranked.larger(edges):  # enumerated again: there may be too many to keep
        a, b, c = triangles
        for node, edge in ((a, ranked.edge(b, c)), (b, ranked.edge(a, c)), (c, ranked.edge(a, b))):
            np.add.at(diamond, node, shared[edge] - 1)
        for four in ranked.larger(triangles):
            np.add.at(clique, four.ravel(), 1)
    t = ranked.per_node(shared, shared) // 2
    wedge = A @ (d - 1)  # paths of 3 nodes that end here
    at_edge = shared * (shared - 1) // 2  # pairs of triangles
    loose = [  # the number of walks, minus those that return to a node
        A @ wedge - d * (d - 1) - 2 * t,  # path, end
        (d - 1) * wedge - 2 * t,  # path, inner
        A @ ((d - 1) * (d - 2) // 2),  # claw, leaf
        d * (d - 1) * (d - 2) // 6,  # claw, centre
        ranked.cycles(),
        A @ t - 2 * t,  # paw, leaf: the triangles at a neighbour
        # paw, base: the leaf is at the other end of an edge
        ranked.per_node(shared * (d[high] - 2), shared * (d[low] - 2)),
        t * (d - 2),  # paw, centre
        diamond,  # 2 edges: the other triangles at the opposite edge of a triangle
        ranked.per_node(at_edge, at_edge),  # diamond, 3 edges: two triangles at an edge
        clique,
    ]
    induced = np.stack(loose)
    for column in reversed(range(len(_WITHIN))):  # back substitution, in whole numbers
        induced[:column] -= _WITHIN[:column, column, None] * induced[column]
    counts = np.empty((len(d), ORBITS), np.int64)
    counts[order] = np.vstack((d, wedge - 2 * t, d * (d - 1) // 2 - t, t, induced)).T
    return counts


class _Ranked:
    """A simple undirected graph with nodes numbered by degree. It enumerates in bounded memory."""

    def __init__(self, graph: csr_matrix):
        graph.sort_indices()
        self.matrix = csr_matrix(
            (np.ones(graph.nnz, np.int64), graph.indices, graph.indptr), graph.shape
        )
        self.size = graph.shape[0]
        self.start, self.neighbours = graph.indptr.astype(np.int64), graph.indices.astype(np.int64)
        self.degree = np.diff(self.start)
        tail = np.repeat(np.arange(self.size), self.degree)
        upward = self.neighbours > tail
        self.low, self.high = tail[upward], self.neighbours[upward]  # ends of each edge; sorted
        # How many neighbours of `low` come before `high`.
        self.before = np.flatnonzero(upward) - self.start[self.low]
        self.keys = self.low * self.size + self.high
        self.above = np.bincount(self.low, minlength=self.size)

    def edge(self, low: Ints, high: Ints) -> Ints:
        """Returns the index of the edges between nodes low < high; any index if there is none."""
        return np.minimum(np.searchsorted(self.keys, low * self.size + high), len(self.keys) - 1)

    def per_node(self, to_low: Ints, to_high: Ints) -> Ints:
        """Returns the sum, per node, of what each edge adds to its low and to its high end."""
        total = np.zeros(self.size, np.int64)
        np.add.at(total, self.low, to_low)
        np.add.at(total, self.high, to_high)
        return total

    def larger(self, cliques: Ints) -> Iterator[Ints]:
        """Yields, in batches, all cliques [k + 1, m'] that extend one of `cliques` [k, m].

        Nodes of a clique are in ascending order. The new node is above the others.
        """
        top = cliques[-1]
        first = self.start[top + 1] - self.above[top]
        for part in _batches(self.above[top], _BATCH):
            which, place = _items(self.above[top[part]])
            which += part.start
            node = self.neighbours[first[which] + place]
            for member in cliques[-2::-1]:
                wanted = member[which] * self.size + node
                linked = self.keys[self.edge(member[which], node)] == wanted
                which, node = which[linked], node[linked]
            yield np.vstack((cliques[:, which], node))

    def cycles(self) -> Ints:
        """Returns in how many cycles of 4 nodes each node is, with or without chords.

        A cycle is two wedges top - middle - far with different middles. Both middles and the far
        node are below the top. The far nodes of a middle are its neighbours before the top, so
        there are few wedges even around hubs.
        """
        by_top = np.argsort(self.high, kind="stable")
        middle, top, wedges = self.low[by_top], self.high[by_top], self.before[by_top]
        bounds = np.searchsorted(top, np.arange(self.size + 1))
        sums = np.append(0, wedges.cumsum())[bounds]
        # The number of wedges from a top (row) to a far node (column).
        table = np.zeros(max(_CELLS * _BATCH, self.size), np.int32)
        twice = np.zeros(self.size, np.int64)
        for rows in _batches(np.diff(sums) + -(-self.size // _CELLS), _BATCH):
            items = slice(bounds[rows.start], bounds[rows.stop])
            which, place = _items(wedges[items])
            far = self.neighbours[self.start[middle[items]][which] + place]
            cell = (top[items][which] - rows.start) * self.size + far
            np.add.at(table, cell, 1)
            others = table[cell].astype(np.int64) - 1
            table[cell] = 0
            closed = np.flatnonzero(others)
            which, far, others = which[closed], far[closed], others[closed]
            # The top and the far node are in both wedges of a cycle, a middle in one.
            np.add.at(twice, top[items][which], others)
            np.add.at(twice, far, others)
            np.add.at(twice, middle[items][which], 2 * others)
        return twice // 2


def _batches(sizes: Ints, limit: int) -> Iterator[slice]:
    """Yields slices that cover `sizes` in order, each of one item or with a sum within `limit`."""
    ends = sizes.cumsum()
    start = 0
    while start < len(sizes):
        done = ends[start - 1] if start else 0
        stop = max(int(np.searchsorted(ends, done + limit, side="right")), start + 1)
        yield slice(start, stop)
        start = stop


def _items(sizes: Ints) -> tuple[Ints, Ints]:
    """Returns, for all parts of items of these sizes, the index of the item and the place in it.

    [2, 1] gives [0, 0, 1] and [0, 1, 0].
    """
    which = np.repeat(np.arange(len(sizes)), sizes)
    return which, np.arange(len(which)) - (sizes.cumsum() - sizes)[which]
