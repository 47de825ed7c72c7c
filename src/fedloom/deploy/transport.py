"""Transport: what the coordinator needs in order to reach the parties.

`CoordinatorTransport` implements it with its own SuperLink, `apps.GridTransport` with one that is
running already.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

from fedloom.deploy.keys import PublicKey
from fedloom.deploy.superlink import LIMIT


class PartyStatus(NamedTuple):
    """The last sign of life of a party.

    Attributes:
        silence: Seconds since the party was last heard from.
        connections: How often the party has connected.
        closed: Whether the party has closed its last connection, as a process does that dies.
    """

    silence: float
    connections: int
    closed: bool = False


class Transport(Protocol):
    """Sends envelopes to parties and receives their answers."""

    def send(self, envelopes: Mapping[str, bytes], limit: int = LIMIT) -> dict[str, str]:
        """Sends an envelope to each party. Returns {message id: party}.

        Args:
            envelopes: The envelope of each party.
            limit: Bytes of a party's answer. A transport with a door of its own refuses a larger
                answer before it is in memory.
        """

    def receive(
        self, pending: Mapping[str, str], seconds: float
    ) -> Iterable[tuple[str, bytes | str]]:
        """Waits for answers. Returns (message id, envelope) or (message id, delivery error).

        Args:
            pending: The messages to wait for, as `send` returned them.
            seconds: How long to wait for the first answer.
        """

    def admit(self, parties: Mapping[str, PublicKey]) -> None:
        """Admits parties by these keys, and nobody else from now on."""

    def status(self) -> dict[str, PartyStatus]:
        """Returns the status of each party that has connected."""

    def close(self) -> None:
        """Releases what the transport holds."""
