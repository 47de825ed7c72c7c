"""FedSage+: every client learns to generate the neighbours that its nodes lost in the cut, adds them to its graph, and joins FedAvg.

Zhang, Yang, Li, Sun, Yiu: "Subgraph Federated Learning with Missing Neighbor Generation", NeurIPS 2021, Sec. 4.2 and 4.3.

What travels, per client:
    a round of the generators, to every other client, as letters
          first, first_bias, second, second_bias, noisy    the weights of its fGen, and z_v + noise of some of its nodes
          first, first_bias, second, second_bias           back: a gradient for these weights
    once, and a round                                      as in FedAvg

    G⁻: the client's graph without a share h of its nodes; n_v: how many of those are neighbours of v          `impair`
    z = GraphSAGE(G⁻),  ñ = dGen(z) = ReLU(linear),  x̃_v^p = fGen(z_v + N(0, 1)), an MLP                       `noisy`, `generate`
    L = λ_d L_d + λ_f L_f + λ_c L_c                                                                            `generator_loss`
    L_d = mean_v smooth-L1(ñ_v − n_v);  L_c = CE of a classifier on G⁻ with the x̃ of round(ñ_v) neighbours
    L_f = 1/|V⁻| Σ_v Σ_p min_u ‖x̃_v^p − x_u‖² over v's hidden neighbours u                                     `closest`
          + α mean_j 1/|V⁻| Σ_v Σ_p min_u ‖x̃_v^p − x_u‖² over all nodes u of client j                         `nearest`
    j's part of the gradient of the last line is computed by j, for the weights of fGen alone                  `write_gradients`
    G⁺: the client's whole graph with round(ñ_v) neighbours, up to a limit, linked to v both ways              `mend`
    then FedAvg on G⁺ (the paper's FedSage)

Departures. The sender adds the noise, not the receiver, so that no embedding travels without; but it comes, as all noise of a run, from the
run's seed, which every party knows: it is part of the model, no protection from a peer that draws it again. p runs to n_v while fGen
learns, not to ñ_v: where ñ_v rounds to 0 it would learn nothing. Of all x̃ the others are asked about a sample. fGen is one MLP for all
neighbours of a node, with fresh noise for each; the authors' code has an output for each and layers of 256 and 2048, 75 times the weights
on Cora. Its output is linear: features may have any scale. The other clients' terms are averaged, not summed, so that α means the same for
any number of them. One loop trains everything; the code trains locally first, then fGen alone with the others, against random neighbours
there instead of the nearest node. h is a share of all the client's nodes (the code: of its validation nodes). Neighbours of v are the
sources of edges to v. `aggregate = "gradients"` trains as FedSGD does, which is how FedStruct's authors run it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from fedloom.core.client import Client
from fedloom.core.message import Message
from fedloom.core.phase import peer_messages, phase
from fedloom.core.server import Server
from fedloom.core.settings import setting
from fedloom.data.graph import Graph
from fedloom.data.seeds import stream_seed
from fedloom.errors import MessageError
from fedloom.methods.fedavg import FedAvg
from fedloom.methods.fedsgd import FedSGD
from fedloom.nn.build import build_model
from fedloom.nn.training import backward, make_optimizer

FGEN = {
    "first": "float32[latent,latent]",
    "first_bias": "float32[latent]",
    "second": "float32[latent,d]",
    "second_bias": "float32[d]",
}
ENTRIES = 2**23  # of a temporary matrix: larger ones are made in blocks


# ---- the generator ----
def generate(fgen: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
    """fGen: takes noisy embeddings [rows, latent], gives features [rows, d]."""
    return (
        F.relu(inputs @ fgen["first"] + fgen["first_bias"]) @ fgen["second"] + fgen["second_bias"]
    )


def noisy(z: Tensor, rows: Tensor, rng: Generator) -> Tensor:
    """z_v + N(0, 1) for the node of every row."""
    return z[rows] + torch.randn(len(rows), z.shape[1], generator=rng)


@dataclass(frozen=True, eq=False)
class Impaired:
    """G⁻ and what was taken from it."""

    graph: Graph  # G⁻
    missing: Tensor  # n_v [nodes of G⁻]
    rows: Tensor  # whose neighbour each generated one is to be: v, min(n_v, most) times
    pair_row: Tensor  # every (row, hidden neighbour of its node), by row: the row,
    pair_node: Tensor  # and the neighbour, by its number in the graph that was impaired


def impair(graph: Graph, share: float, most: int, rng: Generator) -> Impaired:
    """Hides a share of a graph's nodes, with all their edges; keeps who misses whom."""
    gone = torch.zeros(graph.num_nodes, dtype=torch.bool)
    gone[torch.randperm(graph.num_nodes, generator=rng)[: int(share * graph.num_nodes)]] = True
    source, target = graph.edge_index
    cut = gone[source] & ~gone[target]
    place = (~gone).cumsum(0) - 1
    source, target = source[cut], place[target[cut]]
    source = source[target.argsort(stable=True)]
    missing = torch.bincount(target, minlength=int((~gone).sum()))
    rows = repeated(missing.clamp(max=most))
    pair_row = repeated(missing[rows])
    begins = (missing.cumsum(0) - missing)[rows] - (missing[rows].cumsum(0) - missing[rows])
    return Impaired(
        graph.subgraph(~gone),
        missing,
        rows,
        pair_row,
        source[torch.arange(len(pair_row)) + begins[pair_row]],
    )


