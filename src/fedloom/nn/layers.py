"""Layers of architectures, each with its equation, and dropout.

A layer receives its input h as a `Product`, W ↦ h W, and the graph. Sparse features therefore stay
sparse. Weights are [in, out], because the papers write h W. `fedloom.nn.build` initialises them.
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
    from fedloom.nn.model import Architecture

Product = Callable[[Tensor], Tensor]  # W ↦ h W


class RandomBytes(Protocol):
    """A source of random bytes that is not a single generator."""

    def bytes_like(self, h: Tensor) -> Tensor:
        """Returns uniform bytes in the shape of h."""


Noise: TypeAlias = Generator | RandomBytes

# ---- dropout ----


def dropout(h: Tensor, p: float, rng: Noise | None) -> Tensor:
    """Sets entries to 0 with probability p and scales the rest (Srivastava et al., JMLR 2014).

    p is rounded to a multiple of 1/256. The scale fits the rounded value, so the expectation is
    exactly h. One 64-bit draw serves eight entries, so a mask takes a quarter to an eighth of the
    time of `bernoulli_`.

    Args:
        h: The input.
        p: The probability.
        rng: The source of randomness. None: h is returned unchanged.
    """
    cut = dropout_cut(p)
    if rng is None or cut == 0:
        return h
    # Comparing bytes, or multiplying by a bool, takes several times as long as floats in place.
    keep = random_bytes(h, rng).to(h.dtype).ge_(cut)
    return h * keep.mul_(dropout_scale(p, rng))


def dropout_scale(p: float, rng: Noise | None) -> float:
    """Returns what `dropout` multiplies entries by that it does not set to 0."""
    return 1.0 if rng is None else 256 / (256 - dropout_cut(p))


def dropout_cut(p: float) -> int:
    """Returns how many of the 256 values of a random byte set an entry to 0."""
    return min(round(256 * p), 255)


def random_bytes(h: Tensor, rng: Noise) -> Tensor:
    """Returns uniform bytes in the shape of h."""
    if not isinstance(rng, Generator):
        return rng.bytes_like(h)
    draws = torch.empty((h.numel() + 7) // 8, dtype=torch.int64).random_(
        -(2**63), None, generator=rng
    )
    return draws.view(torch.uint8)[: h.numel()].view(h.shape)


def maximum(a: Tensor, b: Tensor) -> Tensor:
    """Returns the elementwise maximum. Where both are equal, a receives the whole gradient.

    `torch.maximum` halves the gradient there, and takes ten times as long.
    """
    return a + F.relu(b - a)


# ---- layers ----


class Dense(nn.Module):
    """Linear layer: h W + b.

    last: whether the layer's output are logits. Only some layers use it.
    """

    def __init__(self, num_in: int, num_out: int, last: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_in, num_out))
        self.bias = nn.Parameter(torch.zeros(num_out))

    def forward(self, times: Product, graph: Graph) -> Tensor:
        """Returns the output [nodes, num_out].

        Args:
            times: The product W ↦ h W of the input h.
            graph: The graph.
        """
        return self.add_bias(times(self.weight), graph)

    def of_features(self, model: Architecture, graph: Graph) -> Tensor:
        """Returns the output of the layer as the first layer of a model."""
        return self(model.features(graph), graph)

    def add_bias(self, h: Tensor, graph: Graph) -> Tensor:
        """Returns h + b."""
        return graph.add_bias(h, self.bias)


class Convolution(Dense):
    """GCN layer: S (h W) + b with S = D̃^-1/2 (A+I) D̃^-1/2."""

    def forward(self, times: Product, graph: Graph) -> Tensor:
        """Returns the output [nodes, num_out]; see `Dense`."""
        return self.add_bias(graph.propagate(times(self.weight)), graph)

    def of_features(self, model: Architecture, graph: Graph) -> Tensor:
        """Returns (S X) W + b. S X is cached if that is faster."""
        return self.add_bias(model.features(graph, power(1))(self.weight), graph)


class MeanNeighbour(Dense):
    """GraphSAGE layer: h W + D^-1 A (h U) + b."""

    def __init__(self, num_in: int, num_out: int, last: bool = False):
        super().__init__(num_in, num_out)
        self.neighbour = nn.Parameter(torch.empty(num_in, num_out))

    def forward(self, times: Product, graph: Graph) -> Tensor:
        """Returns the output [nodes, num_out]; see `Dense`."""
        return self.add_bias(
            times(self.weight) + graph.propagate(times(self.neighbour), "mean"), graph
        )


class SumNeighbour(Dense):
    """GIN layer: MLP((1 + ε) h + A h).

    The MLP is linear, LayerNorm, ReLU, linear. The paper has BatchNorm in place of LayerNorm.
    """

    def __init__(self, num_in: int, num_out: int, last: bool = False):
        # In the last layer, the inner width is not the number of classes, which may be too small.
        super().__init__(num_in, num_in if last else num_out)
        self.eps = nn.Parameter(torch.zeros(1))
        self.norm = Norm(len(self.bias))
        self.outer = Dense(len(self.bias), num_out)

    def forward(self, times: Product, graph: Graph) -> Tensor:
        """Returns the output [nodes, num_out]; see `Dense`."""
        h = times(self.weight)  # the sum is linear, so W may come first, which makes h narrow
        total = (1 + graph.expand(self.eps, h)) * h + graph.propagate(h, "sum")
        inner = F.relu(self.norm(self.add_bias(total, graph), graph))
        return self.outer(graph.matmul(inner), graph)


class Norm(nn.Module):
    """LayerNorm (Ba et al., 2016)."""

    def __init__(self, width: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, h: Tensor, graph: Graph) -> Tensor:
        """Normalises each row of h [nodes, width]."""
        scaled = F.layer_norm(h, h.shape[-1:]) * graph.expand(self.weight, h)
        return scaled + graph.expand(self.bias, h)


class Attention(Dense):
    """GAT layer: Σ_j α_ij (h W)_j + b with α_ij ∝ exp LeakyReLU(s·(h W)_j + t·(h W)_i).

    j runs over the in-neighbours of i and i itself. There are eight concatenated heads with
    num_out / 8 columns each. The last layer has one head. Edge weights are ignored.
    """

    HEADS = 8

    def __init__(self, num_in: int, num_out: int, last: bool = False):
        heads = 1 if last else self.HEADS
        if num_out % heads:
            raise ConfigError(
                f"model width {num_out}: gat has {heads} heads, use a multiple of {heads}, "
                "e.g. 'gat-2x64'"
            )
        super().__init__(num_in, num_out)
        self.source = nn.Parameter(torch.empty(heads, num_out // heads))
        self.target = nn.Parameter(torch.empty(heads, num_out // heads))

    def forward(self, times: Product, graph: Graph) -> Tensor:
        """Returns the output [nodes, num_out]; see `Dense`."""
        edges = graph.adjacency("sym")  # its entries are the edges and self-loops
        source, target = graph.cached("edges", lambda: (edges.indices.long(), edges.rows))
        flat = times(self.weight)
        vectors = torch.cat([_head_matrix(self.source), _head_matrix(self.target)], -1)
        # [heads, nodes] each: s·h and t·h
        from_source, from_target = graph.matmul(flat)(vectors).t().contiguous().chunk(2)
        # [heads, nodes, columns]
        h = flat.unflatten(1, self.source.shape[-2:]).transpose(0, 1).contiguous()
        at_edges = from_source.index_select(1, source).add_(from_target.index_select(1, target))
        score = F.leaky_relu(at_edges, 0.2)
        # A softmax over each target's edges. A constant shift keeps exp in the range of float32.
        shift = F.leaky_relu(from_target + _center(from_source, source, target), 0.2).detach()
        share = score.sub_(shift.index_select(1, target)).exp_()
        # A column of ones next to h adds up the shares.
        sums = weighted(edges, share, F.pad(h, (0, 1), value=1.0))
        gathered, total = sums.split([h.shape[2], 1], 2)
        return self.add_bias((gathered / total).transpose(0, 1).flatten(1), graph)


def _head_matrix(vectors: Tensor) -> Tensor:
    """Returns the matrix that multiplies the columns of each head with the head's vector.

    [..., heads, columns] gives [..., heads · columns, heads].
    """
    separate = torch.eye(vectors.shape[-2]).unsqueeze(1)  # [heads, 1, heads]
    return (vectors.unsqueeze(-1) * separate).flatten(-3, -2)


def _center(scores: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """Returns a number that is within 60 of the scores of a target's sources, or their maximum.

    It is the middle of all nodes' scores if that is within 60 of all of them, because exp(60) is
    well within float32. Otherwise it is the maximum over the target's own sources. Scores
    [heads, nodes] and the edges' ends give [heads, 1] or [heads, nodes].
    """
    if not scores.shape[1]:
        return scores  # a graph without nodes
    low, high = scores.detach().aminmax(dim=1, keepdim=True)
    if (high - low).max() < 120:
        return (low + high) / 2
    lowest = torch.full_like(scores, -torch.inf)
    return lowest.scatter_reduce(
        1, target.expand(len(scores), -1), scores.detach().index_select(1, source), "amax"
    )


class InitialResidual(nn.Module):
    """GCNII layer: (1-β) m + β m W with m = (1-α) S h + α h_0."""

    def __init__(self, width: int, alpha: float, beta: float):
        super().__init__()
        self.alpha, self.beta = alpha, beta
        self.weight = nn.Parameter(torch.empty(width, width))

    def forward(self, h: Tensor, h_0: Tensor, graph: Graph) -> Tensor:
        """Returns the output [nodes, width].

        Args:
            h: The output of the previous layer.
            h_0: The output of the first layer.
            graph: The graph.
        """
        m = torch.lerp(graph.propagate(h), h_0, self.alpha)
        return torch.lerp(m, graph.matmul(m)(self.weight), self.beta)


class InputNorm(nn.Module):
    """LayerNorm of the input features, then a product: LN(X) W (Ba et al., 2016).

    LN(X) W = X̂ (γ∘W) + β W, where X̂ is constant. Sparse features stay sparse, because
    X̂ V = (X V - mean · 1ᵀV) / deviation.
    """

    def __init__(self, num_features: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))

    def forward(self, graph: Graph, weight: Tensor) -> Tensor:
        """Returns LN(X) W [nodes, width] for a weight [features, width]."""
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
        return x.new_zeros(0, 1), x.new_ones(0, 1)  # `var_mean` warns about empty tensors
    variance, mean = torch.var_mean(x, 1, correction=0, keepdim=True)
    return mean, (variance + 1e-5).sqrt()
