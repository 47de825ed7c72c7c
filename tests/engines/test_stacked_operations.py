"""Further batched operations: results and gradients equal those of each client alone."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Generator

from fedloom.data.synthetic import synthetic
from fedloom.engines.stacked.graphs import MendedStack, stack_of
from fedloom.engines.stacked.lockstep import Group, run_lockstep
from fedloom.engines.stacked.operations import BATCHED
from fedloom.engines.stacked.tensors import lazy_copies
from fedloom.methods.fedgen import Generator as EmbeddingGenerator
from fedloom.methods.fedsage_plus import mend
from fedloom.nn.build import build_model
from fedloom.nn.encoder import Encoder, encode_rows
from fedloom.nn.losses import weighted_divergence
from fedloom.nn.model import generated_loss
from fedloom.nn.training import backward, label_steps, make_optimizer
from fedloom.nn.weights import weights

SIZES = (40, 25, 60)
CLASSES, FEATURES = 3, 10


def graphs():
    return [synthetic(n, classes=CLASSES, features=FEATURES, seed=n) for n in SIZES]


def trained(graph):
    """Returns the graph with every third node in the training set."""
    return replace(graph, train=torch.arange(graph.num_nodes) % 3 == 0)


def alone_and_together(task):
    """Runs a task for each client, one after another and in lockstep; counts batched calls.

    task: takes the number of a client.
    """
    group = Group(BATCHED)
    alone = [task(k) for k in range(len(SIZES))]
    together = run_lockstep([partial(task, k) for k in range(len(SIZES))], group)
    return alone, together, group.calls


def close(one, other):
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("constant", [False, True])
def test_divergences(constant):
    rng = Generator().manual_seed(0)
    targets = [torch.rand(n, CLASSES, generator=rng).softmax(1) for n in SIZES]
    targets[0][0] = torch.tensor([1.0, 0.0, 0.0])  # 0 log 0 is 0
    gammas = [torch.tensor(0.3) if constant else torch.rand(n, generator=rng) for n in SIZES]

    def task(k):
        logits = torch.randn(SIZES[k], CLASSES, generator=Generator().manual_seed(k))
        logits.requires_grad_()
        loss = weighted_divergence(logits, targets[k], gammas[k])
        backward([logits], 2 * loss)
        return loss.detach(), logits.grad

    alone, together, calls = alone_and_together(task)
    assert calls["batched"] == 2 * len(SIZES)
    for one, other in zip(alone, together, strict=True):
        close(one, other)


@pytest.mark.parametrize("shared", [True, False])
def test_losses_on_generated_embeddings(shared):
    clients = graphs()
    generators = [EmbeddingGenerator(4, CLASSES, 8, 16) for _ in SIZES]
    own = [weights(generator) for generator in generators]
    copies = {name: lazy_copies(tensor, len(SIZES)) for name, tensor in own[0].items()}
    sent = [{name: column[k] for name, column in copies.items()} for k in range(len(SIZES))]

    def task(k):
        rng = Generator().manual_seed(k)
        model = build_model("gcn-2x16+linear", FEATURES, CLASSES, seed=k)
        noise = torch.randn(6, 4, generator=rng)
        y = torch.randint(CLASSES, (6,), generator=rng)
        given = sent[k] if shared else own[k]
        loss = generated_loss(model, clients[k], generators[k], given, noise, y)
        backward(model, loss)
        head = model.classifier
        return loss.detach(), head.weight.grad, head.bias.grad

    alone, together, calls = alone_and_together(task)
    assert calls["batched"] == 2 * len(SIZES)
    for one, other in zip(alone, together, strict=True):
        close(one, other)


@pytest.mark.parametrize("widths", [[8, 16, CLASSES], [8, 16, 12, CLASSES], [8, CLASSES]])
@pytest.mark.parametrize("shared", [True, False])
def test_encoders_of_rows(widths, shared):
    torch.manual_seed(0)
    source, s = Encoder(widths, 0.5), torch.randn(30, 8)
    rows = [torch.arange(0, 30, 2), torch.arange(20), torch.tensor([3, 1, 29])]

    def scene():
        """Returns each client's weights and matrix, which require gradients."""
        given = weights(source)
        if shared:
            columns = {name: lazy_copies(t, len(rows)) for name, t in given.items()}
            matrices = lazy_copies(s, len(rows))
        else:
            columns = {name: [t.clone() for _ in rows] for name, t in given.items()}
            matrices = [s.clone() for _ in rows]
        return columns, [matrix.requires_grad_() for matrix in matrices]

    def tasks():
        columns, matrices = scene()

        def task(k):
            own = {name: column[k].requires_grad_() for name, column in columns.items()}
            encoder = Encoder(widths, 0.5)
            rng = Generator().manual_seed(k)
            with torch.no_grad():
                scored = encode_rows(encoder, own, matrices[k], rows[k], None)
            q = encode_rows(encoder, own, matrices[k], rows[k], rng)
            backward([], (q * torch.arange(1, 1 + q.numel()).view(q.shape)).sum())
            return [scored, q.detach(), matrices[k].grad, *(own[name].grad for name in sorted(own))]

        return [partial(task, k) for k in range(len(rows))]

    group = Group(BATCHED)
    alone, together = [task() for task in tasks()], run_lockstep(tasks(), group)
    assert group.calls["batched"] == 3 * len(rows)
    for one, other in zip(alone, together, strict=True):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("differing", ["nothing", "graph", "model", "history", "class weight"])
