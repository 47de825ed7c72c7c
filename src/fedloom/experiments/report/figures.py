"""Figures and tables of a comparison, described as plain dicts. Two renderers know how things are drawn: `fedloom.draw`, `page/charts.js`.

Every figure has id, title, caption, section and kind; a row of the comparison has one colour, an index into the palette, in all of them.
Values that are not known are None, never 0. Percentages are given from 0 to 1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from statistics import mean, median, stdev
from typing import Any

from fedloom.experiments.report.comparison import LOCAL, Comparison, Entry, footnote, local_beside
from fedloom.experiments.report.significance import points
from fedloom.experiments.run_folder import Run

Figure = dict[str, Any]
LEAST_GAIN = 0.05  # points between local and a method below which a client neither gains nor loses


def figures(c: Comparison) -> list[Figure]:
    """All figures and tables, in the order of a page: results, traffic, clients, data, runs; of each task in turn."""
    parts: list[Figure] = [_overview(c)] if len(c.tasks) > 1 else []
    made: list[Callable[[Comparison, str], Figure | None]] = [
        _scores, _convergence, _against_traffic, _against_time, _phases, _phase_table, _gains, _who_gains, _client_table, _labels, _by_class
    ]  # fmt: skip
    parts += [figure for task in c.tasks for make in made if (figure := make(c, task)) is not None]
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
    """Words as the id of a figure, which is also the name of its file."""
    return re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")


def _axis(label: str, unit: str = "", log: bool = False) -> dict[str, Any]:
    return {"label": label, "unit": unit, "log": log}


def _series(c: Comparison, row: str, **content: Any) -> dict[str, Any]:
    return {"name": row, "color": c.rows.index(row), **content}


def _short(value: float | None) -> float | None:
    return (
        None if value is None else float(f"{value:.5g}")
    )  # nobody sees more, and a page of 1,000 clients should stay small


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
        "over local": "mean difference in points to what the same clients reach alone, over seeds and clients",
        "below the best": "mean difference in points to the best method, over seeds and clients",
        "p": "Wilcoxon's signed-rank test of that difference, corrected for the number of methods (Holm)",
        "sent": "up and down, all clients and rounds, without what only measures; mean of the seeds",
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
        of = {key: [run.summary.get(key) for run in e.runs] for key in ("f1_macro", "val_accuracy")}
        means = {
            key: mean(known) if (known := [v for v in values if v is not None]) else None
            for key, values in of.items()
        }
        gain, below = (
            e.gain.mean if e.gain else None,
            e.against_best.mean if e.against_best else None,
        )
        rows.append([
            row, _score_cell(e), _number(gain, points(gain or 0)), _number(below, points(below or 0)), _number(e.p, f"{e.p or 0:.2g}"),
            *(_number(means[key], f"{100 * (means[key] or 0):.1f}") for key in means),
            _number(e.bytes_sent, _bytes(e.bytes_sent)), _number(e.seconds, f"{e.seconds:.1f}"), len(e.runs),
        ])  # fmt: skip
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
    """{round: entry} of the evaluations; where a round has several, the last."""
    return {entry["round"]: entry for entry in run.curve if entry.get(metric) is not None}


def _by_round(e: Entry, metric: str) -> tuple[list[int], list[list[dict[str, Any]]]]:
    """The rounds that all seeds have evaluated, and each seed's entries at them."""
    curves = [_points_of(run, metric) for run in e.runs]
    rounds = sorted(set.intersection(*(set(curve) for curve in curves)))
    return rounds, [[curve[k] for curve in curves] for k in rounds]


def _banded(entries: Sequence[Sequence[Mapping[str, Any]]], metric: str) -> dict[str, Any]:
    """Mean over seeds, and one standard deviation to both sides if there are several."""
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
    """Where an axis begins if the first rounds of some would press all that counts into a line; and what a caption says of it."""
    ends = [one["y"][-1] for one in series if one["y"]]
    if not ends:
        return {}, ""
    floor = round(min(ends) - max(3 * (max(ends) - min(ends)), 0.12), 2)
    if min(value for one in series for value in one["y"]) > floor - 0.1:
        return {}, ""
    return {"from": floor}, f" What is below {100 * floor:.0f} % is not shown."


