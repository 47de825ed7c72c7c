"""A comparison: run folders sorted by task and method, over the same seeds; what is best, and whether that is more than chance.

Reads folders only. A *task* is what the methods are compared on: data, split, partition, number of clients. A *row* is a method with its
settings and its model.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from fedloom.errors import DataError, unknown
from fedloom.experiments.report.significance import Spread, Verdict, holm, paired, spread, verdict
from fedloom.experiments.run_folder import LeftOut, Run

METRICS = (
    "accuracy",
    "accuracy_mean",
    "f1_macro",
    "f1_macro_mean",
    "f1_weighted",
    "f1_weighted_mean",
    "auc",
    "auc_mean",
)
LOCAL = "local"
LEVEL = 0.05
# What runs of one row may differ in without being another row: none of it is part of what a method computes.
_HOW = (
    "seed",
    "engine",
    "threads",
    "workers",
    "checkpoint_every",
    "deadline",
    "grace",
    "retries",
    "quorum",
)


@dataclass
class Entry:
    """A row on a task: its runs by seed and what they say together."""

    runs: list[Run]
    score: Spread | None = None
    gain: Verdict | None = None  # over local
    against_best: Verdict | None = None
    p: float | None = None  # of that, corrected for the number of rows (Holm)
    mark: str = ""  # "best" or "second"

    @property
    def like_best(self) -> bool:
        """Whether chance may have put it behind the best."""
        return self.p is not None and self.p >= LEVEL

    def mean(self, of: Callable[[dict[str, Any]], float]) -> float:
        """The mean of a number of the summaries."""
        return mean(of(run.summary) for run in self.runs)

    @property
    def bytes_sent(self) -> float:
        """Bytes up and down that a run has sent, on the mean, without what only measures."""
        return self.mean(lambda s: s["traffic"]["bytes_up"] + s["traffic"]["bytes_down"])

    @property
    def seconds(self) -> float:
        """Seconds that a run took, on the mean."""
        return self.mean(lambda s: s["seconds"]["total"])


@dataclass
class Comparison:
    """tasks and rows: names in the order of their first run. entries: {(task, row): what its runs say}."""

    metric: str
    tasks: list[str]
    rows: list[str]
    entries: dict[tuple[str, str], Entry]
    left_out: list[LeftOut] = field(default_factory=list)

    def on(self, task: str) -> dict[str, Entry]:
        """A task's entries by row."""
        return {row: self.entries[task, row] for row in self.rows if (task, row) in self.entries}

    def overall(self, row: str) -> float | None:
        """A row's mean over all tasks; None if it lacks one."""
        scores = [
            self.entries[task, row].score for task in self.tasks if (task, row) in self.entries
        ]
        known = [score.mean for score in scores if score is not None]
        return mean(known) if len(known) == len(self.tasks) else None


def compare(
    runs: Iterable[Run], left_out: Sequence[LeftOut] = (), metric: str = "accuracy"
) -> Comparison:
    """Sorts runs and compares them. DataError if there is nothing to compare; what does not fit is left out, with the reason."""
    if metric not in METRICS:
        raise unknown("metric", metric, METRICS)
    skipped = list(left_out)
    grouped = _grouped(list(runs), skipped)
    tasks = list(dict.fromkeys(task for task, _ in grouped))
    rows = list(dict.fromkeys(row for _, row in grouped))
    rows.sort(
        key=lambda row: row.split(" ")[0] != LOCAL
    )  # first, as what all are measured by; the others stay in order
    entries: dict[tuple[str, str], Entry] = {}
    for task in tasks:
        here = {row: grouped[task, row] for row in rows if (task, row) in grouped}
        wanted = set().union(*(by_seed.keys() for by_seed in here.values()))
        for row, by_seed in here.items():
            if lacking := sorted(wanted - by_seed.keys()):
                seeds = f"seed{'s' * (len(lacking) > 1)} {', '.join(map(str, lacking))}"
                skipped += [
                    LeftOut(str(run.folder), f"{row} on {task} has no run with {seeds}")
                    for run in by_seed.values()
                ]
                continue
            summaries = [by_seed[seed] for seed in sorted(by_seed)]
            entries[task, row] = Entry(
                summaries, spread(run.summary.get(metric) for run in summaries)
            )
    if not entries:
        raise DataError(
            "there is no completed run to compare"
            + "".join(f"; {each.folder}: {each.reason}" for each in skipped[:3])
        )
    found = Comparison(
        metric,
        tasks,
        [row for row in rows if any((task, row) in entries for task in tasks)],
        entries,
        skipped,
    )
    for task in tasks:
        _judge(found.on(task), metric)
    return found


