"""The coordinator with parties in the same process: joining, exchanges, absences."""

import pytest
from deployment import InProcessTransport, same_weights
from in_process import InProcess, absences
from safetensors.torch import load_file

from fedloom.core.message import Absent, encode
from fedloom.data.files import to_folder
from fedloom.data.synthetic import synthetic
from fedloom.deploy import coordinator
from fedloom.deploy.agreement import read_agreement
from fedloom.deploy.coordinator_transport import SuperLinkError
from fedloom.deploy.party import Party
from fedloom.errors import ConfigError, DataError
from fedloom.experiments.run_folder import read_config


@pytest.fixture
def deployed(tmp_path):
    return InProcess(tmp_path)


# ---- a run ----
def test_a_run_is_bit_identical_to_the_loop_and_models_stay_with_their_parties(deployed):
    result, reference = deployed.serve(), deployed.deployment.reference()
    assert result.summary["history_hash"] == reference.summary["history_hash"]
    assert result.accuracy == reference.accuracy
    assert result.traffic == reference.traffic
    assert result.summary["engine_details"]["refused"] == {}
    for name, party in deployed.transport.parties.items():
        assert same_weights(load_file(party.model), reference.models[name])
    saved = {path.name for path in (deployed.folder / "run" / "models").glob("*/*")}
    assert saved == {"server.safetensors"}  # the coordinator has only the global model


def test_filters_of_the_agreement_are_applied(tmp_path):
    filters = {"upload": "int8", "download": "float16"}
    deployed = InProcess(tmp_path, rounds=2, run={"checkpoint_every": 0, **filters})
    reference = deployed.deployment.reference(**filters)
    result = deployed.serve()
    assert result.summary["history_hash"] == reference.summary["history_hash"]
    assert result.traffic == reference.traffic


def test_a_superlink_that_dies_is_replaced_and_the_run_continues_bit_identically(deployed):
    opened, rounds = [], []

    class DyingTransport(InProcessTransport):
        def send(self, envelopes, limit=0):
            if len(rounds) == 2 and len(opened) == 1:
                raise SuperLinkError("the SuperLink has ended (exit code -9)")
            return super().send(envelopes)

    def open_transport():
        opened.append(DyingTransport(deployed.transport.parties))
        return opened[-1]

    result = deployed.serve(
        open_transport=open_transport, callbacks=lambda entry: rounds.append(entry)
    )
    assert len(opened) == 2
    reference = deployed.deployment.reference()
    assert result.summary["history_hash"] == reference.summary["history_hash"]


def test_a_stopped_run_is_resumed_bit_identically_with_the_states_of_the_parties(deployed):
    class StoppedError(Exception):
        """Ends a run."""

    def stop(entry):
        if entry["round"] == 2:
            raise StoppedError

    with pytest.raises(StoppedError):
        deployed.serve(callbacks=stop)
    result = deployed.serve(resumed=read_config(deployed.folder / "run"))
    reference = deployed.deployment.reference()
    assert result.summary["history_hash"] == reference.summary["history_hash"]


# ---- joining ----
def test_too_few_parties_are_an_error_that_names_the_missing_ones(deployed):
    for name in ("bank-b", "bank-c"):
        del deployed.transport.parties[name]
    words = "1 of 3 parties joined within 0 s, 2 are needed; missing: bank-b, bank-c"
    with pytest.raises(ConfigError, match=words):
        deployed.coordinator().wait_for_parties(0.0, 2, lambda line: None)


def test_after_the_wait_a_quorum_is_enough(deployed):
    party = deployed.transport.parties.pop("bank-c")
    lines, joined = [], []
    made = deployed.coordinator()
    roster = made.wait_for_parties(0.0, 2, lines.append)
    assert [size.items > 0 for size in roster.sizes] == [True, True, False]
    assert [line.partition(":")[0] for line in lines] == ["bank-a has joined", "bank-b has joined"]
    made.on_join = lambda size: joined.append(size.name)
    deployed.transport.parties["bank-c"] = party
    made.wait_for_parties(0.0, 3, lines.append)
    assert joined == ["bank-c"]


@pytest.mark.parametrize(("changed", "other", "own"), [("rounds", 9, 4), ("lr", 0.5, 0.01)])
def test_a_party_with_another_agreement_is_refused_with_both_sides_named(
    deployed, changed, other, own
):
    deployed.deployment.write("other.toml", **{changed: other})
    deployed.transport.parties["bank-b"] = deployed.party("bank-b", "other.toml")
    words = f"'bank-b' .*method.{changed} is {other} at the party and {own} at the coordinator"
    with pytest.raises(ConfigError, match=words):
        deployed.serve()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"features": 5}, "num_features of '.*graph' is 5, the agreement says 8"),
        ({"features": 8, "classes": 9}, "'.*graph' has a class 8, the agreement says num_classes"),
    ],
)
def test_a_graph_that_does_not_match_the_agreement_is_refused(deployed, tmp_path, options, words):
    to_folder(synthetic(nodes=90, **options), tmp_path / "graph")
    with pytest.raises(DataError, match=words):
        deployed.agreement.graph(tmp_path / "graph", "bank-a")


