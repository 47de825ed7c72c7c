"""The life of a key: expiry, rotation and revocation, and each way to forge or undo one."""

import json
import re
import sys
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding

from fedloom.cli import main
from fedloom.deploy import keyring as rings
from fedloom.deploy import keys
from fedloom.deploy.agreement import read_agreement
from fedloom.deploy.keyring import (
    COORDINATOR,
    KeyMemory,
    RevocationList,
    certificate_warnings,
    revoke,
)
from fedloom.deploy.keys import (
    PartyKey,
    PublicKey,
    make_authority,
    make_party,
    make_successor,
    public_key_of,
    read_party_key,
    read_public_key,
)
from fedloom.errors import ConfigError, MessageError

PARTIES = ("bank-a", "bank-b")
AGREEMENT = """
[federation]
address = "127.0.0.1:8443"
{authority}
coordinator = "coordinator.pub"
[parties]
bank-a = "bank-a.pub"
bank-b = "bank-b.pub"
[data]
num_features = 8
num_classes = 2
"""


class Folder:
    """An agreement's folder with all keys. `home` is its path."""

    def __init__(self, home, tls=True):
        self.home = home
        make_authority(home, "127.0.0.1")
        for name in ("coordinator", *PARTIES):
            make_party(home, name)
        authority = 'authority = "ca.crt"' if tls else ""
        (home / "federation.toml").write_text(AGREEMENT.format(authority=authority))

    @property
    def agreement(self):
        return read_agreement(self.home / "federation.toml")

    def read(self):
        return self.agreement.read_keyring()

    def key(self, name):
        return read_party_key(self.home / f"{name}.key")

    def rotate(self, name, **options):
        return read_party_key(make_successor(self.home / f"{name}.key", **options)[0])

    def revoke(self, name, reason="compromised"):
        return revoke(self.read(), name, reason, self.home / "ca.key")[1]

    def write(self, name, key):
        """Writes a public key as a file of the agreement's folder."""
        (self.home / f"{name}.pub").write_text(key.text() + "\n")


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


@pytest.fixture
def days_later(monkeypatch):
    """Sets the clock forward."""

    def shift(days):
        monkeypatch.setattr(keys, "_now", lambda: datetime.now(UTC) + timedelta(days))

    return shift


def stated(before, after, **changed):
    """Returns the public half of `after` as it would be if `before` signed other terms of it."""
    terms = replace(after.terms, **changed)
    line = PublicKey(after.public.node, after.public.signing, terms)._stated().encode()
    terms = replace(terms, signature=after.signing.sign(keys._TERMS + line))
    terms = replace(terms, approval=before.signing.sign(keys._APPROVAL + line))
    return PartyKey(after.node, after.signing, terms).public


# ---- expiry ----
def test_a_key_says_whose_it_is_and_until_when_it_is_valid(folder):
    key = read_public_key(folder.home / "bank-a.pub")
    assert (key.terms.party, key.number, key.terms.made) == ("bank-a", 1, keys.today())
    assert key.expires == keys.today() + timedelta(keys.KEY_DAYS)
    assert public_key_of(key.text()) == key == folder.key("bank-a").public


@pytest.mark.parametrize(
    ("found", "forged"),
    [
        (r"expires:\S+", "expires:2099-01-01"),
        (r"made:\S+", "made:2020-01-01"),
        (r"party:\S+", "party:bank-b"),
        (r"number:1", "number:2 replaces:00"),
        (r"number:1", "number:0"),
        (r"expires:\S+", "expires:never"),
        (r"signature:\S+", "signature:AAAA"),
        (r" signature:\S+", ""),
    ],
)
def test_a_line_whose_terms_were_changed_is_refused(folder, found, forged):
    path = folder.home / "bank-a.pub"
    path.write_text(re.sub(found, forged, path.read_text()))
    with pytest.raises(ConfigError, match=r"bank-a\.pub.*not a public key"):
        read_agreement(folder.home / "federation.toml")


def test_the_terms_of_another_key_are_refused(folder):
    own, other = (folder.key(name).public for name in PARTIES)
    with pytest.raises(ConfigError, match="did not sign its own terms"):
        public_key_of(replace(own, terms=other.terms).text())


def test_nobody_can_remove_the_expiry_without_the_owners_notice(folder):
    owner = folder.key("bank-a").public
    folder.write("bank-a", replace(owner, terms=None))
    with pytest.raises(ConfigError, match="another party, number or expiry"):
        folder.read().require_own("bank-a", owner)


