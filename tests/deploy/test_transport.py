"""Who reaches the coordinator and who does not: a real SuperLink, with TLS and keys."""

import socket
import ssl
from base64 import b64encode
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from deployment import free_port, port_is_free

from fedloom.deploy import keys
from fedloom.deploy.agreement import read_agreement, require_tls
from fedloom.deploy.coordinator_transport import Address, CoordinatorTransport, SuperLinkError
from fedloom.deploy.flower_internals import public_key_to_bytes
from fedloom.deploy.keys import make_authority, make_party, read_party_key, read_public_key
from fedloom.deploy.party_transport import PartyTransport, RefusedError, UnreachableError
from fedloom.deploy.rate_limit import Limits
from fedloom.deploy.superlink import LIMIT, PARTY_KEY, SECRET, SMALL, STATUS
from fedloom.errors import ConfigError

slow = pytest.mark.slow
MB = 2**20


def make_keys(folder, host="127.0.0.1"):
    make_authority(folder, host)
    for name in ("bank-a", "bank-b", "stranger"):
        make_party(folder, name)
    return folder


class Place:
    """A folder of keys, and a SuperLink that knows bank-a and bank-b."""

    def __init__(self, folder, limit=LIMIT, tls=True, limits=Limits()):
        self.folder, self.tls = folder, tls
        names = ("server.crt", "server.key", "ca.crt") if tls else ()
        files = [folder / name for name in names]
        known = {name: read_public_key(folder / f"{name}.pub") for name in ("bank-a", "bank-b")}
        self.transport = CoordinatorTransport(
            Address("127.0.0.1", free_port(), *files),
            known,
            folder / "superlink.log",
            limit,
            limits,
        )

    @contextmanager
    def party(self, name="bank-a", tls=True, authority=None):
        """Yields the transport of a party."""
        trusted = (authority or self.folder / "ca.crt") if tls and self.tls else None
        key = read_party_key(self.folder / f"{name}.key")
        with closing(PartyTransport(self.transport.address.text, trusted, key)) as made:
            yield made

    def context(self):
        return ssl.create_default_context(cafile=str(self.folder / "ca.crt"))

    def http(self):
        """Returns an HTTP client of someone who is not the coordinator."""
        url = f"https://{self.transport.address.text}"
        return httpx.Client(base_url=url, verify=self.context(), timeout=60)

    def connection(self):
        """Returns a TLS connection."""
        plain = socket.create_connection(("127.0.0.1", self.transport.address.port), timeout=60)
        return self.context().wrap_socket(plain, server_hostname="127.0.0.1")

    def order(self, party):
        """Sends an order to bank-a. Returns the pending messages, and the order at the party."""
        pending = self.transport.send({"bank-a": b"an order"})
        while (order := party.receive()) is None:
            pass
        return pending, order

    def answers(self, pending):
        while not (answers := list(self.transport.receive(pending, 1.0))):
            pass
        return answers


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    made = Place(make_keys(tmp_path_factory.mktemp("keys")))
    yield made
    made.transport.close()
    assert port_is_free(made.transport.address.port)


@slow
def test_a_known_party_connects_and_exchanges_messages(place):
    with place.party() as party:
        party.connect()
        pending, order = place.order(party)
        assert order.envelope == b"an order"
        party.answer(order, b"an answer")
        assert place.answers(pending) == [(next(iter(pending)), b"an answer")]
        assert place.transport.status()["bank-a"].connections >= 1


@slow
def test_a_key_that_is_not_registered_is_refused(place):
    with place.party("stranger") as party, pytest.raises(RefusedError):
        party.connect()


@slow
def test_a_server_of_another_authority_is_not_trusted(place, tmp_path):
    make_authority(tmp_path, "127.0.0.1")
    with (
        place.party(authority=tmp_path / "ca.crt") as party,
        pytest.raises(RefusedError, match="certificate is not trusted"),
    ):
        party.connect()


