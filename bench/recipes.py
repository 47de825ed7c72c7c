"""Writes the recipes of the five papers: src/fedloom/experiments/recipes/PAPER.toml.

There is one entry for each number that a paper prints for its own method and that can be run here.
The runs and the printed numbers come from the files that make the tables (bench/fedstruct.py and so
on). The expected values and the times come from the results in the repository (bench/results).
recipes/examples.toml is written by hand.

python bench/recipes.py      (tests/experiments/test_recipes.py fails if a file is out of date)
"""

import json
import math
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import fedgh
import fedgkc
import fedpg
import fedstruct
import oneshot

from fedloom.experiments.recipe import make_recipe, toml_key, toml_value
from fedloom.experiments.recipe_files import RECIPES, Tables, find_tables

ROOT = Path(__file__).resolve().parent.parent
PAPERS = {
    "fedstruct": "FedStruct",
    "opfgl": "O-pFGL",
    "fedpg": "FedPG",
    "fedgkc": "FedGKC",
    "fedgh": "FedGH",
}
EXAMPLES = "examples"
BY_HAND = (EXAMPLES, "fedgram")  # files that are not written here
MARGIN = 2.0  # points below the kept result that are tolerated: three seeds on another machine
# Lower bounds that were set with the methods, closer than MARGIN.
FLOORS = {
    "fedstruct/cora-random-10": 79.0,
    "fedstruct/citeseer-random-10": 64.43,
    "fedstruct/photo-random-10": 89.93,
    "opfgl/cora-louvain-plus-10": 77.0,
    "opfgl/cora-metis-plus-10": 80.5,
    "opfgl/citeseer-louvain-plus-10": 69.0,
    "opfgl/citeseer-metis-plus-10": 69.5,
    "opfgl/pubmed-louvain-plus-10": 83.2,
    "opfgl/pubmed-metis-plus-10": 83.7,
}
TITLES = {
    "citeseer": "CiteSeer",
    "pubmed": "PubMed",
    "cs": "CS",
    "imdb-binary": "IMDB-BINARY",
    "proteins": "PROTEINS",
    "nci1": "NCI1",
}
WIDTH = 100
ABOUT = f"""
`expect.paper` is the printed number and `expect.source` its place. `expect.at_least` is {MARGIN:g}
points below the mean of the kept runs, or was set with the method. It is 0 if the recipe was not
run over seeds yet. `expect.minutes` is about how long all seeds and Local's take on two cores (0:
not known). A comment above an entry holds until the next one.
"""
TABLES = ("data", "partition", "model", "method", "run", "expect")


@dataclass(frozen=True)
class Number:
    """A printed number and the run that should give it.

    Attributes:
        name: PAPER/ENTRY, or the path of a recipe file.
        source: Where the paper prints the number.
        paper: The printed number in percent; None if there is none.
        protocol: How the run differs from the paper's, in words.
        tables: The recipe.
        local: Local's recipe on the same federation.
        kept: Names the file with kept results: bench/results/KEPT.json.
        label: The name of the runs there, which may be missing.
        local_label: The name of Local's runs there.
        also: Other printed numbers of the same run, {metric: percent}.
        remark: A further comment on the recipe.
        minutes: The time that the run takes, if no kept run says.
    """

    name: str
    source: str
    paper: float | None
    protocol: str
    tables: Tables
    local: Tables
    kept: str
    label: str
    local_label: str
    seeds: int = 3
    metric: str = "accuracy"
    also: dict[str, float] = field(default_factory=dict)
    remark: str = ""
    minutes: float = 0.0

    @property
    def group(self) -> str:
        """The paper; empty for a recipe file of a user."""
        return "" if self.name.endswith(".toml") else self.name.partition("/")[0]

    @property
    def is_plain(self) -> bool:
        """Whether this is the method itself on a federation, not one of its variants."""
        data, given = self.tables.get("data", {}).get("dataset"), self.tables.get("partition", {})
        plain = entry_name(str(data), given.get("name", ""), given.get("clients", 0))
        return self.name.endswith(f"/{plain}")


def kept_file(name: str) -> Path:
    """Returns the file with the results that bench/NAME.py made."""
    return ROOT / "bench" / "results" / f"{name or 'grid'}.json"


@cache
def kept_results(name: str) -> dict[str, list[dict[str, Any]]]:
    """Returns {label: runs by seed} of bench/results/NAME.json; empty if there is no such file."""
    path = kept_file(name)
    return json.loads(path.read_text()) if path.exists() else {}


