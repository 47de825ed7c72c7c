"""The yardstick: FedAvg as a plain loop, written the way PyG's documentation teaches, with the same work as `fedloom.run("fedavg", ...)`.

GCNConv on edge_index, Adam for each client, load_state_dict, every client evaluated every round.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch_geometric.nn import GCNConv

import fedloom


class GCN(torch.nn.Module):
    """Two layers, 64 hidden units."""

    def __init__(self, features: int, classes: int):
        super().__init__()
        self.first, self.second = GCNConv(features, 64), GCNConv(64, classes)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        """Logits."""
        return self.second(
            F.dropout(F.relu(self.first(x, edge_index)), 0.5, self.training), edge_index
        )


def fedavg(
    federation: fedloom.Federation, rounds: int, epochs: int
) -> Iterator[tuple[float, float]]:
    """Takes a federation, yields each round's validation and test accuracy, averaged by the clients' sizes."""
    features, classes = federation.num_features, federation.num_classes
    nets = [GCN(features, classes) for _ in federation.graphs]
    optimizers = [torch.optim.Adam(net.parameters(), 0.01, weight_decay=5e-4) for net in nets]
    sizes = torch.tensor([g.num_nodes for g in federation.graphs], dtype=torch.float)
    shares = sizes / sizes.sum()
    state = {k: v.clone() for k, v in nets[0].state_dict().items()}
    for _ in range(rounds):
        for net, optimizer, g in zip(nets, optimizers, federation.graphs, strict=True):
            net.load_state_dict(state)
            net.train()
            for _ in range(epochs):
                optimizer.zero_grad()
                F.cross_entropy(net(g.x, g.edge_index)[g.train], g.y[g.train]).backward()
                optimizer.step()
        state = {
            k: sum(s * net.state_dict()[k] for s, net in zip(shares, nets, strict=True))
            for k in state
        }
        val = test = 0.0
        for net, share, g in zip(nets, shares.tolist(), federation.graphs, strict=True):
            net.eval()
            with torch.no_grad():
                right = (net(g.x, g.edge_index).argmax(1) == g.y).float()
            val += share * right[g.val].mean().item()
            test += share * right[g.test].mean().item()
        yield val, test
