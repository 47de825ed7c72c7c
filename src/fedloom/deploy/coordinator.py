"""The coordinator: gives orders to the parties of an agreement, one exchange after another, and collects their signed answers.

An exchange closes when everybody has answered, or some time (`grace`) after a quorum has, or at the deadline; a party that shows no sign
of life is not waited for. What answers another exchange, or is not signed by the party it came from, counts for nothing (`Gate`).
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedloom.deploy.agreement import Agreement, differences
from fedloom.deploy.envelope import EnvelopeError, Gate, Header, sign
from fedloom.deploy.join import facts_to
from fedloom.deploy.keys import PartyKey
from fedloom.deploy.office import Office
from fedloom.errors import ConfigError, MessageError
from fedloom.faults import Patience
from fedloom.graph import Holding, Roster
from fedloom.message import Absent
from fedloom.party import Facts

DEAD_AFTER = 6.0  # seconds without a sign of life; a party gives one every two
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
        began, silence = time.monotonic(), self.office.silence()
        answers: dict[str, bytes | Absent] = {
            name: _silent(silence.get(name)) for name in bodies if silence.get(name, math.inf) > DEAD_AFTER
        }  # nothing is sent to who is not there: it would find the order later, when it means nothing any more
        orders = {name: self._order(phase, name, body, round) for name, body in bodies.items() if name not in answers}
        waiting = self.office.post(orders) if orders else {}
        looked, reached = began, None
        while waiting:
            now = time.monotonic()
            closes = patience.closes(began, reached)
            if closes is not None and now >= closes:
                answers |= dict.fromkeys(waiting.values(), Absent(f"late: no answer within {now - began:.1f} s"))
                break
            for number, data in self.office.collect(waiting, LOOK_EVERY if closes is None else min(closes - now, LOOK_EVERY)):
                name = waiting.pop(number)
                answers[name] = self._opened(name, data, phase, round)
            if reached is None and sum(not isinstance(a, Absent) for a in answers.values()) >= patience.enough(len(bodies)):
                reached = time.monotonic()
            if waiting and time.monotonic() - looked > LOOK_EVERY:
                looked, silence = time.monotonic(), self.office.silence()
                for number, name in list(waiting.items()):
                    if silence.get(name, math.inf) > DEAD_AFTER:
                        answers[waiting.pop(number)] = _silent(silence.get(name))
        return answers

    def _order(self, phase: str, name: str, body: bytes, round: int) -> bytes:
        return sign(body, Header(self.run, round, self._sequence, name, phase, "order"), self.key)

    def _opened(self, name: str, data: bytes | str, phase: str, round: int) -> bytes | Absent:
        if isinstance(data, str):
            return Absent(data)
        try:
            opened = self.gate.open(data, sender=name, round=round, sequence=self._sequence, phase=phase)
            if opened.kind == "answer":
                return opened.body
            told = _object(opened.body)
            return Absent(str(told.get("cause", "")), forgot=bool(told.get("forgot")))
        except (EnvelopeError, MessageError) as error:
            return Absent(f"refused: {error}", error)

    def _alive(self) -> set[str]:
        return {name for name, seconds in self.office.silence().items() if seconds <= DEAD_AFTER}

    @property
    def refused(self) -> Counter[str]:
        """What was not let in, by reason."""
        return self.gate.refused


def _silent(seconds: float | None) -> Absent:
    return Absent("has not joined" if seconds is None else f"no sign of life for {seconds:.0f} s")


def _object(body: bytes) -> dict[str, Any]:
    try:
        told = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"an answer that is not JSON ({type(error).__name__})") from error
    if not isinstance(told, dict):
        raise MessageError("an answer that is not a JSON object")
    return told
