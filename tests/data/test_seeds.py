"""Seeds of random streams."""

import torch

from fedloom.data.seeds import stream_seed


def test_streams_differ_by_every_name_and_by_the_borders_between_names():
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


def test_a_stream_has_the_same_seed_on_every_machine():
    # This number is recorded: if it changes, every published result changes.
    assert stream_seed(0, "client", "0", "dropout") == 4745901910500904570
    assert stream_seed(1) == stream_seed("1")
    assert all(0 <= stream_seed(k) < 2**63 for k in range(200))
    assert any(stream_seed(k) >= 2**62 for k in range(200))
    torch.Generator().manual_seed(max(stream_seed(k) for k in range(200)))  # does not raise
