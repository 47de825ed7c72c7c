"""Compares FedGram with every other method, on nodes and on graphs, and writes docs/fedgram.md.

runs/fedgram caches finished runs. bench/results/fedgram.json has the scores of all of them.

python bench/fedgram.py docs/fedgram.md [--missing] [--only "10 louvain cora"] [--skip physics]
                                                          (a night on two quiet cores)
"""

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

from fedpg import GRAPH_METHODS, GRAPHS, graphs
from fedpg import METHODS as PROTOTYPES
from oneshot import LOCAL, PAPER, SETTINGS
from sweep import Found, Tables, counted, make_tables, markdown, scores_of, spread, verdict

from fedloom.experiments.report.significance import paired
from fedloom.experiments.report.significance import verdict as tested

OURS = "FedGram"
DATASETS = ("cora", "citeseer", "pubmed", "photo", "computers", "cs", "physics")
HETEROPHILOUS = ("chameleon", "minesweeper")
UNDIRECTED = "chameleon, flow both"
PARTITIONS = ("louvain", "metis")
Rows = dict[str, dict[str, Any]]
# `evaluation` and `model` belong to other tables of a recipe.
GRAM: Rows = {OURS: {"name": "fedgram"}, "W for all clients": {"name": "fedgram", "personal": ""}}
WIDE: Rows = {"FedGram, m = 4096": {"name": "fedgram", "width": 4096}}
WIDE_ON = ("citeseer", "cs", "physics")  # more than 2048 features
CLOSEST = ("Local", "FedSGD", "FedDC")  # the best of the others over the seeds 0 to 2
# Rows with the same first name are settings of one method; validation accuracy chooses for each
# dataset. Other settings are the defaults, which were chosen by validation on Cora.
FAST: Rows = {
    "Local": {"name": "local"},
    "Central": {"name": "central"},
    "FedAvg": {"name": "fedavg"},
    "FedAvg, global model": {"name": "fedavg", "evaluation": "global"},
    "FedSGD": {"name": "fedsgd", "rounds": 300},
    "SCAFFOLD": {"name": "scaffold"},
    "FedDC": {"name": "feddc"},
    "FedProx": {"name": "fedprox"},
    "FedOpt": {"name": "fedopt"},
    "LG-FedAvg": {"name": "lg-fedavg"},
}
TUNED: Rows = {
    "FedAvg, lr 0.003": {"name": "fedavg", "lr": 0.003},
    "FedAvg, global model, lr 0.003": {"name": "fedavg", "lr": 0.003, "evaluation": "global"},
    "FedSGD, lr 0.03": {"name": "fedsgd", "rounds": 300, "lr": 0.03},
    "SCAFFOLD, lr 1": {"name": "scaffold", "lr": 1.0},
    "FedDC, lr 0.3": {"name": "feddc", "lr": 0.3},
}
MIDDLE: Rows = {
    "AdaFGL": {"name": "adafgl"},
    "MOON": {"name": "moon"},
    "FedProto": {"name": "fedproto", "floor": 1},
    "FedGTA": {"name": "fedgta"},
    "FedATH": {"name": "fedath"},
    "FML": {"name": "fml"},
    "FedTGP": {"name": "fedtgp", "floor": 1},
    "FedNH": {"name": "fednh", "floor": 1},
    "FPL": {"name": "fpl", "floor": 1},
    "FedDistill": {"name": "feddistill", "floor": 1},
    "FedPG": PROTOTYPES["FedPG"],
}
SLOW: Rows = {
    "FedKD": {"name": "fedkd"},
    "FedGKC": {"name": "fedgkc"},
    "FED-PUB": {"name": "fed-pub"},
    "FGSSL": {"name": "fgssl"},
    "FGGP": {"name": "fggp", "floor": 1},
    "FedSpray": {"name": "fedspray"},
    "FedGen": {"name": "fedgen", "model": "gcn-2x64+linear"},
    "FedTAD": {"name": "fedtad"},
    "FedSage+": {"name": "fedsage+", "model": "sage-2x64"},
    "FedGH + FedAvg": {"name": "fedgh"},
    "O-pFGL": {"name": "opfgl", "min_count": 2},
    "DENSE": {"name": "dense", "epochs": 20, "finetune": 100},
    "Co-Boost": {"name": "coboost", "epochs": 20, "finetune": 100},
}
# SCAFFOLD's weights overflow, and the run fails.
DIVERGES = {
    "10 metis computers: SCAFFOLD",
    "20 louvain computers: SCAFFOLD",
    "20 metis photo: SCAFFOLD",
    "20 metis computers: SCAFFOLD",
    *(f"10 {p} {d}: SCAFFOLD, lr 1" for p in PARTITIONS for d in ("photo", "computers")),
}
WIDTHS = (64, 128, 256, 512, 1024, 2048)
IN_FRONT = ("fedavg", "fedpg", "fedgkc")
CUT_ON, OVER_CUT = ("cora", "citeseer", "photo", "chameleon"), "FedGram over cut edges"
ONE_ROUND = ("cora", "citeseer", "pubmed")


