"""Filters: round trips, error feedback, what is encoded, refusals, and runs with filters."""

from dataclasses import dataclass

import pytest
import torch

from fedloom.core.client import LOST, Client
from fedloom.core.facts import Facts
from fedloom.core.filters import SMALL, Float16, Int8, TopK, parse_filters
from fedloom.core.message import check, flatten, schema_of, unflatten
from fedloom.core.method import Method
from fedloom.core.phase import peer_messages, phase
from fedloom.core.registry import method_class
from fedloom.core.server import RoundPolicy, Server
from fedloom.data.graph import Graph
from fedloom.engines.loop import Engine
from fedloom.errors import ConfigError, MessageError
from fedloom.experiments.run import run
from fedloom.experiments.settings import RunSettings

CHAINS = ["float16", "int8", "topk=0.1", "topk=0.1,int8", "topk=0.1,float16"]
SHAPES = [(64,), (16, 8), (7, 5), (4, 3, 5)]
SENDER = "client 'a' in 'train'"


@dataclass(frozen=True)
class Toy(Method):
    """Phases with every kind of reply."""

    @phase(model="~model", change="=model", counts="int64[C]", prototypes="float32[C,p]")
    def train(self, client, model):
        """An updated model, an increment, and tensors that are not weights."""

    @phase(model="weights")
    def upload(self, client):
        """A whole model."""

    @peer_messages(read_by="read")
    @phase(rows="float32[n,4]")
    def write(self, client):
        """A table for each other client."""

    @phase()
    def read(self, client, inbox=None):
        """Reads the tables."""

    def run(self, server):
        """Not used here."""


TRAIN = Toy.train


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def filters(text):
    return parse_filters(text, "run.upload")


def sent_and_reply(shape=(16, 8)):
    sent = {"model": {"w": random(*shape), "b": random(3, seed=1)}}
    reply = {
        "model": {"w": random(*shape, seed=2), "b": random(3, seed=3)},
        "change": {"w": random(*shape, seed=4), "b": random(3, seed=5)},
        "counts": torch.arange(3),
        "prototypes": random(3, 64, seed=6),
    }
    return flatten(sent), reply


def both_ways(text, sent, reply, lost=None):
    """Returns the encoded reply, the decoded one, and what was lost."""
    chain = filters(text)
    encoded, left = chain.encode_reply(TRAIN, reply, sent, lost or {})
    return encoded, chain.decode_reply(TRAIN, encoded, sent, schema_of(reply), SENDER), left


# ---- one tensor ----
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("step", [Float16(), Int8(), TopK(0.1), TopK(1.0)], ids=str)
def test_parts_have_the_declared_layout_and_decode_to_the_shape(step, shape):
    parts = step.encode(random(*shape))
    assert {n: (str(t.dtype)[6:], tuple(t.shape)) for n, t in parts.items()} == step.layout(shape)
    decoded = step.decode(parts, shape)
    assert (decoded.shape, decoded.dtype) == (shape, torch.float32)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_errors_of_the_encodings_are_bounded(shape):
    tensor = random(*shape) * 10
    half = Float16().decode(Float16().encode(tensor), shape)
    assert ((half - tensor).abs() <= tensor.abs() * 2**-11 + 2**-24).all()
    eight = Int8().decode(Int8().encode(tensor), shape)
    columns = tensor.reshape(-1, shape[-1] if len(shape) > 1 else 1)
    bound = columns.abs().amax(0) / 127 / 2 * 1.0001
    assert ((eight.reshape(columns.shape) - columns).abs() <= bound).all()
    assert torch.equal(TopK(1.0).decode(TopK(1.0).encode(tensor), shape), tensor)


def test_topk_keeps_the_largest_entries_exactly():
    tensor = random(10, 10)
    decoded = TopK(0.13).decode(TopK(0.13).encode(tensor), (10, 10))
    largest = tensor.abs().flatten().topk(13).indices
    assert torch.equal(decoded.flatten().nonzero().flatten(), largest.sort().values)
    assert torch.equal(decoded.flatten()[largest], tensor.flatten()[largest])


def test_special_values():
    assert Int8().decode(Int8().encode(torch.zeros(4, 8)), (4, 8)).tolist() == [[0] * 8] * 4
    large = torch.tensor([1e30, -1e30, 1.0, 0.0])
    assert Float16().encode(large)["float16"].tolist() == [65504, -65504, 1, 0]
    for step in (Float16(), Int8(), TopK(0.5)):  # the server must notice a model that diverged
        for value in (float("nan"), float("inf")):
            decoded = step.decode(step.encode(torch.tensor([value, 1.0, 2.0, 3.0])), (4,))
            assert not decoded.isfinite().all()


