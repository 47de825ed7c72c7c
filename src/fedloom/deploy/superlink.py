"""SuperLink: runs Flower's SuperLink as a child process of the coordinator.

    python -m fedloom.deploy.superlink

The process reads its settings from standard input, as one line of JSON. It ends when its standard
input is closed. All messages between the coordinator and the parties pass through it.

Flower serves three interfaces on one port. The fleet interface is for parties. The control
interface registers keys and starts runs, and by default anybody may use it. The runtime interface
is for the server's side of an app. `Door` stands in front of all three:

- The coordinator proves who it is by a secret that the two processes share. Only it reaches the
  control and the runtime interface.
- A party signs each request (`request_signature`). The door verifies the signature before it reads
  the body, and only then counts the request as the party's. Flower verifies its own signature too.
- Anybody else is refused. Nothing of the body is read, and nothing about a party changes.

The door also limits requests (`rate_limit`), holds a request for messages until a message arrives,
so that the readers need not poll, and records when each party was last heard from.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import math
import os
import socket
import sys
import threading
import time
from base64 import b64decode
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from hashlib import sha256
from typing import Any, Literal

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from fedloom.deploy.rate_limit import Connections, Limits, Peer, RateLimit, network
from fedloom.deploy.request_signature import SIGNED, UnverifiedError, Verifier
from fedloom.errors import ConfigError

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]
Direction = Literal["down", "up"]

SECRET = "x-fedloom-secret"  # header: the secret of the coordinator
WAIT = "x-fedloom-wait"  # header: seconds that the coordinator's request for messages may wait
PARTY_KEY = "flwr-public-key"  # header: the public key of the party, as Flower's fleet reads it
LIMIT = 2**30  # bytes of a request; Flower itself has no limit
SMALL = 2**16  # bytes of a request that carries no answer, and of what surrounds an answer
WAIT_SECONDS = 2.0  # that a party's request for messages may wait; also a sign of life
SLOWED_SECONDS = 1.0  # that the answer to an unsigned request above the limit takes
ANONYMOUS_SECONDS = 10.0  # after which a connection without a valid signature is closed
DELIVERED = "/fedloom/delivered"  # path: all parts of the messages just sent have arrived
STATUS = "/fedloom/status"  # path: each party's silence, number of connections, and whether it left
ADMIT = "/fedloom/admit"  # path: the parties' signing keys, by their node keys
EXPECT = "/fedloom/expect"  # path: how many bytes each party's next answer may have
FLEET = "/v1/fleet/"
ACTIVATE, PULL, PUSHES = "activate-node", "pull-messages", ("push-messages", "push-object")
# What parties use of the fleet interface. All of it is POST.
SERVED = (
    ACTIVATE,
    PULL,
    *PUSHES,
    "deactivate-node",
    "send-node-heartbeat",
    "pull-object",
    "confirm-message-received",
)
CONFLICT = 412  # Flower's answer to a party that wants to connect and is connected already


class RefusedRequest(Exception):  # noqa: N818
    """A request that gets an error as its answer.

    Args:
        status: The HTTP status.
        detail: What is wrong.
        retry: Seconds after which the sender may try again, if that makes sense.
    """

    def __init__(self, status: int, detail: str, retry: float = 0.0):
        super().__init__(detail)
        self.status, self.detail, self.retry = status, detail, retry


class Door:
    """An ASGI application in front of Flower's. It checks access, and holds requests for messages.

    Attributes:
        last_seen: When a party's request was last answered, by the party's key.
        connected: How often a party has connected, by its key.
        connections: The open connections.

    Args:
        app: Flower's application.
        secret: The secret in the coordinator's requests.
        parties: The parties' signing keys, by their node keys as in `PARTY_KEY`.
        deactivate: Takes a party's node key and makes Flower treat the party as gone.
        limit: Bytes of a request.
        limits: What is accepted from one sender.
    """

    def __init__(
        self,
        app: Application,
        secret: str,
        parties: Mapping[str, Ed25519PublicKey],
        deactivate: Callable[[bytes], None],
        limit: int = LIMIT,
        limits: Limits = Limits(),
    ):
        self.app, self.secret, self.deactivate, self.limit = app, secret, deactivate, limit
        self.limits, self.verifier = limits, Verifier(parties)
        self.last_seen: dict[str, float] = {}
        self.connected: Counter[str] = Counter()
        self.connections = Connections(limits.address_connections)
        self._party_rate = RateLimit(limits.party_requests)
        self._address_rate = RateLimit(limits.address_requests)
        self._under_way: Counter[str] = Counter()
        self._left_to_push = dict.fromkeys(parties, limit)
        self._deliveries: dict[Direction, int] = {"down": 0, "up": 0}
        self._fetched: dict[str, int] = {}  # the number of deliveries when a reader last looked
        self._delivered = asyncio.Condition()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, or passes it on to Flower."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        peer: Peer = scope["client"] or ("", 0)
        given = headers.get(SECRET, "").encode("latin-1")
        try:
            if hmac.compare_digest(given, self.secret.encode()):
                self.connections.authenticated(peer, SECRET)
                await self._serve_coordinator(headers, scope, receive, send)
            else:
                await self._serve_party(peer, headers, scope, receive, send)
        except RefusedRequest as refused:
            # Somebody who is not known may want to send a large body. It is not waited for.
            close = self.connections.is_anonymous(peer) and _length(headers) != 0
            await _answer(send, refused.status, {"detail": refused.detail}, refused.retry, close)

    # ---- the coordinator ----
    async def _serve_coordinator(
        self, headers: dict[str, str], scope: Scope, receive: Receive, send: Send
    ) -> None:
        path = scope["path"]
        self._require_length(headers, self.limit)
        if path == DELIVERED:
            await self._announce("down")
            await _answer(send, 200, {})
        elif path == STATUS:
            now = time.monotonic()
            seen = {
                key: [now - at, self.connected[key], key in self.connections.left]
                for key, at in self.last_seen.items()
            }
            await _answer(send, 200, seen)
        elif path == ADMIT:
            self._admit(signing_keys(json.loads(await _body(receive))))
            await _answer(send, 200, {})
        elif path == EXPECT:
            self._left_to_push |= json.loads(await _body(receive))
            await _answer(send, 200, {})
        else:
            if path.endswith(f"/{PULL}"):
                await self._wait(SECRET, "up", float(headers.get(WAIT, WAIT_SECONDS)))
            await self.app(scope, receive, send)

    def _admit(self, parties: Mapping[str, Ed25519PublicKey]) -> None:
        """Admits parties by these keys, and nobody else from now on."""
        self.verifier.admit(parties)
        self._left_to_push = {key: self._left_to_push.get(key, self.limit) for key in parties}
        self.last_seen = {key: at for key, at in self.last_seen.items() if key in parties}

    # ---- parties ----
    async def _serve_party(
        self, peer: Peer, headers: dict[str, str], scope: Scope, receive: Receive, send: Send
    ) -> None:
        try:
            party, digest = self._authenticate(headers, scope)
        except RefusedRequest:
            if (retry := self._address_rate.wait(network(peer[0]))) > 0:
                # A flood on a limited number of connections ends here: each waits for its answer.
                await asyncio.sleep(SLOWED_SECONDS)
                raise RefusedRequest(429, "too many requests from this address", retry) from None
            raise
        self.connections.authenticated(peer, party)
        if (retry := self._party_rate.wait(party)) > 0:
            raise RefusedRequest(429, "too many requests of this party", retry)
        if self._under_way[party] >= self.limits.party_concurrent:
            raise RefusedRequest(429, "too many requests of this party at once", 1.0)
        self._under_way[party] += 1
        try:
            if scope["path"] == DELIVERED:
                await self._announce("up")
                await _answer(send, 200, {})
            else:
                self._require_room(party, scope["path"], headers)
                await self._fleet(party, scope, _Body(receive, digest), send)
        finally:
            self._under_way[party] -= 1

    def _authenticate(self, headers: dict[str, str], scope: Scope) -> tuple[str, str]:
        """Returns the party that has signed a request, and the digest of its body.

        Raises RefusedRequest if nobody has. Nothing of the body has been read at this point.
        """
        path, method, party = scope["path"], scope["method"], headers.get(PARTY_KEY, "")
        served = path == DELIVERED or (path.startswith(FLEET) and path[len(FLEET) :] in SERVED)
        if not served:
            raise RefusedRequest(403, "only the coordinator may do this")
        if method != "POST":
            raise RefusedRequest(405, "only POST is served here")
        length = self._require_length(headers, self.limit)
        try:
            return party, self.verifier.verify(party, headers.get(SIGNED, ""), method, path, length)
        except UnverifiedError as error:
            raise RefusedRequest(401, str(error)) from None

    def _require_length(self, headers: dict[str, str], limit: int) -> int:
        """Returns the length of a request's body. Raises RefusedRequest if it is not allowed."""
        if not 0 <= (length := _length(headers)) <= limit:
            detail = f"a request must state its length in its header; at most {limit} bytes"
            raise RefusedRequest(413, detail)
        return length

    def _require_room(self, party: str, path: str, headers: dict[str, str]) -> None:
        """Raises RefusedRequest if a party sends more than its answer may have."""
        if not path.endswith(PUSHES):
            self._require_length(headers, SMALL)
            return
        length = self._require_length(headers, min(self.limit, self._left_to_push[party] + SMALL))
        self._left_to_push[party] -= length

    async def _fleet(self, party: str, scope: Scope, body: _Body, send: Send) -> None:
        """Passes a party's request on to Flower."""
        path = scope["path"]

        async def recording(event: Event) -> None:
            if body.is_wrong:  # Flower answers that it has failed; the door gives the reason
                return
            if event["type"] == "http.response.start":
                self._record(party, path, event["status"])
            await send(event)

        if path.endswith(f"/{PULL}"):
            await self._wait(party, "down", WAIT_SECONDS)
        await self.app(scope, body, recording)
        body.require_right()

    def _record(self, party: str, path: str, status: int) -> None:
        """Records what Flower answers to a party."""
        if status == 200:
            self.last_seen[party] = time.monotonic()
            self.connected[party] += path.endswith(f"/{ACTIVATE}")
        elif self._is_conflict(path, status):
            # The party has died a moment ago and was started again.
            self.deactivate(b64decode(party))

    def _is_conflict(self, path: str, status: int) -> bool:
        """Returns whether a party wants to connect that Flower believes to be connected."""
        return path.endswith(f"/{ACTIVATE}") and status == CONFLICT

    async def _announce(self, direction: Direction) -> None:
        """Wakes the requests that wait for messages in one direction."""
        async with self._delivered:
            self._deliveries[direction] += 1
            self._delivered.notify_all()

    async def _wait(self, reader: str, direction: Direction, seconds: float) -> None:
        """Waits until there is a delivery that the reader has not fetched, or the time is over."""
        try:
            async with asyncio.timeout(seconds), self._delivered:
                await self._delivered.wait_for(
                    lambda: self._deliveries[direction] != self._fetched.get(reader, -1)
                )
        except TimeoutError:
            pass  # no delivery: the request is answered with no message
        self._fetched[reader] = self._deliveries[direction]


