"""Keyring: which keys of the parties count today.

An agreement names a key for each party. Three things change what counts, and none of them changes
the agreement:

    expiry       A key is valid until the day that its own line names.
    rotation     A party replaces its key: the old key signs the line of the new one. The lines
                 (NAME.2.pub, NAME.3.pub, ...) lie in the agreement's folder.
    revocation   The authority signs a list of keys that do not count any more. It is an X.509 CRL
                 (ca.crl beside ca.crt). Its serial numbers are the fingerprints of the keys.

The coordinator admits only keys that count. It sends the lines and the list to the parties when a
run begins. Nobody has to trust it: a party verifies the chain from the agreed key to the current
one, and the list with its own copy of ca.crt. A party remembers what it has seen (`KeyMemory`). It
refuses a run with an older key, an older list or a list from which a key has disappeared.

Revoking a party's keys ends its part in the agreement: a new key needs a new agreement. Without TLS
there is no authority, and so no list.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding

from fedloom._system import write_atomic
from fedloom.deploy.keys import (
    PublicKey,
    key_file,
    public_key_of,
    read_authority,
    read_authority_certificate,
    read_public_key,
    today,
)
from fedloom.errors import ConfigError, MessageError, unknown

COORDINATOR = "coordinator"  # its name among the keys; no party has it
WARNING_DAYS = 30  # before the end of a key or a certificate
MEMORY_FILE = "keyring.json"  # in a party's folder
REASONS = {
    "compromised": x509.ReasonFlags.key_compromise,
    "superseded": x509.ReasonFlags.superseded,
    "left": x509.ReasonFlags.cessation_of_operation,
}
_SUCCESSOR_FILE = re.compile(r"(.+)\.(?:[2-9]|[1-9]\d+)\.pub")


# ---- the list of revoked keys ----
@dataclass(frozen=True)
class Revoked:
    """When a key was revoked, and why: one of `REASONS`."""

    date: date
    reason: str


@dataclass(frozen=True)
class RevocationList:
    """The keys that do not count any more.

    Attributes:
        number: Each new list has the next number.
        date: The day on which the list was made.
        keys: The revoked keys by fingerprint.
        pem: The list as its authority has signed it.
    """

    number: int
    date: date
    keys: Mapping[str, Revoked]
    pem: str

    @classmethod
    def of(cls, pem: str, authority: x509.Certificate, where: str) -> RevocationList:
        """Reads a list. Raises ConfigError unless the authority has signed it.

        Args:
            pem: The list, an X.509 CRL.
            authority: The authority's certificate.
            where: Where the list came from, for errors.
        """
        try:
            found = x509.load_pem_x509_crl(pem.encode())
            number = found.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
            keys = {f"{entry.serial_number:038x}": _revoked(entry) for entry in found}
        except (ValueError, x509.ExtensionNotFound) as error:
            raise ConfigError(f"{where}: not a list of revoked keys ({error})") from None
        if not _is_signed_by(found, authority):
            raise ConfigError(
                f"{where}: the list of revoked keys is not signed by the authority of ca.crt"
            )
        return cls(number, found.last_update_utc.date(), keys, pem)

    def require_not_older(self, known: RevocationList, where: str) -> None:
        """Raises ConfigError if this list is older than a known one, or lacks a key of it."""
        missing = known.keys.keys() - self.keys.keys()
        if self.number < known.number or missing or (self.number == known.number and self != known):
            raise ConfigError(
                f"{where}: list {self.number} of revoked keys, of {self.date}, does not continue "
                f"list {known.number}, of {known.date}, which is known here; ask the coordinator "
                "for its newest ca.crl"
            )


def _is_signed_by(found: x509.CertificateRevocationList, authority: x509.Certificate) -> bool:
    public: Any = authority.public_key()
    return found.issuer == authority.subject and found.is_signature_valid(public)


def _revoked(entry: x509.RevokedCertificate) -> Revoked:
    flag = entry.extensions.get_extension_for_class(x509.CRLReason).value.reason
    reason = next((word for word, known in REASONS.items() if known == flag), flag.value)
    return Revoked(entry.revocation_date_utc.date(), reason)


def revoke(
    keyring: Keyring, name: str, reason: str, authority_key: Path, now: datetime | None = None
) -> tuple[Path, RevocationList]:
    """Revokes all keys of a party, from the agreed one to the current one.

    Replaces ca.crl in the agreement's folder. Returns its path and the new list.

    Args:
        keyring: The keys of an agreement, as `read_keyring` returns them.
        name: The party.
        reason: One of `REASONS`.
        authority_key: The ca.key file.
        now: The time of the revocation; None for the current time.
    """
    if keyring.authority is None:
        raise ConfigError(
            "federation.authority is missing: without TLS there is no authority that could sign a "
            "list of revoked keys; remove the party from the agreement"
        )
    if name not in keyring.agreed:
        raise unknown("party", name, keyring.agreed)
    if reason not in REASONS:
        raise unknown("reason:", reason, REASONS)
    key, certificate = read_authority(authority_key, keyring.authority)
    now, before = now or datetime.now(UTC), keyring.revoked
    entries = {} if before is None else dict(before.keys)
    for of_party in keyring.chains[name]:
        entries.setdefault(of_party.fingerprint, Revoked(now.date(), reason))
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(certificate.subject)
        .last_update(now)
        .next_update(certificate.not_valid_after_utc)
        .add_extension(x509.CRLNumber(1 if before is None else before.number + 1), critical=False)
    )
    for fingerprint, entry in entries.items():
        builder = builder.add_revoked_certificate(_entry(fingerprint, entry))
    pem = builder.sign(key, SHA256()).public_bytes(Encoding.PEM)
    path = _list_file(keyring.authority)
    write_atomic(path, pem)
    return path, RevocationList.of(pem.decode(), certificate, str(path))


def _entry(fingerprint: str, revoked: Revoked) -> x509.RevokedCertificate:
    flag = REASONS.get(revoked.reason, x509.ReasonFlags.unspecified)
    at = datetime(revoked.date.year, revoked.date.month, revoked.date.day, tzinfo=UTC)
    builder = x509.RevokedCertificateBuilder().serial_number(int(fingerprint, 16))
    return builder.revocation_date(at).add_extension(x509.CRLReason(flag), critical=False).build()


def _list_file(authority: Path) -> Path:
    return authority.with_suffix(".crl")


# ---- what there is to say about a key ----
@dataclass(frozen=True)
class KeyRow:
    """A key as `fedloom keys show` prints it.

    Attributes:
        name: The party, or the file.
        key: Its current key.
        revoked: When and why it, or one that it replaces, was revoked; None if it was not.
        left: The number of days for which it is still valid.
    """

    name: str
    key: PublicKey
    revoked: Revoked | None
    left: int

    @property
    def state(self) -> str:
        """The state in a few words."""
        if self.revoked is not None:
            return f"revoked on {self.revoked.date} ({self.revoked.reason})"
        if self.key.terms is None:
            return "valid, no expiry"
        if self.left < 0:
            return f"expired on {self.key.expires}"
        days = f"{self.left} days left" if self.left < WARNING_DAYS else "valid"
        return f"{days}, expires {self.key.expires}"

    @property
    def text(self) -> str:
        """The key in one line."""
        terms = self.key.terms
        number = (
            f"key {self.key.number}" if terms is None else f"key {terms.number} of {terms.made}"
        )
        replaced = f", replaces {terms.replaces}" if terms is not None and terms.replaces else ""
        return f"{self.state}; {number}, fingerprint {self.key.fingerprint}{replaced}"

    def to_json(self) -> dict[str, Any]:
        """Returns the key as JSON."""
        terms, revoked = self.key.terms, self.revoked
        return {
            "number": self.key.number,
            "fingerprint": self.key.fingerprint,
            "made": None if terms is None else str(terms.made),
            "expires": None if terms is None else str(terms.expires),
            "replaces": None if terms is None else terms.replaces or None,
            "revoked": None if revoked is None else str(revoked.date),
        }


def folder_rows(folder: Path, day: date | None = None) -> list[KeyRow]:
    """Returns what there is to say about each .pub file in a folder.

    Args:
        folder: The folder. A list of revoked keys counts if ca.crt lies there too.
        day: The day that counts; None for today.
    """
    authority = folder / "ca.crt"
    revoked = _read_list_beside(authority) if authority.exists() else None
    files = sorted(folder.glob("*.pub"))
    return [_row(path.name, (read_public_key(path),), revoked, day) for path in files]


def _row(
    name: str, chain: Sequence[PublicKey], revoked: RevocationList | None, day: date | None
) -> KeyRow:
    listed = {} if revoked is None else revoked.keys
    found = next((listed[key.fingerprint] for key in chain if key.fingerprint in listed), None)
    return KeyRow(name, chain[-1], found, (chain[-1].expires - (day or today())).days)


# ---- the keys of an agreement ----
@dataclass(frozen=True)
class Keyring:
    """The keys of an agreement's parties and of its coordinator.

    Attributes:
        agreed: The keys that the agreement names, by party, and under `COORDINATOR`.
        folder: The agreement's folder.
        authority: The authority's certificate, a PEM file; None for no TLS.
        successors: Keys that replace others, in any order. Those of no party here are ignored.
        revoked: The newest list of revoked keys; None if there is none.
    """

    agreed: Mapping[str, PublicKey]
    folder: Path
    authority: Path | None = None
    successors: tuple[PublicKey, ...] = ()
    revoked: RevocationList | None = None

    def __post_init__(self) -> None:
        assert self.chains  # forged successors are refused before anybody asks for keys

    @cached_property
    def chains(self) -> dict[str, tuple[PublicKey, ...]]:
        """For each name the keys from the agreed one to the current one."""
        following: dict[tuple[str, str], PublicKey] = {}
        for key in self.successors:
            assert key.terms is not None
            other = following.setdefault((key.terms.party, key.terms.replaces), key)
            if other.text() != key.text():
                raise ConfigError(
                    f"party {key.terms.party!r}: two keys replace its key {key.number - 1}, "
                    f"{other.fingerprint} and {key.fingerprint}; one of them is not the party's: "
                    "ask the party, and revoke its keys with `fedloom keys revoke`"
                )
        return {name: _chain(name, first, following) for name, first in self.agreed.items()}

    @property
    def coordinator(self) -> PublicKey:
        """The coordinator's current key."""
        return self.chains[COORDINATOR][-1]

    def current(self, day: date | None = None) -> dict[str, PublicKey]:
        """Returns the current key of each party whose key counts.

        day: the day on which it must count; None for today.
        """
        refused = self.refused(day)
        names = (name for name in self.agreed if name != COORDINATOR and name not in refused)
        return {name: self.chains[name][-1] for name in names}

    def refused(self, day: date | None = None) -> dict[str, str]:
        """Returns why a key does not count, for each name whose key does not.

        day: the day on which it must count; None for today.
        """
        reasons = {name: self._objection(name, day or today()) for name in self.agreed}
        return {name: reason for name, reason in reasons.items() if reason}

    def _objection(self, name: str, day: date) -> str:
        who = "the coordinator" if name == COORDINATOR else f"party {name!r}"
        renew = f"make a new key with `fedloom keys --party {name}` and agree on it"
        listed = {} if self.revoked is None else self.revoked.keys
        for key in self.chains[name]:
            if (found := listed.get(key.fingerprint)) is not None:
                when = f"was revoked on {found.date} ({found.reason})"
                return f"{who}: its key {key.number} {when}; {renew}"
        current = self.chains[name][-1]
        if current.expires < day:
            return f"{who}: its key {current.number} expired on {current.expires}; {renew}"
        return ""

    def require_valid(self, names: Iterable[str], day: date | None = None) -> None:
        """Raises ConfigError, which says why, if the key of one of the names does not count.

        Args:
            names: Parties, or `COORDINATOR`.
            day: The day on which the keys must count; None for today.
        """
        refused = self.refused(day)
        for name in names:
            if name not in self.agreed:
                raise unknown("party", name, self.agreed)
            if name in refused:
                raise ConfigError(refused[name])

    def require_own(self, name: str, key: PublicKey) -> None:
        """Raises ConfigError unless the key is the current one of that name, and counts.

        Args:
            name: A party, or `COORDINATOR`.
            key: The public half of the key that it uses.
        """
        chain = self.chains[name]
        agreed = "federation.coordinator" if name == COORDINATOR else f"the key of party {name!r}"
        if key.text() not in [known.text() for known in chain]:
            if key.fingerprint in [known.fingerprint for known in chain]:
                raise ConfigError(
                    f"key: {agreed} in the agreement has another party, number or expiry than the "
                    f".key file, which says {key.expires}; copy the .pub file that belongs to it"
                )
            raise ConfigError(f"key: it does not match {agreed} in the agreement")
        if key.number < (newest := chain[-1]).number:
            raise ConfigError(
                f"key: it is key {key.number} of {name!r}, which key {newest.number} has replaced; "
                f"use {key_file(Path(), name, newest.number)}"
            )
        self.require_valid([name])

    def warnings(self, day: date | None = None) -> list[str]:
        """Returns a line for each key that expires within `WARNING_DAYS`, or does not count."""
        day = day or today()
        lines = list(self.refused(day).values())
        for name, chain in self.chains.items():
            if 0 <= (left := (chain[-1].expires - day).days) < WARNING_DAYS:
                file = key_file(Path(), name, chain[-1].number)
                lines.append(
                    f"the key of {name!r} expires on {chain[-1].expires}, in {left} days; its "
                    f"owner replaces it with `fedloom keys rotate {file}`"
                )
        return lines

    def rows(self, day: date | None = None) -> list[KeyRow]:
        """Returns what there is to say about the current key of each name."""
        return [_row(name, chain, self.revoked, day) for name, chain in self.chains.items()]

    def files(self) -> dict[str, int]:
        """Returns when the files of rotations and of the list were last changed, by name."""
        lists = [] if self.authority is None else [_list_file(self.authority)]
        found = [self.folder / name for name in _successor_files(self.folder, self.agreed)]
        return {path.name: path.stat().st_mtime_ns for path in (*found, *lists) if path.exists()}

    def with_successors(self, keys: Iterable[PublicKey]) -> Keyring:
        """Returns this keyring with more keys that replace others."""
        added = (*self.successors, *(key for key in keys if key.number > 1))
        return replace(self, successors=tuple({key.text(): key for key in added}.values()))

    def before(self, key: PublicKey) -> Keyring:
        """Returns this keyring without the key that replaces `key`, which is still in use."""
        kept = (k for k in self.successors if k.terms and k.terms.replaces != key.fingerprint)
        return replace(self, successors=tuple(kept))

    # ---- what travels ----
    def to_json(self) -> dict[str, Any]:
        """Returns what the coordinator sends to the parties when a run begins."""
        return {
            "parties": list(self.current()),
            "successors": [key.text() for chain in self.chains.values() for key in chain[1:]],
            "revoked": "" if self.revoked is None else self.revoked.pem,
        }

    def received(self, content: Any) -> Keyring:
        """Returns the keyring that the coordinator has sent.

        Raises ConfigError if something in it is forged, or older than what is known here, or if
        the run relies on a key that does not count.

        content: the coordinator's `to_json`.
        """
        where = "the coordinator's keys"
        try:
            names, lines = list(content["parties"]), list(content["successors"])
            successors = tuple(public_key_of(str(line)) for line in lines)
            pem = str(content["revoked"])
        except (KeyError, TypeError) as error:
            raise MessageError(f"{where}: not valid ({type(error).__name__}: {error})") from None
        if any(key.number == 1 for key in successors):
            raise MessageError(f"{where}: a key among them replaces no other")
        revoked = read_list(pem, self.authority, where) if pem else None
        given = replace(self, successors=successors, revoked=revoked)
        for name, known in self.chains.items():
            chain = given.chains[name]
            if [key.text() for key in chain[: len(known)]] != [key.text() for key in known]:
                raise ConfigError(
                    f"{where}: {name!r} has key {chain[-1].number} ({chain[-1].fingerprint}) "
                    f"there, but key {known[-1].number} ({known[-1].fingerprint}) here; its newest "
                    f"file {name}.{known[-1].number}.pub belongs into the coordinator's folder"
                )
        if self.revoked is not None:
            empty = RevocationList(0, date.min, {}, "")
            (revoked or empty).require_not_older(self.revoked, where)
        given.require_valid([COORDINATOR, *names])
        return given


