"""The plot of a partition: it is drawn in every format and shows its texts."""

import sys
from dataclasses import replace

import pytest
import torch

from fedloom.data.federation import Federation
from fedloom.data.graph import Graph
from fedloom.data.partition import divide
from fedloom.errors import ConfigError
from fedloom.experiments.report.partition_plot import plot_partition


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


@pytest.mark.parametrize(
    ("suffix", "opening"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")]
)
def test_the_suffix_decides_the_format(pair, tmp_path, suffix, opening):
    path = plot_partition(pair, tmp_path / f"partition{suffix}")
    assert path.read_bytes().startswith(opening)


def test_the_plot_shows_its_texts(pair, tmp_path):
    text = plot_partition(pair, str(tmp_path / "partition.svg")).read_text()
    # The SVG draws characters as shapes and keeps each text as a comment.
    for words in (
        "toy · 2 clients · 33% of the edges cut",
        "nodes per class",
        "homophily",
        "ann",
        "0.67",
    ):
        assert f"<!-- {words} -->" in text


def test_many_clients_and_graph_tasks_are_drawn(graphs, tmp_path):
    ring = Graph(
        x=torch.ones(240, 1),
        edge_index=both_ways(*((i, (i + 1) % 240) for i in range(240))),
        y=torch.arange(240) % 3,
        num_classes=3,
    )
    for number, federation in enumerate([divide(ring, 120, "uniform"), Federation((graphs,))]):
        text = plot_partition(federation, tmp_path / f"{number}.svg").read_text()
        assert ("mean nodes per graph" in text) == (federation.task == "graph")


def test_a_wrong_suffix_and_a_missing_matplotlib_are_refused(pair, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"path 'partition.gif': must end in .png, .svg, .pdf"):
        plot_partition(pair, "partition.gif")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"plots need matplotlib: pip install 'fedloom\[plot\]'"):
        plot_partition(pair, tmp_path / "partition.png")
