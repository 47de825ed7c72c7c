"""O-pFGL: its equations by hand, its limits, and its exact traffic."""

from dataclasses import fields, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.core.message import flatten
from fedloom.data.graph import Graph
from fedloom.data.partition import divide
from fedloom.data.synthetic import synthetic
from fedloom.errors import ConfigError, MessageError
from fedloom.experiments.run import run
from fedloom.methods.opfgl import (
    VARIANTS,
    Alignment,
    LinkPredictor,
    OpFGL,
    balanced,
    similarity,
    smoothness,
)
from fedloom.nn.smoothing import propagated
from fedloom.nn.training import label_steps

# Short runs in which every setting has an effect: classes have several pseudo-nodes, HRE has two
# classes, and γ is clamped.
QUICK = {
    "rounds": 1,
    "condense_steps": 60,
    "steps": 12,
    "check_every": 4,
    "waits": 1,
    "lr_global": 0.01,
    "lr_local": 0.01,
    "lr_features": 0.05,
    "lr_links": 0.01,
    "rate": 0.06,
    "min_count": 5,
    "expand_confidence": 0.9,
    "expand_degree": 1,
    "link_width": 16,
    "beta": 0.4,
    "gamma_min": 0.1,
    "gamma_max": 0.25,
}


def graph_of(edges, y, train, classes=3, x=None):
    edges = torch.tensor(edges).T
    y, train = torch.tensor(y), torch.tensor(train, dtype=torch.bool)
    x = torch.eye(len(y)) if x is None else x
    return Graph(
        x, torch.cat([edges, edges.flip(0)], 1), torch.where(train, y, -1), classes, train=train
    ).check()


def client_of(graph, spec="gcn-2x8", seed=0):
    facts = Facts(graph.num_features, graph.num_classes, "node", ("a",), (spec,), seed=seed)
    return Client("a", graph, facts)


def two_cliques():
    edges = [(i, j) for k in (0, 5) for i in range(k, k + 5) for j in range(i + 1, k + 5)]
    return graph_of(
        edges, [0] * 5 + [1] * 5, [True] + [False] * 4 + [True] + [False] * 4, classes=2
    )


# ---- soft labels, homophily, expansion ----
def test_labels_propagate_within_two_cliques():
    soft = OpFGL(spread_steps=3).soft_labels(two_cliques())
    assert soft.argmax(1).tolist() == [0] * 5 + [1] * 5
    assert ((soft > 0).sum(1) == 1).all()


def test_a_step_of_label_propagation_by_hand():
    graph = graph_of([(0, 1), (1, 2), (2, 2)], [0, 1, 1], [True, False, True])
    soft = OpFGL(spread_steps=1, spread=0.9).soft_labels(graph)
    half = 0.5**0.5  # degrees 1, 2, 1: the loop at node 2 does not count
    assert torch.allclose(
        soft, torch.tensor([[0.1, 0, 0], [0.9 * half, 0.9 * half, 0], [0, 0.1, 0]])
    )


def test_nodes_that_no_label_reaches_are_uniform():
    graph = graph_of([(0, 1), (2, 3)], [0, 0, 1, 1], [True, False, False, False])
    assert torch.allclose(OpFGL().soft_labels(graph)[2:], torch.full((2, 3), 1 / 3))


def test_homophily_by_hand():
    # 0-1 have one label, 0-2 have two, 3 is unlabelled, 4 has no training neighbour.
    graph = graph_of(
        [(0, 1), (0, 2), (1, 3), (3, 4)], [0, 0, 1, 0, 0], [True, True, True, False, True]
    )
    assert OpFGL().homophily(graph).tolist() == [0.5 + 1 + 0, 0, 0]


