"""A party answers the coordinator's orders, once each, as far as the agreement allows, and nobody else's."""

import json

import pytest
import torch

import fedloom
from fedloom.core.facts import Facts
from fedloom.core.message import decode, encode, flatten
from fedloom.deploy.agreement import read_agreement
from fedloom.deploy.envelope import EnvelopeError, Gate, Header, parse, sign
from fedloom.deploy.keys import make_party, read_party_key
from fedloom.deploy.party import Party, facts_to
from fedloom.errors import ConfigError
from fedloom.methods.fedavg import FedAvg

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


class Desk:
    """The coordinator's side, without a link."""

    def __init__(self, folder):
        for name in ("coordinator", "bank-a", "bank-b"):
            make_party(folder, name)
        graph = fedloom.divide(
            fedloom.load("synthetic:nodes=60,features=8"), 2, "random", 0
        ).graphs[0]
        (folder / "federation.toml").write_text(AGREEMENT.format(classes=graph.num_classes))
        self.agreement = read_agreement(folder / "federation.toml")
        self.folder, self.graph, self.keys = (
            folder,
            graph,
            {n: read_party_key(folder / f"{n}.key") for n in ("coordinator", "bank-a", "bank-b")},
        )
        self.facts = Facts(8, graph.num_classes, "node", ("bank-a", "bank-b"), ("gcn-2x8",) * 2)
        self.sequence, self.party = -1, self.start()
        self.gate = Gate(self.agreement.parties, RUN)

    def start(self):
        return Party(
            self.agreement, "bank-a", self.keys["bank-a"], self.graph, self.folder / "state"
        )

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
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        return sign(
            body,
            Header(run, round, self.sequence if sequence is None else sequence, to, phase, kind),
            self.keys[by],
        )

    def tell(self, phase, content, **how):
        opened = self.gate.open(
            self.party.answer(self.order(phase, content, **how)),
            sender="bank-a",
            round=how.get("round", 0),
            sequence=self.sequence,
            phase=phase,
        )
        return opened.kind, opened.body if phase in (
            "setup",
            "train",
        ) and opened.kind == "answer" else json.loads(opened.body)

    def begin(self, **changed):
        _, hello = self.tell("fedloom_hello", {})
        told = {
            "nonce": hello["nonce"],
            "agreed": self.agreement.agreed(),
            "facts": facts_to(self.facts),
            "lineage": "l",
            "rejoin": False,
        }
        return self.tell("fedloom_begin", {**told, **changed})


@pytest.fixture
def desk(tmp_path):
    return Desk(tmp_path)


def model(desk):
    from fedloom.nn.weights import weights

    return weights(desk.facts.build("gcn-2x8", "server"))


def trained(desk, round=1):
    kind, body = desk.tell("train", encode({"model": model(desk)}, "train"), round=round)
    assert kind == "answer", body
    return decode(body, "train")


def test_a_run_begins_and_phases_are_answered(desk):
    assert desk.begin() == ("answer", {})
    kind, body = desk.tell("setup", encode({}, "setup"))
    assert (kind, decode(body, "setup")) == ("answer", {})
    assert trained(desk)["model"].keys() == model(desk).keys()


def test_what_it_tells_of_itself_is_how_much_it_holds_and_nothing_of_what(desk):
    _, hello = desk.tell("fedloom_hello", {})
    assert hello["holding"] == {"name": "bank-a", "nodes": desk.graph.num_nodes, "items": desk.graph.num_nodes, **{
        part: int(getattr(desk.graph, part).sum()) for part in ("train", "val", "test")}}  # fmt: skip
    assert set(hello) == {"nonce", "agreed", "holding", "knows_cross_edges"}


def test_the_same_order_again_gets_the_same_answer_and_nothing_is_done_twice(desk):
    desk.begin()
    desk.tell("setup", encode({}, "setup"))
    order = desk.order("train", encode({"model": model(desk)}, "train"), round=1)
    first = desk.party.answer(order)
    after = {name: t.clone() for name, t in desk.party._client.state["model"].named_parameters()}
    assert desk.party.answer(order) == first
    assert all(
        torch.equal(t, after[name])
        for name, t in desk.party._client.state["model"].named_parameters()
    )


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"by": "bank-b"}, "forged"),
        ({"to": "bank-b"}, "foreign"),
        ({"kind": "answer"}, "format"),
        ({"sequence": 0}, "replay"),
    ],
)
def test_orders_that_are_not_the_coordinators_to_this_party_now_are_refused(desk, how, reason):
    desk.begin()
    desk.tell("setup", encode({}, "setup"))
    with pytest.raises(EnvelopeError) as refusal:
        desk.party.answer(desk.order("train", encode({"model": model(desk)}, "train"), **how))
    assert refusal.value.reason == reason


