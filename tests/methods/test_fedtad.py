"""FedTAD: reliability, the three terms and their gradients, and its limits."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tests.methods.test_dense import reaches, same, scene
from tests.watching import Largest

from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.data.federation import Federation
from fedloom.data.graph import Graph
from fedloom.data.partition import divide
from fedloom.data.synthetic import synthetic
from fedloom.errors import ConfigError, MessageError
from fedloom.experiments.run import run
from fedloom.methods.dense import Ensemble, knn_graph
from fedloom.methods.fedgen import diversity as pair_by_pair
from fedloom.methods.fedtad import (
    FedTAD,
    disagreement,
    diversity,
    reliability_of,
    shares,
    weighted_mean,
)
from fedloom.nn.build import build_model
from fedloom.nn.weights import weights

QUICK = {"batches": 2, "nodes": 20, "noise": 4, "generator_steps": 2, "student_steps": 2}
SMALL = {"model": "gcn-2x8", "rounds": 3, **QUICK}


def graph_of(x, edges, y, train, num_classes, weight=None):
    ends = torch.tensor(edges, dtype=torch.int64).reshape(-1, 2).T
    both = None if weight is None else torch.tensor(weight).repeat(2)
    labels, kept = torch.tensor(y), torch.tensor(train)
    return Graph(
        torch.tensor(x),
        torch.cat([ends, ends.flip(0)], 1),
        labels,
        num_classes,
        train=kept,
        edge_weight=both,
    ).hide_labels()


def generated(method, nodes=20, features=6, classes=3):
    """Returns a generator, and a graph that it generates from noise."""
    rng = torch.Generator().manual_seed(0)
    generator = method.make_generator(Facts(features, classes, "node", ("0",), ("gcn-2x8",)), rng)
    y, noise = torch.arange(nodes) % classes, torch.randn(nodes, method.noise, generator=rng)
    return (
        generator,
        knn_graph(generator(torch.cat([noise, F.one_hot(y, classes)], 1)), y, 3, classes),
        noise,
    )


def some_shares(clients=3, classes=3, seed=4):
    phi = torch.rand(clients, classes, generator=torch.Generator().manual_seed(seed))
    phi[0, 1] = 0
    return phi / phi.sum(0)


def without_labels(graph, keep):
    """Returns the graph with fewer training nodes; the others go to the test set."""
    return replace(graph, train=graph.train & keep, test=graph.test | (graph.train & ~keep))


# ---- at a client ----
def test_reliability_by_hand():
    """A path 0 - 1 - 2 and an isolated node 3.

    Class 0 has nodes 0 and 1, class 1 has node 3, class 2 has none. Node 2 is not a training node.
    """
    x = [[1.0, 0.0], [1.0, 1.0], [0.0, 2.0], [3.0, 0.0]]
    graph = graph_of(x, [[0, 1], [1, 2]], [0, 0, 1, 1], [True, True, False, True], 3)
    # A walk is back after two steps: from an end with probability ½, from the middle always.
    # After an odd number of steps it never is.
    h = torch.tensor(
        [[1.0, 0.0, 0.0, 0.5], [1.0, 1.0, 0.0, 1.0], [0.0, 2.0, 0.0, 0.5], [3.0, 0.0, 0.0, 0.0]]
    )
    cos = F.cosine_similarity(h.unsqueeze(0), h.unsqueeze(1), dim=2)
    first, second = (1 + cos[0, 1]) / 2, (1 + cos[1, 0] + cos[1, 2]) / 3
    assert torch.allclose(
        reliability_of(graph, 2, 3),
        torch.stack([first + second, torch.tensor(1.0), torch.tensor(0.0)]),
    )
    assert torch.allclose(reliability_of(graph, 3, 3), reliability_of(graph, 2, 3))
    assert not torch.allclose(reliability_of(graph, 4, 3), reliability_of(graph, 2, 3))


def test_heavier_edges_count_more_in_the_mean_over_neighbours():
    x, edges = [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]], [[0, 1], [0, 2]]
    near, far = (
        reliability_of(graph_of(x, edges, [0, 1, 1], [True, False, False], 2, w), 1, 2)[0]
        for w in ([9.0, 1.0], [1.0, 9.0])
    )
    # One step never returns: only features count.
    assert torch.allclose(torch.stack([near, far]), torch.tensor([10 / 11, 2 / 11]))


def test_reliability_is_never_negative_nor_nan():
    unlike = graph_of([[1.0], [-9.0], [-9.0]], [[0, 1], [0, 2]], [0, 1, 1], [True, False, False], 2)
    assert reliability_of(unlike, 1, 2).tolist() == [0.0, 0.0]
    blank = graph_of([[0.0], [0.0]], [], [0, 1], [True, True], 2)
    assert reliability_of(blank, 3, 2).tolist() == [0.0, 0.0]  # both nodes have zero features
    empty = replace(unlike, train=torch.zeros(3, dtype=torch.bool)).training_view(inductive=True)
    assert empty.num_nodes == 0
    assert reliability_of(empty, 3, 2).tolist() == [0.0, 0.0]


def test_reliability_takes_no_memory_for_pairs_of_nodes():
    graph = synthetic(nodes=700, classes=3, features=8, degree=6.0, seed=0)
    with Largest() as largest:
        reliability_of(replace(graph, train=torch.ones(700, dtype=torch.bool)), 5, 3)
    assert largest.numel < 100 * 700


def test_reliability_uses_the_features_at_the_time_of_the_request(node_federation):
    """A plug-in may refine a client's graph after the set-up."""
    graph = node_federation.graphs[0]
    facts = Facts(12, 3, "node", ("0",), ("gcn-2x8",))
    client, method = Client("0", graph, facts), FedTAD()
    before = method.reliability(client)["reliability"]
    client.full_graph = replace(graph, x=torch.cat([graph.x, torch.ones(graph.num_nodes, 2)], 1))
    client.graph, client.facts = (
        client.full_graph.training_view(False),
        replace(facts, num_features=14),
    )
    after = method.reliability(client)["reliability"]
    assert torch.equal(after, reliability_of(client.graph, 5, 3))
    assert not torch.equal(before, after)
    assert method.make_generator(client.facts, torch.Generator())[-1].out_features == 14


