"""Noise for FedGram's sums: sensitivities, the Gaussian mechanism, and what the server repairs.

The clients send G = Σ φφᵀ and B = Σ φyᵀ over their training nodes, once, as a secure sum.
Here φ = (f, c) is a node's row with a constant, y its one-hot label, and

    s = (H_0 + ... + H_L) / (L+1),   H_l = Â H_{l-1},   rows of H_0 of length at most 1
    f = s / max(|s|, r)                                                            `bounded_rows`

with Â = D̃^-1/2 (A+I) D̃^-1/2. The floor r makes f a Lipschitz function of s; without it, two nearly
equal s of length 0 could have opposite f. For features without negative entries and r = 1/(L+1),
f is s scaled to length 1, as in a run without noise.

The proofs of the sensitivities are in docs/fedgram.md. They hold for undirected edges of weight 1
and for every client's own edges only.
"""

from __future__ import annotations

import math

from torch import Tensor

from fedloom.data.seeds import entropy_noise
from fedloom.errors import ConfigError, unknown

RELATIONS = ("label", "edge", "node")
RIDGE_PER_NOISE = 0.5  # λ / (σ √width); see `ridge_for_noise`
SMALLEST_RIDGE = 0.1


def sensitivity(
    relation: str,
    hops: int,
    degree: int,
    constant: float,
    floor: float | None = None,
    capping: bool = True,
) -> float:
    """Returns the largest change of (G, B) between neighbours, as a Euclidean length.

    The length of G's part is its Frobenius length: noise of one scale goes to the upper triangle
    with off-diagonal entries times √2 (see `symmetric_noise`).

    | relation | neighbours differ in | what is noised |
    |---|---|---|
    | "label" | the label of one training node | B only: G does not change |
    | "edge" | one undirected edge | G and B |
    | "node" | one node of degree ≤ `degree`, there or not, with its edges | G and B |

    Args:
        relation: "label", "edge" or "node".
        hops: L.
        degree: The cap D of the degree. Only "node" depends on it.
        constant: c, the value of the constant column.
        floor: r of `bounded_rows`. None: 1 / (L+1).
        capping: Whether the graphs are capped by `capped`, so that removing a node may let one
            other edge of each of its neighbours in. False: all graphs are known to have degrees of
            at most D, and nothing is dropped. Only "node" depends on it.
    """
    if relation not in RELATIONS:
        raise unknown("relation", relation, RELATIONS)
    if hops < 0:
        raise ConfigError(f"hops is {hops!r}, must be at least 0")
    if relation == "node" and degree < 1:
        raise ConfigError(f"degree is {degree!r}, must be at least 1")
    if not (math.isfinite(constant) and constant >= 0):
        raise ConfigError(f"constant is {constant!r}, must be a finite number, 0 or more")
    radius = 1 / (hops + 1) if floor is None else floor
    if not 0 < radius <= 1:
        raise ConfigError(f"floor is {floor!r}, must be above 0 and at most 1")

    square = constant**2
    if relation == "label":
        return math.sqrt(2 * (1 + square))
    # The change of one row's (φφᵀ, φyᵀ) is at most `slope` times that of f, which is at most 1/r
    # times that of s, which is the mean of the hops.
    slope = math.sqrt(5 + 2 * square) / (radius * (hops + 1))
    edge = slope * sum(_edge_change(l) for l in range(1, hops + 1))
    if relation == "edge":
        return edge
    own = math.sqrt((1 + square) * (2 + square))
    node = own + slope * sum(_node_change(l, degree) for l in range(1, hops + 1))
    return node + degree * edge if capping else node


def _edge_change(hop: int) -> float:
    """Returns a bound of Σ_i |ΔH_hop,i| if one edge goes or comes, at any degrees."""
    return 2.0 if hop == 1 else 4 * math.sqrt(2) + 4 * (hop - 2)


