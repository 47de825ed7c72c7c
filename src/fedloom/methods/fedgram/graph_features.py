"""Graph features: a fixed map from a small graph to a vector of length 1, with nothing to fit.

The vector has three blocks, which complement each other:

1. of the whole graph: random Fourier features of its size, its degrees and the mean, deviation and
   maximum of its nodes' contexts. They approximate a Gaussian kernel between such summaries.
2. of its nodes: the mean of random Fourier features of the nodes' contexts. It approximates the
   mean embedding of the distribution of the contexts (Muandet et al., 2017).
3. of its subtrees: the Weisfeiler-Leman labels (Shervashidze et al., 2011), counted and hashed with
   signs (Weinberger et al., 2009).

The context of a node consists of its own features, those of its neighbourhoods, and the degrees
around it. All random numbers come from a public hash of their position. So every party computes the
same map, and a graph's vector depends on that graph alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.data.graph import Graph
from fedloom.data.hashing import Hashes, mixed
from fedloom.errors import DataError

Floats = NDArray[np.float32]

HOPS = 3  # of a node's context
MOST_FEATURES = 64  # wider node features are projected to this number of columns
DEGREE_BINS = 16
# The widths of the Gaussian kernels of blocks 1 and 2, as the deviation of the frequencies.
GRAPH_FREQUENCY = 0.3
NODE_FREQUENCY = 2.0
SUBTREES = 0.5  # the weight of block 3; the other two have weight 1
DECAY = 0.7  # the weight of each Weisfeiler-Leman round relative to the round before
EXACT = 16  # larger features give a start label only by their order of magnitude
# What the numbers of `_hashed_uniform` are for; two purposes never share a number.
FOR_PROJECTION, FOR_GRAPHS, FOR_NODES, FOR_COLUMNS = range(4)
NODES_AT_ONCE = 16384  # bounds the memory of block 2


def graph_features(graph: Graph, width: int, rounds: int = 4) -> Tensor:
    """Returns one vector of length 1 per small graph, [graphs, width] float32.

    The direction and the weights of edges are ignored, and so are self-loops. The order of the
    nodes does not matter. The features may be one-hot, counts, real numbers or a constant.

    Args:
        graph: Many small graphs; see `Graph.batch`.
        width: The number of columns, at least 8.
        rounds: The number of Weisfeiler-Leman rounds after the start labels.
    """
    if graph.batch is None:
        raise DataError(f"graph {graph.name!r}: graph_features: the items are nodes, not graphs")
    if width < 8:
        raise ValueError(f"width is {width}, must be at least 8")
    parts = _Parts.of(graph)
    context = _contexts(parts, _scaled_features(graph))
    quarter = width // 8 * 2  # Fourier features come in pairs
    blocks = [
        _unit(_fourier(torch.from_numpy(_summaries(parts, context)), quarter, FOR_GRAPHS)),
        _unit(_mean_embedding(parts, torch.from_numpy(context), quarter)),
        SUBTREES * _unit(_subtrees(parts, _start_labels(graph.x), width - 2 * quarter, rounds)),
    ]
    return _unit(torch.cat(blocks, 1))


# ---- the structure ----
@dataclass(frozen=True)
class _Parts:
    """Small graphs as a simple undirected graph, with what the features need of its structure.

    Attributes:
        adjacency: The neighbours of each node, [nodes, nodes], all entries 1.
        degree: The number of neighbours, [nodes].
        graph: The graph of each node, [nodes], ascending.
        size: The number of nodes of each graph, [graphs].
    """

    adjacency: sp.csr_matrix
    degree: Floats
    graph: NDArray[np.int64]
    size: NDArray[np.int64]

    @classmethod
    def of(cls, graph: Graph) -> _Parts:
        """Returns the parts of a graph whose items are small graphs."""
        assert graph.batch is not None
        source, target = graph.edge_index.numpy()
        proper = source != target
        ends = np.concatenate([source[proper], target[proper]])
        others = np.concatenate([target[proper], source[proper]])
        n = graph.num_nodes
        adjacency = sp.csr_matrix((np.ones(len(ends), np.float32), (ends, others)), shape=(n, n))
        adjacency.data[:] = 1  # the constructor adds up an edge's two directions and its repeats
        adjacency.sort_indices()
        degree = np.diff(adjacency.indptr).astype(np.float32)
        batch = graph.batch.numpy()
        size = np.bincount(batch, minlength=graph.num_items)
        return cls(adjacency, degree, batch, size)

    def neighbour_mean(self, h: Floats) -> Floats:
        """Returns the mean of h over each node's neighbours, 0 without neighbours."""
        mean: Floats = (self.adjacency @ h) / np.maximum(self.degree, 1)[:, None]
        return mean

    def neighbour_sum(self, values: Hashes) -> Hashes:
        """Returns the sum of numbers over each node's neighbours, modulo 2^64."""
        return _segment_sums(values[self.adjacency.indices], self.adjacency.indptr)

    def total(self, h: Floats) -> Floats:
        """Returns the sum of h over each graph's nodes, [graphs, width]."""
        return self._reduced(np.add, h)

    def mean(self, h: Floats) -> Floats:
        """Returns the mean of h over each graph's nodes, [graphs, width]."""
        return self.total(h) / np.maximum(self.size, 1).astype(np.float32)[:, None]

    def maximum(self, h: Floats) -> Floats:
        """Returns the maximum of h over each graph's nodes, [graphs, width]."""
        return self._reduced(np.maximum, h)

    def _reduced(self, operation: np.ufunc, h: Floats) -> Floats:
        # `reduceat` cannot make an empty segment, so graphs without nodes keep 0.
        out = np.zeros((len(self.size), h.shape[1]), np.float32)
        filled = self.size > 0
        starts = (np.cumsum(self.size) - self.size)[filled]
        if h.shape[1]:
            out[filled] = operation.reduceat(h, starts, axis=0)
        return out


