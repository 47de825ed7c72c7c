"""Inference: attacks on released models and on updates, and scores with their uncertainty.

    membership      `confidence` (a threshold on the loss) and `lira` (the same, compared with
                    shadow models that were not trained on the item): which items were trained on
    links           `alike` (nodes with similar predictions) and `influence` (whose prediction
                    changes with a node's features): which nodes are linked
    features        `inverted`: an input row, from a gradient of the first layer

A score is an area under the ROC curve or a mean rate. Its interval is a bootstrap: 95 % of the
scores of samples that are drawn with replacement from the attacked items or clients. The attacks
are simple, so what they find is a lower bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fedloom.core.message import Message, flatten
from fedloom.data.graph import Graph

DRAWS = 200  # samples of a bootstrap
STEP = 1e-3  # relative change of a node's features that `influence` makes
Numbers = NDArray[np.float64]


class Score(NamedTuple):
    """The success of an attack.

    Attributes:
        value: An area under the ROC curve, or a rate.
        low: The lower end of the 95 % interval.
        high: The upper end.
        chance: The value without the messages.
    """

    value: float
    low: float
    high: float
    chance: float


def auc(positive: Tensor, negative: Tensor, seed: int = 0) -> Score:
    """Returns the area under the ROC curve of scores, with a bootstrap over the items.

    Args:
        positive: The scores of what the attack looks for.
        negative: The scores of the others.
        seed: Of the bootstrap.
    """
    one, other = (t.detach().double().numpy() for t in (positive, negative))
    if not len(one) or not len(other):
        return Score(float("nan"), float("nan"), float("nan"), 0.5)
    rng = np.random.default_rng(seed)
    drawn = [_area(rng.choice(one, len(one)), rng.choice(other, len(other))) for _ in range(DRAWS)]
    low, high = np.quantile(drawn, (0.025, 0.975))
    return Score(_area(one, other), float(low), float(high), 0.5)


def _area(one: Numbers, other: Numbers) -> float:
    """Returns the share of pairs in which the first score is larger; ties count half."""
    ranked = np.sort(other)
    below = np.searchsorted(ranked, one, "left") + np.searchsorted(ranked, one, "right")
    return float(below.mean() / 2 / len(other))


def rate(values: Sequence[float], chance: float, seed: int = 0) -> Score:
    """Returns the mean of a value of each client or item, with a bootstrap over them.

    Args:
        values: The values, such as 1 for an item that is recovered and 0 for another.
        chance: The mean without the messages.
        seed: Of the bootstrap.
    """
    found = np.asarray(values, np.float64)
    if not len(found):
        return Score(float("nan"), float("nan"), float("nan"), chance)
    rng = np.random.default_rng(seed)
    drawn = [rng.choice(found, len(found)).mean() for _ in range(DRAWS)]
    low, high = np.quantile(drawn, (0.025, 0.975))
    return Score(float(found.mean()), float(low), float(high), chance)


# ---- membership ----
def confidence(logits: Tensor, y: Tensor) -> Tensor:
    """Returns log p − log(1 − p) of each item's own class, [items]: high if the loss is low.

    Args:
        logits: [items, classes].
        y: The labels, [items].
    """
    log_p = F.log_softmax(logits.double(), 1)
    own = log_p.gather(1, y.unsqueeze(1)).squeeze(1)
    others = log_p.scatter(1, y.unsqueeze(1), -torch.inf)
    return own - others.logsumexp(1)


def lira(target: Tensor, shadows: Tensor, trained: Tensor) -> Tensor:
    """Returns how much more confident the target is than models that have not seen the item.

    This is the offline form of LiRA (Carlini et al., 2022) with one variance for all items, which
    suits few shadow models: the confidence minus its mean over the shadow models that were not
    trained on the item, by the pooled deviation. It is 0 for an item that all were trained on.

    Args:
        target: `confidence` of the model that is attacked, [items].
        shadows: That of the shadow models, [shadows, items].
        trained: Which of them were trained on an item, [shadows, items] bool.
    """
    out = (~trained).double()
    count = out.sum(0)
    centre = (shadows * out).sum(0) / count.clamp(min=1)
    spread = ((shadows - centre).square() * out).sum() / out.sum().clamp(min=1)
    return torch.where(count > 0, (target - centre) / spread.sqrt().clamp(min=1e-6), 0.0)


# ---- links ----
def alike(rows: Tensor, pairs: Tensor) -> Tensor:
    """Returns the correlation of two nodes' rows, for each pair, [pairs].

    Args:
        rows: Predictions as log-probabilities, or embeddings, [nodes, width].
        pairs: [2, pairs].
    """
    centred = rows.double() - rows.double().mean(1, keepdim=True)
    unit = F.normalize(centred - centred.mean(0))
    return (unit[pairs[0]] * unit[pairs[1]]).sum(1)


@torch.no_grad()
def influence(predict: Callable[[Tensor], Tensor], x: Tensor, nodes: Tensor) -> Tensor:
    """Returns how much a node's features change each prediction, [nodes, all nodes].

    It is LinkTeller (Wu et al., 2022): the attacker scales the features of one node and looks whose
    prediction changes.

    Args:
        predict: Returns the logits of all nodes for features [all nodes, d].
        x: The features.
        nodes: The nodes whose features are scaled.
    """
    before, found = predict(x).double(), []
    for node in nodes.tolist():
        changed = x.clone()
        changed[node] *= 1 + STEP
        found.append((predict(changed).double() - before).norm(dim=1))
    return torch.stack(found) if found else torch.zeros(0, len(x), dtype=torch.float64)


# ---- features ----
def inverted(change: Message, num_features: int) -> Tensor | None:
    """Returns an input row that a change of the first layer tells, [features]; None if it cannot.

    With a weight W [d, h] and a bias b [h], ∂L/∂W = Σ_i x_i δ_iᵀ and ∂L/∂b = Σ_i δ_i. A hidden unit
    that is active at one input only has x_i as the ratio of both. Of all units the attack takes the
    one whose ratio has the fewest features: it is a mixture of the fewest inputs.

    Args:
        change: A gradient, or the change of weights, by name; nested.
        num_features: d.
    """
    flat = flatten(change)
    for name, weight in flat.items():
        bias = flat.get(f"{name.removesuffix('weight')}bias")
        if not name.endswith("weight") or weight.dim() != 2 or bias is None:
            continue
        if weight.shape[0] != num_features or bias.shape != weight.shape[1:]:
            continue
        used = bias.abs() > 1e-3 * bias.abs().max()
        if not used.any():
            continue
        ratio = (weight[:, used] / bias[used]).double()
        largest = ratio.abs().amax(0)
        held = (ratio.abs() > 0.01 * largest).sum(0)
        held = torch.where(largest > 0, held, num_features + 1)
        return ratio[:, int(held.argmin())]
    return None


def closest(row: Tensor, graph: Graph) -> float:
    """Returns the largest cosine of a row and an input of the first layer near a training item.

    These inputs are x_v of the training items, and the rows of Â x of them and their neighbours.

    Args:
        row: What an attack has recovered, [features].
        graph: The client's graph.
    """
    trained = graph.train if graph.batch is None else graph.train[graph.batch]
    near = (trained.float() + graph.propagate(trained.float().unsqueeze(1)).squeeze(1)) > 0
    inputs = torch.cat([graph.x[trained], graph.propagate(graph.x)[near]]).double()
    if not len(inputs):
        return 0.0
    return float((F.normalize(inputs) @ F.normalize(row.double(), dim=0)).max())