def test_the_distillation_weight_falls_with_homophily_and_stays_within_its_clamp():
    method = OpFGL(beta=1.0, gamma_max=1.0)
    weights = []
    for size in (2, 4, 8):  # a clique of class 0 grows, class 1 stays unconnected
        edges = [(i, j) for i in range(size) for j in range(i + 1, size)]
        graph = graph_of([*edges, (size, size)], [0] * size + [1], [True] * (size + 1))
        gamma, soft = method.gamma(graph), method.soft_labels(graph)
        weights.append((gamma / soft.sum(1))[0].item())
        # H = 0, so w_dist = 1. ỹ of an isolated training node is 1 - a.
        assert gamma[size] == pytest.approx(0.1)
    assert all(a > b for a, b in pairwise(weights))
    clamped = replace(method, gamma_min=0.2, gamma_max=0.3).gamma(graph)
    assert 0.2 <= clamped.min() <= clamped.max() <= 0.3


def test_expansion_takes_confident_nodes_of_the_leading_class():
    edges = [(0, 1), (0, 2), (1, 2), (0, 3), (1, 3), (2, 3), (0, 4), (5, 6), (5, 7)]
    graph = graph_of(
        edges, [0, 0, 0, 0, 0, 1, 1, 1], [True, True, True, False, False, True, True, False]
    )
    method = OpFGL(expand_degree=2)
    assert method.homophily(graph).tolist() == [3, 2, 0]
    labels = method.expanded_labels(graph)
    assert labels.tolist() == [0, 0, 0, 0, -1, 1, 1, -1]  # 4 and 7 have degree 1
    method = replace(method, expand_degree=1)
    assert method.expanded_labels(graph).tolist() == [0, 0, 0, 0, 0, 1, 1, -1]
    both = replace(method, expand_classes=2)
    assert both.expanded_labels(graph).tolist() == [0, 0, 0, 0, 0, 1, 1, 1]
    for name, variant in VARIANTS.items():
        labelled = (replace(method, variant=name).expanded_labels(graph) >= 0).sum()
        assert (labelled > graph.train.sum()) == variant.expands


def test_expansion_adds_nothing_without_homophily():
    graph = graph_of([(0, 1), (1, 2)], [0, 0, 1], [True, False, True])
    method = OpFGL(expand_classes=3, expand_confidence=0.0)
    assert method.expanded_labels(graph).tolist() == [0, -1, 1]


# ---- statistics ----
@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1), st.integers(2, 6), st.sampled_from(["m_c", "n-1"]))
def test_merged_statistics_equal_equation_9_and_those_of_the_union(seed, clients, divisor):
    rng = torch.Generator().manual_seed(seed)
    method = OpFGL(variant="ft", hops=1, divisor=divisor, min_count=2)
    n, classes = 12 * clients, 4
    y = torch.randint(3, (n,), generator=rng)  # no client has class 3
    owner = torch.randint(clients, (n,), generator=rng)
    x = torch.randn(n, 5, generator=rng)
    counts, parts, sums = torch.zeros(clients, classes), [], []
    for k in range(clients):
        own = (owner == k).nonzero().flatten()
        edges = torch.randint(max(len(own), 1), (2, 30), generator=rng)[:, : 30 * bool(len(own))]
        graph = Graph(x[own], edges, y[own], classes, train=torch.ones(len(own), dtype=torch.bool))
        if not len(own):
            continue
        sums.append(method.secure_statistics(client_of(graph)))
        features = torch.stack(propagated(graph, "sym", 1), 1).double()
        for c in range(classes):
            mine = features[graph.y == c]
            if len(mine) >= 2:
                counts[k, c] = len(mine)
                parts.append((c, mine))
    total = {name: torch.stack([s[name] for s in sums]).double().sum(0) for name in sums[0]}
    total["count"] = total["count"].long()
    if not counts.any():
        with pytest.raises(MessageError, match="min_count"):
            method.merge(total)
        return
    merged = method.merge(total)
    assert torch.equal(merged["count"].float(), counts.sum(0))
    assert not merged["mean"][3].any()
    for c in range(classes):
        mine = [features for of, features in parts if of == c]
        if not mine:
            continue
        # Eq. 9, from the clients' means and variances.
        size, means = (
            torch.tensor([len(f) for f in mine]).double(),
            torch.stack([f.mean(0) for f in mine]),
        )
        mean = torch.einsum("k,kvd->vd", size, means) / size.sum()
        variances = torch.stack([f.var(0) for f in mine])
        scatter = torch.einsum("k,kvd->vd", size - 1, variances) + torch.einsum(
            "k,kvd->vd", size, (means - mean).square()
        )
        expected = scatter / (size.sum() - (len(mine) if divisor == "m_c" else 1))
        assert torch.allclose(merged["mean"][c].double(), mean, atol=1e-5)
        assert torch.allclose(merged["variance"][c].double(), expected, atol=1e-5)
        if divisor == "n-1":
            assert torch.allclose(merged["variance"][c].double(), torch.cat(mine).var(0), atol=1e-5)


