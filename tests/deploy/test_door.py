"""The door in front of the SuperLink: what a stranger on the network can do, which is nothing.

First its parts, then a real SuperLink with TLS and keys. test_stranger.py attacks whole runs. The
controls use a door without one protection (open_door.py).
"""

import base64
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from test_transport import MB, Place, make_keys, peak

from fedloom.deploy import coordinator_transport, party_transport, request_signature
from fedloom.deploy.flower_internals import NodeAuthHttpInterceptor, public_key_to_bytes
from fedloom.deploy.keys import read_party_key, read_public_key
from fedloom.deploy.party_transport import RefusedError, UnreachableError
from fedloom.deploy.rate_limit import MAX_SENDERS, Connections, Limits, RateLimit, network
from fedloom.deploy.request_signature import (
    AHEAD,
    BEHIND,
    SIGNED,
    UnverifiedError,
    Verifier,
    sign_request,
)
from fedloom.deploy.superlink import DELIVERED, PARTY_KEY, Door, Listener

slow = pytest.mark.slow
HERE = Path(__file__).parent
FLEET = "/v1/fleet"
PROTOBUF = "application/protobuf"
POST, PATH = "POST", f"{FLEET}/activate-node"


class Clock:
    def __init__(self):
        self.now = 1e9

    def __call__(self):
        return self.now


# ---- signatures ----
KEY = Ed25519PrivateKey.generate()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def verifier(clock):
    other = Ed25519PrivateKey.generate().public_key()
    return Verifier({"a": KEY.public_key(), "b": other}, clock)


def test_a_signed_request_is_accepted_once_and_gives_the_digest_of_its_body(verifier, clock):
    header = sign_request(KEY, POST, PATH, b"body", clock())
    assert verifier.verify("a", header, POST, PATH, 4) == sha256(b"body").hexdigest()
    with pytest.raises(UnverifiedError, match="was sent before"):
        verifier.verify("a", header, POST, PATH, 4)
    verifier.verify("a", sign_request(KEY, POST, PATH, b"body", clock()), POST, PATH, 4)


def replaced(number, text):
    """Returns a change of one part of the header: time, nonce, digest or signature."""

    def change(header):
        parts = header.split()
        parts[number] = text
        return " ".join(parts)

    return change


@pytest.mark.parametrize(
    ("party", "method", "path", "length", "change"),
    [
        ("b", POST, PATH, 4, str),
        ("c", POST, PATH, 4, str),
        ("", POST, PATH, 4, str),
        ("a", "GET", PATH, 4, str),
        ("a", POST, f"{FLEET}/deactivate-node", 4, str),
        ("a", POST, PATH, 5, str),
        ("a", POST, PATH, 4, replaced(0, "1000000001.000")),
        ("a", POST, PATH, 4, replaced(1, "0" * 16)),
        ("a", POST, PATH, 4, replaced(2, "0" * 64)),
        ("a", POST, PATH, 4, replaced(3, base64.b64encode(bytes(64)).decode())),
        ("a", POST, PATH, 4, lambda header: ""),
        ("a", POST, PATH, 4, lambda header: "x" * 10_000),
    ],
)
def test_a_signature_is_for_one_request_of_one_party(
    verifier, clock, party, method, path, length, change
):
    header = sign_request(KEY, POST, PATH, b"body", clock())
    with pytest.raises(UnverifiedError):
        verifier.verify(party, change(header), method, path, length)
    verifier.verify("a", header, POST, PATH, 4)  # it was not used up


@pytest.mark.parametrize(
    ("offset", "words"),
    [
        (AHEAD - 0.5, None),
        (0.5 - BEHIND, None),
        (AHEAD + 60, "65 s ahead of the coordinator's"),
        (-BEHIND - 120, "420 s behind the coordinator's.*set the clock"),
    ],
)
def test_a_clock_that_is_off_is_named_with_its_offset(verifier, clock, offset, words):
    header = sign_request(KEY, POST, PATH, b"", clock() + offset)
    if words is None:
        verifier.verify("a", header, POST, PATH, 0)
        return
    with pytest.raises(UnverifiedError, match=words):
        verifier.verify("a", header, POST, PATH, 0)


