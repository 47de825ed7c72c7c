"""Encoder: an MLP of rows that belong to no client alone, such as embeddings of all nodes."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from fedloom.nn.layers import Noise, dropout
from fedloom.nn.operations import operation
from fedloom.nn.weights import Weights, substituted


class Encoder(nn.Module):
    """LayerNorm, then linear layers with ReLU and dropout between them."""

    def __init__(self, widths: list[int], dropout_rate: float):
        super().__init__()
        self.dropout_rate = dropout_rate
        self.norm = nn.LayerNorm(widths[0])
        self.layers = nn.ModuleList(nn.Linear(*sizes) for sizes in pairwise(widths))

    def forward(self, s: Tensor, rng: Noise | None) -> Tensor:
        """Takes [rows, first width], returns [rows, last width]. rng: None switches dropout off."""
        return self.after_first(self.layers[0](self.norm(s)), rng)

    def after_first(self, h: Tensor, rng: Noise | None) -> Tensor:
        """Returns the output, given the output of the first linear layer."""
        if len(self.layers) == 1:
            return h
        return self.after_dropout(dropout(torch.relu(h), self.dropout_rate, rng), rng)

    def after_dropout(self, h: Tensor, rng: Noise | None) -> Tensor:
        """Returns the output, given what enters the second linear layer."""
        second, *others = list(self.layers)[1:]
        out: Tensor = second(h)
        for layer in others:
            out = layer(dropout(torch.relu(out), self.dropout_rate, rng))
        return out


@operation
def encode_rows(
    encoder: Encoder, weights: Weights, s: Tensor, rows: Tensor, rng: torch.Generator | None
) -> Tensor:
    """Returns the encoder's output for some rows of s, differentiable in the weights and s.

    Args:
        encoder: The encoder.
        weights: The weights to use.
        s: [all rows, first width].
        rows: The numbers of the rows, each at most once.
        rng: The noise of dropout. None switches dropout off.
    """
    with substituted(encoder, weights):
        out: Tensor = encoder(s[rows], rng)
        return out
