"""The small pieces of local learning, each against its formula."""

import pytest
import torch
from torch import nn

from fedloom.data.seeds import stream_seed
from fedloom.nn.training import make_optimizer, step
from fedloom.nn.weights import inner_product, load_weights, squared_distance, weights


def model():
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    with torch.no_grad():
        for k, p in enumerate(net.parameters()):
            p.copy_(torch.arange(p.numel()).view(p.shape) / 10 + k)
    return net


# ---- random streams ----
def test_streams_differ_by_every_name_and_by_where_names_end():
    names = [
        ("a", "bc"),
        ("ab", "c"),
        ("abc",),
        ("a", "b", "c"),
        ("c", "ab"),
        ("bc", "a"),
        ("", "abc"),
        ("abc", ""),
    ]
    names += [
        (seed, "client", client, purpose)
        for seed in range(20)
        for client in range(20)
        for purpose in ("dropout", "init")
    ]
    names += [(1, 11), (11, 1), (111,), (1, 1, 1)]
    assert len({stream_seed(*n) for n in names}) == len(names)


def test_a_stream_is_the_same_everywhere():
    # Written down: a change here changes every published result.
    assert stream_seed(0, "client", "0", "dropout") == 4745901910500904570
    assert stream_seed(1) == stream_seed("1")
    assert all(0 <= stream_seed(k) < 2**63 for k in range(200))
    assert any(stream_seed(k) >= 2**62 for k in range(200))
    torch.Generator().manual_seed(max(stream_seed(k) for k in range(200)))  # a generator takes it


# ---- weights in and out ----
def test_weights_are_named_sorted_detached_and_the_models_own_memory():
    net = model()
    own = weights(net)
    assert list(own) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert not any(t.requires_grad for t in own.values())
    own["0.bias"].fill_(7)
    assert (net[0].bias == 7).all()


def test_loading_is_in_place_so_that_an_optimiser_stays_valid():
    net, new = model(), {name: torch.full_like(t, 0.25) for name, t in weights(model()).items()}
    addresses = [p.data_ptr() for p in net.parameters()]
    optimizer = make_optimizer("sgd", net.parameters(), lr=1.0, weight_decay=0.0)
    load_weights(net, new)
    assert [p.data_ptr() for p in net.parameters()] == addresses
    assert all((p == 0.25).all() for p in net.parameters())
    assert all(p.requires_grad for p in net.parameters())
    new["0.bias"].fill_(9)
    assert (net[0].bias == 0.25).all()  # a copy
    step(optimizer, net(torch.ones(1, 3)).sum())
    assert not (net[0].weight == 0.25).any()


@pytest.mark.parametrize(
    ("change", "words"),
    [(lambda w: w.pop("0.bias"), "'0.bias'. on one side only"), (lambda w: w.update(extra=torch.ones(1)), "'extra'. on one side only"),
     (lambda w: w.update({"0.weight": torch.ones(1, 3)}), r"'0.weight' has shape \[1, 3\], expected \[2, 3\]"),
     (lambda w: w.update({"0.weight": torch.ones(3)}), r"'0.weight' has shape \[3\]")],
)  # fmt: skip
def test_weights_of_another_model_are_refused_by_name(change, words):
    other = weights(model())
    change(other)
    with pytest.raises(ValueError, match=f"do not fit the model: .*{words}"):
        load_weights(model(), other)


# ---- optimisers ----
def test_sgd_with_l2_in_the_gradient():
    p = torch.tensor([1.0, -2.0], requires_grad=True)
    optimizer = make_optimizer("sgd", [p], lr=0.1, weight_decay=0.5)
    for _ in range(2):  # twice: gradients do not pile up
        before = p.detach().clone()
        step(optimizer, (3 * p).sum())
        assert torch.allclose(p, before - 0.1 * (3 + 0.5 * before))


def test_adam_with_l2_in_the_gradient():
    p = torch.tensor([1.0, -2.0], requires_grad=True)
    optimizer = make_optimizer("adam", [p], lr=0.1, weight_decay=0.5)
    m = v = torch.zeros(2)
    expected = p.detach().clone()
    for t in range(1, 4):
        gradient = 2 * expected + 0.5 * expected
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        expected = expected - 0.1 * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        step(optimizer, p.square().sum())
        assert torch.allclose(p, expected, atol=1e-6)


# ---- distances ----
def test_squared_distance_and_its_gradient():
    net = model()
    anchor = {name: t - 0.5 for name, t in weights(net).items()}
    distance = squared_distance(net, anchor)
    distance.backward()
    assert distance.item() == pytest.approx(0.25 * sum(p.numel() for p in net.parameters()))
    assert all(
        torch.allclose(p.grad, torch.ones_like(p)) for p in net.parameters()
    )  # 2 (θ − anchor)
    assert squared_distance(net, weights(net)).item() == 0


def test_inner_product_and_its_gradient():
    net = model()
    direction = {
        name: torch.full_like(t, k + 1.0) for k, (name, t) in enumerate(weights(net).items())
    }
    product = inner_product(net, direction)
    product.backward()
    assert product.item() == pytest.approx(
        sum((weights(net)[n] * d).sum().item() for n, d in direction.items()), rel=1e-6
    )
    assert all(torch.equal(p.grad, direction[name]) for name, p in net.named_parameters())
