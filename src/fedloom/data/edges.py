"""Edges of a user's data: repeated pairs become one edge, and undirected edges are mirrored."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedloom.data.graph import Graph
from fedloom.errors import unknown

LOG = logging.getLogger("fedloom.data")
# How the weights of a repeated pair become one weight.
AGGREGATES = ("sum", "mean", "count", "max")
# Graphs without node features get their degree as a one-hot vector. All degrees from this one on
# share a column.
DEGREE_CAP = 128


def require_aggregate(name: str, field: str) -> None:
    """Raises a ConfigError that names the field unless `name` is a rule, or empty."""
    if name and name not in AGGREGATES:
        raise unknown(f"{field}:", str(name), AGGREGATES)


def mirrored(
    edges: npt.NDArray[np.int64], weight: npt.NDArray[np.float64] | None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64] | None]:
    """Returns undirected edges in both directions. A self-loop is there once."""
    proper = edges[0] != edges[1]
    both = np.concatenate([edges, edges[::-1, proper]], axis=1)
    return both, None if weight is None else np.concatenate([weight, weight[proper]])


def merged(
    edges: npt.NDArray[np.int64],
    weight: npt.NDArray[np.float64] | None,
    num_nodes: int,
    aggregate: str = "",
    where: str = "",
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64] | None]:
    """Returns edges [2, edges] sorted by source and target, each once, and their weights.

    Args:
        edges: The edges, in any order.
        weight: Their weights. None: all weights are 1.
        num_nodes: Number of nodes.
        aggregate: How repeated pairs get one weight: "sum", "mean", "max" or "count" (the number
            of repetitions, whatever the weights). "": equal weights become one. If weights
            differ, all repeated pairs are summed, and a line in the log says so.
        where: What the line in the log begins with.
    """
    key = edges[0] * num_nodes + edges[1]
    if (key[1:] > key[:-1]).all():
        return edges, np.ones(len(key)) if aggregate == "count" else weight
    order = np.argsort(key, kind="stable")
    key = key[order]
    first = np.flatnonzero(np.concatenate([[True], key[1:] != key[:-1]]))
    edges, count = edges[:, order[first]], np.diff(np.append(first, len(key)))
    if aggregate == "count":
        return edges, count.astype(np.float64)
    if weight is None:
        return edges, None
    weight = weight[order]
    if not aggregate:
        different = (weight[1:] != weight[:-1]) & (key[1:] == key[:-1])
        if not different.any():
            return edges, weight[first]
        aggregate = "sum"
        LOG.warning(
            "%s: %d pairs occur more than once, with different weights: their weights are summed. "
            "Set aggregate to choose: %s",
            where, int((count > 1).sum()), ", ".join(AGGREGATES),
        )  # fmt: skip
    return edges, reduced(weight, first, count, aggregate)


def reduced(
    values: npt.NDArray[np.float64],
    first: npt.NDArray[np.int64],
    count: npt.NDArray[np.int64],
    aggregate: str,
) -> npt.NDArray[np.float64]:
    """Returns one value for each group of consecutive values.

    Args:
        values: The values, ordered by group.
        first: Where each group begins. No group is empty.
        count: The size of each group.
        aggregate: One of AGGREGATES.
    """
    if aggregate == "count":
        return count.astype(np.float64)
    total: Any = np.maximum if aggregate == "max" else np.add
    result: npt.NDArray[np.float64] = total.reduceat(values, first)
    return result / count if aggregate == "mean" else result


def per_node(
    ends: npt.NDArray[np.int64],
    values: npt.NDArray[np.float64],
    num_nodes: int,
    aggregate: str,
) -> npt.NDArray[np.float64]:
    """Returns one number per node, of the values of its edges.

    A node without a value has the sum 0, the count 0, and no mean or maximum (NaN).

    Args:
        ends: The node of each value.
        values: The values, NaN where missing.
        num_nodes: Number of nodes.
        aggregate: One of AGGREGATES.
    """
    known = ~np.isnan(values)
    ends, values = ends[known], values[known]
    result = np.full(num_nodes, 0.0 if aggregate in ("sum", "count") else np.nan)
    if len(ends):
        order = np.argsort(ends, kind="stable")
        nodes, first, count = np.unique(ends[order], return_index=True, return_counts=True)
        result[nodes] = reduced(values[order], first, count, aggregate)
    return result


def merge_edges(graph: Graph, aggregate: str = "") -> Graph:
    """Returns a graph with its edges sorted, each once; see `merged`."""
    edges, weight = graph.edge_index.numpy(), graph.edge_weight
    weights = None if weight is None else weight.double().numpy()
    ends, values = merged(edges, weights, graph.num_nodes, aggregate, f"graph {graph.name!r}")
    if ends is edges and values is weights:
        return graph
    return replace(
        graph,
        edge_index=torch.from_numpy(ends.copy()),
        edge_weight=None if values is None else torch.from_numpy(values).float(),
    )


def degree_features(edge_index: Tensor, num_nodes: int) -> Tensor:
    """Returns each node's degree as a one-hot vector [nodes, DEGREE_CAP + 1]."""
    degree = torch.bincount(edge_index[0], minlength=num_nodes).clamp(max=DEGREE_CAP)
    return torch.nn.functional.one_hot(degree, DEGREE_CAP + 1).float()


def degree_names() -> tuple[str, ...]:
    """Returns the names of the columns of `degree_features`."""
    return (*(f"degree={k}" for k in range(DEGREE_CAP)), f"degree>={DEGREE_CAP}")
