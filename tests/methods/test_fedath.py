"""FedATH: the weighted graph, the evaluator, the dependence and both losses by hand; its limits."""

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
from fedloom.data.synthetic import synthetic
from fedloom.errors import ConfigError
from fedloom.experiments.run import run
from fedloom.methods.fedath import Evaluator, FedATH
from fedloom.nn.build import build_model
from fedloom.nn.edge_weights import EdgeWeighted
from fedloom.nn.losses import entropy, hsic

SMALL = {"model": "gcn-2x8", "rounds": 3}
SEEING = [
    "gcn-2x8",
    "sage-2x8",
    "gin-2x8",
    "gcnii-3x8",
    "sgc-2x8",
    "ssgc-2x8",
    "sign-2x8",
    "gamlp-2x8",
    "appnp-3x8",
    "dgcn-3x8",
    "gcn-2x8+norm",
]


def small_graph(**changes):
    """Returns six nodes with edges both ways, one way, weighted, and a self-loop.

    Node 5 has no edge. Nodes 0, 1, 2 have labels.
    """
    graph = Graph(
        torch.randn(6, 4, generator=torch.Generator().manual_seed(0)),
        torch.tensor([[0, 1, 1, 2, 3, 3, 4], [1, 0, 2, 1, 3, 0, 3]]),
        torch.tensor([0, 1, 2, 0, 1, 2]),
        3,
        train=torch.tensor([True, True, True, False, False, False]),
        edge_weight=torch.tensor([1.0, 1.0, 2.0, 2.0, 5.0, 0.5, 1.5]),
    )
    return replace(graph, **changes)


def scene(graph, spec="gcn-2x8", **settings):
    """Returns a method and a client after setup."""
    facts = Facts(graph.num_features, graph.num_classes, "node", ("0",), (spec,), dropout=0.0)
    client, method = Client("0", graph, facts), FedATH(**settings)
    method.setup(client)
    return method, client


def ends_of(graph):
    """Returns targets and sources of the edges, in the order of the scores."""
    bare = graph.adjacency("sum")
    return bare.rows, bare.indices.long()


@torch.no_grad()
def gap(one, other):
    assert one.keys() == other.keys()
    return max(float((one[key] - other[key]).abs().max()) for key in one)


def own_model(result, owner):
    """Returns the part of a client's model that travels."""
    return {
        name.removeprefix("sees."): t
        for name, t in result.final_models[owner].items()
        if not name.startswith("evaluator.")
    }


def show_all_edges(monkeypatch):
    """Gives every edge a score whose σ is exactly 1."""
    monkeypatch.setattr(
        Evaluator,
        "forward",
        lambda self, graph, rng=None: torch.full((graph.adjacency("sum").nnz,), 1e4),
    )


# ---- the weighted graph ----
@pytest.mark.parametrize("kind", ["sym", "row", "mean", "sum", "sym-bare"])
def test_products_and_gradients_are_those_of_a_dense_matrix(kind):
    graph, rng = small_graph(), torch.Generator().manual_seed(1)
    target, source = ends_of(graph)
    score = torch.rand(len(source), generator=rng).requires_grad_()
    h, onto = torch.randn(2, 6, 3, generator=rng)
    A = torch.zeros(6, 6).index_put((target, source), graph.adjacency("sum").values * score)
    A = A + torch.eye(6) if kind in ("sym", "row") else A
    degree = A.sum(1)
    inverse = torch.where(degree > 0, 1 / degree.clamp(min=1e-9), 0.0)
    S = {"sum": A, "row": inverse[:, None] * A, "mean": inverse[:, None] * A}.get(
        kind, inverse.sqrt()[:, None] * A * inverse.sqrt()
    )
    got = EdgeWeighted(graph, score).propagate(h, kind)
    assert torch.allclose(got, S @ h, atol=1e-6)
    expected, arrived = (torch.autograd.grad((out * onto).sum(), score)[0] for out in (S @ h, got))
    assert torch.allclose(arrived, expected, atol=1e-5)