def test_a_nonce_is_remembered_as_long_as_its_time_is_valid_and_not_for_ever(verifier, clock):
    sent, most = [], 0
    for _ in range(2000):
        sent.append((clock(), sign_request(KEY, POST, PATH, b"", clock() + AHEAD - 1)))
        verifier.verify("a", sent[-1][1], POST, PATH, 0)
        most = max(most, len(verifier._recent) + len(verifier._older))
        clock.now += 1
        if len(sent) % 50 == 0:
            for at, header in sent[-400:]:
                with pytest.raises(UnverifiedError):
                    verifier.verify("a", header, POST, PATH, 0)
                assert at <= clock()
    assert most <= 2 * (BEHIND + AHEAD) + 2


# ---- limits ----
def test_a_sender_has_a_rate_and_a_burst_and_the_memory_is_bounded(clock):
    limit = RateLimit(10.0, clock)
    assert [limit.wait("x") > 0 for _ in range(25)] == 20 * [False] + 5 * [True]
    assert 0 < limit.wait("x") <= 0.1
    assert limit.wait("y") == 0  # another sender
    clock.now += 1
    assert [limit.wait("x") > 0 for _ in range(11)] == 10 * [False] + [True]
    for number in range(2 * MAX_SENDERS):
        limit.wait(str(number))
    assert len(limit) == MAX_SENDERS


def test_a_connection_belongs_to_its_address_until_a_party_has_signed_a_request_on_it():
    connections = Connections(limit=2)
    peers = [("10.0.0.1", port) for port in range(5)]
    assert [connections.opened(peer) for peer in peers[:3]] == [True, True, False]
    connections.closed(peers[2], by_peer=False)
    connections.authenticated(peers[0], "a")
    connections.authenticated(peers[1], "b")  # several parties behind one address
    assert [connections.opened(peer) for peer in peers[2:]] == [True, True, False]
    assert [connections.is_anonymous(peer) for peer in peers[:3]] == [False, False, True]


def test_a_party_has_left_when_it_has_closed_its_last_connection_itself():
    connections, peers = Connections(limit=9), [("10.0.0.1", port) for port in range(4)]
    for peer in peers:
        connections.opened(peer)
        connections.authenticated(peer, "a")
    for peer in peers[:2]:
        connections.closed(peer, by_peer=True)
    assert not connections.left
    connections.closed(peers[2], by_peer=False)
    connections.closed(peers[3], by_peer=False)  # idle: this end has closed it
    assert not connections.left
    connections.opened(peers[0])
    connections.authenticated(peers[0], "a")
    connections.closed(peers[0], by_peer=True)
    assert connections.left == {"a"}
    connections.opened(peers[1])
    connections.authenticated(peers[1], "a")
    assert not connections.left
    assert not connections._of_address


@pytest.mark.parametrize(
    ("address", "counted_as"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("", ""),
    ],
)
def test_an_ipv6_network_counts_as_one_address(address, counted_as):
    assert network(address) == counted_as


# ---- a real SuperLink ----
@pytest.fixture
def open_door(monkeypatch):
    """Starts SuperLinks without a protection from now on."""

    def without(protection):
        monkeypatch.setattr(coordinator_transport, "PROGRAM", "open_door")
        monkeypatch.setenv("FEDLOOM_OPEN", protection)
        monkeypatch.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)

    return without


@contextmanager
def opened(folder, **given):
    made = Place(make_keys(folder), **given)
    with closing(made.transport):
        yield made


def node_key(folder, name):
    key = read_public_key(folder / f"{name}.pub").node
    return base64.b64encode(public_key_to_bytes(key)).decode()


def signed_headers(folder, name, path, body=b""):
    """Returns the headers of a party's own request: Flower's, and the door's."""
    key = read_party_key(folder / f"{name}.key")
    request = httpx.Request("POST", f"https://x{path}", content=body)

    interceptor = NodeAuthHttpInterceptor(key.node, key.public.node)
    interceptor.intercept(SimpleNamespace(request=request), lambda context: None)
    request.headers[SIGNED] = sign_request(key.signing, "POST", path, body)
    request.headers.update(dict.fromkeys(("accept", "content-type"), PROTOBUF))
    return dict(request.headers)


def activation(folder, name):
    key = read_party_key(folder / f"{name}.key")
    public = public_key_to_bytes(key.public.node)
    request = party_transport.ActivateNodeRequest(public_key=public, heartbeat_interval=60.0)
    return request.SerializeToString()


