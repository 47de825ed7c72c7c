"""FedKD: its losses by hand, the energy that factors keep, and its traffic."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.methods.test_fml import client_of

from fedloom.core.facts import Facts, model_schema
from fedloom.core.message import check, flatten
from fedloom.engines.loop import Engine as Loop
from fedloom.errors import MessageError
from fedloom.experiments.run import run
from fedloom.methods.fedkd import FedKD, compressed, restored
from fedloom.nn.distillation import divergence
from fedloom.nn.training import outputs

pytestmark = pytest.mark.usefixtures("reference_engine")

MODEL = "gcn-2x8"
QUICK = {"copilot": "gcn-2x8", "start": 0.6, "end": 0.8}
OTHER = {"copilot": "sgc-2x8"}


def test_both_losses_by_hand(node_federation):
    method = FedKD(copilot="gcn-2x8")
    client = client_of(node_federation, method, ("sage-2x12",))
    graph = client.graph
    own, copilot = (outputs(client.state[which], graph) for which in ("model", "copilot"))
    mapped = copilot[0] @ client.state["map"].weight.T
    ce, ce_c = client.loss(own[1], graph), client.loss(copilot[1], graph)
    hidden = ((own[0] - mapped) ** 2).sum(1).mean() / 12
    own_loss, copilot_loss = method.losses(client, graph, own, copilot)
    by_hand = ce + (divergence(copilot[1], own[1]) + hidden) / (ce + ce_c)
    assert torch.isclose(own_loss, by_hand, atol=1e-6)
    by_hand = ce_c + (divergence(own[1], copilot[1]) + hidden) / (ce + ce_c)
    assert torch.isclose(copilot_loss, by_hand, atol=1e-6)
    own_loss.backward()
    assert client.state["copilot"].layers[0].weight.grad is None
    assert client.state["map"].weight.grad is None
    client.state["model"].zero_grad()
    copilot_loss.backward()
    assert client.state["model"].layers[0].weight.grad is None
    assert client.state["map"].weight.grad.abs().sum() > 0


def matrix(m, n, rank, seed):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(m, rank, generator=rng) @ torch.randn(rank, n, generator=rng)


@settings(max_examples=50)
@given(
    st.integers(2, 40),
    st.integers(2, 40),
    st.integers(1, 5),
    st.floats(0.3, 1.0),
    st.integers(0, 99),
)
def test_factors_keep_the_energy_with_the_least_rank(m, n, rank, energy, seed):
    whole = matrix(m, n, rank, seed)
    given_back = compressed({"w": whole, "b": torch.ones(3)}, energy)
    near = restored(given_back)
    assert torch.equal(near["b"], torch.ones(3))
    lost = float((whole - near["w"]).square().sum() / whole.square().sum())
    assert lost <= 1 - energy + 1e-4
    if isinstance(given_back["w"], dict):
        r = given_back["w"]["left"].shape[1]
        assert r * (m + n) < m * n
        squares = torch.linalg.svdvals(whole.double()).square()
        # The tolerance is for an energy of 1.
        assert squares[: r - 1].sum() < (energy + 1e-9) * squares.sum()
        assert lost == pytest.approx(float(squares[r:].sum() / squares.sum()), abs=1e-4)
    else:
        assert torch.equal(given_back["w"], whole)


def test_a_zero_change_has_no_factors():
    nothing = compressed({"w": torch.zeros(9, 5)}, 0.95)
    assert sum(t.numel() for t in flatten(nothing).values()) == 0
    assert torch.equal(restored(nothing)["w"], torch.zeros(9, 5))


def test_the_ledger_books_the_factors(node_federation, trainings):
    seen = trainings()
    result = run(
        "fedkd",
        node_federation,
        model="gcn-2x8,sage-2x8",
        rounds=4,
        copilot="gcn-2x32",
        start=0.7,
        end=0.7,
    )
    full = 12 * 32 + 32 + 32 * 3 + 3
    sizes = [
        [sum(t.numel() for t in flatten(r).values()) for r in replies.values()]
        for _, replies in seen
    ]
    assert all(size < full for round_ in sizes for size in round_)
    assert result.traffic["phases"]["train"]["scalars_up"] == sum(map(sum, sizes))
    (first, _), *later = seen
    assert all("copilot" in sent for sent in first.values())
    assert all(
        "copilot" not in sent and "update" in sent
        for sent_to_all, _ in later
        for sent in sent_to_all.values()
    )


def test_all_energy_sends_no_more_than_the_weights_and_loses_nothing(node_federation, trainings):
    seen = trainings()
    result = run(
        "fedkd", node_federation, model=MODEL, rounds=3, copilot="gcn-2x8", start=1.0, end=1.0
    )
    full = 12 * 8 + 8 + 8 * 3 + 3
    sent, replies = seen[-1]
    assert all(sum(t.numel() for t in flatten(r).values()) <= full for r in replies.values())
    # The server's model is the one that the clients know, plus the mean of their changes.
    size = {
        c: g.num_nodes for c, g in zip(node_federation.names, node_federation.graphs, strict=True)
    }
    change = sum(
        size[c] * restored(r["update"])["layers.0.weight"] for c, r in replies.items()
    ) / sum(size.values())
    before = seen[0][0]["0"]["copilot"]["layers.0.weight"] + sum(
        restored(s["0"]["update"])["layers.0.weight"] for s, _ in seen[1:]
    )
    assert torch.allclose(
        result.final_models["server"]["layers.0.weight"], before + change, atol=1e-5
    )
    assert sent.keys() == size.keys()


def test_a_client_that_missed_a_round_gets_the_whole_copilot(
    node_federation, trainings, monkeypatch
):
    seen, commons, original = trainings(), [], FedKD.descend

    def descend(self, client, model, received=None):
        commons.append(
            (client.name, {name: tensor.clone() for name, tensor in client.state["common"].items()})
        )
        original(self, client, model, received)

    monkeypatch.setattr(FedKD, "descend", descend)
    result = run(
        "fedkd", node_federation, model=MODEL, rounds=8, participation=0.5, seed=3, **QUICK
    )
    took = [set(sent) for sent, _ in seen]
    for t, (sent, _) in enumerate(seen):
        for client, message in sent.items():
            assert ("copilot" in message) == (t == 0 or client not in took[t - 1])
    # Two clients take part in each round, and both hold the same copilot.
    for (_, one), (_, other) in zip(commons[::2], commons[1::2], strict=True):
        assert all(torch.allclose(one[name], other[name], atol=1e-6) for name in one)
    size = {
        c: g.num_nodes for c, g in zip(node_federation.names, node_federation.graphs, strict=True)
    }
    _, last = seen[-1]
    change = sum(size[c] * restored(r["update"])["layers.0.weight"] for c, r in last.items()) / sum(
        size[c] for c in last
    )
    near = restored(compressed({"layers.0.weight": change}, QUICK["end"]))["layers.0.weight"]
    assert torch.allclose(
        result.final_models["server"]["layers.0.weight"],
        commons[-1][1]["layers.0.weight"] + near,
        atol=1e-5,
    )
    assert any("update" in message for sent, _ in seen for message in sent.values())
    assert any("copilot" in message for sent, _ in seen[1:] for message in sent.values())


def test_energy_goes_from_start_to_end(node_federation, trainings):
    seen = trainings()
    run("fedkd", node_federation, model=MODEL, rounds=5, copilot="gcn-2x8", start=0.5, end=0.9)
    energies = [float(next(iter(sent.values()))["energy"]) for sent, _ in seen]
    assert energies == pytest.approx([0.5, 0.6, 0.7, 0.8, 0.9])


def test_factors_larger_than_the_matrix_are_refused():
    facts = Facts(12, 3, "node", ("0",), (MODEL,))
    method = FedKD(copilot="gcn-2x8")
    whole = {name: torch.ones(shape) for name, _, shape in model_schema("gcn-2x8", facts)}
    fat = {**whole, "layers.0.weight": {"left": torch.ones(12, 7), "right": torch.ones(7, 8)}}
    rows = {
        name: shape
        for name, _, shape in FedKD.train.reply_schema(method, facts, {}, (), {"update": fat})
    }
    assert rows["update/layers.0.weight/left"] == (12, 4)
    assert rows["update/layers.0.bias"] == (8,)
    expected = FedKD.train.reply_schema(method, facts, {}, (), {"update": fat})
    with pytest.raises(MessageError, match=r"layers\.0\.weight/left"):
        check({"update": fat}, expected, "client '0'")
    thin = {**whole, "layers.0.weight": {"left": torch.ones(12, 4), "right": torch.ones(4, 8)}}
    check(
        {"update": thin},
        FedKD.train.reply_schema(method, facts, {}, (), {"update": thin}),
        "client '0'",
    )


def test_factors_with_an_infinite_product_are_refused_and_the_client_is_named(
    node_federation, monkeypatch
):
    original = Loop.call

    def call(self, phase, sent):
        replies = original(self, phase, sent)
        if phase == "train":
            replies["2"]["update"]["layers.0.weight"] = {
                "left": torch.full((12, 2), 3e30),
                "right": torch.full((2, 8), 3e30),
            }
        return replies

    monkeypatch.setattr(Loop, "call", call)
    with pytest.raises(MessageError, match="client '2' in 'train'"):
        run("fedkd", node_federation, model=MODEL, rounds=2, **QUICK)


def test_an_update_without_a_model_to_change_is_refused(node_federation):
    method = FedKD(**QUICK)
    client = client_of(node_federation, method)
    with pytest.raises(MessageError, match="to client '0' in 'train': 'copilot' is missing"):
        method.train(
            client, torch.tensor(0.9), update=dict(client.state["copilot"].named_parameters())
        )
