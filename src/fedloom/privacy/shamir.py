"""Shamir's secret sharing over a prime field: t shares give the secret, t - 1 reveal nothing.

A share is the value of a polynomial of degree t - 1 at a public point other than 0. The value of
the polynomial at 0 is the secret, and its other coefficients are uniform. A point is a small number
(a party's position + 1). A secret is any number below the prime.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from math import prod
from secrets import randbelow

PRIME = 2**256 + 297  # the smallest prime above 2^256: every 32-byte secret is in the field
SHARE_BYTES = 33


def split(secret: int, threshold: int, points: Sequence[int], prime: int = PRIME) -> list[int]:
    """Returns a share of a secret for each point.

    The operating system provides the random coefficients.

    Args:
        secret: A number below the prime.
        threshold: How many shares are needed to combine the secret.
        points: One point per share.
        prime: The size of the field.
    """
    if not 0 <= secret < prime:
        raise ValueError("the secret is not a number of the field")
    if not 1 <= threshold <= len(points):
        raise ValueError(f"{threshold} of {len(points)} shares cannot be asked for")
    _require_points(points, prime)
    return evaluate([secret, *(randbelow(prime) for _ in range(threshold - 1))], points, prime)


def evaluate(coefficients: Sequence[int], points: Iterable[int], prime: int = PRIME) -> list[int]:
    """Returns the values of a polynomial at the points. The constant coefficient comes first."""
    falling = coefficients[::-1]
    values = []
    for point in points:
        value = 0
        for coefficient in falling:
            # Points are small, so one reduction at the end is cheaper than one at every step.
            value = value * point + coefficient
        values.append(value % prime)
    return values


def combine(shares: Mapping[int, int], prime: int = PRIME) -> int:
    """Returns the secret.

    shares: {point: share}, at least as many as the threshold. A wrong share gives a wrong secret.
    """
    points = tuple(shares)
    _require_points(points, prime)
    pairs = zip(shares.values(), _weights(points, prime), strict=True)
    return sum(share * weight for share, weight in pairs) % prime


def _require_points(points: Sequence[int], prime: int) -> None:
    distinct = len(set(points)) == len(points)
    if not points or not distinct or not all(0 < point < prime for point in points):
        raise ValueError("points must be there, different, above 0 and below the prime")


@lru_cache(maxsize=64)  # in a complete graph, all secrets of a sum have the same points
def _weights(points: tuple[int, ...], prime: int) -> list[int]:
    """Returns the Lagrange weights at 0: Π_{j≠i} x_j / (x_j - x_i), for each i."""
    denominators = [
        point * prod(other - point for other in points if other != point) % prime
        for point in points
    ]
    everything = prod(points) % prime
    # One inversion for all: invert the product of all denominators, then divide them out from the
    # last to the first.
    before = [1]
    for denominator in denominators:
        before.append(before[-1] * denominator % prime)
    inverse = pow(before[-1], -1, prime)
    weights = []
    for denominator, product in zip(reversed(denominators), reversed(before[:-1]), strict=True):
        weights.append(everything * inverse % prime * product % prime)
        inverse = inverse * denominator % prime
    return weights[::-1]
