"""The flower engine: every client in a process of its own, messages over Flower with TLS, keys and signatures, all on this machine.

For trying a deployment out, and for tests: what `fedloom serve` and `fedloom join` do between organisations, with the same code. `RemoteEngine`
is an engine whose clients are parties, wherever they are; `Engine` starts the parties itself. Parties keep their states and models.
"""

from __future__ import annotations

import json
import secrets
import shutil
import socket
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

import torch

from fedloom._system import peak_memory
from fedloom.core.absence import FaultPolicy
from fedloom.core.client import Client
from fedloom.core.message import Absent, Message, decode, encode
from fedloom.core.method import Method
from fedloom.core.registry import name_of
from fedloom.engines.base import Details
from fedloom.errors import ConfigError
from fedloom.experiments import checkpoint

try:
    from fedloom.deploy.agreement import OWN_SPLIT, Agreement, read_agreement
    from fedloom.deploy.coordinator import Coordinator
    from fedloom.deploy.coordinator_transport import Address, CoordinatorTransport
    from fedloom.deploy.keys import make_authority, make_party, read_party_key
    from fedloom.deploy.local_party import LocalParty
except ModuleNotFoundError as error:
    raise ConfigError(
        f"run.engine flower needs the package {error.name!r}: pip install 'fedloom[flower]'"
    ) from error

JOIN_SECONDS = 120.0  # that the parties on this machine have to come in


class RemoteEngine:
    """An engine over a coordinator whose parties have begun."""

    tolerates_failures: ClassVar[bool] = True
    supports_deadline: ClassVar[bool] = True
    round: int = 0

    def __init__(self, coordinator: Coordinator):
        self.coordinator = coordinator

    def call(self, phase: str, messages: dict[str, Message]) -> Mapping[str, Message | Absent]:
        """Takes a phase's name and a message per client, gives each client's reply, or why there is none."""
        bodies: dict[int, bytes] = {}  # what all are sent is put into bytes once
        for message in messages.values():
            if id(message) not in bodies:
                bodies[id(message)] = encode(message, phase)
        answers = self.coordinator.ask(
            phase, {name: bodies[id(message)] for name, message in messages.items()}, self.round
        )
        return {
            name: answer if isinstance(answer, Absent) else _decoded(answer, phase)
            for name, answer in answers.items()
        }

    def snapshot(self) -> Message:
        """Has every party keep its state with itself; gives the mark by which they find it again, and nothing of the state."""
        mark = secrets.token_hex(8)
        self._require(
            self.coordinator.tell(
                "fedloom_keep", {name: {"mark": mark} for name in sorted(self.coordinator.ready)}
            )
        )
        return _marked(mark)

    def restore(self, saved: dict[str, Any]) -> None:
        """Has every party go back to the state that it kept under a mark."""
        mark = _read(saved)
        self._require(
            self.coordinator.tell(
                "fedloom_restore", {name: {"mark": mark} for name in sorted(self.coordinator.ready)}
            )
        )

    def _require(self, answers: Mapping[str, dict[str, Any] | Absent]) -> None:
        absent = {
            name: answer.cause for name, answer in answers.items() if isinstance(answer, Absent)
        }
        if absent and not self.coordinator.policy.tolerates_absence:
            raise ConfigError(
                "; ".join(f"party {name!r}: {cause}" for name, cause in absent.items())
            )

    def models(self) -> dict[str, Message]:
        """None: a party's model stays with the party."""
        return {}

    def artifacts(self) -> dict[str, Message]:
        """None: parties show nothing of themselves."""
        return {}

    def details(self) -> Details:
        """For a run's summary: what answers were refused, by reason."""
        return {
            "parties": len(self.coordinator.agreement.parties),
            "refused": dict(self.coordinator.refused),
        }

    def peak_mb(self) -> float:
        """The most memory that the coordinator's process has held."""
        return peak_memory() / 2**20

    def finish(self) -> None:
        """Tells the parties that the run is completed. After anything else they wait for the coordinator to come back."""
        self.coordinator.tell(
            "fedloom_finish",
            {name: {"status": "completed"} for name in sorted(self.coordinator.ready)},
        )

    def close(self) -> None:
        """Ends the link."""
        self.coordinator.transport.close()


