"""FedAvg's equations, and its traffic to the scalar."""

from dataclasses import replace

import pytest
import torch

from fedloom.core.message import flatten
from fedloom.core.replies import Replies
from fedloom.data.federation import Federation
from fedloom.data.synthetic import synthetic
from fedloom.experiments.run import run
from fedloom.methods.fedavg import FedAvg


def test_the_server_takes_the_weighted_mean_of_the_weights(node_federation):
    result = run("fedavg", node_federation, model="gcn-2x8", rounds=2)
    sizes = torch.tensor([float(g.num_items) for g in node_federation.graphs])
    for name, tensor in result.final_models["server"].items():
        stacked = torch.stack([result.final_models[c][name] for c in node_federation.names])
        expected = torch.einsum("k,k...->...", sizes / sizes.sum(), stacked)
        assert torch.allclose(tensor, expected, atol=1e-6)


def test_one_client_trains_as_in_local(node_federation):
    alone = Federation((node_federation.graphs[0],))
    settings = {"model": "gcn-2x8", "rounds": 4, "epochs": 2, "dropout": 0.0}
    federated = run("fedavg", alone, **settings)
    twice_as_long = run("fedavg", alone, **{**settings, "rounds": 8, "epochs": 1})
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            *(flatten(r.final_models["server"]).values() for r in (federated, twice_as_long)),
            strict=True,
        )
    )


def test_traffic_is_one_model_each_way_per_round_and_one_size(node_federation):
    rounds, clients = 3, node_federation.num_clients
    traffic = run("fedavg", node_federation, model="gcn-2x64", rounds=rounds).traffic
    d, c = node_federation.num_features, node_federation.num_classes
    model = d * 64 + 64 + 64 * c + c
    assert (
        traffic["phases"]["train"]["scalars_up"]
        == traffic["phases"]["train"]["scalars_down"]
        == rounds * clients * model
    )
    assert traffic["phases"]["size"]["scalars_up"] == clients
    assert traffic["scalars_up"] == rounds * clients * model + clients
    assert traffic["bytes_down"] > 4 * traffic["scalars_down"]  # tensors plus headers


def test_cora_sized_traffic_is_92231_scalars_each_way():
    graph = synthetic(nodes=60, classes=7, features=1433, seed=0)
    fed = Federation((replace(graph, train=torch.ones(60, dtype=torch.bool)),))
    train = run("fedavg", fed, model="gcn", rounds=1).traffic["phases"]["train"]
    assert (train["scalars_up"], train["scalars_down"]) == (92_231, 92_231)


def test_finetuning_moves_only_the_clients(node_federation):
    plain = run("fedavg", node_federation, model="gcn-2x8", rounds=2)
    tuned = run("fedavg", node_federation, model="gcn-2x8", rounds=2, finetune=5)
    assert [e["stage"] for e in tuned.history] == ["train"] * 2 + ["finetune"] * 5
    assert tuned.accuracy in [e["accuracy"] for e in tuned.history[2:]]
    assert (
        tuned.traffic["phases"]["tune"]["scalars_down"] - 5 * 4  # the number of each epoch
        == plain.traffic["phases"]["train"]["scalars_down"] / 2
    )
    for name, tensor in plain.final_models["server"].items():
        assert torch.equal(tensor, tuned.final_models["server"][name])
    assert not torch.equal(
        flatten(plain.final_models["0"])["layers.0.weight"],
        flatten(tuned.final_models["0"])["layers.0.weight"],
    )


def test_global_evaluation_scores_the_average_not_the_clients(node_federation):
    local = run("fedavg", node_federation, model="gcn-2x8", rounds=2, lr=0.05)
    shared = run("fedavg", node_federation, model="gcn-2x8", rounds=2, lr=0.05, evaluation="global")
    assert (local.summary["evaluation"], shared.summary["evaluation"]) == ("local", "global")
    assert all(
        torch.equal(local.final_models["server"][k], shared.final_models["server"][k])
        for k in local.final_models["server"]
    )
    assert [c["accuracy"] for c in local.per_client] != [c["accuracy"] for c in shared.per_client]
    assert shared.traffic["measuring"]["scalars_down"] > 0
    assert local.traffic["measuring"]["scalars_down"] == 0


@pytest.mark.parametrize(
    "weights",
    [
        {"a": -1.0, "b": 2.0},
        {"a": float("nan"), "b": 1.0},
        {"a": 0.0, "b": 0.0},
        {"a": float("inf"), "b": 1.0},
    ],
)
def test_invalid_weights_are_refused(weights):
    replies = Replies({"a": {"w": torch.ones(1)}, "b": {"w": torch.ones(1)}})
    with pytest.raises(ValueError, match="weight"):
        replies.mean({k: torch.tensor(v) for k, v in weights.items()})


def test_settings_are_checked():
    for bad, field in [
        ({"lr": 0}, "lr"),
        ({"epochs": 0}, "epochs"),
        ({"optimizer": "adamw"}, "optimizer"),
        ({"epochs": 1.5}, "epochs"),
    ]:
        with pytest.raises(ValueError, match=rf"method\.{field}"):
            FedAvg(**bad)
