"""Messages: nested dicts of tensors, the only thing that crosses between parties. Encoding, the strict decoder, schemas.

On the wire a message is one safetensors blob. Nested names are joined with "/" (`model/layers.0.weight`), the header's metadata name the
format and the phase. Nothing that executes on load, no text, no Python objects.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from fedloom.errors import MessageError

Message: TypeAlias = dict[str, Any]  # a Tensor, or again a Message, under each name
Schema: TypeAlias = tuple[
    tuple[str, str, tuple[int, ...]], ...
]  # (name, dtype, shape), sorted by name

FORMAT = "fedloom/1"
DTYPES = {str(d).removeprefix("torch."): d for d in (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool
)}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
DEFAULT_LIMIT = 2**31  # bytes; a deployment sets its own
LARGEST = (
    2.0**100
)  # in size, of a number that travels: the sum of a hundred million such still is a float32
DEPTH_LIMIT = 64  # groups within groups, and dimensions of a tensor: beyond it Python's recursion and torch give up


# ---- shape of a message ----
def flatten(message: Message) -> dict[str, Tensor]:
    """Takes a nested message, gives {"outer/inner": tensor} sorted by name. Anything but tensors in dicts is refused by name."""
    if not isinstance(message, dict):
        raise MessageError(
            f"message: it is a {type(message).__name__}; only dicts of tensors travel"
        )
    return dict(sorted(_walk(message, "")))


def _walk(message: Message, prefix: str) -> Iterator[tuple[str, Tensor]]:
    for key, value in message.items():
        name = prefix + key if isinstance(key, str) else repr(key)
        if not isinstance(key, str) or not key or "/" in key:
            raise MessageError(
                f"message: {name!r} is not a valid name (a non-empty text without '/')"
            )
        if isinstance(value, Tensor):
            if value.dtype not in DTYPES.values():
                raise MessageError(
                    f"message: {name!r} has dtype {value.dtype}; valid: {', '.join(DTYPES)}"
                )
            yield name, value
        elif isinstance(value, dict):
            if not value:
                raise MessageError(f"message: {name!r} is an empty group: leave it out")
            yield from _walk(value, name + "/")
        else:
            raise MessageError(
                f"message: {name!r} is a {type(value).__name__}; only tensors and dicts of tensors travel"
            )


def unflatten(flat: dict[str, Tensor]) -> Message:
    """The inverse of `flatten`."""
    message: Message = {}
    for name in sorted(flat):
        *outer, last = name.split("/")
        place = message
        for part in outer:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise MessageError(f"message: {name!r} lies inside a tensor")
        if not all([*outer, last]) or last in place:
            raise MessageError(f"message: {name!r} is not a valid name here")
        place[last] = flat[name]
    return message


def tree_map(function: Callable[..., Tensor], *messages: Message) -> Message:
    """Applies `function` to the tensors at each name of messages that have the same names; gives a message of the results."""
    first = messages[0]
    return {
        key: tree_map(function, *(m[key] for m in messages))
        if isinstance(first[key], dict)
        else function(*(m[key] for m in messages))
        for key in first
    }


def isolate(message: Message) -> Message:
    """A copy that shares no memory with the sender, detached, names in the wire's order: what a receiver may keep."""
    return unflatten(
        {
            name: tensor.detach().clone(memory_format=torch.contiguous_format)
            for name, tensor in flatten(message).items()
        }
    )


def schema_of(message: Message) -> Schema:
    """Names, dtypes and shapes of a message, sorted by name."""
    return tuple((name, _NAMES[t.dtype], tuple(t.shape)) for name, t in flatten(message).items())


class Batch(Mapping[str, Message]):
    """Messages of one schema from many clients, kept as one tensor [clients, ...] under each name."""

    def __init__(self, clients: Sequence[str], stacks: dict[str, Tensor]):
        self.clients, self.stacks = tuple(clients), stacks
        self._place = {client: k for k, client in enumerate(self.clients)}

    def __getitem__(self, client: str) -> Message:
        k = self._place[client]
        return unflatten({name: stack[k] for name, stack in self.stacks.items()})

    def __iter__(self) -> Iterator[str]:
        return iter(self.clients)

    def __len__(self) -> int:
        return len(self.clients)

    @property
    def schema(self) -> Schema:
        """What each message holds."""
        return tuple(
            (name, _NAMES[stack.dtype], tuple(stack.shape[1:]))
            for name, stack in self.stacks.items()
        )


