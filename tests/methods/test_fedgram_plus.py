"""FedGram+: the scores become features, and the base method trains on them."""

import pytest
import torch
from tests.methods.test_fedgram import client_of

from fedloom.errors import ConfigError
from fedloom.experiments.run import run
from fedloom.methods.fedgram_plus import FedGramPlus, widened

QUICK = {"score_width": 8, "score_hops": "1,2"}
OTHER = {"base": "fedprox", "score_hops": "3"}


@pytest.fixture
def prepared(federation):
    """A plug-in, a client and a model of FedGram for it."""
    graph = federation.graphs[0]
    client, plugin = client_of(federation, "0", graph), FedGramPlus(score_weight=2.0)
    gram = plugin.gram
    columns = gram.columns(client.facts, 0, gram.full(client.facts))
    rng = torch.Generator().manual_seed(0)
    W = torch.randn(columns, graph.num_classes, generator=rng)
    return plugin, client, {"weights": W, "map": torch.tensor(0)}


def test_scores_are_appended_to_the_features(prepared):
    plugin, client, model = prepared
    plain, scores = client.full_graph, plugin.gram.scores(client, model)
    plugin.append_scores(client, model)
    x, d = client.full_graph.x, plain.num_features
    assert torch.equal(x[:, :d], plain.x)
    of_nodes = scores if plain.batch is None else scores[plain.batch]
    assert torch.equal(x[:, d:], 2 * of_nodes)
    assert torch.equal(client.graph.x, x)
    assert (client.graph.y[~client.graph.train] == -1).all()  # held-out labels stay hidden


def test_appending_again_changes_nothing(prepared):
    plugin, client, model = prepared
    facts = client.facts
    plugin.append_scores(client, model)
    first = client.full_graph.x
    plugin.append_scores(client, model)
    assert torch.equal(client.full_graph.x, first)
    assert client.facts == widened(facts)


@pytest.mark.parametrize("base", ["fedavg", "fedpg", "fedgkc"])
def test_the_base_method_trains_on_wider_features(node_federation, base):
    settings = {"copilot": "gcn-2x8"} if base == "fedgkc" else {}
    result = run(
        "fedgram+", node_federation, base=base, rounds=2, model="gcn-2x8", engine="loop", **settings
    )
    wide = node_federation.num_features + node_federation.num_classes
    assert result.models["0"]["layers.0.weight"].shape[0] == wide
    assert result.traffic["phases"]["send_moments"]["messages"] > 0


def test_it_does_not_prepare_clients_for_itself(node_federation):
    with pytest.raises(ConfigError, match=r"method\.base is 'fedgram'.*both define"):
        run("fedgram+", node_federation, base="fedgram")
