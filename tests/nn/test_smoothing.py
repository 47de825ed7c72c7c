"""Smoothed features: their values and what the graph caches."""

from __future__ import annotations

import pytest
import torch
from tests.nn.small_models import made, random_graph

from fedloom.nn.smoothing import power, propagated, smoothed


def test_propagated_features_are_cached_and_extended() -> None:
    graph = random_graph()
    short, long = propagated(graph, "sym", 1), propagated(graph, "sym", 3)
    assert [len(short), len(long)] == [2, 4]
    assert all(one is other for one, other in zip(short, long, strict=False))
    S = graph.adjacency("sym").dense()
    torch.testing.assert_close(long[3], S @ S @ S @ graph.x)


def test_smoothed_features_are_cached_without_lower_hops() -> None:
    graph = random_graph()
    S = graph.adjacency("sym").dense()
    third = smoothed(graph, power(3))
    torch.testing.assert_close(third, S @ S @ S @ graph.x)
    assert smoothed(graph, power(3)) is third
    assert [key for key in graph._cache if "smoothed" in key] == [("smoothed", power(3))]
    torch.testing.assert_close(smoothed(graph, power(4)), S @ third)
    torch.testing.assert_close(
        smoothed(graph, (0.5, 0.0, 2.0)), 0.5 * graph.x + 2 * S @ S @ graph.x
    )


@pytest.mark.parametrize("name", ["sgc", "ssgc", "sign", "gamlp"])
def test_smoothing_before_and_after_the_product_agree(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, outputs = made(f"{name}-3x16"), []
    for keep in (True, False):
        monkeypatch.setattr("fedloom.nn.model.caching_pays", lambda *_, keep=keep: keep)
        outputs.append(model(random_graph(directed=True)))
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)
