"""Absence: how many clients must answer, and what an absence means for later exchanges.

`Waist.exchange` applies it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from fedloom.core.message import Absent, Message
from fedloom.errors import NotFiniteError

SILENT = Absent("did not answer")  # the engine has no reply and knows no reason


@dataclass(frozen=True)
class FaultPolicy:
    """Which absences an exchange tolerates, and how long it waits.

    Args:
        quorum: Share of the asked clients that must answer. With 1, every absence is an error.
        grace: Seconds that the others have once a quorum has answered. 0: until the deadline.
        deadline: Seconds that all clients have. 0: no limit.
    """

    quorum: float = 1.0
    grace: float = 0.0
    deadline: float = 0.0

    @property
    def tolerates_absence(self) -> bool:
        """Whether an exchange may continue without a client."""
        return self.quorum < 1

    def enough(self, asked: int) -> int:
        """Returns how many of `asked` clients are a quorum."""
        return math.ceil(self.quorum * asked - 1e-9)  # 0.7 of 10 is 7 in spite of rounding

    def closes_at(self, begun: float, reached: float | None) -> float | None:
        """Returns when an exchange ends; None if it ends when all clients have answered.

        Args:
            begun: When the exchange began.
            reached: When a quorum had answered. None: not yet.
        """
        ends = [begun + self.deadline] if self.deadline else []
        if self.grace and reached is not None:
            ends.append(reached + self.grace)
        return min(ends, default=None)


class SetupExchange(NamedTuple):
    """An exchange before the rounds, kept for the clients that missed it.

    Args:
        name: The phase.
        messages: What each client was sent.
        book_as: The phase that the ledger books it under.
        repeatable: Whether it can be repeated later.
        absent: The clients that missed it when it took place.
    """

    name: str
    messages: Mapping[str, Message]
    book_as: str | None
    repeatable: bool
    absent: Mapping[str, Absent]


class AbsenceTracker:
    """Tracks absences, and decides what follows from them.

    In a round: a client that misses an exchange takes no further part in the round, except in
    evaluations. So no client answers from the state of an earlier round. The exchanges after the
    last round count as one more round.

    Before the rounds: clients are set up. A client that misses an exchange there repeats it, in
    order, before the next exchange that it is part of. Its reply is late and is discarded. If it
    does not answer again, it is absent again.

    A client that has lost its state repeats all exchanges before the rounds. If an evaluation shows
    the loss, the client also sits out a round, so that no method relies on what it was sent in the
    last one.

    Attributes:
        noted: Client, phase and cause of each absence since the last history entry.
        retried: Messages that were sent again since then.
        out: The clients that take no further part in this round.
        setup: The exchanges before the rounds.
    """

    def __init__(self) -> None:
        self.noted: list[dict[str, str]] = []
        self.retried = 0
        self.out: dict[str, Absent] = {}
        self.setup: list[SetupExchange] = []
        self._missed: dict[str, set[int]] = {}  # client: the numbers of those it missed
        self._sitting_out: dict[str, Absent] = {}
        self._resumed: dict[str, Any] = {}  # in a resumed run: the result of `saved`

    def begin_round(self) -> None:
        """Lets all clients take part again, except those that sit out this round."""
        self.out, self._sitting_out = self._sitting_out, {}

    def note(self, phase: str, absent: Mapping[str, Absent]) -> None:
        """Records absences for the history."""
        self.noted += [
            {"client": client, "phase": phase, "cause": why.cause} for client, why in absent.items()
        ]

    def add_setup(self, exchange: SetupExchange) -> None:
        """Records an exchange before the rounds."""
        for client in exchange.absent:
            self._missed.setdefault(client, set()).add(len(self.setup))
        self.setup.append(exchange)

    def has_missed(self, client: str, number: int) -> bool:
        """Returns whether a client has missed the exchange of that number."""
        return number in self._missed.get(client, ())

    def caught_up(self, client: str, number: int) -> None:
        """Records that a client has repeated the exchange of that number."""
        self._missed[client].discard(number)

    def lost_state(self, client: str, why: Absent, in_rounds: bool, measuring: bool) -> None:
        """Records that a client must repeat all exchanges before the rounds."""
        self._missed[client] = {
            number for number, exchange in enumerate(self.setup) if client in exchange.messages
        }
        if in_rounds:
            self.out[client] = why
            if measuring:
                self._sitting_out[client] = why

    # ---- checkpoints ----
    def saved(self) -> dict[str, Any]:
        """Returns what later rounds depend on, as JSON. A checkpoint is between two rounds."""
        return {
            "absent": [_causes(exchange.absent) for exchange in self.setup],
            "missed": {
                client: sorted(numbers) for client, numbers in self._missed.items() if numbers
            },
            "sits_out": _causes(self._sitting_out),
        }

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Takes the result of `saved`, before the set-up is repeated. It may be empty."""
        self._resumed = dict(saved)

    def absent_in_setup(self) -> dict[str, Absent]:
        """Returns the clients that missed the next exchange before the rounds, before the resume.

        The repeated set-up leaves out the same clients, so that it has the same result.
        """
        exchanges, number = self._resumed.get("absent", []), len(self.setup)
        return _absent(exchanges[number]) if number < len(exchanges) else {}

    def to_catch_up(self) -> Iterator[tuple[int, list[str]]]:
        """Yields, after the repeated set-up, what clients had caught up on before the checkpoint.

        Each item is the number of an exchange and the clients that must repeat it.
        """
        before: dict[str, list[int]] = self._resumed.get("missed", {})
        caught_up = {
            client: numbers - set(before.get(client, ()))
            for client, numbers in self._missed.items()
        }
        for number, exchange in enumerate(self.setup):
            due = [client for client, numbers in caught_up.items() if number in numbers]
            if exchange.repeatable and due:
                yield number, due

    def restore(self) -> None:
        """Restores the state of the checkpoint. What clients missed since then stays recorded."""
        for client, numbers in self._resumed.get("missed", {}).items():
            self._missed.setdefault(client, set()).update(numbers)
        self._sitting_out = _absent(self._resumed.get("sits_out", {}))

    def report(self) -> dict[str, Any]:
        """Returns what the history records of absences since the last call; {} without any."""
        entry = {"absent": self.noted, "retried": self.retried}
        self.noted, self.retried = [], 0
        return {key: value for key, value in entry.items() if value}


