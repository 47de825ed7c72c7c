"""Coordinator: sends orders to the parties of an agreement and collects their signed answers.

An exchange closes when all parties have answered, or some time (`grace`) after a quorum has, or at
the deadline. It does not wait for a party that has been without a sign of life for too long.
Answers to another exchange, and answers that their sender has not signed, do not count (`Gate`).
"""

from __future__ import annotations

import json
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from fedloom._system import plain_text
from fedloom.core.absence import FaultPolicy
from fedloom.core.facts import Facts
from fedloom.core.message import Absent
from fedloom.data.encoding import Encoding
from fedloom.data.federation import PartySize, Roster
from fedloom.deploy.agreement import Agreement, differences
from fedloom.deploy.envelope import ENVELOPE_BYTES, Gate, Header, sign
from fedloom.deploy.keyring import COORDINATOR
from fedloom.deploy.keys import PartyKey
from fedloom.deploy.party import SECOND_PROCESS, Log, facts_to_json
from fedloom.deploy.transport import PartyStatus, Transport
from fedloom.errors import ConfigError, MessageError

# Seconds without a sign of life after which a party that has closed its connections is dead, unless
# the agreement says otherwise. A party sends a sign of life every second, and may be cut off for
# five. A connection can also break on the way: a run with a deadline waits longer.
DEAD_AFTER = 7.0
# How often Flower may return the order of a party before the party is absent. Flower does so when
# it believes that a party is gone which is not.
MAX_RETURNS = 5
CONTROL_SECONDS = 60.0  # that parties have to answer a control order
REMEMBERED = 64  # processes that have answered as one party
POLL_SECONDS = 1.0  # between two looks at the parties' signs of life
# Bytes of an answer to a control order, besides the agreement; and of the text of an error.
CONTROL_LIMIT = 2**16

# Takes a party and its answer, returns what the answer holds; raises ValueError to refuse it.
Read = Callable[[str, bytes], Any]


class Overdue(NamedTuple):
    """An order that was not answered in time: the message's id, and the order in words."""

    number: str
    order: str


@dataclass
class _Exchange:
    """An exchange that is open.

    Attributes:
        phase: The phase that is ordered.
        round: Its round.
        policy: When the exchange closes.
        asked: How many parties are asked.
        limits: The most bytes of each party's answer.
        read: Reads an answer.
        status: The parties' signs of life when they were last checked.
        began: When the exchange began.
        checked: When the signs of life were last checked.
        reached: When the quorum was reached; None before.
        orders: Each party's order, signed.
        answers: The answers so far, or why there is none.
        pending: {message id: party} of the orders that are under way.
        undelivered: Why Flower returned an order, for parties whose order must be sent again.
        returns: How often Flower has returned the order of a party.
    """

    phase: str
    round: int
    policy: FaultPolicy
    asked: int
    limits: Mapping[str, int]
    read: Read
    status: Mapping[str, PartyStatus]
    began: float = field(default_factory=time.monotonic)
    checked: float = field(default_factory=time.monotonic)
    reached: float | None = None
    orders: dict[str, bytes] = field(default_factory=dict)
    answers: dict[str, Any] = field(default_factory=dict)
    pending: dict[str, str] = field(default_factory=dict)
    undelivered: dict[str, str] = field(default_factory=dict)
    returns: Counter[str] = field(default_factory=Counter)

    @property
    def quorum(self) -> int:
        """How many parties must answer."""
        return self.policy.enough(self.asked)

    @property
    def waiting_for(self) -> list[str]:
        """The parties that have not answered."""
        return [*self.pending.values(), *self.undelivered]

    @property
    def closes_at(self) -> float | None:
        """When the exchange closes even if parties have not answered; None for never."""
        return self.policy.closes_at(self.began, self.reached)

    def check_quorum(self) -> None:
        """Records the time at which a quorum of the parties has answered."""
        answered = sum(not isinstance(answer, Absent) for answer in self.answers.values())
        if self.reached is None and answered >= self.quorum:
            self.reached = time.monotonic()


