"""The batched form of `label_steps`: clients in the same situation take the same steps, once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fedloom.data.graph import Graph
from fedloom.engines.stacked.lockstep import Batched, Context, run_lockstep
from fedloom.engines.stacked.parameters import KNOWN, parameters_of
from fedloom.nn.architectures import ARCHITECTURES
from fedloom.nn.training import label_steps


class BatchedLabelSteps(Batched):
    """Steps of several models on several graphs, without dropout.

    If all clients have equal models, optimisers, graphs and class weights, one of them takes the
    steps, and the others copy its model and the state of its optimiser. Otherwise all take their
    steps in lockstep.
    """

    def key(self, *args: Any) -> Hashable:
        """Architectures of fedloom with equal specs, and equally many steps."""
        model, optimizer, graph, _, count, _ = args
        if type(model) not in ARCHITECTURES.values() or type(optimizer) not in KNOWN:
            return None
        return (model.form, type(optimizer), type(graph), graph.num_nodes, count)

    def batch(self, calls: Sequence[tuple[Any, ...]], context: Context) -> list[None]:
        """The steps of the first client, if all are equal; otherwise those of all."""
        models, optimizers, graphs, of_class, counts, records = zip(*calls, strict=True)
        if not (_alike(optimizers) and _same(of_class) and _same_graphs(graphs)):
            tasks = [partial(label_steps.function, *call) for call in calls]
            return run_lockstep(tasks, context.group)

        def record(loss: Tensor) -> None:
            for of_client in records:
                of_client(loss)

        label_steps.function(models[0], optimizers[0], graphs[0], of_class[0], counts[0], record)
        for other in optimizers[1:]:
            _follow(other, optimizers[0])
        return [None] * len(calls)


def _same(tensors: Sequence[Tensor | None]) -> bool:
    """Returns whether all are None, or all are equal tensors."""
    first, *others = tensors
    if first is None:
        return all(other is None for other in others)
    return all(other is not None and torch.equal(first, other) for other in others)


def _same_graphs(graphs: Sequence[Graph]) -> bool:
    """Returns whether all graphs have equal nodes, edges and labels."""
    names = [field.name for field in fields(Graph) if "Tensor" in str(field.type)]
    return all(_same([getattr(graph, name) for graph in graphs]) for name in names)


def _alike(optimizers: Sequence[Optimizer]) -> bool:
    """Returns whether all optimisers have equal settings, parameters and states."""

    def settings(optimizer: Optimizer) -> list[dict[str, Any]]:
        return [{**group, "params": len(group["params"])} for group in optimizer.param_groups]

    if any(settings(optimizer) != settings(optimizers[0]) for optimizer in optimizers):
        return False
    states = [[o.state.get(p, {}) for p in parameters_of(o)] for o in optimizers]
    return all(map(_same, zip(*map(parameters_of, optimizers), strict=True))) and all(
        len({frozenset(state) for state in column}) == 1
        and all(_same([state[name] for state in column]) for name in column[0])
        for column in zip(*states, strict=True)
    )


@torch.no_grad()
def _follow(optimizer: Optimizer, leader: Optimizer) -> None:
    """Copies the leader's parameters and their states."""
    for p, of_leader in zip(parameters_of(optimizer), parameters_of(leader), strict=True):
        p.copy_(of_leader)
        own, state = optimizer.state[p], leader.state.get(of_leader, {})
        for name, tensor in state.items():
            if name in own:
                own[name].copy_(tensor)
            else:
                own[name] = tensor.clone()
