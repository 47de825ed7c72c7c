"""Writes docs/benchmarks.md and its plot from the results that `bench/speed.py` stores."""

from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]
Slope = Callable[..., float]
NAMES = {
    "plain": "plain PyG loop",
    "loop": "loop",
    "wire": "wire",
    "stacked, before": "stacked, before",
    "stacked": "stacked",
    "processes, before": "processes, before",
    "workers": "two workers",
}


class Goal(NamedTuple):
    """How many times as fast as the plain loop the stacked engine should be."""

    torch: float  # with PyTorch alone
    compiled: float  # with a compiled kernel


# Parts that compare a round with the plain loop.
ROUNDS = {
    "cora10": Goal(13, 22),
    "citeseer10": Goal(18, 30),
    "pubmed10": Goal(7, 11),
    "cora100": Goal(50, 110),
    "small1000": Goal(20, 70),
}
ARXIV_GOAL, ARXIV_GB = 4.0, 4.0
COMMAND_GOAL = 4.0  # CPU seconds
WORKERS_GOAL = 1.6  # times as fast as stacked
PARTITION_GOAL = 3.0  # times as fast as before


def write(page: Path, kept: dict[str, Row], titles: dict[str, str], slope: Slope) -> None:
    """Writes the page and the plot.

    Args:
        page: The Markdown file. The plot has the same name with the suffix .png.
        kept: The stored results by part.
        titles: What each part measures.
        slope: Fits the exponent of y ~ x^k.
    """
    picture = page.with_suffix(".png")
    parts = {
        name: [{"load": kept[name]["load"], **row} for row in kept[name]["rows"]]
        for name in titles
        if name in kept and kept[name]["rows"]
    }
    lines = [
        "# Benchmarks",
        "",
        "`make bench` measures all of this. `python bench/speed.py NAME` measures one part.",
        "",
        "- Times are CPU times of one thread, unless a table says wall time.",
        "- Ways that are compared take turns. A ratio is the median over the turns.",
        *_base(kept),
        "- Load is the number of processes that ran or waited for a core in the last minute, the "
        "largest of the turns. The measurement itself counts as one.",
        *_origin(kept),
    ]
    if ROUNDS.keys() & parts.keys():
        rounds = {name: parts[name] for name in ROUNDS if name in parts}
        lines += ["", *_rounds(rounds, titles), "", f"![speed and growth]({picture.name})"]
    for name, rows in parts.items():
        if name not in ROUNDS:
            lines += ["", f"## {name}", "", titles[name], "", *TABLES[name](rows, slope)]
    page.write_text("\n".join(lines) + "\n")
    _draw(picture, parts)


def table(head: list[str], body: list[list[str]]) -> list[str]:
    """Returns the lines of a Markdown table."""
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *body)]


def verdict(value: float, goal: float) -> str:
    """Says whether a speed reaches its goal, or by how much it misses it."""
    return "reached" if value >= goal else f"missed by {100 * (1 - value / goal):.0f} %"


def number(row: Row, key: str, digits: int = 1, unit: str = "") -> str:
    """Returns a number of a row as text, empty if the row does not have it."""
    return f"{row[key]:,.{digits}f}{unit}" if key in row else ""


def _base(kept: dict[str, Row]) -> list[str]:
    """Returns which code "before" means."""
    bases = sorted({result["base"] for result in kept.values() if result.get("base")})
    return [f"- Before: the code of commit {', '.join(bases)}."] if bases else []


def _origin(kept: dict[str, Row]) -> list[str]:
    """Returns where and when each part was measured. Equal parts share a line."""
    origin = {name: (r["machine"], r["versions"], r["made"]) for name, r in kept.items()}
    same = {key: [name for name in origin if origin[name] == key] for key in origin.values()}
    return [
        f"- {', '.join(names)}: {made}, {machine}; {versions}."
        for (machine, versions, made), names in same.items()
    ]


def _rounds(parts: dict[str, list[Row]], titles: dict[str, str]) -> list[str]:
    by = {name: {row["way"]: row for row in rows} for name, rows in parts.items()}
    ways = [way for way in NAMES if any(way in found for found in by.values())]
    name_of = {name: titles[name].rstrip(".") for name in by}

    def cells(name: str, key: str, unit: str = "") -> list[str]:
        return [number(by[name].get(way, {}), key, 1, unit) for way in ways]

    times = [[name_of[name], *cells(name, "ms"), number(by[name]["plain"], "load")] for name in by]
    ratios = [[name_of[name], *cells(name, "ratio", "x")] for name in by]
    goals = []
    for name, goal in ROUNDS.items():
        if name in by and "stacked" in by[name]:
            row = by[name]["stacked"]
            goals.append(
                [
                    name_of[name],
                    f"{row['ratio']:.1f}x",
                    number(row, "gain", 1, "x"),
                    f"{goal.torch:g}x",
                    verdict(row["ratio"], goal.torch),
                    f"{goal.compiled:g}x",
                    verdict(row["ratio"], goal.compiled),
                ]
            )
    heads = [NAMES[way] for way in ways]
    return [
        "## A round of FedAvg",
        "",
        "GCN with 64 hidden units, 3 epochs, an evaluation in every round. CPU time in ms:",
        "",
        *table(["", *heads, "load"], times),
        "",
        "How many times as fast as the plain PyG loop:",
        "",
        *table(["", *heads], ratios),
        "",
        "The stacked engine against its goals:",
        "",
        *table(
            [
                "",
                "against the plain loop",
                "against before",
                "goal with PyTorch alone",
                "",
                "aim with a compiled kernel",
                "",
            ],
            goals,
        ),
    ]


