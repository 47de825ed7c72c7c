"""The coordinator: gives orders to the parties of an agreement, one exchange after another, and collects their signed answers.

An exchange closes when everybody has answered, or some time (`grace`) after a quorum has, or at the deadline; a party that shows no sign
of life is not waited for. What answers another exchange, or is not signed by the party it came from, counts for nothing (`Gate`).
"""

from __future__ import annotations

import json
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

from fedloom.core.absence import FaultPolicy
from fedloom.core.facts import Facts
from fedloom.core.message import Absent
from fedloom.data.federation import PartySize, Roster
from fedloom.deploy.agreement import Agreement, differences
from fedloom.deploy.coordinator_transport import CoordinatorTransport, Seen
from fedloom.deploy.envelope import EnvelopeError, Gate, Header, sign
from fedloom.deploy.keys import PartyKey
from fedloom.deploy.party import facts_to
from fedloom.errors import ConfigError, MessageError

DEAD_AFTER = 7.0  # seconds without a sign of life; a party gives one every second, and may be cut off for five
RETURNED = 5  # times that Flower may give an order back (it takes a party for gone that is there) before its party is absent
TELL_SECONDS = 60.0  # that parties have for orders that take no time
LOOK_EVERY = 1.0  # seconds between looks at who is alive


class Late(NamedTuple):
    """An order that has not been answered: the message's number, and what was ordered."""

    number: str
    what: str


