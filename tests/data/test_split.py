"""Splits: exact counts, disjoint masks, and independent draws of the clients."""

import re
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.data.federation import Federation
from fedloom.data.graph import Graph
from fedloom.data.partition import divide
from fedloom.data.split import apply_split
from fedloom.errors import ConfigError, DataError


def labelled(y, **masks):
    y = torch.as_tensor(y)
    return Graph(
        x=torch.ones(len(y), 1),
        edge_index=torch.zeros(2, 0, dtype=torch.int64),
        y=y,
        num_classes=3,
        name="toy",
        **masks,
    )


def mixed(items=400, seed=0):
    """Returns a graph with labels 0 to 2, some of them unknown."""
    return labelled(np.random.default_rng(seed).integers(-1, 3, size=items))


def masks(graph):
    return graph.train, graph.val, graph.test


def assert_counts(graph, among, train, val):
    """Asserts that of the items in `among` int(train %) train, int(val %) validate, others test."""
    n = int(among.sum())
    expected = int(n * Fraction(train) / 100), int(n * Fraction(val) / 100)
    got = tuple(int((mask & among).sum()) for mask in masks(graph))
    assert got == (*expected, n - sum(expected))


@settings(max_examples=60, deadline=None)
@given(
    y=st.lists(st.integers(-1, 2), min_size=1, max_size=80),
    shares=st.sampled_from(
        [
            ("20", "40"),
            ("60", "20"),
            ("29", "1"),
            ("33.3", "33.3"),
            ("0", "0"),
            ("100", "0"),
            ("12.5", "0.5"),
        ]
    ),
    clients=st.integers(1, 4),
    seed=st.integers(0, 2**40),
)
def test_counts_per_client_and_class_are_exact(y, shares, clients, seed):
    graph = labelled(y)
    owner = torch.from_numpy(np.random.default_rng(seed).integers(clients, size=len(y)))
    rest = 100 - Fraction(shares[0]) - Fraction(shares[1])
    split = apply_split(
        graph, f"{shares[0]}/{shares[1]}/{float(rest):g}", seed, owner=owner
    ).check()  # disjoint masks, all with labels
    for k in range(clients):
        for c in range(3):
            assert_counts(split, (owner == k) & (graph.y == c), *shares)
    assert torch.equal(torch.stack(masks(split)).any(0), graph.y >= 0)


def test_truncation_leaves_small_classes_without_training_items():
    split = apply_split(labelled([0] * 4 + [1] * 5 + [2] * 9))
    assert [int((split.train & (split.y == c)).sum()) for c in range(3)] == [0, 1, 1]
    assert [int((split.val & (split.y == c)).sum()) for c in range(3)] == [1, 2, 3]
    assert [int((split.test & (split.y == c)).sum()) for c in range(3)] == [3, 2, 5]


def test_shares_are_exact_numbers():
    assert int(0.29 * 100) == 28  # the result with floats
    assert apply_split(labelled([0] * 100), "29/1/70").train.sum() == 29