# ---- at the server ----
def test_shares_sum_to_one_over_clients_for_known_classes():
    share = shares({"a": torch.tensor([1.0, 0.0, 0.0]), "b": torch.tensor([3.0, 2.0, 0.0])})
    assert share.tolist() == [[0.25, 0.0, 0.0], [0.75, 1.0, 0.0]]
    with pytest.raises(MessageError, match=r"client 'b': tensor 'reliability' holds -0\.5"):
        shares({"a": torch.ones(2), "b": torch.tensor([1.0, -0.5])})


def test_diversity_equals_that_of_fedgen_with_less_memory():
    rng = torch.Generator().manual_seed(0)
    noise, x = torch.randn(30, 4, generator=rng), torch.randn(30, 500, generator=rng)
    with Largest() as largest:
        value = diversity(noise, x)
    assert torch.isclose(value, pair_by_pair(noise, x), atol=1e-6)
    assert largest.numel <= 30 * 500
    # Two nodes: x differ by 1 and 2, z by 2; half of the pairs are (i, i).
    by_hand = torch.exp(-torch.tensor(2 * (3.0 / 2) * 4.0 / 4))
    assert torch.isclose(
        diversity(torch.tensor([[0.0], [2.0]]), torch.tensor([[0.0, 0.0], [1.0, 2.0]])), by_hand
    )
    assert diversity(noise, torch.ones_like(x)) == 1  # the worst case: equal nodes


def test_both_losses_by_hand():
    ensemble, student, _ = scene()
    method, share = FedTAD(semantic=0.7, diversity=0.3, noise=4), some_shares()
    _, graph, noise = generated(method)
    wrong = apart = 0.0
    with torch.no_grad():
        of_student = student(graph)
        for k, upload in enumerate(ensemble.uploads):
            of_clients = torch.func.functional_call(student, upload, (graph,))
            for i, y in enumerate(graph.y.tolist()):
                wrong += share[k, y] * -of_clients[i].log_softmax(0)[y] / graph.num_nodes
                apart += (
                    share[k, y] * (of_clients[i] - of_student[i]).abs().sum() / 3 / graph.num_nodes
                )
        expected = 0.7 * wrong - apart + 0.3 * diversity(noise, graph.x)
    assert apart > 0
    assert torch.isclose(
        method.generator_loss(ensemble, share, student, graph, noise), expected, atol=1e-5
    )
    assert torch.isclose(method.student_loss(ensemble, share, student, graph), apart, atol=1e-5)


