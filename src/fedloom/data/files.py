"""A user's own graph: a PyG object, a networkx graph, a folder of tables, or one file.

A folder contains a `graph.toml`, a table of nodes and a table of edges. Tables are CSV, TSV or
Parquet files; the file's ending decides. Every key of graph.toml has a default, so the file may be
empty:

    nodes = "nodes.csv"          # one row per node; the graph keeps their order
    edges = "edges.csv"          # one row per edge
    id = "id"                    # column of the node table: the node's name, text or number
    label = "label"              # column: integers from 0, or names (numbered in sorted order);
                                 # empty = unknown
    split = "split"              # column: train, val, test or empty
    features = "all other"       # columns of numbers: a list, a common prefix such as "f_",
                                 # or "all other"
    source = "source"            # column of the edge table: id of the first end
    target = "target"            # column: id of the second end
    weight = "weight"            # column: the edge's weight
    directed = false             # false: every row stands for both directions
    num_classes = 7              # for labels that do not contain all classes
    class_names = ["a", "b"]     # numbers the names in this order
    name = "my graph"            # the default is the folder's name

The label, split and weight columns may be missing from the tables unless graph.toml names them.
"""

from __future__ import annotations

import csv
import json
import re
import tomllib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedloom.data.graph import Graph
from fedloom.errors import ConfigError, DataError, unknown

SPLITS = ("train", "val", "test")
PYG_ENDINGS = (".pt", ".pth")
ENDINGS = (".safetensors", *PYG_ENDINGS)  # of files that contain a graph
FLOAT32 = float(np.finfo(np.float32).max)


# ---- objects in memory ----
def as_graph(data: Any) -> Graph:
    """Returns a Graph unchanged, and converts PyG and networkx objects to a Graph.

    data: a Graph; a PyG `Data`, `Batch` or list of `Data`; or a networkx graph. The attributes have
    their usual names.
    """
    if isinstance(data, Graph):
        return data
    if hasattr(data, "nodes") and hasattr(data, "is_directed") and not hasattr(data, "edge_index"):
        return from_networkx(data)
    return from_pyg(data)


def from_pyg(
    data: Any, num_classes: int | None = None, name: str = "graph", split: int = 0
) -> Graph:
    """Returns a Graph from a PyG `Data`, or a graph-level one from a `Batch` or a list of `Data`.

    Parallel edges are merged.

    Args:
        data: An object with the attributes x, edge_index and y (one class per node or graph,
            -1 = unknown). train_mask, val_mask, test_mask, edge_weight and batch are optional. Only
            attributes are read, so any object with these attributes works.
        num_classes: Number of classes. The default is the largest label + 1.
        name: The graph's name.
        split: The column of two-dimensional masks.
    """
    if isinstance(data, list | tuple):
        from torch_geometric.data import Batch

        data = Batch.from_data_list(list(data))
    for key in ("x", "edge_index", "y"):
        if not isinstance(getattr(data, key, None), Tensor):
            raise DataError(f"graph {name!r}: {key} is missing: a graph needs x, edge_index and y")
    return _merged(from_pyg_unchecked(data, num_classes, name, split).check())


def from_pyg_unchecked(
    data: Any, num_classes: int | None = None, name: str = "graph", split: int = 0
) -> Graph:
    """`from_pyg` for data that `from_pyg` has accepted before. It checks and merges nothing.

    Checking and merging take most of the time for large graphs.
    """
    y = _whole_numbers(data.y, name)
    if num_classes is None:
        num_classes = int(y.max()) + 1 if len(y) else 0
    weight = getattr(data, "edge_weight", None)
    return Graph(
        x=(data.x.to_dense() if data.x.layout != torch.strided else data.x).float(),
        edge_index=data.edge_index.long(),
        y=y,
        num_classes=num_classes,
        **_masks(data, split, name),
        edge_weight=None if weight is None else weight.float().flatten(),
        batch=getattr(data, "batch", None),
        name=name,
    )


