"""Runs: the best round, averages over clients, run folders, and runs that end early."""

import gc
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from fedloom.core.client import Client
from fedloom.core.method import Method
from fedloom.core.phase import phase
from fedloom.core.registry import make_method
from fedloom.core.settings import setting
from fedloom.data.federation import Federation
from fedloom.data.graph import Graph
from fedloom.engines.stacked.parameters import ParameterStack
from fedloom.errors import ConfigError, DataError
from fedloom.experiments import run as runs
from fedloom.experiments.result import load_run
from fedloom.experiments.run import run
from fedloom.experiments.settings import RunSettings
from fedloom.nn import metrics
from fedloom.nn.build import build_model

MODEL = "gcn-2x8"


# ---- a method that reads its scores from a script ----
@dataclass(frozen=True)
class Scripted(Method):
    """Learns nothing. In round k each client has the scores that the script gives for it."""

    tune: int = setting(0, "evaluations of another stage after the rounds", at_least=0)
    fail_in: int = setting(0, "round that ends in an error", at_least=0)

    # {client: [(val, test) of each round]}, each as (hits, items)
    script: ClassVar[dict[str, list[tuple[tuple[int, int], tuple[int, int]]]]] = {}
    pause: ClassVar[float] = 0.0

    @phase()
    def setup(self, client):
        """Sets a client up."""
        client.state["model"], client.state["turn"] = client.build(), torch.tensor(0)
        return {}

    @phase(turn="int64[]")
    def advance(self, client):
        """Runs one round."""
        client.state["turn"] += 1
        return {"turn": client.state["turn"]}

    @phase(val="int64[C,C]", test="int64[C,C]", auc="float32[2]")
    def evaluate(self, client, model=None):
        """Returns the scores of the script."""
        time.sleep(self.pause)
        matrices = []
        for hits, items in self.script[client.name][int(client.state["turn"]) - 1]:
            matrices.append(torch.tensor([[hits, items - hits], [0, 0]]))
        return {"val": matrices[0], "test": matrices[1], "auc": torch.tensor([-1.0, -1.0])}

    def run(self, server):
        """Runs the rounds, then another stage if there is one."""
        server.ask(self.setup)
        for number in server.rounds(self.rounds):
            server.ask(self.advance)
            if number == self.fail_in:
                raise RuntimeError("the disk is on fire")
            server.evaluate()
        for _ in range(self.tune):
            server.ask(self.advance)
            server.evaluate(stage="tune")


def party(nodes, train=1, val=1):
    number = torch.arange(nodes)
    masks = {
        "train": number < train,
        "val": (number >= train) & (number < train + val),
        "test": number >= train + val,
    }
    return Graph(torch.ones(nodes, 2), torch.zeros(2, 0, dtype=torch.int64), number % 2, 2, **masks)


PAIR = Federation(
    (party(6, 2, 1), party(2, 1, 0)),
    names=("a", "b"),
    about={"dataset": "toy", "partition": "by hand", "clients": 2},
)


@pytest.fixture
def play(monkeypatch):
    """Returns a function that runs a script: validation (and test) hits of 10 per round."""

    def go(a, b=None, test_a=None, test_b=None, federation=PAIR, **settings):
        b = a if b is None else b
        script = {
            name: [
                (v if isinstance(v, tuple) else (v, 10), t if isinstance(t, tuple) else (t, 10))
                for v, t in zip(val, test, strict=True)
            ]
            for name, val, test in (("a", a, test_a or a), ("b", b, test_b or b))
        }
        monkeypatch.setattr(Scripted, "script", script)
        own = {key: settings.pop(key) for key in ("tune", "fail_in") if key in settings}
        method = Scripted(rounds=settings.pop("rounds", len(a) - own.get("tune", 0)), **own)
        return run(method, federation, model="mlp-2x4", **settings)

    return go


def rounds_scored(result):
    return [entry["round"] for entry in result.history if "accuracy" in entry]


# ---- which round counts ----
def test_the_best_round_is_the_first_with_the_highest_validation_accuracy(play):
    result = play([3, 7, 5, 7, 6], test_a=[1, 2, 3, 9, 5])
    assert result.summary["best_round"] == 2
    assert result.accuracy == pytest.approx(0.2 * 6 / 8 + 0.7 * 2 / 8)  # test score of round 2
    assert result.summary["val_accuracy"] == pytest.approx(0.7)
    assert result.summary["final_accuracy"] == pytest.approx(0.5 * 6 / 8 + 0.6 * 2 / 8)
    assert result.summary["rounds"] == 5


