"""Partitions: complete, seeded, and faithful to the algorithms of the papers."""

import inspect
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from torch_geometric.data import Data

from fedloom.data import partition as module
from fedloom.data.datasets import load
from fedloom.data.graph import Graph
from fedloom.data.partition import assign, divide, partition_settings, partitions
from fedloom.errors import ConfigError, DataError, FedloomError

RANDOM = sorted(set(partitions()) - {"metis", "blocks"})  # Metis may find one cut for all seeds


@st.composite
def graphs(draw):
    """A small graph with isolated nodes, loops, repeated and directed edges, unknown labels."""
    nodes = draw(st.integers(1, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    edges = torch.from_numpy(rng.integers(nodes, size=(2, draw(st.integers(0, 80)))))
    if draw(st.booleans()):
        edges = torch.cat([edges, edges.flip(0)], 1)
    # There are few distinct rows, so k-means clusters stay empty.
    x = torch.from_numpy(rng.integers(2, size=(nodes, 3))).float()
    return Graph(
        x=x, edge_index=edges, y=torch.from_numpy(rng.integers(-1, 3, size=nodes)), num_classes=3
    )


def clubs(sizes=(50,) * 12, inside=0.25, outside=0.003):
    """Returns dense communities with few edges between them, which mostly have one label each."""
    edges = torch.tensor(list(nx.random_partition_graph(sizes, inside, outside, seed=0).edges)).T
    rng = np.random.default_rng(0)
    y = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)) % 4
    y = torch.where(
        torch.from_numpy(rng.random(len(y)) < 0.15),
        torch.from_numpy(rng.integers(4, size=len(y))),
        y,
    )
    x = torch.eye(4)[y] + torch.from_numpy(rng.normal(scale=0.3, size=(len(y), 4))).float()
    return Graph(
        x=x, edge_index=torch.cat([edges, edges.flip(0)], 1), y=y, num_classes=4, name="clubs"
    )


def small_graphs(count=120, classes=3):
    """Returns a graph-level dataset of `count` paths of 3 nodes."""
    y = torch.arange(count) % classes
    path = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    edges = torch.cat([path + 3 * i for i in range(count)], 1)
    batch = torch.arange(count).repeat_interleave(3)
    return Graph(
        x=torch.ones(3 * count, 2),
        edge_index=edges,
        y=y,
        num_classes=classes,
        batch=batch,
        name="paths",
    )


def skew(graph, owner):
    """Returns the mean total variation between the clients' label shares and the overall ones.

    The mean is weighted by size.
    """
    counts = torch.zeros(int(owner.max()) + 1, graph.num_classes).index_put_(
        (owner, graph.y), torch.tensor(1.0), accumulate=True
    )
    share, whole = counts / counts.sum(1, keepdim=True), counts.sum(0) / counts.sum()
    return float(((share - whole).abs().sum(1) / 2 * counts.sum(1) / counts.sum()).sum())


def cut(graph, owner):
    return int((owner[graph.edge_index[0]] != owner[graph.edge_index[1]]).sum())


def cora():
    """Returns Cora, or skips the test."""
    try:
        return load("cora")
    except FedloomError as error:
        pytest.skip(f"Cora is not on this machine: {error}")


# ---- all partitions ----


@pytest.mark.parametrize("partition", partitions())
@settings(max_examples=20, deadline=None)
@given(graph=graphs(), clients=st.integers(1, 8), seed=st.integers(0, 2**40))
def test_every_item_has_a_client_and_every_client_an_item(partition, graph, clients, seed):
    clients = min(clients, graph.num_items)
    options = {"min_items": 1} if partition == "dirichlet" else {}
    # With few items, dirichlet may draw labels too unevenly.
    refusal = ConfigError if partition == "dirichlet" else ()
    try:
        owner = assign(graph, clients, partition, seed, **options)
    except refusal:
        reject()
    assert owner.dtype == torch.int64
    assert owner.shape == (graph.num_items,)
    assert sorted(set(owner.tolist())) == list(range(clients))


