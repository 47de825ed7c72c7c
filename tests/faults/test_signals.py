"""Ctrl-C and SIGTERM as real signals to real processes: exit codes, and what is left behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from fedloom._system import deferred_signals, graceful_signals
from fedloom.experiments import checkpoint

SMALL = [
    "--dataset",
    "synthetic:nodes=150,classes=3,features=8",
    "--clients",
    "3",
    "--partition",
    "random",
    "--model",
    "gcn-2x8",
]
# In a background job of a shell, the tests and their children ignore Ctrl-C. A terminal's do not.
PROGRAM = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from fedloom.cli import main; main()"
)

STUBBORN = '''"""Stubborn: ignores the first signal.

What travels: as in FedAvg.
"""

import time
from dataclasses import dataclass
from pathlib import Path

from fedloom.core.phase import phase
from fedloom.core.settings import setting
from fedloom.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Stubborn(FedAvg):
    """Takes no notice of Ctrl-C."""

    how: str = setting("python", "where it sits")

    @phase()
    def setup(self, client):
        """Never ends."""
        Path("sitting").touch()
        if self.how == "c":
            sum(range(10**12))  # one call into C, which lets no other thread run
        while True:
            try:
                time.sleep(100)
            except KeyboardInterrupt:
                Path("noticed").touch()
'''


@pytest.fixture
def start(tmp_path):
    """Starts `fedloom run` in a process group of its own, and waits until a file exists.

    The process is killed after the test.
    """
    started, where = [], ("--out", "x")

    def go(*more, until, lines=0):
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "run", *SMALL, "--rounds", "100000", *where, *more],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        wait_for(
            lambda: (
                (tmp_path / until).exists() and (tmp_path / until).read_text().count("\n") >= lines
            ),
            process,
        )
        return process

    yield go
    for process in started:
        process.kill()
        process.communicate()


def wait_for(condition, process=None):
    """Waits for an event, while the process runs. The suite's timeout is the limit."""
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.005)


def ended(process):
    """Waits for a process to end. Returns its exit code and its standard error."""
    _, stderr = process.communicate()
    return process.returncode, stderr


def group(process):
    """Returns the living processes of a process group."""
    alive = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, of_group = stat.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended
        if int(of_group) == process.pid and state != "Z":
            alive.append(int(stat.parent.name))
    return alive


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "cause"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
)
@pytest.mark.parametrize("engine", ["loop", "processes"])
def test_one_signal_stops_the_run_in_order(number, code, cause, engine, start, tmp_path):
    process = start(
        "--engine", engine, "--set", "run.checkpoint_every=1", until="x/history.jsonl", lines=5
    )
    assert len(group(process)) == (
        1 if engine == "loop" else 1 + min(3, len(os.sched_getaffinity(0)))
    )
    process.send_signal(number)
    returned, stderr = ended(process)
    assert returned == code, stderr
    assert "Traceback" not in stderr
    wait_for(lambda: not group(process))
    summary = json.loads((tmp_path / "x" / "summary.json").read_text())
    assert (summary["status"], summary["cause"]) == ("stopped", cause)
    entries = [
        json.loads(line) for line in (tmp_path / "x" / "history.jsonl").read_text().splitlines()
    ]
    assert summary["rounds"] == entries[-1]["round"] >= 5
    found = checkpoint.read(tmp_path / "x")
    # Of the last round, or of the one before if the signal came before the checkpoint was written.
    assert found.about["round"] in (summary["rounds"], summary["rounds"] - 1)
    assert not list((tmp_path / "x").rglob("*.new"))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["python", "c"])
def test_a_second_signal_ends_the_process_whatever_it_is_doing(how, start, tmp_path):
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    process = start("--method", "stubborn.py", "--set", f"method.how={how}", until="sitting")
    time.sleep(0.2)  # so that it is inside the call
    process.send_signal(signal.SIGINT)
    if how == "python":
        wait_for(lambda: (tmp_path / "noticed").exists(), process)
    time.sleep(0.2)
    assert process.poll() is None  # the first was not enough
    process.send_signal(signal.SIGINT)
    returned, _ = ended(process)
    assert returned == -signal.SIGINT  # a shell calls that 130
    assert not group(process)


@pytest.mark.slow
def test_what_is_ignored_stays_ignored(start, tmp_path, monkeypatch):
    monkeypatch.setattr(
        sys.modules[__name__],
        "PROGRAM",
        re.sub("signal.default_int_handler", "signal.SIG_IGN", PROGRAM),
    )
    process = start(until="x/history.jsonl", lines=3)
    process.send_signal(signal.SIGINT)
    lines = (tmp_path / "x" / "history.jsonl").read_text().count("\n")
    wait_for(
        lambda: (tmp_path / "x" / "history.jsonl").read_text().count("\n") > lines + 3, process
    )


# ---- in this process ----
@pytest.fixture
def as_in_a_terminal():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press(times, number=signal.SIGINT):
    """Raises signals while they are deferred. Returns how many were held back."""
    done = 0
    try:
        with deferred_signals():
            for _ in range(times):
                signal.raise_signal(number)
                done += 1
    except KeyboardInterrupt:
        return done
    pytest.fail("it was not raised afterwards")


@pytest.mark.parametrize("times", [1, 2, 3])
def test_one_signal_is_held_back_and_a_second_one_is_not(times, as_in_a_terminal):
    assert press(times) == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
@pytest.mark.parametrize("inside", [nullcontext, deferred_signals])
def test_after_the_first_the_next_one_kills(number, raised, inside, as_in_a_terminal):
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(raised), graceful_signals(), inside():
            signal.raise_signal(number)
        assert {signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)} == {
            signal.SIG_DFL
        }
    finally:
        signal.signal(signal.SIGTERM, before)


def test_without_a_signal_all_is_as_before(as_in_a_terminal):
    before = signal.getsignal(signal.SIGTERM)
    with graceful_signals(), deferred_signals():
        pass
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == (
        signal.default_int_handler,
        before,
    )


SIGNAL_AFTER_FORK = """
import os, signal
from fedloom._system import forking, graceful_signals
os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGINT))
with graceful_signals():
    try:
        with forking():
            if os.fork() == 0:
                os._exit(0)
        print("lost")
    except KeyboardInterrupt:
        print("stopped")
"""


def test_a_signal_during_a_fork_is_not_lost():
    done = subprocess.run(
        [sys.executable, "-c", SIGNAL_AFTER_FORK], capture_output=True, text=True, check=True
    )
    assert done.stdout == "stopped\n", done.stderr
