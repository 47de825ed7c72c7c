"""Settings of a method and of a run are kept apart, also where both have the same name."""

import pytest

import fedloom
from fedloom.core.registry import make_method
from fedloom.errors import ConfigError
from fedloom.experiments.recipe import make_recipe
from fedloom.experiments.run import run
from fedloom.experiments.settings import RunSettings

MODEL = "gcn-2x8"
SOURCE = '''"""Mine: FedAvg with another setting.

What travels: as in FedAvg.
"""
from dataclasses import dataclass

from fedloom.api import FedAvg, setting


@dataclass(frozen=True)
class Mine(FedAvg):
    """Mine."""

    {name}: int = setting(7, "its own")
'''
TOY = {
    "data": {"dataset": "synthetic:nodes=60,classes=3,features=4", "split": "50/20/30"},
    "partition": {"name": "random", "clients": 3},
    "model": {"name": MODEL},
}


@pytest.fixture
def method_file(tmp_path):
    """Returns a function that writes a method file with a setting of the given name."""

    def write(name):
        path = tmp_path / "mine.py"
        path.write_text(SOURCE.format(name=name))
        return str(path)

    return write


def both(result):
    config = result.summary["config"]
    return config["method"]["patience"], config["run"]["patience"]


def test_an_option_that_method_and_run_have_is_refused(method_file, node_federation):
    mine = method_file("patience")
    for method in (mine, {"name": mine}, make_method(mine, {})):
        with pytest.raises(ConfigError, match="patience is a setting of method") as caught:
            run(method, node_federation, model=MODEL, patience=3)
        assert "settings=fedloom.RunSettings(patience=...)" in str(caught.value)
        assert '"patience": ...}' in str(caught.value)


def test_a_settings_object_and_a_method_object_keep_both(method_file, node_federation):
    mine = make_method(method_file("patience"), {"patience": 7, "rounds": 1})
    result = run(mine, node_federation, model=MODEL, settings=RunSettings(patience=3))
    assert both(result) == (7, 3)


def test_a_settings_object_and_a_method_table_keep_both(method_file, node_federation):
    table = {"name": method_file("patience"), "patience": 9, "rounds": 1}
    result = fedloom.run(table, node_federation, model=MODEL, settings=RunSettings(patience=3))
    assert both(result) == (9, 3)


def test_other_options_can_be_combined_with_a_settings_object(method_file, node_federation):
    settings = RunSettings(patience=3)
    mine = method_file("patience")
    result = run(mine, node_federation, model=MODEL, settings=settings, rounds=1, seed=2)
    assert both(result) == (7, 3)
    assert result.summary["config"]["run"]["seed"] == 2


def test_a_recipe_keeps_both(method_file, tmp_path):
    mine = {"name": method_file("patience"), "patience": 7, "rounds": 1}
    recipe = make_recipe({**TOY, "method": mine, "run": {"patience": 3}})
    assert both(recipe.execute()) == (7, 3)
    assert both(recipe.execute(tmp_path / "x")) == (7, 3)


def test_early_stopping_follows_the_run_not_the_method(method_file):
    mine = {"name": method_file("patience"), "patience": 50, "rounds": 30, "lr": 1e-9}
    stopped = make_recipe({**TOY, "method": mine, "run": {"patience": 2}}).execute()
    assert stopped.summary["rounds"] == 3


@pytest.mark.parametrize("name", ["dropout", "model", "out", "track", "federation", "name"])
def test_a_setting_with_a_reserved_name_is_refused_everywhere(name, method_file, node_federation):
    words = f"its setting '{name}' has a reserved name; rename it"
    mine = method_file(name)
    with pytest.raises(ConfigError, match=words):
        run(mine, node_federation, rounds=1)
    with pytest.raises(ConfigError, match=words):
        run(make_method(mine, {}), node_federation)
    with pytest.raises(ConfigError, match=words):
        make_recipe({**TOY, "method": {"name": mine, "rounds": 1}})


def test_a_table_without_a_name_is_refused(node_federation):
    with pytest.raises(ConfigError, match=r"method\.name is None, must be a text"):
        run({"lr": 0.1}, node_federation)
