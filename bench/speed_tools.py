"""Tools of bench/speed.py: processes that measure, turns, clocks, memory."""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import fedloom

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
DATA = ROOT.parent / "shared" / "data"  # where developers have the real datasets
MODEL = "gcn-2x64"
PLAIN = "plain"
Row = dict[str, Any]
Part = Callable[[bool], list[Row]]
PARTS: dict[str, Part] = {}
TASKS: dict[str, Callable[..., Any]] = {}  # what a `Worker` can be asked for
# The folder with the code of an older commit. None: nothing is compared with older code.
before: Path | None = None


def part(function: Part) -> Part:
    """Decorator that registers a part of the benchmarks under its name.

    A part takes whether to be quick, and returns rows for the page.
    """
    PARTS[function.__name__] = function
    return function


def task(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator that registers what a worker can be asked for. It returns what JSON can store."""
    TASKS[function.__name__] = function
    return function


def load() -> float:
    """Returns the mean number of processes that ran or waited for a core in the last minute."""
    return round(os.getloadavg()[0], 1)


# ---- code of another commit ----


@contextmanager
def older_code(commit: str) -> Iterator[None]:
    """Makes the code of another commit available as `before`.

    commit: a commit, which is checked out below build/ for the time being; a folder with a
    checkout; or "" for none.
    """
    global before
    if not commit or (Path(commit) / "src" / "fedloom").is_dir():
        before = Path(commit).resolve() if commit else None
        yield
        return
    folder = ROOT / "build" / "speed-before"
    folder.parent.mkdir(exist_ok=True)
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "prune"], check=True)
    if folder.exists():  # of a run that was killed
        subprocess.run([*git, "remove", "--force", str(folder)], check=True)
    subprocess.run([*git, "add", "--quiet", "--detach", str(folder), commit], check=True)
    before = folder
    try:
        yield
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def code(older: bool) -> tuple[Path, dict[str, str]]:
    """Returns the folder of this code or of the older one, and an environment that imports it."""
    assert before is not None or not older
    folder = before if older and before is not None else ROOT
    environment = {**os.environ, "PYTHONPATH": str(folder / "src")}
    if DATA.is_dir():  # both find the same datasets
        environment.setdefault("FEDLOOM_DATA", str(DATA))
    return folder, environment


# ---- processes that measure ----


class Worker:
    """A process that runs tasks on request, in this code or in the older one.

    Ways that are compared have a process each: fedloom's settings of the C allocator must not help
    the plain loop.
    """

    def __init__(self, older: bool = False, environment: Mapping[str, str] | None = None):
        folder, imports = code(older)
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "speed.py"), "--serve", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**imports, **(environment or {})},
        )

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *error: object) -> None:
        self.process.communicate()  # closes its input, so it ends

    def ask(self, name: str, /, **arguments: Any) -> Any:
        """Runs a task. Returns its result."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps([name, arguments]), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{name} has ended with exit code {self.process.wait()}")
        return json.loads(line)


def serve(folder: Path) -> None:
    """Runs in the process of a `Worker`: answers each line of its input with one line.

    folder: where the code must come from.
    """
    assert Path(fedloom.__file__).is_relative_to(folder.resolve()), fedloom.__file__
    answers = sys.stdout
    with redirect_stdout(sys.stderr):
        for line in sys.stdin:
            name, arguments = json.loads(line)
            print(json.dumps(TASKS[name](**arguments)), file=answers, flush=True)


def job(function: Callable[..., Row]) -> Callable[..., Row]:
    """Decorator that runs calls in a new process, with its own imports and peak of memory.

    The call takes `older`, whether to run in the older code. The row contains the arguments.
    """
    task(function)

    def call(older: bool = False, **arguments: Any) -> Row:
        begun = load()
        with Worker(older) as worker:
            worker.ask("first_optimizer")
            row = worker.ask(function.__name__, **arguments)
        return {**arguments, **({"older": True} if older else {}), **row, "load": begun}

    return call


@task
def first_optimizer() -> None:
    """Makes an optimizer. The first one loads half of torch, which no measurement should show."""
    each_round(Way("loop", "loop"), fedloom.synthetic_clients(2, nodes=50), 1, lambda: None)


@task
def peak() -> float:
    """Returns the peak of memory of the process in MB."""
    return memory("VmHWM")


# ---- rounds ----


@dataclass(frozen=True)
class Way:
    """A way to run rounds.

    Attributes:
        name: Its name on the page.
        engine: The engine, or "plain" for the plain loop.
        older: Whether it runs in the older code.
        clock: "thread" for the CPU time of the thread that runs the rounds, or "wall". An engine
            with workers needs wall time.
        settings: Further settings of the run.
        environment: Variables of the environment of its process.
    """

    name: str
    engine: str
    older: bool = False
    clock: str = "thread"
    settings: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    def worker(self) -> Worker:
        """Returns a process for this way."""
        return Worker(self.older, self.environment)

    def asked(self) -> Row:
        """Returns this way as an argument of a task."""
        return asdict(self)

    def now(self) -> float:
        """Returns the reading of the clock, in seconds."""
        return time.perf_counter() if self.clock == "wall" else time.thread_time()


def each_round(
    way: Way,
    federation: fedloom.Federation,
    rounds: int,
    ended: Callable[[], None],
    epochs: int = 3,
    **settings: Any,
) -> None:
    """Runs FedAvg, or the method in `settings`, and calls `ended` after every round."""
    if way.engine == PLAIN:
        import plain

        for _ in plain.fedavg(federation, rounds, epochs):
            ended()
        return
    settings = {"method": "fedavg", "model": MODEL, "epochs": epochs, **way.settings, **settings}
    fedloom.run(
        federation=federation,
        engine=way.engine,
        rounds=rounds,
        callbacks=lambda entry: ended(),
        **settings,
    )


def seconds_a_round(
    way: Way, federation: fedloom.Federation, rounds: int, epochs: int = 3, **settings: Any
) -> list[float]:
    """Returns the seconds of every round except the first. Set-up does not count."""
    clock: list[float] = []
    each_round(way, federation, rounds, lambda: clock.append(way.now()), epochs, **settings)
    return gaps(clock)


# ---- turns ----


class Turns:
    """Seconds of ways that take turns, so that other load disturbs all of them alike."""

    def __init__(self, ways: Mapping[str, Callable[[], float]], turns: int):
        self.took: dict[str, list[float]] = {name: [] for name in ways}
        loads = []
        for _ in range(turns):
            for name, way in ways.items():
                self.took[name].append(way())
                loads.append(load())
        self.load = max(loads)

    def ms(self, name: str) -> float:
        """Returns the median of a way in milliseconds."""
        return 1000 * median(self.took[name])

    def faster(self, name: str, other: str) -> float:
        """Returns how many times as fast a way is as another: the median over the turns."""
        pairs = zip(self.took[other], self.took[name], strict=True)
        return median(slow / fast for slow, fast in pairs)

    def rows(self, base: str) -> list[Row]:
        """Returns a row for each way, with its speed relative to a base."""
        return [
            {
                "way": name,
                "ms": self.ms(name),
                "ratio": self.faster(name, base),
                "load": self.load,
            }
            for name in self.took
        ]


# ---- clocks, memory, fits ----


def gaps(clock: Sequence[float]) -> list[float]:
    """Returns the differences between successive readings of a clock."""
    return [after - before for before, after in pairwise(clock)]


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
