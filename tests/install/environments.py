"""Fresh environments with the wheel of this checkout.

PyTorch's CPU build is installed first, exactly: any other request could bring gigabytes of GPU
packages. What pip installs is kept in build/install/ for a week, so that a second run is quick.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import NamedTuple

from tests.documents import ROOT
from tests.install.requirements import DEPENDENCIES

KEPT = ROOT / "build" / "install"
TORCH = "torch==2.13.0"
DEBIAN_PACKAGES = "python3,python3-venv,python3-torch"
# Their first versions for Python 3.13 are newer than the bounds in pyproject.toml.
COMPILED = {"greenlet", "numpy", "pymetis", "scikit-learn", "scikit-network", "scipy"}

PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014")
# Mounts the Debian's /proc for this program only, and starts the program in /work.
INSIDE = (
    'mount -t proc proc "$1/proc" && root="$1" && shift && mkdir -p "$root/work" && '
    'exec chroot "$root" sh -c \'cd /work && PATH="/environment/bin:$PATH" exec "$@"\' sh "$@"'
)


class Environment(NamedTuple):
    """How to start a program of an environment, and the folders that it and its user see."""

    prefix: list[str]
    work: Path
    work_inside: str

    def run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs a program in the environment's work folder, with no variable of the tests."""
        kept = {name: os.environ[name] for name in ("LANG", "TERM") if name in os.environ}
        return subprocess.run(
            [*self.prefix, program, *arguments],
            cwd=self.work,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
            env={
                **kept,
                "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
                "HOME": self.work_inside,
                "OMP_NUM_THREADS": "1",
            },
        )


def command(*arguments: str | Path) -> str:
    """Runs a command. Returns what it prints; fails with it if the command fails."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    line = [str(each) for each in arguments]
    done = subprocess.run(line, capture_output=True, text=True, check=False, env=kept)
    shown = f"{' '.join(line)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert done.returncode == 0, shown
    return done.stdout


def build_wheel(folder: Path) -> Path:
    """Builds the wheel from a copy of the sources, so that the checkout stays as it is."""
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", source / "src", ignore=ignored)
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps")
    command(*pip, "--wheel-dir", folder / "wheel", source)
    (wheel,) = (folder / "wheel").glob("fedloom-*.whl")
    return wheel


@contextmanager
def _folder(kind: str, *wanted: object) -> Iterator[tuple[Path, bool]]:
    """Gives the folder of an environment and whether it is complete. Others wait meanwhile.

    The folder of another week, or of other requirements, is removed.
    """
    week = date.today().isocalendar()[:2]
    content = json.dumps([sys.version, week, (ROOT / "pyproject.toml").read_text(), wanted])
    name = f"{kind}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"
    KEPT.mkdir(parents=True, exist_ok=True)
    with open(KEPT / f"{kind}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = KEPT / name
        complete = (folder / "ready").exists()
        if not complete:
            for other in KEPT.glob(f"{kind}-*"):
                shutil.rmtree(other)
            folder.mkdir()
        yield folder, complete


def oldest(leave_out: set[str]) -> list[str]:
    """Returns the oldest versions that pyproject.toml allows, as requirements."""
    return [f"{each.name}=={each.oldest}" for each in DEPENDENCIES if each.name not in leave_out]


def find_python(version: str) -> str | None:
    """Returns a Python of that version, as "3.12"; None if there is none."""
    name = f"python{version}"
    if shutil.which(name) is None:
        return None
    wanted = {**os.environ, "PYENV_VERSION": version}  # pyenv's programs choose by it
    script = "import sys; print(sys.executable)"
    done = subprocess.run(
        [name, "-c", script], capture_output=True, text=True, check=False, env=wanted
    )
    return done.stdout.strip() if done.returncode == 0 else None


@contextmanager
def virtual_environment(
    kind: str,
    wheel: Path,
    work: Path,
    pins: Sequence[str],
    base: str = sys.executable,
    torch: bool = True,
) -> Iterator[Environment]:
    """A virtual environment with the wheel, without constraints and extras.

    Args:
        kind: The name of its folder.
        wheel: The wheel.
        work: Where programs run.
        pins: Exact versions of some dependencies.
        base: The Python that makes the environment.
        torch: Whether PyTorch is installed.
    """
    with _folder(kind, pins, base, torch) as (folder, complete):
        python = folder / "bin" / "python"
        pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        if not complete:
            command(base, "-m", "venv", folder)
            wanted = [wheel, *pins]
            if torch:
                command(*pip, TORCH)
            else:
                wanted = [each.line for each in DEPENDENCIES if each.name != "torch"]
            command(*pip, "--only-binary", ":all:", *wanted)
            (folder / "ready").touch()
        command(*pip, "--no-deps", "--force-reinstall", wheel)
        yield Environment(["env", f"PATH={folder}/bin:/usr/bin:/bin"], work, str(work))


@contextmanager
def debian(suite: str, python: str, wheel: Path) -> Iterator[Environment]:
    """A Debian with its own PyTorch, which is a CPU build, in a folder.

    It needs root and debootstrap. Debian 13 (trixie) has Python 3.13 and PyTorch 2.6.

    Args:
        suite: The release.
        python: Its Python's version.
        wheel: The wheel.
    """
    pins = oldest({"torch", *COMPILED})
    names = [each.name for each in DEPENDENCIES if each.name in COMPILED]
    with _folder(suite, pins, names) as (folder, complete):
        system, packages = folder / "system", folder / "system" / "packages"
        prefix = ["unshare", "--mount", "--", "sh", "-c", INSIDE, "sh", str(system)]
        pip = (*prefix, "python3", "-m", "pip", "install", "--quiet", "--no-index",
               "--find-links=/packages")  # fmt: skip
        if not complete:
            options = ("--variant=minbase", f"--include={DEBIAN_PACKAGES}")
            command("debootstrap", *options, suite, system)
            platforms = [f"--platform={name}_x86_64" for name in PLATFORMS]
            download = (sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:")
            command(*download, f"--python-version={python}", "--implementation=cp", *platforms,
                    f"--abi=cp{python.replace('.', '')}", "--abi=abi3", "--abi=none",
                    "--dest", packages, *pins, *names)  # fmt: skip
            command(*prefix, "python3", "-m", "venv", "--system-site-packages", "/environment")
            command(*pip, *pins, *names)
            (folder / "ready").touch()
        shutil.copy(wheel, packages)
        # Debian's PyTorch asks for another patch release of SymPy than Debian has.
        command(*pip, "--no-deps", "--force-reinstall", f"/packages/{wheel.name}")
        work = system / "work"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        yield Environment(prefix, work, "/work")
