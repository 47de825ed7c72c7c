"""Engines: they run the phase they are asked for, copy what crosses, and can be put back to where they were."""

import json
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
        client.state["model"] = net = client.build()
        client.state["optimizer"] = make_optimizer("adam", net.parameters(), 0.01, 0.0)
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
        everybody = torch.ones(8, dtype=torch.bool)
        x, ends = torch.randn(8, 4, generator=rng), torch.randint(8, (2, 20), generator=rng)
        yield Client(name, Graph(x, ends, torch.arange(8) % 2, 2, train=everybody), facts)


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


# Parties of the flower engine are processes that take seconds to start, and show nobody their states: tests/deploy/test_flower.py.
@pytest.fixture(params=[name for name in engine_names() if name != "flower"])
def engine(request, make):
    return make(request.param)


def state_of(engine, client):
    return engine.snapshot().get(client, {}).get("state", {})


def test_engines_are_found_by_name():
    assert {"loop", "wire", "processes", "ray"} <= set(engine_names())
    assert not any(name.startswith("_") for name in engine_names())
    with pytest.raises(ConfigError, match=r"'lop'. Did you mean 'loop'\? Valid: .*wire"):
        engine_class("lop")


def test_only_those_with_a_message_are_called_and_each_gets_its_own(engine):
    replies = engine.call("mirror", {"b": {"x": torch.tensor([5.0])}})
    assert list(replies) == ["b"]
    assert replies["b"]["x"].tolist() == [6]
    assert state_of(engine, "a") == {}
    both = engine.call(
        "mirror", {name: {"x": torch.tensor([float(k)])} for k, name in enumerate(NAMES)}
    )
    assert [both[name]["x"].item() for name in NAMES] == [1, 2]


def test_nothing_that_crosses_is_shared(engine):
    x = torch.ones(2)
    replies = engine.call("mirror", {name: {"x": x} for name in NAMES})
    assert x.tolist() == [1, 1]
    assert all(reply["x"].tolist() == [2, 2] for reply in replies.values())
    replies["a"]["x"].fill_(7)
    assert state_of(engine, "a")["sent"]["x"].tolist() == [2, 2]
    assert replies["b"]["x"].tolist() == [2, 2]
    engine.call("mirror", {"b": {"x": torch.full((2,), 5.0)}})
    assert state_of(engine, "a")["got"].tolist() == [
        0,
        0,
    ]  # it was spoilt there, and nobody has written over it since
    assert state_of(engine, "a")["sent"]["x"].tolist() == [2, 2]


def test_answers_carry_no_graph_of_gradients(engine):
    engine.call("setup", {name: {} for name in NAMES})
    assert not any(
        r["loss"].requires_grad for r in engine.call("train", {name: {} for name in NAMES}).values()
    )


def test_engines_agree_with_the_loop_to_the_bit_or_but_for_rounding(engine, make):
    everybody = {name: {} for name in NAMES}
    losses = []
    for one in (make("loop"), engine):
        one.call("setup", everybody)
        losses.append(
            [one.call("train", everybody)[c]["loss"].item() for _ in range(3) for c in NAMES]
        )
    stacked = type(engine).__module__.endswith(".stacked")
    assert losses[1] == (pytest.approx(losses[0], abs=1e-6) if stacked else losses[0])


def test_an_engine_gives_the_models_of_those_that_have_one(engine):
    assert engine.models() == {}
    engine.call("setup", {"b": {}})
    engine.call("train", {"b": {}})
    ((name, model),) = engine.models().items()
    assert name == "b"
    assert flatten(model).keys() == flatten(state_of(engine, "b")["model"]).keys()
    assert all(
        torch.equal(tensor, state_of(engine, "b")["model"][key]) for key, tensor in model.items()
    )


def test_what_an_engine_says_of_itself_is_a_few_plain_values(engine):
    assert json.loads(json.dumps(engine.about())) == engine.about()


def test_an_engine_put_back_goes_on_as_the_one_that_was_saved(engine, make):
    everybody = {name: {} for name in NAMES}
    engine.call("setup", everybody)
    for _ in range(3):
        engine.call("train", everybody)
    saved = unflatten(flatten(engine.snapshot()))
    again = make(type(engine).__module__.rpartition(".")[2])
    again.call("setup", everybody)
    again.restore(saved)
    one, other = ([e.call("train", everybody) for _ in range(2)] for e in (engine, again))
    assert all(
        torch.equal(x[c]["loss"], y[c]["loss"])
        for x, y in zip(one, other, strict=True)
        for c in NAMES
    )
    assert all(
        torch.equal(t, flatten(again.snapshot())[name])
        for name, t in flatten(engine.snapshot()).items()
    )


def test_the_wire_lets_no_nonsense_through_either_way():
    engine = engine_class("wire")(Toy(), clients())
    with pytest.raises(MessageError, match="'x' holds nan"):
        engine.call("mirror", {"a": {"x": torch.tensor([float("nan")])}})
    assert engine.clients["a"].state == {}  # it never arrived
    with pytest.raises(MessageError, match="'x' is a list"):
        engine.call("mirror", {"a": {"x": [1.0]}})
    with pytest.raises(MessageError, match="'x' holds inf"):
        engine.call("mirror", {"a": {"x": torch.tensor([3e38, 3.4e38], dtype=torch.float32) * 2}})