def kept_runs(number: Number) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the kept runs of a number and of Local; empty lists if none are kept."""
    runs = kept_results(number.kept)
    return runs.get(number.label, []), runs.get(number.local_label, [])


def entry_name(data: str, partition: str, clients: int, variant: str = "") -> str:
    """Returns "dataset-partition-clients[-variant]"."""
    return f"{data}-{partition.replace('+', '-plus')}-{clients}{variant and '-'}{variant}"


def numbers() -> list[Number]:
    """Returns all numbers, by paper."""
    return [*_fedstruct(), *_opfgl(), *_fedpg(), *_fedgkc(), *_fedgh()]


def from_recipe(name: str) -> Number:
    """Returns the number of a recipe that is not written here: an example, or a user's file.

    Its [expect] table says what it should give. Local gets as much training.
    """
    tables = find_tables(name)
    expect = make_recipe(tables).expect
    tables.pop("expect", None)
    method = tables.get("method", {})
    as_much = {key: method[key] for key in ("rounds", "epochs", "weight_decay") if key in method}
    data, fedavg = tables.get("data", {}).get("dataset", ""), method.get("name") == "fedavg"
    local = {
        **tables,
        "method": {"name": "local", **as_much},
        "run": {**tables.get("run", {}), "evaluation": ""},
    }
    return Number(
        name,
        expect.source,
        expect.paper if expect.paper >= 0 else None,
        "",
        tables,
        local,
        "",
        f"{data}/FedAvg" if fedavg else "",
        f"{data}/Local" if fedavg else "",
        expect.seeds,
        expect.metric,
        minutes=expect.minutes,
    )


# ---- FedStruct ----
_STRUCT_VARIANTS = {
    "FedStruct, HOP2VEC, pruned globally": "",
    "FedStruct, DEG": "deg",
    "FedStruct, FED*": "fed",
    "FedStruct, HOP2VEC, not pruned (-F)": "unpruned",
}
_STRUCT_PROTOCOL = (
    "Clients know the edges between them; 10/10/80 over all nodes; the common model at the best "
    "validation round, clients weighted by size. The paper: 10 runs, the last epoch."
)


def _fedstruct() -> Iterator[Number]:
    for row, variant in _STRUCT_VARIANTS.items():
        for data, values in fedstruct.PRINTED[row].items():
            for (partition, clients), value in zip(fedstruct.PRINTED_FOR, values, strict=True):
                if value is not None:
                    yield _struct(row, variant, (data, partition, clients), value)
    column = ("minesweeper", "random", 10)
    tables = fedstruct.recipe("FedStruct, HOP2VEC, pruned globally", column)
    local = {
        "name": "local",
        "rounds": 100,
        "epochs": 1,
        **{key: tables["method"][key] for key in ("lr", "weight_decay")},
    }
    yield Number(
        "fedstruct/minesweeper-random-10",
        "none: FedStruct has no such number (Minesweeper)",
        None,
        "Clients know the edges between them; the dataset's own first split.",
        tables,
        {**tables, "method": local},
        "fedstruct",
        "",
        "",
        remark="Nothing was chosen here, see docs/results.md.",
        seeds=3,
    )


def _struct(row: str, variant: str, column: fedstruct.Column, value: float) -> Number:
    data, partition, clients = column
    taken, remark = row, ""
    if not variant and column == ("cora", "random", 10):
        taken = fedstruct.OURS
        validated = (
            kept_results("fedstruct").get(fedstruct.label(each, column), [])
            for each in (taken, row)
        )
        ours, theirs = (100 * mean(s["val_accuracy"] for s in runs) for runs in validated)
        remark = (
            f"Pruned by the protocol, which validates better ({ours:.1f}) than the global rule of "
            f"the paper's number ({theirs:.1f})."
        )
    if data == "pubmed":
        remark = "The paper's settings; neither they nor Local's were chosen by validation."
        remark += (
            " After 20 hops nothing is 0: some 400 million numbers, which may not fit into memory."
            if variant == "unpruned"
            else ""
        )
    how = {"random": "at random", "louvain-cyclic": "by Louvain", "kmeans": "by k-means"}[partition]
    label, table = fedstruct.label(taken, column), 2 if partition == "random" else 6
    form = row.removeprefix("FedStruct, ").removesuffix(", pruned globally")
    return Number(
        f"fedstruct/{entry_name(*column, variant)}",
        f"FedStruct Table {table}, {form}, {_title(data)} {how}, {clients} clients",
        value,
        _STRUCT_PROTOCOL,
        fedstruct.recipe(taken, column),
        fedstruct.recipe("Local", column),
        "fedstruct",
        label,
        fedstruct.label("Local", column),
        seeds=fedstruct.seeds_of(label),
        remark=remark,
    )


# ---- O-pFGL ----
def _opfgl() -> Iterator[Number]:
    protocol = (
        "One partition and split (seed 42), three training seeds, the authors' settings, 20/40/40; "
        "clients weighted by size."
    )
    for partition in oneshot.PARTITIONS:
        columns = [(data, clients) for data in oneshot.DATASETS for clients in oneshot.CLIENTS]
        of_paper = oneshot.PAPER[partition]["O-pFGL"]
        for (data, clients), printed in zip(columns, of_paper, strict=True):
            accuracy, f1 = oneshot.printed(printed)
            where = f"{_title(data)} by {partition}, {clients} clients"
            rows = oneshot.methods(data, partition, clients)
            yield Number(
                f"opfgl/{entry_name(data, partition, clients)}",
                f"O-pFGL's main table, 2-layer GCN, {where}",
                accuracy,
                protocol,
                rows["O-pFGL"],
                rows["Local"],
                "oneshot",
                f"{data} {partition} {clients} O-pFGL",
                f"{data} {partition} {clients} Local",
                seeds=oneshot.SEEDS,
                also={"f1_macro": f1},
            )
    for (data, partition), printed in oneshot.PAPER_TEN.items():
        accuracy, f1 = oneshot.printed(printed)
        ours, local = (
            {**tables, "model": {**tables["model"], "name": oneshot.TEN}}
            for tables in (
                oneshot.setting_of(data, partition, 10, name=name) for name in ("opfgl", "local")
            )
        )
        yield Number(
            f"opfgl/{entry_name(data, partition, 10, 'ten-models')}",
            f"O-pFGL's table for different models, {_title(data)} by {partition}, 10 clients",
            accuracy,
            protocol,
            ours,
            local,
            "oneshot",
            f"{data} {partition} ten models O-pFGL",
            f"{data} {partition} ten models Local",
            seeds=oneshot.SEEDS,
            also={"f1_macro": f1},
            remark="Settings are those for the GCN.",
        )


# ---- FedPG ----
_PG_NODES = (
    "20/40/40 per client and class; each client's own model at the best validation round, clients "
    "weighted by size; 40 rounds (the paper: 100)."
)
_PG_PARTS = {
    "no RF context": "no-context",
    "no margin": "no-margin",
    "not personal": "not-personal",
}


def _pg_nodes(
    data: str,
    source: str,
    paper: float | None,
    label: str,
    variant: str = "",
    kind: str = "GAMLP",
    **settings: Any,
) -> Number:
    method = {**fedpg.METHODS["FedPG"], **settings}
    return Number(
        f"fedpg/{entry_name(data, 'metis', 10, variant)}",
        source,
        paper,
        _PG_NODES,
        fedpg.nodes(data, fedpg.MODELS[kind], method),
        fedpg.nodes(data, fedpg.MODELS[kind], fedpg.METHODS["Local"]),
        "fedpg",
        label,
        f"nodes {kind}, {data}: Local",
        remark="Settings chosen by validation on Cora and CiteSeer, see docs/results.md.",
    )


def _fedpg() -> Iterator[Number]:
    for data, value, noisy in zip(
        fedpg.DATASETS, fedpg.PAPER["FedPG"], fedpg.PAPER["FedPG, 10 % noise"], strict=True
    ):
        where = f"{_title(data)} by Metis, 10 clients"
        yield _pg_nodes(
            data, f"FedPG Table V, GAMLP, {where}", value, f"nodes GAMLP, {data}: FedPG"
        )
        label = f"parts, {data}: 10 % noise"
        yield _pg_nodes(
            data,
            f"FedPG Table V, GAMLP, 10 % noise, {where}",
            noisy,
            label,
            "noise10",
            **fedpg.PARTS["10 % noise"],
        )
    for row, values in fedpg.PAPER_PARTS.items():
        for data, value in zip(fedpg.PAPER_PARTS_ON, values, strict=True):
            source = f"FedPG Table X, {row}, {_title(data)} by Metis, 10 clients"
            yield _pg_nodes(
                data, source, value, f"parts, {data}: {row}", _PG_PARTS[row], **fedpg.PARTS[row]
            )
    source = "none: FedPG prints five architectures on arxiv and Flickr only (Table VI)"
    yield _pg_nodes("cora", source, None, "nodes five, cora: FedPG", "five", "five")
    ours, local = (
        fedpg.nodes("physics", fedpg.MODELS["GCN"], fedpg.METHODS[row], "louvain")
        for row in ("FedPG", "Local")
    )
    yield Number(
        "fedpg/physics-louvain-10",
        "FedPG Table VII, Physics by Louvain, 10 clients",
        fedpg.PAPER_PHYSICS,
        _PG_NODES,
        ours,
        local,
        "fedpg",
        "traffic, physics: FedPG",
        "traffic, physics: Local",
        remark="The table's model is not named; a GCN here.",
    )
    for data in fedpg.GRAPHS:
        at_half, iid, auc = fedpg.PAPER_GRAPHS["FedPG"][data]
        yield _pg_graphs(data, "iid", {"name": "uniform"}, iid, also={"auc": auc})
        for alpha, value in {**fedpg.PAPER_DIRICHLET[data], "0.5": at_half}.items():
            yield _pg_graphs(data, alpha, {"name": "dirichlet", "alpha": float(alpha)}, value)
    yield _pg_graphs(
        "COLLAB", "0.5", {"name": "dirichlet", "alpha": 0.5}, None, seeds=1, minutes=240
    )


def _pg_graphs(
    data: str, how: str, partition: dict[str, Any], value: float | None, **more: Any
) -> Number:
    variant, spread = ("", "uniformly") if how == "iid" else (f"alpha{how}", f"by Dirichlet {how}")
    source = (
        f"FedPG's table of graph tasks, {data} {spread}, 10 clients"
        if value
        else "none: FedPG's value for COLLAB is not at hand"
    )
    return Number(
        f"fedpg/{entry_name(data.lower(), partition['name'], 10, variant)}",
        source,
        value,
        "80/10/10 (of the paper's 90 % for training a ninth validates); each client's own GIN at "
        "the best validation round; 30 rounds.",
        fedpg.graphs(data, partition, fedpg.GRAPH_METHODS["FedPG"]),
        fedpg.graphs(data, partition, fedpg.GRAPH_METHODS["Local"]),
        "fedpg",
        f"graphs {how}, {data}: FedPG",
        f"graphs {how}, {data}: Local",
        **more,
    )


# ---- FedGKC ----
_GKC_PROTOCOL = (
    "20/40/40 per client and class; each client's own model at the best validation round, plain "
    "mean over clients; 40 rounds (the paper's number is not given)."
)
_GKC_REMARK = (
    "`self_weight` and `warmup` chosen by validation, see docs/results.md; the rest is the paper's "
    "or FGSSL's."
)
_GKC_PARTS = {"neither": "neither", "SMKD alone": "smkd", "KAMA alone": "kama"}


def _gkc(
    source: str,
    value: float,
    data: str,
    clients: int,
    models: tuple[str, ...],
    variant: str,
    labels: tuple[str, str],
    **part: Any,
) -> Number:
    return Number(
        f"fedgkc/{entry_name(data, 'louvain', clients, variant)}",
        f"FedGKC {source}, {_title(data)}, {clients} clients",
        value,
        _GKC_PROTOCOL,
        fedgkc.task(data, clients, models, {**fedgkc.OURS, **part}),
        fedgkc.task(data, clients, models, fedgkc.METHODS["Local"]),
        "fedgkc",
        *labels,
        metric=fedgkc.KEY,
        remark=_GKC_REMARK,
    )


def _fedgkc() -> Iterator[Number]:
    for (deal, clients), rows in fedgkc.PAPER.items():
        source = "Table II, five architectures" if deal == "A" else "Table III, five scales"
        for data, value in zip(fedgkc.DATASETS, rows["FedGKC"], strict=True):
            labels = (f"{deal} {clients}, {data}: FedGKC", f"{deal} {clients}, {data}: Local")
            yield _gkc(
                source,
                value,
                data,
                clients,
                fedgkc.DEALS[deal],
                "" if deal == "A" else "scales",
                labels,
            )
    for data, value in zip(fedgkc.ONE_MODEL_ON, fedgkc.PAPER_ONE_MODEL["FedGKC"], strict=True):
        labels = (f"one model, {data}: FedGKC", f"one model, {data}: Local")
        yield _gkc("Table IV, one architecture", value, data, 10, ("gcn-2x64",), "gcn", labels)
    for clients, parts in fedgkc.PAPER_PARTS.items():
        for row, variant in _GKC_PARTS.items():
            for data, value in zip(fedgkc.PARTS_ON, parts[row], strict=True):
                label = (
                    f"parts, {data}: {row}" if clients == 10 else f"parts {clients}, {data}: {row}"
                )
                labels = (label, f"A {clients}, {data}: Local")
                yield _gkc(
                    f"Table V, {row}",
                    value,
                    data,
                    clients,
                    fedgkc.DEALS["A"],
                    variant,
                    labels,
                    **fedgkc.PARTS[row],
                )


# ---- FedGH ----
def _fedgh() -> Iterator[Number]:
    protocol = (
        "Louvain, 20/40/40 per client and class; each client's own model at the best validation "
        "round, clients weighted by size; at most 100 rounds, ended after 20 without a better "
        "validation accuracy."
    )
    for row, variant in {"FedGH + FedAvg": "", "FedGH + FedTAD": "fedtad"}.items():
        for data, values in fedgh.PAPER[row].items():
            for at, (clients, value) in enumerate(zip(fedgh.CLIENTS, values, strict=True)):
                table = (
                    "FedGH Tables 1 and 2" if not variant else "FedGH's table in front of FedTAD"
                )
                yield Number(
                    f"fedgh/{entry_name(data, 'louvain', clients, variant)}",
                    f"{table}, {_title(data)}, {clients} clients",
                    value,
                    protocol,
                    fedgh.task(data, clients, fedgh.METHODS[row]),
                    fedgh.task(data, clients, fedgh.METHODS["Local"]),
                    "fedgh",
                    f"{clients}, {data}: {row}",
                    f"{clients}, {data}: Local",
                    also={} if variant else {"f1_weighted": fedgh.PAPER_F1[data][at]},
                    remark="No edges are added: validation says so, see docs/results.md.",
                )


# ---- files ----
def run_tables(number: Number) -> tuple[Tables, Tables]:
    """Returns the recipe of a number and Local's, in the engine that made the kept runs.

    The default engine is the loop.
    """
    ours, local = kept_runs(number)
    return _in_engine_of(ours, number.tables), _in_engine_of(local, number.local)


def _in_engine_of(runs: list[dict[str, Any]], tables: Tables) -> Tables:
    engine = runs[0].get("engine", "loop") if runs else "loop"
    if engine == "loop":
        return tables
    return {**tables, "run": {**tables.get("run", {}), "engine": engine}}


def expectation(number: Number) -> dict[str, Any]:
    """Returns the [expect] table of a number."""
    ours, _ = kept_runs(number)
    values = [100 * s[number.metric] for s in ours if s.get(number.metric) is not None]
    floor = math.floor(10 * (mean(values) - MARGIN)) / 10 if values else 0.0
    given = {
        "metric": number.metric,
        "at_least": max(floor, FLOORS.get(number.name, 0.0)),
        "seeds": number.seeds,
        "minutes": _minutes(number),
        "paper": number.paper,
        "also": ", ".join(f"{metric} {value:g}" for metric, value in number.also.items()),
        "source": number.source,
    }
    return {key: value for key, value in given.items() if value not in (None, "")}


def _minutes(number: Number) -> float:
    """Returns about how long all seeds and Local's take, two at a time; 0 if no kept run says."""
    ours, local = kept_runs(number)
    if not ours or "seconds" not in ours[0]:
        return number.minutes
    one = mean(s["seconds"] for s in ours)
    if number.group == "fedgh":
        # The kept runs shared their pseudo-graphs. Only the runs that came first include the time
        # that it takes to make them.
        clients, _, data = number.label.partition(":")[0].partition(", ")
        alike = (f"{clients}, {data}:", *([f"parts, {data}:"] if clients == "10" else []))
        one = max(
            mean(s["seconds"] for s in runs)
            for label, runs in kept_results("fedgh").items()
            if label.startswith(alike)
        )
    of_local = mean(s["seconds"] for s in local) if local else 0
    return round(max(0.1, number.seeds * (one + of_local) / 120), 1)


