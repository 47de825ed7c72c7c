"""A grid: methods x datasets x partitions x numbers of clients x models x seeds, each cell a recipe with a run folder of its own.

A cell's folder is named after all that its numbers depend on, settings and code. So what is done is found again, what was changed is run
anew beside it, and nothing is written over.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import fedloom
from fedloom.core.registry import method_class
from fedloom.core.settings import check_setting, setting
from fedloom.data.datasets import find
from fedloom.errors import ConfigError, DataError, unknown
from fedloom.experiments.recipe import make_recipe, override
from fedloom.experiments.run_folder import is_completed, is_run, read_config, read_summary

Tables = dict[str, dict[str, Any]]  # a recipe
OnRound = Callable[[dict[str, Any], int], None]
# Settings that mean the same in every method that has them: said once, they are for all. Whatever else is a method's own.
SHARED = ("rounds", "epochs", "batch_size", "weight_decay", "lr", "optimizer")
LOCAL = "local"  # what each client reaches alone is beside every method


@dataclass(frozen=True)
class Cell:
    """One run of a grid. folder: where it is kept."""

    tables: Tables
    folder: Path

    @property
    def name(self) -> str:
        """What the cell is, in the name of its folder."""
        return self.folder.name

    @property
    def method(self) -> str:
        """The method's name."""
        return str(self.tables["method"]["name"])

    @property
    def seed(self) -> int:
        """The run's seed."""
        return int(self.tables["run"]["seed"])


@dataclass(frozen=True)
class Axes:
    """[compare]: what is crossed with what, each a list, or a text with commas in between."""

    methods: tuple[str, ...] = setting(
        ("fedavg",), "names, or files of your own; local is always among them"
    )
    datasets: tuple[str, ...] = setting(("cora",), "see `fedloom datasets`")
    partitions: tuple[str, ...] = setting(("louvain",), "see `fedloom partitions`")
    clients: tuple[int, ...] = setting((10,), "numbers of clients")
    models: tuple[str, ...] = setting(
        ("gcn",),
        "architectures; those that are dealt over the clients have / in between, as gcn/gat/sage",
    )
    seeds: int = setting(3, "seeds 0, 1, ...: at least 3 for a claim", at_least=1)


def read_axes(given: Mapping[str, Any]) -> Axes:
    """Checks the [compare] table. Every mistake is a ConfigError that names the key and what would be valid."""
    known = {f.name: f for f in fields(Axes)}
    checked: dict[str, Any] = {}
    for key, value in given.items():
        if key not in known:
            raise unknown("setting in [compare]:", key, known)
        checked[key] = (
            check_setting(known[key], value, "compare") if key == "seeds" else _listed(key, value)
        )
    chosen = Axes(**checked)
    return (
        chosen
        if LOCAL in chosen.methods
        else Axes(**{**checked, "methods": (LOCAL, *chosen.methods)})
    )


def _listed(key: str, value: Any) -> tuple[Any, ...]:
    # A comma before key=value is one of a dataset's own: "synthetic:nodes=100,classes=3".
    parts = (
        re.split(r",(?!\s*\w+=)", value)
        if isinstance(value, str)
        else value
        if isinstance(value, list | tuple)
        else [value]
    )
    listed = [part.strip() if isinstance(part, str) else part for part in parts]
    listed = [part for part in listed if part != ""]
    kind = int if key == "clients" else str
    if kind is int:
        listed = [
            int(part) if isinstance(part, str) and part.isdigit() else part for part in listed
        ]
    if not listed or any(not isinstance(part, kind) or isinstance(part, bool) for part in listed):
        valid = "whole numbers" if kind is int else "names"
        raise ConfigError(
            f"compare.{key} is {value!r}, must be {valid}, as a list or with commas in between"
        )
    return tuple(dict.fromkeys(listed))


def cells(tables: Mapping[str, Any], out: Path) -> list[Cell]:
    """The cells of a grid, seeds outermost: soon every method has a number.

    tables: a recipe with a table [compare]; [method] holds what is said to all methods that have such a setting, and a table in it, such
    as [method.fedprox], what is said to one. out: the folder that the cells' folders are in.
    """
    base = {
        name: dict(table) if isinstance(table, Mapping) else table for name, table in tables.items()
    }
    axes = read_axes(base.pop("compare", {}))
    said = base.pop("method", {})
    if not isinstance(said, dict):
        raise ConfigError(f"method is {said!r}, must be a table: [method]")
    common = {key: value for key, value in said.items() if not isinstance(value, Mapping)}
    own = {name: dict(value) for name, value in said.items() if isinstance(value, Mapping)}
    for name in own:
        if name not in axes.methods:
            raise unknown("method in a table [method.NAME]:", name, axes.methods)
    for key in common:
        if key not in SHARED:
            raise ConfigError(
                f"method.{key} is said to all methods, of which each may mean something else by it; "
                f"for one of them write METHOD.{key}; for all: {', '.join(SHARED)}"
            )
    for table, key in (
        ("data", "dataset"),
        ("partition", "name"),
        ("partition", "clients"),
        ("model", "name"),
        ("run", "seed"),
    ):
        if isinstance(base.get(table), dict) and key in base[table]:
            raise ConfigError(f"{table}.{key} is an axis of the grid: give it in [compare]")
    for name in axes.datasets:
        find(name)  # a misspelt one should not wait for its turn
    found = []
    for seed, data, name, clients, model, method in product(
        range(axes.seeds), axes.datasets, axes.partitions, axes.clients, axes.models, axes.methods
    ):
        settings = {**_applicable(method, own.get(method, {}), common), **own.get(method, {})}
        chosen = [
            ("data", "dataset", data),
            ("partition", "name", name),
            ("partition", "clients", clients),
        ]
        chosen += [("model", "name", model.replace("/", ",")), ("run", "seed", seed)]
        made = {**base, "method": {"name": method, **settings}}
        for table, key, value in chosen:
            made[table] = {**made.get(table, {}), key: value}
        found.append(cell(made, out))
    return found


