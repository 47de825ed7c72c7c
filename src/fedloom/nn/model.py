"""Model: the base class of all architectures.

A model is an extractor, which maps features to embeddings of `width` columns, and a head, which
maps embeddings to class logits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
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
    widths: tuple[int, ...] = (64,)  # one width for all hidden layers, or one for each
    options: frozenset[str] = frozenset()

    @property
    def width(self) -> int:
        """The width of the embedding."""
        return self.widths[-1]


class Model(nn.Module, ABC):
    """An extractor and a head. `fedloom.nn.build` builds models.

    The names of the head's parameters start with "classifier.". All other parameters belong to the
    extractor. The parameters are float32 and are the whole state: no buffer travels. There is no
    training flag: dropout is applied if and only if `rng` is given.

    Attributes:
        width: The width of the embedding.
        task: "node" or "graph".
        dropout: The probability of dropout in front of the head.
        form: Equal for models that differ only in their parameters.
        linear: Whether only the extractor uses the edges.
        classifier: The head.
    """

    width: int
    task: Task
    dropout: float
    form: str
    linear: bool
    classifier: nn.Module

    @abstractmethod
    def items(self, graph: Graph, rng: Noise | None) -> Tensor:
        """Returns the output of the extractor for every item, [items, width]."""

    @abstractmethod
    def logits(self, z: Tensor, graph: Graph, rng: Noise | None) -> Tensor:
        """Returns the output of the head for every item, [items, classes]."""

    def embed(self, graph: Graph, rng: Generator | None = None) -> Tensor:
        """Returns the embeddings of a graph's items, [items, width]."""
        return embed(self, graph, rng)

    def head(self, z: Tensor, graph: Graph, rng: Generator | None = None) -> Tensor:
        """Returns logits [items, classes] from embeddings [items, width] and their graph."""
        return head(self, graph, rng, z)

    def forward(self, graph: Graph, rng: Generator | None = None) -> Tensor:
        """Returns the logits of a graph's items, [items, classes]."""
        return forward(self, graph, rng)


class Architecture(Model):
    """Base of fedloom's own architectures. A subclass defines the layers and their output.

    Attributes:
        accepts: The options that a spec of this architecture may have.
        pooling: How a graph-level task pools nodes, "mean" or "sum".
    """

    accepts: ClassVar[frozenset[str]] = frozenset({"linear", "norm"})
    pooling: ClassVar[str] = "mean"

    @classmethod
    def implied_options(cls, layers: int) -> frozenset[str]:
        """Returns the options that this architecture always has at this depth."""
        return frozenset()

    def __init__(self, spec: Spec, num_features: int, num_classes: int, task: Task, dropout: float):
        super().__init__()
        self.spec, self.width, self.task, self.dropout = spec, spec.width, task, dropout
        # Equal for models that differ only in their parameters. A string caches its hash.
        self.form = f"{spec} {num_features} {num_classes} {task} {dropout}"
        # Whether only the extractor uses the edges. Logits of pooled graphs have no edges.
        self.linear = task == "graph" or "linear" in spec.options
        self.norm = InputNorm(num_features) if "norm" in spec.options else None
        self.layers = nn.ModuleList(self.extractor(num_features))
        self.classifier = self.last(num_classes)

    @abstractmethod
    def extractor(self, num_features: int) -> list[nn.Module]:
        """Returns the layers of the extractor."""

    @abstractmethod
    def nodes(self, graph: Graph, rng: Noise | None) -> Tensor:
        """Returns the output of the extractor for every node, [nodes, width]."""

    def last(self, num_classes: int) -> nn.Module:
        """Returns the layer of the head."""
        return Dense(self.width, num_classes)

    def features(self, graph: Graph, coefficients: tuple[float, ...] = (1.0,)) -> Product:
        """Returns the input of the model as a product, W ↦ (Σ_k c_k S^k X) W.

        X is normalised with +norm. The product is computed in the fastest order.
        """
        project = graph.project if self.norm is None else partial(self.norm, graph)
        if len(coefficients) == 1:
            return project
        # The output of +norm is never cached, because it changes with γ and β.
        if self.norm is None and caching_pays(graph, len(coefficients) - 1):
            return graph.matmul(smoothed(graph, coefficients))
        return lambda weight: polynomial(graph, project(weight), coefficients)

    def items(self, graph: Graph, rng: Noise | None) -> Tensor:
        """Returns the output of the extractor for every item, [items, width]."""
        h = self.nodes(graph, rng)
        return h if self.task == "node" else pooling_matrix(graph, self.pooling) @ h

    def logits(self, z: Tensor, graph: Graph, rng: Noise | None) -> Tensor:
        """Returns the output of the head for every item, [items, classes]."""
        return self.classifier(graph.matmul(dropout(z, self.dropout, rng)), graph)


def pooling_matrix(graph: Graph, how: str) -> Sparse:
    """Returns the matrix [items, nodes] that pools the nodes of each small graph.

    how: "mean" or "sum".
    """

    def make() -> Sparse:
        batch = graph.batch
        assert batch is not None, "a graph-level model got a graph without `batch`"
        size = torch.bincount(batch, minlength=graph.num_items)
        share = 1.0 / size[batch] if how == "mean" else torch.ones(len(batch))
        return Sparse.from_edges(
            batch, torch.arange(len(batch)), share, (graph.num_items, len(batch))
        )

    return graph.cached(("pool", how), make)


# ---- forward passes ----


@operation
def embed(model: Model, graph: Graph, rng: Noise | None) -> Tensor:
    """Runs the extractor. Returns embeddings [items, width]."""
    return model.items(graph, rng)


@operation
def head(model: Model, graph: Graph, rng: Noise | None, z: Tensor) -> Tensor:
    """Runs the head on embeddings. Returns logits [items, classes]."""
    return model.logits(z, graph, rng)


@operation
def forward(model: Model, graph: Graph, rng: Noise | None) -> Tensor:
    """Runs extractor and head. Returns logits [items, classes]."""
    return model.logits(model.items(graph, rng), graph, rng)


@operation
def embed_and_head(model: Model, graph: Graph, rng: Generator | None) -> tuple[Tensor, Tensor]:
    """Runs extractor and head. Returns embeddings [items, width] and logits [items, classes]."""
    z = model.embed(graph, rng)
    return z, model.head(z, graph, rng)


@operation
def forward_with(model: Model, graph: Graph, weights: Weights) -> Tensor:
    """Returns logits [items, classes] of a model with other weights, without dropout."""
    with substituted(model, weights):
        out: Tensor = model(graph)
        return out


@operation
def generated_loss(
    model: Model, graph: Graph, generator: nn.Module, weights: Weights, noise: Tensor, y: Tensor
) -> Tensor:
    """Returns the cross-entropy of a linear head on embeddings that a generator makes.

    The head has no dropout. No gradient reaches the generator.

    Args:
        model: The model whose head is used.
        graph: Any graph. A linear head does not use its edges.
        generator: A module that takes noise [m, ...] and classes [m], and returns [m, width].
        weights: The generator's weights, which need no gradient.
        noise: The generator's noise.
        y: Classes [m], for the generator and the cross-entropy.
    """
    with substituted(generator, weights):
        z = generator(noise, y)
    return F.cross_entropy(head(model, graph, None, z), y)
