"""FedNH: the classifier is one direction per class, fixed while clients train and moved slowly.

Dai, Chen, Li, Heinecke, Sun, Xu: "Tackling Data Heterogeneity in Federated Learning with Class
Prototypes", AAAI 2023, Algorithm 1. The directions start as far apart as possible, and the server
moves them towards the clients' class means.

What travels, per client (C classes, p the embedding's width):
    once     up    size          number of local items n_k
             down  prototypes    W, C unit vectors
    a round  down  model         θ, the extractor's weights;   prototypes  W
             up    model         θ_k
                   directions    n_k^c μ_k[c] / n_k; zero for a class that the client does not have

    initial W = argmin max_{c ≠ c'} cos(W_c, W_c')                            `maximally_separated`
    logits of item i = s · cos(z_i, W)                                        `logits`, `predict`
    min CE over θ_k alone                                                     `objective`
    μ_k[c] = norm(mean of norm(z_i) over the client's n_k^c training items    `train`
             of class c)
    W_c ← norm(ρ W_c + (1 − ρ) norm(Σ_k n_k^c μ_k[c]))                        `updated_prototypes`
    θ ← Σ_k (n_k / Σ n) θ_k                                                   `run`

The server needs only means. In a plain run the length of a client's direction times n_k is its
class count. With `--secure` the server sees neither. But the direction of a class that a single
client has is that client's own, and every client can solve for it from the change of W. A class
that no client has leaves W_c unchanged. The model's own head ("classifier.") is neither used nor
sent. Its graph operation is left out too: "gcn-2x64" has one convolution left. "gcn-2x64+linear"
has two, and a linear head that W replaces. Local evaluation uses the W of the client's last
download, global evaluation the new one.

Departures. The paper sends all directions (floor = 1). s is fixed (the authors' code offers a fixed
30, or learns it with θ). W starts as the paper says, found by descent; the authors' code takes
orthogonal rows. The clients' mean is scaled to length 1 before it is mixed in (the paper mixes the
mean itself). The head's dropout on z stays. Clients are weighted by n_k (the paper: equally), as
everywhere in this package.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.func import functional_call

from fedloom.core.client import Client
from fedloom.core.message import Message
from fedloom.core.phase import averaged, phase, runs_once
from fedloom.core.server import Server
from fedloom.core.settings import fewest_items, setting
from fedloom.data.graph import Graph
from fedloom.methods._shared.prototypes import class_sums
from fedloom.methods.fedavg import FedAvg
from fedloom.nn.layers import dropout
from fedloom.nn.model import Model
from fedloom.nn.training import step
from fedloom.nn.weights import extractor_weights, load_weights, weights


@dataclass(frozen=True)
class FedNH(FedAvg):
    """FedAvg of the extractor under a head of prototypes."""

    rho: float = setting(
        0.9,
        "ρ, weight of the old prototypes in a round's update",
        at_least=0,
        at_most=1,
        tune="0.1..0.99",
    )
    scale: float = setting(30.0, "s, factor of the cosines in the logits", above=0, tune="5..50")
    floor: int = fewest_items("fewest items that a direction is computed from; others stay")

    discloses_to_peers: ClassVar[str] = (
        "directions of class means over all clients; of a single client if no other has the class"
    )
    needs_of_model: ClassVar[str] = "embeddings"

    @phase()
    def setup(self, client: Client, prototypes: Tensor) -> Message:
        """As in FedAvg, plus W for clients that are evaluated before they first take part."""
        client.state["prototypes"] = prototypes
        return super().setup(client)

    @averaged(by="size")
    @phase(model="~model", directions="float32[C,p]")
    def train(self, client: Client, model: Message, prototypes: Tensor) -> Message:
        """Trains for E local epochs from the global extractor under the fixed W.

        Then it computes the directions of the client's classes.
        """
        local_model, graph = client.state["model"], client.graph
        self.load(client, model, prototypes)
        self.descend(client, local_model, model)
        with torch.no_grad():
            z = F.normalize(local_model.embed(graph))
            sums, counts = class_sums(z, graph.y, graph.train, client.facts.num_classes)
        counts = counts * (counts >= self.floor)
        share = counts / self.size(client)["size"]  # the mean over clients multiplies by n_k
        return {
            "model": extractor_weights(weights(local_model)),
            "directions": share.unsqueeze(1) * F.normalize(sums),
        }

    @runs_once
    @phase()
    def tune(
        self,
        client: Client,
        epoch: Tensor,
        model: Message | None = None,
        prototypes: Tensor | None = None,
    ) -> Message:
        """Trains for one more local epoch. The result stays with the client.

        epoch: its number, which tells the next epoch from this one delivered twice.
        model, prototypes: the last download, which the first epoch starts from.
        """
        if model is not None and prototypes is not None:
            self.load(client, model, prototypes)
        for batch in client.shuffled(self.batch_size):
            loss = self.objective(client, batch, client.state["model"], {})
            step(client.state["optimizer"], loss)
        return {}

    def load(self, client: Client, model: Message, prototypes: Tensor) -> None:
        """Loads the extractor's weights into the client's model, and stores W."""
        local_model = client.state["model"]
        load_weights(local_model, weights(local_model) | model)
        client.state["prototypes"] = prototypes

    def logits(self, z: Tensor, prototypes: Tensor) -> Tensor:
        """Returns s · cos(z, W)."""
        length = z.norm(dim=1, keepdim=True)
        unit = z / length.where(length > 0, 1.0)  # F.normalize has a gradient of 1e12 where z = 0
        return self.scale * unit @ prototypes.T

    def objective(
        self, client: Client, batch: Graph, model: Model, global_weights: Message
    ) -> Tensor:
        """Returns CE under the prototypes."""
        rng = client.rng("dropout")
        z = dropout(model.embed(batch, rng), model.dropout, rng)
        return client.loss(self.logits(z, client.state["prototypes"]), batch)

    def predict(self, client: Client, model: Message | None) -> Tensor:
        """Returns logits of the full graph without dropout.

        model: θ and W. None: the client's own.
        """
        local_model = client.state["model"]
        if model is None:
            return self.logits(local_model.embed(client.full_graph), client.state["prototypes"])
        z = embed_with(local_model, extractor(model), client.full_graph)
        return self.logits(z, model["prototypes"])

    def predictor(self, client: Client) -> Message:
        """Returns θ and W."""
        return {**super().predictor(client), "prototypes": client.state["prototypes"]}

    def load_predictor(self, client: Client, kept: Message) -> None:
        """Loads θ and W. The head, which predicts nothing, may be missing."""
        client.state["prototypes"] = kept["prototypes"]
        client.state["model"] = model = client.build()
        load_weights(model, {**weights(model), **extractor(kept)})

    def run(self, server: Server) -> None:
        """Algorithm 1."""
        state, facts = server.state, server.facts
        W = maximally_separated(facts.num_classes, facts.width, server.rng("prototypes"))
        server.ask(self.setup, prototypes=W)
        state["model"] = extractor_weights(server.model()) | {"prototypes": W}
        for _ in server.rounds(self.rounds):
            W = state["model"]["prototypes"]
            mean = server.mean(self.train, model=extractor(state["model"]), prototypes=W)
            W = updated_prototypes(W, mean["directions"], self.rho)
            state["model"] = mean["model"] | {"prototypes": W}
            server.evaluate(model=state["model"])
        self.finish(server)

    def finish(self, server: Server) -> None:
        """As in FedAvg, with W."""
        model = server.state["model"]
        last = {"model": extractor(model), "prototypes": model["prototypes"]}
        for epoch in range(self.finetune):
            server.ask(self.tune, epoch=torch.tensor(epoch), **(last if epoch == 0 else {}))
            server.evaluate(stage="finetune")


def extractor(model: Message) -> Message:
    """Returns θ of a model that also has W."""
    return {
        name: tensor for name, tensor in extractor_weights(model).items() if name != "prototypes"
    }


class Extractor(nn.Module):
    """A model whose forward pass ends before its head, for `functional_call`."""

    def __init__(self, model: Model):
        super().__init__()
        self.model = model

    def forward(self, graph: Graph) -> Tensor:
        """Returns z."""
        return self.model.embed(graph)


def embed_with(model: Model, weights: Message, graph: Graph) -> Tensor:
    """Returns z of a graph, with weights that are not the model's own."""
    renamed = {f"model.{name}": tensor for name, tensor in weights.items()}
    return functional_call(Extractor(model), renamed, (graph,))


