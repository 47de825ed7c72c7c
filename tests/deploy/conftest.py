from importlib import import_module
from importlib.util import find_spec

import pytest
from deployment import Deployment

OVER_FLOWER = (
    "test_apps",
    "test_deploy",
    "test_dishonest",
    "test_flower",
    "test_join",
    "test_transport",
)


def pytest_ignore_collect(collection_path):
    """Without Flower these cannot even be imported; test_extra.py says which package is missing."""
    return True if find_spec("flwr") is None and collection_path.stem in OVER_FLOWER else None


@pytest.fixture
def deploy(tmp_path):
    """Makes deployments whose processes end with the test."""
    for name in ("commands", "deploy.serve", "deploy.join", "engines.flower", "methods.fedavg"):
        import_module(f"fedloom.{name}")  # once, for all processes of all deployments
    made = []

    def make(**settings):
        folder = tmp_path / f"deployment-{len(made)}"
        folder.mkdir()
        made.append(Deployment(folder, **settings))
        return made[-1]

    yield make
    for deployment in made:
        deployment.end()