def test_a_class_with_too_few_nodes_is_not_reported():
    graph = graph_of([(0, 1)], [0, 0, 0, 1, 1], [True] * 5, x=torch.rand(5, 4))
    reply = OpFGL(variant="ft", min_count=3).secure_statistics(client_of(graph))
    assert reply["count"].tolist() == [3, 0, 0]
    assert reply["reported"].tolist() == [1, 0, 0]
    assert reply["total"][0].any()
    assert not reply["total"][1:].any()
    assert not reply["squares"][1:].any()


def test_too_few_labels_everywhere_are_refused_and_the_setting_is_named(node_federation):
    with pytest.raises(
        MessageError,
        match=r"no client has a class with 500 or more labelled nodes \(method.min_count\)",
    ):
        run("opfgl", node_federation, model="gcn-2x8", **{**QUICK, "min_count": 500})


# ---- the pseudo-graph ----
def target_of(count, features=6, views=2, seed=0):
    rng = torch.Generator().manual_seed(seed)
    shape = (len(count), views, features)
    return {
        "count": torch.tensor(count),
        "mean": torch.randn(shape, generator=rng) / 3,
        "variance": torch.rand(shape, generator=rng) / 4,
    }


@pytest.mark.slow
def test_one_pseudo_node_per_class_reaches_the_means():
    graph = synthetic(nodes=200, classes=4, features=16, degree=6.0, homophily=0.8, seed=1)
    # No client has class 2, so it gets no pseudo-node.
    graph = replace(graph, train=graph.y != 2, y=torch.where(graph.y == 2, -1, graph.y))
    method = OpFGL(variant="ft", smooth=0.0)
    target = method.merge(method.secure_statistics(client_of(graph)))
    pseudo = method.condense(target, torch.Generator().manual_seed(1))
    assert pseudo["y"].tolist() == [0, 1, 3]
    begun = replace(method, condense_steps=1).condense(target, torch.Generator().manual_seed(1))
    before, after = (Alignment(target, p["y"])(p["x"], p["adjacency"], 1) for p in (begun, pseudo))
    assert after < 1e-3 < 0.02 < before


def test_links_are_symmetric_without_loops_and_between_0_and_1():
    pseudo = OpFGL(condense_steps=120, rate=0.5).condense(
        target_of([6, 8]), torch.Generator().manual_seed(0)
    )
    adjacency = pseudo["adjacency"]
    assert pseudo["y"].tolist() == [0] * 3 + [1] * 4
    assert torch.equal(adjacency, adjacency.T)
    assert not adjacency.diagonal().any()
    assert 0 <= adjacency.min() <= adjacency.max() <= 1
    assert not ((adjacency > 0) & (adjacency < 0.01)).any()
    assert (adjacency > 0).any()


