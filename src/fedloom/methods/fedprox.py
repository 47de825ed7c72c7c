"""FedProx: FedAvg with a penalty that keeps clients near the global weights.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: "Federated Optimization in Heterogeneous Networks",
MLSys 2020, Eq. 2.

What travels: as in FedAvg.

    min  CE + (μ/2) ‖θ_k − θ‖²          `objective`

μ = 0 is bit-identical to FedAvg.
"""

from dataclasses import dataclass

from torch import Tensor

from fedloom.core.client import Client
from fedloom.core.message import Message
from fedloom.core.settings import setting
from fedloom.data.graph import Graph
from fedloom.methods.fedavg import FedAvg
from fedloom.nn.model import Model
from fedloom.nn.weights import squared_distance


@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedAvg with a proximal term."""

    mu: float = setting(1e-3, "μ, weight of the proximal term", at_least=0, tune="1e-4..1")

    def objective(
        self, client: Client, batch: Graph, model: Model, global_weights: Message
    ) -> Tensor:
        """Eq. 2."""
        loss = super().objective(client, batch, model, global_weights)
        return loss + self.mu / 2 * squared_distance(model, global_weights)
