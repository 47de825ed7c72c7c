"""Recipes: a run written down as five small tables (TOML), checked field by field, and carried out."""

from __future__ import annotations

import json
import re
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from fedloom.core.registry import make_method, method_class
from fedloom.core.settings import check_setting, setting
from fedloom.data.datasets import catalogue, load
from fedloom.data.federation import Federation
from fedloom.data.graph import FLOWS
from fedloom.data.partition import divide, partition_settings
from fedloom.errors import ConfigError, DataError, unknown
from fedloom.experiments.result import Result
from fedloom.experiments.run import agree_on_facts, run
from fedloom.experiments.settings import RunSettings, chosen_evaluation
from fedloom.experiments.trackers import Track
from fedloom.nn.build import parse_spec


@dataclass(frozen=True)
class DataTable:
    """[data]: which graph, and which of its items train, validate and test."""

    dataset: str = setting(
        "cora",
        "a name (see `fedloom datasets`), a folder with graph.toml, or synthetic:key=value,...",
    )
    split: str = setting(
        "",
        'shares such as "20/40/40", "global 10/10/80", or "public" (empty = the dataset\'s usual one)',
    )
    inductive: bool = setting(False, "validation and test items are absent during training")
    flow: str = setting(
        "forward",
        "which way messages run along directed edges; both = take the graph as undirected",
        choices=FLOWS,
    )
    public_split: int = setting(
        0, "which of the dataset's own splits, if it has several", at_least=0
    )


@dataclass(frozen=True)
class PartitionTable:
    """[partition]: who holds what. Further keys are the partitioner's own options."""

    name: str = setting("louvain", "see `fedloom partitions`")
    clients: int = setting(10, "number of clients", at_least=1)
    cross_edges: str = setting(
        "auto",
        "whether clients know the edges that were cut; auto = if the method works on them",
        choices=("auto", "none", "known"),
    )
    seed: int = setting(-1, "seed of partition and split (-1 = the run's seed)", at_least=-1)


@dataclass(frozen=True)
class ModelTable:
    """[model]: what the clients train."""

    name: str = setting(
        "gcn",
        'a spec such as "gcn" or "gcn-4x128", or several, separated by commas, dealt over the clients',
    )
    dropout: float = setting(
        0.5, "share of the hidden units dropped in training", at_least=0, below=1, tune="0..0.8"
    )


@dataclass(frozen=True)
class Expectation:
    """[expect]: what the recipe should give, for `make reproduce`; a run itself ignores it."""

    metric: str = setting("accuracy", "which entry of the summary, in percent here")
    at_least: float = setting(0.0, "the mean over the seeds must reach this")
    at_most: float = setting(100.0, "and not exceed this")
    seeds: int = setting(3, "over how many seeds", at_least=1)
    minutes: float = setting(
        0.0, "about how long all seeds take on two cores, Local beside them (0 = not known)"
    )
    paper: float = setting(-1.0, "what the paper prints, in percent (-1 = nothing)")
    also: str = setting(
        "", 'what it prints besides for the same runs, such as "f1_macro 61.58, auc 79.4"'
    )
    source: str = setting("", "where the expected value comes from")


TABLES: dict[str, Any] = {
    "data": DataTable,
    "partition": PartitionTable,
    "model": ModelTable,
    "run": RunSettings,
    "expect": Expectation,
}


@dataclass(frozen=True)
class Recipe:
    """A checked recipe. `options` are the partitioner's own settings, `method_settings` the method's."""

    data: DataTable
    partition: PartitionTable
    model: ModelTable
    run: RunSettings
    expect: Expectation
    method: str
    method_settings: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def config(self) -> dict[str, Any]:
        """The whole recipe, every default filled in: what the run folder keeps, and what runs again as it is."""
        method = make_method(self.method, self.method_settings)
        resolved = {"cross_edges": self.cross_edges, "seed": self.partition_seed}
        partition = {
            **_values(self.partition),
            **resolved,
            **partition_settings(self.partition.name),
            **self.options,
        }
        return {
            "data": {**_values(self.data), "split": self.split}, "partition": partition, "model": _values(self.model),
            "method": {"name": self.method, **method.settings()}, "run": _values(self.run),
        }  # fmt: skip

    @property
    def partition_seed(self) -> int:
        """Seed of partition and split."""
        return self.run.seed if self.partition.seed < 0 else self.partition.seed

    @property
    def cross_edges(self) -> str:
        """Whether clients know the edges that were cut: what was asked for, else what the method needs."""
        if self.partition.cross_edges != "auto":
            return self.partition.cross_edges
        return (
            "known" if method_class(self.method, self.method_settings).uses_cross_edges else "none"
        )

    @property
    def split(self) -> str:
        """The split, the dataset's usual one if none was asked for."""
        usual = (
            catalogue()[self.data.dataset].split if self.data.dataset in catalogue() else "20/40/40"
        )
        return self.data.split or usual

    def federation(self) -> Federation:
        """Loads the graph and divides it."""
        graph = load(self.data.dataset, public_split=self.data.public_split).flowing(self.data.flow)
        return divide(
            graph, self.partition.clients, self.partition.name, self.partition_seed,
            cross_edges=self.cross_edges,  # type: ignore[arg-type]  # one of its choices
            split=self.split, inductive=self.data.inductive, options=self.options,
        )  # fmt: skip

    def check(self, federation: Federation) -> None:
        """Raises a ConfigError if the recipe's method and models do not fit the federation: before anything runs."""
        method = make_method(self.method, self.method_settings)
        agree_on_facts(
            method, self.method, federation.roster, self.model.name, self.model.dropout, self.run
        )

    def execute(
        self, out: Path | None = None, on_round: Callable[[dict[str, Any], int], None] | None = None, *,
        on_start: Callable[[dict[str, Any]], None] | None = None, resume: bool = False, federation: Federation | None = None,
        track: Track = (),
    ) -> Result:  # fmt: skip
        """Runs the recipe; `federation` spares dividing the graph again when several methods run on the same one."""
        config = self.config()  # a misspelt setting should not wait for the data
        began = time.perf_counter()
        federation = federation or self.federation()
        return run(
            self.method, federation, model=self.model.name, dropout=self.model.dropout, out=out, on_round=on_round, on_start=on_start,
            resume=resume, track=track, config=config, seconds_loading=time.perf_counter() - began,
            **_values(self.run), **self.method_settings,
        )  # fmt: skip


