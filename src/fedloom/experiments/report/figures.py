"""Describes the figures and tables of a comparison as plain dicts.

Two modules draw them: `draw` and `page/charts.js`. Every figure has an id, title, caption, section
and kind. A row of the comparison has the same colour in all figures, an index into the palette.
Unknown values are None, never 0. Percentages are given from 0 to 1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from statistics import mean, median, stdev
from typing import Any, NamedTuple

from fedloom.experiments.report.comparison import (
    LOCAL,
    Comparison,
    Entry,
    footnote,
    matching_local,
)
from fedloom.experiments.report.significance import points
from fedloom.experiments.run_folder import Run

Figure = dict[str, Any]
LEAST_GAIN = 0.05  # points; a client with a smaller difference to local neither gains nor loses


def figures(c: Comparison) -> list[Figure]:
    """Returns all figures and tables: for each task its results, traffic, clients and data.

    An overview of several tasks comes first, and the list of all runs last.
    """
    parts: list[Figure] = [_overview(c)] if len(c.tasks) > 1 else []
    makers: list[Callable[[Comparison, str], Figure | None]] = [
        _scores,
        _convergence,
        _against_traffic,
        _against_time,
        _phases,
        _phase_table,
        _gains,
        _gains_table,
        _client_table,
        _labels,
        _by_class,
    ]
    parts += [
        figure for task in c.tasks for make in makers if (figure := make(c, task)) is not None
    ]
    return [*parts, _runs(c)]


def _figure(
    c: Comparison,
    section: str,
    kind: str,
    name: str,
    task: str,
    title: str,
    caption: str,
    **content: Any,
) -> Figure:
    ident = slug(name, task)
    shown = f"{title}: {task}" if task and len(c.tasks) > 1 else title
    return {
        "id": ident,
        "title": shown,
        "caption": caption,
        "section": section,
        "kind": kind,
        **content,
    }


def slug(*words: str) -> str:
    """Returns words as the id of a figure. It is also the name of the figure's file."""
    return re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")


def _axis(label: str, unit: str = "", log: bool = False) -> dict[str, Any]:
    return {"label": label, "unit": unit, "log": log}


def _series(c: Comparison, row: str, **content: Any) -> dict[str, Any]:
    return {"name": row, "color": c.rows.index(row), **content}


def _short(value: float | None) -> float | None:
    """Rounds a value to 5 digits: more cannot be seen, and a page of 1,000 clients stays small."""
    return None if value is None else float(f"{value:.5g}")


def _metric(c: Comparison) -> str:
    return f"test {c.metric.replace('_', ' ')}"


# ---- results ----
def _overview(c: Comparison) -> Figure:
    columns = [
        {"name": "method", "align": "left"},
        *({"name": task, "align": "right"} for task in c.tasks),
        {"name": "mean", "align": "right"},
    ]
    rows = []
    for row in c.rows:
        overall = c.overall(row)
        entries = [c.entries.get((task, row)) for task in c.tasks]
        rows.append(
            [
                row,
                *(_score_cell(e) for e in entries),
                _number(overall, f"{100 * overall:.1f}" if overall is not None else "-"),
            ]
        )
    return _figure(
        c,
        "results",
        "table",
        "overview",
        "",
        f"All tasks, {_metric(c)} in %",
        footnote(c),
        columns=columns,
        rows=rows,
    )


def _score_cell(e: Entry | None) -> dict[str, Any]:
    if e is None or e.score is None:
        return {"text": "-", "sort": None, "mark": ""}
    return {
        "text": str(e.score) + (" ≈" if e.like_best else ""),
        "sort": e.score.mean,
        "mark": e.mark,
    }


def _number(value: float | None, text: str) -> dict[str, Any]:
    return {"text": text if value is not None else "-", "sort": value, "mark": ""}


