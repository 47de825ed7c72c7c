"""Declared ranges: what a client claims is checked at the waist, in every engine."""

from dataclasses import dataclass

import pytest
import torch
from tests.faults.schedule import Schedule

from fedloom.core.client import Client
from fedloom.core.phase import Range, phase, said, summed
from fedloom.data.federation import PartySize
from fedloom.errors import MessageError
from fedloom.experiments.run import run
from fedloom.methods.fedavg import FedAvg
from fedloom.methods.opfgl import OpFGL

SETTINGS = {"model": "gcn-2x8", "rounds": 2}
ONE_SHOT = {"model": "gcn-2x8", "condense_steps": 3, "steps": 3, "check_every": 3}
SIZE = {"nodes": 9, "items": 5, "train": 3, "val": 1, "test": 1, "size": 5}


def absences(result):
    return [
        (absence["client"], absence["phase"], absence["cause"])
        for entry in result.history
        for absence in entry.get("absent", ())
    ]


# ---- the syntax ----
@pytest.mark.parametrize(
    ("declared", "good", "bad", "says"),
    [
        ("int64[]", -(2**62), None, ""),
        ("int64[] is size", 5, 6, "holds 6, must be 5, the size that it said at the start"),
        ("int64[] is train", 3, 2, "holds 2, must be 3, the train"),
        ("int64[2] in 0..nodes", [0, 9], [0, 10], "holds 10, must be from 0 to 9, the nodes"),
        ("int64[2] in 0..", [0, 2**62], [1, -1], "holds -1, must be at least 0$"),
        ("float32[2] in -1..1", [-1.0, 1.0], [0.0, 1.5], "holds 1.5, must be from -1 to 1$"),
        ("int64[2] in ..most", [-(2**40), 7], [8, 0], "holds 8, must be from -inf to 7$"),
        ("int64[2] counts train", [1, 2], [2, 2], "adds up to 4, must be from 0 to 3, the train"),
        ("int64[2] counts train", [0, 0], [5, -5], "holds -5, must be from 0 to 3, the train"),
        ("int64[2] counts train", [0, 0], [2**62, 2**62], "adds up to 9.22337203685478e\\+18"),
        ("int64[0] in 0..1", [], None, ""),
    ],
)
def test_a_range_follows_the_tensor(declared, good, bad, says):
    class Limits:
        most = 7

    @phase(x=declared)
    def answer(self, client):
        """Not run here."""

    answer.require_ranges(Limits(), {"x": torch.tensor(good)}, SIZE, "client 'a'")
    if bad is not None:
        with pytest.raises(MessageError, match=f"^client 'a': tensor 'x' {says}"):
            answer.require_ranges(Limits(), {"x": torch.tensor(bad)}, SIZE, "client 'a'")


def test_what_a_client_has_not_said_is_no_bound_from_above():
    @phase(x="int64[] is size", y="int64[] in 0..nodes")
    def answer(self, client):
        """Not run here."""

    large, none = torch.tensor(2**40), torch.tensor(0)
    answer.require_ranges(None, {"x": large, "y": large}, {}, "client 'a'")
    with pytest.raises(MessageError, match="tensor 'y' holds -1, must be at least 0"):
        answer.require_ranges(None, {"x": none, "y": none - 1}, {}, "client 'a'")


@pytest.mark.parametrize("declared", ["int64[] in 3", "int64[] at 0..1", "int64[] counts", "0..1"])
def test_a_range_that_is_none_is_refused(declared):
    with pytest.raises(ValueError, match="which a range may follow"):
        phase(x=declared)


def test_the_size_is_what_training_sees():
    size = PartySize("a", nodes=9, items=5, train=3, val=1, test=1)
    assert said(size, inductive=False) == SIZE
    assert said(size, inductive=True) == {**SIZE, "size": 3}
    empty = PartySize("a", 0, 0, 0, 0, 0)
    assert said(empty, inductive=False)["size"] == 1


