"""Structure features: degrees, graphlets, random walks, Node2Vec, distances.

Orbits are compared with enumeration, walks with their exact law, and vectors must separate what is
far apart.
"""

from itertools import combinations
from math import comb

import networkx as nx
import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix

from fedloom.methods._shared import graphlets
from fedloom.methods._shared.graphlets import ORBITS, graphlet_features
from fedloom.methods._shared.node2vec import node2vec, random_walks
from fedloom.methods._shared.structure import at_distance, degree_features

QUICK = {"walks": 4, "length": 10, "window": 3}


def matrix(graph: nx.Graph) -> csr_matrix:
    return csr_matrix(nx.to_scipy_sparse_array(graph, nodelist=sorted(graph), dtype=np.int64))


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def loose(graph: nx.Graph) -> csr_matrix:
    """Returns the same graph as data may contain it.

    One direction per edge, some in both, self-loops, and stored zeros.
    """
    rng = np.random.default_rng(0)
    pairs = [(a, b) if rng.random() < 0.5 else (b, a) for a, b in graph.edges]
    pairs += [(b, a) for a, b in pairs[::3]]
    row, col = np.array([*pairs, (0, 0), (1, 1), (0, len(graph) - 1), (len(graph) - 1, 0)]).T
    data = np.array([1] * (len(pairs) + 2) + [0, 0])
    return csr_matrix((data, (row, col)), (len(graph), len(graph)))


# ---- degrees ----
def test_degree_rows_are_one_hot_rounded_and_clipped():
    features = degree_features(torch.tensor([0.0, 0.5, 1.0, 1.5, 2.5, 3.4, 4.0, 1000.0]), 5)
    assert features.dtype == torch.float32
    assert features.shape == (8, 5)
    assert torch.equal(features.sum(1), torch.ones(8))
    assert features.argmax(1).tolist() == [0, 0, 1, 2, 2, 3, 4, 4]


def test_degrees_may_be_whole_numbers_or_empty():
    assert degree_features(torch.tensor([3, 0, 7]), 4).argmax(1).tolist() == [3, 0, 3]
    assert degree_features(torch.zeros(0), 4).shape == (0, 4)


@pytest.mark.parametrize("degree", [-1.0, float("nan"), float("inf")])
def test_invalid_degrees_are_refused(degree):
    with pytest.raises(ValueError, match="finite and not negative"):
        degree_features(torch.tensor([1.0, degree]), 4)
    with pytest.raises(ValueError, match="width"):
        degree_features(torch.tensor([1.0]), 0)


# ---- graphlets ----
# Przulj's orbits. Up to 4 nodes, degrees identify them:
# (sorted degrees in the graphlet, degree of the node) → orbit.
ORBIT = {
    ((1, 1), 1): 0,
    ((1, 1, 2), 1): 1,
    ((1, 1, 2), 2): 2,
    ((2, 2, 2), 2): 3,
    ((1, 1, 2, 2), 1): 4,
    ((1, 1, 2, 2), 2): 5,
    ((1, 1, 1, 3), 1): 6,
    ((1, 1, 1, 3), 3): 7,
    ((2, 2, 2, 2), 2): 8,
    ((1, 2, 2, 3), 1): 9,
    ((1, 2, 2, 3), 2): 10,
    ((1, 2, 2, 3), 3): 11,
    ((2, 2, 3, 3), 2): 12,
    ((2, 2, 3, 3), 3): 13,
    ((3, 3, 3, 3), 3): 14,
}


def enumerated(graph: nx.Graph) -> torch.Tensor:
    """Counts orbits 0 to 14 of every node in all connected induced subgraphs of 2 to 4 nodes."""
    counts = torch.zeros(len(graph), 15)
    for size in (2, 3, 4):
        for nodes in combinations(sorted(graph), size):
            part = graph.subgraph(nodes)
            if nx.is_connected(part):
                for node, degree in part.degree:
                    counts[node, ORBIT[tuple(sorted(d for _, d in part.degree)), degree]] += 1
    return counts


GRAPHS = {
    "sparse": nx.gnp_random_graph(14, 0.2, seed=1),
    "dense": nx.gnp_random_graph(11, 0.6, seed=2),
    "hub": nx.barabasi_albert_graph(16, 2, seed=3),
    "complete": nx.complete_graph(6),
    "isolated": nx.disjoint_union(nx.cycle_graph(5), nx.empty_graph(3)),
}


