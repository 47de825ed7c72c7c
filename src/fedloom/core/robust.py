"""Robust rules: means of vectors that a minority of liars cannot move far.

All rules take vectors as the rows of a matrix [n, d], of which at most f are lies, and return one
vector [d]:

    mean               Σ w_i x_i, the only rule besides `clipped` that uses the clients' weights
    clipped            the same, with every x_i at most as long as the median
    median             the median of each coordinate
    trimmed            the mean of each coordinate without its f smallest and f largest
    krum               the x_i with the least mean squared distance to its n − f − 1 nearest
    multi-krum         the mean of the n − f vectors with the least such distances
    geometric-median   the point with the least sum of distances to all x_i
    centered-clipping  the mean of x_i that are pulled to within the median distance of a centre

In front of them, `bucketing` replaces the vectors by means of random groups, and `mixing` each
vector by the mean of its n − f nearest (NNM).

Blanchard et al., NeurIPS 2017 (Krum); Yin et al., ICML 2018 (median, trimmed mean); Pillutla et
al., IEEE TSP 2022 (geometric median); Karimireddy et al., ICML 2021 (centred clipping) and ICLR
2022 (bucketing); Allouah et al., AISTATS 2023 (nearest-neighbour mixing).
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

import numpy as np
import torch
from torch import Generator, Tensor

from fedloom.errors import ConfigError, MessageError, unknown

RULES = (
    "mean",
    "clipped",
    "median",
    "trimmed",
    "krum",
    "multi-krum",
    "geometric-median",
    "centered-clipping",
)
AUTOMATIC_CLIP = -1.0  # `Robustness.clip_norms`: chosen by what is combined
USUAL_CLIP = 2.0  # for weights that are averaged
LIARS = 0.3  # the share of liars that a rule is set up for if nobody says how many there are


# ---- rules ----
def clip(X: Tensor, limit: Tensor | float) -> Tensor:
    """Returns the rows, shortened to a norm of at most `limit`."""
    norms = torch.linalg.vector_norm(X, dim=1, keepdim=True)
    return X * (limit / norms.clamp(min=1e-30)).clamp(max=1.0)


def median(X: Tensor) -> Tensor:
    """Returns the median of each coordinate; of an even number, the mean of the middle two."""
    return _middle(X, (len(X) - 1) // 2)


def trimmed(X: Tensor, f: int) -> Tensor:
    """Returns the mean of each coordinate without its f smallest and f largest values."""
    return _middle(X, f)


def _middle(X: Tensor, cut: int) -> Tensor:
    """Returns the mean of each coordinate without its `cut` smallest and `cut` largest values."""
    if not cut:
        return X.mean(0)
    ordered = np.sort(X.detach().numpy(), axis=0)  # 4 to 18 times as fast as torch's
    return torch.from_numpy(ordered[cut : len(X) - cut]).mean(0)


def krum(X: Tensor, f: int) -> Tensor:
    """Returns the row that is nearest to its n − f − 1 nearest neighbours."""
    return X[_krum_scores(X, f).argmin()]


def multi_krum(X: Tensor, f: int) -> Tensor:
    """Returns the mean of the n − f rows that are nearest to their neighbours."""
    return X[_krum_scores(X, f).argsort(stable=True)[: len(X) - f]].mean(0)


def _krum_scores(X: Tensor, f: int) -> Tensor:
    """Returns the mean squared distance of each row to its n − f − 1 nearest, [n]."""
    return squared_distances(X).sort(1).values[:, 1 : max(2, len(X) - f)].mean(1)


def squared_distances(X: Tensor) -> Tensor:
    """Returns the squared distance of each pair of rows, [n, n], in float64."""
    if len(X) <= 32:  # exact, row by row
        return torch.stack([_squared_norms(X - row) for row in X]).fill_diagonal_(0)
    gram = (X @ X.T).double()
    own = gram.diagonal()
    found = own.unsqueeze(0) + own.unsqueeze(1) - 2 * gram
    return found.clamp(min=0).fill_diagonal_(0)


def _squared_norms(X: Tensor) -> Tensor:
    return torch.linalg.vector_norm(X, dim=1).double().square()


def geometric_median(
    X: Tensor, start: Tensor | None = None, least: float | None = None, steps: int = 32
) -> Tensor:
    """Returns the point with the least sum of distances to the rows, by Weiszfeld's algorithm.

    Args:
        X: The rows.
        start: Where it starts. None: at the median of each coordinate.
        least: Smaller distances count as this one. None: a millionth of the median distance.
        steps: The most steps.
    """
    z = median(X) if start is None else start
    for _ in range(steps):
        distance = torch.linalg.vector_norm(X - z, dim=1)
        floor = 1e-6 * float(distance.median()) if least is None else least
        if floor <= 0:  # half of the rows lie here
            return z
        weight = 1 / distance.clamp(min=floor)
        z, before = (weight / weight.sum()) @ X, z
        if torch.linalg.vector_norm(z - before) <= 1e-6 * torch.linalg.vector_norm(z):
            break
    return z


def centered_clipping(
    X: Tensor, centre: Tensor | None = None, radius: float | None = None, steps: int = 3
) -> Tensor:
    """Returns a centre after steps towards the mean of the rows, each pulled into a ball around it.

    Args:
        X: The rows.
        centre: Where it starts. None: at the median of each coordinate.
        radius: The radius of the ball. None: the median distance to the centre.
        steps: The number of steps.
    """
    v = median(X) if centre is None else centre
    for _ in range(steps):
        apart = X - v
        norms = torch.linalg.vector_norm(apart, dim=1)
        v = v + clip(apart, float(norms.median()) if radius is None else radius).mean(0)
    return v


# ---- in front of a rule ----
def bucketing(X: Tensor, size: int, rng: Generator) -> Tensor:
    """Returns the means of random groups of `size` rows; the last group may be smaller."""
    order = torch.randperm(len(X), generator=rng)
    return torch.stack([X[group].mean(0) for group in order.split(size)])


def mixing(X: Tensor, f: int) -> Tensor:
    """Returns for each row the mean of its n − f nearest rows, itself among them."""
    nearest = squared_distances(X).argsort(dim=1, stable=True)[:, : len(X) - f]
    share = torch.zeros(len(X), len(X), dtype=X.dtype)
    share.scatter_(1, nearest, 1.0 / nearest.shape[1])
    return share @ X


# ---- how many liars ----
def most_liars(rule: str, vectors: int) -> int:
    """Returns how many of the vectors may be lies: the largest f that a rule bears."""
    if rule == "mean":
        return 0
    return max(0, (vectors - 3 if rule.endswith("krum") else vectors - 1) // 2)


@dataclass(frozen=True)
class Robustness:
    """How the server protects means and sums of weights against clients that lie.

    Args:
        rule: One of `RULES`.
        byzantine: f, how many liars the rule must bear. 0: 30 % of the clients, or as many as the
            rule bears.
        bucketing: The size of the random groups in front of the rule. 0: none.
        mixing: Whether nearest-neighbour mixing is in front of the rule.
        reputation: Whether clients are left out whose updates have pointed away from the others'
            so far; see `fedloom.core.combining.Reputation`.
        clip_norms: An update that is more than so many times as long as the median one is
            shortened to the median. 0: none is. `AUTOMATIC_CLIP`: 2 for weights that are averaged.
            It is 0 for sums of gradients, whose norms differ more, and for other rules than the
            mean: they find a long lie more easily than a short one.
        cap_weights: A client's weight is at most so many times the median one. 0: no limit.
    """

    rule: str = "mean"
    byzantine: int = 0
    bucketing: int = 0
    mixing: bool = False
    reputation: bool = False
    clip_norms: float = 0.0
    cap_weights: float = 0.0

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise unknown("run.aggregation", self.rule, RULES)

    @property
    def is_mean(self) -> bool:
        """Whether the rule is the plain mean."""
        return self.rule == "mean"

    def longest(self, is_sum: bool) -> float:
        """Returns how many times the median an update may be as long as; 0: any length.

        is_sum: whether the server needs a sum.
        """
        if self.clip_norms != AUTOMATIC_CLIP:
            return self.clip_norms
        return USUAL_CLIP if self.is_mean and not is_sum else 0.0

    def vectors(self, clients: int) -> int:
        """Returns how many vectors the rule gets from so many clients."""
        return math.ceil(clients / self.bucketing) if self.bucketing else clients

    def bound(self, clients: int) -> int:
        """Returns how many of the clients may lie at most."""
        return most_liars(self.rule, self.vectors(clients))

    def liars(self, clients: int) -> int:
        """Returns f, for so many clients."""
        return self.byzantine or min(self.bound(clients), int(LIARS * clients))

    def check(self, clients: int, adversaries: int = 0) -> None:
        """Raises a ConfigError if the rule cannot bear so many liars.

        Args:
            clients: How many clients take part in a round.
            adversaries: How many of them lie in a simulation.
        """
        if self.is_mean:
            return
        bound = self.bound(clients)
        groups = f" in groups of {self.bucketing}" if self.bucketing else ""
        borne = f"run.aggregation {self.rule!r} bears at most {bound} of {clients} clients{groups}"
        if self.byzantine > bound:
            raise ConfigError(f"run.byzantine is {self.byzantine}: {borne}")
        if adversaries > bound:
            raise ConfigError(f"adversary.clients is {adversaries}: {borne}")
        uses_f = self.mixing or self.rule in ("trimmed", "krum", "multi-krum")
        if uses_f and adversaries > self.liars(clients):
            raise ConfigError(
                f"adversary.clients is {adversaries}: the rule is set up for "
                f"{self.liars(clients)}; set run.byzantine to {adversaries} (at most {bound})"
            )

    def apply(self, X: Tensor, share: Tensor, rng: Generator) -> Tensor:
        """Returns what stands for the mean of the rows.

        Args:
            X: The rows [n, d].
            share: The clients' weights, which sum to 1; [n].
            rng: The random stream that divides clients into groups.
        """
        f, clients = self.liars(len(X)), len(X)
        if f > self.bound(clients):
            raise MessageError(
                f"run.aggregation {self.rule!r} bears {self.bound(clients)} liars among the "
                f"{clients} clients that answered, run.byzantine is {f}"
            )
        if self.bucketing:
            X, share = bucketing(X, self.bucketing, rng), torch.ones(self.vectors(clients))
            share = share / len(share)
        if self.mixing:
            X = mixing(X, f)
        if self.rule == "clipped":
            norms = torch.linalg.vector_norm(X, dim=1)
            X = clip(X, float(median_of(norms)))
        if self.rule in ("mean", "clipped"):
            return share.to(X.dtype) @ X
        if self.rule in _WITH_F:
            return _WITH_F[self.rule](X, f)
        return _WITHOUT_F[self.rule](X)


_WITH_F = {"trimmed": trimmed, "krum": krum, "multi-krum": multi_krum}
_WITHOUT_F = {
    "median": median,
    "geometric-median": geometric_median,
    "centered-clipping": centered_clipping,
}


def median_of(values: Tensor) -> Tensor:
    """Returns the median of the values above 0; 0 if there is none."""
    # They are few: a list is quicker than tensors.
    positive = [value for value in values.tolist() if value > 0]
    return torch.tensor(statistics.median(positive) if positive else 0.0, dtype=values.dtype)
