"""Twelve architectures, each an extractor and a head.

    message passing        mlp · gcn · gat · sage · gin · gcnii
    features smoothed      sgc · ssgc · sign · gamlp
    predictions smoothed   appnp · dgcn

`fedloom.nn.build` makes one from a spec such as "gcn-4x128".
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
from fedloom.nn.model import Model
from fedloom.nn.smoothing import polynomial, power

# ---- message passing ----


class LayerByLayer(Model):
    """One kind of layer, repeated: what the next five share. Dropout is on the input of every layer but the first."""

    accepts = Model.accepts | {"jk"}
    layer: ClassVar[type[Dense]]

    @classmethod
    def implied(cls, layers: int) -> frozenset[str]:
        """The head takes the last layer; a single one stays with the extractor, or there would be no embedding."""
        return frozenset({"linear"} if layers == 1 else ())

    def extractor(self, num_features: int) -> list[nn.Module]:
        """LAYERS layers, less the one that is the head."""
        depth = self.spec.layers - (not self.linear)
        widths = self.spec.widths if len(self.spec.widths) > 1 else self.spec.widths * depth
        if len(widths) != depth:
            given = "-".join(map(str, widths))
            raise ConfigError(
                f"model width {given!r}: {self.spec.name} has {depth} hidden layers here, give one width or {depth}"
            )
        return [self.layer(*sizes) for sizes in pairwise((num_features, *widths))]

    def last(self, num_classes: int) -> nn.Module:
        """One more layer of the kind, unless the head is to be linear."""
        return (
            super().last(num_classes)
            if self.linear
            else self.layer(self.width, num_classes, last=True)
        )

    def activation(self, h: Tensor) -> Tensor:
        """What follows every layer of the extractor; h is overwritten."""
        return h.relu_()

    def nodes(self, graph: Graph, rng: Noise | None) -> Tensor:
        """The last layer's output, or with +jk the maximum over all layers'."""
        first, *others = self.layers
        assert isinstance(first, Dense)
        outputs = [self.activation(first.of_features(self, graph))]
        for layer in others:
            outputs.append(
                self.activation(layer(graph.matmul(dropout(outputs[-1], self.dropout, rng)), graph))
            )
        return reduce(maximum, outputs) if "jk" in self.spec.options else outputs[-1]


class MLP(LayerByLayer):
    """Linear layers with ReLU between them, blind to edges."""

    layer = Dense


class GCN(LayerByLayer):
    """Graph convolutions, S h W with S = D̃^-1/2 (A+I) D̃^-1/2 (Kipf & Welling, ICLR 2017)."""

    layer = Convolution


class GAT(LayerByLayer):
    """Attention over neighbours, 8 heads side by side, ELU (Veličković et al., ICLR 2018; no dropout on the attention)."""

    layer = Attention

    def activation(self, h: Tensor) -> Tensor:
        """ELU, as in the paper."""
        return F.elu_(h)


class SAGE(LayerByLayer):
    """Own features and the mean of the neighbours', each with its weights (GraphSAGE: Hamilton et al., NeurIPS 2017)."""

    layer = MeanNeighbour


class GIN(LayerByLayer):
    """An MLP on (1 + ε) h plus the sum of the neighbours' h; sum pooling (Xu et al., ICLR 2019)."""

    layer = SumNeighbour
    pooling = "sum"


class GCNII(Model):
    """Deep convolutions that keep a share of the first layer and of the identity (Chen et al., ICML 2020)."""

    ALPHA, THETA = 0.1, 0.5  # the paper's α and λ for citation graphs

    def extractor(self, num_features: int) -> list[nn.Module]:
        """A linear layer, then LAYERS convolutions with β_l = log(θ/l + 1)."""
        betas = [math.log(self.THETA / l + 1) for l in range(1, self.spec.layers + 1)]
        return [
            Dense(num_features, self.width),
            *(InitialResidual(self.width, self.ALPHA, beta) for beta in betas),
        ]

    def nodes(self, graph: Graph, rng: Noise | None) -> Tensor:
        """h_0 = ReLU(X W + b), then h = ReLU(layer(h, h_0))."""
        first, *others = self.layers
        h = h_0 = F.relu(first(self.features(graph), graph))
        for layer in others:
            h = F.relu(layer(dropout(h, self.dropout, rng), h_0, graph))
        return h


# ---- features smoothed: LAYERS = K hops ----


class SGC(Model):
    """S^K X W, linear throughout (Wu et al., ICML 2019), with W in two factors so that there is an embedding."""

    def extractor(self, num_features: int) -> list[nn.Module]:
        """One linear map of the smoothed features."""
        return [Dense(num_features, self.width)]

    def coefficients(self) -> tuple[float, ...]:
        """c_0 ... c_K of the polynomial that smooths the features."""
        return power(self.spec.layers)

    def nodes(self, graph: Graph, rng: Noise | None) -> Tensor:
        """(Σ_k c_k S^k X) W + b."""
        return self.layers[0](self.features(graph, self.coefficients()), graph)


