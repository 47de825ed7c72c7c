"""Powers of an adjacency in parts: numbering, pruning, threshold by counting, packed blocks."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_matrix
from scipy.sparse import random as random_matrix

from fedloom.errors import MessageError
from fedloom.methods.fedstruct import powers
from fedloom.methods.fedstruct.powers import Numbering, PartyAdjacency


def some_matrix(rows=12, columns=20, density=0.4, seed=0, levels=None):
    matrix = random_matrix(
        rows, columns, density, format="csr", dtype=np.float32, random_state=seed
    )
    if levels:  # makes many entries equal
        matrix.data = (np.ceil(matrix.data * levels) / levels).astype(np.float32)
    return csr_matrix(matrix)


def test_numbers_follow_the_names_of_the_parties():
    one, other = Numbering.of({"b": 3, "a": 2, "c": 4}), Numbering.of({"c": 4, "a": 2, "b": 3})
    assert one == other
    assert one.total == 9
    assert [one.span(name) for name in "abc"] == [slice(0, 2), slice(2, 5), slice(5, 9)]
    assert one.size("c") == 4


@given(st.integers(1, 60), st.integers(0, 5), st.sampled_from([None, 2, 3]))
def test_strongest_by_owner_keeps_the_largest_entries(most, seed, levels):
    matrix = some_matrix(seed=seed, levels=levels)
    kept = powers.strongest_by_owner(matrix, most, Numbering.of({"a": matrix.shape[1]}))
    assert kept.nnz == min(most, matrix.nnz)
    full, left = matrix.toarray(), kept.toarray()
    assert np.array_equal(full[left > 0], left[left > 0])
    dropped = full[(left == 0) & (full > 0)]
    assert not len(dropped) or dropped.max() <= left[left > 0].min()


def test_strongest_by_owner_prunes_each_partys_columns_separately():
    numbering, matrix = Numbering.of({"a": 7, "b": 3, "c": 10}), some_matrix(density=0.8)
    kept = powers.strongest_by_owner(matrix, 9, numbering).toarray()
    for name in "abc":
        part = csr_matrix(matrix[:, numbering.span(name)])
        alone = powers.strongest_by_owner(part, 9, Numbering.of({name: part.shape[1]}))
        assert np.array_equal(kept[:, numbering.span(name)], alone.toarray())
    assert powers.strongest_by_owner(matrix, 10**6, numbering) is matrix


@given(st.integers(1, 90), st.integers(0, 5), st.sampled_from([None, 2, 3]))
def test_counting_bytes_finds_the_same_threshold_as_sorting(most, seed, levels):
    parts = [some_matrix(seed=seed + k, levels=levels) for k in range(3)]
    values = np.sort(np.concatenate([part.data for part in parts]))[::-1]
    if most > len(values):
        return
    bits, above = 0, 0
    for depth in range(4):
        counts = sum(powers.tally(part, bits, depth) for part in parts)
        from_top = counts[::-1].cumsum()
        place = int((above + from_top < most).sum())
        above += int(from_top[place - 1]) if place else 0
        bits = bits * 256 + 255 - place
    assert np.array([bits], np.int32).view(np.float32)[0] == values[most - 1]
    assert above == (values > values[most - 1]).sum()
    cut = [powers.cut_below(part, bits, 0) for part in parts]
    assert sum(part.nnz for part in cut) == above


def test_cut_below_keeps_the_given_number_of_ties():
    matrix = csr_matrix(np.array([[0.5, 0.25, 0.0], [0.25, 0.0, 0.25]], np.float32))
    bits = int(np.array([0.25], np.float32).view(np.int32)[0])
    assert powers.cut_below(matrix, bits, 2).toarray().tolist() == [
        [0.5, 0.25, 0.0],
        [0.25, 0.0, 0.0],
    ]
    assert powers.cut_below(matrix, bits, 9).nnz == 4


def test_packed_blocks_are_unpacked_unchanged():
    block = some_matrix(5, 20)
    assert np.array_equal(
        powers.unpacked(powers.packed(block), 5, 20, "x").toarray(), block.toarray()
    )
    nothing = powers.unpacked(powers.packed(csr_matrix((0, 20), dtype=np.float32)), 0, 20, "x")
    assert nothing.shape == (0, 20)
    with pytest.raises(MessageError, match="x: tensor 'count' has shape \\[5\\], expected \\[4\\]"):
        powers.unpacked(powers.packed(block), 4, 20, "x")
    huge = {**powers.packed(block), "count": torch.full((5,), 2**31 - 1, dtype=torch.int32)}
    with pytest.raises(MessageError, match="tensor 'column' has shape"):
        powers.unpacked(huge, 5, 20, "x")


def test_scatter_rows_puts_rows_at_their_positions():
    block = some_matrix(2, 6, density=0.9)
    full = powers.scatter_rows(block, np.array([1, 4]), 5).toarray()
    assert np.array_equal(full[[1, 4]], block.toarray())
    assert not full[[0, 2, 3]].any()


def test_as_sparse_multiplies_like_the_matrix():
    matrix, q = some_matrix(), torch.randn(20, 3)
    assert torch.allclose(
        powers.as_sparse(matrix) @ q, torch.from_numpy(matrix.toarray()) @ q, atol=1e-6
    )


def test_degrees_count_cross_edges_and_no_loops():
    inner = csr_matrix(np.array([[0, 1], [0, 0]], np.float32))
    incoming = {"b": csr_matrix(np.array([[1, 1, 0], [0, 0, 0]], np.float32))}
    outgoing = {"b": csr_matrix(np.array([[0, 1], [0, 0], [0, 1]], np.float32))}
    part = PartyAdjacency("a", Numbering.of({"a": 2, "b": 3}), inner, incoming, outgoing)
    assert part.degrees().tolist() == [3, 0]
    assert part.mean_degrees().tolist() == [1.5, 1.5]
    assert part.inverse_degrees(loops=False).tolist() == [pytest.approx(1 / 3), 0]
    assert part.inverse_degrees(loops=True).tolist() == [0.25, 1]
    assert np.allclose(
        part.first_power(loops=True).toarray(), [[0.25, 0.25, 0.25, 0.25, 0], [0, 1, 0, 0, 0]]
    )
    assert part.rows_to("b").tolist() == [0, 2]
    assert part.rows_from("b").tolist() == [0]
