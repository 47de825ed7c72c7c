"""LG-FedAvg: clients share the head and keep their extractors private, of any architecture.

Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency: "Think Locally, Act Globally:
Federated Learning with Local and Global Representations", 2020, Algorithm 1.

What travels, per client (C classes, p the embedding's width):
    once     up    size      number of local items n_k
    a round  down  head      θ^g, the mean head                     pC + C numbers, if it is linear
             up    head      θ_k^g, the head after E local epochs   pC + C numbers

    θ_k^l, θ_k^g ← E gradient steps from θ_k^l and θ^g on CE over   `train`,
                   the client's training items                      `LocalTraining.objective`
    θ^g ← Σ_k (n_k / Σ n) θ_k^g                                     `run`

The extractor θ_k^l never travels. Heads must agree in kind and shape. They do if all models are the
same, and for any architectures of one width with +linear. In a graph task every head is linear. The
server needs only means. A single client trains as in Local, except for its initial head.

Departures. The paper's clients may add losses of their own on the representation (self-supervised,
adversarial); here they have the task's loss only. The authors' code starts from a model that FedAvg
has trained before; here both parts start untrained, as in the benchmarks that compare with it. It
weights clients equally; here they are weighted by n_k, as everywhere in this package. For a new
client the paper predicts with an ensemble of all clients' models; here there are no new clients.
"""

from dataclasses import dataclass
from typing import ClassVar

from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.core.message import Message, schema_of
from fedloom.core.phase import averaged, phase
from fedloom.core.server import Server
from fedloom.errors import ConfigError
from fedloom.methods._shared.local_training import LocalTraining
from fedloom.nn.weights import load_weights, weights


@dataclass(frozen=True)
class LGFedAvg(LocalTraining):
    """Local training under a common head."""

    needs_of_model: ClassVar[str] = "embeddings"

    def check(self, facts: Facts) -> None:
        """Raises a ConfigError if the models' heads differ in kind or shape."""
        first_head(facts)

    @averaged(by="size")
    @phase(head="~head")
    def train(self, client: Client, head: Message) -> Message:
        """Trains for E local epochs from the client's own extractor and the mean head."""
        model = client.state["model"]
        load_weights(model.classifier, head)
        self.descend(client, model)
        return {"head": weights(model.classifier)}

    def run(self, server: Server) -> None:
        """Algorithm 1."""
        server.ask(self.setup)
        state = server.state
        state["head"] = first_head(server.facts)
        for _ in server.rounds(self.rounds):
            state["head"] = server.mean(self.train, head=state["head"])["head"]
            server.evaluate()


def first_head(facts: Facts) -> Message:
    """Returns an untrained head that fits every client's model, or raises a ConfigError."""
    heads = {spec: facts.build(spec, "server").classifier for spec in sorted(set(facts.models))}
    if len({(type(head), schema_of(dict(weights(head)))) for head in heads.values()}) > 1:
        raise ConfigError(
            f"model: lg-fedavg averages heads, and those of {', '.join(heads)} differ in kind "
            "or shape; give all models the same width and '+linear', "
            "e.g. 'gcn-2x64+linear,gat-2x64+linear'"
        )
    return weights(next(iter(heads.values())))
