"""Trackers: send a run's rounds and result to TensorBoard and MLflow.

Use `fedloom run --track tensorboard,mlflow`, or `fedloom.run(..., track="mlflow")`.
"tensorboard+clients" adds each client's scores. "tensorboard:DIR" and "mlflow:URI" name the place.
All numbers are those of the history and the summary, under the same names. If a tracker fails, the
run goes on without it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
import uuid
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from fedloom._system import write_atomic
from fedloom.errors import ConfigError, DataError, unknown
from fedloom.experiments.history import Entry
from fedloom.nn.metric_names import METRICS

FILE = "tracking.json"  # in a run folder: its trackers, and what they need after a resume
KNOWN = (*METRICS, *(f"val_{m}" for m in METRICS))
SCORES = (*KNOWN, *(f"{m}_mean" for m in KNOWN))


@dataclass(frozen=True)
class Begun:
    """A run that starts or resumes.

    Attributes:
        config: The run's origin.
        about: The federation: dataset, partition, clients.
        method: The method's name.
        folder: The run folder, if there is one.
        remembered: What `Tracker.begin` returned the last time.
    """

    config: Mapping[str, Any]
    about: Mapping[str, Any]
    method: str
    folder: Path | None = None
    remembered: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of the run in a list of runs."""
        return self.folder.name if self.folder else f"{self.method}-s{self.config['run']['seed']}"


class Tracker(ABC):
    """Base of all trackers, including your own.

    Only `check` may refuse a run. Any other error of a tracker is a warning.

    Attributes:
        where: The place that `--track` names; empty = the default.
        clients: Whether each client's scores are tracked too.
    """

    name: ClassVar[str]

    def __init__(self, where: str = "", clients: bool = False):
        self.where, self.clients = where, clients

    @property
    def spec(self) -> str:
        """The tracker as an argument of `--track`."""
        return f"{self.name}{'+clients' * self.clients}{f':{self.where}' if self.where else ''}"

    def check(self, folder: Path | None, resume: bool) -> None:  # noqa: B027  (most trackers accept any run)
        """Raises a ConfigError, before the run starts, if it cannot be tracked."""

    @abstractmethod
    def begin(self, run: Begun) -> dict[str, Any]:
        """The run starts or resumes. Returns what to remember for the next resume."""

    @abstractmethod
    def add(self, entry: Entry, step: int) -> None:
        """Adds an entry of the history. A resumed run adds its earlier entries first.

        Args:
            entry: The entry.
            step: The position on the time axis.
        """

    @abstractmethod
    def end(self, summary: Mapping[str, Any]) -> None:
        """The run is over. The summary's `status` says how it ended."""


# ---- what is tracked ----
def points(entry: Entry, clients: bool) -> dict[str, float]:
    """Returns an entry's numbers by name: scores, training loss, traffic so far, seconds.

    Scores of a later stage have a prefix.

    Args:
        entry: An entry of the history.
        clients: Add each client's scores.
    """
    stage = entry.get("stage", "train")
    before = "" if stage == "train" else f"{stage}/"
    found = {f"{before}scores/{m}": entry.get(m) for m in SCORES}
    found[f"{before}loss"] = entry.get("loss")
    found |= {f"{before}traffic/bytes_{way}": entry[f"bytes_{way}"] for way in ("up", "down")} | {
        f"{before}time/seconds": entry["seconds"]
    }
    if clients:
        rows = entry.get("clients", [])  # a secure run has none
        found |= {
            f"{before}clients/{row['id']}/{m}": row.get(m) for row in rows for m in (*KNOWN, "loss")
        }
    return {name: float(value) for name, value in found.items() if value is not None}


