"""Client and Server: requests, replies, rounds, random streams, peer messages and snapshots."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn

from fedloom.core.client import Client
from fedloom.core.facts import Facts, SecureTerms
from fedloom.core.history_hash import fingerprint
from fedloom.core.message import batched, flatten, unflatten
from fedloom.core.method import Method
from fedloom.core.phase import Computed, averaged, peer_messages, phase, summed
from fedloom.core.replies import Replies
from fedloom.core.server import RoundPolicy, Server
from fedloom.core.settings import setting
from fedloom.core.state import restore, snapshot
from fedloom.data.graph import Graph
from fedloom.engines.loop import Engine
from fedloom.errors import ConfigError, MessageError
from fedloom.nn.training import make_optimizer, step
from fedloom.nn.weights import weights
from fedloom.privacy.choice import aggregation_for, responder_for

NAMES = ("b", "a", "c")  # client order is not alphabetical
SPEC = "gcn-2x4"


def rows_asked_for(toy, facts, message, reply):
    """The schema of `Toy.table`: as many rows as the message asks for."""
    return (("", "float32", (int(message["count"]), facts.num_classes)),)


@dataclass(frozen=True)
class Toy(Method):
    """Phases that show what arrives."""

    width: int = setting(2, "a length", at_least=1)

    @summed
    @phase(seen="=x", who="int64[]")
    def add(self, client: Client, x):
        """To be added up."""
        return self.echo(client, x)

    @averaged()
    @phase(seen="=x")
    def blend(self, client: Client, x):
        """To be averaged."""
        return {"seen": x}

    @phase(weight="int64[]")
    def weight(self, client: Client):
        """1, 0 and 3."""
        return {"weight": torch.tensor([1, 0, 3][NAMES.index(client.name)])}

    @averaged(by="weight")
    @phase(seen="=x")
    def weigh(self, client: Client, x):
        """To be averaged by weight."""
        return {"seen": x}

    @phase(seen="=x", who="int64[]")
    def echo(self, client: Client, x, y=None):
        """Sends back what came, and adds to it in place."""
        client.state["kept"] = x
        client.state["answer"] = reply = {"seen": x, "who": torch.tensor(NAMES.index(client.name))}
        if y is not None:
            x.add_(y)
        return reply

    @phase(
        model="weights",
        table="float32[C,d]",
        row="float32[width,p]",
        any="float64[n]",
        count="int64[K,3]",
    )
    def shapes(self, client: Client):
        """One of each kind of declaration."""
        f = client.facts
        return {
            "model": weights(client.build()),
            "table": torch.ones(f.num_classes, f.num_features),
            "row": torch.ones(self.width, f.width),
            "any": torch.ones(client.graph.num_nodes).double(),
            "count": torch.ones(f.num_clients, 3, dtype=torch.int64),
        }

    @phase(value="float32[]")
    def draw(self, client: Client):
        """A number of the client's own stream."""
        return {"value": torch.rand((), generator=client.rng("noise"))}

    @phase(x="=x")
    def mirror(self, client: Client, x):
        """The same from all clients."""
        return {"x": x}

    @peer_messages(read_by="open_post")
    @phase(words="float32[n]", number="int64[]")
    def post(self, client: Client, scale):
        """Writes its position to all other clients, repeated."""
        own = NAMES.index(client.name)
        return {
            to: {"words": scale * torch.ones(own + 1), "number": torch.tensor(own)}
            for to in NAMES
            if to != client.name
        }

    @phase()
    def open_post(self, client: Client, inbox=None):
        """Keeps what came."""
        client.state["post"] = inbox or {}
        return {}

    @summed
    @phase(rows=Computed(rows_asked_for))
    def table(self, client: Client, count):
        """As many rows as were asked for."""
        return {"rows": torch.ones(int(count), client.facts.num_classes)}

    @phase(rows="float32[*there,2]", there="bool[C]")
    def some(self, client: Client):
        """A row for each class but the first."""
        there = torch.arange(client.facts.num_classes) > 0
        return {"rows": torch.ones(int(there.sum()), 2), "there": there}

    @phase()
    def silent(self, client: Client):
        """Nothing."""
        client.state["visited"] = client.state.get("visited", torch.tensor(0)) + 1
        return {}

    def run(self, server):
        """Not used here."""


