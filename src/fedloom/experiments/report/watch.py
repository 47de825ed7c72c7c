"""Serves the page of `fedloom watch RUN`, which follows one run or several.

It reads the runs' folders and nothing else.
"""

from __future__ import annotations

import json
import secrets
import socket
import sys
import threading
import webbrowser
from collections.abc import Callable
from functools import cached_property
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler
from ipaddress import ip_address
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

from fedloom.errors import ConfigError
from fedloom.experiments.report.follow import FIELDS, Follower, baselines_of, run_folders
from fedloom.experiments.report.html import SHARED_SCRIPTS, fill_template, read_parts

Answer = tuple[int, str, bytes]  # status, type, content


def watch(folder: Path, host: str, port: int, browser: bool, say: Callable[[str], None]) -> None:
    """Serves the page until Ctrl-C. The run may start later, and continues when the watch ends.

    Args:
        folder: The run folder, or a folder that contains runs.
        host: The name or address to listen on.
        port: The port. 0 chooses a free one.
        browser: Whether to open the page in a browser.
        say: Prints a line.
    """
    with Watch(folder, host, port) as server:
        try:
            if not server.loopback:
                say(
                    f"--host {host}: other machines can open the page if they have its address; "
                    "the connection is without encryption"
                )
            say(f"watching {folder}: {server.url}")
            if browser:
                webbrowser.open(server.url)
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            say("stopped watching; the run is not affected")


