"""CoordinatorTransport: the coordinator's connection to the parties.

It starts the SuperLink, registers the parties with it, sends messages to them and collects their
answers. Flower's "run of an app" is here one session of the coordinator. `fedloom serve` is itself
the process of the app's server side, and `fedloom join` that of a client side, so that graphs,
models and optimisers stay in memory between messages.
"""

from __future__ import annotations

import io
import json
import os
import secrets
import socket
import ssl
import subprocess
import sys
import time
import zipfile
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from fedloom.deploy.keys import PublicKey
from fedloom.deploy.rate_limit import Limits
from fedloom.deploy.superlink import (
    ADMIT,
    DELIVERED,
    EXPECT,
    LIMIT,
    SECRET,
    STATUS,
    WAIT,
    configure_flower,
)
from fedloom.deploy.transport import PartyStatus
from fedloom.errors import ConfigError, FedloomError

configure_flower()
import httpx  # noqa: E402  (Flower reads the environment when it is imported)
from flwr.app import ConfigRecord, Message, RecordDict  # noqa: E402

from fedloom.deploy.flower_internals import (  # noqa: E402
    AcquireTaskRequest,
    ControlHttpClient,
    Fab,
    HeartbeatSender,
    PullTaskInputRequest,
    RegisterNodeRequest,
    RuntimeGrid,
    RuntimeHttpClient,
    RuntimeVersionHttpInterceptor,
    StartRunRequest,
    TaskIdentity,
    TaskType,
    UnregisterNodeRequest,
    fab_to_proto,
    make_task_heartbeat_fn_http,
    public_key_to_bytes,
    run_from_proto,
)

PROGRAM = "fedloom.deploy.superlink"  # the module that the SuperLink's process runs
START_SECONDS = 60.0  # within which the SuperLink must listen
# Flower requires names of a server side and a client side. Nothing loads them: `fedloom serve` and
# `fedloom join` are running already.
APP = b"""[project]
name = "fedloom"
version = "1"
license = "Apache-2.0"
[tool.flwr.app]
publisher = "fedloom"
dependencies = []
[tool.flwr.app.components]
serverapp = "fedloom.deploy.serve:serve"
clientapp = "fedloom.deploy.party:run_party"
"""


def _bundle() -> bytes:
    """Returns the app as Flower expects it: a zip file with its settings. It holds no code."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as file:
        file.writestr("pyproject.toml", APP)
        file.writestr(".info/CONTENT", f"pyproject.toml,{sha256(APP).hexdigest()},{8 * len(APP)}")
    return packed.getvalue()


class SuperLinkError(FedloomError):
    """The SuperLink has ended or does not answer."""


@dataclass(frozen=True)
class Address:
    """Where the coordinator listens.

    Without certificate, key and authority there is no TLS; that is for loopback only.

    Args:
        host: The address to listen on.
        port: The port to listen on.
        certificate: The server's certificate, a PEM file.
        key: The certificate's key, a PEM file.
        authority: The CA's certificate, a PEM file.
    """

    host: str
    port: int
    certificate: Path | None = None
    key: Path | None = None
    authority: Path | None = None

    @property
    def text(self) -> str:
        """host:port."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def local(self) -> str:
        """host:port at which the coordinator itself reaches the SuperLink."""
        return f"127.0.0.1:{self.port}" if self.host in ("0.0.0.0", "::") else self.text

    @property
    def insecure(self) -> bool:
        """Whether there is no TLS."""
        return self.certificate is None


class _HeaderInterceptor:
    """Adds headers to the coordinator's requests: the secret, and how long to wait for messages."""

    def __init__(self, secret: str):
        self.headers = {SECRET: secret}

    def intercept(self, context: Any, call_next: Callable[[Any], httpx.Response]) -> httpx.Response:
        """Adds the headers to a request."""
        context.request.headers.update(self.headers)
        return call_next(context)


def _trust(address: Address) -> ssl.SSLContext | bool:
    """Returns how the coordinator verifies its own SuperLink: by the authority only.

    The certificate is for the host that parties use. The coordinator may use another one.
    """
    if address.authority is None:
        return True
    context = ssl.create_default_context(cafile=str(address.authority))
    context.check_hostname = False
    return context


def _base64(data: bytes) -> str:
    return b64encode(data).decode("ascii")


