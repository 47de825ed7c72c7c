"""Partitions: how the items of a graph are assigned to clients.

A partitioner is a function `(graph, clients, seed, **options)` that returns the client number of
every item as an integer array. An item is a node, or a graph in graph-level tasks. To add a
partitioner, write it here under `@partitioner(name)`. Its description, its options, their defaults
and least values are read from the function.

Partitioners simulate a federation, so they may use all data, including the labels of test items.
None of them uses edge weights. All of them treat edges as undirected.
"""

from __future__ import annotations

import inspect
import math
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal, get_args, get_type_hints

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedloom.data.federation import Federation
from fedloom.data.files import as_graph
from fedloom.data.graph import Graph
from fedloom.data.neighbours import BLOCK, adjacency, index_type, is_undirected
from fedloom.data.seeds import stream_seed
from fedloom.data.split import DEFAULT_SPLIT, apply_split, check_split, order_by_owner
from fedloom.data.statistics import count_edges
from fedloom.errors import ConfigError, unknown

Numbers = npt.NDArray[np.int64]
Owners = npt.NDArray[np.unsignedinteger[Any]]  # client numbers in a small type
Partitioner = Callable[..., Numbers]
Fill = Callable[[list[int], int, int, int], list[int]]
CrossEdges = Literal["none", "known"]
# The type of an option and its least value.
FromZero = Annotated[int, 0]
FromOne = Annotated[int, 1]
Resolution = Annotated[float, 1e-6]
Alpha = Annotated[float, 1e-3]  # smaller values make Dirichlet draws underflow

_PARTITIONERS: dict[str, Partitioner] = {}
_FOR_GRAPHS: set[str] = set()  # the partitioners that need no edges between items
_REDRAWS = 100
_PIECE = 256  # the least mean length of a client's piece of a block of edges


def partitioner(name: str, *, graphs: bool = False) -> Callable[[Partitioner], Partitioner]:
    """Registers a function as a partitioner.

    graphs: whether it can also assign whole graphs.
    """

    def register(function: Partitioner) -> Partitioner:
        _PARTITIONERS[name] = function
        if graphs:
            _FOR_GRAPHS.add(name)
        return function

    return register


# ---- public functions ----


# The parties have graphs of their own, which nothing divides.
GIVEN = "given"


def partitions() -> dict[str, str]:
    """Returns the name and a one-line description of every partition."""
    return {
        name: (inspect.getdoc(function) or "").partition("\n")[0]
        for name, function in _PARTITIONERS.items()
    }


def divides_graphs(name: str) -> bool:
    """Returns whether a partition can divide a set of graphs, not only the nodes of one."""
    return name in _FOR_GRAPHS


def partition_settings(name: str) -> dict[str, Any]:
    """Returns the options of a partition and their defaults."""
    if name == GIVEN:
        return {}
    if name not in _PARTITIONERS:
        raise unknown("partition", name, _PARTITIONERS)
    parameters = inspect.signature(_PARTITIONERS[name]).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def assign(
    graph: Graph, clients: int, partition: str = "louvain", seed: int = 0, **options: Any
) -> Tensor:
    """Returns the client number (0 to clients - 1) of every item, [items] int64.

    Every client gets at least one item. If a partitioner leaves a client empty (few items, empty
    k-means clusters), the largest client gives it the second half of its items. The result depends
    only on the arguments, not on the global random state.

    Args:
        graph: The graph.
        clients: Number of clients.
        partition: The name of a partition.
        seed: The seed of the partition.
        options: The partition's own options.
    """
    settings = _settings(partition, options)
    if graph.task == "graph" and partition not in _FOR_GRAPHS:
        raise ConfigError(
            f"partition {partition!r} divides the nodes of one graph, "
            f"but {graph.name!r} is a set of graphs. Valid: {', '.join(sorted(_FOR_GRAPHS))}"
        )
    if not _is_whole(clients) or not 1 <= clients <= graph.num_items:
        raise ConfigError(
            f"clients must be a whole number from 1 to {graph.num_items} "
            f"(the items of {graph.name!r}), got {clients!r}"
        )
    owner = _PARTITIONERS[partition](graph, clients, seed, **settings)
    return torch.from_numpy(_fill_empty(owner, clients))


