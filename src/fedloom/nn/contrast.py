"""Contrast between classes: a model's embeddings against another model's of the same nodes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fedloom.data.graph import Graph
from fedloom.nn.distillation import unit
from fedloom.nn.operations import operation

ROWS = 1024  # rows of similarities that are in memory at once


@operation
def class_contrast(graph: Graph, z: Tensor, anchors: Tensor, tau: float) -> Tensor:
    """Returns the `contrast` of a graph's training nodes.

    Args:
        graph: The graph.
        z: Embeddings of all nodes, [nodes, width].
        anchors: Another model's embeddings of them.
        tau: τ.
    """
    known = graph.train
    return contrast(z[known], anchors[known], graph.y[known], tau)


def contrast(z: Tensor, anchors: Tensor, y: Tensor, tau: float) -> Tensor:
    """Returns mean_i −mean_{j: y_j = y_i} log e^{cos(z_i, a_j)/τ} / Σ_j e^{cos(z_i, a_j)/τ}.

    It is 0 without nodes.

    Args:
        z: Embeddings z of nodes.
        anchors: Another model's embeddings a of the same nodes.
        y: Their classes.
        tau: τ.
    """
    z, anchors = unit(z), unit(anchors)
    # The mean over j of the same class is linear in a_j, so it is a product with the class's mean.
    # Only the divisor needs all pairs.
    classes, place, count = y.unique(return_inverse=True, return_counts=True)
    sums = z.new_zeros(len(classes), z.shape[1]).index_add(0, place, anchors)
    centres = sums / count.unsqueeze(1)
    near = (z * centres[place]).sum(1) / tau
    if len(z) <= ROWS:
        return (divisor(z, anchors, tau) - near).sum() / max(len(y), 1)
    # The backward pass computes rows again, so that only one block of them is in memory.
    blocks = [
        checkpoint(divisor, rows, anchors, tau, use_reentrant=False, preserve_rng_state=False)
        for rows in z.split(ROWS)
    ]
    return (torch.cat(blocks) - near).sum() / len(y)


def divisor(z: Tensor, anchors: Tensor, tau: float) -> Tensor:
    """Returns log Σ_j e^{z_i · a_j / τ} of each row i."""
    return (z @ anchors.T / tau).logsumexp(1)
