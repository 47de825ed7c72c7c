"""FedSage+: each client learns to generate the neighbours that its nodes lost, then joins FedAvg.

Zhang, Yang, Li, Sun, Yiu: "Subgraph Federated Learning with Missing Neighbor Generation",
NeurIPS 2021, Sec. 4.2 and 4.3. Generated neighbours are added to the client's graph.

What travels, per client:
    a round of the generators, to every other client, as peer messages
          first, first_bias, second, second_bias    the weights of its fGen
          noisy                                     z_v + noise of some of its nodes
          first, first_bias, second, second_bias    in return: a gradient for these weights
    once, and every round                           as in FedAvg

    G⁻: the client's graph without a share h of its nodes                    `impair`
    n_v: how many of those are neighbours of v                               `impair`
    z = GraphSAGE(G⁻),  ñ = dGen(z) = ReLU(linear)                           `generator_loss`
    x̃_v^p = fGen(z_v + N(0, 1)), an MLP                                      `noisy`, `generate`
    L = λ_d L_d + λ_f L_f + λ_c L_c                                          `generator_loss`
    L_d = mean_v smooth-L1(ñ_v − n_v)
    L_c = CE of a classifier on G⁻ with the x̃ of round(ñ_v) neighbours
    L_f = 1/|V⁻| Σ_v Σ_p min_u ‖x̃_v^p − x_u‖²                                `closest`
              over v's hidden neighbours u
          + α mean_j 1/|V⁻| Σ_v Σ_p min_u ‖x̃_v^p − x_u‖²                     `nearest`
              over all nodes u of client j
    client j computes its part of the gradient of the last term, for the     `write_gradients`
    weights of fGen alone
    G⁺: the client's whole graph with round(ñ_v) neighbours, up to a         `mend`
        limit, linked to v both ways
    then FedAvg on G⁺ (the paper's FedSage)                                  `run`

Departures. The sender adds the noise, not the receiver, so that no embedding travels without noise.
But like all noise of a run, it comes from the run's seed, which every party knows: it is part of
the model, and no protection from a peer that draws it again. p runs to n_v while fGen learns, not
to ñ_v: where ñ_v rounds to 0, fGen would learn nothing. The other clients are asked about a sample
of all x̃. fGen is one MLP for all neighbours of a node, with fresh noise for each. The authors' code
has an output for each neighbour and layers of 256 and 2048, 75 times the weights on Cora. The
output of fGen is linear: features may have any scale. The other clients' terms are averaged, not
summed, so that α means the same for any number of clients. One loop trains everything. The code
trains locally first, then only fGen with the others, against random neighbours instead of the
nearest node. h is a share of all nodes of the client (the code: of its validation nodes).
Neighbours of v are the sources of edges to v. `aggregate = "gradients"` trains as FedSGD does;
FedStruct's authors run it like this.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from fedloom.core.client import Client
from fedloom.core.message import Message
from fedloom.core.phase import peer_messages, phase, runs_once
from fedloom.core.server import Server
from fedloom.core.settings import setting
from fedloom.data.graph import Graph
from fedloom.data.seeds import stream_seed
from fedloom.errors import MessageError
from fedloom.methods.fedavg import FedAvg
from fedloom.methods.fedsgd import FedSGD
from fedloom.nn.build import build_model
from fedloom.nn.mended import Mended
from fedloom.nn.model import Model, forward_with
from fedloom.nn.training import backward, make_optimizer
from fedloom.nn.weights import load_weights, weights

FGEN = {
    "first": "float32[latent,latent]",
    "first_bias": "float32[latent]",
    "second": "float32[latent,d]",
    "second_bias": "float32[d]",
}
ENTRIES = 2**23  # largest temporary matrix; larger ones are computed in blocks


# ---- the generator ----
def hidden_layer(fgen: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
    """The first layer of fGen: takes and returns [rows, latent]."""
    return F.relu(inputs @ fgen["first"] + fgen["first_bias"])


def generate(fgen: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
    """fGen: takes noisy embeddings [rows, latent], returns features [rows, d]."""
    return hidden_layer(fgen, inputs) @ fgen["second"] + fgen["second_bias"]


def factors_of(fgen: Mapping[str, Tensor], inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Returns [hidden ‖ 1] and [second; bias], whose product is `generate(fgen, inputs)`."""
    return (
        F.pad(hidden_layer(fgen, inputs), (0, 1), value=1.0),
        torch.cat([fgen["second"], fgen["second_bias"].unsqueeze(0)]),
    )


