"""What a recording runs: operations on the stacked models of a whole group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from fedloom.core.client import Client
from fedloom.core.message import Stack
from fedloom.core.shared_rows import SharedRows, Sharing
from fedloom.data.graph import Graph
from fedloom.engines.stacked.graphs import stack_of
from fedloom.engines.stacked.group import Group
from fedloom.engines.stacked.local_training import LocalPass, Targets, no_masks
from fedloom.engines.stacked.parameters import (
    AnyOptimizer,
    AnyStack,
    ParameterStack,
    SharedStack,
    StackedOptimizer,
    existing_stack,
)
from fedloom.engines.stacked.receptive_field import Plan, layers_of
from fedloom.nn.model import Model, forward
from fedloom.nn.weights import slots_of, substituted

# The largest share of rows that clients own, above which sharing the others gains nothing.
OWNED = 0.8


# ---- weights ----


@torch.no_grad()
def load(group: Group, stack: AnyStack, new: Mapping[int, Tensor]) -> None:
    """Overwrites parameters of all models.

    Args:
        group: The group.
        stack: The parameters of its models.
        new: By the number of the parameter, the values: one for all models, or [models, ...].
    """
    shared = _shared(group, stack)
    if shared is not None and any(
        j in shared.shared and value.dim() > stack.rows[j][0].dim() for j, value in new.items()
    ):
        group.separate()
        shared = None
    for j, value in new.items():
        if shared is not None and j in shared.shared:
            shared.load(j, value)
        else:
            stack.tensors[j].copy_(value)


def read(group: Group, stack: AnyStack, j: int) -> Stack:
    """Returns one parameter of all models, without copying it."""
    shared = _shared(group, stack)
    if shared is not None and j in shared.shared:
        return SharedRows(shared.tensors[j].detach(), shared.sharing)
    return stack.tensors[j].detach()


def kept(group: Group, stack: AnyStack, j: int) -> Stack:
    """Returns one parameter of all models as it is now, whatever happens to the models later."""
    shared = _shared(group, stack)
    if shared is not None and j in shared.shared:
        return shared.hand_out(j)
    return stack.tensors[j].detach().clone(memory_format=torch.contiguous_format)


def copied_models(group: Group, clients: Sequence[Client]) -> dict[str, Stack] | None:
    """Returns copies of the weights of the clients' models, by name; None if they are no stack."""
    held = [client.state.get("model") for client in clients]
    models = [model for model in held if isinstance(model, Model)]
    if len(models) < len(held):
        return None
    stack = existing_stack([slots_of(model) for model in models])
    if stack is None:
        return None
    names = [name for _, _, name in stack.slots[0]]
    return {name: kept(group, stack, j) for name, j in sorted(zip(names, count(), strict=False))}


def _shared(group: Group, stack: AnyStack) -> SharedStack | None:
    """Returns the shared rows of these parameters. Others of the group are separated."""
    if group.shared is not None and group.shared.stack is not stack:
        group.separate()
    return group.shared


# ---- scores ----


@torch.no_grad()
def logits(
    group: Group, models: Sequence[Model], stack: AnyStack, graphs: Sequence[Graph]
) -> Tensor:
    """Returns the logits of all items of all graphs, [items, classes], without dropout."""
    first, joint = models[0], stack_of(graphs, group)
    names = [name for _, _, name in stack.slots[0]]
    shared, layers = _shared(group, stack), layers_of(first)
    if layers is None:
        with substituted(first, dict(zip(names, stack.tensors, strict=True))):
            return forward.function(first, joint, None)
    sharing = None if shared is None else shared.sharing
    plan = group.cached(
        f"all nodes {first.form}",
        graphs,
        lambda: Plan(layers, joint, torch.ones(joint.num_nodes, dtype=torch.bool)),
    )
    tensors = stack.tensors if shared is None else shared.tensors
    parameters = {name: t.detach() for name, t in zip(names, tensors, strict=True)}
    found, _ = LocalPass(plan, 0.0, sharing).forward(parameters, no_masks)
    rows = plan.rows[-1]
    return found if rows.complete else found.index_select(0, rows.place)


@torch.no_grad()
def logits_with(
    group: Group, models: Sequence[Model], graphs: Sequence[Graph], weights: Mapping[str, Tensor]
) -> Tensor:
    """Returns the logits of all items of all graphs with the same given weights for all."""
    with substituted(models[0], weights):
        return forward.function(models[0], stack_of(graphs, group), None)


def confusion_matrices(group: Group, logits: Tensor, graphs: Sequence[Graph]) -> Tensor:
    """Returns confusion matrices of validation and test items, [graphs, 2, classes, classes].

    logits: of all items of all graphs, [items, classes].
    """
    C, K = graphs[0].num_classes, len(graphs)

    def make() -> tuple[Tensor, Tensor]:
        """Rows of all held-out items, and the first cell of each one's row in the matrices."""
        masks = [torch.cat([getattr(g, part) for g in graphs]) for part in ("val", "test")]
        y, items = torch.cat([g.y for g in graphs]), torch.tensor([g.num_items for g in graphs])
        owner = torch.repeat_interleave(torch.arange(K), items)
        rows = [mask.nonzero().flatten() for mask in masks]
        first = [((2 * owner[r] + part) * C + y[r]) * C for part, r in enumerate(rows)]
        return torch.cat(rows), torch.cat(first)

    rows, first = group.cached("held-out items", graphs, make)
    cells = first + logits.argmax(1).index_select(0, rows)
    return torch.bincount(cells, minlength=2 * K * C * C).view(K, 2, C, C)


