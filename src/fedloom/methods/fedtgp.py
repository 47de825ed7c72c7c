"""FedTGP: the server trains the prototypes that clients align to, so that classes stay separated.

Zhang, Liu, Hua, Cao: "FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive
Learning for Data and Model Heterogeneity in Federated Learning", AAAI 2024, Eq. 5 to 8.

What travels, per client and round (C classes, p the embedding's width):
    down  prototypes, present   P̂, of the classes that some client sent (nothing in the first round)
    up    prototypes, present   P_k, of the client's own classes; no zero vectors for absent classes

    P̂[c] = MLP(u_c), where u_c and the MLP are trained                              `Anchors`
    δ    = min(max_{c≠c'} ‖Q_c − Q_c'‖, τ), Q_c the mean of this round's P_k[c]      `margin`
    d    = ‖P_k[c] − P̂[c]‖,   d' = ‖P_k[c] − P̂[c']‖
    min  mean over P_k[c] of −log e^{−(d + δ)} / (e^{−(d + δ)} + Σ_{c'≠c} e^{−d'})   `contrast`

Clients train as in FedProto, towards P̂. Anchors and their optimiser persist over rounds.

Departures. The paper sends all prototypes (floor = 1). The server uses Adam with weight decay, all
uploads in one step and 10 steps per round, as in graph benchmarks (the authors' code: SGD, batches,
100 epochs). δ is the paper's largest distance; the authors' code takes the largest over classes of
the smallest.
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
from fedloom.methods._shared.prototypes import class_means, pack_table
from fedloom.methods.fedproto import FedProto
from fedloom.nn.training import make_optimizer, seeded, step


class Anchors(nn.Module):
    """One trained vector per entry, passed through a shared MLP."""

    def __init__(self, entries: int, width: int):
        super().__init__()
        self.table = nn.Parameter(torch.randn(entries, width))
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self) -> Tensor:
        """Returns all anchors, [entries, width]."""
        return self.outer(torch.relu(self.inner(self.table)))


@dataclass(frozen=True)
class FedTGP(FedProto):
    """FedProto towards anchors that are trained to be separable."""

    server_steps: int = setting(10, "steps per round on the anchors", at_least=1, tune="1..100")
    server_lr: float = setting(0.01, "learning rate of the anchors", above=0, tune="0.001..0.1")
    margin_cap: float = setting(100.0, "τ, the largest margin δ", at_least=0, tune="1..100")

    discloses_to_peers: ClassVar[str] = (
        "anchors trained on class means; on those of a single client if no other has the class"
    )

    @phase(prototypes="float32[*present,p]", present="bool[C]")
    def train(
        self, client: Client, prototypes: Tensor | None = None, present: Tensor | None = None
    ) -> Message:
        """Trains for E local epochs, then returns the means of the client's classes."""
        self.follow(client, prototypes, present)
        means, counts = class_means(
            self.embeddings(client), client.graph.y, client.graph.train, client.facts.num_classes
        )
        return pack_table(means, counts > 0, self.floor, counts)

    # ---- the server's side ----
    def begin(self, server: Server, entries: int) -> None:
        """Creates the anchors and their optimiser in the server's state."""
        with seeded(server.rng("anchors")):
            server.state["anchors"] = anchors = Anchors(entries, server.facts.width)
        server.state["optimizer"] = make_optimizer(
            "adam", anchors.parameters(), self.server_lr, self.weight_decay
        )

    def margin(self, q: Tensor) -> Tensor:
        """Returns δ of class means q [classes, p]: their largest distance, up to the cap.

        It is 0 with fewer than two classes.
        """
        return self.far(q, q).max().clamp(max=self.margin_cap) if len(q) > 1 else torch.zeros(())

    def contrast(self, anchors: Tensor, uploads: Tensor, label: Tensor, margin: Tensor) -> Tensor:
        """Returns the loss of anchors [classes, p].

        Args:
            anchors: P̂ [classes, p].
            uploads: P_k of all clients [uploads, p].
            label: The class of each upload.
            margin: δ.
        """
        far = self.far(uploads, anchors)
        return F.cross_entropy(-(far + margin * F.one_hot(label, len(anchors))), label)

    def far(self, a: Tensor, b: Tensor) -> Tensor:
        """Returns Euclidean distances of the rows of a and b, [rows of a, rows of b]."""
        return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")

    def learn(self, server: Server, uploads: Tensor, label: Tensor) -> Message:
        """Trains the anchors. Returns those of the classes that clients sent, as they travel."""
        state, classes = server.state, server.facts.num_classes
        means, counts = class_means(uploads, label, label >= 0, classes)
        margin = self.margin(means[counts > 0])
        for _ in range(self.server_steps if len(uploads) else 0):
            step(state["optimizer"], self.contrast(state["anchors"](), uploads, label, margin))
        return pack_table(state["anchors"]().detach(), counts > 0)

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
    """Returns all prototypes that arrived, [uploads, p], and their classes."""
    uploads = torch.cat([reply["prototypes"] for reply in replies.values()])
    return uploads, torch.cat([reply["present"].nonzero().flatten() for reply in replies.values()])