def cut(graph: Graph, owner: Tensor, clients: int) -> list[Graph]:
    """Returns each client's part: its items in their order, and the edges among them.

    The number of passes over the edges does not depend on the number of clients. The parts are
    named after the graph, "cora/0", "cora/1", ...

    Args:
        graph: The graph.
        owner: The client number of every item, as `assign` returns it.
        clients: Number of clients.
    """
    items, place = _grouped_members(owner, clients)
    node_owner, nodes, position = owner, items, place
    if graph.batch is not None:
        node_owner = owner[graph.batch]
        nodes, position = _grouped_members(node_owner, clients)
    edge_owner = _edge_owners(graph, node_owner, clients)
    local, ends = position.numpy().astype(index_type(graph.num_nodes)), graph.edge_index.numpy()
    edges = _shares(
        edge_owner,
        clients,
        lambda some: np.stack([local.take(end.take(some)) for end in ends], dtype=np.int64),
    )
    weights: list[Tensor] = []
    if graph.edge_weight is not None:
        weights = _shares(edge_owner, clients, graph.edge_weight.numpy().take)
    return [
        replace(
            graph,
            x=graph.x[nodes[k]],
            edge_index=edges[k],
            edge_weight=weights[k] if weights else None,
            y=graph.y[items[k]],
            train=graph.train[items[k]],
            val=graph.val[items[k]],
            test=graph.test[items[k]],
            node_id=graph.node_id[nodes[k]],
            cross_edges=graph.cross_edges[:, :0],
            batch=None if graph.batch is None else place[graph.batch[nodes[k]]],
            name=f"{graph.name}/{k}",
            ids=None if graph.ids is None else graph.ids[items[k].numpy()],
            seconds_loading=0.0,
        )
        for k in range(clients)
    ]


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
    """Divides a graph among clients: assigns items, splits them, and cuts the induced subgraphs.

    `Federation.whole` is the graph before the cut with the clients' masks. The method `central`
    therefore trains and tests on exactly the union of the clients' items.

    Args:
        graph: A Graph, or a PyG or networkx object that `files.as_graph` converts.
        clients: Number of clients.
        partition: The name of a partition; see `partitions`.
        seed: The seed of the partition.
        cross_edges: "none": edges between two clients are lost. "known": both owners of such an
            edge have it in `Graph.cross_edges`.
        split: The split; see `fedloom.data.split`.
        split_seed: The seed of the split. The default is `seed`.
        inductive: Whether training sees neither validation nor test items.
        options: The partition's own options; see `partition_settings`.
    """
    began = time.perf_counter()
    graph = as_graph(graph)
    if cross_edges not in ("none", "known"):
        raise unknown("cross_edges", str(cross_edges), ("none", "known"))
    if cross_edges == "known" and graph.task == "graph":
        raise ConfigError(
            f"cross_edges 'known': {graph.name!r} is a set of graphs, "
            "and no partition cuts its edges; use 'none'"
        )
    if cross_edges == "known" and inductive:
        raise ConfigError(
            "cross_edges 'known' and inductive: training would see the cut edges of held-out "
            "nodes; choose one of the two"
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
        "dataset": graph.name,
        "partition": partition,
        "clients": clients,
        "options": _settings(partition, options or {}),
        "seed": seed,
        "split": split,
        "split_seed": split_seed,
        "cross_edges": cross_edges,
        "inductive": inductive,
        "edges_kept": kept,
        "edges_cut": count_edges(graph.edge_index, undirected) - kept,
    }
    federation = Federation(tuple(graphs), whole=whole, inductive=inductive, about=about).check()
    seconds = graph.seconds_loading + time.perf_counter() - began
    return replace(federation, seconds_loading=seconds)


