"""Phase: a client-side function of a method, and the declaration of its reply.

    @averaged(by="size")
    @phase(model="~model")
    def train(self, client, model): ...

A declaration says what a reply holds under a name. Every reply is checked against it, in every
engine. A text is one of

    "=name"        the same names, shapes and dtypes as the message has under `name`
    "~name"        the same, and an updated version of it: compression encodes the difference
    "weights"      the weights of the client's model
    "dtype[dims]"  a tensor, with dims from
                       C (classes), d (features), K (clients), p (embedding width)
                       a whole number, or a whole-number setting of the method
                       *name: the number of true entries of the reply's own bool tensor `name`
                       n: any length; the method must say what that reveals (`discloses_to_server`)

Behind a tensor, a range can limit its entries, as in "int64[] is size" or "int64[C] counts train":

    in LOW..HIGH   every entry is at least LOW and at most HIGH; a bound that is left out is no
                   bound
    counts MANY    every entry is at least 0, and they add up to at most MANY
    is NUMBER      every entry is that number

A bound is a number, a setting of the method, or one of the counts that the client said at the start
of the run: nodes, items, train, val, test, and size: the items that training sees, at least 1. So a
client cannot claim more than it said. See `Range`.

Anything else is a `Computed` schema, written in the method's own file.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from fedloom.core.facts import Facts, model_schema
from fedloom.core.message import (
    DEFAULT_LIMIT,
    DTYPES,
    Limit,
    Message,
    Schema,
    largest_size,
    schema_of,
)
from fedloom.data.federation import PartySize
from fedloom.errors import MessageError

if TYPE_CHECKING:
    from fedloom.core.method import Method

_TENSOR = re.compile(
    r"(?P<dtype>" + "|".join(DTYPES) + r")\[(?P<dims>[\w*, ]*)\]"
    r"(?: (?:in (?P<low>[\w.-]*?)\.\.(?P<high>[\w.-]*)|counts (?P<many>\w+)|is (?P<number>\w+)))?"
)
COUNTS = ("nodes", "items", "train", "val", "test")  # of `PartySize`


@dataclass(frozen=True)
class Range:
    """The entries that a tensor of a reply may have; see the syntax above.

    Args:
        low: The bound from below; "" for none.
        high: The bound from above; "" for none.
        adds_up: Whether the bound from above is one of the sum of the entries.
    """

    low: str
    high: str
    adds_up: bool = False

    def check(
        self,
        name: str,
        stack: Tensor,
        method: object,
        sizes: Sequence[Mapping[str, int]],
        senders: Callable[[int], str],
    ) -> None:
        """Raises a MessageError that names the first sender whose entries are out of the range.

        Args:
            name: The name of the tensor.
            stack: The tensors of several senders, [senders, ...].
            method: The method, whose settings may be bounds.
            sizes: What each sender said at the start, by name. A count that is not there bounds
                nothing from above, and from below by 0.
            senders: Returns the name of a sender, by its position.
        """
        rows = stack.detach().reshape(len(stack), -1).double()
        if not rows.shape[1]:
            return
        low = self._bound(self.low, method, sizes, 0.0, -math.inf)
        high = self._bound(self.high, method, sizes, math.inf, math.inf)
        least, most = rows.amin(1), rows.sum(1) if self.adds_up else rows.amax(1)
        wrong = (least < low) | (most > high)
        if not wrong.any():
            return
        k = int(wrong.nonzero()[0])
        too_low = bool(least[k] < low[k])
        what = "adds up to" if self.adds_up and not too_low else "holds"
        value = float(least[k] if too_low else most[k])
        raise MessageError(
            f"{senders(k)}: tensor {name!r} {what} {value:.15g}, must be "
            f"{self._words(float(low[k]), float(high[k]))}"
        )

    def _bound(
        self,
        bound: str,
        method: object,
        sizes: Sequence[Mapping[str, int]],
        not_said: float,
        none: float,
    ) -> Tensor:
        """Returns a bound for each sender: `not_said` for a count that is not known."""
        if bound in (*COUNTS, "size"):
            return torch.tensor([size.get(bound, not_said) for size in sizes]).double()
        number = getattr(method, bound) if bound.isidentifier() else float(bound or none)
        return torch.full((len(sizes),), float(number), dtype=torch.float64)

    def _words(self, low: float, high: float) -> str:
        counts = [b for b in dict.fromkeys((self.low, self.high)) if b in (*COUNTS, "size")]
        told = f", the {counts[0]} that it said at the start of the run" if counts else ""
        if low == high:
            return f"{low:.15g}{told}"
        if high == math.inf:
            return f"at least {low:.15g}{told}"
        return f"from {low:.15g} to {high:.15g}{told}"


def message_limit(facts: Facts) -> Limit:
    """Returns how long a message to a client can be.

    A phase declares the names of its message, not the shapes. So the limit of the header is a
    generous one: about 2,500 tensors, four times the tensors of a model, and about 40 tensors from
    each client, which an inbox may have.
    """
    models = [largest_size(model_schema(spec, facts), "").header for spec in set(facts.models)]
    return Limit(DEFAULT_LIMIT.total, 2**18 + 4 * max(models) + 2**12 * facts.num_clients)


def said(size: PartySize, inductive: bool) -> dict[str, int]:
    """Returns the counts that a client said at the start, and its `size`; see the syntax above."""
    counts = {name: int(getattr(size, name)) for name in COUNTS}
    return {**counts, "size": max(1, counts["train" if inductive else "items"])}


@dataclass(frozen=True)
class Computed:
    """A declaration that a method computes.

    Args:
        schema: Takes the method, the facts, the message and the reply. Returns the schema of what
            the reply holds under the name; "" is the name itself. If the reply is None, it returns
            the schema of the longest valid reply.
        depends_on_reply: Whether the schema depends on the reply.
        weights: Whether it describes a model's weights, or changes of them.
    """

    schema: Callable[[Any, Facts, Message, Message | None], Schema]
    depends_on_reply: bool = False
    weights: bool = False


Declaration = str | Computed


@dataclass(frozen=True)
class Phase:
    """A client-side function and everything that the server and the engines know about it.

    Args:
        function: `(method, client, **message) -> message`.
        reply: What it answers, by name.
        parameters: The names that its message may have.
        required: The names that its message must have.
        aggregate: "sum" or "mean" if the server needs only that of the replies.
        weighted_by: The phase whose reply is a client's weight in the mean. "": equal weights.
        read_by: The phase that reads the peer messages of this one. "": it answers the server.
        encrypted: Whether a secure run encrypts its peer messages.
        runs_once: Whether it runs once if it is delivered twice in a row.
    """

    function: Callable[..., Message]
    reply: Mapping[str, Declaration]
    parameters: tuple[str, ...]
    required: frozenset[str]
    aggregate: str = ""
    weighted_by: str = ""
    read_by: str = ""
    encrypted: bool = True
    runs_once: bool = False

    @property
    def name(self) -> str:
        """The function's name."""
        return self.function.__name__

    @property
    def depends_on_reply(self) -> bool:
        """Whether the schema of a reply depends on the reply itself."""
        return any(
            declared.depends_on_reply if isinstance(declared, Computed) else "*" in declared
            for declared in self.reply.values()
        )

    @cached_property
    def ranges(self) -> Mapping[str, Range]:
        """The declared ranges, by name."""
        found: dict[str, Range] = {}
        for name, declared in self.reply.items():
            match = _TENSOR.fullmatch(declared) if isinstance(declared, str) else None
            if match is None:
                continue
            if match["many"]:
                found[name] = Range("0", match["many"], adds_up=True)
            elif match["number"]:
                found[name] = Range(match["number"], match["number"])
            elif match["low"] or match["high"]:
                found[name] = Range(match["low"], match["high"])
        return MappingProxyType(found)

    @property
    def updates(self) -> dict[str, str]:
        """The names in a reply that are updated versions of what was sent, and under which name."""
        texts = {n: d for n, d in self.reply.items() if isinstance(d, str) and d.startswith("~")}
        return {name: declared[1:] for name, declared in texts.items()}

    def original(self, name: str) -> str:
        """Returns the name of the sent tensor that a reply's tensor updates; "" if there is none.

        name: The tensor's name in the reply, such as "model/layers.0.weight".
        """
        group, slash, rest = name.partition("/")
        return f"{self.updates[group]}{slash}{rest}" if group in self.updates else ""

    @cached_property
    def updates_sent(self) -> Mapping[str, str]:
        """The names in a reply that hold weights, and what they are an updated version of.

        The second is "" for a gradient, an increment or whole weights. A sum of updated versions is
        not among them: the server cannot tell an update from it.
        """
        found: dict[str, str] = {}
        for name, declared in self.reply.items() if not self.read_by else ():
            if isinstance(declared, Computed):
                if declared.weights and not declared.depends_on_reply:
                    found[name] = ""
            elif declared == "weights" or declared[0] == "=":
                found[name] = ""
            elif declared[0] == "~" and self.aggregate != "sum":
                found[name] = declared[1:]
        return MappingProxyType(found)

    @cached_property
    def claims(self) -> tuple[str, ...]:
        """The names in a reply that are one number each: how many items the client has."""
        known = (*COUNTS, "size")
        names = [n for n, allowed in self.ranges.items() if allowed.high in known]
        return tuple(n for n in names if str(self.reply[n]).partition(" ")[0].endswith("[]"))

    @property
    def count(self) -> str:
        """The name of the number of items that weights in a sum are a sum over; "" if none is."""
        summed = self.aggregate == "sum" and self.updates_sent and len(self.claims) == 1
        return self.claims[0] if summed else ""

    @property
    def shares_width(self) -> bool:
        """Whether a reply has a tensor whose width is the embedding width p."""
        texts = [d for d in self.reply.values() if isinstance(d, str)]
        matches = [match for d in texts if (match := _TENSOR.fullmatch(d))]
        return any("p" in re.split(r"[ ,]+", match["dims"]) for match in matches)

    @overload
    def __get__(self, method: None, owner: type) -> Phase: ...
    @overload
    def __get__(self, method: Any, owner: type) -> BoundPhase: ...
    def __get__(self, method: Any, owner: type) -> Phase | BoundPhase:
        return self if method is None else BoundPhase(self, method)

    # ---- checks ----
    def require_names(self, message: Message, receiver: str) -> None:
        """Raises a MessageError if a message lacks a name or has one that is not a parameter."""
        for name in sorted(self.required - message.keys()):
            raise MessageError(
                f"{receiver}: tensor {name!r} is missing in the message to {self.name!r}"
            )
        for name in sorted(message.keys() - set(self.parameters)):
            valid = ", ".join(self.parameters) or "nothing"
            raise MessageError(f"{receiver}: {self.name!r} does not take {name!r}; valid: {valid}")

    def require_ranges(
        self, method: Method, reply: Message, size: Mapping[str, int], sender: str
    ) -> None:
        """Raises a MessageError that names the sender if its reply is out of a declared range.

        Args:
            method: The method that the phase belongs to.
            reply: The reply, of the right schema.
            size: What the client said at the start of the run; see `said`.
            sender: The client and its phase, for errors.
        """
        contents = reply.values() if self.read_by else (reply,)
        for content in contents if self.ranges else ():
            for name, allowed in self.ranges.items():
                allowed.check(name, content[name].unsqueeze(0), method, (size,), lambda k: sender)

    def reply_schema(
        self,
        method: Method,
        facts: Facts,
        message: Message,
        model: Schema = (),
        reply: Message | None = None,
    ) -> Schema:
        """Returns the schema that a client's reply must have.

        Args:
            method: The method that the phase belongs to.
            facts: The facts of the run.
            message: What the client was sent.
            model: The schema of its model's weights.
            reply: The reply, if it is known.
        """
        rows: list[tuple[str, str, tuple[int, ...]]] = []
        for name, declared in self.reply.items():
            inner: Schema
            if isinstance(declared, Computed):
                inner = declared.schema(method, facts, message, reply)
            elif declared == "weights":
                inner = model
            elif declared[0] in "=~":
                sent = schema_of({"x": message[declared[1:]]})
                inner = tuple((key[2:], dtype, shape) for key, dtype, shape in sent)
            else:
                dtype, shape = _tensor_of(declared, method, facts, reply)
                inner = (("", dtype, shape),)
            for key, dtype, shape in inner:
                rows.append((f"{name}/{key}" if key else name, dtype, shape))
        return tuple(sorted(rows))

    def longest_schema(
        self, method: Method, facts: Facts, message: Message, model: Schema = ()
    ) -> Schema:
        """Returns the schema of the longest reply that `reply_schema` allows; -1: any length."""
        texts = {name: d for name, d in self.reply.items() if isinstance(d, str)}
        shapes = {
            name: _tensor_of(d, method, facts, None)[1]
            for name, d in texts.items()
            if d.startswith("bool[")
        }
        full: Message = {
            name: torch.ones(shape, dtype=torch.bool)
            for name, shape in shapes.items()
            if -1 not in shape
        }
        return self.reply_schema(method, facts, message, model, full or None)

    def peer_schema(
        self, method: Method, facts: Facts, message: Message, reply: Message | None, sender: str
    ) -> Schema:
        """Returns the schema that a client's peer messages, {receiver: message}, must have.

        A client chooses its receivers; the phase declares what each message holds. Without a reply,
        it is the schema of messages to all other clients.
        """
        content = self.reply_schema(method, facts, message)
        if reply is None:
            reply = {name: None for name in facts.clients if name != sender}
        for receiver in reply:
            if receiver not in facts.clients or receiver == sender:
                others = ", ".join(c for c in facts.clients if c != sender)
                raise MessageError(
                    f"client {sender!r} in {self.name!r}: writes to {receiver!r}, who is not "
                    f"another client; valid: {others}"
                )
        rows = [(f"{to}/{name}", dtype, shape) for to in reply for name, dtype, shape in content]
        return tuple(sorted(rows))