def test_test_scores_do_not_affect_the_choice(play):
    one = play([3, 7, 5], test_a=[1, 2, 3])
    other = play([3, 7, 5], test_a=[9, 2, 10])
    assert one.summary["best_round"] == other.summary["best_round"] == 2
    assert one.accuracy == other.accuracy


def test_without_validation_items_the_last_round_counts(play):
    result = play([(0, 0)] * 3, test_a=[9, 5, 4], test_b=[9, 5, 8])
    assert (result.summary["best_round"], result.summary["val_accuracy"]) == (3, None)
    assert (
        result.accuracy
        == result.summary["final_accuracy"]
        == pytest.approx(0.4 * 6 / 8 + 0.8 * 2 / 8)
    )


def test_any_validation_accuracy_beats_none(play):
    assert play([(0, 0), 0, (0, 0)], test_a=[1, 1, 1]).summary["best_round"] == 2


def test_averages_are_weighted_by_size_and_plain(play):
    result = play([4], [8], test_a=[5], test_b=[9])
    assert result.accuracy == pytest.approx(0.5 * 6 / 8 + 0.9 * 2 / 8)
    assert result.summary["accuracy_mean"] == pytest.approx(0.7)
    assert result.summary["val_accuracy"] == pytest.approx(0.4 * 6 / 8 + 0.8 * 2 / 8)
    assert result.history[0]["val_accuracy_mean"] == pytest.approx(0.6)
    f1 = [2 * 5 / 15, 2 * 9 / 19]  # of the class that has items; that of the other one is 0
    assert result.summary["f1_present"] == pytest.approx(f1[0] * 6 / 8 + f1[1] * 2 / 8)
    assert result.summary["f1_macro_mean"] == pytest.approx((f1[0] + f1[1]) / 4)


def test_a_client_without_test_items_is_left_out_of_the_averages(play):
    result = play([4], [8], test_a=[5], test_b=[(0, 0)])
    assert result.accuracy == result.summary["accuracy_mean"] == pytest.approx(0.5)
    assert [c["accuracy"] for c in result.per_client] == [0.5, None]
    assert [c["val_accuracy"] for c in result.per_client] == [0.4, 0.8]


def test_per_client_counts_and_scores_are_those_of_the_best_round(play):
    result = play([4, 9, 3], test_a=[1, 2, 3], test_b=[4, 5, 6])
    first, second = result.per_client
    assert {k: first[k] for k in ("id", "nodes", "items", "train", "val", "test")} == {
        "id": "a",
        "nodes": 6,
        "items": 6,
        "train": 2,
        "val": 1,
        "test": 3,
    }
    assert (second["train"], second["val"], second["test"]) == (1, 0, 1)
    assert [c["accuracy"] for c in result.per_client] == [0.2, 0.5]
    assert first["f1"] == first["f1_macro"] == pytest.approx(2 * 2 / 12 / 2)


def test_after_a_last_stage_its_best_epoch_counts(play):
    result = play([9, 8, 2, 5, 5], test_a=[1, 2, 3, 4, 5], tune=3)
    assert [(e["round"], e["stage"]) for e in result.history] == [
        (1, "train"),
        (2, "train"),
        (2, "tune"),
        (2, "tune"),
        (2, "tune"),
    ]
    assert (result.summary["val_accuracy"], result.summary["rounds"]) == (pytest.approx(0.5), 2)
    assert result.accuracy == pytest.approx(0.4 * 6 / 8 + 0.5 * 2 / 8)


# ---- when to evaluate, when to stop ----
@pytest.mark.parametrize(
    ("every", "scored"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (5, [5]), (50, [5])]
)
def test_evaluate_every(play, every, scored):
    result = play([1, 2, 3, 4, 5], evaluate_every=every)
    assert rounds_scored(result) == scored
    assert [e["round"] for e in result.history] == [1, 2, 3, 4, 5]
    assert result.summary["best_round"] == 5
    assert result.traffic["phases"]["evaluate"]["messages"] == 2 * len(scored)


