"""The flower engine: each client in its own process, with messages over Flower.

It runs a deployment on this machine, with TLS, keys and signatures, and with the code of
`fedloom serve` and `fedloom join`. Use it to try a deployment, and for tests. `RemoteEngine` is an
engine whose clients are parties, wherever they are. `Engine` starts the parties itself. Parties
keep their states and models.
"""

from __future__ import annotations

import json
import secrets
import shutil
import socket
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

import torch

from fedloom._system import peak_memory
from fedloom.core.absence import FaultPolicy
from fedloom.core.client import Client
from fedloom.core.message import (
    DEFAULT_LIMIT,
    Absent,
    Limit,
    Message,
    decode,
    encode,
    largest_size,
)
from fedloom.core.method import Method
from fedloom.core.registry import file_or_name
from fedloom.core.waist import not_known
from fedloom.engines.base import Details, LongestReply
from fedloom.errors import ConfigError
from fedloom.experiments import checkpoint
from fedloom.experiments.trained import read_model
from fedloom.nn.own_model import OwnSpec

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

ROOM = 4096  # bytes that a reply may be too long, besides
JOIN_SECONDS = 120.0  # that the parties on this machine have to join


class RemoteEngine:
    """An engine over a coordinator whose parties have begun the run.

    Args:
        coordinator: The coordinator.
        before_finish: Called before the parties are told that the run is completed.
        prefix: What phases begin with on the wire, if they are not those of the agreed method.
    """

    tolerates_failures: ClassVar[bool] = True
    supports_deadline: ClassVar[bool] = True
    round: int = 0
    longest_reply: LongestReply = staticmethod(not_known)

    def __init__(
        self,
        coordinator: Coordinator,
        before_finish: Callable[[], None] = lambda: None,
        prefix: str = "",
    ):
        self.coordinator, self._before_finish, self._prefix = coordinator, before_finish, prefix

    def call(self, phase: str, messages: dict[str, Message]) -> Mapping[str, Message | Absent]:
        """Runs a phase at each client in `messages`. Returns each one's reply, or its absence.

        An answer that is longer than a valid one can be is refused by its length.
        """
        limits = {name: self._limit(name, phase) for name in messages}
        phase = f"{self._prefix}{phase}"
        bodies: dict[int, bytes] = {}  # a message that all receive is encoded once
        for message in messages.values():
            if id(message) not in bodies:
                bodies[id(message)] = encode(message, phase)
        return self.coordinator.ask(
            phase,
            {name: bodies[id(message)] for name, message in messages.items()},
            self.round,
            {name: limit.total for name, limit in limits.items()},
            lambda name, answer: decode(answer, phase, limits[name]),
        )

    def _limit(self, name: str, phase: str) -> Limit:
        """Returns how long a client's reply can be, as it travels.

        Twice the valid length is read, and a little more: a reply of a wrong dtype, or with a
        tensor too many, is then refused by the name of the tensor.
        """
        schema = self.longest_reply(name)
        if schema is None:
            return DEFAULT_LIMIT
        total, header = largest_size(schema, f"{self._prefix}{phase}")
        return Limit(2 * total + ROOM, 2 * header + ROOM)

    def snapshot(self) -> Message:
        """Makes each party save its state in its own folder. Returns the mark of these states.

        The mark identifies the states. It contains nothing of them.
        """
        mark = secrets.token_hex(8)
        self._control("fedloom_keep", {"mark": mark})
        return _mark_to_message(mark)

    def restore(self, saved: Message) -> None:
        """Makes each party restore the state that it saved under a mark."""
        self._control("fedloom_restore", {"mark": _mark_from_message(saved)})

    def _control(self, phase: str, content: dict[str, Any]) -> None:
        """Sends a control order to all parties. With a quorum of 1, all must execute it."""
        ready = sorted(self.coordinator.ready)
        answers = self.coordinator.control(phase, dict.fromkeys(ready, content))
        absent = [
            f"party {name!r}: {answer.cause}"
            for name, answer in answers.items()
            if isinstance(answer, Absent)
        ]
        if absent and not self.coordinator.policy.tolerates_absence:
            raise ConfigError("; ".join(absent))

    def keep_models(self, stage: str, shared: Message | None) -> None:
        """Makes each party keep the model that it has just scored. A shared model it has."""
        self._control("fedloom_best", {"stage": stage})

    def models(self, stage: str | None = None, shared: Message | None = None) -> dict[str, Message]:
        """Returns nothing: a party's model stays with the party."""
        return {}

    def artifacts(self) -> dict[str, Message]:
        """Returns nothing: parties send no artifacts."""
        return {}

    def details(self) -> Details:
        """Returns the number of parties, and how many answers were refused, by reason."""
        return {
            "parties": len(self.coordinator.agreement.parties),
            "refused": dict(self.coordinator.refused),
        }

    def peak_mb(self) -> float:
        """Returns the peak memory of the coordinator's process, in MB."""
        return peak_memory() / 2**20

    def finish(self, stage: str = "", round: int = 0) -> None:
        """Tells the parties that the run is completed, and which of their models is the best.

        After any other end, the parties wait for the coordinator to come back.
        """
        self._before_finish()
        ready = sorted(self.coordinator.ready)
        order = {"status": "completed", "stage": stage, "round": round}
        self.coordinator.control("fedloom_finish", dict.fromkeys(ready, order))

    def close(self) -> None:
        """Closes the transport."""
        self.coordinator.transport.close()


