"""Partitions: which client holds which item of a graph that was whole.

A partitioner is a plain function `(graph, clients, seed, **options)` that gives the client number of every item (a node, or a
graph in graph-level tasks) as an integer array. Adding one = writing it here under `@partitioner(name)`: its description, its
options, their defaults and least values are read from the function.

Partitioners are devices to simulate a federation, so they may look at everything, the labels of test items included. None
uses edge weights, and edges count as undirected.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, get_args, get_type_hints

import numpy as np
import numpy.typing as npt
import torch
from scipy.sparse import csr_matrix
from torch import Tensor

from fedloom.data.federation import Federation
from fedloom.data.files import as_graph
from fedloom.data.graph import Graph
from fedloom.data.seeds import stream_seed
from fedloom.data.split import DEFAULT_SPLIT, apply_split, check_split, order_by_owner
from fedloom.data.statistics import count_edges, is_undirected
from fedloom.errors import ConfigError, unknown

Numbers = npt.NDArray[np.int64]
Partitioner = Callable[..., Numbers]
Fill = Callable[[list[int], int, int, int], list[int]]
CrossEdges = Literal["none", "known"]
# An option's type with its least value.
FromZero = Annotated[int, 0]
FromOne = Annotated[int, 1]
Resolution = Annotated[float, 1e-6]
Alpha = Annotated[float, 1e-3]  # Dirichlet draws underflow below

_PARTITIONERS: dict[str, Partitioner] = {}
_FOR_GRAPHS: set[str] = set()  # those that need no edges between the items
_REDRAWS = 100
_CHUNK = (
    2**22
)  # edges looked at at a time: what is made of them on the way stays small beside the graph


def partitioner(name: str, *, graphs: bool = False) -> Callable[[Partitioner], Partitioner]:
    """Decorator: makes a function a partitioner of that name; graphs = it can share out whole graphs, too."""

    def enter(function: Partitioner) -> Partitioner:
        _PARTITIONERS[name] = function
        if graphs:
            _FOR_GRAPHS.add(name)
        return function

    return enter


# ---- what others call ----


def partitions() -> dict[str, str]:
    """Every partition's name with a one-line description."""
    return {
        name: (inspect.getdoc(function) or "").partition("\n")[0]
        for name, function in _PARTITIONERS.items()
    }


def partition_settings(name: str) -> dict[str, Any]:
    """The options of a partition with their defaults."""
    if name not in _PARTITIONERS:
        raise unknown("partition", name, _PARTITIONERS)
    parameters = inspect.signature(_PARTITIONERS[name]).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def assign(
    graph: Graph, clients: int, partition: str = "louvain", seed: int = 0, **options: Any
) -> Tensor:
    """Gives the client number (0 to clients - 1) of every item, [items] int64; every client gets at least one.

    The same arguments give the same numbers, whatever the global random state. Where a partitioner leaves a client with nothing
    (few items, k-means clusters that stayed empty), the largest client gives it the latter half of its items.
    """
    settings = _settings(partition, options)
    if graph.task == "graph" and partition not in _FOR_GRAPHS:
        raise ConfigError(
            f"partition {partition!r} cuts one graph along its nodes, but {graph.name!r} is a set of graphs. "
            f"Valid: {', '.join(sorted(_FOR_GRAPHS))}"
        )
    if not _is_whole(clients) or not 1 <= clients <= graph.num_items:
        raise ConfigError(
            f"clients must be a whole number from 1 to {graph.num_items} (the items of {graph.name!r}), got {clients!r}"
        )
    return torch.from_numpy(
        _fill_empty(_PARTITIONERS[partition](graph, clients, seed, **settings), clients)
    )


def cut(graph: Graph, owner: Tensor, clients: int) -> list[Graph]:
    """Each client's part: its items in their order, with the edges among them. One pass over the edges, however many clients.

    owner: client number of every item, as `assign` gives it. The parts are named after the graph, "cora/0", "cora/1", ...
    """
    items, place = _numbered(owner, clients)
    holder, nodes, position = owner, items, place
    if graph.batch is not None:
        holder = owner[graph.batch]
        nodes, position = _numbered(holder, clients)
    weight = graph.edge_weight
    edges = [[graph.edge_index[:, :0]] for _ in range(clients)]
    weights = [[] if weight is None else [weight[:0]] for _ in range(clients)]
    narrow = _narrow(holder, clients)
    for start in range(0, graph.num_edges, _CHUNK):
        ends = graph.edge_index[:, start : start + _CHUNK]
        here, there = narrow.take(ends.numpy())
        inside = np.flatnonzero(here == there)
        order, counts = _grouped(here[inside], clients)
        kept = torch.from_numpy(inside[order])
        _deal(edges, position.take(ends[:, kept]), counts)
        if weight is not None:
            _deal(weights, weight[start : start + _CHUNK][kept], counts)
    return [
        replace(
            graph, x=graph.x[nodes[k]], edge_index=torch.cat(edges[k], 1), edge_weight=None if weight is None else torch.cat(weights[k]),
            y=graph.y[items[k]], train=graph.train[items[k]], val=graph.val[items[k]], test=graph.test[items[k]],
            node_id=graph.node_id[nodes[k]], cross_edges=graph.cross_edges[:, :0],
            batch=None if graph.batch is None else place[graph.batch[nodes[k]]], name=f"{graph.name}/{k}",
        )
        for k in range(clients)
    ]  # fmt: skip


