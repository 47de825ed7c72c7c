"""Checkpoints: what the next round depends on, in a file that tells whether it is whole. The latest is kept, and the one before it.

A checkpoint is a safetensors file. Its header holds the SHA-256 of the whole file, taken while zeros stood in that place.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load, save

from fedloom._system import write_atomic
from fedloom.core.message import Message, flatten, unflatten
from fedloom.errors import DataError

FORMAT = "fedloom-checkpoint/2"  # the first one had neither a format nor a SHA-256
LATEST, PREVIOUS = "checkpoint.safetensors", "checkpoint.previous.safetensors"
_BLANK = "0" * 64


class Checkpoint(NamedTuple):
    """about: whatever JSON can say. state: nested tensors, of the server and of the clients."""

    about: dict[str, Any]
    state: Message


class DamagedCheckpointWarning(UserWarning):
    """The latest checkpoint cannot be used, the one before it is."""


def write(folder: Path, checkpoint: Checkpoint) -> None:
    """Makes it the folder's latest checkpoint, and the latest the previous one; at any instant one of them is there, whole."""
    write_atomic(folder / LATEST, encode(checkpoint), keep=folder / PREVIOUS)


def read(folder: Path) -> Checkpoint | None:
    """A folder's latest checkpoint that is whole, with a warning if it had to be the previous one; None if there never was any.

    DataError if there are some and none is whole.
    """
    damaged: list[str] = []
    for name in (LATEST, PREVIOUS):
        try:
            found = decode((folder / name).read_bytes())
        except FileNotFoundError:
            continue  # none yet; or the process died after the latest became the previous one
        except (DataError, OSError) as error:
            damaged.append(f"{name} in {str(folder)!r} {error}")
            continue
        if damaged:
            warnings.warn(
                f"resume: {damaged[0]}; going on from {name}",
                DamagedCheckpointWarning,
                stacklevel=2,
            )
        return found
    if damaged:
        raise DataError(
            f"resume: {'; '.join(damaged)}. Without checkpoints the run begins again: remove them"
        )
    return None


def encode(checkpoint: Checkpoint) -> bytes:
    """A checkpoint as the content of a file."""
    metadata = {"format": FORMAT, "about": json.dumps(checkpoint.about), "sha256": _BLANK}
    content = save(flatten(checkpoint.state), metadata)
    return content.replace(_seal(_BLANK), _seal(hashlib.sha256(content).hexdigest()), 1)


def decode(content: bytes) -> Checkpoint:
    """The inverse of `encode`; DataError if a single bit is not as it was, or the format is another."""
    try:
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        said = header["__metadata__"]
        if said.get("format") != FORMAT:
            raise DataError(
                f"has format {said.get('format', 'fedloom-checkpoint/1')!r}, this fedloom reads {FORMAT!r}"
            )
        if (
            hashlib.sha256(content.replace(_seal(said["sha256"]), _seal(_BLANK), 1)).hexdigest()
            != said["sha256"]
        ):
            raise DataError("is damaged (its SHA-256 is another)")
        return Checkpoint(json.loads(said["about"]), unflatten(load(content)))
    except DataError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, SafetensorError) as error:
        raise DataError(f"is damaged ({type(error).__name__}: {error})") from error


def _seal(digest: str) -> bytes:
    """How the header says it. Inside of a text its quotes would be escaped, so this is the only place."""
    return f'"sha256":"{digest}"'.encode()
