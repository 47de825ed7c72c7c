"""FGGP: candidate links, the draw and its gradient, the terms by hand, the vote, its limits."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.core.message import flatten
from fedloom.data.federation import Federation
from fedloom.data.graph import Graph
from fedloom.errors import ConfigError
from fedloom.experiments.run import run
from fedloom.methods.fggp import CLUSTERS, FGGP, candidates
from fedloom.methods.fpl import cluster_means
from fedloom.nn.build import build_model
from fedloom.nn.links import DrawnLinks, draw_links, link_scores, pairs_of, reconstruction, scores
from fedloom.nn.prototypes import alignment, class_centres, pseudo_labels, vote
from fedloom.nn.weights import load_weights, weights

pytestmark = pytest.mark.usefixtures("reference_engine")

SMALL = {"model": "gcn-2x8", "rounds": 3}
OFF = {"second": 0.0, "links": 0.0, "align": 0.0}
QUICK = {"lr": 0.05}
OTHER = {"tau_vote": 5.0, "floor": 20}


def scene(federation, spec="gcn-2x8", **settings):
    """Returns a method, a client after setup, and its candidate links."""
    graph = federation.graphs[0]
    facts = Facts(graph.num_features, graph.num_classes, "node", ("0",), (spec,), dropout=0.0)
    client, method = Client("0", graph, facts), FGGP(**settings)
    method.setup(client)
    with torch.no_grad():
        return (
            method,
            client,
            candidates(client.graph, client.state["model"].embed(client.graph), 3),
        )


def theta(model):
    """The weights of a model, without the clusters."""
    return {name: tensor for name, tensor in model.items() if name not in CLUSTERS}


def largest_gap(one, other, owners):
    one, other = (
        flatten({owner: theta(result.final_models[owner]) for owner in owners})
        for result in (one, other)
    )
    assert one.keys() == other.keys()
    return max(float((one[k] - other[k]).abs().max()) for k in one)


def sampler_gradient(client, loss):
    """Returns Σ |∂ loss / ∂ψ|."""
    own = list(client.state["sampler"].parameters())
    return sum(
        float(g.abs().sum())
        for g in torch.autograd.grad(loss, own, allow_unused=True)
        if g is not None
    )


# ---- candidate links ----
def test_candidates_are_own_edges_and_nearest_neighbours_each_once():
    z = torch.tensor([[1.0, 0.0], [2.0, 0.1], [0.0, 1.0], [0.1, 3.0], [-1.0, -1.0]])
    graph = Graph(
        torch.ones(5, 3),
        torch.tensor([[0, 4, 2, 0], [4, 0, 2, 1]]),
        torch.zeros(5, dtype=torch.int64),
        2,
    )
    suggested = candidates(graph, z, 1)
    assert {tuple(pair) for pair in pairs_of(suggested).T.tolist()} >= {(0, 1), (0, 4), (2, 3)}
    first, turned = suggested.edge_index.chunk(2, 1)
    assert torch.equal(first, turned.flip(0))
    assert (first[0] < first[1]).all()
    assert len(first.unique(dim=1).T) == first.shape[1]
    assert candidates(graph, z, 99).num_edges == 5 * 4  # no more than there are others


def test_a_single_node_has_no_candidates():
    graph = Graph(
        torch.ones(1, 3), torch.zeros(2, 0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), 2
    )
    suggested = candidates(graph, torch.ones(1, 4), 3)
    assert suggested.num_edges == 0
    assert reconstruction(torch.ones(1, 4, requires_grad=True), suggested, torch.Generator()) == 0


def test_reconstruction_is_the_balanced_loss_over_all_pairs():
    """The mean over many draws of other pairs equals the authors' dense form.

    That is norm · BCE with pos_weight, on pairs i < j.
    """
    rng = torch.Generator().manual_seed(0)
    h, n = torch.randn(12, 4, generator=rng), 12
    graph = Graph(
        torch.ones(n, 2), torch.zeros(2, 0, dtype=torch.int64), torch.zeros(n, dtype=torch.int64), 2
    )
    suggested = candidates(graph, torch.randn(n, 3, generator=rng), 2)
    there = torch.zeros(n, n)
    there[tuple(pairs_of(suggested))] = 1
    g, there = (m[torch.ones(n, n).triu(1) > 0] for m in (h @ h.T, there))
    pairs, positive = len(there), there.sum()
    dense = (
        F.binary_cross_entropy_with_logits(g, there, pos_weight=(pairs - positive) / positive)
        * pairs
        / (2 * (pairs - positive))
    )
    drawn = torch.stack([reconstruction(h, suggested, rng) for _ in range(2000)])
    assert drawn.mean() == pytest.approx(
        float(dense), abs=4 * float(drawn.std()) / 2000**0.5 + 0.02
    )


# ---- the draw ----
def test_links_are_drawn_with_their_probability(node_federation):
    _, _, suggested = scene(node_federation)
    score = torch.linspace(-3, 3, pairs_of(suggested).shape[1])
    rng, often = torch.Generator().manual_seed(0), torch.zeros(len(score))
    for _ in range(200):
        weight = draw_links(score, 0.8, 1.0, rng)
        view = DrawnLinks(suggested, weight)
        often += weight
        assert set(weight.tolist()) <= {0.0, 1.0}
        assert view.num_edges == 2 * int(weight.sum())
    likely = 0.8 * torch.sigmoid(score) + 0.2
    assert ((often / 200 - likely).abs() < 0.18).all()


def test_alpha_zero_keeps_every_candidate(node_federation):
    _, _, suggested = scene(node_federation)
    score = torch.full((suggested.num_edges // 2,), -9.0)
    weight = draw_links(score, 0.0, 1.0, torch.Generator().manual_seed(0))
    assert torch.equal(DrawnLinks(suggested, weight).edge_index, suggested.edge_index)


@pytest.mark.parametrize(
    "spec",
    [
        "gcn-2x8",
        "gat-2x8",
        "sage-2x8",
        "gin-2x8",
        "gcnii-3x8",
        "sgc-2x8",
        "sign-2x8",
        "appnp-3x8",
        "dgcn-3x8",
    ],
)
def test_every_model_uses_only_the_drawn_links_of_a_view(node_federation, spec):
    _, client, suggested = scene(node_federation, spec)
    model = client.state["model"]
    score = link_scores(client.state["sampler"](suggested), suggested)
    view = DrawnLinks(suggested, draw_links(score, 0.5, 1.0, client.rng("links")))
    assert 0 < view.num_edges < suggested.num_edges
    plain = replace(client.graph, edge_index=view.edge_index, edge_weight=None)
    assert torch.allclose(model(view), model(plain), atol=1e-5)
    gives = (
        sampler_gradient(client, model(view).square().sum()) if not spec.startswith("gat") else 1.0
    )  # GAT ignores edge weights
    assert gives > 0


def test_the_gradient_of_a_product_equals_that_of_the_dense_adjacency():
    """A dense matrix of link weights, normalised and multiplied by hand."""
    graph = Graph(
        torch.ones(4, 2), torch.tensor([[0, 1, 2], [1, 2, 3]]), torch.zeros(4, dtype=torch.int64), 2
    )
    suggested = candidates(graph, torch.eye(4), 1)
    i, j = pairs_of(suggested)
    h = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    score = torch.zeros(len(i), requires_grad=True)
    drawn = draw_links(score, 0.5, 1.0, torch.Generator().manual_seed(1))
    view = DrawnLinks(suggested, drawn)
    weight = drawn.detach().requires_grad_()
    A = torch.eye(4).index_put((i, j), weight).index_put((j, i), weight)
    D = torch.diag(A.sum(1).rsqrt())
    (expected,) = torch.autograd.grad((D @ A @ D @ h).square().sum(), weight)
    (arrived,) = torch.autograd.grad(view.propagate(h).square().sum(), drawn)
    assert torch.allclose(arrived, expected, atol=1e-5)
    assert weight.detach().sum() < len(i)  # also of links that were not drawn


# ---- prototypes ----
def test_pseudo_labels_by_hand():
    graph = Graph(
        torch.ones(3, 2),
        torch.zeros(2, 0, dtype=torch.int64),
        torch.tensor([1, -1, -1]),
        2,
        train=torch.tensor([True, False, False]),
    )
    label, sure = pseudo_labels(torch.tensor([[9.0, 0.0], [0.0, 0.0], [0.0, 2.0]]), graph)
    assert label.tolist() == [1, 0, 1]
    assert sure.tolist() == pytest.approx([1.0, 0.5, float(torch.sigmoid(torch.tensor(2.0)))])
    P, present = class_centres(torch.tensor([[1.0], [5.0], [3.0]]), label, sure, 3)
    assert present.tolist() == [True, True, False]
    assert P.flatten().tolist() == pytest.approx(
        [5.0, (1 + 3 * float(sure[2])) / (1 + float(sure[2])), 0.0]
    )


@given(st.integers(1, 5), st.integers(0, 99))
def test_alignment_by_hand(classes, seed):
    rng = torch.Generator().manual_seed(seed)
    first, second = torch.randn(classes, 4, generator=rng), torch.randn(classes, 4, generator=rng)
    total = 0.0
    for c in range(classes):
        others = [p for view in (first, second) for k, p in enumerate(view) if k != c]
        own, *rest = (
            torch.exp(F.cosine_similarity(second[c], p, dim=0) / 0.5) for p in (first[c], *others)
        )
        total += -torch.log(own / (own + sum(rest))) / classes
    assert float(alignment(second, first, 0.5)) == pytest.approx(float(total), abs=1e-5)


def test_the_vote_by_hand():
    z, Q = (
        torch.tensor([[1.0, 0.0], [1.0, 2.0]]),
        torch.tensor([[2.0, 0.0], [0.0, 1.0], [1.0, 1.0]]),
    )
    votes = vote(z, Q, torch.tensor([0, 2, 2]), 3, 0.1)
    similar = torch.exp(F.cosine_similarity(z.unsqueeze(1), Q.unsqueeze(0), dim=2) / 0.1)
    assert torch.allclose(
        votes[:, [0, 2]].exp(),
        torch.stack([similar[:, 0], similar[:, 1] + similar[:, 2]], 1),
        rtol=1e-4,
    )
    assert votes.argmax(1).tolist() == [0, 2]
    assert (votes[:, 1] == -torch.inf).all()  # a class without prototypes is never predicted


# ---- the objective ----
def test_every_term_reaches_the_right_networks(node_federation):
    """The second view's terms and the reconstruction reach the sampler.

    All but the reconstruction reach the model.
    """
    for term in ("second", "links", "align"):
        method, client, suggested = scene(node_federation, **{**OFF, term: 1.0})
        local_model, model = client.state["model"], {"candidates": suggested}
        plain = FGGP(**OFF).objective(client, client.graph, local_model, model)
        extra = method.objective(client, client.graph, local_model, model) - plain
        assert sampler_gradient(client, extra) > 0, term
        extra = method.objective(client, client.graph, local_model, model) - FGGP(**OFF).objective(
            client, client.graph, local_model, model
        )
        (gradient,) = torch.autograd.grad(extra, local_model.layers[0].weight, allow_unused=True)
        assert (float(gradient.abs().sum()) > 1e-6) == (term != "links"), term


def test_a_step_moves_the_sampler(node_federation):
    method, client, _ = scene(node_federation)
    before = {k: t.clone() for k, t in weights(client.state["sampler"]).items()}
    reply = method.train(client, weights(client.state["model"]), before)
    assert all(not torch.equal(reply["sampler"][k], before[k]) for k in before)


def test_without_its_terms_it_trains_as_fedavg(node_federation):
    plain = run("fedavg", node_federation, **SMALL)
    owners = ("server", *node_federation.names)
    off = run("fggp", node_federation, **OFF, **SMALL)
    assert largest_gap(off, plain, owners) < 1e-6
    assert largest_gap(run("fggp", node_federation, **SMALL), plain, owners) > 1e-4
    by_head = run("fggp", node_federation, classifier="head", **OFF, **SMALL)
    assert [e["accuracy"] for e in by_head.history] == [e["accuracy"] for e in plain.history]
    assert [e["accuracy"] for e in off.history] != [e["accuracy"] for e in plain.history]
    # No prototypes yet: the head predicts.
    assert off.history[0]["accuracy"] == plain.history[0]["accuracy"]


def test_global_evaluation_votes_with_the_new_clusters(node_federation, trainings):
    exchanges = trainings()
    result = run("fggp", node_federation, evaluation="global", **SMALL)
    expected = cluster_means(list(exchanges[-1][1].values()))
    model = build_model("gcn-2x8", 12, 3, dropout=0.0, seed=0)
    server = result.final_models["server"]
    assert all(torch.equal(server[name], tensor) for name, tensor in expected.items())
    load_weights(model, {name: t for name, t in server.items() if name not in expected})
    right = total = 0
    for graph in node_federation.graphs:
        named = vote(model.embed(graph), expected["clusters"], expected["of_class"], 3, 0.1).argmax(
            1
        )
        right += graph.num_nodes * float((named == graph.y)[graph.test].float().mean())
        total += graph.num_nodes
    assert result.history[-1]["accuracy"] == pytest.approx(right / total)


# ---- what travels, and bad input ----
def test_what_travels(node_federation, trainings):
    exchanges = trainings()
    run("fggp", node_federation, **SMALL)
    for _, replies in exchanges:
        for reply in replies.values():
            assert len(reply["prototypes"]) == reply["present"].sum()
            assert (reply["prototypes"] != 0).any(1).all()
            assert {*reply} == {"model", "sampler", "prototypes", "present"}
    assert "clusters" not in exchanges[0][0]["0"]
    expected = cluster_means(list(exchanges[0][1].values()))
    assert torch.equal(exchanges[1][0]["2"]["clusters"], expected["clusters"])
    assert torch.equal(exchanges[1][0]["2"]["of_class"], expected["of_class"])


def test_a_client_without_labels_sends_no_prototypes(node_federation, trainings):
    graphs = node_federation.graphs
    bare = replace(graphs[0], train=torch.zeros_like(graphs[0].train))
    for inductive in (False, True):
        exchanges = trainings()
        result = run(
            "fggp",
            replace(node_federation, graphs=(bare, *graphs[1:]), whole=None, inductive=inductive),
            **SMALL,
        )
        assert result.summary["status"] == "completed"
        assert not any(replies["0"]["present"].any() for _, replies in exchanges)


def test_without_any_labels_the_head_predicts(node_federation, trainings):
    bare = Federation(
        tuple(replace(g, train=torch.zeros_like(g.train)) for g in node_federation.graphs)
    )
    exchanges = trainings()
    result = run("fggp", bare, **SMALL)
    assert not any("clusters" in sent["0"] for sent, _ in exchanges)
    assert [e["accuracy"] for e in result.history] == [
        e["accuracy"] for e in run("fedavg", bare, **SMALL).history
    ]


def test_an_absent_class_and_a_single_client(node_federation):
    federation = Federation(tuple(replace(g, num_classes=4) for g in node_federation.graphs[:1]))
    result = run("fggp", federation, **SMALL, auc=True)
    assert result.summary["status"] == "completed"
    assert all(t.isfinite().all() for t in flatten(result.final_models).values())


def test_a_complete_graph_has_no_other_pairs():
    ends = torch.combinations(torch.arange(6)).T
    graph = Graph(
        torch.ones(6, 2), torch.cat([ends, ends.flip(0)], 1), torch.zeros(6, dtype=torch.int64), 2
    )
    h = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    suggested = candidates(graph, h, 3)
    expected = 0.5 * F.softplus(-scores(h, ends)).mean()
    assert torch.isclose(reconstruction(h, suggested, torch.Generator().manual_seed(0)), expected)


def test_node_tasks_only(graph_federation):
    with pytest.raises(ConfigError, match="does node tasks"):
        run("fggp", graph_federation, **SMALL)
