"""Result: the outcome of a run, in memory or read from its folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fedloom.core.message import Message, unflatten
from fedloom.core.method import OWN_LOGITS
from fedloom.data.federation import Federation
from fedloom.data.graph import Graph
from fedloom.errors import ConfigError, DataError, unknown
from fedloom.experiments.display import data_frame, history_records, result_html, result_text
from fedloom.experiments.predictions import Predictions, joined
from fedloom.experiments.run_folder import read_config, read_history, read_summary
from fedloom.experiments.trained import (
    WHICH,
    ModelCard,
    TrainedModel,
    read_data,
    read_model,
    require_trusted,
)
from fedloom.experiments.trust import require_trust
from fedloom.nn.own_model import OwnSpec

MODELS = "models"  # the folder of the models in a run folder


class Stored(NamedTuple):
    """A model: its card and its tensors."""

    card: ModelCard
    tensors: Message


StoredModels: TypeAlias = Mapping[str, Stored]


class Models(NamedTuple):
    """The models of a run: of the round that is reported, and of the last one."""

    best: StoredModels
    final: StoredModels


@dataclass(frozen=True, repr=False)
class Result:
    """The outcome of a run.

    Attributes:
        summary: What `--json` prints. The properties are its most used entries.
        best: The models of the round that the scores are of, by owner.
        folder: The run folder, if there is one.
        entries: The history of a run without a folder.
        final: The models of the last round, by owner.
        older: The tensors in the folder of an older version, which kept the last round's models.
        federation: The parties' graphs, if the run was started with a federation in memory.
        trust: Whether the Python files that the folder names may be executed.
    """

    summary: dict[str, Any]
    best: StoredModels = field(default_factory=dict, repr=False)
    folder: Path | None = None
    entries: list[dict[str, Any]] = field(default_factory=list, repr=False)
    final: StoredModels = field(default_factory=dict, repr=False)
    older: Mapping[str, Message] = field(default_factory=dict, repr=False)
    federation: Federation | None = field(default=None, repr=False)
    trust: bool = field(default=True, repr=False)

    def __repr__(self) -> str:
        return result_text(self.summary, self.folder)

    def _repr_html_(self) -> str:
        return result_html(self.summary, self.folder)

    def pandas(self, clients: bool = False) -> Any:
        """Returns the history as a pandas DataFrame (extra `tables`).

        Args:
            clients: A row for each round and client, instead of one for each round.
        """
        return data_frame(history_records(self.history, clients))

    @cached_property
    def history(self) -> list[dict[str, Any]]:
        """An entry for each round, and for each evaluation outside of rounds.

        It is read from the folder when first used.
        """
        return read_history(self.folder) if self.folder else self.entries

    @property
    def accuracy(self) -> float | None:
        """Test accuracy at the best validation round, clients weighted by size."""
        return self.summary["accuracy"]

    @property
    def per_client(self) -> list[dict[str, Any]]:
        """Each client's size, counts and scores at that round."""
        return self.summary["per_client"]

    @property
    def traffic(self) -> dict[str, Any]:
        """Bytes and scalars up and down, in total and per phase."""
        return self.summary["traffic"]

    # ---- models ----
    @property
    def models(self) -> dict[str, Message]:
        """{client: tensors} of the best validation round, and the server's under "server".

        The scores are of these models.
        """
        return _weights(self.best)

    @property
    def final_models(self) -> dict[str, Message]:
        """As `models`, of the last round."""
        return {**self.older, **_weights(self.final)}

    def model(self, client: str | None = None, which: str = "best") -> TrainedModel:
        """Returns a model as a torch module that takes a PyG `Data`, or x and edge_index.

        Args:
            client: The client whose model it is. None: the server.
            which: "best": of the best validation round. "final": of the last round.
        """
        if which not in WHICH:
            raise unknown("model: which", which, WHICH)
        stored = self.best if which == "best" else self.final
        if not stored:
            raise DataError(f"model: {self._without_models(which)}")
        clients = [name for name in stored if name != "server"]
        if client is not None and client not in clients:
            raise unknown("client", client, clients)
        if client is None and "server" not in stored and len(clients) > 1:
            raise ConfigError(
                "model: the run has no server's model; choose a client: " + ", ".join(clients)
            )
        owner = client or ("server" if "server" in stored else clients[0])
        card, tensors = stored[owner]
        if card.own_module and not isinstance(card.model, OwnSpec):  # read from a folder
            path = f"{self.folder}/{MODELS}/{which}/{owner}.safetensors"
            raise DataError(
                f"model: {card.model!r} is your own module; give its class: "
                f"fedloom.load_model({path!r}, model={card.model})"
            )
        require_trusted(card, f"run {str(self.folder)!r}", self.trust)
        try:
            return TrainedModel(card, tensors)
        except DataError as error:
            if client is not None:
                raise
            raise DataError(f"{error}: {', '.join(clients)}") from error

    def _without_models(self, which: str) -> str:
        if self.older:
            return (
                "the run folder is of an older version, whose models cannot predict; run again "
                "(`final_models` has their weights)"
            )
        if self.summary.get("status") == "unfinished":
            return "the run is unfinished and has no models yet; resume it"
        return f"the run has no {which} models: parties of a deployment keep their own"

    def predict(
        self, data: Any = None, client: str | None = None, which: str = "best"
    ) -> Predictions:
        """Returns classes and probabilities, with the data's own ids and class names.

        Args:
            data: A new graph: a fedloom Graph, a PyG `Data` or `Batch`, a list of `Data`, or the
                name, file or folder of a dataset. None: the clients' own data.
            client: The client whose model predicts. None: the server's for new data; every
                client's for its own data.
            which: "best" or "final".
        """
        if data is not None:
            model = self.model(client, which)
            return model.predict(read_data(data, model.card))
        graphs = self.own_graphs(client)
        parts: dict[str, Predictions] = {}
        for name, graph in graphs.items():
            model = self.model(name, which)
            if model.own_logits is None:
                parts[name] = model.predict(graph)
            else:
                parts[name] = model.predict(ids=graph.item_ids)
        return parts[client] if client is not None else joined(parts)

    def embeddings(
        self, data: Any = None, client: str | None = None, which: str = "best"
    ) -> Tensor:
        """Returns the input of the classifier, [items, width], for the items of a graph.

        It is the logits for a method whose predictions do not come from one classifier.

        Args:
            data: As in `predict`. None: the client's own data.
            client: The client whose model computes them. None: the server's, for new data.
            which: "best" or "final".
        """
        if data is not None:
            model = self.model(client, which)
            return model.embeddings(read_data(data, model.card))
        if client is None:
            raise ConfigError(
                "embeddings: give data, a client, or both; clients: "
                + ", ".join(name for name in self.best if name != "server")
            )
        return self.embedded(client, which)[0]

    def embedded(self, client: str, which: str = "best") -> tuple[Tensor, bool]:
        """Returns `embeddings` of a client's own items, and whether they are not the logits."""
        model, graphs = self.model(client, which), self.own_graphs(client)
        if model.own_logits is not None:
            return model.own_logits, False
        return model.embedded(graphs[client])

    def save(self, path: str | Path, client: str | None = None, which: str = "best") -> Path:
        """Writes a model as one .safetensors file for `fedloom.load_model`. Returns the path.

        Args:
            path: The file.
            client: The client whose model it is. None: the server.
            which: "best" or "final".
        """
        return self.model(client, which).save(path)

    def own_graphs(self, client: str | None = None) -> dict[str, Graph]:
        """Returns the graphs of the clients, or of one of them.

        Raises a DataError if they are not in memory and config.json cannot make them again.
        """
        federation = self.federation or self._federation_of_folder
        graphs = dict(zip(federation.names, federation.graphs, strict=True))
        if client is None:
            return graphs
        if client not in graphs:
            raise unknown("client", client, graphs)
        return {client: graphs[client]}

    @cached_property
    def _federation_of_folder(self) -> Federation:
        from fedloom.experiments.own_data import federation_of

        config = self.summary["config"]
        require_trust(config, f"run {str(self.folder)!r}", self.trust)
        try:
            return federation_of(config)
        except DataError as error:
            raise DataError(f"data: {error}; give the data") from error


