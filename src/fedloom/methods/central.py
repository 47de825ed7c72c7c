"""Central: one model trained on the whole, uncut graph, an upper reference without any privacy.

It trains on the union of the clients' training items, with the edges that the partition cut put
back. Scores are over the union of the clients' test items. If the parties never had a common graph,
it trains on the disjoint union of their graphs.

What travels: nothing (there is a single party).
"""

from dataclasses import dataclass
from typing import ClassVar

from fedloom.methods.local import Local


@dataclass(frozen=True)
class Central(Local):
    """Local training of the one party that holds all graphs."""

    evaluations: ClassVar[tuple[str, ...]] = ("common",)
    centralized: ClassVar[bool] = True
