"""FedStar: structure features, the two channels, and which of them is shared."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.core.message import flatten
from fedloom.core.replies import Replies
from fedloom.data.federation import Federation
from fedloom.data.graph import Graph
from fedloom.errors import ConfigError
from fedloom.experiments.run import run
from fedloom.methods.fedstar import WALKERS, FedStar, return_probabilities, structure_of
from fedloom.nn.weights import load_weights, weights

pytestmark = pytest.mark.usefixtures("reference_engine")

QUICK = {"walk": 4, "degrees": 4}
SMALL = {"model": "gin-2x8", "rounds": 3, **QUICK}


def union(*sizes, seed=0):
    """Returns a union of random graphs of these sizes, with some nodes without neighbours."""
    rng, edges, start = torch.Generator().manual_seed(seed), [], 0
    for n in sizes:
        upper = torch.triu(torch.rand(n, n, generator=rng) < min(1.0, 2 / n), 1)
        edges.append((upper | upper.T).nonzero().T + start)
        start += n
    batch = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    y = torch.arange(len(sizes)) % 2
    x = torch.rand(start, 5, generator=rng)
    return Graph(
        x=x,
        edge_index=torch.cat(edges, 1),
        y=y,
        num_classes=2,
        train=torch.ones(len(sizes), dtype=torch.bool),
        batch=batch,
    )


def adjacency(graph):
    return torch.zeros(graph.num_nodes, graph.num_nodes).index_put(
        (graph.edge_index[1], graph.edge_index[0]), torch.ones(())
    )


def facts_of(federation, dropout=0.5, model="gin-2x8"):
    models = (model,) * federation.num_clients
    return Facts(
        federation.num_features, federation.num_classes, "graph", federation.names, models, dropout
    )


def test_return_probabilities_are_diagonals_of_powers():
    graph = union(7, 1, WALKERS + 9, 3, 2 * WALKERS + 1, WALKERS)
    A = adjacency(graph)
    degree = A.sum(1, keepdim=True)
    assert (degree == 0).any()  # no walk returns from there
    step, power = A / degree.clamp(min=1), torch.eye(graph.num_nodes)
    out = return_probabilities(graph, 6)
    for k in range(6):
        power = power @ step
        assert torch.allclose(out[:, k], power.diagonal(), atol=1e-6)
    assert not out[:, 0].any()  # a step never stays
    assert (out[:, 1] > 0).any()


def test_structure_is_returns_and_degrees_and_is_cached():
    graph = union(9, 30)
    s, degree = structure_of(graph, 5, 3), adjacency(graph).sum(1)
    assert torch.equal(s[:, :5], return_probabilities(graph, 5))
    for node, row in enumerate(s[:, 5:]):
        assert row.tolist() == [
            float(column == min(max(int(degree[node]), 1), 3) - 1) for column in range(3)
        ]
    assert structure_of(graph, 5, 3) is s
    looped = torch.cat([graph.edge_index, torch.zeros(2, 1, dtype=torch.int64)], 1)
    # A self-loop is not a step.
    assert torch.equal(structure_of(replace(graph, edge_index=looped), 5, 3), s)


def test_the_model_by_hand():
    graph = union(6, 4)
    model = FedStar(walk=3, degrees=2).build(Facts(5, 2, "graph", ("0",), ("gin-2x8",)), "x")
    A, w = adjacency(graph), dict(model.named_parameters())
    loops = A + torch.eye(10)
    S = loops / (loops.sum(1, keepdim=True) * loops.sum(0, keepdim=True)).sqrt()

    def dense(h, name):
        return h @ w[f"{name}.weight"] + w[f"{name}.bias"]

    s, h = dense(structure_of(graph, 3, 2), "structure.0"), dense(graph.x, "features.0")
    for l in (1, 2):
        both = torch.cat([h, s], 1)
        inner = (A + torch.eye(10)) @ both @ w[f"features.{l}.weight"] + w[f"features.{l}.bias"]
        h = F.relu(dense(F.relu(F.layer_norm(inner, (8,))), f"features.{l}.outer"))
        s = torch.tanh(S @ s @ w[f"structure.{l}.weight"] + w[f"structure.{l}.bias"])
    joined = dense(torch.cat([h, s], 1), "join")
    pooled = torch.stack([joined[:6].sum(0), joined[6:].sum(0)])
    z = F.relu(dense(pooled, "post"))
    assert torch.allclose(model.embed(graph), z, atol=1e-5)
    assert torch.allclose(model(graph), dense(z, "classifier"), atol=1e-5)
    # Dropout only with a generator.
    assert not torch.equal(model(graph, torch.Generator().manual_seed(0)), model(graph))


def test_the_loss_reaches_every_weight_of_both_channels(graph_federation):
    client, method = (
        Client("0", graph_federation.graphs[0], facts_of(graph_federation, dropout=0.0)),
        FedStar(),
    )
    method.setup(client)
    model = client.state["model"]
    method.objective(client, client.graph, model, {}).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_features_do_not_enter_the_structure_channel():
    graph = union(8, 5)
    other = replace(graph, x=torch.rand_like(graph.x))
    model = FedStar().build(Facts(5, 2, "graph", ("0",), ("gin-3x8",)), "x")
    one, another = model.nodes(graph, None), model.nodes(other, None)
    assert torch.equal(one[:, 8:], another[:, 8:])
    assert not torch.equal(one[:, :8], another[:, :8])


def test_it_is_fedavg_of_only_the_structure_channel(graph_federation, trainings):
    exchanges = trainings()
    result = run("fedstar", graph_federation, **SMALL)
    names = {
        name
        for sent, replies in exchanges
        for message in (*sent.values(), *replies.values())
        for name in flatten(message)
    }
    structure = {
        key.removeprefix("structure.")
        for key in result.final_models["0"]
        if key.startswith("structure.")
    }
    assert names == {f"model/{key}" for key in structure}
    facts, method = facts_of(graph_federation), FedStar(**QUICK)
    clients = {
        name: Client(name, g, facts)
        for name, g in zip(graph_federation.names, graph_federation.graphs, strict=True)
    }
    size = {name: torch.tensor(client.graph.num_items) for name, client in clients.items()}
    shared = weights(method.build(facts, "server").structure)
    for client in clients.values():
        method.setup(client)
    for _ in range(3):
        for client in clients.values():
            load_weights(client.state["model"].structure, shared)
            method.descend(client, client.state["model"])
        shared = Replies({n: weights(c.state["model"].structure) for n, c in clients.items()}).mean(
            size
        )
    for name, client in clients.items():
        assert all(
            torch.equal(t, result.final_models[name][key])
            for key, t in weights(client.state["model"]).items()
        )


def test_traffic_is_the_structure_channel(graph_federation):
    traffic = run("fedstar", graph_federation, **SMALL).traffic
    channel = (4 + 4) * 8 + 8 + 2 * (8 * 8 + 8)
    assert (
        traffic["phases"]["train"]["scalars_up"]
        == traffic["phases"]["train"]["scalars_down"]
        == 3 * 3 * channel
    )


def test_one_client_trains_alone(graph_federation):
    alone = Federation(graph_federation.graphs[:1])
    result = run("fedstar", alone, **SMALL)
    client, method = Client("0", alone.graphs[0], facts_of(alone)), FedStar(**QUICK)
    method.setup(client)
    load_weights(
        client.state["model"].structure, weights(method.build(client.facts, "server").structure)
    )
    for _ in range(3):
        method.descend(client, client.state["model"])
    assert all(
        torch.allclose(t, result.final_models["0"][key], atol=1e-6)
        for key, t in weights(client.state["model"]).items()
    )


def test_a_client_without_labels_takes_part(graph_federation):
    first, *rest = graph_federation.graphs
    bare = replace(first, train=torch.zeros_like(first.train), test=first.test | first.train)
    result = run("fedstar", replace(graph_federation, graphs=(bare, *rest), whole=None), **SMALL)
    assert all(torch.isfinite(t).all() for t in flatten(result.final_models).values())


def test_unsupported_models_and_settings_are_refused_by_name(node_federation, graph_federation):
    with pytest.raises(ConfigError, match="does graph tasks"):
        run("fedstar", node_federation, **SMALL)
    for model in ("gin-2x8+jk", "gin-2x16-8", "gin-2x8+norm"):
        with pytest.raises(
            ConfigError, match=r"fedstar's model takes layers and one width, e\.g\. 'gin-2x8'"
        ):
            run("fedstar", graph_federation, **{**SMALL, "model": model})
