"""The batched form of prototypes: those of several clients as rows of one sparse product."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.data.graph import Graph
from fedloom.data.sparse import Sparse, weighted
from fedloom.engines.stacked.lockstep import Batched, Context
from fedloom.engines.stacked.matmul import blockwise
from fedloom.engines.stacked.parameters import stacked_parameters
from fedloom.engines.stacked.tensors import common_source, join_rows, joint_tensor, split_rows
from fedloom.engines.stacked.terms import log_softmax
from fedloom.nn import prototypes
from fedloom.nn.operations import Operation
from fedloom.nn.prototypes import Neighbourhoods


class BatchedUnitRows(Batched):
    """Rows of several clients, scaled to length 1."""

    def key(self, *args: Any) -> Hashable:
        """Rows of equal width."""
        return args[0].shape[1]

    def batch(self, calls: Sequence[tuple[Any, ...]], context: Context) -> list[Tensor]:
        """All rows at once."""
        rows = [z for (z,) in calls]
        return split_rows(F.normalize(join_rows(rows)), [len(z) for z in rows])


class BatchedAlignment(Batched):
    """Alignments of the class centres of several graphs' views."""

    def key(self, *args: Any) -> Hashable:
        """Plain graphs, outputs of equal widths, and the same temperature."""
        graph, logits, z, _, tau = args
        return (logits.shape[1], z.shape[1], tau) if type(graph) is Graph else None

    def batch(self, calls: Sequence[tuple[Any, ...]], context: Context) -> list[Tensor]:
        """The centres of all graphs are rows of one table, [graphs · C, p]."""
        graphs, logits, first, second, taus = zip(*calls, strict=True)
        K, C = len(graphs), graphs[0].num_classes

        def make() -> tuple[Tensor, Tensor, Tensor]:
            sizes = torch.tensor([graph.num_items for graph in graphs])
            owner = torch.repeat_interleave(torch.arange(K), sizes)
            y = torch.cat([graph.y for graph in graphs])
            return torch.cat([graph.train for graph in graphs]), y, owner * C

        train, y, start = context.group.cached("pseudo-labels", graphs, make)
        log_p, guess = log_softmax(join_rows(logits).detach()).max(1)
        place = start + torch.where(train, y, guess)
        sure = torch.where(train, 1.0, log_p.exp())
        total = sure.new_zeros(K * C).index_add(0, place, sure)
        share = sure / total.index_select(0, place)
        P, P_second = (
            F.normalize(
                z.new_zeros(K * C, z.shape[1]).index_add(0, place, share.unsqueeze(1) * z)
            ).view(K, C, -1)
            for z in (join_rows(first), join_rows(second))
        )
        present = (total > 0).view(K, C)
        hidden = torch.cat([~present, ~present], 1).unsqueeze(1).repeat(1, C, 1)
        hidden[:, :, C:] |= torch.eye(C, dtype=torch.bool)
        among = P_second @ torch.cat([P, P_second], 1).mT / taus[0]
        log_q = among.masked_fill(hidden, -torch.inf).log_softmax(2)
        own = log_q[:, :, :C].diagonal(dim1=1, dim2=2)
        return split_rows(-own.where(present, 0.0).sum(1) / present.sum(1))


class BatchedVote(Batched):
    """Votes of the same clusters on several clients' items."""

    def key(self, *args: Any) -> Hashable:
        """Copies of the same clusters, and equal settings."""
        z, clusters, of_class, num_classes, tau = args
        sources = [common_source([tensor]) for tensor in (clusters, of_class)]
        if any(source is None for source in sources):
            return None
        return z.shape[1], *map(id, sources), num_classes, tau

    def batch(self, calls: Sequence[tuple[Any, ...]], context: Context) -> list[Tensor]:
        """All items at once."""
        rows = [call[0] for call in calls]
        votes = prototypes.vote.function(join_rows(rows), *calls[0][1:])
        return split_rows(votes, [len(z) for z in rows])


