"""Workers on a Ray cluster, each with a share of the clients: for what outgrows one machine. The same bits as the loop, on equal machines.

A worker is an actor with a group of clients, not one per client. It gets their graphs once, and then messages, all as safetensors bytes;
what goes to several workers is put into Ray's object store once. Ray itself carries the method's class and settings, so that a method from
a user's own file works too; fedloom must be installed on every machine, in the same version.

The environment variable RAY_ADDRESS says which cluster ("auto": the one that runs on this machine). Without it, one of this machine alone
is started, and ended with the engine. Who has called `ray.init` before stays in that cluster.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from fedloom.core.absence import FaultPolicy
from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.core.message import Message, isolate, unflatten
from fedloom.core.method import Method
from fedloom.data.graph import Graph
from fedloom.engines import loop
from fedloom.engines._workers import Content, Failures, WorkerEngine, WorkerError, obey
from fedloom.errors import ConfigError
from fedloom.privacy.secure_aggregation import responder_for

os.environ.setdefault(
    "RAY_USAGE_STATS_ENABLED", "0"
)  # read at the import: nothing is reported to anybody
os.environ.setdefault(
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"
)  # as Ray's own warning asks: leave the environment as it is
try:
    import ray
    from ray import cloudpickle
except ImportError as error:
    raise ConfigError("run.engine 'ray' needs Ray: pip install 'fedloom[ray]'") from error

PackedClient = tuple[
    str, bytes, dict[str, Any], bool
]  # a client's name, its graph's tensors, what else the graph has, whether it is inductive
Parcel = tuple[list[str], bytes]  # who gets or sends it, and its message


class Engine(WorkerEngine):
    """Makes its actors when it is made, and ends them when it is closed."""

    def __init__(
        self,
        method: Method,
        clients: Iterable[Client],
        policy: FaultPolicy = FaultPolicy(),
        workers: int = 0,
    ):
        self._started = connect()
        self._actors: list[Any] = []
        self._answers: dict[int, Any] = {}  # what will be there when a worker has answered
        super().__init__(method, clients, policy, workers)

    def cores(self) -> int:
        """The cores of the whole cluster."""
        return int(ray.cluster_resources().get("CPU", 1))

    def start(self, method: Method, groups: list[list[Client]]) -> None:
        """Makes an actor for each group, spread over the machines, and waits for them."""
        for cls in type(method).__mro__:
            if cls.__module__.partition(".")[0] not in {"fedloom", *sys.stdlib_module_names}:
                cloudpickle.register_pickle_by_value(
                    sys.modules[cls.__module__]
                )  # other processes cannot import it
        actor = ray.remote(Worker).options(scheduling_strategy="SPREAD")
        for group in groups:
            packed = (ray.put(_packed(c)) for c in group)
            self._actors.append(
                actor.remote(method, group[0].facts, self.policy, self.threads, *packed)
            )
        for k, made in enumerate(self._actors):
            _get(k, made.__ray_ready__.remote())

    def share_out(self, contents: list[Content]) -> dict[int, list[tuple[list[str], Any]]]:
        """Puts what goes to several workers into the object store; gives each one's messages, and whose they are."""
        shares: dict[int, list[tuple[list[str], Any]]] = {}
        for clients, content in _pack(contents):
            homes = sorted({self.home[c] for c in clients})
            sent = ray.put(content) if len(homes) > 1 else content
            for k in homes:
                shares.setdefault(k, []).append(([c for c in clients if self.home[c] == k], sent))
        return shares

    def send(self, worker: int, order: str, phase: str, share: list[tuple[list[str], Any]]) -> None:
        """Orders a worker to `obey`; whether it is gone shows when it should have answered."""
        whose, sent = [clients for clients, _ in share], (content for _, content in share)
        self._answers[worker] = self._actors[worker].obey.remote(order, phase, whose, *sent)

    def ready(self, workers: list[int], seconds: float | None) -> list[int]:
        """Waits until some of these workers have answered or are gone; gives which."""
        heard, _ = ray.wait([self._answers[k] for k in workers], num_returns=1, timeout=seconds)
        return [k for k in workers if self._answers[k] in heard]

    def receive(self, worker: int) -> tuple[dict[str, Message], Failures]:
        """What a worker that is ready has answered. WorkerError if it is gone."""
        parcels, failures = _get(worker, self._answers.pop(worker))
        return _unpack(parcels), failures

    def stop(self) -> None:
        """Ends the actors, and Ray if it was started here."""
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
    """Joins or starts a cluster unless this process is in one already; tells whether it did."""
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


# ---- as bytes ----
def _save(tensors: Mapping[str, Tensor]) -> bytes:
    return save({name: tensor.detach().contiguous() for name, tensor in tensors.items()})


def _pack(contents: list[Content]) -> list[Parcel]:
    return [(clients, _save(flat)) for flat, clients in contents]


def _unpack(parcels: Iterable[Parcel]) -> dict[str, Message]:
    read: dict[str, Message] = {}
    for clients, content in parcels:
        read |= dict.fromkeys(clients, unflatten(load(content)))
    return read


def _packed(client: Client) -> PackedClient:
    graph = client.full_graph
    values = {f.name: getattr(graph, f.name) for f in fields(graph) if f.init}
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    rest = {name: value for name, value in values.items() if name not in tensors}
    return (
        client.name,
        _save(isolate(tensors)),
        rest,
        client.graph.num_items < graph.num_items,
    )  # inductive: some items are absent


# ---- at the other end ----
class Worker:
    """What an actor does: it holds its clients and obeys."""

    def __init__(
        self, method: Method, facts: Facts, policy: FaultPolicy, threads: int, *packed: PackedClient
    ):
        torch.set_num_threads(threads)
        graphs = [
            (name, Graph(**isolate(load(tensors)), **rest), inductive)
            for name, tensors, rest, inductive in packed
        ]
        clients = [
            Client(name, graph, facts, inductive, responder_for(facts))
            for name, graph, inductive in graphs
        ]
        self.engine = loop.Engine(method, clients, policy)

    def obey(
        self, order: str, phase: str, whose: list[list[str]], *contents: bytes
    ) -> tuple[list[Parcel], Failures]:
        """Takes messages and whose each is, gives the clients' answers, and how clients have failed."""
        return obey(self.engine, order, phase, _unpack(zip(whose, contents, strict=True)), _pack)
