"""What the commands do. `fedloom.cli` has what a user types; it imports this module when a command runs, because torch takes seconds."""

from __future__ import annotations

import json
import shlex
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from inspect import getdoc, getmodule
from pathlib import Path
from typing import Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from fedloom.core.method import Method
from fedloom.core.registry import method_class, method_names
from fedloom.data.datasets import catalogue, find
from fedloom.data.partition import partitions
from fedloom.data.statistics import partition_statistics
from fedloom.deploy.keys import make_authority, make_party, party_files
from fedloom.errors import ConfigError, RoundFailed, unknown
from fedloom.experiments import executor, grid
from fedloom.experiments.recipe import Recipe, make_recipe, override, read_tables
from fedloom.experiments.report import comparison, tables
from fedloom.experiments.report.console import err, out
from fedloom.experiments.report.partition_plot import plot_partition
from fedloom.experiments.result import Result, read_run
from fedloom.experiments.run_folder import LeftOut, gather, is_completed, read_config
from fedloom.experiments.trackers import make_trackers, tracked
from fedloom.nn.build import architectures

Given = Mapping[str, Any]  # "table.key" -> value, None where the user said nothing


def run(
    recipe: Path | None, given: Given, assignments: Iterable[str], folder: Path | None, baselines: str, as_json: bool, track: str = ""
) -> None:  # fmt: skip
    """Runs a recipe with options and assignments on top, and other methods on the same federation beside it."""
    trackers = make_trackers(track)  # one that is not there should not wait for the data
    base = _tables(read_tables(recipe) if recipe else {}, given, assignments)
    chosen = make_recipe(base)
    others = [
        make_recipe(_as_baseline(base, name))
        for name in baselines.replace(" ", "").split(",")
        if name
    ]
    err.print(
        f"loading {chosen.data.dataset}, {chosen.partition.clients} clients by {chosen.partition.name}",
        style="dim",
    )
    federation = chosen.federation()
    for each in (chosen, *others):  # before the first of them takes its time
        each.check(federation)
    if idle := federation.roster.without_training:
        err.print(
            f"no training item at client {', '.join(idle)}: takes part, its loss is 0",
            style="yellow",
        )
    folder = _fresh_folder(chosen, folder)
    with _lines_for_warnings():
        result = _with_progress(
            chosen.method,
            lambda step: chosen.execute(
                folder, step, on_start=_announce, federation=federation, track=trackers
            ),
        )
    compared = [
        _with_progress(
            other.method, lambda step, o=other: o.execute(None, step, federation=federation)
        )
        for other in others
    ]  # type: ignore[misc]
    _print(result, as_json, compared)


def _tables(tables_: dict[str, Any], given: Given, assignments: Iterable[str]) -> dict[str, Any]:
    flags = [f"{key}={json.dumps(value)}" for key, value in given.items() if value is not None]
    return override(tables_, [*flags, *assignments])


def _as_baseline(base: dict[str, Any], name: str) -> dict[str, Any]:
    """The same recipe for another method, with as much training; learning rates and optimisers are each method's own."""
    own = {f.name: f for f in fields(method_class(name))}
    shared = {"rounds", "epochs", "batch_size", "weight_decay"} & own.keys()
    if own["rounds"].metadata["bounds"]["at most"] == 1:
        shared -= {"rounds", "epochs"}  # one-shot: it trains as long as it needs, before and after
    kept = {key: value for key, value in base.get("method", {}).items() if key in shared}
    return {
        **base,
        "method": {"name": name, **kept},
        "run": {**base.get("run", {}), "evaluation": ""},
    }


def resume(folder: Path, as_json: bool, track: str = "") -> None:
    """Goes on with a run from its checkpoint, or from the beginning if it has none; prints the result of one that is completed.

    track: by whom it is tracked from now on; as before if nothing is said.
    """
    if is_completed(folder):
        err.print("this run is completed: nothing is left to do", style="dim")
        show(folder, as_json)
        return
    config = read_config(folder)
    if "deployment" in config:
        if track:
            raise ConfigError("track: the run of a deployment is not tracked; valid: no --track")
        kept = config["deployment"]
        if "agreement" not in kept:
            raise ConfigError(
                f"{folder} is the run of a Flower app: `flwr run` again goes on with it"
            )
        serve(
            Path(kept["agreement"]),
            Path(kept["keys"]),
            folder,
            kept["wait"],
            kept["insecure"],
            as_json,
            resumed=config,
        )
        return
    if "partition" not in config:
        raise ConfigError(
            f"{folder} was made from Python with a federation of its own: fedloom.run(..., out=folder, resume=True) there"
        )
    recipe = make_recipe(config)
    trackers = make_trackers(track or tracked(folder))
    with _lines_for_warnings():
        result = _with_progress(
            recipe.method, lambda step: recipe.execute(folder, step, on_start=_announce, resume=True, track=trackers)
        )  # fmt: skip
    _print(result, as_json)


