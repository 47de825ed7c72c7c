"""Secure sums over groups of clients: what the server sees, what a client refuses, liars."""

import json

import pytest
import torch

import fedloom
from fedloom import RunSettings
from fedloom.core.facts import SecureTerms
from fedloom.data.partition import divide
from fedloom.data.synthetic import synthetic
from fedloom.errors import Refusal
from fedloom.privacy.sum_record import SumId, SumRecord


@pytest.fixture(scope="module")
def ten():
    graph = synthetic(nodes=600, classes=3, features=24, degree=6.0, homophily=0.8, seed=5)
    return divide(graph, 10, "random", 0, split="40/20/40")


def run(federation, adversary=None, method="fedavg", out=None, rounds=3, **settings):
    chosen = RunSettings(engine="loop", secure=True, **settings)
    table = {"name": method, "rounds": rounds}
    return fedloom.run(table, federation, settings=chosen, adversary=adversary, out=out)


def cohorts(folder, phase="train"):
    """{round: the cohorts of a phase}, from the log of the server."""
    found: dict[int, list[set[str]]] = {}
    for line in (folder / "secure-sums.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["phase"] == phase:
            found.setdefault(row["round"], []).append(set(row["clients"]))
    return found


def test_weights_are_summed_over_disjoint_groups_of_three_or_more(ten, tmp_path):
    result = run(ten, out=tmp_path / "run", bucketing=3, aggregation="median")
    for groups in cohorts(tmp_path / "run").values():
        assert sorted(map(len, groups)) == [3, 3, 4]
        assert set.union(*groups) == set(ten.names)
        assert sum(map(len, groups)) == 10
    assert len({str(groups) for groups in cohorts(tmp_path / "run").values()}) > 1  # drawn anew
    whole = cohorts(tmp_path / "run", "evaluate_sum").values()
    assert all(groups == [set(ten.names)] for groups in whole)
    assert result.summary["secure"]["fewest_clients"] == 3


def test_the_mean_of_groups_is_the_mean_of_all(ten):
    off = {"clip_norms": 0.0, "cap_weights": 0.0}
    one, groups = run(ten, rounds=2, **off), run(ten, rounds=2, bucketing=3, **off)
    for name, tensor in one.final["server"][1].items():
        torch.testing.assert_close(groups.final["server"][1][name], tensor, atol=1e-5, rtol=1e-4)


def test_gradients_too(ten, tmp_path):
    result = run(ten, None, "fedsgd", tmp_path / "run", bucketing=4, aggregation="clipped")
    groups = cohorts(tmp_path / "run", "gradient")[1]
    assert sorted(map(len, groups)) == [5, 5]
    assert result.summary["status"] == "completed"


def test_a_client_is_in_one_group_of_a_round_and_phase():
    record = SumRecord(apart=2)

    def sum_over(cohort, number, round=1, **more):
        about = SumId(bytes(16), number, round, "train")
        record.begin(about)
        record.release(about, cohort, **more)

    sum_over("abc", 1, one_cohort=True)
    sum_over("abc", 2, one_cohort=True)
    with pytest.raises(Refusal, match=r"a client is in one group of a round only \(run.bucketing"):
        sum_over("ade", 3, one_cohort=True)
    sum_over("ade", 4, round=2, one_cohort=True)
    sum_over("abcdefgh", 5, round=2)  # the control: a sum that is not over groups


def test_terms_of_a_group():
    terms = SecureTerms(cohort=1.0, bucket=4)
    assert terms.least(10) == 10
    assert terms.for_bucket(10).least(10) == 4
    assert SecureTerms(cohort=0.5, bucket=4).for_bucket(10).least(10) == 3  # never fewer


def test_a_resumed_run_has_the_same_groups(ten, tmp_path):
    settings = {"bucketing": 3, "aggregation": "median", "checkpoint_every": 1}
    whole = run(ten, out=tmp_path / "whole", rounds=4, **settings)

    def die(entry):
        if entry["round"] == 2:
            raise KeyboardInterrupt

    chosen = RunSettings(engine="loop", secure=True, **settings)
    table, place = {"name": "fedavg", "rounds": 4}, tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        fedloom.run(table, ten, settings=chosen, out=place, callbacks=die)
    again = fedloom.run(table, ten, settings=chosen, out=place, resume=True)
    assert again.summary["history_hash"] == whole.summary["history_hash"]


# ---- liars ----
@pytest.mark.parametrize("attack", ["scale", "size"])
def test_one_liar_spoils_the_sum_but_not_the_median_of_three_groups(ten, attack):
    honest = run(ten, rounds=1).final["server"][1]

    def apart(**settings):
        lies = {"clients": 1, "attack": attack}
        lied = run(ten, lies, rounds=1, **settings).final["server"][1]
        return sum(float((lied[n] - honest[n]).square().sum()) for n in honest) ** 0.5

    bad, held = apart(), apart(bucketing=3, aggregation="median")
    assert held < bad / 2


def test_scores_of_a_secure_run_leave_out_the_liars(ten):
    lies = {"clients": 3, "attack": "free-rider"}
    result = run(ten, lies, rounds=1)
    liars = result.summary["adversary"]["clients"]
    tested = sum(size.test for size in ten.roster.sizes if size.name not in liars)
    assert sum(map(sum, result.summary["confusion"])) == tested


def test_honest_clients_shorten_their_updates_before_they_are_masked(ten):
    start = run(ten, rounds=1, secure_clip=1e-9).final["server"][1]
    moved = run(ten, rounds=1, secure_clip=0.05).final["server"][1]
    free = run(ten, rounds=1).final["server"][1]

    def apart(model):
        return sum(float((model[n] - start[n]).square().sum()) for n in start) ** 0.5

    assert apart(moved) <= 0.0501
    assert apart(free) > 0.1  # the control
