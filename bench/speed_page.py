"""Writes docs/benchmarks.md and its plot from the results that `bench/speed.py` stores."""

from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

Row = dict[str, Any]
NAMES = {
    "plain": "plain PyG loop",
    "loop": "loop engine",
    "wire": "wire engine",
    "stacked": "stacked engine",
}
# Parts that compare a round with the plain loop, and the goal for the speed of the stacked engine.
ROUNDS = {"cora10": 10, "citeseer10": 12, "pubmed10": 6, "cora100": 30, "small1000": 80}


def write(
    page: Path, kept: dict[str, Row], titles: dict[str, str], slope: Callable[..., float]
) -> None:
    """Writes the page and the plot.

    Args:
        page: The Markdown file. The plot has the same name with the suffix .png.
        kept: The stored results by part.
        titles: What each part measures.
        slope: Fits the exponent of y ~ x^k.
    """
    picture = page.with_suffix(".png")
    parts = {name: kept[name]["rows"] for name in titles if name in kept and kept[name]["rows"]}
    lines = [
        "# Benchmarks",
        "",
        "One thread. Made by `make bench`, or part by part: `python bench/speed.py NAME`.",
        "",
        *_origin(kept),
    ]
    if ROUNDS.keys() & parts.keys():
        lines += [
            "",
            *_rounds({name: parts[name] for name in ROUNDS if name in parts}, titles),
            "",
            f"![speed and growth]({picture.name})",
        ]
    for name, rows in parts.items():
        if name not in ROUNDS:
            lines += ["", f"## {name}", "", titles[name], "", *TABLES[name](rows, slope)]
    page.write_text("\n".join(lines) + "\n")
    _draw(picture, parts)


def table(head: list[str], body: list[list[str]]) -> list[str]:
    """Returns the lines of a Markdown table."""
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *body)]


def _origin(kept: dict[str, Row]) -> list[str]:
    """Returns where and when each part was measured. Equal parts share a line."""
    origin = {name: (r["machine"], r["versions"], r["made"]) for name, r in kept.items()}
    same = {key: [name for name in origin if origin[name] == key] for key in origin.values()}
    busiest = max((r["load"] for r in kept.values()), default=0.0)
    lines = [
        f"- {', '.join(names)}: {made}, {machine}; {versions}"
        for (machine, versions, made), names in same.items()
    ]
    return [*lines, f"- load of the machine before a part: {busiest:.1f} at most"]


def _rounds(parts: dict[str, list[Row]], titles: dict[str, str]) -> list[str]:
    ways = [row["way"] for row in next(iter(parts.values())) if row["way"] != "plain"]
    head = ["GCN-64, 3 epochs, evaluation every round", "plain PyG loop, ms"]
    head += [f"{NAMES[way]}, ms" for way in ways] + [f"{way} is faster" for way in ways] + ["goal"]
    body = []
    for name, rows in parts.items():
        by = {row["way"]: row for row in rows}
        times, ratios = (
            [_number(by, way, "ms", "") for way in ways],
            [_number(by, way, "ratio", "x") for way in ways],
        )
        body.append(
            [
                titles[name].rstrip("."),
                f"{by['plain']['ms']:.1f}",
                *times,
                *ratios,
                f"{ROUNDS[name]}x",
            ]
        )
    note = "[Decision 9](decisions/9-lockstep.md) explains the goals that are missed."
    return ["## A round of FedAvg", "", *table(head, body), "", note]


def _number(by: dict[str, Row], way: str, key: str, unit: str) -> str:
    return f"{by[way][key]:.1f}{unit}" if way in by else ""


def _methods(rows: list[Row], slope: Callable[..., float]) -> list[str]:
    body = [
        [r["method"], f"{r['loop_ms']:.1f}", f"{r['stacked_ms']:.1f}", f"{r['ratio']:.2f}x"]
        for r in rows
    ]
    return table(["method", "loop, ms", "stacked, ms", "stacked is faster"], body)


def _kernels(rows: list[Row], slope: Callable[..., float]) -> list[str]:
    body = [
        [NAMES[r["way"]], f"{r['ms']:.1f}", f"{r['kernels_ms']:.1f}", f"{100 * r['outside']:.0f} %"]
        for r in rows
    ]
    note = "The profiler slows a round down. Its overhead counts as outside."
    return [
        *table(
            [
                "",
                "a round, ms",
                "in kernels while profiled, ms",
                "outside of kernels while profiled",
            ],
            body,
        ),
        "",
        note,
    ]


