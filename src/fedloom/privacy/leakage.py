"""Leakage: attacks that measure what messages reveal, and a theoretical bound.

A method may send a synthetic row for every node instead of the real one (FedGH's pseudo-graphs).
Its privacy depends on how the rows were made, and only attacks measure it. `reidentified` assumes
an attacker with candidates for the real rows, who looks for the one behind each synthetic row;
chance is 1/n. `edge_auc` guesses from synthetic rows and links which nodes are linked; chance is
0.5.

A method may send second moments G = Fᵀ F and B = Fᵀ Y of rows instead of the rows (FedGram).
`member_auc` and `labels_read` assume an attacker who has G and B, and candidates for the rows.

These attacks are simple, so their success is a lower bound of the leakage.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from fedloom.errors import ConfigError
from fedloom.nn.nearest import pairs, random_non_edges

ROWS = 1024  # rows of the similarity matrix in memory at once


def reidentified(real: Tensor, sent: Tensor) -> float:
    """Returns the share of nodes whose sent row is most similar to their own real row.

    The similarity is the cosine of rows minus the mean row. If m real rows are equally similar, a
    guess among them counts 1/m. Chance is 1/n.

    Args:
        real: The real rows [n, d].
        sent: The sent rows [n, d].
    """
    if real.shape != sent.shape:
        raise ConfigError(
            f"sent has shape {list(sent.shape)}, must be that of real, {list(real.shape)}: "
            "a row for each row"
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
    """Returns how well an attack tells linked nodes from others: the area under the ROC curve.

    The score of a pair is the cosine of its rows minus the mean row, plus 2 if the sent links have
    the pair. If the attack is worse than chance, its scores are negated. About as many pairs
    without an edge are drawn as there are edges. The result is nan if there are no pairs of one
    kind.

    Args:
        edge_index: The real edges [2, edges].
        sent: The sent rows [n, d].
        links: The sent links [2, m].
        rng: Draws the pairs without an edge.
    """
    from sklearn.metrics import roc_auc_score  # takes a second to import

    n = len(sent)
    edges, linked = pairs(edge_index, n), pairs(links, n)
    others = random_non_edges(edges, n, rng)
    if not edges.shape[1] or not others.shape[1]:
        return float("nan")
    unit, (one, other) = F.normalize(sent - sent.mean(0)), torch.cat([edges, others], 1)
    is_linked = torch.isin(one * n + other, linked[0] * n + linked[1])
    score = (unit[one] * unit[other]).sum(1) + 2 * is_linked
    area = float(roc_auc_score([1] * edges.shape[1] + [0] * others.shape[1], score.numpy()))
    return max(area, 1 - area)


def forward_noise_epsilon(alpha_bar: float, bound: float, delta: float = 1e-5) -> float:
    """Returns ε of (ε, δ)-differential privacy for publishing √ᾱ h + √(1 − ᾱ) noise, |h| ≤ C.

    ε = 2ᾱC²/(1−ᾱ) + C √(8 ᾱ ln(1/δ) / (1−ᾱ))

    This is FedGH's Theorem 1: a Gaussian mechanism of sensitivity 2C√ᾱ, by zero-concentrated
    privacy. It holds for the noised latent only, not for the whole system. FedGH draws what it
    sends with a condition that sees h through noise of deviation σ_c. That channel alone has ᾱ = 1
    / (1 + σ_c²), which gives ε = 11.6 at C = 1, and it is used T times. The networks that draw are
    trained on the private graph without noise.

    Args:
        alpha_bar: ᾱ.
        bound: C.
        delta: δ.
    """
    if not 0 <= alpha_bar < 1:
        raise ConfigError(f"alpha_bar is {alpha_bar}, must be at least 0 and below 1")
    if bound <= 0 or not 0 < delta < 1:
        raise ConfigError(f"bound is {bound} and delta {delta}, must be above 0, and delta below 1")
    rho = 2 * alpha_bar * bound**2 / (1 - alpha_bar)
    return rho + 2 * math.sqrt(rho * math.log(1 / delta))


def member_auc(gram: Tensor, rows: Tensor, member: Tensor, smallest: float = 1e-4) -> float:
    """Returns how well an attack tells the rows of G from others: the area under the ROC curve.

    If the rows of G do not span all columns, the score of a candidate is the share of it that lies
    within their span. Otherwise it is its leverage fᵀ G^-1 f. If the attack is worse than chance,
    its scores are negated.

    Args:
        gram: G = Fᵀ F, [m, m].
        rows: The candidates, [n, m].
        member: Which candidates are rows of F, [n] bool.
        smallest: Eigenvalues of G below this share of the largest count as 0.
    """
    from sklearn.metrics import roc_auc_score  # takes a second to import

    values, vectors = torch.linalg.eigh(gram.double())
    inside = rows.double() @ vectors
    kept = values > smallest * values.max()
    leverage, outside = (inside.square() / values).sum(1), inside[:, ~kept].square().sum(1)
    score = leverage if kept.all() else -outside
    area = float(roc_auc_score(member.numpy(), score.numpy()))
    return max(area, 1 - area)


def labels_read(
    gram: Tensor, moment: Tensor, rows: Tensor, y: Tensor, ridge: float = 1e-4
) -> float:
    """Returns the share of rows whose label an attack reads from G and B.

    It predicts the largest entry of fᵀ (G + εI)^-1 B: least squares with hardly any penalty.

    Args:
        gram: G = Fᵀ F, [m, m].
        moment: B = Fᵀ Y, [m, C].
        rows: The candidates, [n, m].
        y: Their labels, [n].
        ridge: ε.
    """
    G = gram.double() + ridge * torch.eye(len(gram), dtype=torch.float64)
    weights = torch.linalg.solve(G, moment.double())
    return float(((rows.double() @ weights).argmax(1) == y).double().mean())
