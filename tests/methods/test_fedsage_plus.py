"""FedSage+: the generator's loss, gradients between clients, mended graphs, and what travels."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.core.message import flatten
from fedloom.data.graph import Graph
from fedloom.engines.loop import Engine as Loop
from fedloom.errors import ConfigError, MessageError
from fedloom.experiments.run import run
from fedloom.methods.fedsage_plus import (
    FGEN,
    FedSagePlus,
    closest,
    generate,
    impair,
    mend,
    nearest,
    noisy,
)

pytestmark = pytest.mark.usefixtures("reference_engine")

QUICK = {"generator_rounds": 2, "latent": 4, "most": 2, "sample": 6, "generator_lr": 0.05}
OTHER = {"most": 1}
SMALL = {"model": "sage-2x8", "rounds": 2, **QUICK}


def prepared(federation, model="gcn-2x8", dropout=0.0, **settings):
    """Returns a method and its clients, ready for the first generator round."""
    method = FedSagePlus(**{**QUICK, **settings})
    models = (model,) * federation.num_clients
    facts = Facts(
        federation.num_features,
        federation.num_classes,
        "node",
        federation.names,
        models,
        dropout=dropout,
    )
    clients = {
        name: Client(name, graph, facts)
        for name, graph in zip(federation.names, federation.graphs, strict=True)
    }
    for client in clients.values():
        method.prepare(client)
    return method, clients


def message_of(graph, rows=7, latent=5, seed=0):
    """Returns a request: weights of an fGen, and inputs for it."""
    rng = torch.Generator().manual_seed(seed)
    shapes = {
        "first": (latent, latent),
        "first_bias": (latent,),
        "second": (latent, graph.num_features),
        "second_bias": (graph.num_features,),
    }
    return {
        name: torch.randn(shape, generator=rng)
        for name, shape in {**shapes, "noisy": (rows, latent)}.items()
    }


# ---- the impaired graph ----
def test_hidden_neighbours_are_counted_and_paired(node_federation):
    graph = node_federation.graphs[0]
    impaired = impair(graph, 0.5, 2, torch.Generator().manual_seed(0))
    kept = [graph.node_id.tolist().index(i) for i in impaired.graph.node_id.tolist()]
    assert impaired.graph.num_nodes == graph.num_nodes - int(0.5 * graph.num_nodes)
    hidden = set(range(graph.num_nodes)) - set(kept)
    edges = graph.edge_index.T.tolist()
    pairs = []
    for number, v in enumerate(kept):
        lost = [u for u, t in edges if t == v and u in hidden]
        assert impaired.missing[number] == len(lost)
        pairs += [(number, sorted(lost))] * min(2, len(lost))
    assert impaired.missing.max() > 2
    assert impaired.rows.tolist() == [v for v, _ in pairs]
    for row, (_, lost) in enumerate(pairs):
        assert sorted(impaired.pair_node[impaired.pair_row == row].tolist()) == lost


def test_a_graph_without_edges_has_no_missing_neighbours():
    graph = Graph(
        x=torch.ones(5, 2),
        edge_index=torch.zeros(2, 0, dtype=torch.int64),
        y=torch.zeros(5, dtype=torch.int64),
        num_classes=2,
    )
    impaired = impair(graph, 0.5, 3, torch.Generator())
    assert impaired.missing.tolist() == [0, 0, 0]
    assert len(impaired.rows) == len(impaired.pair_row) == 0
    assert len(closest(torch.zeros(0, 2), graph.x, impaired.pair_row, impaired.pair_node)) == 0


# ---- matching ----
@pytest.mark.parametrize("entries", [2**23, 40])
def test_rows_are_matched_with_the_closest_neighbour_of_their_node(
    node_federation, entries, monkeypatch
):
    monkeypatch.setattr("fedloom.methods.fedsage_plus.ENTRIES", entries)  # in one block, or in many
    graph = node_federation.graphs[0]
    impaired = impair(graph, 0.4, 3, torch.Generator().manual_seed(1))
    generated = torch.randn(
        len(impaired.rows), graph.num_features, generator=torch.Generator().manual_seed(2)
    )
    found = closest(generated, graph.x, impaired.pair_row, impaired.pair_node)
    for row, x in enumerate(generated):
        candidates = impaired.pair_node[impaired.pair_row == row]
        assert found[row] == candidates[(graph.x[candidates] - x).square().sum(1).argmin()]
    nearest_node = nearest(generated, graph)
    assert torch.equal(nearest_node, torch.cdist(generated, graph.x).argmin(1))


# ---- gradients between clients ----
def test_a_gradient_from_another_client_equals_the_central_one(node_federation):
    graph, message = node_federation.graphs[1], message_of(node_federation.graphs[1])
    gradient = FedSagePlus().fgen_gradient(graph, {name: t.clone() for name, t in message.items()})
    fgen = {name: message[name].clone().requires_grad_() for name in FGEN}
    generated = (
        F.relu(message["noisy"] @ fgen["first"] + fgen["first_bias"]) @ fgen["second"]
        + fgen["second_bias"]
    )
    torch.cdist(generated, graph.x).square().min(1).values.sum().backward()
    for name, parameter in fgen.items():
        assert torch.allclose(gradient[name], parameter.grad, rtol=1e-3, atol=1e-2)
        assert parameter.grad.abs().sum() > 0


@pytest.mark.parametrize("sample", [1000, 3])
def test_a_step_follows_the_own_gradient_and_the_mean_of_the_others(node_federation, sample):
    method, clients = prepared(node_federation, others=0.7, feature_weight=0.3, sample=sample)
    written = {name: method.write_generator(client) for name, client in clients.items()}
    first, graph = clients["0"], clients["0"].memory["impaired"].graph
    rows = len(first.memory["impaired"].rows)
    own = {name: t.grad.clone() for name, t in first.memory["fgen"].items()}
    weights = {
        name: t.detach().clone().requires_grad_() for name, t in first.memory["fgen"].items()
    }
    asked = written["0"]["1"]["noisy"]
    assert len(asked) == min(sample, rows)
    mean = (
        sum(
            torch.cdist(generate(weights, asked), clients[j].graph.x).square().min(1).values.sum()
            for j in "123"
        )
        / 3
    )
    (0.7 * 0.3 * mean * rows / len(asked) / graph.num_nodes).backward()
    for client in clients.values():
        method.read_generators(
            client, {s: sent[client.name] for s, sent in written.items() if client.name in sent}
        )
    answers = {name: method.write_gradients(client) for name, client in clients.items()}
    method.read_gradients(first, {s: sent["0"] for s, sent in answers.items() if "0" in sent})
    for name, parameter in first.memory["fgen"].items():
        assert torch.allclose(parameter.grad, own[name] + weights[name].grad, rtol=1e-3, atol=1e-4)


def test_a_client_without_answers_learns_alone(node_federation):
    method, clients = prepared(node_federation)
    client = clients["0"]
    method.write_generator(client)
    before = {name: t.grad.clone() for name, t in client.memory["fgen"].items()}
    old = client.memory["fgen"]["second"].detach().clone()
    method.read_gradients(client)
    assert all(torch.equal(t.grad, before[name]) for name, t in client.memory["fgen"].items())
    assert not torch.equal(client.memory["fgen"]["second"], old)


# ---- the generator's loss ----
def parts(client):
    """Returns the client's parameters by their network."""
    memory = client.memory
    encoder = dict(memory["encoder"].named_parameters())
    dgen = [p for name, p in encoder.items() if name.startswith("classifier.")]
    return {
        "encoder": [p for name, p in encoder.items() if not name.startswith("classifier.")],
        "dgen": dgen,
        "fgen": list(memory["fgen"].values()),
        "classifier": list(memory["classifier"].parameters()),
    }