def from_networkx(
    g: Any,
    features: str = "x",
    label: str = "y",
    weight: str = "weight",
    num_classes: int | None = None,
    name: str = "graph",
) -> Graph:
    """Returns a Graph from a directed or undirected networkx graph.

    Parallel edges are merged. Nodes are sorted if they can be compared, else they keep the order of
    networkx.

    Args:
        g: The networkx graph.
        features: Node attribute, a number or a sequence of numbers, of one length for all nodes.
        label: Node attribute, an integer or a name. Names are numbered in sorted order. A node
            without this attribute is unlabelled.
        weight: Edge attribute, 1 where missing. If no edge has it, the graph is unweighted.
        num_classes: Number of classes. The default is derived from the labels.
        name: The graph's name.
    """
    try:
        nodes = sorted(g.nodes)
    except TypeError:
        nodes = list(g.nodes)
    rows = []
    for node in nodes:
        try:
            rows.append(np.asarray(g.nodes[node][features], dtype=np.float32).reshape(-1))
        except KeyError:
            raise DataError(
                f"graph {name!r}: node {node!r} has no attribute {features!r} (features)"
            ) from None
        except (TypeError, ValueError) as error:
            raise DataError(
                f"graph {name!r}: node {node!r}, attribute {features!r}: not numbers ({error})"
            ) from error
        if len(rows[-1]) != len(rows[0]):
            raise DataError(
                f"graph {name!r}: node {node!r} has {len(rows[-1])} features, "
                f"node {nodes[0]!r} has {len(rows[0])}"
            )
    if not rows:
        raise DataError(f"graph {name!r}: no nodes")
    labels = [g.nodes[node].get(label) for node in nodes]
    y, num_classes = _classes(
        ["" if value is None else str(value) for value in labels],
        lambda i: f"graph {name!r}: node {nodes[i]!r}, attribute {label!r}",
        num_classes,
    )
    position = {node: i for i, node in enumerate(nodes)}
    ends, weights, weighted = [], [], False
    for source, target, attributes in g.edges(data=True):
        ends.append((position[source], position[target]))
        weights.append(attributes.get(weight, 1))
        weighted = weighted or weight in attributes
        if not _is_number(weights[-1]):
            raise DataError(
                f"graph {name!r}: edge {source!r} -> {target!r}, attribute {weight!r}: "
                "not a finite number"
            )
    return _assembled(
        x=np.stack(rows),
        y=y,
        num_classes=num_classes,
        ends=np.array(ends, dtype=np.int64).reshape(-1, 2).T,
        weight=np.array(weights, dtype=np.float32) if weighted else None,
        directed=g.is_directed(),
        name=name,
        names=nodes,
    )


# ---- a folder of tables ----
def from_folder(path: str | Path) -> Graph:
    """Returns the graph of a folder of tables (see the top of this module).

    Errors name the file, the line and the column.

    path: the folder, or its .toml file.
    """
    path = Path(path)
    settings = path if path.suffix == ".toml" else path / "graph.toml"
    layout, given = _layout(settings)
    nodes = _open(settings.parent / layout.nodes)
    id_column = nodes.column(layout.id)
    label_column, split_column = (
        nodes.optional(getattr(layout, key), key in given) for key in ("label", "split")
    )
    picked = _feature_columns(nodes, layout)

    position: dict[str, int] = {}
    lines, cells = array("q"), array("f")
    labels: list[str] = []
    splits: list[str] = []
    for line, row in nodes.rows:
        key = _text(row[id_column])
        if not key:
            raise DataError(f"{nodes.at(line, layout.id)}: empty id")
        if key in position:
            raise DataError(
                f"{nodes.at(line, layout.id)}: id {key!r} is there already, "
                f"on line {lines[position[key]]}"
            )
        position[key] = len(position)
        lines.append(line)
        cells.extend(nodes.numbers(line, row, picked))
        if label_column is not None:
            labels.append(_text(row[label_column]))
        if split_column is not None:
            splits.append(_text(row[split_column]))
            if splits[-1] not in ("", *SPLITS):
                raise DataError(
                    f"{nodes.at(line, layout.split)}: {splits[-1]!r} is none of "
                    "train, val, test or empty"
                )
    if not position:
        raise DataError(f"{nodes.path}: no nodes, only a header")
    if not any(labels) and layout.num_classes is None and layout.class_names is None:
        raise DataError(
            f"{nodes.path}: no node has a label in column {layout.label!r} "
            f"(columns there: {', '.join(nodes.columns)}); set label in {settings}, "
            "or num_classes if no node has a label"
        )
    y, num_classes = _classes(
        labels or [""] * len(position),
        lambda i: nodes.at(lines[i], layout.label),
        layout.num_classes,
        layout.class_names,
    )
    ends, weight = _edges(
        _open(settings.parent / layout.edges), layout, "weight" in given, position
    )
    return _assembled(
        x=np.frombuffer(cells, dtype=np.float32).reshape(len(position), len(picked)).copy(),
        y=y,
        num_classes=num_classes,
        ends=ends,
        weight=weight,
        directed=layout.directed,
        name=layout.name or settings.resolve().parent.name,
        names=list(position),
        masks={key: torch.tensor([v == key for v in splits]) for key in SPLITS} if splits else {},
    )


