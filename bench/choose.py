"""Ranks all combinations of settings of a recipe by their mean validation accuracy over seeds.

Test scores are not shown.

python bench/choose.py examples/cora-random-10-fedsgd-dgcn \\
    method.lr=0.005,0.01,0.02 method.weight_decay=0.0005,0.002 [--seeds 3]
"""

import argparse
from itertools import product
from statistics import mean

from sweep import spread, sweep

from fedloom.experiments.recipe import make_recipe, override
from fedloom.experiments.recipe_files import find_tables


def main() -> None:
    """Prints the combinations, the best last."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", help="PAPER/ENTRY or a TOML file")
    parser.add_argument("choices", nargs="+", help="table.key=value,value,...")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    tables = find_tables(options.recipe)
    axes = [
        [f"{key}={value}" for value in values.split(",")]
        for key, _, values in (c.partition("=") for c in options.choices)
    ]
    recipes = {
        " ".join(combination): override(tables, combination) for combination in product(*axes)
    }
    for changed in recipes.values():
        make_recipe(changed)  # reports a misspelt key before anything runs
    found = sweep(recipes, options.seeds, lambda *_: None)
    validation = {label: [s["val_accuracy"] for s in runs] for label, runs in found.items()}
    for label in sorted(validation, key=lambda known: mean(validation[known])):
        print(f"validation {spread(validation[label])}   {label}")


if __name__ == "__main__":
    main()
