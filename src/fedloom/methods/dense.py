"""DENSE: the server generates nodes, and distils the clients' models into one model on them.

Zhang, Chen, Li, Lyu, Wu, Ding, Shen, Wu: "DENSE: Data-Free One-Shot Federated Learning",
NeurIPS 2022, Algorithm 1. One round.

What travels, per client:
    once  up    size      number of local items n_k
          up    model     θ_k, the weights after E local epochs; all clients draw the same initial θ
                          from the public seed
          down  model     θ_S, the student, if there is fine-tuning

    D(x) = Σ_k w_k f_k(x),  w_k = 1/K                             `Ensemble`
    x̂ = G(z, y),  linked by kNN on cosines                        `generate`, `knn_graph`
    L_gen = CE(D(x̂), y) − λ · ω KL(D(x̂) ‖ f_S(x̂))                 `generator_loss`
    ω = 1 where D and f_S predict different classes, else 0       `emphasis`
    L_dis = τ² KL(D(x̂) / τ ‖ f_S(x̂) / τ)                          `student_loss`, `divergence`
    T times: new z and y, T_G steps on L_gen,                     `distil`
        then a step on L_dis for every batch generated so far

Departures. Images become nodes: the generator's rows are features, linked to their nearest
neighbours as in FedTAD. No gradient passes through the choice of links. G is an MLP that takes the
class as input. Its output is linear: the server does not know the scale of the data, and CE finds
the scale at which the clients' models are confident. There is no BatchNorm (decision 2), so there
is no term that fits its statistics. The student starts from Σ_k (n_k / Σ n) θ_k, not from noise,
and learns with Adam; T = 0 leaves FedAvg's one round. One generator is trained throughout (public
code starts it anew for every batch, optimises z with it and keeps the best of the steps).
Fine-tuning is as in FedAvg and on by default: O-pFGL runs one-shot baselines like this, and with
`evaluation = "local"` only a fine-tuned client has seen the student.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.client import Client
from fedloom.core.message import Message
from fedloom.core.phase import phase, runs_once
from fedloom.core.server import Server
from fedloom.core.settings import setting
from fedloom.data.graph import Graph
from fedloom.data.seeds import stream_seed
from fedloom.methods.fedavg import FedAvg
from fedloom.nn.build import build_model
from fedloom.nn.model import Model, forward_with
from fedloom.nn.training import make_optimizer, step
from fedloom.nn.weights import load_weights, weights


class Ensemble:
    """The clients' models, read-only, and the weight of each."""

    def __init__(self, model: Model, uploads: Iterable[Message]):
        self.model, self.uploads = model, list(uploads)
        self.share = torch.full((len(self.uploads),), 1 / len(self.uploads))  # w

    def each(self, graph: Graph) -> Tensor:
        """Returns every client's logits, [K, nodes, C], cached on the graph."""
        return graph.cached(
            "clients",
            lambda: torch.stack(
                [forward_with(self.model, graph, upload) for upload in self.uploads]
            ),
        )

    def __call__(self, graph: Graph) -> Tensor:
        """Returns D, [nodes, C]."""
        return torch.einsum("k,knc->nc", self.share, self.each(graph))


def knn_graph(x: Tensor, y: Tensor, neighbours: int, num_classes: int) -> Graph:
    """Returns a graph of nodes with features x, linked both ways to their nearest by cosine."""
    unit = F.normalize(x.detach())
    near = (unit @ unit.T).fill_diagonal_(-torch.inf).topk(min(neighbours, len(x) - 1)).indices
    edges = torch.zeros(len(x), len(x), dtype=torch.bool).scatter_(1, near, True)
    graph = Graph(x=x, edge_index=(edges | edges.T).nonzero().T, y=y, num_classes=num_classes)
    graph.adjacency("sym").declare_symmetric()  # so that it is never sorted by columns
    return graph


def divergence(teacher: Tensor, student: Tensor, tau: float = 1.0) -> Tensor:
    """Returns τ² KL(softmax(teacher / τ) ‖ softmax(student / τ)) of every node's logits."""
    p, q = (F.log_softmax(logits / tau, 1) for logits in (teacher, student))
    return tau**2 * F.kl_div(q, p, reduction="none", log_target=True).sum(1)