def batched(messages: Mapping[str, Message]) -> Batch | None:
    """Takes a message per client, gives a copy that shares no memory with them; None unless all have one schema (and a tensor)."""
    first = next(iter(messages.values()), {})
    names = [name.split("/") for name in flatten(first)]
    stacks = {"/".join(parts): _stacked(list(messages.values()), parts) for parts in names}
    complete = {name: stack for name, stack in stacks.items() if stack is not None}
    if (
        not stacks
        or len(complete) < len(stacks)
        or any(_leaves(message) != len(names) for message in messages.values())
    ):
        return None
    return Batch(tuple(messages), complete)


def _stacked(messages: Sequence[Any], parts: Sequence[str]) -> Tensor | None:
    """What all messages hold under a nested name, as one tensor; None unless all hold tensors of one dtype and shape."""
    for part in parts:
        messages = [
            message.get(part) if isinstance(message, dict) else None for message in messages
        ]
    if (
        any(not isinstance(t, Tensor) for t in messages)
        or len({(t.dtype, t.shape) for t in messages}) > 1
    ):
        return None
    return torch.stack([t.detach() for t in messages])


def _leaves(message: Message) -> int:
    return sum(_leaves(value) if isinstance(value, dict) else 1 for value in message.values())


@dataclass(frozen=True)
class Absent:
    """What an engine gives in place of a client's answer.

    cause: why there is none, in one line. error: the client's own exception, if it is that. lost_state: the client is there again, but has
    lost its state, so that all that came before the rounds has to be handed in to it again.
    """

    cause: str
    error: Exception | None = None
    lost_state: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "cause", " ".join(self.cause.split()))

    @classmethod
    def by(cls, error: Exception) -> Absent:
        """Takes the exception that a client's phase has ended with."""
        return cls(f"{type(error).__qualname__}: {error}", error)


# ---- the wire ----
def encode(message: Message, phase: str) -> bytes:
    """Takes a message and the phase it belongs to, gives the bytes that travel."""
    flat = {name: t.detach().contiguous() for name, t in flatten(message).items()}
    return save_safetensors(flat, metadata={"format": FORMAT, "phase": phase})


def decode(data: bytes, phase: str, limit: int = DEFAULT_LIMIT) -> Message:
    """Takes bytes from a peer and the phase they should belong to, gives the message; MessageError for anything not to the letter.

    Checked in this order: size, header, format and phase, layout, names, and that every number is finite. Which names, dtypes
    and shapes are right depends on the phase: that is `check`, which every engine's messages pass.
    """
    if len(data) > limit:
        raise MessageError(
            f"message for {phase!r}: {len(data)} bytes, more than the limit of {limit}"
        )
    header = _header(data, phase)
    metadata = header.get("__metadata__")
    said = metadata if isinstance(metadata, dict) else {}
    if said.get("format") != FORMAT:
        raise MessageError(
            f"message for {phase!r}: format is {said.get('format')!r:.80}, this side speaks {FORMAT!r}"
        )
    if said.get("phase") != phase:
        raise MessageError(
            f"message for {phase!r}: it says it belongs to {said.get('phase')!r:.80}"
        )
    if len(said) > 2:
        raise MessageError(
            f"message for {phase!r}: metadata besides format and phase: no text travels"
        )
    try:
        flat = load_safetensors(data)
    except (
        SafetensorError,
        KeyError,
        ValueError,
        RuntimeError,
        TypeError,
    ) as error:  # TypeError: a length of 2**63 or more
        raise MessageError(f"message for {phase!r}: damaged ({_printable(error)})") from error
    for name, tensor in flat.items():
        if max(name.count("/"), tensor.dim()) > DEPTH_LIMIT:
            raise MessageError(
                f"message for {phase!r}: tensor {name[:80]!r} has more than {DEPTH_LIMIT} levels or dimensions"
            )
    message = unflatten(flat)
    require_finite(
        message, f"message for {phase!r}"
    )  # and names and dtypes by the same rules as on the sending side
    return message


