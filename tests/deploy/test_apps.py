"""fedloom as an app of Flower's own: a stock SuperLink, two SuperNodes and `flwr run`.

It is slow, because Flower starts a process for each message.
"""

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from deployment import WAIT_SECONDS, free_port, port_is_free

PAGE = Path(__file__).resolve().parents[2] / "docs" / "deploy.md"
BIN = Path(sys.executable).parent
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture
def start_flower(tmp_path):
    """Starts Flower's own programs, each with its own home. They end with the test."""
    started = []

    def start(name, *arguments, config=""):
        home = tmp_path / f"home-{name}"
        home.mkdir()
        path = f"{BIN}:{os.environ['PATH']}"
        own = {"OMP_NUM_THREADS": "1", "PATH": path, "FLWR_HOME": str(home)}
        if config:
            (home / "config.toml").write_text(config)
        with open(tmp_path / f"{name}.out", "wb") as log:
            process = subprocess.Popen(
                [BIN / arguments[0], *map(str, arguments[1:])],
                env={**os.environ, **QUIET, **own},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        started.append(process)
        return process

    start.homes = tmp_path
    yield start
    for process in started:
        process.kill()
        process.wait()
    for pid in processes_of(tmp_path, ""):  # their children have sessions of their own
        os.kill(pid, signal.SIGKILL)


def processes_of(homes, program):
    """Returns the processes of a program that have one of these homes."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile, or belongs to another user
            here = f"FLWR_HOME={homes}/" in (folder / "environ").read_text()
            if here and program in (folder / "cmdline").read_text():
                found.append(int(folder.name))
    return found


TAKES_MINUTES = pytest.mark.skipif(
    "FEDLOOM_SLOW" not in os.environ, reason="takes minutes: set FEDLOOM_SLOW, as `make bench` does"
)


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=TAKES_MINUTES)])
def test_a_stock_superlink_is_bit_identical_to_the_loop_also_if_its_server_app_is_killed(
    killed, deploy, start_flower
):
    d = deploy(parties=("bank-a", "bank-b"), rounds=2)
    app = d.folder / "app"
    app.mkdir()
    blocks = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.S)
    settings = next(block for block in blocks if "serverapp" in block)
    paths = {"federation.toml": "federation.toml", "keys": ".", "runs/first": "run"}
    for path, here in paths.items():
        assert f"/srv/fedloom/{path}" in settings
        settings = settings.replace(f'"/srv/fedloom/{path}"', f'"{d.folder / here}"')
    (app / "pyproject.toml").write_text(settings)
    here = ("--insecure", "--host", "127.0.0.1", "--port")
    start_flower("superlink", "flower-superlink", *here, d.port)
    d.until(lambda: not port_is_free(d.port))
    for name in d.parties:
        d.join(name, "--socket", d.folder / f"{name}.sock")
        config = f'party="{name}" socket="{d.folder / name}.sock"'
        reached = ("--superlink", f"127.0.0.1:{d.port}", *here, free_port())
        start_flower(name, "flower-supernode", *reached, "--node-config", config)
    d.until(lambda: all((d.folder / f"{name}.sock").exists() for name in d.parties))
    address = f'address = "127.0.0.1:{d.port}"\ninsecure = true\n'
    connection = f'[superlink]\ndefault = "here"\n[superlink.here]\n{address}'
    run = ("flwr", "run", app, "here")
    assert start_flower("run", *run, config=connection).wait(WAIT_SECONDS) == 0
    if killed:
        d.until(lambda: d.rounds_done() >= 1, seconds=600)
        (process,) = processes_of(start_flower.homes, "flwr-serverapp")
        os.kill(process, signal.SIGKILL)
        assert d.start("other", "resume", "run").wait() == 2
        assert "`flwr run` again" in d.output("other")
        # The parties are not started again.
        assert start_flower("again", *run, config=connection).wait(WAIT_SECONDS) == 0
    d.until(lambda: (d.folder / "run" / "summary.json").exists(), seconds=900)
    assert [d.processes[name].wait() for name in d.parties] == [0, 0]
    summary = d.summary()
    assert summary["status"] == "completed"
    assert summary["history_hash"] == d.reference().summary["history_hash"]
    assert summary["absences"] == summary["engine_details"]["refused"] == {}
    assert all((d.folder / f"state-{name}" / "model.safetensors").exists() for name in d.parties)
    assert not list(d.folder.glob("*.sock"))


def test_the_client_side_does_not_import_pytorch():
    code = (
        "import sys; import fedloom.deploy.apps; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'torch_geometric')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
