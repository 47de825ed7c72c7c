"""Runs recipes and Local over their seeds, and writes the comparison to docs/results.md.

python bench/reproduce.py                             all recipes, the shortest first (a night)
python bench/reproduce.py --within 25                 25 minutes: an equal share for each paper
python bench/reproduce.py fedgkc/cora-louvain-10      this recipe (see `fedloom recipes`)
python bench/reproduce.py mine.toml                   a recipe file
python bench/reproduce.py --write                     no runs: write the section from known results

Finished runs are cached in runs/reproduction. A recipe that fails is named, and the others go on.
The exit code is 1 if a recipe failed or is below its bound (`at_least`). A gap to the paper is a
result, not a failure.
"""

import argparse
import datetime
import hashlib
import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import fedgh
from recipes import (
    EXAMPLES,
    PAPERS,
    ROOT,
    Number,
    from_recipe,
    kept_file,
    kept_runs,
    numbers,
    run_tables,
)
from sweep import markdown, put_between, spread, sweep

from fedloom.experiments.recipe import make_recipe
from fedloom.experiments.recipe_files import entries, find_tables

CLOSE = 1.5  # points: a difference that three seeds cannot tell from zero
METRICS = {
    "accuracy": "",
    "accuracy_mean": "",
    "f1_macro": "macro-F1",
    "f1_weighted": "weighted F1",
    "auc": "AUC",
}
Runs = list[dict[str, Any]]
Known = dict[str, dict[str, Any]]  # {recipe: its entry in reproduction.json}


# ---- verdicts ----
def compare(ours: float | None, paper: float | None) -> tuple[str, str]:
    """Returns the gap to the printed number as text, and its name. Both numbers are in percent."""
    if ours is None or paper is None:
        return "-", "-"
    gap = round(ours - paper, 1) + 0.0
    if gap > CLOSE:
        name = "above"
    elif gap >= 0:
        name = "reached"
    else:
        name = f"within {CLOSE:g}" if gap >= -CLOSE else f"short by {-gap:.1f}"
    return f"{gap:+.1f}", name


def scores(runs: Runs, metric: str) -> list[float]:
    """Returns the runs' scores as fractions; an empty list if one run has none."""
    found = [s.get(metric) for s in runs]
    return [] if None in found else [float(v) for v in found if v is not None]


def percent(runs: Runs, metric: str) -> float | None:
    """Returns the mean in percent; None if it is not known."""
    found = scores(runs, metric)
    return 100 * mean(found) if found else None


def short_ones(
    everything: Sequence[Number], minutes: dict[str, float], within: float
) -> list[Number]:
    """Returns the numbers that fit into a budget of time.

    Each paper gets an equal share and fills it with its shortest numbers, variants last. Each gets
    at least one.

    Args:
        everything: The numbers to choose from.
        minutes: The time of each; infinite if it is not known.
        within: The budget in minutes.
    """
    timed = sorted(
        (n for n in everything if minutes[n.name] < math.inf),
        key=lambda n: (not n.is_plain, minutes[n.name]),
    )
    groups = list(dict.fromkeys(n.group for n in timed))
    left = dict.fromkeys(groups, within / max(1, len(groups)))
    chosen = []
    for n in timed:
        first = not any(other.group == n.group for other in chosen)
        if first or minutes[n.name] <= left[n.group]:
            chosen.append(n)
            left[n.group] -= minutes[n.name]
    return chosen


# ---- running ----
def run(number: Number, workers: int) -> tuple[Runs, Runs]:
    """Returns a number's runs and Local's, by seed. Finished runs are read from the cache."""
    ours, local = run_tables(number)
    found = sweep(
        {"ours": ours, "local": local},
        number.seeds,
        lambda *_: None,
        Path("runs/reproduction"),
        workers=workers,
    )
    return found["ours"], found["local"]


def digest(number: Number) -> str:
    """Identifies the recipe of a result. It differs if the recipe was changed since."""
    return hashlib.sha256(
        json.dumps([*run_tables(number), number.seeds], sort_keys=True).encode()
    ).hexdigest()[:16]


