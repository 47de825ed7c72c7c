"""Keys of a deployment: a certificate authority for the coordinator's TLS, two keys per party.

    file         content                                  holder
    ca.key       signs the server's certificates          only the coordinator
    ca.crt       lets parties verify the coordinator      all parties
    server.key   the coordinator's TLS key                only the coordinator
    server.crt   its certificate                          the coordinator, which sends it to clients
    NAME.key     a party's keys: node (P-384), signing    only that party
    NAME.pub     their public halves, one line of text    the coordinator
    NAME.2.key   the keys that replace those of NAME.key, and so on, with the same holders
    NAME.2.pub

A party has two keys because Flower authenticates nodes by an EC key and accepts no other kind.
Answers are signed by an Ed25519 key that Flower never sees. Files with secrets have mode 0600 from
their first byte. No file is ever overwritten.

The public line also says whose keys they are and until when they are valid (`KeyTerms`). The key
itself signs that, and a key that replaces another is signed by the other one as well. A line
without terms, as earlier versions wrote it, is valid without an end.
`fedloom.deploy.keyring` decides which keys count.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from functools import cached_property
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedloom.errors import ConfigError

# An authority is valid longer than its server certificates, so that renewing a certificate changes
# nothing for the parties.
AUTHORITY_DAYS = 3650
KEY_DAYS = 365  # that a party's keys are valid, if the party does not choose
LONGEST_DAYS = 3650  # that a party may choose
# Certificates are valid from a little before they are made: another machine's clock may be behind.
CLOCK_SKEW = timedelta(hours=1)
PARTY_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
RESERVED = ("ca", "server")  # their .key files are the authority's and the server's
_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_DNS_NAME = re.compile(rf"(?=.{{1,253}}$)(?:{_LABEL}\.)*(?!\d+$){_LABEL}")
_PEM = re.compile(rb"-----BEGIN ([A-Z0-9 ]+)-----[^-]*-----END \1-----\s*")


# The domains of signatures: a signature of one domain is not valid in another.
_TERMS = b"fedloom key 1: the terms of this key\0"
_APPROVAL = b"fedloom key 1: this key replaces mine\0"
_BARE = ("p384", "ed25519")
_FIRST = (*_BARE, "party", "number", "made", "expires", "signature")
_SUCCESSOR = (*_FIRST[:-1], "replaces", "signature", "approval")


# ---- a party's keys ----
@dataclass(frozen=True)
class KeyTerms:
    """Whose keys they are, and until when they are valid.

    Attributes:
        party: The party's name.
        number: 1 for a party's first keys. Keys that replace others have the next number.
        made: The day on which they were made.
        expires: The last day on which they are valid (UTC).
        replaces: The fingerprint of the keys that they replace; empty for first keys.
        signature: The signature of the keys themselves.
        approval: The signature of the keys that they replace; empty for first keys.
    """

    party: str
    number: int
    made: date
    expires: date
    replaces: str = ""
    signature: bytes = b""
    approval: bytes = b""


@dataclass(frozen=True)
class PublicKey:
    """The public keys of a party.

    Attributes:
        node: Flower admits the party by this key.
        signing: The party's answers are verified with this key.
        terms: Whose keys they are, and until when they are valid; None if nothing is said.
    """

    node: ec.EllipticCurvePublicKey
    signing: Ed25519PublicKey
    terms: KeyTerms | None = None

    def text(self) -> str:
        """Returns the keys in one line, for example for a TOML file. `public_key_of` reads it."""
        if self.terms is None:
            return self._stated()
        signed = f"{self._stated()} signature:{_base64(self.terms.signature)}"
        approval = self.terms.approval
        return f"{signed} approval:{_base64(approval)}" if approval else signed

    def _stated(self) -> str:
        """Returns the line without its signatures: what they sign."""
        keys = f"p384:{_base64(self._point())} ed25519:{_base64(self.signing.public_bytes_raw())}"
        if (terms := self.terms) is None:
            return keys
        days = f"made:{terms.made} expires:{terms.expires}"
        stated = f"{keys} party:{terms.party} number:{terms.number} {days}"
        return f"{stated} replaces:{terms.replaces}" if terms.replaces else stated

    def _point(self) -> bytes:
        return self.node.public_bytes(Encoding.X962, PublicFormat.CompressedPoint)

    @cached_property
    def fingerprint(self) -> str:
        """38 hex digits that identify the keys, whatever their terms say."""
        return sha256(self._point() + self.signing.public_bytes_raw()).digest()[:19].hex()

    def summary(self) -> str:
        """Returns what parties compare: the keys' fingerprint and their terms."""
        if (terms := self.terms) is None:
            return self.fingerprint
        return f"{self.fingerprint}, key {terms.number} of {terms.made}, expires {terms.expires}"

    @property
    def number(self) -> int:
        """Which of the party's keys they are: 1 for the first ones."""
        return 1 if self.terms is None else self.terms.number

    @property
    def expires(self) -> date:
        """The last day on which the keys are valid (UTC)."""
        return date.max if self.terms is None else self.terms.expires

    def is_approved_by(self, before: PublicKey) -> bool:
        """Returns whether these keys replace `before`, whose owner has signed that."""
        if self.terms is None or self.terms.replaces != before.fingerprint:
            return False
        return _is_signed(before.signing, self.terms.approval, _APPROVAL + self._stated().encode())

    def _is_signed_by_itself(self) -> bool:
        assert self.terms is not None
        return _is_signed(self.signing, self.terms.signature, _TERMS + self._stated().encode())


