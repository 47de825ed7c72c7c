"""Overhearing: a run whose messages are kept, as the server and the clients see them.

`record` runs a method as `fedloom.run` does, with the real aggregation: in a secure run the masks
are real, and the server sees sums. It is the only place where messages are kept. The attacks of
`fedloom.experiments.disclosure` and `fedloom.experiments.audit` work on what it returns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.core.message import Message, isolate
from fedloom.core.method import Method
from fedloom.core.phase import BoundPhase, Phase, phases_of
from fedloom.core.replies import Replies
from fedloom.core.server import Server
from fedloom.core.waist import Expected
from fedloom.data.federation import Federation
from fedloom.data.graph import Graph
from fedloom.engines.loop import Engine
from fedloom.experiments.recorder import Recorder
from fedloom.experiments.result import Result
from fedloom.experiments.run import agree_on_facts, threads
from fedloom.experiments.settings import RunSettings
from fedloom.privacy.choice import responder_for


@dataclass(frozen=True)
class Exchange:
    """A phase of a recorded run.

    Attributes:
        round: The round; 0 before the first.
        phase: Its name.
        received: What each client received, decrypted.
        replies: Each client's reply, if the server can read it; in a secure run it cannot.
        total: The sum or mean that the server sees in a secure run.
        answers: What each client answered, before it was masked or encrypted. Only the receivers
            of peer messages may use it; otherwise it is what a guess is compared with.
        rows: The rows of each client's items when it answered, by the name of the tensor of the
            reply that holds such rows: embeddings or logits.
    """

    round: int
    phase: str
    received: Mapping[str, Message]
    replies: Mapping[str, Message]
    total: Message | None
    answers: Mapping[str, Message]
    rows: Mapping[str, Mapping[str, Tensor]]


@dataclass
class Recording:
    """What the parties of a run sent and received.

    Attributes:
        method: The method.
        facts: The facts of the run.
        graphs: The clients' graphs as they were before the run.
        inductive: Whether training sees neither validation nor test items.
        exchanges: The exchanges before the rounds, of the first and of the last round, in order.
        result: The outcome; None if only the first round was run.
    """

    method: Method
    facts: Facts
    graphs: Mapping[str, Graph]
    inductive: bool = False
    exchanges: list[Exchange] = field(default_factory=list)
    result: Result | None = None

    @property
    def secure(self) -> bool:
        """Whether the run is secure."""
        return self.facts.secure is not None

    def first_round(self) -> list[Exchange]:
        """Returns the exchanges before the rounds and of the first one."""
        return [exchange for exchange in self.exchanges if exchange.round <= 1]

    def declared(self, exchange: Exchange) -> Phase:
        """Returns the phase of an exchange."""
        return phases_of(type(self.method))[exchange.phase]


def record(
    method: Method,
    name: str,
    federation: Federation,
    model: str,
    settings: RunSettings,
    dropout: float = 0.5,
    whole: bool = False,
) -> Recording:
    """Runs a method in this process, and returns what its parties sent and received.

    Args:
        method: The method.
        name: Its name.
        federation: The clients' graphs.
        model: The clients' model.
        settings: The run settings. The engine is always the loop.
        dropout: Share of hidden units dropped in training.
        whole: Whether the run goes on after its first round.
    """
    facts = agree_on_facts(method, name, federation.roster, model, dropout, settings)
    graphs = dict(zip(federation.names, federation.graphs, strict=True))
    kept = Recording(method, facts, graphs, federation.inductive)
    heard: list[_Heard] = []
    told = _telling(method, heard)

    def engine() -> Engine:
        clients = (
            Client(c, graph, facts, federation.inductive, responder_for(facts, c))
            for c, graph in graphs.items()
        )
        return Engine(told, clients, settings.faults)

    recorder = _Listener(federation.roster, replace(settings, engine="loop", workers=0), None)
    recorder.kept, recorder.heard, recorder.whole = kept, heard, whole
    recorder.config = {"data": dict(federation.about), "model": {"name": model}}
    with suppress(_FirstRoundIsOver), threads(settings.threads):
        result = recorder.execute(name, told, facts, engine, False, federation.seconds_loading)
        kept.result = replace(result, federation=federation)
    return kept


# ---- what clients see ----
class _Heard(NamedTuple):
    """A phase at a client: what it received and answered, and its items' rows after that."""

    phase: str
    client: str
    received: Message
    answer: Message
    rows: dict[str, Tensor]


