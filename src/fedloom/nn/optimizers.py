"""PyTorch's optimisers without its compiler.

PyTorch's optimisers import the compiler at their first use, which takes a second and a half and
80 MB. The wrappers that are removed here only tell the compiler what it must not compile. fedloom
compiles nothing.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


def _bare(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the method that PyTorch wrapped, or the method itself if it is not wrapped."""
    return getattr(method, "__wrapped__", method)


class _Uncompiled:
    """A mixin that replaces the wrapped methods of an optimiser by the original ones."""

    add_param_group = _bare(Optimizer.add_param_group)
    zero_grad = _bare(Optimizer.zero_grad)
    state_dict = _bare(Optimizer.state_dict)
    load_state_dict = _bare(Optimizer.load_state_dict)


class Adam(_Uncompiled, torch.optim.Adam):
    """`torch.optim.Adam` with identical results."""

    step = torch.no_grad()(_bare(torch.optim.Adam.step))


class SGD(_Uncompiled, torch.optim.SGD):
    """`torch.optim.SGD` with identical results."""

    step = torch.no_grad()(_bare(torch.optim.SGD.step))
