"""Small federations that every test can afford."""

import os
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from hypothesis import settings

from fedloom.data.federation import Federation
from fedloom.data.partition import divide
from fedloom.data.synthetic import synthetic, synthetic_graphs
from fedloom.engines import AUTO, engine_class
from fedloom.engines.loop import Engine as Loop
from fedloom.experiments.engine_choice import choose_engine

torch.set_num_threads(1)
# No deadlines on a noisy machine. CI tries the same examples every time, developers new ones.
settings.register_profile("fedloom", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("fedloom")


@pytest.fixture(scope="session")
def node_federation() -> Federation:
    """Four clients with parts of one synthetic graph: a node task."""
    graph = synthetic(nodes=211, classes=3, features=12, degree=6.0, homophily=0.8, seed=1)
    return divide(graph, 4, "random", 0, split="40/30/30")


@pytest.fixture(scope="session")
def cross_federation() -> Federation:
    """Four clients that know the edges between them. A third of the edges have one direction."""
    graph = synthetic(nodes=211, classes=3, features=12, degree=6.0, homophily=0.8, seed=1)
    kept = torch.rand(graph.num_edges, generator=torch.Generator().manual_seed(3)) < 0.8
    directed = replace(graph, edge_index=graph.edge_index[:, kept])
    return divide(directed, 4, "random", 0, split="40/30/30", cross_edges="known")


@pytest.fixture(scope="session")
def graph_federation() -> Federation:
    """Three clients with small graphs each: a graph task."""
    graphs = synthetic_graphs(graphs=47, classes=2, seed=2)
    return divide(graphs, 3, "uniform", 0, split="50/20/30")


@pytest.fixture(scope="session", params=["node", "graph"])
def federation(request, node_federation, graph_federation) -> Federation:
    """Both tasks."""
    return node_federation if request.param == "node" else graph_federation


@pytest.fixture(scope="session")
def local_ray():
    """A Ray with two cores of this machine, for all tests: starting it takes seconds."""
    if find_spec("ray") is None:
        pytest.skip("the extra 'ray' is not installed")
    engine_class("ray")  # sets what Ray reads when it is imported
    import ray

    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    yield ray
    ray.shutdown()


@pytest.fixture
def reference_engine(monkeypatch):
    """Runs that name no engine use the loop engine: the test looks at its calls or its bits."""

    def choose(settings, federation, facts):
        if settings.engine == AUTO:
            settings = replace(settings, engine="loop")
        return choose_engine(settings, federation, facts)

    monkeypatch.setattr("fedloom.experiments.run.choose_engine", choose)


@pytest.fixture
def trainings(monkeypatch, reference_engine):
    """Call it, then run something: the list it returns collects what every `train` sent and got."""

    def watch():
        seen, original = [], Loop.call

        def call(self, phase, sent):
            replies = original(self, phase, sent)
            if phase == "train":
                seen.append((sent, replies))
            return replies

        monkeypatch.setattr(Loop, "call", call)
        return seen

    return watch
