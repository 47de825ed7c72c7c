"""A party executes the coordinator's orders, once each, as far as the agreement allows."""

import json
import socket
import threading
from dataclasses import replace

import pytest
import torch

import fedloom
from fedloom.core.facts import Facts
from fedloom.core.message import decode, encode, flatten
from fedloom.deploy.agreement import read_agreement
from fedloom.deploy.envelope import EnvelopeError, Gate, Header, parse, sign
from fedloom.deploy.framing import receive_frame, send_frame
from fedloom.deploy.keys import make_party, read_party_key
from fedloom.deploy.party import Party, facts_to_json, run_party_at_socket
from fedloom.errors import ConfigError, MessageError
from fedloom.experiments.trained import load_model
from fedloom.methods.fedavg import FedAvg
from fedloom.nn.weights import weights

AGREEMENT = """
[federation]
address = "127.0.0.1:8443"
coordinator = "coordinator.pub"
[parties]
bank-a = "bank-a.pub"
bank-b = "bank-b.pub"
[data]
num_features = 8
num_classes = {classes}
split = "own"
[model]
name = "gcn-2x8"
[method]
name = "fedavg"
"""
RUN = "ab" * 16


class Sender:
    """The coordinator's side, without a network: signs orders and opens answers."""

    def __init__(self, folder):
        names = ("coordinator", "bank-a", "bank-b")
        for name in names:
            make_party(folder, name)
        graph = fedloom.load("synthetic:nodes=60,features=8")
        self.graph = fedloom.divide(graph, 2, "random", 0).graphs[0]
        (folder / "federation.toml").write_text(AGREEMENT.format(classes=self.graph.num_classes))
        self.agreement = read_agreement(folder / "federation.toml")
        self.folder, self.keys = folder, {n: read_party_key(folder / f"{n}.key") for n in names}
        classes, models = self.graph.num_classes, ("gcn-2x8",) * 2
        self.facts = Facts(8, classes, "node", ("bank-a", "bank-b"), models)
        self.sequence, self.party = -1, self.new_party()
        self.gate = Gate(self.agreement.parties, RUN)

    def new_party(self, **settings):
        key, state = self.keys["bank-a"], self.folder / "state"
        return Party(self.agreement, "bank-a", key, self.graph, state, **settings)

    def order(
        self,
        phase,
        content,
        *,
        by="coordinator",
        to="bank-a",
        run=RUN,
        round=0,
        sequence=None,
        kind="order",
    ):
        if sequence is None:
            self.sequence += 1
            sequence = self.sequence
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        return sign(body, Header(run, round, sequence, to, phase, kind), self.keys[by])

    def send(self, phase, content, **options):
        opened = self.gate.open(
            self.party.answer(self.order(phase, content, **options)),
            sender="bank-a",
            round=options.get("round", 0),
            sequence=self.sequence,
            phase=phase,
        )
        tensors = phase in ("setup", "train", "evaluate") and opened.kind == "answer"
        if tensors:
            return opened.kind, opened.body
        content = json.loads(opened.body)
        assert content.pop("instance") == self.party.instance
        return opened.kind, content

    def begin_order(self, nonce, **changed):
        return {
            "nonce": nonce,
            "agreed": self.agreement.agreed(),
            "keys": self.agreement.read_keyring().to_json(),
            "facts": facts_to_json(self.facts),
            "lineage": "l",
            "rejoin": False,
            **changed,
        }

    def begin(self, **changed):
        _, hello = self.send("fedloom_hello", {})
        return self.send("fedloom_begin", self.begin_order(hello["nonce"], **changed))

    def begin_and_set_up(self, **changed):
        self.begin(**changed)
        self.send("setup", encode({}, "setup"))

    def model(self):
        return weights(self.facts.build("gcn-2x8", "server"))

    def train(self, round=1):
        kind, body = self.send("train", encode({"model": self.model()}, "train"), round=round)
        assert kind == "answer", body
        return decode(body, "train")

    def evaluate(self, round):
        kind, body = self.send("evaluate", encode({}, "evaluate"), round=round)
        assert kind == "answer", body


