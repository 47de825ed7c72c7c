"""Prototypes: one vector for a kind of item, and what the methods that exchange them share.

A table of prototypes is [..., p] with a mask `present` [...]: an entry that nobody has is absent, not zero. What travels is the present
entries alone, in the table's order, and the mask.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from fedloom.core.message import Message
from fedloom.errors import MessageError


def class_sums(z: Tensor, y: Tensor, mask: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Of the items in `mask`: Σ of their embeddings by class [classes, p], and how many there are [classes] (int64)."""
    chosen = y[mask]
    sums = z.new_zeros(num_classes, z.shape[1]).index_add(0, chosen, z[mask])
    return sums, torch.bincount(chosen, minlength=num_classes)


def class_means(z: Tensor, y: Tensor, mask: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Of the items in `mask`: their mean embedding by class [classes, p], zero for a class without any, and how many there are."""
    sums, counts = class_sums(z, y, mask, num_classes)
    return sums / counts.clamp(min=1).unsqueeze(1), counts


def told(table: Tensor, present: Tensor, floor: int = 1, behind: Tensor | None = None) -> Message:
    """A table as it travels: its present entries, [how many, p], and where they are.

    floor: entries with fewer items than that `behind` them stay at home. An entry that is exactly zero (every unit of the model is dead)
    says nothing of a direction, and stays too.
    """
    allowed = present & (table != 0).any(-1)
    if behind is not None:
        allowed = allowed & (behind >= floor)
    return {"prototypes": table[allowed], "present": allowed}


def table_of(prototypes: Tensor, present: Tensor, who: str = "message") -> Tensor:
    """The table [..., p] of a message from `told`; zeros where nothing is present."""
    if len(prototypes) != int(present.sum()):
        raise MessageError(
            f"{who}: tensor 'prototypes' has {len(prototypes)} rows, 'present' counts {int(present.sum())}"
        )
    table = prototypes.new_zeros(*present.shape, prototypes.shape[1])
    table[present] = prototypes
    return table


def clusters(points: Tensor) -> Tensor:
    """FINCH's first partition: items are in one cluster if a chain of nearest neighbours (by cosine) joins them. Gives [points] int64.

    Sarfraz, Sharma, Stiefelhagen: "Efficient Parameter-free Clustering Using First Neighbor Relations", CVPR 2019, Eq. 1.
    """
    count = len(points)
    if count < 2:
        return torch.zeros(count, dtype=torch.int64)
    unit = F.normalize(points)
    nearest = (unit @ unit.T).fill_diagonal_(-torch.inf).argmax(1).numpy()
    links = coo_matrix((torch.ones(count).numpy(), (range(count), nearest)), shape=(count, count))
    _, labels = connected_components(links, directed=False)
    return torch.from_numpy(labels).long()
