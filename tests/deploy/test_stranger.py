"""A stranger on the network attacks a run of `fedloom serve` and `fedloom join`, with TLS and keys.

The stranger knows the address, the authority's certificate and the public keys of all parties. The
controls run the same attack on a door without one protection (open_door.py).
"""

import os
import socket
import ssl
import threading
from base64 import b64encode
from collections import Counter
from contextlib import closing, suppress
from http.client import HTTPException, HTTPSConnection
from itertools import cycle
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from test_transport import MB, peak

from fedloom.deploy import coordinator_transport
from fedloom.deploy.keys import read_public_key

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
HERE = Path(__file__).parent
VICTIM = "bank-b"
BODY = 200 * MB


class Stranger:
    """Sends requests without a valid signature to a deployment, in the name of the victim.

    Attributes:
        answers: How many answers had each status.
    """

    def __init__(self, deployment):
        self.deployment, self.answers = deployment, Counter()
        key = read_public_key(deployment.folder / f"{VICTIM}.pub").node
        pem = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        self.headers = {
            "flwr-public-key": b64encode(pem).decode(),
            "content-type": "application/protobuf",
        }
        self._ended, self._threads = threading.Event(), []

    def connection(self, address="127.0.0.1"):
        context = ssl.create_default_context(cafile=str(self.deployment.folder / "ca.crt"))
        given = {"context": context, "timeout": 60, "source_address": (address, 0)}
        return closing(HTTPSConnection("127.0.0.1", self.deployment.port, **given))

    def attack(self, pause=0.05, connections=1, address="127.0.0.1"):
        """Sends requests until `end`.

        Args:
            pause: Seconds between two requests on a connection.
            connections: How many connections are used.
            address: The stranger's own address.
        """
        self._threads = [
            threading.Thread(target=self._repeat, args=(pause, address)) for _ in range(connections)
        ]
        for thread in self._threads:
            thread.start()

    def _repeat(self, pause, address):
        while not self._ended.wait(pause):
            with suppress(OSError, HTTPException), self.connection(address) as wire:
                self._talk(wire, pause)

    def _talk(self, wire, pause):
        for method in cycle(("GET", "POST")):
            if self._ended.wait(pause):
                return
            wire.request(method, "/v1/fleet/activate-node", headers=self.headers)
            answer = wire.getresponse()
            answer.read()
            self.answers[answer.status] += 1

    def knock(self, times, connections=32, address="127.0.0.2"):
        """Opens connections, with a handshake of TLS on each that is accepted."""
        context = ssl.create_default_context(cafile=str(self.deployment.folder / "ca.crt"))
        given = ("127.0.0.1", self.deployment.port), 10, (address, 0)

        def repeat():
            for _ in range(times // connections):
                with suppress(OSError), socket.create_connection(*given) as plain:
                    context.wrap_socket(plain, server_hostname="127.0.0.1").close()

        threads = [threading.Thread(target=repeat) for _ in range(connections)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def end(self):
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def push(self, headers):
        """Sends a body of 200 MB to where parties send their answers. Returns the status."""
        with suppress(OSError, HTTPException), self.connection() as wire:
            wire.putrequest("POST", "/v1/fleet/push-object")
            for name, value in {**self.headers, **headers}.items():
                wire.putheader(name, value)
            wire.endheaders()
            with suppress(OSError):  # the SuperLink closes the connection before all is sent
                for _ in range(BODY // 2**16):
                    wire.send(b"10000\r\n" * ("content-length" not in headers) + bytes(2**16))
            return wire.getresponse().status
        return 0

    def push_at_once(self, headers, times=3):
        """Sends bodies at the same time. Returns the SuperLink's growth of memory, in bytes."""
        pid = self.deployment.superlink()
        peak(pid)
        before = peak(pid)
        threads = [threading.Thread(target=self.push, args=(headers,)) for _ in range(times)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return peak(pid) - before


@pytest.fixture
def attacked(deploy):
    """Starts a run that needs all parties, and a stranger who knows it."""
    strangers = []

    def start(rounds=5, seconds=1.0, **more):
        d = deploy(rounds=rounds, method="slow.py", settings={"seconds": seconds}, **more)
        d.serve()
        d.join_all()
        d.until(lambda: d.rounds_done() >= 1)
        strangers.append(Stranger(d))
        return d, strangers[-1]

    yield start
    for stranger in strangers:
        stranger.end()


@pytest.fixture
def open_door(monkeypatch):
    """SuperLinks take the key that a request states as proof, as the first version did."""
    monkeypatch.setattr(coordinator_transport, "PROGRAM", "open_door")
    monkeypatch.setenv("FEDLOOM_OPEN", "signature")
    monkeypatch.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)


def unharmed(d):
    summary = d.completed()
    assert summary["absences"] == {}
    assert summary["history_hash"] == d.reference().summary["history_hash"]


def test_unsigned_requests_in_a_partys_name_keep_it_out_of_nothing(attacked):
    d, stranger = attacked()
    stranger.attack()
    unharmed(d)
    assert stranger.answers[405] > 10
    assert stranger.answers[401] > 10


@pytest.mark.usefixtures("open_door")
def test_without_the_signature_the_same_requests_end_the_run(attacked):
    d, stranger = attacked(rounds=1000)
    stranger.attack()
    assert d.processes["coordinator"].wait() in (1, 2)
    assert VICTIM in d.output("coordinator")
    assert d.summary()["status"] == "failed"


def test_unsigned_bodies_of_200_mb_are_not_read(attacked):
    d, stranger = attacked()
    for headers in (
        {"content-length": str(BODY)},
        {"content-length": "65536"},  # less than what is sent
        {"transfer-encoding": "chunked"},
        {"x-long": "x" * 1000, "content-length": str(BODY)},
    ):
        assert stranger.push_at_once(headers) < 12 * MB, headers
    assert stranger.push({"content-length": str(BODY)}) in (401, 0)
    unharmed(d)


@pytest.mark.usefixtures("open_door")
def test_without_the_signature_they_are_read(attacked):
    _, stranger = attacked(rounds=1000)
    assert stranger.push_at_once({"content-length": str(BODY)}) > BODY


def test_a_flood_of_requests_does_no_harm(attacked):
    d, stranger = attacked()
    # More connections than an address may have: most are closed, and opened again at once.
    stranger.attack(pause=0.0, connections=96, address="127.0.0.2")
    unharmed(d)
    assert stranger.answers[429] > 10


def test_a_flood_of_connections_does_no_harm(attacked):
    d, stranger = attacked(federation={"address_connections": 8})
    stranger.knock(500)
    unharmed(d)
