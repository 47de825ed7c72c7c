"""Run: one method on one federation."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fedloom._system import LOCK, locked, retained_memory
from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.core.method import Method
from fedloom.core.registry import make_method, name_of
from fedloom.data.federation import Federation, Roster
from fedloom.data.statistics import label_counts
from fedloom.engines import engine_class
from fedloom.engines.base import Engine
from fedloom.errors import ConfigError
from fedloom.experiments import memory_estimate
from fedloom.experiments.engine_choice import choose_engine
from fedloom.experiments.recorder import OnRound, OnStart, Recorder
from fedloom.experiments.result import Result
from fedloom.experiments.run_folder import read_config
from fedloom.experiments.settings import RunSettings
from fedloom.experiments.trackers import Track, Tracking
from fedloom.nn.build import parse_spec
from fedloom.privacy.secure_aggregation import require_cohort, responder_for


def run(
    method: str | Mapping[str, Any] | Method,
    federation: Federation,
    *,
    model: str = "gcn",
    dropout: float = 0.5,
    settings: RunSettings | None = None,
    out: str | Path | None = None,
    on_round: OnRound | None = None,
    on_start: OnStart | None = None,
    resume: bool = False,
    track: Track = (),
    config: Mapping[str, Any] | None = None,
    seconds_loading: float = 0.0,
    **options: Any,
) -> Result:
    """Runs a method on a federation.

    Args:
        method: A name ("fedavg"), a path to a method file, a Method, or the [method] table of a
            recipe: {"name": "fedavg", "lr": 0.01}.
        federation: The parties' graphs.
        model: A spec ("gcn", "gcn-4x128"), or several separated by commas. The clients get them in
            turn.
        dropout: Share of hidden units dropped in training.
        settings: Engine, seed, participation and so on. The default is `RunSettings()`.
        out: A folder for the run.
        on_round: Called with each history entry and the number of rounds.
        on_start: Called when the engine is ready.
        resume: Continue the run in `out` from its checkpoint, or from the beginning if it has none.
            A completed run is read.
        track: "tensorboard", "mlflow" or a Tracker; see `fedloom.experiments.trackers`.
        config: What the run folder keeps as the run's origin; given by recipes.
        seconds_loading: Time that loading and dividing took; given by recipes.
        options: Fields of the method (`lr=0.01`) or of RunSettings (`seed=0`). A name that both
            have is an error.

    Returns:
        The scores, models and traffic of the run.
    """
    name, chosen, of_run = _resolve_method(method, options)
    settings = replace(settings or RunSettings(), **of_run)
    divided, federation = federation, (federation.merged() if chosen.centralized else federation)
    federation.check()
    facts = agree_on_facts(chosen, name, federation.roster, model, dropout, settings)
    choice = choose_engine(settings, federation, facts)
    predicted_mb = memory_estimate.require(choice.need)
    tracking = Tracking(track)
    tracking.check(None if out is None else Path(out), resume)
    folder = run_folder(out, resume)
    recorder = Recorder(federation.roster, settings, folder, on_round, on_start)
    recorder.tracking = tracking
    recorder.engine_name, recorder.engine_reason = choice.engine, choice.reason
    recorder.predicted_mb = predicted_mb
    recorder.partition = label_counts(divided) if recorder.folder else {}
    recorder.joint_artifacts = partial(chosen.joint_artifacts, federation)
    recorder.config = dict(config or _config(name, chosen, federation, model, dropout, settings))

    def engine() -> Engine:
        graphs = zip(federation.names, federation.graphs, strict=True)
        inductive = federation.inductive
        clients = (Client(n, g, facts, inductive, responder_for(facts)) for n, g in graphs)
        made = engine_class(recorder.engine_name)
        return made(chosen, clients, settings.faults, settings.workers)

    alone = locked(folder, "run") if folder else nullcontext()
    with alone, threads(settings.threads), retained_memory():
        run_folder(out, resume)  # again, now that no other process writes to it
        return recorder.execute(name, chosen, facts, engine, resume, seconds_loading)


def _resolve_method(
    method: str | Mapping[str, Any] | Method, options: Mapping[str, Any]
) -> tuple[str, Method, dict[str, Any]]:
    """Returns the method's name, the method, and the options that are run settings.

    Raises a ConfigError if an option could be a setting of the method or of the run.
    """
    known = {f.name for f in fields(RunSettings)}
    of_run = {key: value for key, value in options.items() if key in known}
    of_method = {key: value for key, value in options.items() if key not in known}
    if not isinstance(method, str):
        for key in of_method:
            raise ConfigError(
                f"{key}: the method is given with all its settings, as an object or a table; "
                f"set {key} there. Valid options here: {', '.join(sorted(known))}"
            )
    if isinstance(method, Method):
        name, chosen = name_of(method), method
    else:
        table = {"name": method, **of_method} if isinstance(method, str) else dict(method)
        name = table.pop("name", None)
        if not isinstance(name, str):
            raise ConfigError(f"method.name is {name!r}, must be a text")
        chosen = make_method(name, table)
    require_unreserved(type(chosen), name)
    own = {f.name for f in fields(chosen)}
    for key in of_run:
        if key in own:
            raise ConfigError(
                f"{key} is a setting of method {name!r} and of the run. Pass the run's as "
                f"settings=fedloom.RunSettings({key}=...), and the method's in a table: "
                f'fedloom.run({{"name": {name!r}, "{key}": ...}}, ...)'
            )
    return name, chosen, of_run


def require_unreserved(method: type[Method], name: str) -> None:
    """Raises a ConfigError if a setting of the method has a reserved name.

    The arguments of `run` are reserved: it would take an option of that name for its own. So is
    "name", which chooses the method in a [method] table.
    """
    arguments = {p.name for p in inspect.signature(run).parameters.values()} - {"options"}
    reserved = sorted({*arguments, "name"})
    own = {f.name for f in fields(method)}
    for key in reserved:
        if key in own:
            raise ConfigError(
                f"method {name!r}: its setting {key!r} has a reserved name; rename it. "
                f"Reserved: {', '.join(reserved)}"
            )


def agree_on_facts(
    method: Method, name: str, roster: Roster, model: str, dropout: float, settings: RunSettings
) -> Facts:
    """Returns what every party will know before training.

    Raises a ConfigError if method, models, data and settings do not fit each other.
    """
    if not 0 <= dropout < 1:
        raise ConfigError(f"model.dropout is {dropout!r}, must be at least 0 and below 1")
    if roster.task not in method.tasks:
        tasks = " and ".join(method.tasks)
        raise ConfigError(f"method {name!r} does {tasks} tasks, the data are a {roster.task} task")
    specs = [spec.strip().lower() for spec in model.split(",")]
    of_clients = tuple(specs[k % len(specs)] for k in range(roster.num_clients))
    if method.one_model and len(set(of_clients)) > 1:
        raise ConfigError(
            f"model: method {name!r} averages weights and needs one model for all clients, "
            f"got {', '.join(specs)}"
        )
    if method.shares_width() and len({parse_spec(spec).width for spec in of_clients}) > 1:
        raise ConfigError(
            "model: all clients' models must share one embedding width for this method, "
            f"got {', '.join(specs)}"
        )
    if method.transductive and roster.inductive:
        raise ConfigError(
            f"data.inductive: method {name!r} must see all nodes before training, "
            "including those to be predicted"
        )
    if method.uses_cross_edges:
        _require_cross_edges(name, roster)
    secure = None if method.centralized else settings.terms  # one party has nothing to hide
    if secure and (single := method.single_replies()):
        raise ConfigError(
            f"run.secure: this method asks for every client's own answer to {single[0]!r}; "
            "a secure run gives sums only (see `fedloom methods NAME`)"
        )
    if secure:
        cohort = round(settings.participation * roster.num_clients)
        require_cohort(cohort, "run.participation x partition.clients")
    settings.upload_filters.check(type(method), "run.upload")
    facts = Facts(
        roster.num_features,
        roster.num_classes,
        roster.task,
        roster.names,
        of_clients,
        dropout,
        settings.seed,
        settings.auc or roster.num_classes == 2,
        secure,
        settings.upload,
        settings.download,
    )
    method.check(facts)
    return facts


def _require_cross_edges(name: str, roster: Roster) -> None:
    cut = roster.num_clients > 1 and roster.about.get("edges_cut", 1)
    if cut and not roster.knows_cross_edges:
        raise ConfigError(
            f"method {name!r} works on the edges between clients: "
            "set partition.cross_edges = 'known'"
        )


def run_folder(out: str | Path | None, resume: bool) -> Path | None:
    """Returns the folder of a run, made if needed.

    Raises a ConfigError if it cannot be written to or holds another run, and a DataError if
    `resume` is set and it holds no run.
    """
    if out is None:
        if resume:
            raise ConfigError("out: resuming needs the folder of the run")
        return None
    folder = Path(out)
    if resume:
        read_config(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not resume and any(path.name != LOCK for path in folder.iterdir()):
            with locked(folder, "run"):  # raises if the run in it is under way
                pass
            raise ConfigError(
                f"out: {str(folder)!r} is not empty; choose another folder, or `fedloom resume` "
                "to continue that run"
            )
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"out: cannot write to {str(folder)!r} ({error.strerror})") from error
    return folder


def _config(
    name: str,
    method: Method,
    federation: Federation,
    model: str,
    dropout: float,
    settings: RunSettings,
) -> dict[str, Any]:
    return {
        "data": dict(federation.about),
        "model": {"name": model, "dropout": dropout},
        "method": {"name": name, **method.settings()},
        "run": {f.name: getattr(settings, f.name) for f in fields(settings)},
    }


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Sets the number of threads of a tensor operation inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
