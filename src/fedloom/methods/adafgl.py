"""AdaFGL: FedAvg, then each client trains own networks on a graph rewired by the predictions.

Li, Wu, Zhang, Sun, Li, Wang: "AdaFGL: A New Paradigm for Federated Node Classification with
Topology Heterogeneity", ICDE 2024.

What travels: as in FedAvg; after the last round θ once more, down. The personal stage sends
nothing.

    F = the last θ's logits, P = softmax F, U = P with rows of length 1   `rewire`
    M = α A + (1 − α) (U Uᵀ − I)                                          `Rewired`
    S = D^-½ (M + I) D^-½,  D = the row sums of M + I                     `Rewired`
    homophilous branch
        H = MLP [X ‖ SX ‖ ... ‖ S^K X]                                    `Personal.views`
        min CE(H) + λ · mean (softmax H − P)²                             `personal_objective`
        Y_ho = (softmax H + P) / 2                                        `Personal.probabilities`
    heterophilous branch
        H_1 = MLP X,  H_2 = MLP [X ‖ ... ‖ S^K X],                        `Personal.views`
        H_3 = Q of another such MLP
        min CE(H_1) + CE(H_2) + CE(H_3)                                   `personal_objective`
        Y_he = mean of softmax H_1, H_2, H_3                              `Personal.probabilities`
        Q(Z) = (Z + softmax(L Z / L 1) − softmax(N Z / max(N 1, 1))) / 2  `push_and_pull`
        L = β U Uᵀ + (1 − β) V Vᵀ,  N = 1 1ᵀ − L,
        V = softmax Z with rows of length 1
    confidence h
        hide a share of the training labels, propagate the others k times `confidence`
        by Y ← κ S_A Y + (1 − κ) Y⁰; h = share of the hidden ones recovered
    predicted
        h Y_ho + (1 − h) Y_he                                             `Personal.probabilities`

A is the adjacency, S_A its usual S. The MLPs on smoothed features are the package's SIGN, as wide
as the federated model's embedding. U Uᵀ is n × n, but only its products are needed: U Uᵀ h =
U (Uᵀ h), its diagonal is 1, its row sums are U (Uᵀ 1). All work is linear in nodes and edges. The
run's final models hold what prediction needs: θ, the four networks, and h. With too few labels to
hide one and keep one, h = ½. A client without labels keeps the federated model. With `finetune`,
the federated model is trained locally before F is computed.

Departures from the authors' code. The first two keep U Uᵀ in its factors. The code rounds U Uᵀ to 0
or 1 at a similarity of 0.999, of predictions that went through softmax twice. It centres the
learned similarities, separates positive and negative entries, and flips the order of the negative
ones. Here pull is by similarity and push by its difference to 1, both means (there: sums). U Uᵀ has
about n / C per row where A has a few edges, so that α has little effect unless it is near 1. H and
P are compared as probabilities (there H's logits with P). There, clients with h above a threshold
have only the homophilous branch, others only the heterophilous one; the mixture is the paper's.
Networks have two layers and ReLU (there two or three, and PReLU). Labels that are not hidden are
not added again at every step.
"""

from dataclasses import dataclass, field, fields
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from fedloom.core.client import Client
from fedloom.core.message import Message
from fedloom.core.phase import phase, runs_once
from fedloom.core.server import Server
from fedloom.core.settings import setting
from fedloom.data.graph import Graph
from fedloom.methods.fedavg import FedAvg
from fedloom.nn.model import Model
from fedloom.nn.training import make_optimizer, step
from fedloom.nn.weights import load_weights


@dataclass(frozen=True, eq=False)
class Rewired(Graph):
    """A graph whose products are with S: its own edges, plus links weighted by similar predictions.

    Every pair of nodes has such a link.
    """

    logits: Tensor = field(kw_only=True)  # F, [nodes, classes]
    alpha: float = field(kw_only=True)

    @property
    def unit_predictions(self) -> Tensor:
        """U, [nodes, classes]. U Uᵀ are the cosines of the nodes' predictions."""
        return self.cached("unit predictions", lambda: unit_rows(self.logits.softmax(1)))

    def propagate(self, h: Tensor, kind: str = "sym") -> Tensor:
        """Returns S h; there is no other kind."""
        ones = torch.ones(self.num_nodes, 1)
        scale: Tensor = self.cached("scale", lambda: self._sum(ones).rsqrt())
        return scale * self._sum(scale * h)

    def _sum(self, h: Tensor) -> Tensor:
        """Returns (M + I) h."""
        U = self.unit_predictions
        return self.alpha * (self.adjacency("sum") @ h) + (1 - self.alpha) * (U @ (U.T @ h) - h) + h


