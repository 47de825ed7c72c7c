"""What tests watch a computation with."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation makes: `with Largest() as seen: ...; seen.numel`."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if (
                isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided
            ):  # a sparse one holds less than its shape says
                self.numel = max(self.numel, tensor.numel())
        return out
