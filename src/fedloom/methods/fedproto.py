"""FedProto: clients share the mean embedding of each class, not weights, and may differ in model.

Tan, Long, Liu, Zhou, Lu, Jiang, Zhang: "FedProto: Federated Prototype Learning across Heterogeneous
Clients", AAAI 2022, Algorithm 1.

What travels, per client and round (C classes, p the embedding's width):
    down  prototypes, present   P, of the classes that some client has (nothing in the first round)
    up    sums                  n_k^c P_k[c], the sum of the embeddings of each class's training
                                items
          counts                n_k^c, the number of these items

    P_k[c] = mean of z_i over the client's training items of class c     `train`
    P[c]   = Σ_k n_k^c P_k[c] / Σ_k n_k^c                                `run`
    min CE + λ · mean_i ‖z_i − P[y_i]‖² / p                              `objective`, `alignment`

z is the embedding that the model's head reads. The server needs only sums. With `--secure` it does
not see which client has which classes. But if a single client has class c, then P[c] is that
client's own mean (of a single item: the item's embedding), and all clients receive it. `floor`
keeps prototypes that are computed from fewer items at the client. A class that no client sends has
no prototype and adds nothing to the objective.

Departures. The paper sends all prototypes (floor = 1). The classifier predicts, as in the graph
benchmarks (the paper takes the nearest prototype). The distance is the mean of squares, as in the
authors' code (the paper writes a norm). Benchmarks send zero vectors for absent classes and weight
by all nodes; here a class is weighted by its own training items.
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
from fedloom.methods._shared.prototypes import class_sums, pack_table, table_of
from fedloom.nn.model import Model
from fedloom.nn.prototypes import unit_rows
from fedloom.nn.training import outputs


@dataclass(frozen=True)
class FedProto(LocalTraining):
    """Local training towards common class means."""

    pull: float = setting(
        1.0, "λ, weight of the distance to the prototypes", at_least=0, tune="0.1..10"
    )
    unit: bool = setting(
        False, "scale embeddings to length 1 before anything else is done with them"
    )
    floor: int = fewest_items("fewest items that a prototype is computed from; others are not sent")

    discloses_to_peers: ClassVar[str] = (
        "class means over all clients; of a single client if no other has the class"
    )
    needs_of_model: ClassVar[str] = "embeddings"

    @summed
    @phase(sums="float32[C,p]", counts="int64[C] counts train")
    def train(
        self, client: Client, prototypes: Tensor | None = None, present: Tensor | None = None
    ) -> Message:
        """Trains for E local epochs, then sums the client's embeddings by class."""
        self.follow(client, prototypes, present)
        graph = client.graph
        sums, counts = class_sums(
            self.embeddings(client), graph.y, graph.train, client.facts.num_classes
        )
        sent = counts >= self.floor
        return {"sums": sums * sent.unsqueeze(1), "counts": counts * sent}

    def follow(self, client: Client, prototypes: Tensor | None, present: Tensor | None) -> None:
        """Trains for E local epochs, towards the downloaded prototypes if there are any."""
        received = None
        if prototypes is not None and present is not None:
            received = {
                "table": table_of(prototypes, present, f"to client {client.name!r} in 'train'"),
                "present": present,
            }
        self.descend(client, client.state["model"], received)

    @torch.no_grad()
    def embeddings(self, client: Client) -> Tensor:
        """Returns z of all items of the training graph, without dropout."""
        return self.scaled(client.state["model"].embed(client.graph))

    def scaled(self, z: Tensor) -> Tensor:
        """Returns z, with rows of length 1 if `unit` is set."""
        return unit_rows(z) if self.unit else z

    def objective(self, client: Client, batch: Graph, model: Model, received: Message) -> Tensor:
        """Returns CE plus the alignment. One forward pass serves both."""
        z, logits = outputs(model, batch, client.rng("dropout"))
        loss = client.loss(logits, batch)
        if not received:
            return loss
        return loss + self.pull * self.alignment(client, batch, self.scaled(z), **received)

    def alignment(
        self, client: Client, batch: Graph, z: Tensor, table: Tensor, present: Tensor
    ) -> Tensor:
        """Returns the mean squared distance of the training items to their class prototypes.

        It is 0 if no training item has a prototype.
        """
        y = batch.y[batch.train]
        return nearness(z[batch.train], y, table, present)

    def run(self, server: Server) -> None:
        """Algorithm 1."""
        server.ask(self.setup)
        state = server.state
        state["known"] = {}
        for _ in server.rounds(self.rounds):
            total = server.sum(self.train, **state["known"])
            means = total["sums"] / total["counts"].clamp(min=1).unsqueeze(1)
            state["known"] = pack_table(means, total["counts"] > 0)
            server.evaluate()


def nearness(v: Tensor, y: Tensor, table: Tensor, present: Tensor) -> Tensor:
    """Returns the mean square of v_i − table[y_i] over the rows whose class is present.

    The mean is over rows and coordinates. It is 0 without any such row.
    """
    has_target = present[y]
    if not has_target.any():
        return v.sum() * 0.0
    return F.mse_loss(v[has_target], table[y[has_target]])
