"""Layers: what an architecture is made of. Dropout, and one class per layer with its equation.

A layer takes its input as a `Product`, W ↦ h W, and the graph. Features are then never made dense.
Weights are [in, out], as the papers write h W. `fedloom.nn.build` initialises matrices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from fedloom.data.graph import Graph
from fedloom.data.sparse import weighted
from fedloom.errors import ConfigError
from fedloom.nn.smoothing import power

if TYPE_CHECKING:
    from fedloom.nn.model import Model

Product = Callable[[Tensor], Tensor]  # W ↦ h W


class RandomBytes(Protocol):
    """A source of random bytes other than one generator."""

    def bytes_like(self, h: Tensor) -> Tensor:
        """Returns uniform bytes in h's shape."""


Noise: TypeAlias = Generator | RandomBytes

# ---- noise ----


def dropout(h: Tensor, p: float, rng: Noise | None) -> Tensor:
    """h with a share p of its entries zeroed and the rest scaled up; h itself without `rng` (Srivastava et al., JMLR 2014).

    p is rounded to 256ths and the scale fits the rounded value, so the expectation is exactly h. One 64-bit draw serves eight
    entries: a mask takes a quarter to an eighth of `bernoulli_`'s time.
    """
    cut = min(round(256 * p), 255)
    if rng is None or cut == 0:
        return h
    # Compared as floats, in place: comparing bytes, or multiplying by a bool, takes several times as long.
    keep = random_bytes(h, rng).to(h.dtype).ge_(cut)
    return h * keep.mul_(256 / (256 - cut))


def random_bytes(h: Tensor, rng: Noise) -> Tensor:
    """Uniform bytes in h's shape."""
    if not isinstance(rng, Generator):
        return rng.bytes_like(h)
    draws = torch.empty((h.numel() + 7) // 8, dtype=torch.int64).random_(
        -(2**63), None, generator=rng
    )
    return draws.view(torch.uint8)[: h.numel()].view(h.shape)


def maximum(a: Tensor, b: Tensor) -> Tensor:
    """The greater of two, entry by entry. Where they are equal the gradient is a's; `torch.maximum` halves it, in ten times the time."""
    return a + F.relu(b - a)


# ---- layers ----


class Dense(nn.Module):
    """h W + b. `last` tells a layer that it gives logits, which only some layers heed."""

    def __init__(self, num_in: int, num_out: int, last: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_in, num_out))
        self.bias = nn.Parameter(torch.zeros(num_out))

    def forward(self, times: Product, graph: Graph) -> Tensor:
        """Takes the input's product and the graph, gives [nodes, num_out]."""
        return self.with_bias(times(self.weight), graph)

    def of_features(self, model: Model, graph: Graph) -> Tensor:
        """The layer's output if it is the model's first."""
        return self(model.features(graph), graph)

    def with_bias(self, h: Tensor, graph: Graph) -> Tensor:
        """h + b."""
        return graph.add_bias(h, self.bias)


class Convolution(Dense):
    """GCN's layer: S (h W) + b with S = D̃^-1/2 (A+I) D̃^-1/2."""

    def forward(self, times: Product, graph: Graph) -> Tensor:
        """As `Dense`."""
        return self.with_bias(graph.propagate(times(self.weight)), graph)

    def of_features(self, model: Model, graph: Graph) -> Tensor:
        """(S X) W + b, with S X kept where that is quicker."""
        return self.with_bias(model.features(graph, power(1))(self.weight), graph)


class MeanNeighbour(Dense):
    """GraphSAGE's layer: h W + D^-1 A (h U) + b."""

    def __init__(self, num_in: int, num_out: int, last: bool = False):
        super().__init__(num_in, num_out)
        self.neighbour = nn.Parameter(torch.empty(num_in, num_out))

    def forward(self, times: Product, graph: Graph) -> Tensor:
        """As `Dense`."""
        return self.with_bias(
            times(self.weight) + graph.propagate(times(self.neighbour), "mean"), graph
        )


class SumNeighbour(Dense):
    """GIN's layer: MLP((1 + ε) h + A h); the MLP is linear, LayerNorm (the paper: BatchNorm), ReLU, linear."""

    def __init__(self, num_in: int, num_out: int, last: bool = False):
        # The inner layer is never as narrow as the classes: few classes would starve it.
        super().__init__(num_in, num_in if last else num_out)
        self.eps = nn.Parameter(torch.zeros(1))
        self.norm = Norm(len(self.bias))
        self.outer = Dense(len(self.bias), num_out)

    def forward(self, times: Product, graph: Graph) -> Tensor:
        """As `Dense`."""
        h = times(self.weight)  # the sum is linear, so W may come first, where it makes h narrow
        inner = F.relu(
            self.norm(
                self.with_bias(
                    (1 + graph.expand(self.eps, h)) * h + graph.propagate(h, "sum"), graph
                ),
                graph,
            )
        )
        return self.outer(graph.matmul(inner), graph)


class Norm(nn.Module):
    """LayerNorm (Ba et al., 2016)."""

    def __init__(self, width: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, h: Tensor, graph: Graph) -> Tensor:
        """Takes and gives [nodes, width]."""
        return F.layer_norm(h, h.shape[-1:]) * graph.expand(self.weight, h) + graph.expand(
            self.bias, h
        )


