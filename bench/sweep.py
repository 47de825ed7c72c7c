"""Runs recipes over seeds, two at a time, one thread each; and what the files that make tables of such runs have in common."""

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from statistics import mean
from typing import Any

from fedloom.experiments import grid
from fedloom.experiments.executor import End, Processes, State, Step, execute
from fedloom.experiments.recipe import override
from fedloom.experiments.report import significance as statistics
from fedloom.experiments.run_folder import read_summary

Tables = dict[str, dict[str, Any]]  # a recipe
Found = dict[str, list[dict[str, Any]]]  # {label: summaries by seed}


def sweep(
    recipes: Mapping[str, Tables],
    seeds: int,
    report: Callable[[str, int, dict[str, Any]], None],
    kept: Path | None = None,
    run: bool = True,
    workers: int = 0,
) -> Found:
    """Takes {label: tables}, runs each with seeds 0 .. seeds-1, gives {label: summaries by seed}; `report` hears of each as it ends.

    A run that fails is an error when all others are done. kept: a folder for run folders, without models. What is there with the same
    settings and code is not run again. run: False gives what is kept of all seeds, and runs nothing. workers: how many run at a time (0:
    as many as there are cores).
    """
    with ExitStack() as stack:
        place = kept or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        wanted = [
            (label, seed) for seed in range(seeds) for label in recipes
        ]  # seeds outermost: soon every label has a number
        cells = {
            key: grid.cell(override(recipes[key[0]], [f"run.seed={key[1]}"]), place)
            for key in wanted
        }

        def watch(state: State, event: Step | End | None) -> None:
            if isinstance(event, End) and event.status == "completed":
                shutil.rmtree(event.cell.folder / "models")
                for (label, seed), cell in cells.items():  # several labels may stand for one run
                    if cell.name == event.cell.name:
                        report(label, seed, _summary(cell))

        if run:
            state = execute(cells.values(), Processes(workers), watch)
            for end in state.failed:
                raise RuntimeError(
                    f"{len(state.failed)} runs failed, the first of them {end.cell.name}: {end.cause}"
                )
        complete = [
            label
            for label in recipes
            if all(grid.is_done(cells[label, seed]) for seed in range(seeds))
        ]
        return {
            label: [_summary(cells[label, seed]) for seed in range(seeds)] for label in complete
        }


def _summary(cell: grid.Cell) -> dict[str, Any]:
    found = read_summary(cell.folder)
    assert found is not None
    return found


def make_tables(
    about: str,
    name: str,
    cells: dict[str, Tables],
    seeds: int,
    sections: Mapping[str, Callable[[Found], str]],
) -> None:
    """The command of a file that fills tables in a Markdown file: runs what is not in runs/NAME, then writes each section's text.

    about: the file's docstring. cells: {label: recipe}, the most wanted first. sections: {mark in the Markdown: what makes its text}.
    Beside the Markdown file is results-NAME.json, with what the tables were made of: what is not in runs/ is taken from there.
    """
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", type=Path)
    parser.add_argument(
        "--only", help="run the cells whose names begin with this text, and write nothing"
    )
    parser.add_argument(
        "--skip",
        action="append",
        default=[],
        help="leave out the cells whose names contain this text",
    )
    parser.add_argument("--write", action="store_true", help="run nothing: write what has been run")
    asked = parser.parse_args()
    recipes = {
        k: v
        for k, v in cells.items()
        if k.startswith(asked.only or "") and not any(text in k for text in asked.skip)
    }

    def tell(label: str, seed: int, s: dict[str, Any]) -> None:
        print(f"{label}, seed {seed}: {s['seconds']['total']:.0f} s", flush=True)

    found = sweep(recipes, seeds, tell, Path(f"runs/{name}"), run=not asked.write)
    if asked.only:
        return
    kept = asked.target.with_name(f"results-{name}.json")
    found = {
        label: runs for label, runs in {**_remembered(kept), **found}.items() if label in cells
    }
    lines = [
        f"{json.dumps(label)}: {json.dumps([_short(s) for s in found[label]])}"
        for label in cells
        if label in found
    ]
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
    per_client = [
        round(c["accuracy"], 4) if c["accuracy"] is not None else None for c in s["per_client"]
    ]
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
            {**s, "per_client": [{"id": str(k), "accuracy": a} for k, a in enumerate(s["per_client"])], "seconds": {"total": s["seconds"]},
             "config": {"method": s["settings"]}} for s in runs
        ]
        for label, runs in kept.items()
    }  # fmt: skip


def markdown(head: list[str], rows: Iterable[list[str]]) -> str:
    """A Markdown table; nothing without rows."""
    rows = list(rows)
    if not rows:
        return ""
    return (
        "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *rows])
        + "\n"
    )


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


def verdict(differences: list[float]) -> str:
    """What the differences amount to, in words."""
    return str(statistics.verdict(differences))


def spread(values: list[float | None]) -> str:
    """Mean and standard deviation in percent."""
    return str(statistics.spread(values) or "-")
