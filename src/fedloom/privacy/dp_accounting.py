"""Accounting: the ε that noisy sums cost, by the package `dp-accounting` (extra `dp`).

Every released sum is a Gaussian mechanism with noise multiplier z, or, if participants are drawn by
secret coins, one on a Poisson sample of rate q. `dp-accounting` composes their privacy loss
distributions (PLD; Koskela et al., AISTATS 2020; Doroshenko et al., PETS 2022). Losses are rounded
up, so that ε is never too small.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from fedloom._system import AppendLog
from fedloom.core.privacy_terms import PrivacyTerms
from fedloom.errors import ConfigError, DataError

ROUNDED = 1e-3  # losses are rounded up to multiples of this: costs less than 1e-4 in ε
LARGE = 1000.0  # losses beyond are rounded more coarsely, so that memory stays bounded
LOG = "privacy-spent.jsonl"  # in a run folder: every noisy sum, through every resume

Kind = tuple[float, float]  # noise multiplier and sampling rate


class BudgetError(ConfigError):
    """A noisy sum would exceed the budget. Nothing was released."""


def _package() -> ModuleType:
    try:
        import dp_accounting
        import dp_accounting.pld
    except ModuleNotFoundError as error:
        raise ConfigError(
            "run.dp_epsilon needs the package 'dp-accounting': pip install 'fedloom[dp]'"
        ) from error
    package: ModuleType = dp_accounting
    return package


def epsilon_of(kinds: Iterable[tuple[Kind, int]], delta: float) -> float:
    """Returns the ε of noisy sums.

    Args:
        kinds: How many sums of each noise multiplier and sampling rate.
        delta: δ.
    """
    return _epsilon(tuple(sorted(kinds)), delta)


@lru_cache(maxsize=4096)
def _epsilon(kinds: tuple[tuple[Kind, int], ...], delta: float) -> float:
    if any(count and not noise for (noise, _), count in kinds):
        return math.inf
    dp = _package()
    loss = sum(count / (2 * noise * noise) for (noise, _), count in kinds if count)
    rounded = ROUNDED * max(1.0, loss / LARGE)
    accountant = dp.pld.PLDAccountant(value_discretization_interval=rounded)
    for (noise, rate), count in kinds:
        if count:
            accountant.compose(_event(dp, noise, rate), count)
    return float(accountant.get_epsilon(delta)) if any(count for _, count in kinds) else 0.0


def _event(dp: ModuleType, noise: float, rate: float) -> Any:
    event = dp.GaussianDpEvent(noise)
    return event if rate == 1 else dp.PoissonSampledDpEvent(rate, event)


@lru_cache(maxsize=1024)
def noise_for(epsilon: float, delta: float, releases: int, rate: float = 1.0) -> float:
    """Returns the least noise multiplier, up to 0.01 %, whose sums cost at most ε.

    Args:
        epsilon: ε of all sums.
        delta: δ.
        releases: The number of sums.
        rate: The sampling rate.
    """

    def cost(noise: float) -> float:
        return epsilon_of([((noise, rate), releases)], delta)

    # z of a Gaussian whose loss has its mean and a tail of δ below ε; sampling needs less.
    tail = math.sqrt(2 * math.log(1 / delta))
    high = math.sqrt(releases) / (math.sqrt(tail * tail + 2 * epsilon) - tail)
    while cost(high) > epsilon:
        high *= 1.5
    low = high / 1.5
    while cost(low) <= epsilon:
        low, high = low / 1.5, low
    while high - low > 1e-4 * high:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if cost(middle) > epsilon else (low, middle)
    return high


@lru_cache(maxsize=1024)
def most_releases(epsilon: float, delta: float, noise: float, rate: float, enough: int) -> int:
    """Returns how many sums cost at most ε, and not more than `enough`.

    Args:
        epsilon: ε; 0: no limit.
        delta: δ.
        noise: The noise multiplier.
        rate: The sampling rate.
        enough: The most that is asked for.
    """
    if not epsilon or epsilon_of([((noise, rate), enough)], delta) <= epsilon:
        return enough
    low, high = 0, enough
    while high - low > 1:
        middle = (low + high) // 2
        within = epsilon_of([((noise, rate), middle)], delta) <= epsilon
        low, high = (middle, high) if within else (low, middle)
    return low


class Budget:
    """What a run has spent. A noisy sum is recorded before it is released.

    The record survives crashes and resumes: a round that a resumed run repeats is a further
    release, and is counted again.

    Args:
        terms: The terms of the run.
        folder: The run folder; None keeps the record in memory.
        per_round: How many noisy sums a round has.
    """

    def __init__(self, terms: PrivacyTerms, folder: Path | None = None, per_round: int = 1):
        self.terms, self._per_round = terms, max(1, per_round)
        self._kinds: Counter[Kind] = Counter()
        self._seeded = terms.seeded
        self._log: AppendLog | None = None
        if folder is not None:
            path = folder / LOG
            self._log = AppendLog(path, self._resume(path) if path.exists() else 0)

    def _resume(self, path: Path) -> int:
        """Reads the record of the sessions before. Returns its length without a torn last line."""
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        try:
            for line in whole.splitlines():
                row = json.loads(line)
                self._kinds[float(row["noise"]), float(row["rate"])] += 1
                self._seeded |= bool(row["seeded"])
        except (ValueError, LookupError, TypeError) as error:
            raise DataError(
                f"resume: {str(path)!r} is damaged ({error}): what the run has spent is not known"
            ) from error
        return len(whole)  # a sum is released after its whole line is on the disk

    @property
    def kind(self) -> Kind:
        """The noise multiplier and the sampling rate of the next sum."""
        return self.terms.noise, self.terms.rate

    @property
    def releases(self) -> int:
        """The number of noisy sums so far."""
        return self._kinds.total()

    def spent(self, more: int = 0) -> float:
        """Returns ε so far, and after `more` sums."""
        return epsilon_of((self._kinds + Counter({self.kind: more})).items(), self.terms.delta)

    def require(self, phase: str) -> None:
        """Raises a BudgetError if one more sum exceeds ε."""
        limit = self.terms.epsilon
        if limit and self.spent(1) > limit:
            raise BudgetError(
                f"run.dp_epsilon is {limit:g}: one more noisy sum, of {phase!r}, would cost "
                f"{self.spent(1):.4g}; the run has spent {self.spent():.4g}"
            )

    def spend(self, round: int, phase: str) -> None:
        """Records a noisy sum, on the disk if there is a folder; raises as `require`."""
        self.require(phase)
        self._kinds[self.kind] += 1
        if self._log is not None:
            row = {
                "round": round,
                "phase": phase,
                "noise": self.terms.noise,
                "rate": self.terms.rate,
                "seeded": self.terms.seeded,
                "epsilon": self.spent(),
            }
            self._log.append((json.dumps(row) + "\n").encode())
            self._log.sync()

    @property
    def exhausted(self) -> bool:
        """Whether one more round would exceed ε."""
        limit = self.terms.epsilon
        return bool(limit) and self.spent(self._per_round) > limit

    def entry(self) -> dict[str, Any]:
        """Returns ε so far, for a history entry."""
        return {"epsilon": self.spent()}

    def summary(self) -> dict[str, Any]:
        """Returns the terms and what was spent, for the run's summary."""
        terms = self.terms
        return {
            "private": not self._seeded,
            "unit": terms.unit,
            "epsilon": self.spent(),
            "delta": terms.delta,
            "limit": terms.epsilon or None,
            "noise": terms.noise,
            "clip": terms.clip,
            "sampling": terms.sampling,
            "rate": terms.rate,
            "releases": self.releases,
            "exhausted": self.exhausted,
        }