class _Joined:
    """The neighbourhoods of several clients as one.

    Pairs of all hops are one list. At hop h, item i of all items is row (h − 1) · items + i.

    Attributes:
        sizes: The number of items of each client.
        means: The matrix [clients · C, items] that averages the items of each class.
        centre: The row of each pair's centre.
        member: The row of each pair's member.
        rows: The number of rows.
        size: The number of members of the pair's centre.
        peers: The number of centres of the class that have members.
        hops: The pairs as a matrix [clients · C · H, items]. A row belongs to a prototype.
        order: The pairs in the order of that matrix.
    """

    def __init__(self, parts: Sequence[Neighbourhoods]):
        C, depth = parts[0].classes, len(parts[0].hops)
        self.sizes = [len(part.label) for part in parts]
        starts = list(accumulate(self.sizes, initial=0))
        items = starts[-1]
        label = torch.cat([part.label for part in parts])
        client = torch.repeat_interleave(torch.arange(len(parts)), torch.tensor(self.sizes))
        labelled = (label >= 0).nonzero().flatten()
        row = client[labelled] * C + label[labelled]
        count = torch.bincount(row, minlength=len(parts) * C)
        self.means = Sparse.from_edges(row, labelled, 1 / count[row], (len(count), items))
        pairs = [
            (k, h, at, starts[k])
            for h in range(depth)
            for k, at in enumerate(part.hops[h] for part in parts)
        ]
        self.rows = depth * items
        self.centre = torch.cat([at.centre + start + h * items for _, h, at, start in pairs])
        self.member = torch.cat([at.member + start + h * items for _, h, at, start in pairs])
        self.size = torch.cat([at.size for _, _, at, _ in pairs])
        self.peers = torch.cat([at.peers for _, _, at, _ in pairs])
        prototype = torch.cat([(k * C + at.of) * depth + h for k, h, at, _ in pairs])
        self.order = torch.argsort(prototype * items + self.member % items, stable=True)
        self.hops = Sparse.from_edges(
            prototype, self.member % items, self.size, (len(parts) * C * depth, items)
        )


class BatchedPrototypes(Batched):
    """Prototypes of the neighbourhoods of several clients' items."""

    def key(self, *args: Any) -> Hashable:
        """Embeddings of equal width, equally many classes and hops, all with attention or none."""
        z, around, attention = args
        if not around.hops:
            return None
        return z.shape[1], around.classes, len(around.hops), attention is None

    def batch(self, calls: Sequence[tuple[Any, ...]], context: Context) -> list[Tensor]:
        """One product for the class means, and one for all hops."""
        rows, around, attentions = zip(*calls, strict=True)
        joined = context.group.cached("neighbourhoods", around, lambda: _Joined(around))
        z = join_rows(rows)
        if attentions[0] is None:
            weight = 1 / joined.size
        else:
            weight = _attention(stacked_parameters(attentions)["vectors"], z, joined)
        weight = (weight / joined.peers).index_select(0, joined.order)
        shape = (len(calls), around[0].classes, -1, z.shape[1])
        tables = (joined.means @ z).view(shape), weighted(joined.hops, weight, z).view(shape)
        return split_rows(torch.cat(tables, 2))


def _attention(vectors: Tensor, z: Tensor, pairs: _Joined) -> Tensor:
    """Returns the weight of each pair; see `fedloom.nn.prototypes.Attention`.

    vectors: [clients, H, 3, p].
    """
    depth = vectors.shape[1]
    scores = blockwise(z, vectors.flatten(1, 2).mT.contiguous(), pairs.sizes)
    own, other, common = scores.view(-1, depth, 3).permute(2, 1, 0).reshape(3, -1).unbind()
    centre, member = pairs.centre, pairs.member
    nothing = z.new_zeros(pairs.rows)
    mean = nothing.index_add(0, centre, common.index_select(0, member) / pairs.size)
    at_centre = (own + mean).index_select(0, centre)
    score = F.leaky_relu(at_centre + other.index_select(0, member), 0.2)
    lowest = torch.full_like(nothing, -torch.inf)
    highest = lowest.scatter_reduce(0, centre, score.detach(), "amax")
    share = (score - highest.index_select(0, centre)).exp()
    return share / nothing.index_add(0, centre, share).index_select(0, centre)


class BatchedTableDistance(Batched):
    """Distances between the tables of several clients."""

    def key(self, *args: Any) -> Hashable:
        """Tables of equal shape."""
        return args[0].shape

    def batch(self, calls: Sequence[tuple[Any, ...]], context: Context) -> list[Tensor]:
        """The distances of all entries at once."""
        one, other, both = (
            torch.stack(column) if (whole := joint_tensor(column)) is None else whole
            for column in zip(*calls, strict=True)
        )
        apart = ((one - other).square().sum(-1) + 1e-12).sqrt()
        return split_rows((apart * both).flatten(1).sum(1))


PROTOTYPES: Mapping[Operation[Any, Any], Batched] = {
    prototypes.centre_alignment: BatchedAlignment(),
    prototypes.vote: BatchedVote(),
    prototypes.unit_rows: BatchedUnitRows(),
    prototypes.neighbourhood_prototypes: BatchedPrototypes(),
    prototypes.table_distance: BatchedTableDistance(),
}
