"""Stacks: batched results, gradients and noise equal those of each client alone."""

from functools import partial

import pytest
import torch
from torch import Generator

from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.data.graph import Graph
from fedloom.engines.stacked.graphs import GraphStack
from fedloom.engines.stacked.lockstep import Group, run_lockstep
from fedloom.engines.stacked.matmul import blockwise
from fedloom.engines.stacked.operations import BATCHED
from fedloom.engines.stacked.parameters import (
    StackedOptimizer,
    position_of,
    stacked_parameters,
    tensor_of_rows,
)
from fedloom.engines.stacked.tensors import (
    common_source,
    join_rows,
    joint_tensor,
    lazy_copies,
    split_rows,
)
from fedloom.nn.architectures import ARCHITECTURES
from fedloom.nn.augment import random_view
from fedloom.nn.build import build_model
from fedloom.nn.losses import training_loss
from fedloom.nn.metrics import held_out
from fedloom.nn.model import forward, forward_with
from fedloom.nn.training import backward, make_optimizer, step
from fedloom.nn.weights import load_weights, weights

CLASSES, FEATURES = 3, 10
SIZES = (5, 9, 1, 6)  # of unequal clients
EQUAL = (7, 7, 7)


def graphs(task="node", sizes=SIZES, sparse=False):
    made = []
    for k, n in enumerate(sizes):
        rng = Generator().manual_seed(k)
        x = torch.randn(n, FEATURES, generator=rng)
        if sparse:
            x = x * (torch.arange(FEATURES) == torch.randint(FEATURES, (n, 1), generator=rng))
        edges = torch.randint(n, (2, 3 * n), generator=rng)
        batch = None if task == "node" else (torch.arange(n) * min(n, 3) // n)
        items = n if batch is None else int(batch.max()) + 1
        y, r = torch.randint(CLASSES, (items,), generator=rng), torch.rand(items, generator=rng)
        masks = {"train": r < 0.6, "val": (r >= 0.6) & (r < 0.8), "test": r >= 0.8}
        made.append(Graph(x, edges, y, CLASSES, batch=batch, **masks))
    return made


def models_of(spec, task="node", count=4):
    return [build_model(spec, FEATURES, CLASSES, task, dropout=0.5, seed=k) for k in range(count)]


def both_ways(work, count, group=None):
    """Returns the results of `work(k)` for each client, alone and in lockstep."""
    return [work(k) for k in range(count)], run_lockstep(
        [partial(work, k) for k in range(count)], group or Group(BATCHED)
    )


def close(one, other):
    return len(one) == len(other) and all(
        torch.allclose(a, b, atol=1e-5) for a, b in zip(one, other, strict=True)
    )


def everything(spec, task, parts):
    """Returns a training step that reports all of its values, with own models and own noise."""
    models = models_of(spec, task, len(parts))

    def work(k):
        model, graph, rng = models[k], parts[k], Generator().manual_seed(40 + k)
        z = model.embed(graph, rng)
        logits = model.head(z, graph, rng)
        loss = training_loss(logits, graph, "mean", None) + 0.1 * z.square().mean()
        backward(model, loss)
        with torch.no_grad():
            quiet = model(graph)
        return [
            z.detach(),
            logits.detach(),
            loss.detach(),
            quiet,
            *(p.grad for p in model.parameters()),
        ]

    return work


@pytest.mark.parametrize("sizes", [SIZES, EQUAL], ids=["unequal", "equal"])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("task", ["node", "graph"])
@pytest.mark.parametrize("options", ["", "+norm", "+linear"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_batched_equals_alone(name, options, task, sparse, sizes):
    if name == "dgcn" and options == "+norm":
        pytest.skip("dgcn has a norm as it is")
    parts, group = graphs(task, sizes, sparse), Group(BATCHED)
    alone = [everything(f"{name}-2x8{options}", task, parts)(k) for k in range(len(sizes))]
    work = everything(f"{name}-2x8{options}", task, parts)
    batched = run_lockstep([partial(work, k) for k in range(len(sizes))], group)
    assert group.calls["single"] == 0
    for one, other in zip(alone, batched, strict=True):
        assert close(one, other)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("name", [*ARCHITECTURES, "gcn+norm"])
def test_views_batched_equal_alone(name, sparse):
    parts, group = graphs(sparse=sparse), Group(BATCHED)
    name, plus, option = name.partition("+")

    def seen():
        return [
            random_view(graph, 0.3, 0.4, Generator().manual_seed(k))
            for k, graph in enumerate(parts)
        ]

    alone = [everything(f"{name}-2x8{plus}{option}", "node", seen())(k) for k in range(4)]
    work = everything(f"{name}-2x8{plus}{option}", "node", seen())
    for one, other in zip(
        alone, run_lockstep([partial(work, k) for k in range(4)], group), strict=True
    ):
        assert close(one, other)
    assert group.calls["single"] == 0


def test_clients_of_different_architectures_run_separately():
    parts, group = graphs(), Group(BATCHED)
    specs = ["gcn-2x8", "sgc-2x8", "gcn-2x8", "sage-2x8"]
    models = [build_model(spec, FEATURES, CLASSES, seed=k) for k, spec in enumerate(specs)]
    alone, batched = both_ways(lambda k: models[k](parts[k]).detach(), len(specs), group)
    assert close(alone, batched)
    assert group.calls == {"batched": 2, "single": 2}


def test_parameters_become_rows_of_one_tensor_and_stay_the_same_objects():
    models = models_of("gcn-2x8")
    before = [{name: t.clone() for name, t in weights(model).items()} for model in models]
    parameters = [p for model in models for p in model.parameters()]
    stack = stacked_parameters(models)
    assert all(
        p is q
        for p, q in zip(
            parameters, (p for model in models for p in model.parameters()), strict=True
        )
    )
    assert all(
        torch.equal(stack[name][k], kept)
        for k, own in enumerate(before)
        for name, kept in own.items()
    )
    load_weights(models[2], before[0])
    assert torch.equal(stack["classifier.weight"][2], before[0]["classifier.weight"])
    parameter_stack, j, k = position_of(models[1].classifier.bias)
    assert parameter_stack.rows[j][k] is models[1].classifier.bias
    assert tensor_of_rows([model.classifier.bias for model in models]) is stack["classifier.bias"]
    assert tensor_of_rows([model.classifier.bias for model in models[:2]]) is None
    some = stacked_parameters(
        models[:2]
    )  # a part of the stack is copied, and gradients pass the copy
    some["classifier.bias"].sum().backward()
    assert torch.equal(models[1].classifier.bias.grad, torch.ones(CLASSES))


def trained(kind, engine, rounds=4, absent=None, lr=(0.1, 0.1, 0.1, 0.1), momentum_before=False):
    """Returns the weights after some steps; a client may miss one step."""
    parts, models = graphs(), models_of("gcn-2x8")
    optimizers = [
        make_optimizer(kind, model.parameters(), lr[k], 0.01) for k, model in enumerate(models)
    ]
    group = Group(BATCHED)

    def one(k):
        step(
            optimizers[k],
            training_loss(models[k](parts[k], Generator().manual_seed(k)), parts[k], "mean", None),
        )

    if momentum_before:
        one(1)
    for number in range(rounds):
        who = [k for k in range(len(parts)) if (number, k) != absent]
        if engine == "loop":
            for k in who:
                one(k)
        else:
            run_lockstep([partial(one, k) for k in who], group)
    return [p.detach() for model in models for p in model.parameters()], optimizers, group


@pytest.mark.parametrize("kind", ["adam", "sgd"])
@pytest.mark.parametrize(
    "case",
    [
        {},
        {"absent": (0, 1)},
        {"absent": (2, 1)},
        {"lr": (0.1, 0.1, 0.2, 0.1)},
        {"momentum_before": True},
    ],
    ids=["all", "one misses the first", "one misses a later", "other rates", "one is ahead"],
)
def test_batched_steps_equal_separate_steps(kind, case):
    (loop, one, _), (stack, other, _) = (
        trained(kind, engine, **case) for engine in ("loop", "stacked")
    )
    assert close(loop, stack)
    for a, b in zip(one, other, strict=True):
        left, right = a.state_dict()["state"], b.state_dict()["state"]
        assert left.keys() == right.keys()
        assert all(
            torch.allclose(left[i][name], right[i][name], atol=1e-5)
            for i in left
            for name in left[i]
        )


def test_optimisers_with_different_groups_step_separately():
    models, parts = models_of("gcn-2x8"), graphs()
    held = [[{"params": list(model.parameters())}] for model in models]
    held[1] = [{"params": [p]} for p in models[1].parameters()]
    held[2] = [{"params": list(models[2].parameters())[:2]}]
    optimizers = [make_optimizer("adam", groups, 0.1, 0.0) for groups in held]
    before = [weights(model)["classifier.bias"].clone() for model in models]
    run_lockstep(
        [
            partial(
                lambda k: step(
                    optimizers[k], training_loss(models[k](parts[k]), parts[k], "mean", None)
                ),
                k,
            )
            for k in range(4)
        ],
        Group(BATCHED),
    )
    moved = [
        not torch.equal(old, weights(model)["classifier.bias"])
        for old, model in zip(before, models, strict=True)
    ]
    assert moved[1]
    assert not moved[2]


def test_equal_optimisers_step_as_one(monkeypatch):
    moved = []
    monkeypatch.setattr(
        StackedOptimizer,
        "step",
        lambda self, step=StackedOptimizer.step: moved.append(step(self)) or moved[-1],
    )
    trained("adam", "stacked")
    assert moved == [True] * 4


def test_a_restored_optimiser_state_is_used():
    _, optimizers, _ = trained("adam", "stacked")
    parts, group = graphs(), Group(BATCHED)
    models = models_of("gcn-2x8")
    fresh = [make_optimizer("adam", model.parameters(), 0.1, 0.01) for model in models]
    alike = models_of("gcn-2x8")
    alone = [make_optimizer("adam", model.parameters(), 0.1, 0.01) for model in alike]

    def one(models, optimizers, k):
        step(optimizers[k], training_loss(models[k](parts[k]), parts[k], "mean", None))

    run_lockstep([partial(one, models, fresh, k) for k in range(4)], group)
    for k in range(4):
        one(alike, alone, k)
        for optimizer in (fresh[k], alone[k]):
            optimizer.load_state_dict(optimizers[k].state_dict())
    run_lockstep([partial(one, models, fresh, k) for k in range(4)], group)
    for k in range(4):
        one(alike, alone, k)
    assert close(
        [p for model in models for p in model.parameters()],
        [p for model in alike for p in model.parameters()],
    )


def test_a_penalty_on_the_parameters_adds_to_their_gradient():
    parts, models, others = graphs(), models_of("gcn-2x8"), models_of("gcn-2x8")

    def work(models, k):
        optimizer = make_optimizer("sgd", models[k].parameters(), 0.1, 0.0)
        near = sum(p.square().sum() for p in models[k].parameters())
        step(optimizer, training_loss(models[k](parts[k]), parts[k], "mean", None) + near)

    run_lockstep([partial(work, models, k) for k in range(4)], Group(BATCHED))
    for k in range(4):
        work(others, k)
    assert close(
        [p for model in models for p in model.parameters()],
        [p for model in others for p in model.parameters()],
    )


def test_a_plain_backward_pass_through_a_joint_tensor_is_an_error():
    parts, models = graphs(), models_of("gcn-2x8")
    with pytest.raises(RuntimeError, match=r"fedloom\.api\.backward"):
        run_lockstep(
            [partial(lambda k: models[k](parts[k]).sum().backward(), k) for k in range(4)],
            Group(BATCHED),
        )


def test_a_joint_graph_is_kept_while_a_client_still_needs_it():
    parts, models = graphs(), models_of("gcn-2x8")

    def work(k):
        loss = training_loss(models[k](parts[k]), parts[k], "mean", None)
        if k == 2:  # differentiates something else first
            other = torch.zeros(3, requires_grad=True)
            backward([other], other.sum())
        backward(models[k], loss)
        return [p.grad for p in models[k].parameters()]

    fresh = models_of("gcn-2x8")
    for k, got in enumerate(run_lockstep([partial(work, k) for k in range(4)], Group(BATCHED))):
        backward(fresh[k], training_loss(fresh[k](parts[k]), parts[k], "mean", None))
        assert close(got, [p.grad for p in fresh[k].parameters()])


@pytest.mark.parametrize("own", [False, True])
def test_passes_with_given_weights(own):
    parts, models = graphs(), models_of("gcn-2x8")
    given = weights(build_model("gcn-2x8", FEATURES, CLASSES, seed=9))
    sent = {name: lazy_copies(tensor, 4) for name, tensor in given.items()}
    if own:
        sent["classifier.bias"][1].add_(1)
    received = [{name: of_all[k] for name, of_all in sent.items()} for k in range(4)]
    with torch.no_grad():
        alone, batched = both_ways(lambda k: forward_with(models[k], parts[k], received[k]), 4)
    assert close(alone, batched)


def test_lazy_copies_share_memory_until_one_is_written():
    source = torch.arange(3.0)
    one, other = lazy_copies(source, 2)
    assert common_source([one, other]) is source
    one.add_(1)
    assert other.tolist() == source.tolist() == [0, 1, 2]
    assert common_source([one, other]) is None
    assert common_source([torch.ones(1), other]) is None


def test_parts_find_their_joint_tensor():
    whole = torch.randn(6, 2)
    parts = split_rows(whole, [1, 2, 3])
    assert joint_tensor(parts) is whole
    assert join_rows(parts) is whole
    assert joint_tensor(parts[:2]) is None
    assert joint_tensor([parts[1], parts[0], parts[2]]) is None
    assert torch.equal(
        join_rows([parts[1] * 1, parts[0], parts[2]]), torch.cat([parts[1], parts[0], parts[2]])
    )


def test_losses_and_confusions_of_clients_without_scored_items():
    parts = graphs()
    nobody = torch.zeros(len(parts[0].y), dtype=torch.bool)
    parts[0] = Graph(
        parts[0].x, parts[0].edge_index, parts[0].y, CLASSES, train=nobody, val=nobody, test=nobody
    )
    logits = [torch.randn(g.num_items, CLASSES, requires_grad=True) for g in parts]
    for reduction in ("mean", "sum"):
        alone, batched = both_ways(
            partial(
                lambda k, how: training_loss(logits[k], parts[k], how, None).detach(), how=reduction
            ),
            4,
        )
        assert close(alone, batched)
    alone, batched = both_ways(lambda k: held_out(logits[k], parts[k]), 4)
    assert all(torch.equal(a, b) for a, b in zip(alone, batched, strict=True))


def test_a_graph_stack_is_block_diagonal():
    parts = graphs("graph")
    stack = GraphStack(parts)
    assert (stack.num_nodes, stack.num_items, stack.num_features) == (
        sum(SIZES),
        sum(g.num_items for g in parts),
        FEATURES,
    )
    assert stack.batch.max() == stack.num_items - 1
    whole = stack.adjacency("sym").dense()
    assert torch.allclose(whole, torch.block_diag(*(g.adjacency("sym").dense() for g in parts)))
    assert torch.allclose(
        stack.adjacency("mean").transpose.dense(), stack.adjacency("mean").dense().t()
    )


def test_graphs_whose_features_need_gradients_run_alone():
    parts = graphs()
    x = parts[1].x.clone().requires_grad_()
    parts[1] = Graph(x, parts[1].edge_index, parts[1].y, CLASSES)
    models, group = models_of("gcn-2x8"), Group(BATCHED)
    run_lockstep(
        [partial(lambda k: backward(models[k], models[k](parts[k]).sum()), k) for k in range(4)],
        group,
    )
    assert x.grad is not None
    assert BATCHED[forward].key(models[1], parts[1], None) is None


def test_clients_share_no_memory_with_each_other():
    facts = Facts(FEATURES, CLASSES, "node", ("a", "b"), ("gcn-2x8",) * 2)
    clients = [
        Client(name, graph, facts) for name, graph in zip("ab", graphs(sizes=(4, 5)), strict=True)
    ]
    models = [client.build() for client in clients]
    stacked_parameters(models)
    before = weights(models[1])["classifier.bias"].clone()
    with torch.no_grad():
        models[0].classifier.bias.add_(1)
    assert torch.equal(weights(models[1])["classifier.bias"], before)


@pytest.mark.parametrize("sizes", [[0, 0], [0, 3], [2, 2]])
def test_blocks_may_be_empty(sizes):
    h, weights = (
        torch.randn(sum(sizes), 20, requires_grad=True),
        torch.randn(2, 20, 3, requires_grad=True),
    )
    out = blockwise(h, weights, sizes)
    assert torch.allclose(
        out,
        torch.cat([part @ own for part, own in zip(h.split(sizes), weights, strict=True)]),
        atol=1e-5,
    )
    out.sum().backward()
    expected = torch.stack(
        [part.sum(0).unsqueeze(1).expand(20, 3) for part in h.detach().split(sizes)]
    )
    assert torch.allclose(weights.grad, expected, atol=1e-5)
