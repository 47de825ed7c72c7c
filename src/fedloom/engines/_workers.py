"""Base of the engines that distribute the clients over workers.

It decides which worker has which clients, runs a worker's commands, joins the workers' replies, and
returns their errors.
"""

from __future__ import annotations

import json
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from fedloom._system import peak_memory
from fedloom.core.absence import FaultPolicy
from fedloom.core.client import Client
from fedloom.core.message import Absent, Batch, Message, flatten, isolate, joined_batches, unflatten
from fedloom.core.method import Method
from fedloom.core.waist import not_known
from fedloom.engines import loop
from fedloom.engines.base import Details, Engine, EngineFactory, LongestReply
from fedloom.errors import FedloomError

Failure = Mapping[str, str]  # an exception as texts: "class", "name", "text" and "traceback"
Failures = dict[str, Failure]  # by client
T = TypeVar("T")
Share = TypeVar("Share")  # the form in which messages travel to one worker


class WorkerError(RuntimeError):
    """A worker died, or raised an error that is not one of fedloom's."""


class Content(NamedTuple):
    """A message that travels, with all the clients that have it; or one message of each of them.

    Attributes:
        tensors: The message, flat.
        clients: The clients.
        stacked: Whether each client has its own message: row k of every tensor is client k's.
    """

    tensors: dict[str, Tensor]
    clients: Sequence[str]
    stacked: bool = False


# ---- distribution ----
def partition(clients: Sequence[Client], groups: int) -> list[list[Client]]:
    """Divides clients into groups of about equal work.

    Clients keep their order within a group. No group is empty if there are enough clients.
    """
    work = {
        c.name: c.full_graph.num_nodes * c.full_graph.num_features + c.full_graph.num_edges
        for c in clients
    }
    home, load = {}, [(0, 0, k) for k in range(groups)]  # work, clients, group
    # The heaviest client comes first, and each goes to the group with the least work so far.
    for name in sorted(work, key=lambda name: -work[name]):
        done, held, k = min(load)
        home[name], load[k] = k, (done + work[name], held + 1, k)
    return [[c for c in clients if home[c.name] == k] for k in range(groups)]


# ---- what travels ----
def contents_of(messages: Mapping[str, Message]) -> list[Content]:
    """Returns {client: message} in the form in which it travels.

    A message that several clients have is there once. A batch stays one tensor for each name.
    """
    if isinstance(messages, Batch):
        dense = {name: messages.dense(name) for name in messages.stacks}
        return [Content(dense, messages.clients, stacked=True)]
    receivers: dict[int, list[str]] = {}
    for client, message in messages.items():
        receivers.setdefault(id(message), []).append(client)
    found: dict[tuple[tuple[str, int], ...], tuple[dict[str, Tensor], list[str]]] = {}
    for clients in receivers.values():
        flat = flatten(messages[clients[0]])
        key = tuple((name, id(tensor)) for name, tensor in flat.items())
        found.setdefault(key, (flat, []))[1].extend(clients)
    return [Content(flat, clients) for flat, clients in found.values()]


def messages_of(contents: Sequence[Content]) -> Mapping[str, Message]:
    """The inverse of `contents_of`, without copying. A stacked content alone is a batch."""
    parts = [
        Batch(clients, tensors) if stacked else dict.fromkeys(clients, unflatten(tensors))
        for tensors, clients, stacked in contents
    ]
    if len(parts) == 1:
        return parts[0]
    return {client: message for part in parts for client, message in part.items()}


# ---- in a worker ----
def execute(
    engine: Engine,
    command: str,
    phase: str,
    messages: Mapping[str, Message],
    pack: Callable[[list[Content]], T],
) -> tuple[T, Failures]:
    """Runs a command in a worker.

    Args:
        engine: The worker's own engine.
        command: "call", "snapshot", "restore", "keep", "models", "artifacts", "details" or "peak".
        phase: The phase of a call; the stage of "keep" and "models".
        messages: The messages to the worker's clients.
        pack: Converts the replies to the form in which they travel.

    Returns the packed replies and the clients' failures. If the failure is not that of one client,
    all clients have it.
    """
    try:
        given = _result(engine, command, phase, messages)
        replies, absent = _parted(given)
        packed = pack(contents_of(replies))
    except Exception as error:  # noqa: BLE001  (the engine raises it again)
        return pack([]), dict.fromkeys(messages, describe(error))
    return packed, {c: describe(why.error) for c, why in absent.items() if why.error}


