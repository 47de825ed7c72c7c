"""SCAFFOLD: control variates correct every local step towards the average direction of all clients.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: "SCAFFOLD: Stochastic Controlled Averaging for
Federated Learning", ICML 2020, Algorithm 1 with option II.

What travels, per client:
    once     up    size      number of local items n_k
    a round  down  model     θ        control  c
             up    model     θ_k      change   c_k⁺ − c_k

    g ← ∇CE + c − c_k                                          `objective`
    c_k⁺ = c_k − c + (θ − θ_k) / (Eη)                          `train`
    θ ← Σ w_k θ_k,   c ← c + Σ_{answering} (c_k⁺ − c_k) / K    `run`

`objective` adds a linear term, whose gradient is c − c_k. E is the number of local steps.

Departures. The paper averages clients equally; here w_k = n_k / Σ n, as in all methods of this
package. The algorithm is derived for SGD, which is the default here. With `optimizer = "adam"` the
correction is a heuristic: Adam rescales it, and Eη is no longer the step.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.core.client import Client
from fedloom.core.message import Message, tree_map
from fedloom.core.phase import phase
from fedloom.core.server import Server
from fedloom.core.settings import setting
from fedloom.data.graph import Graph
from fedloom.methods.fedavg import FedAvg
from fedloom.nn.model import Model
from fedloom.nn.training import OPTIMIZERS
from fedloom.nn.weights import inner_product, load_weights, weights


@dataclass(frozen=True)
class Scaffold(FedAvg):
    """FedAvg with control variates."""

    lr: float = setting(0.5, "local learning rate η", above=0, tune="0.01..1")
    optimizer: str = setting("sgd", "local optimiser", choices=OPTIMIZERS)

    @phase(model="~model", change="=model")
    def train(self, client: Client, model: Message, control: Message) -> Message:
        """Trains for E corrected local epochs, then computes the new control (option II)."""
        local_model = client.state["model"]
        own = client.state.get("control") or tree_map(torch.zeros_like, model)
        load_weights(local_model, model)
        client.state["correction"] = tree_map(torch.sub, control, own)
        self.descend(client, local_model, model)
        path = self.lr * self.epochs * len(client.batches(self.batch_size))
        # A client that took no step (path 0) keeps its control. Option II would use −c as its
        # gradient.
        change = tree_map(
            lambda c, old, new: (old - new) / path - c if path else torch.zeros_like(c),
            control,
            model,
            weights(local_model),
        )
        client.state["control"] = tree_map(torch.add, own, change)
        return {"model": weights(local_model), "change": change}

    def objective(
        self, client: Client, batch: Graph, model: Model, global_weights: Message
    ) -> Tensor:
        """CE + ⟨θ_k, c − c_k⟩."""
        loss = super().objective(client, batch, model, global_weights)
        return loss + inner_product(model, client.state["correction"])

    def run(self, server: Server) -> None:
        """Algorithm 1."""
        server.ask(self.setup)
        server.weights("size", server.clients)
        state = server.state
        state["model"] = server.model()
        state["control"] = tree_map(torch.zeros_like, state["model"])
        for _ in server.rounds(self.rounds):
            size = server.weights("size", server.participants)
            replies = server.ask(
                self.train, clients=list(size), model=state["model"], control=state["control"]
            )
            state["model"] = replies.mean(size)["model"]
            change = replies.sum()["change"]
            state["control"] = tree_map(
                lambda c, d: c + d / len(server.clients), state["control"], change
            )
            server.evaluate(model=state["model"])
        self.finish(server)
