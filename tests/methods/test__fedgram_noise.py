"""Noise for FedGram: sensitivities by brute force, the mechanism, repairs of the server."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from fedloom.data.capping import capped
from fedloom.data.graph import Graph
from fedloom.data.seeds import entropy_noise
from fedloom.errors import ConfigError
from fedloom.methods.fedgram.noise import (
    bounded_rows,
    gaussian_scale,
    noise_share,
    ridge_for_noise,
    sensitivity,
    symmetric_noise,
)
from fedloom.methods.fedgram.ridge import nearest_psd

EPSILONS = (0.01, 0.5, 1.0, 2.0, 8.0, 16.0, 100.0)


def make_graph(pairs: list[tuple[int, int]], x: Tensor, y: Tensor, ids: Tensor | None = None):
    both = pairs + [(v, u) for u, v in pairs]
    edges = torch.tensor(both, dtype=torch.int64).reshape(-1, 2).T
    return Graph(
        x=x.float(),
        edge_index=edges,
        y=y,
        num_classes=3,
        train=torch.ones(len(y), dtype=torch.bool),
        node_id=torch.arange(len(y)) if ids is None else ids,
    )


def sums(graph: Graph, hops: int, constant: float, floor: float) -> Tensor:
    """Returns svec(G) and B as one vector, computed densely and independently of the package."""
    n = graph.num_nodes
    a = torch.eye(n, dtype=torch.float64)
    for u, v in graph.edge_index.T.tolist():
        if u != v:
            a[u, v] = 1
    scale = a.sum(1).rsqrt()
    a = scale[:, None] * a * scale[None]
    h = graph.x.double()
    h = h / h.norm(dim=1, keepdim=True).clamp(min=1e-12)
    total = h.clone()
    for _ in range(hops):
        h = a @ h
        total += h
    f = bounded_rows(total / (hops + 1), floor)
    f = torch.cat([f, torch.full((n, 1), constant, dtype=torch.float64)], 1)
    f, y = f[graph.train], torch.eye(3, dtype=torch.float64)[graph.y[graph.train]]
    g = f.T @ f
    upper = torch.triu_indices(len(g), len(g), 1)
    return torch.cat([g.diagonal(), math.sqrt(2) * g[upper[0], upper[1]], (f.T @ y).flatten()])


def random_graph(rng: np.random.Generator, most: int | None = None) -> Graph:
    """Returns a small graph; extremes (stars, pairs, opposite features) are frequent."""
    n = int(rng.integers(2, 9))
    pairs = [
        p for p in itertools.combinations(range(n), 2) if rng.random() < rng.choice([0.2, 0.6])
    ]
    if rng.random() < 0.3:
        pairs = [(0, v) for v in range(1, n)]
    if most is not None:
        degree, kept = [0] * n, []
        for u, v in pairs:
            if max(degree[u], degree[v]) < most:
                kept.append((u, v))
                degree[u] += 1
                degree[v] += 1
        pairs = kept
    width = int(rng.integers(1, 4))
    x = torch.from_numpy(rng.standard_normal((n, width)))
    if rng.random() < 0.5:
        x = x.sign()
    if rng.random() < 0.2:
        x[0] = 0
    return make_graph(pairs, x, torch.from_numpy(rng.integers(0, 3, n)))


def pairs_of(graph: Graph) -> list[tuple[int, int]]:
    return [(u, v) for u, v in graph.edge_index.T.tolist() if u < v]


def without_node(graph: Graph, node: int) -> Graph:
    keep = [v for v in range(graph.num_nodes) if v != node]
    place = {v: i for i, v in enumerate(keep)}
    pairs = [(place[u], place[v]) for u, v in pairs_of(graph) if node not in (u, v)]
    return make_graph(pairs, graph.x[keep], graph.y[keep], graph.node_id[keep])


# ---- sensitivities ----
@pytest.mark.parametrize("constant", [0.0, 0.3, 1.0])
def test_label_bound_holds_and_is_attained(constant):
    rng = np.random.default_rng(0)
    bound, largest = sensitivity("label", 2, 1, constant), 0.0
    for _ in range(100):
        graph = random_graph(rng)
        if (graph.x == 0).all(1).any():
            continue
        y = graph.y.clone()
        y[0] = (y[0] + 1) % 3
        change = sums(graph, 2, constant, 1e-9) - sums(replace(graph, y=y), 2, constant, 1e-9)
        largest = max(largest, float(change.norm()))
        size = (graph.num_features + 1) * (graph.num_features + 2) // 2
        assert not change[:size].any()  # G is free of labels
    assert largest == pytest.approx(bound, rel=1e-9)


@pytest.mark.parametrize("hops", [0, 1, 2, 3])
@pytest.mark.parametrize("floor", [None, 0.8])
def test_edge_bound_holds(hops, floor):
    rng = np.random.default_rng(hops)
    constant = 0.5
    radius = 1 / (hops + 1) if floor is None else floor
    bound, largest = sensitivity("edge", hops, 1, constant, floor), 0.0
    for _ in range(150):
        graph = random_graph(rng)
        before = sums(graph, hops, constant, radius)
        pairs = pairs_of(graph)
        for edge in pairs:
            other = make_graph([p for p in pairs if p != edge], graph.x, graph.y)
            largest = max(largest, float((before - sums(other, hops, constant, radius)).norm()))
    assert largest <= bound + 1e-9
    assert (largest > 0) == (hops > 0)


@pytest.mark.parametrize("hops", [0, 1, 2, 3])
@pytest.mark.parametrize("degree", [1, 3, 7])
def test_node_bound_holds(hops, degree):
    rng = np.random.default_rng(10 * hops + degree)
    constant, radius = 0.3, 1 / (hops + 1)
    bound, largest = sensitivity("node", hops, degree, constant, capping=False), 0.0
    for _ in range(80):
        graph = random_graph(rng, most=degree)
        before = sums(graph, hops, constant, radius)
        for node in range(graph.num_nodes):
            after = sums(without_node(graph, node), hops, constant, radius)
            largest = max(largest, float((before - after).norm()))
    assert largest <= bound + 1e-9
    assert largest > 0


@pytest.mark.parametrize("hops", [1, 2])
def test_node_bound_holds_through_capping(hops):
    rng = np.random.default_rng(hops)
    degree, radius = 2, 1 / (hops + 1)
    bound = sensitivity("node", hops, degree, 0.0)
    for _ in range(80):
        graph = random_graph(rng)
        before = sums(capped(graph, degree), hops, 0.0, radius)
        degrees = torch.bincount(graph.edge_index[0], minlength=graph.num_nodes)
        for node in range(graph.num_nodes):
            if degrees[node] <= degree:
                other = capped(without_node(graph, node), degree)
                assert (before - sums(other, hops, 0.0, radius)).norm() <= bound + 1e-9


@pytest.mark.parametrize("hops", [1, 2, 3, 5])
@pytest.mark.parametrize("leaves", [1, 3, 30])
def test_hop_changes_stay_below_their_bounds(hops, leaves):
    """Σ_i |ΔH_l,i| for double stars, the worst shapes: two hubs with leaves."""
    from fedloom.methods.fedgram.noise import _edge_change, _node_change

    n = 2 + 2 * leaves
    a = torch.eye(n, dtype=torch.float64)
    for leaf in range(leaves):
        for hub, node in ((0, 2 + leaf), (1, 2 + leaves + leaf)):
            a[hub, node] = a[node, hub] = 1
    joined = a.clone()
    joined[0, 1] = joined[1, 0] = 1
    hubless = a.clone()
    hubless[0, 1:] = hubless[1:, 0] = 0

    def power(m: Tensor) -> Tensor:
        scale = m.sum(1).rsqrt()
        return torch.linalg.matrix_power(scale[:, None] * m * scale[None], hops)

    rng = np.random.default_rng(0)
    for _ in range(20):
        x = torch.from_numpy(rng.choice([-1.0, 1.0], (n, 1)))
        edge = (power(joined) - power(a)) @ x
        assert edge.norm(dim=1).sum() <= _edge_change(hops) + 1e-9
        node = ((power(a) @ x) - (power(hubless) @ (x * (torch.arange(n) != 0)[:, None])))[1:]
        assert node.norm(dim=1).sum() <= _node_change(hops, leaves) + 1e-9


def test_hops_of_zero_need_no_noise_for_edges_and_no_degree_for_nodes():
    assert sensitivity("edge", 0, 1, 0.0) == 0
    assert sensitivity("node", 0, 50, 0.0) == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("nodes", 1, 1, 0.0), "relation"),
        (("edge", -1, 1, 0.0), "hops"),
        (("node", 1, 0, 0.0), "degree"),
        (("edge", 1, 1, -1.0), "constant"),
        (("edge", 1, 1, 0.0, 0.0), "floor"),
    ],
)
def test_wrong_settings_are_named(arguments, named):
    with pytest.raises(ConfigError, match=named):
        sensitivity(*arguments)


# ---- the mechanism ----
@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("delta", [1e-9, 1e-5, 0.1])
def test_scale_equals_the_reference(epsilon, delta):
    common = pytest.importorskip("dp_accounting.pld.common")
    from dp_accounting.pld.privacy_loss_mechanism import GaussianPrivacyLoss

    reference = GaussianPrivacyLoss.from_privacy_guarantee(
        common.DifferentialPrivacyParameters(epsilon, delta), sensitivity=2.5
    ).standard_deviation
    assert gaussian_scale(epsilon, delta, 2.5) == pytest.approx(reference, rel=1e-3)


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_scale_is_tight_by_the_reference(epsilon):
    mechanism = pytest.importorskip("dp_accounting.pld.privacy_loss_mechanism")
    scale = gaussian_scale(epsilon, 1e-5, 1.0)

    def delta(sigma: float) -> float:
        return mechanism.GaussianPrivacyLoss(sigma).get_delta_for_epsilon(epsilon)

    assert delta(scale) <= 1e-5 * (1 + 1e-6)
    assert delta(scale * 0.999) > 1e-5


def test_scale_is_proportional_falls_and_ends():
    scales = [gaussian_scale(e, 1e-5, 1.0) for e in (*EPSILONS, 1000.0, math.inf)]
    assert scales == sorted(scales, reverse=True)
    assert scales[-1] == 0
    assert gaussian_scale(1.0, 1e-5, 3.0) == pytest.approx(3 * gaussian_scale(1.0, 1e-5, 1.0))
    assert gaussian_scale(1.0, 1e-5, 0.0) == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [((0, 1e-5, 1), "epsilon"), ((1, 0, 1), "delta"), ((1, 1, 1), "delta"), ((1, 0.1, -1), "sens")],
)
def test_wrong_guarantees_are_named(arguments, named):
    with pytest.raises(ConfigError, match=named):
        gaussian_scale(*arguments)


# ---- noise ----
def test_noise_is_normal_with_its_scale():
    stats = pytest.importorskip("scipy.stats")
    noise = entropy_noise((400, 501), 2.0)
    assert noise.shape == (400, 501)
    assert noise.dtype == torch.float64
    # Each of these fails by chance less than once in 10^6 runs.
    assert abs(float(noise.mean())) < 5 * 2 / math.sqrt(noise.numel())
    assert float(noise.std()) == pytest.approx(2.0, abs=5 * 2 / math.sqrt(2 * noise.numel()))
    assert stats.kstest(noise.flatten().numpy() / 2, "norm").pvalue > 1e-6
    halves = noise.flatten()[: noise.numel() // 2 * 2].reshape(2, -1)
    assert abs(float(torch.corrcoef(halves)[0, 1])) < 5 / math.sqrt(halves.shape[1])


def test_noise_ignores_and_leaves_all_generators():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    one, other = entropy_noise((50,), 1.0), None
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(0)
    np.random.seed(0)
    other = entropy_noise((50,), 1.0)
    assert not torch.equal(one, other)
    assert entropy_noise((), 1.0).shape == ()
    assert entropy_noise((0, 3), 1.0).shape == (0, 3)


def test_symmetric_noise_has_the_scale_of_the_isometric_vector():
    noise = symmetric_noise(600, 3.0)
    assert torch.equal(noise, noise.T)
    upper = noise[tuple(torch.triu_indices(600, 600, 1))]
    assert float((math.sqrt(2) * upper).std()) == pytest.approx(3.0, rel=0.02)
    assert float(noise.diagonal().std()) == pytest.approx(3.0, rel=0.2)
    assert float(torch.linalg.matrix_norm(noise, 2)) == pytest.approx(3 * math.sqrt(1200), rel=0.1)


def test_shares_add_up():
    assert noise_share(3.0, 9) == pytest.approx(1.0)
    with pytest.raises(ConfigError, match="honest"):
        noise_share(1.0, 0)


# ---- the server ----
def test_nearest_psd():
    torch.manual_seed(0)
    a = torch.randn(30, 30, dtype=torch.float64)
    a = a + a.T
    near = nearest_psd(a)
    assert torch.linalg.eigvalsh(near).min() > -1e-9
    assert torch.allclose(nearest_psd(near), near)
    values = torch.linalg.eigvalsh(a)
    assert torch.allclose((near - a).norm(), values.clamp(max=0).norm())
    for _ in range(20):  # no other one is nearer
        b = torch.randn(30, 30, dtype=torch.float64)
        other = near + 0.1 * b @ b.T
        assert (other - a).norm() >= (near - a).norm()
    assert nearest_psd(a.float()).dtype == torch.float32


def test_ridge_grows_with_noise_and_width():
    assert ridge_for_noise(0.0, 100) > 0
    assert ridge_for_noise(8.0, 100) == pytest.approx(2 * ridge_for_noise(4.0, 100))
    assert ridge_for_noise(8.0, 400) == pytest.approx(2 * ridge_for_noise(8.0, 100))


def test_degree_terms_of_the_edge_proof():
    p = torch.arange(2, 100_001, dtype=torch.float64)
    x = (p - 1).rsqrt() - p.rsqrt()
    h = 1 / (p * (p - 1)) + math.sqrt(2) * (p - 2) * x
    j = 1 / (p.sqrt() * (p - 1)) + (p - 2) * x * (1 + (p / 2).sqrt())
    m = 1 / (p - 1) + 2 * (p - 2) * p.sqrt() * x
    assert h.max() <= 0.5 + 1e-9
    assert j.max() <= 1 / math.sqrt(2) + 1e-9
    assert m.max() <= 1 + 1e-9


# ---- rows and degrees ----
def test_bounded_rows_never_stretch_distances_by_more_than_the_floor_allows():
    torch.manual_seed(0)
    for floor in (0.1, 0.5, 1.0):
        a, b = (torch.randn(500, 3).double() * torch.rand(500, 1) for _ in range(2))
        b[:250] = a[:250] + 0.01 * b[:250]
        f, g = bounded_rows(a, floor), bounded_rows(b, floor)
        assert f.norm(dim=1).max() <= 1 + 1e-12
        assert ((f - g).norm(dim=1) <= (a - b).norm(dim=1) / floor + 1e-12).all()


def test_capped_bounds_degrees_and_keeps_what_it_may():
    rng = np.random.default_rng(0)
    for _ in range(100):
        graph = random_graph(rng)
        for degree in (1, 2, 4):
            out = capped(graph, degree)
            degrees = torch.bincount(out.edge_index[0], minlength=graph.num_nodes)
            assert degrees.max() <= degree
            assert set(pairs_of(out)) <= set(pairs_of(graph))
            reverse = {(v, u) for u, v in out.edge_index.T.tolist()}
            assert reverse == set(map(tuple, out.edge_index.T.tolist()))
        assert torch.equal(capped(graph, 99).edge_index, graph.edge_index)


def test_capped_changes_at_most_three_edges_for_one():
    rng = np.random.default_rng(1)
    most = 0
    for _ in range(200):
        graph = random_graph(rng)
        pairs = pairs_of(graph)
        for edge in pairs:
            other = make_graph([p for p in pairs if p != edge], graph.x, graph.y)
            for degree in (1, 2):
                one, two = (set(pairs_of(capped(g, degree))) for g in (graph, other))
                most = max(most, len(one ^ two))
    assert most <= 3


def test_capped_does_not_depend_on_positions():
    rng = np.random.default_rng(2)
    for _ in range(30):
        graph = random_graph(rng)
        order = rng.permutation(graph.num_nodes)
        place = np.argsort(order)
        moved = make_graph(
            [(int(place[u]), int(place[v])) for u, v in pairs_of(graph)],
            graph.x[order],
            graph.y[order],
            torch.from_numpy(order),
        )
        back = {
            tuple(sorted((int(order[u]), int(order[v])))) for u, v in pairs_of(capped(moved, 2))
        }
        assert back == {tuple(sorted(p)) for p in pairs_of(capped(graph, 2))}


def test_capped_keeps_loops_weights_and_refuses_zero():
    edges = torch.tensor([[0, 0, 1, 0, 2], [0, 1, 0, 2, 0]])
    weight = torch.arange(5.0)
    graph = Graph(
        x=torch.ones(3, 1),
        edge_index=edges,
        y=torch.zeros(3).long(),
        num_classes=1,
        edge_weight=weight,
    )
    out = capped(graph, 1)
    assert out.edge_index.shape[1] == 3
    assert (0, 0) in set(map(tuple, out.edge_index.T.tolist()))
    assert out.edge_weight is not None
    assert len(out.edge_weight) == 3
    with pytest.raises(ConfigError, match="degree"):
        capped(graph, 0)
