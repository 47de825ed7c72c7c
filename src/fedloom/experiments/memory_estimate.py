"""Memory estimate: predicts the memory of a run before it starts.

The cost of a node is measured: a training step on a small graph, with the run's own model, features
and mean degree, shows what is kept with a graph (adjacencies, smoothed features, ...) and what a
step saves for its gradient. Both grow with the graph, so the cost of the whole federation follows.
The estimate does not include what methods keep beyond graphs and models, such as pseudo-graphs or
structure matrices.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fedloom._system import forking, peak_memory
from fedloom.data.federation import Federation
from fedloom.data.graph import Graph
from fedloom.engines import forks, has_workers, in_lockstep
from fedloom.engines.stacked.engine import groups
from fedloom.errors import ConfigError

if TYPE_CHECKING:
    from fedloom.core.facts import Facts

PROBE_NODES = 256
MB = 2**20
# Bytes per edge while an adjacency is built: nine columns of whole numbers (ends, keys, order).
SORTING = 72
# At the client: weights, gradient, Adam's two moments, and the weights of the best round. At the
# server: a message, the message as it arrives, and the message times its weight in the mean.
COPIES_AT_CLIENT, COPIES_AT_SERVER = 5, 3
# The peak of a step divided by its saved tensors. The peak includes gradients, temporary results,
# and, about half of it, gaps that the allocator leaves between blocks whose sizes differ from
# client to client (measured: 4 to 7).
STEP = 6.0
# A party's process in the flower engine before it computes anything: mostly PyTorch (measured: 250
# to 340 MB).
PROCESS = 300 * MB
ADVICE = {
    "kept with the graphs": (
        "fewer features or edges, or a model that keeps no smoothed features (gcn, appnp)"
    ),
    "a training step": (
        "more clients with smaller graphs, a narrower model, or one that smooths features once "
        "(sgc, sign)"
    ),
    "building adjacencies": "more clients with smaller graphs",
    "models and messages": (
        "a narrower model, fewer features, fewer clients, or run.participation below 1"
    ),
    "processes": "fewer clients, or an engine in which they share a process (loop, stacked)",
}


class CannotForkError(ConfigError):
    """The engine forks its workers, and a fork of this process cannot compute gradients."""


@dataclass(frozen=True)
class Need:
    """The memory that a run adds to what the process holds already: {purpose: bytes}."""

    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        """The sum in bytes."""
        return sum(self.parts.values())

    @property
    def largest(self) -> str:
        """The purpose that takes the most."""
        return max(self.parts, key=lambda name: self.parts[name])


def predict(federation: Federation, facts: Facts, engine: str = "loop", workers: int = 0) -> Need:
    """Returns the memory that a run needs.

    Args:
        federation: The clients' graphs.
        facts: What every party knows.
        engine: The engine's name.
        workers: Its worker processes (0 = the number of cores).
    """
    graphs = federation.graphs
    at_once = (workers or os.cpu_count() or 1) if has_workers(engine) else 1
    size = dict(
        zip(federation.names, (graph.num_nodes + graph.num_edges for graph in graphs), strict=True)
    )
    # Clients of a group have their graphs a second time, as one graph, and step at the same time.
    lockstep: list[tuple[str, ...]] = []
    if in_lockstep(engine):
        nodes = dict(zip(federation.names, (graph.num_nodes for graph in graphs), strict=True))
        lockstep = groups(facts, nodes)
    again = 0.0  # share of a graph that its client copies for training
    if federation.inductive or federation.task == "graph":
        again = sum(int(g.train.sum()) for g in graphs) / max(sum(g.num_items for g in graphs), 1)
    kept = again * sum(sum(_reachable([graph.x, graph.edge_index]).values()) for graph in graphs)
    step = weights = 0.0
    for spec in set(facts.models):
        sizes = sorted(
            (size[client] for client in facts.clients if facts.model_of[client] == spec),
            reverse=True,
        )
        piece = _piece(federation)
        cost = (
            _try_in_fork(engine, piece, facts, spec) if forks(engine) else _try(piece, facts, spec)
        )
        groups_of_spec = sorted(
            (
                sum(size[client] for client in names if facts.model_of[client] == spec)
                for names in lockstep
            ),
            reverse=True,
        )
        kept += cost.kept * (1 + again) * (sum(sizes) + sum(groups_of_spec))
        stepping = max(sum(sizes[:at_once]), sum(groups_of_spec[:at_once]))
        step = max(step, STEP * cost.saved * stepping)
        weights += cost.weights * len(sizes) * (COPIES_AT_CLIENT + COPIES_AT_SERVER)
    parts = {
        "kept with the graphs": kept,
        "a training step": step,
        "building adjacencies": SORTING * max(size.values()),
        "models and messages": weights,
        "processes": len(graphs) * PROCESS if engine == "flower" else 0,
    }
    return Need({name: round(value) for name, value in parts.items()})


def require(need: Need) -> float:
    """Returns the predicted peak of the process in MB.

    Raises a ConfigError if less memory is available than the run needs.
    """
    free = available()
    if free is not None and need.total > free:
        listing = ", ".join(
            f"{name} {value / MB:,.0f}"
            for name, value in sorted(need.parts.items(), key=lambda item: -item[1])
            if value
        )
        verb = "takes" if need.largest.startswith("a ") else "take"
        raise ConfigError(
            f"memory: this run needs about {need.total / MB:,.0f} MB more ({listing}), "
            f"and {free / MB:,.0f} MB are available. "
            f"{need.largest.capitalize()} {verb} the most: try {ADVICE[need.largest]}"
        )
    return max(peak_memory(), _held_now() + need.total) / MB


def available() -> int | None:
    """Returns the bytes that the machine, or the container, still has for this process.

    Returns None where the system does not say.
    """
    found = [
        value
        for value in (_machine_has(Path("/proc/meminfo")), _container_has(Path("/sys/fs/cgroup")))
        if value is not None
    ]
    return min(found, default=None)


def _machine_has(meminfo: Path) -> int | None:
    if not meminfo.exists():
        return None
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


def _container_has(groups: Path) -> int | None:
    """Returns what the limit of the control group (version 2, else 1) leaves, or None.

    Memory that only caches files counts as available.
    """
    first, second = groups / "memory", groups
    for folder, limit, usage, cache in (
        (second, "memory.max", "memory.current", "inactive_file"),
        (first, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        if (folder / limit).exists() and (most := (folder / limit).read_text().strip()) != "max":
            cached = dict(
                line.split() for line in (folder / "memory.stat").read_text().splitlines()
            )[cache]
            return int(most) - int((folder / usage).read_text()) + int(cached)
    return None


def _held_now() -> int:
    """Returns the bytes that this process has in memory; its peak where the system does not say."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return peak_memory()


