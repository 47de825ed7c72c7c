"""Structure features: what a node's place in a graph says about it, its own features and label aside.

Three kinds, from the nearest to the farthest: degrees, graphlets (small patterns around a node), Node2Vec (where random walks lead).
Graphs come as SciPy CSR matrices [n, n]; any stored entry other than 0 is an edge. Walks and graphlets take them as undirected and simple:
both directions, no self-loops.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from scipy.sparse import csr_matrix, triu
from torch import Tensor

from fedloom.errors import ConfigError

ORBITS = {4: 15, 5: 73}  # of the graphlets with 2 to 4, and with 2 to 5 nodes

_PROPOSALS = 32  # per step of a walk, before its law is written out in full
_WALKS = 128  # in a batch of skip-gram, at most
_STEPS = 500  # of skip-gram in an epoch, at least: a small graph has few walks, and needs as many steps
_POOL = 64  # negatives that all pairs of a batch share


def degree_features(degree: Tensor, width: int) -> Tensor:
    """Takes degrees [n] (halves are welcome: the mean of in and out), gives one-hot rows [n, width] of the degree rounded.

    A half goes to the even side, as everywhere in Python; degrees of width - 1 and more share the last column.
    """
    if width < 1:
        raise ValueError(f"width must be at least 1, not {width}")
    if not bool(((degree >= 0) & torch.isfinite(degree)).all()):
        raise ValueError("degrees must be finite and not negative")
    return F.one_hot(degree.double().round().clamp(max=width - 1).long(), width).float()


def graphlet_features(adjacency: csr_matrix, size: int = 4, *, log: bool = True) -> Tensor:
    """Graphlet degree vectors (Przulj, 2007): [n, 15] for `size` 4, [n, 73] for 5.

    Column i counts in how many induced graphlets of up to `size` nodes a node takes position (orbit) i; column 0 is its degree. Counts span
    many powers of ten, so `log` gives log(1 + count). By orca-graphlets, which is Python: Cora takes a quarter of a second with size 4 and
    7 seconds with size 5, and time grows with the cube of the largest degree (the fourth power with 5).
    """
    if size not in ORBITS:
        raise ValueError(f"graphlets of up to {size} nodes cannot be counted; valid: {', '.join(map(str, ORBITS))}")
    try:
        from orca import orca_nodes  # at first use: it is optional
    except ImportError:
        raise ConfigError("method.structure 'gdv' needs the package orca-graphlets: pip install 'fedloom[graphlets]'") from None
    upper = triu(_simple(adjacency), format="coo")
    edges = np.stack((upper.row, upper.col), axis=1).astype(np.int64)
    counts = torch.from_numpy(orca_nodes(edges, adjacency.shape[0], graphlet_size=size)).double()
    return (counts.log1p() if log else counts).float()


def random_walks(adjacency: csr_matrix, starts: Tensor, length: int, rng: torch.Generator, p: float = 1.0, q: float = 1.0) -> Tensor:
    """One walk of `length` nodes from every node in `starts` [m], as rows [m, length]; a node without neighbours stays where it is.

    The law is Node2Vec's. A walk that came from t to v goes on to a neighbour x of v with a probability proportional to 1/p if x = t, to 1
    if x is a neighbour of t, to 1/q otherwise. The first step is uniform.
    """
    _require_positive(p=p, q=q)
    if length < 1:
        raise ValueError(f"a walk has at least 1 node, not {length}")
    law = _Law(_simple(adjacency), p, q)
    walks = starts.long().repeat(length, 1)  # a row per step: whole rows are written
    for step in range(1, length):
        walks[step] = law.uniform(walks[step - 1], rng) if step == 1 else law.step(walks[step - 2], walks[step - 1], rng)
    return walks.T.contiguous()


class _Law:
    """Steps of many walkers at once, by rejection: a uniform neighbour is proposed and taken with probability weight / largest weight."""

    def __init__(self, graph: csr_matrix, p: float, q: float):
        self.size = graph.shape[0]
        self.offsets, self.neighbours = torch.from_numpy(graph.indptr).long(), torch.from_numpy(graph.indices).long()
        self.degree = self.offsets.diff()
        self.back, self.near, self.far = 1 / p, 1.0, 1 / q
        # Sorted, as rows and the neighbours in them are: whether two nodes are neighbours is a binary search.
        self.edges = torch.repeat_interleave(torch.arange(self.size), self.degree) * self.size + self.neighbours

    def uniform(self, at: Tensor, rng: torch.Generator) -> Tensor:
        """A neighbour of each node, all equally likely; the node itself if it has none."""
        if len(self.neighbours) == 0:
            return at
        degree = self.degree[at]
        drawn = (torch.rand(len(at), generator=rng, dtype=torch.float64) * degree).long()
        index = (self.offsets[at] + drawn).clamp(max=len(self.neighbours) - 1)  # of a last node without neighbours
        return torch.where(degree > 0, self.neighbours[index], at)

    def weights(self, before: Tensor, to: Tensor) -> Tensor:
        """What a step to `to` weighs for walkers that were at `before` a step ago."""
        wanted = before * self.size + to
        found = torch.searchsorted(self.edges, wanted).clamp(max=len(self.edges) - 1)
        weight = torch.where(self.edges[found] == wanted, self.near, self.far).double()
        return torch.where(to == before, self.back, weight)

    def step(self, before: Tensor, at: Tensor, rng: torch.Generator) -> Tensor:
        """The next node of walkers that went from `before` to `at`."""
        following = self.uniform(at, rng)
        if self.back == self.near == self.far:
            return following
        largest = max(self.back, self.near, self.far)
        waiting = (self.degree[at] > 0).nonzero().squeeze(1)
        for _ in range(_PROPOSALS):
            accepted = torch.rand(len(waiting), generator=rng, dtype=torch.float64) * largest < self.weights(
                before[waiting], following[waiting]
            )
            waiting = waiting[~accepted]
            if len(waiting) == 0:
                return following
            following[waiting] = self.uniform(at[waiting], rng)
        # Proposals forget: who is still waiting may as well draw from the law itself. So no p and q take for ever.
        following[waiting] = self.exact(before[waiting], at[waiting], rng)
        return following

    def exact(self, before: Tensor, at: Tensor, rng: torch.Generator) -> Tensor:
        """The same law with the weights of all neighbours written out."""
        degree = self.degree[at]
        ends = degree.cumsum(0)
        entry = torch.repeat_interleave(self.offsets[at] - (ends - degree), degree) + torch.arange(int(ends[-1]))
        choices = self.neighbours[entry]
        sums = self.weights(torch.repeat_interleave(before, degree), choices).cumsum(0)
        low = torch.cat((sums.new_zeros(1), sums))[ends - degree]
        target = low + torch.rand(len(at), generator=rng, dtype=torch.float64) * (sums[ends - 1] - low)
        index = torch.searchsorted(sums, target, right=True)
        return choices[torch.minimum(index, ends - 1)]  # rounding must not reach into the next walker's neighbours


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
    """Node2Vec (Grover & Leskovec, KDD 2016): vectors [n, width] such that nodes that random walks visit together are alike.

    adjacency: the graph, taken as undirected. rng: the only source of chance. walks: from every node, of `length` nodes each, under the law
    of `random_walks`. window: nodes at most this far apart on a walk are a pair. negatives: how many drawn nodes (by visits^0.75) weigh
    against one pair. epochs: passes over the walks (more if there are fewer walks than steps to take). lr: of Adam. Nodes without neighbours keep their first vector, small and random.
    """
    _require_positive(p=p, q=q, lr=lr)
    counts = {"width": width, "walks": walks, "window": window, "negatives": negatives, "epochs": epochs}
    if wrong := {name: number for name, number in counts.items() if number < 1} | ({"length": length} if length < 2 else {}):
        raise ValueError(f"node2vec cannot do with {', '.join(f'{name} {number}' for name, number in wrong.items())}")
    graph = _simple(adjacency)
    vectors = (torch.rand(graph.shape[0], width, generator=rng) - 0.5) / width
    starts = torch.from_numpy(np.flatnonzero(np.diff(graph.indptr)))
    if len(starts) == 0:
        return vectors
    visited = random_walks(graph, starts.repeat(walks), length, rng, p, q)
    return _skip_gram(visited, vectors, rng, window, negatives, epochs, lr)


def _skip_gram(walks: Tensor, vectors: Tensor, rng: torch.Generator, window: int, negatives: int, epochs: int, lr: float) -> Tensor:
    """Skip-gram with negative sampling over walks [m, length], from `vectors` [n, width]; gives the vectors it ends with.

    All pairs of a walk are one small matrix product, cut to the band of the window. The pairs of a batch share their negatives, with the
    weight each pair's own ones would have: the same loss in expectation, as a product instead of a gather per pair.
    """
    inner = vectors.requires_grad_()
    outer = torch.zeros_like(vectors, requires_grad=True)
    optimizer = torch.optim.SparseAdam([inner, outer], lr=lr)  # rows that a batch does not touch stay where they are
    place = torch.arange(walks.shape[1])
    apart = (place[:, None] - place[None, :]).abs()
    pairs = ((apart > 0) & (apart <= window)).float()
    visits = torch.bincount(walks.flatten(), minlength=len(vectors)).double().pow(0.75).cumsum(0)
    together = min(max(len(walks) // _STEPS, 1), _WALKS)
    for _ in range(epochs * -(-_STEPS // len(walks))):
        for batch in torch.randperm(len(walks), generator=rng).split(together):
            nodes = walks[batch]
            drawn = torch.searchsorted(visits, torch.rand(_POOL, generator=rng, dtype=torch.float64) * visits[-1], right=True)
            centre, context = F.embedding(nodes, inner, sparse=True), F.embedding(nodes, outer, sparse=True)
            noise = F.embedding(drawn, outer, sparse=True)
            attract = (F.softplus(-(centre @ context.mT)) * pairs).sum()
            repel = (F.softplus(centre @ noise.T) * pairs.sum(1)[:, None]).sum() * (negatives / _POOL)
            optimizer.zero_grad()
            ((attract + repel) / (len(batch) * pairs.sum())).backward()
            optimizer.step()
    return inner.detach()


def _simple(adjacency: csr_matrix) -> csr_matrix:
    """The undirected simple graph of a matrix, neighbours in order."""
    if adjacency.ndim != 2 or adjacency.shape[0] != adjacency.shape[1]:
        raise ValueError(f"an adjacency matrix is square, not {list(adjacency.shape)}")
    entries = adjacency.tocoo()
    keep = (entries.data != 0) & (entries.row != entries.col)
    row, col = entries.row[keep], entries.col[keep]
    both = csr_matrix((np.ones(2 * len(row), np.int8), (np.append(row, col), np.append(col, row))), adjacency.shape)
    both.sum_duplicates()
    both.sort_indices()
    return both


def _require_positive(**numbers: float) -> None:
    for name, number in numbers.items():
        if not 0 < number < float("inf"):
            raise ValueError(f"{name} must be above 0 and finite, not {number}")
