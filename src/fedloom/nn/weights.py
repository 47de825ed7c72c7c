"""Weights of models: reading, loading and substituting them, and distances between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import Tensor, nn

from fedloom.nn.operations import operation

Weights: TypeAlias = dict[str, Tensor]  # parameters by name
Slot = tuple[dict[str, Tensor | None], str, str]  # a module's parameters, the short and full name


def slots_of(model: nn.Module) -> list[Slot]:
    """Returns where a model stores its parameters, in the order of `named_parameters`.

    The model caches the result. A deep copy of a model has its own.
    """
    known: list[Slot] | None = model.__dict__.get("_slots")
    if known is None:
        modules = dict(model.named_modules())
        named = [(name.rpartition("."), name) for name, _ in model.named_parameters()]
        known = [(modules[owner]._parameters, short, name) for (owner, _, short), name in named]
        model.__dict__["_slots"] = known
    return known


def _parameters(model: nn.Module) -> Weights:
    """Returns `named_parameters`, sorted by name, without visiting the modules again."""
    found = {name: store[short] for store, short, name in slots_of(model)}
    return {name: p for name, p in sorted(found.items()) if p is not None}


@operation
def weights(model: nn.Module) -> Weights:
    """Returns a model's parameters by name, detached. They share memory with the model."""
    return {name: p.detach() for name, p in _parameters(model).items()}


def extractor_weights(model: Weights) -> Weights:
    """Returns the weights of the extractor: all but the head's."""
    return {name: tensor for name, tensor in model.items() if not name.startswith("classifier.")}


@operation
def load_weights(model: nn.Module, new: Weights) -> None:
    """Overwrites a model's parameters in place, so that its optimiser stays valid."""
    own = _parameters(model)
    if own.keys() != new.keys():
        differing = sorted(own.keys() ^ new.keys())
        raise ValueError(f"weights do not fit the model: {differing} on one side only")
    for name, p in own.items():
        if p.shape != new[name].shape:
            raise ValueError(
                f"weights do not fit the model: {name!r} has shape {list(new[name].shape)}, "
                f"expected {list(p.shape)}"
            )
    with torch.no_grad():
        for name, p in own.items():
            p.copy_(new[name])


@contextmanager
def substituted(model: nn.Module, parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside the block, a model uses the given parameters in place of its own.

    parameters: tensors by full name. The model keeps its own parameters for other names.
    """
    slots = slots_of(model)
    own = [store[short] for store, short, _ in slots]
    try:
        for store, short, name in slots:
            store[short] = parameters.get(name, store[short])
        yield
    finally:
        for (store, short, _), parameter in zip(slots, own, strict=True):
            store[short] = parameter


@operation
def squared_distance(model: nn.Module, anchor: Weights) -> Tensor:
    """Returns ‖θ − anchor‖² over all parameters, differentiable in θ."""
    terms = ((p - anchor[name]).square().sum() for name, p in _parameters(model).items())
    return sum(terms, torch.zeros(()))


@operation
def inner_product(model: nn.Module, direction: Weights) -> Tensor:
    """Returns ⟨θ, direction⟩ over all parameters, differentiable in θ."""
    terms = ((p * direction[name]).sum() for name, p in _parameters(model).items())
    return sum(terms, torch.zeros(()))
