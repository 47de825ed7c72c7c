"""FedDistill: clients share their models' mean logits of each class and learn to match them.

Jeong, Oh, Kim, Park, Bennis, Kim: "Communication-Efficient On-Device Machine Learning: Federated
Distillation and Augmentation under Non-IID Private Data", NeurIPS workshop on Machine Learning on
the Phone, 2018, Algorithm 1 (federated distillation). No weights travel.

What travels, per client:
    a round  up    logits    F_k[c], mean logits over the training items of class c   C × C numbers
                   present   1 for each class of the client's training items, else 0  C numbers
             down  logits    F[c], from the second round on                           C × C numbers
                   known     1 for each class that has an F[c], else 0                C numbers

    F_k[c] = mean of f_k(i) over the client's training items i of class c     `class_means`
        without dropout, after E epochs
    F[c]   = Σ_k F_k[c] / Σ_k present_k[c]                                    `run`
        every client that has the class has the same weight
    min  CE + λ · mean_i d(f_k(i), F[y_i])                                    `objective`
    d(f, F) = CE(f, softmax F), or the mean square of f − F                   `distance`

The first round is plain training: there is no F yet. A class that no participant has an item of
keeps its last F. A class that no client ever had has no F, and its items have no part in the second
term. The server needs only sums, so a secure run reveals nothing else to it. The F of a class that
a single client has is that client's own, in a secure run too.

Departures. In the paper a device leaves its own F_k out of its target; here all clients get the
mean of all, one message for all of them. F_k is computed from the trained model in one pass, not
collected during the local steps. The paper sends all means (floor = 1).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.client import Client
from fedloom.core.message import Message
from fedloom.core.phase import phase, summed
from fedloom.core.server import Server
from fedloom.core.settings import fewest_items, setting
from fedloom.data.graph import Graph
from fedloom.methods._shared.local_training import LocalTraining
from fedloom.nn.model import Model


@dataclass(frozen=True)
class FedDistill(LocalTraining):
    """Local training towards the clients' mean logits of each class."""

    weight: float = setting(1.0, "λ, weight of the distillation term", at_least=0, tune="0.1..10")
    term: str = setting(
        "ce",
        "d: cross-entropy with the softened mean, or mean square of the logits",
        choices=("ce", "mse"),
    )
    floor: int = fewest_items("fewest items that a mean is computed from; others are not sent")

    discloses_to_peers: ClassVar[str] = (
        "mean logits of each class over all clients; of a single client if no other has the class"
    )

    @summed
    @phase(logits="float32[C,C]", present="int64[C] in 0..1")
    def train(
        self, client: Client, logits: Tensor | None = None, known: Tensor | None = None
    ) -> Message:
        """Trains for E local epochs, then returns the client's class means."""
        model = client.state["model"]
        received = None if logits is None else {"logits": logits, "known": known}
        self.descend(client, model, received)
        return self.class_means(client, model)

    @torch.no_grad()
    def class_means(self, client: Client, model: Model) -> Message:
        """Returns F_k and which of its rows exist; the others are 0."""
        graph, classes = client.graph, client.facts.num_classes
        y = graph.y[graph.train]
        count = torch.bincount(y, minlength=classes)
        total = torch.zeros(classes, classes).index_add_(0, y, model(graph)[graph.train])
        sent = count >= self.floor
        means = total / count.clamp(min=1).unsqueeze(1)
        return {"logits": means * sent.unsqueeze(1), "present": sent.long()}

    def objective(self, client: Client, batch: Graph, model: Model, received: Message) -> Tensor:
        """Returns CE, plus the distance to F from the second round on.

        received: F under `logits`, and which of its rows exist under `known`.
        """
        logits = model(batch, client.rng("dropout"))
        loss = client.loss(logits, batch)
        if not received:
            return loss
        # Hidden labels are -1. Their items are not in `train`.
        has_target = batch.train & (received["known"] > 0)[batch.y.clamp(min=0)]
        if not has_target.any():
            return loss
        target = received["logits"][batch.y[has_target]]
        return loss + self.weight * self.distance(logits[has_target], target)

    def distance(self, logits: Tensor, target: Tensor) -> Tensor:
        """Returns d, averaged over the items."""
        if self.term == "mse":
            return F.mse_loss(logits, target)
        return F.cross_entropy(logits, target.softmax(1))

    def run(self, server: Server) -> None:
        """Algorithm 1."""
        server.ask(self.setup)
        state, classes = server.state, server.facts.num_classes
        state |= {
            "logits": torch.zeros(classes, classes),
            "known": torch.zeros(classes, dtype=torch.int64),
        }
        for number in server.rounds(self.rounds):
            target = {} if number == 1 else {"logits": state["logits"], "known": state["known"]}
            total = server.sum(self.train, **target)
            holders = total["present"].unsqueeze(1)
            state["logits"] = torch.where(
                holders > 0, total["logits"] / holders.clamp(min=1), state["logits"]
            )
            state["known"] = ((state["known"] + total["present"]) > 0).long()
            server.evaluate()
