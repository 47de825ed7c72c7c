"""Pictures of what clients had to show of themselves after a run (`Method.artifacts`), read from its folder alone, and without torch.

A picture is a plain dict, as every figure of a report: `id`, `title`, `caption`, `section`, `kind` and what that kind is drawn from.

    graph     FedGH: a client's graph, what stood for it, and what became of it, nodes in the same places
    image     FedStruct: the combined adjacency before and after pruning
    scatter   embeddings in 2-D, if `fedloom.embeddings.embed` has left some
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import networkx as nx
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file
from scipy.sparse.csgraph import shortest_path

from fedloom.errors import DataError
from fedloom.methods._shared import cells as binned

Figure: TypeAlias = dict[str, Any]
Tensors: TypeAlias = Mapping[str, Any]
EMBEDDINGS = "embeddings.json"
SEED = 0  # of layouts: the same folder gives the same picture
SHADES = 1e-4  # the faintest weight that has a shade of its own, in parts of the strongest
OUTWARDS = 0.6  # power of the distance from the middle that nodes are shown at
GAP = 0.6  # between parts of a graph that are not connected, in sides of the room that one node has


def pictures(folder: str | Path, prefix: str = "") -> list[Figure]:
    """The pictures that a run folder has, none if its method shows nothing. DataError if what it has is damaged.

    prefix: what their ids begin with, to tell those of several runs apart.
    """
    folder = Path(folder)
    shown = {
        path.stem: _read(path) for path in sorted((folder / "artifacts").glob("*.safetensors"))
    }
    of_all = _read(path) if (path := folder / "artifacts.safetensors").exists() else {}
    graphs = {client: tensors for client, tensors in shown.items() if "graphs/labels" in tensors}
    rows = {client: tensors for client, tensors in shown.items() if "adjacency/weight" in tensors}
    found = [
        _made(folder, _graphs, k, client, tensors)
        for k, (client, tensors) in enumerate(graphs.items())
    ]
    if rows:
        found += _made(folder, _adjacency, rows, of_all)
    if (folder / EMBEDDINGS).exists():
        found.append(_embeddings(folder / EMBEDDINGS))
    return [{**figure, "id": prefix + figure["id"]} for figure in found]


def _read(path: Path) -> Tensors:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(f"run: {str(path)!r} is damaged ({error})") from error


def _made(folder: Path, make: Callable[..., Any], *given: Any) -> Any:
    """What `make` gives; tensors that are not there, or do not fit each other, are the folder's fault."""
    try:
        return make(*given)
    except (LookupError, ValueError, TypeError) as error:
        raise DataError(
            f"run: {str(folder)!r} is damaged (artifacts: {type(error).__name__}: {error})"
        ) from error


def _figure(name: str, title: str, caption: str, kind: str, **content: Any) -> Figure:
    return {
        "id": name,
        "title": title,
        "caption": caption,
        "section": "pictures",
        "kind": kind,
        **content,
    }


# ---- FedGH: graphs ----
def _graphs(number: int, client: str, tensors: Tensors) -> Figure:
    """A client's graph, its pseudo-graph, and the refined one, as far as it has them."""
    labels, whole = tensors["graphs/labels"], int(tensors["graphs/nodes"])
    links = {
        name: tensors[f"graphs/links/{name}"].T.tolist()
        for name in ("original", "pseudo", "added")
        if f"graphs/links/{name}" in tensors
    }
    points = layout(len(labels), links["original"]).round(4).tolist()

    def panel(title: str, edges: list[list[int]], **more: Any) -> Figure:
        return {
            "title": title,
            "points": points,
            "edges": edges,
            "classes": labels.tolist(),
            **more,
        }

    panels = [panel(f"its graph: {len(links['original']):,} edges", links["original"])]
    if "pseudo" in links:
        panels.append(panel(f"pseudo-graph: {len(links['pseudo']):,}", links["pseudo"]))
    if "added" in links:
        panels.append(
            panel(
                f"refined: {len(links['added']):,} added", links["original"], added=links["added"]
            )
        )
    part = (
        ""
        if len(labels) == whole
        else f" Of its {whole:,} nodes, {len(labels)} that are close to each other are shown."
    )
    told = {
        "pseudo": "what it sent in its place",
        "added": "and its graph with the edges that it added",
    }
    beside = ", ".join(
        [
            "The graph that the client holds",
            *(words for name, words in told.items() if name in links),
        ]
    )
    caption = f"{beside}: each node is in the same place, its colour is its class.{part}"
    return _figure(
        f"graphs-{number}", f"The graph of client {client}", caption, "graph", panels=panels
    )


