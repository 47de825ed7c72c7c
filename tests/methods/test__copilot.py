"""WithCopilot, which FML, FedKD and FedGKC share. Their own tests cover the rest."""

import pytest
import torch

from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.errors import ConfigError
from fedloom.methods._shared.copilot import WithCopilot
from fedloom.nn.distillation import divergence


class Both(WithCopilot):
    """Both models learn from labels, and the copilot also from the own model."""

    def losses(self, client, batch, own, copilot):
        return client.loss(own[1], batch), client.loss(copilot[1], batch) + self.taught(
            batch, own[1], copilot[1]
        )

    def run(self, server):
        """Not used in these tests."""


@pytest.fixture
def client(node_federation):
    graph = node_federation.graphs[0]
    facts = Facts(graph.num_features, graph.num_classes, "node", ("a",), ("sage-2x8",))
    return Client("a", graph, facts)


def test_the_divergence_equals_kl_and_teaches_only_the_student():
    teacher, student = torch.randn(5, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    p, q = teacher.softmax(1), student.softmax(1)
    loss = divergence(teacher, student)
    assert torch.allclose(loss, (p * (p / q).log()).sum(1).mean(), atol=1e-6)
    loss.backward()
    assert teacher.grad is None
    assert torch.allclose(student.grad, ((q - p) / 5).detach(), atol=1e-6)
    assert divergence(student, student.detach()) == pytest.approx(0, abs=1e-6)


def test_a_setting_says_on_which_nodes_the_models_teach_each_other(client):
    batch = client.graph
    one, other = (
        torch.randn(batch.num_nodes, batch.num_classes),
        torch.randn(batch.num_nodes, batch.num_classes),
    )
    assert Both(over="all").taught(batch, one, other) == divergence(one, other)
    assert Both(over="train").taught(batch, one, other) == divergence(
        one[batch.train], other[batch.train]
    )


def test_each_model_has_its_own_optimiser_and_both_are_trained(client):
    method = Both(copilot="GCN-2x8 ", epochs=1)
    assert method.copilot == "gcn-2x8"
    method.setup(client)
    held = {
        id(p) for group in client.state["copilot optimizer"].param_groups for p in group["params"]
    }
    assert held == {id(p) for p in client.state["copilot"].parameters()}
    assert not held & {id(p) for p in client.state["model"].parameters()}
    before = {
        name: [p.clone() for p in client.state[name].parameters()] for name in ("model", "copilot")
    }
    method.descend(client, client.state["model"])
    for name, old in before.items():
        assert any(
            not torch.equal(p, q) for p, q in zip(client.state[name].parameters(), old, strict=True)
        ), name


def test_errors_about_the_copilot_name_its_setting(client):
    with pytest.raises(ConfigError, match=r"method\.copilot: .*'gnc'"):
        Both(copilot="gnc-2x8")
