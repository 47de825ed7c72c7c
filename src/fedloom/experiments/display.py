"""Display: numbers as text, and how results and comparisons show themselves in a notebook.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedloom.data.display import html_table
from fedloom.errors import ConfigError

if TYPE_CHECKING:
    from fedloom.experiments.report.comparison import Comparison, Entry
    from fedloom.experiments.tune import Tuned

SHOWN = 20  # clients, or trials, in a notebook's table


# ---- numbers ----
def percent(value: float | None) -> str:
    """Returns a share in percent: 0.8123 gives "81.2", None gives "-"."""
    return "-" if value is None else f"{100 * value:.1f}"


def size(count: float) -> str:
    """Returns a number of bytes with its unit: 36900000 gives "36.9 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return ""


def duration(seconds: float) -> str:
    """Returns a number of seconds with its unit: 600 gives "10 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def headline(s: Mapping[str, Any]) -> str:
    """Returns the task of a run and how it ended, in one line."""
    by = f" by {s['partition']}" if s.get("partition") else ""
    task = f"{s['method']} on {s['dataset']}, {s['clients']} clients{by}"
    model = f", {s['model']}" if s["model"] else ""
    line = f"{task}{model}, seed {s['seed']}: {s['status']}"
    return line + (f" ({s['cause']})" if s.get("cause") else "")


# ---- data frames ----
def data_frame(records: list[dict[str, Any]]) -> Any:
    """Returns records as a pandas DataFrame, a row for each.

    Raises a ConfigError if pandas is not installed.
    """
    try:
        import pandas
    except ModuleNotFoundError as error:
        raise ConfigError(
            "pandas() needs the package 'pandas': pip install 'fedloom[tables]'"
        ) from error
    return pandas.DataFrame.from_records(records)


# ---- a run ----
def history_records(history: Sequence[Mapping[str, Any]], clients: bool) -> list[dict[str, Any]]:
    """Returns a history as flat records: numbers and texts only.

    Args:
        history: The entries of a history.
        clients: A record for each entry and client, instead of one for each entry.
    """
    if clients:
        return [
            {"round": entry["round"], "stage": entry.get("stage"), "client": row["id"], **row}
            for entry in history
            for row in entry.get("clients", ())
        ]
    return [
        {key: value for key, value in entry.items() if not isinstance(value, (list, dict))}
        for entry in history
    ]


def result_text(summary: Mapping[str, Any], folder: object) -> str:
    """Returns a result in one line, as `repr` shows it."""
    place = f"; folder {str(folder)!r}" if folder else ""
    if "method" not in summary:  # the process was killed, or the run is still under way
        return f"Result({summary['status']}, last round {summary['rounds']}{place})"
    return f"Result({headline(summary)}; {_scores(summary)}{place})"


def _scores(s: Mapping[str, Any]) -> str:
    sent = s["traffic"]["bytes_up"] + s["traffic"]["bytes_down"]
    chosen = s.get("selection") or "accuracy"
    names = dict.fromkeys([chosen, "accuracy"])
    scores = ", ".join(f"{name.replace('_', ' ')} {percent(s[name])} %" for name in names)
    return (
        f"{scores}, best round {s['best_round'] or '-'} of "
        f"{s['rounds']}, {size(sent)} sent, {s['seconds']['total']:.1f} s"
    )


def result_html(summary: Mapping[str, Any], folder: object) -> str:
    """Returns a result as an HTML table of its clients."""
    if "method" not in summary:
        return html_table(result_text(summary, folder), (), ())
    headings = ("client", "nodes", "train", "val", "test", "accuracy %", "macro F1 %")
    clients = summary["per_client"]
    rows = [
        (c["id"], c["nodes"], c["train"], c["val"], c["test"], percent(c["accuracy"]),
         percent(c["f1"]))
        for c in clients[:SHOWN]
    ]  # fmt: skip
    more = len(clients) - len(rows)
    notes = [_scores(summary)]
    notes += [f"{more} more clients in summary['per_client']"] * bool(more)
    notes += [f"folder {str(folder)!r}"] * bool(folder)
    return html_table(headline(summary), headings, rows, "; ".join(notes))


# ---- a comparison ----
def comparison_text(c: Comparison) -> str:
    """Returns a comparison in a line for each task and row, as `repr` shows it."""
    lines = [f"Comparison({c.metric}, %)"]
    wide = max(map(len, c.rows), default=0)
    for task in c.tasks:
        lines.append(f"  {task}")
        for row, entry in c.on(task).items():
            lines.append(f"    {row:<{wide}}  {_score(entry)}".rstrip())
    if c.left_out:
        lines.append(f"  left out: {len(c.left_out)} runs, see .left_out")
    return "\n".join(lines)


def _score(e: Entry) -> str:
    return f"{e.score or '-'}{f' {e.mark}' if e.mark else ''}{' ≈' if e.like_best else ''}"


def comparison_html(c: Comparison, note: str) -> str:
    """Returns a comparison as an HTML table for each task."""
    from fedloom.experiments.report.significance import points

    headings = (
        "method", f"{c.metric.replace('_', ' ')} %", "over local", "below the best", "p", "sent",
        "seconds", "seeds",
    )  # fmt: skip
    parts = []
    for task in c.tasks:
        rows = [
            (
                row,
                _score(e),
                points(e.gain.mean) if e.gain else "",
                points(e.against_best.mean) if e.against_best else "",
                f"{e.p:.2g}" if e.p is not None else "",
                size(e.bytes_sent),
                f"{e.seconds:.1f}",
                len(e.runs),
            )
            for row, e in c.on(task).items()
        ]
        parts.append(html_table(task, headings, rows))
    if c.left_out:
        rows_out = [(each.folder, each.reason) for each in c.left_out]
        parts.append(html_table("left out", ("folder", "reason"), rows_out))
    return "".join(parts) + html_table("", (), (), note)


# ---- tuning ----
def tuned_text(tuned: Tuned) -> str:
    """Returns the result of tuning in one line, as `repr` shows it."""
    settings = ", ".join(f"{key}={_value(v)}" for key, v in tuned.best.settings.items())
    of = f"trial {tuned.best.number} of {len(tuned.trials)}"
    return f"Tuned({settings}; validation {percent(tuned.best.validation)} %, {of})"


def tuned_html(tuned: Tuned) -> str:
    """Returns the best trials as an HTML table."""
    ranked = sorted(tuned.trials, key=lambda t: (-(t.validation or 0), t.number))[:SHOWN]
    rows = [
        (t.number, percent(t.validation), *map(_value, t.settings.values()), t.error)
        for t in ranked
    ]
    headings = ("trial", "validation %", *tuned.best.settings, "error")
    return html_table("best trials", headings, rows, f"{tuned.ended}; recipe {tuned.recipe}")


def _value(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
