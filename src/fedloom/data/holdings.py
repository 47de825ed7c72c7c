"""Holdings: who holds what. The numbers behind "how unequal are the clients?", and a picture of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedloom.errors import ConfigError
from fedloom.graph import Federation, Graph

_SUFFIXES = (".png", ".svg", ".pdf")


def is_undirected(graph: Graph) -> bool:
    """Whether every edge is stored in both directions."""
    source, target = graph.edge_index.numpy()
    forth, back = source * graph.num_nodes, target * graph.num_nodes
    for keys, other in ((forth, target), (back, source)):  # in place: fresh memory takes longer than the sums
        keys += other
        keys.sort()
    return bool(np.array_equal(forth, back))


def count_edges(edge_index: Tensor, undirected: bool) -> int:
    """The number of edges in [2, stored]; the two directions of an undirected edge count as one, a self-loop as one."""
    loops = int((edge_index[0] == edge_index[1]).sum())
    return loops + (edge_index.shape[1] - loops) // (2 if undirected else 1)


def holdings(federation: Federation) -> dict[str, Any]:
    """What each client holds and what all hold together, as plain numbers that can go into a JSON file.

    clients: per client name, nodes, items, train, val, test, edges_kept, edges_cut (with one end here; None if the uncut
    graph is unknown), labels (items per class), and

    - node tasks: homophily, and homophily_per_class: of all ends of kept edges at nodes of a class, the share whose other end
      has the same label; None where there is no such end. Self-loops and nodes without a label do not count.
    - graph tasks: graph_size_per_class, the mean number of nodes of a class's graphs; None where there are none.

    totals: clients, nodes, items, train, val, test, edges_kept, edges_cut (each edge once) and cut_share, its share of all edges.
    about: the federation's own record.
    """
    whole = federation.whole
    undirected = is_undirected(whole) if whole is not None else all(map(is_undirected, federation.graphs))
    cut = None if whole is None else _edges_cut(federation, whole, undirected)
    clients = [
        {
            "name": name, "nodes": graph.num_nodes, "items": graph.num_items,
            "train": int(graph.train.sum()), "val": int(graph.val.sum()), "test": int(graph.test.sum()),
            "edges_kept": count_edges(graph.edge_index, undirected), "edges_cut": None if cut is None else cut[k], **_by_class(graph),
        }
        for k, (name, graph) in enumerate(zip(federation.names, federation.graphs, strict=True))
    ]  # fmt: skip
    totals: dict[str, Any] = {"clients": federation.num_clients}
    totals |= {key: sum(c[key] for c in clients) for key in ("nodes", "items", "train", "val", "test", "edges_kept")}
    # Both owners of a cut edge counted it.
    totals["edges_cut"] = None if cut is None else sum(cut) // 2
    totals["cut_share"] = None if cut is None else totals["edges_cut"] / max(totals["edges_kept"] + totals["edges_cut"], 1)
    return {"about": dict(federation.about), "clients": clients, "totals": totals}


def held_by_class(federation: Federation) -> dict[str, Any]:
    """What a run folder keeps of who holds what, in one pass over the edges: per client its name, labels, and homophily (graph tasks:
    graph sizes) per class, as in `holdings`."""
    clients = [{"name": name, **_by_class(graph)} for name, graph in zip(federation.names, federation.graphs, strict=True)]
    return {"task": federation.task, "clients": clients}


def plot_holdings(federation: Federation, path: str | Path) -> Path:
    """Draws the labels per client and class, and beside them the homophily (graph tasks: the graphs' mean size).

    Writes a PNG, SVG or PDF by the path's suffix and gives the path back. Needs the extra `fedloom[plot]`.
    """
    path = Path(path)
    if path.suffix.lower() not in _SUFFIXES:
        raise ConfigError(f"path {str(path)!r}: must end in {', '.join(_SUFFIXES)}")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("plots need matplotlib: pip install 'fedloom[plot]'") from None
    held = holdings(federation)
    labels = _matrix(held, "labels")
    labels[labels == 0] = np.nan  # absent is grey, not the palest colour
    clients, classes = labels.shape
    # A Figure made by hand, not by pyplot, draws without a display and leaves no global state behind.
    size = (4.2 + 2 * max(classes * (0.42 if classes <= 15 else 0.2), 2.2), 1.6 + max(min(0.3 * clients, 4 + 0.12 * clients), 1.8))
    figure = Figure(figsize=size, layout="constrained")
    left, right = figure.subplots(1, 2)
    names = [client["name"] for client in held["clients"]]
    if federation.task == "node":
        _heat_map(left, labels, names, "nodes per class", "{:.0f}")
        _heat_map(right, _matrix(held, "homophily_per_class"), names, "homophily", "{:.2f}", top=1.0)
    else:
        _heat_map(left, labels, names, "graphs per class", "{:.0f}")
        _heat_map(right, _matrix(held, "graph_size_per_class"), names, "mean nodes per graph", "{:.0f}")
    figure.suptitle(_title(held), fontsize=11)
    figure.savefig(path, dpi=150)
    return path


def _edges_cut(federation: Federation, whole: Graph, undirected: bool) -> list[int]:
    """Per client the number of cut edges it has an end of."""
    owner = torch.full((int(whole.node_id.max()) + 1,), -1)
    for k, graph in enumerate(federation.graphs):
        owner[graph.node_id] = k
    ends = owner[whole.node_id[whole.edge_index]]
    touched = torch.bincount(ends[:, ends[0] != ends[1]].flatten(), minlength=federation.num_clients)
    return (touched // (2 if undirected else 1)).tolist()


def _by_class(graph: Graph) -> dict[str, Any]:
    labels = torch.bincount(graph.y[graph.y >= 0], minlength=graph.num_classes).tolist()
    return {"labels": labels, **(_homophily(graph) if graph.batch is None else _graph_sizes(graph, graph.batch))}


def _homophily(graph: Graph) -> dict[str, Any]:
    source, target = graph.edge_index
    ends = graph.y[graph.edge_index[:, source != target]]
    ends = ends[:, (ends >= 0).all(0)]
    all_ends = torch.bincount(ends.flatten(), minlength=graph.num_classes)
    alike = torch.bincount(ends[:, ends[0] == ends[1]].flatten(), minlength=graph.num_classes)
    overall = _ratios(alike.sum()[None], all_ends.sum()[None])
    return {"homophily": overall[0], "homophily_per_class": _ratios(alike, all_ends)}


def _graph_sizes(graph: Graph, batch: Tensor) -> dict[str, Any]:
    size, known = torch.bincount(batch, minlength=graph.num_items), graph.y >= 0
    y = graph.y[known]
    nodes = torch.zeros(graph.num_classes, dtype=torch.int64).index_add_(0, y, size[known])
    return {"graph_size_per_class": _ratios(nodes, torch.bincount(y, minlength=graph.num_classes))}


def _ratios(above: Tensor, below: Tensor) -> list[float | None]:
    return [a / b if b else None for a, b in zip(above.tolist(), below.tolist(), strict=True)]


def _matrix(held: dict[str, Any], key: str) -> npt.NDArray[np.float64]:
    """[clients, classes], NaN where a value is None."""
    return np.array([client[key] for client in held["clients"]], dtype=np.float64)


def _title(held: dict[str, Any]) -> str:
    about, totals = held["about"], held["totals"]
    parts = [str(about[key]) for key in ("dataset", "partition") if key in about]
    parts.append(f"{totals['clients']} clients")
    if totals["edges_cut"]:
        parts.append(f"{totals['cut_share']:.0%} of the edges cut")
    return " · ".join(parts)


def _heat_map(axes: Any, values: npt.NDArray[np.float64], names: list[str], title: str, text: str, top: float | None = None) -> None:
    """One map, clients down and classes across; cells without a value are grey, and numbers stand in them where there is room."""
    import matplotlib

    palette = matplotlib.colormaps["YlGnBu"].with_extremes(bad="0.85")  # safe for colour-blind eyes, and has no grey of its own
    image = axes.imshow(np.ma.masked_invalid(values), cmap=palette, vmin=0, vmax=top, aspect="auto", interpolation="nearest")
    clients, classes = values.shape
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("class", fontsize=9)
    axes.set_ylabel("client", fontsize=9)
    every = 1 + clients // 100
    axes.set_xticks(range(classes), range(classes), fontsize=8 if classes <= 15 else 6)
    axes.set_yticks(range(0, clients, every), names[::every], fontsize=8 if clients <= 20 else 6)
    # White lines between the cells.
    axes.set_xticks(np.arange(1, classes) - 0.5, minor=True)
    axes.set_yticks(np.arange(1, clients) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=1)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)
    if clients <= 50 and classes <= 15:
        for (k, c), value in np.ndenumerate(values):
            if np.isfinite(value):
                ink = "white" if image.norm(value) > 0.55 else "black"
                axes.text(c, k, text.format(value), ha="center", va="center", fontsize=7 if clients <= 20 else 5.5, color=ink)
    bar = axes.figure.colorbar(image, ax=axes, pad=0.02, aspect=8 * axes.figure.get_figheight())
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8)