@dataclass(frozen=True)
class PartyKey:
    """The private keys of a party. It gives `public` to the coordinator.

    Attributes:
        node: The private half of `PublicKey.node`.
        signing: The private half of `PublicKey.signing`.
        terms: What the public line says about the keys; None if nothing is said.
    """

    node: ec.EllipticCurvePrivateKey
    signing: Ed25519PrivateKey
    terms: KeyTerms | None = None

    @property
    def public(self) -> PublicKey:
        """The public halves."""
        return PublicKey(self.node.public_key(), self.signing.public_key(), self.terms)


def make_party(folder: Path, name: str, days: int = KEY_DAYS) -> list[Path]:
    """Makes a party's keys. Writes NAME.key and NAME.pub into the folder and returns both paths.

    days: how long the keys are valid.
    """
    files = party_files(folder, name)
    key = _new_key(name, days)
    _make_folder(folder)
    return _write_party(files, key)


def make_successor(path: Path, days: int = KEY_DAYS) -> list[Path]:
    """Makes keys that replace those of a NAME.key file, which approves them.

    Writes NAME.2.key and NAME.2.pub (NAME.3.key after that, and so on) beside the file. Returns
    both paths. Raises ConfigError if the keys in the file have expired.

    Args:
        path: The NAME.key file.
        days: How long the new keys are valid.
    """
    key = read_party_key(path)
    party = path.stem if key.terms is None else key.terms.party
    require_party_name(party)
    if key.public.expires < today():
        raise ConfigError(
            f"{path}: the key expired on {key.public.expires} and cannot approve another one; make "
            f"a new key with `fedloom keys --party {party}` and name it in the agreement"
        )
    successor = _new_key(party, days, key)
    secret = key_file(path.parent, party, successor.public.number)
    files = [secret, secret.with_suffix(".pub")]
    _require_absent(files)
    return _write_party(files, successor)


def key_file(folder: Path, party: str, number: int) -> Path:
    """Returns the file of a party's private keys: NAME.key, or NAME.NUMBER.key after the first."""
    return folder / (f"{party}.key" if number == 1 else f"{party}.{number}.key")


def _new_key(party: str, days: int, before: PartyKey | None = None) -> PartyKey:
    """Returns new keys with signed terms. `before` are the keys that they replace."""
    require_days(days)
    node, signing = ec.generate_private_key(ec.SECP384R1()), Ed25519PrivateKey.generate()
    terms = KeyTerms(party, 1, today(), today() + timedelta(days))
    if before is not None:
        number, replaces = before.public.number + 1, before.public.fingerprint
        terms = replace(terms, number=number, replaces=replaces)
    stated = PartyKey(node, signing, terms).public._stated().encode()
    terms = replace(terms, signature=signing.sign(_TERMS + stated))
    if before is not None:
        terms = replace(terms, approval=before.signing.sign(_APPROVAL + stated))
    return PartyKey(node, signing, terms)


def _write_party(files: list[Path], key: PartyKey) -> list[Path]:
    line = key.public.text().encode() + b"\n"
    _write(files[0], line + _pem(key.node) + _pem(key.signing), secret=True)
    _write(files[1], line)
    return files


