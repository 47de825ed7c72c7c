"""FedGen: the server learns to imagine embeddings that the clients' heads can label, and clients train their heads on those, too.

Zhu, Hong, Zhou: "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", ICML 2021, Algorithm 1 in its form that shares
the head only ("flexible parameter sharing"), so that extractors may differ.

What travels, per client:
    once     up    size            number of local items n_k
    a round  down  weight, bias    θ^p, the mean head                                                  pC + C numbers
                   generator       w, the generator's weights, from the second round on                |w| numbers
                   prior           p̂(y), from the second round on                                      C numbers
             up    weight, bias    θ_k^p, the head after E local epochs                                pC + C numbers
                   counts          c_k, training items of each class                                   C numbers

    G_w: (noise ε, class y) ↦ z, an embedding                                                          `Generator`
    min_w  E_{y ~ p̂, z ~ G_w(y)} CE(Σ_k (c_k[y] / Σ c[y]) h(z; θ_k^p), y) + η L_div                    `generator_loss`, `Ensemble`
    L_div = exp(−mean_ij  mean|z_i − z_j| · mean (ε_i − ε_j)²)                                          `diversity`
    min_θ  CE on the client's training items + α E_{y ~ p̂, z ~ G_w(y)} CE(h(z; θ_k^p), y)              `objective`
    p̂(y) = Σ_k c_k[y] / Σ c,   θ^p ← Σ_k (n_k / Σ n) θ_k^p                                             `run`

Generated embeddings pass the head without dropout. A class that no client of the round has is never imagined. The first round is plain
training: there is no generator yet. The generator and its optimiser live at the server and go on from round to round. The server learns
every client's head and label counts: sums alone would not do.

Heads must be linear maps of one shape: any architecture with +linear, and all of them in a graph task.

Departures. The paper's generator sees the even mean of the clients' logits; here label counts weigh them, as in the authors' code (which
averages losses, not logits). L_div is the code's. Its second term for clients, a KL between predictions on real items and on imagined
ones of the same class, is not in the paper's objective and is left out; so is the decay of α. The noise is normal, as in the text. No
BatchNorm in the generator (decision 2). Heads are averaged by n_k as in all methods of this package; the paper's count alike.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.core.message import Message
from fedloom.core.phase import phase
from fedloom.core.server import Server
from fedloom.core.settings import setting
from fedloom.data.graph import Graph
from fedloom.errors import ConfigError
from fedloom.methods._shared.local_training import LocalTraining
from fedloom.nn.model import Model
from fedloom.nn.training import make_optimizer, seeded, step
from fedloom.nn.weights import load_weights, weights


class Generator(nn.Module):
    """[ε ‖ one-hot y] ↦ z: a hidden layer with ReLU, then a linear one."""

    def __init__(self, noise: int, classes: int, hidden: int, width: int):
        super().__init__()
        self.classes = classes
        self.hidden, self.out = nn.Linear(noise + classes, hidden), nn.Linear(hidden, width)

    def forward(self, noise: Tensor, y: Tensor) -> Tensor:
        """Takes ε [m, noise] and classes [m], gives z [m, width]."""
        return self.out(F.relu(self.hidden(torch.cat([noise, F.one_hot(y, self.classes)], 1))))


class Ensemble:
    """The clients' heads as one, for each class with the weights of those who know it: linear heads average to a linear head."""

    def __init__(self, heads: Iterable[Message], counts: Tensor):
        share = counts / counts.sum(0).clamp(min=1)  # [clients, classes]
        heads = list(heads)
        self.weight = torch.einsum(
            "ky,kpc->ypc", share, torch.stack([head["weight"] for head in heads])
        )
        self.bias = torch.einsum("ky,kc->yc", share, torch.stack([head["bias"] for head in heads]))

    def __call__(self, z: Tensor, y: Tensor) -> Tensor:
        """Logits [m, C] of embeddings that were made for classes y."""
        return torch.einsum("mp,mpc->mc", z, self.weight[y]) + self.bias[y]


def diversity(noise: Tensor, z: Tensor) -> Tensor:
    """L_div: small where different noise gives different embeddings."""
    apart = (z.unsqueeze(0) - z.unsqueeze(1)).abs().mean(2)
    return torch.exp(-(apart * (noise.unsqueeze(0) - noise.unsqueeze(1)).square().mean(2)).mean())


