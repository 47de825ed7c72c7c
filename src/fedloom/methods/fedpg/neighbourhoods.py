"""The members of neighbourhoods N_h(i), from the edges of a graph."""

from __future__ import annotations

import torch
from scipy.sparse import csr_matrix
from torch import Tensor

from fedloom.data.graph import Graph
from fedloom.methods._shared.structure import at_distance

Pairs = tuple[Tensor, Tensor]  # centres and members, [pairs] each


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
