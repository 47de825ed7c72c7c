"""Contrastive learning over several graphs (Eq. 11, 12). The server runs it on pseudo-graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from fedloom.data.graph import Graph
from fedloom.methods.fedgh.vgae import levelled, minimise


class Contrast(nn.Module):
    """DGI's encoder and its bilinear discriminator.

    encoders: 1, or the number of graphs if each has an encoder of its own.
    """

    def __init__(self, num_features: int, width: int, encoders: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(encoders, num_features, width))
        self.bias = nn.Parameter(torch.zeros(encoders, width))
        self.slope = nn.Parameter(torch.full((encoders,), 0.25))
        self.bilinear = nn.Parameter(torch.empty(width, width))
        for matrix in (*self.weight, self.bilinear):
            nn.init.xavier_uniform_(matrix)

    def project(self, graphs: Sequence[Graph]) -> list[Tensor]:
        """Returns X̂ W of every graph, W of its encoder."""
        return [graph.project(self.weight[k % len(self.weight)]) for k, graph in enumerate(graphs)]

    def encode(self, graphs: Sequence[Graph], projected: Sequence[Tensor]) -> list[Tensor]:
        """Returns PReLU(S X̂ W + b) of every graph. projected: X̂ W."""
        e = [k % len(self.bias) for k in range(len(graphs))]
        return [
            F.prelu(g.propagate(h) + self.bias[k], self.slope[k])
            for k, g, h in zip(e, graphs, projected, strict=True)
        ]


def summaries(embedded: Sequence[Tensor]) -> Tensor:
    """Returns s_k of every client, [K, d̃] (Eq. 11)."""
    return torch.stack([h.mean(0) for h in embedded]).sigmoid()


def contrast_loss(
    bilinear: Tensor, embedded: Sequence[Tensor], corrupted: Sequence[Tensor]
) -> list[Tensor]:
    """Returns each client's L_con (Eq. 12).

    It measures how badly D distinguishes the client's nodes from corrupted ones, given the
    summaries of all clients.
    """
    sides = bilinear @ summaries(embedded).T
    return [
        (F.softplus(-(h @ sides)).mean() + F.softplus(c @ sides).mean()) / 2
        for h, c in zip(embedded, corrupted, strict=True)
    ]


def harmonise(
    graphs: Sequence[Graph],
    model: Contrast,
    rngs: Sequence[Generator],
    lr: float,
    epochs: int,
    patience: int,
) -> list[Tensor]:
    """Fits encoder and discriminator to graphs. Returns the embeddings of each graph.

    rngs: a random stream for each graph, which corrupts it.
    """
    xs = levelled([graph.x for graph in graphs])
    graphs = [replace(graph, x=x) for graph, x in zip(graphs, xs, strict=True)]

    def loss() -> Tensor:
        projected = model.project(graphs)
        # Permuted rows of X̂, times W, are permuted rows of X̂ W: one wide product is enough.
        mixed = [
            h[torch.randperm(len(h), generator=rng)] for h, rng in zip(projected, rngs, strict=True)
        ]
        embedded, corrupted = model.encode(graphs, projected), model.encode(graphs, mixed)
        return sum(contrast_loss(model.bilinear, embedded, corrupted), torch.zeros(()))

    minimise(list(model.parameters()), loss, lr, epochs, patience)
    with torch.no_grad():
        return model.encode(graphs, model.project(graphs))
