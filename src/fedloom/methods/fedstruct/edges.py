"""Edges between clients: what both owners of an edge tell each other (Algorithm 3)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fedloom.core.client import Client
from fedloom.core.message import Message
from fedloom.errors import MessageError
from fedloom.methods.fedstruct.powers import Numbering, PartyAdjacency, matrix_of

_NO_EDGES = {
    "source": torch.zeros(0, dtype=torch.int64),
    "target": torch.zeros(0, dtype=torch.int64),
    "position": torch.zeros(0, dtype=torch.int32),
    "incoming": torch.zeros(0, dtype=torch.bool),
}


def shared_edges(client: Client) -> dict[str, dict[str, Tensor]]:
    """Returns the edges that a client shares with each peer, in an order that both agree on.

    Per peer: the ids of both ends (`source`, `target`), the position of the own end in the own list
    of nodes, and whether the edge leads here (`incoming`). A repeated edge is listed repeatedly,
    because an edge inside a client would also count twice.
    """
    own, remote, owner, direction = client.graph.cross_edges
    shared = {}
    for number in owner.unique().tolist():
        there = owner == number
        here, outside, inward = own[there], remote[there], direction[there] == 1
        inside = client.graph.node_id[here]
        source, target = torch.where(inward, outside, inside), torch.where(inward, inside, outside)
        # Nodes of two clients may have the same id. The direction says which end is whose, as seen
        # from the client that is first by name.
        peer = client.facts.clients[number]
        seen = inward if client.name < peer else ~inward
        order = torch.from_numpy(np.lexsort([seen.numpy(), target.numpy(), source.numpy()]))
        shared[peer] = {
            "source": source[order],
            "target": target[order],
            "position": here[order].int(),
            "incoming": inward[order],
        }
    return shared


def adjacency_of(client: Client, numbering: Numbering, inbox: Message) -> PartyAdjacency:
    """Returns the client's part of A, from its own edges and those that peers confirm.

    Edges to a peer that sent no message are left out. Raises a MessageError if a peer lists other
    edges than the client.

    inbox: {peer: its `shared_edges` with this client}.
    """
    graph, own_edges = client.graph, shared_edges(client)
    incoming, outgoing = {}, {}
    for peer in sorted(inbox):
        here, there = own_edges.get(peer, _NO_EDGES), inbox[peer]
        _require_same_edges(client.name, peer, here, there)
        own, remote = here["position"].numpy(), there["position"].numpy()
        size = numbering.size(peer)
        if len(remote) and (remote.min() < 0 or remote.max() >= size):
            raise MessageError(
                f"client {client.name!r}: peer message from {peer!r}: tensor 'position' holds "
                f"a number outside 0 to {size - 1}"
            )
        inward = here["incoming"].numpy()
        shape = (graph.num_nodes, size)
        incoming[peer] = matrix_of(own[inward], remote[inward], shape)
        outgoing[peer] = matrix_of(remote[~inward], own[~inward], shape[::-1])
    proper = graph.edge_index[0] != graph.edge_index[1]
    source, target = graph.edge_index[:, proper].numpy()
    weight = None if graph.edge_weight is None else graph.edge_weight[proper].numpy()
    inner = matrix_of(target, source, (graph.num_nodes, graph.num_nodes), weight)
    return PartyAdjacency(client.name, numbering, inner, incoming, outgoing)


def _require_same_edges(
    name: str, peer: str, here: Mapping[str, Tensor], there: Mapping[str, Tensor]
) -> None:
    """Raises a MessageError if a peer's list of the shared edges differs from the own list."""
    who = f"client {name!r}: peer message from {peer!r}"
    if len({len(tensor) for tensor in there.values()}) > 1:
        raise MessageError(f"{who}: tensors {', '.join(map(repr, there))} differ in length")
    expected = {"source": here["source"], "target": here["target"], "incoming": ~here["incoming"]}
    differing = [key for key, tensor in expected.items() if not torch.equal(tensor, there[key])]
    if not differing:
        return
    mine = _counted(here["source"], here["target"], here["incoming"])
    theirs = _counted(there["source"], there["target"], ~there["incoming"])
    for only, knows, lacks in ((mine - theirs, name, peer), (theirs - mine, peer, name)):
        for source, target, _ in sorted(only):
            raise MessageError(
                f"cross edge {source} -> {target}: client {knows!r} knows it, client {lacks!r} "
                "does not; both owners have to"
            )
    raise MessageError(f"{who}: tensor {differing[0]!r} lists the shared edges in another order")


def _counted(source: Tensor, target: Tensor, incoming: Tensor) -> Counter[tuple[int, int, bool]]:
    return Counter(zip(source.tolist(), target.tolist(), incoming.tolist(), strict=True))