REACHED = {
    "degree": {"encoder", "dgen"},
    "feature": {"encoder", "fgen"},
    "label": {"encoder", "fgen", "classifier"},
}


@pytest.mark.parametrize("model", ["gcn-2x8", "sage-2x8+norm", "sgc-2x8", "gat-2x8"])
def test_every_term_reaches_the_right_weights(node_federation, model):
    """Also with sparse features, which would be constants: a tenth of the entries is kept."""
    x = node_federation.graphs[0].x
    sparse = replace(
        node_federation.graphs[0],
        x=x * (torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) < 0.1),
    )
    for graph in (node_federation.graphs[0], sparse):
        method, clients = prepared(
            replace(node_federation, graphs=(graph, *node_federation.graphs[1:])), model
        )
        terms, inputs = method.generator_loss(clients["0"])
        assert inputs.shape == (len(clients["0"].memory["impaired"].rows), 4)
        for term, loss in terms.items():
            for part, parameters in parts(clients["0"]).items():
                gradients = torch.autograd.grad(
                    loss, parameters, retain_graph=True, allow_unused=True
                )
                reached = any(g is not None and g.abs().sum() > 0 for g in gradients)
                assert reached == (part in REACHED[term]), (term, part)


def test_the_terms_by_hand(node_federation):
    method, clients = prepared(
        node_federation, degree_weight=0.5, feature_weight=0.25, label_weight=2.0
    )
    client = clients["0"]
    memory, impaired = client.memory, client.memory["impaired"]
    rng = torch.Generator()
    rng.set_state(client.rng("generator").get_state())
    terms, inputs = method.generator_loss(client)
    z = memory["encoder"].embed(impaired.graph)
    degree = F.relu(memory["encoder"].head(z, impaired.graph)).flatten()
    gap = (degree - impaired.missing).abs()
    assert torch.isclose(terms["degree"], 0.5 * torch.where(gap < 1, gap**2 / 2, gap - 0.5).mean())
    assert torch.equal(inputs, noisy(z, impaired.rows, rng))
    generated, total = generate(memory["fgen"], inputs), 0.0
    for row, x in enumerate(generated):
        total += (
            (client.graph.x[impaired.pair_node[impaired.pair_row == row]] - x).square().sum(1).min()
        )
    assert torch.isclose(terms["feature"], 0.25 * total / impaired.graph.num_nodes)
    rows = torch.repeat_interleave(torch.arange(len(degree)), degree.round().long().clamp(max=2))
    graph = mend(impaired.graph, generate(memory["fgen"], noisy(z, rows, rng)), rows)
    train = graph.train.nonzero().flatten()
    assert len(rows) > 0
    assert torch.isclose(
        terms["label"], 2 * F.cross_entropy(memory["classifier"](graph)[train], graph.y[train])
    )


