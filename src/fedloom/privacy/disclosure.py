"""Disclosure: what a server reads about a client's graph in the messages that it receives.

The attacker is a server that follows the protocol. It has the messages that it sent and received,
the settings of the run and its seed. There is one attack for each kind of message:

    weights, gradients, statistics     `features_told`: which input features occur at the client
    class counts, scores               `label_counts_told`: the client's label counts
    weights of a classifier            `label_shares_told`: the same, roughly
    prototypes, class means, logits    `single_items`: which of them belong to a single item
    peer messages                      `single_items`, on rows of features
    pseudo-graphs, second moments      `fedloom.privacy.leakage`

Weights are read by replay. The server gives its own messages to a stand-in: a client with the same
name and settings, but without features. The weight row of an input feature that never occurs moves
in the same way at both: by weight decay, the optimiser's moments and proximal terms, which depend
on nothing else. Any other row moves differently. So this attack needs no formula of an optimiser.

Applied to the sum of all replies and the sum of all stand-ins' replies, the same attacks tell what
the server of a secure run learns. They are simple, so their success is a lower bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.message import Message, flatten
from fedloom.data.graph import Graph

STILL = 1e-6  # differences of weights up to this are rounding


def stand_in(graph: Graph) -> Graph:
    """Returns a graph for a stand-in: no item has a feature, and all labels are class 0.

    Only messages that name nodes depend on the graph's nodes and edges, so the attacks take the
    client's own. What is read from weights is the same with any other.
    """
    return replace(graph, x=torch.zeros_like(graph.x), y=torch.where(graph.y >= 0, 0, graph.y))


def features_told(reply: Message, blank: Message, num_features: int) -> Tensor | None:
    """Returns which input features occur at a client, [features] bool.

    A tensor with an axis of features has a row for each of them. The axis may be up to a tenth
    longer, because some methods append columns. A feature occurs if its row is not a multiple of
    the stand-in's row; a multiple, because some clients scale what they send. If the rows were
    rounded, it occurs if the difference is more than half of the stand-in's row.

    Args:
        reply: The client's reply, or the sum of all replies.
        blank: The stand-in's reply to the same message, or the sum of those.
        num_features: d.

    Returns:
        None if no tensor has such an axis.
    """
    sent, empty, told = _whole(reply), _whole(blank), None
    for name in sorted(sent.keys() & empty.keys()):
        (a, rounded), (b, _) = sent[name], empty[name]
        axes = [k for k, n in enumerate(a.shape) if num_features <= n <= 1.1 * num_features]
        if a.shape != b.shape or a.dim() < 2 or not a.is_floating_point() or not axes:
            continue
        a, b = (t.movedim(axes[-1], 0)[:num_features].flatten(1).double() for t in (a, b))
        factor = (a * b).sum(1) / b.square().sum(1).clamp(min=1e-30)
        apart = (a - factor.unsqueeze(1) * b).norm(dim=1)
        moved = apart > (b.norm(dim=1) / 2 if rounded else STILL)
        told = moved if told is None else told | moved
    return told


def feature_membership(told: Mapping[str, Tensor], graphs: Mapping[str, Graph]) -> dict[str, float]:
    """Returns how well an attack tells each client's items from others': the ROC area.

    The score of a candidate is the share of its features that the client is known to have.

    Args:
        told: The features that each client is known to have, [features] bool.
        graphs: The clients' graphs; all their nodes are candidates.
    """
    from sklearn.metrics import roc_auc_score  # takes a second to import

    rows = torch.cat([graph.x != 0 for graph in graphs.values()])
    sizes = torch.tensor([len(graph.x) for graph in graphs.values()])
    owner = torch.arange(len(sizes)).repeat_interleave(sizes)
    areas = {}
    for k, client in enumerate(graphs):
        score = (rows & told[client]).sum(1) / rows.sum(1).clamp(min=1)
        areas[client] = float(roc_auc_score((owner == k).numpy(), score.numpy()))
    return areas


def label_counts_told(reply: Message, classes: int) -> list[Tensor]:
    """Returns what may be a client's label counts in a reply, each [classes].

    These are whole numbers for each class, the last row of statistics for each class (FedGram
    appends a constant column), and the row sums of confusion matrices.

    Args:
        reply: The client's reply, or the sum of all replies.
        classes: C.
    """
    found = []
    for tensor in flatten(reply).values():
        if tensor.dim() == 0 or tensor.shape[-1] != classes or tensor.dtype == torch.bool:
            continue
        is_confusion = not tensor.is_floating_point() and tensor.shape == (classes, classes)
        row = (tensor.sum(1) if is_confusion else tensor.reshape(-1, classes)[-1]).double()
        if (row >= 0).all() and row.any() and torch.equal(row, row.round()):
            found.append(row)
    return found


def label_shares_told(reply: Message, blank: Message, sent: Message, classes: int) -> Tensor | None:
    """Returns the share of each class at a client, estimated from a classifier's bias.

    The bias of class c moves by about λ (h_c − p_c), where h_c is the class's share and p_c is what
    the model predicts, at first 1/C. Adam keeps little but the sign. All labels of the stand-in are
    class 0, so its biases of class 0 and 1 move λ apart.

    Args:
        reply: The client's reply, or the sum of all replies.
        blank: The stand-in's reply, or the sum of those.
        sent: What the client was sent.
        classes: C.

    Returns:
        The shares [classes], or None if the reply has no such bias.
    """
    after, other, before = flatten(reply), flatten(blank), flatten(sent)
    for name in sorted(after):
        bias = after[name]
        if not name.endswith("bias") or bias.shape != (classes,) or name not in other:
            continue
        start = before.get(name, torch.zeros(classes))
        if name.startswith("gradient"):
            start, bias, still = torch.zeros(classes), -bias, -other[name]
        else:
            still = other[name]
        scale = float(still[0] - still[1]) or 1.0
        share = (1 / classes + (bias - start) / scale).clamp(min=0)
        return share / share.sum().clamp(min=1e-12)
    return None


def single_items(rows: Tensor, items: Tensor) -> Tensor:
    """Returns which rows are the row of a single item, up to a factor, [rows] bool.

    Args:
        rows: What was sent: prototypes, class means, sums over neighbours.
        items: The rows of the client's items, such as its nodes' embeddings.
    """
    if not len(rows) or not len(items):
        return torch.zeros(len(rows), dtype=torch.bool)
    unit = F.normalize(rows.double()), F.normalize(items.double())
    return (unit[0] @ unit[1].T).amax(1) > 1 - STILL


def _whole(reply: Message) -> dict[str, tuple[Tensor, bool]]:
    """Returns a reply's tensors by name, and whether each was rounded before it was sent.

    A matrix that travels as two factors of low rank is multiplied. It was rounded.
    """
    flat = flatten(reply)
    whole = {}
    for name, tensor in flat.items():
        base = name.removesuffix("/left")
        if base != name:
            whole[base] = tensor @ flat[f"{base}/right"], True
        elif not name.endswith("/right"):
            whole[name] = tensor, False
    return whole