def repeated(counts: Tensor) -> Tensor:
    """0, 1, 2, ... each as often as `counts` says."""
    return torch.repeat_interleave(torch.arange(len(counts)), counts)


@torch.no_grad()
def closest(made: Tensor, x: Tensor, pair_row: Tensor, pair_node: Tensor) -> Tensor:
    """For every row of `made` [rows, d] the node, among those paired with it, whose features are closest."""
    blocks = zip(
        *(t.split(max(1, ENTRIES // x.shape[1])) for t in (pair_row, pair_node)), strict=True
    )
    distance = torch.cat(
        [made.new_zeros(0), *((made[row] - x[node]).square().sum(1) for row, node in blocks)]
    )
    order = distance.argsort(stable=True)
    order = order[pair_row[order].argsort(stable=True)]  # by row, and by distance within a row
    count = torch.bincount(pair_row, minlength=len(made))
    return pair_node[order[count.cumsum(0) - count]]


@torch.no_grad()
def nearest(made: Tensor, graph: Graph) -> Tensor:
    """For every row of `made` [rows, d] the node of the graph whose features are closest."""
    squares = graph.cached("squared norms", lambda: graph.x.square().sum(1, keepdim=True))
    blocks = made.split(max(1, ENTRIES // graph.num_nodes))
    return torch.cat(
        [(squares - 2 * graph.project(block.T.contiguous())).argmin(0) for block in blocks]
    )


@dataclass(frozen=True, eq=False)
class Mended(Graph):
    """A graph with generated nodes at its end, through whose features gradients pass."""

    real: Graph = None  # type: ignore[assignment]

    @property
    def sparse_x(self) -> None:
        """None: sparse features are constants, and no gradient would reach the generator."""

    def project(self, weight: Tensor) -> Tensor:
        """x @ weight, the real nodes' part the quickest way."""
        return torch.cat([self.real.project(weight), self.x[self.real.num_nodes :] @ weight])


def mend(graph: Graph, made: Tensor, rows: Tensor) -> Graph:
    """The graph with new nodes of features `made`, each linked to its node in `rows` both ways: no labels, in no mask, node_id -1."""
    if not len(made):
        return graph
    new, blank = graph.num_nodes + torch.arange(len(made)), torch.zeros(len(made), dtype=torch.bool)
    weight = (
        None
        if graph.edge_weight is None
        else torch.cat([graph.edge_weight, torch.ones(2 * len(made))])
    )
    return Mended(
        x=torch.cat([graph.x, made]),
        edge_index=torch.cat([graph.edge_index, torch.stack([rows, new]), torch.stack([new, rows])], 1),
        y=torch.cat([graph.y, torch.full_like(new, -1)]), num_classes=graph.num_classes,
        train=torch.cat([graph.train, blank]), val=torch.cat([graph.val, blank]), test=torch.cat([graph.test, blank]),
        edge_weight=weight, node_id=torch.cat([graph.node_id, torch.full_like(new, -1)]), cross_edges=graph.cross_edges,
        name=graph.name, real=graph,
    )  # fmt: skip


@dataclass(frozen=True)
class FedSagePlus(FedAvg, FedSGD):
    """FedAvg on graphs with generated neighbours."""

    aggregate: str = setting(
        "weights",
        "what rounds share: weights after E epochs, or gradients of one step",
        choices=("weights", "gradients"),
    )
    hidden: float = setting(
        0.5,
        "h, share of a client's nodes that its generator learns to bring back",
        above=0,
        below=1,
        tune="0.1..0.9",
    )
    most: int = setting(5, "generated neighbours of a node, at most", at_least=1)
    latent: int = setting(128, "width of z, and of fGen's hidden layer", at_least=1)
    generator_rounds: int = setting(
        40, "rounds, and steps, in which generators learn", at_least=1, tune="10..40"
    )
    generator_lr: float = setting(0.002, "their learning rate", above=0, tune="1e-4..0.01")
    degree_weight: float = setting(
        1.0, "λ_d, weight of the number of neighbours", at_least=0, tune="0.1..10"
    )
    feature_weight: float = setting(
        1.0, "λ_f, weight of their features", at_least=0, tune="0.1..10"
    )
    class_weight: float = setting(
        1.0, "λ_c, weight of the classifier on the mended graph", at_least=0, tune="0.1..10"
    )
    others: float = setting(
        1.0, "α, weight of the other clients' nodes within L_f", at_least=0, tune="0.1..10"
    )
    sample: int = setting(
        64,
        "generated neighbours a round that the other clients are asked about, at most",
        at_least=1,
    )

    tasks: ClassVar[tuple[str, ...]] = ("node",)
    discloses_to_server: ClassVar[str] = (
        "unless the run is secure, all that clients tell each other"
    )
    discloses_to_peers: ClassVar[str] = (
        "embeddings of some nodes (the noise on them is drawn from the run's seed, which all know) and the weights of the neighbour "
        "generator, to every other client; and to each of them a gradient for its generator, which holds the sum of the features of the "
        "own nodes that are nearest to what that makes (asked about a single neighbour: one node's features)"
    )

    # ---- the generators ----
    @phase()
    def prepare(self, client: Client) -> Message:
        """A generator, and all that it learns from."""
        rng, facts = client.rng("generator"), client.facts
        seed = stream_seed(facts.seed, "client", client.name, "encoder")
        # The linear head of one column is dGen. It starts at 1: a ReLU that starts below 0 at every node never learns.
        encoder = build_model(
            f"sage-2x{self.latent}+linear", facts.num_features, 1, dropout=facts.dropout, seed=seed
        )
        nn.init.ones_(encoder.classifier.bias)  # type: ignore[arg-type]
        fgen = {
            "first": nn.init.xavier_uniform_(torch.empty(self.latent, self.latent), generator=rng), "first_bias": torch.zeros(self.latent),
            "second": nn.init.xavier_uniform_(torch.empty(self.latent, facts.num_features), generator=rng),
            "second_bias": torch.zeros(facts.num_features),
        }  # fmt: skip
        classifier = client.build("generator")
        learnt = [
            *encoder.parameters(),
            *(t.requires_grad_() for t in fgen.values()),
            *classifier.parameters(),
        ]
        client.memory |= {
            "impaired": impair(client.graph, self.hidden, self.most, rng), "encoder": encoder, "fgen": fgen, "classifier": classifier,
            "generator optimizer": make_optimizer("adam", learnt, self.generator_lr, 0.0),
        }  # fmt: skip
        return {}

    def generator_loss(self, client: Client) -> tuple[dict[str, Tensor], Tensor]:
        """The client's own terms, weighted: of the degrees, the features and the classes; and the inputs of fGen in the second."""
        memory, rng = client.memory, client.rng("generator")
        impaired, encoder, fgen = memory["impaired"], memory["encoder"], memory["fgen"]
        z = encoder.embed(impaired.graph, rng)
        degree = F.relu(encoder.head(z, impaired.graph)).squeeze(1)
        inputs = noisy(z, impaired.rows, rng)
        made = generate(fgen, inputs)
        match = client.graph.x[closest(made, client.graph.x, impaired.pair_row, impaired.pair_node)]
        rows = self.wanted(degree)
        graph = mend(impaired.graph, generate(fgen, noisy(z, rows, rng)), rows)
        terms = {
            "degree": self.degree_weight * F.smooth_l1_loss(degree, impaired.missing.float()),
            "feature": self.feature_weight
            * (made - match).square().sum()
            / impaired.graph.num_nodes,
            "class": self.class_weight * client.loss(memory["classifier"](graph, rng), graph),
        }
        return terms, inputs

    def wanted(self, degree: Tensor) -> Tensor:
        """The node of every neighbour that is to be generated: round(ñ_v) of them, at most `most`."""
        return repeated(degree.detach().round().clamp(max=self.most).long())

    @peer_messages(read_by="read_generators")
    @phase(noisy="float32[n,latent]", **FGEN)
    def write_generator(self, client: Client) -> Message:
        """The gradient of the own terms is left with the weights; fGen and inputs go to the others, who know other nodes."""
        memory = client.memory
        memory["generator optimizer"].zero_grad()
        memory["share"] = 0.0  # nobody is asked, so far
        if not memory["impaired"].graph.num_nodes:
            return {}  # an inductive client may have nothing to train on
        terms, inputs = self.generator_loss(client)
        backward(
            [*memory["encoder"].parameters(), *memory["classifier"].parameters()],
            sum(terms.values(), torch.zeros(())),
        )
        if not len(inputs):
            return {}
        asked = inputs.detach()[
            torch.randperm(len(inputs), generator=client.rng("generator"))[: self.sample]
        ]
        # What the sums of others count: they are over a sample of the rows, and L_f is a mean over nodes.
        memory["share"] = len(inputs) / len(asked) / memory["impaired"].graph.num_nodes
        letter = {
            "noisy": asked,
            **{name: weight.detach() for name, weight in memory["fgen"].items()},
        }
        return {other: letter for other in client.facts.clients if other != client.name}

    @phase()
    def read_generators(self, client: Client, inbox: Message | None = None) -> Message:
        """Keeps what the others ask."""
        for sender, letter in (inbox or {}).items():
            if (rows := len(letter["noisy"])) > self.sample:
                who = f"client {sender!r} in 'write_generator'"
                raise MessageError(
                    f"{who}: tensor 'noisy' has {rows} rows, more than the {self.sample} agreed on"
                )
        client.memory["asked"] = inbox or {}
        return {}

    @peer_messages(read_by="read_gradients")
    @phase(**FGEN)
    def write_gradients(self, client: Client) -> Message:
        """To each who asked: ∇ Σ min_u ‖x̃ − x_u‖² over the client's nodes u, for the weights of the asker's fGen."""
        return {
            sender: self.answer(client.graph, letter)
            for sender, letter in client.memory.pop("asked").items()
            if client.graph.num_nodes
        }

    def answer(self, graph: Graph, letter: Message) -> Message:
        """That gradient for one letter."""
        fgen = {name: letter[name].requires_grad_() for name in FGEN}
        made = generate(fgen, letter["noisy"])
        loss = (made - graph.x[nearest(made, graph)]).square().sum()
        return dict(zip(fgen, torch.autograd.grad(loss, list(fgen.values())), strict=True))

    @phase()
    def read_gradients(self, client: Client, inbox: Message | None = None) -> Message:
        """One step along the own gradient and the mean of the others'."""
        memory = client.memory
        for sender, letter in (inbox or {}).items():
            if not memory["share"]:
                raise MessageError(
                    f"client {sender!r} in 'write_gradients': tensor 'first' is a gradient that nobody asked for"
                )
            weight = self.feature_weight * self.others * memory["share"] / len(inbox or {})
            for name, parameter in memory["fgen"].items():
                parameter.grad += weight * letter[name]
        memory["generator optimizer"].step()
        return {}

    @phase()
    def mend_graphs(self, client: Client) -> Message:
        """G⁺ in place of the client's graph; evaluation has its own, which in an inductive run has more nodes."""
        full = self.mended(client, client.full_graph)
        same = client.graph.num_nodes == client.full_graph.num_nodes
        client.graph = full.hide_labels() if same else self.mended(client, client.graph)
        client.memory.clear()
        client.memory["full graph"] = full
        return {}

    @torch.no_grad()
    def mended(self, client: Client, graph: Graph) -> Graph:
        """A graph with the neighbours that the trained generator thinks are missing."""
        encoder = client.memory["encoder"]
        z = encoder.embed(graph)
        rows = self.wanted(F.relu(encoder.head(z, graph)).squeeze(1))
        return mend(
            graph, generate(client.memory["fgen"], noisy(z, rows, client.rng("generator"))), rows
        )

    # ---- FedAvg on the mended graphs ----
    @phase(size="int64[]")
    def size(self, client: Client) -> Message:
        """n_k, of real nodes."""
        return {"size": (client.graph.node_id >= 0).sum().clamp(min=1)}

    def predict(self, client: Client, model: Message | None) -> Tensor:
        """Logits of the client's real nodes in the mended graph, noise off."""
        local_model, graph = client.state["model"], client.memory["full graph"]
        logits = (
            local_model(graph)
            if model is None
            else torch.func.functional_call(local_model, model, (graph,))
        )
        return logits[: client.full_graph.num_nodes]

    def run(self, server: Server) -> None:
        """Generators first, then FedAvg."""
        server.ask(self.prepare)
        for _ in range(self.generator_rounds):
            server.relay(self.write_generator)
            server.relay(self.write_gradients)
        server.ask(self.mend_graphs)
        (FedAvg if self.aggregate == "weights" else FedSGD).run(self, server)
