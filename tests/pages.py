"""Synthetic report pages: one with a figure of every kind, and a large one."""

import base64
import math
import random

METHODS = (
    "local",
    "fedavg",
    "fedprox",
    "fedproto",
    "fedpg",
    "fedgkc",
    "opfgl",
    "fedstruct",
    "fedgh",
    "fedtgp",
)
CLASSES = (
    "Case based",
    "Genetic",
    "Neural",
    "Probabilistic",
    "Reinforcement",
    "Rule learning",
    "Theory",
)
ROUND = {"label": "round", "log": False, "unit": "count"}
ACCURACY = {"label": "test accuracy", "log": False, "unit": "percent"}
TRAFFIC = {"label": "bytes sent, all clients", "log": True, "unit": "bytes"}
TIME = {"label": "time", "log": False, "unit": "seconds"}


def page(figures, **more):
    """Returns a page with these figures."""
    return {
        "title": "Ten methods on Cora, 10 clients by Louvain",
        "headline": {
            "text": "fedprox is best: 76.0 % accuracy, 6.0 points above Local, for 30.0 MB.",
            "name": "fedprox",
            "details": ["The test does not distinguish fedgkc from fedprox."],
        },
        "made": "2026-03-14T09:26:53+00:00",
        "version": "0.1.0",
        "command": "fedloom report grid/runs/*/",
        "figures": figures,
        "versions": [["fedloom", "0.1.0"], ["torch", "2.13.0 (8 runs), 2.12.0 (2 runs)"]],
        "versions_differ": True,
        "warnings": [],
        "left_out": [],
        "facts": [["dataset", "cora"], ["clients", "10"], ["seeds", "0, 1, 2"], ["rounds", "30"]],
        **more,
    }


def curves(methods, rounds, rng):
    """Returns rising accuracies with a band."""
    series = []
    for k, name in enumerate(methods):
        top, pace, wide = 0.62 + 0.03 * ((k * 7) % 10), 3 + k, 0.012 + 0.002 * k
        y = [top - 0.4 * math.exp(-r / pace) + rng.gauss(0, 0.004) for r in range(1, rounds + 1)]
        series.append({"name": name, "color": k, "x": list(range(1, rounds + 1)), "y": y})
        series[-1] |= {"low": [v - wide for v in y], "high": [v + wide for v in y]}
    return series


def convergence(methods=METHODS, rounds=30, rng=None):
    series = curves(methods, rounds, rng or random.Random(0))
    if len(series) > 6:
        series[6] |= {"x": [1], "y": [0.71], "low": [0.70], "high": [0.72]}  # one-shot
        series[3]["y"][5] = series[3]["low"][5] = None
    return {
        "id": "convergence",
        "title": "Accuracy by round",
        "section": "results",
        "kind": "lines",
        "x": ROUND,
        "y": ACCURACY,
        "series": series,
        "caption": "Mean over three seeds. The band is from the lowest to the highest seed.",
    }


def against_local(methods, clients, rng):
    base = [min(0.98, max(0.2, rng.gauss(0.7, 0.12))) for _ in range(clients)]
    series = []
    for k, name in enumerate(methods):
        if name != "local":
            y = [min(1.0, max(0.0, v + rng.gauss(0.02 * (k % 4), 0.05))) for v in base]
            series.append(
                {
                    "name": name,
                    "color": k,
                    "x": base,
                    "y": y,
                    "labels": [f"client {c}" for c in range(clients)],
                }
            )
    return {
        "id": "who-gains",
        "title": "Gains of clients",
        "section": "clients",
        "kind": "points",
        "diagonal": True,
        "caption": "Each mark is a client. Above the line it gains from the federation.",
        "x": {**ACCURACY, "label": "local accuracy"},
        "y": {**ACCURACY, "label": "accuracy in the federation"},
        "series": series,
    }


def heat_map(identity, title, clients, rng, share=False):
    values = [
        [
            None
            if rng.random() < 0.15
            else (rng.random() if share else float(int(rng.expovariate(1 / 40)) + 1))
            for _ in CLASSES
        ]
        for _ in range(clients)
    ]
    return {
        "id": identity,
        "title": title,
        "section": "data",
        "kind": "heat",
        "rows": [str(k) for k in range(clients)],
        "columns": list(CLASSES),
        "row_label": "client",
        "column_label": "class",
        "values": values,
        "low": 0,
        "high": 1 if share else max(v for row in values for v in row if v is not None),
        "format": "0.00" if share else "0",
        "unit": "",
        "caption": "Dark colours are large values. Grey: the client has none of the class.",
    }


