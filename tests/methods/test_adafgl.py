"""AdaFGL: the rewired graph, both branches and the confidence by hand, the two stages, memory."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tests.watching import Largest

from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.core.message import flatten
from fedloom.data.federation import Federation
from fedloom.data.graph import Graph
from fedloom.data.partition import divide
from fedloom.data.synthetic import synthetic
from fedloom.errors import ConfigError
from fedloom.experiments.run import run
from fedloom.methods.adafgl import (
    AdaFGL,
    Personal,
    Rewired,
    confidence,
    push_and_pull,
    rewire,
    unit_rows,
)
from fedloom.nn.weights import weights

SMALL = {"model": "gcn-2x8", "rounds": 2, "personal": 3}
QUICK = {"personal": 2, "lr": 0.05}
OTHER = {"hide": 0.2, "spread": 1.0, "spread_steps": 1}


def client_of(graph, spec="gcn-2x8", dropout=0.0, inductive=False):
    facts = Facts(graph.num_features, graph.num_classes, "node", ("0",), (spec,), dropout=dropout)
    return Client("0", graph, facts, inductive)


def scene(graph, dropout=0.0, inductive=False, **settings):
    """Returns a method, and a client that is ready for its personal stage."""
    client, method = client_of(graph, dropout=dropout, inductive=inductive), AdaFGL(**settings)
    method.setup(client)
    method.prepare(client, weights(client.build("federated")))
    return method, client


def graph_of(edges, y, train, classes=2, x=None, nodes=None):
    edges, y, train = (
        torch.tensor(edges, dtype=torch.int64).reshape(-1, 2).T,
        torch.tensor(y),
        torch.tensor(train, dtype=torch.bool),
    )
    x = torch.eye(len(y)) if x is None else x
    return Graph(
        x, torch.cat([edges, edges.flip(0)], 1), torch.where(train, y, -1), classes, train=train
    ).check()


def largest_gap(one, other, owner="server"):
    one, other = flatten(one.final_models[owner]), flatten(other.final_models[owner])
    assert one.keys() == other.keys()
    return max(float((one[k] - other[k]).abs().max()) for k in one)


def stages(result):
    return [entry["stage"] for entry in result.history]


# ---- the rewired graph ----
def written_out(graph, logits, alpha):
    """Returns S as in the docstring, n x n."""
    P = logits.softmax(1)
    n, M = len(P), torch.zeros(len(P), len(P))
    weight = torch.ones(graph.num_edges) if graph.edge_weight is None else graph.edge_weight
    for (source, target), w in zip(graph.edge_index.T.tolist(), weight.tolist(), strict=True):
        if source != target:
            M[target, source] += alpha * w
    for i in range(n):
        for j in range(n):
            if i != j:
                M[i, j] += (1 - alpha) * torch.dot(P[i], P[j]) / (P[i].norm() * P[j].norm())
    M += torch.eye(n)
    degree = M.sum(1)
    return M / (degree[:, None] * degree[None, :]).sqrt()


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_products_with_s_equal_those_of_the_dense_matrix(alpha):
    rng = torch.Generator().manual_seed(0)
    # One edge goes one way only, one is a loop, node 4 has none.
    ends = torch.tensor([[0, 1, 1, 2, 3, 3], [1, 0, 2, 1, 3, 0]])
    weight = torch.tensor([1.0, 1.0, 2.0, 2.0, 1.0, 0.5])
    graph = Graph(
        torch.rand(5, 3, generator=rng),
        ends,
        torch.zeros(5, dtype=torch.int64),
        2,
        edge_weight=weight,
    )
    logits, h = 3 * torch.randn(5, 2, generator=rng), torch.randn(5, 4, generator=rng)
    view = Rewired(graph.x, ends, graph.y, 2, edge_weight=weight, logits=logits, alpha=alpha)
    assert torch.allclose(view.propagate(h), written_out(graph, logits, alpha) @ h, atol=1e-5)


def test_alpha_one_gives_the_usual_adjacency():
    graph = synthetic(nodes=40, classes=3, features=5, seed=0)
    view = rewire(graph, client_of(graph).build(), 1.0)
    h = torch.randn(40, 4)
    assert torch.allclose(view.propagate(h), graph.propagate(h, "sym"), atol=1e-6)


def test_the_gradient_of_a_product_equals_that_of_the_dense_matrix():
    graph = synthetic(nodes=20, classes=3, features=5, degree=3.0, seed=0)
    view = rewire(graph, client_of(graph).build(), 0.4)
    h, into = torch.randn(20, 2, requires_grad=True), torch.randn(20, 2)
    (found,) = torch.autograd.grad((view.propagate(h) * into).sum(), h)
    assert torch.allclose(found, written_out(graph, view.logits, 0.4).T @ into, atol=1e-5)


def test_confident_predictions_link_only_nodes_of_one_class():
    graph = graph_of([], [0, 0, 1, 1], [1, 0, 1, 0])
    logits = torch.tensor([[50.0, 0.0], [50.0, 0.0], [0.0, 50.0], [0.0, 50.0]])
    view = Rewired(graph.x, graph.edge_index, graph.y, 2, logits=logits, alpha=0.0)
    half = torch.full((2, 2), 0.5)
    assert torch.allclose(view.propagate(torch.eye(4)), torch.block_diag(half, half), atol=1e-6)


def test_a_rewired_graph_caches_nothing_on_the_original_graph():
    """A federation is used by several runs: a run must not leave model-dependent caches on it."""
    graph = synthetic(nodes=20, classes=3, features=5, degree=3.0, seed=0)
    models = [client_of(graph).build(purpose) for purpose in ("one", "other")]
    one, other = (rewire(graph, model, 0.5) for model in models)
    assert not torch.allclose(one.unit_predictions, other.unit_predictions)
    assert one.sparse_x is graph.sparse_x


# ---- the branches ----
def test_push_and_pull_by_hand():
    rng = torch.Generator().manual_seed(0)
    Z, U = 2 * torch.randn(6, 3, generator=rng), unit_rows(torch.rand(6, 3, generator=rng))
    V = Z.softmax(1) / Z.softmax(1).norm(dim=1, keepdim=True)
    L = 0.3 * U @ U.T + 0.7 * V @ V.T
    assert torch.allclose(L.diagonal(), torch.ones(6))
    N = 1 - L
    assert (N.sum(1) > 1).all()
    pull, push = (L @ Z) / L.sum(1, keepdim=True), (N @ Z) / N.sum(1, keepdim=True)
    expected = (Z + pull.softmax(1) - push.softmax(1)) / 2
    assert torch.allclose(push_and_pull(Z, U, 0.3), expected, atol=1e-5)


@given(st.integers(1, 8), st.integers(1, 4), st.floats(0, 1), st.floats(0, 300))
def test_push_and_pull_is_finite_for_confident_equal_and_single_nodes(nodes, classes, beta, scale):
    rng = torch.Generator().manual_seed(nodes)
    Z = (scale * torch.randn(nodes, classes, generator=rng)).requires_grad_()
    for logits in (Z, Z[:1].expand(nodes, classes)):
        out = push_and_pull(logits, unit_rows(logits.detach().softmax(1)), beta)
        assert out.isfinite().all()
        # Pull and push are probabilities, halved.
        assert (out - logits / 2).abs().max() <= 0.5 + 1e-5 * (1 + scale)
        (g,) = torch.autograd.grad(out.square().sum(), Z)
        assert g.isfinite().all()


def test_the_four_networks_get_the_right_inputs(node_federation):
    _, client = scene(node_federation.graphs[0], hops=2, alpha=0.3, beta=0.4)
    model, rewired = client.state["model"], client.memory["rewired"]
    S, X = written_out(client.graph, rewired.logits, 0.3), client.graph.x
    U = unit_rows(rewired.logits.softmax(1))

    def smoothed(part):
        hops = torch.cat([X, S @ X, S @ S @ X], 1)
        hidden = F.relu(hops @ part.layers[0].weight + part.layers[0].bias)
        return hidden @ part.classifier.weight + part.classifier.bias

    alone = model.features
    hidden = F.relu(X @ alone.layers[0].weight + alone.layers[0].bias)
    expected = (
        smoothed(model.homophilous),
        hidden @ alone.classifier.weight + alone.classifier.bias,
        smoothed(model.smooth),
        push_and_pull(smoothed(model.learnt), U, 0.4),
    )
    for found, by_hand in zip(model.views(rewired), expected, strict=True):
        assert torch.allclose(found, by_hand, atol=1e-5)


def test_the_objective_and_the_mixture_by_hand(node_federation):
    method, client = scene(node_federation.graphs[0], preserve=0.7)
    model, rewired, graph = client.state["model"], client.memory["rewired"], client.graph
    views = model.views(rewired)
    P = model.federated(graph).softmax(1)
    own = sum(F.cross_entropy(v[graph.train], graph.y[graph.train]) for v in views)
    expected = own + 0.7 * (views[0].softmax(1) - P).square().mean()
    assert torch.isclose(method.personal_objective(client), expected, atol=1e-5)
    H, *others = (v.softmax(1) for v in views)
    h = float(model.confidence)
    assert 0 < h < 1
    mixture = h * (H + P) / 2 + (1 - h) * sum(others) / 3
    assert torch.allclose(model.probabilities(rewired), mixture, atol=1e-6)
    assert torch.allclose(method.predict(client, None).softmax(1), mixture, atol=1e-6)


def test_all_confidence_in_one_branch_is_that_branch(node_federation):
    _, client = scene(node_federation.graphs[0])
    model, rewired = client.state["model"], client.memory["rewired"]
    H, *others = (v.softmax(1) for v in model.views(rewired))
    model.confidence.fill_(1.0)
    assert torch.allclose(
        model.probabilities(rewired), (H + rewired.logits.softmax(1)) / 2, atol=1e-6
    )
    model.confidence.fill_(0.0)
    assert torch.allclose(model.probabilities(rewired), torch.stack(others).mean(0), atol=1e-6)


def test_gradients_reach_all_four_networks_and_neither_the_federated_model_nor_the_confidence(
    node_federation,
):
    method, client = scene(node_federation.graphs[0])
    model = client.state["model"]
    method.personal_objective(client).backward()
    for part in (model.homophilous, model.features, model.smooth, model.learnt):
        assert all(p.grad.abs().sum() > 0 for p in part.parameters())
    assert all(p.grad is None for p in (*model.federated.parameters(), model.confidence))
    before = {name: t.clone() for name, t in weights(model).items()}
    method.personalise(client, torch.tensor(0))
    moved = {name for name, t in weights(model).items() if not torch.equal(t, before[name])}
    assert moved == {name for name in before if not name.startswith(("federated.", "confidence"))}


def test_preserving_pulls_only_the_homophilous_branch_to_the_federated_predictions(
    node_federation,
):
    def gradients(preserve):
        method, client = scene(node_federation.graphs[0], preserve=preserve)
        method.personal_objective(client).backward()
        return {
            name: p.grad
            for name, p in client.state["model"].named_parameters()
            if p.grad is not None
        }

    without, with_it = gradients(0.0), gradients(5.0)
    changed = {
        name.partition(".")[0] for name in without if not torch.equal(without[name], with_it[name])
    }
    assert changed == {"homophilous"}


# ---- the confidence ----
def two_cliques(labelled=5):
    edges = [(i, j) for k in (0, 5) for i in range(k, k + 5) for j in range(i + 1, k + 5)]
    return graph_of(edges, [0] * 5 + [1] * 5, ([True] * labelled + [False] * (5 - labelled)) * 2)


def share(graph, seeds=40, **how):
    how = {"hide": 0.5, "steps": 5, "spread": 0.5, **how}
    return [
        confidence(graph, **how, rng=torch.Generator().manual_seed(seed)) for seed in range(seeds)
    ]


def test_propagation_recovers_all_labels_under_homophily_and_none_under_heterophily():
    assert sum(share(two_cliques())) / 40 > 0.9
    pairs = graph_of([(2 * i, 2 * i + 1) for i in range(10)], [0, 1] * 10, [True] * 20)
    assert set(share(pairs)) == {0.0}


def test_a_step_of_propagation_by_hand():
    """A path 0 - 1 - 2, all labelled: a hidden node gets its neighbours' labels."""
    path = graph_of([(0, 1), (1, 2)], [0, 1, 1], [True] * 3)
    found = set()
    for seed in range(20):
        hidden = int(torch.randperm(3, generator=torch.Generator().manual_seed(seed))[0])
        h = confidence(path, 0.34, 1, 0.5, torch.Generator().manual_seed(seed))
        # 0 gets 1's label (class 1, wrong). 1 gets 1/√6 from 0 and from 2: a tie, which the first
        # class wins (wrong). 2 gets 1's label.
        assert h == (1.0 if hidden == 2 else 0.0)
        found.add(hidden)
    assert found == {0, 1, 2}


