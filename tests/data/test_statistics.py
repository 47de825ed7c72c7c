"""Holdings: the numbers on a graph small enough to count by hand, and a picture that is really drawn."""

import json
import sys
from dataclasses import replace

import pytest
import torch

from fedloom.data.federation import Federation
from fedloom.data.graph import Graph
from fedloom.data.partition import divide
from fedloom.data.statistics import count_edges, is_undirected
from fedloom.errors import ConfigError
from fedloom.experiments.report.partition_plot import plot_partition
from fedloom.experiments.report.tables import holdings


def both_ways(*pairs):
    edges = torch.tensor(pairs).T
    return torch.cat([edges, edges.flip(0)], 1)


@pytest.fixture
def whole():
    """Nodes 0-3 are Ann's, 4-6 Bob's; labels 0 0 1 - | 1 1 0 (3 has none); 2-4 and 0-6 are cut."""
    return Graph(
        x=torch.ones(7, 2), edge_index=both_ways((0, 1), (1, 2), (2, 3), (2, 4), (0, 6), (4, 5)),
        y=torch.tensor([0, 0, 1, -1, 1, 1, 0]), num_classes=3, name="toy",
    )  # fmt: skip


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


def test_counted_by_hand(pair):
    held = holdings(pair)
    ann, bob = held["clients"]
    assert ann == {
        "name": "ann", "nodes": 4, "items": 4, "train": 1, "val": 0, "test": 0, "edges_kept": 3, "edges_cut": 2, "labels": [2, 1, 0],
        # Kept: 0-1 alike, 1-2 not, 2-3 does not count. Ends at class 0: 0, 1, 1, two of them alike; at class 1: 2, not alike.
        "homophily": 0.5, "homophily_per_class": [pytest.approx(2 / 3), 0.0, None],
    }  # fmt: skip
    assert (bob["edges_kept"], bob["edges_cut"], bob["labels"]) == (1, 2, [1, 2, 0])
    assert (bob["homophily"], bob["homophily_per_class"]) == (1.0, [None, 1.0, None])
    assert held["totals"] == {
        "clients": 2, "nodes": 7, "items": 7, "train": 1, "val": 0, "test": 0,
        "edges_kept": 4, "edges_cut": 2, "cut_share": pytest.approx(1 / 3),
    }  # fmt: skip
    assert held["about"] == {"dataset": "toy"}
    assert json.loads(json.dumps(held)) == held


def test_without_the_uncut_graph_cut_edges_are_unknown(pair):
    held = holdings(Federation(pair.graphs, pair.names))
    assert [client["edges_cut"] for client in held["clients"]] == [None, None]
    assert held["totals"]["edges_cut"] is held["totals"]["cut_share"] is None


def test_directed_edges_count_one_by_one():
    edges = torch.tensor([[0, 1, 1, 2, 3], [1, 0, 2, 0, 3]])
    graph = Graph(x=torch.ones(4, 1), edge_index=edges, y=torch.tensor([0, 0, 1, 1]), num_classes=2)
    assert not is_undirected(graph)
    assert count_edges(edges, undirected=False) == 5
    held = holdings(
        Federation(
            (graph.subgraph(torch.tensor([0, 1])), graph.subgraph(torch.tensor([2, 3]))),
            whole=graph,
        )
    )
    assert [(c["edges_kept"], c["edges_cut"]) for c in held["clients"]] == [(2, 2), (1, 2)]
    assert held["totals"]["edges_cut"] == 2
    assert held["clients"][1]["homophily"] is None  # its only edge is a self-loop


def test_undirected_edges_count_once_and_loops_once(whole):
    looped = Graph(
        x=whole.x,
        edge_index=torch.cat([whole.edge_index, torch.tensor([[3], [3]])], 1),
        y=whole.y,
        num_classes=3,
    )
    assert is_undirected(looped)
    assert count_edges(looped.edge_index, undirected=True) == 7


def test_totals_agree_with_the_federations_record(whole):
    for clients in (1, 2, 5):
        federation = divide(whole, clients, "random")
        totals = holdings(federation)["totals"]
        assert totals["edges_kept"] == federation.about["edges_kept"]
        assert totals["edges_cut"] == federation.about["edges_cut"]
        assert totals["nodes"] == 7


def test_numbered_otherwise_the_same_edges_are_cut(whole):
    renumbered = Graph(
        x=whole.x,
        edge_index=whole.edge_index,
        y=whole.y,
        num_classes=3,
        node_id=torch.arange(7) * 10 + 5,
    )
    first, second = (holdings(divide(graph, 3, "random")) for graph in (whole, renumbered))
    assert [c["edges_cut"] for c in first["clients"]] == [c["edges_cut"] for c in second["clients"]]


@pytest.fixture
def graphs():
    """Four graphs of 1, 2, 3 and 4 nodes with labels 0 1 0 -."""
    batch = torch.repeat_interleave(torch.arange(4), torch.arange(1, 5))
    return Graph(
        x=torch.ones(10, 1),
        edge_index=both_ways((1, 2), (3, 4)),
        y=torch.tensor([0, 1, 0, -1]),
        num_classes=3,
        batch=batch,
    )


def test_graph_level_holdings_have_sizes_instead_of_homophily(graphs):
    (client,) = holdings(Federation((graphs,)))["clients"]
    assert client["nodes"] == 10
    assert client["items"] == 4
    assert client["labels"] == [2, 1, 0]
    assert client["graph_size_per_class"] == [2.0, 2.0, None]
    assert "homophily" not in client


# ---- the picture ----


@pytest.mark.parametrize(
    ("suffix", "opening"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")]
)
def test_pictures_are_written_by_suffix(pair, tmp_path, suffix, opening):
    path = plot_partition(pair, tmp_path / f"held{suffix}")
    assert path.read_bytes().startswith(opening)


def test_the_picture_says_what_it_shows(pair, tmp_path):
    text = plot_partition(pair, str(tmp_path / "held.svg")).read_text()
    # The SVG draws letters as shapes and keeps each text as a comment.
    for words in (
        "toy · 2 clients · 33% of the edges cut",
        "nodes per class",
        "homophily",
        "ann",
        "0.67",
    ):
        assert f"<!-- {words} -->" in text


def test_many_clients_and_graph_level_federations_are_drawn(graphs, tmp_path):
    ring = Graph(x=torch.ones(240, 1), edge_index=both_ways(*((i, (i + 1) % 240) for i in range(240))),
                 y=torch.arange(240) % 3, num_classes=3)  # fmt: skip
    for number, federation in enumerate([divide(ring, 120, "uniform"), Federation((graphs,))]):
        text = plot_partition(federation, tmp_path / f"{number}.svg").read_text()
        assert ("mean nodes per graph" in text) == (federation.task == "graph")


def test_bad_suffix_and_missing_matplotlib_are_explained(pair, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"path 'held.gif': must end in .png, .svg, .pdf"):
        plot_partition(pair, "held.gif")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"plots need matplotlib: pip install 'fedloom\[plot\]'"):
        plot_partition(pair, tmp_path / "held.png")
