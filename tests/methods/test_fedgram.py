"""FedGram: equality with pooled ridge regression, its limits, and its exact traffic."""

from dataclasses import replace

import pytest
import torch
from sklearn.linear_model import Ridge

from fedloom.commands import _as_baseline
from fedloom.core.client import Client
from fedloom.core.facts import Facts, SecureTerms
from fedloom.data.federation import Federation
from fedloom.data.graph import Graph
from fedloom.data.partition import divide
from fedloom.data.synthetic import synthetic
from fedloom.engines.loop import Engine as Loop
from fedloom.errors import ConfigError, DataError
from fedloom.experiments.run import run
from fedloom.methods.fedgram import FedGram
from fedloom.methods.fedgram.features import signs, smoothed, start
from fedloom.methods.fedgram.noise import gaussian_scale
from fedloom.methods.fedgram.ridge import (
    corrections,
    generalised_error,
    packed,
    unpacked,
    weights_of,
)
from fedloom.methods.fedgram.structure import labels_around
from fedloom.privacy.choice import responder_for

QUICK = {"rounds": 1, "width": 8, "sketch": 4, "hops": "1,2,side"}
OTHER = {
    "hops": "2,3",
    "ridges": "2",
    "personal": "",
    "colors": 1,
    "join": "1",
    "leave": "2",
    "caution": 0.0,
    "epsilon": 4.0,
    "delta": 1e-3,
}
PRIVATE = {"secure": True, "hops": "1"}
NEEDS = {
    "personal": {"caution": 0.0},
    "epsilon": PRIVATE,
    "delta": {**PRIVATE, "epsilon": 8.0},
    "protects": {**PRIVATE, "epsilon": 8.0},
    "private_hops": {**PRIVATE, "epsilon": 8.0},
    "degree": {**PRIVATE, "epsilon": 8.0, "private_hops": 1},
}
DRAWS_NOTHING = ("graph",)  # tasks without random numbers: the features are hashed by constants
# One map and one λ, so that nothing is chosen.
PLAIN = {"hops": "2", "ridges": "0.5", "personal": "", "engine": "loop"}


def go(federation, **settings):
    return run("fedgram", federation, **{**PLAIN, **settings})


def pooled(federation, method, seed=0):
    """F and Y of all clients' training items."""
    rows = []
    for name, graph in zip(federation.names, federation.graphs, strict=True):
        rows.append(method.training_rows(client_of(federation, name, graph, seed), 0, method.width))
    return (torch.cat(part) for part in zip(*rows, strict=True))


def client_of(federation, name, graph, seed=0):
    facts = Facts(
        graph.num_features, graph.num_classes, graph.task, (name,), ("gcn-2x8",), seed=seed
    )
    return Client(name, graph, facts)


def weights_in(result, owner="server"):
    return result.final_models[owner]["weights"]


def ridge(F, Y, penalty, weight=None):
    """scikit-learn's ridge regression. F has its constant column already."""
    found = Ridge(alpha=penalty, fit_intercept=False, solver="cholesky", tol=1e-12)
    fitted = found.fit(F.double().numpy(), Y.double().numpy(), sample_weight=weight)
    return torch.from_numpy(fitted.coef_.T).float()


def settings_of(federation, **changed):
    return FedGram(**{k: v for k, v in {**PLAIN, **changed}.items() if k != "engine"})


# ---- equality with pooled ridge regression ----
@pytest.mark.parametrize("labels", [0.0, 0.2])
def test_it_equals_scikit_learns_ridge_on_the_pooled_rows(node_federation, labels):
    F, Y = pooled(node_federation, settings_of(node_federation, labels=labels))
    result = go(node_federation, labels=labels)
    assert torch.allclose(weights_in(result), ridge(F, Y, 0.5), atol=1e-4)


def test_graph_tasks_equal_pooled_ridge_regression_too(graph_federation):
    method = settings_of(graph_federation, width=64)
    F, Y = pooled(graph_federation, method)
    result = go(graph_federation, width=64)
    assert torch.allclose(weights_in(result), ridge(F, Y, 0.5), atol=1e-4)