@pytest.fixture
def sender(tmp_path):
    return Sender(tmp_path)


def same(one, other):
    one, other = flatten(one), flatten(other)
    return one.keys() == other.keys() and all(torch.equal(t, other[n]) for n, t in one.items())


def test_a_party_begins_a_run_and_answers_phases(sender):
    assert sender.begin() == ("answer", {})
    kind, body = sender.send("setup", encode({}, "setup"))
    assert (kind, decode(body, "setup")) == ("answer", {})
    assert sender.train()["model"].keys() == sender.model().keys()


def test_a_partys_secret_numbers_do_not_come_from_the_runs_seed(sender):
    assert sender.begin() == ("answer", {})
    client = sender.party._client
    simulated = [torch.Generator().manual_seed(0) for _ in range(2)]
    one, other = (client.secret_normal((5, 3), 2.0, rng) for rng in simulated)
    assert not torch.equal(one, other)
    client.deployed = False  # as in a simulation, the numbers can be repeated
    one, other = (client.secret_normal((5, 3), 2.0, rng.manual_seed(0)) for rng in simulated)
    assert torch.equal(one, other)


def test_hello_contains_only_the_size_of_the_graph(sender):
    _, hello = sender.send("fedloom_hello", {})
    masks = {part: int(getattr(sender.graph, part).sum()) for part in ("train", "val", "test")}
    nodes = sender.graph.num_nodes
    assert hello["size"] == {"name": "bank-a", "nodes": nodes, "items": nodes, **masks}
    assert set(hello) == {"nonce", "agreed", "size", "knows_cross_edges"}


def test_a_repeated_order_gets_the_same_answer_and_is_executed_once(sender):
    sender.begin_and_set_up()
    order = sender.order("train", encode({"model": sender.model()}, "train"), round=1)
    first = sender.party.answer(order)
    model = sender.party._client.state["model"]
    after = {name: tensor.clone() for name, tensor in model.named_parameters()}
    assert sender.party.answer(order) == first
    assert all(torch.equal(t, after[name]) for name, t in model.named_parameters())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"by": "bank-b"}, "forged"),
        ({"to": "bank-b"}, "foreign"),
        ({"kind": "answer"}, "format"),
        ({"sequence": 0}, "replay"),
    ],
)
def test_orders_that_are_not_current_or_not_the_coordinators_are_refused(sender, options, reason):
    sender.begin_and_set_up()
    body = encode({"model": sender.model()}, "train")
    with pytest.raises(EnvelopeError) as refusal:
        sender.party.answer(sender.order("train", body, **options))
    assert refusal.value.reason == reason


def test_a_restarted_party_answers_that_it_has_lost_its_state(sender):
    sender.begin()
    sender.party = sender.new_party()
    kind, content = sender.send("train", encode({"model": sender.model()}, "train"), round=2)
    assert (kind, content["lost_state"]) == ("error", True)


def test_a_recorded_begin_begins_nothing(sender):
    _, hello = sender.send("fedloom_hello", {})
    order = sender.begin_order(hello["nonce"])
    assert sender.send("fedloom_begin", order)[0] == "answer"
    sender.send("fedloom_hello", {})
    kind, content = sender.send("fedloom_begin", order)
    assert kind == "error"
    assert "an old order" in content["cause"]


def begin_session(sender, run):
    """Begins a run of another session of the coordinator. Returns the orders that did it."""
    sender.sequence = -1
    hello = sender.order("fedloom_hello", {}, run=run)
    nonce = json.loads(bytes(parse(sender.party.answer(hello))[3]))["nonce"]
    begin = sender.order("fedloom_begin", sender.begin_order(nonce), run=run)
    setup = sender.order("setup", encode({}, "setup"), run=run)
    kinds = [parse(sender.party.answer(order))[0].kind for order in (begin, setup)]
    assert kinds == ["answer", "answer"]
    return [hello, begin, setup]