def _grouped(runs: list[Run], skipped: list[LeftOut]) -> dict[tuple[str, str], dict[int, Run]]:
    """{(task, row): {seed: run}}; of two runs with equal settings and seed the first counts."""
    tasks = _named([_task(run) for run in runs])
    rows = _named([_row(run) for run in runs])
    found: dict[tuple[str, str], dict[int, Run]] = {}
    for run, task, row in zip(runs, tasks, rows, strict=True):
        by_seed = found.setdefault((task, row), {})
        if (first := by_seed.setdefault(run.summary["seed"], run)) is not run:
            skipped.append(
                LeftOut(str(run.folder), f"the same settings and seed as {first.folder}")
            )
    return found


Described = tuple[
    str, dict[str, Any]
]  # a short name, and all that sets it apart from others of that name


def _task(run: Run) -> Described:
    s, config = run.summary, run.config
    partition = {
        key: value
        for key, value in config.get("partition", {}).items()
        if key not in ("seed", "cross_edges")
    }
    data = {
        key: value
        for key, value in config["data"].items()
        if key not in ("seed", "split_seed", "cross_edges", "edges_cut")
    }
    division = f", {s['clients']} clients" + (f" by {s['partition']}" if s.get("partition") else "")
    if (
        config["method"]["name"] == "central"
    ):  # it has everything in one place: the task is that of the others
        division = f", {partition.get('clients', s['clients'])} clients" + (
            f" by {partition['name']}" if partition else ""
        )
    return f"{Path(str(s['dataset'])).name}{division}", {"data": data, "partition": partition}


def _row(run: Run) -> Described:
    config = run.config
    method = {key: value for key, value in config["method"].items() if key != "name"}
    name = Path(run.summary["method"]).stem + (
        f" + {Path(method.pop('base')).stem}" if "base" in method else ""
    )
    rules = {key: value for key, value in config["run"].items() if key not in _HOW}
    return name, {"model": config["model"], "method": method, "run": rules}


def _named(described: list[Described]) -> list[str]:
    """A name for each that equal ones share and others do not: where the short one does not do, with what differs."""
    variants: dict[str, list[dict[str, Any]]] = {}
    for name, about in described:
        known = variants.setdefault(name, [])
        if about not in known:
            known.append(about)
    return [_told_apart(name, about, variants[name]) for name, about in described]


def _told_apart(name: str, about: Mapping[str, Any], variants: list[dict[str, Any]]) -> str:
    flat = [_flat(each) for each in variants]
    keys = sorted(
        {key for each in flat for key in each if any(other.get(key) != each[key] for other in flat)}
    )
    own = _flat(about)
    return name + (
        f" ({', '.join(f'{key}={own[key]}' for key in keys if key in own)})" if keys else ""
    )


def _flat(about: Mapping[str, Any]) -> dict[str, str]:
    flat = {}
    for table, content in about.items():
        for key, value in content.items():
            flat["model" if (table, key) == ("model", "name") else key] = (
                value if isinstance(value, str) else json.dumps(value)
            )
    return flat


def _judge(entries: Mapping[str, Entry], metric: str) -> None:
    """Marks the best and the second, and tests everybody against the best and against local."""
    ranked = sorted(
        (row for row, e in entries.items() if e.score), key=lambda row: -entries[row].score.mean
    )  # type: ignore[union-attr]
    for row, mark in zip(ranked, ("best", "second"), strict=False):
        entries[row].mark = mark
    for row, entry in entries.items():
        if (local := local_beside(entry, entries)) and local is not entry:
            entry.gain = _difference(entry, local, metric)
        if ranked and row != ranked[0]:
            entry.against_best = _difference(entry, entries[ranked[0]], metric)
    corrected = holm({row: e.against_best.p for row, e in entries.items() if e.against_best})
    for row, p in corrected.items():
        entries[row].p = p


def local_beside(entry: Entry, entries: Mapping[str, Entry]) -> Entry | None:
    """What the clients reach alone, with the same models and rules if there are several kinds; None if nobody has run that."""
    ours = _row(entry.runs[0])[1]

    def unlike(other: Entry) -> tuple[bool, bool]:
        theirs = _row(other.runs[0])[1]
        return theirs["model"] != ours["model"], theirs["run"] != ours["run"]

    return min(
        (other for other in entries.values() if _method(other) == LOCAL), key=unlike, default=None
    )


def _method(entry: Entry) -> str:
    return str(entry.runs[0].summary["method"])


