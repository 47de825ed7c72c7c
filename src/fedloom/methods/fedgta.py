"""FedGTA: every client gets a mean of the models whose smoothed predictions are distributed like its own, confident ones counting more.

Li, Wu, Zhang, Zhu, Li, Wang: "FedGTA: Topology-aware Averaging for Federated Graph Learning", VLDB 2024.

What travels, per client and round (C classes):
    down  model         θ̄_k, the client's mean
    up    model         θ_k, the weights after E local epochs
          moments       M_k, 2 · order · C numbers
          confidence    H_k, a number

    Y⁰ = one-hot y in the training set, else the softmax of θ_k's logits                         `known`
    Yᵗ = α S Yᵗ⁻¹ + (1 − α) Y⁰,   t = 1 ... T,   S = D̃^-1/2 (A + I) D̃^-1/2                         `spread`
    P = softmax(Y^T),   Q = softmax(Y^T / τ);   both one-hot y in the training set               `describe`
    M_k = mean_i P_i^m and mean_i (P_i − mean P)^m, class by class, m = 1 ... order              `moments`
    H_k = Σ_i d̃_i Σ_c (1/e + Q_ic log Q_ic)                                                      `confidence`
    θ̄_k = Σ_l H_l θ_l / Σ_l H_l over the l with cos(M_k, M_l) > ε, and k itself                   `shares`, `mixtures`

−Σ_c Q log Q is a node's entropy; 1/e keeps H positive. A client's own model is always in its mean: with ε = 1 there is no other, and
clients train alone. A client without any node tells zeros and gets its own model back, as long as ε ≥ 0. The server can read off M_k about
how a client's labels are distributed, and exactly if the run is inductive; then H_k counts its nodes and edges. A client that takes part
for the first time gets the plain mean of the last round's models, one that was away the mean of when it last took part.

Where paper and public code part. The paper has moments of the labels after every step, code after the last, as here. P and Q (a softmax of
what is a distribution already), the training labels in them and 1/e are the code's. The authors' code adds Y⁰ once more to training nodes
in every step, and a benchmark lets all other nodes start from 0: neither is in the paper, nor here. d̃ counts a node's own loop, so that
clients without edges have a say. The defaults are the benchmark's (the authors: order 13 to 20, ε 0.6 to 0.65, raw moments or both kinds).
The authors score the downloaded mean, here a client's model after local training is scored.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.client import Client
from fedloom.core.message import Message
from fedloom.core.phase import phase
from fedloom.core.replies import Replies
from fedloom.core.settings import setting
from fedloom.data.graph import Graph
from fedloom.errors import MessageError
from fedloom.methods._shared.mixtures import Mixing
from fedloom.nn.weights import load_weights, weights


@dataclass(frozen=True)
class FedGTA(Mixing):
    """Local training from a mean of the clients that are alike."""

    steps: int = setting(5, "T, steps of label propagation", at_least=1, tune="1..10")
    alpha: float = setting(
        0.5,
        "α, what a step takes from the neighbours; the rest stays",
        at_least=0,
        at_most=1,
        tune="0.1..0.9",
    )
    order: int = setting(10, "highest moment", at_least=1, tune="2..20")
    temperature: float = setting(
        20.0, "τ, of the distribution whose entropy is the confidence", above=0, tune="1..50"
    )
    threshold: float = setting(
        0.5,
        "ε, cosine of moments above which a model is in a client's mean",
        at_least=-1,
        at_most=1,
        tune="0..0.9",
    )

    tasks: ClassVar[tuple[str, ...]] = ("node",)

    # ---- at a client ----
    @phase(model="~model", moments="float32[2,order,C]", confidence="float32[]")
    def train(self, client: Client, model: Message) -> Message:
        """E local epochs from the client's mean; then what its labels look like once they are spread."""
        local_model = client.state["model"]
        load_weights(local_model, model)
        self.descend(client, local_model, model)
        with torch.no_grad():
            return {
                "model": weights(local_model),
                **self.describe(client.graph, local_model(client.graph)),
            }

    def describe(self, graph: Graph, logits: Tensor) -> Message:
        """M and H of a graph's predictions."""
        Y = spread(graph, known(graph, logits.softmax(1)), self.steps, self.alpha)
        P, Q = (known(graph, (Y / tau).softmax(1)) for tau in (1.0, self.temperature))
        return {"moments": moments(P, self.order), "confidence": confidence(graph, Q)}

    # ---- at the server ----
    def shares(self, replies: Replies) -> Tensor:
        """Each row the confidences of those who are alike."""
        for client, H in replies.column("confidence").items():
            if H < 0:
                raise MessageError(
                    f"client {client!r} in 'train': 'confidence' is {H:g}, must not be negative"
                )
        return shares(replies.stack("moments"), replies.stack("confidence"), self.threshold)


# ---- labels, spread over the edges ----
def known(graph: Graph, labels: Tensor) -> Tensor:
    """Soft labels [nodes, classes], those of the training set replaced by what they are."""
    one_hot = F.one_hot(graph.y.clamp(min=0), labels.shape[1]).float()
    return torch.where(graph.train.unsqueeze(1), one_hot, labels)


def spread(graph: Graph, labels: Tensor, steps: int, alpha: float) -> Tensor:
    """Y^T from Y⁰."""
    Y = labels
    for _ in range(steps):
        Y = torch.lerp(labels, graph.propagate(Y), alpha)
    return Y


# ---- what the server gets to know ----
def moments(P: Tensor, order: int) -> Tensor:
    """M, [raw or central, order, classes]; the first central one is 0. Without any node: zeros."""
    if not len(P):
        return torch.zeros(2, order, P.shape[1])
    return torch.stack(
        [
            torch.stack([(each**m).mean(0) for m in range(1, order + 1)])
            for each in (P, P - P.mean(0))
        ]
    )


def confidence(graph: Graph, Q: Tensor) -> Tensor:
    """H, a number."""
    degree = graph.propagate(torch.ones(len(Q), 1), "sum").squeeze(1) + 1
    return degree @ (1 / math.e + torch.xlogy(Q, Q)).sum(1)


def shares(M: Tensor, H: Tensor, threshold: float) -> Tensor:
    """How much of whose model goes to whom, [clients, clients], from moments [clients, ...] and confidences [clients]."""
    unit = F.normalize(M.flatten(1).double())
    alike = (unit @ unit.T).clamp(
        max=1
    ) > threshold  # rounding must not make a cosine larger than 1
    own = torch.eye(len(H), dtype=torch.bool)
    weight = torch.where(alike | own, H.double(), 0.0)
    total = weight.sum(1, keepdim=True)
    return torch.where(total > 0, weight / total.where(total > 0, 1.0), own.double()).float()
