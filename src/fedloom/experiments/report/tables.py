"""Tables for the terminal: results and listings. They only show summaries and compute nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedloom.experiments.audit_file import Audit, number
from fedloom.experiments.display import duration as duration
from fedloom.experiments.display import headline
from fedloom.experiments.display import percent as percent
from fedloom.experiments.display import size as size
from fedloom.experiments.report.comparison import Comparison, footnote
from fedloom.experiments.report.labels import label
from fedloom.experiments.report.significance import points

if TYPE_CHECKING:
    from fedloom.experiments.tune import Tuned


def grid(headings: Sequence[str], left: Sequence[str] = ()) -> Table:
    """Returns an empty table with columns of numbers.

    Args:
        headings: The columns. The first one is left-aligned.
        left: Other columns that are left-aligned, because they contain text.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, title_justify="left")
    for k, heading in enumerate(headings):
        text = not k or heading in left
        table.add_column(heading, justify="left" if text else "right", overflow="fold")
    return table


def audit(found: Audit, wide: bool = False) -> RenderableType:
    """Returns the table of an audit: a row for each attack, then those that do not apply.

    Args:
        found: The audit.
        wide: All columns.
    """
    about = found.about
    kind = "secure" if about["secure"] else "plain"
    headings: tuple[str, ...] = ("attack", "by", "how", "score", "95 %", "chance", "")
    if wide:
        headings = (*headings, "sees", "knows", "remark")
    table = grid(headings, left=("by", "how", "", "sees", "knows", "remark"))
    table.title = f"{about['method']} on {about['dataset']}, {about['clients']} clients, {kind} run"
    styles = {"bites": "red", "partly": "yellow", "held": "green"}
    for each in found.findings:
        if not each.applies:
            continue
        interval = f"{number(each.low)}-{number(each.high)}"
        verdict = Text(each.verdict, style=styles.get(each.verdict, ""))
        score = f"{number(each.score)}{'' if each.measure == 'AUC' else ' r'}"
        first: list[RenderableType] = [each.attack, each.attacker, each.how, score, interval]
        more = (each.sees, each.knows, each.why) if wide else ()
        table.add_row(*first, number(each.chance), verdict, *more)
    others = [
        f"{each.attack} ({each.attacker}): does not apply: {each.why}"
        for each in found.findings
        if not each.applies
    ]
    note = (
        "score: AUC, or a rate (r); chance: without the messages; bites: AUC 0.8 and more, or as "
    )
    note += "much above chance; held: up to 0.6"
    return Group(table, Text("\n" + "\n".join([*others, "", note]).strip("\n"), style="dim"))


def datasets(entries: Mapping[str, Any], here: Sequence[str], wide: bool = False) -> RenderableType:
    """Returns the table of all datasets.

    Args:
        entries: The datasets by name.
        here: The names of those that need no download.
        wide: All columns.
    """
    numbers = ("graphs", "nodes", "edges", "features", "classes")
    headings: tuple[str, ...] = ("name", "task", *numbers, "split", "local", "description")
    if not wide:
        headings = ("name", "task", "size", "features", "classes", "local")
    table = grid(headings, left=("task", "split", "local", "description"))
    for name, e in entries.items():
        counts = {key: f"{getattr(e, key):,}" for key in numbers}
        counts["size"] = f"{e.graphs:,} graphs" if e.task == "graph" else f"{e.nodes:,} nodes"
        local = "yes" if name in here else ""
        texts = {"name": name, "local": local, **counts}
        table.add_row(*(texts.get(key) or str(getattr(e, key, "")) for key in headings))
    return table


def recipes(rows: Sequence[Mapping[str, Any]], wide: bool = False) -> RenderableType:
    """Returns the table of the recipes of a paper.

    Args:
        rows: The recipes, as `fedloom recipes --json` prints them.
        wide: All columns.
    """
    headings: tuple[str, ...] = ("recipe", "expected", "paper", "minutes")
    if wide:
        headings = (headings[0], "dataset", "partition", "method", *headings[1:])
    table = grid(headings, left=("dataset", "partition", "method", "expected"))
    for row in rows:
        texts = {
            "partition": f"{row['partition']} {row['clients']}",
            "expected": _expected(row["expect"]),
            "paper": _number(row["expect"]["paper"]),
            "minutes": _number(row["expect"]["minutes"]),
        }
        table.add_row(*(texts.get(key, "") or str(row[key]) for key in headings))
    return table


