"""Every architecture, both tasks: shapes, noise, gradients, symmetry; and the same numbers as PyG's layers with the same weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch_geometric import nn as pyg

from fedloom.data.federation import disjoint_union
from fedloom.data.graph import Graph
from fedloom.deploy.envelope import parse
from fedloom.errors import ConfigError
from fedloom.nn.architectures import ARCHITECTURES
from fedloom.nn.build import build_model, parse_spec
from fedloom.nn.layers import dropout
from fedloom.nn.model import Model, Spec
from fedloom.nn.smoothing import propagated

NAMES = list(ARCHITECTURES)
TASKS = ["node", "graph"]
FEATURES, CLASSES, ITEMS = 20, 5, 6

each = pytest.mark.parametrize("name", NAMES)
each_task = pytest.mark.parametrize("task", TASKS)


def random_graph(
    task: str = "node", *, directed: bool = False, sparse: bool = False, features: int = FEATURES
) -> Graph:
    """24 nodes, random edges, two nodes without any; as six graphs of four nodes for the graph-level task."""
    rng = Generator().manual_seed(1)
    x = torch.randn(24, features, generator=rng)
    if sparse:
        x = x * (torch.rand(x.shape, generator=rng) < 0.08)
        x[3] = 0
    wanted = torch.rand(24, 24, generator=rng) < (0.15 if task == "node" else 0.6)
    batch = torch.arange(24) // 4
    if task == "graph":
        wanted &= batch[:, None] == batch
    wanted.fill_diagonal_(False)
    wanted[[5, 6]] = False
    wanted[:, [5, 6]] = False
    edges = (wanted if directed else wanted | wanted.T).nonzero().T
    items = 24 if task == "node" else ITEMS
    y = torch.randint(CLASSES, (items,), generator=rng)
    graph = Graph(
        x=x, edge_index=edges, y=y, num_classes=CLASSES, batch=None if task == "node" else batch
    )
    assert (graph.sparse_x is not None) == sparse
    return graph.check()


def made(name: str, task: str = "node", seed: int = 0, **settings: float) -> Model:
    """A model whose biases and scales are not at their initial 0 and 1, so that none can be mixed up unseen."""
    model = build_model(name, FEATURES, CLASSES, task, seed=seed, **settings)  # type: ignore[arg-type]
    rng = Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.2 * torch.randn(parameter.shape, generator=rng)
    return model


def rng(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def gradients(model: Model, graph: Graph, **noise: Generator) -> list[Tensor]:
    return list(
        torch.autograd.grad(
            F.cross_entropy(model(graph, **noise), graph.y), list(model.parameters())
        )
    )


# ---- every architecture ----


@each
@each_task
@pytest.mark.parametrize("size", ["", "-1x8", "-3x16+linear", "-2x24+norm"])
def test_shapes(name: str, task: str, size: str) -> None:
    graph = random_graph(task)
    model = build_model(name + size, FEATURES, CLASSES, task, seed=0)  # type: ignore[arg-type]
    z = model.embed(graph)
    assert z.shape == (graph.num_items, model.width) == (graph.num_items, parse(name + size).width)
    assert model.head(z, graph).shape == (graph.num_items, CLASSES)
    assert torch.equal(model.head(z, graph), model(graph))


@each
@each_task
def test_noise_comes_from_the_generator_alone(name: str, task: str) -> None:
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
def test_features_are_not_dropped(name: str) -> None:
    graph, model = random_graph(), made(f"{name}-2x16")
    z = model.embed(graph)
    assert torch.equal(
        model.embed(graph, rng()), z
    )  # a single layer before the embedding: no noise
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
def test_state_is_float_parameters_and_nothing_else(name: str, task: str) -> None:
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
def test_the_head_is_the_same_for_all_with_linear(name: str) -> None:
    head = {
        key: list(value.shape)
        for key, value in made(f"{name}-2x16+linear").state_dict().items()
        if "classifier" in key
    }
    assert head == {"classifier.weight": [16, CLASSES], "classifier.bias": [CLASSES]}


@each
@each_task
def test_numbering_of_nodes_does_not_matter(name: str, task: str) -> None:
    graph, model = random_graph(task, directed=True), made(f"{name}-3x16", task)
    shuffled = torch.randperm(24, generator=rng())
    if graph.batch is not None:  # nodes change places inside their graph
        shuffled = shuffled[torch.argsort(graph.batch[shuffled], stable=True)]
    place = torch.argsort(shuffled)
    moved = replace(graph, x=graph.x[shuffled], edge_index=place[graph.edge_index])
    expected = model(graph)[shuffled] if task == "node" else model(graph)
    torch.testing.assert_close(model(moved), expected, rtol=1e-5, atol=1e-5)


@each
def test_graphs_of_one_batch_do_not_see_each_other(name: str) -> None:
    graph, model = random_graph("graph"), made(f"{name}-2x16", "graph")
    alone = torch.cat([model(graph.select_items(torch.tensor([item]))) for item in range(ITEMS)])
    torch.testing.assert_close(model(graph), alone, rtol=1e-5, atol=1e-5)


@each
@pytest.mark.parametrize("options", ["", "+norm"])
def test_sparse_and_dense_features_agree(name: str, options: str) -> None:
    sparse, model = random_graph(sparse=True), made(f"{name}-3x16{options}")
    dense = replace(sparse)
    dense.cached("features", lambda: None)  # as if they were dense
    torch.testing.assert_close(model(sparse), model(dense), rtol=1e-5, atol=1e-5)
    for one, other in zip(gradients(model, sparse), gradients(model, dense), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["sgc", "ssgc", "sign", "gamlp"])
def test_smoothing_before_or_after_the_product_agrees(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, outputs = made(f"{name}-3x16"), []
    for keep in (True, False):
        monkeypatch.setattr(models, "keep_smoothed", lambda *_, keep=keep: keep)
        outputs.append(model(random_graph(directed=True)))
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)


@each
@pytest.mark.parametrize("options", ["", "+norm"])
def test_poor_graphs(name: str, options: str) -> None:
    none = torch.zeros(2, 0, dtype=torch.int64)
    loop = torch.zeros(2, 1, dtype=torch.int64)
    for nodes, edges, filled in ((1, none, 1), (1, loop, 1), (7, none, 1), (7, none, 0)):
        x = filled * torch.randn(nodes, FEATURES, generator=rng())
        graph = Graph(
            x=x, edge_index=edges, y=torch.zeros(nodes, dtype=torch.int64), num_classes=CLASSES
        )
        # Items 0 and 3: no node at all.
        graphs = replace(
            graph, batch=torch.arange(nodes) // 4 + 1, y=torch.zeros(4, dtype=torch.int64)
        )
        for task, case in (("node", graph), ("graph", graphs)):
            model = made(f"{name}-2x16{options}", task)
            assert all(gradient.isfinite().all() for gradient in gradients(model, case, rng=rng()))
            assert model(case).isfinite().all()


# ---- known sizes and known numbers ----


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


def loaded(module: nn.Module, **state: Tensor) -> nn.Module:
    module.load_state_dict({key.replace("__", "."): value for key, value in state.items()})
    return module


def linear(layer: nn.Module) -> nn.Module:
    return loaded(nn.Linear(*layer.weight.shape), weight=layer.weight.T, bias=layer.bias)


def gin(layer: models.SumNeighbour) -> nn.Module:
    norm = loaded(nn.LayerNorm(len(layer.bias)), weight=layer.norm.weight, bias=layer.norm.bias)
    mlp = nn.Sequential(linear(layer), norm, nn.ReLU(), linear(layer.outer))
    state = {f"nn__{key}": value.clone() for key, value in mlp.state_dict().items()}
    return loaded(
        pyg.GINConv(copy.deepcopy(mlp), train_eps=True), eps=layer.eps, **state
    )  # GINConv resets what it is given


def gat(layer: models.Attention) -> nn.Module:
    (heads, columns), num_in = layer.source.shape, len(layer.weight)
    state = {
        "lin__weight": layer.weight.T,
        "att_src": layer.source[None],
        "att_dst": layer.target[None],
        "bias": layer.bias,
    }
    return loaded(pyg.GATConv(num_in, columns, heads), **state)


def sage(layer: models.MeanNeighbour) -> nn.Module:
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
    """The logits of the same model made of PyG's layers."""
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
def test_same_numbers_as_pyg(name: str, directed: bool, sparse: bool) -> None:
    graph, model = random_graph(directed=directed, sparse=sparse), made(f"{name}-3x16")
    torch.testing.assert_close(
        model(graph), with_pyg(name, model, graph.x, graph.edge_index), rtol=1e-5, atol=1e-5
    )