def result(summary: Mapping[str, Any]) -> dict[str, float]:
    """Returns a summary's numbers by name."""
    found = {
        f"summary/{key}": summary.get(key)
        for key in (*SCORES, "loss", "final_accuracy", "rounds", "best_round", "peak_rss_mb")
    }
    found |= {f"summary/bytes_{way}": summary["traffic"][f"bytes_{way}"] for way in ("up", "down")}
    found |= {f"summary/seconds_{part}": value for part, value in summary["seconds"].items()}
    return {name: float(value) for name, value in found.items() if value is not None}


def parameters(
    config: Mapping[str, Any], before: str = ""
) -> Iterator[tuple[str, bool | int | float | str]]:
    """Yields a config's values under the names that `--set` uses.

    Numbers and texts stay as they are. Other values become JSON.
    """
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from parameters(value, f"{before}{key}.")
        else:
            yield (
                before + key,
                value
                if isinstance(value, bool | int | float | str)
                else json.dumps(value, default=str),
            )


def labels(summary: Mapping[str, Any], folder: Path | None) -> dict[str, str]:
    """Returns the texts that describe a run."""
    texts = {
        key: str(summary[key])
        for key in ("status", "cause", "method", "history_hash")
        if summary.get(key)
    }
    return texts | ({"run_folder": str(folder.resolve())} if folder else {})