def train_order(sender, run, round):
    return sender.order("train", encode({"model": sender.model()}, "train"), run=run, round=round)


def test_recorded_orders_of_an_earlier_session_do_not_change_the_current_run(sender):
    reference = Sender.__new__(Sender)
    reference.__dict__ |= {**sender.__dict__, "party": sender.new_party()}
    earlier, now = "cd" * 16, "ef" * 16
    results = []
    for each in (sender, reference):
        recorded = begin_session(each, earlier)
        recorded.append(train_order(each, earlier, 1))
        each.party.answer(recorded[-1])
        recorded.append(each.order("fedloom_finish", {"status": "completed"}, run=earlier))
        begin_session(each, now)
        each.party.answer(train_order(each, now, 1))
        if each is sender:  # an attacker with the SuperLink's secret sends them again
            kinds = [parse(each.party.answer(order))[0].kind for order in recorded]
            # The party answers hello with a nonce that no recorded order contains.
            assert kinds == ["answer", "error", "error", "error", "error"]
            assert not each.party.status
        answer = parse(each.party.answer(train_order(each, now, 2)))
        results.append(decode(bytes(answer[3]), "train"))
    assert same(*results)


def test_a_session_with_the_right_nonce_replaces_the_current_run(sender):
    """The control: if recorded orders began a run, the current one would be lost."""
    begin_session(sender, "cd" * 16)
    begin_session(sender, "ef" * 16)
    header, _, _, body = parse(sender.party.answer(train_order(sender, "cd" * 16, 1)))
    assert header.kind == "error"
    assert json.loads(bytes(body))["lost_state"]


@pytest.mark.parametrize(
    ("table", "changed", "words"),
    [
        ("method", {"lr": 0.5}, "method.lr is 0.01 at the party and 0.5 at the coordinator"),
        (
            "method",
            {"name": "fedprox"},
            'method.name is "fedavg" at the party and "fedprox" at the coordinator',
        ),
        ("method", {"code": "00"}, "method.code is"),
        (
            "wire",
            {"messages": "fedloom/99"},
            'wire.messages is "fedloom/1" at the party and "fedloom/99" at the coordinator',
        ),
        (
            "data",
            {"num_features": 500},
            "data.num_features is 8 at the party and 500 at the coordinator",
        ),
        (
            "run",
            {"secure": True},
            "run.secure is false at the party and true at the coordinator",
        ),
    ],
)
def test_a_party_refuses_a_run_that_it_has_not_agreed_to(sender, table, changed, words):
    agreed = sender.agreement.agreed()
    agreed[table].update(changed)
    kind, content = sender.begin(agreed=agreed)
    assert kind == "error"
    assert words in content["cause"]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"num_features": 9}, "num_features is 8 at the party and 9 at the coordinator"),
        ({"upload": "int8"}, 'upload is "" at the party and "int8" at the coordinator'),
        ({"more": 1}, "more is null at the party and 1 at the coordinator"),
    ],
)
def test_a_party_refuses_facts_that_it_has_not_agreed_to(sender, changed, words):
    kind, content = sender.begin(facts={**facts_to_json(sender.facts), **changed})
    assert kind == "error"
    assert f"the coordinator's facts are not as agreed: {words}" in content["cause"]


@pytest.mark.parametrize("tell", [False, True])
def test_errors_contain_values_of_the_graph_only_with_tell_errors(sender, monkeypatch, tell):
    value = repr(sender.graph.x[3].tolist())

    def failing(self, client, model):
        raise KeyError(repr(client.graph.x[3].tolist()))

    monkeypatch.setattr(FedAvg, "train", replace(FedAvg.train, function=failing))
    sender.party = sender.new_party(tell_errors=tell)
    sender.begin_and_set_up()
    kind, content = sender.send("train", encode({"model": sender.model()}, "train"), round=1)
    assert kind == "error"
    assert content["cause"].startswith("KeyError: ")
    assert (value in content["cause"]) == tell
    assert sender.party.errors.exists() != tell
    if not tell:
        assert value in sender.party.errors.read_text()
        assert sender.party.errors.stat().st_mode & 0o077 == 0