def test_sign_is_an_mlp_on_all_hops_side_by_side() -> None:
    graph, model = random_graph(directed=True), made("sign-3x16")
    S, (layer,) = graph.adjacency("sym").dense(), model.layers
    wide = torch.cat([torch.linalg.matrix_power(S, k) @ graph.x for k in range(4)], 1)
    torch.testing.assert_close(
        model.embed(graph), F.relu(linear(layer)(wide)), rtol=1e-5, atol=1e-5
    )


def test_gamlp_by_hand() -> None:
    graph, model = random_graph(), made("gamlp-2x16")
    S = graph.adjacency("sym").dense()
    *each_hop, reference, score = (linear(layer) for layer in model.layers)
    H = [layer(torch.linalg.matrix_power(S, k) @ graph.x) for k, layer in enumerate(each_hop)]
    for node in range(graph.num_nodes):
        R = F.relu(reference(torch.cat([h[node] for h in H])))
        alpha = torch.cat([score(torch.cat([R, h[node]])).sigmoid() for h in H]).softmax(0)
        z = F.relu(sum(a * h[node] for a, h in zip(alpha, H, strict=True)))
        torch.testing.assert_close(model.embed(graph)[node], z, rtol=1e-5, atol=1e-5)


def test_dgcn_is_layer_norm_then_mlp_then_steps_of_the_row_stochastic_adjacency() -> None:
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