def _weights(stored: StoredModels) -> dict[str, Message]:
    """Returns the tensors of models, without the predictions that some methods keep with them."""
    return {
        owner: {name: t for name, t in model.tensors.items() if name != OWN_LOGITS}
        for owner, model in stored.items()
    }


def load_run(folder: str | Path, *, trust: bool = False) -> Result:
    """Reads a run folder, also one of a run that was stopped or killed.

    Raises a DataError if it is not a run folder or is damaged.

    Args:
        folder: The run folder.
        trust: Let the result execute the Python files that the folder names as method or model,
            when it makes a model or loads the data again. Reading the folder executes nothing.
    """
    folder = Path(folder)
    summary = read_summary(folder)
    config = read_config(folder) if summary is None else summary["config"]
    try:
        history = read_history(folder)
        older = {
            path.stem: unflatten(load_file(path))
            for path in sorted((folder / MODELS).glob("*.safetensors"))
        }
    except (OSError, ValueError, SafetensorError) as error:
        raise DataError(f"run: {str(folder)!r} is damaged ({error})") from error
    best, final = (_read_models(folder, which) for which in WHICH)
    if summary is None:
        summary = {
            "status": "unfinished",
            "config": config,
            "rounds": history[-1]["round"] if history else 0,
        }
    return Result(summary, best, folder, final=final, older=older, trust=trust)


def _read_models(folder: Path, which: str) -> dict[str, Stored]:
    try:
        return {
            path.stem: Stored(*read_model(path))
            for path in sorted((folder / MODELS / which).glob("*.safetensors"))
        }
    except DataError as error:
        raise DataError(f"run: {str(folder)!r} is damaged ({error})") from error
