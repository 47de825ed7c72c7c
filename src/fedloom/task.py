"""Tasks: the loss that training minimises and the scores that evaluation reports, for node and graph classification."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def cross_entropy(logits: Tensor, y: Tensor, mask: Tensor, reduction: str = "mean", of_class: Tensor | None = None) -> Tensor:
    """Cross-entropy over the items in `mask`, classes weighted by `of_class` if given. With no such item: 0, and a gradient of 0."""
    if not mask.any():
        return logits.sum() * 0.0
    return F.cross_entropy(logits[mask], y[mask], weight=of_class, reduction=reduction)


def confusion(logits: Tensor, y: Tensor, mask: Tensor, num_classes: int) -> Tensor:
    """Counts [true class, predicted class] over the items in `mask`, int64."""
    cell = y[mask] * num_classes + logits[mask].argmax(1)
    return torch.bincount(cell, minlength=num_classes**2).view(num_classes, num_classes)


UNDEFINED = -1.0  # an AUC that does not exist travels as this: messages carry finite numbers only


def auc(logits: Tensor, y: Tensor, mask: Tensor) -> float:
    """One-against-rest area under the ROC curve, mean over the classes that have both kinds of item; UNDEFINED if none has."""
    probability, labels = logits[mask].double().softmax(1), y[mask]  # float32 rounds confident ones to 1
    areas = []
    for c in labels.unique().tolist():
        positive, negative = probability[labels == c, c].contiguous(), probability[labels != c, c].sort().values
        if len(negative):
            below, up_to = (torch.searchsorted(negative, positive, right=right) for right in (False, True))
            areas.append((below + up_to).double().mean().item() / (2 * len(negative)))  # a tie counts a half
    return sum(areas) / len(areas) if areas else UNDEFINED


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


METRICS = ("accuracy", "f1_macro", "f1_present", "f1_weighted", "auc", "val_accuracy")


def all_scores(val: Tensor, test: Tensor, areas: Tensor) -> dict[str, float | None]:
    """A client's `METRICS` from its confusion matrices and AUCs (validation, test); None where one is not defined."""
    area = areas[1].item()
    return {**scores(test), "auc": None if area < 0 else area, "val_accuracy": scores(val)["accuracy"]}


def scores_to_add(val: Tensor, test: Tensor, areas: Tensor, items: int) -> Tensor:
    """A client's METRICS in a form of which the sum over clients gives both means: [metric, (items · value, items, value, 1)]."""
    rows = [(0.0,) * 4 if v is None else (items * v, items, v, 1.0) for v in all_scores(val, test, areas).values()]
    return torch.tensor(rows, dtype=torch.float64)


def added_scores(total: Tensor) -> tuple[dict[str, float | None], dict[str, float | None]]:
    """From the sum of `scores_to_add`: the METRICS averaged by size, and averaged over clients."""
    rows = dict(zip(METRICS, total.tolist(), strict=True))
    by_size = {m: row[0] / row[1] if row[1] > 0 else None for m, row in rows.items()}
    return by_size, {m: row[2] / row[3] if row[3] > 0 else None for m, row in rows.items()}


def average(values: list[float | None], weights: list[float]) -> float | None:
    """Weighted mean over the clients that have a value; None if nobody has."""
    pairs: list[tuple[Any, float]] = [(v, w) for v, w in zip(values, weights, strict=True) if v is not None]
    total = sum(w for _, w in pairs)
    return sum(v * w for v, w in pairs) / total if total else None
