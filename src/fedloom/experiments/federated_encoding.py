"""Fitting an encoding to the tables of several parties, by sums.

What travels, per party:
    up to three times   down  state     what the sums have given so far
                        up    counts and sums of its columns; see `fedloom.data.encoding`
    once                down  state     the fitted encoding

With secure sums the server sees nothing but the sums over all parties.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from fedloom.core.absence import FaultPolicy
from fedloom.core.client import Client
from fedloom.core.facts import Facts, SecureTerms
from fedloom.core.ledger import Ledger
from fedloom.core.message import Message, Schema
from fedloom.core.method import Method
from fedloom.core.phase import Computed, phase, summed
from fedloom.core.replies import Replies
from fedloom.core.server import RoundPolicy, Server
from fedloom.core.settings import setting
from fedloom.data.encoding import STAGES, Encoding
from fedloom.data.raw_graph import RawGraph
from fedloom.engines.loop import Engine
from fedloom.errors import ConfigError, DataError
from fedloom.privacy.secure_aggregation import aggregation_for, require_cohort, responder_for

MODEL = "mlp-1x1"  # facts need a model, but nothing is trained here


def _part(name: str) -> Computed:
    """The declaration of one tensor of a stage's summands; nothing if the stage has none."""

    def schema(method: FitEncoding, facts: Facts, message: Message, reply: Any) -> Schema:
        rows = method.known(message.get("state")).schema
        return tuple(("", dtype, shape) for key, dtype, shape in rows if key == name)

    return Computed(schema)


@dataclass(frozen=True)
class FitEncoding(Method):
    """Fits an encoding to the raw tables of all clients: each client's graph is a `RawGraph`.

    `server.state["encoding"]` holds the result as tensors, and each client has the fitted encoding
    in `client.memory["encoding"]`.
    """

    declared: str = setting("", "the declared encoding, as JSON")

    requires_all: ClassVar[tuple[str, ...]] = (*STAGES, "keep")

    @cached_property
    def encoding(self) -> Encoding:
        """The declared encoding."""
        return Encoding.from_json(self.declared)

    def known(self, state: Message | None) -> Encoding:
        """Returns the encoding with what the sums have given so far."""
        return self.encoding.with_tensors(state or {})

    @summed
    @phase(parties=_part("parties"), votes=_part("votes"))
    def kinds(self, client: Client) -> Message:
        """Says which kinds each undeclared column can have."""
        return self._summands(client, None)

    @summed
    @phase(
        present=_part("present"),
        rows=_part("rows"),
        sums=_part("sums"),
        categories=_part("categories"),
    )
    def totals(self, client: Client, state: Message | None = None) -> Message:
        """Counts and sums of the columns."""
        return self._summands(client, state)

    @summed
    @phase(rows=_part("rows"), squares=_part("squares"))
    def squares(self, client: Client, state: Message | None = None) -> Message:
        """Sums of squared distances from the means."""
        return self._summands(client, state)

    @phase()
    def keep(self, client: Client, state: Message | None = None) -> Message:
        """Keeps the fitted encoding, `client.memory["encoding"]`."""
        client.memory["encoding"] = self.known(state)
        return {}

    def run(self, server: Server) -> None:
        """Asks for one sum per stage."""
        encoding = self.encoding
        while encoding.stage:
            total = server.sum(getattr(self, encoding.stage), **_state(encoding))
            encoding = encoding.fitted(total)
        server.state["encoding"] = encoding.tensors()
        server.ask(self.keep, **_state(encoding))

    def result(self, server: Server) -> Encoding:
        """Returns the fitted encoding after `run`."""
        return self.known(server.state["encoding"])

    def _summands(self, client: Client, state: Message | None) -> Message:
        graph, terms = client.full_graph, client.facts.secure
        if not isinstance(graph, RawGraph):
            raise DataError(f"client {client.name!r}: its graph has no table of raw columns")
        noise = 0 if terms is None else 32 if terms.bits == 64 else 8
        encoding, rows = self.known(state), graph.rows_to_fit(client.inductive)
        return dict(encoding.summands(graph.table, rows, noise))


def _state(encoding: Encoding) -> dict[str, Any]:
    """The message with what is fitted so far; empty messages do not travel."""
    tensors = encoding.tensors()
    return {"state": tensors} if tensors and encoding.stage != "kinds" else {}


def encoding_facts(
    clients: tuple[str, ...], num_classes: int = 1, secure: SecureTerms | None = None, seed: int = 0
) -> Facts:
    """Returns the facts of a fit: the clients' names and the terms of secure sums."""
    models = (MODEL,) * len(clients)
    return Facts(1, num_classes, "node", clients, models, seed=seed, secure=secure)


def fit_encoding(
    declared: Encoding,
    graphs: Mapping[str, RawGraph],
    *,
    secure: bool = False,
    inductive: bool = False,
) -> tuple[Encoding, Ledger]:
    """Fits an encoding to the tables of several parties that this process holds.

    Args:
        declared: The rules of the columns.
        graphs: The parties' graphs, by name.
        secure: Whether the sums are secure. That needs at least 3 parties.
        inductive: Whether only the rows of training items count.

    Returns:
        The fitted encoding, and the ledger of what travelled.
    """
    if secure:
        require_cohort(len(graphs), "the number of parties")
    facts = encoding_facts(tuple(graphs), secure=SecureTerms() if secure else None)
    method = FitEncoding(declared=declared.to_json())
    clients = [Client(n, g, facts, inductive, responder_for(facts)) for n, g in graphs.items()]
    engine = Engine(method, clients, FaultPolicy())
    policy, aggregation = RoundPolicy("local"), aggregation_for(facts)
    server = Server(method, facts, engine.call, policy, NoRounds(), aggregation)
    method.run(server)
    return method.result(server), server.ledger


class NoRounds:
    """The observer of a run that has neither rounds nor scores."""

    def entered_rounds(self, server: Server, count: int) -> int:
        """Never called."""
        raise ConfigError("fitting an encoding has no rounds")

    def finished_round(self, server: Server) -> bool:
        """Never called."""
        raise ConfigError("fitting an encoding has no rounds")

    def evaluated(self, server: Server, replies: Replies, stage: str) -> None:
        """Never called."""

    def evaluated_in_sum(self, server: Server, total: Message, stage: str) -> None:
        """Never called."""
