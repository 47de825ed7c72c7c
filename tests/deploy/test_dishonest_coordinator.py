"""A dishonest coordinator: parties keep to their own agreement, and to what they have signed.

Each attack has a control: with the one protection off, the attack succeeds.
"""

import json
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from deployment import kill
from in_process import InProcess
from tests.privacy.test_secure_aggregation import make, plain_sum

from fedloom.core.facts import Facts, SecureTerms
from fedloom.core.server import RoundPolicy, Server
from fedloom.deploy import coordinator
from fedloom.deploy.engine import RemoteEngine
from fedloom.deploy.party import facts_to_json
from fedloom.errors import ConfigError, FedloomError, RoundFailed
from fedloom.experiments.run_folder import read_config
from fedloom.privacy import secure_sum
from fedloom.privacy.choice import aggregation_for
from fedloom.privacy.secure_sum import Member
from fedloom.privacy.sum_record import SumRecord

FOUR = ("bank-a", "bank-b", "bank-c", "bank-d")
SECURE = {"secure": True}
slow = pytest.mark.slow


class StoppedError(Exception):
    """Ends a run, as a crash would."""


def stop_in_round(number):
    """Returns a callback that ends the run after the sums of a round, before its checkpoint."""

    def stop(entry):
        if entry["round"] == number:
            raise StoppedError

    return stop


# ---- facts ----
LIES = {
    "num_features": 9,
    "num_classes": 7,
    "task": "graph",
    "clients": ["bank-a", "sybil-1", "sybil-2"],
    "models": ["mlp-2x8"] * 3,
    "dropout": 0.0,
    "seed": 8,
    "auc": True,
    "secure": None,
    "upload": "int8",
    "download": "int8",
    "selection": "f1_macro",
    "top_k": 5,
    "class_weight": "balanced",
    "adversary": {"clients": ["bank-a"], "attack": "scale", "strength": 1.0},
    "privacy": {"noise": 0.0, "delta": 1e-5, "clip": 1e9},
    "edge_epsilon": 50.0,
    "edges_seeded": True,
}


def test_there_is_a_lie_about_every_fact():
    assert LIES.keys() == {f.name for f in fields(Facts)}


@pytest.mark.parametrize("fact", LIES)
def test_a_party_derives_every_fact_from_its_own_agreement(fact, tmp_path, monkeypatch):
    def lying(facts):
        return {**facts_to_json(facts), fact: LIES[fact]}

    monkeypatch.setattr(coordinator, "facts_to_json", lying)
    deployed = InProcess(tmp_path, run=SECURE)
    with pytest.raises(ConfigError, match=rf"the coordinator's facts are not as agreed: {fact}"):
        deployed.serve()


@pytest.mark.parametrize(
    "change", [{"threshold": 0.5}, {"neighbours": 2}, {"cohort": 0.0}, {"apart": 1}]
)
def test_a_party_keeps_to_its_own_terms_of_secure_sums(change, tmp_path, monkeypatch):
    def lying(facts):
        return facts_to_json(replace(facts, secure=replace(facts.secure, **change)))

    monkeypatch.setattr(coordinator, "facts_to_json", lying)
    (name,) = change
    with pytest.raises(ConfigError, match=rf"not as agreed: secure\.{name} is"):
        InProcess(tmp_path, run=SECURE).serve()


@slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("fact", ["clients", "models"])
def test_real_parties_refuse_sybils_and_a_swapped_model(fact, deploy, monkeypatch):
    def lying(facts):
        return {**facts_to_json(facts), fact: LIES[fact]}

    monkeypatch.setattr(coordinator, "facts_to_json", lying)
    d = deploy(rounds=2, run=SECURE)
    d.serve()
    d.join_all()
    assert d.processes["coordinator"].wait() == 2
    assert f"the coordinator's facts are not as agreed: {fact} is" in d.output("coordinator")
    d.until(lambda: "does not begin" in d.output("bank-a"))


def test_control_a_party_that_obeys_gives_its_weights_to_sybils():
    """In a sum of one party and two sybils, the coordinator knows all vectors but one."""
    server, _, method = make(SecureTerms(), names=tuple("abc"))
    total = server.sum(method.numbers)
    sybils = plain_sum("bc")
    assert (total["count"] - torch.tensor(sybils[1])).tolist() == plain_sum("a")[1]


