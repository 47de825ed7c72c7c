"""A run: one method on one federation, from the first ask to the result, with everything kept in a folder that can be read again."""

from __future__ import annotations

import gc
import json
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from fedloom import checkpoint, crash, disk, memory, models, task
from fedloom.allocator import freed_is_kept, peak
from fedloom.checkpoint import Checkpoint
from fedloom.data.holdings import held_by_class
from fedloom.engines import Patience, engine_class, engine_names, has_workers, make_engine
from fedloom.errors import ConfigError, DataError, unknown
from fedloom.folder import FORMAT, entries, is_completed, read_config, read_history, read_summary
from fedloom.graph import Federation, Roster
from fedloom.history import History
from fedloom.ledger import Ledger
from fedloom.message import Absent, Message, flatten, unflatten
from fedloom.method import Method, check_setting, make_method, setting
from fedloom.party import Client, Facts, Replies, Rules, Server, restore, snapshot
from fedloom.privacy import masked
from fedloom.privacy.secure_sum import Terms
from fedloom.stopping import undisturbed
from fedloom.trackers import Begun, Track, Tracking

Scores: TypeAlias = dict[str, float | None]


@dataclass(frozen=True)
class RunSettings:
    """How a run is carried out: the [run] table of a recipe."""

    seed: int = setting(0, "root of every random stream", at_least=0)
    engine: str = setting("loop", "how phases get run")
    evaluation: str = setting("", "which model is scored: local, global or common (empty = the method's default)")
    participation: float = setting(1.0, "share of the clients that take part in a round", above=0, at_most=1)
    evaluate_every: int = setting(1, "rounds between evaluations", at_least=1)
    patience: int = setting(0, "stop after so many evaluations without a better validation accuracy (0 = never)", at_least=0)
    checkpoint_every: int = setting(0, "rounds between checkpoints to resume from (0 = none)", at_least=0)
    auc: bool = setting(False, "AUC also for more than two classes (two-class tasks always have it)")
    secure: bool = setting(False, "the server gets masked sums of the clients' replies and nothing else")
    secure_threshold: float = setting(2 / 3, "more than this share of a client's neighbourhood must stay to the end", at_least=0.5, below=1)
    secure_neighbours: int = setting(0, "clients that a client shares pads with (0 = all; about 100 for a thousand clients)", at_least=0)
    secure_bits: int = setting(64, "width of a masked number, 32 or 64", at_least=32, at_most=64)
    secure_range: float = setting(2.0**24, "largest absolute value that a client may add; beyond it is an error", above=0)
    threads: int = setting(1, "threads of a tensor operation; the same number gives the same bits", at_least=1, at_most=1024)
    workers: int = setting(0, "processes that share the clients, in the engines that have such (0 = as the cores allow)", at_least=0)
    quorum: float = setting(1.0, "share of the clients asked that must answer; below 1 the others may be absent", above=0, at_most=1)
    deadline: float = setting(0.0, "seconds that an exchange may take, in the engines that can do without who is late", at_least=0)
    grace: float = setting(0.0, "seconds that the others have once a quorum has answered (0 = until the deadline)", at_least=0)
    retries: int = setting(2, "how often the others are asked again, if too few have answered, before the run fails", at_least=0)

    def __post_init__(self) -> None:
        for f in fields(self):
            object.__setattr__(self, f.name, check_setting(f, getattr(self, f.name), "run"))
        if self.engine not in engine_names():
            raise unknown("run.engine", self.engine, engine_names())
        if not has_workers(self.engine) and self.workers:
            raise ConfigError(f"run.workers is {self.workers}, engine {self.engine!r} has none; valid: 0, or run.engine processes or ray")
        engine = engine_class(self.engine)
        if self.quorum < 1 and not engine.outlives:
            others = "1, or run.engine loop, wire, processes, ray or flower"
            raise ConfigError(f"run.quorum is {self.quorum:g}, in engine {self.engine!r} nobody can do without a client; valid: {others}")
        for name in ("deadline", "grace"):
            if getattr(self, name) and not engine.interrupts:
                others = "0, or run.engine processes, ray or flower"
                raise ConfigError(f"run.{name} is {getattr(self, name):g}, engine {self.engine!r} has none; valid: {others}")
        _ = self.terms  # refuses what does not fit

    @property
    def terms(self) -> Terms | None:
        """What clients insist on in secure sums; None if the run is not secure."""
        wanted = Terms(self.secure_threshold, self.secure_neighbours, self.secure_bits, self.secure_range)
        return wanted if self.secure else None


