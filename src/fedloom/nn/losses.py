"""Losses of node and graph classification, and terms of the predictions themselves."""

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


@operation
def probabilities(logits: Tensor) -> Tensor:
    """Returns the softmax of each row of logits [items, classes]."""
    return logits.softmax(1)


@operation
def entropy(logits: Tensor) -> Tensor:
    """Returns the entropy of the predictions, averaged over items."""
    log_p = logits.log_softmax(1)
    return -(log_p.exp() * log_p).sum(1).mean()


@operation
def hsic(one: Tensor, other: Tensor) -> Tensor:
    """Returns HSIC of two [items, C] under linear kernels: how much one says about the other.

    It is ‖oneᵀ H other‖² / items² with H = I − 1 1ᵀ / items. Centring one of them is enough.
    """
    return (one.T @ (other - other.mean(0)) / len(one)).square().sum()
