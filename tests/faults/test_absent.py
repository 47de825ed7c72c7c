"""Absence in the loop engine: causes in the history, failed rounds, and catching up."""

import io
import json
import random
import re
from dataclasses import dataclass, replace

import pytest
import torch
from rich.console import Console
from tests.faults.schedule import LOST, Schedule

from fedloom.cli import main
from fedloom.core.absence import FaultPolicy, listed
from fedloom.core.client import Client
from fedloom.core.message import Absent, flatten, unflatten
from fedloom.core.method import Plugin, composed
from fedloom.core.phase import Range, phase
from fedloom.data.federation import Federation
from fedloom.data.partition import divide
from fedloom.data.synthetic import synthetic
from fedloom.errors import ConfigError, FedloomError, MessageError, RoundFailed
from fedloom.experiments.report import tables as show
from fedloom.experiments.result import load_run
from fedloom.experiments.run import run
from fedloom.experiments.settings import RunSettings
from fedloom.methods.fedavg import FedAvg
from fedloom.methods.fedstruct.method import FedStruct
from fedloom.methods.local import Local

pytestmark = pytest.mark.usefixtures("reference_engine")

BOOM = ValueError("boom")
SETTINGS = {"model": "gcn-2x8", "rounds": 3, "quorum": 0.5}


def go(federation, method="fedavg", **settings):
    return run(method, federation, **{**SETTINGS, **settings})


def only(federation, names):
    graphs = [
        graph
        for name, graph in zip(federation.names, federation.graphs, strict=True)
        if name in names
    ]
    return replace(federation, graphs=tuple(graphs), names=tuple(names), whole=None)


def same_bits(one, other, owners=None):
    owners = owners or one.final_models.keys()
    return all(
        torch.equal(t, flatten(other.final_models[o])[k])
        for o in owners
        for k, t in flatten(one.final_models[o]).items()
    )


def absences(result):
    return [
        (e["round"], a["phase"], a["client"], a["cause"])
        for e in result.history
        for a in e.get("absent", [])
    ]


# ---- one of several fails ----
@pytest.mark.parametrize("engine", ["loop", "wire"])
def test_who_raises_is_left_out_and_the_others_are_averaged_to_the_bit(
    engine, node_federation, monkeypatch
):
    survivors = only(node_federation, ("0", "2", "3"))
    reference = go(survivors, engine=engine)
    unharmed = go(node_federation, engine=engine)
    Schedule(monkeypatch, {(None, None, "1"): BOOM})
    result = go(node_federation, engine=engine)
    assert result.summary["status"] == "completed"
    assert same_bits(reference, result, ("server", "0", "2", "3"))
    assert not same_bits(unharmed, result, ("server",))
    assert absences(result)[0] == (1, "setup", "1", "ValueError: boom")
    assert {cause for _, _, _, cause in absences(result)[1:]} == {
        "behind since 'setup': ValueError: boom"
    }
    assert result.summary["absences"] == {"1": len(absences(result))}
    assert result.summary["retried"] == 0
    assert result.per_client[1]["accuracy"] is None
    assert result.accuracy == pytest.approx(reference.accuracy)


def test_without_faults_nothing_is_said_and_a_quorum_changes_no_bit(node_federation):
    strict, lenient = go(node_federation, quorum=1.0), go(node_federation)
    assert strict.summary["history_hash"] == lenient.summary["history_hash"]
    assert strict.traffic == lenient.traffic
    assert all("absent" not in entry and "retried" not in entry for entry in lenient.history)
    assert (lenient.summary["absences"], lenient.summary["retried"]) == ({}, 0)
    assert "absent" not in printed(lenient)


def printed(result):
    console = Console(width=200, file=io.StringIO())
    console.print(show.result(result.summary))
    return console.file.getvalue()


