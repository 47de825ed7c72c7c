"""Structure of a graph: degrees as features, and nodes at a given distance.

Two further kinds of structure features have modules of their own: `graphlets` and `node2vec`.
Graphs are SciPy CSR matrices [n, n]. Any stored entry other than 0 is an edge.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from scipy.sparse import csr_matrix, identity
from torch import Tensor


def degree_features(degree: Tensor, width: int) -> Tensor:
    """Returns one-hot rows [n, width] of rounded degrees [n].

    Degrees may be halves: the mean of in- and out-degree. A half is rounded to the even side, as
    everywhere in Python. Degrees of width - 1 and more share the last column.
    """
    if width < 1:
        raise ValueError(f"width must be at least 1, not {width}")
    if not bool(((degree >= 0) & torch.isfinite(degree)).all()):
        raise ValueError("degrees must be finite and not negative")
    return F.one_hot(degree.double().round().clamp(max=width - 1).long(), width).float()


def at_distance(adjacency: csr_matrix, hops: int, starts: Tensor | None = None) -> list[csr_matrix]:
    """Returns, for h = 1 to `hops`, which nodes are exactly h steps from which.

    Each matrix is [starts, nodes] with entries 1. Self-loops and directions are ignored. Time and
    memory grow with the number of pairs within that many steps.

    starts: the nodes to start from. None: all nodes.
    """
    # Products of bools are "or", so counts of paths cannot overflow.
    step = simple_graph(adjacency).astype(bool)
    every = csr_matrix(identity(step.shape[0], format="csr", dtype=bool))
    found, reached = [], every if starts is None else csr_matrix(every[starts.numpy()])
    for _ in range(hops):
        within = csr_matrix(reached @ step + reached)
        further = csr_matrix(within.astype(np.int8) - reached.astype(np.int8))
        further.eliminate_zeros()
        further.sort_indices()
        found.append(further)
        reached = within
    return found


def simple_graph(adjacency: csr_matrix) -> csr_matrix:
    """Returns the undirected graph of a matrix, without self-loops, with sorted neighbours."""
    if adjacency.ndim != 2 or adjacency.shape[0] != adjacency.shape[1]:
        raise ValueError(f"an adjacency matrix is square, not {list(adjacency.shape)}")
    entries = adjacency.tocoo()
    keep = (entries.data != 0) & (entries.row != entries.col)
    row, col = entries.row[keep], entries.col[keep]
    both = csr_matrix(
        (np.ones(2 * len(row), np.int8), (np.append(row, col), np.append(col, row))),
        adjacency.shape,
    )
    both.sum_duplicates()
    both.sort_indices()
    return both
