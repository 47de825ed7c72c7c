"""Measures what FedGH's pseudo-graphs disclose, and how its embeddings cluster by class.

It writes tables in docs/results.md and a picture. runs/pseudo caches pseudo-graphs.

python bench/leakage.py docs/results.md          (20 minutes on a quiet core)
"""

import sys
from itertools import combinations
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from fedgh import remember_pseudo_graphs
from matplotlib.collections import LineCollection
from sklearn.cluster import KMeans
from sklearn.manifold import TSNE
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score, silhouette_score
from sweep import markdown, put_between

from fedloom.core.client import Client
from fedloom.core.registry import make_method
from fedloom.core.server import RoundPolicy, Server
from fedloom.data.federation import Federation
from fedloom.engines.loop import Engine
from fedloom.experiments.recipe import make_recipe
from fedloom.experiments.run import agree_on_facts
from fedloom.experiments.settings import RunSettings
from fedloom.methods.fedgh import directions
from fedloom.nn.nearest import pairs
from fedloom.privacy.leakage import edge_auc, reidentified

mpl.use("agg")
from matplotlib import pyplot as plt

DATASETS, SEEDS = ("cora", "pubmed", "photo"), 3
MADE: dict[str, dict[str, Any]] = {
    "FedGH": {},
    "w/o C": {"regulated": False},
    "without diffusion": {"diffused": False},
}
EMBEDDED = {
    "DGI at home": {"refine_by": "local"},
    "FedGH": {},
    "without diffusion": {"diffused": False},
}
# Without the condition C nothing ties rows to nodes. One dataset is enough to show it.
ONLY_ON = {"w/o C": ("cora",)}
AT_MOST = 1000  # nodes of a pair of clients for the silhouette


def federation(data: str, seed: int) -> Federation:
    """Returns a federation of ten clients by Louvain."""
    return make_recipe(
        {
            "data": {"dataset": data, "split": "20/40/40"},
            "partition": {"clients": 10},
            "run": {"seed": seed},
        }
    ).federation()


def clients_of(
    parties: Federation, seed: int, **settings: Any
) -> tuple[Any, dict[str, Client], Server]:
    """Returns FedGH, its clients and a server for them, as in a run."""
    method = make_method("fedgh", settings)
    facts = agree_on_facts(method, "fedgh", parties.roster, "gcn-2x64", 0.5, RunSettings(seed=seed))
    clients = {
        name: Client(name, graph, facts)
        for name, graph in zip(parties.names, parties.graphs, strict=True)
    }
    call = Engine(method, clients.values()).call
    server = Server(method, facts, call, RoundPolicy("local"), None)  # type: ignore[arg-type]
    return method, clients, server


def spread(values: list[float]) -> str:
    """Returns the mean and the standard deviation over seeds, as text."""
    return f"{mean(values):.3f} ± {stdev(values):.3f}" if len(values) > 1 else f"{values[0]:.3f}"


def leaks() -> str:
    """Attacks the pseudo-graphs that clients send. Returns a table."""
    rows = []
    for data in DATASETS:
        for row, settings in MADE.items():
            if data not in ONLY_ON.get(row, DATASETS):
                continue
            found, chance, edges, guessed = [], [], [], []
            for seed in range(SEEDS):
                method, clients, _ = clients_of(federation(data, seed), seed, **settings)
                sent = {name: method.pseudo_graph(client) for name, client in clients.items()}
                graphs = {name: client.full_graph for name, client in clients.items()}
                rng = torch.Generator().manual_seed(seed)
                found.append(mean(reidentified(graphs[c].x, x) for c, (x, _) in sent.items()))
                chance.append(mean(1 / graphs[c].num_nodes for c in sent))
                edges.append(
                    mean(
                        edge_auc(graphs[c].edge_index, x, links, rng)
                        for c, (x, links) in sent.items()
                    )
                )
                # Edges inferred from the real features without a pseudo-graph show how much of the
                # AUC is due to the homophily of the data.
                guessed.append(
                    mean(
                        edge_auc(graphs[c].edge_index, graphs[c].x, links[:, :0], rng)
                        for c, (_, links) in sent.items()
                    )
                )
            rows.append([data, row, *map(spread, (found, chance, edges, guessed))])
            print(rows[-1], flush=True)
    head = [
        "data",
        "made by",
        "rows re-identified",
        "by chance",
        "edges inferred, AUC (chance 0.5)",
        "AUC from the real features alone",
    ]
    return markdown(head, rows)


