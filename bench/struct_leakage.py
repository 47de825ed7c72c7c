"""Measures what FedStruct's messages reveal, and what each repair costs.

Two attacks, on messages that parties really receive (`fedloom.methods.fedstruct.attacks`):

- A client reads edges between other clients' nodes from the rows of the second hop.
- The server reads training labels from the summed gradients of S.

The runs are plain ones: a secure run sends clients the same blocks and the server the same sums,
and takes longer. For `encrypt`, plain addition stands in for BFV, which is exact; the bytes of
these rows are those of ciphertexts, by the formula. The tables go to docs/results.md, the numbers
of all runs to bench/results/struct_leakage.json. Runs that are there are not repeated.

python bench/struct_leakage.py docs/results.md      (20 minutes on a quiet core)
"""

import argparse
import json
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from fedstruct import OURS, recipe
from scipy.sparse import csr_matrix, vstack
from sweep import markdown, put_between, spread

import fedloom
from fedloom.core.client import Client
from fedloom.data.federation import Federation
from fedloom.experiments.recipe import make_recipe
from fedloom.methods.fedstruct import FedStruct, attacks, encrypted
from fedloom.methods.fedstruct.artifacts import whole_first_power
from fedloom.methods.fedstruct.powers import Numbering
from fedloom.methods.fedstruct.sharing import among_all
from fedloom.methods.fedstruct.state import state_of

RESULTS = Path(__file__).parent / "results" / "struct_leakage.json"
SEEDS, ROUNDS = 3, 40
BYTES_A_NUMBER = 16.03  # of a ciphertext under BFV, measured
DATASETS = ("cora", "citeseer")
EDGES: dict[str, dict[str, Any]] = {
    "all (the paper)": {},
    "withhold": {"blocks": "withhold"},
    "merge": {"blocks": "merge"},
    "encrypt": {"encrypt": True},
    "encrypt, withhold": {"encrypt": True, "blocks": "withhold"},
    "none (`safe`)": {"blocks": "none"},
}
LABELS: dict[str, dict[str, Any]] = {
    "no mitigation": {},
    "noise 0.1": {"noise": 0.1},
    "noise 0.3": {"noise": 0.3},
    "noise 1": {"noise": 1.0},
    "label smoothing 0.5": {"label_smoothing": 0.5},
    "2 local steps": {"local_steps": 2},
}
# What the clients of the last run received in the second hop: {client: [(sums, rows)]}.
RECEIVED: dict[str, list[tuple[csr_matrix, csr_matrix]]] = {}


class Curious(FedStruct):
    """FedStruct with clients that keep what they receive."""

    def _note_readable(
        self, client: Client, sums: dict[str, csr_matrix], block: csr_matrix
    ) -> None:
        if state_of(client).hop == 1:
            seen = among_all(sums, state_of(client).numbering), block
            RECEIVED.setdefault(client.name, []).append(seen)
        super()._note_readable(client, sums, block)


class Addition:
    """Plain addition in place of BFV."""

    Keys: "type[Addition]"
    public = np.zeros(1, np.uint8)

    @staticmethod
    def generate() -> "Addition":
        """Returns a key that hides nothing."""
        return Addition()

    @staticmethod
    def encrypt(public: Any, values: Any) -> Any:
        """Returns the numbers as bytes."""
        return values.view(np.uint8)

    @staticmethod
    def add(public: Any, blobs: Any) -> Any:
        """Returns the sum."""
        return np.sum([blob.view(np.int64) for blob in blobs], 0).view(np.uint8)

    @staticmethod
    def decrypt(blob: Any, size: int) -> Any:
        """Returns the numbers."""
        return blob.view(np.int64)

    @staticmethod
    def require_size(public: Any, blob: Any, size: int) -> None:
        """Checks nothing."""


Addition.Keys = Addition