# ---- in runs ----
@pytest.mark.usefixtures("reference_engine")
@pytest.mark.parametrize("claim", [2**53, 54, 52, 0])
def test_a_client_that_claims_another_size_is_left_out_by_name(node_federation, monkeypatch, claim):
    Schedule(monkeypatch, {(None, "size", "1"): lambda reply: {"size": torch.tensor(claim)}})
    result = run("fedavg", node_federation, quorum=0.5, **SETTINGS)
    assert result.summary["status"] == "completed"
    said = f"tensor 'size' holds {float(claim):.15g}, must be 53, the size that it said"
    # It is asked again in each round.
    assert [(client, name) for client, name, _ in absences(result)] == [("1", "size")] * 2
    assert all(said in cause for _, _, cause in absences(result))


@pytest.mark.usefixtures("reference_engine")
def test_without_the_range_a_client_that_claims_2_to_the_53_is_the_model(
    node_federation, monkeypatch
):
    monkeypatch.setattr(Range, "check", lambda *_: None)
    Schedule(monkeypatch, {(None, "size", "1"): lambda reply: {"size": torch.tensor(2**53)}})
    result = run("fedavg", node_federation, quorum=0.5, **SETTINGS, evaluation="global")
    assert absences(result) == []
    model, own = (result.final_models[name] for name in ("server", "1"))
    assert all(torch.allclose(model[name], own[name], atol=1e-5) for name in model)


@dataclass(frozen=True)
class Greedy(FedAvg):
    """FedAvg in which client 1 claims a size that it does not have."""

    @phase(size="int64[] is size")
    def size(self, client: Client):
        """Too much at client 1."""
        honest = client.graph.num_items
        return {"size": torch.tensor(2**53 if client.name == "1" else honest)}


@pytest.mark.parametrize("engine", ["loop", "wire", "stacked", "processes"])
def test_every_engine_refuses_a_size_that_was_not_said(node_federation, engine):
    with pytest.raises(MessageError, match=r"client '1' in 'size': tensor 'size' holds 9\.0"):
        run(Greedy, node_federation, engine=engine, **SETTINGS)


@dataclass(frozen=True)
class Miscounts(FedAvg):
    """Its clients count more labels than they have."""

    @summed
    @phase(counts="int64[C] counts train")
    def count_labels(self, client: Client):
        """All items, for each class."""
        return {"counts": torch.full((client.facts.num_classes,), client.graph.num_items)}

    def run(self, server):
        """Only the counts."""
        server.sum(self.count_labels)


def test_in_a_secure_run_the_client_checks_itself(node_federation):
    with pytest.raises(MessageError, match="tensor 'counts' adds up to 144, must be from 0 to 18"):
        run(Miscounts, node_federation, secure=True, **SETTINGS)


# ---- O-pFGL: what the server allocates follows from the counts ----
COUNTS = {
    "a thousand million": ([10**9, 0, 0], "adds up to 1000000000, must be from 0 to 53, the nodes"),
    "one too many": ([53, 1, 0], "adds up to 54, must be from 0 to 53, the nodes"),
    "negative": ([-4, 8, 0], "holds -4, must be from 0 to 53, the nodes"),
}


@pytest.mark.usefixtures("reference_engine")
@pytest.mark.parametrize("kind", COUNTS)
def test_counts_beyond_the_nodes_are_refused(node_federation, monkeypatch, kind):
    counts, says = COUNTS[kind]
    wrong = {(1, "statistics", "1"): lambda reply: {**reply, "count": torch.tensor(counts)}}
    Schedule(monkeypatch, wrong)
    allocated, condense = [], OpFGL.condense

    def condensed(self, target, rng):
        allocated.append(int(target["count"].sum()))
        return condense(self, target, rng)

    monkeypatch.setattr(OpFGL, "condense", condensed)
    result = run("opfgl", node_federation, quorum=0.5, **ONE_SHOT)
    assert result.summary["status"] == "completed"
    (absence,) = absences(result)
    assert absence[:2] == ("1", "statistics")
    assert says in absence[2]
    assert 0 < allocated[0] <= sum(graph.num_nodes for graph in node_federation.graphs)
