"""Graphs made from a recipe: a degree-corrected contextual stochastic block model, and a small graph-level dataset.

Sizes legend: n nodes, m undirected edges, C classes, d features. Time and memory are O(m log n + n·d); nothing is n×n.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fedloom.errors import ConfigError, unknown
from fedloom.graph import Graph

Array = np.ndarray
# How often missing edges are drawn again before the recipe is called too dense to be filled.
ROUNDS = 200
# Rows of features that get their class mean at a time: the temporary stays small beside the features themselves.
CHUNK = 65536


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
) -> Graph:
    """An undirected graph with planted classes (degree-corrected contextual SBM); the same seed gives the same graph.

    nodes, classes, features: sizes. degree: mean number of neighbours, met exactly (n·degree/2 distinct edges, no self-loops).
    homophily: fraction of the edges that join two nodes of one class. signal: distance between two class means of the
    features, in units of the noise (exact if features >= classes, else on average about that). label_skew: each class
    has (1 - label_skew) times the size of the one before it. degree_exponent: nodes' propensities follow a power law with
    this exponent, cut at √n; 0 or None makes them equal. Splits are left empty.

    A first end is drawn in proportion to the propensities, the second one likewise among the nodes of the same class or of
    the others. Edges that exist already are drawn again.
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
    # One stream per purpose: asking for other features leaves the edges as they are.
    order_rng, edge_rng, noise_rng = _streams(seed, 3)

    # Nodes are laid out class by class while edges are drawn, and shuffled at the end.
    sizes = _class_sizes(nodes, classes, label_skew)
    label = np.repeat(np.arange(classes), sizes)
    weight = np.ones(nodes)
    if degree_exponent:
        weight = np.minimum((1 - edge_rng.random(nodes)) ** (-1 / (degree_exponent - 1)), math.sqrt(nodes))
    bounds = np.concatenate([[0.0], np.cumsum(weight)])  # node i owns the interval [bounds[i], bounds[i+1])
    starts = bounds[np.concatenate([[0], np.cumsum(sizes)])]  # class c owns [starts[c], starts[c+1])

    def draw(count: int, same: bool) -> tuple[Array, Array]:
        # The order of the edges does not matter, and sorted spots are looked up several times as fast.
        first = _owner(bounds, np.sort(edge_rng.random(count)) * bounds[-1])
        low, high = starts[label[first]], starts[label[first] + 1]
        toss = edge_rng.random(count)
        # Another class: go round the circle from the end of the own class to its beginning.
        spot = low + toss * (high - low) if same else (high + toss * (bounds[-1] - high + low)) % bounds[-1]
        second = _owner(bounds, spot)
        right = (label[first] == label[second]) == same  # rounding may put a draw just over a class's border
        return first[right], second[right]

    edges = round(nodes * degree / 2)
    inside = round(edges * homophily)
    keys = [_distinct(lambda k: draw(k, True), inside, nodes), _distinct(lambda k: draw(k, False), edges - inside, nodes)]
    if sum(map(len, keys)) < edges:
        raise ConfigError(
            f"synthetic: degree is {degree}, too dense: {nodes} nodes in {classes} classes have no room for {edges} distinct "
            f"edges with homophily {homophily}. Lower degree, or raise nodes"
        )
    shuffle = order_rng.permutation(nodes)
    y = np.empty(nodes, dtype=np.int64)
    y[shuffle] = label
    ends = np.stack(np.divmod(np.concatenate(keys), nodes))
    return Graph(
        x=torch.from_numpy(_features(y, classes, features, signal, noise_rng)),
        edge_index=torch.from_numpy(_both_ways(shuffle[ends], nodes)),
        y=torch.from_numpy(y),
        num_classes=classes,
        name=name,
    )


