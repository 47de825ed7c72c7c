"""FedGen: the server trains a generator of embeddings, and clients also train their heads on those.

Zhu, Hong, Zhou: "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", ICML 2021,
Algorithm 1 in its form that shares the head only ("flexible parameter sharing"), so that extractors
may differ.

What travels, per client:
    once     up    size            number of local items n_k
    a round  down  weight, bias    θ^p, the mean head                          pC + C numbers
                   generator       w, the generator's weights, from the        |w| numbers
                                   second round on
                   prior           p̂(y), from the second round on              C numbers
             up    weight, bias    θ_k^p, the head after E local epochs        pC + C numbers
                   counts          c_k, training items of each class           C numbers

    G_w: (noise ε, class y) ↦ z, an embedding                              `Generator`
    min_w  E_{y ~ p̂, z ~ G_w(y)} CE(D(z, y), y) + η L_div                  `generator_loss`
    D(z, y) = Σ_k (c_k[y] / Σ c[y]) h(z; θ_k^p)                            `Ensemble`
    L_div = exp(−mean_ij  mean|z_i − z_j| · mean (ε_i − ε_j)²)             `diversity`
    min_θ  CE on the client's training items                               `objective`
           + α E_{y ~ p̂, z ~ G_w(y)} CE(h(z; θ_k^p), y)
    p̂(y) = Σ_k c_k[y] / Σ c,   θ^p ← Σ_k (n_k / Σ n) θ_k^p                 `run`

Generated embeddings pass the head without dropout. A class that no client of the round has is never
generated. The first round is plain training: there is no generator yet. The generator and its
optimiser stay at the server and continue from round to round. The server learns every client's head
and label counts: sums would not be enough.

Heads must be linear maps of one shape: any architecture with +linear, and all architectures in a
graph task.

Departures. The paper's generator uses the unweighted mean of the clients' logits; here label counts
weight them, as in the authors' code (which averages losses, not logits). L_div is the code's. The
code's second term for clients, a KL between predictions on real items and on generated ones of the
same class, is not in the paper's objective and is left out. So is the decay of α. The noise is
normal, as in the text. There is no BatchNorm in the generator (decision 2). Heads are averaged by
n_k as in all methods of this package; the paper weights them equally.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.core.message import Message
from fedloom.core.phase import phase, runs_once
from fedloom.core.server import Server
from fedloom.core.settings import setting
from fedloom.data.graph import Graph
from fedloom.errors import ConfigError
from fedloom.methods._shared.generator_gradient import generator_gradient
from fedloom.methods._shared.local_training import LocalTraining
from fedloom.nn.model import Model, generated_loss
from fedloom.nn.training import make_optimizer, seeded
from fedloom.nn.weights import load_weights, weights


class Generator(nn.Module):
    """[ε ‖ one-hot y] ↦ z: a hidden layer with ReLU, then a linear one."""

    def __init__(self, noise: int, classes: int, hidden: int, width: int):
        super().__init__()
        self.classes = classes
        self.hidden, self.out = nn.Linear(noise + classes, hidden), nn.Linear(hidden, width)

    def inputs(self, noise: Tensor, y: Tensor) -> Tensor:
        """Returns [ε ‖ one-hot y]."""
        return torch.cat([noise, F.one_hot(y, self.classes)], 1)

    def forward(self, noise: Tensor, y: Tensor) -> Tensor:
        """Takes ε [m, noise] and classes [m], returns z [m, width]."""
        return self.out(F.relu(self.hidden(self.inputs(noise, y))))


class Ensemble:
    """The clients' heads as one head per class, weighted by how many items of the class they have.

    Linear heads average to a linear head.
    """

    def __init__(self, heads: Iterable[Message], counts: Tensor):
        share = counts / counts.sum(0).clamp(min=1)  # [clients, classes]
        heads = list(heads)
        self.weight = torch.einsum(
            "ky,kpc->ypc", share, torch.stack([head["weight"] for head in heads])
        )
        self.bias = torch.einsum("ky,kc->yc", share, torch.stack([head["bias"] for head in heads]))

    def heads(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the weights [m, p, C] and biases [m, C] of the heads of some classes [m]."""
        return self.weight[y], self.bias[y]

    def __call__(self, z: Tensor, y: Tensor) -> Tensor:
        """Returns logits [m, C] of embeddings that were generated for classes y."""
        weight, bias = self.heads(y)
        return torch.einsum("mp,mpc->mc", z, weight) + bias


def apart(noise: Tensor) -> Tensor:
    """Returns mean (ε_i − ε_j)² of all pairs, [m, m]."""
    return (noise.unsqueeze(0) - noise.unsqueeze(1)).square().mean(2)


def diversity(noise: Tensor, z: Tensor) -> Tensor:
    """Returns L_div. It is small if different noise gives different embeddings."""
    return torch.exp(-((z.unsqueeze(0) - z.unsqueeze(1)).abs().mean(2) * apart(noise)).mean())


def require_linear_heads(facts: Facts) -> None:
    """Raises a ConfigError if a model's head needs a graph: a generated embedding has none."""
    for spec in sorted(set(facts.models)):
        if not facts.build(spec, "server").linear:
            raise ConfigError(
                f"model {spec!r}: its head works on the graph, fedgen's must work on embeddings "
                f"alone; use '{spec}+linear'"
            )


