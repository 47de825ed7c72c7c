"""Batched terms, prototypes, links and edge weights: values and gradients of each client alone."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from tests.engines.test_stacked_graphs import CLASSES, FEATURES, graphs, models_of
from torch import Generator

from fedloom.engines.stacked import tensors
from fedloom.engines.stacked.lockstep import Group, run_lockstep
from fedloom.engines.stacked.operations import BATCHED
from fedloom.engines.stacked.terms import BatchedContrast
from fedloom.nn import contrast
from fedloom.nn.build import build_model
from fedloom.nn.contrast import class_contrast
from fedloom.nn.distillation import divergence, neighbourly, squared_error, structure
from fedloom.nn.edge_weights import EdgeEvaluator, EdgeWeighted, edge_scores
from fedloom.nn.links import (
    DrawnLinks,
    draw_links,
    link_scores,
    pairs_of,
    reconstruction,
)
from fedloom.nn.losses import entropy, hsic, probabilities
from fedloom.nn.model import embed_and_head, forward
from fedloom.nn.nearest import pairs
from fedloom.nn.prototypes import (
    Attention,
    Neighbourhoods,
    Neighbours,
    centre_alignment,
    neighbourhood_prototypes,
    table_distance,
    unit_rows,
    vote,
)

WIDTH = 4
SIZES = (5, 9, 4, 6)


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=Generator().manual_seed(seed))


def rows(of, width=WIDTH, seed=0, learnt=True):
    """Returns a matrix with a row for every node of each graph."""
    return [
        drawn(graph.num_nodes, width, seed=seed + k).requires_grad_(learnt)
        for k, graph in enumerate(of)
    ]


def check(operation, make, count, batched=True):
    """Compares an operation of several clients with that of each one alone.

    make: takes the number of a client, returns its arguments and the tensors that learn.
    """
    alone, together = ([make(k) for k in range(count)] for _ in range(2))
    expected = [operation.function(*args) for args, _ in alone]
    group = Group(BATCHED)
    found = run_lockstep([partial(operation, *args) for args, _ in together], group)
    assert group.calls["batched" if batched else "single"] == count
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert torch.allclose(one, other, atol=1e-5)
    if not found[0].requires_grad:
        assert not expected[0].requires_grad
        return
    onto = [drawn(*result.shape, seed=50 + k) for k, result in enumerate(expected)]
    torch.autograd.backward(expected, onto)
    tensors.backward(found, onto, keep=False)
    for (_, own), (_, other) in zip(together, alone, strict=True):
        for one, reference in zip(own, other, strict=True):
            got = gradient(one)
            wanted = torch.zeros_like(one) if reference.grad is None else reference.grad
            assert torch.allclose(got, wanted, atol=1e-5)


def gradient(tensor):
    """Returns the gradient of a tensor, which may be a row of a stack."""
    stack, j, k = getattr(tensor, "_stack_position", (None, 0, 0))
    whole = None if stack is None else stack.tensors[j].grad
    parts = [g for g in (tensor.grad, None if whole is None else whole[k]) if g is not None]
    return sum(parts, torch.zeros_like(tensor))


@pytest.mark.parametrize(
    "operation", [divergence, squared_error, hsic], ids=lambda o: o.function.__name__
)
@pytest.mark.parametrize("width", [3, 20])  # few and many columns
def test_terms_of_two_outputs(operation, width):
    def make(k):
        one, other = rows(graphs(sizes=SIZES), width), rows(graphs(sizes=SIZES), width, 9)
        return (one[k], other[k]), (one[k], other[k])

    check(operation, make, 4)


@pytest.mark.parametrize(
    "operation", [entropy, probabilities, unit_rows], ids=lambda o: o.function.__name__
)
@pytest.mark.parametrize("width", [3, 20])
def test_terms_of_one_output(operation, width):
    def make(k):
        own = rows(graphs(sizes=SIZES), width)[k]
        return (own,), (own,)

    check(operation, make, 4)


@pytest.mark.parametrize("norm", ["pairs", "nodes"])
def test_the_neighbourly_loss(norm):
    def make(k):
        graph = graphs(sizes=SIZES)[k]
        teacher, student = drawn(SIZES[k], WIDTH), drawn(SIZES[k], WIDTH, seed=1).requires_grad_()
        return (graph, teacher, student, norm), (student,)

    check(neighbourly, make, 4)


def without_edges(graph):
    return replace(graph, edge_index=graph.edge_index[:, :0])


@pytest.mark.parametrize("bare", [False, True])
def test_the_structure_of_neighbourhoods(bare):
    def make(k):
        graph = graphs(sizes=SIZES)[k]
        if bare and k == 1:
            graph = without_edges(graph)
        f, f_global = drawn(SIZES[k], WIDTH, seed=k).requires_grad_(), drawn(SIZES[k], WIDTH)
        return (f, f_global, graph, 0.3), (f,)

    check(structure, make, 4)


@pytest.mark.parametrize("most", [BatchedContrast.PAIRS, 0])  # padded blocks, or one by one
def test_the_contrast_of_classes(monkeypatch, most):
    monkeypatch.setattr(BatchedContrast, "PAIRS", most)

    def make(k):
        graph = graphs(sizes=SIZES)[k]
        if k == 2:
            graph = replace(graph, train=torch.zeros_like(graph.train))
        z = drawn(SIZES[k], WIDTH, seed=k).requires_grad_()
        return (graph, z, drawn(SIZES[k], WIDTH, seed=9), 0.5), (z,)

    check(class_contrast, make, 4)


def test_graphs_with_many_training_nodes_are_contrasted_alone(monkeypatch):
    monkeypatch.setattr(contrast, "ROWS", 2)

    def make(k):
        graph, z = graphs(sizes=SIZES)[k], drawn(SIZES[k], WIDTH, seed=k).requires_grad_()
        return (replace(graph, train=torch.ones_like(graph.train)), z, z.detach(), 0.5), (z,)

    check(class_contrast, make, 4, batched=False)


# ---- prototypes ----


def around(k, depth=2):
    """Returns neighbourhoods: random pairs of items, some of them without a class."""
    rng = Generator().manual_seed(k)
    n = SIZES[k]
    label = torch.randint(-1, CLASSES, (n,), generator=rng)
    label[0] = 0
    hops = []
    for _ in range(depth):
        linked = (torch.rand(n, n, generator=rng) < 0.5) & (label >= 0).unsqueeze(1)
        hops.append(Neighbours(*linked.nonzero().unbind(1), label, CLASSES))
    return Neighbourhoods(label, hops, CLASSES)


@pytest.mark.parametrize("attention", [True, False])
def test_prototypes_of_neighbourhoods(attention):
    known = [around(k) for k in range(4)]

    def make(k):
        z, own = drawn(SIZES[k], WIDTH, seed=k).requires_grad_(), None
        if attention:
            own = Attention(2, WIDTH)
            torch.nn.init.normal_(own.vectors, generator=Generator().manual_seed(k))
        return (z, known[k], own), (z, *(own.parameters() if own else ()))

    check(neighbourhood_prototypes, make, 4)


def test_distances_of_tables():
    def make(k):
        own, other = drawn(CLASSES, 2, WIDTH, seed=k).requires_grad_(), drawn(CLASSES, 2, WIDTH)
        return (own, other, drawn(CLASSES, 2, seed=k) > 0), (own,)

    check(table_distance, make, 4)


def test_the_alignment_of_class_centres():
    def make(k):
        graph = graphs(sizes=SIZES)[k]
        n, width = SIZES[k], CLASSES
        logits = drawn(n, width, seed=k)
        if k == 1:  # one class is missing
            graph = replace(graph, y=graph.y.clamp(max=1))
            logits[:, 2] = -50
        first, second = (drawn(n, WIDTH, seed=s + k).requires_grad_() for s in (20, 30))
        return (graph, logits, first, second, 0.5), (first, second)

    check(centre_alignment, make, 4)


@pytest.mark.parametrize("same", [True, False])
def test_votes_of_the_same_clusters(same):
    clusters, of_class = drawn(5, WIDTH), torch.tensor([0, 0, 1, 1, 1])
    sent = tensors.lazy_copies(clusters, 8), tensors.lazy_copies(of_class, 8)

    def make(k):
        Q, of = (column[k] for column in sent) if same else (clusters, of_class)
        return (drawn(SIZES[k], WIDTH, seed=k), Q, of, CLASSES, 0.1), ()

    check(vote, make, 4, batched=same)


# ---- links ----


def candidates(k):
    """Returns a graph of candidates: the edges of a graph, both ways, each once."""
    graph = graphs(sizes=SIZES)[k]
    found = pairs(graph.edge_index, graph.num_nodes)
    return replace(graph, edge_index=torch.cat([found, found.flip(0)], 1))


def test_scores_of_links():
    def make(k):
        h = drawn(SIZES[k], WIDTH, seed=k).requires_grad_()
        return (h, candidates(k)), (h,)

    check(link_scores, make, 4)


def test_every_client_draws_its_links_from_its_own_stream():
    def make(k):
        score = drawn(7 + k, seed=k).requires_grad_()
        return (score, 0.5, 0.7, Generator().manual_seed(k)), (score,)

    check(draw_links, make, 4)


def test_the_reconstruction_of_links():
    def make(k):
        suggested, h = candidates(k), drawn(SIZES[k], WIDTH, seed=k).requires_grad_()
        if k == 2:  # a complete graph has no other pairs
            every = torch.combinations(torch.arange(SIZES[k])).T
            suggested = replace(suggested, edge_index=torch.cat([every, every.flip(0)], 1))
        return (h, suggested, Generator().manual_seed(k)), (h,)

    check(reconstruction, make, 4)


# ---- learnt edge weights ----


@pytest.mark.parametrize("spec", ["gcn-2x8", "sage-2x8", "gin-2x8", "sgc-2x8", "gcn-2x8+norm"])
@pytest.mark.parametrize("form", [EdgeWeighted, DrawnLinks])
def test_passes_on_graphs_with_learnt_weights(spec, form):
    def make(k):
        suggested, model = candidates(k), models_of(spec)[k]
        count = pairs_of(suggested).shape[1] * (1 if form is DrawnLinks else 2)
        # A drawn link has weight 0 or 1.
        weight = drawn(count, seed=k).sigmoid() if form is EdgeWeighted else drawn(count) > 0
        weight = weight.float().requires_grad_()
        return (model, form(suggested, weight), None), (weight, *model.parameters())

    check(forward, make, 4)


def test_attention_needs_the_drawn_edges_of_each_client():
    def make(k):
        suggested, model = candidates(k), models_of("gat-2x8")[k]
        weight = (drawn(pairs_of(suggested).shape[1]) > 0).float()
        return (model, DrawnLinks(suggested, weight), None), tuple(model.parameters())

    check(forward, make, 4, batched=False)


@pytest.mark.parametrize("noise", [False, True])
def test_scores_of_edges(noise):
    def make(k):
        torch.manual_seed(k)
        gcn = build_model("gcn-2x8", FEATURES, CLASSES, dropout=0.5, seed=k)
        evaluator = EdgeEvaluator(gcn, CLASSES)
        rng = Generator().manual_seed(k) if noise else None
        own = [p for name, p in evaluator.named_parameters() if "norm" not in name]
        return (evaluator, graphs(sizes=SIZES)[k], rng), own

    check(edge_scores, make, 4)


# ---- embeddings and logits ----


def test_embeddings_and_logits_of_one_pass():
    models, data = models_of("gcn-2x8"), graphs(sizes=SIZES)
    expected = [
        embed_and_head.function(model, graph, Generator().manual_seed(k))
        for k, (model, graph) in enumerate(zip(models, data, strict=True))
    ]
    group = Group(BATCHED)
    tasks = [
        partial(embed_and_head, model, graph, Generator().manual_seed(k))
        for k, (model, graph) in enumerate(zip(models, data, strict=True))
    ]
    found = run_lockstep(tasks, group)
    assert group.calls["batched"] == 4
    for own, alone in zip(found, expected, strict=True):
        for one, other in zip(own, alone, strict=True):
            assert torch.allclose(one, other, atol=1e-6)
