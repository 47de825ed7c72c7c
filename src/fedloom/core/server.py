"""Server: the coordinator's side, and all that a method's `run` may see."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fedloom.core.absence import FaultPolicy
from fedloom.core.adversary import Adversary
from fedloom.core.aggregation import Aggregation, PlainAggregation, Refuse, Request
from fedloom.core.client import stream
from fedloom.core.combining import Combiner, Outliers, Reputation
from fedloom.core.facts import Facts, model_schema
from fedloom.core.message import Message, Schema, flatten, require_finite
from fedloom.core.method import Method
from fedloom.core.phase import BoundPhase, Phase
from fedloom.core.replies import Replies, require_weight
from fedloom.core.robust import Robustness
from fedloom.core.updates import Updates
from fedloom.core.waist import Call, Sizes, Waist
from fedloom.data.seeds import uniform_numbers
from fedloom.errors import ConfigError, NotFiniteError, unknown
from fedloom.nn.weights import weights


class Observer(Protocol):
    """Receives what happens in a run; see `fedloom.experiments.recorder`."""

    def entered_rounds(self, server: Server, count: int) -> int:
        """Called when the round loop starts. Returns how many rounds a resumed run has done."""

    def finished_round(self, server: Server) -> bool:
        """Called after each round. Returns True to stop the loop."""

    def evaluated(self, server: Server, replies: Replies, stage: str) -> None:
        """Called with every client's scores and training loss: its reply to `evaluate`."""

    def evaluated_in_sum(self, server: Server, total: Message, stage: str) -> None:
        """Called, in a secure run, with the sum of the clients' replies to `evaluate_sum`."""


@dataclass(frozen=True)
class RoundPolicy:
    """How rounds are run.

    Args:
        evaluation: Which model is evaluated: "local", "global" or "common".
        participation: Share of the clients that take part in a round.
        evaluate_every: Rounds between evaluations.
        faults: Which absences an exchange tolerates.
        retries: How often absent clients are asked again before a round fails.
        robustness: How means and sums of weights are protected against clients that lie.
    """

    evaluation: str
    participation: float = 1.0
    evaluate_every: int = 1
    faults: FaultPolicy = FaultPolicy()
    retries: int = 2
    robustness: Robustness = Robustness()