@slow
def test_plain_http_and_old_versions_of_tls_are_refused(place):
    with (
        place.party(tls=False) as party,
        pytest.raises((UnreachableError, RefusedError)),
    ):
        party.connect()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    port = place.transport.address.port
    with (
        socket.create_connection(("127.0.0.1", port)) as plain,
        pytest.raises(ssl.SSLError),
    ):
        context.wrap_socket(plain)


@slow
def test_the_certificate_is_valid_only_for_the_host_that_parties_use(tmp_path):
    # The coordinator reaches its own SuperLink, whatever host the certificate names.
    made = Place(make_keys(tmp_path, "fed.example.org"))
    with (
        closing(made.transport),
        made.party() as party,
        pytest.raises(RefusedError, match="certificate is not trusted"),
    ):
        party.connect()


@slow
def test_an_expired_certificate_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(keys, "_now", lambda: datetime.now(UTC) - timedelta(40))
    folder = make_keys(tmp_path)
    (folder / "server.crt").unlink()
    make_authority(folder, "127.0.0.1", days=30)
    with pytest.raises(SuperLinkError, match="expired"):
        Place(folder)


@slow
def test_only_the_coordinator_reaches_flowers_control_and_runtime_interfaces(place):
    paths = (
        "/v1/control/start-run",
        "/v1/control/register-node",
        "/v1/runtime/acquire-task",
        "/docs",
        "/openapi.json",
        STATUS,
    )
    with place.http() as other:
        for path in paths:
            assert other.post(path, content=b"").status_code == 403
            assert other.post(path, content=b"", headers={SECRET: "0" * 64}).status_code == 403
        not_ascii = {SECRET: "ü".encode("latin-1")}
        assert other.post("/v1/control/start-run", headers=not_ascii).status_code == 403
        # With the secret, Flower itself answers.
        headers = {SECRET: place.transport.secret, "content-type": "application/protobuf"}
        answer = other.post("/v1/control/list-nodes", content=b"", headers=headers)
        assert answer.status_code != 403