# ---- exchanges ----
@pytest.mark.parametrize(
    ("silence", "closed", "policy", "given_up"),
    [
        # A party that has closed its connections is given up soon, unless there is a deadline.
        (8, True, {}, True),
        (6, True, {}, False),
        (30, True, {"deadline": 90.0}, False),
        (61, True, {"deadline": 90.0}, True),
        # A silent party may be cut off. It has 60 s.
        (8, False, {}, False),
        (59, False, {}, False),
        (61, False, {}, True),
        (59, False, {"deadline": 90.0}, False),
    ],
)
def test_a_party_that_is_given_up_gets_no_order_and_the_others_answer(
    deployed, silence, closed, policy, given_up
):
    made, transport = deployed.begun(**policy), deployed.transport
    transport.silence["bank-b"] = silence
    transport.closed |= {"bank-b"} if closed else set()
    sent = transport.sent["bank-b"]
    expected = {"bank-b": f"no sign of life for {silence} s"} if given_up else {}
    assert absences(deployed.train(made)) == expected
    assert transport.sent["bank-b"] == sent + (not given_up)


@pytest.mark.parametrize(("closed", "setting"), [(True, "closed"), (False, "silence")])
def test_the_agreement_says_how_long_a_party_may_be_silent(deployed, closed, setting):
    path = deployed.folder / "federation.toml"
    path.write_text(path.read_text().replace("[federation]", f"[federation]\n{setting} = 20"))
    deployed.agreement = read_agreement(path)
    made, transport = deployed.begun(), deployed.transport
    transport.closed |= {"bank-b"} if closed else set()
    transport.silence["bank-b"] = 19
    assert absences(deployed.train(made)) == {}
    transport.silence["bank-b"] = 21
    assert absences(deployed.train(made, 2)) == {"bank-b": "no sign of life for 21 s"}
    path.write_text(path.read_text().replace(f"{setting} = 20", f"{setting} = -1"))
    with pytest.raises(ConfigError, match=rf"federation.{setting} is -1.*at least"):
        read_agreement(path)


def test_a_party_that_dies_while_it_computes_is_absent(deployed, monkeypatch):
    monkeypatch.setattr(coordinator, "POLL_SECONDS", 0.0)
    made = deployed.begun(quorum=0.5)
    deployed.transport.held.add("bank-b")
    alive, looks = deployed.transport.status, []

    def status():
        looks.append(alive())
        if len(looks) > 3:
            deployed.transport.silence["bank-b"] = 61
        return looks[-1]

    monkeypatch.setattr(deployed.transport, "status", status)
    assert absences(deployed.train(made)) == {"bank-b": "no sign of life for 61 s"}


def test_an_exchange_closes_after_the_grace_and_a_late_answer_is_discarded(deployed):
    made = deployed.begun(grace=0.1)
    deployed.transport.held.add("bank-b")
    assert absences(deployed.train(made)).keys() == {"bank-b"}
    busy = absences(deployed.train(made, 2))
    assert busy == {"bank-b": "still busy with 'train' of round 1"}
    deployed.transport.held.clear()
    assert absences(deployed.train(made, 3)) == {}
    assert made.refused == {"late": 1}


def test_an_order_that_flower_returns_is_sent_again(deployed, monkeypatch):
    monkeypatch.setattr(coordinator, "POLL_SECONDS", 0.0)
    made = deployed.begun()
    deployed.transport.returns["bank-b"] = coordinator.MAX_RETURNS
    assert absences(deployed.train(made)) == {}
    deployed.transport.returns["bank-b"] = coordinator.MAX_RETURNS + 1
    assert absences(deployed.train(made, 2)) == {"bank-b": "Flower: the node is not available"}


def test_a_party_that_reconnects_gets_its_order_again(deployed, monkeypatch):
    monkeypatch.setattr(coordinator, "POLL_SECONDS", 0.0)
    made = deployed.begun()
    transport = deployed.transport
    send, before = transport.send, transport.sent["bank-a"]

    def lose_first(envelopes, limit=0):
        pending = send(envelopes)
        transport._answers.clear()  # the connections break, and all answers are lost
        transport.connections = dict.fromkeys(transport.parties, 2)
        transport.send = send
        return pending

    transport.send = lose_first
    assert absences(deployed.train(made)) == {}
    assert set(transport.sent.values()) == {before + 2}


def test_a_restarted_party_is_readmitted_and_has_lost_its_state(deployed):
    made = deployed.begun()
    deployed.transport.parties["bank-b"] = deployed.party("bank-b")
    answer = deployed.train(made)["bank-b"]
    assert answer == Absent("was restarted", lost_state=True)
    bodies = {"bank-b": encode({}, "setup")}
    assert absences(made.ask("setup", bodies, 0)) == {}
    assert absences(deployed.train(made, 2)) == {}


def test_a_restarted_party_that_claims_another_size_is_refused(deployed, monkeypatch):
    made, told = deployed.begun(), []
    before, made.on_join = dict(made.sizes), told.append
    deployed.transport.parties["bank-b"] = deployed.party("bank-b")
    hello = Party._hello

    def greedy(self, order, session):
        answer = hello(self, order, session)
        return {**answer, "size": {**answer["size"], "items": 2**53}}

    monkeypatch.setattr(Party, "_hello", greedy)
    items = before["bank-b"].items
    said = f"items 9007199254740992, at the start of the run it said {items}"
    assert absences(deployed.train(made))["bank-b"] == f"refused: it claims another size: {said}"
    assert made.sizes == before
    assert told == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[]", "not a JSON object"),
        (b"nonsense", "not JSON"),
        (b"{}", "gives no valid answer to hello"),
        (b'{"agreed": {}, "nonce": "x", "size": {"nodes": -1}}', "gives no valid size"),
    ],
)
def test_a_party_that_does_not_answer_hello_properly_is_not_admitted(
    deployed, monkeypatch, content, words
):
    made = deployed.coordinator()
    monkeypatch.setattr(Party, "_execute", lambda *given: ("answer", content))
    nonces, absent = made._hello(["bank-a"])
    assert nonces == {}
    assert words in absent["bank-a"].cause
    assert made.sizes == {}