class Engine(RemoteEngine):
    """Starts the parties on this machine and ends them with the engine.

    Keys, certificates, graphs and states are in a temporary folder, which is removed at the end.
    """

    def __init__(
        self,
        method: Method,
        clients: Iterable[Client],
        policy: FaultPolicy = FaultPolicy(),
        workers: int = 0,
    ):
        clients = list(clients)
        facts = clients[0].facts
        self.folder = Path(tempfile.mkdtemp(prefix="fedloom-"))  # only its owner can read it
        self.parties: list[LocalParty] = []
        transport: CoordinatorTransport | None = None
        try:
            make_authority(self.folder, "127.0.0.1")
            for name in ("coordinator", *facts.clients):
                make_party(self.folder, name)
            port = free_port()
            agreement = self._write_agreement(method, clients, port)
            address = Address(
                "127.0.0.1",
                port,
                self.folder / "server.crt",
                self.folder / "server.key",
                agreement.authority,
            )
            transport = CoordinatorTransport(
                address, agreement.parties, log=self.folder / "superlink.log"
            )
            self.parties = [LocalParty(self.folder, client) for client in clients]
            coordinator = Coordinator(
                agreement,
                transport,
                read_party_key(self.folder / "coordinator.key"),
                secrets.token_hex(8),
                policy,
            )
            coordinator.wait_for_parties(
                JOIN_SECONDS, len(clients), lambda line: None, self._require_parties
            )
            coordinator.begin(facts)
        except BaseException:
            if transport is not None:
                transport.close()
            self._clear()
            raise
        super().__init__(coordinator)

    def _write_agreement(self, method: Method, clients: list[Client], port: int) -> Agreement:
        """Writes the agreement of these parties, and reads it."""
        facts, graph = clients[0].facts, clients[0].full_graph
        run: dict[str, Any] = {
            "seed": facts.seed,
            "threads": torch.get_num_threads(),
            "upload": facts.upload,
            "download": facts.download,
            "selection": facts.selection,
            "top_k": facts.top_k,
            "class_weight": facts.class_weight,
            "auc": facts.auc,
            "edge_epsilon": facts.edge_epsilon,
            "dp_seeded": facts.edges_seeded,
        }
        if (terms := facts.privacy) is not None:
            run |= {
                f"dp_{key}": getattr(terms, key)
                for key in ("epsilon", "delta", "clip", "noise", "unit", "sampling", "degree")
            }
            poisson = terms.sampling == "poisson"
            run["participation"] = terms.rate if poisson else terms.expected / facts.num_clients
        if facts.secure is not None:
            secure = {
                f"secure_{f.name}": getattr(facts.secure, f.name) for f in fields(facts.secure)
            }
            secure["bucketing"] = secure.pop("secure_bucket")
            run |= {"secure": True, **secure}
        tables: dict[str, dict[str, Any]] = {
            "federation": {
                "address": f"127.0.0.1:{port}",
                "authority": "ca.crt",
                "coordinator": "coordinator.pub",
            },
            "parties": {name: f"{name}.pub" for name in facts.clients},
            "data": {
                "num_features": graph.num_features,
                "num_classes": graph.num_classes,
                "class_names": list(graph.class_names),
                "task": facts.task,
                "split": OWN_SPLIT,
                "inductive": clients[0].inductive,
            },
            "model": {"name": ",".join(map(_in_file, facts.models)), "dropout": facts.dropout},
            "method": {"name": file_or_name(type(method)), **method.settings()},
            "run": run,
        }
        lines = [
            line
            for name, table in tables.items()
            for line in (f"[{name}]", *(f"{k} = {_toml(v)}" for k, v in table.items()))
        ]
        path = self.folder / "federation.toml"
        path.write_text("\n".join(lines) + "\n")
        return read_agreement(path, trust=True)  # this process has written it

    def snapshot(self) -> Message:
        """Returns everything of the clients that a later round depends on, as in the loop engine.

        The parties' folder is removed with the engine, so a mark would not be enough.
        """
        mark = _mark_from_message(super().snapshot())
        files = {party.name: party.state(self.coordinator.lineage, mark) for party in self.parties}
        return {
            name: checkpoint.decode(path.read_bytes()).state
            for name, path in files.items()
            if path.exists()
        }

    def restore(self, saved: Message) -> None:
        """Restores a snapshot. The clients must have been set up before."""
        mark = secrets.token_hex(8)
        for party in self.parties:
            path = party.state(self.coordinator.lineage, mark)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(
                checkpoint.encode(checkpoint.Checkpoint({}, saved.get(party.name, {})))
            )
        super().restore(_mark_to_message(mark))

    def models(self, stage: str | None = None, shared: Message | None = None) -> dict[str, Message]:
        """Returns the models that the parties have written to their folders at the end."""
        files = {
            party.name: self.folder / party.name / ("final-model" if stage is None else "model")
            for party in self.parties
        }
        paths = {name: path.with_suffix(".safetensors") for name, path in files.items()}
        return {name: read_model(path)[1] for name, path in paths.items() if path.exists()}

    def _require_parties(self) -> None:
        for party in self.parties:
            party.require_alive()

    def close(self) -> None:
        """Ends the SuperLink and the parties, and removes their files."""
        super().close()
        self._clear()

    def _clear(self) -> None:
        for party in self.parties:
            party.end()
        shutil.rmtree(self.folder)


def _mark_to_message(mark: str) -> Message:
    """Returns a mark as a message, for a checkpoint."""
    return {"mark": {"digits": torch.tensor(list(bytes.fromhex(mark)), dtype=torch.uint8)}}


def _mark_from_message(saved: Message) -> str:
    """Returns the mark in the output of `_mark_to_message`."""
    return bytes(saved["mark"]["digits"].tolist()).hex()


def _toml(value: bool | int | float | str | list[str]) -> str:
    """Returns a value as TOML."""
    if isinstance(value, bool):
        text = str(value).lower()
    else:
        text = repr(value) if isinstance(value, int | float) else json.dumps(value)
    assert tomllib.loads(f"v = {text}")["v"] == value
    return text


def free_port() -> int:
    """Returns a port of this machine that is free now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _in_file(spec: str) -> str:
    """Returns a model's spec. Raises a ConfigError if other processes cannot find the model."""
    if isinstance(spec, OwnSpec) and not spec.partition(":")[0].endswith(".py"):
        raise ConfigError(
            f"model {str(spec)!r}: with run.engine 'flower' clients run in processes of their own; "
            "write the module to a file and give model='file.py:Class'"
        )
    return str(spec)