def test_an_order_of_a_run_it_knows_nothing_of_is_answered_with_that(desk):
    desk.begin()
    desk.party = desk.start()  # the process has been started anew
    kind, told = desk.tell("train", encode({"model": model(desk)}, "train"), round=2)
    assert (kind, told["forgot"]) == ("error", True)


def test_a_recorded_beginning_begins_nothing(desk):
    _, hello = desk.tell("fedloom_hello", {})
    order = {
        "agreed": desk.agreement.agreed(),
        "facts": facts_to(desk.facts),
        "lineage": "l",
        "rejoin": False,
        "nonce": hello["nonce"],
    }
    assert desk.tell("fedloom_begin", order)[0] == "answer"
    desk.tell("fedloom_hello", {})
    kind, told = desk.tell("fedloom_begin", order)
    assert kind == "error"
    assert "not of now" in told["cause"]


def begun(desk, run):
    """Begins a run of another life of the coordinator; gives all the orders that did."""
    desk.sequence, orders = -1, []
    orders.append(desk.order("fedloom_hello", {}, run=run))
    nonce = json.loads(parse(desk.party.answer(orders[-1]))[3].tobytes())["nonce"]
    told = {
        "nonce": nonce,
        "agreed": desk.agreement.agreed(),
        "facts": facts_to(desk.facts),
        "lineage": "l",
        "rejoin": False,
    }
    orders.append(desk.order("fedloom_begin", told, run=run))
    orders.append(desk.order("setup", encode({}, "setup"), run=run))
    assert [parse(desk.party.answer(order))[0].kind for order in orders[1:]] == ["answer", "answer"]
    return orders


def one_round(desk, run, number):
    order = desk.order("train", encode({"model": model(desk)}, "train"), run=run, round=number)
    return order, parse(desk.party.answer(order))


def test_recorded_orders_of_an_earlier_life_change_nothing_in_the_run_under_way(desk):
    reference = Desk.__new__(Desk)
    reference.__dict__ |= {**desk.__dict__, "party": desk.start()}
    earlier, now = "cd" * 16, "ef" * 16
    for each in (desk, reference):
        recorded = begun(each, earlier)
        recorded.append(one_round(each, earlier, 1)[0])
        recorded.append(each.order("fedloom_finish", {"status": "completed"}, run=earlier))
        begun(each, now)
        one_round(each, now, 1)
        if each is desk:  # whoever has the link's secret hands them to the party once more
            kinds = [parse(each.party.answer(order))[0].kind for order in recorded]
            assert kinds == [
                "answer",
                "error",
                "error",
                "error",
                "error",
            ]  # it says hello back, with a number that no old order shows
            assert not each.party.over
    ours, undisturbed = (
        flatten(decode(bytes(one_round(each, now, 2)[1][3]), "train")) for each in (desk, reference)
    )
    assert all(torch.equal(tensor, undisturbed[name]) for name, tensor in ours.items())


def test_a_life_that_shows_the_number_takes_over(desk):
    """The control: had the recorded orders begun a run, the one under way would be gone."""
    begun(desk, "cd" * 16)
    begun(desk, "ef" * 16)
    _, (header, _, _, body) = one_round(desk, "cd" * 16, 1)
    assert header.kind == "error"
    assert json.loads(bytes(body))["forgot"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda a: a["method"].update(lr=0.5),
            "method.lr is 0.01 at the party and 0.5 at the coordinator",
        ),
        (
            lambda a: a["method"].update(name="fedprox"),
            'method.name is "fedavg" at the party and "fedprox" at the coordinator',
        ),
        (lambda a: a["method"].update(code="00"), "method.code is"),
        (
            lambda a: a["wire"].update(messages="fedloom/99"),
            'wire.messages is "fedloom/1" at the party and "fedloom/99" at the coordinator',
        ),
        (
            lambda a: a["data"].update(num_features=500),
            "data.num_features is 8 at the party and 500 at the coordinator",
        ),
        (
            lambda a: a["run"].update(secure=True),
            "run.secure is false at the party and true at the coordinator",
        ),
    ],
)
def test_it_begins_nothing_that_it_has_not_agreed_to(desk, change, words):
    agreed = desk.agreement.agreed()
    change(agreed)
    kind, told = desk.begin(agreed=agreed)
    assert kind == "error"
    assert words in told["cause"]


@pytest.mark.parametrize("tell", [False, True])
def test_what_a_party_holds_is_not_in_the_errors_that_it_tells_unless_it_wants_to(
    desk, monkeypatch, tell
):
    value = repr(desk.graph.x[3].tolist())

    def failing(self, client, model):
        raise KeyError(repr(client.graph.x[3].tolist()))

    failing.__dict__ |= FedAvg.train.__dict__
    monkeypatch.setattr(FedAvg, "train", failing)
    desk.party = Party(
        desk.agreement,
        "bank-a",
        desk.keys["bank-a"],
        desk.graph,
        desk.folder / "state",
        tell_errors=tell,
    )
    desk.begin()
    desk.tell("setup", encode({}, "setup"))
    kind, told = desk.tell("train", encode({"model": model(desk)}, "train"), round=1)
    assert kind == "error"
    assert told["cause"].startswith("KeyError: ")
    assert (
        value in told["cause"]
    ) == tell  # with --tell-errors it is: the planted value would be found
    assert desk.party.errors.exists() != tell
    if not tell:
        assert value in desk.party.errors.read_text()
        assert desk.party.errors.stat().st_mode & 0o077 == 0


