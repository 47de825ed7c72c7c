"""FedTrim: FedAvg that drops the extremes of the clients' weights before it averages them.

An example of a method in one file:  fedloom run --method examples/own_method.py

What travels: as in FedAvg.

    θ_i ← mean of {θ_k,i} without its largest and smallest          `run`
"""

from dataclasses import dataclass

import torch

from fedloom.api import FedAvg, Server, setting, tree_map


@dataclass(frozen=True)
class FedTrim(FedAvg):
    """FedAvg with a trimmed mean."""

    drop: int = setting(1, "clients dropped at either end", at_least=0)

    def run(self, server: Server) -> None:
        """FedAvg's loop with another average."""
        server.ask(self.setup)
        state = server.state
        state["model"] = server.model()
        for _ in server.rounds(self.rounds):
            models = server.ask(self.train, model=state["model"]).column("model").values()
            state["model"] = tree_map(self.trimmed_mean, *models)
            server.evaluate(model=state["model"])

    def trimmed_mean(self, *weights: torch.Tensor) -> torch.Tensor:
        """The mean without the extremes, entry by entry."""
        ordered = torch.stack(weights).sort(0).values
        return ordered[self.drop : len(weights) - self.drop].mean(0)
