"""Describes the figures and tables of a comparison as plain dicts.

Two modules draw them: `draw` and `page/charts.js`. Every figure has an id, title, caption, section
and kind. A row of the comparison has the same colour in all figures, an index into the palette.
Unknown values are None, never 0. Percentages are given from 0 to 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from statistics import mean, median, quantiles, stdev
from typing import Any, NamedTuple

from fedloom.experiments.report.class_figures import class_figures, class_names
from fedloom.experiments.report.comparison import (
    Comparison,
    Entry,
    footnote,
    matching_local,
    selection_of,
)
from fedloom.experiments.report.headline import in_bytes
from fedloom.experiments.report.labels import label
from fedloom.experiments.report.settings_figures import settings_figures
from fedloom.experiments.report.significance import points
from fedloom.experiments.report.spec import (
    Figure,
    axis,
    columns,
    make_figure,
    number,
    percent,
    series,
    short,
)
from fedloom.experiments.report.update_figures import update_figures
from fedloom.experiments.run_folder import Run

LEAST_GAIN = 0.05  # points; a client with a smaller difference to local neither gains nor loses
_PARTS = ("train", "evaluate", "setup", "load")  # parts with the same colour in all figures
# Curves are cut below this share of their points if the rest would lose much of the height.
_SHOWN = 0.95


def figures(c: Comparison) -> list[Figure]:
    """Returns all figures and tables, by section.

    An overview of several tasks comes first, then for each task its results, classes, clients and
    their updates, cost and data. The settings and the list of all runs come last.
    """
    parts: list[Figure] = [_overview(c)] if len(c.tasks) > 1 else []
    makers: list[Callable[[Comparison, str], Iterable[Figure]]] = [
        _results,
        class_figures,
        _clients,
        update_figures,
        _cost,
        _data,
    ]
    parts += [figure for task in c.tasks for make in makers for figure in make(c, task)]
    return [*parts, *settings_figures(c), _runs(c)]


def _metric(c: Comparison) -> str:
    return f"test {label(c.metric)}"


def _title(text: str) -> str:
    return text[0].upper() + text[1:]


def _known(found: Iterable[Figure | None]) -> list[Figure]:
    return [figure for figure in found if figure is not None]


# ---- results ----
def _overview(c: Comparison) -> Figure:
    rows = []
    sign = 1 if c.minimised else -1
    for row in sorted(c.rows, key=lambda row: sign * (c.overall(row) or 0)):
        overall = c.overall(row)
        entries = [c.entries.get((task, row)) for task in c.tasks]
        rows.append([row, *(_score_cell(e) for e in entries), percent(overall)])
    return make_figure(
        c,
        "results",
        "table",
        "overview",
        "",
        f"All tasks, {_metric(c)} in %",
        footnote(c),
        columns=columns(["method", *c.tasks, "mean"], ["method"]),
        rows=rows,
        sorted_by={"column": len(c.tasks) + 1, "descending": not c.minimised},
    )


def _score_cell(e: Entry | None) -> dict[str, Any]:
    if e is None or e.score is None:
        return {"text": "-", "sort": None, "mark": ""}
    return {
        "text": str(e.score) + (" ≈" if e.like_best else ""),
        "sort": e.score.mean,
        "mark": e.mark,
    }


def _results(c: Comparison, task: str) -> list[Figure]:
    """Returns the table of scores, the highest first, and the curves of scores and losses."""
    curves = _known([_convergence(c, task), _losses(c, task)])
    caption = "The table above shows the score at the best validation round, not at the last round."
    if any(len(e.runs) > 1 for e in c.on(task).values()):
        caption = f"Mean over the seeds, with a band of one standard deviation. {caption}"
    group = make_figure(c, "results", "group", "curves", task, "Curves", caption, figures=curves)
    found = [_scores(c, task), group]
    if len(curves) < 2:
        found.append(_no_losses(c, task))
    return found


def _scores(c: Comparison, task: str) -> Figure:
    score, f1 = f"{label(c.metric)} %", "macro F1 %"
    help_ = {
        score: f"{_metric(c)} at the best validation round, mean ± standard deviation over seeds",
        "over local": "mean difference to local training in points, over seeds and clients, with "
        "its 95 % interval",
        "below the best": "mean difference to the best method in points, over seeds and clients",
        "p": "Wilcoxon's signed-rank test of the difference to the best, corrected for the number "
        "of methods (Holm)",
        "validation %": "the validation score that chose the round",
        "sent": "bytes up and down of all clients and rounds, without evaluation; mean over seeds",
        "seconds": "seconds of a run from its start to its end; mean over seeds",
    }
    names = ["method", score, "over local", "below the best", "p", f1]
    names += ["validation %", "sent", "seconds", "seeds"]
    entries = c.on(task)
    rows = []
    for row in c.ranked(task):
        e = entries[row]
        below = e.against_best.mean if e.against_best else None
        rows.append(
            [
                {"text": f"{row} (reference)" * e.is_reference or row, "sort": row},
                _score_cell(e),
                _gain_cell(e),
                number(below, points(below or 0)),
                number(e.p, f"{e.p or 0:.2g}"),
                percent(_mean_of(e, lambda s: s.get("f1_macro"))),
                percent(_mean_of(e, lambda s: s.get(f"val_{selection_of(s)}"))),
                number(e.bytes_sent, in_bytes(e.bytes_sent)),
                number(e.seconds, f"{e.seconds:.1f}"),
                len(e.runs),
            ]
        )
    if c.metric == "f1_macro":  # once is enough
        at = names.index(f1, 2)
        names.pop(at)
        for cells in rows:
            cells.pop(at)
    return make_figure(
        c,
        "results",
        "table",
        "scores",
        task,
        "Methods",
        footnote(c) if len(c.tasks) == 1 else "",  # the overview has it
        columns=columns(names, ["method"], help_),
        rows=rows,
        sorted_by={"column": 1, "descending": not c.minimised},
    )


def _gain_cell(e: Entry) -> dict[str, Any]:
    if e.gain is None:
        return number(None, "")
    interval = f" [{points(e.gain.low)}, {points(e.gain.high)}]" if len(e.runs) > 1 else ""
    return number(e.gain.mean, points(e.gain.mean) + interval)


def _mean_of(e: Entry, value: Callable[[dict[str, Any]], float | None]) -> float | None:
    found = [known for run in e.runs if (known := value(run.summary)) is not None]
    return mean(found) if found else None


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
        return {"y": [short(m) for m in means]}
    wide = [stdev([e[metric] for e in at]) for at in entries]
    return {
        "y": [short(m) for m in means],
        "low": [short(m - s) for m, s in zip(means, wide, strict=True)],
        "high": [short(m + s) for m, s in zip(means, wide, strict=True)],
    }


def _cut(curves: Sequence[Mapping[str, Any]]) -> tuple[dict[str, float], str]:
    """Returns where an axis starts, and a sentence about it for the caption.

    Low scores of the first rounds would otherwise flatten the curves. Both are empty if the whole
    range can be shown.
    """
    values = sorted(value for one in curves for value in one["y"])
    if len(values) < 2:
        return {}, ""
    floor = int(100 * quantiles(values, n=round(1 / (1 - _SHOWN)))[0]) / 100 - 0.01
    if floor - values[0] < max(0.1, 0.5 * (values[-1] - floor)):
        return {}, ""
    return {"from": round(floor, 2)}, f"Scores below {100 * floor:.0f} % are not shown."


def _convergence(c: Comparison, task: str) -> Figure:
    found = []
    for row, e in c.on(task).items():
        rounds, entries = _by_round(e, c.metric)
        found.append(series(c, row, x=rounds, **_banded(entries, c.metric)))
    begin, sentence = _cut(found)
    return make_figure(
        c,
        "results",
        "lines",
        "convergence",
        task,
        f"{_title(label(c.metric))} by round",
        f"Test items of all clients, weighted by the clients' size. {sentence}".strip(),
        x=axis("round", "count"),
        y={**axis(_metric(c), "percent"), **begin},
        series=found,
    )


def _losses(c: Comparison, task: str) -> Figure | None:
    found = []
    for row, e in c.on(task).items():
        rounds, entries = _by_round(e, "loss")
        if rounds:
            found.append(series(c, row, x=rounds, **_banded(entries, "loss")))
    if not found:
        return None
    caption = (
        "Clients weighted by training items. Methods add terms of their own to the loss: compare "
        "shapes, not heights."
    )
    if missing := [row for row in c.on(task) if row not in {one["name"] for one in found}]:
        caption += f" Not recorded: {', '.join(missing)}."
    return make_figure(
        c,
        "results",
        "lines",
        "loss",
        task,
        "Training loss by round",
        caption,
        x=axis("round", "count"),
        y=axis("training loss"),
        series=found,
    )


def _no_losses(c: Comparison, task: str) -> Figure:
    reason = "The histories of these runs have no training loss. Newer runs record it."
    return make_figure(c, "results", "note", "no-loss", task, "No curves of the loss", reason)


# ---- cost ----
def _cost(c: Comparison, task: str) -> list[Figure]:
    """Returns scores against traffic and time, and what phases and parts of a run cost."""
    pair = [_against_traffic(c, task), _against_time(c, task)]
    title, caption = "Score against cost", "Up and to the left is better."
    group = make_figure(c, "cost", "group", "cost", task, title, caption, figures=pair)
    return [group, _phases(c, task), _seconds(c, task), _phase_table(c, task)]


def _against_time(c: Comparison, task: str) -> Figure:
    found = []
    for row, e in c.on(task).items():
        _, entries = _by_round(e, c.metric)
        seconds = [short(mean(entry["seconds"] for entry in at)) for at in entries]
        found.append(series(c, row, x=seconds, **_banded(entries, c.metric)))
    begin, sentence = _cut(found)
    caption = (
        "With set-up and evaluation, on the machine that ran it. Runs that share a machine slow "
        f"each other down. {sentence}"
    )
    return make_figure(
        c,
        "cost",
        "lines",
        "time",
        task,
        f"{_title(label(c.metric))} by time",
        caption.strip(),
        x=axis("time since the start of the run", "seconds", log=True),
        y={**axis(_metric(c), "percent"), **begin},
        series=found,
    )


def _against_traffic(c: Comparison, task: str) -> Figure:
    """Returns the figure of scores against the bytes sent until the best validation round."""
    found: list[dict[str, Any]] = []
    levels: list[dict[str, Any]] = []
    reached: list[tuple[float, float]] = []
    floor = 0.0  # the score of local training, which sends nothing
    for row, e in c.on(task).items():
        if e.score is None:
            continue
        sent = mean(_sent_until_best(run) for run in e.runs)
        if sent == 0:  # drawn as a horizontal line: a logarithmic axis has no 0
            levels.append({"name": row, "color": c.rows.index(row), "y": short(e.score.mean)})
            floor = max(floor, e.score.mean if e.is_local else 0.0)
            continue
        reached.append((sent, e.score.mean))
        wide = e.score.deviation
        spread = (
            {}
            if wide is None
            else {"low": [short(e.score.mean - wide)], "high": [short(e.score.mean + wide)]}
        )
        found.append(
            series(c, row, x=[short(sent)], y=[short(e.score.mean)], labels=[""], **spread)
        )
    frontier = [
        [short(x), short(y)] for x, y in _frontier([point for point in reached if point[1] > floor])
    ]
    caption = (
        "At the best validation round. The steps are the frontier: no method is better with less "
        "traffic. Dashed lines are methods that send nothing."
    )
    return make_figure(
        c,
        "cost",
        "points",
        "traffic",
        task,
        f"{_title(label(c.metric))} by traffic",
        caption,
        x=axis("bytes of all clients until the best round", "bytes", log=True),
        y=axis(_metric(c), "percent"),
        series=found,
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
    known = {
        row: {name: counts["bytes_up"] + counts["bytes_down"] for name, counts in phases.items()}
        for row, phases in _phase_rows(c, task).items()
    }
    caption = "All rounds. The phase evaluate only measures; a federation does not need it."
    return make_figure(
        c,
        "cost",
        "bars",
        "phases",
        task,
        "Traffic by phase",
        caption,
        x=axis("bytes of all clients, up and down", "bytes"),
        **_stacked(known),
    )


def _seconds(c: Comparison, task: str) -> Figure:
    parts = {
        row: {
            part: e.mean(lambda s, part=part: s["seconds"].get(part, 0.0))  # type: ignore[misc]
            for part in e.runs[0].summary["seconds"]
            if part != "total"
        }
        for row, e in c.on(task).items()
    }
    return make_figure(
        c,
        "cost",
        "bars",
        "seconds",
        task,
        "Time by part",
        "Mean over the seeds, on the machine that ran it.",
        x=axis("seconds of a run", "seconds"),
        **_stacked(parts),
    )


def _stacked(known: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Returns the content of stacked bars, in colours that no method has.

    Args:
        known: {row: {part: value}}.
    """
    names = list(dict.fromkeys(name for parts in known.values() for name in parts))
    values = {name: [short(parts.get(name, 0)) for parts in known.values()] for name in names}
    others = [name for name in names if name not in _PARTS]
    color = {name: k for k, name in enumerate((*_PARTS, *others))}
    found = [{"name": name, "color": color[name], "values": values[name]} for name in names]
    return {"rows": list(known), "series": found, "palette": "parts"}


