"""Run: one method on one federation."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from fedloom._system import LOCK, locked, make_private, retained_memory
from fedloom.core.adversary import ATTACKS, JOINT, Adversary, draw_liars, flipped
from fedloom.core.class_weight import explicit_weights
from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.core.method import Method
from fedloom.core.phase import phases_of
from fedloom.core.registry import make_method, method_class, name_of, with_base, with_settings
from fedloom.data.federation import Federation, Roster
from fedloom.data.graph import Graph
from fedloom.data.statistics import label_counts
from fedloom.engines import engine_class
from fedloom.engines.base import Engine
from fedloom.errors import ConfigError, unknown
from fedloom.experiments import memory_estimate
from fedloom.experiments.arguments import (
    RUN_SETTINGS,
    require_federation,
    require_known,
    require_method,
    require_settings,
)
from fedloom.experiments.callbacks import Given
from fedloom.experiments.engine_choice import choose_engine
from fedloom.experiments.private_run import with_privacy
from fedloom.experiments.recorder import Recorder
from fedloom.experiments.result import Result
from fedloom.experiments.run_folder import read_config
from fedloom.experiments.settings import AdversarySettings, RunSettings
from fedloom.experiments.trackers import Track, Tracking
from fedloom.experiments.trust import code_in
from fedloom.nn.build import architectures, split_specs
from fedloom.nn.metric_names import FROM_CONFUSION, METRICS, TWO_CLASSES
from fedloom.nn.own_model import OwnModel, OwnSpec, Source, is_own, own_spec
from fedloom.privacy.choice import require_cohort, responder_for

ModelSource: TypeAlias = str | Source


def run(
    method: str | Mapping[str, Any] | Method | type[Method],
    federation: Federation = None,  # type: ignore[assignment]  # None: an error that says what to do
    *,
    model: ModelSource | Sequence[ModelSource] = "gcn",
    dropout: float = 0.5,
    settings: RunSettings | None = None,
    adversary: AdversarySettings | Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    callbacks: Given = None,
    resume: bool = False,
    track: Track = (),
    config: Mapping[str, Any] | None = None,
    **options: Any,
) -> Result:
    """Runs a method on a federation.

    Args:
        method: A name ("fedavg"), a path to a method file, a Method or its class, or the [method]
            table of a recipe: {"name": "fedavg", "lr": 0.01}.
        federation: The parties' graphs: `fedloom.divide(graph, clients=10)`.
        model: A spec ("gcn", "gcn-4x128"); your own torch module: its class, a function
            (num_features, num_classes) -> module, a module that every client copies, or
            "file.py:Class"; or several of these, as a list or separated by commas. The clients get
            them in turn.
        dropout: Share of hidden units dropped in training.
        settings: Engine, seed, participation and so on. The default is `RunSettings()`.
        adversary: Clients that lie, in a simulation: {"clients": 3, "attack": "sign-flip"}.
        out: A folder for the run.
        callbacks: A function that gets each history entry, a `Callback`, or a list of these. One
            that returns True stops the rounds.
        resume: Continue the run in `out` from its checkpoint, or from the beginning if it has none.
            A completed run is read.
        track: "tensorboard", "mlflow" or a Tracker; see `fedloom.experiments.trackers`.
        config: What the run folder keeps as the run's origin; given by recipes.
        options: Fields of the method (`lr=0.01`) or of RunSettings (`seed=0`). A name that both
            have is an error.

    Returns:
        The scores, models and traffic of the run.
    """
    require_method(method, federation)
    federation = require_federation(federation)
    require_settings(settings)
    name, chosen, changes = _resolve_method(method, options)
    settings = replace(settings or RunSettings(), **changes)
    liars = read_adversary(adversary)
    divided, federation = federation, (federation.merged() if chosen.centralized else federation)
    with threads(settings.threads):
        federation.check()
        facts = agree_on_facts(chosen, name, federation.roster, model, dropout, settings, liars)
        choice = choose_engine(settings, federation, facts)
    if facts.adversary and facts.secure and choice.engine == "flower":
        raise ConfigError(
            "adversary.clients: the parties of engine 'flower' are honest; in a secure run use "
            "another engine"
        )
    predicted_mb = memory_estimate.require(choice.need)
    tracking = Tracking(track)
    tracking.check(None if out is None else Path(out), resume)
    folder = run_folder(out, resume)
    recorder = Recorder(federation.roster, settings, folder, callbacks)
    recorder.tracking = tracking
    recorder.engine_name, recorder.engine_reason = choice.engine, choice.reason
    recorder.predicted_mb = predicted_mb
    recorder.partition = label_counts(divided) if recorder.folder else {}
    recorder.encoding = federation.encoding
    recorder.joint_artifacts = partial(chosen.joint_artifacts, federation)
    recorder.config = dict(
        config or _config(name, chosen, federation, _as_text(model), dropout, settings, liars)
    )

    def engine() -> Engine:
        graphs = _as_trained(federation, facts)
        inductive = federation.inductive
        clients = (Client(n, g, facts, inductive, responder_for(facts, n)) for n, g in graphs)
        made = engine_class(recorder.engine_name)
        return made(chosen, clients, settings.faults, choice.workers)

    alone = locked(folder, "run") if folder else nullcontext()
    with alone, threads(settings.threads), retained_memory(), _saying_what_is_kept(recorder):
        run_folder(out, resume)  # again, now that no other process writes to it
        result = recorder.execute(name, chosen, facts, engine, resume, divided.seconds_loading)
    # A recipe can make the federation again.
    return result if "partition" in recorder.config else replace(result, federation=federation)


def read_adversary(given: AdversarySettings | Mapping[str, Any] | None) -> AdversarySettings:
    """Returns the [adversary] table as settings; raises a ConfigError that names a wrong key."""
    if isinstance(given, AdversarySettings):
        return given
    known = [f.name for f in fields(AdversarySettings)]
    for key in given or {}:
        if key not in known:
            raise unknown("setting in [adversary]:", key, known)
    return AdversarySettings(**(given or {}))


def _as_trained(federation: Federation, facts: Facts) -> list[tuple[str, Graph]]:
    """Returns each client's name and graph; liars may have flipped their training labels."""
    liars = facts.adversary
    flips = liars.clients if liars is not None and liars.attack == "label-flip" else ()
    graphs = zip(federation.names, federation.graphs, strict=True)
    return [(name, flipped(graph) if name in flips else graph) for name, graph in graphs]


