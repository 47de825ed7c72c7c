"""Shared rows: a stack that stores equal rows once behaves like the dense stack."""

import pytest
import torch

from fedloom.core.history_hash import chained
from fedloom.core.message import LARGEST, Batch, norms_of, require_finite
from fedloom.core.replies import Replies
from fedloom.core.shared_rows import SharedRows, Sharing
from fedloom.errors import MessageError


@pytest.fixture
def owned():
    return torch.rand(4, 6, generator=torch.Generator().manual_seed(0)) < 0.4


@pytest.fixture
def stack(owned):
    sharing = Sharing.of_owned(owned)
    rng = torch.Generator().manual_seed(1)
    return SharedRows(torch.randn(sharing.stored, 3, generator=rng), sharing)


def test_clients_share_the_rows_that_they_do_not_own(owned, stack):
    dense = stack.dense()
    assert dense.shape == stack.shape == (4, 6, 3)
    for row in range(6):
        others = (~owned[:, row]).nonzero().flatten()
        assert (dense[others, row] == dense[others[:1], row]).all()
    assert stack.sharing.stored == owned.sum() + (~owned).any(0).sum()
    for client in range(4):
        assert torch.equal(stack[client], dense[client])


def test_every_stored_row_is_used():
    sharing = Sharing.of_owned(torch.tensor([[True, False], [True, False]]))
    assert sharing.stored == 3  # nobody shares the first row
    assert sharing.index.unique().tolist() == [0, 1, 2]


def test_a_dense_stack_and_back(stack):
    dense = stack.dense()
    assert stack.sharing.holds(dense)
    assert torch.equal(stack.sharing.stored_rows(dense), stack.stored)


def test_a_stack_with_unequal_rows_cannot_be_shared(owned, stack):
    for row in range(6):
        others = (~owned[:, row]).nonzero().flatten().tolist()
        if len(others) > 1:
            dense = stack.dense()
            dense[others[0], row, 1] += 1
            assert not stack.sharing.holds(dense)


def test_sums_and_means_are_those_of_the_dense_stack(stack):
    names = ("a", "b", "c", "d")
    shared, dense = (Replies(Batch(names, {"w": s})) for s in (stack, stack.dense()))
    weight = {name: torch.tensor(k + 1.0) for k, name in enumerate(names)}
    torch.testing.assert_close(shared.mean(weight)["w"], dense.mean(weight)["w"])
    torch.testing.assert_close(shared.mean()["w"], dense.mean()["w"])
    torch.testing.assert_close(shared.sum()["w"], dense.sum()["w"])
    assert torch.equal(shared.stack("w"), dense.stack("w"))
    assert torch.equal(shared["c"]["w"], dense["c"]["w"])
    assert shared.messages.schema == dense.messages.schema


def test_selected_and_joined_clients_keep_their_matrices(stack):
    order = torch.tensor([2, 0])
    assert torch.equal(stack.select(order).dense(), stack.dense()[order])
    joined = SharedRows.joined([stack, SharedRows(stack.stored + 1, stack.sharing)])
    assert torch.equal(joined.dense(), torch.cat([stack.dense(), stack.dense() + 1]))


def test_the_history_hash_covers_stored_rows_and_their_owners(owned, stack):
    def hash_of(stored, sharing):
        batch = Batch(("a", "b", "c", "d"), {"w": SharedRows(stored, sharing)})
        return chained(b"", 1, "train", {}, Replies(batch))

    changed = stack.stored.clone()
    changed[-1, 0] += 1
    other = Sharing(stack.sharing.index.flip(0), stack.sharing.column)
    first = hash_of(stack.stored, stack.sharing)
    assert first == hash_of(stack.stored.clone(), Sharing.of_owned(owned))
    assert first != hash_of(changed, stack.sharing)
    assert first != hash_of(stack.stored, other)


def test_a_number_that_cannot_travel_is_found_and_its_client_named(stack):
    stack.stored[-1, 0] = torch.nan
    batch = Batch(("a", "b", "c", "d"), {"w": stack})
    assert not norms_of(batch).max() < LARGEST
    named = []
    for client, message in batch.items():
        try:
            require_finite(message, client)
        except MessageError:
            named.append(client)
    assert len(named) == 1  # its owner
