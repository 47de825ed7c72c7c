"""DENSE: the server's two losses, its limits, and what travels: only weights and sizes."""

import pytest
import torch
import torch.nn.functional as F

from fedloom.core.message import flatten
from fedloom.core.registry import make_method
from fedloom.data.graph import Graph
from fedloom.data.partition import divide
from fedloom.data.synthetic import synthetic
from fedloom.errors import ConfigError
from fedloom.experiments.run import run
from fedloom.methods.dense import Dense, Ensemble, divergence, knn_graph
from fedloom.nn.build import build_model
from fedloom.nn.weights import weights

QUICK = {
    "rounds": 1,
    "epochs": 20,
    "finetune": 0,
    "batches": 2,
    "nodes": 30,
    "generator_steps": 2,
    "adversarial": 2.0,
}
SMALL = {"model": "gcn-2x8", **QUICK, "finetune": 2}


def scene(clients=3, nodes=20, seed=0):
    """Returns an ensemble, a student and a graph of generated nodes."""
    models = [build_model("gcn-2x8", 6, 3, dropout=0.0, seed=seed + k) for k in range(clients + 1)]
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(nodes, 6, generator=rng, requires_grad=True)
    y = torch.randint(3, (nodes,), generator=rng)
    return (
        Ensemble(models[0], [weights(model) for model in models[1:]]),
        models[0],
        knn_graph(x, y, 3, 3),
    )


def same(one, other):
    one, other = flatten(one.final_models), flatten(other.final_models)
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_the_ensemble_is_the_mean_of_the_clients_logits():
    ensemble, model, graph = scene()
    by_hand = (
        sum(torch.func.functional_call(model, upload, (graph,)) for upload in ensemble.uploads) / 3
    )
    assert torch.allclose(ensemble(graph), by_hand, atol=1e-6)


def test_nodes_are_linked_to_their_nearest_by_cosine_both_ways():
    x = torch.tensor([[1.0, 0.0], [5.0, 0.5], [0.0, 1.0], [0.5, 3.0], [-1.0, -1.0]])
    graph = knn_graph(x, torch.zeros(5, dtype=torch.int64), 1, 2)
    pairs = {tuple(pair) for pair in graph.edge_index.T.tolist()}
    assert {(0, 1), (1, 0), (2, 3), (3, 2)} <= pairs
    assert all((b, a) in pairs and a != b for a, b in pairs)
    assert knn_graph(x, graph.y, 99, 2).num_edges == 5 * 4  # no more than there are others


def test_both_losses_by_hand():
    ensemble, student, graph = scene()
    method, generator, distilled, apart = Dense(adversarial=0.7, temperature=3.0), 0.0, 0.0, 0
    with torch.no_grad():
        teacher, of_student = ensemble(graph), student(graph)
    for t, s, y in zip(teacher, of_student, graph.y, strict=True):
        differ = int(t.argmax() != s.argmax())
        kl, soft_kl = (
            (p * (p / q).log()).sum()
            for p, q in ((t.softmax(0), s.softmax(0)), ((t / 3).softmax(0), (s / 3).softmax(0)))
        )
        generator += (-t.log_softmax(0)[y] - 0.7 * differ * kl) / graph.num_nodes
        distilled += 9 * soft_kl / graph.num_nodes
        apart += differ
    assert 0 < apart < graph.num_nodes
    assert torch.isclose(method.generator_loss(ensemble, student, graph), generator, atol=1e-5)
    assert torch.isclose(method.student_loss(ensemble, student, graph), distilled, atol=1e-5)


def generated(nodes=20):
    """Returns a generator, and a graph that it generates from noise."""
    generator, rng = (
        build_model("mlp-3x8", 5, 6, dropout=0.0, seed=9),
        torch.Generator().manual_seed(0),
    )
    y = torch.randint(3, (nodes,), generator=rng)
    source = Graph(
        x=torch.randn(nodes, 5, generator=rng),
        edge_index=torch.zeros(2, 0, dtype=torch.int64),
        y=y,
        num_classes=3,
    )
    return generator, knn_graph(generator(source), y, 3, 3)


def reaches(term, model):
    return all(
        gradient.abs().sum() > 0
        for gradient in torch.autograd.grad(term, list(model.parameters()), retain_graph=True)
    )


def test_every_term_reaches_every_weight():
    (ensemble, student, _), (generator, graph), method = scene(), generated(), Dense()
    teacher, of_student = ensemble(graph), student(graph)
    of_ce, of_kl = method.emphasis(teacher, of_student, graph.y)
    assert reaches((of_ce * F.cross_entropy(teacher, graph.y, reduction="none")).sum(), generator)
    assert reaches((of_kl * divergence(teacher, of_student)).sum(), generator)
    assert reaches(method.student_loss(ensemble, student, graph), student)


def test_generating_changes_neither_student_nor_clients():
    ensemble, student, graph = scene()
    Dense().generator_loss(ensemble, student, graph).backward()
    assert all(p.grad is None for p in student.parameters())
    assert not any(t.requires_grad for upload in ensemble.uploads for t in upload.values())


def test_without_batches_it_is_one_round_of_fedavg(node_federation):
    dense = run("dense", node_federation, engine="loop", **{**SMALL, "batches": 0})
    plain = run(
        "fedavg",
        node_federation,
        engine="loop",
        model="gcn-2x8",
        rounds=1,
        epochs=SMALL["epochs"],
        finetune=SMALL["finetune"],
    )
    assert same(dense, plain)
    assert [e["accuracy"] for e in dense.history] == [e["accuracy"] for e in plain.history]
    assert not same(dense, run("dense", node_federation, **SMALL))


def test_the_student_is_closer_to_the_ensemble_than_the_average_is():
    """On real nodes, which the server never saw, of clients that have different classes."""
    graph = synthetic(nodes=211, classes=3, features=12, degree=6.0, homophily=0.8, seed=1)
    skewed = divide(graph, 4, "dirichlet", 0, split="40/30/30", options={"alpha": 0.1})
    settings = {"model": "gcn-2x8", "dropout": 0.0, "epochs": 60, "finetune": 0}
    average, student = (run("dense", skewed, **settings, batches=batches) for batches in (0, 10))
    model = build_model("gcn-2x8", 12, 3, dropout=0.0, seed=0)
    # Not fine-tuned: equal to the uploads.
    ensemble = Ensemble(model, [average.final_models[c] for c in skewed.names])
    gap = {}
    for name, result in (("average", average), ("student", student)):
        with torch.no_grad():
            gap[name] = divergence(
                ensemble(graph),
                torch.func.functional_call(model, result.final_models["server"], (graph,)),
            ).mean()
    assert gap["student"] < 0.7 * gap["average"], gap


def test_traffic_is_one_model_each_way_and_one_size(node_federation):
    traffic = run("dense", node_federation, **SMALL).traffic
    d, c, clients = (
        node_federation.num_features,
        node_federation.num_classes,
        node_federation.num_clients,
    )
    model = d * 8 + 8 + 8 * c + c
    assert traffic["scalars_up"] == clients * (model + 1)
    assert traffic["scalars_down"] == clients * (model + SMALL["finetune"])  # and epochs' numbers


def test_one_round_and_node_tasks_only(graph_federation):
    with pytest.raises(ConfigError, match=r"method\.rounds"):
        make_method("dense", {"rounds": 2})
    with pytest.raises(ConfigError, match="does node tasks"):
        run("dense", graph_federation, **SMALL)
