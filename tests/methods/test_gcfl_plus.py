"""GCFL+: time warping, when and how a cluster is split, and the limits."""

from dataclasses import replace

import pytest
import torch

from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.core.message import flatten
from fedloom.core.replies import Replies
from fedloom.data.federation import Federation
from fedloom.data.partition import divide
from fedloom.data.synthetic import synthetic_graphs
from fedloom.engines.loop import Engine as Loop
from fedloom.errors import ConfigError
from fedloom.experiments.run import run
from fedloom.methods.gcfl_plus import GCFLPlus, dtw, minimum_cut
from fedloom.methods.local import Local
from fedloom.nn.weights import extractor_weights, load_weights, weights

pytestmark = pytest.mark.usefixtures("reference_engine")

QUICK = {"after": 1, "sequence": 2, "eps1": 1e9, "eps2": 0.0}  # a split in the second round
OTHER = {"eps1": 0.0, "eps2": 1e9}
NEEDS = {"standardise": {"seed": 3}}  # here trends and lengths give different splits
SMALL = {"model": "gin-2x8", "rounds": 4, **QUICK}


@pytest.fixture(scope="module")
def planted():
    """Returns six clients. The first three have no features, so their updates are shorter."""
    even = divide(
        synthetic_graphs(graphs=120, classes=2, seed=2), 6, "uniform", 0, split="50/20/30"
    )
    graphs = tuple(
        replace(g, x=torch.zeros_like(g.x)) if k < 3 else g for k, g in enumerate(even.graphs)
    )
    return replace(even, graphs=graphs, whole=None)


def sent_extractors(monkeypatch):
    """Returns the extractors that were sent, by round, as {client: sums of its tensors}."""
    exchanges, original = [], Loop.call

    def call(self, phase, sent):
        if phase == "train":
            exchanges.append(
                {c: tuple(t.sum().item() for t in flatten(m).values()) for c, m in sent.items()}
            )
        return original(self, phase, sent)

    monkeypatch.setattr(Loop, "call", call)
    return exchanges


def test_time_warping_by_hand():
    t = torch.tensor
    assert dtw(t([1.0, 2.0, 3.0]), t([1.0, 2.0, 3.0])) == 0
    # The same sequence at another pace.
    assert dtw(t([1.0, 2.0, 3.0]), t([1.0, 1.0, 2.0, 3.0, 3.0])) == 0
    assert dtw(t([0.0, 0.0]), t([3.0, 4.0])) == 5
    # 0-1, 0-1, 3-2: three gaps of 1.
    assert dtw(t([0.0, 0.0, 3.0]), t([1.0, 2.0])) == pytest.approx(3**0.5)


def test_time_warping_is_the_best_of_all_alignments():
    def best(a, b):
        if not a or not b:
            return 0.0 if not a and not b else float("inf")
        return (a[-1] - b[-1]) ** 2 + min(best(a[:-1], b), best(a, b[:-1]), best(a[:-1], b[:-1]))

    rng = torch.Generator().manual_seed(0)
    for _ in range(10):
        a, b = torch.rand(5, generator=rng), torch.rand(4, generator=rng)
        assert dtw(a, b) == pytest.approx(best(a.tolist(), b.tolist()) ** 0.5)
        assert dtw(a, b) == pytest.approx(dtw(b, a))


def test_the_minimum_cut_separates_different_sequences():
    near, far = torch.tensor([1.0, 0.9, 0.8]), torch.tensor([3.0, 3.1, 2.9])
    sequences = {
        name: (near if name in "ace" else far) + 0.01 * k for k, name in enumerate("abcdef")
    }
    assert minimum_cut(sequences) == ({"a", "c", "e"}, {"b", "d", "f"})
    assert minimum_cut(dict(reversed(sequences.items()))) == minimum_cut(sequences)


def test_a_cluster_diverges_if_its_mean_is_small_and_a_member_is_not():
    method = GCFLPlus(eps1=0.1, eps2=0.5)
    ahead = torch.tensor([1.0, 0.0])
    assert method.diverges([ahead, -ahead])
    assert not method.diverges([ahead, ahead])  # all updates point the same way
    assert not method.diverges([0.1 * ahead, -0.1 * ahead])  # all updates are short
    assert not method.diverges([ahead, -0.7 * ahead])  # the mean is 0.15 long


def test_standardised_sequences_have_deviation_one():
    sequence = torch.tensor([1.0, 3.0])
    assert GCFLPlus().standardised(sequence).tolist() == [1.0, 3.0]
    assert GCFLPlus(standardise=True).standardised(7 * sequence).tolist() == [1.0, 3.0]
    assert GCFLPlus(standardise=True).standardised(torch.tensor([2.0, 2.0])).tolist() == [2.0, 2.0]