def _difference(ours: Entry, theirs: Entry, metric: str) -> Verdict | None:
    found = paired([run.summary for run in ours.runs], [run.summary for run in theirs.runs], metric)
    return verdict(found) if found else None


# ---- as text ----
HEADINGS = ("task", "method", "seeds", "mean", "deviation", "gain over local", "below the best", "p", "corrected p", "mark",
            "bytes up", "bytes down", "seconds", "rounds")  # fmt: skip


def to_csv(c: Comparison) -> str:
    """A line for each task and row, numbers as they are (scores from 0 to 1, differences in points)."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(HEADINGS)
    for task in c.tasks:
        for row, e in c.on(task).items():
            score = (e.score.mean, e.score.deviation) if e.score else (None, None)
            tested = (e.against_best.mean, e.against_best.p) if e.against_best else (None, None)
            sent = (
                e.mean(lambda s, way=way: s["traffic"][f"bytes_{way}"]) for way in ("up", "down")
            )  # type: ignore[misc]
            numbers = [
                len(e.runs),
                *score,
                e.gain.mean if e.gain else None,
                *tested,
                e.p,
                e.mark,
                *sent,
                e.seconds,
            ]
            writer.writerow([task, row, *numbers, e.mean(lambda s: s["rounds"])])
    return text.getvalue()


def to_markdown(c: Comparison) -> str:
    """Tasks across, best in bold, second in italics, ≈ where chance may have put it behind the best."""
    marked = {"best": "**{}**", "second": "*{}*", "": "{}"}

    def text(e: Entry | None) -> str:
        return (
            "-"
            if e is None or e.score is None
            else marked[e.mark].format(e.score) + (" ≈" if e.like_best else "")
        )

    lines = [["method", *c.tasks], ["---"] * (len(c.tasks) + 1)]
    lines += [[row, *(text(c.entries.get((task, row))) for task in c.tasks)] for row in c.rows]
    table = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    return f"{table}\n\n{footnote(c)}\n"


def to_latex(c: Comparison) -> str:
    """The same for a paper, with booktabs; best in bold, second underlined."""
    marked = {"best": r"\textbf{{{}}}", "second": r"\underline{{{}}}", "": "{}"}

    def text(e: Entry | None) -> str:
        if e is None or e.score is None:
            return "--"
        value = str(e.score).replace(" ± ", r" $\pm$ ")
        return marked[e.mark].format(value) + (r"$^{\approx}$" if e.like_best else "")

    lines = [" & ".join(["method", *map(_escaped, c.tasks)]) + r" \\", r"\midrule"]
    lines += [
        " & ".join([_escaped(row), *(text(c.entries.get((task, row))) for task in c.tasks)])
        + r" \\"
        for row in c.rows
    ]
    body = "\n".join(lines)
    head = f"\\begin{{tabular}}{{l{'c' * len(c.tasks)}}}\n\\toprule\n"
    return f"% {footnote(c)}\n{head}{body}\n\\bottomrule\n\\end{{tabular}}\n"


def _escaped(text: str) -> str:
    return "".join(f"\\{char}" if char in "&%$#_{}" else char for char in text)


def footnote(c: Comparison) -> str:
    """What a table's numbers are, in a line."""
    seeds = sorted({len(e.runs) for e in c.entries.values()})
    over = (
        f"{seeds[0]} seed{'s' * (seeds[0] > 1)}"
        if len(seeds) == 1
        else f"{seeds[0]} to {seeds[-1]} seeds"
    )
    few = "" if seeds[0] >= 3 else ", too few for a claim"
    knowing = [
        row
        for row in c.rows
        if any(
            c.entries[t, row].runs[0].knows_cross_edges for t in c.tasks if (t, row) in c.entries
        )
    ]
    told = (
        f" Of the edges that the division cut, {', '.join(knowing)} knew; the others did not."
        if 0 < len(knowing) < len(c.rows)
        else ""
    )
    return (
        f"Test {c.metric.replace('_', ' ')} at the best validation round, %, mean ± standard deviation over {over}{few}; "
        f"≈: not distinguishable from the best (Wilcoxon's signed-rank test over seeds and clients, Holm-corrected p ≥ {LEVEL:g}).{told}"
    )


def write_tables(c: Comparison, folder: Path) -> list[Path]:
    """Writes table.csv, table.md and table.tex; gives the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    made = {"csv": to_csv(c), "md": to_markdown(c), "tex": to_latex(c)}
    paths = [folder / f"table.{suffix}" for suffix in made]
    for path, text in zip(paths, made.values(), strict=True):
        path.write_text(text)
    return paths