def _values(table: Any) -> dict[str, Any]:
    return {f.name: getattr(table, f.name) for f in fields(table)}


def read_tables(path: Path) -> dict[str, dict[str, Any]]:
    """The tables of a TOML file, unchecked. DataError if it cannot be read."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise DataError(f"recipe: cannot read {str(path)!r} ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"recipe: {str(path)!r} is not TOML ({error})") from error


def to_toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Tables as a TOML file that `read_tables` reads as they were: texts, numbers, true or false, and lists of these."""
    lines = {
        name: [f"{_toml_key(key)} = {_toml(value)}\n" for key, value in table.items()]
        for name, table in tables.items()
    }
    return "\n".join(
        f"[{_toml_key(name)}]\n{''.join(of_table)}" for name, of_table in lines.items()
    )


def _toml_key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml(name)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace(
            "\x7f", r"\u007f"
        )  # the one character that TOML escapes and JSON does not
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    raise ConfigError(
        f"recipe: {value!r} cannot be written as TOML; valid: a text, a number, true or false, a list of these"
    )


def override(
    tables: dict[str, dict[str, Any]], assignments: Iterable[str]
) -> dict[str, dict[str, Any]]:
    """Tables with assignments such as "method.lr=0.02" applied. Values are read as TOML; what is not TOML is a text."""
    changed = {
        name: dict(table) if isinstance(table, dict) else table for name, table in tables.items()
    }
    for assignment in assignments:
        match = re.fullmatch(r"\s*(\w+)\.(\w+)\s*=\s*(.*)", assignment)
        if match is None:
            raise ConfigError(
                f"--set takes table.key=value, for example method.lr=0.02; got {assignment!r}"
            )
        table, key, text = match.groups()
        if not isinstance(changed.setdefault(table, {}), dict):
            raise ConfigError(f"{table} is {changed[table]!r}, must be a table: [{table}]")
        changed[table][key] = read_value(text)
    return changed


def read_value(text: str) -> Any:
    """A value as TOML writes it; what is not TOML is a text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def make_recipe(tables: Mapping[str, Any]) -> Recipe:
    """Checks tables and gives the recipe. Every mistake is a ConfigError that names table, key and what would be valid."""
    for name, content in tables.items():
        if name not in (*TABLES, "method"):
            raise unknown("table of a recipe:", name, (*TABLES, "method"))
        if not isinstance(content, Mapping):
            raise ConfigError(f"{name} is {content!r}, must be a table: [{name}]")
    given = {name: dict(tables.get(name, {})) for name in (*TABLES, "method")}
    method = given["method"].pop("name", "fedavg")
    if not isinstance(method, str):
        raise ConfigError(f"method.name is {method!r}, must be a text")
    method_fields = {f.name: f for f in fields(method_class(method, given["method"]))}
    for key, value in given["method"].items():
        if key not in method_fields:
            raise unknown(f"setting of method {method!r}:", key, method_fields)
        given["method"][key] = check_setting(method_fields[key], value, "method")
    own = {f.name for f in fields(PartitionTable)}
    options = {k: given["partition"].pop(k) for k in list(given["partition"]) if k not in own}
    valid = partition_settings(str(given["partition"].get("name", PartitionTable.name)))
    for key in options:
        if key not in valid:
            raise unknown("setting in [partition]:", key, (*own, *valid))
    built = {name: table(name, TABLES[name], given[name]) for name in TABLES}
    for spec in built["model"].name.split(","):
        parse_spec(spec.strip().lower())
    chosen_evaluation(method_class(method, given["method"]), method, built["run"].evaluation)
    return Recipe(method=method, method_settings=given["method"], options=options, **built)


def table(name: str, cls: Any, given: Any) -> Any:
    """A table of a TOML file as the dataclass that describes it; a ConfigError that names table, key and what would be valid."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"{name} is {given!r}, must be a table: [{name}]")
    known = {f.name: f for f in fields(cls)}
    for key in given:
        if key not in known:
            raise unknown(f"setting in [{name}]:", key, known)
    return cls(**{key: check_setting(known[key], value, name) for key, value in given.items()})
