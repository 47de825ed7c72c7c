"""A federation of parties that already have graphs: two from networkx, one from PyG."""

import networkx as nx
import torch
from torch_geometric.data import Data

import fedloom

rng = torch.Generator().manual_seed(0)


def village(people: int, seed: int) -> nx.Graph:
    """Two groups with few edges between them; a person's features depend on the group."""
    graph = nx.planted_partition_graph(2, people // 2, 0.2, 0.02, seed=seed)
    for person in graph:
        group = person // (people // 2)
        graph.nodes[person].update(x=(torch.randn(5, generator=rng) + group).tolist(), y=group)
    return graph


small = Data(
    x=torch.randn(40, 5, generator=rng) + torch.arange(40)[:, None] // 20,
    edge_index=torch.randint(40, (2, 120), generator=rng),
    y=torch.arange(40) // 20,
)
graphs = [
    fedloom.from_networkx(village(60, 1)),
    fedloom.from_networkx(village(100, 2)),
    fedloom.from_pyg(small),
]
parties = tuple(fedloom.apply_split(graph, "40/20/40", seed=0) for graph in graphs)
federation = fedloom.Federation(parties, names=("bank-a", "bank-b", "bank-c"))

for method in ("local", "fedavg"):
    result = fedloom.run(method, federation, model="sage-2x16", rounds=15)
    print(method, {c["id"]: round(c["accuracy"], 2) for c in result.per_client})
