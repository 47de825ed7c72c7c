"""Every architecture in both tasks: shapes, dropout, gradients and symmetry.

Outputs are compared with PyG's layers that have the same weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tests.nn.small_models import (
    CLASSES,
    FEATURES,
    ITEMS,
    gradients,
    linear,
    loaded,
    made,
    random_graph,
    rng,
)
from torch import Tensor, nn
from torch_geometric import nn as pyg

from fedloom.data.federation import disjoint_union
from fedloom.data.graph import Graph
from fedloom.nn.architectures import ARCHITECTURES
from fedloom.nn.build import build_model, parse_spec
from fedloom.nn.layers import Attention, MeanNeighbour, SumNeighbour
from fedloom.nn.model import Model

NAMES = list(ARCHITECTURES)

each = pytest.mark.parametrize("name", NAMES)
each_task = pytest.mark.parametrize("task", ["node", "graph"])


@each
@each_task
@pytest.mark.parametrize("size", ["", "-1x8", "-3x16+linear", "-2x24+norm"])
def test_shapes(name: str, task: str, size: str) -> None:
    graph = random_graph(task)
    model = build_model(name + size, FEATURES, CLASSES, task, seed=0)  # type: ignore[arg-type]
    z = model.embed(graph)
    assert z.shape == (graph.num_items, model.width)
    assert model.width == parse_spec(name + size).width
    assert model.head(z, graph).shape == (graph.num_items, CLASSES)
    assert torch.equal(model.head(z, graph), model(graph))


@each
@each_task
def test_dropout_draws_only_from_the_given_generator(name: str, task: str) -> None:
    graph, model = random_graph(task), made(f"{name}-3x32", task)
    state = torch.get_rng_state()
    still, again = model(graph), model(graph)
    one, same, other = model(graph, rng(1)), model(graph, rng(1)), model(graph, rng(2))
    (one.sum() + build_model(name, FEATURES, CLASSES, seed=3)(random_graph()).sum()).backward()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(still, again)
    assert torch.equal(one, same)
    assert not torch.allclose(one, other)
    assert not torch.allclose(one, still)
    assert torch.equal(made(f"{name}-3x32", task, dropout=0.0)(graph, rng(1)), still)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("gcnii", "gamlp")])
def test_no_dropout_on_the_features(name: str) -> None:
    graph, model = random_graph(), made(f"{name}-2x16")
    z = model.embed(graph)
    # There is a single layer before the embedding, so there is no dropout.
    assert torch.equal(model.embed(graph, rng()), z)
    assert not torch.allclose(model.head(z, graph, rng()), model.head(z, graph))


@each
@each_task
@pytest.mark.parametrize("options", ["", "+linear+norm"])
def test_every_parameter_gets_a_gradient(name: str, task: str, options: str) -> None:
    model = made(f"{name}-3x16{options}", task)
    for noise in ({}, {"rng": rng()}):
        for (key, _), gradient in zip(
            model.named_parameters(), gradients(model, random_graph(task), **noise), strict=True
        ):
            assert gradient.abs().sum() > 0, key
            assert gradient.isfinite().all(), key


@each
@each_task
def test_the_state_is_only_float32_parameters(name: str, task: str) -> None:
    model = made(f"{name}+norm", task)
    assert not list(model.buffers())
    assert set(model.state_dict()) == {key for key, _ in model.named_parameters()}
    assert all(value.dtype == torch.float32 for value in model.state_dict().values())
    assert any(key.startswith("classifier.") for key in model.state_dict())
    other = build_model(f"{name}+norm", FEATURES, CLASSES, task, seed=9)  # type: ignore[arg-type]
    graph = random_graph(task)
    assert not torch.allclose(other(graph), model(graph))
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(graph), model(graph))


@each
def test_linear_gives_all_architectures_the_same_head(name: str) -> None:
    head = {
        key: list(value.shape)
        for key, value in made(f"{name}-2x16+linear").state_dict().items()
        if "classifier" in key
    }
    assert head == {"classifier.weight": [16, CLASSES], "classifier.bias": [CLASSES]}


@each
@each_task
def test_outputs_do_not_depend_on_the_node_numbering(name: str, task: str) -> None:
    graph, model = random_graph(task, directed=True), made(f"{name}-3x16", task)
    shuffled = torch.randperm(24, generator=rng())
    if graph.batch is not None:  # permute nodes only within their graph
        shuffled = shuffled[torch.argsort(graph.batch[shuffled], stable=True)]
    place = torch.argsort(shuffled)
    moved = replace(graph, x=graph.x[shuffled], edge_index=place[graph.edge_index])
    expected = model(graph)[shuffled] if task == "node" else model(graph)
    torch.testing.assert_close(model(moved), expected, rtol=1e-5, atol=1e-5)


@each
def test_graphs_in_one_batch_are_independent(name: str) -> None:
    graph, model = random_graph("graph"), made(f"{name}-2x16", "graph")
    alone = torch.cat([model(graph.select_items(torch.tensor([item]))) for item in range(ITEMS)])
    torch.testing.assert_close(model(graph), alone, rtol=1e-5, atol=1e-5)


@each
@pytest.mark.parametrize("options", ["", "+norm"])
def test_sparse_and_dense_features_agree(name: str, options: str) -> None:
    sparse, model = random_graph(sparse=True), made(f"{name}-3x16{options}")
    dense = replace(sparse)
    dense.cached("features", lambda: None)  # treat the features as dense
    torch.testing.assert_close(model(sparse), model(dense), rtol=1e-5, atol=1e-5)
    for one, other in zip(gradients(model, sparse), gradients(model, dense), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@each
@pytest.mark.parametrize("options", ["", "+norm"])
def test_graphs_without_edges_or_with_zero_features(name: str, options: str) -> None:
    none = torch.zeros(2, 0, dtype=torch.int64)
    loop = torch.zeros(2, 1, dtype=torch.int64)
    for nodes, edges, filled in ((1, none, 1), (1, loop, 1), (7, none, 1), (7, none, 0)):
        x = filled * torch.randn(nodes, FEATURES, generator=rng())
        graph = Graph(
            x=x, edge_index=edges, y=torch.zeros(nodes, dtype=torch.int64), num_classes=CLASSES
        )
        # Items 0 and 3 have no nodes.
        graphs = replace(
            graph, batch=torch.arange(nodes) // 4 + 1, y=torch.zeros(4, dtype=torch.int64)
        )
        for task, case in (("node", graph), ("graph", graphs)):
            model = made(f"{name}-2x16{options}", task)
            assert all(gradient.isfinite().all() for gradient in gradients(model, case, rng=rng()))
            assert model(case).isfinite().all()


@each
def test_a_graph_without_nodes_gives_no_logits(name: str) -> None:
    """An inductive client may have no training items."""
    empty = Graph(
        x=torch.zeros(0, 5),
        edge_index=torch.zeros(2, 0, dtype=torch.int64),
        y=torch.zeros(0, dtype=torch.int64),
        num_classes=3,
    )
    assert build_model(f"{name}-2x16", 5, 3, seed=0)(empty).shape == (0, 3)


def test_a_union_of_graphs_gives_the_outputs_of_each_graph() -> None:
    one, two = random_graph(), random_graph(directed=True)
    model = made("gcn-3x16")
    torch.testing.assert_close(
        model(disjoint_union([one, two])), torch.cat([model(one), model(two)]), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    ("spec", "features", "classes", "count"),
    [
        ("gcn", 1433, 7, 92_231),  # Cora
        ("gcn", 3703, 6, 237_446),  # CiteSeer
        ("gcn", 500, 3, 32_259),  # PubMed
        ("gcn-2x64+linear", 1433, 7, 92_231 + 64 * 64 + 64),
        ("gcn-8x64+jk", 1433, 7, 92_231 + 6 * (64 * 64 + 64)),
        ("dgcn", 1433, 7, 95_097),
        ("dgcn-10x64", 1433, 7, 95_097),
        ("mlp+norm", 1433, 7, 95_097),
        ("sgc-4", 1433, 7, 92_231),
        ("appnp-10", 1433, 7, 92_231),
    ],
)
def test_number_of_parameters(spec: str, features: int, classes: int, count: int) -> None:
    assert (
        sum(p.numel() for p in build_model(spec, features, classes, seed=0).parameters()) == count
    )


def gin(layer: SumNeighbour) -> nn.Module:
    norm = loaded(nn.LayerNorm(len(layer.bias)), weight=layer.norm.weight, bias=layer.norm.bias)
    mlp = nn.Sequential(linear(layer), norm, nn.ReLU(), linear(layer.outer))
    state = {f"nn__{key}": value.clone() for key, value in mlp.state_dict().items()}
    # GINConv resets the module that it receives, so it receives a copy.
    return loaded(pyg.GINConv(copy.deepcopy(mlp), train_eps=True), eps=layer.eps, **state)


def gat(layer: Attention) -> nn.Module:
    (heads, columns), num_in = layer.source.shape, len(layer.weight)
    state = {
        "lin__weight": layer.weight.T,
        "att_src": layer.source[None],
        "att_dst": layer.target[None],
        "bias": layer.bias,
    }
    return loaded(pyg.GATConv(num_in, columns, heads), **state)


def sage(layer: MeanNeighbour) -> nn.Module:
    state = {
        "lin_l__weight": layer.neighbour.T,
        "lin_l__bias": layer.bias,
        "lin_r__weight": layer.weight.T,
    }
    return loaded(pyg.SAGEConv(*layer.weight.shape), **state)


CONVOLUTIONS: dict[str, Callable[..., nn.Module]] = {
    "mlp": linear,
    "gcn": lambda layer: loaded(
        pyg.GCNConv(*layer.weight.shape), lin__weight=layer.weight.T, bias=layer.bias
    ),
    "gat": gat,
    "sage": sage,
    "gin": gin,
}


def with_pyg(name: str, model: Model, x: Tensor, edges: Tensor) -> Tensor:
    """Returns the logits of the same model, built from PyG's layers."""
    if name in CONVOLUTIONS:
        act = F.elu if name == "gat" else F.relu
        where = (edges,) if name != "mlp" else ()
        for layer in model.layers:
            x = act(CONVOLUTIONS[name](layer)(x, *where))
        return CONVOLUTIONS[name](model.classifier)(x, *where)
    first, *others = model.layers
    hops = model.spec.layers
    if name in ("sgc", "ssgc"):
        sizes = first.weight.shape
        conv = (
            pyg.SGConv(*sizes, K=hops) if name == "sgc" else pyg.SSGConv(*sizes, alpha=0.05, K=hops)
        )
        x = loaded(conv, lin__weight=first.weight.T, lin__bias=first.bias)(x, edges)
    else:
        h = x = F.relu(linear(first)(x))
        for number, layer in enumerate(others, 1):  # gcnii
            conv = pyg.GCN2Conv(model.width, alpha=0.1, theta=0.5, layer=number)
            x = F.relu(loaded(conv, weight1=layer.weight)(x, h, edges))
    logits = linear(model.classifier)(x)
    return pyg.APPNP(K=hops, alpha=0.1)(logits, edges) if name == "appnp" else logits