def _scores(c: Comparison, task: str) -> Figure:
    help_ = {
        "over local": "mean difference to local training in points, over seeds and clients",
        "below the best": "mean difference to the best method in points, over seeds and clients",
        "p": "Wilcoxon's signed-rank test of the difference to the best, corrected for the number "
        "of methods (Holm)",
        "sent": "bytes up and down of all clients and rounds, without evaluation; mean over seeds",
    }
    names = [
        "method",
        f"{c.metric.replace('_', ' ')} %",
        "over local",
        "below the best",
        "p",
        "F1 macro %",
        "validation %",
        "sent",
        "seconds",
        "seeds",
    ]
    columns = [
        {
            "name": n,
            "align": "left" if n == "method" else "right",
            **({"help": help_[n]} if n in help_ else {}),
        }
        for n in names
    ]
    rows = []
    for row, e in c.on(task).items():
        means: list[float | None] = []
        for key in ("f1_macro", "val_accuracy"):
            known = [v for run in e.runs if (v := run.summary.get(key)) is not None]
            means.append(mean(known) if known else None)
        gain = e.gain.mean if e.gain else None
        below = e.against_best.mean if e.against_best else None
        rows.append(
            [
                row,
                _score_cell(e),
                _number(gain, points(gain or 0)),
                _number(below, points(below or 0)),
                _number(e.p, f"{e.p or 0:.2g}"),
                *(_number(value, f"{100 * (value or 0):.1f}") for value in means),
                _number(e.bytes_sent, _bytes(e.bytes_sent)),
                _number(e.seconds, f"{e.seconds:.1f}"),
                len(e.runs),
            ]
        )
    return _figure(
        c, "results", "table", "scores", task, "Methods", footnote(c), columns=columns, rows=rows
    )


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def _points_of(run: Run, metric: str) -> dict[int, dict[str, Any]]:
    """Returns {round: entry} of the evaluations. Of several in a round, the last one counts."""
    return {entry["round"]: entry for entry in run.curve if entry.get(metric) is not None}


def _by_round(e: Entry, metric: str) -> tuple[list[int], list[list[dict[str, Any]]]]:
    """Returns the rounds that all seeds evaluated, and for each round the entries of the seeds."""
    curves = [_points_of(run, metric) for run in e.runs]
    rounds = sorted(set.intersection(*(set(curve) for curve in curves)))
    return rounds, [[curve[k] for curve in curves] for k in rounds]


def _banded(entries: Sequence[Sequence[Mapping[str, Any]]], metric: str) -> dict[str, Any]:
    """Returns the means over seeds and, for several seeds, a band of one standard deviation."""
    means = [mean(e[metric] for e in at) for at in entries]
    if not entries or len(entries[0]) < 2:
        return {"y": [_short(m) for m in means]}
    wide = [stdev([e[metric] for e in at]) for at in entries]
    return {
        "y": [_short(m) for m in means],
        "low": [_short(m - s) for m, s in zip(means, wide, strict=True)],
        "high": [_short(m + s) for m, s in zip(means, wide, strict=True)],
    }


def _cut(series: Sequence[Mapping[str, Any]]) -> tuple[dict[str, float], str]:
    """Returns where an axis starts, and a sentence about it for the caption.

    Low scores of the first rounds would otherwise flatten the curves. Both are empty if the whole
    range can be shown.
    """
    ends = [one["y"][-1] for one in series if one["y"]]
    if not ends:
        return {}, ""
    floor = round(min(ends) - max(3 * (max(ends) - min(ends)), 0.12), 2)
    if min(value for one in series for value in one["y"]) > floor - 0.1:
        return {}, ""
    return {"from": floor}, f" Scores below {100 * floor:.0f} % are not shown."


def _convergence(c: Comparison, task: str) -> Figure:
    series = []
    for row, e in c.on(task).items():
        rounds, entries = _by_round(e, c.metric)
        series.append(_series(c, row, x=rounds, **_banded(entries, c.metric)))
    caption = (
        "Mean over the seeds. The band is one standard deviation. The tables show the score at the "
        "best validation round, not at the last round."
    )
    return _curves(c, task, "convergence", "round", caption, _axis("round", "count"), series)


def _against_time(c: Comparison, task: str) -> Figure:
    series = []
    for row, e in c.on(task).items():
        _, entries = _by_round(e, c.metric)
        seconds = [_short(mean(entry["seconds"] for entry in at)) for at in entries]
        series.append(_series(c, row, x=seconds, **_banded(entries, c.metric)))
    caption = (
        "Seconds since the start of a run, with set-up and evaluation, on the machine that ran it. "
        "Runs that share a machine slow each other down."
    )
    return _curves(c, task, "time", "time", caption, _axis("time", "seconds", log=True), series)


