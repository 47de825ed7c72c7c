"""Method: one paper in one file. Its settings, its phases, and `run`, the algorithm."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import Field, dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import nn

from fedloom.core.class_weight import BALANCED
from fedloom.core.message import Message
from fedloom.core.phase import phase, phases_of, summed
from fedloom.core.settings import check_setting, setting
from fedloom.data.federation import Federation
from fedloom.errors import ConfigError, MessageError, Refusal
from fedloom.nn import metrics
from fedloom.nn.metric_names import PROBABILISTIC
from fedloom.nn.model import Model, forward_with
from fedloom.nn.weights import load_weights, weights

if TYPE_CHECKING:
    from fedloom.core.client import Client
    from fedloom.core.facts import Facts
    from fedloom.core.server import Server


# The name of the kept logits in the output of `Client.predictor`. No parameter has it.
OWN_LOGITS = "own_logits"


@dataclass(frozen=True)
class Method(ABC):
    """Base of all methods. Its fields are the paper's hyper-parameters.

    Class attributes say what a method needs and reveals:

    Attributes:
        evaluations: How the result may be scored; the first is the default. "local": each client's
            own model after its local training. "global": the server's model as the client
            downloads it. "common": the one model that all clients share.
        one_model: All clients must run the same architecture.
        centralized: It sees all graphs in one place.
        uses_cross_edges: It works on the edges between clients, which both owners must know.
        transductive: It must see all nodes before training, without their labels.
        tasks: The tasks that it can do.
        needs_of_model: What it needs of a client's model. "logits": any model. "embeddings": a
            model with an extractor and a head. "architecture": one of fedloom's own. "nothing":
            it uses no model.
        validates: Clients choose between models by their validation items.
        min_replies: The fewest replies that an exchange can continue with, whatever the quorum.
        requires_all: Phases that no client may be absent from, whatever the quorum.
        partial_participation: A round may leave out clients (`run.participation`). False for a
            method with one round: a client that is left out of it would never be trained.
        discloses_to_server: What the server learns that the phases' declarations do not show, above
            all replies as large as a client's data. `core.disclosure.server_learns` has the rest.
        discloses_to_peers: What other clients learn about a client's features, labels and edges,
            other than through the model.
        predicts_unseen: A trained model predicts for a new graph, from that graph alone.
        unseen_needs: What it needs besides, if it does not.
        keeps_logits: Clients keep their scored logits, because their predictions depend on more
            than their own graph.
    """

    rounds: int = setting(100, "communication rounds", at_least=1)

    evaluations: ClassVar[tuple[str, ...]] = ("local",)
    one_model: ClassVar[bool] = False
    centralized: ClassVar[bool] = False
    uses_cross_edges: ClassVar[bool] = False
    transductive: ClassVar[bool] = False
    tasks: ClassVar[tuple[str, ...]] = ("node", "graph")
    needs_of_model: ClassVar[str] = "logits"
    validates: ClassVar[bool] = False
    min_replies: ClassVar[int] = 1
    requires_all: ClassVar[tuple[str, ...]] = ()
    partial_participation: ClassVar[bool] = True
    discloses_to_server: ClassVar[str] = ""
    discloses_to_peers: ClassVar[str] = ""
    predicts_unseen: ClassVar[bool] = True
    unseen_needs: ClassVar[str] = ""
    keeps_logits: ClassVar[bool] = False

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        require_dataclass(cls)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for f in fields(self):
            object.__setattr__(self, f.name, check_setting(f, getattr(self, f.name), "method"))

    def check(self, facts: Facts) -> None:  # noqa: B027  (most methods need no further check)
        """Raises a ConfigError if the method cannot work with these models and sizes."""

    @abstractmethod
    def run(self, server: Server) -> None:
        """The algorithm, from top to bottom. It asks for the phases it needs, `setup` included."""

    @phase(size="int64[] is size")
    def size(self, client: Client) -> Message:
        """n_k, the number of the client's items: the weight in `@averaged(by="size")`."""
        return {"size": torch.tensor(max(1, client.graph.num_items))}  # inductive: may be empty

    @phase(
        val="int64[C,C] counts val",
        test="int64[C,C] counts test",
        auc="float32[2] in -1..1",
        probabilistic="float32[2,4]",
        loss="float32[]",
    )
    def evaluate(self, client: Client, model: Message | None = None) -> Message:
        """Scores of a model on the client's held-out items, and the loss of its last training.

        Scores are confusion matrices and, if the run wants them, AUCs and the `PROBABILISTIC`
        metrics; see `fedloom.nn.metrics`.

        model: the weights to score. None: the client's own model.
        """
        graph, facts = client.full_graph, client.facts
        with torch.no_grad():
            logits = self.predict(client, model)
        client.note_scored(self, model, logits)
        more = torch.full((2, 1 + len(PROBABILISTIC)), metrics.UNDEFINED)
        if facts.auc:
            more = metrics.from_probabilities(logits, graph, facts.top_k, facts.selection)
        val, test = metrics.held_out(logits, graph)
        return {
            "val": val,
            "test": test,
            "auc": more[:, 0],
            "probabilistic": more[:, 1:],
            "loss": client.take_training_loss(),
        }

    @summed
    @phase(
        scores="float64[6,4]",
        more="float64[8,4]",
        confusion="int64[C,C] counts test",
        loss="float64[2]",
    )
    def evaluate_sum(self, client: Client, model: Message | None = None) -> Message:
        """`evaluate` for a secure run: its sum over clients gives averages and one matrix."""
        reply = self.evaluate(client, model)
        names = [name for name in ("val", "test", "auc", "probabilistic") if name in reply]
        columns = metrics.all_scores(
            *(reply[name].unsqueeze(0) for name in names), selection=client.facts.selection
        )
        scores, more = metrics.additive_scores(columns, client.full_graph.num_items)
        loss, items = float(reply.get("loss", metrics.UNDEFINED)), int(client.graph.train.sum())
        return {
            "scores": scores,
            "more": more,
            "confusion": reply["test"],
            "loss": torch.tensor([loss, 1.0] if loss >= 0 else [0.0] * 2, dtype=torch.float64)
            * items,
        }

    @summed
    @phase(counts="int64[C] counts train")
    def count_labels(self, client: Client) -> Message:
        """The number of training items of each class, for `run.class_weight`."""
        graph = client.graph
        return {"counts": torch.bincount(graph.y[graph.train], minlength=graph.num_classes)}

    @phase()
    def weigh_classes(self, client: Client, weights: torch.Tensor) -> Message:
        """Sets the weights of classes in the client's training loss."""
        if client.facts.class_weight != BALANCED:
            raise Refusal(
                f"client {client.name!r} refuses class weights: run.class_weight is "
                f"{client.facts.class_weight!r}"
            )
        expected = (client.facts.num_classes,)
        if weights.shape != expected or not weights.is_floating_point() or (weights <= 0).any():
            raise MessageError(
                f"to client {client.name!r} in 'weigh_classes': tensor 'weights' must hold "
                f"{expected[0]} numbers above 0"
            )
        client.class_weight = weights
        return {}

    def predict(self, client: Client, model: Message | None) -> torch.Tensor:
        """Returns logits for all items of the client's full graph, without dropout.

        model: the weights to use. None: the client's own model.
        """
        own: Model = client.state["model"]
        return (
            own(client.full_graph) if model is None else forward_with(own, client.full_graph, model)
        )

    def predictor(self, client: Client) -> Message:
        """Returns what a client needs to predict after the run, by name, without copying it.

        The default is the weights of `client.state["model"]`. A method whose clients predict with
        more than that adds it, and overrides `load_predictor`, the inverse.
        """
        model = client.state.get("model")
        return dict(weights(model)) if isinstance(model, nn.Module) else {}

    def shared_predictor(self, model: Message) -> Message:
        """Returns the part of `predictor` that a shared model replaces, where that is scored.

        model: what `server.evaluate(model=...)` was given.
        """
        return dict(model)

    def server_spec(self, facts: Facts) -> str:
        """Returns the spec of the server's model, if it has one. The default is the clients'."""
        return facts.models[0]

    def load_predictor(self, client: Client, kept: Message) -> None:
        """Prepares a new client so that `predict(client, None)` predicts with what was kept.

        `predict` may be called for several graphs after that, each as `client.full_graph`.

        kept: the output of `predictor`, or a shared model.
        """
        client.state["model"] = model = client.build()
        load_weights(model, kept)

    def artifacts(self, client: Client) -> Message:
        """Returns what the report draws of a client after a completed run: small tensors.

        Artifacts are not messages: no server sees them. They must not draw from a random stream
        that training uses. A simulation writes them to its run folder, which then reveals as much
        of a client's graph as they hold, also in a secure run. A deployed party keeps them.
        """
        return {}

    def joint_artifacts(self, federation: Federation) -> Message:
        """`artifacts` of all clients together. Simulations call it, where one process holds all."""
        return {}

    @classmethod
    def shares_width(cls) -> bool:
        """Whether all clients' embeddings must be equally wide."""
        return any(phase.shares_width for phase in phases_of(cls).values())

    def single_replies(self) -> tuple[str, ...]:
        """Returns the phases whose replies the server needs one by one, with these settings.

        A method without any can run with secure sums.
        """
        phases = phases_of(type(self))
        weights = {"size", *(phase.weighted_by for phase in phases.values())}
        return tuple(
            name
            for name, phase in phases.items()
            if phase.reply
            and not phase.aggregate
            and not phase.read_by
            and name not in weights | {"evaluate"}
        )

    def sensitivities(self, facts: Facts) -> dict[str, float] | None:
        """Returns how much neighbours can change the sum of each phase, as a Euclidean length.

        What neighbours are, `facts.privacy.unit` says. A method that returns a dict bounds its
        replies itself, and a run with differential privacy asks for no other phase's reply. None:
        it knows no bound. Then only whole clients can be protected (unit "client"), if all its
        replies are updates or gradients, which are clipped.
        """
        return None

    def cautions(self) -> dict[str, str]:
        """Returns a line for each setting that lets a plain run tell more than is advised.

        The keys are the settings' names.
        """
        lines = {}
        for f in fields(self):
            value, advised = getattr(self, f.name), f.metadata.get("advised")
            if advised is not None and value < advised:
                lines[f.name] = (
                    f"method.{f.name} is {value}: clients send what fewer than {advised:g} items "
                    "contribute to; what a single item contributes to is that item's own"
                )
        return lines

    def settings(self) -> dict[str, Any]:
        """Returns the fields as a plain dict, as in a TOML file."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True)
class Plugin(ABC):
    """Base of methods that prepare the clients before another method runs, unchanged.

    The setting `base` names the other method. The class that runs inherits from both (`composed`):
    it has the settings and phases of both, and no name may have two meanings.
    """

    base: str = setting(
        "fedavg", "the method that trains: a name (see `fedloom methods`) or a file"
    )

    # As in Method: what is true of either is true of both.
    tasks: ClassVar[tuple[str, ...]] = ("node", "graph")
    uses_cross_edges: ClassVar[bool] = False
    transductive: ClassVar[bool] = False
    validates: ClassVar[bool] = False
    requires_all: ClassVar[tuple[str, ...]] = ()
    partial_participation: ClassVar[bool] = True
    discloses_to_server: ClassVar[str] = ""
    discloses_to_peers: ClassVar[str] = ""
    predicts_unseen: ClassVar[bool] = True
    unseen_needs: ClassVar[str] = ""
    keeps_logits: ClassVar[bool] = False

    @abstractmethod
    def prepare_clients(self, server: Server) -> None:
        """What happens once, before the base method sets anything up."""

    def run(self, server: Server) -> None:
        """Prepares the clients, then runs the base method."""
        self.prepare_clients(server)
        super().run(server)  # type: ignore[misc]  # the base method's `run`


def require_dataclass(cls: type[Method] | type[Plugin]) -> None:
    """Raises a ConfigError if a class declares settings but is not a dataclass.

    Without the decorator Python ignores the declarations.
    """
    for each in cls.__mro__:
        if "__dataclass_fields__" in vars(each):
            continue
        named = [key for key, value in vars(each).items() if isinstance(value, Field)]
        if named:
            raise ConfigError(
                f"method: the class {each.__name__} declares the settings {', '.join(named)}, but "
                f"is not a dataclass; write @dataclass(frozen=True) above `class {each.__name__}`"
            )


@lru_cache(maxsize=256)
def composed(plugin: type[Plugin], method: type[Method], name: str) -> type[Method]:
    """Returns the class of a plug-in in front of a method, which is found by `name`."""
    if issubclass(method, Plugin):
        raise ConfigError(f"method.base is {name!r}, a plug-in itself; give the method that trains")
    if method.centralized:
        raise ConfigError(
            f"method.base is {name!r}, which sees all graphs in one place; "
            "it has no clients to prepare"
        )
    if not (tasks := tuple(t for t in plugin.tasks if t in method.tasks)):
        has, needs = " and ".join(method.tasks), " or ".join(plugin.tasks)
        raise ConfigError(f"method.base is {name!r}, which does {has} tasks, not {needs} tasks")
    either = ("uses_cross_edges", "transductive", "validates", "keeps_logits")
    both = ("discloses_to_server", "discloses_to_peers", "unseen_needs")
    joined = {"run", "check", "tasks", "requires_all", "artifacts", "joint_artifacts"}
    joined |= {"predicts_unseen", "partial_participation"}
    names = {*dir(plugin), *(f.name for f in fields(plugin))} - {*joined, *either, *both}
    taken = {*dir(method), *(f.name for f in fields(method))}
    for key in sorted(names & taken):
        if not key.startswith(("__", "_abc_")):
            raise ConfigError(
                f"method.base is {name!r}: it and {plugin.__name__} both define {key!r}; rename one"
            )
    body: dict[str, Any] = {"__module__": plugin.__module__, "__doc__": plugin.__doc__}
    body |= {"tasks": tasks, "requires_all": (*plugin.requires_all, *method.requires_all)}
    body |= {key: getattr(plugin, key) or getattr(method, key) for key in either}
    for key in ("predicts_unseen", "partial_participation"):
        body[key] = getattr(plugin, key) and getattr(method, key)
    for key in both:
        body[key] = "; ".join(filter(None, (getattr(plugin, key), getattr(method, key))))
    joint = type(f"{plugin.__name__}{method.__name__}", (plugin, method), body)
    return dataclass(frozen=True)(joint)