# ---- replies ----
@pytest.mark.parametrize("text", CHAINS)
def test_a_reply_survives_both_ways(text):
    sent, reply = sent_and_reply()
    encoded, decoded, left = both_ways(text, sent, reply)
    check(decoded, schema_of(reply), SENDER)
    assert set(left) == {"model/w", "change/w"}
    for name, tensor in flatten(reply).items():
        found = flatten(decoded)[name] + left.get(name, 0)
        assert torch.allclose(found, tensor, atol=1e-5)
    for name in ("counts", "prototypes", "model/b", "change/b"):  # no weights, or small
        assert torch.equal(flatten(encoded)[name], flatten(reply)[name])


@pytest.mark.parametrize("text", CHAINS)
def test_the_encoding_is_that_of_the_difference(text):
    sent, reply = sent_and_reply()
    reply["model"]["w"] = sent["model/w"] + 1e-4 * reply["change"]["w"]
    _, decoded, _ = both_ways(text, sent, reply)
    assert torch.allclose(decoded["model"]["w"], reply["model"]["w"], atol=1e-3)


@pytest.mark.parametrize("text", ["int8", "topk=0.05", "topk=0.05,int8"])
def test_error_feedback_adds_up_to_the_truth(text):
    sent, _ = sent_and_reply()
    truth, received, lost = torch.zeros(16, 8), torch.zeros(16, 8), {}
    for number in range(30):
        _, reply = sent_and_reply()
        reply["change"]["w"] = random(16, 8, seed=number)
        truth = truth + reply["change"]["w"]
        _, decoded, lost = both_ways(text, sent, reply, lost)
        received = received + decoded["change"]["w"]
        assert torch.allclose(received + lost["change/w"], truth, atol=1e-4)
    assert (truth - received).norm() < truth.norm()  # without feedback, topk keeps a twentieth


def test_whole_models_are_encoded_without_feedback():
    chain, reply = filters("int8"), {"model": {"w": random(16, 8)}}
    encoded, left = chain.encode_reply(Toy.upload, reply, {}, {})
    assert left == {}
    decoded = chain.decode_reply(Toy.upload, encoded, {}, schema_of(reply), SENDER)
    assert torch.allclose(decoded["model"]["w"], reply["model"]["w"], atol=0.05)


def test_small_tensors_and_other_dtypes_are_not_encoded():
    for tensor in (random(SMALL - 1), random(8, 8).double()):
        reply = {"model": {"w": tensor}}
        encoded, left = filters("int8").encode_reply(TRAIN, reply, {"model/w": tensor}, {})
        assert torch.equal(encoded["model"]["w"], tensor)
        assert left == {}
    sent = {"model/w": random(SMALL)}
    encoded, _ = filters("int8").encode_reply(TRAIN, unflatten(sent), sent, {})
    assert set(encoded["model"]["w"]) == {"int8:int8", "int8:scale"}


def test_peer_messages_are_not_encoded():
    table = {"b": {"rows": random(20, 4)}}
    encoded, left = filters("int8").encode_reply(Toy.write, table, {}, {})
    assert schema_of(encoded) == schema_of(table)
    assert left == {}
    inbox = {"inbox": table, "model": {"w": random(8, 8)}}
    encoded = filters("int8").encode(inbox)
    assert schema_of(encoded["inbox"]) == schema_of(table)
    assert set(encoded["model"]["w"]) == {"int8:int8", "int8:scale"}


@pytest.mark.parametrize("text", ["float16", "int8"])
def test_messages_from_the_server_survive_both_ways(text):
    message = {"model": {"w": random(16, 8), "b": random(4)}, "deep": {"er": {"w": random(40)}}}
    message |= {"lone": random(64), "count": torch.arange(4)}
    decoded = filters(text).decode(filters(text).encode(message))
    assert schema_of(decoded) == schema_of(message)
    for name, tensor in flatten(message).items():
        assert torch.allclose(flatten(decoded)[name], tensor, atol=0.05)
    assert torch.equal(decoded["lone"], message["lone"])  # a prototype is not in a group
    assert filters("").encode(message) is filters("").decode(message) is message


# ---- malformed encodings ----
def put(name, tensor):
    return lambda flat: flat | {name: tensor}


def without(*names):
    return lambda flat: {name: t for name, t in flat.items() if name not in names}