class Watch(ThreadingTCPServer):
    """The server. Requests with its token get the page and the data; all others are refused."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, folder: Path, host: str = "127.0.0.1", port: int = 0):
        if not host:
            raise ConfigError("host: must be a name or an address, e.g. 127.0.0.1")
        if not 0 <= port <= 65535:
            raise ConfigError(f"port {port}: must be between 0 and 65535")
        try:
            self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            super().__init__((host, port), _Handler)
        except (OSError, UnicodeError) as error:
            raise ConfigError(
                f"host {host!r}, port {port}: {getattr(error, 'strerror', None) or error}"
            ) from error
        self.folder, self.host, self.port = folder, host, self.server_address[1]
        self.token = secrets.token_urlsafe(24)
        bound = ip_address(str(self.server_address[0]))
        self.loopback = bound.is_loopback
        self._name = socket.gethostname() if bound.is_unspecified else host
        self._followers: dict[Path, Follower] = {}
        self._lock = threading.Lock()  # two tabs must not use the same follower at once

    @property
    def url(self) -> str:
        """The address of the page, with the token."""
        return f"http://{_in_url(self._name)}:{self.port}/?token={self.token}"

    @property
    def cookie(self) -> str:
        """The cookie's name. It contains the port: browsers share cookies between ports."""
        return f"fedloom-watch-{self.port}"

    @cached_property
    def hosts(self) -> set[str]:
        """The host names that a browser on this machine may use for this server.

        They keep out pages of other sites whose name was made to point to this machine.
        """
        return {
            f"{name}:{self.port}"
            for name in ("127.0.0.1", "localhost", "[::1]", _in_url(self.host).lower())
        }

    def data(self, run: str, version: int, have: int) -> dict[str, Any] | None:
        """Returns the data that a page does not have yet; None if there is no run of that name.

        Args:
            run: The name of a run if the folder contains several, else "".
            version: The version of the history that the page has.
            have: The number of entries that the page has.
        """
        with self._lock:
            runs = run_folders(self.folder)
            if run:
                return self._one((runs or {})[run], version, have) if run in (runs or {}) else None
            if runs is None:
                return self._one(self.folder, version, have)
            return {"runs": self._all(runs)}

    def _one(self, folder: Path, version: int, have: int) -> dict[str, Any]:
        follower = self._follower(folder)
        follower.look()
        known = have if version == follower.version and 0 <= have <= len(follower.entries) else 0
        fresh = follower.entries[known:]
        found = {
            "name": folder.resolve().name,
            **follower.about(),
            "version": follower.version,
            "from": known,
            "entries": fresh,
            "fields": FIELDS,
            "behind": follower.behind,
        }
        if fresh or not known:
            found["clients"] = [{"id": name, **about} for name, about in follower.clients.items()]
            found["outliers"] = follower.outliers
        if baselines := baselines_of(folder):
            found["baselines"] = self._all(baselines)
        return found

    def _all(self, runs: dict[str, Path]) -> list[dict[str, Any]]:
        """Returns the state of each run. The files of finished runs are read once."""
        found = []
        for name, folder in runs.items():
            follower = self._follower(folder)
            follower.look(0.05)
            found.append({"name": name, **follower.about()})
        return found

    def _follower(self, folder: Path) -> Follower:
        return self._followers.setdefault(folder, Follower(folder))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Reports errors, except those of a browser that closes the connection."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: Watch
    # A connection serves one request: an open one would still be answered after the watch ends.
    timeout = 30
    refused: ClassVar[bytes] = (
        b"Open the complete address that fedloom watch printed, with its token.\n"
    )

    def do_GET(self) -> None:
        """Answers requests for the page and its data that have the token."""
        asked = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(asked.query).items()}
        if not self._is_known_host() or not self._has_token(query):
            return self._answer(403, "text/plain", self.refused)
        if asked.path == "/":
            return self._page()
        if asked.path == "/data":
            return self._answer(*self._data(query))
        return self._answer(404, "text/plain", b"There is nothing here.\n")

    def _data(self, query: dict[str, str]) -> Answer:
        try:
            version, have = int(query.get("version", "0")), int(query.get("from", "0"))
        except ValueError:
            return 400, "text/plain", b"version and from must be integers.\n"
        found = self.server.data(query.get("run", ""), version, have)
        if found is None:
            return 404, "text/plain", b"There is no run of that name.\n"
        return 200, "application/json", json.dumps(found, separators=(",", ":")).encode()

    def _page(self) -> None:
        nonce = secrets.token_urlsafe(16)
        parts = {
            "style": read_parts("base.css", "watch.css"),
            "script": read_parts(*SHARED_SCRIPTS, "watch.js"),
            "nonce": nonce,
        }
        cookie = f"{self.server.cookie}={self.server.token}; HttpOnly; SameSite=Strict; Path=/"
        self._answer(
            200,
            "text/html",
            fill_template("watch.html", parts).encode(),
            nonce,
            {"Set-Cookie": cookie},
        )

    # ---- access ----
    def _is_known_host(self) -> bool:
        return not self.server.loopback or self.headers.get("Host", "").lower() in self.server.hosts

    def _has_token(self, query: dict[str, str]) -> bool:
        try:
            kept = SimpleCookie(self.headers.get("Cookie", "")).get(self.server.cookie)
        except CookieError:
            kept = None
        offered = (query.get("token", ""), kept.value if kept else "")
        return any(
            secrets.compare_digest(one.encode(errors="replace"), self.server.token.encode())
            for one in offered
        )

    # ---- responses ----
    def _answer(
        self,
        status: int,
        kind: str,
        content: bytes,
        nonce: str = "",
        more: dict[str, str] | None = None,
    ) -> None:
        policy = ["default-src 'none'"]
        if nonce:
            policy += [
                f"script-src 'nonce-{nonce}'",
                "style-src 'unsafe-inline'",
                "connect-src 'self'",
                "img-src data:",
            ]
        policy += ["base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"]
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(content)),
            "Cache-Control": "no-store",
            "Content-Security-Policy": "; ".join(policy),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            **(more or {}),
        }
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answers requests other than GET, and malformed ones, and closes the connection."""
        if self.request_version == "HTTP/0.9":
            return
        if code == 501:
            self._answer(405, "text/plain", b"Only GET is allowed.\n")
        else:
            self._answer(code, "text/plain", b"")

    def version_string(self) -> str:
        """Returns the Server header. It does not disclose the version of Python."""
        return "fedloom"

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing, because the address contains the token."""


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
