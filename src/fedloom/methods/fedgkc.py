"""FedGKC: own models of any architecture and a common copilot teach each other.

Wu et al.: "Toward Model-centric Heterogeneous Federated Graph Learning: A Knowledge-driven
Approach", arXiv 2501.12624, Algorithm 1. The more certain a client's copilot is, the more it counts
in the common model.

What travels, per client and round (number: the number of the round):
    down  copilot, number           θ, the weights of the common model
    up    volume, power             n_k and P_k
    down  volume, power, number     their sums over the clients
    up    update                    w_k (θ_k − θ), the client's part of the common model's change

    L_neigh(t → u) = 1/Q Σ_i Σ_{j ∈ N(i) ∪ {i}}
                     KL(softmax z^t_j ‖ softmax z^u_i)                   Eq. 1      `neighbourly`
    copilot:    min α CE + β L_neigh(own → copilot)
                    + (1 − α − β) KL(P ‖ P_c)                            Eq. 2      `losses`
    own model:  min α CE + β L_neigh(copilot → own)
                    + (1 − α − β) KL(P_c ‖ P) + w L_self                 Eq. 3      `losses`
    L_self = mean (z^weak − z^strong)² + KL(P^weak ‖ P^strong),
             two views, drawn anew in every step                         Eq. 4, 5   `itself`
    P_k = mean_i strength_i + clarity_i, of the trained copilot's
          probabilities p_i over all nodes                               Eq. 6-9    `assurance`
        strength_i = max_c p_ic
        clarity_i = (max p_i − Σ others) / (C − 1) − λ mean_{j ∈ N(i)} cos(p_i, p_j)
    w_k = (1 − κ) n_k / Σ n + κ P_k / Σ P                                Eq. 10-12  `share`
    θ ← Σ_k w_k θ_k                                                                 `run`

The server needs only sums: first those of n_k and P_k, from which every client computes its own
w_k, then that of the weighted changes. So it runs under `--secure`. There, a server that follows
the protocol sees no client's copilot, size or assurance (a server that sent different sums to
different clients could single one out). Since θ + Σ w_k (θ_k − θ) = Σ w_k θ_k, a client that is
lost between the two sums takes its part of the change with it and nothing of the model. Own models
are evaluated. The neighbourly loss is one sparse product:
Σ_j KL(a_j ‖ b_i) = Σ_j a_j·log a_j − (Σ_j a_j)·log b_i. An edge of weight w counts w times.

Stated behaviour. An isolated node has no smoothness term, and only itself in the neighbourly loss.
A client without labelled nodes trains nothing and still has its weight: it holds the mean where it
is. P_k < 0, as uniform predictions give, counts as 0. If no P_k is above 0, only volumes count. A
client refuses sums that are less than its own part. It adds nothing in a round in which it was not
trained.

Departures. Q counts the pairs (i, j) (`norm`; the paper's count of nodes makes the loss grow with
the degree). U_i, which the paper leaves undefined, is {i}. The weak view teaches the strong one,
gets no gradient (`symmetric`: both learn) and has no dropout. The paper does not give the views'
rates; they are FGSSL's. `warmup` rounds use only labels, 0 in the paper. They keep untrained
teachers from killing the units of models whose input is not scaled (Computers: 300 ones per node).
The paper's ½ is κ. `mean_others` reads the bracket as max p_i − (mean of the others).
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.core.message import Message, tree_map
from fedloom.core.phase import phase, summed
from fedloom.core.server import Server
from fedloom.core.settings import setting
from fedloom.data.graph import Graph
from fedloom.errors import ConfigError, MessageError
from fedloom.methods._shared.copilot import Outputs, WithCopilot, copilot_weights
from fedloom.nn.augment import random_view
from fedloom.nn.build import parse_spec
from fedloom.nn.distillation import divergence, neighbourly, squared_error
from fedloom.nn.training import outputs
from fedloom.nn.weights import load_weights, weights


@dataclass(frozen=True)
class _Trained:
    """What a client keeps from `train` to `contribute`: the round, θ, n_k and P_k."""

    number: Tensor
    copilot: Message
    volume: Tensor
    power: Tensor


@dataclass(frozen=True)
class FedGKC(WithCopilot):
    """Mutual and self-distillation, and a mean weighted by certainty."""

    alpha: float = setting(
        0.6,
        "α, weight of the cross-entropy in both models' losses",
        at_least=0,
        at_most=1,
        tune="0.4..0.8",
    )
    beta: float = setting(
        0.2,
        "β, weight of the neighbourly loss; the logits' weight is 1 − α − β",
        at_least=0,
        at_most=1,
        tune="0.1..0.3",
    )
    norm: str = setting(
        "pairs", "Q, what the neighbourly loss is averaged over", choices=("pairs", "nodes")
    )
    self_weight: float = setting(
        1.0, "w, weight of the self-distillation", at_least=0, tune="0.1..10"
    )
    symmetric: bool = setting(False, "whether the weak view learns from the strong one too")
    weak_edges: float = setting(
        0.3, "share of edges that the weak view drops", at_least=0, at_most=1, tune="0.1,0.3"
    )
    weak_columns: float = setting(
        0.3,
        "share of feature columns that the weak view masks",
        at_least=0,
        at_most=1,
        tune="0.1,0.3",
    )
    strong_edges: float = setting(
        0.8, "share of edges that the strong view drops", at_least=0, at_most=1, tune="0.4,0.8"
    )
    strong_columns: float = setting(
        0.5,
        "share of feature columns that the strong view masks",
        at_least=0,
        at_most=1,
        tune="0.4,0.5",
    )
    warmup: int = setting(
        0, "first rounds, in which both models learn only from labels", at_least=0
    )
    kappa: float = setting(
        0.5,
        "κ, share of the assurance in a client's weight; its volume has the rest",
        at_least=0,
        at_most=1,
        tune="0..1",
    )
    strength: bool = setting(True, "whether strength is part of the assurance")
    clarity: bool = setting(True, "whether the distance between classes is part of the assurance")
    lam: float = setting(
        0.1,
        "λ, weight of the similarity to neighbours in the assurance",
        at_least=0,
        tune="0.01..1",
    )
    mean_others: bool = setting(
        False, "measure the distance between classes to the mean of the others"
    )
    volume: str = setting("nodes", "n_k, what a client's volume counts", choices=("nodes", "train"))

    tasks: ClassVar[tuple[str, ...]] = ("node",)
    needs_of_model: ClassVar[str] = "embeddings"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha + self.beta > 1 + 1e-9:
            raise ConfigError(
                f"method.alpha + method.beta is {self.alpha + self.beta:g}, must be at most 1: "
                "the rest is the logits' weight"
            )

    def check(self, facts: Facts) -> None:
        """Requires equal widths, because the neighbourly loss compares embeddings."""
        super().check(facts)
        width = parse_spec(self.copilot).width
        for spec in facts.models if self.beta else ():
            if (found := facts.width_of(spec)) != width:
                raise ConfigError(
                    f"method.copilot: {self.copilot!r} has embeddings {width} wide, model {spec!r} "
                    f"has {found}; they must be equal, or method.beta = 0"
                )

    # ---- the client's side ----
    @summed
    @phase(volume="int64[] in 0..nodes", power="float32[] in 0..")
    def train(self, client: Client, copilot: Message, number: Tensor) -> Message:
        """E local epochs of both models. Answers n_k and P_k."""
        model, graph = client.state["copilot"], client.graph
        load_weights(model, copilot)
        warm = number <= self.warmup
        method = replace(self, alpha=1.0, beta=0.0, self_weight=0.0) if warm else self
        method.descend(client, client.state["model"])
        power = torch.tensor(0.0)
        if graph.num_nodes:
            with torch.no_grad():
                power = self.assurance(model(graph).softmax(1), graph).clamp(min=0)
        volume = torch.tensor(graph.num_nodes) if self.volume == "nodes" else graph.train.sum()
        client.memory["round"] = _Trained(number, copilot, volume, power)
        return {"volume": volume, "power": power}

    @summed
    @phase(update=copilot_weights)
    def contribute(self, client: Client, volume: Tensor, power: Tensor, number: Tensor) -> Message:
        """Answers the client's part of the common model's change.

        It is 0 if the client was not trained in this round.
        """
        copilot = weights(client.state["copilot"])
        trained: _Trained | None = client.memory.pop("round", None)
        if trained is None or trained.number != number:
            return {"update": tree_map(torch.zeros_like, copilot)}
        parts = {"volume": (trained.volume, volume), "power": (trained.power, power)}
        for name, (own, total) in parts.items():
            if own > total * (1 + 1e-3):  # more than rounding
                raise MessageError(
                    f"to client {client.name!r} in 'contribute': {name} is {total:g}, less than "
                    f"its own part of {own:g}"
                )
        w = self.share(trained.volume, trained.power, volume, power)
        return {"update": tree_map(lambda new, old: w * (new - old), copilot, trained.copilot)}

    def losses(
        self, client: Client, batch: Graph, own: Outputs, copilot: Outputs
    ) -> tuple[Tensor, Tensor]:
        """Returns the losses of the own model (Eq. 3 with 5) and of the copilot (Eq. 2)."""

        def learning(student: Outputs, teacher: Outputs) -> Tensor:
            loss = self.alpha * client.loss(student[1], batch, record=student is own)
            if self.beta:
                loss = loss + self.beta * neighbourly(batch, teacher[0], student[0], self.norm)
            return loss + (1 - self.alpha - self.beta) * self.taught(batch, teacher[1], student[1])

        own_loss, copilot_loss = learning(own, copilot), learning(copilot, own)
        if self.self_weight:
            own_loss = own_loss + self.self_weight * self.itself(client, batch)
        return own_loss, copilot_loss

    def itself(self, client: Client, batch: Graph) -> Tensor:
        """Returns L_self: the own model on a weak view teaches it on a strong one (Eq. 4, 5)."""
        model, rng, noise = client.state["model"], client.rng("views"), client.rng("views' dropout")
        weak = random_view(batch, self.weak_edges, self.weak_columns, rng)
        strong = random_view(batch, self.strong_edges, self.strong_columns, rng)
        z_strong, strong_logits = outputs(model, strong, noise)
        with torch.set_grad_enabled(self.symmetric):
            z_weak, weak_logits = outputs(model, weak)
        loss = squared_error(z_strong, z_weak) + divergence(weak_logits, strong_logits)
        return loss + divergence(strong_logits, weak_logits) if self.symmetric else loss

    def assurance(self, p: Tensor, graph: Graph) -> Tensor:
        """Returns P_k of class probabilities [nodes, C] (Eq. 6-9). It may be negative."""
        top, others = p.max(1).values, max(p.shape[1] - 1, 1)
        total = torch.zeros(len(p))
        if self.strength:
            total += top
        if self.clarity:
            total += top - (1 - top) / others if self.mean_others else (2 * top - 1) / others
        if self.lam:
            unit = F.normalize(p)
            total -= self.lam * (unit * graph.propagate(unit, "mean")).sum(1)
        return total.mean()

    def share(self, volume: Tensor, power: Tensor, all_volume: Tensor, all_power: Tensor) -> Tensor:
        """Returns w_k (Eq. 10-12). If no client has assurance, only volumes count.

        Args:
            volume: n_k.
            power: P_k.
            all_volume: The sum of n_k over the clients.
            all_power: The sum of P_k.
        """
        kappa = self.kappa if all_power > 0 else 0.0
        by_volume = (1 - kappa) * volume / all_volume.clamp(min=1)
        return by_volume + kappa * power / all_power.where(all_power > 0, 1.0)

    # ---- the server's side ----
    def run(self, server: Server) -> None:
        """Algorithm 1, in two sums a round."""
        server.ask(self.setup)
        state = server.state
        state["model"] = self.first_copilot(server)
        for t in server.rounds(self.rounds):
            number = torch.tensor(t)
            total = server.sum(self.train, copilot=state["model"], number=number)
            change = server.sum(self.contribute, **total, number=number)["update"]
            state["model"] = tree_map(torch.add, state["model"], change)
            server.evaluate()
