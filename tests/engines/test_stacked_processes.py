"""Worker processes with the stacked engine inside: joined batches, single messages, whole runs."""

from dataclasses import dataclass

import pytest
import torch

import fedloom
from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.core.message import Batch, Message, flatten, joined_batches
from fedloom.core.method import Method
from fedloom.core.phase import phase
from fedloom.data.graph import Graph
from fedloom.engines._workers import added, contents_of, messages_of
from fedloom.engines.stacked_processes import Engine
from fedloom.errors import ConfigError
from fedloom.experiments.run import run
from fedloom.experiments.settings import RunSettings

SIZES = {"a": 3, "b": 9, "c": 8, "d": 4, "e": 5}
NAMES = tuple(SIZES)
NOTHING: dict[str, Message] = {name: {} for name in NAMES}


@dataclass(frozen=True)
class Answers(Method):
    """Phases whose replies have one schema, or several."""

    @phase(number="int64[]", x="=x")
    def same(self, client: Client, x):
        """A reply of the same schema from every client."""
        return {"number": torch.tensor(SIZES[client.name]), "x": x + SIZES[client.name]}

    @phase()
    def different(self, client: Client):
        """A reply whose length depends on the client."""
        return {"x": torch.full((SIZES[client.name],), 1.0)}

    @phase()
    def remember(self, client: Client):
        """Nothing; the client keeps a number."""
        client.state["x"] = torch.tensor(float(SIZES[client.name]))
        return {}

    @phase()
    def draw(self, client: Client):
        """Random numbers."""
        return {"x": torch.rand(2, generator=client.rng("x"))}

    def run(self, server):
        """Not run."""


def graph(nodes):
    return Graph(
        torch.ones(nodes, 4), torch.zeros(2, 0, dtype=torch.int64), torch.arange(nodes) % 2, 2
    )


@pytest.fixture
def engine():
    facts = Facts(4, 2, "node", NAMES, ("gcn-2x4",) * len(NAMES))
    made = Engine(Answers(), [Client(n, graph(SIZES[n]), facts) for n in NAMES], workers=2)
    yield made
    made.close()


def to_all(x: torch.Tensor) -> dict[str, Message]:
    message = {"x": x}
    return dict.fromkeys(NAMES, message)


# ---- batches ----
def test_batches_of_workers_become_one_in_client_order(engine):
    assert engine.held == [["a", "b", "d"], ["c", "e"]]  # so their rows alternate
    x = torch.arange(6.0).view(2, 3)
    replies = engine.call("same", to_all(x))
    assert isinstance(replies, Batch)
    assert replies.clients == NAMES
    assert replies.stacks["number"].tolist() == list(SIZES.values())
    for name, size in SIZES.items():
        assert torch.equal(replies[name]["x"], x + size)


def test_replies_stay_as_they_are_when_the_workers_answer_again(engine):
    first = engine.call("same", to_all(torch.zeros(1000)))
    before = first.stacks["x"].clone()
    engine.call("same", to_all(torch.full((1000,), 7.0)))
    assert torch.equal(first.stacks["x"], before)
    single = engine.call("different", {"b": {}, "a": {}})
    engine.call("same", to_all(torch.full((1000,), 7.0)))
    assert single["b"]["x"].tolist() == [1.0] * 9


def test_some_clients_of_some_workers_can_be_asked(engine):
    for asked in (["c"], ["b", "d"], ["d", "a"], ["e", "b", "a"]):
        replies = engine.call("same", {n: {"x": torch.tensor(1.0)} for n in asked})
        assert isinstance(replies, Batch)
        assert list(replies) == asked
        assert replies.stacks["x"].tolist() == [1.0 + SIZES[n] for n in asked]


def test_every_client_can_get_its_own_message(engine):
    sent = {n: {"x": torch.full((k,), float(k))} for k, n in enumerate(NAMES, 1)}
    replies = engine.call("same", sent)
    assert not isinstance(replies, Batch)  # their shapes differ
    assert list(replies) == list(NAMES)
    for name in NAMES:
        assert torch.equal(replies[name]["x"], sent[name]["x"] + SIZES[name])


def test_replies_of_different_schemas_are_single_messages(engine):
    replies = engine.call("different", NOTHING)
    assert {name: len(reply["x"]) for name, reply in replies.items()} == SIZES
    assert list(replies) == list(NAMES)
    replies = engine.call("remember", NOTHING)
    assert replies == NOTHING


def test_snapshots_restore_the_clients(engine):
    engine.call("remember", NOTHING)
    saved = engine.snapshot()
    assert {name: float(s["state"]["x"]) for name, s in saved.items()} == SIZES
    first = engine.call("draw", NOTHING).stacks["x"]
    again = engine.call("draw", NOTHING).stacks["x"]
    assert not torch.equal(first, again)
    streams = engine.snapshot()
    later = engine.call("draw", NOTHING).stacks["x"]
    engine.restore(streams)
    assert torch.equal(engine.call("draw", NOTHING).stacks["x"], later)


