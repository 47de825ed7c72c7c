"""Stacked parameters: models of one form share one tensor per parameter; so do their optimisers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import is_
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from fedloom.core.shared_rows import SharedRows, Sharing
from fedloom.nn import optimizers
from fedloom.nn.private_torch import version
from fedloom.nn.weights import Slot, slots_of


class ParameterStack:
    """The parameters of models of one form: a tensor [models, ...] for each parameter.

    Each row is the `Parameter` of one model, so a write to one is a write to the stack. An
    operation on the whole stack leaves its gradient at the tensor. An operation on one model leaves
    it at the row.
    """

    def __init__(self, slots: list[list[Slot]]):
        self.slots = slots
        self.rows = [list(map(parameter_at, column)) for column in zip(*slots, strict=True)]
        self.tensors = [torch.stack([row.detach() for row in rows]) for rows in self.rows]
        for j, (tensor, rows) in enumerate(zip(self.tensors, self.rows, strict=True)):
            tensor.requires_grad_(rows[0].requires_grad)
            for k, (row, position) in enumerate(zip(rows, tensor.detach().unbind(), strict=True)):
                row.data = position
                row._stack_position = (self, j, k)  # type: ignore[attr-defined]

    def __len__(self) -> int:
        return len(self.slots)

    def is_of(self, slots: list[list[Slot]]) -> bool:
        """Returns whether its rows are the current parameters of these models, in this order."""
        return (len(slots), len(slots[0])) == (len(self), len(self.rows)) and all(
            held[name] is row
            for own, *rows in zip(slots, *self.rows, strict=True)
            for (held, name, _), row in zip(own, rows, strict=True)
        )


def parameter_at(slot: Slot) -> Tensor:
    """Returns the current parameter in a slot of a model."""
    held, short, _ = slot
    parameter = held[short]
    assert parameter is not None  # `slots_of` lists parameters that exist
    return parameter


def position_of(parameter: Tensor) -> tuple[ParameterStack, int, int] | None:
    """Returns a parameter's stack, the number of its tensor, and its row; None if it has none."""
    return getattr(parameter, "_stack_position", None)


def unstack(parameters: Iterable[Tensor]) -> None:
    """Removes parameters from their stacks.

    A stack and its rows refer to each other. Without this, they would stay in memory until the
    garbage collector runs.
    """
    for parameter in parameters:
        if position_of(parameter) is not None:
            del parameter._stack_position  # type: ignore[attr-defined]


def tensor_of_rows(parameters: Sequence[Tensor]) -> Tensor | None:
    """Returns the tensor that these are all the rows of, in order; None if there is none."""
    position = position_of(parameters[0])
    if position is None or len(position[0]) != len(parameters):
        return None
    stack, j, _ = position
    return stack.tensors[j] if all(map(is_, stack.rows[j], parameters)) else None


