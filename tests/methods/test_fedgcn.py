"""FedGCN: the clients' GCN equals the central one, and invalid peer messages are refused."""

from dataclasses import replace

import pytest
import torch

from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.core.message import flatten
from fedloom.data.partition import divide
from fedloom.data.synthetic import synthetic
from fedloom.engines.loop import Engine as Loop
from fedloom.errors import ConfigError, DataError, MessageError
from fedloom.experiments.run import run
from fedloom.methods.fedgcn import FedGCN
from fedloom.nn.build import build_model
from fedloom.nn.weights import weights

pytestmark = pytest.mark.usefixtures("reference_engine")

OTHER = {"hops": 1}
SETTINGS = {"model": "gcn-2x8", "rounds": 2}


def cut(clients, kept=1.0, loops=0, seed=0):
    """Returns a federation with known cross edges.

    kept: share of the edges that are kept; below 1 the graph is directed. loops: number of nodes
    with a self-loop in the data.
    """
    graph = synthetic(nodes=90, classes=3, features=12, degree=5.0, homophily=0.8, seed=seed)
    chosen = torch.rand(graph.num_edges, generator=torch.Generator().manual_seed(seed)) < kept
    edges = torch.cat([graph.edge_index[:, chosen], torch.arange(loops).repeat(2, 1)], 1)
    return divide(
        replace(graph, edge_index=edges),
        clients,
        "random",
        seed,
        split="40/30/30",
        cross_edges="known",
    )


def exchanged(federation, method, absent=()):
    """Returns the federation's clients after the exchange. An absent client does not write."""
    facts = Facts(
        federation.num_features,
        federation.num_classes,
        "node",
        federation.names,
        ("gcn-2x8",) * federation.num_clients,
        dropout=0.0,
    )
    clients = {
        name: Client(name, graph, facts)
        for name, graph in zip(federation.names, federation.graphs, strict=True)
    }
    for write, read in (
        (method.write_sums, method.read_sums),
        (method.write_features, method.read_features),
    )[: method.hops]:
        written = {name: write(client) for name, client in clients.items() if name not in absent}
        for name, client in clients.items():
            inbox = {sender: sent[name] for sender, sent in written.items() if name in sent}
            read(client, **({"inbox": inbox} if inbox else {}))
    return clients.values()


def central(federation, seed=3):
    """Returns a GCN with any weights on the whole graph: the model, its logits, and its S X."""
    model = build_model(
        "gcn-2x8", federation.num_features, federation.num_classes, dropout=0.0, seed=seed
    )
    with torch.no_grad():
        for p in model.parameters():  # biases too
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)) * 0.3)
        return model, model(federation.whole), federation.whole.propagate(federation.whole.x)


SCENES = [(2, 1.0, 0), (4, 1.0, 0), (4, 0.7, 0), (7, 0.5, 30), (1, 0.7, 10)]


@pytest.mark.parametrize(("clients", "kept", "loops"), SCENES)
def test_two_hops_are_the_central_gcn_for_any_weights(clients, kept, loops):
    federation = cut(clients, kept, loops)
    model, expected, _ = central(federation)
    for client in exchanged(federation, FedGCN()):
        assert torch.allclose(
            FedGCN().logits(client, weights(model)), expected[client.graph.node_id], atol=1e-5
        )


@pytest.mark.parametrize(("clients", "kept", "loops"), SCENES)
def test_one_hop_is_exact_in_the_first_layer_and_uses_own_edges_in_the_second(clients, kept, loops):
    federation = cut(clients, kept, loops)
    model, _, smooth = central(federation)
    S = federation.whole.adjacency()
    dense = torch.zeros(S.shape).index_put_((S.rows, S.indices.long()), S.values)
    p = weights(model)
    hidden = torch.relu(smooth @ p["layers.0.weight"] + p["layers.0.bias"])
    for client in exchanged(federation, FedGCN(hops=1)):
        own = client.graph.node_id
        assert torch.allclose(client.memory["known"].x, smooth[own], atol=1e-6)
        expected = dense[own][:, own] @ hidden[own] @ p["classifier.weight"] + p["classifier.bias"]
        assert torch.allclose(FedGCN(hops=1).logits(client, p), expected, atol=1e-5)