@slow
def test_without_a_valid_signature_nothing_is_served_and_nothing_counts(tmp_path):
    with opened(tmp_path) as place, place.party() as party, place.http() as other:
        party.connect()
        before = place.transport.status()["bank-a"].connections
        claim = {PARTY_KEY: node_key(tmp_path, "bank-a"), "content-type": PROTOBUF}
        body = activation(tmp_path, "bank-a")
        of_flower = signed_headers(tmp_path, "bank-a", PATH, body)
        of_flower.pop(SIGNED)  # what Flower's own SuperNode would send
        of_stranger = signed_headers(tmp_path, "stranger", PATH, body)
        for headers in (claim, of_flower, of_stranger, {**of_stranger, **claim}):
            assert other.post(PATH, content=body, headers=headers).status_code == 401
        for method in ("GET", "PUT", "DELETE", "HEAD", "OPTIONS"):
            assert other.request(method, PATH, headers=claim).status_code == 405
        for path in ("pull-messages", "push-object", "send-node-heartbeat", "deactivate-node"):
            assert other.post(f"{FLEET}/{path}", headers=claim).status_code == 401
        assert other.post(DELIVERED, headers=claim).status_code == 401
        for path in ("register-node", "unregister-node", "get-fab", "get-run", "nothing", ""):
            own = signed_headers(tmp_path, "bank-a", f"{FLEET}/{path}")
            assert other.post(f"{FLEET}/{path}", headers=own).status_code == 403
        pending, order = place.order(party)
        party.answer(order, b"an answer")  # Flower still knows the party
        assert place.answers(pending)[0][1] == b"an answer"
        assert place.transport.status()["bank-a"].connections == before


@slow
def test_a_recorded_request_does_nothing_when_it_is_sent_again(tmp_path):
    with opened(tmp_path) as place, place.party() as party, place.http() as other:
        body = activation(tmp_path, "bank-a")
        recorded = signed_headers(tmp_path, "bank-a", PATH, body)
        assert other.post(PATH, content=body, headers=recorded).status_code == 200
        before = place.transport.status()["bank-a"]
        for path, content in (
            (PATH, body),
            (PATH, body[:-1] + b"0"),
            (f"{FLEET}/deactivate-node", body),
            (DELIVERED, body),
        ):
            assert other.post(path, content=content, headers=recorded).status_code == 401
        changed = signed_headers(tmp_path, "bank-a", PATH, body)
        refused = other.post(PATH, content=body[:-1] + b"0", headers=changed)
        assert refused.status_code == 401
        assert "another body" in refused.text
        assert place.transport.status()["bank-a"].connections == before.connections
        party.connect()  # Flower believes that it is connected: this conflict is authenticated
        assert place.transport.status()["bank-a"].connections == before.connections + 1


@slow
def test_without_the_nonce_a_recorded_request_makes_flower_let_the_party_go(tmp_path, open_door):
    open_door("nonce")
    with opened(tmp_path) as place, place.http() as other:
        body = activation(tmp_path, "bank-a")
        recorded = signed_headers(tmp_path, "bank-a", PATH, body)
        answers = [other.post(PATH, content=body, headers=recorded) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 412, 200]
        assert place.transport.status()["bank-a"].connections == 2


def ordered(place, party, limit):
    """Sends an order to bank-a whose answer has a limit. Returns pending messages and the order."""
    pending = place.transport.send({"bank-a": b"an order"}, limit=limit)
    while (order := party.receive()) is None:
        pass
    peak(place.transport._process.pid)
    return pending, order


def push_part(place, folder, body):
    """Sends a part of an answer that Flower did not ask for. Returns the status."""
    path = f"{FLEET}/push-object"
    with place.http() as own:
        headers = signed_headers(folder, "bank-a", path, body)
        return own.post(path, content=body, headers=headers).status_code


