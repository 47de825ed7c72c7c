"""The watch page's server: who may ask, what it tells, and that it reads what is new and nothing else."""

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
    """A history line of two clients."""
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
    """A run folder with these history lines added."""
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
    """Status, headers and body of an answer."""
    link = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
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


# ---- who may ask ----


def test_nobody_sees_anything_without_the_token(run):
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


def test_the_first_visit_leaves_a_cookie_that_is_enough(run):
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


def test_tokens_are_new_each_time(run):
    with Watch(run) as first, Watch(run) as second:
        assert first.token != second.token
        assert len(first.token) >= 32


def test_a_name_that_was_made_to_point_here_is_refused(run):
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


def test_everybody_who_is_let_in_needs_the_token_too(run):
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
def test_nothing_else_of_the_disk_can_be_had(run, path):
    with serving(run) as server:
        assert ask(server, path)[0] == 404


def test_answers_are_for_this_page_only(run):
    with serving(run) as server:
        for path in ("/", "/data", "/nothing"):
            _, headers, _ = ask(server, path)
            assert "default-src 'none'" in headers["Content-Security-Policy"]
            assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
            assert (
                "unsafe-inline"
                not in headers["Content-Security-Policy"]
                .partition("script-src")[2]
                .partition(";")[0]
            )
            assert (headers["X-Content-Type-Options"], headers["Referrer-Policy"]) == (
                "nosniff",
                "no-referrer",
            )
            assert (headers["Cache-Control"], headers["Server"]) == ("no-store", "fedloom")
        assert ask(server, "/data?from=x")[0] == 400


def test_addresses_that_cannot_be_listened_on_are_explained(run):
    with (
        Watch(run) as first,
        pytest.raises(
            ConfigError, match=f"host '127.0.0.1', port {first.port}: Address already in use"
        ),
    ):
        Watch(run, port=first.port)
    for host, port, why in (
        ("127.0.0.1", 70000, "between 0 and 65535"),
        ("", 0, "must be a name"),
        ("no such host", 0, "no such host"),
    ):
        with pytest.raises(ConfigError, match=why):
            Watch(run, host, port)


# ---- what is told ----


def test_only_what_is_new_is_sent(run):
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
            "accuracy": pytest.approx(0.4),
            "absences": 1,
            "cause": "did not answer",
            "last_absent": 3,
        }
        assert (third["bytes_up"], third["bytes_down"], third["absences"]) == (30, 60, 1)


def test_what_was_read_is_not_read_again(run, monkeypatch):
    follower = Follower(run)
    follower.look()
    parsed = []
    original = json.loads
    monkeypatch.setattr(follow.json, "loads", lambda text: parsed.append(text) or original(text))
    write(run, line(3))
    follower.look()
    follower.look()
    assert len(parsed) == 1


def test_a_line_is_taken_when_it_is_whole(run):
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


def test_a_history_that_is_cut_and_goes_on_is_read_anew(run):
    follower = Follower(run)
    write(run, line(3), line(4)[:40])
    follower.look()
    # A resume cuts to the checkpoint and does the rounds again, in other times; the file is longer than before when we look again.
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


def test_lines_that_are_no_entries_are_counted_and_left_out(run):
    write(
        run,
        "nonsense\n",
        "[1]\n",
        '{"round": "x"}\n',
        '{"round": 3, "accuracy": NaN, "clients": 5}\n',
        line(3, accuracy=float("nan")),
    )
    with serving(run) as server:
        told = data(server)
        assert (told["round"], told["damaged_lines"]) == (3, 4)
        assert told["entries"][-1][FIELDS.index("accuracy")] is None


# ---- states ----


def state(folder, now=None):
    follower = Follower(folder, *([lambda: now] if now else []))
    follower.look()
    return follower.about()


def test_a_run_is_waited_for_runs_and_ends(tmp_path):
    folder = tmp_path / "run"
    assert (state(folder)["state"], state(folder)["cause"]) == (
        "waiting",
        "the folder is not there yet",
    )
    folder.mkdir()
    assert state(folder)["cause"] == "the run has not begun"
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


