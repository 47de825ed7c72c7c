"""Robust rules: hand-computed cases, ByzFL as the reference, bounds."""

import importlib.util
import sys
import types

import pytest
import torch

from fedloom.core import combining, robust
from fedloom.core.robust import RULES, Robustness, most_liars
from fedloom.errors import ConfigError, MessageError

f64 = torch.float64
ROBUST = [rule for rule in RULES if rule != "mean"]


def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def apply(rule: str, X: torch.Tensor, **terms) -> torch.Tensor:
    share = torch.full((len(X),), 1 / len(X), dtype=f64)
    return Robustness(rule, **terms).apply(X, share, rng())


# ---- by hand ----
LINE = torch.tensor([[1.0], [2.0], [3.0], [4.0], [100.0]], dtype=f64)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("mean", 22.0),
        ("clipped", (1 + 2 + 3 + 3 + 3) / 5),  # the median norm is 3
        ("median", 3.0),
        ("trimmed", 3.0),  # without 1 and 100
        ("krum", 2.0),  # its nearest three are at squared distances 1, 1 and 4; as are those of 3
        ("multi-krum", 2.5),  # without 100
        ("geometric-median", 3.0),  # on a line, the median
        ("centered-clipping", 3.0),  # from 3 with radius 1: −1 −1 +0 +1 +1 cancel out
    ],
)
def test_rules_on_a_line(rule, expected):
    found = apply(rule, LINE, byzantine=0 if rule == "mean" else 1)
    assert found.item() == pytest.approx(expected, abs=1e-4)


def test_median_of_an_even_number_is_the_mean_of_the_middle_two():
    assert robust.median(LINE[:4]).item() == 2.5


@pytest.mark.parametrize("clients", [1, 2, 3, 10, 11])
def test_the_median_update_is_the_lower_median_of_each_entry(clients):
    X = torch.randn(clients, 50, generator=rng())
    assert torch.equal(combining._lower_median(X), X.median(0).values)


def test_the_median_norm_is_of_the_values_above_zero():
    assert robust.median_of(torch.tensor([0.0, 4.0, 1.0, 2.0, 0.0, 3.0])).item() == 2.5
    assert robust.median_of(torch.zeros(3)).item() == 0.0


def test_mixing_replaces_a_row_by_the_mean_of_its_nearest():
    assert robust.mixing(LINE, 3).flatten().tolist() == [1.5, 1.5, 2.5, 3.5, 52.0]


def test_buckets_are_means_of_disjoint_groups():
    found = robust.bucketing(LINE, 2, rng())
    assert len(found) == 3  # two, two and one
    order = torch.randperm(5, generator=rng())
    assert found[0] == LINE[order[:2]].mean(0)
    assert found[2] == LINE[order[4]]


def test_mean_and_clipped_use_the_weights():
    X = torch.tensor([[1.0], [1.0], [-1.0]], dtype=f64)
    share = torch.tensor([0.1, 0.1, 0.8], dtype=f64)
    for rule in ("mean", "clipped"):
        assert Robustness(rule).apply(X, share, rng()).item() == pytest.approx(-0.6)


def test_rows_of_zeros_are_not_the_median_norm():
    # Clients without training items answer with what they got. They do not make all others short.
    X = torch.tensor([[0.0], [0.0], [0.0], [2.0], [2.0]], dtype=f64)
    assert apply("clipped", X).item() == pytest.approx(0.8)


# ---- against ByzFL ----
@pytest.fixture(scope="module")
def byzfl():
    """ByzFL's rules, without its training framework, which needs torchvision."""
    spec = importlib.util.find_spec("byzfl")
    if spec is None:
        pytest.skip("byzfl is not installed (pip install --no-deps byzfl)")
    package = types.ModuleType("byzfl")
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["byzfl"] = package
    yield types.SimpleNamespace(
        rules=importlib.import_module("byzfl.aggregators.aggregators"),
        before=importlib.import_module("byzfl.aggregators.preaggregators"),
    )
    for name in [name for name in sys.modules if name.partition(".")[0] == "byzfl"]:
        del sys.modules[name]


