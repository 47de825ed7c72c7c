"""PyTorch's optimisers without its compiler, which they import at first use: a second and a half, and 80 MB.

The wrappers left out here only tell the compiler what not to compile. Nothing in fedloom is compiled.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


def _bare(method: Callable[..., Any]) -> Callable[..., Any]:
    """What PyTorch wrapped; the method itself in a version that wraps nothing."""
    return getattr(method, "__wrapped__", method)


class _Uncompiled:
    """Before an optimiser in a class's line of parents: its methods as they were before they were wrapped."""

    add_param_group = _bare(Optimizer.add_param_group)
    zero_grad = _bare(Optimizer.zero_grad)
    state_dict = _bare(Optimizer.state_dict)
    load_state_dict = _bare(Optimizer.load_state_dict)


class Adam(_Uncompiled, torch.optim.Adam):
    """`torch.optim.Adam`, the same numbers."""

    step = torch.no_grad()(_bare(torch.optim.Adam.step))


class SGD(_Uncompiled, torch.optim.SGD):
    """`torch.optim.SGD`, the same numbers."""

    step = torch.no_grad()(_bare(torch.optim.SGD.step))