def closed(nodes: int, **orbits: list[int] | int) -> torch.Tensor:
    """Returns counts [nodes, 15] that are 0 except for the orbits named o0, o1, ..."""
    counts = torch.zeros(nodes, ORBITS)
    for name, values in orbits.items():
        counts[:, int(name[1:])] = torch.as_tensor(values, dtype=torch.float32)
    return counts


@pytest.mark.parametrize("name", GRAPHS)
def test_graphlets_against_enumeration(name):
    expected = enumerated(GRAPHS[name])
    assert torch.equal(graphlet_features(matrix(GRAPHS[name]), log=False), expected)
    assert torch.allclose(graphlet_features(matrix(GRAPHS[name])), expected.log1p())


@pytest.mark.parametrize("batch", [1, 5, graphlets._BATCH])
def test_graphlets_of_random_graphs_do_not_depend_on_the_batch(batch, monkeypatch):
    monkeypatch.setattr(graphlets, "_BATCH", batch)
    rng = np.random.default_rng(batch)
    for seed in range(20):
        graph = nx.gnp_random_graph(int(rng.integers(2, 11)), rng.uniform(0.1, 0.95), seed=seed)
        assert torch.equal(graphlet_features(matrix(graph), log=False), enumerated(graph))


def test_graphlets_of_every_graph_on_4_and_5_nodes():
    for graph in nx.graph_atlas_g():
        if len(graph) in (4, 5):
            assert torch.equal(graphlet_features(matrix(graph), log=False), enumerated(graph))


def test_graphlets_by_formula():
    n = 9
    assert torch.equal(
        graphlet_features(matrix(nx.complete_graph(n)), log=False),
        closed(n, o0=n - 1, o3=comb(n - 1, 2), o14=comb(n - 1, 3)),
    )
    assert torch.equal(
        graphlet_features(matrix(nx.cycle_graph(n)), log=False),
        closed(n, o0=2, o1=2, o2=1, o4=2, o5=2),
    )
    assert torch.equal(
        graphlet_features(matrix(nx.cycle_graph(4)), log=False), closed(4, o0=2, o1=2, o2=1, o8=1)
    )
    assert torch.equal(
        graphlet_features(matrix(nx.path_graph(6)), log=False),
        closed(
            6,
            o0=[1, 2, 2, 2, 2, 1],
            o1=[1, 1, 2, 2, 1, 1],
            o2=[0, 1, 1, 1, 1, 0],
            o4=[1, 1, 1, 1, 1, 1],
            o5=[0, 1, 2, 2, 1, 0],
        ),
    )
    # A complete bipartite graph has no edge within a side, so it has only claws and cycles.
    a, b = 4, 7
    sides = [(a, b)] * a + [(b, a)] * b  # (own, other)
    assert torch.equal(
        graphlet_features(matrix(nx.complete_bipartite_graph(a, b)), log=False),
        closed(
            a + b,
            o0=[other for _, other in sides],
            o1=[other * (own - 1) for own, other in sides],
            o2=[comb(other, 2) for _, other in sides],
            o6=[other * comb(own - 1, 2) for own, other in sides],
            o7=[comb(other, 3) for _, other in sides],
            o8=[(own - 1) * comb(other, 2) for own, other in sides],
        ),
    )


def test_graphlet_counts_around_hubs_are_exact():
    """Counts exceed 32 bits. A star has no wedges below its centre.

    Otherwise this would take 10^9 steps.
    """
    leaves = 40_000
    counts = graphlets._orbits(matrix(nx.star_graph(leaves)))
    assert counts.dtype == np.int64
    centre = {0: leaves, 2: comb(leaves, 2), 7: comb(leaves, 3)}
    leaf = {0: 1, 1: leaves - 1, 6: comb(leaves - 1, 2)}
    assert counts[0].tolist() == [centre.get(orbit, 0) for orbit in range(ORBITS)]
    assert np.unique(counts[1:], axis=0).tolist() == [
        [leaf.get(orbit, 0) for orbit in range(ORBITS)]
    ]
    hub, other = 5000, 3  # three hubs over the same 5000 nodes
    counts = graphlets._orbits(matrix(nx.complete_bipartite_graph(other, hub)))
    assert counts[0, 7:9].tolist() == [comb(hub, 3), (other - 1) * comb(hub, 2)]
    assert counts[-1, 6:9].tolist() == [other * comb(hub - 1, 2), 1, (hub - 1) * comb(other, 2)]


