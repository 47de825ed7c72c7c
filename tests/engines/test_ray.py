"""Ray with two local workers: bit-identical to the loop for methods of each kind."""

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from tests.methods import test_fedgh, test_opfgl

from fedloom.core.client import Client
from fedloom.core.message import flatten
from fedloom.core.phase import phase
from fedloom.engines import engine_class
from fedloom.engines._workers import WorkerError
from fedloom.errors import ConfigError, Refusal
from fedloom.experiments.run import run
from fedloom.methods.local import Local

pytestmark = pytest.mark.slow
OWN_METHOD = str(Path(__file__).resolve().parents[2] / "examples" / "own_method.py")


@dataclass(frozen=True)
class Odd(Local):
    """Fails in three ways."""

    @phase()
    def refuse(self, client: Client):
        """An error of fedloom's."""
        raise Refusal(f"client {client.name!r} refuses")

    @phase()
    def fail(self, client: Client):
        """An error of the program."""
        return {"x": {}["not there"]}

    @phase()
    def crash(self, client: Client):
        """The end of the process."""
        os._exit(1)

    def run(self, server):
        """All three."""
        for wanted, where in (
            (Refusal, self.refuse),
            (WorkerError, self.fail),
            (WorkerError, self.crash),
        ):
            with pytest.raises(wanted) as failure:
                server.ask(where)
            server.notes[str(failure.value)] = 1.0


def agree(one, other):
    assert one.summary["history_hash"] == other.summary["history_hash"]
    assert one.traffic == other.traffic
    one, other = (
        {owner: flatten(model) for owner, model in result.final_models.items()}
        for result in (one, other)
    )
    assert one.keys() == other.keys()
    assert all(
        torch.equal(tensor, other[owner][name])
        for owner, model in one.items()
        for name, tensor in model.items()
    )


def test_a_missing_ray_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "fedloom.engines.ray", raising=False)
    with pytest.raises(
        ConfigError, match=r"run\.engine 'ray' needs Ray: pip install 'fedloom\[ray\]'"
    ):
        engine_class("ray")


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fedavg", {}),
        ("fedproto", {"model": "gcn-2x8,gat-2x8,sage-2x8"}),
        ("fedstruct", {"secure": True}),
        ("opfgl", {**test_opfgl.QUICK, "secure": True}),
        ("fedgh", test_fedgh.QUICK),
        (OWN_METHOD, {}),
    ],
)
def test_methods_of_every_kind_are_bit_identical_to_the_loop(
    method, settings, cross_federation, local_ray
):
    settings = {"model": "gcn-2x8", "rounds": 2, **settings}
    one, other = (
        run(method, cross_federation, engine=engine, **settings) for engine in ("loop", "ray")
    )
    assert other.summary["engine_details"] == {
        "threads": 1,
        "workers": 2,
        "clients_per_worker": [2, 2],
    }
    agree(one, other)


@pytest.mark.parametrize("which", ["inductive", "graphs"])
def test_workers_receive_inductive_and_graph_tasks(
    which, node_federation, graph_federation, local_ray
):
    federation = (
        replace(node_federation, inductive=True) if which == "inductive" else graph_federation
    )
    agree(
        *(
            run("fedavg", federation, model="gcn-2x8", rounds=2, engine=engine)
            for engine in ("loop", "ray")
        )
    )


def test_errors_keep_their_type_and_a_lost_worker_is_an_error(node_federation, local_ray):
    refused, failed, lost = run(Odd(), node_federation, model="gcn-2x8", engine="ray").summary[
        "notes"
    ]
    assert refused == "client '0' refuses"
    assert failed == "worker 0: KeyError: 'not there'"
    assert "was lost; it had clients" in lost


def test_an_address_without_a_cluster_is_a_configuration_error(monkeypatch):
    ray = pytest.importorskip("ray", reason="the extra 'ray' is not installed")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)

    def refuse(**settings):
        assert settings["address"] == "nowhere:1"
        raise ConnectionError("no answer")

    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.setenv("RAY_ADDRESS", "nowhere:1")
    with pytest.raises(
        ConfigError,
        match=r"run\.engine 'ray': there is no cluster at RAY_ADDRESS=nowhere:1 \(no answer\)",
    ):
        engine_class("ray")(Odd(), ())