@dataclass(frozen=True)
class Dense(FedAvg):
    """One round; the average is then distilled on generated nodes."""

    rounds: int = setting(1, "communication rounds: one-shot", at_least=1, at_most=1)
    epochs: int = setting(100, "local epochs E before the upload", at_least=1, tune="20..200")
    finetune: int = setting(100, "local epochs after the download", at_least=0, tune="0..200")
    batches: int = setting(50, "T, batches of generated nodes; 0 = the plain average", at_least=0)
    nodes: int = setting(100, "generated nodes per batch", at_least=2)
    noise: int = setting(32, "width of the noise z", at_least=1)
    neighbours: int = setting(
        5, "nearest neighbours that a generated node is linked to", at_least=1
    )
    width: int = setting(128, "width of the generator's two hidden layers", at_least=1)
    generator_steps: int = setting(30, "T_G, steps of the generator per batch", at_least=1)
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
    partial_participation: ClassVar[bool] = False

    @runs_once
    @phase(model="weights")
    def train(self, client: Client) -> Message:
        """Trains for E local epochs from the initial weights that all clients share."""
        initial = client.facts.build(client.facts.model_of[client.name], "server")
        return super().train(client, weights(initial))

    # ---- at the server ----
    def emphasis(self, teacher: Tensor, student: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the weight of each node in the two terms of L_gen: 1 and ω.

        Args:
            teacher: The ensemble's logits.
            student: The student's logits.
            y: The classes that the nodes were generated for.
        """
        return torch.ones(len(y)), (teacher.argmax(1) != student.argmax(1)).float()

    def generator_loss(self, ensemble: Ensemble, student: Model, graph: Graph) -> Tensor:
        """Returns L_gen."""
        D, f_S = ensemble(graph), forward_with(student, graph, weights(student))
        of_cross_entropy, of_divergence = self.emphasis(D, f_S, graph.y)
        cross_entropy = of_cross_entropy * F.cross_entropy(D, graph.y, reduction="none")
        return (cross_entropy - self.adversarial * of_divergence * divergence(D, f_S)).mean()

    def student_loss(self, ensemble: Ensemble, student: Model, graph: Graph) -> Tensor:
        """Returns L_dis."""
        return divergence(ensemble(graph), student(graph), self.temperature).mean()

    def reweigh(self, ensemble: Ensemble, graphs: list[Graph]) -> None:
        """Sets w, given all batches so far. Here all clients always have the same weight."""

    def view(self, server: Server, ensemble: Ensemble, graph: Graph) -> Graph:
        """Returns the version of a batch that the student trains on: here the batch itself."""
        return graph

    def generate(
        self,
        server: Server,
        generator: Model,
        ensemble: Ensemble,
        student: Model,
        optimizer: torch.optim.Optimizer,
    ) -> Graph:
        """Returns a batch with labels drawn evenly, after T_G steps of the generator on it."""
        C, rng = server.facts.num_classes, server.rng("generator")
        y = torch.randint(C, (self.nodes,), generator=rng)
        z = torch.cat([torch.randn(self.nodes, self.noise, generator=rng), F.one_hot(y, C)], 1)
        source = Graph(x=z, edge_index=torch.zeros(2, 0, dtype=torch.int64), y=y, num_classes=C)
        for _ in range(self.generator_steps):
            graph = knn_graph(generator(source), y, self.neighbours, C)
            step(optimizer, self.generator_loss(ensemble, student, graph))
        return knn_graph(generator(source).detach(), y, self.neighbours, C)

    def distil(self, server: Server, model: Message, uploads: Iterable[Message]) -> Message:
        """The server's part of Algorithm 1: returns θ_S, given the average θ and all θ_k."""
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
        graphs: list[Graph] = []
        for _ in range(self.batches):
            graphs.append(self.generate(server, generator, ensemble, student, of_generator))
            self.reweigh(ensemble, graphs)
            for k in torch.randperm(len(graphs), generator=server.rng("order")):
                graph = self.view(server, ensemble, graphs[k])
                step(of_student, self.student_loss(ensemble, student, graph))
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
