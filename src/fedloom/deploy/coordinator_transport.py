"""The coordinator's end of the link: starts it, makes the parties known to it, sends messages to them and collects their answers.

What Flower calls a run of an app is, here, one life of the coordinator: `fedloom serve` is itself the process in which the app's server
side runs, as `fedloom join` is that of a client side, so that graphs, models and optimisers stay in memory between messages.
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
from typing import Any, NamedTuple

from fedloom.deploy.keys import PublicKey
from fedloom.deploy.superlink import LIMIT, PATIENCE, SECRET, SEEN, SETTLED, quiet
from fedloom.errors import ConfigError, FedloomError

quiet()
import httpx  # noqa: E402  (Flower looks at the environment when it is imported)
from flwr.app import ConfigRecord, Message, RecordDict  # noqa: E402
from flwr.common.serde import fab_to_proto, run_from_proto  # noqa: E402
from flwr.proto.control_pb2 import RegisterNodeRequest, StartRunRequest  # noqa: E402
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullTaskInputRequest  # noqa: E402
from flwr.supercore.constant import TaskType  # noqa: E402
from flwr.supercore.control import ControlHttpClient  # noqa: E402
from flwr.supercore.fab import Fab  # noqa: E402
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http  # noqa: E402
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor  # noqa: E402
from flwr.supercore.primitives.asymmetric import public_key_to_bytes  # noqa: E402
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext  # noqa: E402
from flwr.supercore.runtime import RuntimeHttpClient  # noqa: E402
from flwr.supercore.task_identity import TaskIdentity  # noqa: E402
from flwr.superlink.grid import HttpGrid  # noqa: E402

START_SECONDS = 60.0  # that the link has to start in
# Flower wants names of a server's and a client's side. Nobody loads them: `fedloom serve` and `fedloom join` are already there.
APP = b"""[project]
name = "fedloom"
version = "1"
license = "Apache-2.0"
[tool.flwr.app]
publisher = "fedloom"
dependencies = []
[tool.flwr.app.components]
serverapp = "fedloom.deploy.serve:serve"
clientapp = "fedloom.deploy.join:take_part"
"""


def _bundle() -> bytes:
    """The app as Flower wants it handed in: a zip file with its settings. It holds no code, everybody has that."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as file:
        file.writestr("pyproject.toml", APP)
        file.writestr(".info/CONTENT", f"pyproject.toml,{sha256(APP).hexdigest()},{8 * len(APP)}")
    return packed.getvalue()


class SuperLinkError(FedloomError):
    """The link has died, or does not answer."""


@dataclass(frozen=True)
class Address:
    """Where the coordinator listens. certificate, key: its PEM files; authority: that of the CA. All None: no TLS, loopback only."""

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
    def own(self) -> str:
        """Where the coordinator itself finds the link: a server that listens everywhere is also at home."""
        return f"127.0.0.1:{self.port}" if self.host in ("0.0.0.0", "::") else self.text

    @property
    def insecure(self) -> bool:
        """Whether it is without TLS."""
        return self.certificate is None


class Seen(NamedTuple):
    """Of a party: seconds since it was last heard of, and how often it has connected."""

    silent: float
    connections: int


class _WithHeaders:
    """Adds headers to every request of the coordinator's: the secret, and how long a request for messages may wait."""

    def __init__(self, secret: str):
        self.headers = {SECRET: secret}

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        """Adds them to a request."""
        context.request.headers.update(self.headers)
        return call_next(context)


class _Grid(HttpGrid):
    """Flower's grid, as the coordinator uses it: with the secret, and without trying again for minutes when the link is gone."""

    def __init__(self, address: Address, token: str, secret: str):
        super().__init__(address.own, address.insecure, None, token=token)
        self.own = _WithHeaders(secret)
        interceptors = [
            RuntimeVersionHttpInterceptor("flwr-serverapp"),
            RuntimeTokenHttpInterceptor(token),
            self.own,
        ]
        self._client = _client(RuntimeHttpClient, address, interceptors)


def _trust(address: Address) -> ssl.SSLContext | bool:
    """How the coordinator knows its own link: by the authority. The certificate's name is the one that parties use, maybe not its own."""
    if address.authority is None:
        return True
    context = ssl.create_default_context(cafile=str(address.authority))
    context.check_hostname = False
    return context


def _url(address: Address) -> str:
    return f"{'http' if address.insecure else 'https'}://{address.own}"


def _client(kind: Any, address: Address, interceptors: Sequence[Any]) -> Any:
    return kind(_url(address), interceptors=interceptors, verify=_trust(address), timeout=30.0)


