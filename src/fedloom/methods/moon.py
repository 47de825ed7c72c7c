"""MOON: each item's embedding is pulled towards the global model's and pushed from the client's own of the round before.

Li, He, Song: "Model-Contrastive Federated Learning", CVPR 2021, Eq. 3.

What travels: as in FedAvg.

    CE + μ · mean_i −log  e^{cos(z, z_glob)/τ} / (e^{cos(z, z_glob)/τ} + e^{cos(z, z_prev)/τ})          `objective`

z is the local model's embedding, z_glob the downloaded model's, z_prev that of the client's model at the end of its last round; all
items of the training graph. In a client's first round z_prev = z_glob, where the term's gradient is zero. Departure: no extra
projection head (the embedding is already p wide), as in the graph benchmarks.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.learn import load_weights, weights
from fedloom.message import Message, tree_map
from fedloom.method import phase, setting
from fedloom.methods.fedavg import FedAvg
from fedloom.models import Model
from fedloom.party import Client


@dataclass(frozen=True)
class Moon(FedAvg):
    """FedAvg with a model-contrastive term."""

    mu: float = setting(1.0, "μ, weight of the contrastive term", at_least=0)
    tau: float = setting(0.5, "τ, temperature", above=0)

    @phase(model="=model")
    def train(self, client: Client, model: Message) -> Message:
        """E local epochs from the global weights, against the two fixed embeddings."""
        net = client.state["model"]
        client.state["anchors"] = {"global": self.embed(client, net, model)}
        client.state["anchors"]["previous"] = self.embed(client, net, client.state.get("previous", model))
        load_weights(net, model)
        self.descend(client, net, model)
        client.state["previous"] = tree_map(torch.clone, weights(net))
        return {"model": weights(net)}

    @torch.no_grad()
    def embed(self, client: Client, net: Model, given: Message) -> Tensor:
        """The training graph's embeddings under the given weights, noise off. Overwrites the model's weights."""
        load_weights(net, given)
        return net.embed(client.graph)

    def objective(self, client: Client, net: Model, model: Message) -> Tensor:
        """Eq. 3; one forward pass serves both terms."""
        rng = client.rng("dropout")
        z = net.embed(client.graph, rng)
        near = F.cosine_similarity(z, client.state["anchors"]["global"]) / self.tau
        far = F.cosine_similarity(z, client.state["anchors"]["previous"]) / self.tau
        contrast = F.softplus(far - near).mean()  # −log e^near / (e^near + e^far)
        return client.loss(net.head(z, client.graph, rng)) + self.mu * contrast
