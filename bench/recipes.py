"""Writes recipes/FAMILY/*.toml: one for each number that the five papers print for their own method and that can be run here.

What is run and what the papers print is taken from the files that make the tables (bench/fedstruct.py and so on), what we hold ourselves
to and how long it takes from the results that the repository keeps (docs/results-*.json). Recipes at the top of recipes/ are by hand.

python bench/recipes.py          (tests/test_recipes.py fails where a file on disk is not what this writes)
"""

import json
import math
import os
import textwrap
from collections.abc import Iterator
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

from fedloom.experiments.recipe import make_recipe, read_tables

ROOT = Path(__file__).resolve().parent.parent
FAMILIES = {
    "fedstruct": "FedStruct",
    "opfgl": "O-pFGL",
    "fedpg": "FedPG",
    "fedgkc": "FedGKC",
    "fedgh": "FedGH",
}
MARGIN = 2.0  # points below the kept result that are no failure: three seeds on another machine
# Floors that were set with the methods, closer than MARGIN; they stay.
FLOORS = {
    "fedstruct/cora-random10.toml": 79.0, "fedstruct/citeseer-random10.toml": 64.43, "fedstruct/photo-random10.toml": 89.93,
    "opfgl/cora-louvainplus10.toml": 77.0, "opfgl/cora-metisplus10.toml": 80.5, "opfgl/citeseer-louvainplus10.toml": 69.0,
    "opfgl/citeseer-metisplus10.toml": 69.5, "opfgl/pubmed-louvainplus10.toml": 83.2, "opfgl/pubmed-metisplus10.toml": 83.7,
}  # fmt: skip
Tables = dict[str, dict[str, Any]]
NAMES = {
    "citeseer": "CiteSeer",
    "pubmed": "PubMed",
    "cs": "CS",
    "imdb-binary": "IMDB-BINARY",
    "proteins": "PROTEINS",
    "nci1": "NCI1",
}


@dataclass(frozen=True)
class Number:
    """A printed number and the run that should give it.

    path: below recipes/. local: Local's recipe on the same federation. kept, label, local_label: docs/results-KEPT.json and the runs' names
    there (which may be missing). also: other printed numbers of the same run, {metric: percent}. minutes: where no kept run tells.
    """

    path: str
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
    def family(self) -> str:
        """The paper's folder; nothing at the top."""
        return self.path.rpartition("/")[0]

    @property
    def is_plain(self) -> bool:
        """Whether it is the method itself on a federation, not one of its variants."""
        data, given = self.tables.get("data", {}).get("dataset"), self.tables.get("partition", {})
        return self.path.endswith(
            f"/{file_name(data, given.get('name', ''), given.get('clients', 0))}"
        )


def kept_file(name: str) -> Path:
    """Where the repository keeps the results that bench/NAME.py made."""
    return ROOT / "docs" / f"results{name and '-'}{name}.json"


@cache
def kept_results(name: str) -> dict[str, list[dict[str, Any]]]:
    """docs/results-NAME.json (no name: results.json): {label: runs by seed}; empty if there is none."""
    path = kept_file(name)
    return json.loads(path.read_text()) if path.exists() else {}