def test_an_error_that_cannot_be_logged_is_reported_all_the_same(sender):
    sender.begin()
    (sender.folder / "state").write_text("a file where the folder should be")
    kind, content = sender.send("train", encode({"model": sender.model()}, "train"), round=1)
    cause = "KeyError: the message stays with the party, which could not save it (File exists)"
    assert (kind, content["cause"]) == ("error", cause)


@pytest.mark.parametrize("name", ["run", "settings", "check", "predict", "advertise_keys"])
def test_only_phases_of_the_method_are_executed(sender, name):
    sender.begin()
    kind, content = sender.send(name, encode({}, name))
    assert kind == "error"
    assert f"'{name}' is not a phase of method 'fedavg'" in content["cause"]


@pytest.mark.parametrize("word", ["../out", "a/b", "", "x" * 65, ["a"], "ü"])
def test_names_of_files_in_orders_are_letters_and_digits(sender, word):
    kind, content = sender.begin(lineage=word)
    assert kind == "error"
    assert "lineage is not 1 to 64 letters and digits" in content["cause"]
    sender.begin()
    kind, content = sender.send("fedloom_keep", {"mark": word})
    assert kind == "error"
    assert "mark is not" in content["cause"]
    files = [path for path in sender.folder.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} <= {".toml", ".key", ".pub"}
    assert not (sender.folder.parent / "out").exists()


def test_damaged_content_is_an_error_that_names_it(sender):
    sender.begin_and_set_up()
    kind, content = sender.send("train", b"\x00" * 40, round=1)
    assert kind == "error"
    assert "MessageError" in content["cause"]
    wrong = encode({"weights": torch.zeros(1)}, "train")
    assert "'model' is missing" in sender.send("train", wrong, round=1)[1]["cause"]


def test_a_party_saves_and_restores_its_state_in_its_own_folder(sender):
    sender.begin_and_set_up()
    sender.train()
    assert sender.send("fedloom_keep", {"mark": "aa"}) == ("answer", {})
    first = sender.train(2)
    assert sender.send("fedloom_restore", {"mark": "aa"}) == ("answer", {})
    assert same(sender.train(2), first)
    for mark in ("bb", "cc", "dd", "ee"):
        sender.send("fedloom_keep", {"mark": mark})
    kind, content = sender.send("fedloom_restore", {"mark": "aa"})  # the oldest are removed
    assert kind == "error"
    assert "has no saved state aa" in content["cause"]


def test_a_restarted_party_continues_from_its_last_state(sender):
    sender.begin_and_set_up()
    sender.train()
    sender.send("fedloom_keep", {"mark": "aa"})
    expected = sender.train(2)
    sender.party = sender.new_party()
    sender.begin_and_set_up(rejoin=True)  # the exchanges before the rounds are repeated
    assert same(sender.train(2), expected)


def test_a_damaged_state_is_detected(sender):
    sender.begin_and_set_up()
    sender.send("fedloom_keep", {"mark": "aa"})
    (path,) = (sender.folder / "state" / "states" / "l").glob("*.safetensors")
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    kind, answer = sender.send("fedloom_restore", {"mark": "aa"})
    assert kind == "error"
    assert "damaged" in answer["cause"]


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_at_the_end_the_best_and_the_last_model_are_in_the_partys_own_folder(
    sender, restarts, shared
):
    sender.begin_and_set_up()
    trained = sender.train()["model"]
    given = sender.model() if shared else trained
    sender.send("evaluate", encode({"model": given} if shared else {}, "evaluate"), round=1)
    assert sender.send("fedloom_best", {"stage": "train"}) == ("answer", {})
    if restarts:
        sender.send("fedloom_keep", {"mark": "aa"})
        sender.party = sender.new_party()
        sender.begin_and_set_up()
        sender.send("fedloom_restore", {"mark": "aa"})
    sender.train(round=2)
    last = weights(sender.party._client.state["model"])
    order = {"status": "completed", "stage": "train", "round": 1}
    assert sender.send("fedloom_finish", order) == ("answer", {})
    assert sender.party.status == "completed"
    best, final = load_model(sender.party.model), load_model(sender.party.final_model)
    assert (best.card.which, best.card.round, best.card.owner) == ("best", 1, "bank-a")
    assert same(best.tensors, given)
    assert shared or same(final.tensors, last)
    assert not same(best.tensors, last)
    assert len(best.predict(sender.graph)) == sender.graph.num_nodes


