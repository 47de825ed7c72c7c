"""The reference engine: clients run one after another, in this process, in plain PyTorch.

Every other engine must agree with it.
"""

from collections.abc import Iterable, Mapping
from typing import ClassVar

from fedloom._system import peak_memory
from fedloom.core.absence import FaultPolicy
from fedloom.core.client import Client
from fedloom.core.message import Absent, Message, isolate
from fedloom.core.method import Method
from fedloom.core.waist import not_known
from fedloom.engines.base import Details, LongestReply


class Engine:
    """Runs a phase for one client after another.

    Messages are copied in both directions, so that no two parties share memory.
    """

    tolerates_failures: ClassVar[bool] = True
    supports_deadline: ClassVar[bool] = False
    round: int = 0
    longest_reply: LongestReply = staticmethod(not_known)

    def __init__(
        self,
        method: Method,
        clients: Iterable[Client],
        policy: FaultPolicy = FaultPolicy(),
        workers: int = 0,
    ):
        self.method, self.policy = method, policy
        self.clients = {client.name: client for client in clients}

    def call(self, phase: str, messages: dict[str, Message]) -> Mapping[str, Message | Absent]:
        """Runs the phase at each client. A client that fails is absent, if that is tolerated."""
        replies: dict[str, Message | Absent] = {}
        for name, message in messages.items():
            try:
                replies[name] = self.perform(name, phase, message)
            except Exception as error:
                if not self.policy.tolerates_absence:
                    raise
                replies[name] = Absent.by(error)
        return replies

    def perform(self, name: str, phase: str, message: Message) -> Message:
        """Runs the phase at one client."""
        return isolate(self.clients[name].perform(self.method, phase, isolate(message)))

    def snapshot(self) -> Message:
        """Returns all clients' snapshots."""
        return {name: s for name, client in self.clients.items() if (s := client.snapshot())}

    def restore(self, saved: Message) -> None:
        """Restores the clients that are in the snapshot."""
        for name, state in saved.items():
            self.clients[name].restore(state)

    def keep_models(self, stage: str, shared: Message | None) -> None:
        """Makes every client keep what it predicts with. All keep one copy of a shared model."""
        shared = None if shared is None else isolate(shared)
        for client in self.clients.values():
            client.keep(self.method, stage, shared)

    def models(self, stage: str | None = None, shared: Message | None = None) -> dict[str, Message]:
        """Returns what each client predicts with, now or in the best evaluation of a stage."""
        found = {
            name: client.predictor(self.method, shared)
            if stage is None
            else client.kept.get(stage, {})
            for name, client in self.clients.items()
        }
        return {name: model for name, model in found.items() if model}

    def artifacts(self) -> dict[str, Message]:
        """Returns copies of each client's artifacts."""
        found = {name: self.method.artifacts(client) for name, client in self.clients.items()}
        return {name: isolate(shown) for name, shown in found.items() if shown}

    def details(self) -> Details:
        """Nothing."""
        return {}

    def peak_mb(self) -> float:
        """Returns the peak memory of this process."""
        return peak_memory() / 2**20

    def finish(self, stage: str = "", round: int = 0) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""