@settings(max_examples=60, deadline=None)
@given(
    graph=graphs(),
    clients=st.integers(1, 8),
    partition=st.sampled_from(["random", "louvain", "metis"]),
)
def test_kept_and_cross_edges_are_all_edges(graph, clients, partition):
    clients = min(clients, graph.num_nodes)
    federation = divide(graph, clients, partition, cross_edges="known")
    owner = assign(graph, clients, partition)
    kept, leaving, arriving = [], [], []
    for k, part in enumerate(federation.graphs):
        assert torch.equal(part.node_id, (owner == k).nonzero().flatten())
        assert torch.equal(part.x, graph.x[part.node_id])
        assert torch.equal(part.y, graph.y[part.node_id])
        kept += part.node_id[part.edge_index].T.tolist()
        own, remote, remote_owner, direction = part.cross_edges
        assert torch.equal(owner[remote], remote_owner)
        assert not (remote_owner == k).any()
        pairs = torch.stack([part.node_id[own], remote], 1)
        leaving += pairs[direction == 0].tolist()
        arriving += pairs[direction == 1].flip(1).tolist()
    # Both owners know every cut edge, in the same direction.
    assert sorted(leaving) == sorted(arriving)
    assert sorted(kept + leaving) == sorted(graph.edge_index.T.tolist())
    assert not any(part.cross_edges.numel() for part in divide(graph, clients, partition).graphs)


@pytest.mark.parametrize("partition", partitions())
def test_the_partition_depends_only_on_the_seed(partition):
    # These communities are so blurred that the result of Louvain depends on the order of the nodes.
    graph = clubs(inside=0.08, outside=0.02)
    first = assign(graph, 6, partition, seed=3)
    torch.manual_seed(99)
    np.random.seed(99)
    assert torch.equal(first, assign(graph, 6, partition, seed=3))
    if partition in RANDOM:
        assert not torch.equal(first, assign(graph, 6, partition, seed=4))


DIGEST = """
import hashlib
import numpy as np
import torch
from fedloom.data.partition import divide, partitions
from fedloom.data.graph import Graph

rng = np.random.default_rng(0)
edges = torch.from_numpy(rng.integers(300, size=(2, 900)))
x = torch.from_numpy(rng.random((300, 20))).float()
graph = Graph(x=x, edge_index=edges, y=torch.arange(300) % 3, num_classes=3)
for partition in sorted(partitions()):
    graphs = divide(graph, 6, partition, seed=3).graphs
    content = repr([(g.node_id.tolist(), g.train.tolist()) for g in graphs])
    print(partition, hashlib.md5(content.encode()).hexdigest())
"""


@pytest.mark.slow
def test_another_process_with_other_hashes_and_threads_gives_the_same_partition(capsys):
    exec(DIGEST, {})
    here = capsys.readouterr().out
    environment = {**os.environ, "PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "2"}
    there = subprocess.run(
        [sys.executable, "-c", DIGEST], capture_output=True, text=True, check=True, env=environment
    ).stdout
    assert here == there
    assert here.count("\n") == len(partitions())


def test_the_global_random_state_does_not_change():
    torch.manual_seed(1)
    np.random.seed(1)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    for partition in partitions():
        divide(clubs(), 4, partition)
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])


def test_names_and_options():
    names = {
        "louvain",
        "louvain-cyclic",
        "louvain+",
        "metis",
        "metis+",
        "kmeans",
        "random",
        "uniform",
        "blocks",
        "dirichlet",
    }
    assert names == set(partitions())
    assert all(len(text) > 20 and "\n" not in text for text in partitions().values())
    assert partition_settings("louvain") == {"delta": 20, "resolution": 1.0}
    assert partition_settings("louvain+") == {"parts": 100, "delta": 20, "resolution": 1.0}
    assert partition_settings("dirichlet") == {"alpha": 0.5, "min_items": 5}
    assert partition_settings("random") == {}


@pytest.mark.parametrize("partition", [p for p in partitions() if partition_settings(p)])
def test_every_option_has_an_effect(partition):
    graph = clubs(inside=0.08, outside=0.02)
    default = assign(graph, 6, partition)
    too_many = int(torch.bincount(default).min()) + 1
    other = {"delta": 2, "resolution": 4.0, "parts": 30, "alpha": 5.0, "min_items": too_many}
    for name in partition_settings(partition):
        assert not torch.equal(default, assign(graph, 6, partition, **{name: other[name]})), name


