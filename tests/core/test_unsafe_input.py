"""Malicious bytes instead of a message are refused with a MessageError, and nothing executes."""

import io
import json
import math
import os
import pickle
import struct
import sys
import tarfile
import threading
import zipfile
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedloom.core.message import DTYPES, FORMAT, decode, encode, flatten
from fedloom.errors import MessageError

# ---- watching ----
# Audit events that must not occur in decoding. Safetensors and torch are imported before.
FORBIDDEN = (
    "pickle.find_class",
    "exec",
    "compile",
    "import",
    "open",
    "code.__new__",
    "function.__new__",
    "ctypes.",
    "marshal.",
    "socket.",
    "subprocess.",
    "os.",
    "shutil.",
    "tempfile.",
    "urllib.",
    "shelve.",
    "winreg.",
)
_watching: dict[
    int, list[str]
] = {}  # thread -> events; empty outside of `watched`, where the hook does nothing


def _hook(event, arguments):
    seen = _watching.get(threading.get_ident()) if _watching else None
    if seen is not None and event.startswith(FORBIDDEN):
        seen.append(f"{event} {arguments!r:.200}")


sys.addaudithook(_hook)  # hooks cannot be removed


@contextmanager
def watched():
    """Gives a list that fills with the forbidden things this thread does."""
    seen = _watching[threading.get_ident()] = []
    try:
        yield seen
    finally:
        del _watching[threading.get_ident()]


@pytest.fixture(scope="module", autouse=True)
def _warm():
    """What is imported on first use is imported now: an import is an event too."""
    decode(encode({"w": torch.ones(2), "n": torch.ones(1, dtype=torch.bfloat16)}, "train"), "train")
    with pytest.raises(MessageError):
        decode(encode({"w": torch.tensor([float("nan")])}, "train"), "train")


