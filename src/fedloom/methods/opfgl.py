"""O-pFGL: one-shot learning. The server makes a pseudo-graph from class statistics; clients adapt.

Yan et al.: "Toward Personalized Federated Node Classification in One-shot Communication". In one
round, class statistics go up, a tiny pseudo-graph with these statistics comes down, and every
client trains its own model from it. The pseudo-graph's optimiser is that of Xiao et al., "Simple
Graph Condensation" (SimGC).

What travels, per client, once:
    up    count, total, squares   N_k^c, Σx, Σx² of the features propagated 0..h hops,
                                  C (1 + 2 (h+1) d) numbers
                                  with run.dp_epsilon: N_k^c and Σx of the training nodes, with
                                  noise on Σ_k; no HRE and no Σx²
          reported                only in a secure run, where the server sees only Σ_k: whether
                                  N_k^c is reported, C more numbers
    down  x, adjacency, y         X', A', Y' of the pseudo-graph with s nodes, s d + s² + s numbers

    Ỹ ← I times clip(a S Y + (1−a) Y⁰, 0, 1), S = D^-1/2 A D^-1/2                  `soft_labels`
    H(c) = Σ over training nodes of class c of the share of
           training neighbours with that label                      Eq. 2, 3       `homophily`
    w_dist(c) = 1 / (1 + ln(1 + H(c)))                              Eq. 4          `gamma`
    HRE: an unlabelled node joins class c' = arg max ỹ if
         ỹ_c' / Σỹ ≥ f_th, c' is among the K classes with the
         largest H, and its degree is ≥ d_th                        Eq. 7          `expanded_labels`
    N_k^c, Σx, Σx² over the nodes then labelled: the same as
         N_k^c, μ_k^c, s²_k^c, in a form that adds up               Eq. 5, 6, 8    `statistics`
    N^c, μ^c, s²^c of the union                                     Eq. 9, 14, 15  `merge`
    X', A' ← min 10 Σ_c (N^c/N) [MSE(μ'^c, μ^c) + MSE(std'^c, std^c)]
             ± 0.1 smoothness                                       Eq. 10-13      `condense`
    M_G ← min CE on the pseudo-graph                                Eq. 16         `generalise`
    M ← min CE + mean_i γ_i KL(p_G(i) ‖ p_M(i)), from M_G           Eq. 17, 18     `personalise`
        γ_i = clamp(β ỹ_i · w_dist, γ_min, γ_max)                   Eq. 19         `gamma`

In both trainings, the copy with the best validation accuracy is kept. Models are trained without
dropout and weight decay. All clients with one architecture start from the same weights.

The authors' code, not the paper's text, is followed here: A' stays real-valued (a 0/1 indicator has
no gradient). Standard deviations are matched instead of variances, and only in classes with two or
more pseudo-nodes. The smoothness exponential is taken coordinate by coordinate. The distillation
term is a mean. γ is clamped. m in Eq. 9's divisor counts the clients that reported the class.

Departures from both: X' starts near 0; from N(0, 1), as published, the optimiser ends in worse
minima (docs/decisions/4). Eq. 15's last term is N (μ^c)², as the algebra has it. A class that no
client reports gets no pseudo-node. HRE takes no class with H = 0. Pseudo-nodes are counted from N^c
after HRE, as in the paper's text; the code uploads a second count for it. The paper reports every
class (min_count: a variance needs 2 nodes).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.core.message import Message
from fedloom.core.method import Method
from fedloom.core.phase import phase, runs_once, summed
from fedloom.core.server import Server
from fedloom.core.settings import fewest_items, setting
from fedloom.data.capping import capped
from fedloom.data.graph import Graph
from fedloom.errors import ConfigError, MessageError
from fedloom.nn.losses import weighted_divergence
from fedloom.nn.model import Model
from fedloom.nn.smoothing import propagated
from fedloom.nn.training import label_steps, make_optimizer, seeded, step
from fedloom.nn.weights import load_weights, weights
from fedloom.privacy.dp_graph import affected, require_some

Descend = Callable[[Optimizer, int], None]  # takes a number of steps


class Variant(NamedTuple):
    """An ablation of the paper.

    Attributes:
        expands: Whether HRE labels further nodes.
        from_global: Whether stage 2 starts from M_G.
        distilled: The weights γ of the distillation: "none", "constant" or "node".
    """

    expands: bool
    from_global: bool
    distilled: str


VARIANTS = {
    "full": Variant(True, True, "node"),
    "nd_ft_dist": Variant(False, True, "node"),
    "ft_dist": Variant(False, True, "constant"),
    "ft_imb": Variant(False, True, "none"),
    "ft": Variant(False, True, "none"),
    "hre_nd_dist": Variant(True, False, "node"),
    "global": Variant(True, True, "none"),
}


@dataclass(frozen=True)
class OpFGL(Method):
    """One-shot personalised learning through a pseudo-graph."""

    rounds: int = setting(
        1, "communication rounds: this is a one-shot method", at_least=1, at_most=1
    )
    variant: str = setting(
        "full",
        "the method, or one of the paper's ablations (global = only M_G)",
        choices=tuple(VARIANTS),
    )
    hops: int = setting(
        1, "h, how far features are propagated for the statistics", at_least=0, tune="0..2"
    )
    min_count: int = fewest_items("fewest labelled nodes of a class that is reported", at_least=2)
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
        0.95, "f_th, confidence that HRE requires", at_least=0, at_most=1, tune="0.9..1"
    )
    expand_degree: int = setting(0, "d_th, degree that HRE requires", at_least=0)
    divisor: str = setting(
        "m_c",
        "of the merged variance: N minus the reporting clients, or N minus 1",
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
        "+ (published) makes linked nodes less similar, - (SimGC) more similar",
        choices=("+", "-"),
    )
    steps: int = setting(3000, "the most steps of each of the two trainings", at_least=1)
    check_every: int = setting(100, "steps between checks of the validation accuracy", at_least=1)
    waits: int = setting(10, "checks without improvement before a training ends", at_least=1)
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
    partial_participation: ClassVar[bool] = False
    discloses_to_server: ClassVar[str] = (
        "class means and variances of raw features: each client's own unless the run is secure, "
        "and in a secure run still those of a class that a single client reports; for a class of "
        "two nodes they reveal both"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gamma_max < self.gamma_min:
            raise ConfigError(
                f"method.gamma_max is {self.gamma_max!r}, must be at least method.gamma_min, "
                f"which is {self.gamma_min!r}"
            )

    @property
    def views(self) -> int:
        """h + 1, the number of propagated versions of the features."""
        return self.hops + 1

    # ---- clients, before the upload ----
    @phase()
    def setup(self, client: Client) -> Message:
        """Builds the model. Equal architectures start from equal weights."""
        client.state["model"] = client.facts.build(client.facts.model_of[client.name], "everybody")
        return {}

    def soft_labels(self, graph: Graph) -> Tensor:
        """Returns Ỹ [nodes, classes]: propagated training labels; uniform where none arrives."""
        start = torch.zeros(graph.num_nodes, graph.num_classes)
        start[graph.train, graph.y[graph.train]] = 1
        soft = start
        for _ in range(self.spread_steps):
            soft = (
                self.spread * graph.propagate(soft, "sym-bare") + (1 - self.spread) * start
            ).clamp(0, 1)
        return torch.where(soft.sum(1, keepdim=True) == 0, 1 / graph.num_classes, soft)

    def homophily(self, graph: Graph) -> Tensor:
        """Returns H(c) of all classes. A training node without training neighbours counts 0."""
        source, target = graph.edge_index
        within = graph.train[source] & graph.train[target] & (source != target)
        source, target = source[within], target[within]
        zero = torch.zeros(graph.num_nodes)
        near = zero.index_add(0, target, torch.ones(len(target)))
        same = zero.index_add(0, target, (graph.y[source] == graph.y[target]).float())
        share = same / near.clamp(min=1)
        return torch.zeros(graph.num_classes).index_add(0, graph.y[graph.train], share[graph.train])

    def expanded_labels(self, graph: Graph) -> Tensor:
        """Returns labels [nodes] of training nodes and of those that HRE adds; -1 elsewhere."""
        labels = torch.where(graph.train, graph.y, -1)
        if not VARIANTS[self.variant].expands:
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

    @phase(count="int64[C] counts nodes", total="float32[C,views,d]", squares="float32[C,views,d]")
    def statistics(self, client: Client) -> Message:
        """Answers size, sum and sum of squares of each class that is large enough (Eq. 5, 6, 8).

        The other classes have zeros.
        """
        graph = client.graph
        labels = self.expanded_labels(graph)
        count = torch.bincount(labels[labels >= 0], minlength=graph.num_classes)
        count = torch.where(count >= self.min_count, count, 0)
        chosen = ((labels >= 0) & (count[labels] > 0)).nonzero().flatten()
        features = torch.stack([x[chosen] for x in propagated(graph, "sym", self.hops)], 1).double()
        zero = torch.zeros(len(count), *features.shape[1:], dtype=torch.float64)
        total = zero.index_add(0, labels[chosen], features)
        squares = zero.index_add(0, labels[chosen], features.square())
        return {"count": count, "total": total.float(), "squares": squares.float()}

    @summed
    @phase(
        reported="int64[C] in 0..1",
        count="int64[C] counts nodes",
        total="float32[C,views,d]",
        squares="float32[C,views,d]",
    )
    def secure_statistics(self, client: Client) -> Message:
        """As `statistics`, and which classes are reported.

        `divisor` needs the number of reporting clients, which a sum of counts does not show.
        """
        statistics = self.statistics(client)
        return {"reported": (statistics["count"] > 0).long(), **statistics}

    @summed
    @phase(count="float32[C]", total="float32[C,views,d]")
    def private_statistics(self, client: Client) -> Message:
        """Sizes and sums of the training nodes of each class, with rows of length at most 1.

        The server adds noise. Nodes that HRE adds depend on all labels and edges around them, so
        there are none. A row is divided by `run.dp_clip`.
        """
        graph, terms = client.graph, client.facts.privacy
        assert terms is not None
        if self.hops and terms.unit in ("node", "edge"):
            graph = capped(graph, terms.degree)
        labels = graph.y[graph.train]
        rows = torch.stack([x[graph.train] for x in propagated(graph, "sym", self.hops)], 1)
        rows = rows.double() / terms.clip
        rows = rows / rows.norm(dim=2, keepdim=True).clamp(min=1)
        zero = torch.zeros(graph.num_classes, *rows.shape[1:], dtype=torch.float64)
        count = torch.bincount(labels, minlength=graph.num_classes)
        return {"count": count.float(), "total": zero.index_add(0, labels, rows).float()}

    def sensitivities(self, facts: Facts) -> dict[str, float] | None:
        """That of `private_statistics`, for the units label, edge and node.

        A node adds at most √(1 + views) to its class; a label moves that to another class. Another
        node whose neighbourhood changes moves each of its propagated rows by at most 2.
        """
        terms = facts.privacy
        assert terms is not None
        if terms.unit == "client":
            return None
        own = math.sqrt(1 + self.views)
        around = affected(terms.unit, self.hops if self.hops else -1, terms.degree)
        part = {"label": math.sqrt(2) * own, "edge": 0.0, "node": own}[terms.unit]
        total = part + around * 2 * math.sqrt(self.hops)
        return {"private_statistics": require_some(total, terms)}

    def check(self, facts: Facts) -> None:
        """Refuses variances in a run with differential privacy: they are not sent."""
        if facts.privacy is not None and self.rate:
            raise ConfigError(
                f"method.rate is {self.rate:g}: several pseudo-nodes of a class need variances, "
                "which a run with differential privacy does not have; valid: 0"
            )

    def single_replies(self) -> tuple[str, ...]:
        """None: `gather` asks for `statistics` only if the run is not secure."""
        return ()

    # ---- server ----
    def gather(self, server: Server) -> Message:
        """Returns the sums of `secure_statistics` over the clients, also in a plain run."""
        if (terms := server.facts.privacy) is not None:
            noisy = server.sum(self.private_statistics)
            count = noisy["count"].round().long().clamp(min=0)
            total = noisy["total"] * terms.clip
            squares = torch.zeros_like(total)  # no variance is used: `check`
            return {"reported": (count > 0).long(), "count": count, "total": total} | {
                "squares": squares
            }
        if server.facts.secure is not None:
            return server.sum(self.secure_statistics)
        replies = server.ask(self.statistics)
        # In float64, so that the order does not matter. The fixed-point numbers of a secure run are
        # rounded at 2^-f, so small features may differ in the last bit.
        sums = {name: replies.stack(name).double().sum(0).float() for name in ("total", "squares")}
        counts = replies.stack("count")
        return {"reported": (counts > 0).sum(0), "count": counts.sum(0), **sums}

    def merge(self, sums: Message) -> Message:
        """Returns count [C], mean and variance [C, views, d] of the union (Eq. 9, 14, 15).

        Raises a MessageError if no class was reported.
        """
        if not sums["count"].any():
            raise MessageError(
                f"no client has a class with {self.min_count} or more labelled nodes "
                "(method.min_count): there is nothing to learn from"
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
        """Returns X', A', Y' with class statistics near the target's (Eq. 10-13)."""
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
        alignment = Alignment(target, y)
        sign = 1 if self.smooth_sign == "+" else -1
        for number in range(self.condense_steps):
            # Ten steps of the links, then forty of the features.
            links_turn = number % 50 < 10 and len(y) > 1
            x.requires_grad_(not links_turn)
            links.requires_grad_(links_turn)
            adjacency = links(x)
            aligned = self.align * alignment(x, adjacency, self.hops)
            total = aligned + sign * self.smooth * smoothness(x, adjacency)
            step(optimizers[links_turn], total)
        with torch.no_grad():
            return {"x": x.detach(), "adjacency": links(x), "y": y}

    # ---- clients, after the download ----
    @runs_once
    @phase()
    def generalise(self, client: Client, x: Tensor, adjacency: Tensor, y: Tensor) -> Message:
        """Stage 1 (Eq. 16): trains M_G on the pseudo-graph."""
        source, target = adjacency.nonzero(as_tuple=True)
        every = torch.ones(len(y), dtype=torch.bool)
        pseudo = Graph(
            x,
            torch.stack([source, target]),
            y,
            client.facts.num_classes,
            train=every,
            edge_weight=adjacency[source, target],
        ).check()
        model = client.state["model"]
        if not VARIANTS[self.variant].from_global:
            client.state["untrained"] = _copy(weights(model))

        def descend(optimizer: Optimizer, count: int) -> None:
            weight = client.class_weight
            label_steps(model, optimizer, pseudo, weight, count, client.record_loss)

        self.fit(client, model, self.lr_global, descend)
        return {}

    @runs_once
    @phase()
    def personalise(self, client: Client) -> Message:
        """Stage 2 (Eq. 17-19): trains on own labels, and distils M_G where labels say little."""
        graph, model, variant = client.graph, client.state["model"], VARIANTS[self.variant]
        with torch.no_grad():
            teacher = model(graph).softmax(1)
        if not variant.from_global:
            load_weights(model, client.state["untrained"])
        gamma = torch.tensor(self.beta).clamp(self.gamma_min, self.gamma_max)
        if variant.distilled == "node":
            gamma = self.gamma(graph)
        of_class = balanced(graph) if self.variant == "ft_imb" else None

        def loss() -> Tensor:
            logits = model(graph)
            own = client.loss(logits, graph, of_class=of_class)
            if variant.distilled == "none":
                return own
            return own + weighted_divergence(logits, teacher, gamma)

        def descend(optimizer: Optimizer, count: int) -> None:
            for _ in range(count):
                step(optimizer, loss())

        self.fit(client, model, self.lr_local, descend)
        return {}

    def gamma(self, graph: Graph) -> Tensor:
        """Returns γ [nodes] (Eq. 4, 19)."""
        w_dist = 1 / (1 + self.homophily(graph).log1p())
        return (self.beta * self.soft_labels(graph) @ w_dist).clamp(self.gamma_min, self.gamma_max)

    def fit(self, client: Client, model: Model, lr: float, descend: Descend) -> None:
        """Trains with Adam; keeps the weights with the best validation accuracy.

        It checks the accuracy every `check_every` steps. Without validation items, it keeps the
        last weights.

        descend: takes an optimiser and a number of steps, and takes these steps.
        """
        optimizer = make_optimizer("adam", model.parameters(), lr, 0)
        best, kept, waited = -1.0, weights(model), 0
        for begun in range(0, self.steps, self.check_every):
            descend(optimizer, min(self.check_every, self.steps - begun))
            accuracy = client.validate(model)
            if accuracy is None or accuracy > best:
                best, waited = accuracy or 0.0, 0
                kept = _copy(weights(model))
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
    """A'_ij = σ((g(x_i, x_j) + g(x_j, x_i)) / 2) with an MLP g on ordered pairs (Eq. 10).

    There are no self-loops and no weights below 0.01.
    """

    def __init__(self, features: int, width: int):
        super().__init__()
        self.pair = nn.Linear(2 * features, width)
        # It always uses batch statistics, because it always sees all pairs at once.
        self.rest = nn.Sequential(
            nn.BatchNorm1d(width, track_running_stats=False),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.BatchNorm1d(width, track_running_stats=False),
            nn.ReLU(),
            nn.Linear(width, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Takes [nodes, features], returns the weights [nodes, nodes]."""
        n = len(x)
        if n == 1:
            return x.new_zeros(1, 1)  # there are no pairs, and no batch statistics
        # W [x_i, x_j] = W_l x_i + W_r x_j: each node is multiplied once, not n times.
        left, right = self.pair.weight.chunk(2, 1)
        hidden = (x @ left.T)[:, None] + (x @ right.T)[None] + self.pair.bias
        score = self.rest(hidden.flatten(0, 1)).view(n, n)
        weight = torch.sigmoid((score + score.T) / 2)
        return weight.masked_fill(torch.eye(n, dtype=torch.bool) | (weight < 0.01), 0)


