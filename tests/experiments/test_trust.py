"""Python code that a file of another person names runs only if the user trusts the file.

The code writes a file when it is imported.
"""

import json
import re
import shutil
import sys
from types import SimpleNamespace

import pytest

import fedloom
from fedloom import cli
from fedloom.errors import ConfigError
from fedloom.experiments.embeddings import embed
from fedloom.experiments.recipe import to_toml
from fedloom.experiments.trust import code_in

METHOD = """
from dataclasses import dataclass
from pathlib import Path
from fedloom.methods.fedavg import FedAvg as Base

Path(MARK).touch()

@dataclass(frozen=True)
class Mine(Base):
    pass
"""
MODEL = """
from pathlib import Path
from torch_geometric.nn import GCN

Path(MARK).touch()

class Net(GCN):
    def __init__(self, in_channels, out_channels):
        super().__init__(in_channels, 8, 2, out_channels)
"""
SMALL = {
    "data": {"dataset": "synthetic:nodes=60,classes=3,features=8"},
    "partition": {"name": "random", "clients": 2},
    "model": {"name": "gcn-2x8"},
    "method": {"name": "fedavg", "rounds": 1},
}
NAMES = "names Python code, which would be executed with your rights: "


@pytest.fixture
def stranger(tmp_path, monkeypatch, capsys):
    """A stranger's files in the working folder, and what they have executed."""
    monkeypatch.chdir(tmp_path)
    mark = tmp_path / "executed"
    for name, code in (("mine.py", METHOD), ("net.py", MODEL)):
        (tmp_path / name).write_text(code.replace("MARK", repr(str(mark))))

    def ran():
        """Returns whether the code has run since the last call."""
        found = mark.exists()
        mark.unlink(missing_ok=True)
        return found

    def write(name, **tables):
        merged = {key: {**SMALL.get(key, {}), **table} for key, table in tables.items()}
        (tmp_path / name).write_text(to_toml({**SMALL, **merged}))
        return name

    def fedloom_command(*arguments):
        monkeypatch.setattr(sys, "argv", ["fedloom", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code or 0, capsys.readouterr().err

    return SimpleNamespace(ran=ran, write=write, command=fedloom_command, folder=tmp_path)


OF_METHOD, OF_MODEL = {"method": {"name": "mine.py"}}, {"model": {"name": "net.py:Net"}}


def refused_then_trusted(stranger, *arguments):
    """Asserts that a command executes nothing, says why, and works with --trust."""
    code, err = stranger.command(*arguments)
    assert (code, stranger.ran()) == (2, False), err
    assert NAMES in err
    assert re.search(r"(mine|net)\.py\b.*\. Read that code; then allow it with --trust", err)
    code, err = stranger.command(*arguments, "--trust")
    assert (code, stranger.ran()) == (0, True), err


@pytest.mark.parametrize("named", [OF_METHOD, OF_MODEL], ids=["method", "model"])
def test_run_of_a_recipe_that_names_code(stranger, named):
    refused_then_trusted(stranger, "run", stranger.write("recipe.toml", **named), "--out", "x")


def test_the_base_of_a_plug_in_counts_too(stranger):
    recipe = stranger.write("recipe.toml", method={"name": "fedgh", "base": "mine.py"})
    code, err = stranger.command("run", recipe, "--out", "x")
    assert (code, stranger.ran(), NAMES in err) == (2, False, True), err


def test_code_that_the_user_names_needs_no_trust(stranger):
    options = ("--method", "mine.py", "--model", "net.py:Net")
    code, err = stranger.command("run", stranger.write("recipe.toml"), *options, "--out", "x")
    assert (code, stranger.ran()) == (0, True), err
    # An option replaces what the recipe names.
    recipe = stranger.write("evil.toml", **OF_METHOD)
    code, err = stranger.command("run", recipe, "--method", "fedavg", "--out", "y")
    assert (code, stranger.ran()) == (0, False), err


def test_compare_of_a_grid_that_names_code(stranger):
    axes = {"methods": "mine.py", "seeds": 1, "clients": "2", "datasets": SMALL["data"]["dataset"]}
    tables = {"compare": axes, "method": {"rounds": 1}, "model": {}, "data": {}, "partition": {}}
    (stranger.folder / "grid.toml").write_text(to_toml(tables))
    options = ("--partition", "random", "--model", "gcn-2x8", "--jobs", "1", "--no-report")
    refused_then_trusted(stranger, "compare", "grid.toml", *options)


def test_tune_of_a_recipe_that_names_code(stranger):
    pytest.importorskip("optuna")
    recipe = stranger.write("recipe.toml", **OF_METHOD)
    refused_then_trusted(
        stranger, "tune", recipe, "--over", "method.lr", "--trials", "1", "--out", "study"
    )


@pytest.fixture
def run_folder(stranger):
    """A completed run of the stranger's method."""
    stranger.command("run", "--trust", stranger.write("recipe.toml", **OF_METHOD), "--out", "x")
    assert stranger.ran()
    return stranger.folder / "x"


def test_resume_of_a_folder_that_names_code(stranger, run_folder):
    (run_folder / "summary.json").unlink()
    shutil.copytree(run_folder, stranger.folder / "y")
    _, err = stranger.command("show", "x")
    assert "`fedloom resume x --trust`" in err
    assert not stranger.ran()
    with pytest.raises(ConfigError, match=NAMES):
        fedloom.resume("y")
    assert not stranger.ran()
    assert fedloom.resume("y", trust=True).summary["status"] == "completed"
    assert stranger.ran()
    refused_then_trusted(stranger, "resume", "x")


def test_resume_of_a_folder_whose_baselines_name_code(stranger):
    stranger.command("run", stranger.write("recipe.toml"), "--out", "x", "--baselines", "local")
    planned = stranger.folder / "x" / "baselines.json"
    (stranger.folder / "x" / "baselines" / "local" / "summary.json").unlink()
    recipes = json.loads(planned.read_text())
    recipes[0]["method"] = {"name": "mine.py", "rounds": 1}
    planned.write_text(json.dumps(recipes))
    refused_then_trusted(stranger, "resume", "x")


def test_predict_and_embeddings_of_a_folder_that_names_code(stranger, run_folder):
    for arguments in (("predict", "x", "--out", "p.csv"), ("predict", "x", "--client", "0")):
        refused_then_trusted(stranger, *arguments)
    model = run_folder / "models" / "best" / "0.safetensors"
    data = ("--data", SMALL["data"]["dataset"])
    refused_then_trusted(stranger, "predict", model, *data, "--out", "p.csv")
    for call in (
        lambda trust: fedloom.load_run("x", trust=trust).model("0"),
        lambda trust: fedloom.load_run("x", trust=trust).predict(),
        lambda trust: fedloom.load_model(model, trust=trust),
        lambda trust: embed("x", how="pca", trust=trust),
    ):
        with pytest.raises(ConfigError, match=NAMES):
            call(False)
        assert not stranger.ran()
        call(True)
        assert stranger.ran()


def test_reading_and_reporting_a_folder_executes_nothing(stranger, run_folder):
    for arguments in (("show", "x"), ("report", "x"), ("report", "x", "--embeddings")):
        code, err = stranger.command(*arguments)
        assert (code, stranger.ran()) == (0, False), err
    assert NAMES in err  # there are no embeddings
    assert fedloom.load_run("x").summary["status"] == "completed"
    assert not stranger.ran()
    stranger.command("report", "x", "--embeddings", "--trust")
    assert stranger.ran()


def test_tables_of_python_calls_are_read_with_trust_only(stranger):
    recipe, data = stranger.write("recipe.toml", **OF_MODEL), SMALL["data"]["dataset"]
    grid = stranger.folder / "grid.toml"
    grid.write_text(to_toml({"compare": {"models": "net.py:Net"}}))
    for call in (
        lambda trust: fedloom.compare("fedavg", data, tables=grid, seeds=1, trust=trust),
        lambda trust: fedloom.tune("fedavg", data, tables=recipe, trials=1, trust=trust),
    ):
        with pytest.raises(ConfigError, match=NAMES):
            call(False)
        assert not stranger.ran()


@pytest.mark.parametrize(
    ("tables", "found"),
    [
        ({"method": {"name": "fedavg"}}, []),
        ({"method": {"name": "a/b.py"}}, ["a/b.py"]),
        ({"method": {"x.py": {"lr": 1}}}, ["x.py"]),
        ({"model": {"name": "gcn, ../net.py:Net"}}, ["gcn, ../net.py:Net"]),
        ({"compare": {"models": ["gcn", "net.py/gat"]}}, ["net.py/gat"]),
        ({"data": {"class_names": ["x.py"]}}, []),
        ({"method": {"name": "not.pyx"}}, []),
    ],
)
def test_code_is_found_wherever_tables_may_name_it(tables, found):
    assert code_in(tables) == found