def _causes(absent: Mapping[str, Absent]) -> dict[str, str]:
    return {client: why.cause for client, why in absent.items()}


def _absent(causes: Mapping[str, str]) -> dict[str, Absent]:
    return {client: Absent(cause) for client, cause in causes.items()}


class AbsenceCounts:
    """Counts the absences in history entries."""

    def __init__(self) -> None:
        self._count: Counter[str] = Counter()
        self._retried = 0

    def add(self, entry: Mapping[str, Any]) -> None:
        """Adds a history entry, or a report of `AbsenceTracker`."""
        self._count.update(absence["client"] for absence in entry.get("absent", ()))
        self._retried += entry.get("retried", 0)

    def summary(self) -> dict[str, Any]:
        """Returns how often each client was absent, and how many messages were sent again."""
        return {"absences": dict(self._count), "retried": self._retried}


def not_finite(absent: Absent) -> bool:
    """Returns whether a client is absent because a number in its reply is not finite."""
    # In a secure run the client itself finds out, and a party far away says it in words.
    words = absent.cause.startswith(NotFiniteError.__name__)
    return isinstance(absent.error, NotFiniteError) or words


def too_few(answered: Collection[str], asked: int, needed: int) -> str:
    """Describes why a round fails."""
    return f"{len(answered)} of {asked} clients answered ({named(answered)}), {needed} are needed"


def listed(absent: Mapping[str, Absent]) -> str:
    """Lists the absent clients by cause, at most 20 causes."""
    clients: dict[str, list[str]] = {}
    for client, why in absent.items():
        clients.setdefault(why.cause, []).append(client)
    lines = [f"{named(absentees)}: {cause}" for cause, absentees in clients.items()]
    more = len(lines) - 20
    return "; ".join([*lines[:20], *([f"and {more} more causes"] if more > 0 else [])])


def named(clients: Collection[str]) -> str:
    """Lists client names, at most 20."""
    shown = list(clients)[:20]
    more = len(clients) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "") if shown else "nobody"
