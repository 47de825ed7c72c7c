"""FedProto: class means, the alignment to them, and its limits."""

from dataclasses import replace

import torch

from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.core.message import flatten
from fedloom.experiments.run import run
from fedloom.methods.fedproto import FedProto

MODEL = "gcn-2x8"
OTHER = {"floor": 12}  # some clients have fewer items of a class


def client_of(federation, number=0, **facts):
    graph = federation.graphs[number]
    known = {"clients": ("0",), "models": (MODEL,), "dropout": 0.0} | facts
    return Client("0", graph, Facts(graph.num_features, graph.num_classes, graph.task, **known))


def weights_of(result):
    return {
        f"{owner}/{key}": t
        for owner, model in result.final_models.items()
        for key, t in flatten(model).items()
    }


def same(one, other, atol=0.0):
    one, other = weights_of(one), weights_of(other)
    assert one.keys() == other.keys()
    return all(torch.allclose(one[key], other[key], rtol=0, atol=atol) for key in one)


def test_without_pull_and_in_the_first_round_it_is_local_training(federation):
    settings = {"model": MODEL, "rounds": 3, "engine": "loop"}
    assert same(
        run("fedproto", federation, pull=0.0, **settings),
        run("local", federation, **settings),
        1e-6,
    )
    assert same(
        run("fedproto", federation, **(settings | {"rounds": 1})),
        run("local", federation, **(settings | {"rounds": 1})),
    )
    assert not same(
        run("fedproto", federation, **settings), run("local", federation, **settings), 1e-4
    )


def test_the_objective_is_ce_plus_the_mean_squared_distance(node_federation):
    client, method = client_of(node_federation), FedProto(pull=0.7)
    method.setup(client)
    graph, model = client.graph, client.state["model"]
    table, present = torch.randn(3, 8), torch.tensor([True, False, True])
    z = model.embed(graph)
    rows = [
        ((z[i] - table[graph.y[i]]) ** 2).mean()
        for i in graph.train.nonzero().flatten()
        if present[graph.y[i]]
    ]
    expected = client.loss(model(graph), graph) + 0.7 * torch.stack(rows).mean()
    assert torch.isclose(
        method.objective(client, graph, model, {"table": table, "present": present}), expected
    )


def test_the_server_takes_the_mean_over_all_training_items_of_a_class(node_federation):
    clients = [client_of(node_federation, number) for number in range(2)]
    method = FedProto(epochs=1)
    replies = []
    for client in clients:
        method.setup(client)
        replies.append(method.train(client))
    z = torch.cat([method.embeddings(c)[c.graph.train] for c in clients])
    y = torch.cat([c.graph.y[c.graph.train] for c in clients])
    sums, counts = (sum(reply[key] for reply in replies) for key in ("sums", "counts"))
    for c in range(3):
        assert torch.allclose(sums[c] / counts[c], z[y == c].mean(0), atol=1e-6)


def test_classes_with_fewer_items_than_the_floor_are_not_sent(node_federation):
    client, method = client_of(node_federation), FedProto(floor=9)
    method.setup(client)
    reply = method.train(client)
    held = torch.bincount(client.graph.y[client.graph.train], minlength=3)
    assert torch.equal(reply["counts"], torch.where(held >= 9, held, 0))
    assert (held < 9).any()
    assert not reply["sums"][held < 9].any()


def test_a_class_without_items_and_a_single_client(node_federation):
    graphs = tuple(replace(g, num_classes=5) for g in node_federation.graphs[:1])
    result = run(
        "fedproto",
        replace(node_federation, graphs=graphs, names=node_federation.names[:1], whole=None),
        model=MODEL,
        rounds=3,
    )
    assert result.summary["status"] == "completed"


def test_secure_runs_give_the_same_weights(node_federation):
    plain, secure = (
        run("fedproto", node_federation, model=MODEL, rounds=3, secure=secure)
        for secure in (False, True)
    )
    assert same(plain, secure, 1e-3)
