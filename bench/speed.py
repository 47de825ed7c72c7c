"""Measures speed, memory and growth: every number of docs/benchmarks.md.

    python bench/speed.py                            all parts (an hour or two on a quiet machine)
    python bench/speed.py cora10 startup             only these parts; the others keep their results
    python bench/speed.py --write docs/benchmarks.md all parts, then writes the page
    python bench/speed.py none --write PAGE          writes the page from the stored results
    python bench/speed.py --quick --keep FILE        all parts on tiny graphs, to test the script

bench/results/benchmarks.jsonl stores the results, one JSON line for each part. Times are wall times
on one thread. Ways that are compared take turns, and a ratio is the median over the turns, so that
other load disturbs all ways alike. The plain loop and each engine have their own process. So has
each measurement of memory. There are no instruction counts: virtual machines rarely have the
counters, and importing torch under valgrind takes longer than all parts of this script.
"""

import argparse
import datetime
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

import fedloom
from fedloom.core.registry import method_class, method_names
from fedloom.engines import engine_names

HERE = Path(__file__).resolve().parent
KEPT = HERE / "results" / "benchmarks.jsonl"
Row = dict[str, Any]
Part = Callable[[bool], list[Row]]
PARTS: dict[str, Part] = {}  # in the order of the page
JOBS: dict[str, Callable[..., Row]] = {}  # functions that run in their own process
ENGINES = [name for name in ("loop", "wire", "stacked") if name in engine_names()]
FASTEST = ENGINES[-1] if "stacked" in ENGINES else "loop"
MODEL = "gcn-2x64"
PLAIN = "plain"


def part(function: Part) -> Part:
    """Decorator that registers a part of the benchmarks under its name.

    A part takes whether to be quick, and returns rows for the page.
    """
    PARTS[function.__name__] = function
    return function


def job(function: Callable[..., Row]) -> Callable[..., Row]:
    """Decorator that runs calls in a new process, with its own imports and peak of memory."""
    JOBS[function.__name__] = function

    def call(**arguments: Any) -> Row:
        command = [
            sys.executable,
            str(HERE / "speed.py"),
            "--job",
            function.__name__,
            json.dumps(arguments),
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        return {**arguments, **json.loads(done.stdout.splitlines()[-1])}

    return call


# ---- tools for measuring ----


def each_round(
    way: str,
    federation: fedloom.Federation,
    rounds: int,
    ended: Callable[[], None],
    epochs: int = 3,
    **settings: Any,
) -> None:
    """Runs FedAvg, or the method in `settings`, and calls `ended` after every round.

    Args:
        way: "plain" for the plain loop, or the name of an engine.
        federation: The federation.
        rounds: The number of rounds.
        ended: Is called after every round.
        epochs: The epochs in a round.
        settings: Further settings of `fedloom.run`.
    """
    if way == PLAIN:
        import plain

        for _ in plain.fedavg(federation, rounds, epochs):
            ended()
        return
    settings = {"method": "fedavg", "model": MODEL, "epochs": epochs, **settings}
    fedloom.run(
        federation=federation,
        engine=way,
        rounds=rounds,
        callbacks=lambda entry: ended(),
        **settings,
    )


def seconds_a_round(
    way: str, federation: fedloom.Federation, rounds: int, epochs: int = 3, **settings: Any
) -> list[float]:
    """Returns the seconds of every round except the first. Set-up does not count."""
    clock: list[float] = []
    each_round(
        way, federation, rounds, lambda: clock.append(time.perf_counter()), epochs, **settings
    )
    return gaps(clock)


def gaps(clock: Sequence[float]) -> list[float]:
    """Returns the differences between successive readings of a clock."""
    return [after - before for before, after in pairwise(clock)]


def in_turns(ways: dict[str, Callable[[], float]], turns: int, base: str) -> list[Row]:
    """Calls all ways in turns.

    Returns for each way its median in ms, and the median over turns of its speed relative to
    `base`.
    """
    took: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(turns):
        for name, way in ways.items():
            took[name].append(way())
    ratio = {
        name: median(b / t for b, t in zip(took[base], times, strict=True))
        for name, times in took.items()
    }
    return [
        {"way": name, "ms": 1000 * median(times), "ratio": ratio[name]}
        for name, times in took.items()
    ]


def memory(field: str) -> float:
    """Returns the memory of this process in MB.

    "VmRSS" is the current memory, "VmHWM" the peak since the last `forget_peak`.
    """
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(field + ":")
    )
    return int(line.split()[1]) / 1024


