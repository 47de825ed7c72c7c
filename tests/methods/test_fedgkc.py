"""FedGKC: its equations by hand, its limits, and what travels."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tests.methods.test_fml import client_of, gap
from tests.watching import Largest

from fedloom.core.facts import Facts
from fedloom.core.message import flatten
from fedloom.data.graph import Graph
from fedloom.engines.loop import Engine as Loop
from fedloom.errors import ConfigError, MessageError
from fedloom.experiments.run import run
from fedloom.methods.fedgkc import FedGKC
from fedloom.nn.distillation import divergence, neighbourly
from fedloom.nn.training import outputs

pytestmark = pytest.mark.usefixtures("reference_engine")

MODEL, MODELS = "gcn-2x8", "gcn-2x8,gat-2x8,sage-2x8,gin-2x8"
QUICK = {"copilot": "gcn-2x8"}
OTHER = {"copilot": "sgc-2x8", "weak_edges": 0.9, "weak_columns": 0.9, "clarity": False}
PLAIN = {"beta": 0.0, "self_weight": 0.0, "kappa": 0.0}


def five_nodes():
    """Returns a path of four nodes and an isolated node."""
    ends = torch.tensor([[0, 1, 2], [1, 2, 3]])
    return Graph(
        x=torch.eye(5),
        edge_index=torch.cat([ends, ends.flip(0)], 1),
        y=torch.tensor([0, 1, 2, 0, 1]),
        num_classes=3,
        train=torch.tensor([True, True, False, True, False]),
    )


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---- Eq. 1 ----
@pytest.mark.parametrize("norm", ["pairs", "nodes"])
def test_the_neighbourly_loss_equals_the_double_loop(norm):
    graph, t, u = five_nodes(), drawn(5, 4), drawn(5, 4, seed=1)
    near = {i: {i} for i in range(5)}
    for j, i in graph.edge_index.T.tolist():
        near[i].add(j)
    a, b = t.softmax(1), u.softmax(1)
    total = sum((a[j] * (a[j] / b[i]).log()).sum() for i in near for j in near[i])
    by = sum(map(len, near.values())) if norm == "pairs" else 5
    assert torch.isclose(neighbourly(graph, t, u, norm), total / by, atol=1e-6)


def test_equal_embeddings_have_no_neighbourly_loss_and_only_the_student_gets_a_gradient():
    graph = five_nodes()
    same = drawn(1, 4).expand(5, 4)
    assert neighbourly(graph, same, same, "pairs").abs() < 1e-6
    t, u = drawn(5, 4).requires_grad_(), drawn(5, 4, seed=1).requires_grad_()
    neighbourly(graph, t, u, "pairs").backward()
    assert t.grad is None
    assert u.grad.abs().sum() > 0


def test_the_neighbourly_loss_makes_no_tensor_as_long_as_the_edges():
    """The loss is one sparse product, whose tensors are as large as the embeddings.

    The complete graph has six times as many edges.
    """
    graph = Graph(
        x=torch.zeros(50, 1),
        edge_index=torch.combinations(torch.arange(50)).T,
        y=torch.zeros(50, dtype=torch.int64),
        num_classes=2,
    )
    graph = replace(graph, edge_index=torch.cat([graph.edge_index, graph.edge_index.flip(0)], 1))
    edges = graph.adjacency("sum").nnz
    graph.adjacency("sum").transpose  # noqa: B018  (computed once, before the watch begins)
    with Largest() as seen:
        neighbourly(graph, drawn(50, 4), drawn(50, 4, seed=1).requires_grad_(), "pairs").backward()
    assert 0 < seen.numel < edges


# ---- Eq. 2 to 5 ----
def test_the_losses_by_hand(node_federation):
    method = FedGKC(alpha=0.5, beta=0.3, self_weight=0.0, **QUICK)
    client = client_of(node_federation, method, ("sage-2x8",))
    graph = client.graph
    own, copilot = (outputs(client.state[which], graph) for which in ("model", "copilot"))
    own_loss, copilot_loss = method.losses(client, graph, own, copilot)
    for got, student, teacher in ((own_loss, own, copilot), (copilot_loss, copilot, own)):
        by_hand = 0.5 * client.loss(student[1], graph) + 0.3 * neighbourly(
            graph, teacher[0], student[0], "pairs"
        )
        assert torch.isclose(got, by_hand + 0.2 * divergence(teacher[1], student[1]), atol=1e-6)


def test_self_distillation_by_hand_teaches_the_strong_view_or_both(node_federation):
    for symmetric in (False, True):
        method = FedGKC(symmetric=symmetric, **QUICK)
        client = client_of(node_federation, method)
        model, seen = client.state["model"], []
        original = model.items
        model.items = lambda graph, rng: seen.append((graph, z := original(graph, rng))) or z  # noqa: B023
        loss = method.itself(client, client.graph)
        (strong, z_strong), (weak, z_weak) = seen
        assert strong.num_edges < weak.num_edges < client.graph.num_edges
        P, Q = model.head(z_weak, weak).softmax(1), model.head(z_strong, strong).softmax(1)
        by_hand = ((z_weak - z_strong) ** 2).mean() + (P * (P / Q).log()).sum(1).mean()
        if symmetric:
            by_hand = by_hand + (Q * (Q / P).log()).sum(1).mean()
        assert torch.isclose(loss, by_hand, atol=1e-5)
        assert z_strong.requires_grad
        assert z_weak.requires_grad == symmetric


def test_each_term_reaches_the_student_and_not_the_teacher(node_federation):
    for settings in (
        {"alpha": 0.0, "beta": 1.0, "self_weight": 0.0},
        {"alpha": 0.0, "beta": 0.0, "self_weight": 0.0},
    ):
        method = FedGKC(**settings, **QUICK)
        client = client_of(node_federation, method)
        own, copilot = (
            outputs(client.state[which], client.graph) for which in ("model", "copilot")
        )
        for loss, student, teacher in zip(
            method.losses(client, client.graph, own, copilot),
            ("model", "copilot"),
            ("copilot", "model"),
            strict=True,
        ):
            client.state["model"].zero_grad()
            client.state["copilot"].zero_grad()
            loss.backward()
            assert client.state[student].layers[0].weight.grad.abs().sum() > 0
            assert client.state[teacher].layers[0].weight.grad is None


# ---- Eq. 6 to 12 ----
def test_the_assurance_by_hand():
    graph, p = five_nodes(), drawn(5, 3).softmax(1)
    near = {0: [1], 1: [0, 2], 2: [1, 3], 3: [2], 4: []}

    def by_hand(mean_others):
        values = []
        for i, others in near.items():
            top = p[i].max()
            distance = top - (1 - top) / 2 if mean_others else (top - (p[i].sum() - top)) / 2
            like = (
                torch.stack([F.cosine_similarity(p[i], p[j], dim=0) for j in others]).mean()
                if others
                else 0.0
            )
            values.append(top + distance - 0.1 * like)
        return torch.stack(values).mean()

    for mean_others in (False, True):
        assert torch.isclose(
            FedGKC(mean_others=mean_others).assurance(p, graph), by_hand(mean_others), atol=1e-6
        )
    parts = [
        FedGKC(strength=a, clarity=b, lam=c).assurance(p, graph)
        for a, b, c in ((True, False, 0.0), (False, True, 0.0), (False, False, 0.1))
    ]
    assert torch.isclose(sum(parts), FedGKC().assurance(p, graph), atol=1e-6)


def test_certain_predictions_without_edges():
    graph = replace(five_nodes(), edge_index=torch.zeros(2, 0, dtype=torch.int64))
    certain = F.one_hot(graph.y, 3).float()
    assert torch.isclose(FedGKC().assurance(certain, graph), torch.tensor(1 + 1 / 2))


def test_weights_sum_to_1_and_are_not_negative():
    rng = torch.Generator().manual_seed(0)
    for kappa in (0.0, 0.5, 1.0):
        volume, power = torch.randint(1, 99, (6,), generator=rng), torch.rand(6, generator=rng)
        power[2] = 0.0
        w = torch.stack(
            [
                FedGKC(kappa=kappa).share(n, q, volume.sum(), power.sum())
                for n, q in zip(volume, power, strict=True)
            ]
        )
        assert torch.isclose(w.sum(), torch.tensor(1.0))
        assert (w >= 0).all()
    alike = [
        FedGKC().share(torch.tensor(5), torch.tensor(0.3), torch.tensor(20), torch.tensor(1.2))
        for _ in range(4)
    ]
    assert torch.allclose(torch.stack(alike), torch.tensor(0.25))
    nobody_sure = FedGKC(kappa=1.0).share(
        torch.tensor(5), torch.tensor(0.0), torch.tensor(20), torch.tensor(0.0)
    )
    assert torch.isclose(nobody_sure, torch.tensor(0.25))


def test_uniform_predictions_count_as_no_assurance(node_federation):
    """2 max − 1 is below 0 for three classes, and neighbours have equal predictions."""
    method = FedGKC(strength=False, **QUICK)
    client = client_of(node_federation, method)
    bare = replace(client.graph, train=torch.zeros_like(client.graph.train))
    client.graph = bare  # without labels, the copilot keeps the weights it receives, zeros
    nothing = {name: torch.zeros_like(p) for name, p in client.state["copilot"].named_parameters()}
    assert method.assurance(torch.full((bare.num_nodes, 3), 1 / 3), bare) < 0
    assert float(method.train(client, nothing, torch.tensor(1))["power"]) == 0


# ---- limits ----
def common(result):
    return flatten(result.final_models["server"])


def test_without_its_own_terms_it_is_fml(node_federation):
    fml = run("fml", node_federation, model=MODELS, rounds=3, alpha=0.6, beta=0.6, **QUICK)
    same = run("fedgkc", node_federation, model=MODELS, rounds=3, **PLAIN, **QUICK)
    assert gap(fml, same, node_federation.names) < 1e-5
    assert all(
        torch.allclose(a, b, atol=1e-5)
        for a, b in zip(common(fml).values(), common(same).values(), strict=True)
    )
    for settings in ({"beta": 0.2}, {"self_weight": 1.0}, {"kappa": 0.5}):
        assert (
            gap(
                fml,
                run(
                    "fedgkc",
                    node_federation,
                    model=MODELS,
                    rounds=3,
                    **{**PLAIN, **settings},
                    **QUICK,
                ),
                node_federation.names,
            )
            > 1e-4
        )


def test_alpha_1_is_local_training_and_fedavg_of_the_copilot(node_federation):
    settings = {"model": MODEL, "rounds": 3, "dropout": 0.0}
    both = run("fedgkc", node_federation, alpha=1.0, **PLAIN, **settings, **QUICK)
    assert gap(both, run("local", node_federation, **settings), node_federation.names) < 1e-6
    average = flatten(run("fedavg", node_federation, **settings).final_models["server"])
    assert all(
        torch.allclose(a, b, atol=1e-5)
        for a, b in zip(common(both).values(), average.values(), strict=True)
    )


def test_the_common_copilot_is_the_weighted_mean(node_federation, monkeypatch):
    """θ + Σ w_k (θ_k − θ) is Σ w_k θ_k, with the weights of Eq. 12."""
    trained, sent_up, original = {}, {}, Loop.call

    def call(self, phase, sent):
        replies = original(self, phase, sent)
        if phase == "train":
            sent_up.update(replies)
            trained.update(
                {
                    c: {
                        k: p.detach().clone()
                        for k, p in self.clients[c].state["copilot"].named_parameters()
                    }
                    for c in replies
                }
            )
        return replies

    monkeypatch.setattr(Loop, "call", call)
    result = run("fedgkc", node_federation, model=MODELS, rounds=1, **QUICK)
    n, P = ({c: float(r[key]) for c, r in sent_up.items()} for key in ("volume", "power"))
    w = {c: 0.5 * (n[c] / sum(n.values()) + P[c] / sum(P.values())) for c in sent_up}
    assert sum(w.values()) == pytest.approx(1)
    for name, tensor in common(result).items():
        assert torch.allclose(
            tensor, sum(w[c] * trained[c][name.rpartition("/")[2]] for c in w), atol=1e-6
        )


# ---- what travels ----
@pytest.mark.parametrize("copilot", ["gcn-2x8", "gat-2x8", "sage-2x8", "gin-2x8", "sgc-2x8"])
def test_messages_hold_the_copilot_and_two_scalars_for_any_own_model(
    node_federation, copilot, monkeypatch
):
    seen, original = [], Loop.call
    monkeypatch.setattr(
        Loop,
        "call",
        lambda self, phase, sent: seen.append((phase, sent, r := original(self, phase, sent))) or r,
    )
    result = run("fedgkc", node_federation, model=MODELS, rounds=2, copilot=copilot)
    names = set(common(result))
    size = sum(t.numel() for t in common(result).values())
    for phase, sent, replies in seen:
        for client, reply in replies.items():
            down, up = flatten(sent[client]), flatten(reply)
            match phase:
                case "train":
                    assert {k.removeprefix("copilot/") for k in down} == names | {"number"}
                    assert {k: t.numel() for k, t in up.items()} == {"power": 1, "volume": 1}
                case "contribute":
                    assert {k: t.numel() for k, t in down.items()} == {
                        "power": 1,
                        "volume": 1,
                        "number": 1,
                    }
                    assert {k.removeprefix("update/") for k in up} == names
                    assert sum(t.numel() for t in up.values()) == size
                case "setup" | "evaluate":
                    pass
                case _:
                    pytest.fail(f"unexpected phase {phase}")
    assert {"train", "contribute"} <= {phase for phase, _, _ in seen}


def test_copilots_have_the_papers_sizes():
    sizes = {
        "cora": (1433, 7, 92231),
        "pubmed": (500, 3, 32259),
        "physics": (8415, 5, 538949),
        "photo": (745, 8, 48264),
    }
    for d, C, expected in sizes.values():
        facts = Facts(d, C, "node", ("0",), ("gcn-2x64",))
        assert (
            sum(p.numel() for p in facts.build(FedGKC().copilot, "server").parameters()) == expected
        )


def test_secure_and_plain_agree(node_federation):
    plain, secure = (
        run("fedgkc", node_federation, model=MODELS, rounds=3, secure=secure, **QUICK)
        for secure in (False, True)
    )
    assert gap(plain, secure, node_federation.names) < 1e-4
    assert all(
        torch.allclose(a, b, atol=1e-4)
        for a, b in zip(common(plain).values(), common(secure).values(), strict=True)
    )


def test_a_client_that_was_not_trained_in_a_round_adds_nothing_to_it(node_federation):
    method = FedGKC(**QUICK)
    client = client_of(node_federation, method)
    totals = (torch.tensor(200), torch.tensor(9.0))
    first, second = torch.tensor(1), torch.tensor(2)

    def adds(number):
        return any(t.any() for t in flatten(method.contribute(client, *totals, number)).values())

    assert not adds(first)
    copilot = {name: p.detach().clone() for name, p in client.state["copilot"].named_parameters()}
    method.train(client, copilot, first)
    assert adds(first)
    assert not adds(first)  # once
    method.train(client, copilot, first)
    assert not adds(second)  # its training was for another round


def test_sums_below_the_clients_own_part_are_refused(node_federation):
    method = FedGKC(**QUICK)
    client = client_of(node_federation, method)
    copilot, one = (
        {name: p.detach().clone() for name, p in client.state["copilot"].named_parameters()},
        torch.tensor(1),
    )
    method.train(client, copilot, one)
    with pytest.raises(
        MessageError, match="client '0' in 'contribute': volume is 1, less than its own part of"
    ):
        method.contribute(client, one, torch.tensor(9.0), one)


def test_warmup_rounds_are_local_training_and_fedavg_of_the_copilot(node_federation):
    settings = {"model": MODEL, "rounds": 3, "dropout": 0.0}
    warm = run("fedgkc", node_federation, warmup=3, kappa=0.0, **settings, **QUICK)
    assert gap(warm, run("local", node_federation, **settings), node_federation.names) < 1e-6
    assert (
        gap(
            warm,
            run("fedgkc", node_federation, warmup=2, kappa=0.0, **settings, **QUICK),
            node_federation.names,
        )
        > 1e-5
    )


@pytest.mark.parametrize("copilot", ["gcn-2x8", "sgc-2x8"])
def test_a_client_without_labels_takes_part(node_federation, copilot):
    first, *rest = node_federation.graphs
    bare = replace(first, train=torch.zeros_like(first.train))
    for inductive in (False, True):
        result = run(
            "fedgkc",
            replace(node_federation, graphs=(bare, *rest), whole=None, inductive=inductive),
            model=MODEL,
            rounds=2,
            copilot=copilot,
        )
        assert result.summary["status"] == "completed"


# ---- bad input ----
def test_alpha_and_beta_above_1_are_refused():
    with pytest.raises(
        ConfigError, match=r"method\.alpha \+ method\.beta is 1\.1, must be at most 1"
    ):
        FedGKC(alpha=0.6, beta=0.5)
    FedGKC(alpha=0.9, beta=0.1)


def test_an_unknown_architecture_is_refused(node_federation):
    with pytest.raises(ConfigError, match=r"'gnn'.*gcn"):
        run("fedgkc", node_federation, model="gcn-2x8,gnn-2x8", **QUICK)


def test_a_copilot_of_another_width_is_refused_unless_beta_is_0(node_federation):
    with pytest.raises(
        ConfigError,
        match=r"method\.copilot: 'gcn-2x16' has embeddings 16 wide, model 'sage-2x8' has 8",
    ):
        run("fedgkc", node_federation, model="gcn-2x16,sage-2x8", copilot="gcn-2x16")
    result = run(
        "fedgkc", node_federation, model="gcn-2x16,sage-2x8", copilot="gcn-2x16", beta=0.0, rounds=2
    )
    assert result.summary["status"] == "completed"


def test_graph_tasks_are_refused(graph_federation):
    with pytest.raises(ConfigError, match="method 'fedgkc' does node tasks"):
        run("fedgkc", graph_federation, model=MODEL, **QUICK)


def test_clients_with_isolated_nodes_or_one_class_take_part(node_federation):
    first, second, *rest = node_federation.graphs
    lonely = replace(first, edge_index=torch.zeros(2, 0, dtype=torch.int64))
    one = replace(
        second,
        train=second.train & (second.y == 0),
        test=second.test | (second.train & (second.y != 0)),
    )
    result = run(
        "fedgkc",
        replace(node_federation, graphs=(lonely, one, *rest), whole=None),
        model=MODELS,
        rounds=3,
        **QUICK,
    )
    assert result.summary["status"] == "completed"
    assert all(torch.isfinite(t).all() for t in flatten(result.final_models).values())
