"""Losses: what training minimises, for node and graph classification."""

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
    """Cross-entropy over the items in `mask`. With no such item: 0, and a gradient of 0.

    of_class: class weights.
    """
    if not mask.any():
        return logits.sum() * 0.0
    return F.cross_entropy(logits[mask], y[mask], weight=of_class, reduction=reduction)


@operation
def training_loss(logits: Tensor, graph: Graph, reduction: str, of_class: Tensor | None) -> Tensor:
    """Cross-entropy over a graph's training items; see `cross_entropy`."""
    return cross_entropy(logits, graph.y, graph.train, reduction, of_class)
