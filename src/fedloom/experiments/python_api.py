"""Python API: compare, tune, report, audit and resume as functions, for scripts and notebooks.

They do what the commands of the same names do, and print nothing. Progress goes to the loggers
"fedloom.run", "fedloom.compare" and "fedloom.tune".
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeAlias

from fedloom._system import make_private
from fedloom.core.method import Method
from fedloom.core.registry import name_of
from fedloom.core.settings import default_of
from fedloom.data.display import shown
from fedloom.data.federation import Federation
from fedloom.data.files import as_graph, to_file
from fedloom.data.graph import Graph
from fedloom.data.statistics import label_counts
from fedloom.errors import ConfigError, unknown
from fedloom.experiments import grid
from fedloom.experiments.arguments import (
    RUN_SETTINGS,
    is_graph,
    require_federation,
    require_method,
)
from fedloom.experiments.audit_file import SHADOWS, Audit
from fedloom.experiments.callbacks import Given
from fedloom.experiments.comparing import log_progress, require_valid, run_and_compare
from fedloom.experiments.display import percent
from fedloom.experiments.recipe import make_recipe, read_tables
from fedloom.experiments.report.command import make_report
from fedloom.experiments.report.comparison import Comparison
from fedloom.experiments.result import Result, load_run
from fedloom.experiments.run import run
from fedloom.experiments.run_folder import is_completed, read_config, read_partition
from fedloom.experiments.trackers import Track, tracked
from fedloom.experiments.trust import require_trust
from fedloom.experiments.tune import Trial, Tuned
from fedloom.experiments.tune import tune as search
from fedloom.nn.build import parse_spec, split_specs

_log = logging.getLogger("fedloom.tune")
MethodLike: TypeAlias = str | Mapping[str, Any] | Method | type[Method]
DataLike: TypeAlias = str | Path | Graph | Federation | Any  # Any: a graph of PyG or networkx
Tables: TypeAlias = Mapping[str, Mapping[str, Any]] | str | Path


# ---- compare ----
def compare(
    methods: MethodLike | Sequence[MethodLike] = (),
    data: DataLike | Sequence[DataLike] = (),
    *,
    partitions: str | Sequence[str] = (),
    clients: int | Sequence[int] = (),
    models: str | Sequence[str] = (),
    seeds: int | None = None,
    split: str | None = None,
    metric: str = "accuracy",
    out: str | Path = "compare",
    jobs: int = 0,
    on: str = "processes",
    tables: Tables = "",
    trust: bool = False,
    **options: Any,
) -> Comparison:
    """Compares methods over data, partitions, numbers of clients, models and seeds.

    It runs every combination, as many at a time as there are cores, and tests the differences.
    Local training is always included. Finished runs stay in `out` and are not repeated: the same
    call continues a comparison that was interrupted, and one with another method runs only that
    method. Runs that fail are left out, with a warning.

    Args:
        methods: Names, method files, Methods or their classes, or tables such as
            {"name": "fedprox", "mu": 0.01}; one or several.
        data: Names of datasets, folders of tables, Graphs, Federations, or graphs of PyG or
            networkx; one or several. Federations are divided already: `partitions`, `clients` and
            `split` do not apply to them.
        partitions: Names of partitions; see `fedloom.partitions`.
        clients: Numbers of clients.
        models: Models; "gcn/gat" gives the clients both in turn.
        seeds: The number of seeds: 0, 1, ...; a claim needs 3 or more.
        split: The split; see `fedloom.divide`.
        metric: The score to compare.
        out: The folder for runs and tables.
        jobs: Concurrent runs (0 = the number of cores).
        on: Where runs execute: "processes" (of this machine) or "ray".
        tables: Other settings, as a grid file has them: {"partition": {"delta": 10}}, or the path
            of a grid file.
        trust: Execute the Python files that a grid file names as methods or models.
        options: Run settings (`engine="stacked"`), and settings of all methods that have them
            (`rounds`, `epochs`, `batch_size`, `weight_decay`, `lr`, `optimizer`).

    Returns:
        The table: `records()`, `pandas()`, `report(path)`.
    """
    require_valid(metric, jobs, on)
    folder = Path(out)
    base = _read(tables, trust)
    datasets, federations = _datasets(data, folder)
    axes = {
        "datasets": datasets,
        "partitions": partitions,
        "clients": clients,
        "models": models,
        "seeds": seeds,
    }
    given = {key: value for key, value in axes.items() if value not in ((), None)}
    base["compare"] = {**base.get("compare", {}), **given}
    if split is not None:
        base["data"] = {**base.get("data", {}), "split": split}
    _add_options(base, options)
    cells: dict[str, grid.Cell] = {}
    for variant in _variants(methods):
        chosen = {**base, "method": {**base.get("method", {}), **variant}}
        if variant:
            chosen["compare"] = {**base["compare"], "methods": tuple(variant)}
        cells |= {cell.name: cell for cell in grid.cells(chosen, folder / "runs", federations)}
    ordered = sorted(cells.values(), key=lambda cell: cell.seed)  # all methods start early
    with _saying("the finished runs are kept: the same call continues the comparison"):
        compared, failed, _ = run_and_compare(
            ordered, folder, log_progress, metric=metric, jobs=jobs, on=on
        )
    if failed:
        warnings.warn(
            f"{len(failed)} of {len(ordered)} runs did not complete, the first of them "
            f"{failed[0].cell.name}: {failed[0].cause}",
            stacklevel=2,
        )
    return compared


def _variants(methods: Any) -> list[dict[str, dict[str, Any]]]:
    """Returns {name: settings} of the methods. A method with several settings is in several."""
    if isinstance(methods, str):
        methods = [name.strip() for name in methods.split(",")]
    elif isinstance(methods, Mapping) or not isinstance(methods, Collection):
        methods = [methods]
    variants: list[dict[str, dict[str, Any]]] = [{}]
    for method in methods:
        name, settings = _named(method)
        if all(name in variant for variant in variants):
            variants.append({})
        next(variant for variant in variants if name not in variant)[name] = settings
    return variants


def _named(method: Any) -> tuple[str, dict[str, Any]]:
    """Returns a method's name and the settings that differ from the defaults."""
    require_method(method, None)
    if isinstance(method, str):
        return method, {}
    if isinstance(method, Mapping):
        settings = dict(method)
        name = settings.pop("name", None)
        if not isinstance(name, str):
            raise ConfigError(f"method.name is {name!r}, must be a text")
        return name, settings
    if isinstance(method, Method):
        usual = {f.name: default_of(f) for f in fields(method)}
        changed = {k: v for k, v in method.settings().items() if v != usual[k]}
        return name_of(type(method)), changed
    return name_of(method), {}


