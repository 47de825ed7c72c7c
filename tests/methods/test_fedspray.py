"""FedSpray: targets and both losses by hand, where gradients go, the sums, and its limits."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.core.message import flatten
from fedloom.data.federation import Federation
from fedloom.data.graph import Graph
from fedloom.errors import ConfigError
from fedloom.experiments.run import run
from fedloom.methods.fedspray import FeatureStructure, FedSpray, mean_of_sums, scaled, targets
from fedloom.nn.weights import weights

pytestmark = pytest.mark.usefixtures("reference_engine")

MODEL = "gcn-2x8"
SMALL = {"model": MODEL, "rounds": 3, "width": 5}
QUICK = {"width": 5, "sure": 0.4}


def small_graph():
    """Returns five nodes. Nodes 0 and 1 have labels, of classes 0 and 2 of three; 4 has no edge."""
    rng = torch.Generator().manual_seed(0)
    return Graph(
        torch.randn(5, 4, generator=rng),
        torch.tensor([[0, 1, 1, 2, 2, 3], [1, 0, 2, 1, 3, 2]]),
        torch.tensor([0, 2, 1, 1, 0]),
        3,
        train=torch.tensor([True, True, False, False, False]),
    )


def scene(graph, models=(MODEL,), **settings):
    """Returns a method and a client after setup, with an encoder whose proxies are not 0."""
    facts = Facts(graph.num_features, graph.num_classes, "node", ("0",), models, dropout=0.0)
    client, method = Client("0", graph, facts), FedSpray(width=5, **settings)
    method.setup(client)
    with torch.no_grad():
        client.state["encoder"].proxies.copy_(
            torch.randn(graph.num_classes, 5, generator=torch.Generator().manual_seed(1))
        )
    return method, client


def gap(one, other, owners):
    first, second = (
        flatten({owner: result.final_models[owner] for owner in owners}) for result in (one, other)
    )
    assert first.keys() == second.keys()
    return max(float((first[key] - second[key]).abs().max()) for key in first)


def by_hand(encoder, graph):
    """Returns e, r and p of every node, computed one at a time."""
    w = weights(encoder)
    rows = []
    for i in range(graph.num_nodes):
        e = torch.relu(graph.x[i] @ w["features.layers.0.weight"] + w["features.layers.0.bias"])
        r = torch.softmax(e @ w["features.classifier.weight"] + w["features.classifier.bias"], 0)
        s = (
            w["proxies"][graph.y[i]]
            if graph.train[i]
            else sum(r[c] * w["proxies"][c] for c in range(graph.num_classes))
        )
        rows.append((r, torch.softmax((e + s) @ w["structure.weight"] + w["structure.bias"], 0)))
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def kl(a, b):
    return (a * (a / b).log()).sum(1).mean()


# ---- the client's side ----
def test_targets_by_hand():
    _, client = scene(small_graph())
    encoder, graph = client.state["encoder"], client.graph
    r, p = by_hand(encoder, graph)
    # One of the three unlabelled nodes is less certain.
    t = float(r.amax(1)[2:].sort().values[1]) - 1e-4
    got = targets(encoder, graph, t)
    assert torch.allclose(got["logits"].softmax(1), p, atol=1e-6)
    assert got["reliable"].tolist() == (graph.train | (r.amax(1) > t)).tolist()
    assert int(got["reliable"].sum()) == 4


def test_thresholds_at_both_ends():
    _, client = scene(small_graph())
    for t, reliable in ((0.0, torch.ones(5, dtype=torch.bool)), (1.0, client.graph.train)):
        assert torch.equal(targets(client.state["encoder"], client.graph, t)["reliable"], reliable)


def test_both_losses_by_hand():
    method, client = scene(small_graph(), pull=0.7, match=0.3)
    model, encoder, graph = client.state["model"], client.state["encoder"], client.graph
    r, p = by_hand(encoder, graph)
    q = model(graph).softmax(1)
    received, own = targets(encoder, graph, 0.4), graph.train
    of_own = -(q[0, 0].log() + q[1, 2].log()) / 2 + 0.7 * kl(
        p[received["reliable"]], q[received["reliable"]]
    )
    of_encoder = -(r[0, 0].log() + r[1, 2].log()) / 2 + 0.3 * kl(q[own], p[own])
    assert torch.isclose(method.objective(client, graph, model, received), of_own, atol=1e-6)
    assert torch.isclose(
        method.encoder_objective(client, graph, model(graph)), of_encoder, atol=1e-6
    )


def test_gradients_reach_only_the_student():
    method, client = scene(small_graph())
    model, encoder, graph = client.state["model"], client.state["encoder"], client.graph
    method.objective(client, graph, model, targets(encoder, graph, 0.4)).backward()
    assert model.layers[0].weight.grad.abs().sum() > 0
    assert all(parameter.grad is None for parameter in encoder.parameters())
    model.zero_grad()
    method.encoder_objective(client, graph, model(graph)).backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.grad.abs().sum() > 0 for parameter in encoder.parameters())
    assert encoder.proxies.grad[1].eq(0).all()  # of a class that the client does not have
    assert (encoder.proxies.grad[[0, 2]] != 0).any(1).all()


def test_each_term_has_an_effect_alone():
    """λ_1 alone changes the own model's gradient; λ_2 alone reaches the proxies."""
    for term in ({"pull": 1.0, "match": 0.0}, {"pull": 0.0, "match": 1.0}):
        method, client = scene(small_graph(), **term)
        model, encoder, graph = client.state["model"], client.state["encoder"], client.graph
        extra = method.objective(client, graph, model, targets(encoder, graph, 0.4)) - client.loss(
            model(graph), graph
        )
        extra.backward()
        assert bool(model.layers[0].weight.grad.abs().sum() > 0) == (term["pull"] > 0)
        method.encoder_objective(client, graph, model(graph)).backward()
        assert bool(encoder.proxies.grad.abs().sum() > 0) == (term["match"] > 0)