def test_class_weights_are_sample_weights(node_federation):
    F, Y = pooled(node_federation, settings_of(node_federation))
    weight = torch.tensor([1.0, 4.0, 9.0])[Y.argmax(1)].numpy()
    result = go(node_federation, class_weight="1,4,9")
    assert torch.allclose(weights_in(result), ridge(F, Y, 0.5, weight), atol=1e-4)


def test_balance_weighs_rows_by_a_power_of_the_inverse_class_frequency(node_federation):
    F, Y = pooled(node_federation, settings_of(node_federation))
    count = Y.sum(0)
    weight = (count.sum() / (3 * count)).sqrt()[Y.argmax(1)].numpy()
    result = go(node_federation, balance=0.5)
    assert torch.allclose(weights_in(result), ridge(F, Y, 0.5, weight), atol=1e-4)


def disjoint(one, other):
    """Two graphs as one, without edges between them."""
    parts = {key: torch.cat([getattr(one, key), getattr(other, key)]) for key in ("x", "y")}
    masks = {
        key: torch.cat([getattr(one, key), getattr(other, key)]) for key in ("train", "val", "test")
    }
    edges = torch.cat([one.edge_index, other.edge_index + one.num_nodes], 1)
    return Graph(**parts, edge_index=edges, num_classes=one.num_classes, **masks)


def test_order_and_number_of_clients_change_only_the_rounding(node_federation):
    a, b, c, d = node_federation.graphs
    orders = ((a, b, c, d), (d, b, a, c), (disjoint(a, c), d, b), (disjoint(disjoint(b, a), d), c))
    found = [weights_in(go(Federation(graphs))) for graphs in orders]
    for other in found[1:]:
        assert torch.allclose(found[0], other, atol=1e-5)


def test_one_client_has_its_own_ridge_regression(node_federation):
    alone = Federation(node_federation.graphs[:1])
    F, Y = pooled(alone, settings_of(alone))
    assert torch.allclose(weights_in(go(alone)), ridge(F, Y, 0.5), atol=1e-4)


def test_a_secure_run_gives_the_same_weights(node_federation):
    plain, secure = (go(node_federation, hops="1,2", secure=on) for on in (False, True))
    assert torch.allclose(weights_in(plain), weights_in(secure), atol=1e-5)
    assert plain.summary["notes"] == secure.summary["notes"]


def test_a_client_that_drops_out_equals_the_run_without_it(node_federation, monkeypatch):
    original, absent = Loop.call, node_federation.names[1]

    def call(self, phase, sent):
        replies = original(self, phase, sent)
        return {c: r for c, r in replies.items() if phase != "send_moments" or c != absent}

    others = [k for k, name in enumerate(node_federation.names) if name != absent]
    rest = Federation(
        tuple(node_federation.graphs[k] for k in others),
        names=tuple(node_federation.names[k] for k in others),
    )
    without = go(rest)
    monkeypatch.setattr(Loop, "call", call)
    assert torch.allclose(weights_in(go(node_federation)), weights_in(without), atol=1e-6)


# ---- unlearning and late joining ----
def without(federation, *gone):
    kept = [k for k, name in enumerate(federation.names) if name not in gone]
    return Federation(
        tuple(federation.graphs[k] for k in kept), names=tuple(federation.names[k] for k in kept)
    )


@pytest.fixture(scope="module")
def eight():
    """Eight clients: a secure sum needs more than two thirds of them."""
    graph = synthetic(nodes=300, classes=3, features=12, degree=6.0, homophily=0.8, seed=1)
    return divide(graph, 8, "random", 0, split="40/30/30")


@pytest.mark.parametrize("secure", [False, True])
def test_clients_that_leave_are_forgotten_exactly(eight, secure):
    left = go(eight, leave="0,2", secure=secure, secure_cohort=0.5)
    never = go(without(eight, "0", "2"))
    assert torch.allclose(weights_in(left), weights_in(never), atol=1e-5)
    before = [entry for entry in left.history if entry.get("stage") == "before"]
    assert len(before) == 1
    # The control: with them the weights are others.
    assert not torch.allclose(weights_in(go(eight)), weights_in(never), atol=1e-2)