@pytest.mark.parametrize(
    ("val", "patience", "every", "last"),
    [
        ([5, 4, 4, 9, 9], 2, 1, 3),
        ([5, 5, 5, 9, 9], 2, 1, 3),
        ([5, 4, 6, 5, 7], 2, 1, 5),
        ([5, 4, 6, 5, 5, 9], 2, 1, 5),
        ([5, 4, 3, 2], 0, 1, 4),
        ([1, 5, 9, 4, 9, 3, 9, 9], 2, 2, 6),
        ([5, 4, 9, 9], 1, 1, 2),
        ([(0, 0)] * 5, 1, 1, 5),
    ],
)
def test_patience_counts_evaluations_without_a_better_one(play, val, patience, every, last):
    result = play(
        val, test_a=[1] * len(val), test_b=[1] * len(val), patience=patience, evaluate_every=every
    )
    assert result.summary["rounds"] == last
    assert result.summary["status"] == "completed"


# ---- resuming ----
class Killed(BaseException):
    """Stands for any end of a process."""


def stop_at(number, stage="train"):
    def on_round(entry):
        if entry["round"] == number and entry.get("stage", "train") == stage:
            raise Killed

    return on_round


def without_time(result):
    return [{k: v for k, v in entry.items() if k != "seconds"} for entry in result.history]


@pytest.mark.parametrize(
    "killed_in", [3, *(pytest.param(number, marks=pytest.mark.slow) for number in (2, 4, 5))]
)
@pytest.mark.parametrize(
    "settings",
    [
        {"evaluate_every": 2},
        {"patience": 3},
        {"evaluate_every": 2, "patience": 1},
        {"checkpoint_every": 2},
    ],
)
def test_evaluation_and_early_stopping_are_resumed(play, tmp_path, killed_in, settings):
    settings = {"a": [5, 9, 4, 9, 3, 2, 1, 1], "checkpoint_every": 1, **settings}
    unbroken = play(**settings, out=tmp_path / "unbroken")
    killed_in = min(max(killed_in, settings["checkpoint_every"] + 1), unbroken.summary["rounds"])
    with pytest.raises(Killed):
        play(**settings, out=tmp_path / "x", callbacks=stop_at(killed_in))
    resumed = play(**settings, out=tmp_path / "x", resume=True)
    assert without_time(resumed) == without_time(unbroken)
    assert {
        k: resumed.summary[k] for k in ("best_round", "rounds", "history_hash", "traffic", "status")
    } == {
        k: unbroken.summary[k]
        for k in ("best_round", "rounds", "history_hash", "traffic", "status")
    }
    assert (tmp_path / "x" / "history.jsonl").read_text().count("\n") == len(unbroken.history)
    assert (tmp_path / "x" / "ledger.csv").read_text() == (
        tmp_path / "unbroken" / "ledger.csv"
    ).read_text()


def test_a_run_that_stopped_early_stays_stopped_when_resumed(play, tmp_path):
    settings = {
        "a": [5, 4, 4, 4, 9, 9],
        "patience": 2,
        "tune": 1,
        "rounds": 5,
        "checkpoint_every": 1,
    }
    unbroken = play(**settings)
    with pytest.raises(Killed):
        play(**settings, out=tmp_path / "x", callbacks=stop_at(3, "tune"))
    resumed = play(**settings, out=tmp_path / "x", resume=True)
    assert without_time(resumed) == without_time(unbroken)


def content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_refused_resume_leaves_the_run_as_it_was(play, tmp_path):
    with pytest.raises(Killed):
        play([1, 2, 3], out=tmp_path / "x", checkpoint_every=1, callbacks=stop_at(3))
    for name in ("checkpoint.safetensors", "checkpoint.previous.safetensors"):
        (tmp_path / "x" / name).write_bytes(b"nothing of the kind")
    before = content(tmp_path / "x")
    with pytest.raises(
        DataError,
        match=r"checkpoint\.safetensors in .* is damaged"
        r".*checkpoint\.previous\.safetensors in .* is damaged",
    ):
        play([1, 2, 3], out=tmp_path / "x", resume=True)
    assert content(tmp_path / "x") == before


def test_resuming_a_completed_run_returns_its_result_and_changes_nothing(play, tmp_path):
    first = play([5, 6], out=tmp_path / "x", checkpoint_every=1)
    before = content(tmp_path / "x")
    again = play(
        [5, 6],
        out=tmp_path / "x",
        resume=True,
        callbacks=lambda entry: pytest.fail("the run is completed"),
    )
    assert content(tmp_path / "x") == before
    assert (again.summary, again.history) == (json.loads(json.dumps(first.summary)), first.history)


