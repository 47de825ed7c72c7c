"""Runs FedStruct, its variants and its baselines on graphs with edges between clients.

There are 5 or 3 seeds. It writes their tables in docs/results.md, and the scores of all runs to
bench/results/fedstruct.json. runs/fedstruct caches finished runs.

python bench/fedstruct.py docs/results.md [--only cora]      (about an hour on two quiet cores)
"""

import argparse
import json
from pathlib import Path
from statistics import mean
from typing import Any

from sweep import put_between, spread, sweep

RESULTS = Path(__file__).parent / "results" / "fedstruct.json"
SEEDS, FEWER = 5, 3
Tables = dict[str, dict[str, Any]]
Column = tuple[str, str, int]  # dataset, partition, clients
COLUMNS: list[Column] = [
    ("cora", "random", 10),
    ("cora", "random", 20),
    ("citeseer", "random", 10),
    ("chameleon", "random", 10),
    ("photo", "random", 10),
    ("cora", "louvain-cyclic", 10),
    ("cora", "kmeans", 10),
    ("chameleon", "louvain-cyclic", 10),
    ("chameleon", "kmeans", 10),
]
# FedStruct's settings by dataset. Depths, widths, dropout and weight decay are the paper's.
# Learning rates were chosen by validation, see docs/results.md; PubMed's are the paper's, and
# Minesweeper's are a guess. Chameleon's pages aggregate from the pages that they link to, as in the
# paper.
SETTINGS: dict[str, dict[str, Any]] = {
    "cora": {"rounds": 80, "lr": 0.002, "weight_decay": 5e-4, "hops": 10},
    "citeseer": {"rounds": 80, "lr": 0.005, "weight_decay": 5e-4, "hops": 20, "hidden": "128,64"},
    "pubmed": {"rounds": 125, "lr": 0.008, "weight_decay": 1e-3, "hops": 20, "hidden": "128"},
    "chameleon": {"rounds": 80, "lr": 0.01, "weight_decay": 3e-4, "hops": 1, "hidden": "256"},
    "photo": {"rounds": 120, "lr": 0.01, "weight_decay": 1e-3, "hops": 3, "hidden": "256"},
    "minesweeper": {"rounds": 100, "lr": 0.005, "weight_decay": 3e-4, "hops": 1},
}
BRANCH = {
    "cora": ("dgcn-2x64", 0.7),
    "citeseer": ("dgcn-2x64", 0.7),
    "pubmed": ("dgcn-2x128", 0.5),
    "chameleon": ("dgcn-1x64", 0.7),
    "photo": ("dgcn-1x256", 0.8),
    "minesweeper": ("dgcn-1x64", 0.5),
}
OWN_DATA = {"chameleon": {"flow": "reversed"}, "minesweeper": {"split": "public"}}
# The paper's GraphSAGE. The baselines' learning rates and dropout were chosen by validation, see
# docs/results.md; those of PubMed were not.
SAGE = {
    "cora": "2x128-64",
    "citeseer": "2x128-64",
    "pubmed": "2x256-256",
    "chameleon": "3x128-64-32",
    "photo": "2x256-128",
}
RATES = {
    "cora": {"local": 0.01, "fedsgd": 0.02, "central": 0.01},
    "citeseer": {"local": 0.005, "fedsgd": 0.01, "central": 0.005},
    "pubmed": {"local": 0.01, "fedsgd": 0.01, "central": 0.01},
    "chameleon": {"local": 0.01, "fedsgd": 0.01, "central": 0.01},
    "photo": {"local": 0.005, "fedsgd": 0.01, "central": 0.01},
}
DROPOUT = {"cora": 0.5, "citeseer": 0.7, "pubmed": 0.5, "chameleon": 0.3, "photo": 0.8}
VARIANTS: dict[str, dict[str, Any]] = {
    "FedStruct, DEG": {"structure": "deg", "prune": "global"},
    "FedStruct, FED*": {"structure": "fed", "prune": "global"},
    "FedStruct, HOP2VEC, pruned globally": {"prune": "global"},
    "FedStruct, HOP2VEC, by the protocol": {"prune": "protocol"},
    "FedStruct, HOP2VEC, not pruned (-F)": {"prune": "none"},
    "FedStruct, HOP2VEC, absorbed": {"absorbed": True, "prune": "global"},
}
ROWS = ["Local", "FedSGD", "FedSage+", "FedGCN, 1 hop", "FedGCN, 2 hops", *VARIANTS, "Central"]
# All variants are compared on one column, the main rows on all columns.
OURS = "FedStruct, HOP2VEC, by the protocol"
MAIN = [
    "Local",
    "FedSGD",
    "FedSage+",
    "FedGCN, 1 hop",
    "FedGCN, 2 hops",
    "FedStruct, DEG",
    "FedStruct, HOP2VEC, pruned globally",
    OURS,
    "Central",
]
FULL: list[Column] = [("cora", "random", 10)]
# The paper's numbers for its own method (Tables 2 and 6): random with 5, 10 and 20 clients, then
# Louvain and k-means with 10.
PRINTED_FOR: list[tuple[str, int]] = [
    ("random", 5),
    ("random", 10),
    ("random", 20),
    ("louvain-cyclic", 10),
    ("kmeans", 10),
]
PRINTED: dict[str, dict[str, tuple[float | None, ...]]] = {
    "FedStruct, DEG": {
        "cora": (72.24, 69.89, 66.01, 82.18, 71.31),
        "citeseer": (65.35, 63.54, 62.34, 68.29, 65.84),
        "pubmed": (84.03, 84.01, 83.64, 84.65, 84.65),
        "chameleon": (44.33, 41.82, 40.13, 49.66, 42.16),
        "photo": (90.73, 89.72, 89.42, 92.05, 90.17),
    },
    "FedStruct, FED*": {
        "cora": (72.25, 69.61, 66.13, None, None),
        "citeseer": (65.54, 63.38, 61.97, None, None),
        "pubmed": (83.98, 84.02, 83.69, None, None),
        "chameleon": (44.71, 41.89, 40.06, None, None),
        "photo": (90.75, 89.78, 89.14, None, None),
    },
    "FedStruct, HOP2VEC, pruned globally": {
        "cora": (79.34, 79.27, 78.47, 81.30, 78.36),
        "citeseer": (66.20, 65.43, 64.33, 68.65, 66.44),
        "pubmed": (84.67, 85.02, 85.24, 82.23, 84.81),
        "chameleon": (53.33, 52.60, 51.85, 55.74, 53.40),
        "photo": (91.14, 90.93, 91.25, 91.21, 91.42),
    },
    "FedStruct, HOP2VEC, not pruned (-F)": {
        "cora": (79.99, 79.88, 78.80, 81.02, 78.79),
        "citeseer": (66.15, 65.93, 64.96, 68.35, 66.84),
        "pubmed": (85.24, 85.79, 86.09, 83.03, 85.47),
        "chameleon": (53.20, 53.09, 51.89, 55.75, 52.95),
        "photo": (90.57, 90.74, 91.29, 90.40, 91.11),
    },
}
# The paper's numbers for all methods, in the order of COLUMNS.
PAPER: dict[str, list[float | None]] = {
    "Local": [39.24, 31.02, 39.88, 29.60, 77.12, 75.36, 47.08, 46.71, 30.84],
    "FedSGD": [66.00, 64.47, 63.38, 36.80, 91.55, 81.22, 67.57, 47.95, 38.35],
    "FedSage+": [66.33, 64.64, 63.93, 36.32, 91.33, 81.06, 67.35, 47.70, 37.73],
    "FedGCN, 1 hop": [82.91, None, 70.63, 48.23, 93.60, 82.24, 81.60, 52.95, 48.35],
    "FedGCN, 2 hops": [82.90, 82.39, 70.49, 48.77, 93.72, 81.88, 82.00, 48.87, 49.14],
    "Central": [82.94, 82.94, 69.37, 54.38, 94.10, 82.94, 82.94, 54.38, 54.38],
    **{
        row: [by[data][PRINTED_FOR.index((how, k))] for data, how, k in COLUMNS]
        for row, by in PRINTED.items()
    },
}


