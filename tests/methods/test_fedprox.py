"""FedProx: its limits."""

import torch

from fedloom.core.message import flatten, tree_map
from fedloom.experiments.run import run
from fedloom.nn.build import build_model
from fedloom.nn.weights import squared_distance, weights


def test_mu_zero_is_fedavg_bit_for_bit(federation):
    settings = {"model": "gcn-2x8", "rounds": 4, "seed": 3}
    prox, avg = (
        run("fedprox", federation, mu=0.0, **settings),
        run("fedavg", federation, **settings),
    )
    assert prox.summary["history_hash"] == avg.summary["history_hash"]


def test_a_large_mu_keeps_clients_at_the_global_weights(node_federation):
    def drift(mu):
        result = run(
            "fedprox", node_federation, model="gcn-2x8", rounds=5, mu=mu, optimizer="sgd", lr=0.01
        )
        server = flatten(result.final_models["server"])
        return sum(
            float((flatten(result.final_models[c])[k] - t).square().sum())
            for c in node_federation.names
            for k, t in server.items()
        )

    assert drift(50.0) < 0.5 * drift(0.0)


def test_the_distance_has_its_square_and_its_gradient():
    model = build_model("gcn-2x4", 3, 2, seed=0)
    anchor = tree_map(lambda t: t - 2.0, weights(model))
    distance = squared_distance(model, anchor)
    assert torch.isclose(distance, torch.tensor(4.0 * sum(p.numel() for p in model.parameters())))
    distance.backward()
    assert all(torch.allclose(p.grad, torch.full_like(p, 4.0)) for p in model.parameters())
