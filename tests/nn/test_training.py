"""Optimisers against their formulas."""

import torch

from fedloom.nn.training import make_optimizer, seeded, step


def test_sgd_with_l2_in_the_gradient():
    p = torch.tensor([1.0, -2.0], requires_grad=True)
    optimizer = make_optimizer("sgd", [p], lr=0.1, weight_decay=0.5)
    for _ in range(2):  # twice, because gradients must not add up over steps
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


def test_adam_gives_the_bits_of_pytorch():
    ours, theirs = (
        [torch.linspace(-1, 1, n).requires_grad_() for n in (5, 300, 2)] for _ in range(2)
    )
    one = make_optimizer("adam", [{"params": ours[:2]}, {"params": ours[2:], "lr": 0.3}], 0.1, 0.5)
    other = torch.optim.Adam(
        [{"params": theirs[:2]}, {"params": theirs[2:], "lr": 0.3}],
        lr=0.1,
        weight_decay=0.5,
        fused=True,
    )
    for number in range(4):
        for parameters, optimizer in ((ours, one), (theirs, other)):
            optimizer.zero_grad()
            used = parameters[number % 2 :]  # the first has a gradient in every second step only
            sum((p**3).sum() for p in used).backward()
            optimizer.step()
    assert all(map(torch.equal, ours, theirs))
    one_state, other_state = one.state_dict()["state"], other.state_dict()["state"]
    assert one_state.keys() == other_state.keys()
    for k, state in one_state.items():
        assert state.keys() == other_state[k].keys()
        assert all(torch.equal(state[name], other_state[k][name]) for name in state)


def test_seeded_modules_depend_only_on_the_generator():
    def build(seed):
        with seeded(torch.Generator().manual_seed(seed)):
            return torch.nn.Linear(3, 2).weight

    state = torch.get_rng_state()
    assert torch.equal(build(1), build(1))
    assert not torch.equal(build(1), build(2))
    assert torch.equal(torch.get_rng_state(), state)
