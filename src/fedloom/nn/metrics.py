"""Metrics of node and graph classification."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.data.graph import Graph
from fedloom.nn.metric_names import METRICS, PROBABILISTIC
from fedloom.nn.operations import operation

ECE_BINS = 15
Array = np.ndarray


def confusion(logits: Tensor, y: Tensor, mask: Tensor, num_classes: int) -> Tensor:
    """Returns counts [true class, predicted class] over the items in `mask`, int64."""
    cell = y[mask] * num_classes + logits[mask].argmax(1)
    return torch.bincount(cell, minlength=num_classes**2).view(num_classes, num_classes)


@operation
def held_out(logits: Tensor, graph: Graph) -> Tensor:
    """Returns confusion matrices of validation and test items, [2, classes, classes]."""
    masks = (graph.val, graph.test)
    return torch.stack([confusion(logits, graph.y, mask, graph.num_classes) for mask in masks])


# Stands for an undefined metric or loss in messages, which carry only finite numbers.
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


def probabilistic(
    logits: Tensor, y: Tensor, mask: Tensor, k: int, wanted: Sequence[str] = PROBABILISTIC
) -> list[float]:
    """Returns the `PROBABILISTIC` metrics of the items in `mask`, UNDEFINED where there is none.

    `pr_auc` is the average precision: of class 1 if there are two classes, else the mean over the
    classes that have items. `recall_at_k` and `precision_at_k` look at the k items with the highest
    probability of class 1. Items that tie at the last place count in part. `ece` is the expected
    calibration error of the predicted class, in 15 bins of equal width.

    Args:
        logits: [items, classes].
        y: Labels [items].
        mask: The items that count, [items] bool.
        k: The number of items of `recall_at_k` and `precision_at_k`.
        wanted: The metrics to compute. The others are UNDEFINED.
    """
    chosen, labels = logits[mask], y[mask].numpy()
    p = chosen.double().softmax(1).numpy()
    found = dict.fromkeys(PROBABILISTIC, UNDEFINED)
    if len(labels) and not np.isnan(p).any():
        two, positive = p.shape[1] == 2, labels == 1
        if "pr_auc" in wanted:
            classes = [1] if two else np.unique(labels).tolist()
            areas = [average_precision(p[:, c], labels == c) for c in classes if c in labels]
            found["pr_auc"] = sum(areas) / len(areas) if areas else UNDEFINED
        if two and not {"recall_at_k", "precision_at_k"}.isdisjoint(wanted):
            k = min(k, len(labels))
            hits = hits_at_k(p[:, 1], positive, k)
            found["precision_at_k"] = hits / k
            found["recall_at_k"] = hits / positive.sum() if positive.any() else UNDEFINED
        if "ece" in wanted:
            right = chosen.argmax(1).numpy() == labels
            found["ece"] = calibration_error(p.max(1), right)
    return [float(found[name]) if name in wanted else UNDEFINED for name in PROBABILISTIC]


@operation
def from_probabilities(logits: Tensor, graph: Graph, k: int, selection: str) -> Tensor:
    """Returns the metrics that need probabilities, of the validation and the test items.

    The result is [2, 1 + len(PROBABILISTIC)]: `auc`, then `probabilistic`. Of the validation items
    only the metric `selection` is computed besides `auc`.
    """
    parts = ((graph.val, (selection,)), (graph.test, PROBABILISTIC))
    return torch.tensor(
        [
            [auc(logits, graph.y, mask), *probabilistic(logits, graph.y, mask, k, wanted)]
            for mask, wanted in parts
        ]
    )


def average_precision(score: Array, positive: Array) -> float:
    """Returns the area under the precision-recall curve, as a sum of steps.

    Args:
        score: [items]; the highest comes first.
        positive: [items] bool, at least one of them true.
    """
    order = np.argsort(-score, kind="stable")
    ranked = score[order]
    ends = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))  # of items that tie
    hits = np.cumsum(positive[order])[ends]
    return float((np.diff(hits, prepend=0) * hits / (ends + 1)).sum() / hits[-1])


def hits_at_k(score: Array, positive: Array, k: int) -> float:
    """Returns the number of positive items among the k with the highest score.

    Of items that tie at the last place, it is the expected number if they are drawn at random.
    """
    last = np.partition(score, len(score) - k)[len(score) - k]
    above, tied = score > last, score == last
    return float(positive[above].sum() + (k - above.sum()) * positive[tied].mean())


def calibration_error(confidence: Array, right: Array) -> float:
    """Returns Σ_bins |right predictions − sum of confidences| / items."""
    bins = np.clip(np.ceil(confidence * ECE_BINS).astype(np.int64) - 1, 0, ECE_BINS - 1)
    gaps = np.bincount(bins, right - confidence, ECE_BINS)
    return float(np.abs(gaps).sum() / len(right))


def scores(matrices: Tensor) -> dict[str, list[float | None]]:
    """Returns the metrics `FROM_CONFUSION` of each of several confusion matrices.

    `f1_macro` is the mean over all classes, `f1_present` over the classes that have items, and
    `f1_weighted` weights by the number of items. A class without items or predictions counts as 0
    in `f1_macro`. `balanced_accuracy` is the mean recall over the classes that have items.
    `precision` and `recall` are those of class 1 if there are two classes, else means over the
    classes that have items. The precision of a class that is never predicted is 0. A metric that
    is not defined is None: all metrics of an empty matrix, and those of class 1 without such items.

    matrices: [clients, C, C].
    """
    m = matrices.double()
    hit, true, predicted = m.diagonal(dim1=1, dim2=2), m.sum(2), m.sum(1)
    total, present = true.sum(1), (true > 0).double()
    f1 = 2 * hit / (true + predicted).clamp(min=1)
    precision, recall = hit / predicted.clamp(min=1), hit / true.clamp(min=1)
    at_least_one = total.clamp(min=1)

    def mean(of_class: Tensor) -> Tensor:
        return (of_class * present).sum(1) / present.sum(1).clamp(min=1)

    values = {
        "accuracy": hit.sum(1) / at_least_one,
        "f1_macro": f1.mean(1),
        "f1_present": mean(f1),
        "f1_weighted": (f1 * true).sum(1) / at_least_one,
        "balanced_accuracy": mean(recall),
        "precision": mean(precision),
        "recall": mean(recall),
    }
    some = total > 0
    defined = dict.fromkeys(values, some.tolist())
    if m.shape[1] == 2:
        values |= {"precision": precision[:, 1], "recall": recall[:, 1]}
        defined["recall"] = (true[:, 1] > 0).tolist()
        defined["precision"] = ((true[:, 1] + predicted[:, 1]) > 0).tolist()
    return {
        name: [v if s else None for v, s in zip(column.tolist(), defined[name], strict=True)]
        for name, column in values.items()
    }


def per_class(
    matrix: Sequence[Sequence[int]], names: Sequence[str]
) -> dict[str, dict[str, float | int | None]]:
    """Returns support, precision, recall and F1 of each class, by its name.

    A value that is not defined is None.

    Args:
        matrix: A confusion matrix, [true class][predicted class].
        names: The classes' names.
    """
    hit = [row[c] for c, row in enumerate(matrix)]
    true = [sum(row) for row in matrix]
    predicted = [sum(column) for column in zip(*matrix, strict=True)]
    return {
        name: {
            "support": n,
            "precision": h / p if p else None,
            "recall": h / n if n else None,
            "f1": 2 * h / (n + p) if n + p else None,
        }
        for name, h, n, p in zip(names, hit, true, predicted, strict=True)
    }


def names_of(selection: str) -> tuple[str, ...]:
    """Returns the names of all scores: the `METRICS` of test items, and of validation items.

    Of validation items there are the accuracy and the selected metric.
    """
    return (*METRICS, *dict.fromkeys(("val_accuracy", f"val_{selection}")))


def all_scores(
    val: Tensor,
    test: Tensor,
    areas: Tensor,
    probabilistic: Tensor | None = None,
    *,
    selection: str = "accuracy",
) -> dict[str, list[float | None]]:
    """Returns a list of each of `names_of(selection)`, with one value per client.

    A metric that is not defined is None.

    Args:
        val: Confusion matrices of validation items, [clients, C, C].
        test: Confusion matrices of test items, [clients, C, C].
        areas: AUCs of validation and test items, [clients, 2].
        probabilistic: `PROBABILISTIC` of validation and test items, [clients, 2, metrics]. None:
            they are not known.
        selection: The metric that chooses the best round.
    """
    if probabilistic is None:
        probabilistic = torch.full((len(areas), 2, len(PROBABILISTIC)), UNDEFINED)
    both = torch.cat([areas.unsqueeze(2), probabilistic], 2).transpose(0, 1)
    columns = scores(torch.cat([val, test]))
    of_val, of_test = (
        {
            **{name: column[first : first + len(val)] for name, column in columns.items()},
            **dict(zip(("auc", *PROBABILISTIC), map(_defined, part.T), strict=True)),
        }
        for first, part in zip((0, len(val)), both, strict=True)
    )
    chosen = {f"val_{name}": of_val[name] for name in ("accuracy", selection)}
    return {**of_test, **chosen}


def _defined(column: Tensor) -> list[float | None]:
    return [None if value < 0 else value for value in column.tolist()]


# The rows of `additive_scores`. The first part is as old as the history hash, which covers it.
ADDITIVE = ("accuracy", "f1_macro", "f1_present", "f1_weighted", "auc", "val_accuracy")
ADDITIVE_MORE = tuple(name for name in METRICS if name not in ADDITIVE)  # and the selected one


def additive_scores(columns: dict[str, list[float | None]], items: int) -> tuple[Tensor, Tensor]:
    """Returns a client's scores as rows (items · value, items, value, 1), one per metric.

    The sum of these rows over clients is enough to compute both means; see `mean_scores`. The rows
    are those of `ADDITIVE`; and those of `ADDITIVE_MORE` and of the selected validation metric.

    Args:
        columns: The client's `all_scores`. The last one is the selected validation metric.
        items: The number of the client's items.
    """
    of_client = {name: value for name, (value,) in columns.items()}

    def rows(names: Sequence[str]) -> Tensor:
        values = [of_client[name] for name in names]
        found = [(0.0,) * 4 if v is None else (items * v, items, v, 1.0) for v in values]
        return torch.tensor(found, dtype=torch.float64)

    return rows(ADDITIVE), rows((*ADDITIVE_MORE, list(columns)[-1]))


def mean_scores(
    total: Tensor, more: Tensor, selection: str
) -> tuple[dict[str, float | None], dict[str, float | None]]:
    """Returns all scores averaged by size, and averaged over clients.

    Args:
        total, more: The sums of the two parts of `additive_scores` over clients.
        selection: The metric that chooses the best round.
    """
    known = (*ADDITIVE, *ADDITIVE_MORE, f"val_{selection}")
    rows = dict(zip(known, torch.cat([total, more]).tolist(), strict=True))
    rows = {name: rows[name] for name in names_of(selection)}
    by_size = {m: row[0] / row[1] if row[1] > 0 else None for m, row in rows.items()}
    return by_size, {m: row[2] / row[3] if row[3] > 0 else None for m, row in rows.items()}


def average(values: list[float | None], weights: list[float]) -> float | None:
    """Returns the weighted mean over the values that are not None, or None if all are."""
    pairs: list[tuple[Any, float]] = [
        (v, w) for v, w in zip(values, weights, strict=True) if v is not None
    ]
    total = sum(w for _, w in pairs)
    return sum(v * w for v, w in pairs) / total if total else None
