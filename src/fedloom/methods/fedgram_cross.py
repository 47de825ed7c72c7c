"""FedGram over cut edges: clients propagate features over the whole graph, then sum statistics.

The method is FedGram. Both owners of a cut edge know it, as in FedGCN (Yao, Jin, Ravi, Joe-Wong,
NeurIPS 2023). Before the statistics, clients exchange sums over the neighbours that the partition
cut off, once per hop. F is then that of the whole, uncut graph, and W is central ridge regression
(`_shared.cut_edges`).

What travels, per client:
    L times, to every client, as peer messages
          nodes, edges, sums   Σ_u (H_l)_u / √d̃_u over its nodes u with an edge to that client's
                               node v, for every such v, at most m numbers each
    then  as in FedGram

    d̃_v = 1 + edges into v, cut edges among them                                `cut_edges.degree`
    (H_{l+1})_v = d̃_v^-1/2 Σ_{u → v, u = v} (H_l)_u d̃_u^-1/2                    `write_sums`,
                                                                                `read_sums`

Columns with the labels of neighbours use the client's own edges: labels do not travel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.core.message import Message
from fedloom.core.phase import peer_messages, phase, runs_once
from fedloom.core.server import Server
from fedloom.core.settings import setting
from fedloom.data.graph import Graph
from fedloom.errors import ConfigError
from fedloom.methods._shared.cut_edges import next_hop, own_adjacency, written_sums
from fedloom.methods.fedgram.features import signs, start
from fedloom.methods.fedgram.method import SIDE, FedGram


@dataclass(frozen=True)
class FedGramCross(FedGram):
    """FedGram on features that are propagated over cut edges, too."""

    hops: str = setting(
        "2,4", "L, the numbers of hops that are summed; of several, the best on validation items"
    )

    uses_cross_edges: ClassVar[bool] = True
    transductive: ClassVar[bool] = True
    keeps_logits: ClassVar[bool] = True  # they depend on the neighbours at other clients
    tasks: ClassVar[tuple[str, ...]] = ("node",)
    discloses_to_server: ClassVar[str] = (
        f"{FedGram.discloses_to_server}; which nodes have cut edges and, unless the run is secure, "
        "all peer messages"
    )
    discloses_to_peers: ClassVar[str] = (
        "to the owner of a cut edge's target, for every hop: the scaled sum of the propagated "
        "features of the target's neighbours at the source's owner (of a single neighbour: its own "
        "features, up to a factor)"
    )

    def check(self, facts: Facts) -> None:
        """Checks that every map is a number of hops."""
        super().check(facts)
        if SIDE in self.maps:
            raise ConfigError(
                f"method.hops is {self.hops!r}: fedgram-cross exchanges sums over hops; leave out "
                f"{SIDE!r}"
            )

    @peer_messages(read_by="read_sums")
    @phase(nodes="int64[n]", edges="int64[n]", sums="float32[n,n]")
    def write_sums(self, client: Client) -> Message:
        """Writes to every client, for each of its nodes with edges from here, Σ_u h_u d̃_u^-1/2."""
        width = self.full(client.facts)
        first = [start(client.graph, width, client.facts.seed)]
        return written_sums(client, client.memory.setdefault("hops", first)[-1], "fedgram-cross")

    @runs_once
    @phase()
    def read_sums(self, client: Client, inbox: Message | None = None) -> Message:
        """Computes the next hop at the client's own nodes."""
        known = client.memory["hops"]
        known.append(next_hop(client, own_adjacency(client.graph), known[-1], inbox))
        return {}

    def smoothed(self, client: Client, graph: Graph, count: int, width: int) -> Tensor:
        """Returns FedGram's features over the whole graph, or over a new graph's own edges."""
        if "hops" not in client.memory:
            return super().smoothed(client, graph, count, width)
        total = torch.stack(client.memory["hops"][: count + 1]).sum(0)
        if width < total.shape[1]:
            total = total @ signs(client.facts.seed, total.shape[1], width)
        return F.normalize(total)

    def run(self, server: Server) -> None:
        """One exchange per hop, then FedGram."""
        for _ in range(max(map(int, self.maps))):
            server.relay(self.write_sums)
        super().run(server)
