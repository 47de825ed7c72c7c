"""Choice: whether a run is secure or plain, for its server and its clients.

A plain run does not import `secure_aggregation`, and so no cryptography.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fedloom.core.aggregation import Aggregation, PlainAggregation, PlainResponder, Responder
from fedloom.core.facts import Facts
from fedloom.errors import ConfigError

if TYPE_CHECKING:
    from fedloom.privacy.identity import Identity
    from fedloom.privacy.sum_record import SumRecord


def aggregation_for(facts: Facts, folder: Path | None = None, noisy_sums: int = 1) -> Aggregation:
    """Returns the server's side of a run with these facts: secure or plain, private or not.

    Args:
        facts: What every party knows.
        folder: Where a secure run logs its cohorts, and a private run what it has spent; None
            keeps them in memory.
        noisy_sums: How many noisy sums a round of a private run has.
    """
    if facts.privacy is not None:
        from fedloom.privacy.dp_accounting import Budget

        budget = Budget(facts.privacy, folder, noisy_sums)
        if facts.secure is None:
            from fedloom.privacy.dp import PrivateAggregation

            return PrivateAggregation(facts.privacy, budget)
        from fedloom.privacy.dp_secure import PrivateSecureAggregation  # imports cryptography

        return PrivateSecureAggregation(facts, budget, folder)
    if facts.secure is None:
        return PlainAggregation()
    from fedloom.privacy.secure_aggregation import SecureAggregation  # imports cryptography

    return SecureAggregation(facts.secure, folder)


def responder_for(
    facts: Facts, name: str, identity: Identity | None = None, record: SumRecord | None = None
) -> Responder:
    """Returns a client's side of a run with these facts: secure or plain.

    Args:
        facts: What every party knows.
        name: The client's name.
        identity: Its keys. None: those of a simulation.
        record: The secure sums that it took part in. None: a new record, in memory.
    """
    if facts.secure is None:
        return PlainResponder()
    from fedloom.privacy.identity import simulated_identity  # imports cryptography
    from fedloom.privacy.secure_aggregation import SecureResponder
    from fedloom.privacy.sum_record import SumRecord

    identity = identity or simulated_identity(name, facts.clients, facts.seed)
    return SecureResponder(facts.secure, identity, record or SumRecord(apart=facts.secure.apart))


def require_cohort(clients: int, source: str) -> None:
    """Raises a ConfigError if so few clients take part that a sum would expose one of them."""
    if clients < 3:
        raise ConfigError(
            f"run.secure needs at least 3 clients in every sum, {source} is {clients}"
        )
