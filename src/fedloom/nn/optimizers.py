"""PyTorch's optimisers without its compiler, and Adam without its overhead.

PyTorch's optimisers import the compiler at their first use, which takes a second and a half and
80 MB. The wrappers that are removed here only tell the compiler what it must not compile. fedloom
compiles nothing.

On small models, what PyTorch does around its fused kernel of Adam takes longer than the kernel:
hooks for profilers, checks, and sorting by device. Here a step goes straight to the kernel.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fedloom.nn.private_torch import fused_adam


def _bare(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the method that PyTorch wrapped, or the method itself if it is not wrapped."""
    return getattr(method, "__wrapped__", method)


class _Uncompiled:
    """A mixin that replaces the wrapped methods of an optimiser by the original ones."""

    param_groups: list[dict[str, Any]]
    add_param_group = _bare(Optimizer.add_param_group)
    state_dict = _bare(Optimizer.state_dict)
    load_state_dict = _bare(Optimizer.load_state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Removes the gradients. set_to_none: must be True; gradients are never set to 0."""
        assert set_to_none, "gradients are removed, not set to 0"
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None


class Adam(_Uncompiled, torch.optim.Adam):
    """`torch.optim.Adam` with identical results."""

    _any_step = torch.no_grad()(_bare(torch.optim.Adam.step))

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Takes one step. closure: must be None."""
        assert closure is None, "call backward before the step"
        if not all(map(_is_plain, self.param_groups)) or not self._fused_step():
            self._any_step()

    # PyTorch wraps a step unless it says that it calls hooks itself. Nothing here has hooks.
    step.hooked = True  # type: ignore[attr-defined]

    @torch.no_grad()
    def _fused_step(self) -> bool:
        """Steps all groups by the kernel. Returns False if this PyTorch has none."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            states = [self.state[p] or self._begin(p) for p in params]
            if params and not fused_adam(params, states, group):
                return False
        return True

    def _begin(self, p: Tensor) -> dict[str, Tensor]:
        """Returns the state of a parameter before its first step."""
        state: dict[str, Tensor] = self.state[p]
        state["step"] = torch.zeros((), device=p.device)
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(p, memory_format=torch.preserve_format)
        return state


def _is_plain(group: dict[str, Any]) -> bool:
    """Returns whether the fused kernel steps this group, with its default options."""
    return group["fused"] and not (
        group["amsgrad"] or group["maximize"] or group.get("decoupled_weight_decay", False)
    )


class SGD(_Uncompiled, torch.optim.SGD):
    """`torch.optim.SGD` with identical results."""

    step = torch.no_grad()(_bare(torch.optim.SGD.step))