@dataclass(frozen=True)
class BoundPhase:
    """A phase of a method object: `method.train`."""

    phase: Phase
    method: Any

    @property
    def name(self) -> str:
        """The phase's name."""
        return self.phase.name

    def __call__(self, *args: Any, **message: Any) -> Message:
        """Runs the phase: takes a client and its message, returns the reply."""
        return self.phase.function(self.method, *args, **message)


def phase(**reply: Declaration) -> Callable[[Callable[..., Message]], Phase]:
    """Marks a client-side function `(self, client, **message) -> message`.

    reply: what the function answers, by name; see `fedloom.core.phase`.
    """
    for name, declared in reply.items():
        if isinstance(declared, Computed):
            continue
        known = declared == "weights" or declared[:1] in ("=", "~") or _TENSOR.fullmatch(declared)
        if not known:
            valid = "'=name', '~name', 'weights' or 'dtype[dims]', which a range may follow"
            raise ValueError(f"phase: {name}={declared!r} is none of {valid}")
        for counted in re.findall(r"\*([^,\] ]*)", declared):
            if not str(reply.get(counted, "")).startswith("bool["):
                raise ValueError(
                    f"phase: {name}={declared!r} counts the true entries of {counted!r}, "
                    "which must be declared as 'bool[dims]'"
                )

    def mark(function: Callable[..., Message]) -> Phase:
        signature = inspect.signature(function).parameters
        parameters = tuple(signature)[2:]
        if "secure" in parameters:
            raise ValueError(
                f"phase: {function.__name__!r} cannot take a tensor called 'secure': "
                "secure sums use that name"
            )
        needed = (n for n in parameters if signature[n].default is inspect.Parameter.empty)
        return _documented(Phase(function, reply, parameters, frozenset(needed)))

    return mark