W = "model/w"
BAD = {
    "no parts": (without(f"{W}/int8:int8", f"{W}/int8:scale", f"{W}/topk:index"), "is missing"),
    "a part is missing": (without(f"{W}/int8:scale"), f"tensor '{W}/int8:scale' is missing"),
    "not encoded": (
        lambda flat: without(*(n for n in flat if n.startswith(W)))(flat) | {W: random(16, 8)},
        f"tensor '{W}",
    ),
    "another part": (put(f"{W}/more", torch.ones(1)), f"tensor '{W}/more' is not expected here"),
    "index shape": (
        put(f"{W}/topk:index", torch.arange(5).int()),
        rf"tensor '{W}/topk:index' has shape \[5\], expected \[13\]",
    ),
    "index dtype": (
        put(f"{W}/topk:index", torch.arange(13)),
        rf"tensor '{W}/topk:index' has dtype torch.int64, expected int32",
    ),
    "index too large": (
        put(f"{W}/topk:index", torch.arange(116, 129).int()),
        rf"{SENDER}: tensor '{W}': 'topk:index' must be increasing numbers from 0 to 127",
    ),
    "index negative": (put(f"{W}/topk:index", torch.arange(-1, 12).int()), "must be increasing"),
    "index twice": (put(f"{W}/topk:index", torch.zeros(13).int()), "must be increasing"),
    "value dtype": (
        put(f"{W}/int8:int8", torch.zeros(13)),
        "has dtype torch.float32, expected int8",
    ),
    "scale shape": (put(f"{W}/int8:scale", torch.ones(13)), r"has shape \[13\], expected \[1\]"),
    "small one encoded": (
        lambda flat: without("model/b")(flat) | {"model/b/float16:float16": torch.ones(3).half()},
        "tensor 'model/b",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_malformed_encoding_is_refused_by_name(kind):
    spoil, words = BAD[kind]
    sent, reply = sent_and_reply()
    encoded, _, _ = both_ways("topk=0.1,int8", sent, reply)
    spoilt = unflatten(spoil(flatten(encoded)))
    with pytest.raises(MessageError, match=words) as error:
        filters("topk=0.1,int8").decode_reply(TRAIN, spoilt, sent, schema_of(reply), SENDER)
    assert str(error.value).startswith(SENDER)


def test_a_reply_that_does_not_match_what_was_sent_is_refused_by_the_server():
    sent, reply = sent_and_reply()
    expected = schema_of(reply)
    for wrong in ({"w": random(9, 9), "b": reply["model"]["b"]}, {"other": random(16, 8)}):
        encoded, _ = filters("int8").encode_reply(TRAIN, {**reply, "model": wrong}, sent, {})
        with pytest.raises(MessageError, match=f"^{SENDER}: tensor 'model/"):
            filters("int8").decode_reply(TRAIN, encoded, sent, expected, SENDER)


# ---- settings ----
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("int7", r"unknown filter in run\.upload: 'int7'.* Valid: float16, int8, topk=SHARE"),
        ("int8=3", r"unknown filter in run\.upload: 'int8=3'"),
        ("int8,,float16", r"unknown filter in run\.upload: ''"),
        ("topk", r"run\.upload: 'topk': the share must be above 0 and at most 1"),
        ("topk=0", "the share must be above 0 and at most 1"),
        ("topk=1.5", "the share must be above 0 and at most 1"),
        ("topk=nan", "the share must be above 0 and at most 1"),
        ("int8,float16", r"run\.upload: no filter can follow 'int8'; put it last"),
        ("topk=0.5,topk=0.1", r"run\.upload: 'topk' is there twice"),
    ],
)
def test_invalid_filters_are_refused_with_the_setting_and_the_choices(text, words):
    with pytest.raises(ConfigError, match=words):
        RunSettings(upload=text)


def test_filters_that_cannot_apply_are_refused():
    with pytest.raises(ConfigError, match=r"run\.upload: a secure run sends masked sums"):
        RunSettings(upload="int8", secure=True)
    assert RunSettings(download="int8", secure=True).download == "int8"
    with pytest.raises(ConfigError, match=r"run\.download: topk is for uploads; valid: float16 or"):
        RunSettings(download="topk=0.1")
    with pytest.raises(ConfigError, match=r"run\.upload: topk needs uploads that are updates"):
        filters("topk=0.1").check(method_class("dense"), "run.upload")
    filters("int8").check(method_class("dense"), "run.upload")
    with pytest.raises(ConfigError, match=r"run\.upload: this method's clients send no weights"):
        filters("int8").check(method_class("fedproto"), "run.upload")
    filters("").check(method_class("fedproto"), "run.upload")


def test_a_run_refuses_filters_that_its_method_cannot_use(node_federation):
    with pytest.raises(ConfigError, match=r"run\.upload: this method's clients send no weights"):
        run("fedproto", node_federation, model="gcn-2x8", rounds=1, upload="int8")


