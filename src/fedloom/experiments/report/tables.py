"""Tables for the terminal: results and listings. They only show summaries and compute nothing.

This module imports torch, because it describes methods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from inspect import getdoc, getmodule
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedloom.core.method import Method
from fedloom.core.phase import phases_of
from fedloom.core.settings import default_of, valid_values
from fedloom.experiments.display import duration as duration
from fedloom.experiments.display import headline
from fedloom.experiments.display import percent as percent
from fedloom.experiments.display import size as size
from fedloom.experiments.report.comparison import Comparison, footnote
from fedloom.experiments.report.significance import points

if TYPE_CHECKING:
    from fedloom.experiments.tune import Tuned


def listing(rows: Mapping[str, str]) -> RenderableType:
    """Returns a list of names, each with its text."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, text in rows.items():
        table.add_row(name, text)
    return table


def datasets(entries: Mapping[str, Any], here: Sequence[str]) -> RenderableType:
    """Returns the table of all datasets.

    Args:
        entries: The datasets by name.
        here: The names of those that need no download.
    """
    table = Table(box=None, pad_edge=False)
    for heading in (
        "name",
        "task",
        "graphs",
        "nodes",
        "edges",
        "features",
        "classes",
        "split",
        "local",
        "description",
    ):
        numeric = heading in ("graphs", "nodes", "edges", "features", "classes")
        table.add_column(heading, justify="right" if numeric else "left")
    for name, e in entries.items():
        numbers = (f"{n:,}" for n in (e.graphs, e.nodes, e.edges, e.features, e.classes))
        table.add_row(name, e.task, *numbers, e.split, "yes" if name in here else "", e.description)
    return table


def result(
    summary: Mapping[str, Any], baselines: Sequence[Mapping[str, Any]] = ()
) -> RenderableType:
    """Returns the result of a run: scores, clients, traffic and time.

    Args:
        summary: The summary of the run.
        baselines: The summaries of other runs to show in the same tables.
    """
    if summary["status"] == "unfinished":
        return Text(
            f"unfinished, last round {summary['rounds']}; `fedloom resume` continues from its "
            "checkpoint, if it has one"
        )
    parts: list[RenderableType] = [
        Text(headline(summary), style="bold"),
        _scores([summary, *baselines]),
        _clients(summary, baselines),
        _traffic(summary),
    ]
    if summary.get("without_training_items"):
        idle = ", ".join(summary["without_training_items"])
        line = f"clients without a training item: {idle} (they take part, their loss is 0)"
        parts.insert(1, Text(line, style="yellow"))
    if summary.get("absences"):
        parts.insert(1, Text(_absences(summary), style="yellow"))
    if secure := summary.get("secure"):
        sums, fewest = secure["sums"], secure["fewest_clients"]
        parts.append(Text(f"secure: {sums} masked sums, each over {fewest} clients or more"))
        if pairs := secure["cohorts_one_apart"]:
            line = f"{pairs} pairs of cohorts differ in one client"
            line += ": the difference of their sums discloses its reply"
            parts.append(Text(line, style="yellow"))
    return Group(*parts)


def workers(summary: Mapping[str, Any]) -> str:
    """Returns how an engine distributes clients over its workers; "" if it has no workers."""
    details = summary["engine_details"]
    if "workers" not in details:
        return ""
    counts = sorted(details["clients_per_worker"])
    clients = f"{counts[0]} to {counts[-1]} clients"
    if counts[0] == counts[-1]:
        clients = _plural(counts[0], "client")
    threads = _plural(details["threads"], "thread")
    number = _plural(len(counts), "worker")
    return f"engine {summary['engine']}: {number} with {clients} and {threads} each"


def _plural(count: int, word: str) -> str:
    return f"{count} {word}{'s' * (count != 1)}"


def _absences(s: Mapping[str, Any]) -> str:
    often = sorted(s["absences"].items(), key=lambda item: -item[1])
    shown = ", ".join(
        f"{client} ({'once' if count == 1 else f'{count} times'})" for client, count in often[:10]
    )
    shown += f" and {len(often) - 10} more" if len(often) > 10 else ""
    when = "history.jsonl says when and why"
    return f"absent from exchanges: {shown}; asked again: {s['retried']} ({when})"


