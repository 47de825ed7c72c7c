"""Measures what FedGram's statistics reveal to the server, and writes the table in docs/fedgram.md.

The attacker is the server. It has the statistics of each client (a plain run) or their sum (a
secure run), and the propagated features of candidates: all nodes of a client. It tells training
nodes from others, and reads their labels. Chance is 0.5 for the first; the accuracy on nodes that
are not in the statistics is what the second reaches by prediction alone.

python bench/gram_leakage.py docs/fedgram.md          (a minute)
"""

import sys
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from sweep import markdown, put_between

from fedloom.core.client import Client
from fedloom.experiments.recipe import make_recipe
from fedloom.experiments.run import agree_on_facts
from fedloom.experiments.settings import RunSettings
from fedloom.methods.fedgram import FedGram
from fedloom.methods.fedgram.ridge import nearest_psd, unpacked
from fedloom.privacy.choice import responder_for
from fedloom.privacy.leakage import labels_read, member_auc

DATASETS, SEEDS = {"cora": "4", "pubmed": "2", "computers": "2"}, 3
WIDTHS, EPSILON = (2048, 512, 256, 128), 4.0


def attacked(
    data: str, hops: str, width: int, seed: int, **settings: Any
) -> dict[str, list[float]]:
    """Returns AUC, labels read and labels predicted: for each client's statistics, and the sum."""
    parties = make_recipe({"data": {"dataset": data}, "run": {"seed": seed}}).federation()
    method = FedGram(hops=hops, width=width, **settings)
    run = RunSettings(seed=seed, secure=bool(method.epsilon))
    facts = agree_on_facts(method, "fedgram", parties.roster, "gcn", 0.5, run)
    columns = method.full(facts)
    asked = {"maps": torch.tensor([0]), "width": torch.tensor(columns)}
    own, rows, train, y = [], [], [], []
    for name, graph in zip(parties.names, parties.graphs, strict=True):
        client = Client(name, graph, facts, responder=responder_for(facts, name))
        sent = method.send_moments(client, **asked)
        own.append(
            (unpacked(sent["gram"]["0"], method.columns(facts, 0, columns)), sent["moment"]["0"])
        )
        private = method.private_rows(client, columns)
        rows.append(private if method.epsilon else method.features(client, graph, 0, columns))
        train.append(graph.train)
        y.append(graph.y)
    total = [torch.stack(part).sum(0) for part in zip(*own, strict=True)]
    if method.epsilon:  # what the server makes of it; the attacker can do no better than that
        ridge = method.penalties(facts)[0]
        total[0] = nearest_psd(total[0]) + ridge * torch.eye(len(total[0]))

    def scores(statistics: Any, f: torch.Tensor, member: torch.Tensor, label: torch.Tensor) -> Any:
        gram, moment = statistics
        return (
            member_auc(gram, f, member),
            labels_read(gram, moment, f[member], label[member]),
            labels_read(gram, moment, f[~member], label[~member]),
        )

    each = [scores(*part) for part in zip(own, rows, train, y, strict=True)]
    everything = scores(total, torch.cat(rows), torch.cat(train), torch.cat(y))
    return {"each": [mean(column) for column in zip(*each, strict=True)], "sum": list(everything)}


def main() -> None:
    """Runs the attacks and writes the table."""
    target = Path(sys.argv[1])
    lines = []
    for data, hops in DATASETS.items():
        for width in WIDTHS:
            found = [attacked(data, hops, width, seed) for seed in range(SEEDS)]
            private = [attacked(data, hops, width, seed, epsilon=EPSILON) for seed in range(SEEDS)]
            cells = []
            for attacks, seen in ((found, "each"), (found, "sum"), (private, "sum")):
                auc, read, guessed = (mean(f[seen][k] for f in attacks) for k in range(3))
                cells += [f"{auc:.2f}", f"{100 * read:.0f} %", f"{100 * guessed:.0f} %"]
            lines.append([data, str(width), *cells])
            print(lines[-1], flush=True)
    head = ["", "m at most"]
    for seen in ("G_k in the clear", "the sum, in a secure run", f"the sum, ε = {EPSILON:g}"):
        head += [f"{seen}: AUC", "labels read", "without membership"]
    put_between(target, "leakage", markdown(head, lines))


if __name__ == "__main__":
    main()
