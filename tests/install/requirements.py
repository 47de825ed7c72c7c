"""What pyproject.toml declares: dependencies, extras, lower bounds."""

import re
import tomllib
from typing import NamedTuple

from tests.documents import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Distributions whose module has another name.
MODULES = {
    "griffelib": "griffe",
    "import-linter": "importlinter",
    "mkdocs-material": "material",
    "mkdocstrings-python": "mkdocstrings_handlers",
    "mlflow-skinny": "mlflow",
    "pillow": "PIL",
    "pytest-timeout": "pytest_timeout",
    "pyyaml": "yaml",
    "pytest-xdist": "xdist",
    "scikit-learn": "sklearn",
    "scikit-network": "sknetwork",
}


class Requirement(NamedTuple):
    """A declared distribution.

    Attributes:
        line: The line of pyproject.toml.
        name: The distribution's name.
        module: The name of its module.
        oldest: The oldest version that it may have.
    """

    line: str
    name: str
    module: str
    oldest: str


def parse(line: str) -> Requirement:
    """Returns a line of pyproject.toml, "name>=1.2" or "name>=1.2,<3", in its parts."""
    found = re.fullmatch(r"([\w.-]+)>=([\d.]+)(?:,<[\d.]+)?", line)
    assert found, f"pyproject.toml: {line!r} has no lower bound"
    name, oldest = found.groups()
    return Requirement(line, name, MODULES.get(name, name.replace("-", "_")), oldest)


DEPENDENCIES = [parse(line) for line in PROJECT["dependencies"]]
EXTRAS = {
    extra: [parse(line) for line in lines]
    for extra, lines in PROJECT["optional-dependencies"].items()
}
