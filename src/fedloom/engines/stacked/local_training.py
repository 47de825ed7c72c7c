"""Local training by hand: forward, loss, backward and step of all clients of a group.

It does what `model(graph, rng)`, `client.loss` and `step` do, for the models that
`fedloom.engines.stacked.receptive_field` describes. There is no autograd graph, and each layer
computes only the rows that the loss depends on.

    forward    H_l = ReLU(Σ_j A_j (D_l W_j) + b),   D_l = H_{l-1} with dropout,   D_1 = X
    loss       mean of −log softmax(H_L)[y] over a client's training nodes
    backward   G_L = (softmax(H_L) − onehot(y)) / n,   Z_j = A_jᵀ G_l
               ∂b = Σ_rows G_l,   ∂W_j = D_lᵀ Z_j,   G_{l-1} = (Σ_j Z_j W_jᵀ)∘[D_l > 0]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from fedloom.core.shared_rows import Sharing
from fedloom.data.sparse import Sparse, multiply
from fedloom.engines.stacked.graphs import random_rows
from fedloom.engines.stacked.matmul import (
    add_to_blocks,
    blocks_times,
    outer_by_block,
    sum_of_blocks,
)
from fedloom.engines.stacked.receptive_field import Plan
from fedloom.nn.layers import dropout_cut

Parameters = Mapping[str, Tensor]  # [clients, ...] each; with a sharing, stored rows
# Takes the number of a layer, from 1. Returns 1 for each entry of its input that dropout keeps and
# 0 for the others; None without dropout.
Masks = Callable[[int], Tensor | None]
DRAWN_TOGETHER = 64e6  # random bytes that one call may draw


def no_masks(k: int) -> None:
    """The masks without dropout."""


class Targets:
    """The labels at the rows of a plan's logits, and the share of each row in its client's loss."""

    def __init__(self, plan: Plan, of_class: Tensor | None):
        """Takes a plan for training nodes.

        Args:
            plan: The plan.
            of_class: Class weights, [clients, classes] or [classes]. None: all are equal.
        """
        rows = plan.rows[-1]
        labels = torch.cat([graph.y for graph in plan.stack.parts])
        y = torch.where(rows.real, labels[rows.nodes], 0)
        weight = rows.real.float()
        if of_class is not None:
            weight *= of_class.expand(len(rows.sizes), -1)[rows.owner, y]
        total = torch.zeros(len(rows.sizes)).index_add_(0, rows.owner, weight)
        weight /= total[rows.owner]
        self.share, self.y = weight.unsqueeze(0), y.unsqueeze(0)
        self.clients, self.owner = len(rows.sizes), rows.owner
        self.onehot = F.one_hot(y, plan.stack.num_classes).float().t().contiguous()

    def gradient(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Returns −log p of each row's label, and the gradient of all losses' sum."""
        # A softmax over few columns takes a fifth of the time when the columns are contiguous.
        log_p = torch.log_softmax(logits.t().contiguous(), 0)
        of_rows = log_p.gather(0, self.y).neg_()
        return of_rows, log_p.exp_().sub_(self.onehot).mul_(self.share).t().contiguous()

    def losses(self, rows: Sequence[Tensor]) -> Tensor:
        """Returns the losses of each client, [steps, clients].

        rows: what `gradient` returned in each step.
        """
        each = torch.cat(list(rows)).mul_(self.share)
        return torch.zeros(len(rows), self.clients).index_add_(1, self.owner, each)


