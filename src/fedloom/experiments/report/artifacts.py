"""Makes pictures from the artifacts that clients leave in a run folder. Does not import torch.

`Method.artifacts` defines what a client leaves. A picture is a plain dict like every figure of a
report: `id`, `title`, `caption`, `section`, `kind` and the data that the kind needs.

    graph     FedGH: a client's graph, its pseudo-graph and its refined graph, in one layout
    image     FedStruct: the combined adjacency before and after pruning
    scatter   embeddings in 2-D, if `fedloom.experiments.embeddings.embed` has made some
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from fedloom.errors import DataError
from fedloom.methods._shared import cells

if TYPE_CHECKING:
    import networkx as nx

Figure: TypeAlias = dict[str, Any]
Tensors: TypeAlias = Mapping[str, Any]
EMBEDDINGS = "embeddings.json"
SEED = 0  # of layouts, so that the same folder gives the same picture
SHADES = 1e-4  # the weakest weight that has a shade of its own, relative to the strongest
SPREADING = 0.6  # exponent of a node's distance from the centre; below 1 it spreads the centre
GAP = 0.6  # between connected components, relative to the side of the square that one node gets


def pictures(folder: str | Path, prefix: str = "") -> list[Figure]:
    """Returns the pictures of a run folder. Most methods have none.

    Raises DataError if the artifacts are damaged.

    Args:
        folder: The run folder.
        prefix: The first part of the pictures' ids. It distinguishes those of several runs.
    """
    folder = Path(folder)
    by_client = {
        path.stem: _read(path) for path in sorted((folder / "artifacts").glob("*.safetensors"))
    }
    overall = _read(path) if (path := folder / "artifacts.safetensors").exists() else {}
    graphs = {client: found for client, found in by_client.items() if "graphs/labels" in found}
    rows = {client: found for client, found in by_client.items() if "adjacency/weight" in found}
    found = [
        _checked(folder, _graphs, k, client, tensors)
        for k, (client, tensors) in enumerate(graphs.items())
    ]
    if rows:
        found += _checked(folder, _adjacency, rows, overall)
    if (folder / EMBEDDINGS).exists():
        found.append(_embeddings(folder / EMBEDDINGS))
    return [{**figure, "id": prefix + figure["id"]} for figure in found]


def _read(path: Path) -> Tensors:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(f"run: {str(path)!r} is damaged ({error})") from error


def _checked(folder: Path, make: Callable[..., Any], *arguments: Any) -> Any:
    """Calls `make`. Raises DataError if tensors are missing or do not fit each other."""
    try:
        return make(*arguments)
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
    """Returns a client's graph and, if it has them, its pseudo-graph and its refined graph."""
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

    panels = [panel(f"original graph: {len(links['original']):,} edges", links["original"])]
    if "pseudo" in links:
        panels.append(panel(f"pseudo-graph: {len(links['pseudo']):,} edges", links["pseudo"]))
    if "added" in links:
        title = f"refined graph: {len(links['added']):,} edges added"
        panels.append(panel(title, links["original"], added=links["added"]))
    names = {"pseudo": "the pseudo-graph that it sent", "added": "its graph with added edges"}
    shown = ["The client's graph", *(words for name, words in names.items() if name in links)]
    caption = f"{', '.join(shown)}. Nodes have the same place in all panels. Colours are classes."
    if len(labels) < whole:
        caption += f" The picture shows {len(labels)} neighbouring nodes of {whole:,}."
    return _figure(
        f"graphs-{number}", f"The graph of client {client}", caption, "graph", panels=panels
    )


def layout(n: int, links: list[list[int]]) -> NDArray[np.float64]:
    """Returns places [n, 2], from 0 to 1, for the nodes of a graph. It is deterministic.

    Each connected component gets its own layout, and space by its number of nodes. The components
    are placed in rows, the largest first.

    Args:
        n: The number of nodes.
        links: The edges, as pairs of nodes.
    """
    import networkx as nx  # most runs have no graph to place

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
    """Packs squares into rows. All rows form a shape about as wide as high.

    Args:
        sides: The sides of the squares, the largest first.

    Returns the squares' corners, and the sides.
    """
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
    """Returns places [n, 2], from 0 to 1, for a connected graph.

    It scales the distances along edges to the plane. Springs then separate nodes on the same spot.
    """
    if len(part) < 3:
        return np.array([[0.5, 0.5]]) if len(part) == 1 else np.array([[0.2, 0.5], [0.8, 0.5]])
    import networkx as nx  # as in `layout`
    from scipy.sparse.csgraph import shortest_path

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
    far = np.maximum(far, 1e-9) / max(float(far.max()), 1e-9)
    points *= far ** (SPREADING - 1)  # springs crowd the centre
    low, high = points.min(0), points.max(0)
    return 0.5 + (points - (low + high) / 2) / max(float((high - low).max()), 1e-9)


