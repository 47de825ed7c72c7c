"""What engines have in common that deal the clients to workers: who goes where, what a worker does, and how its errors come back."""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from fedloom._system import peak_memory
from fedloom.core.absence import FaultPolicy
from fedloom.core.client import Client
from fedloom.core.message import Absent, Message, flatten, isolate
from fedloom.core.method import Method
from fedloom.engines import loop
from fedloom.engines.base import Details
from fedloom.errors import FedloomError

Content = tuple[dict[str, Tensor], list[str]]  # a message, flat, and whose it is
Failure = Mapping[
    str, str
]  # an exception in words: its class, the class's name, its text, its traceback
Failures = dict[str, Failure]  # by client
T = TypeVar("T")


class WorkerError(RuntimeError):
    """A worker died, or failed by no fault of the input."""


# ---- who goes where ----
def deal(clients: Sequence[Client], groups: int) -> list[list[Client]]:
    """Takes clients and a number of groups, gives the groups: about equal work in each, nobody out of order, none empty."""
    work = {
        c.name: c.full_graph.num_nodes * c.full_graph.num_features + c.full_graph.num_edges
        for c in clients
    }
    home, load = {}, [(0, 0, k) for k in range(groups)]  # work, clients, group
    for name in sorted(
        work, key=lambda name: -work[name]
    ):  # the heaviest first, each to where there is least to do so far
        done, held, k = min(load)
        home[name], load[k] = k, (done + work[name], held + 1, k)
    return [[c for c in clients if home[c.name] == k] for k in range(groups)]


def distinct(messages: Mapping[str, Message]) -> list[Content]:
    """The different messages among {client: message}, and whose each is: what all get is there once."""
    found: dict[Any, Content] = {}
    for client, message in messages.items():
        flat = flatten(message)
        found.setdefault(tuple((name, id(tensor)) for name, tensor in flat.items()), (flat, []))[
            1
        ].append(client)
    return list(found.values())


# ---- a worker's side ----
def obey(
    engine: loop.Engine, order: str, phase: str, messages: dict[str, Message], pack: Callable[[list[Content]], T]
) -> tuple[T, Failures]:  # fmt: skip
    """Has a worker's own engine do what was ordered (call, snapshot, restore, models, artifacts or peak).

    Gives the clients' messages as `pack` makes them travel, and how clients have failed; all of them, if it was not the fault of one.
    """
    try:
        given = _done(engine, order, phase, messages)
        packed = pack(
            distinct(
                {
                    client: message
                    for client, message in given.items()
                    if not isinstance(message, Absent)
                }
            )
        )
    except Exception as error:  # noqa: BLE001  (it is raised where the order came from)
        return pack([]), dict.fromkeys(messages, describe(error))
    return packed, {
        client: describe(absent.error)
        for client, absent in given.items()
        if isinstance(absent, Absent) and absent.error
    }


def _done(
    engine: loop.Engine, order: str, phase: str, messages: dict[str, Message]
) -> Mapping[str, Message | Absent]:
    if order == "call":
        return engine.call(phase, messages)
    if order == "restore":
        engine.restore({client: isolate(saved) for client, saved in messages.items()})
        return {}
    if order == "peak":
        return {next(iter(engine.clients)): {"mb": torch.tensor(engine.peak_mb())}}
    return {"snapshot": engine.snapshot, "models": engine.models, "artifacts": engine.artifacts}[
        order
    ]()


def describe(error: Exception) -> Failure:
    """An exception as texts, to be raised again elsewhere by `revive`."""
    cls, told = type(error), "".join(traceback.format_exception(error))
    return {
        "class": f"{cls.__module__}.{cls.__qualname__}",
        "name": cls.__qualname__,
        "text": str(error),
        "traceback": told,
    }


# ---- the other side ----
def revive(failure: Failure, worker: int) -> Exception:
    """What a worker's exception becomes here: the same if it is one of fedloom's, else a WorkerError; its traceback comes along."""
    known = {f"{cls.__module__}.{cls.__qualname__}": cls for cls in _with_descendants(FedloomError)}
    if failure["class"] in known:
        error: Exception = known[failure["class"]](failure["text"])
    else:
        error = WorkerError(
            f"worker {worker}: {failure['class'].removeprefix('builtins.')}: {failure['text']}"
        )
    error.add_note(f"in worker {worker}:\n{failure['traceback']}")
    return error


