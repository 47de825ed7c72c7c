"""Recordings: phases that run once for a whole group, and those that cannot."""

import copy
from dataclasses import dataclass, replace

import pytest
import torch

import fedloom
from fedloom.api import load_weights, phase, step, weights
from fedloom.core.message import flatten
from fedloom.engines.stacked import group_operations
from fedloom.methods.fedavg import FedAvg
from fedloom.methods.local import Local

RECORDED = ["fedavg", "fedprox", "fedopt", "scaffold", "feddc", "local", "lg-fedavg"]


@pytest.fixture(scope="module")
def sparse():
    """Clients with few of many features each: they share most rows of the first layer."""
    graph = fedloom.synthetic(nodes=300, classes=3, features=200, degree=4.0, seed=0)
    drawn = torch.rand(graph.x.shape, generator=torch.Generator().manual_seed(1))
    return fedloom.divide(replace(graph, x=graph.x * (drawn < 0.03)), 6, "random", 0)


def both(method, federation, **settings):
    """The largest difference between the models of the loop and the stacked engine."""
    settings = {"rounds": 4, "model": "gcn-2x16", **settings}
    loop, stacked = (
        fedloom.run(method, federation, engine=engine, **settings) for engine in ("loop", "stacked")
    )
    assert loop.traffic == stacked.traffic
    off = max(
        (one[name] - other[name]).abs().max().item()
        for one, other in (
            (flatten(loop.models), flatten(stacked.models)),
            (flatten(loop.final_models), flatten(stacked.final_models)),
        )
        for name in one
    )
    return off, loop, stacked


def details(result):
    return result.summary["engine_details"]["phases"]


# ---- recorded phases ----


@pytest.mark.parametrize("method", RECORDED)
def test_recorded_phases_agree_with_the_loop(method, sparse):
    off, loop, stacked = both(method, sparse)
    assert details(stacked)["train"] == {"recorded": 24, "batched": 0, "single": 0}
    assert details(stacked)["evaluate"] == {"recorded": 24, "batched": 0, "single": 0}
    assert off < 1e-5
    one, other = ([e["loss"] for e in r.history if "loss" in e] for r in (loop, stacked))
    assert one == pytest.approx(other, abs=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"model": "sage-2x16"},
        {"model": "mlp-2x16"},
        {"model": "sgc-2x16"},
        {"model": "gcn-2x16,sage-2x16", "method": "local"},
        {"optimizer": "sgd", "lr": 0.1},
        {"weight_decay": 0.0},
        {"evaluation": "global"},
        {"class_weight": "balanced"},
        {"auc": True},
        {"finetune": 2},
        {"seed": 7},
    ],
    ids=str,
)
def test_settings_of_recorded_runs(settings, sparse):
    method = settings.get("method", "fedavg")
    off, _, stacked = both(method, sparse, **{k: v for k, v in settings.items() if k != "method"})
    assert off < 1e-5
    assert details(stacked)["train"]["recorded"] == 24


@pytest.fixture
def shared_groups(monkeypatch):
    """Counts how often a group begins to share rows."""
    begun = []
    of = group_operations.SharedStack.of

    def count(*args):
        begun.append(of(*args) is not None)
        return of(*args)

    monkeypatch.setattr(group_operations.SharedStack, "of", count)
    return begun


def test_rows_are_shared_from_the_first_round_to_the_last(sparse, shared_groups):
    off, _, stacked = both("fedavg", sparse)
    assert shared_groups == [True]
    assert off < 1e-5
    assert details(stacked)["train"]["recorded"] == 24


def test_models_with_other_first_layers_do_not_share_rows(sparse, shared_groups):
    assert both("local", sparse)[0] < 1e-5
    assert not any(shared_groups)  # each client begins with weights of its own


def test_dense_features_share_no_rows(shared_groups):
    dense = fedloom.divide(fedloom.synthetic(200, classes=3, features=8, seed=0), 4, "random", 0)
    assert both("fedavg", dense)[0] < 1e-5
    assert shared_groups == []


@pytest.mark.parametrize("method", RECORDED)
def test_some_of_the_clients(method, sparse, shared_groups):
    """Clients with unequal histories share no rows, and Adam counts the steps of each."""
    off, _, stacked = both(method, sparse, participation=0.5, rounds=6)
    assert off < 1e-5
    assert not any(shared_groups)
    # SCAFFOLD and FedDC run in lockstep while only some clients have a state of the last round.
    expected = 12 if method in ("scaffold", "feddc") else 18
    assert details(stacked)["train"]["recorded"] == expected


def test_some_clients_now_and_then_all(sparse):
    off, _, stacked = both("fedavg", sparse, participation=0.5, rounds=5, finetune=3)
    assert off < 1e-5
    assert details(stacked)["tune"]["recorded"] == 18


