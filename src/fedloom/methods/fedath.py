"""FedATH: each client learns which of its edges help; the model that uses those edges is averaged.

Fu et al.: "Less is More: Federated Graph Learning with Alleviating Topology Heterogeneity from A
Causal Perspective", ICML 2025. A second, biased model uses the remaining edges.

What travels: as in FedAvg, the causal model. The edge evaluator and the biased model never leave
the client.

    g_e = MLP [h_i ‖ h_j] of every edge e = (i → j), h = a GCN of the         `Evaluator`
          graph, C columns
    causal graph: edge e has weight σ(g_e)                                    `EdgeWeighted`
    biased graph: edge e has weight 1 − σ(g_e), where g is a constant         `losses`
    F, F_b = class probabilities of the causal model on the causal graph,     `losses`
             and of the biased model on the biased graph
    HSIC(F, F_b) = tr(K H K_b H) / n² = ‖Fᵀ H F_b‖² / n²                      `hsic`
                   K = F Fᵀ, K_b = F_b F_bᵀ, H = I − 1 1ᵀ / n
    causal model and evaluator:  min CE + λ HSIC(F, F_b)                      `losses`
    biased model:  min λ HSIC(F, F_b) − mean entropy of F_b's rows            `losses`, `entropy`
    θ ← Σ_k (n_k / Σ n) θ_k, of the causal models                             `FedAvg.run`

Weights are applied before the adjacency is normalised. Self-loops have weight 1 in both graphs. The
two directions of an edge have separate scores. The kernels are linear, so n × n matrices are never
built: HSIC needs one of C × C. A client predicts on its causal graph, also with the global θ. Both
losses of a step use the models as they are before it, and neither reaches the other's weights.
`finetune` minimises CE alone. For a graph without edges, both graphs hold its self-loops. A client
without labelled nodes trains nothing. Models that ignore edge weights (gat, mlp) are refused:
nothing would train the evaluator.

Departures. Only the paper's abstract and the authors' code were available; λ is the code's. The
code compares logits (`compare`) and divides by n, not n² (`per`; its biased model's loss is n times
ours, which Adam hardly notices, but its CE stands next to n times our HSIC). So the code depends on
how large features and graphs are: on Photo, 10 clients, 30 rounds, it ends with one class for all
nodes (best validation accuracy 0.59, here 0.91, FedAvg 0.90). On Cora all three have 0.84 (one seed
each). Their h starts with one more linear map, which a convolution's weights already include, and
has the model's width. BatchNorm in the MLP uses the moments of the graph's own edges, at test time
too, as there; so it has no state. Their dropout stays on at test time; here it does not. Their
learning rate is 1e-3, for models 512 wide.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Generator, Tensor, nn

from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.core.message import Message
from fedloom.core.phase import averaged, phase, runs_once
from fedloom.core.settings import setting
from fedloom.data.graph import Graph
from fedloom.errors import ConfigError
from fedloom.methods.fedavg import FedAvg
from fedloom.nn.architectures import ARCHITECTURES
from fedloom.nn.build import parse_spec
from fedloom.nn.edge_weights import EdgeEvaluator, EdgeWeighted
from fedloom.nn.losses import entropy, hsic, probabilities
from fedloom.nn.model import Model
from fedloom.nn.training import make_optimizer, seeded, step
from fedloom.nn.weights import load_weights, weights

UNWEIGHTED = ("gat", "mlp")  # models that ignore edge weights


@dataclass(frozen=True)
class FedATH(FedAvg):
    """FedAvg of models that use the causal edges."""

    independence: float = setting(
        7.0,
        "λ, weight of the dependence (HSIC) between the causal and the biased model",
        at_least=0,
        tune="0.1..10",
    )
    compare: str = setting(
        "probabilities", "outputs that HSIC compares", choices=("probabilities", "logits")
    )
    per: str = setting(
        "pairs",
        "next to CE, HSIC is divided by the number of pairs of nodes, or by the number of nodes",
        choices=("pairs", "nodes"),
    )

    tasks: ClassVar[tuple[str, ...]] = ("node",)
    needs_of_model: ClassVar[str] = "architecture"

    def check(self, facts: Facts) -> None:
        """Raises a ConfigError if a model ignores edge weights."""
        for spec in sorted(set(facts.models)):
            if (name := parse_spec(spec).name) in UNWEIGHTED:
                valid = ", ".join(sorted(ARCHITECTURES.keys() - set(UNWEIGHTED)))
                raise ConfigError(
                    f"model {spec!r}: fedath learns edge weights, which {name} ignores; "
                    f"valid: {valid}"
                )

    @runs_once
    @phase()
    def setup(self, client: Client) -> Message:
        """Builds the causal model with its evaluator, the biased model, and an optimiser for each.

        Both optimisers keep their moments over rounds.
        """
        state = client.state
        state |= {"model": Causal(client), "biased": client.build("biased")}
        for name, model in (("optimizer", "model"), ("biased optimizer", "biased")):
            state[name] = make_optimizer(
                self.optimizer, state[model].parameters(), self.lr, self.weight_decay
            )
        return {}

    @averaged(by="size")
    @phase(model="~model")
    def train(self, client: Client, model: Message) -> Message:
        """Trains all three networks for E local epochs, the causal one from the global weights."""
        local_model = client.state["model"]
        load_weights(local_model.sees, model)
        self.descend(client, local_model)
        return {"model": weights(local_model.sees)}

    def descend(self, client: Client, model: nn.Module, received: Message | None = None) -> None:
        """Trains for E local epochs."""
        for _ in range(self.epochs):
            for batch in client.shuffled(self.batch_size):
                of_causal, of_biased = self.losses(client, batch)
                step(client.state["optimizer"], of_causal)
                step(client.state["biased optimizer"], of_biased)

    def losses(self, client: Client, batch: Graph) -> tuple[Tensor, Tensor]:
        """Returns the loss of the causal model and its evaluator, and that of the biased model."""
        model, rng = client.state["model"], client.rng("dropout")
        score = model.evaluator(batch, rng)
        causal = model.sees(EdgeWeighted(batch, score.sigmoid()), rng)
        biased_graph = EdgeWeighted(batch, (-score).sigmoid().detach())
        biased = client.state["biased"](biased_graph, client.rng("biased dropout"))
        F_c, F_b = causal, biased
        if self.compare == "probabilities":
            F_c, F_b = probabilities(causal), probabilities(biased)
        weight = self.independence * (batch.num_nodes if self.per == "nodes" else 1)
        of_causal = client.loss(causal, batch) + weight * hsic(F_c, F_b.detach())
        return of_causal, self.independence * hsic(F_c.detach(), F_b) - entropy(biased)

    @runs_once
    @phase()
    def tune(self, client: Client, epoch: Tensor, model: Message | None = None) -> Message:
        """As in FedAvg, on the causal graph. The evaluator continues to learn."""
        if model is not None:
            load_weights(client.state["model"].sees, model)
        return super().tune(client, epoch)

    def predict(self, client: Client, model: Message | None) -> Tensor:
        """Returns logits on the causal graph, of the client's own model or of θ."""
        return super().predict(client, None if model is None else self.shared_predictor(model))

    def shared_predictor(self, model: Message) -> Message:
        """Returns θ under its names in the client's model."""
        return {f"sees.{name}": tensor for name, tensor in model.items()}

    def load_predictor(self, client: Client, kept: Message) -> None:
        """Loads θ and the edge evaluator. The server's θ has no evaluator and is refused."""
        client.state["model"] = model = Causal(client)
        load_weights(model, kept)


# ---- networks ----
class Causal(nn.Module):
    """A client's model, and the evaluator that weights its causal graph.

    Checkpoints name the model's parameters "sees...".
    """

    def __init__(self, client: Client):
        super().__init__()
        self.sees: Model = client.build()
        self.evaluator = Evaluator(client)

    def forward(self, graph: Graph, rng: Generator | None = None) -> Tensor:
        """Returns the logits [nodes, C] of a graph's nodes."""
        return self.sees(EdgeWeighted(graph, self.evaluator(graph, rng).sigmoid()), rng)


class Evaluator(EdgeEvaluator):
    """Scores edges; from the client's own random streams."""

    def __init__(self, client: Client):
        facts = client.facts
        gcn = facts.build(f"gcn-2x{facts.width}", client.name, "evaluator")
        # This bias is a constant, which the first norm removes.
        gcn.classifier.bias.requires_grad_(False)
        with seeded(client.rng("evaluator")):
            super().__init__(gcn, facts.num_classes)