def _convergence(c: Comparison, task: str) -> Figure:
    series = []
    for row, e in c.on(task).items():
        rounds, entries = _by_round(e, c.metric)
        series.append(_series(c, row, x=rounds, **_banded(entries, c.metric)))
    caption = "Mean over the seeds, band: one standard deviation. What counts is the score at the best validation round, not at the end."
    return _curves(c, task, "convergence", "round", caption, _axis("round", "count"), series)


def _against_time(c: Comparison, task: str) -> Figure:
    series = []
    for row, e in c.on(task).items():
        _, entries = _by_round(e, c.metric)
        seconds = [_short(mean(entry["seconds"] for entry in at)) for at in entries]
        series.append(_series(c, row, x=seconds, **_banded(entries, c.metric)))
    caption = "Seconds of a run so far, set-up and evaluation too, on the machine that ran it; runs beside each other slow each other down."
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
    begin, said = _cut(series)
    y = {**_axis(_metric(c), "percent"), **begin}
    return _figure(
        c,
        "results",
        "lines",
        name,
        task,
        f"{_score(c)} by {by}",
        caption + said,
        x=x,
        y=y,
        series=series,
    )


def _score(c: Comparison) -> str:
    return "Accuracy" if c.metric.startswith("accuracy") else "Score"


# ---- traffic ----
def _against_traffic(c: Comparison, task: str) -> Figure:
    """What had to travel until the round that counts, against what that gave."""
    series: list[dict[str, Any]] = []
    levels: list[dict[str, Any]] = []
    reached: list[tuple[float, float]] = []
    for row, e in c.on(task).items():
        if e.score is None:
            continue
        sent = mean(_sent_until_best(run) for run in e.runs)
        if sent == 0:  # nothing travels: a level, as there is no zero on a logarithmic axis
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
    alone = max(
        (level["y"] for level in levels if level["name"].split(" ")[0] == LOCAL), default=0.0
    )  # for nothing at all
    frontier = [
        [_short(x), _short(y)]
        for x, y in _frontier([point for point in reached if point[1] > alone])
    ]
    caption = "Bytes of all clients until the best validation round. Along the steps nobody is better for less. Dashed: nothing travels."
    return _figure(c, "traffic", "points", "traffic", task, f"{_score(c)} against traffic", caption, x=_axis("sent", "bytes", log=True),
                   y=_axis(_metric(c), "percent"), series=series, frontier=frontier, levels=levels)  # fmt: skip


def _sent_until_best(run: Run) -> float:
    best = run.summary["best_round"] or run.summary["rounds"]
    return max(
        (entry["bytes_up"] + entry["bytes_down"] for entry in run.curve if entry["round"] <= best),
        default=0,
    )


