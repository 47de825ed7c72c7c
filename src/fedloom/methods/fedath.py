"""FedATH: every client learns which of its edges help to predict; the model that sees those is averaged, another one sees the rest.

Fu et al.: "Less is More: Federated Graph Learning with Alleviating Topology Heterogeneity from A Causal Perspective", ICML 2025.

What travels: as in FedAvg, the causal model. The edge evaluator and the biased model never leave the client.

    g_e = MLP [h_i ‖ h_j] of every edge e = (i → j), h = a GCN of the graph, C columns                    `Evaluator`
    causal graph: edge e has weight σ(g_e);   biased graph: 1 − σ(g_e), in which g is no variable         `Weighed`, `losses`
    F, F_b = class probabilities: of the causal model on the causal graph, of the biased one on the other
    HSIC(F, F_b) = tr(K H K_b H) / n² = ‖Fᵀ H F_b‖² / n²,  K = F Fᵀ, K_b = F_b F_bᵀ, H = I − 1 1ᵀ / n     `hsic`
    causal model and evaluator:  min CE + λ HSIC(F, F_b)                                                  `losses`
    biased model:                min λ HSIC(F, F_b) − mean entropy of F_b's rows                          `losses`, `entropy`
    θ ← Σ_k (n_k / Σ n) θ_k, of the causal models                                                         FedAvg's `run`

Weights are taken before the adjacency is normalised; self-loops count 1 in both graphs. An edge's two directions have a score each. The
kernels are linear, so that n × n matrices are never made: HSIC takes one of C × C. A client predicts on its causal graph, also with the
global θ. Both of a step's losses look at the models as they are before it, and none reaches the other's weights. `finetune` is on CE alone.
A graph without edges is its self-loops twice. A client without labelled nodes trains nothing. Models that look at no edge weights (gat,
mlp) are refused: nothing would teach the evaluator.

Departures. The paper was at hand as its abstract and the authors' code, whose λ this is. The code compares logits (`compare`) and divides
by n, not n² (`per`; its biased model's loss is n times ours, which Adam hardly sees, but its CE stands beside n times our HSIC). So it
hangs on how large features and graphs are: on Photo, 10 clients, 30 rounds, it ends with one class for all nodes (best validation accuracy
0.59, here 0.91, FedAvg 0.90); on Cora all three have 0.84 (one seed each). Their h begins with one more linear map, which a
convolution's weights hold already, and has the model's width. BatchNorm in the MLP is by the moments of the graph's own edges, in tests
too, as there; so it keeps no state. Dropout, which stays on in their tests, does not here. Their lr is 1e-3, of models 512 wide.
"""

from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.core.message import Message
from fedloom.core.phase import averaged, phase
from fedloom.core.settings import setting
from fedloom.data.graph import WITH_LOOPS, Graph, scaled
from fedloom.data.sparse import weighted
from fedloom.errors import ConfigError
from fedloom.methods.fedavg import FedAvg
from fedloom.nn.architectures import ARCHITECTURES
from fedloom.nn.augment import Entries, entries
from fedloom.nn.build import parse_spec
from fedloom.nn.model import Model
from fedloom.nn.training import make_optimizer, seeded, step
from fedloom.nn.weights import load_weights, weights

BLIND = ("gat", "mlp")  # models that look at no edge weights