def entry(number: Number, ours: Runs, local: Runs) -> dict[str, Any]:
    """Returns a number's entry in reproduction.json."""
    keys = ("seed", *METRICS, "val_accuracy", "best_round", "history_hash", "engine")
    short = lambda s: {**{k: s[k] for k in keys if k in s}, "seconds": s["seconds"]["total"]}  # noqa: E731
    changed = "+" if _git("status", "--porcelain", "src") else ""
    made = {
        "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
        "commit": _git("rev-parse", "--short", "HEAD").strip() + changed,
    }
    made |= {"cores": os.cpu_count(), "versions": ours[0]["versions"], "recipe": digest(number)}
    return {**made, "ours": [short(s) for s in ours], "local": [short(s) for s in local]}


def newer(made: dict[str, Any], before: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the older entry if both hold the same runs: cached runs keep their date."""
    return (
        before
        if before and all(before[key] == made[key] for key in ("recipe", "ours", "local"))
        else made
    )


def line(number: Number, known: dict[str, Any], expect: Any) -> tuple[str, bool]:
    """Returns the line to print for a number that was run, and whether it is within bounds."""
    ours = percent(known["ours"], number.metric)
    gap, name = compare(ours, number.paper)
    holds = ours is not None and expect.at_least <= ours <= expect.at_most
    text = f"paper {number.paper:g}, gap {gap}: {name}" if number.paper else "no printed number"
    both = " | ".join(
        f"{who} {spread(scores(known[key], number.metric))}"
        for who, key in (("ours", "ours"), ("Local", "local"))
    )
    wanted = f"{expect.at_least:g}" + (f" to {expect.at_most:g}" if expect.at_most < 100 else "")
    verdict = "" if holds else f" | OUT OF BOUNDS, expected {wanted}"
    return f"{number.name}: {both} | {text}{verdict}", holds


def _git(*arguments: str) -> str:
    """Returns the output of git; an empty text if there is no git or no repository."""
    try:
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""


# ---- writing ----
@cache
def _blame(name: str) -> dict[int, str]:
    """Returns date and commit of each line of a file with kept results. A line is a label."""
    path = str(kept_file(name))
    commits = [row.lstrip("^")[:7] for row in _git("blame", "-s", "-l", path).splitlines()]
    dates = {
        commit[:7]: date
        for commit, date in (
            row.split()
            for row in _git("log", "--follow", "--format=%H %cs", "--", path).splitlines()
        )
    }
    return {at: f"{dates.get(commit, '')} {commit}".strip() for at, commit in enumerate(commits)}


def made_when(name: str, label: str) -> str:
    """Returns date and commit of kept results; an empty text if git does not know them."""
    for at, row in enumerate(kept_file(name).read_text().splitlines()):
        if row.startswith(json.dumps(label) + ":") or row.strip() == f"{json.dumps(label)}: [":
            return _blame(name).get(at, "")
    return ""


def rows_of(number: Number, known: Known) -> list[list[str]]:
    """Returns a number's rows in its paper's table: one for each metric that the paper prints."""
    run_now = known.get(number.name)
    if run_now:
        ours, local, made = (
            run_now["ours"],
            run_now["local"],
            f"run {run_now['date']} {run_now['commit']}",
        )
    else:
        ours, local = kept_runs(number)
        made = (
            f"kept, not run now: {made_when(number.kept, number.label)}".rstrip(": ")
            if ours
            else "not run"
        )
    rows = []
    for metric, paper in {number.metric: number.paper, **number.also}.items():
        gap, name = compare(percent(ours, metric), paper)
        what = (
            f"{number.source}{METRICS[metric] and ', '}{METRICS[metric]}"
            if metric != number.metric
            else number.source
        )
        text = "-" if paper is None else str(paper)
        cells = [spread(list(scores(runs, metric))) for runs in (ours, local)]
        rows.append(
            [
                what,
                str(len(ours) or number.seeds),
                *cells,
                text,
                gap,
                name,
                made,
                f"`python bench/reproduce.py {number.name}`",
            ]
        )
    return rows


def summary(rows: Iterable[list[str]]) -> str:
    """Returns a line: how many of a paper's numbers are reached, and how often we beat Local."""
    counts: Counter[str] = Counter()
    more: list[bool] = []
    for _, _, ours, local, paper, _, name, *_ in rows:
        if paper != "-":
            counts["not run" if ours == "-" else "short" if name.startswith("short") else name] += 1
            if "-" not in (ours, local):
                more.append(float(ours.split()[0]) > float(local.split()[0]))
    reached = counts["above"] + counts["reached"]
    words = [
        f"{reached} reached ({counts['above']} of them more than {CLOSE:g} points above)",
        f"{counts[f'within {CLOSE:g}']} within {CLOSE:g} points below",
        f"{counts['short']} short",
        f"{counts['not run']} not run",
    ]
    return (
        f"printed numbers: {sum(counts.values())}; {', '.join(words)}; "
        f"more than Local in {sum(more)} of {len(more)}."
    )


def section(everything: Sequence[Number], known: Known, command: str) -> str:
    """Returns the text of the section: its origin, then a table for each paper."""
    dates = sorted({entry["date"] for entry in known.values()})
    latest = max(known.values(), key=lambda entry: entry["date"]) if known else None
    head = [
        f"Made by `{command}`"
        + (f", runs of {' to '.join(dict.fromkeys((dates[0], dates[-1])))}" if dates else "")
    ]
    if latest:
        versions = ", ".join(f"{k} {v}" for k, v in latest["versions"].items())
        head.append(f"on a machine with {latest['cores']} cores. {versions}")
    columns = [
        "what is printed",
        "seeds",
        "ours",
        "Local",
        "paper",
        "gap",
        "verdict",
        "made",
        "command",
    ]
    counts, tables = [], []
    for group, title in {EXAMPLES: "Foundation", **PAPERS}.items():
        if rows := [row for n in everything if n.group == group for row in rows_of(n, known)]:
            counts.append(f"- **{title}**: {summary(rows)}")
            tables.append(f"### {title}: printed numbers\n\n{markdown(columns, rows)}")
    return "\n".join([" ".join(head) + ".\n", *counts, "", *tables])


def remembered(path: Path, everything: Sequence[Number]) -> Known:
    """Returns the entries of reproduction.json whose recipes have not changed."""
    kept = json.loads(path.read_text()) if path.exists() else {}
    return {
        n.name: kept[n.name]
        for n in everything
        if n.name in kept and kept[n.name]["recipe"] == digest(n)
    }


def write(
    target: Path, results: Path, everything: Sequence[Number], known: Known, command: str
) -> None:
    """Writes the results as JSON, and the section of the Markdown file."""
    lines = [
        f"{json.dumps(n.name)}: {json.dumps(known[n.name])}" for n in everything if n.name in known
    ]
    results.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    put_between(target, "reproduction", section(everything, known, command))


def main() -> None:
    """Prints a line for each number, and writes the section after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipes", nargs="*", help="PAPER/ENTRY or TOML files (default: all)")
    parser.add_argument(
        "--within",
        type=float,
        help="minutes on two idle cores; each paper's shortest recipes, an equal share for each",
    )
    parser.add_argument(
        "--workers", type=int, default=0, help="concurrent runs (0 = the number of cores)"
    )
    parser.add_argument("--write", action="store_true", help="run nothing, write known results")
    parser.add_argument(
        "--target",
        type=Path,
        default=ROOT / "docs" / "results.md",
        help="the Markdown file with the section",
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=ROOT / "bench" / "results" / "reproduction.json",
        help="the results as JSON",
    )
    args = parser.parse_args()
    examples = [from_recipe(f"{EXAMPLES}/{entry}") for entry in entries(EXAMPLES)]
    everything = [*examples, *numbers()]
    by_name = {n.name: n for n in everything}
    chosen = [by_name.get(name) or from_recipe(name) for name in args.recipes] or everything
    expect = {n.name: make_recipe(find_tables(n.name)).expect for n in chosen}
    minutes = {name: e.minutes or math.inf for name, e in expect.items()}
    if args.within:
        chosen = short_ones(chosen, minutes, args.within)
    known = remembered(args.results, everything)
    command = " ".join(["python", "bench/reproduce.py", *sys.argv[1:]])
    fedgh.remember_pseudo_graphs()
    bad = {}
    if args.write:
        chosen = []
        write(args.target, args.results, everything, known, command)
    for at, number in enumerate(sorted(chosen, key=lambda n: minutes[n.name]), 1):
        try:
            known[number.name] = newer(
                entry(number, *run(number, args.workers)), known.get(number.name)
            )
            text, holds = line(number, known[number.name], expect[number.name])
        except RuntimeError as error:  # raised by a sweep after all seeds have run
            text, holds = f"{number.name}: FAILED: {error}", False
        print(f"[{at}/{len(chosen)}] {text}", flush=True)
        if not holds:
            bad[number.name] = text
        write(args.target, args.results, everything, known, command)
    if bad:
        print("\n".join(["these failed or are out of bounds:", *bad.values()]))
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
