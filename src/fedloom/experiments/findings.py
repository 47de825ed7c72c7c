"""Findings: what a run's result should make its reader doubt, in plain lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

HINT = "consider run.class_weight = 'balanced', and run.selection = 'balanced_accuracy' or 'pr_auc'"


def findings(
    confusion: Sequence[Sequence[int]] | None,
    classes: Sequence[str],
    best: Mapping[str, Any],
    selection: str = "accuracy",
    weighted: bool = False,
) -> list[str]:
    """Returns a line for each reason to doubt a result. An empty list: there is none.

    Args:
        confusion: The test confusion matrix of all clients, [true class][predicted class]. None:
            it is not known.
        classes: The classes' names.
        best: The history entry of the best round.
        selection: The metric that chose the best round.
        weighted: Whether the run had class weights.
    """
    lines: list[str] = []
    if best and best.get(f"val_{selection}") is None and selection != "accuracy":
        lines.append(
            f"run.selection = {selection!r}: no client has validation items that define it; the "
            "scores are those of the last round"
        )
    true = [sum(row) for row in confusion or ()]
    predicted = [sum(column) for column in zip(*(confusion or ()), strict=True)]
    total, present = sum(true), sum(count > 0 for count in true)
    if present < 2:
        return lines
    if max(predicted) == total:
        only = classes[predicted.index(total)]
        lines.append(
            f"the models predict class {only!r} for all {total} test items, which have {present} "
            f"classes; {HINT}"
        )
    right, most = sum(row[c] for c, row in enumerate(confusion or ())), max(true)
    if right < most:
        majority = classes[true.index(most)]
        lines.append(
            f"{100 * right / total:.1f} % of the test items are classified right, fewer than if "
            f"all were classified as {majority!r} ({100 * most / total:.1f} %)"
            + ("; class weights may do this, see balanced_accuracy" if weighted else "")
        )
    return lines
