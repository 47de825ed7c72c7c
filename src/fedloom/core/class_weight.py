"""Class weights: how much the items of each class count in the training loss.

    run.class_weight = "balanced"    weight of class c: n / (C · n_c), from the training labels of
                                     all clients
    run.class_weight = "1,10"        one number for each class

The counts n_c are summed over the clients before the rounds, by one `server.sum`: in a secure run
the server sees the sum only.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedloom.errors import ConfigError

if TYPE_CHECKING:
    from fedloom.core.server import Server

BALANCED = "balanced"


def explicit_weights(text: str, num_classes: int | None = None) -> Tensor | None:
    """Returns the weights of `run.class_weight`; None if it is empty or "balanced".

    Raises a ConfigError if the text is none of these.

    Args:
        text: The setting.
        num_classes: How many weights there must be. None: any number.
    """
    if text in ("", BALANCED):
        return None
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 < value < math.inf for value in values):
        raise ConfigError(
            f"run.class_weight is {text!r}, must be empty (no weights), {BALANCED!r}, or a number "
            "above 0 for each class, for example '1,10'"
        )
    if num_classes not in (None, len(values)):
        raise ConfigError(
            f"run.class_weight is {text!r}, a list of {len(values)}; the data have {num_classes} "
            f"classes; give one number for each, or {BALANCED!r}"
        )
    return torch.tensor(values)


def balanced_weights(counts: Tensor) -> Tensor:
    """Returns n / (C · n_c) of each class; C counts the classes that have items.

    The mean over all items is 1. A class without items gets the weight 1.

    counts: n_c, the number of training items of each class, [classes].
    """
    share = counts.sum() / (counts.clamp(min=1) * (counts > 0).sum().clamp(min=1))
    return torch.where(counts > 0, share, 1.0).float()


def weigh_classes(server: Server) -> None:
    """Has the clients count their training labels, and tells them the balanced weights.

    It does nothing unless `run.class_weight` is "balanced".
    """
    if server.facts.class_weight == BALANCED:
        counts = server.sum(server.method.count_labels)["counts"]
        server.ask(server.method.weigh_classes, weights=balanced_weights(counts))
