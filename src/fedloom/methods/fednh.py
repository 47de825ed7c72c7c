"""FedNH: the classifier is one direction a class, spread as far apart as they go, fixed while clients train, moved slowly towards the data.

Dai, Chen, Li, Heinecke, Sun, Xu: "Tackling Data Heterogeneity in Federated Learning with Class Prototypes", AAAI 2023, Algorithm 1.

What travels, per client (C classes, p the embedding's width):
    once     up    size          number of local items n_k
             down  prototypes    W, C unit vectors
    a round  down  model         θ, the extractor's weights;   prototypes  W
             up    model         θ_k
                   directions    n_k^c μ_k[c] / n_k; zero for a class that the client does not have

    W = argmin max_{c ≠ c'} cos(W_c, W_c') to begin with                                    `spread`
    logits of item i = s · cos(z_i, W)                                                      `logits`, `predict`
    min CE over θ_k alone                                                                   `objective`
    μ_k[c] = norm(mean of norm(z_i) over the client's n_k^c training items of class c)      `train`
    W_c ← norm(ρ W_c + (1 − ρ) norm(Σ_k n_k^c μ_k[c])),   θ ← Σ_k (n_k / Σ n) θ_k           `run`, `moved`

The server needs means alone. In a plain run the length of a client's direction times n_k is its class count; with `--secure` neither is
seen, but the direction of a class that a single client has is that client's own, and every client can solve for it from W's move. A class
that nobody has leaves W_c where it is. The model's own head ("classifier.") is neither used nor sent: what it would do on the graph is not
done, so that "gcn-2x64" has one convolution left; "gcn-2x64+linear" has two, and a head that is replaced by its like.
Local evaluation is with the W of the client's last download, global with the new one.

Departures: s is fixed (the authors' code offers 30, fixed, and else learns it with θ). W begins as the paper says, found by descent; the
authors' code takes orthogonal rows. The clients' mean is scaled to length 1 before it is mixed in (the paper mixes the mean
itself). The head's dropout on z stays. Clients count by n_k (the paper: alike), as everywhere in this package.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.func import functional_call

from fedloom.core.client import Client
from fedloom.core.message import Message
from fedloom.core.phase import averaged, phase
from fedloom.core.server import Server
from fedloom.core.settings import setting
from fedloom.data.graph import Graph
from fedloom.methods._shared.prototypes import class_sums
from fedloom.methods.fedavg import FedAvg
from fedloom.nn.layers import dropout
from fedloom.nn.model import Model
from fedloom.nn.training import step
from fedloom.nn.weights import body, load_weights, weights


@dataclass(frozen=True)
class FedNH(FedAvg):
    """FedAvg of the extractor under a head of prototypes."""

    rho: float = setting(
        0.9,
        "ρ, how much of the old prototypes stays each round",
        at_least=0,
        at_most=1,
        tune="0.1..0.99",
    )
    scale: float = setting(30.0, "s, factor of the cosines in the logits", above=0, tune="5..50")

    discloses_to_peers: ClassVar[str] = (
        "class means' directions over all clients: of one alone, if no other has the class"
    )

    @phase()
    def setup(self, client: Client, prototypes: Tensor) -> Message:
        """As in FedAvg; W besides, for clients that are scored before they first take part."""
        client.state["prototypes"] = prototypes
        return super().setup(client)

    @averaged(by="size")
    @phase(model="~model", directions="float32[C,p]")
    def train(self, client: Client, model: Message, prototypes: Tensor) -> Message:
        """E local epochs from the global extractor under the fixed W; then where the classes lie."""
        local_model, graph = client.state["model"], client.graph
        self.take(client, model, prototypes)
        self.descend(client, local_model, model)
        with torch.no_grad():
            sums, counts = class_sums(
                F.normalize(local_model.embed(graph)),
                graph.y,
                graph.train,
                client.facts.num_classes,
            )
        share = counts / self.size(client)["size"]  # the mean over clients multiplies by n_k
        return {
            "model": body(weights(local_model)),
            "directions": share.unsqueeze(1) * F.normalize(sums),
        }

    @phase()
    def tune(
        self, client: Client, model: Message | None = None, prototypes: Tensor | None = None
    ) -> Message:
        """One more local epoch, the first from the last download; the result stays with the client."""
        if model is not None and prototypes is not None:
            self.take(client, model, prototypes)
        for batch in client.shuffled(self.batch_size):
            step(
                client.state["optimizer"],
                self.objective(client, batch, client.state["model"], model),
            )
        return {}

    def take(self, client: Client, model: Message, prototypes: Tensor) -> None:
        """Puts the extractor's weights into the model, and W beside it."""
        local_model = client.state["model"]
        load_weights(local_model, weights(local_model) | model)
        client.state["prototypes"] = prototypes

    def logits(self, z: Tensor, prototypes: Tensor) -> Tensor:
        """s · cos(z, W)."""
        length = z.norm(dim=1, keepdim=True)
        return (
            self.scale * (z / length.where(length > 0, 1.0)) @ prototypes.T
        )  # F.normalize has a gradient of 1e12 where z = 0

    def objective(
        self, client: Client, batch: Graph, model: Model, global_weights: Message | None
    ) -> Tensor:
        """CE under the prototypes."""
        rng = client.rng("dropout")
        z = dropout(model.embed(batch, rng), model.dropout, rng)
        return client.loss(self.logits(z, client.state["prototypes"]), batch)

    def predict(self, client: Client, model: Message | None) -> Tensor:
        """The same without noise; `model` is θ and W."""
        local_model = client.state["model"]
        if model is None:
            return self.logits(local_model.embed(client.full_graph), client.state["prototypes"])
        return self.logits(
            embedded(local_model, extractor(model), client.full_graph), model["prototypes"]
        )

    def run(self, server: Server) -> None:
        """Algorithm 1."""
        state, facts = server.state, server.facts
        W = spread(facts.num_classes, facts.width, server.rng("prototypes"))
        server.ask(self.setup, prototypes=W)
        state["model"] = body(server.model()) | {"prototypes": W}
        for _ in server.rounds(self.rounds):
            W = state["model"]["prototypes"]
            mean = server.mean(self.train, model=extractor(state["model"]), prototypes=W)
            state["model"] = mean["model"] | {"prototypes": moved(W, mean["directions"], self.rho)}
            server.evaluate(model=state["model"])
        self.finish(server)

    def finish(self, server: Server) -> None:
        """As in FedAvg, with W."""
        model = server.state["model"]
        for epoch in range(self.finetune):
            server.ask(
                self.tune,
                **(
                    {"model": extractor(model), "prototypes": model["prototypes"]}
                    if epoch == 0
                    else {}
                ),
            )
            server.evaluate(stage="finetune")


