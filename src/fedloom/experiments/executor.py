"""Executors: run the cells of a grid in processes of this machine, or on a Ray cluster.

A cell that fails or dies does not affect the others.
"""

from __future__ import annotations

import importlib
import logging
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

import torch
from threadpoolctl import threadpool_limits

from fedloom._system import (
    cores,
    forking,
    graceful_signals,
    make_private,
    plain_text,
    share_cores,
    write_atomic,
)
from fedloom.errors import FedloomError
from fedloom.experiments.callbacks import Callback
from fedloom.experiments.grid import Cell, is_done, run_cell

STOP_SECONDS = 30.0  # that a run has to write its folder after a signal


class Step(NamedTuple):
    """A running cell has finished a round."""

    cell: Cell
    round: int
    planned: int
    validation: float | None


class End(NamedTuple):
    """A cell has ended. `cause` says why it is not completed."""

    cell: Cell
    status: Literal["completed", "failed", "stopped"]
    cause: str = ""


class Executor(Protocol):
    """Runs `size` cells at a time."""

    size: int

    def start(self, cell: Cell) -> None:
        """Starts a cell."""

    def events(self, seconds: float) -> list[Step | End]:
        """Waits for events and returns them; an empty list after `seconds`."""

    def stop(self) -> None:
        """Ends the running cells. They write their folders first."""


@dataclass
class State:
    """The progress of a grid. `execute` passes it to `watch` at every change.

    Attributes:
        cells: All cells.
        kept: The cells that were completed before.
        running: {name: last step} of the running cells.
        started: {name: start time}.
        ended: {name: end} of the cells that ended now.
        seconds: {name: duration} of these cells.
        size: How many cells run at a time.
    """

    cells: list[Cell]
    kept: list[Cell]
    running: dict[str, Step] = field(default_factory=dict)
    started: dict[str, float] = field(default_factory=dict)
    ended: dict[str, End] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    size: int = 1

    @property
    def failed(self) -> list[End]:
        """The cells that did not complete."""
        return [end for end in self.ended.values() if end.status != "completed"]

    @property
    def done(self) -> int:
        """The number of cells that ended, including those that were completed before."""
        return len(self.kept) + len(self.ended)

    def seconds_left(self) -> float | None:
        """Estimates the remaining time from cells of the same kind or method.

        Returns None while nothing is known.
        """
        now = time.monotonic()
        known = {
            name: seconds
            for name, seconds in self.seconds.items()
            if self.ended[name].status == "completed"
        }
        for name, step in self.running.items():
            if step.round and step.planned:
                known[name] = (now - self.started[name]) * step.planned / step.round
        if not known:
            return None
        alike: dict[Any, list[float]] = {}  # durations by kind of cell, and by method
        ended = {cell.name for cell in self.kept} | self.ended.keys()
        for cell in self.cells:
            if cell.name in known:
                for kind in (_kind(cell), cell.method):
                    alike.setdefault(kind, []).append(known[cell.name])
        total, typical = 0.0, mean(known.values())
        for cell in self.cells:
            if cell.name not in ended:
                durations = alike.get(_kind(cell)) or alike.get(cell.method)
                spent = now - self.started[cell.name] if cell.name in self.running else 0.0
                total += max((mean(durations) if durations else typical) - spent, 0.0)
        return total / min(self.size, max(len(self.cells) - self.done, 1))


def _kind(cell: Cell) -> tuple[Any, ...]:
    """Returns what runs of about the same duration have in common."""
    tables = cell.tables
    data, partition = tables["data"], tables.get("partition", {})
    return (
        cell.method,
        data["dataset"],
        partition.get("name"),
        partition.get("clients"),
        data.get("digest"),
        tables["model"]["name"],
    )


