"""Tasks: the loss that training minimises and the scores that evaluation reports, for node and graph classification."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from scipy.stats import rankdata
from torch import Tensor


def cross_entropy(logits: Tensor, y: Tensor, mask: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy over the items in `mask`. With no such item the loss is 0, with a gradient of 0 to everything."""
    if not mask.any():
        return logits.sum() * 0.0
    return F.cross_entropy(logits[mask], y[mask], reduction=reduction)


def confusion(logits: Tensor, y: Tensor, mask: Tensor, num_classes: int) -> Tensor:
    """Counts [true class, predicted class] over the items in `mask`, int64."""
    cell = y[mask] * num_classes + logits[mask].argmax(1)
    return torch.bincount(cell, minlength=num_classes**2).view(num_classes, num_classes)


UNDEFINED = -1.0  # an AUC that does not exist travels as this: messages carry finite numbers only


def auc(logits: Tensor, y: Tensor, mask: Tensor) -> float:
    """One-against-rest area under the ROC curve, mean over the classes that have both kinds of item; UNDEFINED if none has."""
    scores, labels = logits[mask].softmax(1).numpy(), y[mask]
    if len(labels) == 0:
        return UNDEFINED
    is_class = torch.zeros(scores.shape, dtype=torch.bool).scatter_(1, labels[:, None], True).numpy()
    positive = is_class.sum(0)
    negative = len(labels) - positive
    usable = (positive > 0) & (negative > 0)
    if not usable.any():
        return UNDEFINED
    rank_sum = (rankdata(scores, axis=0) * is_class).sum(0)[usable]  # Mann-Whitney: ties share their rank
    p, n = positive[usable], negative[usable]
    return float(((rank_sum - p * (p + 1) / 2) / (p * n)).mean())


def scores(matrix: Tensor) -> dict[str, float | None]:
    """From a confusion matrix: accuracy and F1 (macro over all classes, macro over present ones, support-weighted).

    Everything is None when the matrix is empty. A class without items or predictions counts 0 in `f1_macro`.
    """
    m = matrix.double()
    total = m.sum().item()
    if total == 0:
        return dict.fromkeys(("accuracy", "f1_macro", "f1_present", "f1_weighted"))
    hit, true, predicted = m.diagonal(), m.sum(1), m.sum(0)
    f1 = 2 * hit / (true + predicted).clamp(min=1)
    return {
        "accuracy": hit.sum().item() / total,
        "f1_macro": f1.mean().item(),
        "f1_present": f1[true > 0].mean().item(),
        "f1_weighted": ((f1 * true).sum() / total).item(),
    }


def average(values: list[float | None], weights: list[float]) -> float | None:
    """Weighted mean over the clients that have a value; None if nobody has."""
    pairs: list[tuple[Any, float]] = [(v, w) for v, w in zip(values, weights, strict=True) if v is not None]
    total = sum(w for _, w in pairs)
    return sum(v * w for v, w in pairs) / total if total else None
