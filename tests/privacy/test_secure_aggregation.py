"""Secure aggregation: what travels in a secure run, what clients refuse, and dropouts."""

import re
from dataclasses import dataclass, replace

import pytest
import torch

from fedloom.core.client import Client
from fedloom.core.facts import Facts, SecureTerms
from fedloom.core.message import flatten
from fedloom.core.method import Method
from fedloom.core.phase import averaged, phase, summed
from fedloom.core.server import RoundPolicy, Server
from fedloom.core.settings import setting
from fedloom.data.graph import Graph
from fedloom.data.partition import divide
from fedloom.data.synthetic import synthetic
from fedloom.engines.loop import Engine
from fedloom.errors import ConfigError, MessageError, Refusal
from fedloom.experiments.run import run
from fedloom.experiments.settings import RunSettings
from fedloom.privacy.choice import aggregation_for, responder_for
from fedloom.privacy.secure_aggregation import SUM_PHASES
from fedloom.privacy.secure_sum import Member, TooFew
from fedloom.privacy.sum_record import MOST_DRAWS

NAMES = tuple("abcdefgh")
SIZES = {name: 3 + 2 * k for k, name in enumerate(NAMES)}


@dataclass(frozen=True)
class Adder(Method):
    """Phases to add up."""

    scale: float = setting(1.0, "a factor")

    @summed
    @phase(x="float32[3]", count="int64[2]")
    def numbers(self, client: Client, shift=None):
        """Some of each kind, different for every client."""
        k = NAMES.index(client.name)
        return {
            "x": torch.tensor([k / 7, -k, 0.1]) * self.scale + (0 if shift is None else shift),
            "count": torch.tensor([k, -(2**40)]),
        }

    @phase(size="int64[]")
    def size(self, client: Client):
        """A weight."""
        return {"size": torch.tensor(SIZES[client.name])}

    @averaged(by="size")
    @phase(model="=model")
    def blend(self, client: Client, model):
        """To be averaged by size."""
        return {
            "model": {name: tensor + NAMES.index(client.name) for name, tensor in model.items()}
        }

    @averaged()
    @phase(model="=model")
    def mix(self, client: Client, model):
        """To be averaged."""
        return self.blend(client, model)

    @summed
    @phase(x="float32[3]", count="int64[2]")
    def mixed(self, client: Client):
        """The same numbers in another phase."""
        return self.numbers(client)

    @phase()
    def silent(self, client: Client):
        """Nothing comes back."""
        return {}

    def run(self, server):
        """Not used here."""


class Lossy(Engine):
    """Loses the replies of some clients to some phases, and shows what passed."""

    def __init__(self, method, clients, lost):
        super().__init__(method, clients)
        self.lost, self.seen = {phase: set(who) for phase, who in lost.items()}, []

    def call(self, phase, messages):
        replies = super().call(phase, messages)
        self.seen.append((phase, messages, replies))
        return {c: r for c, r in replies.items() if c not in self.lost.get(phase, ())}


TERMS = SecureTerms()


def make(terms=TERMS, names=NAMES, method=None, **lost):
    lot = torch.arange(6) % 3
    graph = Graph(
        torch.ones(6, 2),
        torch.zeros(2, 0, dtype=torch.int64),
        lot,
        3,
        train=lot == 0,
        val=lot == 1,
        test=lot == 2,
    )
    facts = Facts(2, 3, "node", names, ("gcn-2x8",) * len(names), secure=terms)
    method = method or Adder()
    clients = [Client(name, graph, facts, responder=responder_for(facts, name)) for name in names]
    engine = Lossy(method, clients, lost)
    policy, aggregation = RoundPolicy("local"), aggregation_for(facts)
    return Server(method, facts, engine.call, policy, None, aggregation), engine, method


def plain_sum(names):
    ks = [NAMES.index(name) for name in names]
    return torch.tensor([sum(k / 7 for k in ks), -sum(ks), 0.1 * len(ks)]), [
        sum(ks),
        -len(ks) * 2**40,
    ]


# ---- sums and means ----
@pytest.mark.parametrize(
    "terms",
    [
        SecureTerms(),
        SecureTerms(neighbours=4),
        SecureTerms(bits=32, range=100.0),
        SecureTerms(threshold=0.5),
    ],
)
def test_the_sum_is_the_plain_sum(terms):
    server, _, method = make(terms)
    if terms.bits == 32:
        with pytest.raises(MessageError, match="'count'"):  # 2^40 does not fit: named, not clipped
            server.sum(method.numbers)
        return
    total = server.sum(method.numbers)
    x, count = plain_sum(NAMES)
    assert torch.allclose(total["x"], x, atol=1e-6)
    assert total["x"].dtype == torch.float32
    assert total["count"].tolist() == count  # integers are exact


