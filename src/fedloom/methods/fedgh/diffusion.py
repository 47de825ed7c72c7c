"""Diffusion of a client's latents (Eq. 8-10)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

# Widths of the denoiser's layers, of the condition r, and of the embedding of t.
DENOISER, CONDITION, TIME = 256, 64, 64


class Schedule:
    """β_1 ... β_T in equal steps, α = 1 − β, ᾱ_t = Π α. The index t counts from 1."""

    def __init__(self, steps: int, first: float, last: float):
        # In double precision, because 1 − ᾱ_1 may be very small.
        zero = torch.zeros(1, dtype=torch.float64)
        self.beta = torch.cat([zero, torch.linspace(first, last, steps, dtype=torch.float64)])
        self.alpha = 1 - self.beta
        self.alpha_bar = self.alpha.cumprod(0)
        self.steps = steps

    def noised(self, h: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """Returns h_t of the rows of h [n, q], each at its own time t [n] (Eq. 8)."""
        kept = self.alpha_bar[t].unsqueeze(1)
        return kept.sqrt().float() * h + (1 - kept).sqrt().float() * noise


def reverse(
    h: Tensor,
    predict: Callable[[Tensor, int], Tensor],
    schedule: Schedule,
    rng: Generator | None,
    low: Tensor | None = None,
    high: Tensor | None = None,
) -> Tensor:
    """Runs the reverse process from h_T [n, q] to h_0.

    Args:
        h: h_T.
        predict: Takes h and t, returns the noise in h.
        schedule: β and ᾱ.
        rng: Draws the noise that each step but the last adds. None: no noise is added.
        low: The smallest values of h_0, [q]. A step that aims beyond them is held there.
        high: The largest values, likewise.
    """
    for t in range(schedule.steps, 0, -1):
        beta, kept = float(schedule.beta[t]), float(schedule.alpha_bar[t])
        noise = predict(h, t)
        if low is not None:
            aim = ((h - (1 - kept) ** 0.5 * noise) / kept**0.5).clamp(low, high)
            noise = (h - kept**0.5 * aim) / (1 - kept) ** 0.5
        h = (h - beta / (1 - kept) ** 0.5 * noise) / (1 - beta) ** 0.5
        if rng is not None and t > 1:
            h = h + beta**0.5 * torch.randn(h.shape, generator=rng)
    return h


def time_embedding(t: Tensor) -> Tensor:
    """Returns sines and cosines of t [n] at 32 frequencies, [n, TIME]."""
    frequency = torch.exp(torch.linspace(0, -9.2, TIME // 2))
    angle = t.unsqueeze(1) * frequency
    return torch.cat([angle.sin(), angle.cos()], 1)


class Denoiser(nn.Module):
    """ε_θ(h_t, r, t), and F_ω, which computes r.

    Args:
        width: q, the width of the latents.
        condition: Whether there is an r. Without it, nothing ties a row to its node.
        noise: σ_c, the deviation of the noise through which r sees h_0.
    """

    def __init__(self, width: int, condition: bool, noise: float):
        super().__init__()
        self.condition, self.noise = condition, noise
        self.regulator = nn.Sequential(
            nn.Linear(width, CONDITION), nn.SiLU(), nn.Linear(CONDITION, CONDITION)
        )
        self.layers = nn.Sequential(
            nn.Linear(width + CONDITION + TIME, DENOISER),
            nn.SiLU(),
            nn.Linear(DENOISER, DENOISER),
            nn.SiLU(),
            nn.Linear(DENOISER, width),
        )

    def forward(self, h: Tensor, h_0: Tensor, t: Tensor, rng: Generator) -> Tensor:
        """Returns the noise in h [n, q] at times t [n]. It sees h_0 only through fresh noise."""
        r = h.new_zeros(len(h), CONDITION)
        if self.condition:
            r = self.regulator(h_0 + self.noise * torch.randn(h_0.shape, generator=rng))
        return self.layers(torch.cat([h, r, time_embedding(t)], 1))


def diffusion_loss(model: Denoiser, h_0: Tensor, schedule: Schedule, rng: Generator) -> Tensor:
    """Returns the mean square of ε − ε_θ, with every row at a random time (Eq. 10)."""
    t = torch.randint(1, schedule.steps + 1, (len(h_0),), generator=rng)
    noise = torch.randn(h_0.shape, generator=rng)
    return F.mse_loss(model(schedule.noised(h_0, t, noise), h_0, t, rng), noise)
