"""FedStar: a structure channel is averaged over clients; a feature channel stays private.

Tan, Liu, Long, Jiang, Lu, Zhang: "Federated Learning on Non-IID Graphs via Structural Knowledge
Sharing", AAAI 2023.

What travels, per client:
    once     up    size      number of local items n_k
    a round  down  model     θ^s, the structure channel's weights
             up    model     θ_k^s, after E local epochs
The feature channel and the head never travel.

    s_v = [P(back at v after 1, ..., 16 steps of a random walk)           `return_probabilities`,
           ‖ one-hot degree of v, 16 wide]                                `structure_of`
    s⁰ = s W_s + b,   s^l = tanh(GCN(s^{l-1}))                            `TwoChannels.nodes`
    h⁰ = x W_x + b,   h^l = ReLU(GIN([h^{l-1} ‖ s^{l-1}]))                `TwoChannels.nodes`
    z  = ReLU(Σ_v [h^L ‖ s^L] W_j W_p)                                    `TwoChannels.embed`
    logits = z W_c                                                        `TwoChannels.head`
    min  CE over the client's training graphs                             `LocalTraining.objective`
    θ^s ← Σ_k (n_k / Σ n) θ_k^s                                           `run`

The model is the method's own: from "gin-3x64" it takes the number of layers and the width. Degrees
0 and 1 share the first column, and all degrees from 16 on the last, as in the authors' code. A walk
from a node without neighbours never returns.

Departures: a LayerNorm inside GIN's MLP, as everywhere in this package. Edges are followed in the
direction of messages, and self-loops are not steps.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.core.message import Message
from fedloom.core.phase import averaged, phase
from fedloom.core.server import Server
from fedloom.core.settings import setting
from fedloom.data.graph import Graph
from fedloom.data.seeds import stream_seed
from fedloom.errors import ConfigError
from fedloom.methods._shared.local_training import LocalTraining
from fedloom.methods._shared.structure import degree_features
from fedloom.nn.build import parse_spec
from fedloom.nn.layers import Convolution, Dense, SumNeighbour, dropout
from fedloom.nn.model import Spec
from fedloom.nn.training import make_optimizer
from fedloom.nn.weights import load_weights, weights

WALKERS = 64  # columns of a product: walks that start at once in each graph


def return_probabilities(graph: Graph, steps: int) -> Tensor:
    """Returns diag((D^-1 A)^k) for k = 1 ... steps, [nodes, steps], for a union of small graphs.

    Walks stay in their graph, so column p of a product can start from the p-th node of every graph
    at once. The union of graphs with n nodes each takes n columns. Graphs that are finished are
    left out.
    """
    batch = graph.batch
    assert batch is not None, "return probabilities are for graph tasks"
    size = torch.bincount(batch, minlength=graph.num_items)
    place = torch.arange(graph.num_nodes) - (size.cumsum(0) - size)[batch]
    out = torch.zeros(graph.num_nodes, steps)
    for first in range(0, int(size.max()), WALKERS):
        larger = size > first
        nodes = larger[batch].nonzero().flatten()
        step_of = graph.select_items(larger).adjacency("mean")
        column = place[nodes] - first
        start = ((column >= 0) & (column < WALKERS)).nonzero().flatten()
        column = column[start]
        at = torch.zeros(len(nodes), WALKERS)
        at[start, column] = 1
        for k in range(steps):
            at = step_of @ at
            out[nodes[start], k] = at[start, column]
    return out


def structure_of(graph: Graph, steps: int, degrees: int) -> Tensor:
    """Returns s [nodes, steps + degrees], cached on the graph."""

    def make() -> Tensor:
        degree = graph.adjacency("sum").offsets.diff()
        one_hot = degree_features((degree - 1).clamp(min=0), degrees)
        return torch.cat([return_probabilities(graph, steps), one_hot], 1)

    return graph.cached(("structure", steps, degrees), make)


class TwoChannels(nn.Module):
    """The model. `structure` is the shared channel; everything else is private.

    As with other models, dropout is applied only if `rng` is given.
    """

    def __init__(self, spec: Spec, facts: Facts, steps: int, degrees: int, seed: int):
        super().__init__()
        p, self.steps, self.degrees, self.dropout = spec.width, steps, degrees, facts.dropout
        self.structure = nn.ModuleList(
            [Dense(steps + degrees, p), *(Convolution(p, p) for _ in range(spec.layers))]
        )
        self.features = nn.ModuleList(
            [Dense(facts.num_features, p), *(SumNeighbour(2 * p, p) for _ in range(spec.layers))]
        )
        self.join, self.post = Dense(2 * p, p), Dense(p, p)
        self.classifier = Dense(p, facts.num_classes)
        rng = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.xavier_uniform_(parameter, generator=rng)

    def nodes(self, graph: Graph, rng: torch.Generator | None) -> Tensor:
        """Returns both channels, concatenated, [nodes, 2p]."""
        s = self.structure[0](structure_of(graph, self.steps, self.degrees).matmul, graph)
        h = self.features[0](graph.project, graph)
        for of_structure, of_features in zip(self.structure[1:], self.features[1:], strict=True):
            h = dropout(F.relu(of_features(torch.cat([h, s], 1).matmul, graph)), self.dropout, rng)
            s = torch.tanh(of_structure(s.matmul, graph))
        return torch.cat([h, s], 1)

    def embed(self, graph: Graph, rng: torch.Generator | None = None) -> Tensor:
        """Returns embeddings [items, p] of a graph's items: sums over their nodes."""
        joined = self.join(self.nodes(graph, rng).matmul, graph)
        sums = joined.new_zeros(graph.num_items, joined.shape[1]).index_add(0, graph.batch, joined)
        return F.relu(self.post(sums.matmul, graph))

    def head(self, z: Tensor, graph: Graph, rng: torch.Generator | None = None) -> Tensor:
        """Returns logits [items, classes] from embeddings [items, p]."""
        return self.classifier(dropout(z, self.dropout, rng).matmul, graph)

    def forward(self, graph: Graph, rng: torch.Generator | None = None) -> Tensor:
        """Returns logits [items, classes] of a graph's items."""
        return self.head(self.embed(graph, rng), graph, rng)


