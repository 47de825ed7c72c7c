"""What engines have in common that deal the clients to workers: who goes where, what a worker does, and how its errors come back."""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedloom.allocator import peak
from fedloom.engines import loop
from fedloom.errors import FedloomError
from fedloom.message import Message, flatten, isolate
from fedloom.method import Method
from fedloom.party import Client

Content = tuple[dict[str, Tensor], list[str]]  # a message, flat, and whose it is
Failure = Mapping[str, str]  # an exception in words: its class, its text, its traceback
Outcome = tuple[int, dict[str, Message], Failure | None]  # a worker's number, and what it answered or how it failed


class WorkerError(RuntimeError):
    """A worker died, or failed by no fault of the input."""


# ---- who goes where ----
def deal(clients: Sequence[Client], groups: int) -> list[list[Client]]:
    """Takes clients and a number of groups, gives the groups: about equal work in each, nobody out of order, none empty."""
    work = {c.name: c.full_graph.num_nodes * c.full_graph.num_features + c.full_graph.num_edges for c in clients}
    home, load = {}, [(0, 0, k) for k in range(groups)]  # work, clients, group
    for name in sorted(work, key=lambda name: -work[name]):  # the heaviest first, each to where there is least to do so far
        done, held, k = min(load)
        home[name], load[k] = k, (done + work[name], held + 1, k)
    return [[c for c in clients if home[c.name] == k] for k in range(groups)]


def distinct(messages: Mapping[str, Message]) -> list[Content]:
    """The different messages among {client: message}, and whose each is: what all get is there once."""
    found: dict[Any, Content] = {}
    for client, message in messages.items():
        flat = flatten(message)
        found.setdefault(tuple((name, id(tensor)) for name, tensor in flat.items()), (flat, []))[1].append(client)
    return list(found.values())


# ---- a worker's side ----
def obey(engine: loop.Engine, order: str, phase: str, messages: dict[str, Message]) -> dict[str, Message]:
    """Has a worker's own engine do what was ordered (call, snapshot, restore, models or peak), gives a message per client."""
    if order == "call":
        return engine.call(phase, messages)
    if order == "restore":
        engine.restore({client: isolate(saved) for client, saved in messages.items()})
        return {}
    if order == "peak":
        return {next(iter(engine.clients)): {"mb": torch.tensor(engine.peak_mb())}}
    return engine.snapshot() if order == "snapshot" else engine.models()


def describe(error: BaseException) -> Failure:
    """An exception as texts, to be raised again elsewhere by `revive`."""
    cls = type(error)
    return {"class": f"{cls.__module__}.{cls.__qualname__}", "text": str(error), "traceback": "".join(traceback.format_exception(error))}


# ---- the other side ----
def revive(failure: Failure, worker: int) -> Exception:
    """What a worker's exception becomes here: the same if it is one of fedloom's, else a WorkerError; its traceback comes along."""
    known = {f"{cls.__module__}.{cls.__qualname__}": cls for cls in _with_descendants(FedloomError)}
    if failure["class"] in known:
        error: Exception = known[failure["class"]](failure["text"])
    else:
        error = WorkerError(f"worker {worker}: {failure['class'].removeprefix('builtins.')}: {failure['text']}")
    error.add_note(f"in worker {worker}:\n{failure['traceback']}")
    return error


def _with_descendants(cls: type[FedloomError]) -> Iterator[type[FedloomError]]:
    yield cls
    for child in cls.__subclasses__():
        yield from _with_descendants(child)


class Groups(ABC):
    """An engine whose clients live in workers, each of which runs the loop over its share of them for the whole run.

    method, clients: as in every engine. workers: how many there should be, at most one per client; 0 = as many as there are cores for. A
    worker has as many threads as this process has when the engine is made.
    """

    def __init__(self, method: Method, clients: Iterable[Client], workers: int = 0):
        clients = list(clients)
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
    def exchange(self, order: str, phase: str, contents: list[Content]) -> list[Outcome]:
        """Orders the workers of those who get something to `obey`, gives what came of it."""

    @abstractmethod
    def stop(self) -> None:
        """Ends the workers, whatever they are at."""

    # ---- what every engine has ----
    def call(self, phase: str, messages: dict[str, Message]) -> dict[str, Message]:
        """Takes a phase's name and a message per client, gives each client's reply."""
        return self._order("call", phase, messages)

    def snapshot(self) -> Message:
        """Everything of the clients that a later round depends on, as tensors."""
        return self._order("snapshot", "", {name: {} for name in self.names})

    def restore(self, saved: dict[str, Any]) -> None:
        """Puts the clients back to a snapshot; they must have been set up before."""
        self._order("restore", "", {name: saved.get(name, {}) for name in self.names})

    def models(self) -> dict[str, Message]:
        """The weights of each client's model; none once the engine is closed, be it by an interrupt or because a worker was lost."""
        return self._order("models", "", {name: {} for name in self.names}) if self.open else {}

    def about(self) -> dict[str, Any]:
        """For a run's summary: the number of workers, and of each one's clients."""
        held = list(self.home.values())
        return {"workers": max(held) + 1, "clients_per_worker": [held.count(k) for k in range(max(held) + 1)]}

    def peak_mb(self) -> float:
        """The most memory that this process and each worker have held, added up; pages that they share count for each."""
        workers = self._order("peak", "", {name: {} for name in self.names}) if self.open else {}
        return peak() / 2**20 + sum(float(told["mb"]) for told in workers.values())

    def close(self) -> None:
        """Ends the workers; nothing of them is left behind."""
        if self.open:
            self.open = False
            self.stop()

    def _order(self, order: str, phase: str, messages: dict[str, Message]) -> dict[str, Message]:
        if not self.open:
            raise WorkerError("the engine is closed")
        contents = distinct(messages)
        try:
            outcomes = self.exchange(order, phase, contents)
        except BaseException:  # an interrupt, a lost worker: who has answered what is anybody's guess from here on
            self.close()
            raise
        answers: dict[str, Message] = {}
        for worker, answered, failure in outcomes:
            if failure is not None:
                raise revive(failure, worker)
            answers |= answered
        return {name: answers[name] for name in messages if name in answers}
