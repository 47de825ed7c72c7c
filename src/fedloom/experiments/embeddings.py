"""Embeddings in two dimensions of the items that a run's models classify.

They are computed on demand and kept in the run folder. The federation is loaded and divided again,
which gives the same graphs as the first time. The models are those of the best validation round.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom._system import write_atomic
from fedloom.errors import ConfigError, DataError, unknown
from fedloom.experiments.report.artifacts import EMBEDDINGS, Figure
from fedloom.experiments.result import load_run
from fedloom.experiments.run import threads

WAYS = ("pca", "tsne")
WIDTH = 50  # number of principal components that t-SNE starts from


def embed(
    folder: str | Path,
    clients: Sequence[str] | None = None,
    most: int = 2000,
    how: str = "tsne",
    *,
    trust: bool = False,
) -> Figure:
    """Returns the figure of a completed run's embeddings, coloured by class and by client.

    The figure is kept in the folder for later reports. Labels, including those of test items, only
    choose colours. Raises a DataError if the folder has no models, or if its config cannot restore
    the federation: it cannot for a run from Python or of a deployment.

    Args:
        folder: The run folder.
        clients: The clients whose items are shown. The default is all.
        most: The largest number of items. More are sampled at random.
        how: "pca", or "tsne" of the principal components.
        trust: Execute the Python files that the folder names as method or model.
    """
    if how not in WAYS:
        raise unknown("way to two dimensions: how", how, WAYS)
    if most < 3:
        raise ConfigError(f"most is {most}, must be at least 3")
    folder = Path(folder)
    run = load_run(folder, trust=trust)
    if run.summary["status"] != "completed":
        raise DataError(
            f"run: {str(folder)!r} is {run.summary['status']}, embeddings are of completed runs"
        )
    try:
        graphs = run.own_graphs()
        chosen = list(graphs) if clients is None else list(clients)
        with threads(run.summary["config"]["run"].get("threads", 1)):
            found = [run.embedded(name) for name in chosen]
    except DataError as error:
        raise DataError(f"run: {str(folder)!r}: {error}") from error
    labels = [graphs[name].y for name in chosen]
    width = min(z.shape[1] for z, _ in found)
    if any(z.shape[1] != width for z, _ in found):
        raise DataError(
            f"run: {str(folder)!r}: clients' embeddings differ in width; "
            "choose clients with the same model"
        )
    rows, classes = torch.cat([z for z, _ in found]).numpy(), torch.cat(labels).numpy()
    owners = np.repeat(np.arange(len(chosen)), [len(y) for y in labels])
    taken = np.flatnonzero(classes >= 0)
    if len(taken) < 3:
        raise DataError(
            f"run: {str(folder)!r}: the chosen clients have {len(taken)} labelled items, "
            "a figure needs 3"
        )
    if len(taken) > most:
        taken = np.sort(np.random.default_rng(0).choice(taken, most, replace=False))
    points = reduced(rows[taken], how).round(4).tolist()
    figure = _figure(
        how,
        all(inner for _, inner in found),
        points,
        classes[taken].tolist(),
        owners[taken].tolist(),
        chosen,
    )
    write_atomic(folder / EMBEDDINGS, (json.dumps(figure) + "\n").encode())
    return figure


def _figure(
    how: str,
    inner: bool,
    points: list[Any],
    classes: list[int],
    owners: list[int],
    names: list[str],
) -> Figure:
    what = "the representation just before the classifier" if inner else "the class scores"
    way = {
        "pca": "two principal components",
        "tsne": "t-SNE: neighbours are alike, distances between groups mean little",
    }[how]
    panels = [{"title": "", "points": points, "classes": classes, "clients": owners}]
    caption = (
        f"{len(points):,} items in two dimensions, by {what} of the models ({way}). "
        "Labels only choose the colours."
    )
    return {
        "id": "embeddings",
        "title": "Embeddings",
        "caption": caption,
        "section": "pictures",
        "kind": "scatter",
        "panels": panels,
        "client_names": names,
    }


def reduced(rows: NDArray[np.float32], how: str) -> NDArray[np.float64]:
    """Returns rows [n, width] as points in two dimensions, from 0 to 1. It is deterministic.

    Args:
        rows: The embeddings.
        how: "pca" or "tsne".
    """
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    if not np.ptp(rows, axis=0).any():
        return np.full((len(rows), 2), 0.5)  # all rows are equal
    wide = min(WIDTH if how == "tsne" else 2, *rows.shape)
    points = PCA(wide, svd_solver="full", random_state=0).fit_transform(rows.astype(np.float64))
    if how == "tsne" and len(rows) > 3:
        points = TSNE(
            init="pca" if wide > 1 else "random",
            perplexity=min(30.0, (len(rows) - 1) / 3),
            random_state=0,
        ).fit_transform(points)
    points = np.pad(points, ((0, 0), (0, max(0, 2 - points.shape[1])))).astype(np.float64)
    low, high = points.min(0), points.max(0)
    return 0.5 + (points - (low + high) / 2) / max(float((high - low).max()), 1e-9)