class Listener(socket.socket):
    """The socket that the SuperLink listens on. It limits new connections before TLS.

    A handshake takes about a millisecond of the SuperLink's time, so a stranger who connects again
    and again would leave none for the parties. Parties keep their connections open.

    Args:
        host: The address to listen on.
        port: The port to listen on.
        door: The door, which knows the connections of each address.
    """

    def __init__(self, host: str, port: int, door: Door):
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        super().__init__(family, kind, protocol)
        self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.bind(address)
        self._door, self._rate = door, RateLimit(door.limits.address_connections)

    def accept(self) -> tuple[socket.socket, Any]:
        """Accepts a connection, unless its address has too many or opens them too fast."""
        connection, address = super().accept()
        owner = network(address[0])
        if self._rate.wait(owner) > 0 or not self._door.connections.has_room(owner):
            connection.close()
            raise ConnectionAbortedError  # which asyncio takes for a connection that is gone
        return connection, address


def signing_keys(parties: Mapping[str, str]) -> dict[str, Ed25519PublicKey]:
    """Returns the parties' signing keys, which are given in base64."""
    return {
        node: Ed25519PublicKey.from_public_bytes(b64decode(own)) for node, own in parties.items()
    }


def _length(headers: dict[str, str]) -> int:
    """Returns the length of a request's body as its header states it; -1 if it does not."""
    stated = headers.get("content-length", "-1" if "transfer-encoding" in headers else "0")
    return int(stated) if stated.isascii() and stated.isdigit() else -1