def _scores(summaries: Sequence[Mapping[str, Any]]) -> Table:
    how = f"{summaries[0]['evaluation']} models, clients weighted by size"
    title = f"test scores at the best validation round, % ({how})"
    table = Table(title=title, title_justify="left")
    measures = (
        "accuracy",
        "mean over clients",
        "F1 macro",
        "F1 weighted",
        "AUC",
        "validation",
        "best round",
        "final",
    )
    for heading in ("method", *measures, "sent up", "sent down", "seconds"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for s in summaries:
        table.add_row(
            s["method"],
            percent(s["accuracy"]),
            percent(s["accuracy_mean"]),
            percent(s["f1_macro"]),
            percent(s["f1_weighted"]),
            percent(s["auc"]),
            percent(s["val_accuracy"]),
            f"{s['best_round'] or '-'} of {s['rounds']}",
            percent(s["final_accuracy"]),
            size(s["traffic"]["bytes_up"]),
            size(s["traffic"]["bytes_down"]),
            f"{s['seconds']['total']:.1f}",
        )
    return table


def _clients(s: Mapping[str, Any], baselines: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="clients", title_justify="left")
    # Shows the accuracies of the baselines that have the same clients (a centralized one has not).
    ids = [c["id"] for c in s["per_client"]]
    others = [o for o in baselines if [c["id"] for c in o["per_client"]] == ids]
    for heading in (
        "id",
        "nodes",
        "train",
        "val",
        "test",
        "accuracy",
        *(f"{o['method']}'s" for o in others),
        "F1 macro",
    ):
        table.add_column(heading, justify="right")
    shown = s["per_client"][:20]
    for k, c in enumerate(shown):
        accuracies = (percent(run["per_client"][k]["accuracy"]) for run in (s, *others))
        table.add_row(
            c["id"],
            *(str(c[part]) for part in ("nodes", "train", "val", "test")),
            *accuracies,
            percent(c["f1"]),
        )
    if len(shown) < len(s["per_client"]):
        table.add_row("…", f"and {len(s['per_client']) - len(shown)} more in summary.json")
    return table


def _traffic(s: Mapping[str, Any]) -> Table:
    table = Table(title="traffic, all clients and rounds", title_justify="left")
    for heading in ("phase", "messages", "scalars up", "scalars down", "bytes up", "bytes down"):
        table.add_column(heading, justify="left" if heading == "phase" else "right")
    for name, t in s["traffic"]["phases"].items():
        scalars = (f"{t[key]:,}" for key in ("messages", "scalars_up", "scalars_down"))
        table.add_row(name, *scalars, size(t["bytes_up"]), size(t["bytes_down"]))
    return table


def comparison(c: Comparison) -> RenderableType:
    """Returns the tables of a comparison: all tasks if there are several, then each task.

    A footnote explains the numbers. Lines below it name the folders that were left out.
    """
    parts: list[RenderableType] = []
    styles = {"best": "bold green", "second": "underline", "": ""}
    if len(c.tasks) > 1:
        overview = Table(title=f"test {c.metric.replace('_', ' ')}, %", title_justify="left")
        for heading in ("method", *c.tasks, "mean"):
            overview.add_column(heading, justify="left" if heading == "method" else "right")
        for row in c.rows:
            entries = [c.entries.get((task, row)) for task in c.tasks]
            shown = [
                Text(str(e.score) + (" ≈" if e.like_best else ""), styles[e.mark])
                if e and e.score
                else Text("-")
                for e in entries
            ]
            overview.add_row(row, *shown, percent(c.overall(row)))
        parts.append(overview)
    for task in c.tasks:
        table = Table(title=task, title_justify="left")
        for heading in (
            "method",
            f"{c.metric.replace('_', ' ')} %",
            "over local",
            "below the best",
            "p",
            "sent",
            "seconds",
            "seeds",
        ):
            table.add_column(heading, justify="left" if heading == "method" else "right")
        for row, e in c.on(task).items():
            mark = {"best": " best", "second": " second"}.get(e.mark, "") + (
                " ≈" if e.like_best else ""
            )
            tested = (
                (points(e.against_best.mean), f"{e.p:.2g}")
                if e.against_best and e.p is not None
                else ("", "")
            )
            gain = points(e.gain.mean) if e.gain else ""
            score = Text(str(e.score) if e.score else "-", styles[e.mark]).append(mark, "dim")
            table.add_row(
                row, score, gain, *tested, size(e.bytes_sent), f"{e.seconds:.1f}", str(len(e.runs))
            )
        parts.append(table)
    parts.append(Text(footnote(c), style="dim"))
    parts += [
        Text(f"left out: {each.folder}: {each.reason}", style="yellow") for each in c.left_out
    ]
    return Group(*parts)


def comparison_as_json(c: Comparison) -> dict[str, Any]:
    """Returns the data that `fedloom compare --json` prints."""
    return {
        "metric": c.metric,
        "rows": c.records(),
        "left_out": [each._asdict() for each in c.left_out],
    }


def method(name: str, cls: type[Method]) -> RenderableType:
    """Returns the description of a method: its file's docstring, its settings and its phases."""
    module = getmodule(cls)
    settings = Table(title="settings", title_justify="left")
    for heading in ("field", "default", "valid", "tuned over", "description"):
        settings.add_column(heading)
    for f in fields(cls):
        settings.add_row(
            f.name,
            repr(default_of(f)),
            valid_values(f),
            f.metadata.get("tune") or "",
            f.metadata["help"],
        )
    phases = Table(title="phases", title_justify="left")
    for heading in ("phase", "takes", "answers"):
        phases.add_column(heading)
    for key, phase in phases_of(cls).items():
        declared = {
            k: v if isinstance(v, str) else "(see the method)" for k, v in phase.reply.items()
        }
        answers = ", ".join(f"{k}: {v}" for k, v in declared.items())
        if phase.read_by:
            answers = f"peer messages for {phase.read_by}: {answers}"
        phases.add_row(key, ", ".join(phase.parameters) or "-", answers or "-")
    disclosed = cls.discloses_to_server or "nothing as large as the data"
    facts = [f"evaluation: {', '.join(cls.evaluations)}", f"tasks: {', '.join(cls.tasks)}"]
    single = cls().single_replies()
    needs = f"not possible, it needs each reply to {', '.join(single)}" if single else "possible"
    facts.append(f"secure sums: {needs}")
    facts.append(f"the server learns: {disclosed}")
    if cls.uses_cross_edges:
        facts.append("uses the edges between clients (partition.cross_edges)")
    if cls.discloses_to_peers:
        facts.append(f"other clients learn: {cls.discloses_to_peers}")
    if not cls.predicts_unseen:
        facts.append(f"cannot predict for unseen items: that needs {cls.unseen_needs}")
    title, text = Text(name, style="bold"), Text((getdoc(module) or "") + "\n")
    return Group(title, text, settings, phases, Text(" · ".join(facts)))


def partition_statistics(statistics: Mapping[str, Any]) -> RenderableType:
    """Returns the table of each client's data, as `fedloom partition` prints it."""
    is_node_task = "homophily_per_class" in statistics["clients"][0]
    by_class = "homophily_per_class" if is_node_task else "graph_size_per_class"
    title = f"partition ({by_class.replace('_', ' ')} in the last column)"
    table = Table(title=title, title_justify="left")
    for heading in (
        "client",
        "nodes",
        "train / val / test",
        "edges kept",
        "cut",
        "homophily %",
        "labels",
        "per class",
    ):
        table.add_column(heading, justify="left" if heading in ("labels", "per class") else "right")
    for c in statistics["clients"]:
        scale = 100 if is_node_task else 1
        classwise = " ".join("-" if v is None else f"{scale * v:.0f}" for v in c[by_class])
        table.add_row(
            c["name"],
            f"{c['nodes']:,}",
            f"{c['train']} / {c['val']} / {c['test']}",
            f"{c['edges_kept']:,}",
            _count(c["edges_cut"]),
            percent(c.get("homophily")),
            " ".join(map(str, c["labels"])),
            classwise,
        )
    total = statistics["totals"]
    cut = f"{_count(total['edges_cut'])} cut ({percent(total['cut_share'])} %)"
    line = f"{total['nodes']:,} nodes; edges: {total['edges_kept']:,} kept, {cut}"
    return Group(table, Text(line))


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def tuning(tuned: Tuned, rows: int = 10) -> RenderableType:
    """Returns the best trials of a study, and how to read the score of the best one.

    Args:
        tuned: The study.
        rows: The number of trials to show. The recipe as given is always shown.
    """
    ranked = sorted(
        (t for t in tuned.trials if t.validation is not None),
        key=lambda t: (-(t.validation or 0), t.number),
    )
    shown = ranked[:rows] + [t for t in ranked[rows:] if t is tuned.given]
    table = Table(title="best trials by validation accuracy, %", title_justify="left")
    for heading in ("trial", "validation", *tuned.best.settings):
        table.add_column(heading, justify="right")
    for t in shown:
        values = (f"{v:.3g}" if isinstance(v, float) else str(v) for v in t.settings.values())
        table.add_row(
            f"{t.number} (as given)" if t is tuned.given else str(t.number),
            percent(t.validation),
            *values,
        )
    failed = len(tuned.trials) - len(ranked)
    failures = f", {failed} of them failed" if failed else ""
    lines = [f"{_plural(len(tuned.trials), 'trial')}{failures}: {tuned.ended}"]
    if tuned.importance:
        shares = (f"{key} {100 * share:.0f} %" for key, share in tuned.importance.items())
        lines.append(f"approximate importance of the settings: {', '.join(shares)}")
    if tuned.given:
        gain = 100 * ((tuned.best.validation or 0) - (tuned.given.validation or 0))
        lines.append(
            f"the best has {gain:.1f} points of validation accuracy more than the recipe as given"
        )
    lines.append(
        f"it is the best of {len(ranked)} on the same validation items: expect a lower score on "
        "other items"
    )
    return Group(table, Text("\n".join(lines)))
