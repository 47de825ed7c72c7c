"""The work of the commands.

`fedloom.cli` parses the arguments. It imports this module, and thus torch, when a command runs.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from fedloom._system import plain_text
from fedloom.core.method import Method
from fedloom.core.registry import method_class
from fedloom.data.datasets import catalogue, find
from fedloom.data.federation import Federation
from fedloom.data.partition import divides_graphs, partition_settings, partitions
from fedloom.data.statistics import partition_statistics
from fedloom.errors import ConfigError, RoundFailed
from fedloom.experiments import checkpoint, executor, grid
from fedloom.experiments.baselines import baseline_folder, read_planned, write_planned
from fedloom.experiments.callbacks import Callback
from fedloom.experiments.comparing import require_valid, run_and_compare
from fedloom.experiments.recipe import Recipe, make_recipe, override, read_tables
from fedloom.experiments.recipe_files import entries, find_tables, papers
from fedloom.experiments.report import method_tables, tables
from fedloom.experiments.report.console import err, out, stdout
from fedloom.experiments.report.labels import label
from fedloom.experiments.report.listing import print_listing
from fedloom.experiments.result import Result, load_run
from fedloom.experiments.run_folder import entries as history_entries
from fedloom.experiments.run_folder import find as find_runs
from fedloom.experiments.run_folder import is_completed, is_run, read_config
from fedloom.experiments.trackers import make_trackers, tracked
from fedloom.experiments.trust import code_in, require_trust
from fedloom.nn.build import architectures

if TYPE_CHECKING:
    from fedloom.experiments.tune import Trial


LINE = 2000  # characters of a line about an event, which may contain a text of another process
Given = Mapping[str, Any]  # {"table.key": value}; None for an option that was not given


# ---- runs ----
def run(
    recipe: str | None,
    given: Given,
    assignments: Iterable[str],
    folder: Path | None,
    baselines: str,
    as_json: bool,
    track: str = "",
    wide: bool = False,
    trust: bool = False,
) -> None:
    """Runs a recipe with options and assignments on top, then baselines on the same federation."""
    trackers = make_trackers(track)  # a missing package fails before the data are loaded
    base = _tables(recipe, given, assignments, trust)
    chosen = make_recipe(base)
    names = dict.fromkeys(filter(None, baselines.replace(" ", "").split(",")))
    others = [make_recipe(_as_baseline(base, name)) for name in names]
    _say_loading(chosen, chose="name" not in base.get("partition", {}))
    federation = chosen.federation()
    for each in (chosen, *others):  # before the first of them runs
        each.check(federation)
    if idle := federation.roster.without_training:
        err.print(
            f"no training item at client {', '.join(idle)}: takes part, its loss is 0",
            style="yellow",
        )
    folder = folder or _unused(Path("runs") / f"{chosen.name}-s{chosen.run.seed}")

    execute = partial(chosen.execute, folder, track=trackers, federation=federation)
    planned = _PlannedBaselines(folder, others)
    with _warnings_as_lines(), _saying_how_to_resume(folder):
        result = _with_progress(chosen.method, execute, planned)
        compared = _run_baselines(folder, others, federation)
    _print(result, as_json, compared, wide)


def audit(
    source: str,
    attacks: Sequence[str],
    shadows: int,
    folder: Path | None,
    assignments: Iterable[str],
    trust: bool,
    wide: bool,
    as_json: bool,
) -> None:
    """Attacks a run folder or a recipe, prints the findings and writes them into a folder."""
    from fedloom.experiments import audit as audits  # imports all that the attacks need

    audits.require_attacks(attacks)
    tables_, run_folder = audits.audited_tables(source)
    own = override({}, assignments := list(assignments))
    where = f"run {source!r}" if run_folder else f"recipe {source!r}"
    require_trust(override(tables_, assignments), where, trust, own)
    if run_folder is not None and "partition" not in tables_:
        raise ConfigError(
            f"{source!r} was started from Python with a federation of its own: "
            "fedloom.audit(folder, federation=...) attacks it"
        )
    if run_folder is not None and assignments and folder is None:
        raise ConfigError("audit: --set makes another run; give --out, a folder for its findings")
    recipe = make_recipe(override(tables_, assignments))
    _say_loading(recipe, chose=False)
    federation = recipe.federation()

    def say(attack: str) -> None:
        _say(f"attack: {attack}")

    found = audits.audit_recipe(
        recipe, attacks, shadows=shadows, federation=federation, on_attack=say
    )
    if as_json:
        print(json.dumps({"about": dict(found.about), "findings": found.records()}))
    else:
        stdout(wide).print(tables.audit(found, wide))
    place = folder or run_folder
    if place is not None:
        _say(f"findings: {found.save(place)}")


class _PlannedBaselines(Callback):
    """Notes in the run folder which baselines follow, so that `resume` can run them."""

    def __init__(self, folder: Path, baselines: Sequence[Recipe]):
        self.folder, self.baselines = folder, baselines

    def on_start(self, run: Mapping[str, Any]) -> None:
        if self.baselines:
            write_planned(self.folder, [recipe.config() for recipe in self.baselines])


def _say_loading(recipe: Recipe, chose: bool) -> None:
    """Says what is loaded, and why its partition was chosen if none was given."""
    dataset, name = recipe.data.dataset, recipe.partition.name
    line = f"loading {dataset}, {recipe.partition.clients} clients by {name}"
    if chose and name == "dirichlet":
        line += " (a set of graphs; --partition chooses another division)"
    elif chose and name == "blocks":
        line += " (the data have blocks of their own; --partition chooses another division)"
    _say(line)


def _run_baselines(
    folder: Path, baselines: Sequence[Recipe], federation: Federation
) -> list[Result]:
    """Runs the baselines of a run, or continues them. Their run folders keep no models."""
    results = []
    for recipe in baselines:
        place = baseline_folder(folder, recipe.method)
        execute = partial(recipe.execute, place, federation=federation, resume=is_run(place))
        results.append(_with_progress(recipe.method, execute))
        shutil.rmtree(place / "models", ignore_errors=True)  # the run can be repeated
    return results


@contextmanager
def _saying_how_to_resume(folder: Path) -> Iterator[None]:
    """Says after Ctrl-C or SIGTERM what the run folder keeps, and how to continue the run."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        _say_kept(folder)
        raise


