"""Louvain communities (Blondel et al. 2008), in less time and memory than scikit-network takes.

The result is that of scikit-network's `Louvain` to the last bit, for the same seed. Its compiled
search does the work. What is around it uses that the adjacency is symmetric and consists of ones:

- scikit-network adds the transpose to the adjacency, in 64 bits. Here it is only scaled.
- The search reads the same number for every edge. Here that number is stored once.
- The search visits three numbers of each neighbouring community. Here they are side by side.
- The search keeps a sorted set of neighbouring communities. It is faster if it meets nodes that it
  has not visited first, and the order within a row does not matter while all weights are equal.
- A community graph is a product of matrices. Here it is computed in blocks of rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_matrix, identity, vstack

from fedloom._system import import_compiled
from fedloom.data.neighbours import row_blocks

Numbers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.floating[Any]]
# The least gain in modularity of a pass over the nodes, and of a level of communities.
LEAST_GAIN = 1e-4


def louvain(adjacency: csr_matrix, seed: int, resolution: float) -> Numbers:
    """Returns the community of every node, numbered arbitrarily.

    Args:
        adjacency: The symmetric 0/1 adjacency without self-loops. The columns of a row ascend.
        seed: The seed of the order in which nodes are visited, of 32 bits.
        resolution: The resolution of the modularity. A higher one gives more communities.
    """
    nodes, edges = adjacency.shape[0], adjacency.nnz
    if edges == 0:
        return np.arange(nodes)
    order = np.random.RandomState(seed).permutation(np.arange(nodes))
    weights = np.diff(adjacency.indptr)[order] / np.float64(edges)
    matrix, descending = _shuffled(adjacency, order), True
    del adjacency
    # The entries sum to 1. scikit-network divides twos by their sum, as here.
    values = _repeated(2.0 * (1.0 / (2 * edges)), edges)
    loops = _repeated(0.0, nodes)
    found = np.arange(nodes)
    while True:
        labels, gain = _search(matrix, values, loops, weights, resolution)
        found = labels[found]
        count = int(labels.max()) + 1
        if count == 1 or gain <= LEAST_GAIN:
            break
        matrix = _aggregated(matrix, values, labels, count, descending)
        values, loops, descending = matrix.data, matrix.diagonal(), False
        weights = np.bincount(labels, weights=weights, minlength=count)
    communities = np.empty_like(found)
    communities[order] = found
    return communities


def _shuffled(matrix: csr_matrix, order: Numbers) -> csr_matrix:
    """Returns the rows and columns of a symmetric matrix in another order.

    The columns of a row descend: a transpose has the columns in the order of the rows that it was
    made of.
    """
    found = matrix[order[::-1]].T.tocsr()[order]
    np.subtract(len(order) - 1, found.indices, out=found.indices)
    return found


def _repeated(number: float, times: int) -> Floats:
    """Returns an array that shows one number many times and takes the memory of one."""
    return np.lib.stride_tricks.as_strided(np.array([number]), (times,), (0,))


def _float32(values: Floats) -> Floats:
    """Returns numbers in 32 bits. A repeated number stays one in memory."""
    if values.strides == (0,):
        return np.lib.stride_tricks.as_strided(values[:1].astype(np.float32), values.shape, (0,))
    return values.astype(np.float32)


def _search(
    matrix: csr_matrix, values: Floats, loops: Floats, weights: Floats, resolution: float
) -> tuple[Numbers, float]:
    """Moves nodes to neighbouring communities while the modularity rises enough.

    Returns the community of every node, numbered from 0, and the gain in modularity.

    Args:
        matrix: The places of the edges.
        values: The edges' weights.
        loops: The weight of each node's self-loop.
        weights: Each node's share of all weights.
        resolution: The resolution of the modularity.
    """
    # scikit-network imports all its modules at once, which takes long.
    optimize_core = import_compiled("sknetwork.clustering.louvain_core").optimize_core

    weights = weights.astype(np.float32)
    # For each community: its edges to the visited node, and twice its share of all weights.
    # Neighbouring communities are anywhere in memory, so one line of the cache should hold all.
    community = np.zeros((len(weights), 3), dtype=np.float32)
    community[:, 1:] = weights[:, None]
    labels, gain = optimize_core(
        np.arange(len(weights), dtype=matrix.indices.dtype),
        matrix.indices,
        matrix.indptr,
        _float32(values),
        weights,
        weights,
        community[:, 1],
        community[:, 2],
        community[:, 0],
        _float32(loops),
        resolution,
        LEAST_GAIN,
    )
    used = np.zeros(len(weights), dtype=bool)
    used[labels] = True
    return (np.cumsum(used) - 1)[labels], gain


def _aggregated(
    matrix: csr_matrix, values: Floats, labels: Numbers, count: int, descending: bool
) -> csr_matrix:
    """Returns the weights between communities, [count, count].

    scikit-network computes M'(A M), where M has the community of every node. A M is A with
    communities for columns and with equal columns added, so a product with the identity gives it.
    Sums and the order of columns are the same; both influence later levels by rounding.

    Args:
        matrix: The places of the edges A.
        values: The edges' weights.
        labels: The community of every node.
        count: Number of communities.
        descending: Whether rows are to be read from their ends, as scikit-network has them.
    """
    columns, starts = matrix.indices, matrix.indptr
    if descending:  # everything from its end: the last row comes first
        columns, starts, values = columns[::-1], matrix.nnz - starts[::-1], values[::-1]
    unit = identity(count, format="csr")
    compact = labels.astype(np.min_scalar_type(count))  # small, as it is looked up for every edge
    rows = []
    for first, end in row_blocks(starts):
        begin, stop = starts[first], starts[end]
        block = csr_matrix(
            (
                np.ascontiguousarray(values[begin:stop]),
                compact.take(columns[begin:stop]).astype(columns.dtype),
                starts[first : end + 1] - begin,
            ),
            shape=(end - first, count),
        )
        product = block @ unit
        rows.append(product[::-1] if descending else product)
    joined = vstack(rows[::-1] if descending else rows, format="csr")
    members = csr_matrix((np.ones(len(labels)), labels, np.arange(len(labels) + 1)))
    return members.T.tocsr() @ joined