def extractor(model: Message) -> Message:
    """θ of a model that also has W."""
    return {name: tensor for name, tensor in body(model).items() if name != "prototypes"}


class Extractor(nn.Module):
    """A model whose forward pass ends before its head: what `functional_call` can call."""

    def __init__(self, model: Model):
        super().__init__()
        self.model = model

    def forward(self, graph: Graph) -> Tensor:
        """z."""
        return self.model.embed(graph)


def embedded(local_model: Model, model: Message, graph: Graph) -> Tensor:
    """z of a graph under other weights than the model's own."""
    return functional_call(
        Extractor(local_model),
        {f"model.{name}": tensor for name, tensor in model.items()},
        (graph,),
    )


def spread(classes: int, width: int, rng: Generator) -> Tensor:
    """Unit vectors [classes, width] whose largest cosine is about as small as can be: −1/(C − 1) as long as C ≤ p + 1.

    Descent on Σ_c log Σ_{c' ≠ c} e^{κ cos(W_c, W_c')} / κ, which nears Σ_c max_{c' ≠ c} cos(W_c, W_c') as κ grows.
    """
    W = F.normalize(torch.randn(classes, width, generator=rng))
    if classes == 1:
        return W
    for kappa in torch.logspace(0, 2, 500).tolist():
        pushed = (kappa * (W @ W.T)).fill_diagonal_(-torch.inf).softmax(1)
        W = F.normalize(
            W - (pushed + pushed.T) @ W / (1 + kappa)
        )  # a longer step would overshoot as κ grows
    return W


def moved(W: Tensor, directions: Tensor, rho: float) -> Tensor:
    """norm(ρ W_c + (1 − ρ) norm(direction_c)); W_c where there is no direction."""
    # A direction of zero is normalised to zero: what is left is ρ W_c, or nothing at all if ρ = 0.
    there = (directions != 0).any(1, keepdim=True)
    return torch.where(there, F.normalize(torch.lerp(F.normalize(directions), W, rho)), W)