def maximally_separated(classes: int, width: int, rng: Generator) -> Tensor:
    """Returns unit vectors [classes, width] whose largest cosine is about as small as possible.

    It is −1/(C − 1) if C ≤ p + 1. The method is descent on Σ_c log Σ_{c' ≠ c} e^{κ cos(W_c, W_c')}
    / κ, which approaches Σ_c max_{c' ≠ c} cos(W_c, W_c') as κ grows.
    """
    W = F.normalize(torch.randn(classes, width, generator=rng))
    if classes == 1:
        return W
    for kappa in torch.logspace(0, 2, 500).tolist():
        gradient = (kappa * (W @ W.T)).fill_diagonal_(-torch.inf).softmax(1)
        # A longer step would overshoot as κ grows.
        W = F.normalize(W - (gradient + gradient.T) @ W / (1 + kappa))
    return W


def updated_prototypes(W: Tensor, directions: Tensor, rho: float) -> Tensor:
    """Returns norm(ρ W_c + (1 − ρ) norm(direction_c)); W_c where the direction is zero."""
    # A direction of zero is normalised to zero. It would leave ρ W_c, or zero if ρ = 0.
    present = (directions != 0).any(1, keepdim=True)
    return torch.where(present, F.normalize(torch.lerp(F.normalize(directions), W, rho)), W)
