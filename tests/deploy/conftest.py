from importlib import import_module
from importlib.util import find_spec

import pytest
from deployment import Deployment

NEED_FLOWER = (
    "test_apps",
    "test_bank",
    "test_baseline",
    "test_coordinator",
    "test_deploy",
    "test_dishonest",
    "test_dishonest_coordinator",
    "test_encoding",
    "test_door",
    "test_flower",
    "test_flower_internals",
    "test_key_life",
    "test_long_answers",
    "test_names",
    "test_party",
    "test_party_files",
    "test_stranger",
    "test_texts",
    "test_transport",
    "test_trusted_agreement",
    "test_twice",
)


def pytest_ignore_collect(collection_path):
    """Skips modules that cannot be imported without Flower. test_extra.py runs without it."""
    return True if find_spec("flwr") is None and collection_path.stem in NEED_FLOWER else None


@pytest.fixture(scope="session")
def imported():
    """Imports what deployments need, once: their processes are forked from this one."""
    for name in ("commands", "deploy.serve", "deploy.party", "deploy.engine", "methods.fedavg"):
        import_module(f"fedloom.{name}")


def _deployments(folder):
    made = []

    def make(**settings):
        home = folder / f"deployment-{len(made)}"
        home.mkdir()
        made.append(Deployment(home, **settings))
        return made[-1]

    yield make
    for deployment in made:
        deployment.end()


@pytest.fixture
def deploy(imported, tmp_path):
    """Makes deployments whose processes end with the test."""
    yield from _deployments(tmp_path)


@pytest.fixture(scope="module")
def deploy_once(imported, tmp_path_factory):
    """Makes deployments that the tests of a module share."""
    yield from _deployments(tmp_path_factory.mktemp("shared"))


@pytest.fixture
def patient(monkeypatch):
    """No party is taken for dead on a busy machine. For tests in which no party dies."""
    monkeypatch.setattr("fedloom.deploy.coordinator.DEAD_AFTER", 120.0)
