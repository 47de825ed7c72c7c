"""Clients that lie: each attack bites without protection, and is held with it."""

import json

import pytest
import torch

import fedloom
from fedloom import RunSettings
from fedloom.core.adversary import Adversary, draw_liars, flipped
from fedloom.data.partition import divide
from fedloom.data.synthetic import synthetic
from fedloom.errors import ConfigError

OFF = {"clip_norms": 0.0, "cap_weights": 0.0}
GLOBAL = {"evaluation": "global", "engine": "loop"}


@pytest.fixture(scope="module")
def ten():
    """Ten clients with equal tasks, so that a small run is enough."""
    graph = synthetic(nodes=600, classes=3, features=24, degree=6.0, homophily=0.8, seed=5)
    return divide(graph, 10, "random", 0, split="40/20/40")


def run(federation, method="fedavg", adversary=None, out=None, rounds=12, **settings):
    chosen = RunSettings(**{**GLOBAL, **settings})
    name = {"name": method, "rounds": rounds}
    return fedloom.run(name, federation, settings=chosen, adversary=adversary, out=out)


def last(result) -> float:
    return 100 * result.history[-1]["accuracy"]


def moved(federation, adversary=None, **settings) -> float:
    """How far liars move the model of the first round, in lengths of the honest step."""
    # A free rider's update is 0, so ten steps of nobody leave the initial model.
    start = run(federation, adversary={"clients": 9, "attack": "free-rider"}, rounds=1, **OFF)
    honest = run(federation, rounds=1, **OFF)
    lied = run(federation, adversary=adversary, rounds=1, **settings)
    first, true, false = (r.final["server"].tensors for r in (start, honest, lied))
    step = sum(float((true[n] - first[n]).square().sum()) for n in true) ** 0.5
    return sum(float((false[n] - true[n]).square().sum()) for n in true) ** 0.5 / step


# ---- attacks and protection ----
@pytest.mark.parametrize("attack", ["sign-flip", "scale", "noise"])
def test_liars_move_the_mean_and_not_a_protected_one(ten, attack):
    lies = {"clients": 3, "attack": attack}
    free = moved(ten, lies, **OFF)
    assert free > 0.5
    assert moved(ten, lies, reputation=True) < free / 2


@pytest.mark.parametrize("attack", ["sign-flip", "scale"])
def test_the_defaults_hold_one_liar(ten, attack):
    lies = {"clients": 1, "attack": attack}
    assert moved(ten, lies) < moved(ten, lies, **OFF) / 2


def test_the_defaults_hold_a_false_size(ten):
    lies = {"clients": 1, "attack": "size"}
    assert moved(ten, lies) < moved(ten, lies, **OFF) / 2


@pytest.mark.parametrize("rule", ["median", "trimmed", "krum", "geometric-median", "clipped"])
@pytest.mark.parametrize("method", ["fedsgd", "scaffold"])
def test_rules_work_for_sums_of_gradients_and_for_replies(ten, method, rule):
    evaluation = "common" if method == "fedsgd" else "global"
    settings = {"evaluation": evaluation, **OFF}
    honest = last(run(ten, method, rounds=25, **settings))
    held = run(
        ten,
        method,
        {"clients": 2, "attack": "scale", "strength": 100.0},
        rounds=25,
        aggregation=rule,
        **settings,
    )
    assert honest - last(held) < 12


# ---- what is recorded ----
def test_scores_are_of_the_honest_clients(ten):
    result = run(ten, adversary={"clients": 3, "attack": "label-flip"}, rounds=3)
    lied = result.summary["adversary"]
    assert lied["attack"] == "label-flip"
    assert lied["clients"] == list(draw_liars(ten.names, 3, 0))
    sizes = {size.name: size.items for size in ten.roster.sizes}
    best = next(e for e in result.history if e.get("round") == result.summary["best_round"])
    rows = {row["id"]: row["accuracy"] for row in best["clients"]}
    honest = [c for c in rows if c not in lied["clients"]]

    def mean(names):
        return sum(rows[c] * sizes[c] for c in names) / sum(sizes[c] for c in names)

    assert result.summary["accuracy"] == pytest.approx(mean(honest))
    assert lied["accuracy_all"] == pytest.approx(mean(rows))
    assert sum(map(sum, result.summary["confusion"])) == sum(
        size.test for size in ten.roster.sizes if size.name in honest
    )


def test_history_compares_the_updates(ten):
    result = run(ten, adversary={"clients": 1, "attack": "sign-flip"}, rounds=3)
    (liar,) = result.summary["adversary"]["clients"]
    for entry in (entry for entry in result.history if entry["round"]):
        (found,) = entry["updates"]
        assert found["phase"] == "train"
        assert found["clipped"] == [liar]
        norm, cosine = found["clients"][liar]
        assert norm > 5
        assert -1 <= cosine <= 1
        others = [pair for client, pair in found["clients"].items() if client != liar]
        assert all(norm < 2 for norm, _ in others)
    assert result.summary["clipped"] == {liar: 3}


def test_honest_runs_are_unchanged_by_the_defaults(ten):
    plain, default = run(ten, **OFF), run(ten)
    assert plain.summary["history_hash"] == default.summary["history_hash"]
    assert default.summary["clipped"] == {}


def test_label_flip_changes_training_labels_only(ten):
    graph = ten.graphs[0]
    wrong = flipped(graph)
    assert torch.equal(wrong.y[graph.train], 2 - graph.y[graph.train])
    assert torch.equal(wrong.y[~graph.train], graph.y[~graph.train])


