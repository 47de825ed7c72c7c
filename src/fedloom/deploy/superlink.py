"""SuperLink: runs Flower's SuperLink as a child process of the coordinator.

    python -m fedloom.deploy.superlink

The process reads its settings from standard input, as one line of JSON. It ends when its standard
input is closed. All messages between the coordinator and the parties pass through it.

Flower serves three interfaces on one port. The fleet interface is for parties, which sign their
requests with registered keys. The control interface registers keys and starts runs, and by default
anybody may use it. The runtime interface is for the server's side of an app. `AccessMiddleware`
restricts the last two to the coordinator: requests must contain a secret that the two processes
share. It also holds a request for messages until a message arrives, so that the readers need not
poll. It records when each party was last heard from.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
import sys
import threading
import time
from base64 import b64decode
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Literal

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]
Direction = Literal["down", "up"]

SECRET = "x-fedloom-secret"  # header: the secret of the coordinator
WAIT = "x-fedloom-wait"  # header: seconds that the coordinator's request for messages may wait
PARTY_KEY = "flwr-public-key"  # header: the public key of the party, as Flower's fleet reads it
LIMIT = 2**30  # bytes of a request; Flower itself has no limit
UNKNOWN_LIMIT = 2**16  # bytes of a request from a sender that has not authenticated yet
WAIT_SECONDS = 2.0  # that a party's request for messages may wait; also a sign of life
DELIVERED = "/fedloom/delivered"  # path: all parts of the messages just sent have arrived
STATUS = "/fedloom/status"  # path: for each party, seconds of silence and number of connections


class AccessMiddleware:
    """An ASGI application in front of Flower's. It checks access, and holds requests for messages.

    Attributes:
        last_seen: When a party's request was last answered, by the party's key.
        connections: How often a party has connected, by its key.

    Args:
        app: Flower's application.
        secret: The secret in the coordinator's requests.
        deactivate: Takes a party's key and makes Flower treat the party as gone.
        limit: Bytes of a request from a known sender.
    """

    def __init__(
        self, app: Application, secret: str, deactivate: Callable[[str], None], limit: int = LIMIT
    ):
        self.app, self.secret, self.deactivate, self.limit = app, secret, deactivate, limit
        self.last_seen: dict[str, float] = {}
        self.connections: Counter[str] = Counter()
        self._deliveries: dict[Direction, int] = {"down": 0, "up": 0}
        self._fetched: dict[str, int] = {}  # the number of deliveries when a reader last looked
        self._delivered = asyncio.Condition()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, or passes it on to Flower."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"]
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        given = headers.get(SECRET, "").encode("latin-1")
        trusted = hmac.compare_digest(given, self.secret.encode())
        party = headers.get(PARTY_KEY, "")
        known = party in self.last_seen
        limit = self.limit if trusted or known else UNKNOWN_LIMIT
        if not 0 <= _length(headers) <= limit:  # checked before any of the body is in memory
            detail = f"a request must state its length in its header; at most {limit} bytes"
            await _answer(send, 413, {"detail": detail})
        elif path == DELIVERED and (trusted or known):
            await self._announce("down" if trusted else "up")
            await _answer(send, 200, {})
        elif path == STATUS and trusted:
            now = time.monotonic()
            seen = {key: [now - at, self.connections[key]] for key, at in self.last_seen.items()}
            await _answer(send, 200, seen)
        elif path.startswith("/v1/fleet/"):
            await self._fleet(path, party, scope, receive, send)
        elif trusted:
            if path.endswith("/pull-messages"):
                await self._wait(SECRET, "up", float(headers.get(WAIT, WAIT_SECONDS)))
            await self.app(scope, receive, send)
        else:
            await _answer(send, 403, {"detail": "only the coordinator may do this"})

    async def _fleet(
        self, path: str, party: str, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Passes a party's request on to Flower."""
        if path.endswith("/pull-messages") and party in self.last_seen:  # others may not wait here
            await self._wait(party, "down", WAIT_SECONDS)
        status = await self._forward(scope, receive, send)
        if status == 200:
            self.last_seen[party] = time.monotonic()
            self.connections[party] += path.endswith("/activate-node")
        elif path.endswith("/activate-node") and status != 401 and party in self.last_seen:
            # The party has authenticated, but Flower believes that it is connected already. It
            # died a moment ago and was started again.
            self.deactivate(party)

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

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Passes a request on to Flower. Returns the status of the answer."""
        status = 0

        async def recording(event: MutableMapping[str, Any]) -> None:
            nonlocal status
            status = event.get("status", status)
            await send(event)

        await self.app(scope, receive, recording)
        return status


def _length(headers: dict[str, str]) -> int:
    """Returns the length of a request's body as its header states it; -1 if it does not."""
    stated = headers.get("content-length", "-1" if "transfer-encoding" in headers else "0")
    return int(stated) if stated.isascii() and stated.isdigit() else -1


async def _answer(send: Send, status: int, content: dict[str, Any]) -> None:
    headers = [(b"content-type", b"application/json")]
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
    host: str, port: int, secret: str, certificate: str | None, key: str | None, limit: int
) -> None:
    """Runs the SuperLink until the process ends.

    Args:
        host: The address to listen on.
        port: The port to listen on.
        secret: The secret in the coordinator's requests.
        certificate: The server's certificate, a PEM file; None for no TLS.
        key: The certificate's key, a PEM file; None for no TLS.
        limit: Bytes of a request; see `LIMIT`.
    """
    configure_flower()
    import uvicorn
    from flwr.superlink.main import create_app

    # At its default level, Flower logs several lines for each message.
    logging.getLogger("flwr").setLevel(logging.WARNING)
    app = create_app()  # its state is in memory; run folder and parties hold what must survive
    app.state.enable_supernode_auth = True  # only the coordinator registers keys

    def deactivate(party: str) -> None:
        state = app.state.linkstate_factory.state()
        if (node := state.get_node_id_by_public_key(b64decode(party))) is not None:
            state.deactivate_node(node)

    uvicorn.run(
        AccessMiddleware(app, secret, deactivate, limit),
        host=host,
        port=port,
        ssl_certfile=certificate,
        ssl_keyfile=key,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=1,
    )


def exit_with_parent() -> None:
    """Ends this process when its standard input closes, which happens when its parent dies."""

    def wait() -> None:
        sys.stdin.read()
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    settings = json.loads(sys.stdin.readline())
    exit_with_parent()
    serve(**settings)