# ---- partitioners ----


@partitioner("louvain")
def _louvain(
    graph: Graph, clients: int, seed: int, *, delta: FromZero = 20, resolution: Resolution = 1.0
) -> Numbers:
    """Balanced Louvain: communities fill the clients one by one (FedPG, FedGKC, FedGH).

    Communities are first cut to at most n/K - delta nodes.
    """
    return _balanced(_communities(graph, seed, resolution), clients, delta)


@partitioner("louvain-cyclic")
def _louvain_cyclic(
    graph: Graph, clients: int, seed: int, *, delta: FromZero = 20, resolution: Resolution = 1.0
) -> Numbers:
    """Louvain of FedStruct: each community goes to the next client with room.

    Isolated nodes are one community. Communities are first cut to at most n/K + delta nodes.
    """
    communities = _communities(graph, seed, resolution)
    source, target = graph.edge_index.numpy()
    isolated = np.ones(graph.num_nodes, dtype=bool)
    isolated[graph.edge_index[:, torch.from_numpy(source != target)].numpy()] = False
    communities[isolated] = len(communities)  # no community has this number
    return _balanced_cyclic(communities, clients, delta)


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
    """Label imbalance: Louvain parts, clustered by k-means on their label shares.

    The parts are those of balanced Louvain (O-pFGL) or, with parts = 0, raw communities (OpenFGL).
    """
    communities = _communities(graph, seed, resolution)
    if parts:
        communities = _balanced(communities, min(parts, len(communities)), delta)
    return _by_labels(graph, communities, clients, seed)


@partitioner("metis")
def _metis(graph: Graph, clients: int, seed: int) -> Numbers:
    """Metis: parts of equal size with few edges between them."""
    return _metis_parts(graph, clients, seed)


@partitioner("metis+")
def _metis_plus(graph: Graph, clients: int, seed: int, *, parts: FromOne = 100) -> Numbers:
    """Label imbalance: many Metis parts, clustered by k-means on their label shares.

    A client is the union of the parts in one cluster.
    """
    return _by_labels(graph, _metis_parts(graph, min(parts, graph.num_nodes), seed), clients, seed)


@partitioner("kmeans")
def _kmeans_features(graph: Graph, clients: int, seed: int, *, delta: FromZero = 20) -> Numbers:
    """k-means on node features; clusters are cut and merged as in louvain-cyclic (FedStruct)."""
    from scipy.sparse import csr_matrix  # takes a tenth of a second to import

    sparse = graph.sparse_x
    if sparse is None:
        points: Any = graph.x.numpy()
    else:
        points = csr_matrix(
            (sparse.values.numpy(), sparse.indices.numpy(), sparse.offsets.numpy()),
            shape=sparse.shape,
        )
    return _balanced_cyclic(_kmeans(points, clients, seed, starts=1), clients, delta)


@partitioner("random", graphs=True)
def _random(graph: Graph, clients: int, seed: int) -> Numbers:
    """Every item goes to a random client, drawn uniformly and independently."""
    return _rng(seed).integers(clients, size=graph.num_items)


@partitioner("uniform", graphs=True)
def _uniform(graph: Graph, clients: int, seed: int) -> Numbers:
    """Random shares of equal size: sizes differ by at most one."""
    return _rng(seed).permutation(graph.num_items) % clients


@partitioner("blocks", graphs=True)
def _blocks(graph: Graph, clients: int, seed: int) -> Numbers:
    """Equal shares in the stored order of the items, for graphs of equal blocks.

    "synthetic:blocks=..." makes such a graph.
    """
    return np.arange(graph.num_items) * clients // graph.num_items


