"""Edge weights that are learnt: graphs whose products carry a gradient to them, and their network.

The edges of a graph are those of adjacency("sum"), in its order.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from fedloom.data.graph import WITH_LOOPS, Graph, scaled
from fedloom.data.sparse import weighted
from fedloom.nn.augment import Entries, entries
from fedloom.nn.layers import Noise
from fedloom.nn.model import Model
from fedloom.nn.operations import operation


class EdgeWeighted(Graph):
    """A graph with a weight for every edge, to which adjacency products carry a gradient.

    Weights that the data already have are multiplied. Self-loops keep their weight.

    Attributes:
        whole: The graph without these weights.
        weight: The weights, [edges].
    """

    transient = True
    whole: Graph
    weight: Tensor
    _values: dict[str, Tensor]

    def __init__(self, whole: Graph, weight: Tensor):
        # What is cached about features and the positions of edges is still valid.
        vars(self).update(vars(whole), whole=whole, weight=weight, _values={})

    def propagate(self, h: Tensor, kind: str = "sym") -> Tensor:
        """Returns the weighted adjacency times h, differentiable in both."""
        if kind not in self._values:
            self._values[kind] = self.normalised(kind)
        return weighted(self.whole.adjacency(kind), self._values[kind], h)

    def normalised(self, kind: str) -> Tensor:
        """Returns the entries of adjacency(kind) with these weights, in its order."""
        return weighted_entries(self.whole, self.weight, kind)

    @staticmethod
    def of_edges(whole: Graph, weight: Tensor) -> Tensor:
        """Returns `weight` with one number for each edge of a graph."""
        return weight


def weighted_entries(graph: Graph, score: Tensor, kind: str) -> Tensor:
    """Returns the entries of a graph's adjacency(kind) with weights [edges]; differentiable."""
    edges, (source, target) = entries(graph), edge_ends(graph)
    at, known = graph.cached("places of edges", lambda: _places(edges))
    weight = known * score
    if kind in WITH_LOOPS:
        source, target = edges.source, edges.target
        weight = edges.weight.index_copy(0, at, weight)
    degree = torch.zeros(graph.num_nodes).index_add(0, target, weight)
    return scaled(kind, source, target, weight, degree)


def _places(edges: Entries) -> tuple[Tensor, Tensor]:
    """Returns the positions of the entries that are no self-loops, and their weights."""
    at = (~edges.loop).nonzero().flatten()
    return at, edges.weight[at]


def edge_ends(graph: Graph) -> tuple[Tensor, Tensor]:
    """Returns the sources and targets of a graph's edges."""

    def make() -> tuple[Tensor, Tensor]:
        edges = entries(graph)
        return edges.source[~edges.loop], edges.target[~edges.loop]

    return graph.cached("proper edges", make)


# ---- a network that scores edges ----


class EdgeNorm(nn.Module):
    """BatchNorm over the edges of the current graph, with a learned scale and shift."""

    EPS = 1e-5

    def __init__(self, width: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, g: Tensor) -> Tensor:
        """Takes and returns [edges, width]."""
        if not len(g):
            return g
        variance, mean = torch.var_mean(g, 0, correction=0)
        return (g - mean) * (variance + self.EPS).rsqrt() * self.weight + self.bias


class EdgeEvaluator(nn.Module):
    """Scores edges: a GCN, then an MLP of both endpoints' rows, 2C → C → C/2 → 1.

    Args:
        gcn: The GCN, with C columns.
        classes: C.
    """

    gcn: Model

    def __init__(self, gcn: Model, classes: int):
        super().__init__()
        widths = (classes, max(classes // 2, 1))
        self.gcn = gcn
        self.source, self.target = (nn.Linear(classes, classes, bias=False) for _ in range(2))
        self.hidden = nn.ModuleList(nn.Linear(*sizes, bias=False) for sizes in pairwise(widths))
        self.norms = nn.ModuleList(map(EdgeNorm, widths))
        self.out = nn.Linear(widths[-1], 1)

    def forward(self, graph: Graph, rng: Generator | None = None) -> Tensor:
        """Returns a number for each edge of a graph, [edges]."""
        return edge_scores(self, graph, rng)


@operation
def edge_scores(evaluator: EdgeEvaluator, graph: Graph, rng: Noise | None) -> Tensor:
    """Runs an evaluator. Returns a number for each edge, [edges]."""
    source, target = edge_ends(graph)
    h = evaluator.gcn(graph, rng)
    # A linear map of [h_i ‖ h_j] is the sum of two maps of nodes, which are fewer than edges.
    g = evaluator.source(h).index_select(0, source) + evaluator.target(h).index_select(0, target)
    first, *norms = evaluator.norms
    g = F.relu(first(g))
    for layer, norm in zip(evaluator.hidden, norms, strict=True):
        g = F.relu(norm(layer(g)))
    out: Tensor = evaluator.out(g).squeeze(1)
    return out