def require_days(days: int) -> None:
    """Raises ConfigError unless a party's keys may be valid for so many days."""
    if not 1 <= days <= LONGEST_DAYS:
        raise ConfigError(f"days is {days}, must be from 1 to {LONGEST_DAYS}")


def today() -> date:
    """Returns the current day (UTC)."""
    return _now().date()


def party_files(folder: Path, name: str) -> list[Path]:
    """Returns the two files that `make_party` writes.

    Raises ConfigError if the name is not valid or if one of the files exists.
    """
    require_party_name(name)
    files = [folder / f"{name}.key", folder / f"{name}.pub"]
    _require_absent(files)
    return files


def require_party_name(name: str) -> None:
    """Raises ConfigError unless the name is valid for a party."""
    if not PARTY_NAME.fullmatch(name) or name in RESERVED:
        rule = "1 to 64 of a-z, 0-9, '.', '_', '-', the first one a letter or a digit"
        raise ConfigError(
            f"party {name!r} is not a valid name: {rule}; not {' or '.join(map(repr, RESERVED))}"
        )


def read_party_key(path: Path) -> PartyKey:
    """Returns the keys in a NAME.key file.

    Raises ConfigError if other users may read the file or if fedloom did not write it.
    """
    require_private(path)
    data = _read(path)
    line, _, rest = data.partition(b"\n") if data.startswith(b"p384:") else (b"", b"", data)
    keys = [_private_key(path, block) for block in _blocks(path, rest)]
    node = [
        key
        for key in keys
        if isinstance(key, ec.EllipticCurvePrivateKey) and isinstance(key.curve, ec.SECP384R1)
    ]
    signing = [key for key in keys if isinstance(key, Ed25519PrivateKey)]
    if len(node) != 1 or len(signing) != 1 or len(keys) != 2:
        raise ConfigError(
            f"{path}: must hold an EC P-384 and an Ed25519 private key, one of each; "
            f"it holds {_kinds(keys)}"
        )
    key = PartyKey(node[0], signing[0])
    if not line:
        return key
    public = _public_key_in(path, line)
    if public.fingerprint != key.public.fingerprint:
        raise ConfigError(f"{path}: its first line is not the public half of its keys")
    return replace(key, terms=public.terms)


def read_public_key(path: Path) -> PublicKey:
    """Returns the keys in a NAME.pub file."""
    return _public_key_in(path, _read(path))


def _public_key_in(path: Path, line: bytes) -> PublicKey:
    try:
        return public_key_of(line.decode("ascii"))
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a public key: not text") from None
    except _NotAKeyError as error:
        raise ConfigError(f"{path}: {error}") from None


def public_key_of(text: str) -> PublicKey:
    """Returns the keys in the output of `PublicKey.text`. Raises ConfigError if it is not valid."""
    words = [word.partition(":") for word in text.split()]
    if (tags := tuple(tag for tag, _, _ in words)) not in (_BARE, _FIRST, _SUCCESSOR):
        raise _NotAKeyError(
            "not a public key: must be 'p384:... ed25519:...', as in the party's .pub file"
        )
    values = {tag: value for tag, _, value in words}
    try:
        node = ec.EllipticCurvePublicKey.from_encoded_point(
            ec.SECP384R1(), base64.b64decode(values["p384"], validate=True)
        )
    except (ValueError, binascii.Error):
        raise _NotAKeyError("not a public key: no P-384 key follows 'p384:'") from None
    try:
        signing = Ed25519PublicKey.from_public_bytes(
            base64.b64decode(values["ed25519"], validate=True)
        )
    except (ValueError, binascii.Error):
        raise _NotAKeyError("not a public key: no Ed25519 key follows 'ed25519:'") from None
    if tags == _BARE:
        return PublicKey(node, signing)
    key = PublicKey(node, signing, _terms_of(values))
    if not key._is_signed_by_itself():
        raise _NotAKeyError(
            "not a public key: it did not sign its own terms (party, number, made, expires); "
            "somebody has changed the line: ask the party for its .pub file"
        )
    return key