@pytest.mark.parametrize("spec", SEEING)
def test_with_all_weights_one_every_model_predicts_as_on_the_graph_itself(spec):
    graph = small_graph()
    model = build_model(spec, 4, 3, seed=0)
    count = graph.adjacency("sum").nnz
    assert torch.allclose(model(EdgeWeighted(graph, torch.ones(count))), model(graph), atol=1e-5)
    score = torch.linspace(0.1, 0.9, count).requires_grad_()
    assert not torch.allclose(model(EdgeWeighted(graph, score)), model(graph), atol=1e-4)
    model(EdgeWeighted(graph, score)).square().sum().backward()
    assert score.grad.abs().sum() > 0


def test_a_weighted_graph_leaves_the_original_unchanged():
    graph = small_graph()
    model = build_model("sgc-2x8", 4, 3, seed=0)
    before = model(replace(graph))
    model(EdgeWeighted(graph, torch.full((6,), 0.1)))
    assert torch.equal(model(graph), before)


@pytest.mark.parametrize("spec", ["gat-2x8", "mlp-2x8"])
def test_models_that_ignore_edge_weights_are_refused(node_federation, spec, tmp_path):
    with pytest.raises(
        ConfigError, match=rf"model '{spec}': fedath learns edge weights.*valid: .*gcn"
    ):
        run("fedath", node_federation, **{**SMALL, "model": spec}, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


# ---- the evaluator ----
def test_scores_by_hand():
    """The MLP of both endpoints' concatenated rows, with PyTorch's own batch normalisation."""
    _, client = scene(small_graph())
    model, graph = client.state["model"].evaluator, client.graph
    with torch.no_grad():
        for parameter in model.norms.parameters():
            parameter.add_(
                torch.randn(
                    parameter.shape, generator=torch.Generator().manual_seed(len(parameter))
                )
            )
    target, source = ends_of(graph)
    h = model.gcn(graph)
    pair = torch.cat([h[source], h[target]], 1)
    first = pair @ torch.cat([model.source.weight, model.target.weight], 1).T
    hidden = F.relu(
        F.batch_norm(first, None, None, model.norms[0].weight, model.norms[0].bias, training=True)
    )
    hidden = F.batch_norm(
        hidden @ model.hidden[0].weight.T,
        None,
        None,
        model.norms[1].weight,
        model.norms[1].bias,
        training=True,
    )
    expected = (F.relu(hidden) @ model.out.weight.T + model.out.bias).squeeze(1)
    assert torch.allclose(model(graph), expected, atol=1e-5)


@pytest.mark.parametrize("classes", [1, 2, 3, 7])
def test_any_number_of_classes(classes):
    graph = small_graph(num_classes=classes, y=torch.zeros(6, dtype=torch.int64))
    method, client = scene(graph)
    assert client.state["model"].evaluator(client.graph).shape == (6,)
    method.descend(client, client.state["model"])
    assert client.state["model"](client.graph).isfinite().all()


@pytest.mark.parametrize("edges", [[[], []], [[2], [2]], [[0], [1]]])
def test_no_edge_a_self_loop_and_a_single_edge(edges):
    graph = small_graph(edge_index=torch.tensor(edges, dtype=torch.int64), edge_weight=None)
    method, client = scene(graph)
    of_causal, of_biased = method.losses(client, client.graph)
    assert of_causal.isfinite()
    assert of_biased.isfinite()
    method.descend(client, client.state["model"])
    assert all(
        p.isfinite().all()
        for model in ("model", "biased")
        for p in client.state[model].parameters()
    )


# ---- the dependence ----
@given(st.integers(2, 9), st.integers(1, 4), st.integers(0, 99))
def test_hsic_is_the_trace_of_centred_kernels(nodes, classes, seed):
    one, other = torch.randn(
        2, nodes, classes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    H = torch.eye(nodes, dtype=torch.float64) - 1 / nodes
    dense = torch.trace(one @ one.T @ H @ (other @ other.T) @ H) / nodes**2
    assert torch.isclose(hsic(one, other), dense)
    assert torch.isclose(hsic(one, other), hsic(other, one))
    assert torch.isclose(hsic(one + 3, other - 1), dense)


def test_hsic_of_a_constant_is_zero():
    one = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    assert hsic(one, torch.ones(5, 3)) < 1e-12
    assert hsic(one, one) > 0.01


def test_entropy_by_hand():
    p = torch.tensor([[0.5, 0.25, 0.25], [1 / 3] * 3])
    expected = (1.5 * torch.tensor(2.0).log() + torch.tensor(3.0).log()) / 2
    assert torch.isclose(entropy(p.log() + 4), expected)
    assert torch.isclose(entropy(torch.tensor([[0.0, -200.0]])), torch.tensor(0.0))


# ---- both losses ----
@pytest.mark.parametrize(("compare", "per"), [("probabilities", "pairs"), ("logits", "nodes")])
def test_both_losses_by_hand(compare, per):
    method, client = scene(small_graph(), independence=0.3, compare=compare, per=per)
    local_model, graph = client.state["model"], client.graph
    s = local_model.evaluator(graph).sigmoid()
    target, source = ends_of(graph)

    def logits(model, share):
        """Both convolutions with a dense S."""
        A = torch.eye(6).index_put(
            (target, source), graph.adjacency("sum").values * share, accumulate=True
        )
        S = A.sum(1).rsqrt()[:, None] * A * A.sum(1).rsqrt()
        h = torch.relu(S @ graph.x @ model.layers[0].weight + model.layers[0].bias)
        return S @ h @ model.classifier.weight + model.classifier.bias

    causal, biased = logits(local_model.sees, s), logits(client.state["biased"], 1 - s)
    p, q = causal.softmax(1), biased.softmax(1)
    ce = -torch.stack([p[i, graph.y[i]].log() for i in range(3)]).mean()
    dependence = hsic(p, q) if compare == "probabilities" else hsic(causal, biased)
    of_causal, of_biased = method.losses(client, graph)
    assert torch.isclose(of_causal, ce + 0.3 * dependence * (6 if per == "nodes" else 1), atol=1e-5)
    assert torch.isclose(of_biased, 0.3 * dependence + (q * q.log()).sum() / 6, atol=1e-5)


@pytest.mark.parametrize("compare", ["probabilities", "logits"])
def test_gradients_reach_the_right_networks(compare):
    graph = synthetic(nodes=60, classes=4, features=12, degree=4.0, seed=0)
    method, client = scene(replace(graph, train=torch.arange(60) < 30), compare=compare)
    model, biased = client.state["model"], client.state["biased"]
    of_causal, of_biased = method.losses(client, client.graph)
    of_causal.backward()
    trained = {
        name: p for name, p in model.named_parameters() if name != "evaluator.gcn.classifier.bias"
    }  # scores are normalised over edges
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in trained.values())
    assert all(p.grad is None for p in biased.parameters())
    model.zero_grad()
    of_biased.backward()
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad.abs().sum() > 0 for p in biased.parameters())