def kept_runs(number: Number) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What the repository keeps of a number's runs, and of Local's beside it; empty where nothing is kept."""
    found = kept_results(number.kept)
    return found.get(number.label, []), found.get(number.local_label, [])


def file_name(data: str, partition: str, clients: int, variant: str = "") -> str:
    """dataset-partitionK[-variant].toml."""
    return f"{data}-{partition.replace('+', 'plus')}{clients}{variant and '-'}{variant}.toml"


def numbers() -> list[Number]:
    """All of them, by paper."""
    return [*_fedstruct(), *_opfgl(), *_fedpg(), *_fedgkc(), *_fedgh()]


def by_hand(path: Path) -> Number:
    """A recipe that is not written here: what its own [expect] says, with Local given as much training."""
    tables = read_tables(path)
    expect = make_recipe(tables).expect
    tables.pop("expect", None)
    method = tables.get("method", {})
    as_much = {key: method[key] for key in ("rounds", "epochs", "weight_decay") if key in method}
    data, fedavg = tables.get("data", {}).get("dataset", ""), method.get("name") == "fedavg"
    return Number(
        os.path.relpath(path.resolve(), ROOT / "recipes"), expect.source, expect.paper if expect.paper >= 0 else None, "", tables,
        {**tables, "method": {"name": "local", **as_much}, "run": {**tables.get("run", {}), "evaluation": ""}}, "",
        f"{data}/FedAvg" if fedavg else "", f"{data}/Local" if fedavg else "", expect.seeds, expect.metric, minutes=expect.minutes,
    )  # fmt: skip


# ---- FedStruct ----
_STRUCT_VARIANTS = {
    "FedStruct, HOP2VEC, pruned globally": "", "FedStruct, DEG": "deg", "FedStruct, FED*": "fed",
    "FedStruct, HOP2VEC, not pruned (-F)": "unpruned",
}  # fmt: skip
_STRUCT_PROTOCOL = (
    "Clients know the edges between them; 10/10/80 over all nodes; the common model at the best validation round, clients weighted by "
    "size. The paper: 10 runs, the last epoch."
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
        "fedstruct/minesweeper-random10.toml", "none: FedStruct has no such number (Minesweeper)", None,
        "Clients know the edges between them; the dataset's own first split.", tables, {**tables, "method": local}, "fedstruct",
        "", "", remark="Nothing was chosen here, see docs/results.md.", seeds=3,
    )  # fmt: skip


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
        remark = f"Pruned by the protocol, which validates better ({ours:.1f}) than the global rule of the paper's number ({theirs:.1f})."
    if data == "pubmed":
        remark = "The paper's settings; neither they nor Local's were chosen by validation."
        remark += (
            " After 20 hops nothing is 0: some 400 million numbers, which may not fit into memory."
            if variant == "unpruned"
            else ""
        )
    how = {"random": "at random", "louvain-cyclic": "by Louvain", "kmeans": "by k-means"}[partition]
    label = fedstruct.label(taken, column)
    form = row.removeprefix("FedStruct, ").removesuffix(", pruned globally")
    return Number(
        f"fedstruct/{file_name(*column, variant)}",
        f"FedStruct Table {2 if partition == 'random' else 6}, {form}, {_title(data)} {how}, {clients} clients",
        value, _STRUCT_PROTOCOL, fedstruct.recipe(taken, column), fedstruct.recipe("Local", column), "fedstruct",
        label, fedstruct.label("Local", column), seeds=fedstruct.seeds_of(label), remark=remark,
    )  # fmt: skip


# ---- O-pFGL ----
def _opfgl() -> Iterator[Number]:
    protocol = "One partition and split (seed 42), three training seeds, the authors' settings, 20/40/40; clients weighted by size."
    for partition in oneshot.PARTITIONS:
        columns = [(data, clients) for data in oneshot.DATASETS for clients in oneshot.CLIENTS]
        for (data, clients), said in zip(columns, oneshot.PAPER[partition]["O-pFGL"], strict=True):
            accuracy, f1 = oneshot.printed(said)
            rows = oneshot.methods(data, partition, clients)
            yield Number(
                f"opfgl/{file_name(data, partition, clients)}",
                f"O-pFGL's main table, 2-layer GCN, {_title(data)} by {partition}, {clients} clients",
                accuracy, protocol, rows["O-pFGL"], rows["Local"], "oneshot", f"{data} {partition} {clients} O-pFGL",
                f"{data} {partition} {clients} Local", seeds=oneshot.SEEDS, also={"f1_macro": f1},
            )  # fmt: skip
    for (data, partition), said in oneshot.PAPER_TEN.items():
        accuracy, f1 = oneshot.printed(said)
        ours, local = (
            {**tables, "model": {**tables["model"], "name": oneshot.TEN}}
            for tables in (
                oneshot.setting_of(data, partition, 10, name=name) for name in ("opfgl", "local")
            )
        )
        yield Number(
            f"opfgl/{file_name(data, partition, 10, 'ten-models')}",
            f"O-pFGL's table for different models, {_title(data)} by {partition}, 10 clients",
            accuracy, protocol, ours, local, "oneshot", f"{data} {partition} ten models O-pFGL", f"{data} {partition} ten models Local",
            seeds=oneshot.SEEDS, also={"f1_macro": f1}, remark="Settings are those for the GCN.",
        )  # fmt: skip


# ---- FedPG ----
_PG_NODES = (
    "20/40/40 per client and class; each client's own model at the best validation round, clients weighted by size; 40 rounds "
    "(the paper: 100)."
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
        f"fedpg/{file_name(data, 'metis', 10, variant)}", source, paper, _PG_NODES, fedpg.nodes(data, fedpg.MODELS[kind], method),
        fedpg.nodes(data, fedpg.MODELS[kind], fedpg.METHODS["Local"]), "fedpg", label, f"nodes {kind}, {data}: Local",
        remark="Settings chosen by validation on Cora and CiteSeer, see docs/results.md.",
    )  # fmt: skip


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
        "fedpg/physics-louvain10.toml", "FedPG Table VII, Physics by Louvain, 10 clients", fedpg.PAPER_PHYSICS, _PG_NODES, ours, local,
        "fedpg", "traffic, physics: FedPG", "traffic, physics: Local", remark="The table's model is not named; a GCN here.",
    )  # fmt: skip
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
        f"fedpg/{file_name(data.lower(), partition['name'], 10, variant)}", source, value,
        "80/10/10 (of the paper's 90 % for training a ninth validates); each client's own GIN at the best validation round; 30 rounds.",
        fedpg.graphs(data, partition, fedpg.GRAPH_METHODS["FedPG"]), fedpg.graphs(data, partition, fedpg.GRAPH_METHODS["Local"]),
        "fedpg", f"graphs {how}, {data}: FedPG", f"graphs {how}, {data}: Local", **more,
    )  # fmt: skip


# ---- FedGKC ----
_GKC_PROTOCOL = (
    "20/40/40 per client and class; each client's own model at the best validation round, plain mean over clients; 40 rounds "
    "(the paper's number is not given)."
)
_GKC_REMARK = "`self_weight` and `warmup` chosen by validation, see docs/results.md; the rest is the paper's or FGSSL's."
_GKC_PARTS = {"neither": "neither", "SMKD alone": "smkd", "KAMA alone": "kama"}


def _gkc(
    source: str, value: float, data: str, clients: int, models: tuple[str, ...], variant: str, labels: tuple[str, str], **part: Any
) -> Number:  # fmt: skip
    return Number(
        f"fedgkc/{file_name(data, 'louvain', clients, variant)}", f"FedGKC {source}, {_title(data)}, {clients} clients", value,
        _GKC_PROTOCOL, fedgkc.task(data, clients, models, {**fedgkc.OURS, **part}),
        fedgkc.task(data, clients, models, fedgkc.METHODS["Local"]),
        "fedgkc", *labels, metric=fedgkc.KEY, remark=_GKC_REMARK,
    )  # fmt: skip


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
        "Louvain, 20/40/40 per client and class; each client's own model at the best validation round, clients weighted by size; at most "
        "100 rounds, ended after 20 without a better validation accuracy."
    )
    for row, variant in {"FedGH + FedAvg": "", "FedGH + FedTAD": "fedtad"}.items():
        for data, values in fedgh.PAPER[row].items():
            for at, (clients, value) in enumerate(zip(fedgh.CLIENTS, values, strict=True)):
                table = (
                    "FedGH Tables 1 and 2" if not variant else "FedGH's table in front of FedTAD"
                )
                yield Number(
                    f"fedgh/{file_name(data, 'louvain', clients, variant)}", f"{table}, {_title(data)}, {clients} clients", value, protocol,
                    fedgh.task(data, clients, fedgh.METHODS[row]), fedgh.task(data, clients, fedgh.METHODS["Local"]), "fedgh",
                    f"{clients}, {data}: {row}", f"{clients}, {data}: Local",
                    also={} if variant else {"f1_weighted": fedgh.PAPER_F1[data][at]},
                    remark="No edges are added: validation says so, see docs/results.md.",
                )  # fmt: skip


# ---- files ----
def run_tables(number: Number) -> tuple[Tables, Tables]:
    """The recipe of a number and Local's, in the engine that the kept runs were made with (none said: the loop)."""
    ours, local = kept_runs(number)
    return _in_engine_of(ours, number.tables), _in_engine_of(local, number.local)


