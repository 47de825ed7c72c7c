"""Sparse products are the dense ones, forward and backward, whatever the shape."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.sparse import Sparse

some = settings(max_examples=40, deadline=None)


@st.composite
def triplets(draw):
    """Coordinates in any order, some repeated, rows and columns left empty; perhaps no entry at all."""
    rows, columns = draw(st.integers(1, 7)), draw(st.integers(1, 7))
    count = draw(st.integers(0, 20))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    row, col = (torch.randint(size, (count,), generator=rng) for size in (rows, columns))
    return row, col, torch.randn(count, generator=rng), (rows, columns)


def dense_of(row, col, values, shape):
    matrix = torch.zeros(shape)
    for r, c, v in zip(row.tolist(), col.tolist(), values.tolist(), strict=True):
        matrix[r, c] += v
    return matrix


@some
@given(triplets(), st.integers(1, 5))
def test_products_and_their_gradients_are_the_dense_ones(entries, width):
    sparse, dense = Sparse.from_edges(*entries), dense_of(*entries)
    rng = torch.Generator().manual_seed(width)
    h = torch.randn(entries[3][1], width, generator=rng)
    weight = torch.randn(entries[3][0], width, generator=rng)  # so that rows of the gradient differ
    results = []
    for matrix in (sparse, dense):
        leaf = h.clone().requires_grad_()
        out = matrix @ leaf
        (out * weight).sum().backward()
        results.append((out.detach(), leaf.grad))
    assert torch.allclose(results[0][0], results[1][0], atol=1e-5)
    assert torch.allclose(results[0][1], results[1][1], atol=1e-5)


@some
@given(triplets())
def test_dense_transpose_rows_and_count(entries):
    sparse, dense = Sparse.from_edges(*entries), dense_of(*entries)
    assert torch.allclose(sparse.dense(), dense, atol=1e-6)
    assert torch.allclose(sparse.transpose.dense(), dense.t(), atol=1e-6)
    assert sparse.transpose.shape == (entries[3][1], entries[3][0])
    twice = sparse.transpose.transpose
    assert torch.equal(twice.offsets, sparse.offsets)
    assert torch.equal(twice.indices, sparse.indices)
    assert torch.allclose(twice.dense(), dense, atol=1e-6)
    assert sparse.nnz == len(entries[2])
    assert sparse.rows.tolist() == sorted(entries[0].tolist())
    assert sparse.transpose is sparse.transpose  # made once


def test_entries_are_sorted_by_row_then_column():
    sparse = Sparse.from_edges(torch.tensor([2, 0, 2, 0]), torch.tensor([1, 2, 0, 0]), torch.tensor([1.0, 2.0, 3.0, 4.0]), (4, 3))
    assert sparse.offsets.tolist() == [0, 2, 2, 4, 4]
    assert sparse.indices.tolist() == [0, 2, 0, 1]
    assert sparse.values.tolist() == [4, 2, 3, 1]
    assert sparse.offsets.dtype == sparse.indices.dtype == torch.int32
    assert sparse.values.dtype == torch.float32


def test_only_entries_other_than_zero_are_taken_from_a_dense_matrix():
    matrix = torch.tensor([[0.0, 2.0, 0.0], [0.0, 0.0, 0.0], [-1.0, 0.0, 3.0]])
    sparse = Sparse.from_dense(matrix)
    assert sparse.nnz == 3
    assert torch.equal(sparse.dense(), matrix)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_wide_indices_give_the_same(index):
    narrow = Sparse.from_dense(torch.eye(4, 6) + torch.ones(4, 1) * torch.tensor([0, 0, 0, 0, 0, 1.0]))
    sparse = Sparse(narrow.offsets.to(index), narrow.indices.to(index), narrow.values, narrow.shape)
    h = torch.arange(12.0).view(6, 2).requires_grad_()
    out = sparse @ h
    out.square().sum().backward()
    dense_h = h.detach().clone().requires_grad_()
    (narrow.dense() @ dense_h).square().sum().backward()
    assert torch.equal(out, narrow.dense() @ h)
    assert torch.equal(h.grad, dense_h.grad)


def test_gradients_by_finite_differences_and_of_gradients():
    sparse = Sparse.from_edges(torch.tensor([0, 0, 2, 2]), torch.tensor([1, 1, 0, 3]), torch.tensor([0.5, 2.0, -1.0, 0.25]), (4, 5))
    h = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: sparse @ t, (h,))
    assert torch.autograd.gradgradcheck(lambda t: (sparse @ t).pow(3), (h,))


def test_columns_of_a_wider_tensor_and_of_a_transposed_one():
    sparse = Sparse.from_dense(torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 0.0]]))
    wide = torch.arange(12.0).view(3, 4)
    assert torch.equal(sparse @ wide[:, 1:3], sparse.dense() @ wide[:, 1:3])
    assert torch.equal(sparse @ wide.view(4, 3).t(), sparse.dense() @ wide.view(4, 3).t())


def test_a_tensor_that_does_not_fit_is_refused():
    with pytest.raises((RuntimeError, ValueError, AssertionError)):
        Sparse.from_dense(torch.eye(3, 4)) @ torch.ones(9, 2)
