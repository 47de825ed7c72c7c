"""Noise: lengths after clipping, the distribution of discrete Gaussian numbers, their source."""

import math
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedloom.privacy import dp_noise
from fedloom.privacy.dp_noise import clipped, discrete_gaussian, seeded_source, to_units


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50),
    st.floats(1e-3, 1e3),
    st.integers(20, 40),
)
def test_no_vector_is_longer_than_the_clip(values, clip, bits):
    vector = np.array(values)
    short = clipped(vector, clip)
    assert np.linalg.norm(short) <= clip * (1 + 1e-6)
    whole = to_units(short, bits)
    # exact: a sum of squares of integers against the clip in units
    assert sum(int(k) ** 2 for k in whole) <= (clip * 2.0**bits) ** 2
    if np.linalg.norm(vector) <= clip:
        assert np.array_equal(short, vector)


def test_rounding_to_the_nearest_would_break_the_bound():
    vector = np.full(4, 0.5 + 1e-9)  # length 1
    assert np.linalg.norm(np.rint(vector)) > 1.5
    assert np.linalg.norm(to_units(vector, 0)) <= 1


def source(seed):
    return seeded_source(torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scale", [2.0**30 * 1.37, 2.0**20])
def test_large_noise_is_normal(scale):
    drawn = discrete_gaussian(1_000_000, scale, source(1)) / scale
    assert drawn.std() == pytest.approx(1, rel=0.01)
    assert stats.kstest(drawn, "norm").pvalue > 0.001


@pytest.mark.parametrize("scale", [0.6, 2.5, 7.0])
def test_small_noise_has_the_exact_probabilities(scale):
    count = 400_000
    drawn = discrete_gaussian(count, scale, source(2))
    numbers = np.arange(-60, 61)
    weight = np.exp(-(numbers**2) / (2 * scale**2))
    expected = count * weight / weight.sum()
    often = expected > 50
    seen = np.array([(drawn == k).sum() for k in numbers])
    rest = [count - seen[often].sum()], [count - expected[often].sum()]
    observed, wanted = np.append(seen[often], rest[0]), np.append(expected[often], rest[1])
    statistic = ((observed - wanted) ** 2 / np.maximum(wanted, 1)).sum()
    assert stats.chi2.sf(statistic, often.sum()) > 0.001


def test_a_wrong_distribution_is_noticed():
    drawn = discrete_gaussian(1_000_000, 2.0**30, source(1)) / 2.0**30
    assert stats.kstest(1.01 * drawn, "norm").pvalue < 0.001


def test_shares_add_up():
    scale, shares = 2.0**25, 9
    total = sum(discrete_gaussian(200_000, scale / 3, source(k)) for k in range(shares)) / scale
    assert total.std() == pytest.approx(1, rel=0.01)
    assert stats.kstest(total, "norm").pvalue > 0.001


def test_the_default_source_is_the_operating_system(monkeypatch):
    asked = []
    real = os.urandom
    monkeypatch.setattr(os, "urandom", lambda n: asked.append(n) or real(n))
    torch.manual_seed(0)
    np.random.seed(0)
    first = discrete_gaussian(1000, 1e6)
    torch.manual_seed(0)
    np.random.seed(0)
    assert not np.array_equal(first, discrete_gaussian(1000, 1e6))
    assert sum(asked) >= 2 * 1000 * 16


def test_the_unit_is_fine_enough():
    for scale in (1e-6, 0.3, 1.0, 1e5):
        units = math.ldexp(scale, dp_noise.server_bits(scale))
        assert 2.0**30 <= units < 2.0**31
    assert not discrete_gaussian(5, 0.0).any()
    with pytest.raises(ValueError, match="scale is"):
        discrete_gaussian(5, -1.0)