def noisy(z: Tensor, rows: Tensor, rng: Generator) -> Tensor:
    """Returns z_v + N(0, 1) for the node of every row."""
    return z[rows] + torch.randn(len(rows), z.shape[1], generator=rng)


@dataclass(frozen=True, eq=False)
class Impaired:
    """G⁻ and what was removed from it."""

    graph: Graph  # G⁻
    missing: Tensor  # n_v [nodes of G⁻]
    rows: Tensor  # the node of each neighbour to generate: v, min(n_v, most) times
    # Every pair of a row and a hidden neighbour of its node, sorted by row.
    pair_row: Tensor  # the row
    pair_node: Tensor  # the neighbour, by its number in the original graph


def impair(graph: Graph, share: float, most: int, rng: Generator) -> Impaired:
    """Hides a share of a graph's nodes, with all their edges, and records the lost neighbours."""
    hidden = torch.zeros(graph.num_nodes, dtype=torch.bool)
    hidden[torch.randperm(graph.num_nodes, generator=rng)[: int(share * graph.num_nodes)]] = True
    source, target = graph.edge_index
    cut = hidden[source] & ~hidden[target]
    new_number = (~hidden).cumsum(0) - 1
    source, target = source[cut], new_number[target[cut]]
    source = source[target.argsort(stable=True)]
    missing = torch.bincount(target, minlength=int((~hidden).sum()))
    rows = repeated(missing.clamp(max=most))
    pair_row = repeated(missing[rows])
    begins = (missing.cumsum(0) - missing)[rows] - (missing[rows].cumsum(0) - missing[rows])
    pair_node = source[torch.arange(len(pair_row)) + begins[pair_row]]
    return Impaired(graph.subgraph(~hidden), missing, rows, pair_row, pair_node)


def repeated(counts: Tensor) -> Tensor:
    """Returns 0, 1, 2, ..., each repeated `counts` times."""
    return torch.repeat_interleave(torch.arange(len(counts)), counts)


