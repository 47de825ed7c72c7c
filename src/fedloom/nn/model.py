"""Model: what all architectures have in common. An extractor (features to `width` columns) and a head (those to class logits)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Generator, Tensor, nn

from fedloom.data.graph import Graph, Task
from fedloom.data.sparse import Sparse
from fedloom.nn.layers import Dense, InputNorm, Noise, Product, dropout
from fedloom.nn.operations import operation
from fedloom.nn.smoothing import caching_pays, polynomial, smoothed
from fedloom.nn.weights import Weights, substituted


@dataclass(frozen=True)
class Spec:
    """A parsed model name: "gcn-4x128+linear" is Spec("gcn", 4, (128,), frozenset({"linear"}))."""

    name: str
    layers: int = 2
    widths: tuple[int, ...] = (64,)  # of every hidden layer, or of each
    options: frozenset[str] = frozenset()

    @property
    def width(self) -> int:
        """The embedding's width."""
        return self.widths[-1]


class Model(nn.Module, ABC):
    """An extractor and a head. Built by `build`.

    The head's parameters are those whose names start with "classifier."; all others belong to the extractor. The state is the
    parameters alone (float32), there are no buffers. A subclass says what its layers are and what they give for every node.
    """

    accepts: ClassVar[frozenset[str]] = frozenset({"linear", "norm"})
    pooling: ClassVar[str] = "mean"

    @classmethod
    def implied(cls, layers: int) -> frozenset[str]:
        """The options that come with this architecture and depth, asked for or not."""
        return frozenset()

    def __init__(self, spec: Spec, num_features: int, num_classes: int, task: Task, dropout: float):
        super().__init__()
        self.spec, self.width, self.task, self.dropout = spec, spec.width, task, dropout
        # Equal for models that differ in their parameters alone; a text, which knows its hash.
        self.form = f"{spec} {num_features} {num_classes} {task} {dropout}"
        # Whether all work on the graph is the extractor's: logits of pooled graphs have no edges to travel on.
        self.linear = task == "graph" or "linear" in spec.options
        self.norm = InputNorm(num_features) if "norm" in spec.options else None
        self.layers = nn.ModuleList(self.extractor(num_features))
        self.classifier = self.last(num_classes)

    @abstractmethod
    def extractor(self, num_features: int) -> list[nn.Module]:
        """The extractor's layers."""

    @abstractmethod
    def nodes(self, graph: Graph, rng: Noise | None) -> Tensor:
        """What the extractor gives for every node: [nodes, width]."""

    def last(self, num_classes: int) -> nn.Module:
        """The head's layer."""
        return Dense(self.width, num_classes)

    def features(self, graph: Graph, coefficients: tuple[float, ...] = (1.0,)) -> Product:
        """The model's input as a product: W ↦ (Σ_k c_k S^k X) W, the quickest way; X is normalised with +norm."""
        project = graph.project if self.norm is None else partial(self.norm, graph)
        if len(coefficients) == 1:
            return project
        # What +norm gives is never kept: it changes as γ and β learn.
        if self.norm is None and caching_pays(graph, len(coefficients) - 1):
            return graph.matmul(smoothed(graph, coefficients))
        return lambda weight: polynomial(graph, project(weight), coefficients)

    def items(self, graph: Graph, rng: Noise | None) -> Tensor:
        """What the extractor gives for every item: [items, width]."""
        h = self.nodes(graph, rng)
        return h if self.task == "node" else _pool(graph, self.pooling) @ h

    def logits(self, z: Tensor, graph: Graph, rng: Noise | None) -> Tensor:
        """What the head gives for every item: [items, classes]."""
        return self.classifier(graph.matmul(dropout(z, self.dropout, rng)), graph)

    def embed(self, graph: Graph, rng: Generator | None = None) -> Tensor:
        """Takes a graph, gives its items' embeddings [items, width]."""
        return embed(self, graph, rng)

    def head(self, z: Tensor, graph: Graph, rng: Generator | None = None) -> Tensor:
        """Takes embeddings [items, width] and their graph, gives logits [items, classes]."""
        return head(self, graph, rng, z)

    def forward(self, graph: Graph, rng: Generator | None = None) -> Tensor:
        """Takes a graph, gives its items' logits [items, classes]."""
        return forward(self, graph, rng)


def _pool(graph: Graph, how: str) -> Sparse:
    def make() -> Sparse:
        batch = graph.batch
        assert batch is not None, "a graph-level model got a graph without `batch`"
        size = torch.bincount(batch, minlength=graph.num_items)
        share = 1.0 / size[batch] if how == "mean" else torch.ones(len(batch))
        return Sparse.from_edges(
            batch, torch.arange(len(batch)), share, (graph.num_items, len(batch))
        )

    return graph.cached(("pool", how), make)


# ---- passes through a model ----


@operation
def embed(model: Model, graph: Graph, rng: Noise | None) -> Tensor:
    """The extractor: embeddings [items, width]."""
    return model.items(graph, rng)


@operation
def head(model: Model, graph: Graph, rng: Noise | None, z: Tensor) -> Tensor:
    """The head: logits [items, classes] from embeddings."""
    return model.logits(z, graph, rng)


@operation
def forward(model: Model, graph: Graph, rng: Noise | None) -> Tensor:
    """Both: logits [items, classes]."""
    return model.logits(model.items(graph, rng), graph, rng)


@operation
def forward_with(model: Model, graph: Graph, weights: Weights) -> Tensor:
    """Logits [items, classes] of a model with weights that are not its own, without dropout."""
    with substituted(model, weights):
        out: Tensor = model(graph)
        return out
