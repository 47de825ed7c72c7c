"""Choice: whether a run is secure or plain, for its server and its clients.

A plain run does not import `secure_aggregation`, and so no cryptography.
"""

from __future__ import annotations

from fedloom.core.aggregation import Aggregation, PlainAggregation, PlainResponder, Responder
from fedloom.core.facts import Facts
from fedloom.errors import ConfigError


def aggregation_for(facts: Facts) -> Aggregation:
    """Returns the server's side of a run with these facts: secure or plain."""
    if facts.secure is None:
        return PlainAggregation()
    from fedloom.privacy.secure_aggregation import SecureAggregation  # imports cryptography

    return SecureAggregation(facts.secure)


def responder_for(facts: Facts) -> Responder:
    """Returns a client's side of a run with these facts: secure or plain."""
    if facts.secure is None:
        return PlainResponder()
    from fedloom.privacy.secure_aggregation import SecureResponder  # imports cryptography

    return SecureResponder(facts.secure)


def require_cohort(clients: int, source: str) -> None:
    """Raises a ConfigError if so few clients take part that a sum would expose one of them."""
    if clients < 3:
        raise ConfigError(
            f"run.secure needs at least 3 clients in every sum, {source} is {clients}"
        )