@pytest.mark.parametrize(("n", "f", "d"), [(5, 1, 7), (10, 3, 40), (11, 4, 3), (40, 8, 50)])
def test_rules_equal_those_of_byzfl(byzfl, n, f, d):
    X = torch.randn(n, d, dtype=f64, generator=torch.Generator().manual_seed(n))
    X[:f] *= 30
    other, before, zero = byzfl.rules, byzfl.before, torch.zeros(d, dtype=f64)
    median_norm = robust.median_of(torch.linalg.vector_norm(X, dim=1))
    pairs = {
        "mean": (apply("mean", X), other.Average()),
        "median": (apply("median", X), other.Median()),
        "trimmed": (robust.trimmed(X, f), other.TrMean(f)),
        "krum": (robust.krum(X, f), other.Krum(f)),
        "multi-krum": (robust.multi_krum(X, f), other.MultiKrum(f)),
        "geometric-median": (robust.geometric_median(X, zero, 0.1, 3), other.GeometricMedian()),
        "centered-clipping": (
            robust.centered_clipping(X, zero, 2.0, 4),
            other.CenteredClipping(L=4, tau=2.0),
        ),
        "clipped": (
            apply("clipped", X),
            lambda X: before.Clipping(float(median_norm))(X.copy()).mean(0),
        ),
        "mixing": (robust.mixing(X, f), before.NNM(f)),
    }
    for rule, (ours, reference) in pairs.items():
        # NumPy's median averages the middle two; torch's, which ByzFL uses on tensors, does not.
        theirs = torch.as_tensor(reference(X.numpy()))
        assert theirs.dtype == f64, rule
        assert (ours - theirs).abs().max() < 1e-12, rule


def test_buckets_equal_those_of_byzfl_up_to_the_draw(byzfl):
    X = torch.randn(12, 5, dtype=f64, generator=rng())
    ours, theirs = robust.bucketing(X, 3, rng()), byzfl.before.Bucketing(3)(X.numpy())
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours.mean(0), torch.as_tensor(theirs).mean(0))


# ---- properties ----
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("mixing", [False, True])
def test_the_order_of_clients_does_not_matter(rule, mixing):
    if mixing and rule == "mean":
        pytest.skip("nothing is in front of the plain mean")
    X = torch.randn(11, 30, dtype=f64, generator=rng())
    order = torch.randperm(11, generator=rng())
    found, again = (apply(rule, rows, mixing=mixing) for rows in (X, X[order]))
    torch.testing.assert_close(found, again, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("rule", ROBUST)
def test_liars_within_the_bound_cannot_move_a_rule_far(rule):
    X = torch.randn(11, 30, dtype=f64, generator=rng())
    truth, f = X[3:].mean(0), 3
    X[:f] = 1e6
    for mixing in (False, True):
        apart = torch.linalg.vector_norm(apply(rule, X, byzantine=f, mixing=mixing) - truth)
        assert apart < 8  # the norm of a row is about 5.5
    assert torch.linalg.vector_norm(apply("mean", X) - truth) > 1e5  # the control


# ---- how many liars ----
@pytest.mark.parametrize(
    ("rule", "clients", "bound"),
    [("median", 10, 4), ("krum", 10, 3), ("mean", 10, 0), ("krum", 2, 0)],
)
def test_bounds(rule, clients, bound):
    assert most_liars(rule, clients) == bound


def test_groups_lower_the_bound():
    assert Robustness("median", bucketing=2).bound(10) == 2  # of five groups


@pytest.mark.parametrize("rule", ROBUST)
def test_more_liars_than_a_rule_bears_are_refused(rule):
    bound = most_liars(rule, 10)
    Robustness(rule, byzantine=bound).check(10, bound)
    with pytest.raises(ConfigError, match=f"run.byzantine is 5: .*{rule}.* at most {bound} of 10"):
        Robustness(rule, byzantine=5).check(10)
    with pytest.raises(ConfigError, match=f"adversary.clients is 5: .* at most {bound} of 10"):
        Robustness(rule).check(10, 5)


def test_a_rule_that_is_set_up_for_fewer_liars_says_so():
    with pytest.raises(ConfigError, match=r"adversary.clients is 4: .* run.byzantine to 4"):
        Robustness("trimmed").check(10, 4)
    Robustness("trimmed", byzantine=4).check(10, 4)
    Robustness("median").check(10, 4)  # it does not depend on f


def test_too_few_answers_for_the_rule():
    with pytest.raises(MessageError, match="bears 1 liars among the 5 clients that answered"):
        apply("krum", LINE, byzantine=3)


def test_unknown_rule():
    with pytest.raises(ConfigError, match=r"run.aggregation.*'medain'.*median"):
        Robustness("medain")
