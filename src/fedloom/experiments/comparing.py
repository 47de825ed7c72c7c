"""Comparing: runs the cells of a grid and compares their runs.

The command `fedloom compare` and the function `fedloom.compare` both do it here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from fedloom._system import locked
from fedloom.errors import ConfigError, unknown
from fedloom.experiments import executor
from fedloom.experiments.display import duration
from fedloom.experiments.grid import Cell
from fedloom.experiments.report import comparison
from fedloom.experiments.run_folder import LeftOut, gather

_log = logging.getLogger("fedloom.compare")
Watch = Callable[[executor.State, executor.Step | executor.End | None], None]


def require_valid(metric: str, jobs: int, on: str) -> None:
    """Raises a ConfigError if an argument of `run_and_compare` is not valid."""
    if metric and metric not in comparison.METRICS:
        raise unknown("metric", metric, comparison.METRICS)
    if on not in executor.EXECUTORS:
        raise unknown("on", on, executor.EXECUTORS)
    if not isinstance(jobs, int) or jobs < 0:
        raise ConfigError(f"jobs is {jobs}, must be a whole number at least 0")


def run_and_compare(
    cells: Sequence[Cell],
    folder: Path,
    watch: Watch,
    *,
    metric: str = "accuracy",
    jobs: int = 0,
    on: str = "processes",
) -> tuple[comparison.Comparison, list[executor.End], list[Path]]:
    """Runs the cells that are not completed yet, compares all of them, and writes the tables.

    Args:
        cells: The cells of the grid.
        folder: The folder for table.csv, table.md and table.tex.
        watch: Called with the state of the grid at every change; see `executor.execute`.
        metric: The score to compare.
        jobs: Concurrent runs (0 = the number of cores).
        on: Where they run: "processes" (of this machine) or "ray".

    Returns:
        The comparison, the cells that did not complete, and the paths of the tables.
    """
    require_valid(metric, jobs, on)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, "comparison"):
        state = executor.execute(cells, executor.EXECUTORS[on](jobs), watch)
        failed = {end.cell.name for end in state.failed}
        runs, left_out = gather(cell.folder for cell in cells if cell.name not in failed)
        left_out += [
            LeftOut(str(end.cell.folder), f"{end.status}: {end.cause}") for end in state.failed
        ]
        compared = comparison.compare(runs, left_out, metric)
        return compared, state.failed, comparison.write_tables(compared, folder)


def log_progress(state: executor.State, event: executor.Step | executor.End | None) -> None:
    """Writes a log line when a grid starts and for each run that ends."""
    total = len(state.cells)
    if event is None:
        _log.info("%s of %s runs are cached", len(state.kept), total)
    elif isinstance(event, executor.End) and event.status == "completed":
        took, left = duration(state.seconds[event.cell.name]), state.seconds_left()
        more = "" if not left else f"; about {duration(left)} left"
        _log.info("%s of %s: %s in %s%s", state.done, total, event.cell.name, took, more)
    elif isinstance(event, executor.End):
        _log.warning("%s: %s: %s", event.cell.name, event.status, event.cause)
