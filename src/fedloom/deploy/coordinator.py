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
from typing import Any

from fedloom.deploy.agreement import Agreement, differences
from fedloom.deploy.envelope import EnvelopeError, Gate, Header, sign
from fedloom.deploy.join import facts_to
from fedloom.deploy.keys import PartyKey
from fedloom.deploy.office import Office, Seen
from fedloom.errors import ConfigError, MessageError
from fedloom.faults import Patience
from fedloom.graph import Holding, Roster
from fedloom.message import Absent
from fedloom.party import Facts

DEAD_AFTER = 6.0  # seconds without a sign of life; a party gives one every two
RETURNED = 5  # times that Flower may give an order back (it takes a party for gone that is there) before its party is absent
LOOK_EVERY = 1.0  # seconds between looks at who is alive


class Coordinator:
    """One life of the coordinator: a run id of its own, and exchanges numbered from 0. lineage: what a resumed run has in common."""

    def __init__(self, agreement: Agreement, office: Office, key: PartyKey, lineage: str, patience: Patience = Patience()):
        if key.public.text() != agreement.coordinator.text():
            raise ConfigError("key: it is not that of federation.coordinator in the agreement")
        self.agreement, self.office, self.key, self.lineage, self.patience = agreement, office, key, lineage, patience
        self.run = secrets.token_hex(16)
        self.gate = Gate(agreement.parties, self.run)
        self.holdings: dict[str, Holding] = {}
        self.knows_cross_edges = False
        self.facts: Facts | None = None
        self.ready: set[str] = set()  # parties that have begun
        self.joined: Callable[[Holding], None] = lambda holding: None  # told of parties that come late
        self._sequence = -1

    # ---- before the run ----
    def gather(self, seconds: float, needed: int, say: Callable[[str], None]) -> Roster:
        """Waits until all parties have said hello, or so many once the time is over; gives what they hold. ConfigError if too few came."""
        until, told = time.monotonic() + seconds, set[str]()
        while True:
            self._greet(sorted(self._alive() - self.holdings.keys()))
            for name in sorted(self.holdings.keys() - told):
                told.add(name)
                say(f"{name} is there: {self.holdings[name].items} items ({len(told)} of {len(self.agreement.parties)})")
            if len(self.holdings) == len(self.agreement.parties):
                break
            if time.monotonic() > until:
                if len(self.holdings) >= needed:
                    break
                missing = ", ".join(name for name in self.agreement.parties if name not in self.holdings)
                raise ConfigError(
                    f"{len(self.holdings)} of {len(self.agreement.parties)} parties came within {seconds:.0f} s; missing: {missing}"
                )
            time.sleep(0.1)
        return self.roster()

    def roster(self) -> Roster:
        """Who takes part; of parties that have not come yet, nothing is known."""
        data = self.agreement.data
        held = tuple(self.holdings.get(name, Holding(name, 0, 0, 0, 0, 0)) for name in self.agreement.parties)
        about = {"dataset": "each party's own", "clients": len(held)}
        return Roster(held, data.num_features, data.num_classes, data.task, data.inductive, self.knows_cross_edges, about)  # type: ignore[arg-type]

    def begin(self, facts: Facts) -> None:
        """Tells everybody who is there that the run begins; ConfigError if one of them will not."""
        self.facts = facts
        for name, answer in self._introduce(self._greet(sorted(self.holdings)), rejoin=False).items():
            if isinstance(answer, Absent):
                raise ConfigError(f"party {name!r} does not begin: {answer.cause}")

    def _greet(self, names: Sequence[str]) -> dict[str, str]:
        """Says hello; gives the number that each who answers has drawn. ConfigError if a party has agreed to something else."""
        drawn: dict[str, str] = {}
        for name, told in self.tell("fedloom_hello", {name: {} for name in names}).items():
            if isinstance(told, Absent):
                continue
            if found := differences(told["agreed"], self.agreement.agreed()):
                raise ConfigError(f"party {name!r} has agreed to something else: {'; '.join(found)}")
            drawn[name], held = str(told["nonce"]), Holding(**{**told["holding"], "name": name})
            self.knows_cross_edges |= bool(told["knows_cross_edges"])
            if self.holdings.get(name) != held:
                self.holdings[name] = held
                self.joined(held)
        return drawn

    def _introduce(self, drawn: Mapping[str, str], rejoin: bool) -> dict[str, dict[str, Any] | Absent]:
        """Has parties that have just been greeted begin; gives what each says to that."""
        assert self.facts is not None
        order = {"agreed": self.agreement.agreed(), "facts": facts_to(self.facts), "lineage": self.lineage, "rejoin": rejoin}
        answers = self.tell("fedloom_begin", {name: {**order, "nonce": nonce} for name, nonce in drawn.items()})
        self.ready |= {name for name, answer in answers.items() if not isinstance(answer, Absent)}
        return answers

    def tell(self, phase: str, orders: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any] | Absent]:
        """One of fedloom's own orders to parties; gives what each says to it."""
        bodies = {name: json.dumps(order).encode() for name, order in orders.items()}
        return {
            name: answer if isinstance(answer, Absent) else _object(answer)
            for name, answer in self._exchange(phase, bodies, 0, Patience(deadline=60.0)).items()
        }

    # ---- exchanges ----
    def ask(self, phase: str, bodies: Mapping[str, bytes], round: int) -> dict[str, bytes | Absent]:
        """A phase of the method at parties; gives each one's answer, or why there is none.

        A party that has been started anew, or comes late, is told first that the run has begun; it is absent this once, and has forgotten
        what came before.
        """
        alive = self._alive()
        anew = {name for name in bodies if name in alive and name not in self.ready}
        answers: dict[str, bytes | Absent] = {name: self._admit(name) for name in anew}
        asked = {name: body for name, body in bodies.items() if name not in anew}
        for name, answer in self._exchange(phase, asked, round, self.patience).items():
            if isinstance(answer, Absent) and answer.forgot:
                self.ready.discard(name)
                answer = self._admit(name)
            answers[name] = answer
        return {name: answers[name] for name in bodies}

    def _admit(self, name: str) -> Absent:
        answer = self._introduce(self._greet([name]), rejoin=True).get(name, Absent("does not answer"))
        return answer if isinstance(answer, Absent) else Absent("was started anew", forgot=True)

    def _exchange(self, phase: str, bodies: Mapping[str, bytes], round: int, patience: Patience) -> dict[str, bytes | Absent]:
        if not bodies:
            return {}
        self._sequence += 1
        began, seen = time.monotonic(), self.office.seen()
        # Nothing is sent to who is not there: it would find the order later, when it means nothing any more.
        answers: dict[str, bytes | Absent] = {name: _gone(seen.get(name)) for name in bodies if _is_gone(seen.get(name))}
        orders = {name: self._order(phase, name, body, round) for name, body in bodies.items() if name not in answers}
        waiting = self.office.post(orders) if orders else {}
        looked, reached = began, None
        returned: Counter[str] = Counter()  # how often Flower has given back an order to a party, instead of an answer
        undelivered: dict[str, str] = {}  # why, for those whose order is to be sent again
        while waiting or undelivered:
            now = time.monotonic()
            closes = patience.closes(began, reached)
            if closes is not None and now >= closes:
                answers |= dict.fromkeys([*waiting.values(), *undelivered], Absent(f"late: no answer within {now - began:.1f} s"))
                break
            for number, data in self.office.collect(waiting, LOOK_EVERY if closes is None else min(closes - now, LOOK_EVERY)):
                name = waiting.pop(number)
                if isinstance(data, bytes):
                    answers[name] = self._opened(name, data, phase, round)
                else:
                    undelivered[name] = data
                    returned[name] += 1
            if reached is None and sum(not isinstance(a, Absent) for a in answers.values()) >= patience.enough(len(bodies)):
                reached = time.monotonic()
            if (waiting or undelivered) and time.monotonic() - looked > LOOK_EVERY:
                looked, before, seen = time.monotonic(), seen, self.office.seen()
                for name in [name for name in (*waiting.values(), *undelivered) if _is_gone(seen.get(name))]:
                    answers[name] = _gone(seen.get(name))
                for name in [name for name in undelivered if returned[name] > RETURNED and name not in answers]:
                    answers[name] = Absent(undelivered[name])
                # Who was cut off and has connected again may have lost the order, or its answer; told twice, it does nothing twice.
                back = {n for n in waiting.values() if n not in before or seen.get(n, before[n]).connections != before[n].connections}
                again = {name: orders[name] for name in sorted(back | undelivered.keys()) if name not in answers}
                waiting = {number: name for number, name in waiting.items() if name not in answers and name not in again}
                undelivered = {}
                waiting |= self.office.post(again) if again else {}
        return answers

    def _order(self, phase: str, name: str, body: bytes, round: int) -> bytes:
        return sign(body, Header(self.run, round, self._sequence, name, phase, "order"), self.key)

    def _opened(self, name: str, data: bytes, phase: str, round: int) -> bytes | Absent:
        try:
            opened = self.gate.open(data, sender=name, round=round, sequence=self._sequence, phase=phase)
            if opened.kind == "answer":
                return opened.body
            told = _object(opened.body)
            return Absent(str(told.get("cause", "")), forgot=bool(told.get("forgot")))
        except (EnvelopeError, MessageError) as error:
            return Absent(f"refused: {error}", error)

    def _alive(self) -> set[str]:
        return {name for name, seen in self.office.seen().items() if not _is_gone(seen)}

    @property
    def refused(self) -> Counter[str]:
        """What was not let in, by reason."""
        return self.gate.refused


def _is_gone(seen: Seen | None) -> bool:
    return seen is None or seen.silent > DEAD_AFTER


def _gone(seen: Seen | None) -> Absent:
    return Absent("has not joined" if seen is None else f"no sign of life for {seen.silent:.0f} s")


def _object(body: bytes) -> dict[str, Any]:
    try:
        told = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"an answer that is not JSON ({type(error).__name__})") from error
    if not isinstance(told, dict):
        raise MessageError("an answer that is not a JSON object")
    return told
