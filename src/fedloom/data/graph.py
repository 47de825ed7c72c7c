"""Graph: nodes, edges and labels of one party or of a whole dataset."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, fields, replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, ClassVar, Literal, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedloom.data.display import counted, html_table
from fedloom.data.matmul import matmul
from fedloom.data.sparse import Sparse
from fedloom.errors import DataError, unknown

if TYPE_CHECKING:
    from fedloom.data.encoding import Encoding

T = TypeVar("T")
P = ParamSpec("P")
Task = Literal["node", "graph"]
FLOWS = ("forward", "reversed", "both")
WITH_LOOPS = ("sym", "row")  # the kinds of adjacency with self-loops
# Below this share of non-zero entries, a product with sparse features is faster than a dense one.
# Bag-of-words features have about 1 %.
SPARSE_FEATURES_BELOW = 0.15


@dataclass(frozen=True, eq=False)
class Graph:
    """A frozen record of nodes, edges and labels: a whole dataset or one party's part of it.

    An *item* is the unit of prediction. It is a node or, if `batch` is given, one of many small
    graphs that are stored as one disjoint union. Undirected edges are stored in both directions.
    Messages flow from row 0 of `edge_index` (source) to row 1 (target), as in PyG.

    Attributes:
        x: Node features, [nodes, features] float32.
        edge_index: Edges, [2, edges] int64.
        y: Labels, [items] int64. -1 stands for unknown or hidden.
        num_classes: Number of classes.
        train: Whether an item trains, [items] bool. The default is False for all items.
        val: Whether an item validates, [items] bool. The default is False for all items.
        test: Whether an item tests, [items] bool. The default is False for all items.
        edge_weight: Edge weights, [edges] float32. None: all weights are 1.
        node_id: Each node's number in the whole graph, [nodes] int64. The default is its position.
        cross_edges: The edges that the partition cut and that this party may know, [4, cut] int64.
            The rows are: own node (local number), remote node (its node_id), remote owner (client
            number), direction (0: own to remote, 1: remote to own). The default is none.
        batch: The item (graph) of each node, [nodes] int64, ascending. None: items are nodes.
        name: The name in error messages and records.
        ids: The items' own names, [items] text, such as the account numbers of a bank. They stay
            with the graph and never travel. None: the numbers in `node_id`, or of the graphs.
        class_names: The classes' own names, in the order of their numbers. Empty: the numbers.
        feature_names: The names of the columns of `x`. Empty: unnamed.
        encoding: What made `x` of the raw columns of a table; None if nothing did.
        seconds_loading: How long it took to read the graph, for the record; 0 if it was not read.
    """

    x: Tensor
    edge_index: Tensor
    y: Tensor
    num_classes: int
    train: Tensor = None  # type: ignore[assignment]
    val: Tensor = None  # type: ignore[assignment]
    test: Tensor = None  # type: ignore[assignment]
    edge_weight: Tensor | None = None
    node_id: Tensor = None  # type: ignore[assignment]
    cross_edges: Tensor = None  # type: ignore[assignment]
    batch: Tensor | None = None
    name: str = "graph"
    ids: np.ndarray | None = None
    class_names: tuple[str, ...] = ()
    feature_names: tuple[str, ...] = ()
    encoding: Encoding | None = None
    seconds_loading: float = 0.0
    transient: ClassVar[bool] = False  # whether the graph is used only once and caching is useless
    # Results that depend on this graph (see `cached`). It is not an argument of the constructor,
    # because `replace` must never pass it to a graph with other edges.
    _cache: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        # The constructor fills in defaults and checks nothing. `check` does that.
        empty = torch.zeros(len(self.y), dtype=torch.bool)
        defaults: dict[str, Tensor] = {
            "train": empty,
            "val": empty,
            "test": empty,
            "node_id": torch.arange(len(self.x)),
            "cross_edges": torch.zeros(4, 0, dtype=torch.int64),
        }
        for key, value in defaults.items():
            if getattr(self, key) is None:
                object.__setattr__(self, key, value)

    def __init_subclass__(cls) -> None:
        # `@dataclass` would give a subclass a repr with every number of every tensor.
        super().__init_subclass__()
        if "__repr__" not in vars(cls):
            cls.__repr__ = Graph.__repr__  # type: ignore[method-assign]

    # ---- how it shows itself ----
    def __repr__(self) -> str:
        try:
            about = f"{self._facts()}; {self._parts()}"
        except (AttributeError, LookupError, TypeError, ValueError):
            about = "not valid, check() says why"
        return f"{type(self).__name__}({self.name!r}: {about})"

    def _repr_html_(self) -> str:
        rows = [(part, int(getattr(self, part).sum())) for part in ("train", "val", "test")]
        rows.append(("without a label", int((self.y < 0).sum())))
        unit = "nodes" if self.batch is None else "graphs"
        names = ", ".join(self.class_names)
        return html_table(
            f"{type(self).__name__} {self.name!r}",
            ("part", unit),
            rows,
            f"{self._facts()}{f': {names}' if names else ''}",
        )

    def _facts(self) -> str:
        graphs = [] if self.batch is None else [counted(self.num_items, "graph")]
        counts = ("node", self.num_nodes), ("edge", self.num_edges), ("feature", self.num_features)
        sizes = [counted(count, word) for word, count in (*counts, ("class", self.num_classes))]
        return ", ".join([*graphs, *sizes])

    def _parts(self) -> str:
        parts = (f"{int(getattr(self, part).sum()):,} {part}" for part in ("train", "val", "test"))
        return ", ".join(parts)

    # ---- sizes ----
    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.x)

    @property
    def num_edges(self) -> int:
        """Number of stored directed edges. An undirected edge counts twice."""
        return self.edge_index.shape[1]

    @property
    def num_features(self) -> int:
        """Number of node features."""
        return self.x.shape[1]

    @property
    def num_items(self) -> int:
        """Number of items: nodes, or graphs in a graph-level task."""
        return len(self.y)

    @property
    def task(self) -> Task:
        """The unit of prediction, "node" or "graph"."""
        return "node" if self.batch is None else "graph"

    def digest(self) -> str:
        """Returns a short text that identifies the data: every tensor of the graph."""
        found = hashlib.sha256(f"{self.name} {self.num_classes}".encode())
        for f in fields(Graph):
            if isinstance(tensor := getattr(self, f.name), Tensor):
                found.update(f"{f.name} {tensor.dtype} {list(tensor.shape)}".encode())
                found.update(tensor.contiguous().numpy().data)
        return found.hexdigest()[:16]

    # ---- names ----
    @property
    def item_ids(self) -> np.ndarray:
        """The items' own names; without them, the numbers of the nodes or small graphs."""
        if self.ids is not None:
            return self.ids
        return self.node_id.numpy() if self.batch is None else np.arange(self.num_items)

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes; without them, their numbers as text."""
        return self.class_names or tuple(str(c) for c in range(self.num_classes))

    # ---- products that models use, computed once per graph ----
    def cached(self, key: Hashable, make: Callable[[], T]) -> T:
        """Returns the result of `make()`, which the graph caches under `key`.

        The result may depend on nodes, features and edges, but not on labels or masks.
        """
        if key not in self._cache:
            self._cache[key] = make()
        result: T = self._cache[key]
        return result

    def adjacency(self, kind: str = "sym") -> Sparse:
        """Returns the adjacency as a matrix that multiplies node features.

        A row belongs to the receiving node. The kinds with I have exactly one self-loop per node,
        which replaces the self-loops of the data. The other kinds drop the self-loops of the data.

        | kind | matrix |
        |---|---|
        | "sym" | D̃^-1/2 (A+I) D̃^-1/2 |
        | "row" | D̃^-1 (A+I) |
        | "mean" | D^-1 A |
        | "sum" | A |
        | "sym-bare" | D^-1/2 A D^-1/2 |
        """
        return self.cached(("adjacency", kind), lambda: _normalised(self, kind))

    @property
    def sparse_x(self) -> Sparse | None:
        """The features as a sparse matrix if that makes products faster, else None."""
        return self.cached("features", self._as_sparse)

    def _as_sparse(self) -> Sparse | None:
        filled = torch.count_nonzero(self.x).item() / max(self.x.numel(), 1)
        return Sparse.from_dense(self.x) if filled < SPARSE_FEATURES_BELOW else None

    def project(self, weight: Tensor) -> Tensor:
        """Returns x @ weight: [features, width] gives [nodes, width]."""
        sparse = self.sparse_x
        return self.x @ weight if sparse is None else sparse @ weight

    def propagate(self, h: Tensor, kind: str = "sym") -> Tensor:
        """Returns adjacency(kind) @ h."""
        return self.adjacency(kind) @ h

    # Models use parameters only in `project` and in the next three methods. A stack of graphs
    # (`fedloom.engines.stacked`) overrides these, because it has one parameter per graph.
    def matmul(self, h: Tensor) -> Callable[[Tensor], Tensor]:
        """Returns the function W ↦ h W. The rows of h are this graph's nodes or items."""
        return partial(matmul, h)

    def add_bias(self, h: Tensor, vector: Tensor) -> Tensor:
        """Adds a vector [width] to every row of h, in place, and returns h."""
        return h.add_(vector)

    def expand(self, parameter: Tensor, h: Tensor) -> Tensor:
        """Returns a vector [width] in a shape that broadcasts over the rows of h."""
        return parameter

    # ---- derived graphs ----
    def with_flow(self, way: str) -> Graph:
        """Returns the graph with another direction of its edges.

        way: "forward" keeps the edges, "reversed" reverses them, "both" contains each edge once in
        both directions.
        """
        if way not in FLOWS:
            raise unknown("flow", way, FLOWS)
        if way == "forward":
            return self
        if self.cross_edges.shape[1]:
            raise DataError(
                f"graph {self.name!r}: flow: turn the edges round before the graph is divided; "
                "this one has cross_edges"
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
        """Returns the graph with every label outside the training set set to -1."""
        hidden = replace(self, y=torch.where(self.train, self.y, -1))
        # Nodes and edges are the same, so cached results stay valid.
        object.__setattr__(hidden, "_cache", self._cache)
        return hidden

    def subgraph(self, keep: Tensor) -> Graph:
        """Returns the induced subgraph of some nodes of a node-level graph.

        Edges with one end outside are dropped. A partitioner adds them to `cross_edges` if the
        party may know them.

        keep: a bool mask [nodes], or the nodes' numbers.
        """
        if self.batch is not None:
            raise DataError("subgraph: the graph contains many small graphs; use select_items")
        index = keep.nonzero().flatten() if keep.dtype == torch.bool else keep
        position = torch.full((self.num_nodes,), -1, dtype=torch.int64)
        position[index] = torch.arange(len(index))
        ends = position[self.edge_index]
        inside = (ends >= 0).all(0)
        own = position[self.cross_edges[0]]
        cross = torch.cat([own[None], self.cross_edges[1:]])[:, own >= 0]
        return replace(
            self,
            x=self.x[index],
            edge_index=ends[:, inside],
            y=self.y[index],
            train=self.train[index],
            val=self.val[index],
            test=self.test[index],
            edge_weight=None if self.edge_weight is None else self.edge_weight[inside],
            node_id=self.node_id[index],
            cross_edges=cross,
            ids=None if self.ids is None else self.ids[index.numpy()],
        )

    def select_items(self, keep: Tensor) -> Graph:
        """Returns some items: nodes with their induced edges, or whole small graphs.

        keep: a bool mask [items], or the items' numbers.
        """
        index = keep.nonzero().flatten() if keep.dtype == torch.bool else keep
        if self.batch is None:
            return self.subgraph(index)
        place = torch.full((self.num_items,), -1, dtype=torch.int64)
        place[index] = torch.arange(len(index))
        # Nodes keep their order inside an item. Items take the order of `index`, so that `batch`
        # stays ascending.
        nodes = torch.argsort(
            torch.where(place[self.batch] >= 0, place[self.batch], len(index)), stable=True
        )
        nodes = nodes[: int((place[self.batch] >= 0).sum())]
        unlabelled = torch.full((self.num_nodes,), -1)
        none = torch.zeros(self.num_nodes, dtype=torch.bool)
        flat = replace(self, batch=None, y=unlabelled, train=none, val=none, test=none, ids=None)
        flat = flat.subgraph(nodes)
        return replace(
            flat,
            batch=place[self.batch][nodes],
            y=self.y[index],
            train=self.train[index],
            val=self.val[index],
            test=self.test[index],
            ids=None if self.ids is None else self.ids[index.numpy()],
        )

    def training_view(self, inductive: bool) -> Graph:
        """Returns what training may see: only labels of training items.

        inductive: whether training also sees only the training items themselves.
        """
        return (self.select_items(self.train) if inductive else self).hide_labels()

    # ---- checks ----
    def check(self) -> Graph:
        """Returns the graph, or raises a DataError that names the graph and the wrong field."""
        n, where = self.num_nodes, f"graph {self.name!r}"
        if n == 0:
            raise DataError(f"{where}: x is empty: a graph needs at least one node")
        if self.x.dim() != 2 or self.x.dtype != torch.float32:
            raise DataError(
                f"{where}: x must be [nodes, features] float32, "
                f"got {list(self.x.shape)} {self.x.dtype}"
            )
        # If the sum is finite, all entries are. Checking each entry of wide features takes twenty
        # times as long.
        if not self.x.sum().isfinite() and not torch.isfinite(self.x).all():
            row = int((~torch.isfinite(self.x)).any(1).nonzero()[0])
            raise DataError(f"{where}: x has NaN or infinite values, first in node {row}")
        if (
            self.edge_index.dtype != torch.int64
            or self.edge_index.dim() != 2
            or self.edge_index.shape[0] != 2
        ):
            raise DataError(
                f"{where}: edge_index must be [2, edges] int64, "
                f"got {list(self.edge_index.shape)} {self.edge_index.dtype}"
            )
        if self.num_edges and (self.edge_index.min() < 0 or self.edge_index.max() >= n):
            bad = self.edge_index[(self.edge_index < 0) | (self.edge_index >= n)][0]
            raise DataError(
                f"{where}: edge_index holds {int(bad)}, out of range for {n} nodes "
                f"(valid: 0 to {n - 1})"
            )
        if self.y.dtype != torch.int64 or self.y.dim() != 1:
            raise DataError(
                f"{where}: y must be [items] int64, got {list(self.y.shape)} {self.y.dtype}"
            )
        if self.batch is None and len(self.y) != n:
            raise DataError(f"{where}: y has {len(self.y)} labels for {n} nodes")
        if self.num_classes < 1:
            raise DataError(f"{where}: num_classes is {self.num_classes}, must be at least 1")
        outside = (self.y < -1) | (self.y >= self.num_classes)
        if outside.any():
            item = int(outside.nonzero()[0])
            raise DataError(
                f"{where}: y[{item}] is {int(self.y[item])}, out of range "
                f"(valid: 0 to {self.num_classes - 1}, or -1 for unknown)"
            )
        masks = {"train": self.train, "val": self.val, "test": self.test}
        for key, mask in masks.items():
            if mask.dtype != torch.bool or mask.shape != self.y.shape:
                raise DataError(
                    f"{where}: {key} must be [{len(self.y)}] bool, "
                    f"got {list(mask.shape)} {mask.dtype}"
                )
            if (mask & (self.y < 0)).any():
                item = int((mask & (self.y < 0)).nonzero()[0])
                raise DataError(f"{where}: {key} contains item {item}, which has no label")
        for one, other in (("train", "val"), ("train", "test"), ("val", "test")):
            if (masks[one] & masks[other]).any():
                item = int((masks[one] & masks[other]).nonzero()[0])
                raise DataError(f"{where}: {one} and {other} overlap, first at item {item}")
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
                    f"{where}: batch must contain the graph of every node, [{n}] int64, "
                    f"ascending, 0 to {len(self.y) - 1}"
                )
        if self.edge_weight is not None:
            if self.edge_weight.dtype != torch.float32:
                raise DataError(
                    f"{where}: edge_weight must be [edges] float32, got {self.edge_weight.dtype}"
                )
            if self.edge_weight.dim() != 1 or len(self.edge_weight) != self.num_edges:
                raise DataError(
                    f"{where}: edge_weight has {len(self.edge_weight)} values "
                    f"for {self.num_edges} edges, must be one for each"
                )
            if not (torch.isfinite(self.edge_weight) & (self.edge_weight >= 0)).all():
                raise DataError(f"{where}: edge_weight must contain finite numbers, 0 or more")
        cut = self.cross_edges
        if cut.dtype != torch.int64 or cut.dim() != 2 or cut.shape[0] != 4:
            raise DataError(
                f"{where}: cross_edges must be [4, cut] int64, got {list(cut.shape)} {cut.dtype}"
            )
        if cut.numel() and (cut[0].min() < 0 or cut[0].max() >= n):
            raise DataError(f"{where}: cross_edges: own nodes must be 0 to {n - 1}")
        if ((cut[3] != 0) & (cut[3] != 1)).any():
            raise DataError(f"{where}: cross_edges: directions must be 0 or 1")
        if len(self.node_id) != n:
            raise DataError(f"{where}: node_id has {len(self.node_id)} values for {n} nodes")
        named = {
            "ids": (self.ids, len(self.y), "items"),
            "class_names": (self.class_names or None, self.num_classes, "classes"),
            "feature_names": (self.feature_names or None, self.num_features, "features"),
        }
        for key, (names, count, what) in named.items():
            if names is not None and len(names) != count:
                raise DataError(f"{where}: {key} has {len(names)} names for {count} {what}")
            if names is not None and key != "feature_names" and len(set(names)) != count:
                raise DataError(f"{where}: {key} has the same name twice")
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
    """Returns the entries of adjacency(kind), one per edge.

    Args:
        kind: The kind of adjacency.
        source: The edges' sources. The edges contain the self-loops of the kinds in `WITH_LOOPS`.
        target: The edges' targets.
        weight: The edges' weights.
        degree: The sum of the weights at each target node.
    """
    if kind in ("sym", "sym-bare"):
        scale = degree.clamp(min=1e-12).rsqrt().where(degree > 0, 0.0)
        # `index_select` has a faster gradient than indexing.
        return scale.index_select(0, target) * weight * scale.index_select(0, source)
    if kind in ("row", "mean"):
        return weight / degree.where(degree != 0, 1.0).index_select(0, target)
    if kind != "sum":
        raise ValueError(f"adjacency kind {kind!r}: valid are sym, row, mean, sum, sym-bare")
    return weight


def timed(read: Callable[P, Graph]) -> Callable[P, Graph]:
    """Decorator of a function that reads a graph: the graph says how long that took."""

    @wraps(read)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> Graph:
        began = time.perf_counter()
        graph = read(*args, **kwargs)
        object.__setattr__(graph, "seconds_loading", time.perf_counter() - began)
        return graph

    return wrapper