class Engine(RemoteEngine):
    """Parties on this machine, started and ended with the engine; keys, certificates, graphs and states are in a folder that goes too."""

    def __init__(
        self,
        method: Method,
        clients: Iterable[Client],
        policy: FaultPolicy = FaultPolicy(),
        workers: int = 0,
    ):
        clients = list(clients)
        facts = clients[0].facts
        self.folder = Path(tempfile.mkdtemp(prefix="fedloom-"))  # readable by nobody else
        self.parties: list[LocalParty] = []
        transport: CoordinatorTransport | None = None
        try:
            make_authority(self.folder, "127.0.0.1")
            for name in ("coordinator", *facts.clients):
                make_party(self.folder, name)
            port = _free_port()
            agreement = self._agree(method, clients, port)
            address = Address(
                "127.0.0.1",
                port,
                self.folder / "server.crt",
                self.folder / "server.key",
                agreement.authority,
            )
            transport = CoordinatorTransport(
                address, agreement.parties, log=self.folder / "link.log"
            )
            self.parties = [LocalParty(self.folder, client) for client in clients]
            coordinator = Coordinator(
                agreement,
                transport,
                read_party_key(self.folder / "coordinator.key"),
                secrets.token_hex(8),
                policy,
            )
            coordinator.gather(JOIN_SECONDS, len(clients), lambda line: None, self._require_parties)
            coordinator.begin(facts)
        except BaseException:
            if transport is not None:
                transport.close()
            self._clear()
            raise
        super().__init__(coordinator)

    def _agree(self, method: Method, clients: list[Client], port: int) -> Agreement:
        """Writes and reads the agreement."""
        facts, graph = clients[0].facts, clients[0].full_graph
        run: dict[str, Any] = {"seed": facts.seed, "threads": torch.get_num_threads()}
        if facts.secure is not None:
            run |= {"secure": True} | {
                f"secure_{f.name}": getattr(facts.secure, f.name) for f in fields(facts.secure)
            }
        tables: dict[str, dict[str, Any]] = {
            "federation": {"address": f"127.0.0.1:{port}", "authority": "ca.crt", "coordinator": "coordinator.pub"},
            "parties": {name: f"{name}.pub" for name in facts.clients},
            "data": {
                "num_features": graph.num_features, "num_classes": graph.num_classes, "task": facts.task, "split": OWN_SPLIT,
                "inductive": clients[0].inductive,
            },
            "model": {"name": ",".join(facts.models), "dropout": facts.dropout},
            "method": {"name": name_of(method), **method.settings()}, "run": run,
        }  # fmt: skip
        lines = [
            line
            for name, table in tables.items()
            for line in (f"[{name}]", *(f"{k} = {_toml(v)}" for k, v in table.items()))
        ]
        path = self.folder / "federation.toml"
        path.write_text("\n".join(lines) + "\n")
        return read_agreement(path)

    def snapshot(self) -> Message:
        """Everything of the clients that a later round depends on, as in the loop: these parties' folder goes when the engine does."""
        mark = _read(super().snapshot())
        kept = {party.name: party.state(self.coordinator.lineage, mark) for party in self.parties}
        return {
            name: checkpoint.decode(path.read_bytes()).state
            for name, path in kept.items()
            if path.exists()
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Puts the clients back to a snapshot; they must have been set up before."""
        mark = secrets.token_hex(8)
        for party in self.parties:
            path = party.state(self.coordinator.lineage, mark)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(
                checkpoint.encode(checkpoint.Checkpoint({}, saved.get(party.name, {})))
            )
        super().restore(_marked(mark))

    def _require_parties(self) -> None:
        for party in self.parties:
            party.require_alive()

    def close(self) -> None:
        """Ends link and parties; nothing of them is left."""
        super().close()
        self._clear()

    def _clear(self) -> None:
        for party in self.parties:
            party.end()
        shutil.rmtree(self.folder)


def _marked(mark: str) -> Message:
    """A mark as a message: what a checkpoint holds of parties that keep their states themselves."""
    return {"mark": {"kept": torch.tensor(list(bytes.fromhex(mark)), dtype=torch.uint8)}}


def _read(saved: Message) -> str:
    """The inverse of `_marked`."""
    return bytes(saved["mark"]["kept"].tolist()).hex()


def _decoded(answer: bytes, phase: str) -> Message | Absent:
    try:
        return decode(answer, phase)
    except ValueError as error:
        return Absent(f"refused: {error}", error)


def _toml(value: Any) -> str:
    """A value as TOML writes it."""
    text = (
        str(value).lower()
        if isinstance(value, bool)
        else repr(value)
        if isinstance(value, int | float)
        else None
    )
    if text is None:
        text = json.dumps(value)
    assert tomllib.loads(f"v = {text}")["v"] == value
    return text


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