@pytest.mark.parametrize("secure", [False, True])
def test_clients_that_join_late_count_as_if_they_had_been_there(eight, secure):
    joined = go(eight, join="1,3", secure=secure, secure_cohort=0.5)
    assert torch.allclose(weights_in(joined), weights_in(go(eight)), atol=1e-5)
    if not secure:  # only their own statistics travelled again
        assert joined.traffic["phases"]["send_moments"]["messages"] == 2 * 8


def test_a_client_may_replace_another(node_federation):
    swapped = go(node_federation, join="1", leave="2")
    assert torch.allclose(
        weights_in(swapped), weights_in(go(without(node_federation, "2"))), atol=1e-5
    )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"leave": "7"}, r"unknown client in method\.leave: '7'.*Valid: 0, 1, 2, 3"),
        ({"join": "0,1", "leave": "2,3"}, "name all clients"),
        ({"leave": "1", "secure": True}, r"run\.secure: method\.leave names one client"),
        ({"leave": "1,2", "secure": True}, r"run\.secure_cohort: 4 of 4 clients .* at most 0\.5"),
        (
            {"leave": "1,2", "secure": True, "secure_apart": 3},
            r"run\.secure_apart is 3, but method\.leave names 2 clients",
        ),
        ({"hops": "two"}, r"method\.hops is 'two', must be different whole .* or 'side'"),
        ({"hops": "2,2"}, r"method\.hops is '2,2', must be different"),
        ({"hops": ""}, r"method\.hops is '', must be different whole numbers"),
        ({"ridges": "0"}, r"method\.ridges is '0', must be numbers above 0"),
        ({"ridges": "inf"}, r"method\.ridges is 'inf', must be numbers above 0"),
        ({"personal": "1,x"}, r"method\.personal is '1,x', must be .* or empty"),
    ],
)
def test_wrong_settings_are_named(node_federation, settings, said):
    with pytest.raises(ConfigError, match=said):
        go(node_federation, **settings)


# ---- the personal part ----
def test_the_correction_is_ridge_regression_on_the_residual():
    rng = torch.Generator().manual_seed(0)
    rows, R = torch.randn(9, 30, generator=rng), torch.randn(9, 4, generator=rng)
    for penalty, found in zip((0.1, 2.0), corrections(rows, R, (0.1, 2.0)), strict=True):
        assert torch.allclose(found, ridge(rows, R, penalty), atol=1e-4)


def test_an_infinite_penalty_is_the_global_model(node_federation):
    none, huge = go(node_federation), go(node_federation, personal="1e12")
    for name in node_federation.names:
        shared = weights_in(none)
        assert torch.equal(weights_in(none, name), shared)
        assert torch.allclose(weights_in(huge, name), shared, atol=1e-6)


def two_groups(flipped):
    """A client whose training labels, and validation labels, are those of the others or flipped."""
    rng = torch.Generator().manual_seed(4)
    y = torch.arange(80) % 2
    x = torch.nn.functional.one_hot(y, 2).float() + 0.1 * torch.rand(80, 2, generator=rng)
    part = torch.arange(80) // 2 % 4
    return Graph(
        x,
        torch.zeros(2, 0, dtype=torch.int64),
        1 - y if flipped else y,
        2,
        train=part == 0,
        val=part == 1,
        test=part > 1,
    ).check()


def test_a_client_unlike_the_others_keeps_its_own_weights():
    federation = Federation(tuple(two_groups(k == 3) for k in range(4)))
    shared = go(federation, evaluation="global")
    own = go(federation, personal="0.1,1")
    assert [row["accuracy"] for row in shared.per_client] == [1, 1, 1, 0]
    assert [row["accuracy"] for row in own.per_client] == [1, 1, 1, 1]
    for name in "012":  # nothing to gain: they keep W itself
        assert torch.equal(weights_in(own, name), weights_in(own))