@dataclass(frozen=True)
class FedATH(FedAvg):
    """FedAvg of models that see the edges worth seeing."""

    independence: float = setting(
        7.0,
        "λ, weight of the dependence (HSIC) between what the causal and the biased model say",
        at_least=0,
        tune="0.1..10",
    )
    compare: str = setting(
        "probabilities", "what the dependence is of", choices=("probabilities", "logits")
    )
    per: str = setting(
        "pairs",
        "HSIC beside CE is divided by the number of pairs of nodes, or of nodes",
        choices=("pairs", "nodes"),
    )

    tasks: ClassVar[tuple[str, ...]] = ("node",)

    def check(self, facts: Facts) -> None:
        """The model must heed edge weights."""
        for spec in sorted(set(facts.models)):
            if (name := parse_spec(spec).name) in BLIND:
                valid = ", ".join(sorted(ARCHITECTURES.keys() - set(BLIND)))
                raise ConfigError(
                    f"model {spec!r}: fedath learns edge weights, at which {name} does not look; valid: {valid}"
                )

    @phase()
    def setup(self, client: Client) -> Message:
        """The causal model with its evaluator, the biased one, and an optimiser for each that keeps its moments over rounds."""
        state = client.state
        state |= {"model": Causal(client), "biased": client.build("biased")}
        for optimizer, model in (
            ("optimizer", state["model"]),
            ("biased optimizer", state["biased"]),
        ):
            state[optimizer] = make_optimizer(
                self.optimizer, model.parameters(), self.lr, self.weight_decay
            )
        return {}

    @averaged(by="size")
    @phase(model="~model")
    def train(self, client: Client, model: Message) -> Message:
        """E local epochs of all three networks, the causal one from the global weights."""
        local_model = client.state["model"]
        load_weights(local_model.sees, model)
        self.descend(client, local_model)
        return {"model": weights(local_model.sees)}

    def descend(
        self, client: Client, model: nn.Module, global_weights: Message | None = None
    ) -> None:
        """E local epochs."""
        for _ in range(self.epochs):
            for batch in client.shuffled(self.batch_size):
                of_causal, of_biased = self.losses(client, batch)
                step(client.state["optimizer"], of_causal)
                step(client.state["biased optimizer"], of_biased)

    def losses(self, client: Client, batch: Graph) -> tuple[Tensor, Tensor]:
        """What the causal model and the evaluator minimise, and what the biased model does."""
        model, rng = client.state["model"], client.rng("dropout")
        score = model.evaluator(batch, rng)
        causal = model.sees(weighed(batch, score.sigmoid()), rng)
        biased = client.state["biased"](
            weighed(batch, (-score).sigmoid().detach()), client.rng("biased dropout")
        )
        F_c, F_b = (
            (causal, biased) if self.compare == "logits" else (causal.softmax(1), biased.softmax(1))
        )
        weight = self.independence * (batch.num_nodes if self.per == "nodes" else 1)
        of_causal = client.loss(causal, batch) + weight * hsic(F_c, F_b.detach())
        return of_causal, self.independence * hsic(F_c.detach(), F_b) - entropy(biased)

    @phase()
    def tune(self, client: Client, model: Message | None = None) -> Message:
        """As in FedAvg, on the causal graph; the evaluator learns on."""
        if model is not None:
            load_weights(client.state["model"].sees, model)
        return super().tune(client)

    def predict(self, client: Client, model: Message | None) -> Tensor:
        """Logits on the causal graph, of the client's own model or of θ."""
        return super().predict(
            client,
            None if model is None else {f"sees.{name}": tensor for name, tensor in model.items()},
        )


def hsic(F_c: Tensor, F_b: Tensor) -> Tensor:
    """HSIC of two [nodes, C] under linear kernels; it is enough to centre one of them."""
    return (F_c.T @ (F_b - F_b.mean(0)) / len(F_c)).square().sum()


def entropy(logits: Tensor) -> Tensor:
    """Of the predictions, mean over nodes."""
    log_p = logits.log_softmax(1)
    return -(log_p.exp() * log_p).sum(1).mean()


