"""Parts of bench/speed.py that measure rounds: FedAvg, every method, two workers, kernels."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, partial
from statistics import median
from typing import Any, NamedTuple

import speed_tools as tools
from speed_tools import (
    MODEL,
    PLAIN,
    Part,
    Row,
    Turns,
    Way,
    Worker,
    each_round,
    gaps,
    part,
    seconds_a_round,
    task,
)

import fedloom
from fedloom.core.registry import method_class, method_names
from fedloom.engines import engine_names

LOOP, STACKED = Way("loop", "loop"), Way("stacked", "stacked")
OLDER_STACKED = Way("stacked, before", "stacked", older=True)
# An engine with workers: the first of these that there is, or the one of `--parallel`.
PARALLEL = [name for name in ("stacked_processes", "processes") if name in engine_names()]
WORKERS = 2


def compared(*ways: Way) -> list[Way]:
    """Returns the ways that can run: all, or those of this code if there is no older one."""
    return [way for way in ways if not way.older or tools.before is not None]


# ---- a round of FedAvg against the plain loop ----


class Case(NamedTuple):
    """Rounds of FedAvg on a federation."""

    about: str
    make: Callable[[bool], fedloom.Federation]  # takes whether the federation is a tiny one
    rounds: int  # per turn
    turns: int
    epochs: int = 3


def cut(dataset: str, clients: int, partition: str, quick: bool) -> fedloom.Federation:
    """Divides a dataset among clients; a small synthetic graph if `quick`."""
    return fedloom.divide(
        fedloom.load("synthetic:nodes=300" if quick else dataset),
        3 if quick else clients,
        partition,
        0,
    )


CASES = {
    "cora10": Case("Cora, 10 clients by Louvain.", partial(cut, "cora", 10, "louvain"), 15, 7),
    "citeseer10": Case(
        "CiteSeer, 10 clients by Louvain.", partial(cut, "citeseer", 10, "louvain"), 10, 7
    ),
    "pubmed10": Case("PubMed, 10 clients by Louvain.", partial(cut, "pubmed", 10, "louvain"), 8, 5),
    "cora100": Case("Cora, 100 clients at random.", partial(cut, "cora", 100, "random"), 5, 5),
    "small1000": Case(
        "1,000 clients with synthetic graphs of 100 nodes.",
        lambda quick: fedloom.synthetic_clients(5 if quick else 1000),
        3,
        3,
    ),
    "arxiv": Case(
        "FedAvg on a graph of the size of ogbn-arxiv, 10 clients by Louvain, full batch, one epoch "
        "a round.",
        partial(cut, "synthetic-arxiv", 10, "louvain"),
        4,
        5,
        epochs=1,
    ),
}


@cache
def federation_of(case: str, quick: bool) -> fedloom.Federation:
    """Returns the federation of a case."""
    return CASES[case].make(quick)


@task
def one_turn(case: str, way: Row, quick: bool, rounds: int) -> float:
    """Returns the median seconds of some rounds of a case."""
    federation = federation_of(case, quick)
    return median(seconds_a_round(Way(**way), federation, rounds, CASES[case].epochs))


def measure(name: str, ways: list[Way], quick: bool, base: str) -> list[Row]:
    """Returns for each way its time and peak of memory, and its speed relative to a base."""
    case = CASES[name]
    with ExitStack() as stack:
        workers = {way.name: stack.enter_context(way.worker()) for way in ways}
        asked = {
            way.name: partial(
                workers[way.name].ask, "one_turn", case=name, way=way.asked(), quick=quick
            )
            for way in ways
        }
        for ask in asked.values():
            ask(rounds=2)  # the first turn makes the federation and warms up
        rounds = 3 if quick else case.rounds
        turns = Turns(
            {key: partial(ask, rounds=rounds) for key, ask in asked.items()},
            1 if quick else case.turns,
        )
        rows = turns.rows(base)
        for row in rows:
            row["peak_mb"] = workers[row["way"]].ask("peak")
            if row["way"] == STACKED.name and OLDER_STACKED.name in turns.took:
                row["gain"] = turns.faster(row["way"], OLDER_STACKED.name)
    return rows


def measured(name: str) -> Part:
    """Returns a case as a part that compares all ways on one thread."""

    def run(quick: bool) -> list[Row]:
        ways = compared(Way(PLAIN, PLAIN), LOOP, Way("wire", "wire"), OLDER_STACKED, STACKED)
        return measure(name, ways, quick, PLAIN)

    run.__name__, run.__doc__ = name, CASES[name].about
    return run


for name in CASES:
    if name != "arxiv":  # it follows with the other large graphs
        part(measured(name))


# ---- every method, stacked against loop ----

# Settings that keep the set-up short or that a method needs. The others are defaults.
OF_METHOD: dict[str, dict[str, Any]] = {
    "dense": {"epochs": 20, "finetune": 0, "batches": 5},
    "coboost": {"epochs": 20, "finetune": 0, "batches": 5},
    "opfgl": {"condense_steps": 100, "steps": 100},
    "fedgh": {"vgae_epochs": 5, "diffusion_epochs": 10, "contrast_epochs": 10},
    "fedsage+": {"generator_rounds": 5, "model": "sage-2x64"},
    "adafgl": {"personal": 5},
    "fedgen": {"model": "gcn-2x64+linear"},
    "gcfl+": {"model": "gin-2x64"},
    "fedstar": {"model": "gin-2x64"},
}


@cache
def federation_for(kind: str, quick: bool) -> fedloom.Federation:
    """Returns the federation for methods of a kind: "graph", "known" or "none" cross edges."""
    if kind == "graph":
        return fedloom.divide(
            fedloom.load("synthetic-graphs"), 3 if quick else 10, partition="uniform"
        )
    graph = fedloom.load("synthetic:nodes=300" if quick else "cora")
    return fedloom.divide(graph, 3 if quick else 10, cross_edges=kind)


@task
def method_turn(name: str, way: Row, quick: bool) -> float:
    """Returns the seconds of a round of a method, or of the whole run of a one-shot method."""
    chosen, cls = Way(**way), method_class(name)
    kind = "graph" if "node" not in cls.tasks else "known" if cls.uses_cross_edges else "none"
    federation = federation_for(kind, quick)
    bounds = next(f for f in cls.__dataclass_fields__.values() if f.name == "rounds").metadata
    one_shot = bounds["bounds"]["at most"] == 1
    rounds = 1 if one_shot else 4 if quick else 8
    settings = {"model": MODEL, "method": name, **OF_METHOD.get(name, {})}
    clock = [chosen.now()]
    fedloom.run(
        federation=federation,
        engine=chosen.engine,
        rounds=rounds,
        callbacks=lambda entry: clock.append(chosen.now()),
        **settings,
    )
    took = gaps(clock)
    return sum(took) if one_shot else median(took[2:])


@part
def methods(quick: bool) -> list[Row]:
    """A round of every method in the stacked engine, before and now, and in the loop engine.

    For one-shot methods it is the whole run. Cora, 10 clients by Louvain. Graph tasks: synthetic
    graphs.
    """
    ways = compared(LOOP, OLDER_STACKED, STACKED)
    rows = []
    with ExitStack() as stack:
        workers = {way.name: stack.enter_context(way.worker()) for way in ways}
        for name in ("fedavg", "fedproto") if quick else sorted(method_names()):
            asked = {
                way.name: partial(
                    workers[way.name].ask, "method_turn", name=name, way=way.asked(), quick=quick
                )
                for way in ways
            }
            turns = Turns(asked, 1 if quick else 3)
            if turns.faster("stacked", "loop") < 1.05 and not quick:  # too close: more turns
                turns = Turns(asked, 9)
            row = {"method": name, "load": turns.load, "ratio": turns.faster("stacked", "loop")}
            row |= {"loop_ms": turns.ms("loop"), "stacked_ms": turns.ms("stacked")}
            if OLDER_STACKED.name in turns.took:
                row["before_ms"] = turns.ms(OLDER_STACKED.name)
                row["gain"] = turns.faster("stacked", OLDER_STACKED.name)
            rows.append(row)
    return rows


# ---- two workers ----


@part
def workers(quick: bool) -> list[Row]:
    """A round of FedAvg with two workers, compared with the stacked engine, by wall time."""
    stacked = Way("stacked", "stacked", clock="wall")
    older = Way("processes, before", "processes", True, "wall", {"workers": WORKERS})
    ways = [stacked]
    if PARALLEL:
        ways.append(Way("workers", PARALLEL[0], False, "wall", {"workers": WORKERS}))
    rows = []
    for name in ("small1000",) if quick else ("pubmed10", "arxiv", "small1000"):
        found = measure(name, [*ways, *compared(older)], quick, "stacked")
        rows += [{"case": name, "engine": (PARALLEL or [""])[0], **row} for row in found]
    return rows


# ---- where the time goes ----


@part
def kernels(quick: bool) -> list[Row]:
    """The share of a round outside of tensor kernels, by torch's profiler.

    Wall time, as the profiler measures it. Cora, 10 clients by Louvain.
    """
    rows = []
    for engine in (PLAIN, "loop", "stacked"):
        with Worker() as worker:
            way = Way(engine, engine, clock="wall")
            row = worker.ask("profiled", way=way.asked(), quick=quick)
        rows.append({**row, "load": tools.load()})
    return rows


@task
def profiled(way: Row, quick: bool) -> Row:
    """Measures the time in aten's operators and the time of a round.

    The overhead of the profiler counts as outside of the operators.
    """
    from torch.profiler import ProfilerActivity, profile

    chosen, federation, rounds = Way(**way), federation_of("cora10", quick), 2 if quick else 10
    seconds_a_round(chosen, federation, 2)
    bare = median(seconds_a_round(chosen, federation, rounds + 1))
    trace = profile(activities=[ProfilerActivity.CPU])
    clock: list[float] = []

    def ended() -> None:  # profiles all rounds except the first
        clock.append(chosen.now())
        if len(clock) == 1:
            trace.start()
            clock[0] = chosen.now()
        elif len(clock) == rounds + 1:
            trace.stop()

    each_round(chosen, federation, rounds + 1, ended)
    inside = (
        sum(
            event.self_cpu_time_total
            for event in trace.key_averages()
            if event.key.startswith("aten::")
        )
        / 1e6
    )
    return {
        "way": chosen.name,
        "ms": 1000 * bare,
        "kernels_ms": 1000 * inside / rounds,
        "outside": 1 - inside / (clock[-1] - clock[0]),
    }