def test_an_error_that_cannot_be_written_down_is_told_all_the_same(desk):
    desk.begin()
    (desk.folder / "state").write_text("a file where the folder should be")
    kind, told = desk.tell("train", encode({"model": model(desk)}, "train"), round=1)
    assert (kind, told["cause"]) == (
        "error",
        "KeyError: its words stay with the party, which could not keep them (File exists)",
    )


@pytest.mark.parametrize("name", ["run", "settings", "check", "predict", "advertise_keys"])
def test_only_the_methods_phases_are_run(desk, name):
    desk.begin()
    kind, told = desk.tell(name, encode({}, name))
    assert kind == "error"
    assert f"'{name}' is not a phase of method 'fedavg'" in told["cause"]


@pytest.mark.parametrize("word", ["../out", "a/b", "", "x" * 65, ["a"], "ü"])
def test_what_becomes_a_name_of_a_file_is_letters_and_digits(desk, word):
    kind, told = desk.begin(lineage=word)
    assert kind == "error"
    assert "lineage is not 1 to 64 letters and digits" in told["cause"]
    desk.begin()
    kind, told = desk.tell("fedloom_keep", {"mark": word})
    assert kind == "error"
    assert "mark is not" in told["cause"]
    written = [
        path
        for path in desk.folder.rglob("*")
        if path.is_file() and path.suffix not in (".toml", ".key", ".pub")
    ]
    assert not written
    assert not (desk.folder.parent / "out").exists()


def test_damaged_content_is_an_error_that_names_it(desk):
    desk.begin()
    desk.tell("setup", encode({}, "setup"))
    kind, told = desk.tell("train", b"\x00" * 40, round=1)
    assert kind == "error"
    assert "MessageError" in told["cause"]
    kind, told = desk.tell("train", encode({"weights": torch.zeros(1)}, "train"), round=1)
    assert "'model' is missing" in told["cause"]


def test_states_are_kept_at_home_and_gone_back_to(desk):
    desk.begin()
    desk.tell("setup", encode({}, "setup"))
    trained(desk)
    assert desk.tell("fedloom_keep", {"mark": "aa"}) == ("answer", {})
    first = trained(desk, 2)
    assert desk.tell("fedloom_restore", {"mark": "aa"}) == ("answer", {})
    again = trained(desk, 2)
    assert all(torch.equal(t, flatten(again)[name]) for name, t in flatten(first).items())
    for mark in ("bb", "cc", "dd", "ee"):
        desk.tell("fedloom_keep", {"mark": mark})
    kind, told = desk.tell("fedloom_restore", {"mark": "aa"})  # the oldest have gone
    assert kind == "error"
    assert "has kept no state aa" in told["cause"]


def test_started_anew_it_goes_on_from_its_last_state(desk):
    desk.begin()
    desk.tell("setup", encode({}, "setup"))
    trained(desk)
    desk.tell("fedloom_keep", {"mark": "aa"})
    expected = trained(desk, 2)
    desk.party = desk.start()
    desk.begin(rejoin=True)
    desk.tell("setup", encode({}, "setup"))  # what came before the rounds is handed in again
    again = trained(desk, 2)
    assert all(torch.equal(t, flatten(again)[name]) for name, t in flatten(expected).items())


def test_a_damaged_state_is_told_from_a_whole_one(desk):
    desk.begin()
    desk.tell("setup", encode({}, "setup"))
    desk.tell("fedloom_keep", {"mark": "aa"})
    (path,) = (desk.folder / "state" / "states" / "l").glob("*.safetensors")
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    kind, told = desk.tell("fedloom_restore", {"mark": "aa"})
    assert kind == "error"
    assert "damaged" in told["cause"]


def test_in_the_end_its_model_is_in_its_own_folder(desk):
    desk.begin()
    desk.tell("setup", encode({}, "setup"))
    trained(desk)
    assert desk.tell("fedloom_finish", {"status": "completed"}) == ("answer", {})
    assert desk.party.over == "completed"
    assert desk.party.model.exists()


def test_another_partys_key_is_refused(desk):
    with pytest.raises(ConfigError, match="it is not that of party 'bank-a'"):
        Party(desk.agreement, "bank-a", desk.keys["bank-b"], desk.graph, desk.folder)
    with pytest.raises(ConfigError, match="bank-c"):
        Party(desk.agreement, "bank-c", desk.keys["bank-b"], desk.graph, desk.folder)