async def _body(receive: Receive) -> bytes:
    """Returns the whole body of a request."""
    parts = []
    while (event := await receive())["type"] == "http.request":
        parts.append(event.get("body", b""))
        if not event.get("more_body", False):
            break
    return b"".join(parts)


class _Body:
    """A `receive` that raises RefusedRequest at the end of the body if it is not the signed one.

    Args:
        receive: The `receive` of the request.
        digest: The sha256 of the signed body, in hex.
    """

    def __init__(self, receive: Receive, digest: str):
        self._receive, self._digest, self._running = receive, digest, sha256()
        self.is_wrong = False

    async def __call__(self) -> Event:
        event = await self._receive()
        if event["type"] == "http.request":
            self._running.update(event.get("body", b""))
            ended = not event.get("more_body", False)
            self.is_wrong = ended and self._running.hexdigest() != self._digest
        self.require_right()
        return event

    def require_right(self) -> None:
        """Raises RefusedRequest if the body was received and is not the signed one."""
        if self.is_wrong:
            raise RefusedRequest(401, "the signature of this request is for another body")


async def _answer(
    send: Send, status: int, content: dict[str, Any], retry: float = 0.0, close: bool = False
) -> None:
    headers = [(b"content-type", b"application/json")]
    if retry > 0:
        headers.append((b"retry-after", str(math.ceil(retry)).encode()))
    if close:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(content).encode()})


