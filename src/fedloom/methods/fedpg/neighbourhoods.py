"""Neighbourhoods N_h(i) of items with a class, and the attention w_ij over them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from scipy.sparse import csr_matrix
from torch import Tensor, nn

from fedloom.data.graph import Graph
from fedloom.methods._shared.structure import at_distance

Pairs = tuple[Tensor, Tensor]  # centres and members, [pairs] each


class Neighbours:
    """All N_h(i) at one hop h, as pairs of a centre i and a member j.

    Args:
        centre: i of each pair. It has a class.
        member: j of each pair.
        label: The class of every item; -1 if unknown.
        classes: C.

    Attributes:
        size: The number of members of the pair's centre, [pairs].
        centres: The items that have members.
        of: The class of the pair's centre, [pairs].
        cell: The position of the pair in a matrix [classes, items].
        num_centres: The number of centres of each class that have members.
        num_members: The number of different members of each class's centres.
    """

    def __init__(self, centre: Tensor, member: Tensor, label: Tensor, classes: int):
        self.centre, self.member, self.items = centre, member, len(label)
        members = torch.bincount(centre, minlength=self.items)
        self.size = members[centre].float()
        self.centres = members.nonzero().flatten()
        self.of = label[centre]
        self.cell = self.of * self.items + member
        self.num_centres = torch.bincount(label[self.centres], minlength=classes)
        self.num_members = torch.bincount(
            torch.unique(self.cell) // max(self.items, 1), minlength=classes
        )

    def over_members(self, value: Tensor) -> Tensor:
        """Returns the sum over each centre's pairs of a number [pairs] or a vector [pairs, p].

        The result is [items] or [items, p]. It is 0 for items that are no centres.
        """
        return value.new_zeros(self.items, *value.shape[1:]).index_add(0, self.centre, value)


@dataclass
class Neighbourhoods:
    """What prototypes are computed from.

    Attributes:
        label: The class of every item; -1 if unknown.
        hops: The neighbours at hop 1 ... H.
    """

    label: Tensor
    hops: list[Neighbours]


class Attention(nn.Module):
    """a_1 ... a_H: how much each neighbour counts, given itself, its centre and the others."""

    def __init__(self, hops: int, width: int):
        super().__init__()
        self.vectors = nn.Parameter(torch.zeros(hops, 3, width))

    def forward(self, hop: int, z: Tensor, neighbours: Neighbours) -> Tensor:
        """Returns w_ij of the pairs at a hop. They sum to 1 for each centre."""
        centre, member = neighbours.centre, neighbours.member
        # A score is the sum of three numbers, [items] each.
        own, other, common = (z @ self.vectors[hop - 1].T).unbind(1)
        mean = neighbours.over_members(common[member] / neighbours.size)
        score = F.leaky_relu(own[centre] + other[member] + mean[centre], 0.2)
        lowest = score.new_full((len(z),), -torch.inf)
        highest = lowest.scatter_reduce(0, centre, score.detach(), "amax")
        share = (score - highest[centre]).exp()
        return share / neighbours.over_members(share)[centre]


def pairs_by_distance(graph: Graph, hops: int, starts: Tensor, seed: int) -> list[Pairs]:
    """Returns the pairs of nodes at distance exactly 1 ... `hops`, each centre's in random order.

    Args:
        graph: The graph.
        hops: H.
        starts: The centres.
        seed: Of the random order.
    """
    apart = at_distance(adjacency_of(graph), hops, starts)
    return [shuffled_pairs(starts, pairs, seed) for pairs in apart]


def adjacency_of(graph: Graph) -> csr_matrix:
    """Returns a matrix [nodes, nodes] with an entry for every edge."""
    source, target = graph.edge_index.numpy()
    return csr_matrix(
        (torch.ones(graph.num_edges).numpy(), (target, source)),
        shape=(graph.num_nodes, graph.num_nodes),
    )


def shuffled_pairs(starts: Tensor, apart: csr_matrix, seed: int) -> Pairs:
    """Returns the entries of a matrix [starts, nodes] as pairs.

    They are sorted by centre. The members of each centre are in random order.
    """
    pairs = apart.tocoo()
    order = torch.randperm(apart.nnz, generator=torch.Generator().manual_seed(seed))
    row = torch.from_numpy(pairs.row).long()[order]
    column = torch.from_numpy(pairs.col).long()[order]
    order = row.argsort(stable=True)
    return starts[row[order]], column[order]


def first_of_each(most: int, centre: Tensor, member: Tensor) -> Pairs:
    """Returns at most the first `most` pairs of each centre. The pairs are sorted by centre."""
    counts = torch.bincount(centre)
    kept = torch.arange(len(centre)) - (counts.cumsum(0) - counts)[centre] < most
    return centre[kept], member[kept]
