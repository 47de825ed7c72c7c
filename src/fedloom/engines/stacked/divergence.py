"""The batched form of `weighted_divergence`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from fedloom.engines.stacked.lockstep import Batched, Context
from fedloom.engines.stacked.matmul import split
from fedloom.engines.stacked.tensors import join_rows, split_rows


class BatchedWeightedDivergence(Batched):
    """Divergences of several clients' logits from constant targets.

    mean_i w_i KL(t_i ‖ p_i) = Σ_ic a_ic (log t_ic − log p_ic) with a_ic = w_i t_ic / items. Only
    the logits change from step to step.
    """

    def key(self, *args: Any) -> Hashable:
        """Logits with the same number of classes."""
        logits, target, weight = args
        constant = not (target.requires_grad or weight.requires_grad)
        return logits.shape[1] if constant and len(logits) else None

    def batch(self, calls: Sequence[tuple[Any, ...]], context: Context) -> list[Tensor]:
        """One softmax of all items, summed by client."""
        logits, targets, weights = zip(*calls, strict=True)
        sizes = [len(target) for target in targets]

        def make() -> tuple[Tensor, Tensor]:
            shares = [w.expand(size) / size for w, size in zip(weights, sizes, strict=True)]
            target = torch.cat(targets)
            factor = torch.cat(shares).unsqueeze(1) * target
            return factor, _sums(torch.special.xlogy(factor, target), sizes)

        factor, constant = context.group.cached("divergence", (*targets, *weights), make)
        log_p = join_rows(logits).log_softmax(1)
        return split_rows(constant - _sums(factor * log_p, sizes))


def _sums(entries: Tensor, sizes: list[int]) -> Tensor:
    """Returns the sum of each client's rows, [clients]."""
    return torch.stack([rows.sum() for rows in split(entries, sizes)])