def test_a_private_key_file_with_the_line_of_another_key_is_refused(folder):
    path, line = folder.home / "bank-a.key", (folder.home / "bank-b.pub").read_text()
    path.write_text(line + path.read_text().partition("\n")[2])
    with pytest.raises(ConfigError, match="first line is not the public half"):
        read_party_key(path)


def test_an_expired_key_does_not_count_and_the_error_says_what_to_do(folder):
    ring, last = folder.read(), folder.key("bank-a").public.expires
    (folder.home / "bank-b.key").unlink()
    (folder.home / "bank-b.pub").unlink()
    make_party(folder.home, "bank-b", days=700)
    ring = folder.read()
    assert set(ring.current(last)) == set(PARTIES)
    after = last + timedelta(1)
    assert set(ring.current(after)) == {"bank-b"}
    with pytest.raises(ConfigError) as refused:
        ring.require_valid(["bank-a"], after)
    assert all(
        words in str(refused.value)
        for words in ("'bank-a'", str(last), "`fedloom keys --party bank-a`")
    )
    ring.require_valid(["bank-b"], after)


def test_keys_of_earlier_versions_stay_valid_and_can_be_replaced(folder):
    key = folder.key("bank-a")
    bare = replace(key, terms=None)
    folder.write("bank-a", bare.public)
    path = folder.home / "bank-a.key"
    path.write_text(path.read_text().partition("\n")[2])
    ring = folder.read()
    assert ring.current(date(2999, 1, 1)).keys() == {"bank-a"}
    ring.require_own("bank-a", read_party_key(path).public)
    new = folder.rotate("bank-a")
    assert folder.read().current()["bank-a"] == new.public
    assert new.public.number == 2


@pytest.mark.parametrize("days", [0, -1, 3651])
def test_the_number_of_days_is_limited(tmp_path, days):
    with pytest.raises(ConfigError, match=f"days is {days}, must be from 1 to 3650"):
        make_party(tmp_path, "bank", days=days)
    assert list(tmp_path.iterdir()) == []


def test_a_warning_comes_thirty_days_before_the_end(folder):
    ring, last = folder.read(), folder.key("bank-a").public.expires
    assert ring.warnings(last - timedelta(30)) == []
    lines = ring.warnings(last - timedelta(29))
    assert len(lines) == 3  # the coordinator's key too
    assert f"'bank-a' expires on {last}, in 29 days" in lines[0]
    assert "`fedloom keys rotate bank-a.key`" in lines[0]
    assert "expired" in ring.warnings(last + timedelta(1))[0]
    assert certificate_warnings(folder.home) == []
    (line,) = certificate_warnings(folder.home, last - timedelta(3))
    assert "server.crt expires on" in line


# ---- rotation ----
def test_a_party_replaces_its_key_and_the_agreement_stays_the_same(folder):
    agreed = folder.agreement.agreed()
    second = folder.rotate("bank-a")
    third = folder.rotate("bank-a.2", days=100)
    ring = folder.read()
    assert [key.number for key in ring.chains["bank-a"]] == [1, 2, 3]
    assert ring.current()["bank-a"] == third.public
    assert ring.current()["bank-b"] == folder.key("bank-b").public
    assert folder.agreement.agreed() == agreed
    ring.require_own("bank-a", third.public)
    with pytest.raises(ConfigError, match=r"key 2 of 'bank-a', which key 3 has replaced; use bank"):
        ring.require_own("bank-a", second.public)
    with pytest.raises(ConfigError, match="does not match the key of party 'bank-a'"):
        ring.require_own("bank-a", folder.key("bank-b").public)


def test_the_coordinator_replaces_its_key_in_the_same_way(folder):
    new = folder.rotate("coordinator")
    ring = folder.read()
    assert ring.coordinator == new.public
    assert COORDINATOR not in ring.current()
    ring.require_own(COORDINATOR, new.public)


def test_an_agreement_can_name_a_key_that_has_replaced_another(folder):
    new = folder.rotate("bank-a")
    path = folder.home / "federation.toml"
    path.write_text(path.read_text().replace('"bank-a.pub"', '"bank-a.2.pub"'))
    assert folder.read().chains["bank-a"] == (new.public,)


