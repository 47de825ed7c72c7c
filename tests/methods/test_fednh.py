"""FedNH: the initial prototypes and how they move, their head, and what travels."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.core.message import flatten
from fedloom.data.federation import Federation
from fedloom.experiments.run import run
from fedloom.methods.fednh import FedNH, embed_with, maximally_separated, updated_prototypes
from fedloom.nn.training import make_optimizer, step
from fedloom.nn.weights import extractor_weights, weights

pytestmark = pytest.mark.usefixtures("reference_engine")

SMALL = {"model": "gcn-2x8", "rounds": 3}
OTHER = {"floor": 12}  # some clients have fewer items of a class


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def scene(federation, model="gcn-2x8", **settings):
    """Returns a method, a client after setup, and prototypes."""
    graph = federation.graphs[0]
    facts = Facts(
        graph.num_features, graph.num_classes, federation.task, ("0",), (model,), dropout=0.0
    )
    client, method, W = (
        Client("0", graph, facts),
        FedNH(**settings),
        maximally_separated(graph.num_classes, 8, rng(1)),
    )
    method.setup(client, prototypes=W)
    return method, client, W


# ---- the initial prototypes ----
@pytest.mark.parametrize(("classes", "width"), [(2, 8), (3, 2), (7, 64), (9, 8), (40, 64)])
def test_the_prototypes_start_as_a_simplex_if_it_fits(classes, width):
    W = maximally_separated(classes, width, rng())
    assert torch.allclose(W.norm(dim=1), torch.ones(classes), atol=1e-6)
    assert (W @ W.T).fill_diagonal_(-1).max() == pytest.approx(-1 / (classes - 1), abs=1e-3)


@pytest.mark.parametrize(
    ("classes", "width", "best"), [(6, 3, 0.0), (12, 3, 5**-0.5), (12, 8, 0.0)]
)
def test_more_classes_are_separated_too(classes, width, best):
    """Octahedron, icosahedron, and half of a cross-polytope: their largest cosines are known."""
    W = maximally_separated(classes, width, rng())
    assert (W @ W.T).fill_diagonal_(-1).max() < best + 0.02


def test_the_initial_prototypes_depend_only_on_the_random_stream():
    assert torch.equal(maximally_separated(5, 8, rng(3)), maximally_separated(5, 8, rng(3)))
    assert not torch.equal(maximally_separated(5, 8, rng(3)), maximally_separated(5, 8, rng(4)))
    assert maximally_separated(1, 4, rng()).shape == (1, 4)  # a single class: any direction


# ---- updates of the prototypes ----
def test_a_step_of_the_prototypes_by_hand():
    W, toward = torch.eye(3)[:2], torch.tensor([[0.0, 7.0, 0.0], [0.0, 0.0, 0.0]])
    after = updated_prototypes(W, toward, 0.8)
    assert torch.allclose(after[0], F.normalize(torch.tensor([0.8, 0.2, 0.0]), dim=0))
    assert torch.equal(after[1], W[1])  # no client has the class
    assert torch.equal(updated_prototypes(W, toward, 0.0)[1], W[1])
    assert torch.allclose(updated_prototypes(W, toward, 0.0)[0], torch.tensor([0.0, 1.0, 0.0]))


def test_rho_one_keeps_the_prototypes_and_a_smaller_one_moves_them(node_federation, trainings):
    for rho, same in ((1.0, True), (0.9, False)):
        exchanges = trainings()
        run("fednh", node_federation, rho=rho, **SMALL)
        first, last = (exchanges[k][0]["0"]["prototypes"] for k in (0, -1))
        assert torch.allclose(first, last, atol=1e-6) == same
        assert torch.allclose(last.norm(dim=1), torch.ones(3), atol=1e-6)


def test_a_round_of_the_server_by_hand(node_federation, monkeypatch, trainings):
    """Σ_k n_k^c μ_k[c], from the clients' own models and training items."""
    exchanges, clients, original = trainings(), {}, FedNH.train

    def train(self, client, model, prototypes):
        reply = original.function(self, client, model, prototypes)
        graph = client.graph
        with torch.no_grad():
            z = F.normalize(client.state["model"].embed(graph))
        clients.setdefault(client.name, [z[graph.train & (graph.y == c)] for c in range(3)])
        return reply

    monkeypatch.setattr(FedNH, "train", replace(original, function=train))
    run("fednh", node_federation, rho=0.6, **{**SMALL, "rounds": 2})
    W, after = (exchanges[k][0]["0"]["prototypes"] for k in (0, 1))
    for c in range(3):
        weighted = sum(len(own[c]) * F.normalize(own[c].mean(0), dim=0) for own in clients.values())
        assert torch.allclose(
            after[c], F.normalize(0.6 * W[c] + 0.4 * F.normalize(weighted, dim=0), dim=0), atol=1e-5
        )


# ---- the head ----
def test_logits_are_scaled_cosines_in_training_and_prediction(federation):
    method, client, _ = scene(federation, scale=7.0)
    model, graph = client.state["model"], client.graph
    W = client.state["prototypes"]
    z = model.embed(graph)
    by_hand = torch.stack([7.0 * torch.cosine_similarity(z, w.expand_as(z)) for w in W], 1)
    assert torch.allclose(method.predict(client, None), by_hand, atol=1e-5)
    assert torch.isclose(
        method.objective(client, graph, model, {}), client.loss(by_hand, graph), atol=1e-5
    )


