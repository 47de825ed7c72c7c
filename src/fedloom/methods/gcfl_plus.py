"""GCFL+: clients share extractors within clusters, and a cluster with diverging members is split.

Xie, Ma, Xiong, Yang: "Federated Graph Classification over Non-IID Graphs", NeurIPS 2021.

What travels, per client:
    once     up    size      number of local items n_k
    a round  down  model     θ_c, the extractor of the client's cluster
             up    model     θ_k, the extractor after E local epochs; the head never travels

    Δ_k = θ_k − θ_c                                                                `updates`
    a cluster is split if  ‖mean_k Δ_k‖ < ε₁  and  max_k ‖Δ_k‖ > ε₂                `diverges`
        and it has more than two members, and the first rounds are over            `split`
    s_k: the last L norms ‖Δ_k‖,   D_kl = DTW(s_k, s_l)                            `dtw`
    the two parts: Stoer and Wagner's minimum cut with edge weights max D − D      `minimum_cut`
    θ_c ← Σ_{k in c} (n_k / Σ n) θ_k                                               `run`

Members of a cluster that is split start their sequences anew. The average of that round is already
the new clusters'. A cluster is split only when every member has a complete sequence. Under partial
participation the norms are those of the members that took part.

Departures. The sequences hold norms of updates, which the server can compute. The authors' code has
this form, and another one in which clients also send the norm of their last gradient. It forgets
the sequences of all clients at a split; here those of the cluster are forgotten. Clients are scored
with their own model after local training; there, with the cluster's extractor.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import ClassVar

import networkx as nx
import torch
from torch import Tensor

from fedloom.core.client import Client
from fedloom.core.message import Message, tree_map
from fedloom.core.phase import phase
from fedloom.core.replies import Replies
from fedloom.core.server import Server
from fedloom.core.settings import setting
from fedloom.methods._shared.local_training import LocalTraining
from fedloom.nn.weights import extractor_weights, load_weights, weights


def dtw(one: Tensor, other: Tensor) -> float:
    """Returns the dynamic time warping distance of two sequences.

    It is the root of the least sum of squared differences over all monotone alignments.
    """
    inf = float("inf")
    previous = [0.0] + [inf] * len(other)
    for a in one.tolist():
        current = [inf]
        for j, b in enumerate(other.tolist()):
            current.append((a - b) ** 2 + min(previous[j], previous[j + 1], current[j]))
        previous = current
    return previous[-1] ** 0.5


def minimum_cut(sequences: Mapping[str, Tensor]) -> tuple[set[str], set[str]]:
    """Returns the two sides of the minimum cut. The first side has the first client by name."""
    distance = {
        pair: dtw(sequences[pair[0]], sequences[pair[1]])
        for pair in combinations(sorted(sequences), 2)
    }
    graph = nx.Graph()
    graph.add_weighted_edges_from(
        (a, b, max(distance.values()) - d) for (a, b), d in distance.items()
    )
    _, sides = nx.stoer_wagner(graph)
    first, second = sorted(map(set, sides), key=min)
    return first, second


@dataclass(frozen=True)
class GCFLPlus(LocalTraining):
    """FedAvg of the extractor within clusters that form during training."""

    eps1: float = setting(
        0.05,
        "ε₁, a cluster is split only if its mean update is shorter",
        at_least=0,
        tune="0.01..0.1",
    )
    eps2: float = setting(0.1, "ε₂, and its longest update is longer", at_least=0, tune="0.05..0.5")
    after: int = setting(20, "rounds before the first split", at_least=0)
    sequence: int = setting(
        5, "L, length of a client's sequence of norms", at_least=1, tune="5..20"
    )
    standardise: bool = setting(
        False, "divide each sequence by its standard deviation, to compare trends"
    )

    tasks: ClassVar[tuple[str, ...]] = ("graph",)
    one_model: ClassVar[bool] = True
    needs_of_model: ClassVar[str] = "embeddings"

    @phase(model="~model")
    def train(self, client: Client, model: Message) -> Message:
        """Trains for E local epochs from the cluster's extractor and the client's own head."""
        local_model = client.state["model"]
        load_weights(local_model, weights(local_model) | model)
        self.descend(client, local_model, model)
        return {"model": extractor_weights(weights(local_model))}

    # ---- at the server ----
    def updates(self, server: Server, replies: Replies) -> dict[str, Tensor]:
        """Returns Δ_k of every client that answered, as one vector, and records its norm."""
        state, updates = server.state, {}
        for client, reply in replies.items():
            change = tree_map(
                torch.sub, reply["model"], state["extractors"][self.cluster_of(server, client)]
            )
            updates[client] = torch.cat([t.flatten() for t in change.values()])
            norms = state["norms"].get(client, torch.zeros(0))
            norms = torch.cat([norms, updates[client].norm().view(1)])
            state["norms"][client] = norms[-self.sequence :]
        return updates

    def cluster_of(self, server: Server, client: str) -> str:
        """Returns the name of a client's cluster."""
        return str(int(server.state["cluster"][server.clients.index(client)]))

    def diverges(self, updates: list[Tensor]) -> bool:
        """Returns whether a cluster's mean update is small while a member's update is large."""
        delta = torch.stack(updates)
        return bool(delta.mean(0).norm() < self.eps1) and bool(delta.norm(dim=1).max() > self.eps2)

    def split(self, server: Server, updates: Mapping[str, Tensor]) -> None:
        """Splits the clusters whose members diverge.

        The second part is a new cluster that starts from the same extractor.
        """
        state = server.state
        for name in list(state["extractors"]):
            members = [c for c in server.clients if self.cluster_of(server, c) == name]
            here = [updates[c] for c in members if c in updates]
            complete = all(len(state["norms"].get(c, ())) == self.sequence for c in members)
            if len(members) > 2 and here and complete and self.diverges(here):
                sequences = {c: self.standardised(state["norms"].pop(c)) for c in members}
                _, leaving = minimum_cut(sequences)
                fresh = len(state["extractors"])
                state["extractors"][str(fresh)] = state["extractors"][name]
                state["cluster"][[server.clients.index(c) for c in sorted(leaving)]] = fresh

    def standardised(self, sequence: Tensor) -> Tensor:
        """Returns the sequence, divided by its standard deviation if `standardise` is set.

        A constant sequence is not divided.
        """
        deviation = sequence.std(correction=0)
        return sequence / deviation if self.standardise and deviation > 0 else sequence

    def run(self, server: Server) -> None:
        """Clients train; the server splits clusters and averages within them."""
        server.ask(self.setup)
        state, facts = server.state, server.facts
        state["extractors"] = {
            "0": extractor_weights(weights(facts.build(facts.models[0], "server")))
        }
        state["cluster"] = torch.zeros(len(server.clients), dtype=torch.int64)
        state["norms"] = {}
        for number in server.rounds(self.rounds):
            size = server.weights("size", server.participants)
            replies = server.ask(
                self.train,
                each={c: {"model": state["extractors"][self.cluster_of(server, c)]} for c in size},
            )
            updates = self.updates(server, replies)
            if number > self.after:
                self.split(server, updates)
            for name in state["extractors"]:
                here = replies.replaced(
                    {c: reply for c, reply in replies.items() if self.cluster_of(server, c) == name}
                )
                if here:
                    state["extractors"][name] = here.mean(size)["model"]
            server.evaluate()
        server.notes["clusters"] = len(state["extractors"])
