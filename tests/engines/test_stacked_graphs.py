"""Stacks: what many clients get at once is what each would get alone, in value and in gradient, with the same noise."""

from functools import partial

import pytest
import torch
from fedloom.nn.models import FORWARD, applied
from torch import Generator

from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.data.graph import Graph
from fedloom.engines.stacked.graphs import Stack, common, copies, joined, parted, whole_of
from fedloom.engines.stacked.lockstep import run_lockstep
from fedloom.engines.stacked.matmul import blockwise
from fedloom.engines.stacked.parameters import (
    StackedOptimizer,
    position_of,
    stacked,
    tensor_of_rows,
)
from fedloom.experiments.executor import Executor
from fedloom.nn.architectures import ARCHITECTURES
from fedloom.nn.augment import thinned
from fedloom.nn.build import build_model
from fedloom.nn.losses import training_loss
from fedloom.nn.metrics import held_out
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


def nets(spec, task="node", count=4):
    return [build_model(spec, FEATURES, CLASSES, task, dropout=0.5, seed=k) for k in range(count)]


def both_ways(work, count, crew=None):
    """What `work(k)` gives for each client, alone and in step."""
    return [work(k) for k in range(count)], run_lockstep(
        [partial(work, k) for k in range(count)], crew or Executor()
    )


def close(one, other):
    return len(one) == len(other) and all(
        torch.allclose(a, b, atol=1e-5) for a, b in zip(one, other, strict=True)
    )


def everything(spec, task, parts):
    """A training step and what is seen of it, for every client, with models of its own and noise of its own."""
    models = nets(spec, task, len(parts))

    def work(k):
        net, graph, rng = models[k], parts[k], Generator().manual_seed(40 + k)
        z = net.embed(graph, rng)
        logits = net.head(z, graph, rng)
        loss = training_loss(logits, graph, "mean", None) + 0.1 * z.square().mean()
        backward(net, loss)
        with torch.no_grad():
            quiet = net(graph)
        return [
            z.detach(),
            logits.detach(),
            loss.detach(),
            quiet,
            *(p.grad for p in net.parameters()),
        ]

    return work