def test_absences_are_kept_in_the_folder_and_shown(node_federation, monkeypatch, tmp_path):
    Schedule(monkeypatch, {(2, "train", "1"): BOOM, (2, "evaluate", "3"): KeyError("x")})
    result = go(node_federation, out=tmp_path / "x")
    expected = [(2, "train", "1", "ValueError: boom"), (2, "evaluate", "3", "KeyError: 'x'")]
    assert absences(result) == absences(load_run(tmp_path / "x")) == expected
    assert [row["id"] for row in result.history[1]["clients"]] == [
        "0",
        "1",
        "2",
    ]  # those who answered are scored
    assert [row["id"] for row in result.history[2]["clients"]] == ["0", "1", "2", "3"]
    assert json.loads((tmp_path / "x" / "summary.json").read_text())["absences"] == {"1": 1, "3": 1}
    assert "absent from exchanges: 1 (once), 3 (once); asked again: 0" in printed(result)


@pytest.mark.parametrize("engine", ["loop", "wire"])
def test_with_a_quorum_of_1_the_clients_own_error_ends_the_run(
    engine, node_federation, monkeypatch
):
    Schedule(monkeypatch, {(2, "train", "1"): BOOM})
    with pytest.raises(ValueError, match="boom") as raised:
        go(node_federation, quorum=1.0, engine=engine)
    assert raised.value is BOOM


def test_an_interrupt_is_no_absence(node_federation, monkeypatch):
    def interrupt(reply):
        raise KeyboardInterrupt

    Schedule(monkeypatch, {(2, "train", "1"): interrupt})
    with pytest.raises(KeyboardInterrupt):
        go(node_federation)


def spoilt(change):
    def spoil(reply):
        flat = flatten(reply)
        key = next(k for k, t in flat.items() if t.dim() == 2)
        change(flat, key)
        return unflatten(flat)

    return spoil


def put(value):
    return lambda flat, key: flat[key].view(-1)[0].fill_(value)


def change(key_to):
    """Returns a fault that replaces the first matrix of a reply."""
    return spoilt(lambda flat, key: flat.update({key: key_to(flat[key])}))


