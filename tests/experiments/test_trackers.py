"""Trackers: TensorBoard and MLflow hold the numbers of the history, each once.

A tracker that fails does not stop the run.
"""

import json
import math
import os
import shutil
import struct
import subprocess
import sys
from importlib.util import find_spec

import pytest
from tests.faults.forked import crash_at

import fedloom
from fedloom.cli import main
from fedloom.errors import ConfigError, DataError
from fedloom.experiments import trackers
from fedloom.experiments.run import run
from fedloom.experiments.run_folder import read_history
from fedloom.experiments.trackers import Begun, MLflow, TensorBoard, Tracker, make_trackers, points

NEEDS = {
    "tensorboard": pytest.mark.skipif(
        find_spec("tensorboard") is None, reason="the extra 'tensorboard' is not installed"
    ),
    "mlflow": pytest.mark.skipif(
        find_spec("mlflow") is None, reason="the extra 'mlflow' is not installed"
    ),
}
# MLflow takes seconds to import and to create its database.
MLFLOW = [NEEDS["mlflow"], pytest.mark.slow]
BOTH = [
    pytest.param("tensorboard", marks=NEEDS["tensorboard"]),
    pytest.param("mlflow", marks=MLFLOW),
]
SETTINGS = {"model": "gcn-2x8", "rounds": 4, "finetune": 2, "checkpoint_every": 1}


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory):
    """Returns an MLflow database without runs: creating its tables takes seconds."""
    if find_spec("mlflow") is None:
        return None
    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    MLflow(f"sqlite:///{path}").begin(Begun({"run": {"seed": 0}}, {"dataset": "none"}, "none"))
    client = client_of(path)
    client.delete_run(mlflow_run(path).info.run_id)
    return path


@pytest.fixture(autouse=True)
def _own_store(monkeypatch, tmp_path, request):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    uses_mlflow = "mlflow" in request.node.name and request.node.get_closest_marker("slow")
    if uses_mlflow and (store := request.getfixturevalue("empty_store")):
        shutil.copy(store, tmp_path)


def events(place):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(place), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


def of_tensorboard(folder):
    """Returns {name: [(step, value)]} of the run's events."""
    found = events(folder / "tensorboard")
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def client_of(folder):
    from mlflow.tracking import MlflowClient

    return MlflowClient(f"sqlite:///{folder.parent}/mlflow.db")


def mlflow_run(folder):
    client = client_of(folder)
    experiments = [e.experiment_id for e in client.search_experiments()]
    (found,) = client.search_runs(experiments)
    return found


def of_mlflow(folder):
    client, found = client_of(folder), mlflow_run(folder)
    histories = {
        key: client.get_metric_history(found.info.run_id, key) for key in found.data.metrics
    }
    return {key: sorted((m.step, m.value) for m in history) for key, history in histories.items()}


READERS = {"tensorboard": of_tensorboard, "mlflow": of_mlflow}


def expected(folder, name, clients=False):
    """Returns the numbers of the run's own files; in single precision for TensorBoard."""
    kept = (
        (lambda x: struct.unpack("f", struct.pack("f", x))[0]) if name == "tensorboard" else float
    )
    found = {}
    for entry in read_history(folder):
        for key, value in points(entry, clients).items():
            earlier = found.setdefault(key, [])
            earlier.append((max(entry["round"], earlier[-1][0] + 1 if earlier else 0), kept(value)))
    summary = json.loads((folder / "summary.json").read_text())
    return found | {
        key: [(summary["rounds"], kept(value))] for key, value in trackers.result(summary).items()
    }


# ---- numbers ----
@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("clients", [False, True])
def test_a_tracker_holds_the_numbers_of_history_and_summary(
    name, clients, node_federation, tmp_path
):
    folder = tmp_path / "x"
    run("fedavg", node_federation, out=folder, track=name + "+clients" * clients, **SETTINGS)
    tracked = READERS[name](folder)
    assert tracked == expected(folder, name, clients)
    assert len(tracked["scores/val_accuracy"]) == 4
    assert [step for step, _ in tracked["finetune/scores/accuracy"]] == [4, 5]
    assert ("clients/0/accuracy" in tracked) == clients


