"""Says in one sentence which method is best, what it gains over Local, and at what traffic.

The sentence claims no more than the numbers show. It says so if a difference may be due to chance,
if there are too few seeds, if Local is missing, or if Local is best.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean
from typing import NamedTuple

from fedloom.experiments.report.comparison import (
    LEVEL,
    Comparison,
    Entry,
    matching_local,
)
from fedloom.experiments.report.labels import label
from fedloom.experiments.report.significance import Verdict, holm

ENOUGH = 3  # seeds for a claim


class Headline(NamedTuple):
    """What a comparison shows.

    Attributes:
        text: The sentence.
        name: The method that the sentence begins with, if it begins with one.
        details: Further sentences: references, methods that are as good, and other tasks.
    """

    text: str
    name: str = ""
    details: tuple[str, ...] = ()


def headline(c: Comparison) -> Headline:
    """Returns the headline of a comparison. One of several tasks summarizes them."""
    if len(c.tasks) == 1:
        return _of_task(c, c.tasks[0])
    tasks = [_of_task(c, task) for task in c.tasks]
    found = tuple(f"{task}: {one.text}" for task, one in zip(c.tasks, tasks, strict=True))
    everywhere = {row: score for row in c.rows if (score := c.overall(row)) is not None}
    everywhere = {row: s for row, s in everywhere.items() if not _any(c, row).is_reference}
    if not everywhere:
        return Headline(f"No method has a score on all {len(c.tasks)} tasks.", "", found)
    sign = -1 if c.minimised else 1
    best = max(everywhere, key=lambda row: sign * everywhere[row])
    wins = sum(c.on(task)[best].mark == "best" for task in c.tasks)
    text = (
        f"{best} has the best mean over the {len(c.tasks)} tasks, "
        f"{_score(c, everywhere[best])}, and is the best method on {wins} of them"
    )
    gains = [gain.mean for task in c.tasks if (gain := c.on(task)[best].gain)]
    if _any(c, best).is_local:
        text += ": no method gains from the federation on the mean"
    elif len(gains) == len(c.tasks):
        text += f"; it is {_above(mean(gains))} Local on the mean"
    return Headline(f"{text}.", best, found)


def _any(c: Comparison, row: str) -> Entry:
    return next(c.entries[task, row] for task in c.tasks if (task, row) in c.entries)


def _of_task(c: Comparison, task: str) -> Headline:
    entries = c.on(task)
    scored = [row for row in c.ranked(task) if entries[row].score]
    ranked = [row for row in scored if not entries[row].is_reference]
    federated = [row for row in ranked if not entries[row].is_local]
    if not scored:
        return Headline(f"No run has a value of {label(c.metric)}.")
    if not federated:
        row = (ranked or scored)[0]
        text = (
            f"{row} reaches {_score(c, entries[row].score)} ({_seeds(entries[row])}). "
            "There is no federated method to compare it with."
        )
        return Headline(text, row, _references(c, entries, [one for one in scored if one != row]))
    best = entries[federated[0]]
    local = matching_local(best, entries)
    details = (*_as_good(entries, federated, ranked[0]), *_references(c, entries, scored))
    if local is not None and local.score and entries[ranked[0]].is_local:
        return Headline(_local_is_best(c, entries, ranked[0], federated[0]), ranked[0], details)
    return Headline(_best(c, entries, federated[0], local), federated[0], details)


def _best(c: Comparison, entries: Mapping[str, Entry], row: str, local: Entry | None) -> str:
    """Returns the sentence about the best federated method."""
    e = entries[row]
    score, traffic, seeds = _score(c, e.score), _traffic(e), _seeds(e)
    if local is None or e.gain is None or local.score is None:
        alone = sum(not other.is_reference for other in entries.values()) == 1
        reached = f"{row} reaches {score}" if alone else f"{row} is best: {score}"
        return (
            f"{reached} over {seeds}, for {traffic}. No run of Local is in this report, so its "
            "gain is unknown."
        )
    above = _difference(e, local)
    if len(e.runs) < ENOUGH:
        few = "One seed is" if len(e.runs) == 1 else f"{len(e.runs)} seeds are"
        return f"{row} is best: {score}, {above}, for {traffic}. {few} too few for a claim."
    p = _corrected(entries)[row]
    test = f"{_p(p)}, {seeds}"
    better = e.gain.mean < 0 if c.minimised else e.gain.mean > 0
    if p >= LEVEL or not better:
        return (
            f"{row} has the best score, {score}, {above}, but this difference is within noise "
            f"({test}); it takes {traffic}."
        )
    return f"{row} is best: {score}, {above} ({_interval(e.gain)}, {test}), for {traffic}."


def _local_is_best(c: Comparison, entries: Mapping[str, Entry], local: str, row: str) -> str:
    """Returns the sentence about local training that no federated method beats."""
    ours, best = entries[local], entries[row]
    text = f"{local} is best: {_score(c, ours.score)} without any traffic. "
    if best.gain is None:
        return text + f"The best federated method is {row} with {_score(c, best.score)}."
    text += f"No federated method gains: the best of them, {row}, is {_difference(best, ours)}"
    if len(best.runs) < ENOUGH:
        return f"{text} ({_seeds(best)}, too few for a claim)."
    p = _corrected(entries)[row]
    noise = ", within noise" if p >= LEVEL else ""
    return f"{text}{noise} ({_p(p)}, {_seeds(best)})."


def _as_good(entries: Mapping[str, Entry], federated: list[str], best: str) -> tuple[str, ...]:
    """Returns a sentence about methods that the test does not distinguish from the best one."""
    if len(entries[best].runs) < ENOUGH:
        return ()
    alike = [row for row in federated if row != best and entries[row].like_best]
    if not alike:
        return ()
    shown = alike[0] if len(alike) == 1 else f"{', '.join(alike[:-1])} and {alike[-1]}"
    return (f"The test does not distinguish {shown} from {best}.",)


def _references(c: Comparison, entries: Mapping[str, Entry], scored: list[str]) -> tuple[str, ...]:
    """Returns a sentence about central training, which has all data in one place."""
    return tuple(
        f"Reference: {row}, with all data in one place, reaches {_score(c, entries[row].score)}."
        for row in scored
        if entries[row].is_reference
    )


def _corrected(entries: Mapping[str, Entry]) -> dict[str, float]:
    """Returns the p-values of the gains over Local, corrected for the number of methods."""
    return holm({row: e.gain.p for row, e in entries.items() if e.gain and not e.is_reference})


# ---- numbers as text ----
def _score(c: Comparison, score: float | tuple[float, float | None] | None) -> str:
    value = score[0] if isinstance(score, tuple) else score
    return f"{100 * (value or 0):.1f} % {label(c.metric)}"


def _difference(e: Entry, local: Entry) -> str:
    """Returns the gain over Local, which is a mean over clients and seeds without weights.

    The scores weight clients by size. The text says that it is another mean if the two differ.
    """
    assert e.gain is not None
    assert e.score is not None
    assert local.score is not None
    text = f"{_above(e.gain.mean)} Local"
    agrees = abs(100 * (e.score.mean - local.score.mean) - e.gain.mean) < 0.1
    return text if agrees else f"{text} on the mean over clients"


def _above(points: float) -> str:
    number = f"{abs(points):.1f}"
    unit = "point" if number == "1.0" else "points"
    return f"{number} {unit} {'above' if points >= 0 else 'below'}"


def _interval(gain: Verdict) -> str:
    return f"95 % interval {gain.low:.1f} to {gain.high:.1f}"


def _p(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}"


def _seeds(e: Entry) -> str:
    return f"{len(e.runs)} seed{'s' * (len(e.runs) > 1)}"


def _traffic(e: Entry) -> str:
    clients = max(1, int(e.runs[0].summary["clients"]))
    return f"{in_bytes(e.bytes_sent)} of traffic ({in_bytes(e.bytes_sent / clients)} per client)"


def in_bytes(count: float) -> str:
    """Returns a number of bytes with its unit: 36900000 gives "36.9 MB"."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