@contextmanager
def _lines_for_warnings() -> Iterator[None]:
    """A warning, of a checkpoint that cannot be used or a tracker that fails, is a line, as everything else here."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: err.print(str(message), style="yellow")
        yield


def show(folder: Path, as_json: bool) -> None:
    """Prints a run folder's result."""
    _print(read_run(folder), as_json)


def list_methods(name: str | None) -> None:
    """Prints all methods, or one in full."""
    if name:
        out.print(tables.method(name, method_class(name)))
    else:
        out.print(tables.listing({n: _first_line(method_class(n)) for n in method_names()}))


def _first_line(cls: type[Method]) -> str:
    return (getdoc(getmodule(cls)) or "").partition("\n")[0].partition(": ")[2]


def list_datasets() -> None:
    """Prints the catalogue."""
    out.print(
        tables.datasets(
            catalogue(), [name for name in catalogue() if find(name).kind != "download"]
        )
    )


def list_partitions() -> None:
    """Prints the partitions."""
    out.print(tables.listing(partitions()))


def list_models() -> None:
    """Prints the architectures."""
    out.print(tables.listing(architectures()))
    out.print(
        "\nname-LAYERSxWIDTH, e.g. gcn-4x128; several, separated by commas, are dealt over the clients",
        style="dim",
    )


def partition(given: Given, assignments: Iterable[str], plot: Path | None, as_json: bool) -> None:
    """Divides a graph, prints who holds what, and draws it if asked to."""
    federation = make_recipe(_tables({}, given, assignments)).federation()
    held = partition_statistics(federation)
    if plot:
        plot_partition(federation, plot)
        err.print(f"wrote {plot}", style="dim")
    if as_json:
        print(json.dumps(held))
    else:
        out.print(tables.partition_statistics(held))


def keys(host: str | None, parties: Sequence[str], folder: Path) -> None:
    """Makes the coordinator's certificates if a host is given, keys for each party, and prints who has to get which file."""
    if not host and not parties:
        raise ConfigError("keys for whom? Give the coordinator's HOST, --party NAME, or both")
    if twice := sorted({name for name in parties if parties.count(name) > 1}):
        raise ConfigError(f"party {twice[0]!r} is named twice")
    for name in parties:  # nothing is written if one of them cannot be
        party_files(folder, name)
    written = make_authority(folder, host) if host else []
    for name in parties:
        written += make_party(folder, name)
    out.print(tables.listing({str(path): _goes_to(path) for path in written}))


def _goes_to(path: Path) -> str:
    if path.name in ("ca.key", "server.key"):
        return "secret: stays with the coordinator"
    if path.name == "server.crt":
        return "stays with the coordinator, which shows it to whoever connects"
    if path.name == "ca.crt":
        return "to every party: by it they know the coordinator"
    return (
        f"secret: to party {path.stem} and nobody else"
        if path.suffix == ".key"
        else "to the coordinator"
    )


def serve(
    agreement: Path,
    keys: Path,
    folder: Path | None,
    wait: float,
    insecure: bool,
    as_json: bool,
    resumed: dict[str, Any] | None = None,
) -> None:
    """Coordinates a federation. resumed: the config of the run to go on with."""
    from fedloom.deploy.agreement import read_agreement
    from fedloom.deploy.serve import serve as coordinate

    agreed = read_agreement(agreement)
    folder = folder or _unused(
        Path("runs") / f"{agreement.stem}-{Path(agreed.method).stem}-s{agreed.run.seed}"
    )
    origin = {
        "agreement": str(agreement.resolve()),
        "keys": str(keys.resolve()),
        "wait": wait,
        "insecure": insecure,
    }
    with _lines_for_warnings():
        result = _with_progress(
            agreed.method,
            lambda step: coordinate(
                agreed, keys, folder, insecure=insecure, wait=wait, resumed=resumed, origin=origin, say=_say, on_round=step
            ),
        )  # fmt: skip
    _print(result, as_json)


