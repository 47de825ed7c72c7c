"""Hashes of numbers that all parties compute alike, without a seed."""

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]


def mixed(values: Hashes) -> Hashes:
    """Returns 64-bit numbers that look random, by the mixing function of SplitMix64."""
    z = values + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