class Server(Waist):
    """Public facts, the server's own state and random streams, and requests to clients.

    It never holds a graph. `sizes` and `inductive` say what the clients said about their graphs at
    the start of the run; the ranges that phases declare are checked against it.

    Attributes:
        clients: All clients' names.
        participants: The clients that take part in the current round.
        round: The current round; 0 before the first one.
        state: What checkpoints keep: tensors, optimisers and dicts of them. `state["model"]` is
            the global model, if there is one.
        notes: Numbers that the method adds to the run's summary.
    """

    def __init__(
        self,
        method: Method,
        facts: Facts,
        call: Call,
        policy: RoundPolicy,
        observer: Observer,
        aggregation: Aggregation | None = None,
        sizes: Sizes = dict,
        inductive: bool = False,
    ):
        if facts.secure is not None and aggregation is None:
            raise ValueError("the server of a secure run needs the aggregation of fedloom.privacy")
        super().__init__(method, facts, call, policy.faults, policy.retries, sizes, inductive)
        self.streams: dict[str, torch.Generator] = {}
        self.participants: Sequence[str] = self.clients
        self.notes: dict[str, float] = {}
        self.observer, self._policy = observer, policy
        self.aggregation: Aggregation = aggregation or PlainAggregation()
        self.over = False  # the observer wants no further round
        self.seconds_evaluating = 0.0
        self.scored_shared = False  # whether the clients scored that model, not their own
        self._last_round = False
        self.outliers: dict[str, Outliers] = {}  # of this round, by phase
        self._rule_used = policy.robustness.is_mean  # whether the rule has combined something

    def rng(self, purpose: str) -> torch.Generator:
        """Returns the server's random stream for a purpose."""
        return stream(self.streams, self.facts.seed, "server", purpose)

    def model(self) -> Message:
        """Returns initial weights of the model that all clients run."""
        specs = sorted(set(self.facts.models))
        if len(specs) > 1:
            raise ConfigError(
                f"model: this method needs one model for all clients, got {', '.join(specs)}"
            )
        return dict(weights(self.facts.build(specs[0], "server")))

    def rounds(self, count: int) -> Iterator[int]:
        """Yields the round numbers 1 to count, and draws the participants of each.

        What a later round needs belongs in `state`.
        """
        if self.round:
            raise RuntimeError("rounds: a run has one round loop")
        self.round = done = self.observer.entered_rounds(self, count)
        if done:
            self.absences.report()  # what a resumed run repeats is in the history already
        for number in range(done + 1, (done if self.over else count) + 1):
            self.round, self._last_round = number, number == count
            self.participants, self.in_round = self._draw(), True
            self._begin_round()
            yield number
            self.in_round = False
            self._require_rule()
            if self.observer.finished_round(self):
                break
        self.participants = self.clients
        self._begin_round()  # what comes after the rounds counts as one more

    def ask(
        self,
        phase: BoundPhase,
        *,
        clients: Sequence[str] | None = None,
        each: Mapping[str, Message] | None = None,
        **message: Any,
    ) -> Replies:
        """Sends a message to clients, runs a phase there, returns what came back.

        Args:
            phase: One of the method's phases.
            clients: Whom to ask. The default is the participants of this round.
            each: What to send to each client on top of `message`. Its keys say whom to ask.
            message: What to send to all.
        """
        if phase.phase.read_by:
            raise ConfigError(
                f"server.ask: phase {phase.name!r} writes to other clients; use server.relay"
            )
        return self.aggregation.replies(self, Request(phase, clients, each, message))

    def sum(
        self,
        phase: BoundPhase,
        *,
        clients: Sequence[str] | None = None,
        each: Mapping[str, Message] | None = None,
        **message: Any,
    ) -> Message:
        """`ask` for the sum of the replies. The phase is marked `@summed`."""
        _require_aggregate(phase, "sum")
        total = self.aggregation.sum(self, Request(phase, clients, each, message))
        return self._finite(phase, total, "sum")

    def mean(
        self,
        phase: BoundPhase,
        *,
        clients: Sequence[str] | None = None,
        each: Mapping[str, Message] | None = None,
        **message: Any,
    ) -> Message:
        """`ask` for the mean of the replies. The phase is marked `@averaged`."""
        _require_aggregate(phase, "mean")
        mean = self.aggregation.mean(self, Request(phase, clients, each, message))
        return self._finite(phase, mean, "mean")

    def relay(self, phase: BoundPhase, *, book_as: str | None = None, **message: Any) -> None:
        """Client to client: all clients write in `phase`, and read in the phase it names.

        Args:
            phase: A phase marked `@peer_messages`.
            book_as: The phase that the ledger books the traffic under.
            message: What to send to the writers.
        """
        self.deliver(phase, self.collect(phase, book_as=book_as, **message), book_as=book_as)

    def collect(self, phase: BoundPhase, *, book_as: str | None = None, **message: Any) -> Replies:
        """The first half of `relay`: returns {sender: {receiver: message}}."""
        if not phase.phase.read_by:
            raise ConfigError(
                f"server.relay: phase {phase.name!r} is not marked @peer_messages "
                "(docs/adding-a-method.md)"
            )
        request = Request(phase, self.clients, None, message)
        return self.aggregation.peer_messages(self, request, book_as)

    def deliver(
        self, phase: BoundPhase, written: Mapping[str, Message], *, book_as: str | None = None
    ) -> None:
        """The second half of `relay`: hands every client its messages, {sender: message}."""
        reader = phase.phase.read_by
        arrived: dict[str, Message] = {client: {} for client in self.clients}
        for sender, sent in written.items():
            for receiver, message in sent.items():
                arrived[receiver][sender] = message
        messages = {c: {"inbox": inbox} if inbox else {} for c, inbox in arrived.items()}
        self.exchange(reader, messages, lambda client, reply: (), book_as)

    def due(self, stage: str = "train") -> bool:
        """Returns whether `evaluate` scores now, in this round and stage."""
        scheduled = self.round % self._policy.evaluate_every == 0
        return self._last_round or not self.in_round or stage != "train" or scheduled

    def evaluate(self, stage: str = "train", **common: Any) -> None:
        """Has every client score on its own held-out items. The run keeps the result.

        common: the shared model. It is sent if the run evaluates shared models; otherwise each
        client scores its own.
        """
        self.shared = common.get("model")
        if not self.due(stage):
            return
        begun = time.perf_counter()
        sent = {} if self._policy.evaluation == "local" else common
        self.scored_shared = "model" in sent
        self.aggregation.evaluate(self, sent, stage)
        self.seconds_evaluating += time.perf_counter() - begun

    def _finite(self, phase: BoundPhase, aggregate: Message, how: str) -> Message:
        """Returns a sum or mean; raises RoundFailed if a client could not compute with it."""
        try:
            require_finite(aggregate, f"the {how} of the clients' answers")
        except NotFiniteError as error:
            raise self.diverged(phase.name, str(error)) from error
        return aggregate

    # ---- how requests become exchanges ----
    def address(self, request: Request) -> dict[str, Message]:
        """Returns {client: message} in client order, checked: clients, numbers and names."""
        phase, each, message = request.phase, request.each, request.message
        for content in (message, *(each or {}).values()):
            try:
                require_finite(content, f"to the clients in {phase.name!r}")
            except NotFiniteError as error:
                if not self.round:  # nothing came from clients before
                    raise
                raise self.diverged(phase.name, str(error)) from error
        asked = self.participants if request.clients is None else request.clients
        wanted = set(each if each is not None else asked)
        for client in sorted(wanted - set(self.clients)):
            raise unknown("client", client, self.clients)
        messages = {
            c: message if each is None else {**message, **each[c]}
            for c in self.clients
            if c in wanted
        }
        distinct = messages.items() if each is not None else list(messages.items())[:1]
        for client, content in distinct:
            phase.phase.require_names(content, f"to client {client!r}")
        return messages

    def ask_phase(
        self,
        phase: BoundPhase,
        messages: Mapping[str, Message],
        needed: int | None = None,
        refuse: Refuse | None = None,
    ) -> Replies:
        """One exchange for a phase: checks replies against its declaration, and hashes it.

        Args:
            phase: The phase.
            messages: What to send to each client.
            needed: How many clients must answer. The default is the quorum.
            refuse: A further check of a reply; it raises a MessageError.
        """

        def expected(client: str, reply: Message | None) -> Schema:
            if reply is None:
                model = model_schema(self.facts.model_of[client], self.facts)
                return phase.phase.longest_schema(phase.method, self.facts, messages[client], model)
            if refuse is not None:
                refuse(client, reply)
            return self.reply_schema(phase, messages[client], client, reply)

        alike = not phase.phase.depends_on_reply
        replies = self.exchange(phase.name, messages, expected, alike=alike, needed=needed)
        replies = self._falsified(phase, replies, messages)
        self.remember(phase.name, messages, replies)
        return self.combinable(phase, replies, messages)

    def combinable(
        self, phase: BoundPhase, replies: Replies, messages: Mapping[str, Message]
    ) -> Replies:
        """Returns replies whose means and sums are protected against clients that lie.

        Updates that are far longer than the median are shortened, as `RoundPolicy.robustness` says.
        With differential privacy they are not: what one client sends would depend on the others,
        and the sum would have no bounded sensitivity.

        Args:
            phase: The phase that was asked.
            replies: The replies.
            messages: What each client was sent.
        """
        terms = self._policy.robustness
        unprotected = terms == Robustness() or self.facts.privacy is not None
        if unprotected or not replies or not self._combines(phase):
            return replies
        combiner = Combiner(terms, phase.phase, messages, self._rng_of_groups, self._note_rule)
        known = self._reputation(phase) if terms.reputation and self.in_round else None
        screened, outliers = combiner.screen(replies.combined_by(combiner), known)
        if outliers is not None and self.in_round:
            self.outliers[phase.name] = outliers
        return screened

    def _falsified(
        self, phase: BoundPhase, replies: Replies, messages: Mapping[str, Message]
    ) -> Replies:
        """Returns the replies as the liars of a simulation send them; see `core.adversary`.

        In a secure run the clients do it themselves, before they mask their replies.
        """
        adversary = self.facts.adversary
        if adversary is None or self.facts.secure is not None:
            return replies
        places = [k for k, client in enumerate(replies) if client in adversary.clients]
        if not places:
            return replies
        if adversary.attack == "size":
            return _claimed(adversary, phase.phase, replies)
        if not adversary.changes_updates:
            return replies
        updates = Updates(phase.phase, messages)
        for name in phase.phase.updates_sent:
            if not updates.comparable(replies, name):
                continue
            X = updates.matrix(replies, name)
            honest = torch.ones(len(X), dtype=torch.bool)
            honest[places] = False
            told = adversary.lies(X[~honest], X[honest], self.rng("adversary"))
            replies = updates.replaced(replies, name, dict(zip(places, told, strict=True)))
        for client in (list(replies)[k] for k in places):
            require_finite(replies[client], f"client {client!r} in {phase.name!r}")
        return replies

    def _combines(self, phase: BoundPhase) -> bool:
        """Whether replies of a phase are combined by the rule: weights, and any other mean."""
        return bool(phase.phase.updates_sent) or phase.phase.aggregate == "mean"

    def _reputation(self, phase: BoundPhase) -> Reputation:
        # A name that no method uses for its own state.
        return Reputation(self.state.setdefault("reputation", {}).setdefault(phase.name, {}))

    def _rng_of_groups(self) -> torch.Generator:
        return self.rng("groups of robust aggregation")

    def _note_rule(self) -> None:
        self._rule_used = True

    def _require_rule(self) -> None:
        """Raises a ConfigError if a round is over and the rule has combined nothing."""
        if not self._rule_used:
            rule = self._policy.robustness.rule
            raise ConfigError(
                f"run.aggregation is {rule!r}: this method's server uses the replies one by one, "
                "not their mean or sum; valid: mean"
            )

    def reply_schema(
        self, phase: BoundPhase, message: Message, client: str, reply: Message | None = None
    ) -> Schema:
        """Returns the schema that a client's reply must have."""
        model = model_schema(self.facts.model_of[client], self.facts)
        return phase.phase.reply_schema(phase.method, self.facts, message, model, reply)

    def _draw(self) -> Sequence[str]:
        if (privacy := self.facts.privacy) is not None and privacy.sampling == "poisson":
            share = self._policy.participation
            drawn = self.rng("coins") if privacy.seeded else None
            coins = uniform_numbers(len(self.clients), drawn) < share
            return [c for c, heads in zip(self.clients, coins.tolist(), strict=True) if heads]
        count = max(1, round(self._policy.participation * len(self.clients)))
        if count == len(self.clients):
            return self.clients
        chosen = torch.randperm(len(self.clients), generator=self.rng("participation"))[:count]
        return [self.clients[k] for k in sorted(chosen.tolist())]

    def weights(self, by: str, clients: Sequence[str]) -> dict[str, Tensor]:
        """Returns the clients' replies to the phase `by`, their weights in a mean.

        Each client is asked until it answers; its reply is then kept. A client that never answered
        is left out.
        """
        # A name that no method uses for its own state.
        known: dict[str, Tensor] = self.state.setdefault("weights of means", {}).setdefault(by, {})
        missing = [c for c in clients if c not in known]
        if missing:
            needed = self.quorum_of(by, len(clients)) - (len(clients) - len(missing))
            request = Request(getattr(self.method, by), missing, None, {})
            replies = self.aggregation.replies(self, request, needed, _refuse_negative)
            for client, reply in replies.items():
                (known[client],) = reply.values()
        return {c: known[c] for c in clients if c in known}


def _claimed(adversary: Adversary, phase: Phase, replies: Replies) -> Replies:
    """Returns replies in which liars claim to have more items than they have."""
    if not phase.claims:
        return replies

    def told(client: str, reply: Message) -> Message:
        if client not in adversary.clients:
            return reply
        return reply | {name: adversary.claim(reply[name]) for name in phase.claims}

    return replies.replaced({client: told(client, reply) for client, reply in replies.items()})


def _require_aggregate(phase: BoundPhase, how: str) -> None:
    if phase.phase.aggregate != how:
        mark = {"sum": "@summed", "mean": "@averaged"}[how]
        raise ConfigError(
            f"server.{how}: phase {phase.name!r} is not marked {mark} (docs/adding-a-method.md)"
        )


def _refuse_negative(client: str, reply: Message) -> None:
    """Refuses a weight below 0. A weight that is a vector may have such entries."""
    for weight in flatten(reply).values():
        if weight.dim() == 0:
            require_weight(client, float(weight))