# ---- sums after a resume ----
def summed_twice(folder):
    """Returns pairs of cohorts, of the same round and phase, that differ in one party."""
    rows = [json.loads(line) for line in (folder / "secure-sums.jsonl").read_text().splitlines()]
    return [
        (one["clients"], other["clients"])
        for k, one in enumerate(rows)
        for other in rows[:k]
        if (one["round"], one["phase"]) == (other["round"], other["phase"])
        and len(set(one["clients"]) ^ set(other["clients"])) == 1
    ]


def broken(folder, **settings):
    """Returns a secure deployment of four parties that crashed after the sums of round 2."""
    deployed = InProcess(folder, parties=FOUR, run={**SECURE, "quorum": 0.5}, **settings)
    with pytest.raises(StoppedError):
        deployed.serve(callbacks=stop_in_round(2))
    return deployed


def test_a_resumed_run_does_not_repeat_sums_without_a_party(tmp_path):
    deployed = broken(tmp_path)
    del deployed.transport.parties["bank-d"]
    with pytest.raises(
        RoundFailed, match=r"was summed over bank-a, bank-b, .* would expose bank-d"
    ):
        deployed.serve(resumed=read_config(tmp_path / "run"))
    assert not summed_twice(tmp_path / "run")


def test_control_without_the_record_the_difference_of_two_sums_is_a_party(tmp_path, monkeypatch):
    monkeypatch.setattr(SumRecord, "release", lambda self, about, *more, **terms: None)
    deployed = broken(tmp_path)
    del deployed.transport.parties["bank-d"]
    resumed = deployed.serve(resumed=read_config(tmp_path / "run"))
    assert summed_twice(tmp_path / "run")
    # The count survives the resume, too.
    assert resumed.summary["secure"]["cohorts_one_apart"] > 0


