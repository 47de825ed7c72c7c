"""Disclosure: what a method's server learns of each client, derived from what phases declare.

A method writes down in `discloses_to_server` only what its declarations do not show.
"""

from __future__ import annotations

import re

from fedloom.core.method import Method
from fedloom.core.phase import Computed, Declaration, Phase, phases_of

WEIGHTS = (
    "weights or gradients (input layers show which features occur, classifiers the labels' shares)"
)
# What a tensor with an axis of this kind tells, the first that applies.
_BY_AXIS = {
    "d": "statistics of features (which occur, their sums)",
    "p": "means of embeddings (of a single item: its own)",
    "C": "numbers for each class (which occur, how many labels)",
}


def server_learns(cls: type[Method]) -> str:
    """Returns what the server of a method learns of a client, in words.

    cls: the method's class.
    """
    if cls.centralized:
        return "everything: all graphs are in one place"
    phases = phases_of(cls)
    used = [p for name, p in phases.items() if name not in _COMMON and p.reply]
    told = [text for p in used if not p.read_by for text in _told(p)]
    if any(p.read_by for p in used):
        told.append("the peer messages that it relays")
    told.append("scores (confusion matrices hold the counts of validation and test labels)")
    secure = not cls().single_replies()
    scope = "of each client, or in a secure run of all together" if secure else "of each client"
    parts = [f"{scope}: {', '.join(dict.fromkeys(told))}", cls.discloses_to_server]
    return "; ".join(filter(None, parts))


# The phases of every method. `evaluate` is described above, `count_labels` serves a run's setting.
_COMMON = ("size", "evaluate", "evaluate_sum", "count_labels", "weigh_classes")


def _told(phase: Phase) -> list[str]:
    return [text for declared in phase.reply.values() if (text := _of(declared))]


def _of(declared: Declaration) -> str:
    """Returns what one name of a reply tells; "" for sizes and computed schemas without a kind."""
    if isinstance(declared, Computed):
        return WEIGHTS if declared.weights else ""
    if declared == "weights" or declared[0] in "=~":
        return WEIGHTS
    axes = re.split(r"[ ,]+", declared.partition("[")[2].removesuffix("]"))
    if axes[0] == "p":  # a matrix that reads embeddings
        return WEIGHTS
    return next((text for axis, text in _BY_AXIS.items() if axis in axes), "")