def _say_kept(folder: Path) -> None:
    if not is_run(folder):
        _note("stopped before the run began; nothing was written")
        return
    command = _resume_command(folder)
    if is_completed(folder):
        _note(f"stopped: the run in {folder} is complete, its baselines are not")
        _note(f"to continue them: {command}")
        return
    done = max((entry["round"] for entry in history_entries(folder)), default=0)
    planned = read_config(folder)["method"].get("rounds", "?")
    saved = checkpoint.saved_round(folder)
    kept = "history, scores and models so far" if done else "the settings"
    _note(f"stopped after round {done} of {planned}; {folder} keeps {kept}")
    where = f"after round {saved}, from the checkpoint" if saved else "with round 1: no checkpoint"
    _note(f"to continue {where}: {command}")


def _resume_command(folder: Path) -> str:
    trust = " --trust" if code_in(read_config(folder)) else ""
    return f"fedloom resume {shlex.quote(str(folder))}{trust}"


def _tables(
    recipe: str | None, given: Given, assignments: Iterable[str], trust: bool
) -> dict[str, Any]:
    """Returns the tables of a recipe with options on top. Code of the recipe must be trusted."""
    assignments = list(assignments)
    own = _with_options({}, given, assignments)
    if recipe is None:
        return own
    tables = _with_options(find_tables(recipe), given, assignments)
    require_trust(tables, f"recipe {recipe!r}", trust, own)
    return tables


def _with_options(base: dict[str, Any], given: Given, assignments: Iterable[str]) -> dict[str, Any]:
    flags = [f"{key}={json.dumps(value)}" for key, value in given.items() if value is not None]
    return override(base, [*flags, *assignments])