def _datasets(data: Any, folder: Path) -> tuple[tuple[str, ...], dict[str, Federation]]:
    """Returns the names of the data, and the federations among them. Graphs become files."""
    if isinstance(data, (str, Path, Federation)) or is_graph(data):
        data = [data]
    if isinstance(data, Mapping) or not isinstance(data, Collection):
        raise _not_data(data)
    names: list[str] = []
    federations: dict[str, Federation] = {}
    for each in data:
        if isinstance(each, Federation):
            names.append(f"{each.roster.about['dataset']} {each.check().digest}")
            federations[names[-1]] = each
        else:
            names.append(_dataset(each, folder))
    return tuple(names), federations


def _dataset(data: Any, folder: Path) -> str:
    """Returns the name of a dataset. A graph is written to a file first."""
    if isinstance(data, (str, Path)):
        return str(data)
    if not is_graph(data):
        raise _not_data(data)
    graph = as_graph(data).check()
    path = folder / "data" / f"{Path(graph.name).name}-{graph.digest()}.safetensors"
    if not path.exists():
        make_private(path.parent)
        to_file(graph, path)
    return str(path)


def _not_data(data: object) -> ConfigError:
    return ConfigError(
        f"data is {shown(data)}, must be the name of a dataset, the path of a folder, a Graph, a "
        "Federation, a graph of PyG or networkx, or a list of these"
    )