def stacked_parameters(models: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Returns the parameters of models of one form, by name, each [models, ...]; differentiable."""
    slots = [slots_of(model) for model in models]
    stack = stack_for(slots)
    names = [name for _, _, name in slots[0]]
    if stack is None:
        columns = zip(*(map(parameter_at, own) for own in slots), strict=True)
        return {name: torch.stack(column) for name, column in zip(names, columns, strict=True)}
    for tensor, rows in zip(stack.tensors, stack.rows, strict=True):
        tensor.requires_grad_(rows[0].requires_grad)
    return dict(zip(names, stack.tensors, strict=True))


def existing_stack(slots: list[list[Slot]]) -> ParameterStack | None:
    """Returns the parameter stack that holds exactly these models; None if there is none."""
    position = position_of(parameter_at(slots[0][0])) if slots[0] else None
    return position[0] if position is not None and position[0].is_of(slots) else None


def stack_for(slots: list[list[Slot]]) -> ParameterStack | None:
    """Returns the parameter stack of these models.

    It makes a new one if no model is in any. Returns None if some models are in another stack.
    """
    firsts = [parameter_at(own[0]) for own in slots]
    if position_of(firsts[0]) is not None:
        return existing_stack(slots)
    parameters = [parameter_at(slot) for own in slots for slot in own]
    free = all(isinstance(p, nn.Parameter) and position_of(p) is None for p in parameters)
    return ParameterStack(slots) if free and len({id(p) for p in firsts}) == len(firsts) else None


class ChosenStack:
    """Copies of the parameters of some models of a stack. `write_back` writes them into the stack.

    chosen: the numbers of the models.
    """

    def __init__(self, stack: ParameterStack, chosen: Tensor):
        self.stack, self.chosen = stack, chosen
        numbers: list[int] = chosen.tolist()
        self.slots = [stack.slots[k] for k in numbers]
        self.rows = [[rows[k] for k in numbers] for rows in stack.rows]
        self.tensors = [tensor.detach().index_select(0, chosen) for tensor in stack.tensors]

    @torch.no_grad()
    def write_back(self) -> None:
        """Writes the copies into the stack."""
        for tensor, copy in zip(self.stack.tensors, self.tensors, strict=True):
            tensor.index_copy_(0, self.chosen, copy)


AnyStack: TypeAlias = ParameterStack | ChosenStack

# ---- gradients: the sum of those at the tensors and those at the rows ----


def clear_gradients(parameters: Iterable[Sequence[Tensor]], rows: bool = True) -> None:
    """Removes the gradients at the tensors and, if `rows`, those of the parameters themselves."""
    for own in parameters:
        for p in own:
            if rows:
                p.grad = None
            if (position := position_of(p)) is not None:
                stack, j, _ = position
                stack.tensors[j].grad = None


def hand_out_gradients(parameters: Iterable[Sequence[Tensor]]) -> None:
    """Adds the tensors' gradients to the gradients of their rows."""
    for own in parameters:
        for p in own:
            if (position := position_of(p)) is not None:
                stack, j, k = position
                if (gathered := stack.tensors[j].grad) is not None:
                    p.grad = gathered[k] if p.grad is None else p.grad + gathered[k]


@torch.no_grad()
def gather_gradients(positions: Sequence[tuple[ParameterStack, int]]) -> bool:
    """Moves the rows' gradients to the tensors.

    Returns False if one model has a gradient for a parameter and another has none.
    """
    for stack, j in positions:
        tensor, rows = stack.tensors[j], stack.rows[j]
        own = {k: row.grad for k, row in enumerate(rows) if row.grad is not None}
        if not own:
            continue
        if tensor.grad is None:
            if len(own) < len(rows):
                return False
            tensor.grad = torch.stack(list(own.values()))
        else:
            for k, gradient in own.items():
                tensor.grad[k] += gradient
        for row in rows:
            row.grad = None
    return True


# ---- optimisers ----


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Returns the parameters of an optimiser, in its order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


KNOWN = (Adam, SGD, optimizers.Adam, optimizers.SGD)  # no subclasses: they may do more


class StackedOptimizer:
    """One optimiser of whole stacks, in place of each model's own. It stacks their states."""

    MOMENTS = ("exp_avg", "exp_avg_sq")

    def __init__(
        self, optimizers: Sequence[Optimizer], positions: Sequence[tuple[ParameterStack, int]]
    ):
        self.optimizers, self.positions = optimizers, positions
        self.own = self.optimizer_of([stack.tensors[j] for stack, j in positions])
        self.steps = torch.zeros(len(positions), len(optimizers))  # each model's, each parameter's
        self.counted = -1  # the version of `steps` in which all models had equal numbers
        # By position: the states whose moments have become rows of the stacked moments.
        self.adopted: dict[int, list[Any]] = {}

    def optimizer_of(self, tensors: Sequence[Tensor]) -> Optimizer:
        """Returns an optimiser like those of the models, of other tensors."""
        given = iter(tensors)
        first = self.optimizers[0]
        groups = [
            {**group, "params": [next(given) for _ in group["params"]]}
            for group in first.param_groups
        ]
        made: Optimizer = type(first)(groups)  # type: ignore[call-arg]
        return made

    @classmethod
    def of(cls, optimizers: Sequence[Optimizer]) -> StackedOptimizer | None:
        """Returns None unless the optimisers are of one kind and step whole stacks, in order."""
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
        """Removes all gradients."""
        for stack, j in self.positions:
            stack.tensors[j].grad = None
            for row in stack.rows[j]:
                if row.grad is not None:
                    row.grad = None

    def ready(self) -> bool:
        """Prepares `advance`. Returns False if the models cannot step as one."""
        if not self._agree():
            return False
        if isinstance(self.own, Adam):
            self._adopt(range(len(self.positions)))
        return True

    def equally_many(self) -> bool:
        """Returns whether all models have made equally many steps."""
        return not isinstance(self.own, Adam) or self._count()

    def configure(self, own: Optimizer) -> None:
        """Gives an optimiser of all stacks the learning rates and weight decays of now."""
        for mine, its in zip(self.own.param_groups, own.param_groups, strict=True):
            its["lr"], its["weight_decay"] = mine["lr"], mine["weight_decay"]

    def advance(self, own: Optimizer) -> None:
        """Takes one step of an optimiser of all stacks, whose gradients are at its parameters."""
        if self.equally_many():
            own.step()
            self.steps += 1
            self.counted += 1
        else:
            step_of_each(own, self.steps)

    def step(self) -> bool:
        """Takes one step for all models. Returns False if that is not possible; then none moved."""
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
        """Returns whether all models have made equally many steps, and adopts that number.

        A model that steps alone changes the version of `steps`.
        """
        if version(self.steps) != self.counted:
            if not bool((self.steps == self.steps[:, :1]).all()):
                return False
            for i, (stack, j) in enumerate(self.positions):
                if (state := self.own.state.get(stack.tensors[j])) is not None:
                    state["step"] = self.steps[i, 0].clone()
            self.counted = version(self.steps)
        return True

    def _agree(self) -> bool:
        """Returns whether all have the same learning rate and weight decay, and adopts them."""
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
        """Makes each optimiser's moments rows of this one's: at the first step, after a resume."""
        states = [o.state for o in self.optimizers]  # a resume replaces them
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


class ChosenOptimizer:
    """Copies of the moments of some models of a stacked optimiser; see `ChosenStack`.

    Args:
        whole: The stacked optimiser, which is `ready`.
        stack: The chosen models.
    """

    def __init__(self, whole: StackedOptimizer, stack: ChosenStack):
        self.whole, self.chosen = whole, stack.chosen
        self.positions = [(stack, j) for _, j in whole.positions]
        self.own = whole.optimizer_of([stack.tensors[j] for _, j in whole.positions])
        self.steps = whole.steps[:, self.chosen]
        for i, (held, j) in enumerate(whole.positions):
            if state := whole.own.state.get(held.tensors[j]):
                copies = {n: state[n].index_select(0, self.chosen) for n in whole.MOMENTS}
                self.own.state[stack.tensors[j]] = {"step": self.steps[i, 0].clone(), **copies}

    def ready(self) -> bool:
        """As in `StackedOptimizer`."""
        return True

    def configure(self, own: Optimizer) -> None:
        """As in `StackedOptimizer`."""
        self.whole.configure(own)

    def advance(self, own: Optimizer) -> None:
        """As in `StackedOptimizer`."""
        if not isinstance(own, Adam) or bool((self.steps == self.steps[:, :1]).all()):
            own.step()
            self.steps += 1
        else:
            step_of_each(own, self.steps)

    @torch.no_grad()
    def write_back(self) -> None:
        """Writes the moments and the numbers of steps into the stacked optimiser."""
        self.whole.steps[:, self.chosen] = self.steps
        for (held, j), (stack, _) in zip(self.whole.positions, self.positions, strict=True):
            if state := self.own.state.get(stack.tensors[j]):
                for name in self.whole.MOMENTS:
                    moments = self.whole.own.state[held.tensors[j]][name]
                    moments.index_copy_(0, self.chosen, state[name])


AnyOptimizer: TypeAlias = StackedOptimizer | ChosenOptimizer


@torch.no_grad()
def step_of_each(adam: Optimizer, steps: Tensor) -> None:
    """Takes a step of Adam for models that have made different numbers of steps.

    Args:
        adam: The optimiser of their stacked parameters.
        steps: The steps of each parameter and model so far, [parameters, models]; is counted up.
    """
    steps += 1
    rows = iter(steps.double())
    for group in adam.param_groups:
        (beta1, beta2), decay = group["betas"], group["weight_decay"]
        for p in group["params"]:
            state, t = adam.state[p], next(rows).view(-1, *[1] * (p.dim() - 1))
            gradient = p.grad if not decay else p.grad.add(p, alpha=decay)
            state["exp_avg"].lerp_(gradient, 1 - beta1)
            state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            size = state["exp_avg_sq"].sqrt().div_((1 - beta2**t).sqrt().float()).add_(group["eps"])
            p.sub_((group["lr"] / (1 - beta1**t)).float() * state["exp_avg"] / size)


# ---- shared rows ----


class SharedStack:
    """A parameter stack in which clients share rows of some matrices, and its optimiser.

    While it is in use, the rows of the parameter stack and the moments of the models' own
    optimisers are out of date. `write_back` updates them.

    Attributes:
        stack: The parameter stack.
        sharing: Which clients share which rows.
        tensors: The tensors of the stack; for a matrix with shared rows, its stored rows.
        own: The optimiser of these tensors.
    """

    def __init__(
        self,
        optimizer: StackedOptimizer,
        stack: ParameterStack,
        shared: Sequence[int],
        sharing: Sharing,
    ):
        self.optimizer, self.stack, self.shared, self.sharing = optimizer, stack, shared, sharing
        self.tensors = list(stack.tensors)
        self._handed_out: set[int] = set()  # whose memory somebody else holds
        for j in shared:
            self.tensors[j] = sharing.stored_rows(stack.tensors[j].detach())
        dense = optimizer.own
        self.own = optimizer.optimizer_of([self.tensors[j] for _, j in optimizer.positions])
        for j, tensor in enumerate(stack.tensors):
            state = dense.state.get(tensor)
            if state and j in shared:
                moments = {n: sharing.stored_rows(state[n]) for n in StackedOptimizer.MOMENTS}
                self.own.state[self.tensors[j]] = {"step": state["step"].clone(), **moments}
            elif state:
                self.own.state[tensor] = state

    @classmethod
    def of(
        cls,
        optimizer: StackedOptimizer,
        stack: ParameterStack,
        shared: Sequence[int],
        sharing: Sharing,
    ) -> SharedStack | None:
        """Returns None unless the rows to share, and their histories, are equal at all clients.

        Args:
            optimizer: The optimiser, which is `ready`.
            stack: The parameter stack that it steps.
            shared: The numbers of the tensors with shared rows.
            sharing: Which clients share which rows.
        """
        if not optimizer.equally_many():
            return None
        for j in shared:
            state = optimizer.own.state.get(stack.tensors[j], {})
            moments = [state[name] for name in StackedOptimizer.MOMENTS if name in state]
            if not all(map(sharing.holds, [stack.tensors[j].detach(), *moments])):
                return None
        return cls(optimizer, stack, shared, sharing)

    def load(self, j: int, matrix: Tensor) -> None:
        """Overwrites a matrix with shared rows by one that all clients received."""
        self.tensors[j].data = matrix.index_select(0, self.sharing.column)
        self._handed_out.discard(j)

    def hand_out(self, j: int) -> SharedRows:
        """Returns a matrix as it is now. It is copied only if it changes later."""
        self._handed_out.add(j)
        return SharedRows(self.tensors[j].detach(), self.sharing)

    def prepare_to_change(self) -> None:
        """Copies the matrices that somebody else holds."""
        for j in self._handed_out:
            self.tensors[j].data = self.tensors[j].data.clone()
        self._handed_out.clear()

    def versions(self) -> list[int]:
        """Returns numbers that change when a model or a moment changes, other than by itself."""
        stack = self.stack
        tensors = [*stack.tensors, *(row for rows in stack.rows for row in rows)]
        return list(map(version, [*tensors, self.optimizer.steps]))

    @torch.no_grad()
    def write_back(self) -> None:
        """Updates the parameter stack and the moments of the models' own optimisers."""
        for j in self.shared:
            dense, stored = self.stack.tensors[j], self.tensors[j]
            dense.copy_(SharedRows(stored, self.sharing).dense())
            state, own = self.optimizer.own.state.get(dense), self.own.state.get(stored)
            if state and own:
                for name in StackedOptimizer.MOMENTS:
                    state[name].copy_(SharedRows(own[name], self.sharing).dense())
                state["step"].copy_(own["step"])
