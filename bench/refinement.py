"""Measures FedGH's refinement on growing synthetic graphs: peak memory and time.

The process does the work of one client and of the server. It trains for few steps, because memory
does not depend on their number. The search for similar nodes takes quadratic time, in blocks.

python bench/refinement.py [NODES ...]
"""

import subprocess
import sys

SCRIPT = """
import resource, time, torch
torch.set_num_threads(1)
from fedloom.data.synthetic import synthetic
from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.core.registry import make_method
from fedloom.methods.fedgh import Contrast, bare, harmonise, refined
n, refining = {n}, {refining}
graph = synthetic(nodes=n, classes=5, features=64, degree=10.0, homophily=0.8, seed=0)
client = Client("0", graph, Facts(64, 5, "node", ("0",), ("gcn-2x64",)))
began = time.perf_counter()
if refining:
    steps = {{"vgae_epochs": 5, "diffusion_epochs": 20, "diffusion_steps": 10}}
    method = make_method("fedgh", steps)
    pseudo = bare(*method.pseudo_graph(client))
    (H,) = harmonise([pseudo], Contrast(64, 64, 1), [torch.Generator()], 1e-3, 5, 0)
    refined(graph, H, 0.25, 3, 1.0)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
print(graph.num_edges, peak, time.perf_counter() - began)
"""


def measure(n: int, refining: bool) -> tuple[int, float, float]:
    """Returns the edges, the peak in MB and the seconds of a new process."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(n=n, refining=refining)],
        capture_output=True,
        text=True,
        check=True,
    )
    edges, peak, seconds = done.stdout.split()
    return int(edges), float(peak), float(seconds)


if __name__ == "__main__":
    print(
        "| nodes | edges | MB of the refinement | MB per 1000 nodes and edges "
        "| seconds (few steps) |"
    )
    print("|---|---|---|---|---|")
    for n in map(int, sys.argv[1:] or ("12500", "25000", "50000", "100000")):
        (edges, full, seconds), (_, bare, _) = measure(n, True), measure(n, False)
        used = full - bare
        each = 1000 * used / (n + edges)
        print(f"| {n:,} | {edges:,} | {used:,.0f} | {each:.2f} | {seconds:.0f} |", flush=True)
