"""Who carries out the cells of a grid: processes of this machine, or a Ray cluster. A cell that fails, or dies, takes no other along."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import mean
from typing import Any, Literal, NamedTuple, Protocol

from fedloom._system import graceful_signals, write_atomic
from fedloom.errors import FedloomError
from fedloom.experiments.grid import Cell, is_done, run_cell

PATIENCE = 5.0  # seconds that a run has to put its folder in order, once it is told to stop


class Step(NamedTuple):
    """A running cell has come to a round."""

    cell: Cell
    round: int
    planned: int
    validation: float | None


class End(NamedTuple):
    """A cell has ended; cause: why, if it is not completed."""

    cell: Cell
    status: Literal["completed", "failed", "stopped"]
    cause: str = ""


class Executor(Protocol):
    """Takes `size` cells at a time."""

    size: int

    def start(self, cell: Cell) -> None:
        """Begins with a cell."""

    def events(self, seconds: float) -> list[Step | End]:
        """What has happened, as soon as something has; nothing if `seconds` have passed."""

    def stop(self) -> None:
        """Has what is running put its folder in order, and ends it."""


@dataclass
class State:
    """How far a grid is. `watch` of `execute` gets it at every change."""

    cells: list[Cell]
    kept: list[Cell]  # were done before
    began: float = field(default_factory=time.monotonic)
    running: dict[str, Step] = field(default_factory=dict)  # by name
    started: dict[str, float] = field(default_factory=dict)
    ended: dict[str, End] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  # that cells have taken
    size: int = 1

    @property
    def failed(self) -> list[End]:
        """Cells that are not completed."""
        return [end for end in self.ended.values() if end.status != "completed"]

    @property
    def done(self) -> int:
        """How many cells are over, kept ones too."""
        return len(self.kept) + len(self.ended)

    def seconds_left(self) -> float | None:
        """About how long it will take, by what cells of the same method and size have taken; None while nothing is known."""
        now, known = (
            time.monotonic(),
            {
                name: took
                for name, took in self.seconds.items()
                if self.ended[name].status == "completed"
            },
        )
        for name, step in self.running.items():
            if step.round and step.planned:
                known[name] = (now - self.started[name]) * step.planned / step.round
        if not known:
            return None
        alike: dict[Any, list[float]] = {}  # what cells of a kind, and of a method, have taken
        over = {cell.name for cell in self.kept} | self.ended.keys()
        for cell in self.cells:
            if cell.name in known:
                for kind in (_kind(cell), cell.method):
                    alike.setdefault(kind, []).append(known[cell.name])
        total, typical = 0.0, mean(known.values())
        for cell in self.cells:
            if cell.name not in over:
                found = alike.get(_kind(cell)) or alike.get(cell.method)
                spent = now - self.started[cell.name] if cell.name in self.running else 0.0
                total += max((mean(found) if found else typical) - spent, 0.0)
        return total / min(self.size, max(len(self.cells) - self.done, 1))


def _kind(cell: Cell) -> tuple[Any, ...]:
    """What runs of about the same length have in common."""
    tables = cell.tables
    return (
        cell.method,
        tables["data"]["dataset"],
        tables["partition"]["name"],
        tables["partition"]["clients"],
        tables["model"]["name"],
    )


def execute(
    cells: Iterable[Cell], executor: Executor, watch: Callable[[State, Step | End | None], None]
) -> State:
    """Runs all cells that are not done, as many at a time as the crew takes. watch: hears of every step and end.

    A cell that fails is noted, and the others go on. Ctrl-C stops what is running in order, and is raised again.
    """
    wanted = list({cell.name: cell for cell in cells}.values())
    kept = [cell for cell in wanted if is_done(cell)]
    state = State(wanted, kept, size=executor.size)
    done = {cell.name for cell in kept}
    todo = [cell for cell in wanted if cell.name not in done]
    watch(state, None)
    try:
        while todo or state.running:
            while todo and len(state.running) < executor.size:
                cell = todo.pop(0)
                executor.start(cell)
                state.running[cell.name], state.started[cell.name] = (
                    Step(cell, 0, 0, None),
                    time.monotonic(),
                )
            for event in executor.events(0.5):
                name = event.cell.name
                if isinstance(event, Step):
                    state.running[name] = event
                else:
                    del state.running[name]
                    state.ended[name], state.seconds[name] = (
                        event,
                        time.monotonic() - state.started[name],
                    )
                watch(state, event)
    finally:
        executor.stop()
    return state


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ---- processes of this machine ----
class Processes:
    """A process for each cell, forked: nothing is imported again. It ends with its cell, or when this process is gone."""

    def __init__(self, size: int = 0):
        self.size = size or cores()
        self._fork = multiprocessing.get_context("fork")
        self._at_work: dict[Any, tuple[Cell, BaseProcess]] = {}  # by the pipe they report through

    def start(self, cell: Cell) -> None:
        """Begins with a cell."""
        here, there = self._fork.Pipe(duplex=False)
        process = self._fork.Process(target=_work, args=(cell, there), name=cell.name)
        process.start()
        there.close()
        self._at_work[here] = cell, process

    def events(self, seconds: float) -> list[Step | End]:
        """What has happened, as soon as something has; nothing if `seconds` have passed."""
        found: list[Step | End] = []
        pipes: list[Any] = wait(list(self._at_work), seconds)
        for pipe in pipes:
            cell, process = self._at_work[pipe]
            try:
                kind, *content = pipe.recv_bytes().decode().split("\t", 3)
            except EOFError:  # it ended without a word
                process.join()
                found.append(self._over(pipe, End(cell, "failed", _how_it_ended(process.exitcode))))
                continue
            if kind == "round":
                done, planned, validation = content
                found.append(
                    Step(cell, int(done), int(planned), float(validation) if validation else None)
                )
            else:
                status, cause = content
                process.join()
                found.append(self._over(pipe, End(cell, status, cause)))
        return found

    def _over(self, pipe: Any, end: End) -> End:
        del self._at_work[pipe]
        pipe.close()
        return end

    def stop(self) -> None:
        """Has what is running put its folder in order; what takes longer than a few seconds is killed."""
        processes = [process for _, process in self._at_work.values()]
        for process in processes:
            process.terminate()
        until = time.monotonic() + PATIENCE
        for process in processes:
            process.join(max(0.0, until - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self._at_work.clear()


def _how_it_ended(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        return f"its process was ended by {name}" + (
            " (out of memory?)" if name == "SIGKILL" else ""
        )
    return f"its process ended with exit code {code}"


def _work(cell: Cell, pipe: Connection) -> None:
    """In a process of its own: carries out a cell and reports. What went wrong is a line for whoever asked for the grid."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # a terminal's Ctrl-C reaches all processes: whoever runs the grid tells this one to stop
    threading.Thread(target=_end_with_parent, daemon=True).start()
    told = 0.0

    def tell(entry: dict[str, Any], planned: int) -> None:
        nonlocal told
        if time.monotonic() - told > 0.2:  # rounds may take less than a screen needs
            told = time.monotonic()
            pipe.send_bytes(
                f"round\t{entry['round']}\t{planned}\t{entry.get('val_accuracy') or ''}".encode()
            )

    status, cause = "completed", ""
    try:
        with graceful_signals():
            run_cell(cell, tell)
    except (KeyboardInterrupt, SystemExit):
        status, cause = "stopped", "interrupted"
    except Exception as error:  # noqa: BLE001  (whatever it is, the grid goes on and says so)
        status, cause = "failed", in_words(error)
    pipe.send_bytes(f"end\t{status}\t{cause}".encode())


