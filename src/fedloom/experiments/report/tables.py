"""Results and listings as tables for a terminal. Everything here reads summaries, nothing computes."""

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
from fedloom.experiments.report.comparison import Comparison, footnote
from fedloom.experiments.report.significance import points

if TYPE_CHECKING:
    from fedloom.experiments.tune import Tuned


def percent(value: float | None) -> str:
    """0.8123 -> "81.2"; None -> "-"."""
    return "-" if value is None else f"{100 * value:.1f}"


def size(count: float) -> str:
    """Bytes in words."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return ""


def duration(seconds: float) -> str:
    """Seconds in words."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def listing(rows: Mapping[str, str]) -> RenderableType:
    """Names with one line each."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, text in rows.items():
        table.add_row(name, text)
    return table


def datasets(entries: Mapping[str, Any], here: Sequence[str]) -> RenderableType:
    """The catalogue, a line each; `here` are the names that need no download."""
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
        "here",
        "what it is",
    ):
        table.add_column(
            heading,
            justify="right"
            if heading in ("graphs", "nodes", "edges", "features", "classes")
            else "left",
        )
    for name, e in entries.items():
        numbers = (f"{n:,}" for n in (e.graphs, e.nodes, e.edges, e.features, e.classes))
        table.add_row(name, e.task, *numbers, e.split, "yes" if name in here else "", e.description)
    return table


def result(summary: Mapping[str, Any], beside: Sequence[Mapping[str, Any]] = ()) -> RenderableType:
    """A run's result: scores (with other runs beside it, if given), each client's, traffic and time."""
    if summary["status"] == "unfinished":
        return Text(
            f"unfinished, last round {summary['rounds']}; `fedloom resume` goes on from its checkpoint, if it has one"
        )
    parts: list[RenderableType] = [
        _headline(summary),
        _scores([summary, *beside]),
        _clients(summary, beside),
        _traffic(summary),
    ]
    if summary.get("without_training_items"):
        idle = ", ".join(summary["without_training_items"])
        parts.insert(
            1,
            Text(
                f"clients without a training item: {idle} (they take part, their loss is 0)",
                style="yellow",
            ),
        )
    if summary.get("absences"):
        parts.insert(1, Text(_absences(summary), style="yellow"))
    secure = summary.get("secure")
    if secure:
        parts.append(
            Text(
                f"secure: {secure['sums']} masked sums, each over {secure['fewest_clients']} clients or more"
            )
        )
        if secure["cohorts_one_apart"]:
            pairs = secure["cohorts_one_apart"]
            parts.append(
                Text(
                    f"{pairs} pairs of cohorts differ in one client: subtracting their sums lays it open",
                    style="yellow",
                )
            )
    return Group(*parts)


def workers(summary: Mapping[str, Any]) -> str:
    """How an engine with workers has dealt the clients to them; empty for one without."""
    details = summary["engine_details"]
    if "workers" not in details:
        return ""
    held = sorted(details["clients_per_worker"])
    clients = (
        _plural(held[0], "client") if held[0] == held[-1] else f"{held[0]} to {held[-1]} clients"
    )
    return f"engine {summary['engine']}: {_plural(len(held), 'worker')} with {clients} and {_plural(details['threads'], 'thread')} each"


def _plural(count: int, word: str) -> str:
    return f"{count} {word}{'s' * (count != 1)}"


def _absences(s: Mapping[str, Any]) -> str:
    often = sorted(s["absences"].items(), key=lambda item: -item[1])
    shown = ", ".join(
        f"{client} ({'once' if count == 1 else f'{count} times'})" for client, count in often[:10]
    )
    shown += f" and {len(often) - 10} more" if len(often) > 10 else ""
    return f"absent from exchanges: {shown}; asked again: {s['retried']} (history.jsonl says when and why)"


def _headline(s: Mapping[str, Any]) -> Text:
    line = f"{s['method']} on {s['dataset']}, {s['clients']} clients by {s['partition']}, {s['model']}, seed {s['seed']}: {s['status']}"
    return Text(line + (f" ({s['cause']})" if s.get("cause") else ""), style="bold")


def _scores(summaries: Sequence[Mapping[str, Any]]) -> Table:
    one = summaries[0]
    title = f"test scores at the best validation round, % ({one['evaluation']} models, clients weighted by size)"
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
            s["method"], *(percent(s[k]) for k in ("accuracy", "accuracy_mean", "f1_macro", "f1_weighted", "auc", "val_accuracy")),
            f"{s['best_round'] or '-'} of {s['rounds']}", percent(s["final_accuracy"]),
            size(s["traffic"]["bytes_up"]), size(s["traffic"]["bytes_down"]), f"{s['seconds']['total']:.1f}",
        )  # fmt: skip
    return table


def _clients(s: Mapping[str, Any], beside: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="clients", title_justify="left")
    # Who gains and who loses: what other methods reach for the same client (a pooled one has no such client).
    others = [
        o
        for o in beside
        if [c["id"] for c in o["per_client"]] == [c["id"] for c in s["per_client"]]
    ]
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
    """Methods beside each other: a table of all tasks if there are several, then one for each task; what the marks mean."""
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
    """What `fedloom compare --json` prints."""
    rows = [
        {"task": task, "method": row, "seeds": len(e.runs), "mean": e.score.mean if e.score else None,
         "deviation": e.score.deviation if e.score else None, "mark": e.mark, "like_best": e.like_best, "corrected_p": e.p,
         "against_best": e.against_best._asdict() if e.against_best else None, "gain": e.gain._asdict() if e.gain else None,
         "bytes": e.bytes_sent, "seconds": e.seconds, "folders": [str(run.folder) for run in e.runs]}
        for task in c.tasks for row, e in c.on(task).items()
    ]  # fmt: skip
    return {"metric": c.metric, "rows": rows, "left_out": [each._asdict() for each in c.left_out]}


def method(name: str, cls: type[Method]) -> RenderableType:
    """A method: what its file says (idea, paper, what travels, equations), its phases and its settings."""
    module = getmodule(cls)
    settings = Table(title="settings", title_justify="left")
    for heading in ("field", "default", "valid", "tuned over", "what it is"):
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
    facts = f"evaluation: {', '.join(cls.evaluations)} · tasks: {', '.join(cls.tasks)} · the server learns: {disclosed}"
    if cls.uses_cross_edges:
        facts += " · works on the edges between clients (partition.cross_edges)"
    if cls.discloses_to_peers:
        facts += f" · other clients learn: {cls.discloses_to_peers}"
    return Group(
        Text(name, style="bold"), Text((getdoc(module) or "") + "\n"), settings, phases, Text(facts)
    )


def partition_statistics(h: Mapping[str, Any]) -> RenderableType:
    """Who holds what, as `fedloom partition` prints it."""
    by_class = (
        "homophily_per_class"
        if "homophily_per_class" in h["clients"][0]
        else "graph_size_per_class"
    )
    table = Table(
        title=f"who holds what ({by_class.replace('_', ' ')} on the right)", title_justify="left"
    )
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
    for c in h["clients"]:
        scale = 100 if by_class.startswith("homophily") else 1
        classwise = " ".join("-" if v is None else f"{scale * v:.0f}" for v in c[by_class])
        table.add_row(
            c["name"], f"{c['nodes']:,}", f"{c['train']} / {c['val']} / {c['test']}", f"{c['edges_kept']:,}", _count(c["edges_cut"]),
            percent(c.get("homophily")), " ".join(map(str, c["labels"])), classwise,
        )  # fmt: skip
    total = h["totals"]
    cut = f"{_count(total['edges_cut'])} cut ({percent(total['cut_share'])} %)"
    line = f"{total['nodes']:,} nodes; edges: {total['edges_kept']:,} kept, {cut}"
    return Group(table, Text(line))


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def tuning(tuned: Tuned, rows: int = 10) -> RenderableType:
    """A study's best trials, the recipe as it was given among them, and what to think of the best one's score."""
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
    lines = [
        f"{_plural(len(tuned.trials), 'trial')}{f', {failed} of them failed' if failed else ''}: {tuned.ended}"
    ]
    if tuned.importance:
        lines.append(
            "what made the difference, roughly: "
            + ", ".join(f"{key} {100 * share:.0f} %" for key, share in tuned.importance.items())
        )
    if tuned.given:
        gain = 100 * ((tuned.best.validation or 0) - (tuned.given.validation or 0))
        lines.append(
            f"the best has {gain:.1f} points of validation accuracy more than the recipe as given"
        )
    lines.append(
        f"it is the best of {len(ranked)} on the same validation items, which flatters it: expect less elsewhere"
    )
    return Group(table, Text("\n".join(lines)))