def execute(
    cells: Iterable[Cell], executor: Executor, watch: Callable[[State, Step | End | None], None]
) -> State:
    """Runs all cells that are not completed. Returns the final state.

    If a cell fails, the others go on. After Ctrl-C the running cells write their folders and end,
    and KeyboardInterrupt is raised.

    Args:
        cells: The cells.
        executor: Runs them.
        watch: Called with the state and each step and end; first with None.
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
                state.running[cell.name] = Step(cell, 0, 0, None)
                state.started[cell.name] = time.monotonic()
            for event in executor.events(0.5):
                name = event.cell.name
                if isinstance(event, Step):
                    state.running[name] = event
                else:
                    del state.running[name]
                    state.ended[name] = event
                    state.seconds[name] = time.monotonic() - state.started[name]
                watch(state, event)
    finally:
        executor.stop()
    return state


# ---- processes of this machine ----
class Processes:
    """Runs each cell in a forked process, which need not import anything again.

    The process ends with its cell, or when the parent process ends. `size` 0 is the number of
    cores.
    """

    def __init__(self, size: int = 0):
        self.size = size or cores()
        self._fork = multiprocessing.get_context("fork")
        self._running: dict[Any, tuple[Cell, BaseProcess]] = {}  # by pipe

    def start(self, cell: Cell) -> None:
        """Starts a cell."""
        importlib.import_module("scipy.sparse")  # once here, and not again in each process
        here, there = self._fork.Pipe(duplex=False)
        process = self._fork.Process(target=_work, args=(cell, there), name=cell.name)
        with forking():  # `_work` says why it works
            process.start()
        there.close()
        self._running[here] = cell, process

    def events(self, seconds: float) -> list[Step | End]:
        """Waits for events and returns them; an empty list after `seconds`."""
        found: list[Step | End] = []
        pipes: list[Any] = wait(list(self._running), seconds)
        for pipe in pipes:
            cell, process = self._running[pipe]
            try:
                kind, *content = pipe.recv_bytes().decode().split("\t", 3)
            except EOFError:  # the process died
                process.join()
                found.append(self._close(pipe, End(cell, "failed", _exit_cause(process.exitcode))))
                continue
            if kind == "round":
                done, planned, validation = content
                found.append(
                    Step(cell, int(done), int(planned), float(validation) if validation else None)
                )
            else:
                status, cause = content
                process.join()
                found.append(self._close(pipe, End(cell, status, cause)))
        return found

    def _close(self, pipe: Any, end: End) -> End:
        del self._running[pipe]
        pipe.close()
        return end

    def stop(self) -> None:
        """Ends the running cells. A process that needs too long is killed."""
        processes = [process for _, process in self._running.values()]
        for process in processes:
            process.terminate()
        until = time.monotonic() + STOP_SECONDS
        for process in processes:
            process.join(max(0.0, until - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self._running.clear()


def _exit_cause(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        return f"its process was ended by {name}" + (
            " (out of memory?)" if name == "SIGKILL" else ""
        )
    return f"its process ended with exit code {code}"


class _Steps(Callback):
    """Reports the rounds of a cell through a pipe."""

    def __init__(self, pipe: Connection):
        self.pipe, self.reported = pipe, 0.0

    def on_round(self, entry: dict[str, Any], rounds: int) -> None:
        if time.monotonic() - self.reported > 0.2:  # rounds may be faster than a screen
            self.reported = time.monotonic()
            validation = entry.get("val_accuracy") or ""
            self.pipe.send_bytes(f"round\t{entry['round']}\t{rounds}\t{validation}".encode())


def _work(cell: Cell, pipe: Connection) -> None:
    """Runs a cell in a process of its own and reports through the pipe."""
    # Ctrl-C in a terminal reaches all processes. The parent tells this one to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # OpenMP hangs in a forked process whose parent, such as a notebook, has used its threads. With
    # one thread it is not called. The run sets its own number of threads.
    threadpool_limits(1)
    torch.set_num_threads(1)
    # The rounds of several runs at a time are no use in a log.
    logging.getLogger("fedloom.run").setLevel(logging.WARNING)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    status, cause = "completed", ""
    try:
        with graceful_signals():
            run_cell(cell, _Steps(pipe))
    except (KeyboardInterrupt, SystemExit):
        status, cause = "stopped", "interrupted"
    except Exception as error:  # noqa: BLE001  (the grid reports it and goes on)
        status, cause = "failed", in_words(error)
    pipe.send_bytes(f"end\t{status}\t{cause}".encode())


def in_words(error: BaseException) -> str:
    """Returns an error as one line, without its type if it is a FedloomError."""
    text = plain_text(error, 2000)
    return text if isinstance(error, FedloomError) else f"{type(error).__name__}: {text}"


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)  # the run writes its folder
    time.sleep(STOP_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


# ---- a Ray cluster ----
class Cluster:
    """Runs each cell as a task on a Ray cluster (extra `ray`). Its folder is returned as bytes.

    `fedloom.engines.ray` says how the cluster is chosen. Datasets and method files of your own must
    be at the same path on every machine.
    """

    def __init__(self, size: int = 0):
        from fedloom.engines.ray import connect  # raises if Ray is not installed

        self._started = connect()
        self._ray: Any = importlib.import_module("ray")
        self.size = size or int(self._ray.cluster_resources().get("CPU", 1))
        self._task = self._ray.remote(num_cpus=1, max_retries=0)(_work_remotely)
        self._running: dict[Any, Cell] = {}

    def start(self, cell: Cell) -> None:
        """Starts a cell."""
        self._running[self._task.remote(cell)] = cell

    def events(self, seconds: float) -> list[Step | End]:
        """Waits for cells to end and returns them; an empty list after `seconds`."""
        ready, _ = self._ray.wait(list(self._running), timeout=seconds)
        found: list[Step | End] = []
        for answer in ready:
            cell = self._running.pop(answer)
            try:
                cause, files = self._ray.get(answer)
            except self._ray.exceptions.RayError as error:
                found.append(End(cell, "failed", f"its worker was lost ({type(error).__name__})"))
                continue
            _unpack(files, cell.folder)
            found.append(End(cell, "failed" if cause else "completed", cause))
        return found

    def stop(self) -> None:
        """Ends the running cells, and Ray if it was started here."""
        for answer in self._running:
            self._ray.cancel(answer, force=True)
        self._running.clear()
        if self._started:
            self._ray.shutdown()


def _work_remotely(cell: Cell) -> tuple[str, dict[str, bytes]]:
    """Runs a cell in a temporary folder on any machine.

    Returns the cause of a failure, or an empty text, and the folder's files.
    """
    cause = ""
    share_cores()
    with tempfile.TemporaryDirectory() as place:
        there = replace(cell, folder=Path(place) / cell.name)
        try:
            run_cell(there)
        except Exception as error:  # noqa: BLE001  (the grid reports it and goes on)
            cause = in_words(error)
        files = sorted(path for path in there.folder.rglob("*") if path.is_file())
        return cause, {str(path.relative_to(there.folder)): path.read_bytes() for path in files}


def _unpack(files: dict[str, bytes], folder: Path) -> None:
    """Writes files into a folder in one step. Replaces an unfinished run of the same cell."""
    fresh = folder.with_name(f".{folder.name}.new")
    for place in (fresh, folder):
        shutil.rmtree(place, ignore_errors=True)
    for name, content in files.items():
        path = make_private(fresh) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, content)
    if files:
        fresh.rename(folder)


EXECUTORS: dict[str, Callable[[int], Executor]] = {"processes": Processes, "ray": Cluster}
