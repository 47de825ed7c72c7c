"""FedProto: clients share the mean embedding of each class instead of weights; any architecture at each client.

Tan, Long, Liu, Zhou, Lu, Jiang, Zhang: "FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI 2022, Algorithm 1.

What travels, per client and round (C classes, p the embedding's width):
    down  prototypes, present   P, of the classes that somebody has (nothing in the first round)
    up    sums, counts          Σ of the embeddings of each class's training items, and how many: n_k^c P_k[c] and n_k^c

    P_k[c] = mean of z_i over the client's training items of class c                   `train`
    P[c]   = Σ_k n_k^c P_k[c] / Σ_k n_k^c                                              `run`
    min CE + λ · mean_i ‖z_i − P[y_i]‖² / p                                            `objective`, `alignment`

z is the embedding that the model's head reads. The server needs sums alone, so with `--secure` it does not see who has which classes; but
the P[c] of a class that a single client has is that client's own (of one item: the item's embedding), and all clients get it. `floor`
keeps at home what fewer items are behind; a class that nobody tells has no prototype and pulls at nobody.

Departures: the classifier predicts, as in the graph benchmarks (the paper takes the nearest prototype); the distance is the mean of squares
(the authors' code; the paper writes a norm). Benchmarks send zero vectors for absent classes and weigh by all nodes: here a class weighs
by its own training items.
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
from fedloom.core.settings import setting
from fedloom.data.graph import Graph
from fedloom.methods._shared.local_training import LocalTraining
from fedloom.methods._shared.prototypes import class_sums, table_of, told
from fedloom.nn.model import Model


@dataclass(frozen=True)
class FedProto(LocalTraining):
    """Local training towards common class means."""

    pull: float = setting(
        1.0, "λ, weight of the distance to the prototypes", at_least=0, tune="0.1..10"
    )
    unit: bool = setting(
        False, "embeddings are scaled to length 1 before anything else is done with them"
    )
    floor: int = setting(1, "items behind a prototype below which it stays at home", at_least=1)

    discloses_to_peers: ClassVar[str] = (
        "class means over all clients: of one alone, if no other has the class"
    )

    @summed
    @phase(sums="float32[C,p]", counts="int64[C]")
    def train(
        self, client: Client, prototypes: Tensor | None = None, present: Tensor | None = None
    ) -> Message:
        """E local epochs; then what the client has of each class."""
        self.follow(client, prototypes, present)
        graph = client.graph
        sums, counts = class_sums(
            self.embeddings(client), graph.y, graph.train, client.facts.num_classes
        )
        told_of = counts >= self.floor
        return {"sums": sums * told_of.unsqueeze(1), "counts": counts * told_of}

    def follow(self, client: Client, prototypes: Tensor | None, present: Tensor | None) -> None:
        """E local epochs on the objective, pulled towards what came."""
        received = None
        if prototypes is not None and present is not None:
            received = {
                "table": table_of(prototypes, present, f"to client {client.name!r} in 'train'"),
                "present": present,
            }
        self.descend(client, client.state["model"], received)

    @torch.no_grad()
    def embeddings(self, client: Client) -> Tensor:
        """z of all items that training may see, noise off."""
        return self.scaled(client.state["model"].embed(client.graph))

    def scaled(self, z: Tensor) -> Tensor:
        """z, each row of length 1 if `unit`."""
        return F.normalize(z) if self.unit else z

    def objective(
        self, client: Client, batch: Graph, model: Model, received: Message | None
    ) -> Tensor:
        """CE plus the alignment; one forward pass serves both."""
        rng = client.rng("dropout")
        z = model.embed(batch, rng)
        loss = client.loss(model.head(z, batch, rng), batch)
        return (
            loss
            if received is None
            else loss + self.pull * self.alignment(client, batch, self.scaled(z), **received)
        )

    def alignment(
        self, client: Client, batch: Graph, z: Tensor, table: Tensor, present: Tensor
    ) -> Tensor:
        """Mean squared distance of the batch's training items to their classes' prototypes; 0 if there are none of both."""
        y = batch.y[batch.train]
        return nearness(z[batch.train], y, table, present)

    def run(self, server: Server) -> None:
        """Algorithm 1."""
        server.ask(self.setup)
        state = server.state
        state["known"] = {}
        for _ in server.rounds(self.rounds):
            total = server.sum(self.train, **state["known"])
            state["known"] = told(
                total["sums"] / total["counts"].clamp(min=1).unsqueeze(1), total["counts"] > 0
            )
            server.evaluate()


def nearness(v: Tensor, y: Tensor, table: Tensor, present: Tensor) -> Tensor:
    """Mean square of v_i − table[y_i], over the rows whose class is present, and coordinates; 0 without any."""
    pulled = present[y]
    return F.mse_loss(v[pulled], table[y[pulled]]) if pulled.any() else v.sum() * 0.0
