"""Cut edges: sums over the neighbours that the partition cut off, from client to client."""

from __future__ import annotations

import torch
from torch import Tensor

from fedloom.core.client import Client
from fedloom.core.message import Message
from fedloom.data.graph import Graph
from fedloom.data.sparse import Sparse
from fedloom.errors import DataError, MessageError

OUT, IN = 0, 1  # directions of cross edges


def degree(graph: Graph) -> Tensor:
    """Returns d̃ [nodes]: the edges into each node over the whole graph, plus its self-loop.

    This loop replaces the self-loops of the data.
    """
    source, target = graph.edge_index
    own, _, _, direction = graph.cross_edges
    targets = torch.cat([target[source != target], own[direction == IN]])
    return 1 + torch.bincount(targets, minlength=graph.num_nodes)


def scale(degree: Tensor) -> Tensor:
    """Returns d̃^-1/2."""
    return degree.float().rsqrt()


def cross_edges(client: Client, other: str, direction: int) -> tuple[Tensor, Tensor]:
    """Returns the cross edges between two clients in one direction.

    These are the own endpoints (local numbers) and the other client's endpoints (node_id).
    """
    own, remote, owner, of_edge = client.graph.cross_edges
    chosen = (owner == client.facts.clients.index(other)) & (of_edge == direction)
    return own[chosen], remote[chosen]


def require_nodes(message: Message, known: Tensor, writer: str) -> None:
    """Raises a MessageError unless a peer message has exactly one row for each expected node.

    Args:
        message: The peer message.
        known: The nodes [m] that the reader's cross edges name.
        writer: The client that wrote it, for the error.
    """
    nodes = message["nodes"]
    for name, tensor in message.items():
        if len(tensor) != len(nodes):
            raise MessageError(
                f"{writer}: tensor {name!r} has {len(tensor)} rows for {len(nodes)} nodes"
            )
    if unknown := nodes[~torch.isin(nodes, known)].tolist():
        raise MessageError(
            f"{writer}: tensor 'nodes' names {unknown[0]}, but the reader knows no such cross edge"
        )
    if absent := known[~torch.isin(known, nodes)].tolist():
        raise MessageError(
            f"{writer}: tensor 'nodes' lacks {absent[0]}: the writer does not know a cross edge "
            "that the reader knows"
        )
    if not torch.equal(nodes, known):
        raise MessageError(f"{writer}: tensor 'nodes' must be ascending, each node once")


def written_sums(client: Client, H: Tensor, method: str) -> Message:
    """Returns, for every other client, Σ_u h_u d̃_u^-1/2 of each of its nodes with edges from here.

    It also has the number of these edges. A client without such nodes gets an empty message.
    Otherwise it could not distinguish an absent client from one that does not know of an edge.

    Args:
        client: The client that writes.
        H: A row for each of its nodes, [nodes, width].
        method: The method's name, for the error.
    """
    graph = client.graph
    if graph.edge_weight is not None:
        raise DataError(
            f"graph {graph.name!r}: edge_weight: cross edges have no weights, "
            f"so {method} can take none"
        )
    scaled, written = scale(degree(graph)), {}
    for receiver in client.facts.clients:
        source, target = cross_edges(client, receiver, OUT)
        if receiver != client.name:
            nodes, row, edges = target.unique(return_inverse=True, return_counts=True)
            add = Sparse.from_edges(row, source, scaled[source], (len(nodes), graph.num_nodes))
            written[receiver] = {"nodes": nodes, "edges": edges, "sums": add @ H}
    return written


def own_adjacency(graph: Graph) -> Sparse:
    """Returns the block of S for the client's own nodes, S = D̃^-1/2 (A+I) D̃^-1/2 of the whole."""
    n, scaled = graph.num_nodes, scale(degree(graph))
    source, target = graph.edge_index[:, graph.edge_index[0] != graph.edge_index[1]]
    loop = torch.arange(n)
    source, target = torch.cat([source, loop]), torch.cat([target, loop])
    return Sparse.from_edges(target, source, scaled[target] * scaled[source], (n, n))


def next_hop(client: Client, S: Sparse, H: Tensor, inbox: Message | None) -> Tensor:
    """Returns S H of the whole graph at the client's own nodes, [nodes, width].

    If a client did not write, the sums lack its nodes; the degrees still count them.

    Args:
        client: The client that reads.
        S: Its `own_adjacency`.
        H: A row for each of its nodes.
        inbox: The `written_sums` of other clients, {sender: message}.
    """
    graph, scaled = client.graph, scale(degree(client.graph))
    following = S @ H
    for sender, message in (inbox or {}).items():
        writer = f"client {sender!r} in 'write_sums'"
        own, _ = cross_edges(client, sender, IN)
        nodes, row, edges = graph.node_id[own].unique(return_inverse=True, return_counts=True)
        require_nodes(message, nodes, writer)
        if message["sums"].shape[1] != H.shape[1]:
            raise MessageError(
                f"{writer}: tensor 'sums' has {message['sums'].shape[1]} columns, "
                f"expected {H.shape[1]}"
            )
        for node, counted, known in zip(
            nodes.tolist(), message["edges"].tolist(), edges.tolist(), strict=True
        ):
            if counted != known:
                raise MessageError(
                    f"{writer}: tensor 'edges' counts {counted} cross edges to {node}, "
                    f"the reader knows {known}"
                )
        target = torch.empty_like(nodes).scatter_(0, row, own)
        following.index_add_(0, target, scaled[target, None] * message["sums"])
    return following
