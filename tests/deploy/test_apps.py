"""fedloom as an app of Flower's own: a stock SuperLink, two SuperNodes, `flwr run`. Slow, because that is: a process for every message."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from deployment import free_port, port_is_free

from fedloom.errors import ConfigError, MessageError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "deploy.md"
BIN = Path(sys.executable).parent
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}


@pytest.fixture
def flowers(tmp_path):
    """Starts Flower's own programs, each with a home of its own; they end with the test, and so does what they have started."""
    started = []

    def start(name, *arguments, config=""):
        home = tmp_path / f"home-{name}"
        home.mkdir()
        path = f"{BIN}:{os.environ['PATH']}"
        environment = {
            **os.environ,
            **QUIET,
            "OMP_NUM_THREADS": "1",
            "PATH": path,
            "FLWR_HOME": str(home),
        }
        if config:
            (home / "config.toml").write_text(config)
        with open(tmp_path / f"{name}.out", "wb") as log:
            program = [BIN / arguments[0], *map(str, arguments[1:])]
            process = subprocess.Popen(
                program, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        started.append(process)
        return process

    start.homes = tmp_path
    yield start
    for process in started:
        process.kill()
        process.wait()
    for pid in living_in(tmp_path, ""):  # what they have started has sessions of its own
        os.kill(pid, signal.SIGKILL)


def living_in(homes, program):
    """The processes of a program that have one of these homes."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile, or is somebody else's
            if (
                f"FLWR_HOME={homes}/" in (folder / "environ").read_text()
                and program in (folder / "cmdline").read_text()
            ):
                found.append(int(folder.name))
    return found


TOO_SLOW = pytest.mark.skipif(
    "FEDLOOM_SLOW" not in os.environ, reason="takes minutes: set FEDLOOM_SLOW, as `make bench` does"
)


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=TOO_SLOW)])
def test_a_stock_superlink_gives_the_loops_hash_also_when_its_server_app_is_killed(
    killed, deploy, flowers
):
    d = deploy(parties=("bank-a", "bank-b"), rounds=2)
    app = d.folder / "app"
    app.mkdir()
    settings = next(
        block
        for block in re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.S)
        if "serverapp" in block
    )
    for path, here in {
        "federation.toml": "federation.toml",
        "keys": ".",
        "runs/first": "run",
    }.items():
        assert f"/srv/fedloom/{path}" in settings
        settings = settings.replace(f'"/srv/fedloom/{path}"', f'"{d.folder / here}"')
    (app / "pyproject.toml").write_text(settings)
    flowers("superlink", "flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", d.port)
    d.until(lambda: not port_is_free(d.port))
    for name in d.parties:
        d.join(name, "--socket", d.folder / f"{name}.sock")
        given = f'party="{name}" socket="{d.folder / name}.sock"'
        reached = (
            "--superlink",
            f"127.0.0.1:{d.port}",
            "--host",
            "127.0.0.1",
            "--port",
            free_port(),
        )
        flowers(name, "flower-supernode", "--insecure", *reached, "--node-config", given)
    d.until(lambda: all((d.folder / f"{name}.sock").exists() for name in d.parties))
    connection = f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{d.port}"\ninsecure = true\n'
    assert flowers("run", "flwr", "run", app, "here", config=connection).wait(60) == 0
    if killed:
        d.until(lambda: d.rounds_done() >= 1, seconds=200)
        (of_run,) = living_in(flowers.homes, "flwr-serverapp")
        os.kill(of_run, signal.SIGKILL)
        assert d.start("curious", "resume", "run").wait(30) == 2
        assert "`flwr run` again goes on with it" in " ".join(d.said("curious").split())
        assert (
            flowers("again", "flwr", "run", app, "here", config=connection).wait(60) == 0
        )  # parties are not started again
    d.until(lambda: (d.folder / "run" / "summary.json").exists(), seconds=300)
    assert [d.processes[name].wait(60) for name in d.parties] == [0, 0]
    summary = d.summary()
    assert summary["status"] == "completed"
    assert summary["history_hash"] == d.reference().summary["history_hash"]
    assert summary["absences"] == summary["engine_details"]["refused"] == {}
    assert all((d.folder / f"state-{name}" / "model.safetensors").exists() for name in d.parties)
    assert not list(d.folder.glob("*.sock"))


def test_the_client_side_is_light():
    done = "import sys; import fedloom.deploy.apps; sys.exit(any(name in sys.modules for name in ('torch', 'torch_geometric')))"
    assert subprocess.run([sys.executable, "-c", done], check=False).returncode == 0


def test_pipes_carry_bytes_of_any_length_and_say_when_they_break_off():
    one, other = socket.socketpair()
    with one, other:
        for data in (b"", b"x", bytes(3 * 2**20)):
            writer = threading.Thread(target=put, args=(one, data))
            writer.start()
            assert take(other) == data
            writer.join()
        one.sendall((2**40).to_bytes(8, "big"))
        with pytest.raises(MessageError, match="more than the limit"):
            take(other)
        one.sendall((100).to_bytes(8, "big") + b"half")
        one.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionError):
            take(other)


def test_a_socket_that_cannot_be_is_named(tmp_path):
    from fedloom.deploy.party import stay

    with pytest.raises(ConfigError, match=r"socket: cannot listen at '.*nowhere/x\.sock'"):
        stay(None, tmp_path / "nowhere" / "x.sock", print)
