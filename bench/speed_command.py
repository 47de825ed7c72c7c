"""Parts of bench/speed.py that measure commands."""

import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from statistics import median

import speed_tools as tools
from speed_tools import Row, Turns, part

MAIN = ("-c", "from fedloom.cli import main; main()")


@part
def command(quick: bool) -> list[Row]:
    """CPU seconds of `fedloom run --dataset cora --rounds 100`, from the command to the table.

    It is the user and system time of the process and of those that it starts.
    """
    data = ["--dataset", "synthetic:nodes=300", "--partition", "random", "--rounds", "2"]
    arguments = ("run", *(data if quick else ["--dataset", "cora", "--rounds", "100"]))
    ways = {"fedloom run": partial(_cpu_seconds, *MAIN, *arguments)}
    if tools.before is not None:
        ways["fedloom run, before"] = partial(_cpu_seconds, *MAIN, *arguments, older=True)
    ways["import torch"] = partial(_cpu_seconds, "-c", "import torch")
    turns = Turns(ways, 1 if quick else 7)
    return [
        {"what": name, "seconds": median(took), "least": min(took), "load": turns.load}
        for name, took in turns.took.items()
    ]


def _cpu_seconds(*arguments: str, older: bool = False) -> float:
    """Returns the user and system seconds of a Python process."""
    _, environment = tools.code(older)
    with tempfile.TemporaryDirectory() as folder:
        out = ("--out", f"{folder}/run") if "run" in arguments else ()
        process = subprocess.Popen(
            [sys.executable, *arguments, *out],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)  # `wait4` has taken it
    if process.returncode:
        raise RuntimeError(f"python {' '.join(arguments)} failed with {process.returncode}")
    return used.ru_utime + used.ru_stime


@part
def startup(quick: bool) -> list[Row]:
    """Seconds of `fedloom --help`, of `fedloom run` until its first round ends, and of imports.

    Wall time. The run is on Cora.
    """
    data = ["--dataset", "synthetic:nodes=300", "--partition", "random"] if quick else []
    ways = {
        "fedloom --help": partial(_until, "", "--help"),
        "fedloom run, first round done": partial(
            _until, "round 1 of 10", "run", "--rounds", "10", *data
        ),
    }
    turns = Turns(ways, 1 if quick else 7)
    rows: list[Row] = [
        {"what": what, "seconds": median(took), "least": min(took), "load": turns.load}
        for what, took in turns.took.items()
    ]
    spent: dict[str, float] = defaultdict(float)
    with tempfile.TemporaryDirectory() as folder:
        printed = _fedloom(
            "run", "--rounds", "1", *data, "--out", folder, options=("-X", "importtime")
        ).communicate()[1]
    for line in printed.splitlines():
        if line.startswith("import time:") and "self [us]" not in line:
            own, _, module = line.removeprefix("import time:").split("|")
            spent[module.strip().split(".")[0]] += int(own) / 1e6
    return rows + [
        {"package": name, "seconds": took}
        for name, took in sorted(spent.items(), key=lambda item: -item[1])[:10]
    ]


def _fedloom(*arguments: str, options: Sequence[str] = ()) -> subprocess.Popen:
    _, environment = tools.code(older=False)
    return subprocess.Popen(
        [sys.executable, *options, *MAIN, *arguments],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def _until(sign: str, *arguments: str) -> float:
    """Returns the seconds until the command prints the sign, or until it ends if there is none."""
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        process = _fedloom(*arguments, *(("--out", folder) if arguments[0] == "run" else ()))
        assert process.stderr is not None
        if sign and not any(sign in line for line in process.stderr):
            raise RuntimeError(f"fedloom {' '.join(arguments)} never printed {sign!r}")
        if not sign:
            process.wait()
        took = time.perf_counter() - begun
        process.communicate()
    return took