def synthetic_graphs(
    graphs: int = 200,
    classes: int = 2,
    nodes: tuple[int, int] = (10, 30),
    features: int = 8,
    signal: float = 0.5,
    seed: int = 0,
    name: str = "synthetic-graphs",
) -> Graph:
    """A graph-level dataset: many small random graphs as one disjoint union, labelled by their edge density.

    graphs, classes: how many (classes are equally frequent). nodes: fewest and most nodes of a graph. The mean degree rises
    evenly from 2 in class 0 to nodes[0] / 2 in the last class. features: the first one is always 1, so that a sum over
    neighbours counts them; the others are unit noise around class means at distance `signal`. seed: same seed, same graphs.
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
    # Every graph gets the same number of edges as its expected one: a noiseless density is a label that can be learnt.
    keys = []
    for start, size, count in zip(starts, sizes, np.rint(sizes * degree / 2).astype(int), strict=False):
        low, high = np.triu_indices(size, 1)
        chosen = edge_rng.choice(len(low), size=count, replace=False)
        keys.append(np.stack([low[chosen], high[chosen]]) + start)
    batch = np.repeat(np.arange(graphs), sizes)
    x = np.ones((total, features), dtype=np.float32)
    x[:, 1:] = _features(y[batch], classes, features - 1, signal, noise_rng)
    return Graph(
        x=torch.from_numpy(x),
        edge_index=torch.from_numpy(_both_ways(np.concatenate(keys, axis=1), total)),
        y=torch.from_numpy(y),
        num_classes=classes,
        batch=torch.from_numpy(batch),
        name=name,
    )


MAKERS: dict[str, Callable[..., Graph]] = {"synthetic": synthetic, "synthetic-graphs": synthetic_graphs}


def from_text(text: str) -> Graph:
    """The graph a text such as "synthetic:nodes=1000,homophily=0.8" or "synthetic-graphs:nodes=10-30" asks for.

    The options are the arguments of `synthetic` and `synthetic_graphs`; a pair is written "low-high".
    """
    kind, _, listing = text.partition(":")
    if kind not in MAKERS:
        raise unknown("dataset", kind, MAKERS)
    defaults = {key: p.default for key, p in inspect.signature(MAKERS[kind]).parameters.items()}
    options: dict[str, Any] = {}
    for item in filter(None, listing.split(",")):
        key, _, value = (part.strip() for part in item.partition("="))
        if key not in defaults:
            raise unknown(f"option of {kind}", key, defaults)
        try:
            options[key] = _parse(value, defaults[key])
        except ValueError as error:
            raise ConfigError(f"{kind}: {key} is {value!r}, must be written like {_written(defaults[key])}") from error
    return MAKERS[kind](**options)


def _parse(value: str, like: Any) -> Any:
    if isinstance(like, tuple):
        low, high = value.split("-")
        return int(low), int(high)
    if isinstance(like, int):
        number = float(value)  # so that 1e6 is a number of nodes
        if not number.is_integer():
            raise ValueError(value)
        return int(number)
    return type(like)(value)


def _written(value: Any) -> str:
    return "-".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _check(where: str, field: str, value: Any, kind: type, low: float, high: float = math.inf) -> None:
    right_kind = isinstance(value, (int, np.integer) if kind is int else (int, float, np.number)) and not isinstance(value, bool)
    if not right_kind or not low <= value <= high or math.isinf(value):
        bound = f"at least {low}" if math.isinf(high) else f"from {low} to {high}"
        raise ConfigError(f"{where}: {field} is {value!r}, must be {'a whole number' if kind is int else 'a number'} {bound}")


def _streams(seed: int, count: int) -> list[np.random.Generator]:
    return [np.random.Generator(np.random.PCG64(child)) for child in np.random.SeedSequence(seed).spawn(count)]


def _class_sizes(nodes: int, classes: int, skew: float) -> Array:
    """Sizes that shrink by (1 - skew) from class to class, at least 1 each, `nodes` in all."""
    share = (1 - skew) ** np.arange(classes)
    edges = np.rint(np.cumsum(share / share.sum()) * (nodes - classes)).astype(int)
    return 1 + np.diff(edges, prepend=0)


def _owner(bounds: Array, spot: Array) -> Array:
    """Which interval [bounds[i], bounds[i+1]) holds each spot."""
    return np.minimum(np.searchsorted(bounds, spot, side="right") - 1, len(bounds) - 2)


def _distinct(draw: Callable[[int], tuple[Array, Array]], count: int, nodes: int) -> Array:
    """`count` different undirected edges from `draw(how many)`, as sorted keys low·nodes + high; fewer if there seem to be none."""
    keys = np.empty(0, dtype=np.int64)
    for _ in range(ROUNDS):
        if len(keys) == count:
            break
        # Exactly as many as are missing: a surplus would have to be dropped at random.
        first, second = draw(count - len(keys))
        proper = first != second
        low, high = np.minimum(first, second)[proper], np.maximum(first, second)[proper]
        keys = np.concatenate([keys, low * nodes + high])
        keys.sort()  # np.unique hashes whole numbers, several times slower at this size
        keys = keys[np.diff(keys, prepend=-1) > 0]
    return keys


def _both_ways(ends: Array, nodes: int) -> Array:
    """[2, m] undirected edges -> [2, 2m] directed ones, sorted by source, then target."""
    keys = np.concatenate([ends[0] * nodes + ends[1], ends[1] * nodes + ends[0]])
    keys.sort()
    return np.stack(np.divmod(keys, nodes))


def _features(y: Array, classes: int, width: int, signal: float, rng: np.random.Generator) -> Array:
    """[n, width] float32: unit noise around class means that lie `signal` apart."""
    directions = rng.standard_normal((width, classes))
    if width >= classes:
        directions, _ = np.linalg.qr(directions)
    means = (signal / math.sqrt(2) * directions / np.linalg.norm(directions, axis=0)).T.astype(np.float32)
    x = rng.standard_normal((len(y), width), dtype=np.float32)
    for start in range(0, len(y), CHUNK):
        x[start : start + CHUNK] += means[y[start : start + CHUNK]]
    return x
