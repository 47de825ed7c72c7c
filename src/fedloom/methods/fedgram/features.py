"""Features of nodes: propagated, projected, and with the labels of neighbours beside them."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.data.graph import Graph
from fedloom.data.seeds import stream_seed


@lru_cache(maxsize=8)
def signs(seed: int, rows: int, columns: int) -> Tensor:
    """Returns a matrix of ±1/√columns, [rows, columns], the same at all parties of a run.

    It keeps inner products of rows approximately (Achlioptas 2003).

    Args:
        seed: The run's seed, which is public.
        rows: The width before the projection.
        columns: The width after it.
    """
    rng = torch.Generator().manual_seed(stream_seed(seed, "sign projection", rows, columns))
    bits = torch.randint(0, 2, (rows, columns), generator=rng, dtype=torch.int8)
    return (2 * bits - 1).float() / columns**0.5


def start(graph: Graph, width: int, seed: int) -> Tensor:
    """Returns H_0: the rows of X at length 1, projected if they are wider than `width`.

    Args:
        graph: The graph.
        width: The most columns.
        seed: The seed of the projection.
    """
    if graph.num_features <= width:
        return F.normalize(graph.x)
    length = graph.x.norm(dim=1, keepdim=True).clamp(min=1e-12)
    return graph.project(signs(seed, graph.num_features, width)) / length


def smoothed(graph: Graph, width: int, seed: int, count: int) -> Tensor:
    """Returns the rows of H_0 + ... + H_count at length 1, which the graph caches.

    H_l = S H_{l-1} with the graph's adjacency S of kind "sym".

    Args:
        graph: The graph.
        width: The most columns of H_0.
        seed: The seed of its projection.
        count: The number of hops.
    """

    def make() -> Tensor:
        # The last hop and the sum so far: larger numbers of hops continue from smaller ones.
        reached, last, total = graph._cache.pop(unfinished, (count + 1, None, None))
        if reached > count:
            reached, last = 0, start(graph, width, seed)
            total = last
        for _ in range(reached, count):
            last = graph.propagate(last, "sym")
            total = total + last
        graph._cache[unfinished] = (count, last, total)
        return F.normalize(total)

    unfinished = ("gram hops", width, seed)
    return graph.cached(("gram features", width, seed, count), make)
