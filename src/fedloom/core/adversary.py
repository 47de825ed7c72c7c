"""Adversaries: clients of a simulation that lie, to measure what a method and its protection bear.

    sign-flip    sends its update with the opposite sign, `strength` times as long
    scale        sends its update `strength` times as long
    noise        sends random numbers, `strength` times as long as its update
    label-flip   trains on labels C − 1 − y, and sends the result honestly
    alie         the honest clients' mean − `strength` standard deviations ("A Little Is Enough")
    ipm          −`strength` times the honest clients' mean (inner product manipulation)
    free-rider   sends back what it got: an update of 0
    size         claims to have `strength` items; its updates are honest

An update is the client's difference to what it was sent, or the gradient that it sent. Liars know
the settings. In `alie` and `ipm` they also know all honest updates, which only a simulation can
give them: the worst case.

Baruch et al., NeurIPS 2019 (ALIE); Xie et al., UAI 2019 (IPM).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from fedloom.data.graph import Graph
from fedloom.data.seeds import stream_seed

# The attacks, and how strong they are if nobody says it.
ATTACKS = {
    "sign-flip": 10.0,
    "scale": 1000.0,
    "noise": 10.0,
    "label-flip": 1.0,
    "alie": 1.5,
    "ipm": 2.0,
    "free-rider": 1.0,
    "size": 2.0**53,
}
JOINT = ("alie", "ipm")  # they need the honest clients' updates
OF_DATA = ("label-flip", "size")  # they do not change updates


@dataclass(frozen=True)
class Adversary:
    """Who lies in a simulation, and how.

    Args:
        clients: The names of the clients that lie.
        attack: One of `ATTACKS`.
        strength: See above. 0: the attack's default.
    """

    clients: tuple[str, ...]
    attack: str
    strength: float = 0.0

    @property
    def factor(self) -> float:
        """The strength."""
        return self.strength or ATTACKS[self.attack]

    @property
    def changes_updates(self) -> bool:
        """Whether liars change the updates that they send."""
        return self.attack not in OF_DATA

    def lies(self, own: Tensor, honest: Tensor, rng: Generator) -> Tensor:
        """Returns what liars send in place of their updates.

        Args:
            own: Their honest updates, [liars, d].
            honest: The updates of the others, [honest clients, d]. Only `JOINT` attacks use them.
            rng: A random stream.
        """
        factor = self.factor
        if self.attack == "noise":
            drawn = torch.randn(own.shape, generator=rng).to(own.dtype)
            unit = drawn / torch.linalg.vector_norm(drawn, dim=1, keepdim=True)
            return factor * unit * torch.linalg.vector_norm(own, dim=1, keepdim=True)
        if self.attack == "alie":
            mean, spread = honest.mean(0), honest.std(0, unbiased=False)
            return (mean - factor * spread).expand_as(own)
        if self.attack == "ipm":
            return (-factor * honest.mean(0)).expand_as(own)
        return {"sign-flip": -factor, "scale": factor, "free-rider": 0.0}[self.attack] * own

    def claim(self, count: Tensor) -> Tensor:
        """Returns how many items a liar of `size` claims, in the dtype of the true number."""
        return torch.full_like(count, self.factor)


def draw_liars(names: tuple[str, ...], count: int, seed: int) -> tuple[str, ...]:
    """Returns which clients lie, drawn from the seed of the run, in client order."""
    rng = torch.Generator().manual_seed(stream_seed(seed, "adversary"))
    chosen = torch.randperm(len(names), generator=rng)[:count].sort().values
    return tuple(names[k] for k in chosen.tolist())


def flipped(graph: Graph) -> Graph:
    """Returns a graph whose training items have the labels C − 1 − y. The others are unchanged."""
    wrong = graph.num_classes - 1 - graph.y
    return replace(graph, y=torch.where(graph.train & (graph.y >= 0), wrong, graph.y))