@dataclass(frozen=True)
class AdaFGL(FedAvg):
    """FedAvg, then personal networks."""

    personal: int = setting(100, "epochs of the personal stage", at_least=1)
    alpha: float = setting(
        0.98,
        "α, weight of the edges in the rewired graph; the rest is for similar predictions",
        at_least=0,
        at_most=1,
        tune="0.5..1",
    )
    hops: int = setting(3, "K, how often features are smoothed", at_least=1, tune="1..5")
    preserve: float = setting(
        1.0,
        "λ, weight of the distance to the federated model's predictions",
        at_least=0,
        tune="0.1..10",
    )
    beta: float = setting(
        0.2,
        "β, weight of the federated predictions in the similarities of push and pull",
        at_least=0,
        at_most=1,
        tune="0..1",
    )
    hide: float = setting(
        0.5, "share of the training labels that are hidden to measure homophily", above=0, below=1
    )
    spread_steps: int = setting(10, "k, steps of label propagation", at_least=1)
    spread: float = setting(
        0.5, "κ, share of a step that comes from the neighbours", above=0, at_most=1
    )

    tasks: ClassVar[tuple[str, ...]] = ("node",)

    @runs_once
    @phase()
    def prepare(self, client: Client, model: Message | None = None) -> Message:
        """Builds the rewired graph, measures its homophily, and builds new networks."""
        local_model, graph = client.state["model"], client.graph
        if model is not None:
            load_weights(local_model, model)
        if not graph.train.any():
            return {}
        rewired = full = rewire(graph, local_model, self.alpha)
        if graph.num_nodes != client.full_graph.num_nodes:  # an inductive run
            full = rewire(client.full_graph, local_model, self.alpha)
        client.memory |= {"rewired": rewired, "rewired full graph": full}
        h = confidence(graph, self.hide, self.spread_steps, self.spread, client.rng("hide"))
        client.state["model"] = personal = Personal(client, local_model, h, self.hops, self.beta)
        trained = [p for p in personal.parameters() if p.requires_grad]
        client.state["optimizer"] = make_optimizer(
            self.optimizer, trained, self.lr, self.weight_decay
        )
        return {}

    @runs_once
    @phase()
    def personalise(self, client: Client, epoch: Tensor) -> Message:
        """Trains the personal networks for one epoch.

        epoch: its number, which tells the next epoch from this one delivered twice.
        """
        if isinstance(client.state["model"], Personal):
            step(client.state["optimizer"], self.personal_objective(client))
        return {}

    def personal_objective(self, client: Client) -> Tensor:
        """Returns the loss of the personal networks, of both branches: they share no weights."""
        rewired, graph = client.memory["rewired"], client.graph
        views = client.state["model"].views(rewired, client.rng("personal"))
        distance = F.mse_loss(views[0].softmax(1), rewired.logits.softmax(1))
        return sum((client.loss(logits, graph) for logits in views), self.preserve * distance)

    def predict(self, client: Client, model: Message | None) -> Tensor:
        """Returns log-probabilities of both branches; before the personal stage, as in FedAvg."""
        local_model = client.state["model"]
        if not isinstance(local_model, Personal):
            return super().predict(client, model)
        rewired = client.memory.get("rewired full graph")
        if rewired is None:  # after the run
            rewired = rewire(client.full_graph, local_model.federated, self.alpha)
        probabilities = local_model.probabilities(rewired)
        return probabilities.clamp(min=torch.finfo(torch.float32).tiny).log()

    def load_predictor(self, client: Client, kept: Message) -> None:
        """Loads the personal networks; θ alone where the client has no labels."""
        if "confidence" not in kept:
            super().load_predictor(client, kept)
            return
        client.state["model"] = model = Personal(client, client.build(), 0.5, self.hops, self.beta)
        load_weights(model, kept)

    def run(self, server: Server) -> None:
        """FedAvg's rounds, then the personal stage, of which the run reports the best epoch."""
        super().run(server)
        server.ask(self.prepare, **({} if self.finetune else {"model": server.state["model"]}))
        for epoch in range(self.personal):
            server.ask(self.personalise, epoch=torch.tensor(epoch))
            server.evaluate(stage="personal")