def test_a_resumed_run_has_the_same_bits(sparse, tmp_path):
    settings = {"engine": "stacked", "model": "gcn-2x16", "rounds": 6, "checkpoint_every": 1}
    whole = fedloom.run("fedavg", sparse, **settings)

    def stop(entry):
        if entry["round"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedloom.run("fedavg", sparse, out=tmp_path / "run", callbacks=stop, **settings)
    again = fedloom.run("fedavg", sparse, out=tmp_path / "run", resume=True, **settings)
    assert whole.summary["history_hash"] == again.summary["history_hash"]
    one, two = flatten(whole.models), flatten(again.models)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_clients_without_training_items_form_a_group(sparse):
    graphs = list(sparse.graphs)
    graphs[2] = replace(graphs[2], train=torch.zeros_like(graphs[2].train))
    off, _, stacked = both("fedavg", replace(sparse, graphs=tuple(graphs)))
    assert off < 1e-5
    assert stacked.summary["engine_details"]["clients_per_group"] == [5, 1]
    assert details(stacked)["train"]["recorded"] == 20


def test_models_that_are_kept_are_those_of_the_best_round(sparse):
    _, loop, stacked = both("fedavg", sparse, rounds=14, epochs=8, lr=0.05)
    assert loop.summary["best_round"] == stacked.summary["best_round"] < 14
    one, last = flatten(stacked.models), flatten(stacked.final_models)
    assert any(not torch.equal(one[name], last[name]) for name in one)


# ---- phases that cannot be recorded ----


@dataclass(frozen=True)
class LooksAtLabels(FedAvg):
    """Trains, draws and loads before it does what has no form for a group."""

    @phase(model="~model", labels="int64[]")
    def train(self, client, model):
        """Trains for one epoch more if the first label is 0."""
        local_model = client.state["model"]
        load_weights(local_model, model)
        self.descend(client, local_model, model)
        first = client.graph.y[client.graph.train][0]
        if first == 0:
            self.descend(client, local_model, model)
        return {"model": weights(local_model), "labels": first}

    def run(self, server):
        """FedAvg without weights."""
        server.ask(self.setup)
        server.state["model"] = server.model()
        for _ in server.rounds(self.rounds):
            replies = server.ask(self.train, model=server.state["model"])
            server.state["model"] = replies.mean()["model"]
            server.evaluate(model=server.state["model"])


def test_a_phase_that_cannot_be_recorded_runs_as_if_nobody_had_tried(sparse):
    off, _, stacked = both(LooksAtLabels, sparse)
    assert off < 1e-5
    assert details(stacked)["train"]["recorded"] == 0
    first = fedloom.run(LooksAtLabels, sparse, engine="stacked", rounds=1, model="gcn-2x16")
    assert "GroupGraph.y" in details(first)["train"]["lockstep"]


@dataclass(frozen=True)
class Fails(Local):
    """Raises an error of its own."""

    @phase()
    def train(self, client):
        """Raises a ValueError."""
        raise ValueError("no such luck")


def test_an_error_of_a_phase_is_raised(sparse):
    with pytest.raises(ValueError, match="no such luck"):
        fedloom.run(Fails, sparse, engine="stacked", rounds=1)


@dataclass(frozen=True)
class Variant(Local):
    """Local training with other steps."""

    how: str = fedloom.api.setting("", "which one")

    @phase()
    def train(self, client):
        """Takes one step."""
        model, graph, rng = client.state["model"], client.graph, client.rng("dropout")
        if self.how == "scaled":  # the cross-entropy has a factor
            loss = client.loss(model(graph, rng), graph)
            step(client.state["optimizer"], loss)
            step(client.state["optimizer"], client.loss(model(graph, rng), graph) * 2)
        elif self.how == "unused":  # logits with dropout that nothing uses still draw
            model(graph, rng)
            step(client.state["optimizer"], client.loss(model(graph, rng), graph))
        elif self.how == "late":  # a score of logits from before the step
            logits = model(client.full_graph)
            step(client.state["optimizer"], client.loss(model(graph, rng), graph))
            client.state["later"] = logits.detach().argmax(1)
        elif self.how == "alias":  # without a copy, these are the weights after the step
            now = weights(model)
            step(client.state["optimizer"], client.loss(model(graph, rng), graph))
            load_weights(model, {n: 0.9 * tensor for n, tensor in now.items()})
        elif self.how == "compare":
            if weights(model)["classifier.bias"].sum() > -1:
                step(client.state["optimizer"], client.loss(model(graph, rng), graph))
        elif self.how == "copy":
            teacher = copy.deepcopy(model)
            step(client.state["optimizer"], client.loss(model(graph, rng), graph))
            load_weights(model, weights(teacher))
        elif self.how == "assign":
            client.class_weight = torch.tensor([1.0, 2.0, 3.0])
            step(client.state["optimizer"], client.loss(model(graph, rng), graph))
        elif self.how == "kept":  # it extrapolates by the change of the last phase
            before = {name: tensor.clone() for name, tensor in weights(model).items()}
            step(client.state["optimizer"], client.loss(model(graph, rng), graph))
            if "change" in client.state:
                change = client.state["change"]
                load_weights(model, {n: t + 0.5 * change[n] for n, t in weights(model).items()})
            after = weights(model)
            client.state["change"] = {n: after[n] - before[n] for n in after}
        return {}


@pytest.mark.parametrize("how", ["unused", "scaled", "late", "alias", "compare", "copy", "assign"])
def test_steps_without_a_form_for_a_group_run_in_lockstep(how, sparse):
    off, _, stacked = both(Variant, sparse, how=how)
    assert off < 1e-5
    assert details(stacked)["train"]["recorded"] == 0


def test_weights_that_are_read_before_a_step_are_those_of_before(sparse):
    off, _, stacked = both(Variant, sparse, how="kept")
    assert off < 1e-5
    assert details(stacked)["train"]["recorded"] == 24