def test_the_personal_part_needs_a_gain_of_more_than_one_standard_error():
    method, graph = FedGram(personal="1", labels=0.0), two_groups(False)
    client = client_of(Federation((graph,)), "0", graph)
    W = torch.zeros(3, 2)
    W[0, 0] = W[1, 1] = 1.0
    worse = W.clone()
    worse[2, 1] = 10.0  # always predicts class 1
    assert torch.equal(method.chosen(client, worse, W[None], 0), W)
    assert torch.equal(method.chosen(client, W, worse[None], 0), W)
    assert torch.equal(method.chosen(client, W, 2 * W[None], 0), W)  # equally good
    eager = FedGram(personal="1", labels=0.0, caution=0.0)
    assert torch.equal(eager.chosen(client, W, 2 * W[None], 0), 2 * W)
    assert torch.equal(eager.chosen(client, W, worse[None], 0), W)


# ---- the choice ----
def test_equal_candidates_are_all_best():
    right, wrong = torch.tensor([[3, 0], [0, 3]]), torch.tensor([[3, 0], [1, 2]])
    method = FedGram(hops="1,2")
    confusion = {"0": torch.stack([wrong, right]), "1": torch.stack([right, wrong])}
    assert method.best(confusion, "accuracy") == [("0", 1), ("1", 0)]
    confusion["0"][1] = wrong
    assert method.best(confusion, "auc") == [("1", 0)]  # accuracy in its place


def test_maps_side_by_side_must_be_better_by_a_standard_error():
    # Of 100 items, 84 are right: one standard error is 4 items.
    def matrix(right):
        return torch.tensor([[[right, 100 - right], [0, 0]]])

    method = FedGram(hops="2,side")
    assert method.best({"0": matrix(84), "1": matrix(88)}, "accuracy") == [("0", 0)]
    assert method.best({"0": matrix(84), "1": matrix(89)}, "accuracy") == [("1", 0)]
    assert FedGram(hops="side").best({"0": matrix(5)}, "accuracy") == [("0", 0)]


def test_generalised_cross_validation_from_sums_is_that_of_the_rows():
    rng = torch.Generator().manual_seed(1)
    F = torch.cat([torch.randn(40, 6, generator=rng), torch.ones(40, 1)], 1).double()
    Y = torch.nn.functional.one_hot(torch.randint(0, 3, (40,), generator=rng), 3).double()
    G, B = F.T @ F, F.T @ Y
    W = weights_of(G, B, (0.7,))[0]
    hat = F @ torch.linalg.inv(G + 0.7 * torch.eye(7)) @ F.T
    expected = (Y - hat @ Y).square().sum() / 40 / (1 - hat.trace() / 40) ** 2
    assert generalised_error(G, B, W, 0.7) == pytest.approx(float(expected), rel=1e-4)


def test_ties_are_broken_by_generalised_cross_validation():
    """Without validation items all candidates are equal."""
    rng = torch.Generator().manual_seed(0)
    x, noise = torch.randn(200, 5, generator=rng), torch.randn(200, generator=rng)
    y = (x[:, 0] + 0.3 * noise > 0).long()
    half = torch.arange(200) < 100
    graph = Graph(x, torch.zeros(2, 0, dtype=torch.int64), y, 2, train=half, test=~half)
    chosen = go(Federation((graph,)), ridges="0.001,1,100000").summary["notes"]["ridge"]
    assert chosen in (0.001, 1.0)  # 100,000 shrinks everything to 0


def test_the_metric_of_the_run_chooses():
    # Accuracy prefers the larger class, macro-F1 does not.
    of_larger = torch.tensor([[90, 0], [10, 0]])
    of_both = torch.tensor([[80, 10], [1, 9]])
    confusion = {"0": torch.stack([of_larger, of_both])}
    assert FedGram().best(confusion, "accuracy") == [("0", 0)]
    assert FedGram().best(confusion, "f1_macro") == [("0", 1)]


def test_several_maps_are_compared_on_a_sketch(node_federation):
    """Too few hops lose on a graph whose features are noise and whose neighbours agree."""
    graph = synthetic(nodes=600, classes=3, features=40, degree=10.0, homophily=0.95, seed=3)
    federation = divide(graph, 3, "random", 0, split="40/30/30")
    result = go(federation, hops="0,3", labels=0.0, sketch=10)
    assert result.summary["notes"]["map"] == 1
    phases = result.traffic["phases"]
    assert phases["send_moments"]["messages"] == 2 * 2 * 3
    narrow = go(federation, hops="3", labels=0.0)
    assert torch.equal(weights_in(result), weights_in(narrow))


