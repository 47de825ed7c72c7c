"""Who is like whom: pairs of nodes with a large inner product, found some rows at a time, so that no n x n matrix is ever held."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Generator, Tensor

from fedloom.errors import ConfigError

ROWS, ENTRIES = 1024, 2**24  # of similarities that are held at once, at most


def similarities(z: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Inner products of the rows of z [n, width], block by block: node numbers [rows] and [rows, n], -inf with themselves."""
    for rows in torch.arange(len(z)).split(min(ROWS, max(1, ENTRIES // max(len(z), 1)))):
        block = z[rows] @ z.T
        block[torch.arange(len(rows)), rows] = -torch.inf
        yield rows, block


def nearest(z: Tensor, count: int) -> Tensor:
    """Every row's `count` others (all, if there are fewer) with the largest inner product, [n, count]; of unit rows: by cosine."""
    count = min(count, max(len(z) - 1, 0))
    return torch.cat(
        [block.topk(count).indices for _, block in similarities(z)]
        or [torch.zeros(0, count, dtype=torch.int64)]
    )


def linked_to_nearest(z: Tensor, count: int) -> Tensor:
    """The links from every row to its nearest, [2, n * count]."""
    near = nearest(z, count)
    return torch.stack([torch.arange(len(z)).repeat_interleave(near.shape[1]), near.flatten()])


def above(z: Tensor, threshold: float, most: int) -> Tensor:
    """The pairs i < j whose inner product exceeds `threshold`, [2, pairs]; a ConfigError if there are more than `most`."""
    found, count = [], 0
    for rows, block in similarities(z):
        i, j = (block > threshold).nonzero(as_tuple=True)
        i = rows[i]
        found.append(torch.stack([i, j])[:, i < j])
        count += found[-1].shape[1]
        if count > most:
            raise ConfigError(
                f"threshold {threshold:g}: more than {most} pairs of {len(z)} nodes are above it; choose a larger one"
            )
    return torch.cat(found, 1) if found else torch.zeros(2, 0, dtype=torch.int64)


def pairs(ends: Tensor, n: int) -> Tensor:
    """The pairs i < j that links [2, any] join, each once, in order, without loops: [2, pairs]."""
    low, high = ends.sort(0).values
    key = (low * n + high)[low != high].unique()
    return torch.stack([key // n, key % n])


def other_pairs(edges: Tensor, n: int, rng: Generator) -> Tensor:
    """About as many random pairs i < j of n nodes as there are edges [2, edges], i < j, none of them an edge."""
    drawn = pairs(torch.randint(n, edges.shape, generator=rng), n)
    return drawn[:, ~torch.isin(drawn[0] * n + drawn[1], edges[0] * n + edges[1])]
