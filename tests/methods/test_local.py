"""Local: clients do not communicate."""

from dataclasses import replace

import pytest
import torch

from fedloom.core.message import flatten
from fedloom.experiments.run import run

pytestmark = pytest.mark.usefixtures("reference_engine")


def test_only_scores_travel(federation):
    traffic = run("local", federation, model="gcn-2x8", rounds=2).traffic
    assert (
        traffic["scalars_up"]
        == traffic["scalars_down"]
        == traffic["bytes_up"]
        == traffic["bytes_down"]
        == 0
    )
    assert set(traffic["phases"]) == {"evaluate"}


def test_a_client_does_not_depend_on_the_others(node_federation):
    settings = {"model": "gcn-2x8", "rounds": 3}
    together = run("local", node_federation, **settings)
    alone = run(
        "local",
        replace(
            node_federation, graphs=node_federation.graphs[1:2], names=node_federation.names[1:2]
        ),
        **settings,
    )
    name = node_federation.names[1]
    assert all(
        torch.equal(flatten(together.final_models[name])[k], t)
        for k, t in flatten(alone.final_models[name]).items()
    )


def test_it_learns(node_federation):
    untrained = run("local", node_federation, model="gcn-2x16", rounds=1, epochs=1, lr=1e-6)
    trained = run("local", node_federation, model="gcn-2x16", rounds=30)
    assert trained.accuracy > untrained.accuracy + 0.1
