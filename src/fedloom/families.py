"""Families: the parameters of many clients' models of one kind in one tensor each, their gradients, and their optimisers' steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from fedloom import optimizers

Slot = tuple[dict[str, Any], str, str]  # where a module keeps a parameter, under which name, and the parameter's full name


def slots_of(net: nn.Module) -> list[Slot]:
    """Where a model's parameters are, in the order of `named_parameters`; looked up once (a deep copy finds its own)."""
    known: list[Slot] | None = net.__dict__.get("_slots")
    if known is None:
        modules = dict(net.named_modules())
        named = [(name.rpartition("."), name) for name, _ in net.named_parameters()]
        known = net.__dict__["_slots"] = [(modules[owner]._parameters, last, name) for (owner, _, last), name in named]
    return known


class Family:
    """The parameters of models that are alike: a leaf [models, ...] for each, of which every model's own is a row.

    Rows are the models' own `Parameter`s still: what writes to one writes to the stack. A gradient arrives at the leaf if it came by a
    product of the whole stack, at the row if the model was used alone.
    """

    def __init__(self, slots: list[list[Slot]]):
        self.slots = slots
        self.rows = [[held[name] for held, name, _ in column] for column in zip(*slots, strict=True)]
        self.leaves = [torch.stack([row.detach() for row in rows]) for rows in self.rows]
        for j, (leaf, rows) in enumerate(zip(self.leaves, self.rows, strict=True)):
            leaf.requires_grad_(rows[0].requires_grad)
            for k, (row, place) in enumerate(zip(rows, leaf.detach().unbind(), strict=True)):
                row.data = place
                row._place = (self, j, k)

    def __len__(self) -> int:
        return len(self.slots)

    def is_of(self, slots: list[list[Slot]]) -> bool:
        """Whether its rows are these models' parameters, in this order, now."""
        return (len(slots), len(slots[0])) == (len(self), len(self.rows)) and all(
            held[name] is row for own, *rows in zip(slots, *self.rows, strict=True) for (held, name, _), row in zip(own, rows, strict=True)
        )


def place_of(parameter: Tensor) -> tuple[Family, int, int] | None:
    """The family that a parameter is in, the number of its leaf there, and its row; None if it is in none."""
    return getattr(parameter, "_place", None)


def part(parameters: Iterable[Tensor]) -> None:
    """Has parameters leave their families. A family and its rows know each other: in a circle they would stay until Python looks for
    garbage."""
    for parameter in parameters:
        if place_of(parameter) is not None:
            del parameter._place  # type: ignore[attr-defined]


def leaf_of(parameters: Sequence[Tensor]) -> Tensor | None:
    """The leaf whose rows these are, all of them and in order; None if there is no such."""
    place = place_of(parameters[0])
    if place is None or len(place[0]) != len(parameters):
        return None
    family, j, _ = place
    return family.leaves[j] if all(map(is_, family.rows[j], parameters)) else None


def stacked(nets: Sequence[nn.Module]) -> dict[str, Tensor]:
    """The parameters of models that are alike, by name, each [models, ...]; differentiable."""
    slots = [slots_of(net) for net in nets]
    family = family_of(slots)
    names = [name for _, _, name in slots[0]]
    if family is None:
        columns = zip(*([held[name] for held, name, _ in own] for own in slots), strict=True)
        return {name: torch.stack(column) for name, column in zip(names, columns, strict=True)}
    for leaf, rows in zip(family.leaves, family.rows, strict=True):
        leaf.requires_grad_(rows[0].requires_grad)
    return dict(zip(names, family.leaves, strict=True))


def family_of(slots: list[list[Slot]]) -> Family | None:
    """The family of these models: the one they are, a new one if none of them is in any; None if neither."""
    firsts = [own[0][0][own[0][1]] for own in slots]
    if (place := place_of(firsts[0])) is not None:
        return place[0] if place[0].is_of(slots) else None
    free = all(isinstance(held[name], nn.Parameter) and place_of(held[name]) is None for own in slots for held, name, _ in own)
    return Family(slots) if free and len({id(p) for p in firsts}) == len(firsts) else None


