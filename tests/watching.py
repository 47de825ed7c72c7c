"""Helpers that observe a computation."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor that any operation makes.

    Usage: `with Largest() as seen: ...`, then `seen.numel`.
    """

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            # A sparse tensor takes less memory than its shape says.
            if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                self.numel = max(self.numel, tensor.numel())
        return out
