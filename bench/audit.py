"""Attacks methods with every protection, and writes the tables of docs/privacy.md.

`fedloom audit` attacks each method on two graphs, ten clients, three partitions: plain, secure, and
with differential privacy. The runs are short, so their accuracy is not that of docs/results.md. The
findings of all runs go to bench/results/audit.json; runs that are there are not repeated. The
package's own figures (`fedloom methods NAME`) get their means.

python bench/audit.py docs/privacy.md            (half an hour on one core)
python bench/audit.py docs/privacy.md --only "cora: fedavg"
"""

import argparse
import json
import time
from dataclasses import fields
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from disclosure import write
from sweep import markdown, put_between

from fedloom.errors import ConfigError
from fedloom.experiments.audit import audit_recipe
from fedloom.experiments.audit_file import BITES
from fedloom.experiments.recipe import make_recipe, override
from fedloom.experiments.settings import RunSettings
from fedloom.privacy.measured import FILE

RESULTS = Path(__file__).parent / "results" / "audit.json"
DATASETS, SEEDS, CLIENTS = ("cora", "citeseer"), 3, 10
# The methods, with settings that make short runs, and the number of shadow models.
METHODS: dict[str, tuple[list[str], int]] = {
    "fedavg": (["method.rounds=30"], 4),
    "fedproto": (["method.rounds=30"], 4),
    "fedstruct": (["method.rounds=10"], 2),
    "fedpg": (["method.rounds=20"], 4),
    "fedgkc": (["method.rounds=20"], 2),
    "fedgram": ([], 4),
    "opfgl": (["method.condense_steps=20", "method.steps=50"], 2),
    "fedgh": (["method.rounds=10"], 0),
}
# What differential privacy is asked for. FedGram has its own; O-pFGL protects nodes, not clients.
EPSILON = ["run.secure=true", "run.dp_epsilon=8"]
OWN_EPSILON = {
    "fedgram": ["run.secure=true", "method.epsilon=8", 'method.hops="2"'],
    "opfgl": [*EPSILON, 'run.dp_unit="node"', "run.dp_clip=0.3", "method.hops=0"],
}
RUNS: dict[str, list[str]] = {"plain": [], "secure": ["run.secure=true"], "ε = 8": EPSILON}
# Settings of a method that protect it further.
FURTHER = {"fedstruct": {"secure, safe": ["run.secure=true", "method.safe=true"]}}
# The columns of the table: attack, attacker, and the beginning of how it works.
COLUMNS: dict[str, tuple[str, str, str]] = {
    "labels": ("labels", "server", ""),
    "features": ("features", "server", ""),
    "inversion": ("inversion", "server", ""),
    "class means": ("prototypes", "server", ""),
    "stand-ins": ("stand-ins", "server", ""),
    "members, server": ("membership", "server", ""),
    "members, released": ("membership", "outsider", "shadow"),
    "links, messages": ("links", "server", ""),
    "links, peers": ("links", "client", ""),
    "links, released": ("links", "outsider", "similar"),
    "links, queries": ("links", "outsider", "whose"),
}


def cells() -> dict[str, tuple[list[str], int]]:
    """Returns {"data: method: run": (assignments, shadow models)}."""
    found = {}
    for data in DATASETS:
        for name, (short, shadows) in METHODS.items():
            runs = {**RUNS, "ε = 8": OWN_EPSILON.get(name, EPSILON), **FURTHER.get(name, {})}
            for run, more in runs.items():
                given = [f'data.dataset="{data}"', f"partition.clients={CLIENTS}"]
                chosen = [*given, f'method.name="{name}"', *short, *more]
                found[f"{data}: {name}: {run}"] = (chosen, shadows)
    return found


def audited(assignments: list[str], shadows: int, seed: int) -> dict[str, Any]:
    """Attacks one run. Returns its accuracy and findings, or why it is not possible."""
    try:
        recipe = make_recipe(override({}, [*assignments, f"run.seed={seed}"]))
        federation = recipe.federation()
        recipe.check(federation)
    except ConfigError as error:
        return {"why": str(error)}
    found = audit_recipe(recipe, shadows=shadows, federation=federation)
    return {"accuracy": found.about["accuracy"], "findings": found.records()}


def possible(assignments: list[str]) -> bool:
    """Returns whether this version has the run settings that the assignments name."""
    known = {f.name for f in fields(RunSettings)}
    named = [a.partition("=")[0].removeprefix("run.") for a in assignments if a[:4] == "run."]
    return all(name in known for name in named)


