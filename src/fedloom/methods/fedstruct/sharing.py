"""Which rows of the blocks travel (`blocks`), and what a client puts in place of those that do not.

A row of the second hop's block is Σ_u Â_u over the target's neighbours u at the sender. If there is
one neighbour, the row is that neighbour's list of neighbours. So a setting can demand that a row
that travels sums over several neighbours.

    all        every row travels, as in the paper
    withhold   rows over fewer than `min_neighbours` nodes stay at home, and so do rows from which
               one node's row could be solved for (`determined`: seconds for 2,000 rows)
    merge      targets that share neighbours form a group, and small groups are joined until each
               has `min_neighbours` of them; a target gets the mean over its group's neighbours
    none       no row travels

For a row that does not arrive, the receiver takes what it knows itself: the neighbour's edges to
its own nodes (`PartyAdjacency.next_known`).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import bmat, csr_matrix, hstack
from scipy.sparse.csgraph import connected_components

from fedloom.methods.fedstruct.powers import Numbering, determined, select_entries

BLOCKS = ("all", "withhold", "merge", "none")


def sums_that_travel(links: csr_matrix, blocks: str, least: int) -> csr_matrix:
    """Returns the weights of the sums that a sender sends, of the shape of `links`.

    A row that does not travel is empty. Both ends compute this from the edges that they share.

    Args:
        links: [targets, the sender's nodes]: the edges from the sender to the receiver.
        blocks: The setting, one of `BLOCKS`.
        least: The fewest neighbours in a sum.
    """
    if blocks == "all":
        return links
    if blocks == "withhold":
        return _withheld(links, least)
    if blocks == "merge":
        return _merged(links, least)
    return csr_matrix(links.shape, dtype=np.float32)


def rows_left_out(links: csr_matrix, sums: csr_matrix) -> csr_matrix:
    """Returns the rows of `links` that are not empty and have no sum; other rows are empty."""
    return only_rows(links, np.diff(sums.indptr) == 0)


def among_all(sums: Mapping[str, csr_matrix], numbering: Numbering) -> csr_matrix:
    """Returns sums over the nodes of some parties as sums over all nodes, [rows, n].

    sums: {party: the weights of its nodes in each row, [rows, its nodes]}.
    """
    rows = next(iter(sums.values())).shape[0]
    parts = [
        sums.get(name, csr_matrix((rows, size), dtype=np.float32))
        for name, size in zip(numbering.names, numbering.sizes, strict=True)
    ]
    return csr_matrix(hstack(parts, format="csr"))


def _withheld(links: csr_matrix, least: int) -> csr_matrix:
    """Returns the rows over enough nodes, without those that touch a node whose row is solvable."""
    kept = only_rows(links, np.diff(links.indptr) >= least)
    while len(solved := determined(kept)):
        touched = np.isin(kept.indices, solved)
        rows = np.repeat(np.arange(kept.shape[0]), np.diff(kept.indptr))[touched]
        kept = only_rows(kept, ~np.isin(np.arange(kept.shape[0]), rows))
    return kept


def _merged(links: csr_matrix, least: int) -> csr_matrix:
    """Returns means over groups. No node is in two groups, so no sum is part of another."""
    targets, nodes = links.shape
    both = bmat([[None, links], [links.T, None]], format="csr")
    _, component = connected_components(both, directed=False)
    of_target, of_node = component[:targets], component[targets:]
    present = np.bincount(of_node[np.unique(links.indices)], minlength=component.max(initial=0) + 1)
    group = _groups(present, least)
    member = np.flatnonzero(np.bincount(links.indices, minlength=nodes))
    of_member = group[of_node[member]]
    number = max(group.max(initial=-1) + 1, 1)
    size = np.bincount(of_member[of_member >= 0], minlength=number)
    inside = of_member >= 0
    means = csr_matrix(
        (
            (1 / size[of_member[inside]]).astype(np.float32),
            (of_member[inside], member[inside]),
        ),
        shape=(number, nodes),
    )
    edges = np.asarray(links.sum(1), dtype=np.float32).ravel()
    rows = np.flatnonzero((edges > 0) & (group[of_target] >= 0))
    weight = csr_matrix((edges[rows], (rows, group[of_target[rows]])), shape=(targets, number))
    return csr_matrix(weight @ means, dtype=np.float32)


def _groups(present: NDArray[np.int64], least: int) -> NDArray[np.int64]:
    """Joins components in their order until each group has `least` nodes.

    Returns the group of each component. It is -1 if all nodes together are too few.

    Args:
        present: The nodes of each component. A component without any is in no group.
        least: The fewest nodes in a group.
    """
    group = np.full(len(present), -1, np.int64)
    number, gathered = 0, 0
    for component in np.flatnonzero(present):
        group[component] = number
        gathered += present[component]
        if gathered >= least:
            number, gathered = number + 1, 0
    if gathered:  # too few are left for a group of their own
        group[group == number] = number - 1
    return group


def only_rows(matrix: csr_matrix, rows: NDArray[np.bool_]) -> csr_matrix:
    """Returns the matrix with only some rows; the others are empty."""
    return select_entries(matrix, np.repeat(rows, np.diff(matrix.indptr)))
