"""Draws a partition: labels and homophily per client and class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedloom.data.federation import Federation
from fedloom.data.statistics import partition_statistics
from fedloom.experiments.report.draw import draw_maps


def plot_partition(federation: Federation, path: str | Path) -> Path:
    """Draws two heat maps of clients by classes: the labels, and the homophily.

    For graph tasks the second map shows the mean size of the graphs.

    Args:
        federation: The federation.
        path: The file to write. Its suffix chooses the format: .png, .svg or .pdf.

    Returns the path. Needs the extra `fedloom[plot]`.
    """
    statistics = partition_statistics(federation)
    clients = statistics["clients"]
    # A client without a class has a grey cell, not one of the palest colour.
    labels = [[count or None for count in client["labels"]] for client in clients]
    if federation.task == "node":
        homophily = [client["homophily_per_class"] for client in clients]
        second = _heat_map(statistics, "homophily", homophily, "0.00", high=1.0)
    else:
        sizes = [client["graph_size_per_class"] for client in clients]
        second = _heat_map(statistics, "mean nodes per graph", sizes, "0")
    first = _heat_map(statistics, f"{federation.task}s per class", labels, "0")
    return draw_maps([first, second], _title(statistics), Path(path))


def _heat_map(
    statistics: dict[str, Any],
    title: str,
    values: Sequence[Sequence[float | None]],
    text: str,
    high: float | None = None,
) -> dict[str, Any]:
    """Returns a figure of kind "heat" with clients as rows and classes as columns."""
    largest = max((value for row in values for value in row if value is not None), default=1.0)
    return {
        "kind": "heat",
        "title": title,
        "rows": [client["name"] for client in statistics["clients"]],
        "columns": [str(c) for c in range(len(values[0]))],
        "row_label": "client",
        "column_label": "class",
        "values": values,
        "low": 0,
        "high": largest if high is None else high,
        "format": text,
        "unit": "",
    }


def _title(statistics: dict[str, Any]) -> str:
    about, totals = statistics["about"], statistics["totals"]
    parts = [str(about[key]) for key in ("dataset", "partition") if key in about]
    parts.append(f"{totals['clients']} clients")
    if totals["edges_cut"]:
        parts.append(f"{totals['cut_share']:.0%} of the edges cut")
    return " · ".join(parts)
