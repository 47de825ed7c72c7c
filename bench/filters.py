"""Accuracy against traffic with filters: FedAvg on Cora and PubMed, 3 seeds and partitions.

    python bench/filters.py docs/filters.md

Every row has two scores: of the clients' own models after local training, and of the global model
that clients download. Finished runs are cached in bench/results/filters.json. The table goes
between two markers of the page. Learning rate and rounds are the defaults; nothing is tuned.
"""

import json
import os
import sys
from pathlib import Path
from statistics import mean, stdev

os.environ.setdefault("OMP_NUM_THREADS", "1")

import fedloom

RESULTS = Path(__file__).parent / "results" / "filters.json"
SEEDS = range(3)
# label: settings of the run
ROWS = {
    "none": {},
    "float16 up": {"upload": "float16"},
    "float16 both ways": {"upload": "float16", "download": "float16"},
    "int8 up": {"upload": "int8"},
    "int8 both ways": {"upload": "int8", "download": "int8"},
    "topk=0.1 up": {"upload": "topk=0.1"},
    "topk=0.01 up": {"upload": "topk=0.01"},
    "topk=0.001 up": {"upload": "topk=0.001"},
    "topk=0.1,int8 up, int8 down": {"upload": "topk=0.1,int8", "download": "int8"},
    "topk=0.01,int8 up, int8 down": {"upload": "topk=0.01,int8", "download": "int8"},
}
BASELINES = ("local", "central")


def results():
    """All results: {"dataset/label/seed": {accuracy, up, down}}; what is missing is run."""
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for dataset in ("cora", "pubmed"):
        graph = fedloom.load(dataset)
        for seed in SEEDS:
            federation = fedloom.divide(graph, 10, "louvain", seed, split="20/40/40")
            cases = {label: ("fedavg", settings) for label, settings in ROWS.items()}
            cases |= {
                f"{label}, global": ("fedavg", {**settings, "evaluation": "global"})
                for label, settings in ROWS.items()
            }
            cases |= {name: (name, {}) for name in BASELINES}
            for label, (method, settings) in cases.items():
                key = f"{dataset}/{label}/{seed}"
                if key in known:
                    continue
                result = fedloom.run(
                    method, federation, model="gcn", seed=seed, engine="stacked", **settings
                )
                traffic = result.traffic
                known[key] = {
                    "accuracy": result.accuracy,
                    "up": traffic["bytes_up"],
                    "down": traffic["bytes_down"],
                }
                print(key, known[key], flush=True)
                RESULTS.parent.mkdir(exist_ok=True)
                RESULTS.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    return known


def table(known):
    """The results as Markdown: mean and standard deviation over seeds, MB of all clients."""
    columns = [f"{data} {what}" for data in ("Cora", "PubMed") for what in ("local", "global")]
    columns = [*columns[:2], "up, MB", "down, MB", *columns[2:], "up, MB", "down, MB"]
    lines = [f"| filters | {' | '.join(columns)} |", "|---" * 9 + "|"]
    for label in (*ROWS, *BASELINES):
        cells = []
        for dataset in ("cora", "pubmed"):
            for suffix in ("", ", global"):
                if suffix and label in BASELINES:
                    cells.append("-")
                    continue
                runs = [known[f"{dataset}/{label}{suffix}/{seed}"] for seed in SEEDS]
                scores = [100 * run["accuracy"] for run in runs]
                cells.append(f"{mean(scores):.2f} ± {stdev(scores):.2f}")
            runs = [known[f"{dataset}/{label}/{seed}"] for seed in SEEDS]
            cells += [f"{mean(run[way] for run in runs) / 1e6:.1f}" for way in ("up", "down")]
        name = label if label in BASELINES else f"fedavg, {label}"
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    text = table(results())
    print(text)
    if len(sys.argv) > 1:
        page = Path(sys.argv[1])
        before, _, rest = page.read_text().partition("<!-- results -->")
        after = rest.partition("<!-- end of results -->")[2]
        filled = f"{before}<!-- results -->\n\n{text}\n\n<!-- end of results -->{after or chr(10)}"
        page.write_text(filled)
