"""The gradient of FedGen's loss of a generator, written by hand.

The generator takes a hundred steps a round, on tensors so small that autograd takes longer than the
arithmetic. This is the arithmetic alone, with autograd's operations in autograd's order, so the
numbers are the same bits in half of the time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedloom.nn.private_torch import log_softmax_backward

Layers = tuple[Tensor, Tensor, Tensor, Tensor]


@torch.no_grad()
def generator_gradient(
    layers: Layers,
    inputs: Tensor,
    heads: tuple[Tensor, Tensor],
    y: Tensor,
    d: Tensor,
    weight: float,
) -> Layers:
    """Returns the gradient of L with respect to U, u, V and v.

        z = ReLU(inputs Uᵀ + u) Vᵀ + v
        L = mean_i CE(z_i W_i + b_i, y_i) + weight · exp(−mean_ij d_ij mean|z_i − z_j|)

    Args:
        layers: U [hidden, in], u [hidden], V [p, hidden] and v [p].
        inputs: What the generator takes, [m, in].
        heads: W [m, p, C] and b [m, C], a linear head for every row.
        y: Classes, [m].
        d: [m, m], symmetric.
        weight: Of the second term.
    """
    U, u, V, v = layers
    W, b = heads
    hidden = torch.addmm(u, inputs, U.t()).relu_()
    z = torch.addmm(v, hidden, V.t())
    m, p = z.shape
    # Cross-entropy: softmax minus one-hot, over m.
    log_p = torch.log_softmax(torch.bmm(z.unsqueeze(1), W).squeeze(1).add_(b), 1)
    one_hot = torch.zeros_like(log_p).scatter_(1, y.unsqueeze(1), -1 / m)
    of_logits = log_softmax_backward(one_hot, log_p)
    # Diversity: the derivative of |z_j − z_i| is a sign.
    difference = z.unsqueeze(0) - z.unsqueeze(1)
    second = weight * torch.exp(-(difference.abs().mean(2) * d).mean())
    each = (d * (-second / (m * m))).div_(p)
    pull = difference.sign_().mul_(each.unsqueeze(2))
    of_z = pull.sum(0) - pull.sum(1)
    of_z += torch.bmm(of_logits.unsqueeze(1), W.transpose(1, 2)).squeeze(1)
    of_hidden = torch.ops.aten.threshold_backward(of_z.mm(V), hidden, 0)
    return of_hidden.t().mm(inputs), of_hidden.sum(0), of_z.t().mm(hidden), of_z.sum(0)