def test_alignment_by_hand():
    target = target_of([6, 2, 0], features=4, views=1)
    x, y = torch.randn(4, 4, generator=torch.Generator().manual_seed(3)), torch.tensor([0, 0, 0, 1])
    first = (x[:3].mean(0) - target["mean"][0, 0]).square().mean() + (
        x[:3].std(0) - target["variance"][0, 0].sqrt()
    ).square().mean()
    second = (x[3] - target["mean"][1, 0]).square().mean()  # a single node has no deviation
    assert torch.allclose(
        Alignment(target, y)(x, torch.zeros(4, 4), 0), 0.75 * first + 0.25 * second, atol=1e-5
    )


def test_alignment_propagates_over_weighted_links_and_self_loops_of_weight_1():
    target = target_of([1, 1, 0], features=4)
    x, y = torch.randn(2, 4, generator=torch.Generator().manual_seed(3)), torch.tensor([0, 1])
    weight = 0.5
    moved = (x + weight * x.flip(0)) / (1 + weight)
    expected = (
        (x - target["mean"][:2, 0]).square().mean()
        + (moved - target["mean"][:2, 1]).square().mean()
    ) / 2
    assert torch.allclose(
        Alignment(target, y)(x, torch.tensor([[0, weight], [weight, 0]]), 1), expected, atol=1e-6
    )


def test_smoothness_by_hand_and_without_links():
    x = torch.tensor([[0.0, 1.0], [2.0, 1.0], [9.0, 9.0]])
    adjacency = torch.tensor([[0, 0.5, 0], [0.5, 0, 0], [0, 0, 0]])
    assert smoothness(x, adjacency) == pytest.approx((torch.tensor(-2.0).exp().item() + 1) / 2)
    assert smoothness(x, torch.zeros(3, 3)) == 0


def test_similarities_and_their_gradients():
    for n in (1, 2, 5):
        x = torch.randn(n, 3, generator=torch.Generator().manual_seed(n)).requires_grad_()
        weight = torch.rand(n, n, generator=torch.Generator().manual_seed(0))  # not symmetric
        plain = (-0.5 * (x[:, None] - x[None]).square()).exp().mean(2)
        assert torch.equal(similarity(x), plain)
        (expected,) = torch.autograd.grad((weight * plain).sum(), x)
        (gradient,) = torch.autograd.grad((weight * similarity(x)).sum(), x)
        assert torch.allclose(gradient, expected, atol=1e-7)


def test_every_term_has_gradients_for_features_and_links():
    target = target_of([6, 8], features=5)
    y = torch.tensor([0, 0, 1, 1])
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    torch.manual_seed(0)
    links = LinkPredictor(5, 8)
    for term in (lambda: Alignment(target, y)(x, links(x), 1), lambda: smoothness(x, links(x))):
        reached = torch.autograd.grad(term(), [x, *links.parameters()], allow_unused=True)
        names = ["x", *(name for name, _ in links.named_parameters())]
        # The last bias moves all links equally. Batch normalisation removes the biases before it.
        idle = {
            n for n, g in zip(names, reached, strict=True) if g is None or not g.abs().max() > 1e-9
        }
        assert idle <= {"pair.bias", "rest.2.bias"}


def test_the_link_predictor_is_an_mlp_on_ordered_pairs():
    torch.manual_seed(0)
    links, x = LinkPredictor(5, 8), torch.randn(3, 5)
    pairs = torch.stack([torch.cat([x[i], x[j]]) for i in range(3) for j in range(3)])
    score = links.rest(links.pair(pairs)).view(3, 3)
    expected = torch.sigmoid((score + score.T) / 2).fill_diagonal_(0)
    assert torch.allclose(links(x), torch.where(expected < 0.01, 0, expected), atol=1e-6)
    assert links(x[:1]).tolist() == [[0]]


# ---- the clients' training ----
def test_balanced_weights_give_classes_the_same_total():
    graph = graph_of([(0, 1)], [0, 0, 0, 1, 2], [True, True, True, True, False])
    assert balanced(graph)[:2].tolist() == pytest.approx([4 / (3 * 2), 4 / (1 * 2)])
    unlabelled = replace(graph, train=torch.zeros(5, dtype=torch.bool))
    assert torch.isfinite(balanced(unlabelled)).all()