def peak(pid):
    """Returns the peak memory of a process since the last call, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    most = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # resets the peak
    return most * 1024


def push(place, size, party, header=None):
    """Sends bytes to where parties send their answers.

    Returns the status of the answer, and by how much the SuperLink's memory grew.
    """
    key = public_key_to_bytes(read_public_key(place.folder / f"{party}.pub").node)
    lines = (
        "POST /v1/fleet/push-object HTTP/1.1",
        "host: x",
        f"{PARTY_KEY}: {b64encode(key).decode()}",
        "content-type: application/protobuf",
        header or f"content-length: {size}",
        "\r\n",
    )
    pid = place.transport._process.pid
    peak(pid)
    before = peak(pid)
    with place.connection() as wire:
        wire.sendall("\r\n".join(lines).encode())
        with suppress(OSError):  # the SuperLink closes the connection before all is sent
            for _ in range(size // 2**16):
                wire.sendall(bytes(2**16))
        try:
            status = int(wire.recv(100).split()[1])
        except OSError:
            status = 0
    place.transport.require_alive()
    return status, peak(pid) - before


@slow
def test_memory_stays_within_twice_the_limit(tmp_path):
    limit = 16 * MB
    made = Place(make_keys(tmp_path), limit=limit)
    pid = made.transport._process.pid
    with closing(made.transport), made.party() as party:
        party.connect()  # bank-a is known from here on, bank-b is not
        for name, size, header in (
            ("bank-a", 10 * limit, None),
            ("bank-a", limit, None),  # from someone who has only the public key
            ("bank-b", limit, None),
            ("stranger", 10 * limit, None),
            ("stranger", 10 * limit, "transfer-encoding: chunked"),
            ("stranger", 10 * limit, f"content-length: {SMALL}"),  # sends more than that
        ):
            status, growth = push(made, size, name, header)
            assert status != 200
            assert growth < 2 * limit, (name, size, header, growth)
        _, order = made.order(party)
        before = peak(pid)
        with pytest.raises(RefusedError, match=f"at most {limit} bytes"):
            party.answer(order, bytes(10 * limit))  # the registered party itself
        assert peak(pid) - before < 2 * limit
        pending, order = made.order(party)
        party.answer(order, bytes(MB))  # the SuperLink still works
        assert made.answers(pending)[0][1] == bytes(MB)


@slow
def test_without_the_limit_a_large_message_is_stored(tmp_path):
    """The control: Flower accepts the message, and the measurement shows its size."""
    # Flower keeps the sender's identity per process, so this is the last transport to be opened.
    made = Place(make_keys(tmp_path))
    pid = made.transport._process.pid
    with closing(made.transport), made.party() as party:
        party.connect()
        pending, order = made.order(party)
        before = peak(pid)
        party.answer(order, bytes(64 * MB))
        assert peak(pid) - before > 64 * MB
        assert len(made.answers(pending)[0][1]) == 64 * MB


@slow
@pytest.mark.parametrize(
    "header",
    [
        f"content-length: {2**30 + 1}",
        "content-length: -5",
        "content-length: many",
        "transfer-encoding: chunked",
    ],
)
def test_a_request_that_is_too_long_or_does_not_state_its_length_is_refused(place, header):
    with place.connection() as wire:
        head = f"POST /v1/fleet/push-object HTTP/1.1\r\nhost: x\r\n{header}\r\n\r\n"
        wire.sendall(head.encode())
        # 400 comes from the HTTP server, which cannot parse the header.
        assert wire.recv(100).split()[1] in (b"413", b"400")
    place.transport.require_alive()


@slow
def test_the_superlink_ends_with_its_coordinator(tmp_path):
    transport = Place(make_keys(tmp_path)).transport
    pid = transport._process.pid
    transport._process.stdin.close()  # as the system does when the coordinator dies
    transport._process.wait(60)
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(SuperLinkError, match="has ended"):
        transport.require_alive()
    transport.close()


def test_a_port_in_use_is_named(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"address: cannot listen on 127.0.0.1:{port}"):
            CoordinatorTransport(Address("127.0.0.1", port), {}, log=tmp_path / "superlink.log")


AGREEMENT = """
[federation]
address = "{address}"
{authority}
coordinator = "bank-a.pub"
[parties]
bank-a = "bank-a.pub"
bank-b = "bank-b.pub"
[data]
num_features = 8
num_classes = 3
"""


@pytest.mark.parametrize(
    ("address", "authority", "insecure", "words"),
    [
        ("fed.example.org:8443", "", True, "without TLS only addresses of this machine"),
        ("fed.example.org:8443", "", False, "without TLS only addresses of this machine"),
        ("127.0.0.1:8443", "", False, "without TLS on this machine with --insecure"),
        ("127.0.0.1:8443", 'authority = "ca.crt"', True, "remove one"),
        ("127.0.0.1:8443", "", True, None),
        ("127.0.0.1:8443", 'authority = "ca.crt"', False, None),
    ],
)
def test_without_tls_a_deployment_needs_insecure_and_loopback(
    tmp_path, address, authority, insecure, words
):
    path = make_keys(tmp_path) / "federation.toml"
    path.write_text(AGREEMENT.format(address=address, authority=authority))
    agreement = read_agreement(path)
    if words is None:
        require_tls(agreement, insecure)
        return
    with pytest.raises(ConfigError, match=words):
        require_tls(agreement, insecure)


@slow
def test_without_tls_keys_are_checked_all_the_same(tmp_path):
    made = Place(make_keys(tmp_path), tls=False)
    with closing(made.transport):
        with made.party() as party:
            party.connect()
        with made.party("stranger") as party, pytest.raises(RefusedError):
            party.connect()