def require_linear_heads(facts: Facts) -> None:
    """Refuses a model whose head needs a graph: an imagined embedding has none."""
    for spec in sorted(set(facts.models)):
        if not facts.build(spec, "server").linear:
            raise ConfigError(
                f"model {spec!r}: its head works on the graph, fedgen's must work on embeddings alone; use '{spec}+linear'"
            )


@dataclass(frozen=True)
class FedGen(LocalTraining):
    """Local training with a shared head that also learns from imagined embeddings."""

    alpha: float = setting(
        1.0, "α, weight of the imagined embeddings in a client's loss", at_least=0, tune="0.1..10"
    )
    imagined: int = setting(
        32, "embeddings imagined for a step, of a client and of the generator", at_least=2
    )
    noise: int = setting(32, "width of the noise ε", at_least=1)
    hidden: int = setting(512, "width of the generator's hidden layer", at_least=1)
    generator_steps: int = setting(100, "steps of the generator a round", at_least=1)
    generator_lr: float = setting(5e-3, "the generator's learning rate", above=0, tune="1e-4..0.01")
    diversity: float = setting(1.0, "η, weight of the diversity term", at_least=0, tune="0.1..10")

    discloses_to_peers: ClassVar[str] = (
        "the label distribution of the round's clients together: with two, each other's"
    )

    # ---- at a client ----
    @phase()
    def setup(self, client: Client) -> Message:
        """As in Local; and the generator's form, which holds whatever weights come."""
        client.memory["generator"] = self.make_generator(client.facts, client.rng("generator"))
        return super().setup(client)

    @phase(weight="float32[p,C]", bias="float32[C]", counts="int64[C]")
    def train(
        self,
        client: Client,
        weight: Tensor,
        bias: Tensor,
        generator: Message | None = None,
        prior: Tensor | None = None,
    ) -> Message:
        """E local epochs from the mean head."""
        model, graph = client.state["model"], client.graph
        load_weights(model.classifier, {"weight": weight, "bias": bias})
        self.descend(
            client, model, None if generator is None else {"generator": generator, "prior": prior}
        )
        counts = torch.bincount(graph.y[graph.train], minlength=client.facts.num_classes)
        return {**weights(model.classifier), "counts": counts}

    def objective(
        self, client: Client, batch: Graph, model: Model, received: Message | None
    ) -> Tensor:
        """CE on real items and on imagined ones; `model` is w and p̂, from the second round on."""
        loss = super().objective(client, batch, model, received)
        if received is None:
            return loss
        noise, y = self.draw(received["prior"], client.rng("imagined"))
        z = functional_call(client.memory["generator"], received["generator"], (noise, y))
        return loss + self.alpha * F.cross_entropy(model.head(z, batch), y)

    # ---- at the server ----
    def make_generator(self, facts: Facts, rng: torch.Generator) -> Generator:
        """A fresh G."""
        with seeded(rng):
            return Generator(self.noise, facts.num_classes, self.hidden, facts.width)

    def draw(self, prior: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """ε ~ N(0, 1) and y ~ p̂ for a step."""
        y = torch.multinomial(prior, self.imagined, replacement=True, generator=rng)
        return torch.randn(self.imagined, self.noise, generator=rng), y

    def generator_loss(
        self, generator: Generator, ensemble: Ensemble, noise: Tensor, y: Tensor
    ) -> Tensor:
        """What a step of the generator minimises."""
        z = generator(noise, y)
        return F.cross_entropy(ensemble(z, y), y) + self.diversity * diversity(noise, z)

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
            taught = (
                {"generator": weights(generator), "prior": state["prior"]}
                if "prior" in state
                else {}
            )
            size = server.weights("size", server.participants)
            replies = server.ask(self.train, clients=list(size), **state["head"], **taught)
            mean, counts = replies.mean(size), replies.stack("counts")
            if counts.any():  # else there is no class to imagine
                state["prior"] = counts.sum(0) / counts.sum()
                ensemble = Ensemble(replies.values(), counts)
                for _ in range(self.generator_steps):
                    step(
                        optimizer,
                        self.generator_loss(
                            generator, ensemble, *self.draw(state["prior"], server.rng("imagined"))
                        ),
                    )
            state["head"] = {name: mean[name] for name in state["head"]}
            server.evaluate()
