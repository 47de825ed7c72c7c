"""What fedloom uses of Flower's internals is in one module, and a version without it is named."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fedloom.deploy import flower_internals

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "src" / "fedloom" / "deploy"
PUBLIC = {"flwr.app", "flwr.clientapp", "flwr.serverapp"}
# Imports the module with a name taken out of Flower.
WITHOUT = """
import functools, importlib, sys
module, *owners, name = sys.argv[1:]
delattr(functools.reduce(getattr, owners, importlib.import_module(module)), name)
from fedloom.cli import main
sys.argv = ["fedloom", "serve", "federation.toml", "--keys", "."]
main()
"""


def imported(path):
    """Returns the modules of Flower that a file imports names from."""
    nodes = ast.walk(ast.parse(path.read_text()))
    found = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    return {name for name in found if name.split(".")[0] == "flwr"}


def test_only_one_module_imports_from_flowers_internals():
    for path in sorted((ROOT / "src").rglob("*.py")):
        if path.name != "flower_internals.py":
            assert imported(path) <= PUBLIC, path
    assert not imported(DEPLOY / "flower_internals.py") <= PUBLIC


def test_no_other_module_uses_private_attributes_of_flowers_objects():
    for name in ("party_transport", "coordinator_transport", "apps", "superlink"):
        text = (DEPLOY / f"{name}.py").read_text()
        assert not re.findall(r"(?:_client|grid|metadata)\._\w+|__dict__|_base_url", text), name


def test_the_versions_are_those_of_the_package():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = extras["optional-dependencies"]["flower"]
    assert f"flwr{flower_internals.VERSIONS}" in needed


@pytest.mark.slow
@pytest.mark.parametrize(
    "missing",
    [
        ["flwr.supercore.fab", "Fab"],
        ["flwr.superlink.main", "create_app"],
        ["flwr.proto.fleet_pb2", "ActivateNodeRequest"],
        ["flwr.superlink.grid", "HttpGrid", "_runtime_client"],
        ["flwr.supernode.fleet_http_client", "FleetHttpClient", "PushObject"],
    ],
    ids=".".join,
)
def test_a_version_that_lacks_a_name_gets_one_line(missing, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *missing], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2
    text = " ".join(done.stderr.split())
    assert text.startswith("fedloom: Flower 1.")
    assert f"{'.'.join(missing[1:])}; this fedloom needs flwr{flower_internals.VERSIONS}" in text
    assert "pip install 'fedloom[flower]'" in text


@pytest.mark.parametrize(
    ("owner", "name"),
    [(owner, name) for owner, names in flower_internals.ATTRIBUTES.items() for name in names],
    ids=lambda given: given if isinstance(given, str) else given.__name__,
)
def test_each_attribute_is_checked(owner, name, monkeypatch):
    monkeypatch.setitem(flower_internals.ATTRIBUTES, owner, (f"{name}_gone",))
    with pytest.raises(flower_internals.ConfigError, match=f"has no .*{name}_gone; this fedloom"):
        flower_internals.check_attributes()