# ---- blocks 1 and 2: contexts ----
def _scaled_features(graph: Graph) -> Floats:
    """Returns the node features on a common scale, [nodes, at most MOST_FEATURES].

    One-hot features stay as they are. Large numbers shrink to their logarithm, and long rows to the
    square root of their length, since no statistics of the data may be used to scale them.
    """
    h = torch.sign(graph.x) * torch.log2(1 + graph.x.abs())
    if h.shape[1] > MOST_FEATURES:
        uniform = _hashed_uniform(FOR_PROJECTION, h.shape[1], MOST_FEATURES)
        signs = np.where(uniform < 0.5, -1.0, 1.0) / np.sqrt(MOST_FEATURES)
        h = h @ torch.from_numpy(signs.astype(np.float32))
    length = torch.linalg.vector_norm(h, dim=1, keepdim=True)
    scaled: Floats = (h / length.clamp(min=1).sqrt()).numpy()
    return scaled


def _contexts(parts: _Parts, x: Floats) -> Floats:
    """Returns a vector per node: its features and degree, and their means over 1 to HOPS hops."""
    hops = [np.concatenate([x, np.log1p(parts.degree)[:, None]], 1)]
    for _ in range(HOPS):
        hops.append(parts.neighbour_mean(hops[-1]))
    return np.concatenate(hops, 1)


def _summaries(parts: _Parts, context: Floats) -> Floats:
    """Returns a vector per graph: size, density, degrees, and the pooled contexts."""
    size = parts.size.astype(np.float32)[:, None]
    nodes = np.maximum(size, 1)
    degree = parts.degree[:, None]
    edges = parts.total(degree) / 2
    largest = parts.maximum(degree)
    full = (degree >= size[parts.graph] - 1).astype(np.float32)  # joined to every other node
    # Bins of equal width in the logarithm, two for each doubling of the degree.
    bins = np.minimum(2 * np.log2(1 + degree), DEGREE_BINS - 1).astype(np.int64)
    histogram = (bins == np.arange(DEGREE_BINS)).astype(np.float32)
    mean = parts.mean(context)
    deviation = np.sqrt(parts.mean((context - mean[parts.graph]) ** 2))
    summary = [
        np.log1p(size),
        np.log1p(edges),
        edges / nodes,
        np.log1p(edges / nodes),
        edges / np.maximum(size * (size - 1) / 2, 1),
        np.log1p(largest),
        largest / nodes,
        parts.mean(full),
        parts.mean(histogram),
        mean,
        deviation,
        parts.maximum(context),
    ]
    return np.concatenate(summary, 1).astype(np.float32)


def _mean_embedding(parts: _Parts, context: Tensor, width: int) -> Tensor:
    """Returns the mean over each graph's nodes of Fourier features of contexts."""
    out = torch.zeros(len(parts.size), width)
    graph = torch.from_numpy(parts.graph)
    for some, owner in zip(context.split(NODES_AT_ONCE), graph.split(NODES_AT_ONCE), strict=True):
        out.index_add_(0, owner, _fourier(some, width, FOR_NODES))
    return out / torch.from_numpy(parts.size).clamp(min=1)[:, None]


