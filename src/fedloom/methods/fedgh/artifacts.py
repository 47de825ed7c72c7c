"""Pictures of some clients' graphs: as they were, the pseudo-graph sent, and the edges added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import breadth_first_order
from torch import Tensor

from fedloom.core.client import Client
from fedloom.core.message import Message
from fedloom.nn.nearest import pairs

# How many clients' graphs are shown, and the most nodes and links of each graph.
SHOWN_CLIENTS, SHOWN_NODES, SHOWN_LINKS = 4, 300, 4000


@dataclass
class Shown:
    """What a picture of a client shows.

    Attributes:
        nodes: Some of the client's nodes.
        links: {"original", "pseudo", "added": pairs of positions in `nodes`}.
    """

    nodes: Tensor
    links: dict[str, Tensor]


def remember_links(client: Client, **links: Tensor) -> None:
    """Keeps pairs of nodes of the client's current graph for pictures. Few clients do so.

    Call it before the graph is replaced: the first call also keeps the graph's own edges.
    """
    if client.name not in client.facts.clients[:SHOWN_CLIENTS]:
        return
    graph, n = client.full_graph, client.full_graph.num_nodes
    if "fedgh" not in client.memory:
        original = pairs(graph.edge_index, n)
        nodes = neighbourhood(original, n, SHOWN_NODES)
        client.memory["fedgh"] = Shown(nodes, {"original": between(original, nodes, n)})
    shown: Shown = client.memory["fedgh"]
    shown.links |= {name: between(some, shown.nodes, n) for name, some in links.items()}


def graph_artifacts(client: Client) -> Message:
    """Returns the artifact "graphs" of a client, or nothing if it is not one of the shown clients.

    The labels are those of all shown nodes; they colour the picture.
    """
    shown: Shown | None = client.memory.get("fedgh")
    if shown is None:
        return {}
    nodes = shown.nodes[: room(list(shown.links.values()), len(shown.nodes), SHOWN_LINKS)]
    links: Message = {
        name: ends[:, ends.amax(0) < len(nodes)] for name, ends in shown.links.items()
    }
    return {
        "graphs": {
            "nodes": torch.tensor(client.full_graph.num_nodes),
            "labels": client.full_graph.y[nodes],
            "links": links,
        }
    }


def neighbourhood(links: Tensor, n: int, most: int) -> Tensor:
    """Returns at most `most` of n nodes, in breadth-first order from the nodes with most links.

    So the first k of them are mostly connected, for every k.
    """
    ends = torch.cat([links, links.flip(0)], 1).numpy()
    adjacency = csr_matrix((np.ones(ends.shape[1], np.int8), (ends[0], ends[1])), shape=(n, n))
    found, seen = [np.zeros(0, np.int64)], np.zeros(n, bool)
    for start in np.argsort(-np.diff(adjacency.indptr), kind="stable"):
        if seen.sum() >= most:
            break
        if not seen[start]:
            found.append(
                breadth_first_order(adjacency, start, directed=False, return_predecessors=False)
            )
            seen[found[-1]] = True
    return torch.from_numpy(np.concatenate(found)[:most].astype(np.int64))


def between(links: Tensor, nodes: Tensor, n: int) -> Tensor:
    """Returns the links [2, any] of n nodes that join two of `nodes`, as positions in `nodes`."""
    place = torch.full((n,), -1, dtype=torch.int32)
    place[nodes] = torch.arange(len(nodes), dtype=torch.int32)
    ends = place[links]
    return ends[:, (ends >= 0).all(0)]


def room(links: Sequence[Tensor], nodes: int, most: int) -> int:
    """Returns how many of the first `nodes` nodes can be shown.

    In each of several graphs, there are then at most `most` links among them.
    """
    while any(int((ends.amax(0) < nodes).sum()) > most for ends in links):
        nodes = nodes * 3 // 4
    return nodes
