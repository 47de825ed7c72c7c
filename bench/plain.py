"""FedAvg as a plain loop, in the style of PyG's documentation: the baseline of bench/speed.py.

It does the same work as `fedloom.run("fedavg", ...)`: GCNConv on edge_index, Adam for each client,
load_state_dict, and an evaluation of every client in every round.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch_geometric.nn import GCNConv

import fedloom


class GCN(torch.nn.Module):
    """A GCN with two layers and 64 hidden units."""

    def __init__(self, features: int, classes: int):
        super().__init__()
        self.first, self.second = GCNConv(features, 64), GCNConv(64, classes)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        """Returns the logits."""
        return self.second(
            F.dropout(F.relu(self.first(x, edge_index)), 0.5, self.training), edge_index
        )


def fedavg(
    federation: fedloom.Federation, rounds: int, epochs: int
) -> Iterator[tuple[float, float]]:
    """Runs FedAvg. Yields the validation and test accuracy of each round, weighted by size."""
    features, classes = federation.num_features, federation.num_classes
    models = [GCN(features, classes) for _ in federation.graphs]
    optimizers = [torch.optim.Adam(model.parameters(), 0.01, weight_decay=5e-4) for model in models]
    sizes = torch.tensor([g.num_nodes for g in federation.graphs], dtype=torch.float)
    shares = sizes / sizes.sum()
    state = {k: v.clone() for k, v in models[0].state_dict().items()}
    for _ in range(rounds):
        for model, optimizer, g in zip(models, optimizers, federation.graphs, strict=True):
            model.load_state_dict(state)
            model.train()
            for _ in range(epochs):
                optimizer.zero_grad()
                F.cross_entropy(model(g.x, g.edge_index)[g.train], g.y[g.train]).backward()
                optimizer.step()
        state = {
            k: sum(s * model.state_dict()[k] for s, model in zip(shares, models, strict=True))
            for k in state
        }
        val = test = 0.0
        for model, share, g in zip(models, shares.tolist(), federation.graphs, strict=True):
            model.eval()
            with torch.no_grad():
                right = (model(g.x, g.edge_index).argmax(1) == g.y).float()
            val += share * right[g.val].mean().item()
            test += share * right[g.test].mean().item()
        yield val, test
