"""Our Louvain gives the communities of scikit-network's, to the last bit."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_matrix
from sknetwork.clustering import Louvain

from fedloom.data import neighbours
from fedloom.data.louvain import louvain


def plain(adjacency, seed, resolution):
    """Returns what scikit-network finds."""
    return Louvain(
        resolution=resolution,
        modularity="newman",
        tol_optimization=1e-4,
        tol_aggregation=1e-4,
        shuffle_nodes=True,
        return_probs=False,
        return_aggregate=False,
        random_state=seed,
    ).fit_predict(adjacency.astype(np.float32))


def partition_of(communities):
    """Returns the communities as a set of sets of nodes."""
    return {tuple(np.flatnonzero(communities == c).tolist()) for c in np.unique(communities)}


def drawn(nodes, edges, groups, seed):
    """Returns a random symmetric adjacency. Most edges are within one of the groups."""
    rng = np.random.default_rng(seed)
    source, target = rng.integers(nodes, size=(2, edges))
    size = -(-nodes // groups)
    near = np.minimum(source // size * size + rng.integers(size, size=edges), nodes - 1)
    target = np.where(rng.random(edges) < 0.85, near, target)
    proper = source != target
    source, target = source[proper], target[proper]
    both = np.concatenate([source, target]), np.concatenate([target, source])
    matrix = csr_matrix((np.ones(len(both[0]), dtype=np.int8), both), shape=(nodes, nodes))
    matrix.data[:] = 1
    return matrix


@pytest.mark.parametrize("block", [40, neighbours.BLOCK])
@settings(max_examples=60, deadline=None)
@given(
    nodes=st.integers(1, 300),
    degree=st.floats(0, 12),
    groups=st.integers(1, 30),
    drawing=st.integers(0, 2**32 - 1),
    seed=st.integers(0, 2**31 - 1),
    resolution=st.sampled_from([1e-6, 0.3, 1.0, 4.0, 20.0]),
)
def test_communities_equal_those_of_scikit_network(
    block, nodes, degree, groups, drawing, seed, resolution
):
    adjacency = drawn(nodes, round(nodes * degree), groups, drawing)
    with mock.patch.object(neighbours, "BLOCK", block):
        found = louvain(adjacency, seed, resolution)
    if adjacency.nnz == 0:  # scikit-network refuses it
        assert found.tolist() == list(range(nodes))
    else:
        assert partition_of(found) == partition_of(plain(adjacency, seed, resolution))


def test_communities_of_a_larger_graph_with_several_levels():
    adjacency = drawn(20_000, 60_000, 400, 0)
    for seed in range(3):
        assert partition_of(louvain(adjacency, seed, 1.0)) == partition_of(
            plain(adjacency, seed, 1.0)
        )


def test_the_adjacency_is_not_changed():
    adjacency = drawn(200, 800, 5, 0)
    before = adjacency.copy()
    louvain(adjacency, 0, 1.0)
    for name in ("data", "indices", "indptr"):
        assert np.array_equal(getattr(adjacency, name), getattr(before, name))
