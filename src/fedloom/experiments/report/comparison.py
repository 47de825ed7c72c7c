"""Compares run folders: groups them by task and method, ranks methods, tests differences.

It only reads folders. A *task* is data, split, partition and number of clients. A *row* is a method
with its settings and its model. All rows of a task are compared over the same seeds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from fedloom._system import plain_text
from fedloom.errors import DataError, unknown
from fedloom.experiments.display import comparison_html, comparison_text, data_frame
from fedloom.experiments.escaping import csv_text, latex_text, markdown_text
from fedloom.experiments.report.labels import label
from fedloom.experiments.report.significance import Spread, Verdict, holm, paired, spread, verdict
from fedloom.experiments.run_folder import LeftOut, Run
from fedloom.nn import metric_names

# Each metric is compared as a mean weighted by size, and as a mean over clients.
METRICS = tuple(name for metric in metric_names.METRICS for name in (metric, f"{metric}_mean"))
MINIMISED = tuple(f"{name}{mean}" for name in metric_names.MINIMISED for mean in ("", "_mean"))
LOCAL = "local"
CENTRAL = "central"  # one party with all data: a reference, which no federated method has to beat
LEVEL = 0.05
# Settings of a run that do not change what a method computes. Runs of one row may differ in them.
_OPERATIONAL = (
    "seed",
    "engine",
    "device",
    "threads",
    "workers",
    "checkpoint_every",
    "deadline",
    "grace",
    "retries",
    "quorum",
)


def selection_of(summary: Mapping[str, Any]) -> str:
    """Returns the metric whose validation value chose a run's best round."""
    return str(summary.get("selection") or "accuracy")


@dataclass
class Entry:
    """A row on a task.

    Attributes:
        runs: Its runs, by seed.
        score: Their mean score and its standard deviation.
        gain: The difference to local training.
        against_best: The difference to the best row.
        p: The p-value of `against_best`, corrected for the number of rows (Holm).
        mark: "best", "second" or "". Central training has no mark: it does not federate.
    """

    runs: list[Run]
    score: Spread | None = None
    gain: Verdict | None = None
    against_best: Verdict | None = None
    p: float | None = None
    mark: str = ""

    @property
    def like_best(self) -> bool:
        """Whether the difference to the best row may be due to chance."""
        return self.p is not None and self.p >= LEVEL

    @property
    def is_local(self) -> bool:
        """Whether each client trains alone."""
        return self._method == LOCAL

    @property
    def is_reference(self) -> bool:
        """Whether one party has all data. Such a row is shown, but not ranked."""
        return self._method == CENTRAL

    @property
    def _method(self) -> str:
        return str(self.runs[0].summary["method"])

    def mean(self, value: Callable[[dict[str, Any]], float]) -> float:
        """Returns the mean over the runs of a value of their summaries."""
        return mean(value(run.summary) for run in self.runs)

    @property
    def bytes_sent(self) -> float:
        """The mean number of bytes that a run sent up and down, without evaluation."""
        return self.mean(lambda s: s["traffic"]["bytes_up"] + s["traffic"]["bytes_down"])

    @property
    def seconds(self) -> float:
        """The mean number of seconds that a run took."""
        return self.mean(lambda s: s["seconds"]["total"])


