"""Federation: the graphs of all parties. Roster: the public facts about them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from fedloom.data.display import counted, how_to_convert, html_table, shown
from fedloom.data.graph import Graph, Task
from fedloom.errors import DataError

if TYPE_CHECKING:
    from fedloom.data.encoding import Encoding

SHOWN = 20  # parties in a notebook's table


@dataclass(frozen=True)
class PartySize:
    """The size of a party's graph: nodes, items, and the items that train, validate and test."""

    name: str
    nodes: int
    items: int
    train: int
    val: int
    test: int

    @classmethod
    def of(cls, name: str, graph: Graph) -> PartySize:
        """Returns the counts of a party's graph."""
        return cls(
            name,
            graph.num_nodes,
            graph.num_items,
            *(int(getattr(graph, part).sum()) for part in ("train", "val", "test")),
        )


@dataclass(frozen=True)
class Roster:
    """The parties and the public facts about their data.

    A coordinator knows nothing else about a federation. The fields that are not listed here are
    those of `Federation`.

    Attributes:
        sizes: The size of each party's graph, in client order.
        knows_cross_edges: Whether some party knows an edge to another party's node.
    """

    sizes: tuple[PartySize, ...]
    num_features: int
    num_classes: int
    task: Task
    inductive: bool = False
    knows_cross_edges: bool = False
    about: Mapping[str, Any] = field(default_factory=dict)
    class_names: tuple[str, ...] = ()
    feature_names: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The parties' names, in client order."""
        return tuple(size.name for size in self.sizes)

    @property
    def num_clients(self) -> int:
        """Number of parties."""
        return len(self.sizes)

    @property
    def without_training(self) -> list[str]:
        """The parties without a training item. They may take part, but can only receive."""
        return [size.name for size in self.sizes if not size.train]


@dataclass(frozen=True, eq=False)
class Federation:
    """The parties' graphs and the public facts about them.

    Attributes:
        graphs: One graph per party, in client order.
        names: The parties' names. Random streams depend on the name, not on the position.
        whole: The graph before the partition, if there is one. Only the `central` baseline uses it.
        inductive: Whether training sees neither validation nor test items.
        about: Where the federation came from, for the record.
        seconds_loading: How long it took to load and divide the data, for the record. The default
            is what the graphs took.
    """

    graphs: tuple[Graph, ...]
    names: tuple[str, ...] = ()
    whole: Graph | None = None
    inductive: bool = False
    about: Mapping[str, Any] = field(default_factory=dict)
    seconds_loading: float = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        object.__setattr__(self, "graphs", _as_graphs(self.graphs))
        if self.seconds_loading is None:
            took = sum(graph.seconds_loading for graph in self.graphs)
            object.__setattr__(self, "seconds_loading", took)
        object.__setattr__(self, "names", tuple(self.names))
        if not self.names:
            object.__setattr__(self, "names", tuple(str(k) for k in range(len(self.graphs))))

    # ---- how it shows itself ----
    def __repr__(self) -> str:
        nodes = counted(sum(graph.num_nodes for graph in self.graphs), "node")
        parts = ", ".join(
            f"{sum(int(getattr(graph, part).sum()) for graph in self.graphs):,} {part}"
            for part in ("train", "val", "test")
        )
        return f"Federation({self._title()}, {nodes}, {self._facts()}; {parts})"

    def _repr_html_(self) -> str:
        headings = ("client", "nodes", "edges", "train", "val", "test")
        sizes = [PartySize.of(n, g) for n, g in zip(self.names, self.graphs, strict=True)]
        rows: list[tuple[object, ...]] = [
            (s.name, s.nodes, g.num_edges, s.train, s.val, s.test)
            for s, g in zip(sizes[:SHOWN], self.graphs, strict=False)
        ]
        more = len(sizes) - len(rows)
        note = f"{self._facts()}{f'; {more:,} more clients' if more else ''}"
        return html_table(f"Federation {self._title()}", headings, rows, note)

    def _title(self) -> str:
        by = f" by {self.about['partition']}" if self.about.get("partition") else ""
        name = self.about.get("dataset") or (self.graphs[0].name if self.graphs else "")
        return f"{name!r}: {counted(self.num_clients, 'client')}{by}"

    def _facts(self) -> str:
        if not self.graphs:
            return "no graphs"
        counts = ("feature", self.num_features), ("class", self.num_classes)
        return ", ".join(counted(count, word) for word, count in counts)

    @property
    def num_clients(self) -> int:
        """Number of parties."""
        return len(self.graphs)

    @property
    def num_features(self) -> int:
        """Number of node features. It is the same for every party."""
        return self.graphs[0].num_features

    @property
    def num_classes(self) -> int:
        """Number of classes over all parties."""
        return self.graphs[0].num_classes

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes' own names, in the order of their numbers. Empty: unnamed."""
        return next((g.class_names for g in self.graphs if g.class_names), ())

    @property
    def feature_names(self) -> tuple[str, ...]:
        """The names of the features. Empty: unnamed."""
        return next((g.feature_names for g in self.graphs if g.feature_names), ())

    @property
    def encoding(self) -> Encoding | None:
        """What made the features of raw columns; None if nothing did."""
        return next((g.encoding for g in self.graphs if g.encoding is not None), None)

    @property
    def task(self) -> Task:
        """ "node" or "graph"."""
        return self.graphs[0].task

    def check(self) -> Federation:
        """Returns the federation, or raises a DataError that names the party and the field."""
        if not self.graphs:
            raise DataError("graphs is empty: a federation needs at least one party")
        if not len(set(self.names)) == len(self.names) == len(self.graphs):
            raise DataError(
                f"names must be {len(self.graphs)} different names, got {list(self.names)}"
            )
        for name in self.names:  # names of files and tensors contain them
            if not re.fullmatch(r"[\w.-]+", name) or name == "server":
                raise DataError(
                    f"names: {name!r} is not a valid name: use letters, digits, '_', '-' and '.', "
                    "and not 'server'"
                )
        first = self.graphs[0].check()
        for name, graph in zip(self.names, self.graphs, strict=True):
            graph.check()
            for fact in ("num_features", "num_classes", "task"):
                mine, theirs = getattr(graph, fact), getattr(first, fact)
                if mine != theirs:
                    raise DataError(
                        f"{fact} differs between parties: "
                        f"{self.names[0]!r} has {theirs}, {name!r} has {mine}"
                    )
            for fact in ("class_names", "feature_names"):
                mine, theirs = getattr(graph, fact), getattr(first, fact)
                if mine and theirs and mine != theirs:
                    raise DataError(
                        f"{fact} differ between parties: {self.names[0]!r} has "
                        f"{', '.join(theirs)}; {name!r} has {', '.join(mine)}"
                    )
            owners = graph.cross_edges[2].unique().tolist()
            for owner in owners:
                if not 0 <= owner < len(self.graphs) or self.names[owner] == name:
                    raise DataError(
                        f"cross_edges of {name!r}: owner {owner} is not another party's number "
                        f"(0 to {len(self.graphs) - 1}, not its own)"
                    )
        return self

    @property
    def roster(self) -> Roster:
        """The public facts, which a coordinator may know."""
        sizes = tuple(
            PartySize.of(name, graph) for name, graph in zip(self.names, self.graphs, strict=True)
        )
        knows = any(graph.cross_edges.shape[1] for graph in self.graphs)
        about = {"dataset": self.graphs[0].name, "clients": self.num_clients, **self.about}
        return Roster(
            sizes,
            self.num_features,
            self.num_classes,
            self.task,
            self.inductive,
            knows,
            about,
            self.class_names,
            self.feature_names,
        )

    @cached_property
    def digest(self) -> str:
        """A short text that identifies the data: names, graphs and masks."""
        found = hashlib.sha256(repr((self.names, self.inductive)).encode())
        for graph in self.graphs:
            found.update(graph.digest().encode())
        return found.hexdigest()[:16]

    def merged(self) -> Federation:
        """Returns a federation of one party with all data.

        It holds `whole` if that is known, else the disjoint union of the parties' graphs.
        """
        graph = self.whole if self.whole is not None else disjoint_union(self.graphs)
        return replace(self, graphs=(graph,), names=("all",), whole=None)


