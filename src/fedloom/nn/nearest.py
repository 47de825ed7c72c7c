"""Nearest nodes: pairs with a large inner product.

The inner products are computed in blocks of rows, so that no n × n matrix is in memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Generator, Tensor

from fedloom.errors import ConfigError

ROWS, ENTRIES = 1024, 2**24  # the largest block


def similarities(z: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the inner products of the rows of z [n, width] in blocks.

    A block consists of node numbers [rows] and products [rows, n]. The product of a node with
    itself is -inf.
    """
    for rows in torch.arange(len(z)).split(min(ROWS, max(1, ENTRIES // max(len(z), 1)))):
        block = z[rows] @ z.T
        block[torch.arange(len(rows)), rows] = -torch.inf
        yield rows, block


def nearest(z: Tensor, count: int) -> Tensor:
    """Returns, for every row of z, the `count` other rows with the largest product, [n, count].

    If there are fewer other rows, it returns all. For unit rows, the product is the cosine.
    """
    count = min(count, max(len(z) - 1, 0))
    return torch.cat(
        [block.topk(count).indices for _, block in similarities(z)]
        or [torch.zeros(0, count, dtype=torch.int64)]
    )


def nearest_edges(z: Tensor, count: int) -> Tensor:
    """Returns edges from every row to its `count` nearest rows, [2, n * count]."""
    near = nearest(z, count)
    return torch.stack([torch.arange(len(z)).repeat_interleave(near.shape[1]), near.flatten()])


def above(z: Tensor, threshold: float, most: int) -> Tensor:
    """Returns the pairs i < j whose inner product exceeds `threshold`, [2, pairs].

    Raises a ConfigError if there are more than `most`.
    """
    found, count = [], 0
    for rows, block in similarities(z):
        i, j = (block > threshold).nonzero(as_tuple=True)
        i = rows[i]
        found.append(torch.stack([i, j])[:, i < j])
        count += found[-1].shape[1]
        if count > most:
            raise ConfigError(
                f"threshold {threshold:g}: more than {most} pairs of {len(z)} nodes are above it; "
                "choose a larger one"
            )
    return torch.cat(found, 1) if found else torch.zeros(2, 0, dtype=torch.int64)


def pairs(ends: Tensor, n: int) -> Tensor:
    """Returns the sorted, distinct pairs i < j of edges [2, any], without loops: [2, pairs]."""
    low, high = torch.minimum(*ends), torch.maximum(*ends)
    key = (low * n + high)[low != high].unique()
    return torch.stack([key // n, key % n])


def random_non_edges(edges: Tensor, n: int, rng: Generator) -> Tensor:
    """Returns random pairs i < j of n nodes that are not edges, about as many as edges.

    edges: pairs i < j, [2, edges].
    """
    drawn = pairs(torch.randint(n, edges.shape, generator=rng), n)
    return drawn[:, ~torch.isin(drawn[0] * n + drawn[1], edges[0] * n + edges[1])]