def test_steps_on_labels_run_once_only_for_equal_clients(optimizer, differing):
    own = [trained(graph) for graph in graphs()]
    one = own[0]
    uneven = torch.tensor([1.0, 2.0, 3.0])

    def task(k):
        graph = own[k] if differing == "graph" else trained(one)
        model = build_model("gcn-2x8", FEATURES, CLASSES, seed=k if differing == "model" else 0)
        steps = make_optimizer(optimizer, model.parameters(), 0.05, 1e-3)
        losses = []
        if differing == "history" and k == 1:
            label_steps(model, steps, own[1], None, 2, losses.append)
        weight = uneven if differing == "class weight" and k == 2 else torch.ones(CLASSES)
        for _ in range(2):
            label_steps(model, steps, graph, weight, 3, losses.append)
        return [torch.stack(losses[-6:]).detach(), *(p.detach() for p in model.parameters())]

    alone, together, _ = alone_and_together(task)
    for first, second in zip(alone, together, strict=True):
        for a, b in zip(first, second, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    if differing == "nothing":  # the same bits: one client has run as it runs alone
        assert all(
            torch.equal(a, b)
            for first, second in zip(alone, together, strict=True)
            for a, b in zip(first, second, strict=True)
        )


@pytest.mark.parametrize("model", ["sage-2x8", "gcn-2x8", "gin-2x8", "gcn-2x8+norm", "sgc-2x8"])
def test_mended_graphs_run_as_one(model):
    rng = Generator().manual_seed(0)
    made = []
    for graph in graphs():
        factors = torch.randn(9, 4, generator=rng), torch.randn(4, FEATURES, generator=rng)
        rows = torch.randint(graph.num_nodes, (9,), generator=rng)
        made.append(mend(trained(graph), factors[0] @ factors[1], rows, factors))
    assert isinstance(stack_of(made, Group(BATCHED)), MendedStack)

    def task(k):
        own = build_model(model, FEATURES, CLASSES, seed=k)
        logits = own(made[k])
        backward(own, logits.square().mean())
        return [logits.detach(), *(p.grad for p in own.parameters())]

    alone, together, calls = alone_and_together(task)
    assert calls["batched"] == 2 * len(SIZES)
    for one, other in zip(alone, together, strict=True):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
