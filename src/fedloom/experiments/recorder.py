"""Recorder: records a run, in memory or in its folder, and resumes it."""

from __future__ import annotations

import gc
import json
import platform
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from safetensors.torch import save
from torch import Tensor

from fedloom._system import (
    crash_point,
    deferred_signals,
    installed_version,
    make_private,
    peak_memory,
    plain_text,
    write_atomic,
)
from fedloom.core.class_weight import weigh_classes
from fedloom.core.facts import Facts
from fedloom.core.ledger import Ledger
from fedloom.core.message import Absent, Message, flatten, isolate
from fedloom.core.method import Method
from fedloom.core.replies import Replies
from fedloom.core.server import RoundPolicy, Server
from fedloom.core.state import restore, snapshot
from fedloom.core.waist import not_known
from fedloom.data.encoding import Encoding
from fedloom.data.federation import PartySize, Roster
from fedloom.engines import AUTO
from fedloom.engines.base import Engine
from fedloom.errors import ConfigError, DataError, SecondWriterError
from fedloom.experiments import checkpoint
from fedloom.experiments.callbacks import Callbacks, Given
from fedloom.experiments.checkpoint import Checkpoint
from fedloom.experiments.findings import findings
from fedloom.experiments.history import History, Matrix
from fedloom.experiments.private_run import (
    noisy_sums,
    privacy_summary,
    privacy_warnings,
    require_resumable,
)
from fedloom.experiments.result import MODELS, Models, Result, Stored, load_run
from fedloom.experiments.run_folder import (
    CAUSE_LENGTH,
    FORMAT,
    PARTITION,
    entries,
    is_completed,
    read_config,
)
from fedloom.experiments.settings import RunSettings, chosen_evaluation
from fedloom.experiments.trackers import Begun, Tracking
from fedloom.experiments.trained import WHICH, ModelCard, model_bytes
from fedloom.nn import metrics
from fedloom.nn.metric_names import METRICS
from fedloom.privacy.choice import aggregation_for


class Kept(NamedTuple):
    """The server's part of the best evaluation of a stage.

    Attributes:
        round: The round of the evaluation.
        model: The server's model, or nothing.
    """

    round: int
    model: Message


Scores: TypeAlias = dict[str, float | None]
_PACKAGES = (
    "torch",
    "torch_geometric",
    "numpy",
    "scipy",
    "scikit-network",
    "pymetis",
    "safetensors",
    "cryptography",
)