def test_every_term_reaches_every_weight():
    (ensemble, student, _), method, share = scene(), FedTAD(noise=4), some_shares()
    generator, graph, noise = generated(method)
    of_clients, of_student = ensemble.each(graph), student(graph)
    wrong = torch.stack(
        [F.cross_entropy(logits, graph.y, reduction="none") for logits in of_clients]
    )
    for term in (
        weighted_mean(share, graph.y, wrong),
        weighted_mean(share, graph.y, disagreement(of_clients, of_student)),
        diversity(noise, graph.x),
    ):
        assert reaches(term, generator)
    assert reaches(method.student_loss(ensemble, share, student, graph), student)


def test_each_loss_changes_only_its_own_network():
    """The generator's loss changes only the generator, the student's only the student."""
    (ensemble, student, _), method, share = scene(), FedTAD(noise=4), some_shares()
    generator, graph, noise = generated(method)
    method.generator_loss(ensemble, share, student, graph, noise).backward()
    assert all(p.grad is None for p in student.parameters())
    assert all(p.grad.any() for p in generator.parameters())
    generator.zero_grad()
    method.student_loss(
        ensemble, share, student, knn_graph(graph.x.detach(), graph.y, 3, 3)
    ).backward()
    assert all(p.grad.any() for p in student.parameters())
    assert all(p.grad is None for p in generator.parameters())
    assert not any(t.requires_grad for upload in ensemble.uploads for t in upload.values())


def test_a_client_with_reliability_zero_does_not_teach_the_class():
    (ensemble, student, _), method = scene(clients=2), FedTAD(noise=4)
    _, graph, noise = generated(method)
    only_first = torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
    alone = Ensemble(student, ensemble.uploads[:1])
    for loss, extra in ((method.student_loss, ()), (method.generator_loss, (noise,))):
        one, other = (
            loss(e, only_first[: len(e.uploads)], student, replace(graph), *extra)
            for e in (ensemble, alone)
        )
        assert torch.isclose(one, other, atol=1e-6)


def test_the_clients_logits_are_constants_in_the_disagreement():
    """Otherwise the generator could raise it by longer features, which would grow without bound."""
    of_clients, of_student = (
        torch.rand(2, 4, 3, requires_grad=True),
        torch.rand(4, 3, requires_grad=True),
    )
    disagreement(of_clients, of_student).sum().backward()
    assert of_clients.grad is None
    assert of_student.grad.any()


# ---- the whole ----
def test_without_batches_it_is_fedavg(node_federation):
    plain = run("fedavg", node_federation, model="gcn-2x8", rounds=3, finetune=2)
    bare = run("fedtad", node_federation, **{**SMALL, "batches": 0}, finetune=2)
    assert same(bare, plain)
    assert [e["accuracy"] for e in bare.history] == [e["accuracy"] for e in plain.history]
    assert not same(run("fedtad", node_federation, **SMALL, finetune=2), plain)


def test_with_one_client_it_is_fedavg(node_federation):
    alone = Federation(node_federation.graphs[:1])
    assert same(run("fedtad", alone, **SMALL), run("fedavg", alone, model="gcn-2x8", rounds=3))


def test_without_any_labels_it_is_fedavg(node_federation):
    bare = Federation(
        tuple(replace(g, train=torch.zeros_like(g.train)) for g in node_federation.graphs)
    )
    assert same(run("fedtad", bare, **SMALL), run("fedavg", bare, model="gcn-2x8", rounds=3))


def test_an_absent_class_is_never_generated(node_federation, monkeypatch):
    recorded, original = [], FedTAD.generate
    monkeypatch.setattr(
        FedTAD, "generate", lambda self, *args: recorded.append(args[-1]) or original(self, *args)
    )
    result = run(
        "fedtad",
        Federation(tuple(replace(g, num_classes=5) for g in node_federation.graphs)),
        **SMALL,
    )
    assert all(t.isfinite().all() for t in result.final_models["server"].values())
    assert len(recorded) == SMALL["rounds"] * SMALL["batches"]
    assert all(torch.bincount(y, minlength=5).tolist() == [7, 7, 6, 0, 0] for y in recorded)


