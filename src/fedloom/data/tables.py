"""A folder of tables: nodes, edges and, for many small graphs, the graphs.

Tables are CSV, TSV or Parquet files, plain or with gzip (see `table_files`). A folder with tables
called nodes and edges needs nothing else. A `graph.toml` declares what is different. Every key has
a default, so the file may be empty:

    nodes = "nodes.csv"          # one row per node; the graph keeps their order
    edges = "edges.csv"          # one row per edge
    id = "id"                    # column of the node table: the node's name, text or number
    label = "label"              # column: texts or whole numbers; empty = unknown
    split = "split"              # column: train, val, test or empty
    features = "all other"       # columns: a list, a common prefix such as "f_", or "all other"
    source = "source"            # column of the edge table: id of the first end
    target = "target"            # column: id of the second end
    weight = "weight"            # column: the edge's weight
    aggregate = "sum"            # of repeated pairs: sum, mean, count or max
    directed = false             # false: every row stands for both directions
    num_classes = 7              # for labels that do not contain all classes
    class_names = ["a", "b"]     # numbers the names in this order
    name = "my graph"            # the default is the folder's name
    delimiter = ";"              # of text files; the default is what the files have

    [columns]                    # what feature columns hold; undeclared ones are detected
    country = "category"
    amount = {kind = "number", scale = "log", fill = "zero", indicator = true}

    [encoding]                   # defaults of all columns, and the hashing of categories
    scale = "standard"

    [edge_features]              # features of nodes that are computed from columns of edges
    total_sent = {column = "amount", by = "source", aggregate = "sum"}

The keys of a table may also be written as `[nodes]`, `[edges]` and `[graphs]`, with `file` for the
file's name. The label, split and weight columns may be missing from the tables unless graph.toml
names them.

Many small graphs: a table `graphs` has one row per graph (id, label, split), the node table has a
column `graph` with the id of the graph. Ids of nodes may repeat in other graphs if the edge table
has a column `graph`, too.
"""

from __future__ import annotations

import csv
import json
import logging
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedloom.data.columns import Table
from fedloom.data.edges import (
    AGGREGATES,
    degree_features,
    degree_names,
    merge_edges,
    merged,
    mirrored,
    per_node,
    require_aggregate,
)
from fedloom.data.encoding import IGNORE, Encoding
from fedloom.data.graph import Graph, timed
from fedloom.data.labels import classes_of, with_classes
from fedloom.data.raw_graph import RawGraph
from fedloom.data.table_files import TableFile, candidates
from fedloom.errors import ConfigError, DataError, unknown

LOG = logging.getLogger("fedloom.data")
SPLITS = ("train", "val", "test")
SIDES = ("source", "target", "both")


def is_folder_of_tables(path: Path) -> bool:
    """Returns whether a folder has a graph.toml, or tables called nodes and edges."""
    named = all(candidates(path, table) for table in ("nodes", "edges"))
    return (path / "graph.toml").is_file() or named


@timed
def from_folder(
    path: str | Path,
    encoding: Encoding | None = None,
    class_names: Sequence[str] | None = None,
    labels: bool = True,
) -> Graph:
    """Returns the graph of a folder of tables (see the top of this module).

    Feature columns that are numbers without gaps stay as they are, unless graph.toml declares
    something about them. Otherwise an encoding is fitted to the table. A table without feature
    columns gets the nodes' degrees. Errors name the file, the line and the column.

    Args:
        path: The folder, or its .toml file.
        encoding: A fitted encoding, for a table that is to be encoded like an earlier one: the
            `encoding` of that graph.
        class_names: The classes by name, in order. Labels of other classes are refused, and labels
            may be missing altogether.
        labels: Whether labels and split are read. Data to predict need none.
    """
    raw = read_folder(path, encoding, class_names, labels)
    if encoding is not None:
        return raw.encoded(encoding)
    return encoded_alone(raw)


def encoded_alone(raw: RawGraph) -> Graph:
    """Returns a graph with features that depend on its own table only."""
    names = [column.name for column in raw.declared.columns if column.kind != IGNORE]
    if not raw.table.columns:
        return with_degrees(raw)
    if raw.declares or not all(raw.table.is_complete(name) for name in names):
        graph = raw.encoded(raw.declared.fit(raw.table))
        assert graph.encoding is not None
        level = logging.INFO if raw.declares else logging.WARNING
        LOG.log(level, "%s: columns are encoded: %s", raw.table.source, graph.encoding.described())
        return graph
    x = np.empty((raw.num_nodes, len(names)), np.float32)
    for k, name in enumerate(names):
        x[:, k] = raw.table.columns[name]
    return raw.with_features(torch.from_numpy(x), tuple(names))


