"""The stacked engine: groups, details, and agreement with the loop in further settings."""

from dataclasses import replace

import pytest
import torch

import fedloom
from fedloom.core.facts import Facts
from fedloom.core.message import flatten
from fedloom.data.synthetic import synthetic
from fedloom.engines.stacked import engine as stacked
from fedloom.nn import private_torch


@pytest.fixture(scope="module")
def federation():
    return fedloom.divide(synthetic(300, classes=4, features=16, seed=0), 6, "random", 0)


def both(method, federation, **settings):
    loop, other = (
        fedloom.run(method, federation, rounds=3, engine=engine, **settings)
        for engine in ("loop", "stacked")
    )
    one, two = flatten(loop.final_models), flatten(other.final_models)
    assert one.keys() == two.keys()
    return max((one[name] - two[name]).abs().max().item() for name in one), loop, other


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "scaffold", "fedproto", "fedgkc", "fedpg"])
def test_partial_participation(method, federation):
    off, loop, other = both(method, federation, participation=0.5)
    assert off < 1e-5
    assert loop.traffic == other.traffic


@pytest.mark.parametrize("model", ["gcn", "gat-2x16", "gin", "gcn,sgc-2,gat-2x16"])
def test_models_of_all_kinds(model, federation):
    off, _, other = both(
        "fedproto",
        federation,
        model=model.replace("gcn,", "gcn-2x16,").replace("sgc-2", "sgc-2x16"),
    )
    assert off < 1e-5
    done = other.summary["engine_details"]["phases"]["train"]
    assert done["batched"] > 5 * done["single"]


def test_small_groups_give_the_same_result_as_one(federation, monkeypatch):
    _, _, one_group = both("fedavg", federation)
    assert one_group.summary["engine_details"]["clients_per_group"] == [6]
    facts = Facts(
        federation.num_features,
        federation.num_classes,
        "node",
        federation.names,
        ("gcn",) * federation.num_clients,
    )
    size = stacked.activations(facts, federation.names[0], federation.graphs[0].num_nodes)
    monkeypatch.setattr(stacked, "GROUP_BYTES", 2.5 * size)
    off, _, in_groups = both("fedavg", federation)
    assert in_groups.summary["engine_details"]["clients_per_group"] == [2, 2, 2]
    assert off < 1e-5
    monkeypatch.setattr(stacked, "GROUP_BYTES", 0)
    off, _, alone = both("fedavg", federation)
    assert alone.summary["engine_details"]["clients_per_group"] == [1] * 6
    assert off < 1e-5


def test_a_run_can_be_secure(federation):
    off, _, _ = both("fedavg", federation, secure=True)
    assert off < 1e-5


def test_a_stopped_run_resumes(federation, tmp_path):
    settings = {"engine": "stacked", "checkpoint_every": 2}
    whole = fedloom.run("fedavg", federation, rounds=5, out=tmp_path / "whole", **settings)

    def stop(entry):
        if entry["round"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedloom.run(
            "fedavg", federation, rounds=5, out=tmp_path / "broken", callbacks=stop, **settings
        )
    again = fedloom.run(
        "fedavg", federation, rounds=5, out=tmp_path / "broken", resume=True, **settings
    )
    one, two = flatten(whole.final_models), flatten(again.final_models)
    assert all(torch.allclose(one[name], two[name], atol=1e-6) for name in one)


def test_equal_seeds_are_bit_identical(federation):
    one, again = (fedloom.run("fedgkc", federation, rounds=3, engine="stacked") for _ in range(2))
    assert one.summary["history_hash"] == again.summary["history_hash"]


def test_clients_without_training_items(federation):
    nobody = torch.zeros_like(federation.graphs[2].train)
    graphs = list(federation.graphs)
    graphs[2] = replace(graphs[2], train=nobody)
    off, _, _ = both("fedavg", replace(federation, graphs=tuple(graphs)))
    assert off < 1e-5


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "scaffold"])
def test_results_are_the_same_without_private_names_of_pytorch(method, federation, monkeypatch):
    with_them = fedloom.run(method, federation, rounds=3, engine="stacked")
    monkeypatch.setattr(private_torch, "_has_lazy_clone", False)
    monkeypatch.setattr(private_torch, "_has_version", False)
    without = fedloom.run(method, federation, rounds=3, engine="stacked")
    one, two = flatten(with_them.models), flatten(without.models)
    assert all(torch.equal(one[name], two[name]) for name in one)