class Personal(nn.Module):
    """A client's networks, the federated model, and the weight h of the homophilous branch."""

    def __init__(self, client: Client, federated: Model, confidence: float, hops: int, beta: float):
        super().__init__()
        self.beta = beta
        self.federated = federated.requires_grad_(False)
        self.confidence = nn.Parameter(torch.tensor(confidence), requires_grad=False)
        smooth, plain = f"sign-{hops}x{client.facts.width}", f"mlp-2x{client.facts.width}"
        build = client.facts.build
        self.homophilous = build(smooth, client.name, "homophilous")
        self.features, self.smooth, self.learnt = (
            build(spec, client.name, part)
            for spec, part in ((plain, "features"), (smooth, "smooth"), (smooth, "learnt"))
        )

    def views(
        self, graph: Rewired, rng: Generator | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns H, H_1, H_2, H_3, each [nodes, classes]."""
        learnt = push_and_pull(self.learnt(graph, rng), graph.unit_predictions, self.beta)
        return (
            self.homophilous(graph, rng),
            self.features(graph, rng),
            self.smooth(graph, rng),
            learnt,
        )

    def probabilities(self, graph: Rewired) -> Tensor:
        """Returns h Y_ho + (1 − h) Y_he, [nodes, classes]."""
        homophilous, *heterophilous = (logits.softmax(1) for logits in self.views(graph))
        Y_ho = (homophilous + graph.logits.softmax(1)) / 2
        Y_he = torch.stack(heterophilous).mean(0)
        return torch.lerp(Y_he, Y_ho, self.confidence)


@torch.no_grad()
def rewire(graph: Graph, model: Model, alpha: float) -> Rewired:
    """Returns the graph, rewired by the federated model's predictions."""
    own = {f.name: getattr(graph, f.name) for f in fields(Graph) if f.init}
    result = Rewired(**own, logits=model(graph), alpha=alpha)
    result.cached("features", lambda: graph.sparse_x)
    return result


def unit_rows(p: Tensor) -> Tensor:
    """Returns probabilities [nodes, classes] with rows of length 1."""
    return p / p.norm(dim=1, keepdim=True)


def push_and_pull(Z: Tensor, U: Tensor, beta: float) -> Tensor:
    """Returns Q(Z): nodes move towards the outputs of similar nodes and away from the others'."""
    V = unit_rows(Z.softmax(1))
    n, ones = len(Z), Z.new_ones(len(Z), 1)
    LZ, L1 = (beta * (U @ (U.T @ h)) + (1 - beta) * (V @ (V.T @ h)) for h in (Z, ones))
    # L1 >= 1: every node is similar to itself. N1 is 0 if all nodes are equal. Then there is no
    # push; without the clamp, rounding errors would make one.
    pull, push = LZ / L1, (Z.sum(0) - LZ) / (n - L1).clamp(min=1)
    return (Z + pull.softmax(1) - push.softmax(1)) / 2


@torch.no_grad()
def confidence(graph: Graph, hide: float, steps: int, spread: float, rng: Generator) -> float:
    """Returns h: the share of some hidden training labels that propagation recovers.

    It is ½ if there are too few labels.
    """
    labelled = graph.train.nonzero().flatten()
    labelled = labelled[torch.randperm(len(labelled), generator=rng)]
    count = round(hide * len(labelled))
    hidden, known = labelled[:count], labelled[count:]
    if len(hidden) == 0 or len(known) == 0:
        return 0.5
    start = torch.zeros(graph.num_nodes, graph.num_classes)
    start[known, graph.y[known]] = 1
    soft = start
    for _ in range(steps):
        soft = spread * graph.propagate(soft) + (1 - spread) * start
    largest, guess = soft[hidden].max(1)
    recovered = (guess == graph.y[hidden]) & (largest > 0)  # 0: no label has reached the node
    return recovered.float().mean().item()
