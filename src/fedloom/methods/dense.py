"""DENSE: the server invents nodes that the clients' models can label, and distils the models' mean into one with them.

Zhang, Chen, Li, Lyu, Wu, Ding, Shen, Wu: "DENSE: Data-Free One-Shot Federated Learning", NeurIPS 2022, Algorithm 1. One round.

What travels, per client:
    once  up    size      number of local items n_k
          up    model     θ_k, the weights after E local epochs from an initial θ that all draw from the public seed
          down  model     θ_S, the student, if there is fine-tuning

    D(x) = Σ_k w_k f_k(x),  w_k = 1/K                                          `Ensemble`
    x̂ = G(z, y),  linked by kNN on cosines                                     `imagine`, `linked`
    L_gen = CE(D(x̂), y) − λ · ω KL(D(x̂) ‖ f_S(x̂))                             `generator_loss`
    ω = 1 where D and f_S name different classes, else 0                       `emphasis`
    L_dis = τ² KL(D(x̂) / τ ‖ f_S(x̂) / τ)                                      `student_loss`, `divergence`
    T times: z, y anew, T_G steps down L_gen; then a step down L_dis on every batch made so far      `distil`

Departures. Images become nodes: the generator's rows are features, linked to their nearest neighbours as in FedTAD; no gradient passes
through the choice of links. G is an MLP that is told the class. Its output is linear: the server does not know the scale of the data,
and CE finds the one at which the clients' models are sure. There is no BatchNorm (decision 2), so no term that fits its statistics. The
student starts from Σ_k (n_k / Σ n) θ_k, not from noise, and learns with Adam; T = 0 leaves FedAvg's one round. One generator is trained
throughout (public code starts it anew for every batch, optimises z with it and keeps the best of the steps). Fine-tuning as in FedAvg,
on by default: it is how O-pFGL runs one-shot baselines, and with `evaluation = "local"` only a fine-tuned client has seen the student.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from fedloom.core.client import Client
from fedloom.core.message import Message
from fedloom.core.phase import phase
from fedloom.core.server import Server
from fedloom.core.settings import setting
from fedloom.data.graph import Graph
from fedloom.data.seeds import stream_seed
from fedloom.methods.fedavg import FedAvg
from fedloom.nn.build import build_model
from fedloom.nn.model import Model
from fedloom.nn.training import make_optimizer, step
from fedloom.nn.weights import load_weights, weights


class Ensemble:
    """The clients' models, read-only, and how much each counts."""

    def __init__(self, model: Model, uploads: Iterable[Message]):
        self.model, self.uploads = model, list(uploads)
        self.share = torch.full((len(self.uploads),), 1 / len(self.uploads))  # w

    def each(self, graph: Graph) -> Tensor:
        """Every client's logits, [K, nodes, C], kept on the graph."""
        return graph.cached(
            "clients",
            lambda: torch.stack(
                [functional_call(self.model, upload, (graph,)) for upload in self.uploads]
            ),
        )

    def __call__(self, graph: Graph) -> Tensor:
        """D: [nodes, C]."""
        return torch.einsum("k,knc->nc", self.share, self.each(graph))


def linked(x: Tensor, y: Tensor, neighbours: int, num_classes: int) -> Graph:
    """A graph of nodes with features x, each linked to its nearest others by cosine, both ways."""
    unit = F.normalize(x.detach())
    near = (unit @ unit.T).fill_diagonal_(-torch.inf).topk(min(neighbours, len(x) - 1)).indices
    edges = torch.zeros(len(x), len(x), dtype=torch.bool).scatter_(1, near, True)
    return Graph(x=x, edge_index=(edges | edges.T).nonzero().T, y=y, num_classes=num_classes)


def divergence(taught: Tensor, learnt: Tensor, tau: float = 1.0) -> Tensor:
    """τ² KL(softmax(taught / τ) ‖ softmax(learnt / τ)) of every node's logits."""
    p, q = (F.log_softmax(logits / tau, 1) for logits in (taught, learnt))
    return tau**2 * F.kl_div(q, p, reduction="none", log_target=True).sum(1)


