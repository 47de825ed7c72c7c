"""Mended graphs: graphs with generated nodes, whose features are dense."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedloom.data.graph import Graph


@dataclass(frozen=True, eq=False)
class Mended(Graph):
    """A graph with generated nodes at its end, whose features may carry gradients.

    Attributes:
        real: The graph without the generated nodes.
        factors: Two matrices, [generated nodes, k] and [k, features], whose product is the features
            of the generated nodes. They are constants. None: there are none. An engine may multiply
            by the factors instead of the features.
    """

    real: Graph = field(kw_only=True)
    factors: tuple[Tensor, Tensor] | None = field(default=None, kw_only=True)

    @property
    def sparse_x(self) -> None:
        """None: sparse features are constants, and no gradient would reach the generator."""

    def project(self, weight: Tensor) -> Tensor:
        """Returns x @ weight. The real nodes' part is computed the fastest way."""
        return torch.cat([self.real.project(weight), self.x[self.real.num_nodes :] @ weight])
