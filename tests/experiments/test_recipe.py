"""Recipes: tables, mistakes, and configs that are recipes themselves."""

import json
import tomllib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.core.registry import make_method, method_names
from fedloom.data.datasets import catalogue
from fedloom.errors import ConfigError, DataError
from fedloom.experiments import recipe as recipes
from fedloom.experiments import run as runs
from fedloom.experiments.recipe import make_recipe, override, read_tables, to_toml

TOY = {
    "data": {"dataset": "synthetic:nodes=60,classes=3,features=4"},
    "partition": {"name": "random", "clients": 3},
}


# ---- assignments ----
@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("0.02", 0.02),
        ("1e-3", 1e-3),
        ("true", True),
        ('"quoted"', "quoted"),
        ("plain", "plain"),
        ("gcn-2x64", "gcn-2x64"),
        ("", ""),
        ("20/40/40", "20/40/40"),
        ("a=b", "a=b"),
        ("synthetic:nodes=50,classes=2", "synthetic:nodes=50,classes=2"),
        ("[1, 2]", [1, 2]),
    ],
)
def test_values_are_read_as_toml_or_as_text(text, value):
    got = override({}, [f"data.key={text}"])["data"]["key"]
    assert got == value
    assert type(got) is type(value)


def test_assignments_apply_in_order_to_a_copy():
    before = {"method": {"lr": 0.1, "epochs": 2}, "run": {"seed": 1}}
    after = override(before, ["method.lr=0.2", " method.lr = 0.3", "model.name=sage"])
    assert after == {
        "method": {"lr": 0.3, "epochs": 2},
        "run": {"seed": 1},
        "model": {"name": "sage"},
    }
    assert before == {"method": {"lr": 0.1, "epochs": 2}, "run": {"seed": 1}}


@pytest.mark.parametrize(
    "text", ["lr=3", "method.lr", "method.a.b=3", "method.=3", "=3", "", "meth od.lr=3"]
)
def test_a_malformed_assignment_is_refused_with_an_example(text):
    with pytest.raises(
        ConfigError, match=r"--set takes table\.key=value, for example method\.lr=0\.02; got"
    ):
        override({}, [text])


def test_an_assignment_to_a_value_that_is_not_a_table_is_refused():
    with pytest.raises(ConfigError, match="method"):
        make_recipe(override({"method": "fedavg"}, ["method.rounds=3"]))


# ---- files ----
def test_a_file_is_read_and_a_bad_one_is_named(tmp_path):
    (tmp_path / "good.toml").write_text('[method]\nname = "fedprox"\nmu = 0.5\n')
    assert read_tables(tmp_path / "good.toml") == {"method": {"name": "fedprox", "mu": 0.5}}
    (tmp_path / "bad.toml").write_text("[method\n")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    for name, words in [
        ("bad", "bad.toml' is not TOML.*line 1"),
        ("binary", "is not TOML"),
        ("missing", "cannot read .*missing.toml"),
    ]:
        with pytest.raises(DataError, match=words):
            read_tables(tmp_path / f"{name}.toml")
    with pytest.raises(DataError, match="cannot read"):
        read_tables(tmp_path)


