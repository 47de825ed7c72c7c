"""The reference engine: clients one after another, in this process. Every other engine has to agree with it, bit for bit."""

from collections.abc import Iterable
from typing import Any, ClassVar

from fedloom.allocator import peak
from fedloom.faults import Patience
from fedloom.learn import weights
from fedloom.message import Absent, Message, isolate
from fedloom.method import Method
from fedloom.party import Client, perform


class Engine:
    """Calls a phase for one client after another. Copies stand in for the wire, so that nobody shares memory with anybody."""

    outlives: ClassVar[bool] = True  # a client that fails leaves the others as they are
    interrupts: ClassVar[bool] = False  # nobody can be left behind in the middle of a phase
    round: int = 0  # the one under way, as the server counts

    def __init__(self, method: Method, clients: Iterable[Client], patience: Patience = Patience()):
        self.method, self.patience = method, patience
        self.clients = {client.name: client for client in clients}

    def call(self, phase: str, messages: dict[str, Message]) -> dict[str, Message | Absent]:
        """Takes a phase's name and a message per client, gives each client's reply.

        Who fails is absent; if everybody has to answer, its error is raised instead.
        """
        replies: dict[str, Message | Absent] = {}
        for name, sent in messages.items():
            try:
                replies[name] = self.reach(name, phase, sent)
            except Exception as error:
                if not self.patience.survives:
                    raise
                replies[name] = Absent.by(error)
        return replies

    def reach(self, name: str, phase: str, message: Message) -> Message:
        """One client's reply."""
        return isolate(perform(self.method, self.clients[name], phase, isolate(message)))

    def snapshot(self) -> Message:
        """Everything of the clients that a later round depends on, as tensors."""
        return {name: kept for name, client in self.clients.items() if (kept := client.snapshot())}

    def restore(self, saved: dict[str, Any]) -> None:
        """Puts the clients back to a snapshot; they must have been set up before, and who is not in it stays so."""
        for name, kept in saved.items():
            self.clients[name].restore(kept)

    def models(self) -> dict[str, Message]:
        """The weights of each client's model, for those that have one."""
        return {name: weights(client.state["model"]) for name, client in self.clients.items() if "model" in client.state}

    def exhibits(self) -> dict[str, Message]:
        """What each client has to show of itself, for those that have something."""
        return {name: isolate(shown) for name, client in self.clients.items() if (shown := self.method.exhibits(client))}

    def about(self) -> dict[str, Any]:
        """What a run's summary says of the engine beside its name: nothing here."""
        return {}

    def peak_mb(self) -> float:
        """The most memory that this process, and whoever works for it, have held so far."""
        return peak() / 2**20

    def finish(self) -> None:
        """Told that the run is completed: nothing follows from that here."""

    def close(self) -> None:
        """Lets go of whatever the engine holds outside this process: nothing here."""
