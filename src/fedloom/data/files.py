"""A user's own graph: a PyG object, a networkx graph, a folder of tables, or one file.

Folders of tables are in `fedloom.data.tables`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedloom.data.columns import FLOAT32
from fedloom.data.edges import (
    degree_features,
    degree_names,
    merge_edges,
    merged,
    mirrored,
    require_aggregate,
)
from fedloom.data.encoding import Encoding
from fedloom.data.graph import Graph, timed
from fedloom.data.labels import classes_of
from fedloom.data.raw_graph import RawGraph
from fedloom.data.tables import SPLITS, from_folder, is_folder_of_tables, to_folder
from fedloom.errors import ConfigError, DataError

__all__ = [
    "as_graph",
    "from_file",
    "from_folder",
    "from_networkx",
    "from_pyg",
    "is_folder_of_tables",
    "to_file",
    "to_folder",
]

LOG = logging.getLogger("fedloom.data")
PYG_ENDINGS = (".pt", ".pth")
ENDINGS = (".safetensors", *PYG_ENDINGS)  # of files that contain a graph
# The attributes of a PyG object that are used, or that only repeat what others say.
PYG_ATTRIBUTES = frozenset(
    (
        *("x", "edge_index", "y", "edge_weight", "batch", "ptr", "num_nodes", "name"),
        *(f"{split}_mask" for split in SPLITS),
    )
)


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
    data: Any,
    num_classes: int | None = None,
    name: str = "graph",
    split: int = 0,
    *,
    aggregate: str = "",
    ids: Sequence[Any] | None = None,
    class_names: Sequence[str] = (),
) -> Graph:
    """Returns a Graph from a PyG `Data`, or a graph-level one from a `Batch` or a list of `Data`.

    Parallel edges become one. Without x, the features are the nodes' degrees. Other attributes,
    such as edge_attr, are dropped, and a line in the log says so.

    Args:
        data: An object with the attributes edge_index and y (one class per node or graph, -1 =
            unknown). x, train_mask, val_mask, test_mask, edge_weight and batch are optional. Only
            attributes are read, so any object with these attributes works.
        num_classes: Number of classes. The default is the largest label + 1.
        name: The graph's name.
        split: The column of two-dimensional masks.
        aggregate: How parallel edges get one weight: "sum", "mean", "count" or "max". The default
            is the sum if their weights differ.
        ids: The names of the nodes, or of the graphs.
        class_names: The names of the classes.
    """
    require_aggregate(aggregate, "aggregate")
    parts = list(data) if isinstance(data, list | tuple) else [data]
    if any(hasattr(part, "node_types") and hasattr(part, "edge_types") for part in parts):
        raise DataError(
            f"graph {name!r}: a HeteroData is not supported: graphs have one type of nodes and "
            "edges. Convert it with data.to_homogeneous(), then set y and the masks"
        )
    if isinstance(data, list | tuple):
        from torch_geometric.data import Batch

        data = Batch.from_data_list(parts)
    for key in ("edge_index", "y"):
        if not isinstance(getattr(data, key, None), Tensor):
            raise DataError(f"graph {name!r}: {key} is missing: a graph needs edge_index and y")
    keys = data.keys() if callable(getattr(data, "keys", None)) else vars(data)
    if dropped := sorted(k for k in keys if k not in PYG_ATTRIBUTES and _is_set(data, k)):
        LOG.warning("graph %r: attributes that are not used: %s", name, ", ".join(dropped))
    graph = from_pyg_unchecked(data, num_classes, name, split)
    if not isinstance(getattr(data, "x", None), Tensor):
        graph = _with_degrees(graph)
    graph = replace(
        graph, ids=None if ids is None else _texts(ids), class_names=tuple(map(str, class_names))
    )
    return merge_edges(graph.check(), aggregate)


def _is_set(data: Any, key: str) -> bool:
    return not key.startswith("_") and isinstance(getattr(data, key, None), Tensor)


def from_pyg_unchecked(
    data: Any, num_classes: int | None = None, name: str = "graph", split: int = 0
) -> Graph:
    """`from_pyg` for data that `from_pyg` has accepted before. It checks and merges nothing.

    Without x, the graph has no features. Checking and merging take most of the time for large
    graphs.
    """
    y = _whole_numbers(data.y, name)
    if num_classes is None:
        num_classes = int(y.max()) + 1 if len(y) else 0
    weight, x = getattr(data, "edge_weight", None), getattr(data, "x", None)
    if not isinstance(x, Tensor):
        batch = getattr(data, "batch", None)
        x = torch.zeros(len(y if batch is None else batch), 0)
    return Graph(
        x=(x.to_dense() if x.layout != torch.strided else x).float(),
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
    aggregate: str = "",
) -> Graph:
    """Returns a Graph from a directed or undirected networkx graph, or from a multigraph.

    Nodes are sorted if they can be compared, else they keep the order of networkx. Their names
    become the ids.

    Args:
        g: The networkx graph.
        features: Node attribute, a number or a sequence of numbers, of one length for all nodes. If
            no node has it, the features are the nodes' degrees.
        label: Node attribute, an integer or a name. Names are numbered in sorted order. A node
            without this attribute is unlabelled.
        weight: Edge attribute, 1 where missing. If no edge has it, the graph is unweighted.
        num_classes: Number of classes. The default is derived from the labels.
        name: The graph's name.
        aggregate: How the parallel edges of a multigraph get one weight: "sum", "mean", "count" or
            "max". The default is the sum if their weights differ.
    """
    require_aggregate(aggregate, "aggregate")
    try:
        nodes = sorted(g.nodes)
    except TypeError:
        nodes = list(g.nodes)
    if not nodes:
        raise DataError(f"graph {name!r}: no nodes")
    rows = []
    featured = any(features in g.nodes[node] for node in nodes)
    for node in nodes if featured else ():
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
    labels = [g.nodes[node].get(label) for node in nodes]
    y, num_classes, class_names = classes_of(
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
    edges = np.array(ends, dtype=np.int64).reshape(-1, 2).T
    numbers = np.array(weights, dtype=np.float64) if weighted else None
    if not g.is_directed():
        edges, numbers = mirrored(edges, numbers)
    edges, numbers = merged(edges, numbers, len(nodes), aggregate, f"graph {name!r}")
    ids = _texts(nodes)
    graph = Graph(
        x=torch.from_numpy(np.stack(rows)) if featured else torch.zeros(len(nodes), 0),
        edge_index=torch.from_numpy(edges.copy()),
        y=y,
        num_classes=num_classes,
        edge_weight=None if numbers is None else torch.from_numpy(numbers).float(),
        name=name,
        ids=ids if len(set(ids.tolist())) == len(ids) else None,  # 1 and "1" are two nodes
        class_names=class_names,
    )
    return (graph if featured else _with_degrees(graph)).check()


# ---- one file ----
def to_file(graph: Graph, path: str | Path) -> Path:
    """Writes a graph of any kind with all its fields as one .safetensors file. Returns the path.

    `from_file` reads an identical graph back, apart from `seconds_loading`.
    """
    path = Path(path)
    if path.exists():
        raise DataError(f"{path} exists already: choose another name")
    if isinstance(graph, RawGraph):
        raise DataError(f"graph {graph.name!r}: its columns are not encoded yet; encode it first")
    # Copies, because empty masks may share one tensor, which safetensors refuses.
    tensors = {
        f.name: v.clone(memory_format=torch.contiguous_format)
        for f in fields(Graph)
        if isinstance(v := getattr(graph, f.name), Tensor)
    }
    if graph.ids is not None:  # as a tensor, because the size of metadata is limited
        tensors["ids"] = torch.frombuffer(
            bytearray(json.dumps(graph.ids.tolist()).encode()), dtype=torch.uint8
        )
    metadata = {
        "num_classes": graph.num_classes,
        "name": graph.name,
        "class_names": graph.class_names,
        "feature_names": graph.feature_names,
        "encoding": None if graph.encoding is None else graph.encoding.to_json(),
    }
    save_file(tensors, path, metadata={"fedloom-graph": json.dumps(metadata)})
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


@timed
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
        ids = tensors.pop("ids", None)
        names = {
            key: tuple(map(str, metadata.get(key, ()))) for key in ("class_names", "feature_names")
        }
        encoding = metadata.get("encoding")
        return Graph(
            num_classes=int(metadata["num_classes"]),
            name=str(metadata["name"]),
            ids=None if ids is None else _texts(json.loads(ids.numpy().tobytes())),
            class_names=names["class_names"],
            feature_names=names["feature_names"],
            encoding=None if encoding is None else Encoding.from_json(encoding),
            **tensors,
        ).check()
    except OSError as error:
        raise DataError(f"graph: cannot read {str(path)!r} ({error.strerror or error})") from error
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise DataError(
            f"graph: {str(path)!r} is not a graph's .safetensors file ({error})"
        ) from error


# ---- shared ----
def _with_degrees(graph: Graph) -> Graph:
    LOG.info("graph %r: no features: the nodes' degrees are used", graph.name)
    x = degree_features(graph.edge_index, graph.num_nodes)
    return replace(graph, x=x, feature_names=degree_names())


def _texts(values: Sequence[Any]) -> np.ndarray:
    return np.array([str(value) for value in values], dtype=np.str_)


def _is_number(value: Any) -> bool:
    try:
        return -FLOAT32 <= float(value) <= FLOAT32
    except (TypeError, ValueError):
        return False


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
