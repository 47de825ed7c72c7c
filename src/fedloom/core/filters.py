"""Filters: lossy encodings of the weights that travel, between a method and the wire.

    run.upload = "topk=0.05,int8"       from clients to the server
    run.download = "float16"            from the server to clients

A filter encodes one tensor. In a chain, each filter encodes the float32 part that the one before it
produced. Filters apply to weights: float32 tensors with at least `SMALL` entries inside a group,
such as `model/layers.0.weight`. In a reply, the group must be declared "=name", "~name" or
"weights". Counts, prototypes, scores and peer messages travel as they are. The ledger books the
encoded messages.

A reply that is declared "~name" is an updated version of what was sent under `name`. The client
encodes its difference to that. It keeps what the encoding lost and adds it to the next reply (error
feedback: Seide et al., Interspeech 2014; Stich et al., NeurIPS 2018). The same holds for "=name",
which is a gradient or an increment and is encoded as it is.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from fedloom.core.message import Message, Schema, check_schema, flatten, schema_of, unflatten
from fedloom.core.phase import Phase, phases_of
from fedloom.errors import ConfigError, MessageError, unknown

if TYPE_CHECKING:
    from fedloom.core.method import Method

SMALL = 32  # tensors with fewer entries travel as they are

Shape = tuple[int, ...]
Layout = dict[str, tuple[str, Shape]]  # {part: (dtype, shape)}


# ---- one tensor ----
class Filter(ABC):
    """An encoding of a float32 tensor as one or more tensors, its parts."""

    name: ClassVar[str]
    value: ClassVar[str] = ""  # the float32 part that the next filter encodes. "": none may follow

    @abstractmethod
    def layout(self, shape: Shape) -> Layout:
        """Returns the parts of an encoded tensor of that shape."""

    @abstractmethod
    def encode(self, tensor: Tensor) -> dict[str, Tensor]:
        """Encodes a tensor."""

    @abstractmethod
    def decode(self, parts: Mapping[str, Tensor], shape: Shape) -> Tensor:
        """Decodes parts of the right layout to a tensor of that shape.

        Raises a MessageError if the values of the parts are not valid.
        """


@dataclass(frozen=True)
class Float16(Filter):
    """Half precision: 2 bytes per entry."""

    name = "float16"

    def layout(self, shape: Shape) -> Layout:
        """One part."""
        return {"float16": ("float16", shape)}

    def encode(self, tensor: Tensor) -> dict[str, Tensor]:
        """Rounds to the nearest float16. Finite entries beyond its range become the largest one."""
        largest = torch.finfo(torch.float16).max
        clamped = tensor.clamp(-largest, largest)
        # An infinite entry stays infinite, and the server refuses it by name.
        return {"float16": tensor.where(tensor.isinf(), clamped).half()}

    def decode(self, parts: Mapping[str, Tensor], shape: Shape) -> Tensor:
        """Returns float32."""
        return parts["float16"].float()


@dataclass(frozen=True)
class Int8(Filter):
    """Whole numbers from -127 to 127 times a scale: 1 byte per entry, 4 per column of a matrix."""

    name = "int8"

    def layout(self, shape: Shape) -> Layout:
        """The whole numbers, and the scale of each column, or of a vector as a whole."""
        return {"int8": ("int8", shape), "scale": ("float32", (_columns(shape),))}

    def encode(self, tensor: Tensor) -> dict[str, Tensor]:
        """Divides by the scale, the largest absolute value over 127, and rounds."""
        rows = tensor.reshape(-1, _columns(tuple(tensor.shape)))
        scale = rows.abs().amax(0) / 127
        rounded = (rows / scale.where(scale > 0, 1.0)).round()
        return {"int8": rounded.to(torch.int8).reshape(tensor.shape), "scale": scale}

    def decode(self, parts: Mapping[str, Tensor], shape: Shape) -> Tensor:
        """Returns float32."""
        rows = parts["int8"].reshape(-1, _columns(shape))
        return (rows * parts["scale"]).reshape(shape)


def _columns(shape: Shape) -> int:
    return shape[-1] if len(shape) > 1 else 1


@dataclass(frozen=True)
class TopK(Filter):
    """The entries of largest absolute value: 4 bytes for each one's place and 4 for its value.

    share: the share of the entries that is sent; at least one entry is.
    """

    share: float

    name = "topk"
    value = "value"

    def layout(self, shape: Shape) -> Layout:
        """The places in the flat tensor, in increasing order, and the values."""
        count = (max(1, math.ceil(self.share * math.prod(shape))),)
        return {"index": ("int32", count), "value": ("float32", count)}

    def encode(self, tensor: Tensor) -> dict[str, Tensor]:
        """Selects the largest entries."""
        flat = tensor.reshape(-1)
        (count,) = self.layout(tuple(tensor.shape))["index"][1]
        kept = flat.abs().topk(count).indices.sort().values
        return {"index": kept.int(), "value": flat[kept]}

    def decode(self, parts: Mapping[str, Tensor], shape: Shape) -> Tensor:
        """Returns float32 with zeros elsewhere."""
        index, total = parts["index"].long(), math.prod(shape)
        if index[0] < 0 or index[-1] >= total or bool((index.diff() <= 0).any()):
            raise MessageError(f"'topk:index' must be increasing numbers from 0 to {total - 1}")
        return torch.zeros(total).index_copy(0, index, parts["value"]).view(shape)


FILTERS = ("float16", "int8", "topk=SHARE")


def parse_filters(text: str, setting: str) -> Filters:
    """Reads a chain of filters such as "topk=0.05,int8".

    Raises a ConfigError that names `setting` and the valid filters.
    """
    chain: list[Filter] = []
    for part in text.replace(" ", "").split(",") if text.strip() else []:
        name, _, argument = part.partition("=")
        if name == "topk":
            chain.append(TopK(_share(part, argument, setting)))
        elif part == "float16":
            chain.append(Float16())
        elif part == "int8":
            chain.append(Int8())
        else:
            raise unknown(f"filter in {setting}:", part, FILTERS)
    for earlier, later in pairwise(chain):
        if not earlier.value:
            raise ConfigError(f"{setting}: no filter can follow {earlier.name!r}; put it last")
        if earlier.name == later.name:
            raise ConfigError(f"{setting}: {earlier.name!r} is there twice; give it once")
    return Filters(tuple(chain))


def _share(part: str, argument: str, setting: str) -> float:
    try:
        share = float(argument)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ConfigError(
            f"{setting}: {part!r}: the share must be above 0 and at most 1, as in 'topk=0.05'"
        )
    return share


# ---- messages ----
@dataclass(frozen=True)
class Filters:
    """A chain of filters. An empty chain leaves messages unchanged."""

    chain: tuple[Filter, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.chain)

    def check(self, method: type[Method], setting: str) -> None:
        """Raises a ConfigError if a method's clients send nothing that the chain can encode."""
        if not self.chain:
            return
        replies = [p.reply.values() for p in phases_of(method).values() if not p.read_by]
        texts = [d for reply in replies for d in reply if _is_weights(d)]
        if not texts:
            raise ConfigError(f"{setting}: this method's clients send no weights; leave it empty")
        if "weights" in texts and any(isinstance(step, TopK) for step in self.chain):
            raise ConfigError(
                f"{setting}: topk needs uploads that are updates of what the server sent; "
                "this method's clients send whole models; valid: float16 or int8"
            )

    # ---- messages from the server ----
    def encode(self, message: Message) -> Message:
        """Encodes the weights in a message. Peer messages stay as they are."""
        if not self.chain:
            return message
        own = {name: content for name, content in message.items() if name != "inbox"}
        encoded: dict[str, Tensor] = {}
        for (name, dtype, shape), tensor in zip(schema_of(own), flatten(own).values(), strict=True):
            if _is_large(name, dtype, shape):
                encoded |= _under(name, self._encode(tensor.detach()))
            else:
                encoded[name] = tensor
        return unflatten(encoded) | {name: message[name] for name in message.keys() - own.keys()}

    def decode(self, message: Message) -> Message:
        """Decodes a message. The filters must keep the shape of a tensor, as topk does not."""
        if not self.chain:
            return message
        first, *others = self._layout((1,))

        def decoded(content: Message) -> Message | Tensor:
            if content.keys() == {first, *others}:
                return self._decode(content, tuple(content[first].shape))
            return {k: decoded(v) if isinstance(v, dict) else v for k, v in content.items()}

        return {k: decoded(v) if isinstance(v, dict) else v for k, v in message.items()}

    # ---- replies of clients ----
    def encode_reply(
        self, phase: Phase, reply: Message, sent: Mapping[str, Tensor], lost: Mapping[str, Tensor]
    ) -> tuple[Message, dict[str, Tensor]]:
        """Encodes a client's reply.

        Args:
            phase: The phase that replied.
            reply: Its reply.
            sent: What the client was sent, flat.
            lost: What the encodings of earlier replies to this phase lost, by name.

        Returns the encoded reply, and what the encodings have lost now.
        """
        encoded: dict[str, Tensor] = {}
        left = dict(lost)
        for row, tensor in zip(schema_of(reply), flatten(reply).values(), strict=True):
            name, _, shape = row
            original = phase.original(name)
            unknown_update = original and (original not in sent or sent[original].shape != shape)
            if not _is_encoded(phase, *row) or unknown_update:
                encoded[name] = tensor  # if it should be encoded, the server refuses it by name
                continue
            wanted = tensor.detach() - sent[original] if original else tensor.detach()
            if name in left:
                wanted = wanted + left[name]
            parts = self._encode(wanted)
            if _has_feedback(phase, name):
                left[name] = wanted - self._decode(parts, shape)
            encoded |= _under(name, parts)
        return unflatten(encoded), left

    def decode_reply(
        self, phase: Phase, reply: Message, sent: Mapping[str, Tensor], schema: Schema, sender: str
    ) -> Message:
        """Decodes a client's reply: the inverse of `encode_reply`, up to what was lost.

        Raises a MessageError that names the sender and the tensor if the encoding is malformed.

        Args:
            phase: The phase that replied.
            reply: Its encoded reply.
            sent: What the client was sent, flat.
            schema: The schema of the decoded reply.
            sender: The client and its phase, for errors.
        """
        layouts = self._layouts(phase, schema)
        check_schema(schema_of(reply), self.encoded_schema(phase, schema), sender)
        flat = flatten(reply)
        decoded: dict[str, Tensor] = {}
        for name, _, shape in schema:
            if name not in layouts:
                decoded[name] = flat[name]
                continue
            try:
                tensor = self._decode({k: flat[f"{name}/{k}"] for k in layouts[name]}, shape)
            except MessageError as error:
                raise MessageError(f"{sender}: tensor {name!r}: {error}") from None
            original = phase.original(name)
            decoded[name] = sent[original] + tensor if original else tensor
        return unflatten(decoded)

    def encoded_schema(self, phase: Phase, schema: Schema) -> Schema:
        """Returns the schema of an encoded reply, from that of the reply."""
        layouts = self._layouts(phase, schema)
        rows = [row for row in schema if row[0] not in layouts]
        for name, layout in layouts.items():
            rows += [(f"{name}/{key}", *part) for key, part in layout.items()]
        return tuple(sorted(rows))

    def _layouts(self, phase: Phase, schema: Schema) -> dict[str, Layout]:
        """Returns the layouts of the tensors of a reply that are encoded, by name."""
        return {row[0]: self._layout(row[2]) for row in schema if _is_encoded(phase, *row)}

    # ---- one tensor through the chain ----
    def _layout(self, shape: Shape) -> Layout:
        """Returns the parts of an encoded tensor by their names in a message."""
        found: Layout = {}
        for step in self.chain:
            parts = step.layout(shape)
            if step is not self.chain[-1]:
                _, shape = parts.pop(step.value)
            found |= {_key(step, name): part for name, part in parts.items()}
        return found

    def _encode(self, tensor: Tensor) -> dict[str, Tensor]:
        encoded: dict[str, Tensor] = {}
        for step in self.chain:
            parts = step.encode(tensor)
            if step is not self.chain[-1]:
                tensor = parts.pop(step.value)
            encoded |= {_key(step, name): part for name, part in parts.items()}
        return encoded

    def _decode(self, encoded: Mapping[str, Tensor], shape: Shape) -> Tensor:
        step, *rest = self.chain
        layout = step.layout(shape)
        own = [name for name in layout if not (rest and name == step.value)]
        parts = {name: encoded[_key(step, name)] for name in own}
        if rest:
            parts[step.value] = Filters(tuple(rest))._decode(encoded, layout[step.value][1])
        return step.decode(parts, shape)


def _key(step: Filter, part: str) -> str:
    """The name of a part in a message. No parameter of a model has a colon in its name."""
    return f"{step.name}:{part}"


def _under(name: str, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{name}/{key}": part for key, part in parts.items()}


def _is_weights(declared: object) -> bool:
    """Whether a reply with this declaration holds weights, an update or a gradient."""
    return isinstance(declared, str) and (declared == "weights" or declared[0] in "=~")


def _is_large(name: str, dtype: str, shape: Shape) -> bool:
    return "/" in name and dtype == "float32" and -1 not in shape and math.prod(shape) >= SMALL


def _is_encoded(phase: Phase, name: str, dtype: str, shape: Shape) -> bool:
    """Whether a tensor of a reply is encoded. Both sides decide it from the same facts."""
    declared = phase.reply.get(name.partition("/")[0])
    return not phase.read_by and _is_weights(declared) and _is_large(name, dtype, shape)


def _has_feedback(phase: Phase, name: str) -> bool:
    """Whether the loss of an encoding is added to the next reply. Whole models have none."""
    return phase.reply[name.partition("/")[0]] != "weights"
