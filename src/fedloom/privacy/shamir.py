"""Shamir's secret sharing over a prime field: any t shares give the secret, t - 1 shares say nothing about it.

A share is the value, at a public point that is not 0, of a polynomial of degree t - 1 whose value at 0 is the secret and whose other
coefficients are uniform. Points are small numbers (a party's position + 1), secrets any number below the prime.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from math import prod
from secrets import randbelow

PRIME = (
    2**256 + 297
)  # the smallest prime above 2^256: every 32-byte secret is a number of the field
SHARE_BYTES = 33


def split(secret: int, threshold: int, points: Sequence[int], prime: int = PRIME) -> list[int]:
    """Takes a secret below the prime, gives its share for each point; any `threshold` of them give it back. Coefficients from the OS."""
    if not 0 <= secret < prime:
        raise ValueError("the secret is not a number of the field")
    if not 1 <= threshold <= len(points):
        raise ValueError(f"{threshold} of {len(points)} shares cannot be asked for")
    _require_points(points, prime)
    return evaluate([secret, *(randbelow(prime) for _ in range(threshold - 1))], points, prime)


def evaluate(coefficients: Sequence[int], points: Iterable[int], prime: int = PRIME) -> list[int]:
    """The polynomial with these coefficients, the constant first, at each point."""
    falling = coefficients[::-1]
    values = []
    for point in points:
        value = 0
        for coefficient in falling:
            value = (
                value * point + coefficient
            )  # points are small, so reducing once at the end is cheaper than at every step
        values.append(value % prime)
    return values


def combine(shares: Mapping[int, int], prime: int = PRIME) -> int:
    """Takes {point: share}, as many as the threshold, gives the secret. More would do too; a wrong share gives a wrong secret."""
    points = tuple(shares)
    _require_points(points, prime)
    return (
        sum(
            share * weight
            for share, weight in zip(shares.values(), _weights(points, prime), strict=True)
        )
        % prime
    )


def _require_points(points: Sequence[int], prime: int) -> None:
    if (
        not points
        or len(set(points)) < len(points)
        or not all(0 < point < prime for point in points)
    ):
        raise ValueError("points must be there, different, above 0 and below the prime")


@lru_cache(
    maxsize=64
)  # in a complete graph every secret of a sum is put together from the same points
def _weights(points: tuple[int, ...], prime: int) -> list[int]:
    """What to multiply the shares by so that they add up to the value at 0 (Lagrange): Π_{j≠i} x_j / (x_j - x_i), for each i."""
    denominators = [
        point * prod(other - point for other in points if other != point) % prime
        for point in points
    ]
    everything = prod(points) % prime
    # One inversion for all: invert the product of the denominators, then peel them off from the last to the first.
    before = [1]
    for denominator in denominators:
        before.append(before[-1] * denominator % prime)
    inverse = pow(before[-1], -1, prime)
    weights = []
    for denominator, product in zip(reversed(denominators), reversed(before[:-1]), strict=True):
        weights.append(everything * inverse % prime * product % prime)
        inverse = inverse * denominator % prime
    return weights[::-1]