def summed(marked: Phase) -> Phase:
    """Marks a phase of which the server needs only the sum of the replies: `server.sum(phase)`.

    A secure run reveals nothing but that sum.
    """
    return _documented(replace(marked, aggregate="sum"))


def runs_once(marked: Phase) -> Phase:
    """Marks a phase that changes what it starts from, or draws random numbers.

    It is for phases outside the rounds, and for those of methods with one round.

    A client that has answered too late is handed such a phase again, as its next order. With the
    same message it then gives the same answer, and does not run a second time. So a phase that is
    asked several times in a row, such as an epoch, has its number in its message.
    """
    return _documented(replace(marked, runs_once=True))


def averaged(by: str = "") -> Callable[[Phase], Phase]:
    """Marks a phase of which the server needs only the mean of the replies: `server.mean(phase)`.

    A secure run reveals nothing but that mean.

    by: the phase that answers a client's weight, one number. It is asked once. The default is equal
    weights.
    """

    def mark(marked: Phase) -> Phase:
        return _documented(replace(marked, aggregate="mean", weighted_by=by))

    return mark


def peer_messages(read_by: str, encrypted: bool = True) -> Callable[[Phase], Phase]:
    """Marks a phase that writes to other clients: it answers {receiver: message}.

    What the phase declares is what one message holds. `server.relay(phase)` delivers the messages
    to the phase `read_by`, as `inbox` = {sender: message}. The reader checks a message without
    knowing what its writer was sent, so "=name", "~name", "weights" and "*name" are not allowed.

    encrypted: whether a secure run encrypts the messages, so that the server cannot read what it
    relays. False is for messages that are encrypted or public already.
    """

    def mark(marked: Phase) -> Phase:
        for name, declared in marked.reply.items():
            text = declared if isinstance(declared, str) else "*"
            if text == "weights" or text[0] in "=~" or "*" in text:
                raise ValueError(
                    f"peer_messages: {name}={declared!r} depends on what the reader does not "
                    "know; declare 'dtype[dims]'"
                )
        return _documented(replace(marked, read_by=read_by, encrypted=encrypted))

    return mark


