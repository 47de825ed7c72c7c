"""The selection metric, training losses, confusion matrices and warnings of a run."""

import json
import logging
import re
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

import fedloom
from fedloom.cli import app
from fedloom.errors import ConfigError
from fedloom.experiments.findings import findings
from fedloom.experiments.history import History
from fedloom.experiments.recipe import make_recipe
from fedloom.experiments.run_folder import read_history
from fedloom.experiments.tune import validate
from fedloom.nn.build import build_model
from fedloom.nn.losses import cross_entropy
from fedloom.nn.metric_names import METRICS, MINIMISED
from fedloom.nn.metrics import names_of
from fedloom.nn.weights import load_weights

MODEL = "gcn-2x8"


@pytest.fixture(scope="module")
def fraud():
    """Three clients, 5 % of the items in class 1; the last client has no positive items."""
    graph = fedloom.synthetic(
        nodes=600, classes=2, features=12, degree=6.0, homophily=0.9, signal=2.0, label_skew=0.947,
        seed=1,
    )  # fmt: skip
    graph = replace(graph, class_names=("ok", "fraud"))
    divided = fedloom.divide(graph, 3, "random", 0, split="40/30/30")
    *others, last = divided.graphs
    blind = replace(last, val=last.val & (last.y == 0), test=last.test & (last.y == 0))
    return replace(divided, graphs=(*others, blind))


def go(federation, method="fedavg", **settings):
    return fedloom.run(method, federation, **{"model": MODEL, "rounds": 6, **settings})


def summarised(summary):
    """A summary without what differs from run to run."""
    volatile = ("seconds", "peak_rss_mb", "memory_predicted_mb", "engine_details", "config")
    return {key: value for key, value in summary.items() if key not in volatile}


# ---- the best round ----
def history_of(values, selection, patience=0):
    history = History(None, patience, selection)
    for number, value in enumerate(values, 1):
        scores = {"accuracy": 0.5, "val_accuracy": 0.1 * number, f"val_{selection}": value}
        history.add({"round": number, "stage": "train", **scores}, [[number]])
    return history


@pytest.mark.parametrize(
    ("selection", "values", "best"),
    [
        ("pr_auc", [0.1, 0.3, 0.3, 0.2], 2),
        ("ece", [0.3, 0.1, 0.2, 0.1], 2),
        ("recall", [None, 0.0, None, 0.0], 2),
        ("ece", [None, 0.9, None, None], 2),
        ("auc", [None, None, None], 3),
    ],
)
def test_the_best_round_is_the_first_with_the_best_selected_score(selection, values, best):
    history = history_of(values, selection)
    assert history.scored()[0]["round"] == best
    assert history.scored()[1]["round"] == len(values)
    assert history.confusion() == [[best]]


@pytest.mark.parametrize(
    ("selection", "values", "out"),
    [
        ("auc", [0.5, 0.4, 0.4], True),
        ("auc", [0.5, 0.4, 0.6], False),
        ("ece", [0.5, 0.4, 0.3], False),
        ("ece", [0.3, 0.4, 0.3], True),
    ],
)
def test_patience_waits_for_a_better_selected_score(selection, values, out):
    assert history_of(values, selection, patience=2).out_of_patience() is out


@pytest.mark.parametrize("selection", METRICS)
def test_a_run_reports_the_round_that_its_selection_metric_chooses(fraud, selection):
    result = go(fraud, selection=selection, top_k=20)
    summary, name = result.summary, f"val_{selection}"
    values = [entry[name] for entry in result.history]
    assert None not in values
    chosen = min(values) if selection in MINIMISED else max(values)
    assert summary["selection"] == selection
    assert summary["best_round"] == 1 + values.index(chosen)
    entry = result.history[values.index(chosen)]
    for metric in names_of(selection):
        assert summary[metric] == entry[metric]
        assert summary["per_client"][0][metric] == entry["clients"][0][metric]
    # The last client has no positive item: the average is over the others.
    if selection in ("recall", "pr_auc", "auc", "recall_at_k"):
        rows = [row[name] for row in entry["clients"]]
        assert rows[2] is None
        sizes = [graph.num_items for graph in fraud.graphs]
        assert entry[name] == pytest.approx(
            (rows[0] * sizes[0] + rows[1] * sizes[1]) / sum(sizes[:2])
        )


def test_training_does_not_depend_on_what_is_measured(fraud, node_federation):
    hashes = {
        go(fraud, selection=s, top_k=k).summary["history_hash"]
        for s, k in (("accuracy", 100), ("ece", 5), ("recall_at_k", 5))
    }
    assert len(hashes) == 1
    cheap = go(node_federation).history[0]
    assert all(cheap[name] is None for name in ("auc", "pr_auc", "ece", "recall_at_k"))
    assert cheap["balanced_accuracy"] is not None
    for settings in ({"auc": True}, {"selection": "ece"}):
        full = go(node_federation, **settings).history[0]
        assert all(full[name] is not None for name in ("auc", "pr_auc", "ece"))
        assert full["recall_at_k"] is full["precision_at_k"] is None


