"""Co-Boost: DENSE with harder generated nodes and a learned weight of each client's model.

Dai, Zhang, Li, Liu, Yang, Han: "Enhancing One-Shot Federated Learning Through Data and Ensemble
Co-Boosting", ICLR 2024, Algorithm 1. The nodes and the ensemble improve each other.

What travels: as in DENSE.

    L_gen = (1 − p_y)^h CE(D(x̂), y) − λ KL(D(x̂) ‖ f_S(x̂))              `emphasis`
        p = softmax D(x̂), a constant in the factor
    x̃ = x̂ + ε ‖x̂‖ g / ‖g‖,  g = ∇_x̂ ⟨v, softmax(D(x̂) / τ)⟩            `view`
        v uniform in [−1, 1]^C
    L_dis = τ² KL(D(x̃) / τ ‖ f_S(x̃) / τ)                               `Dense.student_loss`
    w ← w − μ sign ∇_w CE(D(x̂), y), clipped to [0, 1], scaled to        `reweigh`
        sum to 1, on every batch generated so far

With h = ε = μ = λ = 0 this is DENSE with λ = 0. With λ > 0 they differ in ω, which is 1 everywhere
here.

Departures: those of DENSE. Also, ε is relative to the length of a node's features, because the
server does not know their scale (the authors add ε = 8/255 times the sign of g to pixels). μ does
not shrink over epochs. Links stay those of the unperturbed nodes.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.server import Server
from fedloom.core.settings import setting
from fedloom.data.graph import Graph
from fedloom.methods.dense import Dense, Ensemble


@dataclass(frozen=True)
class CoBoost(Dense):
    """DENSE, boosted."""

    adversarial: float = setting(
        1.0, "λ, weight of the distance between ensemble and student", at_least=0, tune="0.1..10"
    )
    temperature: float = setting(
        4.0, "τ, at which the student matches the ensemble", above=0, tune="1..20"
    )
    hard: float = setting(
        1.0, "h, exponent of the weight of hard nodes in CE; 0 = equal", at_least=0, tune="0..2"
    )
    epsilon: float = setting(
        8 / 255,
        "ε, length of the perturbation relative to a node's features",
        at_least=0,
        tune="0..0.1",
    )
    mu: float = setting(0.01, "μ, step of the ensemble's weights", at_least=0, tune="0.001..0.1")

    def emphasis(self, teacher: Tensor, student: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (1 − p_y)^h, and 1."""
        p_y = teacher.detach().softmax(1).gather(1, y.unsqueeze(1)).squeeze(1)
        return (1 - p_y) ** self.hard, torch.ones(len(y))

    def view(self, server: Server, ensemble: Ensemble, graph: Graph) -> Graph:
        """Returns x̃: nodes moved so that the ensemble's output changes in a random direction."""
        x = graph.x.clone().requires_grad_()
        probability = F.softmax(ensemble(replace(graph, x=x)) / self.temperature, 1)
        v = torch.empty_like(probability).uniform_(-1, 1, generator=server.rng("view"))
        (g,) = torch.autograd.grad((v * probability).sum(), x)
        length = graph.x.norm(dim=1, keepdim=True)
        return replace(graph, x=graph.x + self.epsilon * length * F.normalize(g))

    def reweigh(self, ensemble: Ensemble, graphs: list[Graph]) -> None:
        """Takes signed steps of w towards the clients that predict the labels."""
        for graph in graphs:
            w = ensemble.share.clone().requires_grad_()
            logits = torch.einsum("k,knc->nc", w / w.sum(), ensemble.each(graph))
            (g,) = torch.autograd.grad(F.cross_entropy(logits, graph.y), w)
            w = (ensemble.share - self.mu * g.sign()).clamp(0, 1)
            if w.any():  # else all weights would be 0
                ensemble.share = w / w.sum()
