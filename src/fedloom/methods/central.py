"""Central: one model on the whole, uncut graph, as if nothing had to stay private. What federating hopes to come near.

Training on the union of the clients' training items, with the edges that the partition cut put back. Scores are over the union of
their test items. With parties that never had a common graph it is their disjoint union.

What travels: nothing (there is a single party).
"""

from dataclasses import dataclass
from typing import ClassVar

from fedloom.methods.local import Local


@dataclass(frozen=True)
class Central(Local):
    """Local training of the one party that holds everything."""

    evaluations: ClassVar[tuple[str, ...]] = ("common",)
    centralized: ClassVar[bool] = True