@pytest.mark.parametrize("weight", ["degree_weight", "feature_weight", "label_weight"])
def test_a_weight_of_zero_removes_its_term(node_federation, weight):
    method, clients = prepared(node_federation, **{weight: 0.0})
    terms, _ = method.generator_loss(clients["0"])
    assert terms.pop(weight.removesuffix("_weight")) == 0
    assert all(term > 0 for term in terms.values())


def test_without_weight_the_other_clients_change_nothing(node_federation):
    """A client's generator then does not depend on the other clients."""
    strangers = tuple(replace(g, x=-3 * g.x) for g in node_federation.graphs[1:])
    mended = []
    for graphs in (node_federation.graphs, (node_federation.graphs[0], *strangers)):
        for others in (0.0, 1.0):
            method, clients = prepared(
                replace(node_federation, graphs=graphs), others=others, generator_lr=0.1
            )
            rounds(method, clients, 3)
            mended.append(clients["0"].graph.x)
    assert torch.equal(mended[0], mended[2])
    assert mended[1].shape != mended[3].shape or not torch.equal(mended[1], mended[3])


def rounds(method, clients, count):
    """Runs some generator rounds, then mends the graphs."""
    for _ in range(count):
        for write, read in (
            (method.write_generator, method.read_generators),
            (method.write_gradients, method.read_gradients),
        ):
            written = {name: write(client) for name, client in clients.items()}
            for name, client in clients.items():
                inbox = {
                    s: {k: t.clone() for k, t in sent[name].items()}
                    for s, sent in written.items()
                    if name in sent
                }
                read(client, **({"inbox": inbox} if inbox else {}))
    for client in clients.values():
        method.mend_graphs(client)