class Coordinator:
    """One session of the coordinator: it has its own run id and numbers its exchanges from 0.

    Attributes:
        run: The id of this session.
        sizes: The sizes of the parties that have said hello.
        ready: The parties that have begun the run.
        on_join: Called with the size of a party when it says hello.
        log: Called with a line for each event that the operator must know.
        keyring: The parties' keys. It changes when their files in the agreement's folder do.

    Args:
        agreement: The coordinator's copy of the agreement.
        transport: How to reach the parties.
        key: The coordinator's key.
        lineage: The id that all sessions of a run share, from its start through every resume.
        policy: Which absences a phase's exchange tolerates.
    """

    def __init__(
        self,
        agreement: Agreement,
        transport: Transport,
        key: PartyKey,
        lineage: str,
        policy: FaultPolicy = FaultPolicy(),
    ):
        self.keyring = agreement.read_keyring()
        self.keyring.require_own(COORDINATOR, key.public)
        self._key_files = self.keyring.files()
        self.agreement, self.transport, self.key = agreement, transport, key
        self.lineage, self.policy = lineage, policy
        self.run = secrets.token_hex(16)
        self.gate = Gate(self.keyring.current(), self.run)
        self.sizes: dict[str, PartySize] = {}
        self.knows_cross_edges = False
        self.facts: Facts | None = None
        self.encoding: Encoding | None = None  # fitted, if the agreement declares one
        self.ready: set[str] = set()
        self.on_join: Callable[[PartySize], None] = lambda size: None
        self._sequence = -1
        self._overdue: dict[str, Overdue] = {}  # the last order that a party did not answer in time
        self.log: Log = lambda line: None
        self._instances: dict[str, deque[str]] = {}  # each party's processes, the last one last
        self._doubled: set[str] = set()  # the parties that two processes take part as

    # ---- before the run ----
    def wait_for_parties(
        self,
        seconds: float,
        needed: int,
        log: Log,
        watch: Callable[[], None] = lambda: None,
    ) -> Roster:
        """Waits until all parties have said hello. Returns their sizes.

        When the time is over, `needed` parties are enough. Raises ConfigError if fewer have come,
        or if a party has agreed to something else.

        Args:
            seconds: How long to wait for all parties.
            needed: How many parties are enough after that.
            log: Called with a line for each party that comes.
            watch: Called repeatedly meanwhile.
        """
        until, logged = time.monotonic() + seconds, set[str]()
        expected = len(self.keyring.current())
        if expected < needed:
            raise ConfigError("; ".join(self.keyring.refused().values()))
        while self.keyring.current().keys() - self.sizes.keys():
            watch()
            self._renew_keys()
            _, absent = self._hello(sorted(self._alive() - self.sizes.keys()))
            for name, why in absent.items():
                if why.error is not None:
                    self.control("fedloom_refuse", {name: {"cause": why.cause}})
                    raise ConfigError(f"party {name!r} {why.cause}")
            for name in sorted(self.sizes.keys() - logged):
                logged.add(name)
                items = self.sizes[name].items
                log(f"{name} has joined: {items} items ({len(logged)} of {expected})")
            if time.monotonic() > until:
                if len(self.sizes) >= needed:
                    break
                missing = ", ".join(n for n in self.agreement.parties if n not in self.sizes)
                raise ConfigError(
                    f"{len(self.sizes)} of {expected} parties joined within {seconds:.0f} s, "
                    f"{needed} are needed; missing: {missing}"
                )
            time.sleep(0.1)
        return self.roster()

    def roster(self) -> Roster:
        """Returns the parties and their sizes. A party that has not joined yet has size 0."""
        return self.agreement.roster(self.sizes, self.encoding, self.knows_cross_edges)

    def begin_fit(self) -> None:
        """Begins the fit of the encoding at all parties that have joined.

        Raises ConfigError if one refuses.
        """
        self._begin_at_all()

    def begin(self, facts: Facts) -> None:
        """Begins the run at all parties that have joined. Raises ConfigError if one refuses."""
        self.facts = facts
        self._begin_at_all()

    def _begin_at_all(self) -> None:
        nonces, absent = self._hello(sorted(self.sizes))
        answers = {**absent, **self._begin(nonces, rejoin=False)}
        for name, answer in answers.items():
            if isinstance(answer, Absent):
                raise ConfigError(f"party {name!r} does not begin: {answer.cause}")

    def _hello(self, names: Sequence[str]) -> tuple[dict[str, str], dict[str, Absent]]:
        """Says hello to parties. Returns the nonces they have drawn, and why others have not."""
        nonces: dict[str, str] = {}
        absent: dict[str, Absent] = {}
        for name, answer in self.control("fedloom_hello", {name: {} for name in names}).items():
            if isinstance(answer, Absent):
                absent[name] = answer
                continue
            try:
                nonces[name], size = self._checked(name, answer)
            except (ConfigError, MessageError) as error:
                absent[name] = Absent(str(error), error)
                continue
            if self.sizes.get(name) != size:
                self.sizes[name] = size
                self.on_join(size)
        return nonces, absent

    def _checked(self, name: str, answer: dict[str, Any]) -> tuple[str, PartySize]:
        """Returns the nonce and the size in a party's answer to hello.

        Raises ConfigError if the party has agreed to something else.
        """
        agreed, size, nonce = answer.get("agreed"), answer.get("size"), answer.get("nonce")
        counts = {f.name for f in fields(PartySize)} - {"name"}
        if not isinstance(agreed, dict) or not isinstance(nonce, str) or not isinstance(size, dict):
            raise MessageError("gives no valid answer to hello: 'agreed', 'size' or 'nonce'")
        if any(type(size.get(count)) is not int or size[count] < 0 for count in counts):
            raise MessageError(f"gives no valid size: {', '.join(sorted(counts))} must be counts")
        if found := differences(agreed, self.agreement.agreed()):
            raise ConfigError(f"has agreed to something else: {plain_text('; '.join(found))}")
        self.knows_cross_edges |= answer.get("knows_cross_edges") is True
        said = PartySize(name, **{count: size[count] for count in counts})
        self._require_same_size(said)
        return nonce, said

    def _require_same_size(self, size: PartySize) -> None:
        """Raises MessageError if the run has begun and the party said another size before."""
        before = self.sizes.get(size.name, size)
        changed = [
            f"{f.name} {getattr(size, f.name)}, at the start of the run it said "
            f"{getattr(before, f.name)}"
            for f in fields(PartySize)
            if getattr(size, f.name) != getattr(before, f.name)
        ]
        if self.facts is not None and changed:
            raise MessageError(f"refused: it claims another size: {'; '.join(changed)}")

    def _begin(self, nonces: Mapping[str, str], rejoin: bool) -> dict[str, dict[str, Any] | Absent]:
        """Begins the run at parties that have just answered hello. Returns their answers.

        Without facts it is the fit of the encoding that begins.
        """
        phase = "fedloom_fit"
        order: dict[str, Any] = {"agreed": self.agreement.agreed(), "keys": self.keyring.to_json()}
        if self.facts is not None:
            phase = "fedloom_begin"
            order |= {
                "facts": facts_to_json(self.facts),
                "lineage": self.lineage,
                "rejoin": rejoin,
                "encoding": None if self.encoding is None else self.encoding.to_json(),
            }
        answers = self.control(
            phase, {name: {**order, "nonce": nonce} for name, nonce in nonces.items()}
        )
        self.ready |= {name for name, answer in answers.items() if not isinstance(answer, Absent)}
        return answers

    def control(
        self, phase: str, contents: Mapping[str, dict[str, Any]]
    ) -> dict[str, dict[str, Any] | Absent]:
        """Sends a control order, one that is not a phase of the method. Returns the answers.

        Args:
            phase: The order; see `fedloom.deploy.party`.
            contents: The content of each party's order, as JSON.
        """
        bodies = {
            name: json.dumps(
                {**content, SECOND_PROCESS: True} if name in self._doubled else content
            ).encode()
            for name, content in contents.items()
        }
        # It does not wait for busy parties. The caller decides how many must answer.
        policy = FaultPolicy(quorum=1e-9, deadline=CONTROL_SECONDS)
        # A party repeats its agreement in its answer to hello.
        limit = CONTROL_LIMIT + 2 * len(json.dumps(self.agreement.agreed()))
        limits = dict.fromkeys(bodies, limit)
        read = self._exchange(phase, bodies, 0, policy, limits, lambda name, body: _json(body))
        for name, content in read.items():
            if not isinstance(content, Absent):
                self._note_instance(name, content.get("instance"))
        return read

    def _note_instance(self, name: str, instance: object) -> None:
        """Notices two processes with one key: an earlier one answers after a later one.

        A party that was restarted does not come back. The log, and the next order to the party,
        say that there are two.
        """
        if not isinstance(instance, str) or not 0 < len(instance) <= 64:
            return
        seen = self._instances.setdefault(name, deque(maxlen=REMEMBERED))
        if instance in seen and instance != seen[-1] and name not in self._doubled:
            self._doubled.add(name)
            self.log(
                f"two processes take part as party {name!r} at the same time, with the same key; "
                "one of them must end"
            )
        if instance in seen:
            seen.remove(instance)
        seen.append(instance)

    # ---- exchanges ----
    def ask(
        self,
        phase: str,
        bodies: Mapping[str, bytes],
        round: int,
        limits: Mapping[str, int] | None = None,
        read: Read = lambda name, body: body,
    ) -> dict[str, Any]:
        """Runs a phase of the method at parties. Returns each one's answer, or its absence.

        A party that was restarted, or that joins late, is first asked to begin the run. It is
        absent from this exchange and has lost its state.

        Args:
            phase: The phase.
            bodies: What each party is sent.
            round: The round.
            limits: The most bytes of each party's answer. A longer one is refused unread. The
                default is the gate's limit.
            read: Reads an answer, and raises ValueError to refuse it. The time that it takes counts
                towards the deadline. The default returns the bytes.
        """
        self._renew_keys()
        limits = dict.fromkeys(bodies, self.gate.limit) if limits is None else limits
        alive = self._alive()
        new = {name for name in bodies if name in alive and name not in self.ready}
        answers: dict[str, Any] = {name: self._readmit(name) for name in sorted(new)}
        asked = {name: body for name, body in bodies.items() if name not in new}
        for name, answer in self._exchange(phase, asked, round, self.policy, limits, read).items():
            if isinstance(answer, Absent) and answer.lost_state:
                self.ready.discard(name)
                answer = self._readmit(name)
            answers[name] = answer
        return {name: answers[name] for name in bodies}

    def _renew_keys(self) -> None:
        """Reads the files of rotations and of revoked keys again, if they have changed."""
        if (files := self.keyring.files()) == self._key_files:
            return
        self._key_files = files
        try:
            # Parties know this session by its key. A new one counts when `serve` starts again.
            self.keyring = self.agreement.read_keyring().before(self.key.public)
        except ConfigError as error:
            self.log(f"the keys stay as they were: {error}")
            return
        self.log(f"the keys have changed: {', '.join(files)}")
        self.gate.admit(self.keyring.current())
        self.transport.admit(self.keyring.current())
        order = {"keys": self.keyring.to_json()}
        ready = sorted(self.ready & self._alive())
        self.control("fedloom_keys", dict.fromkeys(ready, order))

    def _readmit(self, name: str) -> Absent:
        """Begins the run at a party that was restarted or joins late. Returns its absence."""
        nonces, absent = self._hello([name])
        answer = {**absent, **self._begin(nonces, rejoin=True)}[name]
        return answer if isinstance(answer, Absent) else Absent("was restarted", lost_state=True)

    def _exchange(
        self,
        phase: str,
        bodies: Mapping[str, bytes],
        round: int,
        policy: FaultPolicy,
        limits: Mapping[str, int],
        read: Read,
    ) -> dict[str, Any]:
        """Sends an order to each party. Returns each one's answer, or its absence."""
        if not bodies:
            return {}
        self._sequence += 1
        exchange = _Exchange(
            phase, round, policy, len(bodies), limits, read, self.transport.status()
        )
        self._send_orders(exchange, bodies)
        while exchange.waiting_for:
            now, closes = time.monotonic(), exchange.closes_at
            if closes is not None and now >= closes:
                self._close_late(exchange)
                break
            wait = POLL_SECONDS if closes is None else min(closes - now, POLL_SECONDS)
            for number, data in self.transport.receive(exchange.pending, wait):
                name = exchange.pending.pop(number)
                if isinstance(data, bytes):
                    exchange.answers[name] = self._read(exchange, name, data)
                else:
                    exchange.undelivered[name] = data
                    exchange.returns[name] += 1
            exchange.check_quorum()
            if exchange.waiting_for and time.monotonic() - exchange.checked > POLL_SECONDS:
                self._check_parties(exchange)
        return exchange.answers

    def _read(self, exchange: _Exchange, name: str, data: bytes) -> Any:
        """Returns what an answer holds, or the absence of the party if it failed or is refused."""
        limit = exchange.limits[name]
        body = self._opened(name, data, exchange.phase, exchange.round, limit)
        if isinstance(body, Absent):
            return body
        try:
            return exchange.read(name, body)
        except ValueError as error:
            return Absent(f"refused: {error}", error)

    def _send_orders(self, exchange: _Exchange, bodies: Mapping[str, bytes]) -> None:
        """Sends the orders to the parties that are alive and not busy."""
        phase, round, answers = exchange.phase, exchange.round, exchange.answers
        # A dead party gets no order: it would find the order later, when it is outdated.
        refused = self.keyring.refused()
        for name in bodies:
            if name in refused:
                answers[name] = Absent(refused[name])
            elif self._is_dead(status := exchange.status.get(name)):
                answers[name] = _dead(status)
        busy = self._busy(phase, round).keys() & bodies.keys() - answers.keys()
        if len(bodies) - len(answers) - len(busy) >= exchange.quorum:
            for name in busy:
                answers[name] = Absent(f"still busy with {self._overdue[name].order}")
        exchange.orders = {
            name: self._order(phase, name, body, round)
            for name, body in bodies.items()
            if name not in answers
        }
        exchange.pending = self._dispatch(exchange, exchange.orders)

    def _dispatch(self, exchange: _Exchange, orders: Mapping[str, bytes]) -> dict[str, str]:
        """Sends orders. Returns {message id: party}."""
        if not orders:
            return {}
        most = max(max(exchange.limits[name] for name in orders), CONTROL_LIMIT)
        return self.transport.send(orders, most + ENVELOPE_BYTES)

    def _close_late(self, exchange: _Exchange) -> None:
        """Closes an exchange at its deadline. The parties that have not answered are absent."""
        order = f"{exchange.phase!r} of round {exchange.round}"
        self._overdue |= {n: Overdue(number, order) for number, n in exchange.pending.items()}
        seconds = time.monotonic() - exchange.began
        absent = Absent(f"late: no answer within {seconds:.1f} s")
        exchange.answers |= dict.fromkeys(exchange.waiting_for, absent)

    def _check_parties(self, exchange: _Exchange) -> None:
        """Gives up dead parties, and sends orders again that may have been lost."""
        before, exchange.status = exchange.status, self.transport.status()
        exchange.checked = time.monotonic()
        status, answers = exchange.status, exchange.answers
        for name in exchange.waiting_for:
            if self._is_dead(found := status.get(name)):
                answers[name] = _dead(found)
            elif exchange.returns[name] > MAX_RETURNS and name in exchange.undelivered:
                answers[name] = Absent(exchange.undelivered[name])
        # A party that was cut off and has connected again may have lost the order, or its answer.
        # A party executes an order only once, however often it receives it.
        reconnected = {
            name
            for name in exchange.pending.values()
            if name not in before
            or status.get(name, before[name]).connections != before[name].connections
        }
        again = {
            name: exchange.orders[name]
            for name in sorted(reconnected | exchange.undelivered.keys())
            if name not in answers
        }
        exchange.pending = {
            number: name
            for number, name in exchange.pending.items()
            if name not in answers and name not in again
        }
        exchange.undelivered = {}
        exchange.pending |= self._dispatch(exchange, again)

    def _busy(self, phase: str, round: int) -> dict[str, Overdue]:
        """Returns the parties that have not answered an earlier order yet.

        Late answers of the others are discarded.
        """
        if self._overdue:
            pending = {overdue.number: name for name, overdue in self._overdue.items()}
            for number, data in self.transport.receive(pending, 0.0):
                name = pending[number]
                del self._overdue[name]
                if isinstance(data, bytes):
                    # The gate refuses it and counts that.
                    self._opened(name, data, phase, round, self.gate.limit)
        self._overdue = {name: late for name, late in self._overdue.items() if name in self.ready}
        return self._overdue

    def _order(self, phase: str, name: str, body: bytes, round: int) -> bytes:
        return sign(body, Header(self.run, round, self._sequence, name, phase, "order"), self.key)

    def _opened(self, name: str, data: bytes, phase: str, round: int, limit: int) -> bytes | Absent:
        """Returns the content of an answer, or the absence of the party if it failed.

        limit: the most bytes of the content.
        """
        try:
            opened = self.gate.open(
                data,
                sender=name,
                round=round,
                sequence=self._sequence,
                phase=phase,
                limit=max(limit, CONTROL_LIMIT),
            )
            if opened.kind == "answer":
                return opened.body
            failure = _json(opened.body)
        except ValueError as error:  # also an EnvelopeError
            return Absent(f"refused: {error}", error)
        self._note_instance(name, failure.get("instance"))
        lost_state = failure.get("lost_state") is True
        return Absent(plain_text(failure.get("cause", "")), lost_state=lost_state)

    def _alive(self) -> set[str]:
        status, admitted = self.transport.status(), self.keyring.current()
        return {name for name in admitted if not self._is_dead(status.get(name))}

    def _is_dead(self, status: PartyStatus | None) -> bool:
        """Returns whether a party has not joined, or has been without a sign of life too long."""
        if status is None:
            return True
        federation, limit = self.agreement.federation, self.agreement.federation.silence
        if status.closed:
            limit = federation.closed or (limit if self.policy.deadline else DEAD_AFTER)
        return status.silence > limit

    @property
    def refused(self) -> Counter[str]:
        """How many envelopes were refused, by reason."""
        return self.gate.refused


def _dead(status: PartyStatus | None) -> Absent:
    if status is None:
        return Absent("has not joined")
    return Absent(f"no sign of life for {status.silence:.0f} s")


def _json(body: bytes) -> dict[str, Any]:
    """Returns the JSON object in an answer; raises MessageError if there is none."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"the answer is not JSON ({type(error).__name__})") from error
    if not isinstance(content, dict):
        raise MessageError("the answer is not a JSON object")
    return content