def test_weights_are_masked_too_and_give_the_weighted_mean():
    server, engine, method = make()
    model = {"w": torch.arange(4.0), "b": torch.zeros(())}
    mean = server.mean(method.blend, model=model)["model"]
    expected = sum(SIZES[n] * k for k, n in enumerate(NAMES)) / sum(SIZES.values())
    assert torch.allclose(mean["w"], torch.arange(4.0) + expected, atol=1e-6)
    assert mean["b"].item() == pytest.approx(expected)
    assert "size" not in {phase for phase, _, _ in engine.seen}
    assert server.mean(method.mix, model=model)["model"]["b"].item() == pytest.approx(3.5)


@pytest.mark.parametrize(
    ("lost", "left"),
    [
        ({"advertise_keys": "a"}, "bcdefgh"),
        ({"share_keys": "c"}, "abdefgh"),
        ({"numbers": "dh"}, "abcefg"),
        ({"confirm": "ab"}, NAMES),  # their vectors arrived
        ({"unmask": "ab"}, NAMES),
        ({"advertise_keys": "a", "numbers": "b"}, "cdefgh"),
    ],
)
def test_who_drops_out_is_left_out_and_the_rest_is_exact(lost, left):
    server, _, method = make(**lost)
    total = server.sum(method.numbers)
    assert total["count"].tolist() == plain_sum(left)[1]
    assert torch.allclose(total["x"], plain_sum(left)[0], atol=1e-6)


@pytest.mark.parametrize("stage", ["advertise_keys", "share_keys", "numbers", "confirm", "unmask"])
def test_too_many_dropouts_end_it_and_release_nothing(stage):
    server, _, method = make(**{stage: "abc"})  # 5 of 8 are left, 6 are needed
    before = server.history_hash
    with pytest.raises(TooFew, match="nothing was released"):
        server.sum(method.numbers)
    assert server.history_hash == before


def test_the_next_sum_goes_on_after_a_failed_one():
    server, engine, method = make(numbers="abc")
    with pytest.raises(TooFew):
        server.sum(method.numbers)
    engine.lost = {}
    assert server.sum(method.numbers)["count"].tolist() == plain_sum(NAMES)[1]


def test_part_of_the_clients_and_messages_of_their_own():
    server, _, method = make()
    assert (
        server.sum(method.numbers, clients=["b", "e", "g"])["count"].tolist() == plain_sum("beg")[1]
    )
    each = {name: {"shift": torch.tensor(float(k))} for k, name in enumerate("beg")}
    assert torch.allclose(
        server.sum(method.numbers, each=each)["x"], plain_sum("beg")[0] + 3, atol=1e-6
    )
    with pytest.raises(TooFew, match="2 parties"):
        server.sum(method.numbers, clients=["b", "e"])


def test_the_hash_is_of_what_was_asked_and_the_sum():
    one, other, different = (make(), make(), make(numbers="a"))
    for server, _, method in (one, other, different):
        server.sum(method.numbers)
    assert one[0].history_hash == other[0].history_hash != different[0].history_hash
    keys = [
        [r["keys"] for p, _, rs in e.seen if p == "advertise_keys" for r in rs.values()]
        for _, e, _ in (one, other)
    ]
    assert not any(
        torch.equal(a, b) for a, b in zip(*keys, strict=True)
    )  # fresh secrets, though the seed is the same


def test_values_out_of_range_are_an_error_that_names_the_tensor():
    server, _, _ = make(SecureTerms(range=5.0))
    with pytest.raises(MessageError, match=r"client 'g' in 'numbers': .*'x'.* ±5 .*secure_range"):
        server.sum(Adder().numbers)


# ---- what travels ----
def test_nothing_in_the_clear_but_rosters_keys_ciphertexts_and_pads():
    server, engine, method = make()
    server.sum(method.numbers, shift=torch.tensor(0.25))
    up = {
        (phase, name, str(t.dtype))
        for phase, _, rs in engine.seen
        for r in rs.values()
        for name, t in flatten(r).items()
    }
    assert up == {
        ("advertise_keys", "keys", "torch.uint8"),
        ("share_keys", "shares", "torch.uint8"),
        ("numbers", "masked", "torch.int64"),
        ("confirm", "signature", "torch.uint8"),
        ("unmask", "revealed", "torch.uint8"),
    }
    # Uniform over 64 bits, where the numbers themselves are below 2^45.
    assert (words_of(engine).double().abs() > 2**50).float().mean() > 0.9
    assert len(set(words_of(engine).flatten().tolist())) == words_of(engine).numel()