def test_generators_learn(node_federation):
    method, clients = prepared(node_federation, generator_lr=0.02, latent=16)
    before, _ = method.generator_loss(clients["0"])
    for _ in range(60):
        method.write_generator(clients["0"])
        method.read_gradients(clients["0"])
    after, _ = method.generator_loss(clients["0"])
    assert all(after[term] < before[term] for term in before)


# ---- mending ----
def test_a_mended_graph_has_its_new_nodes_linked_both_ways(node_federation):
    graph = replace(
        node_federation.graphs[0],
        edge_weight=torch.full((node_federation.graphs[0].num_edges,), 2.0),
    )
    n, rows = graph.num_nodes, torch.tensor([0, 0, 3])
    generated = torch.randn(3, graph.num_features)
    after = mend(graph, generated, rows).check()
    assert (after.num_nodes, after.num_edges) == (n + 3, graph.num_edges + 6)
    assert torch.equal(after.x, torch.cat([graph.x, generated]))
    assert torch.equal(after.edge_index[:, : graph.num_edges], graph.edge_index)
    new = {tuple(pair) for pair in after.edge_index[:, graph.num_edges :].T.tolist()}
    assert new == {(0, n), (0, n + 1), (3, n + 2), (n, 0), (n + 1, 0), (n + 2, 3)}
    assert after.edge_weight[graph.num_edges :].tolist() == [1.0] * 6
    assert after.y[n:].tolist() == after.node_id[n:].tolist() == [-1] * 3
    assert not (after.train | after.val | after.test)[n:].any()
    for mask in ("train", "val", "test", "y"):
        assert torch.equal(getattr(after, mask)[:n], getattr(graph, mask))
    weight = torch.randn(graph.num_features, 4)
    assert torch.allclose(after.project(weight), after.x @ weight, atol=1e-5)
    assert mend(graph, generated[:0], rows[:0]) is graph


def test_training_and_evaluation_use_the_same_new_nodes_and_only_real_ones_count(node_federation):
    method, clients = prepared(node_federation)
    rounds(method, clients, 2)
    client = clients["0"]
    method.setup(client)
    full, n = client.memory["full graph"], client.full_graph.num_nodes
    assert client.graph.num_nodes == full.num_nodes > n
    assert torch.equal(client.graph.x, full.x)
    assert torch.equal(client.graph.edge_index, full.edge_index)
    assert torch.equal(client.graph.y, torch.where(full.train, full.y, -1))
    assert method.size(client)["size"] == n
    logits = method.predict(client, None)
    assert len(logits) == n
    assert torch.equal(logits, client.state["model"](full)[:n])
    held_out = method.evaluate(client)
    assert held_out["val"].sum() == client.full_graph.val.sum()
    assert held_out["test"].sum() == client.full_graph.test.sum()


def test_an_inductive_client_has_its_whole_graph_mended_for_evaluation(node_federation):
    method, _ = prepared(node_federation)
    graph = node_federation.graphs[0]
    facts = Facts(graph.num_features, graph.num_classes, "node", ("0",), ("gcn-2x8",), dropout=0.0)
    client = Client("0", graph, facts, inductive=True)
    method.prepare(client)
    rounds(method, {"0": client}, 2)
    real = client.memory["full graph"].node_id >= 0
    assert torch.equal(client.memory["full graph"].node_id[real], graph.node_id)
    assert torch.equal(client.graph.node_id[client.graph.node_id >= 0], graph.node_id[graph.train])


def test_an_inductive_client_without_training_nodes_takes_part(node_federation):
    first, *rest = node_federation.graphs
    bare = replace(first, test=first.test | first.train, train=torch.zeros_like(first.train))
    result = run(
        "fedsage+",
        replace(node_federation, graphs=(bare, *rest), whole=None, inductive=True),
        **SMALL,
    )
    assert result.summary["status"] == "completed"