def models_of(federation, **settings):
    result = run("opfgl", federation, model="gcn-2x8", **{**QUICK, **settings})
    return {
        f"{owner}/{name}": t
        for owner, model in result.final_models.items()
        for name, t in flatten(model).items()
    }


def far(one, other):
    return max((one[key] - other[key]).abs().max().item() for key in one)


def test_without_distillation_it_equals_fine_tuning(node_federation):
    nothing = {"gamma_min": 0.0, "gamma_max": 0.0}
    assert (
        far(
            models_of(node_federation, variant="nd_ft_dist", **nothing),
            models_of(node_federation, variant="ft"),
        )
        < 1e-6
    )
    assert (
        far(
            models_of(node_federation, variant="nd_ft_dist"),
            models_of(node_federation, variant="ft"),
        )
        > 1e-4
    )


@pytest.mark.slow
def test_a_huge_distillation_weight_keeps_the_student_near_its_teacher(node_federation):
    def moved(**settings):
        return far(
            models_of(node_federation, variant="full", **settings),
            models_of(node_federation, variant="global"),
        )

    held = {"beta": 1e6, "gamma_min": 1e6, "gamma_max": 1e6, "lr_local": 1e-4}
    teacher = run("opfgl", node_federation, model="gcn-2x8", **{**QUICK, "variant": "global"})
    student = run("opfgl", node_federation, model="gcn-2x8", **{**QUICK, **held})
    assert student.history[0]["accuracy"] == teacher.accuracy  # M_G is scored before stage 2
    assert moved(**held) < 0.01 < moved()


@pytest.mark.slow
def test_the_variants_are_all_different(node_federation):
    found = {variant: models_of(node_federation, variant=variant) for variant in VARIANTS}
    names = list(found)
    for k, one in enumerate(names):
        for other in names[:k]:
            assert far(found[one], found[other]) > 1e-5, (one, other)


def descent(client):
    """Returns what `fit` calls: steps on the client's own labels."""
    model = client.state["model"]
    return lambda optimizer, count: label_steps(
        model, optimizer, client.graph, None, count, client.record_loss
    )


def test_the_copy_with_the_best_validation_accuracy_is_kept(node_federation):
    method = OpFGL(**{**QUICK, "steps": 30, "check_every": 5, "waits": 100})
    client = client_of(node_federation.graphs[0])
    method.setup(client)
    model, seen = client.state["model"], []
    original = client.validate
    client.validate = lambda model: (
        seen.append((original(model), {k: v.clone() for k, v in model.state_dict().items()}))
        or seen[-1][0]
    )
    method.fit(client, model, 0.05, descent(client))
    assert len(seen) == 6
    best = max(score for score, _ in seen)
    first_best = next(state for score, state in seen if score == best)
    assert all(torch.equal(first_best[k], v) for k, v in model.state_dict().items())


def test_training_ends_after_checks_without_improvement(node_federation):
    client, checks = client_of(node_federation.graphs[0]), []
    method = OpFGL(**{**QUICK, "steps": 1000, "check_every": 5, "waits": 3})
    method.setup(client)
    client.validate = lambda model: (
        checks.append(0) or [0.1, 0.5, 0.5, 0.4, 0.3, 0.9][len(checks) - 1]
    )
    method.fit(client, client.state["model"], 0.01, descent(client))
    assert len(checks) == 5


def test_without_validation_items_the_last_model_is_kept(node_federation):
    bare = tuple(
        replace(g, test=g.test | g.val, val=torch.zeros_like(g.val)) for g in node_federation.graphs
    )
    short, long = (
        models_of(replace(node_federation, graphs=bare), check_every=every) for every in (4, 100)
    )
    assert far(short, long) == 0


