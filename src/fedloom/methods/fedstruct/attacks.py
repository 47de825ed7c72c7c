"""What parties can read in a run of FedStruct: attacks on messages that they really receive.

A client reads edges between other clients' nodes from the rows of the second hop. It knows which
nodes u of the sender are in the sum of a row, because it has the edges to them.

    rows_of_one     a row over one node u is Â_u: all neighbours of u
    rows_solved     linear algebra: it also subtracts rows from each other
    edges_by_value  in a row over several nodes, an entry is a sum of some of their 1/d̃_u; if the
                    degrees differ, the entry says which

The server reads training labels from the gradient of S, which it gets as a sum over all clients.
∇S_u is (Σ_v Ā_vu (ŷ_v - y_v)) times the Jacobian of g at s_u, and the server has g and S.

    pull_of         solves for Σ_v Ā_vu (ŷ_v - y_v); with `absorbed` or `private` it is sent as such
    labels_guessed  the most negative entry: u's own term and those of its neighbours are there

The attacks are simple, so what they read is a lower bound.
"""

from __future__ import annotations

from itertools import chain, combinations

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from torch import Tensor

from fedloom.methods.fedstruct.powers import Numbers, determined
from fedloom.nn.encoder import Encoder, encode_rows
from fedloom.nn.weights import Weights

PRESENT = 1e-4  # entries above this are there; below, they are rounding errors
MOST = 8  # `edges_by_value` tries all subsets of at most this many nodes
ROWS = 4096  # rows of S in memory at once, with their Jacobians


# ---- a client reads edges ----
def rows_of_one(sums: csr_matrix, received: csr_matrix) -> tuple[Numbers, csr_matrix]:
    """Returns the nodes that are alone in a sum, and their rows.

    Args:
        sums: [rows, n], the weight of each node in each row that was received.
        received: The rows, [rows, n].
    """
    single = np.flatnonzero(np.diff(sums.indptr) == 1)
    nodes, first = np.unique(sums.indices[sums.indptr[single]], return_index=True)
    rows = csr_matrix(received[single[first]])
    return nodes.astype(np.int64), csr_matrix(
        rows.multiply(1 / sums[single[first]].max(1).toarray())
    )


def rows_solved(sums: csr_matrix, received: csr_matrix) -> tuple[Numbers, csr_matrix]:
    """Returns the nodes whose rows follow from the received ones by linear algebra, and the rows.

    It takes a singular value decomposition of the sums. The arguments are those of `rows_of_one`.
    """
    nodes = determined(sums)
    columns = np.unique(sums.indices)
    inverse = np.linalg.pinv(sums[:, columns].toarray().astype(np.float64), rcond=1e-9)
    wanted = inverse[np.searchsorted(columns, nodes)]
    return nodes, csr_matrix(wanted @ received.toarray().astype(np.float64))


def edges_shown(nodes: Numbers, rows: csr_matrix, own: slice) -> Numbers:
    """Returns the pairs of others' nodes that rows of Â show to be linked, [2, pairs], each once.

    Args:
        nodes: The nodes whose rows these are.
        rows: [nodes, n].
        own: The numbers of the reader's own nodes, whose edges it has anyway.
    """
    source, target = (rows > PRESENT).nonzero()
    return _foreign_pairs(nodes[source], target.astype(np.int64), rows.shape[1], own)


def lists_complete(rows: csr_matrix) -> int:
    """Returns how many rows of Â sum to 1: these lists of neighbours are complete."""
    return int((np.abs(np.asarray(rows.sum(1)).ravel() - 1) < PRESENT).sum())


def edges_by_value(sums: csr_matrix, received: csr_matrix, own: slice) -> Numbers:
    """Returns pairs of others' nodes that the values in rows over several nodes show to be linked.

    If the nodes of a row are not linked to each other, the entry in the column of u is 1/d̃_u. Every
    other entry is a sum of some of these. If only one subset has that sum, it is the right one. A
    row whose degrees do not fit these counts is left out. Edges have weight 1.

    The arguments are those of `rows_of_one` and `edges_shown`.
    """
    found: list[Numbers] = [np.zeros((2, 0), np.int64)]
    for row in np.flatnonzero((np.diff(sums.indptr) > 1) & (np.diff(sums.indptr) <= MOST)):
        nodes = sums.indices[sums.indptr[row] : sums.indptr[row + 1]].astype(np.int64)
        weight = sums.data[sums.indptr[row] : sums.indptr[row + 1]]
        entries = received[row].toarray().ravel() / weight[0]
        columns = np.flatnonzero(entries > PRESENT)
        if np.ptp(weight) > PRESENT or not np.isin(nodes, columns).all():
            continue
        degree = np.rint(1 / entries[nodes])
        if (np.abs(entries[nodes] * degree - 1) > 1e-3).any():
            continue
        subsets = [np.array(s) for s in _subsets(len(nodes))]
        totals = np.array([(1 / degree[s]).sum() for s in subsets])
        fits = np.abs(entries[columns][:, None] - totals) < PRESENT
        decided = np.flatnonzero(fits.sum(1) == 1)
        member = np.zeros((len(columns), len(nodes)), bool)
        for place in decided:
            member[place, subsets[int(fits[place].argmax())]] = True
        counted = member.sum(0)
        whole = len(decided) == len(columns)
        if (counted > degree).any() or (whole and (counted != degree).any()):
            continue
        where, who = member.nonzero()
        found.append(np.stack([nodes[who], columns[where]]))
    one, other = np.concatenate(found, 1)
    return _foreign_pairs(one, other, sums.shape[1], own)


def _subsets(size: int) -> chain[tuple[int, ...]]:
    return chain.from_iterable(combinations(range(size), k) for k in range(1, size + 1))


def _foreign_pairs(one: Numbers, other: Numbers, total: int, own: slice) -> Numbers:
    def foreign(node: Numbers) -> NDArray[np.bool_]:
        return (node < own.start) | (node >= own.stop)

    kept = foreign(one) & foreign(other) & (one != other)
    low, high = np.minimum(one, other)[kept], np.maximum(one, other)[kept]
    return np.stack(np.divmod(np.unique(low * total + high), total))


# ---- the server reads labels ----
def pull_of(gradient: Tensor, s: Tensor, g: Encoder, weights: Weights) -> Tensor:
    """Returns the gradient with respect to q_u = g(s_u) that best explains the one of S, [n, C].

    Dropout is not known to the server. It takes g without it.

    Args:
        gradient: ∇S, [n, d_s].
        s: S, [n, d_s].
        g: An encoder of the right shape.
        weights: θ_s.
    """
    found = []
    fixed = {name: weight.detach() for name, weight in weights.items()}
    for rows in torch.arange(len(s)).split(ROWS):
        part = s[rows].detach().clone().requires_grad_()
        with torch.enable_grad():
            q = encode_rows(g, fixed, part, torch.arange(len(rows)), None)
            columns = [torch.autograd.grad(c, part, retain_graph=True)[0] for c in q.sum(0)]
        jacobian = torch.stack(columns, 1)  # [rows, C, d_s]
        gram = jacobian @ jacobian.transpose(1, 2)
        ridge = 1e-6 * gram.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
        gram = gram + ridge * torch.eye(gram.shape[1])
        found.append(
            torch.linalg.lstsq(gram, jacobian @ gradient[rows][:, :, None]).solution[..., 0]
        )
    return torch.cat(found)


def labels_guessed(pull: Tensor) -> Tensor:
    """Returns the class that each node's label pulls towards, [n]. pull: from `pull_of`, [n, C]."""
    return pull.argmin(1)