def test_graphlets_against_matrix_products():
    """Counts triangles, cliques and cycles of a graph with hubs by dense algebra."""
    graph = nx.barabasi_albert_graph(400, 12, seed=4)
    counts, A = graphlets._orbits(matrix(graph)), matrix(graph).toarray()
    assert np.array_equal(counts[:, 3], np.diag(A @ A @ A) // 2)
    around = [A[np.ix_(row, row)] for row in A.astype(bool)]
    assert np.array_equal(counts[:, 14], [np.trace(part @ part @ part) // 6 for part in around])
    apart = (1 - A) * (1 - np.eye(400, dtype=np.int64))
    two = (A @ A) * apart
    assert counts[:, 1].tolist() == two.sum(1).tolist()
    # Two nodes without an edge and a pair of common neighbours form a cycle or a diamond.
    assert np.array_equal(counts[:, 8] + counts[:, 12], (two * (two - 1) // 2).sum(1))


def test_graphlets_do_not_depend_on_the_order_of_nodes():
    graph = matrix(GRAPHS["hub"])
    order = np.random.default_rng(0).permutation(graph.shape[0])
    assert torch.equal(graphlet_features(graph[order][:, order]), graphlet_features(graph)[order])


def test_graphlets_treat_any_graph_as_undirected_and_simple():
    graph = GRAPHS["hub"]
    given = loose(graph)
    before = given.copy()
    assert torch.equal(graphlet_features(given, log=False), enumerated(graph))
    assert (given != before).nnz == 0


def test_graphlets_of_a_graph_without_edges():
    for nodes in (0, 1, 3):
        for graph in (csr_matrix((nodes, nodes)), csr_matrix(np.eye(nodes))):
            features = graphlet_features(graph)
            assert features.dtype == torch.float32
            assert torch.equal(features, torch.zeros(nodes, ORBITS))


# ---- walks ----
# A triangle 0 1 2, a square 2 3 4 5 and a tail 5 6: it has steps back, steps to common neighbours,
# steps away, and a dead end.
SMALL = nx.Graph([(0, 1), (1, 2), (0, 2), (2, 3), (3, 4), (4, 5), (5, 2), (5, 6)])


def second_order(graph: nx.Graph, p: float, q: float) -> dict[tuple[int, int], dict[int, float]]:
    """Returns the probabilities of the next node for every (t, v), by definition."""
    law = {}
    for a, b in graph.edges:
        for t, v in ((a, b), (b, a)):
            weight = {
                x: 1 / p if x == t else 1.0 if graph.has_edge(t, x) else 1 / q for x in graph[v]
            }
            law[t, v] = {x: w / sum(weight.values()) for x, w in weight.items()}
    return law


@pytest.mark.parametrize(
    ("p", "q"),
    [(1.0, 1.0), (0.25, 4.0), (4.0, 0.25), (1.0, 2.0), (2.0, 1.0), (1.0, 0.002), (300.0, 500.0)],
)
def test_walks_follow_their_law(p, q):
    """Pearson's χ² of all second steps.

    The last two laws reject most proposals, so some steps are drawn from the full law.
    """
    walks = random_walks(matrix(SMALL), torch.arange(7).repeat(6000), 4, seeded(), p, q)
    law = second_order(SMALL, p, q)
    statistic, freedom = 0.0, 0
    for columns in (slice(0, 3), slice(1, 4)):
        seen = torch.zeros(7, 7, 7).index_put(
            (tuple(walks[:, columns].T)), torch.ones(len(walks)), accumulate=True
        )
        assert seen.sum() == len(walks)
        for (t, v), following in law.items():
            total = seen[t, v].sum().item()
            expected = {x: total * share for x, share in following.items()}
            # All steps lead to neighbours.
            assert sum(seen[t, v, x].item() for x in following) == total
            # χ² holds for these cells; the rest is one more cell.
            common = {x: e for x, e in expected.items() if e >= 5}
            cells = [(seen[t, v, x].item(), e) for x, e in common.items()]
            rest = total - sum(e for _, e in cells)
            if rest >= 5:
                cells.append((total - sum(s for s, _ in cells), rest))
            statistic += sum((s - e) ** 2 / e for s, e in cells)
            freedom += max(len(cells) - 1, 0)
    assert freedom > 10
    # Mean and deviation of χ². A wrong law is off by hundreds.
    assert abs(statistic - freedom) < 4 * (2 * freedom) ** 0.5


def test_the_test_of_the_law_detects_a_wrong_law():
    walks = random_walks(matrix(SMALL), torch.arange(7).repeat(6000), 3, seeded(), 1.0, 2.0)
    seen = torch.bincount(walks[(walks[:, 0] == 0) & (walks[:, 1] == 2), 2], minlength=7)
    for (p, q), fits in {(1.0, 2.0): True, (1.0, 1.0): False, (2.0, 1.0): False}.items():
        expected = (
            torch.tensor([second_order(SMALL, p, q)[0, 2].get(x, 0.0) for x in range(7)])
            * seen.sum()
        )
        cells = expected > 0
        statistic = ((seen[cells] - expected[cells]) ** 2 / expected[cells]).sum().item()
        assert (statistic < 20) == fits


def test_first_steps_are_uniform_and_every_step_an_edge():
    walks = random_walks(loose(SMALL), torch.arange(7).repeat(3000), 6, seeded())
    assert walks.shape == (21000, 6)
    dense = torch.from_numpy(matrix(SMALL).toarray())
    assert bool((dense[walks[:, :-1], walks[:, 1:]] == 1).all())
    shares = torch.bincount(walks[walks[:, 0] == 2, 1], minlength=7) / 3000
    assert torch.allclose(shares, dense[2] / 4, atol=0.04)  # 5 standard deviations


def test_walks_from_isolated_nodes_stay():
    graph = matrix(nx.disjoint_union(nx.path_graph(2), nx.empty_graph(2)))
    walks = random_walks(graph, torch.tensor([3, 0, 2]), 4, seeded(), p=0.5, q=3.0)
    assert walks.tolist() == [[3, 3, 3, 3], [0, 1, 0, 1], [2, 2, 2, 2]]
    assert random_walks(csr_matrix((2, 2)), torch.tensor([1]), 3, seeded(), q=2.0).tolist() == [
        [1, 1, 1]
    ]
    assert random_walks(graph, torch.tensor([], dtype=torch.int64), 3, seeded(), q=2.0).shape == (
        0,
        3,
    )


# ---- Node2Vec ----
@pytest.fixture
def _few_steps(monkeypatch):
    """For tests in which the quality of the vectors does not matter."""
    monkeypatch.setattr("fedloom.methods._shared.node2vec._STEPS", 20)


def cosines(vectors: torch.Tensor) -> torch.Tensor:
    unit = torch.nn.functional.normalize(vectors, dim=1)
    return unit @ unit.T


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"p": 0.5, "q": 2.0}])
def test_node2vec_separates_two_cliques_with_one_bridge(settings):
    size = 10
    graph = nx.disjoint_union(nx.complete_graph(size), nx.complete_graph(size))
    graph.add_edge(0, size)
    cosine = cosines(
        node2vec(matrix(graph), 16, seeded(), length=10, window=3, epochs=1, lr=0.01, **settings)
    )
    within = (cosine[:size, :size].sum() + cosine[size:, size:].sum() - 2 * size) / (
        2 * size * (size - 1)
    )
    across = cosine[:size, size:].mean()
    assert within > 0.8
    assert across < 0.2


@pytest.mark.slow
def test_node2vec_similarity_falls_with_distance_on_a_ring():
    cosine = cosines(
        node2vec(matrix(nx.cycle_graph(40)), 16, seeded(), length=10, window=3, epochs=1, lr=0.01)
    )
    by_distance = [
        cosine[torch.arange(40), (torch.arange(40) + d) % 40].mean().item() for d in (1, 3, 6, 12)
    ]
    assert by_distance == sorted(by_distance, reverse=True)
    assert by_distance[0] > by_distance[-1] + 0.5


@pytest.mark.usefixtures("_few_steps")
def test_node2vec_draws_only_from_its_stream():
    graph = matrix(nx.barabasi_albert_graph(60, 2, seed=0))
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    first = node2vec(graph, 8, seeded(5), q=2.0, **QUICK)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)
    torch.rand(3)
    assert torch.equal(node2vec(graph, 8, seeded(5), q=2.0, **QUICK), first)
    assert not torch.equal(node2vec(graph, 8, seeded(6), q=2.0, **QUICK), first)
    assert first.shape == (60, 8)
    assert first.dtype == torch.float32
    assert not first.requires_grad
    assert bool(torch.isfinite(first).all())


@pytest.mark.usefixtures("_few_steps")
def test_node2vec_treats_any_graph_as_undirected_and_simple():
    graph = nx.barabasi_albert_graph(30, 2, seed=1)
    assert torch.equal(
        node2vec(loose(graph), 8, seeded(), **QUICK), node2vec(matrix(graph), 8, seeded(), **QUICK)
    )


@pytest.mark.usefixtures("_few_steps")
def test_node2vec_leaves_isolated_nodes_unchanged():
    graph = matrix(nx.disjoint_union(nx.complete_graph(8), nx.empty_graph(4)))
    vectors = node2vec(graph, 8, seeded(), **QUICK)
    first = (torch.rand(12, 8, generator=seeded()) - 0.5) / 8
    assert torch.equal(vectors[8:], first[8:])
    assert bool((vectors[:8] != first[:8]).any(dim=1).all())
    assert torch.equal(node2vec(csr_matrix((12, 12)), 8, seeded(), **QUICK), first)
    assert node2vec(csr_matrix((0, 0)), 8, seeded()).shape == (0, 8)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["p", "q", "lr"])
