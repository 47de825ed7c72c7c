"""AdaFGL: FedAvg, and then every client trains networks of its own on a graph that the federated model's predictions have redrawn.

Li, Wu, Zhang, Sun, Li, Wang: "AdaFGL: A New Paradigm for Federated Node Classification with Topology Heterogeneity", ICDE 2024.

What travels: as in FedAvg; after the last round θ once more, down. The personal stage sends nothing.

    F = the last θ's logits, P = softmax F, U = P with every row at length 1                        `redrawn`
    M = α A + (1 − α) (U Uᵀ − I),  S = D^-½ (M + I) D^-½,  D = the row sums of M + I                `Redrawn`
    homophilous      H = MLP [X ‖ SX ‖ ... ‖ S^K X];  min CE(H) + λ · mean (softmax H − P)²         `personal_objective`
                     Y_ho = (softmax H + P) / 2                                                     `Personal.probabilities`
    heterophilous    H_1 = MLP X,  H_2 = MLP [X ‖ ... ‖ S^K X],  H_3 = Q of another such MLP        `Personal.views`
                     min CE(H_1) + CE(H_2) + CE(H_3);  Y_he = mean of softmax H_1, H_2, H_3         `personal_objective`
                     Q(Z) = (Z + softmax(L Z / L 1) − softmax(N Z / max(N 1, 1))) / 2,
                     L = β U Uᵀ + (1 − β) V Vᵀ,  N = 1 1ᵀ − L,  V = rows of softmax Z at length 1   `push_and_pull`
    confidence h     hide a share of the training labels, spread the others k times by
                     Y ← κ S_A Y + (1 − κ) Y⁰; h = share of the hidden ones that come back          `confidence`
    predicted        h Y_ho + (1 − h) Y_he                                                          `Personal.probabilities`

A is the adjacency, S_A its usual S. The MLPs on smoothed features are the package's SIGN, as wide as the federated model's embedding.
U Uᵀ is n × n, but nothing here asks for more than its products: U Uᵀ h = U (Uᵀ h), its diagonal is 1, its row sums are U (Uᵀ 1). All
is linear in nodes and edges. The result's models hold what prediction takes: θ, the four networks, and h. With too few labels to hide one
and keep one, h = ½. A client without any keeps the federated model. With `finetune` that is trained on locally before it is asked for F.

Departures from the authors' code, of which the first two keep U Uᵀ in its factors. It makes U Uᵀ 0 or 1 at a similarity of 0.999, of
predictions that went through softmax twice. It centres the learnt similarities, takes positive and negative entries apart, and flips the
order of the negative ones; here pull is by similarity and push by what it lacks to 1, both means (there: sums). U Uᵀ has about n / C to a
row where A has a few edges, so that α counts for little unless it is near 1. H and P are compared as probabilities (there H's logits with
P). There, clients with h above a threshold have the homophilous branch alone, others the heterophilous; mixing is the paper's. Networks
have two layers and ReLU (there two or three, and PReLU). Labels that are not hidden are not added once more at every step.
"""

from dataclasses import dataclass, fields
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from fedloom.core.client import Client
from fedloom.core.message import Message
from fedloom.core.phase import phase
from fedloom.core.server import Server
from fedloom.core.settings import setting
from fedloom.data.graph import Graph
from fedloom.methods.fedavg import FedAvg
from fedloom.nn.model import Model
from fedloom.nn.training import make_optimizer, step
from fedloom.nn.weights import load_weights


@dataclass(frozen=True, eq=False)
class Redrawn(Graph):
    """A graph whose products are with S: its own edges, and links of all nodes to all by how alike their predictions are."""

    logits: Tensor = None  # type: ignore[assignment]  # [nodes, classes]: F
    alpha: float = 1.0

    @property
    def alike(self) -> Tensor:
        """U, [nodes, classes]: U Uᵀ are the cosines of the nodes' predictions."""
        return self.cached("alike", lambda: directions(self.logits.softmax(1)))

    def propagate(self, h: Tensor, kind: str = "sym") -> Tensor:
        """S h; there is no other kind."""
        scale: Tensor = self.cached(
            "scale", lambda: self._linked(torch.ones(self.num_nodes, 1)).rsqrt()
        )
        return scale * self._linked(scale * h)

    def _linked(self, h: Tensor) -> Tensor:
        """(M + I) h."""
        U = self.alike
        return self.alpha * (self.adjacency("sum") @ h) + (1 - self.alpha) * (U @ (U.T @ h) - h) + h


