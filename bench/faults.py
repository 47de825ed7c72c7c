"""Faults that take minutes or need root: networks that fail, and a full disk.

    python bench/faults.py                        all parts (about a quarter of an hour)
    python bench/faults.py cut30 slow             these parts only

A deployment of three parties runs on this machine, with TLS and registered keys. A TCP proxy
(tests/deploy/deployment.py) is between the coordinator and one party, or all parties.

cut5, cut30, cut120   one party's line is cut for this many seconds and refuses connections
silent30              one party's line lets nothing pass for 30 s, without an error (half open)
delay                 200 ms each way, for all parties: whether the history hash is that of the loop
slow, slower          1 Mbit/s and 64 kB/s, for all parties: the same
disk                  the run folder is on a tmpfs of 4 MB that fills up, in process and with
                      `fedloom serve` (only root can mount it)

The exit code is 1 if a result is not as docs/faults.md says.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "deploy"))
from deployment import Deployment, Wire, absent_in

import fedloom
from fedloom.experiments import checkpoint

PARTS: dict[str, Callable[[], bool]] = {}
CUT = "bank-b"


@contextmanager
def deployed(**settings: Any) -> Iterator[Any]:
    """Yields a deployment. Its processes end with the block."""
    with tempfile.TemporaryDirectory() as folder:
        made = Deployment(Path(folder), **settings)
        try:
            yield made
        finally:
            made.end()


def _interrupted(name: str, seconds: float, harm: Callable[[Any], None]) -> bool:
    """Interrupts one party's line and prints what that costs.

    Returns whether only that party was absent, and whether it came back.

    Args:
        name: The name of the part.
        seconds: How long the interruption lasts.
        harm: Interrupts the line.
    """
    settings = {"rounds": 100_000, "method": "slow.py", "settings": {"seconds": 0.4}}
    with deployed(**settings, run={"quorum": 0.5}) as d:
        wire = Wire(d.port)
        d.write("through.toml", address=f"127.0.0.1:{wire.port}")
        d.serve()
        for party in d.parties:
            d.join(party, agreement="through.toml" if party == CUT else "federation.toml")
        d.until(lambda: d.rounds_done() >= 2)
        before = d.rounds_done()
        harm(wire)
        time.sleep(seconds)
        during = d.rounds_done() - before
        wire.mend()
        mended, at = time.monotonic(), d.rounds_done()
        # The round that is under way may still be without the party.
        d.until(lambda: any(CUT not in absent_in(entry) for entry in d.history()[at + 1 :]))
        back = time.monotonic() - mended
        d.until(lambda: d.rounds_done() >= at + 5)
        entries = d.history()
        without = [entry["round"] for entry in entries if CUT in absent_in(entry)]
        others = {client for entry in entries for client in absent_in(entry)} - {CUT}
        longest = max(b["seconds"] - a["seconds"] for a, b in pairwise(entries))
        wire.close()
    print(
        f"{name}: {during} rounds meanwhile; the party missed {len(without)} and completed a round "
        f"again {back:.1f} s after the line was restored; the longest round took {longest:.1f} s",
        flush=True,
    )
    return not others and (not without or without[-1] <= entries[-1]["round"] - 2)


def _through(name: str, delay: float = 0.0, rate: int = 0, rounds: int = 4) -> bool:
    """Puts all parties behind slow lines and prints the time of a round.

    Returns whether nothing is lost.

    Args:
        name: The name of the part.
        delay: Seconds of delay in each direction.
        rate: Bytes per second in each direction; 0 for no limit.
        rounds: Rounds of the run.
    """
    with deployed(rounds=rounds, model="gcn-3x128") as d:
        wires = {party: Wire(d.port, delay, rate) for party in d.parties}
        d.serve()
        for party, wire in wires.items():
            d.write(f"{party}.toml", address=f"127.0.0.1:{wire.port}")
            d.join(party, agreement=f"{party}.toml")
        summary = d.completed(600)
        entries = d.history()
        each = (entries[-1]["seconds"] - entries[0]["seconds"]) / (rounds - 1)
        same = summary["history_hash"] == d.reference().summary["history_hash"]
        sent = summary["traffic"]["bytes_up"] / rounds / len(d.parties)
        for wire in wires.values():
            wire.close()
    print(
        f"{name}: {'same hash' if same else 'ANOTHER HASH'}, absences {summary['absences']}; "
        f"a round takes {each:.1f} s ({sent / 1000:.1f} kB up from each party)",
        flush=True,
    )
    return same and not summary["absences"]


for _seconds in (5, 30, 120):
    PARTS[f"cut{_seconds}"] = partial(_interrupted, f"cut{_seconds}", _seconds, Wire.cut)
PARTS["silent30"] = partial(_interrupted, "silent30", 30, Wire.fall_silent)
PARTS["delay"] = partial(_through, "delay", delay=0.2)
PARTS["slow"] = partial(_through, "slow", rate=125_000)
PARTS["slower"] = partial(_through, "slower", rate=64_000)


# ---- a full disk ----
@contextmanager
def small_disk() -> Iterator[Path | None]:
    """Yields the folder of a file system of 4 MB; None if it cannot be mounted here."""
    with tempfile.TemporaryDirectory() as folder:
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=4m", "none", folder],
            capture_output=True,
            text=True,
            check=False,
        )
        if mounted.returncode:
            print(
                f"disk: not run, a tmpfs cannot be mounted here ({mounted.stderr.strip()}); "
                "tests/faults/test_disk.py uses RLIMIT_FSIZE"
            )
            yield None
            return
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", folder], check=True)


def fill(folder: Path) -> Path:
    """Fills the rest of a file system. Returns the file that does so."""
    ballast = folder / "ballast"
    with open(ballast, "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            return ballast
    raise AssertionError("the file system is not full")


def disk() -> bool:
    """Fills the disk of a run in this process, then that of `fedloom serve`."""
    with small_disk() as place:
        return place is None or (_full_in_process(place) and _full_at_the_coordinator(place))


def _full_in_process(place: Path) -> bool:
    federation = fedloom.divide(fedloom.load("synthetic:nodes=120,features=8"), 3, "random", 0)
    settings: dict[str, Any] = {"model": "gcn-2x64", "rounds": 6, "checkpoint_every": 1}

    def full_after_three(entry: dict[str, Any]) -> None:
        if entry["round"] == 3:
            fill(place)

    ended = "nothing"
    try:
        fedloom.run(
            "scaffold", federation, out=place / "run", callbacks=full_after_three, **settings
        )
    except OSError as error:
        ended = f"{error.strerror}: {Path(str(error.filename)).name}"
    (place / "ballast").unlink()
    saved = checkpoint.read(place / "run")
    resumed = fedloom.run("scaffold", federation, out=place / "run", resume=True, **settings)
    reference = fedloom.run("scaffold", federation, **settings)
    same = resumed.summary["history_hash"] == reference.summary["history_hash"]
    last = saved.about["round"] if saved else None
    print(
        f"disk: in process: ended by {ended!r}; the checkpoint of round {last} was whole; "
        f"resumed: {'same hash' if same else 'ANOTHER HASH'}"
    )
    return ended.startswith("No space left on device") and last == 2 and same


def _full_at_the_coordinator(place: Path) -> bool:
    with deployed(rounds=8, method="slow.py") as d:
        out = str(place / "served")
        d.serve(out=out)
        d.join_all()
        d.until(lambda: d.rounds_done(out) >= 3)
        fill(place)
        code = d.processes["coordinator"].wait(60)
        error = d.output("coordinator")[-200:]
        (place / "ballast").unlink()
        d.resume(out)
        same = d.completed(out=out)["history_hash"] == d.reference().summary["history_hash"]
    print(
        f"disk: `fedloom serve`: exit code {code}, {error!r}; resumed, parties not restarted: "
        f"{'same hash' if same else 'ANOTHER HASH'}"
    )
    return code == 2 and "No space left on device" in error and same


PARTS["disk"] = disk

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts", nargs="*", metavar="PART", choices=[*PARTS, []], help="which parts (default: all)"
    )
    chosen = parser.parse_args().parts or list(PARTS)
    verdicts = [PARTS[name]() for name in chosen]
    sys.exit(0 if all(verdicts) else 1)
