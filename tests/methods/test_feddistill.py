"""FedDistill: class means, their average, the two distances, and the limits."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.core.message import flatten
from fedloom.data.federation import Federation
from fedloom.engines.loop import Engine as Loop
from fedloom.experiments.run import run
from fedloom.methods.feddistill import FedDistill

pytestmark = pytest.mark.usefixtures("reference_engine")

SMALL = {"model": "gcn-2x8", "rounds": 3}
OTHER = {"floor": 12}  # some clients have fewer items of a class


def same(one, other):
    one, other = flatten(one.final_models), flatten(other.final_models)
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def lone_client(graph, dropout=0.0):
    facts = Facts(
        graph.num_features, graph.num_classes, graph.task, ("0",), ("gcn-2x8",), dropout=dropout
    )
    client = Client("0", graph, facts)
    FedDistill().setup(client)
    return client, client.state["model"]


def record_exchanges(monkeypatch):
    """Returns every exchange of a run in `train`: (what was sent, what came back)."""
    exchanges, original = [], Loop.call

    def call(self, phase, sent):
        replies = original(self, phase, sent)
        if phase == "train":
            exchanges.append((next(iter(sent.values())), dict(replies)))
        return replies

    monkeypatch.setattr(Loop, "call", call)
    return exchanges


def without_class(graph, c):
    """Returns the graph without training items of class c."""
    gone = graph.train & (graph.y == c)
    return replace(graph, train=graph.train & ~gone, test=graph.test | gone)


def test_weight_zero_is_local_and_any_other_is_not(federation):
    local = run("local", federation, **SMALL)
    assert same(local, run("feddistill", federation, weight=0.0, **SMALL))
    assert not same(local, run("feddistill", federation, **SMALL))


def test_the_first_round_is_local(node_federation):
    settings = {**SMALL, "rounds": 1}
    assert same(
        run("local", node_federation, **settings),
        run("feddistill", node_federation, weight=9.0, **settings),
    )


def test_class_means_by_hand(federation):
    client, model = lone_client(without_class(federation.graphs[0], 1))
    reply, graph = FedDistill(floor=1).class_means(client, model), client.graph
    for c in range(graph.num_classes):
        rows = [
            model(graph)[i] for i in range(graph.num_items) if graph.train[i] and graph.y[i] == c
        ]
        assert reply["present"][c] == bool(rows) == (c != 1)
        assert torch.allclose(
            reply["logits"][c],
            sum(rows) / len(rows) if rows else torch.zeros(graph.num_classes),
            atol=1e-6,
        )


def test_clients_that_have_a_class_have_equal_weight(node_federation, monkeypatch):
    """Whatever their sizes. Clients without the class have no weight."""
    first, *rest = node_federation.graphs
    exchanges = record_exchanges(monkeypatch)
    run(
        "feddistill",
        replace(node_federation, graphs=(without_class(first, 2), *rest)),
        **{**SMALL, "rounds": 2},
    )
    (sent_first, replies), (sent, _) = exchanges
    assert sent_first == {}
    for c, holders in ((0, node_federation.names), (2, node_federation.names[1:])):
        by_hand = sum(replies[k]["logits"][c] for k in holders) / len(holders)
        assert torch.allclose(sent["logits"][c], by_hand, atol=1e-6)


@pytest.mark.parametrize("term", ["ce", "mse"])
def test_the_second_term_by_hand(term, node_federation):
    client, model = lone_client(node_federation.graphs[0])
    method, graph = FedDistill(weight=0.7, term=term), client.graph
    target = {
        "logits": torch.randn(3, 3, generator=torch.Generator().manual_seed(0)),
        "known": torch.tensor([1, 0, 1]),
    }
    logits, gaps = model(graph), []
    for i in graph.train.nonzero().flatten().tolist():
        mean, own = target["logits"][graph.y[i]], logits[i]
        if graph.y[i] != 1:  # that no client has sent
            gaps.append(
                -(mean.softmax(0) * own.log_softmax(0)).sum()
                if term == "ce"
                else (own - mean).square().mean()
            )
    expected = client.loss(logits, graph) + 0.7 * sum(gaps) / len(gaps)
    assert torch.isclose(method.objective(client, graph, model, target), expected, atol=1e-6)
    expected_without = F.cross_entropy(logits[graph.train], graph.y[graph.train])
    assert torch.isclose(
        method.objective(
            client, graph, model, {**target, "known": torch.zeros(3, dtype=torch.int64)}
        ),
        expected_without,
    )


@pytest.mark.parametrize("term", ["ce", "mse"])
def test_the_second_term_reaches_every_weight(term, node_federation):
    client, model = lone_client(node_federation.graphs[0])
    target = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))[
        client.graph.y[client.graph.train]
    ]
    distance = FedDistill(term=term).distance(model(client.graph)[client.graph.train], target)
    assert all(g.abs().sum() > 0 for g in torch.autograd.grad(distance, list(model.parameters())))


def test_a_class_that_no_client_has_gets_no_target(node_federation, monkeypatch):
    exchanges = record_exchanges(monkeypatch)
    result = run(
        "feddistill",
        replace(node_federation, graphs=tuple(without_class(g, 1) for g in node_federation.graphs)),
        **SMALL,
    )
    assert result.summary["status"] == "completed"
    assert all(sent["known"].tolist() == [1, 0, 1] for sent, _ in exchanges[1:])


def test_a_class_keeps_its_last_mean_while_no_participant_has_it(node_federation, monkeypatch):
    first, *rest = node_federation.graphs
    alone = replace(
        node_federation, graphs=(first, *(without_class(g, 1) for g in rest)), whole=None
    )
    owner, exchanges = node_federation.names[0], record_exchanges(monkeypatch)
    run("feddistill", alone, participation=0.5, seed=1, **{**SMALL, "rounds": 6})
    there = [owner in replies for _, replies in exchanges]
    last = there.index(True)
    assert False in there[last + 1 : -1]  # the next round shows it
    last_mean = exchanges[last][1][owner]["logits"][1]
    for k in range(last + 1, len(exchanges)):
        assert torch.allclose(exchanges[k][0]["logits"][1], last_mean, atol=1e-6)
        last_mean = exchanges[k][1][owner]["logits"][1] if there[k] else last_mean


def test_a_client_without_labels_changes_no_mean(node_federation, monkeypatch):
    first, *rest = node_federation.graphs
    bare, exchanges = (
        replace(first, train=torch.zeros_like(first.train)),
        record_exchanges(monkeypatch),
    )
    run("feddistill", replace(node_federation, graphs=(bare, *rest)), **SMALL)
    assert all(
        not replies["0"]["present"].any() and not replies["0"]["logits"].any()
        for _, replies in exchanges
    )


def test_one_client_gets_its_own_means_and_without_labels_there_are_none(
    node_federation, monkeypatch
):
    graph, exchanges = node_federation.graphs[0], record_exchanges(monkeypatch)
    run("feddistill", Federation((graph,)), **SMALL)
    assert torch.equal(exchanges[1][0]["logits"], exchanges[0][1]["0"]["logits"])
    bare = Federation((replace(graph, train=torch.zeros_like(graph.train)),))
    assert run("feddistill", bare, **SMALL).summary["status"] == "completed"


def test_traffic_is_two_small_matrices(node_federation):
    traffic = run("feddistill", node_federation, **SMALL).traffic["phases"]["train"]
    assert traffic["scalars_up"] == 4 * 3 * (9 + 3)
    assert traffic["scalars_down"] == 4 * 2 * (9 + 3)  # nothing in the first round