def test_validation_labels_only_choose_between_copies(node_federation):
    def scrambled(graph):
        return replace(
            graph, y=torch.where(graph.train, graph.y, (graph.y + 1) % graph.num_classes)
        )

    other = replace(
        node_federation, graphs=tuple(map(scrambled, node_federation.graphs)), whole=None
    )
    one_check = {"steps": 8, "check_every": 8}  # a single copy to choose from
    assert far(models_of(node_federation, **one_check), models_of(other, **one_check)) == 0


def test_clients_with_one_architecture_start_from_the_same_weights(node_federation):
    clients = [client_of(g) for g in node_federation.graphs[:2]]
    for client in clients:
        OpFGL().setup(client)
    one, other = (c.state["model"].state_dict() for c in clients)
    assert all(torch.equal(one[k], other[k]) for k in one)


# ---- what travels ----
def test_one_upload_and_one_download_of_the_papers_size(tmp_path):
    graph = synthetic(nodes=420, classes=7, features=1433, seed=0)
    federation = divide(graph, 3, "random", 0)
    result = run(
        "opfgl",
        federation,
        model="gcn-2x8",
        **{**QUICK, "rate": 0.0, "min_count": 2},
        out=tmp_path / "x",
    )
    phases = {name: t for name, t in result.traffic["phases"].items() if name != "evaluate"}
    assert {
        name: (t["messages"], t["scalars_up"], t["scalars_down"]) for name, t in phases.items()
    } == {
        "statistics": (3, 3 * 40_131, 0),
        "generalise": (3, 0, 3 * 10_087),
    }


def test_a_secure_run_also_sends_the_indicator_and_is_bit_identical(node_federation):
    plain = run("opfgl", node_federation, model="gcn-2x8", **QUICK)
    secure = [
        run("opfgl", node_federation, model="gcn-2x8", secure=True, **QUICK) for _ in range(2)
    ]
    assert secure[0].summary["history_hash"] == secure[1].summary["history_hash"]
    for owner, model in plain.final_models.items():
        for name, tensor in flatten(model).items():
            assert torch.equal(tensor, flatten(secure[0].final_models[owner])[name])
    assert secure[0].accuracy == pytest.approx(plain.accuracy, abs=1e-9)
    c, d, k = node_federation.num_classes, node_federation.num_features, node_federation.num_clients
    up = secure[0].traffic["phases"]["secure_statistics"]["scalars_up"]
    assert up == k * (2 * c + 2 * 2 * d * c)
    keys = {"advertise_keys", "share_keys", "confirm", "unmask"}
    assert set(secure[0].traffic["phases"]) == {
        "secure_statistics",
        "generalise",
        "evaluate_sum",
        *keys,
    }


# ---- architectures and tasks ----
def test_the_ten_models_of_the_paper_run_in_one_federation():
    ten = (
        "ssgc-2x64,gcn-2x64,gcn-2x128,gcn-2x256,gcn-2x512,sgc-2,gcn-3x64,gcn-3x512,appnp-2x64,sgc-4"
    )
    graph = synthetic(nodes=400, classes=3, features=12, seed=1)
    result = run("opfgl", divide(graph, 10, "random", 0), model=ten, **QUICK)
    classifiers = [model.get("classifier.weight") for model in result.final_models.values()]
    assert {w.shape[0] for w in classifiers if w is not None} == {64, 128, 256, 512}
    assert result.summary["status"] == "completed"


def test_graph_tasks_and_more_rounds_are_refused(graph_federation, node_federation):
    with pytest.raises(ConfigError, match="does node tasks"):
        run("opfgl", graph_federation, **QUICK)
    with pytest.raises(
        ConfigError, match=r"method.rounds is 2, must be a whole number at least 1 and at most 1"
    ):
        run("opfgl", node_federation, **{**QUICK, "rounds": 2})


def test_a_gamma_max_below_gamma_min_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"method.gamma_max is 0.1, must be at least method.gamma_min, which is 0.2",
    ):
        OpFGL(gamma_min=0.2, gamma_max=0.1)


def test_every_setting_says_what_it_is():
    assert all(f.metadata["help"] for f in fields(OpFGL))