class SSGC(SGC):
    """SGC with all hops averaged: (α X + (1-α)/K Σ_k S^k X) W (Zhu & Koniusz, ICLR 2021)."""

    ALPHA = 0.05  # the paper's

    def coefficients(self) -> tuple[float, ...]:
        """α, then (1-α)/K for every hop."""
        return (self.ALPHA,) + ((1 - self.ALPHA) / self.spec.layers,) * self.spec.layers


class SIGN(Model):
    """A two-layer MLP on all hops side by side, [X ‖ SX ‖ ... ‖ S^K X] (Frasca et al., 2020; joined first, as O-pFGL does)."""

    def extractor(self, num_features: int) -> list[nn.Module]:
        """One linear map of the K + 1 hops side by side."""
        return [Dense((self.spec.layers + 1) * num_features, self.width)]

    def nodes(self, graph: Graph, rng: Noise | None) -> Tensor:
        """ReLU(Σ_k S^k X W_k + b)."""
        hops = [self.features(graph, power(k)) for k in range(self.spec.layers + 1)]

        def side_by_side(weight: Tensor) -> Tensor:
            return reduce(
                torch.add,
                [
                    times(part)
                    for times, part in zip(hops, weight.chunk(len(hops), -2), strict=True)
                ],
            )

        return F.relu(self.layers[0](side_by_side, graph))


class GAMLP(Model):
    """Every node's own attention over hops, against a reference made of all of them (JK form: Zhang et al., KDD 2022)."""

    def extractor(self, num_features: int) -> list[nn.Module]:
        """One linear map a hop (the authors' `pre_process`, there an MLP), the reference's, and the attention's."""
        hops, width = self.spec.layers + 1, self.width
        return [
            *(Dense(num_features, width) for _ in range(hops)),
            Dense(hops * width, width),
            Dense(2 * width, 1),
        ]

    def nodes(self, graph: Graph, rng: Noise | None) -> Tensor:
        """ReLU(Σ_k α_k H_k), H_k = S^k X W_k + b_k, α = softmax_k σ(a·[R ‖ H_k]), R = ReLU([H_0 ‖ ... ‖ H_K] U)."""
        *each, reference, score = self.layers
        H = torch.stack(
            [layer(self.features(graph, power(k)), graph) for k, layer in enumerate(each)], 1
        )
        R = dropout(F.relu(reference(graph.matmul(H.flatten(1)), graph)), self.dropout, rng)
        # σ and not ReLU (the authors offer both): what is the same for all hops, as R is, cancels in a softmax of linear pieces.
        delta = torch.sigmoid(
            score(graph.matmul(torch.cat([R.unsqueeze(1).expand_as(H), H], 2)), graph)
        )
        return F.relu((delta.softmax(1) * H).sum(1))


# ---- predictions smoothed: LAYERS = K hops ----


class APPNP(Model):
    """A two-layer MLP, its predictions spread by personalised PageRank with K steps (Gasteiger et al., ICLR 2019)."""

    ALPHA = 0.1  # the paper's teleport probability for citation graphs
    kind: ClassVar[str] = "sym"

    def extractor(self, num_features: int) -> list[nn.Module]:
        """The MLP's first layer."""
        return [Dense(num_features, self.width)]

    def coefficients(self) -> tuple[float, ...]:
        """K steps of z ← (1-α) S z + α h, written out: α (1-α)^k, and (1-α)^K for the last."""
        stay = 1 - self.ALPHA
        return (*(self.ALPHA * stay**k for k in range(self.spec.layers)), stay**self.spec.layers)

    def nodes(self, graph: Graph, rng: Noise | None) -> Tensor:
        """ReLU(X W + b), spread here if the head must not."""
        h = F.relu(self.layers[0](self.features(graph), graph))
        return polynomial(graph, h, self.coefficients(), self.kind) if self.linear else h

    def logits(self, z: Tensor, graph: Graph, rng: Noise | None) -> Tensor:
        """The MLP's second layer, then the spreading: it is cheaper over classes than over `width` columns."""
        logits = super().logits(z, graph, rng)
        return logits if self.linear else polynomial(graph, logits, self.coefficients(), self.kind)


class DGCN(APPNP):
    """Decoupled GCN: LayerNorm, a two-layer MLP, K steps of D̃^-1 (A+I) (FedStruct: Aliakbari et al., ICLR 2025)."""

    kind = "row"

    @classmethod
    def implied(cls, layers: int) -> frozenset[str]:
        """The LayerNorm."""
        return frozenset({"norm"})

    def coefficients(self) -> tuple[float, ...]:
        """The K-th power alone."""
        return power(self.spec.layers)


ARCHITECTURES: dict[str, type[Model]] = {
    model.__name__.lower(): model
    for model in (MLP, GCN, GAT, SAGE, GIN, GCNII, SGC, SSGC, SIGN, GAMLP, APPNP, DGCN)
}
