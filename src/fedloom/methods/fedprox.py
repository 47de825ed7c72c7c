"""FedProx: FedAvg whose clients are held near the global weights.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: "Federated Optimization in Heterogeneous Networks", MLSys 2020, Eq. 2.

What travels: as in FedAvg.

    min  CE + (μ/2) ‖θ_k − θ‖²          `objective`

μ = 0 is FedAvg, bit for bit.
"""

from dataclasses import dataclass

from torch import Tensor

from fedloom.graph import Graph
from fedloom.learn import squared_distance
from fedloom.message import Message
from fedloom.method import setting
from fedloom.methods.fedavg import FedAvg
from fedloom.models import Model
from fedloom.party import Client


@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedAvg with a proximal term."""

    mu: float = setting(1e-3, "μ, weight of the proximal term", at_least=0, tune="1e-4..1")

    def objective(self, client: Client, batch: Graph, net: Model, model: Message) -> Tensor:  # type: ignore[override]
        """Eq. 2."""
        return super().objective(client, batch, net, model) + self.mu / 2 * squared_distance(net, model)