class Attention(Dense):
    """GAT's layer: Σ_j α_ij (h W)_j + b with α_ij ∝ exp LeakyReLU(s·(h W)_j + t·(h W)_i), over i's in-neighbours j and i itself.

    Eight heads side by side, each with num_out / 8 columns; the last layer has one head. Edge weights are not looked at.
    """

    HEADS = 8

    def __init__(self, num_in: int, num_out: int, last: bool = False):
        heads = 1 if last else self.HEADS
        if num_out % heads:
            raise ConfigError(
                f"model width {num_out}: gat has {heads} heads, use a multiple of {heads}, e.g. 'gat-2x64'"
            )
        super().__init__(num_in, num_out)
        self.source = nn.Parameter(torch.empty(heads, num_out // heads))
        self.target = nn.Parameter(torch.empty(heads, num_out // heads))

    def forward(self, times: Product, graph: Graph) -> Tensor:
        """As `Dense`."""
        edges = graph.adjacency("sym")  # its entries are the edges and self-loops
        source, target = graph.cached("edges", lambda: (edges.indices.long(), edges.rows))
        flat = times(self.weight)
        s_and_t = torch.cat([by_head(self.source), by_head(self.target)], -1)
        sent, taken = (
            graph.matmul(flat)(s_and_t).t().contiguous().chunk(2)
        )  # [heads, nodes]: s·h and t·h
        h = (
            flat.unflatten(1, self.source.shape[-2:]).transpose(0, 1).contiguous()
        )  # [heads, nodes, columns]
        score = F.leaky_relu(sent.index_select(1, source).add_(taken.index_select(1, target)), 0.2)
        # A softmax over each target's edges. What is taken off first is no variable; exp then neither overflows nor vanishes.
        off = F.leaky_relu(taken + level(sent, source, target), 0.2).detach()
        share = score.sub_(off.index_select(1, target)).exp_()
        # A column of ones beside h adds up the shares.
        gathered, total = weighted(edges, share, F.pad(h, (0, 1), value=1.0)).split(
            [h.shape[2], 1], 2
        )
        return self.with_bias((gathered / total).transpose(0, 1).flatten(1), graph)


def by_head(vectors: Tensor) -> Tensor:
    """Takes [..., heads, columns], gives the matrix [..., heads · columns, heads] that multiplies every head's columns with its vector."""
    apart = torch.eye(vectors.shape[-2]).unsqueeze(1)  # [heads, 1, heads]
    return (vectors.unsqueeze(-1) * apart).flatten(-3, -2)


def level(sent: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """What is near to all that a target's sources send: the middle of what all nodes send, or its own sources' maximum if that is far.

    Takes [heads, nodes] and the edges' ends, gives [heads, 1 or nodes]. Near is 60: exp(60) is well inside float32.
    """
    if not sent.shape[1]:
        return sent  # a graph without nodes
    low, high = sent.detach().aminmax(dim=1, keepdim=True)
    if (high - low).max() < 120:
        return (low + high) / 2
    lowest = torch.full_like(sent, -torch.inf)
    return lowest.scatter_reduce(
        1, target.expand(len(sent), -1), sent.detach().index_select(1, source), "amax"
    )


class InitialResidual(nn.Module):
    """GCNII's layer: (1-β) m + β m W with m = (1-α) S h + α h_0."""

    def __init__(self, width: int, alpha: float, beta: float):
        super().__init__()
        self.alpha, self.beta = alpha, beta
        self.weight = nn.Parameter(torch.empty(width, width))

    def forward(self, h: Tensor, h_0: Tensor, graph: Graph) -> Tensor:
        """Takes the last layer's and the first layer's output and the graph, gives [nodes, width]."""
        m = torch.lerp(graph.propagate(h), h_0, self.alpha)
        return torch.lerp(m, graph.matmul(m)(self.weight), self.beta)


class InputNorm(nn.Module):
    """LayerNorm of the input features, then a product: LN(X) W (Ba et al., 2016).

    LN(X) W = X̂ (γ∘W) + β W, where X̂ is constant. Sparse features stay sparse: X̂ V = (X V - mean · 1ᵀV) / deviation.
    """

    def __init__(self, num_features: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))

    def forward(self, graph: Graph, weight: Tensor) -> Tensor:
        """Takes a graph and a [features, width] tensor, gives [nodes, width]."""
        scaled = self.weight.unsqueeze(-1) * weight
        if graph.sparse_x is None:
            standard: Tensor = graph.cached(
                "standardised features", lambda: F.layer_norm(graph.x, graph.x.shape[1:])
            )
            out = graph.matmul(standard)(scaled)
        else:
            mean, deviation = graph.cached("feature moments", lambda: _moments(graph.x))
            out = graph.project(scaled)
            out = (out - mean * graph.expand(scaled.sum(-2), out)) / deviation
        return out + graph.expand((self.bias.unsqueeze(-2) @ weight).squeeze(-2), out)


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    if not len(x):
        return x.new_zeros(0, 1), x.new_ones(0, 1)  # `var_mean` warns of nothing to take it of
    variance, mean = torch.var_mean(x, 1, correction=0, keepdim=True)
    return mean, (variance + 1e-5).sqrt()