def layout(n: int, links: list[list[int]]) -> NDArray[np.float64]:
    """Places [n, 2], from 0 to 1, for the nodes of a graph; links: pairs of them. The same for the same graph.

    Every connected part is laid out by itself and has room by its number of nodes. The parts are put in rows, the largest first.
    """
    graph = nx.Graph()
    graph.add_nodes_from(range(n))
    graph.add_edges_from(links)
    parts = sorted(
        (sorted(part) for part in nx.connected_components(graph)),
        key=lambda part: (-len(part), part[0]),
    )
    points = np.zeros((n, 2))
    for part, corner, side in zip(
        parts, *_packed([len(part) ** 0.5 for part in parts]), strict=True
    ):
        points[part] = corner + side * _connected(graph.subgraph(part), part)
    low, high = points.min(0, initial=np.inf), points.max(0, initial=-np.inf)
    span = max(float((high - low).max(initial=0)), 1e-9)
    return 0.5 + (points - (low + high) / 2) / span if n else points


def _packed(sides: list[float]) -> tuple[list[NDArray[np.float64]], list[float]]:
    """Corners of squares of these sides, the largest first, in rows that together are about as wide as high; and the sides."""
    width = max(max(sides, default=0), sum((side + GAP) ** 2 for side in sides) ** 0.5)
    corners, x, y, height = [], 0.0, 0.0, 0.0
    for side in sides:
        if x and x + side > width:
            x, y, height = 0.0, y - height - GAP, 0.0
        height = max(height, side)
        corners.append(np.array([x, y - side]))
        x += side + GAP
    return corners, sides


def _connected(graph: nx.Graph, part: list[int]) -> NDArray[np.float64]:
    """Places [n, 2], from 0 to 1, for a connected graph: by distances along edges, then by springs, which part what lies on one spot."""
    if len(part) < 3:
        return np.array([[0.5, 0.5]]) if len(part) == 1 else np.array([[0.2, 0.5], [0.8, 0.5]])
    inner = nx.convert_node_labels_to_integers(graph, ordering="sorted")
    start = dict(
        enumerate(_scaled(shortest_path(nx.to_scipy_sparse_array(inner), unweighted=True)))
    )
    placed = nx.spring_layout(
        inner, pos=start, k=1 / len(part) ** 0.5, iterations=60, seed=SEED, method="force"
    )
    points = np.array([placed[k] for k in range(len(part))])
    points -= np.median(points, 0)
    far = np.linalg.norm(points, axis=1, keepdims=True)
    points *= (np.maximum(far, 1e-9) / max(float(far.max()), 1e-9)) ** (
        OUTWARDS - 1
    )  # springs crowd the middle
    low, high = points.min(0), points.max(0)
    return 0.5 + (points - (low + high) / 2) / max(float((high - low).max()), 1e-9)


def _scaled(distances: NDArray[np.float64]) -> NDArray[np.float64]:
    """Places [n, 2] whose distances are near to the given ones [n, n]: classical scaling (Torgerson, 1952), a little shaken."""
    squared = distances**2
    about = squared.mean(0) + squared.mean(1)[:, None] - squared.mean() - squared
    values, vectors = (found[..., -2:] for found in np.linalg.eigh(about / 2))
    sign = np.sign(
        vectors[abs(vectors).argmax(0), [0, 1]]
    )  # an eigenvector may as well be turned round
    points = vectors * sign * np.sqrt(np.maximum(values, 0))
    points += np.random.default_rng(SEED).normal(
        scale=0.05, size=points.shape
    )  # twins lie on one spot
    return points / max(float(abs(points).max()), 1e-9)