def _header(data: bytes, phase: str) -> dict[str, Any]:
    if len(data) < 8:
        raise MessageError(f"message for {phase!r}: {len(data)} bytes, too short to be one")
    length = int.from_bytes(data[:8], "little")
    if length > len(data) - 8:
        raise MessageError(
            f"message for {phase!r}: cut off (the header claims {length} bytes, {len(data) - 8} came)"
        )
    try:
        # As text, because of bytes json guesses the encoding: the sender would choose which codecs are imported here.
        header = json.loads(data[8 : 8 + length].decode("utf-8"), object_pairs_hook=_without_twins)
    except MessageError as error:
        raise MessageError(f"message for {phase!r}: {error}") from None
    except (
        ValueError,
        RecursionError,
    ) as error:  # ValueError: not UTF-8, not JSON, or a number of thousands of digits
        raise MessageError(
            f"message for {phase!r}: header is not JSON ({type(error).__name__})"
        ) from error
    if not isinstance(header, dict):
        raise MessageError(f"message for {phase!r}: header is not a JSON object")
    return header


def _printable(error: Exception) -> str:
    """An error's text without the control characters a sender may have put into what it quotes: it may end up in a log or a terminal."""
    return "".join(c if c.isprintable() else "?" for c in str(error)[:300])


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object as a dict. Two readers may take different ones of two equal names, so there must be none."""
    members = dict(pairs)
    if len(members) < len(pairs):
        raise MessageError("header has a name twice")
    return members


def travels(tensor: Tensor) -> bool:
    """Whether all its numbers are finite, and none is larger than `LARGEST`."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    low, high = torch.aminmax(tensor)  # in one pass; a NaN is both, and no comparison with it holds
    return low.item() >= -LARGEST and high.item() <= LARGEST


def require_finite(message: Message, who: str) -> None:
    """Raises MessageError, naming the tensor, if a number is NaN, infinite or larger than `LARGEST`."""
    for name, tensor in flatten(message).items():
        if not travels(tensor):
            bad = tensor[~(tensor.double().abs() <= LARGEST)][0].item()
            raise MessageError(
                f"{who}: tensor {name!r} holds {bad}: only finite numbers travel, up to 2^100 in size"
            )


@lru_cache(maxsize=4096)
def _encoded_size(schema: Schema, phase: str) -> int:
    # The same message without a number in it has the same header but for shapes and places, which are put in: nothing large is made.
    empty = encode(
        unflatten({name: torch.zeros(0, dtype=DTYPES[dtype]) for name, dtype, _ in schema}), phase
    )
    header = _header(empty, phase)
    tensors = {name: (DTYPES[dtype].itemsize, shape) for name, dtype, shape in schema}
    place = 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        width, shape = tensors[name]
        end = place + width * math.prod(shape)
        entry["shape"], entry["data_offsets"], place = shape, (place, end), end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    return 8 + -(-len(text) // 8) * 8 + place


def encoded_size(schema: Schema, phase: str) -> int:
    """How many bytes `encode` gives for a message of this schema (it depends on nothing else)."""
    return _encoded_size(schema, phase)


# ---- what a phase may answer ----
def check(message: Message, expected: Schema, who: str) -> None:
    """Raises MessageError, naming the tensor, unless `message` has exactly the expected names, dtypes, shapes, and finite numbers.

    A -1 in an expected shape stands for any length.
    """
    check_schema(schema_of(message), expected, who)
    require_finite(message, who)


def check_schema(schema: Schema, expected: Schema, who: str) -> None:
    """`check` of the names, dtypes and shapes alone."""
    if schema == expected:
        return
    wanted = {name: (dtype, shape) for name, dtype, shape in expected}
    given = {name: (dtype, shape) for name, dtype, shape in schema}
    for name in wanted.keys() - given.keys():
        raise MessageError(f"{who}: tensor {name!r} is missing")
    for name in given.keys() - wanted.keys():
        raise MessageError(
            f"{who}: tensor {name!r} is not expected here; valid: {', '.join(wanted) or 'nothing'}"
        )
    for name, (dtype, shape) in given.items():
        want_type, want_shape = wanted[name]
        if dtype != want_type:
            raise MessageError(
                f"{who}: tensor {name!r} has dtype torch.{dtype}, expected {want_type}"
            )
        if len(shape) != len(want_shape) or any(
            want not in (-1, have) for want, have in zip(want_shape, shape, strict=True)
        ):
            raise MessageError(
                f"{who}: tensor {name!r} has shape {list(shape)}, expected {list(want_shape)}"
            )
