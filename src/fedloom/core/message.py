"""Messages: nested dicts of tensors. Only messages travel between parties.

On the wire, a message is one safetensors blob. Nested names are joined with "/"
(`model/layers.0.weight`). The metadata in the header name the format and the phase. A message holds
no text and no Python objects, and nothing executes when it is loaded. The decoder is strict.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from fedloom._system import plain_text
from fedloom.core.shared_rows import SharedRows
from fedloom.errors import MessageError, NotFiniteError

Message: TypeAlias = dict[str, Any]  # each value is a Tensor or another Message
Schema: TypeAlias = tuple[tuple[str, str, tuple[int, ...]], ...]  # (name, dtype, shape), sorted

FORMAT = "fedloom/1"
DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# The largest absolute value in a message: the sum of a hundred million such still is a float32.
LARGEST = 2.0**100
# The most nested groups, and dimensions of a tensor. Python's recursion and torch have limits too.
DEPTH_LIMIT = 64


class Limit(NamedTuple):
    """How long an encoded message may be.

    Attributes:
        total: The most bytes of the whole message.
        header: The most bytes of its header. Parsed JSON takes about 25 times its length in memory.
    """

    total: int
    header: int


# Of a message whose schema is not known. A tensor takes about 100 bytes of the header.
DEFAULT_LIMIT = Limit(2**30, 2**20)


# ---- shape of a message ----
def flatten(message: Message) -> dict[str, Tensor]:
    """Returns a nested message as {"outer/inner": tensor}, sorted by name.

    Raises a MessageError that names anything but tensors in dicts.
    """
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
                f"message: {name!r} is a {type(value).__name__}; "
                "only tensors and dicts of tensors travel"
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
    """Applies a function to the tensors of one or more messages, name by name.

    All messages have the same names. Returns a message of the results.
    """
    first = messages[0]
    return {
        key: tree_map(function, *(m[key] for m in messages))
        if isinstance(first[key], dict)
        else function(*(m[key] for m in messages))
        for key in first
    }


def isolate(message: Message) -> Message:
    """Returns a detached copy that shares no memory, with names in the order of the wire."""
    return unflatten(
        {
            name: tensor.detach().clone(memory_format=torch.contiguous_format)
            for name, tensor in flatten(message).items()
        }
    )


def schema_of(message: Message) -> Schema:
    """Returns the names, dtypes and shapes of a message, sorted by name."""
    return tuple((name, _NAMES[t.dtype], tuple(t.shape)) for name, t in flatten(message).items())


Stack: TypeAlias = Tensor | SharedRows  # [clients, ...]


class Batch(Mapping[str, Message]):
    """Messages of one schema from many clients: one stack [clients, ...] for each name.

    A stack is a tensor, or a `SharedRows` in which clients share rows.
    """

    def __init__(self, clients: Sequence[str], stacks: Mapping[str, Stack]):
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
        """The schema of each message. It does not tell whether rows are shared."""
        return tuple(
            (name, _NAMES[stack.dtype], tuple(stack.shape[1:]))
            for name, stack in self.stacks.items()
        )

    def dense(self, name: str) -> Tensor:
        """Returns the tensors of one name, [clients, ...]."""
        stack = self.stacks[name]
        return stack.dense() if isinstance(stack, SharedRows) else stack


def joined_batches(batches: Sequence[Batch], clients: Sequence[str]) -> Batch | None:
    """Copies batches of different clients into one, in the order of `clients`.

    Returns None unless they have one schema, not an empty one, and are the messages of all clients.
    """
    found = [client for batch in batches for client in batch.clients]
    schemas = {batch.schema for batch in batches}
    if len(found) < len(clients) or len(schemas) != 1 or schemas == {()}:
        return None
    place = {client: k for k, client in enumerate(found)}
    order = None if found == list(clients) else torch.tensor([place[c] for c in clients])
    stacks: dict[str, Stack] = {}
    for name in batches[0].stacks:
        shared = [s for batch in batches if isinstance(s := batch.stacks[name], SharedRows)]
        if len(shared) == len(batches):
            joined = SharedRows.joined(shared)
            stacks[name] = joined if order is None else joined.select(order)
        else:
            whole = torch.cat([batch.dense(name) for batch in batches])
            stacks[name] = whole if order is None else whole.index_select(0, order)
    return Batch(clients, stacks)


def batched(messages: Mapping[str, Message]) -> Batch | None:
    """Copies {client: message} into a batch.

    Returns None unless all messages have the same schema and at least one tensor.
    """
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
    """Stacks the tensors under a nested name; None unless all have the same dtype and shape."""
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
    """What an engine returns in place of a client's reply.

    Args:
        cause: Why there is no reply. A client may have sent it, so that it becomes one short line
            without hidden characters.
        error: The exception that the client raised, if there is one.
        lost_state: The client is back but has lost its state. It must repeat all exchanges before
            the rounds.
    """

    cause: str
    error: Exception | None = None
    lost_state: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "cause", plain_text(self.cause))

    @classmethod
    def by(cls, error: Exception) -> Absent:
        """Returns the absence of a client whose phase raised an exception."""
        return cls(f"{type(error).__qualname__}: {error}", error)


# ---- the wire ----
def encode(message: Message, phase: str) -> bytes:
    """Returns the bytes of a message that belongs to a phase."""
    flat = {name: t.detach().contiguous() for name, t in flatten(message).items()}
    return save_safetensors(flat, metadata={"format": FORMAT, "phase": phase})


def decode(data: bytes, phase: str, limit: Limit = DEFAULT_LIMIT) -> Message:
    """Decodes bytes from another party. Raises a MessageError unless they are as `encode` writes.

    It checks, in this order: both lengths, header, format and phase, layout, names, and that all
    numbers are finite. Nothing is parsed before the lengths are checked. `check` compares names,
    dtypes and shapes with what the phase expects.

    Args:
        data: The bytes.
        phase: The phase that they must belong to.
        limit: How long they may be; `largest_size` gives the limit of a schema.
    """
    if len(data) > limit.total:
        raise MessageError(
            f"message for {phase!r}: {len(data)} bytes, more than the limit of {limit.total}"
        )
    header = _header(data, phase, limit.header)
    metadata = header.get("__metadata__")
    said = metadata if isinstance(metadata, dict) else {}
    if said.get("format") != FORMAT:
        raise MessageError(
            f"message for {phase!r}: format is {said.get('format')!r:.80}, "
            f"this side speaks {FORMAT!r}"
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
    # TypeError: a length of 2**63 or more
    except (SafetensorError, KeyError, ValueError, RuntimeError, TypeError) as error:
        raise MessageError(f"message for {phase!r}: damaged ({_printable(error)})") from error
    for name, tensor in flat.items():
        if max(name.count("/"), tensor.dim()) > DEPTH_LIMIT:
            raise MessageError(
                f"message for {phase!r}: tensor {name[:80]!r} has more than {DEPTH_LIMIT} levels "
                "or dimensions"
            )
    message = unflatten(flat)
    require_finite(message, f"message for {phase!r}")  # also checks names and dtypes
    return message


def _header(data: bytes, phase: str, limit: int) -> dict[str, Any]:
    if len(data) < 8:
        raise MessageError(f"message for {phase!r}: {len(data)} bytes, too short to be one")
    length = int.from_bytes(data[:8], "little")
    if length > limit:
        raise MessageError(
            f"message for {phase!r}: the header claims {length} bytes, more than the limit of "
            f"{limit}"
        )
    if length > len(data) - 8:
        raise MessageError(
            f"message for {phase!r}: cut off (the header claims {length} bytes, "
            f"{len(data) - 8} came)"
        )
    try:
        # Decoded here, because json guesses the encoding of bytes: the sender could choose which
        # codecs are imported.
        header = json.loads(data[8 : 8 + length].decode("utf-8"), object_pairs_hook=_without_twins)
    except MessageError as error:
        raise MessageError(f"message for {phase!r}: {error}") from None
    # ValueError: not UTF-8, not JSON, or a number of thousands of digits
    except (ValueError, RecursionError) as error:
        raise MessageError(
            f"message for {phase!r}: header is not JSON ({type(error).__name__})"
        ) from error
    if not isinstance(header, dict):
        raise MessageError(f"message for {phase!r}: header is not a JSON object")
    return header


def _printable(error: Exception) -> str:
    """An error's text without control characters: it may quote the sender, in a log or terminal."""
    return "".join(c if c.isprintable() else "?" for c in str(error)[:300])


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object as a dict. Refuses a name that is there twice: readers may differ on it."""
    members = dict(pairs)
    if len(members) < len(pairs):
        raise MessageError("header has a name twice")
    return members


def travels(tensor: Tensor) -> bool:
    """Returns whether all numbers of a tensor are finite and at most `LARGEST` in size."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    # No entry is larger than the norm. It takes half of the time of the extremes.
    if torch.linalg.vector_norm(tensor).item() < LARGEST:
        return True
    low, high = torch.aminmax(tensor)  # one pass; comparisons with NaN are false
    return low.item() >= -LARGEST and high.item() <= LARGEST


