"""Twelve architectures, each an extractor and a head.

    message passing        mlp · gcn · gat · sage · gin · gcnii
    smoothed features      sgc · ssgc · sign · gamlp
    smoothed predictions   appnp · dgcn

`fedloom.nn.build` builds one from a spec such as "gcn-4x128".
"""

from __future__ import annotations

import math
from functools import reduce
from itertools import pairwise
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.data.graph import Graph
from fedloom.errors import ConfigError
from fedloom.nn.layers import (
    Attention,
    Convolution,
    Dense,
    InitialResidual,
    MeanNeighbour,
    Noise,
    SumNeighbour,
    dropout,
    maximum,
)
from fedloom.nn.model import Architecture
from fedloom.nn.smoothing import polynomial, power

# ---- message passing ----


class LayeredModel(Architecture):
    """Base class of models that repeat one kind of layer.

    Dropout is applied to the input of every layer but the first.
    """

    accepts = Architecture.accepts | {"jk"}
    layer: ClassVar[type[Dense]]

    @classmethod
    def implied_options(cls, layers: int) -> frozenset[str]:
        """Returns "linear" for a single layer.

        The head takes the last layer. A single layer stays in the extractor, because otherwise
        there would be no embedding.
        """
        return frozenset({"linear"} if layers == 1 else ())

    def extractor(self, num_features: int) -> list[nn.Module]:
        """Returns LAYERS layers, or one less if the head is a layer of the same kind."""
        depth = self.spec.layers - (not self.linear)
        widths = self.spec.widths if len(self.spec.widths) > 1 else self.spec.widths * depth
        if len(widths) != depth:
            given = "-".join(map(str, widths))
            raise ConfigError(
                f"model width {given!r}: {self.spec.name} has {depth} hidden layers here, "
                f"give one width or {depth}"
            )
        return [self.layer(*sizes) for sizes in pairwise((num_features, *widths))]

    def last(self, num_classes: int) -> nn.Module:
        """Returns one more layer of the kind, unless the head is linear."""
        if self.linear:
            return super().last(num_classes)
        return self.layer(self.width, num_classes, last=True)

    def activation(self, h: Tensor) -> Tensor:
        """Applies the activation that follows every layer of the extractor, in place."""
        return h.relu_()

    def nodes(self, graph: Graph, rng: Noise | None) -> Tensor:
        """Returns the output of the last layer, or with +jk the maximum over all layers."""
        first, *others = self.layers
        assert isinstance(first, Dense)
        outputs = [self.activation(first.of_features(self, graph))]
        for layer in others:
            product = graph.matmul(dropout(outputs[-1], self.dropout, rng))
            outputs.append(self.activation(layer(product, graph)))
        return reduce(maximum, outputs) if "jk" in self.spec.options else outputs[-1]


class MLP(LayeredModel):
    """Linear layers with ReLU between them. The model ignores edges."""

    layer = Dense


class GCN(LayeredModel):
    """Graph convolutions, S h W with S = D̃^-1/2 (A+I) D̃^-1/2 (Kipf & Welling, ICLR 2017)."""

    layer = Convolution


class GAT(LayeredModel):
    """Attention over neighbours, 8 concatenated heads, ELU (Veličković et al., ICLR 2018).

    There is no dropout on the attention.
    """

    layer = Attention

    def activation(self, h: Tensor) -> Tensor:
        """Applies ELU, as in the paper."""
        return F.elu_(h)


class SAGE(LayeredModel):
    """GraphSAGE: own features and the neighbours' mean (Hamilton et al., NeurIPS 2017).

    Both have their own weights.
    """

    layer = MeanNeighbour


class GIN(LayeredModel):
    """An MLP on (1 + ε) h plus the sum of the neighbours' h; sum pooling (Xu et al., ICLR 2019)."""

    layer = SumNeighbour
    pooling = "sum"


class GCNII(Architecture):
    """Deep convolutions with initial residual and identity mapping (Chen et al., ICML 2020)."""

    ALPHA, THETA = 0.1, 0.5  # the paper's α and λ for citation graphs

    def extractor(self, num_features: int) -> list[nn.Module]:
        """Returns a linear layer, then LAYERS convolutions with β_l = log(θ/l + 1)."""
        betas = [math.log(self.THETA / l + 1) for l in range(1, self.spec.layers + 1)]
        return [
            Dense(num_features, self.width),
            *(InitialResidual(self.width, self.ALPHA, beta) for beta in betas),
        ]

    def nodes(self, graph: Graph, rng: Noise | None) -> Tensor:
        """Computes h_0 = ReLU(X W + b), then h = ReLU(layer(h, h_0))."""
        first, *others = self.layers
        h = h_0 = F.relu(first(self.features(graph), graph))
        for layer in others:
            h = F.relu(layer(dropout(h, self.dropout, rng), h_0, graph))
        return h


# ---- smoothed features: LAYERS = K hops ----


class SGC(Architecture):
    """A linear model of smoothed features, S^K X W (Wu et al., ICML 2019).

    W is a product of two factors, so that there is an embedding.
    """

    def extractor(self, num_features: int) -> list[nn.Module]:
        """Returns one linear map of the smoothed features."""
        return [Dense(num_features, self.width)]

    def coefficients(self) -> tuple[float, ...]:
        """Returns c_0 ... c_K of the polynomial that smooths the features."""
        return power(self.spec.layers)

    def nodes(self, graph: Graph, rng: Noise | None) -> Tensor:
        """Computes (Σ_k c_k S^k X) W + b."""
        return self.layers[0](self.features(graph, self.coefficients()), graph)