# ---- TensorBoard ----
class TensorBoard(Tracker):
    """Writes an event file under RUN/tensorboard, or in `where`.

    `tensorboard --logdir runs` shows all runs there.
    """

    name = "tensorboard"

    def __init__(self, where: str = "", clients: bool = False):
        super().__init__(str(Path(where).resolve()) if where else "", clients)
        _require(
            "tensorboard",
            "tensorboard.summary.writer.record_writer",
            "tensorboard.plugins.hparams.summary_v2",
        )

    def check(self, folder: Path | None, resume: bool) -> None:
        if not (self.where or folder):
            raise ConfigError(
                "track: tensorboard needs a run folder (out), or a folder of its own: "
                "tensorboard:DIR"
            )
        if self.where and not resume and any(Path(self.where).glob("events.out.tfevents.*")):
            raise ConfigError(
                f"track: {self.where!r} holds the events of another run; "
                "choose another folder: tensorboard:DIR"
            )

    def begin(self, run: Begun) -> dict[str, Any]:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.summary.writer.record_writer import RecordWriter

        place = Path(self.where) if self.where else (run.folder or Path()) / "tensorboard"
        place.mkdir(parents=True, exist_ok=True)
        if earlier := run.remembered.get("events"):
            # The entries that count are in the history and are written again.
            (place / earlier).unlink(missing_ok=True)
        self._folder = run.folder
        path = place / f"events.out.tfevents.{int(time.time())}.{uuid.uuid4().hex[:8]}"
        self._file = RecordWriter(open(path, "wb"))  # noqa: SIM115  (closed in `end`)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        self._write(
            Event(
                wall_time=time.time(),
                summary=hparams_pb(dict(parameters(run.config)), trial_id=run.name),
            )
        )
        return {"events": path.name}

    def add(self, entry: Entry, step: int) -> None:
        self._scalars(step, points(entry, self.clients))

    def end(self, summary: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto

        if summary["status"] == "completed":
            self._scalars(summary["rounds"], result(summary))
        text = "\n".join(
            f"- {key}: {value}" for key, value in labels(summary, self._folder).items()
        )
        shown = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        tensor = TensorProto(dtype="DT_STRING", string_val=[text.encode()])
        about = Summary(value=[Summary.Value(tag="run", metadata=shown, tensor=tensor)])
        self._write(Event(wall_time=time.time(), step=summary["rounds"], summary=about))
        self._file.close()

    def _scalars(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars = Summary(
            value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        )
        self._write(Event(wall_time=time.time(), step=step, summary=scalars))

    def _write(self, event: Any) -> None:
        self._file.write(event.SerializeToString())
        self._file.flush()  # a killed run has written all its rounds


# ---- MLflow ----
class MLflow(Tracker):
    """Makes an MLflow run.

    It is made at `where`, else at MLFLOW_TRACKING_URI, else in mlflow.db (SQLite) in the folder of
    the run folders. The experiment is `experiment`, or named after dataset and partition.
    """

    name = "mlflow"

    def __init__(self, where: str = "", clients: bool = False, experiment: str = ""):
        super().__init__(where, clients)
        self.experiment = experiment
        # The URI is written to no file: it may contain a password.
        self._uri = where or os.environ.get("MLFLOW_TRACKING_URI", "")
        # No telemetry, and no waiting for minutes until a missing server is given up.
        for variable, value in {
            "DISABLE_TELEMETRY": "true",
            "HTTP_REQUEST_MAX_RETRIES": "2",
            "HTTP_REQUEST_TIMEOUT": "10",
        }.items():
            os.environ.setdefault(f"MLFLOW_{variable}", value)
        local = (
            () if self._uri and not self._uri.startswith("sqlite:") else ("sqlalchemy", "alembic")
        )
        _require("mlflow", "mlflow.tracking", *local)
        # Without this, MLflow logs each table that it creates.
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)

    def begin(self, run: Begun) -> dict[str, Any]:
        from mlflow.tracking import MlflowClient

        database = (run.folder.parent if run.folder else Path()).resolve() / "mlflow.db"
        self._client, self._folder = MlflowClient(self._uri or f"sqlite:///{database}"), run.folder
        self._logged: set[tuple[str, int]] = set()  # points that MLflow has already
        if found := run.remembered.get("run_id"):
            self._id: str = found
            self._client.update_run(found, status="RUNNING")
            for key in self._client.get_run(found).data.metrics:
                if key.endswith("traffic/bytes_up"):
                    self._logged.update(
                        (key, point.step) for point in self._client.get_metric_history(found, key)
                    )
        else:
            self._id = self._client.create_run(self._experiment(run), run_name=run.name).info.run_id
            self._log(params=[(_plain(key), str(value)) for key, value in parameters(run.config)])
        return {"run_id": self._id}

    def _experiment(self, run: Begun) -> str:
        name = self.experiment or "-".join(
            filter(None, (Path(str(run.about["dataset"])).name, run.about.get("partition")))
        )
        found = self._client.get_experiment_by_name(name)
        return found.experiment_id if found else self._client.create_experiment(name)

    def add(self, entry: Entry, step: int) -> None:
        values = points(entry, self.clients)
        if (
            next(key for key in values if key.endswith("traffic/bytes_up")),
            step,
        ) not in self._logged:
            self._log(metrics=[(_plain(key), value, step) for key, value in values.items()])

    def end(self, summary: Mapping[str, Any]) -> None:
        if summary["status"] == "completed":
            self._log(
                metrics=[(key, value, summary["rounds"]) for key, value in result(summary).items()]
            )
        self._log(tags=list(labels(summary, self._folder).items()))
        ended = {"completed": "FINISHED", "stopped": "KILLED"}.get(summary["status"], "FAILED")
        self._client.set_terminated(self._id, status=ended)

    def _log(
        self, metrics: Sequence[Any] = (), params: Sequence[Any] = (), tags: Sequence[Any] = ()
    ) -> None:
        """Logs in batches that a server accepts."""
        from mlflow.entities import Metric, Param, RunTag

        now = int(time.time() * 1000)
        for k in range(0, len(metrics), 1000):
            self._client.log_batch(
                self._id,
                metrics=[
                    Metric(key, value, now, step) for key, value, step in metrics[k : k + 1000]
                ],
            )
        for k in range(0, len(params), 100):
            self._client.log_batch(
                self._id, params=[Param(key, value[:6000]) for key, value in params[k : k + 100]]
            )
        if tags:
            self._client.log_batch(
                self._id, tags=[RunTag(key, value[:8000]) for key, value in tags]
            )


def _plain(name: str) -> str:
    """Returns a name in the characters that MLflow accepts."""
    return re.sub(r"[^\w./: -]", "_", name)


def _require(extra: str, *modules: str) -> None:
    try:
        for module in modules:
            __import__(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"track: {extra} needs the package {error.name!r}: pip install 'fedloom[{extra}]'"
        ) from error


# ---- the trackers of a run ----
TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow}
Track: TypeAlias = str | Tracker | Sequence[str | Tracker]


