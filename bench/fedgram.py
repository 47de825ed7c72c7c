"""Compares FedGram with every other method, on nodes and on graphs, and writes docs/fedgram.md.

runs/fedgram caches finished runs. bench/results/fedgram.json has the scores of all of them.

python bench/fedgram.py docs/fedgram.md [--only "10 louvain cora"] [--skip physics]
                                                          (a night on two quiet cores)
"""

from collections.abc import Iterator
from statistics import mean
from typing import Any

from fedpg import GRAPHS, graphs
from oneshot import LOCAL, PAPER, SETTINGS
from sweep import Found, Tables, counted, make_tables, markdown, scores_of, spread, verdict

from fedloom.experiments.report.significance import paired
from fedloom.experiments.report.significance import verdict as tested

OURS = "FedGram"
DATASETS = ("cora", "citeseer", "pubmed", "photo", "computers", "cs", "physics")
HETEROPHILOUS = ("chameleon", "minesweeper")
PARTITIONS = ("louvain", "metis")
Rows = dict[str, dict[str, Any]]
# `evaluation` and `model` belong to other tables of a recipe.
GRAM: Rows = {
    OURS: {"name": "fedgram"},
    "FedGram, W for all clients": {"name": "fedgram", "personal": ""},
}
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
    "FedProto": {"name": "fedproto"},
    "FedGTA": {"name": "fedgta"},
    "FedATH": {"name": "fedath"},
    "FML": {"name": "fml"},
    "FedTGP": {"name": "fedtgp"},
    "FedNH": {"name": "fednh"},
    "FPL": {"name": "fpl"},
    "FedDistill": {"name": "feddistill"},
    "FedPG": {
        "name": "fedpg",
        "align": "item",
        "pull": 5.0,
        "alpha": 0.2,
        "annotate": "pseudo",
        "most": 8,
    },
}
SLOW: Rows = {
    "FedKD": {"name": "fedkd"},
    "FedGKC": {"name": "fedgkc"},
    "FED-PUB": {"name": "fed-pub"},
    "FGSSL": {"name": "fgssl"},
    "FGGP": {"name": "fggp"},
    "FedSpray": {"name": "fedspray"},
    "FedGen": {"name": "fedgen", "model": "gcn-2x64+linear"},
    "FedTAD": {"name": "fedtad"},
    "FedSage+": {"name": "fedsage+", "model": "sage-2x64"},
    "FedGH + FedAvg": {"name": "fedgh"},
    "FedStar": {"name": "fedstar"},
    "GCFL+": {"name": "gcfl+"},
    "O-pFGL": {"name": "opfgl"},
    "DENSE": {"name": "dense", "epochs": 20, "finetune": 100},
    "Co-Boost": {"name": "coboost", "epochs": 20, "finetune": 100},
}
WIDTHS = (64, 128, 256, 512, 1024, 2048)
IN_FRONT = ("fedavg", "fedpg", "fedgkc")
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
    rows: Rows = {
        "Local": {"name": "local"},
        "FedAvg + ft": {"name": "fedavg", "rounds": 1, **LOCAL},
        "DENSE": {"name": "dense", "batches": 20, **LOCAL},
        "Co-Boost": {"name": "coboost", "batches": 20, **LOCAL},
        "O-pFGL": {"name": "opfgl", **SETTINGS[data, partition]},
        OURS: {"name": "fedgram", "balance": 0.5},
        "FedGram, W for all clients": {"name": "fedgram", "balance": 0.5, "personal": ""},
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
        for data in ONE_ROUND:
            for partition in ("louvain+", "metis+"):
                found |= one_round(data, partition, clients)
    for data in GRAPHS:
        gram = graphs(data, {"name": "uniform"}, {"rounds": 1, "name": "fedgram"})
        found[f"graphs {data}: {OURS}"] = gram
    for width in WIDTHS:
        add({f"width {width}": {"name": "fedgram", "width": width}}, DATASETS, ("louvain",), 10)
    for base in IN_FRONT:
        add(
            {f"in front of {base}": {"name": "fedgram+", "base": base}}, ONE_ROUND, ("louvain",), 10
        )
    add(TUNED, DATASETS, PARTITIONS, 10)
    add(MIDDLE, DATASETS, PARTITIONS, 10)
    add(SLOW, DATASETS, PARTITIONS, 10)
    add({**GRAM, **FAST}, DATASETS, PARTITIONS, 20)
    return found


def seeds(label: str) -> int:
    """Returns the number of seeds of a label."""
    return 5 if label.startswith("one round") else 3


# ---- the node tables ----
def families() -> dict[str, list[str]]:
    """Returns the rows of each method: its settings, of which validation chooses."""
    rows = [*GRAM, *FAST, *TUNED, *MIDDLE, *SLOW]
    heads = [OURS, "FedGram, W for all clients"]
    found: dict[str, list[str]] = {head: [head] for head in heads}
    for row in rows:
        if row not in heads:
            found.setdefault(row.partition(",")[0], []).append(row)
    return found


def best_row(found: Found, prefix: str, rows: list[str]) -> str | None:
    """Returns the label with the best mean validation accuracy; None if none was run."""
    known = [f"{prefix}: {row}" for row in rows if f"{prefix}: {row}" in found]
    return max(known, key=lambda label: mean(s["val_accuracy"] for s in found[label]), default=None)


def _league(found: Found, clients: int, partition: str) -> str:
    prefixes = [f"{clients} {partition} {data}" for data in DATASETS]
    lines: list[tuple[float, list[str]]] = []
    for name, rows in families().items():
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
    for name, rows in families().items():
        if name not in ("Central", OURS) and not name.startswith(f"{OURS},"):
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
                if f"{prefix}: {OURS}" not in found or not others:
                    continue
                best = max(others, key=lambda label: mean(s["accuracy"] for s in found[label]))
                difference = tested(paired(found[f"{prefix}: {OURS}"], found[best]))
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


def _hetero(found: Found) -> str:
    lines = []
    for name, rows in families().items():
        cells_ = []
        for data in HETEROPHILOUS:
            for partition in PARTITIONS:
                label = best_row(found, f"10 {partition} {data}", rows)
                cells_.append(spread(scores_of(found, label)) if label else "-")
        if set(cells_) != {"-"}:
            lines.append([name, *cells_])
    head = [f"{data}, {partition}" for data in HETEROPHILOUS for partition in PARTITIONS]
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
    "heterophily": _hetero,
    "one-round": _one_round,
    "widths": _widths,
    "in-front": _in_front,
    "traffic": _time,
}

if __name__ == "__main__":
    make_tables(str(__doc__), "fedgram", cells(), seeds, SECTIONS)
