"""FedGTA: label propagation, moments, confidence and shares by hand, and its limits."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.methods.test_fed_pub import EvenFedAvg, gap

from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.core.message import flatten
from fedloom.core.phase import phase
from fedloom.data.federation import Federation
from fedloom.data.graph import Graph
from fedloom.experiments.run import run
from fedloom.methods.fedgta import (
    FedGTA,
    confidence,
    moments,
    propagate_labels,
    shares,
    with_training_labels,
)
from fedloom.methods.local import Local

pytestmark = pytest.mark.usefixtures("reference_engine")

OTHER = {"threshold": 1.0}
SMALL = {"model": "gcn-2x8", "rounds": 3}


@pytest.fixture
def path():
    """Returns the path 0 - 1 - 2 and a separate node 3.

    Node 0 has class 1; the others' labels are hidden.
    """
    edges = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    train = torch.tensor([True, False, False, False])
    return Graph(
        x=torch.zeros(4, 2),
        edge_index=edges,
        y=torch.tensor([1, -1, -1, -1]),
        num_classes=2,
        train=train,
    )


# ---- at a client ----
def test_label_propagation_by_hand(path):
    first = with_training_labels(
        path, torch.tensor([[0.5, 0.5], [0.9, 0.1], [0.8, 0.2], [0.3, 0.7]])
    )
    assert torch.equal(first, torch.tensor([[0.0, 1.0], [0.9, 0.1], [0.8, 0.2], [0.3, 0.7]]))
    # Degrees with loops: 2, 3, 2, 1.
    s, t = 1 / 2, 1 / 6**0.5
    S = torch.tensor([[s, t, 0, 0], [t, 1 / 3, t, 0], [0, t, s, 0], [0, 0, 0, 1]])
    once = 0.3 * S @ first + 0.7 * first
    assert torch.allclose(propagate_labels(path, first, 1, 0.3), once)
    assert torch.allclose(propagate_labels(path, first, 2, 0.3), 0.3 * S @ once + 0.7 * first)
    # A node without neighbours keeps its label.
    assert torch.allclose(propagate_labels(path, first, 5, 0.3)[3], first[3])
    assert torch.equal(propagate_labels(path, first, 5, 0.0), first)


def test_moments_by_hand():
    P = torch.tensor([[0.2, 0.8], [0.6, 0.4], [1.0, 0.0]])
    by_hand = [
        [
            [(0.2 + 0.6 + 1.0) / 3, 0.4],
            [(0.04 + 0.36 + 1) / 3, (0.64 + 0.16) / 3],
            [(0.008 + 0.216 + 1) / 3, (0.512 + 0.064) / 3],
        ],
        [
            [0.0, 0.0],
            [(0.16 + 0.16) / 3, (0.16 + 0.16) / 3],
            [(-0.064 + 0.064) / 3, (0.064 - 0.064) / 3],
        ],
    ]
    assert torch.allclose(moments(P, 3), torch.tensor(by_hand), atol=1e-6)
    assert moments(P, 10).shape == (2, 10, 2)
    assert torch.equal(moments(P[:0], 4), torch.zeros(2, 4, 2))


def test_confidence_by_hand(path):
    Q = torch.tensor([[0.0, 1.0], [0.5, 0.5], [0.25, 0.75], [1.0, 0.0]])
    entropy = [0.0, math.log(2), -(0.25 * math.log(0.25) + 0.75 * math.log(0.75)), 0.0]
    by_hand = sum(d * (2 / math.e - e) for d, e in zip([2, 3, 2, 1], entropy, strict=True))
    assert confidence(path, Q) == pytest.approx(by_hand, rel=1e-5)
    surer = torch.tensor([[0.0, 1.0], [0.1, 0.9], [0.25, 0.75], [1.0, 0.0]])
    assert confidence(path, surer) > confidence(path, Q)


@given(st.integers(1, 8), st.integers(0, 99))
def test_confidence_is_positive_whatever_the_labels(classes, seed):
    rng = torch.Generator().manual_seed(seed)
    graph = Graph(
        x=torch.zeros(3, 1),
        edge_index=torch.zeros(2, 0, dtype=torch.int64),
        y=torch.full((3,), -1),
        num_classes=classes,
    )
    assert confidence(graph, torch.rand(3, classes, generator=rng).softmax(1)) > 0
    assert confidence(graph, torch.full((3, classes), 1 / classes)) > 0


def test_a_description_by_hand(path):
    logits = torch.tensor([[5.0, 0.0], [1.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
    description = FedGTA(steps=2, alpha=0.4, order=3, temperature=7.0).describe(path, logits)
    first = logits.softmax(1)
    first[0] = torch.tensor([0.0, 1.0])
    S = path.adjacency("sym").dense()
    Y = 0.4 * S @ (0.4 * S @ first + 0.6 * first) + 0.6 * first
    P, Q = Y.softmax(1), (Y / 7).softmax(1)
    P[0] = Q[0] = first[0]
    assert torch.allclose(description["moments"], moments(P, 3), atol=1e-6)
    assert torch.isclose(description["confidence"], confidence(path, Q))


def test_the_description_uses_the_trained_model_without_dropout(node_federation):
    graph = node_federation.graphs[0]
    facts = Facts(graph.num_features, graph.num_classes, "node", ("0",), ("gcn-2x8",), dropout=0.5)
    client, method = Client("0", graph, facts), FedGTA()
    method.setup(client)
    reply = method.train(
        client, {name: p.detach().clone() for name, p in client.state["model"].named_parameters()}
    )
    description = method.describe(client.graph, client.state["model"](client.graph))
    assert torch.equal(reply["moments"], description["moments"])
    assert torch.equal(reply["confidence"], description["confidence"])


# ---- at the server ----
def test_shares_by_hand():
    # Cosines: 0.6 of 0 and 1, 0.8 of 1 and 2, 0 of 0 and 2.
    M = torch.tensor([[1.0, 0.0], [3.0, 4.0], [0.0, 2.0]])
    H = torch.tensor([1.0, 2.0, 6.0])
    assert torch.allclose(
        shares(M, H, 0.5),
        torch.tensor([[1 / 3, 2 / 3, 0], [1 / 9, 2 / 9, 6 / 9], [0, 2 / 8, 6 / 8]]),
    )
    assert torch.allclose(
        shares(M, H, 0.7), torch.tensor([[1.0, 0, 0], [0, 2 / 8, 6 / 8], [0, 2 / 8, 6 / 8]])
    )
    assert torch.allclose(shares(M, H, -1.0), (H / 9).expand(3, 3))
    assert torch.equal(shares(M, H, 1.0), torch.eye(3))
    assert torch.equal(shares(M.expand(3, 3, 2).flatten(1), H, 1.0), torch.eye(3))


@given(st.integers(1, 6), st.integers(0, 99), st.floats(-1, 1))
def test_shares_are_not_negative_and_sum_to_one(clients, seed, threshold):
    rng = torch.Generator().manual_seed(seed)
    M, H = torch.randn(clients, 2, 3, generator=rng), torch.rand(clients, generator=rng)
    share = shares(M, H, threshold)
    assert torch.allclose(share.sum(1), torch.ones(clients))
    assert (share >= 0).all()
    assert (share.diagonal() > 0).all()
    assert torch.allclose(shares(7 * M, 3 * H, threshold), share, atol=1e-6)


def test_a_client_that_sends_zeros_keeps_its_own_model_and_is_in_no_other_mean():
    M, H = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 0.1]]), torch.tensor([1.0, 0.0, 3.0])
    assert torch.allclose(
        shares(M, H, 0.5), torch.tensor([[0.25, 0, 0.75], [0, 1, 0], [0.25, 0, 0.75]])
    )
    assert torch.allclose(shares(M, H, -0.5), torch.tensor([0.25, 0, 0.75]).expand(3, 3))
    assert torch.equal(shares(torch.zeros(2, 3), torch.zeros(2), -1.0), torch.eye(2))


def test_clients_get_the_mean_of_moments_and_confidences(node_federation, trainings):
    exchanges = trainings()
    run("fedgta", node_federation, threshold=0.995, **SMALL)
    sizes = set()
    for (_, replies), (sent, _) in pairwise(exchanges):
        for k in node_federation.names:
            near = {
                c: r["confidence"]
                for c, r in replies.items()
                if c == k
                or torch.cosine_similarity(
                    r["moments"].flatten(), replies[k]["moments"].flatten(), dim=0
                )
                > 0.995
            }
            sizes.add(len(near))
            by_hand = sum(
                h * replies[c]["model"]["classifier.weight"] for c, h in near.items()
            ) / sum(near.values())
            assert torch.allclose(sent[k]["model"]["classifier.weight"], by_hand, atol=1e-6)
    assert len(sizes) > 1  # the threshold separates them


def test_traffic(node_federation):
    """2|θ| + 2 · order · C + 1 per client and round."""
    traffic = run("fedgta", node_federation, order=7, **SMALL).traffic
    theta, K, R, C = 12 * 8 + 8 + 8 * 3 + 3, 4, 3, 3
    assert traffic["scalars_down"] == K * R * theta
    assert traffic["scalars_up"] == K * R * (theta + 2 * 7 * C + 1)


# ---- limits ----
def test_all_clients_with_equal_confidences_is_fedavg_with_equal_weights(
    node_federation, monkeypatch
):
    plain = run(EvenFedAvg(rounds=3), node_federation, model="gcn-2x8")
    assert (
        gap(
            run("fedgta", node_federation, threshold=-1.0, **SMALL).final_models, plain.final_models
        )
        > 1e-4
    )
    monkeypatch.setattr("fedloom.methods.fedgta.confidence", lambda graph, Q: torch.tensor(3.0))
    assert (
        gap(
            run("fedgta", node_federation, threshold=-1.0, **SMALL).final_models, plain.final_models
        )
        < 1e-6
    )


def test_threshold_one_is_local_training_from_one_initial_model(node_federation):
    class FromOneModel(Local):
        @phase()
        def setup(self, client):
            super().setup(client)
            client.state["model"].load_state_dict(
                client.facts.build("gcn-2x8", "server").state_dict()
            )
            return {}

    result, alone = (
        run("fedgta", node_federation, threshold=1.0, **SMALL),
        run(FromOneModel(rounds=3), node_federation, model="gcn-2x8"),
    )
    assert gap({c: result.final_models[c] for c in node_federation.names}, alone.final_models) == 0


def test_identical_clients_get_identical_models(node_federation, trainings):
    one, two, *_ = node_federation.graphs
    exchanges = trainings()
    run("fedgta", Federation((one, two, one)), dropout=0.0, threshold=0.99, **SMALL)
    for sent, replies in exchanges:
        assert gap(sent["0"], sent["2"]) < 1e-6
        assert gap(replies["0"]["model"], replies["2"]["model"]) < 1e-5


# ---- bad input ----
def test_one_client_trains_alone(node_federation, trainings):
    exchanges = trainings()
    run("fedgta", Federation(node_federation.graphs[:1]), **SMALL)
    assert all(
        gap(replies["0"]["model"], sent["0"]["model"]) == 0
        for (_, replies), (sent, _) in pairwise(exchanges)
    )


def test_a_client_without_labels_describes_its_predictions_and_sends_zeros_if_inductive(
    node_federation, trainings
):
    graphs = node_federation.graphs
    bare = replace(graphs[0], train=torch.zeros_like(graphs[0].train))
    for inductive in (False, True):
        exchanges = trainings()
        result = run(
            "fedgta",
            replace(node_federation, graphs=(bare, *graphs[1:]), whole=None, inductive=inductive),
            **SMALL,
        )
        assert result.summary["status"] == "completed"
        for _, replies in exchanges:
            assert replies["0"]["moments"].any() == (not inductive)
            assert (replies["0"]["confidence"] > 0) == (not inductive)
        if inductive:  # its own model comes back
            assert all(
                gap(replies["0"]["model"], sent["0"]["model"]) == 0
                for (_, replies), (sent, _) in pairwise(exchanges)
            )


def test_a_client_of_one_class_and_isolated_nodes(node_federation, trainings):
    first, *rest = node_federation.graphs
    kept = first.train & (first.y == 0)
    single = replace(
        first,
        train=kept,
        test=first.test | (first.train & ~kept),
        edge_index=first.edge_index[:, :0],
    )
    exchanges = trainings()
    result = run("fedgta", replace(node_federation, graphs=(single, *rest), whole=None), **SMALL)
    assert all(t.isfinite().all() for t in flatten(result.final_models).values())
    assert all(replies["0"]["confidence"] > 0 for _, replies in exchanges)
