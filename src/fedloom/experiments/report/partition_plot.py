"""A picture of a partition: labels and homophily per client and class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedloom.data.federation import Federation
from fedloom.data.statistics import partition_statistics
from fedloom.experiments.report.draw import draw_maps


def plot_partition(federation: Federation, path: str | Path) -> Path:
    """Draws the labels per client and class, and beside them the homophily (graph tasks: the graphs' mean size).

    Writes a PNG, SVG or PDF by the path's suffix and gives the path back. Needs the extra `fedloom[plot]`.
    """
    held = partition_statistics(federation)
    labels = [
        [count or None for count in client["labels"]] for client in held["clients"]
    ]  # absent is grey, not the palest colour
    if federation.task == "node":
        beside = _heat_map(
            held,
            "homophily",
            [client["homophily_per_class"] for client in held["clients"]],
            "0.00",
            high=1.0,
        )
    else:
        beside = _heat_map(
            held,
            "mean nodes per graph",
            [client["graph_size_per_class"] for client in held["clients"]],
            "0",
        )
    return draw_maps(
        [_heat_map(held, f"{federation.task}s per class", labels, "0"), beside],
        _title(held),
        Path(path),
    )


def _heat_map(
    held: dict[str, Any], title: str, values: Sequence[Sequence[float | None]], text: str, high: float | None = None
) -> dict[str, Any]:  # fmt: skip
    """A figure of kind "heat", clients down and classes across."""
    largest = max((value for row in values for value in row if value is not None), default=1.0)
    return {
        "kind": "heat", "title": title, "rows": [client["name"] for client in held["clients"]],
        "columns": [str(c) for c in range(len(values[0]))], "row_label": "client", "column_label": "class", "values": values,
        "low": 0, "high": largest if high is None else high, "format": text, "unit": "",
    }  # fmt: skip


def _title(held: dict[str, Any]) -> str:
    about, totals = held["about"], held["totals"]
    parts = [str(about[key]) for key in ("dataset", "partition") if key in about]
    parts.append(f"{totals['clients']} clients")
    if totals["edges_cut"]:
        parts.append(f"{totals['cut_share']:.0%} of the edges cut")
    return " · ".join(parts)