def test_the_dependence_alone_trains_all_three_networks():
    """Without labels CE is 0. The dependence still reaches all three networks."""
    graph = synthetic(nodes=60, classes=4, features=12, degree=4.0, seed=0)
    method, client = scene(replace(graph, train=torch.zeros(60, dtype=torch.bool)))
    of_causal, of_biased = method.losses(client, client.graph)
    (of_causal + of_biased + entropy(torch.zeros(1, 4))).backward()
    for model in (
        client.state["model"].sees,
        client.state["model"].evaluator,
        client.state["biased"],
    ):
        assert sum(float(p.grad.abs().sum()) for p in model.parameters() if p.grad is not None) > 0


def test_training_lowers_the_dependence_and_raises_the_biased_entropy():
    graph = synthetic(nodes=120, classes=3, features=12, degree=6.0, homophily=0.8, seed=1)
    method, client = scene(replace(graph, train=torch.arange(120) < 60), epochs=60)
    model, graph = client.state["model"], client.graph

    def measured():
        with torch.no_grad():
            score = model.evaluator(graph)
            causal, biased = (
                model(graph),
                client.state["biased"](EdgeWeighted(graph, (-score).sigmoid())),
            )
        return client.loss(causal, graph), entropy(biased)

    before = measured()
    method.descend(client, model)
    after = measured()
    assert after[0] < before[0]
    assert after[1] > before[1]


# ---- rounds ----
def test_with_all_edges_and_no_dependence_it_is_fedavg(node_federation, monkeypatch):
    plain = run("fedavg", node_federation, **SMALL)
    other = run("fedath", node_federation, independence=0.0, **SMALL)
    show_all_edges(monkeypatch)
    same = run("fedath", node_federation, independence=0.0, **SMALL)
    for owner in ("server", *node_federation.names):
        # (S X) W there, S (X W) here.
        assert gap(own_model(same, owner), plain.final_models[owner]) < 1e-6
        assert gap(own_model(other, owner), plain.final_models[owner]) > 1e-4


