"""Replies: the messages that clients returned, and their sums and means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from fedloom.core.message import Batch, Message, Stack, tree_map, unflatten
from fedloom.core.shared_rows import SharedRows
from fedloom.errors import MessageError

LARGEST_WEIGHT = 2.0**53  # of a client in a mean; a float64 does not count further


class Combines(Protocol):
    """How replies become one mean or sum; see `fedloom.core.combining`."""

    def mean(self, replies: Replies, weight: Mapping[str, Tensor] | None) -> Message:
        """Returns what stands for the weighted mean."""

    def sum(self, replies: Replies) -> Message:
        """Returns what stands for the sum."""


class Replies(Mapping[str, Message]):
    """{client: message} of the clients that answered, in client order.

    combiner: how they are combined. None: by the plain mean and sum.
    """

    def __init__(self, messages: Mapping[str, Message], combiner: Combines | None = None):
        self.messages, self.combiner = messages, combiner

    def replaced(self, messages: Mapping[str, Message]) -> Replies:
        """Returns other messages of these clients, or of some of them, combined as these are."""
        return Replies(messages, self.combiner)

    def combined_by(self, combiner: Combines) -> Replies:
        """Returns these replies with a combiner."""
        return Replies(self.messages, combiner)

    def __getitem__(self, client: str) -> Message:
        return self.messages[client]

    def __iter__(self) -> Iterator[str]:
        return iter(self.messages)

    def __len__(self) -> int:
        return len(self.messages)

    def column(self, name: str) -> dict[str, Any]:
        """Returns {client: what it sent under `name`}."""
        return {client: message[name] for client, message in self.items()}

    def stack(self, name: str) -> Tensor:
        """Returns the clients' tensors of that name, stacked along a new first axis."""
        if isinstance(self.messages, Batch):
            return self.messages.dense(name).clone()
        return torch.stack(list(self.column(name).values()))

    def sum(self) -> Message:
        """Returns the sum of all messages, name by name, added in client order."""
        if not self:
            raise MessageError("nobody answered: there is nothing to add up")
        if self.combiner is not None:
            return self.combiner.sum(self)
        if isinstance(self.messages, Batch):

            def total_of(stack: Stack) -> Tensor:
                if isinstance(stack, SharedRows):
                    return stack.mean(torch.ones(stack.shape[0]))
                return stack.sum(0, dtype=stack.dtype)

            stacks = self.messages.stacks.items()
            return unflatten({name: total_of(stack) for name, stack in stacks})
        first, *rest = self.values()
        total = tree_map(torch.clone, first)
        for message in rest:
            tree_map(Tensor.add_, total, message)
        return total

    def mean(self, weight: Mapping[str, Tensor] | None = None) -> Message:
        """Returns Σ_k w_k · message_k with w_k = weight_k / Σ weight. Default: equal weights."""
        share = self.normalized(weight)
        if self.combiner is not None:
            return self.combiner.mean(self, weight)
        if isinstance(self.messages, Batch):
            by = torch.tensor(list(share.values()))

            def mean(stack: Stack) -> Tensor:
                if isinstance(stack, SharedRows):
                    return stack.mean(by)
                floats = stack if stack.is_floating_point() else stack.float()
                return torch.tensordot(by.to(floats.dtype), floats, 1)

            return unflatten({name: mean(stack) for name, stack in self.messages.stacks.items()})
        return Replies({c: tree_map(lambda t, w=share[c]: t * w, m) for c, m in self.items()}).sum()

    def normalized(self, weight: Mapping[str, Tensor] | None = None) -> dict[str, float]:
        """Returns the weights of the clients that answered, scaled to sum to 1.

        Raises a MessageError if a weight is negative or not finite, or if all are 0.
        """
        if not self:
            raise MessageError("nobody answered: there is nothing to average")
        raw = {c: 1.0 if weight is None else float(weight[c]) for c in self}
        for client, value in raw.items():
            require_weight(client, value)
        total = sum(raw.values())
        if total <= 0:
            raise MessageError("weights: all clients that answered have weight 0")
        return {c: value / total for c, value in raw.items()}


def require_weight(client: str, value: float) -> None:
    """Raises a MessageError that names the client if a weight is not valid."""
    if not 0 <= value <= LARGEST_WEIGHT:
        raise MessageError(
            f"client {client!r}: weight is {value}, must be finite, not negative and at most 2^53"
        )