class Alignment:
    """Σ_c (N^c/N) [MSE(μ'^c, μ^c) + MSE(std'^c, std^c)] (Eq. 11, 12).

    The second term exists only for classes with two or more pseudo-nodes.
    """

    def __init__(self, target: Message, y: Tensor):
        present = target["count"] > 0
        self.mean, self.std = target["mean"][present], target["variance"][present].sqrt()
        self.share = target["count"][present] / target["count"].sum()
        member = F.one_hot(y, len(present)).float()[:, present]
        size = member.sum(0)
        self.several, self.alone = size > 1, bool((size == 1).all())
        self.member, self.size = member, size[:, None, None]

    def __call__(self, x: Tensor, adjacency: Tensor, hops: int) -> Tensor:
        """Takes X' and A', returns the loss."""
        loops = adjacency + torch.eye(len(adjacency))
        scale = loops.sum(1).rsqrt()
        normal = scale[:, None] * loops * scale
        views = [x]
        for _ in range(hops):
            views.append(normal @ views[-1])
        features = torch.stack(views, 1)
        mean = features  # of classes with one node each, which are in order
        if not self.alone:
            mean = torch.einsum("sc,svd->cvd", self.member, features) / self.size
        per_class = (mean - self.mean).square().mean((1, 2))
        if self.several.any():
            deviation = (features - self.member_mean(mean)).square()
            scatter = torch.einsum("sc,svd->cvd", self.member, deviation)
            # The root has no gradient at 0.
            std = (scatter / (self.size - 1).clamp(min=1) + 1e-12).sqrt()
            std_error = (std - self.std).square().mean((1, 2))
            per_class = per_class + torch.where(self.several, std_error, 0)
        return self.share @ per_class

    def member_mean(self, mean: Tensor) -> Tensor:
        """Returns the class mean of each pseudo-node."""
        return torch.einsum("sc,cvd->svd", self.member, mean)