def _node_change(hop: int, degree: int) -> float:
    """Returns a bound of Σ_i |ΔH_hop,i| over the other nodes if a node of the degree goes."""
    if hop == 1:
        return degree / math.sqrt(2 * (degree + 1)) + degree / 2
    first = degree * math.sqrt(2)
    last = degree / math.sqrt(degree + 1) + degree / math.sqrt(2)
    return first + last + 2 * degree * (hop - 2)


def gaussian_scale(epsilon: float, delta: float, sensitivity: float) -> float:
    """Returns the least σ with which Gaussian noise is (ε, δ)-differentially private.

    This is the analytic Gaussian mechanism: Balle and Wang, "Improving the Gaussian Mechanism for
    Differential Privacy" (2018), Theorem 8. It is exact, and valid for every ε.

    Args:
        epsilon: ε, above 0. Infinity gives 0.
        delta: δ, between 0 and 1.
        sensitivity: The L2 sensitivity.
    """
    if not epsilon > 0:
        raise ConfigError(f"epsilon is {epsilon!r}, must be above 0")
    if not 0 < delta < 1:
        raise ConfigError(f"delta is {delta!r}, must be between 0 and 1")
    if not (math.isfinite(sensitivity) and sensitivity >= 0):
        raise ConfigError(f"sensitivity is {sensitivity!r}, must be a finite number, 0 or more")
    if math.isinf(epsilon) or sensitivity == 0:
        return 0.0
    low = high = 1.0
    while _delta(high, epsilon) > delta:
        high *= 2
    while _delta(low, epsilon) <= delta:
        low /= 2
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        if not low < middle < high:
            break
        if _delta(middle, epsilon) > delta:
            low = middle
        else:
            high = middle
    return high * sensitivity


def _delta(scale: float, epsilon: float) -> float:
    """Returns the δ of noise N(0, scale²) for sensitivity 1."""
    half, tilt = 1 / (2 * scale), epsilon * scale
    rare = _normal(-half - tilt)
    # e^ε alone overflows from ε = 710. If `rare` is rounded to 0, δ comes out too large, which is
    # the safe side.
    return _normal(half - tilt) - (math.exp(epsilon + math.log(rare)) if rare > 0 else 0.0)


def _normal(x: float) -> float:
    """Returns the standard normal distribution function, exact also far below 0."""
    return math.erfc(-x / math.sqrt(2)) / 2


def noise_share(scale: float, honest: int) -> float:
    """Returns the scale of one client's share of the noise.

    Shares add up to `scale` over `honest` clients. With K clients that take honest = K, the sum
    over h of them has variance σ² h/K. To keep ε if only h clients both take part and keep their
    share secret, all take honest = h; the full sum then has noise σ √(K/h).
    """
    if honest < 1:
        raise ConfigError(f"honest is {honest!r}, must be at least 1")
    return scale / math.sqrt(honest)


def symmetric_noise(width: int, scale: float) -> Tensor:
    """Returns a symmetric matrix of noise for G, [width, width] float64.

    Its isometric vector (diagonal, and √2 times the entries above it) has independent entries of
    the scale. So the entries off the diagonal have scale/√2, and G's sensitivity counts as
    Frobenius length.
    """
    square = entropy_noise((width, width), scale)
    return (square + square.T) / 2


def ridge_for_noise(scale: float, width: int) -> float:
    """Returns λ for noise of a scale: RIDGE_PER_NOISE σ √width, at least SMALLEST_RIDGE.

    The symmetric noise on G has spectral length about σ √(2 width); noise on B has singular values
    of about σ √width. λ is proportional to these, and independent of the data.
    """
    return max(SMALLEST_RIDGE, RIDGE_PER_NOISE * scale * math.sqrt(width))


def bounded_rows(total: Tensor, floor: float) -> Tensor:
    """Returns s / max(|s|, floor) for each row s.

    This is the projection to the ball of radius `floor`, divided by `floor`. So lengths are at most
    1, and no distance grows by more than 1 / floor.
    """
    return total / total.norm(dim=1, keepdim=True).clamp(min=floor)