def _in_engine_of(runs: list[dict[str, Any]], tables: Tables) -> Tables:
    engine = runs[0].get("engine", "loop") if runs else "loop"
    return (
        tables
        if engine == "loop"
        else {**tables, "run": {**tables.get("run", {}), "engine": engine}}
    )


def expectation(number: Number) -> dict[str, Any]:
    """[expect] of a number's recipe."""
    ours, _ = kept_runs(number)
    values = [100 * s[number.metric] for s in ours if s.get(number.metric) is not None]
    floor = math.floor(10 * (mean(values) - MARGIN)) / 10 if values else 0.0
    given = {
        "metric": number.metric, "at_least": max(floor, FLOORS.get(number.path, 0.0)), "seeds": number.seeds, "minutes": _minutes(number),
        "paper": number.paper, "also": ", ".join(f"{metric} {value:g}" for metric, value in number.also.items()), "source": number.source,
    }  # fmt: skip
    return {key: value for key, value in given.items() if value not in (None, "")}


def _minutes(number: Number) -> float:
    """About how long the seeds take with two at a time, Local beside them; 0 if no kept run tells."""
    ours, local = kept_runs(number)
    if not ours or "seconds" not in ours[0]:
        return number.minutes
    one = mean(s["seconds"] for s in ours)
    if (
        number.family == "fedgh"
    ):  # kept runs shared their pseudo-graphs: what making them takes is in those that were first
        clients, _, data = number.label.partition(":")[0].partition(", ")
        alike = (f"{clients}, {data}:", *([f"parts, {data}:"] if clients == "10" else []))
        one = max(
            mean(s["seconds"] for s in runs)
            for label, runs in kept_results("fedgh").items()
            if label.startswith(alike)
        )
    return round(
        max(0.1, number.seeds * (one + (mean(s["seconds"] for s in local) if local else 0)) / 120),
        1,
    )