def _phase_table(c: Comparison, task: str) -> Figure:
    rows = []
    for row, phases in _phase_rows(c, task).items():
        for name, t in phases.items():
            sent = [number(t[key], in_bytes(t[key])) for key in ("bytes_up", "bytes_down")]
            rows.append([row, name, number(t["messages"], f"{t['messages']:,.0f}"), *sent])
    return make_figure(
        c,
        "cost",
        "table",
        "phase-table",
        task,
        "Every phase",
        "Mean over the seeds. All clients and rounds.",
        columns=columns(["method", "phase", "messages", "up", "down"], ["method", "phase"]),
        rows=rows,
    )


# ---- clients ----
class _Pair(NamedTuple):
    """A client's scores with local training and with a method, in the runs of one seed."""

    seed: int
    client: str
    local: float
    method: float


def _clients(c: Comparison, task: str) -> list[Figure]:
    """Returns every client's gain over local training, and every client's scores."""
    made = (_gains(c, task), _sorted_gains(c, task), _gains_table(c, task), _client_table(c, task))
    return _known(made)


def _client_metric(c: Comparison) -> str:
    return c.metric.removesuffix("_mean")


def _pairs(e: Entry, local: Entry, metric: str) -> list[_Pair]:
    """Returns the clients' scores with a method and with local training, if both are known."""
    found: list[_Pair] = []
    for ours, theirs in zip(e.runs, local.runs, strict=True):
        base = {row["id"]: row.get(metric) for row in theirs.summary["per_client"]}
        seed = ours.summary["seed"]
        for row in ours.summary["per_client"]:
            before, after = base.get(row["id"]), row.get(metric)
            if before is not None and after is not None:
                found.append(_Pair(seed, row["id"], before, after))
    return found


