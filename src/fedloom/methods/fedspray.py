"""FedSpray: clients keep their models and share an encoder with a structure proxy for each class.

Fu, Chen, Zhang, Chen, Li: "Federated Graph Learning with Structure Proxy Alignment", KDD 2024. A
proxy describes what a neighbourhood of its class looks like.

What travels, per client and round (C classes, w the proxies' width):
    down  model     ω, the feature-structure encoder, and S [C, w], the structure proxies
                    dw + 2wC + w + 2C + wC numbers
    up    model     n_k ω_k and n_k^c S_k[c], the trained ones times the numbers of training nodes
                    as many numbers
          counts    n_k^c, C numbers

    e_i = ReLU(x_i W + b)                                                 `FeatureStructure`
    r_i = softmax of a linear map of e_i (features alone)                 `FeatureStructure`
    s_i = S[y_i] of a training node, Σ_c r_ic S[c] of any other           `targets`
    p_i = softmax of another linear map of e_i + s_i                      `FeatureStructure.joined`
    q_i = what the client's own model predicts
    own model:  min CE(q) + λ_1 mean KL(p_i ‖ q_i)                        `objective`
                over training nodes and those with max_c r_ic > t
    then ω, S:  min CE(r) + λ_2 mean KL(q_i ‖ p_i) over training nodes    `encoder_objective`
    ω ← Σ_k n_k ω_k / Σ n,   S[c] ← Σ_k n_k^c S_k[c] / Σ n^c              `scaled`, `mean_of_sums`
        where n_k = Σ_c n_k^c

The first argument of KL is the teacher: no gradient reaches it. p is computed from the downloaded ω
and S and stays fixed during a round's E epochs. q is computed from the own model after them. The
own model never travels, may have any architecture, and is evaluated. The server needs only sums. A
class that no client of the round has keeps its proxy. If no client has a label, ω stays too. A
client without labelled nodes trains nothing.

Departures. Only the paper's abstract and the authors' code were available. In the code, every
training node has a proxy of its own that it keeps. Unlabelled nodes use the clients' class means of
these, weighted by each class's share of a client's labels. Here proxies belong to classes, as the
paper calls them, all nodes use the downloaded ones, and counts are the weights. The code loads the
map of r with that of p; here they are separate. Proxies start at 0 (there: 0.01 c, and 0.1). The
run's dropout is on the input of both maps (there is none in the code). Adam's weight decay is on ω,
none on S. λ_2 and t, 1 and 0.7 there, are settings. The learning rate there is 3e-3, with 5 epochs
and 500 rounds.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor, nn

from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.core.message import Message
from fedloom.core.phase import phase, summed
from fedloom.core.server import Server
from fedloom.core.settings import setting
from fedloom.data.graph import Graph
from fedloom.methods._shared.local_training import LocalTraining
from fedloom.nn.distillation import divergence
from fedloom.nn.layers import dropout
from fedloom.nn.model import Model
from fedloom.nn.training import make_optimizer, outputs, step
from fedloom.nn.weights import load_weights, weights


@dataclass(frozen=True)
class FedSpray(LocalTraining):
    """Local training towards the class predictions of common proxies."""

    pull: float = setting(
        1.0,
        "λ_1, weight in the own model's loss of the distance to the encoder's predictions",
        at_least=0,
        tune="0.1..10",
    )
    match: float = setting(
        1.0,
        "λ_2, weight in the encoder's loss of the distance to the own model's predictions",
        at_least=0,
        tune="0.1..10",
    )
    sure: float = setting(
        0.7,
        "t, an unlabelled node is reliable if its probability by features alone is above this",
        at_least=0,
        at_most=1,
        tune="0.5..0.95",
    )
    width: int = setting(64, "w, width of the encoder and of the structure proxies", at_least=1)
    proxy_lr: float = setting(
        0.02, "learning rate of the structure proxies", above=0, tune="0.001..0.1"
    )

    tasks: ClassVar[tuple[str, ...]] = ("node",)
    discloses_to_peers: ClassVar[str] = (
        "structure proxies, learnt by all clients that have the class; "
        "by a single client if no other has it"
    )
    needs_of_model: ClassVar[str] = "embeddings"

    # ---- the client's side ----
    @phase()
    def setup(self, client: Client) -> Message:
        """Builds the client's own model, the encoder with its proxies, and an optimiser for each.

        Both optimisers keep their moments over rounds.
        """
        super().setup(client)
        client.state["encoder"] = encoder = FeatureStructure(client.facts, self.width)
        maps = [p for name, p in encoder.named_parameters() if name != "proxies"]
        groups: list[dict[str, Any]] = [
            {"params": maps},
            {"params": [encoder.proxies], "lr": self.proxy_lr, "weight_decay": 0.0},
        ]
        client.state["encoder optimizer"] = make_optimizer(
            self.optimizer, groups, self.lr, self.weight_decay
        )
        return {}

    @summed
    @phase(model="~model", counts="int64[C] counts train")
    def train(self, client: Client, model: Message) -> Message:
        """Trains the own model towards the encoder, then the encoder towards the own model.

        Each is trained for E epochs.
        """
        local_model, encoder, graph = client.state["model"], client.state["encoder"], client.graph
        load_weights(encoder, model)
        self.descend(client, local_model, targets(encoder, graph, self.sure))
        with torch.no_grad():
            predicted = local_model(graph)
        for _ in range(self.epochs):
            for batch in client.shuffled(self.batch_size):
                loss = self.encoder_objective(client, batch, predicted)
                step(client.state["encoder optimizer"], loss)
        counts = torch.bincount(graph.y[graph.train], minlength=client.facts.num_classes)
        return {"model": scaled(weights(encoder), counts), "counts": counts}

    def objective(self, client: Client, batch: Graph, model: Model, received: Message) -> Tensor:
        """Returns CE + λ_1 KL(p ‖ q).

        received: the logits of p, and which nodes are reliable; see `targets`.
        """
        logits, reliable = model(batch, client.rng("dropout")), received["reliable"]
        pull = divergence(received["logits"][reliable], logits[reliable])
        return client.loss(logits, batch) + self.pull * pull

    def encoder_objective(self, client: Client, batch: Graph, predicted: Tensor) -> Tensor:
        """Returns CE + λ_2 KL(q ‖ p) of the encoder and the proxies.

        predicted: the logits of q.
        """
        encoder, rng, train = client.state["encoder"], client.rng("encoder dropout"), batch.train
        e, alone = encoder(batch, rng)
        joined = encoder.joined(e[train], encoder.proxies[batch.y[train]], batch, rng)
        own = client.loss(alone, batch, record=False)
        return own + self.match * divergence(predicted[train], joined)

    # ---- the server's side ----
    def run(self, server: Server) -> None:
        """The rounds."""
        server.ask(self.setup)
        state = server.state
        state["model"] = weights(FeatureStructure(server.facts, self.width))
        for _ in server.rounds(self.rounds):
            total = server.sum(self.train, model=state["model"])
            state["model"] = mean_of_sums(total["model"], total["counts"], state["model"])
            server.evaluate()


class FeatureStructure(nn.Module):
    """The encoder: e of a node's features, the maps of r and p, and a proxy for each class."""

    def __init__(self, facts: Facts, width: int):
        super().__init__()
        spec = f"mlp-2x{width}"
        self.features = facts.build(spec, "server", "features")  # its head is the map of r
        self.structure = facts.build(spec, "server", "structure").classifier
        self.proxies = nn.Parameter(torch.zeros(facts.num_classes, width))

    def forward(self, graph: Graph, rng: Generator | None = None) -> tuple[Tensor, Tensor]:
        """Takes a graph, returns e [nodes, w] and the logits of r [nodes, C]."""
        return outputs(self.features, graph, rng)

    def joined(self, e: Tensor, s: Tensor, graph: Graph, rng: Generator | None = None) -> Tensor:
        """Takes e and proxies [m, w] of some nodes, returns the logits of p [m, C]."""
        return self.structure(dropout(e + s, self.features.dropout, rng).matmul, graph)