def quality(z: torch.Tensor, y: torch.Tensor) -> tuple[float, float, float]:
    """Returns NMI, ARI and silhouette of k-means on the rows of two clients.

    There are as many clusters as the two clients have classes.
    """
    rows, classes = z.numpy().astype(np.float64), len(y.unique())
    guessed = KMeans(classes, n_init=3, random_state=0).fit_predict(rows)
    some = np.random.default_rng(0).permutation(len(rows))[:AT_MOST]
    shape = (
        silhouette_score(rows[some], y.numpy()[some]) if len(y[some].unique()) > 1 else float("nan")
    )
    return normalized_mutual_info_score(y, guessed), adjusted_rand_score(y, guessed), float(shape)


def clustering() -> str:
    """Measures how well clustering finds the classes of the nodes of two clients."""
    rows = []
    for data in DATASETS:
        tables: dict[str, dict[str, torch.Tensor]] = {}
        parties = federation(data, 0)
        labels = dict(zip(parties.names, (g.y for g in parties.graphs), strict=True))
        # Features are scaled as `refined` scales H̃.
        tables["features"] = dict(
            zip(parties.names, (directions(g.x) for g in parties.graphs), strict=True)
        )
        for row, settings in EMBEDDED.items():
            method, clients, server = clients_of(parties, 0, **settings)
            method.prepare_clients(server)
            tables[row] = {
                name: client.full_graph.x[:, -method.embedding_width :]
                for name, client in clients.items()
            }
        for row, z in tables.items():
            both = [
                quality(torch.cat([z[a], z[b]]), torch.cat([labels[a], labels[b]]))
                for a, b in combinations(z, 2)
            ]
            rows.append(
                [data, row, *(f"{np.nanmean(column):.3f}" for column in zip(*both, strict=True))]
            )
            print(rows[-1], flush=True)
    return markdown(["data", "rows", "NMI", "ARI", "silhouette of the classes"], rows)


def picture(path: Path) -> None:
    """Draws the first client's graph and its pseudo-graph: t-SNE of the features, by class."""
    figure, axes = plt.subplots(len(DATASETS), 2, figsize=(8, 4 * len(DATASETS)))
    for data, row in zip(DATASETS, axes, strict=True):
        method, clients, _ = clients_of(federation(data, 0), 0)
        client = next(iter(clients.values()))
        graph = client.full_graph
        x, links = method.pseudo_graph(client)
        drawn = {
            "original graph": (graph.x, pairs(graph.edge_index, graph.num_nodes)),
            "pseudo-graph": (x, links),
        }
        for axis, (title, (features, ends)) in zip(row, drawn.items(), strict=True):
            place = TSNE(
                random_state=0, init="pca", perplexity=min(30, graph.num_nodes / 4)
            ).fit_transform(features.numpy())
            axis.add_collection(
                LineCollection(list(place[ends.T.numpy()]), colors="0.8", linewidths=0.2, zorder=0)
            )
            axis.scatter(*place.T, c=graph.y.numpy(), cmap="tab10", s=6)
            axis.set(title=f"{data}, client 0: {title}", xticks=[], yticks=[])
    figure.tight_layout()
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    torch.set_num_threads(1)
    remember_pseudo_graphs()
    put_between(target, "fedgh-leaks", leaks())
    put_between(target, "fedgh-clusters", clustering())
    picture(target.with_name("pseudo-graphs.png"))
