"""FedSGD: the federated step equals the central step."""

from dataclasses import replace

import pytest
import torch

from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.core.message import flatten
from fedloom.data.federation import disjoint_union
from fedloom.experiments.run import run
from fedloom.nn.training import make_optimizer, step


def test_equals_central_training_on_the_disjoint_union(federation):
    """Gradients of the summed loss, divided by all training items, equal the centralized ones."""
    rounds, lr = 5, 0.05
    result = run(
        "fedsgd", federation, model="gcn-2x8", dropout=0.0, rounds=rounds, lr=lr, weight_decay=1e-3
    )
    facts = Facts(
        federation.num_features,
        federation.num_classes,
        federation.task,
        federation.names,
        ("gcn-2x8",) * federation.num_clients,
        0.0,
    )
    pooled = Client(federation.names[0], disjoint_union(federation.graphs), facts)
    model = facts.build("gcn-2x8", "server")
    optimizer = make_optimizer("adam", model.parameters(), lr, 1e-3)
    for _ in range(rounds):
        step(optimizer, pooled.loss(model(pooled.graph), pooled.graph))
    for name, tensor in flatten(result.final_models["server"]).items():
        assert torch.allclose(tensor, dict(model.named_parameters())[name], atol=1e-5), name


def test_all_clients_have_the_same_model(node_federation):
    result = run("fedsgd", node_federation, model="gcn-2x8", rounds=2)
    assert result.summary["evaluation"] == "common"
    with pytest.raises(ValueError, match="common"):
        run("fedsgd", node_federation, model="gcn-2x8", rounds=1, evaluation="local")


def test_a_client_without_training_items_adds_nothing(node_federation):
    graphs = node_federation.graphs
    bare = replace(graphs[0], train=torch.zeros_like(graphs[0].train))
    settings = {"model": "gcn-2x8", "dropout": 0.0, "rounds": 2}
    with_bare = run("fedsgd", replace(node_federation, graphs=(bare, *graphs[1:])), **settings)
    without = run(
        "fedsgd",
        replace(node_federation, graphs=graphs[1:], names=node_federation.names[1:]),
        **settings,
    )
    for name, tensor in flatten(with_bare.final_models["server"]).items():
        assert torch.allclose(tensor, flatten(without.final_models["server"])[name], atol=1e-6)