class LocalPass:
    """Forward and backward passes of all clients of a group through one model form.

    Args:
        plan: The rows and matrices.
        dropout: The probability of dropout.
        sharing: Which stored row of the first layer each client uses. None: it is dense.
    """

    def __init__(self, plan: Plan, dropout: float, sharing: Sharing | None):
        self.plan, self.cut = plan, dropout_cut(dropout)
        self.scale = 256 / (256 - self.cut)
        self.sharing = sharing

    @cached_property
    def projection(self) -> Sparse:
        """The sparse features; see `Plan.projection`."""
        return self.plan.projection(self.sharing)

    def forward(
        self, parameters: Parameters, masks: Masks
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor | None]]]:
        """Returns the logits, and for each layer but the first its input and the dropout mask.

        masks: for each layer but the first, which entries of its input dropout keeps.
        """
        plan, kept = self.plan, []
        h = self._first(parameters)
        for k in range(1, len(plan.layers)):
            mask = masks(k)
            if mask is not None:
                h = h.mul_(mask)
            kept.append((h, mask))
            out: Tensor | None = None
            for term, operators in zip(plan.layers[k].terms, plan.operators[k], strict=True):
                weight = self._scaled(parameters[term.weight], mask)
                z = blocks_times(h, weight, plan.rows[k - 1].sizes)
                for operator in operators:
                    z = multiply(operator, z)
                out = z if out is None else out.add_(z)
            assert out is not None
            h = self._activated(k, out, parameters)
        return h, kept

    def _first(self, parameters: Parameters) -> Tensor:
        """Returns the output of the first layer."""
        plan, out = self.plan, None
        for j, (term, operators) in enumerate(
            zip(plan.layers[0].terms, plan.operators[0], strict=True)
        ):
            weight = parameters[term.weight]
            if plan.smoothed is not None:
                z = blocks_times(plan.smoothed[j], weight, plan.rows[0].sizes)
            else:
                z = multiply(self.projection, weight.reshape(-1, weight.shape[-1]))
                for operator in operators:
                    z = multiply(operator, z)
            out = z if out is None else out.add_(z)
        assert out is not None
        return self._activated(0, out, parameters)

    def _activated(self, k: int, out: Tensor, parameters: Parameters) -> Tensor:
        layer, rows = self.plan.layers[k], self.plan.rows[k]
        out = add_to_blocks(out, parameters[layer.bias], rows.membership, rows.sizes)
        return out.relu_() if layer.relu else out

    def masks(
        self, parameters: Parameters, streams: Sequence[Generator] | None, steps: int
    ) -> Iterator[Masks]:
        """Yields the dropout masks of some steps.

        Each client draws for all its nodes, in the order of its steps and layers, as alone.

        Args:
            parameters: As in `forward`.
            streams: Each client's random stream. None: no dropout.
            steps: The number of steps.
        """
        if streams is None or not self.cut:
            yield from [no_masks] * steps
            return
        plan, sizes = self.plan, self.plan.stack.sizes
        widths = [parameters[layer.terms[0].weight].shape[-2] for layer in plan.layers[1:]]
        draws = steps * len(widths)  # of a node
        together = len(set(widths)) == 1 and widths[0] % 8 == 0
        if together and draws * widths[0] * sum(sizes) <= DRAWN_TOGETHER:
            drawn = random_rows(streams, [draws * size for size in sizes], widths[0])
            for step in range(steps):

                def of_drawn(k: int, step: int = step) -> Tensor:
                    rows = plan.rows[k - 1]
                    before = step * len(widths) + k - 1  # draws of the same client
                    at = rows.nodes + (draws - 1) * rows.first_node + before * rows.num_nodes
                    return self._kept(drawn.index_select(0, at))

                yield of_drawn
        else:

            def of_layer(k: int) -> Tensor:
                drawn, rows = random_rows(streams, sizes, widths[k - 1]), plan.rows[k - 1]
                return self._kept(drawn if rows.complete else drawn.index_select(0, rows.nodes))

            yield from [of_layer] * steps

    def _scaled(self, matrix: Tensor, mask: Tensor | None) -> Tensor:
        """Returns the factor of dropout times a matrix. It is smaller than what it multiplies."""
        return matrix if mask is None else matrix * self.scale

    def _kept(self, drawn: Tensor) -> Tensor:
        """Returns 1 where dropout keeps an entry, and 0 elsewhere."""
        return drawn.to(torch.float32).ge_(self.cut)

    def backward(
        self,
        parameters: Parameters,
        kept: Sequence[tuple[Tensor, Tensor | None]],
        gradient: Tensor,
    ) -> dict[str, Tensor]:
        """Returns the gradients of the parameters.

        Args:
            parameters: As in `forward`.
            kept: What `forward` returned.
            gradient: The gradient with respect to the logits.
        """
        plan, found = self.plan, {}
        for k in range(len(plan.layers) - 1, -1, -1):
            layer, rows = plan.layers[k], plan.rows[k]
            found[layer.bias] = sum_of_blocks(gradient, rows.membership, rows.sizes)
            if k == 0:
                break
            h, mask = kept[k - 1]
            sizes = plan.rows[k - 1].sizes
            to_h: Tensor | None = None
            for term, operators in zip(layer.terms, plan.operators[k], strict=True):
                z, weight = gradient, parameters[term.weight]
                for operator in reversed(operators):
                    z = multiply(operator.transpose, z)
                found[term.weight] = self._scaled(outer_by_block(h, z, sizes), mask)
                part = blocks_times(z, self._scaled(weight, mask).transpose(1, 2), sizes)
                to_h = part if to_h is None else to_h.add_(part)
            assert to_h is not None
            if plan.layers[k - 1].relu:
                gradient = torch.ops.aten.threshold_backward(to_h, h, 0)
            else:
                gradient = to_h if mask is None else to_h.mul_(mask)
        self._first_backward(parameters, gradient, found)
        return found

    def _first_backward(
        self, parameters: Parameters, gradient: Tensor, found: dict[str, Tensor]
    ) -> None:
        plan = self.plan
        for j, (term, operators) in enumerate(
            zip(plan.layers[0].terms, plan.operators[0], strict=True)
        ):
            if plan.smoothed is not None:
                made = outer_by_block(plan.smoothed[j], gradient, plan.rows[0].sizes)
            else:
                z = gradient
                for operator in reversed(operators):
                    z = multiply(operator.transpose, z)
                made = multiply(self.projection.transpose, z)
            found[term.weight] = made.view(parameters[term.weight].shape)
