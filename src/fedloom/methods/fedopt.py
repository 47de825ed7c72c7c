"""FedOpt (FedAdam): the server applies Adam to the clients' average change, as if to a gradient.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan: "Adaptive Federated Optimization",
ICLR 2021, Algorithm 2.

What travels: as in FedAvg.

    Δ = Σ w_k θ_k − θ                                                          `run`
    m ← β₁ m + (1 − β₁) Δ,   v ← β₂ v + (1 − β₂) Δ²,   θ ← θ + η_s m / (√v + τ)

As in the paper, there is no bias correction, and v starts at τ².
"""

from dataclasses import dataclass

import torch

from fedloom.core.message import tree_map
from fedloom.core.server import Server
from fedloom.core.settings import setting
from fedloom.methods.fedavg import FedAvg


@dataclass(frozen=True)
class FedOpt(FedAvg):
    """FedAvg with Adam at the server."""

    server_lr: float = setting(0.01, "η_s, the server's learning rate", above=0, tune="0.001..0.1")
    beta1: float = setting(0.9, "β₁", at_least=0, below=1)
    beta2: float = setting(0.99, "β₂", at_least=0, below=1)
    tau: float = setting(1e-3, "τ, degree of adaptivity", above=0, tune="1e-5..0.1")

    def run(self, server: Server) -> None:
        """Algorithm 2."""
        server.ask(self.setup)
        state = server.state
        state["model"] = server.model()
        state["m"] = tree_map(torch.zeros_like, state["model"])
        state["v"] = tree_map(lambda p: torch.full_like(p, self.tau**2), state["model"])
        for _ in server.rounds(self.rounds):
            average = server.mean(self.train, model=state["model"])["model"]
            delta = tree_map(torch.sub, average, state["model"])
            state["m"] = tree_map(
                lambda m, d: self.beta1 * m + (1 - self.beta1) * d, state["m"], delta
            )
            state["v"] = tree_map(
                lambda v, d: self.beta2 * v + (1 - self.beta2) * d.square(), state["v"], delta
            )
            state["model"] = tree_map(
                lambda p, m, v: p + self.server_lr * m / (v.sqrt() + self.tau),
                state["model"],
                state["m"],
                state["v"],
            )
            server.evaluate(model=state["model"])
        self.finish(server)