def divide(
    graph: Graph | Any,
    clients: int,
    partition: str = "louvain",
    seed: int = 0,
    *,
    cross_edges: CrossEdges = "none",
    split: str = DEFAULT_SPLIT,
    split_seed: int | None = None,
    inductive: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Federation:
    """Shares a graph out among clients: assigns its items, splits them, and gives each client its induced subgraph.

    graph: a Graph, or a PyG or networkx object that `files.as_graph` makes one.
    cross_edges: "none" = an edge between two clients is lost; "known" = both of its owners have it in `Graph.cross_edges`.
    split: see `fedloom.data.split`; split_seed: None = seed. options: the partition's own. Federation.whole is the
    uncut graph with the clients' masks, so that `central` trains and tests on exactly the union of the clients' items.
    """
    graph = as_graph(graph)
    if cross_edges not in ("none", "known"):
        raise unknown("cross_edges", str(cross_edges), ("none", "known"))
    if cross_edges == "known" and graph.task == "graph":
        raise ConfigError(
            f"cross_edges 'known': {graph.name!r} is a set of graphs, no partition cuts its edges; use 'none'"
        )
    if cross_edges == "known" and inductive:
        raise ConfigError(
            "cross_edges 'known' and inductive: training would see the cut edges of held-out nodes; choose one of the two"
        )
    check_split(split)  # before the partition, which may take seconds
    split_seed = seed if split_seed is None else split_seed
    owner = assign(graph, clients, partition, seed, **(options or {}))
    whole = apply_split(graph, split, split_seed, owner=owner)
    graphs = cut(whole, owner, clients)
    if cross_edges == "known":
        graphs = [
            replace(g, cross_edges=c)
            for g, c in zip(graphs, _cross_edges(graph, owner, clients), strict=True)
        ]
    undirected = is_undirected(graph)
    kept = sum(count_edges(g.edge_index, undirected) for g in graphs)
    about = {
        "dataset": graph.name, "partition": partition, "clients": clients, "options": _settings(partition, options or {}),
        "seed": seed, "split": split, "split_seed": split_seed, "cross_edges": cross_edges, "inductive": inductive,
        "edges_kept": kept, "edges_cut": count_edges(graph.edge_index, undirected) - kept,
    }  # fmt: skip
    return Federation(tuple(graphs), whole=whole, inductive=inductive, about=about).check()


# ---- partitioners ----


@partitioner("louvain")
def _louvain(
    graph: Graph, clients: int, seed: int, *, delta: FromZero = 20, resolution: Resolution = 1.0
) -> Numbers:
    """Balanced Louvain: communities cut to n/K - delta nodes fill the clients one after another (FedPG, FedGKC, FedGH)."""
    return _balanced(_communities(graph, seed, resolution), clients, delta)


@partitioner("louvain-cyclic")
def _louvain_cyclic(
    graph: Graph, clients: int, seed: int, *, delta: FromZero = 20, resolution: Resolution = 1.0
) -> Numbers:
    """FedStruct's Louvain: isolated nodes are one community, communities cut to n/K + delta nodes, next client with room."""
    communities = _communities(graph, seed, resolution)
    isolated = np.diff(_adjacency(graph).indptr) == 0
    communities[isolated] = len(communities)  # a number that no community has
    return _levelled(communities, clients, delta)


@partitioner("louvain+")
def _louvain_plus(
    graph: Graph,
    clients: int,
    seed: int,
    *,
    parts: FromZero = 100,
    delta: FromZero = 20,
    resolution: Resolution = 1.0,
) -> Numbers:
    """Label imbalance: balanced-Louvain parts (O-pFGL; parts = 0: raw communities, OpenFGL), k-means on their label shares."""
    communities = _communities(graph, seed, resolution)
    if parts:
        communities = _balanced(communities, min(parts, len(communities)), delta)
    return _by_labels(graph, communities, clients, seed)


@partitioner("metis")
def _metis(graph: Graph, clients: int, seed: int) -> Numbers:
    """Metis: equal shares with few edges between them."""
    return _metis_parts(graph, clients, seed)


@partitioner("metis+")
def _metis_plus(graph: Graph, clients: int, seed: int, *, parts: FromOne = 100) -> Numbers:
    """Label imbalance: many Metis parts, k-means on their label shares, a client is the union of a cluster."""
    return _by_labels(graph, _metis_parts(graph, min(parts, graph.num_nodes), seed), clients, seed)


@partitioner("kmeans")
def _kmeans_features(graph: Graph, clients: int, seed: int, *, delta: FromZero = 20) -> Numbers:
    """k-means on the node features, clusters cut and merged as in louvain-cyclic (FedStruct)."""
    sparse = graph.sparse_x
    if sparse is None:
        points: Any = graph.x.numpy()
    else:
        points = csr_matrix(
            (sparse.values.numpy(), sparse.indices.numpy(), sparse.offsets.numpy()),
            shape=sparse.shape,
        )
    return _levelled(_kmeans(points, clients, seed, starts=1), clients, delta)


@partitioner("random", graphs=True)
def _random(graph: Graph, clients: int, seed: int) -> Numbers:
    """Every item goes to a client drawn uniformly, independently of the others."""
    return _rng(seed).integers(clients, size=graph.num_items)


@partitioner("uniform", graphs=True)
def _uniform(graph: Graph, clients: int, seed: int) -> Numbers:
    """Shuffled equal shares: sizes differ by one at most."""
    return _rng(seed).permutation(graph.num_items) % clients


@partitioner("blocks", graphs=True)
def _blocks(graph: Graph, clients: int, seed: int) -> Numbers:
    """Equal shares of the items in the order they are stored in; for graphs that lie one after another (synthetic:blocks=...)."""
    return np.arange(graph.num_items) * clients // graph.num_items


@partitioner("dirichlet", graphs=True)
def _dirichlet(
    graph: Graph, clients: int, seed: int, *, alpha: Alpha = 0.5, min_items: FromOne = 5
) -> Numbers:
    """Label skew: each class is shared out by Dirichlet(alpha) over the clients that hold n/K items or fewer."""
    y, n, rng = graph.y.numpy(), graph.num_items, _rng(seed)
    for _ in range(_REDRAWS):
        owner = np.empty(n, dtype=np.int64)
        held = np.zeros(clients, dtype=np.int64)
        for label in np.unique(y):  # items without a label are shared out like one more class
            items = rng.permutation(np.flatnonzero(y == label))
            share = np.where(held > n / clients, 0.0, rng.dirichlet(np.full(clients, alpha)))
            if not share.sum() > 0:  # a small alpha put everything on clients that are full already
                held[:] = 0
                break
            ends = (np.cumsum(share / share.sum()) * len(items)).astype(np.int64)
            ends[-1] = len(items)
            counts = np.diff(ends, prepend=0)
            owner[items] = np.repeat(np.arange(clients), counts)
            held += counts
        if held.min() >= min_items:
            return owner
    raise ConfigError(
        f"partition 'dirichlet': in {_REDRAWS} draws some client always got fewer than min_items = {min_items} of {n} items; "
        f"raise alpha (now {alpha:g}), or lower min_items or clients (now {clients})"
    )


# ---- their parts ----


def _rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(stream_seed(seed, "partition"))


def _small_seed(seed: int) -> int:
    """For libraries that take 31 bits."""
    return stream_seed(seed, "partition") % 2**31


def _adjacency(graph: Graph) -> csr_matrix:
    """The 0/1 adjacency, symmetric, without self-loops."""
    source, target = graph.edge_index[:, graph.edge_index[0] != graph.edge_index[1]].numpy()
    adjacency = csr_matrix(
        (np.ones(len(source), dtype=np.float32), (source, target)), shape=(graph.num_nodes,) * 2
    )
    turned = adjacency.T.tocsr()
    if not (
        np.array_equal(adjacency.indptr, turned.indptr)
        and np.array_equal(adjacency.indices, turned.indices)
    ):
        adjacency += turned  # some edges have one direction only
    adjacency.data[:] = 1  # repeated edges were added up
    return adjacency


def _communities(graph: Graph, seed: int, resolution: float) -> Numbers:
    """Louvain's community of every node; isolated nodes are communities of one."""
    from sknetwork.clustering import Louvain  # takes half a second to import

    adjacency = _adjacency(graph)
    if adjacency.nnz == 0:
        return np.arange(graph.num_nodes)
    louvain = Louvain(
        resolution=resolution, modularity="newman", tol_optimization=1e-4, tol_aggregation=1e-4,
        shuffle_nodes=True, return_probs=False, return_aggregate=False, random_state=_small_seed(seed),
    )  # fmt: skip
    return _in_order(louvain.fit_predict(adjacency))


def _metis_parts(graph: Graph, parts: int, seed: int) -> Numbers:
    """The Metis part of every node."""
    import pymetis

    adjacency = _adjacency(graph)
    edges = pymetis.CSRAdjacency(
        adjacency.indptr.astype(np.int64), adjacency.indices.astype(np.int64)
    )
    _, part = pymetis.part_graph(parts, edges, options=pymetis.Options(seed=_small_seed(seed)))
    return _fill_empty(
        np.asarray(part, dtype=np.int64), parts
    )  # Metis leaves parts empty where they have few nodes


def _kmeans(points: Any, clusters: int, seed: int, starts: int = 10) -> Numbers:
    """The cluster of every row; fewer clusters than asked for where rows are alike."""
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning
    from threadpoolctl import threadpool_limits

    # Threads add up the centres in the order in which they finish: one thread, so that a seed gives the same clusters always.
    with warnings.catch_warnings(), threadpool_limits(1):
        warnings.simplefilter("ignore", ConvergenceWarning)  # it warns of clusters that stay empty
        found = KMeans(clusters, n_init=starts, random_state=_small_seed(seed)).fit_predict(points)
    return found.astype(np.int64)


def _in_order(groups: Numbers) -> Numbers:
    """The same groups numbered 0, 1, ... by their first member."""
    _, first, number = np.unique(groups, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[number]


def _by_labels(graph: Graph, groups: Numbers, clients: int, seed: int) -> Numbers:
    """A client is the union of the groups in one k-means cluster of label histograms (each normalised to sum 1)."""
    groups, y, classes = _in_order(groups), graph.y.numpy(), graph.num_classes
    num_groups = int(groups.max()) + 1
    if num_groups < clients:
        raise ConfigError(
            f"clients is {clients}, but there are only {num_groups} parts to make them of; raise parts, or the resolution of Louvain"
        )
    known = y >= 0
    counts = np.bincount(
        groups[known] * classes + y[known], minlength=num_groups * classes
    ).reshape(num_groups, classes)
    histograms = counts / counts.sum(1, keepdims=True).clip(min=1)
    return _fill_empty(_kmeans(histograms, clients, seed), clients)[groups]


def _balanced(communities: Numbers, clients: int, delta: int) -> Numbers:
    """Balanced Louvain from its communities on: cut to n/K - delta, sort, fill first."""
    target = len(communities) // clients
    return _pack(communities, max(target - delta, 1), _fill_first, clients, target, delta)


def _levelled(communities: Numbers, clients: int, delta: int) -> Numbers:
    """FedStruct's cut and merge: cut to n/K + delta, sort, next client with room."""
    target = len(communities) // clients
    return _pack(communities, target + delta, _fill_cyclic, clients, target, delta)


def _pack(
    groups: Numbers, longest: int, fill: Fill, clients: int, target: int, delta: int
) -> Numbers:
    """Cuts groups into pieces of at most `longest` members and lets `fill` give them to clients, the largest first."""
    groups = _in_order(groups)
    order = np.argsort(groups, kind="stable")
    size = np.bincount(groups)
    rank = np.empty_like(groups)
    rank[order] = np.arange(len(groups)) - np.repeat(np.cumsum(size) - size, size)
    # A cut leaves the first members in place and appends the rest to the list of groups: first pieces come before second ones.
    # It matters: pieces of equal length, which Louvain+ has plenty of, go to clients in this order.
    _, piece = np.unique(rank // longest * len(size) + groups, return_inverse=True)
    length = np.bincount(piece)
    by_length = np.argsort(-length, kind="stable")
    owner = np.empty(len(length), dtype=np.int64)
    owner[by_length] = fill(length[by_length].tolist(), clients, target, delta)
    return owner[piece]


def _fill_first(lengths: list[int], clients: int, target: int, delta: int) -> list[int]:
    """The client of each piece: one client until it holds `target`, stepping past it where a piece would reach target + delta.

    A piece that fits nobody goes to the smallest client that is still open.
    """
    held, open_, at, owner = [0] * clients, list(range(clients)), 0, []
    for length in lengths:
        while len(open_) > 1 and held[open_[at]] >= target:
            del open_[at]
            at %= len(open_)
        turns = (*range(at, len(open_)), *range(at))
        fitting = [k for k in turns if held[open_[k]] + length < target + delta]
        at = fitting[0] if fitting else min(turns, key=lambda k: held[open_[k]])
        held[open_[at]] += length
        owner.append(open_[at])
    return owner


def _fill_cyclic(lengths: list[int], clients: int, target: int, delta: int) -> list[int]:
    """The client of each piece: from the last one served on, the next below `target` that stays within target + delta.

    A piece that fits nobody goes to the smallest client.
    """
    held, at, owner = [0] * clients, 0, []
    for length in lengths:
        turns = (*range(at, clients), *range(at))
        fitting = [k for k in turns if held[k] < target and held[k] + length <= target + delta]
        at = fitting[0] if fitting else min(turns, key=lambda k: held[k])
        held[at] += length
        owner.append(at)
    return owner


def _fill_empty(owner: Numbers, clients: int) -> Numbers:
    """While a client has nothing, the largest client gives it the latter half of its items."""
    owner = owner.copy()
    held = np.bincount(owner, minlength=clients)
    for empty in np.flatnonzero(held == 0):
        largest = int(np.argmax(held))
        given = np.flatnonzero(owner == largest)[(held[largest] + 1) // 2 :]
        owner[given] = empty
        held[largest] -= len(given)
        held[empty] = len(given)
    return owner


def _narrow(owner: Tensor, clients: int) -> npt.NDArray[Any]:
    """Client numbers in as few bytes as they need: looked up edge by edge, they should stay in the processor's cache."""
    return owner.numpy().astype(np.min_scalar_type(clients))


def _grouped(owner: npt.NDArray[Any], clients: int) -> tuple[Numbers, list[int]]:
    """The order that puts entries of one owner together, each owner's in the order given, and how many every owner has."""
    return order_by_owner(owner, clients), np.bincount(owner, minlength=clients).tolist()


def _numbered(owner: Tensor, clients: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """The members of every client in their order, and everybody's number among its client's."""
    order, counts = _grouped(owner.numpy(), clients)
    number = np.empty_like(order)
    number[order] = np.concatenate([np.arange(count) for count in counts])
    return torch.from_numpy(order).split(counts), torch.from_numpy(number)


def _deal(piles: list[list[Tensor]], columns: Tensor, counts: list[int]) -> None:
    """Puts each client's share of the columns, which lie one client after another, on its pile."""
    for pile, share in zip(piles, columns.split(counts, -1), strict=True):
        pile.append(share)


def _cross_edges(graph: Graph, owner: Tensor, clients: int) -> list[Tensor]:
    """Per client the cut edges it has an end of, [4, cut], as `Graph.cross_edges` describes them."""
    narrow, (_, local) = _narrow(owner, clients), _numbered(owner, clients)
    # Each client's outgoing edges come before its incoming ones.
    piles: tuple[list[list[Tensor]], ...] = tuple(
        [[graph.cross_edges[:, :0]] for _ in range(clients)] for _ in range(2)
    )
    for start in range(0, graph.num_edges, _CHUNK):
        ends = graph.edge_index[:, start : start + _CHUNK]
        here, there = narrow.take(ends.numpy())
        ends = ends[:, torch.from_numpy(here != there)]
        for incoming, (mine, other) in enumerate((ends, ends.flip(0))):
            order, counts = _grouped(narrow.take(mine.numpy()), clients)
            mine, other = mine[order], other[order]
            rows = torch.stack(
                [local[mine], graph.node_id[other], owner[other], torch.full_like(mine, incoming)]
            )
            _deal(piles[incoming], rows, counts)
    return [torch.cat(outgoing + incoming, 1) for outgoing, incoming in zip(*piles, strict=True)]


# ---- options ----


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _settings(partition: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a partition, the given ones checked and the others at their defaults."""
    settings = partition_settings(partition)
    hints = get_type_hints(_PARTITIONERS[partition], include_extras=True)
    for name, value in options.items():
        if not settings:
            raise ConfigError(f"partition {partition!r} has no options, got {name!r}")
        if name not in settings:
            raise unknown(f"option of partition {partition!r}", name, settings)
        kind, least = get_args(hints[name])
        number = _is_whole(value) or (
            kind is float and isinstance(value, float) and math.isfinite(value)
        )
        if not number or value < least:
            what = "whole number" if kind is int else "number"
            raise ConfigError(
                f"partition {partition!r}: {name} must be a {what}, {least:g} or more, got {value!r}"
            )
    return {**settings, **options}