def test_what_the_sketch_has_in_full_is_not_sent_again(node_federation):
    d = node_federation.num_features
    narrow, wide = (go(node_federation, hops="1,2", sketch=n) for n in (d, d - 1))
    assert narrow.traffic["phases"]["send_moments"]["messages"] == 2 * 4
    assert wide.traffic["phases"]["send_moments"]["messages"] == 2 * 2 * 4
    one = go(node_federation, hops=str(1 + int(narrow.summary["notes"]["map"])))
    assert torch.equal(weights_in(narrow), weights_in(one))


# ---- features ----
def test_a_node_sees_the_labels_of_others_and_not_its_own():
    graph = synthetic(nodes=40, classes=3, features=5, degree=4.0, seed=2)
    keep = torch.rand(graph.num_edges, generator=torch.Generator().manual_seed(0)) < 0.7
    graph = replace(
        graph, edge_index=graph.edge_index[:, keep], train=torch.arange(40) % 2 == 0
    ).hide_labels()
    P = graph.adjacency("mean").dense()
    Y = torch.zeros(40, 3)
    Y[graph.train, graph.y[graph.train]] = 1
    twice = P @ P
    expected = torch.cat([P @ Y, (twice - twice.diagonal().diag()) @ Y], 1)
    found = labels_around(graph)
    assert torch.allclose(found, expected, atol=1e-6)
    for node in (0, 2, 4):  # the columns of a training node do not depend on its own label
        changed = graph.y.clone()
        changed[node] = (changed[node] + 1) % 3
        other = labels_around(replace(graph, y=changed))
        assert torch.allclose(other[node], found[node], atol=1e-6)
        assert not torch.allclose(other, found)


def test_hops_are_the_powers_of_the_normalised_adjacency():
    graph = synthetic(nodes=30, classes=2, features=7, seed=5)
    S, H = graph.adjacency("sym").dense(), torch.nn.functional.normalize(graph.x)
    for hops in (3, 0, 1, 5, 2):  # in any order: some continue from others
        total = sum(torch.linalg.matrix_power(S, k) @ H for k in range(hops + 1))
        expected = torch.nn.functional.normalize(total)
        assert torch.allclose(smoothed(graph, 100, 0, hops), expected, atol=1e-5)


def test_wide_features_are_projected_by_signs_that_all_parties_share():
    graph = synthetic(nodes=30, classes=2, features=64, seed=5)
    R = signs(3, 64, 16)
    assert torch.equal(R.abs(), torch.full((64, 16), 0.25))
    assert abs(R.sum()) < 40
    assert torch.equal(R, signs(3, 64, 16))
    assert not torch.equal(R, signs(4, 64, 16))
    expected = torch.nn.functional.normalize(graph.x) @ R
    assert torch.allclose(start(graph, 16, 3), expected, atol=1e-5)
    assert start(graph, 64, 3).shape == (30, 64)


def test_a_packed_triangle_is_unpacked():
    A = torch.arange(9.0).view(3, 3)
    A = A + A.T
    assert packed(A).tolist() == [0, 4, 8, 8, 12, 16]
    assert torch.equal(unpacked(packed(A), 3), A)
    W = weights_of(A + 30 * torch.eye(3), torch.ones(3, 2), (1.0,))
    assert torch.allclose((A + 31 * torch.eye(3)) @ W[0], torch.ones(3, 2), atol=1e-5)


def test_columns_that_depend_on_each_other_do_not_end_in_an_error():
    """The rounding of float32 sums gives G eigenvalues below -λ."""
    rng = torch.Generator().manual_seed(0)
    base = torch.randn(3000, 8, generator=rng)
    F = torch.cat([300 * base @ torch.randn(8, 60, generator=rng), torch.ones(3000, 1)], 1)
    Y = torch.nn.functional.one_hot((base[:, 0] > 0).long(), 2).float()
    G, B = F.T @ F, F.T @ Y
    assert torch.linalg.cholesky_ex(G.double() + 0.003 * torch.eye(61)).info > 0
    W = weights_of(G, B, (0.003, 1.0))
    assert W.isfinite().all()
    assert ((F @ W[0]).argmax(1) == Y.argmax(1)).float().mean() > 0.9
    assert generalised_error(G, B, W[0], 0.003) >= 0


