"""FedGCN: clients first exchange sums over the neighbours that the partition cut off, then FedAvg.

Yao, Jin, Ravi, Joe-Wong: "FedGCN: Convergence-Communication Tradeoffs in Federated Training of
Graph Convolutional Networks", NeurIPS 2023, Algorithm 1.

What travels, per client:
    once, to every client, as peer messages
          nodes, edges, sums        Σ_u x_u / √d̃_u over its nodes u with an edge to that client's
                                    node v, for every such v
          nodes, degree, features   with two hops: (S X)_u and d̃_u of every such u
    once, and every round           as in FedAvg

    S = D̃^-1/2 (A+I) D̃^-1/2 of the whole graph
    d̃_v = 1 + edges into v, cross edges among them                        `degree`
    (S X)_v = d̃_v^-1/2 Σ_{u → v, u = v} x_u d̃_u^-1/2                      `write_sums`, `read_sums`
        the sums over other clients' u are peer messages
    H = ReLU(S X W_1 + b_1) at the client's own nodes and, with two       `write_features`,
        hops, at the sources of its incoming cross edges                  `read_features`
    logits = S H W_2 + b_2 at its own nodes, over the nodes where H is    `logits`
        known

With two hops this is exactly the central GCN, for any weights. With one hop the first layer is
exact, and the second lacks the cross edges.

Departures. S is the paper's A with the GCN's normalisation written out: a sender scales by its
nodes' degrees, the receiver by its own. A client gets a sum from every client, not the server's
total over all of them, and encrypted peer messages (`--secure`) replace homomorphic encryption. So
the server learns nothing about the sums, and the receiver learns a little more. The paper's server
also adds up the second hop. Here the node's owner does, which has all of its terms.
`aggregate = "gradients"` trains as FedSGD does; FedStruct's authors run it like this.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from fedloom.core.client import Client
from fedloom.core.message import Message
from fedloom.core.phase import peer_messages, phase, runs_once
from fedloom.core.server import Server
from fedloom.core.settings import setting
from fedloom.data.graph import Graph
from fedloom.data.sparse import Sparse
from fedloom.errors import ConfigError, MessageError
from fedloom.methods._shared.cut_edges import (
    IN,
    OUT,
    cross_edges,
    degree,
    next_hop,
    own_adjacency,
    require_nodes,
    scale,
    written_sums,
)
from fedloom.methods.fedavg import FedAvg
from fedloom.methods.fedsgd import FedSGD
from fedloom.nn.build import parse_spec
from fedloom.nn.layers import dropout
from fedloom.nn.model import Model
from fedloom.nn.training import step
from fedloom.nn.weights import load_weights, weights


def known_features(graph: Graph, features: Tensor) -> Graph:
    """Returns S X [nodes, d], where it is known, as the features of a graph without edges.

    The graph's `project` is fast with sparse features.
    """
    return Graph(
        x=features,
        edge_index=torch.zeros(2, 0, dtype=torch.int64),
        y=torch.full((len(features),), -1),
        num_classes=graph.num_classes,
    )


@dataclass(frozen=True)
class FedGCN(FedAvg, FedSGD):
    """FedAvg of GCNs that use the cross edges."""

    aggregate: str = setting(
        "weights",
        "what rounds share: weights after E epochs, or gradients of one step",
        choices=("weights", "gradients"),
    )
    hops: int = setting(
        2, "1 = the GCN's first layer is exact, 2 = both are", at_least=1, at_most=2, tune="1,2"
    )

    uses_cross_edges: ClassVar[bool] = True
    transductive: ClassVar[bool] = True
    keeps_logits: ClassVar[bool] = True  # they depend on the neighbours at other clients
    tasks: ClassVar[tuple[str, ...]] = ("node",)
    discloses_to_server: ClassVar[str] = (
        "which nodes have cross edges and, unless the run is secure, all peer messages"
    )
    discloses_to_peers: ClassVar[str] = (
        "to the owner of a cross edge's target: the scaled sum of the features of the target's "
        "neighbours at the source's owner (of a single neighbour: its features, up to a factor); "
        "with two hops also the source's degree and the scaled sum of its and all its neighbours' "
        "features"
    )
    needs_of_model: ClassVar[str] = "architecture"

    # ---- before training ----
    @peer_messages(read_by="read_sums")
    @phase(nodes="int64[n]", edges="int64[n]", sums="float32[n,d]")
    def write_sums(self, client: Client) -> Message:
        """Writes to every client, for each of its nodes with edges from here, Σ_u x_u d̃_u^-1/2.

        It also writes the number of these edges. A client without such nodes gets an empty message.
        Otherwise it could not distinguish an absent client from one that does not know of an edge.
        """
        return written_sums(client, client.graph.x, "fedgcn")

    @phase()
    def read_sums(self, client: Client, inbox: Message | None = None) -> Message:
        """Computes S X at the client's own nodes.

        If a client did not write, the sums lack its nodes; the degrees still count them.
        """
        graph = client.graph
        client.memory["S"] = own_adjacency(graph)
        features = next_hop(client, client.memory["S"], graph.x, inbox)
        client.memory["known"] = known_features(graph, features)
        return {}

    @peer_messages(read_by="read_features")
    @phase(nodes="int64[n]", degree="int64[n]", features="float32[n,d]")
    def write_features(self, client: Client) -> Message:
        """Writes to every client (S X)_u and d̃_u of the nodes u with edges to it."""
        graph, written = client.graph, {}
        for receiver in client.facts.clients:
            own, _ = cross_edges(client, receiver, OUT)
            if len(own):
                nodes, row = graph.node_id[own].unique(return_inverse=True)
                source = torch.empty_like(nodes).scatter_(0, row, own)
                written[receiver] = {
                    "nodes": nodes,
                    "degree": degree(graph)[source],
                    "features": client.memory["known"].x[source],
                }
        return written

    @runs_once
    @phase()
    def read_features(self, client: Client, inbox: Message | None = None) -> Message:
        """Adds S X at the sources of incoming cross edges, and the columns of S for them.

        There are no columns for a client that did not write.
        """
        S, scaled = client.memory["S"], scale(degree(client.graph))
        features, n = [client.memory["known"].x], client.graph.num_nodes
        source, target, values = [S.indices.long()], [S.rows], [S.values]
        for sender, message in (inbox or {}).items():
            writer = f"client {sender!r} in 'write_features'"
            own, remote = cross_edges(client, sender, IN)
            nodes, row = remote.unique(return_inverse=True)
            require_nodes(message, nodes, writer)
            if (message["degree"] < 1).any():
                smallest = int(message["degree"].min())
                raise MessageError(
                    f"{writer}: tensor 'degree' holds {smallest}, must be at least 1"
                )
            source.append(n + row)
            target.append(own)
            values.append(scaled[own] * scale(message["degree"])[row])
            features.append(message["features"])
            n += len(nodes)
        client.memory["S"] = Sparse.from_edges(
            torch.cat(target), torch.cat(source), torch.cat(values), (S.shape[0], n)
        )
        client.memory["known"] = known_features(client.graph, torch.cat(features))
        return {}

    # ---- training ----
    def logits(
        self, client: Client, model: Mapping[str, Tensor], rng: Generator | None = None
    ) -> Tensor:
        """Returns the output of the two layers, [own nodes, C].

        model: the weights of a GCN, by name.
        """
        H = F.relu(
            client.memory["known"].project(model["layers.0.weight"]) + model["layers.0.bias"]
        )
        H = dropout(H, client.facts.dropout, rng)
        return client.memory["S"] @ (H @ model["classifier.weight"]) + model["classifier.bias"]

    def objective(
        self, client: Client, batch: Graph, model: Model, global_weights: Message
    ) -> Tensor:
        """Returns CE over the client's training nodes."""
        logits = self.logits(client, dict(model.named_parameters()), client.rng("dropout"))
        return client.loss(logits, batch)

    def total_loss(self, client: Client, model: Model) -> Tensor:
        """Returns the cross-entropy summed over the client's training nodes."""
        logits = self.logits(client, dict(model.named_parameters()), client.rng("dropout"))
        return client.loss(logits, client.graph, reduction="sum")

    @runs_once
    @phase()
    def tune(self, client: Client, epoch: Tensor, model: Message | None = None) -> Message:
        """As in FedAvg, with the logits above."""
        local_model = client.state["model"]
        if model is not None:
            load_weights(local_model, model)
        for batch in client.batches(self.batch_size):
            step(client.state["optimizer"], self.objective(client, batch, local_model, {}))
        return {}

    def predict(self, client: Client, model: Message | None) -> Tensor:
        """Returns logits of the client's nodes, without dropout.

        A new graph has no cross edges, so that its own edges are all that the GCN needs.
        """
        if "known" not in client.memory:
            return super().predict(client, model)
        return self.logits(client, weights(client.state["model"]) if model is None else model)

    def run(self, server: Server) -> None:
        """Algorithm 1: one exchange per hop, then FedAvg."""
        for spec in server.facts.models:
            parts = parse_spec(spec)
            if (parts.name, parts.layers, parts.options) != ("gcn", 2, frozenset()):
                raise ConfigError(
                    f"model {spec!r}: fedgcn works with two-layer GCNs, 'gcn-2xWIDTH' without "
                    "options, e.g. 'gcn-2x64'"
                )
        server.relay(self.write_sums)
        if self.hops == 2:
            server.relay(self.write_features)
        (FedAvg if self.aggregate == "weights" else FedSGD).run(self, server)