def _as_baseline(base: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns the recipe for another method with as much training.

    Learning rate and optimiser stay those of the method. A one-shot method, and a baseline of one,
    has its own number of rounds and epochs.
    """
    given = base.get("method", {})
    own = {f.name: f for f in fields(method_class(name))}
    shared = {"rounds", "epochs", "batch_size", "weight_decay"} & own.keys()
    if _is_one_shot(method_class(name)) or _is_one_shot(
        method_class(given.get("name", "fedavg"), given)
    ):
        shared -= {"rounds", "epochs"}
    kept = {key: value for key, value in given.items() if key in shared}
    return {
        **base,
        "method": {"name": name, **kept},
        "run": {**base.get("run", {}), "evaluation": ""},
    }


def _is_one_shot(method: type[Method]) -> bool:
    (rounds,) = (f for f in fields(method) if f.name == "rounds")
    return bool(rounds.metadata["bounds"]["at most"] == 1)


def resume(
    folder: Path, as_json: bool, track: str = "", wide: bool = False, trust: bool = False
) -> None:
    """Continues a run from its checkpoint, or from the beginning if it has none.

    Then it runs or continues the baselines that the run was started with. Prints the result of a
    completed run.

    Args:
        folder: The run folder.
        as_json: Print JSON.
        track: The trackers from now on; empty = the same as before.
        wide: Print all columns.
        trust: Execute the Python files that the folder names as method or model.
    """
    baselines = read_planned(folder)
    for recipe_of_baseline in baselines:
        require_trust(recipe_of_baseline, f"run {str(folder)!r}", trust)
    planned = [make_recipe(recipe_of_baseline) for recipe_of_baseline in baselines]
    left = [r for r in planned if not is_completed(baseline_folder(folder, r.method))]
    if is_completed(folder) and not left:
        _say("this run is completed")
        show(folder, as_json, wide)
        return
    config = read_config(folder)
    if "deployment" in config:
        if track:
            raise ConfigError("track: the run of a deployment is not tracked; valid: no --track")
        kept = config["deployment"]
        if "agreement" not in kept:
            raise ConfigError(f"{folder} is the run of a Flower app: `flwr run` again continues it")
        serve(
            Path(kept["agreement"]),
            Path(kept["keys"]),
            folder,
            kept["wait"],
            kept["insecure"],
            as_json,
            resumed=config,
            trust=trust,
        )
        return
    if "partition" not in config:
        raise ConfigError(
            f"{folder} was started from Python with a federation of its own: "
            "fedloom.resume(folder, federation) continues it there"
        )
    require_trust(config, f"run {str(folder)!r}", trust)
    recipe = make_recipe(config)
    trackers = make_trackers(track or tracked(folder))
    federation = recipe.federation()
    execute = partial(recipe.execute, folder, resume=True, track=trackers, federation=federation)
    with _warnings_as_lines(), _saying_how_to_resume(folder):
        result = _with_progress(recipe.method, execute)
        compared = _run_baselines(folder, planned, federation)
    _print(result, as_json, compared, wide)


@contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """Prints a warning, of a damaged checkpoint or a failing tracker, as one line."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: err.print(str(message), style="yellow")
        yield


def show(folder: Path, as_json: bool, wide: bool = False) -> None:
    """Prints the result in a run folder, and those of its baselines."""
    result = load_run(folder)
    baselines = [load_run(place) for place in find_runs(folder)[1:] if is_completed(place)]
    if result.summary["status"] == "unfinished" and not as_json:
        saved = checkpoint.saved_round(folder)
        where = f"continues after round {saved}" if saved else "begins again, without a checkpoint"
        _print(result, as_json, baselines, wide)
        _note(f"`{_resume_command(folder)}` {where}")
    else:
        _print(result, as_json, baselines, wide)


# ---- listings ----
def list_recipes(paper: str | None, as_json: bool = False, wide: bool = False) -> None:
    """Prints the recipes of one paper or of all papers."""
    rows = {
        each: [_described(f"{each}/{name}", content) for name, content in entries(each).items()]
        for each in ([paper] if paper else papers())
    }
    if as_json:
        print(json.dumps([row for of_paper in rows.values() for row in of_paper]))
        return
    for each, of_paper in rows.items():
        stdout(wide).print(each, style="italic")
        stdout(wide).print(tables.recipes(of_paper, wide))
        stdout(wide).print()
    out.print(
        "expected: bounds of the mean score in percent, of the accuracy if no other is named\n"
        "paper: the printed number; minutes: all seeds and Local's on two cores",
        style="dim",
    )


def _described(name: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a recipe as `fedloom recipes --json` prints it."""
    recipe = make_recipe(content)
    expect = asdict(recipe.expect)
    unknown_values = {"at_most": 100.0, "minutes": 0.0, "paper": -1.0, "also": "", "source": ""}
    expect |= {key: None for key, value in unknown_values.items() if expect[key] == value}
    return {
        "recipe": name,
        "dataset": recipe.data.dataset,
        "partition": recipe.partition.name,
        "clients": recipe.partition.clients,
        "method": recipe.method,
        "model": recipe.model.name,
        "expect": expect,
    }


def show_method(name: str, as_json: bool = False) -> None:
    """Prints a method in full."""
    if as_json:
        print(json.dumps(method_tables.method_as_json(name, method_class(name))))
    else:
        out.print(method_tables.method(name, method_class(name)))


def list_datasets(as_json: bool = False, wide: bool = False) -> None:
    """Prints the catalogue of datasets."""
    here = [name for name in catalogue() if find(name).kind != "download"]
    if not as_json:
        stdout(wide).print(tables.datasets(catalogue(), here, wide))
        return
    shown = ("task", "graphs", "nodes", "edges", "features", "classes", "split", "description")
    listed = [
        {"name": name, **{key: getattr(e, key) for key in shown}, "local": name in here}
        for name, e in catalogue().items()
    ]
    print(json.dumps(listed))


def list_partitions(as_json: bool = False) -> None:
    """Prints the partitions."""
    print_listing(
        partitions(),
        as_json,
        lambda name: {
            "divides_sets_of_graphs": divides_graphs(name),
            "settings": partition_settings(name),
        },
    )


def list_models(as_json: bool = False) -> None:
    """Prints the architectures."""
    print_listing(architectures(), as_json)
    if not as_json:
        out.print(
            "\nname-LAYERSxWIDTH, e.g. gcn-4x128; several, separated by commas, are used in turn",
            style="dim",
        )


def partition(
    given: Given,
    assignments: Iterable[str],
    plot: Path | None,
    as_json: bool,
    wide: bool = False,
) -> None:
    """Divides a graph, prints the statistics of the partition, and draws it if asked to."""
    federation = make_recipe(_with_options({}, given, assignments)).federation()
    statistics = partition_statistics(federation)
    if plot:
        from fedloom.experiments.report.partition_plot import plot_partition  # few want a picture

        plot_partition(federation, plot)
        _say(f"wrote {plot}")
    if as_json:
        print(json.dumps(statistics))
    else:
        stdout(wide).print(tables.partition_statistics(statistics, wide))


# ---- deployments ----
def make_keys(host: str | None, parties: Sequence[str], folder: Path, days: int) -> None:
    """Makes the keys of a deployment, and prints which party needs which file.

    Args:
        host: The coordinator's host; None makes no certificates.
        parties: The parties that need keys.
        folder: Where to write the files.
        days: How long the parties' keys and the server's certificate are valid.
    """
    from fedloom.deploy.keys import (  # cryptography
        make_authority,
        make_party,
        party_files,
        require_days,
    )

    if not host and not parties:
        raise ConfigError(
            "keys: nothing to make. Give the coordinator's HOST, --party NAME, or both"
        )
    if twice := sorted({name for name in parties if parties.count(name) > 1}):
        raise ConfigError(f"party {twice[0]!r} is named twice")
    require_days(days)
    for name in parties:  # write nothing if one of the names is not possible
        party_files(folder, name)
    written = make_authority(folder, host, days) if host else []
    for name in parties:
        written += make_party(folder, name, days)
    print_listing({str(path): _destination(path) for path in written})


def rotate_key(path: Path, days: int) -> None:
    """Replaces a party's key, and prints who needs which file.

    Args:
        path: The party's .key file.
        days: How long the new key is valid.
    """
    from fedloom.deploy.keys import make_successor

    secret, public = make_successor(path, days)
    print_listing(
        {
            str(
                secret
            ): f"secret: stays with this party; `fedloom join --key {secret}` from now on",
            str(public): "to the coordinator, beside its agreement; it may lie beside others' too",
        }
    )


def revoke_key(agreement: Path, party: str, keys: Path, reason: str, trust: bool = False) -> None:
    """Revokes a party's keys, and prints where the list is.

    Args:
        agreement: The coordinator's copy of the agreement.
        party: The party.
        keys: The folder with ca.key.
        reason: Why; one of `fedloom.deploy.keyring.REASONS`.
        trust: Execute the Python files that the agreement names.
    """
    from fedloom.deploy.agreement import read_agreement
    from fedloom.deploy.keyring import revoke

    keyring = read_agreement(agreement, trust).read_keyring()
    path, made = revoke(keyring, party, reason, keys / "ca.key")
    print_listing(
        {
            str(path): f"list {made.number} of revoked keys (in all {len(made.keys)}); "
            "`fedloom serve` sends it to the parties"
        }
    )


def show_keys(where: Path, as_json: bool, trust: bool = False) -> None:
    """Prints the keys of an agreement or of a folder, and its certificates.

    Args:
        where: The agreement's file, or a folder with .pub files.
        as_json: Print JSON.
        trust: Execute the Python files that the agreement names.
    """
    from fedloom.deploy.agreement import read_agreement
    from fedloom.deploy.keyring import certificate_ends, certificate_warnings, folder_rows

    keyring = None if where.is_dir() else read_agreement(where, trust).read_keyring()
    folder = where if keyring is None else keyring.folder
    rows = {row.name: row for row in (folder_rows(where) if keyring is None else keyring.rows())}
    lines = {name: row.text for name, row in rows.items()}
    lines |= {name: f"certificate, until {end}" for name, end in certificate_ends(folder).items()}
    if not lines:
        raise ConfigError(f"{folder}: holds no .pub file and no certificate")
    print_listing(lines, as_json, lambda name: rows[name].to_json() if name in rows else {})
    for line in [*(keyring.warnings() if keyring else ()), *certificate_warnings(folder)]:
        _note(line)


def _destination(path: Path) -> str:
    if path.name in ("ca.key", "server.key"):
        return "secret: stays with the coordinator"
    if path.name == "server.crt":
        return "stays with the coordinator; parties that connect see it"
    if path.name == "ca.crt":
        return "to every party, which recognises the coordinator by it"
    if path.suffix == ".key":
        return f"secret: to party {path.stem} only"
    return "to the coordinator"


def serve(
    agreement: Path,
    keys: Path,
    folder: Path | None,
    wait: float,
    insecure: bool,
    as_json: bool,
    resumed: dict[str, Any] | None = None,
    trust: bool = False,
) -> None:
    """Coordinates a federation.

    Args:
        agreement: The TOML file that all parties have agreed on.
        keys: The folder with the coordinator's keys.
        folder: The run folder; None makes a new one.
        wait: Seconds to wait for all parties.
        insecure: Run without TLS.
        as_json: Print JSON.
        resumed: The config of the run to continue; None starts a new run.
        trust: Execute the Python files that the agreement names as method or model.
    """
    from fedloom.deploy.agreement import read_agreement
    from fedloom.deploy.serve import serve as coordinate

    agreed = read_agreement(agreement, trust)
    folder = folder or _unused(
        Path("runs") / f"{agreement.stem}-{Path(agreed.method).stem}-s{agreed.run.seed}"
    )
    origin = {
        "agreement": str(agreement.resolve()),
        "keys": str(keys.resolve()),
        "wait": wait,
        "insecure": insecure,
    }

    def execute(callbacks: Sequence[Callback]) -> Result:
        return coordinate(
            agreed,
            keys,
            folder,
            insecure=insecure,
            wait=wait,
            resumed=resumed,
            origin=origin,
            log=_say,
            callbacks=callbacks,
        )

    with _warnings_as_lines(), _saying_how_to_resume(folder):
        result = _with_progress(agreed.method, execute)
    _print(result, as_json)


def join(
    agreement: Path,
    party: str,
    key: Path,
    data: Path,
    state: Path | None,
    patience: float,
    tell_errors: bool,
    socket: Path | None,
    insecure: bool,
    baseline: bool,
    trust: bool,
) -> None:
    """Takes part in a federation until the run ends. `fedloom.cli.join` describes the options."""
    from fedloom.deploy.join import join as take_part

    with _warnings_as_lines(), _bar() as bar:
        take_part(
            agreement,
            party,
            key,
            data,
            state or Path(f"fedloom-{party}"),
            patience=patience,
            tell_errors=tell_errors,
            socket=socket,
            insecure=insecure,
            baseline=baseline,
            trust=trust,
            log=_say,
            progress=partial(_live, bar, bar.add_task(party, total=None, score="")),
        )


def _live(bar: Progress, task: TaskID, done: int, planned: int, line: str) -> None:
    """Shows a party's own scores: a live line on a terminal, else a line for each evaluation."""
    bar.update(task, completed=done, total=planned, score=line)
    if not err.is_terminal:
        _say(f"round {done} of {planned}: {line}")


# ---- tuning ----
def tune(
    recipe: str | None,
    given: Given,
    assignments: Iterable[str],
    over: Sequence[str],
    trials: int,
    minutes: float,
    seeds: int,
    folder: Path | None,
    jobs: int,
    as_json: bool,
    wide: bool = False,
    trust: bool = False,
) -> None:
    """Tunes a recipe; prints the best trials and the path of the new recipe."""
    from fedloom.experiments.tune import tune as search

    base = _tables(recipe, given, assignments, trust)
    chosen = make_recipe(base)
    folder = folder or Path("tuned") / chosen.name
    over_so_far = 0
    with (
        _saying_how_to_repeat(lambda: f"{over_so_far} trials are over, {folder} keeps them"),
        _bar() as bar,
    ):
        row = bar.add_task(f"tune {chosen.method}", total=trials, score="")

        def step(trial: Trial, ended: Sequence[Trial]) -> None:
            nonlocal over_so_far
            over_so_far = len(ended)
            best = max((t.validation for t in ended if t.validation is not None), default=None)
            bar.update(row, completed=len(ended), score=f"best val {tables.percent(best)}")
            if trial.error:
                err.print(
                    f"trial {trial.number} failed: {trial.error}", style="yellow", highlight=False
                )
            elif not err.is_terminal:
                scores = f"val {tables.percent(trial.validation)}, best {tables.percent(best)}"
                _say(f"trial {trial.number}: {scores}; {len(ended)} of {trials} are over")

        tuned = search(
            base,
            folder,
            over=over,
            trials=trials,
            minutes=minutes,
            seeds=seeds,
            jobs=jobs,
            command=_command_line(),
            on_trial=step,
        )
    if as_json:
        print(json.dumps({**asdict(tuned), "recipe": str(tuned.recipe)}))
    else:
        stdout(wide).print(tables.tuning(tuned, wide=wide))
    err.print(f"recipe: {tuned.recipe}", style="dim")


# ---- comparisons ----
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
    wide: bool = False,
    trust: bool = False,
) -> None:
    """Runs a grid, prints its table, and writes tables and report into the folder.

    Raises RoundFailed at the end if a cell did not complete.
    """
    base = _with_options(read_tables(file) if file else {}, given, [])
    require_trust(base, f"grid {str(file)!r}", trust, _with_options({}, given, []))
    methods = grid.read_axes(base.get("compare", {})).methods
    require_valid(metric, jobs, on)
    cells = grid.cells(grid.assigned(base, assignments, methods), folder / "runs")
    with (
        _saying_how_to_repeat(
            lambda: (
                f"{sum(map(grid.is_done, cells))} of {len(cells)} runs are complete, "
                f"{folder / 'runs'} keeps them and the others as far as they are"
            )
        ),
        _grid_progress(cells) as progress,
    ):
        compared, failed, written = run_and_compare(
            cells, folder, progress.watch, metric=metric, jobs=jobs, on=on
        )
    if report:
        from fedloom.experiments.report.write import write_report

        written.append(write_report(compared, folder / "report.html", _command_line()))
    if as_json:
        print(json.dumps(tables.comparison_as_json(compared)))
    else:
        stdout(wide).print(tables.comparison(compared, wide))
    err.print("wrote " + ", ".join(map(str, written)), style="dim")
    if failed:
        first = failed[0].cell.name
        raise RoundFailed(
            f"{len(failed)} of {len(cells)} cells did not complete, the first of them {first}"
        )


class _GridProgress:
    """Shows how far a grid is.

    On a terminal there is a bar for the grid, with the time left, and one for each run. Elsewhere
    there is a line for each run that ends.
    """

    def __init__(self, bar: Progress, cells: int):
        self.bar = bar
        self.grid = bar.add_task("grid", total=cells, more="")
        self.rows: dict[str, TaskID] = {}

    def watch(self, state: executor.State, event: executor.Step | executor.End | None) -> None:
        left = state.seconds_left()
        more = "" if left is None else f"about {tables.duration(left)} left"
        total = len(state.cells)
        self.bar.update(self.grid, completed=state.done, total=total, more=more)
        if event is None:
            if state.kept:
                _say(f"{len(state.kept)} of {total} runs are cached")
        elif isinstance(event, executor.Step):
            self._step(event)
        else:
            self._end(state, event, more)

    def _step(self, step: executor.Step) -> None:
        name = step.cell.name
        if name not in self.rows:
            self.rows[name] = self.bar.add_task(f"  {name}", total=None, more="")
        score = "" if step.validation is None else f"val {tables.percent(step.validation)}"
        self.bar.update(self.rows[name], completed=step.round, total=step.planned, more=score)

    def _end(self, state: executor.State, end: executor.End, more: str) -> None:
        name = end.cell.name
        if name in self.rows:
            self.bar.remove_task(self.rows.pop(name))
        if end.status != "completed":
            err.print(f"{name}: {end.status}: {end.cause}", style="yellow", highlight=False)
        elif not err.is_terminal:
            took = tables.duration(state.seconds[name])
            left = f"; {more}" if more else ""
            _say(f"{state.done} of {len(state.cells)}: {name} in {took}{left}")


@contextmanager
def _grid_progress(cells: Sequence[grid.Cell]) -> Iterator[_GridProgress]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[more]}"),
    )
    with _Progress(*columns, console=err, disable=not err.is_terminal) as bar:
        yield _GridProgress(bar, len(cells))


