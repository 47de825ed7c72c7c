"""FedSpray: clients keep their models, and share a small encoder that is told, class by class, what a neighbourhood should look like.

Fu, Chen, Zhang, Chen, Li: "Federated Graph Learning with Structure Proxy Alignment", KDD 2024.

What travels, per client and round (C classes, w the proxies' width):
    down  model             ω, the feature-structure encoder, and S [C, w], the structure proxies        dw + 2wC + w + 2C + wC numbers
    up    model, counts     n_k ω_k and n_k^c S_k[c], the trained ones by numbers of training nodes; n_k^c        as many, and C more

    e_i = ReLU(x_i W + b),   r_i = softmax of a linear map of e_i (features alone)                       `FeatureStructure`
    s_i = S[y_i] of a training node, Σ_c r_ic S[c] of any other                                          `targets`
    p_i = softmax of another linear map of e_i + s_i;   q_i = what the client's own model predicts
    own model:  min CE(q) + λ_1 mean KL(p_i ‖ q_i) over training nodes and those with max_c r_ic > t     `objective`
    then ω, S:  min CE(r) + λ_2 mean KL(q_i ‖ p_i) over training nodes                                   `encoder_objective`
    ω ← Σ_k n_k ω_k / Σ n,   S[c] ← Σ_k n_k^c S_k[c] / Σ n^c,   n_k = Σ_c n_k^c                          `scaled`, `mixed`

The first argument of KL teaches: no gradient reaches it. p is of the downloaded ω and S and stays as it is over a round's E epochs; q is of
the own model after them. The own model never travels, may be of any architecture, and is what is evaluated. The server needs sums alone. A
class that no client of the round has keeps its proxy; if nobody has a label, ω stays too. A client without labelled nodes trains nothing.

Departures. The paper was at hand as its abstract and the authors' code. There every training node has a proxy of its own that it never
gives up, and the clients' class means of these, weighted by each class's share of a client's labels, are what unlabelled nodes use; here
proxies are of classes, as the paper calls them, all nodes use the downloaded ones, and counts weigh. The code loads r's map with that of p;
here each is its own. Proxies start at 0 (there: 0.01 c, and 0.1). Noise: the run's dropout is on the input of both maps (there is none).
Adam's weight decay is on ω, none on S. λ_2 and t, there 1 and 0.7, can be set; lr is 3e-3 there, with 5 epochs and 500 rounds.
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
from fedloom.methods._shared.copilot import divergence
from fedloom.methods._shared.local_training import LocalTraining
from fedloom.nn.layers import dropout
from fedloom.nn.model import Model
from fedloom.nn.training import make_optimizer, outputs, step
from fedloom.nn.weights import load_weights, weights


@dataclass(frozen=True)
class FedSpray(LocalTraining):
    """Local training towards what common proxies say a node's class is."""

    pull: float = setting(
        1.0,
        "λ_1, weight of the distance to the encoder's predictions in the own model's loss",
        at_least=0,
        tune="0.1..10",
    )
    match: float = setting(
        1.0,
        "λ_2, weight of the distance to the own model's predictions in the encoder's loss",
        at_least=0,
        tune="0.1..10",
    )
    sure: float = setting(
        0.7,
        "t, probability above which features alone make an unlabelled node reliable",
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
        "structure proxies of classes, learnt by all clients that have the class: by one alone, if no other has it"
    )

    # ---- the client's side ----
    @phase()
    def setup(self, client: Client) -> Message:
        """The client's own model, the encoder with its proxies, and an optimiser for each that keeps its moments over rounds."""
        super().setup(client)
        client.state["encoder"] = model = FeatureStructure(client.facts, self.width)
        maps = [p for name, p in model.named_parameters() if name != "proxies"]
        groups: list[dict[str, Any]] = [
            {"params": maps},
            {"params": [model.proxies], "lr": self.proxy_lr, "weight_decay": 0.0},
        ]
        client.state["encoder optimizer"] = make_optimizer(
            self.optimizer, groups, self.lr, self.weight_decay
        )
        return {}

    @summed
    @phase(model="~model", counts="int64[C]")
    def train(self, client: Client, model: Message) -> Message:
        """E epochs of the own model on what the encoder says; then E epochs of the encoder on what the own model says."""
        local_model, encoder, graph = client.state["model"], client.state["encoder"], client.graph
        load_weights(encoder, model)
        self.descend(client, local_model, targets(encoder, graph, self.sure))
        with torch.no_grad():
            said = local_model(graph)
        for _ in range(self.epochs):
            for batch in client.shuffled(self.batch_size):
                step(client.state["encoder optimizer"], self.encoder_objective(client, batch, said))
        counts = torch.bincount(graph.y[graph.train], minlength=client.facts.num_classes)
        return {"model": scaled(weights(encoder), counts), "counts": counts}

    def objective(
        self, client: Client, batch: Graph, model: Model, received: Message | None
    ) -> Tensor:
        """CE + λ_1 KL(p ‖ q); `model` is p's logits, and which nodes are reliable."""
        assert received is not None
        logits, reliable = model(batch, client.rng("dropout")), received["reliable"]
        return client.loss(logits, batch) + self.pull * divergence(
            received["logits"][reliable], logits[reliable]
        )

    def encoder_objective(self, client: Client, batch: Graph, said: Tensor) -> Tensor:
        """CE + λ_2 KL(q ‖ p) of the encoder and the proxies; `said` is q's logits."""
        encoder, rng, own = client.state["encoder"], client.rng("encoder dropout"), batch.train
        e, alone = encoder(batch, rng)
        joined = encoder.joined(e[own], encoder.proxies[batch.y[own]], batch, rng)
        return client.loss(alone, batch) + self.match * divergence(said[own], joined)

    # ---- the server's side ----
    def run(self, server: Server) -> None:
        """The rounds."""
        server.ask(self.setup)
        state = server.state
        state["model"] = weights(FeatureStructure(server.facts, self.width))
        for _ in server.rounds(self.rounds):
            total = server.sum(self.train, model=state["model"])
            state["model"] = mixed(total["model"], total["counts"], state["model"])
            server.evaluate()