def result_table(methods, rng):
    marks = {2: "best", 5: "second"}
    rows = []
    for k, name in enumerate(methods):
        accuracy, sent = 0.7 + 0.01 * ((k * 3) % 10), 10 ** (4 + k % 5) * (1 + k)
        rows.append(
            [
                name,
                {
                    "text": f"{100 * accuracy:.1f} ± {rng.random():.1f}",
                    "sort": accuracy,
                    "mark": marks.get(k, ""),
                },
                {"text": f"{60 + k}.0", "sort": 60.0 + k, "mark": ""},
                {"text": f"{sent / 1e6:.2f} MB", "sort": sent, "mark": ""},
                {"text": "0.03" if k else "–", "sort": 0.03 if k else None, "mark": ""},
                k * 3,
            ]
        )
    columns = [
        {"name": "method", "align": "left"},
        {"name": "accuracy, %", "align": "right", "help": "mean ± standard deviation over seeds"},
        {"name": "F1, %", "align": "right"},
        {"name": "traffic", "align": "right"},
        {"name": "p against the best", "align": "right"},
        {"name": "seconds", "align": "right"},
    ]
    return {
        "id": "results-table",
        "title": "Results",
        "section": "results",
        "kind": "table",
        "columns": columns,
        "rows": rows,
        "caption": "Mean ± standard deviation over seeds. Bold: the best. Underlined: the second.",
        "sorted_by": {"column": 2, "descending": False},
    }


def confusion(rng):
    """Returns a group with the confusion matrices of two methods."""
    maps = []
    for name in METHODS[:2]:
        counts = [[rng.randrange(5, 20) for _ in CLASSES] for _ in CLASSES]
        for k in range(len(CLASSES)):
            counts[k][k] += 100
        one = heat_map(f"confusion-{name}", name, len(CLASSES), rng, share=True)
        one |= {"section": "classes", "rows": list(CLASSES), "row_label": "true class"}
        one |= {"unit": "percent", "counts": counts, "caption": "", "format": "0"}
        one["values"] = [[cell / sum(row) for cell in row] for row in counts]
        maps.append(one)
    return {
        "id": "confusion",
        "title": "Confusion matrices",
        "section": "classes",
        "kind": "group",
        "caption": "Rows are true classes. Each row sums to 100 %.",
        "figures": maps,
    }


def picture(n, blocks, rng):
    cells = bytearray(n * n)
    for r in range(n):
        for c in range(n):
            same = r * blocks // n == c * blocks // n
            if rng.random() < (0.35 if same else 0.02):
                cells[r * n + c] = rng.randrange(20, 256)
    return base64.b64encode(bytes(cells)).decode()


def plane(count, rng):
    """Returns points in clusters by class, their classes and their clients."""
    centres = [(rng.uniform(0.15, 0.85), rng.uniform(0.15, 0.85)) for _ in CLASSES]
    classes = [rng.randrange(len(CLASSES)) for _ in range(count)]

    def clip(v):
        return min(1.0, max(0.0, v))

    points = [
        [clip(rng.gauss(centres[c][0], 0.07)), clip(rng.gauss(centres[c][1], 0.07))]
        for c in classes
    ]
    return points, classes, [rng.randrange(4) for _ in range(count)]