@dataclass(frozen=True)
class Result:
    """What a run gives. `summary` is what `--json` prints; the properties are its most used entries."""

    summary: dict[str, Any]
    models: dict[str, Message] = field(default_factory=dict, repr=False)
    folder: Path | None = None
    entries: list[dict[str, Any]] = field(default_factory=list, repr=False)  # of the history, if there is no folder to read it from

    @cached_property
    def history(self) -> list[dict[str, Any]]:
        """An entry for each round, and for each evaluation outside of the rounds; read from the folder when first asked for."""
        return read_history(self.folder) if self.folder else self.entries

    @property
    def accuracy(self) -> float | None:
        """Test accuracy at the round with the best validation accuracy, weighted by the clients' sizes."""
        return self.summary["accuracy"]

    @property
    def per_client(self) -> list[dict[str, Any]]:
        """Each client's size, counts and scores at that round."""
        return self.summary["per_client"]

    @property
    def traffic(self) -> dict[str, Any]:
        """Bytes and scalars up and down, in all and per phase."""
        return self.summary["traffic"]


def run(
    method: str | Method, federation: Federation, *, model: str = "gcn", dropout: float = 0.5, out: str | Path | None = None,
    on_round: Callable[[dict[str, Any], int], None] | None = None, on_start: Callable[[dict[str, Any]], None] | None = None,
    resume: bool = False, track: Track = (), config: Mapping[str, Any] | None = None, seconds_loading: float = 0.0, **settings: Any,
) -> Result:  # fmt: skip
    """Runs a method on a federation.

    method: a name, a path to a method file, or a Method. model: a spec ("gcn", "gcn-4x128") or several, separated by commas, dealt
    over the clients in turn. out: a folder to keep the run in. on_round: called with each history entry and the number of rounds.
    on_start: called when the engine is there, with what the summary will say of it (`engine`, `engine_details`). resume: go on with
    the run in `out`, from its checkpoint or, if it has none, from the beginning; one that is completed is read. track: who else is told
    of rounds and result, "tensorboard", "mlflow" or a Tracker (see fedloom.trackers). settings: fields of the method (lr=...) and of
    RunSettings (seed=...). A recipe also gives `config`, what the run folder keeps as its origin, and `seconds_loading`, what loading and
    dividing took.
    """
    of_run = {f.name for f in fields(RunSettings)}
    rules = RunSettings(**{k: v for k, v in settings.items() if k in of_run})
    of_method = {k: v for k, v in settings.items() if k not in of_run}
    if isinstance(method, Method):
        if of_method:
            raise ConfigError(f"method is given as an object; its settings {', '.join(of_method)} belong in its constructor")
        name, chosen = type(method).__module__.rpartition(".")[2].replace("_", "-"), method
    else:
        name, chosen = method, make_method(method, of_method)
    divided, federation = federation, (federation.pooled() if chosen.pooled else federation).check()
    facts = agree_on_facts(chosen, name, federation.roster, model, dropout, rules)
    predicted_mb = memory.require(memory.predict(federation, facts, rules.engine, rules.workers))
    tracking = Tracking(track)
    tracking.check(None if out is None else Path(out), resume)
    record = Recorder(federation.roster, rules, run_folder(out, resume), on_round, on_start)
    record.tracking = tracking
    record.predicted_mb = predicted_mb
    record.held = held_by_class(divided) if record.folder else {}
    record.shown_of_all = partial(chosen.exhibits_of_all, federation)
    record.config = dict(config or _config(name, chosen, federation, model, dropout, rules))

    def engine() -> Any:
        graphs = zip(federation.names, federation.graphs, strict=True)
        clients = (Client(client, graph, facts, federation.inductive) for client, graph in graphs)
        return make_engine(rules.engine, chosen, clients, rules.workers, patience_of(rules))

    with threads(rules.threads), freed_is_kept():
        return record.carry_out(name, chosen, facts, engine, resume, seconds_loading)


