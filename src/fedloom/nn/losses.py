"""Losses of node and graph classification."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fedloom.data.graph import Graph
from fedloom.nn.operations import operation


def cross_entropy(
    logits: Tensor,
    y: Tensor,
    mask: Tensor,
    reduction: str = "mean",
    of_class: Tensor | None = None,
) -> Tensor:
    """Returns the cross-entropy over the items in `mask`.

    An empty mask gives 0 and a gradient of 0.

    Args:
        logits: [items, classes].
        y: Labels [items].
        mask: The items that count, [items] bool.
        reduction: "mean" or "sum".
        of_class: Class weights [classes].
    """
    if not mask.any():
        return logits.sum() * 0.0
    return F.cross_entropy(logits[mask], y[mask], weight=of_class, reduction=reduction)


@operation
def training_loss(logits: Tensor, graph: Graph, reduction: str, of_class: Tensor | None) -> Tensor:
    """Returns the cross-entropy over a graph's training items; see `cross_entropy`."""
    return cross_entropy(logits, graph.y, graph.train, reduction, of_class)


@operation
def weighted_divergence(logits: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Returns mean_i w_i KL(target_i ‖ softmax(logits_i)).

    Args:
        logits: [items, classes].
        target: Probabilities [items, classes], constants.
        weight: w [items], or one number for all items, constants.
    """
    each = F.kl_div(logits.log_softmax(1), target, reduction="none").sum(1)
    return (weight * each).mean()
