"""Measures the seconds and the CPU time of whole runs of FedGram, and of FedAvg beside them.

Runs take turns, in the engine that `auto` chooses for one process (`stacked`), with one thread. The
data are loaded and divided before. It writes the table in docs/fedgram.md.

python bench/gram_time.py docs/fedgram.md          (2 minutes on a quiet core)
"""

import sys
import time
from pathlib import Path
from statistics import median

from sweep import markdown, put_between

from fedloom.experiments.recipe import make_recipe
from fedloom.experiments.run import run, threads

DATASETS, TURNS = ("cora", "citeseer", "pubmed", "photo", "computers"), 3
METHODS = ("fedgram", "fedavg")


def main() -> None:
    """Measures and writes."""
    target, lines = Path(sys.argv[1]), []
    for data in DATASETS:
        parties = make_recipe({"data": {"dataset": data}}).federation()
        taken: dict[str, list[tuple[float, float]]] = {method: [] for method in METHODS}
        for _ in range(TURNS):
            for method in METHODS:
                # A fresh copy of the graphs: nothing is cached from the turn before.
                again = make_recipe({"data": {"dataset": data}}).federation()
                wall, cpu = time.perf_counter(), time.thread_time()
                with threads(1):
                    run(method, again, engine="stacked", model="gcn-2x64")
                taken[method].append((time.perf_counter() - wall, time.thread_time() - cpu))
        wall, cpu = (
            {method: median(each[k] for each in taken[method]) for method in METHODS}
            for k in range(2)
        )
        ratio = median(b[1] / a[1] for a, b in zip(taken["fedgram"], taken["fedavg"], strict=True))
        lines.append(
            [
                f"{data}, {parties.num_clients} clients",
                f"{wall['fedgram']:.2f}",
                f"{cpu['fedgram']:.2f}",
                f"{cpu['fedavg']:.2f}",
                f"{ratio:.1f}x",
            ]
        )
        print(lines[-1], flush=True)
    head = [
        "",
        "FedGram, seconds",
        "its CPU time",
        "FedAvg's, 100 rounds",
        "FedAvg against FedGram",
    ]
    put_between(target, "time", markdown(head, lines))


if __name__ == "__main__":
    main()