class CoordinatorTransport:
    """A link with its parties registered, and a run of the app under way.

    address: where to listen. parties: their names and keys. log: a file for what the link's process says. limit: bytes of a request.
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
        self.key_of = {name: public_key_to_bytes(key.node) for name, key in parties.items()}
        self._process = self._start(log)
        self._http = httpx.Client(
            base_url=_url(address),
            headers={SECRET: self.secret},
            verify=_trust(address),
            timeout=10.0,
        )
        self._beat: HeartbeatSender | None = None
        try:
            self._wait_until_it_listens()
            with _client(
                ControlHttpClient,
                address,
                [RuntimeVersionHttpInterceptor("CLI"), _WithHeaders(self.secret)],
            ) as control:
                for name, key in self.key_of.items():
                    self.node_of[name] = control.RegisterNode(
                        RegisterNodeRequest(public_key=key)
                    ).node_id
                self._submit(control)
        except httpx.HTTPError as error:
            self.close()
            raise SuperLinkError(
                f"the link at {address.text} does not do as it is told ({error})"
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
            # A session of its own: Ctrl-C is the coordinator's to hear, which ends the link by closing its standard input.
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
        host, port = self.address.own.rsplit(":", 1)
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
            f"the link did not listen on {self.address.text} within {START_SECONDS:.0f} s"
        )

    def _submit(self, control: ControlHttpClient) -> None:
        """Starts the app's run, and takes over its server side."""
        bundle = _bundle()
        fab = Fab(sha256(bundle).hexdigest(), bundle, {})
        run_id = control.StartRun(StartRunRequest(fab=fab_to_proto(fab))).run_id
        runtime = _client(
            RuntimeHttpClient,
            self.address,
            [RuntimeVersionHttpInterceptor("SuperExec"), _WithHeaders(self.secret)],
        )
        claimed = runtime.AcquireTask(
            AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])
        )
        runtime.close()
        if claimed.task.run_id != run_id:
            raise SuperLinkError("the link gave its run to somebody else")
        self.grid = _Grid(self.address, claimed.token, self.secret)
        given = self.grid._runtime_client.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = (
            given.task_id,
            given.run.run_id,
            given.context.node_id,
        )
        self.grid.set_run(run_from_proto(given.run))
        self._beat = HeartbeatSender(make_task_heartbeat_fn_http(self.grid._runtime_client))
        self._beat.start()

    # ---- while it runs ----
    def require_alive(self) -> None:
        """Raises SuperLinkError if the link's process has ended."""
        if (code := self._process.poll()) is not None:
            raise SuperLinkError(f"the link has ended (exit code {code})")

    def post(self, envelopes: Mapping[str, bytes], ttl: float = 86_400.0) -> dict[str, str]:
        """Sends each party its envelope; gives {message id: party}."""
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
            self._http.post(SETTLED).raise_for_status()
        except httpx.HTTPError as error:
            self.require_alive()
            raise SuperLinkError(f"the link does not take messages ({error})") from error
        return dict(zip(numbers, envelopes, strict=True))

    def collect(
        self, waiting: Mapping[str, str], seconds: float
    ) -> Iterator[tuple[str, bytes | str]]:
        """Waits at most so long for answers to posted messages; gives (message id, envelope), or (message id, what went wrong)."""
        self.grid.own.headers[PATIENCE] = f"{seconds:.3f}"
        try:
            for message in self.grid.pull_messages(list(waiting)):
                number = message.metadata.reply_to_message_id
                if message.has_error():
                    yield number, f"Flower: {message.error.reason}"
                else:
                    record = message.content.config_records.get("fedloom")
                    data = None if record is None else record.get("envelope")
                    yield (
                        number,
                        data if isinstance(data, bytes) else "its answer holds no envelope",
                    )
        except httpx.HTTPError as error:
            self.require_alive()
            raise SuperLinkError(f"the link gives no messages ({error})") from error

    def seen(self) -> dict[str, Seen]:
        """When each party was last heard of; those that have never been are not in it."""
        try:
            seen = self._http.get(SEEN).raise_for_status().json()
        except httpx.HTTPError as error:
            self.require_alive()
            raise SuperLinkError(f"the link does not say who is there ({error})") from error
        names = {b64encode(key).decode("ascii"): name for name, key in self.key_of.items()}
        return {names[key]: Seen(*told) for key, told in seen.items() if key in names}

    def close(self) -> None:
        """Ends the link; nothing of it is left."""
        if self._beat is not None and self._beat.is_running:
            self._beat.stop()
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
