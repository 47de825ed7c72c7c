"""FED-PUB: masks and penalties by hand, the random graph, the mixtures, and its limits."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.core.message import flatten
from fedloom.data.federation import Federation
from fedloom.experiments.run import run
from fedloom.methods._shared.mixtures import mixtures
from fedloom.methods.fed_pub import FedPub, masked, pruned, random_graph, similarity
from fedloom.methods.fedavg import FedAvg
from fedloom.nn.training import step
from fedloom.nn.weights import weights

pytestmark = pytest.mark.usefixtures("reference_engine")

SMALL = {"model": "gcn-2x8", "rounds": 3}
PLAIN = {"masks": False, "proximal": 0.0}  # only the mixing is left


class EvenFedAvg(FedAvg):
    """FedAvg whose clients have equal weight."""

    def run(self, server):
        server.ask(self.setup)
        server.state["model"] = server.model()
        for _ in server.rounds(self.rounds):
            server.state["model"] = server.ask(self.train, model=server.state["model"]).mean()[
                "model"
            ]
            server.evaluate()


def facts_of(federation, model="gcn-2x8", dropout=0.0, seed=0):
    models = (model,) * federation.num_clients
    return Facts(
        federation.num_features,
        federation.num_classes,
        federation.task,
        federation.names,
        models,
        dropout=dropout,
        seed=seed,
    )


def scene(federation, **settings):
    """Returns a method, a client whose mask is not all ones, and a mixture.

    The mixture differs from the client's weights.
    """
    client, method = Client("0", federation.graphs[0], facts_of(federation)), FedPub(**settings)
    method.setup(client)
    rng = torch.Generator().manual_seed(0)
    for m in client.state["mask"].values():
        m.data.copy_(torch.randn(m.shape, generator=rng))
    mixture = {
        name: t + torch.randn(t.shape, generator=rng)
        for name, t in weights(client.state["theta"]).items()
    }
    return method, client, mixture


def gap(one, other):
    one, other = flatten(one), flatten(other)
    assert one.keys() == other.keys()
    return max(float((one[key] - other[key]).abs().max()) for key in one)


# ---- at a client ----
def test_the_objective_by_hand(node_federation):
    method, client, mixture = scene(node_federation, sparsity=0.2, proximal=0.3)
    model, mask, graph = client.state["theta"], client.state["mask"], client.graph
    assert set(mask) == {"layers.0.weight", "classifier.weight"}
    S, (W, b), (V, c) = (
        graph.adjacency("sym").dense(),
        model.layers[0].parameters(),
        model.classifier.parameters(),
    )
    h = torch.relu(S @ (graph.x @ (W * mask["layers.0.weight"])) + b)
    logits = S @ (h @ (V * mask["classifier.weight"])) + c
    expected = torch.nn.functional.cross_entropy(logits[graph.train], graph.y[graph.train])
    expected = expected + 0.2 * sum(abs(x) for m in mask.values() for x in m.flatten().tolist())
    expected = expected + 0.3 * sum(
        ((p - mixture[name]) ** 2).sum() for name, p in model.named_parameters()
    )
    assert torch.isclose(method.objective(client, graph, model, mixture), expected, rtol=1e-5)


def test_both_penalties_have_the_right_gradients(node_federation):
    """In public code they have none."""
    method, client, mixture = scene(node_federation, sparsity=0.2, proximal=0.3)
    bare, graph = FedPub(sparsity=0.0, proximal=0.0), client.graph
    model, mask = client.state["theta"], client.state["mask"]
    parameters = dict(model.named_parameters()) | {f"mask of {name}": m for name, m in mask.items()}
    with_both, without = (
        dict(
            zip(
                parameters,
                torch.autograd.grad(
                    m.objective(client, graph, model, mixture), list(parameters.values())
                ),
                strict=True,
            )
        )
        for m in (method, bare)
    )
    for name, p in model.named_parameters():
        assert torch.allclose(
            with_both[name] - without[name], 0.3 * 2 * (p - mixture[name]), atol=1e-4
        )
    effective = masked(dict(model.named_parameters()), mask)
    loss = client.loss(torch.func.functional_call(model, effective, (graph,)), graph)
    for name, m in mask.items():
        assert torch.allclose(
            with_both[f"mask of {name}"] - without[f"mask of {name}"], 0.2 * m.sign(), atol=1e-5
        )
        (slope,) = torch.autograd.grad(loss, effective[name], retain_graph=True)
        assert torch.allclose(
            without[f"mask of {name}"], slope * dict(model.named_parameters())[name], atol=1e-5
        )
        assert without[f"mask of {name}"].abs().sum() > 0


def test_small_mask_entries_count_as_zero_only_in_predictions(node_federation):
    theta, mask = (
        {"w": torch.tensor([[2.0, 3.0, 4.0]]), "b": torch.ones(3)},
        {"w": torch.tensor([[0.05, -0.05, -0.5]])},
    )
    assert torch.allclose(masked(theta, mask)["w"], torch.tensor([[0.1, -0.15, -2.0]]))
    assert masked(theta, pruned(mask, 0.1))["w"].tolist() == [[0.0, 0.0, -2.0]]
    assert masked(theta, pruned(mask, 0.1))["b"] is theta["b"]
    method, client, mixture = scene(node_federation, sparsity=0.5)
    reply = method.train(client, mixture)
    state = client.state
    mask = {name: m.detach() for name, m in state["mask"].items()}
    assert gap(weights(state["model"]), masked(reply["model"], pruned(mask, 0.5))) == 0
    assert (state["model"].classifier.weight == 0).any()
    assert not (state["theta"].classifier.weight == 0).any()
    assert torch.allclose(reply["outlook"], state["model"](random_graph(client.facts)).mean(0))


def test_masks_start_at_one_and_the_l1_norm_makes_them_sparse(node_federation):
    client, method = (
        Client("0", node_federation.graphs[0], facts_of(node_federation)),
        FedPub(sparsity=0.05),
    )
    method.setup(client)
    assert all((m == 1).all() for m in client.state["mask"].values())
    for _ in range(150):
        step(
            client.state["optimizer"],
            method.objective(
                client, client.graph, client.state["theta"], weights(client.state["theta"])
            ),
        )
    small = torch.cat([(m.abs() < 0.05).flatten() for m in client.state["mask"].values()])
    assert 0.3 < small.float().mean() < 1
    assert client.loss(client.state["theta"](client.graph), client.graph).isfinite()


def test_masks_have_no_weight_decay(node_federation):
    for masks, groups in ((True, 2), (False, 0)):
        client = Client("0", node_federation.graphs[0], facts_of(node_federation))
        FedPub(masks=masks, weight_decay=0.1).setup(client)
        theta, mask = client.state["optimizer"].param_groups
        assert (theta["weight_decay"], mask["weight_decay"], len(mask["params"])) == (
            0.1,
            0.0,
            groups,
        )


# ---- the random graph and the mixtures ----
def test_the_random_graph(node_federation, graph_federation):
    graph = random_graph(facts_of(node_federation)).check()
    assert (graph.num_nodes, graph.num_items, graph.num_features) == (500, 500, 12)
    source, target = graph.edge_index
    assert (source // 100 == target // 100).all()  # no edge between blocks
    assert (source != target).all()
    assert len(
        {*zip(source.tolist(), target.tolist(), strict=True)}
        & {*zip(target.tolist(), source.tolist(), strict=True)}
    ) == len(source)
    assert abs(len(source) / (500 * 99) - 0.1) < 0.01
    assert abs(graph.x.mean()) < 0.05
    assert abs(graph.x.std() - 1) < 0.05
    again, other = (random_graph(facts_of(node_federation, seed=seed)) for seed in (0, 1))
    assert torch.equal(again.x, graph.x)
    assert not torch.equal(other.x, graph.x)
    items = random_graph(facts_of(graph_federation)).check()
    assert (items.num_nodes, items.num_items, items.task) == (500, 5, "graph")


def test_similarities_and_mixtures_by_hand():
    h = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 3.0], [0.0, 0.0]])
    S, half = similarity(h), 0.5**0.5
    assert torch.allclose(
        S, torch.tensor([[1, 0, half, 0], [0, 1, half, 0], [half, half, 1, 0], [0, 0, 0, 0]])
    )
    models = {
        name: {"w": torch.full((2, 2), float(k)), "b": torch.tensor([k * 10.0])}
        for k, name in enumerate("abc")
    }
    share = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.5, 0.5], [0.2, 0.3, 0.5]])
    mixed = mixtures(models, share)
    for client, w in {"a": 0.0, "b": 1.5, "c": 1.3}.items():
        assert torch.allclose(mixed[client]["w"], torch.full((2, 2), w))
        assert torch.allclose(mixed[client]["b"], torch.tensor([10 * w]))


def test_clients_get_the_mixture_of_their_outlooks(node_federation, trainings):
    exchanges = trainings()
    run("fed-pub", node_federation, scale=5.0, **SMALL)
    for (_, replies), (sent, _) in pairwise(exchanges):
        h = [replies[c]["outlook"] for c in node_federation.names]
        for k, client in enumerate(node_federation.names):
            e = torch.stack(
                [torch.exp(5 * torch.cosine_similarity(h[k], other, dim=0)) for other in h]
            )
            by_hand = sum(
                w * replies[c]["model"]["layers.0.weight"]
                for w, c in zip(e / e.sum(), node_federation.names, strict=True)
            )
            assert torch.allclose(sent[client]["model"]["layers.0.weight"], by_hand, atol=1e-6)
    assert gap(exchanges[1][0]["0"], exchanges[1][0]["1"]) > 1e-4


def test_the_mask_never_travels(federation, trainings):
    exchanges = trainings()
    result = run("fed-pub", federation, **SMALL)
    shapes = {f"model/{name}": t.shape for name, t in result.final_models["0"].items()}
    for sent, replies in exchanges:
        for client, reply in replies.items():
            assert {name: t.shape for name, t in flatten(sent[client]).items()} == shapes
            assert {name: t.shape for name, t in flatten(reply).items()} == shapes | {
                "outlook": (federation.num_classes,)
            }


def test_traffic(node_federation):
    """2|θ| + C per client and round."""
    traffic = run("fed-pub", node_federation, **SMALL).traffic
    theta, K, R = 12 * 8 + 8 + 8 * 3 + 3, 4, 3
    assert traffic["scalars_down"] == K * R * theta
    assert traffic["scalars_up"] == K * R * (theta + 3)


# ---- limits ----
def test_scale_zero_without_masks_and_penalty_is_fedavg_with_equal_weights(federation):
    plain = run(EvenFedAvg(rounds=3), federation, model="gcn-2x8")
    assert (
        gap(
            run("fed-pub", federation, scale=0.0, **PLAIN, **SMALL).final_models, plain.final_models
        )
        < 1e-6
    )
    for settings in (
        {**PLAIN, "scale": 10.0},
        {**PLAIN, "scale": 0.0, "masks": True},
        {**PLAIN, "scale": 0.0, "proximal": 0.1},
    ):
        assert (
            gap(run("fed-pub", federation, **settings, **SMALL).final_models, plain.final_models)
            > 1e-4
        )


def test_identical_clients_get_identical_models(node_federation, trainings):
    one, two, *_ = node_federation.graphs
    exchanges = trainings()
    result = run("fed-pub", Federation((one, two, one)), dropout=0.0, **SMALL)
    for sent, replies in exchanges:
        assert gap(sent["0"], sent["2"]) < 1e-6
        assert gap(replies["0"], replies["2"]) < 1e-5
    assert gap(exchanges[-1][0]["0"], exchanges[-1][0]["1"]) > 1e-3
    assert gap(result.final_models["0"], result.final_models["2"]) < 1e-5


def test_one_client_trains_alone(node_federation, trainings):
    exchanges = trainings()
    run("fed-pub", Federation(node_federation.graphs[:1]), **SMALL)
    assert all(
        gap(replies["0"]["model"], sent["0"]["model"]) == 0
        for (_, replies), (sent, _) in pairwise(exchanges)
    )


def test_new_clients_get_the_plain_mean_and_others_their_last_mixture(node_federation, trainings):
    exchanges = trainings()
    run("fed-pub", node_federation, model="gcn-2x8", rounds=8, participation=0.5, scale=3.0)
    mixture, mean, newcomers, returned = {}, None, 0, 0
    for sent, replies in exchanges:
        for client, message in sent.items():
            if client in mixture:
                assert gap(message["model"], mixture[client]) < 1e-6
                returned += 1
            elif mean is not None:
                assert gap(message["model"], mean) < 1e-6
                newcomers += 1
        models = {c: r["model"] for c, r in replies.items()}
        share = (3.0 * similarity(torch.stack([r["outlook"] for r in replies.values()]))).softmax(1)
        mixture |= mixtures(models, share)
        mean = {
            name: sum(m[name] for m in models.values()) / len(models)
            for name in models[next(iter(models))]
        }
    assert newcomers > 0
    assert returned > 0


# ---- bad input ----
def test_a_client_without_labels_returns_its_mixture(node_federation, trainings):
    graphs = node_federation.graphs
    bare = replace(graphs[0], train=torch.zeros_like(graphs[0].train))
    for inductive in (False, True):
        exchanges = trainings()
        result = run(
            "fed-pub",
            replace(node_federation, graphs=(bare, *graphs[1:]), whole=None, inductive=inductive),
            **SMALL,
        )
        assert result.summary["status"] == "completed"
        assert all(
            gap(sent["0"]["model"], replies["0"]["model"]) == 0 for sent, replies in exchanges
        )


def test_a_client_of_one_class_and_isolated_nodes(node_federation):
    first, *rest = node_federation.graphs
    kept = first.train & (first.y == 0)
    single = replace(
        first,
        train=kept,
        test=first.test | (first.train & ~kept),
        edge_index=first.edge_index[:, :0],
    )
    result = run("fed-pub", replace(node_federation, graphs=(single, *rest), whole=None), **SMALL)
    assert all(t.isfinite().all() for t in flatten(result.final_models).values())


@pytest.mark.parametrize(
    "model", ["gat-2x8", "sage-2x8+linear", "gin-2x8", "gcnii-2x8", "gamlp-2x8", "dgcn-2x8"]
)
def test_any_architecture_can_be_masked(federation, model):
    result = run("fed-pub", federation, model=model, rounds=2)
    assert all(t.isfinite().all() for t in flatten(result.final_models).values())
