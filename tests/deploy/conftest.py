import pytest

pytest.importorskip("flwr", reason="deployment needs the extra: pip install 'fedloom[flower]'")

from deployment import Deployment


@pytest.fixture
def deploy(tmp_path):
    """Makes deployments whose processes end with the test."""
    made = []

    def make(**settings):
        folder = tmp_path / f"deployment-{len(made)}"
        folder.mkdir()
        made.append(Deployment(folder, **settings))
        return made[-1]

    yield make
    for deployment in made:
        deployment.end()