def _startup(rows: list[Row], slope: Callable[..., float]) -> list[str]:
    commands = [
        [f"`{r['what']}`", f"{r['seconds']:.2f}", f"{r['least']:.2f}"] for r in rows if "what" in r
    ]
    packages = [[f"`{r['package']}`", f"{r['seconds']:.2f}"] for r in rows if "package" in r]
    note = "The ten packages whose imports take longest (`python -X importtime` slows them down):"
    return [
        *table(["", "seconds, median", "least"], commands),
        "",
        note,
        "",
        *table(["package", "seconds"], packages),
    ]


def _arxiv(rows: list[Row], slope: Callable[..., float]) -> list[str]:
    body = [
        [NAMES[r["way"]], f"{r['ms']:.0f}", f"{r['ratio']:.1f}x", f"{r['peak_mb'] / 1024:.2f}"]
        for r in rows
    ]
    return [
        *table(["", "a round, ms", "faster", "peak of the process, GB"], body),
        "",
        "Goal: 4x, and under 4 GB.",
    ]


def _products(rows: list[Row], slope: Callable[..., float]) -> list[str]:
    head = [
        "model",
        "partition",
        "making the graph, s",
        "partition, s",
        "propagation and first round, s",
        "a round, s",
        "all, s",
    ]
    keys = ("graph_s", "partition_s", "first_round_s", "round_s", "total_s")
    body = []
    for r in rows:
        seconds = [f"{r[key]:.1f}" for key in keys]
        body.append(
            [
                r["model"],
                r["partition"],
                *seconds,
                f"{r['peak_mb'] / 1024:.1f}",
                f"{100 * r['accuracy']:.1f}",
            ]
        )
    return table([*head, "peak of the process, GB", "accuracy"], body)


def _prediction(rows: list[Row], slope: Callable[..., float]) -> list[str]:
    keys = ("before_mb", "predicted_mb", "peak_mb")
    body = [
        [
            r["dataset"],
            r["model"],
            *(f"{r[key]:,.0f}" for key in keys),
            f"{r['predicted_mb'] / r['peak_mb']:.2f}",
        ]
        for r in rows
    ]
    return table(
        ["graph", "model", "before the run, MB", "predicted, MB", "peak, MB", "predicted / peak"],
        body,
    )


def _growth(rows: list[Row], slope: Callable[..., float]) -> list[str]:
    return _grown(
        {axis: list(group) for axis, group in groupby(rows, lambda row: row["axis"])}, slope
    )


def _clients(rows: list[Row], slope: Callable[..., float]) -> list[str]:
    return _grown(
        {method: list(group) for method, group in groupby(rows, lambda row: row["method"])}, slope
    )


def _grown(groups: dict[str, list[Row]], slope: Callable[..., float]) -> list[str]:
    body = []
    for name, rows in groups.items():
        amounts = [r["amount"] for r in rows]
        exponents = [f"{slope(amounts, [r[key] for r in rows]):.2f}" for key in ("ms", "mb")]
        cells = [
            ", ".join(f"{value:,.0f}" for value in values)
            for values in (amounts, [r["ms"] for r in rows], [r["mb"] for r in rows])
        ]
        body.append([name, *cells, *exponents])
    return table(
        [
            "",
            "amounts",
            "a round, ms",
            "graphs and run, MB",
            "exponent of time",
            "exponent of memory",
        ],
        body,
    )


TABLES: dict[str, Callable[[list[Row], Callable[..., float]], list[str]]] = {
    "methods": _methods,
    "kernels": _kernels,
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
    ways = list(
        dict.fromkeys(row["way"] for name in cases for row in parts[name] if row["way"] != "plain")
    )
    width = 0.8 / max(len(ways), 1)
    for k, way in enumerate(ways):
        found = [
            (at, row["ratio"])
            for at, name in enumerate(cases)
            for row in parts[name]
            if row["way"] == way
        ]
        left = (k - (len(ways) - 1) / 2) * width
        bars.bar(
            [at + left for at, _ in found], [ratio for _, ratio in found], width, label=NAMES[way]
        )
    bars.axhline(1, color="0.5", linewidth=1)
    bars.set(
        yscale="log",
        ylabel="times as fast as a plain PyG loop",
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