def nodes(data: str, partition: str, clients: int, method: dict[str, Any]) -> Tables:
    """Returns the recipe of a node task."""
    own = {k: v for k, v in method.items() if k not in ("evaluation", "model")}
    recipe: Tables = {
        "data": {"dataset": data},
        "partition": {"name": partition, "clients": clients},
        "model": {"name": method.get("model", "gcn-2x64")},
        "method": own,
    }
    if "evaluation" in method:
        recipe["run"] = {"evaluation": method["evaluation"]}
    return recipe


def one_round(data: str, partition: str, clients: int) -> dict[str, Tables]:
    """Returns the recipes of O-pFGL's own setting. Each seed draws a partition."""
    gram = {"name": "fedgram", "balance": 0.5, "width": 4096 if data in WIDE_ON else 2048}
    rows: Rows = {
        "Local": {"name": "local"},
        "FedAvg + ft": {"name": "fedavg", "rounds": 1, **LOCAL},
        "DENSE": {"name": "dense", "batches": 20, **LOCAL},
        "Co-Boost": {"name": "coboost", "batches": 20, **LOCAL},
        "O-pFGL": {"name": "opfgl", **SETTINGS[data, partition]},
        OURS: gram,
        "W for all clients": {**gram, "personal": ""},
    }
    return {
        f"one round {clients} {partition} {data}: {row}": {
            "data": {"dataset": data, "split": "20/40/40"},
            "partition": {"name": partition, "clients": clients},
            "model": {"name": "gcn-2x64", "dropout": 0},
            "method": method,
        }
        for row, method in rows.items()
    }


def cells() -> dict[str, Tables]:
    """Returns all recipes by label, the most important first."""
    found: dict[str, Tables] = {}

    def add(rows: Rows, data: tuple[str, ...], how: tuple[str, ...], clients: int) -> None:
        for d in data:
            for p in how:
                found.update(
                    {
                        f"{clients} {p} {d}: {row}": nodes(d, p, clients, m)
                        for row, m in rows.items()
                    }
                )

    add({**GRAM, **FAST}, (*DATASETS, *HETEROPHILOUS), PARTITIONS, 10)
    for clients in (10, 20):
        add(WIDE, WIDE_ON, PARTITIONS, clients)
    for partition in PARTITIONS:
        for row, method in {**GRAM, **FAST}.items():
            recipe = nodes("chameleon", partition, 10, method)
            recipe["data"]["flow"] = "both"
            found[f"10 {partition} {UNDIRECTED}: {row}"] = recipe
    for clients in (10, 20):
        for data in ONE_ROUND:
            for partition in ("louvain+", "metis+"):
                found |= one_round(data, partition, clients)
    for data in GRAPHS:
        gram = graphs(data, {"name": "uniform"}, {"rounds": 1, "name": "fedgram"})
        found[f"graphs {data}: {OURS}"] = gram
    for data in DATASETS:
        rows = {**GRAM, **(WIDE if data in WIDE_ON else {}), **{row: FAST[row] for row in CLOSEST}}
        for row, method in rows.items():
            found[f"fresh louvain {data}: {row}"] = nodes(data, "louvain", 10, method)
    for data in CUT_ON:
        found[f"cut edges {data}: {OVER_CUT}"] = {
            "data": {"dataset": data, "split": "global 10/10/80"},
            "partition": {"name": "random", "clients": 10},
            "method": {"name": "fedgram-cross"},
        }
    for width in WIDTHS:
        add({f"width {width}": {"name": "fedgram", "width": width}}, DATASETS, ("louvain",), 10)
    for base in IN_FRONT:
        floor = {"floor": 1} if base == "fedpg" else {}  # as without FedGram in front
        row = {"name": "fedgram+", "base": base, **floor}
        add({f"in front of {base}": row}, ONE_ROUND, ("louvain",), 10)
    add(TUNED, DATASETS, PARTITIONS, 10)
    add(MIDDLE, DATASETS, PARTITIONS, 10)
    add(SLOW, DATASETS, PARTITIONS, 10)
    add({**GRAM, **FAST}, DATASETS, PARTITIONS, 20)
    return {label: recipe for label, recipe in found.items() if label not in DIVERGES}