@dataclass(frozen=True)
class Dense(FedAvg):
    """One round; the average is distilled further on invented nodes."""

    rounds: int = setting(1, "communication rounds: one-shot", at_least=1, at_most=1)
    epochs: int = setting(100, "local epochs E before the upload", at_least=1, tune="20..200")
    finetune: int = setting(100, "local epochs after the download", at_least=0, tune="0..200")
    batches: int = setting(50, "T, batches of invented nodes; 0 = the average as it is", at_least=0)
    nodes: int = setting(100, "invented nodes a batch", at_least=2)
    noise: int = setting(32, "width of the noise z", at_least=1)
    neighbours: int = setting(5, "links a node asks for", at_least=1)
    width: int = setting(128, "width of the generator's two hidden layers", at_least=1)
    generator_steps: int = setting(30, "T_G, steps of the generator a batch", at_least=1)
    generator_lr: float = setting(
        1e-3, "η_G, the generator's learning rate", above=0, tune="1e-4..0.01"
    )
    adversarial: float = setting(
        0.5,
        "λ, weight of the disagreement between ensemble and student",
        at_least=0,
        tune="0.1..10",
    )
    student_lr: float = setting(
        1e-3, "η_S, the student's learning rate", above=0, tune="1e-4..0.01"
    )
    temperature: float = setting(
        1.0, "τ, at which the student matches the ensemble", above=0, tune="1..10"
    )

    tasks: ClassVar[tuple[str, ...]] = ("node",)

    @phase(model="weights")
    def train(self, client: Client) -> Message:
        """E local epochs from the weights that everybody starts with."""
        return super().train(
            client, weights(client.facts.build(client.facts.model_of[client.name], "server"))
        )

    # ---- at the server ----
    def emphasis(self, taught: Tensor, learnt: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """What each node counts in the two terms of L_gen: 1, and ω."""
        return torch.ones(len(y)), (taught.argmax(1) != learnt.argmax(1)).float()

    def generator_loss(self, ensemble: Ensemble, student: Model, graph: Graph) -> Tensor:
        """L_gen."""
        taught, learnt = ensemble(graph), functional_call(student, weights(student), (graph,))
        certain, apart = self.emphasis(taught, learnt, graph.y)
        cross_entropy = F.cross_entropy(taught, graph.y, reduction="none")
        return (
            certain * cross_entropy - self.adversarial * apart * divergence(taught, learnt)
        ).mean()

    def student_loss(self, ensemble: Ensemble, student: Model, graph: Graph) -> Tensor:
        """L_dis."""
        return divergence(ensemble(graph), student(graph), self.temperature).mean()

    def reweigh(self, ensemble: Ensemble, made: list[Graph]) -> None:
        """Sets w, given all batches made so far: here all clients count alike, always."""

    def view(self, server: Server, ensemble: Ensemble, graph: Graph) -> Graph:
        """What the student sees of a batch: here the batch as it is."""
        return graph

    def imagine(
        self,
        server: Server,
        generator: Model,
        ensemble: Ensemble,
        student: Model,
        optimizer: torch.optim.Optimizer,
    ) -> Graph:
        """A batch with labels drawn evenly, after T_G steps of the generator on it."""
        C, rng = server.facts.num_classes, server.rng("generator")
        y = torch.randint(C, (self.nodes,), generator=rng)
        z = torch.cat([torch.randn(self.nodes, self.noise, generator=rng), F.one_hot(y, C)], 1)
        source = Graph(x=z, edge_index=torch.zeros(2, 0, dtype=torch.int64), y=y, num_classes=C)
        for _ in range(self.generator_steps):
            step(
                optimizer,
                self.generator_loss(
                    ensemble, student, linked(generator(source), y, self.neighbours, C)
                ),
            )
        return linked(generator(source).detach(), y, self.neighbours, C)

    def distil(self, server: Server, model: Message, uploads: Iterable[Message]) -> Message:
        """Algorithm 1, the server's part: from the average θ and all θ_k to θ_S."""
        facts = server.facts
        student = facts.build(facts.models[0], "server")
        load_weights(student, model)
        ensemble = Ensemble(facts.build(facts.models[0], "server"), uploads)
        seed, spec = stream_seed(facts.seed, "server", "generator"), f"mlp-3x{self.width}"
        generator = build_model(
            spec, self.noise + facts.num_classes, facts.num_features, dropout=0.0, seed=seed
        )
        of_generator = make_optimizer("adam", generator.parameters(), self.generator_lr, 0.0)
        of_student = make_optimizer("adam", student.parameters(), self.student_lr, 0.0)
        made: list[Graph] = []
        for _ in range(self.batches):
            made.append(self.imagine(server, generator, ensemble, student, of_generator))
            self.reweigh(ensemble, made)
            for k in torch.randperm(len(made), generator=server.rng("order")):
                step(
                    of_student,
                    self.student_loss(ensemble, student, self.view(server, ensemble, made[k])),
                )
        return weights(student)

    def run(self, server: Server) -> None:
        """Algorithm 1."""
        server.ask(self.setup)
        state = server.state
        for _ in server.rounds(self.rounds):
            size = server.weights("size", server.participants)
            replies = server.ask(self.train, clients=list(size))
            state["model"] = self.distil(
                server, replies.mean(size)["model"], replies.column("model").values()
            )
            server.evaluate(model=state["model"])
        self.finish(server)
