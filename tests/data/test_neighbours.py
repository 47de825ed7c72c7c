"""Sorted edges and adjacencies equal those that are computed edge by edge."""

from collections import Counter
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.data import neighbours
from fedloom.data.graph import Graph


@st.composite
def graphs(draw):
    """A small graph with loops, repeated and directed edges, in any order or sorted."""
    nodes = draw(st.integers(1, 12))
    ends = st.integers(0, nodes - 1)
    edges = draw(st.lists(st.tuples(ends, ends), max_size=40))
    if draw(st.booleans()):
        edges = edges + [(target, source) for source, target in edges]
    if draw(st.booleans()):
        edges = sorted(edges)
    return Graph(
        x=torch.ones(nodes, 1),
        edge_index=torch.tensor(edges, dtype=torch.int64).reshape(-1, 2).T.contiguous(),
        y=torch.zeros(nodes, dtype=torch.int64),
        num_classes=1,
    )


def pairs(matrix):
    """Returns the places of a matrix's entries, in their order of storage."""
    rows = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    return list(zip(rows.tolist(), matrix.indices.tolist(), strict=True))


@pytest.mark.parametrize("block", [3, neighbours.BLOCK])
@settings(max_examples=100, deadline=None)
@given(graph=graphs())
def test_edges_and_adjacency_equal_those_of_a_plain_loop(block, graph):
    edges = list(map(tuple, graph.edge_index.T.tolist()))
    turned = [(target, source) for source, target in edges]
    symmetric = sorted({(a, b) for a, b in edges + turned if a != b})
    with mock.patch.object(neighbours, "BLOCK", block):
        assert pairs(neighbours.sorted_edges(graph)) == sorted(edges)
        undirected = neighbours.is_undirected(graph)
        found = neighbours.adjacency(graph)
    assert undirected == (Counter(edges) == Counter(turned))
    assert pairs(found) == symmetric
    assert (found.data == 1).all()


@given(graph=graphs())
def test_the_adjacency_says_whether_edges_are_undirected(graph):
    neighbours.adjacency(graph)
    with mock.patch.object(neighbours, "sorted_edges", side_effect=AssertionError):
        found = neighbours.is_undirected(graph)
    turned = graph.edge_index.flip(0)
    assert found == (
        Counter(map(tuple, graph.edge_index.T.tolist())) == Counter(map(tuple, turned.T.tolist()))
    )


@given(counts=st.lists(st.integers(0, 9), max_size=30))
def test_blocks_of_rows_are_all_rows_once(counts):
    starts = np.cumsum([0, *counts])
    with mock.patch.object(neighbours, "BLOCK", 5):
        blocks = list(neighbours.row_blocks(starts))
    assert [row for first, end in blocks for row in range(first, end)] == list(range(len(counts)))
    for first, end in blocks:
        assert end == first + 1 or starts[end] - starts[first] <= 5
