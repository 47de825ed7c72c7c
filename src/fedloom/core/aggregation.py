"""Aggregation: what the server gets to see of the clients' replies, and the client's side of it.

Here it is plain: the server sees each reply. In `fedloom.privacy.secure_aggregation` it sees sums
only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from fedloom.core.message import Message, Schema
from fedloom.core.phase import BoundPhase
from fedloom.core.privacy_terms import Spending
from fedloom.core.replies import Replies

if TYPE_CHECKING:
    from fedloom.core.client import Client
    from fedloom.core.method import Method
    from fedloom.core.server import Server


Refuse = Callable[[str, Message], None]  # takes a client and its reply, may raise a MessageError


@dataclass(frozen=True)
class Request:
    """What the server asks for.

    Args:
        phase: The phase to run.
        clients: Whom to ask. None: the participants of the round.
        each: What to send to each client on top of `message`. Its keys say whom to ask.
        message: What to send to all.
    """

    phase: BoundPhase
    clients: Sequence[str] | None
    each: Mapping[str, Message] | None
    message: Message


class Aggregation(Protocol):
    """How the server obtains replies, sums, means, scores and peer messages.

    Attributes:
        budget: What a run with differential privacy has spent; None in other runs.
    """

    budget: Spending | None

    def replies(
        self,
        server: Server,
        request: Request,
        needed: int | None = None,
        refuse: Refuse | None = None,
    ) -> Replies:
        """Returns each client's reply; see `Server.ask_phase`."""

    def sum(self, server: Server, request: Request) -> Message:
        """Returns the sum of the replies."""

    def mean(self, server: Server, request: Request) -> Message:
        """Returns the mean of the replies, weighted as the phase says."""

    def peer_messages(self, server: Server, request: Request, book_as: str | None) -> Replies:
        """Returns what clients write to each other: {sender: {receiver: message}}."""

    def evaluate(self, server: Server, message: Message, stage: str) -> None:
        """Has all clients score, and hands the result to the server's observer."""

    def summary(self, server: Server) -> dict[str, int] | None:
        """Returns the aggregation's part of a run's summary; None if it has none."""


class Responder(Protocol):
    """How a client answers."""

    def answer(self, method: Method, client: Client, phase: str, message: Message) -> Message:
        """Runs a phase at a client. Returns what may leave it."""


class PlainAggregation:
    """The server sees every client's reply."""

    budget: Spending | None = None

    def replies(
        self,
        server: Server,
        request: Request,
        needed: int | None = None,
        refuse: Refuse | None = None,
    ) -> Replies:
        """Asks the clients."""
        return server.ask_phase(request.phase, server.address(request), needed, refuse)

    def sum(self, server: Server, request: Request) -> Message:
        """Adds the replies in client order."""
        return self.replies(server, request).sum()

    def mean(self, server: Server, request: Request) -> Message:
        """Averages the replies. Each client's weight is asked for once, then kept."""
        by = request.phase.phase.weighted_by
        if not by:
            return self.replies(server, request).mean()
        each, clients = request.each, request.clients
        asked = server.participants if clients is None else clients
        weight = server.weights(by, list(each) if each is not None else asked)
        if each is not None:
            each = {client: each[client] for client in weight}
        narrowed = Request(request.phase, list(weight), each, request.message)
        return self.replies(server, narrowed).mean(weight)

    def peer_messages(self, server: Server, request: Request, book_as: str | None) -> Replies:
        """Asks the clients; the server can read what they write."""
        bound, messages = request.phase, server.address(request)

        def expected(client: str, reply: Message | None) -> Schema:
            return bound.phase.peer_schema(
                bound.method, server.facts, messages[client], reply, client
            )

        written = server.exchange(bound.name, messages, expected, book_as)
        if bound.phase.encrypted:
            server.remember(bound.name, messages, written)
        else:
            server.remember(bound.name, messages, addresses_of(written))
        return written

    def evaluate(self, server: Server, message: Message, stage: str) -> None:
        """Asks each client for its confusion matrices."""
        phase = server.method.evaluate
        replies = self.replies(server, Request(phase, server.clients, None, message))
        server.observer.evaluated(server, replies, stage)

    def summary(self, server: Server) -> dict[str, int] | None:
        """Nothing."""
        return None


class PlainResponder:
    """The client answers with the phase's reply."""

    def answer(self, method: Method, client: Client, phase: str, message: Message) -> Message:
        """Runs the phase."""
        reply: Message = getattr(method, phase)(client, **message)
        return reply


def addresses_of(written: Mapping[str, Message]) -> dict[str, Message]:
    """Returns senders and receivers without content. Ciphertexts differ in every run."""
    empty = torch.zeros(0)
    return {c: dict.fromkeys(sorted(sent), empty) for c, sent in written.items() if sent}