def _pairs_by_row(c: Comparison, task: str) -> dict[str, list[_Pair]]:
    entries = c.on(task)
    found = {}
    for row, e in entries.items():
        local = matching_local(e, entries)
        if local is None or local is e:
            continue
        if pairs := _pairs(e, local, _client_metric(c)):
            found[row] = pairs
    return found


def _gains(c: Comparison, task: str) -> Figure | None:
    found = [
        series(
            c,
            row,
            x=[short(pair.local) for pair in pairs],
            y=[short(pair.method) for pair in pairs],
            labels=[f"client {pair.client}, seed {pair.seed}" for pair in pairs],
        )
        for row, pairs in _pairs_by_row(c, task).items()
    ]
    if not found:
        return None
    caption = (
        "Each point is a client of a seed. Above the line the method is better than local "
        "training, below the line it is worse. Click a name to hide or show a method."
    )
    name = f"test {label(_client_metric(c))}"
    return make_figure(
        c,
        "clients",
        "points",
        "gains",
        task,
        "Gains and losses of clients",
        caption,
        x=axis(f"{name} with local training", "percent"),
        y=axis(f"{name} with the method", "percent"),
        series=found,
        diagonal=True,
    )


def _sorted_gains(c: Comparison, task: str) -> Figure | None:
    """Returns the gains of all clients, the smallest first."""
    found = []
    for row, pairs in _pairs_by_row(c, task).items():
        ordered = sorted(pairs, key=lambda pair: pair.method - pair.local)
        gains = [short(100 * (pair.method - pair.local)) for pair in ordered]
        labels = [f"client {pair.client}, seed {pair.seed}" for pair in ordered]
        found.append(series(c, row, x=[*range(1, len(gains) + 1)], y=gains, labels=labels))
    if not found:
        return None
    return make_figure(
        c,
        "clients",
        "lines",
        "sorted-gains",
        task,
        "Gains in order",
        "Every client of every seed, from the largest loss to the largest gain over local.",
        x=axis("clients, by their gain", "count"),
        y=axis(f"gain over local, points of test {label(_client_metric(c))}"),
        series=found,
        zero=True,
        tall=True,
    )


