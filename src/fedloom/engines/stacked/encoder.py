"""The batched form of `encode_rows`: what all clients have in common is computed once."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedloom.engines.stacked.lockstep import Batched, Context
from fedloom.engines.stacked.tensors import common_source
from fedloom.nn.encoder import Encoder, encode_rows
from fedloom.nn.weights import substituted

FIRST = ("norm.weight", "norm.bias", "layers.0.weight", "layers.0.bias")


class BatchedEncoding(Batched):
    """One encoder on rows of one matrix.

    If all clients hold copies of the same weights and the same matrix, LayerNorm and the first
    layer run once on the whole matrix. The rest differs by dropout. Without dropout and gradients
    it runs once, too. Gradients are those of each client.
    """

    def key(self, *args: Any) -> Hashable:
        """Encoders of one form, with or without dropout."""
        encoder, weights, s, _, rng = args
        shapes = [(name, weights[name].shape) for name in sorted(weights)]
        return (s.shape, *shapes, encoder.dropout_rate, rng is None)

    def batch(self, calls: Sequence[tuple[Any, ...]], context: Context) -> list[Tensor]:
        """The common part once, then each client's rows."""
        encoders, weights, s, rows, streams = zip(*calls, strict=True)
        columns = {name: [own[name] for own in weights] for name in weights[0]}
        sources = {name: common_source(column) for name, column in columns.items()}
        common = {name: source for name, source in sources.items() if source is not None}
        matrix = common_source(s)
        if matrix is None or len(common) < len(columns) or sum(map(len, rows)) < len(matrix):
            return [encode_rows.function(*call) for call in calls]
        begun = _Begun.of(encoders[0], common, matrix)
        trained = any(t.requires_grad for own in weights for t in (*own.values(), *s))
        if streams[0] is None and not (trained and torch.is_grad_enabled()):
            with torch.no_grad(), substituted(encoders[0], common):
                whole = encoders[0].after_first(begun.h, None)
            return [whole.index_select(0, own) for own in rows]
        made = []
        for encoder, own, of_client, taken, rng in calls:
            first = [own[name] for name in FIRST]
            h = _FirstRows.apply(begun, taken, of_client, *first)  # type: ignore[no-untyped-call]
            with substituted(encoder, own):
                made.append(encoder.after_first(h, rng))
        return made


class _Begun(NamedTuple):
    """LayerNorm and the first layer on all rows."""

    s: Tensor
    first: tuple[Tensor, Tensor, Tensor, Tensor]  # the weights in `FIRST`
    normed: Tensor  # the output of LayerNorm
    mean: Tensor
    scale: Tensor  # one over each row's standard deviation
    h: Tensor  # the output of the first layer

    @classmethod
    @torch.no_grad()
    def of(cls, encoder: Encoder, weights: Mapping[str, Tensor], s: Tensor) -> _Begun:
        gamma, beta, weight, bias = (weights[name] for name in FIRST)
        normed, mean, scale = torch.native_layer_norm(s, s.shape[1:], gamma, beta, encoder.norm.eps)
        h = torch.addmm(bias, normed, weight.t())
        return cls(s, (gamma, beta, weight, bias), normed, mean, scale, h)


class _FirstRows(torch.autograd.Function):
    """A client's rows of `_Begun.h`, with its own gradients."""

    @staticmethod
    def forward(ctx, begun, rows, s, gamma, beta, weight, bias):  # type: ignore[no-untyped-def]
        ctx.begun, ctx.rows = begun, rows
        return begun.h.index_select(0, rows)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        begun, rows = ctx.begun, ctx.rows
        gamma, beta, weight, _ = begun.first
        s, normed, mean, scale = (
            t.index_select(0, rows) for t in (begun.s, begun.normed, begun.mean, begun.scale)
        )
        of_s, of_gamma, of_beta = torch.ops.aten.native_layer_norm_backward(
            gradient.mm(weight), s, s.shape[1:], mean, scale, gamma, beta, [True, True, True]
        )
        whole = torch.zeros_like(begun.s).index_copy_(0, rows, of_s)
        return None, None, whole, of_gamma, of_beta, gradient.t().mm(normed), gradient.sum(0)
