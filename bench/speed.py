"""Measures speed, memory and growth: every number of docs/benchmarks.md.

    python bench/speed.py                            all parts (two hours on a quiet machine)
    python bench/speed.py --parts                    lists the parts and how long each took
    python bench/speed.py cora10 startup             only these parts; the others keep their results
    python bench/speed.py --write docs/benchmarks.md all parts, then writes the page
    python bench/speed.py none --write PAGE          writes the page from the stored results
    python bench/speed.py cora10 --base COMMIT       compares with the code of that commit
    python bench/speed.py cora10 --base ""           compares with no older code
    python bench/speed.py --quick --keep FILE        all parts on tiny graphs, to test the script

bench/results/benchmarks.jsonl stores the results, one JSON line for each part. Times are CPU times
of one thread, unless the page says wall time. Ways that are compared take turns, and a ratio is the
median over the turns, so that other load disturbs all ways alike. Each row has the load of the
machine while it was measured. The plain loop, each engine and the older code have their own
process. So has each measurement of memory. There are no instruction counts: virtual machines rarely
have the counters, and importing torch under valgrind takes longer than all parts of this script.
"""

import argparse
import datetime
import json
import os
import platform
import time
from importlib.metadata import version
from pathlib import Path

import speed_command  # noqa: F401  registers its parts, as the next one does
import speed_large  # noqa: F401
import speed_rounds
import speed_tools
import torch
from speed_tools import HERE, Row, load, older_code, serve, slope

KEPT = HERE / "results" / "benchmarks.jsonl"
BASE = "2975c65"  # before recorded phases and hand-written local training
# In the order of the page.
ROUNDS = ("cora10", "citeseer10", "pubmed10", "cora100", "small1000", "methods", "workers")
OTHERS = ("kernels", "command", "startup", "arxiv", "products", "prediction", "growth", "clients")
PARTS = {name: speed_tools.PARTS[name] for name in (*ROUNDS, *OTHERS)}


def machine() -> dict[str, str]:
    """Returns the machine and the versions of the measurement."""
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        "?",
    )
    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    packages = ("fedloom", "torch", "torch_geometric", "numpy", "scipy")
    versions = ", ".join(
        [f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in packages)]
    )
    return {"machine": f"{cpu}, {os.cpu_count()} cores, {gigabytes:.0f} GB", "versions": versions}


def read(kept: Path) -> dict[str, Row]:
    """Returns the last result of every part."""
    lines = kept.read_text().splitlines() if kept.exists() else []
    return {result["part"]: result for result in map(json.loads, lines)}


def keep(kept: Path, result: Row) -> None:
    """Replaces the stored result of a part."""
    found = {**read(kept), result["part"]: result}
    fresh = kept.with_suffix(".new")
    fresh.write_text("".join(json.dumps(found[name]) + "\n" for name in PARTS if name in found))
    os.replace(fresh, kept)


def measure(name: str, quick: bool, base: str, kept: Path) -> None:
    """Runs a part, prints its rows and stores them."""
    begun, busy = time.perf_counter(), load()
    rows = [{"load": busy, **row} for row in PARTS[name](quick)]
    took = time.perf_counter() - begun
    print(f"{name}: {took:.0f} s", *map(json.dumps, rows), sep="\n  ", flush=True)
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    about = {"part": name, "made": date, "took_s": round(took), "load": busy, "base": base}
    keep(kept, {**about, **machine(), "rows": rows})


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "names", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}, or none (default: all)"
    )
    made.add_argument("--parts", action="store_true", help="list the parts and their durations")
    made.add_argument("--quick", action="store_true", help="tiny graphs, one turn")
    made.add_argument(
        "--base",
        default=BASE,
        metavar="COMMIT",
        help=f"the older code: a commit, a folder with a checkout, or '' (default: {BASE})",
    )
    made.add_argument(
        "--parallel", metavar="ENGINE", help="the engine with workers of the part `workers`"
    )
    made.add_argument(
        "--keep", type=Path, default=KEPT, metavar="FILE", help="JSON lines, one for each part"
    )
    made.add_argument(
        "--write",
        type=Path,
        metavar="PAGE",
        help="the Markdown file to write from the stored results, with a .png of the same name",
    )
    made.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    return made


def main() -> None:
    """Runs parts, stores their results, writes the page."""
    arguments = parser()
    options = arguments.parse_args()
    torch.set_num_threads(1)
    if options.serve:
        serve(options.serve)
        return
    titles = {name: " ".join((f.__doc__ or "").split()) for name, f in PARTS.items()}
    if options.parts:
        took = {name: f"{result['took_s']} s" for name, result in read(options.keep).items()}
        print(*(f"{n:12}{took.get(n, '?'):>8}  {about}" for n, about in titles.items()), sep="\n")
        return
    if unknown := set(options.names) - {*PARTS, "none"}:
        names = ", ".join(sorted(unknown))
        arguments.error(f"unknown part {names}. Valid: {', '.join(PARTS)}, none")
    if options.parallel:
        speed_rounds.PARALLEL.insert(0, options.parallel)
    chosen = [name for name in options.names or PARTS if name != "none"]
    with older_code(options.base if chosen else ""):
        for name in chosen:
            measure(name, options.quick, options.base, options.keep)
    if options.write:
        import speed_page

        speed_page.write(options.write, read(options.keep), titles, slope)


if __name__ == "__main__":
    main()
