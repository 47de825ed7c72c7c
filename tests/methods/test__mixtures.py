"""Mixtures, which FED-PUB and FedGTA share. Their own tests cover how they weight them."""

import torch

from fedloom.methods._shared.mixtures import mixtures


def models():
    return {
        name: {"layer": {"w": torch.full((2, 3), float(k))}, "b": torch.full((4,), 10.0 * k)}
        for k, name in enumerate("xyz")
    }


def test_a_mixture_is_the_sum_of_all_models_by_their_shares():
    share = torch.tensor([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0], [0.2, 0.3, 0.5]])
    mixed = mixtures(models(), share)
    assert list(mixed) == ["x", "y", "z"]
    for row, name in zip(share, mixed, strict=True):
        expected = (row * torch.arange(3)).sum()
        assert torch.allclose(mixed[name]["layer"]["w"], expected.expand(2, 3))
        assert torch.allclose(mixed[name]["b"], 10 * expected.expand(4))


def test_identity_shares_keep_models_and_equal_shares_average_them():
    alone = mixtures(models(), torch.eye(3))
    assert all(torch.equal(alone[name]["b"], own["b"]) for name, own in models().items())
    together = mixtures(models(), torch.full((3, 3), 1 / 3))
    assert all(torch.allclose(mixed["b"], torch.full((4,), 10.0)) for mixed in together.values())
