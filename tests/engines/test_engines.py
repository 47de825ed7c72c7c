"""Engines: they run phases, copy messages, and restore snapshots."""

import json
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch

from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.core.message import flatten, unflatten
from fedloom.core.method import Method
from fedloom.core.phase import phase
from fedloom.data.graph import Graph
from fedloom.engines import engine_class, engine_names
from fedloom.errors import ConfigError, MessageError
from fedloom.nn.training import make_optimizer, step

NAMES = ("a", "b")


@dataclass(frozen=True)
class Toy(Method):
    """Trains on noise, and sends back what it gets."""

    @phase(x="=x")
    def mirror(self, client: Client, x):
        """Keeps what came, keeps what it answers, and spoils what came."""
        client.state["got"] = x
        client.state["sent"] = {"x": x + 1}
        x.zero_()
        return client.state["sent"]

    @phase()
    def setup(self, client: Client):
        """A model and its optimiser."""
        client.state["model"] = model = client.build()
        client.state["optimizer"] = make_optimizer("adam", model.parameters(), 0.01, 0.0)
        return {}

    @phase(loss="float32[]")
    def train(self, client: Client):
        """A step with dropout."""
        loss = client.loss(client.state["model"](client.graph, client.rng("dropout")), client.graph)
        step(client.state["optimizer"], loss)
        client.state["last"] = loss.detach()
        return {"loss": loss}

    def run(self, server):
        """Not used here."""


def clients():
    facts = Facts(4, 2, "node", NAMES, ("gcn-2x4",) * 2)
    for name in NAMES:
        rng = torch.Generator().manual_seed(len(name))
        every_node = torch.ones(8, dtype=torch.bool)
        x, ends = torch.randn(8, 4, generator=rng), torch.randint(8, (2, 20), generator=rng)
        yield Client(name, Graph(x, ends, torch.arange(8) % 2, 2, train=every_node), facts)


@pytest.fixture
def make(request):
    """Makes an engine of that name over the clients; it is closed after the test."""

    def make(name):
        if name == "ray":
            request.getfixturevalue("local_ray")
        engine = engine_class(name)(Toy(), clients())
        request.addfinalizer(engine.close)
        return engine

    return make


# The parties of the flower engine are processes that keep their state; see tests/deploy.
@pytest.fixture(
    params=[
        pytest.param(name, marks=pytest.mark.slow if name == "ray" else ())
        for name in engine_names()
        if name != "flower"
    ]
)
def engine(request, make):
    return make(request.param)


def name_of(engine):
    return type(engine).__module__.split(".")[2]  # fedloom.engines.NAME


def state_of(engine, client):
    return engine.snapshot().get(client, {}).get("state", {})


def test_engines_are_found_by_name():
    assert {"loop", "wire", "processes", "ray"} <= set(engine_names())
    assert not any(name.startswith("_") for name in engine_names())
    with pytest.raises(ConfigError, match=r"'lop'. Did you mean 'loop'\? Valid: .*wire"):
        engine_class("lop")


def test_the_loop_engine_does_not_load_the_stacked_engine():
    """The reference shares no code with the engine that it checks."""
    program = (
        "import sys, fedloom.engines.loop\n"
        "print(*(m for m in sys.modules if m == 'greenlet' or m.startswith('fedloom.engines')))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    loaded = set(ran.stdout.split())
    assert "fedloom.engines.loop" in loaded
    assert loaded <= {"fedloom.engines", "fedloom.engines.base", "fedloom.engines.loop"}


def test_clients_with_a_message_are_called_with_their_own(engine):
    replies = engine.call("mirror", {"b": {"x": torch.tensor([5.0])}})
    assert list(replies) == ["b"]
    assert replies["b"]["x"].tolist() == [6]
    assert state_of(engine, "a") == {}
    both = engine.call(
        "mirror", {name: {"x": torch.tensor([float(k)])} for k, name in enumerate(NAMES)}
    )
    assert [both[name]["x"].item() for name in NAMES] == [1, 2]


def test_messages_share_no_memory(engine):
    x = torch.ones(2)
    replies = engine.call("mirror", {name: {"x": x} for name in NAMES})
    assert x.tolist() == [1, 1]
    assert all(reply["x"].tolist() == [2, 2] for reply in replies.values())
    replies["a"]["x"].fill_(7)
    assert state_of(engine, "a")["sent"]["x"].tolist() == [2, 2]
    assert replies["b"]["x"].tolist() == [2, 2]
    engine.call("mirror", {"b": {"x": torch.full((2,), 5.0)}})
    assert state_of(engine, "a")["got"].tolist() == [0, 0]  # as the client itself left it
    assert state_of(engine, "a")["sent"]["x"].tolist() == [2, 2]


def test_replies_are_detached(engine):
    engine.call("setup", {name: {} for name in NAMES})
    assert not any(
        r["loss"].requires_grad for r in engine.call("train", {name: {} for name in NAMES}).values()
    )


def test_engines_are_bit_identical_to_the_loop_or_stacked_up_to_rounding(engine, make):
    to_all = {name: {} for name in NAMES}
    losses = []
    for one in (make("loop"), engine):
        one.call("setup", to_all)
        losses.append(
            [one.call("train", to_all)[c]["loss"].item() for _ in range(3) for c in NAMES]
        )
    stacked = name_of(engine) == "stacked"
    assert losses[1] == (pytest.approx(losses[0], abs=1e-6) if stacked else losses[0])


def test_models_has_the_clients_that_have_a_model(engine):
    assert engine.models() == {}
    engine.call("setup", {"b": {}})
    engine.call("train", {"b": {}})
    ((name, model),) = engine.models().items()
    assert name == "b"
    assert flatten(model).keys() == flatten(state_of(engine, "b")["model"]).keys()
    assert all(
        torch.equal(tensor, state_of(engine, "b")["model"][key]) for key, tensor in model.items()
    )


def test_details_are_json(engine):
    assert json.loads(json.dumps(engine.details())) == engine.details()


def test_a_restored_engine_continues_like_the_saved_one(engine, make):
    to_all = {name: {} for name in NAMES}
    engine.call("setup", to_all)
    for _ in range(3):
        engine.call("train", to_all)
    saved = unflatten(flatten(engine.snapshot()))
    again = make(name_of(engine))
    again.call("setup", to_all)
    again.restore(saved)
    one, other = ([e.call("train", to_all) for _ in range(2)] for e in (engine, again))
    assert all(
        torch.equal(x[c]["loss"], y[c]["loss"])
        for x, y in zip(one, other, strict=True)
        for c in NAMES
    )
    assert all(
        torch.equal(t, flatten(again.snapshot())[name])
        for name, t in flatten(engine.snapshot()).items()
    )


def test_the_wire_refuses_malformed_messages_in_both_directions():
    engine = engine_class("wire")(Toy(), clients())
    with pytest.raises(MessageError, match="'x' holds nan"):
        engine.call("mirror", {"a": {"x": torch.tensor([float("nan")])}})
    assert engine.clients["a"].state == {}  # it never arrived
    with pytest.raises(MessageError, match="'x' is a list"):
        engine.call("mirror", {"a": {"x": [1.0]}})
    with pytest.raises(MessageError, match="'x' holds inf"):
        engine.call("mirror", {"a": {"x": torch.tensor([3e38, 3.4e38], dtype=torch.float32) * 2}})
