"""Weights: into models, out of models, substituted for a block, and distances between them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fedloom.nn.training import make_optimizer, step
from fedloom.nn.weights import (
    extractor_weights,
    inner_product,
    load_weights,
    squared_distance,
    substituted,
    weights,
)


def small_model():
    """Returns two linear layers with fixed weights."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    with torch.no_grad():
        for k, p in enumerate(model.parameters()):
            p.copy_(torch.arange(p.numel()).view(p.shape) / 10 + k)
    return model


# ---- out and in ----
def test_weights_are_sorted_by_name_detached_and_share_memory_with_the_model():
    model = small_model()
    own = weights(model)
    assert list(own) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert not any(t.requires_grad for t in own.values())
    own["0.bias"].fill_(7)
    assert (model[0].bias == 7).all()


def test_a_copy_of_a_model_has_its_own_weights():
    model = small_model()
    weights(model)  # finds the parameters of the original
    other = copy.deepcopy(model)
    weights(other)["0.bias"].fill_(7)
    assert (other[0].bias == 7).all()
    assert not (model[0].bias == 7).any()


def test_the_body_is_everything_but_the_classifier():
    tensors = {"layers.0.weight": torch.ones(1), "classifier.weight": torch.ones(1)}
    assert list(extractor_weights(tensors)) == ["layers.0.weight"]


def test_loading_is_in_place_so_that_the_optimiser_stays_valid():
    model = small_model()
    new = {name: torch.full_like(t, 0.25) for name, t in weights(model).items()}
    addresses = [p.data_ptr() for p in model.parameters()]
    optimizer = make_optimizer("sgd", model.parameters(), lr=1.0, weight_decay=0.0)
    load_weights(model, new)
    assert [p.data_ptr() for p in model.parameters()] == addresses
    assert all((p == 0.25).all() for p in model.parameters())
    assert all(p.requires_grad for p in model.parameters())
    new["0.bias"].fill_(9)
    assert (model[0].bias == 0.25).all()  # the model holds a copy
    step(optimizer, model(torch.ones(1, 3)).sum())
    assert not (model[0].weight == 0.25).any()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.pop("0.bias"), "'0.bias'. on one side only"),
        (lambda w: w.update(extra=torch.ones(1)), "'extra'. on one side only"),
        (
            lambda w: w.update({"0.weight": torch.ones(1, 3)}),
            r"'0.weight' has shape \[1, 3\], expected \[2, 3\]",
        ),
        (lambda w: w.update({"0.weight": torch.ones(3)}), r"'0.weight' has shape \[3\]"),
    ],
)
def test_weights_of_another_model_are_refused_by_name(change, words):
    other = weights(small_model())
    change(other)
    with pytest.raises(ValueError, match=f"do not fit the model: .*{words}"):
        load_weights(small_model(), other)


# ---- substituted ----
def test_substituted_weights_are_used_inside_the_block_only():
    model, x = small_model(), torch.ones(1, 3)
    own, before = list(model.parameters()), model(x)
    zero = {name: torch.zeros_like(t) for name, t in weights(model).items()}
    with substituted(model, zero):
        assert torch.equal(model(x), torch.zeros(1, 2))
    assert torch.equal(model(x), before)
    assert all(a is b for a, b in zip(model.parameters(), own, strict=True))


def test_weights_that_are_not_substituted_stay():
    model, x = small_model(), torch.ones(1, 3)
    with substituted(model, {"1.bias": model[1].bias + 1}):
        shifted = model(x)
    assert torch.allclose(shifted, model(x) + 1)


def test_gradients_reach_the_substitutes_and_not_the_model():
    model = small_model()
    other = {name: t.clone().requires_grad_() for name, t in weights(model).items()}
    with substituted(model, other):
        model(torch.ones(1, 3)).sum().backward()
    assert all(t.grad is not None for t in other.values())
    assert all(p.grad is None for p in model.parameters())


def test_an_error_inside_the_block_restores_the_model():
    model = small_model()
    own = list(model.parameters())
    with (
        pytest.raises(RuntimeError, match="stop"),
        substituted(model, {"0.bias": torch.zeros(2)}),
    ):
        raise RuntimeError("stop")
    assert all(a is b for a, b in zip(model.parameters(), own, strict=True))


# ---- distances ----
def test_squared_distance_and_its_gradient():
    model = small_model()
    anchor = {name: t - 0.5 for name, t in weights(model).items()}
    distance = squared_distance(model, anchor)
    distance.backward()
    assert distance.item() == pytest.approx(0.25 * sum(p.numel() for p in model.parameters()))
    # The gradient is 2 (θ − anchor).
    assert all(torch.allclose(p.grad, torch.ones_like(p)) for p in model.parameters())
    assert squared_distance(model, weights(model)).item() == 0


def test_inner_product_and_its_gradient():
    model = small_model()
    direction = {
        name: torch.full_like(t, k + 1.0) for k, (name, t) in enumerate(weights(model).items())
    }
    product = inner_product(model, direction)
    product.backward()
    expected = sum((weights(model)[n] * d).sum().item() for n, d in direction.items())
    assert product.item() == pytest.approx(expected, rel=1e-6)
    assert all(torch.equal(p.grad, direction[name]) for name, p in model.named_parameters())
