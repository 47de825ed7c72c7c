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

from fedloom.engines import loop
from fedloom.engines._groups import Content, Failure, Groups, Outcome, WorkerError, describe, distinct, obey
from fedloom.errors import ConfigError
from fedloom.graph import Graph
from fedloom.message import Message, isolate, unflatten
from fedloom.method import Method
from fedloom.party import Client, Facts

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read at the import: nothing is reported to anybody
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # as Ray's own warning asks: leave the environment as it is
try:
    import ray
    from ray import cloudpickle
except ImportError as error:
    raise ConfigError("run.engine 'ray' needs Ray: pip install 'fedloom[ray]'") from error

Holding = tuple[str, bytes, dict[str, Any], bool]  # a client's name, its graph's tensors, what else the graph has, whether it is inductive
Parcel = tuple[list[str], bytes]  # who gets or sends it, and its message


class Engine(Groups):
    """Makes its actors when it is made, and ends them when it is closed."""

    def __init__(self, method: Method, clients: Iterable[Client], workers: int = 0):
        self._started = _connect()
        self._actors: list[Any] = []
        super().__init__(method, clients, workers)

    def cores(self) -> int:
        """The cores of the whole cluster."""
        return int(ray.cluster_resources().get("CPU", 1))

    def start(self, method: Method, groups: list[list[Client]]) -> None:
        """Makes an actor for each group, spread over the machines, and waits for them."""
        for cls in type(method).__mro__:
            if cls.__module__.partition(".")[0] not in {"fedloom", *sys.stdlib_module_names}:
                cloudpickle.register_pickle_by_value(sys.modules[cls.__module__])  # other processes cannot import it
        actor = ray.remote(Worker).options(scheduling_strategy="SPREAD")
        for group in groups:
            self._actors.append(actor.remote(method, group[0].facts, self.threads, *(ray.put(_holding(c)) for c in group)))
        for k, made in enumerate(self._actors):
            self._get(k, made.__ray_ready__.remote())

    def exchange(self, order: str, phase: str, contents: list[Content]) -> list[Outcome]:
        """Orders the workers of those who get something to `obey`, gives what came of it."""
        shares: dict[int, list[tuple[list[str], Any]]] = {}
        for clients, content in _pack(contents):
            homes = sorted({self.home[c] for c in clients})
            sent = ray.put(content) if len(homes) > 1 else content
            for k in homes:
                shares.setdefault(k, []).append(([c for c in clients if self.home[c] == k], sent))
        under_way = {
            k: self._actors[k].obey.remote(order, phase, [clients for clients, _ in share], *(sent for _, sent in share))
            for k, share in shares.items()
        }
        outcomes = {k: self._get(k, answer) for k, answer in under_way.items()}
        return [(k, _unpack(parcels), failure) for k, (parcels, failure) in outcomes.items()]

    def stop(self) -> None:
        """Ends the actors, and Ray if it was started here."""
        for actor in self._actors:
            ray.kill(actor)
        if self._started:
            ray.shutdown()

    def _get(self, k: int, answer: Any) -> Any:
        try:
            return ray.get(answer)
        except ray.exceptions.RayError as error:
            held = ", ".join(c for c in self.names if self.home[c] == k)
            raise WorkerError(f"worker {k} was lost; it had clients {held}: {error}") from None


def _connect() -> bool:
    """Joins or starts a cluster unless this process is in one already; tells whether it did."""
    if ray.is_initialized():
        return False
    address = os.environ.get("RAY_ADDRESS", "local")
    try:
        ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    except ConnectionError as error:
        raise ConfigError(f"run.engine 'ray': there is no cluster at RAY_ADDRESS={address} ({error})") from error
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


def _holding(client: Client) -> Holding:
    graph = client.full_graph
    values = {f.name: getattr(graph, f.name) for f in fields(graph) if f.init}
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    rest = {name: value for name, value in values.items() if name not in tensors}
    return client.name, _save(isolate(tensors)), rest, client.graph.num_items < graph.num_items  # inductive: some items are absent


# ---- at the other end ----
class Worker:
    """What an actor does: it holds its clients and obeys."""

    def __init__(self, method: Method, facts: Facts, threads: int, *holdings: Holding):
        torch.set_num_threads(threads)
        graphs = [(name, Graph(**isolate(load(tensors)), **rest), inductive) for name, tensors, rest, inductive in holdings]
        self.engine = loop.Engine(method, [Client(name, graph, facts, inductive) for name, graph, inductive in graphs])

    def obey(self, order: str, phase: str, whose: list[list[str]], *contents: bytes) -> tuple[list[Parcel], Failure | None]:
        """Takes messages and whose each is, gives the clients' answers, or how it failed."""
        try:
            return _pack(distinct(obey(self.engine, order, phase, _unpack(zip(whose, contents, strict=True))))), None
        except Exception as error:  # noqa: BLE001  (it is raised where the phase was asked for)
            return [], describe(error)
