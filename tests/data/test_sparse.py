"""Sparse products and their gradients against dense products, for all shapes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.data.sparse import Sparse, weighted

examples = settings(max_examples=40, deadline=None)


@st.composite
def triplets(draw):
    """Coordinates in any order. Some may be repeated, and rows and columns may be empty."""
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


@examples
@given(triplets(), st.integers(1, 5))
def test_products_and_their_gradients_equal_dense_ones(entries, width):
    sparse, dense = Sparse.from_edges(*entries), dense_of(*entries)
    rng = torch.Generator().manual_seed(width)
    h = torch.randn(entries[3][1], width, generator=rng)
    weight = torch.randn(
        entries[3][0], width, generator=rng
    )  # makes the rows of the gradient differ
    results = []
    for matrix in (sparse, dense):
        leaf = h.clone().requires_grad_()
        out = matrix @ leaf
        (out * weight).sum().backward()
        results.append((out.detach(), leaf.grad))
    assert torch.allclose(results[0][0], results[1][0], atol=1e-5)
    assert torch.allclose(results[0][1], results[1][1], atol=1e-5)


@examples
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
    assert torch.equal(sparse.transpose.values, sparse.values[sparse.order])
    assert sparse.nnz == len(entries[2])
    assert sparse.rows.tolist() == sorted(entries[0].tolist())
    assert sparse.transpose is sparse.transpose  # cached


def test_entries_are_sorted_by_row_then_column():
    sparse = Sparse.from_edges(
        torch.tensor([2, 0, 2, 0]),
        torch.tensor([1, 2, 0, 0]),
        torch.tensor([1.0, 2.0, 3.0, 4.0]),
        (4, 3),
    )
    assert sparse.offsets.tolist() == [0, 2, 2, 4, 4]
    assert sparse.indices.tolist() == [0, 2, 0, 1]
    assert sparse.values.tolist() == [4, 2, 3, 1]
    assert sparse.offsets.dtype == sparse.indices.dtype == torch.int32
    assert sparse.values.dtype == torch.float32


def test_from_dense_takes_only_non_zero_entries():
    matrix = torch.tensor([[0.0, 2.0, 0.0], [0.0, 0.0, 0.0], [-1.0, 0.0, 3.0]])
    sparse = Sparse.from_dense(matrix)
    assert sparse.nnz == 3
    assert torch.equal(sparse.dense(), matrix)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_int64_indices_give_the_same_products(index):
    narrow = Sparse.from_dense(
        torch.eye(4, 6) + torch.ones(4, 1) * torch.tensor([0, 0, 0, 0, 0, 1.0])
    )
    sparse = Sparse(narrow.offsets.to(index), narrow.indices.to(index), narrow.values, narrow.shape)
    h = torch.arange(12.0).view(6, 2).requires_grad_()
    out = sparse @ h
    out.square().sum().backward()
    dense_h = h.detach().clone().requires_grad_()
    (narrow.dense() @ dense_h).square().sum().backward()
    assert torch.equal(out, narrow.dense() @ h)
    assert torch.equal(h.grad, dense_h.grad)


def test_first_and_second_gradients_equal_finite_differences():
    sparse = Sparse.from_edges(
        torch.tensor([0, 0, 2, 2]),
        torch.tensor([1, 1, 0, 3]),
        torch.tensor([0.5, 2.0, -1.0, 0.25]),
        (4, 5),
    )
    h = torch.randn(
        5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True
    )
    assert torch.autograd.gradcheck(lambda t: sparse @ t, (h,))
    assert torch.autograd.gradgradcheck(lambda t: (sparse @ t).pow(3), (h,))


def test_products_with_tensors_that_are_not_contiguous():
    sparse = Sparse.from_dense(torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 0.0]]))
    wide = torch.arange(12.0).view(3, 4)
    assert torch.equal(sparse @ wide[:, 1:3], sparse.dense() @ wide[:, 1:3])
    assert torch.equal(sparse @ wide.view(4, 3).t(), sparse.dense() @ wide.view(4, 3).t())


def test_a_tensor_that_does_not_fit_is_refused():
    with pytest.raises((RuntimeError, ValueError, AssertionError)):
        Sparse.from_dense(torch.eye(3, 4)) @ torch.ones(9, 2)


# ---- variable entries ----


def with_entries(matrix, values):
    """Returns dense matrices with other entries, one per row of `values`, differentiable."""
    places = matrix.rows * matrix.shape[1] + matrix.indices.long()
    flat = values.new_zeros(*values.shape[:-1], matrix.shape[0] * matrix.shape[1]).index_add(
        -1, places, values
    )
    return flat.unflatten(-1, matrix.shape)


@examples
@given(triplets(), st.integers(1, 9), st.sampled_from([(), (1,), (3,), (2, 2)]))
def test_weighted_products_and_their_gradients_equal_dense_ones(entries, width, lead):
    matrix = Sparse.from_edges(*entries)
    rng = torch.Generator().manual_seed(width)
    values = torch.randn(*lead, matrix.nnz, generator=rng, requires_grad=True)
    dense = torch.randn(*lead, matrix.shape[1], width, generator=rng, requires_grad=True)
    weight = torch.randn(*lead, matrix.shape[0], width, generator=rng)
    outputs = weighted(matrix, values, dense), with_entries(matrix, values) @ dense
    assert outputs[0].shape == outputs[1].shape
    results = [
        (out, *torch.autograd.grad((out * weight).sum(), (values, dense))) for out in outputs
    ]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lead", [(), (2,)])
@pytest.mark.parametrize("count", [0, 5])
def test_first_and_second_weighted_gradients_equal_finite_differences(lead, count):
    # One entry is repeated, and some rows are empty.
    row = torch.tensor([0, 0, 2, 2, 2])[:count]
    col = torch.tensor([1, 1, 0, 3, 4])[:count]
    matrix = Sparse.from_edges(row, col, torch.ones(count), (4, 5))
    rng = torch.Generator().manual_seed(0)
    values, dense = (
        torch.randn(*lead, *size, dtype=torch.float64, generator=rng, requires_grad=True)
        for size in ((count,), (5, 3))
    )
    assert torch.autograd.gradcheck(lambda v, d: weighted(matrix, v, d), (values, dense))
    assert torch.autograd.gradgradcheck(lambda v, d: weighted(matrix, v, d).pow(2), (values, dense))


def test_weighted_with_one_side_constant_or_not_contiguous():
    matrix = Sparse.from_dense(torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 0.0]]))
    values, dense = torch.tensor([1.0, -1.0, 0.5]), torch.arange(24.0).view(2, 4, 3).transpose(1, 2)
    both = torch.stack([values, values], 1).t()
    expected = with_entries(matrix, both) @ dense
    assert torch.equal(weighted(matrix, both, dense), expected)
    for leaf, other in ((both, dense), (dense, both)):
        leaf = leaf.clone().requires_grad_()
        out = weighted(matrix, leaf, other) if leaf.dim() == 2 else weighted(matrix, other, leaf)
        (gradient,) = torch.autograd.grad(out.transpose(1, 2).flatten().square().sum(), leaf)
        twin = (
            with_entries(matrix, leaf) @ other
            if leaf.dim() == 2
            else with_entries(matrix, other) @ leaf
        )
        torch.testing.assert_close(gradient, torch.autograd.grad(twin.square().sum(), leaf)[0])


def test_weighting_with_the_own_entries_gives_the_plain_product():
    matrix = Sparse.from_dense(torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 0.0]]))
    h = torch.arange(6.0).view(3, 2)
    assert torch.equal(weighted(matrix, matrix.values, h), matrix @ h)


def test_stacked_coordinates_are_block_diagonal():
    matrix = Sparse.from_dense(
        torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 0.0], [0.0, 3.0, 0.0], [0.0, 0.0, 0.0]])
    )
    offsets, indices = matrix.stacked(3)
    block = Sparse(offsets, indices, matrix.values.repeat(3), (12, 9))
    assert torch.equal(block.dense(), torch.block_diag(*[matrix.dense()] * 3))
    assert offsets.dtype == indices.dtype == torch.int32
    assert matrix.stacked(3) is matrix.stacked(3)  # cached


def test_stacked_coordinates_beyond_int32():
    matrix = Sparse.from_edges(
        torch.tensor([0]), torch.tensor([2**30 - 1]), torch.ones(1), (1, 2**30)
    )
    offsets, indices = matrix.stacked(4)
    assert matrix.indices.dtype == torch.int32
    assert indices.tolist() == [k * 2**30 - 1 for k in range(1, 5)]
    assert offsets.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("values", "dense"),
    [
        ((3,), (4, 2)),
        ((2,), (3, 2)),
        ((3,), (2, 3, 2)),
        ((2, 3), (3, 2)),
        ((3,), (3,)),
        ((3, 3), (2, 3, 2)),
    ],
)
def test_weighted_shapes_that_do_not_fit_are_refused(values, dense):
    matrix = Sparse.from_dense(torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 0.0]]))
    with pytest.raises(ValueError, match="tensor"):
        weighted(matrix, torch.ones(values), torch.ones(dense))
