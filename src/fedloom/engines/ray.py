"""The ray engine: workers on a Ray cluster, each with a share of the clients.

It is for federations that outgrow one machine. On equal machines it is bit-identical to the loop
engine.

A worker is an actor with a group of clients, not one actor per client. It receives their graphs
once and then messages, all as safetensors bytes. A message to several workers is put into Ray's
object store once. Ray itself transfers the method's class and settings, so a method from a user's
own file works too. Every machine needs the same version of fedloom.

The environment variable RAY_ADDRESS names the cluster ("auto": the one that runs on this machine).
Without it, a cluster of this machine alone is started, and ended with the engine. A process that
has called `ray.init` before stays in that cluster.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from fedloom.core.absence import FaultPolicy
from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.core.message import Message, isolate
from fedloom.core.method import Method
from fedloom.data.graph import Graph
from fedloom.engines import loop
from fedloom.engines._workers import (
    Content,
    Failures,
    WorkerEngine,
    WorkerError,
    execute,
    messages_of,
)
from fedloom.errors import ConfigError
from fedloom.nn.own_model import OwnSpec
from fedloom.privacy.choice import responder_for

# Ray reads these when it is imported.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage reports
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # recommended by Ray's warning
try:
    import ray
    from ray import cloudpickle
except ImportError as error:
    raise ConfigError("run.engine 'ray' needs Ray: pip install 'fedloom[ray]'") from error

# Packages that other processes can import. All other modules are sent with what refers to them.
_IMPORTABLE = {"fedloom", "torch", "torch_geometric", *sys.stdlib_module_names}
# A client's name, its graph's tensors, the graph's other fields, and whether it is inductive.
PackedClient = tuple[str, bytes, dict[str, Any], bool]
PackedContent = tuple[Sequence[str], bool, bytes]  # a `Content`, with its tensors as bytes
# The clients of a message, and its bytes or a reference to them in the object store.
RayShare = list[tuple[list[str], Any]]


class Engine(WorkerEngine[RayShare]):
    """Starts its actors when it is made. Ends them when it is closed."""

    def __init__(
        self,
        method: Method,
        clients: Iterable[Client],
        policy: FaultPolicy = FaultPolicy(),
        workers: int = 0,
    ):
        self._started = connect()
        self._actors: list[Any] = []
        self._answers: dict[int, Any] = {}  # references to the answers of busy workers
        super().__init__(method, clients, policy, workers)

    def cores(self) -> int:
        """Returns the number of cores of the cluster."""
        return int(ray.cluster_resources().get("CPU", 1))

    def start(self, method: Method, groups: list[list[Client]]) -> None:
        """Starts an actor for each group, spread over the machines, and waits for all of them."""
        own = [s.source for s in groups[0][0].facts.models if isinstance(s, OwnSpec)]
        modules = {cls.__module__ for cls in type(method).__mro__}
        modules |= {getattr(source, "__module__", type(source).__module__) for source in own}
        for module in modules:
            if module.partition(".")[0] not in _IMPORTABLE:
                cloudpickle.register_pickle_by_value(sys.modules[module])
        actor = ray.remote(Worker).options(scheduling_strategy="SPREAD")
        for group in groups:
            packed = (ray.put(_packed(c)) for c in group)
            facts = group[0].facts
            self._actors.append(actor.remote(method, facts, self.policy, self.threads, *packed))
        for k, started in enumerate(self._actors):
            _get(k, started.__ray_ready__.remote())

    def shares(self, contents: list[Content]) -> dict[int, RayShare]:
        """Puts messages to several workers into the object store. Returns {worker: messages}."""
        shares: dict[int, RayShare] = {}
        for clients, _, content in _pack(contents):
            homes = sorted({self.home[c] for c in clients})
            sent = ray.put(content) if len(homes) > 1 else content
            for k in homes:
                shares.setdefault(k, []).append(([c for c in clients if self.home[c] == k], sent))
        return shares

    def send(self, worker: int, command: str, phase: str, share: RayShare) -> None:
        """Sends a command. `receive` notices if the worker is gone."""
        clients, sent = [clients for clients, _ in share], (content for _, content in share)
        actor = self._actors[worker]
        self._answers[worker] = actor.execute.remote(command, phase, clients, *sent)

    def ready(self, workers: list[int], seconds: float | None) -> list[int]:
        """Waits until some of the workers have answered or are gone. Returns those."""
        heard, _ = ray.wait([self._answers[k] for k in workers], num_returns=1, timeout=seconds)
        return [k for k in workers if self._answers[k] in heard]

    def receive(self, worker: int) -> tuple[Mapping[str, Message], Failures]:
        """Returns the replies. Raises a WorkerError if the worker is gone."""
        packed, failures = _get(worker, self._answers.pop(worker))
        return _unpack(packed), failures

    def stop(self) -> None:
        """Ends the actors, and the cluster if it was started here."""
        for actor in self._actors:
            ray.kill(actor)
        if self._started:
            ray.shutdown()


def _get(worker: int, answer: Any) -> Any:
    try:
        return ray.get(answer)
    except ray.exceptions.RayError as error:
        raise WorkerError(f"worker {worker} was lost") from error


def connect() -> bool:
    """Joins or starts a cluster, unless this process is in one. Returns whether it did."""
    if ray.is_initialized():
        return False
    address = os.environ.get("RAY_ADDRESS", "local")
    try:
        ray.init(
            address=address, include_dashboard=False, log_to_driver=False, logging_level="ERROR"
        )
    except ConnectionError as error:
        raise ConfigError(
            f"run.engine 'ray': there is no cluster at RAY_ADDRESS={address} ({error})"
        ) from error
    return True


# ---- bytes ----
def _save(tensors: Mapping[str, Tensor]) -> bytes:
    return save({name: tensor.detach().contiguous() for name, tensor in tensors.items()})


def _pack(contents: list[Content]) -> list[PackedContent]:
    return [(clients, stacked, _save(tensors)) for tensors, clients, stacked in contents]


def _unpack(packed: Iterable[PackedContent]) -> Mapping[str, Message]:
    return messages_of([Content(load(data), clients, stacked) for clients, stacked, data in packed])


def _packed(client: Client) -> PackedClient:
    graph = client.full_graph
    values = {f.name: getattr(graph, f.name) for f in fields(graph) if f.init}
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    rest = {name: value for name, value in values.items() if name not in tensors}
    return client.name, _save(isolate(tensors)), rest, client.inductive


# ---- in an actor ----
class Worker:
    """An actor: it holds clients and runs commands."""

    def __init__(
        self, method: Method, facts: Facts, policy: FaultPolicy, threads: int, *packed: PackedClient
    ):
        torch.set_num_threads(threads)
        clients = [
            Client(
                name,
                Graph(**isolate(load(tensors)), **rest),
                facts,
                inductive,
                responder_for(facts, name),
            )
            for name, tensors, rest, inductive in packed
        ]
        self.engine = loop.Engine(method, clients, policy)

    def execute(
        self, command: str, phase: str, clients: list[list[str]], *contents: bytes
    ) -> tuple[list[PackedContent], Failures]:
        """Runs a command with messages and the clients of each. Returns replies and failures."""
        sent = zip(clients, contents, strict=True)
        messages = _unpack((receivers, False, content) for receivers, content in sent)
        return execute(self.engine, command, phase, messages, _pack)