def _scaled(distances: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns places [n, 2] whose distances are close to the given ones [n, n].

    This is classical scaling (Torgerson, 1952) with a little noise.
    """
    squared = distances**2
    about = squared.mean(0) + squared.mean(1)[:, None] - squared.mean() - squared
    values, vectors = (found[..., -2:] for found in np.linalg.eigh(about / 2))
    sign = np.sign(
        vectors[abs(vectors).argmax(0), [0, 1]]
    )  # eigenvectors have no sign of their own
    points = vectors * sign * np.sqrt(np.maximum(values, 0))
    # Nodes with the same neighbours have the same place without the noise.
    points += np.random.default_rng(SEED).normal(scale=0.05, size=points.shape)
    return points / max(float(abs(points).max()), 1e-9)


# ---- FedStruct: the combined adjacency ----
def _adjacency(rows: Mapping[str, Tensors], overall: Tensors) -> list[Figure]:
    """Returns pictures of the exact Ā and of the pruned one: by weight, and by number of entries.

    Args:
        rows: The artifacts of each client: its rows of the pruned matrix.
        overall: The artifacts of the run: the exact matrix, if it is known.
    """
    first_client = next(iter(rows.values()))
    n = int(first_client["adjacency/nodes"])
    side = cells.count(n)
    after = {kind: np.zeros((side, side)) for kind in ("weight", "entries")}
    for tensors in rows.values():
        first = int(tensors["adjacency/first"])
        for kind, total in after.items():
            part = tensors[f"adjacency/{kind}"]
            total[first : first + len(part)] += part
    before = {}
    if "adjacency/weight" in overall:
        # All clients have the same β, also if it is learned.
        beta = first_client["adjacency/beta"]
        before["weight"] = np.tensordot(beta, overall["adjacency/weight"], 1)
    if "adjacency/entries" in overall:
        before["entries"] = overall["adjacency/entries"]
    area = np.outer(*[np.diff(cells.begins(n))] * 2)
    shared: Figure = {
        "row_label": "nodes, by client",
        "column_label": "nodes they aggregate from, by client",
    }
    if "adjacency/starts" in overall:
        shared["ticks"] = (overall["adjacency/starts"][:-1] / n).round(6).tolist()
    known = {"before": before, "after": after}
    total_text = {
        "weight": lambda total: f"{total / n:.0%} of the weight",
        "entries": lambda total: f"{total / n:,.0f} entries per node",
    }
    captions = {
        "weight": "The weight with which nodes aggregate from nodes over all hops, on a "
        "logarithmic scale.",
        "entries": "The share of entries that are not 0.",
    }
    figures = []
    for kind, shade in (("weight", _shades), ("entries", _share)):
        sums = {when: matrix[kind] for when, matrix in known.items() if kind in matrix}
        top = max(float((abs(total) / area).max()) for total in sums.values())
        panels = [
            {
                "title": f"{when} pruning: {total_text[kind](total.sum())}",
                "size": side,
                "values": _bytes(shade(abs(total) / area, top)),
            }
            for when, total in sums.items()
        ]
        caption = captions[kind]
        if len(sums) < 2:
            caption += " Only the pruned matrix is shown: the exact one is not known."
        title = f"Combined adjacency by {kind}"
        figures.append(
            _figure(f"adjacency-{kind}", title, caption, "image", panels=panels, **shared)
        )
    return figures


def _bytes(shades: NDArray[np.float64]) -> str:
    return base64.b64encode(shades.astype(np.uint8).tobytes()).decode()


def _shades(values: NDArray[np.float64], top: float) -> NDArray[np.float64]:
    """Returns 0 for 0, and 1 to 255 by the logarithm for other values."""
    with np.errstate(divide="ignore"):
        faint = np.log(values / (top or 1.0)) / np.log(SHADES)
    return np.where(values > 0, 1 + np.rint(254 * (1 - np.clip(faint, 0, 1))), 0)


def _share(values: NDArray[np.float64], top: float) -> NDArray[np.float64]:
    """Returns 0 to 255 in proportion. Values other than 0 give at least 1."""
    return np.where(values > 0, np.maximum(1, np.rint(255 * values / (top or 1.0))), 0)


# ---- embeddings ----
def _embeddings(path: Path) -> Figure:
    """Returns the figure that `fedloom.experiments.embeddings.embed` wrote."""
    try:
        figure = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"run: {str(path)!r} is damaged ({error})") from error
    if not isinstance(figure, dict) or figure.get("kind") != "scatter":
        raise DataError(f"run: {str(path)!r} is damaged (it contains no embeddings)")
    return figure
