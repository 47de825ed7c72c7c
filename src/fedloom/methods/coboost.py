"""Co-Boost: DENSE with harder invented nodes and an ensemble that learns whom to trust, each improving the other.

Dai, Zhang, Li, Liu, Yang, Han: "Enhancing One-Shot Federated Learning Through Data and Ensemble Co-Boosting", ICLR 2024, Algorithm 1.

What travels: as in DENSE.

    L_gen = (1 − p_y)^h CE(D(x̂), y) − λ KL(D(x̂) ‖ f_S(x̂)),  p = softmax D(x̂), a constant in the factor      `emphasis`
    x̃ = x̂ + ε ‖x̂‖ g / ‖g‖,  g = ∇_x̂ ⟨v, softmax(D(x̂) / τ)⟩,  v uniform in [−1, 1]^C                         `view`
    L_dis = τ² KL(D(x̃) / τ ‖ f_S(x̃) / τ)                                                                   DENSE's `student_loss`
    w ← w − μ sign ∇_w CE(D(x̂), y), clipped to [0, 1], scaled to sum to 1, on every batch made so far         `reweigh`

With h = ε = μ = λ = 0 this is DENSE with λ = 0; with λ > 0 they differ in ω, which is 1 everywhere here.

Departures: those of DENSE; and ε is relative to the length of a node's features, since the server does not know their scale (the
authors add ε = 8/255 times the sign of g to pixels). μ does not shrink over epochs. Links stay those of the unperturbed nodes.
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
        1.0, "h, how much more hard nodes count in CE; 0 = all alike", at_least=0, tune="0..2"
    )
    epsilon: float = setting(
        8 / 255,
        "ε, length of the perturbation relative to a node's features",
        at_least=0,
        tune="0..0.1",
    )
    mu: float = setting(0.01, "μ, step of the ensemble's weights", at_least=0, tune="0.001..0.1")

    def emphasis(self, taught: Tensor, learnt: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """(1 − p_y)^h, and 1."""
        sure = taught.detach().softmax(1).gather(1, y.unsqueeze(1)).squeeze(1)
        return (1 - sure) ** self.hard, torch.ones(len(y))

    def view(self, server: Server, ensemble: Ensemble, graph: Graph) -> Graph:
        """x̃: the nodes, moved so that the ensemble's output changes in a random direction."""
        x = graph.x.clone().requires_grad_()
        probability = F.softmax(ensemble(replace(graph, x=x)) / self.temperature, 1)
        v = torch.empty_like(probability).uniform_(-1, 1, generator=server.rng("view"))
        (g,) = torch.autograd.grad((v * probability).sum(), x)
        return replace(
            graph, x=graph.x + self.epsilon * graph.x.norm(dim=1, keepdim=True) * F.normalize(g)
        )

    def reweigh(self, ensemble: Ensemble, made: list[Graph]) -> None:
        """Signed steps of w towards the clients that know the labels."""
        for graph in made:
            w = ensemble.share.clone().requires_grad_()
            logits = torch.einsum("k,knc->nc", w / w.sum(), ensemble.each(graph))
            (g,) = torch.autograd.grad(F.cross_entropy(logits, graph.y), w)
            w = (ensemble.share - self.mu * g.sign()).clamp(0, 1)
            if w.any():  # else the step would leave nobody
                ensemble.share = w / w.sum()