def test_a_rotation_that_another_party_signed_is_refused(folder):
    new = folder.rotate("bank-a")
    for forger in (folder.key("bank-b"), new):  # another party, and the new key itself
        folder.write("bank-a.2", stated(forger, new))
        with pytest.raises(ConfigError, match=r"'bank-a': key 2 .* is not signed by key 1"):
            folder.read()
    folder.write("bank-a.2", stated(folder.key("bank-a"), new))
    assert folder.read().current()["bank-a"].fingerprint == new.public.fingerprint


def test_without_the_check_of_the_approval_another_partys_rotation_works(folder, monkeypatch):
    new = folder.rotate("bank-a")
    folder.write("bank-a.2", stated(folder.key("bank-b"), new))
    monkeypatch.setattr(PublicKey, "is_approved_by", lambda self, before: True)
    assert folder.read().current()["bank-a"].fingerprint == new.public.fingerprint


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"number": 3}, "key 3 replaces key 1"),
        ({"made": date(2999, 1, 1), "expires": date(2999, 1, 2)}, "which signed it, expired on"),
    ],
)
def test_a_rotation_with_impossible_terms_is_refused(folder, changed, words):
    new = folder.rotate("bank-a")
    folder.write("bank-a.2", stated(folder.key("bank-a"), new, **changed))
    with pytest.raises(ConfigError, match=words):
        folder.read()


@pytest.mark.parametrize("changed", [{"party": "bank-b"}, {"replaces": "00" * 19}])
def test_a_rotation_of_another_key_or_party_changes_nothing(folder, changed):
    new = folder.rotate("bank-a")
    folder.write("bank-a.2", stated(folder.key("bank-a"), new, **changed))
    assert folder.read().current() == {name: folder.key(name).public for name in PARTIES}


def test_two_keys_that_replace_the_same_one_are_refused(folder):
    folder.rotate("bank-a")
    (folder.home / "bank-a.2.key").unlink()
    (folder.home / "bank-a.2.pub").rename(folder.home / "bank-a.3.pub")
    folder.rotate("bank-a")
    with pytest.raises(ConfigError, match="'bank-a': two keys replace its key 1"):
        folder.read()


def test_an_expired_key_cannot_approve_another(folder, days_later):
    days_later(keys.KEY_DAYS + 1)
    with pytest.raises(ConfigError, match=r"bank-a\.key: the key expired on .*--party bank-a"):
        folder.rotate("bank-a")
    assert not (folder.home / "bank-a.2.key").exists()


def test_a_rotation_never_overwrites_a_file(folder):
    folder.rotate("bank-a")
    before = (folder.home / "bank-a.2.key").read_bytes()
    with pytest.raises(ConfigError, match=r"bank-a\.2\.key: exists already"):
        folder.rotate("bank-a")
    assert (folder.home / "bank-a.2.key").read_bytes() == before
    assert (folder.home / "bank-a.2.key").stat().st_mode & 0o777 == 0o600


def test_a_party_whose_name_looks_like_a_rotation_is_not_one(folder):
    make_party(folder.home, "bank-a.2")
    path = folder.home / "federation.toml"
    path.write_text(path.read_text().replace("[data]", '"bank-a.2" = "bank-a.2.pub"\n[data]'))
    assert folder.read().current()["bank-a"] == folder.key("bank-a").public


# ---- what travels, and what a party remembers ----
def test_a_party_takes_over_what_the_coordinator_sends(folder):
    before = folder.read()
    new, made = folder.rotate("bank-a"), folder.revoke("bank-b")
    ring = before.received(json.loads(json.dumps(folder.read().to_json())))
    assert ring.current() == {"bank-a": new.public}
    assert ring.revoked == made


def test_a_forged_rotation_that_is_sent_is_refused(folder):
    before, new = folder.read(), folder.rotate("bank-a")
    sent = folder.read().to_json()
    sent["successors"] = [stated(folder.key("coordinator"), new).text()]
    with pytest.raises(ConfigError, match=r"'bank-a': key 2 .* is not signed by key 1"):
        before.received(sent)
    sent["successors"] = [folder.key("bank-b").public.text()]
    with pytest.raises(MessageError, match="replaces no other"):
        before.received(sent)


@pytest.mark.parametrize("content", [None, {}, [], {"parties": 1, "successors": 2, "revoked": 3}])
def test_content_that_is_no_keyring_is_refused(folder, content):
    with pytest.raises(MessageError, match="the coordinator's keys: not valid"):
        folder.read().received(content)