def _curves(
    c: Comparison,
    task: str,
    name: str,
    by: str,
    caption: str,
    x: dict[str, Any],
    series: list[dict[str, Any]],
) -> Figure:
    begin, sentence = _cut(series)
    y = {**_axis(_metric(c), "percent"), **begin}
    return _figure(
        c,
        "results",
        "lines",
        name,
        task,
        f"{_score(c)} by {by}",
        caption + sentence,
        x=x,
        y=y,
        series=series,
    )


def _score(c: Comparison) -> str:
    return "Accuracy" if c.metric.startswith("accuracy") else "Score"


# ---- traffic ----
def _against_traffic(c: Comparison, task: str) -> Figure:
    """Returns the figure of scores against the bytes sent until the best validation round."""
    series: list[dict[str, Any]] = []
    levels: list[dict[str, Any]] = []
    reached: list[tuple[float, float]] = []
    for row, e in c.on(task).items():
        if e.score is None:
            continue
        sent = mean(_sent_until_best(run) for run in e.runs)
        if sent == 0:  # drawn as a horizontal line: a logarithmic axis has no 0
            levels.append({"name": row, "color": c.rows.index(row), "y": _short(e.score.mean)})
            continue
        reached.append((sent, e.score.mean))
        wide = e.score.deviation
        spread = (
            {}
            if wide is None
            else {"low": [_short(e.score.mean - wide)], "high": [_short(e.score.mean + wide)]}
        )
        series.append(
            _series(c, row, x=[_short(sent)], y=[_short(e.score.mean)], labels=[row], **spread)
        )
    # The frontier leaves out methods that are worse than local training, which sends nothing.
    local = (level["y"] for level in levels if level["name"].split(" ")[0] == LOCAL)
    floor = max(local, default=0.0)
    frontier = [
        [_short(x), _short(y)]
        for x, y in _frontier([point for point in reached if point[1] > floor])
    ]
    caption = (
        "Bytes of all clients until the best validation round. The steps are the frontier: no "
        "method is better with less traffic. Dashed lines: methods that send nothing."
    )
    return _figure(
        c,
        "traffic",
        "points",
        "traffic",
        task,
        f"{_score(c)} against traffic",
        caption,
        x=_axis("sent", "bytes", log=True),
        y=_axis(_metric(c), "percent"),
        series=series,
        frontier=frontier,
        levels=levels,
    )


def _sent_until_best(run: Run) -> float:
    best = run.summary["best_round"] or run.summary["rounds"]
    return max(
        (entry["bytes_up"] + entry["bytes_down"] for entry in run.curve if entry["round"] <= best),
        default=0,
    )