# ---- clients and servers ----
@dataclass(frozen=True)
class InPlace(Method):
    """A method that writes to the message it got."""

    @phase(model="~model")
    def train(self, client, model):
        """Adds 1 to the model, in place."""
        for tensor in model.values():
            tensor.add_(1)
        return {"model": model}

    def run(self, server):
        """Not used here."""


@pytest.mark.parametrize("download", ["", "int8"])
@pytest.mark.parametrize("upload", ["int8", "topk=1.0"])
def test_a_phase_may_write_to_its_message(upload, download):
    known = Facts(2, 2, "node", ("a",), ("gcn-2x4",), upload=upload, download=download)
    graph = Graph(torch.ones(4, 2), torch.zeros(2, 0, dtype=torch.int64), torch.arange(4) % 2, 2)
    method = InPlace()
    engine = Engine(method, [Client("a", graph, known)])
    server = Server(method, known, engine.call, RoundPolicy("local"), None)
    model = {"w": random(8, 8)}
    reply = server.ask(method.train, model=model)["a"]["model"]["w"]
    assert torch.allclose(reply, model["w"] + 1, atol=0.05)
    assert set(engine.clients["a"].state) == {LOST}


# ---- runs ----
SETTINGS = {"model": "gcn-3x64", "rounds": 4}


@pytest.fixture(scope="module")
def plain(node_federation):
    return run("fedavg", node_federation, **SETTINGS)


@pytest.mark.parametrize(
    ("upload", "share"), [("float16", 0.6), ("int8", 0.4), ("topk=0.1,int8", 0.25)]
)
def test_uploads_shrink_in_the_ledger_and_the_run_still_learns(
    upload, share, node_federation, plain
):
    result = run("fedavg", node_federation, upload=upload, **SETTINGS)
    phases, full = result.traffic["phases"], plain.traffic["phases"]
    assert phases["train"]["bytes_up"] < share * full["train"]["bytes_up"]
    assert phases["train"]["bytes_down"] == full["train"]["bytes_down"]
    assert phases["size"] == full["size"]
    assert result.accuracy > plain.accuracy - 0.15
    assert result.summary["history_hash"] != plain.summary["history_hash"]


def test_downloads_shrink_in_the_ledger(node_federation, plain):
    result = run("fedavg", node_federation, download="int8", **SETTINGS)
    phases, full = result.traffic["phases"], plain.traffic["phases"]
    assert phases["train"]["bytes_down"] < 0.4 * full["train"]["bytes_down"]
    assert phases["train"]["bytes_up"] == full["train"]["bytes_up"]
    assert result.accuracy > plain.accuracy - 0.15


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_engines_agree(method, node_federation):
    settings = {**SETTINGS, "upload": "topk=0.2,int8", "download": "float16"}
    results = {
        engine: run(method, node_federation, engine=engine, **settings)
        for engine in ("loop", "wire", "processes", "stacked", "stacked_processes")
    }
    loop = results["loop"]
    for engine in ("wire", "processes"):
        assert results[engine].summary["history_hash"] == loop.summary["history_hash"]
        assert results[engine].traffic == loop.traffic
    for engine in ("stacked", "stacked_processes"):
        assert results[engine].traffic == loop.traffic
        # A rounding difference may select another entry, so single weights can differ a little.
        one, two = (flatten(r.final_models["server"]) for r in (loop, results[engine]))
        for name in one:
            assert (one[name] - two[name]).abs().mean() < 1e-3


class Killed(BaseException):
    """Stands for anything that ends a process between two rounds."""


@pytest.mark.parametrize("engine", ["loop", "processes"])
def test_a_resumed_run_is_bit_identical(engine, node_federation, tmp_path):
    settings = {**SETTINGS, "upload": "topk=0.1,int8", "participation": 0.7, "engine": engine}
    unbroken = run("fedavg", node_federation, **settings)

    def die(entry):
        if entry["round"] == 3:
            raise Killed

    settings |= {"checkpoint_every": 1, "out": tmp_path / "x"}
    with pytest.raises(Killed):
        run("fedavg", node_federation, callbacks=die, **settings)
    resumed = run("fedavg", node_federation, resume=True, **settings)
    assert resumed.summary["history_hash"] == unbroken.summary["history_hash"]


def test_a_secure_run_takes_download_filters(node_federation):
    plain, secure = (
        run("fedavg", node_federation, download="int8", secure=secure, **SETTINGS)
        for secure in (False, True)
    )
    assert secure.accuracy == pytest.approx(plain.accuracy, abs=0.02)