BAD = {
    "nan": (spoilt(put(float("nan"))), r"refused: tensor 'model/.*' holds nan"),
    "1e38": (
        spoilt(put(1e38)),
        r"refused: tensor 'model/.*' holds 9\.99.*e\+37: only finite numbers travel, up to 2\^100",
    ),
    "-2^101": (spoilt(put(-(2.0**101))), r"refused: tensor 'model/.*' holds -2\.53"),
    "inf": (spoilt(put(float("inf"))), r"refused: tensor 'model/.*' holds inf"),
    "shape": (change(torch.t), r"refused: tensor 'model/.*' has shape"),
    "broadcastable": (
        change(lambda t: torch.ones(1)),
        r"refused: tensor 'model/.*' has shape \[1\], expected",
    ),
    "dtype": (change(torch.Tensor.double), r"refused: tensor 'model/.*' has dtype"),
    "missing": (spoilt(lambda flat, key: flat.pop(key)), r"refused: tensor 'model/.*' is missing"),
    "extra": (
        spoilt(lambda flat, key: flat.update({"more": torch.ones(1)})),
        r"refused: tensor 'more' is not expected here",
    ),
    "not a tensor": (lambda reply: {"model": 3.0}, r"refused: message: 'model' is a float"),
    "not a message": (lambda reply: [reply], r"refused: message: it is a list"),
    "nothing": (lambda reply: None, r"refused: message: it is a NoneType"),
    "lost": (LOST, "did not answer"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_answer_is_refused_by_name_and_the_others_are_averaged_to_the_bit(
    kind, node_federation, monkeypatch
):
    fault, words = BAD[kind]
    with monkeypatch.context() as patch:
        Schedule(patch, {(2, "train", "1"): BOOM})
        reference = go(node_federation, rounds=2)
    with monkeypatch.context() as patch:
        Schedule(patch, {(2, "train", "1"): fault})
        result = go(node_federation, rounds=2)
        ((number, phase_name, client, cause),) = absences(result)
        assert (number, phase_name, client) == (2, "train", "1")
        assert re.match(words, cause)
        assert same_bits(reference, result, ("server", "0", "2", "3"))
        if kind != "lost":  # the control: with a quorum of 1 it is an error
            with pytest.raises(MessageError):
                go(node_federation, quorum=1.0)


@pytest.mark.parametrize("value", [2.0**100, -(2.0**100), 1e-45])
def test_what_is_no_larger_than_the_limit_passes(value, node_federation, monkeypatch):
    """Form is checked, not honesty; the smallest numbers there are occur in honest weights, too."""
    Schedule(monkeypatch, {(1, "train", "1"): spoilt(put(value))})
    assert absences(go(node_federation, rounds=1)) == []


@pytest.mark.parametrize("weight", [-5, -(2**62), 2**62])
def test_a_weight_that_nobody_can_have_is_refused(weight, node_federation, monkeypatch):
    reference = go(only(node_federation, ("0", "2", "3")), rounds=2)
    Schedule(monkeypatch, {(None, "size", "1"): lambda reply: {"size": torch.tensor(weight)}})
    result = go(node_federation, rounds=2)
    assert absences(result)[0] == (
        1,
        "size",
        "1",
        f"refused: client '1': weight is {float(weight)}, must be finite, "
        "not negative and at most 2^53",
    )
    assert same_bits(reference, result, ("server",))


@dataclass(frozen=True)
class ByHeart(FedAvg):
    """FedAvg by weights that are no whole numbers."""

    @phase(size="float32[]")
    def size(self, client):
        """As a float."""
        return {"size": torch.tensor(float(client.graph.num_items))}


def test_a_weight_that_is_no_number_is_refused(node_federation, monkeypatch):
    Schedule(monkeypatch, {(None, "size", "1"): lambda reply: {"size": torch.tensor(float("nan"))}})
    settings = {key: value for key, value in SETTINGS.items() if key != "rounds"}
    result = run(ByHeart(rounds=2), node_federation, **settings)
    assert absences(result)[0] == (
        1,
        "size",
        "1",
        "refused: client '1': weight is nan, must be finite, not negative and at most 2^53",
    )


def test_weights_that_are_all_0_end_the_run_and_keep_the_model(
    node_federation, monkeypatch, tmp_path
):
    monkeypatch.setattr(Range, "check", lambda *_: None)  # a weight of one's own has no range
    Schedule(monkeypatch, {(None, "size", None): lambda reply: {"size": torch.tensor(0)}})
    with pytest.raises(MessageError, match="all clients that answered have weight 0"):
        go(node_federation, out=tmp_path / "x")
    kept = load_run(tmp_path / "x")
    assert kept.summary["status"] == "failed"
    assert "weight 0" in kept.summary["cause"]
    assert all(torch.isfinite(t).all() for t in kept.final_models["server"].values())


# ---- too few ----
def test_if_too_few_answer_the_others_are_asked_again_and_nobody_twice_who_has_answered(
    node_federation, monkeypatch
):
    unharmed = go(node_federation)
    schedule = Schedule(monkeypatch, {(2, "train", c): [LOST, BOOM] for c in "123"})
    result = go(node_federation)
    of_train = [c for r, p, c in schedule.asked if (r, p) == (2, "train")]
    assert of_train == ["0", "1", "2", "3", "1", "2", "3", "1", "2", "3"]
    assert absences(result) == []
    assert result.summary["retried"] == result.history[1]["retried"] == 6
    assert not same_bits(unharmed, result, ("server",))  # who was asked again has trained again


@pytest.mark.parametrize("retries", [0, 2])
def test_if_all_drop_the_run_fails_with_the_model_of_the_round_before(
    retries, node_federation, monkeypatch, tmp_path
):
    before = go(node_federation, rounds=2)
    schedule = Schedule(monkeypatch, {(3, "train", None): BOOM})
    with pytest.raises(RoundFailed) as failure:
        go(node_federation, rounds=5, retries=retries, out=tmp_path / "x")
    words = (
        "round 3, 'train': 0 of 4 clients answered (nobody), 2 are needed; "
        "absent: 0, 1, 2, 3: ValueError: boom"
    )
    assert str(failure.value) == words
    assert [c for r, p, c in schedule.asked if (r, p) == (3, "train")] == [*"0123"] * (1 + retries)
    kept = load_run(tmp_path / "x")
    assert kept.summary["status"] == "failed"
    assert kept.summary["cause"] == f"RoundFailed: {words}"
    assert kept.summary["absences"] == dict.fromkeys("0123", 1)
    assert kept.summary["retried"] == 4 * retries
    assert kept.summary["rounds"] == 2
    assert all(
        torch.equal(t, flatten(before.final_models["server"])[k])
        for k, t in kept.final_models["server"].items()
    )


def test_a_round_that_fails_late_takes_back_what_it_did_to_the_model(
    node_federation, monkeypatch, tmp_path
):
    before = go(node_federation, "fedsgd", rounds=2)
    Schedule(monkeypatch, {(3, "evaluate", None): BOOM})  # after the server's step
    with pytest.raises(RoundFailed, match=r"round 3, 'evaluate'"):
        go(node_federation, "fedsgd", rounds=5, out=tmp_path / "x")
    kept = load_run(tmp_path / "x").final_models["server"]
    assert all(torch.equal(t, flatten(before.final_models["server"])[k]) for k, t in kept.items())


def test_before_the_rounds_too_few_fail_too(node_federation, monkeypatch):
    Schedule(monkeypatch, {(None, "setup", c): BOOM for c in "012"})
    with pytest.raises(
        RoundFailed,
        match=r"before round 1, 'setup': 1 of 4 clients answered \(3\), 2 are needed; "
        "absent: 0, 1, 2: ValueError",
    ):
        go(node_federation)


@pytest.mark.slow
def test_a_run_bears_30_per_cent_dropout_in_each_of_100_rounds(monkeypatch):
    graph = synthetic(nodes=150, classes=3, features=6, degree=4.0, seed=1)
    federation = divide(graph, 10, "random", 0, split="40/30/30")
    lots = random.Random(0)
    drops = {
        (r, p, c): BOOM
        for r in range(1, 101)
        for c in federation.names
        if lots.random() < 0.3
        for p in ("size", "train")
    }
    Schedule(monkeypatch, drops)
    result = go(federation, rounds=100, quorum=0.2, evaluate_every=50)
    assert result.summary["status"] == "completed"
    assert result.summary["rounds"] == 100
    dropped = {(r, c) for r, _, c in drops}
    assert {(r, c) for r, _, c, _ in absences(result)} == dropped
    assert 200 < len(dropped) < 400


def test_a_flapping_client_is_in_when_it_is_there(node_federation, monkeypatch):
    schedule = Schedule(monkeypatch, {(r, "train", "1"): BOOM for r in (2, 4, 6)})
    result = go(node_federation, rounds=6)
    assert [(r, c) for r, _, c, _ in absences(result)] == [(2, "1"), (4, "1"), (6, "1")]
    assert [r for r, p, c in schedule.asked if (p, c) == ("train", "1")] == [1, 2, 3, 4, 5, 6]
    assert [r for r, p, c in schedule.asked if (p, c) == ("size", "1")] == [1]


# ---- what follows from absence ----
def test_who_misses_an_exchange_is_out_of_the_round_but_not_of_its_evaluation(
    node_federation, monkeypatch
):
    schedule = Schedule(monkeypatch, {(2, "train", "1"): LOST})  # it has trained, and nobody knows
    result = go(node_federation, "fedgkc", copilot="gcn-2x8")
    assert [(r, p) for r, p, c in schedule.asked if c == "1" and r in (2, 3)] == [
        (2, "train"), (2, "evaluate"), (3, "train"), (3, "contribute"), (3, "evaluate")
    ]  # fmt: skip
    assert absences(result) == [(2, "train", "1", "did not answer")]


def test_who_is_out_of_a_round_counts_as_absent_in_all_of_it(node_federation, monkeypatch):
    Schedule(
        monkeypatch,
        {(2, "train", "1"): BOOM, (2, "train", "2"): BOOM, (2, "contribute", "3"): KeyError("x")},
    )
    with pytest.raises(
        RoundFailed,
        match=r"round 2, 'contribute': 1 of 4 .* 2 are needed; "
        "absent: 1, 2: ValueError: boom; 3: KeyError",
    ):
        go(node_federation, "fedgkc", copilot="gcn-2x8")


def test_who_misses_setup_is_handed_it_again_before_it_is_asked_anything_else(
    node_federation, monkeypatch
):
    unharmed = go(node_federation)
    schedule = Schedule(monkeypatch, {(0, "setup", "1"): BOOM})
    result = go(node_federation)
    assert [(r, p) for r, p, c in schedule.asked if c == "1"][:4] == [
        (0, "setup"),
        (1, "setup"),
        (1, "size"),
        (1, "train"),
    ]
    assert [p for r, p, c in schedule.asked if c == "0"].count("setup") == 1
    assert absences(result) == [(1, "setup", "1", "ValueError: boom")]
    assert same_bits(unharmed, result)  # it takes part as if nothing had been


def test_who_joins_late_takes_part_from_then_on(node_federation, monkeypatch):
    schedule = Schedule(monkeypatch, {(r, None, "1"): BOOM for r in (0, 1, 2)})
    result = go(node_federation, rounds=4)
    assert [(r, p) for r, p, c in schedule.asked if c == "1" and r == 3] == [
        (3, p) for p in ("setup", "size", "train", "evaluate")
    ]
    assert {r for r, *_ in absences(result)} == {1, 2}
    assert result.history[-1]["clients"][1]["id"] == "1"


@dataclass(frozen=True)
class InSteps(Local):
    """Prepares its clients in three steps, of which each needs the one before."""

    @phase(x="float32[]")
    def first(self, client: Client):
        """1."""
        client.memory["steps"] = [1]
        return {"x": torch.tensor(1.0)}

    @phase()
    def second(self, client: Client, x):
        """2, and what came with it."""
        client.memory["steps"].append(float(x))
        return {}

    @phase(steps="float32[n]")
    def third(self, client: Client):
        """What was done."""
        return {"steps": torch.tensor(client.memory["steps"])}

    def run(self, server):
        """The steps, then rounds that show what is left of them."""
        server.ask(self.setup)
        server.ask(self.first)
        server.ask(self.second, x=torch.tensor(2.0))
        for _ in server.rounds(self.rounds):
            for client, reply in server.ask(self.third).items():
                server.notes[f"{server.round} {client}"] = reply["steps"].tolist()
            server.evaluate()


def steps(federation, monkeypatch, faults):
    with monkeypatch.context() as patch:
        schedule = Schedule(patch, faults)
        settings = {key: value for key, value in SETTINGS.items() if key != "rounds"}
        return run(InSteps(rounds=3), federation, **settings), schedule


def test_what_was_missed_is_made_up_for_in_order(node_federation, monkeypatch):
    result, schedule = steps(
        node_federation, monkeypatch, {(0, "first", "1"): [BOOM], (0, "second", "2"): [BOOM]}
    )
    assert [p for r, p, c in schedule.asked if c == "1"][:5] == [
        "setup",
        "first",
        "first",
        "second",
        "third",
    ]
    assert [p for r, p, c in schedule.asked if c == "2"][:5] == [
        "setup",
        "first",
        "second",
        "second",
        "third",
    ]
    assert result.summary["notes"] == {f"{r} {c}": [1.0, 2.0] for r in (1, 2, 3) for c in "0123"}


def test_who_has_lost_its_state_is_handed_in_everything(node_federation, monkeypatch):
    gone = Absent("was started anew", lost_state=True)
    result, schedule = steps(node_federation, monkeypatch, {(2, "third", "1"): gone})
    of_1 = [(r, p) for r, p, c in schedule.asked if c == "1"]
    assert (
        of_1[-6:]
        == [
            (2, "third"),
            *((2, p) for p in ("setup", "first", "second")),
            (2, "evaluate"),
            (3, "third"),
            (3, "evaluate"),
        ][1:]
    )
    assert "2 1" not in result.summary["notes"]
    assert result.summary["notes"]["3 1"] == [1.0, 2.0]
    assert absences(result) == [(2, "third", "1", "was started anew")]


def test_who_forgets_in_an_evaluation_sits_out_a_round(node_federation, monkeypatch):
    gone = Absent("was started anew", lost_state=True)
    result, schedule = steps(node_federation, monkeypatch, {(1, "evaluate", "1"): gone})
    assert [p for r, p, c in schedule.asked if (r, c) == (2, "1")] == [
        "setup",
        "first",
        "second",
        "evaluate",
    ]
    assert "2 1" not in result.summary["notes"]
    assert "3 1" in result.summary["notes"]


def test_a_resumed_run_says_the_same_of_absences(node_federation, monkeypatch, tmp_path):
    faults = {(0, "setup", "1"): BOOM, (2, "train", "2"): BOOM, (4, "train", "3"): BOOM}

    class Killed(BaseException):
        """Stands for whatever ends a process."""

    def die(entry):
        if entry["round"] == 3:
            raise Killed

    with monkeypatch.context() as patch:
        Schedule(patch, faults)
        unbroken = go(node_federation, rounds=4)
        with pytest.raises(Killed):
            go(node_federation, rounds=4, checkpoint_every=1, out=tmp_path / "x", callbacks=die)
        resumed = go(node_federation, rounds=4, checkpoint_every=1, out=tmp_path / "x", resume=True)
    assert absences(resumed) == absences(unbroken)
    assert resumed.summary["absences"] == unbroken.summary["absences"] == {"1": 1, "2": 1, "3": 1}


# ---- what methods need ----
def test_a_method_says_how_few_are_too_few(node_federation, monkeypatch):
    monkeypatch.setattr(FedAvg, "min_replies", 3)
    with monkeypatch.context() as patch:
        Schedule(patch, {(2, "train", "1"): BOOM})
        assert go(node_federation, quorum=0.1).summary["status"] == "completed"
    Schedule(monkeypatch, {(2, "train", "1"): BOOM, (2, "train", "2"): BOOM})
    with pytest.raises(
        RoundFailed, match=r"round 2, 'train': 2 of 4 clients answered \(0, 3\), 3 are needed"
    ):
        go(node_federation, quorum=0.1)


@pytest.mark.parametrize(("structure", "phase_name"), [("deg", "describe"), ("node2vec", "reveal")])
@pytest.mark.parametrize("secure", [False, True])
def test_a_method_says_in_which_phases_nobody_may_be_absent(
    structure, phase_name, secure, cross_federation, monkeypatch
):
    if secure and structure == "node2vec":
        pytest.skip("edges that the server sees are for plain runs")
    assert phase_name in FedStruct.requires_all
    Schedule(monkeypatch, {(0, phase_name, "1"): BOOM})
    with pytest.raises(
        RoundFailed,
        match=rf"before round 1, '{phase_name}': 3 of 4 .*, 4 are needed; "
        "absent: 1: ValueError: boom",
    ):
        go(cross_federation, "fedstruct", structure=structure, secure=secure)


def test_a_plug_in_and_its_method_both_say_so():
    class Before(Plugin):
        """Needs all clients in a phase of its own."""

        requires_all = ("mine",)

        def prepare_clients(self, server):
            """Nothing."""

    assert composed(Before, FedStruct, "fedstruct").requires_all == (
        "mine",
        *FedStruct.requires_all,
    )


# ---- at the command line ----
METHOD = '''"""FedAvg whose clients give up."""
from dataclasses import dataclass
from fedloom.core.phase import averaged, phase
from fedloom.methods.fedavg import FedAvg


@dataclass(frozen=True)
class GivesUp(FedAvg):
    """Does not train."""

    @averaged(by="size")
    @phase(model="=model")
    def train(self, client, model):
        """Never."""
        raise OSError("no\\nmore")
'''


def test_a_failed_round_is_one_line_and_exit_code_1(monkeypatch, capsys, tmp_path):
    (tmp_path / "gives_up.py").write_text(METHOD)
    given = [
        "--method",
        str(tmp_path / "gives_up.py"),
        "--dataset",
        "synthetic:nodes=60",
        "--clients",
        "2",
        "--model",
        "gcn-2x4",
    ]
    for quorum, code in (("0.5", 1), ("2", 2)):
        monkeypatch.setattr(
            "sys.argv",
            [
                "fedloom",
                "run",
                *given,
                "--set",
                f"run.quorum={quorum}",
                "--out",
                str(tmp_path / quorum),
            ],
        )
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == code
        last = capsys.readouterr().err.strip().splitlines()[-1]
        if code == 1:
            words = (
                "round 1, 'train': 0 of 2 clients answered (nobody), 1 are needed; "
                "absent: 0, 1: OSError: no more"
            )
            assert last == f"fedloom: {words}"


# ---- settings ----
def test_settings_say_which_engines_can():
    assert RunSettings(engine="processes", quorum=0.5, deadline=3, grace=1).deadline == 3
    with pytest.raises(
        ConfigError, match=r"run\.quorum is 0, must be a number above 0 and at most 1"
    ):
        RunSettings(quorum=0)
    with pytest.raises(
        ConfigError,
        match=r"run\.quorum is 0\.5, engine 'stacked' cannot continue .*; "
        r"valid: 1, or run\.engine auto, loop",
    ):
        RunSettings(engine="stacked", quorum=0.5)
    for engine in ("loop", "wire", "stacked"):
        for name in ("deadline", "grace"):
            with pytest.raises(
                ConfigError,
                match=rf"run\.{name} is 5, engine '{engine}' has none; "
                r"valid: 0, or run\.engine auto, processes",
            ):
                RunSettings(engine=engine, **{name: 5})


def test_shares_of_clients_are_whole_numbers():
    assert [FaultPolicy(0.7).enough(n) for n in (1, 2, 10, 100)] == [1, 2, 7, 70]
    assert [FaultPolicy(1.0).enough(n) for n in (0, 3)] == [0, 3]
    assert FaultPolicy(0.01).enough(10) == 1


def test_causes_are_one_line_each():
    assert Absent("two\n  lines").cause == "two lines"
    assert Absent.by(KeyError("x")).cause == "KeyError: 'x'"
    many = {str(k): Absent("late") for k in range(25)}
    assert listed(many) == ", ".join(str(k) for k in range(20)) + " and 5 more: late"


def test_a_failed_round_is_an_error_of_its_own_kind():
    assert issubclass(RoundFailed, FedloomError)
    assert not issubclass(RoundFailed, MessageError | ConfigError)


def test_one_client_alone_cannot_be_done_without(node_federation, monkeypatch):
    Schedule(monkeypatch, {(1, "train", "0"): BOOM})
    with pytest.raises(RoundFailed, match=r"0 of 1 clients answered \(nobody\), 1 are needed"):
        go(Federation((replace(node_federation.graphs[0], cross_edges=None),)), quorum=0.01)
