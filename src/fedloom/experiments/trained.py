"""Trained models: a torch module for new graphs, and one file that holds all of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from fedloom._system import write_atomic
from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.core.message import Message, flatten, unflatten
from fedloom.core.method import OWN_LOGITS, Method
from fedloom.core.registry import make_method
from fedloom.data.datasets import load
from fedloom.data.encoding import Encoding
from fedloom.data.files import as_graph, from_folder, from_pyg, is_folder_of_tables
from fedloom.data.graph import Graph, Task
from fedloom.errors import ConfigError, DataError, FedloomError
from fedloom.experiments.predictions import Predictions, predictions_of
from fedloom.experiments.trust import require_trust
from fedloom.nn.model import Model
from fedloom.nn.own_model import OwnSpec, Source, own_spec

FORMAT = "fedloom-model/1"
METADATA = "fedloom-model"  # the entry in the metadata of a .safetensors file
WHICH = ("best", "final")


@dataclass(frozen=True)
class ModelCard:
    """What a model's file says besides the tensors.

    Attributes:
        owner: The client whose model it is, or "server".
        which: "best": of the best validation round, which the scores are of. "final": of the last.
        round: The round after which the model was kept.
        stage: The stage of that evaluation.
        method: The method's name, or the path of a user's own file.
        settings: The method's settings.
        model: The spec of the model.
        num_features: Number of node features.
        num_classes: Number of classes.
        task: "node" or "graph".
        dropout: Share of hidden units dropped in training.
        seed: The seed of the run.
        class_names: The classes' own names. Empty: their numbers.
        feature_names: The names of the features. Empty: unnamed.
        flow: The run's `data.flow`, which applies to a dataset when it is loaded.
        encoding: What made the features of raw columns, as JSON. "": they were numbers.
        own_module: Whether the model is a user's module that no file defines.
    """

    owner: str
    which: str
    round: int | None
    stage: str
    method: str
    settings: dict[str, Any]
    model: str
    num_features: int
    num_classes: int
    task: Task
    dropout: float = 0.5
    seed: int = 0
    class_names: tuple[str, ...] = ()
    feature_names: tuple[str, ...] = ()
    flow: str = "forward"
    encoding: str = ""
    own_module: bool = False

    @property
    def facts(self) -> Facts:
        """The facts of a run with this client alone."""
        return Facts(
            self.num_features,
            self.num_classes,
            self.task,
            (self.owner,),
            (self.model,),
            self.dropout,
            self.seed,
        )

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes; without them, their numbers as text."""
        return self.class_names or tuple(str(c) for c in range(self.num_classes))

    @classmethod
    def of(
        cls,
        method: Method,
        name: str,
        facts: Facts,
        owner: str,
        which: str,
        round: int | None,
        stage: str,
        class_names: tuple[str, ...] = (),
        feature_names: tuple[str, ...] = (),
        flow: str = "forward",
        encoding: Encoding | None = None,
    ) -> ModelCard:
        """Returns the card of an owner's model in a run.

        Args:
            method: The method.
            name: Its name.
            facts: The facts of the run.
            owner: A client, or "server".
            which: "best" or "final".
            round: The round of the model.
            stage: The stage of the evaluation.
            class_names: The classes' own names.
            feature_names: The names of the features.
            flow: The run's `data.flow`.
            encoding: What made the features of raw columns.
        """
        spec = facts.model_of.get(owner) or method.server_spec(facts)
        return cls(
            owner,
            which,
            round,
            stage,
            name,
            method.settings(),
            spec,
            facts.num_features,
            facts.num_classes,
            facts.task,
            facts.dropout,
            facts.seed,
            class_names,
            feature_names,
            flow,
            "" if encoding is None else encoding.to_json(),
            isinstance(spec, OwnSpec) and not spec.partition(":")[0].endswith(".py"),
        )


# ---- files ----
def model_bytes(card: ModelCard, tensors: Message) -> bytes:
    """Returns a model as the content of a .safetensors file, without any code."""
    content = {"format": FORMAT, **asdict(card)}
    flat = {name: tensor.detach().contiguous() for name, tensor in flatten(tensors).items()}
    return save(_unshared(flat), {METADATA: json.dumps(content)})


