"""Embeddings in 2-D: what the models in a run folder make of the nodes that they predict. Made on demand, and kept in the folder.

The federation is loaded and divided again, and what the method does before its rounds is done again, as when a run is resumed: both give
what they gave the first time. Then the clients get the models that the run ended with.
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
WIDTH = 50  # of what t-SNE begins with: the principal components


def embed(
    folder: str | Path, clients: Sequence[str] | None = None, most: int = 2000, how: str = "tsne"
) -> Figure:
    """The figure of a completed run's embeddings, coloured by class and by client; it is left in the folder for reports to come.

    clients: whose nodes (all). most: how many of them, drawn at random. how: "pca", or "tsne" of the principal components. Labels, also
    those of test nodes, give nothing but colours. DataError if the folder has no models, or the federation cannot be made again from its
    config: a run from Python, or of a deployment.
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
            f"run: {str(folder)!r}: clients' embeddings differ in width; choose clients with the same model"
        )
    rows, classes = torch.cat([z for z, _ in found]).numpy(), torch.cat(labels).numpy()
    owners = np.repeat(np.arange(len(chosen)), [len(y) for y in labels])
    taken = np.flatnonzero(classes >= 0)
    if len(taken) < 3:
        raise DataError(
            f"run: {str(folder)!r}: the chosen clients have {len(taken)} labelled items, a picture needs 3"
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
    what = (
        "what the models make of an item just before they classify it"
        if inner
        else "the class scores that items are given"
    )
    way = {
        "pca": "two principal components",
        "tsne": "t-SNE: neighbours are alike, distances between groups say little",
    }[how]
    panels = [{"title": "", "points": points, "classes": classes, "clients": owners}]
    caption = f"{len(points):,} items in two dimensions, by {what} ({way}). Labels give the colours alone."
    return {
        "id": "embeddings", "title": "Embeddings", "caption": caption, "section": "pictures", "kind": "scatter", "panels": panels,
        "client_names": names,
    }  # fmt: skip


def reduced(rows: NDArray[np.float32], how: str) -> NDArray[np.float64]:
    """Rows [n, width] in two dimensions, from 0 to 1, the same for the same rows."""
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    if not np.ptp(rows, axis=0).any():
        return np.full((len(rows), 2), 0.5)  # all alike
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


# ---- from a folder back to clients ----
def _recipe(folder: Path, config: Mapping[str, Any]) -> Recipe:
    if "partition" not in config or "deployment" in config:
        raise DataError(
            f"run: {str(folder)!r}: its federation was given from Python, or by parties; it cannot be made again from config.json"
        )
    try:
        return make_recipe({name: config[name] for name in TABLES if name in config})
    except ConfigError as error:
        raise DataError(
            f"run: {str(folder)!r}: config.json cannot be used any more ({error})"
        ) from error


class _Ready(Exception):  # noqa: N818
    """The rounds would begin."""


class _Watcher:
    """Ends a run where its rounds would begin."""

    def entered_rounds(self, server: Server, count: int) -> int:
        raise _Ready

    def finished_round(self, server: Server) -> bool:
        raise AssertionError("there are no rounds")

    def evaluated(self, server: Server, replies: Replies, stage: str) -> None:
        """Scores before the rounds are in the history already."""

    def evaluated_in_sum(self, server: Server, total: Message, stage: str) -> None:
        """The same."""


def _prepared(recipe: Recipe) -> tuple[dict[str, Client], Method]:
    """The clients as they were when the rounds began, and the method."""
    method = make_method(recipe.method, recipe.method_settings)
    divided = recipe.federation()
    federation: Federation = (divided.merged() if method.centralized else divided).check()
    rules, model = recipe.run, recipe.model
    facts = agree_on_facts(
        method, recipe.method, federation.roster, model.name, model.dropout, rules
    )
    graphs = zip(federation.names, federation.graphs, strict=True)
    engine = Engine(
        method,
        (
            Client(name, graph, facts, federation.inductive, responder_for(facts))
            for name, graph in graphs
        ),
        rules.faults,
    )
    evaluated = chosen_evaluation(method, recipe.method, rules.evaluation)
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
    """Rows [items, width] by which a client's items are predicted, and whether they are embeddings: class scores if there are none."""
    owner = "server" if evaluated != "local" and "server" in models else client.name
    if owner not in models:
        raise DataError(
            f"run: {str(folder)!r}: there is no models/{owner}.safetensors, which the run was scored with"
        )
    try:
        if owner == client.name:
            load_weights(client.state["model"], models[owner])
        with torch.no_grad():
            return _made_of(method, client, None if owner == client.name else models[owner])
    except FedloomError:
        raise
    except (LookupError, RuntimeError, ValueError, AssertionError) as error:
        raise DataError(
            f"run: {str(folder)!r}: models alone do not bring back what client {client.name!r} predicted with: this method changes more "
            f"in its rounds ({type(error).__name__}: {error})"
        ) from error


def _made_of(method: Method, client: Client, model: Message | None) -> tuple[Tensor, bool]:
    """What the extractor of the last model that has a part in the client's predictions gives, if nothing else has one."""
    seen: list[Tensor] = []
    scored: list[Tensor] = []
    for net in _models(client.state):
        _listen(net, "items", seen)
        _listen(net, "logits", scored)
    logits = method.predict(client, model)
    items = client.full_graph.num_items
    # A method may work on a graph with further nodes, behind the client's own.
    alone = not scored or torch.equal(scored[-1][:items], logits)
    return (seen[-1][:items], True) if seen and alone else (logits, False)


def _listen(net: Model, name: str, heard: list[Tensor]) -> None:
    """Has a model's function of that name put what it gives into a list, too."""
    speak = getattr(net, name)

    def spoken(*args: Any) -> Tensor:
        heard.append(speak(*args))
        return heard[-1]

    object.__setattr__(net, name, spoken)


def _models(state: Mapping[str, Any]) -> list[Model]:
    """The models that a state holds, also inside others."""
    held = [
        module
        for value in state.values()
        if isinstance(value, nn.Module)
        for module in value.modules()
    ]
    held += [net for value in state.values() if isinstance(value, dict) for net in _models(value)]
    return [module for module in held if isinstance(module, Model)]
