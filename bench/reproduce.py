"""Runs recipes over their seeds with Local beside them, compares with what the papers print, and writes it down in docs/results.md.

python bench/reproduce.py                                      everything, the shortest first (a night)
python bench/reproduce.py --within 25                          25 minutes: an equal share for each paper, its shortest first
python bench/reproduce.py recipes/fedgkc/cora-louvain10.toml   these
python bench/reproduce.py --write                              nothing: the section is made again from what is known

Finished runs are kept in runs/reproduction: started again, it goes on. A recipe that fails is named and the others go on. Exit code 1
if one failed or is below what it is held to (`at_least`); a gap to the paper is a result, not a failure.
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
from recipes import FAMILIES, ROOT, Number, by_hand, kept_file, kept_runs, numbers, run_tables
from sweep import markdown, put_between, spread, sweep

from fedloom.experiments.recipe import make_recipe, read_tables

CLOSE = 1.5  # points that are within what three seeds can tell
METRICS = {
    "accuracy": "",
    "accuracy_mean": "",
    "f1_macro": "macro-F1",
    "f1_weighted": "weighted F1",
    "auc": "AUC",
}
Runs = list[dict[str, Any]]
Known = dict[str, dict[str, Any]]  # {recipe: what docs/results-reproduction.json keeps of it}


# ---- what a number comes to ----
def compare(ours: float | None, paper: float | None) -> tuple[str, str]:
    """The gap to what is printed, both in percent, as text, and what it is called."""
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
    """The runs' scores, as fractions; nothing if one has none."""
    found = [s.get(metric) for s in runs]
    return [] if None in found else [float(v) for v in found if v is not None]


def percent(runs: Runs, metric: str) -> float | None:
    """The mean in percent, None if it is not known."""
    found = scores(runs, metric)
    return 100 * mean(found) if found else None


def short_ones(
    all_of_them: Sequence[Number], minutes: dict[str, float], within: float
) -> list[Number]:
    """Those that fit into `within` minutes: each paper's shortest, variants last, in an equal share of the time, but at least one.

    minutes: how long each takes; infinite if it is not known.
    """
    timed = sorted(
        (n for n in all_of_them if minutes[n.path] < math.inf),
        key=lambda n: (not n.is_plain, minutes[n.path]),
    )
    families = list(dict.fromkeys(n.family for n in timed))
    left = dict.fromkeys(families, within / max(1, len(families)))
    chosen = []
    for n in timed:
        first = not any(other.family == n.family for other in chosen)
        if first or minutes[n.path] <= left[n.family]:
            chosen.append(n)
            left[n.family] -= minutes[n.path]
    return chosen


# ---- running ----
def run(number: Number, workers: int) -> tuple[Runs, Runs]:
    """Runs a number's recipe and Local's over the seeds, or takes what was run before; by seed."""
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
    """Tells whether a result is a recipe's: the recipe may have been changed since."""
    return hashlib.sha256(
        json.dumps([*run_tables(number), number.seeds], sort_keys=True).encode()
    ).hexdigest()[:16]


def entry(number: Number, ours: Runs, local: Runs) -> dict[str, Any]:
    """What docs/results-reproduction.json keeps of a number."""
    keys = ("seed", *METRICS, "val_accuracy", "best_round", "history_hash", "engine")
    short = lambda s: {**{k: s[k] for k in keys if k in s}, "seconds": s["seconds"]["total"]}  # noqa: E731
    changed = "+" if _git("status", "--porcelain", "src", "recipes") else ""
    made = {
        "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
        "commit": _git("rev-parse", "--short", "HEAD").strip() + changed,
    }
    made |= {"cores": os.cpu_count(), "versions": ours[0]["versions"], "recipe": digest(number)}
    return {**made, "ours": [short(s) for s in ours], "local": [short(s) for s in local]}


def newer(made: dict[str, Any], before: dict[str, Any] | None) -> dict[str, Any]:
    """What is to be kept: the same runs, taken from where a sweep keeps them, were made when they were."""
    return (
        before
        if before and all(before[key] == made[key] for key in ("recipe", "ours", "local"))
        else made
    )


def line(number: Number, known: dict[str, Any], expect: Any) -> tuple[str, bool]:
    """What is printed of a number that has been run, and whether it holds."""
    ours = percent(known["ours"], number.metric)
    gap, name = compare(ours, number.paper)
    holds = ours is not None and expect.at_least <= ours <= expect.at_most
    said = f"paper {number.paper:g}, gap {gap}: {name}" if number.paper else "no printed number"
    both = " | ".join(
        f"{who} {spread(scores(known[key], number.metric))}"
        for who, key in (("ours", "ours"), ("Local", "local"))
    )
    wanted = f"{expect.at_least:g}" + (f" to {expect.at_most:g}" if expect.at_most < 100 else "")
    return f"{number.path}: {both} | {said}" + (
        "" if holds else f" | NOT what it is held to, {wanted}"
    ), holds


def _git(*arguments: str) -> str:
    """What git says, nothing where there is none."""
    try:
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""


# ---- writing ----
@cache
def _blame(name: str) -> dict[int, str]:
    """Date and commit that made each line of a file with kept results: a line is a label's runs."""
    path = str(kept_file(name))
    commits = [row.lstrip("^")[:7] for row in _git("blame", "-s", "-l", path).splitlines()]
    dates = {
        commit[:7]: date
        for commit, date in (
            row.split() for row in _git("log", "--format=%H %cs", "--", path).splitlines()
        )
    }
    return {at: f"{dates.get(commit, '')} {commit}".strip() for at, commit in enumerate(commits)}