def words_of(engine):
    (replies,) = [replies for phase, _, replies in engine.seen if phase == "numbers"]
    return torch.stack([reply["masked"] for reply in replies.values()])


def test_without_pads_the_same_look_finds_the_numbers(monkeypatch):
    """The positive control of the test above."""
    monkeypatch.setattr(Member, "mask", lambda self, vector, shared: vector)
    server, engine, method = make()
    with pytest.raises(Refusal, match="confirm"):  # the stage before was skipped
        server.sum(method.numbers)
    words = words_of(engine)
    assert (words.double().abs() < 2**50).all()
    assert words[:, 0].tolist() == list(range(len(NAMES)))  # `count` comes first, in the clear


def test_the_ledger_books_the_key_exchange_apart_and_keys_of_an_evaluation_as_measuring(
    node_federation,
):
    result = run("fedavg", node_federation, model="gcn-2x8", rounds=2, secure=True)
    phases = result.traffic["phases"]
    assert set(phases) == {*SUM_PHASES, "train", "evaluate_sum"} - {"draw_graph"}
    size = sum(t.numel() for t in result.final_models["server"].values())
    clients = node_federation.num_clients
    assert phases["train"]["scalars_up"] == 2 * clients * (size + 1)  # the model, and its weight
    assert phases["advertise_keys"]["messages"] == 2 * 2 * clients
    assert result.traffic["measuring"]["messages"] == 2 * 5 * 2 * clients
    for entry in result.history:
        assert "clients" not in entry
    assert all(row["accuracy"] is None for row in result.per_client)


def test_scores_are_those_of_a_plain_run(node_federation):
    plain, secure = (
        run("local", node_federation, model="gcn-2x8", rounds=3, secure=secure, auc=True)
        for secure in (False, True)
    )
    for key in (
        "accuracy",
        "accuracy_mean",
        "f1_macro",
        "f1_macro_mean",
        "f1_weighted",
        "auc",
        "val_accuracy",
    ):
        assert secure.summary[key] == pytest.approx(plain.summary[key], abs=1e-7)
    blind = tuple(
        replace(g, val=torch.zeros_like(g.val)) if k else g
        for k, g in enumerate(node_federation.graphs)
    )
    one, other = (
        run("local", replace(node_federation, graphs=blind), model="gcn-2x8", rounds=1, secure=s)
        for s in (False, True)
    )
    assert other.summary["val_accuracy"] == pytest.approx(one.summary["val_accuracy"], abs=1e-7)


# ---- what clients refuse, whatever the server asks ----
def ask(engine, asked, /, client="a", **message):
    return engine.call(asked, {client: message})


def begin(server, engine, method, **changes):
    """The first request of a sum, as a server that may deviate sends it."""
    proposal = {
        "run": torch.zeros(16, dtype=torch.uint8),
        "number": torch.tensor(1),
        "round": torch.tensor(0),
        "phase": torch.tensor(list(b"numbers"), dtype=torch.uint8),
        "roster": torch.ones(len(NAMES), dtype=torch.bool),
        "threshold": torch.tensor(6),
        **changes,
    }
    return ask(engine, "advertise_keys", **proposal)


def test_a_sum_is_not_answered_in_the_clear():
    _, engine, _ = make()
    for name in ("numbers", "size"):
        with pytest.raises(Refusal, match=f"client 'a' refuses to answer '{name}' in the clear"):
            ask(engine, name)
    with pytest.raises(Refusal, match="'blend' in the clear"):
        ask(engine, "blend", model={"w": torch.zeros(1)})
    with pytest.raises(Refusal, match="in the clear"):
        ask(engine, "evaluate")
    assert ask(engine, "silent") == {"a": {}}


def test_key_phases_without_a_sum_are_refused():
    _, engine, _ = make()
    for name in ("share_keys", "unmask"):
        with pytest.raises(Refusal, match="no sum has begun"):
            ask(engine, name, keys=torch.zeros(1))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"threshold": torch.tensor(5)}, "threshold 5 of 8 is too low"),
        ({"threshold": torch.tensor(9)}, "more than the 8 members"),
        ({"roster": torch.tensor([True, True] + [False] * 6)}, "fewer than 3"),
        ({"roster": torch.tensor([False] + [True] * 7)}, "not in the roster"),
    ],
)
def test_bad_proposals_are_refused(changes, why):
    with pytest.raises(Refusal, match=why):
        begin(*make(), **changes)


