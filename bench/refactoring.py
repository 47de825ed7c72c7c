"""Checks that a refactoring leaves seeded results identical.

    python bench/refactoring.py record before.json     # in a checkout of the commit before
    python bench/refactoring.py record after.json      # in this one
    python bench/refactoring.py compare before.json after.json

`make refactoring BASE=<commit>` does all three. Every method runs on three small federations (a
node task, a node task with known cross edges, a graph task) in the loop, wire and stacked engines.
It also runs with secure sums, with half of the clients in a round, with mixed architectures, and
with another value of each of its settings. The script records the history hash, the ledger's
totals, all scores and a fingerprint of the final weights.

Files of two machines cannot be compared: their BLAS libraries round differently. The sizes of
ciphertexts differ from run to run, so FedStruct with `encrypt = true` always differs by a few
bytes.
"""

import argparse
import hashlib
import importlib
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, replace
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path.cwd()))  # the settings that keep a method's run short are in its tests

import torch

import fedloom

torch.set_num_threads(1)
SCORES = ("accuracy", "f1_macro", "f1_weighted", "auc", "val_accuracy", "best_round", "rounds")
NODES = {"nodes": 211, "classes": 3, "features": 12, "degree": 6.0, "homophily": 0.8, "seed": 1}


def federations():
    """The small federations, by name."""
    graph = fedloom.synthetic(**NODES)
    drawn = torch.rand(graph.num_edges, generator=torch.Generator().manual_seed(3))
    directed = replace(graph, edge_index=graph.edge_index[:, drawn < 0.8])
    graphs = fedloom.synthetic_graphs(graphs=47, classes=2, seed=2)
    return {
        "node": fedloom.divide(graph, 4, "random", 0, split="40/30/30"),
        "cross": fedloom.divide(directed, 4, "random", 0, split="40/30/30", cross_edges="known"),
        "graph": fedloom.divide(graphs, 3, "uniform", 0, split="50/20/30"),
    }


def fingerprint(models):
    """A digest of all weights that a run leaves."""
    digest = hashlib.sha256()

    def add(name, value):
        if isinstance(value, dict):
            for key in sorted(value):
                add(f"{name}/{key}", value[key])
        else:
            digest.update(name.encode() + value.detach().contiguous().numpy().tobytes())

    add("", models)
    return digest.hexdigest()[:16]


def tests_of(module):
    """The module that tests a method: it says which settings keep a run short."""
    return importlib.import_module(f"tests.methods.test_{module}")


def result_of(name, module, federation, settings):
    """What one run gives, or the class of the error that refuses it."""
    own = tests_of(module)
    model = getattr(own, "CONTRACT_MODEL", "gcn-2x8")
    quick = {"rounds": 3, "model": model, **getattr(own, "QUICK", {})}
    try:
        result = fedloom.run(name, federation, **{"seed": 5, "engine": "loop", **quick, **settings})
    except (fedloom.FedloomError, RuntimeError) as error:
        return {"refused": type(error).__name__}
    traffic = result.traffic
    clients = {row["id"]: row["accuracy"] for row in result.per_client}
    return {
        "hash": result.summary["history_hash"],
        **{key: traffic[key] for key in ("bytes_up", "bytes_down", "scalars_up", "scalars_down")},
        **{key: result.summary[key] for key in SCORES},
        **{f"accuracy of {client}": accuracy for client, accuracy in clients.items()},
        "weights": fingerprint(result.final_models),
    }


def another_value(own, field, value):
    """Some other value that a setting may have; None if there is no other."""
    if field.name in (others := getattr(own, "OTHER", {})):
        return others[field.name]
    bounds, choices = field.metadata["bounds"], field.metadata["choices"]
    if bounds["at least"] is not None and bounds["at least"] == bounds["at most"]:
        return None
    if choices:
        return next(choice for choice in choices if choice != value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value // 10 if field.metadata["task"] == "graph" else value + 1
    if isinstance(value, float):
        return value / 2 if value else 0.5
    return None


def record_method(pair):
    """Every result of one method."""
    name, module = pair
    own, known, found = tests_of(module), federations(), {}
    for task, federation in known.items():
        for engine in ("loop", "wire", "stacked"):
            found[f"{name} {task} {engine}"] = result_of(
                name, module, federation, {"engine": engine}
            )
    task = next(task for task in known if "hash" in found[f"{name} {task} loop"])
    for label, settings in {
        "secure": {"secure": True}, "secure stacked": {"secure": True, "engine": "stacked"},
        "half": {"participation": 0.5}, "mixed": {"model": "gcn-2x8,gat-2x8,sage-2x8"},
        "mixed stacked": {"model": "gcn-2x8,gat-2x8,sage-2x8", "engine": "stacked"},
    }.items():  # fmt: skip
        found[f"{name} {task} {label}"] = result_of(name, module, known[task], settings)
    quick = getattr(own, "QUICK", {})
    for number, field in enumerate(fields(fedloom.method_class(name, quick))):
        value = another_value(own, field, quick.get(field.name, field.default))
        # NEEDS had another name in commits before the redesign.
        needs = getattr(own, "NEEDS", None) or getattr(own, "BESIDE", {})
        needed = needs.get(field.name, {})
        if value is not None:
            changed = {**needed, field.name: value}
            found[f"{name} {task} setting {number}"] = result_of(name, module, known[task], changed)
    return found


def record(path, only):
    """Runs everything, two methods at a time."""
    names = {n: m for n, m in fedloom.method_names().items() if not only or n in only}
    found = {}
    with ProcessPoolExecutor(2) as pool:
        for rows in pool.map(record_method, sorted(names.items())):
            found |= rows
    Path(path).write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    print(f"{len(found)} results in {path}")


def compare(before, after):
    """Prints what differs; gives the number of results that do."""
    one, two = (json.loads(Path(path).read_text()) for path in (before, after))
    differing = 0
    for key in sorted(one.keys() & two.keys()):
        a, b = one[key], two[key]
        fields = [f for f in sorted(a.keys() | b.keys()) if a.get(f) != b.get(f)]
        if fields:
            differing += 1
            print(f"{key}: " + "; ".join(f"{f} {a.get(f)} -> {b.get(f)}" for f in fields))
    common, missing = one.keys() & two.keys(), len(one.keys() ^ two.keys())
    print(f"{len(common) - differing} identical, {differing} differ, {missing} in one file only")
    return differing


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("path")
    recording.add_argument("methods", nargs="*")
    comparing = commands.add_parser("compare")
    comparing.add_argument("before")
    comparing.add_argument("after")
    given = parser.parse_args()
    if given.command == "record":
        record(given.path, given.methods)
    else:
        sys.exit(bool(compare(given.before, given.after)))