# ---- the cost of a node and an edge ----


@dataclass(frozen=True)
class Cost:
    """The bytes that a model needs.

    Attributes:
        kept: Kept with a graph, per node and edge.
        saved: Saved by a step, per node and edge.
        weights: The size of the weights.
    """

    kept: float
    saved: float
    weights: int


def _piece(federation: Federation) -> Graph:
    """Returns a small graph with features and mean degree of the federation, and random edges."""
    graphs, missing, rows = federation.graphs, PROBE_NODES, []
    for graph in graphs:
        rows.append(graph.x[:missing])
        missing -= len(rows[-1])
        if not missing:
            break
    x = torch.cat(rows)
    n, rng = len(x), torch.Generator().manual_seed(0)
    edges = round(n * sum(g.num_edges for g in graphs) / sum(g.num_nodes for g in graphs))
    batch = None if federation.task == "node" else torch.arange(n) // 16
    items = n if batch is None else int(batch[-1]) + 1
    train = torch.ones(items, dtype=torch.bool)
    y = torch.zeros(items, dtype=torch.int64)
    return Graph(
        x,
        torch.randint(n, (2, edges), generator=rng),
        y,
        federation.num_classes,
        train=train,
        batch=batch,
    )


def _try(graph: Graph, facts: Facts, spec: str) -> Cost:
    """Runs a training step on the graph and returns its cost."""
    model = facts.build(spec, "memory")
    saved: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    before = _reachable([graph, *model.parameters()])
    with saved_tensors_hooks(note, lambda tensor: tensor):
        loss = torch.nn.functional.cross_entropy(
            model(graph, torch.Generator().manual_seed(0)), graph.y
        )
    loss.backward()
    kept = _reachable(graph)
    of_step = _reachable(saved)
    size = graph.num_nodes + graph.num_edges
    return Cost(
        sum(kept[place] for place in kept.keys() - before.keys()) / size,
        sum(of_step[place] for place in of_step.keys() - kept.keys() - before.keys()) / size,
        sum(p.numel() * p.element_size() for p in model.parameters()),
    )


def _try_in_fork(engine: str, graph: Graph, facts: Facts, spec: str) -> Cost:
    """`_try` in a forked process, as the workers of the engine will be.

    Where PyTorch starts threads for gradients, forks of a process that has trained cannot train
    (docs/install.md). So this process must not. Raises a CannotForkError if it has.
    """
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe(duplex=False)
    process = fork.Process(target=_report, args=(there, graph, facts, spec), daemon=True)
    with forking():
        process.start()
    there.close()
    try:
        found = json.loads(here.recv_bytes())
    except EOFError:
        process.join()
        found = f"it ended with exit code {process.exitcode}"
    finally:
        here.close()
    process.join()
    if isinstance(found, dict):
        return Cost(**found)
    _try(graph, facts, spec)  # an error of the model has nothing to do with the fork
    raise CannotForkError(
        f"run.engine {engine!r}: a forked process cannot train here ({found}); use stacked, or "
        "start the run in a new Python process"
    )


def _report(pipe: Connection, graph: Graph, facts: Facts, spec: str) -> None:
    torch.set_num_threads(1)  # the threads of the parent are not here
    try:
        found: object = asdict(_try(graph, facts, spec))
    except Exception as error:  # noqa: BLE001  (the parent tries it, too)
        found = f"{type(error).__name__}: {error}"
    pipe.send_bytes(json.dumps(found).encode())


def _reachable(thing: Any) -> dict[int, int]:
    """Returns the memory of all tensors and arrays that an object holds: {address: bytes}.

    Shared memory counts once.
    """
    found: dict[int, int] = {}
    todo, seen = [thing], set()
    while todo:
        each = todo.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, Tensor):
            found[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
        elif isinstance(each, np.ndarray) and each.base is None:
            found[each.ctypes.data] = each.nbytes
        elif isinstance(each, np.ndarray):
            todo.append(each.base)
        elif isinstance(each, dict):
            todo += each.values()
        elif isinstance(each, list | tuple | set | frozenset):
            todo += each
        elif hasattr(each, "__dict__"):
            todo += vars(each).values()
    return found