def _parted(
    given: Mapping[str, Message | Absent],
) -> tuple[Mapping[str, Message], dict[str, Absent]]:
    """Returns the replies, and the absences."""
    if isinstance(given, Batch):
        return given, {}
    absent = {c: reply for c, reply in given.items() if isinstance(reply, Absent)}
    return {c: r for c, r in given.items() if not isinstance(r, Absent)}, absent


def _result(
    engine: Engine, command: str, phase: str, messages: Mapping[str, Message]
) -> Mapping[str, Message | Absent]:
    if command == "call":
        return engine.call(phase, dict(messages))
    if command == "restore":
        engine.restore({client: isolate(saved) for client, saved in messages.items()})
        return {}
    if command == "peak":
        return {next(iter(messages)): {"mb": torch.tensor(engine.peak_mb())}}
    if command == "details":
        text = json.dumps(engine.details()).encode()
        return {next(iter(messages)): {"json": torch.tensor(list(text), dtype=torch.uint8)}}
    shared = next(iter(messages.values()), {}).get("shared")  # the same for all clients
    if command == "keep":
        engine.keep_models(phase, shared)
        return {}
    if command == "models":
        return engine.models(phase or None, None if shared is None else isolate(shared))
    known: dict[str, Callable[[], Mapping[str, Message]]] = {
        "snapshot": engine.snapshot,
        "artifacts": engine.artifacts,
    }
    return known[command]()


def describe(error: Exception) -> Failure:
    """Returns an exception as texts. `restored_error` is the inverse."""
    cls = type(error)
    return {
        "class": f"{cls.__module__}.{cls.__qualname__}",
        "name": cls.__qualname__,
        "text": str(error),
        "traceback": "".join(traceback.format_exception(error)),
    }


# ---- in the engine ----
def restored_error(failure: Failure, worker: int) -> Exception:
    """Returns a worker's exception, with its traceback as a note.

    An error of fedloom keeps its class. Any other becomes a WorkerError.
    """
    known = {f"{cls.__module__}.{cls.__qualname__}": cls for cls in _with_subclasses(FedloomError)}
    if failure["class"] in known:
        error: Exception = known[failure["class"]](failure["text"])
    else:
        kind = failure["class"].removeprefix("builtins.")
        error = WorkerError(f"worker {worker}: {kind}: {failure['text']}")
    error.add_note(f"in worker {worker}:\n{failure['traceback']}")
    return error


def _with_subclasses(cls: type[FedloomError]) -> Iterator[type[FedloomError]]:
    yield cls
    for child in cls.__subclasses__():
        yield from _with_subclasses(child)


