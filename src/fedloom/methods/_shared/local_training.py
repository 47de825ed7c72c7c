"""Local training: E epochs on the client's own graph. Local, FedAvg and most methods share it.

    min  CE over the client's training items          `objective`

In a node task, one step uses the whole graph. In a graph task, an epoch goes through the training
graphs in batches.
"""

from dataclasses import dataclass

from torch import Tensor

from fedloom.core.client import Client
from fedloom.core.message import Message
from fedloom.core.method import Method
from fedloom.core.phase import phase
from fedloom.core.settings import setting
from fedloom.data.graph import Graph
from fedloom.nn.model import Model
from fedloom.nn.training import OPTIMIZERS, make_optimizer, step


@dataclass(frozen=True)
class LocalTraining(Method):
    """Base of methods whose clients train a model of their own."""

    epochs: int = setting(3, "local epochs E per round", at_least=1, tune="1..10")
    lr: float = setting(0.01, "local learning rate η", above=0, tune="0.001..0.1")
    weight_decay: float = setting(5e-4, "L2 penalty", at_least=0, tune="1e-6..0.01")
    optimizer: str = setting("adam", "local optimiser", choices=OPTIMIZERS)
    batch_size: int = setting(
        32,
        "graphs per step in graph tasks, 0 = all; a node task uses the whole graph",
        at_least=0,
        task="graph",
        tune="16,32,64,128",
    )

    @phase()
    def setup(self, client: Client) -> Message:
        """Builds the client's model, and an optimiser that keeps its moments over rounds."""
        client.state["model"] = model = client.build()
        client.state["optimizer"] = make_optimizer(
            self.optimizer, model.parameters(), self.lr, self.weight_decay
        )
        return {}

    def descend(self, client: Client, model: Model, received: Message | None = None) -> None:
        """Trains a model for E local epochs on the client's objective.

        Args:
            client: The client that trains.
            model: Its model, trained in place.
            received: What the client downloaded. None: nothing.
        """
        for _ in range(self.epochs):
            for batch in client.shuffled(self.batch_size):
                loss = self.objective(client, batch, model, received or {})
                step(client.state["optimizer"], loss)

    def objective(self, client: Client, batch: Graph, model: Model, received: Message) -> Tensor:
        """Returns the loss that a local step minimises.

        Args:
            client: The client that trains.
            batch: The graph of this step.
            model: The model that is trained.
            received: What the client downloaded; empty if nothing. Methods that download
                weights call it `global_weights`.
        """
        return client.loss(model(batch, client.rng("dropout")), batch)