class Watcher:
    """An observer that writes down what it is told."""

    def __init__(self, done=0, stop_after=None):
        self.done, self.stop_after, self.finished, self.scored = done, stop_after, [], []

    def entered_rounds(self, server, count):
        self.planned = count
        return self.done

    def finished_round(self, server):
        self.finished.append((server.round, tuple(server.participants)))
        return server.round == self.stop_after

    def evaluated(self, server, replies, stage):
        self.scored.append((server.round, stage, sorted(replies)))


def facts(names=NAMES, models=None, seed=0, **more):
    return Facts(2, 3, "node", tuple(names), models or (SPEC,) * len(names), seed=seed, **more)


def graph(nodes=6):
    lot = torch.arange(nodes) % 3
    return Graph(
        torch.ones(nodes, 2),
        torch.tensor([[0, 1], [1, 0]]),
        lot,
        3,
        train=lot == 0,
        val=lot == 1,
        test=lot == 2,
    )


def make(
    names=NAMES,
    participation=1.0,
    evaluation="local",
    evaluate_every=1,
    watcher=None,
    seed=0,
    method=None,
):
    known = facts(names, seed=seed)
    method = method or Toy()
    engine = Engine(method, [Client(name, graph(), known) for name in names])
    server = Server(
        method,
        known,
        engine.call,
        RoundPolicy(evaluation, participation, evaluate_every),
        watcher or Watcher(),
    )
    return server, engine, method


# ---- client to client ----
def test_peer_messages_reach_their_receivers_and_are_booked_both_ways():
    server, engine, toy = make()
    server.relay(toy.post, scale=torch.tensor(2.0))
    assert {name: list(client.state["post"]) for name, client in engine.clients.items()} == {
        "b": ["a", "c"],
        "a": ["b", "c"],
        "c": ["a", "b"],
    }
    assert engine.clients["b"].state["post"]["c"]["words"].tolist() == [2, 2, 2]
    phases = server.ledger.traffic()["phases"]
    assert (
        phases["post"]["scalars_up"] == phases["open_post"]["scalars_down"] == 2 * (1 + 2 + 3) + 6
    )


def test_a_client_without_peer_messages_reads_an_empty_inbox():
    server, engine, toy = make()
    written = server.collect(toy.post, scale=torch.tensor(1.0))
    server.deliver(toy.post, {"a": {"b": written["a"]["b"]}})
    assert list(engine.clients["b"].state["post"]) == ["a"]
    assert engine.clients["c"].state["post"] == {}


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            lambda r: r | {"b": r["a"]},
            "client 'b' in 'post': writes to 'b', who is not another client; valid: a, c",
        ),
        (lambda r: r | {"x": r["a"]}, "writes to 'x', who is not another client"),
        (lambda r: r | {"a": {"words": torch.ones(1)}}, "tensor 'a/number' is missing"),
        (
            lambda r: r | {"a": {**r["a"], "words": torch.ones(1, 1)}},
            r"tensor 'a/words' has shape \[1, 1\], expected \[-1\]",
        ),
        (
            lambda r: r | {"a": {**r["a"], "words": torch.tensor([float("nan")])}},
            "tensor 'a/words' holds nan",
        ),
        (
            lambda r: r | {"a": {**r["a"], "more": torch.ones(1)}},
            "tensor 'a/more' is not expected here",
        ),
    ],
)
def test_peer_messages_are_checked_against_their_declaration(spoil, words, monkeypatch):
    server, engine, toy = make()
    server._call = lambda phase, sent: {
        c: spoil(r) if c == "b" else r for c, r in engine.call(phase, sent).items()
    }
    with pytest.raises(MessageError, match=words):
        server.relay(toy.post, scale=torch.tensor(1.0))


def test_only_peer_messages_are_relayed():
    server, _, toy = make()
    with pytest.raises(
        ConfigError,
        match=r"server\.ask: phase 'post' writes to other clients; use server\.relay",
    ):
        server.ask(toy.post, scale=torch.tensor(1.0))
    with pytest.raises(
        ConfigError, match=r"server\.relay: phase 'echo' is not marked @peer_messages"
    ):
        server.relay(toy.echo, x=torch.ones(1))


