"""The door under attack: requests per second that it holds, and memory per hostile message.

    python bench/door.py                a few minutes

A deployment of three parties runs on this machine, with TLS and registered keys and a quorum of 1.
A stranger floods it with unsigned requests in the name of a party, from more and more addresses.
For each number of addresses it prints the requests that were answered per second, the time of a
round, and whether any party was absent. Then the stranger sends three bodies of 200 MB at a time.

The exit code is 1 if a party was absent or if the memory grew by more than 4 MB for each body.
"""

import multiprocessing
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "deploy"))
from deployment import Deployment
from test_stranger import BODY, MB, Stranger

SECONDS = 30.0  # that each flood lasts
CONNECTIONS = 32  # of each process of the stranger


def _flood(deployment: Deployment, address: str, answers: Any) -> None:
    """Floods a deployment from one address, and reports how many requests were answered."""
    stranger = Stranger(deployment)
    stranger.attack(pause=0.0, connections=CONNECTIONS, address=address)
    time.sleep(SECONDS)
    stranger.end()
    answers.put(sum(stranger.answers.values()))


def _measured(deployment: Deployment, processes: int) -> bool:
    """Prints what a flood does. Returns whether all parties took part in all rounds."""
    answers: Any = multiprocessing.Queue()
    flood = [
        multiprocessing.Process(target=_flood, args=(deployment, f"127.0.0.{number + 2}", answers))
        for number in range(processes)
    ]
    before, began = deployment.rounds_done(), time.monotonic()
    for process in flood:
        process.start()
    time.sleep(0 if flood else SECONDS)
    held = sum(answers.get() for _ in flood)
    rounds, seconds = deployment.rounds_done() - before, time.monotonic() - began
    absent = sum(len(entry.get("absent", ())) for entry in deployment.history()[before:])
    print(
        f"{processes} addresses: {held / seconds:.0f} requests per second, "
        f"{seconds / max(rounds, 1):.1f} s per round, {absent} absences",
        flush=True,
    )
    return not absent and deployment.processes["coordinator"].poll() is None


def main() -> int:
    """Runs all parts. Returns the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        d = Deployment(Path(folder), rounds=100_000, method="slow.py", settings={"seconds": 0.2})
        try:
            d.serve()
            d.join_all()
            d.until(lambda: d.rounds_done() >= 2)
            unharmed = [_measured(d, processes) for processes in (0, 1, 2, 4)]
            stranger = Stranger(d)
            grown = stranger.push_at_once({"content-length": str(BODY)})
            print(f"three unsigned bodies of 200 MB: {grown / MB:.1f} MB", flush=True)
        finally:
            d.end()
    return 0 if all(unharmed) and grown < 3 * 4 * MB else 1


if __name__ == "__main__":
    sys.exit(main())
