"""How much memory a run will take, before it takes it.

What a node costs is found out by trying: a training step on a small piece of the federation, with the run's own model, features and mean
degree, leaves behind what is kept with a graph (adjacencies, smoothed features, ...) and shows what a step saves for its gradient. Both
grow with the graph, so the whole federation's share follows. What methods keep beyond graphs and models, such as pseudo-graphs or
structure matrices, is not foreseen.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fedloom._system import peak_memory
from fedloom.data.federation import Federation
from fedloom.data.graph import Graph
from fedloom.engines import has_workers
from fedloom.engines.stacked.engine import groups
from fedloom.errors import ConfigError

if TYPE_CHECKING:
    from fedloom.core.facts import Facts

PROBE_NODES = 256
MB = 2**20
# Bytes an edge takes while an adjacency is made of the edges: nine columns of whole numbers, ends, keys and their order.
SORTING = 72
# A model's own weights, its gradient, Adam's two moments; what it sends, as it arrives, and times its weight in the mean.
COPIES_AT_CLIENT, COPIES_AT_SERVER = 4, 3
# A step's saved tensors, against all that is held at its worst moment: gradients, what is made only to be added to something, and, about
# half of it, what the allocator leaves between blocks that differ in size from client to client (measured: 4 to 7).
STEP = 6.0
# A party's process in the flower engine, before it has computed anything: mostly PyTorch (measured: 250 to 340 MB).
PROCESS = 300 * MB
ADVICE = {
    "kept with the graphs": "fewer features or edges, or a model that keeps no smoothed features (gcn, appnp)",
    "a training step": "more clients with smaller graphs, a narrower model, or one that smooths features once (sgc, sign)",
    "building adjacencies": "more clients with smaller graphs",
    "models and messages": "a narrower model, fewer features, fewer clients, or run.participation below 1",
    "processes": "fewer clients, or an engine in which they share one (loop, stacked)",
}


@dataclass(frozen=True)
class Need:
    """What a run will take on top of what the process holds already: bytes by what they are for."""

    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.parts.values())

    @property
    def largest(self) -> str:
        """What takes the most."""
        return max(self.parts, key=lambda name: self.parts[name])


def predict(federation: Federation, facts: Facts, engine: str = "loop", workers: int = 0) -> Need:
    """Takes a federation, the facts of the run, and the engine with its workers (0 = as many as there are cores); gives what is needed."""
    graphs = federation.graphs
    at_once = (workers or os.cpu_count() or 1) if has_workers(engine) else 1
    size = dict(
        zip(federation.names, (graph.num_nodes + graph.num_edges for graph in graphs), strict=True)
    )
    # What clients who run in step compute with: their graphs once more, as one, and the steps of all at the same time.
    lockstep: list[tuple[str, ...]] = []
    if engine == "stacked":
        nodes = dict(zip(federation.names, (graph.num_nodes for graph in graphs), strict=True))
        lockstep = [names for names in groups(facts, nodes) if len(names) > 1]
    again = 0.0  # share of a graph that its client trains on a copy of
    if federation.inductive or federation.task == "graph":
        again = sum(int(g.train.sum()) for g in graphs) / max(sum(g.num_items for g in graphs), 1)
    kept = again * sum(sum(_reachable([graph.x, graph.edge_index]).values()) for graph in graphs)
    step = weights = 0.0
    for spec in set(facts.models):
        sizes = sorted(
            (size[client] for client in facts.clients if facts.model_of[client] == spec),
            reverse=True,
        )
        cost = _try(_piece(federation), facts, spec)
        together = [
            sum(size[client] for client in names if facts.model_of[client] == spec)
            for names in lockstep
        ]
        kept += cost.kept * (1 + again) * (sum(sizes) + sum(together))
        step = max(step, STEP * cost.saved * max(sum(sizes[:at_once]), *together, 0))
        weights += cost.weights * len(sizes) * (COPIES_AT_CLIENT + COPIES_AT_SERVER)
    parts = {
        "kept with the graphs": kept, "a training step": step, "building adjacencies": SORTING * max(size.values()),
        "models and messages": weights, "processes": len(graphs) * PROCESS if engine == "flower" else 0,
    }  # fmt: skip
    return Need({name: round(value) for name, value in parts.items()})


def require(need: Need) -> float:
    """Raises a ConfigError if this machine has less than the run needs; else gives the MB that the process will have held at most."""
    free = available()
    if free is not None and need.total > free:
        listing = ", ".join(
            f"{name} {value / MB:,.0f}"
            for name, value in sorted(need.parts.items(), key=lambda item: -item[1])
            if value
        )
        raise ConfigError(
            f"memory: this run needs about {need.total / MB:,.0f} MB more ({listing}), and {free / MB:,.0f} MB are available. "
            f"{need.largest.capitalize()} take{'s' if need.largest.startswith('a ') else ''} the most: try {ADVICE[need.largest]}"
        )
    return max(peak_memory(), _held_now() + need.total) / MB


def available() -> int | None:
    """Bytes that this process could still get: of the machine, or of the container if that allows less; None where nobody says."""
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
    """What control groups (version 2, else 1) leave of their limit; memory that only caches files can be had."""
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
    """Bytes that this process has in memory; its peak so far where nobody says."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return peak_memory()


# ---- what a node and an edge cost ----


@dataclass(frozen=True)
class Cost:
    """Bytes that a model needs: kept with a graph and saved by a step, for each node and edge of it; weights of the model itself."""

    kept: float
    saved: float
    weights: int


def _piece(federation: Federation) -> Graph:
    """A small graph with features of the federation's and its mean degree; edges at random."""
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
    everybody = torch.ones(items, dtype=torch.bool)
    y = torch.zeros(items, dtype=torch.int64)
    return Graph(
        x,
        torch.randint(n, (2, edges), generator=rng),
        y,
        federation.num_classes,
        train=everybody,
        batch=batch,
    )


def _try(graph: Graph, facts: Facts, spec: str) -> Cost:
    """A training step on the graph, and what it left behind."""
    net = facts.build(spec, "memory")
    saved: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    before = _reachable([graph, *net.parameters()])
    with saved_tensors_hooks(note, lambda tensor: tensor):
        loss = torch.nn.functional.cross_entropy(
            net(graph, torch.Generator().manual_seed(0)), graph.y
        )
    loss.backward()
    kept = _reachable(graph)
    beside = _reachable(saved)
    size = graph.num_nodes + graph.num_edges
    return Cost(
        sum(kept[place] for place in kept.keys() - before.keys()) / size,
        sum(beside[place] for place in beside.keys() - kept.keys() - before.keys()) / size,
        sum(p.numel() * p.element_size() for p in net.parameters()),
    )


def _reachable(thing: Any) -> dict[int, int]:
    """All memory of tensors and arrays that a thing holds: {address: bytes}, each once however often it is shared."""
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
