"""FedTGP: the server trains the prototypes that clients are pulled to, so that classes stay apart.

Zhang, Liu, Hua, Cao: "FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive Learning for Data and Model
Heterogeneity in Federated Learning", AAAI 2024, Eq. 5 to 8.

What travels, per client and round (C classes, p the embedding's width):
    down  prototypes, present   P̂, of the classes that somebody told of (nothing in the first round)
    up    prototypes, present   P_k, of the client's own classes; no zero vector stands for a class that is not there

    P̂[c] = MLP(u_c), u_c and the MLP trained                                                    `Anchors`
    δ    = min(max_{c≠c'} ‖Q_c − Q_c'‖, τ), Q_c the mean of this round's P_k[c]                   `margin`
    min  mean over P_k[c] of −log e^{−(‖P_k[c] − P̂[c]‖ + δ)} / (that + Σ_{c'≠c} e^{−‖P_k[c] − P̂[c']‖})     `contrast`

Clients train as in FedProto, towards P̂. Anchors and their optimiser persist over rounds.

Departures: Adam at the server, with weight decay, all uploads in one step, 10 steps a round (graph benchmarks; the authors' code: SGD,
batches, 100 epochs). δ is the paper's largest distance; the authors' code takes the largest over classes of the smallest.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.core.client import Client
from fedloom.core.message import Message
from fedloom.core.phase import phase
from fedloom.core.replies import Replies
from fedloom.core.server import Server
from fedloom.core.settings import setting
from fedloom.methods._shared.prototypes import class_means, told
from fedloom.methods.fedproto import FedProto
from fedloom.nn.training import make_optimizer, seeded, step


class Anchors(nn.Module):
    """One trained vector for each entry, through an MLP that they share."""

    def __init__(self, entries: int, width: int):
        super().__init__()
        self.table = nn.Parameter(torch.randn(entries, width))
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self) -> Tensor:
        """All anchors, [entries, width]."""
        return self.outer(torch.relu(self.inner(self.table)))


@dataclass(frozen=True)
class FedTGP(FedProto):
    """FedProto towards anchors that are trained to be told apart."""

    server_steps: int = setting(10, "steps a round on the anchors", at_least=1, tune="1..100")
    server_lr: float = setting(0.01, "learning rate of the anchors", above=0, tune="0.001..0.1")
    margin_cap: float = setting(100.0, "τ, the largest margin δ", at_least=0, tune="1..100")

    discloses_to_peers: ClassVar[str] = (
        "anchors, trained on class means: on those of one client alone, if no other has the class"
    )

    @phase(prototypes="float32[*present,p]", present="bool[C]")
    def train(
        self, client: Client, prototypes: Tensor | None = None, present: Tensor | None = None
    ) -> Message:
        """E local epochs; then the class means of what the client has."""
        self.follow(client, prototypes, present)
        means, counts = class_means(
            self.embeddings(client), client.graph.y, client.graph.train, client.facts.num_classes
        )
        return told(means, counts > 0, self.floor, counts)

    # ---- the server's side ----
    def begin(self, server: Server, entries: int) -> None:
        """Fresh anchors and their optimiser."""
        with seeded(server.rng("anchors")):
            server.state["anchors"] = anchors = Anchors(entries, server.facts.width)
        server.state["optimizer"] = make_optimizer(
            "adam", anchors.parameters(), self.server_lr, self.weight_decay
        )

    def margin(self, q: Tensor) -> Tensor:
        """δ of class means q [classes, p]: their largest distance, up to the cap; 0 with fewer than two classes."""
        return self.far(q, q).max().clamp(max=self.margin_cap) if len(q) > 1 else torch.zeros(())

    def contrast(self, anchors: Tensor, uploads: Tensor, label: Tensor, margin: Tensor) -> Tensor:
        """The loss of anchors [classes, p] under uploads [many, p] of known classes."""
        far = self.far(uploads, anchors)
        return F.cross_entropy(-(far + margin * F.one_hot(label, len(anchors))), label)

    def far(self, a: Tensor, b: Tensor) -> Tensor:
        """Euclidean distances of the rows of a and b, [rows of a, rows of b]."""
        return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")

    def learn(self, server: Server, uploads: Tensor, label: Tensor) -> Message:
        """Steps on the anchors; then those of the classes that were told of, as they travel."""
        state, classes = server.state, server.facts.num_classes
        means, counts = class_means(uploads, label, label >= 0, classes)
        margin = self.margin(means[counts > 0])
        for _ in range(self.server_steps if len(uploads) else 0):
            step(state["optimizer"], self.contrast(state["anchors"](), uploads, label, margin))
        return told(state["anchors"]().detach(), counts > 0)

    def run(self, server: Server) -> None:
        """Algorithm 1."""
        server.ask(self.setup)
        state = server.state
        self.begin(server, server.facts.num_classes)
        state["known"] = {}
        for _ in server.rounds(self.rounds):
            replies = server.ask(self.train, **state["known"])
            if replies:
                state["known"] = self.learn(server, *_gathered(replies))
            server.evaluate()


def _gathered(replies: Replies) -> tuple[Tensor, Tensor]:
    """All prototypes that came, [many, p], and their classes."""
    uploads = torch.cat([reply["prototypes"] for reply in replies.values()])
    return uploads, torch.cat([reply["present"].nonzero().flatten() for reply in replies.values()])