def test_hidden_labels_are_not_used():
    _, client = scene(small_graph())
    graph = client.graph
    assert (graph.y[2:] == -1).all()
    one, other = (
        targets(
            client.state["encoder"],
            replace(graph, y=torch.where(graph.train, graph.y, hidden)),
            0.5,
        )
        for hidden in (-1, 1)
    )
    assert torch.equal(one["logits"], other["logits"])


def test_only_proxies_of_present_classes_change():
    method, client = scene(small_graph())
    sent = weights(FeatureStructure(client.facts, 5))
    sent["proxies"] = torch.arange(15.0).view(3, 5)
    reply = method.train(client, {name: tensor.clone() for name, tensor in sent.items()})
    assert reply["counts"].tolist() == [1, 0, 1]
    assert torch.equal(client.state["encoder"].proxies[1], sent["proxies"][1])
    assert torch.equal(reply["model"]["proxies"][1], torch.zeros(5))
    assert (reply["model"]["proxies"][0] != sent["proxies"][0]).all()
    assert torch.equal(
        reply["model"]["structure.weight"], 2 * client.state["encoder"].structure.weight
    )


# ---- the server's side ----
def test_means_by_hand():
    rng = torch.Generator().manual_seed(0)
    first, second, last = (
        {"proxies": torch.randn(3, 2, generator=rng), "w": torch.randn(4, generator=rng)}
        for _ in range(3)
    )
    one, other = torch.tensor([3, 0, 0]), torch.tensor([1, 4, 0])
    a, b = scaled(first, one), scaled(second, other)
    mean = mean_of_sums({name: a[name] + b[name] for name in a}, one + other, last)
    assert torch.allclose(mean["w"], (3 * first["w"] + 5 * second["w"]) / 8)
    assert torch.allclose(mean["proxies"][0], (3 * first["proxies"][0] + second["proxies"][0]) / 4)
    assert torch.allclose(mean["proxies"][1], second["proxies"][1])
    assert torch.equal(mean["proxies"][2], last["proxies"][2])  # no client has the class


def test_means_without_any_labels_keep_the_last_model():
    rng = torch.Generator().manual_seed(0)
    last = {"proxies": torch.randn(3, 2, generator=rng), "w": torch.randn(4, generator=rng)}
    counts = torch.zeros(3, dtype=torch.int64)
    kept = mean_of_sums(scaled(last, counts), counts, last)
    assert all(torch.equal(kept[name], last[name]) for name in last)


