"""Nearest rows, computed block by block, against the full matrix of inner products."""

import pytest
import torch
import torch.nn.functional as F
from tests.watching import Largest

from fedloom.errors import ConfigError
from fedloom.nn import nearest as module
from fedloom.nn.nearest import above, nearest, nearest_edges, pairs, random_non_edges


@pytest.fixture
def z():
    return torch.randn(23, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=["rows", "entries"])
def in_blocks(request, monkeypatch):
    monkeypatch.setattr(
        module, *{"rows": ("ROWS", 5), "entries": ("ENTRIES", 3 * 23)}[request.param]
    )


def test_nearest_rows_equal_those_of_the_full_matrix(z, in_blocks):
    cosine = F.cosine_similarity(z.unsqueeze(1), z.unsqueeze(0), dim=2).fill_diagonal_(-2)
    assert torch.equal(nearest(F.normalize(z), 3), cosine.topk(3).indices)
    # Without normalisation, long rows come first.
    products = (z @ z.T).fill_diagonal_(-torch.inf)
    assert torch.equal(nearest(z, 2), products.topk(2).indices)


def test_pairs_above_a_threshold_equal_those_of_the_full_matrix(z, in_blocks):
    unit = F.normalize(z)
    expected = (unit @ unit.T > 0.5).triu(1).nonzero().T
    assert torch.equal(above(unit, 0.5, 1000), expected)
    with pytest.raises(ConfigError, match=r"threshold -1: more than 50 pairs of 23 nodes"):
        above(unit, -1.0, 50)


@pytest.mark.parametrize("n", [0, 1, 2])
def test_few_rows(n):
    z = torch.ones(n, 3)
    assert nearest(z, 5).shape == (n, max(n - 1, 0))
    assert nearest_edges(z, 5).shape == (2, n * max(n - 1, 0))
    assert above(z, 0.0, 10).shape == (2, n // 2)


def test_pairs_are_distinct_and_contain_no_loops():
    ends = torch.tensor([[3, 1, 1, 2, 0, 1], [1, 3, 3, 2, 2, 0]])
    assert pairs(ends, 4).tolist() == [[0, 0, 1], [1, 2, 3]]
    assert pairs(ends[:, :0], 4).shape == (2, 0)


def test_the_full_matrix_is_never_in_memory(monkeypatch):
    monkeypatch.setattr(module, "ENTRIES", 2**16)
    z = torch.randn(2_000, 2, generator=torch.Generator().manual_seed(0))
    with Largest() as watch:
        nearest(z, 2)
    assert watch.numel <= module.ENTRIES < 2_000**2


def test_other_pairs_contain_no_edges():
    edges = torch.tensor([[0, 0, 1], [1, 2, 3]])
    for seed in range(20):
        drawn = random_non_edges(edges, 5, torch.Generator().manual_seed(seed))
        assert (drawn[0] < drawn[1]).all()
        assert not {(0, 1), (0, 2), (1, 3)} & set(map(tuple, drawn.T.tolist()))
    # Here all pairs are edges.
    assert random_non_edges(torch.tensor([[0], [1]]), 2, torch.Generator()).shape[1] == 0