def _frontier(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of (cost, score) those that nobody beats at their cost or less."""
    ordered = sorted(points, key=lambda point: (point[0], -point[1]))
    best = accumulate((y for _, y in ordered), max)
    found: list[tuple[float, float]] = []
    for (x, y), highest in zip(ordered, best, strict=True):
        if y == highest and (not found or y > found[-1][1]):
            found.append((x, y))
    return found


def _phase_rows(c: Comparison, task: str) -> dict[str, dict[str, dict[str, float]]]:
    """{row: {phase: mean counts of the runs}}."""
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
            name: {key: mean(each.get(key, 0) for each in of) for key in keys}
            for name, of in zip(phases, counts, strict=True)
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
    caption = "Up and down, all clients and rounds; what only measures (evaluate) need not be run by a federation."
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
        "Mean of the seeds, all clients and rounds.",
        columns=columns,
        rows=rows,
    )


# ---- clients ----
def _pairs(e: Entry, local: Entry) -> list[tuple[int, str, float, float]]:
    """(seed, client, alone, with the method) where both are known."""
    found: list[tuple[int, str, float, float]] = []
    for ours, theirs in zip(e.runs, local.runs, strict=True):
        alone = {row["id"]: row["accuracy"] for row in theirs.summary["per_client"]}
        known = [
            r
            for r in ours.summary["per_client"]
            if r["accuracy"] is not None and alone.get(r["id"]) is not None
        ]
        found += [(ours.summary["seed"], r["id"], alone[r["id"]], r["accuracy"]) for r in known]
    return found


def _beside_local(c: Comparison, task: str) -> dict[str, list[tuple[int, str, float, float]]]:
    entries = c.on(task)
    found = {}
    for row, e in entries.items():
        local = local_beside(e, entries)
        if local is not None and local is not e and (pairs := _pairs(e, local)):
            found[row] = pairs
    return found


def _gains(c: Comparison, task: str) -> Figure | None:
    known = _beside_local(c, task)
    series = [
        _series(c, row, x=[_short(alone) for _, _, alone, _ in pairs], y=[_short(with_) for *_, with_ in pairs],
                labels=[f"client {client}, seed {seed}" for seed, client, *_ in pairs]) for row, pairs in known.items()
    ]  # fmt: skip
    if not series:
        return None
    caption = "Each point is a client of a seed: above the line it gains from federating, below it loses. Press a name to hide or show a method."
    return _figure(c, "clients", "points", "gains", task, "Who gains and who loses", caption, x=_axis("test accuracy alone", "percent"),
                   y=_axis("test accuracy with the method", "percent"), series=series, diagonal=True)  # fmt: skip


def _who_gains(c: Comparison, task: str) -> Figure | None:
    rows = []
    for row, pairs in _beside_local(c, task).items():
        gains = [100 * (with_ - alone) for *_, alone, with_ in pairs]
        counts = [sum(g > LEAST_GAIN for g in gains), sum(g < -LEAST_GAIN for g in gains)]
        numbers = [_number(v, points(v)) for v in (median(gains), min(gains), max(gains))]
        rows.append([row, *counts, len(gains) - sum(counts), *numbers])
    if not rows:
        return None
    names = ("method", "gain", "lose", "the same", "median, points", "worst", "best")
    columns = [{"name": name, "align": "left" if name == "method" else "right"} for name in names]
    return _figure(c, "clients", "table", "gains-table", task, "Gains over local", "Clients of all seeds, against the same client alone.",
                   columns=columns, rows=rows)  # fmt: skip


def _client_table(c: Comparison, task: str) -> Figure | None:
    entries = {
        row: e
        for row, e in c.on(task).items()
        if any(r["accuracy"] is not None for r in e.runs[0].summary["per_client"])
    }
    if not entries:
        return None
    first = local_beside(next(iter(entries.values())), entries) or next(iter(entries.values()))
    scores = {
        row: {
            (run.summary["seed"], r["id"]): r["accuracy"]
            for run in e.runs
            for r in run.summary["per_client"]
        }
        for row, e in entries.items()
    }
    shown = [
        row for row in entries if scores[row].keys() == scores[_row_of(entries, first)].keys()
    ]  # a pooled baseline has no such clients
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
    return _figure(c, "clients", "table", "clients", task, "Every client", "Test accuracy in %, at the method's best validation round.",
                   columns=columns, rows=rows)  # fmt: skip


def _row_of(entries: Mapping[str, Entry], wanted: Entry) -> str:
    return next(row for row, e in entries.items() if e is wanted)


# ---- data ----
def _held(c: Comparison, task: str) -> Run | None:
    """The run whose clients are shown: the first seed's that says who holds what."""
    return next((run for e in c.on(task).values() for run in e.runs if run.sizes), None)


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
    run = _held(c, task)
    if run is None or run.sizes is None or key not in run.sizes["clients"][0]:
        return None
    clients = run.sizes["clients"]
    values = [[_short(v) if v is not None else None for v in client[key]] for client in clients]
    if key == "labels":
        values = [
            [v or None for v in row] for row in values
        ]  # absent is grey, not the palest colour
    top = max((v for row in values for v in row if v is not None), default=1)
    names = [client["name"] for client in clients]
    return _figure(c, "data", "heat", name, task, title, f"{caption} Seed {run.summary['seed']}.", rows=names,
                   columns=[str(k) for k in range(len(values[0]))], row_label="client", column_label="class", values=values, low=0,
                   high=high if high is not None else top, format=format, unit=unit)  # fmt: skip


def _labels(c: Comparison, task: str) -> Figure | None:
    caption = "Items of each class that a client holds; grey: none."
    return _heat(
        c, task, "labels", "Who holds which classes", caption, "labels", "count", "0", None
    )


def _by_class(c: Comparison, task: str) -> Figure | None:
    run = _held(c, task)
    if run is not None and run.sizes and run.sizes["task"] == "graph":
        caption = "Mean number of nodes of a client's graphs of a class; grey: it has none."
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
    caption = "Of all edge ends at a client's nodes of a class, the share whose other end has the same label; grey: there are none."
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
    caption = "Each number comes from these folders: fedloom show FOLDER prints one, and its config.json is the recipe that makes it again."
    return _figure(c, "runs", "table", "runs", "", "Every run", caption, columns=columns, rows=rows)