# ---- engines, resume ----
@pytest.mark.parametrize("attack", ["sign-flip", "noise", "alie", "label-flip", "size"])
def test_engines_agree_on_a_run_with_liars(ten, attack):
    lies = {"clients": 3, "attack": attack}
    settings = {"aggregation": "trimmed", "rounds": 4}
    loop = run(ten, adversary=lies, **settings)
    wire = run(ten, adversary=lies, engine="wire", **settings)
    stacked = run(ten, adversary=lies, engine="stacked", **settings)
    assert loop.summary["history_hash"] == wire.summary["history_hash"]
    assert stacked.summary["adversary"]["clients"] == loop.summary["adversary"]["clients"]
    for name, tensor in loop.final["server"].tensors.items():
        torch.testing.assert_close(
            stacked.final["server"].tensors[name], tensor, atol=1e-4, rtol=1e-3
        )


@pytest.mark.slow
def test_processes_agree_on_a_run_with_liars(ten):
    lies = {"clients": 3, "attack": "noise"}
    loop = run(ten, adversary=lies, rounds=3)
    assert (
        run(ten, adversary=lies, rounds=3, engine="processes").summary["history_hash"]
        == (loop.summary["history_hash"])
    )


def broken_and_resumed(federation, lies, place, rounds, until=3, **settings):
    """Returns the result of a run that an error ends in the round `until`, and that is resumed."""

    class StopError(Exception):
        pass

    def stop(entry):
        if entry["round"] == until:
            raise StopError

    chosen = RunSettings(**GLOBAL, **settings, checkpoint_every=1)
    table = {"name": "fedavg", "rounds": rounds}
    given = {"settings": chosen, "adversary": lies, "out": place}
    with pytest.raises(StopError):
        fedloom.run(table, federation, callbacks=stop, **given)
    return fedloom.run(table, federation, resume=True, **given)


@pytest.mark.parametrize("attack", ["noise", "alie"])
def test_a_resumed_run_lies_as_an_unbroken_one(ten, tmp_path, attack):
    settings = {"aggregation": "median", "bucketing": 2}
    lies = {"clients": 2, "attack": attack}
    whole = run(ten, adversary=lies, rounds=5, **settings)
    again = broken_and_resumed(ten, lies, tmp_path / "cut", 5, **settings)
    assert again.summary["history_hash"] == whole.summary["history_hash"]
    assert again.summary["clipped"] == whole.summary["clipped"]
    kept = json.loads((tmp_path / "cut" / "config.json").read_text())
    assert kept["adversary"] == {"clients": 2, "attack": attack, "strength": 0.0}


def test_a_resumed_run_knows_the_reputation_of_an_unbroken_one(ten, tmp_path):
    # Updates agree in the first four rounds only, so later rounds need the scores of these.
    lies = {"clients": 2, "attack": "ipm"}
    whole = run(ten, adversary=lies, rounds=6, reputation=True)
    again = broken_and_resumed(ten, lies, tmp_path / "cut", 6, until=5, reputation=True)
    assert set(whole.summary["left_out"].values()) == {6}
    assert again.summary["left_out"] == whole.summary["left_out"]
    assert again.summary["history_hash"] == whole.summary["history_hash"]
    assert [e["updates"] for e in again.history] == [e["updates"] for e in whole.history]


# ---- bad input ----
@pytest.mark.parametrize(
    ("settings", "adversary", "message"),
    [
        ({"aggregation": "medain"}, None, "run.aggregation is 'medain'.*median"),
        ({"aggregation": "krum", "byzantine": 4}, None, "at most 3 of 10 clients"),
        ({"aggregation": "krum"}, {"clients": 4}, "adversary.clients is 4: .*at most 3 of 10"),
        (
            {"aggregation": "median", "bucketing": 3},
            {"clients": 2},
            "at most 1 of 10 .*groups of 3",
        ),
        ({"secure": True, "aggregation": "median"}, None, "needs single replies.*bucketing"),
        ({"secure": True, "bucketing": 2}, None, "run.bucketing is 2.*at least 3"),
        ({"secure": True}, {"clients": 1, "attack": "alie"}, "adversary.attack is 'alie'.*valid: "),
        ({"mixing": True}, None, "run.mixing is for another rule than 'mean'"),
        ({"secure_clip": 1.0}, None, "run.secure_clip is for secure runs"),
        ({}, {"clients": 10}, "at least one must be honest"),
        ({}, {"clients": 1, "attack": "flip"}, "adversary.attack is 'flip'.*sign-flip"),
        ({}, {"client": 1}, r"setting in \[adversary\].*'client'.*clients"),
    ],
)
def test_bad_input(ten, settings, adversary, message):
    with pytest.raises(ConfigError, match=message) as error:
        run(ten, adversary=adversary, **settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("method", ["fedproto", "local"])
def test_methods_without_weights_refuse_a_rule(ten, method):
    with pytest.raises(
        ConfigError, match=r"run\.aggregation is 'median': this method's clients send"
    ):
        run(ten, method, aggregation="median", evaluation="local")


def test_methods_that_use_replies_one_by_one_refuse_a_rule(ten):
    with pytest.raises(ConfigError, match=r"run\.aggregation is 'median': this method's"):
        run(ten, "fedspray", aggregation="median", evaluation="local", rounds=2)


def test_strength_of_alie_and_ipm():
    honest = torch.tensor([[1.0], [3.0]])
    own, rng = torch.zeros(1, 1), torch.Generator()
    assert Adversary(("a",), "alie", 2.0).lies(own, honest, rng).item() == 0.0  # 2 − 2 · 1
    assert Adversary(("a",), "ipm", 0.5).lies(own, honest, rng).item() == -1.0