# ---- mistakes ----
BAD = {
    "unknown table": (
        {"methods": {}},
        r"recipe: 'methods'. Did you mean 'method'\? Valid: adversary, data, expect, method, mod",
    ),
    "no table": ({"run": 3}, r"run is 3, must be a table: \[run\]"),
    "list of tables": ({"method": [{}]}, r"method is .*must be a table"),
    "method not a text": ({"method": {"name": 3}}, "method.name is 3, must be a text"),
    "unknown method": ({"method": {"name": "fedavgg"}}, "method 'fedavgg'. Did you mean 'fedavg'"),
    "unknown method setting": (
        {"method": {"learning_rate": 1}},
        "setting of method 'fedavg': 'learning_rate'.*lr",
    ),
    "setting of another method": (
        {"method": {"name": "fedavg", "mu": 1}},
        "setting of method 'fedavg': 'mu'",
    ),
    "method setting too small": ({"method": {"lr": 0}}, "method.lr is 0, must be a number above 0"),
    "method setting of another kind": (
        {"method": {"epochs": 1.5}},
        "method.epochs is 1.5, must be a whole number at least 1",
    ),
    "true is no number": (
        {"method": {"epochs": True}},
        "method.epochs is True, must be a whole number",
    ),
    "choice": (
        {"method": {"optimizer": "adamw"}},
        "method.optimizer is 'adamw', must be adam or sgd",
    ),
    "unknown data key": ({"data": {"name": "cora"}}, r"setting in \[data\]: 'name'.*dataset"),
    "data of another kind": (
        {"data": {"inductive": 1}},
        "data.inductive is 1, must be true or false",
    ),
    "public split": (
        {"data": {"public_split": -1}},
        "data.public_split is -1, must be a whole number at least 0",
    ),
    "unknown partition": (
        {"partition": {"name": "luvain"}},
        "partition 'luvain'. Did you mean 'louvain'",
    ),
    "unknown partition key": (
        {"partition": {"cleints": 3}},
        r"setting in \[partition\]: 'cleints'. Did you mean 'clients'\?.*delta",
    ),
    "option of another partition": (
        {"partition": {"name": "random", "delta": 3}},
        r"setting in \[partition\]: 'delta'",
    ),
    "no clients": (
        {"partition": {"clients": 0}},
        "partition.clients is 0, must be a whole number at least 1",
    ),
    "cross edges": (
        {"partition": {"cross_edges": "all"}},
        "partition.cross_edges is 'all', must be auto or none or known",
    ),
    "partition seed": (
        {"partition": {"seed": -2}},
        "partition.seed is -2, must be a whole number at least -1",
    ),
    "unknown model": ({"model": {"name": "gcnn"}}, "model 'gcnn'. Did you mean 'gcn'"),
    "one bad model of two": (
        {"model": {"name": "gcn, sagee"}},
        "model 'sagee'. Did you mean 'sage'",
    ),
    "dropout": (
        {"model": {"dropout": 1}},
        "model.dropout is 1, must be a number at least 0 and below 1",
    ),
    "unknown engine": ({"run": {"engine": "lop"}}, "run.engine 'lop'. Did you mean 'loop'"),
    "unknown run key": ({"run": {"sead": 1}}, r"setting in \[run\]: 'sead'. Did you mean 'seed'"),
    "participation": (
        {"run": {"participation": 0}},
        "run.participation is 0, must be a number above 0 and at most 1",
    ),
    "evaluation": (
        {"run": {"evaluation": "common"}},
        "run.evaluation for method 'fedavg': 'common'.*global, local",
    ),
    "not finite": ({"method": {"lr": float("inf")}}, "method.lr is inf, must be a number above 0"),
    "expectation": (
        {"expect": {"seeds": 0}},
        "expect.seeds is 0, must be a whole number at least 1",
    ),
    "unknown expectation": (
        {"expect": {"atleast": 0}},
        r"setting in \[expect\]: 'atleast'. Did you mean 'at_least'",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_mistake_names_table_key_and_valid_values(case):
    tables, words = BAD[case]
    with pytest.raises(ConfigError, match=words):
        make_recipe(tables)


# ---- what comes of it ----
def test_an_empty_recipe_is_fedavg_on_cora():
    recipe = make_recipe({})
    assert (
        recipe.method,
        recipe.data.dataset,
        recipe.partition.name,
        recipe.partition.clients,
    ) == ("fedavg", "cora", "louvain", 10)
    assert (recipe.model.name, recipe.run.seed, recipe.split) == ("gcn", 0, "20/40/40")
    assert recipe.config()["method"] == {"name": "fedavg", **make_method("fedavg", {}).settings()}


def test_partition_options_are_keys_of_the_partition_table():
    recipe = make_recipe(
        {"partition": {"name": "louvain", "clients": 4, "delta": 7, "resolution": 2}}
    )
    assert recipe.options == {"delta": 7, "resolution": 2}
    assert recipe.partition.clients == 4
    assert recipe.config()["partition"] == {
        "name": "louvain",
        "clients": 4,
        "cross_edges": "none",
        "seed": 0,
        "delta": 7,
        "resolution": 2,
    }


def test_the_config_has_the_partitioners_defaults():
    assert make_recipe({}).config()["partition"]["delta"] == 20


def test_the_partition_uses_the_runs_seed_by_default():
    def seed(**tables):
        return make_recipe(tables).partition_seed

    assert seed(run={"seed": 7}) == 7
    assert seed(run={"seed": 7}, partition={"seed": 3}) == 3
    assert seed(run={"seed": 7}, partition={"seed": 0}) == 0
    assert seed(run={"seed": 7}, partition={"seed": -1}) == 7


@pytest.mark.parametrize(
    "dataset", ["cora", "chameleon", "mutag", "ogbn-arxiv", "synthetic:nodes=50", "some/folder"]
)
def test_the_default_split_is_the_datasets(dataset):
    usual = catalogue()[dataset].split if dataset in catalogue() else "20/40/40"
    assert make_recipe({"data": {"dataset": dataset}}).split == usual
    assert (
        make_recipe({"data": {"dataset": dataset, "split": "global 10/10/80"}}).split
        == "global 10/10/80"
    )
    assert make_recipe({"data": {"dataset": dataset}}).config()["data"]["split"] == usual


def test_default_splits_differ():
    assert {
        make_recipe({"data": {"dataset": d}}).split for d in ("cora", "chameleon", "mutag")
    } == {"20/40/40", "48/32/20", "80/10/10"}


@pytest.mark.parametrize(
    "tables",
    [
        {},
        TOY,
        {"run": {"seed": 5, "participation": 0.5}},
        {"partition": {"name": "dirichlet", "alpha": 0.1, "seed": 9}, "run": {"seed": 2}},
        {
            "data": {"dataset": "mutag", "inductive": True},
            "model": {"name": "gin-3x32, gcn-3x32"},
            "method": {"name": "local", "rounds": 3},
        },
        *({"method": {"name": name}} for name in method_names()),
    ],
)
def test_a_config_is_a_recipe_with_the_same_config(tables):
    config = make_recipe(tables).config()
    assert make_recipe(config).config() == config
    assert make_recipe(json.loads(json.dumps(config))).config() == config  # as in a run folder
    lines = [
        f"[{name}]\n" + "\n".join(f"{k} = {json.dumps(v)}" for k, v in table.items())
        for name, table in config.items()
    ]
    assert make_recipe(tomllib.loads("\n".join(lines))).config() == config


def test_a_recipe_makes_the_federation_it_describes():
    recipe = make_recipe(
        {**TOY, "data": {**TOY["data"], "inductive": True, "split": "50/20/30"}, "run": {"seed": 4}}
    )
    federation = recipe.federation()
    assert federation.num_clients == 3
    assert federation.inductive
    assert federation.whole.num_nodes == 60
    assert federation.about["seed"] == federation.about["split_seed"] == 4
    assert (
        federation.about["split"],
        federation.about["partition"],
        federation.about["cross_edges"],
    ) == ("50/20/30", "random", "none")
    known = make_recipe(
        {**TOY, "partition": {**TOY["partition"], "cross_edges": "known"}}
    ).federation()
    assert all(graph.cross_edges.shape[1] for graph in known.graphs)


def test_execution_uses_every_table_and_keeps_the_config(tmp_path):
    recipe = make_recipe(
        {
            **TOY,
            "method": {"name": "fedprox", "rounds": 2, "mu": 0.5},
            "model": {"name": "sage-2x4", "dropout": 0.0},
            "run": {"seed": 3, "auc": True},
        }
    )
    entries = []
    result = recipe.execute(tmp_path / "x", lambda entry: entries.append(entry["round"]))
    assert entries == [1, 2]
    assert (
        result.summary["config"]
        == recipe.config()
        == json.loads((tmp_path / "x" / "config.json").read_text())
    )
    assert result.summary["seconds"]["load"] > 0
    assert result.summary["auc"] is not None
    assert (result.summary["method"], result.summary["model"], result.summary["seed"]) == (
        "fedprox",
        "sage-2x4",
        3,
    )
    assert "layers.0.neighbour" in result.final_models["server"]
    for table, key, value in (
        ("method", "mu", 0.0),
        ("model", "dropout", 0.5),
        ("partition", "seed", 9),
        ("run", "participation", 0.5),
    ):
        changed = make_recipe({**recipe.config(), table: {**recipe.config()[table], key: value}})
        assert changed.execute().summary["history_hash"] != result.summary["history_hash"], key
    again = recipe.execute(federation=recipe.federation())
    assert again.summary["history_hash"] == result.summary["history_hash"]
    assert again.folder is None


# ---- writing ----
SCALARS = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3), max_leaves=5)


