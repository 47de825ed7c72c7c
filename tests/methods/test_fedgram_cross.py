"""FedGram over cut edges: its features are those of the whole graph, its W is central."""

import pytest
import torch
from tests.methods.test_fedgram import NEEDS, OTHER, PLAIN, ridge
from tests.methods.test_fedgram import QUICK as OF_FEDGRAM_QUICK

from fedloom.data.partition import divide
from fedloom.data.synthetic import synthetic
from fedloom.engines.loop import Engine as Loop
from fedloom.errors import MessageError
from fedloom.experiments.run import run
from fedloom.methods.fedgram.features import smoothed

__all__ = ["NEEDS", "OTHER"]
QUICK = {**OF_FEDGRAM_QUICK, "hops": "1,2"}


@pytest.fixture(scope="module")
def parts():
    """A graph, and five clients with parts of it that know the edges between them."""
    graph = synthetic(nodes=200, classes=3, features=9, degree=6.0, homophily=0.8, seed=1)
    return graph, divide(graph, 5, "random", 0, split="40/30/30", cross_edges="known")


def go(federation, **settings):
    return run("fedgram-cross", federation, **{**PLAIN, "labels": 0.0, **settings})


@pytest.mark.parametrize("secure", [False, True])
def test_it_is_central_ridge_regression(parts, secure):
    graph, federation = parts
    F = torch.cat([smoothed(graph, 100, 0, 2), torch.ones(200, 1)], 1)
    train = torch.cat([g.node_id[g.train] for g in federation.graphs])
    Y = torch.nn.functional.one_hot(graph.y[train], 3).float()
    expected = ridge(F[train], Y, 0.5)
    found = go(federation, secure=secure).final_models["server"]["weights"]
    assert torch.allclose(found, expected, atol=1e-4)
    # The control: without the cut edges it is not.
    alone = run("fedgram", federation, **{**PLAIN, "labels": 0.0}).final_models["server"]["weights"]
    assert not torch.allclose(alone, expected, atol=1e-2)


def test_narrow_projections_of_hops_are_compared(parts):
    _, federation = parts
    result = go(federation, hops="0,2", sketch=4)
    phases = result.traffic["phases"]
    assert phases["write_sums"]["messages"] == 2 * 5  # one exchange per hop of the largest map
    assert result.summary["notes"]["map"] in (0, 1)


def test_a_sum_of_another_width_is_refused(parts, monkeypatch):
    _, federation = parts
    original = Loop.call

    def call(self, phase, sent):
        replies = original(self, phase, sent)
        if phase != "write_sums":
            return replies
        for written in replies.values():
            for message in written.values():
                message["sums"] = message["sums"][:, :4]
        return replies

    monkeypatch.setattr(Loop, "call", call)
    with pytest.raises(MessageError, match="tensor 'sums' has 4 columns, expected 9"):
        go(federation)
