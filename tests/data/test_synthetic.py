"""Synthetic graphs have the properties that their arguments specify."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedloom.data import synthetic as module
from fedloom.data.graph import Graph
from fedloom.data.synthetic import from_text, synthetic, synthetic_clients, synthetic_graphs
from fedloom.errors import ConfigError


def same_class(graph: Graph) -> float:
    source, target = graph.edge_index
    return (graph.y[source] == graph.y[target]).float().mean().item()


def degrees(graph: Graph) -> torch.Tensor:
    return torch.bincount(graph.edge_index[0], minlength=graph.num_nodes)


@pytest.mark.parametrize("homophily", [0.0, 0.1, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("label_skew", [0.0, 0.4])
def test_homophily_is_the_fraction_of_same_class_edges(homophily, label_skew):
    graph = synthetic(nodes=3000, classes=5, homophily=homophily, label_skew=label_skew).check()
    assert same_class(graph) == pytest.approx(homophily, abs=0.02)


def test_sizes_and_edges():
    graph = synthetic(nodes=2000, classes=3, features=7, degree=6.0, name="mine").check()
    assert (graph.num_nodes, graph.num_features, graph.num_classes, graph.name) == (
        2000,
        7,
        3,
        "mine",
    )
    assert graph.num_edges == 2000 * 6  # exact
    source, target = graph.edge_index
    assert (source != target).all()
    key = source * 2000 + target
    assert (key[1:] > key[:-1]).all()  # sorted and distinct
    assert torch.equal(torch.sort(target * 2000 + source).values, key)  # both directions of each
    assert not (graph.train | graph.val | graph.test).any()


def test_labels_are_shuffled_and_balanced():
    y = synthetic(nodes=1000, classes=4).y
    assert torch.bincount(y).tolist() == [250] * 4
    assert (y[1:] != y[:-1]).float().mean() > 0.5


def test_label_skew_is_the_ratio_of_class_sizes():
    sizes = torch.bincount(synthetic(nodes=10000, classes=4, label_skew=0.5).y).double()
    assert (sizes[1:] / sizes[:-1]).tolist() == pytest.approx([0.5] * 3, abs=0.01)


def test_every_class_has_a_node():
    assert (
        torch.bincount(
            synthetic(nodes=40, classes=20, degree=2, homophily=0.1, label_skew=0.9).y, minlength=20
        ).min()
        >= 1
    )


def test_degrees_follow_the_exponent():
    heavy, light = (
        degrees(synthetic(nodes=20000)),
        degrees(synthetic(nodes=20000, degree_exponent=0)),
    )
    assert heavy.float().mean() == light.float().mean() == 8
    assert light.max() < 30  # Poisson with mean 8
    assert heavy.max() > 150
    # P(degree > k) ~ k^-(exponent - 1). This is the slope between two points of the tail that are
    # far from the cut.
    tail = [(heavy > k).float().mean().item() for k in (16, 64)]
    assert np.log(tail[0] / tail[1]) / np.log(4) == pytest.approx(1.5, abs=0.25)
    assert torch.equal(
        degrees(synthetic(nodes=500, degree_exponent=None)),
        degrees(synthetic(nodes=500, degree_exponent=0)),
    )


@pytest.mark.parametrize("features", [4, 16])
def test_signal_is_the_distance_of_class_means_in_units_of_noise(features):
    graph = synthetic(nodes=40000, classes=4, features=features, degree=1, signal=3.0)
    means = torch.stack([graph.x[graph.y == c].mean(0) for c in range(4)])
    assert torch.pdist(means).tolist() == pytest.approx([3.0] * 6, abs=0.1)
    assert (graph.x - means[graph.y]).std().item() == pytest.approx(1.0, abs=0.02)
    no_signal = synthetic(nodes=40000, classes=4, features=features, degree=1, signal=0.0)
    assert (
        torch.pdist(torch.stack([no_signal.x[no_signal.y == c].mean(0) for c in range(4)])).max()
        < 0.15
    )


def test_graphs_depend_only_on_the_seed():
    np.random.seed(0)
    torch.manual_seed(0)
    before = np.random.get_state()[1].copy(), torch.get_rng_state()
    one = synthetic(nodes=300, seed=7)
    assert np.array_equal(before[0], np.random.get_state()[1])
    assert torch.equal(before[1], torch.get_rng_state())
    again, other, wider = (
        synthetic(nodes=300, seed=7),
        synthetic(nodes=300, seed=8),
        synthetic(nodes=300, seed=7, features=64),
    )
    for key in ("x", "edge_index", "y"):
        assert torch.equal(getattr(one, key), getattr(again, key))
        assert not torch.equal(getattr(one, key), getattr(other, key))
    assert torch.equal(one.edge_index, wider.edge_index)  # other features, same edges


@pytest.mark.parametrize(
    ("name", "classes", "features", "degree", "homophily"),
    [("arxiv", 40, 128, 13.67, 0.65), ("products", 47, 100, 50.52, 0.81)],
)
def test_named_shapes(name, classes, features, degree, homophily):
    graph = from_text(f"synthetic-{name}:nodes=10000").check()  # the sizes can be overridden
    assert (graph.num_classes, graph.num_features, graph.name) == (
        classes,
        features,
        f"synthetic-{name}",
    )
    assert graph.num_edges / 10000 == pytest.approx(degree, abs=0.01)
    assert same_class(graph) == pytest.approx(homophily, abs=0.02)
    assert degrees(graph).max() > 10 * degree


def test_arxiv_has_its_full_size():
    graph = from_text("synthetic-arxiv")
    assert (graph.num_nodes, graph.num_edges) == (169_343, 2_315_598)


def test_drawing_in_chunks_gives_the_same_graph(monkeypatch):
    whole = synthetic(nodes=500, blocks=2)
    monkeypatch.setattr(module, "EDGE_CHUNK", 13)
    assert torch.equal(synthetic(nodes=500, blocks=2).edge_index, whole.edge_index)


@pytest.mark.parametrize("homophily", [0.0, 0.7, 1.0])
def test_blocks_have_no_edges_between_them(homophily):
    graph = synthetic(nodes=1200, classes=3, homophily=homophily, blocks=12).check()
    block = torch.arange(1200) // 100
    assert (block[graph.edge_index[0]] == block[graph.edge_index[1]]).all()
    assert same_class(graph) == pytest.approx(homophily, abs=0.03)
    assert graph.num_edges == 1200 * 8
    for k in range(12):
        assert torch.bincount(graph.y[block == k]).tolist() == [33, 34, 33]
    assert not torch.equal(graph.y[:100], graph.y[100:200])  # each block has its own order


def test_each_client_has_one_block():
    federation = synthetic_clients(
        20, nodes=50, classes=4, features=6, split="40/30/30", seed=3, degree=5
    )
    assert (federation.num_clients, federation.num_features, federation.num_classes) == (20, 6, 4)
    assert {g.num_nodes for g in federation.graphs} == {50}
    assert federation.about["edges_cut"] == 0
    assert sum(g.num_edges for g in federation.graphs) == 20 * 50 * 5
    assert federation.graphs[0].train.any()
    with pytest.raises(ConfigError, match="synthetic-clients: clients is 0"):
        synthetic_clients(0)


def test_graphs():
    graph = synthetic_graphs(graphs=90, classes=3, nodes=(10, 20)).check()
    assert graph.task == "graph"
    assert torch.bincount(graph.y).tolist() == [30] * 3
    sizes = torch.bincount(graph.batch)
    assert len(sizes) == 90
    assert sizes.min() >= 10
    assert sizes.max() <= 20
    assert (graph.batch[graph.edge_index[0]] == graph.batch[graph.edge_index[1]]).all()
    # The label is the density: a threshold on the mean degree separates neighbouring classes.
    density = torch.bincount(graph.batch[graph.edge_index[0]], minlength=90) / sizes
    by_class = [density[graph.y == c] for c in range(3)]
    assert by_class[0].max() < by_class[1].min() <= by_class[1].max() < by_class[2].min()
    assert (graph.x[:, 0] == 1).all()
    assert torch.equal(graph.x, synthetic_graphs(graphs=90, classes=3, nodes=(10, 20)).x)
    assert not torch.equal(
        graph.x[:50], synthetic_graphs(graphs=90, classes=3, nodes=(10, 20), seed=1).x[:50]
    )


def test_from_text():
    graph = from_text("synthetic:nodes=1e3, classes=3,homophily=0.25,seed=5")
    wanted = synthetic(nodes=1000, classes=3, homophily=0.25, seed=5)
    assert torch.equal(graph.edge_index, wanted.edge_index)
    assert torch.equal(graph.x, wanted.x)
    assert torch.equal(from_text("synthetic").y, synthetic().y)
    assert from_text("synthetic-graphs:graphs=12,nodes=8-9").num_items == 12


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("synthetic:nods=3", "unknown option of synthetic 'nods'. Did you mean 'nodes'?"),
        ("synthetic:nodes=many", "nodes is 'many', must be written like 1000"),
        ("synthetic:nodes=10.5", "nodes is '10.5'"),
        ("synthetic:nodes", "nodes is ''"),
        ("synthetic-graphs:nodes=10", "nodes is '10', must be written like 10-30"),
        ("synthetic:nodes=1", "nodes is 1, must be a whole number at least 2"),
        ("synthetic:nodes=10,classes=11", "classes is 11, must be a whole number from 2 to 10"),
        ("synthetic:homophily=1.5", "homophily is 1.5, must be a number from 0 to 1"),
        ("synthetic:homophily=nan", "homophily is nan"),
        ("synthetic:degree=-1", "degree is -1"),
        ("synthetic:signal=inf", "signal is inf"),
        ("synthetic:label_skew=1", "label_skew is 1.0, must be a number from 0 to 0.99"),
        ("synthetic:degree_exponent=1.5", "degree_exponent is 1.5, must be a number at least 2.01"),
        ("synthetic:nodes=40,degree=30", "degree is 30.0, too dense"),
        (
            "synthetic:nodes=10,classes=2,blocks=6",
            "blocks is 6, must be a whole number from 1 to 5",
        ),
        ("synthetic:nodes=10,classes=2,blocks=3", "blocks is 3, must divide nodes, which is 10"),
        ("synthetic-graphs:nodes=5-9", r"nodes\[0\] is 5"),
        ("synthetic-graphs:nodes=10-9", r"nodes\[1\] is 9"),
        ("synth", "unknown dataset 'synth'"),
    ],
)
def test_bad_arguments_are_refused(text, message):
    with pytest.raises(ConfigError, match=message) as error:
        from_text(text)
    assert "\n" not in str(error.value)


def test_arguments_of_the_wrong_type_are_refused():
    with pytest.raises(ConfigError, match=r"nodes is 10.5, must be a whole number"):
        synthetic(nodes=10.5)
    with pytest.raises(ConfigError, match=r"homophily is '0.8', must be a number"):
        synthetic(homophily="0.8")
