"""Private runs: from settings to the terms of differential privacy, and what a summary says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fedloom.core.facts import Facts
from fedloom.core.method import Method
from fedloom.core.privacy_terms import PrivacyTerms, Spending
from fedloom.errors import ConfigError
from fedloom.experiments.settings import RunSettings
from fedloom.privacy.dp import releases_per_round, unbounded, unbounded_reply
from fedloom.privacy.dp_accounting import most_releases, noise_for


def with_privacy(facts: Facts, method: Method, settings: RunSettings) -> Facts:
    """Returns the facts with the terms of differential privacy. The noise is chosen here.

    Raises a ConfigError if the method's replies have no bounded sensitivity.

    Args:
        facts: The facts of the run without `privacy`.
        method: The method.
        settings: The settings, with `dp_epsilon` or `dp_noise`.
    """
    poisson = settings.dp_sampling == "poisson"
    terms = PrivacyTerms(
        noise=1.0,
        delta=settings.dp_delta,
        epsilon=settings.dp_epsilon,
        clip=settings.dp_clip,
        unit=settings.dp_unit,
        sampling=settings.dp_sampling,
        rate=settings.participation if poisson else 1.0,
        expected=max(1, round(settings.participation * facts.num_clients)),
        degree=settings.dp_degree,
        seeded=settings.dp_seeded,
    )
    facts = replace(facts, privacy=terms)
    if name := unbounded_reply(method, facts):
        raise unbounded(name, terms.unit)
    planned = max(1, method.rounds * releases_per_round(method, facts))
    delta, epsilon, rate = terms.delta, terms.epsilon, terms.rate
    noise = settings.dp_noise or noise_for(epsilon, delta, planned, rate)
    most = most_releases(epsilon, delta, noise, rate, planned) if epsilon else 0
    if epsilon and not most:
        raise ConfigError(
            f"run.dp_noise is {noise:g}: one noisy sum costs more than run.dp_epsilon = "
            f"{epsilon:g}; give more noise, or leave it out"
        )
    return replace(facts, privacy=replace(terms, noise=noise, releases=most))


def noisy_sums(method: Method, facts: Facts) -> int:
    """Returns how many noisy sums a round of a run has; 0 if it is not private."""
    return 0 if facts.privacy is None else releases_per_round(method, facts)


def privacy_summary(facts: Facts, budget: Spending | None) -> dict[str, Any] | None:
    """Returns the privacy part of a run's summary; None if nothing has noise."""
    found = budget.summary() if budget is not None else {}
    if facts.edge_epsilon:
        found["edge_epsilon"] = facts.edge_epsilon
        found["private"] = bool(found.get("private", True)) and not facts.edges_seeded
    return found or None


def privacy_warnings(privacy: dict[str, Any] | None, rounds: int, planned: int) -> list[str]:
    """Returns lines for the summary: noise that is not secret, and rounds without a budget.

    Args:
        privacy: What `privacy_summary` returns.
        rounds: The rounds of the run.
        planned: The rounds that were planned.
    """
    found = []
    if privacy and not privacy["private"]:
        found.append("not private: the noise comes from the run's seed (run.dp_seeded)")
    if privacy and privacy.get("exhausted") and rounds < planned:
        found.append(
            f"the run ended after round {rounds} of {planned}: one more would exceed "
            f"run.dp_epsilon = {privacy['limit']:g}"
        )
    return found


def require_resumable(settings: RunSettings) -> None:
    """Raises a ConfigError if a resumed run would draw its edges again: that costs ε again."""
    if settings.edge_epsilon and not settings.dp_seeded:
        raise ConfigError(
            f"resume: run.edge_epsilon is {settings.edge_epsilon:g}: a resumed run would flip "
            "edges again, which costs as much again; run it from the beginning in a new folder"
        )
