"""Checkpoints: everything that the next round depends on, in a file that detects damage.

A folder keeps the latest checkpoint and the one before it. A checkpoint is a safetensors file. Its
header holds the SHA-256 of the whole file, computed with zeros in place of the digest.
"""

from __future__ import annotations

import hashlib
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load, save

from fedloom._system import write_atomic
from fedloom.core.message import Message, flatten, unflatten
from fedloom.errors import DataError

FORMAT = "fedloom-checkpoint/2"  # version 1 had neither a format nor a SHA-256
LATEST, PREVIOUS = "checkpoint.safetensors", "checkpoint.previous.safetensors"
_BLANK = "0" * 64
AUTOMATIC = -1  # of run.checkpoint_every
SHARE, SECONDS = 0.02, 10.0  # of automatic checkpoints: the most time, the least distance


class Checkpoint(NamedTuple):
    """The state of a run after a round.

    Attributes:
        about: Values that JSON can represent.
        state: Nested tensors of the server and of the clients.
    """

    about: dict[str, Any]
    state: Message


class Schedule:
    """Says when a run writes a checkpoint.

    An automatic schedule writes one at the end of a round if `SECONDS` have passed since the one
    before, and so much time that writing takes at most `SHARE` of it.

    Args:
        every: Rounds between two checkpoints; 0 = none; `AUTOMATIC`.
        clock: Returns seconds.
    """

    def __init__(self, every: int, clock: Callable[[], float] = time.perf_counter):
        self._every, self._clock = every, clock
        self._since, self._wait = clock(), SECONDS

    def start(self) -> None:
        """The rounds begin."""
        self._since = self._clock()

    def is_due(self, number: int) -> bool:
        """Returns whether a checkpoint is due after the round of that number."""
        if self._every != AUTOMATIC:
            return bool(self._every) and number % self._every == 0
        return self._clock() - self._since >= self._wait

    def written(self, began: float) -> None:
        """A checkpoint has been written. `began`: the clock's time before it."""
        self._since = self._clock()
        self._wait = max(SECONDS, (self._since - began) / SHARE)

    def now(self) -> float:
        """Returns the clock's time."""
        return self._clock()


class DamagedCheckpointWarning(UserWarning):
    """The latest checkpoint is damaged, and the previous one is used."""


def write(folder: Path, checkpoint: Checkpoint) -> None:
    """Writes the folder's latest checkpoint. The latest one so far becomes the previous one.

    At any instant the folder has a complete checkpoint.
    """
    write_atomic(folder / LATEST, encode(checkpoint), keep=folder / PREVIOUS)


def read(folder: Path) -> Checkpoint | None:
    """Returns the folder's latest complete checkpoint; None if there is none.

    Warns if it is the previous one. Raises a DataError if all checkpoints are damaged.
    """
    damaged: list[str] = []
    for name in (LATEST, PREVIOUS):
        try:
            checkpoint = decode((folder / name).read_bytes())
        except FileNotFoundError:
            continue  # none yet, or the process died while it renamed the latest one
        except (DataError, OSError) as error:
            damaged.append(f"{name} in {str(folder)!r} {error}")
            continue
        if damaged:
            warnings.warn(
                f"resume: {damaged[0]}; going on from {name}",
                DamagedCheckpointWarning,
                stacklevel=2,
            )
        return checkpoint
    if damaged:
        raise DataError(
            f"resume: {'; '.join(damaged)}. Remove them to run again from the beginning"
        )
    return None


def remove(folder: Path) -> None:
    """Removes the folder's checkpoints."""
    for name in (LATEST, PREVIOUS):
        (folder / name).unlink(missing_ok=True)


def saved_round(folder: Path) -> int | None:
    """Returns the round of the folder's latest checkpoint; None if there is no whole one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DamagedCheckpointWarning)
        try:
            found = read(folder)
        except DataError:
            return None
    return int(found.about["round"]) if found else None


def encode(checkpoint: Checkpoint) -> bytes:
    """Returns a checkpoint as the content of a file."""
    metadata = {"format": FORMAT, "about": json.dumps(checkpoint.about), "sha256": _BLANK}
    content = save(flatten(checkpoint.state), metadata)
    return content.replace(_seal(_BLANK), _seal(hashlib.sha256(content).hexdigest()), 1)


def decode(content: bytes) -> Checkpoint:
    """Reads the content of a file. The inverse of `encode`.

    Raises a DataError if a single bit has changed, or if the format is another.
    """
    try:
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        metadata = header["__metadata__"]
        if metadata.get("format") != FORMAT:
            found = metadata.get("format", "fedloom-checkpoint/1")
            raise DataError(f"has format {found!r}, this fedloom reads {FORMAT!r}")
        digest = metadata["sha256"]
        blank = content.replace(_seal(digest), _seal(_BLANK), 1)
        if hashlib.sha256(blank).hexdigest() != digest:
            raise DataError("is damaged (its SHA-256 is another)")
        return Checkpoint(json.loads(metadata["about"]), unflatten(load(content)))
    except DataError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, SafetensorError) as error:
        raise DataError(f"is damaged ({type(error).__name__}: {error})") from error


def _seal(digest: str) -> bytes:
    """Returns the header's entry of the digest.

    Inside of a text its quotes would be escaped, so it occurs once.
    """
    return f'"sha256":"{digest}"'.encode()
