"""Class weights: the setting, the counts that travel, and the loss in every engine."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import fedloom
from fedloom.core.class_weight import balanced_weights, explicit_weights
from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.core.message import flatten
from fedloom.engines.loop import Engine as Loop
from fedloom.errors import ConfigError, MessageError, Refusal
from fedloom.methods.fedavg import FedAvg

MODEL = "gcn-2x8"


@pytest.fixture(scope="module")
def imbalanced():
    """Three clients with 5 % of the items in class 1."""
    graph = fedloom.synthetic(
        nodes=900, classes=2, features=12, degree=6.0, homophily=0.9, signal=2.0, label_skew=0.947,
        seed=1,
    )  # fmt: skip
    assert 0.04 < (graph.y == 1).float().mean() < 0.06
    return fedloom.divide(graph, 3, "random", 0, split="40/30/30")


def distance(one, other):
    """The largest difference between the weights of two runs."""
    a, b = flatten(one.models), flatten(other.models)
    return max((a[name] - b[name]).abs().max().item() for name in a)


# ---- the setting ----
@pytest.mark.parametrize("text", ["balance", "1,", "1,x", "0,1", "-1,2", "1,inf", "nan,1", " "])
def test_a_setting_that_is_no_weight_is_refused_with_the_valid_forms(text):
    with pytest.raises(ConfigError, match=r"run.class_weight is .* 'balanced', or a number"):
        fedloom.RunSettings(class_weight=text)


def test_the_number_of_weights_must_be_the_number_of_classes(node_federation):
    with pytest.raises(ConfigError, match=r"run.class_weight is '1,10'.* 3 classes"):
        fedloom.run("fedavg", node_federation, model=MODEL, rounds=1, class_weight="1,10")


def test_explicit_weights_are_read():
    assert explicit_weights("") is explicit_weights("balanced") is None
    assert explicit_weights("1, 2.5", 2).tolist() == [1.0, 2.5]


def test_balanced_weights_are_those_of_scikit_learn():
    weights = balanced_weights(torch.tensor([90, 10]))
    assert weights.tolist() == pytest.approx([100 / (2 * 90), 100 / (2 * 10)])
    # A class without items is not counted.
    weights = balanced_weights(torch.tensor([6, 0, 2]))
    assert weights.tolist() == pytest.approx([8 / 12, 1.0, 8 / 4])
    assert balanced_weights(torch.zeros(2, dtype=torch.int64)).tolist() == [1.0, 1.0]


# ---- what travels ----
def counts_of(federation):
    labels = torch.cat([graph.y[graph.train] for graph in federation.graphs])
    return torch.bincount(labels, minlength=federation.num_classes)


@pytest.mark.parametrize("secure", [False, True])
def test_counts_are_summed_once_and_booked(imbalanced, secure, monkeypatch, reference_engine):
    told, original = [], FedAvg.weigh_classes.function

    def weigh(self, client, weights):
        told.append(weights.clone())
        return original(self, client, weights)

    changed = replace(FedAvg.weigh_classes, function=weigh)
    changed.function.__name__ = "weigh_classes"
    monkeypatch.setattr(FedAvg, "weigh_classes", changed)
    result = fedloom.run(
        "fedavg", imbalanced, model=MODEL, rounds=2, class_weight="balanced", secure=secure
    )
    phases = result.traffic["phases"]
    assert phases["count_labels"]["messages"] == imbalanced.num_clients * (1 + secure)
    assert phases["weigh_classes"]["scalars_down"] == 2 * imbalanced.num_clients
    expected = balanced_weights(counts_of(imbalanced))
    assert len(told) == imbalanced.num_clients
    assert all(torch.equal(weights, expected) for weights in told)


def test_without_weights_or_with_explicit_ones_nothing_more_travels(imbalanced):
    for text in ("", "1,20"):
        result = fedloom.run("fedavg", imbalanced, model=MODEL, rounds=1, class_weight=text)
        assert not {"count_labels", "weigh_classes"} & set(result.traffic["phases"])


def test_balanced_equals_the_same_weights_given_as_numbers(imbalanced):
    counts = counts_of(imbalanced)
    numbers = ",".join(repr(float(w)) for w in balanced_weights(counts))
    one, other = (
        fedloom.run("fedavg", imbalanced, model=MODEL, rounds=2, class_weight=text)
        for text in ("balanced", numbers)
    )
    assert distance(one, other) == 0


def client_of(graph, class_weight):
    facts = Facts(
        graph.num_features, graph.num_classes, "node", ("0",), (MODEL,), class_weight=class_weight
    )
    return Client("0", graph, facts)


def test_a_client_refuses_weights_that_were_not_agreed_on_or_are_wrong(imbalanced):
    graph, method = imbalanced.graphs[0], FedAvg()
    for agreed in ("", "1,20"):
        with pytest.raises(Refusal, match="class weights"):
            method.weigh_classes(client_of(graph, agreed), torch.ones(2))
    for wrong in (torch.ones(3), torch.tensor([0.0, 1.0]), torch.ones(2, dtype=torch.int64)):
        with pytest.raises(MessageError, match="'weights' must hold 2 numbers above 0"):
            method.weigh_classes(client_of(graph, "balanced"), wrong)


# ---- the loss ----
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_loss_of_a_client_is_weighted_unless_the_method_has_weights(imbalanced, reduction):
    graph = imbalanced.graphs[0]
    client = client_of(graph, "1,20")
    logits = torch.randn(graph.num_nodes, 2, generator=torch.Generator().manual_seed(0))
    train, weight = graph.train, torch.tensor([1.0, 20.0])
    expected = F.cross_entropy(logits[train], graph.y[train], weight=weight, reduction=reduction)
    assert client.loss(logits, client.graph, reduction).item() == pytest.approx(expected.item())
    own = torch.tensor([3.0, 1.0])
    expected = F.cross_entropy(logits[train], graph.y[train], weight=own, reduction=reduction)
    found = client.loss(logits, client.graph, reduction, of_class=own)
    assert found.item() == pytest.approx(expected.item())


@pytest.mark.parametrize("method", ["fedavg", "fedsgd", "fedproto", "fedkd"])
@pytest.mark.parametrize("text", ["balanced", "1,20"])
def test_the_stacked_engine_agrees_and_still_batches(method, text, imbalanced):
    chosen = {"model": MODEL, "rounds": 2}
    plain, loop, stacked = (
        fedloom.run(method, imbalanced, class_weight=weight, engine=engine, **chosen)
        for weight, engine in (("", "loop"), (text, "loop"), (text, "stacked"))
    )
    assert distance(loop, stacked) < 1e-4
    assert distance(plain, loop) > 1e-3
    for phase, calls in stacked.summary["engine_details"]["phases"].items():
        assert calls["batched"] >= calls["single"], phase


def test_other_engines_are_bit_identical(imbalanced):
    runs = [
        fedloom.run(
            "fedavg", imbalanced, model=MODEL, rounds=2, class_weight="balanced", engine=engine
        )
        for engine in ("loop", "wire", "processes")
    ]
    assert len({run.summary["history_hash"] for run in runs}) == 1


def test_a_resumed_run_has_the_same_weights(imbalanced, tmp_path):
    class StoppedError(Exception):
        """Ends a run."""

    def stop(entry):
        if entry["round"] == 2:
            raise StoppedError

    settings = {"model": MODEL, "rounds": 4, "class_weight": "balanced", "checkpoint_every": 1}
    whole = fedloom.run("fedavg", imbalanced, **settings)
    with pytest.raises(StoppedError):
        fedloom.run("fedavg", imbalanced, callbacks=stop, out=tmp_path / "run", **settings)
    resumed = fedloom.run("fedavg", imbalanced, out=tmp_path / "run", resume=True, **settings)
    assert resumed.summary["history_hash"] == whole.summary["history_hash"]
    assert resumed.summary["confusion"] == whole.summary["confusion"]


def test_a_client_that_missed_the_weights_gets_them_later(imbalanced, monkeypatch):
    original, missed, served = Loop.perform, [], []

    def perform(self, name, phase, message):
        if phase == "weigh_classes" and name == imbalanced.names[0]:
            if not missed:
                missed.append(name)
                raise ConnectionError("away")
            served.append(name)
        return original(self, name, phase, message)

    monkeypatch.setattr(Loop, "perform", perform)
    settings = {"model": MODEL, "rounds": 2, "class_weight": "balanced", "engine": "loop"}
    found = fedloom.run("fedavg", imbalanced, quorum=0.5, retries=0, **settings)
    assert missed == served == [imbalanced.names[0]]
    monkeypatch.setattr(Loop, "perform", original)
    assert distance(found, fedloom.run("fedavg", imbalanced, **settings)) == 0


# ---- what it is good for ----
@pytest.mark.parametrize("method", ["fedavg", "local", "fedsgd"])
def test_balanced_weights_find_the_rare_class(method, imbalanced):
    """The control, training without weights, predicts the frequent class only."""
    settings = {"model": MODEL, "rounds": 12, "selection": "pr_auc"}
    without = fedloom.run(method, imbalanced, **settings).summary
    balanced = fedloom.run(method, imbalanced, class_weight="balanced", **settings).summary
    assert without["recall"] < 0.1
    assert balanced["recall"] > without["recall"] + 0.3
    assert balanced["balanced_accuracy"] > without["balanced_accuracy"] + 0.1
