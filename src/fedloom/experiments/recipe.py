"""Recipes: a run as small tables (TOML), checked field by field."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from fedloom.core.registry import make_method, method_class
from fedloom.core.settings import check_setting, setting
from fedloom.data.datasets import catalogue, load
from fedloom.data.federation import Federation
from fedloom.data.files import is_graph_set_file
from fedloom.data.graph import FLOWS
from fedloom.data.partition import GIVEN, divide, partition_settings
from fedloom.data.tables import is_graph_set_folder
from fedloom.errors import ConfigError, DataError, unknown
from fedloom.experiments.callbacks import Given
from fedloom.experiments.federated_encoding import PARTIES, from_folders, party_folders
from fedloom.experiments.result import Result
from fedloom.experiments.run import agree_on_facts, require_unreserved, run, threads
from fedloom.experiments.settings import AdversarySettings, RunSettings, chosen_evaluation
from fedloom.experiments.trackers import Track
from fedloom.nn.build import parse_spec, split_specs


@dataclass(frozen=True)
class DataTable:
    """[data]: the graph, and its division into training, validation and test items."""

    dataset: str = setting(
        "cora",
        "a name (see `fedloom datasets`), a folder of tables, parties:FOLDER with one such folder "
        "for each party, or synthetic:key=value,...",
    )
    split: str = setting(
        "", 'shares: "20/40/40", "global 10/10/80", or "public" (empty = the dataset\'s default)'
    )
    inductive: bool = setting(False, "validation and test items are absent during training")
    flow: str = setting(
        "forward",
        "direction of messages along directed edges; both = the graph is undirected",
        choices=FLOWS,
    )
    public_split: int = setting(
        0, "number of the public split, if the dataset has several", at_least=0
    )


@dataclass(frozen=True)
class PartitionTable:
    """[partition]: how the graph is divided over clients. Other keys are the partitioner's."""

    name: str = setting(
        "louvain",
        "see `fedloom partitions`; if none is given, dirichlet for a set of graphs, and blocks for "
        "a synthetic graph of blocks",
    )
    clients: int = setting(10, "number of clients", at_least=1)
    cross_edges: str = setting(
        "auto",
        "whether clients know the edges between them; auto = if the method uses them",
        choices=("auto", "none", "known"),
    )
    seed: int = setting(-1, "seed of partition and split (-1 = the run's seed)", at_least=-1)


@dataclass(frozen=True)
class ModelTable:
    """[model]: the clients' models."""

    name: str = setting(
        "gcn", 'a spec such as "gcn" or "gcn-4x128"; several, separated by commas, are used in turn'
    )
    dropout: float = setting(
        0.5, "share of hidden units dropped in training", at_least=0, below=1, tune="0..0.8"
    )


@dataclass(frozen=True)
class Expectation:
    """[expect]: the expected result, for `make reproduce`. A run ignores it."""

    metric: str = setting("accuracy", "entry of the summary; the values here are in percent")
    at_least: float = setting(0.0, "lower bound of the mean over the seeds")
    at_most: float = setting(100.0, "upper bound of the mean over the seeds")
    seeds: int = setting(3, "number of seeds", at_least=1)
    minutes: float = setting(
        0.0, "approximate time of all seeds and Local's on two cores (0 = unknown)"
    )
    paper: float = setting(-1.0, "the paper's value in percent (-1 = none)")
    also: str = setting(
        "", 'other values that the paper prints for the same runs: "f1_macro 61.58, auc 79.4"'
    )
    source: str = setting("", "where the paper prints the value")


TABLES: dict[str, Any] = {
    "data": DataTable,
    "partition": PartitionTable,
    "model": ModelTable,
    "run": RunSettings,
    "adversary": AdversarySettings,
    "expect": Expectation,
}


