"""MOON: the contrastive term and its limits."""

import torch
import torch.nn.functional as F

from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.core.message import flatten
from fedloom.experiments.run import run
from fedloom.methods.moon import Moon


def test_mu_zero_is_fedavg(node_federation):
    settings = {"model": "gcn-2x8", "rounds": 3}
    moon, avg = (
        run("moon", node_federation, mu=0.0, **settings),
        run("fedavg", node_federation, **settings),
    )
    assert all(
        torch.allclose(t, flatten(avg.final_models["server"])[k], atol=1e-6)
        for k, t in flatten(moon.final_models["server"]).items()
    )


def test_the_first_round_is_fedavg_and_later_ones_are_not(node_federation):
    for rounds, same in ((1, True), (3, False)):
        moon, avg = (
            run(m, node_federation, model="gcn-2x8", rounds=rounds, **s)
            for m, s in (("moon", {"mu": 5.0}), ("fedavg", {}))
        )
        gap = max(
            float((t - flatten(avg.final_models["server"])[k]).abs().max())
            for k, t in flatten(moon.final_models["server"]).items()
        )
        assert (gap < 1e-5) == same


def test_the_term_is_eq_3(node_federation):
    graph = node_federation.graphs[0]
    facts = Facts(graph.num_features, graph.num_classes, "node", ("0",), ("gcn-2x8",), dropout=0.0)
    client, method = Client("0", graph, facts), Moon(mu=0.7, tau=0.3)
    method.setup(client)
    model = client.state["model"]
    client.state |= {"global": client.build("one"), "previous": client.build("other")}
    z = model.embed(client.graph)
    near, far = (
        torch.exp(F.cosine_similarity(z, client.state[k].embed(client.graph)) / 0.3)
        for k in ("global", "previous")
    )
    expected = (
        client.loss(model(client.graph), client.graph)
        + 0.7 * -torch.log(near / (near + far)).mean()
    )
    assert torch.isclose(method.objective(client, client.graph, model, {}), expected, atol=1e-6)