def _read(tables: Tables, trust: bool) -> dict[str, Any]:
    if isinstance(tables, (str, Path)):
        content = dict(read_tables(Path(tables))) if str(tables) else {}
        require_trust(content, f"recipe {str(tables)!r}", trust)
        return content
    if not isinstance(tables, Mapping):
        raise ConfigError(f"tables is {shown(tables)}, must be a dict of tables or a file's path")
    return {name: dict(t) if isinstance(t, Mapping) else t for name, t in tables.items()}


def _add_options(base: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Adds options to [run] and [method]. Raises a ConfigError for one that fits neither."""
    for key, value in options.items():
        if key not in RUN_SETTINGS and key not in grid.SHARED:
            error = unknown("option", key, (*RUN_SETTINGS, *grid.SHARED))
            raise ConfigError(
                f'{error}. A setting of one method: methods=[{{"name": METHOD, "{key}": ...}}]'
            )
        table = "run" if key in RUN_SETTINGS else "method"
        base[table] = {**base.get(table, {}), key: value}


# ---- tune ----
def tune(
    method: MethodLike,
    data: DataLike = "cora",
    *,
    over: Iterable[str] | Mapping[str, Any] = (),
    trials: int = 30,
    minutes: float = 0.0,
    seeds: int = 1,
    jobs: int = 1,
    out: str | Path | None = None,
    model: str | None = None,
    clients: int | None = None,
    partition: str | None = None,
    split: str | None = None,
    tables: Tables = "",
    trust: bool = False,
    **options: Any,
) -> Tuned:
    """Finds a method's best settings by validation score, and writes them as a recipe.

    The trials stay in `out`. The same call continues a study that was interrupted.

    Args:
        method: As in `fedloom.run`.
        data: A dataset's name, a folder of tables, a Graph, a Federation, or a graph of PyG or
            networkx. `clients`, `partition` and `split` do not apply to a Federation.
        over: The settings to tune: ["lr"] takes the range that the method declares,
            {"lr": (0.001, 0.1), "hops": [1, 2]} these bounds and choices. Empty: all settings with
            a declared range.
        trials: The number of trials, over all starts of the study.
        minutes: The time in which trials start (0 = no limit).
        seeds: The number of seeds of a trial; their mean counts.
        jobs: Concurrent trials, each in a process of its own.
        out: The folder of the study. The default is under tuned/, named after the task.
        model: The model.
        clients: The number of clients.
        partition: The name of the partition.
        split: The split; see `fedloom.divide`.
        tables: Other settings, as a recipe has them: {"model": {"dropout": 0.3}}, or the path of a
            recipe.
        trust: Execute the Python files that a recipe names as method or model.
        options: The method's settings and run settings that are not tuned, as in `fedloom.run`.

    Returns:
        The best settings as keywords of `fedloom.run` (`settings`), all trials (`records()`,
        `pandas()`), and the path of the recipe (`recipe`).
    """
    name, settings = _named(method)
    base = _read(tables, trust)
    of_run = {key: value for key, value in options.items() if key in RUN_SETTINGS}
    of_method = {key: value for key, value in options.items() if key not in RUN_SETTINGS}
    base["method"] = {**base.get("method", {}), "name": name, **settings, **of_method}
    base["run"] = {**base.get("run", {}), **of_run}
    federation = data if isinstance(data, Federation) else None
    described: dict[str, dict[str, Any]] = {
        "data": {"split": split},
        "partition": {"name": partition, "clients": clients},
        "model": {"name": model},
    }
    for table, values in described.items():
        chosen = {key: value for key, value in values.items() if value is not None}
        if federation is not None and chosen and table != "model":
            raise ConfigError(f"tune: a federation is divided already; drop {', '.join(chosen)}")
        base[table] = {**base.get(table, {}), **chosen}
    if federation is None:
        home = Path(out) if out else Path("tuned")
        base["data"]["dataset"] = _dataset(data, home)
    folder = Path(out) if out else Path("tuned") / make_recipe(base, federation).name
    with _saying("the finished trials are kept: the same call continues the study"):
        return search(
            base,
            folder,
            federation=federation,
            over=list(_ranges(over)),
            trials=trials,
            minutes=minutes,
            seeds=seeds,
            jobs=jobs,
            command="fedloom.tune",
            on_trial=_log_trial,
        )


def _ranges(over: Iterable[str] | Mapping[str, Any]) -> Iterator[str]:
    """Yields ranges as `search_space` reads them."""
    if isinstance(over, str):
        over = [over]
    values: Mapping[str, Any] = over if isinstance(over, Mapping) else dict.fromkeys(over)
    for key, value in values.items():
        name = key if "." in key.partition("=")[0] else f"method.{key}"
        if value is None:
            yield name
        elif isinstance(value, str):
            yield f"{name}={value}"
        elif isinstance(value, tuple) and len(value) == 2:
            yield f"{name}={value[0]}..{value[1]}"
        elif isinstance(value, Collection):
            yield f"{name}={','.join(map(str, value))}"
        else:
            raise ConfigError(
                f"over: {key} is {shown(value)}, must be (low, high), a list of choices, or None"
            )


def _log_trial(trial: Trial, ended: Sequence[Trial]) -> None:
    if trial.error:
        _log.warning("trial %s failed: %s", trial.number, trial.error)
        return
    best = max((t.validation for t in ended if t.validation is not None), default=None)
    scores = percent(trial.validation), percent(best)
    _log.info("trial %s: validation %s %%, best %s %%", trial.number, *scores)


# ---- report ----
def report(
    runs: Any,
    out: str | Path = "report.html",
    *,
    metric: str = "accuracy",
    embeddings: bool = False,
    trust: bool = False,
) -> Path:
    """Writes runs as one HTML page that needs no network. Returns its path.

    Args:
        runs: Run folders, folders that contain some, Results with a folder, or a Comparison; one
            or several.
        out: The page.
        metric: The score to compare.
        embeddings: Whether to compute embeddings of each method's first seed.
        trust: Execute the Python files that the folders name, which embeddings may need.
    """
    several = [runs] if isinstance(runs, (str, Path, Result, Comparison)) else runs
    if not isinstance(several, Collection) or not several:
        raise ConfigError(f"runs is {shown(runs)}, must be run folders or results")
    folders = [folder for each in several for folder in _folders(each)]
    compared = make_report(folders, Path(out), metric, embeddings, trust=trust)
    for each in compared.left_out:
        warnings.warn(f"left out: {each.folder}: {each.reason}", stacklevel=2)
    return Path(out)


def _folders(runs: Any) -> list[Path]:
    if isinstance(runs, Comparison):
        return [run.folder for entry in runs.entries.values() for run in entry.runs]
    if isinstance(runs, Result):
        if runs.folder is None:
            raise ConfigError("runs: this result has no folder; use fedloom.run(..., out=folder)")
        return [runs.folder]
    if isinstance(runs, (str, Path)):
        return [Path(runs)]
    raise ConfigError(f"runs contains {shown(runs)}, must be run folders or results")


# ---- audit ----
def audit(
    run: Any,
    attacks: str | Sequence[str] = (),
    *,
    federation: Federation | None = None,
    shadows: int = SHADOWS,
    out: str | Path | None = None,
    trust: bool = False,
) -> Audit:
    """Attacks a run, and returns what each attack reads of the clients' data.

    The run is repeated with the same seed, in this process, and its messages are kept. Then each
    attack gets what its attacker sees: the server, a client or an outsider (docs/privacy.md).

    Args:
        run: A run folder, a Result with a folder, a recipe (PAPER/ENTRY or a TOML file), or its
            tables: {"method": {"name": "fedavg"}, "data": {"dataset": "cora"}}.
        attacks: The names of attacks; none means all.
        federation: The data of a run that was started by `fedloom.run` with a federation.
        shadows: The number of shadow models for membership; 0 for none.
        out: A folder for audit.json and audit.csv. The default is the run folder, if there is one.
        trust: Execute the Python files that the folder or the recipe names.

    Returns:
        The findings: `records()`, `pandas()`, `save(folder)`.
    """
    from fedloom.experiments import audit as audits  # imports all that the attacks need

    names = [attacks] if isinstance(attacks, str) else list(attacks)
    audits.require_attacks(names)
    tables, folder = _tables_of(run, trust)
    if folder is not None and federation is None and "partition" not in tables:
        raise ConfigError(
            f"{str(folder)!r} was started from Python with a federation of its own: "
            "fedloom.audit(folder, federation=...) attacks it"
        )
    recipe = make_recipe(tables, federation)
    found = audits.audit_recipe(recipe, names, shadows=shadows, federation=federation)
    if out is not None or folder is not None:
        found.save(out if out is not None else folder)  # type: ignore[arg-type]  # one is given
    return found


def _tables_of(run: Any, trust: bool) -> tuple[dict[str, Any], Path | None]:
    """Returns the recipe of what `audit` is given, and its run folder if there is one."""
    from fedloom.experiments.audit import audited_tables

    if isinstance(run, Mapping):
        return _read(run, trust), None
    if isinstance(run, Result):
        (run,) = _folders(run)
    if not isinstance(run, (str, Path)):
        raise ConfigError(
            f"run is {shown(run)}, must be a run folder, a Result with a folder, or a recipe"
        )
    tables, folder = audited_tables(run)
    where = f"run {str(folder)!r}" if folder else f"recipe {str(run)!r}"
    require_trust(tables, where, trust)
    if folder is not None:
        _require_known_models(tables, folder)
    return tables, folder


# ---- resume ----
def resume(
    folder: str | Path,
    federation: Federation | None = None,
    *,
    callbacks: Given = None,
    track: Track = (),
    trust: bool = False,
) -> Result:
    """Continues a run from its checkpoint, or from the beginning if it has none.

    A completed run is read.

    Args:
        folder: The run folder.
        federation: The data of a run that was started by `fedloom.run`. A run of a recipe, as the
            command line starts it, loads its data itself.
        callbacks: As in `fedloom.run`.
        track: The trackers from now on. Empty: the same as before.
        trust: Execute the Python files that the folder names as method or model.
    """
    folder = Path(folder)
    config = read_config(folder)
    if is_completed(folder):
        return load_run(folder, trust=trust)
    if "deployment" in config:
        raise ConfigError(
            f"{str(folder)!r} is the run of a deployment: `fedloom resume {folder}` continues it"
        )
    track = track or tracked(folder)
    if federation is not None:
        require_federation(federation)
        kept = read_partition(folder)
        if kept is not None and kept != label_counts(federation):
            raise ConfigError(f"federation: the run in {str(folder)!r} has other data")
    elif "partition" not in config:
        raise ConfigError(
            f"{str(folder)!r} was started from Python with a federation of its own: "
            "fedloom.resume(folder, federation) continues it"
        )
    require_trust(config, f"run {str(folder)!r}", trust)
    _require_known_models(config, folder)
    recipe = make_recipe(config, federation)
    if federation is None:
        return recipe.execute(folder, callbacks, resume=True, track=track)
    return run(
        {"name": recipe.method, **recipe.method_settings},
        federation,
        model=recipe.model.name,
        dropout=recipe.model.dropout,
        settings=recipe.run,
        out=folder,
        callbacks=callbacks,
        resume=True,
        track=track,
        config=config,
    )


def _require_known_models(config: Mapping[str, Any], folder: Path) -> None:
    """Raises a ConfigError if a run trains a module that only the user's program has."""
    names = config["model"]["name"]
    for spec in split_specs(names):
        try:
            parse_spec(spec)
        except ConfigError as error:
            raise ConfigError(
                f"{str(folder)!r} trains a model ({names}) that no file defines; continue it with "
                f"fedloom.run(method, federation, model=..., out={str(folder)!r}, resume=True) "
                f"({error})"
            ) from error


@contextmanager
def _saying(line: str) -> Iterator[None]:
    """Adds a line to a KeyboardInterrupt, as Ctrl-C in a notebook raises it."""
    try:
        yield
    except KeyboardInterrupt as stopped:
        stopped.add_note(line)
        raise