class Coordinator:
    """One life of the coordinator: a run id of its own, and exchanges numbered from 0. lineage: what a resumed run has in common."""

    def __init__(
        self,
        agreement: Agreement,
        transport: CoordinatorTransport,
        key: PartyKey,
        lineage: str,
        policy: FaultPolicy = FaultPolicy(),
    ):
        if key.public.text() != agreement.coordinator.text():
            raise ConfigError("key: it is not that of federation.coordinator in the agreement")
        self.agreement, self.transport, self.key, self.lineage, self.policy = (
            agreement,
            transport,
            key,
            lineage,
            policy,
        )
        self.run = secrets.token_hex(16)
        self.gate = Gate(agreement.parties, self.run)
        self.sizes: dict[str, PartySize] = {}
        self.knows_cross_edges = False
        self.facts: Facts | None = None
        self.ready: set[str] = set()  # parties that have begun
        self.joined: Callable[[PartySize], None] = lambda holding: (
            None
        )  # told of parties that come late
        self._sequence = -1
        self._late: dict[str, Late] = {}  # whose answer did not come while the exchange was open

    # ---- before the run ----
    def gather(
        self,
        seconds: float,
        needed: int,
        say: Callable[[str], None],
        watch: Callable[[], None] = lambda: None,
    ) -> Roster:
        """Waits until all parties have said hello, or so many once the time is over; gives what they hold. ConfigError if too few came, or
        if one has agreed to something else. watch: called again and again meanwhile.
        """
        until, told = time.monotonic() + seconds, set[str]()
        while len(self.sizes) < len(self.agreement.parties):
            watch()
            for name, why in self._greet(sorted(self._alive() - self.sizes.keys()))[1].items():
                if why.error is not None:
                    raise ConfigError(f"party {name!r} {why.cause}")
            for name in sorted(self.sizes.keys() - told):
                told.add(name)
                say(
                    f"{name} is there: {self.sizes[name].items} items ({len(told)} of {len(self.agreement.parties)})"
                )
            if time.monotonic() > until:
                if len(self.sizes) >= needed:
                    break
                missing = ", ".join(
                    name for name in self.agreement.parties if name not in self.sizes
                )
                came = f"{len(self.sizes)} of {len(self.agreement.parties)} parties came"
                raise ConfigError(
                    f"{came} within {seconds:.0f} s, {needed} are needed; missing: {missing}"
                )
            time.sleep(0.1)
        return self.roster()

    def roster(self) -> Roster:
        """Who takes part; of parties that have not come yet, nothing is known."""
        data = self.agreement.data
        held = tuple(
            self.sizes.get(name, PartySize(name, 0, 0, 0, 0, 0)) for name in self.agreement.parties
        )
        about = {"dataset": "each party's own", "clients": len(held)}
        return Roster(
            held,
            data.num_features,
            data.num_classes,
            data.task,
            data.inductive,
            self.knows_cross_edges,
            about,
        )  # type: ignore[arg-type]

    def begin(self, facts: Facts) -> None:
        """Tells everybody who is there that the run begins; ConfigError if one of them will not."""
        self.facts = facts
        drawn, absent = self._greet(sorted(self.sizes))
        answers = {**absent, **self._introduce(drawn, rejoin=False)}
        for name, answer in answers.items():
            if isinstance(answer, Absent):
                raise ConfigError(f"party {name!r} does not begin: {answer.cause}")

    def _greet(self, names: Sequence[str]) -> tuple[dict[str, str], dict[str, Absent]]:
        """Says hello; gives the number that each has drawn who answers as it should, and why others do not."""
        drawn: dict[str, str] = {}
        absent: dict[str, Absent] = {}
        for name, told in self.tell("fedloom_hello", {name: {} for name in names}).items():
            if isinstance(told, Absent):
                absent[name] = told
                continue
            try:
                drawn[name], held = self._checked(name, told)
            except (ConfigError, MessageError) as error:
                absent[name] = Absent(str(error), error)
                continue
            if self.sizes.get(name) != held:
                self.sizes[name] = held
                self.joined(held)
        return drawn, absent

    def _checked(self, name: str, told: dict[str, Any]) -> tuple[str, PartySize]:
        """What a party says of itself: its number, and what it holds. ConfigError if it has agreed to something else."""
        agreed, held, nonce = told.get("agreed"), told.get("size"), told.get("nonce")
        counts = {f.name for f in fields(PartySize)} - {"name"}
        if not isinstance(agreed, dict) or not isinstance(nonce, str) or not isinstance(held, dict):
            raise MessageError("does not say who it is")
        if any(type(held.get(count)) is not int or held[count] < 0 for count in counts):
            raise MessageError("does not say how much it holds")
        if found := differences(agreed, self.agreement.agreed()):
            raise ConfigError(f"has agreed to something else: {'; '.join(found)}")
        self.knows_cross_edges |= told.get("knows_cross_edges") is True
        return nonce, PartySize(name, **{count: held[count] for count in counts})

    def _introduce(
        self, drawn: Mapping[str, str], rejoin: bool
    ) -> dict[str, dict[str, Any] | Absent]:
        """Has parties that have just been greeted begin; gives what each says to that."""
        assert self.facts is not None
        order = {
            "agreed": self.agreement.agreed(),
            "facts": facts_to(self.facts),
            "lineage": self.lineage,
            "rejoin": rejoin,
        }
        answers = self.tell(
            "fedloom_begin", {name: {**order, "nonce": nonce} for name, nonce in drawn.items()}
        )
        self.ready |= {name for name, answer in answers.items() if not isinstance(answer, Absent)}
        return answers

    def tell(
        self, phase: str, orders: Mapping[str, dict[str, Any]]
    ) -> dict[str, dict[str, Any] | Absent]:
        """One of fedloom's own orders to parties; gives what each says to it."""
        bodies = {name: json.dumps(order).encode() for name, order in orders.items()}
        # Who is busy is not waited for: whether all must do as they are told, is for the caller to say.
        answers = self._exchange(phase, bodies, 0, FaultPolicy(quorum=1e-9, deadline=TELL_SECONDS))
        return {
            name: answer if isinstance(answer, Absent) else _object(answer)
            for name, answer in answers.items()
        }

    # ---- exchanges ----
    def ask(self, phase: str, bodies: Mapping[str, bytes], round: int) -> dict[str, bytes | Absent]:
        """A phase of the method at parties; gives each one's answer, or why there is none.

        A party that has been started anew, or comes late, is told first that the run has begun; it is absent this once, and has forgotten
        what came before.
        """
        alive = self._alive()
        anew = {name for name in bodies if name in alive and name not in self.ready}
        answers: dict[str, bytes | Absent] = {name: self._admit(name) for name in sorted(anew)}
        asked = {name: body for name, body in bodies.items() if name not in anew}
        for name, answer in self._exchange(phase, asked, round, self.policy).items():
            if isinstance(answer, Absent) and answer.lost_state:
                self.ready.discard(name)
                answer = self._admit(name)
            answers[name] = answer
        return {name: answers[name] for name in bodies}

    def _admit(self, name: str) -> Absent:
        drawn, absent = self._greet([name])
        answer = {**absent, **self._introduce(drawn, rejoin=True)}[name]
        return answer if isinstance(answer, Absent) else Absent("was started anew", lost_state=True)

    def _exchange(
        self, phase: str, bodies: Mapping[str, bytes], round: int, policy: FaultPolicy
    ) -> dict[str, bytes | Absent]:
        if not bodies:
            return {}
        self._sequence += 1
        began, seen = time.monotonic(), self.transport.seen()
        # Nothing is sent to who is not there: it would find the order later, when it means nothing any more.
        answers: dict[str, bytes | Absent] = {
            name: _gone(seen.get(name)) for name in bodies if _is_gone(seen.get(name))
        }
        busy = self._busy(phase, round).keys() & bodies.keys() - answers.keys()
        if len(bodies) - len(answers) - len(busy) >= policy.enough(len(bodies)):
            answers |= {name: Absent(f"still busy with {self._late[name].what}") for name in busy}
        orders = {
            name: self._order(phase, name, body, round)
            for name, body in bodies.items()
            if name not in answers
        }
        waiting = self.transport.post(orders) if orders else {}
        looked, reached = began, None
        returned: Counter[str] = (
            Counter()
        )  # how often Flower has given back an order to a party, instead of an answer
        undelivered: dict[str, str] = {}  # why, for those whose order is to be sent again
        while waiting or undelivered:
            now = time.monotonic()
            closes = policy.closes_at(began, reached)
            if closes is not None and now >= closes:
                self._late |= {
                    name: Late(number, f"{phase!r} of round {round}")
                    for number, name in waiting.items()
                }
                answers |= dict.fromkeys(
                    [*waiting.values(), *undelivered],
                    Absent(f"late: no answer within {now - began:.1f} s"),
                )
                break
            for number, data in self.transport.collect(
                waiting, LOOK_EVERY if closes is None else min(closes - now, LOOK_EVERY)
            ):
                name = waiting.pop(number)
                if isinstance(data, bytes):
                    answers[name] = self._opened(name, data, phase, round)
                else:
                    undelivered[name] = data
                    returned[name] += 1
            if reached is None and sum(
                not isinstance(a, Absent) for a in answers.values()
            ) >= policy.enough(len(bodies)):
                reached = time.monotonic()
            if (waiting or undelivered) and time.monotonic() - looked > LOOK_EVERY:
                looked, before, seen = time.monotonic(), seen, self.transport.seen()
                for name in [
                    name for name in (*waiting.values(), *undelivered) if _is_gone(seen.get(name))
                ]:
                    answers[name] = _gone(seen.get(name))
                for name in [
                    name
                    for name in undelivered
                    if returned[name] > RETURNED and name not in answers
                ]:
                    answers[name] = Absent(undelivered[name])
                # Who was cut off and has connected again may have lost the order, or its answer; told twice, it does nothing twice.
                back = {
                    n
                    for n in waiting.values()
                    if n not in before
                    or seen.get(n, before[n]).connections != before[n].connections
                }
                again = {
                    name: orders[name]
                    for name in sorted(back | undelivered.keys())
                    if name not in answers
                }
                waiting = {
                    number: name
                    for number, name in waiting.items()
                    if name not in answers and name not in again
                }
                undelivered = {}
                waiting |= self.transport.post(again) if again else {}
        return answers

    def _busy(self, phase: str, round: int) -> dict[str, Late]:
        """Who has not answered an earlier order yet. What others have answered to one that was closed is thrown away."""
        if self._late:
            for number, data in self.transport.collect(
                {late.number: name for name, late in self._late.items()}, 0.0
            ):
                name = next(name for name, late in self._late.items() if late.number == number)
                del self._late[name]
                if isinstance(data, bytes):
                    self._opened(name, data, phase, round)  # the gate refuses it, and counts that
        self._late = {name: late for name, late in self._late.items() if name in self.ready}
        return self._late

    def _order(self, phase: str, name: str, body: bytes, round: int) -> bytes:
        return sign(body, Header(self.run, round, self._sequence, name, phase, "order"), self.key)

    def _opened(self, name: str, data: bytes, phase: str, round: int) -> bytes | Absent:
        try:
            opened = self.gate.open(
                data, sender=name, round=round, sequence=self._sequence, phase=phase
            )
            if opened.kind == "answer":
                return opened.body
            told = _object(opened.body)
            return (
                told
                if isinstance(told, Absent)
                else Absent(str(told.get("cause", "")), lost_state=told.get("lost_state") is True)
            )
        except EnvelopeError as error:
            return Absent(f"refused: {error}", error)

    def _alive(self) -> set[str]:
        return {name for name, seen in self.transport.seen().items() if not _is_gone(seen)}

    @property
    def refused(self) -> Counter[str]:
        """What was not let in, by reason."""
        return self.gate.refused


def _is_gone(seen: Seen | None) -> bool:
    return seen is None or seen.silent > DEAD_AFTER


def _gone(seen: Seen | None) -> Absent:
    return Absent("has not joined" if seen is None else f"no sign of life for {seen.silent:.0f} s")


def _object(body: bytes) -> dict[str, Any] | Absent:
    """What a party says in JSON."""
    try:
        told = json.loads(body)
    except (ValueError, RecursionError) as error:
        return Absent(f"refused: an answer that is not JSON ({type(error).__name__})")
    return (
        told if isinstance(told, dict) else Absent("refused: an answer that is not a JSON object")
    )