def patience_of(rules: RunSettings) -> Patience:
    """What absence a run bears, for its engine and its server (`rules.patience` is something else: for how long scores may stand still)."""
    return Patience(rules.quorum, rules.grace, rules.deadline)


def agree_on_facts(method: Method, name: str, roster: Roster, model: str, dropout: float, rules: RunSettings) -> Facts:
    """What every party will know before training, or a ConfigError if method, models and data do not fit each other."""
    if not 0 <= dropout < 1:
        raise ConfigError(f"model.dropout is {dropout!r}, must be at least 0 and below 1")
    if roster.task not in method.tasks:
        raise ConfigError(f"method {name!r} does {' and '.join(method.tasks)} tasks, the data are a {roster.task} task")
    specs = [spec.strip().lower() for spec in model.split(",")]
    dealt = tuple(specs[k % len(specs)] for k in range(roster.num_clients))
    if method.one_model and len(set(dealt)) > 1:
        raise ConfigError(f"model: method {name!r} averages weights and needs one model for all clients, got {', '.join(specs)}")
    if method.shares_width() and len({models.parse(spec).width for spec in dealt}) > 1:
        raise ConfigError(f"model: all clients' models must share one embedding width for this method, got {', '.join(specs)}")
    if method.transductive and roster.inductive:
        raise ConfigError(f"data.inductive: method {name!r} has to see all nodes before training, those to be predicted too")
    if method.crosses:
        _require_cross_edges(name, roster)
    secure = rules.terms if not method.pooled else None  # a single party has nobody to hide from
    if secure:
        masked.require_cohort(round(rules.participation * roster.num_clients), "run.participation x partition.clients")
    auc = rules.auc or roster.num_classes == 2
    facts = Facts(roster.num_features, roster.num_classes, roster.task, roster.names, dealt, dropout, rules.seed, auc, secure)
    method.check(facts)
    return facts


def _require_cross_edges(name: str, roster: Roster) -> None:
    if not roster.knows_cross_edges and roster.num_clients > 1 and roster.about.get("edges_cut", 1):
        raise ConfigError(f"method {name!r} works on the edges between clients: set partition.cross_edges = 'known'")


def evaluation(method: Method | type[Method], name: str, asked: str) -> str:
    """Which model gets scored: what was asked for if the method has it, the method's first choice if nothing was."""
    if asked and asked not in method.evaluations:
        raise unknown(f"run.evaluation for method {name!r}:", asked, method.evaluations)
    return asked or method.evaluations[0]


