"""The batched form of `encode_rows`: what all clients have in common is computed once."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedloom.engines.stacked.lockstep import Batched, Context
from fedloom.engines.stacked.tensors import common_source, common_weights
from fedloom.nn.encoder import Encoder, encode_rows
from fedloom.nn.layers import dropout, dropout_scale
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
        common, matrix = common_weights(weights), common_source(s)
        if common is None or matrix is None or sum(map(len, rows)) < len(matrix):
            return [encode_rows.function(*call) for call in calls]
        begun = _Begun.of(encoders[0], common, matrix)
        trained = any(t.requires_grad for own in weights for t in (*own.values(), *s))
        if streams[0] is None and not (trained and torch.is_grad_enabled()):
            with torch.no_grad(), substituted(encoders[0], common):
                whole = begun.h if begun.last else encoders[0].after_dropout(begun.h, None)
            return [whole.index_select(0, own) for own in rows]
        made = []
        for encoder, own, of_client, taken, rng in calls:
            noise = (encoder.dropout_rate, rng)
            first = [own[name] for name in FIRST]
            h = _FirstRows.apply(begun, taken, noise, of_client, *first)  # type: ignore[no-untyped-call]
            with substituted(encoder, own):
                made.append(h if begun.last else encoder.after_dropout(h, rng))
        return made


class _Begun(NamedTuple):
    """LayerNorm, the first layer and, unless it is the last, ReLU on all rows."""

    s: Tensor
    first: tuple[Tensor, Tensor, Tensor, Tensor]  # the weights in `FIRST`
    normed: Tensor  # the output of LayerNorm
    mean: Tensor
    scale: Tensor  # one over each row's standard deviation
    h: Tensor
    last: bool

    @classmethod
    @torch.no_grad()
    def of(cls, encoder: Encoder, weights: Mapping[str, Tensor], s: Tensor) -> _Begun:
        gamma, beta, weight, bias = (weights[name] for name in FIRST)
        normed, mean, scale = torch.native_layer_norm(s, s.shape[1:], gamma, beta, encoder.norm.eps)
        h, last = torch.addmm(bias, normed, weight.t()), len(encoder.layers) == 1
        first = (gamma, beta, weight, bias)
        return cls(s, first, normed, mean, scale, h if last else h.relu_(), last)


class _FirstRows(torch.autograd.Function):
    """A client's rows of `_Begun.h`, with dropout if ReLU comes before, and its own gradients."""

    @staticmethod
    def forward(ctx, begun, rows, noise, s, gamma, beta, weight, bias):  # type: ignore[no-untyped-def]
        ctx.begun, ctx.rows, ctx.noise = begun, rows, noise
        h = begun.h.index_select(0, rows)
        if begun.last:
            return h
        # An output is 0 where ReLU or dropout has made it 0. So no mask has to be kept.
        out = dropout(h, *noise)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        begun, rows, factor = ctx.begun, ctx.rows, 1.0
        if not begun.last:
            (out,) = ctx.saved_tensors
            gradient = torch.ops.aten.threshold_backward(gradient, out, 0)
            factor = dropout_scale(*ctx.noise)
        gamma, beta, weight, _ = begun.first
        s, normed, mean, scale = (
            t.index_select(0, rows) for t in (begun.s, begun.normed, begun.mean, begun.scale)
        )
        of_s, of_gamma, of_beta = torch.ops.aten.native_layer_norm_backward(
            gradient.mm(weight * factor),
            s,
            s.shape[1:],
            mean,
            scale,
            gamma,
            beta,
            [True, True, True],
        )
        whole = torch.zeros_like(begun.s).index_copy_(0, rows, of_s)
        of_weight, of_bias = gradient.t().mm(normed), gradient.sum(0)
        return None, None, None, whole, of_gamma, of_beta, factor * of_weight, factor * of_bias