@settings(max_examples=25)
@given(st.dictionaries(st.text(), st.dictionaries(st.text(), VALUES, max_size=4), max_size=4))
def test_written_tables_are_read_back_unchanged(tables):
    read = tomllib.loads(to_toml(tables))
    assert read == tables
    assert repr(read) == repr(tables)  # True is not 1, 1.0 is not 1


@pytest.mark.parametrize("name", method_names())
def test_a_recipe_with_all_defaults_is_written_and_read(name):
    config = make_recipe({**TOY, "method": {"name": name}}).config()
    assert make_recipe(tomllib.loads(to_toml(config))).config() == config


def test_a_value_that_toml_cannot_represent_is_refused():
    with pytest.raises(ConfigError, match=r"None cannot be written as TOML; valid: a text"):
        to_toml({"method": {"lr": None}})


def test_loading_and_the_choice_of_an_engine_use_the_threads_of_the_run(monkeypatch):
    used = []

    def noting(function):
        def noted(*args, **kwargs):
            used.append(torch.get_num_threads())
            return function(*args, **kwargs)

        return noted

    monkeypatch.setattr(recipes, "load", noting(recipes.load))
    monkeypatch.setattr(recipes, "divide", noting(recipes.divide))
    monkeypatch.setattr(runs, "choose_engine", noting(runs.choose_engine))
    before = torch.get_num_threads()
    table = {**TOY, "method": {"rounds": 1}, "run": {"threads": before + 1}}
    make_recipe(table).execute()
    assert used == [before + 1] * 3
    assert torch.get_num_threads() == before
