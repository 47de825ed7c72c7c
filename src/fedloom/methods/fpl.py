"""FPL: clients also share class means, which the server clusters into prototypes.

Huang, Ye, Shi, Li, Du: "Rethinking Federated Learning with Domain Shift: A Prototype View",
CVPR 2023, Algorithm 1.

What travels, per client (C classes, p the embedding's width):
    once     up    size                    number of local items n_k
    a round  down  model                   θ
                   clusters, of_class      cluster prototypes, and the class of each (nothing in the
                                           first round)
             up    model                   θ_k
                   prototypes, present     P_k[c] of the client's classes, and which these are

    P_k[c] = mean of z_i over the client's training items of class c                `train`
    {Q} of class c = the means of FINCH's clusters of {P_k[c]}_k                    `cluster_means`
    U[c] = the mean of {Q} of class c                                               `objective`
    L_1 = mean_i −log Σ_{Q of y_i} e^{cos(z_i, Q)/τ} / Σ_{all Q} e^{cos(z_i, Q)/τ}  `contrast`
    L_2 = mean_i ‖z_i − U[y_i]‖² / p                                                `objective`
    min CE + λ_1 L_1 + λ_2 L_2,   in the first round CE alone                       `objective`
    θ ← Σ_k (n_k / Σ n) θ_k                                                         `run`

z is the embedding that the model's head reads. A class that no client sent in the last round is in
neither term. With a single class L_1 is 0.

Departures. The paper sends all class means (floor = 1). λ_1 and λ_2 (1 in the paper) are settings.
P_k is of the trained model without dropout (the authors' code averages the embeddings of the last
epoch's steps). Clusters are FINCH's first partition; the authors' code continues to merge while
more than one cluster is left.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.client import Client
from fedloom.core.message import Message
from fedloom.core.phase import phase
from fedloom.core.server import Server
from fedloom.core.settings import fewest_items, setting
from fedloom.data.graph import Graph
from fedloom.methods._shared.prototypes import class_means, clusters, pack_table, table_of
from fedloom.methods.fedavg import FedAvg
from fedloom.nn.model import Model
from fedloom.nn.training import outputs
from fedloom.nn.weights import load_weights, weights


@dataclass(frozen=True)
class FPL(FedAvg):
    """FedAvg towards cluster prototypes."""

    contrastive: float = setting(
        1.0,
        "λ_1, weight of the contrast between classes' cluster prototypes",
        at_least=0,
        tune="0.1..10",
    )
    unbiased: float = setting(
        1.0,
        "λ_2, weight of the distance to the mean of the class's cluster prototypes",
        at_least=0,
        tune="0.1..10",
    )
    tau: float = setting(0.02, "τ, temperature of the contrast", above=0, tune="0.01..0.1")
    floor: int = fewest_items("fewest items that a class mean is computed from; others stay")

    discloses_to_peers: ClassVar[str] = (
        "cluster prototypes, means over few clients; of a single client if no other has the class"
    )
    needs_of_model: ClassVar[str] = "embeddings"

    @phase(model="~model", prototypes="float32[*present,p]", present="bool[C]")
    def train(
        self,
        client: Client,
        model: Message,
        clusters: Tensor | None = None,
        of_class: Tensor | None = None,
    ) -> Message:
        """Trains for E local epochs from the global weights, then returns the class means."""
        local_model, graph = client.state["model"], client.graph
        load_weights(local_model, model)
        received = None if clusters is None else {"clusters": clusters, "of_class": of_class}
        self.descend(client, local_model, received)
        with torch.no_grad():
            means, counts = class_means(
                local_model.embed(graph), graph.y, graph.train, client.facts.num_classes
            )
        return {"model": weights(local_model), **pack_table(means, counts > 0, self.floor, counts)}

    def objective(self, client: Client, batch: Graph, model: Model, received: Message) -> Tensor:
        """Returns CE + λ_1 L_1 + λ_2 L_2. One forward pass serves all terms.

        received: the cluster prototypes and their classes; empty in the first round.
        """
        z, logits = outputs(model, batch, client.rng("dropout"))
        loss = client.loss(logits, batch)
        if not received:
            return loss
        of_class = received["of_class"]
        all_clusters = torch.ones_like(of_class, dtype=torch.bool)
        classes = client.facts.num_classes
        U, count = class_means(received["clusters"], of_class, all_clusters, classes)
        # The y of an unlabelled item is -1, which indexes the last class. It is not in `train`.
        has_target = batch.train & (count > 0)[batch.y]
        if not has_target.any():
            return loss
        z, y = z[has_target], batch.y[has_target]
        return (
            loss
            + self.contrastive * contrast(z, y, **received, tau=self.tau)
            + self.unbiased * F.mse_loss(z, U[y])
        )

    def run(self, server: Server) -> None:
        """Algorithm 1."""
        server.ask(self.setup)
        state = server.state
        state["model"], state["told"] = server.model(), {}
        for _ in server.rounds(self.rounds):
            size = server.weights("size", server.participants)
            replies = server.ask(
                self.train, clients=list(size), model=state["model"], **state["told"]
            )
            models = replies.replaced({c: {"model": r["model"]} for c, r in replies.items()})
            state["model"] = models.mean(size)["model"]
            state["told"] = cluster_means(list(replies.values()))
            server.evaluate(model=state["model"])
        self.finish(server)


def contrast(z: Tensor, y: Tensor, clusters: Tensor, of_class: Tensor, tau: float) -> Tensor:
    """Returns L_1 of items with embeddings z and classes y, each of which has a cluster."""
    similar = F.normalize(z) @ F.normalize(clusters).T / tau
    own = similar.masked_fill(y.unsqueeze(1) != of_class, -torch.inf)
    return (similar.logsumexp(1) - own.logsumexp(1)).mean()


def cluster_means(replies: list[Message]) -> Message:
    """Returns the means of each class's clusters [clusters, p] and their classes.

    It is empty if no client sent a prototype.

    replies: the clients' replies, with `prototypes` and `present`.
    """
    present = torch.stack([reply["present"] for reply in replies])
    tables = torch.stack([table_of(reply["prototypes"], reply["present"]) for reply in replies])
    found: list[Tensor] = []
    for c in range(present.shape[1]):
        points = tables[present[:, c], c]
        label = clusters(points)
        all_points = torch.ones_like(label, dtype=torch.bool)
        found.append(class_means(points, label, all_points, len(label.unique()))[0])
    of_class = torch.repeat_interleave(torch.tensor([len(means) for means in found]))
    return {"clusters": torch.cat(found), "of_class": of_class} if len(of_class) else {}