def test_a_run_without_a_checkpoint_restarts(play, tmp_path):
    unbroken = play([1, 2, 3], out=tmp_path / "unbroken")
    with pytest.raises(Killed):
        play([1, 2, 3], out=tmp_path / "x", callbacks=stop_at(2))
    resumed = play([1, 2, 3], out=tmp_path / "x", resume=True)
    assert without_time(resumed) == without_time(unbroken)
    assert resumed.summary["history_hash"] == unbroken.summary["history_hash"]
    assert (tmp_path / "x" / "ledger.csv").read_text() == (
        tmp_path / "unbroken" / "ledger.csv"
    ).read_text()


def test_a_folder_without_a_run_is_not_resumed(play, tmp_path):
    with pytest.raises(DataError, match=r"is not a run folder \(config.json: No such file"):
        play([1], out=tmp_path / "x", resume=True)
    assert not (tmp_path / "x").exists()


def test_a_resume_that_is_interrupted_early_can_be_resumed_again(play, tmp_path, monkeypatch):
    settings = {"a": [1, 2, 3, 4], "checkpoint_every": 1}
    unbroken = play(**settings)
    with pytest.raises(Killed):
        play(**settings, out=tmp_path / "x", callbacks=stop_at(3))

    def interrupted(self, client):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(interrupted, "__name__", "setup")
        patch.setattr(Scripted, "setup", phase()(interrupted))
        with pytest.raises(KeyboardInterrupt):
            play(**settings, out=tmp_path / "x", resume=True)
    stopped = load_run(tmp_path / "x")  # as in the checkpoint
    assert (stopped.summary["status"], stopped.summary["rounds"], len(stopped.history)) == (
        "stopped",
        2,
        2,
    )
    assert [stopped.traffic["phases"][name]["messages"] for name in ("advance", "evaluate")] == [
        4,
        4,
    ]
    assert len((tmp_path / "x" / "ledger.csv").read_text().splitlines()) == 1 + 4 + 4
    resumed = play(**settings, out=tmp_path / "x", resume=True)
    assert resumed.traffic == unbroken.traffic


def test_a_run_is_resumed_before_its_first_message(node_federation, tmp_path):
    settings = {
        "model": MODEL,
        "rounds": 3,
        "evaluate_every": 3,
        "checkpoint_every": 1,
        "out": tmp_path / "x",
    }
    with pytest.raises(Killed):
        run("local", node_federation, callbacks=stop_at(2), **settings)
    assert run("local", node_federation, resume=True, **settings).summary["status"] == "completed"


def test_a_half_written_last_line_is_ignored(play, tmp_path):
    with pytest.raises(Killed):
        play([1, 2, 3], out=tmp_path / "x", checkpoint_every=1, callbacks=stop_at(3))
    (tmp_path / "x" / "summary.json").unlink()
    history = tmp_path / "x" / "history.jsonl"
    history.write_text(history.read_text()[:-20])
    assert [e["round"] for e in load_run(tmp_path / "x").history] == [1, 2]


def test_seconds_after_a_resume_measure_the_resumed_part(play, tmp_path, monkeypatch):
    monkeypatch.setattr(Scripted, "pause", 0.02)
    settings = {"a": [1] * 6, "checkpoint_every": 1, "out": tmp_path / "x"}
    with pytest.raises(Killed):
        play(**settings, callbacks=stop_at(6))
    seconds = play(**settings, resume=True).summary["seconds"]
    assert seconds["evaluate"] <= seconds["total"]


def test_another_run_is_not_resumed(play, tmp_path):
    with pytest.raises(Killed):
        play([1, 2, 3], out=tmp_path / "x", checkpoint_every=1, callbacks=stop_at(2))
    with pytest.raises(ValueError, match="seed"):
        play([1, 2, 3], out=tmp_path / "x", checkpoint_every=1, resume=True, seed=1)


def test_a_damaged_checkpoint_is_refused_by_name(play, tmp_path):
    with pytest.raises(Killed):
        play([1, 2, 3], out=tmp_path / "x", checkpoint_every=1, callbacks=stop_at(2))
    path = tmp_path / "x" / "checkpoint.safetensors"
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(DataError, match=r"checkpoint\.safetensors in .* is damaged"):
        play([1, 2, 3], out=tmp_path / "x", checkpoint_every=1, resume=True)


def test_resuming_needs_a_folder(play):
    with pytest.raises(ConfigError, match="out: resuming needs the folder"):
        play([1], resume=True)


