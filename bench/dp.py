"""Measures accuracy against ε, and writes the tables in docs/differential-privacy.md.

Each number is a mean over three seeds, each with a new partition. Rounds, clip and learning rate
are chosen by validation accuracy on a fourth partition (seed 100), once at ε = 1 for ε up to 2 and
once at ε = 8 for the others; that choice is not part of the budget. Results go to
bench/results/dp.json; what is there is not run again.

python bench/dp.py docs/differential-privacy.md            (20 minutes on a quiet core)
python bench/dp.py docs/differential-privacy.md --write    (writes what is known)
python bench/dp.py docs/differential-privacy.md --only fedavg
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from sweep import markdown, put_between, spread

from fedloom.data.federation import Federation
from fedloom.data.synthetic import synthetic_clients
from fedloom.experiments.recipe import make_recipe
from fedloom.experiments.run import run

SEEDS, TUNING_SEED = (0, 1, 2), 100
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
KEPT = Path(__file__).parent / "results" / "dp.json"
FEDERATIONS = (
    "cora 10", "cora 100", "pubmed 10", "pubmed 100", "synthetic 10", "synthetic 100",
    "synthetic 1000",
)  # fmt: skip
NODES = {"synthetic 10": 300}  # of a client; others: 50


@lru_cache(maxsize=4)
def parties_of(name: str, seed: int) -> Federation:
    """Returns the clients of a dataset, by Louvain; each synthetic client has a block."""
    data, clients = name.split()
    if data == "synthetic":
        return synthetic_clients(int(clients), NODES.get(name, 50), 4, 32, seed=seed)
    tables = {"data": {"dataset": data}, "partition": {"clients": int(clients)}}
    return make_recipe({**tables, "run": {"seed": seed}}).federation()


# ---- what is measured: rows of tables ----
def fedavg_grid() -> Iterator[dict[str, Any]]:
    """Yields the settings of FedAvg among which validation chooses."""
    for (optimizer, lr), rounds, clip in product(
        (("adam", 0.1), ("sgd", 1.0)), (5, 20, 60), (1.0, 3.0)
    ):
        yield {"optimizer": optimizer, "lr": lr, "rounds": rounds, "dp_clip": clip}


def fedsgd_grid() -> Iterator[dict[str, Any]]:
    """Yields the settings of FedSGD among which validation chooses."""
    for lr, rounds, clip in product((0.03, 0.1), (5, 20), (0.1, 1.0)):
        yield {"lr": lr, "rounds": rounds, "dp_clip": clip}


SMALL = {"model": "sgc-2x16", "weight_decay": 0.0, "dropout": 0.0}
FEDAVG = {"method": "fedavg", "evaluation": "global", **SMALL}
ROWS: dict[str, dict[str, Any]] = {
    **{f"fedavg, {name}": {"on": name, "grid": fedavg_grid, **FEDAVG} for name in FEDERATIONS},
    "fedavg, synthetic 1000, poisson 0.2": {
        "on": "synthetic 1000",
        "grid": fedavg_grid,
        "participation": 0.2,
        "dp_sampling": "poisson",
        **FEDAVG,
    },
}
UNITS = {
    "label, sgc": {"dp_unit": "label", "model": "sgc-2x16"},
    "node, mlp": {"dp_unit": "node", "model": "mlp-1x16"},
    "node, sage-1": {"dp_unit": "node", "model": "sage-1x16", "dp_degree": 3},
    "edge, sage-1": {"dp_unit": "edge", "model": "sage-1x16", "dp_degree": 3},
}
for _data, (_unit, _how) in product(("cora 10", "synthetic 10"), UNITS.items()):
    ROWS[f"fedsgd, {_data}, {_unit}"] = {
        "on": _data,
        "grid": fedsgd_grid,
        "method": "fedsgd",
        "weight_decay": 0.0,
        "dropout": 0.0,
        **_how,
    }
for _data in ("cora 10", "pubmed 10"):
    for _unit in ("label", "node"):
        ROWS[f"fedgram, {_data}, {_unit}"] = {
            "on": _data, "method": "fedgram", "hops": "2", "width": 512, "protects": _unit,
            "secure": True, "evaluation": "global", "own_epsilon": True,
        }  # fmt: skip
ROWS["opfgl, cora 10, node"] = {
    "on": "cora 10", "method": "opfgl", "hops": 0, "dp_unit": "node", "dp_clip": 0.3,
    "condense_steps": 300, "steps": 300, "lr_global": 0.01, "lr_local": 0.01, "stage": "global",
}  # fmt: skip
for _data in ("cora 10", "pubmed 10"):
    ROWS[f"edges, {_data}"] = {
        "on": _data, "method": "fedavg", "model": "gcn", "rounds": 40, "evaluation": "global",
        "edges": True,
    }  # fmt: skip


def score(row: dict[str, Any], seed: int, epsilon: float | None, more: dict[str, Any]) -> Any:
    """Runs a row once. Returns (test accuracy, validation accuracy) of what is reported.

    Args:
        row: The row.
        seed: The seed, also of the partition.
        epsilon: ε; infinite: the same settings without clipping and noise; None: FedAvg as it is
            without a budget, or the row without noise.
        more: The chosen settings.
    """
    about = {"on", "grid", "method", "own_epsilon", "edges", "stage"}
    settings = {key: value for key, value in row.items() if key not in about} | more
    name = "epsilon" if row.get("own_epsilon") else "edge_epsilon" if row.get("edges") else ""
    if epsilon is None or math.isinf(epsilon):
        settings = {k: v for k, v in settings.items() if not k.startswith("dp_")}
        settings["secure"] = False
        for key in ("protects",) if row.get("own_epsilon") else ():
            settings.pop(key, None)
        if epsilon is None and row["method"] == "fedavg":  # FedAvg as it is without a budget
            settings = {"rounds": 60, "evaluation": "global"}
    else:
        settings[name or "dp_epsilon"] = epsilon
    if epsilon is not None and not name:  # the last round is reported
        settings["evaluate_every"] = settings.get("rounds", 1)
    result = run(row["method"], parties_of(row["on"], seed), seed=seed, **settings)
    stages = [e for e in result.history if e.get("stage") == row.get("stage", "train")]
    if row.get("stage"):
        return stages[-1]["accuracy"], stages[-1]["val_accuracy"]
    validation = [e["val_accuracy"] for e in stages if "val_accuracy" in e]
    return result.accuracy, validation[-1]


def chosen(row: dict[str, Any], epsilon: float | None, known: dict[str, Any], label: str) -> Any:
    """Returns the settings that validation chooses for an ε, from the results or by trying all."""
    if "grid" not in row or epsilon is None:
        return {}
    at = 1.0 if epsilon <= 2 else 8.0
    key = f"{label}: settings at {at:g}"
    if key not in known:
        trials = [(score(row, TUNING_SEED, at, more)[1], more) for more in row["grid"]()]
        known[key] = max(trials, key=lambda trial: trial[0])[1]
        print(key, known[key], flush=True)
    return known[key]


def measure(only: str, known: dict[str, Any]) -> None:
    """Runs what is not known yet."""
    for on in FEDERATIONS:
        for seed in SEEDS:
            key = f"local, {on}, {seed}"
            if key not in known and only in key:
                local = run("local", parties_of(on, seed), seed=seed, rounds=40)
                known[key] = local.accuracy
                save(known)
    for label, row in ROWS.items():
        for epsilon, seed in product(
            (*EPSILONS, *([math.inf] if "grid" in row else []), None), SEEDS
        ):
            key = f"{label}, {epsilon}, {seed}"
            if key in known or only not in key:
                continue
            known[key] = score(row, seed, epsilon, chosen(row, epsilon, known, label))[0]
            print(key, f"{100 * known[key]:.1f}", flush=True)
            save(known)


def save(known: dict[str, Any]) -> None:
    """Writes the results."""
    KEPT.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


# ---- tables ----
def table(known: dict[str, Any], start: str) -> str:
    """Returns the table of the rows whose labels start with a text."""
    rows = []
    for label, row in ROWS.items():
        if not label.startswith(start):
            continue
        cells = [
            spread([known.get(f"{label}, {epsilon}, {seed}") for seed in SEEDS])
            if f"{label}, {epsilon}, {SEEDS[-1]}" in known
            else "-"
            for epsilon in (*EPSILONS, math.inf, None)
        ]
        local = [known.get(f"local, {row['on']}, {seed}") for seed in SEEDS]
        rows.append([label.partition(", ")[2], *cells, spread(local)])
    head = [
        "accuracy, %",
        *(f"ε = {epsilon:g}" for epsilon in EPSILONS),
        "same, no noise",
        "no noise",
        "Local",
    ]
    return markdown(head, rows)


def settings_table(known: dict[str, Any]) -> str:
    """Returns the settings that validation chose."""
    found = {key: value for key, value in known.items() if ": settings at " in key}
    rows = []
    for key, value in sorted(found.items()):
        label, _, at = key.partition(": settings at ")
        rows.append([label, at, ", ".join(f"{k} = {v}" for k, v in value.items())])
    return markdown(["run", "chosen at ε", "settings"], rows)


def verdicts(known: dict[str, Any]) -> str:
    """Returns, for each row, from which ε on it is a point or more above Local."""
    lines = []
    for label, row in ROWS.items():
        local = [known.get(f"local, {row['on']}, {seed}") for seed in SEEDS]
        start = None  # the least ε from which on every mean is a point or more above Local
        for epsilon in reversed(EPSILONS):
            found = [known.get(f"{label}, {epsilon}, {seed}") for seed in SEEDS]
            if None in found or None in local or mean(found) < mean(local) + 0.01:
                break
            start = epsilon
        text = (
            f"a point or more above Local from ε = {start:g}"
            if start
            else "useless: not a point above Local"
        )
        if f"{label}, {EPSILONS[-1]}, {SEEDS[-1]}" in known:
            lines.append([label, text])
    return markdown(["run", "verdict, up to ε = 16"], lines)


SECTIONS: dict[str, Callable[[dict[str, Any]], str]] = {
    "fedavg": lambda known: table(known, "fedavg"),
    "fedsgd": lambda known: table(known, "fedsgd"),
    "one-shot": lambda known: table(known, "fedgram") + "\n" + table(known, "opfgl"),
    "edges": lambda known: table(known, "edges"),
    "verdicts": verdicts,
    "settings": settings_table,
}


def main() -> None:
    """Runs everything and writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("--only", default="", help="run what has this text in its name")
    parser.add_argument("--write", action="store_true", help="run nothing, write known results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    known = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    if not args.write:
        measure(args.only, known)
    if args.target.exists():
        for mark, text in SECTIONS.items():
            put_between(args.target, mark, text(known))


if __name__ == "__main__":
    main()