def _applicable(method: str, own: Mapping[str, Any], common: Mapping[str, Any]) -> dict[str, Any]:
    """Of what is said to all, what a method has: a one-shot method has its one round, and trains as long as it needs."""
    known = {f.name: f for f in fields(method_class(method, own))}
    one_shot = known["rounds"].metadata["bounds"]["at most"] == 1
    return {
        key: value
        for key, value in common.items()
        if key in known and not (one_shot and key in ("rounds", "epochs"))
    }


def assigned(
    tables: Mapping[str, Any], assignments: Iterable[str], methods: Sequence[str]
) -> Tables:
    """Tables with assignments on top: "table.key=value" as for a run, or "METHOD.key=value" for one method of the grid."""
    changed = {
        name: dict(table) if isinstance(table, Mapping) else table for name, table in tables.items()
    }
    for assignment in assignments:
        head, _, rest = assignment.strip().partition(".")
        if head in methods:
            (key, value), *_ = override({}, [f"method.{rest}"])["method"].items()
            of_methods = changed.setdefault("method", {})
            of_methods[head] = {**of_methods.get(head, {}), key: value}
        else:
            changed = override(changed, [assignment])
    return changed


def cell(tables: Tables, out: Path) -> Cell:
    """A cell of its own: checks the recipe, names the folder."""
    recipe = make_recipe(tables)
    config = recipe.config()
    base = config["method"].get("base")
    identity = json.dumps([config, code_behind(recipe.method, base)], sort_keys=True)
    parts = [
        Path(recipe.data.dataset).name,
        f"{recipe.partition.name}{recipe.partition.clients}",
        Path(recipe.method).stem,
    ]
    parts += [*([Path(base).stem] if base else []), recipe.model.name, f"s{recipe.run.seed}"]
    parts.append(hashlib.sha256(identity.encode()).hexdigest()[:8])
    return Cell(config, out / re.sub(r"[^\w.+-]", "_", "-".join(parts)))


@cache
def code_behind(method: str, base: str | None = None) -> str:
    """A digest of the modules that a method's numbers depend on: data, graphs, models, learning, its own file and those it takes from."""
    root = Path(fedloom.__file__).parent
    names = (
        "graph",
        "sparse",
        "models",
        "learn",
        "task",
        "party",
        "method",
        "hops",
        "structure",
        "prototypes",
        "views",
        "similar",
    )
    files = [root / f"{name}.py" for name in names] + sorted(root.glob("data/*.py"))
    own = [cls.__module__ for cls in method_class(method, {"base": base} if base else {}).__mro__]
    used = {
        module
        for name in own
        if name.startswith(("fedloom.methods.", "fedloom_user_"))
        for module in _methods_in(name)
    }
    files += [Path(str(sys.modules[module].__file__)) for module in sorted(used)]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _methods_in(module: str) -> set[str]:
    """A method's module and those of the methods that it takes something from."""
    known = sys.modules.get(module) or importlib.import_module(module)
    taken = set(
        re.findall(
            r"^from (fedloom\.methods\.\w+) import", Path(str(known.__file__)).read_text(), re.M
        )
    )
    return {module}.union(*(_methods_in(other) for other in taken))


def is_done(cell: Cell) -> bool:
    """Whether a cell's run is completed. A damaged folder is not."""
    try:
        return is_completed(cell.folder)
    except DataError:
        return False


def run_cell(cell: Cell, on_round: OnRound | None = None) -> None:
    """Runs a cell, or goes on with it, unless it is done; waits while another process is at it."""
    with _alone_with(cell.folder):
        if is_done(cell):
            return
        begun = _can_go_on(cell.folder)
        if not begun and cell.folder.exists():
            cell.folder.rename(_beside(cell.folder))  # nothing is lost, and it is not in the way
        make_recipe(cell.tables).execute(cell.folder, on_round, resume=begun)


def _can_go_on(folder: Path) -> bool:
    """Whether a run was begun in a folder whose config and summary, if it has one, can be read."""
    try:
        if is_run(folder):
            read_summary(folder)
            read_config(folder)
            return True
    except DataError:
        return False
    return False


def _beside(folder: Path) -> Path:
    count = 1
    while (found := folder.with_name(f"{folder.name}.damaged{count}")).exists():
        count += 1
    return found


@contextmanager
def _alone_with(folder: Path) -> Iterator[None]:
    """Waits until no other process has the folder; the system lets go of it with the process, however that ends."""
    locks = folder.parent / ".locks"
    locks.mkdir(parents=True, exist_ok=True)
    with open(locks / folder.name, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