def norm_of(message: Message) -> float:
    """Returns the Euclidean norm of all floating-point numbers of a message."""
    floats = _floats(flatten(message).values())
    norm = math.hypot(*(float(torch.linalg.vector_norm(t)) for t in floats))
    if math.isfinite(norm):
        return norm
    return math.hypot(*(float(torch.linalg.vector_norm(t.double())) for t in floats))


def norms_of(batch: Batch) -> Tensor:
    """Returns a norm of each message of a batch, [clients]; NaN or infinite if one of it is.

    A message that shares rows counts all rows that are shared, so that none is missed.
    """
    norms = torch.zeros(len(batch), dtype=torch.float64)
    for stack in batch.stacks.values():
        if not stack.dtype.is_floating_point or not math.prod(stack.shape):
            continue
        if isinstance(stack, SharedRows):
            norms = norms.hypot(torch.linalg.vector_norm(stack.stored).double())
        else:
            norms = norms.hypot(
                torch.linalg.vector_norm(stack.reshape(len(stack), -1), dim=1).double()
            )
    return norms


def _floats(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel()]


def require_finite(message: Message, sender: str) -> None:
    """Raises a MessageError that names the tensor if a number cannot travel; see `travels`."""
    for name, tensor in flatten(message).items():
        if not travels(tensor):
            bad = tensor[~(tensor.double().abs() <= LARGEST)][0].item()
            raise NotFiniteError(
                f"{sender}: tensor {name!r} holds {bad}: only finite numbers travel, "
                "up to 2^100 in size"
            )


