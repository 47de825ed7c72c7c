"""Prototypes: one vector per class or cluster, and what the methods that exchange them share.

A table of prototypes is [..., p] with a mask `present` [...]. An entry that no client has is
absent, not zero. A message holds the present entries only, in the table's order, and the mask.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.message import Message
from fedloom.errors import MessageError
from fedloom.nn.prototypes import class_means as class_means
from fedloom.nn.prototypes import class_sums as class_sums


def pack_table(
    table: Tensor, present: Tensor, floor: int = 1, behind: Tensor | None = None
) -> Message:
    """Returns a table as it travels: its present entries [number of entries, p], and the mask.

    An entry that is exactly zero is left out: it has no direction. That happens if all units of the
    model are dead.

    Args:
        table: Prototypes [..., p].
        present: Which entries exist, bool [...].
        floor: An entry that is computed from fewer items is left out.
        behind: The number of items that each entry is computed from. None: `floor` has no effect.
    """
    allowed = present & (table != 0).any(-1)
    if behind is not None:
        allowed = allowed & (behind >= floor)
    return {"prototypes": table[allowed], "present": allowed}


def table_of(prototypes: Tensor, present: Tensor, sender: str = "message") -> Tensor:
    """Returns the table [..., p] of a packed message, with zeros where an entry is absent.

    sender: the writer of the message, for errors.
    """
    if len(prototypes) != int(present.sum()):
        raise MessageError(
            f"{sender}: tensor 'prototypes' has {len(prototypes)} rows, "
            f"'present' counts {int(present.sum())}"
        )
    table = prototypes.new_zeros(*present.shape, prototypes.shape[1])
    table[present] = prototypes
    return table


def clusters(points: Tensor) -> Tensor:
    """Returns the cluster of each point, [points] int64, by FINCH's first partition.

    Two points are in one cluster if a chain of nearest neighbours (by cosine) joins them.
    Sarfraz, Sharma, Stiefelhagen: "Efficient Parameter-free Clustering Using First Neighbor
    Relations", CVPR 2019, Eq. 1.
    """
    count = len(points)
    if count < 2:
        return torch.zeros(count, dtype=torch.int64)
    unit = F.normalize(points)
    nearest = (unit @ unit.T).fill_diagonal_(-torch.inf).argmax(1).tolist()
    above = list(range(count))  # each point's parent in a tree, whose root is its least point

    def root(point: int) -> int:
        while above[point] != point:
            above[point] = above[above[point]]
            point = above[point]
        return point

    for point, other in enumerate(nearest):
        low, high = sorted((root(point), root(other)))
        above[high] = low
    return torch.tensor([root(point) for point in range(count)]).unique(return_inverse=True)[1]
