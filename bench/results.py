"""Runs the basic methods on three graphs with 3 seeds, and writes their tables in docs/results.md.

python bench/results.py docs/results.md          (about 25 minutes on two quiet cores)

The scores of all runs go to bench/results/grid.json.
"""

import datetime
import json
import sys
from pathlib import Path
from statistics import mean

from sweep import put_between, spread, sweep

RESULTS = Path(__file__).parent / "results" / "grid.json"
DATASETS = ("cora", "citeseer", "pubmed")
SEEDS = 3
COMMON = {"partition": {"name": "louvain", "clients": 10}, "model": {"name": "gcn-2x64"}}
# Settings that are not given are the methods' defaults. Some were chosen by validation accuracy.
METHODS = {
    "Local": {"method": {"name": "local"}},
    "Central": {"method": {"name": "central"}},
    "FedAvg": {"method": {"name": "fedavg"}},
    "FedAvg, global model": {"method": {"name": "fedavg"}, "run": {"evaluation": "global"}},
    "FedAvg + 20 epochs of fine-tuning": {"method": {"name": "fedavg", "finetune": 20}},
    "FedSGD, 300 rounds of 1 step": {"method": {"name": "fedsgd", "rounds": 300}},
    "FedProx": {"method": {"name": "fedprox"}},
    "SCAFFOLD (SGD)": {"method": {"name": "scaffold"}},
    "FedOpt": {"method": {"name": "fedopt"}},
    "MOON": {"method": {"name": "moon"}},
    "FedDC (SGD)": {"method": {"name": "feddc"}},
}


def main() -> None:
    """Runs the grid. Writes the Markdown and the scores of all runs."""
    target = Path(sys.argv[1])
    recipes = {
        f"{data}/{label}": {"data": {"dataset": data}, **COMMON, **tables}
        for data in DATASETS
        for label, tables in METHODS.items()
    }
    begun = datetime.datetime.now(datetime.UTC)

    def report(label: str, seed: int, s: dict) -> None:
        print(
            f"{label} seed {seed}: {100 * s['accuracy']:.1f} in {s['seconds']['total']:.0f} s",
            flush=True,
        )

    found = sweep(recipes, SEEDS, report)
    took = (datetime.datetime.now(datetime.UTC) - begun).total_seconds() / 60
    RESULTS.write_text(
        json.dumps({k: [_short(s) for s in v] for k, v in found.items()}, indent=1) + "\n"
    )
    parts = [
        _section(data, {label: found[f"{data}/{label}"] for label in METHODS}) for data in DATASETS
    ]
    some = found["cora/Local"][0]
    versions = ", ".join(f"{k} {v}" for k, v in some["versions"].items())
    head = (
        f"Made by `python bench/results.py {target}` on {begun:%Y-%m-%d}, "
        f"{took:.0f} minutes on two cores. {versions}.\n"
    )
    put_between(target, "grid", head + "\n" + "\n".join(parts))


def _short(s: dict) -> dict:
    keys = (
        "method",
        "seed",
        "evaluation",
        "best_round",
        "accuracy",
        "accuracy_mean",
        "f1_macro",
        "f1_weighted",
        "final_accuracy",
        "val_accuracy",
    )
    return {
        **{k: s[k] for k in keys},
        "history_hash": s["history_hash"],
        "method_settings": s["config"]["method"],
    }


def _section(data: str, rows: dict[str, list[dict]]) -> str:
    local = [s["accuracy"] for s in rows["Local"]]
    lines = [
        f"### {data}",
        "",
        "| method | scored | accuracy | over Local | F1 macro | F1 weighted | validation "
        "| last round | MB up + down a round and client |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for label, runs in rows.items():
        gain = mean(100 * (s["accuracy"] - base) for s, base in zip(runs, local, strict=True))
        traffic, one = runs[0]["traffic"], runs[0]
        per_round = (
            (traffic["bytes_up"] + traffic["bytes_down"]) / one["rounds"] / one["clients"] / 1e6
        )
        cells = [
            spread([s[k] for s in runs])
            for k in ("accuracy", "f1_macro", "f1_weighted", "val_accuracy", "final_accuracy")
        ]
        moved = "" if label == "Local" else f"{gain:+.1f}"
        others = " | ".join(cells[1:])
        lines.append(
            f"| {label} | {one['evaluation']} | {cells[0]} | {moved} | {others} | {per_round:.2f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