@dataclass(frozen=True)
class FedGen(LocalTraining):
    """Local training with a shared head that also learns from generated embeddings."""

    alpha: float = setting(
        1.0, "α, weight of the generated embeddings in a client's loss", at_least=0, tune="0.1..10"
    )
    imagined: int = setting(
        32, "generated embeddings per step, at a client and at the server", at_least=2
    )
    noise: int = setting(32, "width of the noise ε", at_least=1)
    hidden: int = setting(512, "width of the generator's hidden layer", at_least=1)
    generator_steps: int = setting(100, "steps of the generator per round", at_least=1)
    generator_lr: float = setting(5e-3, "the generator's learning rate", above=0, tune="1e-4..0.01")
    diversity: float = setting(1.0, "η, weight of the diversity term", at_least=0, tune="0.1..10")

    discloses_to_peers: ClassVar[str] = (
        "the label distribution of all clients of a round; with two clients, each other's"
    )
    needs_of_model: ClassVar[str] = "architecture"  # the server builds its linear heads

    # ---- at a client ----
    @runs_once
    @phase()
    def setup(self, client: Client) -> Message:
        """As in Local, plus a generator that later holds the downloaded weights."""
        client.memory["generator"] = self.make_generator(client.facts, client.rng("generator"))
        return super().setup(client)

    @phase(weight="float32[p,C]", bias="float32[C]", counts="int64[C] counts train")
    def train(
        self,
        client: Client,
        weight: Tensor,
        bias: Tensor,
        generator: Message | None = None,
        prior: Tensor | None = None,
    ) -> Message:
        """Trains for E local epochs from the mean head."""
        model, graph = client.state["model"], client.graph
        load_weights(model.classifier, {"weight": weight, "bias": bias})
        received = None if generator is None else {"generator": generator, "prior": prior}
        self.descend(client, model, received)
        counts = torch.bincount(graph.y[graph.train], minlength=client.facts.num_classes)
        return {**weights(model.classifier), "counts": counts}

    def objective(self, client: Client, batch: Graph, model: Model, received: Message) -> Tensor:
        """Returns CE on real items, plus CE on generated ones from the second round on.

        received: w under `generator` and p̂ under `prior`.
        """
        loss = super().objective(client, batch, model, received)
        if not received:
            return loss
        noise, y = self.draw(received["prior"], client.rng("imagined"))
        generator = client.memory["generator"], received["generator"]
        return loss + self.alpha * generated_loss(model, batch, *generator, noise, y)

    # ---- at the server ----
    def make_generator(self, facts: Facts, rng: torch.Generator) -> Generator:
        """Returns a new G."""
        with seeded(rng):
            return Generator(self.noise, facts.num_classes, self.hidden, facts.width)

    def draw(self, prior: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Returns ε ~ N(0, 1) and y ~ p̂ for one step."""
        y = torch.multinomial(prior, self.imagined, replacement=True, generator=rng)
        return torch.randn(self.imagined, self.noise, generator=rng), y

    def generator_loss(
        self, generator: Generator, ensemble: Ensemble, noise: Tensor, y: Tensor
    ) -> Tensor:
        """Returns the loss that a step of the generator minimises."""
        z = generator(noise, y)
        return F.cross_entropy(ensemble(z, y), y) + self.diversity * diversity(noise, z)

    def set_gradient(
        self, generator: Generator, ensemble: Ensemble, noise: Tensor, y: Tensor
    ) -> None:
        """Sets the gradient of `generator_loss` at the generator's weights."""
        hidden, out = generator.hidden, generator.out
        layers = hidden.weight, hidden.bias, out.weight, out.bias
        inputs, heads = generator.inputs(noise, y), ensemble.heads(y)
        gradient = generator_gradient(layers, inputs, heads, y, apart(noise), self.diversity)
        for parameter, of_parameter in zip(layers, gradient, strict=True):
            parameter.grad = of_parameter

    def run(self, server: Server) -> None:
        """Algorithm 1."""
        require_linear_heads(server.facts)
        server.ask(self.setup)
        state, facts = server.state, server.facts
        state["head"] = weights(facts.build(facts.models[0], "server").classifier)
        state["generator"] = generator = self.make_generator(facts, server.rng("generator"))
        state["optimizer"] = optimizer = make_optimizer(
            "adam", generator.parameters(), self.generator_lr, 0.0
        )
        for _ in server.rounds(self.rounds):
            distilled: Message = {}
            if "prior" in state:
                distilled = {"generator": weights(generator), "prior": state["prior"]}
            size = server.weights("size", server.participants)
            replies = server.ask(self.train, clients=list(size), **state["head"], **distilled)
            mean, counts = replies.mean(size), replies.stack("counts")
            if counts.any():  # else there is no class to generate
                state["prior"] = counts.sum(0) / counts.sum()
                ensemble = Ensemble(replies.values(), counts)
                for _ in range(self.generator_steps):
                    noise, y = self.draw(state["prior"], server.rng("imagined"))
                    self.set_gradient(generator, ensemble, noise, y)
                    optimizer.step()
            state["head"] = {name: mean[name] for name in state["head"]}
            server.evaluate()
