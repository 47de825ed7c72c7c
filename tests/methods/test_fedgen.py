"""FedGen: the ensemble, the generator's and the clients' losses, and the limits."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.core.message import flatten
from fedloom.core.replies import Replies
from fedloom.data.federation import Federation
from fedloom.engines.loop import Engine as Loop
from fedloom.errors import ConfigError
from fedloom.experiments.run import run
from fedloom.methods.fedgen import Ensemble, FedGen, diversity
from fedloom.methods.local import Local
from fedloom.nn.training import make_optimizer, step
from fedloom.nn.weights import load_weights, weights

pytestmark = pytest.mark.usefixtures("reference_engine")

CONTRACT_MODEL = "gcn-2x8+linear"  # the model of the contract tests
CONTRACT_MODELS = "gcn-2x8+linear,gat-2x8+linear,sage-2x8+linear"
QUICK = {"generator_steps": 3, "hidden": 8, "noise": 4, "imagined": 8}
SMALL = {"model": CONTRACT_MODEL, "rounds": 3, **QUICK}


def same(one, other):
    one, other = flatten(one.final_models), flatten(other.final_models)
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def facts_of(federation, model=CONTRACT_MODEL, dropout=0.5):
    models = (model,) * federation.num_clients
    return Facts(
        federation.num_features,
        federation.num_classes,
        federation.task,
        federation.names,
        models,
        dropout=dropout,
    )


def scene(clients=3, p=8, classes=3, m=20):
    """Returns heads of some clients, their label counts, a generator and a batch."""
    rng = torch.Generator().manual_seed(0)
    heads = [
        {
            "weight": torch.randn(p, classes, generator=rng),
            "bias": torch.randn(classes, generator=rng),
        }
        for _ in range(clients)
    ]
    counts = torch.randint(1, 9, (clients, classes), generator=rng)
    method = FedGen(noise=4, hidden=16, imagined=m)
    generator = method.make_generator(
        Facts(5, classes, "node", ("0",), (f"gcn-2x{p}+linear",)), rng
    )
    return method, heads, counts, generator, *method.draw(torch.ones(classes) / classes, rng)


def test_the_ensemble_weights_heads_by_label_counts():
    _, heads, counts, generator, noise, y = scene()
    z = generator(noise, y)
    for i in range(len(y)):
        shares = counts[:, y[i]] / counts[:, y[i]].sum()
        by_hand = sum(shares[k] * (z[i] @ heads[k]["weight"] + heads[k]["bias"]) for k in range(3))
        assert torch.allclose(Ensemble(heads, counts)(z, y)[i], by_hand, atol=1e-5)


def test_the_generators_loss_by_hand():
    method, heads, counts, generator, noise, y = scene()
    z, m = generator(noise, y), len(y)
    pairs = (
        sum(
            (z[i] - z[j]).abs().mean() * (noise[i] - noise[j]).square().mean()
            for i in range(m)
            for j in range(m)
        )
        / m**2
    )
    assert torch.isclose(diversity(noise, z), torch.exp(-pairs), atol=1e-6)
    assert diversity(noise, torch.ones_like(z)) == 1  # the worst case: equal embeddings
    expected = F.cross_entropy(Ensemble(heads, counts)(z, y), y) + torch.exp(-pairs)
    assert torch.isclose(
        method.generator_loss(generator, Ensemble(heads, counts), noise, y), expected, atol=1e-5
    )


def test_every_term_of_the_generator_reaches_every_weight():
    _, heads, counts, generator, noise, y = scene()
    z = generator(noise, y)
    for term in (F.cross_entropy(Ensemble(heads, counts)(z, y), y), diversity(noise, z)):
        gradients = torch.autograd.grad(term, list(generator.parameters()), retain_graph=True)
        assert all(g.abs().sum() > 0 for g in gradients)


@pytest.mark.parametrize("p", [8, 64])
def test_the_generators_gradient_is_that_of_its_loss(p):
    method, heads, counts, generator, noise, y = scene(p=p)
    method = replace(method, diversity=0.7)
    ensemble, parameters = Ensemble(heads, counts), list(generator.parameters())
    loss = method.generator_loss(generator, ensemble, noise, y)
    expected = torch.autograd.grad(loss, parameters)
    method.set_gradient(generator, ensemble, noise, y)
    for parameter, gradient in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-6, atol=1e-8)


def test_the_generator_learns_what_the_heads_know():
    method, heads, counts, generator, *_ = scene()
    optimizer, rng = (
        make_optimizer("adam", generator.parameters(), method.generator_lr, 0.0),
        torch.Generator().manual_seed(1),
    )
    for _ in range(200):
        step(
            optimizer,
            method.generator_loss(
                generator, Ensemble(heads, counts), *method.draw(torch.ones(3) / 3, rng)
            ),
        )
    noise, y = method.draw(torch.ones(3) / 3, rng)
    z = generator(noise, y)
    assert (Ensemble(heads, counts)(z, y).argmax(1) == y).all()
    assert diversity(noise, z) < 0.5


def test_the_clients_loss_by_hand_and_generated_embeddings_reach_only_the_head(node_federation):
    client, method = (
        Client("0", node_federation.graphs[0], facts_of(node_federation, dropout=0.0)),
        FedGen(alpha=0.7, noise=4, hidden=8),
    )
    method.setup(client)
    model, generator = (
        client.state["model"],
        method.make_generator(client.facts, client.rng("another")),
    )
    sent = {"generator": weights(generator), "prior": torch.tensor([0.5, 0.5, 0.0])}
    stream = client.rng("imagined").get_state()
    loss = method.objective(client, client.graph, model, sent)
    client.rng("imagined").set_state(stream)
    noise, y = method.draw(sent["prior"], client.rng("imagined"))
    assert y.max() < 2  # a class that no client has is never generated
    on_generated = F.cross_entropy(
        generator(noise, y) @ model.classifier.weight + model.classifier.bias, y
    )
    assert torch.isclose(
        loss, client.loss(model(client.graph), client.graph) + 0.7 * on_generated, atol=1e-6
    )
    gradients = torch.autograd.grad(on_generated, list(model.parameters()), allow_unused=True)
    reached = {
        name
        for (name, _), g in zip(model.named_parameters(), gradients, strict=True)
        if g is not None and g.any()
    }
    assert reached == {"classifier.weight", "classifier.bias"}
    assert not any(p.requires_grad for p in flatten(sent).values())


def test_alpha_zero_is_lg_fedavg(federation):
    """A mean head on private extractors. The generator then has no effect."""
    settings = {**SMALL, "alpha": 0.0}
    result = run("fedgen", federation, **settings)
    assert same(
        result, run("fedgen", federation, **{**settings, "generator_steps": 1, "hidden": 5})
    )
    facts, local = facts_of(federation), Local()
    clients = {
        name: Client(name, graph, facts)
        for name, graph in zip(federation.names, federation.graphs, strict=True)
    }
    size = {name: torch.tensor(client.graph.num_items) for name, client in clients.items()}
    head = weights(facts.build(CONTRACT_MODEL, "server").classifier)
    for client in clients.values():
        local.setup(client)
    for _ in range(3):
        for client in clients.values():
            load_weights(client.state["model"].classifier, head)
            local.train(client)
        head = Replies({n: weights(c.state["model"].classifier) for n, c in clients.items()}).mean(
            size
        )
    for name, client in clients.items():
        assert all(
            torch.allclose(t, result.final_models[name][key], atol=1e-6)
            for key, t in weights(client.state["model"]).items()
        )


def test_messages_hold_only_heads_a_generator_and_label_counts(node_federation, monkeypatch):
    exchanges, original = [], Loop.call
    monkeypatch.setattr(
        Loop,
        "call",
        lambda self, phase, sent: (
            exchanges.append((phase, sent, r := original(self, phase, sent))) or r
        ),
    )
    run("fedgen", node_federation, **{**SMALL, "model": CONTRACT_MODELS})
    asked = [(sent["0"], replies["0"]) for phase, sent, replies in exchanges if phase == "train"]
    assert [set(sent) for sent, _ in asked] == [{"weight", "bias"}] + [
        {"weight", "bias", "generator", "prior"}
    ] * 2
    graph = node_federation.graphs[0]
    for _, reply in asked:
        assert {name: list(t.shape) for name, t in reply.items()} == {
            "weight": [8, 3],
            "bias": [3],
            "counts": [3],
        }
        assert reply["counts"].tolist() == [
            int((graph.train & (graph.y == c)).sum()) for c in range(3)
        ]


def test_heads_that_need_a_graph_are_refused_by_name(node_federation, graph_federation):
    with pytest.raises(ConfigError, match=r"model 'gcn-2x8': .* use 'gcn-2x8\+linear'"):
        run("fedgen", node_federation, **{**SMALL, "model": "mlp-2x8+linear,gcn-2x8"})
    with pytest.raises(ConfigError, match="one embedding width"):
        run("fedgen", node_federation, **{**SMALL, "model": "gcn-2x8+linear,gcn-2x16+linear"})
    assert (
        run("fedgen", graph_federation, **{**SMALL, "model": "gin-2x8,gcn-2x8"}).summary["status"]
        == "completed"
    )


def test_absent_classes_are_never_generated(node_federation, monkeypatch):
    priors, original = [], Loop.call

    def call(self, phase, sent):
        priors.extend(message["prior"] for message in sent.values() if "prior" in message)
        return original(self, phase, sent)

    def labelled(graph, kept):
        return replace(
            graph,
            train=graph.train & kept(graph.y),
            test=graph.test | (graph.train & ~kept(graph.y)),
        )

    monkeypatch.setattr(Loop, "call", call)
    graphs = node_federation.graphs
    run(
        "fedgen",
        replace(node_federation, graphs=tuple(labelled(g, lambda y: y != 1) for g in graphs)),
        **SMALL,
    )
    assert priors
    assert all(prior[1] == 0 and torch.isclose(prior.sum(), torch.tensor(1.0)) for prior in priors)
    priors.clear()
    unlabelled = replace(
        node_federation, graphs=tuple(labelled(g, lambda y: y < 0) for g in graphs)
    )
    assert run("fedgen", unlabelled, **SMALL).summary["status"] == "completed"
    assert not priors


def test_one_client_is_enough(node_federation):
    assert (
        run("fedgen", Federation((node_federation.graphs[0],)), **SMALL).summary["status"]
        == "completed"
    )