def measured(data: str, seed: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Runs FedStruct and both attacks. Returns all numbers of a row of the tables."""
    tables = recipe(OURS, (data, "random", 10))
    parties = make_recipe({**tables, "run": {"seed": seed}}).federation()
    chosen = {k: v for k, v in tables["method"].items() if k != "name"}
    chosen |= {"rounds": ROUNDS, "audit": True, **settings}
    RECEIVED.clear()
    result = fedloom.run(
        Curious(**chosen),
        parties,
        model=tables["model"]["name"],
        dropout=tables["model"]["dropout"],
        seed=seed,
        engine="loop",
        evaluate_every=4,
    )
    notes, phases = result.summary["notes"], result.traffic["phases"]
    read, labelled = (
        notes[name] for name in ("training labels that the server can read", "training labels")
    )
    sent = phases.get("offer", {}).get("bytes_up", 0)
    if chosen.get("encrypt"):
        sent = phases["offer_encrypted"]["bytes_up"] / 8 * BYTES_A_NUMBER
    return {
        "accuracy": result.accuracy,
        "megabytes": sent / 1e6,
        "labels": read / labelled,
        "noted": notes["edges of others that clients can read"],
        **edges_read(parties),
    }


def edges_read(parties: Federation) -> dict[str, float]:
    """Returns what the attacks read of others' edges, as means over the clients."""
    sizes = (graph.num_nodes for graph in parties.graphs)
    numbering = Numbering.of(dict(zip(parties.names, sizes, strict=True)))
    whole, found = whole_first_power(parties, numbering), []
    everything = np.arange(numbering.total)
    for name in numbering.names:
        own = numbering.span(name)
        true = _coded(attacks.edges_shown(everything, whole, own), numbering)
        seen = RECEIVED.get(name, [])
        sums = csr_matrix(vstack([s for s, _ in seen])) if seen else csr_matrix(whole.shape)
        rows = csr_matrix(vstack([r for _, r in seen])) if seen else csr_matrix(whole.shape)
        alone = attacks.rows_of_one(sums, rows)
        solved = attacks.rows_solved(sums, rows)
        linear = _coded(attacks.edges_shown(*solved, own), numbering)
        value = np.union1d(linear, _coded(attacks.edges_by_value(sums, rows, own), numbering))
        found.append(
            {
                "edges": len(true),
                "single": attacks.edges_shown(*alone, own).shape[1],
                "lists": attacks.lists_complete(solved[1]),
                "solved": len(linear),
                "read": len(np.intersect1d(value, true)),
                "wrong": len(np.setdiff1d(value, true)),
            }
        )
    return {key: mean(client[key] for client in found) for key in found[0]}


def _coded(pairs: Any, numbering: Numbering) -> Any:
    return pairs[0] * numbering.total + pairs[1]


def main() -> None:
    """Runs what is missing. Writes the tables and the numbers of all runs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", type=Path)
    parser.add_argument("--only", default="", help="run only cells whose names contain this text")
    parser.add_argument("--write", action="store_true", help="run nothing, write known results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    encrypted.bfv = Addition  # type: ignore[assignment]
    cells = {f"{data}: {row}": (data, s) for data in DATASETS for row, s in EDGES.items()}
    cells |= {f"cora: {row}": ("cora", s) for row, s in LABELS.items() if s}
    for seed in range(SEEDS):
        for cell, (data, settings) in cells.items():
            known = _known()
            if options.write or options.only not in cell or str(seed) in known.get(cell, {}):
                continue
            numbers = measured(data, seed, settings)
            print(cell, seed, numbers, flush=True)
            known = _known()
            known.setdefault(cell, {})[str(seed)] = numbers
            lines = [f"{json.dumps(key)}: {json.dumps(known[key])}" for key in sorted(known)]
            RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    put_between(options.target, "struct-edges", _edges_table(_known()))
    put_between(options.target, "struct-labels", _labels_table(_known()))


def _known() -> dict[str, dict[str, dict[str, Any]]]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def _edges_table(known: dict[str, dict[str, dict[str, Any]]]) -> str:
    rows = []
    for data in DATASETS:
        for row in EDGES:
            runs = list(known.get(f"{data}: {row}", {}).values())
            if not runs:
                continue
            mid = {key: mean(run[key] for run in runs) for key in runs[0]}
            numbers = [f"{mid[key]:,.0f}" for key in ("edges", "single", "solved", "read")]
            numbers.append(f"{mid['wrong']:.1f}")
            traffic = f"{mid['megabytes']:,.1f}"
            lists, seeds = f"{mid['lists']:,.0f}", str(len(runs))
            rows.append([data, row, *numbers, lists, _accuracy(runs), traffic, seeds])
    head = [
        "data", "`blocks`", "edges of others", "in rows of one node", "solved for",
        "solved for or read by value", "of these wrong", "complete lists", "accuracy", "blocks, MB",
        "seeds",
    ]  # fmt: skip
    return markdown(head, rows)


def _labels_table(known: dict[str, dict[str, dict[str, Any]]]) -> str:
    rows = []
    for row, settings in LABELS.items():
        runs = list(known.get(f"cora: {row if settings else next(iter(EDGES))}", {}).values())
        if runs:
            rows.append([row, _percent(runs), _accuracy(runs), str(len(runs))])
    return markdown(["mitigation", "training labels read", "accuracy", "seeds"], rows)


def _percent(runs: list[dict[str, Any]]) -> str:
    return f"{100 * mean(run['labels'] for run in runs):.0f} %"


def _accuracy(runs: list[dict[str, Any]]) -> str:
    return spread([run["accuracy"] for run in runs])


if __name__ == "__main__":
    main()
