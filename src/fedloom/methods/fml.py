"""FML: every client's own model and a small common model teach each other; the latter is averaged.

Shen, Zhang, Jia, Zhang, Huang, Zhou, Kuang, Wu, Wu: "Federated Mutual Learning", 2020, Algorithm 1.

What travels, per client:
    once     up    size      number of local items n_k
    a round  down  copilot   θ, the weights of the common model ("meme model" in the paper, copilot
                             in FedGKC)
             up    copilot   θ_k, its weights after E local epochs

    own model:  min α CE + (1 − α) KL(P_c ‖ P)                  `losses`
    copilot:    min β CE + (1 − β) KL(P ‖ P_c)                  `losses`
    θ ← Σ_k (n_k / Σ n) θ_k                                     `run`
    P, P_c: class probabilities of the own model and of the copilot

A step uses both models as they are before it. The first argument of KL is the teacher; no gradient
reaches it. Own models are evaluated. Nothing of them travels.

Departures: KL is taken over all nodes that training may see (`over`; the paper has only labelled
images). α = β = 0.5; the paper's range is 0.2 to 0.8. A benchmark's default of 1 turns the teaching
off.
"""

from dataclasses import dataclass

from torch import Tensor

from fedloom.core.client import Client
from fedloom.core.message import Message
from fedloom.core.phase import averaged, phase
from fedloom.core.server import Server
from fedloom.core.settings import setting
from fedloom.data.graph import Graph
from fedloom.methods._shared.copilot import Outputs, WithCopilot
from fedloom.nn.weights import load_weights, weights


@dataclass(frozen=True)
class FML(WithCopilot):
    """Mutual learning with an averaged copilot."""

    alpha: float = setting(
        0.5,
        "α, weight of the cross-entropy in the own model's loss",
        at_least=0,
        at_most=1,
        tune="0.1..0.9",
    )
    beta: float = setting(
        0.5,
        "β, weight of the cross-entropy in the copilot's loss",
        at_least=0,
        at_most=1,
        tune="0.1..0.9",
    )

    @averaged(by="size")
    @phase(copilot="~copilot")
    def train(self, client: Client, copilot: Message) -> Message:
        """E local epochs of both models, the copilot from the common weights."""
        load_weights(client.state["copilot"], copilot)
        self.descend(client, client.state["model"])
        return {"copilot": weights(client.state["copilot"])}

    def losses(
        self, client: Client, batch: Graph, own: Outputs, copilot: Outputs
    ) -> tuple[Tensor, Tensor]:
        """Returns the losses of the own model and of the copilot."""
        (_, own_logits), (_, copilot_logits) = own, copilot
        own_ce = client.loss(own_logits, batch)
        copilot_ce = client.loss(copilot_logits, batch, record=False)
        own_kl = self.taught(batch, teacher=copilot_logits, student=own_logits)
        copilot_kl = self.taught(batch, teacher=own_logits, student=copilot_logits)
        own_loss = self.alpha * own_ce + (1 - self.alpha) * own_kl
        copilot_loss = self.beta * copilot_ce + (1 - self.beta) * copilot_kl
        return own_loss, copilot_loss

    def run(self, server: Server) -> None:
        """Algorithm 1."""
        server.ask(self.setup)
        state = server.state
        state["model"] = self.first_copilot(server)
        for _ in server.rounds(self.rounds):
            state["model"] = server.mean(self.train, copilot=state["model"])["copilot"]
            server.evaluate()