def smoothness(x: Tensor, adjacency: Tensor) -> Tensor:
    """Returns Σ_ij A'_ij mean_d exp(−(x'_i − x'_j)² / 2) / Σ_ij A'_ij (Eq. 13).

    It measures how similar linked nodes are.
    """
    return (adjacency * similarity(x)).sum() / adjacency.sum().clamp(min=1e-12)


def similarity(x: Tensor) -> Tensor:
    """Returns mean_d exp(−(x_i − x_j)² / 2) of all pairs of rows, [rows, rows]."""
    return _Similarity.apply(x)  # type: ignore[no-untyped-call]


class _Similarity(torch.autograd.Function):
    """`similarity`: computed once for the pairs (i, j) and (j, i), in few passes over all pairs."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        n = len(x)
        i, j, place = ctx.pairs = _pairs(n)
        ctx.difference = x.index_select(0, i).sub_(x.index_select(0, j))
        ctx.each = ctx.difference.square().mul_(-0.5).exp_()
        similar = ctx.each.mean(1)
        return torch.cat([similar, similar, x.new_ones(1)]).index_select(0, place).view(n, n)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        (i, j, place), n, d = ctx.pairs, len(gradient), ctx.difference.shape[1]
        pull = ctx.difference.new_empty(2 * len(i) + 1, d)
        for at, share in ((0, -gradient[i, j] / d), (len(i), gradient[j, i] / d)):
            torch.mul(ctx.each, share.unsqueeze(1), out=pull[at : at + len(i)])
            pull[at : at + len(i)] *= ctx.difference
        pull[-1] = 0
        of_pairs = pull.index_select(0, place).view(n, n, d)
        return of_pairs.sum(1) - of_pairs.sum(0)


@lru_cache(maxsize=8)
def _pairs(n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns all pairs i < j, and where (i, j), (j, i) and (i, i) are in a list of them.

    The list has the pairs (i, j), then the pairs (j, i), then one entry for all (i, i).
    """
    i, j = torch.triu_indices(n, n, 1)
    place = torch.full((n, n), 2 * len(i))
    place[i, j] = torch.arange(len(i))
    place[j, i] = torch.arange(len(i), 2 * len(i))
    return i, j, place.flatten()


def balanced(graph: Graph) -> Tensor:
    """Returns weights [classes] that give every class of the training set the same total.

    They average to 1 over the training nodes.
    """
    count = torch.bincount(graph.y[graph.train], minlength=graph.num_classes)
    return count.sum() / (count.clamp(min=1) * (count > 0).sum().clamp(min=1))


def _copy(weights: Message) -> Message:
    return {name: tensor.clone() for name, tensor in weights.items()}
