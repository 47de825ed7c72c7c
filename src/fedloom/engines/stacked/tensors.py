"""Joint tensors: one tensor with the rows of several clients, and backward passes through it."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from fedloom.engines.stacked.matmul import split
from fedloom.nn.private_torch import lazy_clone, version
from fedloom.nn.weights import Weights


class _Whole:
    """A joint tensor and the number of its parts."""

    __slots__ = ("count", "tensor")

    def __init__(self, tensor: Tensor, count: int):
        self.tensor, self.count = tensor, count


def split_rows(whole: Tensor, sizes: list[int] | None = None) -> list[Tensor]:
    """Divides a joint tensor into the rows of each client.

    sizes: the number of rows of each client. None: one row each, without its axis.
    """
    parts = list(whole.unbind() if sizes is None else split(whole, sizes))
    if whole.requires_grad:
        whole.register_hook(_require_joint_pass)
    origin = _Whole(whole, len(parts))
    for k, part in enumerate(parts):
        part._part = (origin, k)  # type: ignore[attr-defined]
    return parts


def joint_tensor(parts: Sequence[Tensor]) -> Tensor | None:
    """Returns the tensor that these are all the parts of, in order; None if there is none."""
    origin, _ = getattr(parts[0], "_part", (None, 0))
    if origin is None or origin.count != len(parts):
        return None
    complete = all(getattr(part, "_part", None) == (origin, k) for k, part in enumerate(parts))
    return origin.tensor if complete else None


def join_rows(parts: Sequence[Tensor]) -> Tensor:
    """Returns all rows as one tensor. It copies only if there is no joint tensor."""
    whole = joint_tensor(parts)
    return torch.cat(list(parts)) if whole is None else whole


def lazy_copies(tensor: Tensor, count: int) -> list[Tensor]:
    """Returns copies for several receivers. What one writes, the others do not see.

    A copy that is only read costs nothing.
    """
    made = [lazy_clone(tensor) for _ in range(count)]
    for copy in made:
        copy._copy_of = tensor  # type: ignore[attr-defined]
    return made


def common_source(tensors: Sequence[Tensor]) -> Tensor | None:
    """Returns the tensor that all these are unwritten lazy copies of; None if there is none."""
    source = getattr(tensors[0], "_copy_of", None)
    if source is None or any(
        getattr(t, "_copy_of", None) is not source or version(t) for t in tensors
    ):
        return None
    return source


def common_weights(weights: Sequence[Weights]) -> Weights | None:
    """Returns the weights that all these are unwritten lazy copies of; None if there are none."""
    sources = {name: common_source([own[name] for own in weights]) for name in weights[0]}
    found = {name: source for name, source in sources.items() if source is not None}
    return found if len(found) == len(sources) else None


# ---- gradients of joint tensors ----


class _Pass(threading.local):
    """Whether the current backward pass is a joint one."""

    joint = False


_pass = _Pass()


def _require_joint_pass(gradient: Tensor) -> None:
    if not _pass.joint:
        raise RuntimeError(
            "a phase calls backward() on a tensor that was computed for several clients at once: "
            "use fedloom.api.step or fedloom.api.backward, or run.engine = 'loop'"
        )


def backward(roots: Sequence[Tensor], gradients: Sequence[Tensor | None], keep: bool) -> None:
    """Runs a backward pass from the tensors of several clients.

    Args:
        roots: A tensor per client.
        gradients: The gradient with respect to each root. None: the root is a scalar.
        keep: Whether other clients may still need the graph.
    """
    whole = joint_tensor(roots)
    # Roots that are not parts of one tensor may share a part of the graph.
    keep = keep or (whole is None and len(roots) > 1)
    _pass.joint = True
    try:
        if whole is not None and all(g is None for g in gradients):
            # Given a gradient of ones instead, PyTorch would import sympy, to compare two shapes.
            whole.sum().backward(retain_graph=keep)
        else:
            torch.autograd.backward(list(roots), list(gradients), retain_graph=keep)
    finally:
        _pass.joint = False
