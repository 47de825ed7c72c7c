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
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from fedloom.deploy.keys import PublicKey
from fedloom.deploy.superlink import DELIVERED, LIMIT, SECRET, STATUS, WAIT, configure_flower
from fedloom.deploy.transport import PartyStatus
from fedloom.errors import ConfigError, FedloomError

configure_flower()
import httpx  # noqa: E402  (Flower reads the environment when it is imported)
from flwr.app import ConfigRecord, Message, RecordDict  # noqa: E402
from flwr.common.serde import fab_to_proto, run_from_proto  # noqa: E402
from flwr.proto.control_pb2 import (  # noqa: E402
    RegisterNodeRequest,
    StartRunRequest,
    UnregisterNodeRequest,
)
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullTaskInputRequest  # noqa: E402
from flwr.supercore.constant import TaskType  # noqa: E402
from flwr.supercore.control import ControlHttpClient  # noqa: E402
from flwr.supercore.fab import Fab  # noqa: E402
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http  # noqa: E402
from flwr.supercore.interceptors import (  # noqa: E402
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
)
from flwr.supercore.primitives.asymmetric import public_key_to_bytes  # noqa: E402
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext  # noqa: E402
from flwr.supercore.runtime import RuntimeHttpClient  # noqa: E402
from flwr.supercore.task_identity import TaskIdentity  # noqa: E402
from flwr.superlink.grid import HttpGrid  # noqa: E402

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

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        """Adds the headers to a request."""
        context.request.headers.update(self.headers)
        return call_next(context)


class _Grid(HttpGrid):
    """Flower's grid with the coordinator's headers.

    If the SuperLink is gone, it fails at once. Flower's own grid tries again for minutes.
    """

    def __init__(self, address: Address, token: str, secret: str):
        super().__init__(address.local, address.insecure, None, token=token)
        self.added = _HeaderInterceptor(secret)
        interceptors = [
            RuntimeVersionHttpInterceptor("flwr-serverapp"),
            RuntimeTokenHttpInterceptor(token),
            self.added,
        ]
        self._client = _client(RuntimeHttpClient, address, interceptors)


def _trust(address: Address) -> ssl.SSLContext | bool:
    """Returns how the coordinator verifies its own SuperLink: by the authority only.

    The certificate is for the host that parties use. The coordinator may use another one.
    """
    if address.authority is None:
        return True
    context = ssl.create_default_context(cafile=str(address.authority))
    context.check_hostname = False
    return context


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
    """

    def __init__(
        self,
        address: Address,
        parties: Mapping[str, PublicKey],
        log: Path | None = None,
        limit: int = LIMIT,
    ):
        self.address, self.secret, self.limit = address, secrets.token_hex(32), limit
        self.node_of: dict[str, int] = {}
        self.grid: Any = None
        self.key_of: dict[str, bytes] = {}
        self._process = self._start(log)
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
    def _start(self, log: Path | None) -> subprocess.Popen[bytes]:
        try:
            with socket.create_server((self.address.host, self.address.port)):
                pass
        except OSError as error:
            raise ConfigError(
                f"address: cannot listen on {self.address.text} ({error.strerror or error})"
            ) from error
        files = {"certificate": self.address.certificate, "key": self.address.key}
        settings = {
            "host": self.address.host,
            "port": self.address.port,
            "secret": self.secret,
            "limit": self.limit,
        }
        settings |= {name: None if path is None else str(path) for name, path in files.items()}
        with open(log or os.devnull, "ab") as out:
            # The SuperLink gets its own session, so that Ctrl-C reaches only the coordinator. The
            # coordinator ends the SuperLink by closing its standard input.
            process = subprocess.Popen(
                [sys.executable, "-m", "fedloom.deploy.superlink"],
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
        interceptors = [RuntimeVersionHttpInterceptor("CLI"), _HeaderInterceptor(self.secret)]
        return _client(ControlHttpClient, self.address, interceptors)

    def admit(self, parties: Mapping[str, PublicKey]) -> None:
        """Registers the parties' keys with Flower, and removes keys that are not theirs."""
        keys = {name: public_key_to_bytes(key.node) for name, key in parties.items()}
        try:
            with self._control() as control:
                for name in [n for n, key in self.key_of.items() if keys.get(n) != key]:
                    control.UnregisterNode(UnregisterNodeRequest(node_id=self.node_of.pop(name)))
                    del self.key_of[name]
                for name, key in keys.items():
                    if name not in self.key_of:
                        registered = control.RegisterNode(RegisterNodeRequest(public_key=key))
                        self.node_of[name], self.key_of[name] = registered.node_id, key
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
            [RuntimeVersionHttpInterceptor("SuperExec"), _HeaderInterceptor(self.secret)],
        )
        claimed = runtime.AcquireTask(
            AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])
        )
        runtime.close()
        if claimed.task.run_id != run_id:
            raise SuperLinkError("the SuperLink gave the run to another process")
        self.grid = _Grid(self.address, claimed.token, self.secret)
        given = self.grid._runtime_client.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = (
            given.task_id,
            given.run.run_id,
            given.context.node_id,
        )
        self.grid.set_run(run_from_proto(given.run))
        self._heart = HeartbeatSender(make_task_heartbeat_fn_http(self.grid._runtime_client))
        self._heart.start()

    # ---- while it runs ----
    def require_alive(self) -> None:
        """Raises SuperLinkError if the SuperLink's process has ended."""
        if (code := self._process.poll()) is not None:
            raise SuperLinkError(f"the SuperLink has ended (exit code {code})")

    def send(self, envelopes: Mapping[str, bytes], ttl: float = 86_400.0) -> dict[str, str]:
        """Sends an envelope to each party. Returns {message id: party}.

        ttl: seconds after which Flower drops a message that was not fetched.
        """
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
        self.grid.added.headers[WAIT] = f"{seconds:.3f}"
        try:
            for message in self.grid.pull_messages(list(pending)):
                number = message.metadata.reply_to_message_id
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
        names = {b64encode(key).decode("ascii"): name for name, key in self.key_of.items()}
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