def run_folder(out: str | Path | None, resume: bool) -> Path | None:
    """The folder that a run is kept in, made if need be; ConfigError if it cannot be written to, or holds another run.

    resume: the folder must be there, with a run that was begun in it; DataError if not.
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
        if not resume and any(folder.iterdir()):
            raise ConfigError(f"out: {str(folder)!r} is not empty; choose another folder, or `fedloom resume` to go on with that run")
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"out: cannot write to {str(folder)!r} ({error.strerror})") from error
    return folder


def _config(name: str, method: Method, federation: Federation, model: str, dropout: float, rules: RunSettings) -> dict[str, Any]:
    run_table = {f.name: getattr(rules, f.name) for f in fields(rules)}
    return {
        "data": dict(federation.about), "model": {"name": model, "dropout": dropout},
        "method": {"name": name, **method.settings()}, "run": run_table,
    }  # fmt: skip


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads for tensor operations, inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Recorder:
    """Keeps what happens in a run, line by line in its folder if it has one: whatever ends the run, the folder can be read."""

    def __init__(self, roster: Roster, rules: RunSettings, folder: Path | None, on_round: Any, on_start: Any = None):
        self.roster, self.rules, self.folder, self.on_round, self.on_start = roster, rules, folder, on_round, on_start
        self.config: dict[str, Any] = {}
        self.predicted_mb = 0.0  # peak of memory, as it was foreseen
        self.held: dict[str, Any] = {}  # who holds what, where one process may know it
        self.shown_of_all: Callable[[], Message] = dict  # for pictures: what can be shown of all clients together, where one may know it
        self.tracking = Tracking()
        self.history = History(folder, rules.patience)
        self.planned = 0
        self.engine: Any = None
        self._evaluation: dict[str, Any] = {}
        self._pending: tuple[Checkpoint, Ledger] | None = None  # read, and to be put back when the round loop begins

    # ---- the whole of it ----
    def carry_out(
        self, name: str, method: Method, facts: Facts, make: Callable[[], Any], resume: bool, seconds_loading: float
    ) -> Result:  # fmt: skip
        """Runs the method in the engine that `make` gives, and writes the folder; also when it ends by an error or Ctrl-C, which is
        raised again."""
        self.name = name
        asked = self.rules
        evaluated = evaluation(method, name, asked.evaluation)
        rules = Rules(evaluated, asked.participation, asked.evaluate_every, patience_of(asked), asked.retries)
        self.seconds = {"load": seconds_loading, "setup": 0.0, "train": 0.0, "evaluate": 0.0, "total": 0.0}
        self._began = self._loop_began = time.perf_counter()
        if self.folder and resume:
            self._require_same_run(self.folder)
            if is_completed(self.folder):
                return read_run(self.folder)
            self._reopen(self.folder)
        elif self.folder:
            _put_json(self.folder / "config.json", self.config)
        if self.folder and self.held:
            _put_json(self.folder / "holdings.json", self.held)
        kept = entries(self.folder) if self.folder and resume else ()  # read one by one, and only if somebody wants to know
        self.tracking.begin(Begun(self.config, self.roster.about, name, self.folder), kept)
        self.server = server = Server(method, facts, self._call, rules, self)
        if self._pending is not None:
            server.attendance.resume(self._pending[0].about.get("attendance", {}))
        failure: BaseException | None = None
        with ExitStack() as stack:
            try:
                self.engine = stack.enter_context(closing(make()))
                if self.on_start:
                    self.on_start(self._engine())
                crash.point("nothing-asked")
                method.run(server)
                self.engine.finish()
            except BaseException as error:  # noqa: BLE001  (it is raised as soon as the folder is in order)
                failure = error
            gc.unfreeze()
            with undisturbed():
                result, failure = self._finish(server, failure, rules.evaluation)
        del self.server  # it knows this recorder: in a circle, both would keep all graphs until Python looks for garbage
        try:
            self.tracking.end(result.summary)
        finally:
            if failure is not None:
                raise failure
        return result

    def _reopen(self, folder: Path) -> None:
        """Cuts the folder's files back to where the run goes on: to its checkpoint, to nothing if it has none."""
        found = checkpoint.read(folder)
        if found:
            self._pending = found, self._read_records(folder, found)
        (folder / "summary.json").unlink(missing_ok=True)  # of the run that stopped; killed from here on, it is unfinished
        self.history.cut()
        (self._pending[1] if self._pending else Ledger()).write(folder)

    def _call(self, phase: str, messages: dict[str, Message]) -> Mapping[str, Message | Absent]:
        crash.point("exchange-unsent")
        self.engine.round = self.server.round
        answers = self.engine.call(phase, messages)
        crash.point("exchange-answered")
        return answers

    def _engine(self) -> dict[str, Any]:
        about = self.engine.about() if self.engine else {}
        return {"engine": self.rules.engine, "engine_details": {"threads": self.rules.threads, **about}}

    # ---- called by the server ----
    def entered_rounds(self, server: Server, count: int) -> int:
        """The loop begins: set-up is over; after a resume, put everything back to the checkpoint."""
        self.planned = count
        self._loop_began = time.perf_counter()
        self.seconds["setup"] = self._loop_began - self._began
        gc.freeze()  # what is there stays: of a thousand clients, Python need not look for garbage again and again
        if self._pending is None:
            self._write_down(server)
            return 0
        return self._put_back(server)

    def evaluated(self, server: Server, replies: Replies, stage: str) -> None:
        """Turns the clients' confusion matrices into scores, each client's and averaged."""
        columns = task.all_scores(*(replies.stack(name) for name in ("val", "test", "auc")))
        rows: list[dict[str, Any]] = [
            {"id": c, **dict(zip(columns, values, strict=True))} for c, *values in zip(replies, *columns.values(), strict=True)
        ]
        size = {holding.name: holding.items for holding in self.roster.holdings}
        by_size, equal = [float(size[r["id"]]) for r in rows], [1.0] * len(rows)
        weighted, plain = ({m: task.average(column, w) for m, column in columns.items()} for w in (by_size, equal))
        self._note(server, stage, weighted, plain, {"clients": rows})

    def evaluated_in_sum(self, server: Server, total: Message, stage: str) -> None:
        """The averages alone: in a secure run nobody learns a client's scores."""
        self._note(server, stage, *task.added_scores(total["scores"]), {})

    def _note(self, server: Server, stage: str, by_size: Scores, plain: Scores, more: dict[str, Any]) -> None:
        self._evaluation = {"stage": stage, **by_size, **{f"{m}_mean": v for m, v in plain.items()}, **more}
        if stage != "train" or not server.in_round:
            self._close_entry(server)

    def finished_round(self, server: Server) -> bool:
        """Writes the round down; tells whether patience has run out."""
        crash.point("round-unclosed")
        self._close_entry(server)
        every = self.rules.checkpoint_every
        if self.folder and every and server.round % every == 0:
            self._save_checkpoint(self.folder, server)
        crash.point("round-closed")
        return self.history.out_of_patience()

    # ---- writing ----
    def _close_entry(self, server: Server) -> None:
        elapsed = round(time.perf_counter() - self._began, 4)
        sent = {f"bytes_{way}": count for way, count in server.ledger.sent().items()}
        entry = {"round": server.round, "participants": list(server.participants), **self._evaluation, "seconds": elapsed, **sent}
        entry |= server.attendance.report()
        self._evaluation = {}
        if self._pending is not None:
            return  # set-up is being done again, and this was written down the first time
        self._write_down(server, entry)
        self.tracking.add(entry)
        if self.on_round:
            self.on_round(entry, self.planned)

    def _write_down(self, server: Server, entry: dict[str, Any] | None = None) -> None:
        with undisturbed():
            if entry is not None:
                self.history.add(entry)
            if self.folder:
                server.ledger.write(self.folder)

    def _finish(self, server: Server, failure: BaseException | None, evaluation: str) -> tuple[Result, BaseException | None]:
        """Writes what is left to write. Gives the result, and what ended the run if it is not completed."""
        now = time.perf_counter()
        self.seconds["evaluate"] = server.seconds_evaluating
        self.seconds["train"] = max(0.0, now - self._loop_began - server.seconds_evaluating)
        self.seconds["total"] = now - self._began + self.seconds["load"]
        final: dict[str, Message] = {}
        try:
            if self._pending is None:
                final = self._models(server)
                self._keep_models(server, final)
                if self.folder and failure is None:
                    self._keep_exhibits(self.folder)
            else:  # a resume that ended in set-up: all is as the checkpoint says
                self._put_back_records(server)
        except Exception as error:  # noqa: BLE001  (it is raised unless another one was first; the summary has to be written)
            failure = _first_of(failure, error)
        summary = self._summary(server, failure, evaluation)
        if self.folder:
            try:
                _put_json(self.folder / "summary.json", summary)
            except OSError as error:
                failure = _first_of(failure, error)
        return Result(summary, final, self.folder, self.history.entries), failure

    def _models(self, server: Server) -> dict[str, Message]:
        final = self.engine.models() if self.engine else {}
        return {**final, "server": server.state["model"]} if isinstance(server.state.get("model"), dict) else final

    def _keep_models(self, server: Server, final: Mapping[str, Message]) -> None:
        """The ledger's last rows, and everybody's model."""
        if not self.folder:
            return
        server.ledger.write(self.folder)
        _put_tensors(self.folder / "models", final)

    def _keep_exhibits(self, folder: Path) -> None:
        """For pictures: what clients have to show of themselves, a file each, and what there is to show of all. Often nothing."""
        if shown := self.engine.exhibits():
            _put_tensors(folder / "exhibits", shown)
        if of_all := self.shown_of_all():
            disk.put(folder / "exhibits.safetensors", _as_bytes(of_all))

    def _summary(self, server: Server, failure: BaseException | None, evaluation: str) -> dict[str, Any]:
        at_best, last = self.history.scored()
        self.history.absences.add(server.attendance.report())  # of a round that was not finished
        about = self.roster.about
        return {
            "format": FORMAT, **_ending(failure),
            "method": self.name, "dataset": about["dataset"],
            "partition": about.get("partition"), "clients": about["clients"],
            "model": self.config.get("model", {}).get("name"), "seed": self.rules.seed, **self._engine(),
            "task": self.roster.task, "evaluation": evaluation,
            "rounds": self.history.round, "best_round": at_best.get("round"),
            **{m: at_best.get(m) for m in task.METRICS},
            **{f"{m}_mean": at_best.get(f"{m}_mean") for m in task.METRICS if m != "val_accuracy"},
            "final_accuracy": last.get("accuracy"),
            "per_client": self._per_client(at_best),
            "without_training_items": self.roster.without_training,
            "secure": masked.report(server), "notes": server.notes, **self.history.absences.told(),
            "traffic": server.ledger.traffic(), "seconds": {k: round(v, 4) for k, v in self.seconds.items()},
            "memory_predicted_mb": round(self.predicted_mb, 1),
            "peak_rss_mb": round(self.engine.peak_mb() if self.engine else peak() / 2**20, 1),
            "history_hash": server.history_hash.hex(), "versions": _versions(), "config": self.config,
        }  # fmt: skip

    def _per_client(self, at_best: dict[str, Any]) -> list[dict[str, Any]]:
        scored = {row["id"]: row for row in at_best.get("clients", [])}
        return [
            {
                "id": held.name, **{count: getattr(held, count) for count in ("nodes", "items", "train", "val", "test")},
                "accuracy": scored.get(held.name, {}).get("accuracy"), "f1": scored.get(held.name, {}).get("f1_macro"),
                **{m: scored.get(held.name, {}).get(m) for m in ("f1_macro", "f1_present", "f1_weighted", "auc", "val_accuracy")},
            }
            for held in self.roster.holdings
        ]  # fmt: skip

    # ---- checkpoints ----
    def _save_checkpoint(self, folder: Path, server: Server) -> None:
        """Everything the next round depends on, and how far history and ledger were; they are on the disk before it says so."""
        about = {
            "round": server.round, "hash": server.history_hash.hex(), "notes": server.notes,
            "bytes": {"history": self.history.sync(), "ledger": server.ledger.sync()}, "attendance": server.attendance.saved(),
        }  # fmt: skip
        state = snapshot({"server": {"state": server.state, "streams": server.streams}, "clients": self.engine.snapshot()})
        with undisturbed():
            checkpoint.write(folder, Checkpoint(about, state))

    def _require_same_run(self, folder: Path) -> None:
        of_run = read_config(folder).get("run", {})
        for key in ("seed", "secure"):  # an engine or a number of rounds may be another
            if (was := of_run.get(key)) != getattr(self.rules, key):
                raise ConfigError(f"resume: the run in {str(folder)!r} has run.{key} = {json.dumps(was)}")

    def _read_records(self, folder: Path, found: Checkpoint) -> Ledger:
        """History and ledger as they were at the checkpoint."""
        try:
            self.history.go_on_from(found.about["bytes"]["history"])
            return Ledger.read(folder, found.about["bytes"]["ledger"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise DataError(f"resume: {str(folder)!r} is damaged ({error})") from error

    def _put_back_records(self, server: Server) -> Checkpoint:
        assert self._pending is not None
        (found, server.ledger), self._pending = self._pending, None
        server.history_hash, server.notes = bytes.fromhex(found.about["hash"]), found.about["notes"]
        return found

    def _put_back(self, server: Server) -> int:
        server.catch_up()  # before the ledger is put back: this, too, was written down the first time
        found = self._put_back_records(server)
        kept = found.state.get("server", {})
        restore(server.state, kept.get("state", {}))
        for purpose, state in kept.get("streams", {}).items():
            server.rng(purpose).set_state(state)
        self.engine.restore(found.state.get("clients", {}))
        server.seconds_evaluating, server.over = 0.0, self.history.out_of_patience()
        return int(found.about["round"])


def _put_json(path: Path, content: Mapping[str, Any]) -> None:
    disk.put(path, (json.dumps(content, indent=1) + "\n").encode())


def _put_tensors(place: Path, messages: Mapping[str, Message]) -> None:
    """Puts messages into a folder, each in a file that is named after its owner."""
    place.mkdir(exist_ok=True)

    def keep(owner: str) -> None:
        disk.put(place / f"{owner}.safetensors", _as_bytes(messages[owner]), place.name)

    with ThreadPoolExecutor(16) as pool:  # a disk is as long with one file as with many at a time
        list(pool.map(keep, messages))


def _as_bytes(message: Message) -> bytes:
    return save({name: tensor.contiguous() for name, tensor in flatten(message).items()})


def _ending(failure: BaseException | None) -> dict[str, str]:
    """How a run ended, for its summary: completed, stopped from outside, or failed."""
    if failure is None:
        return {"status": "completed"}
    if isinstance(failure, KeyboardInterrupt | SystemExit):
        return {"status": "stopped", "cause": "interrupted" if isinstance(failure, KeyboardInterrupt) else "terminated"}
    return {"status": "failed", "cause": f"{type(failure).__name__}: {failure}"}


def _first_of(earlier: BaseException | None, error: Exception) -> BaseException:
    """What ended a run when several things went wrong: the first of them, with a note of the other."""
    if earlier is None:
        return error
    earlier.add_note(f"and then, while the folder was put in order: {type(error).__name__}: {error}")
    return earlier


def _versions() -> dict[str, str]:
    packages = ("fedloom", "torch", "torch_geometric", "numpy", "scipy", "scikit-network", "pymetis", "safetensors", "cryptography")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


def read_run(folder: str | Path) -> Result:
    """Reads a run folder back, also one of a run that was stopped or killed. DataError if it is not one or is damaged."""
    folder = Path(folder)
    summary = read_summary(folder)
    config = read_config(folder) if summary is None else summary["config"]
    try:
        history = read_history(folder)
        kept = {path.stem: unflatten(load_file(path)) for path in sorted((folder / "models").glob("*.safetensors"))}
    except (OSError, ValueError, SafetensorError) as error:
        raise DataError(f"run: {str(folder)!r} is damaged ({error})") from error
    if summary is None:
        summary = {"status": "unfinished", "config": config, "rounds": history[-1]["round"] if history else 0}
    return Result(summary, kept, folder)
