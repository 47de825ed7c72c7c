"""Accounting: equal to dp-accounting, known values, Opacus, and a budget that nothing lowers."""

import json
import math
from itertools import pairwise

import pytest

from fedloom.core.privacy_terms import PrivacyTerms
from fedloom.errors import DataError
from fedloom.privacy.dp_accounting import (
    LOG,
    ROUNDED,
    Budget,
    BudgetError,
    epsilon_of,
    most_releases,
    noise_for,
)

dp_accounting = pytest.importorskip("dp_accounting", reason="the extra 'dp' is not installed")
pld = pytest.importorskip("dp_accounting.pld")

# rate, noise, sums: ε by PLD at δ = 1e-5 (shared/reliability.md, 4.4), and Opacus' PRV accountant
GOLDEN = [(0.04, 1.5, 2250, 6.769479), (1.0, 8.0, 100, 5.679623), (1.0, 20.0, 100, 1.993165)]


def direct(rate, noise, sums, delta=1e-5):
    accountant = pld.PLDAccountant(value_discretization_interval=ROUNDED)
    event = dp_accounting.GaussianDpEvent(noise)
    event = event if rate == 1 else dp_accounting.PoissonSampledDpEvent(rate, event)
    return accountant.compose(event, sums).get_epsilon(delta)


@pytest.mark.parametrize(("rate", "noise", "sums", "known"), GOLDEN)
def test_epsilon_is_that_of_dp_accounting(rate, noise, sums, known):
    found = epsilon_of([((noise, rate), sums)], 1e-5)
    assert found == pytest.approx(direct(rate, noise, sums), abs=1e-12)
    assert found == pytest.approx(known, abs=2e-3)


def test_epsilon_agrees_with_opacus():
    accountants = pytest.importorskip("opacus.accountants", reason="Opacus is not installed")
    opacus = accountants.PRVAccountant()
    opacus.history = [(1.5, 0.04, 500)]
    ours = epsilon_of([((1.5, 0.04), 500)], 1e-5)
    assert ours == pytest.approx(opacus.get_epsilon(1e-5), abs=0.02)
    rdp = accountants.RDPAccountant()
    rdp.history = [(1.5, 0.04, 500)]
    assert ours < rdp.get_epsilon(1e-5)  # a looser bound of the same


def test_different_noise_adds_up():
    mixed = epsilon_of([((2.0, 1.0), 3), ((4.0, 1.0), 4)], 1e-5)
    assert mixed == pytest.approx(epsilon_of([((2.0, 1.0), 4)], 1e-5), abs=1e-3)  # 4/16 = 1/4
    assert epsilon_of([], 1e-5) == 0
    assert epsilon_of([((0.0, 1.0), 1)], 1e-5) == math.inf


@pytest.mark.parametrize("rate", [1.0, 0.2])
@pytest.mark.parametrize("epsilon", [0.5, 8.0])
def test_the_chosen_noise_spends_the_budget_and_no_more(epsilon, rate):
    noise = noise_for(epsilon, 1e-5, 20, rate)
    assert 0.99 * epsilon < epsilon_of([((noise, rate), 20)], 1e-5) <= epsilon
    assert epsilon_of([((noise, rate), 21)], 1e-5) > epsilon
    assert most_releases(epsilon, 1e-5, noise, rate, 100) == 20


def terms(**more):
    return PrivacyTerms(**{"noise": 4.0, "delta": 1e-5, "epsilon": 3.0, **more})


def test_nothing_is_spent_beyond_the_limit(tmp_path):
    budget = Budget(terms(), tmp_path)
    spent = [0.0]
    while not budget.exhausted:
        budget.spend(len(spent), "train")
        spent.append(budget.spent())
    with pytest.raises(BudgetError, match=r"run\.dp_epsilon is 3: one more noisy sum, of 'train'"):
        budget.spend(len(spent), "train")
    assert all(a < b for a, b in pairwise(spent))
    assert spent[-1] <= 3 < budget.spent(1)
    rows = [json.loads(line) for line in (tmp_path / LOG).read_text().splitlines()]
    assert [row["epsilon"] for row in rows] == spent[1:]


def test_a_new_process_knows_what_was_spent(tmp_path):
    first = Budget(terms(), tmp_path)
    for round in (1, 2):
        first.spend(round, "train")
    with open(tmp_path / LOG, "a") as file:
        file.write('{"round": 3, "noi')  # killed before the line, and so the sum, was there
    again = Budget(terms(noise=5.0), tmp_path)
    assert again.spent() == first.spent()
    again.spend(2, "train")  # repeats a round: a further release
    assert again.releases == 3
    assert again.spent() == epsilon_of([((4.0, 1.0), 2), ((5.0, 1.0), 1)], 1e-5)
    assert Budget(terms(), tmp_path).spent() == again.spent()


def test_a_seeded_release_marks_the_whole_run(tmp_path):
    Budget(terms(seeded=True), tmp_path).spend(1, "train")
    assert Budget(terms(), tmp_path).summary()["private"] is False


def test_a_damaged_record_is_not_read_as_nothing_spent(tmp_path):
    (tmp_path / LOG).write_text('{"round": 1}\n')
    with pytest.raises(DataError, match="what the run has spent is not known"):
        Budget(terms(), tmp_path)