def test_the_download_is_the_mean_of_the_uploads(node_federation, trainings):
    exchanges = trainings()
    run("fedspray", node_federation, **SMALL)
    assert len(exchanges) == 3
    size = 12 * 5 + 5 + 2 * (5 * 3 + 3) + 3 * 5
    for (sent, replies), (later, _) in pairwise(exchanges):
        assert all(sum(t.numel() for t in flatten(m).values()) == size for m in sent.values())
        counts = sum(reply["counts"] for reply in replies.values())
        assert (
            counts.tolist()
            == sum(
                torch.bincount(g.y[g.train], minlength=3) for g in node_federation.graphs
            ).tolist()
        )
        proxies = sum(reply["model"]["proxies"] for reply in replies.values()) / counts.unsqueeze(1)
        assert torch.allclose(later["0"]["model"]["proxies"], proxies, atol=1e-6)
    assert (exchanges[0][0]["0"]["model"]["proxies"] == 0).all()
    assert (exchanges[2][0]["0"]["model"]["proxies"] != 0).any(1).all()


# ---- limits ----
def test_without_the_pull_it_is_local_training(node_federation):
    names = node_federation.names
    plain = run("local", node_federation, model=MODEL, rounds=3)
    assert gap(run("fedspray", node_federation, pull=0.0, **SMALL), plain, names) == 0
    assert gap(run("fedspray", node_federation, pull=1.0, **SMALL), plain, names) > 1e-4


def test_own_models_may_have_any_architecture_and_width(node_federation, trainings):
    exchanges = trainings()
    result = run(
        "fedspray", node_federation, **{**SMALL, "model": "gcn-2x8,gat-2x16,sage-2x24,gin-2x8"}
    )
    assert result.summary["status"] == "completed"
    assert (
        len({tuple(m["model"]["proxies"].shape) for sent, _ in exchanges for m in sent.values()})
        == 1
    )


# ---- bad input ----
def test_a_client_of_one_class_changes_only_that_proxy(node_federation, trainings):
    first, *rest = node_federation.graphs
    one = replace(
        first, train=first.train & (first.y == 0), test=first.test | (first.train & (first.y != 0))
    )
    exchanges = trainings()
    run("fedspray", replace(node_federation, graphs=(one, *rest), whole=None), **SMALL)
    for _, replies in exchanges:
        assert (replies["0"]["counts"] > 0).tolist() == [True, False, False]
        assert (replies["0"]["model"]["proxies"][1:] == 0).all()


@pytest.mark.parametrize("inductive", [False, True])
def test_a_client_without_labels_adds_nothing(node_federation, inductive, trainings):
    first, *rest = node_federation.graphs
    bare = replace(first, train=torch.zeros_like(first.train))
    exchanges = trainings()
    run(
        "fedspray",
        replace(node_federation, graphs=(bare, *rest), whole=None, inductive=inductive),
        **SMALL,
    )
    assert all(
        (tensor == 0).all() for _, replies in exchanges for tensor in flatten(replies["0"]).values()
    )


def test_a_federation_without_labels_runs(node_federation, trainings):
    bare = Federation(
        tuple(replace(g, train=torch.zeros_like(g.train)) for g in node_federation.graphs)
    )
    exchanges = trainings()
    run("fedspray", bare, **SMALL)
    one, other = (flatten(sent["0"]) for sent in (exchanges[0][0], exchanges[-1][0]))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_isolated_nodes_have_targets_too(node_federation):
    alone = replace(node_federation.graphs[0], edge_index=torch.zeros(2, 0, dtype=torch.int64))
    result = run("fedspray", Federation((alone, *node_federation.graphs[1:])), **SMALL)
    assert all(t.isfinite().all() for t in flatten(result.final_models).values())


@pytest.mark.parametrize(
    ("field", "value"),
    [("sure", 1.5), ("width", 0), ("proxy_lr", 0.0), ("pull", -1.0), ("match", -0.1)],
)
def test_invalid_settings_are_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=rf"method\.{field}"):
        FedSpray(**{field: value})


def test_graph_tasks_are_refused(graph_federation):
    with pytest.raises(ConfigError, match="node"):
        run("fedspray", graph_federation, **SMALL)
