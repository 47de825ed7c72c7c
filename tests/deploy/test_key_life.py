"""Expired, replaced and revoked keys in deployments: at the coordinator's door and at the parties.

The controls switch off the one protection and show that the same party then takes part.
"""

import shutil
from datetime import UTC, datetime, timedelta

import pytest
from deployment import absent_in, kill
from in_process import InProcess, absences

from fedloom.core.message import encode
from fedloom.deploy import keys
from fedloom.deploy.agreement import read_agreement
from fedloom.deploy.keyring import Keyring, revoke
from fedloom.deploy.keys import make_party, make_successor, read_party_key
from fedloom.deploy.party import Party
from fedloom.errors import ConfigError

ENDLESS = {
    "rounds": 100_000,
    "method": "slow.py",
    "settings": {"seconds": 0.2},
    "run": {"quorum": 0.3, "retries": 100},
}
slow = pytest.mark.slow
patient = pytest.mark.usefixtures("patient")


def remake(folder, name, days_ago, days):
    """Makes a party's key anew, as if it had been made some days ago."""
    for path in (folder / f"{name}.key", folder / f"{name}.pub"):
        path.unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keys, "_now", lambda: datetime.now(UTC) - timedelta(days_ago))
        make_party(folder, name, days)


def own_copy(d):
    """Copies what a party has of an agreement to a folder of its own. Returns the agreement."""
    home = d.folder / "own"
    home.mkdir()
    files = [d.folder / name for name in ("federation.toml", "ca.crt", "slow.py")]
    for path in (*files, *d.folder.glob("*.pub")):
        shutil.copy(path, home)
    return "own/federation.toml"


def revoke_at(folder, name):
    keyring = read_agreement(folder / "federation.toml", trust=True).read_keyring()
    return revoke(keyring, name, "compromised", folder / "ca.key")[1]


def present(d):
    """Returns the parties that took part in the last round."""
    if not d.rounds_done():
        return set()
    return {row["id"] for row in d.history()[-1]["clients"]} - absent_in(d.history()[-1])


# ---- in one process ----
@pytest.fixture
def expired(tmp_path):
    """A deployment with three parties. The key of bank-c expired yesterday."""
    deployed = InProcess(tmp_path, rounds=2, run={"quorum": 0.5})
    remake(tmp_path, "bank-c", 31, 30)
    return deployed


def test_a_party_with_an_expired_key_does_not_start(expired):
    yesterday = keys.today() - timedelta(1)
    with pytest.raises(ConfigError, match=f"'bank-c': its key 1 expired on {yesterday}; make a"):
        expired.party("bank-c")


def reread(deployed, monkeypatch):
    """Reads the agreement and makes the parties again; the one that is refused is dishonest."""
    with monkeypatch.context() as patch:
        patch.setattr(Keyring, "require_valid", lambda *_: None)
        deployed.agreement = read_agreement(deployed.folder / "federation.toml", trust=True)
        parties = {name: deployed.party(name) for name in deployed.agreement.parties}
        deployed.transport.parties = parties
    return deployed


def test_a_run_goes_on_without_a_party_whose_key_has_expired(expired, monkeypatch):
    reread(expired, monkeypatch)
    lines = []
    summary = expired.serve(log=lines.append).summary
    assert summary["status"] == "completed"
    assert summary["absences"].keys() == {"bank-c"}
    assert expired.transport.sent["bank-c"] == 0
    assert any("warning: party 'bank-c': its key 1 expired on" in line for line in lines)


def test_without_the_check_a_party_whose_key_has_expired_takes_part(expired, monkeypatch):
    reread(expired, monkeypatch)
    monkeypatch.setattr(Keyring, "refused", lambda self, day=None: {})
    assert expired.serve().summary["absences"] == {}


def test_if_everybody_is_needed_an_expired_key_ends_the_run_at_once(expired, monkeypatch):
    path = expired.folder / "federation.toml"
    path.write_text(path.read_text().replace("quorum = 0.5", ""))
    reread(expired, monkeypatch)
    with pytest.raises(ConfigError, match=r"'bank-c': its key 1 expired .*--party bank-c"):
        expired.serve()


def test_a_party_refuses_a_coordinator_that_admits_an_expired_key(expired, monkeypatch):
    reread(expired, monkeypatch)
    honest = Keyring.to_json
    monkeypatch.setattr(
        Keyring, "to_json", lambda self: {**honest(self), "parties": ["bank-a", "bank-c"]}
    )
    with pytest.raises(ConfigError, match=r"does not begin: .*'bank-c': its key 1 expired"):
        expired.serve()


def test_a_key_is_replaced_during_a_run(tmp_path):
    deployed = InProcess(tmp_path)
    made, lines = deployed.begun(), []
    made.log = lines.append
    agreed = deployed.agreement.agreed()
    new = make_successor(tmp_path / "bank-b.key")[0]
    old = deployed.transport.parties["bank-b"]
    # The old key does not count any more. The party is started again, with the new one.
    assert "did not sign" in absences(deployed.train(made))["bank-b"]
    assert lines == ["the keys have changed: bank-b.2.pub"]
    assert deployed.transport.admitted["bank-b"] == read_party_key(new).public
    again = Party(deployed.agreement, "bank-b", read_party_key(new), old.graph, old.folder)
    deployed.transport.parties["bank-b"] = again
    assert absences(deployed.train(made, 2)) == {"bank-b": "was restarted"}
    deployed.transport.parties["bank-a"].keyring.require_own("bank-b", again.key.public)
    assert not absences(made.ask("setup", {"bank-b": encode({}, "setup")}, 0))
    assert not absences(deployed.train(made, 3))
    assert deployed.agreement.agreed() == agreed


