"""Local: every client trains alone on its own graph, the baseline that a federation has to beat.

The papers call it Local, Standalone or Separate. Model, optimiser and number of steps are those of
FedAvg: R rounds of E epochs.

What travels: nothing.

    min  CE over the client's training items          `LocalTraining.objective`
"""

from dataclasses import dataclass

from fedloom.core.client import Client
from fedloom.core.message import Message
from fedloom.core.phase import phase
from fedloom.core.server import Server
from fedloom.methods._shared.local_training import LocalTraining


@dataclass(frozen=True)
class Local(LocalTraining):
    """Training without any communication."""

    @phase()
    def train(self, client: Client) -> Message:
        """Trains for E epochs on the client's own training items."""
        self.descend(client, client.state["model"])
        return {}

    def run(self, server: Server) -> None:
        """R rounds of E epochs at each client."""
        server.ask(self.setup)
        for _ in server.rounds(self.rounds):
            server.ask(self.train)
            server.evaluate()