def resolved(number: Number) -> Tables:
    """Returns the tables of a number's entry, [expect] included."""
    return {**run_tables(number)[0], "expect": expectation(number)}


def common_tables(recipes: Sequence[Tables]) -> Tables:
    """Returns the base of recipes: keys that all of them have, with the value of most of them.

    Dataset, partition and number of clients are in the base only if all recipes share them. They
    are in an entry's name, so the entry should show them.
    """
    base: Tables = {}
    for table in TABLES:
        for key in recipes[0].get(table, {}):
            if not all(key in tables.get(table, {}) for tables in recipes):
                continue
            values = Counter(json.dumps(tables[table][key]) for tables in recipes)
            value, count = values.most_common(1)[0]
            shown = (table, key) in (
                ("data", "dataset"),
                ("partition", "name"),
                ("partition", "clients"),
            )
            if count == len(recipes) or (not shown and 2 * count > len(recipes)):
                base.setdefault(table, {})[key] = json.loads(value)
    return base


def text(paper: str, of_paper: Sequence[Number]) -> str:
    """Returns the content of a paper's file."""
    recipes = {number.name: resolved(number) for number in of_paper}
    base = common_tables(list(recipes.values()))
    first = next((n.name for n in of_paper if n.is_plain), of_paper[0].name)
    head = [
        f"{PAPERS[paper]}: recipes for the numbers that the paper prints for its method.",
        "",
        f"    fedloom run {first} --baselines local",
        f"    python bench/reproduce.py {first}",
        "",
        _filled(ABOUT),
        "",
        "Written by bench/recipes.py: change it there.",
    ]
    parts = [_comment("\n".join(head)), f"[base]\n{_lines(base)}"]
    remarks: dict[str, set[str]] = {}
    for number in of_paper:
        remarks.setdefault(number.protocol, set()).add(number.remark)
    above = ""
    for number in of_paper:
        shared = len(remarks[number.protocol]) == 1
        about = _filled(f"{number.protocol} {number.remark if shared else ''}")
        own_about = [] if shared else [_filled(number.remark)]
        own = {
            table: {k: v for k, v in values.items() if not _same(base.get(table, {}), k, v)}
            for table, values in recipes[number.name].items()
        }
        entry = toml_key(number.name.partition("/")[2])
        inside = _comment("\n".join([*own_about, _kept(number)]))
        outside = "" if about == above else _comment(about)
        above = about
        parts.append(f"{outside}[entry.{entry}]\n{inside}{_lines(own)}")
    return "\n".join(parts)


