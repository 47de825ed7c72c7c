"""FedDC: each client tracks its drift from the global weights, and uploads drift-corrected weights.

Gao, Fu, Li, Chen, Xu, Xu: "FedDC: Federated Learning with Non-IID Data via Local Drift Decoupling
and Correction", CVPR 2022, Eq. 4-6 and Algorithm 1.

What travels, per client:
    once     up    size       number of local items n_k
    a round  down  model      θ               update  Δ̄, mean of the clients' last updates
             up    corrected  θ_k + h_k       update  Δ_k = θ_k − θ

    min CE + (α/2) ‖h_k + θ_k − θ‖² + (1/(Eη)) ⟨θ_k, Δ_k' − Δ̄⟩      `objective`
    h_k ← h_k + Δ_k                                                 `train`
    θ ← Σ w_k (θ_k + h_k),   Δ̄ ← Σ w_k Δ_k                          `run`

Δ_k' is the client's update of its last round.

Departures. Public code differs from the paper in two places. Here the inner product is with the
difference Δ_k' − Δ̄, and the drift takes this round's update. As in SCAFFOLD, the correction is
scaled for SGD, the default here. Under Adam it swamps the gradient and training fails.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.core.client import Client
from fedloom.core.message import Message, tree_map
from fedloom.core.phase import averaged, phase
from fedloom.core.server import Server
from fedloom.core.settings import setting
from fedloom.data.graph import Graph
from fedloom.methods.fedavg import FedAvg
from fedloom.nn.model import Model
from fedloom.nn.training import OPTIMIZERS
from fedloom.nn.weights import inner_product, load_weights, squared_distance, weights


@dataclass(frozen=True)
class FedDC(FedAvg):
    """FedAvg with local drift variables."""

    lr: float = setting(0.1, "local learning rate η", above=0, tune="0.01..1")
    optimizer: str = setting("sgd", "local optimiser", choices=OPTIMIZERS)
    alpha: float = setting(0.1, "α, weight of the drift penalty", at_least=0, tune="0.001..1")

    @averaged(by="size")
    @phase(corrected="~model", update="=model")
    def train(self, client: Client, model: Message, update: Message) -> Message:
        """Trains for E local epochs, then computes the client's new update and drift."""
        local_model, state = client.state["model"], client.state
        zero = tree_map(torch.zeros_like, model)
        drift, last = state.get("drift", zero), state.get("update", zero)
        load_weights(local_model, model)
        state["anchor"] = tree_map(torch.sub, model, drift)
        state["direction"] = tree_map(torch.sub, last, update)
        self.descend(client, local_model, model)
        state["update"] = tree_map(torch.sub, weights(local_model), model)
        state["drift"] = tree_map(torch.add, drift, state["update"])
        return {
            "corrected": tree_map(torch.add, weights(local_model), state["drift"]),
            "update": state["update"],
        }

    def objective(
        self, client: Client, batch: Graph, model: Model, global_weights: Message
    ) -> Tensor:
        """Eq. 4: ‖h_k + θ_k − θ‖² is the distance to the anchor θ − h_k."""
        penalty = self.alpha / 2 * squared_distance(model, client.state["anchor"])
        path = self.lr * self.epochs * len(client.batches(self.batch_size))
        correction = inner_product(model, client.state["direction"]) / path
        return super().objective(client, batch, model, global_weights) + penalty + correction

    def run(self, server: Server) -> None:
        """Algorithm 1."""
        server.ask(self.setup)
        state = server.state
        state["model"] = server.model()
        state["update"] = tree_map(torch.zeros_like, state["model"])
        for _ in server.rounds(self.rounds):
            mean = server.mean(self.train, model=state["model"], update=state["update"])
            state["model"], state["update"] = mean["corrected"], mean["update"]
            server.evaluate(model=state["model"])
        self.finish(server)
