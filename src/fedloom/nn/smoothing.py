"""Smoothing: polynomials of S, an adjacency matrix with self-loops."""

from __future__ import annotations

import torch
from torch import Tensor

from fedloom.data.graph import SPARSE_FEATURES_BELOW, Graph


def polynomial(
    graph: Graph, h: Tensor, coefficients: tuple[float, ...], kind: str = "sym"
) -> Tensor:
    """Returns Σ_k c_k S^k h, by Horner's rule with K products.

    Args:
        graph: The graph.
        h: [nodes, width].
        coefficients: c_0 ... c_K.
        kind: The kind of adjacency; see `Graph.adjacency`.
    """
    *lower, top = coefficients
    out = h if top == 1 else top * h
    for c in reversed(lower):
        out = graph.propagate(out, kind)
        if c:
            out = torch.add(out, h, alpha=c)
    return out


def power(k: int) -> tuple[float, ...]:
    """Returns the coefficients of S^k."""
    return (0.0,) * k + (1.0,)


def propagated(graph: Graph, kind: str, hops: int) -> list[Tensor]:
    """Returns [X, SX, ..., S^hops X] of the graph's raw features, which the graph caches."""
    known: list[Tensor] = graph.cached(("propagated", kind), lambda: [graph.x])
    while len(known) <= hops:
        known.append(graph.propagate(known[-1], kind))
    return known[: hops + 1]


def smoothed(graph: Graph, coefficients: tuple[float, ...]) -> Tensor:
    """Returns Σ_k c_k S^k X of the graph's raw features, [nodes, features].

    The graph caches the result, but not the lower hops.
    """
    first, *higher = coefficients

    def make() -> Tensor:
        # If c_0 is 0, the result is S times the result of c_1 ... c_K. Models that use every hop
        # have just requested that one.
        before = graph._cache.get(("smoothed", tuple(higher))) if first == 0 else None
        if before is None:
            return polynomial(graph, graph.x, coefficients)
        return graph.propagate(before)

    return graph.cached(("smoothed", coefficients), make)


def caching_pays(graph: Graph, hops: int) -> bool:
    """Returns whether (S^K X) W with cached S^K X is faster than S^K (X W).

    For each column of W, the first takes a dense product with nodes × features entries. The second
    takes sparse products with nnz(X) + K nnz(S) entries. A sparse entry costs as much as
    1 / SPARSE_FEATURES_BELOW dense ones. Caching always pays for dense features, rarely for
    bag-of-words, and never for a graph that is used once.
    """
    if graph.transient:
        return False
    if graph.sparse_x is None:
        return True
    sparse_entries = graph.sparse_x.nnz + hops * graph.adjacency("sym").nnz
    # Not `x.numel()`: a stack of graphs would have to make its dense features.
    return sparse_entries > SPARSE_FEATURES_BELOW * graph.num_nodes * graph.num_features