# ---- payloads ----
class Trap:
    """Unpickles to a call."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


def traps(canary):
    """{name: (an object whose unpickling makes the canary)}."""
    return {
        "system": Trap(os.system, f"touch {canary}"),
        "exec": Trap(exec, f"open({str(canary)!r}, 'w').close()"),
        "eval": Trap(eval, f"open({str(canary)!r}, 'w').close()"),
        "open": Trap(open, str(canary), "w"),
        "mkdir": Trap(os.mkdir, str(canary)),
    }


def pickles(canary):
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        for name, trap in traps(canary).items():
            yield f"pickle {name} protocol {protocol}", pickle.dumps(trap, protocol)
    nested = pickle.dumps({"model": {"w": traps(canary)["exec"]}})
    yield "pickle in a dict", nested
    yield "pickle behind a header's length", struct.pack("<Q", len(nested)) + nested
    yield "pickle as the body of a message", blob({"__metadata__": META}, nested)
    yield "pickle after a message", encode({"w": torch.ones(2)}, "train") + nested
    yield "message within a pickle", pickle.dumps(encode({"w": torch.ones(2)}, "train"))


def archives(canary):
    for name, content in {
        "plain": {"w": torch.ones(2)},
        "trap": {"w": traps(canary)["exec"]},
    }.items():
        for new in (True, False):
            file = io.BytesIO()
            torch.save(content, file, _use_new_zipfile_serialization=new)
            yield f"torch.save {name} {'zip' if new else 'legacy'}", file.getvalue()
    objects = np.array([traps(canary)["exec"]], dtype=object)
    for name, save in {
        "npy": np.save,
        "npz": lambda f, a: np.savez(f, w=a),
        "npz compressed": lambda f, a: np.savez_compressed(f, w=a),
    }.items():
        for kind, array in {"of objects": objects, "of numbers": np.ones(3)}.items():
            file = io.BytesIO()
            save(file, array)
            yield f"{name} {kind}", file.getvalue()
    for inside in ("../" * 12 + str(canary).lstrip("/"), str(canary), "..\\canary"):
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr(inside, b"out of the zip")
        yield f"zip with {inside[:8]}", file.getvalue()
        yield (
            f"zip with {inside[:8]} after a message",
            encode({"w": torch.ones(2)}, "train") + file.getvalue(),
        )
    for mode in ("w", "w:gz", "w:xz"):
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode=mode) as archive:
            link = tarfile.TarInfo("link")
            link.type, link.linkname = tarfile.SYMTYPE, str(canary.parent)
            archive.addfile(link)
            through = tarfile.TarInfo(f"link/{canary.name}")
            archive.addfile(through, io.BytesIO())
        yield f"tar with a symlink, {mode}", file.getvalue()


def texts(canary):
    for tag in (
        "object/apply:os.system",
        "object/new:os.system",
        "object/apply:eval",
        "object/apply:subprocess.call",
    ):
        yield f"yaml {tag}", f'!!python/{tag} ["touch {canary}"]\n'.encode()
        yield f"yaml {tag} as header", raw(f'!!python/{tag} ["touch {canary}"]\n'.encode())
    yield "python", f"__import__('os').system('touch {canary}')".encode()
    yield "python as header", raw(f"__import__('os').system('touch {canary}')".encode())
    yield "shell", f"#!/bin/sh\ntouch {canary}\n".encode()
    yield "xml entities", b'<!DOCTYPE a [<!ENTITY b SYSTEM "file:///etc/passwd">]><a>&b;</a>'
    yield (
        "json with a class",
        raw(json.dumps({"py/object": "os.system", "__metadata__": META}).encode()),
    )
    yield "empty", b""
    yield "zeros", bytes(1000)
    yield "ones", b"\xff" * 1000


META = {"format": FORMAT, "phase": "train"}


def raw(header, body=b""):
    return struct.pack("<Q", len(header)) + header + body


def blob(header, body=b""):
    return raw(json.dumps(header).encode(), body)


def tensor(dtype="F32", shape=(1,), place=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(place)}


def message(body=bytes(4), **tensors):
    return blob({"__metadata__": META, **tensors}, body)


def headers(_canary):
    good = encode({"model": {"w": torch.ones(3, 4)}, "size": torch.tensor(3)}, "train")
    meta, entry = json.dumps(META), json.dumps(tensor())
    for length in (0, 1, len(good), 2**31, 2**32, 2**62, 2**63, 2**64 - 8, 2**64 - 1):
        yield f"header length {length}", struct.pack("<Q", length) + good[8:]
    for name, text in {
        "arrays": "[" * 100_000,
        "closed arrays": "[" * 50_000 + "]" * 50_000,
        "objects": '{"a":' * 100_000,
        "closed objects": '{"a":' * 5_000 + "1" + "}" * 5_000,
        "within metadata": '{"__metadata__":' + "[" * 500 + "]" * 500 + "}",
        "digits": '{"a":' + "1" * 5000 + "}",
        "exponent": '{"a":1e999999999}',
        "NaN": '{"a":NaN}',
        "array": "[]",
        "null": "null",
        "text": '"x"',
        "escapes": f'{{"__metadata__":{meta},"a":{json.dumps(tensor(chr(27) + "[2J" + chr(10)))}}}',
        "not UTF-8": "\udcff",
        "UTF-16": json.dumps({"__metadata__": META})
        .encode("utf-16")
        .decode("utf-8", "surrogateescape"),
        "BOM": "\ufeff" + json.dumps({"__metadata__": META}),
        "name twice": f'{{"__metadata__":{meta},"a":{entry},"a":{entry}}}',
        "metadata twice": f'{{"__metadata__":{meta},"__metadata__":{meta}}}',
        "phase twice": f'{{"__metadata__":{{"format":"{FORMAT}","phase":"evaluate",'
        f'"phase":"train"}},"a":{entry}}}',
        "surrogate": f'{{"__metadata__":{meta},"\\ud800":{entry}}}',
        "two objects": f'{{"__metadata__":{meta}}}{{}}',
    }.items():
        yield f"header: {name}", raw(text.encode("utf-8", "surrogateescape"), bytes(4))
    for said in (
        None,
        [],
        [1],
        "x",
        1,
        True,
        {},
        {"format": FORMAT},
        {**META, "format": ["fedloom/1"]},
        {**META, "phase": {}},
        {**META, "x": "y"},
    ):
        yield f"metadata {said}", blob({"__metadata__": said, "a": tensor()}, bytes(4))


def layouts(_canary):
    for dtype in (
        "f32",
        "float32",
        "O",
        "object",
        "C64",
        "U16",
        "U32",
        "U64",
        "F8_E4M3",
        "F8_E5M2",
        "F8_E8M0",
        "F4",
        "",
        "F32\0",
        None,
        5,
        [],
    ):
        for width in (1, 2, 4, 8):
            yield (
                f"dtype {dtype!r} of {width} bytes",
                message(bytes(width), a=tensor(dtype, (1,), (0, width))),
            )
    for shape, size in [
        ((0, 2**63), 0),
        ((0, 2**64 - 1), 0),
        ((2**64, 0), 0),
        ((2**32, 2**32), 0),
        ((2**62,), 4),
        ((-1,), 4),
        ((1.0,), 4),
        ((True,), 4),
        (("1",), 4),
        ((None,), 4),
        ((2,), 4),
        ((1,) * 65, 4),
        ((1,) * 5000, 4),
        ((0,) * 5000, 0),
    ]:
        yield (
            f"shape {shape!s:.30} in {size} bytes",
            message(bytes(size), a=tensor(shape=shape, place=(0, size))),
        )
    for place in (
        (0, 2**64 - 1),
        (2**64 - 4, 2**64),
        (4, 0),
        (4, 8),
        (-4, 0),
        (0, 3),
        (0,),
        (0, 4, 8),
        (0.0, 4.0),
        (None, None),
        (2**63, 2**63 + 4),
    ):
        yield f"place {place}", message(a=tensor(place=place))
    for first, second in (((0, 4), (0, 4)), ((0, 4), (2, 6)), ((0, 4), (8, 12)), ((4, 8), (4, 8))):
        yield (
            f"places {first} and {second}",
            message(bytes(second[1]), a=tensor(place=first), b=tensor(place=second)),
        )
    for size in (0, 3, 5, 8, 4096):
        yield f"{size} bytes for 4", message(bytes(size), a=tensor())
    for name in (
        "",
        "/",
        "a/",
        "/a",
        "a//b",
        "../../etc/passwd/",
        "/".join("a" * 66),
        "/".join("a" * 5000),
        "a/" * 5000,
    ):
        yield f"name {name:.20} of {len(name)}", message(**{name: tensor()})
    yield (
        "a tensor inside a tensor",
        message(bytes(8), **{"a": tensor(), "a/b": tensor(place=(4, 8))}),
    )
    for entry in (None, 1, "x", [], {}, {"dtype": "F32"}, {"dtype": "F32", "shape": [1]}):
        yield f"entry {entry}", message(a=entry)
    for dtype, pattern in (
        ("F32", b"\0\0\xc0\x7f"),
        ("F32", b"\0\0\x80\xff"),
        ("F64", b"\0" * 6 + b"\xf0\x7f"),
        ("F16", b"\0\x7c"),
        ("BF16", b"\x80\x7f"),
    ):
        yield (
            f"{dtype} of {pattern.hex()}",
            message(pattern, a=tensor(dtype, (1,), (0, len(pattern)))),
        )
    yield "inf in 65 dimensions", message(b"\0\0\x80\x7f", a=tensor(shape=(1,) * 65))
    yield "inf and -inf", message(b"\0\0\x80\x7f\0\0\x80\xff", a=tensor(shape=(2,), place=(0, 8)))


def cuts(_canary):
    good = encode({"model": {"w": torch.ones(3, 4)}, "size": torch.tensor(3)}, "train")
    for cut in range(0, len(good), 8):
        yield f"cut at {cut}", good[:cut]
    for tail in (b"\0", b" ", b"\n", bytes(8), good, b"PK\x03\x04", b"\x80\x04."):
        yield f"tail {tail[:8]!r} of {len(tail)}", good + tail
        yield f"front {tail[:8]!r} of {len(tail)}", tail + good
    yield "another phase", encode({"w": torch.ones(2)}, "evaluate")


KINDS = (pickles, archives, texts, headers, layouts, cuts)


@pytest.mark.parametrize("kind", KINDS, ids=lambda f: f.__name__)
def test_no_payload_gets_in_or_gets_to_act(kind, tmp_path):
    canary, accepted = tmp_path / "canary", []
    payloads = dict(kind(canary))
    for name, payload in payloads.items():
        text = ""
        with watched() as seen:
            try:
                decode(payload, "train")
                accepted.append(name)
            except MessageError as refused:  # anything else ends the test
                text = str(refused)
        assert not seen, f"{name}: {seen}"
        assert text.isprintable(), f"{name}: not one line: {text[:200]!r}"
        assert not list(tmp_path.iterdir()), f"{name} made a file"
    assert accepted == []


def test_there_are_enough_of_them(tmp_path):
    payloads = [payload for kind in KINDS for payload in dict(kind(tmp_path / "canary")).values()]
    assert len(set(payloads)) > 250


# ---- the traps work, and so does the watch ----
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("name", ["system", "exec", "eval", "open", "mkdir"])
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_the_same_pickles_act_when_they_are_loaded(tmp_path, name, protocol):
    canary = tmp_path / "canary"
    payload = dict(pickles(canary))[f"pickle {name} protocol {protocol}"]
    with watched() as seen:
        loaded = pickle.loads(payload)  # noqa: S301
    if name == "open":
        loaded.close()
    assert canary.exists()
    assert any(event.startswith("pickle.find_class") for event in seen)
    assert len(seen) > 1


def test_the_other_traps_act_too(tmp_path):
    canary = tmp_path / "canary"
    payloads = dict(archives(canary))
    for name, load in {
        "torch.save trap zip": lambda data: torch.load(io.BytesIO(data), weights_only=False),
        "torch.save trap legacy": lambda data: torch.load(io.BytesIO(data), weights_only=False),
        "npy of objects": lambda data: np.load(io.BytesIO(data), allow_pickle=True),
        "npz of objects": lambda data: np.load(io.BytesIO(data), allow_pickle=True)["w"],
    }.items():
        load(payloads[name])
        assert canary.exists(), name
        canary.unlink()


def test_the_watch_sees_what_it_should_and_sleeps_otherwise(tmp_path):
    def acts():
        (tmp_path / "x").write_text("")
        os.rename(tmp_path / "x", tmp_path / "y")
        exec(compile("1", "x", "exec"))

    acts()
    with watched() as seen:
        acts()
    acts()
    assert [event.split()[0] for event in seen if event.split()[0] != "exec"] == [
        "open",
        "os.rename",
        "compile",
    ]
    assert not _watching


# ---- anything at all ----
GOOD = [
    encode({"w": torch.ones(2)}, "train"),
    encode({}, "train"),
    encode(
        {"model": {"w": torch.ones(3, 4), "b": torch.zeros(0, 3)}, "size": torch.tensor(3)}, "train"
    ),
    encode({name: torch.ones(1, dtype=dtype) for name, dtype in DTYPES.items()}, "train"),
]
edits = st.tuples(
    st.sampled_from(["put", "insert", "remove", "swap"]),
    st.integers(0, 2**16),
    st.binary(min_size=1, max_size=6),
)
# Pieces of headers make more of the mutants go deep than bytes alone do.
pieces = st.sampled_from(
    [
        b'"',
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b"0",
        b"9" * 19,
        b"-1",
        b"null",
        b"F64",
        b"I8",
        b"/",
        b"__metadata__",
        b"\\u0000",
        b"shape",
        b"1e9",
    ]
)


def mutate(good, changes):
    data = bytearray(good)
    for kind, where, piece in changes:
        at = where % (len(data) + 1)
        if kind == "put":
            data[at : at + len(piece)] = piece
        elif kind == "insert":
            data[at:at] = piece
        elif kind == "remove":
            del data[at : at + len(piece)]
        else:
            data[at:] = data[at:][::-1]
    return bytes(data)


def refit(data):
    """Returns the bytes with a header length that fits, so that they pass the first check."""
    end = data.rfind(b"}") + 1
    return data[:8] if end < 8 else struct.pack("<Q", end - 8) + data[8:]


changes = st.lists(
    edits | edits.flatmap(lambda edit: pieces.map(lambda piece: (*edit[:2], piece))),
    min_size=1,
    max_size=4,
)
mutants = st.builds(mutate, st.sampled_from(GOOD), changes)

# Headers that are JSON, with what no honest sender puts there.
junk = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 2**65) | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=4,
)
lengths = st.sampled_from([0, 1, 1, 2, 4, 2**62, 2**63, 2**64 - 1])
shapes = st.lists(lengths, max_size=4) | st.integers(60, 70).map(lambda n: [1] * n)
dtypes = st.sampled_from(
    [
        ("F32", 4),
        ("F64", 8),
        ("F16", 2),
        ("BF16", 2),
        ("I8", 1),
        ("BOOL", 1),
        ("U16", 2),
        ("C64", 8),
        ("F8_E4M3", 1),
    ]
)
tensor_names = (
    st.sampled_from("abcd")
    | st.sampled_from(["a/b", "", "/"])
    | st.integers(1, 3000).map(lambda n: "/".join("a" * n))
)


def lay_out(said, described, off, noise):
    """Returns a message with consecutive tensors, or `off` bytes from there, over noise."""
    header, place = {"__metadata__": said}, 0
    for name, entry in described.items():
        if isinstance(entry, tuple) and len(entry) == 2:
            (dtype, width), shape = entry
            size = min(width * math.prod(shape), 64)
            entry, place = tensor(dtype, shape, (place + off, place + off + size)), place + size
        header[name] = entry
    return blob(header, (noise * 200)[: max(place + off, 0)])


built = st.builds(
    lay_out,
    st.sampled_from([META] * 9 + [None]).flatmap(lambda said: st.just(said) if said else junk),
    st.dictionaries(
        tensor_names, st.tuples(dtypes, shapes) | st.tuples(dtypes, shapes) | junk, max_size=3
    ),
    st.sampled_from([0] * 9 + [-1, 1, 2**63]),
    st.just(b"\0") | st.binary(min_size=1, max_size=9),
)


any_bytes = (
    st.binary(max_size=300)
    | st.binary(max_size=200).map(raw)
    | mutants
    | mutants.map(refit)
    | built
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(any_bytes)
def test_some_bytes_are_refused_or_are_a_message(data):
    refused_or_a_message(data)


@pytest.mark.slow
@settings(max_examples=5000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(any_bytes)
def test_any_bytes_are_refused_or_are_a_message(data):
    refused_or_a_message(data)


def refused_or_a_message(data):
    with watched() as seen:
        try:
            tensors = flatten(decode(data, "train"))
        except MessageError:
            tensors = {}
    assert not seen
    assert all(
        tensor.dtype in DTYPES.values() and torch.isfinite(tensor).all()
        for tensor in tensors.values()
    )
