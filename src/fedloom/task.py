"""Tasks: the loss that training minimises and the scores that evaluation reports, for node and graph classification."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.sparse import Sparse
from fedloom.stack import joined, parted
from fedloom.together import Operation, kept


def cross_entropy(logits: Tensor, y: Tensor, mask: Tensor, reduction: str = "mean", of_class: Tensor | None = None) -> Tensor:
    """Cross-entropy over the items in `mask`, classes weighted by `of_class` if given. With no such item: 0, and a gradient of 0."""
    if not mask.any():
        return logits.sum() * 0.0
    return F.cross_entropy(logits[mask], y[mask], weight=of_class, reduction=reduction)


class _TrainingLoss(Operation):
    """Cross-entropy over a graph's training items: takes logits, the graph, how to reduce, and class weights."""

    def alone(self, *args: Any) -> Tensor:
        logits, graph, reduction, of_class = args
        return cross_entropy(logits, graph.y, graph.train, reduction, of_class)

    def alike(self, *args: Any) -> Hashable:
        logits, _, reduction, of_class = args
        return (reduction, logits.shape[1]) if of_class is None and reduction in ("mean", "sum") else None

    def together(self, calls: Sequence[tuple[Any, ...]]) -> list[Tensor]:
        logits, graphs, reductions, _ = zip(*calls, strict=True)

        def make() -> tuple[Tensor, Tensor, Sparse]:
            """Rows of all training items, their classes, and the matrix that sums or averages them for each client."""
            train, y = torch.cat([g.train for g in graphs]), torch.cat([g.y for g in graphs])
            counts = torch.tensor([int(g.train.sum()) for g in graphs])
            owner = torch.repeat_interleave(torch.arange(len(graphs)), counts)
            share = torch.ones(len(owner)) if reductions[0] == "sum" else 1.0 / counts[owner]
            return train.nonzero().flatten(), y[train], Sparse.from_edges(owner, torch.arange(len(owner)), share, (len(graphs), len(owner)))

        rows, y, gather = kept(f"{reductions[0]} over training items", graphs, make)
        each = F.cross_entropy(joined(logits).index_select(0, rows), y, reduction="none")
        return parted((gather @ each.unsqueeze(1)).squeeze(1))


training_loss = _TrainingLoss()


def confusion(logits: Tensor, y: Tensor, mask: Tensor, num_classes: int) -> Tensor:
    """Counts [true class, predicted class] over the items in `mask`, int64."""
    cell = y[mask] * num_classes + logits[mask].argmax(1)
    return torch.bincount(cell, minlength=num_classes**2).view(num_classes, num_classes)


class _HeldOut(Operation):
    """Confusion matrices of a graph's validation and test items: takes logits and the graph, gives [2, classes, classes]."""

    def alone(self, *args: Any) -> Tensor:
        logits, graph = args
        return torch.stack([confusion(logits, graph.y, mask, graph.num_classes) for mask in (graph.val, graph.test)])

    def alike(self, *args: Any) -> Hashable:
        return args[1].num_classes

    def together(self, calls: Sequence[tuple[Any, ...]]) -> list[Tensor]:
        logits, graphs = zip(*calls, strict=True)
        C, K = graphs[0].num_classes, len(graphs)

        def make() -> tuple[Tensor, Tensor]:
            """Rows of all held-out items, and the first cell of each one's row in the matrices."""
            masks, y = (torch.cat([getattr(g, part) for g in graphs]) for part in ("val", "test")), torch.cat([g.y for g in graphs])
            owner = torch.repeat_interleave(torch.arange(K), torch.tensor([g.num_items for g in graphs]))
            rows = [mask.nonzero().flatten() for mask in masks]
            return torch.cat(rows), torch.cat([((2 * owner[r] + part) * C + y[r]) * C for part, r in enumerate(rows)])

        rows, first = kept("held-out items", graphs, make)
        cells = first + joined(logits).argmax(1).index_select(0, rows)
        return list(torch.bincount(cells, minlength=2 * K * C * C).view(K, 2, C, C).unbind())


held_out = _HeldOut()


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


def scores(matrices: Tensor) -> dict[str, list[float | None]]:
    """From confusion matrices [clients, C, C], a list each: accuracy, F1 (macro over all classes, over present ones, support-weighted).

    None where a matrix is empty. A class without items or predictions counts 0 in `f1_macro`.
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
    return {name: [v if s else None for v, s in zip(column.tolist(), some, strict=True)] for name, column in values.items()}


METRICS = ("accuracy", "f1_macro", "f1_present", "f1_weighted", "auc", "val_accuracy")


def all_scores(val: Tensor, test: Tensor, areas: Tensor) -> dict[str, list[float | None]]:
    """The `METRICS`, a list each, from clients' confusion matrices [clients, C, C] and AUCs [clients, 2] (validation, test).

    None where one is not defined.
    """
    auc = [None if area < 0 else area for area in areas[:, 1].tolist()]
    return {**scores(test), "auc": auc, "val_accuracy": scores(val)["accuracy"]}


def scores_to_add(val: Tensor, test: Tensor, areas: Tensor, items: int) -> Tensor:
    """A client's METRICS in a form of which the sum over clients gives both means: [metric, (items · value, items, value, 1)]."""
    columns = all_scores(*(t.unsqueeze(0) for t in (val, test, areas))).values()
    rows = [(0.0,) * 4 if v is None else (items * v, items, v, 1.0) for (v,) in columns]
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