def test_a_label_that_propagation_does_not_reach_is_not_recovered():
    isolated = graph_of([], [0] * 6, [True] * 6)
    assert set(share(isolated)) == {0.0}


def test_one_class_is_recovered_and_too_few_labels_give_one_half():
    edges = [(i, i + 1) for i in range(5)]
    assert set(share(graph_of(edges, [0] * 6, [True] * 6), steps=6)) == {1.0}
    assert share(graph_of(edges, [0] * 6, [True] + [False] * 5), seeds=1) == [0.5]
    assert share(graph_of(edges, [0] * 6, [False] * 6), seeds=1) == [0.5]


def test_only_training_labels_are_propagated(node_federation):
    graph = node_federation.graphs[0]
    other = replace(graph, y=torch.where(graph.train, graph.y, (graph.y + 1) % 3))
    one, another = (
        confidence(client_of(g).graph, 0.5, 5, 0.5, torch.Generator().manual_seed(0))
        for g in (graph, other)
    )
    assert one == another


# ---- the stages ----
def test_the_personal_stage_starts_from_the_last_model_of_fedavg(
    node_federation,
):
    ada, avg = (
        run("adafgl", node_federation, **SMALL),
        run("fedavg", node_federation, model="gcn-2x8", rounds=2),
    )
    assert largest_gap(ada, avg) == 0
    assert stages(ada) == ["train"] * 2 + ["personal"] * 3
    assert [e["accuracy"] for e in ada.history[:2]] == [e["accuracy"] for e in avg.history]
    for owner in node_federation.names:
        kept = {
            name.removeprefix("federated."): t
            for name, t in ada.final_models[owner].items()
            if name.startswith("federated.")
        }
        assert all(torch.equal(t, avg.final_models["server"][name]) for name, t in kept.items())
        assert kept.keys() == avg.final_models["server"].keys()
        assert 0 <= float(ada.final_models[owner]["confidence"]) <= 1
    assert ada.summary["best_round"] == 2
    best = max(ada.history[2:], key=lambda e: e["val_accuracy"])
    assert ada.accuracy == best["accuracy"]


