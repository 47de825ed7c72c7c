"""Prototypes: the mean embedding of each class, and of the neighbourhoods of its items."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.data.graph import Graph
from fedloom.nn.operations import operation


@operation
def unit_rows(z: Tensor) -> Tensor:
    """Returns the rows of z [items, p] scaled to length 1."""
    return F.normalize(z)


def class_sums(z: Tensor, y: Tensor, mask: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Sums embeddings by class, over the items in `mask`.

    Args:
        z: Embeddings [items, p].
        y: Classes [items].
        mask: Which items count, bool [items].
        num_classes: C.

    Returns the sums [C, p] and the number of items of each class [C] (int64).
    """
    chosen = y[mask]
    sums = z.new_zeros(num_classes, z.shape[1]).index_add(0, chosen, z[mask])
    return sums, torch.bincount(chosen, minlength=num_classes)


def class_means(z: Tensor, y: Tensor, mask: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Returns mean embeddings by class [C, p] and counts [C]; see `class_sums`.

    The mean of a class without items is zero.
    """
    sums, counts = class_sums(z, y, mask, num_classes)
    return sums / counts.clamp(min=1).unsqueeze(1), counts


# ---- prototypes of all nodes, with the model's own guesses ----


def pseudo_labels(logits: Tensor, graph: Graph) -> tuple[Tensor, Tensor]:
    """Returns ŷ and a of all nodes."""
    sure, label = logits.softmax(1).max(1)
    return torch.where(graph.train, graph.y, label), torch.where(graph.train, 1.0, sure)


def class_centres(
    z: Tensor, label: Tensor, sure: Tensor, num_classes: int
) -> tuple[Tensor, Tensor]:
    """Returns P [classes, p] and which classes occur. P is zero for a class that does not."""
    total = z.new_zeros(num_classes).index_add(0, label, sure)
    sums = z.new_zeros(num_classes, z.shape[1]).index_add(0, label, sure.unsqueeze(1) * z)
    return sums / total.where(total > 0, 1.0).unsqueeze(1), total > 0


def alignment(second: Tensor, first: Tensor, tau: float) -> Tensor:
    """Returns the InfoNCE of two views' prototypes [classes, p].

    The second view's prototype of a class must match the first's, among all classes' prototypes of
    both views.
    """
    second, first = F.normalize(second), F.normalize(first)
    among = torch.cat([second @ first.T, (second @ second.T).fill_diagonal_(-torch.inf)], 1)
    return F.cross_entropy(among / tau, torch.arange(len(first)))


@operation
def centre_alignment(
    graph: Graph, logits: Tensor, z: Tensor, z_second: Tensor, tau: float
) -> Tensor:
    """Returns the `alignment` of the class centres of two views.

    Args:
        graph: The graph.
        logits: Of the first view. They give the classes of the nodes and how sure they are.
        z: Embeddings of the first view.
        z_second: Embeddings of the second view.
        tau: The temperature.
    """
    label, sure = pseudo_labels(logits.detach(), graph)
    (P, present), (P_second, _) = (
        class_centres(each, label, sure, graph.num_classes) for each in (z, z_second)
    )
    return alignment(P_second[present], P[present], tau)


@operation
def vote(z: Tensor, clusters: Tensor, of_class: Tensor, num_classes: int, tau: float) -> Tensor:
    """Returns log Σ_{clusters Q of c} e^{cos(z, Q) / τ_v}, [nodes, classes].

    It is −∞ for a class without clusters.
    """
    similar = F.normalize(z) @ F.normalize(clusters).T / tau
    return torch.stack([similar[:, of_class == c].logsumexp(1) for c in range(num_classes)], 1)


# ---- prototypes of neighbourhoods ----


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
        peers: That number for the pair's centre, [pairs].
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
        self.peers = self.num_centres[self.of]
        self.num_members = torch.bincount(
            torch.unique(self.cell) // max(self.items, 1), minlength=classes
        )

    def over_members(self, value: Tensor) -> Tensor:
        """Returns the sum over each centre's pairs of a number [pairs] or a vector [pairs, p].

        The result is [items] or [items, p]. It is 0 for items that are no centres.
        """
        return value.new_zeros(self.items, *value.shape[1:]).index_add(0, self.centre, value)


@dataclass(frozen=True, eq=False)
class Neighbourhoods:
    """What prototypes are computed from.

    Attributes:
        label: The class of every item; -1 if unknown.
        hops: The neighbours at hop 1 ... H.
        classes: C.
    """

    label: Tensor
    hops: list[Neighbours]
    classes: int

    @cached_property
    def centres(self) -> Tensor:
        """The number of items of each class, [C]."""
        return torch.bincount(self.label[self.label >= 0], minlength=self.classes)

    @cached_property
    def present(self) -> Tensor:
        """Which prototypes exist, bool [C, H+1]."""
        return torch.stack([self.centres > 0, *(at.num_centres > 0 for at in self.hops)], 1)

    @cached_property
    def num_items(self) -> Tensor:
        """The number of items in each prototype, [C, H+1]."""
        return torch.stack([self.centres, *(at.num_members for at in self.hops)], 1)


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


def neighbour_weights(attention: Attention | None, hop: int, z: Tensor, at: Neighbours) -> Tensor:
    """Returns w_ij of the pairs at a hop. Without attention, a centre's members weigh equally."""
    if attention is None:
        return 1 / at.size
    weight: Tensor = attention(hop, z, at)
    return weight


@operation
def neighbourhood_prototypes(
    z: Tensor, around: Neighbourhoods, attention: Attention | None
) -> Tensor:
    """Returns the prototypes P [C, H+1, p] with a gradient; absent ones are zero.

    P[c,0] is the mean of z over the items of class c. P[c,h] is the mean over those with members of
    Σ_{j in N_h(i)} w_ij z_j.
    """
    label, classes = around.label, around.classes
    tables = [class_means(z, label, label >= 0, classes)[0]]
    for hop, at in enumerate(around.hops, 1):
        weight = neighbour_weights(attention, hop, z, at) / at.peers
        # The weight of each item in each class's prototype. One product then serves all pairs.
        weights = z.new_zeros(classes * len(z)).index_add(0, at.cell, weight)
        tables.append(weights.view(classes, -1) @ z)
    return torch.stack(tables, 1)


@operation
def table_distance(one: Tensor, other: Tensor, both: Tensor) -> Tensor:
    """Returns Σ ‖one − other‖ over the entries in `both`, bool [...], of two tables [..., p]."""
    return ((one - other)[both].square().sum(-1) + 1e-12).sqrt().sum()
