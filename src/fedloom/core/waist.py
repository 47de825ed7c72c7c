"""The waist: the one place that everything between the server and the clients passes.

    messages ─► filtered ─► booked ─► engine ─► client
    replies  ◄─ hashed ◄─ checked ◄─ filtered ◄─ booked ◄─ client

`Waist.exchange` sends messages and returns replies. It books both in the ledger, checks replies
against the schema and the ranges that the phase declared, and decides what an absent client means.

If most clients answer with numbers that are not finite, they are not the cause: what they were sent
is. The run then fails, whatever the quorum (`Waist.diverged`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from fedloom.core import history_hash
from fedloom.core.absence import (
    SILENT,
    AbsenceTracker,
    FaultPolicy,
    SetupExchange,
    listed,
    not_finite,
    too_few,
)
from fedloom.core.facts import Facts
from fedloom.core.filters import parse_filters
from fedloom.core.ledger import MEASURING, Ledger
from fedloom.core.message import (
    LARGEST,
    Absent,
    Batch,
    Message,
    Schema,
    check,
    check_schema,
    flatten,
    norm_of,
    norms_of,
    require_finite,
)
from fedloom.core.method import Method
from fedloom.core.phase import phases_of, said
from fedloom.core.replies import Replies
from fedloom.core.state import snapshot
from fedloom.data.federation import PartySize
from fedloom.errors import MessageError, NotFiniteError, RoundFailed

T = TypeVar("T")
# An engine's call: takes a phase's name and {client: message}, returns {client: reply}.
Call = Callable[[str, dict[str, Message]], Mapping[str, Message | Absent]]
# Takes a client and its reply, returns the schema that the reply must have. If the reply is None,
# it returns the schema of the longest valid reply.
Expected = Callable[[str, Message | None], Schema]
# Returns what each client said about its size at the start of the run.
Sizes = Callable[[], Mapping[str, PartySize]]

# A client stands out if the norm of what it sent is this many times the median of the clients.
OUTLIER = 100.0


class Norms(NamedTuple):
    """The norms of what clients sent in a phase of a round, {client: norm}."""

    round: int
    phase: str
    of: Mapping[str, float]


class Waist:
    """Sends messages to clients and receives their replies.

    Attributes:
        facts: What every party knows.
        method: The method that runs.
        clients: All clients' names.
        state: What checkpoints keep of the server.
        round: The current round; 0 before the first one.
        in_round: Whether a round is under way.
        ledger: All messages, booked.
        absences: The clients that did not answer, and what follows from it.
        history_hash: The digest of all exchanges so far.
    """

    def __init__(
        self,
        method: Method,
        facts: Facts,
        call: Call,
        faults: FaultPolicy,
        retries: int,
        sizes: Sizes = dict,
        inductive: bool = False,
    ) -> None:
        self.method, self.facts, self.clients = method, facts, facts.clients
        self.state: dict[str, Any] = {}
        self.round, self.in_round = 0, False
        self.ledger = Ledger()
        self.absences = AbsenceTracker()
        self.history_hash = history_hash.EMPTY
        self._call, self._faults, self._retries = call, faults, retries
        self._upload = parse_filters(facts.upload, "run.upload")
        self._download = parse_filters(facts.download, "run.download")
        self._sizes, self._inductive = sizes, inductive
        self._phases = phases_of(type(method))
        self.shared: Message | None = None  # the model that `evaluate` was given last
        self._model_before: Any = None  # the model when the round began, for a round that fails
        self._model_earlier: Any = None  # the model when the round before that began
        self._norms: list[Norms] = []  # of what clients sent, in this round and the one before
        self._longest: Callable[[str], Schema | None] = not_known

    def exchange(
        self,
        name: str,
        messages: Mapping[str, Message],
        expected: Expected,
        book_as: str | None = None,
        alike: bool = False,
        needed: int | None = None,
    ) -> Replies:
        """Sends messages and returns the replies, each booked and checked.

        With a quorum of 1, a client's error is raised, and so is a reply that does not fit its
        schema. Below 1, both make the client absent. If too few clients answered, the others are
        asked again. If that does not help, it raises RoundFailed. `AbsenceTracker` says what an
        absence means for later exchanges. A client that is silent for no known reason is left out,
        whatever the quorum.

        Args:
            name: The phase.
            messages: What to send to each client.
            expected: Returns the schema that a reply must have.
            book_as: The phase that the ledger books the messages under.
            alike: Whether the schema depends only on a client's model and its message.
            needed: How many clients must answer. The default is the quorum.
        """
        answers: dict[str, Message] = {}
        absent: dict[str, Absent] = {}
        measuring = (book_as or name) in MEASURING
        needed = self.quorum_of(name, len(messages)) if needed is None else needed
        due, known = dict(messages), set() if measuring else set(self.absences.out)
        for attempt in range(self.attempts):
            self.absences.retried += len(due) if attempt else 0
            present, away = self.present(due, measuring)
            came, lost = self._send(name, present, expected, book_as, alike)
            if isinstance(came, Batch):
                return Replies(came)
            answers |= came
            absent = {c: why for c, why in (absent | away | lost).items() if c not in answers}
            due = {c: messages[c] for c in messages if c in absent and c not in self.absences.out}
            if len(answers) >= needed or not due:
                break
        self.absences.note(name, {c: why for c, why in absent.items() if c not in known})
        if len(answers) < needed and self.tolerates_absence:
            raise self.failed(name, too_few(answers, len(messages), needed), absent)
        self.conclude(name, messages, absent, book_as)
        return Replies({c: answers[c] for c in messages if c in answers})

    def stage(
        self,
        name: str,
        messages: Mapping[str, Message],
        expected: Expected,
        book_as: str | None,
        lost: dict[str, Absent],
    ) -> Replies:
        """`exchange` for one of several stages, such as those of a secure sum.

        No client is asked twice. The caller decides how many answers are enough and what follows.

        lost: receives the clients that are absent.
        """
        came, absent = self._send(name, messages, expected, book_as)
        self.absences.note(name, absent)
        lost |= absent
        return Replies(came)

    def remember(
        self, phase: str, messages: Mapping[str, Message], replies: Mapping[str, Message]
    ) -> None:
        """Chains an exchange into the history hash."""
        self.history_hash = history_hash.chained(
            self.history_hash, self.round, phase, messages, replies
        )

    def longest_reply(self, client: str) -> Schema | None:
        """Returns the schema of the longest valid reply in the exchange that is under way.

        It is what the client sends, after its upload filters. None: it is not known.
        """
        return self._longest(client)

    # ---- how many must answer ----
    @property
    def tolerates_absence(self) -> bool:
        """Whether the run continues without a client that does not answer."""
        return self._faults.tolerates_absence

    @property
    def attempts(self) -> int:
        """How often an exchange may be tried."""
        return 1 + self._retries if self.tolerates_absence else 1

    def quorum_of(self, name: str, asked: int) -> int:
        """Returns how many of `asked` clients must answer a phase."""
        return max(self.least(name, asked), self._faults.enough(asked))

    def least(self, name: str, asked: int) -> int:
        """Returns how many clients the method itself needs, whatever the quorum."""
        return asked if name in self.method.requires_all else min(asked, self.method.min_replies)

    # ---- what absence means ----
    def present(
        self, messages: Mapping[str, Message], measuring: bool
    ) -> tuple[dict[str, Message], dict[str, Absent]]:
        """Returns the messages of clients that can be asked, and why the others cannot.

        Before that, clients catch up on the exchanges before the rounds that they missed.
        """
        tracker = self.absences
        known = {} if measuring else tracker.out if self.round else tracker.absent_in_setup()
        absent = {c: why for c, why in known.items() if c in messages}
        for number, missed in enumerate(tracker.setup):
            due = [c for c in messages if tracker.has_missed(c, number) and c not in absent]
            if not missed.repeatable:
                cause = (
                    f"missed {missed.name!r} before the rounds, which a secure run does not repeat"
                )
                absent |= dict.fromkeys(due, Absent(cause))
            elif due:
                lost = self._repeat_setup(number, due)
                for client, why in lost.items():
                    absent[client] = Absent(f"behind since {missed.name!r}: {why.cause}", why.error)
        return {c: message for c, message in messages.items() if c not in absent}, absent

    def _repeat_setup(self, number: int, clients: Sequence[str]) -> dict[str, Absent]:
        """Repeats an exchange before the rounds with some clients. Returns those that failed."""
        missed = self.absences.setup[number]
        messages = {c: missed.messages[c] for c in clients}
        came, lost = self._send(missed.name, messages, None, missed.book_as)
        for client in came:
            self.absences.caught_up(client, number)
        return lost

    def catch_up(self) -> None:
        """Repeats, in a resumed run, what clients had caught up on after set-up.

        Call it before the clients' states are restored.
        """
        for number, clients in list(self.absences.to_catch_up()):
            self._repeat_setup(number, clients)
        self.absences.restore()

    def conclude(
        self,
        name: str,
        messages: Mapping[str, Message],
        absent: Mapping[str, Absent],
        book_as: str | None,
        repeatable: bool = True,
    ) -> None:
        """Records what an exchange means for the clients that were absent.

        repeatable: whether it can be repeated with them later.
        """
        if not self.tolerates_absence or (book_as or name) in MEASURING:
            return
        if self.round:
            self.absences.out |= absent
        else:
            missed = SetupExchange(name, messages, book_as, repeatable, dict(absent))
            self.absences.add_setup(missed)

    def failed(self, name: str, why: str, absent: Mapping[str, Absent]) -> RoundFailed:
        """Returns the error of a round that cannot continue, and restores the server's model."""
        if self.in_round and self._model_before is not None and self.tolerates_absence:
            self.state["model"] = self._model_before
            if self.shared is not None:  # it may be of the round that failed
                self.shared = self._model_before
        return RoundFailed(f"{self._when(name)}: {why}; absent: {listed(absent)}")

    def diverged(self, name: str, why: str) -> RoundFailed:
        """Returns the error of a run in which the server sends, or is about to send, bad numbers.

        It restores the server's model of before the last aggregation that clients have received,
        and names the client whose answers stood out before that. No client is left out: which one
        is to blame is for people to decide.

        Args:
            name: The phase.
            why: What happened.
        """
        earlier = self._model_before if self._model_earlier is None else self._model_earlier
        if earlier is not None:
            self.state["model"] = earlier
            if self.shared is not None:
                self.shared = earlier
        return RoundFailed(f"{self._when(name)}: {why}. {self._outlier()}")

    def _when(self, name: str) -> str:
        return f"round {self.round}, {name!r}" if self.round else f"before round 1, {name!r}"

    def _outlier(self) -> str:
        """Says which client stood out in this round and the one before."""
        found = [
            (norm / median, client, norms)
            for norms in self._norms
            if (median := statistics.median(norms.of.values())) > 0
            for client, norm in norms.of.items()
        ]
        ratio, client, norms = max(found, key=lambda row: row[0], default=(0.0, "", None))
        if norms is None or ratio < OUTLIER:
            return (
                "No client stood out before, so the training itself diverges: use a smaller "
                "learning rate (`fedloom methods NAME` lists the method's settings)"
            )
        return (
            f"In round {norms.round}, what client {client!r} sent in {norms.phase!r} was "
            f"{ratio:.2g} times as large as the median client's: look into that client, and start "
            "again without it"
        )

    def _begin_round(self) -> None:
        self.absences.begin_round()
        model = self.state.get("model")
        self._model_earlier = self._model_before
        self._model_before = snapshot(model) if isinstance(model, dict) else None
        self._norms = [norms for norms in self._norms if norms.round >= self.round - 1]

    # ---- one try ----
    def _send(
        self,
        name: str,
        messages: Mapping[str, Message],
        expected: Expected | None,
        book_as: str | None,
        alike: bool = False,
    ) -> tuple[Mapping[str, Message], dict[str, Absent]]:
        """Returns the replies that fit their schema, and why there are no others.

        expected: None if the replies are not read.
        """
        sent = self._encoded(name, messages)
        self.ledger.book(self.round, name, "down", sent, book_as)
        self._longest = self._longest_of(name, expected)
        given = self._call(name, dict(sent)) if sent else {}
        self._longest = not_known  # the function above refers to this server: a cycle
        uniform = isinstance(given, Batch) and alike and expected is not None
        if uniform and not self.tolerates_absence and not self._upload:
            assert isinstance(given, Batch)
            assert expected is not None
            self._check_batch(name, given, messages, expected)
            self.ledger.book(self.round, name, "up", given, book_as)
            return given, {}
        answers: dict[str, Message] = {}
        received: dict[str, Message] = {}  # as they came: what the ledger books
        absent: dict[str, Absent] = {}
        refused: dict[str, MessageError] = {}
        sizes = self._sizes()
        arrived = self._arrived(name, sent) if expected is not None else {}
        for client in messages:
            reply, sender = given.get(client, SILENT), f"client {client!r} in {name!r}"
            if isinstance(reply, Absent):
                absent[client] = reply
                continue
            try:
                if expected is not None:
                    schema = expected(client, reply)
                    checked = self._checked(name, reply, arrived[client], schema, sender)
                    self._require_ranges(name, checked, sizes.get(client), sender)
                    answers[client] = checked
                else:
                    answers[client] = reply
                received[client] = reply
            except MessageError as error:
                refused[client] = error
                cause = f"refused: {str(error).removeprefix(sender + ': ')}"
                absent[client] = Absent(cause, error)
        self._require_few(name, [c for c in absent if not_finite(absent[c])], len(answers))
        if not self.tolerates_absence:
            for refusal in refused.values():
                raise refusal
        self.ledger.book(self.round, name, "up", received, book_as)
        self._handle(name, absent, (book_as or name) in MEASURING)
        if (book_as or name) not in MEASURING:
            self._record_norms(name, {client: norm_of(reply) for client, reply in answers.items()})
        return answers, absent

    def _longest_of(self, name: str, expected: Expected | None) -> Callable[[str], Schema | None]:
        """`longest_reply` of one exchange."""
        if expected is None:
            return not_known
        if not self._upload or name not in self._phases:
            return lambda client: expected(client, None)
        return lambda client: self._upload.encoded_schema(
            self._phases[name], expected(client, None)
        )

    def _require_ranges(
        self, name: str, reply: Message, size: PartySize | None, sender: str
    ) -> None:
        """Raises a MessageError if a reply is out of a range that its phase declares.

        In a secure run the server cannot read the reply; its client has checked it.
        """
        phase = self._phases.get(name)
        if phase is not None and phase.ranges and self.facts.secure is None:
            known = {} if size is None else said(size, self._inductive)
            phase.require_ranges(self.method, reply, known, sender)

    def said(self, client: str) -> dict[str, int]:
        """Returns what a client said about its size at the start; nothing if it is not known."""
        size = self._sizes().get(client)
        return {} if size is None else said(size, self._inductive)

    def _require_few(self, name: str, bad: Sequence[str], good: int) -> None:
        """Raises RoundFailed if most of the replies, and more than one, are not finite."""
        if len(bad) > max(1, good):
            raise self.diverged(
                name,
                f"{len(bad)} of {len(bad) + good} clients answered with numbers that are not "
                "finite or too large, so they are not the cause",
            )

    def _record_norms(self, name: str, norms: Mapping[str, float]) -> None:
        """Keeps the norms of what clients sent, for `diverged`."""
        if self.round and any(norms.values()):
            self._norms.append(Norms(self.round, name, norms))

    def _encoded(self, name: str, messages: Mapping[str, Message]) -> Mapping[str, Message]:
        """Applies the download filters."""
        if not self._download or name not in self._phases:
            return messages
        return _each_once(self._download.encode, messages)

    def _arrived(self, name: str, sent: Mapping[str, Message]) -> Mapping[str, dict[str, Tensor]]:
        """Returns what clients have decoded of their messages, flat; needed by upload filters."""
        if not self._upload or name not in self._phases:
            return {client: {} for client in sent}
        return _each_once(lambda message: flatten(self._download.decode(message)), sent)

    def _checked(
        self,
        name: str,
        reply: Message,
        arrived: Mapping[str, Tensor],
        schema: Schema,
        sender: str,
    ) -> Message:
        """Returns a reply without its upload filters; raises a MessageError if it does not fit."""
        if self._upload and name in self._phases:
            reply = self._upload.decode_reply(self._phases[name], reply, arrived, schema, sender)
        check(reply, schema, sender)
        return reply

    def _handle(self, name: str, absent: Mapping[str, Absent], measuring: bool) -> None:
        """With a quorum of 1, raises what keeps a client from answering.

        Below 1, it notes which clients have lost their state.
        """
        reasons = {c: why for c, why in absent.items() if why is not SILENT}
        if not self.tolerates_absence:
            for error in (why.error for why in reasons.values() if why.error is not None):
                raise error
            if reasons:
                raise self.failed(name, "all clients are needed (run.quorum is 1)", reasons)
        for client, why in reasons.items():
            if why.lost_state:
                self.absences.lost_state(client, why, self.round > 0, measuring)

    def _check_batch(
        self, name: str, batch: Batch, messages: Mapping[str, Message], expected: Expected
    ) -> None:
        """`check` of many replies with one schema: one check per model and message."""
        kinds: dict[tuple[str, int], str] = {}
        for client in batch:
            kinds.setdefault((self.facts.model_of[client], id(messages[client])), client)
        for client in kinds.values():
            check_schema(batch.schema, expected(client, {}), f"client {client!r} in {name!r}")
        norms = norms_of(batch)
        if not norms.max() < LARGEST:
            errors: dict[str, NotFiniteError] = {}
            for client, reply in batch.items():
                try:
                    require_finite(reply, f"client {client!r} in {name!r}")
                except NotFiniteError as error:
                    errors[client] = error
            self._require_few(name, list(errors), len(batch) - len(errors))
            for first in errors.values():
                raise first
        if name in self._phases and self._phases[name].ranges:
            told = self._sizes()
            sizes = [said(told[c], self._inductive) if c in told else {} for c in batch]
            for key, allowed in self._phases[name].ranges.items():
                allowed.check(
                    key,
                    batch.dense(key),
                    self.method,
                    sizes,
                    lambda k: f"client {batch.clients[k]!r} in {name!r}",
                )
        if name not in MEASURING:
            self._record_norms(name, dict(zip(batch.clients, norms.tolist(), strict=True)))


def not_known(client: str) -> Schema | None:
    """The `Waist.longest_reply` outside of an exchange: None."""
    return None


def _each_once(convert: Callable[[Message], T], messages: Mapping[str, Message]) -> dict[str, T]:
    """Converts each message. One that many clients receive is converted once."""
    done: dict[int, T] = {}
    for message in messages.values():
        if id(message) not in done:
            done[id(message)] = convert(message)
    return {client: done[id(message)] for client, message in messages.items()}
