"""Runs recipes over seeds, two at a time, one thread each; and what the files that make tables of such runs have in common."""

import argparse
import hashlib
import importlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
from scipy.stats import wilcoxon

import fedloom
from fedloom.method import method_class
from fedloom.recipe import make_recipe, override

Cell = tuple[str, int]  # (label, seed)
Tables = dict[str, dict[str, Any]]  # a recipe
Found = dict[str, list[dict[str, Any]]]  # {label: summaries by seed}


def run_one(tables: dict[str, dict[str, Any]], seed: int) -> dict[str, Any]:
    """Runs a recipe's tables with another seed, gives the summary."""
    return make_recipe(override(tables, [f"run.seed={seed}"])).carry_out().summary


def sweep(
    recipes: Mapping[str, Tables],
    seeds: int,
    report: Callable[[str, int, dict[str, Any]], None],
    kept: Path | None = None,
    run: bool = True,
    workers: int | None = None,
) -> Found:
    """Takes {label: tables}, runs each with seeds 0 .. seeds-1, gives {label: summaries by seed}; `report` hears of each as it ends.

    A run that fails is an error when all others are done. kept: a file of finished runs, a line each. What is in it with the same tables,
    seed and code is not run again. run: False gives what is kept of all seeds, and runs nothing. workers: how many run at a
    time (None: as many as there are cores).
    """
    done: dict[Cell, dict[str, Any]] = {}
    failed: dict[Cell, BaseException] = {}
    known = {(line["tables"], line["seed"]): line["summary"] for line in map(json.loads, _lines(kept))}
    as_text = {label: json.dumps([code_of(**_named(tables["method"])), tables], sort_keys=True) for label, tables in recipes.items()}
    wanted = [(label, seed) for seed in range(seeds) for label in recipes]  # seeds outermost: soon every label has a number
    done |= {cell: known[as_text[cell[0]], cell[1]] for cell in wanted if (as_text[cell[0]], cell[1]) in known}
    if not run:
        recipes = {label: tables for label, tables in recipes.items() if all((label, seed) in done for seed in range(seeds))}
        return {label: [done[label, seed] for seed in range(seeds)] for label in recipes}
    with ProcessPoolExecutor(max_workers=workers or os.cpu_count()) as pool, ExitStack() as stack:
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)  # Ctrl-C ends what waits for its turn, too
        jobs = {pool.submit(run_one, recipes[label], seed): (label, seed) for label, seed in wanted if (label, seed) not in done}
        for job in as_completed(jobs):
            label, seed = jobs[job]
            if (error := job.exception()) is not None:  # the others go on: hours of them may follow
                failed[label, seed] = error
                continue
            done[label, seed] = job.result()
            if kept:
                kept.parent.mkdir(exist_ok=True)
                with open(kept, "a") as file:
                    file.write(json.dumps({"tables": as_text[label], "seed": seed, "summary": done[label, seed]}) + "\n")
            report(label, seed, done[label, seed])
    for (label, seed), error in failed.items():
        raise RuntimeError(f"{len(failed)} runs failed, the first of them {label}, seed {seed}") from error
    return {label: [done[label, seed] for seed in range(seeds)] for label in recipes}


def _named(method: dict[str, Any]) -> dict[str, str]:
    return {key: method[key] for key in ("name", "base") if key in method}


@cache
def code_of(name: str, **base: str) -> str:
    """A digest of the modules that a method's numbers depend on: data, graphs, models, learning, its own file and those it takes from."""
    root = Path(fedloom.__file__).parent
    names = ("graph", "sparse", "models", "learn", "task", "party", "method", "hops", "structure", "prototypes", "views", "similar")
    files = [root / f"{name}.py" for name in names] + sorted(root.glob("data/*.py"))
    own = [cls for cls in method_class(name, base).__mro__ if cls.__module__.startswith("fedloom.methods.")]
    used = {module for cls in own for module in _methods_in(cls.__module__)}
    files += [Path(str(importlib.import_module(module).__file__)) for module in sorted(used)]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _methods_in(module: str) -> set[str]:
    """A method's module and those of the methods that it takes something from."""
    text = Path(str(importlib.import_module(module).__file__)).read_text()
    found, todo = {module}, set(re.findall(r"^from (fedloom\.methods\.\w+) import", text, re.M))
    return found.union(*(_methods_in(other) for other in todo))


def _lines(path: Path | None) -> list[str]:
    return path.read_text().splitlines() if path and path.exists() else []


