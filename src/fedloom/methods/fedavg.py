"""FedAvg: clients train the same model on their own graphs, and the server averages the weights.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: "Communication-Efficient Learning of Deep Networks
from Decentralized Data", AISTATS 2017, Algorithm 1.

What travels, per client:
    once     up    size      number of local items n_k
    a round  down  model     θ, the global weights
             up    model     θ_k, the weights after E local epochs

    θ_k ← E gradient steps from θ on CE over the client's training items   `train`,
                                                                           `LocalTraining.objective`
    θ   ← Σ_k (n_k / Σ n) θ_k                                              `run`

Departures. In node tasks a step uses the full graph (one step is one epoch). The optimiser is Adam,
and a client keeps its moments over rounds. Both follow the federated graph learning benchmarks. n_k
counts all items of the client's training graph, labelled or not. `finetune` trains the last
downloaded model locally for some more epochs ("FedAvg + ft"), with an evaluation after each.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedloom.core.client import Client
from fedloom.core.message import Message
from fedloom.core.phase import averaged, phase, runs_once
from fedloom.core.server import Server
from fedloom.core.settings import setting
from fedloom.methods._shared.local_training import LocalTraining
from fedloom.nn.training import step
from fedloom.nn.weights import load_weights, weights


@dataclass(frozen=True)
class FedAvg(LocalTraining):
    """Local training with averaging in between."""

    finetune: int = setting(0, "local epochs after the last round", at_least=0)

    evaluations: ClassVar[tuple[str, ...]] = ("local", "global")
    one_model: ClassVar[bool] = True

    @averaged(by="size")
    @phase(model="~model")
    def train(self, client: Client, model: Message) -> Message:
        """Trains for E local epochs from the global weights."""
        local_model = client.state["model"]
        load_weights(local_model, model)
        self.descend(client, local_model, model)
        return {"model": weights(local_model)}

    @runs_once
    @phase()
    def tune(self, client: Client, epoch: Tensor, model: Message | None = None) -> Message:
        """Trains for one plain local epoch. The result stays with the client.

        epoch: its number, which tells the next epoch from this one delivered twice.
        model: the last global weights, which the first epoch starts from.
        """
        local_model = client.state["model"]
        if model is not None:
            load_weights(local_model, model)
        for batch in client.shuffled(self.batch_size):
            loss = LocalTraining.objective(self, client, batch, local_model, {})
            step(client.state["optimizer"], loss)
        return {}

    def run(self, server: Server) -> None:
        """Algorithm 1."""
        server.ask(self.setup)
        state = server.state
        state["model"] = server.model()
        for _ in server.rounds(self.rounds):
            state["model"] = server.mean(self.train, model=state["model"])["model"]
            server.evaluate(model=state["model"])
        self.finish(server)

    def finish(self, server: Server) -> None:
        """Fine-tunes, if asked for. The clients' models then differ.

        The run reports the best epoch of this stage.
        """
        for epoch in range(self.finetune):
            start = {"model": server.state["model"]} if epoch == 0 else {}
            server.ask(self.tune, epoch=torch.tensor(epoch), **start)
            server.evaluate(stage="finetune")