def _fourier(h: Tensor, width: int, purpose: int) -> Tensor:
    """Returns random Fourier features, [rows, width]; their products approximate a Gaussian."""
    scale = GRAPH_FREQUENCY if purpose == FOR_GRAPHS else NODE_FREQUENCY
    phase = h @ torch.from_numpy(_hashed_normal(purpose, h.shape[1], width // 2) * scale).float()
    return torch.cat([phase.cos(), phase.sin()], 1)


# ---- block 3: subtrees ----
def _subtrees(parts: _Parts, labels: Hashes, width: int, rounds: int) -> Tensor:
    """Returns the Weisfeiler-Leman labels of all rounds, counted and hashed, [graphs, width]."""
    out = torch.zeros(len(parts.size), width)
    for r in range(rounds + 1):
        if r:
            labels = mixed(3 * labels + mixed(parts.neighbour_sum(mixed(labels))))
        out += DECAY**r * _unit(_counted(parts, mixed(labels + np.uint64(r)), width))
    return out


def _counted(parts: _Parts, labels: Hashes, width: int) -> Tensor:
    """Returns the square roots of each graph's label counts, added with signs into bins."""
    order = np.lexsort((labels, parts.graph))
    label, graph = labels[order], parts.graph[order]
    new = np.ones(len(label), bool)
    new[1:] = (label[1:] != label[:-1]) | (graph[1:] != graph[:-1])
    first = np.flatnonzero(new)
    root = np.sqrt(np.diff(np.append(first, len(label))))
    label, graph = label[first], graph[first]
    place = graph * width + (label % np.uint64(width)).astype(np.int64)
    signed = np.where(label >> np.uint64(63), root, -root)
    sums = np.bincount(place, signed, minlength=len(parts.size) * width)
    return torch.from_numpy(sums.astype(np.float32)).view(len(parts.size), width)


def _start_labels(x: Tensor) -> Hashes:
    """Returns a label per node, a hash of those of its features that are integers.

    Real numbers would give nearly every node a label of its own, so blocks 1 and 2 alone use them.
    """
    value = torch.where(x == x.round(), x, 0)
    power = torch.sign(value) * torch.exp2(torch.log2(value.abs().clamp(min=1)).floor())
    value = torch.where(value.abs() > EXACT, power, value)
    row, column = value.numpy().nonzero()
    bits = value.numpy()[row, column].view(np.uint32).astype(np.uint64)
    names = mixed(np.arange(x.shape[1], dtype=np.uint64))
    ends = np.searchsorted(row, np.arange(len(x) + 1))
    return mixed(_segment_sums(mixed(bits + names[column]), ends))


# ---- public random numbers ----
def _hashed_uniform(purpose: int, rows: int, columns: int) -> NDArray[np.float64]:
    """Returns [rows, columns] numbers between 0 and 1; each depends only on its own position."""
    row = mixed(np.arange(rows, dtype=np.uint64) + np.uint64(purpose << 32))
    column = mixed(np.arange(columns, dtype=np.uint64) + np.uint64(FOR_COLUMNS << 32))
    bits = mixed(row[:, None] + column) >> np.uint64(11)
    return (bits.astype(np.float64) + 0.5) / 2.0**53


def _hashed_normal(purpose: int, rows: int, columns: int) -> NDArray[np.float64]:
    """Returns [rows, columns] normal numbers; each depends only on its own position."""
    uniform = _hashed_uniform(purpose, rows, 2 * columns)
    radius = np.sqrt(-2 * np.log(uniform[:, ::2]))
    return radius * np.cos(2 * np.pi * uniform[:, 1::2])  # Box and Muller


def _segment_sums(values: Hashes, ends: NDArray[np.int_]) -> Hashes:
    """Returns the sums of values[ends[i]:ends[i + 1]], modulo 2^64."""
    running = np.concatenate([np.zeros(1, np.uint64), np.cumsum(values, dtype=np.uint64)])
    return running[ends[1:]] - running[ends[:-1]]


def _unit(h: Tensor) -> Tensor:
    """Returns h with rows of length 1; rows of zeros stay."""
    return h / torch.linalg.vector_norm(h, dim=1, keepdim=True).clamp(min=1e-12)
