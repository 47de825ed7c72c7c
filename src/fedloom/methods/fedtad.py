"""FedTAD: FedAvg whose average learns further, on invented nodes, from the clients that know a class best.

Zhu, Li, Wu, Wu, Hu, Li: "FedTAD: Topology-aware Data-free Knowledge Distillation for Subgraph Federated Learning", IJCAI 2024.

What travels, per client:
    once     up    size           number of local items n_k
             up    reliability    φ_k, how much the client knows of each class                        C numbers
    a round  down  model          θ
             up    model          θ_k, the weights after E local epochs

    h_i = [x_i ‖ P(back at i after 1, ..., p steps of a random walk)], of length 1                    `reliability_of`
    φ_k[c] = Σ over training nodes i of class c of the mean of ⟨h_i, h_j⟩ over j = i and i's neighbours      `reliability_of`
    s_k[c] = φ_k[c] / Σ_k φ_k[c]                                                                      `shares`
    x̂ = G(z, y),  linked by kNN on cosines                                                            `make_generator`, DENSE's `linked`
    L_sem = mean_i Σ_k s_k[y_i] CE(f_k(x̂)_i, y_i)                                                     `generator_loss`, `weigh`
    L_dis = mean_i Σ_k s_k[y_i] ‖f_S(x̂)_i − f_k(x̂)_i‖₁ / C                                            `disagreement`
    L_div = exp(−mean_ij ‖x̂_i − x̂_j‖₁ / d · ‖z_i − z_j‖² / |z|)                                      `diversity`
    θ_S = Σ_k (n_k / Σ n) θ_k;  T times: z anew, T_G steps of G down λ_1 L_sem − L_dis + λ_2 L_div,
    then T_S steps of θ_S down L_dis;  θ ← θ_S                                                        `distil`

f_k is a constant in L_dis, for the generator too (as in the authors' code): through f_k, L_dis grows with the mere length of x̂, which on
Cora became several hundred times what it was. φ is 0 for a class that the client has no training node of, and for one whose nodes are, in
sum, unlike their neighbours. A class that nobody of the round knows is never invented; if there is no other, the round is FedAvg's. The
generator and both optimisers go on from round to round. T = 0 leaves FedAvg, and so does a single client, from whom the average differs
in nothing. The server learns φ, which is close to a client's label counts.

Departures. The authors' code puts the numbers of the nodes that a walk meets beside the features; here are the return probabilities of
the text. A public benchmark scales φ over a client's classes; here over clients, as the authors do. They add L_div once for each client,
and sum the other two over classes; here all are means, and the balance is the same with as many clients as classes. Dropout is off for
all models at the server, and there is no weight decay: with Adam it would be all that moves a student that has nothing to learn. The
student's learning rate is a tenth of theirs, which moves it further than clients can make good where features are many and not sparse
(Photo, 60 rounds: validation accuracy 86.9 %, here 92.2, FedAvg 92.4). Classes are told as one-hot vectors, not learnt ones: the first
layer learns the same. A node is not one of its own k nearest.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.core.message import Message
from fedloom.core.phase import phase
from fedloom.core.replies import Replies
from fedloom.core.server import Server
from fedloom.core.settings import setting
from fedloom.data.graph import Graph
from fedloom.errors import MessageError
from fedloom.methods._shared.prototypes import class_sums
from fedloom.methods.dense import Ensemble, linked
from fedloom.methods.fedavg import FedAvg
from fedloom.methods.fedstar import return_probabilities
from fedloom.nn.model import Model
from fedloom.nn.training import make_optimizer, seeded, step
from fedloom.nn.weights import load_weights, weights

HIDDEN = (64, 128, 256)  # widths of the generator's hidden layers


@dataclass(frozen=True)
class FedTAD(FedAvg):
    """FedAvg, then distillation from the clients, class by class as reliable as they are."""

    walk: int = setting(5, "p, longest random walk that a node's place is read from", at_least=1)
    batches: int = setting(
        5, "T, batches of invented nodes a round; 0 = the average as it is", at_least=0
    )
    nodes: int = setting(100, "invented nodes a batch", at_least=2)
    noise: int = setting(32, "width of the noise z", at_least=1)
    neighbours: int = setting(5, "links an invented node asks for", at_least=1)
    generator_steps: int = setting(1, "T_G, steps of the generator a batch", at_least=1)
    generator_lr: float = setting(1e-3, "the generator's learning rate", above=0, tune="1e-4..0.01")
    semantic: float = setting(
        1.0,
        "λ_1, weight of the clients' cross-entropy on invented nodes",
        at_least=0,
        tune="0.1..10",
    )
    diversity: float = setting(
        1.0, "λ_2, weight of the diversity of invented nodes", at_least=0, tune="0.1..10"
    )
    student_steps: int = setting(5, "T_S, steps of the student a batch", at_least=1)
    student_lr: float = setting(1e-4, "the student's learning rate", above=0, tune="1e-5..0.01")

    tasks: ClassVar[tuple[str, ...]] = ("node",)

    # ---- at a client ----
    @phase(reliability="float32[C]")
    def reliability(self, client: Client) -> Message:
        """φ_k."""
        return {"reliability": reliability_of(client.graph, self.walk, client.facts.num_classes)}

    # ---- at the server ----
    def begin(self, server: Server) -> None:
        """The first θ; a generator, a form for the student, and their optimisers."""
        state, facts = server.state, server.facts
        state["model"] = server.model()
        state["student"] = student = facts.build(facts.models[0], "server")
        state["generator"] = generator = self.make_generator(facts, server.rng("generator"))
        state["of_student"] = make_optimizer("adam", student.parameters(), self.student_lr, 0.0)
        state["of_generator"] = make_optimizer(
            "adam", generator.parameters(), self.generator_lr, 0.0
        )

    def make_generator(self, facts: Facts, rng: torch.Generator) -> nn.Sequential:
        """A fresh G: [z ‖ one-hot y] to features, as an MLP with tanh."""
        with seeded(rng):
            hidden = [
                m
                for sizes in pairwise((self.noise + facts.num_classes, *HIDDEN))
                for m in (nn.Linear(*sizes), nn.Tanh())
            ]
            return nn.Sequential(*hidden, nn.Linear(HIDDEN[-1], facts.num_features))

    def generator_loss(
        self, ensemble: Ensemble, share: Tensor, student: Model, graph: Graph, noise: Tensor
    ) -> Tensor:
        """λ_1 L_sem − L_dis + λ_2 L_div of a graph that G made of `noise`."""
        taught, learnt = ensemble.each(graph), functional_call(student, weights(student), (graph,))
        wrong = torch.stack(
            [F.cross_entropy(logits, graph.y, reduction="none") for logits in taught]
        )
        apart = disagreement(taught, learnt)
        return weigh(share, graph.y, self.semantic * wrong - apart) + self.diversity * diversity(
            noise, graph.x
        )

    def student_loss(
        self, ensemble: Ensemble, share: Tensor, student: Model, graph: Graph
    ) -> Tensor:
        """L_dis."""
        return weigh(share, graph.y, disagreement(ensemble.each(graph), student(graph)))

    def imagine(self, server: Server, ensemble: Ensemble, share: Tensor, y: Tensor) -> Graph:
        """A batch with the given labels, after T_G steps of the generator on it."""
        state, C = server.state, server.facts.num_classes
        noise = torch.randn(len(y), self.noise, generator=server.rng("noise"))
        told = torch.cat([noise, F.one_hot(y, C)], 1)
        for _ in range(self.generator_steps):
            graph = linked(state["generator"](told), y, self.neighbours, C)
            step(
                state["of_generator"],
                self.generator_loss(ensemble, share, state["student"], graph, noise),
            )
        return linked(state["generator"](told).detach(), y, self.neighbours, C)

    def distil(
        self, server: Server, model: Message, replies: Replies, reliability: Mapping[str, Tensor]
    ) -> Message:
        """From the average and all θ_k to θ_S."""
        state, facts = server.state, server.facts
        student, share = state["student"], shares({c: reliability[c] for c in replies})
        load_weights(student, model)
        known = share.sum(0).nonzero().flatten()
        if len(known) == 0:
            return weights(student)
        ensemble = Ensemble(
            facts.build(facts.models[0], "server"), replies.column("model").values()
        )
        y = known[torch.arange(self.nodes) % len(known)]  # as even as can be
        for _ in range(self.batches):
            graph = self.imagine(server, ensemble, share, y)
            for _ in range(self.student_steps):
                step(state["of_student"], self.student_loss(ensemble, share, student, graph))
        return weights(student)

    def run(self, server: Server) -> None:
        """FedAvg's rounds, with a distillation at the end of each."""
        server.ask(self.setup)
        self.begin(server)
        state = server.state
        for _ in server.rounds(self.rounds):
            size = server.weights("size", server.participants)
            reliability = server.weights("reliability", list(size))
            replies = server.ask(self.train, clients=list(reliability), model=state["model"])
            state["model"] = self.distil(server, replies.mean(size)["model"], replies, reliability)
            server.evaluate(model=state["model"])
        self.finish(server)