def _methods(rows: list[Row], slope: Slope) -> list[str]:
    body = [
        [
            r["method"],
            number(r, "loop_ms"),
            number(r, "before_ms"),
            number(r, "stacked_ms"),
            number(r, "ratio", 2, "x"),
            number(r, "gain", 2, "x"),
            number(r, "load"),
        ]
        for r in rows
    ]
    head = ["method", "loop, ms", "stacked before, ms", "stacked, ms"]
    return table([*head, "stacked against loop", "stacked against before", "load"], body)


def _workers(rows: list[Row], slope: Slope) -> list[str]:
    body = []
    for case, group in groupby(rows, lambda row: row["case"]):
        for r in group:
            judged = verdict(r["ratio"], WORKERS_GOAL) if r["way"] == "workers" else ""
            name = f"`{r['engine']}`, two workers" if r["way"] == "workers" else NAMES[r["way"]]
            body.append(
                [
                    case,
                    name,
                    number(r, "ms"),
                    number(r, "ratio", 2, "x"),
                    judged,
                    number(r, "peak_mb", 0),
                    number(r, "load"),
                ]
            )
    goal = f"goal {WORKERS_GOAL:g}x"
    head = ["", "", "a round, ms of wall time", "against stacked", goal]
    note = "Two workers need two free cores: with other load, these ratios say little."
    return [*table([*head, "peak of the parent, MB", "load"], body), "", note]


def _kernels(rows: list[Row], slope: Slope) -> list[str]:
    body = [
        [
            NAMES[r["way"]],
            number(r, "ms"),
            number(r, "kernels_ms"),
            f"{100 * r['outside']:.0f} %",
            number(r, "load"),
        ]
        for r in rows
    ]
    head = ["", "a round, ms", "in kernels while profiled, ms", "outside of kernels while profiled"]
    note = "The profiler slows a round down. Its overhead counts as outside."
    return [*table([*head, "load"], body), "", note]


def _seconds(rows: list[Row]) -> list[str]:
    body = [
        [f"`{r['what']}`", number(r, "seconds", 2), number(r, "least", 2), number(r, "load")]
        for r in rows
        if "what" in r
    ]
    return table(["", "seconds, median", "least", "load"], body)


def _command(rows: list[Row], slope: Slope) -> list[str]:
    now = next(r["seconds"] for r in rows if r["what"] == "fedloom run")
    miss = f"missed by {100 * (now / COMMAND_GOAL - 1):.0f} %"
    judged = "reached" if now <= COMMAND_GOAL else miss
    return [*_seconds(rows), "", f"Goal: {COMMAND_GOAL:g} s, {judged}."]


def _startup(rows: list[Row], slope: Slope) -> list[str]:
    packages = [[f"`{r['package']}`", number(r, "seconds", 2)] for r in rows if "package" in r]
    return [
        *_seconds(rows),
        "",
        "The ten packages whose imports take longest. `python -X importtime` slows them down.",
        "",
        *table(["package", "seconds"], packages),
    ]


def _arxiv(rows: list[Row], slope: Slope) -> list[str]:
    body = [
        [
            NAMES[r["way"]],
            number(r, "ms", 0),
            number(r, "ratio", 1, "x"),
            f"{r['peak_mb'] / 1024:.2f}",
            number(r, "load"),
        ]
        for r in rows
    ]
    head = ["", "a round, ms", "against the plain loop", "peak of the process, GB", "load"]
    stacked = next(r for r in rows if r["way"] == "stacked")
    memory = "reached" if stacked["peak_mb"] < 1024 * ARXIV_GB else "missed"
    goals = (
        f"Goals of the stacked engine: {ARXIV_GOAL:g}x, {verdict(stacked['ratio'], ARXIV_GOAL)}; "
        f"under {ARXIV_GB:g} GB, {memory}."
    )
    return [*table(head, body), "", goals]


