"""Measures what every method's messages disclose, and writes the package's own figures.

Each method runs for one round on Cora, divided by Louvain among ten clients (graph tasks: MUTAG).
The attacks of `fedloom.privacy.disclosure` get what the server receives: every reply in a plain
run, the sums in a secure run. `fedloom methods NAME` and the documentation print the result.

python bench/disclosure.py               (all methods, about ten minutes on one core)
python bench/disclosure.py fedavg fedpg  (only these; the figures of the others stay)
"""

import json
import sys
import time
from dataclasses import fields
from datetime import date
from functools import cache
from typing import Any

import torch
from gram_leakage import attacked

from fedloom.core.registry import make_method, method_class, method_names
from fedloom.data.federation import Federation
from fedloom.experiments.disclosure import measure
from fedloom.experiments.recipe import make_recipe
from fedloom.privacy.measured import FILE

SEEDS = (0, 1, 2)
CLIENTS = 10
DATASETS = {"node": "cora", "graph": "mutag"}
MODELS = {"fedgen": "gcn+linear"}  # the others: the default
# What happens after the upload tells the server nothing more, and takes minutes.
SHORT = {
    "coboost": {"batches": 1},
    "dense": {"batches": 1},
    "opfgl": {"condense_steps": 1, "steps": 1},
}


def federation(name: str, seed: int) -> Federation:
    """Returns the federation that a method is measured on."""
    cls = method_class(name)
    partition = {"clients": CLIENTS}
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


def main() -> None:
    """Measures the methods that the command names, or all."""
    torch.set_num_threads(1)
    kept = json.loads(FILE.read_text()) if FILE.exists() else {"methods": {}}
    kept["about"] = {"clients": CLIENTS, "partition": "louvain", "seeds": list(SEEDS)}
    for name in sys.argv[1:] or sorted(method_names()):
        if method_class(name).centralized:
            continue  # it has no clients
        begun = time.perf_counter()
        kept["methods"][name] = measured(name)
        print(name, f"{time.perf_counter() - begun:.0f} s", kept["methods"][name], flush=True)
        methods = {key: kept["methods"][key] for key in sorted(kept["methods"])}
        FILE.write_text(json.dumps({"about": kept["about"], "methods": methods}, indent=1) + "\n")


if __name__ == "__main__":
    main()
