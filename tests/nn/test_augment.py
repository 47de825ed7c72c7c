"""Views: which edges and columns they drop, and that models treat them as ordinary graphs."""

from dataclasses import replace

import pytest
import torch

from fedloom.data.graph import Graph
from fedloom.nn.architectures import ARCHITECTURES
from fedloom.nn.augment import random_view
from fedloom.nn.build import build_model

KINDS = ("sym", "row", "mean", "sum", "sym-bare")


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def some_graph(n=40, sparse=False, directed=False, weighted=False):
    draw = rng(3)
    ends = torch.randint(n - 2, (2, 120), generator=draw)  # the last two nodes are isolated
    ends = ends[:, ends[0] != ends[1]].unique(dim=1)
    if not directed:
        ends = torch.cat([ends, ends.flip(0)], 1).unique(dim=1)
    x = torch.randn(n, 20, generator=draw)
    if sparse:
        x = x * (torch.rand(n, 20, generator=draw) < 0.1)
    weight = None
    if weighted:
        weight = (
            (ends.sum(0) % 5 + 1).float()
            if not directed
            else torch.rand(ends.shape[1], generator=draw)
        )
    y = torch.randint(3, (n,), generator=draw)
    return Graph(
        x=x,
        edge_index=ends,
        y=y,
        num_classes=3,
        train=torch.ones(n, dtype=torch.bool),
        edge_weight=weight,
    )


def plain(view, whole):
    """Returns the same view as a graph that is built from scratch."""
    place = {pair: k for k, pair in enumerate(map(tuple, whole.edge_index.T.tolist()))}
    index = torch.tensor(
        [place[pair] for pair in map(tuple, view.edge_index.T.tolist())], dtype=torch.int64
    )
    weight = None if whole.edge_weight is None else whole.edge_weight[index]
    return replace(whole, x=view.x, edge_index=view.edge_index, edge_weight=weight)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"directed": True},
        {"weighted": True},
        {"directed": True, "weighted": True},
        {"sparse": True},
    ],
)
def test_adjacencies_and_their_transposes_equal_those_of_a_graph_built_from_scratch(how):
    whole = some_graph(**how)
    view = random_view(whole, 0.5, 0.3, rng())
    same = plain(view, whole)
    for kind in KINDS:
        assert torch.allclose(view.adjacency(kind).dense(), same.adjacency(kind).dense(), atol=1e-6)
        assert torch.allclose(
            view.adjacency(kind).transpose.dense(), same.adjacency(kind).dense().T, atol=1e-6
        )
        assert torch.equal(view.adjacency(kind).rows, same.adjacency(kind).rows)


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
@pytest.mark.parametrize("options", ["", "+norm", "+linear"])
@pytest.mark.parametrize("sparse", [False, True])
def test_every_model_gives_a_view_the_outputs_of_the_same_plain_graph(name, options, sparse):
    whole = some_graph(sparse=sparse)
    view = random_view(whole, 0.5, 0.3, rng())
    model = build_model(f"{name}-2x16{options}", 20, 3, seed=0)
    assert torch.allclose(model(view), model(plain(view, whole)), atol=1e-5)
    assert view.sparse_x is None or torch.equal(view.sparse_x.dense(), view.x)


@pytest.mark.parametrize("seed", range(12))
def test_repeated_edges_self_loops_and_zero_weights(seed):
    draw = rng(seed)
    # With few nodes, some edges are loops and some are repeated.
    ends = torch.randint(9, (2, 25), generator=draw)
    weight = torch.randint(4, (25,), generator=draw).float()
    whole = Graph(
        x=torch.ones(9, 2),
        edge_index=ends,
        y=torch.zeros(9, dtype=torch.int64),
        num_classes=2,
        edge_weight=weight,
    )
    view = random_view(whole, 0.4, 0.0, rng(seed))
    same = replace(whole, edge_index=view.edge_index, edge_weight=view.edge_weight)
    for kind in KINDS:
        assert torch.allclose(view.adjacency(kind).dense(), same.adjacency(kind).dense(), atol=1e-6)
        assert torch.allclose(
            view.adjacency(kind).transpose.dense(), same.adjacency(kind).dense().T, atol=1e-6
        )


def test_gradients_through_a_view_equal_those_of_a_graph_built_from_scratch():
    whole = some_graph(weighted=True)
    view = random_view(whole, 0.5, 0.3, rng())
    found = []
    for graph in (view, plain(view, whole)):
        model = build_model("sage-2x8", 20, 3, seed=0)
        model(graph).square().sum().backward()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*found, strict=True))


def test_both_directions_of_an_edge_are_dropped_jointly_and_at_the_given_rate():
    whole = some_graph(400)
    gone = []
    for seed in range(30):
        view = random_view(whole, 0.3, 0.5, rng(seed))
        pairs = set(map(tuple, view.edge_index.T.tolist()))
        assert {(j, i) for i, j in pairs} == pairs
        assert pairs <= set(map(tuple, whole.edge_index.T.tolist()))
        gone.append((1 - view.num_edges / whole.num_edges, 1 - float(view.columns.mean())))
    edges, columns = torch.tensor(gone).mean(0)
    assert abs(edges - 0.3) < 0.04
    assert abs(columns - 0.5) < 0.1


def test_columns_are_masked_for_all_nodes_and_the_original_graph_is_unchanged():
    whole = some_graph()
    before = whole.x.clone(), whole.edge_index.clone(), whole.adjacency().dense()
    view = random_view(whole, 0.5, 0.5, rng())
    masked = view.columns == 0
    assert 0 < masked.sum() < 20
    assert not view.x[:, masked].any()
    assert torch.equal(view.x[:, ~masked], whole.x[:, ~masked])
    assert all(
        torch.equal(a, b)
        for a, b in zip(before, (whole.x, whole.edge_index, whole.adjacency().dense()), strict=True)
    )


def test_dropping_nothing_and_dropping_everything():
    whole = some_graph()
    same, bare = random_view(whole, 0.0, 0.0, rng()), random_view(whole, 1.0, 1.0, rng())
    for kind in KINDS:
        assert torch.allclose(same.adjacency(kind).dense(), whole.adjacency(kind).dense())
    assert torch.equal(same.x, whole.x)
    assert bare.num_edges == 0
    assert not bare.x.any()
    assert torch.equal(bare.adjacency("sym").dense(), torch.eye(40))


def test_views_of_a_graph_without_edges_and_of_a_graph_level_dataset():
    edgeless = replace(some_graph(), edge_index=torch.zeros(2, 0, dtype=torch.int64))
    assert random_view(edgeless, 0.5, 0.5, rng()).num_edges == 0
    union = Graph(
        x=torch.ones(4, 2),
        edge_index=torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2]]),
        y=torch.tensor([0, 1]),
        num_classes=2,
        batch=torch.tensor([0, 0, 1, 1]),
    )
    model = build_model("gin-2x8", 2, 2, "graph", seed=0)
    assert model(random_view(union, 0.5, 0.0, rng())).shape == (2, 2)
