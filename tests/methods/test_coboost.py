"""Co-Boost: each term that it adds to DENSE, and DENSE without them."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from tests.methods.test_dense import QUICK as OF_DENSE
from tests.methods.test_dense import generated, reaches, same, scene

from fedloom.experiments.run import run
from fedloom.methods.coboost import CoBoost
from fedloom.methods.dense import divergence

QUICK = {**OF_DENSE, "adversarial": 1.0, "epsilon": 0.1}
SMALL = {"model": "gcn-2x8", **QUICK, "finetune": 2}
OFF = {"hard": 0.0, "epsilon": 0.0, "mu": 0.0}


def test_with_all_terms_off_it_is_dense(node_federation):
    shared = {**SMALL, "adversarial": 0.0, "temperature": 2.0}
    dense = run("dense", node_federation, **{k: v for k, v in shared.items() if k != "epsilon"})
    assert same(dense, run("coboost", node_federation, **{**shared, **OFF}))
    for key, value in {"hard": 1.0, "epsilon": 0.1, "mu": 0.01}.items():
        assert not same(dense, run("coboost", node_federation, **{**shared, **OFF, key: value})), (
            key
        )


def test_the_generator_loss_by_hand():
    ensemble, student, graph = scene()
    method = CoBoost(hard=2.0, adversarial=0.3, temperature=4.0)
    with torch.no_grad():
        teacher, of_student = ensemble(graph), student(graph)
        p = teacher.softmax(1)[torch.arange(len(graph.y)), graph.y]
        expected = ((1 - p) ** 2 * -p.log() - 0.3 * divergence(teacher, of_student)).mean()
    assert torch.isclose(method.generator_loss(ensemble, student, graph), expected, atol=1e-5)


def test_both_terms_reach_every_weight_of_the_generator_and_the_factor_is_a_constant():
    (ensemble, student, _), (generator, graph) = scene(), generated()
    teacher, of_student = ensemble(graph), student(graph)
    of_ce, of_kl = CoBoost().emphasis(teacher, of_student, graph.y)
    assert not of_ce.requires_grad
    assert (of_kl == 1).all()
    assert reaches((of_ce * F.cross_entropy(teacher, graph.y, reduction="none")).sum(), generator)
    assert reaches((of_kl * divergence(teacher, of_student)).sum(), generator)


def test_nodes_move_by_epsilon_of_their_length_along_the_gradient():
    ensemble, student, graph = scene()
    method = CoBoost(epsilon=0.05)
    server = SimpleNamespace(rng=lambda purpose: torch.Generator().manual_seed(3))
    moved = method.view(server, ensemble, graph)
    distance = (moved.x - graph.x).norm(dim=1)
    assert torch.allclose(distance, 0.05 * graph.x.norm(dim=1), rtol=1e-4)
    assert torch.equal(moved.edge_index, graph.edge_index)
    v = torch.empty(len(graph.y), 3).uniform_(-1, 1, generator=torch.Generator().manual_seed(3))
    score = [(v * (ensemble(g) / 4).softmax(1)).sum() for g in (graph, moved)]
    assert score[1] > score[0]
    assert reaches(method.student_loss(ensemble, student, moved), student)


def test_weights_take_signed_steps_towards_clients_that_know_the_labels():
    ensemble, _, graph = scene(clients=3)
    logits = 4.0 * F.one_hot(graph.y, 3)
    # Right, wrong, and more wrong.
    graph._cache["clients"] = torch.stack([logits, -0.5 * logits, -logits])
    CoBoost(mu=0.01).reweigh(ensemble, [graph])
    raw = 1 / 3 + torch.tensor([0.01, -0.01, -0.01])
    assert torch.allclose(ensemble.share, raw / raw.sum(), atol=1e-6)
    for _ in range(100):
        CoBoost(mu=0.01).reweigh(ensemble, [graph])
        assert torch.isclose(ensemble.share.sum(), torch.tensor(1.0))
        assert (ensemble.share >= 0).all()
    assert ensemble.share[0] == 1
    CoBoost(mu=5.0).reweigh(ensemble, [graph])
    assert ensemble.share.isfinite().all()


@pytest.mark.parametrize("mu", [0.01, 5.0])
def test_identical_clients_keep_positive_weights(mu):
    ensemble, _, graph = scene(clients=2)
    ensemble.uploads[1] = ensemble.uploads[0]
    before = ensemble(graph)
    CoBoost(mu=mu).reweigh(ensemble, [graph])
    assert torch.isclose(ensemble.share.sum(), torch.tensor(1.0))
    assert torch.allclose(ensemble(graph), before, atol=1e-5)
