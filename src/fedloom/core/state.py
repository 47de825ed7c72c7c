"""Snapshots: the state of a party as tensors, for checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fedloom.nn.weights import load_weights, weights


def snapshot(value: Any) -> Any:
    """Returns a copy of a state as a nested dict of tensors.

    value: tensors, models, optimisers, random streams, and dicts of these.
    """
    if isinstance(value, Tensor):
        return value.detach().clone(memory_format=torch.contiguous_format)
    if isinstance(value, dict):
        return {key: saved for key, v in value.items() if not _is_empty(saved := snapshot(v))}
    if isinstance(value, nn.Module):
        return snapshot(weights(value))
    if isinstance(value, torch.optim.Optimizer):
        return snapshot({str(k): v for k, v in value.state_dict()["state"].items()})
    if isinstance(value, torch.Generator):
        return value.get_state()
    raise TypeError(
        f"state holds a {type(value).__name__}; valid: tensors, models, optimisers, "
        "random streams, dicts of these"
    )


def _is_empty(saved: Any) -> bool:
    return isinstance(saved, dict) and not saved


def restore(value: Any, saved: Any) -> Any:
    """Restores a snapshot, in place where possible: an optimiser refers to its tensors."""
    if isinstance(value, nn.Module):
        load_weights(value, saved)
    elif isinstance(value, torch.optim.Optimizer):
        blank = value.state_dict()
        value.load_state_dict(
            {**blank, "state": {int(k): dict(v) for k, v in (saved or {}).items()}}
        )
    elif isinstance(value, torch.Generator):
        value.set_state(saved)
    elif isinstance(value, dict):
        for gone in [key for key in value if key not in saved and isinstance(value[key], Tensor)]:
            del value[gone]
        for key, kept in saved.items():
            value[key] = restore(value[key], kept) if key in value else kept
    elif isinstance(value, Tensor) and value.shape == saved.shape:
        with torch.no_grad():
            value.copy_(saved)
    else:
        return saved
    return value