def test_points_are_an_entrys_own_numbers():
    row = {"id": "a", "accuracy": 0.25, "auc": None}
    entry = {"round": 3, "participants": ["a"], "seconds": 1.5, "bytes_up": 10, "bytes_down": 20}
    assert points(entry, True) == {
        "traffic/bytes_up": 10,
        "traffic/bytes_down": 20,
        "time/seconds": 1.5,
    }
    scored = {**entry, "stage": "finetune", "accuracy": 0.5, "auc": None, "clients": [row]}
    assert points(scored, True) == {
        "finetune/scores/accuracy": 0.5,
        "finetune/traffic/bytes_up": 10,
        "finetune/traffic/bytes_down": 20,
        "finetune/time/seconds": 1.5,
        "finetune/clients/a/accuracy": 0.25,
    }


@pytest.mark.parametrize("name", BOTH)
def test_a_secure_run_has_no_clients_scores(name, node_federation, tmp_path):
    folder = tmp_path / "x"
    run(
        "fedavg",
        node_federation,
        out=folder,
        track=f"{name}+clients",
        secure=True,
        model="gcn-2x8",
        rounds=2,
    )
    tracked = READERS[name](folder)
    assert len(tracked["scores/accuracy"]) == 2
    assert not any("clients/" in key for key in tracked)


@NEEDS["tensorboard"]
def test_tensorboard_has_parameters_and_how_the_run_ended(node_federation, tmp_path):
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    folder = tmp_path / "x"
    summary = run("fedavg", node_federation, out=folder, track="tensorboard", **SETTINGS).summary
    found = events(folder / "tensorboard")
    data = HParamsPluginData.FromString(
        found.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    )
    values = data.session_start_info.hparams
    assert values["method.lr"].number_value == 0.01
    assert values["model.name"].string_value == "gcn-2x8"
    (text,) = found.Tensors("run")[0].tensor_proto.string_val
    assert f"- history_hash: {summary['history_hash']}" in text.decode()
    assert "- status: completed" in text.decode()
    assert f"- run_folder: {folder}" in text.decode()


@pytest.mark.slow
@NEEDS["mlflow"]
def test_mlflow_has_parameters_tags_and_an_experiment_for_the_task(node_federation, tmp_path):
    folder = tmp_path / "x"
    summary = run("fedavg", node_federation, out=folder, track="mlflow", **SETTINGS).summary
    found = mlflow_run(folder)
    assert (found.info.status, found.info.run_name) == ("FINISHED", "x")
    assert (
        found.data.params["method.lr"],
        found.data.params["run.seed"],
        found.data.params["model.name"],
    ) == ("0.01", "0", "gcn-2x8")
    assert found.data.tags["history_hash"] == summary["history_hash"]
    assert found.data.tags["run_folder"] == str(folder)
    assert client_of(folder).get_experiment(found.info.experiment_id).name == "synthetic-random"


@pytest.mark.slow
@NEEDS["mlflow"]
def test_mlflow_uses_the_uri_of_the_environment(node_federation, tmp_path, monkeypatch):
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{tmp_path}/elsewhere.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    run(
        "fedavg", node_federation, track="mlflow", model="gcn-2x8", rounds=1, seed=3
    )  # also for a run without a folder
    (found,) = MlflowClient(uri).search_runs(
        [e.experiment_id for e in MlflowClient(uri).search_experiments()]
    )
    assert found.info.run_name == "fedavg-s3"
    assert not client_of(tmp_path / "x").search_runs(
        [e.experiment_id for e in client_of(tmp_path / "x").search_experiments()]
    )


@NEEDS["tensorboard"]
def test_tensorboard_writes_to_a_given_folder_without_other_events(node_federation, tmp_path):
    settings = {"model": "gcn-2x8", "rounds": 2}
    run("fedavg", node_federation, track=f"tensorboard:{tmp_path}/t", **settings)
    assert len(events(tmp_path / "t").Scalars("scores/accuracy")) == 2
    with pytest.raises(ConfigError, match="holds the events of another run"):
        run(
            "fedavg",
            node_federation,
            track=f"tensorboard:{tmp_path}/t",
            out=tmp_path / "y",
            **settings,
        )
    assert not (tmp_path / "y").exists()
    with pytest.raises(ConfigError, match="tensorboard needs a run folder"):
        run("fedavg", node_federation, track="tensorboard", **settings)