def with_degrees(raw: RawGraph) -> Graph:
    """Returns a graph whose features are the nodes' degrees, as those of built-in datasets."""
    LOG.info("%s: no feature columns: the features are the nodes' degrees", raw.table.source)
    return raw.with_features(degree_features(raw.edge_index, raw.num_nodes), degree_names())


def read_folder(
    path: str | Path,
    encoding: Encoding | None = None,
    class_names: Sequence[str] | None = None,
    labels: bool = True,
) -> RawGraph:
    """Returns the graph of a folder of tables with its raw columns, not encoded.

    Args:
        path: The folder, or its .toml file.
        encoding: The rules of the columns, fitted or not, in place of the folder's own. The table
            needs the columns that it names; other ones are left out.
        class_names: As in `from_folder`.
        labels: As in `from_folder`.
    """
    return _Reader.of(Path(path)).graph(encoding, class_names, labels)


def read_declaration(path: str | Path) -> Encoding:
    """Returns the rules of the columns of a folder of tables. It reads only headers."""
    reader = _Reader.of(Path(path))
    graphs = reader.has_graphs
    return reader.declared(reader.open("nodes", reader.layout.nodes, [reader.layout.id]), graphs)


def is_graph_set_folder(path: Path) -> bool:
    """Returns whether a folder of tables contains many small graphs. It reads no table.

    Returns False for anything that is not a folder of tables.
    """
    try:
        return _Reader.of(path).has_graphs
    except DataError:  # `from_folder` says what is wrong with it
        return False


# ---- graph.toml ----
@dataclass(frozen=True)
class _Layout:
    """The keys of graph.toml and their defaults. An empty file name stands for what is there."""

    nodes: str = ""
    edges: str = ""
    graphs: str = ""
    id: str = "id"
    label: str = "label"
    split: str = "split"
    features: str | list[str] = "all other"
    graph: str = "graph"
    graph_id: str = "id"
    source: str = "source"
    target: str = "target"
    weight: str = "weight"
    aggregate: str = ""
    directed: bool = False
    delimiter: str = ""
    num_classes: int | None = None
    class_names: list[str] | None = None
    name: str = ""
    columns: dict[str, Any] = field(default_factory=dict)
    encoding: dict[str, Any] = field(default_factory=dict)
    edge_features: dict[str, Any] = field(default_factory=dict)


_TYPES: dict[str, tuple[type, ...]] = {
    "features": (str, list),
    "directed": (bool,),
    "num_classes": (int,),
    "class_names": (list,),
    "columns": (dict,),
    "encoding": (dict,),
    "edge_features": (dict,),
}
_TYPE_NAMES = {
    str: "text",
    list: "a list of texts",
    bool: "true or false",
    int: "a whole number",
    dict: "a table",
}
# The keys of [nodes], [edges] and [graphs], and the keys that they stand for.
_TABLES = {
    "nodes": {"file": "nodes"}
    | {key: key for key in ("id", "label", "split", "features", "graph", "delimiter")},
    "edges": {"file": "edges"}
    | {key: key for key in ("source", "target", "weight", "aggregate", "directed", "delimiter")},
    "graphs": {"file": "graphs", "id": "graph_id"}
    | {key: key for key in ("label", "split", "delimiter")},
}