def test_a_best_model_without_a_stage_is_refused(sender):
    sender.begin_and_set_up()
    for stage in (None, "", "a/b"):
        kind, content = sender.send("fedloom_best", {"stage": stage})
        assert kind == "error"
        assert "stage" in content["cause"]


def test_the_scores_of_the_best_model_are_the_partys_result(sender):
    sender.begin_and_set_up()
    sender.train(1)
    sender.evaluate(1)
    assert sender.send("fedloom_best", {"stage": "train"}) == ("answer", {})
    sender.train(2)
    sender.evaluate(2)
    order = {"status": "completed", "stage": "train", "round": 1}
    assert sender.send("fedloom_finish", order) == ("answer", {})
    party = sender.party
    assert party.status == "completed"
    party.conclude()
    scores = json.loads((party.folder / "scores.json").read_text())
    assert [row["round"] for row in scores["history"]] == [1, 2]
    assert scores["federated"]["round"] == 1


def test_a_key_of_another_party_is_refused(sender):
    key = sender.keys["bank-b"]
    with pytest.raises(ConfigError, match="does not match the key of party 'bank-a'"):
        Party(sender.agreement, "bank-a", key, sender.graph, sender.folder)
    with pytest.raises(ConfigError, match="bank-c"):
        Party(sender.agreement, "bank-c", key, sender.graph, sender.folder)


# ---- at a socket ----
def test_frames_of_any_length_arrive_and_broken_connections_raise():
    one, other = socket.socketpair()
    with one, other:
        for data in (b"", b"x", bytes(3 * 2**20)):
            writer = threading.Thread(target=send_frame, args=(one, data))
            writer.start()
            assert receive_frame(other) == data
            writer.join()
        one.sendall((2**40).to_bytes(8, "big"))
        with pytest.raises(MessageError, match="more than the limit"):
            receive_frame(other)
        one.sendall((100).to_bytes(8, "big") + b"half")
        one.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionError):
            receive_frame(other)


def test_a_party_at_a_socket_answers_orders_and_refuses_others(sender, tmp_path):
    path, lines = tmp_path / "party.sock", []
    listening = threading.Event()

    def log(line):
        lines.append(line)
        listening.set()

    thread = threading.Thread(target=run_party_at_socket, args=(sender.party, path, log))
    thread.start()
    assert listening.wait(60)

    def exchange(data):
        with socket.socket(socket.AF_UNIX) as wire:
            wire.connect(str(path))
            send_frame(wire, data)
            return receive_frame(wire)

    assert path.stat().st_mode & 0o077 == 0
    with pytest.raises(ConnectionError):
        exchange(b"nonsense")
    assert parse(exchange(sender.order("fedloom_hello", {})))[0].kind == "answer"
    hello = sender.order("fedloom_hello", {}, run="cd" * 16)
    nonce = json.loads(bytes(parse(exchange(hello))[3]))["nonce"]
    exchange(sender.order("fedloom_begin", sender.begin_order(nonce), run="cd" * 16))
    exchange(sender.order("fedloom_finish", {"status": "completed"}, run="cd" * 16))
    thread.join()
    assert sender.party.status == "completed"
    assert not path.exists()
    assert any(line.startswith("refused: ") for line in lines)


def test_a_socket_that_cannot_be_created_is_named(sender, tmp_path):
    with pytest.raises(ConfigError, match=r"socket: cannot listen at '.*nowhere/x\.sock'"):
        run_party_at_socket(sender.party, tmp_path / "nowhere" / "x.sock", print)
