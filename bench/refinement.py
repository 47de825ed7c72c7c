"""FedGH's refinement on growing synthetic graphs: peak memory and time of one client, the server's part with it.

Few steps of everything: memory does not depend on them. The search for similar nodes takes quadratic time, in blocks.

python bench/refinement.py [NODES ...]
"""

import subprocess
import sys

SCRIPT = """
import resource, time, torch
torch.set_num_threads(1)
from fedloom.data.synthetic import synthetic
from fedloom.core.method import make_method
from fedloom.methods.fedgh import Contrast, bare, harmonise, refined
from fedloom.core.party import Client, Facts
n, refining = {n}, {refining}
graph = synthetic(nodes=n, classes=5, features=64, degree=10.0, homophily=0.8, seed=0)
client = Client("0", graph, Facts(64, 5, "node", ("0",), ("gcn-2x64",)))
began = time.perf_counter()
if refining:
    method = make_method("fedgh", {{"vgae_epochs": 5, "diffusion_epochs": 20, "diffusion_steps": 10}})
    pseudo = bare(*method.pseudo_graph(client))
    (H,) = harmonise([pseudo], Contrast(64, 64, 1), [torch.Generator()], 1e-3, 5, 0)
    refined(graph, H, 0.25, 3, 1.0)
print(graph.num_edges, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3, time.perf_counter() - began)
"""


def measure(n: int, refining: bool) -> tuple[int, float, float]:
    """Edges, peak MB and seconds of a fresh process."""
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
        "| nodes | edges | MB of the refinement | MB per 1000 nodes and edges | seconds (few steps) |"
    )
    print("|---|---|---|---|---|")
    for n in map(int, sys.argv[1:] or ("12500", "25000", "50000", "100000")):
        (edges, full, seconds), (_, bare, _) = measure(n, True), measure(n, False)
        print(
            f"| {n:,} | {edges:,} | {full - bare:,.0f} | {1000 * (full - bare) / (n + edges):.2f} | {seconds:.0f} |",
            flush=True,
        )
