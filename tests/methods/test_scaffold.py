"""SCAFFOLD: control variates as in the paper."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from fedloom.core.message import flatten, tree_map
from fedloom.engines.loop import Engine
from fedloom.experiments.run import run

pytestmark = pytest.mark.usefixtures("reference_engine")


def record_exchanges(monkeypatch):
    exchanges, original = [], Engine.call
    monkeypatch.setattr(
        Engine,
        "call",
        lambda self, phase, sent: (
            exchanges.append((phase, sent, r := original(self, phase, sent))) or r
        ),
    )
    return exchanges


def test_with_full_participation_the_server_control_is_the_mean_of_the_clients(
    node_federation, monkeypatch
):
    """c = mean c_k after every round. With SGD c_k is the mean gradient of the local steps.

    This is option II.
    """
    exchanges = record_exchanges(monkeypatch)
    run("scaffold", node_federation, model="gcn-2x8", rounds=4, lr=0.1)
    rounds = [(sent, replies) for phase, sent, replies in exchanges if phase == "train"]
    own = {c: tree_map(torch.zeros_like, r["model"]) for c, r in rounds[0][1].items()}
    for (_, replies), (next_sent, _) in pairwise(rounds):
        own = {c: tree_map(torch.add, own[c], r["change"]) for c, r in replies.items()}
        mean = tree_map(lambda *t: sum(t) / len(t), *own.values())
        sent = next_sent[node_federation.names[0]]["control"]
        assert all(torch.allclose(flatten(mean)[k], v, atol=1e-5) for k, v in flatten(sent).items())


def test_a_client_that_takes_no_step_has_no_control(node_federation, monkeypatch):
    """Option II would give it −c, which the server would then add to the common control."""
    exchanges = record_exchanges(monkeypatch)
    first, *others = node_federation.graphs
    idle = replace(first, train=torch.zeros_like(first.train))
    run(
        "scaffold",
        replace(node_federation, graphs=(idle, *others)),
        model="gcn-2x8",
        rounds=3,
        lr=0.1,
    )
    changes = [
        replies[node_federation.names[0]]["change"]
        for phase, _, replies in exchanges
        if phase == "train"
    ]
    assert len(changes) == 3
    assert all(not tensor.any() for change in changes for tensor in change.values())


def test_option_two(node_federation, monkeypatch):
    exchanges = record_exchanges(monkeypatch)
    run("scaffold", node_federation, model="gcn-2x8", rounds=1, lr=0.1, epochs=2)
    _, sent, replies = next(s for s in exchanges if s[0] == "train")
    for client, reply in replies.items():
        for name, change in reply["change"].items():
            expected = (sent[client]["model"][name] - reply["model"][name]) / (2 * 0.1) - sent[
                client
            ]["control"][name]
            assert torch.allclose(change, expected, atol=1e-5)


def test_the_first_round_is_fedavg_with_sgd(node_federation):
    settings = {"model": "gcn-2x8", "rounds": 1, "lr": 0.1, "optimizer": "sgd"}
    one, other = (
        run("scaffold", node_federation, **settings),
        run("fedavg", node_federation, **settings),
    )
    assert all(
        torch.allclose(t, flatten(other.final_models["server"])[k], atol=1e-7)
        for k, t in flatten(one.final_models["server"]).items()
    )
    later = {**settings, "rounds": 3}
    one, other = run("scaffold", node_federation, **later), run("fedavg", node_federation, **later)
    assert not all(
        torch.allclose(t, flatten(other.final_models["server"])[k], atol=1e-5)
        for k, t in flatten(one.final_models["server"]).items()
    )


def test_traffic_is_twice_that_of_fedavg(node_federation):
    one, other = (
        run(m, node_federation, model="gcn-2x8", rounds=2).traffic["phases"]["train"]
        for m in ("scaffold", "fedavg")
    )
    assert one["scalars_up"] == 2 * other["scalars_up"]
    assert one["scalars_down"] == 2 * other["scalars_down"]