# ---- what a folder holds ----
def test_a_folder_is_read_back_as_it_was(node_federation, tmp_path):
    result = run("fedavg", node_federation, model=MODEL, rounds=3, out=tmp_path / "x")
    again = load_run(tmp_path / "x")
    assert again.summary == json.loads(json.dumps(result.summary))
    assert again.history == json.loads(json.dumps(result.history))
    assert (
        again.final_models.keys()
        == result.final_models.keys()
        == {*node_federation.names, "server"}
    )
    assert all(
        torch.equal(t, again.final_models[owner][name])
        for owner, model in result.final_models.items()
        for name, t in model.items()
    )
    assert (again.accuracy, again.traffic) == (result.accuracy, result.traffic)
    lines = (tmp_path / "x" / "ledger.csv").read_text().splitlines()
    assert len(lines) - 1 == result.traffic["messages"] + result.traffic["measuring"]["messages"]
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    assert config == again.summary["config"]
    assert config["method"]["rounds"] == 3
    assert not list((tmp_path / "x").rglob("*.new"))
    assert not (tmp_path / "x" / ".writable").exists()


def test_a_failed_run_has_a_cause_and_keeps_its_results(play, tmp_path):
    with pytest.raises(RuntimeError, match="on fire"):
        play([4, 5, 6], fail_in=3, out=tmp_path / "x")
    kept = load_run(tmp_path / "x")
    assert (kept.summary["status"], kept.summary["cause"]) == (
        "failed",
        "RuntimeError: the disk is on fire",
    )
    assert (kept.summary["rounds"], kept.summary["best_round"]) == (2, 2)
    assert kept.accuracy == pytest.approx(0.5)
    assert len(kept.history) == 2
    assert set(kept.final_models) == {"a", "b"}
    assert kept.traffic["phases"]["advance"]["messages"] == 6  # with the exchange of the last round
    assert len((tmp_path / "x" / "ledger.csv").read_text().splitlines()) == 1 + 6 + 4


def test_a_run_whose_engine_fails_has_a_cause(play, tmp_path, monkeypatch):
    def broken(*arguments):
        raise RuntimeError("no such machine")

    monkeypatch.setattr(runs, "engine_class", lambda name: broken)
    with pytest.raises(RuntimeError, match="no such machine"):
        play([4], out=tmp_path / "x")
    kept = load_run(tmp_path / "x").summary
    assert (kept["status"], kept["cause"], kept["rounds"]) == (
        "failed",
        "RuntimeError: no such machine",
        0,
    )


def test_a_terminated_run_is_marked_as_stopped(play, tmp_path):
    def terminate(entry):
        raise SystemExit(143)

    with pytest.raises(SystemExit):
        play([4, 5], out=tmp_path / "x", callbacks=terminate)
    kept = load_run(tmp_path / "x").summary
    assert (kept["status"], kept["cause"], kept["rounds"]) == ("stopped", "terminated", 1)


def test_an_interrupted_run_is_marked_as_stopped(play, tmp_path):
    def press(entry):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        play([4, 5], out=tmp_path / "x", callbacks=press)
    assert load_run(tmp_path / "x").summary["status"] == "stopped"


def test_a_killed_run_is_unfinished(play, tmp_path):
    with pytest.raises(Killed):
        play([4, 5], out=tmp_path / "x", callbacks=stop_at(1))
    (tmp_path / "x" / "summary.json").unlink()
    kept = load_run(tmp_path / "x")
    assert (kept.summary["status"], kept.summary["rounds"]) == ("unfinished", 1)
    assert kept.summary["config"]["method"]["rounds"] == 2


def test_a_folder_without_a_run_or_with_a_damaged_one_is_refused(play, tmp_path):
    with pytest.raises(DataError, match=r"is not a run folder \(config.json: No such file"):
        load_run(tmp_path)
    play([4], out=tmp_path / "x")
    (tmp_path / "x" / "summary.json").write_text('{"status": "comp')
    with pytest.raises(DataError, match="is damaged"):
        load_run(tmp_path / "x")


@pytest.mark.parametrize("content", [b"[]", b"{}", b"\xff"])
def test_a_damaged_summary_is_refused(tmp_path, content):
    (tmp_path / "summary.json").write_bytes(content)
    with pytest.raises(DataError, match="damaged"):
        load_run(tmp_path)