def test_the_personal_stage_sends_the_model_once_and_nothing_else(node_federation):
    ada, avg = (
        run("adafgl", node_federation, **SMALL),
        run("fedavg", node_federation, model="gcn-2x8", rounds=2),
    )
    phases = dict(ada.traffic["phases"])
    model = sum(t.numel() for t in avg.final_models["server"].values())
    assert phases["prepare"]["scalars_down"] == 4 * model
    assert phases["prepare"]["scalars_up"] == 0
    assert phases["train"] == avg.traffic["phases"]["train"]
    epochs = len(ada.history) - 2
    assert epochs > 0
    assert phases["personalise"]["scalars_up"] == 0
    assert phases["personalise"]["scalars_down"] == 4 * epochs  # the number of the epoch


def test_finetune_comes_between_the_two_stages(node_federation):
    result = run("adafgl", node_federation, finetune=1, **SMALL)
    assert stages(result) == ["train"] * 2 + ["finetune"] + ["personal"] * 3
    tuned = run("fedavg", node_federation, model="gcn-2x8", rounds=2, finetune=1)
    for owner in node_federation.names:
        kept = {
            name.removeprefix("federated."): t
            for name, t in result.final_models[owner].items()
            if name.startswith("federated.")
        }
        assert all(torch.equal(t, tuned.final_models[owner][name]) for name, t in kept.items())


