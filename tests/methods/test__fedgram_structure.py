"""Structure features: equal for equal nodes, blind to the own label, and of a known width."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from fedloom.data.graph import Graph
from fedloom.methods.fedgram import structure
from fedloom.methods.fedgram.structure import (
    BUCKETS,
    degrees,
    label_means,
    meetings,
    pairs,
    structure_features,
    structure_width,
)

N, CLASSES = 30, 3


def side_by_side(graph: Graph, width: int = 2048) -> Tensor:
    return structure.side_by_side(graph, width)


MAPS = (side_by_side, degrees, label_means, meetings, pairs)


def graph_of(
    features: int = 5, seed: int = 0, undirected: bool = False, isolated: int = 4
) -> Graph:
    """Returns a random directed graph whose last nodes have no edges."""
    generator = torch.Generator().manual_seed(seed)
    near = torch.rand(N, N, generator=generator) < 0.15
    near.fill_diagonal_(False)
    near[N - isolated :] = near[:, N - isolated :] = False
    near = near | near.T if undirected else near
    order = torch.randperm(N, generator=generator)
    return Graph(
        torch.randn(N, features, generator=generator),
        near.nonzero().T.contiguous(),
        torch.randint(0, CLASSES, (N,), generator=generator),
        CLASSES,
        train=order < 15,
        val=(order >= 15) & (order < 22),
        test=order >= 22,
    )


@pytest.mark.parametrize("make", MAPS)
@pytest.mark.parametrize("features", [5, 400, 3000])
def test_the_order_of_nodes_does_not_matter(make, features: int) -> None:
    if make is meetings and features > 5:
        pytest.skip("meetings are for narrow features")
    graph = graph_of(features)
    order = torch.randperm(N, generator=torch.Generator().manual_seed(7))
    torch.testing.assert_close(make(graph.subgraph(order)), make(graph)[order])


@pytest.mark.parametrize("make", MAPS)
def test_the_order_of_edges_does_not_matter(make) -> None:
    graph = graph_of()
    order = torch.randperm(graph.num_edges, generator=torch.Generator().manual_seed(7))
    other = replace(graph, edge_index=graph.edge_index[:, order])
    torch.testing.assert_close(make(other), make(graph))


def test_isolated_nodes_have_only_their_own_features() -> None:
    graph = graph_of()
    alone = side_by_side(graph)[-4:]
    torch.testing.assert_close(alone[:, :5], normalize(graph.x)[-4:])
    assert (alone[:, 5:35] == 0).all()
    assert (alone[:, [35, 35 + BUCKETS]] == 1).all()
    assert (label_means(graph)[-4:] == 0).all()
    assert (meetings(graph)[-4:] == 0).all()
    assert all(make(graph).isfinite().all() for make in MAPS)


def test_a_graph_without_edges() -> None:
    graph = replace(graph_of(), edge_index=torch.zeros(2, 0, dtype=torch.int64))
    assert side_by_side(graph).shape == (N, 35 + 2 * BUCKETS)
    assert all(make(graph).isfinite().all() for make in MAPS)


def test_constant_features_leave_the_structure() -> None:
    graph = replace(graph_of(), x=torch.ones(N, 1))
    made = side_by_side(graph)
    assert made.shape == (N, 7 + 2 * BUCKETS)
    indegree = torch.bincount(graph.edge_index[1], minlength=N)
    assert torch.equal(made[:, 1], (indegree > 0).float())
    zero = side_by_side(replace(graph, x=torch.zeros(N, 1)))
    assert (zero[:, :7] == 0).all()
    assert torch.equal(zero[:, 7:], made[:, 7:])


@pytest.mark.parametrize("features", [1, 5, 280, 288, 289, 2016, 2017, 3000])
def test_the_width_depends_on_sizes_only(features: int) -> None:
    wanted = min(2048, 7 * features + 2 * BUCKETS)
    for seed in (0, 1):
        graph = graph_of(features, seed)
        assert side_by_side(graph).shape == (N, wanted)
        assert side_by_side(graph, 64).shape == (N, min(64, wanted))
        assert pairs(graph).shape[1] <= 2048
    assert pairs(graph_of(5)).shape[1] == 36 * 37 // 2
    assert pairs(graph_of(400)).shape == (N, 0)


@pytest.mark.parametrize("features", [1, 5, 280, 3000])
@pytest.mark.parametrize("width", [1, 64, 100, 2048])
def test_the_width_of_all_columns_is_known_in_advance(features: int, width: int) -> None:
    graph = graph_of(features)
    assert structure_features(graph, width).shape == (N, structure_width(features, CLASSES, width))


def test_scattered_blocks_keep_inner_products() -> None:
    graph = graph_of(300)
    full, narrow = side_by_side(graph, 10_000), side_by_side(graph)
    assert full.shape[1] == 2132
    assert narrow.shape[1] == 2048
    assert (full @ full.T - narrow @ narrow.T).abs().mean() < 7 / 2016**0.5


def test_every_client_scatters_alike() -> None:
    # Two nodes with the same neighbourhood in different graphs have the same row.
    graph = graph_of(3000)
    alone = graph.subgraph(torch.tensor([N - 1]))
    torch.testing.assert_close(side_by_side(alone)[0], side_by_side(graph)[N - 1])


def test_the_blocks_of_both_directions() -> None:
    graph = graph_of()
    near = torch.zeros(N, N)
    near[graph.edge_index[1], graph.edge_index[0]] = 1
    i, o = (m / m.sum(1, keepdim=True).clamp(min=1) for m in (near, near.T))
    x = normalize(graph.x)
    blocks = (x, i @ x, o @ x, i @ i @ x, i @ o @ x, o @ i @ x, o @ o @ x)
    wanted = torch.cat([normalize(block) for block in blocks], 1)
    torch.testing.assert_close(side_by_side(graph)[:, :35], wanted)
    same = side_by_side(graph_of(undirected=True))
    torch.testing.assert_close(same[:, 5:10], same[:, 10:15])


def brute_force_meetings(graph: Graph) -> Tensor:
    near = torch.zeros(N, N)
    near[graph.edge_index[1], graph.edge_index[0]] = 1
    near = near / near.sum(1, keepdim=True).clamp(min=1)
    x, out = normalize(graph.x), torch.zeros(N, graph.num_features, CLASSES)
    for i in range(N):
        y = one_hot(graph.y, CLASSES).float() * graph.train[:, None]
        y[i] = 0
        out[i] = (near[i][:, None] * x).T @ (near @ y)
    return out.flatten(1)


@pytest.mark.parametrize("undirected", [False, True])
def test_meetings_count_every_label_but_the_own(undirected: bool) -> None:
    graph = graph_of(undirected=undirected)
    torch.testing.assert_close(meetings(graph), brute_force_meetings(graph))


@pytest.mark.parametrize("make", MAPS)
@pytest.mark.parametrize("undirected", [False, True])
def test_no_row_depends_on_its_own_label_or_on_hidden_ones(make, undirected: bool) -> None:
    graph = graph_of(undirected=undirected)
    before = make(graph)
    torch.testing.assert_close(make(graph.hide_labels()), before)
    for node in graph.train.nonzero().flatten().tolist():
        y = graph.y.clone()
        y[node] = (y[node] + 1) % CLASSES
        torch.testing.assert_close(make(replace(graph, y=y))[node], before[node])


def test_the_cache_holds_no_labels() -> None:
    graph = graph_of()
    side_by_side(graph)
    hidden = graph.hide_labels()
    assert (hidden.cached("reversed", lambda: hidden).y == -1).all()
    assert torch.equal(label_means(hidden), label_means(graph))
