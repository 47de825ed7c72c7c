"""Stacked parameters: models of one form share one tensor per parameter; so do their optimisers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from fedloom.nn import optimizers
from fedloom.nn.weights import Slot, slots_of


class ParameterStack:
    """The parameters of models that are alike: a tensor [models, ...] for each, of which every model's own is a row.

    Rows are the models' own `Parameter`s still: what writes to one writes to the stack. A gradient arrives at the tensor if it came by a
    product of the whole stack, at the row if the model was used alone.
    """

    def __init__(self, slots: list[list[Slot]]):
        self.slots = slots
        self.rows = [
            [held[name] for held, name, _ in column] for column in zip(*slots, strict=True)
        ]
        self.tensors = [torch.stack([row.detach() for row in rows]) for rows in self.rows]
        for j, (tensor, rows) in enumerate(zip(self.tensors, self.rows, strict=True)):
            tensor.requires_grad_(rows[0].requires_grad)
            for k, (row, position) in enumerate(zip(rows, tensor.detach().unbind(), strict=True)):
                row.data = position
                row._stack_position = (self, j, k)

    def __len__(self) -> int:
        return len(self.slots)

    def is_of(self, slots: list[list[Slot]]) -> bool:
        """Whether its rows are these models' parameters, in this order, now."""
        return (len(slots), len(slots[0])) == (len(self), len(self.rows)) and all(
            held[name] is row
            for own, *rows in zip(slots, *self.rows, strict=True)
            for (held, name, _), row in zip(own, rows, strict=True)
        )


def position_of(parameter: Tensor) -> tuple[ParameterStack, int, int] | None:
    """The stack that a parameter is in, the number of its tensor there, and its row; None if it is in none."""
    return getattr(parameter, "_stack_position", None)


def unstack(parameters: Iterable[Tensor]) -> None:
    """Has parameters leave their stacks. A stack and its rows know each other: in a circle they would stay until Python looks for
    garbage."""
    for parameter in parameters:
        if position_of(parameter) is not None:
            del parameter._stack_position  # type: ignore[attr-defined]


def tensor_of_rows(parameters: Sequence[Tensor]) -> Tensor | None:
    """The tensor whose rows these are, all of them and in order; None if there is no such."""
    position = position_of(parameters[0])
    if position is None or len(position[0]) != len(parameters):
        return None
    stack, j, _ = position
    return stack.tensors[j] if all(map(is_, stack.rows[j], parameters)) else None


def stacked_parameters(models: Sequence[nn.Module]) -> dict[str, Tensor]:
    """The parameters of models that are alike, by name, each [models, ...]; differentiable."""
    slots = [slots_of(model) for model in models]
    stack = stack_for(slots)
    names = [name for _, _, name in slots[0]]
    if stack is None:
        columns = zip(*([held[name] for held, name, _ in own] for own in slots), strict=True)
        return {name: torch.stack(column) for name, column in zip(names, columns, strict=True)}
    for tensor, rows in zip(stack.tensors, stack.rows, strict=True):
        tensor.requires_grad_(rows[0].requires_grad)
    return dict(zip(names, stack.tensors, strict=True))


def stack_for(slots: list[list[Slot]]) -> ParameterStack | None:
    """The stack of these models: the one they are, a new one if none of them is in any; None if neither."""
    firsts = [own[0][0][own[0][1]] for own in slots]
    if (position := position_of(firsts[0])) is not None:
        return position[0] if position[0].is_of(slots) else None
    free = all(
        isinstance(held[name], nn.Parameter) and position_of(held[name]) is None
        for own in slots
        for held, name, _ in own
    )
    return ParameterStack(slots) if free and len({id(p) for p in firsts}) == len(firsts) else None


# ---- gradients: some at the tensors, some at the rows; what counts is their sum ----


def clear_gradients(parameters: Iterable[Sequence[Tensor]], rows: bool = True) -> None:
    """Forgets the gradients of many clients' parameters: those at the tensors, and (if `rows`) the parameters' own."""
    for own in parameters:
        for p in own:
            if rows:
                p.grad = None
            if (position := position_of(p)) is not None:
                stack, j, _ = position
                stack.tensors[j].grad = None


def hand_out_gradients(parameters: Iterable[Sequence[Tensor]]) -> None:
    """Adds to every parameter's own gradient its row of the tensor's."""
    for own in parameters:
        for p in own:
            if (position := position_of(p)) is not None:
                stack, j, k = position
                if (gathered := stack.tensors[j].grad) is not None:
                    p.grad = gathered[k] if p.grad is None else p.grad + gathered[k]


@torch.no_grad()
def gather_gradients(positions: Sequence[tuple[ParameterStack, int]]) -> bool:
    """Moves the rows' own gradients to the tensors; False if some model has one for a parameter and another has none."""
    for stack, j in positions:
        tensor, rows = stack.tensors[j], stack.rows[j]
        own = [row.grad for row in rows]
        if all(g is None for g in own):
            continue
        if tensor.grad is None:
            if any(g is None for g in own):
                return False
            tensor.grad = torch.stack(own)
        else:
            for k, g in enumerate(own):
                if g is not None:
                    tensor.grad[k] += g
        for row in rows:
            row.grad = None
    return True