def _chain(
    name: str, first: PublicKey, following: Mapping[tuple[str, str], PublicKey]
) -> tuple[PublicKey, ...]:
    """Returns the keys from a first one to the one that nothing replaces. Verifies each step."""
    chain = [first]
    while (new := following.get((name, chain[-1].fingerprint))) is not None:
        old = chain[-1]
        assert new.terms is not None
        if not new.is_approved_by(old):
            raise ConfigError(
                f"party {name!r}: key {new.number} ({new.fingerprint}) is not signed by key "
                f"{old.number}, which it claims to replace; ask the party for its .pub file"
            )
        if new.number != old.number + 1:
            raise ConfigError(
                f"party {name!r}: key {new.number} replaces key {old.number}; the numbers must "
                "follow each other"
            )
        if new.terms.made > old.expires:
            raise ConfigError(
                f"party {name!r}: key {new.number} was made on {new.terms.made}, but key "
                f"{old.number}, which signed it, expired on {old.expires}; make a new key with "
                f"`fedloom keys --party {name}` and agree on it"
            )
        chain.append(new)
    return tuple(chain)


def read_keyring(
    parties: Mapping[str, PublicKey],
    coordinator: PublicKey,
    folder: Path,
    authority: Path | None,
) -> Keyring:
    """Returns the keys of an agreement, with the rotations and the list in its folder.

    Args:
        parties: The keys that the agreement names, by party.
        coordinator: The coordinator's key that the agreement names.
        folder: The agreement's folder.
        authority: The authority's certificate, a PEM file; None for no TLS.
    """
    agreed = {**parties, COORDINATOR: coordinator}
    keys = [read_public_key(folder / name) for name in _successor_files(folder, agreed)]
    revoked = None if authority is None else _read_list_beside(authority)
    return Keyring(agreed, folder, authority, revoked=revoked).with_successors(keys)


