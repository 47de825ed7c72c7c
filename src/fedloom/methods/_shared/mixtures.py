"""Mixtures: the server sends each client its own mixture of all clients' models.

FED-PUB and FedGTA share this. They differ in how a mixture is weighted (`Mixing.shares`).
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedloom.core.message import Message, tree_map
from fedloom.core.phase import Phase
from fedloom.core.replies import Replies
from fedloom.core.server import Server
from fedloom.methods._shared.local_training import LocalTraining


@dataclass(frozen=True)
class Mixing(LocalTraining):
    """Base of methods whose clients train from a mixture of their own."""

    one_model: ClassVar[bool] = True
    train: ClassVar[Phase]  # takes the client's mixture as `model`, answers the weights as `model`

    @abstractmethod
    def shares(self, replies: Replies) -> Tensor:
        """Returns the weight of each model in each client's mixture, [clients, clients].

        Row k holds the weights of client k's mixture. Clients are in the order of the round's
        replies. Rows sum to 1.
        """

    def run(self, server: Server) -> None:
        """The rounds: clients train, then the server mixes a model for each of them."""
        server.ask(self.setup)
        state = server.state
        state |= {"model": server.model(), "mixtures": {}}
        for _ in server.rounds(self.rounds):
            replies = server.ask(
                self.train,
                each={
                    c: {"model": state["mixtures"].get(c, state["model"])}
                    for c in server.participants
                },
            )
            models = replies.column("model")
            alone = replies.replaced({c: {"model": model} for c, model in models.items()})
            state["model"] = alone.mean()["model"]  # for clients that have no mixture yet
            state["mixtures"] |= mixtures(models, self.shares(replies))
            server.evaluate()


def mixtures(models: Mapping[str, Message], share: Tensor) -> dict[str, Message]:
    """Returns {client: Σ_l share_kl θ_l}, given each client's weights and the rows of `shares`."""
    mixed = tree_map(lambda *same: torch.tensordot(share, torch.stack(same), 1), *models.values())
    return {
        client: tree_map(lambda stacked, k=k: stacked[k], mixed) for k, client in enumerate(models)
    }
