"""Links: scores of candidate pairs of nodes, random draws of them, and their reconstruction.

The candidates are a graph that has every pair i < j, sorted, and then their reverses.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from fedloom.data.graph import WITH_LOOPS, Graph, scaled
from fedloom.data.sparse import Sparse
from fedloom.nn.edge_weights import EdgeWeighted
from fedloom.nn.operations import operation


def pairs_of(suggested: Graph) -> Tensor:
    """Returns the candidate pairs, [2, pairs], i < j."""
    return suggested.edge_index[:, : suggested.num_edges // 2]


def scores(h: Tensor, pairs: Tensor) -> Tensor:
    """Returns h_i · h_j of each pair."""
    return (h.index_select(0, pairs[0]) * h.index_select(0, pairs[1])).sum(1)


@operation
def link_scores(h: Tensor, suggested: Graph) -> Tensor:
    """Returns h_i · h_j of each candidate, [pairs]."""
    return scores(h, pairs_of(suggested))


@operation
def draw_links(score: Tensor, alpha: float, softness: float, rng: Generator) -> Tensor:
    """Draws candidates by relaxed Bernoulli with a straight-through gradient.

    A candidate is drawn with probability α σ(score) + 1 − α. Returns 1 if it is drawn, else 0, with
    the gradient of the relaxed draw.

    Args:
        score: Of each candidate, [pairs].
        alpha: α.
        softness: The temperature of the gradient.
        rng: The source of randomness.
    """
    return relaxed_draw(score, torch.rand(len(score), generator=rng), alpha, softness)


def relaxed_draw(score: Tensor, uniform: Tensor, alpha: float, softness: float) -> Tensor:
    """Returns what `draw_links` returns, from random numbers in [0, 1)."""
    probability = alpha * torch.sigmoid(score) + 1 - alpha
    noise = torch.logit(uniform, eps=1e-6)
    soft = torch.sigmoid((torch.logit(probability, eps=1e-6) + noise) / softness)
    drawn = soft.detach() > 0.5
    return drawn.float() + (soft - soft.detach())  # 0 or 1, with the gradient of `soft`


class DrawnLinks(EdgeWeighted):
    """A graph of drawn links, whose adjacency products carry a gradient to the draw.

    Attributes:
        whole: The graph of all candidates.
        weight: 1 if a candidate is drawn, else 0, [pairs].
    """

    transient = False

    def __init__(self, whole: Graph, weight: Tensor):
        super().__init__(whole, weight)
        vars(self)["_cache"] = {"features": whole.sparse_x}

    @property
    def edge_index(self) -> Tensor:
        """The links that are drawn, in both directions."""
        drawn = self.weight.detach() > 0
        return self.cached("drawn", lambda: self.whole.edge_index[:, drawn.repeat(2)])

    def normalised(self, kind: str) -> Tensor:
        """Returns the entries of the candidates' adjacency(kind) with these weights."""
        n, (source, target), weight = self.num_nodes, self.whole.edge_index, self.weight.repeat(2)
        if kind in WITH_LOOPS:
            loop = torch.arange(n)
            source, target = torch.cat([source, loop]), torch.cat([target, loop])
            weight = torch.cat([weight, torch.ones(n)])
        order = self.whole.cached(
            ("order", kind), lambda: torch.argsort(target * n + source, stable=True)
        )
        degree = torch.zeros(n).index_add(0, target, weight)
        return scaled(kind, source, target, weight, degree).index_select(0, order)

    @staticmethod
    def of_edges(whole: Graph, weight: Tensor) -> Tensor:
        """Returns `weight` with one number for each direction of a candidate."""
        return weight.index_select(0, pair_of_edge(whole))


def pair_of_edge(suggested: Graph) -> Tensor:
    """Returns the number of the pair of each entry of the candidates' adjacency("sum")."""

    def make() -> Tensor:
        edges: Sparse = suggested.adjacency("sum")
        # Entries above the diagonal are the pairs, in their order. `order` finds the mirrored one.
        above = edges.indices > edges.rows
        number = above.cumsum(0) - 1
        return torch.where(above, number, number[edges.order])

    return suggested.cached("pair of each edge", make)


@operation
def reconstruction(h: Tensor, suggested: Graph, rng: Generator) -> Tensor:
    """Returns ½ (mean over candidates of −log σ(g) + mean over random other pairs of −log σ(−g)).

    g is h_i · h_j. There are at most as many other pairs as candidates.
    """
    n, linked = suggested.num_nodes, pairs_of(suggested)
    others = torch.randint(n, linked.shape, generator=rng).sort(0).values
    known, key = linked[0] * n + linked[1], others[0] * n + others[1]
    others = others[:, (others[0] < others[1]) & ~torch.isin(key, known)]
    kinds = (F.softplus(-scores(h, linked)), F.softplus(scores(h, others)))
    # A complete graph has no other pairs.
    return 0.5 * sum((each.mean() for each in kinds if len(each)), h.sum() * 0.0)