def test_a_round_of_one_sgd_epoch_is_a_central_step():
    """Each client's gradient is that of the central GCN's mean loss over its training nodes.

    FedAvg weights them by size.
    """
    federation = cut(4, 0.8)
    settings = {
        "rounds": 1,
        "epochs": 1,
        "optimizer": "sgd",
        "lr": 0.3,
        "weight_decay": 0.0,
        "dropout": 0.0,
    }
    result = run("fedgcn", federation, model="gcn-2x8", **settings)
    facts = Facts(
        federation.num_features,
        federation.num_classes,
        "node",
        federation.names,
        ("gcn-2x8",) * 4,
        dropout=0.0,
    )
    model, whole = facts.build("gcn-2x8", "server"), federation.whole
    loss = 0.0
    for graph in federation.graphs:
        own = graph.node_id[graph.train]
        loss += (
            graph.num_nodes
            / whole.num_nodes
            * torch.nn.functional.cross_entropy(model(whole)[own], whole.y[own])
        )
    names, parameters = zip(*model.named_parameters(), strict=True)
    for name, p, gradient in zip(
        names, parameters, torch.autograd.grad(loss, parameters), strict=True
    ):
        assert torch.allclose(result.final_models["server"][name], p - 0.3 * gradient, atol=1e-6)


def test_with_one_client_it_is_fedavg():
    federation = cut(1, 0.8)
    gcn, avg = (run(name, federation, **SETTINGS, finetune=2) for name in ("fedgcn", "fedavg"))
    for owner in gcn.final_models:
        one, other = flatten(gcn.final_models[owner]), flatten(avg.final_models[owner])
        assert all(torch.allclose(one[key], other[key], atol=1e-5) for key in one)
    assert [e["accuracy"] for e in gcn.history] == [e["accuracy"] for e in avg.history]


def test_peer_messages_hold_only_sums_over_neighbours(monkeypatch):
    federation, sent, original = cut(3, 0.8), [], Loop.call
    monkeypatch.setattr(
        Loop,
        "call",
        lambda self, phase, m: sent.append((phase, r := original(self, phase, m))) or r,
    )
    run("fedgcn", federation, **SETTINGS)
    inbox = {phase: replies for phase, replies in sent if phase in ("write_sums", "write_features")}
    whole, (source, target) = federation.whole, federation.whole.edge_index
    degree = 1 + torch.bincount(target, minlength=whole.num_nodes)
    owner = torch.empty(whole.num_nodes, dtype=torch.int64)
    for k, graph in enumerate(federation.graphs):
        owner[graph.node_id] = k
    for sender, written in inbox["write_sums"].items():
        for receiver, message in written.items():
            assert message.keys() == {"nodes", "edges", "sums"}
            for node, edges, total in zip(
                message["nodes"], message["edges"], message["sums"], strict=True
            ):
                there = source[(target == node) & (owner[source] == int(sender))]
                assert owner[node] == int(receiver)
                assert edges == len(there) > 0
                assert torch.allclose(
                    total, (whole.x[there] / degree[there, None].sqrt()).sum(0), atol=1e-6
                )
    smooth = whole.propagate(whole.x)
    for written in inbox["write_features"].values():
        for receiver, message in written.items():
            assert message.keys() == {"nodes", "degree", "features"}
            reached = source[owner[target] == int(receiver)]
            assert torch.isin(message["nodes"], reached).all()
            assert torch.equal(message["degree"], degree[message["nodes"]])
            assert torch.allclose(message["features"], smooth[message["nodes"]], atol=1e-6)
    only_once = run("fedgcn", federation, **SETTINGS, hops=1).traffic["phases"]
    assert "write_features" not in only_once