# ---- unusual clients ----
def test_clients_with_one_class_or_no_training_item_take_part(node_federation):
    first, second, *rest = node_federation.graphs
    one_class = replace(first, train=first.train & (first.y == first.y[first.train][0]))
    bare = replace(second, train=torch.zeros_like(second.train))
    result = go(Federation((one_class, bare, *rest)), personal="0.1,1")
    assert all(model["weights"].isfinite().all() for model in result.models.values())
    assert torch.equal(weights_in(result, "1"), weights_in(result))


def test_more_columns_than_rows(node_federation):
    wide = tuple(
        replace(g, x=torch.cat([g.x, torch.rand(g.num_nodes, 300)], 1))
        for g in node_federation.graphs
    )
    federation = Federation(wide)
    F, Y = pooled(federation, settings_of(federation))
    assert F.shape[1] > len(F)
    assert torch.allclose(weights_in(go(federation)), ridge(F, Y, 0.5), atol=1e-4)


# ---- differential privacy ----
def private_client(**settings):
    """A client of a private run, with wide features, and its method."""
    graph = synthetic(nodes=80, classes=3, features=200, seed=2)
    graph = replace(graph, train=torch.arange(80) < 40)
    method = FedGram(hops="2", epsilon=settings.pop("epsilon", 2.0), **settings)
    names = ("a", "b", "c", "d")
    facts = Facts(200, 3, "node", names, ("gcn",) * 4, secure=SecureTerms())
    client = Client("a", graph, facts, responder=responder_for(facts, "a"))
    return client, method


def sent(client, method):
    m = method.columns(client.facts, 0, method.full(client.facts))
    width = torch.tensor(method.full(client.facts))
    reply = method.send_moments(client, torch.tensor([0]), width)
    return unpacked(reply["gram"]["0"], m), reply["moment"]["0"]


@pytest.mark.parametrize("protects", ["label", "node"])
def test_each_client_adds_its_share_of_the_noise(protects):
    client, method = private_client(protects=protects)
    G, B = sent(client, method)
    rows = method.private_rows(client, 200)[:40]
    Y = torch.nn.functional.one_hot(client.graph.y[:40], 3).float()
    # Three of four clients are enough for a secure sum, so three shares make up σ.
    share = gaussian_scale(2.0, 1e-5, 2**0.5) / 3**0.5
    noise = (B - rows.T @ Y)[:-1]
    assert noise.std() == pytest.approx(share, rel=0.3)
    of_gram = (G - rows.T @ rows)[:-1, :-1]
    assert torch.equal(of_gram, of_gram.T)
    if protects == "label":
        assert torch.allclose(of_gram, torch.zeros(200, 200), atol=1e-5)  # public: no noise
    else:
        assert of_gram.diagonal().std() == pytest.approx(share, rel=0.3)
        above = torch.triu_indices(200, 200, 1)
        assert of_gram[above[0], above[1]].std() == pytest.approx(share / 2**0.5, rel=0.1)
    assert (B[-1] == 0).all()
    assert (G[-1] == 0).all()


def test_a_repeated_request_gets_the_same_noise():
    client, method = private_client()
    one, again, other = sent(client, method), sent(client, method), sent(*private_client())
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_edges_cost_nothing_if_sums_use_rows_without_hops():
    client, method = private_client(protects="edge")
    assert method.noise_scale(client.facts) == 0
    rewired = replace(client.full_graph, edge_index=client.full_graph.edge_index.flip(0)[:, ::2])
    other = Client("a", rewired, client.facts, responder=responder_for(client.facts, "a"))
    assert all(
        torch.equal(a, b) for a, b in zip(sent(client, method), sent(other, method), strict=True)
    )


@pytest.mark.parametrize("hops", [0, 1, 2])
def test_private_rows_are_no_longer_than_1_after_a_projection(hops):
    client, method = private_client(private_hops=hops, width=20)
    assert start(client.graph, 20, 0).norm(dim=1).max() > 1.2  # the projection lengthens some
    assert method.private_rows(client, 20).norm(dim=1).max() <= 1 + 1e-6


