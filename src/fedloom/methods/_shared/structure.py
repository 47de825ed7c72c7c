"""Structure features: what a node's place in a graph says about it, its own features and label aside.

Three kinds, from the nearest to the farthest: degrees, graphlets (small patterns around a node), Node2Vec (where random walks lead).
Graphs come as SciPy CSR matrices [n, n]; any stored entry other than 0 is an edge. Walks and graphlets take them as undirected and simple:
both directions, no self-loops.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.sparse import csr_matrix, identity
from torch import Tensor

Ints = NDArray[np.int64]

ORBITS = 15  # of the graphlets with 2 to 4 nodes

_PROPOSALS = 32  # per step of a walk, before its law is written out in full
_WALKS = 128  # in a batch of skip-gram, at most
_STEPS = (
    500  # of skip-gram in an epoch, at least: a small graph has few walks, and needs as many steps
)
_POOL = 64  # negatives that all pairs of a batch share
_BATCH = 2**20  # subgraphs that are enumerated at once
_CELLS = 8  # of a table of counts, for each of them


def degree_features(degree: Tensor, width: int) -> Tensor:
    """Takes degrees [n] (halves are welcome: the mean of in and out), gives one-hot rows [n, width] of the degree rounded.

    A half goes to the even side, as everywhere in Python; degrees of width - 1 and more share the last column.
    """
    if width < 1:
        raise ValueError(f"width must be at least 1, not {width}")
    if not bool(((degree >= 0) & torch.isfinite(degree)).all()):
        raise ValueError("degrees must be finite and not negative")
    return F.one_hot(degree.double().round().clamp(max=width - 1).long(), width).float()


def graphlet_features(adjacency: csr_matrix, *, log: bool = True) -> Tensor:
    """Graphlet degree vectors (Przulj, 2007) of the nodes of a graph [n, n], as rows [n, 15].

    Column i counts in how many induced graphlets of up to 4 nodes a node takes position (orbit) i; column 0 is its degree. Counts span many
    powers of ten, so `log` gives log(1 + count). Counts are exact until they become float32. Time grows with the edges times the smaller
    degree of their ends, and with the triangles: Cora takes 0.1 seconds, Photo 2, 100,000 nodes with 400 linked hubs 25.
    """
    counts = torch.from_numpy(_orbits(_simple(adjacency))).double()
    return (counts.log1p() if log else counts).float()


# How often a graphlet on 4 nodes, as a subgraph that may lack edges, lies in an induced one on the same nodes: row i, column j is how often
# a node in orbit 4 + j is in orbit 4 + i of it. Rows and columns: path (end, inner), claw (leaf, centre), cycle, paw (leaf, base, centre),
# diamond (2 edges, 3 edges), clique.
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


def _orbits(simple: csr_matrix) -> Ints:
    """Orbit counts [n, 15] of a simple undirected graph.

    Subgraphs that may lack edges are counted first: from degrees and triangles, but for cycles and cliques. Then those that lie within
    larger ones are taken off.
    """
    order = np.argsort(
        np.diff(simple.indptr), kind="stable"
    )  # few nodes lie above a hub: all that is enumerated goes upwards
    ranked = _Ranked(simple[order][:, order])
    A, d, low, high = ranked.matrix, ranked.degree, ranked.low, ranked.high
    shared = np.zeros(len(low), np.int64)  # triangles at each edge
    for a, b, c in ranked.larger(np.stack((low, high))):
        for edge in (ranked.edge(a, b), ranked.edge(b, c), ranked.edge(a, c)):
            np.add.at(shared, edge, 1)
    diamond, clique = np.zeros((2, len(d)), np.int64)
    for triangles in ranked.larger(
        np.stack((low, high))
    ):  # again, rather than kept: there may be many
        a, b, c = triangles
        for node, edge in ((a, ranked.edge(b, c)), (b, ranked.edge(a, c)), (c, ranked.edge(a, b))):
            np.add.at(diamond, node, shared[edge] - 1)
        for four in ranked.larger(triangles):
            np.add.at(clique, four.ravel(), 1)
    t = ranked.per_node(shared, shared) // 2
    wedge = A @ (d - 1)  # paths of 3 nodes that end here
    loose = [  # each first as walks would have it, less those that come back to a node they have
        A @ wedge - d * (d - 1) - 2 * t,  # path, end
        (d - 1) * wedge - 2 * t,  # path, inner
        A @ ((d - 1) * (d - 2) // 2),  # claw, leaf
        d * (d - 1) * (d - 2) // 6,  # claw, centre
        ranked.cycles(),
        A @ t - 2 * t,  # paw, leaf: the triangles at a neighbour
        ranked.per_node(
            shared * (d[high] - 2), shared * (d[low] - 2)
        ),  # paw, base: the leaf is at the other end of an edge
        t * (d - 2),  # paw, centre
        diamond,  # 2 edges: the other triangles at the edge across a triangle
        ranked.per_node(
            shared * (shared - 1) // 2, shared * (shared - 1) // 2
        ),  # diamond, 3 edges: two triangles at an edge
        clique,
    ]
    induced = np.stack(loose)
    for column in reversed(range(len(_WITHIN))):  # back substitution, in whole numbers
        induced[:column] -= _WITHIN[:column, column, None] * induced[column]
    counts = np.empty((len(d), ORBITS), np.int64)
    counts[order] = np.vstack((d, wedge - 2 * t, d * (d - 1) // 2 - t, t, induced)).T
    return counts


class _Ranked:
    """A simple undirected graph whose nodes are numbered by degree, and what can be enumerated in it in bounded memory."""

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
        self.low, self.high = tail[upward], self.neighbours[upward]  # of each edge; sorted
        self.before = (
            np.flatnonzero(upward) - self.start[self.low]
        )  # how many neighbours of `low` come before `high`
        self.keys = self.low * self.size + self.high
        self.above = np.bincount(self.low, minlength=self.size)

    def edge(self, low: Ints, high: Ints) -> Ints:
        """The index of the edges between nodes low < high; of some other edge if there is none."""
        return np.minimum(np.searchsorted(self.keys, low * self.size + high), len(self.keys) - 1)

    def per_node(self, to_low: Ints, to_high: Ints) -> Ints:
        """What edges give to their ends, summed per node."""
        total = np.zeros(self.size, np.int64)
        np.add.at(total, self.low, to_low)
        np.add.at(total, self.high, to_high)
        return total

    def larger(self, cliques: Ints) -> Iterator[Ints]:
        """Cliques [k, m], nodes upwards, in; all cliques [k + 1, m'] that have one more node above theirs out, in batches."""
        top = cliques[-1]
        first = self.start[top + 1] - self.above[top]
        for part in _batches(self.above[top], _BATCH):
            which, place = _spread(self.above[top[part]])
            which += part.start
            node = self.neighbours[first[which] + place]
            for member in cliques[-2::-1]:
                found = (
                    self.keys[self.edge(member[which], node)] == member[which] * self.size + node
                )
                which, node = which[found], node[found]
            yield np.vstack((cliques[:, which], node))

    def cycles(self) -> Ints:
        """In how many cycles of 4 nodes each node is, chords or not.

        A cycle is two wedges top - middle - far that differ in the middle, both middles and the far node below the top. For a middle, the
        far nodes are its neighbours before the top, so wedges are few even around hubs.
        """
        by_top = np.argsort(self.high, kind="stable")
        middle, top, wedges = self.low[by_top], self.high[by_top], self.before[by_top]
        bounds = np.searchsorted(top, np.arange(self.size + 1))
        sums = np.append(0, wedges.cumsum())[bounds]
        table = np.zeros(
            max(_CELLS * _BATCH, self.size), np.int32
        )  # wedges from a top (row) to a far node (column)
        twice = np.zeros(self.size, np.int64)
        for rows in _batches(np.diff(sums) + -(-self.size // _CELLS), _BATCH):
            items = slice(bounds[rows.start], bounds[rows.stop])
            which, place = _spread(wedges[items])
            far = self.neighbours[self.start[middle[items]][which] + place]
            cell = (top[items][which] - rows.start) * self.size + far
            np.add.at(table, cell, 1)
            others = table[cell].astype(np.int64) - 1
            table[cell] = 0
            closed = np.flatnonzero(others)
            which, far, others = which[closed], far[closed], others[closed]
            np.add.at(
                twice, top[items][which], others
            )  # top and far meet a cycle in both of its wedges, a middle in one
            np.add.at(twice, far, others)
            np.add.at(twice, middle[items][which], 2 * others)
        return twice // 2


def _batches(sizes: Ints, limit: int) -> Iterator[slice]:
    """Slices that cover `sizes` in order, each with a sum of at most `limit`, or of one item."""
    ends = sizes.cumsum()
    start = 0
    while start < len(sizes):
        done = ends[start - 1] if start else 0
        stop = max(int(np.searchsorted(ends, done + limit, side="right")), start + 1)
        yield slice(start, stop)
        start = stop


def _spread(sizes: Ints) -> tuple[Ints, Ints]:
    """For items of these sizes, the index of the item and the place in it of all their parts: [2, 1] gives [0, 0, 1] and [0, 1, 0]."""
    which = np.repeat(np.arange(len(sizes)), sizes)
    return which, np.arange(len(which)) - (sizes.cumsum() - sizes)[which]


def at_distance(adjacency: csr_matrix, hops: int, starts: Tensor | None = None) -> list[csr_matrix]:
    """For h = 1 to `hops`, which nodes are exactly h steps from which: [starts, nodes] each, entries 1 (all nodes if no starts are given).

    Loops and directions are not looked at. Time and memory are as many as there are pairs within so many steps.
    """
    step = _simple(adjacency).astype(
        bool
    )  # products of bools are "or": counts of ways cannot overflow
    every = csr_matrix(identity(step.shape[0], format="csr", dtype=bool))
    found, reached = [], every if starts is None else csr_matrix(every[starts.numpy()])
    for _ in range(hops):
        within = csr_matrix(reached @ step + reached)
        further = csr_matrix(within.astype(np.int8) - reached.astype(np.int8))
        further.eliminate_zeros()
        further.sort_indices()
        found.append(further)
        reached = within
    return found


def random_walks(
    adjacency: csr_matrix,
    starts: Tensor,
    length: int,
    rng: torch.Generator,
    p: float = 1.0,
    q: float = 1.0,
) -> Tensor:
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
        walks[step] = (
            law.uniform(walks[step - 1], rng)
            if step == 1
            else law.step(walks[step - 2], walks[step - 1], rng)
        )
    return walks.T.contiguous()


class _Law:
    """Steps of many walkers at once, by rejection: a uniform neighbour is proposed and taken with probability weight / largest weight."""

    def __init__(self, graph: csr_matrix, p: float, q: float):
        self.size = graph.shape[0]
        self.offsets, self.neighbours = (
            torch.from_numpy(graph.indptr).long(),
            torch.from_numpy(graph.indices).long(),
        )
        self.degree = self.offsets.diff()
        self.back, self.near, self.far = 1 / p, 1.0, 1 / q
        # Sorted, as rows and the neighbours in them are: whether two nodes are neighbours is a binary search.
        self.edges = (
            torch.repeat_interleave(torch.arange(self.size), self.degree) * self.size
            + self.neighbours
        )

    def uniform(self, at: Tensor, rng: torch.Generator) -> Tensor:
        """A neighbour of each node, all equally likely; the node itself if it has none."""
        if len(self.neighbours) == 0:
            return at
        degree = self.degree[at]
        drawn = (torch.rand(len(at), generator=rng, dtype=torch.float64) * degree).long()
        index = (self.offsets[at] + drawn).clamp(
            max=len(self.neighbours) - 1
        )  # of a last node without neighbours
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
            accepted = torch.rand(
                len(waiting), generator=rng, dtype=torch.float64
            ) * largest < self.weights(before[waiting], following[waiting])
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
        entry = torch.repeat_interleave(self.offsets[at] - (ends - degree), degree) + torch.arange(
            int(ends[-1])
        )
        choices = self.neighbours[entry]
        sums = self.weights(torch.repeat_interleave(before, degree), choices).cumsum(0)
        low = torch.cat((sums.new_zeros(1), sums))[ends - degree]
        target = low + torch.rand(len(at), generator=rng, dtype=torch.float64) * (
            sums[ends - 1] - low
        )
        index = torch.searchsorted(sums, target, right=True)
        return choices[
            torch.minimum(index, ends - 1)
        ]  # rounding must not reach into the next walker's neighbours


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
    against one pair. epochs: passes over the walks (more if there are fewer walks than steps to take). lr: of Adam. Nodes without
    neighbours keep their first vector, small and random.
    """
    _require_positive(p=p, q=q, lr=lr)
    counts = {
        "width": width,
        "walks": walks,
        "window": window,
        "negatives": negatives,
        "epochs": epochs,
    }
    if wrong := {name: number for name, number in counts.items() if number < 1} | (
        {"length": length} if length < 2 else {}
    ):
        raise ValueError(
            f"node2vec cannot do with {', '.join(f'{name} {number}' for name, number in wrong.items())}"
        )
    graph = _simple(adjacency)
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
    """Skip-gram with negative sampling over walks [m, length], from `vectors` [n, width]; gives the vectors it ends with.

    All pairs of a walk are one small matrix product, cut to the band of the window. The pairs of a batch share their negatives, with the
    weight each pair's own ones would have: the same loss in expectation, as a product instead of a gather per pair.
    """
    inner = vectors.requires_grad_()
    outer = torch.zeros_like(vectors, requires_grad=True)
    optimizer = torch.optim.SparseAdam(
        [inner, outer], lr=lr
    )  # rows that a batch does not touch stay where they are
    place = torch.arange(walks.shape[1])
    apart = (place[:, None] - place[None, :]).abs()
    pairs = ((apart > 0) & (apart <= window)).float()
    visits = torch.bincount(walks.flatten(), minlength=len(vectors)).double().pow(0.75).cumsum(0)
    together = min(max(len(walks) // _STEPS, 1), _WALKS)
    for _ in range(epochs * -(-_STEPS // len(walks))):
        for batch in torch.randperm(len(walks), generator=rng).split(together):
            nodes = walks[batch]
            drawn = torch.searchsorted(
                visits,
                torch.rand(_POOL, generator=rng, dtype=torch.float64) * visits[-1],
                right=True,
            )
            centre, context = (
                F.embedding(nodes, inner, sparse=True),
                F.embedding(nodes, outer, sparse=True),
            )
            noise = F.embedding(drawn, outer, sparse=True)
            attract = (F.softplus(-(centre @ context.mT)) * pairs).sum()
            repel = (F.softplus(centre @ noise.T) * pairs.sum(1)[:, None]).sum() * (
                negatives / _POOL
            )
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
    both = csr_matrix(
        (np.ones(2 * len(row), np.int8), (np.append(row, col), np.append(col, row))),
        adjacency.shape,
    )
    both.sum_duplicates()
    both.sort_indices()
    return both


def _require_positive(**numbers: float) -> None:
    for name, number in numbers.items():
        if not 0 < number < float("inf"):
            raise ValueError(f"{name} must be above 0 and finite, not {number}")