def _with_descendants(cls: type[FedloomError]) -> Iterator[type[FedloomError]]:
    yield cls
    for child in cls.__subclasses__():
        yield from _with_descendants(child)


class WorkerEngine(ABC):
    """An engine whose clients live in workers, each of which runs the loop over its share of them for the whole run.

    method, clients, policy: as in every engine. workers: how many there should be, at most one per client; 0 = as many as there are cores
    for. A worker has as many threads as this process has when the engine is made.

    A worker has one order at a time. If it does not answer while an exchange is open, its clients are late; what it answers in the end is
    thrown away, and only then it gets the next order. Until then its clients are absent, and nobody waits for them, unless there is no
    quorum without them. If a worker dies, its clients are absent for good.
    """

    tolerates_failures: ClassVar[bool] = True
    supports_deadline: ClassVar[bool] = True
    round: int = 0

    def __init__(
        self,
        method: Method,
        clients: Iterable[Client],
        policy: FaultPolicy = FaultPolicy(),
        workers: int = 0,
    ):
        clients = list(clients)
        self.policy = policy
        self.number = 0  # of the exchange under way, or of the last one
        self.at: dict[
            int, tuple[int, str]
        ] = {}  # what a worker is at: the number of an exchange, and what was asked
        self.lost: dict[int, str] = {}  # how a worker that is gone has ended
        self.threads = torch.get_num_threads()
        groups = deal(clients, min(workers or max(1, self.cores() // self.threads), len(clients)))
        self.names = [client.name for client in clients]
        self.home = {client.name: k for k, group in enumerate(groups) for client in group}
        self.open = True
        try:
            self.start(method, groups)
        except BaseException:
            self.close()
            raise

    # ---- what differs between such engines ----
    @abstractmethod
    def cores(self) -> int:
        """How many cores there are for workers."""

    @abstractmethod
    def start(self, method: Method, groups: list[list[Client]]) -> None:
        """Starts a worker for each group."""

    @abstractmethod
    def share_out(self, contents: list[Content]) -> dict[int, Any]:
        """Takes messages, gives {worker: what to `send` it}, for the workers of those who get something."""

    @abstractmethod
    def send(self, worker: int, order: str, phase: str, share: Any) -> None:
        """Orders a worker to `obey`. WorkerError if it is gone."""

    @abstractmethod
    def ready(self, workers: list[int], seconds: float | None) -> list[int]:
        """Waits, no longer than so many seconds, until some of these workers have answered or are gone; gives which."""

    @abstractmethod
    def receive(self, worker: int) -> tuple[dict[str, Message], Failures]:
        """What a worker that is ready has answered. WorkerError if it is gone."""

    @abstractmethod
    def stop(self) -> None:
        """Ends the workers, whatever they are at."""

    # ---- what every engine has ----
    def call(self, phase: str, messages: dict[str, Message]) -> Mapping[str, Message | Absent]:
        """Takes a phase's name and a message per client, gives each client's reply.

        Who fails, is late, or was in a worker that is gone, is absent; if everybody has to answer, errors are raised instead.
        """
        given = self._order("call", phase, messages)
        for absent in given.values():
            if (
                isinstance(absent, Absent)
                and absent.error is not None
                and not self.policy.tolerates_absence
            ):
                raise absent.error
        return given

    def snapshot(self) -> Message:
        """Everything of the clients that a later round depends on, as tensors; nothing of those whose worker is gone or busy."""
        return self._tell("snapshot")

    def restore(self, saved: dict[str, Any]) -> None:
        """Puts the clients back to a snapshot; they must have been set up before, and who is not in it stays so."""
        self._tell("restore", saved)

    def models(self) -> dict[str, Message]:
        """The weights of each client's model; none once the engine is closed, be it by an interrupt or because a worker was lost."""
        return self._tell("models") if self.open else {}

    def artifacts(self) -> dict[str, Message]:
        """What each client has to show of itself; nothing once the engine is closed."""
        return self._tell("artifacts") if self.open else {}

    def details(self) -> Details:
        """For a run's summary: the number of workers, and of each one's clients."""
        held = list(self.home.values())
        return {
            "workers": max(held) + 1,
            "clients_per_worker": [held.count(k) for k in range(max(held) + 1)],
        }

    def peak_mb(self) -> float:
        """The most memory that this process and each worker have held, added up; pages that they share count for each."""
        workers = self._tell("peak") if self.open else {}
        return peak_memory() / 2**20 + sum(float(told["mb"]) for told in workers.values())

    def finish(self) -> None:  # noqa: B027  (nothing follows from it here)
        """Told that the run is completed: nothing follows from that here."""

    def close(self) -> None:
        """Ends the workers; nothing of them is left behind."""
        if self.open:
            self.open = False
            self.stop()

    def _tell(self, order: str, messages: dict[str, Message] | None = None) -> dict[str, Message]:
        """What comes of an order to all workers, or to those of `messages`; errors are raised, whatever the quorum."""
        given = self._order(
            order, "", {name: {} for name in self.names} if messages is None else messages
        )
        for absent in given.values():
            if isinstance(absent, Absent) and absent.error is not None:
                raise absent.error
        return {name: message for name, message in given.items() if not isinstance(message, Absent)}

    def _order(
        self, order: str, phase: str, messages: dict[str, Message]
    ) -> dict[str, Message | Absent]:
        if not self.open:
            raise WorkerError("the engine is closed")
        contents = distinct(messages)
        try:
            given = self._exchange(order, phase, contents, len(messages))
        except (
            BaseException
        ):  # an interrupt, a lost worker: who has answered what is anybody's guess from here on
            self.close()
            raise
        return {name: given[name] for name in messages if name in given}

    def _exchange(
        self, order: str, phase: str, contents: list[Content], asked: int
    ) -> dict[str, Message | Absent]:
        self.number += 1
        shares = self.share_out(contents)
        given: dict[str, Message | Absent] = {}
        answered: set[int] = set()
        begun, reached = monotonic(), None  # reached: when there was a quorum
        while due := [k for k in shares if k not in answered and k not in self.lost]:
            for k in [k for k in due if k not in self.at]:
                with self._losing(k):
                    self.send(k, order, phase, shares[k])
                    self.at[k] = (self.number, repr(phase) if phase else order)
            if reached is None and sum(
                not isinstance(g, Absent) for g in given.values()
            ) >= self.policy.enough(asked):
                reached = monotonic()
            waiting = [k for k in due if k in self.at]
            if reached is not None and not any(self.at[k][0] == self.number for k in waiting):
                break  # who is at something else is not waited for
            closes = self.policy.closes_at(begun, reached)
            heard = (
                self.ready(waiting, None if closes is None else max(0.0, closes - monotonic()))
                if waiting
                else []
            )
            if waiting and not heard:
                break
            for k in heard:
                number, _ = self.at.pop(k)
                with self._losing(k):
                    answers, failures = self.receive(k)
                    if number == self.number:  # else it comes late, and counts for nothing
                        answered.add(k)
                        given |= answers | {
                            c: Absent(f"{f['name']}: {f['text']}", revive(f, k))
                            for c, f in failures.items()
                        }
        late = self._late(begun, reached)
        for k in shares.keys() - answered:
            number, what = self.at.get(k, (0, ""))
            cause = self.lost.get(k) or (
                late if number == self.number else f"still busy with {what}"
            )
            given |= {
                c: Absent(cause) for _, clients in contents for c in clients if self.home[c] == k
            }
        return given

    def _late(self, begun: float, reached: float | None) -> str:
        if self.policy.deadline and monotonic() >= begun + self.policy.deadline:
            return f"late: no answer within {self.policy.deadline:g} s"
        return f"late: no answer within {self.policy.grace:g} s after a quorum"

    @contextmanager
    def _losing(self, worker: int) -> Iterator[None]:
        """Inside, it may turn out that a worker is gone; if everybody has to answer, that is raised."""
        try:
            yield
        except WorkerError as error:
            if not self.policy.tolerates_absence:
                held = ", ".join(c for c in self.names if self.home[c] == worker)
                raise WorkerError(f"{error}; it had clients {held}") from error.__cause__
            self.lost[worker] = str(error)