def in_words(error: BaseException) -> str:
    """An error as a line; of what a user gave, it says enough by itself."""
    text = " ".join(str(error).split())
    return text if isinstance(error, FedloomError) else f"{type(error).__name__}: {text}"


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)  # the run puts its folder in order
    time.sleep(PATIENCE)
    os.kill(os.getpid(), signal.SIGKILL)


# ---- a Ray cluster ----
class Cluster:
    """A task for each cell on a Ray cluster (extra `ray`); its folder comes back as bytes. Which cluster: see `fedloom.engines.ray`.

    Datasets, and methods from files of your own, must be where they are here on every machine.
    """

    def __init__(self, size: int = 0):
        from fedloom.engines.ray import connect  # says what to install if there is no Ray

        self._started = connect()
        self._ray: Any = importlib.import_module("ray")
        self.size = size or int(self._ray.cluster_resources().get("CPU", 1))
        self._task = self._ray.remote(num_cpus=1, max_retries=0)(_work_elsewhere)
        self._at_work: dict[Any, Cell] = {}

    def start(self, cell: Cell) -> None:
        """Begins with a cell."""
        self._at_work[self._task.remote(cell)] = cell

    def events(self, seconds: float) -> list[Step | End]:
        """What has ended, as soon as something has; nothing if `seconds` have passed."""
        ready, _ = self._ray.wait(list(self._at_work), timeout=seconds)
        found: list[Step | End] = []
        for answer in ready:
            cell = self._at_work.pop(answer)
            try:
                cause, files = self._ray.get(answer)
            except self._ray.exceptions.RayError as error:
                found.append(End(cell, "failed", f"its worker was lost ({type(error).__name__})"))
                continue
            _unpack(files, cell.folder)
            found.append(End(cell, "failed" if cause else "completed", cause))
        return found

    def stop(self) -> None:
        """Ends what is running, and Ray if it was started here."""
        for answer in self._at_work:
            self._ray.cancel(answer, force=True)
        self._at_work.clear()
        if self._started:
            self._ray.shutdown()


def _work_elsewhere(cell: Cell) -> tuple[str, dict[str, bytes]]:
    """On whatever machine: carries out a cell in a folder of its own; gives what went wrong, if anything, and the folder's files."""
    cause = ""
    with tempfile.TemporaryDirectory() as place:
        there = replace(cell, folder=Path(place) / cell.name)
        try:
            run_cell(there)
        except Exception as error:  # noqa: BLE001  (whatever it is, the grid goes on and says so)
            cause = in_words(error)
        files = sorted(path for path in there.folder.rglob("*") if path.is_file())
        return cause, {str(path.relative_to(there.folder)): path.read_bytes() for path in files}


def _unpack(files: dict[str, bytes], folder: Path) -> None:
    """Puts files into a folder in one step, in place of an unfinished run of the same cell."""
    fresh = folder.with_name(f".{folder.name}.new")
    for place in (fresh, folder):
        shutil.rmtree(place, ignore_errors=True)
    for name, content in files.items():
        path = fresh / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, content)
    if files:
        fresh.rename(folder)


EXECUTORS: dict[str, Callable[[int], Executor]] = {"processes": Processes, "ray": Cluster}
