"""FedStruct, its variants and its baselines over the edges between clients, 5 or 3 seeds: writes their tables in docs/results.md.

python bench/fedstruct.py docs/results.md [--only cora]      (about an hour on two quiet cores; runs/fedstruct.jsonl keeps finished runs)
"""

import argparse
import json
from pathlib import Path
from statistics import mean
from typing import Any

from sweep import put_between, spread, sweep

from fedloom.recipe import read_tables

SEEDS, FEWER = 5, 3
Tables = dict[str, dict[str, Any]]
Column = tuple[str, str, int]  # dataset, partition, clients
COLUMNS: list[Column] = [
    ("cora", "random", 10), ("cora", "random", 20), ("citeseer", "random", 10), ("chameleon", "random", 10), ("photo", "random", 10),
    ("cora", "louvain-cyclic", 10), ("cora", "kmeans", 10), ("chameleon", "louvain-cyclic", 10), ("chameleon", "kmeans", 10),
]  # fmt: skip
# The paper's GraphSAGE. Learning rates and dropout of the baselines were chosen by validation, see docs/results.md.
SAGE = {"cora": "2x128-64", "citeseer": "2x128-64", "chameleon": "3x128-64-32", "photo": "2x256-128"}
RATES = {
    "cora": {"local": 0.01, "fedsgd": 0.02, "central": 0.01},
    "citeseer": {"local": 0.005, "fedsgd": 0.01, "central": 0.005},
    "chameleon": {"local": 0.01, "fedsgd": 0.01, "central": 0.01},
    "photo": {"local": 0.005, "fedsgd": 0.01, "central": 0.01},
}
DROPOUT = {"cora": 0.5, "citeseer": 0.7, "chameleon": 0.3, "photo": 0.8}
VARIANTS: dict[str, dict[str, Any]] = {
    "FedStruct, DEG": {"structure": "deg", "prune": "global"},
    "FedStruct, FED*": {"structure": "fed", "prune": "global"},
    "FedStruct, HOP2VEC, pruned globally": {"prune": "global"},
    "FedStruct, HOP2VEC, by the protocol": {"prune": "protocol"},
    "FedStruct, HOP2VEC, not pruned (-F)": {"prune": "none"},
    "FedStruct, HOP2VEC, absorbed": {"absorbed": True, "prune": "global"},
}
ROWS = ["Local", "FedSGD", "FedSage+", "FedGCN, 1 hop", "FedGCN, 2 hops", *VARIANTS, "Central"]
# Variants are compared on one column; on the rest the main rows alone.
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
# What the paper prints (Tables 2 and 6), in the order of COLUMNS.
PAPER: dict[str, list[float | None]] = {
    "Local": [39.24, 31.02, 39.88, 29.60, 77.12, 75.36, 47.08, 46.71, 30.84],
    "FedSGD": [66.00, 64.47, 63.38, 36.80, 91.55, 81.22, 67.57, 47.95, 38.35],
    "FedSage+": [66.33, 64.64, 63.93, 36.32, 91.33, 81.06, 67.35, 47.70, 37.73],
    "FedGCN, 1 hop": [82.91, None, 70.63, 48.23, 93.60, 82.24, 81.60, 52.95, 48.35],
    "FedGCN, 2 hops": [82.90, 82.39, 70.49, 48.77, 93.72, 81.88, 82.00, 48.87, 49.14],
    "FedStruct, DEG": [69.89, 66.01, 63.54, 41.82, 89.72, 82.18, 71.31, 49.66, 42.16],
    "FedStruct, FED*": [69.61, 66.13, 63.38, 41.89, 89.78, None, None, None, None],
    "FedStruct, HOP2VEC, pruned globally": [79.27, 78.47, 65.43, 52.60, 90.93, 81.30, 78.36, 55.74, 53.40],
    "FedStruct, HOP2VEC, not pruned (-F)": [79.88, 78.80, 65.93, 53.09, 90.74, 81.02, 78.79, 55.75, 52.95],
    "Central": [82.94, 82.94, 69.37, 54.38, 94.10, 82.94, 82.94, 54.38, 54.38],
}