# ---- resumed runs ----
@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize(
    "where",
    [
        "round-closed:3",
        *(
            pytest.param(where, marks=pytest.mark.slow)
            for where in ("round-unclosed:3", "checkpoint-half:3", "summary-half")
        ),
    ],
)
def test_a_resumed_run_is_tracked_without_double_points(name, where, node_federation, tmp_path):
    folder = tmp_path / "x"
    assert crash_at(
        where, lambda: run("fedavg", node_federation, out=folder, track=name, **SETTINGS)
    )
    run("fedavg", node_federation, out=folder, track=name, resume=True, **SETTINGS)
    tracked, own = READERS[name](folder), expected(folder, name)
    if name == "mlflow":  # a round that ran twice took another time when it was tracked
        steps = [{k: [s for s, _ in v] for k, v in each.items()} for each in (tracked, own)]
        assert steps[0] == steps[1]
        tracked, own = (
            {k: v for k, v in each.items() if "seconds" not in k} for each in (tracked, own)
        )
    assert tracked == own
    if name == "tensorboard":
        assert len(list((folder / "tensorboard").iterdir())) == 1


@pytest.mark.parametrize("name", BOTH)
def test_a_tracker_added_at_a_resume_gets_the_earlier_rounds(name, node_federation, tmp_path):
    folder = tmp_path / "x"
    assert crash_at(
        "round-closed:3", lambda: run("fedavg", node_federation, out=folder, **SETTINGS)
    )
    run("fedavg", node_federation, out=folder, track=name, resume=True, **SETTINGS)
    assert READERS[name](folder) == expected(folder, name)


@pytest.mark.slow
@NEEDS["mlflow"]
def test_mlflow_has_the_status_of_a_run_that_failed_and_resumed(node_federation, tmp_path):
    folder = tmp_path / "x"

    def stop(entry):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run("fedavg", node_federation, out=folder, track="mlflow", callbacks=stop, **SETTINGS)
    found = mlflow_run(folder)
    assert (found.info.status, found.data.tags["status"], found.data.tags["cause"]) == (
        "KILLED",
        "stopped",
        "interrupted",
    )
    assert not any(key.startswith("summary/") for key in found.data.metrics)
    run("fedavg", node_federation, out=folder, track="mlflow", resume=True, **SETTINGS)
    found = mlflow_run(folder)
    assert (found.info.status, found.data.tags["status"]) == ("FINISHED", "completed")


# ---- failing ----
class Failing(Tracker):
    name = "failing"

    def __init__(self, at):
        super().__init__()
        self.at, self.heard = at, []

    def _hear(self, what):
        self.heard.append(what)
        if what == self.at:
            raise OSError(28, "No space\nleft")

    def begin(self, run):
        self._hear("begin")
        return {}

    def add(self, entry, step):
        self._hear("add")

    def end(self, summary):
        self._hear("end")


@pytest.mark.parametrize("at", ["begin", "add", "end", "never"])
def test_a_failing_tracker_is_a_warning_and_the_run_goes_on(at, node_federation, tmp_path, recwarn):
    other, plain = Failing("never"), run("fedavg", node_federation, **SETTINGS)
    failing = Failing(at)
    result = run("fedavg", node_federation, out=tmp_path / "x", track=[failing, other], **SETTINGS)
    assert result.summary["status"] == "completed"
    assert result.summary["history_hash"] == plain.summary["history_hash"]
    assert other.heard == ["begin", *["add"] * 6, "end"]
    lines = [str(w.message) for w in recwarn]
    if at == "never":
        assert lines == []
    else:
        assert lines == [
            "tracker failing fails (OSError: [Errno 28] No space left); the run goes on without it"
        ]
        assert failing.heard[-1] == at
        assert failing.heard.count(at) == 1


@pytest.mark.slow
@NEEDS["mlflow"]
def test_a_missing_mlflow_server_does_not_stop_the_run(node_federation, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.warns(UserWarning, match="tracker mlflow fails .*; the run goes on without it"):
        result = run(
            "fedavg",
            node_federation,
            out=tmp_path / "x",
            track="mlflow:http://127.0.0.1:9",
            **SETTINGS,
        )
    assert result.summary["status"] == "completed"


@NEEDS["tensorboard"]
def test_an_unwritable_folder_does_not_stop_the_run(node_federation, tmp_path):
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match=r"tracker tensorboard fails \(NotADirectoryError"):
        result = run(
            "fedavg",
            node_federation,
            out=tmp_path / "x",
            track=TensorBoard(str(tmp_path / "file" / "t")),
            **SETTINGS,
        )
    assert result.summary["status"] == "completed"


