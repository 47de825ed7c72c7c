"""FedSGD: in every step each client sends one gradient, and the server steps along their sum.

McMahan et al., AISTATS 2017 (FedAvg with E = 1 and the full batch), with the shared Adam of
FedStruct's experiments (Aliakbari, Östman, Graell i Amat, "Decoupled Subgraph Federated Learning",
ICLR 2025, Eq. 4, 5).

What travels, per client and round:
    down  model      θ
    up    gradient   ∇_k, of the loss summed over the client's training items
          labelled   number of its training items

    ∇ = Σ_k ∇_k / Σ_k |training items of k|          `gradient`, `follow`
    θ ← Adam(θ, ∇)                                   `follow`

∇ is the gradient of the mean loss over all clients' training items. The server needs only the two
sums. One round is one step. There is one common model and no local training.

With `run.dp_unit` node, edge or label, the gradient of each training node is clipped, edges are
capped, and the sum gets noise (docs/differential-privacy.md).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.core.message import Message, flatten, tree_map
from fedloom.core.method import Method
from fedloom.core.phase import phase, summed
from fedloom.core.privacy_terms import PrivacyTerms
from fedloom.core.server import Server
from fedloom.core.settings import setting
from fedloom.data.capping import capped
from fedloom.nn.model import Model
from fedloom.nn.training import OPTIMIZERS, backward, make_optimizer
from fedloom.nn.weights import load_weights
from fedloom.privacy.dp_graph import clipped_gradients, gradient_sensitivity


@dataclass(frozen=True)
class FedSGD(Method):
    """Summed gradients, and one optimiser at the server."""

    lr: float = setting(0.01, "the server's learning rate λ", above=0, tune="0.001..0.1")
    weight_decay: float = setting(5e-4, "L2 penalty", at_least=0, tune="1e-6..0.01")
    optimizer: str = setting("adam", "the server's optimiser", choices=OPTIMIZERS)

    evaluations: ClassVar[tuple[str, ...]] = ("common",)
    one_model: ClassVar[bool] = True

    @phase()
    def setup(self, client: Client) -> Message:
        """Builds a model to compute gradients with."""
        client.state["model"] = client.build()
        return {}

    @summed
    @phase(gradient="=model", labelled="int64[] is train")
    def gradient(self, client: Client, model: Message) -> Message:
        """Returns the gradient of the summed loss at the common weights."""
        local_model = client.state["model"]
        load_weights(local_model, model)
        if (privacy := client.facts.privacy) is not None and privacy.unit != "client":
            return self.clipped_gradient(client, local_model, privacy)
        local_model.zero_grad()
        backward(local_model, self.total_loss(client, local_model))
        gradient = {name: p.grad for name, p in sorted(local_model.named_parameters())}
        return {"gradient": gradient, "labelled": client.graph.train.sum()}

    def clipped_gradient(self, client: Client, model: Model, privacy: PrivacyTerms) -> Message:
        """As `gradient`, with the gradient of each training node clipped, on capped edges."""
        graph = client.graph
        if privacy.unit != "label":
            graph = graph.cached(("capped", privacy.degree), lambda: capped(graph, privacy.degree))
        logits = model(graph, client.rng("dropout"))[graph.train]
        losses = F.cross_entropy(
            logits, graph.y[graph.train], client.class_weight, reduction="none"
        )
        if len(losses):
            client.record_loss(losses.mean())
        named = dict(sorted(model.named_parameters()))
        summed = clipped_gradients(losses, list(named.values()), privacy.clip)
        gradient = dict(zip(named, summed, strict=True))
        return {"gradient": gradient, "labelled": client.graph.train.sum()}

    def sensitivities(self, facts: Facts) -> dict[str, float] | None:
        """The sum of clipped gradients of nodes; clients' gradients are clipped as a whole."""
        assert facts.privacy is not None
        if facts.privacy.unit == "client" or type(self) is not FedSGD:
            return None
        return {"gradient": gradient_sensitivity(facts)}

    def total_loss(self, client: Client, model: Model) -> Tensor:
        """Returns the client's part of the loss: cross-entropy summed over training items."""
        return client.loss(
            model(client.graph, client.rng("dropout")), client.graph, reduction="sum"
        )

    def run(self, server: Server) -> None:
        """One shared step per round."""
        server.ask(self.setup)
        model = self.begin(server, server.model())
        for _ in server.rounds(self.rounds):
            self.follow(server, server.sum(self.gradient, model=model))
            server.evaluate(model=model)

    def begin(self, server: Server, model: Message) -> Message:
        """Puts the initial weights and an optimiser for them into the server's state.

        Returns the weights, which `follow` updates in place.
        """
        server.state["model"] = model = tree_map(torch.clone, model)
        server.state["optimizer"] = make_optimizer(
            self.optimizer, flatten(model).values(), self.lr, self.weight_decay
        )
        return model

    def follow(self, server: Server, total: Message) -> None:
        """Takes one step along the mean gradient.

        total: the sum of the clients' replies to `gradient`.
        """
        gradient = flatten(total["gradient"])
        for name, parameter in flatten(server.state["model"]).items():
            parameter.grad = gradient[name] / total["labelled"].clamp(min=1)
        server.state["optimizer"].step()
