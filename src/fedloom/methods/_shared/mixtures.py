"""What FED-PUB and FedGTA share: the server has a model for every client, a mixture of all clients' models."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedloom.core.message import Message, tree_map
from fedloom.core.replies import Replies
from fedloom.core.server import Server
from fedloom.methods._shared.local_training import LocalTraining


@dataclass(frozen=True)
class Mixing(LocalTraining):
    """Local training, each client from a mixture of its own."""

    one_model: ClassVar[bool] = True

    @abstractmethod
    def shares(self, replies: Replies) -> Tensor:
        """How much of whose model goes to whom: [clients, clients] in the order of the round's replies, rows sum to 1."""

    def run(self, server: Server) -> None:
        """The rounds: clients train, the server mixes a model for each."""
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
            state["model"] = Replies(models).mean()  # for who has no mixture yet
            state["mixtures"] |= mixtures(models, self.shares(replies))
            server.evaluate()


def mixtures(models: Mapping[str, Message], share: Tensor) -> dict[str, Message]:
    """{client: Σ_l share_kl θ_l}."""
    mixed = tree_map(lambda *same: torch.tensordot(share, torch.stack(same), 1), *models.values())
    return {
        client: tree_map(lambda stacked, k=k: stacked[k], mixed) for k, client in enumerate(models)
    }