def join(
    agreement: Path, party: str, key: Path, data: Path, state: Path | None, patience: float, tell_errors: bool, socket: Path | None,
    insecure: bool,
) -> None:  # fmt: skip
    """Takes part in a federation until the run is over."""
    from fedloom.deploy.agreement import read_agreement, require_tls
    from fedloom.deploy.keys import read_party_key
    from fedloom.deploy.party import Party, stay, take_part

    agreed = read_agreement(agreement)
    if socket is None:
        require_tls(agreed, insecure)
    member = Party(
        agreed,
        party,
        read_party_key(key),
        agreed.graph(data, party),
        state or Path(f"fedloom-{party}"),
        tell_errors,
    )
    status = take_part(member, _say, patience) if socket is None else stay(member, socket, _say)
    if member.errors.exists():
        _say(f"errors of this party whose words the coordinator was not told: {member.errors}")
    _say(
        f"the run is {status}; this party's model: {member.model}"
        if member.model.exists()
        else f"the run is {status}"
    )


def tune(
    recipe: Path | None, given: Given, assignments: Iterable[str], over: Sequence[str], trials: int, minutes: float, seeds: int,
    folder: Path | None, jobs: int, as_json: bool,
) -> None:  # fmt: skip
    """Tunes a recipe with options and assignments on top; prints the best trials and where the recipe is."""
    from fedloom.experiments.tune import Trial
    from fedloom.experiments.tune import tune as search

    base = _tables(read_tables(recipe) if recipe else {}, given, assignments)
    chosen = make_recipe(base)
    folder = folder or Path("tuned") / _name(chosen)
    with _bar() as bar:
        row = bar.add_task(f"tune {chosen.method}", total=trials, score="")

        def step(trial: Trial, over: Sequence[Trial]) -> None:
            best = max((t.validation for t in over if t.validation is not None), default=None)
            bar.update(row, completed=len(over), score=f"best val {tables.percent(best)}")
            if trial.error:
                err.print(
                    f"trial {trial.number} failed: {trial.error}", style="yellow", highlight=False
                )
            elif not err.is_terminal:
                scores = f"val {tables.percent(trial.validation)}, best {tables.percent(best)}"
                _say(f"trial {trial.number}: {scores}; {len(over)} of {trials} are over")

        command = shlex.join(["fedloom", *sys.argv[1:]])
        tuned = search(
            base, folder, over=over, trials=trials, minutes=minutes, seeds=seeds, jobs=jobs, command=command, on_trial=step
        )  # fmt: skip
    if as_json:
        print(json.dumps({**asdict(tuned), "recipe": str(tuned.recipe)}))
    else:
        out.print(tables.tuning(tuned))
    err.print(f"recipe: {tuned.recipe}", style="dim")


def _say(line: str) -> None:
    err.print(line, style="dim", highlight=False)


def compare(
    file: Path | None,
    given: Given,
    assignments: Sequence[str],
    metric: str,
    folder: Path,
    jobs: int,
    on: str,
    report: bool,
    as_json: bool,
) -> None:
    """Runs a grid, prints its table, writes tables and report into the folder. RoundFailed at the end if a cell did not complete."""
    base = _tables(read_tables(file) if file else {}, given, [])
    methods = grid.read_axes(base.get("compare", {})).methods
    if metric not in comparison.METRICS:
        raise unknown("metric", metric, comparison.METRICS)
    if on not in executor.EXECUTORS:
        raise unknown("--on", on, executor.EXECUTORS)
    if jobs < 0:
        raise ConfigError(f"jobs is {jobs}, must be a whole number at least 0")
    cells = grid.cells(grid.assigned(base, assignments, methods), folder / "runs")
    state = _with_grid_progress(cells, executor.EXECUTORS[on](jobs))
    completed = [cell for cell in cells if cell.name not in {end.cell.name for end in state.failed}]
    runs, left_out = gather(cell.folder for cell in completed)
    left_out += [
        LeftOut(str(end.cell.folder), f"{end.status}: {end.cause}") for end in state.failed
    ]
    found = comparison.compare(runs, left_out, metric)
    written = comparison.write_tables(found, folder)
    if report:
        from fedloom.experiments.report.write import write_report

        written.append(
            write_report(found, folder / "report.html", shlex.join(["fedloom", *sys.argv[1:]]))
        )
    if as_json:
        print(json.dumps(tables.comparison_as_json(found)))
    else:
        out.print(tables.comparison(found))
    err.print("wrote " + ", ".join(map(str, written)), style="dim")
    if state.failed:
        raise RoundFailed(
            f"{len(state.failed)} of {len(cells)} cells did not complete, the first of them {state.failed[0].cell.name}"
        )


