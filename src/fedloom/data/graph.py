"""Graph: nodes, edges and labels of one party, or of a whole dataset."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from fedloom.data.matmul import matmul
from fedloom.data.sparse import Sparse
from fedloom.errors import DataError, unknown

Task = Literal["node", "graph"]
FLOWS = ("forward", "reversed", "both")
WITH_LOOPS = ("sym", "row")  # the kinds of adjacency that every node is its own neighbour in
# Below this share of non-zero entries a product with sparse features beats the dense one (bag-of-words: about 1 %).
SPARSE_FEATURES_BELOW = 0.15


@dataclass(frozen=True, eq=False)
class Graph:
    """A frozen record of nodes, edges and labels: a whole dataset or one party's part of it.

    An *item* is what gets predicted: a node, or (when `batch` is given) one of many small graphs kept as one disjoint union.
    `y`, `train`, `val` and `test` have one entry per item. Undirected edges are stored in both directions; messages flow
    from row 0 of `edge_index` (source) to row 1 (target), as in PyG.
    """

    x: Tensor  # [nodes, features] float32
    edge_index: Tensor  # [2, edges] int64
    y: Tensor  # [items] int64, -1 = unknown or hidden
    num_classes: int
    train: Tensor = None  # type: ignore[assignment]  # [items] bool
    val: Tensor = None  # type: ignore[assignment]
    test: Tensor = None  # type: ignore[assignment]
    edge_weight: Tensor | None = None  # [edges] float32, None = all 1
    node_id: Tensor = None  # type: ignore[assignment]  # [nodes] int64: the node's number in the whole graph
    # Edges that the partition cut and this party may know, [4, cut]: own node (local number), remote node (its node_id),
    # remote owner (client number), direction (0 = own -> remote, 1 = remote -> own).
    cross_edges: Tensor = None  # type: ignore[assignment]
    batch: Tensor | None = (
        None  # [nodes] int64, ascending: which item (graph) a node belongs to; None = items are nodes
    )
    name: str = "graph"
    transient: ClassVar[bool] = False  # used once, so that caching pays for nothing
    # What was worked out from this very graph (`cached`). Not an argument: `replace` must never hand it to a graph with other edges.
    _cache: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        # Constructors only store: fill in what was left out, check nothing (that is `check`).
        blank = torch.zeros(len(self.y), dtype=torch.bool)
        defaults: dict[str, Tensor] = {
            "train": blank, "val": blank, "test": blank,
            "node_id": torch.arange(len(self.x)), "cross_edges": torch.zeros(4, 0, dtype=torch.int64),
        }  # fmt: skip
        for key, value in defaults.items():
            if getattr(self, key) is None:
                object.__setattr__(self, key, value)

    # ---- sizes ----
    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.x)

    @property
    def num_edges(self) -> int:
        """Number of stored (directed) edges: an undirected edge counts twice."""
        return self.edge_index.shape[1]

    @property
    def num_features(self) -> int:
        """Width of the node features."""
        return self.x.shape[1]

    @property
    def num_items(self) -> int:
        """Number of things to predict: nodes, or graphs in a graph-level task."""
        return len(self.y)

    @property
    def task(self) -> Task:
        """ "node" or "graph": what is predicted."""
        return "node" if self.batch is None else "graph"

    # ---- what models multiply with; made once per graph ----
    def cached(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make()` gives, kept on the graph under `key`: for what depends on nodes, features and edges alone, not on labels."""
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    def adjacency(self, kind: str = "sym") -> Sparse:
        """The adjacency as a matrix that multiplies node features: row = receiving node.

        kind: "sym" D̃^-1/2 (A+I) D̃^-1/2 · "row" D̃^-1 (A+I) · "mean" D^-1 A · "sum" A · "sym-bare" D^-1/2 A D^-1/2 (no self-loops).
        Self-loops of the data are replaced by the one of A+I, and dropped in the kinds without loops.
        """
        return self.cached(("adjacency", kind), lambda: _normalised(self, kind))

    @property
    def sparse_x(self) -> Sparse | None:
        """The features as a sparse matrix if they are sparse enough for that to be quicker, else None."""

        return self.cached("features", self._as_sparse)

    def _as_sparse(self) -> Sparse | None:
        filled = torch.count_nonzero(self.x).item() / max(self.x.numel(), 1)
        return Sparse.from_dense(self.x) if filled < SPARSE_FEATURES_BELOW else None

    def project(self, weight: Tensor) -> Tensor:
        """x @ weight, the quickest way: takes a [features, width] tensor, gives [nodes, width]."""
        sparse = self.sparse_x
        return self.x @ weight if sparse is None else sparse @ weight

    def propagate(self, h: Tensor, kind: str = "sym") -> Tensor:
        """adjacency(kind) @ h."""
        return self.adjacency(kind) @ h

    # A stack of graphs (`fedloom.engines.stacked`) has a parameter for each: models meet them in `project` and here, nowhere else.
    def matmul(self, h: Tensor) -> Callable[[Tensor], Tensor]:
        """W ↦ h W, for a tensor whose rows are this graph's nodes or items."""
        return partial(matmul, h)

    def add_bias(self, h: Tensor, vector: Tensor) -> Tensor:
        """h itself, with a vector [width] added to every row."""
        return h.add_(vector)

    def expand(self, parameter: Tensor, h: Tensor) -> Tensor:
        """A vector [width] in the form in which every row of h is multiplied with it."""
        return parameter

    # ---- derived graphs ----
    def flowing(self, way: str) -> Graph:
        """The graph with its edges as they are ("forward"), turned round ("reversed"), or both, each edge once; see `FLOWS`."""
        if way not in FLOWS:
            raise unknown("flow", way, FLOWS)
        if way == "forward":
            return self
        if self.cross_edges.shape[1]:
            raise DataError(
                f"graph {self.name!r}: flow: turn the edges round before the graph is divided, it has cross_edges"
            )
        weight = torch.ones(self.num_edges) if self.edge_weight is None else self.edge_weight
        ends = self.edge_index.flip(0)
        if way == "both":
            both = torch.cat([self.edge_index, ends], 1)
            _, first = np.unique((both[0] * self.num_nodes + both[1]).numpy(), return_index=True)
            ends, weight = both[:, first], torch.cat([weight, weight])[first]
        return replace(
            self, edge_index=ends, edge_weight=None if self.edge_weight is None else weight
        )

    def hide_labels(self) -> Graph:
        """The same graph with every label but the training ones set to -1: what training may see."""
        hidden = replace(self, y=torch.where(self.train, self.y, -1))
        object.__setattr__(
            hidden, "_cache", self._cache
        )  # same nodes and edges, so what was worked out still holds
        return hidden

    def subgraph(self, keep: Tensor) -> Graph:
        """The induced subgraph of the nodes in `keep` (bool mask or index tensor [nodes]); node-level graphs only.

        Edges with one end outside are dropped (a partitioner adds them to `cross_edges` if the party may know them).
        """
        if self.batch is not None:
            raise DataError("subgraph: the graph holds many small graphs; use select_items")
        index = keep.nonzero().flatten() if keep.dtype == torch.bool else keep
        position = torch.full((self.num_nodes,), -1, dtype=torch.int64)
        position[index] = torch.arange(len(index))
        ends = position[self.edge_index]
        inside = (ends >= 0).all(0)
        own = position[self.cross_edges[0]]
        cross = torch.cat([own[None], self.cross_edges[1:]])[:, own >= 0]
        return replace(
            self, x=self.x[index], edge_index=ends[:, inside], y=self.y[index],
            train=self.train[index], val=self.val[index], test=self.test[index],
            edge_weight=None if self.edge_weight is None else self.edge_weight[inside],
            node_id=self.node_id[index], cross_edges=cross,
        )  # fmt: skip

    def select_items(self, keep: Tensor) -> Graph:
        """The items in `keep` (bool mask or index tensor): nodes with their induced edges, or whole small graphs."""
        index = keep.nonzero().flatten() if keep.dtype == torch.bool else keep
        if self.batch is None:
            return self.subgraph(index)
        place = torch.full((self.num_items,), -1, dtype=torch.int64)
        place[index] = torch.arange(len(index))
        # Nodes keep their order inside an item; items take the order of `index`, so that `batch` stays ascending.
        nodes = torch.argsort(
            torch.where(place[self.batch] >= 0, place[self.batch], len(index)), stable=True
        )
        nodes = nodes[: int((place[self.batch] >= 0).sum())]
        unlabelled, nobody = (
            torch.full((self.num_nodes,), -1),
            torch.zeros(self.num_nodes, dtype=torch.bool),
        )
        flat = replace(
            self, batch=None, y=unlabelled, train=nobody, val=nobody, test=nobody
        ).subgraph(nodes)
        return replace(
            flat, batch=place[self.batch][nodes], y=self.y[index],
            train=self.train[index], val=self.val[index], test=self.test[index],
        )  # fmt: skip

    def training_view(self, inductive: bool) -> Graph:
        """What training may see: no label outside the training set and, if inductive, no item outside it either."""
        return (self.select_items(self.train) if inductive else self).hide_labels()

    # ---- checks ----
    def check(self) -> Graph:
        """Gives the graph back, or raises a DataError that says which field of which graph is wrong and how."""
        n, who = self.num_nodes, f"graph {self.name!r}"
        if n == 0:
            raise DataError(f"{who}: x is empty: a graph needs at least one node")
        if self.x.dim() != 2 or self.x.dtype != torch.float32:
            raise DataError(
                f"{who}: x must be [nodes, features] float32, got {list(self.x.shape)} {self.x.dtype}"
            )
        # A finite sum proves every entry finite; looking at each takes twenty times as long on wide features.
        if not self.x.sum().isfinite() and not torch.isfinite(self.x).all():
            row = int((~torch.isfinite(self.x)).any(1).nonzero()[0])
            raise DataError(f"{who}: x has NaN or infinite values, first in node {row}")
        if (
            self.edge_index.dtype != torch.int64
            or self.edge_index.dim() != 2
            or self.edge_index.shape[0] != 2
        ):
            raise DataError(
                f"{who}: edge_index must be [2, edges] int64, got {list(self.edge_index.shape)} {self.edge_index.dtype}"
            )
        if self.num_edges and (self.edge_index.min() < 0 or self.edge_index.max() >= n):
            bad = self.edge_index[(self.edge_index < 0) | (self.edge_index >= n)][0]
            raise DataError(
                f"{who}: edge_index holds {int(bad)}, out of range for {n} nodes (valid: 0 to {n - 1})"
            )
        if self.y.dtype != torch.int64 or self.y.dim() != 1:
            raise DataError(
                f"{who}: y must be [items] int64, got {list(self.y.shape)} {self.y.dtype}"
            )
        if self.batch is None and len(self.y) != n:
            raise DataError(f"{who}: y has {len(self.y)} labels for {n} nodes")
        if self.num_classes < 1:
            raise DataError(f"{who}: num_classes is {self.num_classes}, must be at least 1")
        outside = (self.y < -1) | (self.y >= self.num_classes)
        if outside.any():
            where = int(outside.nonzero()[0])
            raise DataError(
                f"{who}: y[{where}] is {int(self.y[where])}, out of range (valid: 0 to {self.num_classes - 1}, or -1 for unknown)"
            )
        masks = {"train": self.train, "val": self.val, "test": self.test}
        for key, mask in masks.items():
            if mask.dtype != torch.bool or mask.shape != self.y.shape:
                raise DataError(
                    f"{who}: {key} must be [{len(self.y)}] bool, got {list(mask.shape)} {mask.dtype}"
                )
            if (mask & (self.y < 0)).any():
                raise DataError(
                    f"{who}: {key} contains item {int((mask & (self.y < 0)).nonzero()[0])}, which has no label"
                )
        for one, other in (("train", "val"), ("train", "test"), ("val", "test")):
            if (masks[one] & masks[other]).any():
                where = int((masks[one] & masks[other]).nonzero()[0])
                raise DataError(f"{who}: {one} and {other} overlap, first at item {where}")
        if self.batch is not None:
            ascending = bool((self.batch[1:] >= self.batch[:-1]).all())
            shaped = self.batch.dtype == torch.int64 and self.batch.shape == (n,)
            if (
                not shaped
                or not ascending
                or self.batch.min() < 0
                or self.batch.max() >= len(self.y)
            ):
                raise DataError(
                    f"{who}: batch must give every node its graph, ascending, 0 to {len(self.y) - 1}"
                )
        if self.edge_weight is not None:
            if self.edge_weight.dtype != torch.float32:
                raise DataError(
                    f"{who}: edge_weight must be [edges] float32, got {self.edge_weight.dtype}"
                )
            if self.edge_weight.dim() != 1 or len(self.edge_weight) != self.num_edges:
                raise DataError(
                    f"{who}: edge_weight has {len(self.edge_weight)} values for {self.num_edges} edges, must be one for each"
                )
            if not (torch.isfinite(self.edge_weight) & (self.edge_weight >= 0)).all():
                raise DataError(
                    f"{who}: edge_weight must hold finite numbers, none of them negative"
                )
        cut = self.cross_edges
        if cut.dtype != torch.int64 or cut.dim() != 2 or cut.shape[0] != 4:
            raise DataError(
                f"{who}: cross_edges must be [4, cut] int64, got {list(cut.shape)} {cut.dtype}"
            )
        if cut.numel() and (cut[0].min() < 0 or cut[0].max() >= n):
            raise DataError(f"{who}: cross_edges: own nodes must be 0 to {n - 1}")
        if ((cut[3] != 0) & (cut[3] != 1)).any():
            raise DataError(f"{who}: cross_edges: directions must be 0 or 1")
        if len(self.node_id) != n:
            raise DataError(f"{who}: node_id has {len(self.node_id)} values for {n} nodes")
        return self