class WorkerEngine(ABC, Generic[Share]):
    """An engine whose clients live in workers. A worker runs an engine of its own over its clients.

    A worker runs one command at a time. If it does not answer while an exchange is open, its
    clients are late. Its late answer is discarded, and it gets the next command only after that.
    Until then its clients are absent. The engine waits for them only if there is no quorum without
    them. If a worker dies, its clients are absent for the rest of the run.

    Args:
        method: The method that runs.
        clients: All clients.
        policy: The absences to tolerate.
        workers: The number of workers, at most one per client. 0: as many as the cores allow. A
            worker has as many threads as this process has when the engine is made.
    """

    tolerates_failures: ClassVar[bool] = True
    supports_deadline: ClassVar[bool] = True
    inside: ClassVar[EngineFactory] = loop.Engine  # what runs in a worker
    round: int = 0
    longest_reply: LongestReply = staticmethod(not_known)

    def __init__(
        self,
        method: Method,
        clients: Iterable[Client],
        policy: FaultPolicy = FaultPolicy(),
        workers: int = 0,
    ):
        clients = list(clients)
        self.policy = policy
        self.number = 0  # of the current exchange
        self.busy: dict[int, tuple[int, str]] = {}  # worker: its exchange, and what was asked
        self.lost: dict[int, str] = {}  # worker: how it ended
        self.threads = torch.get_num_threads()
        wanted = workers or max(1, self.cores() // self.threads)
        groups = partition(clients, min(wanted, len(clients)))
        self.names = [client.name for client in clients]
        self.held = [[client.name for client in group] for group in groups]  # by worker
        self.home = {client: k for k, held in enumerate(self.held) for client in held}
        self.open = True
        try:
            self.start(method, groups)
        except BaseException:
            self.close()
            raise

    # ---- the differences between such engines ----
    @abstractmethod
    def cores(self) -> int:
        """Returns the number of cores for workers."""

    @abstractmethod
    def start(self, method: Method, groups: list[list[Client]]) -> None:
        """Starts a worker for each group."""

    @abstractmethod
    def shares(self, contents: list[Content]) -> dict[int, Share]:
        """Prepares messages. Returns {worker: what to `send`} for the workers that get any."""

    @abstractmethod
    def send(self, worker: int, command: str, phase: str, share: Share) -> None:
        """Sends a command for `execute`. Raises a WorkerError if the worker is gone."""

    @abstractmethod
    def ready(self, workers: list[int], seconds: float | None) -> list[int]:
        """Waits until some of the workers have answered or are gone. Returns those.

        seconds: the longest time to wait. None: no limit.
        """

    @abstractmethod
    def receive(self, worker: int) -> tuple[Mapping[str, Message], Failures]:
        """Returns the answer of a worker that is ready. Raises a WorkerError if it is gone.

        A batch need not be a copy: it is read before the worker gets its next command.
        """

    @abstractmethod
    def stop(self) -> None:
        """Ends the workers at once."""

    # ---- what every engine has ----
    def call(self, phase: str, messages: dict[str, Message]) -> Mapping[str, Message | Absent]:
        """Runs a phase at each client in `messages`. Returns each one's reply, or its absence.

        A client is absent if it fails, is late, or its worker is gone. If every client must answer,
        errors are raised instead.
        """
        given = self._command("call", phase, messages)
        if not self.policy.tolerates_absence:
            _raise_first(given)
        return given

    def snapshot(self) -> Message:
        """Returns the clients' snapshots, without those whose worker is gone or busy."""
        return self._command_all("snapshot")

    def restore(self, saved: Message) -> None:
        """Restores the clients that are in the snapshot. They must have been set up before."""
        self._command_all("restore", saved)

    def keep_models(self, stage: str, shared: Message | None) -> None:
        """Makes the clients keep what they predict with, but not those whose worker is busy."""
        self._command_all("keep", self._to_all(shared), stage)

    def models(self, stage: str | None = None, shared: Message | None = None) -> dict[str, Message]:
        """Returns what each client predicts with; nothing once the engine is closed."""
        return self._command_all("models", self._to_all(shared), stage or "") if self.open else {}

    def _to_all(self, shared: Message | None) -> dict[str, Message]:
        return dict.fromkeys(self.names, {} if shared is None else {"shared": shared})

    def artifacts(self) -> dict[str, Message]:
        """Returns each client's artifacts; nothing once the engine is closed."""
        return self._command_all("artifacts") if self.open else {}

    def details(self) -> Details:
        """Returns the number of workers, and the number of clients of each."""
        return {"workers": len(self.held), "clients_per_worker": [len(held) for held in self.held]}

    def details_inside(self) -> dict[str, Any]:
        """Returns what the engines of the workers say about themselves; nothing once closed.

        Numbers of several workers are added up, and lists are chained.
        """
        said: dict[str, Any] = {}
        for reply in (self._command_all("details") if self.open else {}).values():
            said = added(said, json.loads(bytes(reply["json"].tolist())))
        return said

    def peak_mb(self) -> float:
        """Returns the sum of the peak memory of this process and of each worker.

        Pages that processes share are counted for each of them.
        """
        workers = self._command_all("peak") if self.open else {}
        return peak_memory() / 2**20 + sum(float(reply["mb"]) for reply in workers.values())

    def finish(self, stage: str = "", round: int = 0) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Ends the workers and releases their memory."""
        if self.open:
            self.open = False
            self.stop()

    def _command_all(
        self, command: str, messages: dict[str, Message] | None = None, phase: str = ""
    ) -> dict[str, Message]:
        """Runs a command in all workers, or in those of `messages`. Errors are always raised."""
        sent = self._to_all(None) if messages is None else messages
        given = self._command(command, phase, sent)
        _raise_first(given)
        return {name: reply for name, reply in given.items() if not isinstance(reply, Absent)}

    def _command(
        self, command: str, phase: str, messages: dict[str, Message]
    ) -> Mapping[str, Message | Absent]:
        if not self.open:
            raise WorkerError("the engine is closed")
        contents = contents_of(messages)
        try:
            return self._exchange(command, phase, contents, list(messages))
        except BaseException:  # Ctrl-C or a lost worker: the workers' state is unknown from here on
            self.close()
            raise

    def _exchange(
        self, command: str, phase: str, contents: list[Content], asked: list[str]
    ) -> Mapping[str, Message | Absent]:
        self.number += 1
        shares = self.shares(contents)
        given: dict[str, Message | Absent] = {}
        batches: list[Batch] = []
        answered: set[int] = set()
        begun, reached = monotonic(), None  # reached: when there was a quorum
        while due := [k for k in shares if k not in answered and k not in self.lost]:
            for k in [k for k in due if k not in self.busy]:
                with self._may_lose(k):
                    self.send(k, command, phase, shares[k])
                    self.busy[k] = (self.number, repr(phase) if phase else command)
            replies = sum(map(len, batches))
            replies += sum(not isinstance(reply, Absent) for reply in given.values())
            if reached is None and replies >= self.policy.enough(len(asked)):
                reached = monotonic()
            waiting = [k for k in due if k in self.busy]
            if reached is not None and not any(self.busy[k][0] == self.number for k in waiting):
                break  # the others are busy with an earlier exchange
            closes = self.policy.closes_at(begun, reached)
            seconds = None if closes is None else max(0.0, closes - monotonic())
            heard = self.ready(waiting, seconds) if waiting else []
            if waiting and not heard:
                break
            for k in heard:
                number, _ = self.busy.pop(k)
                with self._may_lose(k):
                    answers, failures = self.receive(k)
                    if number == self.number:  # otherwise the answer is late and is discarded
                        answered.add(k)
                        if isinstance(answers, Batch):
                            batches.append(answers)
                        else:
                            given |= answers
                        for client, failure in failures.items():
                            cause = f"{failure['name']}: {failure['text']}"
                            given[client] = Absent(cause, restored_error(failure, k))
        late = self._late(begun)
        for k in shares.keys() - answered:
            number, what = self.busy.get(k, (0, ""))
            busy = late if number == self.number else f"still busy with {what}"
            cause = self.lost.get(k) or busy
            given |= dict.fromkeys((c for c in asked if self.home[c] == k), Absent(cause))
        if whole := joined_batches(batches, asked):
            return whole
        given |= {client: isolate(batch[client]) for batch in batches for client in batch}
        return {client: given[client] for client in asked if client in given}

    def _late(self, begun: float) -> str:
        if self.policy.deadline and monotonic() >= begun + self.policy.deadline:
            return f"late: no answer within {self.policy.deadline:g} s"
        return f"late: no answer within {self.policy.grace:g} s after a quorum"

    @contextmanager
    def _may_lose(self, worker: int) -> Iterator[None]:
        """Records that a worker is gone. If every client must answer, raises that."""
        try:
            yield
        except WorkerError as error:
            if not self.policy.tolerates_absence:
                held = ", ".join(c for c in self.names if self.home[c] == worker)
                raise WorkerError(f"{error}; it had clients {held}") from error.__cause__
            self.lost[worker] = str(error)


def added(one: Any, other: Any) -> Any:
    """Returns the sum of two numbers, of two lists, or of two dicts by key. Of texts, the first."""
    if not isinstance(one, dict):
        return one if isinstance(one, str) else one + other
    return {
        key: added(one[key], other[key]) if key in one and key in other else {**one, **other}[key]
        for key in {**one, **other}
    }


def _raise_first(given: Mapping[str, Message | Absent]) -> None:
    for reply in () if isinstance(given, Batch) else given.values():
        if isinstance(reply, Absent) and reply.error is not None:
            raise reply.error
