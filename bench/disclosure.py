"""Measures what every method's messages disclose, and writes the package's own figures.

Each method runs for one round on Cora, divided by Louvain among ten clients (graph tasks: MUTAG).
The attacks of `fedloom.privacy.disclosure` get what the server receives: every reply in a plain
run, the sums in a secure run. `fedloom methods NAME` and the documentation print the result.

The table of what helps against reading weights goes to docs/deploy.md.

python bench/disclosure.py               (all methods, half an hour on one core)
python bench/disclosure.py fedavg fedpg  (only these; the figures of the others stay)
"""

import json
import sys
import time
from dataclasses import fields
from datetime import date
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from gram_leakage import attacked
from sweep import markdown, put_between

from fedloom.core.registry import make_method, method_class, method_names
from fedloom.data.federation import Federation
from fedloom.experiments.disclosure import measure
from fedloom.experiments.recipe import make_recipe
from fedloom.privacy.measured import FILE

ROOT = Path(__file__).resolve().parents[1]
SEEDS = (0, 1, 2)
CLIENTS = 10
DATASETS = {"node": "cora", "graph": "mutag"}
PARTITIONS = {"node": "louvain", "graph": "uniform"}
MODELS = {"fedgen": "gcn+linear"}  # the others: the default
# Measured only if the command names them.
LATER = {
    "central": "it sees all graphs in one place",
}
# What happens after the upload tells the server nothing more, and takes minutes.
SHORT = {
    "coboost": {"batches": 1},
    "dense": {"batches": 1},
    "opfgl": {"condense_steps": 1, "steps": 1},
}


def federation(name: str, seed: int) -> Federation:
    """Returns the federation that a method is measured on."""
    cls = method_class(name)
    partition = {"name": PARTITIONS[cls.tasks[0]], "clients": CLIENTS}
    if cls.uses_cross_edges:
        partition["cross_edges"] = "known"
    data = {"dataset": DATASETS[cls.tasks[0]]}
    return make_recipe({"data": data, "partition": partition, "run": {"seed": seed}}).federation()


def measured(name: str) -> dict[str, Any]:
    """Returns a method's figures: lists over the seeds, by run and kind of message."""
    settings: dict[str, Any] = SHORT.get(name, {})
    method, cls = make_method(name, settings), method_class(name)
    found: dict[str, Any] = {
        "data": DATASETS[cls.tasks[0]],
        "partition": PARTITIONS[cls.tasks[0]],
        "model": MODELS.get(name, "gcn"),
        "measured": date.today().isoformat(),
    }
    runs = {"plain": (method, False)}
    for f in fields(method):  # settings that have a safe default: the least value, too
        if f.metadata.get("advised") is not None:
            least = int(f.metadata["bounds"]["at least"])
            runs[f"plain, {f.name} = {least}"] = (
                make_method(name, {**settings, f.name: least}),
                False,
            )
    if not method.single_replies():
        runs["secure"] = (method, True)
    for run, (chosen, secure) in runs.items():
        each = [
            measure(chosen, name, federation(name, seed), found["model"], seed, secure)
            for seed in SEEDS
        ]
        if name in ("fedgram", "fedgram+"):
            for seed, one in zip(SEEDS, each, strict=True):
                one["members"] = members(seed, secure)
        found[run] = {
            kind: {key: [round(one[kind][key], 4) for one in each] for key in each[0][kind]}
            for kind in each[0]
        }
    return found


def members(seed: int, secure: bool) -> dict[str, float]:
    """Returns how FedGram's moments tell training nodes and their labels (`gram_leakage`)."""
    found = moments(seed)["sum" if secure else "each"]
    return dict(zip(("auc", "labels", "guess"), found, strict=True))


@cache
def moments(seed: int) -> dict[str, list[float]]:
    """Returns what `gram_leakage` reads in FedGram's moments on Cora."""
    return attacked("cora", "4", 2048, seed)


def protections() -> str:
    """Returns a table: what is read in FedAvg's weights, and what helps."""
    rows: dict[str, tuple[dict[str, Any], bool]] = {
        "Adam with weight decay (the default)": ({}, False),
        "SGD": ({"optimizer": "sgd"}, False),
        "SGD without weight decay": ({"optimizer": "sgd", "weight_decay": 0.0}, False),
        "secure sums": ({}, True),
    }
    lines = []
    for row, (settings, secure) in rows.items():
        method = make_method("fedavg", settings)
        found = [
            measure(method, "fedavg", federation("fedavg", seed), "gcn", seed, secure)
            for seed in SEEDS
        ]
        read, labels = ([one[kind] for one in found] for kind in ("features", "labels"))
        right, held, pairs = (mean(f[key] for f in read) for key in ("right", "held", "pairs"))
        lines.append(
            [
                row,
                f"{right:,.0f} of {held:,.0f}",
                f"{pairs - right:,.0f}",
                f"{mean(f['auc'] for f in read):.2f}",
                f"{mean(f['off'] for f in labels):.2f}",
            ]
        )
    guess = mean(f["guess"] for f in labels)
    return markdown(
        [
            "FedAvg, one round",
            "pairs of client and feature read",
            "named wrongly",
            "membership of a node, AUC (chance 0.50)",
            f"shares of labels off by (guess {guess:.2f})",
        ],
        lines,
    )


def write(kept: dict[str, Any]) -> None:
    """Writes the figures to the package, a method per line."""
    lines = [f'  "{name}": {json.dumps(kept["methods"][name])}' for name in sorted(kept["methods"])]
    methods = ",\n".join(lines)
    text = f'{{\n "about": {json.dumps(kept["about"])},\n "methods": {{\n{methods}\n }}\n}}\n'
    FILE.write_text(text)


def main() -> None:
    """Measures the methods that the command names, or all."""
    torch.set_num_threads(1)
    kept = json.loads(FILE.read_text()) if FILE.exists() else {"methods": {}}
    kept["about"] = {"clients": CLIENTS, "seeds": list(SEEDS)}
    for name in sys.argv[1:] or sorted(method_names()):
        if name in LATER and name not in sys.argv:
            kept["methods"].setdefault(name, {"why": LATER[name]})
            continue
        begun = time.perf_counter()
        audits = kept["methods"].get(name, {}).get("audit")  # of bench/audit.py
        kept["methods"][name] = measured(name) | ({"audit": audits} if audits else {})
        print(name, f"{time.perf_counter() - begun:.0f} s", kept["methods"][name], flush=True)
        write(kept)
    put_between(ROOT / "docs" / "deploy.md", "disclosure", protections())


if __name__ == "__main__":
    main()