@dataclass(repr=False)
class Comparison:
    """The result of `compare`.

    Attributes:
        metric: The score that is compared.
        tasks: The names of the tasks, in the order of their first run.
        rows: The names of the rows, local training first, then in the order of their first run.
        entries: {(task, row): entry}.
        left_out: Folders that could not be used, and why.
    """

    metric: str
    tasks: list[str]
    rows: list[str]
    entries: dict[tuple[str, str], Entry]
    left_out: list[LeftOut] = field(default_factory=list)

    @property
    def minimised(self) -> bool:
        """Whether a lower score is better."""
        return self.metric in MINIMISED

    def ranked(self, task: str) -> list[str]:
        """Returns a task's rows, the best score first. Rows without a score come last."""
        return _ranked(self.on(task), self.minimised)

    def __repr__(self) -> str:
        return comparison_text(self)

    def _repr_html_(self) -> str:
        return comparison_html(self, footnote(self))

    def records(self) -> list[dict[str, Any]]:
        """Returns a record for each task and row.

        Scores are from 0 to 1. `gain` (over local training) and `against_best` are differences in
        points, with their tests.
        """
        return [
            {
                "task": task,
                "method": row,
                "seeds": len(e.runs),
                "mean": e.score.mean if e.score else None,
                "deviation": e.score.deviation if e.score else None,
                "mark": e.mark,
                "like_best": e.like_best,
                "corrected_p": e.p,
                "against_best": e.against_best._asdict() if e.against_best else None,
                "gain": e.gain._asdict() if e.gain else None,
                "bytes": e.bytes_sent,
                "seconds": e.seconds,
                "folders": [str(run.folder) for run in e.runs],
            }
            for task in self.tasks
            for row, e in self.on(task).items()
        ]

    def pandas(self) -> Any:
        """Returns the table as a pandas DataFrame (extra `tables`), a row for each task and row.

        `gain` and `against_best` are the mean differences, in points.
        """
        records = [
            {key: value for key, value in record.items() if key != "folders"}
            | {key: (record[key] or {}).get("mean") for key in ("gain", "against_best")}
            for record in self.records()
        ]
        return data_frame(records)

    def report(self, path: str | Path = "report.html") -> Path:
        """Writes the comparison as one HTML page that needs no network. Returns its path."""
        from fedloom.experiments.report.write import write_report  # which imports this module

        return write_report(self, Path(path))

    def on(self, task: str) -> dict[str, Entry]:
        """Returns a task's entries by row."""
        return {row: self.entries[task, row] for row in self.rows if (task, row) in self.entries}

    def overall(self, row: str) -> float | None:
        """Returns a row's mean over all tasks; None if it has no score for one of them."""
        scores = [
            self.entries[task, row].score for task in self.tasks if (task, row) in self.entries
        ]
        known = [score.mean for score in scores if score is not None]
        return mean(known) if len(known) == len(self.tasks) else None


def compare(runs: Iterable[Run], left_out: Sequence[LeftOut] = (), metric: str = "") -> Comparison:
    """Groups runs by task and row, and compares them.

    Runs that do not fit are listed in `left_out` with the reason. Raises DataError if there is
    nothing to compare.

    Args:
        runs: Completed runs.
        left_out: Folders that are already left out.
        metric: The score to compare. The default is the metric that chose the best rounds, or
            accuracy if the runs differ in it.
    """
    runs, skipped = list(runs), list(left_out)
    chosen = {selection_of(run.summary) for run in runs}
    metric = metric or (chosen.pop() if len(chosen) == 1 else "accuracy")
    if metric not in METRICS:
        raise unknown("metric", metric, METRICS)
    grouped = _grouped(runs, skipped)
    tasks = list(dict.fromkeys(task for task, _ in grouped))
    rows = list(dict.fromkeys(row for _, row in grouped))
    rows.sort(key=lambda row: row.split(" ")[0] != LOCAL)  # local first, the others in their order
    entries: dict[tuple[str, str], Entry] = {}
    for task in tasks:
        here = {row: grouped[task, row] for row in rows if (task, row) in grouped}
        wanted = set().union(*(by_seed.keys() for by_seed in here.values()))
        for row, by_seed in here.items():
            if missing := sorted(wanted - by_seed.keys()):
                seeds = f"seed{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
                skipped += [
                    LeftOut(str(run.folder), f"{row} on {task} has no run with {seeds}")
                    for run in by_seed.values()
                ]
                continue
            ordered = [by_seed[seed] for seed in sorted(by_seed)]
            entries[task, row] = Entry(ordered, spread(run.summary.get(metric) for run in ordered))
    if not entries:
        reasons = "".join(f"; {each.folder}: {each.reason}" for each in skipped[:3])
        raise DataError(f"there is no completed run to compare{reasons}")
    shown = [row for row in rows if any((task, row) in entries for task in tasks)]
    found = Comparison(metric, tasks, shown, entries, skipped)
    for task in tasks:
        _test(found.on(task), metric, found.ranked(task))
    return found


def _grouped(runs: list[Run], skipped: list[LeftOut]) -> dict[tuple[str, str], dict[int, Run]]:
    """Returns {(task, row): {seed: run}}. Of equal settings and seed, the first run counts."""
    tasks = _named([_task(run) for run in runs])
    rows = _named([_row(run) for run in runs])
    found: dict[tuple[str, str], dict[int, Run]] = {}
    for run, task, row in zip(runs, tasks, rows, strict=True):
        by_seed = found.setdefault((task, row), {})
        first = by_seed.setdefault(run.summary["seed"], run)
        if first is not run and not run.is_baseline:  # several runs may keep the same baseline
            skipped.append(
                LeftOut(str(run.folder), f"the same settings and seed as {first.folder}")
            )
    return found