def _url(address: Address) -> str:
    return f"{'http' if address.insecure else 'https'}://{address.local}"


def _client(kind: Any, address: Address, interceptors: Sequence[Any]) -> Any:
    return kind(_url(address), interceptors=interceptors, verify=_trust(address), timeout=30.0)


class CoordinatorTransport:
    """A SuperLink with registered parties, and a run of the app. It implements `Transport`.

    Args:
        address: Where to listen.
        parties: The parties' names and keys.
        log: A file for the output of the SuperLink's process.
        limit: Bytes of a request.
        limits: What the SuperLink accepts from one sender.
    """

    def __init__(
        self,
        address: Address,
        parties: Mapping[str, PublicKey],
        log: Path | None = None,
        limit: int = LIMIT,
        limits: Limits = Limits(),
    ):
        self.address, self.secret, self.limit = address, secrets.token_hex(32), limit
        self.node_of: dict[str, int] = {}
        self.grid: RuntimeGrid | None = None
        self._added = _HeaderInterceptor(self.secret)
        self._key_of: dict[str, str] = {}
        self._log = log
        self._process = self._start(
            {"secret": self.secret, "limit": limit, "limits": asdict(limits)}
        )
        self._http = httpx.Client(
            base_url=_url(address),
            headers={SECRET: self.secret},
            verify=_trust(address),
            timeout=30.0,
        )
        self._heart: HeartbeatSender | None = None
        try:
            self._wait_until_it_listens()
            self.admit(parties)
            with self._control() as control:
                self._submit(control)
        except httpx.HTTPError as error:
            self.close()
            raise SuperLinkError(
                f"the SuperLink at {address.text} cannot be set up ({error})"
            ) from error
        except BaseException:
            self.close()
            raise

    # ---- starting ----
    def _start(self, settings: dict[str, Any]) -> subprocess.Popen[bytes]:
        try:
            with socket.create_server((self.address.host, self.address.port)):
                pass
        except OSError as error:
            raise ConfigError(
                f"address: cannot listen on {self.address.text} ({error.strerror or error})"
            ) from error
        files = {"certificate": self.address.certificate, "key": self.address.key}
        settings |= {"host": self.address.host, "port": self.address.port}
        settings |= {name: None if path is None else str(path) for name, path in files.items()}
        with open(self._log or os.devnull, "ab") as out:
            # The SuperLink gets its own session, so that Ctrl-C reaches only the coordinator. The
            # coordinator ends the SuperLink by closing its standard input.
            process = subprocess.Popen(
                [sys.executable, "-m", PROGRAM],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        assert process.stdin is not None
        process.stdin.write(json.dumps(settings).encode() + b"\n")
        process.stdin.flush()
        return process

    def _wait_until_it_listens(self) -> None:
        host, port = self.address.local.rsplit(":", 1)
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            self.require_alive()
            try:
                socket.create_connection((host.strip("[]"), int(port)), timeout=1).close()
            except OSError:
                time.sleep(0.05)
            else:
                return
        raise SuperLinkError(
            f"the SuperLink did not listen on {self.address.text} within {START_SECONDS:.0f} s"
        )

    def _control(self) -> Any:
        """Returns a client of Flower's control interface."""
        interceptors = [RuntimeVersionHttpInterceptor("CLI"), self._added]
        return _client(ControlHttpClient, self.address, interceptors)

    def admit(self, parties: Mapping[str, PublicKey]) -> None:
        """Registers the parties' keys at the door and with Flower, and removes all others."""
        keys = {name: _base64(public_key_to_bytes(key.node)) for name, key in parties.items()}
        signing = {
            keys[name]: _base64(key.signing.public_bytes_raw()) for name, key in parties.items()
        }
        try:
            self._http.post(ADMIT, json=signing).raise_for_status()
            with self._control() as control:
                for name in [n for n, key in self._key_of.items() if keys.get(n) != key]:
                    control.UnregisterNode(UnregisterNodeRequest(node_id=self.node_of.pop(name)))
                    del self._key_of[name]
                for name, key in keys.items():
                    if name not in self._key_of:
                        request = RegisterNodeRequest(public_key=b64decode(key))
                        self.node_of[name] = control.RegisterNode(request).node_id
                        self._key_of[name] = key
        except httpx.HTTPError as error:
            self.require_alive()
            raise SuperLinkError(f"the SuperLink registers no keys ({error})") from error

    def _submit(self, control: ControlHttpClient) -> None:
        """Starts the app's run and takes over its server side."""
        bundle = _bundle()
        fab = Fab(sha256(bundle).hexdigest(), bundle, {})
        run_id = control.StartRun(StartRunRequest(fab=fab_to_proto(fab))).run_id
        runtime = _client(
            RuntimeHttpClient,
            self.address,
            [RuntimeVersionHttpInterceptor("SuperExec"), self._added],
        )
        claimed = runtime.AcquireTask(
            AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])
        )
        runtime.close()
        if claimed.task.run_id != run_id:
            raise SuperLinkError("the SuperLink gave the run to another process")
        self.grid = RuntimeGrid(
            claimed.token,
            lambda needed: _client(RuntimeHttpClient, self.address, [*needed, self._added]),
        )
        given = self.grid.client.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = (
            given.task_id,
            given.run.run_id,
            given.context.node_id,
        )
        self.grid.set_run(run_from_proto(given.run))
        self._heart = HeartbeatSender(make_task_heartbeat_fn_http(self.grid.client))
        self._heart.start()

    # ---- while it runs ----
    def require_alive(self) -> None:
        """Raises SuperLinkError if the SuperLink's process has ended."""
        if (code := self._process.poll()) is not None:
            raise SuperLinkError(f"the SuperLink has ended (exit code {code}){self._why(code)}")

    def _why(self, code: int) -> str:
        """Returns why the SuperLink has ended: the last line of its log, unless it was killed."""
        lines = self._log.read_text(errors="replace").splitlines() if self._log else []
        return f": {lines[-1]}" if lines and code > 0 else ""

    def send(
        self, envelopes: Mapping[str, bytes], limit: int = LIMIT, ttl: float = 86_400.0
    ) -> dict[str, str]:
        """Sends an envelope to each party. Returns {message id: party}.

        Args:
            envelopes: The envelope of each party.
            limit: Bytes of a party's answer. The SuperLink refuses a larger one before it reads it.
            ttl: Seconds after which Flower drops a message that was not fetched.
        """
        assert self.grid is not None
        messages = [
            Message(
                RecordDict({"fedloom": ConfigRecord({"envelope": data})}),
                self.node_of[party],
                "query.fedloom",
                ttl=ttl,
            )
            for party, data in envelopes.items()
        ]
        try:
            expected = {self._key_of[party]: limit for party in envelopes}
            self._http.post(EXPECT, json=expected).raise_for_status()
            numbers = list(self.grid.push_messages(messages))
            self._http.post(DELIVERED).raise_for_status()
        except httpx.HTTPError as error:
            self.require_alive()
            raise SuperLinkError(f"the SuperLink does not accept messages ({error})") from error
        return dict(zip(numbers, envelopes, strict=True))

    def receive(
        self, pending: Mapping[str, str], seconds: float
    ) -> Iterator[tuple[str, bytes | str]]:
        """Waits for answers; see `Transport`."""
        assert self.grid is not None
        self._added.headers[WAIT] = f"{seconds:.3f}"
        try:
            for number, message in self.grid.arrived(list(pending), seconds):
                if isinstance(message, str):
                    yield number, f"Flower: {message}"
                    continue
                if message.has_error():
                    yield number, f"Flower: {message.error.reason}"
                    continue
                record = message.content.config_records.get("fedloom")
                data = None if record is None else record.get("envelope")
                yield number, data if isinstance(data, bytes) else "the answer holds no envelope"
        except httpx.HTTPError as error:
            self.require_alive()
            raise SuperLinkError(f"the SuperLink delivers no messages ({error})") from error

    def status(self) -> dict[str, PartyStatus]:
        """Returns the status of each party that has connected."""
        try:
            status = self._http.get(STATUS).raise_for_status().json()
        except httpx.HTTPError as error:
            self.require_alive()
            raise SuperLinkError(f"the SuperLink does not report its parties ({error})") from error
        names = {key: name for name, key in self._key_of.items()}
        return {names[key]: PartyStatus(*row) for key, row in status.items() if key in names}

    def close(self) -> None:
        """Ends the SuperLink."""
        if self._heart is not None and self._heart.is_running:
            self._heart.stop()
        if self.grid is not None:
            self.grid.close()
        self._http.close()
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(3)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
