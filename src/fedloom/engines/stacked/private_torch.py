"""The private names of PyTorch that fedloom uses. A test forbids them everywhere else.

A version of PyTorch without one of them gives the same results, more slowly.
"""

from __future__ import annotations

import itertools

from torch import Tensor

_has_lazy_clone = hasattr(Tensor, "_lazy_clone")
_has_version = hasattr(Tensor, "_version")
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