@slow
def test_an_answer_that_is_larger_than_expected_is_refused_before_it_is_read(tmp_path):
    with opened(tmp_path) as place, place.party() as party:
        party.connect()
        pid = place.transport._process.pid
        _, order = ordered(place, party, MB)
        before = peak(pid)
        with pytest.raises(RefusedError, match="at most"):
            party.answer(order, bytes(20 * MB))
        assert peak(pid) - before < 4 * MB
        pending, order = ordered(place, party, MB)
        party.answer(order, bytes(MB - 100))
        assert len(place.answers(pending)[0][1]) == MB - 100
        ordered(place, party, MB)
        statuses = [push_part(place, tmp_path, bytes(MB // 2)) for _ in range(3)]
        assert [status == 413 for status in statuses] == [False, False, True]  # all parts together
        pending, order = place.order(party)  # its answer has no limit of its own
        party.answer(order, bytes(20 * MB))
        assert len(place.answers(pending)[0][1]) == 20 * MB


@slow
def test_without_that_limit_the_answer_is_stored(tmp_path, open_door):
    open_door("size")
    with opened(tmp_path) as place, place.party() as party:
        party.connect()
        pending, order = ordered(place, party, MB)
        before = peak(place.transport._process.pid)
        party.answer(order, bytes(20 * MB))
        assert peak(place.transport._process.pid) - before > 20 * MB
        assert len(place.answers(pending)[0][1]) == 20 * MB


@slow
def test_a_stranger_and_a_party_have_limits_of_their_own(tmp_path):
    limits = Limits(party_requests=20.0, address_requests=2.0, address_connections=8)
    with opened(tmp_path, limits=limits) as place, place.party() as party, place.http() as other:
        party.connect()
        claim = {PARTY_KEY: node_key(tmp_path, "bank-a")}
        answers = [other.post(PATH, headers=claim) for _ in range(12)]
        refused = [answer for answer in answers if answer.status_code == 429]
        assert refused
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
        pending, order = place.order(party)  # of the same address, and with the same key
        party.answer(order, b"an answer")
        assert place.answers(pending)[0][1] == b"an answer"
        with pytest.raises(UnreachableError, match="429"):
            announce_often(party)
        with place.party("bank-b") as another:
            another.connect()
        wires = []
        with suppress(OSError):  # `other` has some of the connections that an address may have
            wires.extend(place.connection() for _ in range(limits.address_connections))
        assert wires
        assert not is_served(place)
        for wire in wires:
            wire.close()


def announce_often(party):
    for _ in range(200):
        party._announce_delivery()


def is_served(place):
    """Opens a connection. Returns whether a request on it gets an answer."""
    with suppress(OSError), place.connection() as wire:
        wire.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        return wire.recv(4) == b"HTTP"
    return False


@slow
def test_a_clock_that_is_off_is_named_by_the_party(tmp_path, monkeypatch):
    here = time.time
    monkeypatch.setattr(request_signature.time, "time", lambda: here() - 1000)
    with (
        opened(tmp_path) as place,
        place.party() as party,
        pytest.raises(RefusedError, match=r"clock of this party is 1000 s behind .*set the clock"),
    ):
        party.connect()


PARTY = """
import sys, time
from pathlib import Path
from fedloom.deploy.keys import read_party_key
from fedloom.deploy.party_transport import PartyTransport
address, authority, key = sys.argv[1:]
party = PartyTransport(address, Path(authority), read_party_key(Path(key)))
party.connect()
while True:
    party.receive()
"""


@slow
def test_a_killed_party_has_closed_its_connections_and_a_silent_one_has_not(tmp_path):
    with opened(tmp_path) as place:
        given = (place.transport.address.text, tmp_path / "ca.crt", tmp_path / "bank-a.key")
        process = subprocess.Popen([sys.executable, "-c", PARTY, *map(str, given)])
        try:
            until(lambda: "bank-a" in place.transport.status())
            os.kill(process.pid, signal.SIGSTOP)
            # Meanwhile the SuperLink has closed the idle connection itself.
            until(lambda: place.transport.status()["bank-a"].silence > 10)
            assert not place.transport.status()["bank-a"].closed
            os.kill(process.pid, signal.SIGCONT)
            until(lambda: place.transport.status()["bank-a"].silence < 2)
        finally:
            process.kill()
            process.wait()
        until(lambda: place.transport.status()["bank-a"].closed)


def until(condition):
    while not condition():
        time.sleep(0.1)


@pytest.mark.parametrize("limited", [True, False])
def test_new_connections_of_an_address_are_limited_before_tls(limited):
    """The clock stands still, so an address has its burst: twice its connections per second."""
    door = Door(None, "", {}, lambda key: None, limits=Limits(address_connections=8))
    accepted = 0
    with Listener("127.0.0.1", 0, door) as listener, ExitStack() as opened:
        listener.listen(32)
        listener._rate = RateLimit(8, clock=lambda: 0.0)
        for _ in range(20):
            opened.enter_context(socket.create_connection(listener.getsockname()))
            with suppress(ConnectionAbortedError):
                accept = listener.accept if limited else partial(socket.socket.accept, listener)
                opened.enter_context(accept()[0])
                accepted += 1
    assert accepted == (16 if limited else 20)