def remembered() -> dict[str, dict[str, Any]]:
    """Returns the results so far: {cell: {seed: what `audited` returned}}."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def keep(cell: str, seed: int, result: dict[str, Any]) -> None:
    """Adds a result to the file."""
    known = remembered()
    known.setdefault(cell, {})[str(seed)] = result
    lines = [f"{json.dumps(key)}: {json.dumps(known[key])}" for key in sorted(known)]
    RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


# ---- tables ----
def score_of(runs: list[dict[str, Any]], column: str) -> tuple[float, float, str] | None:
    """Returns the mean score, the mean advantage and the measure of a column.

    Of several findings in a run, the one with the largest advantage counts. None if the attack
    does not apply.
    """
    attack, attacker, how = COLUMNS[column]
    best = []
    for run in runs:
        fitting = [
            f
            for f in run.get("findings", [])
            if f["attack"] == attack
            and attacker in f["attacker"].split(", ")
            and f["how"].startswith(how)
            and f["advantage"] is not None
        ]
        if fitting:
            best.append(max(fitting, key=lambda f: f["advantage"]))
    if not best:
        return None
    measures = best[0]["measure"]
    return mean(f["score"] for f in best), mean(f["advantage"] for f in best), measures


def cell_text(found: tuple[float, float, str] | None) -> str:
    """Returns a cell: the score, bold if the attack bites; a rate with the chance-free gain."""
    if found is None:
        return ""
    score, advantage, measure = found
    text = f"{score:.2f}" if measure == "AUC" else f"{score:.2f} ({advantage:+.2f})"
    return f"**{text}**" if advantage >= BITES else text


def table(data: str) -> str:
    """Returns the table of a dataset: methods and runs x attacks."""
    known, rows = remembered(), []
    for cell in cells():
        place, name, run = cell.split(": ")
        runs = list(known.get(cell, {}).values())
        if place != data or not runs:
            continue
        if "why" in runs[0]:
            rows.append([f"`{name}`", run, "not possible", *[""] * len(COLUMNS)])
            continue
        accuracy = f"{100 * mean(r['accuracy'] for r in runs):.1f}"
        rows.append(
            [f"`{name}`", run, accuracy, *(cell_text(score_of(runs, column)) for column in COLUMNS)]
        )
    return markdown(["method", "run", "accuracy", *COLUMNS], rows)


def cohorts() -> str:
    """Returns the table of sums over two cohorts."""
    known, found = remembered(), dict[str, list[float]]()
    for runs in known.values():
        for run in runs.values():
            for f in run.get("findings", []):
                if f["attack"] == "cohorts" and f["score"] is not None:
                    setting = f["how"].rpartition(", ")[2]
                    found.setdefault(f"`{setting}`", []).append(f["score"])
    rows = [
        [setting, f"{100 * mean(values):.0f} %", str(len(values))]
        for setting, values in sorted(found.items())
    ]
    return markdown(["secure runs", "clients' replies recovered", "runs"], rows)


def statements() -> None:
    """Writes the means of the findings on the first dataset to the package's own figures."""
    kept, known = json.loads(FILE.read_text()), remembered()
    for cell in cells():
        data, name, run = cell.split(": ")
        runs = [r for r in known.get(cell, {}).values() if "findings" in r]
        if data != DATASETS[0] or not runs or name not in kept["methods"]:
            continue
        audits = kept["methods"][name].setdefault("audit", {})
        audits[run] = {
            column: [round(found[0], 2), round(found[1], 2), found[2]]
            for column in COLUMNS
            if (found := score_of(runs, column)) is not None
        }
    write(kept)


def main() -> None:
    """Attacks what is missing. Writes the tables and the numbers of all runs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", type=Path)
    parser.add_argument("--only", default="", help="attack only cells whose names contain this")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--write", action="store_true", help="attack nothing, write known results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for seed in range(0 if options.write else options.seeds):
        for cell, (assignments, shadows) in cells().items():
            done = str(seed) in remembered().get(cell, {})
            if done or options.only not in cell or not possible(assignments):
                continue
            begun = time.perf_counter()
            keep(cell, seed, audited(assignments, shadows, seed))
            print(cell, seed, f"{time.perf_counter() - begun:.0f} s", flush=True)
    for data in DATASETS:
        put_between(options.target, f"audit-{data}", table(data))
    put_between(options.target, "audit-cohorts", cohorts())
    statements()


if __name__ == "__main__":
    main()