# ---- Louvain, balanced and cyclic ----


def literal_balanced(communities, clients, delta):
    """Steps 2 to 4 of balanced Louvain, written with lists as in the paper."""
    n = len(communities)
    groups = [[v for v in range(n) if communities[v] == c] for c in dict.fromkeys(communities)]
    cap = max(n // clients - delta, 1)
    for group in groups:  # the loop appends to the list
        if len(group) > cap:
            groups.append(group[cap:])
            del group[cap:]
    members, still_open, at = [[] for _ in range(clients)], list(range(clients)), 0
    for group in sorted(groups, key=len, reverse=True):
        while len(still_open) > 1 and len(members[still_open[at]]) >= n // clients:
            still_open.pop(at)
            at = at % len(still_open)
        for _ in still_open:
            if len(members[still_open[at]]) + len(group) < n // clients + delta:
                break
            at = (at + 1) % len(still_open)
        else:
            smallest = min(len(members[k]) for k in still_open)
            while len(members[still_open[at]]) > smallest:
                at = (at + 1) % len(still_open)
        members[still_open[at]] += group
    return [next(k for k in range(clients) if v in members[k]) for v in range(n)]


def literal_cyclic(communities, clients, delta):
    """Cut and merge of FedStruct, written with lists."""
    n = len(communities)
    groups = [[v for v in range(n) if communities[v] == c] for c in dict.fromkeys(communities)]
    for group in groups:
        if len(group) > n // clients + delta:
            groups.append(group[n // clients + delta :])
            del group[n // clients + delta :]
    members, at = [[] for _ in range(clients)], 0
    for group in sorted(groups, key=len, reverse=True):
        for _ in range(clients):
            if (
                len(members[at]) < n // clients
                and len(members[at]) + len(group) <= n // clients + delta
            ):
                break
            at = (at + 1) % clients
        else:
            smallest = min(len(m) for m in members)
            while len(members[at]) > smallest:
                at = (at + 1) % clients
        members[at] += group
    return [next(k for k in range(clients) if v in members[k]) for v in range(n)]


@pytest.mark.parametrize(
    ("fast", "literal"),
    [(module._balanced, literal_balanced), (module._balanced_cyclic, literal_cyclic)],
)
@settings(max_examples=80, deadline=None)
@given(
    communities=st.lists(st.integers(0, 8), min_size=8, max_size=120),
    clients=st.integers(1, 8),
    delta=st.integers(0, 9),
)
def test_cut_and_merge_equal_the_literal_algorithm(fast, literal, communities, clients, delta):
    assert fast(np.array(communities), clients, delta).tolist() == literal(
        communities, clients, delta
    )


def test_balanced_louvain_equals_an_example_by_hand():
    # Communities of 7, 5 and 4 nodes, 2 clients: the target is 8, pieces have at most 6 nodes. So
    # there are pieces of 6, 5, 4 and 1.
    communities = np.array([0] * 7 + [1] * 5 + [2] * 4)
    # The 6 goes to client 0. The 5 would reach 8 + 2 there, so it goes to client 1. The 4 also goes
    # to client 1, because 9 < 10. Client 1 is then full, so the 1 goes to client 0.
    assert module._balanced(communities, 2, delta=2).tolist() == [0] * 6 + [0] + [1] * 5 + [1] * 4


@pytest.mark.parametrize("clients", [3, 5, 8])
def test_louvain_sizes_stay_within_the_tolerance(clients):
    # As in Cora, there are communities of all sizes, and many tiny components that fill gaps.
    graph = clubs(
        (220, 160, 130, 110, 90, 70, 60, 50, 40, 30, *[2] * 60), inside=0.2, outside=0.001
    )
    for seed in range(3):
        sizes = torch.bincount(assign(graph, clients, seed=seed))
        assert sizes.max() < 1080 // clients + 20
        assert sizes.min() > 1080 // clients - 40


def test_louvain_finds_communities_as_good_as_networkx():
    drawn = nx.powerlaw_cluster_graph(800, 3, 0.3, seed=5)
    edges = torch.tensor(list(drawn.edges)).T  # only one direction: the partitioner adds the other
    graph = Graph(
        x=torch.ones(800, 1), edge_index=edges, y=torch.zeros(800, dtype=torch.int64), num_classes=1
    )
    theirs = nx.community.modularity(drawn, nx.community.louvain_communities(drawn, seed=0))
    for seed in range(3):
        found = module._communities(graph, seed, 1.0)
        ours = nx.community.modularity(
            drawn, [set(np.flatnonzero(found == c).tolist()) for c in range(found.max() + 1)]
        )
        assert ours > theirs - 0.03


def test_louvain_finds_the_communities_and_a_higher_resolution_finds_more():
    graph = clubs(outside=0.0005)
    found = module._communities(graph, 0, 1.0)
    assert found.tolist() == np.repeat(np.arange(12), 50).tolist()
    assert module._communities(graph, 0, 20.0).max() > 20


def test_isolated_nodes_fill_clients_or_are_one_community():
    base = clubs()
    graph = Graph(
        x=torch.cat([base.x, torch.zeros(30, 4)]),
        edge_index=base.edge_index,
        y=torch.cat([base.y, torch.zeros(30, dtype=torch.int64)]),
        num_classes=4,
    )
    assert module._communities(graph, 0, 1.0)[600:].tolist() == list(range(12, 42))
    assert len(set(assign(graph, 4, "louvain-cyclic")[600:].tolist())) == 1
    assert len(set(assign(graph, 4, "louvain")[600:].tolist())) > 1


# ---- other partitions ----


def test_structural_partitions_keep_more_edges_than_random_ones():
    graph = clubs()
    at_random = cut(graph, assign(graph, 6, "random"))
    for partition in ("metis", "louvain", "louvain-cyclic"):
        assert cut(graph, assign(graph, 6, partition)) < at_random / 2, partition
    sizes = torch.bincount(assign(graph, 6, "metis"))
    assert sizes.max() - sizes.min() < 20


def test_label_imbalance_variants_are_more_skewed():
    graph = clubs()

    def mean(partition, **options):
        return np.mean(
            [skew(graph, assign(graph, 4, partition, seed, **options)) for seed in range(3)]
        )

    assert mean("louvain+", parts=0) > mean("louvain") + 0.2
    assert mean("louvain+", parts=24, delta=2) > mean("louvain") + 0.2
    assert mean("metis+", parts=24) > mean("metis") + 0.2


def test_label_clusters_that_stay_empty_get_whole_parts():
    # There are two classes and each part has one class: 2 distinct histograms for 4 clients.
    edges = torch.combinations(torch.arange(10)).T
    edges = torch.cat([edges + 10 * c for c in range(8)], 1)
    graph = Graph(
        x=torch.ones(80, 1),
        edge_index=torch.cat([edges, edges.flip(0)], 1),
        y=torch.arange(8).repeat_interleave(10) % 2,
        num_classes=2,
    )
    owner = assign(graph, 4, "louvain+", parts=0)
    assert torch.bincount(owner).tolist() == [20] * 4
    assert cut(graph, owner) == 0
    assert skew(graph, owner) == pytest.approx(0.5)


def test_kmeans_uses_the_features():
    graph = clubs()
    assert (
        skew(graph, assign(graph, 4, "kmeans", delta=100))
        > skew(graph, assign(graph, 4, "random")) + 0.3
    )
    assert torch.bincount(assign(graph, 4, "kmeans")).max() <= 600 // 4 + 20
    sparse = Graph(
        x=torch.cat([graph.x, torch.zeros(600, 60)], 1),
        edge_index=graph.edge_index,
        y=graph.y,
        num_classes=4,
    )
    assert sparse.sparse_x is not None
    assert torch.equal(assign(graph, 4, "kmeans"), assign(sparse, 4, "kmeans"))


def test_kmeans_on_equal_features_leaves_no_client_empty():
    graph = clubs()
    alike = Graph(x=torch.ones(600, 3), edge_index=graph.edge_index, y=graph.y, num_classes=4)
    assert torch.bincount(assign(alike, 6, "kmeans")).min() > 0


def test_blocks_are_shares_in_the_stored_order():
    assert assign(clubs(), 12, "blocks").equal(torch.arange(12).repeat_interleave(50))
    assert torch.bincount(assign(clubs((10, 11)), 4, "blocks")).tolist() == [6, 5, 5, 5]
    assert (assign(small_graphs(5), 2, "blocks")).tolist() == [0, 0, 0, 1, 1]


FIELDS = (
    "x",
    "edge_index",
    "y",
    "train",
    "val",
    "test",
    "edge_weight",
    "node_id",
    "cross_edges",
    "batch",
)


@given(graph=graphs(), clients=st.integers(1, 6), weighted=st.booleans(), chunked=st.booleans())
def test_cutting_in_one_pass_equals_selecting_client_by_client(graph, clients, weighted, chunked):
    rng = torch.Generator().manual_seed(graph.num_edges)
    if weighted:
        graph = replace(graph, edge_weight=torch.rand(graph.num_edges, generator=rng))
    owner = torch.randint(clients, (graph.num_items,), generator=rng)
    with in_blocks(7 if chunked else module.BLOCK):
        parts = module.cut(graph, owner, clients)
    for k, part in enumerate(parts):
        assert all(
            _alike(getattr(part, key), getattr(graph.select_items(owner == k), key))
            for key in FIELDS
        )


@given(graph=graphs(), clients=st.integers(1, 6), block=st.sampled_from([3, 7, module.BLOCK]))
def test_cross_edges_equal_a_selection_client_by_client(graph, clients, block):
    graph = replace(graph, node_id=torch.arange(graph.num_nodes) * 3)
    rng = torch.Generator().manual_seed(graph.num_edges)
    owner = torch.randint(clients, (graph.num_nodes,), generator=rng)
    with in_blocks(block):
        found = module._cross_edges(graph, owner, clients)
    position = torch.empty_like(owner)
    for k in range(clients):
        position[owner == k] = torch.arange(int((owner == k).sum()))
    for k in range(clients):
        rows = []
        for way, (mine, other) in enumerate((graph.edge_index, graph.edge_index.flip(0))):
            crossing = (owner[mine] == k) & (owner[other] != k)
            mine, other = mine[crossing], other[crossing]
            columns = [position[mine], 3 * other, owner[other], torch.full_like(mine, way)]
            rows.append(torch.stack(columns))
        assert torch.equal(found[k], torch.cat(rows, 1))


@contextmanager
def in_blocks(length):
    """Makes passes over edges work in blocks of this length, for any number of clients."""
    with mock.patch.object(module, "BLOCK", length), mock.patch.object(module, "_PIECE", 1):
        yield


def test_cutting_graph_level_datasets():
    graph, owner = small_graphs(7), torch.tensor([1, 0, 2, 1, 1, 0, 2])
    for k, part in enumerate(module.cut(graph, owner, 3)):
        assert all(
            _alike(getattr(part, key), getattr(graph.select_items(owner == k), key))
            for key in FIELDS
        )


def _alike(one, other):
    return (
        one is other
        if one is None or other is None
        else one.dtype == other.dtype and torch.equal(one, other)
    )


def test_random_and_uniform():
    graph = clubs()
    sizes = torch.bincount(assign(graph, 7, "random"))
    assert len(set(sizes.tolist())) > 2
    assert ((sizes - 600 / 7).abs() < 5 * (600 / 7) ** 0.5).all()
    sizes = torch.bincount(assign(graph, 7, "uniform"))
    assert sizes.max() - sizes.min() == 1


@pytest.mark.parametrize("graph", [clubs(), small_graphs()], ids=["nodes", "graphs"])
def test_dirichlet_skew_falls_with_alpha_and_all_clients_have_min_items(graph):
    def mean(alpha):
        owners = [assign(graph, 4, "dirichlet", seed, alpha=alpha) for seed in range(8)]
        assert all(torch.bincount(owner).min() >= 5 for owner in owners)
        return np.mean([skew(graph, owner) for owner in owners])

    skews = [mean(alpha) for alpha in (0.1, 0.5, 2.0, 100.0)]
    assert skews == sorted(skews, reverse=True)
    assert skews[0] > 2 * skews[-1]


def test_dirichlet_gives_nothing_more_to_full_clients():
    # With a small alpha, a client takes a whole class. It then has more than n/K items and gets no
    # further ones.
    graph = small_graphs(classes=4)
    for seed in range(5):
        owner = assign(graph, 4, "dirichlet", seed, alpha=0.01, min_items=1)
        for k in range(4):
            total, counts = 0, torch.bincount(graph.y[owner == k], minlength=4).tolist()
            for count in counts:
                assert count <= 1 or total <= 30
                total += count


def test_empty_clients_get_half_of_the_largest_client():
    assert module._fill_empty(np.array([1, 1, 1, 1, 1, 3]), 4).tolist() == [1, 1, 2, 0, 0, 3]


# ---- divide ----


def test_the_whole_graph_has_the_masks_of_the_clients():
    graph = clubs()
    federation = divide(graph, 5)
    whole = federation.whole
    for part in federation.graphs:
        for mask in ("train", "val", "test"):
            assert torch.equal(getattr(whole, mask)[part.node_id], getattr(part, mask))
    assert torch.equal(whole.edge_index, graph.edge_index)
    assert (
        federation.merged().graphs[0].train.sum()
        == sum(part.train.sum() for part in federation.graphs)
        > 0
    )


def test_pyg_and_networkx_objects_are_converted():
    data = Data(
        x=torch.eye(6),
        edge_index=torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2]]),
        y=torch.tensor([0, 1, 0, 1, 0, 1]),
    )
    club = nx.path_graph(6)
    for person in club:
        club.nodes[person].update(x=[1.0, float(person)], y=person % 2)
    for thing in (data, club):
        federation = divide(thing, 2, "uniform", split="40/20/40")
        assert [graph.num_nodes for graph in federation.graphs] == [3, 3]
    with pytest.raises(DataError, match="x is missing"):
        divide("cora", 2)


def test_about_records_the_arguments():
    federation = divide(
        clubs(), 5, "louvain", 7, inductive=True, options={"delta": 10}, split="60/20/20"
    )
    about = dict(federation.about)
    kept, lost = about.pop("edges_kept"), about.pop("edges_cut")
    assert kept + lost == clubs().num_edges // 2
    assert kept == sum(part.num_edges for part in federation.graphs) // 2
    assert federation.inductive
    assert about == {
        "dataset": "clubs",
        "partition": "louvain",
        "clients": 5,
        "options": {"delta": 10, "resolution": 1.0},
        "seed": 7,
        "split": "60/20/20",
        "split_seed": 7,
        "cross_edges": "none",
        "inductive": True,
    }
    # Training would see the cut edges of held-out nodes.
    with pytest.raises(ConfigError, match="inductive"):
        divide(clubs(), 5, "louvain", 7, cross_edges="known", inductive=True)


def test_split_seed_changes_only_the_split():
    one, other = divide(clubs(), 5, seed=1), divide(clubs(), 5, seed=1, split_seed=2)
    pairs = list(zip(one.graphs, other.graphs, strict=True))
    assert all(torch.equal(a.node_id, b.node_id) for a, b in pairs)
    assert not any(torch.equal(a.train, b.train) for a, b in pairs)


def test_edge_weights_and_node_ids_are_partitioned():
    graph = clubs()
    weight = torch.arange(graph.num_edges).float()
    numbered = Graph(
        x=graph.x,
        edge_index=graph.edge_index,
        y=graph.y,
        num_classes=4,
        edge_weight=weight,
        node_id=torch.arange(600) + 1000,
    )
    federation = divide(numbered, 3, cross_edges="known")
    for part in federation.graphs:
        ends = graph.edge_index[:, part.edge_weight.long()] + 1000
        assert torch.equal(ends, part.node_id[part.edge_index])
        assert part.cross_edges[1].min() >= 1000


def test_a_federation_of_a_graph_level_dataset():
    graph = small_graphs()
    federation = divide(graph, 4, "uniform", split="80/10/10")
    assert [part.num_items for part in federation.graphs] == [30] * 4
    assert all(part.num_nodes == 90 and part.num_edges == 120 for part in federation.graphs)
    assert federation.about["edges_cut"] == 0
    assert sorted(torch.cat([part.node_id for part in federation.graphs]).tolist()) == list(
        range(360)
    )


def test_one_client_gets_all_data():
    graph = clubs()
    for partition in partitions():
        (part,) = divide(graph, 1, partition).graphs
        assert torch.equal(part.edge_index, graph.edge_index), partition


# ---- errors ----


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"clients": 0},
            "clients must be a whole number from 1 to 600 (the items of 'clubs'), got 0",
        ),
        ({"clients": -3}, "from 1 to 600 (the items of 'clubs'), got -3"),
        ({"clients": 601}, "from 1 to 600 (the items of 'clubs'), got 601"),
        ({"clients": 2.0}, "got 2.0"),
        ({"clients": True}, "got True"),
        ({"clients": "5"}, "got '5'"),
        (
            {"partition": "luvain"},
            "unknown partition 'luvain'. Did you mean 'louvain'? "
            "Valid: blocks, dirichlet, kmeans, louvain,",
        ),
        (
            {"options": {"detla": 3}},
            "unknown option of partition 'louvain' 'detla'. Did you mean 'delta'? "
            "Valid: delta, resolution",
        ),
        (
            {"partition": "random", "options": {"delta": 3}},
            "partition 'random' has no options, got 'delta'",
        ),
        (
            {"options": {"delta": -1}},
            "partition 'louvain': delta must be a whole number, 0 or more, got -1",
        ),
        ({"options": {"delta": 2.5}}, "delta must be a whole number, 0 or more, got 2.5"),
        ({"options": {"resolution": 0}}, "resolution must be a number, 1e-06 or more, got 0"),
        (
            {"options": {"resolution": float("nan")}},
            "resolution must be a number, 1e-06 or more, got nan",
        ),
        (
            {"partition": "metis+", "options": {"parts": 0}},
            "parts must be a whole number, 1 or more, got 0",
        ),
        (
            {"partition": "metis+", "options": {"parts": 3}},
            "clients is 5, but there are only 3 parts to make them of; raise parts",
        ),
        (
            {"partition": "louvain+", "clients": 50, "options": {"parts": 0}},
            "clients is 50, but there are only",
        ),
        (
            {"partition": "dirichlet", "options": {"alpha": 0.0}},
            "alpha must be a number, 0.001 or more, got 0.0",
        ),
        (
            {"partition": "dirichlet", "options": {"alpha": "0.5"}},
            "alpha must be a number, 0.001 or more, got '0.5'",
        ),
        (
            {"partition": "dirichlet", "options": {"min_items": 121}},
            "in 100 draws some client always got fewer than min_items = 121 of 600 items; "
            "raise alpha (now 0.5), or lower min_items",
        ),
        ({"cross_edges": "all"}, "unknown cross_edges 'all'. Valid: known, none"),
        ({"split": "20/40"}, "split '20/40': must be train/val/test percentages that sum to 100"),
    ],
)
def test_errors_name_the_field_and_the_valid_values(arguments, text):
    with pytest.raises(ConfigError, match=re.escape(text)) as caught:
        divide(clubs(), **{"clients": 5, **arguments})
    assert "\n" not in str(caught.value)