def _with_grid_progress(cells: Sequence[grid.Cell], by: executor.Executor) -> executor.State:
    """On a terminal a bar for the grid, with the time left, and one for each run; else a line for each run that ends."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[more]}"),
    )
    with Progress(*columns, console=err, disable=not err.is_terminal) as bar:
        whole = bar.add_task("grid", total=len(cells), more="")
        shown: dict[str, Any] = {}

        def watch(state: executor.State, event: executor.Step | executor.End | None) -> None:
            left = state.seconds_left()
            more = "" if left is None else f"about {tables.duration(left)} left"
            bar.update(whole, completed=state.done, total=len(state.cells), more=more)
            if event is None:
                if state.kept:
                    err.print(
                        f"{len(state.kept)} of {len(state.cells)} runs are done already",
                        style="dim",
                    )
                return
            name = event.cell.name
            if isinstance(event, executor.Step):
                if name not in shown:
                    shown[name] = bar.add_task(f"  {name}", total=None, more="")
                score = (
                    f"val {tables.percent(event.validation)}"
                    if event.validation is not None
                    else ""
                )
                bar.update(shown[name], completed=event.round, total=event.planned, more=score)
                return
            if name in shown:
                bar.remove_task(shown.pop(name))
            if event.status != "completed":
                err.print(f"{name}: {event.status}: {event.cause}", style="yellow", highlight=False)
            elif not err.is_terminal:
                took = tables.duration(state.seconds[name])
                err.print(
                    f"{state.done} of {len(state.cells)}: {name} in {took}{f'; {more}' * bool(more)}",
                    style="dim",
                    highlight=False,
                )

        return executor.execute(cells, by, watch)


def _fresh_folder(recipe: Recipe, asked: Path | None) -> Path:
    if asked is not None:
        return asked
    return _unused(Path("runs") / f"{_name(recipe)}-s{recipe.run.seed}")


def _name(recipe: Recipe) -> str:
    """What a recipe's folder is called if nobody says."""
    parts = (
        Path(recipe.data.dataset).name,
        f"{recipe.partition.name}{recipe.partition.clients}",
        Path(recipe.method).stem,
    )
    return (
        "-".join((*parts, recipe.model.name)).replace(",", "_").replace(":", "_").replace("=", "_")
    )


def _unused(folder: Path) -> Path:
    """The folder, or one named after it that is not there yet."""
    count, found = 1, folder
    while found.exists():
        count += 1
        found = folder.with_name(f"{folder.name}.{count}")
    return found


def _announce(started: dict[str, Any]) -> None:
    if line := tables.workers(started):
        err.print(line, style="dim")


def _bar() -> Progress:
    clock = (TimeElapsedColumn(), TimeRemainingColumn())
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        *clock,
        TextColumn("{task.fields[score]}"),
    )
    return Progress(*columns, console=err, disable=not err.is_terminal)


def _with_progress(
    method: str, work: Callable[[Callable[[dict[str, Any], int], None]], Result]
) -> Result:
    """A bar on a terminal; in a pipe or a log a line for every tenth of the rounds."""
    with _bar() as bar:
        task = bar.add_task(method, total=None, score="")
        last = ""

        def step(entry: dict[str, Any], planned: int) -> None:
            nonlocal last
            last = (
                f"val {tables.percent(entry['val_accuracy'])}" if "val_accuracy" in entry else last
            )
            bar.update(task, completed=entry["round"], total=planned, score=last)
            done = entry["round"]
            if (
                not err.is_terminal
                and entry.get("stage") != "finetune"
                and done * 10 // max(planned, 1) > (done - 1) * 10 // max(planned, 1)
            ):
                err.print(
                    f"{method}: round {done} of {planned}, {last}", style="dim", highlight=False
                )

        return work(step)


def _print(result: Result, as_json: bool, compared: list[Result] | None = None) -> None:
    summary = result.summary
    if as_json:
        shown = {
            **summary,
            **(
                {"baselines": {r.summary["method"]: r.summary for r in compared}}
                if compared
                else {}
            ),
        }
        print(json.dumps(shown))
    else:
        out.print(tables.result(summary, [r.summary for r in compared or []]))
    if result.folder:
        err.print(f"run folder: {result.folder}", style="dim")
