"""Structure features: a node beside its neighbourhoods, for graphs whose neighbours differ.

Sums over hops blur a node into its neighbours, which is right only where neighbours are alike.
Here every hop has columns of its own, so that a linear model weighs a node, the nodes that point
to it and the nodes that it points to separately, with either sign. Everything is a function of one
client's own graph and of public constants, and has the same width at every client.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from fedloom.data.graph import Graph

PAIRS = 2048  # the most columns of `pairs`
BUCKETS = 16  # columns of one degree; the last is for degrees from about 1,400
NARROWEST = 64  # the fewest columns that wide features are put into
# Weights of the columns beside `side_by_side`. They were chosen by validation, and hardly matter.
LABELS, PRODUCTS = 1.0, 3.0
_WALKS = ("", "i", "o", "ii", "io", "oi", "oo")  # i: against the arrows, o: along them


def side_width(features: int) -> int:
    """Returns the number of columns of `side_by_side` if they all fit."""
    return len(_WALKS) * features + 2 * BUCKETS


def structure_width(features: int, classes: int, width: int) -> int:
    """Returns the number of columns of `structure_features`."""
    blocks = min(max(width, NARROWEST), side_width(features))
    return blocks + 4 * classes + _pair_count(features, classes)


def structure_features(graph: Graph, width: int) -> Tensor:
    """Returns `side_by_side`, `label_means` and `pairs`, [nodes, structure_width].

    Args:
        graph: The graph. Of its labels, those of training nodes count.
        width: The most columns of `side_by_side`, if it is at least NARROWEST.
    """
    width = max(width, NARROWEST)
    blocks = graph.cached(("side by side", width), lambda: side_by_side(graph, width))
    return torch.cat([blocks, LABELS * label_means(graph), PRODUCTS * pairs(graph)], 1)


def side_by_side(graph: Graph, width: int) -> Tensor:
    """Returns features of nodes, of their neighbours and of these nodes' neighbours, side by side.

    The blocks are X, the means of X over the nodes that point to a node and over the nodes that it
    points to, and the four means of these means. The rows of each block have length 1, or 0
    without such neighbours. The columns of `degrees` follow. In undirected graphs, the blocks of
    both directions are equal.

    If the blocks do not fit into the width, each is put into random columns with random signs, and
    they are added up. Inner products of rows stay what they are, except for noise whose share is
    about 1/sqrt(width). The columns and signs are public: they depend on nothing but the sizes.

    Args:
        graph: The graph. Its edge weights count.
        width: The most columns of the result.

    Returns:
        [nodes, min(width, 7 features + 2 BUCKETS)].
    """
    room = width - 2 * BUCKETS
    x = normalize(graph.x)
    if side_width(graph.num_features) <= width:
        return torch.cat([*(_walked(graph, x, walk) for walk in _WALKS), degrees(graph)], 1)
    generator = torch.Generator().manual_seed(0)
    total = torch.zeros(graph.num_nodes, room)
    for walk in _WALKS:
        if graph.num_features > room:  # first the narrower matrix, then the products with it
            total += _walked(graph, _scattered(x, room, generator), walk)
        else:
            total += _scattered(_walked(graph, x, walk), room, generator)
    return torch.cat([total, degrees(graph)], 1)


def degrees(graph: Graph) -> Tensor:
    """Returns each node's number of neighbours in buckets, [nodes, 2 BUCKETS].

    The first half counts the nodes that point to a node, the second those that it points to.
    Each bucket is half a natural logarithm wide.
    """
    columns = []
    for view in _views(graph).values():
        count = view.propagate(torch.ones(graph.num_nodes, 1), "sum").flatten()
        bucket = (2 * count.log1p()).round().long().clamp(max=BUCKETS - 1)
        columns.append(one_hot(bucket, BUCKETS).float())
    return torch.cat(columns, 1)


def label_means(graph: Graph) -> Tensor:
    """Returns `labels_around` against the arrows and along them, [nodes, 4 classes]."""
    return torch.cat([labels_around(graph, reverse) for reverse in (False, True)], 1)


def labels_around(graph: Graph, reverse: bool = False) -> Tensor:
    """Returns the training labels around each node, without its own, [nodes, 2 classes].

    The columns are the means of one-hot training labels over the nodes that point to a node, and
    over the nodes that point to these. A neighbour that does not train counts as a row of zeros.

    Args:
        graph: The graph.
        reverse: Whether edges count in the other direction.
    """
    y, view = _train_labels(graph), _views(graph)["o" if reverse else "i"]
    first = view.propagate(y, "mean")
    back = view.cached("returns", lambda: _returning(view, torch.ones(graph.num_nodes, 1)))
    return torch.cat([first, view.propagate(first, "mean") - back * y], 1)


def meetings(graph: Graph) -> Tensor:
    """Returns which labels surround those neighbours that look a certain way.

    Column (f, c) of node i is the mean over its neighbours j of x_jf times the share of nodes with
    training label c among the neighbours of j. Node i itself does not count among these. In
    Minesweeper: how many known mines surround the neighbours that show "2".

    Returns:
        [nodes, features × classes].
    """
    y, x = _train_labels(graph), normalize(graph.x)
    met = _outer(x, graph.propagate(y, "mean"))
    return graph.propagate(met, "mean") - _outer(_returning(graph, x), y)


def pairs(graph: Graph) -> Tensor:
    """Returns what a linear model of few features lacks: `meetings`, and products of columns.

    The columns that are multiplied with each other are the features, their means over one and two
    hops, the labels at one and two hops, and `meetings`, all against the arrows. No column depends
    on the node's own label.

    Returns:
        [nodes, v + v(v-1)/2] with v = 3 features + 2 classes + features × classes. No columns if
        these are more than PAIRS, as for bag-of-words features.
    """
    if not _pair_count(graph.num_features, graph.num_classes):
        return torch.zeros(graph.num_nodes, 0)
    count = _single_count(graph.num_features, graph.num_classes)
    x = normalize(graph.x)
    means = [_walked(graph, x, walk) for walk in ("", "i", "ii")]
    base = torch.cat([*means, labels_around(graph), meetings(graph)], 1)
    one, other = torch.triu_indices(count, count, 1)
    return torch.cat([base, base[:, one] * base[:, other]], 1)


def _single_count(features: int, classes: int) -> int:
    return 3 * features + 2 * classes + features * classes


def _pair_count(features: int, classes: int) -> int:
    count = _single_count(features, classes)
    count = count * (count + 1) // 2
    return count if count <= PAIRS else 0


def _views(graph: Graph) -> dict[str, Graph]:
    """Returns the graph, and the graph with every edge reversed."""

    def reverse() -> Graph:
        # Without labels and masks, because graphs with other labels share the cache.
        return Graph(
            graph.x,
            graph.edge_index.flip(0),
            torch.full_like(graph.y, -1),
            graph.num_classes,
            edge_weight=graph.edge_weight,
        )

    return {"i": graph, "o": graph.cached("reversed", reverse)}


def _walked(graph: Graph, h: Tensor, walk: str) -> Tensor:
    """Returns the means of h along a walk, with rows of length 1 or 0."""
    views = _views(graph)
    for step in reversed(walk):
        h = views[step].propagate(h, "mean")
    return normalize(h)


def _scattered(h: Tensor, width: int, generator: torch.Generator) -> Tensor:
    """Returns h with its columns at random places of a wider or narrower matrix, signs random."""
    columns = h.shape[1]
    if columns <= width:
        place = torch.randperm(width, generator=generator)[:columns]
    else:
        place = torch.randint(0, width, (columns,), generator=generator)
    signs = torch.randint(0, 2, (columns,), generator=generator) * 2.0 - 1
    return torch.zeros(len(h), width).index_add_(1, place, h * signs)


def _train_labels(graph: Graph) -> Tensor:
    """Returns one-hot labels of the training nodes and zeros for others, [nodes, classes]."""
    return one_hot(graph.y.clamp(min=0), graph.num_classes).float() * graph.train[:, None]


def _returning(graph: Graph, x: Tensor) -> Tensor:
    """Returns Σ_j A_ij x_j A_ji: what A diag(x) A brings back to node i. A is "mean"."""
    from scipy.sparse import csr_matrix  # a tenth of a second, which not every command needs

    a = graph.adjacency("mean")
    matrix = csr_matrix((a.values.numpy(), a.indices.numpy(), a.offsets.numpy()), a.shape)
    matrix.sum_duplicates()
    return torch.from_numpy(matrix.multiply(matrix.T).tocsr() @ x.numpy())


def _outer(a: Tensor, b: Tensor) -> Tensor:
    """Returns the products of each column of a with each column of b, row by row."""
    return (a[:, :, None] * b[:, None, :]).flatten(1)
