"""Capping: at most so many edges at a node, by a rule that no edge changes much."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from fedloom.data.graph import Graph
from fedloom.data.hashing import mixed
from fedloom.errors import ConfigError


def capped(graph: Graph, degree: int) -> Graph:
    """Returns the graph without edges beyond a degree: an edge stays if both ends list it.

    A node lists its first `degree` edges, in an order that a fixed hash of the two `node_id`s
    gives. A node's list depends only on its own edges, so the rule is stable: one edge more or less
    changes at most 3 edges of the result (itself, and one at each end). A greedy rule that fills
    free places has no such bound, because a place that becomes free can start a chain. Self-loops
    stay and do not count.
    """
    if degree < 1:
        raise ConfigError(f"degree is {degree!r}, must be at least 1")
    source, target = (row.numpy() for row in graph.edge_index)
    loop = source == target
    low, high = np.minimum(source, target), np.maximum(source, target)
    pairs, inverse = np.unique(np.stack([low, high], 1)[~loop], axis=0, return_inverse=True)
    ids = graph.node_id.numpy().astype(np.uint64)
    one, other = ids[pairs[:, 0]], ids[pairs[:, 1]]
    small, large = np.minimum(one, other), np.maximum(one, other)
    order = mixed(mixed(small) ^ large)
    kept = np.ones(len(pairs), dtype=bool)
    ends = np.concatenate([pairs[:, 0], pairs[:, 1]])
    edge = np.tile(np.arange(len(pairs)), 2)
    # Ties of the hash are broken by the ids, so that the order does not depend on positions.
    by_node = np.lexsort((large[edge], small[edge], order[edge], ends))
    ends, edge = ends[by_node], edge[by_node]
    starts = np.searchsorted(ends, ends)
    kept[edge[np.arange(len(ends)) - starts >= degree]] = False
    keep = np.ones(len(source), dtype=bool)
    keep[~loop] = kept[inverse.reshape(-1)]
    mask = torch.from_numpy(keep)
    weight = None if graph.edge_weight is None else graph.edge_weight[mask]
    return replace(graph, edge_index=graph.edge_index[:, mask], edge_weight=weight)
