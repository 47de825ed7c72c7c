"""What can be said of several runs: means with their spread, and whether a difference between two methods is more than chance."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, stdev
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

Summary = Mapping[str, Any]


class Spread(NamedTuple):
    """A mean over seeds with its standard deviation (of the sample; None for a single value)."""

    mean: float
    deviation: float | None

    def __str__(self) -> str:
        """In percent: "81.2 ± 0.4"."""
        return f"{100 * self.mean:.1f}" + (
            f" ± {100 * self.deviation:.1f}" if self.deviation is not None else ""
        )


def spread(values: Iterable[float | None]) -> Spread | None:
    """The spread of the values that are known; None if none is."""
    known = [v for v in values if v is not None]
    if not known:
        return None
    return Spread(mean(known), stdev(known) if len(known) > 1 else None)


def points(difference: float) -> str:
    """A difference in points: "+1.2"; what rounds to nothing has no minus."""
    return f"{round(difference, 1) + 0.0:+.1f}"


class Verdict(NamedTuple):
    """What differences amount to: their mean with a 95 % interval (bootstrap), how many are above and below 0, and Wilcoxon's p.

    The test is the two-sided signed-rank test; differences of 0 say nothing and are left out. Clients of one run share a partition and a
    server, so they are not quite independent and p is a little too small.
    """

    mean: float
    low: float
    high: float
    up: int
    down: int
    p: float

    def __str__(self) -> str:
        """In points, as tables print it."""
        return f"{self.mean:+.2f} [{self.low:+.2f}, {self.high:+.2f}], {self.up} up {self.down} down, p = {self.p:.2g}"


def paired(
    ours: Sequence[Summary], theirs: Sequence[Summary], metric: str = "accuracy"
) -> list[float]:
    """Differences in points between two methods' summaries, by seed: one for each seed and client.

    Where clients' scores are not known (secure runs) or the clients are others (a pooled baseline), one for each seed.
    """
    found: list[float] = []
    for a, b in zip(ours, theirs, strict=True):
        if a["seed"] != b["seed"]:
            raise ValueError(f"seed {a['seed']} cannot be paired with seed {b['seed']}")
        here, there = _by_client(a, metric), _by_client(b, metric)
        pairs = (
            [(here[c], there[c]) for c in here]
            if here and here.keys() == there.keys()
            else [(a.get(metric), b.get(metric))]
        )
        found += [100 * (x - y) for x, y in pairs if x is not None and y is not None]
    return found


def _by_client(summary: Summary, metric: str) -> dict[str, float | None]:
    rows = {row["id"]: row.get(metric.removesuffix("_mean")) for row in summary["per_client"]}
    return rows if any(value is not None for value in rows.values()) else {}


def verdict(differences: Sequence[float]) -> Verdict:
    """What to make of differences; at least one."""
    values = np.asarray(differences, dtype=float)
    drawn = np.random.default_rng(0).choice(values, (4000, len(values))).mean(1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    p = float(stats.wilcoxon(values).pvalue) if values.any() else 1.0
    return Verdict(
        float(values.mean()),
        float(low),
        float(high),
        int((values > 0).sum()),
        int((values < 0).sum()),
        p,
    )


def holm(p: Mapping[str, float]) -> dict[str, float]:
    """p-values corrected for how many there are (Holm): the chance that any of them is a false alarm stays below the level."""
    corrected, worst = {}, 0.0
    for rank, name in enumerate(sorted(p, key=lambda each: p[each])):
        worst = max(worst, min(1.0, (len(p) - rank) * p[name]))
        corrected[name] = worst
    return corrected
