"""Faults that take minutes, or rights that a test has not: networks that fail, and a disk that is full.

    python bench/faults.py                        every part (about a quarter of an hour)
    python bench/faults.py cut30 slow             these parts only

A deployment of three parties on this machine, with TLS and registered keys; between one of them, or all, and the coordinator lies a TCP
proxy (tests/deploy/deployment.py).

cut5, cut30, cut120            one party's line is cut for so many seconds, and refuses connections meanwhile
silent30                       one party's line lets nothing pass for 30 s, and nobody is told (half open)
delay                          200 ms each way, for all parties: the loop engine's history hash?
slow, slower                   1 Mbit/s, 64 kB/s, for all parties: the same
disk                           the run's folder on a tmpfs of 4 MB that fills up, in process and of `fedloom serve` (root has to mount it)

Exit code 1 if something is not as docs/faults.md says.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "deploy"))
from deployment import Deployment, Wire  # type: ignore[import-not-found]

import fedloom
from fedloom.experiments import checkpoint

PARTS: dict[str, Callable[[], bool]] = {}
CUT = "bank-b"


@contextmanager
def deployed(**settings: Any) -> Iterator[Any]:
    """A deployment whose processes end with the block."""
    with tempfile.TemporaryDirectory() as folder:
        made = Deployment(Path(folder), **settings)
        try:
            yield made
        finally:
            made.end()


def _absent(entry: dict[str, Any]) -> set[str]:
    return {absence["client"] for absence in entry.get("absent", ())}


def _interrupted(name: str, seconds: float, harm: Callable[[Any], None]) -> bool:
    """One party's line fails for so long; prints what that costs, gives whether it is left out at most and comes back."""
    with deployed(
        rounds=100_000, method="slow.py", settings={"seconds": 0.4}, run={"quorum": 0.5}
    ) as d:
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
        d.until(
            lambda: any(CUT not in _absent(entry) for entry in d.history()[at + 1 :]), 120
        )  # the one under way may still be without it
        back = time.monotonic() - mended
        d.until(lambda: d.rounds_done() >= at + 5)
        entries = d.history()
        without = [entry["round"] for entry in entries if CUT in _absent(entry)]
        others = {client for entry in entries for client in _absent(entry)} - {CUT}
        longest = max(b["seconds"] - a["seconds"] for a, b in pairwise(entries))
        wire.close()
    print(
        f"{name}: {during} rounds went on meanwhile, it missed {len(without)}, and was in a whole round again {back:.1f} s after it was "
        f"mended; the longest round took {longest:.1f} s",
        flush=True,
    )
    return not others and (not without or without[-1] <= entries[-1]["round"] - 2)


def _through(name: str, delay: float = 0.0, rate: int = 0, rounds: int = 4) -> bool:
    """All parties behind lines like this; prints what a round takes, gives whether nothing is lost."""
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
        f"{name}: {'same hash' if same else 'ANOTHER HASH'}, absences {summary['absences']}; a round takes {each:.1f} s "
        f"({sent / 1000:.1f} kB up from each party)",
        flush=True,
    )
    return same and not summary["absences"]


for _seconds in (5, 30, 120):
    PARTS[f"cut{_seconds}"] = lambda s=_seconds: _interrupted(f"cut{s}", s, Wire.cut)  # type: ignore[misc]
PARTS["silent30"] = lambda: _interrupted("silent30", 30, Wire.fall_silent)
PARTS["delay"] = lambda: _through("delay", delay=0.2)
PARTS["slow"] = lambda: _through("slow", rate=125_000)
PARTS["slower"] = lambda: _through("slower", rate=64_000)


# ---- a full disk ----
@contextmanager
def small_disk() -> Iterator[Path | None]:
    """A file system of 4 MB; None if none may be mounted here."""
    with tempfile.TemporaryDirectory() as folder:
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=4m", "none", folder],
            capture_output=True,
            text=True,
            check=False,
        )
        if mounted.returncode:
            print(
                f"disk: not run, a tmpfs cannot be mounted here ({mounted.stderr.strip()}); tests/faults/test_disk.py has RLIMIT_FSIZE"
            )
            yield None
            return
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", folder], check=True)


def fill(folder: Path) -> Path:
    """Fills the rest of a file system; gives the file that does."""
    ballast = folder / "ballast"
    with open(ballast, "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            return ballast
    raise AssertionError("it is not full")


def disk() -> bool:
    """In process, then of the coordinator."""
    with small_disk() as place:
        return place is None or (_full_in_process(place) and _full_at_the_coordinator(place))


def _full_in_process(place: Path) -> bool:
    federation = fedloom.divide(fedloom.load("synthetic:nodes=120,features=8"), 3, "random", 0)
    settings = {"model": "gcn-2x64", "rounds": 6, "checkpoint_every": 1}

    def full_after_three(entry: dict[str, Any], planned: int) -> None:
        if entry["round"] == 3:
            fill(place)

    said = "nothing"
    try:
        fedloom.run(
            "scaffold", federation, out=place / "run", on_round=full_after_three, **settings
        )
    except OSError as error:
        said = f"{error.strerror}: {Path(str(error.filename)).name}"
    (place / "ballast").unlink()
    kept = checkpoint.read(place / "run")
    resumed = fedloom.run("scaffold", federation, out=place / "run", resume=True, **settings)
    same = (
        resumed.summary["history_hash"]
        == fedloom.run("scaffold", federation, **settings).summary["history_hash"]
    )
    last = kept.about["round"] if kept else None
    print(
        f"disk: in process: ended by {said!r}; the checkpoint of round {last} was whole; resumed: {'same hash' if same else 'ANOTHER HASH'}"
    )
    return said.startswith("No space left on device") and last == 2 and same


def _full_at_the_coordinator(place: Path) -> bool:
    with deployed(rounds=8, method="slow.py") as d:
        out = str(place / "served")
        d.serve(out=out)
        d.join_all()
        d.until(lambda: d.rounds_done(out) >= 3)
        fill(place)
        code = d.processes["coordinator"].wait(60)
        said = d.said("coordinator").strip().splitlines()[-1]
        (place / "ballast").unlink()
        d.resume(out)
        same = d.completed(out=out)["history_hash"] == d.reference().summary["history_hash"]
    print(
        f"disk: of `fedloom serve`: exit code {code}, {said!r}; resumed, parties not restarted: {'same hash' if same else 'ANOTHER HASH'}"
    )
    return code == 2 and "No space left on device" in said and same


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
