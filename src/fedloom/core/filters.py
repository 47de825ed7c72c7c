"""Filters: lossy encodings of the weights that travel, between a method and the wire.

    run.upload = "topk=0.05,int8"       from clients to the server
    run.download = "float16"            from the server to clients

A filter encodes one tensor. Filters in a row encode what the one before left as float32. They apply
to weights: float32 tensors with at least `SMALL` entries inside a group of a message, such as
`model/layers.0.weight`. Counts, prototypes and scores travel as they are. The ledger books the
encoded messages.

An upload that is declared "~name" is an updated version of what was sent under `name`. Its
difference to that is encoded. What an encoding loses is kept by the client and added to its next
upload (error feedback: Seide et al., Interspeech 2014; Stich et al., NeurIPS 2018).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from fedloom.core.message import Message, Schema, flatten, unflatten
from fedloom.core.phase import Phase, phases_of
from fedloom.errors import ConfigError, MessageError, unknown

if TYPE_CHECKING:
    from fedloom.core.method import Method

SMALL = 32  # tensors with fewer entries travel as they are


class Filter(ABC):
    """An encoding of a float32 tensor."""

    name: ClassVar[str]
    parts: ClassVar[tuple[str, ...]]  # the names of the tensors that it encodes to
    value: ClassVar[str] = ""  # of these, the float32 tensor that the next filter may encode

    @abstractmethod
    def encode(self, tensor: Tensor) -> dict[str, Tensor]:
        """Encodes a tensor."""

    @abstractmethod
    def decode(self, parts: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
        """Decodes to a tensor of that shape. Raises a MessageError if the parts do not fit."""


@dataclass(frozen=True)
class Float16(Filter):
    """Half precision: 2 bytes per entry."""

    name = "float16"
    parts = ("float16",)

    def encode(self, tensor: Tensor) -> dict[str, Tensor]:
        """Rounds to the nearest float16; larger entries become the largest one."""
        largest = torch.finfo(torch.float16).max
        return {"float16": tensor.clamp(-largest, largest).half()}

    def decode(self, parts: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
        """Returns float32."""
        _require(parts["float16"], torch.float16, shape)
        return parts["float16"].float()


@dataclass(frozen=True)
class Int8(Filter):
    """Whole numbers from -127 to 127 times a scale: 1 byte per entry, 4 per column of a matrix."""

    name = "int8"
    parts = ("int8", "scale")

    def encode(self, tensor: Tensor) -> dict[str, Tensor]:
        """Scales each column, or a vector as a whole, by its largest absolute value."""
        rows = tensor.reshape(-1, self._columns(tensor.shape))
        scale = rows.abs().amax(0) / 127
        rounded = (rows / scale.where(scale > 0, 1.0)).round()
        return {"int8": rounded.to(torch.int8).reshape(tensor.shape), "scale": scale}

    def decode(self, parts: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
        """Returns float32."""
        columns = self._columns(shape)
        _require(parts["int8"], torch.int8, shape)
        _require(parts["scale"], torch.float32, (columns,))
        return (parts["int8"].reshape(-1, columns) * parts["scale"]).reshape(shape)

    def _columns(self, shape: tuple[int, ...]) -> int:
        return shape[-1] if len(shape) > 1 else 1


@dataclass(frozen=True)
class TopK(Filter):
    """The entries of largest absolute value: 4 bytes for each one's place and 4 for its value."""

    share: float  # of the entries that are sent

    name = "topk"
    parts = ("index", "value")
    value = "value"

    def encode(self, tensor: Tensor) -> dict[str, Tensor]:
        """Keeps at least one entry."""
        flat = tensor.reshape(-1)
        kept = flat.abs().topk(self._count(flat.numel())).indices.sort().values
        return {"index": kept.int(), "value": flat[kept]}

    def decode(self, parts: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
        """Returns float32 with zeros elsewhere."""
        total = math.prod(shape)
        index, count = parts["index"].long(), self._count(total)
        _require(parts["index"], torch.int32, (count,))
        _require(parts["value"], torch.float32, (count,))
        if index.min() < 0 or index.max() >= total:
            raise MessageError(f"'index' holds a number outside 0 to {total - 1}")
        return torch.zeros(total).index_copy(0, index, parts["value"]).view(shape)

    def _count(self, entries: int) -> int:
        return max(1, math.ceil(self.share * entries))


FILTERS = ("float16", "int8", "topk=SHARE")


def _require(tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape):
        raise MessageError(
            f"has {tensor.dtype} {list(tensor.shape)}, expected {dtype} {list(shape)}"
        )


def parse_filters(text: str, setting: str) -> Filters:
    """Reads a list of filters such as "topk=0.05,int8". Raises a ConfigError that names `setting`."""
    chain: list[Filter] = []
    for part in text.replace(" ", "").split(",") if text.strip() else []:
        name, _, argument = part.partition("=")
        if name == "topk":
            try:
                share = float(argument)
            except ValueError:
                share = 0.0
            if not 0 < share <= 1:
                raise ConfigError(f"{setting}: {part!r}: the share must be above 0 and at most 1")
            chain.append(TopK(share))
        elif name in ("float16", "int8") and not argument:
            chain.append(Float16() if name == "float16" else Int8())
        else:
            raise unknown(f"filter in {setting}:", part, FILTERS)
    for earlier in chain[:-1]:
        if not earlier.value:
            raise ConfigError(f"{setting}: no filter can follow {earlier.name!r}; put it last")
    return Filters(tuple(chain))


@dataclass(frozen=True)
class Filters:
    """Filters in a row. Without any, messages pass unchanged."""

    chain: tuple[Filter, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.chain)

    # ---- one tensor ----
    def _encode(self, tensor: Tensor) -> dict[str, Tensor]:
        encoded: dict[str, Tensor] = {}
        for step in self.chain:
            parts = step.encode(tensor)
            rest = parts.pop(step.value) if step is not self.chain[-1] else tensor
            encoded |= {_key(step, name): part for name, part in parts.items()}
            tensor = rest
        return encoded

    def _decode(self, encoded: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
        shapes = [shape]
        for step in self.chain[:-1]:  # the shape of what each filter left to the next
            shapes.append(tuple(encoded[_key(step, step.parts[0])].shape))
        value: Tensor | None = None
        for step, own in zip(reversed(self.chain), reversed(shapes), strict=True):
            parts = {name: encoded[_key(step, name)] for name in step.parts if name != step.value}
            if step.value:
                is_last = step is self.chain[-1]
                parts[step.value] = encoded[_key(step, step.value)] if is_last else value  # type: ignore[assignment]
            value = step.decode(parts, own)
        assert value is not None
        return value

    def _names(self) -> set[str]:
        last = self.chain[-1]
        kept = {_key(s, n) for s in self.chain for n in s.parts if n != s.value}
        return kept | ({_key(last, last.value)} if last.value else set())

    # ---- messages ----
    def encode(self, message: Message) -> Message:
        """Encodes the weights in a message."""
        return (
            _mapped(message, lambda name, tensor: self._encode(tensor)) if self.chain else message
        )

    def decode(self, message: Message, schema: Schema | None = None) -> Message:
        """Decodes the weights in a message. Raises a MessageError that names the tensor.

        schema: of the decoded message; needed for filters that do not keep a tensor's shape.
        """
        if not self.chain:
            return message
        shapes = {name: shape for name, _, shape in schema or ()}
        names, first = self._names(), _key(self.chain[0], self.chain[0].parts[0])

        def restore(name: str, content: Message) -> Message | Tensor:
            if content.keys() != names or not all(isinstance(t, Tensor) for t in content.values()):
                return {
                    k: restore(f"{name}/{k}", v) if isinstance(v, dict) else v
                    for k, v in content.items()
                }
            shape = tuple(content[first].shape) if schema is None else shapes.get(name)
            if shape is None:
                raise MessageError(f"tensor {name!r} is not expected here")
            try:
                return self._decode(content, shape)
            except MessageError as error:
                raise MessageError(f"tensor {name!r}: {error}") from None

        return {k: restore(k, v) if isinstance(v, dict) else v for k, v in message.items()}

    # ---- a client's upload ----
    def encode_reply(
        self, phase: Phase, reply: Message, message: Message, residuals: dict[str, Any]
    ) -> Message:
        """Encodes a client's reply; for updates, the difference to what was sent.

        residuals: what earlier encodings of this phase lost; overwritten with what this one loses.
        """
        if not self.chain or phase.read_by:
            return reply
        flat, sent = flatten(reply), flatten(message)
        feedback = {name for name, d in phase.reply.items() if isinstance(d, str) and d[0] in "=~"}

        def encode(name: str, tensor: Tensor) -> dict[str, Tensor]:
            wanted = tensor - sent[original] if (original := _original(phase, name)) else tensor
            group = name.partition("/")[0]
            if group in feedback and name in residuals:
                wanted = wanted + residuals[name]
            encoded = self._encode(wanted)
            if group in feedback:
                residuals[name] = wanted - self._decode(encoded, tuple(tensor.shape))
            return encoded

        return _mapped(unflatten(flat), encode)

    def decode_reply(
        self, phase: Phase, reply: Message, message: Message, schema: Schema
    ) -> Message:
        """Decodes a client's reply: the inverse of `encode_reply`, up to what was lost."""
        if not self.chain or phase.read_by:
            return reply
        decoded, sent = flatten(self.decode(reply, schema)), flatten(message)
        shapes = {name: shape for name, _, shape in schema}
        for name, tensor in decoded.items():
            original = _original(phase, name)
            if original and _is_filtered(name, shapes.get(name, ()), tensor):
                decoded[name] = sent[original] + tensor
        return unflatten(decoded)

    def check(self, method: type[Method], setting: str) -> None:
        """Raises a ConfigError if the method sends no weights, or none that the filters can encode."""
        if not self.chain:
            return
        declared = [
            d for p in phases_of(method).values() if not p.read_by for d in p.reply.values()
        ]
        texts = [d for d in declared if isinstance(d, str)]
        if not any(d == "weights" or d[0] in "=~" for d in texts):
            raise ConfigError(f"{setting}: this method's clients send no weights")
        if any(isinstance(f, TopK) for f in self.chain) and "weights" in texts:
            raise ConfigError(
                f"{setting}: topk needs uploads that are updates of what the server sent; "
                "this method's clients send whole models"
            )


def _key(step: Filter, part: str) -> str:
    """The name of an encoded part in a message; no parameter of a model has a colon in its name."""
    return f"{step.name}:{part}"


def _original(phase: Phase, name: str) -> str:
    """The name under which the tensor was sent that a reply's tensor updates; "" if there is none."""
    group, slash, rest = name.partition("/")
    return f"{phase.updates[group]}{slash}{rest}" if group in phase.updates else ""


def _is_filtered(name: str, shape: tuple[int, ...], tensor: Tensor) -> bool:
    return "/" in name and tensor.dtype == torch.float32 and math.prod(shape) >= SMALL


def _mapped(message: Message, encode: Callable[[str, Tensor], dict[str, Tensor]]) -> Message:
    found: dict[str, Tensor] = {}
    for name, tensor in flatten(message).items():
        if _is_filtered(name, tuple(tensor.shape), tensor):
            found |= {f"{name}/{key}": part for key, part in encode(name, tensor.detach()).items()}
        else:
            found[name] = tensor
    return unflatten(found)
