"""FedPG: topology-aware prototypes, the contrast, personal answers, and its limits.

Some limits are other methods.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import shortest_path
from tests.methods.test_fedproto import MODEL, client_of, same

from fedloom.core.message import flatten, unflatten
from fedloom.core.replies import Replies
from fedloom.data.graph import Graph
from fedloom.data.partition import divide
from fedloom.data.synthetic import synthetic
from fedloom.engines.loop import Engine as Loop
from fedloom.errors import ConfigError, MessageError
from fedloom.experiments.run import run
from fedloom.methods.fedpg.method import FedPG, _gathered
from fedloom.methods.fedpg.neighbourhoods import adjacency_of, first_of_each, shuffled_pairs
from fedloom.nn.prototypes import Neighbours, neighbour_weights

pytestmark = pytest.mark.usefixtures("reference_engine")

QUICK = {"rounds": 4, "server_lr": 0.05, "floor": 1}
OTHER = {
    "floor": 8,
    "top_peers": 1,
    "similar": 2.0,
    "most": 1,
    "nearest": 1,
    "t": 0.999,
    "band": 0.0005,
    "margin_cap": 0.0,
    "sure": 0.2,
}
NEEDS = {
    "annotate": {"sure": 0.2},
    "sure": {"annotate": "pseudo"},
    "most": {"neighbours": "any"},
    "t": {"pull": 5.0},
    "band": {"pull": 5.0, "t": 0.9999},
    "nearest": {"pull": 5.0, "t": 0.0},
}
TGP = {
    "hops": 0,
    "alpha": 1.0,
    "sampling": 0.0,
    "geometry": "euclidean",
    "direction": "query",
    "align": "item",
    "unit": False,
}
SAME_AS_TGP = {**TGP, "pull": 1.0, "margin_cap": 100.0}


def ready(federation, number=0, **settings):
    client, method = client_of(federation, number), FedPG(**settings)
    method.setup(client)
    return client, method


# ---- limits ----
def test_without_hops_peers_and_sampling_it_is_fedtgp(federation):
    settings = {"model": MODEL, "rounds": 5, "server_lr": 0.05, "floor": 1}
    ours, theirs = (
        run("fedpg", federation, **settings, **SAME_AS_TGP),
        run("fedtgp", federation, **settings),
    )
    # Sums are in another order, which Adam amplifies to 4e-6 in five rounds.
    assert same(ours, theirs, 2e-5)
    assert not same(
        run("fedpg", federation, **settings, **(SAME_AS_TGP | {"direction": "anchor"})),
        theirs,
        1e-3,
    )


def test_with_the_mean_in_place_of_anchors_it_is_fedproto(federation):
    settings = {"model": MODEL, "rounds": 5, "floor": 1}
    ours = run("fedpg", federation, **settings, **SAME_AS_TGP, universal="mean")
    assert same(ours, run("fedproto", federation, **settings), 1e-5)


def test_the_first_round_and_rounds_without_pull_are_local_training(node_federation):
    assert same(
        run("fedpg", node_federation, model=MODEL, rounds=1),
        run("local", node_federation, model=MODEL, rounds=1),
    )
    settings = {"model": MODEL, "rounds": 3}
    assert same(
        run("fedpg", node_federation, pull=0.0, **settings),
        run("local", node_federation, **settings),
        1e-5,
    )


# ---- what travels ----
def test_traffic_equals_the_formula_and_no_weight_travels(trainings):
    # Every client has every class at every hop, so the formula holds exactly. C = 7, p = 64 and
    # H = 2, as on Cora.
    graph = synthetic(nodes=900, classes=7, features=5, degree=20, homophily=0.9, seed=0)
    federation = divide(graph, 3, "random", 0, split="60/20/20")
    rounds = trainings()
    result = run("fedpg", federation, model="gcn-2x64", rounds=2)
    for _, replies in rounds:
        for reply in replies.values():
            assert set(reply) == {"prototypes", "present", "counts"}
            assert reply["prototypes"].shape == (7 * 3, 64)
            assert reply["prototypes"].numel() == 1344
    train = result.traffic["phases"]["train"]
    assert train["scalars_up"] == 2 * 3 * (1344 + 7 + 7 * 3)
    assert train["scalars_down"] == 3 * (1344 + 7 * 3)  # nothing in the first round


def test_absent_entries_are_masked_and_not_zero(node_federation, trainings):
    one_class = replace(
        node_federation.graphs[0],
        train=node_federation.graphs[0].train & (node_federation.graphs[0].y == 1),
    )
    federation = replace(
        node_federation, graphs=(one_class, *node_federation.graphs[1:]), whole=None
    )
    rounds = trainings()
    run("fedpg", federation, model=MODEL, rounds=3, floor=1)
    for sent, replies in rounds:
        first = replies[federation.names[0]]
        assert first["present"].nonzero()[:, 0].unique().tolist() == [1]
        assert len(first["prototypes"]) == int(first["present"].sum()) > 1
        assert first["counts"][[0, 2]].tolist() == [0, 0]
        for reply in replies.values():
            assert (reply["prototypes"].norm(dim=1) > 0).all()
        for message in sent.values():
            if message:
                # They are convex combinations of means of unit vectors.
                assert message["prototypes"].norm(dim=1).max() <= 1 + 1e-5


def test_the_floor_counts_the_different_items_in_a_prototype(node_federation):
    # Node 0 is the only neighbour of 1 ... 4. One hop away from these four centres is one node, and
    # the prototype would be its embedding.
    star = torch.tensor([[0, 0, 0, 0, 1, 2, 3, 4], [1, 2, 3, 4, 0, 0, 0, 0]])
    every = torch.ones(5, dtype=torch.bool)
    graph = Graph(torch.randn(5, 12), star, torch.tensor([0, 0, 0, 0, 0]), 3, train=every)
    for floor, expected in (
        (1, [True, True, True]),
        (2, [True, True, True]),
        (5, [True, True, False]),
        (6, [False] * 3),
    ):
        client, method = ready(replace(node_federation, graphs=(graph,)), floor=floor)
        assert method.train(client)["present"][0].tolist() == expected
    lone = replace(graph, y=torch.tensor([1, 0, 0, 0, 0]))
    client, method = ready(replace(node_federation, graphs=(lone,)), floor=2, neighbours="any")
    # Class 0: four centres, whose only neighbour is node 0, and which are two hops apart.
    # Class 1: one centre with four neighbours.
    assert method.train(client)["present"].tolist() == [
        [True, False, True],
        [False, True, False],
        [False] * 3,
    ]


# ---- local prototypes ----
def by_hand(graph, z, hops, same_class=True):
    distance = shortest_path(adjacency_of(graph), unweighted=True, directed=False)
    np.fill_diagonal(distance, 0)
    table, present = (
        torch.zeros(graph.num_classes, hops + 1, z.shape[1]),
        torch.zeros(graph.num_classes, hops + 1, dtype=torch.bool),
    )
    for c in range(graph.num_classes):
        for h in range(hops + 1):
            means = []
            for i in (graph.y == c).nonzero().flatten().tolist():
                members = [
                    j for j in np.flatnonzero(distance[i] == h) if not same_class or graph.y[j] == c
                ]
                if members:
                    means.append(z[members].mean(0))
            if means:
                table[c, h], present[c, h] = torch.stack(means).mean(0), True
    return table, present


@pytest.mark.parametrize("neighbours", ["same", "any"])
def test_prototypes_are_means_of_neighbour_means(node_federation, neighbours):
    client, method = ready(node_federation, hops=3, neighbours=neighbours, most=1000)
    z = method.embeddings(client)
    expected, there = by_hand(client.graph, z, 3, neighbours == "same")
    for attention in (True, False):  # it starts at 0, which gives all neighbours the same weight
        plain = replace(method, attention=attention)
        around = plain.neighbourhoods(client, client.graph, z)
        table = plain.prototypes(client, z, around)
        assert torch.equal(around.present, there)
        assert torch.allclose(table[there], expected[there], atol=1e-5)


def test_attention_is_a_softmax_over_the_members_of_each_centre(node_federation):
    client, method = ready(node_federation, hops=1, neighbours="any")
    z = method.embeddings(client)
    around = method.neighbourhoods(client, client.graph, z).hops[0]
    vectors = torch.nn.init.normal_(
        client.state["attention"].vectors.detach()[0], generator=torch.Generator().manual_seed(0)
    )
    w = neighbour_weights(method.attention_of(client), 1, z, around)
    assert torch.allclose(around.over_members(w)[around.centres], torch.ones(len(around.centres)))
    i = int(around.centres[3])
    mine = around.centre == i
    members = around.member[mine]
    scores = [
        F.leaky_relu(torch.cat([z[i], z[j], z[members].mean(0)]) @ vectors.flatten(), 0.2)
        for j in members
    ]
    assert torch.allclose(w[mine], torch.stack(scores).softmax(0), atol=1e-6)


def test_every_hop_has_its_own_attention(node_federation):
    client, method = ready(node_federation, neighbours="any")
    z = method.embeddings(client)
    first, second = method.neighbourhoods(client, client.graph, z).hops
    torch.nn.init.normal_(
        client.state["attention"].vectors.detach()[1], generator=torch.Generator().manual_seed(0)
    )
    attention = method.attention_of(client)
    assert torch.allclose(neighbour_weights(attention, 1, z, first), 1 / first.size)
    assert not torch.allclose(neighbour_weights(attention, 2, z, second), 1 / second.size)


def test_universal_prototypes_have_length_one(node_federation, trainings):
    rounds = trainings()
    run("fedpg", node_federation, model=MODEL, rounds=3, alpha=1.0)
    lengths = torch.cat(
        [m["prototypes"].norm(dim=1) for sent, _ in rounds for m in sent.values() if m]
    )
    assert len(lengths)
    assert torch.allclose(lengths, torch.ones_like(lengths), atol=1e-5)


def test_results_do_not_depend_on_the_order_of_nodes(node_federation):
    graph = node_federation.graphs[0]
    order = torch.randperm(graph.num_nodes, generator=torch.Generator().manual_seed(0))
    shuffled = graph.subgraph(order)
    assert not torch.equal(shuffled.x, graph.x)
    replies = []
    for version in (graph, shuffled):
        client, method = ready(replace(node_federation, graphs=(version,)))
        torch.nn.init.normal_(
            client.state["attention"].vectors.detach(), generator=torch.Generator().manual_seed(0)
        )
        replies.append(method.train(client))
    assert torch.equal(replies[0]["present"], replies[1]["present"])
    assert torch.equal(replies[0]["counts"], replies[1]["counts"])
    assert torch.allclose(replies[0]["prototypes"], replies[1]["prototypes"], atol=1e-4)


def test_at_most_the_given_number_of_members_is_drawn():
    apart = csr_matrix((np.ones(53), ([0] * 50 + [1] * 3, range(53))))
    starts, drawn = torch.tensor([7, 9]), set()
    for seed in range(40):
        centre, member = first_of_each(5, *shuffled_pairs(starts, apart, seed))
        assert torch.bincount(centre)[starts].tolist() == [5, 3]
        assert {50, 51, 52} == set(member[centre == 9].tolist())
        drawn |= set(member[centre == 7].tolist())
    assert len(drawn) > 40
    assert drawn <= set(range(50))


def test_pseudo_labels_are_predictions_and_not_held_out_labels(node_federation):
    client, method = ready(node_federation, annotate="pseudo", sure=0.6)
    method.train(client)
    graph, found = client.full_graph, client.state["annotation"]
    assert torch.equal(found[graph.train], graph.y[graph.train])
    probability, guess = client.state["model"](client.graph).softmax(1).max(1)
    outside = ~graph.train
    assert torch.equal(found[outside], torch.where(probability >= 0.6, guess, -1)[outside])
    assert (found[outside] >= 0).any()


def test_neighbours_of_graphs_are_the_nearest_within_a_band_of_cosines(node_federation):
    angles = torch.tensor([0.0, 10, 20, 30, 40, 90]) * math.pi / 180
    z = torch.stack([angles.cos(), angles.sin()], 1)
    label = torch.tensor([0, 0, 0, 0, 1, -1])
    method = FedPG(
        t=math.cos(15 * math.pi / 180),
        band=math.cos(15 * math.pi / 180) - math.cos(25 * math.pi / 180),
        nearest=10,
    )
    one, two = (
        {(int(i), int(j)) for i, j in zip(at.centre, at.member, strict=True)}
        for at in method.by_similarity(label, z, 2)
    )
    assert one == {(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2)}
    assert two == {(0, 2), (2, 0), (1, 3), (3, 1)}
    (one, _) = replace(method, nearest=1, t=0.0, neighbours="any").by_similarity(label, z, 2)
    # An item without a class is no centre but may be a member.
    assert torch.bincount(one.centre).tolist() == [1] * 5


# ---- alignment ----
def test_the_alignment_is_the_sum_of_distances_between_prototypes(node_federation):
    # With "same", a centre may have one neighbour, whose weight is always 1.
    client, method = ready(node_federation, pull=0.3, neighbours="any")
    model, graph = client.state["model"], client.graph
    z = F.normalize(model.embed(graph))
    around = method.neighbourhoods(client, graph, z)
    own = method.prototypes(client, z, around)
    table, present = torch.randn(3, 3, 8), around.present.clone()
    present[1, 2] = False
    expected = client.loss(model(graph), graph) + 0.3 * sum(
        (own - table)[c, h].norm() for c, h in present.nonzero().tolist()
    )
    found = method.objective(client, graph, model, {"table": table, "present": present})
    assert torch.isclose(found, expected, atol=1e-5)
    found.backward()
    assert client.state["attention"].vectors.grad.abs().sum() > 0
    assert all(p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize("align", ["prototype", "item"])
def test_the_alignment_has_gradients_for_the_extractor_and_the_attention_at_every_hop(
    federation, align
):
    client, method = ready(federation, align=align, t=0.0, band=0.5, neighbours="any")
    batch = client.batches(0)[0]
    table, present = (
        torch.randn(batch.num_classes, 3, 8),
        torch.ones(batch.num_classes, 3, dtype=torch.bool),
    )
    z = method.scaled(client.state["model"].embed(batch))
    # Cosines of graphs are all near 1. This puts half of them at each hop.
    between = (z @ z.T)[~torch.eye(len(z), dtype=torch.bool)].median().item()
    method = replace(method, t=min(between, 1.0), band=2.0)
    method.alignment(client, batch, z, table, present).backward()
    assert any(
        p.grad is not None and p.grad.abs().sum() > 0
        for p in client.state["model"].layers.parameters()
    )
    assert (client.state["attention"].vectors.grad.abs().sum((1, 2)) > 0).all()


# ---- the server's side ----
def uploads_of(*rows):
    """Returns replies with the given (client, class, hop, vector) rows.

    There are two classes and two hops. The client's name is its number of centres.
    """
    clients: dict = {}
    for client, c, h, vector in rows:
        clients.setdefault(client, {})[(c, h)] = torch.tensor(vector, dtype=torch.float)
    replies = {}
    for client, held in sorted(clients.items()):
        present, counts = torch.zeros(2, 2, dtype=torch.bool), torch.zeros(2, dtype=torch.int64)
        for c, h in held:
            present[c, h], counts[c] = True, int(client)
        replies[client] = {
            "prototypes": torch.stack([held[tuple(at)] for at in present.nonzero().tolist()]),
            "present": present,
            "counts": counts,
        }
    return Replies(replies)


ROWS = (
    ("1", 0, 0, [1, 0]),
    ("1", 0, 1, [0, 1]),
    ("3", 0, 0, [0.8, 0.6]),
    ("3", 1, 0, [0, -1]),
    ("3", 1, 1, [-1, 0]),
)


def test_the_contrast_by_hand():
    uploads, at, counts = _gathered(uploads_of(*ROWS))
    assert counts.tolist() == [1, 1, 3, 3, 3]
    method = FedPG(hops=1, sampling=0.0, temperature=0.7)
    positive = method.receptive_field(at, torch.rand(len(at), 2), 2)
    anchors, margin = (
        torch.randn(2, 2, 2, generator=torch.Generator().manual_seed(0)),
        torch.tensor([0.2, 0.4]),
    )
    expected = 0.0
    for c in range(2):
        for h in range(2):
            cosine = F.cosine_similarity(anchors[c, h], uploads)
            true = sum(
                math.exp((cosine[k] - margin[h]) / 0.7)
                for k in range(5)
                if at[k].tolist() == [c, h]
            )
            false = sum(math.exp(cosine[k] / 0.7) for k in range(5) if at[k].tolist() == [1 - c, h])
            expected -= math.log(true / (true + false))
    # A constant shift of all distances changes nothing, so 1 − cosine gives the same loss.
    assert method.contrast_anchors(uploads, positive, margin)(anchors).item() == pytest.approx(
        expected, abs=1e-5
    )


def test_an_anchor_without_negatives_has_no_loss_and_a_finite_gradient():
    uploads, at, _ = _gathered(uploads_of(*ROWS[:2]))
    anchors = torch.randn(2, 2, 2, requires_grad=True)
    method = FedPG(hops=1)
    loss = method.contrast_anchors(
        uploads, method.receptive_field(at, torch.rand(len(at), 2), 2), torch.zeros(2)
    )(anchors)
    loss.backward()
    assert loss.item() == 0
    assert torch.isfinite(anchors.grad).all()


def test_the_gradient_to_the_positive_similarity_grows_with_the_margin():
    uploads, at, _ = _gathered(uploads_of(*ROWS))
    method = FedPG(hops=1, sampling=0.0)
    positive = method.receptive_field(at, torch.rand(len(at), 2), 2)
    strength = []
    for margin in (0.0, 0.5, 1.0):
        anchors = torch.tensor([[[1.0, 1], [1, 1]], [[1, -1], [-1, 1]]], requires_grad=True)
        method.contrast_anchors(uploads, positive, torch.full((2,), margin))(anchors).backward()
        strength.append(anchors.grad.norm().item())
    assert strength == sorted(strength)
    assert strength[0] < strength[2]


def test_the_receptive_field_adds_uploads_of_the_class_from_other_hops():
    at = torch.tensor([[0, 0]] * 4 + [[0, 1]] * 6 + [[1, 0]] * 2)
    lots = torch.rand(len(at), 2, generator=torch.Generator().manual_seed(0))
    for sampling, expected in ((0.0, 4), (0.25, 5), (0.3, 6), (1.0, 8)):
        positive = FedPG(hops=1, sampling=sampling).receptive_field(at, lots, 2)
        assert int(positive[0, 0].sum()) == expected
        assert not positive[0, 0, 10:].any()  # another class
        assert positive[0, 0, :4].all()
        assert int(positive[0, 1].sum()) == 6 + min(4, math.ceil(6 * sampling))  # there are only 4
        assert not positive[1, 1].any()  # no client sent it
        assert int(positive[1, 0].sum()) == 2


def test_answers_mix_the_universal_prototype_with_those_of_peers():
    replies, universal = uploads_of(*ROWS), torch.full((2, 2, 2), 0.5)
    method = FedPG(hops=1, alpha=0.25, similar=0.7)
    answers = method.personal(universal, replies)
    assert torch.equal(answers["1"]["present"], replies["1"]["present"])
    mean = (1 * torch.tensor([1.0, 0]) + 3 * torch.tensor([0.8, 0.6])) / 4  # their cosine is 0.8
    assert torch.allclose(answers["1"]["prototypes"][0], 0.25 * universal[0, 0] + 0.75 * mean)
    assert torch.allclose(answers["3"]["prototypes"][0], 0.25 * universal[0, 0] + 0.75 * mean)
    assert torch.allclose(
        answers["3"]["prototypes"][1], 0.25 * universal[1, 0] + 0.75 * torch.tensor([0.0, -1])
    )
    alone = replace(method, similar=1.1).personal(universal, replies)
    assert torch.allclose(
        alone["1"]["prototypes"][0], 0.25 * universal[0, 0] + 0.75 * torch.tensor([1.0, 0])
    )
    by_rank = replace(method, similar=1.1, top_peers=1).personal(universal, replies)
    assert torch.allclose(by_rank["1"]["prototypes"][0], answers["1"]["prototypes"][0])
    common = replace(method, alpha=1.0).personal(universal, replies)
    assert all((answer["prototypes"] == 0.5).all() for answer in common.values())


def test_noise_reaches_a_share_of_the_coordinates_of_every_prototype(node_federation):
    client, method = ready(node_federation, noise=0.25)
    table = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(0))
    first, again = method.disturbed(client, table), method.disturbed(client, table)
    assert ((first != table).sum(-1) == 2).all()
    assert not torch.equal(first, again)
    many = torch.cat([(method.disturbed(client, table) - table)[0, 0] for _ in range(2000)])
    assert many[many != 0].std().item() == pytest.approx(table[0, 0].std().item(), rel=0.1)
    assert FedPG().disturbed(client, table) is table


# ---- bad input ----
def test_a_prototype_with_nan_is_refused_by_name(node_federation, monkeypatch):
    original = Loop.call

    def call(self, phase, sent):
        replies = original(self, phase, sent)
        if phase == "train":
            first = flatten(next(iter(replies.values())))
            first["prototypes"][0, 0] = float("nan")
            return {**replies, next(iter(replies)): unflatten(first)}
        return replies

    monkeypatch.setattr(Loop, "call", call)
    with pytest.raises(MessageError, match="tensor 'prototypes' holds nan"):
        run("fedpg", node_federation, model=MODEL, rounds=2)


def test_a_reply_with_more_vectors_than_entries_is_refused(node_federation, monkeypatch):
    original = Loop.call

    def call(self, phase, sent):
        replies = original(self, phase, sent)
        if phase == "train":
            first = next(iter(replies))
            replies[first]["prototypes"] = torch.cat(
                [replies[first]["prototypes"], torch.ones(1, 8)]
            )
        return replies

    monkeypatch.setattr(Loop, "call", call)
    with pytest.raises(MessageError, match="tensor 'prototypes' has shape"):
        run("fedpg", node_federation, model=MODEL, rounds=2)


def test_different_widths_are_refused_and_different_architectures_are_not(node_federation):
    with pytest.raises(ConfigError, match="share one embedding width"):
        run("fedpg", node_federation, model="gcn-2x8,gcn-2x16", rounds=1)
    five = "gcn-2x8,gin-2x8,sage-2x8,sgc-2x8,gcnii-2x8"
    assert run("fedpg", node_federation, model=five, rounds=2).summary["status"] == "completed"


def test_a_single_client_and_a_class_without_items_are_allowed(federation):
    graphs = tuple(replace(g, num_classes=5) for g in federation.graphs[:1])
    alone = replace(federation, graphs=graphs, names=federation.names[:1], whole=None)
    assert run("fedpg", alone, model=MODEL, rounds=3).summary["status"] == "completed"


def test_without_labels_no_prototype_travels(node_federation, trainings):
    bare = tuple(replace(g, train=torch.zeros_like(g.train)) for g in node_federation.graphs)
    rounds = trainings()
    result = run("fedpg", replace(node_federation, graphs=bare, whole=None), model=MODEL, rounds=3)
    assert all(len(reply["prototypes"]) == 0 for _, replies in rounds for reply in replies.values())
    assert result.summary["status"] == "completed"


def test_neighbours_count_members_and_centres_of_each_class():
    around = Neighbours(
        torch.tensor([0, 0, 1, 3]), torch.tensor([1, 2, 2, 0]), torch.tensor([0, 0, 1, 1]), 3
    )
    assert around.num_centres.tolist() == [2, 1, 0]
    assert around.num_members.tolist() == [2, 1, 0]
    assert around.size.tolist() == [2, 2, 1, 1]