def test_a_second_request_for_the_same_sum_is_refused():
    setting = make()
    begin(*setting)
    with pytest.raises(Refusal, match="client 'a' refuses: sum 1 was asked for before"):
        begin(*setting)
    begin(*setting, number=torch.tensor(2))
    begin(*setting, run=torch.ones(16, dtype=torch.uint8))  # another session


@pytest.mark.parametrize(
    "change",
    [
        {"number": torch.tensor(-1)},
        {"number": torch.tensor([1, 2])},
        {"round": torch.tensor(1.0)},
        {"run": torch.zeros(15, dtype=torch.uint8)},
    ],
)
def test_what_identifies_a_sum_must_be_valid(change):
    with pytest.raises(Refusal, match="what identifies the sum is not valid"):
        begin(*make(), **change)


def test_a_sum_that_began_for_one_phase_is_not_used_for_another():
    server, engine, method = make()
    call = engine.call

    def swap(phase, messages):
        return call("mixed" if phase == "numbers" else phase, messages)

    server._call = swap
    with pytest.raises(Refusal, match=r"refuses to answer 'mixed': the sum .* is of 'numbers'"):
        server.sum(method.numbers)


# ---- repeated sums ----
def test_a_sum_over_one_client_less_is_refused():
    """The difference of the two sums is what the missing client added."""
    server, engine, method = make()
    server.sum(method.numbers)
    engine.lost = {"numbers": {"h"}}
    with pytest.raises(Refusal, match="differ in fewer than 2 clients"):
        server.sum(method.numbers)
    engine.lost = {"numbers": {"g", "h"}}
    server.sum(method.numbers)
    engine.lost = {}
    with pytest.raises(Refusal, match="differ in fewer than 2 clients"):
        server.sum(method.numbers, clients=list("abcdefg"))


# Every field of every message that the server sends in a sum, and what a client says if it alone
# is told something else.
CHANGED = {
    ("advertise_keys", "run"): "has not signed the keys|the nonce of party",
    ("advertise_keys", "number"): "was asked for before",
    ("advertise_keys", "round"): "has not signed the keys|the nonce of party",
    ("advertise_keys", "phase"): "has not signed the keys|the nonce of party",
    ("advertise_keys", "roster"): "not in the roster|were not there a stage before",
    ("advertise_keys", "threshold"): "has not signed|is too low|more than the",
    ("draw_graph", "commitments"): "the commitment under its own name|the nonce of party",
    ("draw_graph", "answered"): "commitments of exactly|not among those",
    ("share_keys", "keys"): "has not signed the keys",
    ("share_keys", "answered"): "said to be gone|have revealed it|not among those",
    ("share_keys", "nonces"): "the nonce of party",
    ("numbers", "secure"): "not among those who shared|are said to have|around it",
    ("confirm", "survivors"): "not among those who survived|have signed these survivors",
    ("unmask", "ciphertexts"): "did not arrive as it was sent",
    ("unmask", "signatures"): "nothing: the others are enough",
}


def flipped(tensor, place):
    """Returns a tensor with one entry changed."""
    changed = tensor.clone()
    flat = changed.view(-1)
    entry = flat[place % flat.numel()]
    flat[place % flat.numel()] = ~entry if tensor.dtype == torch.bool else entry ^ 1
    return changed


@pytest.mark.parametrize("terms", [SecureTerms(), SecureTerms(neighbours=4)], ids=["all", "ring"])
@pytest.mark.parametrize(("stage", "field"), CHANGED)
def test_a_client_that_is_told_something_else_refuses(stage, field, terms):
    drawn = terms.neighbours > 0
    if not drawn and (stage == "draw_graph" or field == "nonces"):
        pytest.skip("no graph is drawn")
    outcomes = set()
    for place in (0, 1, 5, 40, 70, 100):
        server, engine, method = make(terms)
        call = engine.call

        def lying(phase, messages, call=call, place=place):
            if phase == stage:
                message = messages["a"]
                if field == "secure":
                    shared = flipped(message["secure"]["shared"], place)
                    told = {**message, "secure": {"shared": shared}}
                else:
                    told = {**message, field: flipped(message[field], place)}
                messages = {**messages, "a": told}
            return call(phase, messages)

        server._call = lying
        try:
            total = server.sum(method.numbers)["count"].tolist()
        except Refusal as error:
            outcomes.add("refused")
            assert re.search(CHANGED[stage, field], str(error)), str(error)  # noqa: PT017
        except MessageError:
            outcomes.add("failed")  # pads or shares that do not fit: nothing was released
        else:
            # One signature more or less does not matter. The sum is the right one.
            assert total == plain_sum(NAMES)[1]
            outcomes.add("right")
    assert outcomes == {"right"} if field == "signatures" else "refused" in outcomes


