"""Runs recipes over seeds, two at a time, one thread each."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import fedloom
from fedloom.recipe import make_recipe, override

Cell = tuple[str, int]  # (label, seed)


def run_one(tables: dict[str, dict[str, Any]], seed: int) -> dict[str, Any]:
    """Runs a recipe's tables with another seed, gives the summary."""
    return make_recipe(override(tables, [f"run.seed={seed}"])).carry_out().summary


def sweep(
    recipes: Mapping[str, dict[str, dict[str, Any]]],
    seeds: int,
    report: Callable[[str, int, dict[str, Any]], None],
    kept: Path | None = None,
) -> dict[str, list[dict[str, Any]]]:
    """Takes {label: tables}, runs each with seeds 0 .. seeds-1, gives {label: summaries by seed}; `report` hears of each as it ends.

    kept: a file of finished runs, a line each. What is in it with the same tables, seed and code is not run again.
    """
    done: dict[Cell, dict[str, Any]] = {}
    known = {(line["tables"], line["seed"]): line["summary"] for line in map(json.loads, _lines(kept))}
    as_text = {label: json.dumps([_code(), tables], sort_keys=True) for label, tables in recipes.items()}
    wanted = [(label, seed) for seed in range(seeds) for label in recipes]  # seeds outermost: soon every label has a number
    done |= {cell: known[as_text[cell[0]], cell[1]] for cell in wanted if (as_text[cell[0]], cell[1]) in known}
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        jobs = {pool.submit(run_one, recipes[label], seed): (label, seed) for label, seed in wanted if (label, seed) not in done}
        for job in as_completed(jobs):
            label, seed = jobs[job]
            done[label, seed] = job.result()
            if kept:
                kept.parent.mkdir(exist_ok=True)
                with open(kept, "a") as file:
                    file.write(json.dumps({"tables": as_text[label], "seed": seed, "summary": done[label, seed]}) + "\n")
            report(label, seed, done[label, seed])
    return {label: [done[label, seed] for seed in range(seeds)] for label in recipes}


@cache
def _code() -> str:
    """A digest of the modules that numbers depend on: data, graphs, models, learning, methods."""
    root = Path(fedloom.__file__).parent
    files = [root / f"{name}.py" for name in ("graph", "sparse", "models", "learn", "task", "party", "method", "hops", "structure")]
    files += [*sorted(root.glob("data/*.py")), *sorted(root.glob("methods/*.py"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _lines(path: Path | None) -> list[str]:
    return path.read_text().splitlines() if path and path.exists() else []


def put_between(target: Path, mark: str, text: str) -> None:
    """Puts text into a Markdown file between <!-- mark --> and <!-- /mark -->, in place of what is there."""
    before, begun, rest = target.read_text().partition(f"<!-- {mark} -->")
    _, ended, after = rest.partition(f"<!-- /{mark} -->")
    if not begun or not ended:
        raise ValueError(f"{target} has no place for {mark!r}")
    target.write_text(f"{before}{begun}\n\n{text}\n{ended}{after}")


def spread(values: list[float | None]) -> str:
    """Mean and standard deviation in percent."""
    known = [100 * v for v in values if v is not None]
    if not known:
        return "-"
    return f"{mean(known):.1f} ± {stdev(known):.1f}" if len(known) > 1 else f"{known[0]:.1f}"
