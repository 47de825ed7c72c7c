"""Sensitivity by brute force: each node, edge and label of many small graphs is changed in turn.

A control shows that the bound of a capped graph does not hold without the cap.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.core.message import flatten
from fedloom.core.privacy_terms import PrivacyTerms
from fedloom.data.capping import capped
from fedloom.data.graph import Graph
from fedloom.errors import ConfigError
from fedloom.methods.fedsgd import FedSGD
from fedloom.methods.opfgl import OpFGL
from fedloom.privacy.dp_graph import affected, nodes_within, steps_of

CLASSES, FEATURES = 3, 4


def random_graph(rng, nodes=12, chance=0.25):
    there = np.triu(rng.random((nodes, nodes)) < chance, 1)
    a, b = (torch.from_numpy(ends) for ends in np.nonzero(there))
    return Graph(
        torch.from_numpy(rng.normal(size=(nodes, FEATURES))).float(),
        torch.stack([torch.cat([a, b]), torch.cat([b, a])]),
        torch.from_numpy(rng.integers(0, CLASSES, nodes)),
        CLASSES,
        train=torch.from_numpy(rng.random(nodes) < 0.8),
        node_id=torch.arange(nodes),
    )


def star(nodes, spread=3.0):
    """A graph whose first node is linked to all others."""
    a, b = torch.zeros(nodes - 1, dtype=torch.int64), torch.arange(1, nodes)
    x = torch.ones(nodes, FEATURES)
    x[0] = -spread
    return Graph(
        x,
        torch.stack([torch.cat([a, b]), torch.cat([b, a])]),
        torch.zeros(nodes, dtype=torch.int64),
        CLASSES,
        train=torch.ones(nodes, dtype=torch.bool),
        node_id=torch.arange(nodes),
    )


def without_node(graph, node):
    keep = torch.ones(graph.num_nodes, dtype=torch.bool)
    keep[node] = False
    return graph.subgraph(keep)


def without_edge(graph, edge):
    a, b = graph.edge_index
    s, t = a[edge], b[edge]
    gone = ((a == s) & (b == t)) | ((a == t) & (b == s))
    return replace(graph, edge_index=graph.edge_index[:, ~gone])


def degrees(graph):
    return torch.bincount(graph.edge_index[1], minlength=graph.num_nodes)


def neighbours(graph, unit, degree):
    """Yields the neighbours of a graph; a node counts if it has at most `degree` edges."""
    if unit == "node":
        for node in range(graph.num_nodes):
            if degrees(graph)[node] <= degree:
                yield without_node(graph, node)
    elif unit == "edge":
        a, b = graph.edge_index
        for edge in (a < b).nonzero().flatten().tolist():
            yield without_edge(graph, edge)
    else:
        for node in graph.train.nonzero().flatten().tolist():
            y = graph.y.clone()
            y[node] = (y[node] + 1) % CLASSES
            yield replace(graph, y=y)


def facts_of(unit, model="gcn-2x4", degree=2, clip=0.1):
    terms = PrivacyTerms(1.0, 1e-5, clip=clip, unit=unit, degree=degree)
    return Facts(FEATURES, CLASSES, "node", ("a",), (model,), dropout=0.0, privacy=terms)


def gradient(graph, facts, method=None):
    method = method or FedSGD()
    client = Client("a", graph, facts)
    method.setup(client)
    model = {n: p.detach() * 3 for n, p in client.state["model"].named_parameters()}
    reply = flatten(method.gradient(client, model=model)["gradient"])
    return torch.cat([reply[name].double().flatten() for name in sorted(reply)])


def statistics(graph, facts, method):
    reply = method.private_statistics(Client("a", graph, facts))
    return torch.cat([reply[name].double().flatten() for name in ("count", "total")])


def largest_change(release, graph, unit, degree):
    before = release(graph)
    changes = [(before - release(g)).norm().item() for g in neighbours(graph, unit, degree)]
    return max(changes, default=0.0)


@pytest.mark.parametrize("unit", ["node", "edge", "label"])
@pytest.mark.parametrize("model", ["gcn-2x4", "sage-1x4", "gat-1x8+linear", "gin-2x4", "sgc-2x4"])
def test_no_neighbour_changes_gradients_by_more_than_declared(unit, model):
    facts = facts_of(unit, model)
    (bound,) = FedSGD().sensitivities(facts).values()
    rng = np.random.default_rng(5)
    for _ in range(12):
        graph = random_graph(rng)
        found = largest_change(lambda g: gradient(g, facts), graph, unit, degree=2)
        assert found <= bound * (1 + 1e-5)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("unit", ["node", "edge", "label"])
def test_a_thousand_graphs(unit):
    facts = facts_of(unit, "gcn-1x4")
    method = OpFGL(hops=1)
    bounds = [*FedSGD().sensitivities(facts).values(), *method.sensitivities(facts).values()]
    rng = np.random.default_rng(6)
    for _ in range(1000):
        graph = random_graph(rng, nodes=8, chance=0.3)
        releases = (lambda g: gradient(g, facts), lambda g: statistics(g, facts, method))
        for release, bound in zip(releases, bounds, strict=True):
            assert largest_change(release, graph, unit, 2) <= bound * (1 + 1e-5)


@pytest.mark.parametrize("unit", ["node", "edge", "label"])
@pytest.mark.parametrize("hops", [0, 1, 2])
def test_no_neighbour_changes_class_sums_by_more_than_declared(unit, hops):
    facts, method = facts_of(unit, clip=0.7), OpFGL(hops=hops)
    if unit == "edge" and not hops:
        with pytest.raises(ConfigError, match="there is nothing to protect"):
            method.sensitivities(facts)
        return
    (bound,) = method.sensitivities(facts).values()
    rng = np.random.default_rng(7)
    for _ in range(25):
        graph = random_graph(rng)
        found = largest_change(lambda g: statistics(g, facts, method), graph, unit, degree=2)
        assert found <= bound * (1 + 1e-5)


def test_without_the_cap_the_bound_is_violated(monkeypatch):
    graph, facts = star(200), facts_of("node", "sage-1x4", degree=2)
    (bound,) = FedSGD().sensitivities(facts).values()
    hub = without_node(graph, 0)
    capped_change = (gradient(graph, facts) - gradient(hub, facts)).norm()
    monkeypatch.setattr("fedloom.methods.fedsgd.capped", lambda graph, degree: graph)
    graph, hub = star(200), without_node(star(200), 0)  # without what is cached
    assert (gradient(graph, facts) - gradient(hub, facts)).norm() > 1.5 * bound
    assert capped_change <= bound * (1 + 1e-5)


def test_without_clipping_the_bound_is_violated(monkeypatch):
    graph, facts = random_graph(np.random.default_rng(1)), facts_of("label", clip=1e-3)
    (bound,) = FedSGD().sensitivities(facts).values()
    huge = facts_of("label", clip=1e6)
    assert largest_change(lambda g: gradient(g, huge), graph, "label", 2) > 10 * bound
    assert largest_change(lambda g: gradient(g, facts), graph, "label", 2) <= bound * (1 + 1e-5)


def test_few_nodes_are_affected():
    """The count itself: outputs that change, for all nodes and edges of random graphs."""
    rng = np.random.default_rng(8)
    for _ in range(40):
        graph = random_graph(rng)
        for unit in ("node", "edge"):
            for other in neighbours(graph, unit, 2):
                kept = other.node_id
                one, two = capped(graph, 2), capped(other, 2)
                h, k = one.propagate(one.propagate(one.x)), two.propagate(two.propagate(two.x))
                changed = (h[kept] - k).abs().amax(1) > 1e-6
                assert changed.sum() <= affected(unit, 2, 2)


def test_numbers_of_nodes():
    assert [nodes_within(r, 3) for r in range(4)] == [1, 4, 10, 22]
    assert affected("label", 2, 3) == affected("node", -1, 3) == 0
    assert affected("edge", 0, 3) == 4
    assert affected("node", 1, 3) == 24
    assert [steps_of(s) for s in ("mlp", "gcn", "sage-1", "gat-3", "sgc-2")] == [-1, 2, 0, 2, 2]


def test_what_cannot_be_protected_is_refused():
    with pytest.raises(ConfigError, match=r"it must be known how far a model looks; valid: mlp"):
        FedSGD().sensitivities(facts_of("node", "appnp"))
    with pytest.raises(ConfigError, match=r"run\.dp_unit is 'edge', but nothing"):
        FedSGD().sensitivities(facts_of("edge", "mlp"))
    graphs = replace(facts_of("node"), task="graph")
    with pytest.raises(ConfigError, match="the data are a graph task; valid: client"):
        FedSGD().sensitivities(graphs)
