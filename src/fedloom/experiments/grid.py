"""Grid: methods x datasets x partitions x numbers of clients x models x seeds.

Each cell is a recipe with a run folder of its own. The folder's name contains a digest of all that
its numbers depend on: settings and code. So finished runs are found again, a changed run gets a new
folder, and nothing is overwritten.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fedloom.core.registry import method_class
from fedloom.core.settings import check_setting, setting
from fedloom.data.datasets import find
from fedloom.data.federation import Federation
from fedloom.errors import ConfigError, DataError, unknown
from fedloom.experiments.callbacks import Given
from fedloom.experiments.recipe import default_partition, make_recipe, override
from fedloom.experiments.run_folder import is_completed, is_run, read_config, read_summary
from fedloom.experiments.source_digest import code_behind

Tables = dict[str, dict[str, Any]]  # a recipe
# Settings with the same meaning in every method that has them. [method] sets them for all methods.
# Any other setting belongs to one method.
SHARED = ("rounds", "epochs", "batch_size", "weight_decay", "lr", "optimizer")
NONE: Mapping[str, Federation] = MappingProxyType({})
LOCAL = "local"  # every comparison includes local training


@dataclass(frozen=True)
class Cell:
    """One run of a grid, and the folder that keeps it."""

    tables: Tables
    folder: Path
    federation: Federation | None = None  # the data, if they are in memory

    @property
    def name(self) -> str:
        """The folder's name, which describes the cell."""
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
    """[compare]: the axes of the grid. Each is a list, or a text with commas."""

    methods: tuple[str, ...] = setting(
        ("fedavg",), "names, or files of your own; local is always included"
    )
    datasets: tuple[str, ...] = setting(("cora",), "see `fedloom datasets`")
    partitions: tuple[str, ...] = setting(
        (), "see `fedloom partitions`; by default the one that fits each dataset"
    )
    clients: tuple[int, ...] = setting((10,), "numbers of clients")
    models: tuple[str, ...] = setting(
        ("gcn",), "architectures; gcn/gat/sage gives the clients different ones in turn"
    )
    seeds: int = setting(3, "seeds 0, 1, ...; a claim needs at least 3", at_least=1)


def read_axes(given: Mapping[str, Any]) -> Axes:
    """Checks the [compare] table and returns the axes.

    Every mistake is a ConfigError that names the key and the valid values.
    """
    known = {f.name: f for f in fields(Axes)}
    checked: dict[str, Any] = {}
    for key, value in given.items():
        if key not in known:
            raise unknown("setting in [compare]:", key, known)
        checked[key] = (
            check_setting(known[key], value, "compare") if key == "seeds" else _listed(key, value)
        )
    axes = Axes(**checked)
    if LOCAL in axes.methods:
        return axes
    return Axes(**{**checked, "methods": (LOCAL, *axes.methods)})


def _listed(key: str, value: Any) -> tuple[Any, ...]:
    parts = value if isinstance(value, list | tuple) else [value]
    if isinstance(value, str):
        # A comma before key=value belongs to a dataset: "synthetic:nodes=100,classes=3".
        parts = re.split(r",(?!\s*\w+=)", value)
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
            f"compare.{key} is {value!r}, must be {valid}, as a list or separated by commas"
        )
    return tuple(dict.fromkeys(listed))


def cells(
    tables: Mapping[str, Any], out: Path, federations: Mapping[str, Federation] = NONE
) -> list[Cell]:
    """Returns the cells of a grid. Seeds are the outermost axis, so every method starts early.

    Args:
        tables: A recipe with a table [compare]. [method] holds the settings of all methods that
            have them. A table inside, such as [method.fedprox], holds those of one method.
        out: The folder of the cells' folders.
        federations: Federations in memory, by the name that `compare.datasets` has for them. The
            axes `partitions` and `clients` do not apply to them.
    """
    base = {
        name: dict(table) if isinstance(table, Mapping) else table for name, table in tables.items()
    }
    axes = read_axes(base.pop("compare", {}))
    common, own = _method_tables(base.pop("method", {}), axes)
    for table, key in (
        ("data", "dataset"),
        ("partition", "name"),
        ("partition", "clients"),
        ("model", "name"),
        ("run", "seed"),
    ):
        if isinstance(base.get(table), dict) and key in base[table]:
            raise ConfigError(f"{table}.{key} is an axis of the grid: give it in [compare]")
    for name in (each for each in axes.datasets if each not in federations):
        find(name)  # a misspelt name fails now, not when its turn comes
    made = []
    for seed, (data, name), clients, model, method in product(
        range(axes.seeds), _divisions(axes, federations), axes.clients, axes.models, axes.methods
    ):
        if data in federations and clients != axes.clients[0]:
            continue
        of_method = own.get(method, {})
        settings = {**_applicable(method, of_method, common), **of_method}
        chosen = {**base, "method": {"name": method, **settings}}
        for table, key, value in (
            ("data", "dataset", data),
            ("partition", "name", name),
            ("partition", "clients", clients),
            ("model", "name", model.replace("/", ",")),
            ("run", "seed", seed),
        ):
            chosen[table] = {**chosen.get(table, {}), key: value}
        made.append(cell(chosen, out, federations.get(data)))
    return made


