"""Combining: how the weights that clients send become one mean or sum.

    replies ─► screened: norms are compared, long updates are shortened ─► the method
    Replies.mean, Replies.sum ─► weights are capped, then the rule of `fedloom.core.robust`

It concerns weights; `fedloom.core.updates` says what the update of a client is. In a sum with a
count beside it, such as FedSGD's gradients and the number of labelled items, updates are means over
these items. Other tensors keep their sums. In a mean, the rule also combines other floats.

A sum of "~name" is not a sum of updates (FedSpray scales each by its counts). It stays as it is.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor

from fedloom.core.message import Message, flatten, unflatten
from fedloom.core.phase import Phase
from fedloom.core.replies import Replies
from fedloom.core.robust import Robustness, median_of
from fedloom.core.updates import Updates, rows, squares
from fedloom.errors import ConfigError

AGREED = 0.25  # the median cosine to the median update, from which on updates agree
TRUSTED = 0.25  # of the median score, below which a client is left out
SKETCH = 2048  # about how many entries of an update the cosines are computed from


class Outliers(NamedTuple):
    """How the updates of a phase compare with each other.

    Attributes:
        phase: The phase.
        norm: {client: the norm of its update, divided by the median norm}.
        cosine: {client: the cosine of its update and the median of each entry}. It is computed
            from about `SKETCH` entries.
        clipped: The clients whose updates were shortened.
        left_out: The clients whose updates were not used; see `Reputation`.
    """

    phase: str
    norm: dict[str, float]
    cosine: dict[str, float]
    clipped: tuple[str, ...]
    left_out: tuple[str, ...] = ()

    def entry(self) -> dict[str, Any]:
        """Returns it as JSON: [norm, cosine] of each client."""
        pairs = {c: [self.norm[c], self.cosine[c]] for c in self.norm}
        of_some = {"clipped": list(self.clipped), "left_out": list(self.left_out)}
        return {"phase": self.phase, "clients": pairs, **of_some}


class Reputation:
    """How far the updates of each client have pointed in the direction of the others.

    The score of a client is its mean cosine to the median update, over the rounds in which updates
    agree: the median cosine is at least `AGREED`. These are the early rounds. There a lie against
    the others is easy to see. Later, honest updates differ as much as lies do. A client is left out
    while its score is below `TRUSTED` times the median score.

    state: {client: [sum of cosines, rounds]}; it belongs to the server's state.
    """

    def __init__(self, state: dict[str, Tensor]):
        self._state = state

    def add(self, cosine: Mapping[str, float]) -> None:
        """Adds the cosines of a round, if updates agree in it."""
        if statistics.median(cosine.values()) < AGREED:
            return
        for client, value in cosine.items():
            known = self._state.get(client, torch.zeros(2, dtype=torch.float64))
            self._state[client] = known + torch.tensor([value, 1.0], dtype=torch.float64)

    def left_out(self, clients: Iterable[str]) -> list[str]:
        """Returns the clients among these that are left out now."""
        scores = {c: float(total / rounds) for c, (total, rounds) in self._state.items()}
        usual = statistics.median(scores.values()) if scores else 0.0
        return [c for c in clients if c in scores and scores[c] < TRUSTED * usual]


class Combiner:
    """Combines the replies of one exchange.

    Args:
        terms: How the server protects itself.
        phase: The phase that was asked.
        sent: What each client was sent.
        rng: Returns the random stream that divides clients into groups.
        note: Called when the rule has combined weights.
    """

    def __init__(
        self,
        terms: Robustness,
        phase: Phase,
        sent: Mapping[str, Message],
        rng: Callable[[], Generator],
        note: Callable[[], None],
    ):
        self.terms, self.phase, self._rng, self._note = terms, phase, rng, note
        self._updates = Updates(phase, sent)

    # ---- screening ----
    def screen(
        self, replies: Replies, reputation: Reputation | None = None
    ) -> tuple[Replies, Outliers | None]:
        """Compares the clients' updates and shortens to the median those that are far longer.

        Returns the replies, unchanged if nothing is too long, and how the updates compare; None if
        they cannot be compared.

        reputation: leaves out clients. None: nobody is left out.
        """
        outliers: Outliers | None = None
        clients, updates = list(replies), self._updates
        for name in self.phase.updates_sent:
            if not updates.comparable(replies, name):
                continue
            norms = self._norms(replies, name)
            middle = float(median_of(norms))
            if not middle > 0:
                continue
            ratio, limit = norms / middle, self.terms.longest(self.phase.aggregate == "sum")
            long = (ratio > limit).nonzero().flatten().tolist() if limit else []
            if outliers is None:
                away = reputation.left_out(clients) if reputation else []
                cosines = self._cosines(replies, name, [c not in away for c in clients])
                outliers = Outliers(
                    self.phase.name,
                    dict(zip(clients, _rounded(ratio), strict=True)),
                    dict(zip(clients, _rounded(cosines), strict=True)),
                    tuple(clients[k] for k in long),
                )
            if long:
                X = updates.matrix(replies, name)
                shorter = {k: X[k] / float(ratio[k]) for k in long}
                replies = updates.replaced(replies, name, shorter)
        if reputation is not None and outliers is not None:
            reputation.add(outliers.cosine)
            away = reputation.left_out(clients)
            outliers = outliers._replace(left_out=tuple(away))
            if away:
                replies = replies.replaced({c: replies[c] for c in clients if c not in away})
        return replies, outliers

    def _norms(self, replies: Replies, name: str) -> Tensor:
        """Returns the norms of the clients' updates, [clients]."""
        clients, updates = list(replies), self._updates
        total = torch.zeros(len(replies), dtype=torch.float64)
        for key, stack in updates.stacks(replies, name):
            total += squares(stack, updates.base(name, key, clients))
        return total.sqrt() / self._per_item(replies)

    def _cosines(self, replies: Replies, name: str, among: list[bool]) -> Tensor:
        """Returns the cosines of the clients' updates and the median update, from some rows.

        among: whether a client counts in the median.
        """
        clients, updates = list(replies), self._updates
        stacks = updates.stacks(replies, name)
        step = max(1, sum(math.prod(stack.shape[1:]) for _, stack in stacks) // SKETCH)
        parts = []
        for key, stack in stacks:
            chosen = None  # biases are few
            if len(stack.shape) > 2:
                chosen = torch.arange(0, stack.shape[1], min(step, stack.shape[1]))
            parts.append(rows(stack, chosen, updates.base(name, key, clients)))
        X = torch.cat(parts, 1) / self._per_item(replies).unsqueeze(-1).float()
        counted = X if all(among) else X[torch.tensor(among)]
        return torch.cosine_similarity(X, _lower_median(counted).unsqueeze(0), dim=1)

    def _per_item(self, replies: Replies) -> Tensor:
        """Returns the numbers that updates are divided by: counts of items, or 1."""
        return self._counts(replies).clamp(min=1) if self.phase.count else torch.ones(1)

    # ---- means and sums ----
    def mean(self, replies: Replies, weight: Mapping[str, Tensor] | None) -> Message:
        """Returns what stands for the weighted mean of the replies."""
        plain, weight = Replies(replies.messages), self._capped(replies, weight)
        mean = plain.mean(weight)
        if self.terms.is_mean:
            return mean
        share = torch.tensor(list(plain.normalized(weight).values()), dtype=torch.float64)
        flat = flatten(mean)
        for name in next(iter(replies.values())):
            flat |= self._combined(replies, name, share, 1.0)
        return unflatten(flat)

    def sum(self, replies: Replies) -> Message:
        """Returns what stands for the sum of the replies: the mean times their number or count."""
        count, plain = self.phase.count, Replies(replies.messages)
        if count and (capped := self._capped_counts(replies)) is not None:
            plain = Replies({c: {**plain[c], count: capped[k]} for k, c in enumerate(plain)})
        total = plain.sum()
        if self.terms.is_mean:
            return total
        if count:
            of_each = plain.stack(count).double()
        else:
            of_each = torch.ones(len(replies), dtype=torch.float64)
        many = float(of_each.sum())
        flat = flatten(total)
        for name in self.phase.updates_sent:
            flat |= self._combined(replies, name, of_each / max(many, 1.0), many)
        return unflatten(flat)

    def _combined(
        self, replies: Replies, name: str, share: Tensor, times: float
    ) -> dict[str, Tensor]:
        """Returns the rule's mean of the floats under a name, times a number, flat."""
        updates, clients = self._updates, list(replies)
        if not updates.comparable(replies, name):
            if len(replies) < 2:
                return {}
            raise ConfigError(
                f"run.aggregation: what clients answer to {self.phase.name!r} differs in shape; "
                "valid: mean"
            )
        stacks = updates.stacks(replies, name)
        if not stacks:
            return {}
        bases = [updates.base(name, key, clients, shared=True) for key, _ in stacks]
        X = torch.cat([rows(s, None, b) for (_, s), b in zip(stacks, bases, strict=True)], 1)
        if name in self.phase.updates_sent:
            self._note()
            if self.phase.count:
                counts = self._counts(replies)
                X = (X / counts.clamp(min=1).to(X.dtype).unsqueeze(1))[counts > 0]
                share = share[counts > 0]
        if not len(X):
            return {}
        whole = self.terms.apply(X, share, self._rng()) * times
        made, start = {}, 0
        for (key, stack), base in zip(stacks, bases, strict=True):
            shape = stack.shape[1:]
            part = whole[start : start + math.prod(shape)].reshape(shape).to(stack.dtype)
            made[key] = part if base is None else base[0] + part
            start += math.prod(shape)
        return made

    def _capped(
        self, replies: Replies, weight: Mapping[str, Tensor] | None
    ) -> Mapping[str, Tensor] | None:
        """Returns the weights, none larger than `cap_weights` times the median."""
        if weight is None:
            return None
        raw = torch.tensor([float(weight[c]) for c in replies], dtype=torch.float64)
        limit = self._largest(raw)
        if not bool((raw > limit).any()):
            return weight
        return dict(zip(replies, raw.clamp(max=limit), strict=True))

    def _capped_counts(self, replies: Replies) -> Tensor | None:
        """Returns the counts, capped as weights are; None if none is too large."""
        counts = self._counts(replies)
        limit = self._largest(counts)
        return counts.clamp(max=limit).long() if bool((counts > limit).any()) else None

    def _largest(self, weights: Tensor) -> float:
        """Returns the largest weight that a client may have."""
        limit = self.terms.cap_weights * float(median_of(weights))
        return limit if limit > 0 and len(weights) > 2 else math.inf

    def _counts(self, replies: Replies) -> Tensor:
        return replies.stack(self.phase.count).double()


def _lower_median(X: Tensor) -> Tensor:
    """Returns X.median(0).values of finite numbers. NumPy finds it 3 to 8 times as quickly."""
    k = (len(X) - 1) // 2
    return torch.from_numpy(np.partition(X.detach().cpu().numpy(), k, axis=0)[k]).to(X.device)


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 4) for value in values.tolist()]