# ---- FedStruct: the combined adjacency ----
def _adjacency(rows: Mapping[str, Tensors], of_all: Tensors) -> list[Figure]:
    """The exact Ā and what the protocol left of it: by weight, and by how many entries there are."""
    of_any = next(iter(rows.values()))
    n = int(of_any["adjacency/nodes"])
    side = binned.count(n)
    after = {kind: np.zeros((side, side)) for kind in ("weight", "entries")}
    for tensors in rows.values():
        first = int(tensors["adjacency/first"])
        for kind, total in after.items():
            part = tensors[f"adjacency/{kind}"]
            total[first : first + len(part)] += part
    before = {}
    if "adjacency/weight" in of_all:
        # If β is learned, it is the same for all.
        before["weight"] = np.tensordot(of_any["adjacency/beta"], of_all["adjacency/weight"], 1)
    if "adjacency/entries" in of_all:
        before["entries"] = of_all["adjacency/entries"]
    area = np.outer(*[np.diff(binned.begins(n))] * 2)
    shared: Figure = {
        "row_label": "nodes, by client",
        "column_label": "nodes they gather from, by client",
    }
    if "adjacency/starts" in of_all:
        shared["ticks"] = (of_all["adjacency/starts"][:-1] / n).round(6).tolist()
    known = {"before": before, "after": after}
    said = {
        "weight": lambda total: f"{total / n:.0%} of the weight",
        "entries": lambda total: f"{total / n:,.0f} entries a node",
    }
    captions = {
        "weight": "How much nodes gather from nodes over all hops, on a logarithmic scale:",
        "entries": "Which share of the entries is not 0:",
    }
    figures = []
    for kind, shade in (("weight", _shades), ("entries", _share)):
        sums = {when: matrix[kind] for when, matrix in known.items() if kind in matrix}
        top = max(float((abs(total) / area).max()) for total in sums.values())
        panels = [
            {
                "title": f"{when} pruning: {said[kind](total.sum())}",
                "size": side,
                "values": _bytes(shade(abs(total) / area, top)),
            }
            for when, total in sums.items()
        ]
        how = (
            "exactly, and with what pruning has left."
            if len(sums) == 2
            else "what pruning has left; the exact one is not known here."
        )
        title = f"Combined adjacency by {kind}"
        figures.append(
            _figure(
                f"adjacency-{kind}",
                title,
                f"{captions[kind]} {how}",
                "image",
                panels=panels,
                **shared,
            )
        )
    return figures


def _bytes(shades: NDArray[np.float64]) -> str:
    return base64.b64encode(shades.astype(np.uint8).tobytes()).decode()


def _shades(values: NDArray[np.float64], top: float) -> NDArray[np.float64]:
    """0 for 0, else 1 to 255 by the logarithm."""
    with np.errstate(divide="ignore"):
        faint = np.log(values / (top or 1.0)) / np.log(SHADES)
    return np.where(values > 0, 1 + np.rint(254 * (1 - np.clip(faint, 0, 1))), 0)


def _share(values: NDArray[np.float64], top: float) -> NDArray[np.float64]:
    """0 to 255 in proportion; whatever is not 0 can be seen."""
    return np.where(values > 0, np.maximum(1, np.rint(255 * values / (top or 1.0))), 0)


# ---- embeddings ----
def _embeddings(path: Path) -> Figure:
    """The figure that `fedloom.embeddings.embed` has left."""
    try:
        figure = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"run: {str(path)!r} is damaged ({error})") from error
    if not isinstance(figure, dict) or figure.get("kind") != "scatter":
        raise DataError(f"run: {str(path)!r} is damaged (it holds no embeddings)")
    return figure