@lru_cache(maxsize=256)
def phases_of(method: type) -> Mapping[str, Phase]:
    """Returns the phases of a method class, by name."""
    found = {name: inspect.getattr_static(method, name) for name in dir(method)}
    return MappingProxyType({n: value for n, value in found.items() if isinstance(value, Phase)})


def _documented(marked: Phase) -> Phase:
    """Gives a phase the docstring of its function, for `help` and the documentation."""
    object.__setattr__(marked, "__doc__", marked.function.__doc__)
    return marked


def _tensor_of(
    declared: str, method: Method, facts: Facts, reply: Message | None
) -> tuple[str, tuple[int, ...]]:
    match = _TENSOR.fullmatch(declared)
    assert match is not None
    dims = [dim.strip() for dim in match["dims"].split(",") if dim.strip()]
    return match["dtype"], tuple(_length(dim, method, facts, reply) for dim in dims)


def _length(dim: str, method: Method, facts: Facts, reply: Message | None) -> int:
    if dim.startswith("*"):
        counted = None if reply is None else reply.get(dim[1:])
        if isinstance(counted, torch.Tensor) and counted.dtype == torch.bool:
            return int(counted.sum())
        return -1  # a missing or wrong tensor is refused by its own name
    if dim.isdigit():
        return int(dim)
    known = {
        "C": facts.num_classes,
        "d": facts.num_features,
        "K": facts.num_clients,
        "p": facts.width,
        "n": -1,
    }
    return known[dim] if dim in known else int(getattr(method, dim))


__all__ = [
    "BoundPhase",
    "Computed",
    "Phase",
    "Range",
    "averaged",
    "message_limit",
    "model_schema",
    "peer_messages",
    "phase",
    "phases_of",
    "runs_once",
    "said",
    "summed",
]