def forget_peak() -> None:
    """Resets the peak of memory."""
    Path("/proc/self/clear_refs").write_text("5")


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Returns the exponent k of y ~ x^k, by least squares of logarithms."""
    lx, ly = [math.log(v) for v in x], [math.log(v) for v in y]
    mx, my = sum(lx) / len(lx), sum(ly) / len(ly)
    return sum((a - mx) * (b - my) for a, b in zip(lx, ly, strict=True)) / sum(
        (a - mx) ** 2 for a in lx
    )


# ---- a round of FedAvg against the plain loop ----


class Turns:
    """A process that measures the rounds of a case in one way, on request.

    Each way has its own process: fedloom's settings of the C allocator must not help the plain
    loop.
    """

    def __init__(self, case: str, way: str, quick: bool):
        command = [
            sys.executable,
            str(HERE / "speed.py"),
            "--turns",
            case,
            way,
            *(["--quick"] if quick else []),
        ]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def answer(self) -> Row:
        """Returns the next line of the process."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            command = " ".join(map(str, self.process.args))  # type: ignore[arg-type]
            raise RuntimeError(f"{command} has ended with exit code {self.process.wait()}")
        return json.loads(line)

    def seconds(self) -> float:
        """Runs one more turn. Returns the median of its rounds."""
        assert self.process.stdin is not None
        print("go", file=self.process.stdin, flush=True)
        return self.answer()["seconds"]

    def end(self) -> float:
        """Ends the process. Returns its peak in MB."""
        last, _ = self.process.communicate()  # closes its input, so it prints its last line
        return json.loads(last)["peak_mb"]


def take_turns(case: str, way: str, quick: bool) -> None:
    """Runs in the process of `Turns`: measures a turn for each line of its input."""
    federation, rounds, epochs = (
        CASES[case].make(quick),
        3 if quick else CASES[case].rounds,
        CASES[case].epochs,
    )
    seconds_a_round(way, federation, 2, epochs)
    print(json.dumps({"warm": True}), flush=True)
    for _ in sys.stdin:
        print(
            json.dumps({"seconds": median(seconds_a_round(way, federation, rounds, epochs))}),
            flush=True,
        )
    print(json.dumps({"peak_mb": memory("VmHWM")}))


class Case(NamedTuple):
    """Rounds of FedAvg on a federation, with the plain loop and every engine in turns."""

    about: str
    make: Callable[[bool], fedloom.Federation]  # takes whether the federation is a tiny one
    rounds: int  # per turn
    turns: int
    epochs: int = 3

    def measure(self, name: str, quick: bool) -> list[Row]:
        """Returns for each way its median in ms, its speed relative to the plain loop, its peak."""
        workers = {way: Turns(name, way, quick) for way in (PLAIN, *ENGINES)}
        for worker in workers.values():
            worker.answer()  # waits for its warm-up
        rows = in_turns(
            {way: worker.seconds for way, worker in workers.items()},
            1 if quick else self.turns,
            PLAIN,
        )
        return [{**row, "peak_mb": workers[row["way"]].end()} for row in rows]


def cut(dataset: str, clients: int, partition: str, quick: bool) -> fedloom.Federation:
    """Divides a dataset among clients; a small synthetic graph if `quick`."""
    return fedloom.divide(
        fedloom.load("synthetic:nodes=300" if quick else dataset),
        3 if quick else clients,
        partition,
        0,
    )


CASES = {
    "cora10": Case(
        "FedAvg, Cora over 10 clients by Louvain.", partial(cut, "cora", 10, "louvain"), 15, 7
    ),
    "citeseer10": Case(
        "FedAvg, CiteSeer over 10 clients by Louvain.",
        partial(cut, "citeseer", 10, "louvain"),
        10,
        7,
    ),
    "pubmed10": Case(
        "FedAvg, PubMed over 10 clients by Louvain.", partial(cut, "pubmed", 10, "louvain"), 8, 5
    ),
    "cora100": Case(
        "FedAvg, Cora over 100 clients at random.", partial(cut, "cora", 100, "random"), 5, 5
    ),
    "small1000": Case(
        "FedAvg, 1,000 clients with synthetic graphs of 100 nodes.",
        lambda quick: fedloom.synthetic_clients(5 if quick else 1000),
        3,
        3,
    ),
    "arxiv": Case(
        "FedAvg on a graph of ogbn-arxiv's size over 10 clients by Louvain, full batch, "
        "one epoch a round.",
        partial(cut, "synthetic-arxiv", 10, "louvain"),
        4,
        5,
        epochs=1,
    ),
}