def test_a_computed_schema_can_depend_on_the_message():
    server, engine, toy = make()
    assert server.sum(toy.table, count=torch.tensor(4))["rows"].tolist() == [[3.0] * 3] * 4
    server._call = lambda phase, sent: {
        c: {"rows": r["rows"][:-1]} for c, r in engine.call(phase, sent).items()
    }
    with pytest.raises(MessageError, match=r"tensor 'rows' has shape \[3, 3\], expected \[4, 3\]"):
        server.sum(toy.table, count=torch.tensor(4))


def test_a_length_can_be_the_number_of_true_entries_of_the_reply():
    server, engine, toy = make()
    assert all(reply["rows"].shape == (2, 2) for reply in server.ask(toy.some).values())

    def refused(spoil, words):
        server._call = lambda phase, sent: {
            c: spoil(dict(r)) for c, r in engine.call(phase, sent).items()
        }
        with pytest.raises(MessageError, match=words):
            server.ask(toy.some)

    refused(
        lambda r: r | {"rows": r["rows"][:1]},
        r"tensor 'rows' has shape \[1, 2\], expected \[2, 2\]",
    )
    refused(
        lambda r: r | {"there": r["there"] & False},
        r"tensor 'rows' has shape \[2, 2\], expected \[0, 2\]",
    )
    refused(lambda r: r | {"there": r["there"].long()}, "tensor 'there' has dtype")
    refused(lambda r: {"rows": r["rows"]}, "tensor 'there' is missing")
    with pytest.raises(
        ValueError,
        match=r"counts the true entries of 'there', which must be declared as 'bool\[dims\]'",
    ):
        phase(rows="float32[*there]", there="int64[C]")


# ---- asking ----
def test_all_clients_are_asked_in_client_order():
    server, _, toy = make()
    replies = server.ask(toy.echo, x=torch.arange(3.0))
    assert list(replies) == ["b", "a", "c"]
    assert replies.stack("who").tolist() == [0, 1, 2]
    assert all(torch.equal(r["seen"], torch.arange(3.0)) for r in replies.values())


def test_each_adds_to_the_common_message():
    server, _, toy = make()
    replies = server.ask(
        toy.echo, x=torch.zeros(1), each={"c": {"y": torch.tensor(3.0)}, "b": {"x": torch.ones(2)}}
    )
    assert list(replies) == ["b", "c"]  # the keys say whom; the order stays the clients'
    assert replies["c"]["seen"].tolist() == [3]
    assert replies["b"]["seen"].tolist() == [1, 1]


def test_only_the_chosen_clients_are_asked():
    server, engine, toy = make()
    assert list(server.ask(toy.silent, clients=["c", "b"])) == ["b", "c"]
    assert [name for name, client in engine.clients.items() if "visited" in client.state] == [
        "b",
        "c",
    ]
    assert len(server.ask(toy.silent, each={})) == 0  # no clients, not all clients
    assert len(server.ask(toy.silent, clients=[])) == 0


@pytest.mark.parametrize("whom", [{"clients": ["b", "nobody"]}, {"each": {"nobody": {}}}])
def test_an_unknown_client_is_refused(whom):
    server, _, toy = make()
    with pytest.raises(ValueError, match="nobody"):
        server.ask(toy.silent, **whom)


def test_names_of_a_message_are_checked_before_anything_runs():
    server, engine, toy = make()
    with pytest.raises(
        MessageError, match=r"to client 'b': tensor 'x' is missing in the message to 'echo'"
    ):
        server.ask(toy.echo)
    with pytest.raises(MessageError, match=r"to client 'b': 'echo' does not take 'z'; valid: x, y"):
        server.ask(toy.echo, x=torch.ones(1), z=torch.ones(1))
    with pytest.raises(MessageError, match=r"'silent' does not take 'x'; valid: nothing"):
        server.ask(toy.silent, x=torch.ones(1))
    with pytest.raises(MessageError, match="'x' is a float"):
        server.ask(toy.echo, x=1.0)
    assert not any(client.state for client in engine.clients.values())


@pytest.mark.parametrize("way", ["to all", "to one"])
def test_the_server_sends_finite_numbers_only(way):
    server, engine, toy = make()
    message = {"x": torch.tensor([1.0, float("nan")])}
    with pytest.raises(MessageError, match=r"^to .*'x' holds nan"):
        server.ask(toy.echo, **({"each": {"a": message}} if way == "to one" else message))
    assert not any(client.state for client in engine.clients.values())


