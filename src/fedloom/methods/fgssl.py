"""FGSSL: on random views, clients match the global model's classes and neighbourhoods.

Huang, Wan, Ye, Du: "Federated Graph Semantic and Structural Learning", IJCAI 2023.

What travels: as in FedAvg.

    G_w, G_s = the graph with few and with many of its edges and feature          `random_view`
               columns missing, drawn at every step
    z, f   = embeddings and logits of the trained model on G_s                    `objective`
    z°, f° = embeddings and logits of the downloaded model on G_w                 `objective`
    L_c = mean_i −mean_{j: y_j = y_i} log                                         `class_contrast`
              e^{cos(z_i, z°_j)/τ} / Σ_j e^{cos(z_i, z°_j)/τ}
          where i and j are training nodes
    q_i = softmax over i's neighbours j of cos(f_i, f_j)/ω                        `log_neighbours`
    q°_i = the same of f°                                                         `log_neighbours`
    L_d = mean of KL(q°_i ‖ q_i) over the nodes that have neighbours              `structure`
    min CE on the graph itself + λ_c L_c + λ_d L_d                                `objective`

Neighbours are those of the whole graph, also where a view lacks the edge. L_d takes memory for one
row of logits per edge, L_c for 1,024 rows of training nodes × training nodes. With a single class
L_c only makes its nodes equally near; without edges L_d is 0.

Departures from the authors' code. L_c is the same as there (a node is its own positive, too). For
L_d the code compares sharpened class probabilities of the ten nodes with the highest degree, which
it counts as their own neighbours. Here it compares logits of all nodes, and ω is the temperature of
the neighbours' softmax. The code's public versions, and a benchmark after them, compute several
such terms and minimise CE and one of them. Here every term that is computed is minimised. λ_c, λ_d
and ω are ours.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedloom.core.client import Client
from fedloom.core.message import Message
from fedloom.core.phase import averaged, phase
from fedloom.core.settings import setting
from fedloom.data.graph import Graph
from fedloom.methods.fedavg import FedAvg
from fedloom.nn.augment import random_view
from fedloom.nn.contrast import class_contrast
from fedloom.nn.distillation import structure
from fedloom.nn.model import Model
from fedloom.nn.training import outputs
from fedloom.nn.weights import load_weights


@dataclass(frozen=True)
class FGSSL(FedAvg):
    """FedAvg with a contrast to the global model's classes and a term for neighbourhoods."""

    semantic: float = setting(
        1.0, "λ_c, weight of the contrast between classes", at_least=0, tune="0.1..10"
    )
    structural: float = setting(
        1.0, "λ_d, weight of the neighbourhoods' distillation", at_least=0, tune="0.1..10"
    )
    tau: float = setting(0.1, "τ, temperature of the contrast", above=0, tune="0.05..1")
    omega: float = setting(0.1, "ω, temperature of the neighbourhoods", above=0, tune="0.05..1")
    weak_edges: float = setting(
        0.3, "share of edges that the global model does not see", at_least=0, at_most=1
    )
    weak_columns: float = setting(
        0.3, "share of feature columns that the global model does not see", at_least=0, at_most=1
    )
    strong_edges: float = setting(
        0.8, "share of edges that the trained model does not see", at_least=0, at_most=1
    )
    strong_columns: float = setting(
        0.5, "share of feature columns that the trained model does not see", at_least=0, at_most=1
    )

    tasks: ClassVar[tuple[str, ...]] = ("node",)
    needs_of_model: ClassVar[str] = "embeddings"

    @phase()
    def setup(self, client: Client) -> Message:
        """As in FedAvg, plus a model that is not trained and holds the global weights."""
        client.memory["global"] = client.build()
        return super().setup(client)

    @averaged(by="size")
    @phase(model="~model")
    def train(self, client: Client, model: Message) -> Message:
        """Trains for E local epochs from the global weights, which the objective also uses."""
        load_weights(client.memory["global"], model)
        return super().train(client, model)

    def objective(
        self, client: Client, batch: Graph, model: Model, global_weights: Message
    ) -> Tensor:
        """Returns CE + λ_c L_c + λ_d L_d."""
        plain = super().objective(client, batch, model, global_weights)
        if not (self.semantic or self.structural):
            return plain
        rng = client.rng("views")
        weak = random_view(batch, self.weak_edges, self.weak_columns, rng)
        strong = random_view(batch, self.strong_edges, self.strong_columns, rng)
        with torch.no_grad():
            z_global, f_global = outputs(client.memory["global"], weak)
        z, f = outputs(model, strong, client.rng("strong"))
        return (
            plain
            + self.semantic * class_contrast(batch, z, z_global, self.tau)
            + self.structural * structure(f, f_global, batch, self.omega)
        )