# ---- training ----


class Penalty(NamedTuple):
    """‖θ − value‖² if `squared`, else ⟨θ, value⟩, over all parameters θ.

    values: by the number of the parameter, one for all models or one of each client.
    """

    squared: bool
    values: Mapping[int, Any]

    def equals(self, other: Penalty) -> bool:
        """Returns whether another penalty has the very same values."""
        return self.squared == other.squared and all(
            value is other.values[j] for j, value in self.values.items()
        )


class Training:
    """Training steps of all clients of a group: cross-entropy with penalties."""

    def __init__(
        self,
        group: Group,
        model: Model,
        stack: AnyStack,
        optimizer: AnyOptimizer,
        plan: Plan,
        targets: Targets,
        streams: Sequence[Generator] | None,
        penalties: Sequence[tuple[float, Penalty]],
    ):
        self.group, self.model, self.stack, self.optimizer = group, model, stack, optimizer
        self.plan, self.targets, self.streams, self.penalties = plan, targets, streams, penalties
        self.names = [name for _, _, name in stack.slots[0]]

    @classmethod
    def of(
        cls,
        group: Group,
        models: Sequence[Model],
        stack: AnyStack,
        optimizer: AnyOptimizer | None,
        graphs: Sequence[Graph],
        streams: Sequence[Generator] | None,
        of_class: Tensor | None,
        penalties: Sequence[tuple[float, Penalty]],
    ) -> Training | None:
        """Returns None if the model or the optimiser has no form for the group.

        Args:
            group: The group.
            models: Its models, of one form.
            stack: Their parameters.
            optimizer: Their optimisers.
            graphs: The graph of each client.
            streams: Each client's random stream for dropout. None: no dropout.
            of_class: Class weights, [clients, classes] or [classes].
            penalties: Factors and penalties.
        """
        layers = layers_of(models[0])
        if layers is None or optimizer is None or any(g.task != "node" for g in graphs):
            return None
        if sorted(j for s, j in optimizer.positions if s is stack) != list(range(len(stack.rows))):
            return None
        if len(optimizer.positions) != len(stack.rows) or not optimizer.ready():
            return None
        form = models[0].form
        plan = group.cached(
            f"training nodes {form}",
            graphs,
            lambda: Plan(layers, stack_of(graphs, group), torch.cat([g.train for g in graphs])),
        )
        weight = () if of_class is None else (of_class,)
        targets = group.cached("targets", (plan, *weight), lambda: Targets(plan, of_class))
        return cls(group, models[0], stack, optimizer, plan, targets, streams, penalties)

    @torch.no_grad()
    def steps(self, number: int) -> Tensor:
        """Takes some steps. Returns each client's cross-entropy before each, [steps, clients]."""
        shared = self._share()
        if shared is not None:
            shared.prepare_to_change()
        tensors = self.stack.tensors if shared is None else shared.tensors
        optimizer = self.optimizer.own if shared is None else shared.own
        self.optimizer.configure(optimizer)
        parameters = {n: t.detach() for n, t in zip(self.names, tensors, strict=True)}
        through = LocalPass(
            self.plan, self.model.dropout, None if shared is None else shared.sharing
        )
        rows = []
        for masks in through.masks(parameters, self.streams, number):
            logits, kept = through.forward(parameters, masks)
            of_rows, gradient = self.targets.gradient(logits)
            found = through.backward(parameters, kept, gradient)
            for factor, penalty in self.penalties:
                for j, name in enumerate(self.names):
                    self._add_penalty(found[name], parameters[name], j, factor, penalty, shared)
            for name, tensor in zip(self.names, tensors, strict=True):
                tensor.grad = found[name]
            self.optimizer.advance(optimizer)
            rows.append(of_rows)
        for tensor in tensors:
            tensor.grad = None
        return self.targets.losses(rows)

    def _add_penalty(
        self,
        gradient: Tensor,
        parameter: Tensor,
        j: int,
        factor: float,
        penalty: Penalty,
        shared: SharedStack | None,
    ) -> None:
        value = penalty.values[j]
        value = value if isinstance(value, Tensor) else value.dense
        if shared is not None and j in shared.shared:
            value = value.index_select(0, shared.sharing.column)
        if penalty.squared:
            gradient.add_(parameter - value, alpha=2 * factor)
        else:
            gradient.add_(value, alpha=factor)

    def _share(self) -> SharedStack | None:
        """Returns the parameters in shared rows, if clients own few enough rows themselves."""
        group, shared = self.group, _shared(self.group, self.stack)
        sharing = self._sharing()
        if shared is not None and shared.sharing is sharing:
            return shared
        group.separate()
        if (
            sharing is not None
            and isinstance(self.stack, ParameterStack)
            and isinstance(self.optimizer, StackedOptimizer)
        ):
            weights = {term.weight for term in self.plan.layers[0].terms}
            numbers = [j for j, name in enumerate(self.names) if name in weights]
            group.shared = SharedStack.of(self.optimizer, self.stack, numbers, sharing)
        return group.shared

    def _sharing(self) -> Sharing | None:
        if self.plan.smoothed is not None or any(
            not isinstance(value, Tensor)
            for _, penalty in self.penalties
            for value in penalty.values.values()
        ):
            return None
        return self.plan.sharing if self.plan.owned.float().mean() < OWNED else None
