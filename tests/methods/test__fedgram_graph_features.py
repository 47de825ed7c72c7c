"""Tests of graph_features: what the vectors may depend on, and what they tell apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from fedloom.data.graph import Graph
from fedloom.data.hashing import mixed
from fedloom.errors import DataError
from fedloom.methods.fedgram.graph_features import (
    _hashed_normal,
    _hashed_uniform,
    _start_labels,
    graph_features,
)

CLOSE = 1e-5
Small = tuple[Tensor, Sequence[tuple[int, int]]]  # node features and undirected edges


def union(*smalls: Small) -> Graph:
    """Returns small graphs as one Graph."""
    sizes = torch.tensor([len(x) for x, _ in smalls])
    starts = (sizes.cumsum(0) - sizes).tolist()
    pairs = [
        (u + start, v + start)
        for (_, edges), start in zip(smalls, starts, strict=True)
        for a, b in edges
        for u, v in ((a, b), (b, a))
    ]
    return Graph(
        x=torch.cat([x for x, _ in smalls]),
        edge_index=torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).T.contiguous(),
        y=torch.zeros(len(smalls), dtype=torch.int64),
        num_classes=2,
        batch=torch.repeat_interleave(torch.arange(len(smalls)), sizes),
    ).check()


def random_small(seed: int, kind: str = "one-hot") -> Small:
    """Returns a random graph of 5 to 24 nodes with 4 features of some kind."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(5, 25))
    edges = [(i, j) for i in range(n) for j in range(i) if rng.random() < 3 / n]
    if kind == "one-hot":
        x = torch.eye(4)[torch.from_numpy(rng.integers(0, 4, n))]
    elif kind == "real":
        x = torch.from_numpy(rng.normal(0, 30, (n, 4))).float()
    else:
        x = torch.ones(n, 1)
    return x, edges


def renumbered(small: Small, seed: int) -> Small:
    """Returns the same graph with its nodes in another order."""
    x, edges = small
    place = np.random.default_rng(seed).permutation(len(x))
    return x[torch.from_numpy(place.argsort())], [(int(place[a]), int(place[b])) for a, b in edges]


def path(n: int) -> Small:
    """Returns a path of n nodes without features."""
    return torch.ones(n, 1), [(i, i + 1) for i in range(n - 1)]


def cycle(n: int) -> Small:
    """Returns a cycle of n nodes without features."""
    return torch.ones(n, 1), [(i, (i + 1) % n) for i in range(n)]


KINDS = ("one-hot", "real", "constant")


@pytest.mark.parametrize("width", [8, 9, 15, 100, 512, 1024])
def test_shape_and_length(width: int) -> None:
    f = graph_features(union(*map(random_small, range(6))), width)
    assert f.shape == (6, width)
    assert f.dtype == torch.float32
    torch.testing.assert_close(f.norm(dim=1), torch.ones(6))