def test_folders_are_not_overwritten_and_must_be_writable(play, tmp_path):
    play([4], out=tmp_path / "x" / "deeper")
    with pytest.raises(ConfigError, match="is not empty"):
        play([4], out=tmp_path / "x" / "deeper")
    (tmp_path / "file").write_text("")
    for bad in ("file", "file/below"):
        with pytest.raises(ConfigError, match=r"out: cannot write to .*file"):
            play([4], out=tmp_path / bad)


def test_checkpoints_are_written_when_asked_for_and_only_into_folders(play, tmp_path):
    play([4, 5, 6], out=tmp_path / "none")
    assert not (tmp_path / "none" / "checkpoint.safetensors").exists()
    with pytest.raises(Killed):
        play([4, 5, 6, 7], out=tmp_path / "two", checkpoint_every=2, callbacks=stop_at(4))
    assert play([4, 5, 6, 7], checkpoint_every=2).folder is None
    resumed_rounds = []
    play(
        [4, 5, 6, 7],
        out=tmp_path / "two",
        checkpoint_every=2,
        resume=True,
        callbacks=lambda e: resumed_rounds.append(e["round"]),
    )
    assert resumed_rounds == [3, 4]


@pytest.mark.parametrize(
    "names", [("a:b", "a_b", "c", "d"), ("server", "b", "c", "d"), ("a/b", "b", "c", "d")]
)
def test_the_model_of_every_client_is_kept_under_any_name(node_federation, tmp_path, names):
    federation = replace(node_federation, names=names)
    try:
        federation.check()
    except DataError:
        return  # also fine: the name is refused
    result = run(
        "fedavg", federation, model=MODEL, rounds=1, out=tmp_path / "x", checkpoint_every=1
    )
    assert len(result.final_models) == len(load_run(tmp_path / "x").final_models) == 5


# ---- what is scored ----
def accuracy_of(weights, graph, classes=3):
    """Returns the test accuracy of a model's weights on a graph, without fedloom's metrics."""
    model = build_model(MODEL, graph.num_features, classes, seed=0)
    with torch.no_grad():
        guess = torch.func.functional_call(model, weights, (graph,)).argmax(1)
    return (guess[graph.test] == graph.y[graph.test]).double().mean().item()


@pytest.mark.parametrize(
    ("evaluation", "whose"), [("local", None), ("global", "server"), ("", None)]
)
def test_scores_are_those_of_the_evaluated_models(node_federation, evaluation, whose):
    result = run("fedavg", node_federation, model=MODEL, rounds=1, epochs=20, evaluation=evaluation)
    expected = [
        accuracy_of(result.final_models[whose or n], g)
        for n, g in zip(node_federation.names, node_federation.graphs, strict=True)
    ]
    assert [c["accuracy"] for c in result.per_client] == pytest.approx(expected)
    sizes = [g.num_items for g in node_federation.graphs]
    assert result.accuracy == pytest.approx(
        sum(a * n for a, n in zip(expected, sizes, strict=True)) / sum(sizes)
    )
    assert result.summary["evaluation"] == (evaluation or "local")


def test_auc_is_computed_for_two_classes_and_on_request(node_federation, graph_federation):
    assert run("local", node_federation, model=MODEL, rounds=1).summary["auc"] is None
    asked = run("local", node_federation, model=MODEL, rounds=1, auc=True)
    graph, name = node_federation.graphs[0], node_federation.names[0]
    with torch.no_grad():
        logits = torch.func.functional_call(
            build_model(MODEL, graph.num_features, 3, seed=0), asked.final_models[name], (graph,)
        )
    assert asked.per_client[0]["auc"] == pytest.approx(
        metrics.auc(logits, graph.y, graph.test), abs=1e-6
    )
    assert 0 <= asked.summary["auc_mean"] <= 1
    assert run("local", graph_federation, model=MODEL, rounds=1).summary["auc"] is not None


def test_auc_with_items_of_one_class_is_none():
    one_kind = replace(
        PAIR.graphs[0], test=torch.tensor([0, 0, 0, 1, 0, 1]).bool()
    )  # both of class 1
    result = run("local", Federation((PAIR.graphs[0], one_kind)), model="mlp-2x4", rounds=1)
    assert [c["auc"] is None for c in result.per_client] == [False, True]
    assert result.summary["auc"] == result.per_client[0]["auc"]


# ---- settings ----
def test_clients_get_the_models_in_turn(node_federation):
    result = run("local", node_federation, model=" GCN-2x8, sage-2x8,mlp-2x8", rounds=1)
    has_neighbours = [
        "layers.0.neighbour" in result.final_models[name] for name in node_federation.names
    ]
    assert has_neighbours == [False, True, False, False]


