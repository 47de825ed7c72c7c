"""LG-FedAvg: which part travels, its mean by hand, and its limits."""

from dataclasses import replace

import pytest
import torch

from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.core.message import flatten
from fedloom.data.federation import Federation
from fedloom.engines.loop import Engine as Loop
from fedloom.errors import ConfigError
from fedloom.experiments.run import run
from fedloom.methods import lg_fedavg
from fedloom.methods.lg_fedavg import first_head
from fedloom.methods.local import Local
from fedloom.nn.weights import extractor_weights, load_weights, weights

CONTRACT_MODELS = "gcn-2x8+linear,gat-2x8+linear,sage-2x8+linear"
SMALL = {"model": "gcn-2x8", "rounds": 3}


def facts_of(federation, *models):
    dealt = tuple(models[k % len(models)] for k in range(federation.num_clients))
    return Facts(
        federation.num_features, federation.num_classes, federation.task, federation.names, dealt
    )


def by_hand(federation, head, *models, rounds=3):
    """Returns the clients' models after local training from the mean head, weighted by items."""
    facts, local = facts_of(federation, *models), Local()
    clients = [
        Client(name, graph, facts)
        for name, graph in zip(federation.names, federation.graphs, strict=True)
    ]
    n = torch.tensor([float(client.graph.num_items) for client in clients])
    for client in clients:
        local.setup(client)
    for _ in range(rounds):
        for client in clients:
            load_weights(client.state["model"].classifier, head)
            local.train(client)
        trained = [weights(client.state["model"].classifier) for client in clients]
        head = {
            key: sum(share * t[key] for share, t in zip(n / n.sum(), trained, strict=True))
            for key in head
        }
    return {client.name: weights(client.state["model"]) for client in clients}


def gap(one, other):
    one, other = flatten(one), flatten(other)
    assert one.keys() == other.keys()
    return max(float((one[key] - other[key]).abs().max()) for key in one)


@pytest.mark.parametrize("models", ["gcn-2x8", CONTRACT_MODELS])
def test_a_mean_head_on_private_extractors_by_hand(federation, models):
    specs = models.split(",")
    head = first_head(facts_of(federation, *specs))
    result = run("lg-fedavg", federation, model=models, rounds=3)
    assert gap(result.models, by_hand(federation, head, *specs)) < 1e-6


def test_fedgen_with_alpha_zero_is_the_same(federation):
    settings = {"model": "gcn-2x8+linear", "rounds": 3}
    silent = run("fedgen", federation, alpha=0.0, generator_steps=1, hidden=4, **settings)
    assert gap(run("lg-fedavg", federation, **settings).models, silent.models) < 1e-6


def test_one_client_trains_as_in_local_except_for_its_initial_head(node_federation, monkeypatch):
    alone = Federation(node_federation.graphs[:1])
    plain = run("local", alone, **SMALL)
    assert gap(run("lg-fedavg", alone, **SMALL).models, plain.models) > 1e-3
    own = weights(facts_of(alone, "gcn-2x8").build("gcn-2x8", "0", "init").classifier)
    monkeypatch.setattr(lg_fedavg, "first_head", lambda facts: own)
    assert gap(run("lg-fedavg", alone, **SMALL).models, plain.models) == 0


def test_only_heads_travel_and_extractors_stay_different(federation, monkeypatch):
    exchanges, original = [], Loop.call
    monkeypatch.setattr(
        Loop,
        "call",
        lambda self, phase, sent: (
            exchanges.append((phase, sent, r := original(self, phase, sent))) or r
        ),
    )
    result = run("lg-fedavg", federation, model=CONTRACT_MODELS, rounds=3)
    for phase, sent, replies in exchanges:
        names = {
            name for message in (*sent.values(), *replies.values()) for name in flatten(message)
        }
        assert (
            names
            == {
                "setup": set(),
                "size": {"size"},
                "train": {"head/weight", "head/bias"},
                "evaluate": {"val", "test", "auc", "probabilistic", "loss"},
            }[phase]
        )
    same = run("lg-fedavg", federation, **SMALL)
    first, second = (extractor_weights(same.models[c]) for c in ("0", "1"))
    assert all(not torch.equal(first[key], second[key]) for key in first)
    assert result.summary["status"] == "completed"


def test_traffic_is_the_heads(node_federation):
    """2(pC + C) per client and round, and n_k once."""
    traffic = run("lg-fedavg", node_federation, model=CONTRACT_MODELS, rounds=3).traffic
    p, C, K, R = 8, 3, 4, 3
    assert (
        traffic["phases"]["train"]["scalars_up"]
        == traffic["phases"]["train"]["scalars_down"]
        == K * R * (p * C + C)
    )
    assert traffic["phases"]["size"]["scalars_up"] == K
    assert traffic["scalars_up"] + traffic["scalars_down"] == K * R * 2 * (p * C + C) + K


def test_secure_runs_with_different_models_give_the_same_weights(node_federation):
    secure, plain = (
        run("lg-fedavg", node_federation, model=CONTRACT_MODELS, rounds=2, secure=secure)
        for secure in (True, False)
    )
    assert gap(secure.models, plain.models) < 2e-5


# ---- bad input ----
@pytest.mark.parametrize(
    "models", ["gcn-2x8,gat-2x8", "gcn-2x8+linear,gcn-2x16+linear", "sage-2x8+linear,sage-2x8"]
)
def test_heads_that_differ_in_shape_are_refused_before_anything_is_sent(
    node_federation, monkeypatch, models
):
    monkeypatch.setattr(Loop, "call", lambda self, phase, sent: pytest.fail(f"{phase} was sent"))
    with pytest.raises(
        ConfigError, match=r"model: lg-fedavg averages heads.*'\+linear'"
    ) as refusal:
        run("lg-fedavg", node_federation, model=models, rounds=3)
    assert all(spec in str(refusal.value) for spec in models.split(","))


def test_heads_are_linear_in_a_graph_task(graph_federation):
    assert (
        run("lg-fedavg", graph_federation, model="gin-2x8,gat-2x8,sage-2x8", rounds=2).summary[
            "status"
        ]
        == "completed"
    )


def test_a_client_without_labels_returns_the_head_unchanged(node_federation, monkeypatch):
    graphs, exchanges, original = node_federation.graphs, [], Loop.call
    bare = replace(graphs[0], train=torch.zeros_like(graphs[0].train))
    monkeypatch.setattr(
        Loop,
        "call",
        lambda self, phase, sent: (
            exchanges.append((phase, sent, r := original(self, phase, sent))) or r
        ),
    )
    result = run(
        "lg-fedavg", replace(node_federation, graphs=(bare, *graphs[1:]), whole=None), **SMALL
    )
    untrained = weights(facts_of(node_federation, "gcn-2x8").build("gcn-2x8", "0", "init"))
    assert gap(extractor_weights(result.models["0"]), extractor_weights(untrained)) == 0
    rounds = [(sent["0"], replies["0"]) for phase, sent, replies in exchanges if phase == "train"]
    assert all(gap(sent, reply) == 0 for sent, reply in rounds)


def test_a_client_of_one_class_and_isolated_nodes(node_federation):
    first, *rest = node_federation.graphs
    kept = first.train & (first.y == 0)
    single = replace(
        first,
        train=kept,
        test=first.test | (first.train & ~kept),
        edge_index=first.edge_index[:, :0],
    )
    result = run("lg-fedavg", replace(node_federation, graphs=(single, *rest), whole=None), **SMALL)
    assert all(t.isfinite().all() for t in flatten(result.models).values())
