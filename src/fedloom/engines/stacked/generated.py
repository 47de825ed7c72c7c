"""The batched form of a loss on generated embeddings."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.data.graph import Graph
from fedloom.engines.stacked.graphs import GraphStack
from fedloom.engines.stacked.lockstep import Batched, Context
from fedloom.engines.stacked.parameters import parameter_at, stacked_parameters
from fedloom.engines.stacked.tensors import common_weights, split_rows
from fedloom.nn.architectures import ARCHITECTURES
from fedloom.nn.weights import Weights, slots_of, substituted


class BatchedGeneratedLoss(Batched):
    """Losses of several heads on the embeddings of one generator."""

    def key(self, *args: Any) -> Hashable:
        """Models of one form, generators of one form, equally many embeddings."""
        model, _, generator, weights, noise, _ = args
        if type(model) not in ARCHITECTURES.values() or not model.linear:
            return None
        if any(tensor.requires_grad for tensor in weights.values()):
            return None
        trained = [parameter_at(slot).requires_grad for slot in slots_of(model)]
        shapes = [(name, tensor.shape) for name, tensor in weights.items()]
        return (model.form, *trained, type(generator), *shapes, noise.shape)

    def batch(self, calls: Sequence[tuple[Any, ...]], context: Context) -> list[Tensor]:
        """One pass of the generator for all clients, and one of the stacked heads."""
        models, graphs, generators, weights, noise, y = zip(*calls, strict=True)
        size, labels = len(y[0]), torch.cat(y)
        shared = common_weights(weights)
        if shared is not None:
            z = _made(generators[0], shared, torch.cat(noise), labels)
        else:  # each client has a generator of its own
            z = torch.cat([_made(*call[2:]) for call in calls])
        blank = context.group.cached(f"{size} embeddings", models, lambda: _blank(graphs, size))
        with substituted(models[0], stacked_parameters(models)):
            logits = models[0].logits(z, blank, None)
        each = F.cross_entropy(logits, labels, reduction="none")
        return split_rows(each.view(len(calls), size).mean(1))


def _made(generator: nn.Module, weights: Weights, noise: Tensor, y: Tensor) -> Tensor:
    with substituted(generator, weights):
        made: Tensor = generator(noise, y)
        return made


def _blank(graphs: Sequence[Graph], size: int) -> GraphStack:
    """Returns graphs of `size` nodes without edges, one for each of the given graphs."""
    none, unlabelled = torch.zeros(2, 0, dtype=torch.int64), torch.full((size,), -1)
    return GraphStack(
        [Graph(torch.zeros(size, 0), none, unlabelled, graph.num_classes) for graph in graphs]
    )
