"""Measures what a second core brings: `stacked` in one process against `stacked_processes`.

    python bench/cores.py                     PubMed, a graph of ogbn-arxiv's size, 1,000 clients
    python bench/cores.py pubmed10 --turns 9  one case of bench/speed.py, nine turns

The two engines take turns, each in its own process. A row has the wall time of a round, which needs
quiet cores, and how many cores other programs kept busy meanwhile. It also has the critical path:
the processor time of the server, plus in each exchange that of the slower worker. Other load hardly
changes it. What it leaves out is the time that processes take to wake up.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from speed import CASES, each_round

from fedloom.engines.stacked_processes import Engine

ENGINES = ("stacked", "stacked_processes")


def cpu_seconds(process: int) -> float:
    """Returns the processor time of all threads of a process."""
    threads = Path(f"/proc/{process}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def busy_seconds() -> float:
    """Returns the processor time of all programs on this machine."""
    line = Path("/proc/stat").read_text().splitlines()[0]
    user, nice, system, _, _, interrupts, soft, stolen = map(int, line.split()[1:9])
    total = user + nice + system + interrupts + soft + stolen
    return total / os.sysconf("SC_CLK_TCK")


class Clock:
    """Reads the wall time, or how far this process and its workers are on the critical path."""

    def __init__(self) -> None:
        self.slower = 0.0  # in each exchange, the processor time of the slower worker
        self.measuring = 0.0  # processor time of this class

    def read(self, what: str) -> float:
        """Returns seconds. what: "wall" or "path"."""
        if what == "wall":
            return time.perf_counter()
        return time.thread_time() - self.measuring + self.slower

    def watch(self) -> None:
        """Measures all exchanges from now on."""
        exchange = Engine._exchange

        def measured(engine: Engine, *arguments: Any) -> Any:
            before = self._of_workers(engine)
            given = exchange(engine, *arguments)
            after = self._of_workers(engine)
            self.slower += max(a - b for a, b in zip(after, before, strict=True))
            return given

        Engine._exchange = measured  # type: ignore[method-assign]

    def _of_workers(self, engine: Engine) -> list[float]:
        begun = time.thread_time()
        found = [cpu_seconds(worker.pid) for worker in engine._workers if worker.pid]
        self.measuring += time.thread_time() - begun
        return found


def take_turns(case: str, engine: str, what: str) -> None:
    """Runs in a process of its own: measures a turn for each line of its input."""
    federation, rounds, epochs = CASES[case].make(False), CASES[case].rounds, CASES[case].epochs
    clock, ends = Clock(), []
    if what == "path":
        clock.watch()
    print("ready", flush=True)
    for _ in sys.stdin:
        ends.clear()
        begun, busy, own = time.perf_counter(), busy_seconds(), sum(os.times()[:4])
        each_round(engine, federation, rounds, lambda: ends.append(clock.read(what)), epochs)
        seconds, own = time.perf_counter() - begun, sum(os.times()[:4]) - own
        took = median(after - before for before, after in pairwise(ends))
        others = (busy_seconds() - busy - own) / seconds
        print(json.dumps({"ms": 1000 * took, "others": others}), flush=True)


def measure(case: str, what: str, turns: int) -> str:
    """Returns a row: "wall" or "path" of a case in both engines, in turns."""
    took: dict[str, list[float]] = {engine: [] for engine in ENGINES}
    others: list[float] = []
    with ExitStack() as stack:
        ways = {e: stack.enter_context(Turns([case, e, what])) for e in ENGINES}
        for _ in range(turns):
            for engine, way in ways.items():
                row = way.next()
                took[engine].append(row["ms"])
                others.append(row["others"])
    one, two = (took[engine] for engine in ENGINES)
    ratio = median(a / b for a, b in zip(one, two, strict=True))
    return (
        f"{case:10} {what}: {median(one):7.1f} ms in one process, {median(two):7.1f} ms with "
        f"workers, {ratio:.2f}x; others kept {median(others):.2f} cores busy"
    )


class Turns:
    """A process that runs `take_turns`. It ends with the block."""

    def __init__(self, arguments: list[str]):
        command = [sys.executable, __file__, "--turns-of", *arguments]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def __enter__(self) -> "Turns":
        self._line()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()

    def next(self) -> dict[str, float]:
        """Runs one more turn. Returns its median in ms, and the cores that others kept busy."""
        print("go", file=self.process.stdin, flush=True)
        row: dict[str, float] = json.loads(self._line())
        return row

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()


def main() -> None:
    """Reads the command line and prints the rows."""
    parser = argparse.ArgumentParser(description="What a second core brings.")
    parser.add_argument("cases", nargs="*", default=["pubmed10", "arxiv", "small1000"])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--turns-of", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.turns_of:
        take_turns(*given.turns_of)
        return
    for case in given.cases:
        for what in ("wall", "path"):
            print(measure(case, what, given.turns), flush=True)


if __name__ == "__main__":
    main()