@partitioner("dirichlet", graphs=True)
def _dirichlet(
    graph: Graph, clients: int, seed: int, *, alpha: Alpha = 0.5, min_items: FromOne = 5
) -> Numbers:
    """Label skew: Dirichlet(alpha) shares of each class, for clients with at most n/K items."""
    y, n, rng = graph.y.numpy(), graph.num_items, _rng(seed)
    for _ in range(_REDRAWS):
        owner = np.empty(n, dtype=np.int64)
        sizes = np.zeros(clients, dtype=np.int64)
        for label in np.unique(y):  # items without a label are treated as one more class
            items = rng.permutation(np.flatnonzero(y == label))
            share = np.where(sizes > n / clients, 0.0, rng.dirichlet(np.full(clients, alpha)))
            if not share.sum() > 0:  # a small alpha chose only clients that are already full
                sizes[:] = 0
                break
            ends = (np.cumsum(share / share.sum()) * len(items)).astype(np.int64)
            ends[-1] = len(items)
            counts = np.diff(ends, prepend=0)
            owner[items] = np.repeat(np.arange(clients), counts)
            sizes += counts
        if sizes.min() >= min_items:
            return owner
    raise ConfigError(
        f"partition 'dirichlet': in {_REDRAWS} draws some client always got fewer than "
        f"min_items = {min_items} of {n} items; raise alpha (now {alpha:g}), "
        f"or lower min_items or clients (now {clients})"
    )


# ---- parts of partitioners ----


def _rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(stream_seed(seed, "partition"))


def _small_seed(seed: int) -> int:
    """Returns a seed of 31 bits, for libraries that accept no more."""
    return stream_seed(seed, "partition") % 2**31


def _communities(graph: Graph, seed: int, resolution: float) -> Numbers:
    """Returns the Louvain community of every node. Isolated nodes are communities of one node."""
    from fedloom.data.louvain import louvain  # it imports scipy, which takes a tenth of a second

    return _in_order(louvain(adjacency(graph), _small_seed(seed), resolution))


def _metis_parts(graph: Graph, parts: int, seed: int) -> Numbers:
    """Returns the Metis part of every node."""
    import pymetis

    matrix = adjacency(graph)
    edges = pymetis.CSRAdjacency(matrix.indptr.astype(np.int64), matrix.indices.astype(np.int64))
    _, part = pymetis.part_graph(parts, edges, options=pymetis.Options(seed=_small_seed(seed)))
    # Metis leaves parts empty if there are few nodes per part.
    return _fill_empty(np.asarray(part, dtype=np.int64), parts)


def _kmeans(points: Any, clusters: int, seed: int, starts: int = 10) -> Numbers:
    """Returns the cluster of every row. Some clusters stay empty if many rows are equal."""
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning
    from threadpoolctl import threadpool_limits

    # Several threads add up the centres in the order in which they finish. With one thread, a seed
    # always gives the same clusters.
    with warnings.catch_warnings(), threadpool_limits(1):
        warnings.simplefilter("ignore", ConvergenceWarning)  # about empty clusters
        found = KMeans(clusters, n_init=starts, random_state=_small_seed(seed)).fit_predict(points)
    return found.astype(np.int64)


