"""Engine: where phases run. The seam between the waist and the clients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar, Protocol

from fedloom.core.absence import FaultPolicy
from fedloom.core.client import Client
from fedloom.core.message import Absent, Message, Schema
from fedloom.core.method import Method

LongestReply = Callable[[str], Schema | None]  # takes a client
Details = Mapping[str, object]  # what a run's summary says about its engine, as JSON


class Engine(Protocol):
    """Runs phases at clients.

    Attributes:
        tolerates_failures: Whether the other clients continue when one fails.
        supports_deadline: Whether an exchange can end before all clients have answered.
        round: The current round; set before each call.
        longest_reply: Returns the schema of the longest valid reply of a client; None if it is not
            known. Set before each call.
    """

    tolerates_failures: ClassVar[bool]
    supports_deadline: ClassVar[bool]
    round: int
    longest_reply: LongestReply

    def call(self, phase: str, messages: dict[str, Message]) -> Mapping[str, Message | Absent]:
        """Runs a phase at each client in `messages`. Returns each one's reply, or its absence.

        If every client must answer, a client's error is raised.
        """

    def snapshot(self) -> Message:
        """Returns everything of the clients that a later round depends on, as tensors."""

    def restore(self, saved: Message) -> None:
        """Restores a snapshot. The clients must have been set up before."""

    def keep_models(self, stage: str, shared: Message | None) -> None:
        """Makes every client keep what predicted in the evaluation that has just been scored.

        It is the best of its stage so far and replaces what the client kept for that stage.

        Args:
            stage: The stage of the evaluation.
            shared: The shared model that was scored. None: the clients' own.
        """

    def models(self, stage: str | None = None, shared: Message | None = None) -> dict[str, Message]:
        """Returns what each client predicts with, for clients that have that here.

        Args:
            stage: What the client kept for a stage. None: what it has now.
            shared: The shared model of now. None: the clients' own.
        """

    def artifacts(self) -> dict[str, Message]:
        """Returns each client's artifacts; see `Method.artifacts`."""

    def details(self) -> Details:
        """Returns what a run's summary says about the engine."""

    def peak_mb(self) -> float:
        """Returns the peak memory of this process and its workers, in MB."""

    def finish(self, stage: str = "", round: int = 0) -> None:
        """Called when the run is completed.

        Args:
            stage: The stage that is reported.
            round: The round of its best evaluation.
        """

    def close(self) -> None:
        """Releases everything that the engine holds outside this process."""


class EngineFactory(Protocol):
    """Makes an engine. Each engine's class is one."""

    @property
    def tolerates_failures(self) -> bool:
        """As in `Engine`."""

    @property
    def supports_deadline(self) -> bool:
        """As in `Engine`."""

    def __call__(
        self, method: Method, clients: Iterable[Client], policy: FaultPolicy, workers: int = 0
    ) -> Engine:
        """Takes the method, its clients, the absences to tolerate, and the number of workers.

        workers: 0 lets the engine choose; only engines with workers take another number.
        """
