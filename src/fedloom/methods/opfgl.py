"""O-pFGL: one round. Class statistics go up, a tiny pseudo-graph that has them comes down, and every client makes its own model of it.

Yan et al.: "Toward Personalized Federated Node Classification in One-shot Communication". The pseudo-graph's optimiser is that of
Xiao et al., "Simple Graph Condensation" (SimGC).

What travels, per client, once:
    up    count, total, squares      N_k^c, Σx, Σx² of the features propagated 0..h hops           C (1 + 2 (h+1) d) numbers
          reported                   in a secure run, where the server sees Σ_k only: whether N_k^c is reported, C more
    down  x, adjacency, y            X', A', Y' of the pseudo-graph with s nodes                   s d + s² + s numbers

    Ỹ ← I times clip(a S Y + (1−a) Y⁰, 0, 1), S = D^-1/2 A D^-1/2                               `soft_labels`
    H(c) = Σ over training nodes of class c of the share of training neighbours with that label (Eq. 2, 3)   `homophily`
    w_dist(c) = 1 / (1 + ln(1 + H(c)))  (Eq. 4)                                                 `gamma`
    HRE (Eq. 7): an unlabelled node joins class c' = arg max ỹ if ỹ_c' / Σỹ ≥ f_th, c' is among the K classes with the largest H,
        and its degree is ≥ d_th                                                                `expanded_labels`
    N_k^c, Σx, Σx² over the nodes then labelled: what N_k^c, μ_k^c, s²_k^c say (Eq. 5, 6, 8), in a form that adds up    `statistics`
    N^c, μ^c, s²^c of the union (Eq. 9, 14, 15)                                                 `merge`
    X', A' ← min 10 Σ_c (N^c/N) [MSE(μ'^c, μ^c) + MSE(std'^c, std^c)] ± 0.1 smoothness (Eq. 10-13)    `condense`
    M_G ← min CE on the pseudo-graph (Eq. 16)                                                   `generalise`
    M ← min CE + mean_i γ_i KL(p_G(i) ‖ p_M(i)), γ_i = clamp(β ỹ_i · w_dist, γ_min, γ_max), from M_G (Eq. 17-19)    `personalise`

In both trainings the copy with the best validation accuracy is kept. Models are trained without dropout and weight decay, and all
clients with one architecture start from the same weights.

As in the authors' code rather than the paper's text: A' stays real-valued (a 0/1 indicator has no gradient), standard deviations are
matched instead of variances and only in classes with two or more pseudo-nodes, the smoothness exponential is taken coordinate by
coordinate, the distillation term is a mean, γ is clamped, and m in Eq. 9's divisor counts the clients that reported the class.
Departures from both: X' starts near 0; from N(0, 1), as published, the optimiser ends in worse minima (docs/decisions/4). Eq. 15's last
term is N (μ^c)² as the algebra has it. A class that nobody reports gets no pseudo-node. HRE takes no class with H = 0. Pseudo-nodes are
counted from N^c after HRE, as in the paper's text; the code uploads a second count for it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.core.client import Client
from fedloom.core.message import Message
from fedloom.core.method import Method
from fedloom.core.phase import phase, summed
from fedloom.core.server import Server
from fedloom.core.settings import setting
from fedloom.data.graph import Graph
from fedloom.errors import ConfigError, MessageError
from fedloom.nn.model import Model
from fedloom.nn.smoothing import propagated
from fedloom.nn.training import make_optimizer, seeded, step
from fedloom.nn.weights import load_weights, weights

# variant: (HRE, stage 2 starts from M_G, what weighs the distillation: nothing, all nodes alike, or each node its own)
VARIANTS = {
    "full": (True, True, "node"),
    "nd_ft_dist": (False, True, "node"),
    "ft_dist": (False, True, "constant"),
    "ft_imb": (False, True, "none"),
    "ft": (False, True, "none"),
    "hre_nd_dist": (True, False, "node"),
    "global": (True, True, "none"),
}


@dataclass(frozen=True)
class OpFGL(Method):
    """One-shot personalised learning through a pseudo-graph."""

    rounds: int = setting(
        1, "communication rounds: this is a one-shot method", at_least=1, at_most=1
    )
    variant: str = setting(
        "full",
        "the method, or one of the paper's ablations (global = M_G alone)",
        choices=tuple(VARIANTS),
    )
    hops: int = setting(
        1, "h, how far features are propagated for the statistics", at_least=0, tune="0..2"
    )
    min_count: int = setting(
        2, "a class with fewer labelled nodes is not reported; 5 or more if not secure", at_least=2
    )
    spread_steps: int = setting(2, "I, steps of label propagation", at_least=1, tune="1..5")
    spread: float = setting(
        0.9,
        "a, share of a step that comes from the neighbours",
        at_least=0,
        at_most=1,
        tune="0.5..0.95",
    )
    expand_classes: int = setting(1, "K, classes that HRE may add nodes to", at_least=1)
    expand_confidence: float = setting(
        0.95, "f_th, confidence HRE asks for", at_least=0, at_most=1, tune="0.9..1"
    )
    expand_degree: int = setting(0, "d_th, degree HRE asks for", at_least=0)
    divisor: str = setting(
        "m_c",
        "of the merged variance: N less the reporting clients, or N less 1",
        choices=("m_c", "n-1"),
    )
    rate: float = setting(
        0.0,
        "pseudo-nodes of a class as a share of its labelled nodes (0 = one each)",
        at_least=0,
        at_most=1,
    )
    condense_steps: int = setting(3000, "steps of the pseudo-graph's optimisation", at_least=1)
    start: float = setting(
        0.01, "standard deviation of X' before the first step (published: 1)", above=0
    )
    lr_features: float = setting(5e-3, "learning rate of X'", above=0, tune="5e-4..0.05")
    lr_links: float = setting(
        1e-3, "learning rate of the link predictor", above=0, tune="1e-4..0.01"
    )
    link_width: int = setting(128, "hidden width of the link predictor", at_least=1)
    align: float = setting(10.0, "weight of the statistics' alignment", at_least=0)
    smooth: float = setting(0.1, "weight of the smoothness term", at_least=0)
    smooth_sign: str = setting(
        "+",
        "+ as published pushes linked nodes apart, - (SimGC) pulls them together",
        choices=("+", "-"),
    )
    steps: int = setting(3000, "at most so many steps in each of the two trainings", at_least=1)
    check_every: int = setting(100, "steps between looks at the validation accuracy", at_least=1)
    waits: int = setting(10, "looks without improvement before a training ends", at_least=1)
    lr_global: float = setting(
        1e-4, "learning rate on the pseudo-graph", above=0, tune="1e-5..0.01"
    )
    lr_local: float = setting(
        5e-5, "learning rate on the client's own graph", above=0, tune="1e-5..0.01"
    )
    beta: float = setting(0.2, "β, scale of the distillation weights", at_least=0, tune="0.1..5")
    gamma_min: float = setting(0.0, "γ_min", at_least=0)
    gamma_max: float = setting(0.15, "γ_max", at_least=0, tune="0.1..0.2")

    tasks: ClassVar[tuple[str, ...]] = ("node",)
    validates: ClassVar[bool] = True
    discloses_to_server: ClassVar[str] = (
        "class means and variances of raw features, each client's own unless the run is secure, and in a secure run still those of a class "
        "that a single client reports: of two nodes they give both back"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gamma_max < self.gamma_min:
            raise ConfigError(
                f"method.gamma_max is {self.gamma_max!r}, must be at least method.gamma_min, which is {self.gamma_min!r}"
            )

    @property
    def views(self) -> int:
        """How many times d a propagated feature vector is long."""
        return self.hops + 1

    # ---- clients, before the upload ----
    @phase()
    def setup(self, client: Client) -> Message:
        """A model; the same weights wherever the architecture is the same."""
        client.state["model"] = client.facts.build(client.facts.model_of[client.name], "everybody")
        return {}

    def soft_labels(self, graph: Graph) -> Tensor:
        """Ỹ [nodes, classes]: labels spread from the training nodes; uniform where nothing arrives."""
        start = torch.zeros(graph.num_nodes, graph.num_classes)
        start[graph.train, graph.y[graph.train]] = 1
        soft = start
        for _ in range(self.spread_steps):
            soft = (
                self.spread * graph.propagate(soft, "sym-bare") + (1 - self.spread) * start
            ).clamp(0, 1)
        return torch.where(soft.sum(1, keepdim=True) == 0, 1 / graph.num_classes, soft)

    def homophily(self, graph: Graph) -> Tensor:
        """H(c) for all classes; a training node without training neighbours counts 0."""
        source, target = graph.edge_index
        within = graph.train[source] & graph.train[target] & (source != target)
        source, target = source[within], target[within]
        zero = torch.zeros(graph.num_nodes)
        near = zero.index_add(0, target, torch.ones(len(target)))
        alike = zero.index_add(0, target, (graph.y[source] == graph.y[target]).float())
        share = alike / near.clamp(min=1)
        return torch.zeros(graph.num_classes).index_add(0, graph.y[graph.train], share[graph.train])

    def expanded_labels(self, graph: Graph) -> Tensor:
        """Labels [nodes] of the training nodes and of those that HRE adds; -1 elsewhere."""
        labels = torch.where(graph.train, graph.y, -1)
        if not VARIANTS[self.variant][0]:
            return labels
        soft, homophily = self.soft_labels(graph), self.homophily(graph)
        confidence, guess = (soft / soft.sum(1, keepdim=True)).max(1)
        leading = homophily.sort(descending=True, stable=True).indices[: self.expand_classes]
        leading = leading[homophily[leading] > 0]
        source, target = graph.edge_index
        degree = torch.bincount(target[source != target], minlength=graph.num_nodes)
        reliable = (
            (confidence >= self.expand_confidence)
            & torch.isin(guess, leading)
            & (degree >= self.expand_degree)
        )
        return torch.where(reliable & ~graph.train, guess, labels)

    @phase(count="int64[C]", total="float32[C,views,d]", squares="float32[C,views,d]")
    def statistics(self, client: Client) -> Message:
        """Eq. 5, 6, 8: size, sum and sum of squares of each class that is large enough, zeros for the others."""
        graph = client.graph
        labels = self.expanded_labels(graph)
        count = torch.bincount(labels[labels >= 0], minlength=graph.num_classes)
        count = torch.where(count >= self.min_count, count, 0)
        chosen = ((labels >= 0) & (count[labels] > 0)).nonzero().flatten()
        features = torch.stack([x[chosen] for x in propagated(graph, "sym", self.hops)], 1).double()
        zero = torch.zeros(len(count), *features.shape[1:], dtype=torch.float64)
        total, squares = (
            zero.index_add(0, labels[chosen], features),
            zero.index_add(0, labels[chosen], features.square()),
        )
        return {"count": count, "total": total.float(), "squares": squares.float()}

    @summed
    @phase(
        reported="int64[C]",
        count="int64[C]",
        total="float32[C,views,d]",
        squares="float32[C,views,d]",
    )
    def secure_statistics(self, client: Client) -> Message:
        """The same; who reported a class, which counts in `divisor`, could not be seen from a sum."""
        statistics = self.statistics(client)
        return {"reported": (statistics["count"] > 0).long(), **statistics}

    # ---- server ----
    def gather(self, server: Server) -> Message:
        """The sums over the clients of what `secure_statistics` gives, from the masked sum or from each client's answer."""
        if server.facts.secure is not None:
            return server.sum(self.secure_statistics)
        replies = server.ask(self.statistics)
        # In float64, so that the order does not matter; fixed point rounds at 2^-f, so small features may differ in the last bit.
        sums = {name: replies.stack(name).double().sum(0).float() for name in ("total", "squares")}
        counts = replies.stack("count")
        return {"reported": (counts > 0).sum(0), "count": counts.sum(0), **sums}

    def merge(self, sums: Message) -> Message:
        """Eq. 9, 14, 15: count [C], mean and variance [C, views, d] of the union; refuses if no class was reported."""
        if not sums["count"].any():
            raise MessageError(
                f"no client has a class with {self.min_count} or more labelled nodes (method.min_count): nothing to learn from"
            )
        count, reporters = (sums[name][:, None, None].double() for name in ("count", "reported"))
        mean = sums["total"].double() / count.clamp(min=1)
        scatter = (sums["squares"].double() - count * mean.square()).clamp(min=0)
        freedom = count - (reporters if self.divisor == "m_c" else 1)
        return {
            "count": sums["count"],
            "mean": mean.float(),
            "variance": (scatter / freedom.clamp(min=1)).float(),
        }

    def condense(self, target: Message, rng: torch.Generator) -> Message:
        """X', A', Y' whose class statistics, propagated over A', come near the target's (Eq. 10-13)."""
        count, features = target["count"], target["mean"].shape[2]
        nodes = torch.where(count > 0, (self.rate * count).ceil().long().clamp(min=1), 0)
        y = torch.arange(len(count)).repeat_interleave(nodes)
        x = (self.start * torch.randn(len(y), features, generator=rng)).requires_grad_()
        with seeded(rng):
            links = LinkPredictor(features, self.link_width)
        optimizers = (
            make_optimizer("adam", [x], self.lr_features, 0),
            make_optimizer("adam", links.parameters(), self.lr_links, 0),
        )
        loss = Alignment(target, y)
        sign = 1 if self.smooth_sign == "+" else -1
        for number in range(self.condense_steps):
            turn = (
                number % 50 < 10 and len(y) > 1
            )  # ten steps of the links, then forty of the features
            x.requires_grad_(not turn)
            links.requires_grad_(turn)
            adjacency = links(x)
            total = self.align * loss(x, adjacency, self.hops) + sign * self.smooth * smoothness(
                x, adjacency
            )
            step(optimizers[turn], total)
        with torch.no_grad():
            return {"x": x.detach(), "adjacency": links(x), "y": y}

    # ---- clients, after the download ----
    @phase()
    def generalise(self, client: Client, x: Tensor, adjacency: Tensor, y: Tensor) -> Message:
        """Stage 1 (Eq. 16): M_G, from the pseudo-graph alone."""
        source, target = adjacency.nonzero(as_tuple=True)
        everyone = torch.ones(len(y), dtype=torch.bool)
        pseudo = Graph(
            x,
            torch.stack([source, target]),
            y,
            client.facts.num_classes,
            train=everyone,
            edge_weight=adjacency[source, target],
        ).check()
        model = client.state["model"]
        if not VARIANTS[self.variant][1]:
            client.state["untrained"] = {
                name: tensor.clone() for name, tensor in weights(model).items()
            }
        self.fit(client, model, self.lr_global, lambda: F.cross_entropy(model(pseudo), y))
        return {}

    @phase()
    def personalise(self, client: Client) -> Message:
        """Stage 2 (Eq. 17-19): the client's own labels, and M_G's opinion where they say little."""
        graph, model = client.graph, client.state["model"]
        _, from_global, distilled = VARIANTS[self.variant]
        with torch.no_grad():
            teacher = model(graph).softmax(1)
        if not from_global:
            load_weights(model, client.state["untrained"])
        gamma = (
            self.gamma(graph)
            if distilled == "node"
            else torch.tensor(self.beta).clamp(self.gamma_min, self.gamma_max)
        )
        of_class = balanced(graph) if self.variant == "ft_imb" else None

        def loss() -> Tensor:
            logits = model(graph)
            own = client.loss(logits, graph, of_class=of_class)
            if distilled == "none":
                return own
            divergence = F.kl_div(logits.log_softmax(1), teacher, reduction="none").sum(1)
            return own + (gamma * divergence).mean()

        self.fit(client, model, self.lr_local, loss)
        return {}

    def gamma(self, graph: Graph) -> Tensor:
        """γ [nodes] (Eq. 19)."""
        w_dist = 1 / (1 + self.homophily(graph).log1p())
        return (self.beta * self.soft_labels(graph) @ w_dist).clamp(self.gamma_min, self.gamma_max)

    def fit(self, client: Client, model: Model, lr: float, loss: Callable[[], Tensor]) -> None:
        """Adam steps on `loss`; leaves the net as it was when it had the best validation accuracy, looked at every so often."""
        optimizer = make_optimizer("adam", model.parameters(), lr, 0)
        best, kept, waited = -1.0, weights(model), 0
        for number in range(1, self.steps + 1):
            step(optimizer, loss())
            if number % self.check_every and number < self.steps:
                continue
            accuracy = client.validate(model)
            if accuracy is None or accuracy > best:  # nothing to choose by: the last
                best, waited = accuracy or 0.0, 0
                kept = {name: tensor.clone() for name, tensor in weights(model).items()}
            else:
                waited += 1
                if waited >= self.waits:
                    break
        load_weights(model, kept)

    def run(self, server: Server) -> None:
        """Algorithm 1: one upload, one download."""
        server.ask(self.setup)
        for _ in server.rounds(1):
            target = self.merge(self.gather(server))
            server.ask(self.generalise, **self.condense(target, server.rng("pseudo-graph")))
            if self.variant != "global":
                server.evaluate(stage="global")
                server.ask(self.personalise)
            server.evaluate()