def test_an_early_stop_uses_the_selection_metric(fraud):
    result = go(fraud, selection="ece", patience=2, rounds=30)
    values = [entry["val_ece"] for entry in result.history]
    assert len(values) < 30
    assert min(values[-2:]) >= min(values[:-2])


def test_unknown_and_unsuitable_metrics_are_refused_with_the_valid_ones(node_federation, fraud):
    with pytest.raises(ConfigError, match=r"run.selection is 'f2', must be accuracy or .* or ece"):
        fedloom.RunSettings(selection="f2")
    for metric in ("recall_at_k", "precision_at_k"):
        with pytest.raises(ConfigError, match=r"needs two classes; the data have 3; valid: acc"):
            go(node_federation, selection=metric)
    with pytest.raises(ConfigError, match=r"run.top_k is 0"):
        go(fraud, top_k=0)


def test_a_metric_that_no_validation_item_defines_gives_the_last_round_and_a_warning(fraud):
    graphs = tuple(replace(g, val=g.val & (g.y == 0)) for g in fraud.graphs)
    summary = go(replace(fraud, graphs=graphs), selection="pr_auc", rounds=3).summary
    assert (summary["best_round"], summary["val_pr_auc"]) == (3, None)
    assert any("run.selection = 'pr_auc'" in line for line in summary["warnings"])


# ---- secure runs ----
def test_a_secure_run_has_the_same_scores_loss_and_confusion_matrix(fraud):
    plain, secure = (
        go(fraud, "local", rounds=3, selection="pr_auc", secure=s, class_weight="balanced").summary
        for s in (False, True)
    )
    for key in (*names_of("pr_auc"), *(f"{name}_mean" for name in METRICS), "loss"):
        assert secure[key] == pytest.approx(plain[key], abs=1e-6), key
    for key in ("best_round", "confusion", "per_class", "class_names"):
        assert secure[key] == plain[key]
    assert all(row["loss"] is None for row in secure["per_client"])


# ---- the loss ----
def test_the_loss_of_fedavg_decreases_and_is_a_mean_weighted_by_training_items(fraud, tmp_path):
    result = go(fraud, rounds=10, out=tmp_path / "run")
    entries = list(read_history(tmp_path / "run"))
    losses = [entry["loss"] for entry in entries]
    assert losses[-1] < losses[0]
    items = [int(graph.train.sum()) for graph in fraud.graphs]
    rows = [row["loss"] for row in entries[0]["clients"]]
    assert losses[0] == pytest.approx(
        sum(n * r for n, r in zip(items, rows, strict=True)) / sum(items)
    )
    assert result.summary["loss"] == entries[result.summary["best_round"] - 1]["loss"]


def test_clients_that_did_not_train_have_no_loss(node_federation):
    result = go(node_federation, participation=0.5)
    for entry in result.history:
        trained = {row["id"] for row in entry["clients"] if row["loss"] is not None}
        assert trained == set(entry["participants"])
    idle = tuple(
        replace(g, train=torch.zeros_like(g.train)) if k == 1 else g
        for k, g in enumerate(node_federation.graphs)
    )
    for method in ("fedavg", "fedsgd"):
        rows = go(replace(node_federation, graphs=idle), method).history[0]["clients"]
        assert [row["loss"] is None for row in rows] == [False, True, False, False]


def test_a_loss_that_is_not_finite_is_none(node_federation):
    entries = go(node_federation, "local", lr=1e30, optimizer="sgd").history
    assert entries[-1]["loss"] is None


def test_losses_are_the_same_in_all_engines(node_federation):
    engines = ("loop", "wire", "processes", "stacked", "stacked_processes")
    loop, *others = (
        [entry["loss"] for entry in go(node_federation, engine=engine).history]
        for engine in engines
    )
    assert others[0] == others[1] == loop
    assert others[2] == pytest.approx(loop, abs=1e-5)
    assert others[3] == pytest.approx(loop, abs=1e-5)


def test_the_loss_is_the_cross_entropy_before_each_step(node_federation):
    """One step without dropout: the loss of the initial weights."""
    result = fedloom.run(
        "fedavg", node_federation, model=MODEL, rounds=1, epochs=1, dropout=0.0, lr=1e-12
    )
    graph = node_federation.graphs[0]
    model = build_model(MODEL, graph.num_features, graph.num_classes, "node", dropout=0.0, seed=0)
    load_weights(model, result.models["0"])
    expected = cross_entropy(model(graph), graph.y, graph.train).item()
    assert result.history[0]["clients"][0]["loss"] == pytest.approx(expected, rel=1e-4)


