"""Runs recipes over seeds, and what the files that make tables of such runs have in common.

Each run has one thread. As many run at a time as there are cores.
"""

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    seeds: int | Callable[[str], Sequence[int]],
    report: Callable[[str, int, dict[str, Any]], None],
    kept: Path | None = None,
    run: bool = True,
    workers: int = 0,
) -> Found:
    """Runs recipes with the seeds 0, 1, ... and returns {label: summaries by seed}.

    A run that fails raises a RuntimeError after all others have finished.

    Args:
        recipes: {label: tables}.
        seeds: The number of seeds, or a function that gives the seeds of a label.
        report: Called with label, seed and summary of each run as it ends.
        kept: A folder for run folders, without models. Runs with the same settings and code are
            read from it.
        run: False reads kept runs only, of labels with all seeds.
        workers: Concurrent runs (0 = the number of cores).
    """
    with ExitStack() as stack:
        place = kept or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        # Seeds are outermost, so every label has a number early.
        of_label = {
            label: range(seeds) if isinstance(seeds, int) else seeds(label) for label in recipes
        }
        every = sorted({seed for chosen in of_label.values() for seed in chosen})
        wanted = [(label, seed) for seed in every for label in recipes if seed in of_label[label]]
        cells = {
            key: grid.cell(override(recipes[key[0]], [f"run.seed={key[1]}"]), place)
            for key in wanted
        }

        def watch(state: State, event: Step | End | None) -> None:
            if isinstance(event, End) and event.status == "completed":
                shutil.rmtree(event.cell.folder / "models")
                for (label, seed), cell in cells.items():  # labels may share a run
                    if cell.name == event.cell.name:
                        report(label, seed, _summary(cell))

        if run:
            state = execute(cells.values(), Processes(workers), watch)
            for end in state.failed:
                raise RuntimeError(
                    f"{len(state.failed)} runs failed, the first of them "
                    f"{end.cell.name}: {end.cause}"
                )
        complete = [
            label
            for label in recipes
            if all(grid.is_done(cells[label, seed]) for seed in of_label[label])
        ]
        return {
            label: [_summary(cells[label, seed]) for seed in of_label[label]] for label in complete
        }


def _summary(cell: grid.Cell) -> dict[str, Any]:
    found = read_summary(cell.folder)
    assert found is not None
    return found


def make_tables(
    about: str,
    name: str,
    cells: dict[str, Tables],
    seeds: int | Callable[[str], Sequence[int]],
    sections: Mapping[str, Callable[[Found], str]],
) -> None:
    """The command of a file that fills tables in a Markdown file.

    Runs what is not in runs/NAME, then writes the text of each section. The results go to
    bench/results/NAME.json. Runs that are not in runs/ are read from there.

    Args:
        about: The file's docstring.
        name: NAME of the folder and the file above.
        cells: {label: recipe}, the most wanted first.
        seeds: The number of seeds, or a function that gives the seeds of a label.
        sections: {mark in the Markdown file: function that makes the text}.
    """
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", type=Path)
    parser.add_argument(
        "--only", help="run the cells whose names start with this text, and write nothing"
    )
    parser.add_argument(
        "--skip",
        action="append",
        default=[],
        help="skip the cells whose names contain this text",
    )
    parser.add_argument(
        "--missing",
        action="store_true",
        help="run the cells without kept results, and write them and the tables, also with --only",
    )
    parser.add_argument("--write", action="store_true", help="run nothing, write known results")
    args = parser.parse_args()
    kept = Path(__file__).parent / "results" / f"{name}.json"
    done = _remembered(kept) if args.missing else {}
    recipes = {
        k: v
        for k, v in cells.items()
        if k.startswith(args.only or "")
        and not any(text in k for text in args.skip)
        and k not in done
    }

    def show(label: str, seed: int, s: dict[str, Any]) -> None:
        print(f"{label}, seed {seed}: {s['seconds']['total']:.0f} s", flush=True)

    found = sweep(recipes, seeds, show, Path(f"runs/{name}"), run=not args.write)
    if args.only and not args.missing:
        return
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
        if made := text(found):  # empty if results are missing: the old text stays
            put_between(args.target, mark, made)


_KEPT = (
    "method",
    "seed",
    "accuracy",
    "accuracy_mean",
    "f1_macro",
    "auc",
    "final_accuracy",
    "val_accuracy",
    "best_round",
    "history_hash",
    "engine",
    "rounds",
    "clients",
    "traffic",
)


def _short(s: dict[str, Any]) -> dict[str, Any]:
    """Returns what the repository keeps of a run: enough for the tables."""
    per_client = [
        round(c["accuracy"], 4) if c["accuracy"] is not None else None for c in s["per_client"]
    ]
    settings = {"seconds": s["seconds"]["total"], "settings": s["config"]["method"]}
    return {**{k: s[k] for k in _KEPT if k in s}, "per_client": per_client, **settings}


def counted(found: Found, label: str) -> list[dict[str, Any]]:
    """Returns a label's runs with known traffic. The oldest kept results have none."""
    return [s for s in found.get(label, []) if "traffic" in s]


def _remembered(path: Path) -> Found:
    """Reads kept runs, which may come from another machine. The inverse of `_short`."""
    if not path.exists():
        return {}
    kept = json.loads(path.read_text())
    return {
        label: [
            {
                **s,
                "per_client": [
                    {"id": str(k), "accuracy": a} for k, a in enumerate(s["per_client"])
                ],
                "seconds": {"total": s["seconds"]},
                "config": {"method": s["settings"]},
            }
            for s in runs
        ]
        for label, runs in kept.items()
    }


def markdown(head: list[str], rows: Iterable[list[str]]) -> str:
    """Returns a Markdown table; an empty text if there are no rows."""
    rows = list(rows)
    if not rows:
        return ""
    return (
        "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *rows])
        + "\n"
    )


def scores_of(found: Found, label: str, key: str = "accuracy") -> list[float | None]:
    """Returns a label's scores by seed; empty if it was not run."""
    return [s[key] for s in found.get(label, [])]


def average(found: Found, labels: list[str], key: str = "accuracy") -> str:
    """Returns the mean over labels and seeds in percent; "-" if one is missing."""
    values = [v for label in labels for v in scores_of(found, label, key)]
    complete = all(label in found for label in labels) and None not in values
    return f"{100 * mean(v for v in values if v is not None):.2f}" if complete else "-"


def put_between(target: Path, mark: str, text: str) -> None:
    """Replaces the text between <!-- mark --> and <!-- /mark --> in a Markdown file."""
    before, begun, rest = target.read_text().partition(f"<!-- {mark} -->")
    _, ended, after = rest.partition(f"<!-- /{mark} -->")
    if not begun or not ended:
        raise ValueError(f"{target} has no place for {mark!r}")
    target.write_text(f"{before}{begun}\n\n{text}\n{ended}{after}")


def verdict(differences: list[float]) -> str:
    """Returns what the differences amount to, in words."""
    return str(statistics.verdict(differences))


def spread(values: list[float | None]) -> str:
    """Returns mean and standard deviation in percent."""
    return str(statistics.spread(values) or "-")
