"""A client's variational graph autoencoder (Eq. 5-7)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.data.graph import Graph
from fedloom.nn.model import Model
from fedloom.nn.training import make_optimizer, step

HIDDEN = 128  # width of the feature decoder's hidden layer
LENGTH = 4.0  # mean length of a row of features as encoders see it
RAREST = 20.0  # the largest weight of a one in bag-of-words features


class VGAE(nn.Module):
    """An encoder of nodes to the mean and log deviation of their latents, and a feature decoder.

    The decoder's output is in the `units` of the features.
    """

    def __init__(self, encoder: Model, width: int, num_features: int):
        super().__init__()
        self.encoder = encoder
        self.decoder = nn.Sequential(
            nn.Linear(width, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, num_features)
        )

    def forward(self, graph: Graph) -> tuple[Tensor, Tensor]:
        """Returns μ and log σ of every node, [n, q] each."""
        mu, log_sigma = self.encoder(graph).chunk(2, 1)
        return mu, log_sigma.clamp(max=10.0)  # keeps σ finite, whatever the features


def minimise(
    parameters: Sequence[Tensor],
    loss: Callable[[], Tensor],
    lr: float,
    epochs: int,
    patience: int = 0,
) -> None:
    """Runs Adam on `loss()`.

    patience: it stops after this many steps without a lower value (0 = never).
    """
    optimizer, best, since = make_optimizer("adam", parameters, lr, 0.0), float("inf"), 0
    for _ in range(epochs):
        value = loss()
        step(optimizer, value)
        best, since = (value.item(), 0) if value < best else (best, since + 1)
        if patience and since >= patience:
            break


def levelled(xs: Sequence[Tensor]) -> list[Tensor]:
    """Returns features minus their mean over all rows, scaled to a mean row length of `LENGTH`.

    All steps of Adam have one size. Without this, an encoder learns nothing from small features.
    """
    centre = torch.cat(list(xs)).mean(0)
    xs = [x - centre for x in xs]
    length = torch.cat([x.norm(dim=1) for x in xs]).mean()
    return [x * (LENGTH / length if length > 1e-12 else 1.0) for x in xs]


def is_bag_of_words(x: Tensor) -> bool:
    """Returns whether all features are 0 or 1."""
    return bool(((x == 0) | (x == 1)).all())


def units(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the origin [d] and the unit of a decoder's output for real-valued features.

    The origin is the mean of each feature, the unit their common standard deviation.
    """
    scale = (x - x.mean(0)).square().mean().sqrt()
    return x.mean(0), scale.where(scale > 1e-12, 1.0)


def reconstruction(x: Tensor) -> Callable[[Tensor], Tensor]:
    """Returns the reconstruction loss of a decoder's output [n, d] for the features x.

    It is a cross-entropy that weights ones higher if all features are 0 or 1. Otherwise it is the
    mean square error in `units`.
    """
    if is_bag_of_words(x):
        ones = x.sum()
        weight = ((x.numel() - ones) / ones.clamp(min=1)).clamp(max=RAREST)
        return lambda out: F.binary_cross_entropy_with_logits(out, x, pos_weight=weight)
    centre, scale = units(x)
    return lambda out: F.mse_loss(out, (x - centre) / scale)


def edge_loss(H: Tensor, edges: Tensor, others: Tensor) -> Tensor:
    """Returns the BCE of sigmoid(h_i · h_j) over pairs that are edges and pairs that are not.

    The mean of each kind counts half.
    """
    terms = [
        F.softplus(sign * (H[i] * H[j]).sum(1)).mean()
        for (i, j), sign in ((edges, -1), (others, 1))
        if len(i)
    ]
    return sum(terms, torch.zeros(())) / 2


def divergence(mu: Tensor, log_sigma: Tensor) -> Tensor:
    """Returns KL(N(μ, σ²) ‖ N(0, 1)) / n, summed over dimensions and averaged over nodes."""
    return -0.5 * (1 + 2 * log_sigma - mu**2 - (2 * log_sigma).exp()).sum(1).mean() / len(mu)
