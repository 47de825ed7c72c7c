"""FGGP: clients also train on a second view with suggested links, and cluster prototypes classify.

Wan, Huang, Ye: "Federated Graph Learning under Domain Shift with Generalizable Prototypes",
AAAI 2024. The second view is drawn from links that the global model suggests.

What travels, per client (C classes, p the embedding's width):
    once     up    size                    number of local items n_k
    a round  down  model, sampler          θ, and ψ, the weights of the network that scores links
                   clusters, of_class      cluster prototypes, and the class of each (nothing in the
                                           first round)
             up    model, sampler          θ_k, ψ_k
                   prototypes, present     P_k[c] of the classes that occur at the client, and which
                                           these are

    candidates = own edges ∪ each node's k nearest by cosine              `candidates`
                 under the downloaded θ
    g_ij = h_i · h_j, h = sampler(candidates)                             `link_scores`
    link ij is drawn with probability α σ(g_ij) + 1 − α                   `draw_links`
    P[c] = Σ a_i z_i / Σ a_i over the nodes with ŷ_i = c                  `class_centres`
    ŷ_i = y_i, a_i = 1 in the training set; else the class that θ_k       `pseudo_labels`
          predicts and its probability
    L_links = ½ (mean over candidates of −log σ(g)                        `reconstruction`
                 + mean over other pairs of −log σ(−g))
    L_align = InfoNCE of the second view's P[c] with the first's;         `centre_alignment`
              negatives: all other classes
    min CE + λ_1 CE(second view) + λ_2 L_links + λ_3 L_align              `objective`
    P_k → means of FINCH's clusters, class by class                       `fpl.cluster_means`
    θ, ψ ← Σ_k (n_k / Σ n) θ_k, ψ_k                                       `run`
    class of a node = argmax_c Σ_{clusters Q of c} e^{cos(z, Q) / τ_v}    `vote`

The links are drawn by relaxed Bernoulli with a straight-through gradient. The gradient passes
through every product with the second view's adjacency. (A model that ignores edge weights, GAT,
gives none; then only L_links trains the sampler.) `classifier` says what predicts: the prototypes,
as in the paper, or the model's head. Local evaluation votes with the clusters of the client's last
download, global evaluation with the new ones. Before there are any, the head predicts. A client
without labelled nodes trains nothing and sends no prototypes.

Departures. The paper sends all prototypes (floor = 1). Links are drawn among candidates only, and
L_links takes as many random other pairs as there are candidates. The authors' code scores all n²
pairs, weighted so that both kinds have weight ½, which is L_links. σ(g) replaces g / max g. The
second view is undirected and unweighted. Nearest neighbours are computed every round (there: every
10 to 50). ŷ and a carry no gradient. All clusters of the last round vote; the authors' code keeps
those of several rounds in a queue and uses the nearest 20 to 100. Two faults of public code are not
kept: it numbers a client's prototypes in the order of the classes present, and a benchmark computes
the clusters but does not use them.
"""

from dataclasses import dataclass, replace
from itertools import chain
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.core.message import Message
from fedloom.core.phase import phase
from fedloom.core.server import Server
from fedloom.core.settings import fewest_items, setting
from fedloom.data.graph import Graph
from fedloom.data.seeds import stream_seed
from fedloom.methods._shared.prototypes import pack_table
from fedloom.methods.fedavg import FedAvg
from fedloom.methods.fednh import embed_with
from fedloom.methods.fpl import cluster_means
from fedloom.nn.build import build_model
from fedloom.nn.links import DrawnLinks, draw_links, link_scores, reconstruction
from fedloom.nn.model import Model
from fedloom.nn.nearest import nearest_edges, pairs
from fedloom.nn.prototypes import centre_alignment, class_centres, pseudo_labels, vote
from fedloom.nn.training import make_optimizer, outputs
from fedloom.nn.weights import load_weights, weights

CLUSTERS = ("clusters", "of_class")  # what clients know of the clusters, besides θ


