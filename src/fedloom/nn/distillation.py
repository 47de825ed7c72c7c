"""Distillation: terms of an objective by which a model learns from another one's outputs.

A row of outputs belongs to an item of a graph. Every term is an operation.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.data.graph import Graph
from fedloom.nn.operations import operation


@operation
def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """Returns KL(softmax teacher ‖ softmax student) of logits [items, classes], mean over items.

    No gradient reaches the teacher.
    """
    return F.kl_div(
        student.log_softmax(1),
        teacher.detach().log_softmax(1),
        reduction="batchmean",
        log_target=True,
    )


@operation
def squared_error(one: Tensor, other: Tensor) -> Tensor:
    """Returns the mean of (one − other)² over all entries of two [items, width]."""
    return F.mse_loss(one, other)


@operation
def neighbourly(graph: Graph, teacher: Tensor, student: Tensor, norm: str) -> Tensor:
    """Returns 1/Q Σ_i Σ_{j ∈ N(i) ∪ {i}} KL(softmax teacher_j ‖ softmax student_i).

    Every node learns from the teacher's rows of its neighbours and of itself. No gradient reaches
    the teacher.

    Args:
        graph: The graph. An edge of weight w counts w times.
        teacher: [nodes, width].
        student: [nodes, width].
        norm: Q, "pairs" (i, j) or "nodes".
    """
    log_a, log_b = teacher.detach().log_softmax(1), student.log_softmax(1)
    a, adjacency = log_a.exp(), graph.adjacency("sum")
    columns = torch.cat([a, (a * log_a).sum(1, keepdim=True)], 1)
    gathered = adjacency @ columns + columns
    pairs = adjacency.values.sum() + len(a) if norm == "pairs" else len(a)
    return (gathered[:, -1].sum() - (gathered[:, :-1] * log_b).sum()) / pairs


@operation
def structure(f: Tensor, f_global: Tensor, graph: Graph, omega: float) -> Tensor:
    """Returns the mean of KL(q°_i ‖ q_i) over the nodes that have neighbours; 0 without edges.

    Args:
        f: Logits [nodes, classes], which give q.
        f_global: The teacher's logits, which give q°.
        graph: The graph.
        omega: The temperature of q and q°; see `log_neighbours`.
    """
    with_neighbours = int((graph.adjacency("sum").offsets.diff() > 0).sum())
    return structure_by_edge(f, f_global, graph, omega).sum() / max(with_neighbours, 1)


def structure_by_edge(f: Tensor, f_global: Tensor, graph: Graph, omega: float) -> Tensor:
    """Returns the part of each edge in Σ_i KL(q°_i ‖ q_i); see `structure`."""
    q, q_global = (log_neighbours(each, graph, omega) for each in (f, f_global))
    return q_global.exp() * (q_global - q)


def log_neighbours(f: Tensor, graph: Graph, omega: float) -> Tensor:
    """Returns log q_i(j) of all edges j → i, in the order of `graph.adjacency("sum")`.

    q_i is the softmax over i's neighbours j of cos(f_i, f_j)/ω. In that order the edges of one node
    are contiguous.
    """
    edges, direction = graph.adjacency("sum"), unit(f)
    score = (direction.index_select(0, edges.rows) * direction.index_select(0, edges.indices)).sum(
        1
    ) / omega
    # The largest score is subtracted so that exp cannot overflow. It is a constant.
    offsets = graph.cached("offsets of edges", edges.offsets.long)
    top = torch.segment_reduce(score.detach(), "max", offsets=offsets)
    score = score - top.index_select(0, edges.rows)
    total = score.new_zeros(graph.num_nodes).index_add(0, edges.rows, score.exp())
    return score - total.index_select(0, edges.rows).log()


def unit(z: Tensor) -> Tensor:
    """Returns the rows scaled to length 1.

    A row of zeros stays zero. `F.normalize` would give it a gradient of 1e12.
    """
    length = z.norm(dim=1, keepdim=True)
    return z / length.where(length > 0, 1.0)