def made_when(name: str, label: str) -> str:
    """Date and commit of kept results, if git knows."""
    for at, row in enumerate(kept_file(name).read_text().splitlines()):
        if row.startswith(json.dumps(label) + ":") or row.strip() == f"{json.dumps(label)}: [":
            return _blame(name).get(at, "")
    return ""


def rows_of(number: Number, known: Known) -> list[list[str]]:
    """A number's rows in its paper's table: one for each metric that the paper prints."""
    run_now = known.get(number.path)
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
        said = "-" if paper is None else str(paper)
        cells = [spread(list(scores(runs, metric))) for runs in (ours, local)]
        rows.append(
            [
                what,
                str(len(ours) or number.seeds),
                *cells,
                said,
                gap,
                name,
                made,
                f"`python bench/reproduce.py recipes/{number.path}`",
            ]
        )
    return rows


def summary(rows: Iterable[list[str]]) -> str:
    """How many of a paper's numbers are reached, and in how many ours is more than Local's: a line."""
    counts: Counter[str] = Counter()
    more: list[bool] = []
    for _, _, ours, local, paper, _, name, *_ in rows:
        if paper != "-":
            counts["not run" if ours == "-" else "short" if name.startswith("short") else name] += 1
            more += (
                [float(ours.split()[0]) > float(local.split()[0])]
                if "-" not in (ours, local)
                else []
            )
    reached = counts["above"] + counts["reached"]
    words = [f"{reached} reached ({counts['above']} of them more than {CLOSE:g} points above)"]
    words += [
        f"{counts[f'within {CLOSE:g}']} within {CLOSE:g} points below",
        f"{counts['short']} short",
        f"{counts['not run']} not run",
    ]
    return f"printed numbers: {sum(counts.values())}; {', '.join(words)}; more than Local in {sum(more)} of {len(more)}."


def section(all_of_them: Sequence[Number], known: Known, command: str) -> str:
    """The text of the section: what made it, then a table for each paper."""
    dates = sorted({known[path]["date"] for path in known})
    latest = known[max(known, key=lambda path: known[path]["date"])] if known else None
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
    for family, title in {"": "Foundation", **FAMILIES}.items():
        if rows := [row for n in all_of_them if n.family == family for row in rows_of(n, known)]:
            counts.append(f"- **{title}**: {summary(rows)}")
            tables.append(f"### {title}: printed numbers\n\n{markdown(columns, rows)}")
    return "\n".join([" ".join(head) + ".\n", *counts, "", *tables])


def remembered(path: Path, all_of_them: Sequence[Number]) -> Known:
    """What docs/results-reproduction.json keeps of recipes that are still the same."""
    kept = json.loads(path.read_text()) if path.exists() else {}
    return {
        n.path: kept[n.path]
        for n in all_of_them
        if n.path in kept and kept[n.path]["recipe"] == digest(n)
    }


def write(target: Path, all_of_them: Sequence[Number], known: Known, command: str) -> None:
    """Writes results-reproduction.json and the section of the Markdown file beside it."""
    lines = [
        f"{json.dumps(n.path)}: {json.dumps(known[n.path])}" for n in all_of_them if n.path in known
    ]
    target.with_name("results-reproduction.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    put_between(target, "reproduction", section(all_of_them, known, command))


def main() -> None:
    """Prints a line per number as it goes, and writes the section after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipes", nargs="*", type=Path, help="which (none: all)")
    parser.add_argument(
        "--within",
        type=float,
        help="minutes on two quiet cores: each paper's shortest recipes, an equal share for each",
    )
    parser.add_argument(
        "--workers", type=int, default=0, help="runs at a time (0: as many as there are cores)"
    )
    parser.add_argument("--write", action="store_true", help="run nothing: write what is known")
    parser.add_argument(
        "--target",
        type=Path,
        default=ROOT / "docs" / "results.md",
        help="the Markdown file with the section",
    )
    asked = parser.parse_args()
    everything = [*map(by_hand, sorted((ROOT / "recipes").glob("*.toml"))), *numbers()]
    written = {n.path: n for n in everything}
    chosen = [written.get(n.path, n) for n in map(by_hand, asked.recipes)] or everything
    expect = {n.path: make_recipe(read_tables(ROOT / "recipes" / n.path)).expect for n in chosen}
    minutes = {path: e.minutes or math.inf for path, e in expect.items()}
    if asked.within:
        chosen = short_ones(chosen, minutes, asked.within)
    known = remembered(asked.target.with_name("results-reproduction.json"), everything)
    command = " ".join(["python", "bench/reproduce.py", *sys.argv[1:]])
    fedgh.remember_pseudo_graphs()
    bad = {}
    for at, number in enumerate(
        sorted(chosen, key=lambda n: minutes[n.path]) if not asked.write else [], 1
    ):
        try:
            known[number.path] = newer(
                entry(number, *run(number, asked.workers)), known.get(number.path)
            )
            said, holds = line(number, known[number.path], expect[number.path])
        except RuntimeError as error:  # what a sweep raises when all seeds have had their turn
            said, holds = f"{number.path}: FAILED: {error}", False
        print(f"[{at}/{len(chosen)}] {said}", flush=True)
        if not holds:
            bad[number.path] = said
        write(asked.target, everything, known, command)
    if asked.write:
        write(asked.target, everything, known, command)
    if bad:
        print("\n".join(["these failed or are not what they are held to:", *bad.values()]))
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
