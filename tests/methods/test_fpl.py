"""FPL: both terms by hand, the clusters, and its limits."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.core.message import flatten
from fedloom.data.federation import Federation
from fedloom.engines.loop import Engine as Loop
from fedloom.experiments.run import run
from fedloom.methods._shared.prototypes import clusters, pack_table
from fedloom.methods.fpl import FPL, cluster_means, contrast

pytestmark = pytest.mark.usefixtures("reference_engine")

SMALL = {"model": "gcn-2x8", "rounds": 3}
OTHER = {"floor": 12}  # some clients have fewer items of a class


def scene(federation, **settings):
    """Returns a method, a client after setup, and cluster prototypes.

    There are two prototypes of class 0, one of class 1, none of class 2.
    """
    graph = federation.graphs[0]
    facts = Facts(
        graph.num_features, graph.num_classes, federation.task, ("0",), ("gcn-2x8",), dropout=0.0
    )
    client, method = Client("0", graph, facts), FPL(**settings)
    method.setup(client)
    Q = torch.rand(3, 8, generator=torch.Generator().manual_seed(0))
    return method, client, {"clusters": Q, "of_class": torch.tensor([0, 0, 1])}


def record_exchanges(monkeypatch):
    """Records what clients are sent and what they answer, by phase."""
    exchanges, original = [], Loop.call
    monkeypatch.setattr(
        Loop,
        "call",
        lambda self, phase, sent: (
            exchanges.append((phase, sent, r := original(self, phase, sent))) or r
        ),
    )
    return exchanges


def largest_gap(one, other):
    one, other = flatten(one.final_models), flatten(other.final_models)
    assert one.keys() == other.keys()
    return max(float((one[k] - other[k]).abs().max()) for k in one)


def test_both_terms_by_hand(node_federation):
    method, client, received = scene(node_federation, contrastive=0.7, unbiased=0.3, tau=0.4)
    model, graph, Q = client.state["model"], client.graph, received["clusters"]
    z, U = model.embed(graph), {0: (Q[0] + Q[1]) / 2, 1: Q[2]}
    ones, twos = [], []
    for i in graph.train.nonzero().flatten().tolist():
        y = int(graph.y[i])
        if y in U:  # class 2 has no prototype: its items are in neither term
            e = torch.exp(torch.cosine_similarity(z[i : i + 1], Q) / 0.4)
            ones.append(-torch.log((e[0] + e[1] if y == 0 else e[2]) / e.sum()))
            twos.append((z[i] - U[y]).square().mean())
    assert 0 < len(ones) < int(graph.train.sum())
    expected = (
        client.loss(model(graph), graph)
        + 0.7 * torch.stack(ones).mean()
        + 0.3 * torch.stack(twos).mean()
    )
    assert torch.isclose(method.objective(client, graph, model, received), expected, atol=1e-5)


def test_every_term_reaches_the_extractor_but_not_the_prototypes(node_federation):
    for settings in ({"contrastive": 1.0, "unbiased": 0.0}, {"contrastive": 0.0, "unbiased": 1.0}):
        method, client, received = scene(node_federation, **settings)
        model, graph = client.state["model"], client.graph
        extra = method.objective(client, graph, model, received) - method.objective(
            client, graph, model, None
        )
        extra.backward()
        assert model.layers[0].weight.grad.abs().sum() > 0
    assert received["clusters"].grad is None


def test_without_its_terms_and_in_its_first_round_it_is_fedavg(federation):
    plain = run("fedavg", federation, **SMALL)
    assert largest_gap(run("fpl", federation, contrastive=0.0, unbiased=0.0, **SMALL), plain) < 1e-6
    assert largest_gap(run("fpl", federation, **SMALL), plain) > 1e-4
    once = {**SMALL, "rounds": 1}
    assert largest_gap(run("fpl", federation, **once), run("fedavg", federation, **once)) == 0


def test_a_small_temperature_does_not_overflow():
    z = torch.tensor([[3.0, 0.0], [0.0, 2.0]], requires_grad=True)
    far = contrast(
        z,
        torch.tensor([1, 0]),
        torch.tensor([[1.0, 0.0], [0.0, 1.0]]),
        torch.tensor([0, 1]),
        tau=1e-4,
    )
    assert torch.isclose(far, torch.tensor(1e4))
    far.backward()
    assert z.grad.isfinite().all()
    assert (
        contrast(
            z,
            torch.zeros(2, dtype=torch.int64),
            torch.eye(2),
            torch.zeros(2, dtype=torch.int64),
            tau=0.02,
        )
        == 0
    )  # one class


# ---- the server's side ----
def test_each_class_is_clustered_separately():
    left, right = torch.tensor([[1.0, 0.0], [1.0, 0.1]]), torch.tensor([[0.0, 1.0], [0.1, 1.0]])
    replies = [
        pack_table(torch.stack([point, -point]), torch.tensor([True, k == 3]))
        for k, point in enumerate(torch.cat([left, right]))
    ]
    means = cluster_means(replies)
    assert means["of_class"].tolist() == [0, 0, 1]
    assert torch.allclose(means["clusters"], torch.stack([left.mean(0), right.mean(0), -right[1]]))


@given(st.integers(2, 7), st.integers(0, 99))
def test_clusters_do_not_depend_on_the_order_of_clients(clients, seed):
    rng = torch.Generator().manual_seed(seed)
    replies = [
        pack_table(torch.randn(3, 4, generator=rng), torch.rand(3, generator=rng) < 0.7)
        for _ in range(clients)
    ]
    one, other = cluster_means(replies), cluster_means(replies[::-1])
    if not one:
        assert not other
        return
    assert one["of_class"].tolist() == other["of_class"].tolist()

    def rows(means):
        return sorted(
            (c, *(round(x, 3) for x in row))
            for c, row in zip(means["of_class"].tolist(), means["clusters"].tolist(), strict=True)
        )

    for mine, theirs in zip(rows(one), rows(other), strict=True):
        assert mine == pytest.approx(theirs, abs=2e-3)


def test_without_prototypes_there_are_no_clusters():
    assert cluster_means([pack_table(torch.ones(2, 4), torch.zeros(2, dtype=torch.bool))] * 3) == {}


def test_what_travels(node_federation, monkeypatch):
    """Only present classes, no zero prototype, and the clusters of the round before."""
    graphs = node_federation.graphs
    kept = graphs[0].train & (graphs[0].y != 2)
    lacking = replace(graphs[0], train=kept, test=graphs[0].test | (graphs[0].train & ~kept))
    exchanges = record_exchanges(monkeypatch)
    run("fpl", replace(node_federation, graphs=(lacking, *graphs[1:]), whole=None), **SMALL)
    rounds = [(sent, replies) for phase, sent, replies in exchanges if phase == "train"]
    assert len(rounds) == 3
    for _, replies in rounds:
        assert replies["0"]["present"].tolist() == [True, True, False]
        for reply in replies.values():
            assert len(reply["prototypes"]) == reply["present"].sum()
            assert (reply["prototypes"] != 0).any(1).all()
    assert "clusters" not in rounds[0][0]["0"]
    for (_, replies), (sent, _) in pairwise(rounds):
        received = cluster_means(list(replies.values()))
        assert torch.equal(sent["1"]["clusters"], received["clusters"])
        of_two = clusters(torch.stack([replies[c]["prototypes"][2] for c in ("1", "2", "3")]))
        assert int((received["of_class"] == 2).sum()) == len(of_two.unique())


# ---- bad input ----
def test_a_client_without_labels_sends_no_prototypes(node_federation, monkeypatch):
    graphs = node_federation.graphs
    bare = replace(graphs[0], train=torch.zeros_like(graphs[0].train))
    exchanges = record_exchanges(monkeypatch)
    for inductive in (False, True):
        result = run(
            "fpl",
            replace(node_federation, graphs=(bare, *graphs[1:]), whole=None, inductive=inductive),
            **SMALL,
        )
        assert result.summary["status"] == "completed"
    assert not any(
        replies["0"]["present"].any() for phase, _, replies in exchanges if phase == "train"
    )


def test_an_absent_class_has_no_clusters(node_federation, monkeypatch):
    exchanges = record_exchanges(monkeypatch)
    run(
        "fpl", Federation(tuple(replace(g, num_classes=4) for g in node_federation.graphs)), **SMALL
    )
    assert all(
        3 not in sent["0"]["of_class"]
        for phase, sent, _ in exchanges
        if phase == "train" and "of_class" in sent["0"]
    )


def test_without_any_labels_it_is_fedavg(node_federation):
    bare = Federation(
        tuple(replace(g, train=torch.zeros_like(g.train)) for g in node_federation.graphs)
    )
    assert largest_gap(run("fpl", bare, **SMALL), run("fedavg", bare, **SMALL)) == 0


def test_one_client_aligns_to_its_own_prototypes(node_federation):
    alone = Federation(node_federation.graphs[:1])
    assert largest_gap(run("fpl", alone, **SMALL), run("fedavg", alone, **SMALL)) > 1e-4