def seeds(label: str) -> range:
    """Returns the seeds of a label."""
    if label.startswith("fresh"):
        return range(3, 6)
    five = label.startswith("one round") and not label.endswith(("DENSE", "Co-Boost"))
    return range(5 if five else 3)


# ---- the node tables ----
def rows_of_methods() -> dict[str, list[str]]:
    """Returns the rows of each method: its settings, of which validation chooses."""
    found: dict[str, list[str]] = {}
    for row in (*GRAM, *WIDE, *FAST, *TUNED, *MIDDLE, *SLOW):
        found.setdefault(row.partition(",")[0], []).append(row)
    return found


def best_row(found: Found, prefix: str, rows: list[str]) -> str | None:
    """Returns the label with the best mean validation accuracy; None if none was run."""
    known = [f"{prefix}: {row}" for row in rows if f"{prefix}: {row}" in found]
    return max(known, key=lambda label: mean(s["val_accuracy"] for s in found[label]), default=None)


def _league(found: Found, clients: int, partition: str) -> str:
    prefixes = [f"{clients} {partition} {data}" for data in DATASETS]
    lines: list[tuple[float, list[str]]] = []
    for name, rows in rows_of_methods().items():
        chosen = [best_row(found, prefix, rows) for prefix in prefixes]
        if not any(chosen):
            continue
        cells_ = [spread(scores_of(found, label)) if label else "-" for label in chosen]
        complete = all(chosen)
        values = [mean(s["accuracy"] for s in found[label]) for label in chosen if label]
        average = 100 * mean(values) if complete else 0.0
        order = -1.0 if name == "Central" else average
        lines.append((order, [name, *cells_, f"{average:.2f}" if complete else "-"]))
    lines.sort(key=lambda line: -line[0])
    return markdown([f"{clients} clients by {partition}", *DATASETS, "mean"], [r for _, r in lines])


def rivals(found: Found, prefix: str) -> Iterator[str]:
    """Yields the chosen label of every method but FedGram and Central."""
    for name, rows in rows_of_methods().items():
        if name not in ("Central", *GRAM):
            label = best_row(found, prefix, rows)
            if label:
                yield label


def _against_best(found: Found) -> str:
    lines = []
    for clients in (10, 20):
        for partition in PARTITIONS:
            for data in DATASETS:
                prefix = f"{clients} {partition} {data}"
                others = list(rivals(found, prefix))
                ours = best_row(found, prefix, rows_of_methods()[OURS])
                if ours is None or not others:
                    continue
                best = max(others, key=lambda label: mean(s["accuracy"] for s in found[label]))
                difference = tested(paired(found[ours], found[best]))
                clear = difference.p < 0.05
                said = "better" if clear and difference.mean > 0 else "worse" if clear else "level"
                lines.append(
                    [
                        f"{data}, {partition}, {clients}",
                        f"{best.partition(': ')[2]} (of {len(others)})",
                        str(difference),
                        said,
                    ]
                )
    return markdown(["", "best other method, by test", "FedGram less it, points", ""], lines)


