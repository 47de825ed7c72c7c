"""Local: every client trains alone on its own graph. Nothing travels. The number that federating has to beat.

Called Local, Standalone or Separate in the papers. Same model, optimiser and number of steps as FedAvg: R rounds of E epochs.

What travels: nothing.

    min  CE over the client's training items          `objective`

In a node task a step sees the whole graph; in a graph task an epoch goes through the training graphs in batches.
"""

from dataclasses import dataclass

from torch import Tensor

from fedloom.graph import Graph
from fedloom.learn import OPTIMIZERS, make_optimizer, step
from fedloom.message import Message
from fedloom.method import Method, phase, setting
from fedloom.models import Model
from fedloom.party import Client, Server


@dataclass(frozen=True)
class Local(Method):
    """Training without any communication."""

    epochs: int = setting(3, "local epochs E a round", at_least=1, tune="1..10")
    lr: float = setting(0.01, "local learning rate η", above=0, tune="0.001..0.1")
    weight_decay: float = setting(5e-4, "L2 penalty", at_least=0, tune="1e-6..0.01")
    optimizer: str = setting("adam", "local optimiser", choices=OPTIMIZERS)
    batch_size: int = setting(
        32, "graphs a step in graph tasks, 0 = all; node tasks take the whole graph", at_least=0, task="graph", tune="16,32,64,128"
    )

    @phase()
    def setup(self, client: Client) -> Message:
        """A model of the client's own, and an optimiser that keeps its moments over rounds."""
        client.state["model"] = net = client.build()
        client.state["optimizer"] = make_optimizer(self.optimizer, net.parameters(), self.lr, self.weight_decay)
        return {}

    @phase()
    def train(self, client: Client) -> Message:
        """E epochs on the client's own training items."""
        self.descend(client, client.state["model"])
        return {}

    def descend(self, client: Client, net: Model, model: Message | None = None) -> None:
        """E local epochs on the client's objective; `model` is what was downloaded, if anything."""
        for _ in range(self.epochs):
            for batch in client.shuffled(self.batch_size):
                step(client.state["optimizer"], self.objective(client, batch, net, model))

    def objective(self, client: Client, batch: Graph, net: Model, model: Message | None) -> Tensor:
        """What a local step minimises."""
        return client.loss(net(batch, client.rng("dropout")), batch)

    def run(self, server: Server) -> None:
        """R times E epochs, each client for itself."""
        server.ask(self.setup)
        for _ in server.rounds(self.rounds):
            server.ask(self.train)
            server.evaluate()
