"""Two processes on one run folder: the second is refused, or the first notices it and stops."""

import errno
import fcntl
import json
import os
import re
import subprocess
import sys
import time

import pytest

from fedloom._system import LOCK, AppendLog, locked
from fedloom.errors import ConfigError, DataError

RUN = (
    *("run", "--dataset", "synthetic:nodes=150,classes=3,features=8", "--clients", "3"),
    *("--partition", "random", "--model", "gcn-2x8", "--rounds", "100000"),
    *("--set", "run.checkpoint_every=5", "--out", "x"),
)


def started(folder, *arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "fedloom", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def rounds(folder):
    """Returns the rounds in the history of a run. Each line must be an entry."""
    path = folder / "x" / "history.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line)["round"] for line in lines if line.endswith("\n")]


def is_whole(found):
    """Returns whether no round is missing and none is there twice."""
    return found == list(range(1, len(found) + 1))


def until(condition, process):
    while not condition():  # pytest-timeout ends it
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


@pytest.fixture
def live(tmp_path):
    """A run under way in the folder x, with a checkpoint."""
    process = started(tmp_path, *RUN)
    until(lambda: (tmp_path / "x" / "checkpoint.safetensors").exists(), process)
    yield process
    process.kill()
    process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("resume", "x"), RUN], ids=["resume", "run"])
def test_beside_a_live_run_a_second_process_is_refused_by_name(live, arguments, tmp_path):
    second = started(tmp_path, *arguments)
    _, err = second.communicate(timeout=200)
    assert second.returncode == 2, err
    named = f"(pid {live.pid} on {os.uname().nodename}, since 20"
    assert named in err.splitlines()[-1]
    assert f": fedloom {' '.join(RUN)}" in err.splitlines()[-1]
    before = len(rounds(tmp_path))
    until(lambda: len(rounds(tmp_path)) > before + 5, live)  # unharmed
    assert is_whole(rounds(tmp_path))


@pytest.mark.slow
def test_a_run_whose_lock_was_removed_stops_when_another_process_takes_its_folder(live, tmp_path):
    """The lock does not protect on every network disk. Here its file is removed."""
    (tmp_path / "x" / LOCK).unlink()
    second = started(tmp_path, "resume", "x")
    try:
        _, err = live.communicate(timeout=200)
        assert live.returncode == 2, err
        # Whichever log the first process appends to next.
        assert re.search(r"another process has changed 'x/(history\.jsonl|ledger\.csv)'", err), err
        assert not (tmp_path / "x" / "summary.json").exists()  # nobody says how the run ended
        before = len(rounds(tmp_path))
        until(lambda: len(rounds(tmp_path)) > before + 5, second)
        assert is_whole(rounds(tmp_path))
        assert (tmp_path / "x" / LOCK).read_text().startswith(f"pid {second.pid} on ")
    finally:
        second.kill()
        second.communicate()


def test_a_log_that_another_process_has_changed_is_not_written(tmp_path):
    first, second = (AppendLog(tmp_path / "history.jsonl") for _ in range(2))
    first.append(b"1\n")
    second.append(b"other\n")  # takes the file over, as a resumed run does
    with pytest.raises(DataError, match=r"changed .*history\.jsonl.* .6 bytes instead of 2"):
        first.append(b"2\n")
    assert (tmp_path / "history.jsonl").read_bytes() == b"other\n"


# ---- disks without locks ----
@pytest.fixture
def without_locks(monkeypatch):
    """The system answers as a network disk that is mounted without locks does."""

    def refuse(handle, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)


def test_without_locks_the_file_counts_while_its_process_lives(without_locks, tmp_path):
    with locked(tmp_path, "run"):
        with pytest.raises(ConfigError, match=rf"pid {os.getpid()} on "), locked(tmp_path, "run"):
            pass
        assert (tmp_path / LOCK).exists()
    assert not (tmp_path / LOCK).exists()


def test_without_locks_a_dead_process_does_not_block(without_locks, tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (tmp_path / LOCK).write_text(f"pid {ended.pid} on {os.uname().nodename}, since: fedloom run\n")
    with locked(tmp_path, "run"):
        pass


def test_without_locks_a_process_of_another_machine_blocks(without_locks, tmp_path):
    (tmp_path / LOCK).write_text("pid 1 on another-machine, since now: fedloom run\n")
    with pytest.raises(ConfigError, match="pid 1 on another-machine"), locked(tmp_path, "run"):
        pass