def _gains_table(c: Comparison, task: str) -> Figure | None:
    rows = []
    for row, pairs in _pairs_by_row(c, task).items():
        gains = [100 * (pair.method - pair.local) for pair in pairs]
        counts = [sum(g > LEAST_GAIN for g in gains), sum(g < -LEAST_GAIN for g in gains)]
        numbers = [number(v, points(v)) for v in (median(gains), min(gains), max(gains))]
        rows.append([row, *counts, len(gains) - sum(counts), *numbers])
    if not rows:
        return None
    names = ["method", "gain", "lose", "same", "median", "worst", "best"]
    caption = (
        "How many clients of all seeds gain or lose, compared with local training of the same "
        "client. Median, worst and best are in points."
    )
    return make_figure(
        c,
        "clients",
        "table",
        "gains-table",
        task,
        "Gains over local",
        caption,
        columns=columns(names, ["method"]),
        rows=rows,
    )


def _client_table(c: Comparison, task: str) -> Figure | None:
    metric = _client_metric(c)
    entries = {
        row: e
        for row, e in c.on(task).items()
        if any(r.get(metric) is not None for r in e.runs[0].summary["per_client"])
    }
    if not entries:
        return None
    first = matching_local(next(iter(entries.values())), entries) or next(iter(entries.values()))
    scores = {
        row: {
            (run.summary["seed"], r["id"]): r.get(metric)
            for run in e.runs
            for r in run.summary["per_client"]
        }
        for row, e in entries.items()
    }
    # A centralized baseline does not have these clients.
    shown = [row for row in entries if scores[row].keys() == scores[_row_of(entries, first)].keys()]
    rows = []
    for run in first.runs:
        for r in run.summary["per_client"]:
            values = {row: scores[row].get((run.summary["seed"], r["id"])) for row in shown}
            best = max((v for v in values.values() if v is not None), default=None)
            cells = [
                percent(v) | {"mark": "best" if v is not None and v == best else ""}
                for v in values.values()
            ]
            rows.append(
                [r["id"], run.summary["seed"], r["nodes"], r["train"], r["val"], r["test"], *cells]
            )
    names = ["client", "seed", "nodes", "train", "val", "test", *shown]
    return make_figure(
        c,
        "clients",
        "table",
        "clients",
        task,
        "Every client",
        f"Test {label(metric)} in % at the best validation round of the method. Bold: the "
        "best method of the client.",
        columns=columns(names, ["client"]),
        rows=rows,
    )


