"""Measures whether the memory of a long run grows.

    python bench/soak.py [--rounds 2000] [--no-folder]

It runs 2,000 rounds of a small federation in the loop engine, recorded in a folder. A client fails
in three of ten exchanges. It takes about half a minute and exits with 1 if memory grows by more
than 1 kB per round.

The resident memory alone says little: the set-up of a run frees tens of MB, in which a growing list
has room for thousands of rounds. So the memory that Python has allocated is measured too. Without a
folder the history is a list that grows. That is the control.
"""

import argparse
import random
import sys
import tempfile
import tracemalloc
from pathlib import Path
from statistics import median
from typing import Any

from torch import Tensor

import fedloom
from fedloom.core.client import Client
from fedloom.core.message import Message
from fedloom.data.graph import Graph
from fedloom.methods.fedavg import FedAvg
from fedloom.nn.model import Model

EVERY = 100  # rounds between two measurements
ALLOWED = 1.0  # kB per round
SETTINGS: dict[str, Any] = {"model": "gcn-2x8", "checkpoint_every": 10, "quorum": 0.5}
FAILING = 0.3  # share of the exchanges in which one client fails


def resident() -> float:
    """Returns the memory of this process in kB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


def slope(points: list[tuple[int, float]]) -> float:
    """Returns the median slope over all pairs of points (Theil-Sen). Outliers do not matter."""
    return median(
        (b[1] - a[1]) / (b[0] - a[0]) for k, a in enumerate(points) for b in points[k + 1 :]
    )


class Unreliable(FedAvg):
    """FedAvg with a client that sometimes fails, by a fixed schedule."""

    chance = random.Random(0)
    failures = 0

    def objective(
        self, client: Client, batch: Graph, model: Model, received: Message | None
    ) -> Tensor:
        """Returns FedAvg's objective, or raises."""
        if client.name == "2" and self.chance.random() < FAILING:
            type(self).failures += 1
            raise RuntimeError("out of order")
        return super().objective(client, batch, model, received)


def measure(rounds: int, folder: Path | None) -> list[tuple[int, float, float]]:
    """Returns (round, resident kB, kB that Python has allocated), every hundred rounds.

    The first fifth is left out: caches fill in it.
    """
    graph = fedloom.synthetic(nodes=200, classes=3, features=8, seed=0)
    federation = fedloom.divide(graph, 4, "random", 0)
    seen: list[tuple[int, float, float]] = []

    def look(entry: dict[str, Any]) -> None:
        if entry["round"] % EVERY == 0:
            allocated = tracemalloc.get_traced_memory()[0] / 1024
            seen.append((entry["round"], resident(), allocated))

    tracemalloc.start()
    method = Unreliable(rounds=rounds, epochs=1)
    result = fedloom.run(method, federation, out=folder, callbacks=look, **SETTINGS)
    print(f"absences: {result.summary['absences']} in {rounds} rounds")
    assert result.summary["absences"] == {"2": Unreliable.failures}
    return seen[len(seen) // 5 :]


def main() -> None:
    """Prints the measurements and the slopes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--no-folder", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        points = measure(options.rounds, None if options.no_folder else Path(place) / "run")
    for number, held, allocated in points:
        print(
            f"round {number:>6}: {held / 1024:.1f} MB resident, "
            f"{allocated / 1024:.2f} MB allocated by Python"
        )
    slopes = [slope([(point[0], point[column]) for point in points]) for column in (1, 2)]
    print(
        f"slopes, kB per round: {slopes[0]:.3f} resident, {slopes[1]:.3f} allocated by Python "
        f"({ALLOWED:g} allowed)"
    )
    sys.exit(max(slopes) > ALLOWED)


if __name__ == "__main__":
    main()