class Killed(BaseException):
    """Stands for anything that ends a process."""


def test_a_run_killed_in_its_personal_stage_resumes_identically(node_federation, tmp_path):
    settings = {**SMALL, "checkpoint_every": 1, "participation": 0.7}
    unbroken = run("adafgl", node_federation, out=tmp_path / "unbroken", **settings)
    rewired = []

    def die(entry):
        rewired.append(entry["stage"])
        if rewired.count("personal") == 2:
            raise Killed

    with pytest.raises(Killed):
        run("adafgl", node_federation, out=tmp_path / "broken", callbacks=die, **settings)
    resumed = run("adafgl", node_federation, out=tmp_path / "broken", resume=True, **settings)
    assert resumed.summary["history_hash"] == unbroken.summary["history_hash"]
    assert all(
        torch.equal(t, flatten(unbroken.final_models)[name])
        for name, t in flatten(resumed.final_models).items()
    )


def test_more_epochs_fit_the_training_labels(node_federation):
    method, client = scene(node_federation.graphs[0], lr=0.02)
    first = method.personal_objective(client).item()
    for _ in range(60):
        method.personalise(client, torch.tensor(0))
    assert method.personal_objective(client).item() < first / 4


def test_an_inductive_client_is_scored_on_nodes_it_has_not_trained_on(node_federation):
    method, client = scene(node_federation.graphs[0], inductive=True)
    rewired, everything = client.memory["rewired"], client.memory["rewired full graph"]
    assert rewired.num_nodes == int(node_federation.graphs[0].train.sum()) < everything.num_nodes
    method.personalise(client, torch.tensor(0))
    assert method.predict(client, None).shape == (everything.num_nodes, 3)
    _, transductive = scene(node_federation.graphs[0])
    assert transductive.memory["rewired"] is transductive.memory["rewired full graph"]


