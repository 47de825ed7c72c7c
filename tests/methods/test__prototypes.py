"""Prototypes: class means, tables as they travel, clusters of nearest neighbours."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedloom.errors import MessageError
from fedloom.methods._shared.prototypes import (
    class_means,
    class_sums,
    clusters,
    pack_table,
    table_of,
)


def test_means_and_sums_use_the_items_in_the_mask():
    z = torch.tensor([[1.0, 0], [3, 2], [5, 5], [7, 7]])
    y, mask = torch.tensor([1, 1, -1, 0]), torch.tensor([True, True, False, False])
    means, counts = class_means(z, y, mask, 3)
    assert means.tolist() == [[0, 0], [2, 1], [0, 0]]
    assert counts.tolist() == [0, 2, 0]
    assert class_sums(z, y, mask, 3)[0].tolist() == [[0, 0], [4, 2], [0, 0]]


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 4), st.randoms())
def test_a_table_is_restored_and_absent_entries_never_travel(classes, depth, width, random):
    present = torch.tensor([[random.random() < 0.6 for _ in range(depth)] for _ in range(classes)])
    table = torch.randn(classes, depth, width).masked_fill(~present.unsqueeze(-1), 0.0)
    sent = pack_table(table, present)
    assert len(sent["prototypes"]) == int(present.sum())
    assert (sent["prototypes"] != 0).any(1).all()
    assert torch.equal(table_of(**sent), table)


def test_entries_of_few_items_and_zero_entries_are_not_sent():
    table, present = torch.eye(3), torch.tensor([True, True, True])
    assert pack_table(table, present, 3, torch.tensor([2, 3, 4]))["present"].tolist() == [
        False,
        True,
        True,
    ]
    table[1] = 0
    assert pack_table(table, present)["present"].tolist() == [True, False, True]


def test_a_table_with_another_number_of_rows_is_refused():
    with pytest.raises(MessageError, match="'prototypes' has 3 rows, 'present' counts 2"):
        table_of(torch.ones(3, 4), torch.tensor([True, True, False]))


def test_clusters_are_chains_of_nearest_neighbours():
    points = torch.tensor([[1.0, 0], [1, 0.1], [0, 1], [0.1, 1], [-1, -1], [-1, -0.9]])
    assert clusters(points)[[0, 2, 4]].unique().numel() == 3
    assert torch.equal(clusters(points)[::2], clusters(points)[1::2])
    assert (
        clusters(points * torch.tensor([[5.0], [1], [2], [9], [1], [3]])).tolist()
        == clusters(points).tolist()
    )  # cosine
    assert clusters(points[:1]).tolist() == [0]
    assert clusters(points[:0]).tolist() == []