def _same(base: dict[str, Any], key: str, value: Any) -> bool:
    """Returns whether the base has the value, of the same type."""
    return key in base and json.dumps(base[key]) == json.dumps(value)


def _filled(paragraph: str) -> str:
    return "\n".join(textwrap.wrap(" ".join(paragraph.split()), WIDTH - 2))


def _comment(lines: str) -> str:
    return "".join(f"# {line}".rstrip() + "\n" for line in lines.strip("\n").splitlines())


def _kept(number: Number) -> str:
    """Returns what the kept runs gave."""
    ours, _ = kept_runs(number)
    if not ours:
        return ""
    score = 100 * mean(s[number.metric] for s in ours)
    floor = "; at_least was set with the method" if number.name in FLOORS else ""
    where = f'bench/results/{number.kept or "grid"}.json, "{number.label}"'
    return _filled(f"Kept: {score:.1f} over {len(ours)} seeds ({where}){floor}.")


def _lines(tables: Tables) -> str:
    """Returns tables as keys of a TOML table: a line each if it fits, else a line per key."""
    lines = []
    for name in TABLES:
        values = tables.get(name, {})
        named = {"name": values["name"], **values} if "name" in values else values
        keys = [f"{toml_key(key)} = {toml_value(value)}" for key, value in named.items()]
        one = f"{name} = {{{', '.join(keys)}}}"
        lines += [one] if len(keys) > 1 and len(one) <= WIDTH else [f"{name}.{k}" for k in keys]
    return "".join(f"{line}\n" for line in lines)


def _title(data: str) -> str:
    return TITLES.get(data, data.capitalize())


def files() -> dict[Path, str]:
    """Returns {path: content} of all files that are written here."""
    everything = numbers()
    return {
        RECIPES / f"{paper}.toml": text(paper, [n for n in everything if n.group == paper])
        for paper in PAPERS
    }


def main() -> None:
    """Writes all files."""
    RECIPES.mkdir(exist_ok=True)
    for path, content in files().items():
        path.write_text(content)
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
