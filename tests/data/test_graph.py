"""Graphs: subgraphs, unions and products against plain computations, and refused fields."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedloom
from fedloom.data.federation import Federation, disjoint_union
from fedloom.data.graph import SPARSE_FEATURES_BELOW, Graph
from fedloom.data.sparse import Sparse
from fedloom.errors import DataError

KINDS = ("sym", "row", "mean", "sum", "sym-bare")
seeds = st.integers(0, 2**31)
examples = settings(max_examples=40, deadline=None)


def random_graph(seed, weighted=False, nodes=None, cut=5):
    """Returns a graph with directed and repeated edges, self-loops, isolated nodes and masks.

    It also has node ids that are not positions, and cut edges.
    """
    rng = torch.Generator().manual_seed(seed)

    def integers(high, *shape):
        return torch.randint(high, shape, generator=rng)

    n = nodes or int(integers(12, 1)) + 1
    m = int(integers(3 * n, 1))
    lot = integers(4, n)
    return Graph(
        x=torch.randn(n, 3, generator=rng),
        edge_index=integers(n, 2, m),
        y=integers(3, n),
        num_classes=3,
        train=lot == 0,
        val=lot == 1,
        test=lot == 2,
        edge_weight=torch.rand(m, generator=rng) + 0.1 if weighted else None,
        node_id=torch.randperm(100, generator=rng)[:n],
        cross_edges=torch.stack(
            [integers(n, cut), 100 + integers(50, cut), integers(4, cut), integers(2, cut)]
        ),
        name="it",
    )


def random_graphs(seed, weighted=False):
    """Returns a graph-level dataset of small graphs. Some of them may have no nodes."""
    rng = torch.Generator().manual_seed(seed)
    items = int(torch.randint(1, 7, (1,), generator=rng))
    batch = torch.randint(items, (14,), generator=rng).sort().values
    ends = torch.randint(14, (2, 40), generator=rng)
    ends = ends[:, batch[ends[0]] == batch[ends[1]]]
    lot = torch.randint(4, (items,), generator=rng)
    return Graph(
        x=torch.randn(14, 2, generator=rng),
        edge_index=ends,
        y=torch.randint(2, (items,), generator=rng),
        num_classes=2,
        train=lot == 0,
        val=lot == 1,
        test=lot == 2,
        edge_weight=torch.rand(ends.shape[1], generator=rng) if weighted else None,
        node_id=torch.randperm(50, generator=rng)[:14],
        batch=batch,
        name="many",
    )


def random_choice(seed, count):
    """Returns some of the numbers below `count`, each at most once, in random order."""
    rng = torch.Generator().manual_seed(seed)
    kept = int(torch.randint(0, count + 1, (1,), generator=rng))
    return torch.randperm(count, generator=rng)[:kept]


def weight_of(graph):
    return [1.0] * graph.num_edges if graph.edge_weight is None else graph.edge_weight.tolist()


def named_edges(graph):
    """Returns sorted edges (source id, target id, weight), regardless of the node numbering."""
    ids = graph.node_id.tolist()
    return sorted(
        (ids[s], ids[t], w)
        for (s, t), w in zip(graph.edge_index.t().tolist(), weight_of(graph), strict=True)
    )


# ---- subgraphs and unions ----
@examples
@given(seeds, st.booleans(), st.booleans())
def test_a_subgraph_has_the_chosen_nodes_and_the_edges_between_them(seed, weighted, as_mask):
    graph = random_graph(seed, weighted)
    keep = random_choice(seed + 1, graph.num_nodes)
    if as_mask:
        keep = keep.sort().values
        part = graph.subgraph(torch.isin(torch.arange(graph.num_nodes), keep))
    else:
        part = graph.subgraph(keep)
    kept = keep.tolist()
    place = {old: new for new, old in enumerate(kept)}
    edges = [
        (place[s], place[t], w)
        for (s, t), w in zip(graph.edge_index.t().tolist(), weight_of(graph), strict=True)
        if {s, t} <= {*kept}
    ]
    assert [
        (s, t, w) for (s, t), w in zip(part.edge_index.t().tolist(), weight_of(part), strict=True)
    ] == edges
    for field in ("x", "y", "train", "val", "test", "node_id"):
        assert torch.equal(getattr(part, field), getattr(graph, field)[keep]), field
    cut = [[place[own], *rest] for own, *rest in graph.cross_edges.t().tolist() if own in place]
    assert part.cross_edges.t().tolist() == cut
    assert part.cross_edges.shape[0] == 4
    assert (part.edge_weight is None) == (graph.edge_weight is None)
    assert (part.num_classes, part.name) == (3, "it")


@examples
@given(seeds, st.booleans())
def test_selected_items_are_whole_small_graphs_in_the_given_order(seed, weighted):
    graph = random_graphs(seed, weighted)
    keep = random_choice(seed + 1, graph.num_items)
    part = graph.select_items(keep)
    nodes = [
        node
        for item in keep.tolist()
        for node in (graph.batch == item).nonzero().flatten().tolist()
    ]
    assert torch.equal(part.x, graph.x[nodes])
    assert torch.equal(part.node_id, graph.node_id[nodes])
    assert part.batch.tolist() == sorted(part.batch.tolist())
    assert part.batch.tolist() == [
        new
        for new, item in enumerate(keep.tolist())
        for _ in range(int((graph.batch == item).sum()))
    ]
    ids = set(part.node_id.tolist())
    # No edge leaves its small graph.
    assert named_edges(part) == [e for e in named_edges(graph) if e[0] in ids]
    for field in ("y", "train", "val", "test"):
        assert torch.equal(getattr(part, field), getattr(graph, field)[keep]), field
    if len(nodes):
        part.check()


def test_select_items_of_a_node_graph_is_its_subgraph():
    graph = random_graph(3, nodes=8)
    keep = torch.tensor([6, 1, 2])
    one, other = graph.select_items(keep), graph.subgraph(keep)
    assert torch.equal(one.edge_index, other.edge_index)
    assert torch.equal(one.node_id, other.node_id)
    by_mask = graph.select_items(torch.isin(torch.arange(8), keep))
    assert torch.equal(by_mask.node_id, graph.node_id[[1, 2, 6]])


def test_subgraph_refuses_many_small_graphs():
    with pytest.raises(DataError, match="select_items"):
        random_graphs(0).subgraph(torch.tensor([0]))


@examples
@given(seeds, st.booleans(), st.booleans())
def test_a_union_is_block_diagonal(seed, first_weighted, second_weighted):
    parts = [
        random_graph(seed, first_weighted),
        random_graph(seed + 1, second_weighted),
        random_graph(seed + 2),
    ]
    union = disjoint_union(iter(parts))
    blocks = torch.block_diag(*(p.adjacency("sum").dense() for p in parts))
    assert torch.equal(union.adjacency("sum").dense(), blocks)
    assert union.num_edges == sum(p.num_edges for p in parts)  # the adjacency drops self-loops
    for field in ("x", "y", "train", "val", "test", "node_id"):
        assert torch.equal(getattr(union, field), torch.cat([getattr(p, field) for p in parts])), (
            field
        )
    assert (union.edge_weight is not None) == (first_weighted or second_weighted)
    assert union.cross_edges.shape == (4, 0)
    assert union.batch is None


@examples
@given(seeds)
def test_a_union_of_graph_level_datasets_has_all_their_items(seed):
    parts = [random_graphs(seed), random_graphs(seed + 1)]
    union = disjoint_union(parts).check()
    assert union.num_items == sum(p.num_items for p in parts)
    first = torch.arange(union.num_items) < parts[0].num_items
    for part, chosen in zip(parts, (first, ~first), strict=True):
        again = union.select_items(chosen)
        assert torch.equal(again.batch, part.batch)
        assert torch.equal(again.edge_index, part.edge_index)
        assert torch.equal(again.x, part.x)


# ---- views for training ----
def test_labels_outside_the_training_set_are_hidden():
    graph = random_graph(5, nodes=12)
    before = graph.y.clone()
    hidden = graph.hide_labels()
    assert torch.equal(hidden.y[graph.train], before[graph.train])
    assert (hidden.y[~graph.train] == -1).all()
    assert torch.equal(graph.y, before)
    assert hidden.adjacency() is graph.adjacency()  # both graphs share the cache


@examples
@given(seeds)
def test_the_inductive_view_has_only_training_items(seed):
    for graph in (random_graph(seed), random_graphs(seed)):
        view = graph.training_view(inductive=True)
        assert torch.equal(view.y, graph.y[graph.train])
        assert view.train.all()
        assert not view.val.any()
        assert not view.test.any()
        seen = graph.train if graph.batch is None else graph.train[graph.batch]
        assert torch.equal(view.node_id.sort().values, graph.node_id[seen].sort().values)
        ids = set(view.node_id.tolist())
        assert named_edges(view) == [e for e in named_edges(graph) if e[0] in ids and e[1] in ids]
        assert view.adjacency("sum").shape == (view.num_nodes, view.num_nodes)


def test_the_transductive_view_hides_only_labels():
    graph = random_graph(7, nodes=10)
    view = graph.training_view(inductive=False)
    assert torch.equal(view.x, graph.x)
    assert torch.equal(view.edge_index, graph.edge_index)
    assert (view.y[~graph.train] == -1).all()


def test_replaced_edges_or_features_do_not_use_the_cache():
    graph = random_graph(1, nodes=8)
    assert graph.adjacency("sum").nnz
    assert graph.sparse_x is None
    assert (
        replace(graph, edge_index=torch.zeros(2, 0, dtype=torch.int64), edge_weight=None)
        .adjacency("sum")
        .nnz
        == 0
    )
    assert replace(graph, x=torch.zeros(8, 3)).sparse_x.nnz == 0


def test_cached_results_are_computed_once():
    graph, made = random_graph(1, nodes=8), []
    for _ in range(2):
        assert graph.cached("key", lambda: made.append(1) or 7) == 7
    assert (
        graph.cached("nothing", lambda: made.append(2))
        is graph.cached("nothing", lambda: made.append(3))
        is None
    )
    assert made == [1, 2]


# ---- adjacencies and products ----
def dense_adjacency(graph, kind):
    """Returns the matrices of `Graph.adjacency`, computed entry by entry in double precision."""
    n = graph.num_nodes
    A = torch.zeros(n, n, dtype=torch.float64)
    for (source, target), w in zip(graph.edge_index.t().tolist(), weight_of(graph), strict=True):
        if source != target:
            A[target, source] += w
    if kind in ("sym", "row"):
        A += torch.eye(n)
    degree = A.sum(1)
    inverse = torch.tensor([1 / d if d > 0 else 0.0 for d in degree.tolist()], dtype=torch.float64)
    return {
        "sum": A,
        "row": inverse[:, None] * A,
        "mean": inverse[:, None] * A,
        "sym": inverse.sqrt()[:, None] * A * inverse.sqrt()[None],
        "sym-bare": inverse.sqrt()[:, None] * A * inverse.sqrt()[None],
    }[kind]


@examples
@given(seeds, st.booleans())
def test_adjacencies_equal_their_formulas(seed, weighted):
    graph = random_graph(seed, weighted)
    h = torch.randn(graph.num_nodes, 4, generator=torch.Generator().manual_seed(seed))
    for kind in KINDS:
        expected = dense_adjacency(graph, kind).float()
        assert torch.allclose(graph.adjacency(kind).dense(), expected, atol=1e-6), kind
        assert torch.allclose(graph.propagate(h, kind), expected @ h, atol=1e-5), kind
    assert torch.equal(graph.propagate(h), graph.propagate(h, "sym"))


def test_messages_flow_from_the_first_row_to_the_second():
    graph = Graph(torch.ones(3, 1), torch.tensor([[0], [2]]), torch.zeros(3, dtype=torch.int64), 1)
    received = graph.propagate(torch.tensor([[5.0], [6.0], [7.0]]), "sum")
    assert received.flatten().tolist() == [0, 0, 5]


def test_adjacencies_are_computed_once_per_kind():
    graph = random_graph(2, nodes=6)
    assert graph.adjacency("row") is graph.adjacency("row")
    assert graph.adjacency("row") is not graph.adjacency("sym")
    assert graph.subgraph(torch.arange(3)).adjacency("row").shape == (3, 3)
    with pytest.raises(ValueError, match=r"'rows'.*sym, row, mean, sum, sym-bare"):
        graph.adjacency("rows")


def test_zero_weights_give_finite_adjacencies():
    graph = Graph(
        torch.ones(2, 1),
        torch.tensor([[0], [1]]),
        torch.zeros(2, dtype=torch.int64),
        1,
        edge_weight=torch.zeros(1),
    )
    for kind in KINDS:
        assert graph.adjacency(kind).dense().isfinite().all(), kind


@pytest.mark.parametrize(
    "filled", [0.0, SPARSE_FEATURES_BELOW - 0.05, SPARSE_FEATURES_BELOW + 0.05, 1.0]
)
def test_projections_of_sparse_and_dense_features_equal_the_dense_product(filled):
    rng = torch.Generator().manual_seed(0)
    x = torch.zeros(200)
    x[torch.randperm(200, generator=rng)[: round(200 * filled)]] = 1.5
    graph = Graph(
        x.view(10, 20), torch.zeros(2, 0, dtype=torch.int64), torch.zeros(10, dtype=torch.int64), 1
    )
    assert (graph.sparse_x is not None) == (filled < SPARSE_FEATURES_BELOW)
    assert graph.sparse_x is None or isinstance(graph.sparse_x, Sparse)
    ways = []
    for product in (graph.project, graph.x.__matmul__):
        W = torch.randn(20, 3, generator=torch.Generator().manual_seed(1)).requires_grad_()
        out = product(W)
        out.square().sum().backward()
        ways.append((out.detach(), W.grad))
    assert torch.allclose(ways[0][0], ways[1][0], atol=1e-6)
    assert torch.allclose(ways[0][1], ways[1][1], atol=1e-5)


def test_sizes_and_defaults():
    graph = Graph(
        torch.ones(4, 2), torch.tensor([[0, 1], [1, 0]]), torch.zeros(4, dtype=torch.int64), 3
    )
    assert (graph.num_nodes, graph.num_edges, graph.num_features, graph.num_items, graph.task) == (
        4,
        2,
        2,
        4,
        "node",
    )
    assert graph.node_id.tolist() == [0, 1, 2, 3]
    assert graph.cross_edges.shape == (4, 0)
    assert not (graph.train | graph.val | graph.test).any()
    assert graph.check() is graph
    many = random_graphs(1)
    assert (many.task, many.num_items, many.num_nodes) == ("graph", len(many.y), 14)


# ---- refused graphs and federations ----
def plain(**changes):
    """Returns a graph of four nodes, five edges and three classes, with one item in every mask."""
    fields = {
        "x": torch.ones(4, 2),
        "edge_index": torch.tensor([[0, 1, 2, 3, 0], [1, 0, 3, 2, 3]]),
        "y": torch.tensor([0, 1, 2, -1]),
        "num_classes": 3,
        "train": torch.tensor([1, 0, 0, 0]).bool(),
        "val": torch.tensor([0, 1, 0, 0]).bool(),
        "test": torch.tensor([0, 0, 1, 0]).bool(),
        "name": "toy",
    }
    return Graph(**{**fields, **changes})


def with_value(value):
    """Returns features with one entry replaced."""
    x = torch.ones(4, 2)
    x[2, 1] = value
    return x


MANY = {
    "y": torch.tensor([0, 1]),
    "train": torch.tensor([True, False]),
    "val": torch.zeros(2).bool(),
    "test": torch.zeros(2).bool(),
}
BAD_GRAPHS = {
    "no nodes": (
        {"x": torch.ones(0, 2), "y": torch.zeros(0, dtype=torch.int64)},
        "x is empty.*at least one node",
    ),
    "flat features": ({"x": torch.ones(4)}, r"x must be \[nodes, features\] float32, got \[4\]"),
    "double features": ({"x": torch.ones(4, 2).double()}, "x must be .* float32, got .*float64"),
    "nan": ({"x": with_value(float("nan"))}, "x has NaN or infinite values, first in node 2"),
    "infinite": ({"x": with_value(-float("inf"))}, "x has NaN or infinite values, first in node 2"),
    "int32 edges": (
        {"edge_index": torch.zeros(2, 1, dtype=torch.int32)},
        r"edge_index must be .* int64, got \[2, 1\] torch.int32",
    ),
    "edges the other way": (
        {"edge_index": torch.zeros(5, 2, dtype=torch.int64)},
        r"edge_index must be \[2, edges\]",
    ),
    "flat edges": (
        {"edge_index": torch.zeros(2, dtype=torch.int64)},
        r"edge_index must be \[2, edges\]",
    ),
    "edge too far": (
        {"edge_index": torch.tensor([[0], [4]])},
        r"edge_index holds 4, out of range for 4 nodes \(valid: 0 to 3\)",
    ),
    "edge below zero": (
        {"edge_index": torch.tensor([[-1], [0]])},
        r"edge_index holds -1, .*valid: 0 to 3",
    ),
    "float labels": ({"y": torch.zeros(4)}, r"y must be \[items\] int64, got \[4\] torch.float32"),
    "column of labels": (
        {"y": torch.zeros(4, 1, dtype=torch.int64)},
        r"y must be \[items\] int64, got \[4, 1\]",
    ),
    "too few labels": ({"y": torch.tensor([0, 1, 2])}, "y has 3 labels for 4 nodes"),
    "no classes": ({"num_classes": 0}, "num_classes is 0, must be at least 1"),
    "label too large": (
        {"y": torch.tensor([0, 1, 3, -1])},
        r"y\[2\] is 3, out of range \(valid: 0 to 2, or -1 for unknown\)",
    ),
    "label too small": ({"y": torch.tensor([0, -2, 2, -1])}, r"y\[1\] is -2, out of range"),
    "mask of numbers": (
        {"val": torch.tensor([0, 1, 0, 0])},
        r"val must be \[4\] bool, got \[4\] torch.int64",
    ),
    "short mask": ({"test": torch.tensor([True, False])}, r"test must be \[4\] bool, got \[2\]"),
    "unlabelled training": (
        {"train": torch.tensor([0, 0, 0, 1]).bool()},
        "train contains item 3, which has no label",
    ),
    "unlabelled test": (
        {"test": torch.tensor([0, 0, 0, 1]).bool()},
        "test contains item 3, which has no label",
    ),
    "train is val": (
        {"val": torch.tensor([1, 1, 0, 0]).bool()},
        "train and val overlap, first at item 0",
    ),
    "train is test": (
        {"test": torch.tensor([1, 0, 1, 0]).bool()},
        "train and test overlap, first at item 0",
    ),
    "val is test": (
        {"test": torch.tensor([0, 1, 1, 0]).bool()},
        "val and test overlap, first at item 1",
    ),
    "short batch": (
        {**MANY, "batch": torch.tensor([0, 0, 1])},
        r"batch must contain the graph of every node, \[4\] int64, ascending, 0 to 1",
    ),
    "mixed batch": ({**MANY, "batch": torch.tensor([0, 1, 0, 1])}, "batch must .* ascending"),
    "batch too far": ({**MANY, "batch": torch.tensor([0, 0, 1, 2])}, "batch must .* 0 to 1"),
    "batch below zero": ({**MANY, "batch": torch.tensor([-1, 0, 1, 1])}, "batch must .* 0 to 1"),
    "too few weights": ({"edge_weight": torch.ones(4)}, "edge_weight has 4 values for 5 edges"),
    "too few ids": ({"node_id": torch.arange(3)}, "node_id has 3 values for 4 nodes"),
}


@pytest.mark.parametrize("case", BAD_GRAPHS)
def test_a_bad_graph_is_refused_and_the_field_is_named(case):
    changes, words = BAD_GRAPHS[case]
    with pytest.raises(DataError, match=f"^graph 'toy': {words}"):
        plain(**changes).check()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"edge_index": torch.zeros(2, 0, dtype=torch.int64)},
        {"edge_weight": torch.ones(5)},
        {"x": torch.full((4, 2), 3e38)},
        {**MANY, "batch": torch.tensor([0, 0, 1, 1])},
    ],
)
def test_a_good_graph_passes(changes):
    graph = plain(**changes)
    assert graph.check() is graph


MORE_BAD_GRAPHS = {
    "nan weight": {"edge_weight": torch.full((5,), float("nan"))},
    "column of weights": {"edge_weight": torch.ones(5, 1)},
    "cut edges of another shape": {"cross_edges": torch.zeros(3, 2, dtype=torch.int64)},
    "cut edge of no own node": {"cross_edges": torch.tensor([[9], [0], [0], [0]])},
    "float batch": {**MANY, "batch": torch.tensor([0.0, 0.0, 1.0, 1.0])},
}


@pytest.mark.parametrize("case", MORE_BAD_GRAPHS)
def test_more_bad_graphs_are_refused(case):
    with pytest.raises(DataError):
        plain(**MORE_BAD_GRAPHS[case]).check()


BAD_FEDERATIONS = {
    "no parties": (lambda: Federation(()), "graphs is empty.*at least one party"),
    "same names": (
        lambda: Federation((plain(), plain()), names=("a", "a")),
        r"names must be 2 different names, got \['a', 'a'\]",
    ),
    "too few names": (
        lambda: Federation((plain(), plain()), names=("a",)),
        "names must be 2 different names",
    ),
    "too many names": (
        lambda: Federation((plain(),), names=("a", "b")),
        "names must be 1 different names",
    ),
    "a bad graph": (
        lambda: Federation((plain(), plain(num_classes=0)), names=("a", "b")),
        "graph 'toy': num_classes is 0",
    ),
    "other features": (
        lambda: Federation((plain(), plain(x=torch.ones(4, 3))), names=("a", "b")),
        "num_features differs between parties: 'a' has 2, 'b' has 3",
    ),
    "other classes": (
        lambda: Federation((plain(), plain(num_classes=4)), names=("a", "b")),
        "num_classes differs .*'a' has 3, 'b' has 4",
    ),
    "other task": (
        lambda: Federation(
            (plain(), plain(**MANY, batch=torch.tensor([0, 0, 1, 1]))), names=("a", "b")
        ),
        "task differs between parties: 'a' has node, 'b' has graph",
    ),
}


@pytest.mark.parametrize("case", BAD_FEDERATIONS)
def test_a_bad_federation_is_refused_and_the_party_is_named(case):
    make, words = BAD_FEDERATIONS[case]
    with pytest.raises(DataError, match=words):
        make().check()


def test_too_many_names_are_refused_even_if_one_is_repeated():
    with pytest.raises(DataError, match="names must be 2 different names"):
        Federation((plain(), plain()), names=("a", "b", "b")).check()


def test_facts_of_a_federation():
    federation = Federation((plain(), plain())).check()
    assert federation.names == ("0", "1")
    assert (
        federation.num_clients,
        federation.num_features,
        federation.num_classes,
        federation.task,
    ) == (2, 2, 3, "node")
    assert Federation((plain(),), names=("hospital",)).names == ("hospital",)


def test_merging_uses_the_whole_graph_if_it_is_known_else_the_union():
    parts, whole = (plain(), plain()), random_graph(0, nodes=8)
    with_whole = Federation(parts, whole=whole, inductive=True, about={"dataset": "toy"}).merged()
    assert with_whole.graphs == (whole,)
    assert (with_whole.names, with_whole.whole, with_whole.inductive, with_whole.about) == (
        ("all",),
        None,
        True,
        {"dataset": "toy"},
    )
    without = Federation(parts).merged().check()
    assert without.num_clients == 1
    assert torch.equal(
        without.graphs[0].adjacency().dense(),
        torch.block_diag(*(p.adjacency().dense() for p in parts)),
    )


def test_flow_reverses_edges_or_adds_the_reversed_ones() -> None:
    graph = Graph(
        torch.ones(3, 1), torch.tensor([[0, 1, 1], [1, 0, 2]]), torch.zeros(3, dtype=torch.int64), 1
    )
    assert graph.with_flow("forward") is graph
    assert graph.with_flow("reversed").edge_index.tolist() == [[1, 0, 2], [0, 1, 1]]
    assert graph.with_flow("both").edge_index.tolist() == [[0, 1, 1, 2], [1, 0, 2, 1]]
    weighted = replace(graph, edge_weight=torch.tensor([1.0, 2.0, 3.0]))
    assert weighted.with_flow("reversed").edge_weight.tolist() == [1, 2, 3]
    assert weighted.with_flow("both").edge_weight.tolist() == [1, 2, 3, 3]
    with pytest.raises(ValueError, match="unknown flow 'back'"):
        graph.with_flow("back")


def test_names_of_items_follow_the_items_into_parts() -> None:
    graph = fedloom.synthetic(nodes=60)
    ids = np.array([f"account-{k}" for k in range(60)])
    classes = tuple(f"class {c}" for c in range(graph.num_classes))
    named = replace(graph, ids=ids, class_names=classes).check()
    assert named.item_ids is named.ids
    assert named.classes == classes
    assert graph.classes == tuple(str(c) for c in range(graph.num_classes))
    federation = fedloom.divide(named, clients=3, partition="louvain", seed=0)
    for part in federation.graphs:
        assert part.ids is not None
        assert part.ids.tolist() == ids[part.node_id.numpy()].tolist()
        assert part.class_names == classes
    chosen = named.select_items(torch.tensor([7, 3]))
    assert chosen.item_ids.tolist() == ["account-7", "account-3"]
    assert federation.class_names == classes


@pytest.mark.parametrize(
    ("field", "names", "error"),
    [
        ("ids", np.array(["a"]), "ids has 1 names for 60 items"),
        ("ids", np.array(["a"] * 60), "ids has the same name twice"),
        ("class_names", ("a",), "class_names has 1 names"),
        ("feature_names", ("a",), "feature_names has 1 names"),
    ],
)
def test_wrong_names_are_refused(field: str, names: object, error: str) -> None:
    with pytest.raises(DataError, match=error):
        replace(fedloom.synthetic(nodes=60), **{field: names}).check()