BAD = {
    "average of two models": (
        "fedavg",
        {"model": "gcn-2x8,sage-2x8"},
        "'fedavg' averages weights and needs one model",
    ),
    "dropout": (
        "fedavg",
        {"dropout": 1.0},
        r"model\.dropout is 1.0, must be at least 0 and below 1",
    ),
    "unknown setting": (
        "fedavg",
        {"learning_rate": 1},
        "of the run and of method 'fedavg': 'learning_rate'",
    ),
    "unknown engine": ("fedavg", {"engine": "lop"}, r"run\.engine 'lop'. Did you mean 'loop'"),
    "evaluation": (
        "fedsgd",
        {"evaluation": "local"},
        r"run\.evaluation for method 'fedsgd': 'local'.*common",
    ),
    "settings of an object": (
        Scripted(),
        {"lr": 1, "tune": 2},
        "lr: the method is given with all its settings.*set lr there",
    ),
    "participation": (
        "fedavg",
        {"participation": 1.5},
        r"run\.participation is 1.5, must be a number above 0 and at most 1",
    ),
    "seed": ("fedavg", {"seed": -1}, r"run\.seed is -1, must be a whole number at least 0"),
    "threads": ("fedavg", {"threads": 0}, r"run\.threads is 0, must be a whole number at least 1"),
    "unknown model": ("fedavg", {"model": "gcnn"}, "model 'gcnn'. Did you mean 'gcn'"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_setting_is_named(case, node_federation):
    method, settings, words = BAD[case]
    with pytest.raises(ConfigError, match=words):
        run(method, node_federation, **settings)


def test_a_method_of_another_task_is_refused(graph_federation, monkeypatch):
    monkeypatch.setattr(Scripted, "tasks", ("node",))
    with pytest.raises(ConfigError, match="does node tasks, the data are a graph task"):
        run(Scripted(), graph_federation, model=MODEL)


def test_the_number_of_threads_is_restored_also_after_an_error(play):
    before = torch.get_num_threads()
    seen = []
    play(
        [4],
        threads=before + 1,
        callbacks=lambda entry: seen.append(torch.get_num_threads()),
    )
    assert seen == [before + 1]
    assert torch.get_num_threads() == before
    with pytest.raises(RuntimeError, match="fire"):
        play([4], fail_in=1, threads=before + 1)
    assert torch.get_num_threads() == before


def test_defaults_of_a_run():
    assert RunSettings() == RunSettings(
        seed=0,
        engine="auto",
        evaluation="",
        participation=1.0,
        evaluate_every=1,
        patience=0,
        checkpoint_every=-1,
        auc=False,
        threads=1,
    )


# ---- the result ----
def test_a_result_describes_the_run(play):
    calls = []
    result = play([4, 5], seed=3, callbacks=calls.append)
    assert calls == result.history
    summary = result.summary
    assert {
        k: summary[k]
        for k in (
            "status",
            "dataset",
            "partition",
            "clients",
            "model",
            "seed",
            "engine",
            "task",
            "evaluation",
        )
    } == {
        "status": "completed",
        "dataset": "toy",
        "partition": "by hand",
        "clients": 2,
        "model": "mlp-2x4",
        "seed": 3,
        "engine": "stacked",  # chosen by "auto"
        "task": "node",
        "evaluation": "local",
    }
    assert "cause" not in summary
    assert summary["without_training_items"] == []
    assert set(summary["seconds"]) == {"load", "setup", "train", "evaluate", "total"}
    assert summary["seconds"]["total"] >= summary["seconds"]["evaluate"] > 0
    assert (result.accuracy, result.per_client, result.traffic) == (
        summary["accuracy"],
        summary["per_client"],
        summary["traffic"],
    )
    assert [e["participants"] for e in result.history] == [["a", "b"], ["a", "b"]]
    json.dumps(summary)


@pytest.mark.parametrize("method", ["local", "central"])
def test_the_summary_says_how_long_loading_and_dividing_took(method, node_federation):
    federation = replace(node_federation, seconds_loading=12.5)
    seconds = run(method, federation, rounds=1, model="gcn-2x4").summary["seconds"]
    assert seconds["load"] == 12.5
    assert seconds["total"] > 12.5


def test_clients_without_training_items_are_named(play):
    idle = replace(PAIR.graphs[1], train=torch.zeros(2, dtype=torch.bool))
    assert play([4], federation=replace(PAIR, graphs=(PAIR.graphs[0], idle))).summary[
        "without_training_items"
    ] == ["b"]


PROGRAM = """
import torch
torch.set_num_threads(1)
from fedloom.data.partition import divide
from fedloom.data.synthetic import synthetic
from fedloom.experiments.run import run
graph = synthetic(nodes=211, classes=3, features=12, degree=6.0, homophily=0.8, seed=1)
federation = divide(graph, 4, "random", 0, split="40/30/30")
for settings in SETTINGS:
    print(run(federation=federation, **settings).summary["history_hash"])
"""
SETTINGS = [
    {"method": "scaffold", "model": MODEL, "rounds": 2, "participation": 0.5, "seed": 4},
    {"method": "local", "model": "gcn-2x8,gat-2x8,sage-2x8", "rounds": 2},
]


@pytest.mark.slow
def test_the_history_hash_does_not_depend_on_string_hashes(node_federation):
    program = PROGRAM.replace("SETTINGS", repr(SETTINGS))
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.split() == [
        run(federation=node_federation, **s).summary["history_hash"] for s in SETTINGS
    ]


# ---- other cases ----
@dataclass(frozen=True)
class OneShot(Method):
    """A method without rounds."""

    @phase()
    def setup(self, client):
        """Makes a model."""
        client.state["model"] = client.build()
        return {}

    def run(self, server):
        """Runs one exchange and one evaluation."""
        server.ask(self.setup)
        server.evaluate()


def test_a_method_without_rounds_is_scored(node_federation):
    assert run(OneShot(), node_federation, model=MODEL).accuracy is not None


def test_participants_may_have_no_training_items(node_federation):
    first, *rest = node_federation.graphs
    bare = replace(first, test=first.test | first.train, train=torch.zeros_like(first.train))
    federation = replace(node_federation, graphs=(bare, *rest), inductive=True, whole=None)
    assert (
        run("fedavg", federation, model=MODEL, rounds=12, participation=0.25).summary["status"]
        == "completed"
    )


def test_a_method_file_may_import_annotations_from_future(node_federation, tmp_path):
    (tmp_path / "mine.py").write_text(
        '"""Mine: x.\n\nWhat travels: as in FedAvg.\n"""\n'
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "from fedloom.api import FedAvg, setting\n\n\n"
        "@dataclass(frozen=True)\nclass Mine(FedAvg):\n"
        '    """Mine."""\n\n    lr: float = setting(0.05, "rate", above=0)\n'
    )
    assert (
        run(str(tmp_path / "mine.py"), node_federation, model=MODEL, rounds=1).summary["status"]
        == "completed"
    )


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_a_run_releases_its_clients(engine, node_federation):
    """Clients are released without garbage collection, so many runs fit into one process."""

    def held():  # not isinstance, which resolves proxies
        return {id(each) for each in gc.get_objects() if type(each) in (Client, ParameterStack)}

    gc.collect()
    before = held()  # an error of another test may keep some alive
    gc.disable()
    try:
        run("fedavg", node_federation, model="gcn-2x8", rounds=2, engine=engine)
        assert not held() - before
    finally:
        gc.enable()


# ---- settings that let a plain run tell more than is advised ----


def test_a_plain_run_with_a_low_floor_says_so(node_federation, caplog):
    settings = {"model": "gcn-2x8", "rounds": 1}

    def warnings(name, **more):
        caplog.clear()
        result = run(name, node_federation, **settings, **more)
        return [m for m in caplog.messages if "floor" in m], result.summary["notes"]

    assert warnings("fedproto") == ([], {})
    lines, notes = warnings("fedproto", floor=2)
    assert len(lines) == 1
    assert "method.floor is 2: clients send what fewer than 5 items contribute to" in lines[0]
    assert notes == {"method.floor, below what is advised": 2.0}
    assert warnings("fedproto", floor=1, secure=True) == ([], {})  # sums hide a single client


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("fedproto", "floor"),
        ("fedtgp", "floor"),
        ("fedpg", "floor"),
        ("fpl", "floor"),
        ("fggp", "floor"),
        ("fednh", "floor"),
        ("feddistill", "floor"),
        ("opfgl", "min_count"),
    ],
)
def test_by_default_five_items_are_behind_what_is_sent(name, field):
    assert getattr(make_method(name, {}), field) == 5