def test_the_maximum_and_its_gradient() -> None:
    a, b = (
        torch.tensor(values, requires_grad=True)
        for values in ([1.0, -2.0, 0.5, 0.0], [3.0, -5.0, 0.25, 0.0])
    )
    out = models.maximum(a, b)
    assert torch.equal(out, torch.maximum(a, b))
    out.backward(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert a.grad.tolist() == [0, 2, 3, 4]  # all of it where they are equal
    assert b.grad.tolist() == [1, 0, 0, 0]


def dense_attention(layer: models.Attention, h: Tensor, graph: Graph) -> Tensor:
    """The layer as its docstring says, with every pair of nodes."""
    linked = graph.adjacency("sym").dense() > 0
    out = []
    for k, part in enumerate((h @ layer.weight).chunk(len(layer.source), 1)):
        score = F.leaky_relu(
            (part @ layer.source[k])[None, :] + (part @ layer.target[k])[:, None], 0.2
        )
        out.append(score.masked_fill(~linked, -torch.inf).softmax(1) @ part)
    return torch.cat(out, 1) + layer.bias


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    "apart", [1.0, 50.0, 119.0, 121.0, 5000.0]
)  # what nodes send to others: the last two need each target's maximum
def test_attention_and_its_gradients_are_the_dense_ones(last: bool, apart: float) -> None:
    graph, layer = random_graph(directed=True), models.Attention(FEATURES, 24, last).double()
    x = graph.x.double().requires_grad_()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=rng()))
        sent = ((x @ layer.weight).unflatten(1, layer.source.shape) * layer.source).sum(2)
        layer.source *= apart / (sent.amax(0) - sent.amin(0)).max()
    weight = torch.randn(24, 24, generator=rng(1))
    outputs = layer(x.matmul, graph), dense_attention(layer, x, graph)
    results = [
        (out, *torch.autograd.grad((out * weight).sum(), [x, *layer.parameters()]))
        for out in outputs
    ]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)