def _divisions(axes: Axes, federations: Mapping[str, Federation]) -> list[tuple[str, str]]:
    """Returns each dataset with each partition; with the one that fits it if none is given.

    A federation has one partition, its own.
    """
    found = []
    for data in axes.datasets:
        names = axes.partitions or (default_partition(data),)
        found += [(data, name) for name in (names[:1] if data in federations else names)]
    return found


def _method_tables(given: Any, axes: Axes) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Splits [method] into the settings of all methods and {method: settings}."""
    if not isinstance(given, dict):
        raise ConfigError(f"method is {given!r}, must be a table: [method]")
    common = {key: value for key, value in given.items() if not isinstance(value, Mapping)}
    own = {name: dict(value) for name, value in given.items() if isinstance(value, Mapping)}
    for name in own:
        if name not in axes.methods:
            raise unknown("method in a table [method.NAME]:", name, axes.methods)
    for key in common:
        if key not in SHARED:
            raise ConfigError(
                f"method.{key} is set for all methods, but may mean something else in each of "
                f"them. Set it for one method as METHOD.{key}; valid for all: {', '.join(SHARED)}"
            )
    return common, own


def _applicable(method: str, own: Mapping[str, Any], common: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the common settings that a method has.

    A one-shot method keeps its one round, and its own number of epochs.
    """
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
    """Returns the tables with assignments applied.

    Args:
        tables: As for `cells`.
        assignments: "table.key=value" as for a run, or "METHOD.key=value" for one method.
        methods: The methods of the grid.
    """
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


def cell(tables: Tables, out: Path, federation: Federation | None = None) -> Cell:
    """Checks a recipe and returns its cell. The folder's name depends on settings and code."""
    recipe = make_recipe(tables, federation)
    config = recipe.config()
    base = config["method"].get("base")
    # "auto" chooses stacked or loop by the data; the modules of stacked include those of loop.
    engine, _ = recipe.run.engine_required or ("stacked", "")
    code = code_behind(recipe.method, base, engine, recipe.model.name)
    identity = json.dumps([config, code], sort_keys=True)
    parts = [*recipe.task, Path(recipe.method).stem]
    parts += [*([Path(base).stem] if base else []), recipe.model.name, f"s{recipe.run.seed}"]
    parts.append(hashlib.sha256(identity.encode()).hexdigest()[:8])
    return Cell(config, out / re.sub(r"[^\w.+-]", "_", "-".join(parts)), federation)


def is_done(cell: Cell) -> bool:
    """Returns whether a cell's run is completed; False if its folder is damaged."""
    try:
        return is_completed(cell.folder)
    except DataError:
        return False


def run_cell(cell: Cell, callbacks: Given = None) -> None:
    """Runs or resumes a cell, unless it is completed.

    Waits while another process runs the same cell. A damaged folder is renamed, not removed.
    """
    with _locked(cell.folder):
        if is_done(cell):
            return
        begun = _can_resume(cell.folder)
        if not begun and cell.folder.exists():
            cell.folder.rename(_name_for_damaged(cell.folder))
        make_recipe(cell.tables, cell.federation).execute(cell.folder, callbacks, resume=begun)


def _can_resume(folder: Path) -> bool:
    """Returns whether the folder holds a run with a readable config, and summary if it has one."""
    try:
        if is_run(folder):
            read_summary(folder)
            read_config(folder)
            return True
    except DataError:
        return False
    return False


def _name_for_damaged(folder: Path) -> Path:
    count = 1
    while (path := folder.with_name(f"{folder.name}.damaged{count}")).exists():
        count += 1
    return path


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds the folder's lock. The system releases it when the process ends, however it ends."""
    locks = folder.parent / ".locks"
    locks.mkdir(parents=True, exist_ok=True)
    with open(locks / folder.name, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