def _expected(expect: Mapping[str, Any]) -> str:
    if not expect["at_least"]:
        return "-"
    of = "" if expect["metric"] == "accuracy" else f"{expect['metric']} "
    most = f" to {expect['at_most']:g}" if expect["at_most"] is not None else ""
    return f"{of}≥ {expect['at_least']:g}{most}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def result(
    summary: Mapping[str, Any], baselines: Sequence[Mapping[str, Any]] = (), wide: bool = False
) -> RenderableType:
    """Returns the result of a run: scores, clients, traffic and time.

    Args:
        summary: The summary of the run.
        baselines: The summaries of other runs to show in the same tables.
        wide: All columns.
    """
    if summary["status"] == "unfinished":
        return Text(f"unfinished, last round {summary['rounds']}")
    parts: list[RenderableType] = [
        _headline(summary),
        *_scores([summary, *baselines], wide),
        *_clients(summary, baselines, wide),
        *_traffic(summary, wide),
    ]
    if summary.get("without_training_items"):
        idle = ", ".join(summary["without_training_items"])
        line = f"clients without a training item: {idle} (they take part, their loss is 0)"
        parts.insert(1, Text(line, style="yellow"))
    if summary.get("absences"):
        parts.insert(1, Text(_absences(summary), style="yellow"))
    parts += [Text(line, style="yellow") for line in _liars(summary)]
    if local := summary.get("local"):  # of a deployment
        selection = summary.get("selection") or "accuracy"
        names = dict.fromkeys(("accuracy", selection))
        scores = ", ".join(f"{label(name)} {percent(local.get(name))}" for name in names)
        parts.append(Text(f"Local training at the parties, averaged, %: {scores}"))
    if secure := summary.get("secure"):
        sums, fewest = secure["sums"], secure["fewest_clients"]
        parts.append(Text(f"secure: {sums} masked sums, each over {fewest} clients or more"))
        if pairs := secure["cohorts_one_apart"]:
            line = f"{pairs} pairs of cohorts differ in one client"
            line += ": the difference of their sums discloses its reply"
            parts.append(Text(line, style="yellow"))
    if privacy := summary.get("privacy"):
        parts += [Text(line, style=style) for line, style in privacy_lines(privacy)]
    return Group(*parts)


