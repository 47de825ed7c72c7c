"""Partition statistics: the data of each client, and how unequal the clients are."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.data.federation import Federation
from fedloom.data.graph import Graph
from fedloom.data.neighbours import BLOCK, is_undirected


def count_edges(edge_index: Tensor, undirected: bool) -> int:
    """Returns the number of edges in an edge index [2, stored].

    The two directions of an undirected edge count as one edge. A self-loop counts as one edge.
    """
    source, target = edge_index.numpy()
    loops = sum(
        int(np.count_nonzero(source[k : k + BLOCK] == target[k : k + BLOCK]))
        for k in range(0, len(source), BLOCK)
    )
    return loops + (edge_index.shape[1] - loops) // (2 if undirected else 1)


def partition_statistics(federation: Federation) -> dict[str, Any]:
    """Returns statistics of each client and of all clients, as numbers that JSON can store.

    The result has three keys:

    - clients: A list with, for each client, name, nodes, items, train, val, test, edges_kept,
      edges_cut (cut edges with one end at this client; None if the whole graph is unknown), labels
      (items per class), and
        - in node tasks homophily and homophily_per_class. Homophily of a class is the share of its
          edge ends whose other end has the same label. Only kept edges count; self-loops and nodes
          without a label do not count. It is None if the class has no edge ends.
        - in graph tasks graph_size_per_class, the mean number of nodes of a class's graphs. It is
          None if the class has no graphs.
    - totals: clients, nodes, items, train, val, test, edges_kept, edges_cut (each edge counts once)
      and cut_share, the share of cut edges among all edges.
    - about: The record of the federation.
    """
    whole = federation.whole
    undirected = (
        is_undirected(whole) if whole is not None else all(map(is_undirected, federation.graphs))
    )
    cut = None if whole is None else _edges_cut(federation, whole, undirected)
    clients = [
        {
            "name": name,
            "nodes": graph.num_nodes,
            "items": graph.num_items,
            "train": int(graph.train.sum()),
            "val": int(graph.val.sum()),
            "test": int(graph.test.sum()),
            "edges_kept": count_edges(graph.edge_index, undirected),
            "edges_cut": None if cut is None else cut[k],
            **_by_class(graph),
        }
        for k, (name, graph) in enumerate(zip(federation.names, federation.graphs, strict=True))
    ]
    totals: dict[str, Any] = {"clients": federation.num_clients}
    totals |= {
        key: sum(c[key] for c in clients)
        for key in ("nodes", "items", "train", "val", "test", "edges_kept")
    }
    # Each cut edge was counted at both of its ends.
    totals["edges_cut"] = None if cut is None else sum(cut) // 2
    totals["cut_share"] = (
        None
        if cut is None
        else totals["edges_cut"] / max(totals["edges_kept"] + totals["edges_cut"], 1)
    )
    return {"about": dict(federation.about), "clients": clients, "totals": totals}


def label_counts(federation: Federation) -> dict[str, Any]:
    """Returns the part of `partition_statistics` that a run folder stores, in one pass over edges.

    For each client it contains name, labels, and homophily (graph tasks: graph sizes) per class.
    """
    clients = [
        {"name": name, **_by_class(graph)}
        for name, graph in zip(federation.names, federation.graphs, strict=True)
    ]
    return {"task": federation.task, "clients": clients}


def _edges_cut(federation: Federation, whole: Graph, undirected: bool) -> list[int]:
    """Returns, for each client, the number of cut edges with one end at the client."""
    owner = torch.full((int(whole.node_id.max()) + 1,), -1)
    for k, graph in enumerate(federation.graphs):
        owner[graph.node_id] = k
    ends = owner[whole.node_id[whole.edge_index]]
    touched = torch.bincount(
        ends[:, ends[0] != ends[1]].flatten(), minlength=federation.num_clients
    )
    return (touched // (2 if undirected else 1)).tolist()


def _by_class(graph: Graph) -> dict[str, Any]:
    labels = torch.bincount(graph.y[graph.y >= 0], minlength=graph.num_classes).tolist()
    return {
        "labels": labels,
        **(_homophily(graph) if graph.batch is None else _graph_sizes(graph, graph.batch)),
    }


def _homophily(graph: Graph) -> dict[str, Any]:
    source, target = graph.edge_index
    ends = graph.y[graph.edge_index[:, source != target]]
    ends = ends[:, (ends >= 0).all(0)]
    all_ends = torch.bincount(ends.flatten(), minlength=graph.num_classes)
    alike = torch.bincount(ends[:, ends[0] == ends[1]].flatten(), minlength=graph.num_classes)
    overall = _ratios(alike.sum()[None], all_ends.sum()[None])
    return {"homophily": overall[0], "homophily_per_class": _ratios(alike, all_ends)}


def _graph_sizes(graph: Graph, batch: Tensor) -> dict[str, Any]:
    size, known = torch.bincount(batch, minlength=graph.num_items), graph.y >= 0
    y = graph.y[known]
    nodes = torch.zeros(graph.num_classes, dtype=torch.int64).index_add_(0, y, size[known])
    return {"graph_size_per_class": _ratios(nodes, torch.bincount(y, minlength=graph.num_classes))}


def _ratios(above: Tensor, below: Tensor) -> list[float | None]:
    return [a / b if b else None for a, b in zip(above.tolist(), below.tolist(), strict=True)]