# ---- lengths ----
@lru_cache(maxsize=4096)
def largest_size(schema: Schema, phase: str) -> Limit:
    """Returns the length of the largest valid message of a schema.

    It is the exact length, unless the schema has a shape with a -1, which stands for any length.
    The whole message then may have as many bytes as `DEFAULT_LIMIT` allows. Its header still is
    limited by the names, dtypes and numbers of dimensions.
    """
    # Encodes the message without its numbers, and then puts the real shapes and places into the
    # header. So nothing large is allocated.
    flat = {name: torch.zeros(0, dtype=DTYPES[dtype]) for name, dtype, _ in schema}
    encoded = encode(unflatten(flat), phase)
    header = _header(encoded, phase, len(encoded))
    tensors = {name: (DTYPES[dtype].itemsize, shape) for name, dtype, shape in schema}
    free = any(-1 in shape for _, _, shape in schema)
    place = 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        width, shape = tensors[name]
        end = DEFAULT_LIMIT.total if free else place + width * math.prod(shape)
        entry["shape"] = [DEFAULT_LIMIT.total if n == -1 else n for n in shape]
        entry["data_offsets"], place = (DEFAULT_LIMIT.total if free else place, end), end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    padded = -(-len(text) // 8) * 8
    return Limit(DEFAULT_LIMIT.total if free else 8 + padded + place, padded)


def encoded_size(schema: Schema, phase: str) -> int:
    """Returns the number of bytes that `encode` returns for a message of this schema."""
    return largest_size(schema, phase).total


# ---- checks ----
def check(message: Message, expected: Schema, sender: str) -> None:
    """Raises a MessageError unless a message has the expected schema and finite numbers.

    The error names the sender and the tensor. A -1 in an expected shape stands for any length.
    """
    check_schema(schema_of(message), expected, sender)
    require_finite(message, sender)


def check_schema(schema: Schema, expected: Schema, sender: str) -> None:
    """`check` for names, dtypes and shapes only."""
    if schema == expected:
        return
    wanted = {name: (dtype, shape) for name, dtype, shape in expected}
    given = {name: (dtype, shape) for name, dtype, shape in schema}
    for name in wanted.keys() - given.keys():
        raise MessageError(f"{sender}: tensor {name!r} is missing")
    for name in given.keys() - wanted.keys():
        raise MessageError(
            f"{sender}: tensor {name!r} is not expected here; "
            f"valid: {', '.join(wanted) or 'nothing'}"
        )
    for name, (dtype, shape) in given.items():
        want_type, want_shape = wanted[name]
        if dtype != want_type:
            raise MessageError(
                f"{sender}: tensor {name!r} has dtype torch.{dtype}, expected {want_type}"
            )
        if len(shape) != len(want_shape) or any(
            want not in (-1, have) for want, have in zip(want_shape, shape, strict=True)
        ):
            raise MessageError(
                f"{sender}: tensor {name!r} has shape {list(shape)}, expected {list(want_shape)}"
            )
