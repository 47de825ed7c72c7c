"""The link: Flower's SuperLink as a child process, through which all messages between coordinator and parties go.

    python -m fedloom.deploy.superlink        reads its settings as one line of JSON from standard input, and ends when that is closed

Flower serves three interfaces on one port: the fleet's (parties, who sign their requests with keys that have been registered), the
control's (whoever asks may register keys and start runs) and the runtime's. Here the last two are the coordinator's alone: `Door` wants
the secret that the two processes share. It also lets those who wait for messages wait inside one request, so that nobody has to ask
again and again, and it knows when each party was last heard of.
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
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

SECRET = "x-fedloom-secret"
PATIENCE = "x-fedloom-wait"  # how many seconds the coordinator's request for messages may wait
PARTY_KEY = (
    "flwr-public-key"  # the header in which Flower's fleet interface finds the key of who asks
)
LIMIT = 2**30  # bytes of a request; Flower would take any number
FIRST_LIMIT = 2**16  # bytes of a request by somebody who has not proved yet who it is
WAIT = 2.0  # seconds that a request for messages waits for some to come; also how often a waiting party shows that it is alive
SETTLED = "/fedloom/settled"  # everything that belongs to the messages just sent has arrived: who waits may look
SEEN = "/fedloom/seen"  # of each party: seconds since it was last heard of, and how often it has connected


class Door:
    """What stands in front of Flower's application: who may enter, who has to wait, who was there.

    let_go: takes a party's key, makes Flower believe that the party has left. limit: bytes of a request of somebody who is known.
    """

    def __init__(
        self, inside: Application, secret: str, let_go: Callable[[str], None], limit: int = LIMIT
    ):
        self.inside, self.secret, self.let_go, self.limit = inside, secret, let_go, limit
        self.heard: dict[str, float] = {}  # when a party's request was last answered, by its key
        self.connected: Counter[str] = Counter()  # how often it has said that it is there
        self.posted = {
            "down": 0,
            "up": 0,
        }  # how often messages have settled on their way to parties, and to the coordinator
        self.looked: dict[str, int] = {}  # what `posted` was when one who waits last looked
        self.changed = asyncio.Condition()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        if scope["type"] != "http":
            await self.inside(scope, receive, send)
            return
        path, headers = (
            scope["path"],
            {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]},
        )
        trusted = hmac.compare_digest(
            headers.get(SECRET, "").encode("latin-1"), self.secret.encode()
        )
        party = headers.get(PARTY_KEY, "")
        limit = self.limit if trusted or party in self.heard else FIRST_LIMIT
        if not 0 <= _length(headers) <= limit:  # before anything of it is in memory
            await _answer(
                send,
                413,
                {"detail": f"a request has its length in its header, and at most {limit} bytes"},
            )
        elif path == SETTLED and (trusted or party in self.heard):
            await self._settle("down" if trusted else "up")
            await _answer(send, 200, {})
        elif path == SEEN and trusted:
            now = time.monotonic()
            await _answer(
                send,
                200,
                {key: [now - then, self.connected[key]] for key, then in self.heard.items()},
            )
        elif path.startswith("/v1/fleet/"):
            if (
                path.endswith("/pull-messages") and party in self.heard
            ):  # who has never proved who it is does not wait here
                await self._wait(party, "down", WAIT)
            status = await self._status(scope, receive, send)
            if status == 200:
                self.heard[party] = time.monotonic()
                self.connected[party] += path.endswith("/activate-node")
            elif path.endswith("/activate-node") and status != 401 and party in self.heard:
                # It has proved who it is, and Flower takes it for one that is there already: it died a moment ago, and was started anew.
                self.let_go(party)
        elif trusted:
            if path.endswith("/pull-messages"):
                await self._wait(SECRET, "up", float(headers.get(PATIENCE, WAIT)))
            await self.inside(scope, receive, send)
        else:
            await _answer(send, 403, {"detail": "only the coordinator may do this"})

    async def _settle(self, way: str) -> None:
        async with self.changed:
            self.posted[way] += 1
            self.changed.notify_all()

    async def _wait(self, who: str, way: str, seconds: float) -> None:
        """Until something has settled since `who` looked last, or the time is over."""
        try:
            async with asyncio.timeout(seconds), self.changed:
                await self.changed.wait_for(lambda: self.posted[way] != self.looked.get(who, -1))
        except TimeoutError:
            pass  # nothing came: it may look all the same
        self.looked[who] = self.posted[way]

    async def _status(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Has the request answered; gives the answer's status."""
        status = 0

        async def noting(event: MutableMapping[str, Any]) -> None:
            nonlocal status
            status = event.get("status", status)
            await send(event)

        await self.inside(scope, receive, noting)
        return status


def _length(headers: dict[str, str]) -> int:
    """How many bytes follow, as a request says; -1 if it does not."""
    said = headers.get("content-length", "-1" if "transfer-encoding" in headers else "0")
    return int(said) if said.isascii() and said.isdigit() else -1


async def _answer(send: Send, status: int, content: dict[str, Any]) -> None:
    body = json.dumps(content).encode()
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [(b"content-type", b"application/json")],
        }
    )
    await send({"type": "http.response.body", "body": body})


def quiet() -> None:
    """Keeps Flower from calling home, and from installing anything."""
    os.environ |= {
        "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    }  # fmt: skip


def serve(
    host: str, port: int, secret: str, certificate: str | None, key: str | None, limit: int
) -> None:
    """Runs the SuperLink until the process is ended. certificate, key: PEM files of the server; None: no TLS. limit: see `LIMIT`."""
    quiet()
    import uvicorn
    from flwr.superlink.main import create_app

    logging.getLogger("flwr").setLevel(
        logging.WARNING
    )  # at Flower's own level the log would grow by lines for every message
    app = create_app()  # in memory: what has to survive is in the run's folder and with the parties
    app.state.enable_supernode_auth = True  # nobody registers a key but the coordinator

    def let_go(party: str) -> None:
        state = app.state.linkstate_factory.state()
        if (node := state.get_node_id_by_public_key(b64decode(party))) is not None:
            state.deactivate_node(node)

    uvicorn.run(
        Door(app, secret, let_go, limit), host=host, port=port, ssl_certfile=certificate, ssl_keyfile=key, log_level="warning",
        access_log=False, timeout_graceful_shutdown=1,
    )  # fmt: skip


def _end_with_parent() -> None:
    sys.stdin.read()  # the coordinator holds the other end: however it dies, this ends
    os._exit(0)


if __name__ == "__main__":
    settings = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    serve(**settings)