def remembering(folder, *sent):
    """Returns a party's keyring after a restart, if the coordinator has sent these before."""
    path, bare = folder.home / "state" / "keyring.json", folder.read()
    bare = replace(bare, successors=(), revoked=None)  # the party's folder has only the agreement
    for content in sent:
        memory = KeyMemory(path)
        memory.keep(memory.recall(bare).received(content))
    return KeyMemory(path).recall(bare)


def test_a_rotation_cannot_be_rolled_back(folder):
    old = folder.read().to_json()
    folder.rotate("bank-a")
    new = folder.read().to_json()
    assert remembering(folder).received(old)  # nothing was seen yet
    party = remembering(folder, new)
    assert party.received(new).current()["bank-a"].number == 2
    with pytest.raises(ConfigError, match=r"'bank-a' has key 1 .* there, but key 2 .* here"):
        party.received(old)
    # Another key 2, which the agreed key approves too: a thief of the agreed key has made it.
    agreed, own = folder.key("bank-a"), read_party_key(make_party(folder.home, "thief")[0])
    changed = {"party": "bank-a", "number": 2, "replaces": agreed.public.fingerprint}
    thief = stated(agreed, own, **changed)
    with pytest.raises(ConfigError, match=r"'bank-a' has key 2 .* there, but key 2 .* here"):
        party.received({**new, "successors": [thief.text()]})


def test_without_its_memory_a_party_would_accept_the_old_key(folder):
    old = folder.read().to_json()
    folder.rotate("bank-a")
    remembering(folder, folder.read().to_json())
    (folder.home / "state" / "keyring.json").unlink()
    assert remembering(folder).received(old).current()["bank-a"].number == 1


def test_a_new_agreement_with_a_new_key_is_not_a_rollback(folder):
    folder.rotate("bank-a")
    remembering(folder, folder.read().to_json())
    for name in ("bank-a.key", "bank-a.pub", "bank-a.2.key", "bank-a.2.pub"):
        (folder.home / name).unlink()
    make_party(folder.home, "bank-a")
    ring = remembering(folder, folder.read().to_json())
    assert ring.current()["bank-a"] == folder.key("bank-a").public


def test_a_damaged_memory_is_named(tmp_path):
    (tmp_path / "keyring.json").write_text("{")
    with pytest.raises(ConfigError, match=r"keyring\.json: damaged"):
        KeyMemory(tmp_path / "keyring.json")


def test_a_run_that_relies_on_a_key_that_does_not_count_is_refused_by_name(folder):
    party = folder.read()
    folder.revoke("bank-b")
    honest = folder.read().to_json()
    assert honest["parties"] == ["bank-a"]
    assert set(party.received(honest).current()) == {"bank-a"}
    with pytest.raises(ConfigError, match="party 'bank-b': its key 1 was revoked on"):
        party.received({**honest, "parties": ["bank-a", "bank-b"]})
    with pytest.raises(ConfigError, match="party 'bank-x'"):
        party.received({**honest, "parties": ["bank-x"]})


def test_a_run_of_a_coordinator_with_an_expired_key_is_refused(folder, days_later):
    sent = folder.read().to_json()
    days_later(keys.KEY_DAYS + 1)
    with pytest.raises(ConfigError, match="the coordinator: its key 1 expired on"):
        folder.read().received({**sent, "parties": []})


# ---- revocation ----
def test_a_list_has_the_keys_of_a_party_its_number_and_the_reason(folder):
    new = folder.rotate("bank-a")
    made = folder.revoke("bank-a", "left")
    assert (made.number, made.date) == (1, datetime.now(UTC).date())
    expected = {folder.key("bank-a").public.fingerprint, new.public.fingerprint}
    assert made.keys.keys() == expected
    assert {entry.reason for entry in made.keys.values()} == {"left"}
    assert set(folder.read().current()) == {"bank-b"}
    again = folder.revoke("bank-b")
    assert (again.number, len(again.keys)) == (2, 3)
    assert folder.read().current() == {}
    with pytest.raises(ConfigError, match=r"'bank-a': its key 1 was revoked on .* \(left\)"):
        folder.read().require_valid(["bank-a"])


def test_a_successor_of_a_revoked_key_does_not_count(folder):
    folder.revoke("bank-a")
    folder.rotate("bank-a")  # somebody who has the revoked key
    assert set(folder.read().current()) == {"bank-b"}


def test_a_stolen_key_that_has_expired_is_stopped_by_revoking_it(folder, days_later):
    thief = folder.rotate("bank-a", days=3000)  # the thief's clock shows a day before the end
    days_later(keys.KEY_DAYS + 1)
    assert folder.read().current() == {"bank-a": thief.public}  # dates alone do not stop it
    folder.revoke("bank-a")
    assert folder.read().current() == {}


