"""FedDC: drift and its correction as in the paper."""

import torch

from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.core.message import flatten
from fedloom.engines.loop import Engine
from fedloom.experiments.run import run
from fedloom.methods.feddc import FedDC


def test_drift_is_the_sum_of_updates_and_is_added_to_the_upload(node_federation, monkeypatch):
    exchanges, original = [], Engine.call
    monkeypatch.setattr(
        Engine,
        "call",
        lambda self, phase, sent: (
            exchanges.append((phase, sent, r := original(self, phase, sent))) or r
        ),
    )
    run("feddc", node_federation, model="gcn-2x8", rounds=3)
    drift = {}
    for _, sent, replies in (s for s in exchanges if s[0] == "train"):
        for client, reply in replies.items():
            for name, update in reply["update"].items():
                drift[client, name] = drift.get((client, name), 0) + update
                local = sent[client]["model"][name] + update
                assert torch.allclose(
                    reply["corrected"][name], local + drift[client, name], atol=1e-6
                )


def test_the_objective_is_eq_4(node_federation):
    graph = node_federation.graphs[0]
    client = Client(
        "0",
        graph,
        Facts(graph.num_features, graph.num_classes, "node", ("0",), ("gcn-2x8",), dropout=0.0),
    )
    method = FedDC(alpha=0.3, epochs=2, lr=0.05)
    method.setup(client)
    model = client.state["model"]
    theta = {k: p.detach().clone() for k, p in model.named_parameters()}
    globe, drift, last, mean = (
        {k: torch.randn_like(t) for k, t in theta.items()} for _ in range(4)
    )
    client.state["anchor"] = {k: globe[k] - drift[k] for k in theta}
    client.state["direction"] = {k: last[k] - mean[k] for k in theta}
    penalty = sum((drift[k] + theta[k] - globe[k]).square().sum() for k in theta)
    inner = sum((theta[k] * (last[k] - mean[k])).sum() for k in theta)
    expected = (
        client.loss(model(client.graph), client.graph) + 0.3 / 2 * penalty + inner / (2 * 0.05)
    )
    assert torch.isclose(method.objective(client, client.graph, model, globe), expected, rtol=1e-5)


def test_traffic_is_two_models_each_way(node_federation):
    one, other = (
        run(m, node_federation, model="gcn-2x8", rounds=2).traffic["phases"]["train"]
        for m in ("feddc", "fedavg")
    )
    assert (one["scalars_up"], one["scalars_down"]) == (
        2 * other["scalars_up"],
        2 * other["scalars_down"],
    )


def test_it_learns(node_federation):
    result = run("feddc", node_federation, model="gcn-2x16", rounds=60, evaluate_every=60)
    assert result.history[-1]["accuracy"] > 0.5  # chance is a third
    assert all(torch.isfinite(t).all() for t in flatten(result.final_models["server"]).values())