def to_folder(graph: Graph, path: str | Path) -> Path:
    """Writes a node-level graph as graph.toml, nodes.csv and edges.csv. Returns the folder.

    `from_folder` reads the graph back. Ids are the graph's `node_id`. An undirected edge is written
    once. The folder must not contain a graph.toml.
    """
    path = Path(path)
    if graph.batch is not None:
        raise DataError(
            f"graph {graph.name!r} contains many small graphs, but a folder of tables contains "
            "one; use to_file"
        )
    if (path / "graph.toml").exists():
        raise DataError(f"{path / 'graph.toml'} exists already: choose another folder")
    path.mkdir(parents=True, exist_ok=True)
    split = np.full(graph.num_nodes, "", dtype=object)
    for key in SPLITS:
        split[getattr(graph, key).numpy()] = key
    ids = graph.node_id.tolist()
    with open(path / "nodes.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["id", "label", "split", *(f"x{k}" for k in range(graph.num_features))])
        for key, label, part, row in zip(ids, graph.y.tolist(), split, graph.x, strict=True):
            # Nine digits are enough to read every float32 back exactly.
            writer.writerow(
                [key, "" if label < 0 else label, part, *(f"{value:.9g}" for value in row.tolist())]
            )
    directed, edges, weight = _written_edges(graph)
    with open(path / "edges.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["source", "target"] + (["weight"] if weight is not None else []))
        columns = [[ids[end] for end in side] for side in edges.tolist()]
        if weight is not None:
            columns.append([f"{value:.9g}" for value in weight.tolist()])
        writer.writerows(zip(*columns, strict=True))
    # Written last, so that a folder with a graph.toml is complete. JSON strings are TOML strings.
    lines = [
        f"name = {json.dumps(graph.name)}",
        f"directed = {json.dumps(directed)}",
        f"num_classes = {graph.num_classes}",
        'features = "x"',
    ]
    (path / "graph.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


# ---- one file ----
def to_file(graph: Graph, path: str | Path) -> Path:
    """Writes a graph of any kind with all its fields as one .safetensors file. Returns the path.

    `from_file` reads an identical graph back.
    """
    path = Path(path)
    if path.exists():
        raise DataError(f"{path} exists already: choose another name")
    # Copies, because empty masks may share one tensor, which safetensors refuses.
    tensors = {
        f.name: v.clone(memory_format=torch.contiguous_format)
        for f in fields(Graph)
        if isinstance(v := getattr(graph, f.name), Tensor)
    }
    save_file(
        tensors,
        path,
        metadata={
            "fedloom-graph": json.dumps({"num_classes": graph.num_classes, "name": graph.name})
        },
    )
    return path


def is_graph_set_file(path: Path) -> bool:
    """Returns whether a file of `to_file` contains a set of graphs. It reads only the header.

    Returns False for any other file, and if there is none.
    """
    if path.suffix != ".safetensors" or not path.is_file():
        return False
    try:
        with safe_open(path, "pt") as file:
            return "batch" in file.keys()  # noqa: SIM118  (no dict)
    except (SafetensorError, OSError):  # `from_file` says what is wrong with it
        return False


def from_file(path: str | Path) -> Graph:
    """Returns the graph of a file that `to_file` or PyG wrote.

    PyG's files end in .pt or .pth (see `pyg_files`). Raises a DataError if the file is damaged or
    does not contain a graph.
    """
    if Path(path).suffix in PYG_ENDINGS:
        from fedloom.data.pyg_files import from_pyg_file

        return from_pyg_file(path)
    try:
        with safe_open(path, "pt") as file:
            metadata = json.loads((file.metadata() or {})["fedloom-graph"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no dict)
        return Graph(
            num_classes=int(metadata["num_classes"]), name=str(metadata["name"]), **tensors
        ).check()
    except OSError as error:
        raise DataError(f"graph: cannot read {str(path)!r} ({error.strerror or error})") from error
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise DataError(
            f"graph: {str(path)!r} is not a graph's .safetensors file ({error})"
        ) from error


@dataclass(frozen=True)
class _Layout:
    """The keys of graph.toml and their defaults."""

    nodes: str = "nodes.csv"
    edges: str = "edges.csv"
    id: str = "id"
    label: str = "label"
    split: str = "split"
    features: str | list[str] = "all other"
    source: str = "source"
    target: str = "target"
    weight: str = "weight"
    directed: bool = False
    num_classes: int | None = None
    class_names: list[str] | None = None
    name: str = ""


_TYPES: dict[str, tuple[type, ...]] = {
    "features": (str, list),
    "directed": (bool,),
    "num_classes": (int,),
    "class_names": (list,),
}
_TYPE_NAMES = {str: "text", list: "a list of texts", bool: "true or false", int: "a whole number"}


def _layout(settings: Path) -> tuple[_Layout, set[str]]:
    """Returns the content of graph.toml, and the keys that it contains."""
    try:
        given = tomllib.loads(settings.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{settings}: no such file: a graph's folder needs a graph.toml") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise DataError(f"{settings}: cannot be read: {error}") from error
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
    return layout, set(given)


@dataclass
class _Table:
    """A table that is read row by row, so that it is never in memory as a whole.

    Attributes:
        path: The file.
        columns: The names of the columns.
        rows: The values of each row, and its line in the file. For Parquet files, the line is the
            number of the row, from 1 on.
    """

    path: Path
    columns: list[str]
    rows: Iterator[tuple[int, Sequence[Any]]]

    def at(self, line: int, column: str) -> str:
        """Returns the place of a cell, with which an error message begins."""
        return f"{self.path}, line {line}, column {column!r}"

    def column(self, name: str) -> int:
        """Returns a column's position."""
        if name not in self.columns:
            raise DataError(
                f"{self.path}: no column {name!r}. Columns there: {', '.join(self.columns)}"
            )
        return self.columns.index(name)

    def optional(self, name: str, required: bool) -> int | None:
        """Returns a column's position, or None if it is missing and not required."""
        return self.column(name) if required or name in self.columns else None

    def numbers(self, line: int, row: Sequence[Any], columns: Sequence[int]) -> list[float]:
        """Returns the row's values in the given columns. Each must be a finite number."""
        try:
            values = [float(row[column]) for column in columns]
            if all(-FLOAT32 <= value <= FLOAT32 for value in values):
                return values
        except (TypeError, ValueError):
            pass
        bad = next(column for column in columns if not _is_number(row[column]))
        raise DataError(f"{self.at(line, self.columns[bad])}: {row[bad]!r} is not a finite number")


def _open(path: Path) -> _Table:
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    match path.suffix.lower():
        case ".csv" | ".tsv":
            rows = _csv_rows(path, "\t" if path.suffix.lower() == ".tsv" else ",")
        case ".parquet" | ".pq":
            rows = _parquet_rows(path)
        case other:
            raise DataError(
                f"{path}: tables ending in {other!r} are not known. "
                "Valid: .csv, .tsv, .parquet, .pq"
            )
    try:
        _, header = next(rows)
    except StopIteration:
        raise DataError(f"{path}: empty file, not even a header") from None
    columns = [_text(value) for value in header]
    twice = {column for column in columns if columns.count(column) > 1}
    if twice:
        raise DataError(f"{path}: column {min(twice)!r} is there more than once")
    return _Table(path, columns, rows)


def _csv_rows(path: Path, delimiter: str) -> Iterator[tuple[int, Sequence[Any]]]:
    """Yields the header, then the rows, each with the line on which it ends."""
    line, width = 0, 0
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, delimiter=delimiter, strict=True)
            for row in reader:
                line = reader.line_num
                if not row:  # an empty line
                    continue
                width = width or len(row)
                if len(row) != width:
                    raise DataError(
                        f"{path}, line {line}: {len(row)} values under a header of {width} columns"
                    )
                yield line, row
    except (csv.Error, UnicodeDecodeError, OSError) as error:
        raise DataError(f"{path}, line {line + 1}: cannot be read: {error}") from error


def _parquet_rows(path: Path) -> Iterator[tuple[int, Sequence[Any]]]:
    """Yields the header, then the rows, each with its number."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise DataError(
            f"{path}: reading Parquet needs pyarrow: pip install 'fedloom[tables]'"
        ) from error
    try:
        with ParquetFile(path) as file:
            yield 0, file.schema_arrow.names
            line = 0
            for batch in file.iter_batches():
                for row in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                    line += 1
                    yield line, row
    except (ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


def _feature_columns(nodes: _Table, layout: _Layout) -> list[int]:
    if isinstance(layout.features, list):
        return [nodes.column(name) for name in layout.features]
    others = [name for name in nodes.columns if name not in (layout.id, layout.label, layout.split)]
    if layout.features != "all other":
        others = [name for name in others if name.startswith(layout.features)]
    if not others:
        raise DataError(
            f"{nodes.path}: no feature columns ({layout.features!r}). "
            f"Columns there: {', '.join(nodes.columns)}"
        )
    return [nodes.columns.index(name) for name in others]


def _edges(
    table: _Table, layout: _Layout, weight_required: bool, position: dict[str, int]
) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns the edges [2, rows] and, if there is a column of weights, the weights [rows]."""
    sides = [(name, table.column(name)) for name in (layout.source, layout.target)]
    weight_column = table.optional(layout.weight, weight_required)
    ends, weights = array("q"), array("f")
    for line, row in table.rows:
        for name, column in sides:
            key = _text(row[column])
            if key not in position:
                raise DataError(f"{table.at(line, name)}: id {key!r} is not in {layout.nodes}")
            ends.append(position[key])
        if weight_column is not None:
            weights.extend(table.numbers(line, row, [weight_column]))
    pairs = np.frombuffer(ends, dtype=np.int64).reshape(-1, 2).T
    return pairs, None if weight_column is None else np.frombuffer(weights, dtype=np.float32).copy()


def _is_number(value: Any) -> bool:
    try:
        return -FLOAT32 <= float(value) <= FLOAT32
    except (TypeError, ValueError):
        return False


def _text(value: Any) -> str:
    return "" if value is None else str(value).strip()


# ---- shared ----
def _classes(
    labels: list[str],
    where: Callable[[int], str],
    num_classes: int | None,
    class_names: list[str] | None = None,
) -> tuple[Tensor, int]:
    """Returns class numbers (-1 for "") and the number of classes.

    where: returns the place of label i, with which an error message begins.
    """
    present = sorted(set(labels) - {""})
    names = present if class_names is None else class_names
    if all(re.fullmatch(r"-?\d+", text) for text in present) and not (
        class_names and set(present) <= set(class_names)
    ):
        code = {text: int(text) for text in present}
        count = num_classes or (
            len(class_names) if class_names else max(code.values(), default=-1) + 1
        )
        valid = f"0 to {count - 1}, or empty or -1 for unknown"
    else:
        code = {text: number for number, text in enumerate(names)}
        count = num_classes or len(names)
        valid = ", ".join(names)
        if len(names) > count:
            raise DataError(
                f"{where(0)}: {len(names)} different labels, but num_classes is {count}: {valid}"
            )
    code[""] = -1
    bad = {text for text in present if not -1 <= code.get(text, -2) < count}
    if bad:
        first = next(i for i, text in enumerate(labels) if text in bad)
        raise DataError(f"{where(first)}: label {labels[first]!r} is out of range. Valid: {valid}")
    return torch.tensor([code[text] for text in labels]), count


def _assembled(
    x: np.ndarray,
    y: Tensor,
    num_classes: int,
    ends: np.ndarray,
    weight: np.ndarray | None,
    directed: bool,
    name: str,
    names: Sequence[Any],
    masks: dict[str, Any] | None = None,
) -> Graph:
    """Returns a checked graph. An undirected graph gets both directions of every edge.

    names: the nodes' names in error messages.
    """
    edges = torch.from_numpy(ends.copy())
    weights = None if weight is None else torch.from_numpy(weight)
    if not directed:
        edges = torch.cat([edges, edges.flip(0)], 1)
        weights = None if weights is None else torch.cat([weights, weights])
    graph = Graph(
        torch.from_numpy(x), edges, y, num_classes, edge_weight=weights, name=name, **(masks or {})
    )
    return _merged(graph.check(), names)


def _merged(graph: Graph, names: Sequence[Any] | None = None) -> Graph:
    """Returns the graph with its edges sorted by source and target, each once.

    Raises a DataError if one edge has two weights.
    """
    edges, weight = graph.edge_index, graph.edge_weight
    key = edges[0] * graph.num_nodes + edges[1]
    if bool((key[1:] > key[:-1]).all()):
        return graph
    key, order = key.sort(stable=True)
    repeated = torch.zeros(len(key), dtype=torch.bool)
    repeated[1:] = key[1:] == key[:-1]
    if weight is not None:
        weight = weight[order]
        clash = (repeated[1:] & (weight[1:] != weight[:-1])).nonzero()
        if len(clash):
            at = int(clash[0])
            source, target = (names[end] if names else end for end in edges[:, order[at]].tolist())
            raise DataError(
                f"graph {graph.name!r}: edge {source!r} -> {target!r} has two weights, "
                f"{weight[at]:g} and {weight[at + 1]:g}"
            )
        weight = weight[~repeated]
    return replace(graph, edge_index=edges[:, order[~repeated]], edge_weight=weight)


def _written_edges(graph: Graph) -> tuple[bool, Tensor, Tensor | None]:
    """Returns whether the graph is directed, and the edges and weights for a file.

    An undirected edge is there once.
    """
    edges, weight = _merged(graph).edge_index, _merged(graph).edge_weight
    n = graph.num_nodes
    # If every edge has a reversed edge, this puts the reversed edges in the order of the edges.
    order = torch.argsort(edges[1] * n + edges[0])
    mirrored = torch.equal(edges[:, order].flip(0), edges) and (
        weight is None or torch.equal(weight[order], weight)
    )
    keep = edges[0] <= edges[1] if mirrored else torch.ones(edges.shape[1], dtype=torch.bool)
    return not mirrored, edges[:, keep], None if weight is None else weight[keep]


def _whole_numbers(y: Tensor, name: str) -> Tensor:
    if y.dim() == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.dim() != 1 or (y.is_floating_point() and not torch.equal(y, y.round())):
        raise DataError(
            f"graph {name!r}: y must hold one class number per item, got {list(y.shape)} {y.dtype}"
        )
    return y.long()


def _masks(data: Any, split: int, name: str) -> dict[str, Any]:
    found = {
        key: mask for key in SPLITS if (mask := getattr(data, f"{key}_mask", None)) is not None
    }
    splits = max((mask.shape[1] for mask in found.values() if mask.dim() == 2), default=1)
    if not 0 <= split < splits:
        valid = "0" if splits == 1 else f"0 to {splits - 1}"
        raise ConfigError(f"{name!r} has no public split {split}. Valid: {valid}")
    return {
        key: (mask[:, split] if mask.dim() == 2 else mask).bool() for key, mask in found.items()
    }
