"""Random numbers: streams that depend on the run's seed and a name, and numbers nobody can repeat.

A stream of the run's seed can be repeated by everybody who knows the recipe. What has to stay
secret comes from the operating system.
"""

import hashlib
import math
import os

import numpy as np
import torch
from torch import Tensor


def stream_seed(*names: object) -> int:
    """Returns a 63-bit seed that depends on all names: (run seed, party, purpose, ...)."""
    digest = hashlib.sha256("\x1f".join(map(str, names)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def entropy_noise(shape: tuple[int, ...], scale: float) -> Tensor:
    """Returns Gaussian noise in float64 from the operating system's entropy.

    A run's generators are seeded by a number in the recipe, so who knows the recipe could subtract
    their noise. NumPy's generators are not made to be unpredictable from their output, whatever
    their seed. So the bits come from the kernel's cryptographic generator. Box and Muller's formula
    makes two normals of two 53-bit uniforms; it has no rejected draws, and no tables.

    The largest value is 8.6 σ. A normal number is beyond with probability 1e-17, which is added to
    δ for each number and is far below any useful δ. As all noise in floating point, it is not the
    exact distribution in the last bits; the secure sum's rounding to fixed point hides these.
    """
    count = math.prod(shape)
    pairs = (count + 1) // 2
    words = np.frombuffer(os.urandom(16 * pairs), dtype=np.uint64) >> np.uint64(11)
    # (0, 1]: the logarithm of 0 must not occur.
    uniform = (words.astype(np.float64) + 1) * 2.0**-53
    radius = np.sqrt(-2 * np.log(uniform[:pairs]))
    angle = 2 * math.pi * uniform[pairs:]
    normal = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]
    return torch.from_numpy(scale * normal).reshape(shape)


def uniform_numbers(count: int, rng: torch.Generator | None = None) -> Tensor:
    """Returns numbers in [0, 1) in float64: from the operating system's entropy, or a stream.

    Args:
        count: How many.
        rng: A random stream, for tests. None: numbers that nobody can repeat.
    """
    if rng is not None:
        return torch.rand(count, generator=rng, dtype=torch.float64)
    words = np.frombuffer(os.urandom(8 * count), dtype=np.uint64) >> np.uint64(11)
    return torch.from_numpy(words.astype(np.float64) * 2.0**-53)