def test_global_split_ignores_clients_and_classes():
    graph = mixed()
    split = apply_split(graph, "global 10/10/80", 5).check()
    assert_counts(split, graph.y >= 0, 10, 10)
    owner = torch.arange(400) % 7
    assert torch.equal(split.train, apply_split(graph, "global 10/10/80", 5, owner=owner).train)
    per_class = [int((split.train & (graph.y == c)).sum()) for c in range(3)]
    assert per_class != [int((graph.y == c).sum()) // 10 for c in range(3)]  # not stratified


def test_global_class_split_is_stratified_over_all_clients():
    graph, owner = mixed(), torch.arange(400) % 7
    split = apply_split(graph, "global-class 20/40/40", 5, owner=owner).check()
    for c in range(3):
        assert_counts(split, graph.y == c, 20, 40)
    assert torch.equal(split.test, apply_split(graph, "global-class 20/40/40", 5).test)


def test_a_client_alone_gets_the_masks_that_it_has_in_the_whole_graph():
    graph, owner, names = mixed(), torch.arange(400) % 3, ("ann", "bob", "cleo")
    whole = apply_split(graph, "20/40/40", 9, owner=owner, names=names)
    alone = apply_split(graph.select_items(owner == 1), "20/40/40", 9, names=("bob",))
    assert torch.equal(whole.train[owner == 1], alone.train)
    assert torch.equal(whole.val[owner == 1], alone.val)
    other = apply_split(graph.select_items(owner == 1), "20/40/40", 9, names=("ann",))
    assert not torch.equal(alone.train, other.train)


@pytest.mark.parametrize("split", ["20/40/40", "global 20/40/40", "global-class 20/40/40"])
def test_masks_depend_only_on_the_seed(split):
    graph = mixed()
    torch.manual_seed(5)
    first = apply_split(graph, split, 1)
    torch.manual_seed(6)
    again, other = apply_split(graph, split, 1), apply_split(graph, split, 2)
    assert all(torch.equal(a, b) for a, b in zip(masks(first), masks(again), strict=True))
    assert not torch.equal(first.train, other.train)


def test_all_items_train_equally_often():
    graph = labelled([0] * 20)
    times = (
        torch.stack([apply_split(graph, "50/0/50", seed).train for seed in range(400)])
        .float()
        .mean(0)
    )
    assert (times - 0.5).abs().max() < 0.1  # four standard deviations


def test_public_masks_are_partitioned():
    train, val, test = torch.zeros(3, 60, dtype=torch.bool)
    train[:10], val[10:30], test[30:50] = True, True, True
    graph = labelled(torch.arange(60) % 3, train=train, val=val, test=test)
    federation = divide(graph, 4, "random", split="public")
    for part in federation.graphs:
        assert torch.equal(part.train, train[part.node_id])
        assert torch.equal(part.test, test[part.node_id])
    assert torch.equal(federation.whole.val, val)


def test_public_masks_exclude_items_without_a_label():
    graph = labelled(
        [0, -1, 1, 2],
        train=torch.tensor([1, 1, 0, 0]).bool(),
        test=torch.tensor([0, 0, 1, 1]).bool(),
    )
    assert apply_split(graph, "public").train.tolist() == [True, False, False, False]


def test_public_split_needs_masks_that_do_not_overlap():
    with pytest.raises(
        ConfigError,
        match=re.escape(
            "split 'public': 'toy' comes with no masks; give percentages such as '20/40/40'"
        ),
    ):
        apply_split(mixed(), "public")
    both = torch.ones(4, dtype=torch.bool)
    with pytest.raises(DataError, match="train and test overlap, first at item 0"):
        apply_split(labelled([0, 1, 2, 0], train=both, test=both), "public")


@pytest.mark.parametrize(
    "split",
    [
        "",
        "20",
        "20/40",
        "20/40/41",
        "20/40/39.9",
        "-20/80/40",
        "20/40/40/0",
        "a/b/c",
        "nan/50/50",
        "1e1/40/50",
        "local 20/40/40",
        20,
    ],
)
def test_a_bad_split_is_refused_with_an_example(split):
    with pytest.raises(
        ConfigError, match=rf"split {re.escape(repr(split))}: .*such as '20/40/40'"
    ) as caught:
        apply_split(mixed(), split)
    assert "\n" not in str(caught.value)


def test_spaces_and_decimals_are_accepted():
    graph = mixed()
    assert torch.equal(
        apply_split(graph, " 20 / 40/40.0 ").train, apply_split(graph, "20/40/40").train
    )


def test_graphs_are_split_like_nodes():
    y = torch.arange(30) % 3
    graph = Graph(
        x=torch.ones(60, 1),
        edge_index=torch.zeros(2, 0, dtype=torch.int64),
        y=y,
        num_classes=3,
        batch=torch.arange(30).repeat_interleave(2),
    )
    split = apply_split(graph, "80/10/10").check()
    assert [int((split.train & (y == c)).sum()) for c in range(3)] == [8, 8, 8]


def test_clients_without_training_items_are_listed():
    train = torch.tensor([True, False])
    federation = Federation(
        (labelled([0, 1], train=train), labelled([0, 1])), names=("has", "lacks")
    )
    assert federation.roster.without_training == ["lacks"]
    assert divide(mixed(), 5, "random").roster.without_training == []
