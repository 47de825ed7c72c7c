"""Recipe files: the recipes that come with fedloom, one TOML file per paper.

A file `recipes/PAPER.toml` has the tables that its recipes share, and an entry for each recipe:

    [base]
    data.split = "20/40/40"
    method = {name = "opfgl", beta = 0.2}

    [entry.cora-louvain-plus-10]
    data.dataset = "cora"
    method.beta = 1.0

An entry's recipe is the base with the entry's keys on top, table by table. Its name is PAPER/ENTRY,
as in `fedloom run opfgl/cora-louvain-plus-10`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedloom.core.registry import method_names
from fedloom.data.datasets import catalogue
from fedloom.errors import ConfigError, DataError, hint, unknown
from fedloom.experiments.recipe import read_tables

RECIPES = Path(__file__).parent / "recipes"
Tables = dict[str, dict[str, Any]]


def papers() -> list[str]:
    """Returns the names of the files, without their suffix."""
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def entries(paper: str) -> dict[str, Tables]:
    """Returns {entry: tables} of a paper, in the order of its file.

    Raises a ConfigError if there is no such paper.
    """
    if paper not in papers():
        raise unknown("paper with recipes:", paper, papers())
    content = read_tables(RECIPES / f"{paper}.toml")
    return {name: merge(content["base"], entry) for name, entry in content["entry"].items()}


def merge(base: Mapping[str, Mapping[str, Any]], entry: Mapping[str, Mapping[str, Any]]) -> Tables:
    """Returns the tables of both. A key of `entry` replaces the same key of `base`."""
    names = dict.fromkeys((*base, *entry))
    return {name: {**base.get(name, {}), **entry.get(name, {})} for name in names}


def find_tables(name: str) -> Tables:
    """Returns the tables of a recipe, unchecked.

    Args:
        name: PAPER/ENTRY, or the path of a TOML file.

    Raises:
        ConfigError: There is no such recipe. It names the nearest and the valid ones.
        DataError: The file cannot be read.
    """
    if Path(name).is_file():
        return read_tables(Path(name))
    if name.endswith(".toml"):
        raise DataError(
            f"recipe: there is no file {name!r}; valid: a TOML file, or PAPER/ENTRY as "
            "`fedloom recipes` lists them"
        )
    paper, slash, entry = name.partition("/")
    if paper in papers() and slash:
        known = entries(paper)
        if entry not in known:
            raise unknown(f"recipe of {paper}:", entry, known)
        return known[entry]
    if paper in papers():
        raise ConfigError(
            f"recipe {name!r} is a paper; give one of its recipes: "
            + ", ".join(f"{paper}/{entry}" for entry in entries(paper))
        )
    for option, names in (("--method", [*method_names()]), ("--dataset", [*catalogue()])):
        if name in names:
            raise ConfigError(f"recipe: {name!r} is none; did you mean {option} {name}?")
    everything = [f"{each}/{entry}" for each in papers() for entry in entries(each)]
    near = hint(name, everything)
    if of_paper := [each for each in everything if each.endswith(f"/{name}")]:
        near = f" Did you mean {of_paper[-1]!r}?"
    raise ConfigError(
        f"unknown recipe {name!r}.{near} Valid: a TOML file, or PAPER/ENTRY as "
        f"`fedloom recipes` lists them; papers: {', '.join(papers())}"
    )