@pytest.mark.parametrize("same_name", [False, True])
def test_a_list_of_another_authority_is_refused(folder, tmp_path, same_name):
    other = Folder(tmp_path / "other")
    other.revoke("bank-a")
    pem = (other.home / "ca.crl").read_text()
    if same_name:  # the subject of our authority, but the key of another
        subject = x509.load_pem_x509_certificate((folder.home / "ca.crt").read_bytes()).subject
        pem = crl(ec.generate_private_key(ec.SECP256R1()), subject, 1, ())
    (folder.home / "ca.crl").write_text(pem)
    with pytest.raises(ConfigError, match=r"ca\.crl: the list .* is not signed by the authority"):
        folder.read()
    (folder.home / "ca.crl").unlink()
    party = folder.read()
    with pytest.raises(ConfigError, match=r"keys: the list .* is not signed by the authority"):
        party.received({**party.to_json(), "revoked": pem})


def test_without_the_check_of_the_signature_any_list_counts(folder, monkeypatch):
    subject = x509.load_pem_x509_certificate((folder.home / "ca.crt").read_bytes()).subject
    victim = int(folder.key("bank-a").public.fingerprint, 16)
    pem = crl(ec.generate_private_key(ec.SECP256R1()), subject, 1, [victim])
    (folder.home / "ca.crl").write_text(pem)
    monkeypatch.setattr(rings, "_is_signed_by", lambda found, authority: True)
    assert set(folder.read().current()) == {"bank-b"}


def crl(key, issuer, number, serials):
    """Returns a list of revoked keys that somebody else has signed."""
    now = datetime.now(UTC)
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(issuer)
        .last_update(now)
        .next_update(now + timedelta(9))
        .add_extension(x509.CRLNumber(number), critical=False)
    )
    for serial in serials:
        entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now)
        reason = x509.CRLReason(x509.ReasonFlags.key_compromise)
        builder = builder.add_revoked_certificate(
            entry.add_extension(reason, critical=False).build()
        )
    return builder.sign(key, SHA256()).public_bytes(Encoding.PEM).decode()


@pytest.mark.parametrize("content", ["", "hello", "-----BEGIN X509 CRL-----\nAAAA\n"])
def test_a_file_that_is_no_list_is_named(folder, content):
    (folder.home / "ca.crl").write_text(content)
    with pytest.raises(ConfigError, match=r"ca\.crl: not a list of revoked keys"):
        folder.read()


def test_an_older_list_or_none_is_refused(folder):
    none = folder.read().to_json()
    folder.revoke("bank-b")
    first = folder.read().to_json()
    folder.revoke("bank-a")
    second = folder.read().to_json()
    assert remembering(folder).received(first)  # nothing was seen yet
    party = remembering(folder, first, second)
    assert party.received(second).current() == {}
    for older, number in ((first, 1), (none, 0)):
        with pytest.raises(ConfigError, match=f"list {number} .* does not continue list 2"):
            party.received({**older, "parties": []})


def test_a_list_from_which_a_key_has_disappeared_is_refused(folder):
    folder.revoke("bank-b")
    party = remembering(folder, folder.read().to_json())
    for number in (1, 2):  # the number that is known already, and a higher one
        authority = x509.load_pem_x509_certificate((folder.home / "ca.crt").read_bytes())
        key = keys._read_ec_key(folder.home / "ca.key")
        pem = crl(key, authority.subject, number, [])
        assert RevocationList.of(pem, authority, "here").number == number
        with pytest.raises(ConfigError, match=f"list {number} .* does not continue list 1"):
            party.received({"parties": [], "successors": [], "revoked": pem})


def test_an_older_list_in_the_partys_own_folder_is_not_used(folder):
    folder.revoke("bank-b")
    older = (folder.home / "ca.crl").read_text()
    folder.revoke("bank-a")
    remembering(folder, folder.read().to_json())
    (folder.home / "ca.crl").write_text(older)
    ring = KeyMemory(folder.home / "state" / "keyring.json").recall(folder.read())
    assert ring.current() == {}


def test_without_tls_there_is_no_list(tmp_path):
    folder = Folder(tmp_path, tls=False)
    with pytest.raises(ConfigError, match=r"federation\.authority is missing: without TLS"):
        folder.revoke("bank-a")
    with pytest.raises(ConfigError, match="without TLS there is no authority"):
        folder.read().received({**folder.read().to_json(), "revoked": "a list"})