def test_without_generated_nodes_it_is_fedavg(node_federation):
    """Without edges no neighbour is hidden, dGen learns that, and the run equals FedAvg."""
    bare = [replace(g, edge_index=g.edge_index[:, :0]) for g in node_federation.graphs]
    federation = replace(node_federation, graphs=tuple(bare), whole=None)
    plain = run("fedavg", federation, model="sage-2x8", rounds=2)
    sage = run("fedsage+", federation, **{**SMALL, "generator_rounds": 60})
    one, other = flatten(sage.final_models), flatten(plain.final_models)
    assert all(torch.equal(one[key], other[key]) for key in other)


# ---- what travels ----
def test_peer_messages_hold_only_generators_noisy_embeddings_and_gradients(
    node_federation, monkeypatch
):
    sent, original = [], Loop.call
    monkeypatch.setattr(
        Loop,
        "call",
        lambda self, phase, m: sent.append((phase, r := original(self, phase, m))) or r,
    )
    run("fedsage+", node_federation, **SMALL)
    inbox = [
        (phase, reply)
        for phase, replies in sent
        if phase.startswith("write")
        for reply in replies.values()
    ]
    assert {phase for phase, _ in inbox} == {"write_generator", "write_gradients"}
    for phase, reply in inbox:
        for message in reply.values():
            assert message.keys() == set(FGEN) | (
                {"noisy"} if phase == "write_generator" else set()
            )
            assert all(t.is_floating_point() for t in message.values())
            assert phase == "write_gradients" or 0 < len(message["noisy"]) <= SMALL["sample"]
    before = [phase for phase, _ in sent].index("train")
    assert {phase for phase, _ in sent[before:]} <= {"train", "evaluate", "size"}


def test_labels_do_not_change_the_peer_messages_without_the_classifier(
    node_federation, monkeypatch
):
    written, original = [], Loop.call

    def call(self, phase, messages):
        replies = original(self, phase, messages)
        if phase.startswith("write"):
            written.append(flatten(replies))
        return replies

    monkeypatch.setattr(Loop, "call", call)
    for shift in (0, 1):
        graphs = tuple(replace(g, y=(g.y + shift) % g.num_classes) for g in node_federation.graphs)
        run(
            "fedsage+",
            replace(node_federation, graphs=graphs, whole=None),
            **SMALL,
            label_weight=0.0,
        )
    half = len(written) // 2
    for one, other in zip(written[:half], written[half:], strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_more_rows_than_agreed_are_refused(node_federation):
    method, clients = prepared(node_federation)
    message = method.write_generator(clients["0"])["1"]
    message["noisy"] = message["noisy"].repeat(99, 1)
    with pytest.raises(
        MessageError,
        match=r"client '0' in 'write_generator': tensor 'noisy' has \d+ rows, more than the 6 ",
    ):
        method.read_generators(clients["1"], {"0": message})


def test_an_unrequested_gradient_is_refused(node_federation):
    bare = replace(node_federation.graphs[0], edge_index=torch.zeros(2, 0, dtype=torch.int64))
    method, clients = prepared(replace(node_federation, graphs=(bare, *node_federation.graphs[1:])))
    # No node was hidden, so there is nothing to ask.
    assert method.write_generator(clients["0"]) == {}
    with pytest.raises(
        MessageError,
        match="client '1' in 'write_gradients': tensor 'first' is a gradient that this client did",
    ):
        method.read_gradients(clients["0"], {"1": message_of(bare, latent=4)})


def test_settings_out_of_range_and_graph_tasks_are_refused(graph_federation):
    for wrong in (
        {"most": 0},
        {"hidden": 1.0},
        {"hidden": 0.0},
        {"sample": 0},
        {"label_weight": -1.0},
    ):
        with pytest.raises(ConfigError, match=f"method.{next(iter(wrong))}"):
            FedSagePlus(**wrong)
    with pytest.raises(ConfigError, match="does node tasks"):
        run("fedsage+", graph_federation, **SMALL)