def method(row: str, data: str, structural: dict[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """Returns the model (None: FedStruct's own) and the method of a row."""
    if row in VARIANTS:
        return None, {**structural, **VARIANTS[row]}
    sage, rates = f"sage-{SAGE[data]}+norm+linear", RATES[data]
    decay = {"weight_decay": structural["weight_decay"]}
    if row in ("Local", "Central"):
        return sage, {
            "name": row.lower(),
            "rounds": 100 if row == "Local" else 150,
            "epochs": 1,
            "lr": rates[row.lower()],
            **decay,
        }
    if row == "FedSGD":
        return sage, {"name": "fedsgd", "rounds": 200, "lr": rates["fedsgd"], **decay}
    if row == "FedSage+":
        return sage, {
            "name": "fedsage+",
            "aggregate": "gradients",
            "rounds": 200,
            "lr": rates["fedsgd"],
            **decay,
        }
    hops = int(row.split()[1])
    return "gcn-2x128", {
        "name": "fedgcn",
        "aggregate": "gradients",
        "rounds": 150,
        "lr": 0.01,
        "hops": hops,
        **decay,
    }


def recipe(row: str, column: Column) -> Tables:
    """Returns the recipe of a row on a column's federation."""
    data, partition, clients = column
    model, settings = method(row, data, {"name": "fedstruct", **SETTINGS[data]})
    spec, dropout = (model, DROPOUT[data]) if model else BRANCH[data]
    tables: Tables = {
        "data": {"dataset": data, "split": "global 10/10/80", **OWN_DATA.get(data, {})},
        "partition": {"name": partition, "clients": clients, "cross_edges": "known"},
        "model": {"name": spec, "dropout": dropout},
        "method": settings,
    }
    if settings["name"] in ("fedsage+", "fedgcn"):
        tables["run"] = {"evaluation": "global"}
    return tables


def seeds_of(cell: str) -> int:
    """Returns the number of seeds of a cell."""
    return FEWER if _is_slow(cell) else SEEDS


def main() -> None:
    """Runs all cells that are not cached. Writes the Markdown and the scores of all runs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", type=Path)
    parser.add_argument(
        "--only",
        help="run only columns whose names contain this text, and write nothing",
    )
    parser.add_argument(
        "--skip",
        action="append",
        default=[],
        help="leave out the cells whose names contain this text",
    )
    options = parser.parse_args()
    recipes = {
        label(row, c): recipe(row, c)
        for c in COLUMNS
        for row in _rows(c)
        if not options.only or options.only in _name(c)
    }
    recipes = {
        cell: tables
        for cell, tables in recipes.items()
        if not any(text in cell for text in options.skip)
    }

    def report(cell: str, seed: int, s: dict[str, Any]) -> None:
        print(f"{cell}, seed {seed}: {s['seconds']['total']:.0f} s", flush=True)

    cache = Path("runs/fedstruct")
    fast = {cell: tables for cell, tables in recipes.items() if not _is_slow(cell)}
    slow = {cell: tables for cell, tables in recipes.items() if _is_slow(cell)}
    found = sweep(fast, SEEDS, report, cache) | sweep(slow, FEWER, report, cache)
    if options.only:
        return
    parts = [_table(found, COLUMNS[:5]), _table(found, COLUMNS[5:])]
    lines = [
        f"{json.dumps(cell)}: {json.dumps([_short(s) for s in runs])}"
        for cell, runs in found.items()
    ]
    RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    put_between(options.target, "fedstruct", "\n".join(parts))


def _is_slow(cell: str) -> bool:
    """Returns whether a cell has fewer seeds: FedSage+, Photo, and partitions other than random.

    FedSage+ is slow because training its generators takes minutes.
    """
    return cell.endswith("FedSage+") or cell.startswith("photo") or "random" not in cell


def _rows(column: Column) -> list[str]:
    return ROWS if column in FULL else MAIN


def label(row: str, column: Column) -> str:
    """Returns the name of a cell in bench/results/fedstruct.json."""
    return f"{_name(column)}: {row}"


def _name(column: Column) -> str:
    return f"{column[0]}, {column[1]}, {column[2]} clients"


def _table(found: dict[str, list[dict[str, Any]]], columns: list[Column]) -> str:
    lines = [
        "| accuracy, paper's in italics | " + " | ".join(map(_name, columns)) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for row in (row for row in ROWS if any(label(row, column) in found for column in columns)):
        cells = []
        for column in columns:
            paper = PAPER[row][COLUMNS.index(column)] if row in PAPER else None
            ours = spread([s["accuracy"] for s in found.get(label(row, column), [])])
            cells.append(ours + (f" *{paper:.1f}*" if paper else ""))
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    gaps = []
    for column in columns:
        ours, plain = (
            [s["accuracy"] for s in found.get(label(row, column), [])] for row in (OURS, "FedSGD")
        )
        gaps.append(f"{100 * (mean(ours) - mean(plain)):+.1f}" if ours and plain else "-")
    lines.append("| **HOP2VEC by the protocol over FedSGD** | " + " | ".join(gaps) + " |")
    return "\n".join(lines) + "\n"


def _short(s: dict[str, Any]) -> dict[str, Any]:
    keys = (
        "method",
        "seed",
        "accuracy",
        "final_accuracy",
        "val_accuracy",
        "best_round",
        "history_hash",
    )
    return {
        **{k: s[k] for k in keys},
        "seconds": s["seconds"]["total"],
        "settings": s["config"]["method"],
    }


if __name__ == "__main__":
    main()