def test_a_downloaded_model_predicts(federation):
    method, client, _ = scene(federation)
    other = client.build("other")
    W = maximally_separated(federation.num_classes, 8, rng(9))
    expected = method.logits(other.embed(client.full_graph), W)
    assert torch.allclose(
        method.predict(client, extractor_weights(weights(other)) | {"prototypes": W}), expected
    )
    assert torch.equal(
        embed_with(client.state["model"], weights(other), client.full_graph),
        other.embed(client.full_graph),
    )


def test_only_the_extractor_learns(node_federation):
    method, client, W = scene(node_federation, lr=0.1)
    model = client.state["model"]
    before, kept = {k: t.clone() for k, t in weights(model).items()}, W.clone()
    reply = method.train(client, extractor_weights(weights(model)), W)
    assert torch.equal(W, kept)
    for name, tensor in weights(model).items():
        assert torch.equal(tensor, before[name]) == name.startswith("classifier.")
    assert not any(name.startswith("classifier.") for name in reply["model"])


def test_one_client_trains_as_a_plain_loop_does(node_federation):
    alone = Federation(node_federation.graphs[:1])
    result = run("fednh", alone, rho=1.0, scale=5.0, dropout=0.0, **SMALL)
    facts = Facts(12, 3, "node", ("0",), ("gcn-2x8",), dropout=0.0)
    client, model = Client("0", alone.graphs[0], facts), facts.build("gcn-2x8", "server")
    W = result.final_models["server"]["prototypes"]
    optimizer = make_optimizer("adam", model.layers.parameters(), 0.01, 5e-4)
    for _ in range(9):
        step(optimizer, client.loss(5 * F.normalize(model.embed(client.graph)) @ W.T, client.graph))
    for name, tensor in extractor_weights(weights(model)).items():
        assert torch.allclose(result.final_models["server"][name], tensor, atol=1e-5), name


def test_local_and_global_evaluation_use_their_own_model_and_prototypes(node_federation):
    ways = {e: run("fednh", node_federation, evaluation=e, **SMALL) for e in ("local", "global")}
    assert all(
        torch.equal(t, ways["global"].final_models["server"][k])
        for k, t in ways["local"].final_models["server"].items()
    )
    assert ways["local"].traffic["measuring"]["scalars_down"] == 0
    assert ways["global"].traffic["measuring"]["scalars_down"] == 4 * 3 * (12 * 8 + 8 + 3 * 8)


# ---- what travels ----
def test_the_head_is_never_sent_and_absent_classes_send_zeros(node_federation, trainings):
    graphs = node_federation.graphs
    kept = graphs[0].train & (graphs[0].y != 2)
    lacking = replace(graphs[0], train=kept, test=graphs[0].test | (graphs[0].train & ~kept))
    exchanges = trainings()
    result = run(
        "fednh", replace(node_federation, graphs=(lacking, *graphs[1:]), whole=None), **SMALL
    )
    for _, replies in exchanges:
        assert (replies["0"]["directions"] != 0).any(1).tolist() == [True, True, False]
    extractor, W = 12 * 8 + 8, 3 * 8
    assert result.traffic["scalars_up"] == 4 * (1 + 3 * (extractor + W))
    assert result.traffic["scalars_down"] == 4 * (W + 3 * (extractor + W))


def test_a_secure_run_moves_the_prototypes_equally(node_federation):
    plain, secure = (
        run("fednh", node_federation, secure=secure, **SMALL).final_models["server"]
        for secure in (False, True)
    )
    assert torch.allclose(plain["prototypes"], secure["prototypes"], atol=2e-5)


# ---- bad input ----
def test_a_class_that_exists_nowhere_keeps_its_prototype(node_federation, trainings):
    federation = Federation(tuple(replace(g, num_classes=4) for g in node_federation.graphs))
    for secure in (False, True):
        exchanges = trainings()
        run("fednh", federation, secure=secure, **SMALL)
        first, last = (exchanges[k][0]["0"]["prototypes"] for k in (0, -1))
        assert torch.equal(first[3], last[3])
        assert not torch.equal(first[:3], last[:3])


def test_without_any_labels_nothing_changes(node_federation, trainings):
    bare = Federation(
        tuple(replace(g, train=torch.zeros_like(g.train)) for g in node_federation.graphs)
    )
    exchanges = trainings()
    result = run("fednh", bare, **SMALL)
    assert torch.equal(
        exchanges[0][0]["0"]["prototypes"], result.final_models["server"]["prototypes"]
    )
    for name, tensor in exchanges[0][0]["0"]["model"].items():
        assert torch.allclose(result.final_models["server"][name], tensor, atol=1e-6)


def test_an_inductive_client_without_training_items_takes_part(node_federation):
    graphs = node_federation.graphs
    bare = replace(graphs[0], train=torch.zeros_like(graphs[0].train))
    result = run(
        "fednh",
        replace(node_federation, graphs=(bare, *graphs[1:]), whole=None, inductive=True),
        **SMALL,
    )
    assert all(t.isfinite().all() for t in flatten(result.final_models).values())


def test_a_client_that_never_took_part_is_scored_under_the_initial_prototypes(node_federation):
    result = run("fednh", node_federation, participation=0.25, **{**SMALL, "rounds": 1})
    assert result.summary["status"] == "completed"
