"""Estimates how long embeddings in two dimensions take, before they are computed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import cache
from math import log
from typing import Any, TypeAlias

import numpy as np

Project: TypeAlias = Callable[[Any, str], Any]  # `embeddings.reduced`, which imports torch
TRIAL = 300  # items of the trial
MOST = 2000  # items of a figure, as in `embeddings.embed`


def estimated_seconds(summary: Mapping[str, Any], project: Project, most: int = MOST) -> float:
    """Returns about how many seconds `embeddings.embed` takes for a run.

    Loading the data, the set-up and one evaluation take as long as in the run. The projection to
    two dimensions is estimated from a short trial on this machine.

    Args:
        summary: The summary of the run.
        project: `embeddings.reduced`.
        most: The largest number of items in the figure.
    """
    seconds = summary["seconds"]
    evaluations = max(1, int(summary["rounds"]))
    again = float(seconds.get("load", 0)) + float(seconds.get("setup", 0))
    once = float(seconds.get("evaluate", 0)) / evaluations
    items = min(most, sum(int(row.get("items", 0)) for row in summary["per_client"]))
    return again + once + growth(items) * _trial(project)


def growth(items: int) -> float:
    """Returns how many times longer t-SNE takes for some items than for those of the trial.

    Barnes-Hut t-SNE takes a number of steps in proportion to n log n.
    """
    return items * log(items) / (TRIAL * log(TRIAL)) if items > 3 else 0.0


@cache
def _trial(project: Project) -> float:
    """Returns the seconds of t-SNE for random items."""
    rows = np.random.default_rng(0).normal(size=(TRIAL, 16)).astype(np.float32)
    project(rows[:8], "tsne")  # imports and threads, which only the first projection needs
    begin = time.perf_counter()
    project(rows, "tsne")
    return time.perf_counter() - begin