def _telling(method: Method, heard: list[_Heard]) -> Method:
    """Returns the same method, whose phases add to `heard` what they receive and answer."""

    def told(phase: Phase) -> Phase:
        def function(method: Any, client: Client, *values: Any, **message: Any) -> Message:
            named = dict(zip(phase.parameters, values, strict=False))  # one phase calls another
            received = isolate({k: v for k, v in (named | message).items() if v is not None})
            answer = phase.function(method, client, *values, **message)
            rows = _rows_of(client, phase)
            heard.append(_Heard(phase.name, client.name, received, isolate(answer), rows))
            return answer

        return replace(phase, function=wraps(phase.function)(function))

    cls = type(method)
    phases = {key: told(phase) for key, phase in phases_of(cls).items()}
    made: Callable[..., Method] = type(cls.__name__, (cls,), {**phases, "__module__": __name__})
    return made(**method.settings())


def per_class(declared: Phase) -> dict[str, str]:
    """Returns the names in a reply that hold a row per class, and what it is: "p" or "C".

    p is a row of embeddings, C a row of logits.
    """
    texts = {n: d for n, d in declared.reply.items() if isinstance(d, str)}
    rows = {n: d.rpartition(",")[2][0] for n, d in texts.items() if re.match(r"float32\[.*,", d)}
    return {n: axis for n, axis in rows.items() if axis == "p" or texts[n] == "float32[C,C]"}


@torch.no_grad()
def _rows_of(client: Client, declared: Phase) -> dict[str, Tensor]:
    """Returns the embeddings or logits of a client's items, by the names of `per_class`."""
    compute = {
        "p": lambda: client.state["model"].embed(client.graph),
        "C": lambda: client.state["model"](client.graph),
    }
    return {name: compute[axis]() for name, axis in per_class(declared).items()}


# ---- what the server sees ----
class _FirstRoundIsOver(Exception):  # noqa: N818  (not an error)
    """Ends a method's `run`."""


class _ListeningServer(Server):
    """A server that keeps what it sees. Its observer is a `_Listener`."""

    observer: _Listener

    def exchange(
        self,
        name: str,
        messages: Mapping[str, Message],
        expected: Expected,
        book_as: str | None = None,
        alike: bool = False,
        needed: int | None = None,
    ) -> Replies:
        """Keeps the replies that the server can read."""
        replies = super().exchange(name, messages, expected, book_as, alike, needed)
        phase = phases_of(type(self.method)).get(name)
        if phase is not None:  # the others are those of the protocol of secure sums
            sealed = self.facts.secure is not None and phase.read_by and phase.encrypted
            self.observer.keep(self, name, {} if sealed else dict(replies), None)
        return replies

    def sum(self, phase: BoundPhase, **options: Any) -> Message:
        """Keeps the sum, if the server does not see the replies."""
        return self._kept(phase, super().sum(phase, **options))

    def mean(self, phase: BoundPhase, **options: Any) -> Message:
        """Keeps the mean, if the server does not see the replies."""
        return self._kept(phase, super().mean(phase, **options))

    def _kept(self, phase: BoundPhase, total: Message) -> Message:
        if self.facts.secure is not None:
            self.observer.keep(self, phase.name, {}, isolate(total))
        return total


class _Listener(Recorder):
    """A recorder of a run that keeps its messages, too.

    Attributes:
        kept: The recording.
        heard: What the clients have received and answered since the last exchange.
        whole: Whether the run goes on after its first round.
    """

    server_class = _ListeningServer
    kept: Recording
    heard: list[_Heard]
    whole: bool

    def keep(
        self, server: Server, phase: str, replies: Mapping[str, Message], total: Message | None
    ) -> None:
        """Adds an exchange. Of the rounds after the first, only the last one stays."""
        told = [each for each in self.heard if each.phase == phase]
        self.heard.clear()
        now = server.round
        self.kept.exchanges[:] = [e for e in self.kept.exchanges if e.round <= 1 or e.round == now]
        self.kept.exchanges.append(
            Exchange(
                now,
                phase,
                {each.client: each.received for each in told},
                replies,
                total,
                {each.client: each.answer for each in told},
                {each.client: each.rows for each in told},
            )
        )

    def evaluated_in_sum(self, server: Server, total: Message, stage: str) -> None:
        """Keeps the sum of the scores, which `Server.sum` does not see."""
        self.keep(server, "evaluate_sum", {}, total)
        super().evaluated_in_sum(server, total, stage)

    def finished_round(self, server: Server) -> bool:
        """Ends the run after its first round, so that nothing that follows takes time."""
        if not self.whole:
            raise _FirstRoundIsOver
        return super().finished_round(server)