def measured(name: str) -> Part:
    """Returns a case as a part."""

    def run(quick: bool) -> list[Row]:
        return CASES[name].measure(name, quick)

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


def whole_or_round(way: str, federation: fedloom.Federation, name: str, rounds: int) -> float:
    """Returns the seconds of a round of a method, or of the whole run of a one-shot method."""
    cls = method_class(name)
    one_shot = (
        next(f for f in cls.__dataclass_fields__.values() if f.name == "rounds").metadata["bounds"][
            "at most"
        ]
        == 1
    )
    settings = {
        "model": MODEL,
        "method": name,
        "engine": way,
        "rounds": 1 if one_shot else rounds,
        **OF_METHOD.get(name, {}),
    }
    clock = [time.perf_counter()]
    fedloom.run(
        federation=federation,
        callbacks=lambda entry: clock.append(time.perf_counter()),
        **settings,
    )
    took = gaps(clock)
    return sum(took) if one_shot else median(took[2:])


@part
def methods(quick: bool) -> list[Row]:
    """A round of every method: the stacked engine compared with the loop engine.

    Cora, 10 clients by Louvain. Graph tasks: synthetic graphs.
    """
    if "stacked" not in ENGINES:
        return []
    kept: dict[str, fedloom.Federation] = {}
    rows = []
    for name in ("fedavg", "fedproto") if quick else sorted(method_names()):
        cls = method_class(name)
        kind = "graph" if "node" not in cls.tasks else "known" if cls.uses_cross_edges else "none"
        if kind not in kept:
            graph = fedloom.load(
                "synthetic-graphs"
                if kind == "graph"
                else "synthetic:nodes=300"
                if quick
                else "cora"
            )
            cutting = {"partition": "uniform"} if kind == "graph" else {"cross_edges": kind}
            kept[kind] = fedloom.divide(graph, 3 if quick else 10, **cutting)
        ways = {
            way: lambda w=way, n=name, k=kind: whole_or_round(w, kept[k], n, 4 if quick else 8)
            for way in ("loop", "stacked")
        }
        loop, stacked = in_turns(ways, 1 if quick else 3, "loop")
        if stacked["ratio"] < 1.05 and not quick:  # too close: measured again with more turns
            loop, stacked = in_turns(ways, 9, "loop")
        rows.append(
            {
                "method": name,
                "loop_ms": loop["ms"],
                "stacked_ms": stacked["ms"],
                "ratio": stacked["ratio"],
            }
        )
    return rows


# ---- where the time goes ----


@part
def kernels(quick: bool) -> list[Row]:
    """The share of a round outside of tensor kernels, by torch's profiler.

    Cora, 10 clients by Louvain.
    """
    federation = cut("cora", 10, "louvain", quick)
    return [profiled(way, federation, 2 if quick else 10) for way in (PLAIN, *ENGINES)]


def profiled(way: str, federation: fedloom.Federation, rounds: int) -> Row:
    """Measures the time in aten's operators and the wall time of a round.

    The overhead of the profiler counts as outside of the operators.
    """
    from torch.profiler import ProfilerActivity, profile

    seconds_a_round(way, federation, 2)
    bare = median(seconds_a_round(way, federation, rounds + 1))
    trace = profile(activities=[ProfilerActivity.CPU])
    clock: list[float] = []

    def ended() -> None:  # profiles all rounds except the first
        clock.append(time.perf_counter())
        if len(clock) == 1:
            trace.start()
            clock[0] = time.perf_counter()
        elif len(clock) == rounds + 1:
            trace.stop()

    each_round(way, federation, rounds + 1, ended)
    inside = (
        sum(
            event.self_cpu_time_total
            for event in trace.key_averages()
            if event.key.startswith("aten::")
        )
        / 1e6
    )
    return {
        "way": way,
        "ms": 1000 * bare,
        "kernels_ms": 1000 * inside / rounds,
        "outside": 1 - inside / (clock[-1] - clock[0]),
    }


# ---- start-up ----


@part
def startup(quick: bool) -> list[Row]:
    """Seconds of `fedloom --help`, of `fedloom run` until its first round ends, and of imports.

    The run is on Cora.
    """
    data = ["--dataset", "synthetic:nodes=300", "--partition", "random"] if quick else []
    times = range(1 if quick else 7)
    helped = [_until("", "--help") for _ in times]
    ran = [_until("round 1 of 10", "run", "--rounds", "10", *data) for _ in times]
    commands = {"fedloom --help": helped, "fedloom run, first round done": ran}
    rows: list[Row] = [
        {"what": what, "seconds": median(took), "least": min(took)}
        for what, took in commands.items()
    ]
    spent: dict[str, float] = defaultdict(float)
    with tempfile.TemporaryDirectory() as folder:
        printed = _fedloom(
            "run", "--rounds", "1", *data, "--out", folder, options=("-X", "importtime")
        ).communicate()[1]
    for line in printed.splitlines():
        if line.startswith("import time:") and "self [us]" not in line:
            own, _, module = line.removeprefix("import time:").split("|")
            spent[module.strip().split(".")[0]] += int(own) / 1e6
    return rows + [
        {"package": name, "seconds": took}
        for name, took in sorted(spent.items(), key=lambda item: -item[1])[:10]
    ]