@dataclass(frozen=True)
class AdaFGL(FedAvg):
    """FedAvg, then personal networks."""

    personal: int = setting(100, "epochs of the personal stage", at_least=1)
    alpha: float = setting(
        0.98,
        "α, the edges' part in the redrawn graph; the rest is for alike predictions",
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
        "β, the federated predictions' part in who pulls and who pushes",
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

    @phase()
    def prepare(self, client: Client, model: Message | None = None) -> Message:
        """The redrawn graph, the homophily in it, and fresh networks."""
        local_model, graph = client.state["model"], client.graph
        if model is not None:
            load_weights(local_model, model)
        if not graph.train.any():
            return {}
        seen = redrawn(graph, local_model, self.alpha)
        transductive = graph.num_nodes == client.full_graph.num_nodes
        client.memory |= {
            "seen": seen,
            "all": seen if transductive else redrawn(client.full_graph, local_model, self.alpha),
        }
        h = confidence(graph, self.hide, self.spread_steps, self.spread, client.rng("hide"))
        client.state["model"] = personal = Personal(client, local_model, h, self.hops, self.beta)
        learning = [p for p in personal.parameters() if p.requires_grad]
        client.state["optimizer"] = make_optimizer(
            self.optimizer, learning, self.lr, self.weight_decay
        )
        return {}

    @phase()
    def personalise(self, client: Client) -> Message:
        """One epoch of the personal networks."""
        if isinstance(client.state["model"], Personal):
            step(client.state["optimizer"], self.personal_objective(client))
        return {}

    def personal_objective(self, client: Client) -> Tensor:
        """What the personal networks minimise, both branches at once: they share no weights."""
        seen, graph = client.memory["seen"], client.graph
        views = client.state["model"].views(seen, client.rng("personal"))
        return sum(
            (client.loss(logits, graph) for logits in views),
            self.preserve * F.mse_loss(views[0].softmax(1), seen.logits.softmax(1)),
        )

    def predict(self, client: Client, model: Message | None) -> Tensor:
        """In the personal stage the logarithm of what both branches say; before it, as in FedAvg."""
        local_model = client.state["model"]
        if not isinstance(local_model, Personal):
            return super().predict(client, model)
        return (
            local_model.probabilities(client.memory["all"])
            .clamp(min=torch.finfo(torch.float32).tiny)
            .log()
        )

    def run(self, server: Server) -> None:
        """FedAvg's rounds; then the personal stage, of which the run reports the best epoch."""
        super().run(server)
        server.ask(self.prepare, **({} if self.finetune else {"model": server.state["model"]}))
        for _ in range(self.personal):
            server.ask(self.personalise)
            server.evaluate(stage="personal")


class Personal(nn.Module):
    """A client's networks, the federated model that they look at, and how much the homophilous branch counts."""

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
        self, graph: Redrawn, rng: Generator | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """H, H_1, H_2, H_3, each [nodes, classes]."""
        learnt = push_and_pull(self.learnt(graph, rng), graph.alike, self.beta)
        return (
            self.homophilous(graph, rng),
            self.features(graph, rng),
            self.smooth(graph, rng),
            learnt,
        )

    def probabilities(self, graph: Redrawn) -> Tensor:
        """h Y_ho + (1 − h) Y_he, [nodes, classes]."""
        own, *others = (logits.softmax(1) for logits in self.views(graph))
        return torch.lerp(
            torch.stack(others).mean(0), (own + graph.logits.softmax(1)) / 2, self.confidence
        )


@torch.no_grad()
def redrawn(graph: Graph, model: Model, alpha: float) -> Redrawn:
    """The graph as the federated model's predictions redraw it."""
    own = {f.name: getattr(graph, f.name) for f in fields(Graph) if f.init}
    result = Redrawn(**own, logits=model(graph), alpha=alpha)
    result.cached("features", lambda: graph.sparse_x)
    return result


def directions(p: Tensor) -> Tensor:
    """Probabilities [nodes, classes] with every row at length 1."""
    return p / p.norm(dim=1, keepdim=True)


def push_and_pull(Z: Tensor, U: Tensor, beta: float) -> Tensor:
    """Q(Z): nodes come nearer to what those alike say, and away from what the others say."""
    V = directions(Z.softmax(1))
    n, ones = len(Z), Z.new_ones(len(Z), 1)
    LZ, L1 = (beta * (U @ (U.T @ h)) + (1 - beta) * (V @ (V.T @ h)) for h in (Z, ones))
    # L1 >= 1, since every node is like itself. N1 may be 0, all being alike: then there is no push, instead of one that rounding makes.
    pull, push = LZ / L1, (Z.sum(0) - LZ) / (n - L1).clamp(min=1)
    return (Z + pull.softmax(1) - push.softmax(1)) / 2


@torch.no_grad()
def confidence(graph: Graph, hide: float, steps: int, spread: float, rng: Generator) -> float:
    """h: of some training labels that are hidden, the share that spreading the others brings back; ½ if there are too few."""
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
    likeliest, guess = soft[hidden].max(1)
    return (
        ((guess == graph.y[hidden]) & (likeliest > 0)).float().mean().item()
    )  # where nothing arrives, nothing comes back