def _terms_of(values: dict[str, str]) -> KeyTerms:
    """Returns the terms in a public line. The caller checks their signatures."""
    try:
        terms = KeyTerms(
            values["party"],
            int(values["number"]),
            date.fromisoformat(values["made"]),
            date.fromisoformat(values["expires"]),
            values.get("replaces", ""),
            base64.b64decode(values["signature"], validate=True),
            base64.b64decode(values.get("approval", ""), validate=True),
        )
    except ValueError as error:
        raise _NotAKeyError(f"not a public key: its terms are not valid ({error})") from None
    numbered = terms.number > 1 if terms.replaces else terms.number == 1
    if not PARTY_NAME.fullmatch(terms.party) or not numbered or terms.made > terms.expires:
        raise _NotAKeyError("not a public key: its terms are not valid (party, number, dates)")
    return terms


class _NotAKeyError(ConfigError):
    """The text is not a key. The caller adds where the text came from."""


def require_private(path: Path) -> None:
    """Raises ConfigError unless the file exists and only its owner has access to it."""
    try:
        mode = path.stat().st_mode & 0o777
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    if mode & 0o077:
        raise ConfigError(
            f"{path}: holds a secret, but others have access to it (mode {mode:04o}); "
            f"run: chmod 600 {path}"
        )


# ---- the coordinator's certificates ----
def make_authority(folder: Path, host: str, days: int = 365) -> list[Path]:
    """Writes ca.key, ca.crt, server.key and server.crt. Returns the paths of the files it wrote.

    An existing authority and an existing server.key are used again. To renew a certificate, move
    the old server.crt away and call this again. A certificate expires no later than its authority.

    Args:
        folder: Where the files go.
        host: The DNS name or IP address that parties connect to.
        days: How long the server's certificate is valid.
    """
    if days < 1:
        raise ConfigError(f"days is {days}, must be at least 1")
    names = _alternative_names(host)
    paths = {name: folder / name for name in ("ca.key", "ca.crt", "server.key", "server.crt")}
    _require_absent([paths["server.crt"]])
    known = [paths[name].exists() for name in ("ca.key", "ca.crt")]
    if any(known) and not all(known):
        there, gone = ("ca.key", "ca.crt") if known[0] else ("ca.crt", "ca.key")
        raise ConfigError(
            f"{paths[gone]}: no such file, but {there} exists; an authority needs both"
        )
    _make_folder(folder)
    written = []
    if all(known):
        authority_key, authority = read_authority(paths["ca.key"], paths["ca.crt"])
    else:
        if paths["server.key"].exists():  # an invalid key is refused before anything is written
            _read_ec_key(paths["server.key"])
        authority_key = ec.generate_private_key(ec.SECP256R1())
        authority = _authority_certificate(authority_key, max(days, AUTHORITY_DAYS))
        _write(paths["ca.key"], _pem(authority_key), secret=True)
        _write(paths["ca.crt"], authority.public_bytes(Encoding.PEM))
        written += [paths["ca.key"], paths["ca.crt"]]
    if paths["server.key"].exists():
        server_key = _read_ec_key(paths["server.key"])
    else:
        server_key = ec.generate_private_key(ec.SECP256R1())
        _write(paths["server.key"], _pem(server_key), secret=True)
        written.append(paths["server.key"])
    certificate = _server_certificate(
        server_key.public_key(), names, days, authority_key, authority
    )
    _write(paths["server.crt"], certificate.public_bytes(Encoding.PEM))
    return [*written, paths["server.crt"]]


def _alternative_names(host: str) -> list[x509.GeneralName]:
    """Returns the names in a certificate for this host; for loopback, all names of loopback."""
    names: list[x509.GeneralName]
    try:
        address = ip_address(host)
    except ValueError:
        host = host.lower()
        if not _DNS_NAME.fullmatch(host):
            raise ConfigError(
                f"host {host!r} is not a DNS name or an IP address (no port, no scheme, no '*')"
            ) from None
        names, loopback = [x509.DNSName(host)], host == "localhost"
    else:
        if address.is_unspecified or address.is_multicast or "%" in host:
            raise ConfigError(f"host {host!r} is not an address that parties can connect to")
        names, loopback = [x509.IPAddress(address)], address.is_loopback
    own = [x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))] if loopback else []
    return [*names, *(name for name in own if name not in names)]


