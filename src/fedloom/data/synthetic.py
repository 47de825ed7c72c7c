"""Synthetic graphs: a degree-corrected contextual stochastic block model, and small random graphs.

"synthetic-arxiv" and "synthetic-products" have the sizes of ogbn-arxiv and ogbn-products.
`synthetic_clients` makes one small graph for each of many clients.

With n nodes, m undirected edges and d features, time and memory are O(m log n + n·d). No array has
n×n entries.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from fedloom.data.federation import Federation
from fedloom.data.graph import Graph
from fedloom.data.partition import divide
from fedloom.data.split import DEFAULT_SPLIT
from fedloom.errors import ConfigError, unknown

Array = np.ndarray
# How often missing edges are drawn again before the graph counts as too dense.
MAX_DRAWS = 200
# Rows of features per step, so that the temporary array stays small compared with the features.
ROW_CHUNK = 65536
# Edges drawn per step, so that their data fits into the processor's cache.
EDGE_CHUNK = 2**20


def synthetic(
    nodes: int = 1000,
    classes: int = 4,
    features: int = 32,
    degree: float = 8.0,
    homophily: float = 0.8,
    signal: float = 1.0,
    label_skew: float = 0.0,
    degree_exponent: float | None = 2.5,
    seed: int = 0,
    name: str = "synthetic",
    blocks: int = 1,
) -> Graph:
    """Returns an undirected graph with planted classes (degree-corrected contextual SBM).

    The first end of an edge is drawn in proportion to the nodes' propensities. The second end is
    drawn in the same way among the nodes of the same class, or of the other classes. Edges that
    already exist are drawn again. The splits are empty.

    Args:
        nodes: Number of nodes, n.
        classes: Number of classes.
        features: Number of node features.
        degree: Mean number of neighbours. It is exact: the graph has n·degree/2 distinct edges and
            no self-loops.
        homophily: Fraction of the edges that join two nodes of one class.
        signal: Distance between two class means of the features, in units of the noise. It is exact
            if features >= classes, else approximate.
        label_skew: Each class has (1 - label_skew) times the size of the class before it.
        degree_exponent: The nodes' propensities follow a power law with this exponent, cut at √n.
            0 or None makes them equal.
        seed: The same seed gives the same graph.
        name: The graph's name.
        blocks: Number of graphs of equal size, one after another, without edges between them. The
            partition "blocks" gives each of them to one client.
    """
    _check("synthetic", "nodes", nodes, int, 2)
    _check("synthetic", "classes", classes, int, 2, nodes)
    _check("synthetic", "features", features, int, 1)
    _check("synthetic", "degree", degree, float, 0, nodes - 1)
    _check("synthetic", "homophily", homophily, float, 0, 1)
    _check("synthetic", "signal", signal, float, 0)
    _check("synthetic", "label_skew", label_skew, float, 0, 0.99)
    _check("synthetic", "seed", seed, int, 0)
    if degree_exponent:
        _check("synthetic", "degree_exponent", degree_exponent, float, 2.01)
    _check("synthetic", "blocks", blocks, int, 1, nodes // classes)
    if nodes % blocks:
        raise ConfigError(f"synthetic: blocks is {blocks}, must divide nodes, which is {nodes}")
    # One stream per purpose, so that the edges do not depend on the features.
    order_rng, edge_rng, noise_rng = _streams(seed, 3)

    # While edges are drawn, nodes are sorted by block and class. They are shuffled within their
    # block at the end.
    size = nodes // blocks
    sizes = np.tile(_class_sizes(size, classes, label_skew), blocks)
    kind = np.repeat(np.arange(blocks * classes), sizes)  # block · classes + class
    weight = np.ones(nodes)
    if degree_exponent:
        drawn = (1 - edge_rng.random(nodes)) ** (-1 / (degree_exponent - 1))
        weight = np.minimum(drawn, math.sqrt(size))
    # Node i owns the interval [bounds[i], bounds[i+1]), kind k owns [starts[k], starts[k+1]).
    bounds = np.concatenate([[0.0], np.cumsum(weight)])
    starts = bounds[np.concatenate([[0], np.cumsum(sizes)])]

    def pair(first_spot: Array, toss: Array, same: bool) -> Array:
        first = _owner(bounds, first_spot)
        mine = kind[first]
        low, high = starts[mine], starts[mine + 1]
        if same:
            spot = low + toss * (high - low)
        else:  # another class: the block's interval is a circle without the own class
            begin = starts[mine // classes * classes]
            width = starts[(mine // classes + 1) * classes] - begin
            spot = (high - begin + toss * (width - high + low)) % width + begin
        order = np.argsort(spot)
        first, second = first[order], _owner(bounds, spot[order])
        mine, other = kind[first], kind[second]
        # Rounding may move a draw over a bound.
        right = (
            ((mine == other) == same) & (mine // classes == other // classes) & (first != second)
        )
        first, second = first[right], second[right]
        return np.minimum(first, second) * nodes + np.maximum(first, second)

    def draw(count: int, same: bool) -> Array:
        # The order of the edges does not matter, and looking up sorted spots is several times as
        # fast.
        first_spot, toss = edge_rng.random(count), edge_rng.random(count)
        first_spot.sort()
        first_spot *= bounds[-1]
        parts = [
            pair(first_spot[k : k + EDGE_CHUNK], toss[k : k + EDGE_CHUNK], same)
            for k in range(0, count, EDGE_CHUNK)
        ]
        return np.concatenate(parts)

    edges = round(nodes * degree / 2)
    inside = round(edges * homophily)
    keys = [
        _distinct(partial(draw, same=True), inside),
        _distinct(partial(draw, same=False), edges - inside),
    ]
    if sum(map(len, keys)) < edges:
        raise ConfigError(
            f"synthetic: degree is {degree}, too dense: {nodes} nodes in {classes} classes have no "
            f"room for {edges} distinct edges with homophily {homophily}. "
            "Lower degree, or raise nodes"
        )
    # The numbers of each block in random order, sorted by block.
    shuffle = order_rng.permutation(nodes)
    shuffle = shuffle[np.argsort(shuffle // size, kind="stable")]
    y = np.empty(nodes, dtype=np.int64)
    y[shuffle] = kind % classes
    return Graph(
        x=torch.from_numpy(_features(y, classes, features, signal, noise_rng)),
        edge_index=torch.from_numpy(_both_ways(keys, shuffle)),
        y=torch.from_numpy(y),
        num_classes=classes,
        name=name,
    )


def synthetic_clients(
    clients: int = 1000,
    nodes: int = 100,
    classes: int = 5,
    features: int = 32,
    *,
    split: str = DEFAULT_SPLIT,
    seed: int = 0,
    **recipe: Any,
) -> Federation:
    """Returns a federation of many small graphs, one per client, with common class means.

    Args:
        clients: Number of clients.
        nodes: Number of nodes per client.
        classes: Number of classes.
        features: Number of node features.
        split: The split; see `fedloom.data.split`.
        seed: The seed of the graph, the partition and the split.
        recipe: Further arguments of `synthetic`.
    """
    _check("synthetic-clients", "clients", clients, int, 1)
    _check("synthetic-clients", "nodes", nodes, int, 2)
    graph = synthetic(clients * nodes, classes, features, blocks=clients, seed=seed, **recipe)
    return divide(graph, clients, "blocks", seed, split=split)


def synthetic_graphs(
    graphs: int = 200,
    classes: int = 2,
    nodes: tuple[int, int] = (10, 30),
    features: int = 8,
    signal: float = 0.5,
    seed: int = 0,
    name: str = "synthetic-graphs",
) -> Graph:
    """Returns a graph-level dataset: a disjoint union of random graphs, labelled by edge density.

    The mean degree rises linearly from 2 in class 0 to nodes[0] / 2 in the last class. The first
    feature is always 1, so that a sum over neighbours counts them. The others are unit noise around
    the class means.

    Args:
        graphs: Number of graphs.
        classes: Number of classes. All classes are equally frequent.
        nodes: Least and largest number of nodes of a graph.
        features: Number of node features.
        signal: Distance between two class means of the features, in units of the noise.
        seed: The same seed gives the same graphs.
        name: The dataset's name.
    """
    fewest, most = nodes
    _check("synthetic-graphs", "graphs", graphs, int, 1)
    _check("synthetic-graphs", "classes", classes, int, 2)
    _check("synthetic-graphs", "nodes[0]", fewest, int, 6)
    _check("synthetic-graphs", "nodes[1]", most, int, fewest)
    _check("synthetic-graphs", "features", features, int, 2)
    _check("synthetic-graphs", "signal", signal, float, 0)
    _check("synthetic-graphs", "seed", seed, int, 0)
    order_rng, edge_rng, noise_rng = _streams(seed, 3)
    y = order_rng.permutation(np.arange(graphs) % classes)
    sizes = order_rng.integers(fewest, most, size=graphs, endpoint=True)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    total = int(starts[-1])
    degree = 2 + y * (fewest / 2 - 2) / (classes - 1)
    # Every graph has exactly its expected number of edges: density without noise can be learnt.
    keys = []
    for start, size, count in zip(
        starts, sizes, np.rint(sizes * degree / 2).astype(int), strict=False
    ):
        low, high = np.triu_indices(size, 1)
        chosen = edge_rng.choice(len(low), size=count, replace=False)
        keys.append(np.stack([low[chosen], high[chosen]]) + start)
    batch = np.repeat(np.arange(graphs), sizes)
    x = np.ones((total, features), dtype=np.float32)
    x[:, 1:] = _features(y[batch], classes, features - 1, signal, noise_rng)
    return Graph(
        x=torch.from_numpy(x),
        edge_index=torch.from_numpy(
            _both_ways([low * total + high for low, high in keys], np.arange(total))
        ),
        y=torch.from_numpy(y),
        num_classes=classes,
        batch=torch.from_numpy(batch),
        name=name,
    )


GENERATORS: dict[str, Callable[..., Graph]] = {
    "synthetic": synthetic,
    "synthetic-graphs": synthetic_graphs,
    # The sizes are those of the Open Graph Benchmark, the homophily is about the same.
    "synthetic-arxiv": partial(
        synthetic,
        nodes=169_343,
        classes=40,
        features=128,
        degree=2_315_598 / 169_343,
        homophily=0.65,
        name="synthetic-arxiv",
    ),
    "synthetic-products": partial(
        synthetic,
        nodes=2_449_029,
        classes=47,
        features=100,
        degree=123_718_280 / 2_449_029,
        homophily=0.81,
        name="synthetic-products",
    ),
}


def from_text(text: str) -> Graph:
    """Returns the graph of a recipe such as "synthetic:nodes=1000,homophily=0.8".

    The options are the arguments of `synthetic` and `synthetic_graphs`. A pair is written
    "low-high", as in "synthetic-graphs:nodes=10-30".
    """
    kind, _, listing = text.partition(":")
    if kind not in GENERATORS:
        raise unknown("dataset", kind, GENERATORS)
    defaults = {key: p.default for key, p in inspect.signature(GENERATORS[kind]).parameters.items()}
    options: dict[str, Any] = {}
    for item in filter(None, listing.split(",")):
        key, _, value = (part.strip() for part in item.partition("="))
        if key not in defaults:
            raise unknown(f"option of {kind}", key, defaults)
        try:
            options[key] = _parse(value, defaults[key])
        except ValueError as error:
            raise ConfigError(
                f"{kind}: {key} is {value!r}, must be written like {_example(defaults[key])}"
            ) from error
    return GENERATORS[kind](**options)


def _parse(value: str, like: Any) -> Any:
    if isinstance(like, tuple):
        low, high = value.split("-")
        return int(low), int(high)
    if isinstance(like, int):
        number = float(value)  # accepts 1e6 as a number of nodes
        if not number.is_integer():
            raise ValueError(value)
        return int(number)
    return type(like)(value)


def _example(value: Any) -> str:
    return "-".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _check(
    where: str, field: str, value: Any, kind: type, low: float, high: float = math.inf
) -> None:
    allowed = (int, np.integer) if kind is int else (int, float, np.number)
    right_kind = isinstance(value, allowed) and not isinstance(value, bool)
    if not right_kind or not low <= value <= high or math.isinf(value):
        bound = f"at least {low}" if math.isinf(high) else f"from {low} to {high}"
        what = "a whole number" if kind is int else "a number"
        raise ConfigError(f"{where}: {field} is {value!r}, must be {what} {bound}")


def _streams(seed: int, count: int) -> list[np.random.Generator]:
    return [
        np.random.Generator(np.random.PCG64(child))
        for child in np.random.SeedSequence(seed).spawn(count)
    ]


def _class_sizes(nodes: int, classes: int, skew: float) -> Array:
    """Returns class sizes that shrink by (1 - skew) from class to class.

    Every size is at least 1, and their sum is `nodes`.
    """
    share = (1 - skew) ** np.arange(classes)
    edges = np.rint(np.cumsum(share / share.sum()) * (nodes - classes)).astype(int)
    return 1 + np.diff(edges, prepend=0)


def _owner(bounds: Array, spot: Array) -> Array:
    """Returns the interval [bounds[i], bounds[i+1]) that contains each spot."""
    return np.minimum(np.searchsorted(bounds, spot, side="right") - 1, len(bounds) - 2)


def _distinct(draw: Callable[[int], Array], count: int) -> Array:
    """Returns `count` distinct undirected edges as sorted keys.

    It returns fewer if MAX_DRAWS draws do not give more.

    draw: takes a number of edges and returns their keys, perhaps with repetitions.
    """
    found: list[Array] = []
    missing = count
    for _ in range(MAX_DRAWS):
        if not missing:
            break
        # Draw exactly the missing number: a surplus would have to be dropped at random.
        keys = draw(missing)
        keys.sort()  # np.unique hashes integers, which is several times slower at this size
        keys = keys[np.diff(keys, prepend=-1) > 0]
        for known in found:
            keys = keys[known[np.searchsorted(known, keys).clip(max=len(known) - 1)] != keys]
        if len(keys):
            found.append(keys)
            missing -= len(keys)
    return np.sort(np.concatenate(found)) if found else np.empty(0, dtype=np.int64)


def _both_ways(parts: list[Array], shuffle: Array) -> Array:
    """Returns directed edges [2, 2m] from keys low·n + high of undirected ones.

    Nodes get their shuffled numbers. Edges are sorted by source, then target.
    """
    nodes, count = len(shuffle), sum(map(len, parts))
    keys = np.empty(2 * count, dtype=np.int64)
    start = 0
    for part in parts:
        for k in range(0, len(part), EDGE_CHUNK):
            low, high = np.divmod(part[k : k + EDGE_CHUNK], nodes)
            low, high = shuffle[low], shuffle[high]
            end = start + len(low)
            keys[start:end] = low * nodes + high
            keys[count + start : count + end] = high * nodes + low
            start = end
    keys.sort()
    ends = np.empty((2, len(keys)), dtype=np.int64)
    np.floor_divide(keys, nodes, out=ends[0])
    np.subtract(keys, ends[0] * nodes, out=ends[1])  # twice as fast as np.divmod
    return ends


def _features(y: Array, classes: int, width: int, signal: float, rng: np.random.Generator) -> Array:
    """Returns features [n, width] float32: unit noise around class means at distance `signal`."""
    directions = rng.standard_normal((width, classes))
    if width >= classes:
        directions, _ = np.linalg.qr(directions)
    scaled = signal / math.sqrt(2) * directions / np.linalg.norm(directions, axis=0)
    means = scaled.T.astype(np.float32)
    x = rng.standard_normal((len(y), width), dtype=np.float32)
    for start in range(0, len(y), ROW_CHUNK):
        x[start : start + ROW_CHUNK] += means[y[start : start + ROW_CHUNK]]
    return x