@contextmanager
def _saying_what_is_kept(recorder: Recorder) -> Iterator[None]:
    """Adds to a KeyboardInterrupt, as Ctrl-C raises it, how to continue the run."""
    try:
        yield
    except KeyboardInterrupt as stopped:
        if recorder.folder:
            more = "" if "partition" in recorder.config else ", federation"
            more += ", trust=True" if code_in(recorder.config) else ""
            call = f"fedloom.resume({str(recorder.folder)!r}{more})"
            stopped.add_note(f"the run is kept: {call} continues it")
        raise


def _resolve_method(
    method: str | Mapping[str, Any] | Method | type[Method], options: Mapping[str, Any]
) -> tuple[str, Method, dict[str, Any]]:
    """Returns the method's name, the method, and the options that are run settings.

    Raises a ConfigError if an option could be a setting of the method or of the run.
    """
    of_run = {key: value for key, value in options.items() if key in RUN_SETTINGS}
    of_method = {key: value for key, value in options.items() if key not in RUN_SETTINGS}
    if isinstance(method, (Method, Mapping)):
        for key in of_method:
            raise ConfigError(
                f"{key}: the method is given with all its settings, as an object or a table; "
                f"set {key} there. Valid options here: {', '.join(sorted(RUN_SETTINGS))}"
            )
    if isinstance(method, Method):
        name, chosen = name_of(type(method)), method
    elif isinstance(method, Mapping):
        table = dict(method)
        name = table.pop("name", None)
        if not isinstance(name, str):
            raise ConfigError(f"method.name is {name!r}, must be a text")
        chosen = make_method(name, table)
    else:
        if isinstance(method, str):
            name, cls = method, method_class(method, of_method)
        else:
            name, cls = name_of(method), with_base(method, of_method)
        require_known(of_method, [f.name for f in fields(cls)], name)
        chosen = with_settings(cls, name, of_method)
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


def model_specs(model: ModelSource | Sequence[ModelSource]) -> list[str]:
    """Returns the specs of the models that clients get in turn.

    model: as in `run`.
    """
    sources = model if isinstance(model, Sequence) and not isinstance(model, str) else [model]
    if not sources:
        raise ConfigError("model is empty; give a name (`fedloom models`) or a module")
    found: list[str] = []
    for source in sources:
        if isinstance(source, str) and not isinstance(source, OwnSpec):
            found += [own_spec(s) if is_own(s) else s for s in split_specs(source)]
        else:
            found.append(own_spec(source))
    return found


def _as_text(model: ModelSource | Sequence[ModelSource]) -> str:
    return model if isinstance(model, str) else ",".join(model_specs(model))