def _successor_files(folder: Path, names: Iterable[str]) -> list[str]:
    """Returns the names of the files that hold keys which replace those of the names."""
    found = (_SUCCESSOR_FILE.fullmatch(path.name) for path in folder.iterdir())
    known = set(names)
    return sorted(match[0] for match in found if match is not None and match[1] in known)


def _read_list_beside(authority: Path) -> RevocationList | None:
    """Returns the list of revoked keys beside an authority's certificate, if there is one."""
    path = _list_file(authority)
    return read_list(path.read_text(), authority, str(path)) if path.exists() else None


def read_list(pem: str, authority: Path | None, where: str) -> RevocationList:
    """Returns a list of revoked keys. Raises ConfigError unless the authority has signed it.

    Args:
        pem: The list, an X.509 CRL.
        authority: The authority's certificate, a PEM file; None for no TLS.
        where: Where the list came from, for errors.
    """
    if authority is None:
        raise ConfigError(
            f"{where}: a list of revoked keys, but without TLS there is no authority that could "
            "have signed it"
        )
    return RevocationList.of(pem, read_authority_certificate(authority), where)


def certificate_warnings(folder: Path, day: date | None = None) -> list[str]:
    """Returns a line for each certificate in a folder that ends within `WARNING_DAYS`, or has.

    Args:
        folder: The folder with ca.crt and server.crt; those that are missing are ignored.
        day: The day that counts; None for today.
    """
    lines = []
    for name, until in certificate_ends(folder).items():
        if (left := (until - (day or today())).days) < WARNING_DAYS:
            renew = "move it away and run `fedloom keys HOST` again"
            help_ = renew if name == "server.crt" else "make a new authority and a new agreement"
            lines.append(f"{folder / name} expires on {until}, in {left} days; {help_}")
    return lines