@pytest.mark.parametrize("kind", KINDS)
def test_order_of_nodes_does_not_matter(kind: str) -> None:
    smalls = [random_small(s, kind) for s in range(8)]
    f = graph_features(union(*smalls), 256)
    other = graph_features(union(*(renumbered(s, i) for i, s in enumerate(smalls))), 256)
    torch.testing.assert_close(f, other, atol=CLOSE, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_depends_on_its_own_graph_alone(kind: str) -> None:
    smalls = [random_small(s, kind) for s in range(8)]
    f = graph_features(union(*smalls), 256)
    alone = torch.cat([graph_features(union(s), 256) for s in smalls])
    torch.testing.assert_close(f, alone, atol=CLOSE, rtol=0)


def test_order_of_graphs_and_selection() -> None:
    graph = union(*map(random_small, range(10)))
    f = graph_features(graph, 256)
    order = torch.tensor([7, 2, 9, 0])
    torch.testing.assert_close(
        graph_features(graph.select_items(order), 256), f[order], atol=CLOSE, rtol=0
    )


def test_same_result_twice() -> None:
    graph = union(*map(random_small, range(5)))
    assert torch.equal(graph_features(graph, 128), graph_features(graph, 128))


def test_labels_masks_weights_and_direction_are_ignored() -> None:
    graph = union(*map(random_small, range(5)))
    f = graph_features(graph, 128)
    half = graph.edge_index[:, graph.edge_index[0] < graph.edge_index[1]]
    loops = torch.arange(graph.num_nodes).expand(2, -1)
    for other in (
        replace(graph, y=torch.ones(5, dtype=torch.int64), train=torch.ones(5, dtype=torch.bool)),
        replace(graph, edge_weight=torch.rand(graph.num_edges)),
        replace(graph, edge_index=half),
        replace(graph, edge_index=torch.cat([graph.edge_index, half, loops], 1)),
    ):
        assert torch.equal(graph_features(other, 128), f)


def test_the_graph_stays_as_it_is() -> None:
    graph = union(*map(random_small, range(5)))
    before = graph.digest()
    graph_features(graph, 128)
    assert graph.digest() == before


def apart(one: Small, other: Small, width: int = 256, rounds: int = 4) -> float:
    """Returns the distance of two graphs' vectors."""
    f = graph_features(union(one, other), width, rounds)
    return float((f[0] - f[1]).norm())


def test_tells_structures_apart() -> None:
    assert apart(cycle(3), path(3)) > 0.1
    assert apart(cycle(6), path(6)) > 0.1
    assert apart(path(4), path(5)) > 0.01
    assert apart(cycle(5), cycle(6)) > 0.01
    star = (torch.ones(4, 1), [(0, 1), (0, 2), (0, 3)])
    assert apart(star, path(4)) > 0.1


def test_tells_features_apart() -> None:
    x, edges = random_small(0)
    assert apart((x, edges), (x.flip(1), edges)) > 0.1
    ring = cycle(6)[1]
    a, b = torch.eye(2)
    # The same counts of labels, arranged otherwise.
    assert apart((torch.stack([a, b] * 3), ring), (torch.stack([a, a, a, b, b, b]), ring)) > 0.1


def test_near_real_features_have_near_vectors() -> None:
    x, edges = random_small(1, "real")
    assert apart((x, edges), (x + 1e-3, edges)) < 0.01 < apart((x, edges), (-x, edges))


def test_distance_does_not_depend_much_on_the_width() -> None:
    one, other = random_small(2), random_small(3)
    narrow, wide = apart(one, other, 1024), apart(one, other, 4096)
    assert abs(narrow - wide) < 0.15


@pytest.mark.parametrize("kind", KINDS)
def test_single_nodes_and_no_edges(kind: str) -> None:
    x, _ = random_small(4, kind)
    lone: Small = (x[:1], [])
    loose: Small = (x, [])
    f = graph_features(union(lone, loose, lone), 64)
    assert f.isfinite().all()
    torch.testing.assert_close(f.norm(dim=1), torch.ones(3))
    torch.testing.assert_close(f[0], f[2])
    assert (f[0] - f[1]).norm() > 0.01


def test_isolated_nodes_and_a_graph_without_nodes() -> None:
    x, edges = random_small(5)
    graph = union((torch.cat([x, x[:2]]), edges), (x, edges))
    f = graph_features(graph, 64)
    assert (f[0] - f[1]).norm() > 0.01
    assert graph.batch is not None
    gap = replace(graph, batch=graph.batch * 2, y=torch.zeros(3, dtype=torch.int64))
    with_gap = graph_features(gap, 64)
    assert with_gap.isfinite().all()
    torch.testing.assert_close(with_gap[[0, 2]], f, atol=CLOSE, rtol=0)


@pytest.mark.parametrize("rounds", [0, 1, 6])
def test_rounds(rounds: int) -> None:
    f = graph_features(union(*map(random_small, range(3))), 64, rounds)
    torch.testing.assert_close(f.norm(dim=1), torch.ones(3))


def test_wide_huge_and_zero_features() -> None:
    x, edges = random_small(6)
    wide = torch.zeros(len(x), 300)
    wide[:, ::75] = x
    for features in (wide, x * 1e30, x * 1e-30, x * 0, x[:, :0]):
        f = graph_features(union((features, edges), path_like(features)), 64)
        assert f.isfinite().all()
        torch.testing.assert_close(f.norm(dim=1), torch.ones(2))


def path_like(x: Tensor) -> Small:
    """Returns a path whose nodes have the features x."""
    return x, path(len(x))[1]


def test_start_labels_are_of_integers_and_coarse_above_16() -> None:
    x = torch.tensor([[1.0, 0.3], [1.0, -0.7], [1.0, -0.0], [2.0, 0.3], [0.0, 1.0]])
    one, two, three, four, five = _start_labels(x).tolist()
    assert one == two == three
    assert len({one, four, five}) == 3
    large = _start_labels(torch.tensor([[15.0], [16.0], [17.0], [31.0], [32.0], [-17.0]])).tolist()
    assert large[1] == large[2] == large[3]
    assert len(set(large)) == 4


def test_random_numbers_are_public_constants() -> None:
    # Known values: another machine or version that differs would compute another map.
    assert mixed(np.zeros(1, np.uint64)).tolist() == [0xE220A8397B1DCDAF]  # SplitMix64, seed 0
    assert np.array_equal(_hashed_uniform(1, 3, 4), _hashed_uniform(1, 5, 6)[:3, :4])
    assert not np.isin(_hashed_uniform(1, 9, 9), _hashed_uniform(2, 9, 9)).any()
    normal = _hashed_normal(1, 200, 200)
    assert abs(normal.mean()) < 0.02
    assert abs(normal.std() - 1) < 0.02
    assert np.abs(np.corrcoef(normal.T) - np.eye(200)).max() < 0.4


def test_items_that_are_nodes_and_narrow_widths_are_refused() -> None:
    graph = union(random_small(0))
    with pytest.raises(DataError, match="items are nodes"):
        graph_features(replace(graph, batch=None, y=torch.zeros(graph.num_nodes)), 64)
    with pytest.raises(ValueError, match="at least 8"):
        graph_features(graph, 7)
