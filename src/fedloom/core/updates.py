"""Updates: what the replies of a phase change, as vectors.

A reply may hold weights: what its phase declares as "=name", "~name" or "weights". The update of a
client is its difference to what it was sent ("~name"), or what it sent ("=name", "weights").
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedloom.core.message import Batch, Message, Stack, flatten, schema_of, unflatten
from fedloom.core.phase import Phase
from fedloom.core.replies import Replies
from fedloom.core.shared_rows import SharedRows


class Updates:
    """The updates in the replies of one exchange.

    Args:
        phase: The phase that was asked.
        sent: What each client was sent.
    """

    def __init__(self, phase: Phase, sent: Mapping[str, Message]):
        self.phase, self._sent = phase, sent
        alike = len({id(message) for message in sent.values()}) == 1
        self._common = next(iter(sent.values())) if alike else None  # what all were sent

    def comparable(self, replies: Replies, name: str) -> bool:
        """Returns whether there are two replies or more, all with the same tensors under a name."""
        if len(replies) < 2 or isinstance(replies.messages, Batch):
            return len(replies) > 1
        parts = [reply.get(name) for reply in replies.values()]
        known = all(part is not None for part in parts)
        return known and len({schema_of({"x": part}) for part in parts}) == 1

    def stacks(self, replies: Replies, name: str) -> list[tuple[str, Stack]]:
        """Returns the floats under a name, stacked over clients, by their full names."""
        if isinstance(replies.messages, Batch):
            found = [
                (k, s) for k, s in replies.messages.stacks.items() if k.partition("/")[0] == name
            ]
        else:
            rows = [flatten({name: reply[name]}) for reply in replies.values()]
            found = [(key, torch.stack([row[key].detach() for row in rows])) for key in rows[0]]
        return [(k, s) for k, s in found if s.dtype.is_floating_point and s.shape.numel()]

    def base(
        self, name: str, key: str, clients: Sequence[str], shared: bool = False
    ) -> Tensor | None:
        """Returns what the clients were sent for a tensor: [1, ...] if it is the same for all.

        Otherwise it is [clients, ...], or None if `shared` is set. It is None if an update is no
        difference.
        """
        original = self.phase.updates_sent.get(name, "")
        if not original:
            return None
        parts = [original, *key.split("/")[1:]]

        def of(message: Message) -> Any:
            found: Any = message
            for part in parts:
                found = found[part]
            return found

        if self._common is not None:
            return of(self._common).unsqueeze(0)
        return None if shared else torch.stack([of(self._sent[c]) for c in clients])

    def matrix(self, replies: Replies, name: str) -> Tensor:
        """Returns the updates under a name as rows, [clients, entries]."""
        stacks, clients = self.stacks(replies, name), list(replies)
        return torch.cat([rows(s, None, self.base(name, k, clients)) for k, s in stacks], 1)

    def replaced(self, replies: Replies, name: str, updates: Mapping[int, Tensor]) -> Replies:
        """Returns the replies with other updates of some clients.

        Args:
            replies: The replies.
            name: The name that the updates are under.
            updates: {place of the client: its update, [entries]}.
        """
        clients, stacks = list(replies), self.stacks(replies, name)
        changed: dict[str, Stack] = {}
        start = 0
        for key, stack in stacks:
            dense = stack.dense() if isinstance(stack, SharedRows) else stack.clone()
            size, base = math.prod(dense.shape[1:]), self.base(name, key, clients)
            for k, update in updates.items():
                row = update[start : start + size].reshape(dense.shape[1:]).to(dense.dtype)
                dense[k] = row if base is None else base[min(k, len(base) - 1)] + row
            changed[key], start = dense, start + size
        if isinstance(replies.messages, Batch):
            return replies.replaced(Batch(clients, {**replies.messages.stacks, **changed}))
        messages = dict(replies.messages)
        for k in updates:
            flat = flatten(messages[clients[k]])
            messages[clients[k]] = unflatten(flat | {key: s[k] for key, s in changed.items()})
        return replies.replaced(messages)


def squares(stack: Stack, base: Tensor | None) -> Tensor:
    """Returns the squared norms of the clients' differences to the base, [clients], in float64."""
    if isinstance(stack, SharedRows) and (base is None or len(base) == 1):
        stored, sharing = stack.stored, stack.sharing
        if base is not None:  # in place: these are the largest tensors of a round
            stored = base[0].index_select(0, sharing.column).sub_(stored)
        of_row = torch.linalg.vector_norm(stored, dim=1).double().square()
        return of_row.index_select(0, sharing.index.flatten()).view(sharing.index.shape).sum(1)
    return torch.linalg.vector_norm(rows(stack, None, base), dim=1).double().square()


def rows(stack: Stack, chosen: Tensor | None, base: Tensor | None) -> Tensor:
    """Returns the clients' differences to the base, flat, [clients, entries].

    Args:
        stack: The tensors of the clients, [clients, ...].
        chosen: The places along the second axis that are taken. None: all.
        base: The output of `Updates.base`.
    """
    if isinstance(stack, SharedRows):
        index = stack.sharing.index if chosen is None else stack.sharing.index[:, chosen]
        dense = stack.stored.index_select(0, index.flatten()).view(*index.shape, stack.shape[-1])
    else:
        dense = stack if chosen is None or stack.dim() < 2 else stack.index_select(1, chosen)
    if base is not None:
        dense = dense - (base if chosen is None or base.dim() < 2 else base[:, chosen])
    return dense.reshape(len(dense), -1)
