"""A party sees its own scores, and whether the federation is better than training alone."""

import json
from dataclasses import replace

import pytest
from in_process import InProcess

import fedloom
from fedloom.core.message import encode
from fedloom.deploy.scores import OwnHistory, gain
from fedloom.experiments.run_folder import read_config, read_history


def local_run(deployed, name):
    """Returns the result of the method `local` on one party's graph, in the loop engine."""
    d = deployed.deployment
    graph = d.federation.graphs[d.parties.index(name)]
    alone = replace(d.federation, graphs=(graph,), names=(name,), whole=None)
    return fedloom.run(
        "local", alone, model=d.model, seed=d.run["seed"], rounds=d.settings["rounds"]
    )


@pytest.fixture
def deployed(tmp_path):
    return InProcess(tmp_path, baseline=True)


def test_a_party_sees_its_own_scores_in_every_round(deployed):
    rows = []
    deployed.transport.parties["bank-b"].on_scores = rows.append
    deployed.serve()
    history = read_history(deployed.folder / "run")
    of_party = [next(r for r in e["clients"] if r["id"] == "bank-b") for e in history]
    assert [row["round"] for row in rows] == [1, 2, 3, 4]
    for name in ("accuracy", "val_accuracy", "f1_macro"):
        assert [row[name] for row in rows] == [row[name] for row in of_party]


def test_the_local_baseline_is_that_of_a_simulation_and_changes_nothing_in_the_run(deployed):
    result = deployed.serve()
    assert result.summary["history_hash"] == deployed.deployment.reference().summary["history_hash"]
    expected = {}
    for name, party in deployed.transport.parties.items():
        line = party.conclude()
        expected[name] = local_run(deployed, name).accuracy
        scores = json.loads((party.folder / "scores.json").read_text())
        assert scores["local"]["accuracy"] == expected[name]
        assert len(scores["history"]) == 4
        assert scores["federated"] in scores["history"]
        assert f"Local {expected[name]:.3f} (accuracy, test items of {name})" in line
    local = result.summary["local"]
    sizes = {row["id"]: row["items"] for row in result.per_client}
    by_size = sum(expected[n] * sizes[n] for n in sizes) / sum(sizes.values())
    assert local["accuracy"] == pytest.approx(by_size)
    assert local["accuracy_mean"] == pytest.approx(sum(expected.values()) / 3)
    on_disk = json.loads((deployed.folder / "run" / "summary.json").read_text())
    assert on_disk["local"] == local


def test_serve_says_what_federating_gains_or_that_a_party_declines(tmp_path, deployed):
    lines = []
    deployed.serve(log=lines.append)
    (line,) = [line for line in lines if line.startswith("federated ")]
    assert "Local" in line
    assert "average over the parties" in line
    assert "federating " in line
    (tmp_path / "other").mkdir()
    other = InProcess(tmp_path / "other", baseline=True)
    other.transport.parties["bank-b"] = other.party("bank-b", baseline=False)
    lines = []
    result = other.serve(log=lines.append)
    assert "no Local baseline: bank-b declines" in lines
    assert "local" not in result.summary
    assert other.transport.parties["bank-b"].conclude() == ""
    assert "federating" in other.transport.parties["bank-a"].conclude()


def test_in_a_secure_run_the_local_scores_are_a_masked_sum(tmp_path, deployed):
    plain = deployed.serve().summary["local"]
    home = tmp_path / "secure"
    home.mkdir()
    secure = InProcess(home, baseline=True, run={"secure": True})
    sent = []
    for party in secure.transport.parties.values():
        answer = party.answer
        party.answer = lambda data, answer=answer: sent.append(answer(data)) or sent[-1]
    masked = secure.serve().summary["local"]
    assert masked["accuracy"] == pytest.approx(plain["accuracy"], abs=1e-6)
    party = secure.transport.parties["bank-a"]
    assert party._local.done
    summand = encode(party._local.summand, "evaluate_sum")
    numbers = party._local.summand["scores"].numpy().tobytes()
    assert numbers in summand  # the control: this is how it would travel in the clear
    assert not any(numbers in data for data in sent)


def test_a_party_adds_its_local_score_once(deployed):
    deployed.serve()
    assert "local" not in deployed.transport.parties["bank-a"]._local_client.memory


def test_a_resumed_run_repeats_no_row(deployed):
    class StoppedError(Exception):
        """Ends a run."""

    def stop(entry):
        if entry["round"] == 3:
            raise StoppedError

    with pytest.raises(StoppedError):
        deployed.serve(callbacks=stop)
    for name in ("bank-a", "bank-b"):  # restarted; bank-c continues
        deployed.transport.parties[name] = deployed.party(name, baseline=True)
    deployed.serve(resumed=read_config(deployed.folder / "run"))
    for party in deployed.transport.parties.values():
        party.conclude()
        rows = json.loads((party.folder / "scores.json").read_text())["history"]
        assert [row["round"] for row in rows] == [1, 2, 3, 4]


def test_rows_of_a_repeated_round_are_replaced(tmp_path):
    path = tmp_path / "history.jsonl"
    first = OwnHistory(path)
    for number in (1, 2, 2, 3):
        first.add({"round": number, "accuracy": 0.1})
    again = OwnHistory(path)
    for number in (2, 2, 3):
        again.add({"round": number, "accuracy": 0.2})
    assert OwnHistory(path).rows == again.rows
    assert [(r["round"], r["accuracy"]) for r in again.rows] == [
        (1, 0.1),
        (2, 0.2),
        (2, 0.2),
        (3, 0.2),
    ]


def test_the_line_names_the_metric_and_the_gain():
    one, other = {"pr_auc": 0.83, "x": None}, {"pr_auc": 0.74, "x": 0.1}
    line = "federated 0.830, Local 0.740 (PR-AUC, bank-a): federating gains 0.090"
    assert gain(one, other, "pr_auc", "bank-a") == line
    assert gain(other, one, "pr_auc", "bank-a").endswith("federating loses 0.090")
    assert "cannot be compared" in gain(one, other, "x", "bank-a")