def reliability_of(graph: Graph, walk: int, num_classes: int) -> Tensor:
    """φ of a client's graph, [classes]."""
    n = graph.num_nodes
    places = Graph(  # of one item: to the walks it is a union of small graphs that happens to hold one
        x=torch.zeros(n, 0), edge_index=graph.edge_index, edge_weight=graph.edge_weight,
        y=torch.zeros(1, dtype=torch.int64), num_classes=1, batch=torch.zeros(n, dtype=torch.int64),
    )  # fmt: skip
    h = F.normalize(torch.cat([graph.x, return_probabilities(places, walk)], 1))
    alike = (h * graph.propagate(h, "row")).sum(
        1, keepdim=True
    )  # a mean over neighbours of products is a product with their mean
    return class_sums(alike, graph.y, graph.train, num_classes)[0].squeeze(1).clamp(min=0)


def shares(reliability: Mapping[str, Tensor]) -> Tensor:
    """s, [clients, classes]: every column sums to 1, or to 0 if nobody knows the class."""
    for client, phi in reliability.items():
        if (phi < 0).any():
            raise MessageError(
                f"client {client!r}: tensor 'reliability' holds {phi.min():g}, must be at least 0"
            )
    phi = torch.stack(list(reliability.values()))
    return phi / phi.sum(0).where((phi > 0).any(0), 1.0)


def weigh(share: Tensor, y: Tensor, of_each: Tensor) -> Tensor:
    """mean_i Σ_k s_k[y_i] · of_each[k, i]."""
    return (share[:, y] * of_each).sum(0).mean()


def disagreement(taught: Tensor, learnt: Tensor) -> Tensor:
    """Mean absolute difference of every client's logits [K, nodes, C], as constants, to the student's [nodes, C]: [K, nodes]."""
    return (taught.detach() - learnt).abs().mean(2)


def diversity(noise: Tensor, x: Tensor) -> Tensor:
    """L_div: small where different noise gives different features. Never holds a row of features for each pair: these are wide."""
    pairs = F.pdist(x, p=1.0) / x.shape[1] * F.pdist(noise).square() / noise.shape[1]  # i < j
    return torch.exp(-2 * pairs.sum() / len(x) ** 2)
