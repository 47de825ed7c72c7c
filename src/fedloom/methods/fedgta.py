"""FedGTA: each client gets a mean of the models whose propagated predictions resemble its own.

Li, Wu, Zhang, Zhu, Li, Wang: "FedGTA: Topology-aware Averaging for Federated Graph Learning",
VLDB 2024. More confident clients have a larger weight in the mean.

What travels, per client and round (C classes):
    down  model         θ̄_k, the client's mean
    up    model         θ_k, the weights after E local epochs
          moments       M_k, 2 · order · C numbers
          confidence    H_k, a number

    Y⁰ = one-hot y in the training set, else the softmax of θ_k's logits    `with_training_labels`
    Yᵗ = α S Yᵗ⁻¹ + (1 − α) Y⁰,   t = 1 ... T                               `propagate_labels`
        S = D̃^-1/2 (A + I) D̃^-1/2
    P = softmax(Y^T),   Q = softmax(Y^T / τ)                                `describe`
        both one-hot y in the training set
    M_k = mean_i P_i^m and mean_i (P_i − mean P)^m, class by class          `moments`
        m = 1 ... order
    H_k = Σ_i d̃_i Σ_c (1/e + Q_ic log Q_ic)                                 `confidence`
    θ̄_k = Σ_l H_l θ_l / Σ_l H_l                                             `shares`, `mixtures`
        over the l with cos(M_k, M_l) > ε, and k itself

−Σ_c Q log Q is a node's entropy; 1/e keeps H positive. A client's own model is always in its mean.
With ε = 1 there is no other model in it, and clients train alone. A client without any node sends
zeros and gets its own model back, as long as ε ≥ 0. From M_k the server can read roughly how a
client's labels are distributed, and exactly if the run is inductive; then H_k counts the client's
nodes and edges. A client that takes part for the first time gets the plain mean of the last round's
models. A client that was away gets the mean of the round in which it last took part.

Departures, where the paper and public code differ. The paper has moments of the labels after every
step; the code, and this file, after the last one. P and Q (a softmax of a distribution), the
training labels in them and 1/e come from the code. The authors' code adds Y⁰ once more to training
nodes in every step, and a benchmark lets all other nodes start from 0. Neither is in the paper, nor
here. d̃ counts a node's own loop, so that clients without edges have a positive confidence. The
defaults are the benchmark's (the authors: order 13 to 20, ε 0.6 to 0.65, raw moments or both
kinds). The authors score the downloaded mean; here a client's model after local training is scored.
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
    """Local training from a mean of the models of similar clients."""

    steps: int = setting(5, "T, steps of label propagation", at_least=1, tune="1..10")
    alpha: float = setting(
        0.5,
        "α, share that a step takes from the neighbours",
        at_least=0,
        at_most=1,
        tune="0.1..0.9",
    )
    order: int = setting(10, "highest moment", at_least=1, tune="2..20")
    temperature: float = setting(
        20.0, "τ, temperature of the confidence's distribution", above=0, tune="1..50"
    )
    threshold: float = setting(
        0.5,
        "ε, a model is in a client's mean if the cosine of their moments is above this",
        at_least=-1,
        at_most=1,
        tune="0..0.9",
    )

    tasks: ClassVar[tuple[str, ...]] = ("node",)

    # ---- at a client ----
    @phase(model="~model", moments="float32[2,order,C]", confidence="float32[] in 0..")
    def train(self, client: Client, model: Message) -> Message:
        """Trains for E local epochs from the client's mean, then describes its labels."""
        local_model = client.state["model"]
        load_weights(local_model, model)
        self.descend(client, local_model, model)
        with torch.no_grad():
            return {
                "model": weights(local_model),
                **self.describe(client.graph, local_model(client.graph)),
            }

    def describe(self, graph: Graph, logits: Tensor) -> Message:
        """Returns M and H of a graph's predictions."""
        Y = with_training_labels(graph, logits.softmax(1))
        Y = propagate_labels(graph, Y, self.steps, self.alpha)
        P, Q = (
            with_training_labels(graph, (Y / tau).softmax(1)) for tau in (1.0, self.temperature)
        )
        return {"moments": moments(P, self.order), "confidence": confidence(graph, Q)}

    # ---- at the server ----
    def shares(self, replies: Replies) -> Tensor:
        """Returns the weights of each mean: the confidences of similar clients, row by row."""
        for client, H in replies.column("confidence").items():
            if H < 0:
                raise MessageError(
                    f"client {client!r} in 'train': 'confidence' is {H:g}, must not be negative"
                )
        return shares(replies.stack("moments"), replies.stack("confidence"), self.threshold)


# ---- labels, propagated along the edges ----
def with_training_labels(graph: Graph, labels: Tensor) -> Tensor:
    """Returns soft labels [nodes, classes] in which training nodes have their true label."""
    one_hot = F.one_hot(graph.y.clamp(min=0), labels.shape[1]).float()
    return torch.where(graph.train.unsqueeze(1), one_hot, labels)


def propagate_labels(graph: Graph, labels: Tensor, steps: int, alpha: float) -> Tensor:
    """Returns Y^T, given Y⁰."""
    Y = labels
    for _ in range(steps):
        Y = torch.lerp(labels, graph.propagate(Y), alpha)
    return Y


# ---- what the server learns ----
def moments(P: Tensor, order: int) -> Tensor:
    """Returns M, [raw or central, order, classes], zeros if there is no node.

    The first central moment is 0.
    """
    if not len(P):
        return torch.zeros(2, order, P.shape[1])
    return torch.stack(
        [
            torch.stack([(each**m).mean(0) for m in range(1, order + 1)])
            for each in (P, P - P.mean(0))
        ]
    )


def confidence(graph: Graph, Q: Tensor) -> Tensor:
    """Returns H, a number."""
    degree = graph.propagate(torch.ones(len(Q), 1), "sum").squeeze(1) + 1
    return degree @ (1 / math.e + torch.xlogy(Q, Q)).sum(1)


def shares(M: Tensor, H: Tensor, threshold: float) -> Tensor:
    """Returns the weight of each model in each client's mean, [clients, clients].

    Args:
        M: Moments [clients, ...].
        H: Confidences [clients].
        threshold: ε.
    """
    unit = F.normalize(M.flatten(1).double())
    cosine = (unit @ unit.T).clamp(max=1)  # rounding must not make a cosine larger than 1
    own = torch.eye(len(H), dtype=torch.bool)
    weight = torch.where((cosine > threshold) | own, H.double(), 0.0)
    total = weight.sum(1, keepdim=True)
    return torch.where(total > 0, weight / total.where(total > 0, 1.0), own.double()).float()