@dataclass(frozen=True)
class Recipe:
    """A checked recipe.

    Attributes:
        method: The method's name, or the path of a method file.
        method_settings: The method's settings.
        options: The partitioner's own settings.
        given: The federation, if it is in memory. [data] and [partition] then say nothing.
    """

    data: DataTable
    partition: PartitionTable
    model: ModelTable
    run: RunSettings
    adversary: AdversarySettings
    expect: Expectation
    method: str
    method_settings: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    given: Federation | None = None

    def config(self) -> dict[str, Any]:
        """Returns all tables with every default, as the run folder keeps them.

        The result is itself a recipe, unless the federation is given.
        """
        method = make_method(self.method, self.method_settings)
        others = {
            "model": _values(self.model),
            "method": {"name": self.method, **method.settings()},
            "run": _values(self.run),
        }
        if self.adversary.clients:
            others["adversary"] = _values(self.adversary)
        if self.given is not None:
            return {"data": {**self.given.roster.about, "digest": self.given.digest}, **others}
        return {
            "data": {**_values(self.data), "split": self.split},
            "partition": {
                **_values(self.partition),
                "cross_edges": self.cross_edges,
                "seed": self.partition_seed,
                **partition_settings(self.partition.name),
                **self.options,
            },
            **others,
        }

    @property
    def name(self) -> str:
        """The default name of a folder: data, partition, method and model."""
        parts = (*self.task, Path(self.method).stem, self.model.name)
        return re.sub("[,:=]", "_", "-".join(parts))

    @property
    def task(self) -> tuple[str, str]:
        """The names of the data and of their partition, for the names of folders."""
        if self.given is None:
            partition = f"{self.partition.name}{self.partition.clients}"
            return Path(self.data.dataset).name.removesuffix(".safetensors"), partition
        about = self.given.roster.about
        by = about.get("partition") or "given"
        return Path(str(about["dataset"])).name, f"{by}{about['clients']}"

    @property
    def partition_seed(self) -> int:
        """The seed of partition and split."""
        return self.run.seed if self.partition.seed < 0 else self.partition.seed

    @property
    def cross_edges(self) -> str:
        """Whether clients know the edges between them: as set, else as the method needs."""
        if self.partition.cross_edges != "auto":
            return self.partition.cross_edges
        return (
            "known" if method_class(self.method, self.method_settings).uses_cross_edges else "none"
        )

    @property
    def split(self) -> str:
        """The split: as set, else the dataset's default."""
        usual = (
            catalogue()[self.data.dataset].split if self.data.dataset in catalogue() else "20/40/40"
        )
        return self.data.split or usual

    def federation(self) -> Federation:
        """Loads the graph and divides it, or loads the parties' graphs, unless they are given."""
        if self.given is not None:
            return self.given
        with threads(self.run.threads):  # more than one would wait for each other most of the time
            return self._parties() if self.data.dataset.startswith(PARTIES) else self._divided()

    def _divided(self) -> Federation:
        graph = load(self.data.dataset, public_split=self.data.public_split).with_flow(
            self.data.flow
        )
        return divide(
            graph,
            self.partition.clients,
            self.partition.name,
            self.partition_seed,
            cross_edges=self.cross_edges,  # type: ignore[arg-type]  # one of its choices
            split=self.split,
            inductive=self.data.inductive,
            options=self.options,
        )

    def _parties(self) -> Federation:
        federation = from_folders(
            party_folders(self.data.dataset),
            secure=self.run.secure,
            split=self.split,
            seed=self.partition_seed,
            inductive=self.data.inductive,
        )
        graphs = tuple(graph.with_flow(self.data.flow) for graph in federation.graphs)
        return replace(federation, graphs=graphs)

    def check(self, federation: Federation) -> None:
        """Raises a ConfigError if the method and the models do not fit the federation."""
        method = make_method(self.method, self.method_settings)
        agree_on_facts(
            method,
            self.method,
            federation.roster,
            self.model.name,
            self.model.dropout,
            self.run,
            self.adversary,
        )

    def execute(
        self,
        out: Path | None = None,
        callbacks: Given = None,
        *,
        resume: bool = False,
        federation: Federation | None = None,
        track: Track = (),
    ) -> Result:
        """Runs the recipe.

        Args:
            out: The run folder. None keeps the result in memory.
            callbacks: As in `fedloom.run`.
            resume: Continue the run in `out`.
            federation: The divided graph, if it is already there.
            track: As in `fedloom.run`.
        """
        config = self.config()  # a misspelt setting fails before the data are loaded
        return run(
            {"name": self.method, **self.method_settings},
            federation or self.federation(),
            model=self.model.name,
            dropout=self.model.dropout,
            settings=self.run,
            adversary=self.adversary,
            out=out,
            callbacks=callbacks,
            resume=resume,
            track=track,
            config=config,
        )


def _values(table: Any) -> dict[str, Any]:
    return {f.name: getattr(table, f.name) for f in fields(table)}


def read_tables(path: Path) -> dict[str, dict[str, Any]]:
    """Returns the tables of a TOML file, unchecked. Raises a DataError if it cannot be read."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise DataError(f"recipe: cannot read {str(path)!r} ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"recipe: {str(path)!r} is not TOML ({error})") from error


def to_toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns tables as the text of a TOML file, which `read_tables` reads back unchanged.

    Values are texts, numbers, true or false, and lists of these.
    """
    lines = {
        name: [f"{toml_key(key)} = {toml_value(value)}\n" for key, value in table.items()]
        for name, table in tables.items()
    }
    return "\n".join(f"[{toml_key(name)}]\n{''.join(of_table)}" for name, of_table in lines.items())


def toml_key(name: str) -> str:
    """Returns a key as TOML writes it, in quotes if it needs them."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml_value(name)


def toml_value(value: Any) -> str:
    """Returns a value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        text = json.dumps(value, ensure_ascii=False)
        return text.replace("\x7f", r"\u007f")  # TOML escapes this character, JSON does not
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    raise ConfigError(
        f"recipe: {value!r} cannot be written as TOML; "
        "valid: a text, a number, true or false, a list of these"
    )


