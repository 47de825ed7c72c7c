"""Local: every client trains alone on its own graph. Nothing travels. The number that federating has to beat.

Called Local, Standalone or Separate in the papers. Same model, optimiser and number of steps as FedAvg: R rounds of E epochs.

What travels: nothing.
"""

from dataclasses import dataclass
from typing import ClassVar

from fedloom.learn import OPTIMIZERS, make_optimizer, step
from fedloom.message import Message
from fedloom.method import Method, phase, setting
from fedloom.party import Client, Server


@dataclass(frozen=True)
class Local(Method):
    """Training without any communication."""

    epochs: int = setting(3, "local epochs E a round", at_least=1)
    lr: float = setting(0.01, "learning rate η", above=0)
    weight_decay: float = setting(5e-4, "L2 penalty", at_least=0)
    optimizer: str = setting("adam", "optimiser", choices=OPTIMIZERS)

    evaluations: ClassVar[tuple[str, ...]] = ("local",)

    @phase()
    def setup(self, client: Client) -> Message:
        """A model of the client's own and its optimiser."""
        client.state["model"] = net = client.build()
        client.state["optimizer"] = make_optimizer(self.optimizer, net.parameters(), self.lr, self.weight_decay)
        return {}

    @phase()
    def train(self, client: Client) -> Message:
        """E epochs on the client's own training items."""
        for _ in range(self.epochs):
            logits = client.state["model"](client.graph, client.rng("dropout"))
            step(client.state["optimizer"], client.loss(logits))
        return {}

    def run(self, server: Server) -> None:
        """R times E epochs, each client for itself."""
        server.ask(self.setup)
        for _ in server.rounds(self.rounds):
            server.ask(self.train)
            server.evaluate()