def configure_flower() -> None:
    """Turns off Flower's telemetry, update check and installation of packages.

    Flower reads these variables when it is imported, so call this before.
    """
    os.environ |= {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    }


def serve(
    host: str,
    port: int,
    secret: str,
    certificate: str | None,
    key: str | None,
    limit: int,
    limits: Mapping[str, Any],
) -> None:
    """Runs the SuperLink until the process ends.

    Args:
        host: The address to listen on.
        port: The port to listen on.
        secret: The secret in the coordinator's requests.
        certificate: The server's certificate, a PEM file; None for no TLS.
        key: The certificate's key, a PEM file; None for no TLS.
        limit: Bytes of a request; see `LIMIT`.
        limits: The fields of `Limits`.
    """
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    from fedloom.deploy.flower_internals import superlink_app

    # At its default level, Flower logs several lines for each message.
    logging.getLogger("flwr").setLevel(logging.WARNING)
    app, deactivate = superlink_app()
    # The coordinator admits parties (`ADMIT`) before it starts the run.
    door = Door(app, secret, {}, deactivate, limit, Limits(**limits))

    class Protocol(H11Protocol):
        """One connection. The door knows whom it belongs to, and when it is closed."""

        expired = False  # whether this end has closed the connection

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.peer = self.client or ("", 0)
            self.timer = self.loop.call_later(ANONYMOUS_SECONDS, self.require_party)
            if not door.connections.opened(self.peer):
                transport.abort()

        def require_party(self) -> None:
            """Closes the connection if no request on it had a valid signature so far."""
            if door.connections.is_anonymous(self.peer):
                self.transport.abort()

        def timeout_keep_alive_handler(self) -> None:
            self.expired = True
            super().timeout_keep_alive_handler()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self.timer.cancel()
            door.connections.closed(self.peer, by_peer=not self.expired)

    config = uvicorn.Config(
        door,
        # It limits the size of a request's headers to 16 kB. Other parsers have no limit.
        http=Protocol,
        loop="asyncio",  # other loops do not call `Listener.accept`
        ws="none",
        ssl_certfile=certificate,
        ssl_keyfile=key,
        log_level="critical",  # a stranger's requests write nothing to the log
        access_log=False,
        timeout_graceful_shutdown=1,
    )
    with Listener(host, port, door) as listener:
        uvicorn.Server(config).run(sockets=[listener])


def exit_with_parent() -> None:
    """Ends this process when its standard input closes, which happens when its parent dies."""

    def wait() -> None:
        sys.stdin.read()
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def main() -> None:
    """Runs the SuperLink with the settings in the first line of standard input."""
    settings = json.loads(sys.stdin.readline())
    exit_with_parent()
    try:
        serve(**settings)
    except ConfigError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