# ---- common parts ----
def _say(line: str) -> None:
    err.print(plain_text(line, LINE), style="dim", highlight=False)


def _note(line: str) -> None:
    err.print(plain_text(line, LINE), style="yellow", highlight=False)


@contextmanager
def _saying_how_to_repeat(kept: Callable[[], str]) -> Iterator[None]:
    """Says after Ctrl-C or SIGTERM what is kept, and that the same command continues."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        _note(f"stopped: {kept()}")
        _note(f"to continue: {_command_line()}")
        raise


def _command_line() -> str:
    return shlex.join(["fedloom", *sys.argv[1:]])


def _unused(folder: Path) -> Path:
    """Returns the folder, or one with a number appended that does not exist yet."""
    count, path = 1, folder
    while path.exists():
        count += 1
        path = folder.with_name(f"{folder.name}.{count}")
    return path


class _Progress(Progress):
    """A bar that prints nothing if it is disabled. Before rich 14.3 it prints an empty line."""

    def stop(self) -> None:
        if not self.disable:
            super().stop()


def _bar() -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[score]}"),
    )
    return _Progress(*columns, console=err, disable=not err.is_terminal)


class _RunProgress(Callback):
    """Shows a bar on a terminal, elsewhere a line for each tenth of the rounds."""

    def __init__(self, method: str, bar: Progress):
        self.method, self.bar, self.score = method, bar, ""
        self.task = bar.add_task(method, total=None, score="")

    def on_start(self, run: Mapping[str, Any]) -> None:
        for line in run["cautions"]:
            err.print(f"warning: {line}", style="yellow")
        if line := tables.workers(run):
            err.print(line, style="dim")
        elif reason := run["engine_details"].get("reason"):
            _say(f"engine: {tables.engine(run)}: {reason}")

    def on_round(self, entry: dict[str, Any], rounds: int) -> None:
        selected = [k for k in entry if k.startswith("val_") and not k.endswith("_mean")]
        if selected:  # the last one is the selection metric's
            self.score = f"{label(selected[-1])} {tables.percent(entry[selected[-1]])}"
        done = entry["round"]
        self.bar.update(self.task, completed=done, total=rounds, score=self.score)
        tenth, before = (count * 10 // max(rounds, 1) for count in (done, done - 1))
        if not err.is_terminal and entry.get("stage") != "finetune" and tenth > before:
            _say(f"{self.method}: round {done} of {rounds}, {self.score}")


def _with_progress(
    method: str, execute: Callable[[Sequence[Callback]], Result], *more: Callback
) -> Result:
    """Runs `execute`, which passes the callbacks on to the run."""
    with _bar() as bar:
        return execute([_RunProgress(method, bar), *more])


def _print(
    result: Result, as_json: bool, compared: Sequence[Result] = (), wide: bool = False
) -> None:
    if as_json:
        baselines = {other.summary["method"]: other.summary for other in compared}
        print(json.dumps({**result.summary, **({"baselines": baselines} if baselines else {})}))
    else:
        shown = tables.result(result.summary, [other.summary for other in compared], wide)
        stdout(wide).print(shown)
    for line in result.summary.get("warnings", ()):
        err.print(f"warning: {line}", style="yellow")
    if result.folder:
        err.print(f"run folder: {result.folder}", style="dim")