def _layout(settings: Path, required: bool) -> tuple[_Layout, set[str]]:
    """Returns the content of graph.toml, and the keys that it contains."""
    if not required and not settings.is_file():
        return _Layout(), set()
    try:
        content = tomllib.loads(settings.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{settings}: no such file") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise DataError(f"{settings}: cannot be read: {error}") from error
    given: dict[str, Any] = {}
    for table, keys in _TABLES.items():
        if not isinstance(content.get(table), dict):
            continue
        for key, value in content.pop(table).items():
            if key not in keys:
                raise unknown(f"key of [{table}] in {settings}:", key, keys)
            if keys[key] in content or given.get(keys[key], value) != value:
                raise ConfigError(f"{settings}: {key} of [{table}] is given a second time")
            given[keys[key]] = value
    given |= content
    for key, value in given.items():
        if key not in {field.name for field in fields(_Layout)}:
            raise unknown(f"key in {settings}:", key, (field.name for field in fields(_Layout)))
        allowed = _TYPES.get(key, (str,))
        if type(value) not in allowed or (
            isinstance(value, list) and not all(isinstance(item, str) for item in value)
        ):
            wanted = " or ".join(_TYPE_NAMES[kind] for kind in allowed)
            raise ConfigError(f"{settings}: {key} is {value!r}, must be {wanted}")
    layout = _Layout(**given)
    if layout.class_names is not None and layout.num_classes not in (None, len(layout.class_names)):
        raise ConfigError(
            f"{settings}: num_classes is {layout.num_classes}, "
            f"but class_names has {len(layout.class_names)} names"
        )
    require_aggregate(layout.aggregate, f"aggregate in {settings}")
    if len(layout.delimiter) > 1:
        raise ConfigError(
            f"{settings}: delimiter is {layout.delimiter!r}, must be one character, such as ';'"
        )
    return layout, set(given)


# ---- reading ----
@dataclass(frozen=True)
class _Reader:
    """Reads a folder.

    Attributes:
        folder: The folder.
        settings: Its graph.toml, which need not exist.
        layout: The keys of graph.toml.
        given: The keys that graph.toml contains.
    """

    folder: Path
    settings: Path
    layout: _Layout
    given: set[str]

    @classmethod
    def of(cls, path: Path) -> _Reader:
        """Returns the reader of a folder, or of a .toml file."""
        named = path.suffix == ".toml"
        folder, settings = (path.parent, path) if named else (path, path / "graph.toml")
        if not named and not path.is_dir():
            raise DataError(f"{path}: no such folder")
        if not named and not is_folder_of_tables(path):
            raise DataError(
                f"{folder}: no graph.toml and no tables: a graph's folder needs tables called "
                "nodes and edges (such as nodes.csv), or a graph.toml that names them"
            )
        return cls(folder, settings, *_layout(settings, required=named))

    @property
    def has_graphs(self) -> bool:
        """Whether the folder has many small graphs."""
        return bool(self.layout.graphs or candidates(self.folder, "graphs"))

    def graph(
        self, encoding: Encoding | None, class_names: Sequence[str] | None, labels: bool = True
    ) -> RawGraph:
        """Returns the graph with its raw columns."""
        layout = self.layout
        graphs = self.items_of_graphs() if self.has_graphs else None
        nodes_file = self.open("nodes", layout.nodes, [layout.id])
        own = [nodes_file.require(layout.id)]
        if graphs is not None:
            own.append(nodes_file.require(layout.graph))
        else:
            own += self.label_and_split(nodes_file)
        declared = encoding or self.declared(nodes_file, self.has_graphs)
        kinds = declared.kinds or [column.kind for column in declared.columns]
        used = [
            (column.name, kind)
            for column, kind in zip(declared.columns, kinds, strict=True)
            if kind != IGNORE
        ]
        picked = [nodes_file.require(n) for n, _ in used if n not in layout.edge_features]
        texts = [name for name, kind in used if kind in ("category", "boolean", "date")]
        unused = [name for name in nodes_file.columns if name not in (*own, *picked)]
        if unused:
            LOG.info("%s: columns that are not used: %s", nodes_file.path, ", ".join(unused))
        nodes = nodes_file.read([*own, *picked], [*own, *texts])
        if not nodes.rows:
            raise DataError(f"{nodes.source}: no nodes, only a header")
        ids, batch = nodes.columns[layout.id].tolist(), None
        if graphs is not None:
            nodes, batch = self.grouped(nodes, graphs)
            ids = nodes.columns[layout.id].tolist()
        items = nodes if graphs is None else graphs
        if labels:
            y, num_classes, names = self.classes(items, class_names)
        else:
            names = tuple(class_names or ())
            y, num_classes = torch.full((items.rows,), -1), max(1, len(names))
        edges_file = self.open("edges", layout.edges, [layout.source, layout.target])
        scoped = batch is not None and layout.graph in edges_file.columns
        position = self.positions(nodes, ids, batch if scoped else None)
        edges, edge_table = self.edges(edges_file, position, scoped, nodes_file.path.name)
        if batch is not None and (across := batch[edges[0]] != batch[edges[1]]).any():
            place = edge_table.at(int(across.argmax()), layout.target)
            raise DataError(f"{place}: the edge connects nodes of two graphs")
        columns = {name: nodes.columns[name] for name in picked}
        computed = self.edge_features(edges, edge_table, nodes)
        columns |= {name: computed[name] for name, _ in used if name in computed}
        weight = self.weight(edge_table)
        if not layout.directed:
            edges, weight = mirrored(edges, weight)
        where = str(edges_file.path)
        edges, weight = merged(edges, weight, nodes.rows, layout.aggregate, where)
        self.require_not_negative(edges, weight, ids, where)
        id_column = layout.id if graphs is None else layout.graph_id
        raw = RawGraph(
            x=torch.zeros(nodes.rows, 0),
            edge_index=torch.from_numpy(edges.copy()),
            y=y,
            num_classes=num_classes,
            **(self.masks(items) if labels else {}),
            edge_weight=None if weight is None else torch.from_numpy(weight).float(),
            batch=None if batch is None else torch.from_numpy(batch),
            name=layout.name or self.folder.resolve().name,
            ids=items.columns[id_column].astype(str),
            class_names=names,
            table=Table(columns, nodes.rows, nodes.source, nodes.lines),
            declared=declared,
            declares=bool(self.given & {"columns", "encoding", "edge_features"}),
        )
        raw.check()
        return raw if class_names is None else with_classes(raw, class_names)

    def open(self, table: str, name: str, expected: Sequence[str]) -> TableFile:
        """Opens a table: the file of that name, or what the folder has."""
        if name:
            path = self.folder / name
        else:
            found = candidates(self.folder, table)
            if not found:
                raise DataError(
                    f"{self.folder}: no table of {table}; add {table}.csv, or name the file in "
                    f'{self.settings.name}: {table} = "..."'
                )
            path = found[0]
            if found[1:]:
                others = ", ".join(other.name for other in found[1:])
                LOG.warning(
                    "%s is read; %s is not. To choose, set %s in %s",
                    path, others, table, self.settings.name,
                )  # fmt: skip
        return TableFile.open(path, expected, self.layout.delimiter)

    def optional(self, file: TableFile, key: str) -> str | None:
        """Returns the column that a key names; None if it is missing and not asked for."""
        name: str = getattr(self.layout, key)
        return file.require(name) if key in self.given or name in file.columns else None

    def label_and_split(self, file: TableFile) -> list[str]:
        """Returns the columns of labels and splits, as far as there are any."""
        found = (self.optional(file, key) for key in ("label", "split"))
        return [name for name in found if name is not None]

    def feature_columns(self, file: TableFile, graphs: bool) -> list[str]:
        """Returns the feature columns of the node table.

        graphs: whether there are many small graphs, so that labels and splits are elsewhere.
        """
        layout = self.layout
        if isinstance(layout.features, list):
            return [file.require(name) for name in layout.features]
        special = (layout.id, *((layout.graph,) if graphs else (layout.label, layout.split)))
        picked = [name for name in file.columns if name not in special and name]
        if "" in file.columns:
            LOG.warning("%s: a column without a name is left out", file.path)
        if layout.features == "all other":
            return picked
        picked = [name for name in picked if name.startswith(layout.features)]
        if not picked:
            raise DataError(
                f"{file.path}: no feature columns ({layout.features!r}). "
                f"Columns there: {', '.join(file.columns)}"
            )
        return picked

    def declared(self, file: TableFile, graphs: bool) -> Encoding:
        """Returns the rules of all feature columns, those of edge features included."""
        layout = self.layout
        file.require(layout.id)
        rules: dict[str, Any] = dict.fromkeys(self.feature_columns(file, graphs), "auto")
        for name in layout.edge_features:
            if name in rules:
                raise ConfigError(
                    f"{self.settings}: edge_features.{name}: {file.path.name} has a column of that "
                    "name; choose another one"
                )
            rules[name] = "number"
        for name, rule in layout.columns.items():
            kind = rule.get("kind") if isinstance(rule, dict) else rule
            if name not in rules and kind != IGNORE:
                valid = ", ".join(rules) or "none"
                raise ConfigError(
                    f"{self.settings}: columns.{name}: no feature has that name. Features: {valid}"
                )
            rules[name] = rule
        return Encoding.of(rules, layout.encoding, f"{self.settings}: ")

    # ---- nodes and graphs ----
    def items_of_graphs(self) -> Table:
        """Returns the table of graphs."""
        layout = self.layout
        file = self.open("graphs", layout.graphs, [layout.graph_id])
        own = [file.require(layout.graph_id), *self.label_and_split(file)]
        graphs = file.read(own, own)
        if not graphs.rows:
            raise DataError(f"{graphs.source}: no graphs, only a header")
        self.require_ids(graphs, layout.graph_id)
        if unused := [name for name in file.columns if name not in own]:
            LOG.warning("%s: columns that are not used: %s", file.path, ", ".join(unused))
        return graphs

    def grouped(self, nodes: Table, graphs: Table) -> tuple[Table, npt.NDArray[np.int64]]:
        """Returns the nodes ordered by graph, and the number of each node's graph."""
        number = {key: k for k, key in enumerate(graphs.columns[self.layout.graph_id].tolist())}
        of_node = nodes.columns[self.layout.graph].tolist()
        for row, key in enumerate(of_node):
            if key not in number:
                raise DataError(
                    f"{nodes.at(row, self.layout.graph)}: graph {key!r} is not in {graphs.source}"
                )
        batch = np.array([number[key] for key in of_node], np.int64)
        empty = np.bincount(batch, minlength=graphs.rows) == 0
        if empty.any():
            row = int(empty.argmax())
            name = graphs.columns[self.layout.graph_id][row]
            raise DataError(
                f"{graphs.at(row, self.layout.graph_id)}: graph {name!r} has no nodes in "
                f"{nodes.source}"
            )
        order = np.argsort(batch, kind="stable")
        return nodes.take(order), batch[order]

    def positions(
        self, nodes: Table, ids: list[str], batch: npt.NDArray[np.int64] | None
    ) -> dict[Any, int]:
        """Returns the position of each node by its id, or by graph and id."""
        self.require_ids(nodes, self.layout.id, batch)
        if batch is None:
            return {key: k for k, key in enumerate(ids)}
        of_graph = nodes.columns[self.layout.graph].tolist()
        return {key: k for k, key in enumerate(zip(of_graph, ids, strict=True))}

    def require_ids(
        self, table: Table, column: str, batch: npt.NDArray[np.int64] | None = None
    ) -> None:
        """Raises a DataError if an id is empty or there twice (in one graph)."""
        ids = table.columns[column].tolist()
        if "" in ids:
            raise DataError(f"{table.at(ids.index(''), column)}: empty id")
        keys = ids if batch is None else list(zip(batch.tolist(), ids, strict=True))
        if len(set(keys)) == len(keys):
            return
        seen: dict[Any, int] = {}
        for row, key in enumerate(keys):
            if key in seen:
                line = table.at(seen[key], column).split(", ")[-2]
                raise DataError(
                    f"{table.at(row, column)}: id {ids[row]!r} is there already, on {line}"
                )
            seen[key] = row

    def masks(self, items: Table) -> dict[str, Any]:
        """Returns the training, validation and test masks, if the items have a split."""
        if self.layout.split not in items.columns:
            return {}
        splits = items.columns[self.layout.split]
        bad = ~np.isin(splits.astype(str), ("", *SPLITS))
        if bad.any():
            row = int(bad.argmax())
            raise DataError(
                f"{items.at(row, self.layout.split)}: {splits[row]!r} is none of "
                "train, val, test or empty"
            )
        return {key: torch.from_numpy(splits == key) for key in SPLITS}

    def classes(
        self, items: Table, class_names: Sequence[str] | None
    ) -> tuple[Tensor, int, tuple[str, ...]]:
        """Returns the classes of all items, their number and their names."""
        layout = self.layout
        labels = items.columns.get(layout.label)
        known = [] if labels is None else labels.tolist()
        told = layout.num_classes, layout.class_names
        if not any(known) and told == (None, None):
            if class_names is not None:
                told = None, list(class_names)
            else:
                raise DataError(
                    f"{items.source}: no row has a label in column {layout.label!r} "
                    f"(columns there: {', '.join(items.columns)}); set label in {self.settings}, "
                    "or num_classes if nothing has a label"
                )
        return classes_of(known or [""] * items.rows, lambda i: items.at(i, layout.label), *told)

    # ---- edges ----
    def edges(
        self, file: TableFile, position: Mapping[Any, int], scoped: bool, nodes: str
    ) -> tuple[npt.NDArray[np.int64], Table]:
        """Returns the edges [2, rows] as positions of nodes, and the table with other columns."""
        layout = self.layout
        sides = [file.require(name) for name in (layout.source, layout.target)]
        texts = [*sides, *([layout.graph] if scoped else [])]
        used = [*texts]
        if (weight := self.optional(file, "weight")) is not None:
            used.append(weight)
        for name, rule in layout.edge_features.items():
            self.require_edge_feature(name, rule)
            if "column" in rule:
                used.append(file.require(rule["column"]))
        if unused := [name for name in file.columns if name and name not in used]:
            LOG.warning(
                "%s: columns that are not used: %s. To use one, set weight, or declare "
                "[edge_features]",
                file.path, ", ".join(unused),
            )  # fmt: skip
        table = file.read(used, texts)
        ends = []
        for name in sides:
            keys: Any = table.columns[name].tolist()
            if scoped:
                keys = list(zip(table.columns[layout.graph].tolist(), keys, strict=True))
            try:
                ends.append([position[key] for key in keys])
            except KeyError:
                row = next(k for k, key in enumerate(keys) if key not in position)
                key = keys[row]
                shown = f"{key[1]!r} of graph {key[0]!r}" if scoped else repr(key)
                raise DataError(f"{table.at(row, name)}: id {shown} is not in {nodes}") from None
        return np.array(ends, np.int64).reshape(2, -1), table

    def weight(self, table: Table) -> npt.NDArray[np.float64] | None:
        """Returns the weights of the rows; None if there is no column of weights."""
        name, aggregate = self.layout.weight, self.layout.aggregate
        if name not in table.columns or aggregate == "count":
            if aggregate in ("", "count"):
                return None
            raise ConfigError(
                f"{self.settings}: aggregate is {aggregate!r}, but {table.source} has no column "
                f'{name!r}; set weight to a column, or aggregate to "count"'
            )
        values = table.values(name, "number")
        if (missing := np.isnan(values)).any():
            row = int(missing.argmax())
            raise DataError(f"{table.at(row, name)}: the weight is missing")
        return values

    def require_not_negative(
        self,
        edges: npt.NDArray[np.int64],
        weight: npt.NDArray[np.float64] | None,
        ids: list[str],
        where: str,
    ) -> None:
        """Raises a DataError if an edge has a weight below 0."""
        if weight is None or not (bad := weight < 0).any():
            return
        at = int(bad.argmax())
        source, target = (ids[end] for end in edges[:, at].tolist())
        raise DataError(
            f"{where}: the weight of {source!r} -> {target!r} is {weight[at]:g}, must be 0 or "
            "more; choose another column or aggregate, or remove these rows"
        )

    def require_edge_feature(self, name: str, rule: Any) -> None:
        """Raises a ConfigError if the declaration of an edge feature is not valid."""
        place = f"{self.settings}: edge_features.{name}"
        example = 'such as {column = "amount", by = "source", aggregate = "sum"}'
        if not isinstance(rule, dict):
            raise ConfigError(f"{place} is {rule!r}, must be a table {example}")
        for key in rule:
            if key not in (valid := ("aggregate", "by", "column")):
                raise unknown(f"key of {place}:", key, valid)
        if rule.get("by") not in SIDES:
            raise ConfigError(f"{place}.by is {rule.get('by')!r}, must be {' or '.join(SIDES)}")
        if rule.get("aggregate") not in AGGREGATES:
            raise ConfigError(
                f"{place}.aggregate is {rule.get('aggregate')!r}, must be one of "
                f"{', '.join(AGGREGATES)}"
            )
        if "column" not in rule and rule["aggregate"] != "count":
            raise ConfigError(f"{place}.column is missing: give a table {example}")

    def edge_features(
        self, edges: npt.NDArray[np.int64], table: Table, nodes: Table
    ) -> dict[str, npt.NDArray[np.float64]]:
        """Returns the columns of nodes that are computed from rows of the edge table."""
        found = {}
        for name, rule in self.layout.edge_features.items():
            values = np.ones(edges.shape[1])
            if "column" in rule and rule["aggregate"] == "count":
                values = np.where(table.texts(rule["column"]) == "", np.nan, 1.0)
            elif "column" in rule:
                values = table.values(rule["column"], "number")
            ends = {"source": edges[0], "target": edges[1], "both": edges.ravel()}[rule["by"]]
            values = np.concatenate([values, values]) if rule["by"] == "both" else values
            found[name] = per_node(ends, values, nodes.rows, rule["aggregate"])
        return found


# ---- writing ----
def to_folder(graph: Graph, path: str | Path) -> Path:
    """Writes a graph as graph.toml, nodes.csv and edges.csv. Returns the folder.

    Many small graphs also get a graphs.csv. `from_folder` reads the graph back. Ids are the graph's
    own, or its `node_id`. An undirected edge is written once. The folder must not contain a
    graph.toml.
    """
    path = Path(path)
    if (path / "graph.toml").exists():
        raise DataError(f"{path / 'graph.toml'} exists already: choose another folder")
    path.mkdir(parents=True, exist_ok=True)
    split = np.full(graph.num_items, "", dtype=object)
    for key in SPLITS:
        split[getattr(graph, key).numpy()] = key
    labels = ["" if label < 0 else graph.classes[label] for label in graph.y.tolist()]
    items = [graph.item_ids.tolist(), labels, split.tolist()]
    taken = {"id", "graph", "label", "split"}
    features = [*graph.feature_names]
    if len({*features} - taken) < graph.num_features or "" in features:
        features = [f"x{k}" for k in range(graph.num_features)]
    # Nine digits are enough to read every float32 back exactly.
    values = ([f"{value:.9g}" for value in row.tolist()] for row in graph.x)
    if graph.batch is None:
        ids = items[0]
        header = ["id", "label", "split", *features]
        rows = ([*own, *row] for own, row in zip(zip(*items, strict=True), values, strict=True))
    else:
        _write(path / "graphs.csv", ["id", "label", "split"], zip(*items, strict=True))
        ids = graph.node_id.tolist()
        header = ["id", "graph", *features]
        owners = (items[0][k] for k in graph.batch.tolist())
        rows = ([i, g, *row] for i, g, row in zip(ids, owners, values, strict=True))
    _write(path / "nodes.csv", header, rows)
    directed, edges, weight = _written_edges(graph)
    columns: list[Sequence[Any]] = [[ids[end] for end in side] for side in edges.tolist()]
    if weight is not None:
        columns.append([f"{value:.9g}" for value in weight.tolist()])
    names = ["source", "target"] + (["weight"] if weight is not None else [])
    _write(path / "edges.csv", names, zip(*columns, strict=True))
    # Written last, so that a folder with a graph.toml is complete. JSON strings are TOML strings.
    content: dict[str, Any] = {"name": graph.name, "directed": directed}
    classes = ("class_names", graph.class_names), ("num_classes", graph.num_classes)
    content |= dict([classes[0] if graph.class_names else classes[1]])
    content |= {"features": features, "delimiter": ","}
    text = "".join(
        f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in content.items()
    )
    # TOML escapes this character, JSON does not.
    (path / "graph.toml").write_text(text.replace("\x7f", r"\u007f"), encoding="utf-8")
    return path


def _write(path: Path, header: Sequence[str], rows: Any) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


def _written_edges(graph: Graph) -> tuple[bool, Tensor, Tensor | None]:
    """Returns whether the graph is directed, and the edges and weights for a file.

    An undirected edge is there once.
    """
    graph = merge_edges(graph)
    edges, weight, n = graph.edge_index, graph.edge_weight, graph.num_nodes
    # If every edge has a reversed edge, this puts the reversed edges in the order of the edges.
    order = torch.argsort(edges[1] * n + edges[0])
    symmetric = torch.equal(edges[:, order].flip(0), edges) and (
        weight is None or torch.equal(weight[order], weight)
    )
    keep = edges[0] <= edges[1] if symmetric else torch.ones(edges.shape[1], dtype=torch.bool)
    return not symmetric, edges[:, keep], None if weight is None else weight[keep]
