"""Smoothing: polynomials of S, an adjacency with self-loops."""

from __future__ import annotations

import torch
from torch import Tensor

from fedloom.data.graph import SPARSE_FEATURES_BELOW, Graph


def polynomial(
    graph: Graph, h: Tensor, coefficients: tuple[float, ...], kind: str = "sym"
) -> Tensor:
    """Σ_k c_k S^k h, by Horner's rule: takes [nodes, width], c_0 ... c_K; gives [nodes, width] after K products with S."""
    *lower, top = coefficients
    out = h if top == 1 else top * h
    for c in reversed(lower):
        out = graph.propagate(out, kind)
        if c:
            out = torch.add(out, h, alpha=c)
    return out


def power(k: int) -> tuple[float, ...]:
    """The coefficients of S^k."""
    return (0.0,) * k + (1.0,)


def propagated(graph: Graph, kind: str, hops: int) -> list[Tensor]:
    """[X, SX, ..., S^hops X] for the graph's raw features, kept on the graph."""
    known: list[Tensor] = graph.cached(("propagated", kind), lambda: [graph.x])
    while len(known) <= hops:
        known.append(graph.propagate(known[-1], kind))
    return known[: hops + 1]


def smoothed(graph: Graph, coefficients: tuple[float, ...]) -> Tensor:
    """Σ_k c_k S^k X for the graph's raw features, [nodes, features], kept on the graph; the hops below are not."""
    first, *higher = coefficients

    def make() -> Tensor:
        # Without X itself it is one step from what begins one hop earlier, which models that look at every hop have asked for just before.
        before = graph._cache.get(("smoothed", tuple(higher))) if first == 0 else None
        return (
            polynomial(graph, graph.x, coefficients) if before is None else graph.propagate(before)
        )

    return graph.cached(("smoothed", coefficients), make)


def caching_pays(graph: Graph, hops: int) -> bool:
    """Whether to multiply by kept features, (S^K X) W, rather than to smooth the product, S^K (X W).

    Per column of W the first takes a dense product with nodes × features entries, the second sparse ones with nnz(X) + K nnz(S)
    entries, each as costly as 1 / SPARSE_FEATURES_BELOW dense ones. Dense features: always keep. Bag-of-words: rarely. A graph that is
    seen once: never.
    """
    if graph.transient:
        return False
    if graph.sparse_x is None:
        return True
    entries = graph.sparse_x.nnz + hops * graph.adjacency("sym").nnz
    return entries > SPARSE_FEATURES_BELOW * graph.x.numel()
