"""FML: both losses by hand, the direction of gradients, and its limits."""

from dataclasses import replace

import pytest
import torch

from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.core.message import flatten
from fedloom.errors import ConfigError
from fedloom.experiments.run import run
from fedloom.methods.fml import FML
from fedloom.nn.distillation import divergence
from fedloom.nn.training import outputs

MODEL = "gcn-2x8"
QUICK = {"copilot": "gcn-2x8"}
OTHER = {"copilot": "sgc-2x8"}


def client_of(federation, method, models=(MODEL,), dropout=0.0):
    graph = federation.graphs[0]
    client = Client(
        "0",
        graph,
        Facts(graph.num_features, graph.num_classes, graph.task, ("0",), models, dropout),
    )
    method.setup(client)
    return client


def gap(one, other, owners):
    """Returns the largest difference between the weights of `owners` in two runs."""
    first, second = (
        {
            f"{owner}/{key}": t
            for owner in owners
            for key, t in flatten(result.final_models[owner]).items()
        }
        for result in (one, other)
    )
    assert first.keys() == second.keys()
    return max(float((first[key] - second[key]).abs().max()) for key in first)


def test_both_losses_by_hand(node_federation):
    method = FML(alpha=0.7, beta=0.2, **QUICK)
    client = client_of(node_federation, method, ("sage-2x8",))
    graph = client.graph
    own, copilot = (outputs(client.state[which], graph) for which in ("model", "copilot"))
    p, q = own[1].softmax(1), copilot[1].softmax(1)
    ce = [
        torch.stack([-torch.log(t[i, graph.y[i]]) for i in graph.train.nonzero().flatten()]).mean()
        for t in (p, q)
    ]
    kl = [
        torch.stack([(a[i] * (a[i] / b[i]).log()).sum() for i in range(len(a))]).mean()
        for a, b in ((q, p), (p, q))
    ]
    own_loss, copilot_loss = method.losses(client, graph, own, copilot)
    assert torch.isclose(own_loss, 0.7 * ce[0] + 0.3 * kl[0], atol=1e-6)
    assert torch.isclose(copilot_loss, 0.2 * ce[1] + 0.8 * kl[1], atol=1e-6)


def test_gradients_reach_only_the_student(node_federation):
    method = FML(alpha=0.0, beta=0.0, **QUICK)
    client = client_of(node_federation, method)
    own, copilot = (outputs(client.state[which], client.graph) for which in ("model", "copilot"))
    own_loss, copilot_loss = method.losses(client, client.graph, own, copilot)
    own_loss.backward()
    assert client.state["copilot"].layers[0].weight.grad is None
    assert client.state["model"].layers[0].weight.grad.abs().sum() > 0
    client.state["model"].zero_grad()
    copilot_loss.backward()
    assert client.state["model"].layers[0].weight.grad is None
    assert client.state["copilot"].layers[0].weight.grad.abs().sum() > 0


def test_teaching_is_over_all_nodes_or_the_training_ones(node_federation):
    client = client_of(node_federation, FML(**QUICK))
    graph = client.graph
    t, s = torch.randn(2, graph.num_nodes, 3, generator=torch.Generator().manual_seed(0))
    assert torch.isclose(FML(**QUICK).taught(graph, t, s), divergence(t, s))
    assert torch.isclose(
        FML(over="train", **QUICK).taught(graph, t, s), divergence(t[graph.train], s[graph.train])
    )


def test_equal_logits_teach_nothing():
    t = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    assert divergence(t, t + 7).abs() < 1e-6


def test_alpha_1_is_local_training_and_beta_1_is_fedavg(federation):
    names = federation.names
    result = run(
        "fml", federation, model=MODEL, rounds=3, dropout=0.0, alpha=1.0, beta=1.0, **QUICK
    )
    assert gap(result, run("local", federation, model=MODEL, rounds=3, dropout=0.0), names) < 1e-6
    averaged = run("fedavg", federation, model=MODEL, rounds=3, dropout=0.0)
    assert gap(result, averaged, ["server"]) < 1e-6
    assert (
        gap(run("fml", federation, model=MODEL, rounds=3, dropout=0.0, **QUICK), result, names)
        > 1e-4
    )


def test_messages_hold_only_the_copilot_for_any_own_model(node_federation, trainings):
    seen = trainings()
    run(
        "fml",
        node_federation,
        model="gcn-2x8,gat-2x16,sage-2x24,gin-2x8",
        rounds=2,
        copilot="sgc-2x8",
    )
    size = 12 * 8 + 8 + 8 * 3 + 3
    for sent, replies in seen:
        for messages in (sent, replies):
            assert all(
                sum(t.numel() for t in flatten(m).values()) == size for m in messages.values()
            )


@pytest.mark.parametrize("copilot", ["gcn-2x8", "gat-2x8", "sage-2x8", "gin-2x8", "sgc-2x8"])
def test_the_copilot_can_have_any_architecture(node_federation, copilot):
    result = run("fml", node_federation, model="gcn-2x8,sage-2x8", rounds=2, copilot=copilot)
    assert result.summary["status"] == "completed"


def test_an_unknown_copilot_is_refused_by_name(node_federation):
    with pytest.raises(ConfigError, match=r"method\.copilot: .*'gnc'.*gcn"):
        run("fml", node_federation, copilot="gnc-2x8")


@pytest.mark.parametrize("copilot", ["gat-2x12", "gcn-2x8-8-8"])
def test_a_copilot_that_cannot_be_built_is_refused_before_anything_is_written(
    node_federation, copilot, tmp_path
):
    with pytest.raises(ConfigError, match=r"method\.copilot: "):
        run("fml", node_federation, copilot=copilot, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert FML(copilot=" GCN-2x8").copilot == "gcn-2x8"


def test_a_client_with_one_class_takes_part(node_federation):
    first, *rest = node_federation.graphs
    one = replace(
        first, train=first.train & (first.y == 0), test=first.test | (first.train & (first.y != 0))
    )
    assert (
        run(
            "fml",
            replace(node_federation, graphs=(one, *rest), whole=None),
            model=MODEL,
            rounds=2,
            **QUICK,
        ).summary["status"]
        == "completed"
    )
