"""Randomised response on edges: a graph that is private before anything is computed from it.

Every pair of nodes is an edge or not. Randomised response (Warner 1965) tells the truth about a
pair with probability e^ε / (1 + e^ε). Then all that follows from the answers is ε-differentially
private for every single edge, without trust in anybody (edge-local differential privacy). Sparse
graphs have far more pairs than edges, so at small ε nearly all edges of the result are false. The
result is therefore thinned to the number of edges that the answers suggest, as in Hidano and
Murakami, "Degree-Preserving Randomized Response" (2022). That uses the answers only and costs no ε.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.data.graph import Graph
from fedloom.data.seeds import uniform_numbers
from fedloom.errors import ConfigError, DataError


def flip_probability(epsilon: float) -> float:
    """Returns the probability with which a pair is answered falsely: 1 / (1 + e^ε)."""
    if not epsilon > 0:
        raise ConfigError(f"edge_epsilon is {epsilon!r}, must be above 0")
    return math.exp(-epsilon) / (1 + math.exp(-epsilon))


def randomised_edges(
    graph: Graph, epsilon: float, rng: torch.Generator | None = None, thin: bool = True
) -> Graph:
    """Returns a graph with the edges of randomised response. Self-loops and weights are gone.

    Args:
        graph: An undirected graph of a node task.
        epsilon: ε of every edge.
        rng: A random stream, for tests. None: the operating system's entropy.
        thin: Whether false edges are thinned out together with true ones; see above.
    """
    if graph.task != "node":
        raise ConfigError("run.edge_epsilon is for node tasks: the data are a graph task")
    n, q = graph.num_nodes, flip_probability(epsilon)
    pairs = n * (n - 1) // 2
    source, target = (row.numpy() for row in graph.edge_index)
    low, high = np.minimum(source, target), np.maximum(source, target)
    there = np.unique(_number(low, high, n)[low != high])
    both = np.unique(np.stack([source, target], 1)[source != target], axis=0)
    if len(both) != 2 * len(there):
        raise DataError(f"graph {graph.name!r}: run.edge_epsilon needs undirected edges")
    kept = there[uniform_numbers(len(there), rng).numpy() >= q]
    answers = np.concatenate([kept, _drawn(pairs, q, there, rng)])
    if thin and len(answers):
        # The answers hold (1-2q) m + q pairs edges on average, so this is an estimate of m.
        suggested = min(max((len(answers) - q * pairs) / (1 - 2 * q), 0.0), float(len(answers)))
        stays = uniform_numbers(len(answers), rng).numpy() < suggested / len(answers)
        answers = answers[stays]
    a, b = _pair(np.sort(answers), n)
    edges = torch.from_numpy(np.stack([np.concatenate([a, b]), np.concatenate([b, a])]))
    return replace(graph, edge_index=edges, edge_weight=None)


def _drawn(
    pairs: int, q: float, there: NDArray[np.int64], rng: torch.Generator | None
) -> NDArray[np.int64]:
    """Returns the pairs without an edge that are answered falsely, each with probability q.

    The gaps between false answers are geometric, so the work is proportional to their number.
    """
    found: list[NDArray[np.int64]] = []
    at = -1
    while at < pairs:
        count = int(1.1 * q * (pairs - at)) + 64
        uniform = 1 - uniform_numbers(count, rng).numpy()  # (0, 1]
        gaps = np.minimum(np.floor(np.log(uniform) / math.log1p(-q)), pairs).astype(np.int64) + 1
        places = at + np.cumsum(gaps)
        found.append(places[places < pairs])
        at = int(places[-1])
    return np.setdiff1d(np.concatenate(found), there, assume_unique=True)


def _number(low: NDArray[np.int64], high: NDArray[np.int64], n: int) -> NDArray[np.int64]:
    """Returns the numbers of pairs low < high, from 0 to n(n-1)/2."""
    return low * (2 * n - low - 1) // 2 + high - low - 1


def _pair(number: NDArray[np.int64], n: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the pairs of numbers: the inverse of `_number`."""
    starts = _number(np.arange(n, dtype=np.int64), np.arange(1, n + 1, dtype=np.int64), n)
    low = np.searchsorted(starts, number, side="right") - 1
    return low, number - starts[low] + low + 1
