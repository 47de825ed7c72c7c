"""Means, standard deviations and paired tests, compared with scipy and computed by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedloom.experiments.report.significance import (
    holm,
    paired,
    points,
    spread,
    verdict,
    wilcoxon,
)


def summary(seed, *scores, **more):
    return {
        "seed": seed,
        "per_client": [{"id": str(k), "accuracy": v} for k, v in enumerate(scores)],
        **more,
    }


def test_spread():
    assert spread([0.8, 0.9]) == pytest.approx((0.85, 0.0707106781))
    assert str(spread([0.8, 0.9])) == "85.0 ± 7.1"
    assert str(spread([0.8, None])) == "80.0"
    assert spread([None]) is None


def test_pairs_are_by_seed_and_client():
    ours, theirs = (
        [summary(0, 0.5, 0.6), summary(1, 0.7, None)],
        [summary(0, 0.25, 0.7), summary(1, 0.5, 0.5)],
    )
    assert paired(ours, theirs) == pytest.approx([25, -10, 20])


def test_clients_are_paired_by_name_not_by_position():
    turned = {
        "seed": 0,
        "per_client": [{"id": "1", "accuracy": 0.7}, {"id": "0", "accuracy": 0.25}],
    }
    assert paired([summary(0, 0.5, 0.6)], [turned]) == pytest.approx([25, -10])


def test_runs_with_unknown_or_other_clients_are_paired_by_seed():
    central, secure = summary(0, 0.9, accuracy=0.9), summary(0, None, None, accuracy=0.8)
    ours = summary(0, 0.5, 0.6, accuracy=0.55)
    assert paired([ours], [central]) == pytest.approx([-35])
    assert paired([ours], [secure]) == pytest.approx([-25])


def test_different_seeds_are_refused():
    with pytest.raises(ValueError, match="seed 0 cannot be paired with seed 1"):
        paired([summary(0, 0.5)], [summary(1, 0.5)])


@pytest.mark.parametrize("seed", range(20))
def test_the_paired_test_agrees_with_scipy(seed):
    rng = np.random.default_rng(seed)
    a, b = rng.normal(0.8, 0.05, (2, 3, 10))
    b = np.where(rng.random(b.shape) < 0.1, a, b)  # some pairs are equal
    ours, theirs = ([summary(k, *row) for k, row in enumerate(scores)] for scores in (a, b))
    found = verdict(paired(ours, theirs))
    expected = stats.wilcoxon(100 * a.ravel(), 100 * b.ravel())
    assert found.p == pytest.approx(expected.pvalue, rel=1e-9)
    assert found.mean == pytest.approx(100 * (a - b).mean())
    assert (found.up, found.down) == ((a > b).sum(), (a < b).sum())
    assert found.low <= found.mean <= found.high


@given(
    st.lists(st.integers(-9, 9), min_size=1, max_size=60)  # zeros and equal values
    | st.lists(st.integers(-999, 999), min_size=1, max_size=60, unique_by=abs)
)
def test_wilcoxon_is_that_of_scipy(values):
    differences = np.array(values) / 7
    expected = stats.wilcoxon(differences).pvalue if differences.any() else 1.0
    assert wilcoxon(differences) == pytest.approx(expected, rel=1e-9)


def test_differences_of_zero_have_p_one():
    assert verdict([0.0, 0.0]).p == 1.0
    assert verdict([0.0, 0.0])[:5] == (0, 0, 0, 0, 0)


def test_a_clear_difference_has_a_small_p_and_an_interval_without_zero():
    found = verdict([1.0, 2.0, 1.5, 0.5, 1.2, 1.1, 0.9, 2.2, 1.6, 0.7])
    assert found.p < 0.01
    assert found.low > 0
    assert str(found).startswith("+1.27 [")


@pytest.mark.parametrize("seed", range(20))
def test_holm_agrees_with_the_step_down_procedure(seed):
    values = np.random.default_rng(seed).beta(0.3, 1, 8)
    named = {str(k): float(v) for k, v in enumerate(values)}
    rejected, ranked = set(), sorted(named, key=named.__getitem__)
    # The smallest p is compared with α / 8, the next with α / 7, until one does not pass.
    for rank, name in enumerate(ranked):
        if named[name] > 0.05 / (len(ranked) - rank):
            break
        rejected.add(name)
    assert {name for name, p in holm(named).items() if p <= 0.05} == rejected


def test_holm_by_hand():
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx(
        {"a": 0.03, "c": 0.06, "b": 0.06}
    )


def test_points_have_no_negative_zero():
    assert [points(v) for v in (1.25, -0.04, 0.04, -3.0)] == ["+1.2", "+0.0", "+0.0", "-3.0"]
