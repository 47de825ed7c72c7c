"""Small pieces of local learning that many methods share: weights in and out of models, optimisers, distances between weights."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedloom.families import AtOnce, clear_gradients, hand_out_gradients, leaf_of, parameters_of, place_of, slots_of
from fedloom.message import Message
from fedloom.optimizers import SGD, Adam
from fedloom.stack import backward as differentiate
from fedloom.stack import common
from fedloom.together import Operation, kept, others_go_on

if TYPE_CHECKING:
    from fedloom.graph import Graph
    from fedloom.models import Model

OPTIMIZERS = ("adam", "sgd")


def stream_seed(*names: object) -> int:
    """A 63-bit seed that depends on all the names given and on nothing else: (run seed, party, purpose, ...)."""
    digest = hashlib.sha256("\x1f".join(map(str, names)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def weights(model: nn.Module) -> Message:
    """The model's parameters by name, detached (they share memory with the model; engines copy what travels)."""
    return {name: p.detach() for name, p in sorted(_named(model))}


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """`named_parameters` without a walk through the modules."""
    return ((name, held[last]) for held, last, name in slots_of(model))


def body(model: Message) -> Message:
    """Of a model's weights those of the extractor: all but the head's."""
    return {name: tensor for name, tensor in model.items() if not name.startswith("classifier.")}


class _Load(Operation):
    """Overwrites a model's parameters in place, so that an optimiser that holds them stays valid."""

    def alone(self, *args: Any) -> None:
        net, new = args
        own = dict(_named(net))
        if own.keys() != new.keys():
            raise ValueError(f"weights do not fit the model: {sorted(own.keys() ^ new.keys())} on one side only")
        for name, p in own.items():
            if p.shape != new[name].shape:
                raise ValueError(f"weights do not fit the model: {name!r} has shape {list(new[name].shape)}, expected {list(p.shape)}")
        with torch.no_grad():
            for name, p in own.items():
                p.copy_(new[name])

    def alike(self, *args: Any) -> Hashable:
        net, new = args
        own = dict(_named(net))
        fits = own.keys() == new.keys() and all(p.shape == new[name].shape for name, p in own.items())
        return tuple(place[:2] if (place := place_of(p)) else None for p in own.values()) if fits else None

    @torch.no_grad()
    def together(self, calls: Sequence[tuple[Any, ...]]) -> list[None]:
        nets, news = zip(*calls, strict=True)
        for j, (_, _, name) in enumerate(slots_of(nets[0])):
            rows = [held[short] for held, short, _ in (slots_of(net)[j] for net in nets)]
            tensors = [new[name] for new in news]
            leaf, source = leaf_of(rows), common(tensors)
            if leaf is not None:
                leaf.copy_(torch.stack(tensors) if source is None else source)
            else:
                for row, tensor in zip(rows, tensors, strict=True):
                    row.copy_(tensor)
        return [None] * len(calls)


_load = _Load()


def load_weights(model: nn.Module, new: Message) -> None:
    """Overwrites the model's parameters in place, so that an optimiser that holds them stays valid."""
    _load(model, new)


def make_optimizer(
    kind: str, parameters: Iterable[Tensor] | Iterable[dict[str, Any]], lr: float, weight_decay: float
) -> torch.optim.Optimizer:
    """An optimiser by name (`OPTIMIZERS`), of parameters or groups of them; weight decay is L2 in the gradient, as the papers use it."""
    if kind == "adam":
        # The fused kernel updates all parameters in one pass: a third of the time of a step on small models.
        return Adam(parameters, lr=lr, weight_decay=weight_decay, fused=True)
    return SGD(parameters, lr=lr, weight_decay=weight_decay)


def outputs(net: Model, graph: Graph, rng: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Embeddings [items, width] and logits [items, classes] of one forward pass."""
    z = net.embed(graph, rng)
    return z, net.head(z, graph, rng)


@contextmanager
def seeded(rng: torch.Generator) -> Iterator[None]:
    """Modules built inside draw their initial weights from `rng`; the global random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(2**62, (), generator=rng)))
        yield


class _Differentiation(Operation):
    """What goes back through what several clients computed at once: for all of them at once, when all are ready."""

    waits = True

    def alone(self, *args: Any) -> None:
        self.together([args])

    def alike(self, *args: Any) -> Hashable:
        return True


class _Step(_Differentiation):
    """A step of an optimiser down the gradient of a loss."""

    def together(self, calls: Sequence[tuple[Any, ...]]) -> list[None]:
        optimizers, losses = zip(*calls, strict=True)
        at_once = kept("optimizer", optimizers, lambda: AtOnce.of(optimizers)) if len(calls) > 1 else None
        if at_once is not None:
            at_once.clear()
        else:
            clear_gradients(map(parameters_of, optimizers))
        differentiate(losses, [None] * len(losses), keep=others_go_on())
        if at_once is None or not at_once.step():
            hand_out_gradients(map(parameters_of, optimizers))
            for optimizer in optimizers:
                optimizer.step()
        return [None] * len(calls)


_step = _Step()


def step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """One step down the gradient of `loss`."""
    _step(optimizer, loss)


class _Backward(_Differentiation):
    """A backward pass that adds to the gradients of parameters."""

    def together(self, calls: Sequence[tuple[Any, ...]]) -> list[None]:
        parameters, roots, gradients = zip(*calls, strict=True)
        clear_gradients(parameters, rows=False)
        differentiate(roots, gradients, keep=others_go_on())
        hand_out_gradients(parameters)
        return [None] * len(calls)


_backward = _Backward()


def backward(net: nn.Module | Iterable[Tensor], root: Tensor, gradient: Tensor | None = None) -> None:
    """Adds the gradient of `root` (or of ⟨root, gradient⟩) to the `grad` of a model's parameters, or of the given tensors."""
    _backward(list(net.parameters() if isinstance(net, nn.Module) else net), root, gradient)


def squared_distance(model: nn.Module, anchor: Message) -> Tensor:
    """‖θ − anchor‖² summed over all parameters, differentiable in θ."""
    return sum(((p - anchor[name]).square().sum() for name, p in sorted(_named(model))), torch.zeros(()))


def inner_product(model: nn.Module, direction: Message) -> Tensor:
    """⟨θ, direction⟩ summed over all parameters, differentiable in θ."""
    return sum(((p * direction[name]).sum() for name, p in sorted(_named(model))), torch.zeros(()))