# ---- asking for it ----
def test_trackers_are_made_by_name():
    assert make_trackers("") == make_trackers(()) == []
    own = Failing("never")
    assert make_trackers(own) == make_trackers([own]) == [own]
    with pytest.raises(
        ConfigError,
        match=r"unknown tracker 'tensorbord'. Did you mean 'tensorboard'\? Valid: mlflow, tensor",
    ):
        make_trackers("tensorbord")
    with pytest.raises(
        ConfigError, match=r"unknown part of track 'mlflow.all': 'all'.* Valid: clients"
    ):
        make_trackers("mlflow+all")


@NEEDS["tensorboard"]
@pytest.mark.slow
@NEEDS["mlflow"]
def test_a_tracker_knows_its_own_specification(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@host")
    found = make_trackers(["tensorboard+clients:t", " mlflow , mlflow:http://host:5000"])
    assert [type(t) for t in found] == [TensorBoard, MLflow, MLflow]
    assert [t.spec for t in found] == [
        f"tensorboard+clients:{tmp_path}/t",
        "mlflow",
        "mlflow:http://host:5000",
    ]


@pytest.mark.parametrize("name", ["tensorboard", "mlflow"])
def test_a_missing_package_is_named_before_the_run(name, node_federation, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        ConfigError,
        match=rf"track: {name} needs the package '{name}.*': pip install 'fedloom\[{name}\]'",
    ):
        run("fedavg", node_federation, out=tmp_path / "x", track=name)
    assert not (tmp_path / "x").exists()


def test_a_damaged_tracking_file_is_named(node_federation, tmp_path):
    folder = tmp_path / "x"
    assert crash_at(
        "round-closed:3",
        lambda: run("fedavg", node_federation, out=folder, track=Failing("never"), **SETTINGS),
    )
    for content in ("{", "[]"):
        (folder / "tracking.json").write_text(content)
        with pytest.raises(DataError, match=r"is damaged \(tracking.json"):
            trackers.tracked(folder)


@NEEDS["tensorboard"]
@pytest.mark.filterwarnings("default")
def test_the_command_line_tracks_runs_and_resumed_runs(tmp_path, monkeypatch, capsys):
    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["fedloom", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code or 0, capsys.readouterr().err

    small = [
        "--dataset",
        "synthetic:nodes=150,classes=3,features=8",
        "--clients",
        3,
        "--partition",
        "random",
        "--model",
        "gcn-2x8",
    ]
    assert call("run", *small, "--track", "wandb")[0] == 2
    assert not (tmp_path / "runs").exists()
    asked = [
        "run",
        *small,
        "--rounds",
        4,
        "--out",
        "x",
        "--set",
        "run.checkpoint_every=1",
        "--track",
        "tensorboard",
    ]
    assert crash_at("round-closed:2", lambda: call(*asked))
    assert call("resume", "x")[0] == 0
    assert of_tensorboard(tmp_path / "x") == expected(tmp_path / "x", "tensorboard")
    (tmp_path / "file").touch()
    code, stderr = call(
        "run", *small, "--rounds", 1, "--out", "y", "--track", f"tensorboard:{tmp_path}/file"
    )
    assert code == 0
    assert (
        len([line for line in stderr.splitlines() if line.startswith("tracker tensorboard fails")])
        == 1
    )


@pytest.mark.slow
def test_packages_of_trackers_are_imported_only_when_used():
    script = (
        "import sys, fedloom.commands, fedloom.experiments.run\n"
        "print(*(m in sys.modules for m in ('tensorboard', 'mlflow', 'optuna')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=os.environ
    )
    assert done.stdout.split() == ["False"] * 3


def test_a_users_tracker_gets_every_entry(node_federation):
    heard = []

    class Own(Tracker):
        name = "own"

        def begin(self, run):
            heard.append(run.name)
            return {}

        def add(self, entry, step):
            heard.append((entry["round"], step))

        def end(self, summary):
            heard.append(math.isfinite(summary["accuracy"]))

    fedloom.run("fedavg", node_federation, track=Own(), model="gcn-2x8", rounds=2, seed=1)
    assert heard == ["fedavg-s1", (1, 1), (2, 2), True]