def _authority_certificate(key: ec.EllipticCurvePrivateKey, days: int) -> x509.Certificate:
    # Parties may know several authorities. A unique name keeps them apart.
    name = x509.Name(
        [x509.NameAttribute(NameOID.COMMON_NAME, f"fedloom authority {secrets.token_hex(4)}")]
    )
    mark = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    return (
        _certificate(name, name, key.public_key(), _now() + timedelta(days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(mark, critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(mark), critical=False
        )
        .sign(key, SHA256())
    )


def _server_certificate(
    key: ec.EllipticCurvePublicKey,
    names: Iterable[x509.GeneralName],
    days: int,
    authority_key: ec.EllipticCurvePrivateKey,
    authority: x509.Certificate,
) -> x509.Certificate:
    # The hosts are only in the alternative names.
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedloom coordinator")])
    end = min(_now() + timedelta(days), authority.not_valid_after_utc)
    mark = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    return (
        _certificate(authority.subject, subject, key, end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(mark), critical=False
        )
        .sign(authority_key, SHA256())
    )


def _certificate(
    issuer: x509.Name, subject: x509.Name, key: ec.EllipticCurvePublicKey, end: datetime
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().issuer_name(issuer).subject_name(subject).public_key(key)
    return (
        builder.serial_number(x509.random_serial_number())
        .not_valid_before(_now() - CLOCK_SKEW)
        .not_valid_after(end)
    )


def _usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def read_authority(
    key_path: Path, path: Path
) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """Returns an authority's key and certificate. They must match and be valid today."""
    key, certificate = _read_ec_key(key_path), read_authority_certificate(path)
    if certificate.public_key() != key.public_key():
        raise ConfigError(f"{path}: does not belong to {key_path.name}")
    if not certificate.not_valid_before_utc <= _now() < certificate.not_valid_after_utc:
        raise ConfigError(
            f"{path}: not valid today, only from {certificate.not_valid_before_utc} "
            f"to {certificate.not_valid_after_utc}"
        )
    return key, certificate


def read_authority_certificate(path: Path) -> x509.Certificate:
    """Returns the certificate of an authority. Raises ConfigError if it is not one."""
    try:
        certificate = x509.load_pem_x509_certificate(_read(path))
        may_sign = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier)
    except (ValueError, x509.ExtensionNotFound):
        raise ConfigError(f"{path}: not the certificate of an authority") from None
    if not may_sign:
        raise ConfigError(f"{path}: not the certificate of an authority")
    return certificate


def _now() -> datetime:
    return datetime.now(UTC)


def _is_signed(key: Ed25519PublicKey, signature: bytes, content: bytes) -> bool:
    try:
        key.verify(signature, content)
    except InvalidSignature:
        return False
    return True


# ---- files ----
def _read_ec_key(path: Path) -> ec.EllipticCurvePrivateKey:
    require_private(path)
    keys = [_private_key(path, block) for block in _blocks(path, _read(path))]
    if len(keys) != 1 or not isinstance(keys[0], ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{path}: must hold one EC private key; it holds {_kinds(keys)}")
    return keys[0]


def _blocks(path: Path, data: bytes) -> list[bytes]:
    """Returns the PEM blocks of a file. Raises ConfigError if it holds anything else."""
    if not data.strip() or _PEM.sub(b"", data).strip():
        raise ConfigError(f"{path}: not a key file (PEM blocks and nothing else)")
    return [found[0] for found in _PEM.finditer(data)]


def _private_key(path: Path, block: bytes) -> object:
    try:
        return load_pem_private_key(block, password=None)
    except TypeError:
        raise ConfigError(
            f"{path}: the key has a password, which fedloom cannot ask for; remove the password"
        ) from None
    except (ValueError, UnsupportedAlgorithm):
        raise ConfigError(f"{path}: not a private key") from None


def _kinds(keys: Iterable[object]) -> str:
    return ", ".join(
        key.curve.name if isinstance(key, ec.EllipticCurvePrivateKey) else type(key).__name__
        for key in keys
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}") from None


def _require_absent(paths: Iterable[Path]) -> None:
    for path in paths:
        if os.path.lexists(path):
            raise ConfigError(
                f"{path}: exists already, and keys are never overwritten; "
                "move it away or choose another folder"
            )


def _write(path: Path, content: bytes, *, secret: bool = False) -> None:
    """Writes a new file. Its permissions are set when it is created: no one can read it before."""
    _require_absent([path])
    try:
        with open(
            os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644), "wb"
        ) as file:
            file.write(content)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


def _pem(key: ec.EllipticCurvePrivateKey | Ed25519PrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
