"""Scores of each class and confusion matrices, from the test confusion of the run folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedloom.experiments.report.comparison import Comparison, Entry
from fedloom.experiments.report.spec import Figure, columns, make_figure, percent, short

Counts = list[list[int]]


class ClassScores(NamedTuple):
    """The scores of one class.

    Attributes:
        items: The number of test items of the class.
        precision: The share of the class among the items that are predicted as it; None if none is.
        recall: The share of its items that are predicted as it; None if it has none.
        f1: The harmonic mean of both; None if there is neither an item nor a prediction.
    """

    items: int
    precision: float | None
    recall: float | None
    f1: float | None


def class_figures(c: Comparison, task: str) -> list[Figure]:
    """Returns the F1 of each class and a confusion matrix for each method, the best method first.

    Methods without a confusion matrix are named with the reason.
    """
    entries = c.on(task)
    order = c.ranked(task)
    known = {row: total for row in order if (total := confusion(entries[row])) is not None}
    missing = [row for row in order if row not in known]
    if not known:
        reason = (
            "The summaries of these runs have no confusion matrix: they are from an earlier "
            "version, or the runs keep the clients' predictions secret."
        )
        return [make_figure(c, "classes", "note", "no-classes", task, "No scores by class", reason)]
    names = class_names(entries[next(iter(known))].runs[0].summary, len(next(iter(known.values()))))
    return [
        _by_class(c, task, known, names),
        _every_score(c, task, known, names),
        _matrices(c, task, known, names, missing),
    ]


def class_names(summary: Mapping[str, Any], count: int) -> list[str]:
    """Returns the names of classes: the data's own, or their numbers from 0."""
    own = summary.get("class_names")
    if own and len(own) == count:
        return [str(name) for name in own]
    return [str(k) for k in range(count)]


def confusion(e: Entry) -> Counts | None:
    """Returns the confusion matrix [true][predicted] summed over seeds; None if one is unknown."""
    found = [run.summary.get("confusion") for run in e.runs]
    if any(one is None for one in found):
        return None
    return [[sum(cells) for cells in zip(*rows, strict=True)] for rows in zip(*found, strict=True)]


def class_scores(total: Counts) -> list[ClassScores]:
    """Returns the scores of each class of a confusion matrix."""
    found = []
    for k, row in enumerate(total):
        right, items, predicted = row[k], sum(row), sum(other[k] for other in total)
        found.append(
            ClassScores(
                items,
                right / predicted if predicted else None,
                right / items if items else None,
                2 * right / (items + predicted) if items + predicted else None,
            )
        )
    return found


def _by_class(
    c: Comparison, task: str, known: Mapping[str, Counts], names: Sequence[str]
) -> Figure:
    scores = {row: class_scores(total) for row, total in known.items()}
    first = next(iter(scores.values()))
    rows = []
    for k, name in enumerate(names):
        values = [each[k].f1 for each in scores.values()]
        best = max((v for v in values if v is not None), default=None)
        marks = ["best" if v is not None and v == best else "" for v in values]
        cells = [percent(v) | {"mark": mark} for v, mark in zip(values, marks, strict=True)]
        rows.append([name, first[k].items, *cells])
    caption = (
        "F1 of each class in %, over the test items of all clients and seeds, at the best "
        "validation round. Bold: the best method of the class."
    )
    return make_figure(
        c,
        "classes",
        "table",
        "class-scores",
        task,
        "F1 of each class",
        caption,
        columns=columns(["class", "test items", *scores], ["class"]),
        rows=rows,
    )


def _every_score(
    c: Comparison, task: str, known: Mapping[str, Counts], names: Sequence[str]
) -> Figure:
    rows = [
        [row, names[k], one.items, percent(one.precision), percent(one.recall), percent(one.f1)]
        for row, total in known.items()
        for k, one in enumerate(class_scores(total))
    ]
    head = ["method", "class", "test items", "precision %", "recall %", "F1 %"]
    return make_figure(
        c,
        "classes",
        "table",
        "class-table",
        task,
        "Precision and recall of each class",
        "",
        columns=columns(head, ["method", "class"]),
        rows=rows,
        closed=True,
    )


def _matrices(
    c: Comparison,
    task: str,
    known: Mapping[str, Counts],
    names: Sequence[str],
    missing: Sequence[str],
) -> Figure:
    caption = (
        "Rows are true classes, columns are predictions. A cell is the share of the row's items in "
        "%, summed over clients and seeds; the diagonal is right. Point at a cell for its count."
    )
    if missing:
        caption += f" Not known: {', '.join(missing)}."
    maps = [_matrix(c, task, row, total, names) for row, total in known.items()]
    return make_figure(
        c, "classes", "group", "confusion", task, "Confusion matrices", caption, figures=maps
    )


def _matrix(c: Comparison, task: str, row: str, total: Counts, names: Sequence[str]) -> Figure:
    sums = [sum(cells) for cells in total]
    values = [
        [short(cell / items) if items else None for cell in cells]
        for cells, items in zip(total, sums, strict=True)
    ]
    right = sum(total[k][k] for k in range(len(total)))
    share = f"{100 * right / sum(sums):.1f} %" if sum(sums) else "None"
    return make_figure(
        c,
        "classes",
        "heat",
        f"confusion-{row}",
        task,
        row,
        f"{share} of {sum(sums):,} predictions are right.",
        rows=list(names),
        columns=list(names),
        row_label="true class",
        column_label="predicted class",
        values=values,
        counts=total,
        low=0,
        high=1,
        format="0",
        unit="percent",
    )