@dataclass(frozen=True)
class FGGP(FedAvg):
    """FedAvg on two views of every graph, with a vote of prototypes."""

    neighbours: int = setting(
        3, "k, nearest neighbours that become candidate links", at_least=1, tune="1..10"
    )
    alpha: float = setting(
        0.5,
        "α, weight of the sampler in a link's probability; the rest keeps the link",
        at_least=0,
        at_most=1,
        tune="0..1",
    )
    softness: float = setting(1.0, "temperature of the draw's gradient", above=0)
    second: float = setting(
        1.0, "λ_1, weight of the second view's cross-entropy", at_least=0, tune="0.1..10"
    )
    links: float = setting(
        1.0, "λ_2, weight of the links' reconstruction", at_least=0, tune="0.1..10"
    )
    align: float = setting(
        1.0, "λ_3, weight of the alignment of the two views' prototypes", at_least=0, tune="0.1..10"
    )
    tau: float = setting(0.5, "temperature of the alignment", above=0, tune="0.1..1")
    tau_vote: float = setting(
        0.1, "τ_v, temperature of the prototypes' vote", above=0, tune="0.05..1"
    )
    classifier: str = setting("prototypes", "what predicts", choices=("prototypes", "head"))
    floor: int = fewest_items("fewest nodes that a prototype is computed from; others are not sent")

    tasks: ClassVar[tuple[str, ...]] = ("node",)
    discloses_to_peers: ClassVar[str] = (
        "cluster prototypes, means over few clients; of a single client if no other has the class"
    )
    needs_of_model: ClassVar[str] = "architecture"

    @phase()
    def setup(self, client: Client) -> Message:
        """Builds a model, a sampler, and one optimiser of both that keeps its moments."""
        client.state |= {"model": client.build(), "sampler": sampler(client.facts)}
        parameters = chain(client.state["model"].parameters(), client.state["sampler"].parameters())
        client.state["optimizer"] = make_optimizer(
            self.optimizer, parameters, self.lr, self.weight_decay
        )
        return {}

    @phase(model="~model", sampler="~sampler", prototypes="float32[*present,p]", present="bool[C]")
    def train(
        self,
        client: Client,
        model: Message,
        sampler: Message,
        clusters: Tensor | None = None,
        of_class: Tensor | None = None,
    ) -> Message:
        """Trains for E local epochs from the global weights on both views.

        Then it computes the prototypes of the classes.
        """
        state, graph = client.state, client.graph
        local_model, C = state["model"], client.facts.num_classes
        load_weights(local_model, model)
        load_weights(state["sampler"], sampler)
        if clusters is not None:
            state |= {"clusters": clusters, "of_class": of_class}
        table, behind = torch.zeros(C, client.facts.width), torch.zeros(C, dtype=torch.int64)
        if graph.train.any():
            with torch.no_grad():
                suggested = candidates(graph, local_model.embed(graph), self.neighbours)
            self.descend(client, local_model, {"candidates": suggested})
            with torch.no_grad():
                z, logits = outputs(local_model, graph)
                label, sure = pseudo_labels(logits, graph)
                table, present = class_centres(z, label, sure, C)
                behind = torch.bincount(label, minlength=C) * present
        return {
            "model": weights(local_model),
            "sampler": weights(state["sampler"]),
            **pack_table(table, behind > 0, self.floor, behind),
        }

    def objective(self, client: Client, batch: Graph, model: Model, received: Message) -> Tensor:
        """Returns CE + λ_1 CE(second view) + λ_2 L_links + λ_3 L_align.

        received: the graph of candidate links under `candidates`.
        """
        suggested = received["candidates"]
        h = client.state["sampler"](suggested)
        score = link_scores(h, suggested)
        drawn = draw_links(score, self.alpha, self.softness, client.rng("links"))
        view = DrawnLinks(suggested, drawn)
        (z, logits), (z_second, logits_second) = (
            outputs(model, g, client.rng(noise))
            for g, noise in ((batch, "dropout"), (view, "second"))
        )
        return (
            client.loss(logits, batch)
            + self.second * client.loss(logits_second, batch, record=False)
            + self.links * reconstruction(h, suggested, client.rng("pairs"))
            + self.align * centre_alignment(batch, logits, z, z_second, self.tau)
        )

    def predict(self, client: Client, model: Message | None) -> Tensor:
        """Returns the vote, or the head's logits.

        model: θ and the clusters. None: the client's own.
        """
        local_model, graph = client.state["model"], client.full_graph
        known = client.state if model is None else model
        theta = (
            None
            if model is None
            else {name: t for name, t in model.items() if name not in CLUSTERS}
        )
        if self.classifier == "head" or "clusters" not in known:
            return super().predict(client, theta)
        z = local_model.embed(graph) if theta is None else embed_with(local_model, theta, graph)
        return vote(
            z, known["clusters"], known["of_class"], client.facts.num_classes, self.tau_vote
        )

    def predictor(self, client: Client) -> Message:
        """Returns θ and the clusters, if there are any yet."""
        known = {name: client.state[name] for name in CLUSTERS if name in client.state}
        return {**super().predictor(client), **known}

    def load_predictor(self, client: Client, kept: Message) -> None:
        """Loads θ and the clusters."""
        theta = {name: t for name, t in kept.items() if name not in CLUSTERS}
        super().load_predictor(client, theta)
        client.state |= {name: kept[name] for name in CLUSTERS if name in kept}

    def run(self, server: Server) -> None:
        """Clients train on both views; the server averages, and clusters the prototypes."""
        server.ask(self.setup)
        state = server.state
        state |= {"model": server.model(), "sampler": weights(sampler(server.facts)), "told": {}}
        for _ in server.rounds(self.rounds):
            size = server.weights("size", server.participants)
            sent = {"model": state["model"], "sampler": state["sampler"]}
            replies = server.ask(self.train, clients=list(size), **sent, **state["told"])
            trained = {c: {name: reply[name] for name in sent} for c, reply in replies.items()}
            state |= replies.replaced(trained).mean(size)
            state["told"] = cluster_means(list(replies.values()))
            server.evaluate(model=state["model"] | state["told"])
        self.finish(server)


# ---- links ----
def sampler(facts: Facts) -> Model:
    """Returns the network that scores links: two convolutions, as wide as the embedding.

    It is initialised from the public seed, equally for all clients.
    """
    seed = stream_seed(facts.seed, "model", "sampler")
    return build_model(
        f"gcn-2x{facts.width}", facts.num_features, facts.width, dropout=0.0, seed=seed
    )


def candidates(graph: Graph, z: Tensor, neighbours: int) -> Graph:
    """Returns the graph with its own edges and those to every node's nearest, each pair once.

    The edges with i < j come first, then their reverses.
    """
    edges = torch.cat([graph.edge_index, nearest_edges(F.normalize(z), neighbours)], 1)
    joined = pairs(edges, graph.num_nodes)
    suggested = replace(graph, edge_index=torch.cat([joined, joined.flip(0)], 1), edge_weight=None)
    suggested.cached("features", lambda: graph.sparse_x)
    return suggested