# A short name, and the settings that distinguish it from others of that name.
Described = tuple[str, dict[str, Any]]


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
    clients, strategy = s["clients"], s.get("partition")
    if config["method"]["name"] == CENTRAL:  # it has one client, but its task is the others' task
        clients, strategy = partition.get("clients", clients), partition.get("name")
    division = f", {clients} clients" + (f" by {strategy}" if strategy else "")
    return f"{Path(str(s['dataset'])).name}{division}", {"data": data, "partition": partition}


def _row(run: Run) -> Described:
    config = run.config
    method = {key: value for key, value in config["method"].items() if key != "name"}
    name = Path(run.summary["method"]).stem
    if "base" in method:
        name += f" + {Path(method.pop('base')).stem}"
    settings = {key: value for key, value in config["run"].items() if key not in _OPERATIONAL}
    return name, {"model": config["model"], "method": method, "run": settings}


def _named(described: list[Described]) -> list[str]:
    """Returns a name for each; equal ones share it. It adds the differing settings if needed."""
    variants: dict[str, list[dict[str, Any]]] = {}
    for name, about in described:
        known = variants.setdefault(name, [])
        if about not in known:
            known.append(about)
    return [_distinct_name(name, about, variants[name]) for name, about in described]


def _distinct_name(name: str, about: Mapping[str, Any], variants: list[dict[str, Any]]) -> str:
    flat = [_flat(each) for each in variants]
    keys = sorted(
        {key for each in flat for key in each if any(other.get(key) != each[key] for other in flat)}
    )
    if not keys:
        return name
    own = _flat(about)
    return f"{name} ({', '.join(f'{key}={own[key]}' for key in keys if key in own)})"


def _flat(about: Mapping[str, Any]) -> dict[str, str]:
    flat = {}
    for table, content in about.items():
        for key, value in content.items():
            flat["model" if (table, key) == ("model", "name") else key] = (
                value if isinstance(value, str) else json.dumps(value)
            )
    return flat


def _test(entries: Mapping[str, Entry], metric: str, order: Sequence[str]) -> None:
    """Marks the best and the second row. Tests all rows against the best and against local."""
    ranked = [row for row in order if entries[row].score and not entries[row].is_reference]
    for row, mark in zip(ranked, ("best", "second"), strict=False):
        entries[row].mark = mark
    for row, entry in entries.items():
        if (local := matching_local(entry, entries)) and local is not entry:
            entry.gain = _difference(entry, local, metric)
        if ranked and row != ranked[0] and not entry.is_reference:
            entry.against_best = _difference(entry, entries[ranked[0]], metric)
    corrected = holm({row: e.against_best.p for row, e in entries.items() if e.against_best})
    for row, p in corrected.items():
        entries[row].p = p


def matching_local(entry: Entry, entries: Mapping[str, Entry]) -> Entry | None:
    """Returns the local training that a row is compared with; None if there is none.

    If there are several, it prefers the same model, then the same settings of the run.
    """
    ours = _row(entry.runs[0])[1]

    def differs(other: Entry) -> tuple[bool, bool]:
        theirs = _row(other.runs[0])[1]
        return theirs["model"] != ours["model"], theirs["run"] != ours["run"]

    candidates = (other for other in entries.values() if other.is_local)
    return min(candidates, key=differs, default=None)


def _ranked(entries: Mapping[str, Entry], minimised: bool) -> list[str]:
    sign = 1 if minimised else -1

    def key(row: str) -> tuple[bool, float]:
        score = entries[row].score
        return score is None, sign * score.mean if score else 0.0

    return sorted(entries, key=key)


def _difference(ours: Entry, theirs: Entry, metric: str) -> Verdict | None:
    found = paired([run.summary for run in ours.runs], [run.summary for run in theirs.runs], metric)
    return verdict(found) if found else None


# ---- as text ----
HEADINGS = (
    "task",
    "method",
    "seeds",
    "mean",
    "deviation",
    "gain over local",
    "below the best",
    "p",
    "corrected p",
    "mark",
    "bytes up",
    "bytes down",
    "seconds",
    "rounds",
)