class LinkPredictor(nn.Module):
    """A'_ij = σ((g(x_i, x_j) + g(x_j, x_i)) / 2), an MLP on ordered pairs; no loops, nothing below 0.01 (Eq. 10)."""

    def __init__(self, features: int, width: int):
        super().__init__()
        self.pair = nn.Linear(2 * features, width)
        # Batch statistics always: there is no other use of it than on all pairs at once.
        self.rest = nn.Sequential(
            nn.BatchNorm1d(width, track_running_stats=False), nn.ReLU(), nn.Linear(width, width),
            nn.BatchNorm1d(width, track_running_stats=False), nn.ReLU(), nn.Linear(width, 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """Takes [nodes, features], gives the weights [nodes, nodes]."""
        n = len(x)
        if n == 1:
            return x.new_zeros(1, 1)  # no pair, and no batch to take statistics of
        left, right = self.pair.weight.chunk(
            2, 1
        )  # W [x_i, x_j] = W_l x_i + W_r x_j: each node is multiplied once, not n times
        hidden = (x @ left.T)[:, None] + (x @ right.T)[None] + self.pair.bias
        score = self.rest(hidden.flatten(0, 1)).view(n, n)
        weight = torch.sigmoid((score + score.T) / 2)
        return weight.masked_fill(torch.eye(n, dtype=torch.bool) | (weight < 0.01), 0)


class Alignment:
    """Σ_c (N^c/N) [MSE(μ'^c, μ^c) + MSE(std'^c, std^c)]; the second only for classes with two or more pseudo-nodes (Eq. 11, 12)."""

    def __init__(self, target: Message, y: Tensor):
        present = target["count"] > 0
        self.mean, self.std = target["mean"][present], target["variance"][present].sqrt()
        self.share = target["count"][present] / target["count"].sum()
        member = F.one_hot(y, len(present)).float()[:, present]
        size = member.sum(0)
        self.several = size > 1
        self.member, self.size = member, size[:, None, None]

    def __call__(self, x: Tensor, adjacency: Tensor, hops: int) -> Tensor:
        """Takes X' and A', gives the loss."""
        loops = adjacency + torch.eye(len(adjacency))
        scale = loops.sum(1).rsqrt()
        normal = scale[:, None] * loops * scale
        views = [x]
        for _ in range(hops):
            views.append(normal @ views[-1])
        features = torch.stack(views, 1)
        mean = torch.einsum("sc,svd->cvd", self.member, features) / self.size
        per_class = (mean - self.mean).square().mean((1, 2))
        if self.several.any():
            scatter = torch.einsum(
                "sc,svd->cvd", self.member, (features - self.member_mean(mean)).square()
            )
            std = (
                scatter / (self.size - 1).clamp(min=1) + 1e-12
            ).sqrt()  # the root has no gradient at 0
            per_class = per_class + torch.where(
                self.several, (std - self.std).square().mean((1, 2)), 0
            )
        return self.share @ per_class

    def member_mean(self, mean: Tensor) -> Tensor:
        """Each pseudo-node's class mean."""
        return torch.einsum("sc,cvd->svd", self.member, mean)


def smoothness(x: Tensor, adjacency: Tensor) -> Tensor:
    """Σ_ij A'_ij mean_d exp(−(x'_i − x'_j)² / 2) / Σ_ij A'_ij: how alike linked nodes are (Eq. 13)."""
    alike = (-0.5 * (x[:, None] - x[None]).square()).exp().mean(2)
    return (adjacency * alike).sum() / adjacency.sum().clamp(min=1e-12)


def balanced(graph: Graph) -> Tensor:
    """Weights [classes] that let every class of the training set count alike; they average to 1 over its nodes."""
    count = torch.bincount(graph.y[graph.train], minlength=graph.num_classes)
    return count.sum() / (count.clamp(min=1) * (count > 0).sum().clamp(min=1))