def test_a_client_does_not_open_a_sum_that_too_few_have_confirmed():
    server, engine, method = make()
    call = engine.call

    def lying(phase, messages):
        if phase == "unmask":  # four of seven: with its own, five of the six that are needed
            rows = torch.arange(7)[:, None] < 4
            told = messages["a"]["signatures"] * rows
            messages = {**messages, "a": {**messages["a"], "signatures": told}}
        return call(phase, messages)

    server._call = lying
    with pytest.raises(Refusal, match="5 of the 8 parties around it have signed these survivors"):
        server.sum(method.numbers)


def test_a_graph_that_is_drawn_again_and_again_is_refused():
    """Every failed draw is another graph that a server could choose."""
    server, engine, method = make(SecureTerms(0.5, neighbours=4), share_keys="abcdefgh")
    for _ in range(MOST_DRAWS):
        with pytest.raises(TooFew):
            server.sum(method.numbers)
    with pytest.raises(Refusal, match="a server could choose among their graphs"):
        server.sum(method.numbers)
    engine.lost = {}
    server.round = 1
    server.sum(method.numbers)  # of another round


def test_a_finished_sum_cannot_be_unmasked_again_for_the_other_kind_of_share():
    server, engine, method = make()
    server.sum(method.numbers)
    seen = {phase: messages["a"] for phase, messages, _ in engine.seen}
    fewer = {"survivors": seen["confirm"]["survivors"] & (torch.arange(8) != 3)}
    for stage, again in (("unmask", seen["unmask"]), ("confirm", fewer)):
        with pytest.raises(Refusal, match="no sum has begun"):
            ask(engine, stage, **again)


def test_secrets_are_never_part_of_a_checkpoint():
    server, engine, method = make()
    begin(server, engine, method)
    assert not flatten(engine.snapshot())


# ---- configuration ----
def test_a_method_that_needs_single_replies_is_refused_with_the_phase(node_federation):
    with pytest.raises(
        ConfigError, match=r"run.secure: this method asks for every client's own answer to 'train'"
    ):
        run("scaffold", node_federation, model="gcn-2x8", rounds=1, secure=True)


@pytest.mark.parametrize("settings", [{"clients": 2}, {"clients": 5, "participation": 0.4}])
def test_too_few_clients_are_refused_before_anything_runs(settings):
    federation = divide(
        synthetic(nodes=60, classes=2, seed=0), settings.pop("clients"), "random", 0
    )
    with pytest.raises(ConfigError, match=r"run\.secure needs at least 3 clients in every sum"):
        run("fedavg", federation, model="gcn-2x8", rounds=1, secure=True, **settings)


def test_settings_are_checked_by_name():
    for key, value in (
        ("secure_threshold", 0.4),
        ("secure_bits", 48),
        ("secure_range", 0.0),
        ("secure_neighbours", -1),
        ("secure_cohort", 1.1),
        ("secure_apart", 0),
    ):
        with pytest.raises(ConfigError, match=key):
            RunSettings(**{key: value})
    assert RunSettings().terms is None
    terms = RunSettings(secure=True, secure_neighbours=6).terms
    assert terms == SecureTerms(neighbours=6, cohort=1.0)  # as the quorum says
    assert RunSettings(secure=True, secure_cohort=0.5).terms.cohort == 0.5
    assert RunSettings(secure=True, quorum=0.8, participation=0.5).terms.cohort == 0.4


def test_shapes_that_differ_cannot_be_added(node_federation):
    server, _, method = make()
    each = {name: {"model": {"w": torch.zeros(1 + k)}} for k, name in enumerate(NAMES)}
    with pytest.raises(ConfigError, match="differ in shape"):
        server.mean(method.mix, each=each)


def test_a_broken_secure_run_resumes_to_the_same_bits(node_federation, tmp_path):
    class Killed(BaseException):
        pass

    def die(entry):
        if entry["round"] == 2:
            raise Killed

    settings = {
        "model": "gcn-2x8",
        "rounds": 3,
        "secure": True,
        "checkpoint_every": 1,
        "participation": 0.8,
    }
    unbroken = run("fedavg", node_federation, out=tmp_path / "one", **settings)
    with pytest.raises(Killed):
        run("fedavg", node_federation, out=tmp_path / "two", callbacks=die, **settings)
    resumed = run("fedavg", node_federation, out=tmp_path / "two", resume=True, **settings)
    assert resumed.summary["history_hash"] == unbroken.summary["history_hash"]