def test_declared_replies_pass_and_any_other_length_does_not():
    server, _, toy = make()
    reply = server.ask(toy.shapes)["a"]
    assert (reply["table"].shape, reply["row"].shape, reply["count"].shape) == (
        (3, 2),
        (2, 4),
        (3, 3),
    )
    for name, wrong in [
        ("table", torch.ones(2, 3)),
        ("row", torch.ones(3, 4)),
        ("count", torch.ones(2, 3, dtype=torch.int64)),
        ("any", torch.ones(6, 1).double()),
        ("model/classifier.bias", torch.ones(4)),
    ]:
        spoilt = unflatten({**flatten(reply), name: wrong})
        server._call = lambda phase, sent, spoilt=spoilt: {"b": spoilt}
        with pytest.raises(
            MessageError, match=f"client 'b' in 'shapes': tensor '{name}' has shape"
        ):
            server.ask(toy.shapes)


def test_each_client_must_answer_with_the_weights_of_its_own_model():
    known = facts(models=("gcn-2x4", "sage-2x4", "gcn-2x4"))
    toy = Toy()
    engine = Engine(toy, [Client(name, graph(), known) for name in NAMES])
    server = Server(toy, known, engine.call, RoundPolicy("local"), Watcher())
    replies = server.ask(toy.shapes)
    assert set(replies["a"]["model"]) - set(replies["b"]["model"]) == {
        "layers.0.neighbour",
        "classifier.neighbour",
    }
    swapped = {"b": replies["a"], "a": replies["b"]}
    server._call = lambda phase, sent: swapped
    with pytest.raises(MessageError, match=r"client 'b'.*neighbour"):
        server.ask(toy.shapes)


def test_both_ways_are_booked_once_per_client():
    server, _, toy = make()
    server.ask(toy.echo, x=torch.ones(2), clients=["a", "c"])
    server.ask(toy.silent)
    assert [(r.phase, r.direction, r.client, r.scalars) for r in server.ledger.rows] == [
        ("echo", "down", "a", 2),
        ("echo", "down", "c", 2),
        ("echo", "up", "a", 3),
        ("echo", "up", "c", 3),
    ]


def test_silent_clients_are_left_out():
    server, engine, toy = make()
    server._call = lambda phase, sent: {
        k: v for k, v in engine.call(phase, sent).items() if k != "a"
    }
    replies = server.ask(toy.echo, x=torch.ones(1))
    assert list(replies) == ["b", "c"]
    assert replies.mean()["seen"].tolist() == [1]


def test_parties_share_no_memory():
    server, engine, toy = make()
    sent = torch.zeros(2)
    replies = server.ask(toy.echo, x=sent, y=torch.ones(2))
    assert sent.tolist() == [0, 0]  # a client added to what it got
    assert all(r["seen"].tolist() == [1, 1] for r in replies.values())  # and no client twice
    replies["a"]["seen"].fill_(9)
    assert engine.clients["a"].state["kept"].tolist() == [1, 1]
    assert replies["b"]["seen"].tolist() == [1, 1]
    engine.clients["c"].state["answer"]["seen"].fill_(5)
    assert replies["c"]["seen"].tolist() == [1, 1]


def test_a_server_cannot_reach_a_graph():
    server, engine, _ = make()
    reachable = [
        value
        for value in vars(server).values()
        if value is engine or isinstance(value, (Graph, Client, Engine))
    ]
    assert not reachable


def test_the_parties_of_a_secure_run_need_their_side_of_secure_aggregation():
    known = facts(secure=SecureTerms())
    with pytest.raises(ValueError, match="a client of a secure run needs the responder"):
        Client("a", graph(), known)
    with pytest.raises(ValueError, match="the server of a secure run needs the aggregation"):
        Server(Toy(), known, None, RoundPolicy("local"), Watcher())
    Client("a", graph(), known, responder=responder_for(known, "a"))
    Server(Toy(), known, None, RoundPolicy("local"), Watcher(), aggregation_for(known))


# ---- replies ----
def answered(form):
    return Replies(
        form(
            {
                "b": {"w": torch.tensor([1.0, 2.0]), "g": {"n": torch.tensor(2)}},
                "a": {"w": torch.tensor([3.0, 6.0]), "g": {"n": torch.tensor(4)}},
            }
        )
    )