def test_graph_level_tasks_refuse_partitions_of_nodes():
    with pytest.raises(
        ConfigError, match=r"'paths' is a set of graphs\. Valid: blocks, dirichlet, random, uniform"
    ):
        assign(small_graphs(), 4, "louvain")
    with pytest.raises(ConfigError, match="cross_edges 'known': 'paths' is a set of graphs"):
        divide(small_graphs(), 4, "uniform", cross_edges="known")


def test_divide_takes_the_options_that_assign_takes():
    assert (
        list(inspect.signature(assign).parameters)[:4]
        == list(inspect.signature(divide).parameters)[:4]
    )


# ---- Cora ----


def test_cora():
    graph = cora()
    sizes = torch.bincount(assign(graph, 10))
    assert sizes.max() < 290
    assert sizes.min() > 200
    assert cut(graph, assign(graph, 10)) < 0.25 * graph.num_edges
    assert cut(graph, assign(graph, 10, "metis")) < 0.15 * graph.num_edges
    # O-pFGL composes 100 parts of Cora from pieces of 7 nodes. OpenFGL's raw communities are far
    # purer.
    assert (
        skew(graph, assign(graph, 10, "louvain+", parts=0))
        > skew(graph, assign(graph, 10, "louvain+")) + 0.1
    )
