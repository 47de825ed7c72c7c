"""FedTGP: margin, contrast, and what travels."""

import math

import pytest
import torch
from tests.methods.test_fedproto import MODEL, same

from fedloom.errors import ConfigError
from fedloom.experiments.run import run
from fedloom.methods.fedtgp import Anchors, FedTGP

pytestmark = pytest.mark.usefixtures("reference_engine")

NEEDS = {"margin_cap": {"server_lr": 0.1}}
OTHER = {"floor": 12, "margin_cap": 0.0}


def test_the_margin_is_the_largest_distance_up_to_the_cap():
    q = torch.tensor([[0.0, 0], [3, 4], [0, 1]])
    assert FedTGP().margin(q) == 5
    assert FedTGP(margin_cap=2.0).margin(q) == 2
    assert FedTGP().margin(q[:1]) == 0


def test_the_contrast_is_eq_5():
    anchors, uploads = torch.tensor([[0.0, 0], [1, 0]]), torch.tensor([[0.0, 2], [3, 0]])
    d = [[2, math.sqrt(5)], [3, 2]]
    terms = [
        -math.log(
            math.exp(-(d[i][c] + 0.5)) / (math.exp(-(d[i][c] + 0.5)) + math.exp(-d[i][1 - c]))
        )
        for i, c in ((0, 0), (1, 1))
    ]
    found = FedTGP().contrast(anchors, uploads, torch.tensor([0, 1]), torch.tensor(0.5))
    assert found.item() == pytest.approx(sum(terms) / 2, abs=1e-6)


def test_a_margin_makes_the_contrast_harder():
    torch.manual_seed(0)
    anchors, uploads, label = torch.randn(3, 4), torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    losses = [
        FedTGP().contrast(anchors, uploads, label, torch.tensor(m)).item() for m in (0.0, 0.5, 2.0)
    ]
    assert losses == sorted(losses)
    assert losses[0] < losses[2]


def test_training_moves_the_anchors_towards_their_own_class(node_federation):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        anchors = Anchors(3, 4)
    uploads, label = torch.eye(3, 4).repeat(5, 1), torch.arange(3).repeat(5)
    method = FedTGP()
    optimizer = torch.optim.Adam(anchors.parameters(), lr=0.01)
    first = method.contrast(anchors(), uploads, label, torch.tensor(1.0)).item()
    for _ in range(100):
        optimizer.zero_grad()
        method.contrast(anchors(), uploads, label, torch.tensor(1.0)).backward()
        optimizer.step()
    assert method.contrast(anchors(), uploads, label, torch.tensor(1.0)).item() < first / 2
    assert method.far(uploads[:3], anchors()).argmin(1).tolist() == [0, 1, 2]


def test_only_prototypes_of_own_classes_travel(node_federation, trainings):
    exchanges = trainings()
    run("fedtgp", node_federation, model=MODEL, rounds=2)
    replies = [reply for _, replies in exchanges for reply in replies.values()]
    assert len(replies) == 8
    for reply in replies:
        assert set(reply) == {"prototypes", "present"}
        assert (reply["prototypes"] != 0).any(1).all()


def test_the_first_round_and_all_rounds_without_pull_are_local(node_federation):
    settings = {"model": MODEL, "rounds": 1}
    assert same(
        run("fedtgp", node_federation, **settings), run("local", node_federation, **settings)
    )
    settings["rounds"] = 3
    assert same(
        run("fedtgp", node_federation, pull=0.0, **settings),
        run("local", node_federation, **settings),
        1e-6,
    )
    assert not same(
        run("fedtgp", node_federation, **settings), run("local", node_federation, **settings), 1e-4
    )


def test_embeddings_of_different_widths_are_refused(node_federation):
    with pytest.raises(ConfigError, match="share one embedding width"):
        run("fedtgp", node_federation, model="gcn-2x8,gcn-2x16", rounds=1)
