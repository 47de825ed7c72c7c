"""The server of the watch page: access, data, and that it reads and sends new data only."""

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest

import fedloom
from fedloom.errors import ConfigError
from fedloom.experiments.report import follow
from fedloom.experiments.report.follow import FIELDS, Follower, run_folders
from fedloom.experiments.report.watch import Watch

CONFIG = {
    "method": {"name": "fedavg", "rounds": 4},
    "data": {"dataset": "toy"},
    "partition": {"clients": 2},
    "run": {"seed": 0},
}


def line(number, **more):
    """Returns a history line of two clients."""
    scores = [
        {"id": name, "accuracy": 0.1 * number + k / 10} for k, name in enumerate(("ann", "bob"))
    ]
    entry = {
        "round": number,
        "participants": ["ann", "bob"],
        "stage": "train",
        "accuracy": 0.1 * number,
        "val_accuracy": 0.2,
    }
    return (
        json.dumps(
            entry
            | {
                "clients": scores,
                "seconds": 2.0 * number,
                "bytes_up": 10 * number,
                "bytes_down": 20 * number,
            }
            | more
        )
        + "\n"
    )


def write(folder, *lines, config=CONFIG):
    """Adds history lines to a run folder. Creates the folder if necessary."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    with open(folder / "history.jsonl", "a") as file:
        file.writelines(lines)
    return folder


@contextmanager
def serving(folder, host="127.0.0.1"):
    with Watch(folder, host) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server, path="/", method="GET", token=True, **headers):
    """Sends a request. Returns the status, headers and body of the response."""
    link = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    if token:
        path += f"{'&' if '?' in path else '?'}token={server.token}"
    link.request(method, path, headers=headers)
    answer = link.getresponse()
    body = answer.read()
    link.close()
    return answer.status, answer.headers, body


def data(server, **query):
    path = "/data?" + "&".join(f"{name}={value}" for name, value in query.items())
    status, _, body = ask(server, path)
    assert status == 200
    return json.loads(body)


@pytest.fixture
def run(tmp_path):
    return write(tmp_path / "run", line(1), line(2))


# ---- access ----


def test_requests_without_the_token_are_refused(run):
    with serving(run) as server:
        for path in (
            "/",
            "/data",
            "/nothing",
            "/?token=",
            "/?token=wrong",
            f"/?token={server.token[:-1]}",
            "/?token=%ff%00",
        ):
            status, _, body = ask(server, path, token=False)
            assert (status, b"fedavg" in body) == (403, False)
        assert ask(server, "/data", token=False, Cookie=f"{server.cookie}=wrong")[0] == 403
        assert ask(server, "/data", token=False, Cookie='a="; \\')[0] == 403
        assert ask(server, "/")[0] == 200


def test_the_first_response_sets_a_cookie_that_grants_access(run):
    with serving(run) as server:
        _, headers, _ = ask(server, "/")
        assert (
            headers["Set-Cookie"]
            == f"{server.cookie}={server.token}; HttpOnly; SameSite=Strict; Path=/"
        )
        status, _, body = ask(
            server, "/data", token=False, Cookie=f"other=1; {server.cookie}={server.token}"
        )
        assert (status, json.loads(body)["round"]) == (200, 2)


def test_every_server_has_a_new_token(run):
    with Watch(run) as first, Watch(run) as second:
        assert first.token != second.token
        assert len(first.token) >= 32


def test_other_host_names_are_refused(run):
    with serving(run) as server:
        for host in (
            "evil.example",
            f"evil.example:{server.port}",
            "127.0.0.1",
            f"127.0.0.1:{server.port + 1}",
            "",
        ):
            assert ask(server, "/", Host=host)[0] == 403
        for host in (
            f"127.0.0.1:{server.port}",
            f"localhost:{server.port}",
            f"LOCALHOST:{server.port}",
        ):
            assert ask(server, "/", Host=host)[0] == 200


def test_other_machines_need_the_token(run):
    with serving(run, "0.0.0.0") as server:
        assert not server.loopback
        assert ask(server, "/", Host="laboratory.example")[0] == 200
        assert ask(server, "/", token=False, Host="laboratory.example")[0] == 403


@pytest.mark.parametrize(
    "method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "NONSENSE"]
)
def test_only_get_is_answered(run, method):
    with serving(run) as server:
        assert ask(server, "/", method)[0] == 405


@pytest.mark.parametrize(
    "path",
    [
        "/config.json",
        "/../run/config.json",
        "/%2e%2e/x",
        "/data/",
        "/history.jsonl",
        "/data?run=../run",
        "/data?run=/",
    ],
)
def test_other_paths_are_not_found(run, path):
    with serving(run) as server:
        assert ask(server, path)[0] == 404


def test_responses_have_strict_security_headers(run):
    with serving(run) as server:
        for path in ("/", "/data", "/nothing"):
            _, headers, _ = ask(server, path)
            assert "default-src 'none'" in headers["Content-Security-Policy"]
            assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
            scripts = headers["Content-Security-Policy"].partition("script-src")[2]
            assert "unsafe-inline" not in scripts.partition(";")[0]
            assert (headers["X-Content-Type-Options"], headers["Referrer-Policy"]) == (
                "nosniff",
                "no-referrer",
            )
            assert (headers["Cache-Control"], headers["Server"]) == ("no-store", "fedloom")
        assert ask(server, "/data?from=x")[0] == 400


def test_errors_name_addresses_that_cannot_be_used(run):
    with Watch(run) as first:
        message = f"host '127.0.0.1', port {first.port}: Address already in use"
        with pytest.raises(ConfigError, match=message):
            Watch(run, port=first.port)
    for host, port, why in (
        ("127.0.0.1", 70000, "between 0 and 65535"),
        ("", 0, "must be a name"),
        ("no such host", 0, "no such host"),
    ):
        with pytest.raises(ConfigError, match=why):
            Watch(run, host, port)


# ---- data ----


def test_only_new_entries_are_sent(run):
    with serving(run) as server:
        first = data(server)
        assert (first["from"], [entry[0] for entry in first["entries"]]) == (0, [1, 2])
        again = data(server, version=first["version"], **{"from": 2})
        assert (again["entries"], "clients" in again) == ([], False)
        write(run, line(3, absent=[{"client": "bob", "phase": "train", "cause": "did not answer"}]))
        third = data(server, version=first["version"], **{"from": 2})
        assert [entry[FIELDS.index("round")] for entry in third["entries"]] == [3]
        assert third["clients"][1] == {
            "id": "bob",
            "accuracy": pytest.approx(0.2),  # at the best round, which is the first
            "score": pytest.approx(0.2),
            "loss": None,
            "absences": 1,
            "cause": "did not answer",
            "last_absent": 3,
        }
        assert (third["bytes_up"], third["bytes_down"], third["absences"]) == (30, 60, 1)


def test_lines_are_parsed_once(run, monkeypatch):
    follower = Follower(run)
    follower.look()
    parsed = []
    original = json.loads
    monkeypatch.setattr(follow.json, "loads", lambda text: parsed.append(text) or original(text))
    write(run, line(3))
    follower.look()
    follower.look()
    assert sum(b"participants" in text for text in parsed) == 1


def test_incomplete_lines_are_read_when_they_are_complete(run):
    follower = Follower(run)
    whole = line(3)
    with open(run / "history.jsonl", "a") as file:
        file.write(whole[:50])
    follower.look()
    assert len(follower.entries) == 2
    with open(run / "history.jsonl", "a") as file:
        file.write(whole[50:])
    follower.look()
    assert (len(follower.entries), follower.about()["damaged_lines"], follower.version) == (3, 0, 0)


def test_a_history_that_was_cut_and_continued_is_read_again(run):
    follower = Follower(run)
    write(run, line(3), line(4)[:40])
    follower.look()
    # A resumed run cuts the history at the checkpoint and repeats the rounds, with other times. The
    # file is longer than before at the next look.
    (run / "history.jsonl").write_text(
        line(1) + line(2, seconds=7.0) + line(3, seconds=9.0) + line(4)
    )
    follower.look()
    assert follower.version == 1
    assert [entry[FIELDS.index("seconds")] for entry in follower.entries] == [2.0, 7.0, 9.0, 8.0]
    (run / "history.jsonl").unlink()
    follower.look()
    assert (follower.version, follower.entries) == (2, [])


def test_long_histories_are_read_in_pieces(run, monkeypatch):
    monkeypatch.setattr(follow, "PIECE", 512)
    follower, looks = Follower(run), 0
    write(run, *(line(number) for number in range(3, 30)))
    while looks == 0 or follower.behind:
        follower.look(seconds=0)
        looks += 1
    assert looks > 5
    assert [entry[0] for entry in follower.entries] == list(range(1, 30))


def test_damaged_lines_are_counted_and_left_out(run):
    write(
        run,
        "nonsense\n",
        "[1]\n",
        '{"round": "x"}\n',
        '{"round": 3, "accuracy": NaN, "clients": 5}\n',
        line(3, accuracy=float("nan")),
    )
    with serving(run) as server:
        found = data(server)
        assert (found["round"], found["damaged_lines"]) == (3, 4)
        assert found["entries"][-1][FIELDS.index("accuracy")] is None


# ---- scores ----


def test_scores_are_those_of_the_best_validation_round(run):
    write(run, line(3, val_accuracy=0.9, loss=0.5), line(4, val_accuracy=0.9), line(5))
    about = state(run)
    assert (about["best_round"], about["accuracy"], about["val_accuracy"]) == (
        3,
        pytest.approx(0.3),
        0.9,
    )
    assert (about["selection"], about["score"], about["val_score"]) == (
        "accuracy",
        pytest.approx(0.3),
        0.9,
    )
    assert about["loss"] == 0.5  # the last one that is known
    # After fine-tuning, the best round is one of fine-tuning.
    write(run, line(6, stage="fine-tune", val_accuracy=0.1))
    assert state(run)["best_round"] == 6


@pytest.mark.parametrize(("selection", "best"), [("pr_auc", 2), ("ece", 1)])
def test_another_metric_may_choose_the_best_round(tmp_path, selection, best):
    config = CONFIG | {"run": {"seed": 0, "selection": selection}}
    values = [{selection: 0.1 * k, f"val_{selection}": 0.3 * k} for k in (1, 2)]
    folder = write(tmp_path, line(1, **values[0]), line(2, **values[1]), config=config)
    about = state(folder)
    assert (about["best_round"], about["selection"]) == (best, selection)
    assert about["score"] == pytest.approx(0.1 * best)
    names = {"pr_auc": "PR-AUC", "ece": "calibration error (ECE)"}
    assert ["best round by", f"validation {names[selection]}"] in about["facts"]


def test_without_validation_scores_the_last_round_counts(tmp_path):
    folder = write(tmp_path, *(line(k, val_accuracy=None) for k in (1, 2, 3)))
    assert state(folder)["best_round"] == 3


def test_warnings_and_baselines_are_shown(run):
    summary = {"status": "completed", "config": CONFIG, "warnings": ["one class only"]}
    (run / "summary.json").write_text(json.dumps(summary))
    write(run / "baselines" / "local", line(1), line(2, val_accuracy=0.6))
    with serving(run) as server:
        found = data(server)
    assert found["warnings"] == ["one class only"]
    (baseline,) = found["baselines"]
    assert (baseline["name"], baseline["best_round"]) == ("local", 2)


# ---- states ----


def state(folder, now=None):
    follower = Follower(folder, *([lambda: now] if now else []))
    follower.look()
    return follower.about()


def test_a_run_is_waiting_then_running_then_finished(tmp_path):
    folder = tmp_path / "run"
    waiting = state(folder)
    assert (waiting["state"], waiting["cause"]) == ("waiting", "the folder does not exist")
    folder.mkdir()
    assert state(folder)["cause"] == "the run has not started"
    write(folder, line(1), line(2))
    running = state(folder)
    assert (running["state"], running["round"], running["planned"]) == ("running", 2, 4)
    for status, cause in (
        ("completed", ""),
        ("failed", "ValueError: x"),
        ("stopped", "interrupted"),
    ):
        (folder / "summary.json").write_text(
            json.dumps({"status": status, "cause": cause, "config": CONFIG})
        )
        ended = state(folder)
        assert (ended["state"], ended["cause"], ended["left"], ended["elapsed"]) == (
            status,
            cause,
            None,
            4.0,
        )
    (folder / "summary.json").write_text("{half")
    assert state(folder)["state"] == "damaged"


def test_a_reused_folder_is_another_run(run):
    follower = Follower(run)
    follower.look()
    assert follower.about()["planned"] == 4
    (run / "history.jsonl").unlink()
    write(run, line(1), config=CONFIG | {"method": {"name": "fedprox", "rounds": 30}})
    follower.look()
    about = follower.about()
    assert (about["planned"], about["round"], about["facts"][0]) == (30, 1, ["method", "fedprox"])


def test_time_left_is_estimated_from_the_last_rounds(run):
    written = os.stat(run / "history.jsonl").st_mtime
    about = state(run, written + 1)
    # Two rounds of two seconds are left. One second of them has passed.
    assert about["left"] == pytest.approx(2 * 2.0 - 1, abs=0.01)
    assert about["elapsed"] == pytest.approx(5, abs=0.01)
    # A resumed run has a new clock.
    config = CONFIG | {"method": {"rounds": 6}}
    write(run, line(3, seconds=0.5), line(4, seconds=1.0), config=config)
    written = os.stat(run / "history.jsonl").st_mtime
    assert state(run, written)["left"] == pytest.approx(2 * 0.5, abs=0.01)


def test_a_run_without_new_lines_is_silent_unless_its_rounds_are_long(run):
    written = os.stat(run / "config.json").st_mtime
    about = state(run, written + 3600)
    assert (about["state"], about["left"], "killed" in about["cause"]) == ("silent", None, True)
    write(run, line(3, seconds=4000.0))  # rounds take more than half an hour
    assert state(run, os.stat(run / "history.jsonl").st_mtime + 3600)["state"] == "running"


def test_several_runs_are_listed_and_each_can_be_opened(tmp_path):
    for name, count in (("a", 1), ("b", 2)):
        write(tmp_path / "grid" / "runs" / name, *(line(number) for number in range(1, count + 1)))
    (tmp_path / "grid" / "runs" / "b" / "summary.json").write_text(
        json.dumps({"status": "completed", "config": CONFIG})
    )
    with serving(tmp_path / "grid") as server:
        runs = data(server)["runs"]
        assert [(one["name"], one["state"], one["round"]) for one in runs] == [
            ("a", "running", 1),
            ("b", "completed", 2),
        ]
        assert data(server, run="b")["name"] == "b"
        assert len(data(server, run="b")["entries"]) == 2
        assert ask(server, "/data?run=c")[0] == 404
    assert run_folders(tmp_path / "grid" / "runs" / "a") is None
    assert run_folders(tmp_path / "nowhere") is None


# ---- real runs ----


def test_a_real_run_is_followed_to_its_end(tmp_path):
    folder, seen = tmp_path / "run", []
    with serving(folder) as server:
        assert data(server)["state"] == "waiting"

        def on_round(entry):
            seen.append(data(server)["round"])

        result = fedloom.run(
            "fedavg", fedloom.synthetic_clients(3), rounds=3, out=folder, callbacks=on_round
        )
        found = data(server)
    assert seen == [1, 2, 3]
    assert (found["state"], found["planned"]) == ("completed", 3)
    assert found["bytes_up"] == result.history[-1]["bytes_up"]
    # The numbers are those of the summary, under the same names.
    for name in ("best_round", "accuracy", "val_accuracy", "selection", "warnings"):
        assert found[name] == result.summary[name]
    assert found["loss"] == result.history[-1]["loss"]
    assert {client["id"]: client["accuracy"] for client in found["clients"]} == {
        c["id"]: c["accuracy"] for c in result.summary["per_client"]
    }


@pytest.mark.slow
def test_the_command_prints_the_address_and_ends_with_ctrl_c(run):
    command = [sys.executable, "-m", "fedloom", "watch", str(run)]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        first = process.stderr.readline()
        assert first.startswith(f"watching {run}: http://127.0.0.1:")
        host, _, token = first.strip().rpartition("http://")[2].partition("/?token=")
        link = http.client.HTTPConnection(host, timeout=60)
        link.request("GET", f"/data?token={token}")
        assert json.loads(link.getresponse().read())["round"] == 2
        link.close()
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=60)
    assert (process.returncode, rest) == (0, "stopped watching; the run is not affected\n")


@pytest.mark.slow
def test_other_hosts_cause_a_warning(run):
    command = [sys.executable, "-m", "fedloom", "watch", str(run), "--host", "0.0.0.0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert "without encryption" in process.stderr.readline()
        assert "watching" in process.stderr.readline()  # the server listens and Ctrl-C is handled
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 0


def test_responses_are_small_for_many_rounds_and_clients(tmp_path):
    clients = [{"id": str(k), "accuracy": 0.5} for k in range(300)]
    folder = write(tmp_path / "run", *(line(number, clients=clients) for number in range(1, 101)))
    with serving(folder) as server:
        while data(server)["behind"]:
            time.sleep(0.01)
        whole = len(ask(server, "/data")[2])
        assert whole < (folder / "history.jsonl").stat().st_size / 20
        assert len(ask(server, "/data?from=100&version=0")[2]) < 2000


# ---- updates that stand out, and the privacy budget ----


def compared(clients, clipped=(), left_out=()):
    """Returns the outlier report of a round, as the history has it."""
    row = {"phase": "train", "clients": clients}
    return [row | {"clipped": list(clipped), "left_out": list(left_out)}]


def test_clients_that_stand_out_in_the_latest_round_are_sent(run):
    with serving(run) as server:
        assert data(server)["outliers"] is None
        first = compared({"ann": [1.0, 0.9], "bob": [12.0, -0.4]}, clipped=["bob"])
        write(run, line(3, updates=first))
        found = data(server)["outliers"]
        assert (found["round"], found["compared"], found["standing_out"]) == (3, 2, 1)
        (bob,) = found["clients"]
        assert bob == {
            "phase": "train",
            "client": "bob",
            "norm": 12.0,
            "cosine": -0.4,
            "shortened": True,
            "left_out": False,
        }
        write(run, line(4, updates=compared({"ann": [1.0, 0.9], "bob": [1.1, 0.8]})))
        found = data(server)["outliers"]
        assert (found["round"], found["standing_out"], found["clients"]) == (4, 0, [])
        assert "outliers" not in data(server, version=0, **{"from": 4})  # nothing is new


@pytest.mark.parametrize(
    ("pair", "stands_out"),
    [
        ([1.9, 0.1], False),
        ([2.1, 0.1], True),
        ([0.4, 0.1], True),
        ([0.0, 0.0], True),  # a free rider
        ([1.0, -0.1], True),
        ([float("inf"), float("nan")], True),
    ],
)
def test_updates_far_from_the_median_stand_out(tmp_path, pair, stands_out):
    updates = compared({"ann": pair, "bob": [1.0, 0.9]})
    folder = write(tmp_path / "run", line(1, updates=updates))
    with serving(folder) as server:
        names = [one["client"] for one in data(server)["outliers"]["clients"]]
    assert names == ["ann"] * stands_out


def test_the_ten_that_stand_out_most_are_sent(tmp_path):
    clients = {f"c{k}": [2.0 + k, 0.5] for k in range(1, 31)}
    updates = compared(clients, left_out=["c1"])
    folder = write(tmp_path / "run", line(1, updates=updates))
    with serving(folder) as server:
        found = data(server)["outliers"]
    assert (found["compared"], found["standing_out"]) == (30, 30)
    assert [one["client"] for one in found["clients"]] == [
        "c1",
        *(f"c{k}" for k in range(30, 21, -1)),
    ]


@pytest.mark.parametrize(
    "damage", [[{}], [1], compared({"ann": [1.0]}), compared({"ann": ["x", 1]})]
)
def test_damaged_updates_are_damaged_lines(run, damage):
    write(run, line(3, updates=damage))
    with serving(run) as server:
        found = data(server)
    assert (found["damaged_lines"], found["round"], found["outliers"]) == (1, 2, None)


def test_the_epsilon_spent_so_far_is_a_fact(run, tmp_path):
    with serving(run) as server:
        assert "ε spent" not in dict(data(server)["facts"])
    private = CONFIG | {"run": {"seed": 0, "dp_epsilon": 8.0}}
    entries = (line(1, epsilon=0.5), line(2, epsilon=1.23456))
    folder = write(tmp_path / "private", *entries, config=private)
    with serving(folder) as server:
        assert dict(data(server)["facts"])["ε spent"] == "1.235 of 8"
    seeded = {"seed": 0, "dp_noise": 1.0, "dp_epsilon": 0.0, "dp_seeded": True}
    folder = write(tmp_path / "seeded", line(1, epsilon=2.0), config=CONFIG | {"run": seeded})
    with serving(folder) as server:
        assert dict(data(server)["facts"])["ε spent"] == "2.000 (seeded noise: not private)"
