"""Pictures of Ā, in cells (`fedloom.methods._shared.cells`): as the protocol left it, and exact."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_matrix, diags_array
from torch import Tensor

from fedloom.core.message import Message
from fedloom.data.federation import Federation
from fedloom.methods._shared import cells
from fedloom.methods.fedstruct.powers import Numbering, Rows, as_scipy


def client_adjacency(name: str, numbering: Numbering, rows: Rows, beta: Tensor) -> Message:
    """Returns a client's rows of Ā in cells: sums of entries, and the number of entries.

    Args:
        name: The client.
        numbering: The numbers of all nodes.
        rows: The client's rows of the powers.
        beta: The weight of each power.
    """
    weighted = (float(b) * as_scipy(p) for b, p in zip(beta, rows.powers, strict=True))
    combined = csr_matrix(sum(weighted))
    first, total = numbering.span(name).start, numbering.total
    weight, entries = cells.of_rows(combined, rows.reach.numpy(), first, total)
    return {
        "nodes": torch.tensor(total),
        "first": torch.tensor(cells.cell(first, total)),
        "beta": beta,
        "weight": torch.from_numpy(weight).float(),
        "entries": torch.from_numpy(entries).int(),
    }


def exact_adjacency(
    federation: Federation, hops: int, used: list[int], beta: list[float] | None
) -> Message:
    """Returns the exact Ā in cells, before pruning, and where each client begins in it.

    What a large graph makes too expensive is left out.

    Args:
        federation: All clients' graphs.
        hops: L_s.
        used: The hops that have a part in Ā.
        beta: β_0 to β_L_s. None: β is trained, so the used powers are returned one by one.
    """
    sizes = (graph.num_nodes for graph in federation.graphs)
    numbering = Numbering.of(dict(zip(federation.names, sizes, strict=True)))
    shown: Message = {"starts": torch.from_numpy(numbering.starts)}
    whole = whole_first_power(federation, numbering)
    if cells.is_affordable(whole, hops):
        powers = cells.of_powers(whole, hops)
        weight = powers[used] if beta is None else np.tensordot(np.array(beta), powers, 1)[None]
        shown["weight"] = torch.from_numpy(weight).float()
    if cells.reach_is_affordable(whole, hops):
        # With self-loops, a node that is reached in fewer hops is also reached in more.
        shown["entries"] = torch.from_numpy(cells.of_reach(whole, max(used))).int()
    return shown


def whole_first_power(federation: Federation, numbering: Numbering) -> csr_matrix:
    """Returns Â = D̃^-1 (A + I) of the whole graph, [n, n] in float64. No party of a run has it."""
    starts = [numbering.span(name).start for name in federation.names]
    every = np.arange(numbering.total)
    targets: list[NDArray[np.int64]] = [every]
    sources: list[NDArray[np.int64]] = [every]
    weights: list[NDArray[np.float64]] = [np.ones(numbering.total)]
    order = [np.argsort(graph.node_id.numpy(), kind="stable") for graph in federation.graphs]
    ids = [graph.node_id.numpy()[by] for graph, by in zip(federation.graphs, order, strict=True)]
    for start, graph in zip(starts, federation.graphs, strict=True):
        source, target = graph.edge_index.numpy()
        weight = np.ones(len(source))
        if graph.edge_weight is not None:
            weight = graph.edge_weight.numpy().astype(np.float64)
        proper = source != target
        targets.append(start + target[proper])
        sources.append(start + source[proper])
        weights.append(weight[proper])
        own, remote, owner, direction = graph.cross_edges.numpy()
        for peer in np.unique(owner):
            here = (owner == peer) & (direction == 1)
            targets.append(start + own[here])
            sources.append(starts[peer] + order[peer][np.searchsorted(ids[peer], remote[here])])
            weights.append(np.ones(int(here.sum())))
    ends = np.concatenate(targets), np.concatenate(sources)
    shape = (numbering.total, numbering.total)
    matrix = csr_matrix((np.concatenate(weights), ends), shape=shape)
    return csr_matrix(diags_array(1 / np.asarray(matrix.sum(1)).ravel()) @ matrix)