def _as_graphs(graphs: Any) -> tuple[Graph, ...]:
    """Returns the parties' graphs as a tuple. Raises a DataError that says what to give instead."""
    if isinstance(graphs, Graph):
        raise DataError(
            "Federation: graphs is one Graph, must be a list with a Graph for each party. To "
            "divide one graph among clients: fedloom.divide(graph, clients=10)"
        )
    if isinstance(graphs, Mapping):
        raise DataError(
            "Federation: graphs is a dict; give the graphs and their names: "
            "fedloom.Federation(list(graphs.values()), names=list(graphs))"
        )
    if isinstance(graphs, str) or not isinstance(graphs, Iterable):
        raise DataError(
            f"Federation: graphs is {shown(graphs)}, must be a list with a Graph for each party"
        )
    found = tuple(graphs)
    for k, graph in enumerate(found):
        if not isinstance(graph, Graph):
            raise DataError(
                f"Federation: graphs[{k}] is {shown(graph)}, must be a Graph{how_to_convert(graph)}"
            )
    return found


def disjoint_union(graphs: Iterable[Graph]) -> Graph:
    """Returns one graph that contains all given graphs, without edges between them."""
    parts = list(graphs)
    starts = torch.tensor([0, *(g.num_nodes for g in parts)]).cumsum(0)
    weights = [torch.ones(g.num_edges) if g.edge_weight is None else g.edge_weight for g in parts]
    batch = None
    if parts[0].batch is not None:
        items = torch.tensor([0, *(g.num_items for g in parts)]).cumsum(0)
        batch = torch.cat([g.batch + items[k] for k, g in enumerate(parts) if g.batch is not None])
    return Graph(
        x=torch.cat([g.x for g in parts]),
        edge_index=torch.cat([g.edge_index + starts[k] for k, g in enumerate(parts)], 1),
        y=torch.cat([g.y for g in parts]),
        num_classes=parts[0].num_classes,
        train=torch.cat([g.train for g in parts]),
        val=torch.cat([g.val for g in parts]),
        test=torch.cat([g.test for g in parts]),
        edge_weight=torch.cat(weights) if any(g.edge_weight is not None for g in parts) else None,
        node_id=torch.cat([g.node_id for g in parts]),
        batch=batch,
        name=parts[0].name,
        class_names=parts[0].class_names,
        feature_names=parts[0].feature_names,
        encoding=parts[0].encoding,
    )
