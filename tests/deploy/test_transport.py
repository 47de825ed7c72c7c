"""Who gets through to the coordinator, and who does not: a real link, TLS, keys."""

import socket
import ssl
from base64 import b64encode
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from deployment import free_port, port_is_free
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from fedloom.deploy import keys
from fedloom.deploy.agreement import read_agreement, require_tls
from fedloom.deploy.coordinator_transport import Address, CoordinatorTransport, SuperLinkError
from fedloom.deploy.keys import make_authority, make_party, read_party_key, read_public_key
from fedloom.deploy.party_transport import PartyTransport, RefusedError, UnreachableError
from fedloom.deploy.superlink import FIRST_LIMIT, LIMIT, PARTY_KEY, SECRET
from fedloom.errors import ConfigError


def made(folder, host="127.0.0.1"):
    make_authority(folder, host)
    for name in ("bank-a", "bank-b", "stranger"):
        make_party(folder, name)
    return folder


def opened(folder, limit=LIMIT, **changed):
    files = {
        "certificate": folder / "server.crt",
        "key": folder / "server.key",
        "authority": folder / "ca.crt",
        **changed,
    }
    known = {name: read_public_key(folder / f"{name}.pub") for name in ("bank-a", "bank-b")}
    return CoordinatorTransport(
        Address("127.0.0.1", free_port(), **files), known, log=folder / "link.log", limit=limit
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = made(tmp_path_factory.mktemp("keys"))
    transport = opened(folder)
    yield folder, transport
    transport.close()
    assert port_is_free(transport.address.port)


@contextmanager
def transport(place, name="bank-a", authority="ca.crt"):
    folder, transport = place
    made = PartyTransport(
        transport.address.text,
        folder / authority if authority else None,
        read_party_key(folder / f"{name}.key"),
    )
    with closing(made):
        yield made


def test_a_known_party_gets_in_and_messages_come_and_go(place):
    _, transport = place
    with transport(place) as post:
        post.connect()
        waiting = transport.post({"bank-a": b"an order"})
        order = None
        while order is None:
            order = post.receive()
        assert order.envelope == b"an order"
        post.answer(order, b"an answer")
        answers = []
        while not answers:
            answers = list(transport.collect(waiting, 1.0))
        assert answers == [(next(iter(waiting)), b"an answer")]
        assert transport.seen()["bank-a"].silent < 5


def test_a_key_that_is_not_registered_is_refused(place):
    with transport(place, "stranger") as post, pytest.raises(RefusedError):
        post.connect()


def test_a_server_of_another_authority_is_not_trusted(place, tmp_path):
    make_authority(tmp_path, "127.0.0.1")
    folder, transport = place
    post = PartyTransport(
        transport.address.text, tmp_path / "ca.crt", read_party_key(folder / "bank-a.key")
    )
    with closing(post), pytest.raises(RefusedError, match="certificate is not to be trusted"):
        post.connect()


def test_plain_http_gets_nowhere_and_nothing_below_tls_1_2(place):
    with transport(place, authority=None) as post, pytest.raises((UnreachableError, RefusedError)):
        post.connect()
    _, transport = place
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    with (
        socket.create_connection(("127.0.0.1", transport.address.port)) as plain,
        pytest.raises(ssl.SSLError),
    ):
        context.wrap_socket(plain)


def test_the_certificate_is_for_the_host_that_parties_use_and_no_other(tmp_path):
    folder = made(tmp_path, "fed.example.org")
    transport = opened(
        folder
    )  # the coordinator finds its own link, whatever the certificate is called
    try:
        with (
            transport((folder, transport)) as post,
            pytest.raises(RefusedError, match="certificate is not to be trusted"),
        ):
            post.connect()
    finally:
        transport.close()


def test_an_expired_certificate_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(keys, "_now", lambda: datetime.now(UTC) - timedelta(40))
    folder = made(tmp_path)
    (folder / "server.crt").unlink()
    make_authority(folder, "127.0.0.1", days=30)
    with pytest.raises(SuperLinkError, match="expired"):
        opened(folder)


def test_flowers_control_and_runtime_interfaces_are_the_coordinators_alone(place):
    folder, transport = place
    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    with httpx.Client(base_url=f"https://{transport.address.text}", verify=context) as anybody:
        for path in (
            "/v1/control/start-run",
            "/v1/control/register-node",
            "/v1/runtime/acquire-task",
            "/docs",
            "/openapi.json",
            "/fedloom/seen",
        ):
            assert anybody.post(path, content=b"").status_code == 403
            assert anybody.post(path, content=b"", headers={SECRET: "0" * 64}).status_code == 403
        # It is the secret that opens the door: with it, Flower itself answers.
        told = anybody.post(
            "/v1/control/list-nodes",
            content=b"",
            headers={SECRET: transport.secret, "content-type": "application/x-protobuf"},
        )
        assert told.status_code != 403


def peak(pid):
    """The most memory that a process has held since it was asked last, in bytes."""
    most = next(
        int(line.split()[1])
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("VmHWM")
    )
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # begins anew from what it holds now
    return most * 1024


def pushed(folder, transport, size, party="bank-a", said=None):
    """Sends so many bytes to where parties put their answers; gives the answer's status, and by how much the link's memory grew."""
    key = b64encode(public_key_to_bytes(read_public_key(folder / f"{party}.pub").node)).decode()
    head = f"POST /v1/fleet/push-object HTTP/1.1\r\nhost: x\r\n{PARTY_KEY}: {key}\r\ncontent-type: application/x-protobuf\r\n"
    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    peak(transport._process.pid)
    before = peak(transport._process.pid)
    plain = socket.create_connection(("127.0.0.1", transport.address.port), timeout=60)
    with plain, context.wrap_socket(plain, server_hostname="127.0.0.1") as wire:
        wire.sendall((head + (said or f"content-length: {size}") + "\r\n\r\n").encode())
        with suppress(OSError):  # it hangs up before all has come
            for _ in range(size // 2**16):
                wire.sendall(bytes(2**16))
        try:
            status = int(wire.recv(100).split()[1])
        except OSError:
            status = 0
    transport.require_alive()
    return status, peak(transport._process.pid) - before


MB = 2**20


def asked(transport, post):
    """Orders bank-a to do something; gives the number of the order, and what came to the party."""
    waiting = transport.post({"bank-a": b"an order"})
    while (order := post.receive()) is None:
        pass
    return waiting, order


def test_memory_stays_within_twice_the_limit_whatever_is_sent(tmp_path):
    folder, limit = made(tmp_path), 16 * MB
    transport = opened(folder, limit=limit)
    try:
        with transport((folder, transport)) as post:
            post.connect()  # bank-a is known from here on, bank-b is not
            for party, size, said in (
                ("bank-a", 10 * limit, None),
                ("bank-a", limit, None),  # somebody else, who has seen its public key
                ("bank-b", limit, None),
                ("stranger", 10 * limit, None),
                ("stranger", 10 * limit, "transfer-encoding: chunked"),
                (
                    "stranger",
                    10 * limit,
                    f"content-length: {FIRST_LIMIT}",
                ),  # and then goes on sending
            ):
                status, growth = pushed(folder, transport, size, party, said)
                assert status != 200
                assert growth < 2 * limit, (party, size, said, growth)
            _, order = asked(transport, post)
            before = peak(transport._process.pid)
            with pytest.raises(RefusedError, match=f"at most {limit} bytes"):
                post.answer(order, bytes(10 * limit))  # the registered party itself
            assert peak(transport._process.pid) - before < 2 * limit
            waiting, order = asked(transport, post)
            post.answer(order, bytes(MB))  # the link is as good as before
            answers = []
            while not answers:
                answers = list(transport.collect(waiting, 1.0))
            assert answers[0][1] == bytes(MB)
    finally:
        transport.close()


def test_without_the_limit_it_would_all_be_taken(tmp_path):
    """The control: what Flower does with it, and that the measure sees it."""
    folder = made(tmp_path)
    transport = opened(
        folder
    )  # the last one that is opened: Flower's idea of who sends is the process's
    try:
        with transport((folder, transport)) as post:
            post.connect()
            waiting, order = asked(transport, post)
            before = peak(transport._process.pid)
            post.answer(order, bytes(160 * MB))
            assert peak(transport._process.pid) - before > 160 * MB
            answers = []
            while not answers:
                answers = list(transport.collect(waiting, 1.0))
            assert len(answers[0][1]) == 160 * MB
    finally:
        transport.close()


def test_what_is_too_long_or_does_not_say_how_long_it_is_is_refused_before_it_is_read(place):
    folder, transport = place
    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    for head in (
        f"content-length: {2**30 + 1}",
        "content-length: -5",
        "content-length: many",
        "transfer-encoding: chunked",
    ):
        plain = socket.create_connection(("127.0.0.1", transport.address.port))
        with plain, context.wrap_socket(plain, server_hostname="127.0.0.1") as wire:
            wire.sendall(
                f"POST /v1/fleet/push-object HTTP/1.1\r\nhost: x\r\n{head}\r\n\r\n".encode()
            )
            assert wire.recv(100).split()[1] in (
                b"413",
                b"400",
            )  # 400: the server's own reading of nonsense
    transport.require_alive()


def test_a_secret_in_strange_letters_is_just_a_wrong_one(place):
    folder, transport = place
    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    with httpx.Client(base_url=f"https://{transport.address.text}", verify=context) as anybody:
        assert (
            anybody.post(
                "/v1/control/start-run", headers={SECRET: "ü".encode("latin-1")}
            ).status_code
            == 403
        )


def test_the_link_dies_with_its_coordinator(tmp_path):
    transport = opened(made(tmp_path))
    pid = transport._process.pid
    transport._process.stdin.close()  # what the system does when a process dies, however it dies
    transport._process.wait(5)
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(SuperLinkError, match="has ended"):
        transport.require_alive()
    transport.close()


def test_a_port_that_is_taken_is_named(tmp_path):
    folder = made(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"address: cannot listen on 127.0.0.1:{port}"):
            CoordinatorTransport(Address("127.0.0.1", port), {}, log=folder / "link.log")


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
    ("address", "authority", "insecure", "told"),
    [
        ("fed.example.org:8443", "", True, "without TLS only on this machine"),
        ("fed.example.org:8443", "", False, "without TLS only on this machine"),
        ("127.0.0.1:8443", "", False, "only with --insecure"),
        ("127.0.0.1:8443", 'authority = "ca.crt"', True, "leave one of them out"),
    ],
)
def test_nothing_starts_without_tls_unless_it_stays_on_this_machine_and_is_asked_for(
    tmp_path, address, authority, insecure, told
):
    folder = made(tmp_path)
    (folder / "federation.toml").write_text(AGREEMENT.format(address=address, authority=authority))
    agreement = read_agreement(folder / "federation.toml")
    with pytest.raises(ConfigError, match=told):
        require_tls(agreement, insecure)


def test_on_loopback_it_runs_without_tls_if_asked_for(tmp_path):
    folder = made(tmp_path)
    (folder / "federation.toml").write_text(
        AGREEMENT.format(address="127.0.0.1:8443", authority="")
    )
    require_tls(read_agreement(folder / "federation.toml"), insecure=True)
    transport = opened(folder, certificate=None, key=None, authority=None)
    try:
        with transport((folder, transport), authority=None) as post:
            post.connect()
        with (
            transport((folder, transport), "stranger", authority=None) as post,
            pytest.raises(RefusedError),
        ):  # keys count all the same
            post.connect()
    finally:
        transport.close()
