"""Shows a family of graphs that defeats FedGram: classes that no linear function of columns tells.

The class of a node is whether two of its features have the same sign. Edges are drawn at random, or
join nodes of one class. FedGram is linear in its columns. It has products of columns only if there
are few features, so it fails with 32 features, unless neighbours tell the class.

python bench/gram_limits.py docs/fedgram.md          (a minute)
"""

import sys
from pathlib import Path

import torch
from sweep import markdown, put_between, spread

import fedloom
from fedloom.data.graph import Graph

SEEDS, NODES, CLIENTS = 3, 3000, 5
METHODS = ("FedGram", "FedAvg, MLP", "FedAvg, GCN", "Local, MLP")


def xor_graph(features: int, homophily: float, seed: int) -> Graph:
    """Returns a graph whose classes are the product of the signs of two features."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(NODES, features, generator=rng)
    y = (x[:, 0] * x[:, 1] > 0).long()
    source = torch.randint(0, NODES, (4 * NODES,), generator=rng)
    target = torch.randint(0, NODES, (4 * NODES,), generator=rng)
    same = y[source] == y[target]
    kept = torch.rand(len(source), generator=rng) < torch.where(same, homophily, 1 - homophily)
    edges = torch.stack([source, target])[:, kept]
    return Graph(x, torch.cat([edges, edges.flip(0)], 1), y, 2, name="xor").check()


def accuracies(features: int, homophily: float) -> dict[str, list[float]]:
    """Returns the test accuracies of each method by seed."""
    found: dict[str, list[float]] = {name: [] for name in METHODS}
    for seed in range(SEEDS):
        graph = xor_graph(features, homophily, seed)
        parties = fedloom.divide(
            graph, clients=CLIENTS, partition="random", seed=seed, split="40/30/30"
        )
        for name in METHODS:
            method, _, model = name.lower().partition(", ")
            more = {} if method == "fedgram" else {"model": f"{model}-2x64", "rounds": 100}
            result = fedloom.run(method, parties, seed=seed, **more)
            found[name].append(result.accuracy)
    return found


def main() -> None:
    """Runs everything and writes the table."""
    target, lines = Path(sys.argv[1]), []
    for features, homophily in ((4, 0.5), (32, 0.5), (32, 0.9)):
        found = accuracies(features, homophily)
        edges = "at random" if homophily == 0.5 else "mostly within a class"
        cells = [spread(found[name]) for name in METHODS]
        lines.append([f"{features} features, edges {edges}", *cells])
        print(lines[-1], flush=True)
    put_between(target, "limits", markdown(["accuracy", *METHODS], lines))


if __name__ == "__main__":
    main()