# ---- optimisers ----


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """What an optimiser moves, in its order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


KNOWN = (Adam, SGD, optimizers.Adam, optimizers.SGD)  # and no subclass, which may do more


class StackedOptimizer:
    """One optimiser of whole stacks, in position of each model's own, of whose state it has the stack."""

    MOMENTS = ("exp_avg", "exp_avg_sq")

    def __init__(
        self, optimizers: Sequence[Optimizer], positions: Sequence[tuple[ParameterStack, int]]
    ):
        self.optimizers, self.positions = optimizers, positions
        tensors = iter([stack.tensors[j] for stack, j in positions])
        groups = [
            {**group, "params": [next(tensors) for _ in group["params"]]}
            for group in optimizers[0].param_groups
        ]
        self.own = type(optimizers[0])(groups)  # type: ignore[call-arg]
        self.steps = torch.zeros(len(positions), len(optimizers))  # each model's, each parameter's
        self.counted = -1  # the version of `steps` in which all models' were last seen to be equal
        self.adopted: dict[
            int, list[Any]
        ] = {}  # by position, the states of which the optimisers' moments were made rows

    @classmethod
    def of(cls, optimizers: Sequence[Optimizer]) -> StackedOptimizer | None:
        """None unless they are of one kind and move whole stacks, in the stacks' order."""
        kind = type(optimizers[0])
        made_with = [
            [{**group, "params": len(group["params"]), "lr": 0} for group in o.param_groups]
            for o in optimizers
        ]
        if (
            kind not in KNOWN
            or any(type(o) is not kind for o in optimizers)
            or any(own != made_with[0] for own in made_with)
        ):
            return None
        positions: list[tuple[ParameterStack, int]] = []
        for column in zip(*map(parameters_of, optimizers), strict=True):
            position = position_of(column[0])
            if position is None or tensor_of_rows(column) is None:
                return None
            positions.append(position[:2])
        return cls(optimizers, positions)

    def clear(self) -> None:
        """Forgets all gradients."""
        for stack, j in self.positions:
            stack.tensors[j].grad = None
            for row in stack.rows[j]:
                if row.grad is not None:
                    row.grad = None

    def step(self) -> bool:
        """Moves everybody down the gradients that are there; False, and nobody has moved, if they cannot move as one."""
        if not self._agree() or not gather_gradients(self.positions):
            return False
        moved = [
            i for i, (stack, j) in enumerate(self.positions) if stack.tensors[j].grad is not None
        ]
        if isinstance(self.own, Adam):
            self._adopt(moved)
            if not self._count():
                return False
        self.own.step()
        if len(moved) == len(self.positions):
            self.steps += 1
            self.counted += 1
        else:
            self.steps[moved] += 1
        return True

    def _count(self) -> bool:
        """Whether all models have made as many steps; takes their number over. Who steps alone changes the version of `steps`."""
        if self.steps._version != self.counted:
            if not bool((self.steps == self.steps[:, :1]).all()):
                return False
            for i, (stack, j) in enumerate(self.positions):
                if (state := self.own.state.get(stack.tensors[j])) is not None:
                    state["step"] = self.steps[i, 0].clone()
            self.counted = self.steps._version
        return True

    def _agree(self) -> bool:
        """Whether all have the same rate and decay, which may have changed since the last time; takes them over."""
        for g, mine in enumerate(self.own.param_groups):
            lr, decay = (
                self.optimizers[0].param_groups[g][name] for name in ("lr", "weight_decay")
            )
            for optimizer in self.optimizers:
                group = optimizer.param_groups[g]
                if group["lr"] != lr or group["weight_decay"] != decay:
                    return False
            mine["lr"], mine["weight_decay"] = lr, decay
        return True

    def _adopt(self, moved: Sequence[int]) -> None:
        """Makes each optimiser's moments rows of this one's, unless they are: at the first step, and after a resume."""
        states = [o.state for o in self.optimizers]  # a resume gives an optimiser another
        for i in moved:
            stack, j = self.positions[i]
            tensor, rows = stack.tensors[j], stack.rows[j]
            if i in self.adopted and all(map(is_, states, self.adopted[i])):
                continue
            own = [state.get(row) for state, row in zip(states, rows, strict=True)]
            stacks = {name: torch.zeros_like(tensor, requires_grad=False) for name in self.MOMENTS}
            positions = {name: stack.unbind() for name, stack in stacks.items()}
            for k, (optimizer, row) in enumerate(zip(self.optimizers, rows, strict=True)):
                if before := own[k]:
                    self.steps[i, k] = before["step"]
                    for name in self.MOMENTS:
                        positions[name][k].copy_(before[name])
                else:
                    self.steps[i, k] = 0
                optimizer.state[row] = {
                    "step": self.steps[i, k],
                    **{name: positions[name][k] for name in self.MOMENTS},
                }
            self.own.state[tensor] = {"step": self.steps[i, 0].clone(), **stacks}
            self.adopted[i] = states