@pytest.mark.parametrize("form", [dict, batched], ids=["dict", "batch"])
def test_sum_mean_stack_and_column(form):
    replies = partial(answered, form)
    total = replies().sum()
    assert total["w"].tolist() == [4, 8]
    assert total["g"]["n"].item() == 6
    assert replies().mean()["w"].tolist() == [2, 4]
    weighted = replies().mean({"a": torch.tensor(3), "b": torch.tensor(1), "z": torch.tensor(50)})
    assert weighted["w"].tolist() == [2.5, 5]
    assert weighted["g"]["n"].item() == 3.5
    assert replies().mean({"a": torch.tensor(0.0), "b": torch.tensor(0.1)})["w"].tolist() == [1, 2]
    assert replies().stack("w").tolist() == [[1, 2], [3, 6]]
    assert list(replies().column("g")) == ["b", "a"]


@pytest.mark.parametrize("form", [dict, batched], ids=["dict", "batch"])
def test_sums_leave_the_replies_alone(form):
    came = answered(form)
    came.sum()["w"].fill_(0)
    came.mean()["w"].fill_(0)
    assert came["b"]["w"].tolist() == [1, 2]
    alone = Replies({"b": came["b"]})
    alone.sum()["w"].fill_(0)
    assert came["b"]["w"].tolist() == [1, 2]


def test_the_server_sums_and_averages_what_it_asks_for():
    server, _, toy = make()
    each = {name: {"x": torch.tensor([float(k)])} for k, name in enumerate(NAMES)}
    assert server.sum(toy.add, each=each)["seen"].tolist() == [3]
    assert server.mean(toy.blend, each=each)["seen"].item() == 1
    for _ in range(2):
        assert server.mean(toy.weigh, each=each)["seen"].tolist() == [1.5]
    assert server.ledger.traffic()["phases"]["weight"]["messages"] == 3  # asked for once
    for how, wrong, mark in (
        ("sum", toy.blend, "@summed"),
        ("mean", toy.add, "@averaged"),
        ("sum", toy.echo, "@summed"),
    ):
        with pytest.raises(
            ConfigError, match=f"server.{how}: phase '{wrong.name}' is not marked {mark}"
        ):
            getattr(server, how)(wrong, each=each)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_an_invalid_weight_is_refused_with_its_client(weight):
    with pytest.raises(
        MessageError, match=r"client 'a': weight is .* must be finite, not negative and at most"
    ):
        answered(dict).normalized({"a": torch.tensor(weight), "b": torch.tensor(1.0)})
    with pytest.raises(MessageError, match="weight 0"):
        answered(dict).normalized({"a": torch.tensor(0.0), "b": torch.tensor(0.0)})


@pytest.mark.parametrize("how", ["sum", "mean"])
def test_a_sum_of_no_replies_is_an_error(how):
    with pytest.raises(MessageError, match="nobody answered"):
        getattr(Replies({}), how)()


# ---- rounds ----
MANY = tuple(f"c{k}" for k in range(10))


def drawn(participation, seed=0, count=8, names=MANY):
    server, *_ = make(names, participation, seed=seed)
    return [list(server.participants) for _ in server.rounds(count)]


def test_participants_are_drawn_without_replacement_by_seed_alone():
    groups = drawn(0.3)
    assert all(len(set(group)) == len(group) == 3 for group in groups)
    assert all(group == sorted(group, key=MANY.index) for group in groups)
    assert len({tuple(g) for g in groups}) > 1
    torch.manual_seed(77)
    assert drawn(0.3) == groups
    assert drawn(0.3, seed=1) != groups
    assert drawn(1.0) == [list(MANY)] * 8
    assert all(len(g) == 1 for g in drawn(0.001))
    held = [name for group in drawn(0.3, count=300) for name in group]
    assert all(60 < held.count(name) < 120 for name in MANY)  # 90 expected


def test_rounds_are_numbered_and_all_clients_are_asked_afterwards():
    watcher = Watcher()
    server, _, toy = make(MANY, 0.2, watcher=watcher)
    assert server.round == 0
    asked = []
    for number in server.rounds(3):
        assert number == server.round
        asked.append(tuple(server.ask(toy.silent)))
    assert watcher.finished == list(zip((1, 2, 3), asked, strict=True))
    assert all(len(group) == 2 for group in asked)
    assert len(server.ask(toy.silent)) == 10
    assert watcher.planned == 3


