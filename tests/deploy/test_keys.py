"""Keys and certificates: connections, file permissions, renewal, and invalid files."""

import os
import socket
import ssl
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)

from fedloom.cli import main
from fedloom.deploy import keys
from fedloom.deploy.keys import (
    PublicKey,
    make_authority,
    make_party,
    public_key_of,
    read_party_key,
    read_public_key,
    require_private,
)
from fedloom.errors import ConfigError

HOST = "coordinator.example.org"


def pem(key, protection=None):
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, protection or NoEncryption())


def mode(path):
    return path.stat().st_mode & 0o777


def certificate(path):
    return x509.load_pem_x509_certificate(path.read_bytes())


def handshake(server_folder, authority, host):
    """Connects with TLS over loopback, with OpenSSL's strict checks. Returns what arrives."""
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(server_folder / "server.crt", server_folder / "server.key")
    client_side = ssl.create_default_context(cafile=authority)
    client_side.verify_flags |= ssl.VERIFY_X509_STRICT

    def serve(listener):
        connection, _ = listener.accept()
        with connection:
            try:
                with server_side.wrap_socket(connection, server_side=True) as secured:
                    secured.sendall(b"welcome")
            except OSError:  # the client refused the certificate; the test checks its error
                pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        try:
            with (
                socket.create_connection(listener.getsockname(), timeout=60) as plain,
                client_side.wrap_socket(plain, server_hostname=host) as secured,
            ):
                return secured.recv(100)
        finally:
            thread.join()


# ---- certificates ----
@pytest.mark.parametrize(
    ("host", "asked"),
    [
        (HOST, HOST),
        (HOST.upper(), HOST),
        ("10.1.2.3", "10.1.2.3"),
        ("localhost", "localhost"),
        ("localhost", "127.0.0.1"),
        ("127.0.0.1", "localhost"),
        ("::1", "::1"),
        ("::1", "127.0.0.1"),
        ("2001:db8::7", "2001:db8::7"),
    ],
)
def test_a_party_with_the_authoritys_certificate_connects(tmp_path, host, asked):
    make_authority(tmp_path, host)
    assert handshake(tmp_path, tmp_path / "ca.crt", asked) == b"welcome"


@pytest.mark.parametrize(
    "asked", ["other.example.org", "localhost", "127.0.0.1", "sub." + HOST, "example.org"]
)
def test_another_host_is_refused(tmp_path, asked):
    make_authority(tmp_path, HOST)
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        handshake(tmp_path, tmp_path / "ca.crt", asked)


def test_another_authority_is_refused(tmp_path):
    make_authority(tmp_path / "a", HOST)
    make_authority(tmp_path / "b", HOST)
    with pytest.raises(ssl.SSLCertVerificationError, match="unable to get local issuer"):
        handshake(tmp_path / "a", tmp_path / "b" / "ca.crt", HOST)


@pytest.mark.parametrize(("shift", "words"), [(-40, "expired"), (40, "not yet valid")])
def test_an_expired_or_future_certificate_is_refused(tmp_path, monkeypatch, shift, words):
    monkeypatch.setattr(keys, "_now", lambda: datetime.now(UTC) + timedelta(min(shift, 0)))
    make_authority(tmp_path, HOST)  # valid today, in both cases
    (tmp_path / "server.crt").unlink()
    monkeypatch.setattr(keys, "_now", lambda: datetime.now(UTC) + timedelta(shift))
    make_authority(tmp_path, HOST, days=30)
    with pytest.raises(ssl.SSLCertVerificationError, match=words):
        handshake(tmp_path, tmp_path / "ca.crt", HOST)


def test_a_server_cannot_act_as_an_authority(tmp_path):
    make_authority(tmp_path / "a", HOST)
    forged = tmp_path / "b"
    forged.mkdir()
    for own, taken in (("ca.key", "server.key"), ("ca.crt", "server.crt")):
        (forged / own).write_bytes((tmp_path / "a" / taken).read_bytes())
        (forged / own).chmod(0o600)
    with pytest.raises(ConfigError, match=r"ca\.crt: not the certificate of an authority"):
        make_authority(forged, "evil.example.org")