def _frontier(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns the (cost, score) points that no other point beats at the same cost or less."""
    ordered = sorted(points, key=lambda point: (point[0], -point[1]))
    best = accumulate((y for _, y in ordered), max)
    found: list[tuple[float, float]] = []
    for (x, y), highest in zip(ordered, best, strict=True):
        if y == highest and (not found or y > found[-1][1]):
            found.append((x, y))
    return found


def _phase_rows(c: Comparison, task: str) -> dict[str, dict[str, dict[str, float]]]:
    """Returns {row: {phase: mean counts over the runs}}."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for row, e in c.on(task).items():
        phases = list(
            dict.fromkeys(name for run in e.runs for name in run.summary["traffic"]["phases"])
        )
        counts = [
            [run.summary["traffic"]["phases"].get(name, {}) for run in e.runs] for name in phases
        ]
        keys = ("messages", "bytes_up", "bytes_down")
        found[row] = {
            name: {key: mean(each.get(key, 0) for each in by_run) for key in keys}
            for name, by_run in zip(phases, counts, strict=True)
        }
    return found


def _phases(c: Comparison, task: str) -> Figure:
    known = _phase_rows(c, task)
    names = list(dict.fromkeys(name for phases in known.values() for name in phases))
    series = []
    for k, name in enumerate(names):
        values = [
            _short(sum(phases[name][f"bytes_{way}"] for way in ("up", "down")))
            if name in phases
            else 0
            for phases in known.values()
        ]
        series.append({"name": name, "color": k, "values": values})
    caption = (
        "Bytes up and down of all clients and rounds. The phase evaluate only measures; a "
        "federation does not need it."
    )
    return _figure(
        c,
        "traffic",
        "bars",
        "phases",
        task,
        "Traffic by phase",
        caption,
        rows=list(known),
        x=_axis("sent in all", "bytes"),
        series=series,
    )


def _phase_table(c: Comparison, task: str) -> Figure:
    names = ("method", "phase", "messages", "up", "down")
    columns = [
        {"name": name, "align": "left" if name in ("method", "phase") else "right"}
        for name in names
    ]
    rows = []
    for row, phases in _phase_rows(c, task).items():
        for name, t in phases.items():
            sent = [_number(t[f"bytes_{way}"], _bytes(t[f"bytes_{way}"])) for way in ("up", "down")]
            rows.append([row, name, _number(t["messages"], f"{t['messages']:,.0f}"), *sent])
    return _figure(
        c,
        "traffic",
        "table",
        "phase-table",
        task,
        "Every phase",
        "Mean over the seeds. All clients and rounds.",
        columns=columns,
        rows=rows,
    )


# ---- clients ----
class _Pair(NamedTuple):
    """A client's accuracies with local training and with a method, in the runs of one seed."""

    seed: int
    client: str
    local: float
    method: float


def _pairs(e: Entry, local: Entry) -> list[_Pair]:
    """Returns the clients' accuracies with a method and with local training, if both are known."""
    found: list[_Pair] = []
    for ours, theirs in zip(e.runs, local.runs, strict=True):
        base = {row["id"]: row["accuracy"] for row in theirs.summary["per_client"]}
        known = [
            r
            for r in ours.summary["per_client"]
            if r["accuracy"] is not None and base.get(r["id"]) is not None
        ]
        seed = ours.summary["seed"]
        found += [_Pair(seed, r["id"], base[r["id"]], r["accuracy"]) for r in known]
    return found


def _pairs_by_row(c: Comparison, task: str) -> dict[str, list[_Pair]]:
    entries = c.on(task)
    found = {}
    for row, e in entries.items():
        local = matching_local(e, entries)
        if local is not None and local is not e and (pairs := _pairs(e, local)):
            found[row] = pairs
    return found


def _gains(c: Comparison, task: str) -> Figure | None:
    series = [
        _series(
            c,
            row,
            x=[_short(pair.local) for pair in pairs],
            y=[_short(pair.method) for pair in pairs],
            labels=[f"client {pair.client}, seed {pair.seed}" for pair in pairs],
        )
        for row, pairs in _pairs_by_row(c, task).items()
    ]
    if not series:
        return None
    caption = (
        "Each point is a client of a seed. Above the line the method is better than local "
        "training, below the line it is worse. Click a name to hide or show a method."
    )
    return _figure(
        c,
        "clients",
        "points",
        "gains",
        task,
        "Gains and losses of clients",
        caption,
        x=_axis("test accuracy with local training", "percent"),
        y=_axis("test accuracy with the method", "percent"),
        series=series,
        diagonal=True,
    )


def _gains_table(c: Comparison, task: str) -> Figure | None:
    rows = []
    for row, pairs in _pairs_by_row(c, task).items():
        gains = [100 * (pair.method - pair.local) for pair in pairs]
        counts = [sum(g > LEAST_GAIN for g in gains), sum(g < -LEAST_GAIN for g in gains)]
        numbers = [_number(v, points(v)) for v in (median(gains), min(gains), max(gains))]
        rows.append([row, *counts, len(gains) - sum(counts), *numbers])
    if not rows:
        return None
    names = ("method", "gain", "lose", "the same", "median, points", "worst", "best")
    columns = [{"name": name, "align": "left" if name == "method" else "right"} for name in names]
    return _figure(
        c,
        "clients",
        "table",
        "gains-table",
        task,
        "Gains over local",
        "The clients of all seeds, compared with local training of the same client.",
        columns=columns,
        rows=rows,
    )


def _client_table(c: Comparison, task: str) -> Figure | None:
    entries = {
        row: e
        for row, e in c.on(task).items()
        if any(r["accuracy"] is not None for r in e.runs[0].summary["per_client"])
    }
    if not entries:
        return None
    first = matching_local(next(iter(entries.values())), entries) or next(iter(entries.values()))
    scores = {
        row: {
            (run.summary["seed"], r["id"]): r["accuracy"]
            for run in e.runs
            for r in run.summary["per_client"]
        }
        for row, e in entries.items()
    }
    # A centralized baseline does not have these clients.
    shown = [row for row in entries if scores[row].keys() == scores[_row_of(entries, first)].keys()]
    columns = [
        {"name": name, "align": "right"}
        for name in ("seed", "client", "nodes", "train", "val", "test", *shown)
    ]
    rows = []
    for run in first.runs:
        for r in run.summary["per_client"]:
            values = {row: scores[row].get((run.summary["seed"], r["id"])) for row in shown}
            best = max((v for v in values.values() if v is not None), default=None)
            cells = [
                {
                    "text": "-" if v is None else f"{100 * v:.1f}",
                    "sort": _short(v),
                    "mark": "best" if v is not None and v == best else "",
                }
                for v in values.values()
            ]
            rows.append(
                [run.summary["seed"], r["id"], r["nodes"], r["train"], r["val"], r["test"], *cells]
            )
    return _figure(
        c,
        "clients",
        "table",
        "clients",
        task,
        "Every client",
        "Test accuracy in % at the best validation round of the method.",
        columns=columns,
        rows=rows,
    )


def _row_of(entries: Mapping[str, Entry], wanted: Entry) -> str:
    return next(row for row, e in entries.items() if e is wanted)


# ---- data ----
def _with_statistics(c: Comparison, task: str) -> tuple[Run, dict[str, Any]] | None:
    """Returns the first run that has partition statistics, and the statistics."""
    for e in c.on(task).values():
        for run in e.runs:
            if run.partition:
                return run, run.partition
    return None


def _heat(
    c: Comparison,
    task: str,
    name: str,
    title: str,
    caption: str,
    key: str,
    unit: str,
    format: str,
    high: float | None,
) -> Figure | None:
    found = _with_statistics(c, task)
    if found is None or key not in found[1]["clients"][0]:
        return None
    run, statistics = found
    clients = statistics["clients"]
    values = [[_short(v) if v is not None else None for v in client[key]] for client in clients]
    if key == "labels":  # a class without items is grey, not of the palest colour
        values = [[v or None for v in row] for row in values]
    top = max((v for row in values for v in row if v is not None), default=1)
    return _figure(
        c,
        "data",
        "heat",
        name,
        task,
        title,
        f"{caption} Seed {run.summary['seed']}.",
        rows=[client["name"] for client in clients],
        columns=[str(k) for k in range(len(values[0]))],
        row_label="client",
        column_label="class",
        values=values,
        low=0,
        high=high if high is not None else top,
        format=format,
        unit=unit,
    )


def _labels(c: Comparison, task: str) -> Figure | None:
    caption = "The number of items of each class that a client has. Grey: none."
    return _heat(c, task, "labels", "Classes of each client", caption, "labels", "count", "0", None)


def _by_class(c: Comparison, task: str) -> Figure | None:
    found = _with_statistics(c, task)
    if found is not None and found[1]["task"] == "graph":
        caption = "The mean number of nodes of a client's graphs of a class. Grey: it has none."
        return _heat(
            c,
            task,
            "graph-sizes",
            "Sizes of graphs",
            caption,
            "graph_size_per_class",
            "count",
            "0",
            None,
        )
    caption = (
        "The share of edge ends at a client's nodes of a class whose other end has the same label. "
        "Grey: the class has no edges."
    )
    return _heat(
        c,
        task,
        "homophily",
        "Homophily by client and class",
        caption,
        "homophily_per_class",
        "",
        "0.00",
        1.0,
    )


# ---- runs ----
def _runs(c: Comparison) -> Figure:
    names = (
        "task",
        "method",
        "seed",
        "score %",
        "best round",
        "rounds",
        "engine",
        "seconds",
        "history hash",
        "folder",
    )
    columns = [
        {
            "name": name,
            "align": "left"
            if name in ("task", "method", "engine", "history hash", "folder")
            else "right",
        }
        for name in names
    ]
    rows = []
    for task in c.tasks:
        for row, e in c.on(task).items():
            for run in e.runs:
                s = run.summary
                score, seconds = s.get(c.metric), s["seconds"]["total"]
                shown = [
                    _number(score, f"{100 * (score or 0):.2f}"),
                    s["best_round"] or "-",
                    s["rounds"],
                    s.get("engine", "-"),
                ]
                rows.append(
                    [
                        task,
                        row,
                        s["seed"],
                        *shown,
                        _number(seconds, f"{seconds:.1f}"),
                        s["history_hash"][:16],
                        str(run.folder),
                    ]
                )
    caption = (
        "All numbers come from these folders. fedloom show FOLDER prints a run. Its config.json is "
        "the recipe that reproduces it."
    )
    return _figure(c, "runs", "table", "runs", "", "Every run", caption, columns=columns, rows=rows)