def test_a_broken_file_changes_nothing_during_a_run(tmp_path):
    deployed = InProcess(tmp_path)
    made, lines = deployed.begun(), []
    made.log = lines.append
    (tmp_path / "bank-b.2.pub").write_text("")
    assert absences(deployed.train(made)) == {}
    assert len(lines) == 1
    assert "the keys stay as they were" in lines[0]
    assert "bank-b.2.pub" in lines[0]


def test_a_party_with_a_replaced_key_does_not_start(tmp_path):
    deployed = InProcess(tmp_path)
    make_successor(tmp_path / "bank-b.key")
    with pytest.raises(ConfigError, match=r"key 2 has replaced; use bank-b\.2\.key"):
        deployed.party("bank-b")


def test_the_coordinator_continues_with_a_new_key(tmp_path):
    deployed = InProcess(tmp_path, rounds=2)
    make_successor(tmp_path / "coordinator.key")
    parties = {name: deployed.party(name) for name in deployed.agreement.parties}
    deployed.transport.parties = parties
    assert (
        deployed.serve().summary["history_hash"]
        == (deployed.deployment.reference().summary["history_hash"])
    )


def test_a_new_key_of_the_coordinator_counts_when_it_starts_again(tmp_path):
    deployed = InProcess(tmp_path)
    made = deployed.begun()
    make_successor(tmp_path / "coordinator.key")
    assert absences(deployed.train(made)) == {}
    party = deployed.transport.parties["bank-a"]
    assert party.keyring.coordinator.number == 1
    party.read_keys()  # as after a lost connection
    assert party.keyring.coordinator.number == 2


# ---- with processes, TLS and Flower's registered keys ----
@slow
@patient
@pytest.mark.timeout(900)
@pytest.mark.parametrize("protected", [True, False])
def test_a_party_with_a_revoked_key_is_refused_at_the_door(deploy, monkeypatch, protected):
    d = deploy(**ENDLESS)
    agreement = own_copy(d)  # the party has not heard of the list
    revoke_at(d.folder, "bank-c")
    if not protected:
        monkeypatch.setattr(Keyring, "refused", lambda self, day=None: {})
    d.serve()
    for name in d.parties:
        d.join(name, agreement=agreement)
    if protected:
        assert d.processes["bank-c"].wait() == 2
        assert "may have expired, been replaced or been revoked" in d.output("bank-c")
        assert "party 'bank-c': its key 1 was revoked on" in d.output("coordinator")
    d.until(lambda: present(d) == {"bank-a", "bank-b"} | (set() if protected else {"bank-c"}))


@slow
@patient
@pytest.mark.timeout(900)
@pytest.mark.parametrize("protected", [True, False])
def test_a_party_with_an_expired_key_is_refused_at_the_door(deploy, monkeypatch, protected):
    d = deploy(**ENDLESS)
    remake(d.folder, "bank-c", 31, 30)
    if not protected:
        monkeypatch.setattr(Keyring, "refused", lambda self, day=None: {})
    d.serve()
    monkeypatch.setattr(Keyring, "require_own", lambda *_: None)  # parties do not check their own
    d.join_all()
    if protected:
        assert d.processes["bank-c"].wait() == 2
        assert "may have expired, been replaced or been revoked" in d.output("bank-c")
    d.until(lambda: present(d) == {"bank-a", "bank-b"} | (set() if protected else {"bank-c"}))


@slow
@patient
@pytest.mark.timeout(900)
def test_a_run_after_a_rotation_is_bit_identical_and_has_the_same_agreement(deploy):
    d = deploy(rounds=3)
    agreement = own_copy(d)
    make_successor(d.folder / "bank-b.key", days=20)
    d.serve()
    d.join("bank-a", agreement=agreement)
    d.join("bank-b", key="bank-b.2.key", agreement=agreement)
    d.join("bank-c", agreement=agreement)
    assert d.completed()["history_hash"] == d.reference().summary["history_hash"]
    warning = f"warning: the key of 'bank-b' expires on {keys.today() + timedelta(20)}, in 20 days"
    assert warning in d.output("coordinator")
    assert warning in d.output("bank-b")
    # The coordinator goes back to the old key, which a thief has. The others remember the new one.
    (d.folder / "bank-b.2.pub").unlink()
    d.serve(out="again")
    d.join("bank-a", agreement=agreement)
    d.join("bank-b", "--state", "thief", agreement=agreement)
    d.join("bank-c", agreement=agreement)
    assert d.processes["coordinator"].wait() == 2
    assert "'bank-b' has key 1" in d.output("coordinator")
    assert "but key 2" in d.output("coordinator")


@slow
@pytest.mark.timeout(900)
def test_keys_are_replaced_and_revoked_while_a_run_goes_on(deploy):
    d = deploy(**ENDLESS)
    agreement = own_copy(d)
    d.serve()
    for name in d.parties:
        d.join(name, agreement=agreement)
    d.until(lambda: d.rounds_done() >= 1)
    # bank-b replaces its key. The coordinator gets the .pub file and does not stop.
    make_successor(d.folder / "bank-b.key")
    assert d.processes["bank-b"].wait() == 2  # the old key is not admitted any more
    d.join("bank-b", key="bank-b.2.key", agreement=agreement)
    d.until(lambda: "bank-b" in present(d))
    # bank-c is revoked.
    revoke_at(d.folder, "bank-c")
    assert d.processes["bank-c"].wait() == 2
    d.until(lambda: present(d) == {"bank-a", "bank-b"})
    cause = next(a["cause"] for a in d.history()[-1]["absent"] if a["client"] == "bank-c")
    assert "its key 1 was revoked on" in cause
    memory = d.folder / "state-bank-a" / "keyring.json"
    d.until(lambda: "X509 CRL" in memory.read_text())
    assert "number:2" in memory.read_text()
    kill(d.processes["coordinator"])