def test_only_the_causal_model_travels(node_federation, trainings):
    exchanges = trainings()
    result = run("fedath", node_federation, **SMALL)
    size = 12 * 8 + 8 + 8 * 3 + 3
    for sent, replies in exchanges:
        assert all(
            sum(t.numel() for t in flatten(m).values()) == size
            for messages in (sent, replies)
            for m in messages.values()
        )
    one, other = (result.final_models[c]["evaluator.out.weight"] for c in node_federation.names[:2])
    assert not torch.equal(one, other)


def test_without_dependence_the_biased_model_does_not_matter(node_federation):
    one, other = (
        run("fedath", node_federation, independence=0.0, compare=c, **SMALL)
        for c in ("logits", "probabilities")
    )
    assert gap(flatten(one.final_models), flatten(other.final_models)) == 0


def test_prediction_is_on_the_causal_graph_also_with_the_global_weights():
    method, client = scene(small_graph())
    model = client.state["model"]
    other = build_model("gcn-2x8", 4, 3, seed=5)
    causal = EdgeWeighted(client.full_graph, model.evaluator(client.full_graph).sigmoid())
    assert torch.equal(method.predict(client, None), model.sees(causal))
    assert torch.allclose(method.predict(client, dict(other.named_parameters())), other(causal))


def test_finetuning_starts_from_the_global_weights_and_minimises_ce_alone():
    method, client = scene(small_graph(), epochs=1)
    model, other = client.state["model"], build_model("gcn-2x8", 4, 3, seed=5)
    biased, evaluator = (
        {k: v.detach().clone() for k, v in m.named_parameters()}
        for m in (client.state["biased"], model.evaluator)
    )
    method.tune(client, torch.tensor(0), {name: p.detach() for name, p in other.named_parameters()})
    # One step of Adam.
    assert gap(dict(model.sees.named_parameters()), dict(other.named_parameters())) < 0.011
    assert gap(dict(client.state["biased"].named_parameters()), biased) == 0
    assert gap(dict(model.evaluator.named_parameters()), evaluator) > 0


@pytest.mark.parametrize("evaluation", ["local", "global"])
def test_both_evaluations(node_federation, evaluation):
    assert (
        0
        <= run("fedath", node_federation, evaluation=evaluation, finetune=1, **SMALL).accuracy
        <= 1
    )


# ---- bad input ----
def test_a_client_of_one_class_and_one_without_labels(node_federation):
    first, second, *rest = node_federation.graphs
    one = replace(
        first, train=first.train & (first.y == 0), test=first.test | (first.train & (first.y != 0))
    )
    bare = replace(second, train=torch.zeros_like(second.train))
    for inductive in (False, True):
        result = run(
            "fedath",
            replace(node_federation, graphs=(one, bare, *rest), whole=None, inductive=inductive),
            **SMALL,
        )
        assert all(t.isfinite().all() for t in flatten(result.final_models).values())


def test_a_client_without_edges_takes_part(node_federation):
    alone = replace(node_federation.graphs[0], edge_index=torch.zeros(2, 0, dtype=torch.int64))
    result = run("fedath", Federation((alone, *node_federation.graphs[1:])), **SMALL)
    assert all(t.isfinite().all() for t in flatten(result.final_models).values())


def test_invalid_settings_are_refused_by_name():
    for field, value in (("independence", -1.0), ("compare", "ranks"), ("per", "edges")):
        with pytest.raises(ConfigError, match=rf"method\.{field}"):
            FedATH(**{field: value})


def test_graph_tasks_are_refused(graph_federation):
    with pytest.raises(ConfigError, match="node"):
        run("fedath", graph_federation, **SMALL)


def test_nothing_is_nodes_by_nodes_or_edges_by_width():
    graph = synthetic(nodes=3000, classes=3, features=12, degree=6.0, seed=0)
    method, client = scene(replace(graph, train=torch.arange(3000) < 300), spec="gcn-2x64")
    with Largest() as largest:
        method.descend(client, client.state["model"])
    assert largest.numel == 3000 * 64  # the output of one convolution; edges have at most C columns
    assert graph.num_edges * 3 < largest.numel < graph.num_edges * 64