def text(number: Number) -> str:
    """The file of a number."""
    expect, command = expectation(number), f"recipes/{number.path}"
    ours, _ = kept_runs(number)
    held = "Not run over seeds yet: nothing is held to."
    if ours:
        score = 100 * mean(s[number.metric] for s in ours)
        why = (
            f"at_least is {MARGIN:g} points below"
            if number.path not in FLOORS
            else "at_least was set with the method"
        )
        held = f'Kept: {score:.1f} over {len(ours)} seeds (docs/results-{number.kept}.json, "{number.label}"); {why}.'
    minutes = (
        f"about {expect['minutes']:g} minutes on two cores"
        if expect["minutes"]
        else "time not known"
    )
    said = (
        f"{number.source}: {number.paper:g}"
        if number.paper
        else f"No printed number: {number.source.removeprefix('none: ')}"
    )
    said_of_it = [
        part for text in (said, number.protocol, number.remark) for part in textwrap.wrap(text, 136)
    ]
    commands = [f"    fedloom run {command} --baselines local",
                f"    python bench/reproduce.py {command}          ({number.seeds} seeds, Local beside them: {minutes})"]  # fmt: skip
    written = [*textwrap.wrap(held, 136), "Written by bench/recipes.py: change it there."]
    head = "\n".join(f"# {line}".rstrip() for line in (*said_of_it, "", *commands, "", *written))
    tables = {**run_tables(number)[0], "expect": expect}
    order = [
        name for name in ("data", "partition", "model", "method", "run", "expect") if name in tables
    ]
    return head + "\n" + "\n".join(f"[{name}]\n{_toml(tables[name])}" for name in order)


def _toml(table: dict[str, Any]) -> str:
    named = {"name": table["name"], **table} if "name" in table else table
    return "".join(
        f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in named.items()
    )


def _title(data: str) -> str:
    return NAMES.get(data, data.capitalize())


def main() -> None:
    """Writes all files, and removes those in the five folders that are no number's any more."""
    files = {ROOT / "recipes" / number.path: text(number) for number in numbers()}
    for family in FAMILIES:
        folder = ROOT / "recipes" / family
        folder.mkdir(exist_ok=True)
        for path in set(folder.glob("*.toml")) - files.keys():
            path.unlink()
    for path, content in files.items():
        path.write_text(content)
    print(f"{len(files)} recipes")


if __name__ == "__main__":
    main()