@torch.no_grad()
def closest(generated: Tensor, x: Tensor, pair_row: Tensor, pair_node: Tensor) -> Tensor:
    """Returns, for every row, the closest of the nodes that are paired with it.

    Args:
        generated: Features [rows, d].
        x: Features of the nodes.
        pair_row: The row of every pair.
        pair_node: The node of every pair.
    """
    size = max(1, ENTRIES // x.shape[1])
    blocks = zip(pair_row.split(size), pair_node.split(size), strict=True)
    distances = [(generated[row] - x[node]).square().sum(1) for row, node in blocks]
    order = torch.cat([generated.new_zeros(0), *distances]).argsort(stable=True)
    order = order[pair_row[order].argsort(stable=True)]  # by row, and by distance within a row
    count = torch.bincount(pair_row, minlength=len(generated))
    return pair_node[order[count.cumsum(0) - count]]


@torch.no_grad()
def nearest(generated: Tensor, graph: Graph) -> Tensor:
    """Returns, for every row of `generated` [rows, d], the node with the closest features."""
    squares = graph.cached("squared norms", lambda: graph.x.square().sum(1, keepdim=True))
    blocks = generated.split(max(1, ENTRIES // graph.num_nodes))
    return torch.cat(
        [(squares - 2 * graph.project(block.T.contiguous())).argmin(0) for block in blocks]
    )


def mend(
    graph: Graph, generated: Tensor, rows: Tensor, factors: tuple[Tensor, Tensor] | None = None
) -> Graph:
    """Returns the graph with new nodes, each linked both ways to its node in `rows`.

    New nodes have no label, are in no mask, and have node_id -1.

    Args:
        graph: The graph.
        generated: The features of the new nodes.
        rows: The node that each new node is linked to.
        factors: Two matrices whose product is `generated`, if there are any; constants.
    """
    if not len(generated):
        return graph
    new = graph.num_nodes + torch.arange(len(generated))
    unmasked, unlabelled = torch.zeros_like(new, dtype=torch.bool), torch.full_like(new, -1)
    links = torch.stack([torch.cat([rows, new]), torch.cat([new, rows])])
    weight = graph.edge_weight
    if weight is not None:
        weight = torch.cat([weight, torch.ones(2 * len(generated))])
    return Mended(
        x=torch.cat([graph.x, generated]),
        edge_index=torch.cat([graph.edge_index, links], 1),
        y=torch.cat([graph.y, unlabelled]),
        num_classes=graph.num_classes,
        train=torch.cat([graph.train, unmasked]),
        val=torch.cat([graph.val, unmasked]),
        test=torch.cat([graph.test, unmasked]),
        edge_weight=weight,
        node_id=torch.cat([graph.node_id, torch.full_like(new, -1)]),
        cross_edges=graph.cross_edges,
        name=graph.name,
        real=graph,
        factors=factors,
    )


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
        "h, share of a client's nodes that are hidden while its generator learns",
        above=0,
        below=1,
        tune="0.1..0.9",
    )
    most: int = setting(5, "generated neighbours of a node, at most", at_least=1)
    latent: int = setting(128, "width of z, and of fGen's hidden layer", at_least=1)
    generator_rounds: int = setting(
        40, "rounds, of one step each, that train the generators", at_least=1, tune="10..40"
    )
    generator_lr: float = setting(
        0.002, "learning rate of the generators", above=0, tune="1e-4..0.01"
    )
    degree_weight: float = setting(
        1.0, "λ_d, weight of the number of neighbours", at_least=0, tune="0.1..10"
    )
    feature_weight: float = setting(
        1.0, "λ_f, weight of the neighbours' features", at_least=0, tune="0.1..10"
    )
    label_weight: float = setting(
        1.0, "λ_c, weight of the classifier on the mended graph", at_least=0, tune="0.1..10"
    )
    others: float = setting(
        1.0, "α, weight of the other clients' nodes within L_f", at_least=0, tune="0.1..10"
    )
    sample: int = setting(
        64,
        "most generated neighbours per round that the other clients are asked about",
        at_least=1,
    )

    tasks: ClassVar[tuple[str, ...]] = ("node",)
    discloses_to_server: ClassVar[str] = "unless the run is secure, all peer messages"
    discloses_to_peers: ClassVar[str] = (
        "to every other client: embeddings of some nodes (the noise on them is drawn from the "
        "run's seed, which all know) and the weights of the neighbour generator; to each of them "
        "also a gradient for its generator, which holds the sum of the features of the own nodes "
        "that are nearest to its generated ones (if asked about a single one: one node's features)"
    )

    # ---- the generators ----
    def encoder(self, client: Client) -> Model:
        """Returns a new encoder, whose linear head of one column is dGen."""
        facts = client.facts
        seed = stream_seed(facts.seed, "client", client.name, "encoder")
        encoder = build_model(
            f"sage-2x{self.latent}+linear", facts.num_features, 1, dropout=facts.dropout, seed=seed
        )
        # A ReLU that starts below 0 at every node never learns.
        nn.init.ones_(encoder.classifier.get_parameter("bias"))
        return encoder

    @runs_once
    @phase()
    def prepare(self, client: Client) -> Message:
        """Builds a generator and everything that it learns from."""
        rng, encoder = client.rng("generator"), self.encoder(client)
        d = client.facts.num_features
        first, second = torch.empty(self.latent, self.latent), torch.empty(self.latent, d)
        fgen = {
            "first": nn.init.xavier_uniform_(first, generator=rng),
            "first_bias": torch.zeros(self.latent),
            "second": nn.init.xavier_uniform_(second, generator=rng),
            "second_bias": torch.zeros(d),
        }
        classifier = client.build("generator")
        trained = [
            *encoder.parameters(),
            *(t.requires_grad_() for t in fgen.values()),
            *classifier.parameters(),
        ]
        client.memory |= {
            "impaired": impair(client.graph, self.hidden, self.most, rng),
            "encoder": encoder,
            "fgen": fgen,
            "classifier": classifier,
            "generator optimizer": make_optimizer("adam", trained, self.generator_lr, 0.0),
        }
        return {}

    def generator_loss(self, client: Client) -> tuple[dict[str, Tensor], Tensor]:
        """Returns the client's own terms, weighted, by name; and the inputs of fGen in L_f."""
        memory, rng = client.memory, client.rng("generator")
        impaired, encoder, fgen = memory["impaired"], memory["encoder"], memory["fgen"]
        z = encoder.embed(impaired.graph, rng)
        degree = F.relu(encoder.head(z, impaired.graph)).squeeze(1)
        inputs = noisy(z, impaired.rows, rng)
        x, generated = client.graph.x, generate(fgen, inputs)
        match = x[closest(generated, x, impaired.pair_row, impaired.pair_node)]
        distance = (generated - match).square().sum()
        rows = self.nodes_to_extend(degree)
        graph = mend(impaired.graph, generate(fgen, noisy(z, rows, rng)), rows)
        terms = {
            "degree": self.degree_weight * F.smooth_l1_loss(degree, impaired.missing.float()),
            "feature": self.feature_weight * distance / impaired.graph.num_nodes,
            "label": self.label_weight
            * client.loss(memory["classifier"](graph, rng), graph, record=False),
        }
        return terms, inputs

    def nodes_to_extend(self, degree: Tensor) -> Tensor:
        """Returns the node of every neighbour to generate: round(ñ_v) per node, at most `most`."""
        return repeated(degree.detach().round().clamp(max=self.most).long())

    @runs_once
    @peer_messages(read_by="read_generators")
    @phase(noisy="float32[n,latent]", **FGEN)
    def write_generator(self, client: Client) -> Message:
        """Writes fGen and some of its inputs to the other clients, which know other nodes.

        The gradient of the own terms stays with the weights.
        """
        memory = client.memory
        memory["generator optimizer"].zero_grad()
        memory["share"] = 0.0  # no client has been asked yet
        if not memory["impaired"].graph.num_nodes:
            return {}  # an inductive client may have nothing to train on
        terms, inputs = self.generator_loss(client)
        modules = [*memory["encoder"].parameters(), *memory["classifier"].parameters()]
        backward(modules, sum(terms.values(), torch.zeros(())))
        if not len(inputs):
            return {}
        chosen = torch.randperm(len(inputs), generator=client.rng("generator"))[: self.sample]
        asked = inputs.detach()[chosen]
        # The weight of the other clients' sums: they are over a sample of the rows, and L_f is a
        # mean over nodes.
        memory["share"] = len(inputs) / len(asked) / memory["impaired"].graph.num_nodes
        message = {"noisy": asked}
        message |= {name: weight.detach() for name, weight in memory["fgen"].items()}
        return {other: message for other in client.facts.clients if other != client.name}

    @phase()
    def read_generators(self, client: Client, inbox: Message | None = None) -> Message:
        """Stores the other clients' requests."""
        for sender, request in (inbox or {}).items():
            if (rows := len(request["noisy"])) > self.sample:
                raise MessageError(
                    f"client {sender!r} in 'write_generator': tensor 'noisy' has {rows} rows, "
                    f"more than the {self.sample} agreed on"
                )
        client.memory["requests"] = inbox or {}
        return {}

    @runs_once
    @peer_messages(read_by="read_gradients")
    @phase(**FGEN)
    def write_gradients(self, client: Client) -> Message:
        """Writes to each requester ∇ Σ min_u ‖x̃ − x_u‖² for the weights of its fGen.

        u are the client's own nodes.
        """
        return {
            sender: self.fgen_gradient(client.graph, request)
            for sender, request in client.memory.pop("requests").items()
            if client.graph.num_nodes
        }

    def fgen_gradient(self, graph: Graph, request: Message) -> Message:
        """Returns that gradient for one request."""
        fgen = {name: request[name].requires_grad_() for name in FGEN}
        generated = generate(fgen, request["noisy"])
        loss = (generated - graph.x[nearest(generated, graph)]).square().sum()
        return dict(zip(fgen, torch.autograd.grad(loss, list(fgen.values())), strict=True))

    @runs_once
    @phase()
    def read_gradients(self, client: Client, inbox: Message | None = None) -> Message:
        """Takes one step along the own gradient and the mean of the others'."""
        memory = client.memory
        for sender, gradient in (inbox or {}).items():
            if not memory["share"]:
                raise MessageError(
                    f"client {sender!r} in 'write_gradients': tensor 'first' is a gradient that "
                    "this client did not ask for"
                )
            weight = self.feature_weight * self.others * memory["share"] / len(inbox or {})
            for name, parameter in memory["fgen"].items():
                parameter.grad += weight * gradient[name]
        memory["generator optimizer"].step()
        return {}

    @runs_once
    @phase()
    def mend_graphs(self, client: Client) -> Message:
        """Replaces the client's graph by G⁺.

        Evaluation has its own, which in an inductive run has more nodes.
        """
        noise = client.rng("generator").get_state()
        full = self.mended(client, client.full_graph)
        same = client.graph.num_nodes == client.full_graph.num_nodes
        client.graph = full.hide_labels() if same else self.mended(client, client.graph)
        generator = {name: client.memory[name] for name in ("encoder", "fgen")}
        client.memory.clear()
        client.memory |= generator | {"noise": noise, "full graph": full}
        return {}

    @torch.no_grad()
    def mended(self, client: Client, graph: Graph) -> Graph:
        """Returns a graph with the neighbours that the trained generator predicts to be missing."""
        encoder = client.memory["encoder"]
        z = encoder.embed(graph)
        rows = self.nodes_to_extend(F.relu(encoder.head(z, graph)).squeeze(1))
        inputs, fgen = noisy(z, rows, client.rng("generator")), client.memory["fgen"]
        return mend(graph, generate(fgen, inputs), rows, factors_of(fgen, inputs))

    # ---- FedAvg on the mended graphs ----
    @phase(size="int64[] is size")
    def size(self, client: Client) -> Message:
        """n_k, the number of real nodes."""
        return {"size": (client.graph.node_id >= 0).sum().clamp(min=1)}

    def predict(self, client: Client, model: Message | None) -> Tensor:
        """Returns logits of the client's real nodes in the mended graph, without dropout."""
        local_model = client.state["model"]
        graph = client.memory.get("full graph")
        if graph is None:  # after the run
            client.rng("generator").set_state(client.memory["noise"])
            graph = self.mended(client, client.full_graph)
        logits = local_model(graph) if model is None else forward_with(local_model, graph, model)
        return logits[: client.full_graph.num_nodes]

    def predictor(self, client: Client) -> Message:
        """Returns θ, the generator, and where its noise began when it mended the client's graph."""
        return {
            **super().predictor(client),
            "encoder": dict(weights(client.memory["encoder"])),
            "fgen": {name: tensor.detach() for name, tensor in client.memory["fgen"].items()},
            "noise": client.memory["noise"],
        }

    def load_predictor(self, client: Client, kept: Message) -> None:
        """Loads θ and the generator, which mends new graphs."""
        theta = {name: kept[name] for name in kept.keys() - {"encoder", "fgen", "noise"}}
        super().load_predictor(client, theta)
        encoder = self.encoder(client)
        load_weights(encoder, kept["encoder"])
        client.memory |= {"encoder": encoder, "fgen": kept["fgen"], "noise": kept["noise"]}

    def run(self, server: Server) -> None:
        """Trains the generators first, then runs FedAvg."""
        server.ask(self.prepare)
        for _ in range(self.generator_rounds):
            server.relay(self.write_generator)
            server.relay(self.write_gradients)
        server.ask(self.mend_graphs)
        (FedAvg if self.aggregate == "weights" else FedSGD).run(self, server)
