"""Copilot: what FML, FedKD and FedGKC share. Each client trains a second, common model.

The common model, the copilot, has the same architecture at all clients. Only copilots travel. Both
models are trained at once: in each step, they learn from each other as they are before it.
"""

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from fedloom.core.client import Client
from fedloom.core.facts import Facts, model_schema
from fedloom.core.message import Message
from fedloom.core.phase import Computed, phase
from fedloom.core.server import Server
from fedloom.core.settings import setting
from fedloom.data.graph import Graph
from fedloom.errors import ConfigError
from fedloom.methods._shared.local_training import LocalTraining
from fedloom.nn.build import parse_spec
from fedloom.nn.distillation import divergence
from fedloom.nn.model import Model
from fedloom.nn.training import make_optimizer, outputs, step
from fedloom.nn.weights import weights

Outputs = tuple[Tensor, Tensor]  # embeddings and logits
copilot_weights = Computed(
    lambda method, facts, message, reply: model_schema(method.copilot, facts), weights=True
)


@dataclass(frozen=True)
class WithCopilot(LocalTraining):
    """Local training of two models that teach each other."""

    copilot: str = setting("gcn-2x64", "architecture of the common model, the copilot")
    over: str = setting(
        "all",
        "nodes on which the models' logits teach each other",
        choices=("all", "train"),
        task="node",
    )

    def __post_init__(self) -> None:
        # `model.name` is read in the same way.
        object.__setattr__(self, "copilot", str(self.copilot).strip().lower())
        super().__post_init__()
        with _named():
            parse_spec(self.copilot)

    def check(self, facts: Facts) -> None:
        """Builds a copilot, because some architectures cannot have every width."""
        with _named():
            facts.build(self.copilot, "server")

    @phase()
    def setup(self, client: Client) -> Message:
        """Builds both models, and for each an optimiser that keeps its moments over rounds."""
        super().setup(client)
        client.state["copilot"] = model = client.facts.build(self.copilot, client.name, "copilot")
        client.state["copilot optimizer"] = make_optimizer(
            self.optimizer, model.parameters(), self.lr, self.weight_decay
        )
        return {}

    def server_spec(self, facts: Facts) -> str:
        """The server's model is the copilot."""
        return self.copilot

    def descend(self, client: Client, model: Model, received: Message | None = None) -> None:
        """E local epochs of both models."""
        state = client.state
        for _ in range(self.epochs):
            for batch in client.shuffled(self.batch_size):
                own = outputs(model, batch, client.rng("dropout"))
                copilot = outputs(state["copilot"], batch, client.rng("copilot dropout"))
                own_loss, copilot_loss = self.losses(client, batch, own, copilot)
                step(state["copilot optimizer"], copilot_loss)
                step(state["optimizer"], own_loss)

    @abstractmethod
    def losses(
        self, client: Client, batch: Graph, own: Outputs, copilot: Outputs
    ) -> tuple[Tensor, Tensor]:
        """Returns the losses of the own model and of the copilot.

        No gradient may pass from one model to the other.
        """

    def taught(self, batch: Graph, teacher: Tensor, student: Tensor) -> Tensor:
        """Returns KL(softmax teacher ‖ softmax student), the mean over the items of `over`."""
        if batch.task == "node" and self.over == "train":
            teacher, student = teacher[batch.train], student[batch.train]
        return divergence(teacher, student)

    def first_copilot(self, server: Server) -> Message:
        """Returns the weights that all copilots start from."""
        return weights(server.facts.build(self.copilot, "server"))


@contextmanager
def _named() -> Iterator[None]:
    """Adds the setting's name to errors about a model."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"method.copilot: {error}") from error