def test_the_fields_of_the_certificates(tmp_path):
    make_authority(tmp_path, HOST, days=30)
    authority, server = certificate(tmp_path / "ca.crt"), certificate(tmp_path / "server.crt")
    for made, ca in ((authority, True), (server, False)):
        assert isinstance(made.public_key().curve, ec.SECP256R1)
        basic, usage = (
            made.extensions.get_extension_for_class(c)
            for c in (x509.BasicConstraints, x509.KeyUsage)
        )
        assert basic.critical
        assert usage.critical
        assert (basic.value.ca, usage.value.key_cert_sign, usage.value.digital_signature) == (
            ca,
            ca,
            not ca,
        )
        issuer = made.extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value
        assert (
            issuer.key_identifier
            == authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value.digest
        )
    assert list(server.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == [
        x509.OID_SERVER_AUTH
    ]
    assert list(server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value) == [
        x509.DNSName(HOST)
    ]
    assert timedelta(29) < server.not_valid_after_utc - datetime.now(UTC) <= timedelta(30)
    assert authority.not_valid_after_utc > server.not_valid_after_utc
    server.verify_directly_issued_by(authority)


@pytest.mark.parametrize(
    ("host", "names"),
    [
        ("localhost", {"localhost", ip_address("127.0.0.1")}),
        ("127.0.0.1", {"localhost", ip_address("127.0.0.1")}),
        ("::1", {ip_address("::1"), "localhost", ip_address("127.0.0.1")}),
        ("10.0.0.1", {ip_address("10.0.0.1")}),
        ("a-b.c", {"a-b.c"}),
    ],
)
def test_only_certificates_for_loopback_have_loopback_names(tmp_path, host, names):
    make_authority(tmp_path, host)
    extensions = certificate(tmp_path / "server.crt").extensions
    listed = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {name.value for name in listed} == names
    assert len(listed) == len(names)


@pytest.mark.parametrize(
    "host",
    [
        *("", "a b", "host:9092", "https://host", "*.example.org", "-a.org", "a-.org", "a..b"),
        *("a.", ".a", "10.0.0.300", "1.2.3", "x" * 64, "a." * 127 + "a", "0.0.0.0", "::"),
        *("fe80::1%eth0", "[::1]", "bücher.de", "a\n", "224.0.0.1", "a_b.org"),
    ],
)
def test_invalid_hosts_are_refused(tmp_path, host):
    with pytest.raises(ConfigError, match="host"):
        make_authority(tmp_path / "keys", host)
    assert not (tmp_path / "keys").exists()


def test_days_are_at_least_1_and_the_authority_is_valid_as_long(tmp_path):
    with pytest.raises(ConfigError, match="days is 0"):
        make_authority(tmp_path, HOST, days=0)
    make_authority(tmp_path, HOST, days=5000)
    authority, server = certificate(tmp_path / "ca.crt"), certificate(tmp_path / "server.crt")
    assert authority.not_valid_after_utc >= server.not_valid_after_utc


# ---- renewal and existing files ----
def test_a_certificate_is_renewed_by_the_same_authority(tmp_path):
    assert [p.name for p in make_authority(tmp_path, HOST)] == [
        "ca.key",
        "ca.crt",
        "server.key",
        "server.crt",
    ]
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    (tmp_path / "server.crt").unlink()
    assert [p.name for p in make_authority(tmp_path, "new.example.org")] == ["server.crt"]
    assert {p.name for p in tmp_path.iterdir() if p.read_bytes() != before[p.name]} == {
        "server.crt"
    }
    assert handshake(tmp_path, tmp_path / "ca.crt", "new.example.org") == b"welcome"
    for name in ("server.crt", "server.key"):
        (tmp_path / name).unlink()
    assert [p.name for p in make_authority(tmp_path, HOST)] == ["server.key", "server.crt"]
    assert (tmp_path / "ca.crt").read_bytes() == before["ca.crt"]
    assert handshake(tmp_path, tmp_path / "ca.crt", HOST) == b"welcome"


def test_a_renewed_certificate_expires_no_later_than_its_authority(tmp_path, monkeypatch):
    monkeypatch.setattr(keys, "AUTHORITY_DAYS", 20)
    make_authority(tmp_path, HOST, days=10)
    (tmp_path / "server.crt").unlink()
    make_authority(tmp_path, HOST, days=300)
    assert (
        certificate(tmp_path / "server.crt").not_valid_after_utc
        == certificate(tmp_path / "ca.crt").not_valid_after_utc
    )
    (tmp_path / "server.crt").unlink()
    monkeypatch.setattr(keys, "_now", lambda: datetime.now(UTC) + timedelta(21))
    with pytest.raises(ConfigError, match=r"ca\.crt: not valid today"):
        make_authority(tmp_path, HOST)


@pytest.mark.parametrize("existing", ["server.crt", "ca.key", "ca.crt"])
def test_existing_files_are_not_changed(tmp_path, existing):
    (tmp_path / existing).write_text("mine")
    (tmp_path / existing).chmod(0o600)
    with pytest.raises(
        ConfigError, match="server.crt: exists" if existing == "server.crt" else existing
    ):
        make_authority(tmp_path, HOST)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [(existing, "mine")]


def test_an_invalid_server_key_is_refused_before_anything_is_written(tmp_path):
    (tmp_path / "server.key").write_text("mine")
    (tmp_path / "server.key").chmod(0o600)
    with pytest.raises(ConfigError, match=r"server\.key: not a key file"):
        make_authority(tmp_path, HOST)
    assert [p.name for p in tmp_path.iterdir()] == ["server.key"]


def test_an_authority_with_another_key_is_refused(tmp_path):
    make_authority(tmp_path / "a", HOST)
    make_authority(tmp_path / "b", HOST)
    (tmp_path / "a" / "server.crt").unlink()
    (tmp_path / "a" / "ca.crt").write_bytes((tmp_path / "b" / "ca.crt").read_bytes())
    with pytest.raises(ConfigError, match=r"ca\.crt: does not belong to ca\.key"):
        make_authority(tmp_path / "a", HOST)
    (tmp_path / "a" / "ca.key").chmod(0o644)
    with pytest.raises(ConfigError, match=r"ca\.key: holds a secret.*0644.*chmod 600"):
        make_authority(tmp_path / "a", HOST)


@pytest.mark.parametrize("existing", ["bank.key", "bank.pub"])
def test_a_partys_files_are_never_overwritten(tmp_path, existing):
    (tmp_path / existing).symlink_to(tmp_path / "nowhere")  # not even through a dangling link
    with pytest.raises(ConfigError, match=f"{existing}: exists already"):
        make_party(tmp_path, "bank")
    assert [p.name for p in tmp_path.iterdir()] == [existing]


def test_a_file_that_appears_after_the_check_is_not_overwritten(tmp_path, monkeypatch):
    monkeypatch.setattr(keys, "_require_absent", lambda paths: None)
    (tmp_path / "bank.key").write_text("mine")
    with pytest.raises(ConfigError, match=r"bank\.key: File exists"):
        make_party(tmp_path, "bank")
    assert (tmp_path / "bank.key").read_text() == "mine"


def test_a_file_in_place_of_the_folder_is_named(tmp_path):
    (tmp_path / "keys").write_text("")
    with pytest.raises(ConfigError, match="keys"):
        make_party(tmp_path / "keys", "bank")
    with pytest.raises(ConfigError, match="keys"):
        make_authority(tmp_path / "keys" / "deeper", HOST)


# ---- permissions ----
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_secrets_are_private_from_the_first_byte(tmp_path, monkeypatch, umask):
    seen, original = {}, os.open

    def watched(path, flags, *rest, **more):
        descriptor = original(path, flags, *rest, **more)
        if str(path).startswith(str(tmp_path)):  # the file is still empty
            seen[os.path.basename(path)] = os.fstat(descriptor).st_mode & 0o777
            assert flags & os.O_EXCL
        return descriptor

    monkeypatch.setattr(os, "open", watched)
    before = os.umask(umask)
    try:
        make_authority(tmp_path / "keys", HOST)
        make_party(tmp_path / "keys", "bank")
    finally:
        os.umask(before)
    assert seen == {
        **dict.fromkeys(("ca.key", "server.key", "bank.key"), 0o600),
        **dict.fromkeys(("ca.crt", "server.crt", "bank.pub"), 0o644 & ~umask),
    }
    assert {p.name: mode(p) for p in (tmp_path / "keys").iterdir()} == seen
    assert mode(tmp_path / "keys") == 0o700


@pytest.mark.parametrize("loose", [0o640, 0o604, 0o644, 0o660, 0o666, 0o610])
def test_a_key_that_others_have_access_to_is_refused(tmp_path, loose):
    path = make_party(tmp_path, "bank")[0]
    path.chmod(loose)
    for read in (require_private, read_party_key):
        with pytest.raises(ConfigError) as refused:
            read(path)
        assert all(
            words in str(refused.value) for words in (str(path), f"{loose:04o}", "chmod 600")
        )
    path.chmod(0o400)
    require_private(path)


# ---- a party's keys ----
def test_a_partys_keys_are_read_as_written(tmp_path):
    secret, public = make_party(tmp_path, "bank-a.2_x")
    assert (secret.name, public.name) == ("bank-a.2_x.key", "bank-a.2_x.pub")
    key = read_party_key(secret)
    assert isinstance(key.node.curve, ec.SECP384R1)
    assert (
        read_public_key(public)
        == key.public
        == public_key_of(key.public.text())
        == public_key_of(f"  {key.public.text()}\n")
    )
    assert "\n" not in key.public.text()
    key.public.signing.verify(key.signing.sign(b"x"), b"x")
    assert read_party_key(make_party(tmp_path, "other")[0]).public != key.public


@pytest.mark.parametrize("name", ["a", "0", "a" * 64, "bank-a", "a.b_c-d", "7eleven"])
def test_valid_names(tmp_path, name):
    assert make_party(tmp_path, name)[0].name == f"{name}.key"


@pytest.mark.parametrize(
    "name",
    [
        *("", "A", "a" * 65, "-a", ".a", "..", "_a", "a/b", "../a", "a b", "ä", "a\n", "a\0"),
        *("ca", "server", "٣"),
    ],
)
def test_invalid_names(tmp_path, name):
    with pytest.raises(ConfigError, match="1 to 64 of a-z"):
        make_party(tmp_path / "keys", name)
    assert not (tmp_path / "keys").exists()


NODE, SIGNING = ec.generate_private_key(ec.SECP384R1()), Ed25519PrivateKey.generate()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not a key file"),
        (b"hello", "not a key file"),
        (b"\xff\xfe\0", "not a key file"),
        (pem(NODE), "one of each; it holds secp384r1"),
        (pem(SIGNING), "one of each"),
        (pem(NODE) + pem(NODE), "one of each"),
        (pem(NODE) + pem(SIGNING) + pem(SIGNING), "one of each"),
        (pem(ec.generate_private_key(ec.SECP256R1())) + pem(SIGNING), "it holds secp256r1"),
        (pem(NODE) + pem(SIGNING) + b"junk", "not a key file"),
        (pem(NODE) + pem(SIGNING)[:-10], "not a key file"),
        (pem(NODE) + pem(SIGNING).replace(b"MC4", b"AAA"), "not a private key"),
        (pem(NODE) + pem(SIGNING, BestAvailableEncryption(b"secret")), "password"),
        (b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "not a private key"),
    ],
)
def test_files_that_are_not_a_key_are_refused(tmp_path, content, words):
    path = tmp_path / "bank.key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=words) as refused:
        read_party_key(path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_order_of_the_two_keys_does_not_matter(tmp_path):
    path = tmp_path / "bank.key"
    path.write_bytes(pem(SIGNING) + pem(NODE))
    path.chmod(0o600)
    assert read_party_key(path).public == PublicKey(NODE.public_key(), SIGNING.public_key())


GOOD = PublicKey(NODE.public_key(), SIGNING.public_key()).text()


@pytest.mark.parametrize(
    "content",
    [
        "",
        "hello",
        GOOD.split()[0],
        GOOD.split()[1],
        " ".join(reversed(GOOD.split())),
        GOOD + " more",
        GOOD[:-4],
        GOOD[:-1] + "!",
        "p384:AAAA " + GOOD.split()[1],
        GOOD.split()[0] + " ed25519:AAAA",
        "p384:ü ed25519:ü",
        pem(NODE).decode(),
    ],
    ids=range(12),  # keys differ in each process and would be part of the tests' names
)
def test_texts_that_are_not_a_public_key_are_refused(tmp_path, content):
    with pytest.raises(ConfigError, match="not a public key") as refused:
        public_key_of(content)
    assert "\n" not in str(refused.value)
    (tmp_path / "bank.pub").write_text(content)
    with pytest.raises(ConfigError, match=r"bank\.pub: not a public key"):
        read_public_key(tmp_path / "bank.pub")


def test_missing_files_are_named(tmp_path):
    for read in (require_private, read_party_key, read_public_key):
        with pytest.raises(ConfigError, match=r"none\.key: No such file"):
            read(tmp_path / "none.key")
    (tmp_path / "folder").mkdir(mode=0o700)
    for read in (read_party_key, read_public_key):
        with pytest.raises(ConfigError, match="folder: Is a directory"):
            read(tmp_path / "folder")


# ---- the command ----
@pytest.fixture
def fedloom(monkeypatch, capsys, tmp_path):
    """The command line, in an empty folder."""

    def call(*arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["fedloom", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code or 0, *capsys.readouterr()

    return call


def test_the_command_says_where_each_file_goes(fedloom, tmp_path):
    code, printed, _ = fedloom("keys", HOST, "--party", "bank-a", "--party", "bank-b")
    assert code == 0
    lines = {line.split()[0]: line for line in printed.splitlines() if line.strip()}
    assert set(lines) == {f"keys/{p.name}" for p in (tmp_path / "keys").iterdir()}
    assert len(lines) == 8
    for name, word in {
        "ca.crt": "every party",
        "bank-a.key": "party bank-a",
        "bank-b.pub": "coordinator",
        "server.key": "coordinator",
        "ca.key": "coordinator",
    }.items():
        assert word in lines[f"keys/{name}"]
    code, printed, _ = fedloom("keys", "--party", "bank-c", "--out", "keys")
    assert code == 0
    assert len(printed.split("\n")) == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "HOST"),
        (("--party", "A"), "not a valid name"),
        (("--party", "a", "--party", "a"), "twice"),
        (("a:1", "--party", "a"), "host"),
        ((HOST, "--party", "a", "--party", "-x"), "not a valid name"),
    ],
)
def test_the_command_writes_all_or_nothing(fedloom, tmp_path, arguments, words):
    code, printed, error = fedloom("keys", *arguments)
    assert (code, printed, len(error.splitlines())) == (2, "", 1)
    assert words in error
    assert not (tmp_path / "keys").exists()


@pytest.mark.slow
def test_help_imports_neither_torch_nor_cryptography(tmp_path):
    check = (
        "import sys\nfrom fedloom.cli import main\ntry: main()\nfinally: print(sorted(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", check, "keys", "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    modules = done.stdout.splitlines()[-1]
    assert "'fedloom.cli'" in modules
    assert "'torch'" not in modules
    assert "'cryptography'" not in modules