def test_batches_join_only_if_they_are_complete_and_of_one_schema():
    one = Batch(("c", "a"), {"x": torch.tensor([[3.0], [1.0]])})
    two = Batch(("b",), {"x": torch.tensor([[2.0]])})
    whole = joined_batches([one, two], ("a", "b", "c"))
    assert whole.clients == ("a", "b", "c")
    assert whole.stacks["x"].tolist() == [[1.0], [2.0], [3.0]]
    assert joined_batches([], ()) is None
    assert joined_batches([one], ("a", "b", "c")) is None
    for other in (
        {"x": torch.zeros(1, 2)},
        {"y": torch.zeros(1, 1)},
        {"x": torch.zeros(1, 1).int()},
    ):
        assert joined_batches([one, Batch(("b",), other)], ("a", "b", "c")) is None


def test_contents_are_messages_again():
    shared, own = torch.ones(2), torch.zeros(2)
    messages = {"a": {"m": {"x": shared}}, "b": {"m": {"x": shared}}, "c": {"m": {"x": own}}}
    contents = contents_of(messages)
    assert [content.clients for content in contents] == [["a", "b"], ["c"]]
    assert {c: flatten(m) for c, m in messages_of(contents).items()} == {
        c: flatten(m) for c, m in messages.items()
    }
    batch = Batch(("a", "b"), {"m/x": torch.ones(2, 3)})
    (content,) = contents_of(batch)
    assert content.stacked
    again = messages_of([content])
    assert isinstance(again, Batch)
    assert (again.clients, again.stacks) == (batch.clients, batch.stacks)
    mixed = messages_of([content, *contents_of({"c": {}})])
    assert list(mixed) == ["a", "b", "c"]
    assert torch.equal(mixed["b"]["m"]["x"], torch.ones(3))


# ---- settings ----
def test_a_quorum_below_1_needs_another_engine():
    assert RunSettings(engine="stacked_processes", workers=3).workers == 3
    with pytest.raises(ConfigError, match=r"run\.quorum is 0\.5, engine 'stacked_processes'"):
        RunSettings(engine="stacked_processes", quorum=0.5)


# ---- whole runs ----
def weights_of(result):
    return {
        f"{owner}/{name}": tensor
        for owner, model in result.final_models.items()
        for name, tensor in flatten(model).items()
    }


def largest_difference(one, other):
    one, other = weights_of(one), weights_of(other)
    assert one.keys() == other.keys()
    return max(float((one[key] - other[key]).abs().max()) for key in one)


@pytest.mark.parametrize("model", ["gcn-2x8", "gcn-2x8,sgc-2x8"])
def test_mixed_models_and_partial_participation_agree_with_stacked(model, node_federation):
    settings = {"model": model, "rounds": 3, "participation": 0.5, "optimizer": "sgd"}
    one, other = (
        run("fedproto", node_federation, engine=engine, **settings)
        for engine in ("stacked", "stacked_processes")
    )
    assert one.traffic == other.traffic
    assert largest_difference(one, other) < 1e-5


def test_secure_runs_agree_with_stacked(node_federation):
    settings = {"model": "gcn-2x8", "rounds": 2, "secure": True, "optimizer": "sgd"}
    one, other = (
        run("fedavg", node_federation, engine=engine, **settings)
        for engine in ("stacked", "stacked_processes")
    )
    assert one.traffic == other.traffic
    assert largest_difference(one, other) < 1e-5


class Killed(BaseException):
    """Stands for whatever ends a process between two rounds."""


def test_a_killed_run_resumes_with_the_same_bits(node_federation, tmp_path):
    settings = {"model": "gcn-2x8", "rounds": 4, "checkpoint_every": 1, "workers": 2}
    settings |= {"engine": "stacked_processes"}
    unbroken = run("scaffold", node_federation, **settings)

    def die(entry):
        if entry["round"] == 3:
            raise Killed

    with pytest.raises(Killed):
        run("scaffold", node_federation, out=tmp_path / "x", callbacks=die, **settings)
    resumed = run("scaffold", node_federation, out=tmp_path / "x", resume=True, **settings)
    assert resumed.summary["history_hash"] == unbroken.summary["history_hash"]
    assert largest_difference(resumed, unbroken) == 0


def test_a_run_says_how_its_workers_ran(node_federation):
    result = fedloom.run(
        "fedavg", node_federation, model="gcn-2x8", rounds=1, engine="stacked_processes", workers=2
    )
    assert result.summary["engine"] == "stacked_processes"
    details = result.summary["engine_details"]
    assert (details["workers"], details["clients_per_worker"]) == (2, [2, 2])
    assert details["clients_per_group"] == [2, 2]
    stacked = fedloom.run(
        "fedavg", node_federation, model="gcn-2x8", rounds=1, engine="stacked"
    ).summary["engine_details"]
    assert details["phases"] == stacked["phases"]
    assert details["phases"]["train"]["recorded"] == 4


def test_details_add_up():
    one = {"a": [1], "b": {"x": 1, "y": 2}, "why": "so"}
    other = {"a": [2, 3], "b": {"x": 10}, "c": 4, "why": "else"}
    assert added(one, other) == {"a": [1, 2, 3], "b": {"x": 11, "y": 2}, "c": 4, "why": "so"}


def test_a_run_keeps_the_models_of_all_clients(node_federation):
    result = fedloom.run(
        "fedavg", node_federation, model="gcn-2x8", rounds=1, engine="stacked_processes", workers=2
    )
    assert len(result.models) == 1 + node_federation.num_clients
