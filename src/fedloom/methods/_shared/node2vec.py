"""Node2Vec: random walks, and vectors in which nodes on the same walks are similar.

Graphs are SciPy CSR matrices [n, n]. Any stored entry other than 0 is an edge. They are treated as
undirected and simple: both directions, no self-loops.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from scipy.sparse import csr_matrix
from torch import Tensor

from fedloom.methods._shared.structure import simple_graph

_PROPOSALS = 32  # per step of a walk, before the step is drawn from the full law
_WALKS = 128  # the most walks in a batch of skip-gram
# The fewest steps of skip-gram in an epoch. A small graph has few walks but needs as many steps.
_STEPS = 500
_POOL = 64  # negatives that all pairs of a batch share


def random_walks(
    adjacency: csr_matrix,
    starts: Tensor,
    length: int,
    rng: torch.Generator,
    p: float = 1.0,
    q: float = 1.0,
) -> Tensor:
    """Draws one walk from every node in `starts` [m]. Returns them as rows, [m, length].

    A node without neighbours stays where it is. The law is Node2Vec's: a walk that came from t to
    v continues to a neighbour x of v with a probability proportional to 1/p if x = t, to 1 if x is
    a neighbour of t, and to 1/q otherwise. The first step is uniform.

    Args:
        adjacency: The graph.
        starts: The first node of each walk.
        length: The number of nodes of a walk.
        rng: The random stream.
        p: The return parameter.
        q: The in-out parameter.
    """
    _require_positive(p=p, q=q)
    if length < 1:
        raise ValueError(f"length is {length}; a walk has at least 1 node")
    law = _Law(simple_graph(adjacency), p, q)
    walks = starts.long().repeat(length, 1)  # one row per step, so that whole rows are written
    for step in range(1, length):
        walks[step] = (
            law.uniform(walks[step - 1], rng)
            if step == 1
            else law.step(walks[step - 2], walks[step - 1], rng)
        )
    return walks.T.contiguous()


class _Law:
    """Steps of many walkers at once, by rejection.

    A uniform neighbour is proposed and accepted with probability weight / largest weight.
    """

    def __init__(self, graph: csr_matrix, p: float, q: float):
        self.size = graph.shape[0]
        self.offsets = torch.from_numpy(graph.indptr).long()
        self.neighbours = torch.from_numpy(graph.indices).long()
        self.degree = self.offsets.diff()
        self.back, self.near, self.far = 1 / p, 1.0, 1 / q
        # Sorted, because rows and their neighbours are. A binary search finds an edge.
        tail = torch.repeat_interleave(torch.arange(self.size), self.degree)
        self.edges = tail * self.size + self.neighbours

    def uniform(self, at: Tensor, rng: torch.Generator) -> Tensor:
        """Returns a uniformly drawn neighbour of each node; the node itself if it has none."""
        if len(self.neighbours) == 0:
            return at
        degree = self.degree[at]
        drawn = (torch.rand(len(at), generator=rng, dtype=torch.float64) * degree).long()
        # The clamp is for a last node without neighbours.
        index = (self.offsets[at] + drawn).clamp(max=len(self.neighbours) - 1)
        return torch.where(degree > 0, self.neighbours[index], at)

    def weights(self, before: Tensor, to: Tensor) -> Tensor:
        """Returns the weight of a step to `to` for walkers that were at `before` a step ago."""
        wanted = before * self.size + to
        found = torch.searchsorted(self.edges, wanted).clamp(max=len(self.edges) - 1)
        weight = torch.where(self.edges[found] == wanted, self.near, self.far).double()
        return torch.where(to == before, self.back, weight)

    def step(self, before: Tensor, at: Tensor, rng: torch.Generator) -> Tensor:
        """Returns the next node of walkers that went from `before` to `at`."""
        following = self.uniform(at, rng)
        if self.back == self.near == self.far:
            return following
        largest = max(self.back, self.near, self.far)
        waiting = (self.degree[at] > 0).nonzero().squeeze(1)
        for _ in range(_PROPOSALS):
            drawn = torch.rand(len(waiting), generator=rng, dtype=torch.float64)
            accepted = drawn * largest < self.weights(before[waiting], following[waiting])
            waiting = waiting[~accepted]
            if len(waiting) == 0:
                return following
            following[waiting] = self.uniform(at[waiting], rng)
        # Rejections have no memory, so the remaining walkers may draw from the law itself. This
        # bounds the time for any p and q.
        following[waiting] = self.exact(before[waiting], at[waiting], rng)
        return following

    def exact(self, before: Tensor, at: Tensor, rng: torch.Generator) -> Tensor:
        """As `step`, from the weights of all neighbours."""
        degree = self.degree[at]
        ends = degree.cumsum(0)
        shift = torch.repeat_interleave(self.offsets[at] - (ends - degree), degree)
        choices = self.neighbours[shift + torch.arange(int(ends[-1]))]
        sums = self.weights(torch.repeat_interleave(before, degree), choices).cumsum(0)
        low = torch.cat((sums.new_zeros(1), sums))[ends - degree]
        drawn = torch.rand(len(at), generator=rng, dtype=torch.float64)
        target = low + drawn * (sums[ends - 1] - low)
        index = torch.searchsorted(sums, target, right=True)
        # Rounding must not reach the neighbours of the next walker.
        return choices[torch.minimum(index, ends - 1)]


def node2vec(
    adjacency: csr_matrix,
    width: int,
    rng: torch.Generator,
    *,
    walks: int = 10,
    length: int = 20,
    window: int = 10,
    p: float = 1.0,
    q: float = 1.0,
    negatives: int = 5,
    epochs: int = 2,
    lr: float = 0.003,
) -> Tensor:
    """Returns Node2Vec vectors [n, width] (Grover & Leskovec, KDD 2016).

    Nodes that random walks visit close to each other get similar vectors. Nodes without neighbours
    keep their first vector, which is small and random.

    Args:
        adjacency: The graph.
        width: The width of a vector.
        rng: The only random stream that is used.
        walks: Walks from every node, by the law of `random_walks`.
        length: Nodes of a walk.
        window: Nodes at most this far apart on a walk form a pair.
        p: The return parameter.
        q: The in-out parameter.
        negatives: How many drawn nodes (by visits^0.75) count against one pair.
        epochs: Passes over the walks; more if there are fewer walks than steps to take.
        lr: The learning rate of Adam.
    """
    _require_positive(p=p, q=q, lr=lr)
    counts = {
        "width": width,
        "walks": walks,
        "window": window,
        "negatives": negatives,
        "epochs": epochs,
    }
    wrong = [f"{name} {number}" for name, number in counts.items() if number < 1]
    if length < 2:
        wrong.append(f"length {length}")
    if wrong:
        raise ValueError(
            f"node2vec cannot use {', '.join(wrong)}; length must be at least 2, the others 1"
        )
    graph = simple_graph(adjacency)
    vectors = (torch.rand(graph.shape[0], width, generator=rng) - 0.5) / width
    starts = torch.from_numpy(np.flatnonzero(np.diff(graph.indptr)))
    if len(starts) == 0:
        return vectors
    visited = random_walks(graph, starts.repeat(walks), length, rng, p, q)
    return _skip_gram(visited, vectors, rng, window, negatives, epochs, lr)


def _skip_gram(
    walks: Tensor,
    vectors: Tensor,
    rng: torch.Generator,
    window: int,
    negatives: int,
    epochs: int,
    lr: float,
) -> Tensor:
    """Trains `vectors` [n, width] by skip-gram with negative sampling over walks [m, length].

    All pairs of a walk are one small matrix product, restricted to the band of the window. The
    pairs of a batch share their negatives, which get the weight of each pair's own ones. That is
    the same loss in expectation, as a product instead of a gather per pair.
    """
    inner = vectors.requires_grad_()
    outer = torch.zeros_like(vectors, requires_grad=True)
    optimizer = torch.optim.SparseAdam([inner, outer], lr=lr)  # moves only rows of the batch
    place = torch.arange(walks.shape[1])
    apart = (place[:, None] - place[None, :]).abs()
    pairs = ((apart > 0) & (apart <= window)).float()
    visits = torch.bincount(walks.flatten(), minlength=len(vectors)).double().pow(0.75).cumsum(0)
    batch_size = min(max(len(walks) // _STEPS, 1), _WALKS)
    for _ in range(epochs * -(-_STEPS // len(walks))):
        for batch in torch.randperm(len(walks), generator=rng).split(batch_size):
            nodes = walks[batch]
            lots = torch.rand(_POOL, generator=rng, dtype=torch.float64) * visits[-1]
            drawn = torch.searchsorted(visits, lots, right=True)
            centre = F.embedding(nodes, inner, sparse=True)
            context = F.embedding(nodes, outer, sparse=True)
            noise = F.embedding(drawn, outer, sparse=True)
            attract = (F.softplus(-(centre @ context.mT)) * pairs).sum()
            repel = (F.softplus(centre @ noise.T) * pairs.sum(1)[:, None]).sum()
            loss = (attract + repel * (negatives / _POOL)) / (len(batch) * pairs.sum())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return inner.detach()


def _require_positive(**numbers: float) -> None:
    for name, number in numbers.items():
        if not 0 < number < float("inf"):
            raise ValueError(f"{name} must be above 0 and finite, not {number}")
