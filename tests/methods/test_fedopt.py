"""FedOpt: the server's Adam."""

import torch

from fedloom.core.message import flatten
from fedloom.experiments.run import run


def test_without_momentum_and_with_huge_tau_it_is_a_scaled_fedavg_step(node_federation):
    """β = 0 and τ far above |Δ| give θ + (η_s/τ) Δ (√v + τ ≈ τ + |Δ|): with η_s = τ, FedAvg."""
    settings = {"model": "gcn-2x8", "rounds": 1}
    avg = run("fedavg", node_federation, **settings)
    opt = run("fedopt", node_federation, server_lr=1e4, tau=1e4, beta1=0.0, beta2=0.0, **settings)
    for name, tensor in flatten(opt.final_models["server"]).items():
        assert torch.allclose(tensor, flatten(avg.final_models["server"])[name], atol=1e-4)


def test_two_rounds_by_hand(node_federation, monkeypatch):
    from fedloom.core.server import Server

    averages, original = [], Server.mean
    monkeypatch.setattr(
        Server,
        "mean",
        lambda self, *a, **k: averages.append((k["model"], m := original(self, *a, **k))) or m,
    )
    result = run("fedopt", node_federation, model="gcn-2x8", rounds=2, server_lr=0.05)
    m = v = None
    for before, after in averages:
        theta = flatten(before)
        delta = {k: t - theta[k] for k, t in flatten(after["model"]).items()}
        m = {k: (0.9 * m[k] if m else 0) + 0.1 * d for k, d in delta.items()}
        v = {k: 0.99 * (v[k] if v else 1e-6) + 0.01 * d**2 for k, d in delta.items()}
        theta = {k: t + 0.05 * m[k] / (v[k].sqrt() + 1e-3) for k, t in theta.items()}
    for name, tensor in flatten(result.final_models["server"]).items():
        assert torch.allclose(tensor, theta[name], atol=1e-5)