def test_rounds_continue_after_the_finished_ones_and_stop_when_told():
    server, *_ = make(watcher=Watcher(done=4, stop_after=6))
    assert list(server.rounds(9)) == [5, 6]
    server, *_ = make(watcher=Watcher(done=9))
    assert list(server.rounds(9)) == []
    assert server.round == 9


@pytest.mark.parametrize(
    ("every", "scored"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (3, [3, 5]), (9, [5])]
)
def test_evaluation_is_every_few_rounds_and_in_the_last(every, scored):
    watcher = Watcher()
    server, engine, _ = make(MANY[:3], 0.4, evaluate_every=every, watcher=watcher)
    for client in engine.clients.values():
        client.state["model"] = client.build()
    for _ in server.rounds(5):
        server.evaluate()
    assert watcher.scored == [
        (number, "train", list(MANY[:3])) for number in scored
    ]  # all clients, also in a partial round
    server.evaluate(stage="finetune")
    assert watcher.scored[-1] == (5, "finetune", list(MANY[:3]))
    assert server.seconds_evaluating > 0


@pytest.mark.parametrize(("evaluation", "travels"), [("local", False), ("global", True)])
def test_the_shared_model_is_sent_only_where_it_is_scored(evaluation, travels):
    server, engine, _ = make(evaluation=evaluation)
    for client in engine.clients.values():
        client.state["model"] = client.build()
    server.evaluate(model=server.model())
    assert ("down" in {row.direction for row in server.ledger.rows}) == travels


# ---- random streams and models ----
def test_streams_belong_to_a_party_and_a_purpose_and_go_on():
    def first(name, purpose, seed=0):
        return torch.rand(
            3, generator=Client(name, graph(), facts(seed=seed)).rng(purpose)
        ).tolist()

    draws = [first("a", "x"), first("a", "y"), first("b", "x"), first("a", "x", seed=1)]
    server = make()[0]
    draws.append(torch.rand(3, generator=server.rng("x")).tolist())
    assert len({tuple(d) for d in draws}) == len(draws)
    assert first("a", "x") == draws[0]
    client = Client("a", graph(), facts())
    assert torch.rand(1, generator=client.rng("x")) != torch.rand(1, generator=client.rng("x"))


def test_models_of_clients_differ_and_the_servers_is_one_for_all():
    one, other = (Client(name, graph(), facts()).build() for name in ("a", "b"))
    assert not torch.equal(one.layers[0].weight, other.layers[0].weight)
    assert torch.equal(one.layers[0].weight, Client("a", graph(), facts()).build().layers[0].weight)
    assert all(torch.equal(t, make()[0].model()[name]) for name, t in make()[0].model().items())
    mixed = Server(
        Toy(),
        facts(models=("gcn-2x4", "sage-2x4", "gcn-2x4")),
        None,
        RoundPolicy("local"),
        Watcher(),
    )
    with pytest.raises(ConfigError, match="needs one model for all clients, got gcn-2x4, sage-2x4"):
        mixed.model()
    assert (
        type(
            Client("a", graph(), facts(models=("gcn-2x4", "sage-2x4", "gcn-2x4"))).build()
        ).__name__
        == "SAGE"
    )


def test_a_client_trains_without_held_out_labels_and_is_scored_with_them():
    client = Client("a", graph(), facts())
    assert (client.graph.y[~client.graph.train] == -1).all()
    assert (client.full_graph.y >= 0).all()
    assert Client("a", graph(), facts(), inductive=True).graph.num_nodes == 2
    logits = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    train = client.full_graph.train
    expected = nn.functional.cross_entropy(
        logits[train], client.full_graph.y[train], reduction="sum"
    )
    assert torch.equal(client.loss(logits, client.graph, "sum"), expected)


def items(count, train):
    """A graph task of `count` graphs with two nodes each, of which the first `train` train."""
    chosen = torch.arange(count) < train
    x = torch.arange(2.0 * count).view(-1, 1).expand(-1, 2).contiguous()
    ends = torch.arange(2 * count).view(-1, 2).t()
    return Graph(
        x,
        ends,
        torch.arange(count) % 3,
        3,
        train=chosen,
        test=~chosen,
        batch=torch.arange(count).repeat_interleave(2),
    )


