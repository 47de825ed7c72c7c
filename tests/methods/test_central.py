"""Central: it uses the uncut graph and the same items as the clients."""

from fedloom.experiments.run import run


def test_it_trains_and_tests_on_the_union(node_federation):
    result = run("central", node_federation, model="gcn-2x8", rounds=2)
    (everything,) = result.per_client
    for part in ("nodes", "train", "val", "test"):
        counts = [
            g.num_nodes if part == "nodes" else int(getattr(g, part).sum())
            for g in node_federation.graphs
        ]
        assert everything[part] == sum(counts)
    assert node_federation.whole.num_edges > sum(g.num_edges for g in node_federation.graphs)
    assert result.summary["clients"] == 4


def test_parties_without_a_common_graph(node_federation):
    from dataclasses import replace

    result = run("central", replace(node_federation, whole=None), model="gcn-2x8", rounds=2)
    assert result.per_client[0]["nodes"] == sum(g.num_nodes for g in node_federation.graphs)
