"""Randomised response on edges: exact probabilities, density, and what is refused."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from fedloom.data.graph import Graph
from fedloom.data.randomised_edges import _number, _pair, flip_probability, randomised_edges
from fedloom.data.synthetic import synthetic
from fedloom.errors import ConfigError, DataError


def ring(n):
    here = torch.arange(n)
    there = (here + 1) % n
    edges = torch.stack([torch.cat([here, there]), torch.cat([there, here])])
    return Graph(torch.ones(n, 1), edges, torch.zeros(n, dtype=torch.int64), 2)


def pairs_of(graph):
    return {(a, b) for a, b in graph.edge_index.t().tolist() if a < b}


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0, 16.0])
def test_the_odds_of_an_answer_are_exactly_e_to_the_epsilon(epsilon):
    q = flip_probability(epsilon)
    assert (1 - q) / q == pytest.approx(math.exp(epsilon), rel=1e-12)


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_each_pair_is_answered_falsely_with_that_probability(epsilon):
    graph, q = ring(12), flip_probability(epsilon)
    truth, runs = pairs_of(graph), 3000
    rng = torch.Generator().manual_seed(3)
    seen = np.zeros((12, 12))
    for _ in range(runs):
        for a, b in pairs_of(randomised_edges(graph, epsilon, rng, thin=False)):
            seen[a, b] += 1
    for a in range(12):
        for b in range(a + 1, 12):
            chance = 1 - q if (a, b) in truth else q
            assert stats.binomtest(int(seen[a, b]), runs, chance).pvalue > 1e-5
    # and so no pair tells more than e^ε: the counts bound it from below
    kept = np.mean([seen[a, b] for a, b in truth]) / runs
    false = np.mean([seen[a, b] for a in range(12) for b in range(a + 1, 12)
                     if (a, b) not in truth]) / runs  # fmt: skip
    assert kept / false == pytest.approx(math.exp(epsilon), rel=0.1)


def test_thinning_keeps_the_density():
    graph = synthetic(600, 3, 8)
    edges = graph.num_edges / 2
    dense = randomised_edges(graph, 2.0, torch.Generator().manual_seed(0), thin=False)
    assert dense.num_edges / 2 > 5 * edges
    thin = randomised_edges(graph, 2.0, torch.Generator().manual_seed(0))
    assert thin.num_edges / 2 == pytest.approx(edges, rel=0.25)


def test_the_result_is_an_undirected_graph_and_another_one_each_time():
    graph = ring(50)
    one, other = randomised_edges(graph, 3.0), randomised_edges(graph, 3.0)
    assert pairs_of(one) != pairs_of(other)
    both = {tuple(edge) for edge in one.edge_index.t().tolist()}
    assert both == {(b, a) for a, b in both}
    assert all(a != b for a, b in both)
    one.check()


def test_numbers_of_pairs_are_inverted():
    n = 17
    low, high = np.triu_indices(n, 1)
    assert np.array_equal(_number(low, high, n), np.arange(n * (n - 1) // 2))
    a, b = _pair(np.arange(n * (n - 1) // 2), n)
    assert np.array_equal(a, low)
    assert np.array_equal(b, high)


def test_directed_edges_and_a_wrong_epsilon_are_refused():
    graph = Graph(
        torch.ones(3, 1), torch.tensor([[0, 1], [1, 2]]), torch.zeros(3, dtype=torch.int64), 2
    )
    with pytest.raises(DataError, match=r"run\.edge_epsilon needs undirected edges"):
        randomised_edges(graph, 1.0)
    with pytest.raises(ConfigError, match="edge_epsilon is 0, must be above 0"):
        flip_probability(0)
