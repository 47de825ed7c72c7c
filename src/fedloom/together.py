"""Clients in step: each runs its own code, and what they ask for at the same moment is done once for all of them.

A phase is written for one client. `in_step` runs it for many, each in a greenlet of its own that halts where it calls an `Operation` (a
model's forward pass, a loss, an optimiser's step). When all have halted, calls that are alike go to the operation's `together`, others to
its `alone`, and everybody goes on with its result. Authors see none of this; outside `in_step` an operation is its `alone` and no more.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from greenlet import getcurrent, greenlet

T = TypeVar("T")


class Crew:
    """What clients who run in step keep from one time to the next: counts of their calls, and what was made of several of them."""

    LIMIT = 64  # what is made anew at every step must not pile up

    def __init__(self) -> None:
        self.tally: Counter[str] = Counter()  # calls of operations done "together" and "alone"
        self._kept: OrderedDict[Hashable, tuple[Sequence[Any], Any]] = OrderedDict()

    def kept(self, what: str, objects: Sequence[Any], make: Callable[[], T]) -> T:
        """What `make()` gives for these very objects, made once."""
        key = (what, *map(id, objects))
        if key in self._kept:
            self._kept.move_to_end(key)
        else:
            self._kept[key] = (objects, make())  # objects are held, or another could get one's id
            if len(self._kept) > self.LIMIT:
                self._kept.popitem(last=False)
        made: T = self._kept[key][1]
        return made


class _Thread(threading.local):
    """What belongs to one thread: greenlets cannot leave it."""

    def __init__(self) -> None:
        self.hub: _Hub | None = None  # of the client that is running now; None in everything else, the hub's own work too
        self.crew: Crew | None = None  # whose calls are being done
        self.others_go_on = False  # whether a client that is not part of the call being done will ask for more
        self.idle: list[greenlet] = []  # workers without a task: a greenlet's first switch costs as much as twenty later ones


_here = _Thread()


class Operation(ABC):
    """What one client may ask for alone, and many together."""

    waits: bool = False  # done only when nobody asks for anything that does not wait

    @abstractmethod
    def alone(self, *args: Any) -> Any:
        """One client's call."""

    @abstractmethod
    def alike(self, *args: Any) -> Hashable:
        """Calls with the same answer can be done together; None: with no other."""

    @abstractmethod
    def together(self, calls: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
        """Many clients' calls, in client order; gives each one's result. As `alone` for each, but for rounding."""

    def __call__(self, *args: Any) -> Any:
        """Takes what `alone` takes, gives what it gives."""
        hub = _here.hub
        return self.alone(*args) if hub is None else hub.halt(_Call(self, args, self.alike(*args), torch.is_grad_enabled()))


class _Call(NamedTuple):
    operation: Operation
    args: tuple[Any, ...]
    alike: Hashable
    with_gradient: bool


class _Ended(NamedTuple):
    result: Any
    error: BaseException | None


class _Abandoned(BaseException):
    """Raised in clients that are halted when another has failed."""


def _work() -> None:
    """A worker's life: one client's task after another, each handed in with the hub to report to."""
    hub, task = getcurrent().parent.switch()
    while True:
        try:
            ended = _Ended(task(), None)
        except BaseException as error:  # noqa: BLE001  (the hub raises it again)
            ended = _Ended(None, error)
        del task
        hub, task = hub.switch(ended)


def _workers(count: int) -> list[greenlet]:
    idle = _here.idle
    while len(idle) < count:
        idle.append(greenlet(_work))
        idle[-1].switch()
    taken = idle[-count:]
    del idle[-count:]
    return taken


class _Hub:
    def __init__(self, tasks: Sequence[Callable[[], Any]], crew: Crew):
        self.own, self.crew = getcurrent(), crew
        self.workers = _workers(len(tasks))
        self.tasks = tasks
        self.results: list[Any] = [None] * len(tasks)
        self.halted: dict[int, _Call] = {}

    def halt(self, call: _Call) -> Any:
        """In a client: hands the call to the hub, comes back with its result."""
        result, error = self.own.switch(call)
        if error is not None:
            raise error
        return result

    def run(self) -> list[Any]:
        """Each task's result."""
        mode = torch.is_grad_enabled()
        try:
            for k, task in enumerate(self.tasks):
                self._go_on(k, mode, self.own, task)
            while self.halted:
                now = [k for k, call in self.halted.items() if not call.operation.waits] or list(self.halted)
                outcomes = self._do({k: self.halted[k] for k in sorted(now)})
                for k in outcomes:
                    call = self.halted.pop(k)
                    self._go_on(k, call.with_gradient, *outcomes[k])
        except BaseException:
            for k in list(self.halted):
                call = self.halted.pop(k)
                self._go_on(k, call.with_gradient, None, _Abandoned(), abandoned=True)
            raise
        finally:
            torch._C._set_grad_enabled(mode)
            _here.crew, _here.others_go_on = None, False
            _here.idle.extend(worker for k, worker in enumerate(self.workers) if k not in self.halted)
        return self.results

    def _go_on(self, k: int, with_gradient: bool, *handed: Any, abandoned: bool = False) -> None:
        _here.hub = self
        torch._C._set_grad_enabled(with_gradient)  # the thread's, so it is handed to whose turn it is
        try:
            back = self.workers[k].switch(*handed)
        finally:
            _here.hub = None
        if isinstance(back, _Call):
            self.halted[k] = back
        elif back.error is not None and not abandoned:
            raise back.error
        else:
            self.results[k] = back.result

    def _do(self, calls: dict[int, _Call]) -> dict[int, tuple[Any, Exception | None]]:
        groups: dict[Hashable, list[int]] = {}
        for k, call in calls.items():
            key = (call.operation, call.with_gradient, call.alike) if call.alike is not None else k
            groups.setdefault(key, []).append(k)
        outcomes: dict[int, tuple[Any, Exception | None]] = {}
        for members in groups.values():
            call = calls[members[0]]
            torch._C._set_grad_enabled(call.with_gradient)
            _here.crew, _here.others_go_on = self.crew, len(members) < len(self.halted)
            if len(members) > 1:
                self.crew.tally["together"] += len(members)
                results = call.operation.together([calls[k].args for k in members])
                outcomes.update((k, (result, None)) for k, result in zip(members, results, strict=True))
            else:
                self.crew.tally["alone"] += 1
                try:
                    outcomes[members[0]] = call.operation.alone(*call.args), None
                except Exception as error:  # noqa: BLE001  (raised where the client asked for it)
                    outcomes[members[0]] = None, error
        return {k: outcomes[k] for k in calls}


def in_step(tasks: Sequence[Callable[[], Any]], crew: Crew) -> list[Any]:
    """Runs tasks that do not depend on each other, in step; gives each one's result. If one fails, the others end where they are."""
    return _Hub(tasks, crew).run()


def kept(what: str, objects: Sequence[Any], make: Callable[[], T]) -> T:
    """For an operation's `together`: what `make()` gives for these very objects, kept by the crew."""
    assert _here.crew is not None
    return _here.crew.kept(what, objects, make)


def others_go_on() -> bool:
    """For an operation: whether clients that are not part of this call are still at work."""
    return _here.others_go_on