@contextmanager
def using(net: nn.Module, parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """A model with other parameters, by full name, in place of its own; it keeps those that are not given."""
    slots = slots_of(net)
    own = [held[name] for held, name, _ in slots]
    try:
        for held, name, full in slots:
            held[name] = parameters.get(full, held[name])
        yield
    finally:
        for (held, name, _), parameter in zip(slots, own, strict=True):
            held[name] = parameter


# ---- gradients: some at the leaves, some at the rows; what counts is their sum ----


def clear_gradients(parameters: Iterable[Sequence[Tensor]], rows: bool = True) -> None:
    """Forgets the gradients of many clients' parameters: those at the leaves, and (if `rows`) the parameters' own."""
    for own in parameters:
        for p in own:
            if rows:
                p.grad = None
            if (place := place_of(p)) is not None:
                family, j, _ = place
                family.leaves[j].grad = None


def hand_out_gradients(parameters: Iterable[Sequence[Tensor]]) -> None:
    """Adds to every parameter's own gradient its row of the leaf's."""
    for own in parameters:
        for p in own:
            if (place := place_of(p)) is not None:
                family, j, k = place
                if (gathered := family.leaves[j].grad) is not None:
                    p.grad = gathered[k] if p.grad is None else p.grad + gathered[k]


@torch.no_grad()
def gather_gradients(places: Sequence[tuple[Family, int]]) -> bool:
    """Moves the rows' own gradients to the leaves; False if some model has one for a parameter and another has none."""
    for family, j in places:
        leaf, rows = family.leaves[j], family.rows[j]
        own = [row.grad for row in rows]
        if all(g is None for g in own):
            continue
        if leaf.grad is None:
            if any(g is None for g in own):
                return False
            leaf.grad = torch.stack(own)
        else:
            for k, g in enumerate(own):
                if g is not None:
                    leaf.grad[k] += g
        for row in rows:
            row.grad = None
    return True


# ---- optimisers ----


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """What an optimiser moves, in its order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


KNOWN = (Adam, SGD, optimizers.Adam, optimizers.SGD)  # and no subclass, which may do more


class AtOnce:
    """One optimiser of whole families, in place of each model's own, of whose state it has the stack."""

    MOMENTS = ("exp_avg", "exp_avg_sq")

    def __init__(self, optimizers: Sequence[Optimizer], places: Sequence[tuple[Family, int]]):
        self.optimizers, self.places = optimizers, places
        leaves = iter([family.leaves[j] for family, j in places])
        groups = [{**group, "params": [next(leaves) for _ in group["params"]]} for group in optimizers[0].param_groups]
        self.own = type(optimizers[0])(groups)  # type: ignore[call-arg]
        self.steps = torch.zeros(len(places), len(optimizers))  # each model's, each parameter's
        self.counted = -1  # the version of `steps` in which all models' were last seen to be equal
        self.adopted: dict[int, list[Any]] = {}  # by place, the states of which the optimisers' moments were made rows

    @classmethod
    def of(cls, optimizers: Sequence[Optimizer]) -> AtOnce | None:
        """None unless they are of one kind and move whole families, in the families' order."""
        kind = type(optimizers[0])
        made_with = [[{**group, "params": len(group["params"]), "lr": 0} for group in o.param_groups] for o in optimizers]
        if kind not in KNOWN or any(type(o) is not kind for o in optimizers) or any(own != made_with[0] for own in made_with):
            return None
        places: list[tuple[Family, int]] = []
        for column in zip(*map(parameters_of, optimizers), strict=True):
            place = place_of(column[0])
            if place is None or leaf_of(column) is None:
                return None
            places.append(place[:2])
        return cls(optimizers, places)

    def clear(self) -> None:
        """Forgets all gradients."""
        for family, j in self.places:
            family.leaves[j].grad = None
            for row in family.rows[j]:
                if row.grad is not None:
                    row.grad = None

    def step(self) -> bool:
        """Moves everybody down the gradients that are there; False, and nobody has moved, if they cannot move as one."""
        if not self._agree() or not gather_gradients(self.places):
            return False
        moved = [i for i, (family, j) in enumerate(self.places) if family.leaves[j].grad is not None]
        if isinstance(self.own, Adam):
            self._adopt(moved)
            if not self._count():
                return False
        self.own.step()
        if len(moved) == len(self.places):
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
            for i, (family, j) in enumerate(self.places):
                if (state := self.own.state.get(family.leaves[j])) is not None:
                    state["step"] = self.steps[i, 0].clone()
            self.counted = self.steps._version
        return True

    def _agree(self) -> bool:
        """Whether all have the same rate and decay, which may have changed since the last time; takes them over."""
        for g, mine in enumerate(self.own.param_groups):
            lr, decay = (self.optimizers[0].param_groups[g][name] for name in ("lr", "weight_decay"))
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
            family, j = self.places[i]
            leaf, rows = family.leaves[j], family.rows[j]
            if i in self.adopted and all(map(is_, states, self.adopted[i])):
                continue
            own = [state.get(row) for state, row in zip(states, rows, strict=True)]
            stacks = {name: torch.zeros_like(leaf, requires_grad=False) for name in self.MOMENTS}
            places = {name: stack.unbind() for name, stack in stacks.items()}
            for k, (optimizer, row) in enumerate(zip(self.optimizers, rows, strict=True)):
                if before := own[k]:
                    self.steps[i, k] = before["step"]
                    for name in self.MOMENTS:
                        places[name][k].copy_(before[name])
                else:
                    self.steps[i, k] = 0
                optimizer.state[row] = {"step": self.steps[i, k], **{name: places[name][k] for name in self.MOMENTS}}
            self.own.state[leaf] = {"step": self.steps[i, 0].clone(), **stacks}
            self.adopted[i] = states