def _unshared(flat: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies tensors that share their memory with another one, which safetensors refuses."""
    seen: set[int] = set()
    for name, tensor in flat.items():
        place = tensor.untyped_storage().data_ptr()
        flat[name] = tensor.clone() if place in seen else tensor
        seen.add(place)
    return flat


def read_model(path: str | Path) -> tuple[ModelCard, Message]:
    """Returns the card and the tensors of a model's file.

    Raises a DataError if it is not such a file, is damaged, or is of another version.
    """
    path = Path(path)
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if METADATA not in metadata:
                raise DataError(
                    f"model: {str(path)!r} is not a file of a trained model; it may be of an older "
                    "version, which did not write what a prediction needs. Run again"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no dict)
        content = json.loads(metadata[METADATA])
        if (found := content.pop("format", None)) != FORMAT:
            raise DataError(
                f"model: {str(path)!r} has format {found!r}, this fedloom reads {FORMAT!r}"
            )
        for name in ("class_names", "feature_names"):
            content[name] = tuple(content[name])
        return ModelCard(**content), unflatten(tensors)
    except DataError:
        raise
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"model: cannot read {str(path)!r} ({reason})") from error
    except (SafetensorError, ValueError, LookupError, TypeError) as error:
        raise DataError(f"model: {str(path)!r} is damaged ({error})") from error


def load_model(
    path: str | Path, model: str | Source | None = None, *, trust: bool = False
) -> TrainedModel:
    """Returns the model of a file: of `TrainedModel.save`, of a run's folder, or of a party.

    Args:
        path: A .safetensors file, such as models/best/NAME.safetensors in a run folder.
        model: The user's own module that was trained, as in `fedloom.run`. The file holds its
            parameters, not its code. It is needed if the module is not in a file, or if the file
            has moved.
        trust: Execute the Python files that the model's file names as method or model.
    """
    card, tensors = read_model(path)
    if model is not None:
        card = replace(card, model=own_spec(model), own_module=False)
    elif card.own_module:
        raise DataError(
            f"model: {str(path)!r} holds the parameters of your own module {card.model!r}; give "
            f"its class: fedloom.load_model(path, model={card.model})"
        )
    require_trusted(card, f"model {str(path)!r}", trust)
    return TrainedModel(card, tensors)


def require_trusted(card: ModelCard, where: str, trust: bool) -> None:
    """Raises a ConfigError if a model's card names Python code that the user does not trust.

    A model that the user has given is no text of the card.
    """
    model = None if isinstance(card.model, OwnSpec) else card.model
    tables = {"method": {"name": card.method, **card.settings}, "model": model}
    require_trust(tables, where, trust)


def read_data(data: Any, card: ModelCard) -> Any:
    """Returns the graph that a text names, read as the data of the run; other data unchanged.

    Args:
        data: The name of a dataset, a folder of tables or a graph's file; or anything else.
        card: The card of the model that is to predict.
    """
    if not isinstance(data, str | Path):
        return data
    if is_folder_of_tables(Path(data)):
        encoding = Encoding.from_json(card.encoding) if card.encoding else None
        graph = from_folder(data, encoding, card.classes, labels=False)
        return graph.with_flow(card.flow)
    return load(str(data)).with_flow(card.flow)


# ---- the module ----
class TrainedModel(nn.Module):
    """A client's or the server's model after a run. It predicts for graphs.

    Parameters and outputs are PyTorch tensors. Dropout is off. `torch.no_grad` is up to the caller,
    except in `predict` and `embeddings`.

    Attributes:
        card: Method, model, classes and features.
        tensors: Everything that the model needs, by name.
        own_logits: The logits of the client's own items, for methods that keep them.

    Args:
        card: The card.
        tensors: The output of `Method.predictor`.
        method: The method. None: it is made from the card.
    """

    def __init__(self, card: ModelCard, tensors: Message, method: Method | None = None):
        super().__init__()
        self.card, self.tensors = card, tensors
        self.method = method or make_method(card.method, card.settings)
        self.own_logits: Tensor | None = tensors.get(OWN_LOGITS)
        self._client = Client(card.owner, _blank(card), card.facts)
        if self.method.predicts_unseen:
            self._load({name: t for name, t in tensors.items() if name != OWN_LOGITS})

    def _load(self, kept: Message) -> None:
        card = self.card
        try:
            self.method.load_predictor(self._client, kept)
        except FedloomError:
            raise
        except (ValueError, LookupError, TypeError) as error:
            if card.owner == "server":
                raise DataError(
                    f"model: the server's model of {card.method!r} does not predict by itself; "
                    "choose a client"
                ) from error
            raise DataError(
                f"model: {card.method!r} cannot load the model of {card.owner!r} ({error}); a "
                "method that predicts with more than client.state['model'] defines `predictor` and "
                "`load_predictor`"
            ) from error
        for name, value in self._client.state.items():
            if isinstance(value, nn.Module):
                self.add_module(name, value)

    def extra_repr(self) -> str:
        """What `repr` shows besides the layers."""
        card = self.card
        return (
            f"{card.method} {card.model} of {card.owner!r}, {card.which}, "
            f"{card.num_features} features, classes {', '.join(card.classes[:10])}"
        )

    # ---- graphs ----
    def graph(
        self,
        data: Any,
        edge_index: Tensor | None = None,
        edge_weight: Tensor | None = None,
        batch: Tensor | None = None,
    ) -> Graph:
        """Returns data as a graph that the model accepts. Labels are not needed.

        Columns of named features are put into the order of the model's.

        Args:
            data: A Graph; a PyG `Data`, `Batch` or list of `Data`; a networkx graph; or node
                features [nodes, features] together with `edge_index`.
            edge_index: Edges, [2, edges].
            edge_weight: Edge weights, [edges].
            batch: The graph of each node, [nodes], in a graph-level task.

        Raises a DataError if the features are not those of the model.
        """
        if isinstance(data, Tensor):
            if edge_index is None:
                raise DataError("graph: edge_index is missing: model(x, edge_index) or model(data)")
            data = SimpleNamespace(
                x=data, edge_index=edge_index, edge_weight=edge_weight, batch=batch
            )
        card = self.card
        if not isinstance(data, Graph):
            data = self._converted(data)
        if data.task != card.task:
            raise DataError(
                f"graph {data.name!r} is a {data.task} task, the model is of a {card.task} task"
            )
        data = self._with_columns(data)
        if data.num_features != card.num_features:
            raise DataError(
                f"graph {data.name!r} has {data.num_features} features, the model of "
                f"{card.owner!r} expects {card.num_features}"
            )
        if data.num_classes != card.num_classes:
            unknown, none = torch.full_like(data.y, -1), torch.zeros_like(data.y, dtype=torch.bool)
            masks = {"train": none, "val": none, "test": none}
            data = replace(
                data, y=unknown, num_classes=card.num_classes, class_names=card.class_names, **masks
            )
        return data

    def _converted(self, data: Any) -> Graph:
        """Returns the data of another library as a Graph without labels."""
        if isinstance(data, list | tuple):
            from torch_geometric.data import Batch

            data = Batch.from_data_list(list(data))
        if not isinstance(getattr(data, "edge_index", None), Tensor) or not isinstance(
            getattr(data, "x", None), Tensor
        ):
            if hasattr(data, "nodes") and hasattr(data, "is_directed"):  # networkx
                return as_graph(data)
            raise DataError(
                f"graph: a {type(data).__name__} has no x and edge_index; valid: a fedloom Graph, "
                "a PyG Data or Batch, a list of Data, or x and edge_index"
            )
        x, batch = data.x, getattr(data, "batch", None)
        items = len(x)
        if self.card.task == "graph":
            batch = torch.zeros(len(x), dtype=torch.int64) if batch is None else batch
            items = int(getattr(data, "num_graphs", 0) or (batch.max() + 1 if len(batch) else 0))
        else:
            batch = None
        return from_pyg(
            SimpleNamespace(
                x=x,
                edge_index=data.edge_index,
                y=torch.full((items,), -1),
                edge_weight=getattr(data, "edge_weight", None),
                batch=batch,
            ),
            self.card.num_classes,
        )

    def _with_columns(self, graph: Graph) -> Graph:
        """Returns the graph with its named features in the model's order."""
        wanted, given = self.card.feature_names, graph.feature_names
        if not wanted or not given or wanted == given:
            return graph
        missing = [name for name in wanted if name not in given]
        extra = [name for name in given if name not in wanted]
        if missing or extra:
            parts = [("lacks", missing), ("has, unknown to the model,", extra)]
            said = "; ".join(f"{verb} {', '.join(names[:10])}" for verb, names in parts if names)
            raise DataError(f"graph {graph.name!r}: feature_names: it {said}")
        order = torch.tensor([given.index(name) for name in wanted])
        return replace(graph, x=graph.x[:, order].contiguous(), feature_names=wanted)

    # ---- predictions ----
    def forward(
        self,
        data: Any,
        edge_index: Tensor | None = None,
        edge_weight: Tensor | None = None,
        batch: Tensor | None = None,
    ) -> Tensor:
        """Returns logits [items, classes]. The arguments are those of `graph`."""
        return self._with_graph(
            self.graph(data, edge_index, edge_weight, batch),
            lambda client: self.method.predict(client, None),
        )

    def _with_graph(self, graph: Graph, compute: Callable[[Client], Tensor]) -> Tensor:
        """Returns what the client computes with another graph."""
        if not self.method.predicts_unseen:
            raise ConfigError(
                f"{self.card.method} cannot predict for unseen {self.card.task}s: it needs "
                f"{self.method.unseen_needs}. Without new data, predict gives the predictions for "
                f"the client's own {self.card.task}s"
            )
        client = self._client
        try:
            client.full_graph, client.graph = graph, graph.hide_labels()
            return compute(client)
        finally:
            client.full_graph = client.graph = _blank(self.card)

    def predict(self, data: Any = None, ids: Any = None) -> Predictions:
        """Returns classes and probabilities.

        Args:
            data: As in `graph`. None: the client's own items, if the method keeps their logits.
            ids: The items' ids. None: those of the graph.
        """
        if data is None:
            if self.own_logits is None:
                raise ConfigError(
                    f"predict: give a graph; the model of {self.card.owner!r} holds no predictions"
                )
            logits, found = self.own_logits, np.arange(len(self.own_logits))
        else:
            graph = self.graph(data)
            found = graph.item_ids
            with torch.no_grad():
                logits = self._with_graph(graph, lambda client: self.method.predict(client, None))
        named = found if ids is None else np.asarray(ids)
        return predictions_of(logits.numpy(), named, self.card.classes)

    def embeddings(self, data: Any) -> Tensor:
        """Returns the input of the classifier, [items, width], for the items of a graph.

        For a method whose predictions do not come from one classifier, it returns the logits.

        data: as in `graph`.
        """
        return self.embedded(data)[0]

    def embedded(self, data: Any) -> tuple[Tensor, bool]:
        """Returns `embeddings`, and whether they are more than the logits."""
        graph = self.graph(data)
        inner = False

        def compute(client: Client) -> Tensor:
            nonlocal inner
            modules = [module for module in self.modules() if hasattr(module, "head")]
            with torch.no_grad(), _recorded(modules) as (seen, scored):
                logits = self.method.predict(client, None)
            items = graph.num_items
            # A method may append further nodes to the graph's own.
            inner = bool(seen) and (not scored or torch.equal(scored[-1][:items], logits))
            return seen[-1][:items] if inner else logits

        rows = self._with_graph(graph, compute)
        return rows, inner

    def save(self, path: str | Path) -> Path:
        """Writes the model as one .safetensors file, which `fedloom.load_model` reads.

        The file holds tensors and JSON, no code. Returns the path.
        """
        path = Path(path)
        try:
            write_atomic(path, model_bytes(self.card, self.tensors), shared=True)
        except OSError as error:
            raise ConfigError(f"save: cannot write {str(path)!r} ({error.strerror})") from error
        return path


def _blank(card: ModelCard) -> Graph:
    """Returns a graph of one node, in place of a client's."""
    return Graph(
        x=torch.zeros(1, card.num_features),
        edge_index=torch.zeros(2, 0, dtype=torch.int64),
        y=torch.full((1,), -1),
        num_classes=card.num_classes,
        batch=torch.zeros(1, dtype=torch.int64) if card.task == "graph" else None,
    )


@contextmanager
def _recorded(modules: list[nn.Module]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Inside the block, records the outputs of the modules' extractors and heads, in two lists."""
    seen: list[Tensor] = []
    scored: list[Tensor] = []
    patched: list[tuple[nn.Module, str]] = []
    try:
        for module in modules:
            known = ("items", "logits") if isinstance(module, Model) else ("embed", "head")
            for name, outputs in zip(known, (seen, scored), strict=True):
                object.__setattr__(module, name, _recording(getattr(module, name), outputs))
                patched.append((module, name))
        yield seen, scored
    finally:
        for module, name in patched:
            object.__delattr__(module, name)


def _recording(function: Callable[..., Tensor], outputs: list[Tensor]) -> Callable[..., Tensor]:
    def recorded(*args: Any) -> Tensor:
        outputs.append(function(*args))
        return outputs[-1]

    return recorded
