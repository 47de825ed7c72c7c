"""The private names of PyTorch that fedloom uses. A test forbids them everywhere else.

A version of PyTorch without one of them gives the same results, more slowly.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_has_lazy_clone = hasattr(Tensor, "_lazy_clone")
_has_version = hasattr(Tensor, "_version")
_has_fused_adam = hasattr(torch, "_fused_adam_") and hasattr(torch, "_foreach_add_")
_has_log_softmax_backward = hasattr(torch, "_log_softmax_backward_data")
_unknown = itertools.count(-1, -1)


def lazy_clone(tensor: Tensor) -> Tensor:
    """Returns a copy that shares its memory until one of the two is written to.

    Without `Tensor._lazy_clone` it is a plain copy.
    """
    return tensor._lazy_clone() if _has_lazy_clone else tensor.clone()


def version(tensor: Tensor) -> int:
    """Returns how often a tensor has been written to.

    Without `Tensor._version` it returns another negative number each time: the tensor counts as
    written to since the last call.
    """
    return tensor._version if _has_version else next(_unknown)


def fused_adam(
    params: Sequence[Tensor], states: Sequence[Mapping[str, Tensor]], group: Mapping[str, Any]
) -> bool:
    """Takes a step of Adam by PyTorch's fused kernel, without hooks and checks around it.

    Args:
        params: Parameters with gradients.
        states: Their "step", "exp_avg" and "exp_avg_sq".
        group: The options of the optimiser.

    Without `torch._fused_adam_` it does nothing and returns False.
    """
    if not _has_fused_adam:
        return False
    steps = [state["step"] for state in states]
    torch._foreach_add_(steps, 1)
    torch._fused_adam_(
        list(params),
        [p.grad for p in params if p.grad is not None],
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        steps,
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
    )
    return True


def log_softmax_backward(gradient: Tensor, log_p: Tensor) -> Tensor:
    """Returns the gradient of a log-softmax over the columns with respect to its input.

    Without `torch._log_softmax_backward_data` it is the formula, equal up to rounding.
    """
    if _has_log_softmax_backward:
        return torch._log_softmax_backward_data(gradient, log_p, 1, log_p.dtype)
    return gradient - log_p.exp() * gradient.sum(1, keepdim=True)