def method(row: str, data: str, structural: dict[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """The model (None: FedStruct's own) and the method of a row."""
    sage, rates = f"sage-{SAGE[data]}+norm+linear", RATES[data]
    decay = {"weight_decay": structural["weight_decay"]}
    if row in VARIANTS:
        return None, {**structural, **VARIANTS[row]}
    if row in ("Local", "Central"):
        return sage, {"name": row.lower(), "rounds": 100 if row == "Local" else 150, "epochs": 1, "lr": rates[row.lower()], **decay}
    if row == "FedSGD":
        return sage, {"name": "fedsgd", "rounds": 200, "lr": rates["fedsgd"], **decay}
    if row == "FedSage+":
        return sage, {"name": "fedsage+", "aggregate": "gradients", "rounds": 200, "lr": rates["fedsgd"], **decay}
    hops = int(row.split()[1])
    return "gcn-2x128", {"name": "fedgcn", "aggregate": "gradients", "rounds": 150, "lr": 0.01, "hops": hops, **decay}


def recipe(row: str, column: Column) -> Tables:
    """FedStruct's recipe for the dataset, with another method, partition or number of clients."""
    data, partition, clients = column
    tables = read_tables(Path(f"recipes/{data}-random10-fedstruct.toml"))
    tables.pop("expect")
    model, settings = method(row, data, tables["method"])
    tables["partition"] = {"name": partition, "clients": clients, "cross_edges": "known"}
    tables["method"] = settings
    if model:
        tables["model"] = {"name": model, "dropout": DROPOUT[data]}
    if settings["name"] in ("fedsage+", "fedgcn"):
        tables["run"] = {"evaluation": "global"}
    return tables


def main() -> None:
    """Runs what has not been run yet, writes the Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("--only", help="run these columns' cells now, and write nothing: a text that their names contain")
    parser.add_argument("--skip", action="append", default=[], help="leave out the cells whose names contain this text")
    asked = parser.parse_args()
    recipes = {f"{_name(c)}: {row}": recipe(row, c) for c in COLUMNS for row in _rows(c) if not asked.only or asked.only in _name(c)}
    recipes = {label: tables for label, tables in recipes.items() if not any(text in label for text in asked.skip)}
    tell = lambda label, seed, s: print(f"{label}, seed {seed}: {s['seconds']['total']:.0f} s", flush=True)  # noqa: E731
    kept = Path("runs/fedstruct.jsonl")
    found = sweep({label: tables for label, tables in recipes.items() if not _is_slow(label)}, SEEDS, tell, kept)
    found |= sweep({label: tables for label, tables in recipes.items() if _is_slow(label)}, FEWER, tell, kept)
    if asked.only:
        return
    parts = [_table(found, COLUMNS[:5]), _table(found, COLUMNS[5:])]
    lines = [f"{json.dumps(label)}: {json.dumps([_short(s) for s in runs])}" for label, runs in found.items()]
    asked.target.with_name("results-fedstruct.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    put_between(asked.target, "fedstruct", "\n".join(parts))


def _is_slow(label: str) -> bool:
    """What is run over fewer seeds: FedSage+, whose generators take minutes, Photo, and the partitions other than random."""
    return label.endswith("FedSage+") or label.startswith("photo") or "random" not in label


def _rows(column: Column) -> list[str]:
    return ROWS if column in FULL else MAIN


def _name(column: Column) -> str:
    return f"{column[0]}, {column[1]}, {column[2]} clients"


def _table(found: dict[str, list[dict[str, Any]]], columns: list[Column]) -> str:
    lines = ["| accuracy, paper's in italics | " + " | ".join(map(_name, columns)) + " |", "|---" * (len(columns) + 1) + "|"]
    for row in (row for row in ROWS if any(f"{_name(column)}: {row}" in found for column in columns)):
        cells = []
        for column in columns:
            paper = PAPER[row][COLUMNS.index(column)] if row in PAPER else None
            ours = spread([s["accuracy"] for s in found.get(f"{_name(column)}: {row}", [])])
            cells.append(ours + (f" *{paper:.1f}*" if paper else ""))
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    gaps = []
    for column in columns:
        ours, plain = ([s["accuracy"] for s in found.get(f"{_name(column)}: {row}", [])] for row in (OURS, "FedSGD"))
        gaps.append(f"{100 * (mean(ours) - mean(plain)):+.1f}" if ours and plain else "-")
    lines.append("| **HOP2VEC by the protocol over FedSGD** | " + " | ".join(gaps) + " |")
    return "\n".join(lines) + "\n"


def _short(s: dict[str, Any]) -> dict[str, Any]:
    keys = ("method", "seed", "accuracy", "final_accuracy", "val_accuracy", "best_round", "history_hash")
    return {**{k: s[k] for k in keys}, "seconds": s["seconds"]["total"], "settings": s["config"]["method"]}


if __name__ == "__main__":
    main()