def _row_of(entries: Mapping[str, Entry], wanted: Entry) -> str:
    return next(row for row, e in entries.items() if e is wanted)


# ---- data ----
def _data(c: Comparison, task: str) -> list[Figure]:
    """Returns what each client has of each class."""
    found = _with_statistics(c, task)
    if found is None:
        return []
    run, statistics = found
    maps = _known([_labels(c, task), _by_class(c, task)])
    about = f"The partition of seed {run.summary['seed']}. Grey: the client has none."
    title = f"{_title(statistics['task'])}s of each client"
    return [make_figure(c, "data", "group", "partition", task, title, about, figures=maps)]


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
    format: str,
    high: float | None,
) -> Figure | None:
    found = _with_statistics(c, task)
    if found is None or key not in found[1]["clients"][0]:
        return None
    run, statistics = found
    clients = statistics["clients"]
    values = [[short(v) if v is not None else None for v in client[key]] for client in clients]
    if key == "labels":  # a class without items is grey, not of the palest colour
        values = [[v or None for v in row] for row in values]
    top = max((v for row in values for v in row if v is not None), default=1)
    return make_figure(
        c,
        "data",
        "heat",
        name,
        task,
        title,
        caption,
        rows=[client["name"] for client in clients],
        columns=class_names(run.summary, len(values[0])),
        row_label="client",
        column_label="class",
        values=values,
        low=0,
        high=high if high is not None else top,
        format=format,
        unit="count" if format == "0" else "",
    )