def test_node2vec_refuses_numbers_that_are_not_positive(name, value):
    with pytest.raises(ValueError, match=f"{name} must be above 0"):
        node2vec(matrix(SMALL), 4, seeded(), **{name: value})
    if name != "lr":
        with pytest.raises(ValueError, match=f"{name} must be above 0"):
            random_walks(matrix(SMALL), torch.arange(7), 3, seeded(), **{name: value})


@pytest.mark.parametrize(
    "settings",
    [{"walks": 0}, {"length": 1}, {"window": 0}, {"negatives": 0}, {"epochs": 0}, {"width": 0}],
)
def test_node2vec_refuses_counts_without_pairs(settings):
    with pytest.raises(
        ValueError, match=" ".join(f"{name} {value}" for name, value in settings.items())
    ):
        node2vec(matrix(SMALL), rng=seeded(), **{"width": 4, **settings})
    with pytest.raises(ValueError, match="at least 1 node"):
        random_walks(matrix(SMALL), torch.arange(7), 0, seeded())


def test_adjacency_must_be_square():
    with pytest.raises(ValueError, match=r"square, not \[3, 4\]"):
        node2vec(csr_matrix((3, 4)), 4, seeded())
    with pytest.raises(ValueError, match=r"square, not \[3, 4\]"):
        graphlet_features(csr_matrix((3, 4)))


# ---- distances ----
@pytest.mark.parametrize("seed", range(3))
def test_pairs_at_each_distance_equal_those_of_shortest_paths(seed):
    graph = nx.gnm_random_graph(60, 90, seed=seed, directed=True)
    graph.add_edge(4, 4)
    found = at_distance(nx.to_scipy_sparse_array(graph, format="csr"), 4)
    lengths = dict(nx.all_pairs_shortest_path_length(graph.to_undirected()))
    for hop, matrix in enumerate(found, 1):
        expected = {(i, j) for i in graph for j, d in lengths[i].items() if d == hop}
        assert set(zip(*map(np.ndarray.tolist, matrix.nonzero()), strict=True)) == expected
        assert (matrix.data == 1).all()


def test_distances_do_not_depend_on_the_number_of_paths():
    hub = nx.complete_bipartite_graph(2, 300)  # 300 paths from 0 to 1: more than a byte holds
    assert at_distance(nx.to_scipy_sparse_array(hub, format="csr"), 2)[1][0, 1] == 1
    assert at_distance(nx.to_scipy_sparse_array(hub, format="csr"), 0) == []
