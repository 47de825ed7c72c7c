"""Local training by hand equals autograd, for all models, features and arrangements of rows."""

import pytest
import torch
import torch.nn.functional as F

from fedloom.core.facts import Facts
from fedloom.data.graph import Graph
from fedloom.engines.stacked.graphs import GraphStack
from fedloom.engines.stacked.local_training import LocalPass, Targets, no_masks
from fedloom.engines.stacked.receptive_field import Plan, Rows, layers_of, restricted

SPECS = ["mlp-2x16", "gcn-2x16", "gcn-3x16", "gcn-2x16+linear", "sage-2x16", "sgc-2x16", "gcn-2x12"]
CLASSES = 3


def graph_of(nodes, sparse, seed, features=40):
    rng = torch.Generator().manual_seed(seed)
    x = torch.rand(nodes, features, generator=rng)
    if sparse:
        x = x * (torch.rand(nodes, features, generator=rng) < 0.06)
    edges = torch.randint(nodes, (2, 3 * nodes), generator=rng)
    return Graph(
        x,
        torch.cat([edges, edges.flip(0)], 1).unique(dim=1),
        torch.randint(CLASSES, (nodes,), generator=rng),
        CLASSES,
        train=torch.arange(nodes) % 4 == 0,
    )


def case(spec, sparse, sizes):
    graphs = [graph_of(size, sparse, seed) for seed, size in enumerate(sizes)]
    names = tuple(f"c{k}" for k in range(len(graphs)))
    facts = Facts(graphs[0].num_features, CLASSES, "node", names, (spec,) * len(names))
    models = [facts.build(spec, name, "init") for name in names]
    layers = layers_of(models[0])
    train = torch.cat([graph.train for graph in graphs])
    named = [dict(model.named_parameters()) for model in models]
    parameters = {n: torch.stack([own[n].detach() for own in named]) for n in named[0]}
    return graphs, models, Plan(layers, GraphStack(graphs), train), parameters


@pytest.mark.parametrize("sizes", [(30,), (30, 31, 29, 30, 33), (60, 12, 25)])
@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("with_dropout", [True, False])
def test_losses_and_gradients_are_those_of_autograd(spec, sparse, sizes, with_dropout):
    graphs, models, plan, parameters = case(spec, sparse, sizes)
    of_class = torch.rand(len(graphs), CLASSES) + 0.5
    streams, alone = (
        [torch.Generator().manual_seed(k) for k in range(len(graphs))] for _ in range(2)
    )
    through, targets = LocalPass(plan, models[0].dropout, None), Targets(plan, of_class)
    steps, found, rows = 3, [], []
    for masks in through.masks(parameters, streams if with_dropout else None, steps):
        logits, kept = through.forward(parameters, masks)
        of_rows, gradient = targets.gradient(logits)
        rows.append(of_rows)
        found.append(through.backward(parameters, kept, gradient))
    losses = targets.losses(rows)
    for k, (model, graph, rng) in enumerate(zip(models, graphs, alone, strict=True)):
        for step in range(steps):  # the masks of each step are those that the client draws alone
            model.zero_grad()
            logits = model(graph, rng if with_dropout else None)[graph.train]
            loss = F.cross_entropy(logits, graph.y[graph.train], weight=of_class[k])
            loss.backward()
            assert losses[step, k].item() == pytest.approx(loss.item(), abs=1e-5)
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(
                    found[step][name][k], parameter.grad, atol=1e-5, rtol=1e-4
                )
        assert with_dropout is False or torch.equal(rng.get_state(), streams[k].get_state())


@pytest.mark.parametrize("spec", SPECS)
def test_logits_of_all_nodes_are_those_of_the_models(spec):
    graphs, models, plan, parameters = case(spec, True, (30, 28, 27, 31, 30))
    everything = Plan(plan.layers, plan.stack, torch.ones(plan.stack.num_nodes, dtype=torch.bool))
    logits, _ = LocalPass(everything, 0.0, None).forward(parameters, no_masks)
    rows = everything.rows[-1]
    in_order = logits if rows.complete else logits[rows.place]
    expected = torch.cat([model(graph) for model, graph in zip(models, graphs, strict=True)])
    torch.testing.assert_close(in_order, expected, atol=1e-5, rtol=1e-4)


def test_random_numbers_that_do_not_fit_into_one_call_are_the_same(monkeypatch):
    _, models, plan, parameters = case("gcn-3x16", True, (30, 31, 29, 30))
    through = LocalPass(plan, models[0].dropout, None)

    def masks():
        streams = [torch.Generator().manual_seed(k) for k in range(4)]
        return [[m(1), m(2)] for m in through.masks(parameters, streams, 2)]

    together = masks()
    monkeypatch.setattr("fedloom.engines.stacked.local_training.DRAWN_TOGETHER", 0)
    for one, other in zip(together, masks(), strict=True):
        for k in range(2):
            real = plan.rows[k].real
            assert torch.equal(one[k][real], other[k][real])


def test_a_plan_has_the_rows_that_the_loss_depends_on():
    # 0 - 1 - 2 - 3 - 4 - 5, and only node 0 trains
    path = torch.tensor([[0, 1, 2, 3, 4], [1, 2, 3, 4, 5]])
    train = torch.arange(6) == 0
    graph = Graph(
        torch.eye(6), torch.cat([path, path.flip(0)], 1), torch.zeros(6).long(), 2, train=train
    )
    facts = Facts(6, 2, "node", ("a",), ("gcn-2x8",))
    plan = Plan(layers_of(facts.build("gcn-2x8", "a", "init")), GraphStack([graph]), train)
    assert plan.rows[1].nodes.tolist() == [0]
    assert plan.rows[0].nodes.tolist() == [0, 1]
    assert plan.inputs.nodes.tolist() == [0, 1, 2] or plan.smoothed is not None
    x = LocalPass(plan, 0.0, None)
    weights = {
        n: p.detach().unsqueeze(0)
        for n, p in facts.build("gcn-2x8", "a", "init").named_parameters()
    }
    assert len(x.forward(weights, no_masks)[0]) == 1


def test_clients_get_equally_many_rows_only_if_few_are_added():
    needed = torch.ones(40, dtype=torch.bool)
    assert Rows(needed, [10, 10, 11, 9]).sizes == [11] * 4
    assert Rows(needed, [37, 1, 1, 1]).sizes == [37, 1, 1, 1]
    rows = Rows(needed, [10, 10, 11, 9])
    assert rows.real.sum() == 40
    assert rows.nodes[rows.place].tolist() == list(range(40))
    matrix = GraphStack([graph_of(40, True, 0)]).adjacency("sym")
    part = restricted(matrix, rows, matrix.indices.long(), 40).dense()
    assert torch.equal(part[rows.place], matrix.dense())
    assert part[~rows.real].abs().sum() == 0


@pytest.mark.parametrize("spec", ["gat-2x8", "gin-2x8", "gcn-2x8+norm", "gcn-3x8+jk", "appnp-2x8"])
def test_other_models_have_no_layers_of_this_kind(spec):
    facts = Facts(5, 2, "node", ("a",), (spec,))
    assert layers_of(facts.build(spec, "a", "init")) is None


def test_graph_tasks_have_no_layers_of_this_kind():
    facts = Facts(5, 2, "graph", ("a",), ("gcn-2x8",))
    assert layers_of(facts.build("gcn-2x8", "a", "init")) is None