class Recorder:
    """Records a run. Its folder, if it has one, is readable however the run ends.

    Attributes:
        roster: The clients and their sizes.
        settings: The run settings.
        folder: The run folder; None keeps everything in memory.
        callbacks: What is called at the start, after each round and at the end.
        config: The run's origin, as config.json keeps it.
        engine_name: The engine's name. The settings may say "auto".
        engine_reason: Why "auto" chose it.
        predicted_mb: The predicted peak of memory.
        partition: Label counts per client, in a simulation.
        encoding: What made the features of raw columns, in a simulation; None if nothing did.
        joint_artifacts: Returns the artifacts of all clients as one, in a simulation.
        tracking: The trackers.
        history: The entries so far.
        planned: The number of rounds.
        server_class: The class of the server that the recorder makes.
    """

    server_class: ClassVar[type[Server]] = Server

    def __init__(
        self,
        roster: Roster,
        settings: RunSettings,
        folder: Path | None,
        callbacks: Given = None,
    ):
        self.roster, self.settings, self.folder = roster, settings, folder
        self.callbacks = Callbacks(callbacks)
        self._asked_to_stop = False  # by a callback
        self.config: dict[str, Any] = {}
        self.engine_name, self.engine_reason = settings.engine, ""
        self.predicted_mb = 0.0
        self.partition: dict[str, Any] = {}
        self.encoding: Encoding | None = None
        self.joint_artifacts: Callable[[], Message] = dict
        self.tracking = Tracking()
        self.history = History(
            folder, settings.patience, settings.selection, last=settings.is_private
        )
        self.planned = 0
        self._checkpoints = checkpoint.Schedule(settings.checkpoint_every)
        self._made: Engine | None = None
        self._evaluation: dict[str, Any] = {}
        self._confusion: Matrix | None = None  # of the evaluation
        self._kept: dict[str, Kept] = {}  # by stage
        # A checkpoint and its ledger, from reading them until the rounds begin.
        self._pending: tuple[Checkpoint, Ledger] | None = None

    @property
    def liars(self) -> tuple[str, ...]:
        """The clients that lie in a simulation. Scores are those of the others."""
        return self.facts.adversary.clients if self.facts.adversary else ()

    @property
    def engine(self) -> Engine:
        """The engine. It exists while the run executes."""
        assert self._made is not None
        return self._made

    def execute(
        self,
        name: str,
        method: Method,
        facts: Facts,
        make: Callable[[], Engine],
        resume: bool,
        seconds_loading: float,
    ) -> Result:
        """Runs the method and writes the folder.

        The folder is also written if the run ends by an error or a signal, which is raised again.

        Args:
            name: The method's name.
            method: The method.
            facts: What every party knows.
            make: Returns the engine.
            resume: Continue the run in the folder.
            seconds_loading: The time that loading the data took.
        """
        self.name, self.method, self.facts = name, method, facts
        settings = self.settings
        evaluated = chosen_evaluation(method, name, settings.evaluation)
        policy = RoundPolicy(
            evaluated,
            settings.participation,
            settings.evaluate_every,
            settings.faults,
            settings.retries,
            settings.robustness,
        )
        self.seconds = {
            "load": seconds_loading,
            "setup": 0.0,
            "train": 0.0,
            "evaluate": 0.0,
            "total": 0.0,
        }
        self._began = self._loop_began = time.perf_counter()
        if self.folder and resume:
            self._require_same_run(self.folder)
            if is_completed(self.folder):
                checkpoint.remove(self.folder)  # if the process was killed before it could
                return load_run(self.folder)
            self._reopen(self.folder)
        elif self.folder:
            _write_json(self.folder / "config.json", self.config)
        if self.folder and self.partition:
            _write_json(self.folder / PARTITION, self.partition)
        earlier = entries(self.folder) if self.folder and resume else ()  # read only if tracked
        self.tracking.begin(Begun(self.config, self.roster.about, name, self.folder), earlier)
        self.server = server = self.server_class(
            method,
            facts,
            self._call,
            policy,
            self,
            aggregation_for(facts, self.folder, noisy_sums(method, facts)),
            self._sizes,
            self.roster.inductive,
        )
        low = {name: float(getattr(method, name)) for name in self._cautions()}
        server.notes |= {f"method.{name}, below what is advised": v for name, v in low.items()}
        if self._pending is not None:
            server.absences.resume(self._pending[0].about.get("absences", {}))
        failure: BaseException | None = None
        with ExitStack() as stack:
            try:
                self._made = stack.enter_context(closing(make()))
                self.callbacks.on_start(self._about())
                crash_point("nothing-asked")
                weigh_classes(server)
                method.run(server)
                best, _ = self.history.scored()
                self.engine.finish(best.get("stage", ""), best.get("round", 0))
            except BaseException as error:  # noqa: BLE001  (raised below, after the folder is written)
                failure = error
            gc.unfreeze()
            with deferred_signals():
                result, failure = self._finish(server, failure, evaluated)
        # The server refers to this recorder, and the engine to the server. The cycle would keep all
        # graphs in memory until the next garbage collection.
        del self.server
        if self._made is not None:
            self._made.longest_reply = not_known
        try:
            self.tracking.end(result.summary)
            self.callbacks.on_end(result)
        finally:
            if failure is not None:
                raise failure
        return result

    def _reopen(self, folder: Path) -> None:
        """Truncates the folder's files to the checkpoint; to nothing if there is none."""
        found = checkpoint.read(folder)
        if found:
            self._pending = found, self._read_records(folder, found)
            if self.settings.engine == AUTO:  # the same bits need the same engine
                before = found.about.get("engine", self.engine_name)
                if before != self.engine_name:
                    self.engine_name, self.engine_reason = before, "the run began in it"
        # This summary is of the stopped run. If the process is killed now, the run is unfinished.
        (folder / "summary.json").unlink(missing_ok=True)
        self.history.truncate()
        (self._pending[1] if self._pending else Ledger()).write(folder)

    def _call(self, phase: str, messages: dict[str, Message]) -> Mapping[str, Message | Absent]:
        crash_point("exchange-unsent")
        self.engine.round = self.server.round
        self.engine.longest_reply = self.server.longest_reply
        answers = self.engine.call(phase, messages)
        crash_point("exchange-answered")
        return answers

    def _sizes(self) -> dict[str, PartySize]:
        """Returns what each client has said about its size. A client may join late."""
        return {size.name: size for size in self.roster.sizes}

    def _engine(self) -> dict[str, Any]:
        details = self._made.details() if self._made else {}
        if self.settings.engine == AUTO:
            details = {"chosen_by": AUTO, "reason": self.engine_reason, **details}
        return {
            "engine": self.engine_name,
            "engine_details": {"threads": self.settings.threads, **details},
        }

    def _about(self) -> dict[str, Any]:
        """Returns what callbacks are told at the start."""
        return {
            "method": self.name,
            "dataset": self.roster.about["dataset"],
            "clients": self.roster.about["clients"],
            "seed": self.settings.seed,
            "folder": self.folder,
            "without_training_items": self.roster.without_training,
            "cautions": list(self._cautions().values()),
            **self._engine(),
        }

    def _cautions(self) -> dict[str, str]:
        """Returns what a plain run tells more than is advised: a line for each setting."""
        return {} if self.facts.secure else self.method.cautions()

    # ---- called by the server ----
    def entered_rounds(self, server: Server, count: int) -> int:
        """The set-up is over. Returns the number of finished rounds.

        After a resume it restores the checkpoint.
        """
        self.planned = count
        self._loop_began = time.perf_counter()
        self.seconds["setup"] = self._loop_began - self._began
        self._checkpoints.start()
        gc.freeze()  # clients stay: the collector need not visit a thousand of them again and again
        if self._pending is None:
            self._append(server)
            done = 0
        else:
            done = self._restore(server)
        budget = server.aggregation.budget
        server.over |= budget is not None and budget.exhausted
        return done

    def evaluated(self, server: Server, replies: Replies, stage: str) -> None:
        """Turns the clients' confusion matrices into scores of each client and averages."""
        stacks = {name: replies.stack(name) for name in next(iter(replies.values()), {})}
        # A method with an `evaluate` of its own may leave out the last two.
        losses = stacks.pop("loss", torch.full((len(replies),), metrics.UNDEFINED))
        known = (stacks[name] for name in ("val", "test", "auc", "probabilistic") if name in stacks)
        columns = metrics.all_scores(*known, selection=self.settings.selection)
        loss = [None if value < 0 else value for value in losses.tolist()]
        rows: list[dict[str, Any]] = [
            {"id": c, **dict(zip((*columns, "loss"), values, strict=True))}
            for c, *values in zip(replies, *columns.values(), loss, strict=True)
        ]
        sizes, liars = self._sizes(), self.liars
        honest = [float(c not in liars) for c in replies]
        by_size = [float(sizes[c].items) * true for c, true in zip(replies, honest, strict=True)]
        weighted, plain = (
            {m: metrics.average(column, w) for m, column in columns.items()}
            for w in (by_size, honest)
        )
        trained = [sizes[c].train * true for c, true in zip(replies, honest, strict=True)]
        more: dict[str, Any] = {"loss": metrics.average(loss, trained), "clients": rows}
        if liars:
            whole = [float(sizes[c].items) for c in replies]
            more["accuracy_all"] = metrics.average(columns["accuracy"], whole)
        confusion = stacks["test"] * torch.tensor(honest).long().view(-1, 1, 1)
        self._note(server, stage, weighted, plain, confusion.sum(0), more)

    def evaluated_in_sum(self, server: Server, total: Message, stage: str) -> None:
        """Records averages. In a secure run the server does not see a client's scores."""
        selection = self.settings.selection
        means = metrics.mean_scores(total["scores"], total["more"], selection)
        loss, items = total["loss"].tolist()
        more = {"loss": loss / items if items else None}
        self._note(server, stage, *means, total["confusion"], more)

    def _note(
        self,
        server: Server,
        stage: str,
        by_size: Scores,
        plain: Scores,
        confusion: Tensor,
        more: dict[str, Any],
    ) -> None:
        self._confusion = confusion.tolist()
        self._evaluation = {
            "stage": stage,
            **by_size,
            **{f"{m}_mean": v for m, v in plain.items()},
            **more,
        }
        if self._pending is None and self.history.leads(self._evaluation):
            self._keep_models(server, stage)
        if stage != "train" or not server.in_round:
            self._close_entry(server)

    def _keep_models(self, server: Server, stage: str) -> None:
        """Keeps the models that have just been scored: they are the best of their stage so far."""
        self.engine.keep_models(stage, server.shared if server.scored_shared else None)
        self._kept[stage] = Kept(server.round, isolate(_model_of(server)))

    def finished_round(self, server: Server) -> bool:
        """Records the round. Returns whether the run stops early."""
        crash_point("round-unclosed")
        self._close_entry(server)
        if self.folder and self._checkpoints.is_due(server.round):
            began = self._checkpoints.now()
            self._save_checkpoint(self.folder, server)
            self._checkpoints.written(began)
        crash_point("round-closed")
        budget = server.aggregation.budget
        spent = budget is not None and budget.exhausted
        return self._asked_to_stop or spent or self.history.out_of_patience()

    # ---- writing ----
    def _close_entry(self, server: Server) -> None:
        elapsed = round(time.perf_counter() - self._began, 4)
        sent = {f"bytes_{way}": count for way, count in server.ledger.sent().items()}
        entry = {
            "round": server.round,
            "participants": list(server.participants),
            **self._evaluation,
            "seconds": elapsed,
            **sent,
        }
        if server.aggregation.budget is not None:
            entry |= server.aggregation.budget.entry()
        entry |= server.absences.report()
        if server.outliers:
            entry["updates"] = [found.entry() for found in server.outliers.values()]
            server.outliers.clear()
        self._evaluation, confusion = {}, self._confusion
        if self._pending is not None:
            return  # a resumed run repeats its set-up, which is in the history already
        self._append(server, entry, confusion)
        self.tracking.add(entry)
        self._asked_to_stop |= bool(self.callbacks.on_round(entry, self.planned))

    def _append(
        self,
        server: Server,
        entry: dict[str, Any] | None = None,
        confusion: Matrix | None = None,
    ) -> None:
        with deferred_signals():
            if entry is not None:
                self.history.add(entry, confusion)
            if self.folder:
                server.ledger.write(self.folder)

    def _finish(
        self, server: Server, failure: BaseException | None, evaluation: str
    ) -> tuple[Result, BaseException | None]:
        """Writes models, artifacts and summary.

        Returns the result, and the error that ended the run if it did not complete.
        """
        now = time.perf_counter()
        self.seconds["evaluate"] = server.seconds_evaluating
        self.seconds["train"] = max(0.0, now - self._loop_began - server.seconds_evaluating)
        self.seconds["total"] = now - self._began + self.seconds["load"]
        models = Models({}, {})
        try:
            if isinstance(failure, SecondWriterError):
                pass  # the folder belongs to the other process
            elif self._pending is None:
                models = self._models(server)
                self._write_models(server, models)
                if self.folder and failure is None:
                    self._write_artifacts(self.folder)
            else:  # a resumed run that ended in its set-up: the records are as in the checkpoint
                self._put_back_records(server)
        except Exception as error:  # noqa: BLE001  (raised after the summary is written)
            failure = _first_of(failure, error)
        summary = self._summary(server, failure, evaluation)
        if self.folder and not isinstance(failure, SecondWriterError):
            try:
                _write_json(self.folder / "summary.json", summary)
                if failure is None:
                    checkpoint.remove(self.folder)
            except OSError as error:
                failure = _first_of(failure, error)
        entries = self.history.entries
        return Result(summary, models.best, self.folder, entries, models.final), failure

    def _models(self, server: Server) -> Models:
        """Returns the models of the round that is reported, and those of now."""
        if self._made is None:
            return Models({}, {})
        scored, _ = self.history.scored()
        stage = scored.get("stage", "")
        shared = server.shared if server.scored_shared else None
        best = self._made.models(stage) if stage in self._kept else {}
        final = self._made.models(None, shared)
        if stage in self._kept and (model := self._kept[stage].model):
            best["server"] = model
        if model := _model_of(server):
            final["server"] = model
        card = partial(
            ModelCard.of,
            self.method,
            self.name,
            self.facts,
            class_names=self.roster.class_names,
            feature_names=self.roster.feature_names,
            flow=self.config.get("data", {}).get("flow", "forward"),
            encoding=self.encoding,
        )
        round, kept = server.round, self._kept.get(stage)
        return Models(
            {o: Stored(card(o, "best", kept.round, stage), m) for o, m in best.items() if kept},
            {o: Stored(card(o, "final", round, stage), m) for o, m in final.items()},
        )

    def _write_models(self, server: Server, models: Models) -> None:
        """Writes the last rows of the ledger, and the models of all clients and the server."""
        if not self.folder:
            return
        server.ledger.write(self.folder)
        make_private(self.folder / MODELS)
        for which, stored in zip(WHICH, models, strict=True):
            files = {owner: model_bytes(*model) for owner, model in stored.items()}
            _write_files(self.folder / MODELS / which, files, MODELS)

    def _write_artifacts(self, folder: Path) -> None:
        """Writes the artifacts for figures: a file per client, and one of all clients."""
        if of_clients := self.engine.artifacts():
            files = {owner: _as_bytes(shown) for owner, shown in of_clients.items()}
            _write_files(folder / "artifacts", files, "artifacts")
        if joint := self.joint_artifacts():
            write_atomic(folder / "artifacts.safetensors", _as_bytes(joint))

    def _summary(
        self, server: Server, failure: BaseException | None, evaluation: str
    ) -> dict[str, Any]:
        best, last = self.history.scored()
        self.history.absences.add(server.absences.report())  # of an unfinished round
        about = self.roster.about
        selection, confusion = self.settings.selection, self.history.confusion()
        classes = self.roster.class_names or tuple(map(str, range(self.roster.num_classes)))
        privacy = privacy_summary(self.facts, server.aggregation.budget)
        return {
            "format": FORMAT,
            **_ending(failure),
            "method": self.name,
            "dataset": about["dataset"],
            "partition": about.get("partition"),
            "clients": about["clients"],
            "model": self._model_name(),
            "seed": self.settings.seed,
            **self._engine(),
            "task": self.roster.task,
            "evaluation": evaluation,
            "rounds": self.history.round,
            "selection": selection,
            "best_round": best.get("round"),
            **{m: best.get(m) for m in metrics.names_of(selection)},
            **{f"{m}_mean": best.get(f"{m}_mean") for m in METRICS},
            "loss": best.get("loss"),
            "final_accuracy": last.get("accuracy"),
            "class_names": list(classes),
            "confusion": confusion,
            "per_class": metrics.per_class(confusion, classes) if confusion else None,
            "warnings": [
                *findings(confusion, classes, best, selection, bool(self.settings.class_weight)),
                *privacy_warnings(privacy, self.history.round, self.planned),
            ],
            "per_client": self._per_client(best),
            "without_training_items": self.roster.without_training,
            "secure": server.aggregation.summary(server),
            **self._robustness(best),
            "privacy": privacy,
            "notes": server.notes,
            **self.history.absences.summary(),
            "traffic": server.ledger.traffic(),
            "seconds": {k: round(v, 4) for k, v in self.seconds.items()},
            "memory_predicted_mb": round(self.predicted_mb, 1),
            "peak_rss_mb": round(self._made.peak_mb() if self._made else peak_memory() / 2**20, 1),
            "history_hash": server.history_hash.hex(),
            "versions": _versions(),
            "config": self.config,
        }

    def _robustness(self, best: dict[str, Any]) -> dict[str, Any]:
        """Returns whose updates were shortened or left out how often, and who lied."""
        history = self.history
        found: dict[str, Any] = {
            "clipped": dict(sorted(history.clipped.items())),
            "left_out": dict(sorted(history.left_out.items())),
        }
        if liars := self.facts.adversary:
            found["adversary"] = {
                "attack": liars.attack,
                "strength": liars.factor,
                "clients": list(liars.clients),
                "accuracy_all": best.get("accuracy_all"),
            }
        return found

    def _model_name(self) -> str | None:
        """The clients' models; None if the method uses none."""
        if self.method.needs_of_model == "nothing":
            return None
        name: str | None = self.config.get("model", {}).get("name")
        return name

    def _per_client(self, best: dict[str, Any]) -> list[dict[str, Any]]:
        counts = ("nodes", "items", "train", "val", "test")
        known = metrics.names_of(self.settings.selection)
        scores = (*(name for name in known if name != "accuracy"), "loss")
        scored = {row["id"]: row for row in best.get("clients", [])}
        rows = []
        for size in self.roster.sizes:
            row = scored.get(size.name, {})
            rows.append(
                {
                    "id": size.name,
                    **{count: getattr(size, count) for count in counts},
                    "accuracy": row.get("accuracy"),
                    "f1": row.get("f1_macro"),
                    **{m: row.get(m) for m in scores},
                }
            )
        return rows

    # ---- checkpoints ----
    def _save_checkpoint(self, folder: Path, server: Server) -> None:
        """Saves everything that the next round depends on, and the sizes of history and ledger.

        History and ledger are flushed to the disk first.
        """
        about = {
            "round": server.round,
            "engine": self.engine_name,
            "hash": server.history_hash.hex(),
            "notes": server.notes,
            "bytes": {"history": self.history.sync(), "ledger": server.ledger.sync()},
            "confusions": self.history.confusions,
            "absences": server.absences.saved(),
            "kept": {stage: kept.round for stage, kept in self._kept.items()},
        }
        state = snapshot(
            {
                "server": {"state": server.state, "streams": server.streams},
                "clients": self.engine.snapshot(),
                "kept": {stage: kept.model for stage, kept in self._kept.items()},
            }
        )
        with deferred_signals():
            checkpoint.write(folder, Checkpoint(about, state))

    def _require_same_run(self, folder: Path) -> None:
        """Raises a ConfigError if the run in the folder has another seed, or differs in `secure`.

        The engine and the number of rounds may differ.
        """
        require_resumable(self.settings)
        of_run = read_config(folder).get("run", {})
        for key in ("seed", "secure"):
            if (was := of_run.get(key)) != getattr(self.settings, key):
                raise ConfigError(
                    f"resume: the run in {str(folder)!r} has run.{key} = {json.dumps(was)}"
                )

    def _read_records(self, folder: Path, found: Checkpoint) -> Ledger:
        """Reads history and ledger as they were at the checkpoint."""
        try:
            about = found.about
            self.history.resume(about["bytes"]["history"], about.get("confusions", {}))
            return Ledger.read(folder, found.about["bytes"]["ledger"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise DataError(f"resume: {str(folder)!r} is damaged ({error})") from error

    def _put_back_records(self, server: Server) -> Checkpoint:
        assert self._pending is not None
        (found, server.ledger), self._pending = self._pending, None
        server.history_hash, server.notes = bytes.fromhex(found.about["hash"]), found.about["notes"]
        return found

    def _restore(self, server: Server) -> int:
        """Restores the checkpoint. Returns its round."""
        server.catch_up()  # before the ledger is restored, which contains this exchange already
        found = self._put_back_records(server)
        of_server = found.state.get("server", {})
        restore(server.state, of_server.get("state", {}))
        for purpose, state in of_server.get("streams", {}).items():
            server.rng(purpose).set_state(state)
        self.engine.restore(found.state.get("clients", {}))
        models = found.state.get("kept", {})
        self._kept = {
            stage: Kept(round, models.get(stage, {}))
            for stage, round in found.about.get("kept", {}).items()
        }
        server.seconds_evaluating, server.over = 0.0, self.history.out_of_patience()
        return int(found.about["round"])


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_atomic(path, (json.dumps(content, indent=1) + "\n").encode())


def _model_of(server: Server) -> Message:
    """Returns the server's model: what was scored last, or its own; nothing if it has none."""
    if server.shared is not None:
        return server.shared
    own = server.state.get("model")
    return own if isinstance(own, dict) else {}


def _write_files(place: Path, files: Mapping[str, bytes], kind: str) -> None:
    """Writes files into a folder, each with its owner's name.

    Args:
        place: The folder.
        files: {owner: content}.
        kind: Their name in crash points.
    """
    make_private(place)

    def write(owner: str) -> None:
        write_atomic(place / f"{owner}.safetensors", files[owner], kind)

    with ThreadPoolExecutor(16) as pool:  # flushing many files takes as long as flushing one
        list(pool.map(write, files))


def _as_bytes(message: Message) -> bytes:
    return save({name: tensor.contiguous() for name, tensor in flatten(message).items()})


def _ending(failure: BaseException | None) -> dict[str, str]:
    """Returns the summary's `status`: completed, stopped from outside, or failed; and `cause`."""
    if failure is None:
        return {"status": "completed"}
    if isinstance(failure, KeyboardInterrupt):
        return {"status": "stopped", "cause": "interrupted"}
    if isinstance(failure, SystemExit):
        return {"status": "stopped", "cause": "terminated"}
    cause = plain_text(f"{type(failure).__name__}: {failure}", CAUSE_LENGTH)
    return {"status": "failed", "cause": cause}


def _first_of(earlier: BaseException | None, error: Exception) -> BaseException:
    """Returns the first of several errors that ended a run, with a note of the other."""
    if earlier is None:
        return error
    earlier.add_note(f"and then, while the folder was written: {type(error).__name__}: {error}")
    return earlier


def _versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "fedloom": installed_version(),
        **{name: version(name) for name in _PACKAGES},
    }