def many(count=10, train=7, seed=0):
    return Client("a", items(count, train), facts(seed=seed))


def held(batches):
    """Which graphs a batch holds."""
    return [sorted(int(v) // 2 for v in batch.x[::2, 0]) for batch in batches]


@pytest.mark.parametrize(
    ("size", "lengths"), [(3, [3, 3, 1]), (7, [7]), (100, [7]), (1, [1] * 7), (0, [7])]
)
def test_batches_share_out_the_training_graphs(size, lengths):
    client = many()
    batches = client.batches(size)
    assert [batch.num_items for batch in batches] == lengths
    assert sorted(k for batch in held(batches) for k in batch) == list(range(7))
    assert all(batch.train.all() for batch in batches)
    assert all((batch.y >= 0).all() for batch in batches)
    assert client.batches(size) is batches  # made once: so is their adjacency


def test_epochs_differ_in_the_order_of_the_batches_only():
    client = many()
    epochs = [held(client.shuffled(1)) for _ in range(6)]
    assert len({str(epoch) for epoch in epochs}) > 1
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    again = many()
    assert [held(again.shuffled(1)) for _ in range(6)] == epochs
    other = many(seed=1)
    assert held(other.batches(3)) != held(client.batches(3))
    assert held(client.batches(3)) == held(many().batches(3))


def test_a_client_without_training_graphs_has_no_batch_and_a_node_task_one():
    assert many(train=0).batches(4) == many(train=0).shuffled(4) == []
    client = Client("a", graph(), facts())
    assert client.batches(2) == client.shuffled(2) == [client.graph]
    client.graph = graph(9)
    assert client.batches(2) == [client.graph]
    replaced = many()
    replaced.batches(3)
    replaced.graph = items(4, 4)
    assert sorted(k for batch in held(replaced.batches(3)) for k in batch) == [0, 1, 2, 3]


# ---- history ----
def test_the_history_hash_depends_on_all_bytes_and_clients_both_ways():
    def after(value=2.0, clients=NAMES, number=1, spoil=None):
        server, engine, toy = make()
        server.round = number
        if spoil:
            server._call = lambda phase, sent: {
                k: {"x": spoil(v["x"])} for k, v in engine.call(phase, sent).items()
            }
        server.ask(toy.mirror, x=torch.tensor([1.0, value]), clients=clients)
        return server.history_hash

    others = [
        after(2.000001),
        after(clients=["a"]),
        after(clients=["b"]),
        after(number=2),
        after(spoil=lambda x: x.flip(0)),
    ]
    assert len({after(), *others}) == 6
    assert after() == after(spoil=torch.clone)


# ---- what survives ----
def learner(kind, momentum_steps):
    """A state with one of everything, after some steps."""
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.copy_(torch.arange(6.0).view(2, 3) / 10)
        model.bias.zero_()
    state = {
        "model": model,
        "optimizer": make_optimizer(kind, model.parameters(), 0.1, 0.01),
        "rng": torch.Generator().manual_seed(3),
        "deep": {"er": {"t": torch.arange(4.0), "n": torch.tensor(0)}},
        "empty": {},
    }
    train(state, momentum_steps)
    return state


def train(state, steps):
    for _ in range(steps):
        noise = torch.rand(5, 3, generator=state["rng"])
        step(state["optimizer"], state["model"](noise).square().sum())
        state["deep"]["er"]["n"] += 1


@pytest.mark.parametrize("kind", ["adam", "sgd"])
@pytest.mark.parametrize("steps", [0, 3])
def test_a_restored_state_continues_like_the_saved_one(kind, steps):
    original, again = learner(kind, steps), learner(kind, 0)
    saved = unflatten(flatten(snapshot(original)))  # as a checkpoint has it
    addresses = [p.data_ptr() for p in again["model"].parameters()]
    model, optimizer, generator = again["model"], again["optimizer"], again["rng"]
    restore(again, saved)
    assert (again["model"], again["optimizer"], again["rng"]) == (
        model,
        optimizer,
        generator,
    )  # the same objects
    assert [p.data_ptr() for p in again["model"].parameters()] == addresses
    assert again["optimizer"].param_groups[0]["lr"] == 0.1
    for state in (original, again):
        train(state, 4)
    assert flatten(snapshot(original)).keys() == flatten(snapshot(again)).keys()
    assert all(
        torch.equal(a, b)
        for a, b in zip(*(flatten(snapshot(s)).values() for s in (original, again)), strict=True)
    )
    assert again["deep"]["er"]["n"].item() == steps + 4


def test_a_snapshot_is_a_copy():
    state = learner("adam", 2)
    saved = snapshot(state)
    before = {name: t.clone() for name, t in flatten(saved).items()}
    train(state, 2)
    state["deep"]["er"]["t"].fill_(9)
    assert all(torch.equal(t, before[name]) for name, t in flatten(saved).items())


def test_tensors_appear_disappear_and_change_their_shape():
    live = {
        "gone": torch.ones(1),
        "same": torch.zeros(2),
        "wider": torch.zeros(2),
        "group": {"old": torch.ones(1)},
    }
    kept = live["same"]
    restore(
        live,
        {
            "same": torch.ones(2),
            "wider": torch.ones(3),
            "new": {"x": torch.ones(1)},
            "group": {"fresh": torch.ones(1)},
        },
    )
    assert set(live) == {"same", "wider", "new", "group"}
    assert live["same"] is kept
    assert kept.tolist() == [1, 1]
    assert live["wider"].tolist() == [1, 1, 1]
    assert list(live["group"]) == ["fresh"]


@pytest.mark.parametrize("thing", [3, "text", [torch.ones(1)], None])
def test_a_state_that_cannot_be_saved_is_refused_by_type(thing):
    with pytest.raises(
        TypeError, match=f"state holds a {type(thing).__name__}; valid: tensors, models"
    ):
        snapshot({"a": {"b": thing}})


def test_a_transposed_tensor_is_saved_as_any_other():
    assert snapshot({"t": torch.ones(2, 3).t()})["t"].is_contiguous()


class Told:
    """Keeps nothing."""

    def evaluated(self, *args):
        """Nothing."""


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"x": torch.tensor([1.0, float("nan")])}, "client 'b' in 'echo': tensor 'x' holds nan"),
        ({"x": torch.ones(3)}, r"client '.' in 'echo': tensor 'x' has shape \[3\], expected \[2\]"),
        ({"x": torch.ones(2).double()}, "tensor 'x' has dtype torch.float64, expected float32"),
        ({"y": torch.ones(2)}, "tensor 'x' is missing"),
    ],
)
def test_a_batch_of_replies_is_checked(wrong, says):
    @dataclass(frozen=True)
    class Echo(Method):
        """Answers what it got."""

        @phase(x="=x")
        def echo(self, client, x):
            """The same."""
            return {"x": x}

        def run(self, server):
            """Not used here."""

    facts = Facts(4, 2, "node", ("a", "b", "c"), ("gcn-2x4",) * 3)
    good = {"x": torch.ones(2)}
    all_wrong = "nan" not in says
    answers = {c: wrong if all_wrong or c == "b" else good for c in facts.clients}
    method = Echo()
    server = Server(
        method, facts, lambda phase, messages: batched(answers), RoundPolicy("local"), Told()
    )
    with pytest.raises(MessageError, match=says):
        server.ask(method.echo, x=torch.ones(2))


def test_fingerprints_depend_on_values_and_not_on_strides():
    for size in (3, 4000):
        tensor = torch.arange(float(size * 3)).view(size, 3)
        seen = {fingerprint(tensor)}
        for row, bit in ((0, 1e-3), (size - 1, -1.0)):
            other = tensor.clone()
            other[row, 1] += bit
            seen.add(fingerprint(other))
        for order in (
            torch.arange(size - 1, -1, -1),
            torch.randperm(size, generator=torch.Generator().manual_seed(0)),
        ):
            seen.add(fingerprint(tensor[order]))  # the same rows, of other clients
        assert len(seen) == 5
        assert fingerprint(tensor.t().contiguous().t()) == fingerprint(tensor)
        for start in (1, 2, 3):  # where a 64-bit word may not begin
            held = torch.cat([torch.zeros(start, dtype=tensor.dtype), tensor.flatten()])
            assert fingerprint(held[start:].view(tensor.shape)) == fingerprint(tensor)
    assert fingerprint(torch.zeros(0, 3)) == fingerprint(torch.zeros(0))