def _fedloom(*arguments: str, options: Sequence[str] = ()) -> subprocess.Popen:
    command = [sys.executable, *options, "-c", "from fedloom.cli import main; main()", *arguments]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def _until(sign: str, *arguments: str) -> float:
    """Returns the seconds until the command prints the sign, or until it ends if there is none."""
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        process = _fedloom(*arguments, *(("--out", folder) if arguments[0] == "run" else ()))
        assert process.stderr is not None
        if sign and not any(sign in line for line in process.stderr):
            raise RuntimeError(f"fedloom {' '.join(arguments)} never printed {sign!r}")
        if not sign:
            process.wait()
        took = time.perf_counter() - begun
        process.communicate()
    return took


# ---- large graphs ----


part(measured("arxiv"))


@part
def products(quick: bool) -> list[Row]:
    """A complete run with decoupled models on a graph of the size of ogbn-products.

    It includes the partition, the propagation and 20 rounds of one epoch.
    """
    dataset = "synthetic-products:nodes=3000" if quick else "synthetic-products"
    cases = [("sgc-2x64", "louvain"), ("sgc-2x64", "random"), ("sign-2x64", "louvain")]
    return [
        end_to_end(dataset=dataset, model=model, partition=name, rounds=20) for model, name in cases
    ]


@job
def end_to_end(dataset: str, model: str, partition: str, rounds: int) -> Row:
    """Measures the seconds of each stage and the peak of the process."""
    clock = [time.perf_counter()]
    graph = fedloom.load(dataset)
    clock.append(time.perf_counter())
    federation = fedloom.divide(graph, 10, partition, 0)
    del graph
    clock.append(time.perf_counter())
    made = memory("VmHWM")
    result = fedloom.run(
        "fedavg",
        federation,
        model=model,
        rounds=rounds,
        epochs=1,
        engine=FASTEST,
        callbacks=lambda entry: clock.append(time.perf_counter()),
    )
    made_in, divided_in, first, *others = gaps(clock)
    return {
        "graph_s": made_in,
        "partition_s": divided_in,
        "first_round_s": first,
        "round_s": median(others),
        "total_s": clock[-1] - clock[0],
        "peak_before_mb": made,
        "peak_mb": memory("VmHWM"),
        "accuracy": result.accuracy,
    }


@part
def prediction(quick: bool) -> list[Row]:
    """Predicted and measured peak memory of runs of FedAvg with 10 clients by Louvain.

    Each run has its own process.
    """
    sets = ("synthetic:nodes=300",) if quick else ("cora", "pubmed", "photo", "synthetic-arxiv")
    return [
        predicted(dataset=dataset, model=model)
        for dataset in sets
        for model in ("gcn-2x64", "sgc-2x64", "gat-2x64")
    ]


@job
def predicted(dataset: str, model: str) -> Row:
    """Measures the MB before the run and at its peak, and returns the predicted peak.

    The peak before the run does not count.
    """
    federation = fedloom.divide(fedloom.load(dataset), 10, "louvain", 0)
    forget_peak()
    before = memory("VmRSS")
    summary = fedloom.run("fedavg", federation, model=model, rounds=3, engine=FASTEST).summary
    return {
        "before_mb": before,
        "predicted_mb": summary["memory_predicted_mb"],
        "peak_mb": memory("VmHWM"),
    }


# ---- growth ----


@part
def growth(quick: bool) -> list[Row]:
    """Time and memory of a round of FedAvg for growing nodes, edges and features.

    One of them grows at a time, over two decades.
    """
    steps = (1, 10) if quick else (1, 3.1623, 10, 31.623, 100)
    small = {"nodes": 2000 if quick else 10_000, "degree": 8.0, "features": 32}
    axes = {
        "nodes": [{**small, "nodes": round(small["nodes"] * k / 10) * 10} for k in steps],
        "edges": [{**small, "nodes": 2 * small["nodes"], "degree": 2.0 * k} for k in steps],
        "features": [
            {**small, "nodes": 2 * small["nodes"], "features": round(10 * k)} for k in steps
        ],
    }
    rows = []
    for axis, points in axes.items():
        found = [growing(**point) for point in points]
        amounts = [row["nodes"] * row["degree"] if axis == "edges" else row[axis] for row in found]
        rows += [
            {"axis": axis, "amount": amount, **row}
            for amount, row in zip(amounts, found, strict=True)
        ]
    return rows


