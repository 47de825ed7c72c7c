"""Privacy terms: what a run with differential privacy promises, and what its budget reports.

The mechanism is in `fedloom.privacy.dp`, the accounting in `fedloom.privacy.dp_accounting`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

UNITS = ("client", "node", "edge", "label")
SAMPLINGS = ("fixed", "poisson")


@dataclass(frozen=True)
class PrivacyTerms:
    """The terms of differential privacy. All parties know them.

    Args:
        noise: z. The noise on a sum has the standard deviation z times the sum's sensitivity.
        delta: δ of the guarantee.
        epsilon: ε of the whole run, which is not exceeded; 0: no limit.
        clip: The longest reply of a client (unit "client"), or gradient of a node.
        unit: What is protected: a client, or a node, an edge or a label of one.
        sampling: How the participants of a round are drawn.
        rate: The probability with which a client takes part, if that is secret and drawn for each
            client on its own; otherwise 1. The accounting uses it.
        expected: The number of participants that a sum over clients is divided by.
        releases: How many noisy sums the run may publish; 0: no limit.
        degree: The most edges of a node that training uses, for the units "node" and "edge".
        seeded: The noise comes from the run's seed. Such a run is not private.
    """

    noise: float
    delta: float
    epsilon: float = 0.0
    clip: float = 1.0
    unit: str = "client"
    sampling: str = "fixed"
    rate: float = 1.0
    expected: int = 1
    releases: int = 0
    degree: int = 4
    seeded: bool = False


class Spending(Protocol):
    """What a run has spent of its budget."""

    @property
    def exhausted(self) -> bool:
        """Whether the budget does not allow one more round."""

    def entry(self) -> dict[str, Any]:
        """Returns what a round adds to its history entry."""

    def summary(self) -> dict[str, Any]:
        """Returns the privacy part of a run's summary."""