def _products(rows: list[Row], slope: Slope) -> list[str]:
    keys = ("graph_s", "partition_s", "first_round_s", "round_s", "total_s")
    body = [
        [
            "before" if r.get("older") else "now",
            r["model"],
            r["partition"],
            *(number(r, key) for key in keys),
            f"{r['peak_mb'] / 1024:.1f}",
            f"{100 * r['accuracy']:.1f}",
            number(r, "load"),
        ]
        for r in rows
    ]
    head = ["code", "model", "partition", "making the graph, s", "partition, s"]
    head += ["propagation and first round, s", "a round, s", "all, s", "peak of the process, GB"]
    lines = table([*head, "accuracy", "load"], body)
    before = [r for r in rows if r.get("older")]
    for old in before:
        new = next(
            r
            for r in rows
            if not r.get("older") and all(r[key] == old[key] for key in ("model", "partition"))
        )
        gain = old["partition_s"] / new["partition_s"]
        lines += [
            "",
            f"The partition by {old['partition']} is {gain:.1f} times as fast as before. "
            f"Goal: {PARTITION_GOAL:g} times, {verdict(gain, PARTITION_GOAL)}. "
            f"Peak before and now: {old['peak_mb'] / 1024:.1f} GB and "
            f"{new['peak_mb'] / 1024:.1f} GB.",
        ]
    return lines


def _prediction(rows: list[Row], slope: Slope) -> list[str]:
    keys = ("before_mb", "predicted_mb", "peak_mb")
    body = [
        [
            r["dataset"],
            r["model"],
            *(number(r, key, 0) for key in keys),
            f"{r['predicted_mb'] / r['peak_mb']:.2f}",
        ]
        for r in rows
    ]
    head = ["graph", "model", "before the run, MB", "predicted, MB", "peak, MB", "predicted / peak"]
    return table(head, body)


def _growth(rows: list[Row], slope: Slope) -> list[str]:
    return _grown(
        {axis: list(group) for axis, group in groupby(rows, lambda row: row["axis"])}, slope
    )


def _clients(rows: list[Row], slope: Slope) -> list[str]:
    return _grown(
        {method: list(group) for method, group in groupby(rows, lambda row: row["method"])}, slope
    )


def _grown(groups: dict[str, list[Row]], slope: Slope) -> list[str]:
    body = []
    for name, rows in groups.items():
        amounts = [r["amount"] for r in rows]
        exponents = [f"{slope(amounts, [r[key] for r in rows]):.2f}" for key in ("ms", "mb")]
        cells = [
            ", ".join(f"{value:,.0f}" for value in values)
            for values in (amounts, [r["ms"] for r in rows], [r["mb"] for r in rows])
        ]
        body.append([name, *cells, *exponents, f"{max(r['load'] for r in rows):.1f}"])
    head = ["", "amounts", "a round, ms", "graphs and run, MB", "exponent of time"]
    return table([*head, "exponent of memory", "load"], body)


TABLES: dict[str, Callable[[list[Row], Slope], list[str]]] = {
    "methods": _methods,
    "workers": _workers,
    "kernels": _kernels,
    "command": _command,
    "startup": _startup,
    "arxiv": _arxiv,
    "products": _products,
    "prediction": _prediction,
    "growth": _growth,
    "clients": _clients,
}


def _draw(picture: Path, parts: dict[str, list[Row]]) -> None:
    """Draws the speed relative to the plain loop (left) and the growth of a round (right)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    bars, lines = figure.subplots(1, 2)
    cases = [name for name in ROUNDS if name in parts]
    found = {row["way"] for name in cases for row in parts[name]}
    ways = [way for way in NAMES if way in found and way != "plain"]
    width = 0.8 / max(len(ways), 1)
    for k, way in enumerate(ways):
        heights = [
            (at, row["ratio"])
            for at, name in enumerate(cases)
            for row in parts[name]
            if row["way"] == way
        ]
        left = (k - (len(ways) - 1) / 2) * width
        bars.bar([at + left for at, _ in heights], [h for _, h in heights], width, label=NAMES[way])
    for at, name in enumerate(cases):
        goal = ROUNDS[name].torch
        bars.plot([at - 0.45, at + 0.45], [goal, goal], color="0.2", linewidth=1, linestyle=":")
    bars.axhline(1, color="0.5", linewidth=1)
    bars.set(
        yscale="log",
        ylabel="times as fast as a plain PyG loop; dotted: goal",
        xticks=range(len(cases)),
        xticklabels=cases,
    )
    if cases:
        bars.legend(ncols=len(ways), loc="lower center", bbox_to_anchor=(0.5, 1.0))
    grown = [(row["axis"], row) for row in parts.get("growth", [])]
    grown += [(f"clients, {row['method']}", row) for row in parts.get("clients", [])]
    for label, group in groupby(grown, lambda pair: pair[0]):
        rows = [row for _, row in group]
        lines.plot(
            [r["amount"] / rows[0]["amount"] for r in rows],
            [r["ms"] for r in rows],
            marker="o",
            label=label,
        )
    lines.set(xscale="log", yscale="log", xlabel="times as many", ylabel="a round of FedAvg, ms")
    if grown:
        lines.legend()
    figure.savefig(picture, dpi=120)