def test_a_resumed_run_has_the_same_history_and_summary(node_federation, tmp_path):
    class StoppedError(Exception):
        """Ends a run."""

    def stop(entry):
        if entry["round"] == 3:
            raise StoppedError

    settings = {"rounds": 6, "participation": 0.5, "evaluate_every": 2, "checkpoint_every": 1}
    whole = go(node_federation, out=tmp_path / "whole", **settings)
    with pytest.raises(StoppedError):
        go(node_federation, out=tmp_path / "cut", callbacks=stop, **settings)
    resumed = go(node_federation, out=tmp_path / "cut", resume=True, **settings)
    assert summarised(resumed.summary) == summarised(whole.summary)
    one, other = (
        [{k: v for k, v in entry.items() if k != "seconds"} for entry in read_history(folder)]
        for folder in (tmp_path / "whole", tmp_path / "cut")
    )
    assert one == other


# ---- the confusion matrix, and what it warns of ----
def test_the_confusion_matrix_is_that_of_the_best_round(fraud):
    result = go(fraud, class_weight="balanced", selection="balanced_accuracy")
    summary, matrix = result.summary, torch.tensor(result.summary["confusion"])
    labels = torch.cat([graph.y[graph.test] for graph in fraud.graphs])
    assert matrix.sum(1).tolist() == torch.bincount(labels, minlength=2).tolist()
    best = result.history[summary["best_round"] - 1]
    right = sum(
        row["accuracy"] * int(graph.test.sum())
        for row, graph in zip(best["clients"], fraud.graphs, strict=True)
    )
    assert int(matrix.trace()) == pytest.approx(right)
    assert summary["class_names"] == ["ok", "fraud"]
    assert list(summary["per_class"]) == ["ok", "fraud"]
    assert summary["per_class"]["fraud"]["support"] == int((labels == 1).sum())
    assert summary["per_class"]["fraud"]["recall"] == pytest.approx(
        int(matrix[1, 1]) / int(matrix[1].sum())
    )


@pytest.mark.parametrize(
    ("matrix", "expected"),
    [
        ([[90, 5], [2, 3]], ["93.0 % .* 'ok' \\(95.0 %\\)"]),
        ([[95, 0], [5, 0]], ["predict class 'ok' for all 100"]),
        ([[0, 95], [0, 5]], ["predict class 'fraud' for all 100", "5.0 % .* 'ok' \\(95.0 %\\)"]),
        ([[80, 15], [0, 5]], ["85.0 % .* fewer than if all were classified as 'ok'"]),
        ([[100, 0], [0, 0]], []),
        ([[90, 5], [0, 5]], []),
        (None, []),
    ],
)
def test_findings(matrix, expected):
    found = findings(matrix, ("ok", "fraud"), {"val_accuracy": 0.5})
    assert len(found) == len(expected)
    for line, pattern in zip(found, expected, strict=True):
        assert re.search(pattern, line)


def test_a_run_warns_of_a_single_class_and_does_not_without_reason(caplog):
    graph = fedloom.synthetic(
        nodes=900, classes=2, features=12, degree=6.0, homophily=0.9, signal=1.5, label_skew=0.947,
        seed=1,
    )  # fmt: skip
    graph = replace(graph, class_names=("ok", "fraud"))
    with caplog.at_level(logging.WARNING, logger="fedloom"):
        parties = fedloom.divide(graph, 3, "random", 0, split="40/30/30")
        bad = go(parties, rounds=15, evaluate_every=15)
    (line,) = bad.summary["warnings"]
    assert "predict class 'ok' for all" in line
    assert "run.class_weight = 'balanced'" in line
    assert caplog.text.count(line) == 1
    caplog.clear()
    graph = fedloom.synthetic(nodes=200, classes=2, features=8, signal=5.0, seed=0)
    with caplog.at_level(logging.WARNING, logger="fedloom"):
        good = go(fedloom.divide(graph, 3, "random", 0), rounds=10)
    assert good.summary["warnings"] == []
    assert not caplog.records


def test_the_command_prints_warnings_once(tmp_path):
    data = "synthetic:nodes=300,classes=2,features=8,label_skew=0.94,signal=1"
    options = ["--method", "local", "--set", "method.rounds=5", "--set", "partition.clients=2"]
    folder = str(tmp_path / "run")
    result = CliRunner().invoke(
        app, ["run", "--dataset", data, "--model", MODEL, *options, "--out", folder, "--json"]
    )
    assert result.exit_code == 0, result.output
    lines = [line for line in result.stderr.splitlines() if line.startswith("warning: ")]
    warnings = json.loads(result.stdout)["warnings"]
    assert len(lines) == len(warnings) >= 1
    shown = CliRunner().invoke(app, ["show", folder])
    assert shown.stderr.count("warning: ") == len(warnings)


# ---- tuning ----
def test_tuning_scores_trials_by_the_selection_metric(tmp_path):
    tables = {
        "data": {"dataset": "synthetic:nodes=200,classes=2,features=8", "split": "40/30/30"},
        "partition": {"name": "random", "clients": 2},
        "model": {"name": MODEL},
        "method": {"name": "local", "rounds": 3},
        "run": {"selection": "ece"},
    }
    (score,) = validate(tables, [0], tmp_path, 0)
    summary = make_recipe(tables).execute().summary
    assert score == summary["val_ece"] != summary["val_accuracy"]