# ---- memory ----
def test_no_tensor_of_nodes_by_nodes():
    n = 800
    graph = divide(synthetic(nodes=n, classes=3, features=12, seed=0), 1, "random", 0).graphs[0]
    with Largest() as largest:
        method, client = scene(graph, dropout=0.5)
        method.personalise(client, torch.tensor(0))
        method.predict(client, None)
    assert largest.numel < n * 64


def test_a_graph_whose_dense_matrix_would_not_fit_in_memory():
    n = 60_000  # an n x n matrix would take 14 GB
    rng = torch.Generator().manual_seed(0)
    y, x = torch.randint(3, (n,), generator=rng), torch.rand(n, 4, generator=rng)
    train = torch.rand(n, generator=rng) < 0.2
    graph = Graph(x, torch.randint(n, (2, 3 * n), generator=rng), y, 3, train=train, test=~train)
    result = run(
        "adafgl", Federation((graph,)), model="gcn-2x4", rounds=1, epochs=1, personal=1, hops=2
    )
    assert result.summary["status"] == "completed"
    assert all(t.isfinite().all() for t in flatten(result.final_models).values())


# ---- bad input ----
def test_a_client_without_labels_keeps_the_federated_model(node_federation):
    graphs = node_federation.graphs
    bare = replace(graphs[0], train=torch.zeros_like(graphs[0].train))
    for inductive in (False, True):
        federation = replace(
            node_federation, graphs=(bare, *graphs[1:]), whole=None, inductive=inductive
        )
        result = run("adafgl", federation, **SMALL)
        assert all(
            torch.equal(t, result.final_models["server"][name])
            for name, t in result.final_models["0"].items()
        )
        assert "confidence" in result.final_models["1"]
        rows = [
            row
            for e in result.history
            if e["stage"] == "personal"
            for row in e["clients"]
            if row["id"] == "0"
        ]
        assert len({row["accuracy"] for row in rows}) == 1


def test_one_class_one_label_no_edges_one_client_and_no_labels_at_all(node_federation):
    graphs = node_federation.graphs
    of_one = replace(graphs[0], train=graphs[0].train & (graphs[0].y == 0))
    first = torch.zeros_like(graphs[1].train)
    first[graphs[1].train.nonzero()[0]] = True
    single, no_edges = (
        replace(graphs[1], train=first),
        replace(graphs[2], edge_index=graphs[2].edge_index[:, :0]),
    )
    bare = replace(graphs[3], train=torch.zeros_like(graphs[3].train))
    for federation in (
        Federation((of_one, single, no_edges, bare)),
        *(Federation((g,)) for g in (of_one, single, no_edges, bare)),
    ):
        for inductive in (False, True):
            result = run("adafgl", replace(federation, inductive=inductive), **SMALL)
            assert result.summary["status"] == "completed"
            assert all(t.isfinite().all() for t in flatten(result.final_models).values())


def test_a_graph_of_one_node():
    graph = Graph(
        torch.ones(1, 3),
        torch.zeros(2, 0, dtype=torch.int64),
        torch.tensor([1]),
        2,
        train=torch.tensor([True]),
    ).check()
    method, client = scene(graph)
    method.personalise(client, torch.tensor(0))
    assert isinstance(client.state["model"], Personal)
    assert float(client.state["model"].confidence) == 0.5
    assert method.personal_objective(client).isfinite()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("alpha", 1.5),
        ("beta", -0.1),
        ("hide", 1.0),
        ("hide", 0.0),
        ("hops", 0),
        ("personal", 0),
        ("spread", 0.0),
    ],
)
def test_a_bad_setting_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=rf"method\.{name} is "):
        AdaFGL(**{name: value})


def test_graph_tasks_are_refused(graph_federation):
    with pytest.raises(ConfigError, match="node"):
        run("adafgl", graph_federation, **SMALL)