def every_kind():
    """Returns a page with a figure of every kind, tables, and folders that were left out."""
    rng = random.Random(1)
    sent = [0.0, *(10 ** rng.uniform(5, 9) for _ in METHODS[1:])]
    best = [0.6 + 0.03 * ((k * 7) % 10) for k in range(len(METHODS))]
    spots = [
        {
            "name": name,
            "color": k,
            "x": [sent[k]],
            "y": [best[k]],
            "low": [best[k] - 0.01],
            "high": [best[k] + 0.015],
        }
        for k, name in enumerate(METHODS)
    ]
    frontier, top = [], 0.0
    for x, y in sorted(zip(sent[1:], best[1:], strict=True)):
        if y > top:
            frontier, top = [*frontier, [x, y]], y
    phases = ("size", "train", "evaluate", "share statistics")
    bars = [
        {"name": name, "color": k, "values": [rng.uniform(0, 4e7) if m else 0 for m in range(10)]}
        for k, name in enumerate(phases)
    ]
    points, classes, _ = plane(60, rng)
    edges = [
        [i, j]
        for i in range(60)
        for j in range(i)
        if classes[i] == classes[j] and rng.random() < 0.25
    ]
    added = [[rng.randrange(60), rng.randrange(60)] for _ in range(25)]
    many = [plane(1400, random.Random(seed)) for seed in (2, 3)]
    timed = curves(METHODS[:4], 12, rng)
    for k, one in enumerate(timed):
        one["x"] = [r * (2.5 + 6 * k) for r in one["x"]]
    figures = [
        result_table(METHODS, rng),
        convergence(),
        {
            "id": "accuracy-traffic",
            "title": "Accuracy against traffic",
            "section": "results",
            "kind": "points",
            "x": TRAFFIC,
            "y": ACCURACY,
            "caption": "Up and to the left is better. The dotted steps are the frontier.",
            "series": spots,
            "frontier": frontier,
            "levels": [{"name": "central", "color": 9, "y": 0.9}],
        },
        {
            "id": "accuracy-time",
            "title": "Accuracy against time",
            "section": "results",
            "kind": "lines",
            "x": TIME,
            "y": ACCURACY,
            "caption": "Seconds since the start of a run, on one machine.",
            "series": timed,
        },
        {
            "id": "phases",
            "title": "Traffic by phase",
            "section": "cost",
            "kind": "bars",
            "palette": "parts",
            "rows": list(METHODS),
            "series": bars,
            "caption": "Bytes of all clients and rounds, both directions.",
            "x": {**TRAFFIC, "label": "bytes", "log": False},
        },
        confusion(rng),
        {
            "id": "no-loss",
            "title": "No curves of the loss",
            "section": "classes",
            "kind": "note",
            "caption": "The histories have no training loss.",
        },
        {**result_table(METHODS, rng), "id": "all-settings", "section": "settings", "closed": True},
        against_local(METHODS, 10, rng),
        {
            **heat_map("gain", "Accuracy by client and method", 10, rng, share=True),
            "section": "clients",
            "columns": list(METHODS[:7]),
            "unit": "percent",
            "column_label": "method",
        },
        heat_map("labels", "Labels", 10, rng),
        heat_map("homophily", "Homophily", 10, rng, share=True),
        {
            "id": "adjacency",
            "title": "The combined adjacency",
            "section": "pictures",
            "kind": "image",
            "row_label": "from",
            "column_label": "to",
            "caption": "Dark colours are dense. Lines separate the clients.",
            "ticks": [0, 0.25, 0.5, 0.75],
            "panels": [
                {"title": t, "size": 64, "values": picture(64, 4, rng)}
                for t in ("before pruning", "after pruning")
            ],
        },
        {
            "id": "graph",
            "title": "A client's graph",
            "section": "pictures",
            "kind": "graph",
            "class_names": list(CLASSES),
            "caption": "The method added the dashed edges.",
            "panels": [
                {"title": "before", "points": points, "edges": edges, "classes": classes},
                {
                    "title": "after",
                    "points": points,
                    "edges": edges,
                    "added": added,
                    "classes": classes,
                },
            ],
        },
        {
            "id": "embeddings",
            "title": "Embeddings",
            "section": "pictures",
            "kind": "scatter",
            "class_names": list(CLASSES),
            "caption": "The test nodes of all clients in two dimensions.",
            "panels": [
                {"title": t, "points": p, "classes": c, "clients": o}
                for t, (p, c, o) in zip(("fedavg", "fedpg"), many, strict=True)
            ],
        },
    ]
    left_out = [
        {"folder": "runs/fedavg-s3", "reason": "is unfinished: fedloom resume runs/fedavg-s3"},
        {"folder": "runs/<b>old</b>", "reason": "was made by another version: fedloom-run/0"},
    ]
    return page(figures, left_out=left_out)


def large(clients=1000, rounds=200):
    """Returns a page of ten methods, a thousand clients and two hundred rounds."""
    rng = random.Random(5)
    rows = [
        [
            name,
            str(k),
            {"text": f"{100 * (a := rng.random()):.1f}", "sort": a, "mark": ""},
            {"text": "50.0", "sort": 0.5},
        ]
        for name in METHODS
        for k in range(clients)
    ]
    columns = [
        {"name": "method", "align": "left"},
        {"name": "client", "align": "left"},
        *({"name": n, "align": "right"} for n in ("acc", "f1")),
    ]
    table = {
        "id": "clients-table",
        "title": "Every client",
        "caption": "",
        "section": "clients",
        "kind": "table",
        "columns": columns,
        "rows": rows,
    }
    figures = [
        result_table(METHODS, rng),
        convergence(METHODS, rounds, rng),
        {**against_local(METHODS, clients, rng), "section": "results"},
        table,
        heat_map("labels", "Labels", clients, rng),
        heat_map("homophily", "Homophily", clients, rng, share=True),
    ]
    return page(figures)