def override(
    tables: dict[str, dict[str, Any]], assignments: Iterable[str]
) -> dict[str, dict[str, Any]]:
    """Returns a copy of the tables with assignments such as "method.lr=0.02" applied.

    Values are read as TOML. A value that is not TOML is a text.
    """
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
    """Reads a value as TOML writes it; returns the text itself if it is not TOML."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def make_recipe(tables: Mapping[str, Any], federation: Federation | None = None) -> Recipe:
    """Checks tables and returns the recipe.

    Every mistake is a ConfigError that names the table, the key and the valid values.

    Args:
        tables: The recipe's tables.
        federation: The data, if they are in memory. [data] and [partition] are then ignored.
    """
    if federation is not None:
        tables = {key: table for key, table in tables.items() if key not in ("data", "partition")}
    for name, content in tables.items():
        if name not in (*TABLES, "method"):
            raise unknown("table of a recipe:", name, (*TABLES, "method"))
        if not isinstance(content, Mapping):
            raise ConfigError(f"{name} is {content!r}, must be a table: [{name}]")
    given = {name: dict(tables.get(name, {})) for name in (*TABLES, "method")}
    method = given["method"].pop("name", "fedavg")
    if not isinstance(method, str):
        raise ConfigError(f"method.name is {method!r}, must be a text")
    cls = method_class(method, given["method"])
    require_unreserved(cls, method)
    method_fields = {f.name: f for f in fields(cls)}
    for key, value in given["method"].items():
        if key not in method_fields:
            raise unknown(f"setting of method {method!r}:", key, method_fields)
        given["method"][key] = check_setting(method_fields[key], value, "method")
    if str(given["data"].get("dataset", "")).startswith(PARTIES):
        given["partition"] = _given_partition(given["data"]["dataset"], given["partition"])
    else:
        given["partition"] = fitting_partition(given["data"], given["partition"])
    own = {f.name for f in fields(PartitionTable)}
    options = {k: given["partition"].pop(k) for k in list(given["partition"]) if k not in own}
    valid = partition_settings(str(given["partition"].get("name", PartitionTable.name)))
    for key in options:
        if key not in valid:
            raise unknown("setting in [partition]:", key, (*own, *valid))
    built = {name: table(name, TABLES[name], given[name]) for name in TABLES}
    for spec in split_specs(built["model"].name):
        parse_spec(spec)
    chosen_evaluation(cls, method, built["run"].evaluation)
    return Recipe(
        method=method, method_settings=given["method"], options=options, given=federation, **built
    )


def _given_partition(dataset: str, partition: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the [partition] of parties that have graphs of their own."""
    clients = len(party_folders(dataset))
    fixed = {"name": GIVEN, "clients": clients, "cross_edges": "none"}
    for key, value in fixed.items():
        if partition.get(key, value) not in (value, "auto"):
            raise ConfigError(
                f"partition.{key} is {partition[key]!r}, but {dataset!r} has {clients} parties "
                f"with graphs of their own; leave it out, or set {value!r}"
            )
    return {**partition, **fixed}


def fitting_partition(data: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the [partition] table, with a partition that fits the data if it names none.

    A set of graphs is divided by `dirichlet`. A synthetic graph of blocks is divided into them:
    each is a client. Everything else keeps the default. What a file of PyG contains is not known
    before it is read.

    Args:
        data: The [data] table.
        given: The [partition] table as given.
    """
    dataset = str(data.get("dataset", DataTable.dataset))
    if "name" in given:
        return dict(given)
    if is_set_of_graphs(dataset):
        return {"name": "dirichlet", **given}
    if blocks := re.match(r"synthetic[\w-]*:(?:.*,)?\s*blocks=(\d+)", dataset):
        return {"name": "blocks", "clients": int(blocks[1]), **given}
    return dict(given)


def default_partition(dataset: str) -> str:
    """Returns the partition of a dataset for which none is given."""
    chosen = fitting_partition({"dataset": dataset}, {})
    return str(chosen.get("name", PartitionTable.name))


def is_set_of_graphs(dataset: str) -> bool:
    """Returns whether a dataset is known to be a set of graphs, without reading it."""
    if dataset in catalogue():
        return catalogue()[dataset].task == "graph"
    path = Path(dataset).expanduser()
    generated = dataset.partition(":")[0] == "synthetic-graphs"
    return generated or is_graph_set_file(path) or is_graph_set_folder(path)


def table(name: str, cls: Any, given: Any) -> Any:
    """Returns a table of a TOML file as the dataclass that describes it.

    Raises a ConfigError that names the table, the key and the valid values.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(f"{name} is {given!r}, must be a table: [{name}]")
    known = {f.name: f for f in fields(cls)}
    for key in given:
        if key not in known:
            raise unknown(f"setting in [{name}]:", key, known)
    return cls(**{key: check_setting(known[key], value, name) for key, value in given.items()})
