"""Reads the outlier report of history entries: `updates`, as `fedloom.core.combining` makes it.

A run folder may come from others, so nothing is assumed of its numbers. This module does not import
torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

SHOWN = 10  # clients, of a run or a round; the others are counted
LONG = 2.0  # times the median norm: a longer update stands out, and one as much shorter
AGAINST = 0.0  # a cosine to the median update below this stands out


class Update(NamedTuple):
    """How the update of a client compares with the others of its round.

    Attributes:
        client: The client.
        norm: Its norm, divided by the median norm; None if it is not finite.
        cosine: Its cosine to the median update; None if it is not finite.
        shortened: Whether it was shortened.
        left_out: Whether it was not used.
    """

    client: str
    norm: float | None
    cosine: float | None
    shortened: bool
    left_out: bool

    @property
    def stands_out(self) -> bool:
        """Whether it was changed or left out, is far from the median length, or points away."""
        usual = self.norm is not None and 1 / LONG <= self.norm <= LONG
        along = self.cosine is not None and self.cosine >= AGAINST
        return self.shortened or self.left_out or not usual or not along


def updates_of(entry: Mapping[str, Any]) -> Iterator[tuple[str, list[Update]]]:
    """Yields each phase that a history entry compares updates of, and these updates.

    Raises a ValueError, TypeError, KeyError or AttributeError if the entry is damaged.
    """
    for row in entry.get("updates", ()):
        clipped, left_out = set(row["clipped"]), set(row["left_out"])
        yield (
            str(row["phase"]),
            [
                Update(str(c), _finite(norm), _finite(cosine), c in clipped, c in left_out)
                for c, (norm, cosine) in row["clients"].items()
            ],
        )


def distance(norms: Sequence[float | None], cosines: Sequence[float | None]) -> float:
    """Returns how far updates are from the median one: infinite if a number is not finite.

    It is the mean, over the updates, of how many times the norm doubles or halves, plus 1 - cosine.
    """
    each = [
        math.inf if norm is None or cosine is None else _doublings(norm) + 1 - cosine
        for norm, cosine in zip(norms, cosines, strict=True)
    ]
    return sum(each) / max(len(each), 1)


def standing_out(entry: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the clients that stand out in a history entry, for the watch page.

    Returns {round, compared, standing_out, clients}: the round, the number of updates, how many of
    them stand out, and the `SHOWN` that do most. None if the entry compares no updates.
    """
    found = [(phase, update) for phase, updates in updates_of(entry) for update in updates]
    if not found:
        return None
    out = [(phase, update) for phase, update in found if update.stands_out]
    out.sort(key=_by_distance)
    return {
        "round": int(entry["round"]),
        "compared": len(found),
        "standing_out": len(out),
        "clients": [{"phase": phase, **update._asdict()} for phase, update in out[:SHOWN]],
    }


def _by_distance(found: tuple[str, Update]) -> tuple[bool, float]:
    update = found[1]
    changed = update.shortened or update.left_out
    return not changed, -distance([update.norm], [update.cosine])


def _doublings(norm: float) -> float:
    return abs(math.log2(norm)) if norm > 0 else math.inf


def _finite(value: Any) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None
