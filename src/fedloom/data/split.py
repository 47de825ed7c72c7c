"""Splits: which items train, validate and test.

| split | meaning |
|---|---|
| "20/40/40" | within each client and class: 20 % train, 40 % validate, the rest test |
| "global 10/10/80" | over all items, regardless of client and class (FedStruct) |
| "global-class 20/40/40" | within each class, regardless of client |
| "public" | the masks of the dataset |

The items are shuffled. The first int(20 %) train, the next int(40 %) validate, all others test.
Because of the truncation, a class with fewer than 5 items has no training items under "20/40/40",
but it has test items. Items without a label (y = -1) are in no mask.
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
    """Returns the graph with new train, val and test masks.

    A client's masks depend only on the seed, its name and its own items. A client that splits its
    own part alone therefore gets the masks that it has in the whole graph.

    Args:
        graph: The graph.
        split: See the table at the top of this module.
        seed: The seed of the shuffle.
        owner: The client number of each item, for splits within clients. None: one client owns all.
        names: The clients' names. The default is "0", "1", ...
    """
    scope, shares = check_split(split)
    if shares is None:
        return _public(graph)
    y = graph.y.numpy()
    part = np.full(len(y), -1)
    if scope is None:
        owners = np.zeros(len(y), dtype=np.int64) if owner is None else owner.numpy()
        names = names or [str(k) for k in range(owners.max(initial=0) + 1)]
        ends = np.cumsum(np.bincount(owners, minlength=len(names)))
        for name, items in zip(
            names, np.split(order_by_owner(owners, len(ends)), ends), strict=False
        ):
            part[items] = _draw(y[items], shares, seed, "client", name)
    else:
        part = _draw(y if scope == "global-class" else np.minimum(y, 0), shares, seed, scope)
    train, val, test = (torch.from_numpy(part == number) for number in range(3))
    return replace(graph, train=train, val=val, test=test)


def check_split(split: str) -> tuple[str | None, tuple[Fraction, Fraction] | None]:
    """Parses a split. Returns its scope and the shares of train and val.

    The scope is None for splits within clients. The shares are None for public masks. Raises a
    ConfigError with an example if the text is not a split.
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
        f"split {split!r}: must be train/val/test percentages that sum to 100, such as '20/40/40' "
        "(per client and class), 'global 10/10/80' or 'global-class 20/40/40' (over all clients), "
        "or 'public' (the dataset's own)"
    )


def order_by_owner(owner: npt.NDArray[Any], owners: int) -> npt.NDArray[np.int64]:
    """Returns the order that groups entries by owner and keeps their order within an owner.

    NumPy sorts integers of up to 16 bits by counting, so that the time does not depend on the
    number of owners. It sorts wider integers by merging.
    """
    return np.argsort(owner.astype(np.min_scalar_type(owners)), kind="stable")


def _draw(
    strata: npt.NDArray[np.int64], shares: tuple[Fraction, Fraction], seed: int, *stream: str
) -> npt.NDArray[np.int64]:
    """Returns 0 (train), 1 (val) or 2 (test) for every item, drawn within each stratum.

    Items in a negative stratum get -1.
    """
    shuffled = np.random.default_rng(stream_seed(seed, "split", *stream)).permutation(len(strata))
    order = shuffled[np.argsort(strata[shuffled], kind="stable")]
    _, start, size = np.unique(strata[order], return_index=True, return_counts=True)
    rank = np.arange(len(order)) - np.repeat(start, size)
    # Integer arithmetic, because int(0.29 * 100) is 28.
    num_train, num_val = (
        np.repeat(size * share.numerator // share.denominator, size) for share in shares
    )
    part = np.empty(len(strata), dtype=np.int64)
    part[order] = (rank >= num_train).astype(np.int64) + (rank >= num_train + num_val)
    return np.where(strata < 0, -1, part)


def _public(graph: Graph) -> Graph:
    if not (graph.train.any() and graph.test.any()):
        raise ConfigError(
            f"split 'public': {graph.name!r} comes with no masks; "
            f"give percentages such as {DEFAULT_SPLIT!r}"
        )
    known = graph.y >= 0
    return replace(
        graph, train=graph.train & known, val=graph.val & known, test=graph.test & known
    ).check()