def test_attention_that_outgrows_exp_everywhere() -> None:
    graph, model = random_graph(), made("gat-3x16")
    with torch.no_grad():
        for layer in (*model.layers, model.classifier):
            layer.source.fill_(1e4)
            layer.target.fill_(-1e4)
    assert model(graph).isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients(model, graph))


def test_pooling_is_the_sum_for_gin_and_the_mean_otherwise() -> None:
    graph = random_graph("graph")
    for name, pool in (("gin", pyg.global_add_pool), ("gcn", pyg.global_mean_pool)):
        model = made(f"{name}-2x16", "graph")
        expected = pool(model.nodes(graph, None), graph.batch)
        torch.testing.assert_close(model.embed(graph), expected, rtol=1e-5, atol=1e-5)


def test_propagated_grows_and_is_kept() -> None:
    graph = random_graph()
    short, long = propagated(graph, "sym", 1), propagated(graph, "sym", 3)
    assert [len(short), len(long)] == [2, 4]
    assert all(one is other for one, other in zip(short, long, strict=False))
    S = graph.adjacency("sym").dense()
    torch.testing.assert_close(long[3], S @ S @ S @ graph.x)


def test_smoothed_features_are_kept_without_the_hops_below() -> None:
    graph = random_graph()
    S = graph.adjacency("sym").dense()
    third = models.smoothed(graph, models.power(3))
    torch.testing.assert_close(third, S @ S @ S @ graph.x)
    assert models.smoothed(graph, models.power(3)) is third
    assert [key for key in graph._cache if "smoothed" in key] == [("smoothed", models.power(3))]
    torch.testing.assert_close(models.smoothed(graph, models.power(4)), S @ third)
    torch.testing.assert_close(
        models.smoothed(graph, (0.5, 0.0, 2.0)), 0.5 * graph.x + 2 * S @ S @ graph.x
    )


# ---- noise and initialisation ----


@pytest.mark.parametrize("p", [0.1, 0.5, 0.7, 0.8, 0.999])
def test_dropout(p: float) -> None:
    h = torch.ones(1001, 999, requires_grad=True)
    out = dropout(h, p, rng())
    zeroed = (out == 0).float().mean().item()
    assert zeroed == pytest.approx(p, abs=1 / 256)
    assert out.mean().item() == pytest.approx(1, abs=5e-3 / (1 - p) ** 0.5)
    assert len(out.unique()) == 2
    # No column or row is favoured: eight neighbours share one draw, but not its bits.
    assert (out == 0).float().mean(0)[:16].sub(p).abs().max() < 0.07
    out.sum().backward()
    assert torch.equal(h.grad, out)


def test_dropout_of_neighbouring_entries_is_independent() -> None:
    kept = (dropout(torch.ones(50_000, 8), 0.5, rng()) > 0).float()
    assert torch.corrcoef(kept.T).sub(torch.eye(8)).abs().max() < 0.02


def test_dropout_without_generator_or_share_does_nothing() -> None:
    h = torch.randn(3, 3, generator=rng())
    assert dropout(h, 0.5, None) is h
    generator = rng()
    assert dropout(h, 0.0, generator) is h
    assert torch.equal(generator.get_state(), rng().get_state())


@each
def test_initialisation(name: str) -> None:
    one, same, other = (
        build_model(f"{name}-2x64", 300, CLASSES, seed=seed).state_dict() for seed in (4, 4, 5)
    )
    for key, value in one.items():
        assert torch.equal(value, same[key])
        if value.dim() == 2:
            bound = (6 / sum(value.shape)) ** 0.5
            assert value.abs().max() <= bound
            assert not torch.equal(value, other[key])
            if value.numel() > 1000:
                assert value.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)
        else:
            assert value.unique().tolist() in ([0.0], [1.0])


# ---- names ----