def test_only_the_absent_writers_nodes_are_missing():
    federation = cut(4, 0.8)
    _, _, smooth = central(federation)
    complete, without = (
        exchanged(federation, FedGCN()),
        exchanged(federation, FedGCN(), absent=("2",)),
    )
    for full, part in zip(complete, without, strict=True):
        from_it = (
            ((part.graph.cross_edges[2] == 2) & (part.graph.cross_edges[3] == 1))
            .nonzero()
            .flatten()
        )
        short = part.graph.cross_edges[1, from_it].unique()
        assert part.memory["known"].num_nodes == full.memory["known"].num_nodes - len(short)
        assert part.memory["S"].nnz == full.memory["S"].nnz - len(from_it)
        whole_sums = torch.ones(part.graph.num_nodes, dtype=torch.bool)
        whole_sums[part.graph.cross_edges[0, from_it]] = False
        own = part.memory["known"].x[: part.graph.num_nodes]
        assert torch.allclose(own[whole_sums], smooth[part.graph.node_id][whole_sums], atol=1e-6)


def spoil(monkeypatch, phase, change):
    """Lets `change` edit client 0's peer message to client 1 in a phase."""
    original = Loop.call

    def call(self, name, messages):
        replies = original(self, name, messages)
        if name == phase:
            replies["0"]["1"] |= change(replies["0"]["1"])
        return replies

    monkeypatch.setattr(Loop, "call", call)


BAD_LETTERS = [
    ("write_sums", lambda l: {"nodes": l["nodes"] + 1000}, "'nodes' names .* no such cross edge"),
    (
        "write_sums",
        lambda l: {k: t[1:] for k, t in l.items()},
        "'nodes' lacks .* does not know a cross edge",
    ),
    ("write_sums", lambda l: {"nodes": l["nodes"].flip(0)}, "'nodes' must be ascending"),
    ("write_sums", lambda l: {"sums": l["sums"][1:]}, r"'sums' has \d+ rows for \d+ nodes"),
    (
        "write_sums",
        lambda l: {"edges": l["edges"] + 1},
        r"'edges' counts \d+ cross edges to \d+, the reader knows",
    ),
    (
        "write_features",
        lambda l: {"nodes": l["nodes"] - 1000},
        "'nodes' names .* no such cross edge",
    ),
    (
        "write_features",
        lambda l: {"degree": l["degree"] * 0},
        "'degree' holds 0, must be at least 1",
    ),
    ("write_features", lambda l: {"degree": l["degree"][:-1]}, r"'degree' has \d+ rows"),
]


@pytest.mark.parametrize(("phase", "change", "complaint"), BAD_LETTERS)
def test_an_invalid_peer_message_is_refused(phase, change, complaint, monkeypatch):
    spoil(monkeypatch, phase, change)
    with pytest.raises(MessageError, match=rf"client '0' in '{phase}': tensor {complaint}"):
        run("fedgcn", cut(3), **SETTINGS)


@pytest.mark.parametrize("knows_less", [0, 1])
def test_a_cross_edge_that_one_side_does_not_know_is_refused(knows_less):
    federation = cut(3)
    graphs = list(federation.graphs)
    edges = graphs[knows_less].cross_edges
    forgotten = ((edges[2] == 1 - knows_less) & (edges[3] == knows_less)).nonzero()[0]
    kept = torch.ones(edges.shape[1], dtype=torch.bool)
    kept[forgotten] = False
    graphs[knows_less] = replace(graphs[knows_less], cross_edges=edges[:, kept])
    with pytest.raises(MessageError, match=r"client '0' in 'write_sums': tensor '(nodes|edges)'"):
        run("fedgcn", replace(federation, graphs=tuple(graphs)), **SETTINGS)


@pytest.mark.parametrize(
    "model", ["gcn-3x8", "gcn-1x8", "gcn-2x8+linear", "gcn-2x8+norm", "gcn-2x8+jk", "sage-2x8"]
)
def test_other_models_are_refused(model):
    with pytest.raises(ConfigError, match=rf"model {model!r}.*gcn-2xWIDTH".replace("+", r"\+")):
        run("fedgcn", cut(3), **{**SETTINGS, "model": model})


def test_weighted_edges_and_graph_tasks_are_refused(graph_federation):
    federation = cut(3)
    weighted = tuple(replace(g, edge_weight=torch.ones(g.num_edges)) for g in federation.graphs)
    with pytest.raises(DataError, match="edge_weight: cross edges have no weights"):
        run("fedgcn", replace(federation, graphs=weighted), **SETTINGS)
    with pytest.raises(ConfigError, match="does node tasks"):
        run("fedgcn", graph_federation, **SETTINGS)