def test_weights_of_edges_have_no_bound():
    client, method = private_client(private_hops=1)
    weight = torch.ones(client.graph.num_edges)
    client.graph = replace(client.graph, edge_weight=weight)
    with pytest.raises(DataError, match=r"edge_weight: with method\.private_hops"):
        method.private_rows(client, 200)


def test_with_a_huge_epsilon_it_is_ridge_regression_on_the_unsmoothed_rows(node_federation):
    result = go(node_federation, epsilon=1e12, secure=True)
    method = FedGram(hops="2", epsilon=1e12)
    rows, labels = [], []
    for name, graph in zip(node_federation.names, node_federation.graphs, strict=True):
        client = client_of(node_federation, name, graph)
        rows.append(method.private_rows(client, 100)[graph.train])
        labels.append(graph.y[graph.train])
    Y = torch.nn.functional.one_hot(torch.cat(labels), 3).float()
    penalty = result.summary["notes"]["ridge"]
    assert penalty == pytest.approx(0.1)
    assert torch.allclose(weights_in(result), ridge(torch.cat(rows), Y, penalty), atol=1e-3)
    assert set(result.traffic["phases"]) & {"send_moments", "compare_weights"} == {"send_moments"}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, r"method\.epsilon is 1, but run\.secure is false.*give --secure"),
        ({"secure": True, "hops": "2,4"}, r"but method\.hops is '2,4'.*give one number"),
        ({"secure": True, "hops": "side"}, r"but method\.hops is 'side'"),
        ({"secure": True, "balance": 0.5}, r"but run\.class_weight and method\.balance weigh rows"),
        ({"secure": True, "class_weight": "1,2,3"}, r"but run\.class_weight and method\.balance"),
        ({"secure": True, "leave": "0,1"}, r"but method\.join and method\.leave need further sums"),
    ],
)
def test_a_private_run_releases_nothing_else(node_federation, settings, said):
    with pytest.raises(ConfigError, match=said):
        go(node_federation, epsilon=1.0, **settings)


def test_edges_of_graphs_are_protected_as_whole_graphs(graph_federation):
    with pytest.raises(ConfigError, match="in a graph task give 'node'"):
        go(graph_federation, epsilon=1.0, secure=True, protects="edge")


# ---- traffic ----
def test_traffic_is_that_of_the_formula(node_federation):
    d, C, K = node_federation.num_features, node_federation.num_classes, 4
    m = d + 2 * C + 1
    phases = go(node_federation).traffic["phases"]
    assert phases["send_moments"]["scalars_up"] == K * (m * (m + 1) // 2 + m * C)
    assert phases["adopt"]["scalars_down"] == K * (m * C + 1)
    assert set(phases) == {"send_moments", "adopt", "evaluate"}  # one upload, one download
    several = go(node_federation, ridges="0.1,1,10", hops="1,2", sketch=5).traffic["phases"]
    s = 5 + 2 * C + 1
    sketched, full = (n * (n + 1) // 2 + n * C for n in (s, m))
    assert several["send_moments"]["scalars_up"] == K * (2 * sketched + full)
    assert several["compare_weights"]["scalars_up"] == K * (2 + 1) * 3 * C * C
    assert several["compare_weights"]["scalars_down"] == K * (3 * (2 * s + m) * C + 2)


def test_the_clients_models_are_not_used(node_federation):
    one, other = (go(node_federation, model=model) for model in ("gcn-2x8", "gat-3x16"))
    assert one.summary["history_hash"] == other.summary["history_hash"]
    assert one.summary["model"] is None


def test_its_baselines_have_rounds_of_their_own():
    base = {"data": {"dataset": "cora"}, "method": {"name": "fedgram", "rounds": 1}}
    assert _as_baseline(base, "fedavg")["method"] == {"name": "fedavg"}
    base["method"] = {"name": "fedprox", "rounds": 7}
    assert _as_baseline(base, "fedavg")["method"] == {"name": "fedavg", "rounds": 7}


def test_lists_of_one_number_may_be_numbers():
    assert FedGram(hops=2, ridges=1, personal=0.5, leave=3) == FedGram(
        hops="2", ridges="1", personal="0.5", leave="3"
    )