def agree_on_facts(
    method: Method,
    name: str,
    roster: Roster,
    model: ModelSource | Sequence[ModelSource],
    dropout: float,
    settings: RunSettings,
    adversary: AdversarySettings | None = None,
) -> Facts:
    """Returns what every party will know before training.

    Takes the arguments of `run`. Raises a ConfigError if method, models, data and settings do not
    fit each other.
    """
    if not 0 <= dropout < 1:
        raise ConfigError(f"model.dropout is {dropout!r}, must be at least 0 and below 1")
    if roster.task not in method.tasks:
        tasks = " and ".join(method.tasks)
        raise ConfigError(f"method {name!r} does {tasks} tasks, the data are a {roster.task} task")
    specs = model_specs(model)
    of_clients = tuple(specs[k % len(specs)] for k in range(roster.num_clients))
    if method.one_model and len(set(of_clients)) > 1:
        raise ConfigError(
            f"model: method {name!r} averages weights and needs one model for all clients, "
            f"got {', '.join(specs)}"
        )
    _require_fitting_models(method, name, specs)
    if method.transductive and roster.inductive:
        raise ConfigError(
            f"data.inductive: method {name!r} must see all nodes before training, "
            "including those to be predicted"
        )
    if settings.participation < 1 and not method.partial_participation:
        raise ConfigError(
            f"run.participation is {settings.participation:g}: method {name!r} trains every client "
            "in its one round; leave it at 1"
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
    liars = _liars(method, roster, settings, adversary or AdversarySettings())
    explicit_weights(settings.class_weight, roster.num_classes)
    if settings.selection in TWO_CLASSES and roster.num_classes != 2:
        valid = ", ".join(metric for metric in METRICS if metric not in TWO_CLASSES)
        raise ConfigError(
            f"run.selection is {settings.selection!r}, which needs two classes; the data have "
            f"{roster.num_classes}; valid: {valid}"
        )
    facts = Facts(
        roster.num_features,
        roster.num_classes,
        roster.task,
        roster.names,
        of_clients,
        dropout,
        settings.seed,
        settings.auc or roster.num_classes == 2 or settings.selection not in FROM_CONFUSION,
        secure,
        settings.upload,
        settings.download,
        settings.selection,
        settings.top_k,
        settings.class_weight,
        liars,
        edge_epsilon=0.0 if method.centralized else settings.edge_epsilon,
        edges_seeded=settings.dp_seeded,
    )
    if settings.is_private and not method.centralized:
        facts = with_privacy(facts, method, settings)
    if method.shares_width() and len({facts.width_of(spec) for spec in of_clients}) > 1:
        raise ConfigError(
            "model: all clients' models must share one embedding width for this method, "
            f"got {', '.join(specs)}"
        )
    for spec in filter(is_own, dict.fromkeys(of_clients)):
        built = facts.build(spec, "server")
        assert isinstance(built, OwnModel)
        if method.needs_of_model == "embeddings" and not built.split:
            raise ConfigError(
                f"model {spec!r}: method {name!r} needs embeddings and a head. Give the module a "
                "method embed(x, edge_index) and a module head, so that forward returns "
                "head(embed(x, edge_index)) (docs/own-model.md)"
            )
    method.check(facts)
    return facts


def _liars(
    method: Method, roster: Roster, settings: RunSettings, adversary: AdversarySettings
) -> Adversary | None:
    """Returns who lies; None if nobody does.

    Raises a ConfigError if the method, the rule of aggregation and the liars do not fit.
    """
    count, rule = adversary.clients, settings.aggregation
    cohort = max(1, round(settings.participation * roster.num_clients))
    phases = phases_of(type(method)).values()
    if rule != "mean" and not any(phase.updates_sent for phase in phases):
        raise ConfigError(
            f"run.aggregation is {rule!r}: this method's clients send no weights whose mean or sum "
            "the server takes; valid: mean"
        )
    if count >= roster.num_clients:
        raise ConfigError(
            f"adversary.clients is {count} of {roster.num_clients} clients; at least one must be "
            "honest"
        )
    vectors = cohort // settings.bucketing if settings.secure and settings.bucketing else cohort
    settings.robustness.check(vectors, min(count, cohort))
    if not count:
        return None
    if method.centralized:
        raise ConfigError("adversary.clients: this method has no clients; leave it at 0")
    if settings.secure and adversary.attack in JOINT:
        valid = ", ".join(attack for attack in ATTACKS if attack not in JOINT)
        raise ConfigError(
            f"adversary.attack is {adversary.attack!r}, which needs the honest clients' updates; "
            f"in a secure run nobody sees them; valid: {valid}"
        )
    names = draw_liars(roster.names, count, settings.seed)
    return Adversary(names, adversary.attack, adversary.strength)


def _require_fitting_models(method: Method, name: str, specs: Sequence[str]) -> None:
    if method.needs_of_model == "architecture" and any(map(is_own, specs)):
        own = next(filter(is_own, specs))
        raise ConfigError(
            f"model {own!r}: method {name!r} works inside fedloom's own "
            f"architectures; valid: {', '.join(architectures())}"
        )


def _require_cross_edges(name: str, roster: Roster) -> None:
    cut = roster.num_clients > 1 and roster.about.get("edges_cut", 1)
    if cut and not roster.knows_cross_edges:
        raise ConfigError(
            f"method {name!r} works on the edges between clients: "
            "set partition.cross_edges = 'known'"
        )


def run_folder(out: str | Path | None, resume: bool) -> Path | None:
    """Returns the folder of a run, made if needed. Only its owner can open a new one.

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
        make_private(folder)
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
    adversary: AdversarySettings,
) -> dict[str, Any]:
    lies = {f.name: getattr(adversary, f.name) for f in fields(adversary)}
    return {
        "data": dict(federation.about),
        "model": {"name": model, "dropout": dropout},
        "method": {"name": name, **method.settings()},
        "run": {f.name: getattr(settings, f.name) for f in fields(settings)},
        **({"adversary": lies} if adversary.clients else {}),
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