@dataclass(frozen=True)
class FedStar(LocalTraining):
    """FedAvg of a structure channel, with a private feature channel."""

    walk: int = setting(16, "steps of the random walk whose return is measured", at_least=1)
    degrees: int = setting(16, "columns of the one-hot degree", at_least=1)

    tasks: ClassVar[tuple[str, ...]] = ("graph",)
    one_model: ClassVar[bool] = True

    def build(self, facts: Facts, *stream: object) -> TwoChannels:
        """Returns a fresh model with the depth and width of the run's spec.

        stream: the names of the random stream of its weights.
        """
        (text,) = set(facts.models)
        spec = parse_spec(text)
        if spec.options - {"linear"} or len(spec.widths) > 1:
            raise ConfigError(
                f"model {text!r}: fedstar's model takes layers and one width, "
                f"e.g. 'gin-{spec.layers}x{spec.width}'"
            )
        return TwoChannels(
            spec, facts, self.walk, self.degrees, stream_seed(facts.seed, "model", *stream)
        )

    @phase()
    def setup(self, client: Client) -> Message:
        """Builds the client's own model and its optimiser."""
        client.state["model"] = model = self.build(client.facts, client.name, "init")
        client.state["optimizer"] = make_optimizer(
            self.optimizer, model.parameters(), self.lr, self.weight_decay
        )
        return {}

    @averaged(by="size")
    @phase(model="~model")
    def train(self, client: Client, model: Message) -> Message:
        """Trains both channels for E local epochs from the mean structure channel."""
        local_model = client.state["model"]
        load_weights(local_model.structure, model)
        self.descend(client, local_model, model)
        return {"model": weights(local_model.structure)}

    def load_predictor(self, client: Client, kept: Message) -> None:
        """Loads both channels."""
        client.state["model"] = model = self.build(client.facts, client.name, "init")
        load_weights(model, kept)

    def run(self, server: Server) -> None:
        """Rounds of local training and averaging."""
        state = server.state
        state["structure"] = weights(self.build(server.facts, "server").structure)
        server.ask(self.setup)
        for _ in server.rounds(self.rounds):
            state["structure"] = server.mean(self.train, model=state["structure"])["model"]
            server.evaluate()