class FeatureStructure(nn.Module):
    """e of a node's features, what e says of its class alone, what it says with a proxy beside it; and a proxy for each class."""

    def __init__(self, facts: Facts, width: int):
        super().__init__()
        spec = f"mlp-2x{width}"
        self.features = facts.build(spec, "server", "features")  # its head is r's map
        self.structure = facts.build(spec, "server", "structure").classifier
        self.proxies = nn.Parameter(torch.zeros(facts.num_classes, width))

    def forward(self, graph: Graph, rng: Generator | None = None) -> tuple[Tensor, Tensor]:
        """Takes a graph, gives e [nodes, w] and r's logits [nodes, C]."""
        return outputs(self.features, graph, rng)

    def joined(self, e: Tensor, s: Tensor, graph: Graph, rng: Generator | None = None) -> Tensor:
        """Takes e and proxies [m, w] of some nodes, gives p's logits [m, C]."""
        return self.structure(dropout(e + s, self.features.dropout, rng).matmul, graph)


@torch.no_grad()
def targets(encoder: FeatureStructure, graph: Graph, sure: float) -> Message:
    """p's logits of all nodes, noise off, and which nodes are reliable."""
    e, alone = encoder(graph)
    r = alone.softmax(1)
    s = torch.where(
        graph.train.unsqueeze(1), encoder.proxies[graph.y], r @ encoder.proxies
    )  # y is -1 where it is not looked at
    return {"logits": encoder.joined(e, s, graph), "reliable": graph.train | (r.amax(1) > sure)}


def scaled(model: Message, counts: Tensor) -> Message:
    """n_k ω and n_k^c S[c]: what is added up."""
    return {name: tensor * by for name, (tensor, by) in _by(model, counts).items()}


def mixed(total: Message, counts: Tensor, last: Message) -> Message:
    """The means from sums of `scaled` and of counts; where nothing was added up, what was there before."""
    return {
        name: torch.where(by > 0, tensor / by.clamp(min=1), last[name])
        for name, (tensor, by) in _by(total, counts).items()
    }


def _by(model: Message, counts: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Every tensor beside the numbers of nodes that it counts by: a proxy by its own class's, the rest by all."""
    return {
        name: (tensor, counts.unsqueeze(1) if name == "proxies" else counts.sum())
        for name, tensor in model.items()
    }