def _normalised(graph: Graph, kind: str) -> Sparse:
    source, target = graph.edge_index
    weight = torch.ones(graph.num_edges) if graph.edge_weight is None else graph.edge_weight
    proper = source != target
    source, target, weight = source[proper], target[proper], weight[proper]
    n = graph.num_nodes
    if kind in WITH_LOOPS:
        loop = torch.arange(n)
        source, target = torch.cat([source, loop]), torch.cat([target, loop])
        weight = torch.cat([weight, torch.ones(n)])
    degree = torch.zeros(n).index_add_(0, target, weight)
    return Sparse.from_edges(target, source, scaled(kind, source, target, weight, degree), (n, n))


def scaled(kind: str, source: Tensor, target: Tensor, weight: Tensor, degree: Tensor) -> Tensor:
    """The entries of adjacency(kind): takes edges (with loops, for a kind in `WITH_LOOPS`), their weights, and these summed at targets."""
    if kind in ("sym", "sym-bare"):
        scale = degree.clamp(min=1e-12).rsqrt().where(degree > 0, 0.0)
        return scale[target] * weight * scale[source]
    if kind in ("row", "mean"):
        return weight / degree.where(degree != 0, 1.0)[target]
    if kind != "sum":
        raise ValueError(f"adjacency kind {kind!r}: valid are sym, row, mean, sum, sym-bare")
    return weight
