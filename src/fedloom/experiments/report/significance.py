"""Statistics over several runs: means, standard deviations, and tests of differences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, stdev
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Summary = Mapping[str, Any]


class Spread(NamedTuple):
    """A mean over seeds with its standard deviation (of the sample; None for a single value)."""

    mean: float
    deviation: float | None

    def __str__(self) -> str:
        """Returns both in percent: "81.2 ± 0.4"."""
        if self.deviation is None:
            return f"{100 * self.mean:.1f}"
        return f"{100 * self.mean:.1f} ± {100 * self.deviation:.1f}"


def spread(values: Iterable[float | None]) -> Spread | None:
    """Returns the mean and standard deviation of the known values; None if none is known."""
    known = [v for v in values if v is not None]
    if not known:
        return None
    return Spread(mean(known), stdev(known) if len(known) > 1 else None)


def points(difference: float) -> str:
    """Returns a difference in points: "+1.2". A difference that rounds to 0 is "+0.0"."""
    return f"{round(difference, 1) + 0.0:+.1f}"


class Verdict(NamedTuple):
    """The test of some differences.

    The test is Wilcoxon's two-sided signed-rank test. It leaves out differences of 0. Clients of
    one run share a partition and a server, so they are not fully independent and p is a little too
    small.

    Attributes:
        mean: The mean difference.
        low: The lower end of its 95 % interval (bootstrap).
        high: The upper end.
        up: How many differences are above 0.
        down: How many are below 0.
        p: The p-value.
    """

    mean: float
    low: float
    high: float
    up: int
    down: int
    p: float

    def __str__(self) -> str:
        """Returns the verdict in points, as tables print it."""
        interval = f"{self.mean:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"
        return f"{interval}, {self.up} up {self.down} down, p = {self.p:.2g}"


def paired(
    ours: Sequence[Summary], theirs: Sequence[Summary], metric: str = "accuracy"
) -> list[float]:
    """Returns the differences between two methods in points, one for each seed and client.

    It returns one for each seed if the scores of clients are not known (secure runs) or if the two
    runs have different clients (a centralized baseline).

    Args:
        ours: The summaries of the first method, by seed.
        theirs: The summaries of the second method, for the same seeds in the same order.
        metric: The score to compare.
    """
    found: list[float] = []
    for a, b in zip(ours, theirs, strict=True):
        if a["seed"] != b["seed"]:
            raise ValueError(f"seed {a['seed']} cannot be paired with seed {b['seed']}")
        here, there = _by_client(a, metric), _by_client(b, metric)
        if here and here.keys() == there.keys():
            pairs = [(here[c], there[c]) for c in here]
        else:
            pairs = [(a.get(metric), b.get(metric))]
        found += [100 * (x - y) for x, y in pairs if x is not None and y is not None]
    return found


def _by_client(summary: Summary, metric: str) -> dict[str, float | None]:
    rows = {row["id"]: row.get(metric.removesuffix("_mean")) for row in summary["per_client"]}
    return rows if any(value is not None for value in rows.values()) else {}


def verdict(differences: Sequence[float]) -> Verdict:
    """Tests differences. There must be at least one."""
    values = np.asarray(differences, dtype=float)
    drawn = np.random.default_rng(0).choice(values, (4000, len(values))).mean(1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    up, down = int((values > 0).sum()), int((values < 0).sum())
    return Verdict(float(values.mean()), float(low), float(high), up, down, wilcoxon(values))


def wilcoxon(values: NDArray[np.float64]) -> float:
    """Returns the p-value of Wilcoxon's two-sided signed-rank test that the median is 0.

    It is that of `scipy.stats.wilcoxon`, which takes half a second to import. Values of 0 are left
    out, equal ones share their mean rank. The p-value is exact for up to 50 values, if there are
    neither zeros nor equal values among them, and for up to 13 values in any case. Otherwise the
    rank sum is taken as normally distributed.
    """
    kept = values[values != 0]
    n = len(kept)
    if not n:
        return 1.0
    _, rank_of, counts = np.unique(np.abs(kept), return_inverse=True, return_counts=True)
    ranks = (counts.cumsum() - (counts - 1) / 2)[rank_of]
    positive = float(ranks[kept > 0].sum())
    if len(values) <= 13 or (len(values) <= 50 and n == len(values) == len(counts)):
        # The rank sums of all 2^n combinations of signs. Ranks may be halves, so they are doubled.
        combinations = np.ones(1)
        for rank in (2 * ranks).round().astype(int):
            without, together = np.pad(combinations, (0, rank)), np.pad(combinations, (rank, 0))
            combinations = without + together
        at = round(2 * positive)
        tail = min(combinations[: at + 1].sum(), combinations[at:].sum())
        return min(1.0, float(2 * tail / 2**n))
    variance = n * (n + 1) * (2 * n + 1) / 24 - float((counts**3 - counts).sum()) / 48
    return math.erfc(abs(positive - n * (n + 1) / 4) / math.sqrt(2 * variance))


def holm(p: Mapping[str, float]) -> dict[str, float]:
    """Returns p-values corrected for their number by Holm's method.

    The correction keeps the chance of any false alarm among them below the level of the test.
    """
    corrected, worst = {}, 0.0
    for rank, name in enumerate(sorted(p, key=lambda each: p[each])):
        worst = max(worst, min(1.0, (len(p) - rank) * p[name]))
        corrected[name] = worst
    return corrected
