"""When somebody does not answer: how many must, and what follows for who was not there. What is done about it: `Server.exchange`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from fedloom.core.message import Absent, Message

SILENT = Absent("did not answer")  # not in what the engine gave, for no reason that it knows


@dataclass(frozen=True)
class FaultPolicy:
    """What an exchange bears, for engines and the server: how many may be absent, and how long it waits.

    quorum: share of the clients asked that must answer; at 1 every absence is an error. grace: seconds that the others have once a quorum
    has answered (0: until the deadline). deadline: seconds that all have (0: no limit).
    """

    quorum: float = 1.0
    grace: float = 0.0
    deadline: float = 0.0

    @property
    def tolerates_absence(self) -> bool:
        """Whether an exchange may go on without somebody."""
        return self.quorum < 1

    def enough(self, asked: int) -> int:
        """How many of so many clients make a quorum."""
        return math.ceil(
            self.quorum * asked - 1e-9
        )  # 0.7 of 10 is 7, whatever floating point makes of it

    def closes_at(self, begun: float, reached: float | None) -> float | None:
        """When an exchange is over that began at `begun` and, unless None, had its quorum at `reached`; None: when all have answered."""
        ends = [begun + self.deadline] if self.deadline else []
        if self.grace and reached is not None:
            ends.append(reached + self.grace)
        return min(ends, default=None)


class SetupExchange(NamedTuple):
    """An exchange before the rounds, kept for those who have missed it. repeatable: whether it can be handed in again."""

    name: str
    messages: Mapping[str, Message]
    book_as: str | None
    repeatable: bool
    absent: Mapping[str, Absent]  # who missed it when it took place


class AbsenceTracker:
    """The server's memory of absences, and what follows from them.

    A round is done whole: who misses an exchange of it is out until the next one, but for evaluation, so that nobody answers from what an
    earlier round has left. (What comes after the last round counts as one more.) What comes before the rounds is what a client is made of:
    who misses an exchange there is handed it again, in order, before the next one that it is part of. Its answer to that comes too late and
    counts for nothing; if there is none again, the client is absent again. Who has lost its state is handed in all of them; if that shows
    in an evaluation, it also sits out a round, so that no method takes it for one that has kept what it was sent in the last.
    """

    def __init__(self) -> None:
        self.noted: list[
            dict[str, str]
        ] = []  # client, phase and cause, since the last history entry
        self.retried = 0  # messages that were sent once more, since then
        self.out: dict[str, Absent] = {}  # who takes no further part in this round
        self.setup: list[SetupExchange] = []
        self._missed: dict[str, set[int]] = {}  # which of them a client lacks
        self._sitting_out: dict[str, Absent] = {}
        self._resumed: dict[str, Any] = {}  # in a run that is resumed: what `saved` gave

    def begin_round(self) -> None:
        """Lets everybody in again, but for who has to sit out."""
        self.out, self._sitting_out = self._sitting_out, {}

    def note(self, phase: str, absent: Mapping[str, Absent]) -> None:
        """Keeps absences for the history."""
        self.noted += [
            {"client": client, "phase": phase, "cause": why.cause} for client, why in absent.items()
        ]

    def add_setup(self, exchange: SetupExchange) -> None:
        """Keeps an exchange before the rounds."""
        for client in exchange.absent:
            self._missed.setdefault(client, set()).add(len(self.setup))
        self.setup.append(exchange)

    def has_missed(self, client: str, number: int) -> bool:
        """Whether a client has missed the exchange of that number."""
        return number in self._missed.get(client, ())

    def caught_up(self, client: str, number: int) -> None:
        """The client has done the exchange of that number."""
        self._missed[client].discard(number)

    def lost_state(self, client: str, why: Absent, in_rounds: bool, measuring: bool) -> None:
        """The client has to do all that came before the rounds again."""
        self._missed[client] = {
            number for number, exchange in enumerate(self.setup) if client in exchange.messages
        }
        if in_rounds:
            self.out[client] = why
            if measuring:
                self._sitting_out[client] = why

    # ---- a run that is killed and resumed ----
    def saved(self) -> dict[str, Any]:
        """For a checkpoint, which is written between two rounds: all that later rounds depend on, as JSON would say it."""
        return {
            "absent": [_causes(exchange.absent) for exchange in self.setup],
            "missed": {
                client: sorted(numbers) for client, numbers in self._missed.items() if numbers
            },
            "sits_out": _causes(self._sitting_out),
        }

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Told before set-up is done again what `saved` had given; a checkpoint of an older fedloom has nothing of it."""
        self._resumed = dict(saved)

    def absent_in_setup(self) -> dict[str, Absent]:
        """While set-up is done again: who missed the next exchange when it was done first, so that the same comes of it."""
        of_exchanges = self._resumed.get("absent", [])
        return _absent(of_exchanges[len(self.setup)]) if len(self.setup) < len(of_exchanges) else {}

    def to_catch_up(self) -> Iterator[tuple[int, list[str]]]:
        """When set-up has been done again: the exchanges that clients lack which they had made up for before, by number."""
        made_up = {
            client: set(numbers) - set(self._lacked(client))
            for client, numbers in self._missed.items()
        }
        for number, exchange in enumerate(self.setup):
            if exchange.repeatable and (
                due := [client for client, numbers in made_up.items() if number in numbers]
            ):
                yield number, due

    def put_back(self) -> None:
        """As it was at the checkpoint, but for what clients lack now on top of that."""
        for client, numbers in self._resumed.get("missed", {}).items():
            self._missed.setdefault(client, set()).update(numbers)
        self._sitting_out = _absent(self._resumed.get("sits_out", {}))

    def _lacked(self, client: str) -> Iterable[int]:
        missed: dict[str, list[int]] = self._resumed.get("missed", {})
        return missed.get(client, ())

    def report(self) -> dict[str, Any]:
        """What the history says of absences since it was asked last; nothing, if there were none."""
        told = {"absent": self.noted, "retried": self.retried}
        self.noted, self.retried = [], 0
        return {key: value for key, value in told.items() if value}


def _causes(absent: Mapping[str, Absent]) -> dict[str, str]:
    return {client: why.cause for client, why in absent.items()}


def _absent(causes: Mapping[str, str]) -> dict[str, Absent]:
    return {client: Absent(cause) for client, cause in causes.items()}


class AbsenceCounts:
    """Adds up what history entries say of absences, however many entries there are."""

    def __init__(self) -> None:
        self._count: Counter[str] = Counter()
        self._retried = 0

    def add(self, entry: Mapping[str, Any]) -> None:
        """Takes a history entry, or a report of `AbsenceTracker`."""
        self._count.update(absence["client"] for absence in entry.get("absent", ()))
        self._retried += entry.get("retried", 0)

    def summary(self) -> dict[str, Any]:
        """For a run's summary: how often each client was absent, and how many messages were sent once more."""
        return {"absences": dict(self._count), "retried": self._retried}


def too_few(answered: Collection[str], asked: int, needed: int) -> str:
    """What a round fails of."""
    return f"{len(answered)} of {asked} clients answered ({named(answered)}), {needed} are needed"


def listed(absent: Mapping[str, Absent]) -> str:
    """Who is absent and why, each cause once."""
    clients: dict[str, list[str]] = {}
    for client, why in absent.items():
        clients.setdefault(why.cause, []).append(client)
    return "; ".join(f"{named(who)}: {cause}" for cause, who in clients.items())


def named(clients: Collection[str]) -> str:
    """Clients by name, as many as fit into a line."""
    shown = list(clients)[:20]
    more = len(clients) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "") if shown else "nobody"