@torch.no_grad()
def targets(encoder: FeatureStructure, graph: Graph, sure: float) -> Message:
    """Returns the logits of p for all nodes, without dropout, and which nodes are reliable."""
    e, alone = encoder(graph)
    r = alone.softmax(1)
    own = encoder.proxies[graph.y]  # the y of nodes outside the training set is -1, and not used
    s = torch.where(graph.train.unsqueeze(1), own, r @ encoder.proxies)
    return {"logits": encoder.joined(e, s, graph), "reliable": graph.train | (r.amax(1) > sure)}


def scaled(model: Message, counts: Tensor) -> Message:
    """Returns n_k ω and n_k^c S[c], which the server sums."""
    return {name: tensor * count for name, (tensor, count) in _with_count(model, counts).items()}


def mean_of_sums(total: Message, counts: Tensor, last: Message) -> Message:
    """Returns means from sums of `scaled` and of counts; `last` where the count is 0."""
    return {
        name: torch.where(count > 0, tensor / count.clamp(min=1), last[name])
        for name, (tensor, count) in _with_count(total, counts).items()
    }


def _with_count(model: Message, counts: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Pairs every tensor with its node count: a proxy with its class's, others with the total."""
    return {
        name: (tensor, counts.unsqueeze(1) if name == "proxies" else counts.sum())
        for name, tensor in model.items()
    }