@job
def growing(nodes: int, degree: float, features: int) -> Row:
    """Measures a round in ms with 10 clients, and the MB of graphs and run in sum."""
    begun = memory("VmRSS")
    graph = fedloom.synthetic(nodes, 5, features, degree, degree_exponent=0, blocks=10)
    federation = fedloom.divide(graph, 10, "blocks", 0)
    del graph
    forget_peak()
    took = seconds_a_round(FASTEST, federation, 7)
    return {"ms": 1000 * median(took), "mb": max(1.0, memory("VmHWM") - begun)}


@part
def clients(quick: bool) -> list[Row]:
    """A round of FedAvg and of FedProto with 100 to 10,000 clients of 100 nodes."""
    counts = (2, 20) if quick else (100, 316, 1000, 3162, 10_000)
    return [
        {"amount": count, **many_clients(count=count, method=method)}
        for method in ("fedavg", "fedproto")
        for count in counts
    ]


@job
def many_clients(count: int, method: str) -> Row:
    """Measures a round in ms, and the MB of graphs and run in sum."""
    begun = memory("VmRSS")
    federation = fedloom.synthetic_clients(count)
    forget_peak()
    took = seconds_a_round(FASTEST, federation, 4, method=method)
    return {"ms": 1000 * median(took), "mb": max(1.0, memory("VmHWM") - begun)}


# ---- storing results and running ----


def machine() -> dict[str, str]:
    """Returns the machine and the versions of the measurement."""
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        "?",
    )
    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    packages = ("fedloom", "torch", "torch_geometric", "numpy", "scipy")
    versions = ", ".join(
        [f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in packages)]
    )
    return {"machine": f"{cpu}, {os.cpu_count()} cores, {gigabytes:.0f} GB", "versions": versions}


def read(kept: Path) -> dict[str, Row]:
    """Returns the last result of every part."""
    lines = kept.read_text().splitlines() if kept.exists() else []
    return {result["part"]: result for result in map(json.loads, lines)}


def keep(kept: Path, result: Row) -> None:
    """Replaces the stored result of a part."""
    found = {**read(kept), result["part"]: result}
    fresh = kept.with_suffix(".new")
    fresh.write_text("".join(json.dumps(found[name]) + "\n" for name in PARTS if name in found))
    os.replace(fresh, kept)


def main() -> None:
    """Runs parts, stores their results, writes the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}, or none (default: all)"
    )
    parser.add_argument("--quick", action="store_true", help="tiny graphs, one turn")
    parser.add_argument(
        "--keep", type=Path, default=KEPT, metavar="FILE", help="JSON lines, one for each part"
    )
    parser.add_argument(
        "--write",
        type=Path,
        metavar="PAGE",
        help="the Markdown file to write from the stored results, with a .png of the same name",
    )
    parser.add_argument("--job", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--turns", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.job:
        name, arguments = options.job
        # The first optimizer loads half of torch. This run keeps that out of the measurement.
        each_round("loop", fedloom.synthetic_clients(2, nodes=50), 1, lambda: None)
        print(json.dumps(JOBS[name](**json.loads(arguments))))
        return
    if options.turns:
        take_turns(*options.turns, options.quick)
        return
    if unknown := set(options.parts) - {*PARTS, "none"}:
        names = ", ".join(sorted(unknown))
        parser.error(f"unknown part {names}. Valid: {', '.join(PARTS)}, none")
    for name in options.parts or PARTS:
        if name == "none":
            continue
        begun = time.perf_counter()
        load = os.getloadavg()[0]
        rows = PARTS[name](options.quick)
        took = time.perf_counter() - begun
        print(f"{name}: {took:.0f} s", *map(json.dumps, rows), sep="\n  ", flush=True)
        date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
        keep(
            options.keep,
            {
                "part": name,
                "made": date,
                "took_s": round(took),
                "load": round(load, 1),
                **machine(),
                "rows": rows,
            },
        )
    if options.write:
        import speed_page

        speed_page.write(
            options.write,
            read(options.keep),
            {name: " ".join((f.__doc__ or "").split()) for name, f in PARTS.items()},
            slope,
        )


if __name__ == "__main__":
    main()
