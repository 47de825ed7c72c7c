"""Graphs before and after refinement: pseudo-graphs as they arrive, and Ã, X̃ (Eq. 13-15)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedloom.core.message import Message
from fedloom.data.graph import Graph
from fedloom.errors import ConfigError, MessageError
from fedloom.nn.nearest import above, nearest_edges, pairs

MOST_EDGES = 100  # per node: the most that similarity above τ may add on average
NO_EDGES = torch.zeros(2, 0, dtype=torch.int64)


def bare(x: Tensor, edges: Tensor) -> Graph:
    """Returns a graph without labels. edges: pairs i < j."""
    return Graph(
        x=x,
        edge_index=torch.cat([edges, edges.flip(0)], 1),
        y=torch.full((len(x),), -1),
        num_classes=1,
    )


def received_graph(reply: Message, num_features: int, client: str) -> Graph:
    """Returns the pseudo-graph that a client sent.

    Raises a MessageError if its edges or columns are out of range, or if it has no rows.
    """
    who, edges = f"client {client!r}", reply["edges"].long()
    if "features" in reply:
        x = reply["features"].float()
    else:
        columns = reply["columns"].long()
        if columns.numel() and (columns.min() < 0 or columns.max() >= num_features):
            raise MessageError(
                f"{who}: tensor 'columns' names one that is not among 0 to {num_features - 1}"
            )
        if len(columns) != len(reply["values"]):
            raise MessageError(
                f"{who}: tensor 'columns' has {len(columns)} rows, 'values' {len(reply['values'])}"
            )
        x = torch.zeros(len(columns), num_features).scatter_(1, columns, reply["values"].float())
    if len(x) == 0:
        name = "features" if "features" in reply else "values"
        raise MessageError(f"{who}: tensor {name!r} has no rows")
    if edges.numel() and (edges.min() < 0 or edges.max() >= len(x)):
        raise MessageError(
            f"{who}: tensor 'edges' names a node that is not among 0 to {len(x) - 1}"
        )
    return bare(x, edges)


def directions(H: Tensor) -> Tensor:
    """Returns the rows of H minus their mean, scaled to length 1; 0 if only rounding is left.

    What all nodes have in common distinguishes none of them.
    """
    apart = H - H.mean(0)
    length = apart.norm(dim=1, keepdim=True)
    return torch.where(length > 1e-5 * H.norm(dim=1).max(), apart / length.clamp(min=1e-30), 0.0)


def refined(graph: Graph, H: Tensor, scale: float, count: int, threshold: float) -> Graph:
    """Returns the graph with edges between similar nodes, and with H as further features.

    Args:
        graph: The graph.
        H: The embeddings, [n, d̃].
        scale: The length of a row of the new features, in mean row lengths of the graph's own
            features (or 1, if these are all 0). 0: H is not appended.
        count: Each node is linked to this many most similar nodes.
        threshold: Nodes with a cosine above it are linked too.
    """
    n, unit = graph.num_nodes, directions(H)
    some = (unit != 0).any(1).nonzero().flatten()  # a row of zeros is similar to no node
    near = [nearest_edges(unit[some], count) if count else NO_EDGES]
    if threshold < 1:
        try:
            near.append(above(unit[some], threshold, MOST_EDGES * n))
        except ConfigError as error:
            raise ConfigError(f"method.add_above: {error}") from error
    found = pairs(some[torch.cat(near, 1)], n)
    old = pairs(graph.edge_index, n)
    found = found[:, ~torch.isin(found[0] * n + found[1], old[0] * n + old[1])]
    weight = graph.edge_weight
    if weight is not None:
        weight = torch.cat([weight, torch.ones(2 * found.shape[1])])
    edges = torch.cat([graph.edge_index, found, found.flip(0)], 1)
    length = graph.x.norm(dim=1).mean()
    x = torch.cat([graph.x, scale * length.where(length > 0, 1.0) * unit], 1) if scale else graph.x
    return replace(graph, x=x, edge_index=edges, edge_weight=weight)
