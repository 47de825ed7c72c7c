"""What a stand-in for a graph gives away of it, measured; and a theorem that is no measurement.

A method may send, for every node, a made-up row instead of the real one (FedGH's pseudo-graphs). How private that is depends on how it
was made, and the only honest number is an attack's: whoever holds candidates for the real rows looks for the one that a made-up row was
made of (`reidentified`), or guesses from made-up rows and links which nodes are linked (`edge_auc`). Chance is 1/n and 0.5. What these
simple attacks find is the least that was given away.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from sklearn.metrics import roc_auc_score
from torch import Generator, Tensor

from fedloom.errors import ConfigError
from fedloom.nn.nearest import other_pairs, pairs

ROWS = 1024  # of similarities that are held at once


def reidentified(real: Tensor, sent: Tensor) -> float:
    """The share of rows of `sent` [n, d] whose most similar row of `real` [n, d] is that of the same node; chance is 1/n.

    Similar: the cosine of what is left of a row without the mean of all. If m real rows are equally similar, a guess among them counts 1/m.
    """
    if real.shape != sent.shape:
        raise ConfigError(
            f"sent has shape {list(sent.shape)}, must be that of real, {list(real.shape)}: a row for a row"
        )
    if len(real) == 0:
        return float("nan")
    known, guessed = (F.normalize((x - x.mean(0)).double()) for x in (real, sent))
    right = 0.0
    for rows in torch.arange(len(sent)).split(ROWS):
        similar = guessed[rows] @ known.T
        best = similar.max(1, keepdim=True).values
        among = similar >= best - 1e-9
        right += (among[torch.arange(len(rows)), rows] / among.sum(1)).sum().item()
    return right / len(real)


def edge_auc(edge_index: Tensor, sent: Tensor, links: Tensor, rng: Generator) -> float:
    """How well linked nodes are told from others by what was sent: the area under the ROC curve, chance is 0.5.

    edge_index: the real edges [2, edges]. sent, links: the made-up rows [n, d] and their links [2, m]. A pair scores the cosine of its
    rows less their mean, and 2 more if it is linked; an attack that is worse than chance is turned round. About as many pairs that are no
    edges are drawn as there are edges; nan without any of either kind.
    """
    n = len(sent)
    edges, linked = pairs(edge_index, n), pairs(links, n)
    others = other_pairs(edges, n, rng)
    if not edges.shape[1] or not others.shape[1]:
        return float("nan")
    unit, both = F.normalize(sent - sent.mean(0)), torch.cat([edges, others], 1)
    score = (unit[both[0]] * unit[both[1]]).sum(1) + 2 * torch.isin(
        both[0] * n + both[1], linked[0] * n + linked[1]
    )
    area = float(roc_auc_score([1] * edges.shape[1] + [0] * others.shape[1], score.numpy()))
    return max(area, 1 - area)


def forward_noise_epsilon(alpha_bar: float, bound: float, delta: float = 1e-5) -> float:
    """ε of (ε, δ)-differential privacy for publishing √ᾱ h + √(1 − ᾱ) noise, where |h| ≤ bound: 2ᾱC²/(1−ᾱ) + C √(8 ᾱ ln(1/δ) / (1−ᾱ)).

    This is FedGH's Theorem 1 (a Gaussian mechanism of sensitivity 2C√ᾱ, by zero-concentrated privacy). It holds for the noised latent
    alone, and says nothing of the system: what FedGH sends is drawn with a condition that sees h through noise of deviation σ_c (that
    channel alone has ᾱ = 1 / (1 + σ_c²), which gives ε = 11.6 at C = 1, and it is used T times), and by networks trained on the private
    graph without noise.
    """
    if not 0 <= alpha_bar < 1:
        raise ConfigError(f"alpha_bar is {alpha_bar}, must be at least 0 and below 1")
    if bound <= 0 or not 0 < delta < 1:
        raise ConfigError(f"bound is {bound} and delta {delta}, must be above 0, and delta below 1")
    rho = 2 * alpha_bar * bound**2 / (1 - alpha_bar)
    return rho + 2 * math.sqrt(rho * math.log(1 / delta))
