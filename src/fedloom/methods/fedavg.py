"""FedAvg: clients train the same model on their own graphs, the server averages the weights.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: "Communication-Efficient Learning of Deep Networks from Decentralized Data",
AISTATS 2017, Algorithm 1.

What travels, per client:
    once     up    size      number of local items n_k
    a round  down  model     θ, the global weights
             up    model     θ_k, the weights after E local epochs

    θ_k ← E steps down the gradient of CE on the client's training items, from θ       `train`, `objective`
    θ   ← Σ_k (n_k / Σ n) θ_k                                                          `run`

Departures: full-batch steps (one step is one epoch), and Adam whose moments a client keeps over rounds, as the federated graph
learning benchmarks do. n_k counts all items of the client's training graph, labelled or not. `finetune` trains the last
downloaded model locally for some more epochs ("FedAvg + ft").
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedloom.learn import OPTIMIZERS, load_weights, make_optimizer, step, weights
from fedloom.message import Message
from fedloom.method import Method, phase, setting
from fedloom.models import Model
from fedloom.party import Client, Server


@dataclass(frozen=True)
class FedAvg(Method):
    """FedAvg with Adam, as the federated graph learning benchmarks run it."""

    epochs: int = setting(3, "local epochs E a round", at_least=1)
    lr: float = setting(0.01, "local learning rate η", above=0)
    weight_decay: float = setting(5e-4, "L2 penalty", at_least=0)
    optimizer: str = setting("adam", "local optimiser", choices=OPTIMIZERS)
    finetune: int = setting(0, "local epochs after the last round", at_least=0)

    evaluations: ClassVar[tuple[str, ...]] = ("local", "global")
    one_model: ClassVar[bool] = True

    @phase(size="int64[]")
    def setup(self, client: Client) -> Message:
        """A model and an optimiser that keeps its moments over rounds."""
        client.state["model"] = net = client.build()
        client.state["optimizer"] = make_optimizer(self.optimizer, net.parameters(), self.lr, self.weight_decay)
        return {"size": torch.tensor(client.graph.num_items)}

    @phase(model="=model")
    def train(self, client: Client, model: Message) -> Message:
        """E local epochs from the global weights."""
        net = client.state["model"]
        load_weights(net, model)
        self.descend(client, net, model)
        return {"model": weights(net)}

    @phase()
    def tune(self, client: Client, model: Message) -> Message:
        """Plain local epochs after the last download; the result stays with the client."""
        net = client.state["model"]
        load_weights(net, model)
        for _ in range(self.finetune):
            step(client.state["optimizer"], client.loss(net(client.graph, client.rng("dropout"))))
        return {}

    def descend(self, client: Client, net: Model, model: Message) -> None:
        """E local epochs on the client's objective."""
        for _ in range(self.epochs):
            step(client.state["optimizer"], self.objective(client, net, model))

    def objective(self, client: Client, net: Model, model: Message) -> Tensor:
        """What a local step minimises; `model` is what was downloaded."""
        return client.loss(net(client.graph, client.rng("dropout")))

    def run(self, server: Server) -> None:
        """Algorithm 1."""
        size = server.ask(self.setup).column("size")
        state = server.state
        state["model"] = server.model()
        for _ in server.rounds(self.rounds):
            state["model"] = server.mean(self.train, weight=size, model=state["model"])["model"]
            server.evaluate(model=state["model"])
        self.finish(server)

    def finish(self, server: Server) -> None:
        """Fine-tuning, if asked for: from then on the clients' models are their own, whatever the run evaluates."""
        if self.finetune:
            server.ask(self.tune, model=server.state["model"])
            server.evaluate(stage="finetune")