# ---- the agreement ----
def test_a_key_of_another_party_is_refused(folder):
    path = folder.home / "federation.toml"
    path.write_text(path.read_text().replace('"bank-a.pub"', '"bank-b.pub"'))
    with pytest.raises(ConfigError, match=r"parties\.bank-a: this is a key of party 'bank-b'"):
        folder.agreement  # noqa: B018


def test_no_party_has_the_coordinators_name(folder):
    path = folder.home / "federation.toml"
    path.write_text(path.read_text().replace("bank-a =", "coordinator ="))
    with pytest.raises(ConfigError, match=r"parties\.coordinator: this name is the coordinator's"):
        folder.agreement  # noqa: B018


# ---- the commands ----
@pytest.fixture
def fedloom(monkeypatch, capsys, folder):
    """The command line, in the agreement's folder."""

    def call(*arguments):
        monkeypatch.chdir(folder.home)
        monkeypatch.setattr(sys, "argv", ["fedloom", "keys", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code or 0, *capsys.readouterr()

    return call


def shown(fedloom, where):
    """Returns the output of `fedloom keys show`, by name."""
    code, printed, _ = fedloom("show", where, "--json")
    assert code == 0
    return {row["name"]: row for row in json.loads(printed)}


def test_the_commands_replace_revoke_and_show_keys(fedloom, folder):
    code, printed, _ = fedloom("rotate", "bank-a.key", "--days", "20")
    assert code == 0
    assert {"bank-a.2.key", "bank-a.2.pub"} <= set(printed.split())
    code, printed, _ = fedloom(
        "revoke", "federation.toml", "bank-b", "--keys", ".", "--reason", "left"
    )
    assert code == 0
    assert "list 1 of revoked keys" in " ".join(printed.split())
    today, rows = str(keys.today()), shown(fedloom, "federation.toml")
    assert list(rows) == ["bank-a", "bank-b", "coordinator", "ca.crt", "server.crt"]
    assert rows["bank-a"] == {
        "name": "bank-a",
        "description": rows["bank-a"]["description"],
        "number": 2,
        "fingerprint": read_public_key(folder.home / "bank-a.2.pub").fingerprint,
        "made": today,
        "expires": str(keys.today() + timedelta(20)),
        "replaces": folder.key("bank-a").public.fingerprint,
        "revoked": None,
    }
    assert rows["bank-a"]["description"].startswith("20 days left, expires")
    assert rows["bank-b"]["revoked"] == today
    assert rows["bank-b"]["description"].startswith(f"revoked on {today} (left)")
    assert rows["coordinator"]["description"].startswith("valid, expires")
    _, _, warned = fedloom("show", "federation.toml")
    words = " ".join(warned.split())
    assert "the key of 'bank-a' expires on" in words
    assert "party 'bank-b': its key 1 was revoked on" in words


def test_a_folder_is_shown_without_an_agreement(fedloom, folder):
    folder.write("old", replace(folder.key("bank-b").public, terms=None))
    folder.revoke("bank-a")
    rows = shown(fedloom, ".")
    assert set(rows) == {
        *("bank-a.pub", "bank-b.pub", "coordinator.pub", "old.pub", "ca.crt", "server.crt")
    }
    assert rows["bank-a.pub"]["description"].startswith("revoked on")
    assert rows["old.pub"]["description"].startswith("valid, no expiry; key 1")
    assert rows["old.pub"]["expires"] is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("rotate", "none.key"), "none.key: No such file"),
        (("rotate", "bank-a.key", "--days", "0"), "days is 0, must be from 1 to 3650"),
        (("revoke", "federation.toml", "bank-x", "--keys", "."), "bank-x"),
        (("revoke", "federation.toml", "bank-a", "--keys", ".", "--reason", "x"), "compromised"),
        (("revoke", "federation.toml", "bank-a", "--keys", "none"), "none/ca.key: No such file"),
        (("show", "none.toml"), "none.toml"),
        (("--party", "bank-z", "--days", "9999"), "days is 9999"),
    ],
)
def test_an_error_of_a_command_is_one_line(fedloom, folder, arguments, words):
    before = sorted(folder.home.iterdir())
    code, printed, error = fedloom(*arguments)
    assert (code, printed, len(error.splitlines())) == (2, "", 1)
    assert words in error
    assert sorted(folder.home.iterdir()) == before