def test_a_folder_that_is_used_again_is_another_run(run):
    follower = Follower(run)
    follower.look()
    assert follower.about()["planned"] == 4
    (run / "history.jsonl").unlink()
    write(run, line(1), config=CONFIG | {"method": {"name": "fedprox", "rounds": 30}})
    follower.look()
    told = follower.about()
    assert (told["planned"], told["round"], told["facts"][0]) == (30, 1, ["method", "fedprox"])


def test_time_left_goes_by_the_last_rounds(run):
    written = os.stat(run / "history.jsonl").st_mtime
    told = state(run, written + 1)
    assert told["left"] == pytest.approx(
        2 * 2.0 - 1, abs=0.01
    )  # two rounds of two seconds, one second ago
    assert told["elapsed"] == pytest.approx(5, abs=0.01)
    write(
        run, line(3, seconds=0.5), line(4, seconds=1.0), config=CONFIG | {"method": {"rounds": 6}}
    )  # resumed: its clock is new
    written = os.stat(run / "history.jsonl").st_mtime
    assert state(run, written)["left"] == pytest.approx(2 * 0.5, abs=0.01)


def test_a_run_that_writes_nothing_for_long_is_silent(run):
    written = os.stat(run / "config.json").st_mtime
    told = state(run, written + 3600)
    assert (told["state"], told["left"], "killed" in told["cause"]) == ("silent", None, True)
    write(run, line(3, seconds=4000.0))  # its rounds take half an hour and more
    assert state(run, os.stat(run / "history.jsonl").st_mtime + 3600)["state"] == "running"


def test_several_runs_are_listed_and_each_can_be_opened(tmp_path):
    for name, count in (("a", 1), ("b", 2)):
        write(tmp_path / "grid" / "runs" / name, *(line(number) for number in range(1, count + 1)))
    (tmp_path / "grid" / "runs" / "b" / "summary.json").write_text(
        json.dumps({"status": "completed", "config": CONFIG})
    )
    with serving(tmp_path / "grid") as server:
        told = data(server)["runs"]
        assert [(one["name"], one["state"], one["round"]) for one in told] == [
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
        seen_round = lambda entry, planned: seen.append(data(server)["round"])  # noqa: E731
        result = fedloom.run(
            "fedavg", fedloom.synthetic_clients(3), rounds=3, out=folder, on_round=seen_round
        )
        told = data(server)
    assert seen == [1, 2, 3]
    assert (told["state"], told["planned"]) == ("completed", 3)
    assert told["bytes_up"] == result.history[-1]["bytes_up"]
    assert {client["id"]: client["accuracy"] for client in told["clients"]} == {
        c["id"]: c["accuracy"] for c in result.history[-1]["clients"]
    }


def test_the_command_prints_the_address_and_ends_with_ctrl_c(run):
    order = [sys.executable, "-m", "fedloom", "watch", str(run)]
    with subprocess.Popen(
        order, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        first = process.stderr.readline()
        assert first.startswith(f"watching {run}: http://127.0.0.1:")
        host, _, token = first.strip().rpartition("http://")[2].partition("/?token=")
        link = http.client.HTTPConnection(host, timeout=20)
        link.request("GET", f"/data?token={token}")
        assert json.loads(link.getresponse().read())["round"] == 2
        link.close()
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=20)
    assert (process.returncode, rest) == (0, "stopped watching; the run is not touched\n")


def test_other_hosts_come_with_a_warning(run):
    order = [sys.executable, "-m", "fedloom", "watch", str(run), "--host", "0.0.0.0"]
    with subprocess.Popen(order, stderr=subprocess.PIPE, text=True) as process:
        assert "without encryption" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
    assert process.returncode == 0


def test_following_many_rounds_of_many_clients_sends_little(tmp_path):
    clients = [{"id": str(k), "accuracy": 0.5} for k in range(300)]
    folder = write(tmp_path / "run", *(line(number, clients=clients) for number in range(1, 101)))
    with serving(folder) as server:
        while data(server)["behind"]:
            time.sleep(0.01)
        whole = len(ask(server, "/data")[2])
        assert whole < (folder / "history.jsonl").stat().st_size / 20
        assert len(ask(server, "/data?from=100&version=0")[2]) < 2000