def to_csv(c: Comparison) -> str:
    """Returns a CSV table with a line for each task and row.

    Numbers are not rounded. Scores are from 0 to 1, differences are in points.
    """
    lines: list[Sequence[Any]] = [HEADINGS]
    for task in c.tasks:
        for row, e in c.on(task).items():
            score = (e.score.mean, e.score.deviation) if e.score else (None, None)
            tested = (e.against_best.mean, e.against_best.p) if e.against_best else (None, None)
            gain = e.gain.mean if e.gain else None
            sent = (
                e.mean(lambda s: s["traffic"]["bytes_up"]),
                e.mean(lambda s: s["traffic"]["bytes_down"]),
            )
            numbers = [len(e.runs), *score, gain, *tested, e.p, e.mark, *sent, e.seconds]
            lines.append([task, row, *numbers, e.mean(lambda s: s["rounds"])])
    return csv_text(lines)


def to_markdown(c: Comparison) -> str:
    """Returns a Markdown table with tasks as columns.

    The best row is bold, the second is in italics. ≈ marks rows whose difference to the best may be
    due to chance.
    """
    marked = {"best": "**{}**", "second": "*{}*", "": "{}"}

    def text(e: Entry | None) -> str:
        if e is None or e.score is None:
            return "-"
        return marked[e.mark].format(e.score) + (" ≈" if e.like_best else "")

    lines = [["method", *map(markdown_text, c.tasks)], ["---"] * (len(c.tasks) + 1)]
    lines += [
        [markdown_text(row), *(text(c.entries.get((task, row))) for task in c.tasks)]
        for row in c.rows
    ]
    table = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    return f"{table}\n\n{markdown_text(footnote(c))}\n"


def to_latex(c: Comparison) -> str:
    """Returns the table in LaTeX, for booktabs. The best row is bold, the second underlined."""
    marked = {"best": r"\textbf{{{}}}", "second": r"\underline{{{}}}", "": "{}"}

    def text(e: Entry | None) -> str:
        if e is None or e.score is None:
            return "--"
        value = str(e.score).replace(" ± ", r" $\pm$ ")
        return marked[e.mark].format(value) + (r"$^{\approx}$" if e.like_best else "")

    lines = [" & ".join(["method", *map(latex_text, c.tasks)]) + r" \\", r"\midrule"]
    lines += [
        " & ".join([latex_text(row), *(text(c.entries.get((task, row))) for task in c.tasks)])
        + r" \\"
        for row in c.rows
    ]
    body = "\n".join(lines)
    head = f"\\begin{{tabular}}{{l{'c' * len(c.tasks)}}}\n\\toprule\n"
    return f"% {plain_text(footnote(c), 10_000)}\n{head}{body}\n\\bottomrule\n\\end{{tabular}}\n"


def footnote(c: Comparison) -> str:
    """Returns what the numbers of a table mean, in one line."""
    seeds = sorted({len(e.runs) for e in c.entries.values()})
    over = f"{seeds[0]} to {seeds[-1]} seeds"
    if len(seeds) == 1:
        over = f"{seeds[0]} seed{'s' * (seeds[0] > 1)}"
    few = "" if seeds[0] >= 3 else " (too few for a claim)"
    knowing = [
        row
        for row in c.rows
        if any(
            c.entries[t, row].runs[0].knows_cross_edges for t in c.tasks if (t, row) in c.entries
        )
    ]
    cross = ""
    if 0 < len(knowing) < len(c.rows):
        names = ", ".join(knowing)
        cross = f" The clients of {names} know the edges between them; those of the others do not."
    chosen = {selection_of(run.summary) for e in c.entries.values() for run in e.runs}
    names = " or ".join(label(name) for name in sorted(chosen))
    by = f" (by {names})" if chosen - {"accuracy"} else ""
    central = any(e.is_reference for e in c.entries.values())
    reference = " Central training has all data in one place and is not ranked." * central
    return (
        f"Test {label(c.metric)} at the best validation round{by} in %: mean ± standard "
        f"deviation over {over}{few}. ≈: not distinguishable from the best (Wilcoxon's signed-rank "
        f"test over seeds and clients, Holm-corrected p ≥ {LEVEL:g}).{reference}{cross}"
    )


def write_tables(c: Comparison, folder: Path) -> list[Path]:
    """Writes table.csv, table.md and table.tex. Returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    made = {"csv": to_csv(c), "md": to_markdown(c), "tex": to_latex(c)}
    paths = [folder / f"table.{suffix}" for suffix in made]
    for path, text in zip(paths, made.values(), strict=True):
        path.write_text(text)
    return paths
