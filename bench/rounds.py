"""What a round of FedAvg costs here, against the same round written plainly with PyG, measured in turns in one process.

Cora, 10 clients by balanced Louvain, GCN with 64 hidden units, 3 local epochs, every client evaluated every round, one thread.

python bench/rounds.py [--rounds 20] [--dataset cora]
"""

import argparse
import time
from statistics import median

import torch
import torch.nn.functional as F
from torch_geometric.nn import GCNConv

import fedloom


class PlainGCN(torch.nn.Module):
    """Two GCNConv layers, as most codes write them."""

    def __init__(self, features: int, classes: int):
        super().__init__()
        self.first, self.second = GCNConv(features, 64), GCNConv(64, classes)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        """Logits."""
        return self.second(F.dropout(F.relu(self.first(x, edge_index)), 0.5, self.training), edge_index)


def plain(federation: fedloom.Federation, rounds: int) -> None:
    """FedAvg as a loop over PyG models."""
    features, classes = federation.num_features, federation.num_classes
    nets = [PlainGCN(features, classes) for _ in federation.graphs]
    optimizers = [torch.optim.Adam(net.parameters(), 0.01, weight_decay=5e-4) for net in nets]
    sizes = torch.tensor([g.num_nodes for g in federation.graphs], dtype=torch.float)
    shares = sizes / sizes.sum()
    state = {k: v.clone() for k, v in nets[0].state_dict().items()}
    for _ in range(rounds):
        for net, optimizer, g in zip(nets, optimizers, federation.graphs, strict=True):
            net.load_state_dict(state)
            net.train()
            for _ in range(3):
                optimizer.zero_grad()
                F.cross_entropy(net(g.x, g.edge_index)[g.train], g.y[g.train]).backward()
                optimizer.step()
        state = {k: sum(s * net.state_dict()[k] for s, net in zip(shares, nets, strict=True)) for k in state}
        for net, g in zip(nets, federation.graphs, strict=True):
            net.eval()
            with torch.no_grad():
                right = net(g.x, g.edge_index).argmax(1) == g.y
            right[g.val].float().mean(), right[g.test].float().mean()


def main() -> None:
    """Prints milliseconds a round and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--dataset", default="cora")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    federation = fedloom.divide(fedloom.load(asked.dataset), 10, "louvain", 0)
    ways = {
        "plain PyG loop": lambda r: plain(federation, r),
        "fedloom, loop engine": lambda r: fedloom.run("fedavg", federation, rounds=r),
        "fedloom, wire engine": lambda r: fedloom.run("fedavg", federation, rounds=r, engine="wire"),
    }
    took: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way(2)  # warm
    for _ in range(5):  # in turns, so that a noisy neighbour disturbs all alike
        for name, way in ways.items():
            begun = time.perf_counter()
            way(asked.rounds)
            took[name].append((time.perf_counter() - begun) / asked.rounds * 1000)
    base = median(took["plain PyG loop"])
    for name, values in took.items():
        print(f"{name:22s} {median(values):7.1f} ms a round, {base / median(values):.1f} x the plain loop's speed")


if __name__ == "__main__":
    main()