def test_reliability_of_absent_classes_is_zero(node_federation, monkeypatch):
    recorded, original = {}, FedTAD.distil
    monkeypatch.setattr(
        FedTAD, "distil", lambda self, *args: recorded.update(args[-1]) or original(self, *args)
    )
    first, *others = node_federation.graphs
    run("fedtad", Federation((without_labels(first, first.y != 2), *others)), **SMALL)
    assert (recorded["0"] > 0).tolist() == [True, True, False]
    assert all((recorded[c] > 0).all() for c in ("1", "2", "3"))


def test_the_student_is_closer_to_reliable_clients_than_the_average_is():
    """On real nodes, which the server never saw, of clients that have different classes."""
    graph = synthetic(nodes=211, classes=3, features=12, degree=6.0, homophily=0.8, seed=1)
    skewed = divide(graph, 4, "dirichlet", 0, split="40/30/30", options={"alpha": 0.1})
    settings = {
        "model": "gcn-2x8",
        "dropout": 0.0,
        "rounds": 1,
        "epochs": 60,
        "noise": 8,
        "student_lr": 1e-3,
    }
    average, student = (run("fedtad", skewed, **settings, batches=batches) for batches in (0, 30))
    model = build_model("gcn-2x8", 12, 3, dropout=0.0, seed=0)
    ensemble = Ensemble(model, [average.final_models[c] for c in skewed.names])
    share = shares(
        {
            c: reliability_of(g.hide_labels(), 5, 3)
            for c, g in zip(skewed.names, skewed.graphs, strict=True)
        }
    )
    gap = {}
    for name, result in (("average", average), ("student", student)):
        with torch.no_grad():
            of_student = torch.func.functional_call(model, result.final_models["server"], (graph,))
            gap[name] = float(
                weighted_mean(share, graph.y, disagreement(ensemble.each(graph), of_student))
            )
    assert gap["student"] < 0.97 * gap["average"], gap


def test_traffic_is_that_of_fedavg_and_one_vector(node_federation):
    traffic = run("fedtad", node_federation, **SMALL).traffic
    plain = run("fedavg", node_federation, model="gcn-2x8", rounds=3).traffic
    assert (
        traffic["scalars_up"]
        == plain["scalars_up"] + node_federation.num_clients * node_federation.num_classes
    )
    assert traffic["scalars_down"] == plain["scalars_down"]
    # Once, not every round.
    assert traffic["phases"]["reliability"]["messages"] == node_federation.num_clients


def test_both_evaluations(node_federation):
    local, common = (
        run("fedtad", node_federation, **SMALL, evaluation=how) for how in ("local", "global")
    )
    assert torch.equal(weights_of(local), weights_of(common))
    assert local.summary["evaluation"] != common.summary["evaluation"]


def weights_of(result):
    return torch.cat([t.flatten() for _, t in sorted(result.final_models["server"].items())])


def test_node_tasks_only(graph_federation):
    with pytest.raises(ConfigError, match="does node tasks"):
        run("fedtad", graph_federation, **SMALL)


@pytest.mark.parametrize(
    "bad", [{"walk": 0}, {"nodes": 1}, {"batches": -1}, {"student_lr": 0.0}, {"diversity": -1.0}]
)
def test_a_bad_setting_is_refused_by_name(bad, node_federation):
    with pytest.raises(ConfigError, match=rf"method\.{next(iter(bad))} is"):
        run("fedtad", node_federation, **{**SMALL, **bad})


def test_the_generator_persists_over_rounds(node_federation, monkeypatch):
    recorded, original = [], FedTAD.distil

    def distil(self, server, *args):
        before = torch.cat(
            [p.flatten() for p in weights(server.state["generator"]).values()]
        ).clone()
        recorded.append(
            (
                before,
                original(self, server, *args),
                server.state["of_generator"].state_dict()["state"][0]["step"].item(),
            )[::2]
        )
        return weights(server.state["student"])

    monkeypatch.setattr(FedTAD, "distil", distil)
    run("fedtad", node_federation, **SMALL)
    (first, _), (second, _), (third, _) = recorded
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)
    assert [steps for _, steps in recorded] == [4, 8, 12]