def _fresh(found: Found) -> str:
    lines = []
    for name in (OURS, "W for all clients", *CLOSEST):
        chosen = [
            best_row(found, f"fresh louvain {data}", rows_of_methods()[name]) for data in DATASETS
        ]
        if all(chosen):
            cells_ = [spread(scores_of(found, label)) for label in chosen if label]
            values = [mean(s["accuracy"] for s in found[label]) for label in chosen if label]
            lines.append([name, *cells_, f"{100 * mean(values):.2f}"])
    for other in CLOSEST[1:]:
        cells_, every = [], []
        for data in DATASETS:
            prefix = f"fresh louvain {data}"
            ours, theirs = (
                best_row(found, prefix, rows_of_methods()[name]) for name in (OURS, other)
            )
            if ours and theirs:
                difference = tested(paired(found[ours], found[theirs]))
                every.append(difference.mean)
                cells_.append(f"{difference.mean:+.1f}, p = {difference.p:.2g}")
        if len(every) == len(DATASETS):
            lines.append([f"**FedGram less {other}**", *cells_, f"{mean(every):+.2f}"])
    return markdown(["10 clients by Louvain, seeds 3 to 5", *DATASETS, "mean"], lines)


def _graphs(found: Found) -> str:
    known = json.loads((Path(__file__).parent / "results" / "fedpg.json").read_text())
    lines = []
    for row in GRAPH_METHODS:
        labels = [f"graphs iid, {data}: {row}" for data in GRAPHS]
        if all(label in known for label in labels):
            cells_ = [spread([s["accuracy"] for s in known[label]]) for label in labels]
            lines.append([row, *cells_])
    labels = [f"graphs {data}: {OURS}" for data in GRAPHS]
    if any(label in found for label in labels):
        lines.append([f"**{OURS}**", *(spread(scores_of(found, label)) for label in labels)])
    return markdown(["accuracy", *GRAPHS], lines)


def _cut_edges(found: Found) -> str:
    known = json.loads((Path(__file__).parent / "results" / "fedstruct.json").read_text())
    rows = ("Local", "FedSGD", "FedStruct, HOP2VEC, pruned globally", "FedGCN, 2 hops", "Central")
    lines = []
    for row in rows:
        labels = [f"{data}, random, 10 clients: {row}" for data in CUT_ON]
        lines.append([row, *(spread([s["accuracy"] for s in known[label]]) for label in labels)])
    labels = [f"cut edges {data}: {OVER_CUT}" for data in CUT_ON]
    if all(label in found for label in labels):
        lines.append([f"**{OVER_CUT}**", *(spread(scores_of(found, label)) for label in labels)])
    return markdown(["accuracy", *CUT_ON], lines)


def _hetero(found: Found) -> str:
    lines = []
    for name, rows in rows_of_methods().items():
        cells_ = []
        for data in ("chameleon", UNDIRECTED, "minesweeper"):
            for partition in PARTITIONS:
                label = best_row(found, f"10 {partition} {data}", rows)
                cells_.append(spread(scores_of(found, label)) if label else "-")
        if set(cells_) != {"-"}:
            lines.append([name, *cells_])
    named = ("chameleon", UNDIRECTED, "minesweeper")
    head = [f"{data}, {partition}" for data in named for partition in PARTITIONS]
    return markdown(["accuracy", *head], lines)


