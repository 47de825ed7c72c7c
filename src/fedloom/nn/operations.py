"""Operations: functions that an engine may run for several clients at once.

An operation is a plain function of one client's arguments. Without a scheduler, a call runs the
function. An engine can install a scheduler, which then receives the calls of the clients that it
runs. The stacked engine batches them (`fedloom.engines.stacked`). This module does not know how.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
Scheduler = Callable[..., object]  # (operation, *arguments) -> the operation's result


class _Thread(threading.local):
    scheduler: Scheduler | None = None


_thread = _Thread()


class Operation(Generic[P, R]):
    """A function whose calls an engine may intercept; see `operation`."""

    def __init__(self, function: Callable[P, R]):
        self.function = function
        functools.update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs the function, or passes the call to the scheduler of this thread."""
        scheduler = _thread.scheduler
        if scheduler is None:
            return self.function(*args, **kwargs)
        return scheduler(self, *args, **kwargs)  # type: ignore[return-value]


def operation(function: Callable[P, R]) -> Operation[P, R]:
    """Marks a function as an operation. It takes positional arguments only."""
    return Operation(function)


def set_scheduler(scheduler: Scheduler | None) -> Scheduler | None:
    """Installs a scheduler for this thread. Returns the previous one, so that it can be restored.

    scheduler: receives all further operations of this thread. None: operations run directly.
    """
    before, _thread.scheduler = _thread.scheduler, scheduler
    return before
