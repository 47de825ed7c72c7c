"""Runs recipes over seeds, two at a time, one thread each."""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from statistics import mean, stdev
from typing import Any

from fedloom.recipe import make_recipe, override

Cell = tuple[str, int]  # (label, seed)


def run_one(tables: dict[str, dict[str, Any]], seed: int) -> dict[str, Any]:
    """Runs a recipe's tables with another seed, gives the summary."""
    return make_recipe(override(tables, [f"run.seed={seed}"])).carry_out().summary


def sweep(
    recipes: Mapping[str, dict[str, dict[str, Any]]], seeds: int, report: Callable[[str, int, dict[str, Any]], None]
) -> dict[str, list[dict[str, Any]]]:
    """Takes {label: tables}, runs each with seeds 0 .. seeds-1, gives {label: summaries by seed}; `report` hears of each as it ends."""
    done: dict[Cell, dict[str, Any]] = {}
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        # Seeds outermost: after a third of the time every label has a number.
        jobs = {pool.submit(run_one, tables, seed): (label, seed) for seed in range(seeds) for label, tables in recipes.items()}
        for job in as_completed(jobs):
            label, seed = jobs[job]
            done[label, seed] = job.result()
            report(label, seed, done[label, seed])
    return {label: [done[label, seed] for seed in range(seeds)] for label in recipes}


def spread(values: list[float | None]) -> str:
    """Mean and standard deviation in percent."""
    known = [100 * v for v in values if v is not None]
    if not known:
        return "-"
    return f"{mean(known):.1f} ± {stdev(known):.1f}" if len(known) > 1 else f"{known[0]:.1f}"