def make_tables(about: str, name: str, cells: dict[str, Tables], seeds: int, sections: Mapping[str, Callable[[Found], str]]) -> None:
    """The command of a file that fills tables in a Markdown file: runs what is not in runs/NAME.jsonl, then writes each section's text.

    about: the file's docstring. cells: {label: recipe}, the most wanted first. sections: {mark in the Markdown: what makes its text}.
    Beside the Markdown file is results-NAME.json, with what the tables were made of: what is not in runs/ is taken from there.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("--only", help="run the cells whose names begin with this text, and write nothing")
    parser.add_argument("--skip", action="append", default=[], help="leave out the cells whose names contain this text")
    parser.add_argument("--write", action="store_true", help="run nothing: write what has been run")
    asked = parser.parse_args()
    recipes = {k: v for k, v in cells.items() if k.startswith(asked.only or "") and not any(text in k for text in asked.skip)}

    def tell(label: str, seed: int, s: dict[str, Any]) -> None:
        print(f"{label}, seed {seed}: {s['seconds']['total']:.0f} s", flush=True)

    found = sweep(recipes, seeds, tell, Path(f"runs/{name}.jsonl"), run=not asked.write)
    if asked.only:
        return
    kept = asked.target.with_name(f"results-{name}.json")
    found = {label: runs for label, runs in {**_remembered(kept), **found}.items() if label in cells}
    lines = [f"{json.dumps(label)}: {json.dumps([_short(s) for s in found[label]])}" for label in cells if label in found]
    kept.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    for mark, text in sections.items():
        if made := text(found):  # else nothing is known that it needs, and what stands there stays
            put_between(asked.target, mark, made)


_KEPT = (
    "method", "seed", "accuracy", "accuracy_mean", "auc", "final_accuracy", "val_accuracy", "best_round", "history_hash", "engine",
    "rounds", "clients", "traffic",
)  # fmt: skip


def _short(s: dict[str, Any]) -> dict[str, Any]:
    """What the repository keeps of a run: enough for the tables."""
    per_client = [round(c["accuracy"], 4) if c["accuracy"] is not None else None for c in s["per_client"]]
    settings = {"seconds": s["seconds"]["total"], "settings": s["config"]["method"]}
    return {**{k: s[k] for k in _KEPT if k in s}, "per_client": per_client, **settings}


def counted(found: Found, label: str) -> list[dict[str, Any]]:
    """A label's runs whose traffic is known: the first results that were kept had none."""
    return [s for s in found.get(label, []) if "traffic" in s]


def _remembered(path: Path) -> Found:
    """The inverse of `_short` for all that the repository keeps: runs that were made on another machine."""
    if not path.exists():
        return {}
    kept = json.loads(path.read_text())
    return {
        label: [
            {**s, "per_client": [{"accuracy": a} for a in s["per_client"]], "seconds": {"total": s["seconds"]},
             "config": {"method": s["settings"]}} for s in runs
        ]
        for label, runs in kept.items()
    }  # fmt: skip


def markdown(head: list[str], rows: Iterable[list[str]]) -> str:
    """A Markdown table; nothing without rows."""
    rows = list(rows)
    if not rows:
        return ""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *rows]) + "\n"


def scores_of(found: Found, label: str, key: str = "accuracy") -> list[float | None]:
    """A label's scores by seed; empty if it was not run."""
    return [s[key] for s in found.get(label, [])]


def average(found: Found, labels: list[str], key: str = "accuracy") -> str:
    """The mean over labels and seeds in percent, "-" if one is missing."""
    values = [v for label in labels for v in scores_of(found, label, key)]
    complete = all(label in found for label in labels) and None not in values
    return f"{100 * mean(v for v in values if v is not None):.2f}" if complete else "-"


def put_between(target: Path, mark: str, text: str) -> None:
    """Puts text into a Markdown file between <!-- mark --> and <!-- /mark -->, in place of what is there."""
    before, begun, rest = target.read_text().partition(f"<!-- {mark} -->")
    _, ended, after = rest.partition(f"<!-- /{mark} -->")
    if not begun or not ended:
        raise ValueError(f"{target} has no place for {mark!r}")
    target.write_text(f"{before}{begun}\n\n{text}\n{ended}{after}")


def paired(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> list[float]:
    """Differences in accuracy, in points, between two methods' summaries by seed: one for each seed and client."""
    pairs = [zip(a["per_client"], b["per_client"], strict=True) for a, b in zip(ours, theirs, strict=True)]
    return [100 * (x["accuracy"] - y["accuracy"]) for pair in pairs for x, y in pair if None not in (x["accuracy"], y["accuracy"])]


def verdict(differences: list[float]) -> str:
    """Mean difference with a 95 % interval (bootstrap over the pairs), how many pairs are above and below 0, Wilcoxon's p (two-sided)."""
    values = np.asarray(differences)
    drawn = np.random.default_rng(0).choice(values, (4000, len(values))).mean(1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    p = wilcoxon(values).pvalue if values.any() else 1.0
    return f"{values.mean():+.2f} [{low:+.2f}, {high:+.2f}], {(values > 0).sum()} up {(values < 0).sum()} down, p = {p:.2g}"


def spread(values: list[float | None]) -> str:
    """Mean and standard deviation in percent."""
    known = [100 * v for v in values if v is not None]
    if not known:
        return "-"
    return f"{mean(known):.1f} ± {stdev(known):.1f}" if len(known) > 1 else f"{known[0]:.1f}"