def _in_order(groups: Numbers) -> Numbers:
    """Returns the same groups, numbered 0, 1, ... in the order of their first members."""
    _, first, number = np.unique(groups, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[number]


def _by_labels(graph: Graph, groups: Numbers, clients: int, seed: int) -> Numbers:
    """Clusters groups by k-means on their label histograms. A client is the union of a cluster.

    Each histogram is normalised to sum 1.
    """
    groups, y, classes = _in_order(groups), graph.y.numpy(), graph.num_classes
    num_groups = int(groups.max()) + 1
    if num_groups < clients:
        raise ConfigError(
            f"clients is {clients}, but there are only {num_groups} parts to make them of; "
            "raise parts, or the resolution of Louvain"
        )
    known = y >= 0
    counts = np.bincount(
        groups[known] * classes + y[known], minlength=num_groups * classes
    ).reshape(num_groups, classes)
    histograms = counts / counts.sum(1, keepdims=True).clip(min=1)
    return _fill_empty(_kmeans(histograms, clients, seed), clients)[groups]


def _balanced(communities: Numbers, clients: int, delta: int) -> Numbers:
    """Balanced Louvain after the communities are known: cut to n/K - delta, sort, fill first."""
    target = len(communities) // clients
    return _pack(communities, max(target - delta, 1), _fill_first, clients, target, delta)


def _balanced_cyclic(communities: Numbers, clients: int, delta: int) -> Numbers:
    """Cut and merge of FedStruct: cut to n/K + delta, sort, next client with room."""
    target = len(communities) // clients
    return _pack(communities, target + delta, _fill_cyclic, clients, target, delta)


def _pack(
    groups: Numbers, longest: int, fill: Fill, clients: int, target: int, delta: int
) -> Numbers:
    """Cuts groups into pieces of at most `longest` members and assigns them with `fill`.

    The largest pieces are assigned first.
    """
    groups = _in_order(groups)
    order = np.argsort(groups, kind="stable")
    size = np.bincount(groups)
    rank = np.empty_like(groups)
    rank[order] = np.arange(len(groups)) - np.repeat(np.cumsum(size) - size, size)
    # A cut keeps the first members in the group and appends the rest to the list of groups, so
    # first pieces come before second ones. The order matters: pieces of equal length, of which
    # Louvain+ has many, are assigned in this order.
    _, piece = np.unique(rank // longest * len(size) + groups, return_inverse=True)
    length = np.bincount(piece)
    by_length = np.argsort(-length, kind="stable")
    owner = np.empty(len(length), dtype=np.int64)
    owner[by_length] = fill(length[by_length].tolist(), clients, target, delta)
    return owner[piece]


def _fill_first(lengths: list[int], clients: int, target: int, delta: int) -> list[int]:
    """Returns the client of each piece. It fills one client until that has `target` members.

    A client is skipped for a piece that would bring it to target + delta. A piece that fits no
    client goes to the smallest client that is still open.
    """
    sizes, open_, at, owner = [0] * clients, list(range(clients)), 0, []
    for length in lengths:
        while len(open_) > 1 and sizes[open_[at]] >= target:
            del open_[at]
            at %= len(open_)
        turns = (*range(at, len(open_)), *range(at))
        fitting = [k for k in turns if sizes[open_[k]] + length < target + delta]
        at = fitting[0] if fitting else min(turns, key=lambda k: sizes[open_[k]])
        sizes[open_[at]] += length
        owner.append(open_[at])
    return owner


def _fill_cyclic(lengths: list[int], clients: int, target: int, delta: int) -> list[int]:
    """Returns the client of each piece, in cyclic order from the last client that got one.

    The piece goes to the next client that is below `target` and stays within target + delta. A
    piece that fits no client goes to the smallest client.
    """
    sizes, at, owner = [0] * clients, 0, []
    for length in lengths:
        turns = (*range(at, clients), *range(at))
        fitting = [k for k in turns if sizes[k] < target and sizes[k] + length <= target + delta]
        at = fitting[0] if fitting else min(turns, key=lambda k: sizes[k])
        sizes[at] += length
        owner.append(at)
    return owner


def _fill_empty(owner: Numbers, clients: int) -> Numbers:
    """Gives every empty client the second half of the largest client's items."""
    owner = owner.copy()
    sizes = np.bincount(owner, minlength=clients)
    for empty in np.flatnonzero(sizes == 0):
        largest = int(np.argmax(sizes))
        given = np.flatnonzero(owner == largest)[(sizes[largest] + 1) // 2 :]
        owner[given] = empty
        sizes[largest] -= len(given)
        sizes[empty] = len(given)
    return owner


def _compact(owner: Tensor, clients: int) -> Owners:
    """Returns client numbers in the smallest integer type.

    They are looked up for every edge, so they should fit into the processor's cache.
    """
    return owner.numpy().astype(np.min_scalar_type(clients))


def _grouped(owner: npt.NDArray[Any], clients: int) -> tuple[Numbers, list[int]]:
    """Returns the order that groups entries by owner, and the number of entries per owner."""
    return order_by_owner(owner, clients), np.bincount(owner, minlength=clients).tolist()


def _grouped_members(owner: Tensor, clients: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """Returns the members of every client, and each member's position within its client."""
    order, counts = _grouped(owner.numpy(), clients)
    number = np.empty_like(order)
    number[order] = np.concatenate([np.arange(count) for count in counts])
    return torch.from_numpy(order).split(counts), torch.from_numpy(number)


def _edge_owners(
    graph: Graph, owner: Tensor, clients: int, end: int = 0, *, crossing: bool = False
) -> Owners:
    """Returns the owner of one end of each edge, or `clients` for edges that do not count.

    Args:
        graph: The graph.
        owner: The client number of every node.
        clients: Number of clients.
        end: 0 for the source, 1 for the target.
        crossing: Whether edges between clients count, not those within one.
    """
    compact, ends = _compact(owner, clients), graph.edge_index.numpy()
    nobody = compact.dtype.type(clients)
    found = np.empty(graph.num_edges, dtype=compact.dtype)
    for begin in range(0, graph.num_edges, BLOCK):
        block = slice(begin, begin + BLOCK)
        mine, other = compact.take(ends[end, block]), compact.take(ends[1 - end, block])
        found[block] = np.where((mine != other) == crossing, mine, nobody)
    return found


def _shares(
    owners: Owners, clients: int, columns: Callable[[Numbers], npt.NDArray[Any]]
) -> list[Tensor]:
    """Returns each client's columns, in the order of the edges.

    Args:
        owners: The owner of each edge. `clients` stands for nobody.
        clients: Number of clients.
        columns: Takes the numbers of some edges and returns their columns, [..., some].
    """
    length = max(BLOCK, _PIECE * clients)  # copying many short pieces would take long
    blocks = [owners[begin : begin + length] for begin in range(0, len(owners), length)]
    counts = [np.bincount(block, minlength=clients + 1)[:clients] for block in blocks]
    sizes = sum(counts, np.zeros(clients, dtype=np.int64))
    none = columns(np.arange(0))
    shares = [np.empty((*none.shape[:-1], size), dtype=none.dtype) for size in sizes]
    filled = np.zeros(clients, dtype=np.int64)
    for number, (block, count) in enumerate(zip(blocks, counts, strict=True)):
        ends = np.cumsum(count)
        found = columns(order_by_owner(block, clients)[: ends[-1]] + number * length)
        for k in np.flatnonzero(count):
            share = found[..., ends[k] - count[k] : ends[k]]
            shares[k][..., filled[k] : filled[k] + count[k]] = share
        filled += count
    return [torch.from_numpy(share) for share in shares]


def _cross_edges(graph: Graph, owner: Tensor, clients: int) -> list[Tensor]:
    """Returns each client's `Graph.cross_edges`, [4, cut]: the cut edges with one end there."""
    _, local = _grouped_members(owner, clients)
    ends = graph.edge_index

    def rows(incoming: int, some: Numbers) -> npt.NDArray[np.int64]:
        mine, other = ends[incoming, some], ends[1 - incoming, some]
        return torch.stack(
            [local[mine], graph.node_id[other], owner[other], torch.full_like(mine, incoming)]
        ).numpy()

    # Each client's outgoing edges come before its incoming ones.
    shares = [
        _shares(
            _edge_owners(graph, owner, clients, way, crossing=True), clients, partial(rows, way)
        )
        for way in (0, 1)
    ]
    return [torch.cat(pair, 1) for pair in zip(*shares, strict=True)]


# ---- options ----


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _settings(partition: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all options of a partition. The given ones are checked, the others are defaults."""
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
                f"partition {partition!r}: {name} must be a {what}, {least:g} or more, "
                f"got {value!r}"
            )
    return {**settings, **options}
