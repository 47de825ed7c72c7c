"""The part of a report about clients' updates: who stands out, and who was shortened or left out.

It is made from `updates` in the history.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import mean
from typing import Any

from fedloom.experiments.report.comparison import Comparison
from fedloom.experiments.report.outliers import SHOWN, distance, updates_of
from fedloom.experiments.report.spec import Figure, axis, columns, make_figure, number, short
from fedloom.experiments.run_folder import LeftOut, Run, entries

_TITLE = "Updates of the clients"
_HEAD = ("method", "seed", "phase", "client", "lied", "norm", "largest norm", "cosine")
_COUNTS = ("shortened", "left out", "rounds")
_HELP = {
    "lied": "whether the simulation made the client lie",
    "norm": "norm of the update, divided by the median norm of the round; mean over rounds",
    "largest norm": "the largest of these",
    "cosine": "cosine of the update and the median update of the round; mean over rounds",
    "shortened": "rounds in which the update was shortened",
    "left out": "rounds in which the update was not used",
    "rounds": "rounds in which the client sent an update",
}


@dataclass
class _Trace:
    """The updates of a client in a phase, by round."""

    rounds: list[int] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    cosines: list[float | None] = field(default_factory=list)
    shortened: int = 0
    left_out: int = 0

    @property
    def rank(self) -> tuple[int, float]:
        """Clients that were left out or shortened often come first, then those far from others."""
        return -self.shortened - self.left_out, -distance(self.norms, self.cosines)


@dataclass
class _Compared:
    """What a run's history says about the updates in a phase. The most outlying come first."""

    run: Run
    row: str
    phase: str
    traces: dict[str, _Trace]

    @property
    def shown(self) -> dict[str, _Trace]:
        return dict(list(self.traces.items())[:SHOWN])

    @property
    def liars(self) -> list[str]:
        return list(map(str, (self.run.summary.get("adversary") or {}).get("clients", ())))

    def name(self, client: str) -> str:
        return f"{client} (lied)" if client in self.liars else client


def update_figures(c: Comparison, task: str) -> list[Figure]:
    """Returns the curves of each method's first seed, and a table of all seeds.

    Returns nothing if no run compared updates. Adds folders with a damaged history to `c.left_out`.
    """
    found: list[_Compared] = []
    curves: list[Figure] = []
    for row, entry in c.on(task).items():
        for run in entry.runs:
            try:
                compared = _read(run, row)
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                reason = f"damaged: updates in history.jsonl: {type(error).__name__}: {error}"
                c.left_out.append(LeftOut(str(run.folder), reason))
                continue
            found += compared
            if run is entry.runs[0]:
                curves += [figure for one in compared for figure in _curves(c, task, one)]
    if not found:
        return []
    group = make_figure(
        c, "clients", "group", "updates", task, _TITLE, _caption(found), figures=curves
    )
    return [*([group] if curves else []), _table(c, task, found)]


def _read(run: Run, row: str) -> list[_Compared]:
    by_phase: dict[str, dict[str, _Trace]] = {}
    for entry in entries(run.folder):
        for phase, updates in updates_of(entry):
            traces = by_phase.setdefault(phase, {})
            for update in updates:
                trace = traces.setdefault(update.client, _Trace())
                trace.rounds.append(int(entry["round"]))
                trace.norms.append(update.norm)
                trace.cosines.append(update.cosine)
                trace.shortened += update.shortened
                trace.left_out += update.left_out
    return [
        _Compared(run, row, phase, dict(sorted(traces.items(), key=lambda item: item[1].rank)))
        for phase, traces in by_phase.items()
    ]


def _caption(found: list[_Compared]) -> str:
    """Returns what the curves show, how many clients are not shown, and who lied."""
    text = (
        "The server compares the updates of a round: their norms with the median norm, their "
        "directions with the median of each entry. Honest clients with other data stand out, too."
    )
    hidden = max(len(one.traces) - len(one.shown) for one in found)
    if hidden:
        text += f" Shown: the {SHOWN} most outlying clients of a run; not shown: {hidden}."
    return " ".join([text, *dict.fromkeys(line for one in found if (line := _liars(one)))])


def _liars(one: _Compared) -> str:
    if not one.liars:
        return ""
    attack = one.run.summary["adversary"].get("attack")
    more = len(one.liars) - SHOWN
    who = ", ".join(one.liars[:SHOWN]) + (f" and {more} more" if more > 0 else "")
    return f"Seed {one.run.summary['seed']}: the simulation makes clients {who} lie ({attack})."


def _curves(c: Comparison, task: str, one: _Compared) -> list[Figure]:
    seed = one.run.summary["seed"]
    made = []
    for what, label, log in (
        ("norm", "norm, divided by the median norm", True),
        ("cosine", "cosine to the median update", False),
    ):
        series: list[dict[str, Any]] = [
            {
                "name": one.name(client),
                "color": k,
                "x": trace.rounds,
                "y": [short(v) for v in (trace.norms if log else trace.cosines)],
            }
            for k, (client, trace) in enumerate(one.shown.items())
        ]
        figure = make_figure(
            c,
            "clients",
            "lines",
            f"updates {what} {one.row} {one.phase}",
            task,
            f"{what.title()} of updates: {one.row}, {one.phase}, seed {seed}",
            "",
            x=axis("round", "count"),
            y=axis(label, log=log),
            series=series,
            zero=not log,
        )
        made.append(figure)
    return made


def _table(c: Comparison, task: str, found: list[_Compared]) -> Figure:
    rows = []
    for one in found:
        for client, trace in one.shown.items():
            norms = [v for v in trace.norms if v is not None]
            cosines = [v for v in trace.cosines if v is not None]
            values = [
                mean(norms) if norms else None,
                max(norms, default=None),
                mean(cosines) if cosines else None,
            ]
            rows.append(
                [
                    one.row,
                    one.run.summary["seed"],
                    one.phase,
                    client,
                    "yes" if client in one.liars else "",
                    *(number(short(v), f"{v or 0:.2f}") for v in values),
                    trace.shortened,
                    trace.left_out,
                    len(trace.rounds),
                ]
            )
    hidden = sum(len(one.traces) - len(one.shown) for one in found)
    caption = f"{hidden} less outlying rows are not shown (history.jsonl has all)."
    return make_figure(
        c,
        "clients",
        "table",
        "updates table",
        task,
        "Clients whose updates stand out most",
        caption if hidden else "",
        columns=columns([*_HEAD, *_COUNTS], ["method", "phase", "client", "lied"], _HELP),
        rows=rows,
        closed=True,
    )
