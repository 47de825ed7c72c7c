"""A method of one's own is one file: this one, run with  fedloom run --method examples/own_method.py

FedTrim: FedAvg that drops, coordinate by coordinate, the largest and the smallest of the clients' weights before averaging.

What travels: as in FedAvg.

    θ_i ← mean of {θ_k,i} without its largest and smallest          `run`
"""

from dataclasses import dataclass

import torch

import fedloom
from fedloom.core.message import tree_map
from fedloom.core.server import Server
from fedloom.methods.fedavg import FedAvg


@dataclass(frozen=True)
class FedTrim(FedAvg):
    """FedAvg with a trimmed mean."""

    drop: int = fedloom.setting(1, "clients dropped at either end", at_least=0)

    def run(self, server: Server) -> None:
        """As FedAvg, with another average."""
        server.ask(self.setup)
        state = server.state
        state["model"] = server.model()
        for _ in server.rounds(self.rounds):
            models = server.ask(self.train, model=state["model"]).column("model").values()
            state["model"] = tree_map(self.trimmed_mean, *models)
            server.evaluate(model=state["model"])

    def trimmed_mean(self, *weights):
        """The mean without the extremes."""
        ordered = torch.stack(weights).sort(0).values
        return ordered[self.drop : len(weights) - self.drop].mean(0)
