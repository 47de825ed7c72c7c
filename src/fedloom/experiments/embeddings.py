"""Embeddings in two dimensions of the items that a run's models classify.

They are computed on demand and kept in the run folder. The federation is loaded and divided again,
and the method's set-up is repeated, as when a run is resumed. Both give the same results as the
first time. Then the clients load the final models of the run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedloom._system import write_atomic
from fedloom.core.client import Client
from fedloom.core.message import Message
from fedloom.core.method import Method
from fedloom.core.registry import make_method
from fedloom.core.replies import Replies
from fedloom.core.server import RoundPolicy, Server
from fedloom.data.federation import Federation
from fedloom.engines.loop import Engine
from fedloom.errors import ConfigError, DataError, FedloomError, unknown
from fedloom.experiments.recipe import Recipe, make_recipe
from fedloom.experiments.report.artifacts import EMBEDDINGS, Figure
from fedloom.experiments.result import read_run
from fedloom.experiments.run import agree_on_facts, threads
from fedloom.experiments.settings import chosen_evaluation
from fedloom.nn.model import Model
from fedloom.nn.weights import load_weights
from fedloom.privacy.secure_aggregation import aggregation_for, responder_for

WAYS = ("pca", "tsne")
TABLES = ("data", "partition", "model", "method", "run")
WIDTH = 50  # number of principal components that t-SNE starts from


def embed(
    folder: str | Path, clients: Sequence[str] | None = None, most: int = 2000, how: str = "tsne"
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
    """
    if how not in WAYS:
        raise unknown("way to two dimensions: how", how, WAYS)
    if most < 3:
        raise ConfigError(f"most is {most}, must be at least 3")
    folder = Path(folder)
    run = read_run(folder)
    if run.summary["status"] != "completed":
        raise DataError(
            f"run: {str(folder)!r} is {run.summary['status']}, embeddings are of completed runs"
        )
    if not run.models:
        raise DataError(f"run: {str(folder)!r} has no models to compute embeddings with")
    recipe = _recipe(folder, run.summary["config"])
    with threads(recipe.run.threads):
        parties, method = _prepared(recipe)
        chosen = list(parties) if clients is None else list(clients)
        for name in chosen:
            if name not in parties:
                raise unknown("client", name, parties)
        found = [
            _embedded(folder, method, parties[name], run.models, run.summary["evaluation"])
            for name in chosen
        ]
    labels = [parties[name].full_graph.y for name in chosen]
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


# ---- clients from a folder ----
def _recipe(folder: Path, config: Mapping[str, Any]) -> Recipe:
    if "partition" not in config or "deployment" in config:
        raise DataError(
            f"run: {str(folder)!r}: its federation was given from Python, or by parties; "
            "it cannot be made again from config.json"
        )
    try:
        return make_recipe({name: config[name] for name in TABLES if name in config})
    except ConfigError as error:
        raise DataError(
            f"run: {str(folder)!r}: config.json cannot be used any more ({error})"
        ) from error


class _Ready(Exception):  # noqa: N818
    """The set-up is over."""


class _Watcher:
    """Ends a run before its first round."""

    def entered_rounds(self, server: Server, count: int) -> int:
        raise _Ready

    def finished_round(self, server: Server) -> bool:
        raise AssertionError("there are no rounds")

    def evaluated(self, server: Server, replies: Replies, stage: str) -> None:
        """Ignores scores before the rounds: they are in the history already."""

    def evaluated_in_sum(self, server: Server, total: Message, stage: str) -> None:
        """Ignores them as `evaluated` does."""


def _prepared(recipe: Recipe) -> tuple[dict[str, Client], Method]:
    """Returns the clients as they were before the first round, and the method."""
    method = make_method(recipe.method, recipe.method_settings)
    divided = recipe.federation()
    federation: Federation = (divided.merged() if method.centralized else divided).check()
    settings, model = recipe.run, recipe.model
    facts = agree_on_facts(
        method, recipe.method, federation.roster, model.name, model.dropout, settings
    )
    graphs = zip(federation.names, federation.graphs, strict=True)
    engine = Engine(
        method,
        (
            Client(name, graph, facts, federation.inductive, responder_for(facts))
            for name, graph in graphs
        ),
        settings.faults,
    )
    evaluated = chosen_evaluation(method, recipe.method, settings.evaluation)
    with suppress(_Ready):
        method.run(
            Server(
                method,
                facts,
                engine.call,
                RoundPolicy(evaluated),
                _Watcher(),
                aggregation_for(facts),
            )
        )
    return engine.clients, method


def _embedded(
    folder: Path, method: Method, client: Client, models: Mapping[str, Message], evaluated: str
) -> tuple[Tensor, bool]:
    """Returns rows [items, width] of a client's items, and whether they are embeddings.

    They are class scores if the method has no embeddings.
    """
    owner = "server" if evaluated != "local" and "server" in models else client.name
    if owner not in models:
        raise DataError(
            f"run: {str(folder)!r}: there is no models/{owner}.safetensors, "
            "which the run was scored with"
        )
    try:
        if owner == client.name:
            load_weights(client.state["model"], models[owner])
        with torch.no_grad():
            return _embeddings(method, client, None if owner == client.name else models[owner])
    except FedloomError:
        raise
    except (LookupError, RuntimeError, ValueError, AssertionError) as error:
        raise DataError(
            f"run: {str(folder)!r}: models alone do not bring back client {client.name!r}: "
            f"this method changes more in its rounds ({type(error).__name__}: {error})"
        ) from error


def _embeddings(method: Method, client: Client, model: Message | None) -> tuple[Tensor, bool]:
    """Returns the input of the last classifier that the client's predictions use.

    Returns class scores, and False, if the predictions do not come from one classifier.
    """
    seen: list[Tensor] = []
    scored: list[Tensor] = []
    for own in _models(client.state):
        _record(own, "items", seen)
        _record(own, "logits", scored)
    logits = method.predict(client, model)
    items = client.full_graph.num_items
    # A method may append further nodes to the client's own.
    alone = not scored or torch.equal(scored[-1][:items], logits)
    return (seen[-1][:items], True) if seen and alone else (logits, False)


def _record(model: Model, name: str, outputs: list[Tensor]) -> None:
    """Makes a model's function append its outputs to a list."""
    function = getattr(model, name)

    def recorded(*args: Any) -> Tensor:
        outputs.append(function(*args))
        return outputs[-1]

    object.__setattr__(model, name, recorded)


def _models(state: Mapping[str, Any]) -> list[Model]:
    """Returns the models that a state holds, also nested ones."""
    modules = [
        module
        for value in state.values()
        if isinstance(value, nn.Module)
        for module in value.modules()
    ]
    modules += [
        model for value in state.values() if isinstance(value, dict) for model in _models(value)
    ]
    return [module for module in modules if isinstance(module, Model)]