def test_a_resume_with_all_parties_is_exact(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    unbroken = InProcess(tmp_path / "one", parties=FOUR, run={**SECURE, "quorum": 0.5}).serve()
    deployed = broken(tmp_path / "two")
    resumed = deployed.serve(resumed=read_config(tmp_path / "two" / "run"))
    assert resumed.summary["status"] == "completed"
    assert resumed.summary["history_hash"] == unbroken.summary["history_hash"]
    # The sums of round 2 were opened twice, over the same parties.
    assert resumed.summary["secure"]["sums"] > unbroken.summary["secure"]["sums"]
    assert resumed.summary["secure"]["cohorts_one_apart"] == 0


def test_a_restarted_party_remembers_its_sums(tmp_path):
    """The record is a file outside of what a checkpoint takes back."""
    deployed = broken(tmp_path)
    deployed.transport.parties = {name: deployed.party(name) for name in FOUR[:3]}
    with pytest.raises(RoundFailed, match="would expose bank-d"):
        deployed.serve(resumed=read_config(tmp_path / "run"))


def test_another_run_of_the_same_agreement_does_not_repeat_sums_without_a_party(tmp_path):
    deployed = InProcess(tmp_path, parties=FOUR, run={**SECURE, "quorum": 0.5}, rounds=1)
    deployed.serve()
    deployed.transport.parties = {name: deployed.party(name) for name in FOUR[:3]}
    (tmp_path / "run").rename(tmp_path / "first")
    with pytest.raises(RoundFailed, match=r"would expose bank-d\. Wait .* \(another run\.seed\)"):
        deployed.serve()


class Session:
    """A session of a coordinator that deviates: it orders what it likes."""

    def __init__(self, deployed):
        self.coordinator = deployed.coordinator()
        roster = self.coordinator.wait_for_parties(0.0, 1, lambda line: None)
        facts = deployed.agreement.facts(roster)
        self.coordinator.begin(facts)
        self.engine = RemoteEngine(self.coordinator)
        self.method = deployed.agreement.make_method()
        policy = RoundPolicy("local", faults=self.coordinator.policy, retries=0)
        self.server = Server(
            self.method, facts, self.engine.call, policy, None, aggregation_for(facts)
        )
        self.server.ask(self.method.setup)

    def train(self, round, clients=FOUR):
        """Asks for the sum of the parties' weights in what it calls this round."""
        self.server.round = self.engine.round = round
        return self.server.mean(self.method.train, clients=clients, model=self.server.model())


def test_keep_sum_restore_sum_is_refused_under_any_name(tmp_path):
    """The coordinator restores the parties' states and asks for the same sum without one party."""
    deployed = InProcess(tmp_path, parties=FOUR, run={**SECURE, "quorum": 0.5})
    session = Session(deployed)
    saved = session.engine.snapshot()
    session.train(1)
    session.engine.restore(saved)
    with pytest.raises(RoundFailed, match="would expose bank-d"):
        session.train(1, FOUR[:3])
    with pytest.raises(RoundFailed, match="Repeat round 1 first"):
        session.train(2, FOUR[:3])
    session.server.aggregation.number = 0  # the same number again
    with pytest.raises(RoundFailed, match="was asked for before"):
        session.train(1)
    session.server.aggregation.number = 10
    session.train(1)
    session.train(2, FOUR[:3])


def test_control_keep_sum_restore_sum_exposes_a_party(tmp_path, monkeypatch):
    for check in ("begin", "release"):
        monkeypatch.setattr(SumRecord, check, lambda self, about, *more, **terms: None)
    masked, opened, mask = [], [], Member.mask

    def noting(self, vector, shared):
        if self.position == 3:
            masked.append(vector.copy())
        return mask(self, vector, shared)

    def watching(total, *form):
        opened.append(decode_sum(total, *form))
        return opened[-1]

    decode_sum = secure_sum.decode
    monkeypatch.setattr(Member, "mask", noting)
    monkeypatch.setattr(secure_sum, "decode", watching)
    session = Session(InProcess(tmp_path, parties=FOUR, run={**SECURE, "quorum": 0.5}))
    session.train(1)
    saved = session.engine.snapshot()
    session.train(2)
    session.engine.restore(saved)
    session.train(2, FOUR[:3])
    _, whole, rest = opened
    difference = np.concatenate([(whole[n] - rest[n]).ravel() for n in sorted(whole)])
    own = masked[1].view(np.int64) / 2.0 ** session.server.facts.secure.fraction_bits(4)
    assert np.allclose(difference, own, atol=1e-6)  # bank-d's weights, times its size


# ---- keys in the middle ----
def swapped_keys(monkeypatch, wanted):
    """Makes the coordinator exchange a byte of what parties are told about a peer's keys."""
    call = RemoteEngine.call

    def lying(self, phase, messages):
        if phase == "share_keys":
            changed = {}
            for name, message in messages.items():
                keys = message["keys"].clone()
                keys[0, wanted] ^= 1
                changed[name] = {**message, "keys": keys}
            messages = changed
        return call(self, phase, messages)

    monkeypatch.setattr(RemoteEngine, "call", lying)


@pytest.mark.parametrize("byte", [0, 40, 70, 120])
def test_keys_that_the_coordinator_changed_are_refused(byte, tmp_path, monkeypatch):
    swapped_keys(monkeypatch, byte)
    deployed = InProcess(tmp_path, parties=FOUR, run=SECURE, rounds=1)
    with pytest.raises(FedloomError, match="has not signed the keys under its name"):
        deployed.serve()


@slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("patient")
def test_real_parties_refuse_keys_that_the_coordinator_changed(deploy, monkeypatch):
    swapped_keys(monkeypatch, 0)
    d = deploy(rounds=1, run=SECURE)
    d.serve()
    d.join_all()
    assert d.processes["coordinator"].wait() != 0
    assert "has not signed the keys under its name" in d.output("coordinator")


@slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("patient")
def test_real_parties_refuse_to_repeat_sums_without_a_party(deploy, monkeypatch):
    """The coordinator is killed between the sums of a round and its checkpoint, then resumed."""
    monkeypatch.setenv("FEDLOOM_CRASH_AT", "round-unclosed:2")
    d = deploy(parties=FOUR, rounds=4, run={**SECURE, "quorum": 0.5, "deadline": 20.0})
    d.start("coordinator", "serve", "federation.toml", "--keys", ".", "--out", "run", "--wait", 60)
    d.join_all()
    d.until(lambda: d.processes["coordinator"].poll() is not None)
    monkeypatch.delenv("FEDLOOM_CRASH_AT")
    kill(d.processes["bank-d"])
    d.resume()
    assert d.processes["coordinator"].wait() != 0
    assert "would expose bank-d" in d.output("coordinator")
    assert not summed_twice(d.folder / "run")
    # With the party it goes on where it was.
    d.join("bank-d")
    d.resume()
    summary = d.completed()
    assert summary["secure"]["cohorts_one_apart"] == 0
