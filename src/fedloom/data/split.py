"""Splits: which items train, which validate, which test.

| split | meaning |
|---|---|
| "20/40/40" | per client and class: shuffled, the first int(20 %) train, the next int(40 %) validate, all the rest test |
| "global 10/10/80" | the same over all items at once, whatever their client and class (FedStruct) |
| "global-class 20/40/40" | per class over all items, whatever their client |
| "public" | the masks the dataset came with |

Because of the truncation a class with fewer than 5 items has no training item under "20/40/40", but does have test items.
Items without a label (y = -1) are in no mask.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedloom.data.graph import Graph
from fedloom.data.seeds import stream_seed
from fedloom.errors import ConfigError

DEFAULT_SPLIT = "20/40/40"
_PUBLIC = "public"
_NUMBER = r"(\d{1,3}(?:\.\d{1,6})?)"
_SHARES = re.compile(rf"(?:(global|global-class)\s+)?{_NUMBER}\s*/\s*{_NUMBER}\s*/\s*{_NUMBER}")


def apply_split(
    graph: Graph,
    split: str = DEFAULT_SPLIT,
    seed: int = 0,
    *,
    owner: Tensor | None = None,
    names: Sequence[str] | None = None,
) -> Graph:
    """Gives the graph with its train, val and test masks set as `split` says (the table above).

    owner: client number per item, for splits per client; None = one client holds everything. names: the clients' names, by
    default "0", "1", ...; a client's draw depends on the seed, its name and its own items only, so a client that splits its
    own part alone gets the masks it has in the whole.
    """
    scope, shares = check_split(split)
    if shares is None:
        return _public(graph)
    y = graph.y.numpy()
    lot = np.full(len(y), -1)
    if scope is None:
        held_by = np.zeros(len(y), dtype=np.int64) if owner is None else owner.numpy()
        names = names or [str(k) for k in range(held_by.max(initial=0) + 1)]
        ends = np.cumsum(np.bincount(held_by, minlength=len(names)))
        for name, items in zip(
            names, np.split(order_by_owner(held_by, len(ends)), ends), strict=False
        ):
            lot[items] = _draw(y[items], shares, seed, "client", name)
    else:
        lot = _draw(y if scope == "global-class" else np.minimum(y, 0), shares, seed, scope)
    train, val, test = (torch.from_numpy(lot == number) for number in range(3))
    return replace(graph, train=train, val=val, test=test)


def check_split(split: str) -> tuple[str | None, tuple[Fraction, Fraction] | None]:
    """Takes a split's text apart: its scope (None = per client) and the shares of train and val (None = public masks).

    Raises a ConfigError that shows an example if the text is no split.
    """
    if split == _PUBLIC:
        return None, None
    match = _SHARES.fullmatch(split.strip()) if isinstance(split, str) else None
    if match:
        scope, *texts = match.groups()
        train, val, test = (Fraction(text) / 100 for text in texts)
        if train + val + test == 1:
            return scope, (train, val)
    raise ConfigError(
        f"split {split!r}: must be train/val/test percentages that sum to 100, such as '20/40/40' (per client and class), "
        "'global 10/10/80' or 'global-class 20/40/40' (over all clients), or 'public' (the dataset's own)"
    )


def order_by_owner(owner: npt.NDArray[Any], owners: int) -> npt.NDArray[np.int64]:
    """The order that puts what one owner has together, in the order given. By counting, so that many owners cost no more than few."""
    return np.argsort(
        owner.astype(np.min_scalar_type(owners)), kind="stable"
    )  # numpy counts up to 16 bits, and merges beyond


def _draw(
    strata: npt.NDArray[np.int64], shares: tuple[Fraction, Fraction], seed: int, *stream: str
) -> npt.NDArray[np.int64]:
    """0 = train, 1 = val, 2 = test for every item, drawn within each stratum; -1 where the stratum is negative."""
    shuffled = np.random.default_rng(stream_seed(seed, "split", *stream)).permutation(len(strata))
    order = shuffled[np.argsort(strata[shuffled], kind="stable")]
    _, start, size = np.unique(strata[order], return_index=True, return_counts=True)
    rank = np.arange(len(order)) - np.repeat(start, size)
    # Whole-number arithmetic: int(0.29 * 100) would be 28.
    num_train, num_val = (
        np.repeat(size * share.numerator // share.denominator, size) for share in shares
    )
    lot = np.empty(len(strata), dtype=np.int64)
    lot[order] = (rank >= num_train).astype(np.int64) + (rank >= num_train + num_val)
    return np.where(strata < 0, -1, lot)


def _public(graph: Graph) -> Graph:
    if not (graph.train.any() and graph.test.any()):
        raise ConfigError(
            f"split 'public': {graph.name!r} comes with no masks; give percentages such as {DEFAULT_SPLIT!r}"
        )
    known = graph.y >= 0
    return replace(
        graph, train=graph.train & known, val=graph.val & known, test=graph.test & known
    ).check()