def certificate_ends(folder: Path) -> dict[str, date]:
    """Returns the last day of ca.crt and server.crt in a folder; those that are there."""
    paths = [path for name in ("ca.crt", "server.crt") if (path := folder / name).exists()]
    certificates = {path.name: x509.load_pem_x509_certificate(path.read_bytes()) for path in paths}
    return {name: found.not_valid_after_utc.date() for name, found in certificates.items()}


# ---- what a party remembers ----
class KeyMemory:
    """The rotations and lists that a party has seen, in its own folder.

    Each agreed key and each authority is remembered for itself: a party may take part in several
    agreements.

    path: the file.
    """

    def __init__(self, path: Path):
        self.path = path
        self.lines: list[str] = []
        self.lists: dict[str, str] = {}  # by the fingerprint of the authority's certificate
        if path.exists():
            try:
                content = json.loads(path.read_text())
                self.lines, self.lists = list(content["successors"]), dict(content["lists"])
            except (ValueError, KeyError, TypeError):
                raise ConfigError(
                    f"{path}: damaged; move it away if the coordinator's keys are to be trusted"
                ) from None

    def recall(self, keyring: Keyring) -> Keyring:
        """Returns a keyring with what the party has seen before."""
        known = keyring.with_successors(public_key_of(line) for line in self.lines)
        if keyring.authority is None or not (pem := self.lists.get(_print(keyring.authority))):
            return known
        remembered = read_list(pem, keyring.authority, str(self.path))
        if known.revoked is None or known.revoked.number < remembered.number:
            return replace(known, revoked=remembered)
        known.revoked.require_not_older(remembered, str(_list_file(keyring.authority)))
        return known

    def keep(self, keyring: Keyring) -> None:
        """Remembers what is in a keyring."""
        seen = {key.text() for chain in keyring.chains.values() for key in chain[1:]}
        lines, lists = sorted({*self.lines, *seen}), dict(self.lists)
        if keyring.authority is not None and keyring.revoked is not None:
            lists[_print(keyring.authority)] = keyring.revoked.pem
        if (lines, lists) != (self.lines, self.lists):
            self.lines, self.lists = lines, lists
            self.path.parent.mkdir(parents=True, exist_ok=True)
            content = json.dumps({"successors": lines, "lists": lists}, indent=1)
            write_atomic(self.path, content.encode() + b"\n")


def _print(authority: Path) -> str:
    """Returns the fingerprint of an authority's certificate."""
    certificate = read_authority_certificate(authority)
    return sha256(certificate.public_bytes(Encoding.DER)).hexdigest()
