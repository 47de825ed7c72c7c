"""Measures FedGram's accuracy against ε, and writes the table in docs/fedgram.md.

Runs are secure, with the noise of a private run. "Alone" is the same personal part without any W,
which needs no federation and has no cost in privacy. The width is fixed for each dataset.

python bench/gram_privacy.py docs/fedgram.md          (10 minutes on a quiet core)
"""

import sys
from pathlib import Path
from statistics import mean

import torch
from sweep import markdown, put_between, spread

from fedloom.core.client import Client
from fedloom.data.federation import Federation
from fedloom.experiments.recipe import make_recipe
from fedloom.experiments.run import agree_on_facts, run
from fedloom.experiments.settings import RunSettings
from fedloom.methods.fedgram import FedGram

WIDTHS, SEEDS = {"cora": 2048, "pubmed": 512, "physics": 1024}, 3
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 1e6)
RELATIONS = ("label", "node")


def parties_of(data: str, seed: int) -> Federation:
    """Returns ten clients by Louvain."""
    return make_recipe({"data": {"dataset": data}, "run": {"seed": seed}}).federation()


def alone(parties: Federation, width: int, seed: int) -> float:
    """Returns the accuracy of the clients' own models, weighted by size."""
    method = FedGram(hops="2", width=width, labels=0.0)
    facts = agree_on_facts(method, "fedgram", parties.roster, "gcn", 0.5, RunSettings(seed=seed))
    right, nodes = 0.0, sum(graph.num_nodes for graph in parties.graphs)
    for name, graph in zip(parties.names, parties.graphs, strict=True):
        logits = method.predict(Client(name, graph, facts), None)
        hit = (logits.argmax(1) == graph.y)[graph.test].float().mean().item()
        right += hit * graph.num_nodes / nodes
    return right


def main() -> None:
    """Runs everything and writes the table."""
    torch.set_num_threads(1)
    target, lines = Path(sys.argv[1]), []
    for data, width in WIDTHS.items():
        federations = [parties_of(data, seed) for seed in range(SEEDS)]
        own = [alone(parties, width, seed) for seed, parties in enumerate(federations)]
        for relation in RELATIONS:
            cells = []
            for epsilon in EPSILONS:
                shown = []
                for evaluation in ("global", "local"):
                    found = [
                        run(
                            "fedgram",
                            parties,
                            hops="2",
                            width=width,
                            epsilon=epsilon,
                            protects=relation,
                            secure=True,
                            evaluation=evaluation,
                            seed=seed,
                            engine="loop",
                        ).accuracy
                        for seed, parties in enumerate(federations)
                    ]
                    shown.append(mean(found))
                cells.append(" / ".join(f"{100 * value:.1f}" for value in shown))
                print(data, relation, epsilon, cells[-1], flush=True)
            lines.append([f"{data}, {relation}, m = {width}", str(spread(own)), *cells])
    head = [f"ε = {epsilon:g}" for epsilon in EPSILONS[:-1]]
    put_between(target, "epsilon", markdown(["W / personal", "alone", *head, "no noise"], lines))


if __name__ == "__main__":
    main()