def make_trackers(track: Track) -> list[Tracker]:
    """Returns trackers by name ("tensorboard,mlflow+clients"). Tracker objects stay as they are.

    Raises a ConfigError for an unknown name, or if the tracker's package is not installed.
    """
    given = [track] if isinstance(track, str | Tracker) else track
    specs = [
        part for each in given for part in (each.split(",") if isinstance(each, str) else [each])
    ]
    return [
        each if isinstance(each, Tracker) else _make(each.strip())
        for each in specs
        if not isinstance(each, str) or each.strip()
    ]


def _make(spec: str) -> Tracker:
    word, _, where = spec.partition(":")
    name, plus, more = word.partition("+")
    if name not in TRACKERS:
        raise unknown("tracker", name, TRACKERS)
    if plus and more != "clients":
        raise unknown(f"part of track {spec!r}:", more, ("clients",))
    return TRACKERS[name](where, clients=bool(plus))


def tracked(folder: Path) -> list[str]:
    """Returns the trackers of the run in a folder, for `--track`."""
    return list(_remembered(folder).get("track", ()))


def _remembered(folder: Path | None) -> dict[str, Any]:
    if folder is None or not (folder / FILE).exists():
        return {}
    try:
        found = json.loads((folder / FILE).read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"run: {str(folder)!r} is damaged ({FILE}: {error})") from error
    if not isinstance(found, dict):
        raise DataError(f"run: {str(folder)!r} is damaged ({FILE} is not a run's)")
    return found


class Tracking:
    """The trackers of one run.

    A tracker that raises an error is dropped with a warning. It never stops the run.
    """

    def __init__(self, track: Track = ()):
        self.trackers = make_trackers(track)
        self._seen: Counter[tuple[str, int]] = Counter()  # entries by stage and round

    def check(self, folder: Path | None, resume: bool) -> None:
        """Raises a ConfigError if a run in this folder cannot be tracked."""
        for tracker in self.trackers:
            tracker.check(folder, resume)

    def begin(self, run: Begun, earlier: Iterable[Entry] = ()) -> None:
        """The run starts, or resumes with the entries that its history holds."""
        if not self.trackers:
            return
        before = _remembered(run.folder)
        content: dict[str, Any] = {
            **before,
            "track": [t.spec for t in self.trackers if t.name in TRACKERS],
        }

        def begin(tracker: Tracker) -> None:
            content[tracker.name] = tracker.begin(
                replace(run, remembered=before.get(tracker.name) or {})
            )

        self._each(begin)
        if run.folder:
            write_atomic(run.folder / FILE, (json.dumps(content, indent=1) + "\n").encode())
        for entry in earlier:
            self.add(entry)

    def add(self, entry: Entry) -> None:
        """Adds an entry of the history at the step of its round.

        If a stage has several entries in one round, they take the following steps.
        """
        if not self.trackers:
            return
        place = entry.get("stage", "train"), entry["round"]
        step = entry["round"] + self._seen[place]
        self._seen[place] += 1
        self._each(lambda tracker: tracker.add(entry, step))

    def end(self, summary: Mapping[str, Any]) -> None:
        """The run is over."""
        self._each(lambda tracker: tracker.end(summary))

    def _each(self, work: Callable[[Tracker], object]) -> None:
        for tracker in list(self.trackers):
            try:
                work(tracker)
            except Exception as error:  # noqa: BLE001  (the run goes on without the tracker)
                self.trackers.remove(tracker)
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                warnings.warn(
                    f"tracker {tracker.name} fails ({reason}); the run goes on without it",
                    stacklevel=2,
                )
