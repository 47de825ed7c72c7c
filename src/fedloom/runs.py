"""A run: one method on one federation, from the first ask to the result, with everything kept in a folder that can be read again."""

from __future__ import annotations

import gc
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

import safetensors
import torch
from safetensors.torch import load_file, save_file

from fedloom import memory, models, task
from fedloom.allocator import freed_is_kept
from fedloom.engines import engine_names, has_workers, make_engine
from fedloom.errors import ConfigError, DataError, unknown
from fedloom.graph import Federation, Roster
from fedloom.ledger import Ledger
from fedloom.message import Message, flatten, unflatten
from fedloom.method import Method, check_setting, make_method, setting
from fedloom.party import Client, Facts, Replies, Rules, Server, restore, snapshot
from fedloom.privacy import masked
from fedloom.privacy.secure_sum import Terms

Scores: TypeAlias = dict[str, float | None]
Checkpoint: TypeAlias = tuple[dict[str, Any], Message, list[dict[str, Any]], Ledger]


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

    def __post_init__(self) -> None:
        for f in fields(self):
            object.__setattr__(self, f.name, check_setting(f, getattr(self, f.name), "run"))
        if self.engine not in engine_names():
            raise unknown("run.engine", self.engine, engine_names())
        if not has_workers(self.engine) and self.workers:
            raise ConfigError(f"run.workers is {self.workers}, engine {self.engine!r} has none; valid: 0, or run.engine processes or ray")
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
    history: list[dict[str, Any]]
    models: dict[str, Message] = field(default_factory=dict, repr=False)
    folder: Path | None = None

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
    resume: bool = False, config: Mapping[str, Any] | None = None, seconds_loading: float = 0.0, **settings: Any,
) -> Result:  # fmt: skip
    """Runs a method on a federation.

    method: a name, a path to a method file, or a Method. model: a spec ("gcn", "gcn-4x128") or several, separated by commas, dealt
    over the clients in turn. out: a folder to keep the run in. on_round: called with each history entry and the number of rounds.
    on_start: called when the engine is there, with what the summary will say of it (`engine`, `engine_details`). resume: go on from
    the checkpoint in `out`. settings: fields of the method (lr=...) and of RunSettings (seed=...). A recipe also gives `config`, what
    the run folder keeps as its origin, and `seconds_loading`, what loading and dividing took.
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
    federation = (federation.pooled() if chosen.pooled else federation).check()
    facts = agree_on_facts(chosen, name, federation.roster, model, dropout, rules)
    predicted_mb = memory.require(memory.predict(federation, facts, rules.engine, rules.workers))
    record = Recorder(federation.roster, rules, run_folder(out, resume), on_round, on_start)
    record.predicted_mb = predicted_mb
    record.config = dict(config or _config(name, chosen, federation, model, dropout, rules))

    def engine() -> Any:
        graphs = zip(federation.names, federation.graphs, strict=True)
        clients = (Client(client, graph, facts, federation.inductive) for client, graph in graphs)
        return make_engine(rules.engine, chosen, clients, rules.workers)

    with threads(rules.threads), freed_is_kept():
        return record.carry_out(name, chosen, facts, engine, resume, seconds_loading)


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
    """The folder that a run is kept in, made if need be; ConfigError if it cannot be written to, or holds another run."""
    if out is None:
        if resume:
            raise ConfigError("out: resuming needs the folder of the run")
        return None
    folder = Path(out)
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
    """Keeps what happens in a run, in memory and, line by line, in its folder: whatever ends the run, the folder can be read."""

    def __init__(self, roster: Roster, rules: RunSettings, folder: Path | None, on_round: Any, on_start: Any = None):
        self.roster, self.rules, self.folder, self.on_round, self.on_start = roster, rules, folder, on_round, on_start
        self.config: dict[str, Any] = {}
        self.predicted_mb = 0.0  # peak of memory, as it was foreseen
        self.history: list[dict[str, Any]] = []
        self.planned = 0
        self._evaluation: dict[str, Any] = {}
        self._booked = 0
        self._pending: Checkpoint | None = None  # read, and to be put back when the round loop begins

    # ---- the whole of it ----
    def carry_out(
        self, name: str, method: Method, facts: Facts, make: Callable[[], Any], resume: bool, seconds_loading: float
    ) -> Result:  # fmt: skip
        """Runs the method in the engine that `make` gives, and writes the folder; also when it ends by an error or Ctrl-C, which is
        raised again."""
        began = time.perf_counter()
        self.name = name
        rules = Rules(evaluation(method, name, self.rules.evaluation), self.rules.participation, self.rules.evaluate_every)
        if resume:
            assert self.folder is not None
            self._pending = self._read_checkpoint(self.folder)  # refuse before anything in the folder is touched
        elif self.folder:
            _write(self.folder / "config.json", json.dumps(self.config, indent=1) + "\n")
        with closing(make()) as self.engine:
            if self.on_start:
                self.on_start(self._engine())
            server = Server(method, facts, self.engine.call, rules, self)
            self.seconds = {"load": seconds_loading, "setup": 0.0, "train": 0.0, "evaluate": 0.0, "total": 0.0}
            self._began, self._loop_began = began, began
            status, cause = "failed", ""
            try:
                method.run(server)
                status = "completed"
            except KeyboardInterrupt:
                status, cause = "stopped", "interrupted"
                raise
            except BaseException as error:
                cause = f"{type(error).__name__}: {error}"
                raise
            finally:
                gc.unfreeze()
                result = self._finish(server, status, cause, rules.evaluation)
        return result

    def _engine(self) -> dict[str, Any]:
        return {"engine": self.rules.engine, "engine_details": {"threads": self.rules.threads, **self.engine.about()}}

    # ---- called by the server ----
    def entered_rounds(self, server: Server, count: int) -> int:
        """The loop begins: set-up is over; after a resume, put everything back to the checkpoint."""
        self.planned = count
        self._loop_began = time.perf_counter()
        self.seconds["setup"] = self._loop_began - self._began
        gc.freeze()  # what is there stays: of a thousand clients, Python need not look for garbage again and again
        if self._pending is None:
            self._flush(server)
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
        self._close_entry(server)
        every = self.rules.checkpoint_every
        if self.folder and every and server.round % every == 0:
            self._save_checkpoint(server)
        return self._out_of_patience()

    def _out_of_patience(self) -> bool:
        if not self.rules.patience:
            return False
        marks = [e["val_accuracy"] for e in self.history if e.get("val_accuracy") is not None]
        return len(marks) > self.rules.patience and max(marks[-self.rules.patience :]) <= max(marks[: -self.rules.patience])

    # ---- writing ----
    def _close_entry(self, server: Server) -> None:
        elapsed = round(time.perf_counter() - self._began, 4)
        entry = {"round": server.round, "participants": list(server.participants), **self._evaluation, "seconds": elapsed}
        self._evaluation = {}
        self.history.append(entry)
        if self.folder:
            with open(self.folder / "history.jsonl", "a") as file:
                file.write(json.dumps(entry) + "\n")
        self._flush(server)
        if self.on_round:
            self.on_round(entry, self.planned)

    def _flush(self, server: Server) -> None:
        if self.folder:
            server.ledger.write(self.folder, since=self._booked)
            self._booked = len(server.ledger.rows)

    def _finish(self, server: Server, status: str, cause: str, evaluation: str) -> Result:
        now = time.perf_counter()
        self.seconds["evaluate"] = server.seconds_evaluating
        self.seconds["train"] = max(0.0, now - self._loop_began - server.seconds_evaluating)
        self.seconds["total"] = now - self._began + self.seconds["load"]
        final = self.engine.models()
        if isinstance(server.state.get("model"), dict):
            final["server"] = server.state["model"]
        summary = self._summary(server, status, cause, evaluation)
        if self.folder and self._pending is None:  # a resume that ended before its checkpoint was put back leaves all as it was
            self._flush(server)
            (self.folder / "models").mkdir(exist_ok=True)
            for owner, content in final.items():
                save_file({n: t.contiguous() for n, t in flatten(content).items()}, self.folder / "models" / f"{owner}.safetensors")
            _write(self.folder / "summary.json", json.dumps(summary, indent=1) + "\n")
        return Result(summary, self.history, final, self.folder)

    def _summary(self, server: Server, status: str, cause: str, evaluation: str) -> dict[str, Any]:
        scored = [e for e in self.history if "accuracy" in e]
        scored = [e for e in scored if e["stage"] == scored[-1]["stage"]]  # after fine-tuning, what counts is fine-tuned
        best = max(scored, key=lambda e: -1.0 if e["val_accuracy"] is None else e["val_accuracy"], default=None)
        if best is not None and best["val_accuracy"] is None:
            best = scored[-1]  # nothing to choose by
        about = self.roster.about
        at_best = best or {}
        return {
            "status": status, **({"cause": cause} if cause else {}),
            "method": self.name, "dataset": about["dataset"],
            "partition": about.get("partition"), "clients": about["clients"],
            "model": self.config.get("model", {}).get("name"), "seed": self.rules.seed, **self._engine(),
            "task": self.roster.task, "evaluation": evaluation,
            "rounds": self.history[-1]["round"] if self.history else 0, "best_round": at_best.get("round"),
            **{m: at_best.get(m) for m in task.METRICS},
            **{f"{m}_mean": at_best.get(f"{m}_mean") for m in task.METRICS if m != "val_accuracy"},
            "final_accuracy": scored[-1]["accuracy"] if scored else None,
            "per_client": self._per_client(at_best),
            "without_training_items": self.roster.without_training,
            "secure": masked.report(server), "notes": server.notes,
            "traffic": server.ledger.traffic(), "seconds": {k: round(v, 4) for k, v in self.seconds.items()},
            "memory_predicted_mb": round(self.predicted_mb, 1),
            "peak_rss_mb": round(self.engine.peak_mb(), 1),
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
    def _save_checkpoint(self, server: Server) -> None:
        """Everything the next round depends on, written beside the old checkpoint and then put in its place in one step."""
        assert self.folder is not None
        tensors = flatten(snapshot({"server": {"state": server.state, "streams": server.streams}, "clients": self.engine.snapshot()}))
        meta = {
            "round": server.round, "history": len(self.history), "booked": len(server.ledger.rows),
            "hash": server.history_hash.hex(), "seed": self.rules.seed, "secure": self.rules.secure,
        }  # fmt: skip
        target, fresh = self.folder / "checkpoint.safetensors", self.folder / "checkpoint.new"
        save_file(tensors, fresh, metadata={"fedloom": json.dumps(meta)})
        with open(fresh, "rb") as file:
            os.fsync(file.fileno())
        os.replace(fresh, target)

    def _read_checkpoint(self, folder: Path) -> Checkpoint:
        path, ledger = folder / "checkpoint.safetensors", Ledger()
        try:
            with safetensors.safe_open(path, "pt") as file:
                meta = json.loads(file.metadata()["fedloom"])
            saved = unflatten(load_file(path))
            lines = (folder / "history.jsonl").read_text().splitlines()[: meta["history"]]
            history = [json.loads(line) for line in lines]
            ledger.read(folder, meta["booked"])
            if len(history) < meta["history"]:
                raise ValueError(f"history.jsonl has lost lines: {len(history)} of {meta['history']}")
        except FileNotFoundError as error:
            lacking = Path(error.filename or path).name
            raise DataError(f"resume: {str(folder)!r} has no {lacking}; only runs with run.checkpoint_every > 0 can go on") from error
        except (safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"resume: {path.name} in {str(folder)!r} is damaged ({error})") from error
        if meta["seed"] != self.rules.seed:
            raise ConfigError(f"resume: the run in {str(folder)!r} has seed {meta['seed']}, not {self.rules.seed}")
        if meta.get("secure", False) != self.rules.secure:
            raise ConfigError(f"resume: the run in {str(folder)!r} has run.secure = {str(meta.get('secure', False)).lower()}")
        return meta, saved, history, ledger

    def _put_back(self, server: Server) -> int:
        assert self.folder is not None
        assert self._pending is not None
        meta, saved, self.history, server.ledger = self._pending
        restore(server.state, saved.get("server", {}).get("state", {}))
        for purpose, state in saved.get("server", {}).get("streams", {}).items():
            server.rng(purpose).set_state(state)
        self.engine.restore(saved.get("clients", {}))
        server.history_hash, server.seconds_evaluating = bytes.fromhex(meta["hash"]), 0.0
        server.over = self._out_of_patience()
        (self.folder / "summary.json").unlink(missing_ok=True)  # of the run that stopped; killed from here on, it is unfinished
        _write(self.folder / "history.jsonl", "".join(json.dumps(entry) + "\n" for entry in self.history))
        server.ledger.write(self.folder, since=0)
        self._booked, self._pending = len(server.ledger.rows), None
        return int(meta["round"])


def _write(path: Path, text: str) -> None:
    """Whole or not at all: a reader never sees half a file."""
    fresh = path.with_suffix(path.suffix + ".new")
    fresh.write_text(text)
    os.replace(fresh, path)


def _versions() -> dict[str, str]:
    packages = ("fedloom", "torch", "torch_geometric", "numpy", "scipy", "scikit-network", "pymetis", "safetensors", "cryptography")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


def read_run(folder: str | Path) -> Result:
    """Reads a run folder back, also one of a run that was stopped or killed. DataError if it is not one or is damaged."""
    folder = Path(folder)
    try:
        finished = (folder / "summary.json").exists()
        summary = json.loads((folder / ("summary.json" if finished else "config.json")).read_text())
        written = (folder / "history.jsonl").read_text() if (folder / "history.jsonl").exists() else ""
        # What follows the last line's end was being written when the run was killed.
        history = [json.loads(line) for line in written[: written.rfind("\n") + 1].splitlines()]
        kept = {p.stem: load_file(p) for p in sorted((folder / "models").glob("*.safetensors"))}
    except OSError as error:
        raise DataError(f"run: {str(folder)!r} is not a run folder ({Path(error.filename).name}: {error.strerror})") from error
    except (ValueError, safetensors.SafetensorError) as error:
        raise DataError(f"run: {str(folder)!r} is damaged ({error})") from error
    if not isinstance(summary, dict) or (finished and not {"status", "config"} <= summary.keys()):
        raise DataError(f"run: {str(folder)!r} is damaged ({'summary' if finished else 'config'}.json is not a run's)")
    if not finished:
        summary = {"status": "unfinished", "config": summary, "rounds": history[-1]["round"] if history else 0}
    return Result(summary, history, kept, folder)
