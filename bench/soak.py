"""A long run in one process: does its memory grow? 2,000 rounds of a small federation in the loop engine, kept in a folder, in which a
client fails in three exchanges of ten.

python bench/soak.py [--rounds 2000] [--no-folder]          (about half a minute; exits with 1 above 1 kB a round)

What the process has in memory says little by itself: a run's set-up frees tens of MB, in which a growing list finds room for thousands of
rounds. So what Python has allocated is counted too. Without a folder the history is a list, and grows: that is the control.
"""

import argparse
import random
import sys
import tempfile
import tracemalloc
from pathlib import Path
from statistics import median
from typing import Any

import fedloom
from fedloom.core.client import Client
from fedloom.methods.fedavg import FedAvg

EVERY = 100  # rounds between two looks
ALLOWED = 1.0  # kB a round
SETTINGS = {"model": "gcn-2x8", "epochs": 1, "checkpoint_every": 10, "quorum": 0.5}
FAILING = 0.3  # share of the exchanges in which one of the clients fails


def resident() -> float:
    """kB that this process has in memory."""
    return next(
        float(line.split()[1])
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmRSS:")
    )


def slope(points: list[tuple[int, float]]) -> float:
    """The median of the slopes between all pairs of points (Theil and Sen): a single outlier has no say."""
    return median(
        (b[1] - a[1]) / (b[0] - a[0]) for k, a in enumerate(points) for b in points[k + 1 :]
    )


class Unreliable(FedAvg):
    """FedAvg with a client that fails every now and then, by a schedule that is the same every time."""

    chance = random.Random(0)
    fails = 0

    def objective(self, client: Client, batch: Any, net: Any, model: Any) -> Any:
        """As FedAvg's, if it comes to that."""
        if client.name == "2" and self.chance.random() < FAILING:
            type(self).fails += 1
            raise RuntimeError("out of order")
        return super().objective(client, batch, net, model)


def measure(rounds: int, folder: Path | None) -> list[tuple[int, float, float]]:
    """(round, kB in memory, kB that Python has allocated), every hundred rounds. The first fifth is left out: caches fill."""
    federation = fedloom.divide(
        fedloom.synthetic(nodes=200, classes=3, features=8, seed=0), 4, "random", 0
    )
    seen: list[tuple[int, float, float]] = []

    def look(entry: dict[str, Any], planned: int) -> None:
        if entry["round"] % EVERY == 0:
            seen.append((entry["round"], resident(), tracemalloc.get_traced_memory()[0] / 1024))

    tracemalloc.start()
    of_method = {"rounds": rounds, "epochs": SETTINGS["epochs"]}
    of_run = {key: value for key, value in SETTINGS.items() if key != "epochs"}
    result = fedloom.run(Unreliable(**of_method), federation, out=folder, on_round=look, **of_run)
    print(f"absences: {result.summary['absences']} in {rounds} rounds")
    assert result.summary["absences"] == {"2": Unreliable.fails}
    return seen[len(seen) // 5 :]


def main() -> None:
    """Prints what was measured and the slopes."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--rounds", type=int, default=2000)
    options.add_argument("--no-folder", action="store_true")
    asked = options.parse_args()
    with tempfile.TemporaryDirectory() as place:
        points = measure(asked.rounds, None if asked.no_folder else Path(place) / "run")
    for number, held, allocated in points:
        print(
            f"round {number:>6}: {held / 1024:.1f} MB in memory, {allocated / 1024:.2f} MB allocated by Python"
        )
    slopes = [slope([(point[0], point[column]) for point in points]) for column in (1, 2)]
    print(
        f"slopes, kB a round: {slopes[0]:.3f} in memory, {slopes[1]:.3f} allocated by Python ({ALLOWED:g} allowed)"
    )
    sys.exit(max(slopes) > ALLOWED)


if __name__ == "__main__":
    main()
