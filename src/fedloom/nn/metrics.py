"""Metrics of node and graph classification."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedloom.data.graph import Graph
from fedloom.nn.operations import operation


def confusion(logits: Tensor, y: Tensor, mask: Tensor, num_classes: int) -> Tensor:
    """Returns counts [true class, predicted class] over the items in `mask`, int64."""
    cell = y[mask] * num_classes + logits[mask].argmax(1)
    return torch.bincount(cell, minlength=num_classes**2).view(num_classes, num_classes)


@operation
def held_out(logits: Tensor, graph: Graph) -> Tensor:
    """Returns confusion matrices of validation and test items, [2, classes, classes]."""
    masks = (graph.val, graph.test)
    return torch.stack([confusion(logits, graph.y, mask, graph.num_classes) for mask in masks])


# Stands for an undefined AUC in messages, which carry only finite numbers.
UNDEFINED = -1.0


def auc(logits: Tensor, y: Tensor, mask: Tensor) -> float:
    """Returns the one-against-rest area under the ROC curve, averaged over classes.

    Only classes with positive and negative items count. Without such a class it is UNDEFINED.
    """
    # Float32 would round confident predictions to 1.
    probability, labels = logits[mask].double().softmax(1), y[mask]
    areas = []
    for c in labels.unique().tolist():
        positive = probability[labels == c, c].contiguous()
        negative = probability[labels != c, c].sort().values
        if len(negative):
            below = torch.searchsorted(negative, positive)
            up_to = torch.searchsorted(negative, positive, right=True)
            # A tie counts as one half.
            areas.append((below + up_to).double().mean().item() / (2 * len(negative)))
    return sum(areas) / len(areas) if areas else UNDEFINED


def scores(matrices: Tensor) -> dict[str, list[float | None]]:
    """Returns accuracy and three means of F1 for each of several confusion matrices.

    The means are `f1_macro` over all classes, `f1_present` over the classes that have items, and
    `f1_weighted` by the number of items. A class without items or predictions counts as 0 in
    `f1_macro`. The scores of an empty matrix are None.

    matrices: [clients, C, C].
    """
    m = matrices.double()
    hit, true, predicted = m.diagonal(dim1=1, dim2=2), m.sum(2), m.sum(1)
    total, present = true.sum(1), (true > 0).double()
    f1 = 2 * hit / (true + predicted).clamp(min=1)
    at_least_one = total.clamp(min=1)
    values = {
        "accuracy": hit.sum(1) / at_least_one,
        "f1_macro": f1.mean(1),
        "f1_present": (f1 * present).sum(1) / present.sum(1).clamp(min=1),
        "f1_weighted": (f1 * true).sum(1) / at_least_one,
    }
    some = (total > 0).tolist()
    return {
        name: [v if s else None for v, s in zip(column.tolist(), some, strict=True)]
        for name, column in values.items()
    }


METRICS = ("accuracy", "f1_macro", "f1_present", "f1_weighted", "auc", "val_accuracy")


def all_scores(val: Tensor, test: Tensor, areas: Tensor) -> dict[str, list[float | None]]:
    """Returns a list of each of the `METRICS`, with one value per client.

    A metric that is not defined is None.

    Args:
        val: Confusion matrices of validation items, [clients, C, C].
        test: Confusion matrices of test items, [clients, C, C].
        areas: AUCs of validation and test items, [clients, 2].
    """
    auc = [None if area < 0 else area for area in areas[:, 1].tolist()]
    return {**scores(test), "auc": auc, "val_accuracy": scores(val)["accuracy"]}


def additive_scores(val: Tensor, test: Tensor, areas: Tensor, items: int) -> Tensor:
    """Returns a client's METRICS as rows (items · value, items, value, 1), one per metric.

    The sum of these rows over clients is enough to compute both means; see `mean_scores`.
    """
    columns = all_scores(*(t.unsqueeze(0) for t in (val, test, areas))).values()
    rows = [(0.0,) * 4 if v is None else (items * v, items, v, 1.0) for (v,) in columns]
    return torch.tensor(rows, dtype=torch.float64)


def mean_scores(total: Tensor) -> tuple[dict[str, float | None], dict[str, float | None]]:
    """Returns the METRICS averaged by size, and averaged over clients.

    total: the sum of `additive_scores` over clients.
    """
    rows = dict(zip(METRICS, total.tolist(), strict=True))
    by_size = {m: row[0] / row[1] if row[1] > 0 else None for m, row in rows.items()}
    return by_size, {m: row[2] / row[3] if row[3] > 0 else None for m, row in rows.items()}


def average(values: list[float | None], weights: list[float]) -> float | None:
    """Returns the weighted mean over the values that are not None, or None if all are."""
    pairs: list[tuple[Any, float]] = [
        (v, w) for v, w in zip(values, weights, strict=True) if v is not None
    ]
    total = sum(w for _, w in pairs)
    return sum(v * w for v, w in pairs) / total if total else None
