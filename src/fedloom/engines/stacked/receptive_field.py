"""Receptive fields: which rows of which matrices a pass through a layered model needs.

A layer computes Σ_j A_j (h W_j) + b. `layers_of` describes a model in these terms. Training needs
the logits of training nodes only. The layer before is needed at their neighbours, and so on. A
`Plan` holds the rows that each layer computes, for all clients of a group, and the parts of the
adjacency matrices between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from fedloom.core.shared_rows import Sharing
from fedloom.data.sparse import Sparse
from fedloom.engines.stacked.graphs import GraphStack
from fedloom.engines.stacked.matmul import membership
from fedloom.nn.architectures import GCN, MLP, SAGE, SGC
from fedloom.nn.layers import Convolution, Dense, MeanNeighbour
from fedloom.nn.model import Model
from fedloom.nn.smoothing import caching_pays, polynomial, power

# ---- models as layers ----


class Term(NamedTuple):
    """A summand A (h W) of a layer.

    Args:
        kinds: The adjacency matrices whose product is A. Without any, A is the identity.
        weight: The name of W.
    """

    kinds: tuple[str, ...]
    weight: str


class Layer(NamedTuple):
    """A layer: Σ_j A_j (h W_j) + b, and ReLU if `relu`."""

    terms: tuple[Term, ...]
    bias: str
    relu: bool


# What each kind of layer multiplies: the matrix A, and the name of W.
_TERMS: dict[type, tuple[tuple[tuple[str, ...], str], ...]] = {
    Dense: (((), "weight"),),
    Convolution: ((("sym",), "weight"),),
    MeanNeighbour: (((), "weight"), (("mean",), "neighbour")),
}


def layers_of(model: Model) -> tuple[Layer, ...] | None:
    """Returns the layers of an MLP, GCN, GraphSAGE or SGC for nodes; None for other models."""
    if type(model) not in (MLP, GCN, SAGE, SGC):
        return None
    if model.task != "node" or model.norm is not None or "jk" in model.spec.options:
        return None
    modules = {f"layers.{k}": module for k, module in enumerate(model.layers)}
    modules["classifier"] = model.classifier
    found = []
    for name, module in modules.items():
        terms = [Term(kinds, f"{name}.{weight}") for kinds, weight in _TERMS[type(module)]]
        inner = name != "classifier"
        if inner and type(model) is SGC:
            terms = [Term(("sym",) * model.spec.layers, term.weight) for term in terms]
        found.append(Layer(tuple(terms), f"{name}.bias", inner and type(model) is not SGC))
    return tuple(found)


# ---- rows ----


class Rows:
    """Some nodes of a graph stack, client by client.

    If clients have about equally many rows, each gets exactly as many as the largest, so that one
    batched product serves all. The rows that are added have no edges: nothing depends on them.

    Attributes:
        nodes: The node of each row; 0 for an added row, [rows].
        real: Which rows are not added, [rows] bool.
        owner: The client of each row, [rows].
        first_node: The first node of that client, [rows].
        num_nodes: The number of its nodes, [rows].
        place: The row of each node; -1 if it has none, [nodes].
        sizes: The number of rows of each client.
        complete: Whether the rows are all nodes in order.
    """

    MANY = 4  # clients, from which on a batched product is faster than a product per client
    ADDED = 0.5  # the largest share of added rows

    def __init__(self, needed: Tensor, sizes: Sequence[int]):
        starts = torch.tensor([0, *sizes]).cumsum(0)
        totals = torch.cat([torch.zeros(1, dtype=torch.int64), needed.cumsum(0)])
        counts = totals[starts[1:]] - totals[starts[:-1]]
        chosen = needed.nonzero().flatten()
        width = int(counts.max())
        padded = len(counts) >= self.MANY and len(chosen) >= (1 - self.ADDED) * width * len(counts)
        self.place = torch.full((len(needed),), -1)
        if padded and width:
            owner = torch.repeat_interleave(torch.arange(len(counts)), counts)
            first = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)[:-1]])
            at = owner * width + torch.arange(len(chosen)) - first[owner]
            self.nodes = torch.zeros(width * len(counts), dtype=torch.int64)
            self.nodes[at] = chosen
            self.real = torch.zeros(len(self.nodes), dtype=torch.bool)
            self.real[at] = True
            self.place[chosen] = at
            counts = torch.full_like(counts, width)
        else:
            self.nodes = chosen
            self.real = torch.ones(len(chosen), dtype=torch.bool)
            self.place[chosen] = torch.arange(len(chosen))
        self.sizes: list[int] = counts.tolist()
        self.owner = torch.repeat_interleave(torch.arange(len(counts)), counts)
        self.first_node = starts[self.owner]
        self.num_nodes = torch.tensor(sizes)[self.owner]
        self.complete = len(self.nodes) == len(needed) and bool(self.real.all())

    @cached_property
    def membership(self) -> Sparse:
        """The matrix [clients, rows] that says which rows belong to a client."""
        return membership(self.sizes)

    def __len__(self) -> int:
        return len(self.nodes)


def restricted(matrix: Sparse, rows: Rows, columns: Tensor, width: int) -> Sparse:
    """Returns some rows of a matrix, with other columns.

    Args:
        matrix: The matrix.
        rows: The rows to take. Added rows are empty.
        columns: The new column of each entry of the matrix, [nnz].
        width: The new number of columns.
    """
    offsets = matrix.offsets.long()
    counts = torch.where(rows.real, offsets[rows.nodes + 1] - offsets[rows.nodes], 0)
    ends = counts.cumsum(0)
    entries = torch.arange(int(ends[-1]) if len(ends) else 0)
    entries += torch.repeat_interleave(offsets[rows.nodes] - ends + counts, counts)
    owner = torch.repeat_interleave(torch.arange(len(rows)), counts)
    return Sparse.from_edges(owner, columns[entries], matrix.values[entries], (len(rows), width))


def reached(matrix: Sparse, rows: Rows) -> Tensor:
    """Returns which columns of a matrix have entries in the given rows, [columns] bool."""
    chosen = torch.zeros(matrix.shape[0], dtype=torch.bool)
    chosen[rows.nodes[rows.real]] = True
    found = torch.zeros(matrix.shape[1], dtype=torch.bool)
    found[matrix.indices.long()[chosen[matrix.rows]]] = True
    return found


# ---- plans ----


class Plan:
    """The rows of every layer, and the matrices between them, for one graph stack.

    Attributes:
        layers: The layers of the model.
        rows: The rows that each layer computes. The last are those of the logits.
        inputs: The rows of the features that the first layer needs.
        operators: For each layer and term, the matrices that multiply, the first one first. In the
            first layer they are empty if `smoothed` has the product.
        smoothed: For each term of the first layer, A X at the layer's rows. None: features are
            sparse, and A (X W) is faster.
    """

    def __init__(self, layers: Sequence[Layer], stack: GraphStack, needed: Tensor):
        self.layers, self.stack = layers, stack
        self.operators: list[list[list[Sparse]]] = []
        self.rows: list[Rows] = []
        self.smoothed: list[Tensor] | None = None
        hops = max(len(term.kinds) for term in layers[0].terms)
        dense = stack.sparse_x is None or (hops > 0 and caching_pays(stack, hops))
        below = Rows(needed, stack.sizes)
        for k, layer in reversed(list(enumerate(layers))):
            above = below
            self.rows.insert(0, above)
            if k == 0 and dense:
                self.smoothed = [self._features(term.kinds, above) for term in layer.terms]
                self.operators.insert(0, [[] for _ in layer.terms])
                continue
            below = self._below(layer, above)
            self.operators.insert(0, [self._chain(t.kinds, above, below) for t in layer.terms])
        self.inputs = below
        self._projections: dict[Sharing | None, Sparse] = {}

    def _features(self, kinds: tuple[str, ...], rows: Rows) -> Tensor:
        """Returns A X at some rows; the graph stack caches A X at all rows."""
        stack, kind = self.stack, kinds[0] if kinds else "sym"
        key = ("smoothed", power(len(kinds))) if kind == "sym" else ("smoothed", kinds)
        whole: Tensor = (
            stack.cached(key, lambda: polynomial(stack, stack.x, power(len(kinds)), kind))
            if kinds
            else stack.x
        )
        return whole if rows.complete else whole.index_select(0, rows.nodes)

    def _below(self, layer: Layer, above: Rows) -> Rows:
        """Returns the rows that a layer needs of the layer below."""
        needed = torch.zeros(self.stack.num_nodes, dtype=torch.bool)
        for term in layer.terms:
            rows = above
            for kind in reversed(term.kinds):
                rows = Rows(reached(self.stack.adjacency(kind), rows), self.stack.sizes)
            needed[rows.nodes[rows.real]] = True
        return Rows(needed, self.stack.sizes)

    def _chain(self, kinds: tuple[str, ...], above: Rows, below: Rows) -> list[Sparse]:
        """Returns the parts of the matrices of a term, from the rows below to those above."""
        if not kinds:
            if above.complete and below.complete:
                return []
            row = above.real.nonzero().flatten()
            column = below.place[above.nodes[row]]
            shape = (len(above), len(below))
            return [Sparse.from_edges(row, column, torch.ones(len(row)), shape)]
        chain: list[Sparse] = []
        rows = above
        for left, kind in reversed(list(enumerate(kinds))):
            matrix = self.stack.adjacency(kind)
            lower = below if left == 0 else Rows(reached(matrix, rows), self.stack.sizes)
            if rows.complete and lower.complete:
                chain.insert(0, matrix)
            else:
                columns = lower.place[matrix.indices.long()]
                chain.insert(0, restricted(matrix, rows, columns, len(lower)))
            rows = lower
        return chain

    @cached_property
    def owned(self) -> Tensor:
        """Which features each client has in the rows that it needs, [clients, features] bool."""
        x, features = self.stack.sparse_x, self.stack.num_features
        assert x is not None
        needed = restricted(x, self.inputs, x.indices.long(), features)
        found = torch.zeros(len(self.stack.parts), features, dtype=torch.bool)
        found[self.inputs.owner[needed.rows], needed.indices.long()] = True
        return found

    @cached_property
    def sharing(self) -> Sharing:
        """The sharing in which clients own the rows of W that belong to features they have."""
        return Sharing.of_owned(self.owned)

    def projection(self, sharing: Sharing | None) -> Sparse:
        """Returns the sparse features, with the stored rows of W as columns.

        sharing: which stored row each client uses. None: W is [clients, features, width].
        """
        if sharing not in self._projections:
            x, stack = self.stack.sparse_x, self.stack
            assert x is not None
            features, clients = stack.num_features, len(stack.parts)
            owner = torch.repeat_interleave(torch.arange(clients), torch.tensor(stack.sizes))
            if sharing is None:
                columns, stored = owner[x.rows] * features + x.indices, clients * features
            else:
                columns, stored = sharing.index[owner[x.rows], x.indices.long()], sharing.stored
            self._projections[sharing] = restricted(x, self.inputs, columns, stored)
        return self._projections[sharing]