# ---- which edges count how much ----
@dataclass(frozen=True, eq=False)
class Weighed(Graph):
    """A graph of which every edge has a weight of its own; products with its adjacency carry a gradient to the weights."""

    score: Tensor = None  # type: ignore[assignment]  # one for each entry of adjacency("sum"), in its order
    transient: ClassVar[bool] = True
    _values: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)

    def propagate(self, h: Tensor, kind: str = "sym") -> Tensor:
        """The weighted adjacency times h, differentiable in both."""
        if kind not in self._values:
            self._values[kind] = self._normalised(kind)
        return weighted(self.adjacency(kind), self._values[kind], h)

    def _normalised(self, kind: str) -> Tensor:
        """The entries of adjacency(kind) as they are with these weights."""
        edges = entries(self)
        source, target, proper = edges.source, edges.target, ~edges.loop
        weight = edges.weight.index_put((proper,), edges.weight[proper] * self.score)
        if kind not in WITH_LOOPS:
            source, target, weight = source[proper], target[proper], weight[proper]
        degree = torch.zeros(self.num_nodes).index_add(0, target, weight)
        return scaled(kind, source, target, weight, degree)


def weighed(graph: Graph, score: Tensor) -> Weighed:
    """The graph with weights for its edges, in the order of adjacency("sum"); those that the data have are multiplied."""
    own = {f.name: getattr(graph, f.name) for f in fields(Graph) if f.init}
    result = Weighed(**own, score=score)
    object.__setattr__(
        result, "_cache", graph._cache
    )  # what is known of features and of where the edges are still holds
    return result


class Causal(nn.Module):
    """A client's model, and the evaluator whose causal graph it sees."""

    def __init__(self, client: Client):
        super().__init__()
        self.sees: Model = client.build()
        self.evaluator = Evaluator(client)

    def forward(self, graph: Graph, rng: Generator | None = None) -> Tensor:
        """Takes a graph, gives its nodes' logits [nodes, C]."""
        return self.sees(weighed(graph, self.evaluator(graph, rng).sigmoid()), rng)


class Evaluator(nn.Module):
    """Scores edges: a GCN, then an MLP of both ends' rows, 2C → C → C/2 → 1."""

    def __init__(self, client: Client):
        super().__init__()
        facts = client.facts
        C = facts.num_classes
        widths = (C, max(C // 2, 1))
        self.gcn = facts.build(f"gcn-2x{facts.width}", client.name, "evaluator")
        self.gcn.classifier.bias.requires_grad_(
            False
        )  # a constant, which the first norm takes away
        with seeded(client.rng("evaluator")):
            self.source, self.target = (nn.Linear(C, C, bias=False) for _ in range(2))
            self.hidden = nn.ModuleList(nn.Linear(*sizes, bias=False) for sizes in pairwise(widths))
            self.norms = nn.ModuleList(map(OverEdges, widths))
            self.out = nn.Linear(widths[-1], 1)

    def forward(self, graph: Graph, rng: Generator | None = None) -> Tensor:
        """Takes a graph, gives g [edges], in the order of adjacency("sum")."""
        source, target = graph.cached("proper edges", lambda: ends(entries(graph)))
        h = self.gcn(graph, rng)
        # A linear map of [h_i ‖ h_j] is the sum of two, which nodes are fewer to make of.
        g = self.source(h).index_select(0, source) + self.target(h).index_select(0, target)
        first, *norms = self.norms
        g = F.relu(first(g))
        for layer, norm in zip(self.hidden, norms, strict=True):
            g = F.relu(norm(layer(g)))
        return self.out(g).squeeze(1)


def ends(edges: Entries) -> tuple[Tensor, Tensor]:
    """Sources and targets of the edges that are no self-loops."""
    return edges.source[~edges.loop], edges.target[~edges.loop]


class OverEdges(nn.Module):
    """Every column at mean 0 and variance 1 over the edges of the graph at hand, then a scale and a shift that are learnt."""

    def __init__(self, width: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, g: Tensor) -> Tensor:
        """Takes and gives [edges, width]."""
        if not len(g):
            return g
        variance, mean = torch.var_mean(g, 0, correction=0)
        return (g - mean) * (variance + 1e-5).rsqrt() * self.weight + self.bias
