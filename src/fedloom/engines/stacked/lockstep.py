"""Lockstep: several clients run their own code, and equal operations are run once for all of them.

A phase is written for one client. `run_lockstep` runs it for many, each in its own greenlet. A
client pauses when it calls an operation (`fedloom.nn.operations`) that has a batched form: a
forward pass, a loss, an optimiser step. When all clients have paused, calls that fit together run
as one batch, the others run one by one, and every client resumes with its result.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from greenlet import getcurrent, greenlet

from fedloom.engines.stacked.group import Group
from fedloom.nn.operations import Operation, set_scheduler

T = TypeVar("T")


class Context(NamedTuple):
    """What a batched operation knows about its clients."""

    group: Group
    others_running: bool  # whether clients outside this batch will call further operations


class Batched(ABC):
    """How an operation runs for several clients at once."""

    waits: bool = False  # run it only when no client waits for any other operation

    @abstractmethod
    def key(self, *args: Any) -> Hashable:
        """Calls with equal keys can run as one batch. None: this call runs alone."""

    @abstractmethod
    def batch(self, calls: Sequence[tuple[Any, ...]], context: Context) -> Sequence[Any]:
        """Runs the calls of several clients, in client order. Returns one result per call."""

    def single(
        self, operation: Operation[Any, Any], args: tuple[Any, ...], context: Context
    ) -> Any:
        """Runs the call of one client. By default this is the operation itself."""
        return operation.function(*args)


class _Call(NamedTuple):
    operation: Operation[Any, Any]
    batched: Batched
    args: tuple[Any, ...]
    key: Hashable
    grad_enabled: bool


class _Ended(NamedTuple):
    result: Any
    error: BaseException | None


class _Abandoned(BaseException):
    """Raised in paused clients when another client has failed."""


class _Thread(threading.local):
    """State of one thread: greenlets cannot leave their thread."""

    def __init__(self) -> None:
        # Idle workers. The first switch to a greenlet costs as much as twenty later ones.
        self.idle: list[greenlet] = []


_thread = _Thread()


def _work() -> None:
    """A worker: runs one client's task after another and reports to the hub of each."""
    hub, task = getcurrent().parent.switch()
    while True:
        try:
            ended = _Ended(task(), None)
        except BaseException as error:  # noqa: BLE001  (the hub raises it again)
            ended = _Ended(None, error)
        del task
        hub, task = hub.switch(ended)


def _workers(count: int) -> list[greenlet]:
    idle = _thread.idle
    while len(idle) < count:
        idle.append(greenlet(_work))
        idle[-1].switch()
    taken = idle[-count:]
    del idle[-count:]
    return taken


class _Hub:
    """Runs the tasks of one group and schedules their operations."""

    def __init__(self, tasks: Sequence[Callable[[], Any]], group: Group):
        self.own, self.group = getcurrent(), group
        self.workers = _workers(len(tasks))
        self.tasks = tasks
        self.results: list[Any] = [None] * len(tasks)
        self.paused: dict[int, _Call] = {}

    def schedule(self, operation: Operation[Any, Any], *args: Any) -> Any:
        """Called in a client: pauses it until the hub has run the operation."""
        batched = self.group.batched.get(operation)
        if batched is None:
            return operation.function(*args)
        call = _Call(operation, batched, args, batched.key(*args), torch.is_grad_enabled())
        result, error = self.own.switch(call)
        if error is not None:
            raise error
        return result

    def run(self) -> list[Any]:
        """Runs all tasks to the end. Returns their results."""
        grad_enabled = torch.is_grad_enabled()
        try:
            for k, task in enumerate(self.tasks):
                self._resume(k, grad_enabled, self.own, task)
            while self.paused:
                ready = [k for k, call in self.paused.items() if not call.batched.waits]
                outcomes = self._run_calls(
                    {k: self.paused[k] for k in sorted(ready or self.paused)}
                )
                for k in outcomes:
                    call = self.paused.pop(k)
                    self._resume(k, call.grad_enabled, *outcomes[k])
        except BaseException:
            for k in list(self.paused):
                call = self.paused.pop(k)
                self._resume(k, call.grad_enabled, None, _Abandoned(), abandoned=True)
            raise
        finally:
            torch.set_grad_enabled(grad_enabled)
            _thread.idle.extend(w for k, w in enumerate(self.workers) if k not in self.paused)
        return self.results

    def _resume(self, k: int, grad_enabled: bool, *sent: Any, abandoned: bool = False) -> None:
        torch.set_grad_enabled(grad_enabled)  # it belongs to the thread, not to the greenlet
        before = set_scheduler(self.schedule)
        try:
            back = self.workers[k].switch(*sent)
        finally:
            set_scheduler(before)
        if isinstance(back, _Call):
            self.paused[k] = back
        elif back.error is not None and not abandoned:
            raise back.error
        else:
            self.results[k] = back.result

    def _run_calls(self, calls: dict[int, _Call]) -> dict[int, tuple[Any, Exception | None]]:
        batches: dict[Hashable, list[int]] = {}
        for k, call in calls.items():
            key = (call.operation, call.grad_enabled, call.key) if call.key is not None else k
            batches.setdefault(key, []).append(k)
        outcomes: dict[int, tuple[Any, Exception | None]] = {}
        for members in batches.values():
            call = calls[members[0]]
            torch.set_grad_enabled(call.grad_enabled)
            context = Context(self.group, len(members) < len(self.paused))
            if len(members) > 1:
                self.group.calls["batched"] += len(members)
                results = call.batched.batch([calls[k].args for k in members], context)
                for k, result in zip(members, results, strict=True):
                    outcomes[k] = (result, None)
            else:
                self.group.calls["single"] += 1
                try:
                    result = call.batched.single(call.operation, call.args, context)
                    outcomes[members[0]] = result, None
                except Exception as error:  # noqa: BLE001  (raised again in the client)
                    outcomes[members[0]] = None, error
        return {k: outcomes[k] for k in calls}


def run_lockstep(tasks: Sequence[Callable[[], T]], group: Group) -> list[T]:
    """Runs independent tasks in lockstep. Returns their results.

    If one task fails, the others stop where they are and its error is raised.
    """
    return _Hub(tasks, group).run()
