"""Joint tensors: what several clients hold as rows of one tensor, and backward passes through it."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from fedloom.engines.stacked.matmul import split


class _Whole:
    """A tensor of which clients have consecutive parts."""

    __slots__ = ("count", "tensor")

    def __init__(self, tensor: Tensor, count: int):
        self.tensor, self.count = tensor, count


def split_rows(whole: Tensor, sizes: list[int] | None = None) -> list[Tensor]:
    """Takes one tensor of all clients, gives each one's rows (`sizes` of them, or one each, without its axis)."""
    parts = list(whole.unbind() if sizes is None else split(whole, sizes))
    if whole.requires_grad:
        whole.register_hook(_require_joint_pass)
    origin = _Whole(whole, len(parts))
    for k, part in enumerate(parts):
        part._part = (origin, k)  # type: ignore[attr-defined]
    return parts


def joint_tensor(parts: Sequence[Tensor]) -> Tensor | None:
    """The tensor of which these are all the parts, in order, if there is one."""
    origin, _ = getattr(parts[0], "_part", (None, 0))
    if origin is None or origin.count != len(parts):
        return None
    complete = all(getattr(part, "_part", None) == (origin, k) for k, part in enumerate(parts))
    return origin.tensor if complete else None


def join_rows(parts: Sequence[Tensor]) -> Tensor:
    """All rows in one tensor, without a copy if they are in one already."""
    whole = joint_tensor(parts)
    return torch.cat(list(parts)) if whole is None else whole


def lazy_copies(tensor: Tensor, count: int) -> list[Tensor]:
    """Copies for so many receivers, of which nobody sees what another writes; one that is only read costs nothing."""
    made = [tensor._lazy_clone() for _ in range(count)]
    for copy in made:
        copy._copy_of = tensor  # type: ignore[attr-defined]
    return made


def common_source(tensors: Sequence[Tensor]) -> Tensor | None:
    """The tensor of which all these are copies that nobody has written to, if there is one."""
    source = getattr(tensors[0], "_copy_of", None)
    if source is None or any(
        getattr(t, "_copy_of", None) is not source or t._version for t in tensors
    ):
        return None
    return source


# ---- gradients of what many computed at once ----


class _Pass(threading.local):
    """Whether the backward pass under way is one of all clients."""

    joint = False


_pass = _Pass()


def _require_joint_pass(gradient: Tensor) -> None:
    if not _pass.joint:
        raise RuntimeError(
            "a phase differentiates by itself what was computed for several clients at once: use fedloom.api.step or "
            "fedloom.api.backward, or run.engine = 'loop'"
        )


def backward(roots: Sequence[Tensor], gradients: Sequence[Tensor | None], keep: bool) -> None:
    """A backward pass from many clients' tensors. keep: somebody who is not among them may still need what it went through."""
    whole = joint_tensor(roots)
    # Unless all begin from one tensor, one may begin elsewhere, and come back to what it shares with the others.
    keep = keep or (whole is None and len(roots) > 1)
    _pass.joint = True
    try:
        if whole is not None and all(g is None for g in gradients):
            whole.backward(torch.ones_like(whole), retain_graph=keep)
        else:
            torch.autograd.backward(list(roots), list(gradients), retain_graph=keep)
    finally:
        _pass.joint = False