@pytest.mark.parametrize("sizes", [SIZES, EQUAL], ids=["unequal", "equal"])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("task", ["node", "graph"])
@pytest.mark.parametrize("options", ["", "+norm", "+linear"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture(name, options, task, sparse, sizes):
    if name == "dgcn" and options == "+norm":
        pytest.skip("dgcn has a norm as it is")
    parts, crew = graphs(task, sizes, sparse), Executor()
    alone = [everything(f"{name}-2x8{options}", task, parts)(k) for k in range(len(sizes))]
    work = everything(f"{name}-2x8{options}", task, parts)
    together = run_lockstep([partial(work, k) for k in range(len(sizes))], executor)
    assert executor.tally["alone"] == 0
    for one, other in zip(alone, together, strict=True):
        assert close(one, other)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("name", [*ARCHITECTURES, "gcn+norm"])
def test_views(name, sparse):
    parts, crew = graphs(sparse=sparse), Executor()
    name, plus, option = name.partition("+")

    def seen():
        return [
            thinned(graph, 0.3, 0.4, Generator().manual_seed(k)) for k, graph in enumerate(parts)
        ]

    alone = [everything(f"{name}-2x8{plus}{option}", "node", seen())(k) for k in range(4)]
    work = everything(f"{name}-2x8{plus}{option}", "node", seen())
    for one, other in zip(
        alone, run_lockstep([partial(work, k) for k in range(4)], executor), strict=True
    ):
        assert close(one, other)
    assert executor.tally["alone"] == 0


def test_clients_of_different_architectures_run_side_by_side():
    parts, crew = graphs(), Executor()
    specs = ["gcn-2x8", "sgc-2x8", "gcn-2x8", "sage-2x8"]
    models = [build_model(spec, FEATURES, CLASSES, seed=k) for k, spec in enumerate(specs)]
    alone, together = both_ways(lambda k: models[k](parts[k]).detach(), len(specs), executor)
    assert close(alone, together)
    assert executor.tally == {"together": 2, "alone": 2}


def test_models_of_one_kind_become_rows_of_one_tensor_and_stay_themselves():
    models = nets("gcn-2x8")
    before = [{name: t.clone() for name, t in weights(net).items()} for net in models]
    parameters = [p for net in models for p in net.parameters()]
    stack = stacked(models)
    assert all(
        p is q
        for p, q in zip(parameters, (p for net in models for p in net.parameters()), strict=True)
    )
    assert all(
        torch.equal(stack[name][k], kept)
        for k, own in enumerate(before)
        for name, kept in own.items()
    )
    load_weights(models[2], before[0])
    assert torch.equal(stack["classifier.weight"][2], before[0]["classifier.weight"])
    family, j, k = position_of(models[1].classifier.bias)
    assert family.rows[j][k] is models[1].classifier.bias
    assert tensor_of_rows([net.classifier.bias for net in models]) is stack["classifier.bias"]
    assert tensor_of_rows([net.classifier.bias for net in models[:2]]) is None
    some = stacked(
        models[:2]
    )  # not the whole family: a copy, through which gradients find their way
    some["classifier.bias"].sum().backward()
    assert torch.equal(models[1].classifier.bias.grad, torch.ones(CLASSES))


def trained(kind, engine, rounds=4, absent=None, lr=(0.1, 0.1, 0.1, 0.1), momentum_before=False):
    """Weights after some steps, of which a client may miss one."""
    parts, models = graphs(), nets("gcn-2x8")
    optimizers = [
        make_optimizer(kind, net.parameters(), lr[k], 0.01) for k, net in enumerate(models)
    ]
    crew = Executor()

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
            run_lockstep([partial(one, k) for k in who], executor)
    return [p.detach() for net in models for p in net.parameters()], optimizers, crew


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
def test_steps_at_once_are_each_ones_own(kind, case):
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


def test_optimisers_that_hold_different_things_move_each_for_itself():
    models, parts = nets("gcn-2x8"), graphs()
    held = [[{"params": list(net.parameters())}] for net in models]
    held[1] = [{"params": [p]} for p in models[1].parameters()]
    held[2] = [{"params": list(models[2].parameters())[:2]}]
    optimizers = [make_optimizer("adam", groups, 0.1, 0.0) for groups in held]
    before = [weights(net)["classifier.bias"].clone() for net in models]
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
        Executor(),
    )
    moved = [
        not torch.equal(old, weights(net)["classifier.bias"])
        for old, net in zip(before, models, strict=True)
    ]
    assert moved[1]
    assert not moved[2]


def test_all_move_as_one_when_they_can(monkeypatch):
    moved = []
    monkeypatch.setattr(
        StackedOptimizer,
        "step",
        lambda self, step=StackedOptimizer.step: moved.append(step(self)) or moved[-1],
    )
    trained("adam", "stacked")
    assert moved == [True] * 4


def test_a_state_that_was_put_back_is_taken_up():
    _, optimizers, _ = trained("adam", "stacked")
    parts, crew = graphs(), Executor()
    models = nets("gcn-2x8")
    fresh = [make_optimizer("adam", net.parameters(), 0.1, 0.01) for net in models]
    alike = nets("gcn-2x8")
    alone = [make_optimizer("adam", net.parameters(), 0.1, 0.01) for net in alike]

    def one(nets, optimizers, k):
        step(optimizers[k], training_loss(nets[k](parts[k]), parts[k], "mean", None))

    run_lockstep([partial(one, models, fresh, k) for k in range(4)], executor)
    for k in range(4):
        one(alike, alone, k)
        for optimizer in (fresh[k], alone[k]):
            optimizer.load_state_dict(optimizers[k].state_dict())
    run_lockstep([partial(one, models, fresh, k) for k in range(4)], executor)
    for k in range(4):
        one(alike, alone, k)
    assert close(
        [p for net in models for p in net.parameters()],
        [p for net in alike for p in net.parameters()],
    )


def test_a_loss_beside_the_model_adds_to_its_gradient():
    parts, models, others = graphs(), nets("gcn-2x8"), nets("gcn-2x8")

    def work(nets, k):
        optimizer = make_optimizer("sgd", nets[k].parameters(), 0.1, 0.0)
        near = sum(p.square().sum() for p in nets[k].parameters())
        step(optimizer, training_loss(nets[k](parts[k]), parts[k], "mean", None) + near)

    run_lockstep([partial(work, models, k) for k in range(4)], Executor())
    for k in range(4):
        work(others, k)
    assert close(
        [p for net in models for p in net.parameters()],
        [p for net in others for p in net.parameters()],
    )


def test_differentiating_by_oneself_what_all_share_is_an_error():
    parts, models = graphs(), nets("gcn-2x8")
    with pytest.raises(RuntimeError, match=r"fedloom\.learn\.backward"):
        run_lockstep(
            [partial(lambda k: models[k](parts[k]).sum().backward(), k) for k in range(4)],
            Executor(),
        )


def test_who_still_needs_what_all_share_keeps_it():
    parts, models = graphs(), nets("gcn-2x8")

    def work(k):
        loss = training_loss(models[k](parts[k]), parts[k], "mean", None)
        if k == 2:  # differentiates something else first
            other = torch.zeros(3, requires_grad=True)
            backward([other], other.sum())
        backward(models[k], loss)
        return [p.grad for p in models[k].parameters()]

    fresh = nets("gcn-2x8")
    for k, got in enumerate(run_lockstep([partial(work, k) for k in range(4)], Executor())):
        backward(fresh[k], training_loss(fresh[k](parts[k]), parts[k], "mean", None))
        assert close(got, [p.grad for p in fresh[k].parameters()])


@pytest.mark.parametrize("own", [False, True])
def test_given_weights(own):
    parts, models = graphs(), nets("gcn-2x8")
    given = weights(build_model("gcn-2x8", FEATURES, CLASSES, seed=9))
    sent = {name: copies(tensor, 4) for name, tensor in given.items()}
    if own:
        sent["classifier.bias"][1].add_(1)
    received = [{name: of_all[k] for name, of_all in sent.items()} for k in range(4)]
    with torch.no_grad():
        alone, together = both_ways(lambda k: applied(models[k], parts[k], received[k]), 4)
    assert close(alone, together)


def test_a_copy_is_ones_own_and_free_until_written_to():
    source = torch.arange(3.0)
    one, other = copies(source, 2)
    assert common([one, other]) is source
    one.add_(1)
    assert other.tolist() == source.tolist() == [0, 1, 2]
    assert common([one, other]) is None
    assert common([torch.ones(1), other]) is None


def test_parts_know_their_whole():
    whole = torch.randn(6, 2)
    parts = parted(whole, [1, 2, 3])
    assert whole_of(parts) is whole
    assert joined(parts) is whole
    assert whole_of(parts[:2]) is None
    assert whole_of([parts[1], parts[0], parts[2]]) is None
    assert torch.equal(
        joined([parts[1] * 1, parts[0], parts[2]]), torch.cat([parts[1], parts[0], parts[2]])
    )


def test_losses_and_confusions_of_clients_with_nothing_to_score():
    parts = graphs()
    nobody = torch.zeros(len(parts[0].y), dtype=torch.bool)
    parts[0] = Graph(
        parts[0].x, parts[0].edge_index, parts[0].y, CLASSES, train=nobody, val=nobody, test=nobody
    )
    logits = [torch.randn(g.num_items, CLASSES, requires_grad=True) for g in parts]
    for reduction in ("mean", "sum"):
        alone, together = both_ways(
            partial(
                lambda k, how: training_loss(logits[k], parts[k], how, None).detach(), how=reduction
            ),
            4,
        )
        assert close(alone, together)
    alone, together = both_ways(lambda k: held_out(logits[k], parts[k]), 4)
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def test_a_stack_is_a_graph_with_the_others_side_by_side():
    parts = graphs("graph")
    stack = Stack(parts)
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


def test_graphs_that_take_part_in_differentiation_run_alone():
    parts = graphs()
    x = parts[1].x.clone().requires_grad_()
    parts[1] = Graph(x, parts[1].edge_index, parts[1].y, CLASSES)
    models, crew = nets("gcn-2x8"), Executor()
    run_lockstep(
        [partial(lambda k: backward(models[k], models[k](parts[k]).sum()), k) for k in range(4)],
        executor,
    )
    assert x.grad is not None
    assert FORWARD.alike(models[1], parts[1], None) is None


def test_clients_share_no_memory_with_each_other():
    facts = Facts(FEATURES, CLASSES, "node", ("a", "b"), ("gcn-2x8",) * 2)
    clients = [
        Client(name, graph, facts) for name, graph in zip("ab", graphs(sizes=(4, 5)), strict=True)
    ]
    models = [client.build() for client in clients]
    stacked(models)
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