def test_parse() -> None:
    assert parse_spec("gcn") == Spec("gcn", 2, (64,))
    assert parse_spec("gcn-4x128") == Spec("gcn", 4, (128,))
    assert parse_spec("sgc-4") == Spec("sgc", 4, (64,))
    assert parse_spec("gcn-8x64+jk+linear") == Spec("gcn", 8, (64,), frozenset({"jk", "linear"}))
    assert parse_spec("dgcn") == Spec("dgcn", 2, (64,), frozenset({"norm"}))
    assert parse_spec("gcn-1x8") == Spec(
        "gcn", 1, (8,), frozenset({"linear"})
    )  # one layer cannot be extractor and head
    assert parse_spec("appnp-1x8") == Spec("appnp", 1, (8,))
    assert parse_spec("sage-2x128-64+linear") == Spec("sage", 2, (128, 64), frozenset({"linear"}))
    assert parse_spec("sage-2x128-64+linear").width == 64


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("gcnn", "unknown model 'gcnn'. Did you mean 'gcn'? Valid: appnp, dgcn, gamlp, "),
        ("", "unknown model ''"),
        ("GCN", "Did you mean 'gcn'"),
        ("gcn-", "size '' is not LAYERS or LAYERSxWIDTH"),
        ("gcn-0x64", "e.g. 'gcn-2x64'"),
        ("gcn-2x0", "size '2x0'"),
        ("gcn-x128", "size 'x128'"),
        ("gcn-two", "size 'two'"),
        ("gcn--2", "size '-2'"),
        ("gcn-2x64 ", "size '2x64 '"),
        ("gcn-²", "size '²'"),
        (
            "gcn+jkk",
            "unknown option of model 'gcn' 'jkk'. Did you mean 'jk'? Valid: jk, linear, norm",
        ),
        ("gcn+", "unknown option of model 'gcn' ''"),
        ("sgc-2+jk", "unknown option of model 'sgc' 'jk'"),
        ("gat-2x60", "model width 60: gat has 8 heads"),
        ("gcn-3x16-", "size '3x16-'"),
        ("gcn-2x16-8", "model width '16-8': gcn has 1 hidden layers here, give one width or 1"),
        ("sgc-2x16-8", "only message passing without +jk can have layers of different widths"),
        ("gcn-3x16-8+jk", "only message passing without +jk"),
    ],
)
def test_wrong_names_say_what_is_wrong(spec: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        build_model(spec, FEATURES, CLASSES, seed=0)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("p", [-0.1, 1.0, float("nan")])
def test_wrong_dropout(p: float) -> None:
    with pytest.raises(ConfigError, match="dropout is"):
        build_model("gcn", FEATURES, CLASSES, dropout=p, seed=0)


def test_layers_of_different_widths() -> None:
    shapes = {
        name: tuple(p.shape)
        for name, p in build_model(
            "sage-2x9-5+linear", FEATURES, CLASSES, seed=0
        ).named_parameters()
    }
    assert shapes["layers.0.weight"] == (FEATURES, 9)
    assert shapes["layers.1.neighbour"] == (9, 5)
    assert shapes["classifier.weight"] == (5, CLASSES)
    same = zip(
        build_model("gcn-3x7", FEATURES, CLASSES, seed=3).parameters(),
        build_model("gcn-3x7-7", FEATURES, CLASSES, seed=3).parameters(),
        strict=True,
    )
    assert all(torch.equal(one, other) for one, other in same)


def test_models_lists_all_with_one_line_each() -> None:
    listed = models.models()
    assert list(listed) == NAMES
    assert len(listed) == 12
    assert all(text and "\n" not in text for text in listed.values())


def test_union_of_graphs_gives_the_same_as_each() -> None:
    one, two = random_graph(), random_graph(directed=True)
    model = made("gcn-3x16")
    torch.testing.assert_close(
        model(disjoint_union([one, two])), torch.cat([model(one), model(two)]), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_a_graph_without_nodes_has_no_logits(name):
    """An inductive client may have nothing to train on."""
    nobody = Graph(
        x=torch.zeros(0, 5),
        edge_index=torch.zeros(2, 0, dtype=torch.int64),
        y=torch.zeros(0, dtype=torch.int64),
        num_classes=3,
    )
    assert build_model(f"{name}-2x16", 5, 3, seed=0)(nobody).shape == (0, 3)
