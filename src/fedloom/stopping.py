"""Ctrl-C and SIGTERM. The first lets a run put its folder in order; the second ends the process at once, whatever it is doing."""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def in_order() -> Iterator[None]:
    """Inside, in the main thread, Ctrl-C raises KeyboardInterrupt and SIGTERM SystemExit(143); after that, the next one kills.

    What whoever started this process has it ignore (`nohup`, a shell's background jobs) stays ignored.
    """
    before = {number: signal.getsignal(number) for number in SIGNALS if signal.getsignal(number) not in (signal.SIG_IGN, None)}
    for number in before:
        _arm(number)
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is _first:  # else a signal came, and the next one is to kill, also on the way out
                signal.signal(number, handler)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Holds signals back that would raise an exception inside, and raises it at the end. A second one does not wait."""
    main = threading.current_thread() is threading.main_thread()  # others are never disturbed
    before = {number: handler for number in SIGNALS if callable(handler := signal.getsignal(number))} if main else {}
    came: list[int] = []

    def hold(number: int, frame: object) -> None:
        came.append(number)
        if len(came) > 1:
            before[signal.Signals(number)](number, None)

    for number in before:
        signal.signal(number, hold)
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is _first:
                _arm(number)
            else:
                signal.signal(number, handler)
        if len(came) == 1:
            before[signal.Signals(came[0])](came[0], None)


def _arm(number: signal.Signals) -> None:
    """Has a signal call `_first`, and has the system forget that when the signal comes.

    Python calls its handlers between two of its own instructions. In a long call into C that is too late for a second signal.
    """
    signal.signal(number, _first)
    libc = ctypes.CDLL(None)
    if hasattr(libc, "sysv_signal"):  # glibc's; elsewhere only `_first` does it
        libc.signal.restype = ctypes.c_void_p
        handler = libc.signal(ctypes.c_int(number), ctypes.c_void_p(None))  # Python's own, which notes that the signal came
        libc.sysv_signal(ctypes.c_int(number), ctypes.c_void_p(handler))


def _first(number: int, frame: object) -> None:
    for each in SIGNALS:
        if signal.getsignal(each) is _first:
            signal.signal(each, signal.SIG_DFL)
    if number == signal.SIGTERM:
        raise SystemExit(128 + number)
    raise KeyboardInterrupt