@pytest.mark.parametrize(
    "name", ["mlp", "gcn", "gat", "sage", "gin", "gcnii", "sgc", "ssgc", "appnp"]
)
@pytest.mark.parametrize("directed", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
def test_outputs_equal_pyg(name: str, directed: bool, sparse: bool) -> None:
    graph, model = random_graph(directed=directed, sparse=sparse), made(f"{name}-3x16")
    torch.testing.assert_close(
        model(graph), with_pyg(name, model, graph.x, graph.edge_index), rtol=1e-5, atol=1e-5
    )


def test_sign_is_an_mlp_on_all_concatenated_hops() -> None:
    graph, model = random_graph(directed=True), made("sign-3x16")
    S, (layer,) = graph.adjacency("sym").dense(), model.layers
    wide = torch.cat([torch.linalg.matrix_power(S, k) @ graph.x for k in range(4)], 1)
    torch.testing.assert_close(
        model.embed(graph), F.relu(linear(layer)(wide)), rtol=1e-5, atol=1e-5
    )


def test_gamlp_equals_its_equation_node_by_node() -> None:
    graph, model = random_graph(), made("gamlp-2x16")
    S = graph.adjacency("sym").dense()
    *each_hop, reference, score = (linear(layer) for layer in model.layers)
    H = [layer(torch.linalg.matrix_power(S, k) @ graph.x) for k, layer in enumerate(each_hop)]
    for node in range(graph.num_nodes):
        R = F.relu(reference(torch.cat([h[node] for h in H])))
        alpha = torch.cat([score(torch.cat([R, h[node]])).sigmoid() for h in H]).softmax(0)
        z = F.relu(sum(a * h[node] for a, h in zip(alpha, H, strict=True)))
        torch.testing.assert_close(model.embed(graph)[node], z, rtol=1e-5, atol=1e-5)


def test_dgcn_is_layer_norm_an_mlp_and_row_stochastic_propagation() -> None:
    graph, model = random_graph(sparse=True, directed=True), made("dgcn-3x16")
    x = F.layer_norm(graph.x, (FEATURES,), model.norm.weight, model.norm.bias)
    logits = linear(model.classifier)(F.relu(linear(model.layers[0])(x)))
    expected = torch.linalg.matrix_power(graph.adjacency("row").dense(), 3) @ logits
    torch.testing.assert_close(model(graph), expected, rtol=1e-5, atol=1e-5)


def test_jumping_knowledge_is_the_maximum_over_layers() -> None:
    graph, model = random_graph(), made("gcn-4x16+jk")
    h, outputs = graph.x, []
    for layer in model.layers:
        h = F.relu(CONVOLUTIONS["gcn"](layer)(h, graph.edge_index))
        outputs.append(h)
    torch.testing.assert_close(
        model.embed(graph), torch.stack(outputs).amax(0), rtol=1e-5, atol=1e-5
    )


def test_gin_pools_by_sum_and_others_by_mean() -> None:
    graph = random_graph("graph")
    for name, pool in (("gin", pyg.global_add_pool), ("gcn", pyg.global_mean_pool)):
        model = made(f"{name}-2x16", "graph")
        expected = pool(model.nodes(graph, None), graph.batch)
        torch.testing.assert_close(model.embed(graph), expected, rtol=1e-5, atol=1e-5)
