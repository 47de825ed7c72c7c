"""Dropout, the maximum, and attention against its dense computation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.nn.small_models import FEATURES, gradients, made, random_graph, rng
from torch import Tensor

from fedloom.data.graph import Graph
from fedloom.nn.layers import Attention, dropout, maximum


@pytest.mark.parametrize("p", [0.1, 0.5, 0.7, 0.8, 0.999])
def test_dropout(p: float) -> None:
    h = torch.ones(1001, 999, requires_grad=True)
    out = dropout(h, p, rng())
    zeroed = (out == 0).float().mean().item()
    assert zeroed == pytest.approx(p, abs=1 / 256)
    assert out.mean().item() == pytest.approx(1, abs=5e-3 / (1 - p) ** 0.5)
    assert len(out.unique()) == 2
    # All columns are dropped equally often: eight neighbours share a draw, but not its bits.
    assert (out == 0).float().mean(0)[:16].sub(p).abs().max() < 0.07
    out.sum().backward()
    assert torch.equal(h.grad, out)


def test_dropout_of_neighbouring_entries_is_independent() -> None:
    kept = (dropout(torch.ones(50_000, 8), 0.5, rng()) > 0).float()
    assert torch.corrcoef(kept.T).sub(torch.eye(8)).abs().max() < 0.02


def test_dropout_without_generator_or_probability_returns_its_input() -> None:
    h = torch.randn(3, 3, generator=rng())
    assert dropout(h, 0.5, None) is h
    generator = rng()
    assert dropout(h, 0.0, generator) is h
    assert torch.equal(generator.get_state(), rng().get_state())


def test_maximum_and_its_gradient() -> None:
    a, b = (
        torch.tensor(values, requires_grad=True)
        for values in ([1.0, -2.0, 0.5, 0.0], [3.0, -5.0, 0.25, 0.0])
    )
    out = maximum(a, b)
    assert torch.equal(out, torch.maximum(a, b))
    out.backward(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert a.grad.tolist() == [0, 2, 3, 4]  # a receives the whole gradient where they are equal
    assert b.grad.tolist() == [1, 0, 0, 0]


def dense_attention(layer: Attention, h: Tensor, graph: Graph) -> Tensor:
    """Returns the output of the layer's equation, computed on all pairs of nodes."""
    linked = graph.adjacency("sym").dense() > 0
    out = []
    for k, part in enumerate((h @ layer.weight).chunk(len(layer.source), 1)):
        score = F.leaky_relu(
            (part @ layer.source[k])[None, :] + (part @ layer.target[k])[:, None], 0.2
        )
        out.append(score.masked_fill(~linked, -torch.inf).softmax(1) @ part)
    return torch.cat(out, 1) + layer.bias


@pytest.mark.parametrize("last", [False, True])
# The range of the source scores. The last two need each target's maximum.
@pytest.mark.parametrize("spread", [1.0, 119.0, 121.0, 5000.0])
def test_attention_and_its_gradients_equal_the_dense_computation(last: bool, spread: float) -> None:
    graph, layer = random_graph(directed=True), Attention(FEATURES, 24, last).double()
    x = graph.x.double().requires_grad_()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=rng()))
        sent = ((x @ layer.weight).unflatten(1, layer.source.shape) * layer.source).sum(2)
        layer.source *= spread / (sent.amax(0) - sent.amin(0)).max()
    weight = torch.randn(24, 24, generator=rng(1))
    outputs = layer(x.matmul, graph), dense_attention(layer, x, graph)
    results = [
        (out, *torch.autograd.grad((out * weight).sum(), [x, *layer.parameters()]))
        for out in outputs
    ]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)


def test_attention_with_huge_scores_stays_finite() -> None:
    graph, model = random_graph(), made("gat-3x16")
    with torch.no_grad():
        for layer in (*model.layers, model.classifier):
            layer.source.fill_(1e4)
            layer.target.fill_(-1e4)
    assert model(graph).isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients(model, graph))
