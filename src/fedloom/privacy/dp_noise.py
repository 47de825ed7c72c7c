"""Noise on integers: clipped vectors in fixed point, and the discrete Gaussian distribution.

Noise in floating point can be told from the sum it hides by its last bits (Mironov, CCS 2012). So
everything that is released is a sum of integers: multiples of a unit, which is a power of two. A
vector is truncated towards 0, which makes no entry longer, so its length stays within the clip. The
noise is discrete Gaussian (Canonne, Kamath and Steinke, NeurIPS 2020): a number k has a probability
proportional to exp(-k² / 2σ²).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

Source = Callable[[int], NDArray[np.uint64]]  # takes a count, returns as many random 64-bit words

# σ of a noise share in units. Then a discrete Gaussian differs from a rounded one by less than
# 2^-44 of any probability, so that the accounting of the Gaussian mechanism holds.
FINEST = 2.0**20
SERVER_BITS = 30  # σ of the server's noise is at least 2^30 units
_STEP = 2**17  # numbers that are drawn at a time: fits into the cache


def entropy(count: int) -> NDArray[np.uint64]:
    """Returns random words from the operating system. Nobody can repeat them."""
    return np.frombuffer(os.urandom(8 * count), dtype=np.uint64)


def seeded_source(rng: torch.Generator) -> Source:
    """Returns a source of random words from a run's random stream: for tests only."""

    def draw(count: int) -> NDArray[np.uint64]:
        words = torch.randint(-(2**63), 2**63 - 1, (count,), generator=rng)
        return words.numpy().view(np.uint64)

    return draw


def source_of(rng: Callable[[str], torch.Generator], seeded: bool) -> Source:
    """Returns the source of a run's noise: the operating system, or, if seeded, a party's stream.

    Args:
        rng: Returns the party's random stream for a purpose.
        seeded: Whether the run is a test.
    """
    return seeded_source(rng("privacy noise")) if seeded else entropy


def discrete_gaussian(count: int, scale: float, source: Source = entropy) -> NDArray[np.int64]:
    """Returns integers of the discrete Gaussian distribution, [count].

    A discrete Laplace number of scale t = ⌊σ⌋ + 1 is kept with probability
    exp(-(|k| - σ²/t)² / 2σ²): Algorithm 3 of Canonne et al. Probabilities are compared with 53
    random bits.

    Args:
        count: How many.
        scale: σ, at least 0 and below 2^50.
        source: Where random words come from. The default is the operating system.
    """
    if not 0 <= scale < 2.0**50:
        raise ValueError(f"scale is {scale!r}, must be from 0 to 2^50")
    found = np.zeros(count, np.int64)
    if scale == 0:
        return found
    at, width = 0, math.floor(scale) + 1
    while at < count:
        step = min(_STEP, int(1.6 * (count - at)) + 16)
        size = np.floor(-width * np.log(_uniform(source(step))))
        words = source(step)
        minus = (words & np.uint64(1)).astype(bool)
        distance = (size - scale * scale / width) / scale
        kept = _uniform(words) < np.exp(-distance * distance / 2)
        kept &= ~(minus & (size == 0))  # 0 must not count twice
        drawn = np.where(minus, -size, size)[kept][: count - at]
        found[at : at + len(drawn)] = drawn.astype(np.int64)
        at += len(drawn)
    return found


def _uniform(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Returns numbers in (0, 1] from the upper 53 bits."""
    return ((words >> np.uint64(11)).astype(np.float64) + 1) * 2.0**-53


def clipped(vector: NDArray[np.float64], clip: float) -> NDArray[np.float64]:
    """Returns a vector, scaled down to the length `clip` if it is longer."""
    length = float(np.linalg.norm(vector))
    return vector if length <= clip else vector * (clip * (1 - 2.0**-40) / length)


def to_units(vector: NDArray[np.float64], bits: int) -> NDArray[np.int64]:
    """Returns multiples of 2^-bits, truncated towards 0: never longer than the vector."""
    return np.trunc(np.ldexp(vector, bits)).astype(np.int64)


def server_bits(scale: float) -> int:
    """Returns the bits behind the point with which noise of a scale has σ of 2^30 units or more."""
    return SERVER_BITS - math.floor(math.log2(scale))
