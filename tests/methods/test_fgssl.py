"""FGSSL: both terms by hand, where their gradients go, memory, and its limits."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.watching import Largest

from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.core.message import flatten
from fedloom.data.federation import Federation
from fedloom.data.graph import Graph
from fedloom.errors import ConfigError
from fedloom.experiments.run import run
from fedloom.methods.fgssl import FGSSL
from fedloom.nn import contrast as nn_contrast
from fedloom.nn.contrast import contrast
from fedloom.nn.distillation import log_neighbours, structure, unit

SMALL = {"model": "gcn-2x8", "rounds": 3}
WHOLE = {"weak_edges": 0.0, "weak_columns": 0.0, "strong_edges": 0.0, "strong_columns": 0.0}


def scene(federation, spec="gcn-2x8", **settings):
    """Returns a method and a client after setup, whose global model differs from its own."""
    graph = federation.graphs[0]
    facts = Facts(graph.num_features, graph.num_classes, "node", ("0",), (spec,), dropout=0.0)
    client, method = Client("0", graph, facts), FGSSL(**settings)
    method.setup(client)
    client.memory["global"] = client.build("another")
    return method, client


def five_nodes():
    """Returns a triangle 0-1-2 with a tail 2-3, a loop at 3, and a node without neighbours."""
    edges = torch.tensor([[0, 1], [1, 2], [0, 2], [2, 3]]).T
    ends = torch.cat([edges, edges.flip(0), torch.tensor([[3], [3]])], 1)
    return Graph(
        torch.eye(5),
        ends,
        torch.tensor([0, 1, 0, 1, -1]),
        2,
        train=torch.tensor([1, 1, 1, 1, 0], dtype=torch.bool),
    ).check()


def largest_gap(one, other):
    one, other = flatten(one.final_models), flatten(other.final_models)
    assert one.keys() == other.keys()
    return max(float((one[k] - other[k]).abs().max()) for k in one)


def gradient(loss, model):
    """Returns Σ |∂ loss / ∂θ| of each parameter of a model; 0 where there is none."""
    names, own = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, own, allow_unused=True)
    return {
        name: 0.0 if g is None else float(g.abs().sum())
        for name, g in zip(names, found, strict=True)
    }


def cosine(a, b):
    return float(torch.dot(a, b) / (a.norm() * b.norm()))


# ---- the contrast ----
def test_the_contrast_by_a_double_loop():
    rng = torch.Generator().manual_seed(0)
    z, anchors, y = (
        torch.randn(6, 4, generator=rng),
        torch.randn(6, 4, generator=rng),
        torch.tensor([0, 2, 0, 2, 2, 1]),
    )
    total = 0.0
    for i in range(6):
        e = [math.exp(cosine(z[i], anchors[j]) / 0.3) for j in range(6)]
        same_class = [j for j in range(6) if y[j] == y[i]]
        total += -sum(math.log(e[j] / sum(e)) for j in same_class) / len(same_class)
    assert contrast(z, anchors, y, 0.3).item() == pytest.approx(total / 6, rel=1e-5)


@given(st.integers(1, 9), st.integers(1, 4), st.integers(0, 99))
def test_blocks_of_rows_give_the_same_result(nodes, rows, seed):
    rng = torch.Generator().manual_seed(seed)
    z, anchors = (
        torch.randn(nodes, 3, generator=rng, requires_grad=True),
        torch.randn(nodes, 3, generator=rng),
    )
    y = torch.randint(3, (nodes,), generator=rng)
    whole = contrast(z, anchors, y, 0.2)
    (expected,) = torch.autograd.grad(whole, z)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn_contrast, "ROWS", rows)
        parts = contrast(z, anchors, y, 0.2)
        assert torch.isclose(parts, whole, atol=1e-5)
        assert torch.allclose(torch.autograd.grad(parts, z)[0], expected, atol=1e-5)


def test_only_one_block_of_rows_is_in_memory_in_both_passes(monkeypatch):
    monkeypatch.setattr(nn_contrast, "ROWS", 16)
    z, anchors = torch.rand(400, 8, requires_grad=True), torch.rand(400, 8)
    with Largest() as largest:
        contrast(z, anchors, torch.arange(400) % 3, 0.1).backward()
    assert largest.numel == 16 * 400


def test_the_contrast_of_single_nodes_and_of_one_class():
    z = torch.eye(3)
    alone = contrast(z, z, torch.tensor([0, 1, 2]), 0.1)
    assert alone.item() == pytest.approx(math.log(1 + 2 * math.exp(-10)), abs=1e-6)
    same = torch.ones(3, 2)
    assert contrast(same, same, torch.zeros(3, dtype=torch.int64), 0.1).item() == pytest.approx(
        math.log(3), rel=1e-5
    )


def test_the_contrast_is_zero_without_labels_and_finite_at_a_small_temperature():
    z = torch.randn(3, 4, requires_grad=True)
    nothing = contrast(z[:0], z[:0].detach(), torch.zeros(0, dtype=torch.int64), 0.1)
    assert nothing == 0
    nothing.backward()
    far = contrast(z, -z.detach(), torch.tensor([0, 1, 2]), 1e-4)
    far.backward()
    assert far.isfinite()
    assert z.grad.isfinite().all()


def test_rows_of_zeros_have_a_bounded_gradient():
    z = torch.tensor([[0.0, 0.0], [3.0, 4.0]], requires_grad=True)
    assert torch.equal(unit(z).detach(), torch.tensor([[0.0, 0.0], [0.6, 0.8]]))
    contrast(z, torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1]), 0.1).backward()
    assert z.grad.isfinite().all()
    assert z.grad.abs().max() < 100  # F.normalize would give 1e12


# ---- the structure ----
def by_double_loop(f, f_global, graph, omega):
    edges = {(int(s), int(t)) for s, t in graph.edge_index.T if s != t}
    total, counted = 0.0, 0
    for i in range(graph.num_nodes):
        near = [j for j in range(graph.num_nodes) if (j, i) in edges]
        if not near:
            continue
        counted += 1
        e, e_global = (
            [math.exp(cosine(each[i], each[j]) / omega) for j in near] for each in (f, f_global)
        )
        q, q_global = [v / sum(e) for v in e], [v / sum(e_global) for v in e_global]
        total += sum(g * math.log(g / m) for g, m in zip(q_global, q, strict=True))
    return total / counted


def test_the_structure_by_a_double_loop_over_five_nodes():
    rng, graph = torch.Generator().manual_seed(1), five_nodes()
    f, f_global = torch.randn(5, 3, generator=rng), torch.randn(5, 3, generator=rng)
    expected = by_double_loop(f, f_global, graph, 0.5)
    assert expected > 0.01
    assert structure(f, f_global, graph, 0.5).item() == pytest.approx(expected, rel=1e-5)
    one_way = replace(graph, edge_index=graph.edge_index[:, ::2])
    assert structure(f, f_global, one_way, 0.5).item() == pytest.approx(
        by_double_loop(f, f_global, one_way, 0.5), rel=1e-5
    )


def test_probabilities_sum_to_one_for_every_node_with_neighbours():
    graph = five_nodes()
    odds = log_neighbours(torch.randn(5, 3), graph, 0.01).exp()
    total = torch.zeros(5).index_add(0, graph.adjacency("sum").rows, odds)
    assert torch.allclose(total, torch.tensor([1.0, 1, 1, 1, 0]))


def test_the_structure_term_of_equal_models_is_zero():
    f = torch.randn(5, 3, requires_grad=True)
    same = structure(f, f.detach(), five_nodes(), 0.1)
    assert same.item() == pytest.approx(0, abs=1e-6)
    (g,) = torch.autograd.grad(same, f)
    assert g.abs().max() < 1e-4
    other = structure(f, f.detach().roll(1, 0), five_nodes(), 1e-4)  # the sharpest distribution
    assert other.isfinite()
    assert torch.autograd.grad(other, f)[0].isfinite().all()


def test_without_edges_the_structure_term_is_zero():
    bare = Graph(torch.eye(3), torch.zeros(2, 0, dtype=torch.int64), torch.tensor([0, 1, -1]), 2)
    f = torch.randn(3, 2, requires_grad=True)
    nothing = structure(f, f.detach(), bare, 0.1)
    assert nothing == 0
    nothing.backward()
    assert f.grad.abs().sum() == 0


def test_no_tensor_of_nodes_by_nodes():
    n = 3000
    graph = Graph(
        torch.ones(n, 2), torch.randint(n, (2, 4 * n)), torch.zeros(n, dtype=torch.int64), 2
    )
    f = torch.randn(n, 3, requires_grad=True)
    with Largest() as largest:
        structure(f, f.detach().roll(1, 0), graph, 0.1).backward()
    assert largest.numel <= 4 * n * 3  # edges x classes


# ---- the objective ----
def test_the_objective_is_the_sum_of_three_terms(node_federation):
    method, client = scene(
        node_federation, semantic=0.7, structural=0.3, tau=0.4, omega=0.5, **WHOLE
    )
    model, other, graph = client.state["model"], client.memory["global"], client.graph
    z, z_global, known = model.embed(graph), other.embed(graph), graph.train
    expected = (
        client.loss(model(graph), graph)
        + 0.7 * contrast(z[known], z_global[known], graph.y[known], 0.4)
        + 0.3 * by_double_loop(model(graph).detach(), other(graph).detach(), graph, 0.5)
    )
    assert torch.isclose(method.objective(client, graph, model, {}), expected, atol=1e-5)


@pytest.mark.parametrize("spec", ["gcn-2x8", "gat-2x8", "sgc-2x8", "sage-2x8+linear+norm"])
def test_every_term_reaches_only_the_trained_model(node_federation, spec):
    for settings in ({"semantic": 1.0, "structural": 0.0}, {"semantic": 0.0, "structural": 1.0}):
        method, client = scene(node_federation, spec, **settings)
        model, graph = client.state["model"], client.graph
        extra = method.objective(client, graph, model, {}) - client.loss(model(graph), graph)
        reached = gradient(extra, model)
        assert max(v for name, v in reached.items() if not name.startswith("classifier.")) > 1e-4
        head = max(v for name, v in reached.items() if name.startswith("classifier."))
        # The contrast is of embeddings, the structure of logits.
        assert (head > 1e-4) == (settings["structural"] > 0)
        assert all(p.grad is None for p in client.memory["global"].parameters())


def test_the_global_model_holds_the_download(node_federation):
    method, client = scene(node_federation)
    download = {name: t.clone() for name, t in client.build("a third").state_dict().items()}
    method.train(client, download)
    assert all(
        torch.equal(t, download[name]) for name, t in client.memory["global"].state_dict().items()
    )
    assert not any(
        torch.equal(t, download[name]) for name, t in client.state["model"].state_dict().items()
    )


def test_only_without_both_terms_it_is_bit_identical_to_fedavg(node_federation):
    settings = {**SMALL, "engine": "loop"}
    plain = run("fedavg", node_federation, **settings)
    neither = run("fgssl", node_federation, semantic=0.0, structural=0.0, **settings)
    assert largest_gap(neither, plain) == 0
    for off in ("semantic", "structural"):
        assert largest_gap(run("fgssl", node_federation, **{off: 0.0}, **settings), plain) > 1e-4


def test_every_step_draws_new_views_from_the_clients_own_stream(node_federation):
    method, client = scene(node_federation)
    model, graph = client.state["model"], client.graph
    first, second = (method.objective(client, graph, model, {}) for _ in range(2))
    assert first != second
    _, again = scene(node_federation)
    assert method.objective(again, again.graph, again.state["model"], {}) == first


# ---- bad input ----
def test_views_without_any_edge_or_column_still_train(node_federation):
    result = run(
        "fgssl",
        node_federation,
        strong_edges=1.0,
        strong_columns=1.0,
        weak_edges=1.0,
        weak_columns=1.0,
        **SMALL,
    )
    assert result.summary["status"] == "completed"
    assert all(t.isfinite().all() for t in flatten(result.final_models).values())


def test_one_client_one_class_isolated_nodes_and_no_labels(node_federation):
    graphs = node_federation.graphs
    of_one = replace(
        graphs[0],
        train=graphs[0].train & (graphs[0].y == 0),
        test=graphs[0].test | (graphs[0].train & (graphs[0].y != 0)),
    )
    no_edges = replace(graphs[1], edge_index=graphs[1].edge_index[:, :0])
    bare = replace(graphs[2], train=torch.zeros_like(graphs[2].train))
    for federation in (
        Federation((of_one, no_edges, bare)),
        Federation((of_one,)),
        Federation((no_edges,)),
        Federation((bare,)),
    ):
        for inductive in (False, True):
            result = run("fgssl", replace(federation, inductive=inductive), **SMALL)
            assert result.summary["status"] == "completed"
            assert all(t.isfinite().all() for t in flatten(result.final_models).values())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tau", 0.0),
        ("omega", -1.0),
        ("weak_edges", 1.5),
        ("semantic", -0.1),
        ("strong_columns", -1),
    ],
)
def test_a_bad_setting_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=rf"method\.{name} is "):
        FGSSL(**{name: value})


def test_graph_tasks_are_refused(graph_federation):
    with pytest.raises(ConfigError, match="node"):
        run("fgssl", graph_federation, **SMALL)