def _labels(c: Comparison, task: str) -> Figure | None:
    caption = "The number of items of each class that a client has."
    return _heat(c, task, "labels", "Classes of each client", caption, "labels", "0", None)


def _by_class(c: Comparison, task: str) -> Figure | None:
    found = _with_statistics(c, task)
    if found is not None and found[1]["task"] == "graph":
        caption = "The mean number of nodes of a client's graphs of a class."
        key = "graph_size_per_class"
        return _heat(c, task, "graph-sizes", "Sizes of graphs", caption, key, "0", None)
    caption = (
        "The share of edge ends at a client's nodes of a class whose other end has the same label."
    )
    key = "homophily_per_class"
    return _heat(c, task, "homophily", "Homophily by client and class", caption, key, "0.00", 1.0)


# ---- runs ----
def _runs(c: Comparison) -> Figure:
    text = ["method", "task", "engine", "history hash", "folder"]
    names = ["method", "seed", f"{label(c.metric)} %", "best round", "rounds", "seconds"]
    names += ["engine", "task", "history hash", "folder"]
    rows = []
    for task in c.tasks:
        for row, e in c.on(task).items():
            for run in e.runs:
                s = run.summary
                score, seconds = s.get(c.metric), s["seconds"]["total"]
                cells = [
                    row,
                    s["seed"],
                    number(score, f"{100 * (score or 0):.2f}"),
                    s["best_round"] or "-",
                    s["rounds"],
                    number(seconds, f"{seconds:.1f}"),
                    s.get("engine", "-"),
                    task,
                    s["history_hash"][:16],
                    str(run.folder),
                ]
                rows.append(cells)
    caption = (
        "All numbers come from these folders. fedloom show FOLDER prints a run. Its config.json is "
        "the recipe that reproduces it."
    )
    head = columns(names, text)
    title = "Every run"
    return make_figure(c, "runs", "table", "runs", "", title, caption, columns=head, rows=rows)
