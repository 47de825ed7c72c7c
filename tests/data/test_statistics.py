"""Partition statistics of graphs that are small enough to count by hand."""

import json
from dataclasses import replace

import pytest
import torch

from fedloom.data.federation import Federation
from fedloom.data.graph import Graph
from fedloom.data.neighbours import is_undirected
from fedloom.data.partition import divide
from fedloom.data.statistics import count_edges, partition_statistics


def both_ways(*pairs):
    """Returns the given edges in both directions."""
    edges = torch.tensor(pairs).T
    return torch.cat([edges, edges.flip(0)], 1)


@pytest.fixture
def whole():
    """Ann holds nodes 0-3, Bob holds nodes 4-6. The edges 2-4 and 0-6 are cut.

    The labels are 0 0 1 - for Ann and 1 1 0 for Bob. Node 3 has no label.
    """
    return Graph(
        x=torch.ones(7, 2),
        edge_index=both_ways((0, 1), (1, 2), (2, 3), (2, 4), (0, 6), (4, 5)),
        y=torch.tensor([0, 0, 1, -1, 1, 1, 0]),
        num_classes=3,
        name="toy",
    )


@pytest.fixture
def pair(whole):
    train = torch.tensor([1, 0, 0, 0]).bool()
    ann = replace(whole.subgraph(torch.arange(4)), train=train)
    return Federation(
        (ann, whole.subgraph(torch.arange(4, 7))),
        names=("ann", "bob"),
        whole=whole,
        about={"dataset": "toy"},
    )


def test_statistics_equal_a_count_by_hand(pair):
    statistics = partition_statistics(pair)
    ann, bob = statistics["clients"]
    assert ann == {
        "name": "ann",
        "nodes": 4,
        "items": 4,
        "train": 1,
        "val": 0,
        "test": 0,
        "edges_kept": 3,
        "edges_cut": 2,
        "labels": [2, 1, 0],
        # Kept edges: 0-1 joins one class, 1-2 joins two, 2-3 does not count. Class 0 has the edge
        # ends 0, 1, 1; two of them lead to class 0. Class 1 has the end 2, which leads to class 0.
        "homophily": 0.5,
        "homophily_per_class": [pytest.approx(2 / 3), 0.0, None],
    }
    assert (bob["edges_kept"], bob["edges_cut"], bob["labels"]) == (1, 2, [1, 2, 0])
    assert (bob["homophily"], bob["homophily_per_class"]) == (1.0, [None, 1.0, None])
    assert statistics["totals"] == {
        "clients": 2,
        "nodes": 7,
        "items": 7,
        "train": 1,
        "val": 0,
        "test": 0,
        "edges_kept": 4,
        "edges_cut": 2,
        "cut_share": pytest.approx(1 / 3),
    }
    assert statistics["about"] == {"dataset": "toy"}
    assert json.loads(json.dumps(statistics)) == statistics


def test_cut_edges_are_unknown_without_the_whole_graph(pair):
    statistics = partition_statistics(Federation(pair.graphs, pair.names))
    assert [client["edges_cut"] for client in statistics["clients"]] == [None, None]
    assert statistics["totals"]["edges_cut"] is statistics["totals"]["cut_share"] is None


def test_directed_edges_count_separately():
    edges = torch.tensor([[0, 1, 1, 2, 3], [1, 0, 2, 0, 3]])
    graph = Graph(x=torch.ones(4, 1), edge_index=edges, y=torch.tensor([0, 0, 1, 1]), num_classes=2)
    assert not is_undirected(graph)
    assert count_edges(edges, undirected=False) == 5
    statistics = partition_statistics(
        Federation(
            (graph.subgraph(torch.tensor([0, 1])), graph.subgraph(torch.tensor([2, 3]))),
            whole=graph,
        )
    )
    assert [(c["edges_kept"], c["edges_cut"]) for c in statistics["clients"]] == [(2, 2), (1, 2)]
    assert statistics["totals"]["edges_cut"] == 2
    assert (
        statistics["clients"][1]["homophily"] is None
    )  # its only edge is a self-loop, which does not count


def test_undirected_edges_and_loops_count_once(whole):
    looped = Graph(
        x=whole.x,
        edge_index=torch.cat([whole.edge_index, torch.tensor([[3], [3]])], 1),
        y=whole.y,
        num_classes=3,
    )
    assert is_undirected(looped)
    assert count_edges(looped.edge_index, undirected=True) == 7


def test_totals_equal_the_record_of_the_federation(whole):
    for clients in (1, 2, 5):
        federation = divide(whole, clients, "random")
        totals = partition_statistics(federation)["totals"]
        assert totals["edges_kept"] == federation.about["edges_kept"]
        assert totals["edges_cut"] == federation.about["edges_cut"]
        assert totals["nodes"] == 7


def test_cut_edges_do_not_depend_on_node_ids(whole):
    renumbered = Graph(
        x=whole.x,
        edge_index=whole.edge_index,
        y=whole.y,
        num_classes=3,
        node_id=torch.arange(7) * 10 + 5,
    )
    first, second = (
        partition_statistics(divide(graph, 3, "random")) for graph in (whole, renumbered)
    )
    assert [c["edges_cut"] for c in first["clients"]] == [c["edges_cut"] for c in second["clients"]]


@pytest.fixture
def graphs():
    """Four graphs of 1, 2, 3 and 4 nodes. Their labels are 0, 1, 0 and unknown."""
    batch = torch.repeat_interleave(torch.arange(4), torch.arange(1, 5))
    return Graph(
        x=torch.ones(10, 1),
        edge_index=both_ways((1, 2), (3, 4)),
        y=torch.tensor([0, 1, 0, -1]),
        num_classes=3,
        batch=batch,
    )


def test_graph_tasks_have_graph_sizes_instead_of_homophily(graphs):
    (client,) = partition_statistics(Federation((graphs,)))["clients"]
    assert client["nodes"] == 10
    assert client["items"] == 4
    assert client["labels"] == [2, 1, 0]
    assert client["graph_size_per_class"] == [2.0, 2.0, None]
    assert "homophily" not in client
