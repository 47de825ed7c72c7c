"""Named places at which a test has the process die as in a power cut: FEDLOOM_CRASH_AT="name", or "name:3" for the third time there."""

import os
import signal
from collections import Counter

from fedloom.errors import unknown

# Files that are put in place at once, and files that grow: what `fedloom.disk` does to each of them, step by step.
_PUT = ("config", "schemas", "checkpoint", "models", "summary")
_GROWING = ("history", "ledger")
POINTS = (
    "nothing-asked", "exchange-unsent", "exchange-answered", "round-unclosed", "round-closed",
    *(f"{file}-{step}" for file in _PUT for step in ("half", "written", "synced", "renamed", "in-place")),
    *(f"{file}-{step}" for file in _GROWING for step in ("half", "written")),
    "checkpoint-between-renames", "history-cut",
)  # fmt: skip
_passed: Counter[str] = Counter()


def point(name: str) -> None:
    """Kills this process if the environment says so; else nothing."""
    wanted = os.environ.get("FEDLOOM_CRASH_AT")
    if wanted is None:
        return
    place, _, time = wanted.partition(":")
    if place not in POINTS:
        raise unknown("place in FEDLOOM_CRASH_AT", place, POINTS)
    _passed[name] += 1
    if name == place and _passed[name] == int(time or 1):
        os.kill(os.getpid(), signal.SIGKILL)
