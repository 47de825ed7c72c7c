"""Replies: what the clients answered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fedloom.core.message import Batch, Message, tree_map, unflatten
from fedloom.errors import MessageError

LARGEST_WEIGHT = 2.0**53  # of a client in a mean: larger counts are not exact


class Replies(Mapping[str, Message]):
    """What came back: a message per client that answered, in client order."""

    def __init__(self, messages: Mapping[str, Message]):
        self.messages = messages

    def __getitem__(self, client: str) -> Message:
        return self.messages[client]

    def __iter__(self) -> Iterator[str]:
        return iter(self.messages)

    def __len__(self) -> int:
        return len(self.messages)

    def column(self, name: str) -> dict[str, Any]:
        """{client: what it sent under `name`}."""
        return {client: message[name] for client, message in self.items()}

    def stack(self, name: str) -> Tensor:
        """The clients' tensors of that name, stacked along a new first axis."""
        if isinstance(self.messages, Batch):
            return self.messages.stacks[name].clone()
        return torch.stack(list(self.column(name).values()))

    def sum(self) -> Message:
        """The sum of all messages, name by name, added in client order."""
        if not self:
            raise MessageError("nobody answered: there is nothing to add up")
        if isinstance(self.messages, Batch):
            return unflatten(
                {
                    name: stack.sum(0, dtype=stack.dtype)
                    for name, stack in self.messages.stacks.items()
                }
            )
        first, *rest = self.values()
        total = tree_map(torch.clone, first)
        for message in rest:
            tree_map(Tensor.add_, total, message)
        return total

    def mean(self, weight: Mapping[str, Tensor] | None = None) -> Message:
        """Σ_k w_k · message_k with w_k = weight_k / Σ weight (all equal if none are given)."""
        share = self.normalized(weight)
        if isinstance(self.messages, Batch):
            by = torch.tensor(list(share.values()))
            floats = {
                name: stack if stack.is_floating_point() else stack.float()
                for name, stack in self.messages.stacks.items()
            }
            return unflatten(
                {
                    name: torch.tensordot(by.to(stack.dtype), stack, 1)
                    for name, stack in floats.items()
                }
            )
        return Replies({c: tree_map(lambda t, w=share[c]: t * w, m) for c, m in self.items()}).sum()

    def normalized(self, weight: Mapping[str, Tensor] | None = None) -> dict[str, float]:
        """The answering clients' weights, scaled to sum to 1; refuses negative, non-finite and all-zero ones."""
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
    if not 0 <= value <= LARGEST_WEIGHT:
        raise MessageError(
            f"client {client!r}: weight is {value}, must be finite, not negative and at most 2^53"
        )
