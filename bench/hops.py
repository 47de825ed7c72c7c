"""Measures the cost of FedStruct's exchange of the powers of the adjacency.

The graphs are PubMed and synthetic graphs of up to 10^6 nodes. Each line of the table has its own
process, so that its peak of memory is its own.

python bench/hops.py [--largest 1000000]          (about five minutes on two quiet cores)
"""

import argparse
import json
import subprocess
import sys
from typing import Any

import torch

from fedloom.experiments.recipe import make_recipe

HEAD = (
    "graph | nodes | hops | p | clients | prune | seconds | µs a node and hop | entries "
    "| largest process, MB | sent between clients, MB"
)
# All nodes have equal propensities. With hubs, the square of A has more entries per node in larger
# graphs, before anything is pruned.
SYNTHETIC = "synthetic:nodes={nodes},classes=5,features=8,degree=5,degree_exponent=0"


def measure(dataset: str, hops: int, p: int, clients: int, prune: str) -> dict[str, Any]:
    """Measures one exchange up to Ā. The training after it is one round of a tiny model."""
    tables = {
        "data": {"dataset": dataset, "split": "global 10/10/80"},
        "partition": {"name": "random", "clients": clients},
        "model": {"name": "dgcn-2x8"},
        "method": {
            "name": "fedstruct",
            "rounds": 1,
            "hops": hops,
            "p": p,
            "prune": prune,
            "absorbed": True,
        },
    }
    recipe = make_recipe(tables)
    federation = recipe.federation()
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # the first optimizer loads half of torch
    summary = recipe.execute(federation=federation).summary
    return {
        "nodes": sum(graph.num_nodes for graph in federation.graphs),
        "seconds": summary["seconds"]["setup"],
        "entries": summary["notes"]["entries of the structure matrix"],
        "peak": summary["peak_rss_mb"],
        "sent": summary["traffic"]["phases"].get("offer", {}).get("bytes_up", 0) / 1e6,
    }


def main() -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--largest", type=int, default=10**6)
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(*options.one)))
        return
    cases: list[tuple[str, int, int, int, str]] = [
        ("pubmed", 20, 30, 10, "protocol"),
        ("pubmed", 20, 30, 10, "global"),
    ]
    sizes = [nodes for nodes in (10**4, 10**5, 10**6) if nodes <= options.largest]
    cases += [
        (SYNTHETIC.format(nodes=nodes), 3, 30, 10, prune)
        for prune in ("protocol", "global")
        for nodes in sizes
    ]
    print(f"| {HEAD} |\n" + "|---" * HEAD.count("|") + "|---|")
    for case in cases:
        out = subprocess.run(
            [sys.executable, __file__, "--one", json.dumps(case)],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout
        m = json.loads(out.splitlines()[-1])
        dataset, hops, p, clients, prune = case
        each = 1e6 * m["seconds"] / m["nodes"] / (hops - 1)
        name = dataset.partition(":")[0]
        print(
            f"| {name} | {m['nodes']:,} | {hops} | {p} | {clients} | {prune} "
            f"| {m['seconds']:.1f} | {each:.0f} | {m['entries']:,} "
            f"| {m['peak']:,.0f} | {m['sent']:,.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
