"""The wire: what goes in comes out, and nothing else gets in."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from fedloom.core.message import (
    DEFAULT_LIMIT,
    DTYPES,
    Limit,
    batched,
    check,
    decode,
    encode,
    encoded_size,
    flatten,
    isolate,
    largest_size,
    schema_of,
    tree_map,
    unflatten,
)
from fedloom.errors import MessageError

names = st.text(
    st.characters(codec="utf-8", exclude_characters="/", exclude_categories=("Cs",)),
    min_size=1,
    max_size=8,
).filter(lambda s: s != "__metadata__")
tensors = st.builds(
    lambda dtype, shape: (
        (torch.arange(max(1, int(torch.tensor(shape).prod()))) % 2).reshape(shape).to(DTYPES[dtype])
    ),
    st.sampled_from(sorted(DTYPES)),
    st.lists(st.integers(1, 3), max_size=3).map(tuple),
)
messages = st.recursive(
    st.dictionaries(names, tensors, max_size=3),
    lambda inner: st.dictionaries(names, tensors | inner.filter(bool), max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(messages)
def test_round_trip_and_size(message):
    data = encode(message, "train")
    back = decode(data, "train")
    assert schema_of(back) == schema_of(message)
    assert all(
        torch.equal(a, b)
        for a, b in zip(flatten(message).values(), flatten(back).values(), strict=True)
    )
    assert len(data) == encoded_size(schema_of(message), "train")


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(
        names,
        st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 40), max_size=3)),
        max_size=5,
    )
)
def test_the_size_of_larger_ones_with_other_digits_in_their_places(described):
    message = {
        name: torch.zeros(shape, dtype=DTYPES[dtype]) for name, (dtype, shape) in described.items()
    }
    assert len(encode(message, "train")) == encoded_size(schema_of(message), "train")


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=200) | st.tuples(st.integers(0, 400), st.binary(min_size=1, max_size=4)))
def test_damaged_bytes_are_refused_or_decode_to_finite_tensors(noise):
    good = encode({"model": {"w": torch.ones(3, 4)}, "size": torch.tensor(3)}, "train")
    data = (
        noise
        if isinstance(noise, bytes)
        else good[: noise[0] % len(good)] + noise[1] + good[noise[0] % len(good) + len(noise[1]) :]
    )
    try:
        message = decode(data, "train")
    except MessageError:
        return
    assert all(torch.isfinite(t).all() for t in flatten(message).values())


def test_every_truncation_is_refused():
    good = encode({"w": torch.ones(3)}, "train")
    for cut in range(len(good)):
        with pytest.raises(MessageError):
            decode(good[:cut], "train")
    with pytest.raises(MessageError):
        decode(good + b"\0", "train")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_only_finite_numbers_and_the_tensor_is_named(value):
    data = encode({"model": {"layer.weight": torch.tensor([1.0, value])}}, "train")
    with pytest.raises(MessageError, match=r"model/layer\.weight"):
        decode(data, "train")


def test_format_phase_and_limit():
    data = encode({"w": torch.ones(2)}, "train")
    with pytest.raises(MessageError, match="belongs to 'train'"):
        decode(data, "evaluate")
    with pytest.raises(MessageError, match="limit"):
        decode(data, "train", Limit(10, 10))
    with pytest.raises(MessageError, match="speaks 'fedloom/1'"):
        decode(
            save({"w": torch.ones(2)}, metadata={"format": "fedloom/2", "phase": "train"}), "train"
        )
    with pytest.raises(MessageError, match="speaks 'fedloom/1'"):
        decode(save({"w": torch.ones(2)}), "train")


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"a": 1.0}, "'a'"),
        ({"a": {"b": [1]}}, "'a/b'"),
        ({"a/b": torch.ones(1)}, "a/b"),
        ({"a": {}}, "'a'"),
        ({"": torch.ones(1)}, "''"),
        ({3: torch.ones(1)}, "3"),
        ({"a": torch.ones(1, dtype=torch.complex64)}, "complex64"),
    ],
)
def test_only_tensors_travel(content, named):
    with pytest.raises(MessageError, match=named):
        encode(content, "train")


def test_names_that_collide_are_refused():
    with pytest.raises(MessageError):
        unflatten({"a": torch.ones(1), "a/b": torch.ones(1)})


def test_check_names_the_tensor():
    expected = (("n", "float32", (-1, 2)), ("w", "float32", (3,)))
    good = {"n": torch.ones(5, 2), "w": torch.ones(3)}
    check(good, expected, "client 'a'")
    for bad, words in [
        ({**good, "w": torch.ones(1)}, "'w' has shape"),
        ({**good, "w": torch.ones(3).double()}, "'w' has dtype"),
        ({"n": good["n"]}, "'w' is missing"),
        ({**good, "x": torch.ones(1)}, "'x' is not expected"),
        ({**good, "w": torch.full((3,), float("nan"))}, "'w' holds nan"),
        ({**good, "n": torch.ones(5, 3)}, "'n' has shape"),
    ]:
        with pytest.raises(MessageError, match=words):
            check(bad, expected, "client 'a'")


def test_isolate_shares_no_memory_and_sorts():
    message = {"b": torch.ones(2), "a": {"y": torch.ones(1), "x": torch.ones(1)}}
    copy = isolate(message)
    message["b"].zero_()
    assert copy["b"].sum() == 2
    assert list(copy) == ["a", "b"]
    assert list(copy["a"]) == ["x", "y"]


def test_tree_map():
    a, b = {"x": {"y": torch.tensor(1.0)}}, {"x": {"y": torch.tensor(2.0)}}
    assert tree_map(torch.add, a, b) == {"x": {"y": torch.tensor(3.0)}}


# ---- many messages in one ----
def test_messages_of_one_schema_become_one_and_are_what_they_were():
    sent = {
        c: {"model": {"w": torch.full((2, 3), float(k))}, "n": torch.tensor(k)}
        for k, c in enumerate("abc")
    }
    batch = batched(sent)
    assert list(batch) == list(sent)
    assert batch.schema == schema_of(sent["a"])
    for client, message in sent.items():
        assert schema_of(batch[client]) == schema_of(message)
        assert torch.equal(batch[client]["model"]["w"], message["model"]["w"])
    sent["a"]["n"].add_(5)
    assert batch["a"]["n"].item() == 0


@pytest.mark.parametrize(
    "other",
    [
        {},
        {"v": torch.ones(2)},
        {"w": torch.ones(3)},
        {"w": torch.ones(2).double()},
        {"w": torch.ones(2), "v": torch.ones(1)},
    ],
)
def test_messages_that_differ_stay_apart(other):
    assert batched({"a": {"w": torch.ones(2)}, "b": other}) is None
    assert batched({"a": {}, "b": {}}) is None
    assert batched({}) is None


# ---- how long a message may be ----
SCHEMA = (("a/b", "float32", (3, 4)), ("counts", "int64", (2,)))
ANY_LENGTH = (("a/b", "float32", (-1, 4)), ("counts", "int64", (-1,)))


def of_length(n):
    return {"a": {"b": torch.zeros(n, 4)}, "counts": torch.zeros(n, dtype=torch.int64)}


def test_a_message_is_as_long_as_its_schema_says():
    message = {"a": {"b": torch.zeros(3, 4)}, "counts": torch.zeros(2, dtype=torch.int64)}
    data, limit = encode(message, "train"), largest_size(SCHEMA, "train")
    assert limit == (len(data), int.from_bytes(data[:8], "little"))
    assert decode(data, "train", limit).keys() == message.keys()
    for shorter in (limit._replace(total=limit.total - 1), limit._replace(header=limit.header - 1)):
        with pytest.raises(MessageError, match="more than the limit"):
            decode(data, "train", shorter)


@pytest.mark.parametrize("n", [0, 1, 7, 12345])
def test_any_length_fits_and_its_header_is_limited_all_the_same(n):
    limit = largest_size(ANY_LENGTH, "train")
    assert limit.total == DEFAULT_LIMIT.total
    assert limit.header < 300
    assert flatten(decode(encode(of_length(n), "train"), "train", limit)).keys() == {
        "a/b",
        "counts",
    }


def bomb(size):
    """A message whose header is a JSON text that takes many times its length in memory."""
    start = '{"__metadata__":{"format":"fedloom/1","phase":"train"},"a":['
    text = start + ",".join(["{}"] * ((size - len(start) - 2) // 3)) + "]}"
    return len(text).to_bytes(8, "little") + text.encode()


@pytest.mark.parametrize("limit", [DEFAULT_LIMIT, largest_size(ANY_LENGTH, "train")])
def test_a_long_header_is_not_parsed(limit, monkeypatch):
    data = bomb(DEFAULT_LIMIT.header + 100)
    monkeypatch.setattr("json.loads", lambda *_, **__: pytest.fail("it was parsed"))
    with pytest.raises(MessageError, match=r"the header claims 10\d+ bytes, more than the limit"):
        decode(data, "train", limit)
    with pytest.raises(pytest.fail.Exception, match="it was parsed"):
        decode(data, "train", Limit(len(data), len(data)))
