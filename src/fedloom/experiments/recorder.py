"""Recorder: keeps what happens in a run, in memory or in its folder, and resumes it."""

from __future__ import annotations

import gc
import json
import platform
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

from safetensors.torch import save

from fedloom._system import crash_point, deferred_signals, peak_memory, write_atomic
from fedloom.core.facts import Facts
from fedloom.core.ledger import Ledger
from fedloom.core.message import Absent, Message, flatten
from fedloom.core.method import Method
from fedloom.core.replies import Replies
from fedloom.core.server import RoundPolicy, Server
from fedloom.core.state import restore, snapshot
from fedloom.data.federation import Roster
from fedloom.engines.base import Engine
from fedloom.errors import ConfigError, DataError
from fedloom.experiments import checkpoint
from fedloom.experiments.checkpoint import Checkpoint
from fedloom.experiments.history import History
from fedloom.experiments.result import Result, read_run
from fedloom.experiments.run_folder import FORMAT, PARTITION, entries, is_completed, read_config
from fedloom.experiments.settings import RunSettings, chosen_evaluation
from fedloom.experiments.trackers import Begun, Tracking
from fedloom.nn import metrics
from fedloom.privacy.secure_aggregation import aggregation_for

Scores: TypeAlias = dict[str, float | None]


class Recorder:
    """Keeps what happens in a run, line by line in its folder if it has one: whatever ends the run, the folder can be read."""

    def __init__(
        self,
        roster: Roster,
        settings: RunSettings,
        folder: Path | None,
        on_round: Any,
        on_start: Any = None,
    ):
        self.roster, self.settings, self.folder = roster, settings, folder
        self.on_round, self.on_start = on_round, on_start
        self.config: dict[str, Any] = {}
        self.predicted_mb = 0.0  # peak of memory, as it was foreseen
        self.partition: dict[str, Any] = {}  # label counts per client, in a simulation
        self.joint_artifacts: Callable[[], Message] = (
            dict  # of all clients together, in a simulation
        )
        self.tracking = Tracking()
        self.history = History(folder, settings.patience)
        self.planned = 0
        self._made: Engine | None = None
        self._evaluation: dict[str, Any] = {}
        self._pending: tuple[Checkpoint, Ledger] | None = (
            None  # read, and to be put back when the round loop begins
        )

    @property
    def engine(self) -> Engine:
        """The engine of the run; it exists while the run is executed."""
        assert self._made is not None
        return self._made

    def execute(
        self, name: str, method: Method, facts: Facts, make: Callable[[], Engine], resume: bool, seconds_loading: float
    ) -> Result:  # fmt: skip
        """Runs the method in the engine that `make` gives, and writes the folder; also when it ends by an error or Ctrl-C, which is
        raised again."""
        self.name = name
        settings = self.settings
        evaluated = chosen_evaluation(method, name, settings.evaluation)
        policy = RoundPolicy(
            evaluated,
            settings.participation,
            settings.evaluate_every,
            settings.faults,
            settings.retries,
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
                return read_run(self.folder)
            self._reopen(self.folder)
        elif self.folder:
            _put_json(self.folder / "config.json", self.config)
        if self.folder and self.partition:
            _put_json(self.folder / PARTITION, self.partition)
        kept = (
            entries(self.folder) if self.folder and resume else ()
        )  # read one by one, and only if somebody wants to know
        self.tracking.begin(Begun(self.config, self.roster.about, name, self.folder), kept)
        self.server = server = Server(
            method, facts, self._call, policy, self, aggregation_for(facts)
        )
        if self._pending is not None:
            server.absences.resume(self._pending[0].about.get("absences", {}))
        failure: BaseException | None = None
        with ExitStack() as stack:
            try:
                self._made = stack.enter_context(closing(make()))
                if self.on_start:
                    self.on_start(self._engine())
                crash_point("nothing-asked")
                method.run(server)
                self.engine.finish()
            except BaseException as error:  # noqa: BLE001  (it is raised as soon as the folder is in order)
                failure = error
            gc.unfreeze()
            with deferred_signals():
                result, failure = self._finish(server, failure, evaluated)
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
        (folder / "summary.json").unlink(
            missing_ok=True
        )  # of the run that stopped; killed from here on, it is unfinished
        self.history.cut()
        (self._pending[1] if self._pending else Ledger()).write(folder)

    def _call(self, phase: str, messages: dict[str, Message]) -> Mapping[str, Message | Absent]:
        crash_point("exchange-unsent")
        self.engine.round = self.server.round
        answers = self.engine.call(phase, messages)
        crash_point("exchange-answered")
        return answers

    def _engine(self) -> dict[str, Any]:
        about = self._made.details() if self._made else {}
        return {
            "engine": self.settings.engine,
            "engine_details": {"threads": self.settings.threads, **about},
        }

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
        columns = metrics.all_scores(*(replies.stack(name) for name in ("val", "test", "auc")))
        rows: list[dict[str, Any]] = [
            {"id": c, **dict(zip(columns, values, strict=True))}
            for c, *values in zip(replies, *columns.values(), strict=True)
        ]
        size = {size.name: size.items for size in self.roster.sizes}
        by_size, equal = [float(size[r["id"]]) for r in rows], [1.0] * len(rows)
        weighted, plain = (
            {m: metrics.average(column, w) for m, column in columns.items()}
            for w in (by_size, equal)
        )
        self._note(server, stage, weighted, plain, {"clients": rows})

    def evaluated_in_sum(self, server: Server, total: Message, stage: str) -> None:
        """The averages alone: in a secure run nobody learns a client's scores."""
        self._note(server, stage, *metrics.added_scores(total["scores"]), {})

    def _note(
        self, server: Server, stage: str, by_size: Scores, plain: Scores, more: dict[str, Any]
    ) -> None:
        self._evaluation = {
            "stage": stage,
            **by_size,
            **{f"{m}_mean": v for m, v in plain.items()},
            **more,
        }
        if stage != "train" or not server.in_round:
            self._close_entry(server)

    def finished_round(self, server: Server) -> bool:
        """Writes the round down; tells whether patience has run out."""
        crash_point("round-unclosed")
        self._close_entry(server)
        every = self.settings.checkpoint_every
        if self.folder and every and server.round % every == 0:
            self._save_checkpoint(self.folder, server)
        crash_point("round-closed")
        return self.history.out_of_patience()

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
        entry |= server.absences.report()
        self._evaluation = {}
        if self._pending is not None:
            return  # set-up is being done again, and this was written down the first time
        self._write_down(server, entry)
        self.tracking.add(entry)
        if self.on_round:
            self.on_round(entry, self.planned)

    def _write_down(self, server: Server, entry: dict[str, Any] | None = None) -> None:
        with deferred_signals():
            if entry is not None:
                self.history.add(entry)
            if self.folder:
                server.ledger.write(self.folder)

    def _finish(
        self, server: Server, failure: BaseException | None, evaluation: str
    ) -> tuple[Result, BaseException | None]:
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
        final = self._made.models() if self._made else {}
        return (
            {**final, "server": server.state["model"]}
            if isinstance(server.state.get("model"), dict)
            else final
        )

    def _keep_models(self, server: Server, final: Mapping[str, Message]) -> None:
        """The ledger's last rows, and everybody's model."""
        if not self.folder:
            return
        server.ledger.write(self.folder)
        _put_tensors(self.folder / "models", final)

    def _keep_exhibits(self, folder: Path) -> None:
        """For pictures: what clients have to show of themselves, a file each, and what there is to show of all. Often nothing."""
        if shown := self.engine.artifacts():
            _put_tensors(folder / "artifacts", shown)
        if of_all := self.joint_artifacts():
            write_atomic(folder / "artifacts.safetensors", _as_bytes(of_all))

    def _summary(
        self, server: Server, failure: BaseException | None, evaluation: str
    ) -> dict[str, Any]:
        at_best, last = self.history.scored()
        self.history.absences.add(server.absences.report())  # of a round that was not finished
        about = self.roster.about
        return {
            "format": FORMAT, **_ending(failure),
            "method": self.name, "dataset": about["dataset"],
            "partition": about.get("partition"), "clients": about["clients"],
            "model": self.config.get("model", {}).get("name"), "seed": self.settings.seed, **self._engine(),
            "task": self.roster.task, "evaluation": evaluation,
            "rounds": self.history.round, "best_round": at_best.get("round"),
            **{m: at_best.get(m) for m in metrics.METRICS},
            **{f"{m}_mean": at_best.get(f"{m}_mean") for m in metrics.METRICS if m != "val_accuracy"},
            "final_accuracy": last.get("accuracy"),
            "per_client": self._per_client(at_best),
            "without_training_items": self.roster.without_training,
            "secure": server.aggregation.summary(server), "notes": server.notes, **self.history.absences.summary(),
            "traffic": server.ledger.traffic(), "seconds": {k: round(v, 4) for k, v in self.seconds.items()},
            "memory_predicted_mb": round(self.predicted_mb, 1),
            "peak_rss_mb": round(self._made.peak_mb() if self._made else peak_memory() / 2**20, 1),
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
            for held in self.roster.sizes
        ]  # fmt: skip

    # ---- checkpoints ----
    def _save_checkpoint(self, folder: Path, server: Server) -> None:
        """Everything the next round depends on, and how far history and ledger were; they are on the disk before it says so."""
        about = {
            "round": server.round, "hash": server.history_hash.hex(), "notes": server.notes,
            "bytes": {"history": self.history.sync(), "ledger": server.ledger.sync()}, "absences": server.absences.saved(),
        }  # fmt: skip
        state = snapshot(
            {
                "server": {"state": server.state, "streams": server.streams},
                "clients": self.engine.snapshot(),
            }
        )
        with deferred_signals():
            checkpoint.write(folder, Checkpoint(about, state))

    def _require_same_run(self, folder: Path) -> None:
        of_run = read_config(folder).get("run", {})
        for key in ("seed", "secure"):  # an engine or a number of rounds may be another
            if (was := of_run.get(key)) != getattr(self.settings, key):
                raise ConfigError(
                    f"resume: the run in {str(folder)!r} has run.{key} = {json.dumps(was)}"
                )

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
    write_atomic(path, (json.dumps(content, indent=1) + "\n").encode())


def _put_tensors(place: Path, messages: Mapping[str, Message]) -> None:
    """Puts messages into a folder, each in a file that is named after its owner."""
    place.mkdir(exist_ok=True)

    def keep(owner: str) -> None:
        write_atomic(place / f"{owner}.safetensors", _as_bytes(messages[owner]), place.name)

    with ThreadPoolExecutor(16) as pool:  # a disk is as long with one file as with many at a time
        list(pool.map(keep, messages))


def _as_bytes(message: Message) -> bytes:
    return save({name: tensor.contiguous() for name, tensor in flatten(message).items()})


def _ending(failure: BaseException | None) -> dict[str, str]:
    """How a run ended, for its summary: completed, stopped from outside, or failed."""
    if failure is None:
        return {"status": "completed"}
    if isinstance(failure, KeyboardInterrupt | SystemExit):
        return {
            "status": "stopped",
            "cause": "interrupted" if isinstance(failure, KeyboardInterrupt) else "terminated",
        }
    return {"status": "failed", "cause": f"{type(failure).__name__}: {failure}"}


def _first_of(earlier: BaseException | None, error: Exception) -> BaseException:
    """What ended a run when several things went wrong: the first of them, with a note of the other."""
    if earlier is None:
        return error
    earlier.add_note(
        f"and then, while the folder was put in order: {type(error).__name__}: {error}"
    )
    return earlier


def _versions() -> dict[str, str]:
    packages = (
        "fedloom",
        "torch",
        "torch_geometric",
        "numpy",
        "scipy",
        "scikit-network",
        "pymetis",
        "safetensors",
        "cryptography",
    )
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}