# ---- one round ----
def _one_round(found: Found) -> str:
    columns = [(d, c) for d in ONE_ROUND for c in (10, 20)]
    parts = []
    for partition in ("louvain+", "metis+"):
        lines = []
        names = ("Local", "FedAvg + ft", "DENSE", "Co-Boost", "O-pFGL", *GRAM)
        for row in names:
            labels = [f"one round {c} {partition} {d}: {row}" for d, c in columns]
            if any(label in found for label in labels):
                lines.append(
                    [
                        row,
                        *(
                            f"{spread(scores_of(found, label))} / "
                            f"{spread(scores_of(found, label, 'f1_macro'))}"
                            if label in found
                            else "-"
                            for label in labels
                        ),
                    ]
                )
        printed = PAPER[partition]["O-pFGL"]
        lines.append(["*O-pFGL, as published*", *(f"*{value}*" for value in printed)])
        for metric in ("accuracy", "f1_macro"):
            cells_ = []
            for d, c in columns:
                prefix = f"one round {c} {partition} {d}"
                ours, theirs = f"{prefix}: {OURS}", f"{prefix}: O-pFGL"
                known = ours in found and theirs in found
                differences = _by_seed(found[ours], found[theirs], metric) if known else []
                cells_.append(
                    f"{mean(differences):+.1f} ({sum(d > 0 for d in differences)} of "
                    f"{len(differences)} up)"
                    if known
                    else "-"
                )
            lines.append([f"**FedGram less O-pFGL, {metric}**", *cells_])
        head = [f"{d}, {c} clients" for d, c in columns]
        parts.append(f"### {partition}\n\n" + markdown(["accuracy / macro-F1", *head], lines))
    return "\n".join(parts)


def _by_seed(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], metric: str) -> list[float]:
    return [100 * (a[metric] - b[metric]) for a, b in zip(ours, theirs, strict=True)]


# ---- the rest ----
def _widths(found: Found) -> str:
    lines = []
    for data in DATASETS:
        cells_ = []
        for width in WIDTHS:
            runs = counted(found, f"10 louvain {data}: width {width}")
            traffic = [(s["traffic"]["bytes_up"] + s["traffic"]["bytes_down"]) / 1e7 for s in runs]
            cells_.append(
                f"{spread([s['accuracy'] for s in runs])}, {mean(traffic):.1f} MB" if runs else "-"
            )
        rounds = counted(found, f"10 louvain {data}: FedAvg")
        sent = [(s["traffic"]["bytes_up"] + s["traffic"]["bytes_down"]) / 1e7 for s in rounds]
        lines.append([data, *cells_, f"{mean(sent):.0f} MB" if sent else "-"])
    head = [f"m = {width}" for width in WIDTHS]
    return markdown(["accuracy, MB a client both ways", *head, "FedAvg's 100 rounds"], lines)


def _in_front(found: Found) -> str:
    plain = {"fedavg": "FedAvg", "fedpg": "FedPG", "fedgkc": "FedGKC"}
    lines = []
    for base in IN_FRONT:
        cells_ = []
        for data in ONE_ROUND:
            label, before = (
                f"10 louvain {data}: {row}" for row in (f"in front of {base}", plain[base])
            )
            if label in found and before in found:
                cells_ += [
                    spread(scores_of(found, before)),
                    spread(scores_of(found, label)),
                    verdict(paired(found[label], found[before])),
                ]
            else:
                cells_ += ["-"] * 3
        lines.append([plain[base], *cells_])
    head = [text for data in ONE_ROUND for text in (data, "with the scores", "difference")]
    return markdown(["base", *head], lines)


def _time(found: Found) -> str:
    lines = []
    for data in DATASETS:
        cells_ = []
        for row in (OURS, "FedAvg"):
            runs = counted(found, f"10 louvain {data}: {row}")
            if runs:
                sent = mean(
                    (s["traffic"]["bytes_up"] + s["traffic"]["bytes_down"]) / 1e7 for s in runs
                )
                cells_.append(sent)
        if len(cells_) == 2:
            lines.append(
                [data, *(f"{sent:.1f}" for sent in cells_), f"{100 * cells_[0] / cells_[1]:.1f} %"]
            )
    return markdown(["MB a client, both ways", "FedGram", "FedAvg, 100 rounds", "share"], lines)


SECTIONS = {
    **{
        f"league-{clients}-{partition}": (
            lambda found, c=clients, p=partition: _league(found, c, p)
        )
        for clients in (10, 20)
        for partition in PARTITIONS
    },
    "against-best": _against_best,
    "fresh": _fresh,
    "graphs": _graphs,
    "cut-edges": _cut_edges,
    "heterophily": _hetero,
    "one-round": _one_round,
    "widths": _widths,
    "in-front": _in_front,
    "traffic": _time,
}

if __name__ == "__main__":
    make_tables(str(__doc__), "fedgram", cells(), seeds, SECTIONS)
