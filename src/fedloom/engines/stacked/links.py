"""The batched form of candidate links: their scores, draws and reconstruction."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.data.graph import Graph
from fedloom.data.sparse import Sparse, products_at
from fedloom.engines.stacked.graphs import GraphStack, stack_of
from fedloom.engines.stacked.lockstep import Batched, Context
from fedloom.engines.stacked.tensors import join_rows, split_rows
from fedloom.engines.stacked.terms import block_sums
from fedloom.nn import links
from fedloom.nn.operations import Operation


class _Links:
    """The candidates of several graphs as one matrix.

    Attributes:
        counts: The number of candidates of each graph.
        pairs: A matrix [nodes, nodes] with an entry for each candidate.
        key: The candidates' numbers i · nodes + j, ascending.
    """

    def __init__(self, stack: GraphStack):
        n = stack.num_nodes
        starts = accumulate(stack.sizes, initial=0)
        parts = [links.pairs_of(part) for part in stack.parts]
        low, high = torch.cat(
            [pairs + start for pairs, start in zip(parts, starts, strict=False)], 1
        )
        self.counts = [pairs.shape[1] for pairs in parts]
        self.pairs = Sparse.from_edges(low, high, torch.ones(len(low)), (n, n))
        self.key = low * n + high


def _links_of(stack: GraphStack) -> _Links:
    return stack.cached("links", lambda: _Links(stack))


class _OnCandidates(Batched):
    """An operation on rows of nodes and a graph of candidates."""

    def key(self, *args: Any) -> Hashable:
        """Rows of equal width, on plain graphs."""
        h, suggested = args[:2]
        return h.shape[1] if type(suggested) is Graph else None


class BatchedLinkScores(_OnCandidates):
    """Scores of the candidates of several graphs."""

    def batch(self, calls: Sequence[tuple[Any, ...]], context: Context) -> list[Tensor]:
        """The entries of one product at the coordinates of all candidates."""
        rows, graphs = zip(*calls, strict=True)
        found, h = _links_of(stack_of(graphs, context.group)), join_rows(rows)
        return split_rows(products_at(found.pairs, h, h), found.counts)


class BatchedDraw(Batched):
    """Draws of several graphs' candidates."""

    def key(self, *args: Any) -> Hashable:
        """Calls with equal settings."""
        _, alpha, softness, _ = args
        return alpha, softness

    def batch(self, calls: Sequence[tuple[Any, ...]], context: Context) -> list[Tensor]:
        """Each client's random numbers come from its own stream."""
        scores, alphas, softnesses, streams = zip(*calls, strict=True)
        counts = [len(score) for score in scores]
        uniform = torch.cat(
            [torch.rand(n, generator=rng) for n, rng in zip(counts, streams, strict=True)]
        )
        drawn = links.relaxed_draw(join_rows(scores), uniform, alphas[0], softnesses[0])
        return split_rows(drawn, counts)


class BatchedReconstruction(_OnCandidates):
    """The reconstruction of several graphs' candidates."""

    def batch(self, calls: Sequence[tuple[Any, ...]], context: Context) -> list[Tensor]:
        """Each client's other pairs come from its own stream."""
        rows, graphs, streams = zip(*calls, strict=True)
        stack, h = stack_of(graphs, context.group), join_rows(rows)
        found, n = _links_of(stack), stack.num_nodes
        starts = accumulate(stack.sizes, initial=0)
        drawn = [
            torch.randint(size, (2, count), generator=rng) + start
            for size, count, rng, start in zip(
                stack.sizes, found.counts, streams, starts, strict=False
            )
        ]
        i, j = torch.cat(drawn, 1)
        low, high = torch.minimum(i, j), torch.maximum(i, j)
        key = low * n + high
        nearest = torch.searchsorted(found.key, key).clamp(max=max(len(key) - 1, 0))
        other = ((low < high) & (found.key[nearest] != key)).float()
        # Sorted pairs stay in the block of their graph.
        pairs = Sparse.from_edges(low, high, other, (n, n))
        counts, others = torch.tensor(found.counts), block_sums(pairs.values, found.counts)
        linked = block_sums(F.softplus(-products_at(found.pairs, h, h)), found.counts)
        apart = block_sums(F.softplus(products_at(pairs, h, h)) * pairs.values, found.counts)
        return split_rows(0.5 * (linked / counts.clamp(min=1) + apart / others.clamp(min=1)))


LINKS: Mapping[Operation[Any, Any], Batched] = {
    links.link_scores: BatchedLinkScores(),
    links.draw_links: BatchedDraw(),
    links.reconstruction: BatchedReconstruction(),
}
