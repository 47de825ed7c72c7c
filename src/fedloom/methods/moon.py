"""MOON: embeddings are pulled towards the global model's and away from the client's last ones.

Li, He, Song: "Model-Contrastive Federated Learning", CVPR 2021, Eq. 3.

What travels: as in FedAvg.

    min CE + μ · mean_i ℓ_i                                                     `objective`
    ℓ = −log  e^{cos(z, z_glob)/τ} / (e^{cos(z, z_glob)/τ} + e^{cos(z, z_prev)/τ})

z is the embedding of the local model, z_glob that of the downloaded model, z_prev that of the
client's model at the end of its last round. The mean is over all items of the training graph. In a
client's first round z_prev = z_glob, and the term's gradient is zero.

Departures: there is no extra projection head (the embedding is already p wide), as in the graph
benchmarks.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.client import Client
from fedloom.core.message import Message
from fedloom.core.phase import averaged, phase
from fedloom.core.settings import setting
from fedloom.data.graph import Graph
from fedloom.methods.fedavg import FedAvg
from fedloom.nn.model import Model
from fedloom.nn.weights import load_weights


@dataclass(frozen=True)
class Moon(FedAvg):
    """FedAvg with a model-contrastive term."""

    mu: float = setting(1.0, "μ, weight of the contrastive term", at_least=0, tune="0.1..10")
    tau: float = setting(0.5, "τ, temperature", above=0, tune="0.1..1")

    needs_of_model: ClassVar[str] = "embeddings"

    @phase()
    def setup(self, client: Client) -> Message:
        """As in FedAvg, plus two models that are not trained: the global and the previous one."""
        client.state |= {"global": client.build(), "previous": client.build()}
        return super().setup(client)

    @averaged(by="size")
    @phase(model="~model")
    def train(self, client: Client, model: Message) -> Message:
        """Trains for E local epochs from the global weights.

        The result is the previous model of the next round.
        """
        state = client.state
        load_weights(state["global"], model)
        if "trained" not in state:
            load_weights(state["previous"], model)
            state["trained"] = torch.tensor(True)
        reply = super().train(client, model)
        load_weights(state["previous"], reply["model"])
        return reply

    def objective(
        self, client: Client, batch: Graph, model: Model, global_weights: Message
    ) -> Tensor:
        """Eq. 3. One forward pass serves both terms."""
        rng = client.rng("dropout")
        z = model.embed(batch, rng)
        with torch.no_grad():
            z_glob, z_prev = (client.state[which].embed(batch) for which in ("global", "previous"))
        near, far = (F.cosine_similarity(z, anchor) / self.tau for anchor in (z_glob, z_prev))
        contrast = F.softplus(far - near).mean()  # −log e^near / (e^near + e^far)
        return client.loss(model.head(z, batch, rng), batch) + self.mu * contrast