class SSGC(SGC):
    """SGC with all hops averaged: (α X + (1-α)/K Σ_k S^k X) W (Zhu & Koniusz, ICLR 2021)."""

    ALPHA = 0.05  # as in the paper

    def coefficients(self) -> tuple[float, ...]:
        """Returns α, then (1-α)/K for every hop."""
        return (self.ALPHA,) + ((1 - self.ALPHA) / self.spec.layers,) * self.spec.layers


class SIGN(Architecture):
    """A two-layer MLP on all concatenated hops, [X ‖ SX ‖ ... ‖ S^K X] (Frasca et al., 2020).

    The hops are concatenated before the first layer, as in O-pFGL.
    """

    def extractor(self, num_features: int) -> list[nn.Module]:
        """Returns one linear map of the K + 1 concatenated hops."""
        return [Dense((self.spec.layers + 1) * num_features, self.width)]

    def nodes(self, graph: Graph, rng: Noise | None) -> Tensor:
        """Computes ReLU(Σ_k S^k X W_k + b)."""
        hops = [self.features(graph, power(k)) for k in range(self.spec.layers + 1)]

        def concatenated(weight: Tensor) -> Tensor:
            parts = zip(hops, weight.chunk(len(hops), -2), strict=True)
            return reduce(torch.add, [times(part) for times, part in parts])

        return F.relu(self.layers[0](concatenated, graph))


class GAMLP(Architecture):
    """Attention over hops for each node, against a reference (JK form: Zhang et al., KDD 2022).

    The reference is computed from all hops.
    """

    def extractor(self, num_features: int) -> list[nn.Module]:
        """Returns one linear map per hop, one for the reference, and one for the attention.

        The maps per hop are the authors' `pre_process`, which is an MLP there.
        """
        hops, width = self.spec.layers + 1, self.width
        return [
            *(Dense(num_features, width) for _ in range(hops)),
            Dense(hops * width, width),
            Dense(2 * width, 1),
        ]

    def nodes(self, graph: Graph, rng: Noise | None) -> Tensor:
        """Computes ReLU(Σ_k α_k H_k) with H_k = S^k X W_k + b_k, α = softmax_k σ(a·[R ‖ H_k]),
        R = ReLU([H_0 ‖ ... ‖ H_K] U).
        """
        *each, reference, score = self.layers
        smoothed = [layer(self.features(graph, power(k)), graph) for k, layer in enumerate(each)]
        H = torch.stack(smoothed, 1)
        R = dropout(F.relu(reference(graph.matmul(H.flatten(1)), graph)), self.dropout, rng)
        # The authors offer σ and ReLU. R is the same for all hops, so it would cancel in a softmax
        # of linear pieces. Therefore this is σ.
        pairs = torch.cat([R.unsqueeze(1).expand_as(H), H], 2)
        delta = torch.sigmoid(score(graph.matmul(pairs), graph))
        return F.relu((delta.softmax(1) * H).sum(1))


# ---- smoothed predictions: LAYERS = K hops ----


class APPNP(Architecture):
    """A two-layer MLP, then K steps of personalised PageRank (Gasteiger et al., ICLR 2019).

    PageRank propagates the predictions of the MLP.
    """

    ALPHA = 0.1  # the paper's teleport probability for citation graphs
    kind: ClassVar[str] = "sym"

    def extractor(self, num_features: int) -> list[nn.Module]:
        """Returns the first layer of the MLP."""
        return [Dense(num_features, self.width)]

    def coefficients(self) -> tuple[float, ...]:
        """Returns the coefficients of K steps of z ← (1-α) S z + α h.

        They are α (1-α)^k for k < K, and (1-α)^K for the last.
        """
        stay = 1 - self.ALPHA
        return (*(self.ALPHA * stay**k for k in range(self.spec.layers)), stay**self.spec.layers)

    def nodes(self, graph: Graph, rng: Noise | None) -> Tensor:
        """Computes ReLU(X W + b), and propagates it if the head is linear."""
        h = F.relu(self.layers[0](self.features(graph), graph))
        return polynomial(graph, h, self.coefficients(), self.kind) if self.linear else h

    def logits(self, z: Tensor, graph: Graph, rng: Noise | None) -> Tensor:
        """Applies the second layer of the MLP, then propagates its output.

        It is cheaper to propagate one column per class than `width` columns.
        """
        logits = super().logits(z, graph, rng)
        return logits if self.linear else polynomial(graph, logits, self.coefficients(), self.kind)


class DGCN(APPNP):
    """Decoupled GCN of FedStruct: LayerNorm, MLP, K steps (Aliakbari et al., ICLR 2025).

    The MLP has two layers. A step is a product with D̃^-1 (A+I).
    """

    kind = "row"

    @classmethod
    def implied_options(cls, layers: int) -> frozenset[str]:
        """Returns "norm", the LayerNorm of the features."""
        return frozenset({"norm"})

    def coefficients(self) -> tuple[float, ...]:
        """Returns the coefficients of the K-th power."""
        return power(self.spec.layers)


ARCHITECTURES: dict[str, type[Architecture]] = {
    model.__name__.lower(): model
    for model in (MLP, GCN, GAT, SAGE, GIN, GCNII, SGC, SSGC, SIGN, GAMLP, APPNP, DGCN)
}
