"""Runs recipes over the seeds they name and compares with what they expect. Exit code 1 if one misses.

python bench/reproduce.py recipes/*.toml [--minutes 10]      recipes that take longer than --minutes are left out, and named
"""

import argparse
import sys
from pathlib import Path
from statistics import mean

from sweep import spread, sweep

from fedloom.recipe import make_recipe, read_tables


def main() -> None:
    """Prints a line per recipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+", type=Path)
    parser.add_argument("--minutes", type=float, default=10.0)
    asked = parser.parse_args()
    missed = 0
    for path in asked.recipes:
        tables = read_tables(path)
        expect = make_recipe(tables).expect
        if expect.minutes > asked.minutes:
            print(f"{path.stem}: left out, takes about {expect.minutes:g} minutes")
            continue
        values = [s[expect.metric] for s in sweep({path.stem: tables}, expect.seeds, lambda *_: None)[path.stem]]
        fits = expect.at_least <= 100 * mean(values) <= expect.at_most
        missed += not fits
        wanted = f"{expect.at_least:g} to {expect.at_most:g}" if expect.at_most < 100 else f"at least {expect.at_least:g}"
        print(
            f"{path.stem}: {expect.metric} {spread(values)} over {len(values)} seeds, expected {wanted}: {'ok' if fits else 'MISSED'}",
            flush=True,
        )
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