def privacy_lines(privacy: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns what a run with differential privacy has spent: lines and their styles.

    privacy: the privacy part of its summary.
    """
    lines = []
    if "epsilon" in privacy:
        limit = f" of {privacy['limit']:g}" if privacy["limit"] else ""
        line = (
            f"differential privacy of a {privacy['unit']}: ε = {privacy['epsilon']:.3f}{limit}, "
            f"δ = {privacy['delta']:g}, {_plural(privacy['releases'], 'noisy sum')}, noise "
            f"multiplier {privacy['noise']:.3g}. The scores here are outside of the guarantee"
        )
        lines.append((line, ""))
    if "edge_epsilon" in privacy:
        line = f"randomised response on edges: ε = {privacy['edge_epsilon']:g} for each edge"
        lines.append((line, ""))
    if not privacy["private"]:
        line = "NOT PRIVATE: the noise comes from the run's seed (run.dp_seeded, for tests only)"
        lines.append((line, "bold red"))
    return lines


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
    return f"engine {engine(summary)}: {number} with {clients} and {threads} each"


def _plural(count: int, word: str) -> str:
    return f"{count} {word}{'s' * (count != 1)}"


def _liars(s: Mapping[str, Any]) -> list[str]:
    """Returns who lied, and whose updates were shortened or left out."""
    found = []
    if lied := s.get("adversary"):
        who = ", ".join(lied["clients"][:10])
        line = f"clients that lie ({lied['attack']}): {who}; scores are those of the others"
        found.append(line)
    for key, what in (("clipped", "shortened"), ("left_out", "left out")):
        if s.get(key):
            found.append(f"updates {what}: {_often(s[key])} (history.jsonl says when)")
    return found


def _often(counts: Mapping[str, int]) -> str:
    often = sorted(counts.items(), key=lambda item: -item[1])
    shown = ", ".join(
        f"{client} ({'once' if count == 1 else f'{count} times'})" for client, count in often[:10]
    )
    return shown + (f" and {len(often) - 10} more" if len(often) > 10 else "")


def _absences(s: Mapping[str, Any]) -> str:
    shown = _often(s["absences"])
    when = "history.jsonl says when and why"
    return f"absent from exchanges: {shown}; asked again: {s['retried']} ({when})"


def engine(summary: Mapping[str, Any]) -> str:
    """Returns which engine ran, and whether it was chosen automatically: "stacked (auto)"."""
    chosen = summary["engine_details"].get("chosen_by")
    return f"{summary['engine']} ({chosen})" if chosen else str(summary["engine"])


def _headline(s: Mapping[str, Any]) -> Text:
    return Text(headline(s), style="bold").append(f"\nengine: {engine(s)}", style="not bold")


def _titled(title: str, table: Table) -> tuple[Text, Table]:
    return Text(f"\n{title}", style="italic"), table


def _scores(summaries: Sequence[Mapping[str, Any]], wide: bool) -> tuple[Text, Table]:
    how = f"{summaries[0]['evaluation']} models, weighted by size"
    selection = summaries[0].get("selection") or "accuracy"
    scores = list(dict.fromkeys(("accuracy", selection, "f1_macro")))
    if wide:
        scores = list(dict.fromkeys((*scores, "accuracy_mean", "f1_weighted", "auc")))
        scores += [f"val_{selection}", "final_accuracy"]
    table = grid(
        (
            "method",
            *map(label, scores),
            "best round",
            *(("sent up", "sent down") if wide else ("sent",)),
            "seconds",
        )
    )
    for s in summaries:
        up, down = s["traffic"]["bytes_up"], s["traffic"]["bytes_down"]
        table.add_row(
            s["method"],
            *(percent(s.get(name)) for name in scores),
            f"{s['best_round'] or '-'} of {s['rounds']}",
            *((size(up), size(down)) if wide else (size(up + down),)),
            f"{s['seconds']['total']:.1f}",
        )
    return _titled(f"test scores at the best validation round, % ({how})", table)


def _clients(
    s: Mapping[str, Any], baselines: Sequence[Mapping[str, Any]], wide: bool
) -> tuple[Text, Table]:
    # Shows the accuracies of the baselines that have the same clients (a centralized one has not).
    ids = [c["id"] for c in s["per_client"]]
    others = [o for o in baselines if [c["id"] for c in o["per_client"]] == ids]
    if not wide:
        others = [o for o in others if o["method"] == "local"] or others[:1]
    split = ("train", "val", "test") if wide else ("train / val / test",)
    named = (f"{o['method']}'s" for o in others)
    table = grid(("client", "nodes", *split, "accuracy", *named, label("f1_macro")))
    shown = s["per_client"][:20]
    for k, c in enumerate(shown):
        counts = [str(c[part]) for part in ("train", "val", "test")]
        table.add_row(
            c["id"],
            str(c["nodes"]),
            *(counts if wide else (" / ".join(counts),)),
            *(percent(run["per_client"][k]["accuracy"]) for run in (s, *others)),
            percent(c["f1"]),
        )
    title = "clients"
    if len(shown) < len(s["per_client"]):
        title += f", the first 20 of {len(s['per_client'])} (summary.json has all)"
    return _titled(title, table)


def _traffic(s: Mapping[str, Any], wide: bool) -> tuple[Text, Table]:
    scalars = ("scalars up", "scalars down") if wide else ()
    table = grid(("phase", "messages", *scalars, "sent up", "sent down"))
    for name, t in s["traffic"]["phases"].items():
        counts = ("messages", *(("scalars_up", "scalars_down") if wide else ()))
        numbers = (f"{t[key]:,}" for key in counts)
        table.add_row(name, *numbers, size(t["bytes_up"]), size(t["bytes_down"]))
    return _titled("traffic, all clients and rounds", table)


TASKS_BESIDE = 3  # tasks that fit beside each other in 80 columns


def comparison(c: Comparison, wide: bool = False) -> RenderableType:
    """Returns the tables of a comparison: all tasks if there are several, then each task.

    A footnote explains the numbers. Lines below it name the folders that were left out.

    Args:
        c: The comparison.
        wide: All columns.
    """
    parts: list[RenderableType] = []
    if len(c.tasks) > 1:
        step = len(c.tasks) if wide else TASKS_BESIDE
        parts.append(Text(f"test {label(c.metric)}, %", style="italic"))
        for first in range(0, len(c.tasks), step):
            is_last = first + step >= len(c.tasks)
            parts += [_overview(c, c.tasks[first : first + step], is_last), Text("")]
    for task in c.tasks:
        parts += [Text(task, style="italic"), _task(c, task, wide), Text("")]
    parts.append(Text(footnote(c), style="dim"))
    parts += [
        Text(f"left out: {each.folder}: {each.reason}", style="yellow") for each in c.left_out
    ]
    return Group(*parts)


_STYLES = {"best": "bold green", "second": "underline", "": ""}


def _overview(c: Comparison, tasks: Sequence[str], with_mean: bool) -> Table:
    """Returns the scores of all rows on some tasks, and the mean over all tasks."""
    table = grid(("method", *tasks, *(("mean",) if with_mean else ())))
    for row in c.rows:
        entries = [c.entries.get((task, row)) for task in tasks]
        shown = [
            Text(str(e.score) + (" ≈" if e.like_best else ""), _STYLES[e.mark])
            if e and e.score
            else Text("-")
            for e in entries
        ]
        table.add_row(row, *shown, *((percent(c.overall(row)),) if with_mean else ()))
    return table


def _task(c: Comparison, task: str, wide: bool) -> Table:
    more = ("seconds", "seeds") if wide else ()
    table = grid(("method", f"{label(c.metric)} %", "over local", "below best", "p", "sent", *more))
    for row, e in c.on(task).items():
        mark = {"best": " best", "second": " second"}.get(e.mark, "")
        mark += " ≈" if e.like_best else ""
        tested = ("", "")
        if e.against_best and e.p is not None:
            tested = (points(e.against_best.mean), f"{e.p:.2g}")
        gain = points(e.gain.mean) if e.gain else ""
        score = Text(str(e.score) if e.score else "-", _STYLES[e.mark]).append(mark, "dim")
        numbers = (f"{e.seconds:.1f}", str(len(e.runs))) if wide else ()
        table.add_row(row, score, gain, *tested, size(e.bytes_sent), *numbers)
    return table


def comparison_as_json(c: Comparison) -> dict[str, Any]:
    """Returns the data that `fedloom compare --json` prints."""
    return {
        "metric": c.metric,
        "rows": c.records(),
        "left_out": [each._asdict() for each in c.left_out],
    }


def partition_statistics(statistics: Mapping[str, Any], wide: bool = False) -> RenderableType:
    """Returns the table of each client's data, as `fedloom partition` prints it.

    Args:
        statistics: As `fedloom.data.statistics.partition_statistics` returns them.
        wide: All columns.
    """
    is_node_task = "homophily_per_class" in statistics["clients"][0]
    by_class = "homophily_per_class" if is_node_task else "graph_size_per_class"
    last = f"{by_class.replace('_', ' ')}{' %' if is_node_task else ''}"
    headings = ["client", "nodes", "edges kept", "cut", "homophily %", "items of each class"]
    if wide:
        headings = [*headings[:2], "train / val / test", *headings[2:], last]
    table = grid(headings, left=("items of each class", last))
    for c in statistics["clients"]:
        scale = 100 if is_node_task else 1
        classwise = " ".join("-" if v is None else f"{scale * v:.0f}" for v in c[by_class])
        split = (f"{c['train']} / {c['val']} / {c['test']}",) if wide else ()
        table.add_row(
            c["name"],
            f"{c['nodes']:,}",
            *split,
            f"{c['edges_kept']:,}",
            _count(c["edges_cut"]),
            percent(c.get("homophily")),
            " ".join(map(str, c["labels"])),
            *((classwise,) if wide else ()),
        )
    total = statistics["totals"]
    cut = f"{_count(total['edges_cut'])} cut ({percent(total['cut_share'])} %)"
    line = f"\n{total['nodes']:,} nodes; edges: {total['edges_kept']:,} kept, {cut}"
    return Group(table, Text(line))


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def tuning(tuned: Tuned, rows: int = 10, wide: bool = False) -> RenderableType:
    """Returns the best trials of a study, and how to read the score of the best one.

    Args:
        tuned: The study.
        rows: The number of trials to show. The recipe as given is always shown.
        wide: A column for each setting.
    """
    ranked, metric = tuned.ranked, tuned.selection.replace("_", " ")
    shown = ranked[:rows] + [t for t in ranked[rows:] if t is tuned.given]
    names = tuple(tuned.best.settings) if wide else ("settings",)
    table = grid(("trial", f"validation {metric} %", *names), left=("settings",))
    for t in shown:
        values = {k: f"{v:.3g}" if isinstance(v, float) else str(v) for k, v in t.settings.items()}
        table.add_row(
            f"{t.number} (as given)" if t is tuned.given else str(t.number),
            percent(t.validation),
            *(values.values() if wide else [", ".join(f"{k}={v}" for k, v in values.items())]),
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
            f"the best has {abs(gain):.1f} points of validation {metric} "
            f"{'less' if gain < 0 else 'more'} than the recipe as given"
        )
    lines.append(
        f"it is the best of {len(ranked)} on the same validation items: expect a lower score on "
        "other items"
    )
    lines[0] = f"\n{lines[0]}"
    return Group(Text("best trials", style="italic"), table, Text("\n".join(lines)))