def test_without_a_split_it_is_fedavg_of_the_extractor_with_private_heads(graph_federation):
    result = run("gcfl+", graph_federation, **{**SMALL, "eps1": 0.0})
    assert result.summary["notes"] == {"clusters": 1}
    models = ("gin-2x8",) * graph_federation.num_clients
    facts = Facts(graph_federation.num_features, 2, "graph", graph_federation.names, models)
    clients = {
        name: Client(name, g, facts)
        for name, g in zip(graph_federation.names, graph_federation.graphs, strict=True)
    }
    size, local = (
        {name: torch.tensor(client.graph.num_items) for name, client in clients.items()},
        Local(),
    )
    shared = extractor_weights(weights(facts.build("gin-2x8", "server")))
    for client in clients.values():
        local.setup(client)
    for _ in range(4):
        for client in clients.values():
            model = client.state["model"]
            load_weights(model, weights(model) | shared)
            local.train(client)
        shared = Replies(
            {n: extractor_weights(weights(c.state["model"])) for n, c in clients.items()}
        ).mean(size)
    for name, client in clients.items():
        assert all(
            torch.equal(t, result.final_models[name][key])
            for key, t in weights(client.state["model"]).items()
        )


@pytest.mark.parametrize("model", ["gin-2x8", "gcn-2x8"])
def test_planted_groups_are_separated(model, planted, monkeypatch):
    exchanges = sent_extractors(monkeypatch)
    settings = {**SMALL, "model": model, "sequence": 3, "lr": 1e-3, "weight_decay": 0.0}
    result = run("gcfl+", planted, dropout=0.0, **settings)
    assert result.summary["notes"] == {"clusters": 2}
    assert [len(set(sent.values())) for sent in exchanges] == [
        1,
        1,
        1,
        2,
    ]  # three norms, then the split
    assert [exchanges[-1][c] == exchanges[-1]["0"] for c in planted.names] == [True] * 3 + [
        False
    ] * 3


def test_only_clusters_of_three_or_more_are_split_again(planted):
    cut_often = {**SMALL, "rounds": 12, "after": 0, "sequence": 1}
    assert 3 <= run("gcfl+", planted, **cut_often).summary["notes"]["clusters"] <= 5
    pair = replace(planted, graphs=planted.graphs[2:4], names=planted.names[2:4])
    assert run("gcfl+", pair, **cut_often).summary["notes"] == {"clusters": 1}
    assert run("gcfl+", Federation(planted.graphs[:1]), **cut_often).summary["notes"] == {
        "clusters": 1
    }


def test_a_run_killed_after_a_split_resumes_with_the_same_clusters(planted, tmp_path):
    class Killed(BaseException):
        pass

    def die(entry):
        if entry["round"] == 4:
            raise Killed

    settings = {**SMALL, "rounds": 6, "participation": 0.7, "checkpoint_every": 1, "seed": 3}
    unbroken = run("gcfl+", planted, out=tmp_path / "unbroken", **settings)
    with pytest.raises(Killed):
        run("gcfl+", planted, out=tmp_path / "broken", callbacks=die, **settings)
    resumed = run("gcfl+", planted, out=tmp_path / "broken", resume=True, **settings)
    assert unbroken.summary["notes"]["clusters"] > 1
    assert resumed.summary["notes"] == unbroken.summary["notes"]
    assert resumed.summary["history_hash"] == unbroken.summary["history_hash"]


def test_the_head_never_travels_and_heads_differ(graph_federation, trainings):
    exchanges = trainings()
    result = run("gcfl+", graph_federation, **SMALL)
    names = {
        name
        for sent, replies in exchanges
        for message in (*sent.values(), *replies.values())
        for name in flatten(message)
    }
    assert names == {
        f"model/{key}" for key in result.final_models["0"] if not key.startswith("classifier.")
    }
    assert not torch.equal(
        result.final_models["0"]["classifier.weight"], result.final_models["1"]["classifier.weight"]
    )


def test_a_client_without_labels_keeps_its_clusters_extractor(graph_federation):
    first, *rest = graph_federation.graphs
    bare = replace(first, train=torch.zeros_like(first.train), test=first.test | first.train)
    result = run("gcfl+", replace(graph_federation, graphs=(bare, *rest), whole=None), **SMALL)
    assert result.summary["status"] == "completed"


def test_graph_tasks_only(node_federation):
    with pytest.raises(ConfigError, match="does graph tasks"):
        run("gcfl+", node_federation, **SMALL)
