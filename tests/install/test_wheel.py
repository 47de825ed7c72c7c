"""The wheel has all its files, and works in fresh environments without extras and constraints."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tests.documents import ROOT
from tests.install.environments import (
    Environment,
    build_wheel,
    debian,
    find_python,
    oldest,
    virtual_environment,
)
from tests.install.requirements import DEPENDENCIES, PROJECT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
RECIPE = "examples/synthetic-5-fedavg"
COMPARISON = (
    "compare --methods fedavg,fedprox --dataset synthetic:nodes=300 --clients 3 --rounds 3 "
    "--seeds 2 --out comparison"
)
VERSIONS = """
import json, platform, fedloom
from importlib.metadata import version
names = {names}
print(json.dumps([fedloom.__file__, platform.python_version(), {{n: version(n) for n in names}}]))
"""
# Compiles every file of the package. An import of fedloom alone imports almost nothing.
COMPILE = """
import fedloom, pathlib, platform
for path in pathlib.Path(fedloom.__file__).parent.rglob("*.py"):
    compile(path.read_text(), str(path), "exec")
print(platform.python_version())
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def fedloom(environment: Environment, line: str, code: int = 0) -> str:
    """Runs `fedloom` in an environment. Returns what it prints."""
    done = environment.run("fedloom", *line.split())
    shown = f"fedloom {line}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert done.returncode == code, shown
    assert "Warning" not in done.stderr, shown
    if code == 0:
        return done.stdout
    assert re.fullmatch(r"fedloom: .+\n", done.stderr), shown
    return done.stderr


def start(environment: Environment) -> None:
    """Runs the commands that need no PyTorch."""
    assert fedloom(environment, "--version") == f"fedloom {PROJECT['version']}\n"
    assert "Federated graph learning" in fedloom(environment, "--help")
    assert "--clients" in fedloom(environment, "run --help")
    assert "--no-such-option" in fedloom(environment, "run --no-such-option", code=2)
    assert "--rounds" in fedloom(environment, "run --rounds many", code=2)
    assert "Did you mean 'run'?" in fedloom(environment, "runn", code=2)


def report(environment: Environment) -> None:
    """Makes the report of the folder `comparison`."""
    fedloom(environment, "report comparison --out report.html")
    page = (environment.work / "report.html").read_text()
    assert "fedprox" in page
    assert "<script" in page


def use(environment: Environment) -> dict[str, str]:
    """Uses the installed package as its user does. Returns the versions that are installed."""
    names = [each.name for each in DEPENDENCIES]
    shown = environment.run("python", "-c", VERSIONS.format(names=names))
    assert shown.returncode == 0, shown.stderr
    where, python, versions = json.loads(shown.stdout)
    assert "site-packages" in where

    start(environment)
    assert RECIPE in fedloom(environment, "recipes")
    fedloom(environment, f"run {RECIPE} --out run")
    summary = json.loads((environment.work / "run" / "summary.json").read_text())
    assert summary["accuracy"] > 0.7
    fedloom(environment, f"run {RECIPE} --engine stacked --rounds 3 --out stacked")
    assert "fedprox" in fedloom(environment, COMPARISON)
    report(environment)
    fedloom(environment, "run --clients 0", code=2)
    assert "'fedloom[tune]'" in fedloom(environment, f"tune {RECIPE} --trials 1", code=2)
    return {"python": python, **versions}


def test_the_wheel_has_all_files_of_the_package(wheel):
    source = ROOT / "src"
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if name.startswith("fedloom/")}
        (metadata,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        described = archive.read(metadata).decode()
    files = {
        str(path.relative_to(source))
        for path in (source / "fedloom").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert inside == files
    for name in (
        "py.typed",
        "experiments/recipes/examples.toml",
        "experiments/report/page/base.js",
    ):
        assert f"fedloom/{name}" in inside
    assert f"Version: {PROJECT['version']}" in described
    assert "License-Expression: Apache-2.0" in described


def test_newest_versions(wheel, tmp_path):
    with virtual_environment("newest", wheel, tmp_path, []) as environment:
        use(environment)


def test_oldest_versions(wheel, tmp_path):
    pins = oldest({"torch"})  # an older PyTorch: see the test with Debian
    with virtual_environment("oldest", wheel, tmp_path, pins) as environment:
        versions = use(environment)
    for pin in pins:
        name, _, wanted = pin.partition("==")
        assert f"{versions[name]}.0.0.".startswith(f"{wanted}."), f"{name} {versions[name]}"


@pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("debootstrap") is None, reason="needs root and debootstrap"
)
def test_oldest_pytorch_with_python_3_13(wheel):
    with debian("trixie", "3.13", wheel) as environment:
        versions = use(environment)
    (torch,) = (each for each in DEPENDENCIES if each.name == "torch")
    assert versions["torch"].startswith(f"{torch.oldest}.")
    assert versions["python"].startswith("3.13.")


def supported_pythons() -> list[str]:
    """Returns the versions of Python in the classifiers."""
    found = (
        re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", each)
        for each in PROJECT["classifiers"]
    )
    return [each[1] for each in found if each]


@pytest.mark.parametrize("version", supported_pythons())
def test_everything_without_pytorch(version, wheel, tmp_path):
    """PyTorch has no CPU build in the package registry for all of these versions."""
    python = find_python(version)
    if python is None:
        pytest.skip(f"there is no Python {version} here")
    here = [sys.executable, "-m", "fedloom", *COMPARISON.split()]
    subprocess.run(here, cwd=tmp_path, check=True, capture_output=True)
    kind = f"python{version}"
    with virtual_environment(kind, wheel, tmp_path, [], python, torch=False) as environment:
        done = environment.run("python", "-W", "error", "-c", COMPILE)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"{version}.")
        start(environment)
        report(environment)
