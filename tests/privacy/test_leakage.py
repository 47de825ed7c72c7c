"""Leakage: exact on rows that say everything or nothing, and the theorem's own numbers."""

import math

import pytest
import torch

from fedloom.errors import ConfigError
from fedloom.methods.fedgh import Schedule
from fedloom.privacy import leakage
from fedloom.privacy.leakage import (
    edge_auc,
    forward_noise_epsilon,
    labels_read,
    member_auc,
    reidentified,
)

NO_LINKS = torch.zeros(2, 0, dtype=torch.int64)


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def real():
    return torch.rand(200, 6, generator=rng())


def test_rows_that_are_the_real_ones_are_all_found(real, monkeypatch):
    assert reidentified(real, real) == 1
    assert reidentified(real, 3 * real - 2) == 1  # neither scale nor what is common hides anything
    monkeypatch.setattr(leakage, "ROWS", 7)
    assert reidentified(real, real) == 1
    assert reidentified(real, real.roll(1, 0)) == 0


def test_noise_is_found_by_chance(real):
    rates = [reidentified(real, torch.randn(200, 6, generator=rng(seed))) for seed in range(30)]
    assert sum(rates) / 30 == pytest.approx(1 / 200, abs=0.003)
    hidden = [
        reidentified(real, real + s * torch.randn(200, 6, generator=rng(1)))
        for s in (0.05, 0.5, 5.0)
    ]
    assert hidden[0] > hidden[1] > hidden[2]


def test_equal_rows_are_guessed_among():
    real = torch.tensor([[1.0, 0], [1.0, 0], [0, 1.0]])
    assert reidentified(real, real) == pytest.approx((0.5 + 0.5 + 1) / 3)
    assert reidentified(torch.ones(4, 2), torch.rand(4, 2, generator=rng())) == pytest.approx(
        1 / 4
    )  # all alike: nobody can tell
    assert math.isnan(reidentified(torch.zeros(0, 2), torch.zeros(0, 2)))
    with pytest.raises(
        ConfigError, match=r"sent has shape \[2, 2\], must be that of real, \[3, 2\]"
    ):
        reidentified(real, real[:2])


def test_edges_are_told_by_links_by_rows_or_not_at_all():
    ends = torch.randint(100, (2, 150), generator=rng())
    noise = torch.randn(100, 8, generator=rng(1))
    assert edge_auc(ends, noise, ends, rng()) == 1  # the links are the edges
    assert edge_auc(ends, noise, NO_LINKS, rng()) == pytest.approx(0.5, abs=0.1)
    blocks = torch.arange(100) // 10
    inside = torch.stack(
        [torch.arange(100), blocks * 10 + torch.randint(10, (100,), generator=rng(2))]
    )
    assert (
        edge_auc(inside, torch.eye(10)[blocks], NO_LINKS, rng()) > 0.9
    )  # linked nodes have equal rows
    assert math.isnan(edge_auc(NO_LINKS, noise, NO_LINKS, rng()))
    assert math.isnan(
        edge_auc(torch.tensor([[0], [1]]), noise[:2], NO_LINKS, rng())
    )  # no pair is not an edge


def test_the_theorems_numbers():
    end = Schedule(100, 1e-3, 0.2).alpha_bar[100].item()
    assert forward_noise_epsilon(end, 1.0) == pytest.approx(0.0434, abs=2e-3)
    # The condition's channel: h through noise of deviation 1
    assert forward_noise_epsilon(1 / 2, 1.0) == pytest.approx(11.6, abs=0.05)
    assert forward_noise_epsilon(1 / 2, 5.0) == pytest.approx(98, abs=0.5)
    assert forward_noise_epsilon(0.0, 1.0) == 0
    by_hand = 2 * 0.3 * 4 / 0.7 + 2 * math.sqrt(8 * 0.3 * math.log(1e6) / 0.7)
    assert forward_noise_epsilon(0.3, 2.0, 1e-6) == pytest.approx(by_hand)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((1.0, 1.0), "alpha_bar is 1.0, must be at least 0 and below 1"),
        ((0.5, 0.0), "bound is 0.0"),
        ((0.5, 1.0, 1.0), "delta 1.0"),
    ],
)
def test_what_the_theorem_does_not_cover_is_refused(arguments, words):
    with pytest.raises(ConfigError, match=words):
        forward_noise_epsilon(*arguments)


# ---- second moments ----
def moments(rows, columns, seed=0):
    """Rows of length 1 with labels, and which of them are in the moments: every other one."""
    rng = torch.Generator().manual_seed(seed)
    f = torch.nn.functional.normalize(torch.randn(rows, columns, generator=rng))
    y = torch.randint(0, 3, (rows,), generator=rng)
    member = torch.arange(rows) % 2 == 0
    Y = torch.nn.functional.one_hot(y, 3).float()
    return f, y, member, f[member].T @ f[member], f[member].T @ Y[member]


def test_few_rows_are_recognised_and_their_labels_read():
    f, y, member, gram, moment = moments(rows=20, columns=50)
    assert member_auc(gram, f, member) == 1.0
    assert labels_read(gram, moment, f[member], y[member]) == 1.0
    assert labels_read(gram, moment, f[~member], y[~member]) < 0.9


def test_many_rows_hide_each_other():
    f, y, member, gram, moment = moments(rows=4000, columns=10)
    assert member_auc(gram, f, member) == pytest.approx(0.5, abs=0.06)
    # Labels are random here: nothing but membership could tell them.
    assert labels_read(gram, moment, f[member], y[member]) < 0.5
